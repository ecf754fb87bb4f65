"""Who read this checkpoint, when and from where; what happened to this run: answered, and by an index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from log_making import (
    TIME_MS,
    VOUCHERS,
    actor,
    certificate,
    key_of,
    sink_with,
)

from strongroom.auditing import Act, Action, Outcome, Phase
from strongroom.layout import CheckpointName
from strongroom_security.auditlog.asking.index import Index
from strongroom_security.auditlog.asking.indexing import refresh
from strongroom_security.auditlog.asking.queries import (
    READS,
    WRITES,
    Operation,
    Question,
    ask_events,
    ask_operations,
    statement_of,
)
from strongroom_security.auditlog.format.segments import SegmentChain
from strongroom_security.auditlog.verifying.trusting import Vouchers

HOUR_MS = 3_600_000

TRAINER = actor("ada")
READER = actor(
    "bob", host="laptop", ip="10.9.9.9", role="validator-reader", identity="arn:aws:iam::1:user/bob", pid=7
)
THIEF = actor("eve", host="attic", ip=None, role=None, identity=None, job={}, rank=None, pid=666)


def step(number: int) -> CheckpointName:
    return CheckpointName(launch=1, step=number, attempt="a" * 16)


def did(action: Action, phase: Phase, outcome: Outcome, operation: int, **more: Any) -> Act:
    known: dict[str, Any] = {
        "action": action,
        "phase": phase,
        "outcome": outcome,
        "operation": f"{operation:016x}",
        "root": "s3://bucket/runs/a",
        "run": "run-a",
    }
    return Act(**(known | more))


def story() -> list[tuple[int, Any, Act]]:
    """Hours, actors and acts: a day of a run."""
    save, restore = Action.SAVE, Action.RESTORE
    return [
        (0, TRAINER, did(save, Phase.STARTED, Outcome.UNKNOWN, 1, checkpoint=step(100))),
        (0, TRAINER, did(save, Phase.FINISHED, Outcome.SUCCESS, 1, checkpoint=step(100))),
        (5, READER, did(restore, Phase.INTENDED, Outcome.UNKNOWN, 2, checkpoint=step(100))),
        (5, READER, did(Action.UNWRAP, Phase.FINISHED, Outcome.SUCCESS, 3, checkpoint=step(100))),
        (6, READER, did(restore, Phase.FINISHED, Outcome.SUCCESS, 2, checkpoint=step(100))),
        (20, THIEF, did(Action.EXPORT, Phase.INTENDED, Outcome.UNKNOWN, 4, checkpoint=step(100))),
        (
            20,
            THIEF,
            did(Action.EXPORT, Phase.FINISHED, Outcome.DENIED, 4, checkpoint=step(100), reason="no key"),
        ),
        (21, THIEF, did(Action.LIST, Phase.FINISHED, Outcome.DENIED, 5)),
        (22, READER, did(restore, Phase.INTENDED, Outcome.UNKNOWN, 6, checkpoint=step(200))),
        (23, TRAINER, did(Action.REMOVE, Phase.FINISHED, Outcome.SUCCESS, 7, checkpoint=step(100))),
        (24, TRAINER, did(save, Phase.FINISHED, Outcome.SUCCESS, 8, run="run-b", checkpoint=step(100))),
    ]


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """Each actor is a process of its own, with a writer of its own."""
    segments: dict[str, bytes] = {}
    for number, who in enumerate((TRAINER, READER, THIEF), 1):
        for run in ("run-a", "run-b"):
            chain = SegmentChain(key_of(f"{number}{run[-1]}".rjust(32, "0"), run, number))
            lines = [chain.open(time_ms=TIME_MS, certificate=None)]
            lines += [
                chain.add(act, who, time_ms=TIME_MS + hour * HOUR_MS)
                for hour, by, act in story()
                if by is who and act.run == run
            ]
            segments[chain.key] = b"".join([*lines, chain.close(time_ms=TIME_MS)])
    sink = sink_with(segments, has_tree=False)
    with Index(tmp_path / "index.sqlite", sink=sink.uri) as made:
        refresh(made, sink)
        yield made


def told(operations: Iterable[Operation]) -> list[tuple[str, str, str]]:
    return [(each.begin.action, each.outcome, each.begin.user) for each in operations]


READ_IT = Question(run="run-a", step=100, actions=READS, or_intended=True)


def test_who_read_this_checkpoint_when_and_from_where(index: Index) -> None:
    found = list(ask_operations(index, READ_IT))
    assert told(found) == [
        ("export", "denied", "eve"),
        ("restore", "success", "bob"),
        ("unwrap", "success", "bob"),
    ]
    said = found[1].to_json()
    assert (said["begun"], said["ended"]) == (TIME_MS + 5 * HOUR_MS, TIME_MS + 6 * HOUR_MS)
    assert (said["host"], said["ip"], said["identity"]) == ("laptop", "10.9.9.9", "arn:aws:iam::1:user/bob")
    assert len(said["events"]) == 2
    assert said["sequenced"] is False


def test_a_read_of_which_no_end_is_known_is_told(index: Index) -> None:
    (found,) = ask_operations(index, Question(run="run-a", step=200))
    assert (found.outcome, found.end, found.begin.action) == ("unknown", None, "restore")


def test_what_happened_to_this_run_in_some_hours(index: Index) -> None:
    since = Question(run="run-a", since_ms=TIME_MS + 20 * HOUR_MS, until_ms=TIME_MS + 23 * HOUR_MS)
    assert told(ask_operations(index, since)) == [
        ("restore", "unknown", "bob"),
        ("list", "denied", "eve"),
        ("export", "denied", "eve"),
    ]


def test_an_operation_is_told_whole_though_only_its_end_was_asked_for(index: Index) -> None:
    (found,) = ask_operations(index, Question(outcomes=frozenset(["denied"]), actions=frozenset(["export"])))
    assert [entry.recorded.phase for entry in found.entries] == ["intended", "finished"]


@pytest.mark.parametrize(
    ("question", "expected"),
    (
        (Question(actor="eve"), 3),
        (Question(actor="laptop"), 4),
        (Question(actor="user/bob"), 4),
        (Question(actor="nobody"), 0),
        (Question(host="attic"), 3),
        (Question(role="validator-reader"), 4),
        (Question(role="validator-reader", host="attic"), 0),
        (Question(outcomes=frozenset(["denied"])), 2),
        (Question(outcomes=frozenset(["denied", "success"]), actor="eve"), 2),
        (Question(actions=WRITES), 4),
        (Question(run="run-b"), 1),
        (Question(run="run-a", launch=2), 0),
        (Question(run="run-a' OR 1=1 --"), 0),
        (Question(), 11),
    ),
)
def test_questions_are_as_narrow_as_they_say(index: Index, question: Question, expected: int) -> None:
    assert len(list(ask_events(index, question))) == expected


def test_so_many_rows_are_the_newest(index: Index) -> None:
    assert told(ask_operations(index, Question(run="run-a"), limit=2)) == [
        ("remove", "success", "ada"),
        ("restore", "unknown", "bob"),
    ]
    assert [each.recorded.action for each in ask_events(index, Question(), limit=1)] == ["save"]


def test_two_processes_that_call_their_operations_the_same_are_told_apart(tmp_path: Path) -> None:
    segments = {}
    for number, who in enumerate((READER, THIEF), 1):
        chain = SegmentChain(key_of(f"{number:032x}", "run-a", number))
        lines = [chain.open(time_ms=TIME_MS, certificate=None)]
        lines.append(
            chain.add(did(Action.READ, Phase.FINISHED, Outcome.SUCCESS, 1), who, time_ms=TIME_MS + number)
        )
        segments[chain.key] = b"".join([*lines, chain.close(time_ms=TIME_MS)])
    sink = sink_with(segments, has_tree=False)
    with Index(tmp_path / "index.sqlite", sink=sink.uri) as made:
        refresh(made, sink)
        assert told(ask_operations(made, Question())) == [
            ("read", "success", "eve"),
            ("read", "success", "bob"),
        ]


@pytest.mark.parametrize(
    ("question", "by"),
    (
        (READ_IT, "events_checkpoint (run=? AND step=?)"),
        (Question(run="run-a", since_ms=1), "events_run (run=? AND time>?)"),
        (Question(run="run-a", since_ms=1, until_ms=2), "events_run (run=? AND time>? AND time<?)"),
        (Question(run="run-a", step=100), "events_checkpoint (run=? AND step=?)"),
        (Question(actor="eve"), "events_actor (actor=?)"),
        (Question(actor="eve", since_ms=1), "events_actor (actor=? AND time>?)"),
        (Question(outcomes=frozenset(["denied"]), since_ms=1), "events_outcome (outcome=? AND time>?)"),
        (Question(actions=frozenset(["remove"]), since_ms=1), "events_action (action=? AND time>?)"),
        (Question(since_ms=1), "events_time (time>?)"),
    ),
)
def test_no_question_looks_at_every_event(index: Index, question: Question, by: str) -> None:
    """The plan of a statement is what makes it quick with a million events."""
    statement, values = statement_of(question, "e.operation, s.writer")
    plan = [row[3] for row in index.select(f"EXPLAIN QUERY PLAN {statement}", values)]
    assert f"SEARCH e USING INDEX {by}" in plan
    assert not any(step.startswith(("SCAN e", "SCAN s")) for step in plan)


# ------------------------------------------------------------------------ one operation, and whose it is


def indexed(path: Path, *chains: tuple[Any, list[tuple[Any, Act]]], vouched: bool = True) -> Index:
    """An index of writers, each with one segment of these events by these actors."""
    segments: dict[str, bytes] = {}
    for key, events in chains:
        chain = SegmentChain(key)
        lines = [chain.open(time_ms=TIME_MS, certificate=certificate(key) if vouched else None)]
        lines += [chain.add(act, who, time_ms=TIME_MS + at) for at, (who, act) in enumerate(events)]
        segments[chain.key] = b"".join([*lines, chain.close(time_ms=TIME_MS)])
    sink = sink_with(segments, has_tree=False)
    made = Index(path / "index.sqlite", sink=sink.uri)
    refresh(made, sink)
    return made


def intent(**more: Any) -> Act:
    return did(Action.RESTORE, Phase.INTENDED, Outcome.UNKNOWN, 9, **more)


def ending(outcome: Outcome = Outcome.SUCCESS, **more: Any) -> Act:
    return did(Action.RESTORE, Phase.FINISHED, outcome, 9, **more)


ONE = actor("bob", host="node-7", pid=1)
"""As `key_of` opens segments: process 1 of node-7."""


def of_process(number: int, run: str | None, pid: int = 1) -> Any:
    return replace(key_of(f"{number:032x}", run, pid), private=key_of("0" * 32, None, number).private)


def test_an_operation_that_spans_two_writers_of_one_process_is_told_once(tmp_path: Path) -> None:
    first = (of_process(1, None), [(ONE, intent(run=None))])
    second = (of_process(2, "run-a"), [(ONE, ending())])
    with indexed(tmp_path, first, second) as index:
        for vouchers in (VOUCHERS, Vouchers()):
            (found,) = ask_operations(index, Question(), vouchers=vouchers)
            assert [each.recorded.phase for each in found.entries] == ["intended", "finished"]
            assert found.outcome == "success"


@pytest.mark.parametrize("pid", (1, 2))
def test_another_process_cannot_say_how_an_operation_ended(tmp_path: Path, pid: int) -> None:
    """Nor one that says it is the same, where it is known who vouches for writers."""
    first = (of_process(1, "run-a"), [(ONE, intent())])
    other = (of_process(2, "run-a", pid=2), [(replace(ONE, pid=pid), ending(Outcome.DENIED))])
    with indexed(tmp_path, first, other) as index:
        assert sorted(each.outcome for each in ask_operations(index, Question())) == ["denied", "unknown"]


def test_who_is_not_vouched_for_cannot_say_how_an_operation_of_who_is_ended(tmp_path: Path) -> None:
    forger = SegmentChain(of_process(2, "run-a"))
    lines = [forger.open(time_ms=TIME_MS, certificate=None)]
    lines.append(forger.add(ending(Outcome.DENIED), ONE, time_ms=TIME_MS + 5))
    honest = of_process(1, "run-a")
    chain = SegmentChain(honest)
    whole = [chain.open(time_ms=TIME_MS, certificate=certificate(honest))]
    whole += [chain.add(each, ONE, time_ms=TIME_MS) for each in (intent(), ending())]
    segments = {
        forger.key: b"".join([*lines, forger.close(time_ms=TIME_MS)]),
        chain.key: b"".join([*whole, chain.close(time_ms=TIME_MS)]),
    }
    sink = sink_with(segments, has_tree=False)
    with Index(tmp_path / "index.sqlite", sink=sink.uri) as index:
        refresh(index, sink)
        found = ask_operations(index, Question(), vouchers=VOUCHERS)
        told = {each.outcome: each.is_certified for each in found}
        assert told == {"success": True, "denied": False}


def test_a_forged_segment_under_a_writers_name_joins_none_of_its_operations(tmp_path: Path) -> None:
    honest = of_process(1, "run-a")
    chain = SegmentChain(honest)
    whole = [chain.open(time_ms=TIME_MS, certificate=None)]
    whole += [chain.add(each, ONE, time_ms=TIME_MS) for each in (intent(), ending())]
    forger = SegmentChain(replace(honest, private=key_of("0" * 32, None, 9).private))
    forger._segment, forger._seq = 98, 500
    lines = [forger.open(time_ms=TIME_MS, certificate=None)]
    lines.append(forger.add(ending(Outcome.DENIED), ONE, time_ms=TIME_MS + 1000))
    segments = {
        chain.key: b"".join([*whole, chain.close(time_ms=TIME_MS)]),
        forger.key: b"".join([*lines, forger.close(time_ms=TIME_MS)]),
    }
    sink = sink_with(segments, has_tree=False)
    with Index(tmp_path / "index.sqlite", sink=sink.uri) as index:
        refresh(index, sink)
        told = {each.outcome: each.is_doubtful for each in ask_operations(index, Question())}
        assert told == {"denied": True, "success": False}


def test_what_was_recorded_again_is_told_once_and_what_was_not_in_the_log_before_is_not_lost(
    tmp_path: Path,
) -> None:
    old, new = of_process(1, "run-a"), of_process(2, "run-a", pid=5)
    name = old.writer
    again = {"first_recorded_as": f"{name}-1"}
    lost = {"first_recorded_as": f"{name}-7"}
    with indexed(
        tmp_path,
        (old, [(ONE, intent())]),
        (new, [(ONE, intent(details=again)), (ONE, ending(details=lost))]),
    ) as index:
        assert [each.recorded.phase for each in ask_events(index, Question())] == ["finished", "intended"]
        (found,) = ask_operations(index, Question())
        assert (found.outcome, len(found.entries)) == ("success", 2)
        assert len(list(ask_events(index, Question(), limit=1))) == 1
    other = {"first_recorded_as": f"{name}-1"}
    (tmp_path / "b").mkdir()
    liar = (new, [(ONE, ending(Outcome.DENIED, details=other))])
    with indexed(tmp_path / "b", (old, [(ONE, intent())]), liar) as index:
        assert len(list(ask_events(index, Question()))) == 2  # it is not what stands there


def test_a_commit_that_was_found_is_told_until_the_word_of_who_made_it_is_there(tmp_path: Path) -> None:
    found = did(Action.SAVE, Phase.OBSERVED, Outcome.SUCCESS, 5, checkpoint=step(100))
    own = did(Action.SAVE, Phase.FINISHED, Outcome.SUCCESS, 1, checkpoint=step(100))
    another = replace(own, checkpoint=replace(step(100), attempt="b" * 16))
    for place, (ends, phases) in enumerate(
        (
            ([], ["observed"]),
            ([own], ["finished"]),
            ([another], ["finished", "observed"]),
            ([replace(own, outcome=Outcome.FAILURE)], ["finished", "observed"]),
        )
    ):
        folder = tmp_path / str(place)
        folder.mkdir()
        old, new = of_process(1, "run-a"), of_process(2, "run-a", pid=5)
        with indexed(
            folder, (old, [(ONE, each) for each in ends]), (new, [(ONE, found)]), vouched=False
        ) as index:
            told = ask_operations(index, Question())
            assert sorted(each.to_json()["phase"] for each in told) == phases
            # Where only those are let in whom somebody vouches for, nobody else's word hides it.
            sworn = list(ask_operations(index, Question(), vouchers=VOUCHERS))
            assert "observed" in [each.to_json()["phase"] for each in sworn]
            assert len(list(ask_events(index, Question()))) == len(ends) + 1


def test_operations_come_as_they_are_taken(index: Index) -> None:
    whole = ask_operations(index, Question())
    assert next(whole).begin.action == "save"
    assert len(list(whole)) == 7
