"""What a verification finds, as values; and how it is gathered, damage apart from what is not known.

It owns the distinction that a verdict rests on: which errors are damage, and which say nothing
about the bytes. What is looked at, and in which order, is `strongroom.verify`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Literal

from strongroom.chain import Link
from strongroom.errors import (
    IntegrityError,
    KeyServiceError,
    NoKeyError,
    ObjectNotFoundError,
    StoreError,
    UnsupportedFormatError,
    UntrustedError,
)
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit

__all__ = ["CheckpointReport", "Findings", "Kind", "Problem", "Report", "Verdict"]

Kind = Literal[
    "damaged", "locked", "missing", "rolled back", "unexpected", "unreadable", "unsupported", "untrusted"
]
Verdict = Literal["whole", "damaged", "unverified"]

_DAMAGE: Final = frozenset({"damaged", "missing", "rolled back", "unexpected", "untrusted"})


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Problem:
    """One thing that is wrong with one file.

    Attributes:
        key: the file, as a path under the root; a folder ends in ``/``.
        kind: ``damaged``, ``missing`` or ``unexpected`` is damage; so is ``untrusted`` (not signed as the
            policy demands) and ``rolled back`` (below the floor of the policy). ``unreadable`` (the store
            refused or failed), ``locked`` (its key could not be had) and ``unsupported`` (another
            format version) is not known.
        message: what is wrong, without the file's name.
    """

    key: str
    kind: Kind
    message: str

    @property
    def is_damage(self) -> bool:
        return self.kind in _DAMAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """What was found out about one checkpoint.

    Attributes:
        name: which one.
        commit: its commit; None where that could not be read or is damaged.
        problems: everything that is wrong, sorted by file.
        is_closed: whether its files are sealed and were not opened, for want of a policy with keys:
            their digests were verified, and not what they hold.
        signers: ids of the keys whose signatures were verified; empty where no policy asks for any.
        file_count: files that were read whole and found right, ``COMMIT`` and manifest included.
        size_bytes: of these files.
    """

    name: CheckpointName
    commit: Commit | None
    problems: tuple[Problem, ...]
    file_count: int
    size_bytes: int
    is_closed: bool = False
    signers: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        return _verdict(self.problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found out about a root.

    Attributes:
        uri: the root.
        run: the run's id; None where its record is missing or damaged.
        root_problems: about the run record and the launch records, which are always verified.
        checkpoints: those that were verified, in the order of the line.
        file_count, size_bytes: all files read whole and found right, the records included.
        rollback_protection: where the highest verified checkpoint is remembered, which the newest was held
            against. ``none``: nothing outside of the root says which checkpoint should be the newest, so
            an older state of the whole root verifies too.
        chain: how each checkpoint hangs on the next, newest first; None: it was not asked for.
    """

    uri: str
    run: str | None
    root_problems: tuple[Problem, ...]
    checkpoints: tuple[CheckpointReport, ...]
    file_count: int
    size_bytes: int
    rollback_protection: str = "none"
    chain: tuple[Link, ...] | None = None

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Everything that is wrong anywhere."""
        return self.root_problems + tuple(
            problem for checkpoint in self.checkpoints for problem in checkpoint.problems
        )

    @property
    def verdict(self) -> Verdict:
        return _verdict(self.problems)


def _verdict(problems: tuple[Problem, ...]) -> Verdict:
    if any(problem.is_damage for problem in problems):
        return "damaged"
    return "unverified" if problems else "whole"


@dataclass(slots=True)
class Findings:
    """Problems as they are found, and what was found right."""

    problems: list[Problem] = field(default_factory=list)
    file_count: int = 0
    size_bytes: int = 0

    def add(self, key: str, kind: Kind, message: str) -> None:
        self.problems.append(Problem(key=key, kind=kind, message=message))

    def count(self, size_bytes: int) -> None:
        self.file_count += 1
        self.size_bytes += size_bytes

    def about(self, key: str, *, absent: str = "it is not there") -> _About:
        """Take what is raised inside as a problem of this file; ``absent``: what to say if it is missing."""
        return _About(self, key, absent)

    def sorted(self) -> tuple[Problem, ...]:
        return tuple(sorted(set(self.problems)))


class _About:
    def __init__(self, findings: Findings, key: str, absent: str) -> None:
        self._findings = findings
        self._key = key
        self._absent = absent

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        found: Kind
        if isinstance(error, ObjectNotFoundError):
            self._findings.add(self._key, "missing", self._absent)
            return True
        if isinstance(error, UntrustedError):
            found = "untrusted"
        elif isinstance(error, IntegrityError):
            found = "damaged"
        elif isinstance(error, UnsupportedFormatError):
            found = "unsupported"
        elif isinstance(error, StoreError):
            found = "unreadable"
        elif isinstance(error, NoKeyError | KeyServiceError):
            found = "locked"
        else:
            return False
        self._findings.add(self._key, found, str(error))
        return True
