"""What the other processes of these tests run; they import it by name."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from multiprocessing.connection import Connection

from replication_runs import name_of, state_at
from replication_stores import Watched, WatchedBucket

from strongroom import Checkpointer
from strongroom.replication import Replicator, Target, replicate
from strongroom.replication.ledger import Ledger
from strongroom.stores.local import LocalStore
from strongroom.stores.s3 import S3Options, S3Store

__all__ = ["S3_PART_BYTES", "copy_and_be_killed", "open_bucket", "train_until_killed", "upload_and_be_killed"]

S3_PART_BYTES = 5 << 20


_CHANGES = (
    "open_writer",
    "write",
    "finish",
    "put",
    "put_if_absent",
    "make_durable",
    "delete",
    "delete_tree",
)
"""A kill at any other moment leaves what one before the next of these does."""


class _Kill:
    """Ends this process by SIGKILL before its nth operation that changes a store."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def __call__(self, operation: str, key: str) -> None:
        with self._lock:
            if operation in _CHANGES and next(self._numbers) == self._at:
                os.kill(os.getpid(), signal.SIGKILL)


def copy_and_be_killed(source: str, target: str, at: int, pipe: Connection) -> None:
    """Copy a run to a second folder, and die before the nth change of either."""
    kill = _Kill(at)
    first, second = Watched(LocalStore(source)), Watched(LocalStore(target))
    first.hook = second.hook = kill
    # Every file is noted by itself: what a kill costs is then seen to the file.
    replicate(first, Target(store=second, note_bytes=0), everything=True)
    pipe.send("done")


def open_bucket(uri: str, endpoint_url: str) -> S3Store:
    return S3Store(uri, options=S3Options(endpoint_url=endpoint_url, part_bytes=S3_PART_BYTES))


def upload_and_be_killed(
    source: str, uri: str, environment: dict[str, str], parts: int, pipe: Connection
) -> None:
    """Replicate beside a job to a bucket, and die once so many parts have arrived there."""
    os.environ.update(environment)
    first = LocalStore(source)
    bucket = WatchedBucket(open_bucket(uri, environment["AWS_ENDPOINT_URL_S3"]))

    def kill(key: str, number: int) -> None:
        if sum(bucket.sent.values()) >= parts:
            pipe.send(sorted(part for _, part in bucket.sent))
            os.kill(os.getpid(), signal.SIGKILL)

    bucket.hook = kill
    replicator = Replicator(first, [Target(store=bucket, upload_from_bytes=S3_PART_BYTES)])
    replicator.begin(1)
    replicator.wait(name_of(first, 1), 60)


def train_until_killed(first: str, second: str, pipe: Connection) -> None:
    """Resume, and save step after step on two tiers."""
    with Checkpointer(first, replicate_to=[second]) as checkpointer:
        restored = checkpointer.restore()
        step = restored.step if restored is not None else 0
        while True:
            step += 1
            checkpointer.save(step, state_at(step)).result()
            pipe.send(step)


def noted(source: LocalStore, uri: str, step: int) -> set[str]:
    """Paths of files that are noted as arrived."""
    return set(Ledger(source, uri, now_ms=lambda: 0).progress(name_of(source, step)).sent)
