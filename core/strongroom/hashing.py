"""Hashing files as they stand in a store: streamed, in parallel, each block read once.

What `strongroom.fetch` does for tensors that are wanted, this does for files that are judged: no
tensor, no torch, and what was kept of a file is the very memory that was hashed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final

from strongroom import layout, tensorfile
from strongroom.digest import BLOCK_BYTES, DIGEST_BYTES, Digest, FileHasher, block_digest, digest_of_blocks
from strongroom.errors import FormatError, IntegrityError
from strongroom.manifest import FileRecord, Manifest
from strongroom.stores.base import ObjectReader, Store
from strongroom.stores.offers import tuning_of

__all__ = ["Hashing", "Outcome", "hash_files"]

_SPAN_BYTES: Final = 64 * BLOCK_BYTES
"""What one thread reads of a large file at a time; ``sha256`` has to read a file as one."""

_FILES_AHEAD: Final = 32
"""Files under way at once: the rest of a manifest waits, so that memory stays flat."""

_MAX_RANGES: Final = 5

_TURN_S: Final = 0.2

Outcome = Callable[[], bytes]
"""Waits for one file; the bytes that were kept of it, if its digest is right.

Raises IntegrityError where it is not, and what the store raised where it could not be read.
"""


class Hashing:
    """The threads that hash, and how they are told to stop. One worker is the caller's own thread.

    Args:
        workers: how many.
        advance: hears of each piece's length, from any of them.
    """

    def __init__(self, workers: int, advance: Callable[[int], None]) -> None:
        self._pool = (
            ThreadPoolExecutor(max_workers=workers, thread_name_prefix="hash") if workers > 1 else None
        )
        self._advance = advance
        self._is_stopped = threading.Event()

    def submit(self, work: Callable[[], _Span]) -> Callable[[], _Span]:
        """Have work done; what is returned waits for its result, and raises what it raised."""
        if self._pool is None:
            return work
        future = self._pool.submit(work)

        def result() -> _Span:
            # In turns: a Ctrl-C that comes just as a wait begins is heard only when that wait ends.
            while not wait([future], _TURN_S).done:
                pass
            return future.result()

        return result

    def advance(self, length_bytes: int) -> None:
        """Count a piece; ends the thread's work once nobody waits for it any more."""
        if self._is_stopped.is_set():
            raise CancelledError
        self._advance(length_bytes)

    def stop(self) -> None:
        """Return when no thread reads any more: each stops at its next block."""
        self._is_stopped.set()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Span:
    """A hashed part of a file: digests of its blocks (``sha256``: the whole file's), and what was kept."""

    digests: bytes
    head: bytes


def hash_files(
    store: Store,
    manifest: Manifest,
    records: Iterable[FileRecord],
    hashing: Hashing,
    *,
    keeps_whole: Callable[[FileRecord], bool],
    block_digests: Callable[[str], bytes | None],
) -> Iterator[tuple[FileRecord, Outcome]]:
    """Hash files of one checkpoint; gives each with its outcome, in the order of ``records``.

    Args:
        store, manifest: where and what they are.
        records: which of the manifest's files.
        hashing: the threads.
        keeps_whole: whether a file is kept whole; of an unsealed shard only the header is.
        block_digests: what the index says of a file's blocks, once it is known: then a wrong
            file's error tells where it is wrong.
    """
    waiting: deque[tuple[FileRecord, Outcome]] = deque()
    for record in records:
        file = _File(store, manifest, record, hashing, keeps_whole(record), block_digests)
        waiting.append((record, file.outcome))
        if len(waiting) > _FILES_AHEAD:
            yield waiting.popleft()
    yield from waiting


class _File:
    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        record: FileRecord,
        hashing: Hashing,
        is_kept: bool,
        block_digests: Callable[[str], bytes | None],
    ) -> None:
        self._store = store
        self._key = layout.data_key(manifest.name, record.path)
        self._algorithm = manifest.algorithm
        self._record = record
        self._hashing = hashing
        self._is_kept = is_kept
        self._is_shard = record.header is None and layout.parse_shard_path(record.path) is not None
        self._block_digests = block_digests
        tuning = tuning_of(store)
        self._reads = tuning.read_bytes if tuning.reads is not None else None
        size = record.size_bytes
        step = max(size, 1) if manifest.algorithm == "sha256" else _SPAN_BYTES
        self._spans = [
            hashing.submit(lambda start=start: self._hash(start, min(start + step, size)))  # type: ignore[misc]
            for start in range(0, max(size, 1), step)
        ]

    def outcome(self) -> bytes:
        spans = [span() for span in self._spans]
        digests = b"".join(span.digests for span in spans)
        found = Digest("sha256", digests) if self._algorithm == "sha256" else digest_of_blocks(digests)
        if not found.matches(self._record.digest):
            raise IntegrityError(
                f"its digest is {found}, and the manifest says {self._record.digest}{self._where(digests)}"
            )
        return b"".join(span.head for span in spans)

    def _hash(self, start: int, end: int) -> _Span:
        """Read and hash a span; runs on any thread."""
        with self._store.open_reader(self._key) as reader:
            if reader.size_bytes != self._record.size_bytes:
                raise IntegrityError(
                    f"has {reader.size_bytes} bytes, and the manifest says {self._record.size_bytes}"
                )
            keep_until = self._keep_until(reader, start)
            whole = FileHasher("sha256") if self._algorithm == "sha256" else None
            # A block at a time where that costs nothing: it is hashed while it is in the processor's cache.
            step = BLOCK_BYTES if self._reads is None else self._reads
            scratch = memoryview(bytearray(min(step, end - start)))
            digests = bytearray()
            head = bytearray()
            for begin in range(start, end, step):
                piece = scratch[: min(step, end - begin)]
                filled = reader.read_into(begin, piece)
                if filled != len(piece):
                    raise IntegrityError(
                        f"ends at byte {begin + filled}, and the manifest says {self._record.size_bytes}"
                    )
                for position in range(begin, begin + len(piece), BLOCK_BYTES):
                    block = piece[position - begin : position - begin + BLOCK_BYTES]
                    if whole is not None:
                        whole.update(block)
                    else:
                        digests += block_digest(block)
                    head += block[: max(0, keep_until - position)]
                    self._hashing.advance(len(block))
        return _Span(bytes(digests) if whole is None else whole.digest().value, bytes(head))

    def _keep_until(self, reader: ObjectReader, start: int) -> int:
        if self._is_kept:
            return self._record.size_bytes
        if not self._is_shard or start > tensorfile.MAX_HEADER_BYTES:
            return 0
        first = bytearray(min(8, self._record.size_bytes))
        reader.read_into(0, memoryview(first))
        try:
            return tensorfile.header_length(bytes(first), self._record.size_bytes, self._record.path)
        except FormatError:
            # Nothing vouches for these bytes yet: whether they are wrong is for the digest to say.
            return 0

    def _where(self, digests: bytes) -> str:
        """Which bytes are wrong, where the index tells."""
        expected = self._block_digests(self._record.path)
        if self._algorithm != "blake3" or not expected or len(expected) != len(digests):
            return ""
        ranges: list[list[int]] = []
        for number in range(len(digests) // DIGEST_BYTES):
            part = slice(number * DIGEST_BYTES, (number + 1) * DIGEST_BYTES)
            if digests[part] == expected[part]:
                continue
            begin, end = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, self._record.size_bytes)
            if ranges and ranges[-1][1] == begin:
                ranges[-1][1] = end
            else:
                ranges.append([begin, end])
        told = ", ".join(f"{begin} to {end - 1}" for begin, end in ranges[:_MAX_RANGES])
        more = f" and {len(ranges) - _MAX_RANGES} more places" if len(ranges) > _MAX_RANGES else ""
        return f"; something within bytes {told}{more} is wrong" if ranges else ""
