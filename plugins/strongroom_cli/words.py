"""Words for people: sizes, times, counts, and text that is safe to print. Pure.

Names and values come from a checkpoint, and a checkpoint may come from anyone: whatever would
steer a terminal (escape sequences, line breaks, invisible and direction-changing characters) is
spelled out. Program output needs none of this: JSON escapes by itself.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Final

__all__ = ["NOTHING", "age", "count", "printable", "shortened", "size", "when"]

NOTHING: Final = "-"
"""Stands for what is not known."""

_MINUTE: Final = 60
_HOUR: Final = 60 * _MINUTE
_DAY: Final = 24 * _HOUR
_CLOCK_SKEW_S: Final = 60
"""Clocks of writer and reader may differ by this without a word."""


def printable(text: str) -> str:
    """The text with every character that is not plainly visible spelled out (``\\x1b``)."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _spelled(char) for char in text)


def _spelled(char: str) -> str:
    code = ord(char)
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char)
    if named is not None:
        return named
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def shortened(text: str, length: int) -> str:
    """The text, cut to so many characters."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def size(size_bytes: int | None) -> str:
    """``17.1 KiB``; bytes up to 1023 as they are."""
    if size_bytes is None:
        return NOTHING
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            return f"{size_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} PiB"


def count(number: int, what: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def when(ms: int | None) -> str:
    """A moment in local time, to the second."""
    if ms is None:
        return NOTHING
    try:
        moment = datetime.fromtimestamp(ms // 1000, tz=timezone.utc).astimezone()
    except (OverflowError, OSError, ValueError):
        return f"{ms} ms"  # beyond the year 9999: a writer's clock may say anything
    return f"{moment:%Y-%m-%d %H:%M:%S}"


def age(ms: int | None, *, now_ms: int) -> str:
    """How long ago that was."""
    if ms is None:
        return NOTHING
    seconds = (now_ms - ms) // 1000
    if seconds < -_CLOCK_SKEW_S:
        return "in the future"
    if seconds < _MINUTE:
        return "just now" if seconds < 2 else f"{seconds} s ago"
    for unit_s, unit, limit in ((_MINUTE, "min", 2 * _HOUR), (_HOUR, "h", 2 * _DAY)):
        if seconds < limit:
            return f"{seconds // unit_s} {unit} ago"
    days = seconds // _DAY
    return f"{days} days ago" if days < 1000 else f"{days // 365} years ago"
