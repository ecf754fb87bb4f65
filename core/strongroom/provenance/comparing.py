"""What has changed between a checkpoint and the program that is about to go on from it. Pure.

Two documents are held against each other; which changes are refused is the user's `OnChange`. What one
of the two does not say is not compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from strongroom.errors import ConfigError
from strongroom.values import Node

__all__ = ["KINDS", "Change", "Kind", "OnChange", "Reaction", "compare", "flattened", "members_of"]

Kind = Literal["data", "code", "environment", "hyper_parameters", "model", "world_size"]
KINDS: Final[tuple[Kind, ...]] = ("data", "code", "environment", "hyper_parameters", "model", "world_size")

Reaction = Literal["refuse", "warn", "allow"]

_UNKNOWN: Final = "unknown"
_MAX_CHANGES: Final = 1_000
_MAX_TEXT: Final = 200
_MAX_LEAVES: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference.

    Attributes:
        name: of what differs, as ``commit`` or ``optimizer.lr``.
        was: in the checkpoint, as JSON spells it; None: it was not there.
        now: in this program; None: it is not there.
    """

    kind: Kind
    name: str
    was: str | None
    now: str | None

    def __str__(self) -> str:
        said = "absent"
        return f"{self.kind}: {self.name} was {self.was or said} and is {self.now or said}"

    def to_json(self) -> list[str | None]:
        return [self.kind, self.name, self.was, self.now]

    @classmethod
    def from_json(cls, value: Any) -> Change:
        kind, name, was, now = value
        return cls(kind=kind, name=name, was=was, now=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnChange:
    """What a restore does about each kind of change: ``"refuse"``, ``"warn"`` or ``"allow"``.

    To go on with other data is refused unless it was meant: it is the change that nothing else shows.
    """

    data: Reaction = "refuse"
    code: Reaction = "warn"
    environment: Reaction = "warn"
    hyper_parameters: Reaction = "warn"
    model: Reaction = "warn"
    world_size: Reaction = "allow"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value not in ("refuse", "warn", "allow"):
                raise ConfigError(
                    f"OnChange.{field.name} must be 'refuse', 'warn' or 'allow', got {value!r:.60}"
                )

    def reaction(self, kind: Kind) -> Reaction:
        found: Reaction = getattr(self, kind)
        return found


def compare(was: Mapping[str, Node], now: Mapping[str, Node]) -> tuple[Change, ...]:
    """Every difference that is known, by kind.

    Args:
        was, now: nodes by name: ``given`` (what the user says), ``collected`` and ``world_size``; each may
            be absent.
    """
    found: list[Change] = []
    for change in _differences(was, now):
        found.append(change)
        if len(found) == _MAX_CHANGES:
            break
    return tuple(sorted(found, key=lambda change: (KINDS.index(change.kind), change.name)))


def _differences(was: Mapping[str, Node], now: Mapping[str, Node]) -> Iterator[Change]:
    given = members_of(was.get("given")), members_of(now.get("given"))
    # The cursor is where training stands in its data, and moves.
    data = [flattened(side.get("data"), without=("cursor",)) for side in given]
    yield from _changed("data", *data, only_common=True)
    model = [flattened(side.get("model")) for side in given]
    yield from _changed("model", *model, only_common=True)
    if all("hyper_parameters" in side for side in given):
        before, after = (flattened(side["hyper_parameters"]) for side in given)
        yield from _changed("hyper_parameters", before, after, only_common=False)
    collected = members_of(was.get("collected")), members_of(now.get("collected"))
    yield from _code(*(members_of(side.get("code")) for side in collected))
    yield from _environment(*(members_of(side.get("environment")) for side in collected))
    container = [
        flattened(by_user.get("container_digest", by_platform.get("container_digest")))
        for by_user, by_platform in zip(given, collected, strict=True)
    ]
    yield from _changed("environment", *container, only_common=True, name="container_digest")
    size = [flattened(side.get("world_size")) for side in (was, now)]
    yield from _changed("world_size", *size, only_common=True, name="world_size")


def _code(was: Mapping[str, Node], now: Mapping[str, Node]) -> Iterator[Change]:
    sides = []
    for side in (was, now):
        leaves = _leaves_of(side, ("commit", "changes", "entry"))
        # A script may be moved: its digest says whether it is the same.
        leaves.pop("entry.name", None)
        if side.get("is_dirty") is False:
            leaves["changes"] = '"none"'
        sides.append(leaves)
    yield from _changed("code", *sides, only_common=True)


def _environment(was: Mapping[str, Node], now: Mapping[str, Node]) -> Iterator[Change]:
    before, after = (
        _leaves_of(side, ("python", "platform", "torch", "cuda", "hip", "frameworks")) for side in (was, now)
    )
    if was and now:
        yield from _changed("environment", before, after, only_common=False)
    packages = [_leaves_of(side, ("packages",)) for side in (was, now)]
    yield from _changed("environment", *packages, only_common=True)


def _leaves_of(members: Mapping[str, Node], names: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        if name in members:
            for place, value in flattened(members[name]).items():
                found[f"{name}.{place}" if place else name] = value
    return found


def _changed(
    kind: Kind, was: Mapping[str, str], now: Mapping[str, str], *, only_common: bool, name: str = ""
) -> Iterator[Change]:
    names = [*was, *(place for place in now if place not in was)]
    for place in names:
        before, after = was.get(place), now.get(place)
        if before == after or (only_common and (before is None or after is None)):
            continue
        if _is_unknown(before) or _is_unknown(after):
            continue
        told = f"{name}.{place}" if name and place else name or place or kind
        yield Change(kind=kind, name=told, was=_short(before), now=_short(after))


def _is_unknown(value: str | None) -> bool:
    return value == f'"{_UNKNOWN}"'


def _short(value: str | None) -> str | None:
    return value if value is None or len(value) <= _MAX_TEXT else f"{value[:_MAX_TEXT]}..."


def members_of(node: Any) -> dict[str, Node]:
    """The members of a dict's node by name; nothing of what is none."""
    payload = node.get("v") if type(node) is dict and node.get("$") == "dict" else None
    return {
        pair[0]: pair[1]
        for pair in (payload if type(payload) is list else ())
        if type(pair) is list and len(pair) == 2 and type(pair[0]) is str
    }


def flattened(node: Node, *, without: tuple[str, ...] = ()) -> dict[str, str]:
    """The values within a node, by their places (``optimizer.lr``, ``layers.0``), as JSON spells them.

    What has no parts stands at the place ``""``. A tuple and a list are alike, and so are ``1`` and ``1.0``.

    Args:
        without: members at the top that are left out.
    """
    found: dict[str, str] = {}
    if node is None:
        return found
    stack: list[tuple[str, Node]] = [("", node)]
    while stack and len(found) < _MAX_LEAVES:
        place, item = stack.pop()
        parts = _parts(item)
        if parts and not place:
            parts = [(name, part) for name, part in parts if name not in without]
        if parts:
            stack.extend((f"{place}.{name}" if place else name, part) for name, part in reversed(parts))
        elif parts is None:
            found[place] = _spelled(item)
        elif place:
            found[place] = "[]" if type(item) is list else "{}"
    return found


def _parts(node: Node) -> list[tuple[str, Node]] | None:
    """What a container holds by name; None for what is none."""
    if type(node) is list:
        return [(str(number), item) for number, item in enumerate(node)]
    if type(node) is not dict:
        return None
    tag, payload = node.get("$"), node.get("v")
    if tag == "object" and type(payload) is list and len(payload) == 2:
        return _parts(payload[1])
    if tag not in (_MAPPINGS | _SEQUENCES) or type(payload) is not list:
        return None
    items = payload[1:] if tag in _HEADED else payload
    if tag in _SEQUENCES:
        return [(str(number), item) for number, item in enumerate(items)]
    return [
        (pair[0] if type(pair[0]) is str else _spelled(pair[0]), pair[1])
        for pair in items
        if type(pair) is list and len(pair) == 2
    ]


_MAPPINGS: Final = frozenset(
    {"dict", "ordered_dict", "defaultdict", "counter", "namespace", "argparse_namespace"}
)
_SEQUENCES: Final = frozenset({"tuple", "set", "frozenset", "deque"})
_HEADED: Final = frozenset({"ordered_dict", "defaultdict", "deque"})


def _spelled(node: Node) -> str:
    payload = node.get("v") if type(node) is dict else None
    if type(node) is dict and node.get("$") == "float" and type(payload) is str:
        return payload.removesuffix(".0")
    if type(payload) is str:
        # A path, a date, a dtype: by what they spell.
        return json.dumps(payload, ensure_ascii=False)
    return json.dumps(node, ensure_ascii=False, sort_keys=True)
