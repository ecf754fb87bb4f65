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
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strongroom.messages import Message
from strongroom.shards import ChunkSpec

__all__ = ["HeldChunk", "Owners", "assign", "decode_held", "encode_held"]


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
    if len(held) == 1:
        return [list(range(len(held[0])))]
    holders: dict[ChunkSpec, list[tuple[int, int]]] = {}
    for rank, chunks in enumerate(held):
        for place, one in enumerate(chunks):
            holders.setdefault(one.chunk, []).append((rank, place))
    mine: list[list[int]] = [[] for _ in held]
    load = [0] * len(held)
    shared: dict[tuple[str, bool, tuple[int, ...]], list[list[tuple[int, int]]]] = {}
    for chunk, places in holders.items():
        if len(places) == 1:
            rank, place = places[0]
            mine[rank].append(place)
            load[rank] += chunk.size_bytes
        else:
            first = held[places[0][0]][places[0][1]]
            ranks = tuple(rank for rank, _ in places)
            shared.setdefault((first.unit, first.is_spread, ranks), []).append(places)
    sizes = {
        key: sum(held[places[0][0]][places[0][1]].chunk.size_bytes for places in group)
        for key, group in shared.items()
    }
    # The lowest ranks' own burden first, then the largest units: each then finds the emptiest rank.
    for key in sorted(shared, key=lambda key: (key[1], -sizes[key], key)):
        _, is_spread, ranks = key
        owner = min(ranks, key=lambda rank: (load[rank], rank)) if is_spread else ranks[0]
        load[owner] += sizes[key]
        for places in shared[key]:
            mine[owner].append(next(place for rank, place in places if rank == owner))
    for places_of_rank in mine:
        places_of_rank.sort()
    return mine


def encode_held(held: Sequence[HeldChunk]) -> bytes:
    """What a rank holds, as bytes for the coordinator."""
    rows = [
        (one.chunk.tensor, one.chunk.dtype, one.chunk.offsets, one.chunk.sizes, one.chunk.is_whole,
         one.unit, one.is_spread)
        for one in held
    ]  # fmt: skip
    return json.dumps(rows, separators=(",", ":")).encode("utf-8", "surrogatepass")


def decode_held(data: bytes) -> list[HeldChunk]:
    return [
        HeldChunk(ChunkSpec(tensor, dtype, tuple(offsets), tuple(sizes), is_whole), unit, is_spread)
        for tensor, dtype, offsets, sizes, is_whole, unit, is_spread in json.loads(data)
    ]


class Owners:
    """The coordinator's memory of who holds and who stores what."""

    def __init__(self, world_size: int) -> None:
        self._held: list[list[HeldChunk] | None] = [None] * world_size
        self._owned: list[list[int]] = []
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
                self._held[rank] = decode_held(look.pieces["plan"])
                is_changed = True
        if is_changed or not self._generation:
            self._owned = assign([held or [] for held in self._held])
            self._generation += 1
        told = {
            rank: Message(pieces={"owned": np.array(self._owned[rank], np.uint32).tobytes()})
            for rank, look in enumerate(looks)
            if look.members["generation"] != self._generation
        }
        return self._generation, told
