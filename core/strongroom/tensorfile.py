"""The safetensors container: building and reading its header. Pure bytes, no torch, no I/O.

Written here and not by the safetensors library because a shard is streamed: its header must
be known, byte for byte, before the tensors are copied, and stay the same length from save to
save; and because this parser is bounded and says what is wrong. Source: the safetensors
format description (8 bytes of little-endian header length, a JSON object, then the tensors'
bytes without holes).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strongroom.dtypes import DTYPE_BYTES
from strongroom.errors import FormatError

__all__ = ["MAX_HEADER_BYTES", "Entry", "Header", "build_header", "header_length", "parse_header"]

MAX_HEADER_BYTES: Final = 100_000_000
"""What stock safetensors accepts at most (``MAX_HEADER_SIZE`` of its reference implementation)."""

_ALIGNMENT_BYTES: Final = 64
"""Data starts on a cache line, so that a memory-mapped file's tensors are aligned."""

_MAX_DIMENSIONS: Final = 64
_METADATA: Final = "__metadata__"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in the file; ``start`` counts from the file's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A file's entries in the order of their bytes, its text metadata, and where data starts."""

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]
    data_start: int

    @property
    def end(self) -> int:
        """The length of the whole file."""
        return self.data_start + sum(entry.size_bytes for entry in self.entries)


def build_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, Header]:
    """The header's bytes, padded so that data is aligned, and where each tensor comes to lie.

    Args:
        tensors: name, dtype name and shape, in the order of their bytes. Stock readers want
            tensors of wider elements first, or they would be misaligned.
        metadata: text values for ``__metadata__``; values of constant length keep the
            header's length constant.

    Raises:
        FormatError: the header would exceed what stock readers accept.
    """
    document: dict[str, Any] = {_METADATA: dict(metadata)}
    offset = 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * DTYPE_BYTES[dtype]
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    padded = -(-(len(text) + 8) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES - 8
    if padded > MAX_HEADER_BYTES:
        raise FormatError(
            f"a safetensors header of {padded} bytes for {len(tensors)} tensors; readers accept at most "
            f"{MAX_HEADER_BYTES}"
        )
    data = padded.to_bytes(8, "little") + text.ljust(padded, b" ")
    entries = []
    start = len(data)
    for name, dtype, shape in tensors:
        entry = Entry(name, dtype, shape, start)
        entries.append(entry)
        start += entry.size_bytes
    return data, Header(entries=tuple(entries), metadata=dict(metadata), data_start=len(data))


def header_length(first_bytes: bytes, file_bytes: int, what: str) -> int:
    """How many bytes at the file's start are its header, from its first eight bytes.

    Raises:
        FormatError: the file is too short, or the length exceeds the file or the bound.
    """
    if len(first_bytes) < 8:
        raise FormatError(f"{what} has {file_bytes} bytes, fewer than a safetensors header")
    length = int.from_bytes(first_bytes[:8], "little")
    if length > MAX_HEADER_BYTES or 8 + length > file_bytes:
        raise FormatError(f"{what} says its header has {length} bytes; the file has {file_bytes}")
    return 8 + length


def parse_header(data: bytes, file_bytes: int, what: str) -> Header:
    """Read a header.

    Args:
        data: the file's first bytes, at least as many as `header_length` says.
        file_bytes: the whole file's length.
        what: names the file in errors.

    Raises:
        FormatError: not JSON, a member twice, an unknown dtype, shapes or offsets that do
            not fit each other or the file, or bytes that no tensor owns.
    """
    data_start = header_length(data, file_bytes, what)
    try:
        document = json.loads(data[8:data_start].decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} has a header that is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise FormatError(f"{what} has a header that is not a JSON object")
    metadata = document.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{what} has metadata that is not all text")
    placed = sorted(
        (_parse_entry(name, value, data_start, what) for name, value in document.items()),
        key=lambda item: (item[0].start, item[1]),
    )
    end = data_start
    for entry, entry_end in placed:
        if entry.start != end:
            raise FormatError(f"{what}: the bytes of {entry.name!r} start at {entry.start}, not at {end}")
        end = entry_end
    if end != file_bytes:
        raise FormatError(f"{what} has {file_bytes} bytes; its tensors end at {end}")
    return Header(entries=tuple(entry for entry, _ in placed), metadata=metadata, data_start=data_start)


def _parse_entry(name: str, value: Any, data_start: int, what: str) -> tuple[Entry, int]:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{what}: {name[:80]!r} lacks dtype, shape and data_offsets, or has more")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise FormatError(f"{what}: {name[:80]!r} has the unknown dtype {dtype!r:.40}")
    if not _naturals(shape) or len(shape) > _MAX_DIMENSIONS:
        raise FormatError(f"{what}: {name[:80]!r} has the shape {shape!r:.80}")
    if not _naturals(offsets) or len(offsets) != 2:
        raise FormatError(f"{what}: {name[:80]!r} has the offsets {offsets!r:.80}")
    entry = Entry(name, dtype, tuple(shape), data_start + offsets[0])
    if offsets[1] - offsets[0] != entry.size_bytes:
        raise FormatError(
            f"{what}: {name[:80]!r} of {dtype}{list(shape)} needs {entry.size_bytes} bytes and has "
            f"{offsets[1] - offsets[0]}"
        )
    return entry, data_start + offsets[1]


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**62 for item in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member is named twice")
    return members
