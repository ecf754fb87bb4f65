"""A log in a bucket: by whoever may only create, locked against its owner, and while the server is away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recorders import Place, act, soon
from s3_identities import Enforcing, enforcing, statement
from s3_servers import S3Server, ministack_s3, moto_s3
from wire_proxy import Fault, WireProxy

from strongroom.errors import AccessDeniedError, AuditError
from strongroom.stores.s3 import S3Options, S3Store
from strongroom_security.auditlog.format.segments import read_segment

__all__ = ["enforcing", "ministack_s3", "moto_s3"]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def quick(endpoint_url: str) -> S3Options:
    return S3Options(endpoint_url=endpoint_url, addressing_style="path", tries=1, patience_s=0.2)


def events_in(client: Any, bucket: str) -> list[int]:
    numbers = []
    listed = client.list_objects_v2(Bucket=bucket, Prefix="log/").get("Contents", [])
    for entry in sorted(listed, key=lambda each: each["Key"]):
        data = client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()
        reading = read_segment(entry["Key"].removeprefix("log/"), data)
        assert reading.problems == ()
        numbers += [value["strongroom"]["details"]["number"] for _, value in reading.events()]
    return numbers


def in_bucket(server: S3Server, bucket: str, url: str | None = None) -> dict[str, Any]:
    options = quick(url or server.endpoint_url)
    return {
        "sink": f"s3://{bucket}/log",
        "open_sink": lambda: S3Store(f"s3://{bucket}/log", options=options, session=server.session),
    }


def test_a_server_that_is_away_refuses_reads_and_gets_all_when_it_is_back(
    place: Place, moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strongroom_security.auditlog.recording.sending._LONGEST_S", 0.1)
    bucket = moto_s3.make_bucket()
    with WireProxy(moto_s3.port) as wire:
        where = in_bucket(moto_s3, bucket, wire.endpoint_url)
        with place.auditor(**where, intent_s=1, seal_s=0.01) as auditor:
            wire.arm(Fault.UNAVAILABLE, lasting=True)
            for number in range(5):
                auditor.record(act(number))
            with pytest.raises(AuditError, match="did not take it within 1 s"):
                auditor.intend(act(5))
            wire.disarm()
            assert soon(lambda: auditor.state().pending_events == 0)
    assert events_in(moto_s3.behind, bucket) == list(range(6))


@pytest.mark.parametrize("fault", (Fault.ANSWER_LOST, Fault.REQUEST_CUT, Fault.SLOW))
def test_a_request_or_an_answer_that_is_lost_records_nothing_twice(
    place: Place, moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr("strongroom_security.auditlog.recording.sending._LONGEST_S", 0.1)
    bucket = moto_s3.make_bucket()
    with WireProxy(moto_s3.port) as wire:
        where = in_bucket(moto_s3, bucket, wire.endpoint_url)
        with place.auditor(**where) as auditor:
            wire.arm(fault)
            auditor.intend(act(1))
    assert events_in(moto_s3.behind, bucket) == [1]


def test_whoever_may_only_create_writes_a_log_and_cannot_read_it(place: Place, enforcing: Enforcing) -> None:
    bucket = enforcing.bucket()
    writer = enforcing.user(statement("s3:PutObject", f"arn:aws:s3:::{bucket}/log/segments/*"))
    options = quick(enforcing.address)

    def open_sink() -> S3Store:
        return S3Store(f"s3://{bucket}/log", options=options, session=writer.session())

    with place.auditor(sink=f"s3://{bucket}/log", open_sink=open_sink) as auditor:
        auditor.record(act(1))
        auditor.intend(act(2))
    assert events_in(enforcing.client("s3"), bucket) == [1, 2]
    (key, *_) = [entry["Key"] for entry in enforcing.client("s3").list_objects_v2(Bucket=bucket)["Contents"]]
    with pytest.raises(AccessDeniedError):
        open_sink().read(key.removeprefix("log/"), limit_bytes=1 << 20)


def test_a_role_that_may_not_write_here_is_told_before_it_reads(place: Place, enforcing: Enforcing) -> None:
    bucket = enforcing.bucket()
    nobody = enforcing.user()
    options = quick(enforcing.address)

    def open_sink() -> S3Store:
        return S3Store(f"s3://{bucket}/log", options=options, session=nobody.session())

    with (
        place.auditor(sink=f"s3://{bucket}/log", open_sink=open_sink, intent_s=1) as auditor,
        pytest.raises(AuditError, match=r"AccessDenied.* may create objects under segments/"),
    ):
        auditor.intend(act(1))


@pytest.fixture
def locked(ministack_s3: S3Server) -> str:
    """A bucket in which nothing goes for a year."""
    bucket = "locked-for-a-year"
    client = ministack_s3.behind
    client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    client.put_object_lock_configuration(
        Bucket=bucket,
        ObjectLockConfiguration={
            "ObjectLockEnabled": "Enabled",
            "Rule": {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 365}},
        },
    )
    return bucket


def test_a_bucket_with_object_lock_needs_nothing_more_and_keeps_every_segment(
    place: Place, ministack_s3: S3Server, locked: str
) -> None:
    where = in_bucket(ministack_s3, locked)
    with place.auditor(**where) as auditor:
        auditor.intend(act(1))
    client = ministack_s3.behind
    assert events_in(client, locked) == [1]
    versions = client.list_object_versions(Bucket=locked)["Versions"]
    for version in versions:
        with pytest.raises(client.exceptions.ClientError, match="AccessDenied"):
            client.delete_object(Bucket=locked, Key=version["Key"], VersionId=version["VersionId"])
    key = versions[0]["Key"].removeprefix("log/")
    assert not where["open_sink"]().put_if_absent(key, b"something else")
    assert events_in(client, locked) == [1]
