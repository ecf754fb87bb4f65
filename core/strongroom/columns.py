"""The index in memory: columns of tensors and of chunks, and the records that they stand for.

A run of many ranks has millions of chunks. They stay columns (NumPy arrays) from the moment
that a file is decoded until someone asks for a tensor by name; its record is built then, and kept.
Knows neither the file (`strongroom.index`) nor whether chunks fit together (`strongroom.cover`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Final, TypeVar, overload

import numpy as np
import numpy.typing as npt

from strongroom.dtypes import DTYPE_BYTES, DTYPE_CODES

__all__ = ["Box", "Chunk", "Columns", "Integers", "TensorRecord", "TensorRecords", "products", "spans"]

Integers = npt.NDArray[np.int64]
Box = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes, an element for each dimension."""

_Number = TypeVar("_Number", np.int64, np.float64)

_DTYPE_CODES: Final = {name: code for code, name in enumerate(DTYPE_CODES)}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A hyper-rectangle of a tensor and where its row-major bytes lie.

    Attributes:
        offsets, sizes: elements per dimension, within the whole tensor.
        path: the shard, under ``data/``.
        start: of the chunk's first byte within the (unsealed) shard.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: str
    start: int


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A stored tensor: its name, dtype name (`strongroom.dtypes`), whole shape and chunks.

    Attributes:
        chunks: of an index that was read, built when one of them is looked at.
        placements: how the tensor was laid out over the ranks that saved it, for people and
            tools: ``mesh 2x2 (dp, tp): Shard(0), Replicate``. Never interpreted.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]
    placements: str = ""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def reached_by(self, boxes: Iterable[Box]) -> TensorRecord:
        """The same, with only those chunks that share an element with one of some boxes."""
        if isinstance(self.chunks, _Chunks):
            return replace(self, chunks=self.chunks.reached_by(boxes))
        listed = list(boxes)
        return replace(self, chunks=tuple(chunk for chunk in self.chunks if _reach(chunk, listed)))


def _reach(chunk: Chunk, boxes: Iterable[Box]) -> bool:
    return any(
        all(
            max(mine, other) < min(mine + size, other + extent)
            for mine, size, other, extent in zip(chunk.offsets, chunk.sizes, offsets, sizes, strict=True)
        )
        for offsets, sizes in boxes
    )


def spans(starts: Integers, lengths: Integers) -> Integers:
    """The positions ``starts[n]`` up to ``starts[n] + lengths[n]`` of every ``n``, one after the other."""
    before = np.cumsum(lengths) - lengths
    positions: Integers = np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - before, lengths)
    return positions


def products(values: npt.NDArray[_Number], lengths: Integers) -> npt.NDArray[_Number]:
    """The product of each run of ``lengths[n]`` values; 1 for a run of none."""
    result = np.ones(len(lengths), values.dtype)
    held = lengths > 0
    if held.any():
        # A run without values takes no room, so each other one ends where the next begins.
        result[held] = np.multiply.reduceat(values, (np.cumsum(lengths) - lengths)[held])
    return result


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns:
    """Tensors and their chunks, chunks in the order of their tensors.

    Attributes:
        names, placements: of each tensor.
        dtypes: of each tensor, as positions in `strongroom.dtypes.DTYPE_CODES`.
        dimensions: of each tensor, how many.
        shape: all dimensions of all tensors.
        counts: of each tensor, how many chunks.
        offsets, sizes: all dimensions of all chunks.
        files: of each chunk, the position of its shard in ``paths``.
        starts: of each chunk's first byte within its shard.
        paths: the shards.
    """

    names: tuple[str, ...]
    placements: tuple[str, ...]
    dtypes: Integers
    dimensions: Integers
    shape: Integers
    counts: Integers
    offsets: Integers
    sizes: Integers
    files: Integers
    starts: Integers
    paths: tuple[str, ...]

    @classmethod
    def of(cls, records: Sequence[TensorRecord], paths: Iterable[str]) -> Columns:
        """Columns of records; ``paths`` come first, then what else the chunks name."""
        chunks = [chunk for record in records for chunk in record.chunks]
        numbers = {path: number for number, path in enumerate(paths)}
        files = [numbers.setdefault(chunk.path, len(numbers)) for chunk in chunks]
        return cls(
            names=tuple(record.name for record in records),
            placements=tuple(record.placements for record in records),
            dtypes=_integers(_DTYPE_CODES[record.dtype] for record in records),
            dimensions=_integers(len(record.shape) for record in records),
            shape=_integers(chain.from_iterable(record.shape for record in records)),
            counts=_integers(len(record.chunks) for record in records),
            offsets=_integers(chain.from_iterable(chunk.offsets for chunk in chunks)),
            sizes=_integers(chain.from_iterable(chunk.sizes for chunk in chunks)),
            files=_integers(files),
            starts=_integers(chunk.start for chunk in chunks),
            paths=tuple(numbers),
        )

    @cached_property
    def tensor_of(self) -> Integers:
        """Of each chunk, the number of its tensor."""
        return np.repeat(np.arange(len(self.names), dtype=np.int64), self.counts)

    @cached_property
    def chunk_dimensions(self) -> Integers:
        """Of each chunk, how many dimensions it has."""
        return np.repeat(self.dimensions, self.counts)

    @cached_property
    def first_chunk(self) -> Integers:
        """Of each tensor, the number of its first chunk."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def first_size(self) -> Integers:
        """Of each tensor, where its dimensions begin in ``shape``."""
        return np.cumsum(self.dimensions) - self.dimensions

    @cached_property
    def first_extent(self) -> Integers:
        """Of each chunk, where its dimensions begin in ``offsets`` and ``sizes``."""
        return np.cumsum(self.chunk_dimensions) - self.chunk_dimensions

    @cached_property
    def chunk_elements(self) -> Integers:
        """Of each chunk, how many elements; exact once `strongroom.cover` found chunks within bounds."""
        return products(self.sizes, self.chunk_dimensions)

    @cached_property
    def item_bytes(self) -> Integers:
        """Of each tensor, the bytes of one element."""
        sizes: Integers = np.array(list(DTYPE_BYTES.values()), np.int64)
        return sizes[self.dtypes]

    def chunk_numbers(self, tensor: int) -> range:
        """The chunks of a tensor."""
        first = int(self.first_chunk[tensor])
        return range(first, first + int(self.counts[tensor]))

    def record(self, tensor: int) -> TensorRecord:
        """One tensor's record; its chunks are built when they are looked at."""
        dimensions, size = int(self.dimensions[tensor]), int(self.first_size[tensor])
        return TensorRecord(
            self.names[tensor],
            DTYPE_CODES[int(self.dtypes[tensor])],
            tuple(self.shape[size : size + dimensions].tolist()),
            _Chunks(self, tensor),
            self.placements[tensor],
        )

    def chunks(self, tensor: int, numbers: Integers) -> tuple[Chunk, ...]:
        """Build some chunks of a tensor."""
        extents = self.first_extent[numbers][:, np.newaxis] + np.arange(int(self.dimensions[tensor]))
        return tuple(
            Chunk(tuple(offsets), tuple(sizes), self.paths[file], start)
            for offsets, sizes, file, start in zip(
                self.offsets[extents].tolist(),
                self.sizes[extents].tolist(),
                self.files[numbers].tolist(),
                self.starts[numbers].tolist(),
                strict=True,
            )
        )


class _Chunks(Sequence[Chunk]):
    """A tensor's chunks, of which most readers of a large job need few."""

    __slots__ = ("_built", "_columns", "_tensor")

    def __init__(self, columns: Columns, tensor: int) -> None:
        self._columns = columns
        self._tensor = tensor
        self._built: tuple[Chunk, ...] | None = None

    @property
    def _all(self) -> tuple[Chunk, ...]:
        if self._built is None:
            self._built = self._columns.chunks(self._tensor, self._numbers)
        return self._built

    @property
    def _numbers(self) -> Integers:
        return np.array(self._columns.chunk_numbers(self._tensor), np.int64)

    def reached_by(self, boxes: Iterable[Box]) -> tuple[Chunk, ...]:
        columns, numbers = self._columns, self._numbers
        extents = columns.first_extent[numbers][:, np.newaxis] + np.arange(
            int(columns.dimensions[self._tensor])
        )
        begins = columns.offsets[extents]
        ends = begins + columns.sizes[extents]
        reached = np.zeros(len(numbers), bool)
        for offsets, sizes in boxes:
            low = np.array(offsets, np.int64)
            reached |= (np.maximum(begins, low) < np.minimum(ends, low + np.array(sizes, np.int64))).all(
                axis=1
            )
        return columns.chunks(self._tensor, numbers[reached])

    def __len__(self) -> int:
        return int(self._columns.counts[self._tensor])

    @overload
    def __getitem__(self, number: int) -> Chunk: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[Chunk, ...]: ...
    def __getitem__(self, number: int | slice) -> Chunk | tuple[Chunk, ...]:
        return self._all[number]

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._all)

    def __eq__(self, other: object) -> bool:
        return self._all == tuple(other) if isinstance(other, _Chunks | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._all)

    def __repr__(self) -> str:
        return repr(self._all)


def _integers(values: Iterable[int]) -> Integers:
    return np.fromiter(values, np.int64)


class TensorRecords(Mapping[str, TensorRecord]):
    """Records by name, in stored order, each built when it is first asked for."""

    def __init__(self, columns: Columns, built: Iterable[TensorRecord] = ()) -> None:
        self._columns = columns
        self._built = {record.name: record for record in built}

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self._columns.names)}

    def __getitem__(self, name: str) -> TensorRecord:
        record = self._built.get(name)
        if record is None:
            record = self._built[name] = self._columns.record(self._numbers[name])
        return record

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)
