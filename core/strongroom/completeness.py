"""From the ranks' own indexes to the checkpoint's: nothing is committed that is not complete. Pure.

Each rank tells what it wrote as a partial index (`strongroom.index`). The coordinator merges these
here, on columns, and refuses what does not add up: a tensor that ranks describe differently, a
chunk stored twice, chunks that overlap, an element that no rank stored. Time and memory are
near linear in the number of chunks and in the sum of the parts' tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from strongroom import cover
from strongroom.columns import Columns, Integers, spans
from strongroom.dtypes import DTYPE_CODES
from strongroom.errors import SaveError
from strongroom.index import Index, ShardFile

__all__ = ["merge"]


def merge(parts: Iterable[Index], aliases: Mapping[str, str], planned: Iterable[str] = ()) -> Index:
    """One index of what all ranks stored.

    Args:
        parts: each rank's own index, in the order of ranks. Taken one by one: a generator
            that decodes them keeps no more than one in memory. Tensors come in the order of
            their first appearance, chunks of a tensor and shards in the order of ranks.
        aliases: further names of stored tensors; those of the parts are added to them.
        planned: names of tensors that must be among those stored.

    Raises:
        SaveError: the parts do not make a complete checkpoint; names tensor and shards.
    """
    stacked = _Stack()
    names = dict(aliases)
    for part in parts:
        stacked.add(part)
        for alias, tensor in part.aliases.items():
            if names.setdefault(alias, tensor) != tensor:
                raise SaveError(
                    f"{alias!r} is another name of {names[alias]!r} on one rank and of {tensor!r} on another"
                )
    columns = stacked.joined()
    fault = cover.fault_of(columns)
    if fault is not None:
        raise SaveError(f"what the ranks stored is not a whole checkpoint: {fault.problem}")
    index = Index.of_columns(columns, stacked.files, names)
    for name in planned:
        if name not in index.tensors:
            raise SaveError(f"{name!r} was planned, and no rank stored any of it")
    for alias, tensor in names.items():
        if tensor not in index.tensors or alias in index.tensors:
            raise SaveError(
                f"{alias!r} is to be another name of {tensor!r}, and no rank stored one tensor for both"
            )
    return index


class _Stack:
    """The columns of all parts, one after the other."""

    def __init__(self) -> None:
        self.files: list[ShardFile] = []
        self._numbers: dict[str, int] = {}
        self._placements: list[str] = []
        self._names: tuple[str, ...] | None = None
        self._tensors: Integers = np.zeros(0, np.int64)
        self._parts: dict[str, list[Integers]] = {}

    def add(self, part: Index) -> None:
        columns = part.columns
        # Ranks of one program hold the same tensors, most often: their names are looked up once.
        if columns.names != self._names:
            self._names = columns.names
            for name, placements in zip(columns.names, columns.placements, strict=True):
                if name not in self._numbers:
                    self._numbers[name] = len(self._numbers)
                    self._placements.append(placements)
            self._tensors = np.array([self._numbers[name] for name in columns.names], np.int64)
        for name, column in (
            ("tensors", self._tensors),
            ("dtypes", columns.dtypes),
            ("dimensions", columns.dimensions),
            ("shape", columns.shape),
            ("counts", columns.counts),
            ("offsets", columns.offsets),
            ("sizes", columns.sizes),
            ("files", columns.files + len(self.files)),
            ("starts", columns.starts),
        ):
            self._parts.setdefault(name, []).append(column)
        self.files.extend(part.files.values())

    def joined(self) -> Columns:
        """Every tensor once, with the chunks of all parts."""
        if not self._parts:
            return Columns.of((), ())
        paths = tuple(file.path for file in self.files)
        if len(set(paths)) != len(paths):
            twice = next(one for one, other in pairwise(sorted(paths)) if one == other)
            raise SaveError(f"two ranks wrote the shard {twice}")
        stacked = {name: np.concatenate(columns) for name, columns in self._parts.items()}
        self._parts.clear()
        names = tuple(self._numbers)
        tensors = stacked.pop("tensors")
        # The stack's own tensors go by position: one name stands there once a part.
        rows = Columns(names=(), placements=(), paths=paths, **stacked)
        first = np.unique(tensors, return_index=True)[1]
        _check_descriptions(rows, tensors, first, names)

        dimensions = rows.dimensions[first]
        chunk_rows = np.repeat(np.arange(len(tensors)), rows.counts)
        order = np.argsort(tensors[chunk_rows], kind="stable")
        chunk_dimensions = rows.dimensions[chunk_rows]
        extents = spans((np.cumsum(chunk_dimensions) - chunk_dimensions)[order], chunk_dimensions[order])
        return Columns(
            names=names,
            placements=tuple(self._placements),
            dtypes=rows.dtypes[first],
            dimensions=dimensions,
            shape=rows.shape[spans(rows.first_size[first], dimensions)],
            counts=np.bincount(tensors[chunk_rows], minlength=len(names)).astype(np.int64),
            offsets=rows.offsets[extents],
            sizes=rows.sizes[extents],
            files=rows.files[order],
            starts=rows.starts[order],
            paths=paths,
        )


def _check_descriptions(rows: Columns, tensors: Integers, first: Integers, names: Sequence[str]) -> None:
    """Every part's word on a tensor is that of the first part that has it."""
    described = first[tensors]
    differs = (rows.dtypes != rows.dtypes[described]) | (rows.dimensions != rows.dimensions[described])
    if not differs.any():
        shape = rows.shape[spans(rows.first_size[described], rows.dimensions)]
        changed = np.flatnonzero(rows.shape != shape)
        row_of = np.repeat(np.arange(len(tensors)), rows.dimensions)
        differs[row_of[changed]] = True
    if not differs.any():
        return
    row = int(differs.argmax())
    one, other = (_described(rows, number) for number in (int(described[row]), row))
    raise SaveError(
        f"{names[int(tensors[row])]!r} is not the same tensor on all ranks: {one}, and {other}; a tensor "
        "of one name must have one shape and dtype, and a value of each rank's own is marked PerRank"
    )


def _described(rows: Columns, row: int) -> str:
    size, chunk = int(rows.first_size[row]), int(rows.first_chunk[row])
    shape = rows.shape[size : size + int(rows.dimensions[row])].tolist()
    where = f" in {rows.paths[int(rows.files[chunk])]}" if rows.counts[row] else ""
    return f"{DTYPE_CODES[int(rows.dtypes[row])]}{shape}{where}"
