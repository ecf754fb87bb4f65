"""Names in a store: the one place where keys are built and taken apart. Pure strings.

``format`` and ``parse`` functions are inverses: a name that does not come out of its own
parts again is not one of ours. `docs/format.md`, clause 2.
"""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import Final

from strongroom.errors import ConfigError, FormatError

__all__ = [
    "ATTEMPT_HEX_DIGITS",
    "COMMIT",
    "DATA",
    "INDEX",
    "KEYRINGS",
    "LAUNCHES",
    "MANIFEST",
    "MAX_KEYRING",
    "MAX_LAUNCH",
    "MAX_PART",
    "MAX_RANK",
    "MAX_SCATTER",
    "MAX_STEP",
    "PROVENANCE",
    "RUN",
    "SEALED",
    "SIDECAR_FILES",
    "SIDECAR_FOLDERS",
    "SIGNATURE",
    "SIGNATURES",
    "STATE",
    "CheckpointName",
    "check_relative_path",
    "check_scatter",
    "collisions",
    "data_key",
    "further_signature_key",
    "is_shard_folder",
    "keyring_key",
    "launch_key",
    "parse_keyring_name",
    "parse_launch_name",
    "parse_shard_path",
    "parse_signature_name",
    "rank_state_path",
    "shard_path",
    "signature_key",
]

RUN: Final = "run.json"
LAUNCHES: Final = "launches"
COMMIT: Final = "COMMIT"
DATA: Final = "data"
MANIFEST: Final = "MANIFEST.json"
INDEX: Final = "index.safetensors"
STATE: Final = "state.json"
PROVENANCE: Final = "provenance.json"

SEALED: Final = ".floe"
"""What a sealed file's name ends with, behind the name that it would have unsealed."""

KEYRINGS: Final = "keyring"

SIGNATURE: Final = "signature.json"
"""The writer's signature over ``data/``, which ``COMMIT`` pins."""
SIGNATURES: Final = "signatures"
"""Those of others, each named by its key, and added at any time."""

SIDECAR_FILES: Final = (SIGNATURE,)
"""What may stand beside ``data/`` and ``COMMIT`` in a checkpoint's folder."""
SIDECAR_FOLDERS: Final = (SIGNATURES, KEYRINGS)

MAX_STEP: Final = 10**12 - 1
"""Twelve digits, so that names sort as numbers do."""
MAX_LAUNCH: Final = 10**6 - 1
MAX_RANK: Final = 10**5 - 1
MAX_KEYRING: Final = 10**4 - 1
MAX_PART: Final = 10**4 - 1
MAX_SCATTER: Final = 256
"""As many folders as two hexadecimal digits name."""
ATTEMPT_HEX_DIGITS: Final = 16
"""64 random bits: attempts at one step of one launch are few."""

_MAX_PATH_CHARS: Final = 512
_CHECKPOINT = re.compile(r"step-([0-9]{12})-([0-9]{4,6})-([0-9a-f]{16})")
_LAUNCH = re.compile(r"([0-9]{6})\.json")
_KEYRING = re.compile(r"([0-9]{4})\.json")
_SIGNATURE = re.compile(r"([0-9a-f]{64})\.json")
_SHARD = re.compile(r"(?:[0-9a-f]{2}/)?(([0-9]{5})-([0-9]{2,4})\.safetensors)")
_SHARD_FOLDER = re.compile(r"[0-9a-f]{2}/?")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """One try at one save: launch, step and a random attempt, in the order that lineage compares."""

    launch: int
    step: int
    attempt: str

    def __post_init__(self) -> None:
        if not 0 <= self.step <= MAX_STEP:
            raise ConfigError(f"a step lies between 0 and {MAX_STEP}, got {self.step}")
        if not 1 <= self.launch <= MAX_LAUNCH:
            raise ConfigError(f"a launch lies between 1 and {MAX_LAUNCH}, got {self.launch}")
        if not re.fullmatch(r"[0-9a-f]{16}", self.attempt):
            raise ConfigError(f"an attempt is 16 lower-case hex digits, got {self.attempt[:40]!r}")

    @property
    def folder(self) -> str:
        """``step-000000001200-0003-<attempt>``, directly under the root."""
        return f"step-{self.step:012d}-{self.launch:04d}-{self.attempt}"

    @classmethod
    def parse(cls, name: str) -> CheckpointName | None:
        """The parts of a folder's name (a trailing ``/`` is fine), or None where it is not ours."""
        folder = name.removesuffix("/")
        match = _CHECKPOINT.fullmatch(folder)
        if match is None or int(match[2]) < 1:
            return None
        parsed = cls(launch=int(match[2]), step=int(match[1]), attempt=match[3])
        return parsed if parsed.folder == folder else None

    @property
    def commit_key(self) -> str:
        return f"{self.folder}/{COMMIT}"

    def __str__(self) -> str:
        return f"step {self.step} (launch {self.launch}, attempt {self.attempt})"


def data_key(name: CheckpointName, path: str) -> str:
    """The key of a file whose path under ``data/`` is given."""
    return f"{name.folder}/{DATA}/{path}"


def keyring_key(name: CheckpointName, generation: int) -> str:
    """The key of one generation of a checkpoint's keyring."""
    if not 1 <= generation <= MAX_KEYRING:
        raise ConfigError(f"a keyring's generation lies between 1 and {MAX_KEYRING}, got {generation}")
    return f"{name.folder}/{KEYRINGS}/{generation:04d}.json"


def signature_key(name: CheckpointName) -> str:
    """The key of the writer's signature."""
    return f"{name.folder}/{SIGNATURE}"


def further_signature_key(name: CheckpointName, key_id: str) -> str:
    """The key of someone else's signature.

    Args:
        key_id: 64 lower-case hex digits.
    """
    if not _SIGNATURE.fullmatch(f"{key_id}.json"):
        raise ConfigError(f"a key's id is 64 lower-case hex digits, got {key_id[:80]!r}")
    return f"{name.folder}/{SIGNATURES}/{key_id}.json"


def parse_signature_name(name: str) -> str | None:
    """The id of the key that a file in ``signatures/`` is named by, or None where it is not one."""
    match = _SIGNATURE.fullmatch(name)
    return match[1] if match else None


def parse_keyring_name(name: str) -> int | None:
    """The generation of a keyring's file name, or None where it is not one."""
    match = _KEYRING.fullmatch(name)
    return int(match[1]) if match and int(match[1]) >= 1 else None


def launch_key(number: int) -> str:
    if not 1 <= number <= MAX_LAUNCH:
        raise ConfigError(f"a launch lies between 1 and {MAX_LAUNCH}, got {number}")
    return f"{LAUNCHES}/{number:06d}.json"


def parse_launch_name(name: str) -> int | None:
    """The number of a launch record's file name, or None where it is not one."""
    match = _LAUNCH.fullmatch(name)
    return int(match[1]) if match and int(match[1]) >= 1 else None


def shard_path(rank: int, part: int, *, scatter: int = 0) -> str:
    """A shard's path under ``data/``: ``00000-00.safetensors``.

    Args:
        scatter: the number of folders over which shards are spread, as ``a0/00000-00.safetensors``; 0: none.
    """
    _check_rank(rank)
    if not 0 <= part <= MAX_PART:
        raise ConfigError(f"a shard's part lies between 0 and {MAX_PART}, got {part}")
    name = f"{rank:05d}-{part:02d}.safetensors"
    if not check_scatter(scatter):
        return name
    folder = (rank + part * _stride(scatter)) % scatter
    # Over all that two digits can name: a store divides a bucket by the first characters that differ.
    return f"{folder * MAX_SCATTER // scatter:02x}/{name}"


def parse_shard_path(path: str) -> tuple[int, int] | None:
    """``(rank, part)`` of a shard's path, in a folder of shards or in none; None where it is not one.

    Which folder a shard is in follows from nothing else: its writer chose.
    """
    match = _SHARD.fullmatch(path)
    if match is None:
        return None
    rank, part = int(match[2]), int(match[3])
    return (rank, part) if shard_path(rank, part) == match[1] else None


def is_shard_folder(name: str) -> bool:
    """Whether a folder under ``data/`` may hold shards; a trailing ``/`` is fine."""
    return _SHARD_FOLDER.fullmatch(name) is not None


def check_scatter(scatter: int) -> int:
    """Return a number of folders for shards unchanged if it is one; 0 stands for none."""
    if type(scatter) is not int or scatter == 1 or not 0 <= scatter <= MAX_SCATTER:
        raise ConfigError(f"scatter is 0, or a number of folders from 2 to {MAX_SCATTER}, got {scatter!r}")
    return scatter


@cache
def _stride(scatter: int) -> int:
    """How many folders further a rank's next part lies.

    Ranks take one folder after another, and parts go round in strides that meet every folder: of few
    ranks and many parts, or of many ranks and few, no folder gets much more than its share.
    """
    strides = itertools.count(max(1, scatter * 3 // 8))
    return next(stride for stride in strides if math.gcd(stride, scatter) == 1)


def rank_state_path(rank: int) -> str:
    """Where one rank's own non-tensor state lies under ``data/``."""
    _check_rank(rank)
    return f"state-{rank:05d}.json"


def _check_rank(rank: int) -> None:
    if not 0 <= rank <= MAX_RANK:
        raise ConfigError(f"a rank lies between 0 and {MAX_RANK}, got {rank}")


def check_relative_path(path: str) -> str:
    """Return a file's path under ``data/`` unchanged if it is safe to join to a root.

    Raises:
        FormatError: it is absolute, climbs out, has an empty or hidden part, a backslash, a
            control character or anything outside ``[A-Za-z0-9._-]``, or is too long.
    """
    if len(path) > _MAX_PATH_CHARS:
        raise FormatError(f"a path of {len(path)} characters; at most {_MAX_PATH_CHARS}: {path[:60]!r}...")
    for part in path.split("/"):
        if not _PART.fullmatch(part):
            raise FormatError(
                f"{path!r} is not a safe path: each part starts with a letter, digit or underscore "
                f"and holds only letters, digits, '.', '_' and '-'"
            )
    return path


def collisions(paths: list[str]) -> list[tuple[str, str]]:
    """Pairs of different paths that some file system would take for one (case, Unicode form).

    A folder counts as a path: ``A/x`` and ``a/y`` collide in ``A`` and ``a``.
    """
    seen: dict[str, str] = {}
    pairs: dict[tuple[str, str], None] = {}
    for path in paths:
        parts = path.split("/")
        for count in range(1, len(parts) + 1):
            prefix = "/".join(parts[:count])
            # Case folding can undo a normal form, so it stands between two of them.
            folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", prefix).casefold())
            other = seen.setdefault(folded, prefix)
            if other != prefix:
                pairs[other, prefix] = None
    return list(pairs)
