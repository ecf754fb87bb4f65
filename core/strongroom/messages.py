"""What ranks say to each other, as bytes: JSON members, then pieces of binary data. No pickle.

Errors travel too: by their class's name within `strongroom.errors` and their text, so that all
ranks of a job raise the same kind of error and a training script can handle it alike everywhere.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from strongroom import errors
from strongroom.errors import FormatError, RankFailedError, RanksError, StateEncodingError, StrongroomError

__all__ = ["Message", "error_members", "error_of", "text_of"]

_LENGTH: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Members that JSON can hold, and pieces of binary data by name."""

    members: Mapping[str, Any] = field(default_factory=dict)
    pieces: Mapping[str, bytes] = field(default_factory=dict)

    def encode(self) -> bytes:
        head = json.dumps(
            [self.members, [[name, len(piece)] for name, piece in self.pieces.items()]],
            separators=(",", ":"),
        ).encode("utf-8", "surrogatepass")
        return b"".join((_LENGTH.pack(len(head)), head, *self.pieces.values()))

    @classmethod
    def decode(cls, data: bytes) -> Message:
        """Raises FormatError: the sender runs something else."""
        try:
            (length,) = _LENGTH.unpack_from(data)
            members, lengths = json.loads(data[_LENGTH.size : _LENGTH.size + length])
            pieces = {}
            position = _LENGTH.size + length
            for name, size in lengths:
                pieces[name] = data[position : position + size]
                position += size
        except (struct.error, ValueError, TypeError, RecursionError) as error:
            raise _unreadable(str(error)) from None
        if type(members) is not dict or position != len(data):
            raise _unreadable(f"it says that it has {position} bytes, and has {len(data)}")
        return cls(members=members, pieces=pieces)


def _unreadable(why: str) -> FormatError:
    return FormatError(
        f"a rank's message cannot be read ({why}); run the same release of Strongroom on all ranks"
    )


def text_of(error: BaseException) -> str:
    """An error's text; of any error, whatever its text does."""
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - whoever waits for this must hear of something
        return f"(its text cannot be had: {type(broken).__name__})"


def error_members(error: BaseException) -> dict[str, Any]:
    """An error as members of a message; of any error, whatever its text does."""
    kind = next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in errors.__all__), None)
    text = text_of(error)
    if len(text) > _TEXT_LENGTH:
        text = f"{text[:_TEXT_LENGTH]} ({len(text) - _TEXT_LENGTH} characters more)"
    members: dict[str, Any] = {"kind": kind, "text": text}
    if not isinstance(error, StrongroomError):
        members["text"] = f"{type(error).__name__}: {text}"
    for name in _LISTS:
        if hasattr(error, name):
            members[name] = list(getattr(error, name))
    if isinstance(error, RanksError):
        members |= {"ranks": [int(rank) for rank in error.ranks], "phase": error.phase}
    if isinstance(error, StateEncodingError):
        members |= {"key_path": error.key_path, "text": text.removeprefix(f"{error.key_path}: ")}
    return members


def error_of(members: Mapping[str, Any], *, rank: int, phase: str) -> StrongroomError:
    """The error that a rank had, for another rank to raise: of the same class, naming the rank."""
    cls = getattr(errors, members["kind"] or "", None)
    if cls is not None and issubclass(cls, RanksError):
        # About ranks already, by their numbers.
        about: StrongroomError = cls(members["text"], ranks=members["ranks"], phase=members["phase"])
        return about
    text = f"rank {rank} ({phase}): {members['text']}"
    lists = {name: _tuples(members[name]) for name in _LISTS if name in members}
    if cls is None:
        return RankFailedError(text, ranks=(rank,), phase=phase)
    if issubclass(cls, StateEncodingError):
        return StateEncodingError(members["key_path"], text)
    made: StrongroomError = cls(text, **lists)
    return made


_TEXT_LENGTH: Final = 20_000
"""Characters of an error's text that travel: some errors quote what they are about."""

_LISTS: Final = ("missing", "unexpected", "different", "reasons", "undefined")
"""Attributes of errors that are sequences, which their constructors take by name."""


def _tuples(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)
