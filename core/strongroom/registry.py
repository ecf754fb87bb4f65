"""Which of the program's own types may stand in a checkpoint, and under which names.

A program says so itself, before it saves or restores: `register_type` for its enums,
dataclasses and named tuples, `register_codec` for anything else. The registry is one for the
process. A checkpoint only ever holds the registered *name*: reading it looks the name up here,
and a name that the program did not register is an error, never an import.

Both write the same spelling (`docs/format.md`, clause 8): a name, and a plain value that stands
for the object: the member's name for an enum, a dict of its fields for a dataclass or a named
tuple. So a class that has outgrown `register_type` can be given a codec under its old name,
which then also reads what older checkpoints hold.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, TypeVar, overload

from strongroom.atoms import ATOMS, RefusedError, UnavailableError
from strongroom.errors import ConfigError

__all__ = [
    "Registration",
    "register_codec",
    "register_type",
    "registration_for",
    "registration_named",
]

T = TypeVar("T")

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """One type's name and its two translations.

    Attributes:
        cls: the exact type; a subclass is another type.
        name: what stands for the type in a checkpoint.
        take_apart: object to supported value.
        put_together: supported value to object.
        has_fields: the value is a dict of the object's attributes.
    """

    cls: type
    name: str
    take_apart: Callable[[Any], Any]
    put_together: Callable[[Any], Any]
    has_fields: bool = False


_OWN_TYPES: Final = {*ATOMS, OrderedDict, defaultdict, Counter, deque, SimpleNamespace, Namespace}
_OWN_MODULES: Final = {"builtins", "numpy", "torch"}
"""Their types either have an encoding or are what must never have one (functions, modules)."""

_by_type: Final[dict[type, Registration]] = {}
_by_name: Final[dict[str, Registration]] = {}


def registration_for(cls: type) -> Registration | None:
    """The registration of exactly this type."""
    return _by_type.get(cls)


def registration_named(name: str) -> Registration | None:
    """The registration under this name."""
    return _by_name.get(name)


@overload
def register_type(cls: type[T], *, name: str | None = None) -> type[T]: ...


@overload
def register_type(*, name: str | None = None) -> Callable[[type[T]], type[T]]: ...


def register_type(
    cls: type[T] | None = None, *, name: str | None = None
) -> type[T] | Callable[[type[T]], type[T]]:
    """Let an enum, a dataclass or a named tuple stand in a checkpoint; usable as a decorator.

    An object comes back with exactly the fields that it had. Nothing of the class runs for
    that, neither ``__init__`` nor ``__post_init__``: the fields are what was saved already.

    Args:
        cls: the class. As a decorator, this stands above ``@dataclass``.
        name: what stands for it in a checkpoint; its qualified name by default. Give one that
            outlives a renaming.

    Raises:
        ConfigError: it is none of the three, the name is taken by another class or unsafe, or
            its objects hold more than fields (it extends ``list``, say).
    """
    if cls is None:
        return lambda decorated: register_type(decorated, name=name)
    _check_class(cls)
    name = cls.__qualname__ if name is None else name
    if issubclass(cls, enum.Enum):
        registration = _for_enum(cls, name)
    elif "__dataclass_fields__" in vars(cls):
        registration = _for_dataclass(cls, name)
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        registration = _for_named_tuple(cls, name)
    else:
        raise ConfigError(
            f"{cls.__qualname__} is no enum, dataclass or named tuple; teach its encoding with "
            f"register_codec (and put register_type above @dataclass, not below)"
        )
    _register(registration)
    return cls


def register_codec(
    cls: type[T], *, name: str, encode: Callable[[T], Any], decode: Callable[[Any], T]
) -> None:
    """Teach how objects of a type are stored and rebuilt.

    Args:
        cls: the exact type; subclasses are not meant.
        name: what stands for it in a checkpoint.
        encode: the object to a value that can be stored: plain values, containers, tensors.
        decode: that value to an equal object. It gets what a file holds, so it trusts nothing.

    Raises:
        ConfigError: the type has an encoding of its own, or the name is taken or unsafe.
    """
    _check_class(cls)
    _register(Registration(cls=cls, name=name, take_apart=encode, put_together=decode))


def _check_class(cls: object) -> None:
    if not isinstance(cls, type):
        raise ConfigError(f"only a class can be registered, got a {type(cls).__qualname__}")


def _register(new: Registration) -> None:
    if not _NAME.fullmatch(new.name):
        raise ConfigError(
            f"{new.name[:140]!r} cannot name a type in a checkpoint: at most 128 letters, digits and "
            f"'_.:/-', a letter or '_' first; give one as name="
        )
    if new.cls in _OWN_TYPES or new.cls.__module__ in _OWN_MODULES:
        raise ConfigError(f"{new.cls.__qualname__} has an encoding of its own, which cannot be replaced")
    named, typed = _by_name.get(new.name), _by_type.get(new.cls)
    if named is not None and not _is_same_class(named.cls, new.cls):
        raise ConfigError(
            f"the name {new.name!r} is taken by {named.cls.__module__}.{named.cls.__qualname__}; "
            f"give {new.cls.__module__}.{new.cls.__qualname__} another one"
        )
    if typed is not None and typed.name != new.name:
        raise ConfigError(f"{new.cls.__qualname__} is registered as {typed.name!r} already")
    _by_type[new.cls] = _by_name[new.name] = new


def _is_same_class(old: type, new: type) -> bool:
    # A notebook cell run again, or a module reloaded, defines the class anew.
    return old is new or (old.__module__, old.__qualname__) == (new.__module__, new.__qualname__)


def _for_enum(cls: type[enum.Enum], name: str) -> Registration:
    def take_apart(member: Any) -> str | int:
        # A union of flags has no name of its own.
        value: str | int = int(member.value) if isinstance(member, enum.Flag) else member.name
        return value

    def put_together(value: Any) -> Any:
        if issubclass(cls, enum.Flag) and type(value) is int:
            return cls(value)
        if type(value) is str and value in cls.__members__:
            return cls.__members__[value]
        raise UnavailableError(f"{cls.__qualname__} has no member {value!r:.80}")

    return Registration(cls=cls, name=name, take_apart=take_apart, put_together=put_together)


def _for_dataclass(cls: type[Any], name: str) -> Registration:
    try:
        object.__new__(cls)
    except TypeError as error:
        raise ConfigError(
            f"{cls.__qualname__} cannot be rebuilt from its fields ({error}); use register_codec"
        ) from None
    fields = tuple(field.name for field in dataclasses.fields(cls))

    def put_together(value: Any) -> Any:
        found = object.__new__(cls)
        for field, item in _fields(cls, fields, value).items():
            # Works for frozen classes and slots, and runs no __setattr__ of the class.
            object.__setattr__(found, field, item)
        return found

    return Registration(
        cls=cls,
        name=name,
        take_apart=lambda instance: _field_values(instance, fields),
        put_together=put_together,
        has_fields=True,
    )


def _for_named_tuple(cls: type[Any], name: str) -> Registration:
    fields: tuple[str, ...] = cls._fields

    def take_apart(instance: Any) -> dict[str, Any]:
        _field_values(instance, ())
        return dict(zip(fields, instance, strict=True))

    def put_together(value: Any) -> Any:
        values = _fields(cls, fields, value)
        return tuple.__new__(cls, [values[field] for field in fields])

    return Registration(cls=cls, name=name, take_apart=take_apart, put_together=put_together, has_fields=True)


def _field_values(instance: Any, fields: tuple[str, ...]) -> dict[str, Any]:
    more = [name for name in getattr(instance, "__dict__", ()) if name not in fields]
    if more:
        raise RefusedError(
            f"a {type(instance).__qualname__} with attributes beside its fields, which would be lost: "
            f"{', '.join(map(str, more[:5]))}; teach its encoding with register_codec"
        )
    missing = [name for name in fields if not hasattr(instance, name)]
    if missing:
        raise RefusedError(
            f"a {type(instance).__qualname__} whose fields {', '.join(missing)} were never set"
        )
    return {name: getattr(instance, name) for name in fields}


def _fields(cls: type, fields: tuple[str, ...], value: Any) -> dict[str, Any]:
    if type(value) is not dict or not all(type(name) is str for name in value):
        raise UnavailableError(
            f"{cls.__qualname__} is rebuilt from its fields, and the checkpoint holds none"
        )
    missing = [name for name in fields if name not in value]
    more = [str(name)[:80] for name in value if name not in fields]
    if missing or more:
        raise UnavailableError(
            f"the fields of {cls.__qualname__} have changed since (the checkpoint lacks "
            f"[{', '.join(missing)}] and has [{', '.join(more)}] besides); read the older form with "
            f"register_codec under the same name"
        )
    return value
