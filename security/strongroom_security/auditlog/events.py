"""An event's line: an act and its actor as OCSF tells them, and back.

The Open Cybersecurity Schema Framework 1.5.0, class 6005 "Datastore Activity" (schema.ocsf.io): what other
tools for security events read. What it has no place for stands in one extension object, ``strongroom``.
It owns what goes where; hashes and order are `segments`'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from strongroom._version import __version__
from strongroom.auditing import Act, Action, Outcome
from strongroom.canonical import Json
from strongroom.errors import FormatError
from strongroom.layout import CheckpointName

__all__ = ["CLASS_UID", "OCSF_VERSION", "Actor", "Recorded", "event_id", "event_of", "recorded_of"]

CLASS_UID: Final = 6005
OCSF_VERSION: Final = "1.5.0"
_CATEGORY_UID: Final = 6

_OTHER: Final = 99
_ACTIVITIES: Final = {
    Action.SAVE: 5,
    Action.IMPORT: 5,
    Action.REPLICATE: 5,
    Action.RESTORE: 1,
    Action.READ: 1,
    Action.PLAN: 1,
    Action.SHOW: 1,
    Action.PROVENANCE: 1,
    Action.VERIFY: 1,
    Action.EXPORT: 1,
    Action.BREAK_GLASS: 3,
    Action.LIST: 8,
    Action.KEYS: 8,
    Action.LAUNCH: 6,
    Action.ROTATE: 2,
    Action.RECIPIENTS: 2,
    Action.SIGN: 2,
    Action.REMOVE: 7,
    Action.COLLECT: 7,
    Action.UNWRAP: 10,
}
"""OCSF's activity_id: 1 Read, 2 Update, 3 Connect, 5 Write, 6 Create, 7 Delete, 8 List, 10 Decrypt."""

_ACTIVITY_NAMES: Final = {
    1: "Read",
    2: "Update",
    3: "Connect",
    5: "Write",
    6: "Create",
    7: "Delete",
    8: "List",
    10: "Decrypt",
    _OTHER: "Other",
}

_STATUSES: Final = {
    Outcome.UNKNOWN: (0, "Unknown"),
    Outcome.SUCCESS: (1, "Success"),
    Outcome.FAILURE: (2, "Failure"),
    Outcome.DENIED: (2, "Failure"),
}

_INFORMATIONAL, _LOW, _MEDIUM, _HIGH = 1, 2, 3, 4

_TEXT_CHARS: Final = 2_000
_DETAILS: Final = 64
"""How many are kept of one event, so that its line fits an entry of the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who did it, and where: of a process, as far as it can tell.

    Attributes:
        user, uid: of the operating system.
        pid, process: its number and its program's name.
        host, ip: where it runs; ``ip`` None: not known.
        job: what scheduled it, by names such as ``slurm.SLURM_JOB_ID``.
        rank: of its job; None: it is alone.
        identity: by whose credentials it goes, as STS's caller says: an ARN; None: none, or not known.
        role: of the policy's ``[role]``.
    """

    user: str
    uid: str
    pid: int
    process: str
    host: str
    ip: str | None = None
    job: Mapping[str, str] = field(default_factory=dict)
    rank: int | None = None
    identity: str | None = None
    role: str | None = None


def event_id(writer: str, seq: int) -> str:
    """What an event is called: ``<writer>-<seq>``."""
    return f"{writer}-{seq}"


def event_of(act: Act, actor: Actor, *, writer: str, seq: int, prev: str, time_ms: int) -> dict[str, Any]:
    """An event line's members.

    Args:
        writer, seq, prev: its place in the chain.
        time_ms: when it was recorded, since the epoch, by the clock of its writer.
    """
    activity = _ACTIVITIES.get(act.action, _OTHER)
    status_id, status = _STATUSES[act.outcome]
    user: dict[str, Any] = {"name": _clean(actor.user), "uid": _clean(actor.uid)}
    members: dict[str, Any] = {
        "activity_id": activity,
        "activity_name": _ACTIVITY_NAMES[activity],
        "category_uid": _CATEGORY_UID,
        "class_uid": CLASS_UID,
        "type_uid": CLASS_UID * 100 + activity,
        "time": time_ms,
        "severity_id": _severity(act),
        "status_id": status_id,
        "status": status,
        "metadata": {
            "uid": event_id(writer, seq),
            "version": OCSF_VERSION,
            "product": {"name": "Strongroom", "vendor_name": "Strongroom", "version": __version__},
        },
        "actor": {"user": user, "process": {"pid": actor.pid, "name": _clean(actor.process)}},
        "src_endpoint": {"hostname": _clean(actor.host)},
        "databucket": {"name": _clean(act.root) or "none", "type_id": 1 if act.root[:5] == "s3://" else 99},
        "strongroom": _extension(act, actor, seq, prev),
    }
    if actor.ip is not None:
        members["src_endpoint"]["ip"] = _clean(actor.ip)
    if actor.identity is not None:
        user["credential_uid"] = _clean(actor.identity)
    if act.reason is not None:
        members["status_detail"] = _clean(act.reason)
    return members


def _extension(act: Act, actor: Actor, seq: int, prev: str) -> dict[str, Any]:
    extension: dict[str, Any] = {
        "seq": seq,
        "prev": prev,
        "action": act.action.value,
        "phase": act.phase.value,
        "outcome": act.outcome.value,
        "operation": act.operation,
        "run": act.run,
        "step": None,
        "launch": None,
        "attempt": None,
    }
    if act.checkpoint is not None:
        extension["step"] = act.checkpoint.step
        extension["launch"] = act.checkpoint.launch
        extension["attempt"] = act.checkpoint.attempt
    optional = {
        "path": None if act.path is None else _clean(act.path),
        "byte_range": None if act.byte_range is None else list(act.byte_range),
        "role": None if actor.role is None else _clean(actor.role),
        "rank": actor.rank,
        "job": {_clean(name): _clean(value) for name, value in actor.job.items()} or None,
        "details": _details(act.details) or None,
    }
    extension.update({name: value for name, value in optional.items() if value is not None})
    return extension


def _details(details: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in list(details.items())[:_DETAILS]:
        if isinstance(value, bool | int) and abs(value) < 2**53:
            kept[_clean(name)] = value
        else:
            # No fraction stands in canonical JSON as a number.
            kept[_clean(name)] = _clean(str(value))[:512]
    return kept


def _severity(act: Act) -> int:
    if act.action in (Action.BREAK_GLASS, Action.ALERT):
        return _HIGH
    if act.outcome is Outcome.DENIED:
        return _MEDIUM
    return _LOW if act.outcome is Outcome.FAILURE or act.action is Action.REMOVE else _INFORMATIONAL


def _clean(text: str) -> str:
    # Half a character, as the names of files and users may hold, has no UTF-8.
    return text[:_TEXT_CHARS].encode("utf-8", "backslashreplace").decode("utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """An event as it stands in the log, in the terms of `Act` and `Actor`.

    Attributes:
        id: ``<writer>-<seq>``.
        time: in ms since the epoch.
        outcome: as `strongroom.auditing.Outcome`'s values; ``action`` and ``phase`` likewise, and perhaps of
            a later release.
        checkpoint: its folder's name; None: it is about none.
    """

    id: str
    seq: int
    prev: str
    time: int
    action: str
    phase: str
    outcome: str
    operation: str
    root: str
    run: str | None
    step: int | None
    launch: int | None
    attempt: str | None
    path: str | None
    byte_range: tuple[int, int] | None
    reason: str | None
    user: str
    host: str
    ip: str | None
    pid: int
    identity: str | None
    role: str | None
    rank: int | None
    job: Mapping[str, str]
    details: Mapping[str, Any]

    @property
    def checkpoint(self) -> str | None:
        if self.step is None or self.launch is None or self.attempt is None:
            return None
        return CheckpointName(step=self.step, launch=self.launch, attempt=self.attempt).folder


def recorded_of(value: Json, what: str) -> Recorded:
    """An event line's content.

    Args:
        value: the decoded line.
        what: names it in errors.

    Raises:
        FormatError: it is no event of this format. Members that it does not know are passed over.
    """
    try:
        extension, actor, endpoint = value["strongroom"], value["actor"], value["src_endpoint"]
        span = extension.get("byte_range")
        recorded = Recorded(
            id=value["metadata"]["uid"],
            seq=extension["seq"],
            prev=extension["prev"],
            time=value["time"],
            action=extension["action"],
            phase=extension["phase"],
            outcome=extension["outcome"],
            operation=extension["operation"],
            root=value["databucket"]["name"],
            run=extension["run"],
            step=extension["step"],
            launch=extension["launch"],
            attempt=extension["attempt"],
            path=extension.get("path"),
            byte_range=None if span is None else (span[0], span[1]),
            reason=value.get("status_detail"),
            user=actor["user"]["name"],
            host=endpoint["hostname"],
            ip=endpoint.get("ip"),
            pid=actor["process"]["pid"],
            identity=actor["user"].get("credential_uid"),
            role=extension.get("role"),
            rank=extension.get("rank"),
            job=extension.get("job", {}),
            details=extension.get("details", {}),
        )
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise FormatError(f"{what} is no event of this log: {type(error).__name__} {error}"[:300]) from None
    if value.get("class_uid") != CLASS_UID:
        raise FormatError(f"{what} is of class {value.get('class_uid')!r:.40}; expected {CLASS_UID}")
    for name in _TEXTS:
        if not isinstance(getattr(recorded, name), str):
            raise FormatError(f"{what}: {name} must be text, found {getattr(recorded, name)!r:.60}")
    for name in _OPTIONAL_TEXTS:
        if not isinstance(getattr(recorded, name), str | None):
            raise FormatError(f"{what}: {name} must be text, found {getattr(recorded, name)!r:.60}")
    for name in _NUMBERS:
        if type(getattr(recorded, name)) is not int:
            raise FormatError(f"{what}: {name} must be a number, found {getattr(recorded, name)!r:.60}")
    for name in _OPTIONAL_NUMBERS:
        if type(getattr(recorded, name)) not in (int, type(None)):
            raise FormatError(f"{what}: {name} must be a number, found {getattr(recorded, name)!r:.60}")
    if not isinstance(recorded.job, dict) or not isinstance(recorded.details, dict):
        raise FormatError(f"{what}: job and details must be objects")
    if recorded.byte_range is not None and any(type(end) is not int for end in recorded.byte_range):
        raise FormatError(f"{what}: byte_range must be two numbers")
    return recorded


_TEXTS: Final = ("id", "prev", "action", "phase", "outcome", "operation", "root", "user", "host")
_OPTIONAL_TEXTS: Final = ("run", "attempt", "path", "reason", "ip", "identity", "role")
_NUMBERS: Final = ("seq", "time", "pid")
_OPTIONAL_NUMBERS: Final = ("step", "launch", "rank")
