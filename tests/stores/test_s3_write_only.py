"""Whoever may only create objects under one run can write all that a save writes there, and nothing else.

The server holds every caller to its policies; `test_s3_rgw` does the same on another one.
"""

from __future__ import annotations

from typing import Any

import pytest
from s3_identities import Enforcing, Identity, document, enforcing, statement
from write_only import (
    LONG,
    PART_BYTES,
    PUT,
    REFUSED,
    TWO_RIGHTS,
    WRITTEN,
    arn,
    contents,
    save_path,
    store_of,
    unfinished,
)

from strongroom.errors import AccessDeniedError, StoreError
from strongroom.stores.offers import Resuming
from strongroom.stores.s3 import S3Store

__all__ = ["enforcing"]


def give_up(store: S3Store, key: str) -> None:
    """Begin a long object, and give it up when two parts have gone."""
    with store.open_writer(key, length_bytes=len(LONG)) as writer:
        writer.write(memoryview(LONG)[: 2 * PART_BYTES])
        writer.abort()


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """This server takes parts of any size."""
    monkeypatch.setattr("strongroom.stores.s3.options.MIN_PART_BYTES", PART_BYTES)


@pytest.fixture
def bucket(enforcing: Enforcing) -> str:
    return enforcing.bucket()


def _user(server: Enforcing, bucket: str, *more: str) -> Identity:
    return server.user(statement([PUT, *more], arn(bucket, "runs", "a", "*")))


def _session(server: Enforcing, bucket: str, *more: str) -> Identity:
    broad = statement("s3:*", [arn(bucket), arn(bucket, "*")])
    return server.assume(server.role(broad), statement([PUT, *more], arn(bucket, "runs", "a", "*")))


@pytest.fixture(params=(_user, _session), ids=["user", "session"])
def writer_of_one_run(request: pytest.FixtureRequest, enforcing: Enforcing, bucket: str) -> Identity:
    """Who may create objects in one run: by its own policy, or by a session of a role that may do all."""
    return request.param(enforcing, bucket)


def test_one_right_is_enough_for_all_that_a_save_writes(
    enforcing: Enforcing, bucket: str, writer_of_one_run: Identity
) -> None:
    save_path(store_of(enforcing, bucket, writer_of_one_run))
    assert contents(enforcing, bucket) == WRITTEN
    assert unfinished(enforcing, bucket) == []


def test_whoever_may_only_write_sees_and_removes_nothing_not_even_its_own(
    enforcing: Enforcing, bucket: str, writer_of_one_run: Identity
) -> None:
    store = store_of(enforcing, bucket, writer_of_one_run)
    save_path(store)
    for name, call in REFUSED.items():
        with pytest.raises(AccessDeniedError):
            call(store)
            pytest.fail(f"{name} was allowed")
    assert contents(enforcing, bucket) == WRITTEN


@pytest.mark.parametrize("run", ("b", "ab", "a-b"))
def test_no_object_can_be_written_outside_the_run(
    enforcing: Enforcing, bucket: str, writer_of_one_run: Identity, run: str
) -> None:
    other = store_of(enforcing, bucket, writer_of_one_run, run)
    with pytest.raises(AccessDeniedError):
        other.put("object", b"")
    with pytest.raises(AccessDeniedError):
        other.put_if_absent("step-1/COMMIT", b"")
    with pytest.raises(AccessDeniedError), other.open_writer("long", length_bytes=len(LONG)) as writer:
        writer.write(LONG)
        writer.finish()
    assert contents(enforcing, bucket) == {}
    assert unfinished(enforcing, bucket) == []


def test_what_stands_is_neither_overwritten_nor_taken_for_ones_own(
    enforcing: Enforcing, bucket: str, writer_of_one_run: Identity
) -> None:
    save_path(store_of(enforcing, bucket, writer_of_one_run))
    again = store_of(enforcing, bucket, writer_of_one_run)
    with pytest.raises(StoreError, match="exists"):
        again.put("step-1/data/index", b"other")
    for key in ("step-1/data/short", "step-1/data/shard"):
        with (
            pytest.raises(StoreError, match="exists"),
            again.open_writer(key, length_bytes=len(LONG)) as writer,
        ):
            writer.write(LONG[::-1])
            writer.finish()
    assert not again.put_if_absent("step-1/COMMIT", b"other")
    assert contents(enforcing, bucket) == WRITTEN


def test_an_upload_that_is_given_up_leaves_its_parts_to_the_buckets_lifecycle(
    enforcing: Enforcing, bucket: str
) -> None:
    """Without the right to abort that is no failure: a rule of the bucket clears them."""
    give_up(store_of(enforcing, bucket, _user(enforcing, bucket)), "step-1/data/shard")
    assert unfinished(enforcing, bucket) == ["runs/a/step-1/data/shard"]
    assert contents(enforcing, bucket) == {}
    # And it starts over.
    save_path(store_of(enforcing, bucket, _user(enforcing, bucket)))
    assert contents(enforcing, bucket) == WRITTEN


def test_with_the_two_rights_of_uploads_nothing_is_left(enforcing: Enforcing, bucket: str) -> None:
    give_up(store_of(enforcing, bucket, _user(enforcing, bucket, *TWO_RIGHTS)), "step-1/data/shard")
    assert unfinished(enforcing, bucket) == []
    assert contents(enforcing, bucket) == {}


def _begin(store: S3Store) -> Any:
    assert isinstance(store, Resuming)
    upload = store.begin_upload("step-1/data/shard", length_bytes=len(LONG))
    for number in (0, 1):
        upload.write_part(number, memoryview(LONG)[number * PART_BYTES : (number + 1) * PART_BYTES])
    return upload


def test_with_them_an_upload_that_was_cut_short_is_gone_on_with(enforcing: Enforcing, bucket: str) -> None:
    identity = _user(enforcing, bucket, *TWO_RIGHTS)
    token = _begin(store_of(enforcing, bucket, identity)).token
    upload = store_of(enforcing, bucket, identity).resume_upload(
        "step-1/data/shard", length_bytes=len(LONG), token=token
    )
    assert upload is not None
    parts = [memoryview(LONG)[start : start + PART_BYTES] for start in range(0, len(LONG), PART_BYTES)]
    assert [upload.has_part(number, part) for number, part in enumerate(parts)] == [True, True, False]
    assert not upload.has_part(0, parts[1])
    upload.write_part(2, parts[2])
    upload.finish()
    assert contents(enforcing, bucket) == {"step-1/data/shard": LONG}


def test_without_them_an_upload_can_be_begun_and_finished_but_not_gone_on_with(
    enforcing: Enforcing, bucket: str
) -> None:
    identity = _user(enforcing, bucket)
    upload = _begin(store_of(enforcing, bucket, identity))
    with pytest.raises(AccessDeniedError):
        store_of(enforcing, bucket, identity).resume_upload(
            "step-1/data/shard", length_bytes=len(LONG), token=upload.token
        )
    upload.write_part(2, memoryview(LONG)[2 * PART_BYTES :])
    upload.finish()
    assert contents(enforcing, bucket) == {"step-1/data/shard": LONG}


def test_a_denial_says_what_was_refused_and_nothing_secret(enforcing: Enforcing, bucket: str) -> None:
    identity = _user(enforcing, bucket)
    with pytest.raises(AccessDeniedError) as caught:
        store_of(enforcing, bucket, identity, "b").put("object", b"")
    assert "s3:PutObject" in str(caught.value)
    assert f"s3://{bucket}/runs/b/object" in str(caught.value)
    assert identity.secret_key not in str(caught.value)


def test_credentials_that_nobody_has_are_a_denial_and_no_absence(enforcing: Enforcing, bucket: str) -> None:
    stranger = Identity(name="stranger", access_key="unknown", secret_key="unknown")  # noqa: S106
    with pytest.raises(AccessDeniedError):
        store_of(enforcing, bucket, stranger).read("step-1/COMMIT", limit_bytes=100)
    with pytest.raises(AccessDeniedError):
        store_of(enforcing, bucket, stranger).put("step-1/COMMIT", b"")


def test_a_bucket_policy_denies_what_a_role_allows(enforcing: Enforcing, bucket: str) -> None:
    guard = statement("s3:DeleteObject", arn(bucket, "*"), Effect="Deny", Principal="*")
    enforcing.client("s3").put_bucket_policy(Bucket=bucket, Policy=document([guard]))
    broad = enforcing.assume(enforcing.role(statement("s3:*", [arn(bucket), arn(bucket, "*")])))
    store = store_of(enforcing, bucket, broad)
    store.put("step-1/data/index", b"index")
    with pytest.raises(AccessDeniedError):
        store.delete("step-1/data/index")
    assert contents(enforcing, bucket) == {"step-1/data/index": b"index"}
