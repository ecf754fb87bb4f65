"""One object being written: one request where it fits a part, else parts sent while the next ones are filled.

Bytes are copied once, into the buffer of a part; each part is sent by a thread of its own, for which the
interpreter waits, so that the last save of a program that is ending gets through.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future, wait
from types import TracebackType
from typing import TYPE_CHECKING, Final

from strongroom.errors import StoreError
from strongroom.parallel import start
from strongroom.stores.base import Buffer
from strongroom.stores.s3.bucket import Bucket
from strongroom.stores.s3.creating import Standing, create, exists_error, look_whose, remove_quietly
from strongroom.stores.s3.failures import GaveUpError
from strongroom.stores.s3.multipart import Multipart, part_length

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["S3Writer", "bytes_of"]

_LOG: Final = logging.getLogger("strongroom")
_WAKE_S: Final = 0.1
"""How late an interrupt is seen at most."""


def bytes_of(data: Buffer) -> memoryview:
    """A buffer of any item type, as its bytes."""
    view = memoryview(data)
    if view.format == "B" and view.ndim == 1:
        return view
    # A view without elements cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


class S3Writer:
    """An object being written, by one thread."""

    def __init__(self, bucket: Bucket, key: str, length_bytes: int) -> None:
        self._bucket = bucket
        self._key = key
        self._length_bytes = length_bytes
        self._part_bytes = part_length(length_bytes, bucket.options.part_bytes)
        self._buffer: bytearray | None = None
        self._filled_bytes = 0
        self._sent_bytes = 0
        self._multipart: Multipart | None = None
        self._under_way: set[Future[None]] = set()
        self._failure: list[BaseException] = []
        self._may_stand: str | None = None
        self._given_up = threading.Event()
        self._has_ended = False
        self._is_finished = False
        self._pid = os.getpid()
        bucket.room.enter()
        self._is_counted = True

    def write(self, data: Buffer) -> None:
        self._refuse_ended()
        view = bytes_of(data)
        total = self._sent_bytes + self._filled_bytes + len(view)
        if total > self._length_bytes:
            self._given_up.set()
            raise StoreError(
                f"{self._name}: {self._length_bytes} bytes were announced, and {total} were handed over; "
                "announce what is written"
            )
        try:
            while view:
                view = self._fill(view)
        except BaseException:
            self._given_up.set()
            raise

    def finish(self) -> None:
        self._refuse_ended()
        written = self._sent_bytes + self._filled_bytes
        try:
            if written != self._length_bytes:
                raise StoreError(
                    f"{self._name}: {self._length_bytes} bytes were announced, and only {written} were "
                    "handed over; write all of them before finish"
                )
            if self._length_bytes <= self._part_bytes:
                self._create(self._buffer or bytearray())
            else:
                self._wait()
                self._raise_failure()
                if self._multipart is not None:
                    self._multipart.complete()
        except BaseException:
            self._given_up.set()
            raise
        self._is_finished = True
        self._end()

    def abort(self) -> None:
        if self._has_ended:
            return
        self._given_up.set()
        self._has_ended = True
        try:
            if os.getpid() == self._pid:
                # What is on its way could land after the upload was aborted, and be paid for by the month.
                self._wait()
                self._remove()
        finally:
            self._end()

    def _fill(self, view: memoryview) -> memoryview:
        """Copy what fits into the part being filled, and send that once it is full; what is left."""
        self._raise_failure()
        if self._buffer is None:
            left_bytes = self._length_bytes - self._sent_bytes
            self._buffer = self._bucket.room.buffer(min(self._part_bytes, left_bytes))
        count = min(len(view), len(self._buffer) - self._filled_bytes)
        memoryview(self._buffer)[self._filled_bytes : self._filled_bytes + count] = view[:count]
        self._filled_bytes += count
        if self._filled_bytes == len(self._buffer) and self._length_bytes > self._part_bytes:
            self._send(self._buffer)
        return view[count:]

    def _send(self, buffer: bytearray) -> None:
        if self._multipart is None:
            self._multipart = Multipart.begin(self._bucket, self._key, length_bytes=self._length_bytes)
        multipart, room = self._multipart, self._bucket.room
        number = self._sent_bytes // self._part_bytes
        if not room.take(len(buffer), is_given_up=lambda: bool(self._failure)):
            self._raise_failure()

        def send() -> None:
            try:
                if not self._given_up.is_set():
                    multipart.send(number, buffer, is_given_up=self._given_up.is_set)
            except BaseException as error:  # noqa: BLE001 - raised by the writer's own thread
                self._failure.append(error)
                self._given_up.set()
            finally:
                room.release(len(buffer))
                room.give_back(buffer)

        future: Future[None] = Future()
        self._under_way = {each for each in self._under_way if not each.done()} | {future}
        try:
            start(send, name="strongroom-s3-part", future=future)
        finally:
            if future.cancelled():
                room.release(len(buffer))
        self._buffer = None
        self._sent_bytes += len(buffer)
        self._filled_bytes = 0

    def _create(self, body: bytearray) -> None:
        write_id = self._bucket.draw_id()
        try:
            standing = create(self._bucket, self._key, body, write_id=write_id)
        except GaveUpError as error:
            if error.may_have_landed:
                self._may_stand = write_id
            raise self._bucket.error(error, "put_object", self._key) from error.failure
        # Untold: nobody but its own attempt ever writes this key, so an earlier try did it.
        if standing is Standing.OTHERS:
            raise exists_error(self._bucket, self._key)

    def _remove(self) -> None:
        if self._multipart is not None:
            self._multipart.abort()
        if self._may_stand is not None:
            try:
                standing = look_whose(self._bucket, self._key, write_id=self._may_stand)
            except StoreError as error:
                _LOG.debug("an object may stay until garbage collection: %s", error)
                return
            if standing is Standing.OURS:
                remove_quietly(self._bucket, self._key)

    def _wait(self) -> None:
        """Until no part is under way; an interrupt comes through."""
        while self._under_way:
            wait(self._under_way, timeout=_WAKE_S)
            self._under_way = {each for each in self._under_way if not each.done()}

    def _raise_failure(self) -> None:
        if self._failure:
            self._given_up.set()
            raise self._failure[0]

    def _refuse_ended(self) -> None:
        if os.getpid() != self._pid:
            # The threads that send its parts are the parent's: nobody here would ever see them end.
            raise StoreError(
                f"{self._name}: its writer was opened before a fork; write on in the process that opened it"
            )
        self._raise_failure()
        if self._has_ended or self._given_up.is_set():
            raise StoreError(f"{self._name}: its writer has ended or failed before; nothing more is written")

    def _end(self) -> None:
        self._has_ended = True
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._bucket.room.give_back(buffer)
        if self._is_counted and os.getpid() == self._pid:
            self._is_counted = False
            self._bucket.room.leave()

    @property
    def _name(self) -> str:
        return self._bucket.where.name(self._key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()
