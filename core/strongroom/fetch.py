"""Reading chunks: ranged, parallel, every block verified before a byte of it is used.

A block is read into scratch memory, its digest held against the index, and copied from that
same memory to its target: nothing can change between check and use. A sealed file's segments are
opened from scratch memory into other scratch memory, and vouch for themselves; of one that is read
whole, the digest is checked as well. With ``sha256`` a file
has one digest, so its blocks are hashed in order as they are copied, and a mismatch is found
at the file's end, before anything that was filled is used.

Where a checkpoint stands on several tiers, a file that is damaged in one, or cannot be read there, is
fetched anew from the next.

Fetching changes targets as it goes. Who calls decides what that means when it fails
(`strongroom.restore` falls back and overwrites, or names what is undefined).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.planner import ReadItem

from strongroom import layout, tensorfile
from strongroom.contents import segment_count
from strongroom.copies import tell_passed_over, worst
from strongroom.digest import BLOCK_BYTES, DIGEST_BYTES, Digest, block_digest, digest_of_blocks
from strongroom.dtypes import DTYPE_BYTES, bytes_of, torch_dtype
from strongroom.errors import IntegrityError, ObjectNotFoundError, StoreError, StrongroomError
from strongroom.index import Chunk, TensorRecord
from strongroom.manifest import SEALED_HEADER_BYTES, FileRecord
from strongroom.opened import ADVICE, OpenedCheckpoint
from strongroom.parallel import run_all
from strongroom.plan import chunk_of
from strongroom.sealing import Opener
from strongroom.shards import check_binding
from strongroom.stores.base import ObjectReader, Store
from strongroom.stores.offers import tuning_of

__all__ = ["fetch"]

Bytes = npt.NDArray[np.uint8]

_TASK_RUNS: Final = 8
"""What one thread does of a file at a time, in reads of the size that the store likes."""


class _Extent(NamedTuple):
    """A run of file bytes and the memory that they fill; ``owner`` names the target if it is that memory."""

    start: int
    end: int
    target: Bytes
    owner: str | None


@dataclass(frozen=True, slots=True)
class _Scattered:
    """A read whose target is not one run of host memory: it is filled from a buffer afterwards."""

    buffer: torch.Tensor
    target: torch.Tensor
    owner: str


def fetch(
    opened: OpenedCheckpoint,
    reads: Sequence[tuple[ReadItem, torch.Tensor]],
    records: Mapping[str, TensorRecord],
    *,
    workers: int,
    touched: set[str],
) -> int:
    """Fill every read's target; return how many file bytes were read.

    Args:
        reads: as `strongroom.plan.plan_read` gives them.
        records: the stored tensor for each name that the reads use.
        workers: threads, where the store does not ask for more.
        touched: receives the name of every target that was written to, also when this raises.

    Raises:
        IntegrityError: a file is missing, cut short or wrong, in every store; names it. Targets may
            have been written to.
        StoreError: a store could not be asked, and no other one has the file whole. Targets may have
            been written to.
    """
    extents: dict[str, list[_Extent]] = defaultdict(list)
    scattered: list[_Scattered] = []
    for item, target in reads:
        record = records[item.dest_index.fqn]
        chunk = chunk_of(records, item)
        _add_extent(extents[chunk.path], scattered, item, target, chunk, record.dtype)
    for found in extents.values():
        found.sort(key=_start_of)
    read_bytes = 0
    failed: dict[str, list[StrongroomError]] = {path: [] for path in extents}
    for number, store in enumerate(opened.stores, start=1):
        is_last = number == len(opened.stores)
        wanted = {path: extents[path] for path in failed}
        filled, errors = _fetch_from(store, opened, wanted, workers, touched, is_last=is_last)
        read_bytes += filled
        failed = {path: [*failed[path], error] for path, error in errors.items()}
        if not failed:
            break
        if is_last:
            raise worst(next(iter(failed.values())))
        for error in errors.values():
            tell_passed_over(store, error)
    with torch.no_grad():
        for read in scattered:
            touched.add(read.owner)
            read.target.copy_(read.buffer)
    return read_bytes


def _fetch_from(
    store: Store,
    opened: OpenedCheckpoint,
    extents: Mapping[str, list[_Extent]],
    workers: int,
    touched: set[str],
    *,
    is_last: bool,
) -> tuple[int, dict[str, StrongroomError]]:
    """Fetch files from one store: how many bytes were read, and which files it does not have whole.

    Args:
        is_last: whether there is no other store to take them from; what fails then ends it all.
    """
    tuning = tuning_of(store)
    scratches = _Scratches(max(1, tuning.read_bytes // BLOCK_BYTES))
    tasks: list[Callable[[], int]] = []
    with contextlib.ExitStack() as stack:
        files = {path: _File(store, opened, path, scratches, touched) for path in extents}
        for path, file in files.items():
            stack.enter_context(file)
            act = file.read if is_last else file.try_to_read
            tasks += [partial(act, part) for part in file.divide(extents[path])]
        read_bytes = sum(run_all(tasks, workers=max(workers, tuning.reads or 0), name="strongroom-fetch"))
    return read_bytes, {path: file.error for path, file in files.items() if file.error is not None}


def _add_extent(
    extents: list[_Extent],
    scattered: list[_Scattered],
    item: ReadItem,
    target: torch.Tensor,
    chunk: Chunk,
    dtype: str,
) -> None:
    if target.numel() == 0:
        return
    item_bytes = DTYPE_BYTES[dtype]
    offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    # Whole rows along the first dimension are one run of bytes; the rest of a cut is done in memory.
    row_bytes = math.prod(chunk.sizes[1:]) * item_bytes
    first, rows = (offsets[0], lengths[0]) if lengths else (0, 1)
    start = chunk.start + first * row_bytes
    is_whole_rows = all(length == size for length, size in zip(lengths[1:], chunk.sizes[1:], strict=True))
    if is_whole_rows and target.device.type == "cpu" and target.is_contiguous() and not _is_lazy(target):
        extents.append(_Extent(start, start + target.nbytes, _bytes_of(target), item.dest_index.fqn))
        return
    buffer = torch.empty((rows, *chunk.sizes[1:]) if lengths else (), dtype=torch_dtype(dtype), device="cpu")
    extents.append(_Extent(start, start + buffer.nbytes, _bytes_of(buffer), None))
    for dimension in range(1, len(lengths)):
        buffer = buffer.narrow(dimension, offsets[dimension], lengths[dimension])
    scattered.append(_Scattered(buffer, target, item.dest_index.fqn))


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes are not its values yet (a pending conjugate or negation)."""
    return tensor.is_conj() or tensor.is_neg()


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    return np.frombuffer(bytes_of(tensor), np.uint8) if tensor.numel() else np.empty(0, np.uint8)


def _start_of(extent: _Extent) -> int:
    return extent.start


def _split(extents: list[_Extent], task_bytes: int) -> list[list[_Extent]]:
    """Cut a file's extents into tasks that threads can share."""
    parts: dict[int, list[_Extent]] = defaultdict(list)
    for extent in extents:
        position, end, target, owner = extent
        part = position // task_bytes
        if end <= (part + 1) * task_bytes:
            parts[part].append(extent)
            continue
        while position < end:
            part = position // task_bytes
            stop = min(end, (part + 1) * task_bytes)
            piece = target[position - extent.start : stop - extent.start]
            parts[part].append(_Extent(position, stop, piece, owner))
            position = stop
    return [parts[part] for part in sorted(parts)]


class _Scratch:
    """One thread's memory: for blocks or sealed segments as they are stored, and for opened ones."""

    def __init__(self, run_blocks: int) -> None:
        self._bytes = run_blocks * BLOCK_BYTES
        self.stored: Bytes = np.empty(self._bytes + SEALED_HEADER_BYTES, np.uint8)

    @property
    def blocks(self) -> Bytes:
        return self.stored[: self._bytes]

    @cached_property
    def opened(self) -> Bytes:
        return np.empty(self._bytes, np.uint8)


class _Scratches:
    """Memory that blocks are read into: one piece a thread, used again and again.

    Fresh pages for each task would cost about as much as hashing what is read into them.

    Args:
        run_blocks: what one read asks for at most.
    """

    def __init__(self, run_blocks: int) -> None:
        self.run_blocks = run_blocks
        self._free: list[_Scratch] = []

    @contextlib.contextmanager
    def one(self) -> Iterator[_Scratch]:
        # Of a list these two are atomic, so that no two threads are given the same piece.
        try:
            scratch = self._free.pop()
        except IndexError:
            scratch = _Scratch(self.run_blocks)
        try:
            yield scratch
        finally:
            self._free.append(scratch)


class _CopyOut:
    """Copies verified bytes to their targets; asked for ranges that grow, it looks at no extent twice."""

    def __init__(self, extents: list[_Extent], touched: set[str]) -> None:
        self._extents = extents
        self._touched = touched
        self._next = 0
        self._begun: list[_Extent] = []

    def copy(self, start: int, data: Bytes) -> None:
        """Copy the file's bytes from ``start`` on to whatever they belong to."""
        end = start + len(data)
        extents, touched, position = self._extents, self._touched, self._next
        begun, self._begun = self._begun, []
        for extent in begun:
            self._copy(extent, start, end, data)
        while position < len(extents) and extents[position].start < end:
            extent = extents[position]
            position += 1
            if extent.owner is not None:
                touched.add(extent.owner)
            self._copy(extent, start, end, data)
        self._next = position

    def _copy(self, extent: _Extent, start: int, end: int, data: Bytes) -> None:
        if start <= extent.start and extent.end <= end:
            np.copyto(extent.target, data[extent.start - start : extent.end - start])
            return
        low, high = max(start, extent.start), min(end, extent.end)
        np.copyto(extent.target[low - extent.start : high - extent.start], data[low - start : high - start])
        if extent.end > end:
            self._begun.append(extent)


class _File:
    """One shard in one store, opened by whichever thread comes first, closed after the last; read in parts.

    Attributes:
        error: why `try_to_read` could not.
    """

    def __init__(
        self,
        store: Store,
        opened: OpenedCheckpoint,
        path: str,
        scratches: _Scratches,
        touched: set[str],
    ) -> None:
        self.error: StrongroomError | None = None
        self._store = store
        self._opened = opened
        self._manifest = opened.manifest
        self._record = opened.record(path)
        self._opener = opened.opener(self._record) if self._record.header is not None else None
        self._unit_bytes = BLOCK_BYTES if self._opener is None else self._opener.segment_bytes
        self._parts_left = 0
        self._whole: _WholeFile | None = None
        self._scratches = scratches
        self._touched = touched
        self._blocks = opened.index.files[path].block_digests
        self._what = f"{path} of {opened.manifest.name}"
        self._lock = threading.Lock()
        self._reader: ObjectReader | None = None
        self._has_header = False

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        """Close what is still open, because another part or file failed."""
        self._close()

    def divide(self, extents: list[_Extent]) -> list[list[_Extent]]:
        """Cut what is wanted of the file into parts, for `read`; with ``sha256`` a whole file is one."""
        is_sha256 = self._manifest.algorithm == "sha256"
        if self._opener is not None and _is_all(extents, self._opener):
            self._whole = _WholeFile(self._record)
        if is_sha256 and (self._opener is None or self._whole is not None):
            parts = [extents]
        else:
            parts = _split(extents, _TASK_RUNS * self._scratches.run_blocks * self._unit_bytes)
        self._parts_left = len(parts)
        return parts

    def try_to_read(self, extents: list[_Extent]) -> int:
        """As `read`, but what fails is kept in `error`, and the file's other parts are left then."""
        if self.error is not None:
            return 0
        try:
            return self.read(extents)
        except (IntegrityError, StoreError) as error:
            self.error = error
            return 0

    def read(self, extents: list[_Extent]) -> int:
        """Read, verify and copy out one part; how many bytes were read. Runs on any thread."""
        try:
            reader = self._open()
            with self._scratches.one() as scratch:
                copy_out = _CopyOut(extents, self._touched)
                if self._opener is not None:
                    read_bytes = self._read_segments(reader, self._opener, extents, scratch, copy_out)
                elif self._manifest.algorithm == "sha256":
                    read_bytes = self._read_whole(reader, scratch.blocks, copy_out)
                else:
                    read_bytes = self._read_blocks(reader, extents, scratch.blocks, copy_out)
        except ObjectNotFoundError:
            raise self._opened.missing(self._record) from None
        with self._lock:
            self._parts_left -= 1
            is_last = self._parts_left == 0
        if is_last:
            self._close()
            if self._whole is not None:
                self._check_digest(self._whole.digest())
        return read_bytes

    def _open(self) -> ObjectReader:
        with self._lock:
            if self._reader is None:
                key = layout.data_key(self._manifest.name, self._record.path)
                self._reader = self._store.open_reader(key)
            if self._reader.size_bytes != self._record.size_bytes:
                raise IntegrityError(
                    f"{self._what} has {self._reader.size_bytes} bytes, the manifest says "
                    f"{self._record.size_bytes}; {ADVICE}"
                )
            if self._record.header is not None and not self._has_header:
                self._check_sealed_header(self._reader, self._record.header)
                self._has_header = True
            return self._reader

    def _close(self) -> None:
        with self._lock:
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _read_blocks(
        self, reader: ObjectReader, extents: list[_Extent], scratch: Bytes, copy_out: _CopyOut
    ) -> int:
        read_bytes = 0
        for first, count in _runs(extents, BLOCK_BYTES, self._scratches.run_blocks):
            start = first * BLOCK_BYTES
            length = min(count * BLOCK_BYTES, self._record.size_bytes - start)
            self._fill(reader, start, scratch[:length])
            for number in range(first, first + count):
                block = scratch[
                    (number - first) * BLOCK_BYTES : min((number - first + 1) * BLOCK_BYTES, length)
                ]
                expected = self._blocks[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
                if block_digest(block.data) != expected:
                    raise IntegrityError(
                        f"{self._what}: bytes {number * BLOCK_BYTES} to "
                        f"{number * BLOCK_BYTES + len(block)} do "
                        f"not have the digest that was stored for them; {ADVICE}"
                    )
            if first == 0:
                self._check_header(scratch[:length])
            copy_out.copy(start, scratch[:length])
            read_bytes += length
        return read_bytes

    def _read_segments(
        self,
        reader: ObjectReader,
        opener: Opener,
        extents: list[_Extent],
        scratch: _Scratch,
        copy_out: _CopyOut,
    ) -> int:
        read_bytes = 0
        for first, count in _runs(extents, opener.segment_bytes, self._scratches.run_blocks):
            start, end = opener.stored_range(first, count)
            if self._whole is None:
                stored = scratch.stored[: end - start]
                self._fill(reader, start, stored)
            else:
                # Blocks begin at whole MiB, segments behind the header: what lies between is read, too.
                begin = first * BLOCK_BYTES
                stored = scratch.stored[: end - begin]
                self._fill(reader, begin, stored)
                self._whole.take(first, count, stored)
                stored = stored[start - begin :]
            try:
                filled = opener.open_into(first, stored.data, scratch.opened.data)
            except IntegrityError as error:
                raise IntegrityError(f"{self._what}: {error}; {ADVICE}") from error
            opened = scratch.opened[:filled]
            if first == 0:
                self._check_header(opened)
            copy_out.copy(first * opener.segment_bytes, opened)
            read_bytes += len(stored)
        return read_bytes

    def _read_whole(self, reader: ObjectReader, scratch: Bytes, copy_out: _CopyOut) -> int:
        hasher = hashlib.sha256()
        for start in range(0, self._record.size_bytes, len(scratch)):
            piece = scratch[: min(len(scratch), self._record.size_bytes - start)]
            self._fill(reader, start, piece)
            hasher.update(piece.data)
            if start == 0:
                self._check_header(piece)
            copy_out.copy(start, piece)
        self._check_digest(Digest("sha256", hasher.digest()))
        return self._record.size_bytes

    def _check_digest(self, found: Digest) -> None:
        if not found.matches(self._record.digest):
            raise IntegrityError(
                f"{self._what}: stored digest {found} is not the manifest's {self._record.digest}; {ADVICE}"
            )

    def _check_sealed_header(self, reader: ObjectReader, pinned: bytes) -> None:
        """Hold what the sealed file begins with against the manifest, though only the latter's is used."""
        found = np.empty(len(pinned), np.uint8)
        self._fill(reader, 0, found)
        if found.tobytes() != pinned:
            raise IntegrityError(
                f"{self._what} does not begin with the header that the manifest pins; {ADVICE}"
            )

    def _fill(self, reader: ObjectReader, start: int, target: Bytes) -> None:
        filled = reader.read_into(start, target.data)
        if filled != len(target):
            raise IntegrityError(
                f"{self._what} ends at byte {start + filled}; the manifest says {self._record.size_bytes}; "
                f"{ADVICE}"
            )

    def _check_header(self, first_bytes: Bytes) -> None:
        """Hold the shard's own word on where it belongs against the manifest, where it is at hand."""
        file_bytes = self._record.plain_bytes
        length = tensorfile.header_length(first_bytes[:8].tobytes(), file_bytes, self._what)
        if length <= len(first_bytes):
            header = tensorfile.parse_header(first_bytes[:length].tobytes(), file_bytes, self._what)
            check_binding(header.metadata, self._manifest.run, self._manifest.name, self._what)


class _WholeFile:
    """The digest of a sealed file of which everything is read: its segments alone vouch for the key's holder.

    Whoever has a file's key could seal another file with the same header; of a file that is read
    whole, the digest is known as well.
    """

    def __init__(self, record: FileRecord) -> None:
        self._size_bytes = record.size_bytes
        self._blocks: list[bytes] = [b""] * -(-record.size_bytes // BLOCK_BYTES)
        # As one part, so that it comes in order.
        self._sha256 = hashlib.sha256() if record.digest.algorithm == "sha256" else None

    def take(self, first: int, count: int, stored: Bytes) -> None:
        """Take what is stored from block ``first`` on: ``count`` blocks, and the file's end if it follows."""
        end = first * BLOCK_BYTES + len(stored)
        kept = len(stored) if end == self._size_bytes else count * BLOCK_BYTES
        if self._sha256 is not None:
            self._sha256.update(stored[:kept].data)
            return
        for start in range(0, kept, BLOCK_BYTES):
            block = stored[start : min(start + BLOCK_BYTES, kept)]
            self._blocks[first + start // BLOCK_BYTES] = block_digest(block.data)

    def digest(self) -> Digest:
        if self._sha256 is not None:
            return Digest("sha256", self._sha256.digest())
        return digest_of_blocks(b"".join(self._blocks))


def _is_all(extents: list[_Extent], opener: Opener) -> bool:
    """Whether every segment of a file is read for these."""
    return sum(count for _, count in _runs(extents, opener.segment_bytes, 1)) == segment_count(opener)


def _runs(extents: list[_Extent], unit_bytes: int, run_units: int) -> list[tuple[int, int]]:
    """The units that extents touch, as (first, count), neighbours joined up to ``run_units``."""
    runs: list[tuple[int, int]] = []
    stop = 0
    for extent in extents:
        first, last = extent.start // unit_bytes, (extent.end - 1) // unit_bytes
        if first > stop or not runs:
            runs.append((first, last + 1))
        elif last < stop:
            continue
        else:
            runs[-1] = (runs[-1][0], last + 1)
        stop = last + 1
    return [
        (begin, min(run_units, stop - begin))
        for first, stop in runs
        for begin in range(first, stop, run_units)
    ]
