"""What a user is told when a bucket cannot be used: which bucket, what was refused, and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from s3_events import Wire
from s3_servers import S3Server, free_port

from strongroom.errors import (
    AccessDeniedError,
    ConfigError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from strongroom.stores import S3Options, S3Store, open_store
from strongroom.stores.s3.calling import Patience
from strongroom.stores.s3.failures import GaveUpError, TryFailedError, explain
from strongroom.stores.s3.location import Location

# Roots


@pytest.mark.parametrize(
    ("uri", "bucket", "prefix", "told"),
    (
        ("s3://bucket", "bucket", "", "s3://bucket"),
        ("s3://bucket/", "bucket", "", "s3://bucket"),
        ("S3://bucket/runs/a/", "bucket", "runs/a/", "s3://bucket/runs/a"),
        ("s3://my.bucket_1/a%20b c", "my.bucket_1", "a%20b c/", "s3://my.bucket_1/a%20b c"),
        (
            "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/mine/runs",
            "arn:aws:s3:eu-west-1:123456789012:accesspoint/mine",
            "runs/",
            "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/mine/runs",
        ),
    ),
)
def test_a_uri_names_a_bucket_and_a_prefix(uri: str, bucket: str, prefix: str, told: str) -> None:
    where = Location.parse(uri)
    assert (where.bucket, where.prefix, where.uri) == (bucket, prefix, told)
    assert Location.parse(where.uri) == where


@pytest.mark.parametrize(
    ("uri", "told"),
    (
        ("s3://", "names no bucket"),
        ("s3:///a", "names no bucket"),
        ("s3://a", "names no bucket"),
        ("s3://buck et/a", "names no bucket"),
        ("s3://bucket/a//b", "empty"),
        ("s3://bucket/a/../b", "'..'"),
        ("s3://bucket/a\nb", "not printable"),
        ("s3://bucket/" + "x/" * 300, "at most 500"),
        ("https://bucket/a", "s3://BUCKET/PREFIX"),
    ),
)
def test_a_uri_that_names_none_is_refused(uri: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Location.parse(uri)


@pytest.mark.parametrize(
    ("options", "told"),
    (
        ({"part_bytes": 1 << 20}, "part_bytes lies between 5242880"),
        ({"part_bytes": "16MiB"}, "part_bytes"),
        ({"parts_in_flight": 0}, "parts_in_flight"),
        ({"read_bytes": 1000}, "read_bytes"),
        ({"read_bytes": (1 << 20) + 1}, "multiple"),
        ({"tries": True}, "tries"),
        ({"read_timeout_s": 0}, "read_timeout_s"),
        ({"addressing_style": "sideways"}, "addressing_style"),
        ({"endpoint_url": "minio:9000"}, "https://HOST"),
        ({"endpoint_url": "https://"}, "https://HOST"),
        ({"endpoint_url": "https://user:secret@host"}, "no user or password"),
    ),
)
def test_options_are_checked_when_they_are_built(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        S3Options(**options)
    assert "secret" not in str(error.value)


# How long one goes on


def _patience(slept: list[float], **changes: Any) -> Patience:
    clock = {"now": 0.0}

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock["now"] += seconds

    settings: dict[str, Any] = {"tries": 5, "patience_s": 100.0} | changes
    return Patience(sleep=sleep, monotonic=lambda: clock["now"], draw=lambda least, most: most, **settings)


def _fail(**fields: Any) -> Any:
    def request() -> None:
        raise TryFailedError("told", **fields)

    return request


def test_tries_are_bounded_in_number_and_in_time() -> None:
    slept: list[float] = []
    with pytest.raises(GaveUpError) as error:
        _patience(slept).call(_fail(status=503))
    assert error.value.tries == 5
    assert slept == [0.1, 0.2, 0.4, 0.8]
    slept.clear()
    with pytest.raises(GaveUpError) as error:
        _patience(slept, tries=100, patience_s=3.0).call(_fail(status=503))
    assert sum(slept) <= 3.0
    assert error.value.tries == 5


def test_no_pause_is_longer_than_ten_seconds() -> None:
    slept: list[float] = []
    with pytest.raises(GaveUpError):
        _patience(slept, tries=12, patience_s=1000.0).call(_fail(status=500))
    assert slept[-1] == 10.0


def test_what_was_given_up_is_not_tried_again() -> None:
    with pytest.raises(GaveUpError) as error:
        _patience([]).call(_fail(status=503), is_given_up=lambda: True)
    assert error.value.tries == 1


@pytest.mark.parametrize(
    ("fields", "may_have_landed"),
    (
        ({"status": 500, "code": "InternalError"}, True),
        ({"status": 503, "code": "SlowDown"}, True),
        ({"status": 409, "code": "ConditionalRequestConflict"}, False),
        ({"status": 429}, False),
        ({"status": 507, "code": "InsufficientStorage"}, False),
        ({"status": 403, "code": "AccessDenied"}, False),
        ({"code": "AnswerLost"}, True),
        ({"code": "Unreachable", "was_sent": False}, False),
    ),
)
def test_an_answer_may_have_been_lost_wherever_somebody_else_may_have_answered(
    fields: dict[str, Any], may_have_landed: bool
) -> None:
    with pytest.raises(GaveUpError) as error:
        _patience([]).call(_fail(**fields))
    assert error.value.may_have_landed is may_have_landed


# What is told


@pytest.mark.parametrize(
    ("status", "code", "kind", "told"),
    (
        (404, "NoSuchBucket", StoreError, "there is no bucket bucket at https://s3"),
        (404, "NoSuchKey", ObjectNotFoundError, "s3://bucket/run/key does not exist"),
        (301, "PermanentRedirect", StoreError, "S3Options.region_name, AWS_DEFAULT_REGION"),
        (400, "AuthorizationHeaderMalformed", StoreError, "another region"),
        (403, "AccessDenied", AccessDeniedError, "allow this identity s3:PutObject"),
        (403, "InvalidAccessKeyId", AccessDeniedError, "does not know this access key"),
        (403, "SignatureDoesNotMatch", AccessDeniedError, "AWS_SECRET_ACCESS_KEY"),
        (403, "RequestTimeTooSkewed", AccessDeniedError, "clock is off"),
        (400, "ExpiredToken", AccessDeniedError, "have expired: renew them"),
        (400, "InvalidToken", AccessDeniedError, "AWS_SESSION_TOKEN"),
        (0, "NoCredentials", AccessDeniedError, "AWS_PROFILE"),
        (403, "QuotaExceeded", StoreFullError, "raise the quota"),
        (507, "XMinioStorageFull", StoreFullError, "raise the quota"),
        (412, "PreconditionFailed", ObjectExistsError, "never overwritten"),
        (501, "NotImplemented", StoreError, "conditional writes"),
        (503, "SlowDown", StoreUnavailableError, "3 tries: SlowDown 503"),
        (0, "Unreadable", StoreUnavailableError, "does not speak S3"),
        (0, "Tls", StoreUnavailableError, "AWS_CA_BUNDLE"),
        (0, "Unreachable", StoreUnavailableError, "AWS_ENDPOINT_URL_S3"),
        (400, "EntityTooLarge", StoreError, "refused s3:PutObject"),
    ),
)
def test_each_failure_says_what_to_do(status: int, code: str, kind: type[StoreError], told: str) -> None:
    failure = TryFailedError("what the server says", status=status, code=code)
    where = Location.parse("s3://bucket/run")
    given_up = GaveUpError(failure, tries=3, was_lost=False)
    error = explain(given_up, "put_object", "key", where, "https://s3.example")
    assert type(error) is kind
    assert told in str(error)


def test_no_credentials_are_told_as_such(monkeypatch: pytest.MonkeyPatch, moto_s3: S3Server) -> None:
    for name, value in moto_s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(AccessDeniedError, match="boto3 finds no credentials here"):
        open_store("s3://bucket/run").list_names("")


def test_an_endpoint_that_nobody_listens_at_is_named(moto_s3: S3Server) -> None:
    pauses: list[float] = []
    store = S3Store(
        "s3://bucket/run",
        options=S3Options(endpoint_url=f"http://127.0.0.1:{free_port()}", tries=3),
        session=moto_s3.session,
        sleep=pauses.append,
    )
    with pytest.raises(
        StoreUnavailableError, match=r"http://127.0.0.1:[0-9]+ could not be reached \(3 tries"
    ):
        store.put_if_absent("COMMIT", b"x")
    assert len(pauses) == 2


def test_a_server_that_speaks_no_tls_is_told_with_what_certificates_are_for(moto_s3: S3Server) -> None:
    store = S3Store(
        "s3://bucket/run",
        options=S3Options(endpoint_url=f"https://127.0.0.1:{moto_s3.port}"),
        session=moto_s3.session,
    )
    with pytest.raises(StoreUnavailableError, match="AWS_CA_BUNDLE"):
        store.list_names("")


def test_a_profile_that_is_not_there_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    with pytest.raises(ConfigError, match="absent-profile"):
        S3Store("s3://bucket/run", options=S3Options(profile_name="absent-profile"))


def test_an_expired_credential_is_read_once_more(monkeypatch: pytest.MonkeyPatch, moto_s3: S3Server) -> None:
    for name, value in moto_s3.environment.items():
        monkeypatch.setenv(name, value)
    bucket = moto_s3.make_bucket()
    wire = Wire(moto_s3)
    store = open_store(f"s3://{bucket}/run")
    assert isinstance(store, S3Store)
    first = store._bucket.client()
    first._client.meta.events.register("before-send.s3", wire._before)
    wire.answer("PutObject", 400, "ExpiredToken")
    assert store.put_if_absent("COMMIT", b"x")
    assert store._bucket.client() is not first


def test_the_variables_of_boto3_say_where_a_plain_root_is(
    monkeypatch: pytest.MonkeyPatch, moto_s3: S3Server
) -> None:
    for name, value in moto_s3.environment.items():
        monkeypatch.setenv(name, value)
    bucket = moto_s3.make_bucket()
    open_store(f"s3://{bucket}/run").put("object", b"x")
    assert moto_s3.keys(bucket) == ["run/object"]


# Processes


def _run(program: str, server: S3Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        env={"PATH": os.environ["PATH"], **server.environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_stores_are_imported_without_boto3_and_a_missing_one_is_named(moto_s3: S3Server) -> None:
    program = """
import sys
import strongroom.stores
assert not any(name.partition(".")[0] in ("boto3", "botocore") for name in sys.modules)
sys.modules["boto3"] = None
try:
    strongroom.stores.open_store("s3://bucket/run")
except strongroom.stores.open.ConfigError as error:
    print(error)
"""
    ran = _run(program, moto_s3)
    assert ran.returncode == 0, ran.stderr
    assert "pip install 'strongroom[s3]'" in ran.stdout


def test_a_forked_child_has_a_client_of_its_own_and_an_open_writer_keeps_nobody(moto_s3: S3Server) -> None:
    program = """
import os, sys, threading, time
from strongroom.stores import open_store
store = open_store(sys.argv[1])
store.put("parent", b"x")
first = store._bucket.client()
writer = store.open_writer("unfinished", length_bytes=40 << 20)
writer.write(bytes(17 << 20))
while threading.active_count() > 1:
    time.sleep(0.01)
child = os.fork()
if child == 0:
    writer.abort()
    ok = store._bucket.client() is not first and store.list_names("") == ["parent"]
    store.put("child", b"x")
    os._exit(0 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert store.read("child", limit_bytes=1) == b"x"
print("at its end")
"""
    bucket = moto_s3.make_bucket()
    ran = _run(program, moto_s3, f"s3://{bucket}/run")
    assert ran.returncode == 0, ran.stderr
    assert "at its end" in ran.stdout
    # The child did not abort what is its parent's.
    assert moto_s3.uploads(bucket) == ["run/unfinished"]


def test_a_writer_of_the_parents_is_refused_in_a_forked_child_at_once(moto_s3: S3Server) -> None:
    program = """
import os, sys
from strongroom.errors import StoreError
from strongroom.stores import S3Options, S3Store
store = S3Store(sys.argv[1], options=S3Options(parts_in_flight=2, part_bytes=5 << 20))
writer = store.open_writer("object", length_bytes=20 << 20)
writer.write(bytes(12 << 20))
child = os.fork()
if child == 0:
    refused = 0
    for act in (lambda: writer.write(bytes(8 << 20)), writer.finish):
        try:
            act()
        except StoreError as error:
            refused += "before a fork" in str(error)
    os._exit(refused)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
writer.write(bytes(8 << 20))
writer.finish()
"""
    bucket = moto_s3.make_bucket()
    ran = _run(program, moto_s3, f"s3://{bucket}/run")
    assert ran.returncode == 0, ran.stderr
    assert moto_s3.keys(bucket) == ["run/object"]


# Secrets


@pytest.mark.parametrize(
    "url", ("http://ann:s3cret@proxy:3128", "ann:s3cret@proxy:3128", "//ann:s3/c@ret@proxy")
)
def test_no_password_of_a_proxy_is_shown(url: str) -> None:
    options = S3Options(proxies={"https": url}, tries=3)
    assert options.proxies == {"https": url}
    shown = repr(options)
    assert "***@proxy" in shown
    assert "tries=3" in shown
    assert "ann" not in shown
    assert "cret" not in shown


def test_no_password_of_an_endpoint_is_told() -> None:
    for url in ("ftp://ann:s3cret@host", "https://ann:s3cret@host"):
        with pytest.raises(ConfigError) as told:
            S3Options(endpoint_url=url)
        assert "s3cret" not in str(told.value)
