"""JSON that others wrote, read strictly and within bounds: signature bundles and what they carry.

Any spelling of a value is fine here, which is what sets it apart from `strongroom.canonical`. What two
readers could take for different values is not: a member named twice, a number that is no integer
below 2^53, half of a surrogate pair, bytes behind the end. Besides the parser, the module holds the
questions that a strict reader asks of a parsed value; what the members mean is for its callers.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Collection
from typing import Final, NoReturn

from strongroom.canonical import MAX_INTEGER, Bounds, Json, check_bounds
from strongroom.errors import FormatError

__all__ = ["base64_of", "list_of", "load", "members_of", "text_of"]

_BOM: Final = b"\xef\xbb\xbf"
_HALF_OF_A_PAIR: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_SHOWN_CHARS: Final = 60


def load(data: bytes, what: str, bounds: Bounds) -> Json:
    """The value of a JSON document.

    Args:
        data: the document's bytes.
        what: names the document in errors.
        bounds: what is accepted at most; length, depth and items are counted before anything is built.

    Raises:
        FormatError: too long, too deep, too many items, not JSON, not UTF-8 or with a byte-order mark,
            a member named twice, or a number that is no integer below 2^53.
    """
    check_bounds(data, what, bounds)
    if data.startswith(_BOM):
        raise FormatError(f"{what} starts with a byte-order mark; expected plain UTF-8")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_float=_no_float,
            parse_int=_bounded_int,
            parse_constant=_no_float,
        )
        if _HALF_OF_A_PAIR.search(data):
            # An escape may stand for half a character: such a string has no bytes to sign or compare.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except _RefusedError as refused:
        raise FormatError(f"{what}: {refused}") from None
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise FormatError(f"{what} is not valid Unicode: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not JSON: {error}") from None
    return value


def members_of(
    value: Json, what: str, *, required: Collection[str], optional: Collection[str] = ()
) -> dict[str, Json]:
    """An object's members, once it was found to have all that are required and no unknown ones.

    Raises:
        FormatError: no object; a member is missing or unknown.
    """
    if not isinstance(value, dict):
        raise FormatError(f"{what} is {_kind(value)}; expected an object")
    missing = [name for name in required if name not in value]
    if missing:
        raise FormatError(f"{what} lacks the member {missing[0]!r}")
    unknown = [name for name in value if name not in required and name not in optional]
    if unknown:
        raise FormatError(f"{what} has the member {unknown[0][:_SHOWN_CHARS]!r}, which has no place there")
    return value


def list_of(value: Json, what: str) -> list[Json]:
    """An array's items.

    Raises:
        FormatError: no array.
    """
    if not isinstance(value, list):
        raise FormatError(f"{what} is {_kind(value)}; expected an array")
    return value


def text_of(value: Json, what: str, *, expected: str | None = None) -> str:
    """A string.

    Args:
        expected: the one that it has to be.

    Raises:
        FormatError: no string, or another one.
    """
    if not isinstance(value, str):
        raise FormatError(f"{what} is {_kind(value)}; expected a string")
    if expected is not None and value != expected:
        raise FormatError(f"{what} is {value[:_SHOWN_CHARS]!r}; expected {expected!r}")
    return value


def base64_of(value: Json, what: str) -> bytes:
    """The bytes of a string in base64 (RFC 4648, section 4), padded, of which there is one spelling.

    Raises:
        FormatError: no string, or not in that spelling.
    """
    text = text_of(value, what)
    try:
        data = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        data = None
    # The decoder lets spare bits in the last character pass; two texts would then be the same bytes.
    if data is None or base64.b64encode(data) != text.encode("utf-8"):
        raise FormatError(f"{what} is not in standard, padded base64: {text[:_SHOWN_CHARS]!r}")
    return data


class _RefusedError(Exception):
    """A reason found inside a json.loads hook."""


def _no_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _RefusedError(f"an object names the member {twice[:_SHOWN_CHARS]!r} twice")
    return members


def _no_float(text: str) -> NoReturn:
    raise _RefusedError(f"{text[:40]!r} is a number that is not an integer")


def _bounded_int(text: str) -> int:
    # The length is checked first: int() on a huge literal is quadratic.
    if len(text) > 17 or abs(int(text)) > MAX_INTEGER:
        raise _RefusedError(f"the integer {text[:20]} is not below 2^53")
    return int(text)


def _kind(value: Json) -> str:
    if value is None:
        return "null"
    return {bool: "a boolean", int: "a number", str: "a string", list: "an array", dict: "an object"}[
        type(value)
    ]
