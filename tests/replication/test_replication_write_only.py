"""A durable tier in which the trainer may only create: copied to, on a server that holds it to that."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from replication_runs import name_of, save, steps_of

from strongroom.errors import AccessDeniedError
from strongroom.replication import Target, known_targets, replicate
from strongroom.stores.memory import MemoryStore
from strongroom.verify import verify

sys.path.insert(0, str(Path(__file__).parent.parent / "stores"))

from s3_identities import Enforcing, enforcing, statement
from write_only import PART_BYTES, PUT, TWO_RIGHTS, arn, store_of, unfinished

__all__ = ["enforcing"]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """This server takes parts of any size."""
    monkeypatch.setattr("strongroom.stores.s3.options.MIN_PART_BYTES", PART_BYTES)


@pytest.mark.parametrize("more", ((), TWO_RIGHTS), ids=["one right", "with its uploads"])
def test_a_copy_needs_no_more_than_a_save(
    enforcing: Enforcing, source: MemoryStore, more: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    save(source, 1, 2, length=100_000)
    bucket = enforcing.bucket()
    trainer = enforcing.user(statement([PUT, *more], arn(bucket, "runs", "a", "*")))
    target = store_of(enforcing, bucket, trainer)
    with pytest.raises(AccessDeniedError):
        target.list_names("")
    report = replicate(source, Target(store=target, upload_from_bytes=PART_BYTES), everything=True)
    assert [copied.how for copied in report.copied] == ["checksums", "checksums"]
    assert "may not be read by this identity" in caplog.text
    assert unfinished(enforcing, bucket) == []
    theirs = store_of(enforcing, bucket, enforcing.root)
    assert steps_of(theirs) == [2, 1]
    assert verify(theirs, everything=True).verdict == "whole"
    assert known_targets(source)[target.uri][name_of(source, 2)].how == "checksums"
    # Once more, by who may see nothing: what was noted is not sent again.
    assert replicate(source, Target(store=target), everything=True).copied == ()
