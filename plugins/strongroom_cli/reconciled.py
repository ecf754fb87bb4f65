"""What ``strongroom audit reconcile`` does and tells; who accounts for what is `reconciling.joining`'s."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, Final

from rich.console import Console

from strongroom import layout
from strongroom.auditing import Action
from strongroom.config import SYSTEM_CLOCK
from strongroom.errors import CheckpointNotFoundError, ObjectNotFoundError
from strongroom.manifest import RUN_BOUNDS, Run, check_run_id
from strongroom.roles import Duty, open_root
from strongroom.stores.base import Store
from strongroom.stores.s3.location import Location
from strongroom_cli import words
from strongroom_cli.audit_log import asked, open_index, sink_of, tell, vouchers_of
from strongroom_cli.console import line, new_console, print_json
from strongroom_cli.standing import read_history
from strongroom_security.auditlog.asking.index import Index, IndexCounts
from strongroom_security.auditlog.asking.queries import Question, ask_events
from strongroom_security.auditlog.format.events import Recorded
from strongroom_security.auditlog.reconciling.accesses import Access, Damage
from strongroom_security.auditlog.reconciling.commits import (
    CommitFinding,
    CommitStanding,
    Committed,
    judge_commits,
)
from strongroom_security.auditlog.reconciling.joining import (
    Finding,
    Joined,
    Settings,
    Verdict,
    Watched,
    has_settled,
    join,
)
from strongroom_security.auditlog.reconciling.operations import LONGEST_MS, Operation, Operations
from strongroom_security.auditlog.reconciling.sources import KINDS, find_logs, read_log
from strongroom_security.auditlog.verifying.trusting import Vouchers

__all__ = ["run", "utc"]

_NO_FILE: Final = "no-file"
_NO_REQUEST: Final = "no-request"
_SILENT: Final = {
    _NO_FILE: "no file of a log was found at --from",
    _NO_REQUEST: "no log at --from tells of any request about this root, and the audit log knows of some",
}
"""Why nothing that logs of access say, or do not say, is a verdict on this root."""

_BYPASSED: Final = 1
_UNREADABLE: Final = 4
_SHOWN: Final = 50

_WORDS: Final = {
    Verdict.BYPASS: "no event of ours",
    Verdict.OTHER_IDENTITY: "by another identity than the log has",
    Verdict.OTHER_PROGRAM: "by another program",
    Verdict.OTHER_SESSION: "the same role, in another session",
    Verdict.NO_IDENTITY: "the log does not say by whom",
    Verdict.OBSERVED: "of a commit that a later launch found",
    Verdict.EXPECTED: "expected",
    Verdict.REFUSED: "refused by the service",
    Verdict.LOOK: "looked, and read nothing",
}

_COMMITS: Final = {
    CommitStanding.UNRECORDED: "is not on record",
    CommitStanding.OBSERVED: "is on record as found by a later launch, or as begun alone",
    CommitStanding.UNSTARTED: "is on record as committed, and not as begun",
    CommitStanding.EARLIER: "is older than what is on record of this run",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """All that is told.

    Attributes:
        passed: events that account for nothing: nobody vouches for them, or their segment was touched.
        silent: why no log can say anything about this root; None: one does, or has no need to.
    """

    watched: Watched
    joined: Joined
    commits: Sequence[CommitFinding]
    counts: IndexCounts
    events: int
    files: int
    passed: int
    silent: str | None

    @property
    def unrecorded(self) -> list[CommitFinding]:
        return [each for each in self.commits if each.standing is CommitStanding.UNRECORDED]

    @property
    def status(self) -> int:
        if self.joined.bypasses or self.unrecorded:
            return _BYPASSED
        return _UNREADABLE if self.joined.damage_count or self.silent else 0


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    now_ms = SYSTEM_CLOCK.now_ms()
    store = open_root(options.root, options.policy, Duty.RESTORE)
    options.activity.about(root=store.uri, run=options.run)
    run_id = _run_of(options, store)
    options.activity.about(run=run_id)
    watched = _watched(options, store, run_id)
    settings = Settings(
        since_ms=_moment(options.since, now_ms),
        until_ms=now_ms - round(options.settled * 1000),
        window_ms=round(options.window * 1000),
        expected=tuple(options.expected),
    )
    sink = sink_of(options, options.policy)
    vouchers = vouchers_of(options, options.policy)
    passed = _Passed()
    with open_index(options, sink) as index:
        (operations, counts), _ = asked(
            options,
            index,
            sink,
            lambda: (
                Operations(_events(index, watched, settings, vouchers, passed), run=run_id, root=store.uri),
                index.counts(),
            ),
        )
    files = [0]
    joined = join(_accesses(options, settings, files), operations, watched, settings)
    silent = _NO_FILE if files[0] == 0 and not joined.damage_count else None
    has_seen = joined.first is not None or joined.open > 0
    if silent is None and not has_seen and has_settled(operations, watched, settings):
        silent = _NO_REQUEST
    commits = [] if options.no_commits else _commits(store, operations, settings, has_others=passed.count > 0)
    told = _Told(
        watched=watched,
        joined=joined,
        commits=commits,
        counts=counts,
        events=operations.count,
        files=files[0],
        passed=passed.count,
        silent=silent,
    )
    # What it has found is no failure of its own.
    options.activity.note(bypasses=sum(each.count for each in joined.bypasses))
    options.activity.succeed()
    if options.json:
        print_json(_to_json(told))
    else:
        _print(new_console(), told)
    return told.status


# ---------------------------------------------------------------------------------------------- what is read


def _run_of(options: argparse.Namespace, store: Store) -> str:
    if options.run is not None:
        return check_run_id(options.run)
    try:
        return Run.decode(store.read(layout.RUN, limit_bytes=RUN_BOUNDS.length_bytes), layout.RUN).run
    except ObjectNotFoundError:
        raise CheckpointNotFoundError(
            f"{store.uri} holds no {layout.RUN}, and so no run; name the run by --run where it is gone"
        ) from None


def _watched(options: argparse.Namespace, store: Store, run_id: str) -> Watched:
    keys = frozenset(options.kms_key) | {key.rpartition("/")[2] for key in options.kms_key}
    if store.uri[:5].lower() != "s3://":
        return Watched(run=run_id, root=store.uri, kms_keys=keys)
    place = Location.parse(store.uri)
    return Watched(run=run_id, root=store.uri, bucket=place.bucket, prefix=place.prefix, kms_keys=keys)


@dataclass(slots=True)
class _Passed:
    """How many events were passed over."""

    count: int = 0


def _events(
    index: Index, watched: Watched, settings: Settings, vouchers: Vouchers, passed: _Passed
) -> Iterator[Recorded]:
    """The run's events, and those of listings that were made before it was known which run that is.

    Where it is known whose word on writers counts, what anybody may have made up accounts for nothing.
    """
    since = settings.since_ms
    if since is not None:
        since = max(0, since - settings.window_ms - LONGEST_MS)
    passed.count = 0
    of_run = Question(run=watched.run, since_ms=since)
    listings = Question(actions=frozenset({Action.LIST.value}), since_ms=since)
    for question in (of_run, listings):
        for entry in ask_events(index, question, vouchers=vouchers):
            told = entry.recorded
            if question is listings and (
                told.run is not None or told.root.rstrip("/") != watched.root.rstrip("/")
            ):
                continue
            if entry.counts:
                yield entry.recorded
            else:
                passed.count += 1


def _accesses(options: argparse.Namespace, settings: Settings, files: list[int]) -> Iterator[Access | Damage]:
    kind = next((each for each in KINDS if each == options.kind), None)
    for file in find_logs(options.places, since_ms=settings.since_ms):
        if isinstance(file, Damage):
            yield file
            continue
        files[0] += 1
        yield from read_log(file, kind)


def _commits(
    store: Store, operations: Operations, settings: Settings, *, has_others: bool
) -> list[CommitFinding]:
    """What the log does not know of the root's commits."""
    commits = []
    for name, commit in read_history(store).commits.items():
        found = Committed(folder=name.folder, step=name.step, launch=name.launch, time=commit.committed_at_ms)
        if not operations.is_committed(name.folder):
            # Its own time is whatever its writer has put there; when it was put, the store knows.
            found = replace(found, time=_modified_ms(store, name.commit_key, found.time))
        commits.append(found)
    return judge_commits(
        commits,
        operations,
        since_ms=settings.since_ms,
        until_ms=settings.until_ms,
        has_others=has_others,
    )


def _modified_ms(store: Store, key: str, otherwise: int) -> int:
    try:
        return store.stat(key).modified_ns // 1_000_000
    except ObjectNotFoundError:
        return otherwise  # it was removed meanwhile


def _moment(told: tuple[str, int] | None, now_ms: int) -> int | None:
    if told is None:
        return None
    which, ms = told
    return now_ms - ms if which == "now" else ms


# ---------------------------------------------------------------------------------------------- what is told


def _to_json(told: _Told) -> dict[str, Any]:
    joined = told.joined
    return {
        "bypasses": sum(each.count for each in joined.bypasses),
        "commits": [
            {
                "folder": each.commit.folder,
                "launch": each.commit.launch,
                "standing": each.standing.value,
                "step": each.commit.step,
                "time": each.commit.time,
            }
            for each in told.commits
        ],
        "damaged": joined.damage_count,
        "damages": [{"reason": each.reason, "source": each.source} for each in joined.damages],
        "events": told.events,
        "failed": joined.failed,
        "files": told.files,
        "findings": [_finding_json(each) for each in joined.findings],
        "first": joined.first,
        "last": joined.last,
        "log": told.counts.to_json(),
        "matched": joined.matched,
        "open": joined.open,
        "others": joined.others,
        "passed_over": told.passed,
        "root": told.watched.root,
        "run": told.watched.run,
        "silent": told.silent,
        "unlisted": joined.unlisted,
        "unseen": [_unseen_json(each) for each in joined.unseen],
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "address": finding.address,
        "agent": finding.agent,
        "beside": finding.beside,
        "bypass": finding.verdict.is_bypass,
        "count": finding.count,
        "event": finding.nearest,
        "first": finding.first,
        "identity": finding.identity,
        "kind": finding.kind.value,
        "last": finding.last,
        "objects": finding.objects,
        "operation": finding.operation,
        "requests": finding.requests,
        "sent_bytes": finding.sent_bytes,
        "sources": finding.sources,
        "verdict": finding.verdict.value,
        "where": finding.where,
    }


def _unseen_json(operation: Operation) -> dict[str, Any]:
    return {
        "action": operation.action,
        "event": operation.event,
        "folder": operation.folder,
        "host": operation.host,
        "identity": operation.identity,
        "time": operation.first,
    }


def _print(console: Console, told: _Told) -> None:
    joined = told.joined
    _print_findings(console, joined.bypasses)
    _print_findings(console, [each for each in joined.findings if not each.verdict.is_bypass])
    for commit in told.commits:
        style = "bold red" if commit.standing is CommitStanding.UNRECORDED else "yellow"
        console.print(
            line(("commit ", style), f"{commit.commit.folder} {_COMMITS[commit.standing]}"), soft_wrap=True
        )
    for operation in joined.unseen[:_SHOWN]:
        console.print(
            line(
                ("unseen ", "dim"),
                f"{operation.action} of {operation.folder} at {utc(operation.first)} by "
                f"{operation.identity or operation.host}: the logs of storage know of no access",
            ),
            soft_wrap=True,
        )
    for damage in joined.damages[:_SHOWN]:
        console.print(
            line(("unreadable ", "bold yellow"), f"{damage.source}: {damage.reason}"), soft_wrap=True
        )
    _print_end(console, told)


def _print_findings(console: Console, findings: Sequence[Finding]) -> None:
    for each in findings[:_SHOWN]:
        style = "bold red" if each.verdict.is_bypass else "yellow"
        when = utc(each.first) if each.first == each.last else f"{utc(each.first)} to {utc(each.last)}"
        console.print(
            line(
                (f"{each.verdict.value} ", style),
                f"{each.operation} of {_of(each)} by {each.identity or 'nobody who said so'} from "
                f"{each.address or 'an address that is not told'}, {when} UTC",
                f" ({each.count:,} times)" if each.count > 1 else "",
                f": {_why(each)}",
            ),
            soft_wrap=True,
        )
    if len(findings) > _SHOWN:
        console.print(line((f"and {len(findings) - _SHOWN:,} more; --json lists them all", "dim")))


def _of(finding: Finding) -> str:
    if finding.count == 1 and len(finding.objects) == 1:
        return finding.objects[0]
    return finding.where or (finding.objects[0] if finding.objects else words.NOTHING)


def _why(finding: Finding) -> str:
    told = _WORDS[finding.verdict]
    if finding.verdict is Verdict.OTHER_IDENTITY and finding.beside is not None:
        return f"{told}, which is {finding.beside}"
    if finding.verdict is Verdict.OTHER_PROGRAM:
        return f"{told}, {words.shortened(finding.agent or '', 60)}"
    return told


def _print_end(console: Console, told: _Told) -> None:
    joined = told.joined
    bypassed = sum(each.count for each in joined.bypasses)
    looked = (
        bypassed + joined.matched + sum(each.count for each in joined.findings if not each.verdict.is_bypass)
    )
    unproven = told.counts.events - told.counts.sequenced
    console.print(
        line(
            ("run ", "dim"),
            f"{told.watched.run}: {words.count(told.events, 'event')} on record; "
            f"{words.count(told.files, 'file')} with {_accesses_in_words(looked)}, {joined.matched:,} of "
            f"them ours; {joined.failed:,} came to nothing, {joined.open:,} are too young to be judged, "
            f"{joined.others:,} are about something else",
        ),
        soft_wrap=True,
    )
    if joined.unlisted:
        tell(f"{joined.unlisted:,} more accesses are told by none of these lines: they are too many")
    if told.passed:
        tell(
            f"{words.count(told.passed, 'event')} of the run account for nothing: nobody vouches for their "
            "writers, or their segments were touched; see 'strongroom audit verify'"
        )
    if unproven:
        tell(
            f"{unproven:,} of the log's {told.counts.events:,} events are not in its tree: unproven; "
            "see 'strongroom audit verify'"
        )
    if bypassed or told.unrecorded:
        parts = [_accesses_in_words(bypassed)] if bypassed else []
        parts += [words.count(len(told.unrecorded), "commit")] if told.unrecorded else []
        console.print(line((f"{' and '.join(parts)} went round the log", "bold red")))
    elif joined.damage_count:
        places = words.count(joined.damage_count, "place")
        console.print(line((f"{places} could not be read; what they say is not known", "yellow")))
    elif told.silent is None:
        console.print(line(("nothing went round the log", "green")))
    if told.silent is not None:
        why = (
            f"{_SILENT[told.silent]}: what went round the log is not known; name this bucket's logs, or keys'"
        )
        console.print(line((why, "bold yellow")), soft_wrap=True)


def _accesses_in_words(number: int) -> str:
    return "1 access" if number == 1 else f"{number:,} accesses"


def utc(ms: int) -> str:
    """A moment in UTC, to the second."""
    try:
        return f"{datetime.fromtimestamp(ms / 1000, tz=timezone.utc):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, OSError, ValueError):
        return f"{ms} ms"
