"""The seam of the audit log: what the core tells whoever keeps a record of who touched a checkpoint.

The core says what is about to be done and how it ended; it knows nothing of logs, formats and sinks.
`strongroom_security.auditlog` is what fills the seam, by a policy's ``[audit]``.

Two rules hold for all that reads and all that writes:

- what reads a checkpoint's content first says so (`Activity.intend`), and goes on only once that is on
  record: before any key is unwrapped, and before any shard is read;
- what writes says so (`Auditor.record`) and never waits for it, but that a ``COMMIT`` is written only after
  "save started" is out of this process's hands (`Auditor.secure`).
"""

from __future__ import annotations

import contextlib
import enum
import os
import secrets
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable
from urllib.parse import unquote

from strongroom.errors import (
    AccessDeniedError,
    AuditError,
    ConfigError,
    NoKeyError,
    RollbackError,
    UnsealedError,
    UntrustedError,
)
from strongroom.layout import CheckpointName
from strongroom.reasons import reason_in

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "NO_AUDIT",
    "Act",
    "Action",
    "Activity",
    "Auditor",
    "Detail",
    "Knowing",
    "Outcome",
    "Phase",
    "Sinking",
    "accepted_operation",
    "check_apart_from_sink",
    "listed",
    "new_operation",
    "outcome_of",
    "outcome_of_kind",
    "reason_of",
    "record_of",
    "unlisted",
]

Detail = str | int | bool

_OPERATION_BYTES: Final = 8
_FILE: Final = "file://"
_DETAIL_CHARS: Final = 512
"""Of one detail, as far as the log keeps it."""


class Action(enum.Enum):
    """What is done. The values stand in the log."""

    LAUNCH = "launch"
    """A writer's turn is claimed."""
    SAVE = "save"
    PREPARE = "prepare"
    """Buffers for saves are allocated; nothing is stored."""
    RESTORE = "restore"
    READ = "read"
    """A part of a checkpoint is read, by a library or a command that is not a restore."""
    PLAN = "plan"
    LIST = "list"
    SHOW = "show"
    PROVENANCE = "provenance"
    VERIFY = "verify"
    EXPORT = "export"
    IMPORT = "import"
    SIGN = "sign"
    UNWRAP = "unwrap"
    """A checkpoint's keys are unwrapped."""
    KEYS = "keys"
    """Keyrings are listed."""
    ROTATE = "rotate"
    RECIPIENTS = "recipients"
    """Who can open checkpoints is changed."""
    REMOVE = "remove"
    """Retention or garbage collection removes a checkpoint, or what a dead save left."""
    COLLECT = "collect"
    """A run of garbage collection as a whole."""
    REPLICATE = "replicate"
    GRANT = "grant"
    APPROVE = "approve"
    BREAK_GLASS = "break-glass"
    """A grant is used."""
    TRUST = "trust"
    """Whose signatures count is changed or looked at."""
    FLOOR = "floor"
    """What nothing may go below is changed or looked at."""
    ROLES = "roles"
    """What roles may do is rendered, or held against a site."""
    AUDIT = "audit"
    """The log itself: what was salvaged, lost, or read of it."""
    ALERT = "alert"
    """A rule over the log found something that somebody should look at."""


class Phase(enum.Enum):
    """Where in an activity a record stands."""

    INTENDED = "intended"
    """About to read; on record before anything was."""
    STARTED = "started"
    FINISHED = "finished"
    OBSERVED = "observed"
    """Found to have happened, by somebody else or by an earlier process of which no record is known."""


class Outcome(enum.Enum):
    """How it ended."""

    UNKNOWN = "unknown"
    """Not yet: it is intended or has started."""
    SUCCESS = "success"
    FAILURE = "failure"
    DENIED = "denied"
    """Refused: by the storage, by who keeps a key, by the policy, or because it could not be recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One thing that was done to a run or a checkpoint, or is about to be.

    Attributes:
        root: the store's URI; empty where it is about none.
        run: None where it is not known (yet).
        path: the file of the checkpoint that it is about, as stored; None: the checkpoint as a whole.
        byte_range: of the file, as its first byte and the one after its last.
        operation: 16 hex digits that join the records of one activity.
        details: what else is known, by names of ``[a-z0-9_]``: sizes in bytes, times in seconds, counts.
    """

    action: Action
    phase: Phase
    outcome: Outcome
    operation: str
    root: str = ""
    run: str | None = None
    checkpoint: CheckpointName | None = None
    path: str | None = None
    byte_range: tuple[int, int] | None = None
    reason: str | None = None
    details: Mapping[str, Detail] = field(default_factory=dict)


@runtime_checkable
class Auditor(Protocol):
    """Keeps the record; may be used by any thread, and on both sides of a fork."""

    @property
    def is_on(self) -> bool:
        """Whether anything is recorded at all."""

    def record(self, act: Act) -> None:
        """Take an act into the record. Never raises, and never waits for a sink."""

    def intend(self, act: Act) -> None:
        """Take an act into the record, and return once the sink has accepted it.

        Raises:
            AuditError: it was not accepted in time, so that what was intended must not be done.
        """

    def secure(self, *, within_s: float) -> None:
        """See what was recorded until now to the sink; where that is out of reach, to local stable storage.

        Never raises: what was to follow is no less right for it, and a later start tells what is missing.
        """

    def close(self, *, within_s: float) -> None:
        """As `secure`, and say that this process records nothing more. It may record again all the same."""


@runtime_checkable
class Knowing(Protocol):
    """An auditor that can tell which saves are on record already.

    It is asked beside the program, by a launch's first save; its first answer may take some seconds.
    """

    def knows(self, run: str, checkpoint: CheckpointName) -> bool | None:
        """Whether a checkpoint's commit is on record; None: it cannot be told."""


@runtime_checkable
class Sinking(Protocol):
    """An auditor that can say where its record goes."""

    @property
    def sink(self) -> str:
        """The URI of the store that the log is in."""


class _NoAuditor:
    """Nothing is recorded."""

    is_on = False

    def record(self, act: Act) -> None:
        return

    def intend(self, act: Act) -> None:
        return

    def secure(self, *, within_s: float) -> None:
        return

    def close(self, *, within_s: float) -> None:
        return


NO_AUDIT: Final[Auditor] = _NoAuditor()
"""For whoever has no ``[audit]``."""


class Activity:
    """One activity, from what it intends to how it ended; as a context manager it tells the end by itself.

    ::

        with Activity(auditor, Action.EXPORT, root=store.uri) as activity:
            activity.intend(run, name)       # refused: nothing was read
            ...                              # left by an error: failed, or denied, with its reason

    An activity that tells nothing of its end by itself is ended by `succeed` or `fail`; a second end is
    passed over.

    Args:
        root: the store's URI.
        run, checkpoint: where they are known; `about` tells them later.
        operation: of the activity that this is a part of; None: of its own.
    """

    def __init__(
        self,
        auditor: Auditor,
        action: Action,
        *,
        root: str = "",
        run: str | None = None,
        checkpoint: CheckpointName | None = None,
        details: Mapping[str, Detail] | None = None,
        operation: str | None = None,
    ) -> None:
        self.operation: Final = operation or new_operation()
        self._auditor = auditor
        self._action = action
        self._root = root
        self._run = run
        self._checkpoint = checkpoint
        self._details: dict[str, Detail] = dict(details or {})
        self._has_ended = False
        self._accepted: set[tuple[int, str, str | None, CheckpointName | None]] = set()

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def about(
        self, *, root: str | None = None, run: str | None = None, checkpoint: CheckpointName | None = None
    ) -> None:
        """Say what it turned out to be about."""
        self._root = root if root is not None else self._root
        self._run = run if run is not None else self._run
        self._checkpoint = checkpoint if checkpoint is not None else self._checkpoint

    def note(self, **details: Detail) -> None:
        """Add to what the end tells."""
        self._details.update(details)

    def vouched(self, signers: Sequence[str]) -> None:
        """Add whose signatures were verified, by the ids of their keys, to what the end tells."""
        if signers:
            self.note(**listed("signer", signers))

    def start(self) -> None:
        """Record that it has started."""
        self._auditor.record(self._act(Phase.STARTED, Outcome.UNKNOWN))

    def intend(
        self,
        run: str | None,
        checkpoint: CheckpointName | None,
        *,
        root: str | None = None,
        path: str | None = None,
        byte_range: tuple[int, int] | None = None,
    ) -> None:
        """Put on record that a checkpoint is about to be read; return once that was accepted.

        What was accepted before, for a checkpoint as a whole at the same root, is not said again.

        Args:
            checkpoint: None: the run as a whole, or whatever the activity is about.
            root: where it stands, if elsewhere than the activity's root.

        Raises:
            AuditError: it was not; the checkpoint must not be read.
        """
        self.about(run=run, checkpoint=checkpoint)
        if not self._auditor.is_on:
            return
        where = self._root if root is None else root
        accepted = (os.getpid(), where, run, checkpoint)
        if accepted in self._accepted and path is None and byte_range is None:
            return
        self._auditor.intend(
            Act(
                action=self._action,
                phase=Phase.INTENDED,
                outcome=Outcome.UNKNOWN,
                operation=self.operation,
                root=where,
                run=run,
                checkpoint=checkpoint,
                path=path,
                byte_range=byte_range,
                details=dict(self._details),
            )
        )
        self._accepted.add(accepted)
        _OPEN.add(self)

    def may_read(self, auditor: Auditor, run: str, checkpoint: CheckpointName) -> bool:
        """Whether it said that it reads a checkpoint, and that was accepted, in this very process.

        At whatever root: what is read of one tier is taken from another where it is damaged.
        """
        said = (os.getpid(), run, checkpoint)
        return self._auditor is auditor and said in {(pid, *what) for pid, _, *what in set(self._accepted)}

    def tell(
        self,
        outcome: Outcome,
        *,
        checkpoint: CheckpointName,
        run: str | None = None,
        root: str | None = None,
        path: str | None = None,
        byte_range: tuple[int, int] | None = None,
        reason: str | None = None,
        details: Mapping[str, Detail] | None = None,
    ) -> None:
        """Record what became of one of several checkpoints that it is about; it goes on."""
        if not self._auditor.is_on:
            return
        self._auditor.record(
            Act(
                action=self._action,
                phase=Phase.FINISHED,
                outcome=outcome,
                operation=self.operation,
                root=self._root if root is None else root,
                run=self._run if run is None else run,
                checkpoint=checkpoint,
                path=path,
                byte_range=byte_range,
                reason=None if reason is None else reason_in(reason),
                details=dict(details or {}),
            )
        )

    def succeed(self) -> None:
        """Record that it ended well."""
        self._end(Outcome.SUCCESS, None)

    def conclude(self, outcome: Outcome, reason: str) -> None:
        """Record that it came to an end that is no success, though nothing was raised."""
        self._end(outcome, reason_in(reason))

    def fail(self, error: BaseException) -> None:
        """Record that it ended by an error."""
        if not self._has_ended:
            self._details["error"] = type(error).__name__
        self._end(outcome_of(error), reason_of(error))

    def _end(self, outcome: Outcome, reason: str | None) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        _OPEN.drop(self)
        self._accepted.clear()
        self._auditor.record(self._act(Phase.FINISHED, outcome, reason=reason))

    def _act(self, phase: Phase, outcome: Outcome, *, reason: str | None = None) -> Act:
        return Act(
            action=self._action,
            phase=phase,
            outcome=outcome,
            operation=self.operation,
            root=self._root,
            run=self._run,
            checkpoint=self._checkpoint,
            reason=reason,
            details=dict(self._details),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.succeed()
        else:
            self.fail(error)


class _Register:
    """The activities of this process that go on, and said what they read. No fork inherits them.

    What is no activity any more, ended or not, falls out by itself.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        # The lock too: in a forked child the old one may be held by a thread that is not there.
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[Activity] = weakref.WeakSet()

    def add(self, activity: Activity) -> None:
        with self._lock:
            self._open.add(activity)

    def drop(self, activity: Activity) -> None:
        with self._lock:
            self._open.discard(activity)

    def operation(self, auditor: Auditor, run: str, checkpoint: CheckpointName) -> str | None:
        with self._lock:
            found = [activity for activity in self._open if activity.may_read(auditor, run, checkpoint)]
        return found[0].operation if found else None


_OPEN: Final = _Register()
os.register_at_fork(after_in_child=_OPEN.forget)


def accepted_operation(auditor: Auditor, run: str, checkpoint: CheckpointName) -> str | None:
    """The operation of an activity of this process that goes on, and said that it reads a checkpoint.

    None: nobody has said so, or it was not accepted.
    """
    return _OPEN.operation(auditor, run, checkpoint)


def new_operation() -> str:
    """What joins the records of one activity: 16 hex digits."""
    return secrets.token_hex(_OPERATION_BYTES)


_DENIALS: Final = (AccessDeniedError, AuditError, NoKeyError, RollbackError, UnsealedError, UntrustedError)


def outcome_of(error: BaseException) -> Outcome:
    """Whether an error is a refusal, or a failure."""
    return outcome_of_kind(type(error))


def outcome_of_kind(kind: type[BaseException]) -> Outcome:
    """As `outcome_of`, of which only the class is known."""
    return Outcome.DENIED if issubclass(kind, _DENIALS) else Outcome.FAILURE


def reason_of(error: BaseException) -> str:
    """An error's text, as a record holds it; of any error, whatever its text does."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - an error of somebody else's code
        text = ""
    return reason_in(text or type(error).__name__)


def record_of(auditor: Auditor) -> str:
    """Tells where what is done goes on record: the same on every rank of a job; empty: nowhere."""
    if not auditor.is_on:
        return ""
    return auditor.sink if isinstance(auditor, Sinking) else "an auditor of its own"


def check_apart_from_sink(auditor: Auditor, roots: Iterable[str]) -> None:
    """Raise ConfigError where the log lies in a root: whoever may remove a run there could remove its record.

    Args:
        roots: URIs or paths: a run's root, and its further tiers.
    """
    if not isinstance(auditor, Sinking):
        return
    sink = _folder(auditor.sink)
    for root in roots:
        if sink.startswith(_folder(root)):
            raise ConfigError(
                f"the audit log's sink {auditor.sink} is the root {root}, or lies inside it: whoever writes "
                "or removes checkpoints there could change the record of it; give the log a place of its own "
                "(sink in [audit])"
            )


def _folder(uri: str) -> str:
    is_file = uri[: len(_FILE)].lower() == _FILE
    if is_file or "://" not in uri:
        path = unquote(uri[len(_FILE) :]) if is_file else uri
        # As one folder may be written in several ways; of what is none, who opens it says so.
        with contextlib.suppress(OSError, ValueError):
            path = os.path.realpath(path)
        return os.path.join(path, "")
    scheme, _, place = uri.partition("://")
    return f"{scheme.lower()}://{place.rstrip('/')}/"


def listed(name: str, values: Iterable[str]) -> dict[str, Detail]:
    """Many short texts as details: joined by commas, ``name``, ``name_2`` and so on, as each has room."""
    rows: list[str] = []
    for value in values:
        if rows and len(rows[-1]) + 1 + len(value) <= _DETAIL_CHARS:
            rows[-1] = f"{rows[-1]},{value}"
        else:
            rows.append(value)
    return {name if number == 1 else f"{name}_{number}": row for number, row in enumerate(rows, start=1)}


def unlisted(name: str, details: Mapping[str, object]) -> list[str]:
    """What `listed` was given, of an event's details."""
    found: list[str] = []
    number, key = 1, name
    while isinstance(row := details.get(key), str):
        found += [value.strip() for value in row.split(",") if value.strip()]
        number += 1
        key = f"{name}_{number}"
    return found
