"""Early warnings: each rule fires for what it is about, says why, names the events, and else stays silent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from happenings import DAY, HOUR, MINUTE, NOW, RUN, SECOND, TRAINER, VALIDATOR, Log, name

from strongroom.auditing import Action, Outcome, Phase
from strongroom.errors import ConfigError
from strongroom_security.auditlog.alerting.rules import RULES, Alert, Period, Rule, Rules, Severity, evaluate
from strongroom_security.auditlog.alerting.settings import SECTIONS
from strongroom_security.auditlog.format.events import Recorded

SINCE = NOW - DAY


def alerts_of(log: Log, rules: str = "", *, ended: Iterable[str] = ()) -> list[Alert]:
    ordered = sorted(log.events, key=lambda event: event.time)

    def events_of(rule: Rule, begin_ms: int) -> list[Recorded]:
        # What an index would give, and no more: a rule that needs others says so.
        return [
            event
            for event in ordered
            if event.time >= begin_ms
            and (rule.actions is None or event.action in rule.actions)
            and (rule.outcomes is None or event.outcome in rule.outcomes)
        ]

    period = Period(since_ms=SINCE, now_ms=NOW, has_ended=lambda writer: writer in ended)
    return evaluate(events_of, Rules.parse(rules, "rules.toml"), period)


def only(log: Log, rule: str, rules: str = "", *, ended: Iterable[str] = ()) -> Alert:
    (alert,) = [alert for alert in alerts_of(log, rules, ended=ended) if alert.rule == rule]
    return alert


def names_of(log: Log, rules: str = "", *, ended: Iterable[str] = ()) -> set[str]:
    return {alert.rule for alert in alerts_of(log, rules, ended=ended)}


def usual_run(*, until: int = NOW - MINUTE) -> Log:
    """Ten days of a run: a checkpoint an hour, the one of a day before removed, each third validated."""
    log = Log()
    for hour in range(240, -1, -1):
        at, step = until - hour * HOUR, 1000 - hour
        log.save(step, at=at)
        if hour % 3 == 0:
            log.read(step, at=at + SECOND)
            log.tell(Action.VERIFY, at=at + 2 * SECOND, by=VALIDATOR, checkpoint=name(step))
        if hour <= 216:
            log.tell(Action.REMOVE, at=at + 3 * SECOND, checkpoint=name(step - 24), kind="checkpoint")
    return log


def test_a_run_that_goes_as_it_should_alerts_nobody() -> None:
    assert alerts_of(usual_run()) == []


def test_nothing_on_record_alerts_nobody() -> None:
    assert alerts_of(Log()) == []


# -------------------------------------------------------------------------------------------- removed-fast


def test_removing_faster_than_the_run_usually_does_is_told_with_its_numbers() -> None:
    log = usual_run()
    ids = [
        log.tell(
            Action.REMOVE, at=NOW - 30 * MINUTE + n * SECOND, checkpoint=name(977 + n), kind="checkpoint"
        )
        for n in range(12)
    ]
    alert = only(log, "removed-fast")
    assert (alert.run, alert.severity) == (RUN, Severity.HIGH)
    assert "within one hour; expected at most 10: the median of the hours before is 1" in alert.reason
    assert set(ids) <= set(alert.evidence)


def test_without_a_past_only_the_ceiling_counts() -> None:
    log = Log()
    for n in range(60):
        log.tell(Action.REMOVE, at=NOW - 20 * MINUTE + n * SECOND, checkpoint=name(n), kind="checkpoint")
    assert "removed-fast" not in names_of(log)
    assert "expected at most 50" in only(log, "removed-fast", "[removed-fast]\nper_hour = 50").reason


def test_what_dead_saves_left_and_what_one_removal_tells_twice_do_not_count_as_checkpoints() -> None:
    log = usual_run()
    for n in range(40):
        log.tell(Action.REMOVE, at=NOW - 30 * MINUTE, checkpoint=name(5000 + n), kind="orphan")
        log.tell(Action.REMOVE, at=NOW - 30 * MINUTE, checkpoint=name(977), kind="checkpoint")
    assert "removed-fast" not in names_of(log)


def test_removing_the_newest_checkpoint_is_told_at_once() -> None:
    log = usual_run()
    told = log.tell(Action.REMOVE, at=NOW - SECOND, checkpoint=name(1000), kind="checkpoint")
    alert = only(log, "removed-fast")
    assert alert.evidence == (told,)
    assert "the newest checkpoint on record" in alert.reason


def test_a_launch_that_leaves_many_checkpoints_behind_is_told() -> None:
    log = usual_run()
    log.save(985, at=NOW - 30 * SECOND, launch=2)
    alert = only(log, "removed-fast")
    assert "launch 2 went on at step 985 and left 16 newer checkpoints behind" in alert.reason
    few = usual_run()
    few.save(995, at=NOW - 30 * SECOND, launch=2)
    assert "removed-fast" not in names_of(few)


# ---------------------------------------------------------------------------------------- validator-silent


def silent(commits: int, *, validated: bool = True, every: int = MINUTE) -> Log:
    log = Log()
    log.save(1, at=NOW - commits * every - HOUR)
    if validated:
        log.read(1, at=NOW - commits * every - 30 * MINUTE)
    for n in range(commits):
        log.save(2 + n, at=NOW - (commits - n) * every)
    return log


def test_commits_that_nobody_looks_at_any_more_are_told() -> None:
    assert "validator-silent" not in names_of(silent(49))
    alert = only(silent(50), "validator-silent")
    assert "50 checkpoints were committed since a validator last looked" in alert.reason
    assert len(alert.evidence) == 20


def test_too_long_a_silence_is_told_however_few_were_committed() -> None:
    assert "validator-silent" in names_of(silent(3, every=9 * HOUR))
    assert "validator-silent" not in names_of(silent(3, every=9 * HOUR), "[validator-silent]\nhours = 72")


def test_where_nobody_ever_validated_it_is_told_only_if_it_must_be() -> None:
    log = silent(80, validated=False)
    assert "validator-silent" not in names_of(log)
    assert "(never)" in only(log, "validator-silent", "[validator-silent]\nrequired = true").reason


def test_a_trainers_own_restore_is_no_validation() -> None:
    log = silent(60)
    log.read(60, at=NOW - SECOND, by=TRAINER)
    assert "validator-silent" in names_of(log)
    named = f'[validator-silent]\nactors = ["{TRAINER.identity}"]'
    assert "validator-silent" not in names_of(log, named)


# ------------------------------------------------------------------------------------------ unusual-reader


def test_a_reader_who_never_read_this_run_is_told_with_where_from() -> None:
    log = usual_run()
    stranger = replace(
        VALIDATOR,
        identity="arn:aws:iam::111122223333:user/mallory",
        role=None,
        ip="198.51.100.9",
        host="laptop",
    )
    told = log.read(990, at=NOW - 10 * MINUTE, by=stranger)
    found = [alert for alert in alerts_of(log) if alert.rule == "unusual-reader"]
    assert len(found) == 2  # a new identity, and one without a role
    assert all(told in alert.evidence and "198.51.100.9" in alert.reason for alert in found)
    assert any("identity 111122223333:user/mallory had not read this run" in alert.reason for alert in found)


def test_another_session_of_the_same_role_is_usual() -> None:
    log = usual_run()
    again = replace(
        VALIDATOR, identity="arn:aws:sts::111122223333:assumed-role/validator-reader/job-99", host="x"
    )
    log.read(990, at=NOW - 10 * MINUTE, by=again)
    assert "unusual-reader" not in names_of(log)
    assert "host x had not read" in only(log, "unusual-reader", '[unusual-reader]\nby = ["host"]').reason


def test_who_is_not_on_the_list_is_unusual_whatever_was_before() -> None:
    log = usual_run()
    log.read(999, at=NOW - 10 * MINUTE)
    alert = only(log, "unusual-reader", '[unusual-reader]\nroles = ["auditor"]')
    assert "role validator-reader is not among those that may" in alert.reason


def test_a_run_that_has_hardly_been_read_has_no_unusual_readers() -> None:
    log = Log()
    log.read(1, at=NOW - 3 * DAY)
    log.read(1, at=NOW - HOUR, by=TRAINER)
    assert "unusual-reader" not in names_of(log)


# -------------------------------------------------------------------------------------------- denied-burst


def test_a_burst_of_denials_is_told_of_whoever_it_is() -> None:
    log = Log()
    for n in range(5):
        log.tell(
            Action.RESTORE,
            outcome=Outcome.DENIED,
            at=NOW - HOUR + n * MINUTE,
            run=f"run-{n}",
            reason="no key",
        )
    alert = only(log, "denied-burst")
    assert alert.run is None
    assert "111122223333:role/trainer-writer was refused 5 times within 10 min (restore)" in alert.reason


def test_denials_that_come_slowly_or_of_many_are_no_burst() -> None:
    log = Log()
    for n in range(12):
        log.tell(Action.RESTORE, outcome=Outcome.DENIED, at=NOW - 20 * HOUR + n * HOUR)
        other = replace(TRAINER, identity=None, user=f"user-{n}")
        log.tell(Action.RESTORE, outcome=Outcome.DENIED, at=NOW - HOUR, by=other)
    assert "denied-burst" not in names_of(log)


# ------------------------------------------------------------------------------------------- saves-stopped


def test_a_run_whose_saves_stopped_is_told() -> None:
    alert = only(usual_run(until=NOW - 6 * HOUR), "saves-stopped")
    assert "was committed 6.0 h ago; they came every 60 min" in alert.reason
    assert "saves-stopped" not in names_of(usual_run(until=NOW - 4 * HOUR))


def test_a_run_that_has_ended_has_not_stopped() -> None:
    assert "saves-stopped" not in names_of(usual_run(until=NOW - 6 * HOUR), ended=["a" * 32])


def test_a_run_that_stopped_long_ago_is_let_rest() -> None:
    assert "saves-stopped" not in names_of(usual_run(until=NOW - 8 * DAY))


# --------------------------------------------------------------------------------------------- break-glass


def test_each_use_of_a_grant_is_told_once() -> None:
    log = Log()
    for operation in ("1" * 16, "2" * 16):
        log.tell(
            Action.BREAK_GLASS,
            Phase.INTENDED,
            at=NOW - HOUR,
            operation=operation,
            checkpoint=name(3),
            by=VALIDATOR,
        )
        log.tell(
            Action.BREAK_GLASS, at=NOW - HOUR + SECOND, operation=operation, checkpoint=name(3), by=VALIDATOR
        )
    found = [alert for alert in alerts_of(log) if alert.rule == "break-glass"]
    assert [len(alert.evidence) for alert in found] == [2, 2]
    assert all("used by 111122223333:role/validator-reader from 192.0.2.2" in alert.reason for alert in found)


# --------------------------------------------------------------------------------------------- log-trouble


def test_lost_events_are_told_with_how_many() -> None:
    log = Log()
    log.tell(
        Action.AUDIT,
        Phase.OBSERVED,
        Outcome.FAILURE,
        at=NOW - HOUR,
        reason="9 events found no room",
        lost_events=9,
        lost_save=9,
    )
    alert = only(log, "log-trouble")
    assert alert.severity is Severity.HIGH
    assert "9 events were lost by the writer on node-1, process 1: 9 events found no room" in alert.reason


def test_a_writer_that_fell_silent_without_an_end_is_told_once() -> None:
    log = Log()
    log.save(1, at=NOW - 30 * HOUR, writer="b" * 32)
    assert "has not ended" in only(log, "log-trouble").reason
    assert "log-trouble" not in names_of(log, ended=["b" * 32])
    earlier = Log()
    earlier.save(1, at=NOW - 50 * HOUR, writer="b" * 32)
    assert "log-trouble" not in names_of(earlier)  # whoever asked yesterday was told


# -------------------------------------------------------------------------------------------- failed-saves


def test_saves_that_fail_in_a_row_are_told_however_many_ranks_tell_of_each() -> None:
    log = Log()
    for step in (1, 2):
        for _rank in range(8):
            log.tell(
                Action.SAVE,
                outcome=Outcome.FAILURE,
                at=NOW - HOUR + step * MINUTE,
                checkpoint=name(step),
                operation=name(step).attempt,
                reason="no space left",
            )
    assert "failed-saves" not in names_of(log)
    log.tell(
        Action.SAVE, outcome=Outcome.FAILURE, at=NOW - MINUTE, checkpoint=name(3), reason="no space left"
    )
    alert = only(log, "failed-saves")
    assert "3 saves failed in a row; expected fewer than 3; the last: no space left" in alert.reason


def test_a_save_that_came_off_ends_a_row() -> None:
    log = Log()
    for step in range(1, 9):
        if step % 3 == 0:
            log.save(step, at=NOW - HOUR + step * MINUTE)
        else:
            log.tell(
                Action.SAVE, outcome=Outcome.FAILURE, at=NOW - HOUR + step * MINUTE, checkpoint=name(step)
            )
    assert "failed-saves" not in names_of(log)


def test_commits_that_were_found_later_are_told() -> None:
    log = Log()
    told = log.tell(Action.SAVE, Phase.OBSERVED, at=NOW - HOUR, checkpoint=name(7))
    alert = only(log, "failed-saves")
    assert alert.evidence == (told,)
    assert "1 commits were found by a later launch" in alert.reason
    log.save(7, at=NOW - 2 * HOUR)  # its own record came after all
    assert "failed-saves" not in names_of(log)


# --------------------------------------------------------------------------------------------- the settings


def test_every_rule_has_a_section_and_can_be_turned_off() -> None:
    assert {rule.name for rule in RULES} == set(SECTIONS)
    log = usual_run(until=NOW - 6 * HOUR)
    log.tell(Action.BREAK_GLASS, at=NOW - HOUR)
    assert names_of(log) == {"saves-stopped", "break-glass"}
    off = "".join(f"[{rule.name}]\nenabled = false\n" for rule in RULES)
    assert alerts_of(log, off) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    (
        ("[brake-glass]\n", r"rules\.toml:1: there is no rule 'brake-glass'; expected one of removed-fast"),
        ("[denied-burst]\nminutes = 5\nmany = 3\n", r"rules\.toml:3: \[denied-burst\] has no member 'many'"),
        ("\n[denied-burst]\ndenials = 0\n", r"rules\.toml:3: .*expected a whole number from 1, got 0"),
        ("[denied-burst]\ndenials = true\n", r":2: .*expected a whole number"),
        ("[saves-stopped]\nfactor = nan\n", r":2: .*expected a number above 0, got nan"),
        ("[saves-stopped]\nenabled = 1\n", r":2: .*expected true or false"),
        ('[unusual-reader]\nby = ["rolle"]\n', r":2: .*expected some of role, identity, user, host"),
        ('[unusual-reader]\nroles = "a"\n', r":2: .*expected a list of texts"),
        ("denied-burst = 3\n", r":1: a rule is a section: write \[denied-burst\]"),
        ("[denied-burst\n", r"rules\.toml is not TOML"),
    ),
)
def test_a_wrong_setting_is_told_with_its_line(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Rules.parse(text, "rules.toml")


# ------------------------------------------------------------------------ what came late, and who is believed


def with_late(log: Log, late: Iterable[str], *, uncounted: Iterable[str] = ()) -> set[str]:
    """Which rules fire where some events came only now, and some count for nothing."""
    ordered = sorted(log.events, key=lambda event: event.time)
    period = Period(
        since_ms=SINCE,
        now_ms=NOW,
        is_late=lambda event: event.id in set(late),
        counts=lambda event: event.id not in set(uncounted),
    )
    earliest = min((event.time for event in ordered if event.id in set(late)), default=None)

    def events_of(rule: Rule, begin_ms: int) -> Iterable[Recorded]:
        # Once, as an index gives them.
        return (
            event
            for event in ordered
            if event.time >= begin_ms
            and (rule.actions is None or event.action in rule.actions)
            and (rule.outcomes is None or event.outcome in rule.outcomes)
        )

    return {alert.rule for alert in evaluate(events_of, Rules(), period, earliest_ms=earliest)}


def test_what_is_older_than_was_asked_for_and_came_only_now_is_judged() -> None:
    log = Log()
    log.tell(Action.LIST, at=NOW - MINUTE)  # who recorded it is still there
    at = SINCE - 2 * SECOND
    late = [log.tell(Action.BREAK_GLASS, at=at, checkpoint=name(3), by=VALIDATOR)]
    late.append(log.tell(Action.AUDIT, Phase.OBSERVED, Outcome.FAILURE, at=at, lost_events=3))
    late += [log.tell(Action.SAVE, outcome=Outcome.FAILURE, at=at, checkpoint=name(n)) for n in range(3)]
    assert with_late(log, []) == set()
    assert with_late(log, late) == {"break-glass", "log-trouble", "failed-saves"}


def test_a_burst_of_which_a_part_came_late_or_before_is_one() -> None:
    log = Log()
    log.tell(Action.LIST, at=NOW - MINUTE)
    ids = [log.tell(Action.RESTORE, outcome=Outcome.DENIED, at=SINCE - HOUR + n * MINUTE) for n in range(5)]
    assert with_late(log, []) == set()
    assert with_late(log, ids[-1:]) == {"denied-burst"}
    over = Log()
    for n in range(5):  # the last is within what was asked for
        over.tell(Action.RESTORE, outcome=Outcome.DENIED, at=SINCE - 4 * MINUTE + n * MINUTE)
    assert "denied-burst" in with_late(over, [])
    before = Log()
    for n in range(5):  # whoever asked an hour ago was told
        before.tell(Action.RESTORE, outcome=Outcome.DENIED, at=SINCE - 9 * MINUTE + n * MINUTE)
    assert "denied-burst" not in with_late(before, [])


def test_a_reader_who_is_told_of_late_is_unusual_and_not_the_usual() -> None:
    log = usual_run()
    stranger = replace(VALIDATOR, identity="arn:aws:iam::111122223333:user/mallory")
    told = log.read(900, at=SINCE - HOUR, by=stranger)
    assert "unusual-reader" in with_late(log, [told])


def test_checkpoints_whose_removal_is_told_of_late_were_removed_fast() -> None:
    log = usual_run()
    at = SINCE - 30 * MINUTE
    late = [
        log.tell(Action.REMOVE, at=at + n * SECOND, checkpoint=name(970 + n), kind="checkpoint")
        for n in range(12)
    ]
    assert "removed-fast" in with_late(log, late)


def test_who_nobody_vouches_for_keeps_no_rule_silent() -> None:
    log = silent(60)
    made_up = log.tell(Action.VERIFY, at=NOW - SECOND, by=VALIDATOR, checkpoint=name(60))
    assert "validator-silent" not in with_late(log, [])
    assert "validator-silent" in with_late(log, [], uncounted=[made_up])
    stopped = usual_run(until=NOW - 6 * HOUR)
    made_up = stopped.save(1001, at=NOW - MINUTE)
    assert "saves-stopped" not in with_late(stopped, [])
    assert "saves-stopped" in with_late(stopped, [], uncounted=[made_up])
    failed = Log()
    for n in range(2):
        failed.tell(Action.SAVE, outcome=Outcome.FAILURE, at=NOW - HOUR + n * SECOND, checkpoint=name(n))
    made_up = failed.save(7, at=NOW - 30 * MINUTE)
    failed.tell(Action.SAVE, outcome=Outcome.FAILURE, at=NOW - MINUTE, checkpoint=name(9))
    assert "failed-saves" not in with_late(failed, [])
    assert "failed-saves" in with_late(failed, [], uncounted=[made_up])
    silent_writer = Log()
    silent_writer.save(1, at=NOW - 30 * HOUR, writer="b" * 32)
    made_up = silent_writer.tell(Action.LIST, at=NOW - MINUTE, writer="b" * 32)
    assert "log-trouble" not in with_late(silent_writer, [])
    assert "log-trouble" in with_late(silent_writer, [], uncounted=[made_up])


def test_a_past_that_anybody_can_make_up_makes_nobody_usual() -> None:
    log = usual_run()
    stranger = replace(VALIDATOR, identity="arn:aws:iam::111122223333:user/mallory")
    log.read(800, at=SINCE - DAY, by=stranger)
    made_up = [event.id for event in log.events[-2:]]
    log.read(990, at=NOW - HOUR, by=stranger)
    assert "unusual-reader" not in with_late(log, [])
    assert "unusual-reader" in with_late(log, [], uncounted=made_up)
