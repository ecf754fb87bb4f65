"""The walk through large dicts of tensors, remembered from one save to the next.

A dict of 20,000 tensors has 20,000 names to spell and as many nodes to build. They depend on
its keys and on where it stands, and on nothing that training changes; so where the keys are
those of the last walk, names and nodes are taken over whole, and only what is no tensor is
looked at again. What is remembered are texts, classes and nodes: no tensor is kept alive.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, compress, islice
from typing import Any, Final

import torch

from strongroom.atoms import node, text_node
from strongroom.keypath import Path
from strongroom.registry import registration_for
from strongroom.values import Encoder, Node

__all__ = ["Block", "Found", "Place", "Recall", "Region", "Walk", "block_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A part of the state whose tensors belong together.

    Attributes:
        unit: what a tensor in it belongs to.
        is_compared: whether every rank must hold the same.
        is_own: whether it is this rank's alone.
    """

    unit: str
    is_compared: bool = False
    is_own: bool = False


@dataclass(slots=True)
class Found:
    """Tensors in the order of the walk, in lists of one entry each."""

    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Many values to be encoded at once: a dict's, or those of the dicts in a dict.

    Attributes:
        keys: the outer keys, all of them texts.
        values: all values, those of one outer key after the other.
        sizes: how many values each outer key has; None: itself is one value's key.
        inner: the values' own keys, where there are sizes.
        flags: whatever else decides where a value belongs.
        kinds: the class of each value.
    """

    keys: list[str]
    values: list[Any]
    sizes: list[int] | None = None
    inner: list[str] | None = None
    flags: Any = None
    kinds: list[type]

    def outer(self, position: int, starts: list[int]) -> tuple[int, int]:
        """The number of the outer key of a value, and the value's place under it."""
        if self.sizes is None:
            return position, 0
        # The last that starts there: those before it have no values.
        number = bisect_right(starts, position) - 1
        return number, position - starts[number]

    @property
    def starts(self) -> list[int]:
        """How many values stand before each outer key's."""
        return list(accumulate(self.sizes or (), initial=0))[:-1]

    @property
    def below(self) -> int:
        """Containers between the block and its values."""
        return 0 if self.sizes is None else 1


def block_of(keys: list[Any], values: list[Any], flags: Any = None) -> Block | None:
    """The block of a dict's keys and values; None where a key is no plain text.

    Where every value is a dict, theirs are the values.
    """
    if set(map(type, keys)) != {str}:
        return None
    kinds = list(map(type, values))
    if set(kinds) == {dict}:
        inner = list(chain.from_iterable(values))
        if set(map(type, inner)) <= {str}:
            flat = list(chain.from_iterable(map(dict.values, values)))
            return Block(
                keys=keys,
                values=flat,
                kinds=list(map(type, flat)),
                sizes=list(map(len, values)),
                inner=inner,
                flags=flags,
            )
    return Block(keys=keys, values=values, kinds=kinds, flags=flags)


_SIMPLE: Final = frozenset({int, str, bool, type(None)})
"""Types whose values are the same where they are equal, and never change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remembered:
    """How a block was encoded.

    Attributes:
        block: its keys; its values are forgotten.
        starts: how many values stand before each outer key's.
        region: what it stood in.
        tensor_kinds: the classes of those values that are tensors.
        found: names, paths and regions of those that are tensors.
        is_tensor, is_simple: which of the values are tensors, and which simple.
        simple: the simple ones.
        others: the positions of the rest, and how many tensors stand before each.
        pairs: the block's nodes.
    """

    block: Block
    starts: list[int]
    region: Region | None
    tensor_kinds: frozenset[type]
    found: Found
    is_tensor: bytes
    is_simple: bytes
    simple: list[Any]
    others: list[tuple[int, int]]
    pairs: list[Node]

    def fits(self, block: Block, region: Region | None) -> bool:
        mine = self.block
        return (
            block.kinds == mine.kinds
            and block.keys == mine.keys
            and block.sizes == mine.sizes
            and block.inner == mine.inner
            and block.flags == mine.flags
            and region == self.region
        )


Place = Callable[[int], tuple[Path, Region | None]]
"""For the number of an outer key: the path below which its values stand, and their region."""


class Recall:
    """Encodes blocks, with the help of how they were encoded last time."""

    def __init__(self) -> None:
        self._last: dict[Any, _Remembered] = {}
        self._now: dict[Any, _Remembered] = {}

    def start(self) -> None:
        """A walk begins; what the last one did not come by is forgotten."""
        self._last, self._now = self._now, {}

    def forget(self) -> None:
        self._last, self._now = {}, {}

    def pairs(self, where: Any, block: Block, region: Region | None, place: Place, walk: Walk) -> list[Node]:
        """The pairs of key and node of a block.

        Args:
            where: tells the block from all others of the state.
            block: what is encoded.
            region: what the block stands in.
            place: where its values stand.
            walk: takes up tensors, and encodes what is none.
        """
        last = self._last.get(where)
        known = {kind: _is_tensor(kind) for kind in set(block.kinds)}
        if last is not None and last.fits(block, region) and _agrees(known, last):
            self._now[where] = last
            return self._replay(last, block, place, walk)
        made = _learn(block, region, known, place, walk)
        self._now[where] = made
        return made.pairs

    def _replay(self, last: _Remembered, block: Block, place: Place, walk: Walk) -> list[Node]:
        walk.encoder.count(_weight(block))
        all_tensors = len(last.found.names) == len(block.values)
        tensors = block.values if all_tensors else list(compress(block.values, last.is_tensor))
        simple = list(compress(block.values, last.is_simple)) if last.simple else []
        changed = _Changes(last.pairs, block, last.starts)
        if simple != last.simple:
            positions = compress(range(len(block.values)), last.is_simple)
            for position, value, before in zip(positions, simple, last.simple, strict=True):
                if value != before:
                    changed.set(position, _encoded(block, last.starts, position, value, place, walk))
        taken = 0
        for position, before in last.others:
            walk.take_all(last.found, tensors, taken, before)
            taken = before
            value = block.values[position]
            changed.set(position, _encoded(block, last.starts, position, value, place, walk))
        walk.take_all(last.found, tensors, taken, len(tensors))
        return changed.pairs


class Walk:
    """What encoding a block needs of the walk that came upon it.

    Args:
        encoder: encodes what is no tensor.
        found: gathers tensors.
        take: takes up one tensor at a path, and returns its node.
        within: encodes a value that stands in a region of its own.
    """

    def __init__(
        self,
        encoder: Encoder,
        found: Found,
        take: Callable[[torch.Tensor, Path], Node],
        within: Callable[[Region | None, Callable[[], Node]], Node],
    ) -> None:
        self.encoder = encoder
        self.found = found
        self.take = take
        self.within = within

    def take_all(self, last: Found, tensors: Sequence[torch.Tensor], start: int, stop: int) -> None:
        """Take up tensors whose names are known."""
        if start == stop:
            return
        is_whole = stop - start == len(tensors)
        part = slice(start, stop)
        self.found.names += last.names if is_whole else last.names[part]
        self.found.tensors += tensors if is_whole else tensors[part]
        self.found.paths += last.paths if is_whole else last.paths[part]
        self.found.regions += last.regions if is_whole else last.regions[part]


def _is_tensor(kind: type) -> bool:
    return issubclass(kind, torch.Tensor) and registration_for(kind) is None


def _agrees(known: Mapping[type, bool], last: _Remembered) -> bool:
    """Whether no class was registered meanwhile, or is registered no more."""
    return all((kind in last.tensor_kinds) == is_tensor for kind, is_tensor in known.items())


def _weight(block: Block) -> int:
    if block.sizes is None:
        return 2 * len(block.keys)
    return 2 * (len(block.keys) + len(block.values))


def _learn(
    block: Block,
    region: Region | None,
    known: Mapping[type, bool],
    place: Place,
    walk: Walk,
) -> _Remembered:
    walk.encoder.count(_weight(block))
    found = Found()
    others: list[tuple[int, int]] = []
    nodes: list[Node] = []
    positions = iter(range(len(block.values)))
    for number, size in enumerate(block.sizes or [1] * len(block.keys)):
        outer, own = place(number)
        for position in islice(positions, size):
            value, kind = block.values[position], block.kinds[position]
            path = outer if block.inner is None else (*outer, block.inner[position])
            if known[kind]:
                nodes.append(walk.within(own, partial(walk.take, value, path)))
                found.names.append(walk.found.names[-1])
                found.paths.append(walk.found.paths[-1])
                found.regions.append(walk.found.regions[-1])
                continue
            nodes.append(_encode(value, path, own, block.below, walk))
            if kind not in _SIMPLE:
                others.append((position, len(found.names)))
    is_simple = bytes(kind in _SIMPLE for kind in block.kinds)
    return _Remembered(
        block=replace(block, values=[]),
        region=region,
        tensor_kinds=frozenset(kind for kind, is_tensor in known.items() if is_tensor),
        found=found,
        starts=block.starts,
        is_tensor=bytes(map(known.__getitem__, block.kinds)),
        is_simple=is_simple,
        simple=list(compress(block.values, is_simple)),
        others=others,
        pairs=_assemble(block, nodes),
    )


def _encode(value: Any, path: Path, region: Region | None, below: int, walk: Walk) -> Node:
    return walk.within(region, partial(walk.encoder.encode, value, path, below=below))


def _encoded(block: Block, starts: list[int], position: int, value: Any, place: Place, walk: Walk) -> Node:
    """The node of one value of a block whose others are known."""
    path, region = place(block.outer(position, starts)[0])
    if block.inner is not None:
        path = (*path, block.inner[position])
    return _encode(value, path, region, block.below, walk)


def _assemble(block: Block, nodes: list[Node]) -> list[Node]:
    keys = list(map(text_node, block.keys))
    if block.sizes is None or block.inner is None:
        return [[key, found] for key, found in zip(keys, nodes, strict=True)]
    inner = [[text_node(key), found] for key, found in zip(block.inner, nodes, strict=True)]
    pairs: list[Node] = []
    start = 0
    for key, size in zip(keys, block.sizes, strict=True):
        pairs.append([key, node("dict", inner[start : start + size])])
        start += size
    return pairs


class _Changes:
    """Pairs in which some nodes are others; what an earlier walk made stays as it is."""

    def __init__(self, pairs: list[Node], block: Block, starts: list[int]) -> None:
        self.pairs = pairs
        self._block = block
        self._starts = starts
        self._is_copied = False
        self._copied: set[int] = set()

    def set(self, position: int, found: Node) -> None:
        if not self._is_copied:
            self.pairs, self._is_copied = self.pairs.copy(), True
        number, place = self._block.outer(position, self._starts)
        if self._block.sizes is None:
            self.pairs[number] = [self.pairs[number][0], found]
            return
        if number not in self._copied:
            self._copied.add(number)
            key, inner = self.pairs[number]
            self.pairs[number] = [key, node("dict", inner["v"].copy())]
        pairs = self.pairs[number][1]["v"]
        pairs[place] = [pairs[place][0], found]
