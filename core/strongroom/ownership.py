"""Which rank stores which chunk, where several hold the same one. Pure.

A chunk that one rank alone holds is that rank's. Of a chunk that several hold (a replica), one
stores it: the one with the least to store so far, so that every rank writes about as much. All
chunks of one *unit* that the same ranks hold come from one rank: two buffers of one module taken
from two ranks could make a state that no rank ever had. And where a unit is not known to be equal
on all ranks (everything but parameters and what optimizers keep of them), the lowest rank has
the word, as it does in training, where `DistributedDataParallel` sends rank 0's buffers to all.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from strongroom.columns import Integers
from strongroom.dtypes import DTYPE_BYTES
from strongroom.errors import FormatError
from strongroom.messages import Message
from strongroom.shards import ChunkSpec

__all__ = ["HeldChunk", "Owners", "assign", "decode_held", "encode_held"]

_SEGMENT: Final = 64
"""Chunks whose descriptions travel as one text: ranks of one program send the same texts, most often."""

_COUNTS: Final = struct.Struct(">II")


@dataclass(frozen=True, slots=True)
class HeldChunk:
    """A chunk that a rank could store.

    Attributes:
        chunk: which.
        unit: chunks of one unit that the same ranks hold are stored by one of them.
        is_spread: whether any rank's will do, so that the load decides.
    """

    chunk: ChunkSpec
    unit: str
    is_spread: bool


def assign(held: Sequence[Sequence[HeldChunk]]) -> list[list[int]]:
    """For each rank, the places in its own list of the chunks that it stores.

    The result depends on nothing but the argument; its cost grows with the number of chunks.

    Args:
        held: what each rank holds, in rank order.
    """
    owned, _ = _assign([_parts(encode_held(own)) for own in held])
    return [places.tolist() for places in owned]


def encode_held(held: Sequence[HeldChunk]) -> bytes:
    """What a rank holds, as bytes for the coordinator."""
    rows = [
        (one.chunk.tensor, one.chunk.dtype, one.chunk.is_whole, len(one.chunk.sizes), one.unit, one.is_spread)
        for one in held
    ]
    texts = [
        json.dumps(rows[start : start + _SEGMENT], separators=(",", ":")).encode("utf-8", "surrogatepass")
        for start in range(0, len(rows), _SEGMENT)
    ]
    numbers = [number for one in held for number in (*one.chunk.offsets, *one.chunk.sizes)]
    lengths = struct.pack(f">{len(texts)}I", *map(len, texts))
    head = _COUNTS.pack(len(held), len(texts))
    return b"".join((head, lengths, *texts, np.array(numbers, "<i8").tobytes()))


def decode_held(data: bytes) -> list[HeldChunk]:
    """The inverse of `encode_held`."""
    holding = _parts(data)
    values = iter(holding.numbers.tolist())
    return [
        HeldChunk(
            ChunkSpec(
                tensor,
                dtype,
                tuple(next(values) for _ in range(dimensions)),
                tuple(next(values) for _ in range(dimensions)),
                is_whole,
            ),
            unit,
            is_spread,
        )
        for text in holding.texts
        for tensor, dtype, is_whole, dimensions, unit, is_spread in json.loads(text)
    ]


@dataclass(frozen=True, slots=True)
class _Holding:
    """What one rank holds: texts that it may share with others, and its own offsets and sizes."""

    texts: tuple[bytes, ...] = ()
    numbers: Integers = field(default_factory=lambda: np.zeros(0, np.int64))


def _parts(data: bytes) -> _Holding:
    """The parts of what `encode_held` gives."""
    try:
        _, count = _COUNTS.unpack_from(data)
        lengths = struct.unpack_from(f">{count}I", data, _COUNTS.size)
    except struct.error as error:
        raise FormatError(f"what a rank holds cannot be read: {error}") from None
    position = _COUNTS.size + 4 * count
    texts = []
    for length in lengths:
        texts.append(data[position : position + length])
        position += length
    return _Holding(tuple(texts), np.frombuffer(data, "<i8", offset=position).astype(np.int64))


@dataclass(frozen=True, slots=True)
class _Segment:
    """The descriptions in one text, as numbers of `_Kinds`."""

    kinds: Integers
    units: Integers
    spread: Integers


class _Kinds:
    """Descriptions of chunks, each known by a number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str, bool, int], int] = {}
        self._unit_numbers: dict[str, int] = {}
        self._segments: dict[bytes, _Segment] = {}
        self.units: list[str] = []
        self.widths: list[int] = []
        self.dimensions: list[int] = []

    def segment(self, text: bytes) -> _Segment:
        known = self._segments.get(text)
        if known is None:
            rows = json.loads(text)
            known = self._segments[text] = _Segment(
                kinds=np.array([self._kind(*row[:4]) for row in rows], np.int64),
                units=np.array([self._unit(row[4]) for row in rows], np.int64),
                spread=np.array([row[5] for row in rows], np.int64),
            )
        return known

    def _kind(self, tensor: str, dtype: str, is_whole: bool, dimensions: int) -> int:
        key = tensor, dtype, is_whole, dimensions
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self.widths.append(DTYPE_BYTES[dtype])
            self.dimensions.append(dimensions)
        return self._numbers[key]

    def _unit(self, unit: str) -> int:
        if unit not in self._unit_numbers:
            self._unit_numbers[unit] = len(self._unit_numbers)
            self.units.append(unit)
        return self._unit_numbers[unit]


def _assign(held: Sequence[_Holding]) -> tuple[list[Integers], int]:
    """As `assign`, on columns; and the bytes of all that is stored."""
    kinds = _Kinds()
    of_ranks = [[kinds.segment(text) for text in own.texts] for own in held]
    counts = [sum(len(segment.kinds) for segment in own) for own in of_ranks]
    ranks = np.repeat(np.arange(len(held)), counts)
    segments = [segment for own in of_ranks for segment in own]
    of_kind = _joined([segment.kinds for segment in segments])
    units = _joined([segment.units for segment in segments])
    spread = _joined([segment.spread for segment in segments])
    boxes = _boxes(np.array(kinds.dimensions, np.int64)[of_kind], _joined([own.numbers for own in held]))
    sizes = boxes[:, boxes.shape[1] // 2 :].prod(axis=1) * np.array(kinds.widths, np.int64)[of_kind]

    order, starts = _alike(np.column_stack((of_kind, boxes)))
    ends = np.append(starts[1:], len(order))
    is_alone = ends - starts == 1
    is_owned = np.zeros(len(order), bool)
    is_owned[order[starts[is_alone]]] = True
    load = np.zeros(len(held), np.int64)
    np.add.at(load, ranks[is_owned], sizes[is_owned])

    # Replicas: what the same ranks hold of one unit is one rank's.
    shared: dict[tuple[str, bool, bytes], list[Integers]] = {}
    for start, end in zip(starts[~is_alone].tolist(), ends[~is_alone].tolist(), strict=True):
        places = order[start:end]
        # The ranks as bytes compare as the ranks do.
        key = kinds.units[units[places[0]]], bool(spread[places[0]]), ranks[places].astype(">u4").tobytes()
        shared.setdefault(key, []).append(places)
    totals = {key: sum(int(sizes[places[0]]) for places in group) for key, group in shared.items()}
    # The lowest ranks' own burden first, then the largest units: each then finds the emptiest rank.
    for key in sorted(shared, key=lambda key: (key[1], -totals[key], key)):
        holders = ranks[shared[key][0]]
        chosen = int(load[holders].argmin()) if key[1] else 0
        load[holders[chosen]] += totals[key]
        for places in shared[key]:
            is_owned[places[chosen]] = True
    bounds = np.cumsum([0, *counts])
    owned = [
        np.flatnonzero(is_owned[start:end])
        for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ]
    return owned, int(load.sum())


def _joined(columns: Sequence[Integers]) -> Integers:
    return np.concatenate(columns) if columns else np.zeros(0, np.int64)


def _boxes(dimensions: Integers, numbers: Integers) -> Integers:
    """A row for each chunk: its offsets, then its sizes, as many of both for all."""
    width = int(dimensions.max(initial=0))
    boxes = np.zeros((len(dimensions), 2 * width), np.int64)
    boxes[:, width:] = 1
    first = np.cumsum(2 * dimensions) - 2 * dimensions
    for dimension in range(width):
        has_it = np.flatnonzero(dimensions > dimension)
        boxes[has_it, dimension] = numbers[first[has_it] + dimension]
        boxes[has_it, width + dimension] = numbers[first[has_it] + dimensions[has_it] + dimension]
    return boxes


def _alike(rows: Integers) -> tuple[Integers, Integers]:
    """An order that puts equal rows together, each run in the order that it had; where each run starts."""
    generator = np.random.default_rng(0)
    factors = generator.integers(0, 2**63, rows.shape[1], np.uint64) | np.uint64(1)
    hashes: npt.NDArray[np.uint64] = (rows.astype(np.uint64) * factors).sum(axis=1, dtype=np.uint64)
    order = np.argsort(hashes, kind="stable")
    is_new = np.ones(len(rows), bool)
    is_new[1:] = hashes[order][1:] != hashes[order][:-1]
    is_other = (rows[order][1:] != rows[order][:-1]).any(axis=1)
    if not np.array_equal(is_new[1:], is_other):
        # Two rows of one hash: never seen, and slower.
        order = np.lexsort(rows.T)
        is_new[1:] = (rows[order][1:] != rows[order][:-1]).any(axis=1)
    return order, np.flatnonzero(is_new)


class Owners:
    """The coordinator's memory of who holds and who stores what.

    Attributes:
        size_bytes: of all that is stored, each chunk once; 0 in a job of one rank, which knows by itself.
    """

    def __init__(self, world_size: int) -> None:
        self.size_bytes = 0
        self._held = [_Holding()] * world_size
        self._owned: list[bytes] = []
        self._generation = 0

    def decide(self, looks: Sequence[Message]) -> tuple[int, dict[int, Message]]:
        """Who stores what from now on.

        Args:
            looks: every rank's word, in rank order: which ``generation`` it knows, and the piece
                ``plan`` (`encode_held`) where what it holds is not what it held last.

        Returns:
            the generation, and what ranks that know another one must be told: a piece ``owned``
            of places in their list.
        """
        if len(looks) == 1:
            return 0, {}
        is_changed = False
        for rank, look in enumerate(looks):
            if "plan" in look.pieces:
                self._held[rank] = _parts(look.pieces["plan"])
                is_changed = True
        if is_changed or not self._generation:
            self._share_texts()
            owned, self.size_bytes = _assign(self._held)
            self._owned = [places.astype(np.uint32).tobytes() for places in owned]
            self._generation += 1
        told = {
            rank: Message(pieces={"owned": self._owned[rank]})
            for rank, look in enumerate(looks)
            if look.members["generation"] != self._generation
        }
        return self._generation, told

    def _share_texts(self) -> None:
        """Keep each text once, whoever sent it."""
        once: dict[bytes, bytes] = {}
        self._held = [
            replace(held, texts=tuple(once.setdefault(text, text) for text in held.texts))
            for held in self._held
        ]
