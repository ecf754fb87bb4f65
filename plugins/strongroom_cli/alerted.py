"""What ``strongroom audit alerts`` does and tells; what the rules look at is `auditlog.alerts`'."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from strongroom.auditing import Act, Action, Auditor, Outcome, Phase, new_operation
from strongroom.config import SYSTEM_CLOCK
from strongroom.errors import ConfigError
from strongroom_cli.audit_log import asked, explained, nothing_there, open_index, sink_of, tell, vouchers_of
from strongroom_cli.console import line, new_console, print_json
from strongroom_cli.reconciled import utc
from strongroom_cli.words import count
from strongroom_security.auditlog.alerting.rules import Alert, Period, Rule, Rules, Severity, evaluate
from strongroom_security.auditlog.alerting.troubles import troubles_of
from strongroom_security.auditlog.asking.index import Index
from strongroom_security.auditlog.asking.queries import Entry, Question, ask_events, is_on_record
from strongroom_security.auditlog.format.events import Recorded
from strongroom_security.auditlog.verifying.trusting import Vouchers

__all__ = ["run"]

_FIRED: Final = 1
_NOT_FOUND: Final = 3
_MAX_RULES_BYTES: Final = 1 << 20

_STYLES: Final = {Severity.HIGH: "bold red", Severity.MEDIUM: "yellow", Severity.LOW: "dim"}


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    rules = Rules() if options.rules is None else _rules(Path(options.rules))
    auditor = None if options.policy is None else options.policy.auditor
    if options.record and (auditor is None or not auditor.is_on):
        raise ConfigError(
            "--record puts alerts on record, and no policy here has an [audit]; give --security"
        )
    now_ms = _moment(options.now, SYSTEM_CLOCK.now_ms())
    since_ms = _moment(options.since, now_ms)
    if since_ms > now_ms:
        raise ConfigError("--since lies behind --now: there is nothing to judge between them")
    sink = sink_of(options, options.policy)
    options.activity.about(root=sink.uri, run=options.run)
    vouchers = vouchers_of(options, options.policy)
    absent = nothing_there(options, sink)
    if absent is not None:
        tell(absent)
        return _NOT_FOUND
    with open_index(options, sink) as index:
        judged, _ = asked(
            options,
            index,
            sink,
            lambda: _judge(options, index, vouchers, rules, since_ms=since_ms, now_ms=now_ms),
        )
        alerts, told = judged.alerts, judged.told
        recorded = 0
        if options.record and auditor is not None:
            recorded = _record(auditor, [each for each in alerts if _name(each) not in told])
        if options.now is None:
            # Whoever asks as if it were another time has not looked for good.
            explained(lambda: index.set_mark(_scope(options), judged.newest))
    # What it has found is no failure of its own.
    options.activity.note(alerts=len(alerts))
    options.activity.succeed()
    if options.json:
        print_json(
            {
                "alerts": [_to_json(each, judged.doubtful) for each in alerts],
                "late": judged.late,
                "now": now_ms,
                "recorded": recorded,
                "run": options.run,
                "since": since_ms,
                "sink": sink.uri,
            }
        )
    else:
        _print(alerts, judged, recorded)
    if judged.is_there or alerts:
        return _FIRED if alerts else 0
    of_run = options.run is not None
    tell(
        f"nothing of run {options.run} is on record in {sink.uri}"
        if of_run
        else f"{sink.uri} holds no audit log"
    )
    return _NOT_FOUND


def _rules(path: Path) -> Rules:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_RULES_BYTES + 1)
        if len(data) > _MAX_RULES_BYTES:
            raise ConfigError(f"{path} has more than {_MAX_RULES_BYTES} bytes, and is no file of rules")
        return Rules.parse(data.decode("utf-8"), str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _moment(told: tuple[str, int] | None, now_ms: int) -> int:
    if told is None:
        return now_ms
    which, ms = told
    return max(0, now_ms - ms) if which == "now" else ms


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """What rules have found.

    Attributes:
        told: names of alerts that are on record already.
        doubtful: of the events that alerts name, those that nobody vouches for, or that stand in a segment
            that was touched.
        late: how many events came only now that are older than was asked for; they are judged too.
        newest: up to which segment that goes.
        is_there: whether the log holds anything that was asked about.
    """

    alerts: list[Alert]
    told: frozenset[str]
    doubtful: frozenset[str]
    late: int
    newest: int
    is_there: bool


def _judge(
    options: argparse.Namespace,
    index: Index,
    vouchers: Vouchers,
    rules: Rules,
    *,
    since_ms: int,
    now_ms: int,
) -> _Judged:
    newest = index.newest
    mark = None if options.now is not None else index.mark(_scope(options))
    earliest = None if mark is None else index.earliest_after(mark)
    trusted = index.trusted(vouchers)
    late: set[str] = set()
    # The event that a rule looks at: each is asked about before the next is taken.
    at: list[Entry] = []

    def events_of(rule: Rule, begin_ms: int) -> Iterator[Recorded]:
        question = Question(
            run=options.run,
            since_ms=begin_ms,
            until_ms=now_ms + 1,
            actions=rule.actions or frozenset(),
            outcomes=rule.outcomes or frozenset(),
        )
        for entry in ask_events(index, question, vouchers=vouchers, is_oldest_first=True):
            if mark is not None and entry.segment_id > mark and entry.recorded.time < since_ms:
                late.add(entry.recorded.id)
            at[:] = [entry]
            yield entry.recorded

    def counts(event: Recorded) -> bool:
        return not at or at[0].recorded is not event or at[0].counts

    def has_ended(writer: str) -> bool:
        for each in index.lasts_of(writer):
            if not (each.problem or each.doubt or each.has_changed) and each.is_certified(trusted):
                return each.is_last
        return False

    period = Period(
        since_ms=since_ms,
        now_ms=now_ms,
        has_ended=has_ended,
        is_late=lambda event: event.id in late,
        counts=counts,
        run=options.run,
        troubles=troubles_of(index, options.run),
    )
    alerts = evaluate(events_of, rules, period, earliest_ms=earliest)
    told = frozenset[str]()
    if options.record:
        told = _told_before(index, since_ms if earliest is None else min(since_ms, earliest))
    named = {event for alert in alerts for event in alert.evidence}
    return _Judged(
        alerts=alerts,
        told=told,
        doubtful=frozenset(event for event in named if _is_doubtful(index, event, trusted)),
        late=len(late),
        newest=newest,
        is_there=index.counts().segments > 0 if options.run is None else is_on_record(index, options.run),
    )


def _is_doubtful(index: Index, event: str, trusted: frozenset[int] | None) -> bool:
    writer, _, seq = event.rpartition("-")
    return any(
        each.is_doubtful or not each.is_certified(trusted) for each in index.segments_of(writer, int(seq))
    )


def _scope(options: argparse.Namespace) -> str:
    """Under which name the index keeps how far was looked."""
    return "alerts" if options.run is None else f"alerts {options.run}"


def _name(alert: Alert) -> str:
    """What an alert is known by when it comes again."""
    shown = alert.evidence[0] if alert.evidence else hashlib.sha256(alert.reason.encode()).hexdigest()[:16]
    return f"{alert.rule} {alert.run or ''} {shown}"


def _told_before(index: Index, since_ms: int) -> frozenset[str]:
    question = Question(actions=frozenset({Action.ALERT.value}), since_ms=since_ms)
    return frozenset(str(entry.recorded.details.get("alert", "")) for entry in ask_events(index, question))


def _record(auditor: Auditor, alerts: Sequence[Alert]) -> int:
    for alert in alerts:
        auditor.record(
            Act(
                action=Action.ALERT,
                phase=Phase.OBSERVED,
                outcome=Outcome.SUCCESS,
                operation=new_operation(),
                run=alert.run,
                reason=alert.reason,
                details={
                    "alert": _name(alert),
                    "evidence": ",".join(alert.evidence),
                    "rule": alert.rule,
                    "severity": alert.severity.value,
                },
            )
        )
    return len(alerts)


def _to_json(alert: Alert, doubtful: frozenset[str]) -> dict[str, Any]:
    return {
        "doubtful": [each for each in alert.evidence if each in doubtful],
        "evidence": list(alert.evidence),
        "reason": alert.reason,
        "rule": alert.rule,
        "run": alert.run,
        "severity": alert.severity.value,
        "time": alert.time,
    }


def _print(alerts: Sequence[Alert], judged: _Judged, recorded: int) -> None:
    console = new_console()
    for alert in alerts:
        where = "" if alert.run is None else f" of run {alert.run}"
        console.print(
            line(
                (alert.severity.value, _STYLES[alert.severity]),
                f" {alert.rule}{where}, {utc(alert.time)} UTC: {alert.reason}",
            ),
            soft_wrap=True,
        )
        if alert.evidence:
            console.print(line(("  see ", "dim"), " ".join(alert.evidence)), soft_wrap=True)
        doubtful = [each for each in alert.evidence if each in judged.doubtful]
        if doubtful:
            console.print(
                line(("  nobody vouches for ", "bold red"), " ".join(doubtful), ", or it was touched"),
                soft_wrap=True,
            )
    if judged.late:
        tell(f"judged besides: {count(judged.late, 'event')} from before, which came only now")
    if recorded:
        tell(f"{count(recorded, 'alert')} put on record")
    if not alerts and judged.is_there:
        console.print(line(("nobody needs to look", "green")))
