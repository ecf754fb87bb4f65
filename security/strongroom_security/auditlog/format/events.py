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
from strongroom.canonical import MAX_INTEGER, Json
from strongroom.errors import FormatError
from strongroom.layout import CheckpointName

__all__ = [
    "CLASS_UID",
    "EXTENSION",
    "OCSF_VERSION",
    "Actor",
    "Recorded",
    "check_event",
    "event_id",
    "event_of",
    "recorded_of",
]

CLASS_UID: Final = 6005
OCSF_VERSION: Final = "1.5.0"
EXTENSION: Final = {"name": "strongroom", "uid": "999", "version": "1.0.0"}
"""What the member ``strongroom`` is: an extension of OCSF's schema. 999 is the number for those that its
registry does not list."""
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
    named = _ACTIVITY_NAMES.get(activity)
    status_id, status = _STATUSES[act.outcome]
    user: dict[str, Any] = {"name": _clean(actor.user), "uid": _clean(actor.uid)}
    members: dict[str, Any] = {
        "activity_id": activity,
        # OCSF wants the source's own name of what it has no number for.
        "activity_name": act.action.value if named is None else named,
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
            "extensions": [dict(EXTENSION)],
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
        if not _is_natural(getattr(recorded, name)):
            raise FormatError(
                f"{what}: {name} must be a number from 0 on, found {getattr(recorded, name)!r:.60}"
            )
    for name in _OPTIONAL_NUMBERS:
        value_of = getattr(recorded, name)
        if value_of is not None and not _is_natural(value_of):
            raise FormatError(f"{what}: {name} must be a number from 0 on, found {value_of!r:.60}")
    if not isinstance(recorded.job, dict) or not isinstance(recorded.details, dict):
        raise FormatError(f"{what}: job and details must be objects")
    if recorded.byte_range is not None and not all(_is_natural(end) for end in recorded.byte_range):
        raise FormatError(f"{what}: byte_range must be two numbers from 0 on")
    return recorded


def check_event(value: Mapping[str, Any], what: str) -> tuple[str, int, str | None]:
    """The id, seq and run of an event's line, once all of it is what `recorded_of` takes; quicker than that.

    Raises:
        FormatError: as `recorded_of`.
    """
    try:
        extension, actor, endpoint = value["strongroom"], value["actor"], value["src_endpoint"]
        user, name, seq, run = actor["user"], value["metadata"]["uid"], extension["seq"], extension["run"]
        span, step, launch = extension.get("byte_range"), extension["step"], extension["launch"]
        begin, end = (None, None) if span is None else (span[0], span[1])
        is_event = (
            (span is None or (begin is not None and end is not None))
            and value["class_uid"] == CLASS_UID
            and _TEXT.issuperset(
                map(
                    type,
                    (
                        name,
                        extension["prev"],
                        extension["action"],
                        extension["phase"],
                        extension["outcome"],
                        extension["operation"],
                        value["databucket"]["name"],
                        user["name"],
                        endpoint["hostname"],
                    ),
                )
            )
            and _OPTIONAL_TEXT.issuperset(
                map(
                    type,
                    (
                        run,
                        extension["attempt"],
                        extension.get("path"),
                        value.get("status_detail"),
                        endpoint.get("ip"),
                        user.get("credential_uid"),
                        extension.get("role"),
                    ),
                )
            )
            and all(map(_is_natural, (seq, value["time"], actor["process"]["pid"])))
            and all(map(_is_natural, filter(_is_said, (step, launch, extension.get("rank"), begin, end))))
            and _OBJECT.issuperset(map(type, (extension.get("job", {}), extension.get("details", {}))))
        )
    except (KeyError, TypeError, AttributeError, IndexError):
        is_event = False
    if is_event:
        return name, seq, run
    recorded = recorded_of(value, what)
    return recorded.id, recorded.seq, recorded.run


_TEXT: Final = frozenset([str])
_OPTIONAL_TEXT: Final = frozenset([str, type(None)])
_OBJECT: Final = frozenset([dict])


def _is_said(value: object) -> bool:
    return value is not None


def _is_natural(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_INTEGER


_TEXTS: Final = ("id", "prev", "action", "phase", "outcome", "operation", "root", "user", "host")
_OPTIONAL_TEXTS: Final = ("run", "attempt", "path", "reason", "ip", "identity", "role")
_NUMBERS: Final = ("seq", "time", "pid")
_OPTIONAL_NUMBERS: Final = ("step", "launch", "rank")
