"""What ``strongroom audit alerts`` does and tells; what the rules look at is `auditlog.alerts`'."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from strongroom.auditing import Act, Action, Auditor, Outcome, Phase, new_operation
from strongroom.config import SYSTEM_CLOCK
from strongroom.errors import ConfigError
from strongroom.stores.base import Store
from strongroom_cli.audit_log import asked, open_index, sink_of, tell
from strongroom_cli.console import line, new_console, print_json
from strongroom_cli.reconciled import utc
from strongroom_cli.words import count
from strongroom_security.auditlog.alerts import Alert, Period, Rule, Rules, Severity, evaluate
from strongroom_security.auditlog.events import Recorded
from strongroom_security.auditlog.index import Index
from strongroom_security.auditlog.listing import read_segments
from strongroom_security.auditlog.queries import Question, ask_events
from strongroom_security.auditlog.segments import read_segment

__all__ = ["run"]

_FIRED: Final = 1
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
    with open_index(options, sink) as index:
        period = Period(since_ms=since_ms, now_ms=now_ms, has_ended=_ended(index, sink))
        (alerts, told), _ = asked(
            options,
            index,
            sink,
            lambda: (
                evaluate(_events_of(index, options.run, now_ms), rules, period),
                _told_before(index, since_ms) if options.record else frozenset(),
            ),
        )
    recorded = 0
    if options.record and auditor is not None:
        recorded = _record(auditor, [each for each in alerts if _name(each) not in told])
    # What it has found is no failure of its own.
    options.activity.note(alerts=len(alerts))
    options.activity.succeed()
    if options.json:
        print_json(
            {
                "alerts": [_to_json(each) for each in alerts],
                "now": now_ms,
                "recorded": recorded,
                "run": options.run,
                "since": since_ms,
                "sink": sink.uri,
            }
        )
    else:
        _print(alerts, recorded)
    return _FIRED if alerts else 0


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


def _events_of(index: Index, run: str | None, now_ms: int) -> Callable[[Rule, int], list[Recorded]]:
    def events_of(rule: Rule, begin_ms: int) -> list[Recorded]:
        question = Question(
            run=run,
            since_ms=begin_ms,
            until_ms=now_ms + 1,
            actions=rule.actions or frozenset(),
            outcomes=rule.outcomes or frozenset(),
        )
        found = [entry.recorded for entry in ask_events(index, question)]
        found.reverse()  # they come with the newest first
        return found

    return events_of


def _ended(index: Index, sink: Store) -> Callable[[str], bool]:
    """Whether a writer has ended, by its last segment; read for the few of which a rule asks."""
    lasts: dict[str, tuple[int, str]] = {}

    def has_ended(writer: str) -> bool:
        if not lasts:
            for segment in index.segments().values():
                lasts[segment.writer] = max(lasts.get(segment.writer, (0, "")), (segment.number, segment.key))
        _, key = lasts.get(writer, (0, ""))
        if not key:
            return False
        for _, data in read_segments(sink, [key]):
            if not isinstance(data, str):
                close = read_segment(key, data, is_canonical=False).close
                return close is not None and close.is_last
        return False

    return has_ended


def _name(alert: Alert) -> str:
    """What an alert is known by when it comes again."""
    return f"{alert.rule} {alert.run or ''} {alert.evidence[0] if alert.evidence else ''}"


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


def _to_json(alert: Alert) -> dict[str, Any]:
    return {
        "evidence": list(alert.evidence),
        "reason": alert.reason,
        "rule": alert.rule,
        "run": alert.run,
        "severity": alert.severity.value,
        "time": alert.time,
    }


def _print(alerts: Sequence[Alert], recorded: int) -> None:
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
    if recorded:
        tell(f"{count(recorded, 'alert')} put on record")
    if not alerts:
        console.print(line(("nobody needs to look", "green")))
