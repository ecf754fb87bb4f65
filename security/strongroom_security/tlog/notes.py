"""Signed notes by C2SP signed-note: a text, an empty line, and a line for each signature. Pure, and strict.

It owns the spelling. Who may sign, and whether a signature is right, is `notekeys`'.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Final

from strongroom.errors import FormatError

__all__ = ["MAX_NOTE_BYTES", "Note", "NoteSignature", "check_key_name", "decode_base64", "encode_base64"]

MAX_NOTE_BYTES: Final = 1 << 20
MAX_SIGNATURES: Final = 64
"""The specification asks for 16 at least; one of ML-DSA has 5 kB."""

_DASH: Final = "\u2014 "
_ID_BYTES: Final = 4


def encode_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def decode_base64(text: str, what: str) -> bytes:
    """Bytes of standard base64 with its padding; every other spelling is refused.

    Raises:
        FormatError: it is not base64, or not spelled like this.
    """
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error, ValueError):
        raise FormatError(f"{what} is not base64: {text[:60]!r}") from None
    if encode_base64(data) != text:
        raise FormatError(f"{what} is not base64 in its one spelling: {text[:60]!r}")
    return data


def check_key_name(name: str) -> str:
    """Return a key's name unchanged if it is one: not empty, without spaces, '+' and control characters.

    Raises:
        FormatError: it is none.
    """
    if not name or "+" in name or any(each.isspace() or each < " " for each in name):
        raise FormatError(f"the name of a note's key has no space and no '+', found {name[:80]!r}")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteSignature:
    """One signature line.

    Attributes:
        name: the key's.
        key_id: four bytes, which tell keys of one name apart.
        value: the signature's own bytes.
    """

    name: str
    key_id: bytes
    value: bytes

    def __post_init__(self) -> None:
        check_key_name(self.name)
        if len(self.key_id) != _ID_BYTES or not self.value:
            raise FormatError(f"a signature by {self.name} has a key id of four bytes, and bytes behind it")

    def line(self) -> str:
        """As it stands in a note, with its line feed."""
        return f"{_DASH}{self.name} {encode_base64(self.key_id + self.value)}\n"

    @classmethod
    def parse(cls, line: str, what: str) -> NoteSignature:
        """
        Args:
            line: without its line feed.

        Raises:
            FormatError: it is no signature line.
        """
        name, space, encoded = line.removeprefix(_DASH).partition(" ")
        if not line.startswith(_DASH) or not space:
            raise FormatError(f"{what} has a line among its signatures that is none: {line[:80]!r}")
        data = decode_base64(encoded, f"a signature of {what}")
        if len(data) <= _ID_BYTES:
            raise FormatError(
                f"a signature of {what} has {len(data)} bytes, and so nothing behind its key id"
            )
        return cls(name=name, key_id=data[:_ID_BYTES], value=data[_ID_BYTES:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A text and who signed it.

    Attributes:
        text: with the line feed that it ends in; what is signed.
        signatures: at least one, in the note's order.
    """

    text: str
    signatures: tuple[NoteSignature, ...]

    def __post_init__(self) -> None:
        _check_text(self.text, "a note's text")
        if not self.text.endswith("\n"):
            raise FormatError("a note's text ends in a line feed")
        if not 1 <= len(self.signatures) <= MAX_SIGNATURES:
            raise FormatError(
                f"a note has from 1 to {MAX_SIGNATURES} signatures, found {len(self.signatures)}"
            )

    def to_bytes(self) -> bytes:
        return (self.text + "\n" + "".join(each.line() for each in self.signatures)).encode("utf-8")

    @classmethod
    def parse(cls, data: bytes, what: str) -> Note:
        """
        Args:
            what: names the note in errors.

        Raises:
            FormatError: it is none, or too long.
        """
        if len(data) > MAX_NOTE_BYTES:
            raise FormatError(f"{what} holds {len(data)} bytes; a note has at most {MAX_NOTE_BYTES}")
        try:
            whole = data.decode("utf-8")
        except UnicodeDecodeError:
            raise FormatError(f"{what} is not UTF-8") from None
        _check_text(whole, what)
        # The last empty line separates: the text may hold others.
        end = whole.rfind("\n\n")
        if end < 0 or not whole.endswith("\n"):
            raise FormatError(f"{what} is no note: no empty line separates a text from signatures")
        lines = whole[end + 2 : -1].split("\n")
        if lines == [""]:
            raise FormatError(f"{what} has no signature")
        if len(lines) > MAX_SIGNATURES:
            raise FormatError(f"{what} has {len(lines)} signatures, at most {MAX_SIGNATURES} are read")
        return cls(text=whole[: end + 1], signatures=tuple(NoteSignature.parse(line, what) for line in lines))


def _check_text(text: str, what: str) -> None:
    if any(each < " " and each != "\n" for each in text):
        raise FormatError(f"{what} holds a control character other than the line feed")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise FormatError(f"{what} is not valid Unicode") from None
