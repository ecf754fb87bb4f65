"""Whether chunks cover their tensors: each within its tensor, none over another, nothing left out. Pure.

One check for the writer's merged index and for every index that is read, so that what is
committed is what readers accept. It sorts and sweeps columns, and is near linear in the number
of chunks: a tensor that is cut into the cells of a grid (every layout that torch makes) is
known to be free of overlaps once no chunk begins strictly inside another's extent and no
two begin at one place; one that is cut otherwise, by its corners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.ma  # np.unique imports it when it is first called: the middle of a save is no time for that
import numpy.typing as npt

from strongroom.columns import Columns, Integers, products, spans

__all__ = ["MAX_CORNERS", "MAX_ELEMENTS", "Fault", "fault_of"]

MAX_ELEMENTS: Final = 2**60
"""Of one tensor, dimensions of size 0 counted as 1: strides are computed from those too."""

MAX_CORNERS: Final = 2**24
"""Work allowed for tensors that are not cut along a grid: chunks x 2^(dimensions that are cut)."""

_SHARDS_TOLD: Final = 4
_PAIRS_TRIED: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong with a tensor; ``problem`` names it and the shards in question."""

    tensor: str
    problem: str


def fault_of(columns: Columns, *, is_partial: bool = False) -> Fault | None:
    """The first tensor found that its chunks do not cover exactly once; None: there is none.

    Args:
        columns: counts must add up to the columns' lengths.
        is_partial: chunks of some ranks alone: they need not add up to their tensors, and
            whether they overlap is left to the check of all of them.
    """
    fault = _out_of_bounds(columns) or _miscounted(columns, is_partial)
    return fault if fault is not None or is_partial else _overlapping(columns)


def _out_of_bounds(columns: Columns) -> Fault | None:
    """A shape beyond bounds, or a chunk outside of its tensor; sound for any values below 2^62."""
    extent = products(np.maximum(columns.shape, 1).astype(np.float64), columns.dimensions)
    if (bad := _first(extent > MAX_ELEMENTS)) is not None:
        first = int(columns.first_size[bad])
        shape = columns.shape[first : first + int(columns.dimensions[bad])].tolist()
        return _fault(columns, bad, f"{{}} has the shape {shape}")
    outside = _first(columns.offsets + columns.sizes > _wholes(columns))
    if outside is None:
        return None
    chunk = int(np.searchsorted(columns.first_extent + columns.chunk_dimensions, outside, side="right"))
    return _fault(
        columns,
        int(columns.tensor_of[chunk]),
        f"a chunk of {{}} lies outside of it, in {_path(columns, chunk)}",
    )


def _miscounted(columns: Columns, is_partial: bool) -> Fault | None:
    """Chunks that have other than the tensor's number of elements in sum."""
    elements = products(columns.shape, columns.dimensions)
    tensors = len(columns.names)
    # Floats first: a sum of many chunks of 2^60 elements could wrap around.
    about = np.bincount(columns.tensor_of, weights=columns.chunk_elements, minlength=tensors)
    stored = np.zeros(tensors, np.int64)
    held = columns.counts > 0
    if held.any():
        stored[held] = np.add.reduceat(columns.chunk_elements, columns.first_chunk[held])
    wrong = (about > 2 * MAX_ELEMENTS) | (stored > elements if is_partial else stored != elements)
    if (bad := _first(wrong)) is None:
        return None
    found = int(about[bad]) if about[bad] > 2 * MAX_ELEMENTS else int(stored[bad])
    overlap = _overlap_of(columns, bad) if found > elements[bad] else None
    return overlap or _fault(
        columns,
        bad,
        f"the chunks of {{}} hold {found} of {int(elements[bad])} elements, in "
        f"{_paths(columns, columns.chunk_numbers(bad))}",
    )


def _overlapping(columns: Columns) -> Fault | None:
    """Chunks that share an element."""
    filled = columns.chunk_elements > 0
    several = np.bincount(columns.tensor_of[filled], minlength=len(columns.names)) > 1
    chosen = filled & several[columns.tensor_of] & (columns.chunk_dimensions > 0)
    for dimensions in np.unique(columns.chunk_dimensions[chosen]).tolist():
        chunks = np.flatnonzero(chosen & (columns.chunk_dimensions == dimensions))
        fault = _overlapping_of_one_kind(columns, chunks, dimensions)
        if fault is not None:
            return fault
    return None


def _overlapping_of_one_kind(columns: Columns, chunks: Integers, dimensions: int) -> Fault | None:
    """As `_overlapping`, among chunks with elements of tensors of the same number of dimensions."""
    extents = columns.first_extent[chunks][:, np.newaxis] + np.arange(dimensions)
    begins = columns.offsets[extents]
    ends = begins + columns.sizes[extents]
    tensors = columns.tensor_of[chunks]
    is_regular = np.ones(len(chunks), bool)
    cell = tensors
    for dimension in range(dimensions):
        begin, end = begins[:, dimension], ends[:, dimension]
        if not begin.any():
            continue  # Nothing is cut along this dimension, or what is shares its first row.
        places = _Places(tensors, begin)
        is_regular &= places.next_begin_is_at_least(end)
        cell = _combined(cell, places.number)
    irregular = np.unique(tensors[~is_regular])
    on_grid = ~np.isin(tensors, irregular) if len(irregular) else is_regular
    cells = np.sort(cell[on_grid])
    if (twice := _first(cells[1:] == cells[:-1])) is not None:
        first = int((on_grid & (cell == cells[twice])).argmax())
        return _certain_overlap_of(columns, int(tensors[first]))
    corners = 0
    for tensor in irregular.tolist():
        low, high = begins[tensors == tensor], ends[tensors == tensor]
        cut = ((low != low[0]) | (high != high[0])).any(axis=0)
        corners += len(low) << int(cut.sum())
        if corners > MAX_CORNERS:
            return _fault(columns, tensor, "{} is cut into too many pieces that are no cells of a grid")
        if not _tile(low[:, cut], high[:, cut]):
            return _certain_overlap_of(columns, tensor)
    return None


class _Places:
    """Where chunks begin along one dimension: the distinct places of each tensor, in order."""

    def __init__(self, tensors: Integers, begins: Integers) -> None:
        self._width = int(begins.max()) + 1
        self._values: Integers | None = None
        if int(tensors[-1]) >= 2**62 // (self._width + 1):
            # Tensor and place do not fit into one integer: count the places instead.
            self._values, begins = np.unique(begins, return_inverse=True)
            self._width = len(self._values)
        self._tensors = tensors
        keys = tensors * (self._width + 1) + begins
        if (keys[1:] > keys[:-1]).all():
            self._distinct: Integers = keys
            self.number: Integers = np.arange(len(keys))
        else:
            self._distinct, self.number = np.unique(keys, return_inverse=True)

    def next_begin_is_at_least(self, ends: Integers) -> npt.NDArray[np.bool_]:
        """Of each chunk, whether the next place of its tensor is not before the chunk's end."""
        limits = ends if self._values is None else np.searchsorted(self._values, ends)
        following = np.append(self._distinct, np.iinfo(np.int64).max)[self.number + 1]
        return following >= self._tensors * (self._width + 1) + np.minimum(limits, self._width)


def _combined(first: Integers, second: Integers) -> Integers:
    """One integer for each pair, equal where the pairs are."""
    width = int(second.max()) + 1
    if int(first.max()) >= 2**62 // width:
        first = np.unique(first, return_inverse=True)[1]
    return first * width + second


def _tile(begins: Integers, ends: Integers) -> bool:
    """Whether boxes whose volumes add up to that of the box around them fill it without overlap.

    They do if and only if, counted with alternating signs, their corners cancel out but for
    those of the box around them: a sum of indicator functions is known by its differences.
    """
    count, dimensions = begins.shape
    sides = (np.arange(1 << dimensions)[:, np.newaxis] >> np.arange(dimensions)) & 1
    signs = 1 - 2 * (sides.sum(axis=1) % 2)
    keys = np.zeros(len(sides) * (count + 1), np.int64)
    for dimension in range(dimensions):
        low, high = begins[:, dimension], ends[:, dimension]
        places = np.concatenate([low, [low.min()], high, [high.max()]])
        numbers = np.unique(places, return_inverse=True)[1].reshape(2, count + 1)
        keys = _combined(keys, numbers[sides[:, dimension]].reshape(-1))
    # The box around all counts against the boxes.
    weights = signs[:, np.newaxis] * np.append(np.ones(count, np.int64), -1)
    corners = np.unique(keys, return_inverse=True)[1]
    return not np.bincount(corners, weights=weights.reshape(-1)).any()


def _certain_overlap_of(columns: Columns, tensor: int) -> Fault:
    return _overlap_of(columns, tensor) or _fault(
        columns, tensor, "chunks of {} overlap, so that a part of it is nowhere"
    )


def _overlap_of(columns: Columns, tensor: int) -> Fault | None:
    """Name two chunks of a tensor that share an element, if they are soon found."""
    numbers = [number for number in columns.chunk_numbers(tensor) if columns.chunk_elements[number]]
    if len(numbers) < 2:
        return None
    dimensions = int(columns.dimensions[tensor])
    chunks = np.array(numbers, np.int64)
    extents = columns.first_extent[chunks][:, np.newaxis] + np.arange(dimensions)
    order = np.lexsort(columns.offsets[extents].T[::-1]) if dimensions else np.arange(len(chunks))
    chunks = chunks[order]
    begins = columns.offsets[extents[order]]
    ends = begins + columns.sizes[extents[order]]
    for number in range(min(len(chunks) - 1, _PAIRS_TRIED)):
        others = slice(number + 1, number + 1 + _PAIRS_TRIED)
        shared = _first(((begins[others] < ends[number]) & (ends[others] > begins[number])).all(axis=1))
        if shared is not None:
            return _overlap(columns, tensor, int(chunks[number]), int(chunks[number + 1 + shared]))
    return None


def _overlap(columns: Columns, tensor: int, one: int, other: int) -> Fault:
    size = int(columns.dimensions[tensor])
    first = [slice(int(columns.first_extent[n]), int(columns.first_extent[n]) + size) for n in (one, other)]
    offsets = [columns.offsets[extent].tolist() for extent in first]
    is_same = offsets[0] == offsets[1] and np.array_equal(columns.sizes[first[0]], columns.sizes[first[1]])
    where = f"{_path(columns, one)} and {_path(columns, other)}"
    if is_same:
        return _fault(columns, tensor, f"the chunk of {{}} at {offsets[0]} is stored twice, in {where}")
    return _fault(
        columns,
        tensor,
        f"chunks of {{}} overlap, so that a part of it is nowhere: those at {offsets[0]} and {offsets[1]}, "
        f"in {where}",
    )


def _wholes(columns: Columns) -> Integers:
    """Of each dimension of each chunk, the tensor's size."""
    return columns.shape[spans(columns.first_size[columns.tensor_of], columns.chunk_dimensions)]


def _first(flags: npt.NDArray[np.bool_]) -> int | None:
    return int(flags.argmax()) if flags.any() else None


def _path(columns: Columns, chunk: int) -> str:
    return columns.paths[int(columns.files[chunk])]


def _paths(columns: Columns, chunks: Sequence[int]) -> str:
    paths = list(dict.fromkeys(_path(columns, chunk) for chunk in chunks))
    more = f" and {len(paths) - _SHARDS_TOLD} more" if len(paths) > _SHARDS_TOLD else ""
    return (", ".join(paths[:_SHARDS_TOLD]) or "no shard") + more


def _fault(columns: Columns, tensor: int, problem: str) -> Fault:
    name = columns.names[tensor]
    return Fault(tensor=name, problem=problem.replace("{}", f"{name[:80]!r}", 1))
