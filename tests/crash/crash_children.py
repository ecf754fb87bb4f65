"""What the crash tests' other processes run; they import it by name.

Each tells its parent through a pipe what it has been promised, at the moment that it was. What was
sent before a kill can still be received.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from crash_states import assert_is_state_at, state_at

from strongroom import Checkpointer, KeepLast, StrongroomError
from strongroom.stores.base import Buffer
from strongroom.stores.local import LocalStore, LocalWriter

__all__ = [
    "KEEP",
    "Waiting",
    "begin_a_run",
    "resume_and_save",
    "save_once_more",
    "save_until_killed",
    "save_with_a_file_size_limit",
    "stop_in_a_claim",
    "stop_in_a_save",
]

KEEP = KeepLast(count=2)


class Waiting(NamedTuple):
    """A thread that waits to be let go."""

    thread: str
    native_id: int


def begin_a_run(root: str, pipe: Connection) -> None:
    """Save step 1 into an empty root, each thread once it is let go."""
    with Checkpointer(root, keep=KEEP) as checkpointer:
        _let_threads_wait(pipe)
        _wait_here(pipe)
        pipe.send(_save(checkpointer, 1))
    pipe.send("done")


def save_once_more(root: str, pipe: Connection) -> None:
    """Save steps 1 and 2, then step 3 with each thread waiting; after a failure, step 4 as well."""
    with Checkpointer(root, keep=KEEP) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_at(step))
        checkpointer.wait()
        _let_threads_wait(pipe)
        outcome = _save(checkpointer, 3)
        threading.setprofile(None)
        pipe.send(outcome)
        checkpointer.wait()
        if outcome != 3:
            pipe.send(_save(checkpointer, 4))
    pipe.send("done")


def resume_and_save(root: str, pipe: Connection) -> None:
    """Resume, and save step 3 as a launch of its own, each thread once it is let go."""
    with Checkpointer(root, keep=KEEP) as checkpointer:
        checkpointer.restore()
        _let_threads_wait(pipe)
        _wait_here(pipe)
        pipe.send(_save(checkpointer, 3))
    pipe.send("done")


def save_until_killed(root: str, pipe: Connection) -> None:
    """Resume, and save step after step, telling of each that was promised."""
    with Checkpointer(root, keep=KEEP) as checkpointer:
        restored = checkpointer.restore()
        step = 0
        if restored is not None:
            assert_is_state_at(restored.state, restored.step)
            step = restored.step
        pipe.send(step)
        while True:
            step += 1
            checkpointer.save(step, state_at(step)).result()
            pipe.send(step)


def stop_in_a_save(root: str, operation: str, where: str, pipe: Connection) -> None:
    """Save step 1, and be stopped in the save of step 2; once it goes on, tell how it ends."""
    store = StopsBefore(root, operation, where)
    checkpointer = Checkpointer(store)
    checkpointer.save(1, state_at(1)).result()
    store.is_armed = True
    pipe.send("about to be stopped")
    pipe.send(_save(checkpointer, 2))
    pipe.send(_save(checkpointer, 3))
    checkpointer.close()


def stop_in_a_claim(root: str, pipe: Connection) -> None:
    """Resume, and be stopped with a free launch number in hand; once it goes on, tell how it ends."""
    store = StopsBefore(root, "put_if_absent", "launches")
    checkpointer = Checkpointer(store)
    checkpointer.restore()
    store.is_armed = True
    pipe.send("about to be stopped")
    try:
        saved = checkpointer.save(5, state_at(5)).result()
        pipe.send((saved.step, saved.launch))
    finally:
        checkpointer.close()


def save_with_a_file_size_limit(root: str, limit_bytes: int, pipe: Connection) -> None:
    """Save step 1, step 2 with no room for its shard, and step 3 with room again."""
    checkpointer = Checkpointer(root)
    pipe.send(_save(checkpointer, 1))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    pipe.send(_save(checkpointer, 2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    pipe.send(sorted(os.listdir(root)))
    pipe.send(_save(checkpointer, 3))
    checkpointer.close()


class StopsBefore(LocalStore):
    """Stops its own process, once, before an operation on a key that contains ``where``."""

    def __init__(self, root: str, operation: str, where: str) -> None:
        super().__init__(root)
        self.is_armed = False
        self._operation = operation
        self._where = where

    def _pass(self, operation: str, key: str) -> None:
        if self.is_armed and operation == self._operation and self._where in key:
            self.is_armed = False
            # To this thread: one to the process would let it go on for a moment.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def open_writer(self, key: str, *, length_bytes: int) -> LocalWriter:
        self._pass("open_writer", key)
        return super().open_writer(key, length_bytes=length_bytes)

    def make_durable(self, prefix: str) -> None:
        self._pass("make_durable", prefix)
        super().make_durable(prefix)

    def list_names(self, prefix: str) -> list[str]:
        self._pass("list_names", prefix)
        return super().list_names(prefix)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        self._pass("put_if_absent", key)
        return super().put_if_absent(key, data)


def _let_threads_wait(pipe: Connection) -> None:
    """From now on a new thread says who it is, and does nothing until it is let go."""

    def when_it_begins(*_: Any) -> None:
        sys.setprofile(None)
        _wait_here(pipe)

    threading.setprofile(when_it_begins)


def _wait_here(pipe: Connection) -> None:
    thread = threading.current_thread()
    pipe.send(Waiting(thread.name, threading.get_native_id()))
    pipe.recv()


def _save(checkpointer: Checkpointer, step: int) -> Any:
    """The step, once it is promised; else what the user is told."""
    try:
        return checkpointer.save(step, state_at(step)).result().step
    except StrongroomError as error:
        return type(error).__name__, str(error)
