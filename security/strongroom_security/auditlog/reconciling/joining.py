"""Each access of storage or keys, held against our events: whose it is, and which are nobody's. Pure.

An access is ours where an operation is on record that does such things, on that checkpoint, at that time, by
that identity, and where the program that asked called itself Strongroom. By a key service's request id it is
ours at once. What nothing on record accounts for is a bypass.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from strongroom_security.auditlog.reconciling.accesses import (
    KEY_KINDS,
    Access,
    AccessKind,
    Damage,
    Served,
    is_access_point,
    unquoted,
)
from strongroom_security.auditlog.reconciling.accounting import (
    TOUCHING,
    accounts_for,
    folder_of,
    is_at_large,
    is_of_a_run,
)
from strongroom_security.auditlog.reconciling.identities import Likeness, likeness
from strongroom_security.auditlog.reconciling.operations import Operation, Operations

__all__ = ["Finding", "Joined", "Settings", "Verdict", "Watched", "has_settled", "join"]

AGENT: Final = "strongroom"
"""What our clients' ``User-Agent`` holds."""

_MAX_FINDINGS: Final = 10_000
_KEPT: Final = 5
"""Objects, requests and places that a finding names."""
_MAX_REQUESTS: Final = 5_000_000


class Verdict(enum.Enum):
    """What an access comes to."""

    MATCHED = "matched"
    BYPASS = "bypass"
    """No event of ours is about it."""
    OTHER_IDENTITY = "other-identity"
    """Events are, and all by others."""
    OTHER_PROGRAM = "other-program"
    """An event is, by the same identity; and the program that asked does not call itself Strongroom."""
    OTHER_SESSION = "other-session"
    """An event is, by the same role in another session."""
    NO_IDENTITY = "no-identity"
    """An event is, and one of the two does not say by whom."""
    OBSERVED = "observed"
    """It made a checkpoint that a later launch found, and whose own event is not on record."""
    EXPECTED = "expected"
    """No event of ours is about it, and whoever asked has been named as one of whom that is expected."""
    REFUSED = "refused"
    """The service refused it, and nothing of ours is about it."""
    LOOK = "look"
    """A listing or a question about an object, by one who is not on record at that time."""

    @property
    def is_bypass(self) -> bool:
        """Whether it went round the log."""
        return self in (Verdict.BYPASS, Verdict.OTHER_IDENTITY, Verdict.OTHER_PROGRAM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What is looked at.

    Attributes:
        run: the run's id.
        bucket, prefix: where its root is; bucket None: in no bucket. The prefix is empty or ends in ``/``.
        kms_keys: keys, as ARNs or ids, of which every use counts, whatever it says it is for.
    """

    run: str
    root: str
    bucket: str | None = None
    prefix: str = ""
    kms_keys: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How accesses are held against events.

    Attributes:
        since_ms: what was before is passed over; None: nothing is.
        until_ms: what was later is left open: logs are delivered late.
        window_ms: how far an access may lie before an operation's first event, or behind its last.
        expected: identities of which no events are expected; an assumed role by the role's ARN.
    """

    since_ms: int | None = None
    until_ms: int
    window_ms: int = 15 * 60 * 1000
    expected: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Finding:
    """Accesses that are alike.

    Attributes:
        where: the checkpoint's folder; elsewhere the first part of the objects' keys.
        first, last: when, in ms since the epoch.
        objects, sources, requests: the first few.
        nearest: an event that is close to it, if there is one; by whom says ``beside``.
    """

    verdict: Verdict
    kind: AccessKind
    operation: str
    identity: str | None
    address: str | None
    agent: str | None
    where: str
    first: int
    last: int
    count: int = 0
    sent_bytes: int = 0
    objects: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    nearest: str | None = None
    beside: str | None = None


@dataclass(slots=True, kw_only=True)
class Joined:
    """What came of it.

    Attributes:
        findings: all but what was matched, bypasses first, then the oldest first.
        matched: accesses that are ours.
        failed: those that came to nothing, such as a question for an object that is not there.
        open: those that are too young to be judged.
        others: those that are about other things than the root.
        unlisted: how many findings of which nothing is told, where there are very many.
        unseen: operations on record of which the logs of storage know no access. Logs are delivered as well
            as AWS can, and no more is promised of them.
        damages: what could not be read.
        first, last: of all accesses about the root; None: there were none.
    """

    findings: list[Finding] = field(default_factory=list)
    matched: int = 0
    failed: int = 0
    open: int = 0
    others: int = 0
    unlisted: int = 0
    unseen: list[Operation] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    damage_count: int = 0
    first: int | None = None
    last: int | None = None

    @property
    def bypasses(self) -> list[Finding]:
        return [each for each in self.findings if each.verdict.is_bypass]


def join(
    accesses: Iterable[Access | Damage], operations: Operations, watched: Watched, settings: Settings
) -> Joined:
    """Hold accesses, in any order, against what is on record."""
    return _Joining(operations, watched, settings).run(accesses)


class _Joining:
    def __init__(self, operations: Operations, watched: Watched, settings: Settings) -> None:
        self._operations = operations
        self._watched = watched
        self._settings = settings
        self._joined = Joined()
        self._found: dict[tuple[object, ...], Finding] = {}
        self._seen: set[tuple[str | None, str]] = set()
        self._requests: set[tuple[str, AccessKind, str | None]] = set()
        self._has_objects = self._has_keys = False

    def run(self, accesses: Iterable[Access | Damage]) -> Joined:
        joined = self._joined
        for access in accesses:
            if isinstance(access, Damage):
                joined.damage_count += 1
                if len(joined.damages) < 100:
                    joined.damages.append(access)
                continue
            where = self._where(access)
            if where is None:
                joined.others += 1
                continue
            self._take(access, where)
        joined.findings = sorted(
            self._found.values(), key=lambda each: (not each.verdict.is_bypass, each.first, each.where)
        )
        joined.unseen = self._unseen()
        return joined

    def _where(self, access: Access) -> str | None:
        """What of the root an access is about, as a key under it; None: about nothing of it."""
        watched = self._watched
        if access.kind in KEY_KINDS:
            if access.subject is not None and access.subject.run == watched.run:
                return access.subject.folder or ""
            return "" if self._is_watched_key(access.kms_key) else None
        if watched.bucket is None or access.bucket is None or access.key is None:
            return None
        is_point = access.bucket != watched.bucket and is_access_point(access.bucket)
        if access.bucket != watched.bucket and not is_point:
            return None
        # S3 encodes a key for its log that the client had encoded before, perhaps more than once.
        key = unquoted(access.key) if "%" in access.key else access.key
        if key.startswith(watched.prefix):
            where = key[len(watched.prefix) :]
            # An access point may be of this bucket; by its key alone an object is taken for the run's.
            return where if not is_point or is_of_a_run(where) else None
        if is_point:
            return None
        is_root = access.kind is AccessKind.LOOK and watched.prefix == f"{key}/"
        return "" if is_root else None

    def _is_watched_key(self, key: str | None) -> bool:
        return key is not None and (key in self._watched.kms_keys or _id(key) in self._watched.kms_keys)

    def _take(self, access: Access, where: str) -> None:
        joined, settings = self._joined, self._settings
        if settings.since_ms is not None and access.time < settings.since_ms:
            joined.others += 1
            return
        if access.request is not None and len(self._requests) < _MAX_REQUESTS:
            # A trail's files and a bucket's logs may both tell of one request, and more than once.
            name = (access.request, access.kind, access.key)
            if name in self._requests:
                return
            self._requests.add(name)
        if access.time > settings.until_ms:
            joined.open += 1
            return
        joined.first = access.time if joined.first is None else min(joined.first, access.time)
        joined.last = access.time if joined.last is None else max(joined.last, access.time)
        if access.kind in KEY_KINDS:
            self._has_keys = True
        else:
            self._has_objects = True
        verdict, operation = self._judge(access, where)
        if verdict is Verdict.MATCHED:
            joined.matched += 1
        elif access.served is Served.FAILED:
            joined.failed += 1
        else:
            if access.served is Served.REFUSED:
                verdict = Verdict.REFUSED
            elif access.kind is AccessKind.LOOK and verdict.is_bypass:
                verdict = Verdict.LOOK
            self._tell(access, where, verdict, operation)

    def _judge(self, access: Access, where: str) -> tuple[Verdict, Operation | None]:
        """What an access comes to, and the operation that it is part of, or that is nearest."""
        asked = self._operations.of_request(access.request)
        if asked is not None:
            self._seen.add((asked.folder, asked.action))
            return self._by_identity(access, asked, has_request=True), asked
        folder = folder_of(where)
        best = _closest(access, self._candidates(access, where, folder))
        if best is None and is_at_large(access.kind, where):
            best = self._at_large(access)
        if best is None:
            observed = folder is not None and self._operations.is_observed(folder)
            if observed and access.kind in (AccessKind.WRITE, AccessKind.WRAP, AccessKind.SIGN):
                return Verdict.OBSERVED, None
            return self._unless_expected(access, Verdict.BYPASS), None
        if likeness(access.identity, best.identity) is not Likeness.OTHER:
            self._seen.add((best.folder, best.action))
        return self._by_identity(access, best, has_request=False), best

    def _by_identity(self, access: Access, operation: Operation, *, has_request: bool) -> Verdict:
        alike = likeness(access.identity, operation.identity)
        if alike is Likeness.OTHER or access.identity is None:
            # Both logs name everybody but those who came without credentials, as no process of ours does.
            return self._unless_expected(access, Verdict.OTHER_IDENTITY)
        if not has_request and access.agent is not None and AGENT not in access.agent.lower():
            return self._unless_expected(access, Verdict.OTHER_PROGRAM)
        if alike is Likeness.UNKNOWN and (access.address is None or access.address != operation.address):
            return Verdict.NO_IDENTITY
        return Verdict.OTHER_SESSION if alike is Likeness.PRINCIPAL else Verdict.MATCHED

    def _unless_expected(self, access: Access, verdict: Verdict) -> Verdict:
        who = access.identity
        if who is not None and any(
            likeness(who, each) >= Likeness.PRINCIPAL for each in self._settings.expected
        ):
            return Verdict.EXPECTED
        return verdict

    def _candidates(self, access: Access, where: str, folder: str | None) -> Iterator[Operation]:
        if folder is None:
            return
        window = self._settings.window_ms
        for each in self._operations.on(folder):
            if each.is_observed or not each.first - window <= access.time <= each.last + window:
                continue
            if accounts_for(each, access.kind, where):
                yield each

    def _at_large(self, access: Access) -> Operation | None:
        """What somebody is at on the run as a whole: small documents are read by whatever is done there."""
        if access.identity is None:
            return None
        window = self._settings.window_ms
        found = self._operations.by(access.identity, access.time, window)
        return found or self._operations.by(None, access.time, window)

    def _tell(self, access: Access, where: str, verdict: Verdict, near: Operation | None) -> None:
        top = folder_of(where) or where.partition("/")[0]
        name = (verdict, access.operation, access.identity, access.address, top)
        finding = self._found.get(name)
        if finding is None:
            if len(self._found) >= _MAX_FINDINGS and not verdict.is_bypass:
                self._joined.unlisted += 1
                return
            finding = self._found[name] = Finding(
                verdict=verdict,
                kind=access.kind,
                operation=access.operation,
                identity=access.identity,
                address=access.address,
                agent=access.agent,
                where=top,
                first=access.time,
                last=access.time,
                nearest=None if near is None else near.event,
                beside=None if near is None else near.identity,
            )
        finding.count += 1
        finding.sent_bytes += access.sent_bytes or 0
        finding.first, finding.last = min(finding.first, access.time), max(finding.last, access.time)
        told = (
            (finding.objects, (access.kms_key if access.kind in KEY_KINDS else access.key)),
            (finding.sources, access.source),
            (finding.requests, access.request),
        )
        for kept, each in told:
            if each is not None and len(kept) < _KEPT and each not in kept:
                kept.append(each)

    def _unseen(self) -> list[Operation]:
        """Operations that storage should know of, and does not."""
        joined, window = self._joined, self._settings.window_ms
        if joined.first is None or joined.last is None or not self._has_objects:
            return []
        root = self._watched.root.rstrip("/")
        return [
            each
            for each in self._operations
            if (each.folder, each.action) not in self._seen
            and _touches(each, root)
            and joined.first + window <= each.first
            and each.last <= joined.last - window
        ]


def has_settled(operations: Operations, watched: Watched, settings: Settings) -> bool:
    """Whether anything is on record that logs of this period, of storage or of keys, should know of."""
    root = watched.root.rstrip("/")
    return any(
        _touches(each, root)
        and each.last <= settings.until_ms
        and (settings.since_ms is None or each.first >= settings.since_ms)
        for each in operations
    )


def _touches(operation: Operation, root: str) -> bool:
    """Whether an operation never came off without a request about an object under a root."""
    return (
        not operation.is_observed
        and operation.has_succeeded
        and operation.root.rstrip("/") == root
        and operation.action in TOUCHING
    )


def _closest(access: Access, operations: Iterable[Operation]) -> Operation | None:
    """The operation that was most likely done by whoever asked."""
    best: Operation | None = None
    nearness = (Likeness.OTHER, False)
    for each in operations:
        near = (likeness(access.identity, each.identity), access.address == each.address)
        if best is None or near > nearness:
            best, nearness = each, near
        if nearness == (Likeness.SAME, True):
            break  # of a thousand ranks' operations, no other is closer
    return best


def _id(key: str) -> str:
    return key.rpartition("/")[2]
