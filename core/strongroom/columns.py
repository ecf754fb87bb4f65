"""The index in memory: columns of tensors and of chunks, and the records that they stand for.

A run of many ranks has millions of chunks. They stay columns (NumPy arrays) from the moment
that a file is decoded until someone asks for a tensor by name; its record is built then, and kept.
Knows neither the file (`strongroom.index`) nor whether chunks fit together (`strongroom.cover`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from strongroom.dtypes import DTYPE_BYTES, DTYPE_CODES

__all__ = ["Chunk", "Columns", "Integers", "TensorRecord", "TensorRecords", "products", "spans"]

Integers = npt.NDArray[np.int64]
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
        placements: how the tensor was laid out over the ranks that saved it, for people and
            tools: ``mesh 2x2 (dp, tp): Shard(0), Replicate``. Never interpreted.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    placements: str = ""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


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
        """Build one tensor's record."""
        dimensions, count = int(self.dimensions[tensor]), int(self.counts[tensor])
        size, chunk = int(self.first_size[tensor]), int(self.first_chunk[tensor])
        extent = int(self.first_extent[chunk]) if count else 0
        extents = slice(extent, extent + count * dimensions)
        chunks = zip(
            self.offsets[extents].reshape(count, dimensions).tolist(),
            self.sizes[extents].reshape(count, dimensions).tolist(),
            self.files[chunk : chunk + count].tolist(),
            self.starts[chunk : chunk + count].tolist(),
            strict=True,
        )
        return TensorRecord(
            self.names[tensor],
            DTYPE_CODES[int(self.dtypes[tensor])],
            tuple(self.shape[size : size + dimensions].tolist()),
            tuple(
                Chunk(tuple(offsets), tuple(sizes), self.paths[file], start)
                for offsets, sizes, file, start in chunks
            ),
            self.placements[tensor],
        )


def _integers(values: Iterable[int]) -> Integers:
    return np.fromiter(values, np.int64)


class TensorRecords(Mapping[str, TensorRecord]):
    """Records by name, in stored order, each built when it is first asked for."""

    def __init__(self, columns: Columns, built: Iterable[TensorRecord] = ()) -> None:
        self._columns = columns
        self._numbers = {name: number for number, name in enumerate(columns.names)}
        self._built = {record.name: record for record in built}

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
