"""A commit in a bucket: created once, whoever loses which answer, by an identity that may only write."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from s3_events import Wire
from s3_servers import S3Server

from strongroom import Checkpointer
from strongroom.errors import (
    AccessDeniedError,
    ConfigError,
    OutcomeUnknownError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from strongroom.stores import S3Options, S3Store

MIB = 1 << 20


@pytest.fixture
def wire(moto_s3: S3Server) -> Wire:
    return Wire(moto_s3)


@pytest.fixture
def bucket(moto_s3: S3Server) -> str:
    return moto_s3.make_bucket()


def _raw(wire: Wire, bucket: str, key: str) -> bytes:
    return bytes(wire.server.behind.get_object(Bucket=bucket, Key=f"run/{key}")["Body"].read())


def _write(store: S3Store, key: str, data: bytes) -> None:
    with store.open_writer(key, length_bytes=len(data)) as writer:
        writer.write(data)
        writer.finish()


def test_whoever_may_only_write_can_save(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket, part_bytes=5 * MIB)
    store.put("small", b"x")
    _write(store, "data", bytes(5 * MIB))
    _write(store, "large", bytes(11 * MIB))
    store.make_durable("")
    assert store.put_if_absent("COMMIT", b"{}")
    assert wire.operations == {
        "PutObject": 3,
        "CreateMultipartUpload": 1,
        "UploadPart": 3,
        "CompleteMultipartUpload": 1,
    }
    for operation, headers in wire.requests:
        if operation in ("PutObject", "CompleteMultipartUpload"):
            assert headers["If-None-Match"] == "*"


def test_a_creation_whose_answer_was_lost_is_known_as_ours(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket)
    wire.lose_answers("PutObject", 2)
    assert store.put_if_absent("COMMIT", b"ours") is True
    assert wire.operations == {"PutObject": 3, "HeadObject": 1}
    ids = {headers["x-amz-meta-strongroom-write"] for op, headers in wire.requests if op == "PutObject"}
    assert len(ids) == 1


def test_somebody_elses_is_not_taken_for_ours_after_a_lost_answer(wire: Wire, bucket: str) -> None:
    wire.lose_requests("PutObject")
    Wire(wire.server).store(bucket).put("COMMIT", b"theirs")
    assert wire.store(bucket).put_if_absent("COMMIT", b"ours") is False
    assert _raw(wire, bucket, "COMMIT") == b"theirs"


def test_equal_bytes_of_somebody_else_are_not_ours_either(wire: Wire, bucket: str) -> None:
    wire.lose_requests("PutObject")
    Wire(wire.server).store(bucket).put("launches/000001.json", b"same")
    assert wire.store(bucket).put_if_absent("launches/000001.json", b"same") is False


def test_where_nobody_may_look_a_lost_answer_stays_open(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket)
    wire.lose_answers("PutObject")
    wire.answer("HeadObject", 403, "AccessDenied")
    assert store.put_if_absent("COMMIT", b"ours") is False
    # A file of an attempt is written by nobody else.
    wire.lose_answers("PutObject")
    wire.answer("HeadObject", 403, "AccessDenied")
    store.put("data/object", b"ours")
    assert _raw(wire, bucket, "data/object") == b"ours"


def test_a_look_that_fails_leaves_the_outcome_unknown_and_says_so(wire: Wire, bucket: str) -> None:
    wire.lose_answers("PutObject")
    wire.answer("HeadObject", 503, "SlowDown", count=10)
    with pytest.raises(StoreUnavailableError, match="s3:GetObject failed"):
        wire.store(bucket).put("data/object", b"x")
    wire.lose_answers("PutObject")
    wire.answer("HeadObject", 503, "SlowDown", count=10)
    with pytest.raises(OutcomeUnknownError, match="may or may not be this call's"):
        wire.store(bucket).put_if_absent("COMMIT", b"x")


def test_a_creation_that_never_hears_back_is_unknown(wire: Wire, bucket: str) -> None:
    wire.lose_answers("PutObject")
    wire.lose_requests("PutObject", 9)
    with pytest.raises(OutcomeUnknownError, match="may stand or not"):
        wire.store(bucket).put_if_absent("COMMIT", b"ours")
    assert _raw(wire, bucket, "COMMIT") == b"ours"
    assert wire.operations == {"PutObject": 10}


def test_a_refusal_is_no_unknown_outcome(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket)
    wire.answer("PutObject", 403, "AccessDenied")
    with pytest.raises(AccessDeniedError, match="s3:PutObject was refused"):
        store.put_if_absent("COMMIT", b"x")
    wire.answer("PutObject", 403, "QuotaExceeded")
    with pytest.raises(StoreFullError, match="raise the quota"):
        store.put_if_absent("COMMIT", b"x")
    wire.answer("PutObject", 507, "InsufficientStorage")
    with pytest.raises(StoreFullError):
        store.put("object", b"x")
    assert wire.server.keys(bucket) == []


def test_a_second_creation_is_refused_without_a_look(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket)
    assert store.put_if_absent("run.json", b"{}") is True
    wire.forget()
    assert store.put_if_absent("run.json", b"{}") is False
    assert wire.operations == {"PutObject": 1}


def test_a_server_that_ignores_conditions_is_found_before_a_save(wire: Wire, bucket: str) -> None:
    def ignore(request: object) -> None:
        del request.headers["If-None-Match"]  # type: ignore[attr-defined]

    wire.change("PutObject", ignore)
    with (
        pytest.raises(ConfigError, match="ignores conditional writes"),
        Checkpointer(wire.store(bucket)) as checkpointer,
    ):
        checkpointer.save(1, {"weights": torch.zeros(2)}).result()
    assert not any("COMMIT" in key for key in wire.server.keys(bucket))


@pytest.mark.parametrize(
    ("status", "code"),
    (
        (503, "SlowDown"),
        (500, "InternalError"),
        (502, "BadGateway"),
        (429, "TooManyRequests"),
        (409, "ConditionalRequestConflict"),
        (400, "RequestTimeout"),
    ),
)
def test_what_passes_is_tried_again_with_jitter_and_the_same_bytes(
    wire: Wire, bucket: str, status: int, code: str
) -> None:
    wire.answer("PutObject", status, code, count=3)
    assert wire.store(bucket).put_if_absent("COMMIT", b"ours") is True
    assert _raw(wire, bucket, "COMMIT") == b"ours"
    assert wire.bounds == [0.1, 0.2, 0.4]
    assert wire.pauses == [0.05, 0.1, 0.2]
    digests = {headers["x-amz-checksum-sha256"] for _, headers in wire.requests}
    assert len(digests) == 1


def test_what_does_not_pass_is_not_tried_again(wire: Wire, bucket: str) -> None:
    wire.answer("PutObject", 400, "InvalidRequest")
    with pytest.raises(StoreError, match="refused s3:PutObject"):
        wire.store(bucket).put("object", b"x")
    assert wire.operations == {"PutObject": 1}


# Objects in parts


@pytest.mark.parametrize("operation", ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"))
@pytest.mark.parametrize("how", ("lose_answers", "lose_requests"))
def test_an_object_in_parts_gets_there_whatever_is_lost(
    wire: Wire, bucket: str, operation: str, how: str
) -> None:
    data = bytes(range(256)) * (11 * MIB // 256)
    lose: Callable[..., None] = getattr(wire, how)
    lose(operation, 2)
    _write(wire.store(bucket, part_bytes=5 * MIB), "large", data)
    assert _raw(wire, bucket, "large") == data
    assert wire.server.uploads(bucket) == []


def test_an_upload_that_something_aborted_is_no_object(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket, part_bytes=5 * MIB)
    with store.open_writer("large", length_bytes=6 * MIB) as writer:
        writer.write(bytes(6 * MIB))
        wire.answer("CompleteMultipartUpload", 500, "InternalError")
        wire.answer("CompleteMultipartUpload", 404, "NoSuchUpload")
        wire.answer("HeadObject", 403, "AccessDenied")
        with pytest.raises(StoreError, match="its upload is gone"):
            writer.finish()
    assert wire.server.keys(bucket) == []


def test_an_empty_object_that_only_tells_whether_one_stands_is_never_taken_for_it(
    wire: Wire, bucket: str
) -> None:
    store = wire.store(bucket, part_bytes=5 * MIB)
    with store.open_writer("large", length_bytes=6 * MIB) as writer:
        writer.write(bytes(6 * MIB))
        wire.answer("CompleteMultipartUpload", 500, "InternalError")
        wire.answer("CompleteMultipartUpload", 404, "NoSuchUpload")
        wire.answer("HeadObject", 403, "AccessDenied", count=2)
        wire.lose_answers("PutObject")
        with pytest.raises(StoreUnavailableError, match="could not be found out"):
            writer.finish()
    assert _raw(wire, bucket, "large") == b""


def test_an_object_that_an_unheard_completion_made_is_known_by_writing_alone(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket, part_bytes=5 * MIB)
    with store.open_writer("large", length_bytes=6 * MIB) as writer:
        writer.write(bytes(6 * MIB))
        wire.lose_answers("CompleteMultipartUpload")
        wire.change("CompleteMultipartUpload", _answer_the_next_one(wire))
        wire.answer("HeadObject", 403, "AccessDenied")
        writer.finish()
    assert len(_raw(wire, bucket, "large")) == 6 * MIB


def _answer_the_next_one(wire: Wire) -> Callable[[object], None]:
    def change(_: object) -> None:
        wire.answer("CompleteMultipartUpload", 404, "NoSuchUpload")

    return change


def test_an_object_in_parts_is_never_overwritten(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket, part_bytes=5 * MIB)
    store.put("large", b"first")
    with pytest.raises(StoreError, match="never overwritten"):
        _write(store, "large", bytes(6 * MIB))
    assert _raw(wire, bucket, "large") == b"first"
    assert wire.server.uploads(bucket) == []


def test_an_object_whose_writer_was_left_in_doubt_is_removed_with_it(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket, part_bytes=5 * MIB)
    wire.lose_answers("PutObject")
    wire.lose_requests("PutObject", 9)
    with pytest.raises(StoreUnavailableError):
        _write(store, "small", b"x")
    wire.lose_answers("CompleteMultipartUpload")
    wire.lose_requests("CompleteMultipartUpload", 9)
    with pytest.raises(StoreUnavailableError):
        _write(store, "large", bytes(6 * MIB))
    assert wire.server.keys(bucket) == []


# A creation that must be over by some time


class Hands:
    """A clock that stands still until somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def _slow_store(wire: Wire, bucket: str, hands: Hands, **options: Any) -> S3Store:
    return S3Store(
        f"s3://{bucket}/run",
        options=S3Options(**{"endpoint_url": wire.server.endpoint_url, "tries": 100, **options}),
        session=wire.session,
        sleep=hands.sleep,
        monotonic=lambda: hands.now,
        draw=lambda least, most: most,
    )


def test_within_a_deadline_a_creation_is_as_without(wire: Wire, bucket: str) -> None:
    store = _slow_store(wire, bucket, Hands())
    assert store.put_if_absent_within("COMMIT", b"ours", 5.0) is True
    assert store.put_if_absent_within("COMMIT", b"theirs", 500.0) is False
    assert _raw(wire, bucket, "COMMIT") == b"ours"
    wire.lose_answers("PutObject")
    assert store.put_if_absent_within("OTHER", b"ours", 5.0) is True


def test_nothing_is_sent_after_the_deadline_of_a_creation(wire: Wire, bucket: str) -> None:
    hands = Hands()
    sent: list[float] = []
    wire.change("PutObject", lambda request: sent.append(hands.now))
    wire.answer("PutObject", 503, "SlowDown", count=100)
    with pytest.raises(OutcomeUnknownError, match="SlowDown"):
        _slow_store(wire, bucket, hands).put_if_absent_within("COMMIT", b"x", 3.0)
    assert len(sent) > 3
    assert max(sent) < 1003.0
    assert hands.now < 1003.0, "it does not sleep on for nothing either"


def test_a_creation_that_waited_for_credentials_too_long_is_not_sent(wire: Wire, bucket: str) -> None:
    hands = Hands()
    wire.session.events.register("before-sign.s3", lambda **_: hands.sleep(4.0))
    with pytest.raises(StoreUnavailableError, match=r"was not sent any more .*longer deadline") as caught:
        _slow_store(wire, bucket, hands).put_if_absent_within("COMMIT", b"x", 3.0)
    assert not isinstance(caught.value, OutcomeUnknownError)
    assert wire.server.keys(bucket) == []


def test_a_creation_whose_time_is_over_is_not_sent_at_all(wire: Wire, bucket: str) -> None:
    with pytest.raises(StoreUnavailableError, match="its time was over"):
        _slow_store(wire, bucket, Hands()).put_if_absent_within("COMMIT", b"x", 0.0)
    assert wire.operations == {}


def test_a_creation_that_nobody_can_have_heard_of_is_no_unknown_outcome(wire: Wire, bucket: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint_url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        store = _slow_store(wire, bucket, Hands(), endpoint_url=endpoint_url)
        with pytest.raises(StoreUnavailableError, match="could not be reached") as caught:
            store.put_if_absent_within("COMMIT", b"x", 3.0)
    assert not isinstance(caught.value, OutcomeUnknownError)


def test_a_server_that_never_answers_is_not_waited_for_beyond_the_deadline(wire: Wire, bucket: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = S3Store(
            f"s3://{bucket}/run",
            options=S3Options(endpoint_url=f"http://127.0.0.1:{silent.getsockname()[1]}"),
            session=wire.session,
        )
        begun = time.monotonic()
        with pytest.raises(OutcomeUnknownError, match="may stand or not"):
            store.put_if_absent_within("COMMIT", b"x", 0.3)
        # One wait for an answer, by the options alone, is longer.
        assert time.monotonic() - begun < store.options.read_timeout_s


# Credentials that cannot be renewed


def test_credentials_that_end_between_two_tries_leave_the_outcome_unknown(wire: Wire, bucket: str) -> None:
    """COMMIT has landed by then, and was not heard of."""
    for refused in (AccessDeniedError("they were let go of"), StoreUnavailableError("STS is out of reach")):
        renewals = iter((None, refused, *[refused] * 20))
        wire.session = wire.server.new_session()
        wire.session.events.register("needs-retry.s3", wire._after)
        wire.session.events.register("before-sign.s3", lambda renewals=renewals, **_: _renew(renewals))
        wire.lose_answers("PutObject")
        key = f"COMMIT-{type(refused).__name__}"
        with pytest.raises(OutcomeUnknownError, match=str(refused)):
            wire.store(bucket).put_if_absent(key, b"ours")
        assert _raw(wire, bucket, key) == b"ours"


def _renew(renewals: Iterator[Exception | None]) -> None:
    error = next(renewals)
    if error is not None:
        raise error


@pytest.mark.parametrize(
    ("refused", "kind"),
    (
        (AccessDeniedError("let go"), AccessDeniedError),
        (ConfigError("no such role"), AccessDeniedError),
        (StoreUnavailableError("STS is gone"), StoreUnavailableError),
    ),
)
def test_credentials_that_were_never_had_are_no_unknown_outcome(
    wire: Wire, bucket: str, refused: Exception, kind: type[StoreError]
) -> None:
    wire.session.events.register("before-sign.s3", lambda **_: _renew(iter((refused,))))
    with pytest.raises(kind, match=f"no credentials for s3:PutObject now: {refused}") as told:
        wire.store(bucket).put_if_absent("COMMIT", b"x")
    assert not isinstance(told.value, OutcomeUnknownError)


def test_credentials_that_are_back_in_time_are_used(wire: Wire, bucket: str) -> None:
    renewals: Iterator[Exception | None] = itertools.chain(
        (StoreUnavailableError("STS is gone"),), itertools.repeat(None)
    )
    wire.session.events.register("before-sign.s3", lambda **_: _renew(renewals))
    assert wire.store(bucket).put_if_absent("COMMIT", b"x") is True
