"""One line by somebody who may write to the sink: it stops no log, and speaks for no other process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from log_making import (
    ANN,
    BOB,
    DEMANDS,
    KEYS,
    LOG,
    OTHER_RUN,
    RUN,
    TIME_MS,
    VOUCHERS,
    act,
    actor,
    certificate,
    key_of,
    look,
    places,
    segments_of,
    sink_with,
    tampering,
)
from segment_making import HOUR_MS

from strongroom import canonical
from strongroom.auditing import Action
from strongroom.errors import FormatError, IntegrityError
from strongroom.stores.memory import MemoryStore
from strongroom_security.auditlog.format.events import EXTENSION, check_event, event_id, event_of, recorded_of
from strongroom_security.auditlog.format.lines import FIRST_PREV, Close, Open, hash_of, segment_key
from strongroom_security.auditlog.format.segments import (
    MAX_SEGMENT_LINES,
    ProblemKind,
    SegmentChain,
    WriterKey,
    closed_for,
    hour_of,
    read_segment,
)
from strongroom_security.auditlog.format.splitting import Piece, Stray, split
from strongroom_security.auditlog.sequencing.logstate import LogState
from strongroom_security.auditlog.sequencing.proving import EventId, Proven, prove
from strongroom_security.auditlog.sequencing.sequencing import Sequenced, Sequencer
from strongroom_security.auditlog.verifying.checking import Demands
from strongroom_security.auditlog.verifying.findings import FindingKind, Gravity
from strongroom_security.auditlog.verifying.holding import hold

Line = Callable[[int, str], dict[str, Any]]

MALLORY = key_of("e" * 32, RUN, 66)
VICTIM = segments_of(KEYS[ANN], [2], is_last=True, vouched=certificate(KEYS[ANN]))
VICTIM_KEY = min(VICTIM)
VICTIM_LINES = VICTIM[VICTIM_KEY].split(b"\n")[:-1]
BOUNDS = canonical.Bounds(length_bytes=1 << 20)


def segment(lines: list[Line], by: WriterKey = MALLORY, *, time_ms: int = TIME_MS) -> tuple[str, bytes]:
    """A segment by whoever holds a key, chained and signed as it must be, of any lines."""
    made: list[bytes] = []

    def add(value: dict[str, Any]) -> None:
        made.append(canonical.encode(value))

    opened = Open(
        writer=by.writer,
        segment=1,
        seq=0,
        prev=FIRST_PREV,
        run=by.run,
        time=time_ms,
        host=by.host,
        pid=by.pid,
        key=by.public,
        certificate=certificate(by),
    )
    add(opened.to_json())
    for line in lines:
        add(line(len(made), hash_of(made[-1])))
    close = Close(
        writer=by.writer,
        segment=1,
        seq=len(made),
        prev=hash_of(made[-1]),
        events=len(lines),
        is_last=True,
        time=time_ms,
    )
    add(replace(close, signature=by.sign(close)).to_json())
    return segment_key(by.run, hour_of(time_ms), by.writer, 1), b"".join(each + b"\n" for each in made)


def event(seq: int, prev: str, *, run: str | None = RUN, writer: str = MALLORY.writer) -> dict[str, Any]:
    return event_of(act(run=run), actor(), writer=writer, seq=seq, prev=prev, time_ms=TIME_MS)


def _like_an_opening(seq: int, prev: str) -> dict[str, Any]:
    return {"certificate": None, "class_uid": 6005, "strongroom": {"seq": seq, "prev": prev}}


def _victims_opening(seq: int, prev: str) -> dict[str, Any]:
    value: dict[str, Any] = canonical.decode(VICTIM_LINES[0], "the line", BOUNDS)
    return {**value, "seq": seq, "prev": prev}


def _like_a_closing(seq: int, prev: str) -> dict[str, Any]:
    return {**event(seq, prev), "events": 0}


def _of_another_kind(seq: int, prev: str) -> dict[str, Any]:
    return {"kind": "hello", "seq": seq, "prev": prev}


def _with_a_pid_below_zero(seq: int, prev: str) -> dict[str, Any]:
    value = event(seq, prev)
    value["actor"]["process"]["pid"] = -5
    return value


def _under_anothers_id(seq: int, prev: str) -> dict[str, Any]:
    value = event(seq, prev)
    value["metadata"]["uid"] = event_id(ANN, 1)
    return value


def _about_another_run(seq: int, prev: str) -> dict[str, Any]:
    return event(seq, prev, run=OTHER_RUN)


HOSTILE: dict[Line, ProblemKind] = {
    _like_an_opening: ProblemKind.MALFORMED,
    _victims_opening: ProblemKind.MALFORMED,
    _of_another_kind: ProblemKind.MALFORMED,
    _with_a_pid_below_zero: ProblemKind.MALFORMED,
    _under_anothers_id: ProblemKind.MISNAMED,
    _about_another_run: ProblemKind.FOREIGN_RUN,
}


def sequence(sink: Any, state: LogState | None = None, **options: Any) -> Sequenced:
    return Sequencer(sink, LOG, state=state, wait_for_gaps_s=0, **options).run_once()


@pytest.mark.parametrize("line", HOSTILE, ids=lambda line: line.__name__.strip("_"))
def test_a_line_that_is_no_event_of_its_segment_is_told_and_never_sequenced(
    line: Line, tmp_path: Path
) -> None:
    key, data = segment([event, line])
    assert [(each.line, each.kind) for each in read_segment(key, data).problems] == [(3, HOSTILE[line])]
    sink = sink_with({key: data}, has_tree=False)
    found = sequence(sink, LogState(tmp_path / "one"))
    assert [(each.key, each.line) for each in found.refused] == [(key, 3)]
    assert found.head is None
    # Whoever was to be hurt by it goes in, and so does what comes later, by one that knows nothing.
    for name, whole in VICTIM.items():
        sink.put(name, whole)
    assert sequence(sink, LogState(tmp_path / "one")).segments == 1
    more = segments_of(KEYS[BOB], [1], is_last=True, vouched=certificate(KEYS[BOB]))
    for name, whole in more.items():
        sink.put(name, whole)
    assert sequence(sink, LogState(tmp_path / "another")).segments == 1
    assert {(each.segment, each.line) for each in tampering(look(sink))} == {(key, 3)}


def test_a_segment_about_no_run_holds_events_about_any() -> None:
    by = replace(MALLORY, run=None)
    lines: list[Line] = [event, _about_another_run, lambda seq, prev: event(seq, prev, run=None)]
    assert read_segment(*segment(lines, by)).is_whole
    inside = read_segment(*segment([lines[2]]))
    assert [each.kind for each in inside.problems] == [ProblemKind.FOREIGN_RUN]


def test_an_event_is_checked_as_quickly_and_just_as_strictly() -> None:
    whole = event(1, FIRST_PREV)
    assert check_event(whole, "it") == (event_id(MALLORY.writer, 1), 1, RUN)
    for name, wrong in (("step", -1), ("launch", "1"), ("rank", -2), ("byte_range", [0]), ("seq", True)):
        value = {**whole, "strongroom": {**whole["strongroom"], name: wrong}}
        for reads in (check_event, recorded_of):
            with pytest.raises(FormatError):
                reads(value, "it")
    for name, bad in (("byte_range", [None, None]), ("job", []), ("details", None), ("path", 1)):
        value = {**whole, "strongroom": {**whole["strongroom"], name: bad}}
        with pytest.raises(FormatError):
            check_event(value, "it")


def test_entries_that_were_sequenced_by_another_rule_accuse_nobody_else() -> None:
    """A copy of a victim's opening line within another's segment: that segment ends with its own closing."""
    _, data = segment([_victims_opening, _like_a_closing])
    entries = [*data.split(b"\n")[:-1], *VICTIM_LINES]
    found = list(split(enumerate(entries)))
    assert all(isinstance(each, Piece) for each in found)
    assert [each.first for each in found] == [0, 4]
    holding = hold(entries, len(entries))
    assert holding.problems == ()
    assert {each.writer: each.lines for each in holding.segments.values()} == {MALLORY.writer: 4, ANN: 4}


def test_a_closing_line_of_another_segment_closes_none() -> None:
    _, data = segment([event])
    lines = data.split(b"\n")[:-1]
    (stray,) = split(enumerate([*lines[:-1], VICTIM_LINES[-1]]))
    assert isinstance(stray, Stray)
    assert stray.is_end
    assert hold([*lines[:-1], VICTIM_LINES[-1]], 3).problems != ()


def test_a_bomb_of_line_feeds_is_refused_before_it_is_split_and_stops_nobody() -> None:
    key = segment([])[0]
    bomb = b"\n" * (MAX_SEGMENT_LINES + 1)
    with pytest.raises(FormatError, match="lines; at most"):
        read_segment(key, bomb)
    sink = sink_with({key: bomb, **VICTIM}, has_tree=False)
    found = sequence(sink)
    assert (found.segments, [each.key for each in found.refused]) == (1, [key])


def test_an_event_under_anothers_id_in_an_old_tree_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    key, data = segment([_under_anothers_id])
    with monkeypatch.context() as before:
        before.setattr("strongroom_security.auditlog.sequencing.choosing.read_segment", _leniently)
        sink = sink_with({key: data}, has_tree=False)
        assert sequence(sink).segments == 1
    found = prove(sink, EventId(writer=ANN, seq=1), LOG.keys)
    assert not isinstance(found, Proven)
    for name, whole in VICTIM.items():
        sink.put(name, whole)
    sequence(sink)
    found = prove(sink, EventId(writer=ANN, seq=1), LOG.keys)
    assert isinstance(found, Proven)
    assert found.line == VICTIM_LINES[1]


def _leniently(key: str, data: bytes, **options: Any) -> Any:
    return read_segment(key, data, **{**options, "checks_events": False})


# ------------------------------------------------------------------------------------------------ salvaged


def _salvaged(run: str | None) -> tuple[str, bytes, WriterKey]:
    left = read_segment(VICTIM_KEY, b"".join(each + b"\n" for each in VICTIM_LINES[:-1]))
    by = replace(key_of("d" * 32, run, 9), host="another-pod")
    return VICTIM_KEY, closed_for(left, by, certificate(by), TIME_MS + 5), by


@pytest.mark.parametrize("run", (None, RUN))
def test_a_segment_that_another_closed_is_no_tampering_and_proven_by_nobody_else(run: str | None) -> None:
    key, data, by = _salvaged(run)
    found = look(sink_with({key: data}, has_tree=True))
    assert not found.is_tampered
    (told,) = [each for each in found.findings if each.kind is FindingKind.SALVAGED]
    assert told.gravity is Gravity.UNPROVEN
    assert "vouched for by its salvager alone" in told.message
    assert by.writer in told.message
    assert "another-pod" in told.message
    assert (found.totals.salvaged_segments, found.totals.salvaged_events) == (1, 2)


def test_a_job_of_another_run_closes_no_segment() -> None:
    key, data, _ = _salvaged(OTHER_RUN)
    sink = sink_with({key: data}, has_tree=False)
    assert places(look(sink)) == {(key, len(VICTIM_LINES), FindingKind.FORGED_CLOSE)}
    assert [each.key for each in sequence(sink).refused] == [key]


# ---------------------------------------------------------------------------------------------------- OCSF


def test_an_event_declares_its_extension_and_names_what_ocsf_has_no_number_for() -> None:
    assert event(1, FIRST_PREV)["metadata"]["extensions"] == [EXTENSION]
    assert EXTENSION.keys() == {"name", "uid", "version"}
    value = event_of(act(action=Action.ALERT), actor(), writer=ANN, seq=1, prev=FIRST_PREV, time_ms=TIME_MS)
    assert (value["activity_id"], value["activity_name"]) == (99, "alert")


# ------------------------------------------------------------------------------------------ a writer's id


def test_of_two_that_claim_a_writers_id_the_certified_one_has_it_where_a_signer_is_known() -> None:
    mallory = replace(MALLORY, writer=ANN)
    stranger = _uncertified(mallory)
    sink = sink_with({stranger[0]: stranger[1], **VICTIM}, has_tree=False)
    found = sequence(sink, vouchers=VOUCHERS)
    assert found.segments == 1
    (refused,) = found.refused
    assert refused.key == stranger[0]
    assert "two claim the id" in refused.message
    assert sequence(sink, vouchers=VOUCHERS).refused[0].key == stranger[0]
    # Nobody known: whoever comes first has it, as ever.
    sink = sink_with({stranger[0]: stranger[1], **VICTIM}, has_tree=False)
    assert [each.key for each in sequence(sink).refused] == [VICTIM_KEY]


def test_of_two_that_claim_a_writers_id_the_uncertified_one_is_told_before_any_sequencing() -> None:
    key, data = _uncertified(replace(MALLORY, writer=ANN))
    assert places(look(sink_with({key: data, **VICTIM}, has_tree=False))) == {
        (key, 1, FindingKind.UNCERTIFIED),
        (key, 1, FindingKind.DUPLICATE),
    }


def _uncertified(by: WriterKey) -> tuple[str, bytes]:
    chain = SegmentChain(by)
    lines = [chain.open(time_ms=TIME_MS - HOUR_MS, certificate=None), chain.close(time_ms=TIME_MS)]
    return chain.key, b"".join(lines)


# ------------------------------------------------------------------------------------------------ the tree


def test_a_log_whose_key_is_named_and_whose_tree_is_gone_was_tampered_with() -> None:
    sink = sink_with(VICTIM, has_tree=True)
    assert not look(sink).is_tampered
    for key in list(sink.contents()):
        if key.startswith("tlog/"):
            sink.delete(key)
    (found,) = tampering(look(sink, DEMANDS))
    assert found.kind is FindingKind.TREE_MISSING
    assert "sequence it first" in found.message
    # Nobody named a key: that there never was a tree is as likely.
    assert not look(sink, Demands(vouchers=VOUCHERS)).is_tampered


def test_a_checkpoint_that_was_removed_with_all_later_plans_is_told_once_a_key_is_named() -> None:
    sink = sink_with(VICTIM, has_tree=True)
    sink.delete("tlog/checkpoint")
    assert sink.list_names("tlog/plans") == ["0.json"]
    assert [each.kind for each in tampering(look(sink, DEMANDS))] == [FindingKind.TREE_MISSING]


def test_an_empty_sink_has_lost_its_log_where_a_key_is_named() -> None:
    assert look(MemoryStore(), DEMANDS).is_tampered


def test_a_planned_segment_that_is_lost_for_good_has_a_way_out_that_is_told() -> None:
    plan = {
        "format": "strongroom.audit-plan/1",
        "size": 0,
        "segments": [{"key": VICTIM_KEY, "sha256": "0" * 64, "lines": 4, "follows_gap": False}],
    }
    sink = MemoryStore()
    sink.put("tlog/plans/0.json", canonical.encode(plan))
    with pytest.raises(IntegrityError, match=r"put it back as it was.*lost for good.*move tlog/ out"):
        sequence(sink)
    for name, whole in VICTIM.items():
        sink.put(name, whole)
    with pytest.raises(IntegrityError, match=r"lost for good.*another log with a key, an origin and a state"):
        sequence(sink)


def test_a_writers_key_of_small_order_by_which_anybody_signs_is_none() -> None:
    value = canonical.decode(VICTIM_LINES[0], "the line", BOUNDS)
    with pytest.raises(FormatError, match="small order"):
        Open.from_json({**value, "key": "AQ" + "A" * 41 + "="}, "it")
