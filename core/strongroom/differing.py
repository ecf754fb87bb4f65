"""Values that all ranks should have alike: found to differ, and told where. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from strongroom import canonical
from strongroom.errors import RanksDisagreeError
from strongroom.ranks import name_ranks
from strongroom.values import Node

__all__ = ["check_aliases", "check_compared", "differing_documents", "explain_difference"]

_MAX_EXPLAINED: Final = 4
"""Ranks whose whole document is fetched to say where it differs."""

_MAX_PATHS: Final = 5
"""Places that are named."""

_ADVICE: Final = (
    "which all ranks should have alike; wrap what differs by rank (a generator, a loader's position) in "
    "PerRank(...), or make it equal before saving"
)


def check_compared(digests: Sequence[Mapping[str, str]]) -> None:
    """Hold every rank's digests of small values against the coordinator's, which come first.

    Raises:
        RanksDisagreeError: one differs; names it and the ranks.
    """
    expected = digests[0]
    differing: dict[str, list[int]] = {}
    for rank, found in enumerate(digests[1:], start=1):
        for name in expected.keys() & found.keys():
            if expected[name] != found[name]:
                differing.setdefault(name, []).append(rank)
    if differing:
        ranks = sorted({rank for others in differing.values() for rank in others})
        listed = ", ".join(sorted(differing)[:_MAX_PATHS])
        raise RanksDisagreeError(
            f"{name_ranks(ranks)} and rank 0 hold different values of {listed}, {_ADVICE}",
            ranks=ranks,
            phase="comparing",
        )


def check_aliases(aliases: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """All ranks' further names of tensors together.

    Raises:
        RanksDisagreeError: one stands for another tensor on another rank.
    """
    together: dict[str, str] = {}
    for rank, found in enumerate(aliases):
        for alias, name in found.items():
            if together.setdefault(alias, name) != name:
                raise RanksDisagreeError(
                    f"{alias} shares its memory with {together[alias]} on one rank and with {name} on rank "
                    f"{rank}; tie the same tensors on every rank",
                    ranks=(rank,),
                    phase="comparing",
                )
    return together


def differing_documents(digests: Sequence[str]) -> list[int]:
    """Ranks whose document is not the coordinator's, which comes first; a few of them."""
    return [rank for rank, digest in enumerate(digests) if digest != digests[0]][:_MAX_EXPLAINED]


def explain_difference(mine: Node, others: Mapping[int, Node]) -> RanksDisagreeError:
    """Say where the documents of ranks differ from the coordinator's."""
    found = {rank: _first_differences(mine, other) for rank, other in others.items()}
    keys = list(dict.fromkeys(key for keys in found.values() for key in keys))
    listed = ", ".join(keys[:_MAX_PATHS]) or "state"
    return RanksDisagreeError(
        f"{name_ranks(found)} and rank 0 hold different values of {listed}, {_ADVICE}",
        ranks=tuple(found),
        phase="comparing",
    )


def _first_differences(mine: Node, other: Node, path: str = "state") -> list[str]:
    """Paths of a few places where two typed documents differ."""
    if isinstance(mine, dict) and isinstance(other, dict) and mine.keys() == other.keys():
        if mine.get("$") != other.get("$"):
            return [path]
        if mine.get("$") == "dict" or "v" in mine:
            return _first_differences(mine.get("v"), other.get("v"), path)
    elif isinstance(mine, list) and isinstance(other, list):
        if all(map(_is_pair, (*mine, *other))) and (mine or other):
            return _pair_differences(mine, other, path)
        if len(mine) == len(other):
            found: list[str] = []
            for number, (first, second) in enumerate(zip(mine, other, strict=True)):
                if len(found) < _MAX_PATHS:
                    found += _first_differences(first, second, f"{path}[{number}]")
            return found[:_MAX_PATHS]
    # Not by value: 1 and True are equal in Python, and differ as documents do.
    return [] if canonical.encode(mine) == canonical.encode(other) else [path]


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)


def _pair_differences(mine: Sequence[Any], other: Sequence[Any], path: str) -> list[str]:
    left, right = dict(mine), dict(other)
    found: list[str] = []
    for key in dict.fromkeys((*left, *right)):
        if len(found) >= _MAX_PATHS:
            break
        own_path = f"{path}[{key!r}]"
        if key not in left or key not in right:
            found.append(f"{own_path} (on some ranks only)")
        else:
            found += _first_differences(left[key], right[key], own_path)
    if not found and list(left) != list(right):
        return [f"{path} (the order of its entries)"]
    return found[:_MAX_PATHS]
