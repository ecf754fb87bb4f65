"""One file, from one store to another: hashed as it is read, sent in parts where those can be resumed.

A file is read once, in order, and held against the manifest's digest before its copy is finished: what is
damaged at the source never stands on a target as a finished object of an object store, and on a file system
only in a folder that is not committed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final

from strongroom.digest import BLOCK_BYTES, DigestAlgorithm, FileHasher
from strongroom.errors import AccessDeniedError, IntegrityError, ObjectNotFoundError
from strongroom.manifest import FileRecord
from strongroom.pace import Pace
from strongroom.parallel import run_all
from strongroom.stores.base import ObjectReader, Store
from strongroom.stores.offers import Resuming, Upload, tuning_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PARTS_IN_FLIGHT", "Flow", "SourceFile", "digest_at", "send_in_parts", "send_whole"]

PARTS_IN_FLIGHT: Final = 4
"""Parts of one file under way at once; so many, of `Upload.part_bytes` each, are in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """How bytes go: how fast, who hears of them, and who may end it.

    Attributes:
        pace: what is sent waits for it.
        check: raises where the work is to end, from any thread, before every piece.
        advance: hears of the length of every piece that was dealt with.
        sent: hears of the length of every piece that goes over the line. Like `advance` from any thread.
        sleep: waits for so many seconds; may return early where the work is to end.
    """

    pace: Pace
    check: Callable[[], None]
    advance: Callable[[int], None]
    sent: Callable[[int], None]
    sleep: Callable[[float], None] = time.sleep

    def wait(self, seconds: int) -> None:
        """Let time pass, in slices: the work may be to end."""
        for _ in range(seconds):
            self.check()
            self.sleep(1.0)
        self.check()

    def send(self, length_bytes: int) -> None:
        """Wait until so many more bytes may be sent."""
        self.pace.spend(length_bytes)
        # The wait may have been cut short.
        self.check()
        self.sent(length_bytes)


class SourceFile:
    """A file of the first tier, read once and in order.

    Raises:
        IntegrityError: it is not there, or not as long as the manifest says.
        StoreError: it could not be read.
    """

    def __init__(self, store: Store, key: str, record: FileRecord) -> None:
        self._where = f"{key} in {store.uri}"
        self._record = record
        self._position = 0
        self._hasher = FileHasher(record.digest.algorithm)
        try:
            self._reader: ObjectReader = store.open_reader(key)
        except ObjectNotFoundError as error:
            raise IntegrityError(f"{self._where} is missing, and the manifest lists it") from error
        if self._reader.size_bytes != record.size_bytes:
            self._reader.close()
            raise IntegrityError(
                f"{self._where} has {self._reader.size_bytes} bytes, and the manifest says "
                f"{record.size_bytes}"
            )

    def read_next(self, room: memoryview) -> memoryview:
        """The next bytes, as many as there is room for, in that room; empty at the end.

        Raises:
            IntegrityError: it ends too early.
            StoreError: it could not be read.
        """
        piece = room[: min(len(room), self._record.size_bytes - self._position)]
        filled = 0
        while filled < len(piece):
            step = self._reader.read_into(self._position + filled, piece[filled:])
            if step <= 0:
                raise IntegrityError(
                    f"{self._where} ends at byte {self._position + filled}, and the manifest says "
                    f"{self._record.size_bytes}"
                )
            filled += step
        self._hasher.update(piece)
        self._position += len(piece)
        return piece

    def check(self) -> None:
        """Raise IntegrityError unless all that was read is what the manifest says; at the end."""
        found = self._hasher.digest()
        if not found.matches(self._record.digest):
            raise IntegrityError(
                f"{self._where} has the digest {found}, and the manifest says {self._record.digest}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reader.close()


def send_whole(source: Store, target: Store, key: str, record: FileRecord, flow: Flow) -> None:
    """Write a file at the target, from its first byte to its last.

    Raises:
        IntegrityError: it is damaged at the source; nothing of it is left at the target.
        StoreError: it could not be read or written.
    """
    room = memoryview(bytearray(min(BLOCK_BYTES, max(1, record.size_bytes))))
    with (
        SourceFile(source, key, record) as file,
        target.open_writer(key, length_bytes=record.size_bytes) as writer,
    ):
        while True:
            flow.check()
            piece = file.read_next(room)
            if not piece:
                break
            flow.send(len(piece))
            writer.write(piece)
            flow.advance(len(piece))
        file.check()
        writer.finish()


def send_in_parts(
    source: Store,
    target: Resuming,
    key: str,
    record: FileRecord,
    flow: Flow,
    *,
    token: str | None,
    note_token: Callable[[str], bool],
    workers: int = PARTS_IN_FLIGHT,
) -> None:
    """Upload a file in parts, several at once; what has arrived of it before is not sent again.

    Args:
        token: of an upload of this file that was begun; None: none was.
        note_token: writes down the token of a new one, before its first part; whether it could.

    Raises:
        IntegrityError: it is damaged at the source; the upload is given up.
        StoreError: it could not be read or sent; where its token is noted the parts stay for the next try.
    """
    length = record.size_bytes
    resumed = _resume(target, key, length, token) if token is not None else None
    upload = resumed if resumed is not None else target.begin_upload(key, length_bytes=length)
    is_noted = resumed is not None or note_token(upload.token)
    try:
        with SourceFile(source, key, record) as file:
            _send_parts(file, upload, record, flow, has_some=resumed is not None, workers=workers)
            file.check()
    except IntegrityError:
        upload.abort()
        raise
    except BaseException:
        if not is_noted:
            # Nobody would ever find it again.
            upload.abort()
        raise
    upload.finish()


def _resume(target: Resuming, key: str, length_bytes: int, token: str) -> Upload | None:
    """An upload that was begun; None where it is no more, or may not be asked for."""
    try:
        return target.resume_upload(key, length_bytes=length_bytes, token=token)
    except AccessDeniedError:
        # Who may only create starts over; the bucket's lifecycle clears the parts.
        return None


def _send_parts(
    file: SourceFile, upload: Upload, record: FileRecord, flow: Flow, *, has_some: bool, workers: int
) -> None:
    parts = max(1, -(-record.size_bytes // upload.part_bytes))
    lock = threading.Lock()
    has_failed = threading.Event()
    taken = [0]

    def work() -> None:
        try:
            send_some()
        except BaseException:
            has_failed.set()
            raise

    def send_some() -> None:
        room = memoryview(bytearray(min(upload.part_bytes, record.size_bytes)))
        while not has_failed.is_set():
            # One after the other, since a file's digest is over its bytes in order.
            with lock:
                flow.check()
                number = taken[0]
                piece = file.read_next(room)
                if not piece:
                    return
                taken[0] += 1
            if not (has_some and upload.has_part(number, piece)):
                flow.send(len(piece))
                upload.write_part(number, piece)
            flow.advance(len(piece))

    count = min(workers, parts)
    run_all([work] * count, workers=count, name="strongroom-upload")


def digest_at(
    store: Store, key: str, record: FileRecord, algorithm: DigestAlgorithm, flow: Flow
) -> str | None:
    """Read a file where it was copied to; None where it is what the manifest says, else what is wrong.

    Raises:
        StoreError: it could not be read.
    """
    hasher = FileHasher(algorithm)
    room = memoryview(bytearray(min(tuning_of(store).read_bytes, max(1, record.size_bytes))))
    try:
        with store.open_reader(key) as reader:
            if reader.size_bytes != record.size_bytes:
                return f"has {reader.size_bytes} bytes, and the manifest says {record.size_bytes}"
            position = 0
            while position < record.size_bytes:
                flow.check()
                piece = room[: min(len(room), record.size_bytes - position)]
                filled = reader.read_into(position, piece)
                if filled <= 0:
                    return f"ends at byte {position}, and the manifest says {record.size_bytes}"
                hasher.update(piece[:filled])
                position += filled
                flow.advance(filled)
    except ObjectNotFoundError:
        return "is not there"
    found = hasher.digest()
    return None if found.matches(record.digest) else f"has the digest {found}, not {record.digest}"
