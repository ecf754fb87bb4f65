"""Values without parts and their spelling in typed JSON: numbers, text, bytes, paths, times, and
torch's dtypes, devices and sizes. `docs/format.md`, clause 8.

Containers are `strongroom.values`' business, NumPy's scalars and arrays `strongroom.arrays`'.
torch is imported only to rebuild one of its values.
"""

from __future__ import annotations

import decimal
import re
import struct
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

from strongroom import canonical
from strongroom.errors import FormatError

__all__ = [
    "ATOMS",
    "ATOM_TAGS",
    "Atom",
    "MalformedError",
    "Node",
    "RefusedError",
    "UnavailableError",
    "bytes_text",
    "int_node",
    "int_of",
    "integers",
    "node",
    "read_atom",
    "text_bytes",
    "text_node",
    "text_of",
    "torch_atom",
]

Node = Any
"""None, bool, int below 2^53, str, a list of nodes, or ``{"$": tag, "v": payload}``."""


class RefusedError(Exception):
    """A value has no encoding; says why. Private to encoding, which adds where the value stands."""


class MalformedError(Exception):
    """A payload is not what encoding gives; says why. Private to decoding, likewise."""


class UnavailableError(Exception):
    """A sound payload whose value this program or machine cannot build; says why. Likewise."""


@dataclass(frozen=True, slots=True)
class Atom:
    """One kind of value without parts: its tag, value to payload, payload to value.

    ``read`` may be lenient: its caller writes the value again and compares.
    """

    tag: str
    write: Callable[[Any], Node]
    read: Callable[[Node], Any]


def node(tag: str, payload: Node) -> Node:
    """A tagged node."""
    return {"$": tag, "v": payload}


def read_atom(atom: Atom, payload: Node) -> Any:
    """The value of a payload that is spelled as ``atom.write`` spells it.

    Raises:
        MalformedError: it is not.
        UnavailableError: this machine cannot build the value.
    """
    try:
        value = atom.read(payload)
        again = atom.write(value)
        # True == 1 == 1.0, but each has its own canonical bytes.
        same = again == payload and (
            type(payload) is str or canonical.encode(again) == canonical.encode(payload)
        )
    except (ValueError, TypeError, ArithmeticError, LookupError, RefusedError, FormatError) as error:
        raise MalformedError(f"not a {atom.tag}: {payload!r:.80} ({error})") from None
    if not same:
        raise MalformedError(f"not the canonical spelling of a {atom.tag}: {payload!r:.80}")
    return value


# ------------------------------------------------------------------------------- numbers and text


def int_node(value: int) -> Node:
    """An integer of any size. Hexadecimal, because decimal takes quadratic time and is limited."""
    return value if -canonical.MAX_INTEGER <= value <= canonical.MAX_INTEGER else node("int", hex(value))


def int_of(payload: Node) -> int:
    """The inverse of `int_node`."""
    if type(payload) is int:
        return payload
    return _read_int(_tagged(payload, "int"))


def _read_int(payload: Node) -> int:
    value = int(_text(payload), 16)
    if hex(value) != payload or -canonical.MAX_INTEGER <= value <= canonical.MAX_INTEGER:
        raise ValueError("not the one spelling of its value")
    return value


def text_node(value: str) -> Node:
    """A string of any code points: JSON has no lone surrogates, which file names can hold."""
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return node("str", bytes_text(value.encode("utf-8", "surrogatepass")))
    return value


def text_of(payload: Node) -> str:
    """The inverse of `text_node`."""
    if type(payload) is str:
        return payload
    return _read_text(_tagged(payload, "str"))


def _read_text(payload: Node) -> str:
    value = text_bytes(payload).decode("utf-8", "surrogatepass")
    if text_node(value) != node("str", payload):
        raise ValueError("not the one spelling of its value")
    return value


def _write_float(value: float) -> str:
    # repr is the shortest text that reads back as the same double, the sign of zero included.
    return repr(value) if value == value else f"nan:{struct.pack('>d', value).hex()}"


def _read_float(payload: Node) -> float:
    text = _text(payload)
    if text.startswith("nan:"):
        value: float = struct.unpack(">d", bytes.fromhex(text[4:20]))[0]
        return value
    return float(text[:32])


def bytes_text(value: bytes | bytearray) -> str:
    """Base64 (RFC 4648, 4), with padding."""
    return b64encode(value).decode("ascii")


def text_bytes(payload: Node) -> bytes:
    """The inverse of `bytes_text`; ValueError or TypeError where it is not base64."""
    return b64decode(_text(payload), validate=True)


def _text(payload: Node) -> str:
    if type(payload) is not str:
        raise TypeError(f"a string is expected, got {type(payload).__name__}")
    return payload


def _tagged(payload: Node, tag: str) -> Node:
    if type(payload) is not dict or set(payload) != {"$", "v"} or payload["$"] != tag:
        raise TypeError(f"a value or a tagged {tag} is expected")
    return payload["v"]


def integers(payload: Node, count: int | None = None) -> list[int]:
    """A list of plain integers, of this length where one is given; else TypeError."""
    if type(payload) is not list or not all(type(item) is int for item in payload):
        raise TypeError("a list of integers is expected")
    if count is not None and len(payload) != count:
        raise TypeError(f"{count} integers are expected")
    return payload


_DECIMAL_SPELLING: Final = decimal.Context(capitals=1)
"""str() of a Decimal depends on the thread's context."""


def _write_range(value: range) -> Node:
    return [int_node(value.start), int_node(value.stop), int_node(value.step)]


def _read_range(payload: Node) -> range:
    start, stop, step = payload
    return range(int_of(start), int_of(stop), int_of(step))


# -------------------------------------------------------------------------------- paths and times


def _path_atom(tag: str, cls: type[PurePath]) -> Atom:
    return Atom(tag, lambda path: text_node(str(path)), lambda payload: cls(text_of(payload)))


_IS_WINDOWS: Final = isinstance(Path(), PureWindowsPath)
# A path of the other system cannot be used as one here, but it can be read.
_NATIVE_POSIX: Final[type[PurePath]] = PurePosixPath if _IS_WINDOWS else PosixPath
_NATIVE_WINDOWS: Final[type[PurePath]] = WindowsPath if _IS_WINDOWS else PureWindowsPath


def _write_timedelta(value: timedelta) -> Node:
    return [value.days, value.seconds, value.microseconds]


def _read_timedelta(payload: Node) -> timedelta:
    days, seconds, microseconds = integers(payload, 3)
    return timedelta(days, seconds, microseconds)


def _write_timezone(value: timezone) -> Node:
    offset, *name = value.__getinitargs__()  # type: ignore[attr-defined]
    return [_write_timedelta(offset), text_node(name[0]) if name else None]


def _read_timezone(payload: Node) -> timezone:
    offset, name = payload
    if name is None:
        return timezone(_read_timedelta(offset))
    return timezone(_read_timedelta(offset), text_of(name))


_ZONE: Final = re.compile(r"[A-Za-z0-9_+-]{1,40}(/[A-Za-z0-9_+-]{1,40}){0,3}")
"""IANA names. No dots: a name becomes a path below the system's zone files."""


def _write_zone(value: ZoneInfo) -> str:
    if not _ZONE.fullmatch(value.key or ""):  # None when read from a file
        raise RefusedError(f"a time zone without an IANA name ({value!r:.80}); use ZoneInfo('Area/City')")
    return value.key


def _read_zone(payload: Node) -> ZoneInfo:
    name = _text(payload)
    if not _ZONE.fullmatch(name):
        raise ValueError("not an IANA name")
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        raise UnavailableError(
            f"this machine does not know the time zone {name!r}; install the tzdata package"
        ) from None


def _write_tzinfo(value: tzinfo | None) -> Node:
    if value is None:
        return None
    atom = ATOMS.get(type(value))
    if atom is None or atom.tag not in {"timezone", "zoneinfo"}:
        raise RefusedError(
            f"a time in a {type(value).__module__}.{type(value).__qualname__}, which has no safe encoding; "
            f"use datetime.timezone or zoneinfo.ZoneInfo"
        )
    return node(atom.tag, atom.write(value))


def _read_tzinfo(payload: Node) -> tzinfo | None:
    if payload is None:
        return None
    if type(payload) is dict and payload.get("$") == "timezone":
        return _read_timezone(_tagged(payload, "timezone"))
    return _read_zone(_tagged(payload, "zoneinfo"))


def _write_time(value: datetime | time) -> Node:
    return [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, _write_tzinfo(value.tzinfo)]


def _time_reader(parse: Callable[[str], Any]) -> Callable[[Node], Any]:
    def read(payload: Node) -> Any:
        text, fold, zone = payload
        return parse(_text(text)).replace(fold=fold, tzinfo=_read_tzinfo(zone))

    return read


# ------------------------------------------------------------------------------------------ torch


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise UnavailableError("PyTorch is needed to build this value, and cannot be imported") from None
    return torch


def _read_dtype(payload: Node) -> Any:
    torch = _torch()
    # vars, not getattr: torch's __getattr__ imports modules.
    dtype = vars(torch).get(_text(payload))
    if not isinstance(dtype, torch.dtype):
        raise UnavailableError(f"this PyTorch has no dtype {payload[:40]!r}")
    return dtype


_DEVICE: Final = re.compile(r"[a-z][a-z0-9_]{0,31}(:[0-9]{1,3})?")


def _read_device(payload: Node) -> Any:
    if not _DEVICE.fullmatch(_text(payload)):
        raise ValueError("not a device")
    torch = _torch()
    try:
        return torch.device(payload)
    except RuntimeError:
        raise UnavailableError(f"this PyTorch has no device {payload!r}") from None


_TORCH_DTYPE: Final = Atom("torch.dtype", lambda dtype: str(dtype).removeprefix("torch."), _read_dtype)
_TORCH_DEVICE: Final = Atom("torch.device", str, _read_device)
_TORCH_SIZE: Final = Atom(
    "torch.size",
    lambda size: [int_node(length) for length in size],
    lambda payload: _torch().Size([int_of(length) for length in payload]),
)


def torch_atom(cls: type) -> Atom | None:
    """The atom of one of torch's types, without importing torch: who has its value has imported it."""
    if cls.__module__ != "torch" or "torch" not in sys.modules:
        return None
    torch = _torch()
    return {torch.dtype: _TORCH_DTYPE, torch.device: _TORCH_DEVICE, torch.Size: _TORCH_SIZE}.get(cls)


# ----------------------------------------------------------------------------------------- tables

ATOMS: Final[dict[type, Atom]] = {
    float: Atom("float", _write_float, _read_float),
    complex: Atom(
        "complex",
        lambda value: [_write_float(value.real), _write_float(value.imag)],
        lambda payload: complex(*[_read_float(part) for part in payload]),
    ),
    bytes: Atom("bytes", bytes_text, text_bytes),
    bytearray: Atom("bytearray", bytes_text, lambda payload: bytearray(text_bytes(payload))),
    range: Atom("range", _write_range, _read_range),
    PurePosixPath: _path_atom("pure_posix_path", PurePosixPath),
    PureWindowsPath: _path_atom("pure_windows_path", PureWindowsPath),
    PosixPath: _path_atom("posix_path", _NATIVE_POSIX),
    WindowsPath: _path_atom("windows_path", _NATIVE_WINDOWS),
    datetime: Atom("datetime", _write_time, _time_reader(datetime.fromisoformat)),
    date: Atom("date", date.isoformat, lambda payload: date.fromisoformat(_text(payload))),
    time: Atom("time", _write_time, _time_reader(time.fromisoformat)),
    timedelta: Atom("timedelta", _write_timedelta, _read_timedelta),
    timezone: Atom("timezone", _write_timezone, _read_timezone),
    ZoneInfo: Atom("zoneinfo", _write_zone, _read_zone),
    decimal.Decimal: Atom(
        "decimal", _DECIMAL_SPELLING.to_sci_string, lambda payload: decimal.Decimal(_text(payload))
    ),
    UUID: Atom("uuid", str, lambda payload: UUID(_text(payload))),
}
"""By exact type. Integers and strings, which mostly need no tag, and torch's are not among them."""

ATOM_TAGS: Final[dict[str, Atom]] = {
    atom.tag: atom
    for atom in (
        *ATOMS.values(),
        Atom("int", hex, _read_int),
        Atom("str", lambda value: text_node(value)["v"], _read_text),
        _TORCH_DTYPE,
        _TORCH_DEVICE,
        _TORCH_SIZE,
    )
}
