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
from strongroom.errors import FormatError, RankFailedError, RanksError, StrongroomError

__all__ = ["Message", "error_members", "error_of"]

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
        except (struct.error, ValueError, UnicodeDecodeError) as error:
            raise FormatError(
                f"a rank's message cannot be read ({error}); run the same release of Strongroom on all ranks"
            ) from None
        pieces = {}
        position = _LENGTH.size + length
        for name, size in lengths:
            pieces[name] = data[position : position + size]
            position += size
        return cls(members=members, pieces=pieces)


def error_members(error: BaseException) -> dict[str, Any]:
    """An error as members of a message."""
    kind = next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in errors.__all__), None)
    lists = {name: list(getattr(error, name)) for name in _LISTS if hasattr(error, name)}
    text = str(error) if isinstance(error, StrongroomError) else f"{type(error).__name__}: {error}"
    about = {"ranks": list(error.ranks), "phase": error.phase} if isinstance(error, RanksError) else {}
    return {"kind": kind, "text": text, **lists, **about}


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
    if issubclass(cls, errors.StateEncodingError):
        return errors.StateEncodingError("state", text)
    made: StrongroomError = cls(text, **lists)
    return made  # noqa: RET504 - named, to be of that type


_LISTS: Final = ("missing", "unexpected", "different", "reasons", "undefined")
"""Attributes of errors that are sequences, which their constructors take by name."""


def _tuples(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)
