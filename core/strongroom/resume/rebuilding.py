"""After a restore: stand-ins are replaced by what the program has at their place, or taken out.

The other half of `strongroom.resume.losses`. Nothing is imported by a name that a checkpoint holds, and no
class of the program is looked for by one: an object is only ever rebuilt like one that the program itself has
at the same place, or as one of the few kinds that the caller knows how to make.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import importlib
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any, Final

from strongroom import tree
from strongroom.errors import StateMismatchError
from strongroom.keypath import Path, key_path
from strongroom.resume.losses import calls_a_resolver, encodable, qualified_name
from strongroom.standins import LeftOut, Simplified

__all__ = ["ABSENT", "Makers", "described", "has_stand_ins", "plain", "rebuild"]

ABSENT: Final = object()
"""The program has nothing at that place."""

Makers = Mapping[str, Callable[[Any], Any]]
"""What makes an object of a kind from its plain parts, by the qualified name of its class."""


def has_stand_ins(value: Any) -> bool:
    """Whether anything in plain containers was left out or simplified."""
    if isinstance(value, LeftOut | Simplified):
        return True
    if isinstance(value, Mapping):
        return any(map(has_stand_ins, value.values()))
    if isinstance(value, SimpleNamespace | Namespace):
        return any(map(has_stand_ins, vars(value).values()))
    return isinstance(value, list | tuple | deque) and any(map(has_stand_ins, value))


def rebuild(value: Any, own: Any = ABSENT, *, path: Path = (), makers: Makers | None = None) -> Any:
    """The value without stand-ins, as far as that can be.

    What was left out is the program's own value; where it has none, the entry is missing from its dict, and
    the `LeftOut` stays in a list. What was simplified becomes an object like the program's own of that class,
    or as a maker makes it; else it stays plain.

    Args:
        value: as restored.
        own: what the program has at that place now: read, and changed only where it has a
            ``load_state_dict``, which the state is then loaded into.
        path: where the value stands, for what is told.
        makers: of further kinds.

    Raises:
        StateMismatchError: an object's state does not fit the program's own object.
    """
    found = _Rebuild({**_MAKERS, **(makers or {})}).step(value, own, path)
    return value if found is ABSENT else found


def described(value: Any) -> Any:
    """The value for a record that people read: the names of what has no encoding, and plain parts."""
    found, _ = encodable(value, objects="omit")
    return _Described({}).step(found, ABSENT, ())


def plain(value: Any) -> Any:
    """The value without stand-ins and of plain parts alone, for who knows none of the program's classes."""
    found = _Rebuild({}).step(value, ABSENT, ())
    return value if found is ABSENT else found


class _Rebuild:
    def __init__(self, makers: Makers) -> None:
        self._makers = makers

    def step(self, value: Any, own: Any, path: Path) -> Any:
        if isinstance(value, LeftOut):
            return own
        if isinstance(value, Simplified):
            return self._object(value, own, path)
        kind = type(value)
        if kind in {dict, OrderedDict, defaultdict}:
            return self._mapping(value, _view(own), path)
        if kind in {list, tuple, deque}:
            return self._sequence(value, own, path)
        if kind in {SimpleNamespace, Namespace} and has_stand_ins(value):
            return kind(**self._mapping(dict(vars(value)), _view(own), path))
        if kind is tree.PerRank:
            return tree.PerRank(self.step(value.value, own, path))
        return value

    def _mapping(self, value: Any, own: Mapping[Any, Any], path: Path) -> Any:
        found = {key: self.step(item, own.get(key, ABSENT), (*path, key)) for key, item in value.items()}
        if all(item is value[key] for key, item in found.items()):
            return value
        made = copy.copy(value)  # with its factory, and a module's versions
        made.clear()
        made.update({key: item for key, item in found.items() if item is not ABSENT})
        return made

    def _sequence(self, value: Any, own: Any, path: Path) -> Any:
        fits = isinstance(own, list | tuple | deque) and len(own) == len(value)
        owns = list(own) if fits else [ABSENT] * len(value)
        found = [
            item if (made := self.step(item, mine, (*path, index))) is ABSENT else made
            for index, (item, mine) in enumerate(zip(value, owns, strict=True))
        ]
        if all(new is old for new, old in zip(found, value, strict=True)):
            return value
        return deque(found, value.maxlen) if isinstance(value, deque) else type(value)(found)

    def _object(self, value: Simplified, own: Any, path: Path) -> Any:
        is_like = own is not ABSENT and qualified_name(type(own)) == value.kind
        parts = self.step(value.value, _parts(own) if is_like else ABSENT, path)
        if value.kind in self._makers:
            return self._makers[value.kind](parts)
        return _like(own, parts, path) if is_like else parts


class _Described(_Rebuild):
    def step(self, value: Any, own: Any, path: Path) -> Any:
        return value.name if isinstance(value, LeftOut) else super().step(value, own, path)


def _view(own: Any) -> Mapping[Any, Any]:
    """What the program has, where it is to be looked up by key or attribute."""
    if isinstance(own, Mapping):
        return own
    return vars(own) if isinstance(own, SimpleNamespace | Namespace) else {}


def _parts(own: Any) -> Any:
    if dataclasses.is_dataclass(own):
        return {
            field.name: getattr(own, field.name)
            for field in dataclasses.fields(own)
            if hasattr(own, field.name)
        }
    if isinstance(own, tuple) and hasattr(own, "_fields"):
        return dict(zip(own._fields, own, strict=True))
    return own


def _like(own: Any, parts: Any, path: Path) -> Any:
    """An object of the class of ``own`` with these parts; the parts where they make none."""
    if tree.is_stateful(own):
        try:
            own.load_state_dict(parts)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise StateMismatchError(
                f"{key_path(path)}: its state in the checkpoint does not fit this program's "
                f"{qualified_name(type(own))} ({error}); restore with the code that saved it"
            ) from error
        return own
    kind = type(own)
    if isinstance(own, enum.Flag) and type(parts) is int:
        return kind(parts)
    if isinstance(own, enum.Enum):
        return kind.__members__.get(parts, parts) if type(parts) is str else parts
    if dataclasses.is_dataclass(own) and type(parts) is dict:
        instance = copy.copy(own)
        for field in dataclasses.fields(own):
            if field.name in parts:
                object.__setattr__(instance, field.name, parts[field.name])
        return instance
    if isinstance(own, tuple) and hasattr(own, "_fields") and type(parts) is dict:
        is_whole = set(parts) == set(own._fields)
        return tuple.__new__(kind, [parts[name] for name in own._fields]) if is_whole else parts
    made: Any = copy.copy(own) if isinstance(own, dict | list) else None
    if isinstance(made, dict) and type(parts) is dict:
        dict.clear(made)
        dict.update(made, parts)
        return made
    if isinstance(made, list) and type(parts) is list:
        made[:] = parts
        return made
    return parts


def _configuration(parts: Any) -> Any:
    """An OmegaConf container; a plain one where there is no OmegaConf, or where reading it would run code."""
    try:
        omegaconf: Any = importlib.import_module("omegaconf")
    except ImportError:
        return parts
    if calls_a_resolver(parts):
        return parts
    # The program's own objects may be among the parts, if its own container was allowed to hold them.
    return omegaconf.OmegaConf.create(parts, flags=None if _is_plain(parts) else {"allow_objects": True})


def _is_plain(parts: Any) -> bool:
    if isinstance(parts, dict):
        return all(map(_is_plain, parts.values()))
    if isinstance(parts, list):
        return all(map(_is_plain, parts))
    return isinstance(parts, bool | int | float | str | bytes | enum.Enum | PurePath | None)


_MAKERS: Final[Makers] = {
    "omegaconf.dictconfig.DictConfig": _configuration,
    "omegaconf.listconfig.ListConfig": _configuration,
}
