"""The store on Ceph's object gateway, a real one: what it promises, and what its policies refuse.

Left out unless asked for: ``pytest -m rgw tests/stores/test_s3_rgw.py``, with the programs that `ceph_rgw`
names. Release 16 knows neither SHA-256 checksums (``Content-MD5`` it does compare) nor a condition on the end
of an upload in parts; a commit is one small object, and on that it knows it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ceph_rgw import Rgw, rgw
from s3_identities import Identity, document, statement
from write_only import (
    LONG,
    PART_BYTES,
    PUT,
    REFUSED,
    WRITTEN,
    arn,
    contents,
    save_path,
    store_of,
    unfinished,
)

from strongroom import Checkpointer, KeepLast
from strongroom.errors import AccessDeniedError, ObjectNotFoundError, StoreError
from strongroom.stores.base import Store
from strongroom.stores.s3 import S3Options, S3Store
from strongroom.testing.conformance import StoreConformance

__all__ = ["rgw"]

pytestmark = pytest.mark.rgw


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway is told to take them."""
    monkeypatch.setattr("strongroom.stores.s3.options.MIN_PART_BYTES", PART_BYTES)


def _open(gateway: Rgw, bucket: str, **options: Any) -> S3Store:
    return S3Store(
        f"s3://{bucket}/runs/a",
        options=S3Options(endpoint_url=gateway.address, **options),
        session=gateway.root.session(),
    )


class TestOnRgw(StoreConformance):
    @pytest.fixture(autouse=True)
    def _bucket(self, rgw: Rgw) -> None:
        self._gateway, self._client, self._name = rgw, rgw.client("s3"), rgw.bucket()

    @pytest.fixture
    def store(self, _bucket: None) -> Store:
        return _open(self._gateway, self._name)

    def raw(self, store: Store, key: str) -> bytes | None:
        try:
            found = self._client.get_object(Bucket=self._name, Key=f"runs/a/{key}")
        except self._client.exceptions.NoSuchKey:
            return None
        with found["Body"] as body:
            return bytes(body.read())

    def plant(self, store: Store, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._name, Key=f"runs/a/{key}", Body=data)

    def reopen(self, store: Store) -> Store:
        return _open(self._gateway, self._name)


@pytest.fixture
def bucket(rgw: Rgw) -> str:
    return rgw.bucket()


# A run


def _state(step: int) -> dict[str, Any]:
    seeded = torch.Generator().manual_seed(step)
    return {
        "model": {f"layer{n}": torch.randn(400_000, generator=seeded) for n in range(3)},
        "extra": {"step": step},
    }


def test_a_run_is_saved_restored_thinned_and_verified_there(rgw: Rgw, bucket: str) -> None:
    store = _open(rgw, bucket, part_bytes=1 << 20, parts_in_flight=4)
    with Checkpointer(store, keep=KeepLast(count=2)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, _state(step)).result()
    reader = Checkpointer(_open(rgw, bucket))
    assert [checkpoint.step for checkpoint in reader.checkpoints()] == [3, 2]
    restored = reader.restore()
    assert restored is not None
    assert (restored.step, restored.skipped) == (3, ())
    for name, tensor in _state(3)["model"].items():
        assert torch.equal(restored.state["model"][name], tensor)
    assert unfinished(rgw, bucket) == []
    assert not [key for key in contents(rgw, bucket) if key.startswith("step-000000000001")]


def test_a_second_launch_fences_the_first(rgw: Rgw, bucket: str) -> None:
    first = Checkpointer(_open(rgw, bucket))
    first.save(1, {"extra": 1}).result()
    with Checkpointer(_open(rgw, bucket)) as second:
        second.restore()
        second.save(2, {"extra": 2}).result()
    with pytest.raises(Exception, match="launch"):
        first.save(3, {"extra": 3}).result()
    first.close()
    assert [checkpoint.step for checkpoint in Checkpointer(_open(rgw, bucket)).checkpoints()] == [2, 1]


def test_an_upload_that_was_cut_short_is_gone_on_with(rgw: Rgw, bucket: str) -> None:
    store = _open(rgw, bucket, part_bytes=PART_BYTES)
    upload = store.begin_upload("long", length_bytes=len(LONG))
    upload.write_part(1, memoryview(LONG)[PART_BYTES : 2 * PART_BYTES])
    [listed] = store.unfinished_uploads()
    assert (listed.key, listed.token) == ("long", upload.token)
    later = _open(rgw, bucket, part_bytes=PART_BYTES)
    taken_up = later.resume_upload("long", length_bytes=len(LONG), token=upload.token)
    assert taken_up is not None
    parts = [memoryview(LONG)[start : start + PART_BYTES] for start in range(0, len(LONG), PART_BYTES)]
    assert [taken_up.has_part(number, part) for number, part in enumerate(parts)] == [False, True, False]
    for number in (0, 2):
        taken_up.write_part(number, parts[number])
    taken_up.finish()
    assert contents(rgw, bucket) == {"long": LONG}
    assert later.unfinished_uploads() == []


# Who may do what


def _statement_of_one_run(bucket: str) -> dict[str, Any]:
    return statement([PUT], [arn(bucket, "runs", "a", "*")])


def _by_role(rgw: Rgw, bucket: str) -> Identity:
    return rgw.assume(rgw.role(_statement_of_one_run(bucket)))


def _by_session(rgw: Rgw, bucket: str) -> Identity:
    broad = rgw.role(statement(["s3:*"], [arn(bucket), arn(bucket, "*")]))
    return rgw.assume(broad, _statement_of_one_run(bucket))


@pytest.fixture(params=(_by_role, _by_session), ids=["role", "session policy"])
def writer_of_one_run(request: pytest.FixtureRequest, rgw: Rgw, bucket: str) -> Identity:
    """Who may create objects in one run: by a role's policy, or by a session's on a role that may do all."""
    made: Identity = request.param(rgw, bucket)
    return made


def test_one_right_is_enough_for_all_that_a_save_writes(
    rgw: Rgw, bucket: str, writer_of_one_run: Identity
) -> None:
    store = store_of(rgw, bucket, writer_of_one_run)
    save_path(store)
    assert contents(rgw, bucket) == WRITTEN
    for name, call in REFUSED.items():
        # Of a role that may do all, release 16 tells a narrowed session what is absent, and nothing else.
        absent = ObjectNotFoundError if name == "read what is absent" else AccessDeniedError
        with pytest.raises((AccessDeniedError, absent)):
            call(store)
            pytest.fail(f"{name} was allowed")
    assert contents(rgw, bucket) == WRITTEN


@pytest.mark.parametrize("run", ("b", "ab"))
def test_no_object_can_be_written_outside_the_run(
    rgw: Rgw, bucket: str, writer_of_one_run: Identity, run: str
) -> None:
    other = store_of(rgw, bucket, writer_of_one_run, run)
    with pytest.raises(AccessDeniedError):
        other.put("object", b"")
    with pytest.raises(AccessDeniedError):
        other.put_if_absent("step-1/COMMIT", b"")
    with pytest.raises(AccessDeniedError), other.open_writer("long", length_bytes=len(LONG)) as writer:
        writer.write(LONG)
        writer.finish()
    assert contents(rgw, bucket) == {}
    assert unfinished(rgw, bucket) == []


def test_a_user_sees_what_it_has_written_unless_it_is_denied(rgw: Rgw, bucket: str) -> None:
    """Whoever writes an object owns it there: a trainer gets a role's session, or a policy that denies."""
    for more, sees in ((), True), ((statement(["s3:GetObject"], [arn(bucket, "*")], Effect="Deny"),), False):
        user = rgw.user(_statement_of_one_run(bucket), *more)
        key = f"step-1/data/{user.name}"
        store_of(rgw, bucket, user).put(key, b"own")
        if sees:
            assert store_of(rgw, bucket, user).read(key, limit_bytes=10) == b"own"
        else:
            with pytest.raises(AccessDeniedError):
                store_of(rgw, bucket, user).read(key, limit_bytes=10)


def test_a_reader_of_one_run_reads_it_and_writes_nothing(rgw: Rgw, bucket: str) -> None:
    save_path(_open(rgw, bucket, part_bytes=PART_BYTES))
    reader = rgw.assume(
        rgw.role(
            statement(["s3:GetObject"], [arn(bucket, "runs", "a", "*")]),
            statement(
                ["s3:ListBucket"],
                [arn(bucket)],
                Condition={"StringLike": {"s3:prefix": ["runs/a", "runs/a/*"]}},
            ),
        )
    )
    store = store_of(rgw, bucket, reader)
    assert store.read("step-1/COMMIT", limit_bytes=100) == b"commit"
    assert store.list_names("step-1") == ["COMMIT", "data/"]
    for call in (
        lambda: store.put("step-1/other", b""),
        lambda: store.delete("step-1/COMMIT"),
        lambda: store_of(rgw, bucket, reader, "b").list_names(""),
        lambda: store_of(rgw, bucket, reader, "b").read("step-1/COMMIT", limit_bytes=100),
    ):
        with pytest.raises(AccessDeniedError):
            call()
    assert contents(rgw, bucket) == WRITTEN


def test_a_bucket_policy_denies_what_a_role_allows(rgw: Rgw, bucket: str) -> None:
    """The guardrail against removal, as far as this release knows it."""
    guard = statement(["s3:DeleteObject"], [arn(bucket, "*")], Effect="Deny", Principal="*")
    rgw.client("s3").put_bucket_policy(Bucket=bucket, Policy=document([guard]))
    broad = rgw.assume(rgw.role(statement(["s3:*"], [arn(bucket), arn(bucket, "*")])))
    store = store_of(rgw, bucket, broad)
    store.put("step-1/data/index", b"index")
    with pytest.raises(AccessDeniedError):
        store.delete("step-1/data/index")
    assert store.read("step-1/data/index", limit_bytes=100) == b"index"


def test_credentials_that_nobody_has_are_a_denial_and_no_absence(rgw: Rgw, bucket: str) -> None:
    stranger = Identity(name="stranger", access_key="unknown", secret_key="unknown")  # noqa: S106
    with pytest.raises(AccessDeniedError):
        store_of(rgw, bucket, stranger).read("step-1/COMMIT", limit_bytes=100)
    forger = Identity(name="forger", access_key=rgw.root.access_key, secret_key="unknown")  # noqa: S106
    with pytest.raises(AccessDeniedError):
        store_of(rgw, bucket, forger).put("step-1/COMMIT", b"")


# What it does not do


def test_release_16_overwrites_an_object_of_several_parts_and_never_one_of_a_single(
    rgw: Rgw, bucket: str
) -> None:
    """Data keys hold an attempt's id, so that nobody else writes them; a commit is small."""
    store = _open(rgw, bucket, part_bytes=PART_BYTES)
    store.put("short", b"first")
    with pytest.raises(StoreError, match="exists"):
        store.put("short", b"other")
    for body in (LONG, LONG[::-1]):
        with store.open_writer("long", length_bytes=len(body)) as writer:
            writer.write(body)
            writer.finish()
    assert contents(rgw, bucket) == {"short": b"first", "long": LONG[::-1]}
