"""Early warnings: simple rules over events, each with its reason and the events that show it. Pure.

A rule looks at events once, in the order of their time, keeps little, and says what somebody should look at.
It goes by what was recorded and by nothing else; whether that is all of it, ``strongroom audit verify`` says.
The rules are `alerting.saves` and `alerting.access`, their settings `alerting.settings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from strongroom.auditing import Action, Outcome
from strongroom_security.auditlog.alerting.access import (
    READS,
    break_glass,
    denied_burst,
    log_trouble,
    unusual_reader,
)
from strongroom_security.auditlog.alerting.alert import DAY_MS, HOUR_MS, Alert, Events, Period, Severity
from strongroom_security.auditlog.alerting.saves import (
    failed_saves,
    removed_fast,
    saves_stopped,
    validator_silent,
)
from strongroom_security.auditlog.alerting.settings import Rules
from strongroom_security.auditlog.format.events import Recorded

__all__ = ["RULES", "Alert", "Period", "Rule", "Rules", "Severity", "evaluate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule, and what it needs to see.

    Attributes:
        actions: which events; None: all of them.
        outcomes: likewise.
        looks_back_ms: how far before the period it needs to see, by its settings.
    """

    name: str
    evaluate: Callable[[Events, Any, Period], list[Alert]]
    actions: frozenset[str] | None = None
    outcomes: frozenset[str] | None = None
    looks_back_ms: Callable[[Any], float] = lambda settings: 30 * DAY_MS


def _actions(*actions: Action) -> frozenset[str]:
    return frozenset(each.value for each in actions)


RULES: Final = (
    Rule(name="removed-fast", evaluate=removed_fast, actions=_actions(Action.SAVE, Action.REMOVE)),
    Rule(
        name="validator-silent",
        evaluate=validator_silent,
        actions=_actions(Action.SAVE, Action.VERIFY, Action.RESTORE),
        looks_back_ms=lambda settings: max(30 * DAY_MS, 2 * settings.hours * HOUR_MS),
    ),
    Rule(
        name="unusual-reader",
        evaluate=unusual_reader,
        actions=READS,
        looks_back_ms=lambda settings: settings.baseline_days * DAY_MS,
    ),
    Rule(
        name="denied-burst",
        evaluate=denied_burst,
        outcomes=frozenset({Outcome.DENIED.value}),
        looks_back_ms=lambda settings: settings.minutes * 60_000,
    ),
    Rule(
        name="saves-stopped",
        evaluate=saves_stopped,
        actions=_actions(Action.SAVE),
        looks_back_ms=lambda settings: 2 * settings.forget_days * DAY_MS,
    ),
    Rule(
        name="break-glass",
        evaluate=break_glass,
        actions=_actions(Action.BREAK_GLASS),
        looks_back_ms=lambda settings: 0,
    ),
    Rule(
        name="log-trouble",
        evaluate=log_trouble,
        looks_back_ms=lambda settings: settings.silent_hours * HOUR_MS,
    ),
    Rule(
        name="failed-saves",
        evaluate=failed_saves,
        actions=_actions(Action.SAVE),
        looks_back_ms=lambda settings: DAY_MS,
    ),
)
"""All of them, in the order in which they are told."""


def evaluate(
    events_of: Callable[[Rule, int], Iterable[Recorded]],
    rules: Rules,
    period: Period,
    *,
    earliest_ms: int | None = None,
) -> list[Alert]:
    """What the rules that are on find, the gravest first, then the newest.

    Args:
        events_of: the events that a rule needs to see, from a moment on, in the order of their time. Each is
            looked at once.
        earliest_ms: the time of the earliest event that is late, if any is.
    """
    first_ms = period.since_ms if earliest_ms is None else min(period.since_ms, earliest_ms)
    settings: dict[str, Any] = {rule.name: getattr(rules, rule.name.replace("-", "_")) for rule in RULES}
    found: list[Alert] = []
    for rule in RULES:
        set_to = settings[rule.name]
        if set_to.enabled:
            begin = max(0, int(first_ms - rule.looks_back_ms(set_to)))
            found += rule.evaluate(events_of(rule, begin), set_to, period)
    order = [Severity.HIGH, Severity.MEDIUM, Severity.LOW]
    return sorted(found, key=lambda alert: (order.index(alert.severity), -alert.time, alert.rule))
