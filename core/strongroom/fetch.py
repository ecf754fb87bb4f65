"""Reading chunks: ranged, parallel, every block verified before a byte of it is used.

A block is read into scratch memory, its digest held against the index, and copied from that
same memory to its target: nothing can change between check and use. With ``sha256`` a file
has one digest, so its blocks are hashed in order as they are copied, and a mismatch is found
at the file's end, before anything that was filled is used.

Fetching changes targets as it goes. Who calls decides what that means when it fails
(`strongroom.restore` falls back and overwrites, or names what is undefined).
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.planner import ReadItem

from strongroom import layout, tensorfile
from strongroom.digest import BLOCK_BYTES, DIGEST_BYTES, Digest, DigestAlgorithm, block_digest
from strongroom.dtypes import DTYPE_BYTES, torch_dtype
from strongroom.errors import IntegrityError, ObjectNotFoundError
from strongroom.index import Chunk, TensorRecord
from strongroom.opened import ADVICE, OpenedCheckpoint
from strongroom.parallel import run_all
from strongroom.plan import chunk_number
from strongroom.shards import check_binding
from strongroom.stores.base import ObjectReader

__all__ = ["fetch"]

Bytes = npt.NDArray[np.uint8]

_RUN_BLOCKS: Final = 4
"""Blocks read by one call: 4 MiB, enough to keep a disk busy and small enough to stay in cache."""


@dataclass(frozen=True, slots=True)
class _Extent:
    """A run of file bytes and the memory that they fill; ``owner`` names the target if it is that memory."""

    start: int
    target: Bytes
    owner: str | None

    @property
    def end(self) -> int:
        return self.start + len(self.target)


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
        workers: threads.
        touched: receives the name of every target that was written to, also when this raises.

    Raises:
        IntegrityError: a file is missing, cut short or wrong; names it. Targets may have
            been written to.
        StoreError: the store could not be asked. Targets may have been written to.
    """
    extents: dict[str, list[_Extent]] = defaultdict(list)
    scattered: list[_Scattered] = []
    for item, target in reads:
        record = records[item.dest_index.fqn]
        chunk = record.chunks[chunk_number(record, item.storage_index)]
        _add_extent(extents[chunk.path], scattered, item, target, chunk, record.dtype)
    tasks = [
        _Task(opened, path, runs, touched)
        for path, file_extents in extents.items()
        for runs in _split(opened.manifest.algorithm, sorted(file_extents, key=lambda extent: extent.start))
    ]
    read_bytes = sum(run_all([task.run for task in tasks], workers=workers, name="strongroom-fetch"))
    with torch.no_grad():
        for read in scattered:
            touched.add(read.owner)
            read.target.copy_(read.buffer)
    return read_bytes


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
        extents.append(_Extent(start, _bytes_of(target), item.dest_index.fqn))
        return
    buffer = torch.empty((rows, *chunk.sizes[1:]) if lengths else (), dtype=torch_dtype(dtype), device="cpu")
    extents.append(_Extent(start, _bytes_of(buffer), None))
    for dimension in range(1, len(lengths)):
        buffer = buffer.narrow(dimension, offsets[dimension], lengths[dimension])
    scattered.append(_Scattered(buffer, target, item.dest_index.fqn))


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes are not its values yet (a pending conjugate or negation)."""
    return tensor.is_conj() or tensor.is_neg()


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    flat: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat


def _split(algorithm: DigestAlgorithm, extents: list[_Extent]) -> list[list[_Extent]]:
    """Cut a file's extents into tasks that threads can share; ``sha256`` needs the file as one."""
    if algorithm == "sha256" or not extents:
        return [extents]
    span = max(_RUN_BLOCKS * BLOCK_BYTES, 16 * BLOCK_BYTES)
    parts: dict[int, list[_Extent]] = defaultdict(list)
    for extent in extents:
        position = extent.start
        while position < extent.end:
            part = position // span
            end = min(extent.end, (part + 1) * span)
            piece = extent.target[position - extent.start : end - extent.start]
            parts[part].append(_Extent(position, piece, extent.owner))
            position = end
    return [parts[part] for part in sorted(parts)]


class _Task:
    """Some extents of one file, read by one thread."""

    def __init__(
        self, opened: OpenedCheckpoint, path: str, extents: list[_Extent], touched: set[str]
    ) -> None:
        self._opened = opened
        self._manifest = opened.manifest
        self._record = opened.record(path)
        self._touched = touched
        self._blocks = opened.index.files[path].block_digests
        self._extents = extents
        self._what = f"{path} of {opened.manifest.name}"

    def run(self) -> int:
        if not self._extents:
            return 0
        try:
            with self._opened.store.open_reader(
                layout.data_key(self._manifest.name, self._record.path)
            ) as reader:
                if reader.size_bytes != self._record.size_bytes:
                    raise IntegrityError(
                        f"{self._what} has {reader.size_bytes} bytes, the manifest says "
                        f"{self._record.size_bytes}; {ADVICE}"
                    )
                if self._manifest.algorithm == "sha256":
                    return self._run_whole(reader)
                return self._run_blocks(reader)
        except ObjectNotFoundError:
            raise self._opened.missing(self._record) from None

    def _run_blocks(self, reader: ObjectReader) -> int:
        scratch: Bytes = np.empty(_RUN_BLOCKS * BLOCK_BYTES, np.uint8)
        read_bytes = 0
        for first, count in self._block_runs():
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
            self._copy_out(start, scratch[:length])
            read_bytes += length
        return read_bytes

    def _run_whole(self, reader: ObjectReader) -> int:
        hasher = hashlib.sha256()
        scratch: Bytes = np.empty(_RUN_BLOCKS * BLOCK_BYTES, np.uint8)
        for start in range(0, self._record.size_bytes, len(scratch)):
            piece = scratch[: min(len(scratch), self._record.size_bytes - start)]
            self._fill(reader, start, piece)
            hasher.update(piece.data)
            if start == 0:
                self._check_header(piece)
            self._copy_out(start, piece)
        found = Digest("sha256", hasher.digest())
        if not found.matches(self._record.digest):
            raise IntegrityError(
                f"{self._what}: stored digest {found} is not the manifest's {self._record.digest}; {ADVICE}"
            )
        return self._record.size_bytes

    def _block_runs(self) -> list[tuple[int, int]]:
        """The blocks that the extents touch, as (first, count), neighbours joined."""
        runs: list[tuple[int, int]] = []
        for extent in self._extents:
            first = extent.start // BLOCK_BYTES
            last = (extent.end - 1) // BLOCK_BYTES
            if runs and first <= runs[-1][0] + runs[-1][1]:
                begin = runs[-1][0]
                runs[-1] = (begin, max(runs[-1][1], last - begin + 1))
            else:
                runs.append((first, last - first + 1))
        return [
            (begin, min(_RUN_BLOCKS, first + count - begin))
            for first, count in runs
            for begin in range(first, first + count, _RUN_BLOCKS)
        ]

    def _fill(self, reader: ObjectReader, start: int, target: Bytes) -> None:
        filled = reader.read_into(start, target.data)
        if filled != len(target):
            raise IntegrityError(
                f"{self._what} ends at byte {start + filled}; the manifest says {self._record.size_bytes}; "
                f"{ADVICE}"
            )

    def _check_header(self, first_bytes: Bytes) -> None:
        """Hold the shard's own word on where it belongs against the manifest, where it is at hand."""
        length = tensorfile.header_length(first_bytes[:8].tobytes(), self._record.size_bytes, self._what)
        if length <= len(first_bytes):
            header = tensorfile.parse_header(
                first_bytes[:length].tobytes(), self._record.size_bytes, self._what
            )
            check_binding(header.metadata, self._manifest.run, self._manifest.name, self._what)

    def _copy_out(self, start: int, data: Bytes) -> None:
        end = start + len(data)
        for extent in self._extents:
            low, high = max(start, extent.start), min(end, extent.end)
            if low < high:
                if extent.owner is not None:
                    self._touched.add(extent.owner)
                np.copyto(
                    extent.target[low - extent.start : high - extent.start], data[low - start : high - start]
                )
