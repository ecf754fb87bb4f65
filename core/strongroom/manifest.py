"""The control documents as values: run record, launch record, manifest, commit.

Each is canonical JSON with a bounded, versioned parser that refuses unknown members
(`docs/format.md`, clause 4). No I/O here, and no judgement about which checkpoint is
the newest: that is `strongroom.lineage`.

A member whose name starts with ``x-`` is a note: it is ignored by every reader. Any other
unknown member is critical, and refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeVar

from strongroom import canonical, layout
from strongroom.canonical import Bounds, Json
from strongroom.digest import BLOCK_BYTES, Digest, DigestAlgorithm
from strongroom.errors import FormatError, UnsupportedFormatError
from strongroom.layout import CheckpointName

__all__ = [
    "COMMIT_BOUNDS",
    "FORMAT",
    "LAUNCH_BOUNDS",
    "MANIFEST_BOUNDS",
    "MAX_BEST",
    "MAX_DEADLINE_S",
    "MAX_KEYRING_BYTES",
    "RUN_BOUNDS",
    "SEALED_HEADER_BYTES",
    "SEGMENT_BYTES",
    "SEGMENT_OVERHEAD_BYTES",
    "CheckpointRef",
    "Commit",
    "FileRecord",
    "Launch",
    "LaunchSignature",
    "Manifest",
    "Run",
    "check_retention_class",
    "check_run_id",
]

FORMAT: Final = "0.1"
"""Readers of this release read this format and no other: 0.x promises nothing across versions."""

RUN_BOUNDS: Final = Bounds(length_bytes=4096, depth=2, items=64)
LAUNCH_BOUNDS: Final = Bounds(length_bytes=65536, depth=4, items=256)
"""Room for a chain of certificates."""
COMMIT_BOUNDS: Final = Bounds(length_bytes=16384, depth=3, items=128)
MANIFEST_BOUNDS: Final = Bounds(length_bytes=256 << 20, depth=4, items=8_000_000)
"""Room for a million files: 16,384 ranks with 61 files each."""

MAX_FILE_BYTES: Final = 2**48
"""A single file's length: 256 TiB, above any store's limit for one object."""

MAX_DEADLINE_S: Final = 2**31
"""68 years: a deadline, not a way to have none."""

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RETENTION_CLASS = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_KEY_ID = re.compile(r"[0-9a-f]{64}")
_HEX = re.compile(r"(?:[0-9a-f]{2})+")
_FORMAT = re.compile(r"[0-9]{1,4}\.[0-9]{1,4}")

MAX_BEST: Final = 1024
"""How many steps a manifest names as the best."""

MAX_KEYRING_BYTES: Final = 256 << 20
"""A keyring's length: room for the keys of as many files as a manifest may list."""

SEALED_HEADER_BYTES: Final = 74
"""Of a FLOE file with a 32-byte IV: 10 of parameters, the IV, 32 of header tag (C2SP FLOE)."""

SEGMENT_BYTES: Final = 1 << 20
"""A sealed file's segments, as stored; the last may be shorter."""

SEGMENT_OVERHEAD_BYTES: Final = 32
"""Of each: 4 of length or mark, 12 of nonce, 16 of tag."""
_T = TypeVar("_T")


def check_run_id(run: str) -> str:
    """Return a run id unchanged if it is one: 1 to 128 letters, digits, '.', '_' or '-'."""
    if not _RUN_ID.fullmatch(run):
        raise FormatError(
            f"{run[:60]!r} is not a run id: 1 to 128 letters, digits, '.', '_' or '-', "
            f"the first one a letter or digit"
        )
    return run


def check_retention_class(name: str) -> str:
    """Return a retention class's name unchanged if it is one: 1 to 63 of a-z, 0-9, '.', '_' and '-'."""
    if not _RETENTION_CLASS.fullmatch(name):
        raise FormatError(
            f"{name[:80]!r} names no retention class: 1 to 63 of a-z, 0-9, '.', '_' or '-', the first one a "
            f"letter or digit"
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef:
    """Names one committed checkpoint and pins its content by its manifest's digest."""

    launch: int
    step: int
    attempt: str
    manifest: Digest

    @property
    def name(self) -> CheckpointName:
        return CheckpointName(launch=self.launch, step=self.step, attempt=self.attempt)

    def to_json(self) -> Json:
        return {
            "attempt": self.attempt,
            "launch": self.launch,
            "manifest": str(self.manifest),
            "step": self.step,
        }

    @classmethod
    def from_json(cls, value: Json, what: str) -> CheckpointRef:
        fields = _Fields(value, what)
        ref = cls(
            launch=fields.integer("launch", 1, layout.MAX_LAUNCH),
            step=fields.integer("step", 0, layout.MAX_STEP),
            attempt=fields.attempt(),
            manifest=fields.digest("manifest", "sha256"),
        )
        fields.close()
        return ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """``run.json``: what makes a root one run's root."""

    run: str
    created_at_ms: int

    def encode(self) -> bytes:
        return canonical.with_self_digest(
            {"created_at_ms": self.created_at_ms, "format": FORMAT, "kind": "run", "run": self.run}
        )

    @classmethod
    def decode(cls, data: bytes, what: str) -> Run:
        """Raises FormatError (damaged or malformed) or UnsupportedFormatError."""
        fields = _open(data, what, "run", RUN_BOUNDS)
        run = cls(run=fields.run(), created_at_ms=fields.time("created_at_ms"))
        fields.close()
        return run


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSignature:
    """Whose word a launch is.

    Attributes:
        key_id: 64 hex digits, as in ``publicKey.hint`` of an OMS bundle.
        value: an ECDSA signature, DER (RFC 3279, 2.2.3).
        certificates: DER, the key's own first; empty: the key is known by its id.
    """

    key_id: str
    value: bytes
    certificates: tuple[bytes, ...] = ()

    def to_json(self) -> Json:
        return {
            "certificates": [certificate.hex() for certificate in self.certificates],
            "key": self.key_id,
            "value": self.value.hex(),
        }

    @classmethod
    def from_json(cls, value: Json, what: str) -> LaunchSignature:
        fields = _Fields(value, f"{what}: its signature")
        signature = cls(
            key_id=fields.matching("key", _KEY_ID, "64 lower-case hex digits"),
            value=bytes.fromhex(fields.matching("value", _HEX, "lower-case hex digits")),
            certificates=tuple(map(fields.bytes_of, fields.array("certificates"))),
        )
        fields.close()
        return signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """``launches/000003.json``: one writer's turn, and where it took the run up.

    Attributes:
        parent: the checkpoint that the writer had restored; None: it began anew.
        deadline_s: seconds after which an attempt of this launch never commits.
        signature: whose word it is; None: nobody's.
    """

    run: str
    launch: int
    parent: CheckpointRef | None
    created_at_ms: int
    deadline_s: int
    signature: LaunchSignature | None = None

    @property
    def _members(self) -> dict[str, Json]:
        return {
            "created_at_ms": self.created_at_ms,
            "deadline_s": self.deadline_s,
            "format": FORMAT,
            "kind": "launch",
            "launch": self.launch,
            "parent": self.parent.to_json() if self.parent else None,
            "run": self.run,
        }

    @property
    def to_be_signed(self) -> bytes:
        """The record in canonical form, without its signature and its digest of itself."""
        return canonical.encode(self._members)

    def encode(self) -> bytes:
        signature = self.signature.to_json() if self.signature else None
        return canonical.with_self_digest({**self._members, "signature": signature})

    @classmethod
    def decode(cls, data: bytes, what: str) -> Launch:
        """Raises FormatError (damaged or malformed) or UnsupportedFormatError."""
        fields = _open(data, what, "launch", LAUNCH_BOUNDS)
        launch = cls(
            run=fields.run(),
            launch=fields.integer("launch", 1, layout.MAX_LAUNCH),
            parent=fields.optional("parent", lambda value: CheckpointRef.from_json(value, what)),
            created_at_ms=fields.time("created_at_ms"),
            deadline_s=fields.integer("deadline_s", 1, MAX_DEADLINE_S),
            signature=fields.optional("signature", lambda value: LaunchSignature.from_json(value, what)),
        )
        fields.close()
        if launch.parent is not None and launch.parent.launch >= launch.launch:
            raise FormatError(
                f"{what} names a parent of launch {launch.parent.launch}, which is not older than itself"
            )
        return launch


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file under ``data/``, as stored: path, length and digest.

    Attributes:
        header: what a sealed file begins with, `SEALED_HEADER_BYTES` long; None: it is not sealed.
    """

    path: str
    size_bytes: int
    digest: Digest
    header: bytes | None = None

    def __post_init__(self) -> None:
        layout.check_relative_path(self.path)

    @property
    def plain_path(self) -> str:
        """The name of what the file holds, by which the index and all else in a checkpoint call it."""
        return self.path if self.header is None else self.path.removesuffix(layout.SEALED)

    @property
    def plain_bytes(self) -> int:
        """The length of what the file holds: of the file, or of what was sealed in it."""
        return self.size_bytes if self.header is None else _sealed_in(self.size_bytes)

    @property
    def unit_bytes(self) -> int:
        """What can be read of the file by itself: a block, or what a segment holds."""
        return BLOCK_BYTES if self.header is None else SEGMENT_BYTES - SEGMENT_OVERHEAD_BYTES

    @property
    def unit_overhead_bytes(self) -> int:
        """By how much a unit is longer as stored."""
        return 0 if self.header is None else SEGMENT_OVERHEAD_BYTES

    def to_json(self) -> Json:
        members: dict[str, Json] = {"digest": str(self.digest), "path": self.path, "size": self.size_bytes}
        if self.header is not None:
            members["header"] = self.header.hex()
        return members

    @classmethod
    def from_json(cls, value: Json, what: str) -> FileRecord:
        fields = _Fields(value, what)
        record = cls(
            path=fields.text("path"),
            size_bytes=fields.integer("size", 0, MAX_FILE_BYTES),
            digest=fields.digest("digest"),
            header=fields.sealed_header("header"),
        )
        fields.close()
        if (record.header is not None) != record.path.endswith(layout.SEALED):
            raise FormatError(f"{what}: {record.path} must have a header if, and only if, it is sealed")
        if record.header is not None and _sealed_in(record.size_bytes) < 0:
            raise FormatError(
                f"{what}: no sealed file is {record.size_bytes} bytes long, as {record.path} is"
            )
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """``data/MANIFEST.json``: what a checkpoint consists of, in clear.

    Attributes:
        parent: the checkpoint before this one on its line; None: the first.
        algorithm: the digest of every file listed.
        world_size: ranks that wrote it.
        files: every other file under ``data/``, sorted by path.
        retention_class: what rules of retention go by; None: it has none.
        best: the steps that the run held to be its best when this was saved, the best first.
    """

    run: str
    name: CheckpointName
    parent: CheckpointRef | None
    created_at_ms: int
    algorithm: DigestAlgorithm
    world_size: int
    files: tuple[FileRecord, ...]
    retention_class: str | None = None
    best: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all listed files together."""
        return sum(record.size_bytes for record in self.files)

    @property
    def is_sealed(self) -> bool:
        """Whether its files are sealed: all are, or none is."""
        return any(record.header is not None for record in self.files)

    def stored(self, path: str) -> str:
        """The path at which a file of this checkpoint is stored: sealed ones have a suffix."""
        return path + layout.SEALED if self.is_sealed else path

    def file(self, path: str) -> FileRecord | None:
        return next((record for record in self.files if record.path == path), None)

    def encode(self) -> bytes:
        members: dict[str, Json] = {
            "attempt": self.name.attempt,
            "created_at_ms": self.created_at_ms,
            "digest": self.algorithm,
            "files": [record.to_json() for record in self.files],
            "format": FORMAT,
            "kind": "manifest",
            "launch": self.name.launch,
            "parent": self.parent.to_json() if self.parent else None,
            "retention_class": self.retention_class,
            "run": self.run,
            "step": self.name.step,
            "world_size": self.world_size,
        }
        if self.best:
            members["best"] = list(self.best)
        return canonical.encode(members)

    @classmethod
    def decode(cls, data: bytes, what: str) -> Manifest:
        """Raises FormatError (malformed) or UnsupportedFormatError."""
        fields = _open(data, what, "manifest", MANIFEST_BOUNDS, self_digest=False)
        algorithm: DigestAlgorithm = (
            "blake3" if fields.one_of("digest", ("blake3", "sha256")) == "blake3" else "sha256"
        )
        manifest = cls(
            run=fields.run(),
            name=fields.checkpoint_name(),
            parent=fields.optional("parent", lambda value: CheckpointRef.from_json(value, what)),
            created_at_ms=fields.time("created_at_ms"),
            algorithm=algorithm,
            world_size=fields.integer("world_size", 1, 10**5),
            files=tuple(FileRecord.from_json(value, what) for value in fields.array("files")),
            retention_class=fields.optional("retention_class", lambda value: _retention_class(value, what)),
            best=fields.best("best"),
        )
        fields.close()
        _check_files(manifest, what)
        return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """``COMMIT``: created once and last; its presence makes the folder a checkpoint.

    Attributes:
        manifest: SHA-256 of ``data/MANIFEST.json``'s bytes.
        size_bytes: bytes of all files under ``data/`` but the manifest, so that a listing
            need not read manifests.
        keyring: SHA-256 of the first keyring's bytes; None: the checkpoint is not sealed.
        signature: SHA-256 of the bytes of ``signature.json``; None: its writer did not sign it.
    """

    run: str
    name: CheckpointName
    manifest: Digest
    size_bytes: int
    committed_at_ms: int
    keyring: Digest | None = None
    signature: Digest | None = None

    @property
    def ref(self) -> CheckpointRef:
        return CheckpointRef(
            launch=self.name.launch,
            step=self.name.step,
            attempt=self.name.attempt,
            manifest=self.manifest,
        )

    def encode(self) -> bytes:
        return canonical.with_self_digest(
            {
                "attempt": self.name.attempt,
                "committed_at_ms": self.committed_at_ms,
                "format": FORMAT,
                "keyring": str(self.keyring) if self.keyring else None,
                "kind": "commit",
                "launch": self.name.launch,
                "manifest": str(self.manifest),
                "run": self.run,
                "signature": str(self.signature) if self.signature else None,
                "size": self.size_bytes,
                "step": self.name.step,
            }
        )

    @classmethod
    def decode(cls, data: bytes, what: str) -> Commit:
        """Raises FormatError (damaged or malformed) or UnsupportedFormatError."""
        fields = _open(data, what, "commit", COMMIT_BOUNDS)
        commit = cls(
            run=fields.run(),
            name=fields.checkpoint_name(),
            manifest=fields.digest("manifest", "sha256"),
            size_bytes=fields.integer("size", 0, MAX_FILE_BYTES),
            committed_at_ms=fields.time("committed_at_ms"),
            keyring=fields.optional_digest("keyring", "sha256"),
            signature=fields.optional_digest("signature", "sha256"),
        )
        fields.close()
        return commit


def _retention_class(value: Json, what: str) -> str:
    if not isinstance(value, str):
        raise FormatError(f"{what}: 'retention_class' must be a string or null, found {value!r:.60}")
    return check_retention_class(value)


def _sealed_in(stored_bytes: int) -> int:
    """How many bytes a sealed file of a length holds; negative where no sealed file has that length."""
    body = stored_bytes - SEALED_HEADER_BYTES
    whole, last = divmod(body, SEGMENT_BYTES)
    if body <= 0 or 0 < last < SEGMENT_OVERHEAD_BYTES:
        return -1
    return body - SEGMENT_OVERHEAD_BYTES * (whole + (last > 0))


def _check_files(manifest: Manifest, what: str) -> None:
    paths = [record.path for record in manifest.files]
    if any(first >= second for first, second in pairwise(paths)):
        raise FormatError(f"{what} does not list its files once each, sorted by path")
    if layout.MANIFEST in paths:
        raise FormatError(f"{what} lists itself")
    sealed = sum(record.header is not None for record in manifest.files)
    if sealed not in (0, len(paths)):
        raise FormatError(f"{what}: {sealed} of {len(paths)} files are sealed; all must be, or none")
    for record in manifest.files:
        if record.digest.algorithm != manifest.algorithm:
            raise FormatError(
                f"{what}: {record.path} has a {record.digest.algorithm} digest where the manifest "
                f"says {manifest.algorithm}"
            )
    shards: dict[tuple[int, int], str] = {}
    for record in manifest.files:
        shard = layout.parse_shard_path(record.plain_path)
        if shard is not None and shards.setdefault(shard, record.path) != record.path:
            raise FormatError(f"{what} lists one shard twice, as {shards[shard]} and as {record.path}")
    pairs = layout.collisions(paths)
    if pairs:
        raise FormatError(f"{what}: {pairs[0][0]!r} and {pairs[0][1]!r} differ only by case or Unicode form")


def _open(data: bytes, what: str, kind: str, bounds: Bounds, *, self_digest: bool = True) -> _Fields:
    """Decode, check the self-digest before anything else is believed, then format and kind."""
    value = canonical.decode(data, what, bounds)
    members = canonical.check_self_digest(value, what) if self_digest else value
    fields = _Fields(members, what)
    version = fields.text("format")
    if not _FORMAT.fullmatch(version):
        raise FormatError(f"{what}: {version[:40]!r} is not a format version")
    if version != FORMAT:
        raise UnsupportedFormatError(
            f"{what} is in format {version}; this release reads {FORMAT}. Use the release of Strongroom "
            f"that wrote it, or export it with that release and import the copy"
        )
    found = fields.text("kind")
    if found != kind:
        raise FormatError(f"{what} is a {found[:40]!r} document where a {kind!r} was expected")
    return fields


class _Fields:
    """The members of one object, taken out one by one; whatever is left over is refused."""

    def __init__(self, value: Json, what: str) -> None:
        if not isinstance(value, dict):
            raise FormatError(f"{what}: expected a JSON object, found {type(value).__name__}")
        self._left = dict(value)
        self._what = what

    def take(self, member: str) -> Json:
        try:
            return self._left.pop(member)
        except KeyError:
            raise FormatError(f"{self._what} lacks the member {member!r}") from None

    def text(self, member: str) -> str:
        value = self.take(member)
        if not isinstance(value, str):
            raise self._wrong(member, "a string", value)
        return value

    def integer(self, member: str, low: int, high: int) -> int:
        value = self.take(member)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(member, f"an integer from {low} to {high}", value)
        return value

    def time(self, member: str) -> int:
        """Milliseconds since the epoch, UTC."""
        return self.integer(member, 0, canonical.MAX_INTEGER)

    def array(self, member: str) -> list[Json]:
        value = self.take(member)
        if not isinstance(value, list):
            raise self._wrong(member, "an array", value)
        return value

    def optional(self, member: str, parse: Callable[[Json], _T]) -> _T | None:
        value = self.take(member)
        return None if value is None else parse(value)

    def one_of(self, member: str, allowed: tuple[str, ...]) -> str:
        value = self.text(member)
        if value not in allowed:
            raise self._wrong(member, f"one of {', '.join(allowed)}", value)
        return value

    def digest(self, member: str, algorithm: DigestAlgorithm | None = None) -> Digest:
        try:
            digest = Digest.parse(self.text(member))
        except FormatError as error:
            raise FormatError(f"{self._what}: {member!r}: {error}") from None
        if algorithm is not None and digest.algorithm != algorithm:
            raise self._wrong(member, f"a {algorithm} digest", str(digest))
        return digest

    def optional_digest(self, member: str, algorithm: DigestAlgorithm) -> Digest | None:
        if self._left.get(member, "") is None:
            del self._left[member]
            return None
        return self.digest(member, algorithm)

    def matching(self, member: str, pattern: re.Pattern[str], expected: str) -> str:
        text = self.text(member)
        if not pattern.fullmatch(text):
            raise self._wrong(member, expected, text)
        return text

    def bytes_of(self, value: Json) -> bytes:
        """An array's element that is bytes as hex digits."""
        if not isinstance(value, str) or not _HEX.fullmatch(value):
            raise FormatError(f"{self._what}: expected lower-case hex digits, found {value!r:.60}")
        return bytes.fromhex(value)

    def sealed_header(self, member: str) -> bytes | None:
        """A sealed file's header as hex digits; None where the member is not there."""
        if member not in self._left:
            return None
        text = self.text(member)
        if not re.fullmatch(rf"[0-9a-f]{{{2 * SEALED_HEADER_BYTES}}}", text):
            raise self._wrong(member, f"{2 * SEALED_HEADER_BYTES} lower-case hex digits", text)
        return bytes.fromhex(text)

    def best(self, member: str) -> tuple[int, ...]:
        """Steps, none of them twice; none where the member is not there."""
        if member not in self._left:
            return ()
        steps = self.array(member)
        found = [step for step in steps if type(step) is int and 0 <= step <= layout.MAX_STEP]
        if not 0 < len(steps) == len(set(found)) <= MAX_BEST:
            raise self._wrong(member, f"1 to {MAX_BEST} steps, none of them twice", steps)
        return tuple(found)

    def run(self) -> str:
        return check_run_id(self.text("run"))

    def attempt(self) -> str:
        value = self.text("attempt")
        if not re.fullmatch(r"[0-9a-f]{16}", value):
            raise self._wrong("attempt", "16 lower-case hex digits", value)
        return value

    def checkpoint_name(self) -> CheckpointName:
        return CheckpointName(
            launch=self.integer("launch", 1, layout.MAX_LAUNCH),
            step=self.integer("step", 0, layout.MAX_STEP),
            attempt=self.attempt(),
        )

    def close(self) -> None:
        unknown = sorted(name for name in self._left if not name.startswith("x-"))
        if unknown:
            raise FormatError(
                f"{self._what} has the unknown member {unknown[0][:60]!r}; only members that start "
                f"with 'x-' may be ignored"
            )

    def _wrong(self, member: str, expected: str, value: Json) -> FormatError:
        return FormatError(f"{self._what}: {member!r} should be {expected}, found {value!r:.60}")
