"""The lines of a segment that frame its events: how it opens and how it closes; and the hash that links all.

A line is canonical JSON without its line feed. Every line says its number among the lines of its writer and
the hash of the line before, so that none can be changed, left out, put in or moved without a trace. It owns
the members of these lines and the bytes that are signed; in which order lines may come is `segments`'.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from strongroom import canonical
from strongroom.canonical import Bounds, Json
from strongroom.errors import FormatError
from strongroom.manifest import check_run_id
from strongroom_security.fields import encode_fields
from strongroom_security.tlog.edwards import is_of_small_order

__all__ = [
    "FIRST_PREV",
    "FORMAT",
    "LINE_BOUNDS",
    "MAX_LINE_BYTES",
    "NO_RUN",
    "Certificate",
    "Close",
    "Open",
    "Salvage",
    "certified_bytes",
    "check_writer",
    "close_bytes",
    "hash_of",
    "parse_segment_key",
    "segment_key",
]

FORMAT: Final = "strongroom.audit/1"

MAX_LINE_BYTES: Final = 65_535
"""An entry of a tlog-tiles bundle says its length in two bytes (C2SP tlog-tiles, "Log Entries")."""

LINE_BOUNDS: Final = Bounds(length_bytes=MAX_LINE_BYTES, depth=8, items=2_000)

FIRST_PREV: Final = "0" * 64
"""What a writer's first line says of the line before."""

NO_RUN: Final = "_"
"""In a segment's key, for what is about no run; no run id begins so."""

SEGMENTS: Final = "segments"

_WRITER: Final = re.compile(r"[0-9a-f]{32}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_KEY: Final = re.compile(
    rf"{SEGMENTS}/(?P<run>[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})/(?P<hour>[0-9]{{8}}T[0-9]{{2}})/"
    r"(?P<writer>[0-9a-f]{32})-(?P<number>[0-9]{6,9})\.jsonl"
)

_OPEN_MEMBERS: Final = frozenset(
    ["kind", "format", "writer", "segment", "seq", "prev", "run", "time", "host", "pid", "key", "certificate"]
)
_CLOSE_MEMBERS: Final = frozenset(
    ["kind", "seq", "prev", "writer", "segment", "events", "is_last", "time", "salvaged", "signature"]
)


def hash_of(line: bytes) -> str:
    """What the next line says of this one: SHA-256 in lower-case hex.

    Args:
        line: without its line feed.
    """
    return hashlib.sha256(line).hexdigest()


def check_writer(writer: str) -> str:
    """Return a writer's id unchanged if it is one: 32 lower-case hex digits."""
    if not _WRITER.fullmatch(writer):
        raise FormatError(f"a writer's id is 32 lower-case hex digits, found {writer[:60]!r}")
    return writer


def segment_key(run: str | None, hour: str, writer: str, number: int) -> str:
    """Where a segment stands in a sink.

    Args:
        hour: in which it was opened, by its writer's clock and in UTC: ``20261130T09``.
        number: from 1.
    """
    return f"{SEGMENTS}/{run or NO_RUN}/{hour}/{writer}-{number:06d}.jsonl"


def parse_segment_key(key: str) -> tuple[str | None, str, str, int] | None:
    """The run, hour, writer and number of a segment's key; None: it is none."""
    match = _KEY.fullmatch(key)
    if match is None or int(match["number"]) < 1:
        return None
    run = None if match["run"] == NO_RUN else match["run"]
    if segment_key(run, match["hour"], match["writer"], int(match["number"])) != key:
        return None  # more digits than it needs: one segment has one key
    return run, match["hour"], match["writer"], int(match["number"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A long-lived signer's word on a writer's key.

    Attributes:
        key_id: the signer's (`strongroom_security.publickeys.PublicKey.id`).
        signature: over `certified_bytes`, ECDSA in DER.
    """

    key_id: str
    signature: bytes

    def to_json(self) -> Json:
        return {"key_id": self.key_id, "signature": base64.b64encode(self.signature).decode("ascii")}

    @classmethod
    def from_json(cls, value: Json, what: str) -> Certificate | None:
        if value is None:
            return None
        members = _members(value, frozenset({"key_id", "signature"}), what)
        return cls(
            key_id=_hash(members["key_id"], f"the key id of {what}"),
            signature=_base64(members["signature"], f"the signature of {what}", at_most=2_048),
        )


def certified_bytes(*, writer: str, run: str | None, key: bytes, host: str, pid: int) -> bytes:
    """What a long-lived signer signs of a writer: that this key is that writer's."""
    return encode_fields("strongroom.v1 audit writer", writer, run or "", key.hex(), host, str(pid))


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A segment's first line.

    Attributes:
        segment: its number, from 1.
        seq: of this line among the writer's; its first segment's is 0.
        prev: hash of the writer's line before, in the segment before.
        run: whose events it holds; None: they are about no run.
        time: when it was opened, in ms since the epoch by the writer's clock.
        key: the writer's public key, Ed25519, raw.
        certificate: whose word that is; None: nobody's (yet).
    """

    writer: str
    segment: int
    seq: int
    prev: str
    run: str | None
    time: int
    host: str
    pid: int
    key: bytes
    certificate: Certificate | None

    def to_json(self) -> Json:
        return {
            "kind": "open",
            "format": FORMAT,
            "writer": self.writer,
            "segment": self.segment,
            "seq": self.seq,
            "prev": self.prev,
            "run": self.run,
            "time": self.time,
            "host": self.host,
            "pid": self.pid,
            "key": base64.b64encode(self.key).decode("ascii"),
            "certificate": None if self.certificate is None else self.certificate.to_json(),
        }

    @classmethod
    def from_json(cls, value: Json, what: str) -> Open:
        """
        Raises:
            FormatError: it is none.
        """
        members = _members(value, _OPEN_MEMBERS, what)
        if members["kind"] != "open" or members["format"] != FORMAT:
            raise FormatError(
                f"{what} is no opening line of {FORMAT}: it says kind {members['kind']!r:.40} and format "
                f"{members['format']!r:.40}"
            )
        run = members["run"]
        return cls(
            writer=check_writer(_text(members["writer"], f"the writer of {what}")),
            segment=_natural(members["segment"], f"the segment of {what}", at_least=1),
            seq=_natural(members["seq"], f"the seq of {what}"),
            prev=_hash(members["prev"], f"the prev of {what}"),
            run=None if run is None else check_run_id(_text(run, f"the run of {what}")),
            time=_natural(members["time"], f"the time of {what}"),
            host=_text(members["host"], f"the host of {what}"),
            pid=_natural(members["pid"], f"the pid of {what}"),
            key=_public(members["key"], f"the key of {what}"),
            certificate=Certificate.from_json(members["certificate"], f"the certificate of {what}"),
        )

    def certified(self) -> bytes:
        """What its certificate signs."""
        return certified_bytes(writer=self.writer, run=self.run, key=self.key, host=self.host, pid=self.pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvage:
    """Who closed a segment that its own writer could not: that process had died.

    Attributes:
        writer, run, host, pid: of the process that closed it.
        key, certificate: its key, which the close line is signed by.
        torn: what stood behind the last whole line: the beginning of one that was being written.
    """

    writer: str
    run: str | None
    host: str
    pid: int
    key: bytes
    certificate: Certificate | None
    torn: bytes

    def to_json(self) -> Json:
        return {
            "writer": self.writer,
            "run": self.run,
            "host": self.host,
            "pid": self.pid,
            "key": base64.b64encode(self.key).decode("ascii"),
            "certificate": None if self.certificate is None else self.certificate.to_json(),
            "torn": base64.b64encode(self.torn).decode("ascii"),
        }

    @classmethod
    def from_json(cls, value: Json, what: str) -> Salvage | None:
        if value is None:
            return None
        members = _members(
            value, frozenset({"writer", "run", "host", "pid", "key", "certificate", "torn"}), what
        )
        run = members["run"]
        return cls(
            writer=check_writer(_text(members["writer"], f"the writer of {what}")),
            run=None if run is None else check_run_id(_text(run, f"the run of {what}")),
            host=_text(members["host"], f"the host of {what}"),
            pid=_natural(members["pid"], f"the pid of {what}"),
            key=_public(members["key"], f"the key of {what}"),
            certificate=Certificate.from_json(members["certificate"], f"the certificate of {what}"),
            torn=_base64(members["torn"], f"the torn line of {what}", at_most=MAX_LINE_BYTES),
        )

    def certified(self) -> bytes:
        """What its certificate signs."""
        return certified_bytes(writer=self.writer, run=self.run, key=self.key, host=self.host, pid=self.pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """A segment's last line.

    Attributes:
        events: how many event lines stand between it and the opening line.
        is_last: whether the writer has ended: no segment of it follows.
        time: in ms since the epoch.
        salvaged: who closed it where the writer did not; None: the writer.
        signature: Ed25519 over `close_bytes`, by the writer's key or the salvager's; raw.
    """

    writer: str
    segment: int
    seq: int
    prev: str
    events: int
    is_last: bool
    time: int
    salvaged: Salvage | None = None
    signature: bytes = b""

    def to_json(self) -> Json:
        return {
            **self._unsigned(),
            "signature": base64.b64encode(self.signature).decode("ascii"),
        }

    def _unsigned(self) -> dict[str, Any]:
        return {
            "kind": "close",
            "writer": self.writer,
            "segment": self.segment,
            "seq": self.seq,
            "prev": self.prev,
            "events": self.events,
            "is_last": self.is_last,
            "time": self.time,
            "salvaged": None if self.salvaged is None else self.salvaged.to_json(),
        }

    @classmethod
    def from_json(cls, value: Json, what: str) -> Close:
        """
        Raises:
            FormatError: it is none.
        """
        members = _members(value, _CLOSE_MEMBERS, what)
        if members["kind"] != "close":
            raise FormatError(f"{what} is no closing line: it says kind {members['kind']!r:.40}")
        if not isinstance(members["is_last"], bool):
            raise FormatError(f"is_last of {what} must be true or false")
        return cls(
            writer=check_writer(_text(members["writer"], f"the writer of {what}")),
            segment=_natural(members["segment"], f"the segment of {what}", at_least=1),
            seq=_natural(members["seq"], f"the seq of {what}"),
            prev=_hash(members["prev"], f"the prev of {what}"),
            events=_natural(members["events"], f"the events of {what}"),
            is_last=members["is_last"],
            time=_natural(members["time"], f"the time of {what}"),
            salvaged=Salvage.from_json(members["salvaged"], f"who salvaged {what}"),
            signature=_base64(members["signature"], f"the signature of {what}", exactly=64),
        )

    def is_signed_by(self, key: bytes) -> bool:
        """Whether a public key (Ed25519, raw) verifies its signature."""
        try:
            Ed25519PublicKey.from_public_bytes(key).verify(self.signature, close_bytes(self))
        except (InvalidSignature, ValueError):
            return False
        return True


def close_bytes(close: Close) -> bytes:
    """What a closing line's signature is over: all of it but the signature.

    By ``prev`` that is every line of the writer before it.
    """
    return encode_fields("strongroom.v1 audit close") + canonical.encode(close._unsigned())


def _members(value: Json, names: frozenset[str], what: str) -> dict[str, Json]:
    if not isinstance(value, dict) or value.keys() != names:
        found = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise FormatError(f"{what} must have exactly the members {sorted(names)}, found {found!r:.200}")
    return value


def _text(value: Json, what: str) -> str:
    if not isinstance(value, str):
        raise FormatError(f"{what} must be text, found {value!r:.60}")
    return value


def _natural(value: Json, what: str, *, at_least: int = 0) -> int:
    if type(value) is not int or value < at_least:
        raise FormatError(f"{what} must be a whole number of at least {at_least}, found {value!r:.60}")
    return value


def _hash(value: Json, what: str) -> str:
    text = _text(value, what)
    if not _HASH.fullmatch(text):
        raise FormatError(f"{what} must be 64 lower-case hex digits, found {text[:80]!r}")
    return text


def _public(value: Json, what: str) -> bytes:
    key = _base64(value, what, exactly=32)
    if is_of_small_order(key):
        raise FormatError(f"{what} is a point of small order, by which anybody can sign anything")
    return key


def _base64(value: Json, what: str, *, exactly: int | None = None, at_most: int | None = None) -> bytes:
    text = _text(value, what)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise FormatError(f"{what} is not base64") from None
    if base64.b64encode(data).decode("ascii") != text:
        raise FormatError(f"{what} is not base64 as this format spells it")
    if (exactly is not None and len(data) != exactly) or (at_most is not None and len(data) > at_most):
        raise FormatError(f"{what} has {len(data)} bytes; expected {exactly or f'at most {at_most}'}")
    return data
