"""The text of an error as a record holds it: without what looks like a secret, and of bounded length. Pure.

Strongroom's own errors hold none. Those of other people's code, which are told on, may: links that are keys
to what they lead to, headers of requests, addresses with passwords.
"""

from __future__ import annotations

import re
from typing import Final

from strongroom.scrubbing import SCRUBBED, Scrubber

__all__ = ["REASON_CHARS", "reason_in"]

REASON_CHARS: Final = 2_000
"""Of an error's text: lists of names can be long, and a log's line is bounded."""

_READ_CHARS: Final = 8 * REASON_CHARS
"""Looked through for secrets: what is replaced is mostly longer than what stands there then."""

_QUERY: Final = re.compile(r"(?<=://)([^\s?'\"<>]{1,2048}\?)[^\s'\"<>]+")
"""Of an address: it may be what makes it a key to what it leads to, by whatever name."""


def reason_in(text: str) -> str:
    """A text with what looks like a secret replaced, and cut to what a record holds."""
    bare = _QUERY.sub(rf"\g<1>{SCRUBBED}", text[:_READ_CHARS])
    return Scrubber().text(bare, "reason")[:REASON_CHARS]
