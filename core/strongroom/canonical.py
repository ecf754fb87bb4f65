"""Our JSON: one byte string for each value, and a strict, bounded parser for it.

The canonical form is RFC 8785 (JCS), restricted: objects, arrays, strings, booleans, null
and integers below 2^53 in size; no other number. `decode` accepts exactly the bytes that
`encode` gives, so a document has one spelling and one digest. `docs/format.md`, clause 3.

A *sealed-by-itself* document carries its own SHA-256 in the member ``~digest``, which sorts
after every other member's name: `with_self_digest`, `check_self_digest`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NoReturn

from strongroom.digest import sha256_of
from strongroom.errors import FormatError

__all__ = [
    "MAX_INTEGER",
    "SELF_DIGEST",
    "Bounds",
    "Json",
    "check_bounds",
    "check_self_digest",
    "decode",
    "encode",
    "with_self_digest",
]

Json = Any
"""None, bool, int, str, ``list[Json]`` or ``dict[str, Json]``."""

MAX_INTEGER: Final = 2**53 - 1
"""The largest integer that every JSON reader keeps exact (RFC 8785, 3.2.2.3; IEEE 754 double)."""

SELF_DIGEST: Final = "~digest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a parser accepts at most.

    Attributes:
        length_bytes: of the document.
        depth: of nested arrays and objects.
        items: array elements and object members, all together.
    """

    length_bytes: int
    depth: int = 16
    items: int = 10_000_000


def encode(value: Json, *, what: str = "the document", bounds: Bounds | None = None) -> bytes:
    """The canonical bytes of a value.

    Args:
        value: what to write.
        what: names the document in errors about ``bounds``.
        bounds: refuse what a reader with these bounds would refuse.

    Raises:
        FormatError: a number that is no integer below 2^53 in size, a string that is not
            valid Unicode, a key that is no string, any other type, a value that contains
            itself, or one out of bounds.
    """
    try:
        # Keys sort by UTF-16 code units (RFC 8785, 3.2.3). json.dumps sorts by code point,
        # which is the same for ASCII and differs above U+FFFF.
        text = _SORTING.encode(value) if _has_only_ascii_keys(value) else _KEEPING.encode(_in_order(value))
    except RecursionError:
        raise FormatError("a value nests too deep for JSON, or contains itself") from None
    data = text.encode("utf-8")
    if bounds is not None:
        check_bounds(data, what, bounds)
    return data


def decode(data: bytes, what: str, bounds: Bounds) -> Json:
    """The value of canonical bytes.

    Args:
        data: the document's bytes.
        what: names the document in errors.
        bounds: what is accepted at most.

    Raises:
        FormatError: too long, too deep, too many items, not JSON, a duplicate key, a number
            out of range, or not the canonical spelling of its value.
    """
    check_bounds(data, what, bounds)
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_float=_no_float,
            parse_int=_bounded_int,
            parse_constant=_no_float,
        )
    except _RefusedError as refused:
        raise FormatError(f"{what}: {refused}") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not JSON: {error}") from None
    try:
        # Of such bytes every string is ASCII, and what else could be wrong was refused above: not to look at
        # every value again spares half of the time.
        is_plain = data.isascii() and b"\\u" not in data
        again = _SORTING.encode(value).encode("ascii") if is_plain else encode(value)
    except FormatError as error:  # an escape that stands for half a character
        raise FormatError(f"{what}: {error}") from None
    if again != data:
        raise FormatError(f"{what} is not in canonical form (RFC 8785): it does not encode to its own bytes")
    return value


def with_self_digest(members: dict[str, Json]) -> bytes:
    """Canonical bytes of an object plus its ``~digest``: the SHA-256 of it without that member."""
    if SELF_DIGEST in members:
        raise FormatError(f"{SELF_DIGEST} is added here, not given")
    return encode({**members, SELF_DIGEST: str(sha256_of(encode(members)))})


def check_self_digest(value: Json, what: str) -> dict[str, Json]:
    """The members of a decoded document without ``~digest``, once that digest was found right.

    Raises:
        FormatError: the value is no object, has no ``~digest``, or a wrong one.
    """
    if not isinstance(value, dict):
        raise FormatError(f"{what} is not a JSON object")
    members = dict(value)
    stored = members.pop(SELF_DIGEST, None)
    if not isinstance(stored, str):
        raise FormatError(f"{what} has no {SELF_DIGEST}")
    found = sha256_of(encode(members))
    # Compared as text: a spelling that is no digest is damage like any other, and not told apart.
    if stored != str(found):
        raise FormatError(f"{what} is damaged: it says its digest is {stored[:80]}, and it is {found}")
    return members


class _RefusedError(Exception):
    """A reason found inside a json.loads hook."""


def _no_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _RefusedError("an object names a member twice")
    return members


def _no_float(text: str) -> NoReturn:
    raise _RefusedError(f"{text[:40]!r} is a number that is not an integer")


def _bounded_int(text: str) -> int:
    # The length is checked first: int() on a huge literal is quadratic.
    if len(text) > 17 or abs(int(text)) > MAX_INTEGER:
        raise _RefusedError(f"the integer {text[:20]} is not below 2^53")
    return int(text)


def check_bounds(data: bytes, what: str, bounds: Bounds) -> None:
    """Check length, items and depth of any JSON text before anything is built from it.

    Raises:
        FormatError: it exceeds one of them.
    """
    if len(data) > bounds.length_bytes:
        raise FormatError(f"{what} has {len(data)} bytes; at most {bounds.length_bytes} are read")
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    # An item has two strings at most, so a flood of strings is refused before it is split.
    if unescaped.count(b'"') > 4 * bounds.items + 4:
        raise FormatError(f"{what} holds more than {bounds.items} items")
    outside = b"".join(unescaped.split(b'"')[::2])
    opening = outside.count(b"[") + outside.count(b"{")
    if outside.count(b",") + opening > bounds.items:
        raise FormatError(f"{what} holds more than {bounds.items} items")
    # Or a flood of them would be walked through below.
    if outside.count(b"]") + outside.count(b"}") > opening:
        raise FormatError(f"{what} is not JSON: it closes more brackets than it opens")
    # Deep nesting cannot hide: with everything but brackets removed, the depth is a running sum.
    steps = memoryview(outside.translate(_BRACKET_STEP, _NOT_BRACKETS)).cast("b")
    deepest = max(accumulate(steps), default=0)
    if deepest > bounds.depth:
        raise FormatError(f"{what} nests {deepest} deep; at most {bounds.depth} are read")


_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_BRACKET_STEP: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes: +1, -1

# The check of types below has followed every reference already, so a cycle cannot come this far.
_SORTING: Final = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, sort_keys=True, separators=(",", ":")
)
_KEEPING: Final = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"))


def _has_only_ascii_keys(value: Json) -> bool:
    """Whether every key in a value is ASCII; refuses what has no place in canonical JSON."""
    kind = type(value)
    if kind is str:
        if not value.isascii():
            _check_unicode(value)
    elif kind is int:
        if abs(value) > MAX_INTEGER:
            raise FormatError(f"an integer of {value.bit_length()} bits is not below 2^53")
    elif kind is list:
        ascii_keys = True
        for item in value:
            ascii_keys &= _has_only_ascii_keys(item)
        return ascii_keys
    elif kind is dict:
        ascii_keys = True
        for key, item in value.items():
            if type(key) is not str:
                raise FormatError(f"an object's member is named by a {type(key).__name__}, not by a string")
            if not key.isascii():
                _check_unicode(key)
                ascii_keys = False
            ascii_keys &= _has_only_ascii_keys(item)
        return ascii_keys
    elif value is not None and kind is not bool:
        raise FormatError(f"a {kind.__name__} has no place in canonical JSON")
    return True


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise FormatError(f"the string {text[:60]!r} is not valid Unicode at {error.start}") from None


def _in_order(value: Json) -> Json:
    if type(value) is dict:
        return {key: _in_order(value[key]) for key in sorted(value, key=_utf_16_units)}
    if type(value) is list:
        return [_in_order(item) for item in value]
    return value


def _utf_16_units(key: str) -> bytes:
    return key.encode("utf-16-be")
