"""Whoever changes a line of the log, takes one out, puts one in, or makes it anew: found out, and where."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from log_making import (
    ANN,
    BOB,
    CLEO,
    COUNTS,
    DEMANDS,
    KEYS,
    LOG,
    RUN,
    STRANGER,
    certificate,
    changed,
    edit,
    key_of,
    leaves,
    look,
    places,
    pristine,
    put,
    rechained,
    segments_of,
    sequence,
    sink_with,
    tampering,
)

from strongroom import canonical
from strongroom.stores.memory import MemoryStore
from strongroom_security.auditlog.format.events import event_id
from strongroom_security.auditlog.format.lines import hash_of, parse_segment_key, segment_key
from strongroom_security.auditlog.format.segments import SegmentChain, closed_for, read_segment
from strongroom_security.auditlog.verifying.checking import Demands
from strongroom_security.auditlog.verifying.findings import FindingKind, Gravity
from strongroom_security.tlog.notekeys import NoteSigner

WHOLE = pristine()
NAMES = sorted(WHOLE)
FRESH = Ed25519PrivateKey.from_private_bytes(b"\x63" * 32)


@cache
def _tree() -> dict[str, bytes]:
    sink = sink_with(WHOLE, has_tree=True)
    return {key: sink.read(key, limit_bytes=1 << 20) for key in _keys(sink, "tlog")}


def _keys(sink: MemoryStore, prefix: str) -> list[str]:
    found = []
    for name in sink.list_names(prefix):
        key = f"{prefix}/{name}"
        found += _keys(sink, key.removesuffix("/")) if name.endswith("/") else [key]
    return found


def log(*, has_tree: bool) -> MemoryStore:
    sink = sink_with(WHOLE, has_tree=False)
    for key, data in _tree().items() if has_tree else ():
        sink.put(key, data)
    return sink


def lines_of(key: str) -> list[bytes]:
    return WHOLE[key].split(b"\n")[:-1]


def seq_of(key: str, line: int) -> int:
    value = canonical.decode(lines_of(key)[0], "the line", canonical.Bounds(length_bytes=1 << 20))
    return int(value["seq"]) + line - 1


def id_of(key: str, line: int) -> str:
    parts = parse_segment_key(key)
    assert parts is not None
    return event_id(parts[2], seq_of(key, line))


EVERY_LINE = [(key, line) for key in NAMES for line in range(1, len(lines_of(key)) + 1)]
both = pytest.mark.parametrize("has_tree", (False, True), ids=["chains alone", "with a tree"])


@both
def test_a_log_that_nobody_has_touched_is_whole(has_tree: bool) -> None:
    found = look(log(has_tree=has_tree))
    assert not found.is_tampered
    assert (found.totals.segments, found.totals.events, found.totals.writers) == (5, 10, 3)
    assert found.totals.vouched_writers == 3
    assert found.totals.sequenced_events == (10 if has_tree else 0)
    told = {finding.kind for finding in found.findings}
    assert told == {FindingKind.OPEN} | (
        set() if has_tree else {FindingKind.NO_TREE, FindingKind.UNSEQUENCED}
    )
    assert [each.segment for each in found.findings if each.kind is FindingKind.OPEN] == [NAMES[3]]


@both
def test_every_value_of_every_line_that_is_edited_is_found_at_that_line(has_tree: bool) -> None:
    tried = 0
    for key, line in EVERY_LINE:
        value = canonical.decode(lines_of(key)[line - 1], "the line", canonical.Bounds(length_bytes=1 << 20))
        for path in leaves(value):
            sink = log(has_tree=has_tree)
            new = changed(lines_of(key)[line - 1], path)
            edit(sink, key, partial(_with, line=line, new=new))
            found = tampering(look(sink))
            here = [each for each in found if (each.segment, each.line) == (key, line)]
            assert here, f"{key}, line {line}, {path}: {[str(each) for each in found]}"
            tried += 1
    assert tried > 300


def _with(lines: list[bytes], line: int, new: bytes) -> list[bytes]:
    return [*lines[: line - 1], new, *lines[line:]]


@both
@pytest.mark.parametrize(("key", "line"), EVERY_LINE)
def test_a_line_that_was_taken_out_is_found_there(key: str, line: int, has_tree: bool) -> None:
    sink = log(has_tree=has_tree)
    edit(sink, key, lambda lines: [*lines[: line - 1], *lines[line:]])
    # Of the last line nothing is left but the place after which it stood.
    expected = line - 1 if line == len(lines_of(key)) else line
    found = places(look(sink))
    assert (key, expected) in {(segment, at) for segment, at, _ in found}
    if has_tree:
        assert (key, line, FindingKind.ALTERED) in found


@both
@pytest.mark.parametrize(("key", "line"), EVERY_LINE)
def test_a_line_that_was_put_in_is_found_there(key: str, line: int, has_tree: bool) -> None:
    """Or at the next one, which says the same seq: of two that follow one line either may be the guest."""
    donor = lines_of(NAMES[-1] if key != NAMES[-1] else NAMES[0])[1]
    for new in (lines_of(key)[line - 1], donor, _follows(lines_of(key), line)):
        sink = log(has_tree=has_tree)
        edit(sink, key, partial(_with_more, line=line, new=new))
        found = places(look(sink))
        assert {(segment, at) for segment, at, _ in found} & {(key, line + 1), (key, line + 2)}
        if has_tree:
            assert (key, line + 1, FindingKind.ALTERED) in found


def _with_more(lines: list[bytes], line: int, new: bytes) -> list[bytes]:
    return [*lines[:line], new, *lines[line:]]


def _follows(lines: list[bytes], line: int) -> bytes:
    """An event that goes on from a line, as its writer would have made it."""
    value = canonical.decode(lines_of(NAMES[0])[1], "the line", canonical.Bounds(length_bytes=1 << 20))
    before = canonical.decode(lines[line - 1], "the line", canonical.Bounds(length_bytes=1 << 20))
    seq = (before["strongroom"] if "class_uid" in before else before)["seq"]
    value["strongroom"] |= {"seq": seq + 1, "prev": hash_of(lines[line - 1])}
    value["metadata"]["uid"] = f"{ANN}-{seq + 1}"
    value["time"] += 7
    return canonical.encode(value)


@both
@pytest.mark.parametrize(
    ("key", "line"), [(key, line) for key, line in EVERY_LINE if line < len(lines_of(key))]
)
def test_two_lines_that_changed_places_are_found_there(key: str, line: int, has_tree: bool) -> None:
    sink = log(has_tree=has_tree)
    edit(sink, key, lambda lines: [*lines[: line - 1], lines[line], lines[line - 1], *lines[line + 1 :]])
    found = places(look(sink))
    assert {(segment, at) for segment, at, _ in found} & {(key, line), (key, line + 1)}
    if has_tree:
        assert (key, line, FindingKind.ALTERED) in found


@both
@pytest.mark.parametrize(("key", "line"), EVERY_LINE)
def test_a_segment_that_was_cut_is_found_where_it_ends(key: str, line: int, has_tree: bool) -> None:
    whole = lines_of(key)
    for torn in (b"", whole[line - 1][: len(whole[line - 1]) // 2]):
        sink = log(has_tree=has_tree)
        put(sink, key, b"".join(each + b"\n" for each in whole[: line - 1]) + torn)
        found = places(look(sink))
        assert (key, line - 1, FindingKind.UNCLOSED) in found
        if torn:
            assert (key, line, FindingKind.TORN) in found
        if has_tree:
            assert any(segment == key and kind is FindingKind.ALTERED for segment, _, kind in found)


@both
def test_a_segment_in_another_ones_place_is_found(has_tree: bool) -> None:
    for here in NAMES:
        for there in NAMES:
            if here == there:
                continue
            sink = log(has_tree=has_tree)
            put(sink, here, WHOLE[there])
            assert (here, 1, FindingKind.ELSEWHERE) in places(look(sink))


@both
@pytest.mark.parametrize("key", NAMES)
def test_a_segment_that_was_put_there_a_second_time_is_found(key: str, has_tree: bool) -> None:
    run, hour, writer, number = _parts(key)
    for again in (
        segment_key(run, "20251130T23", writer, number),
        segment_key("run-c", hour, writer, number),
        segment_key(run, hour, writer, number + 7),
        segment_key(run, hour, "d" * 32, number),
    ):
        sink = log(has_tree=has_tree)
        sink.put(again, WHOLE[key])
        assert (again, 1, FindingKind.ELSEWHERE) in places(look(sink))


def _parts(key: str) -> tuple[str | None, str, str, int]:
    parts = parse_segment_key(key)
    assert parts is not None
    return parts


@both
@pytest.mark.parametrize(("key", "line"), EVERY_LINE)
def test_a_line_that_was_changed_and_all_after_it_made_to_follow_is_found(
    key: str, line: int, has_tree: bool
) -> None:
    """By somebody who knows all but the writer's key, which was in the memory of one process alone."""

    def forge(lines: list[bytes]) -> list[bytes]:
        value = canonical.decode(lines[line - 1], "the line", canonical.Bounds(length_bytes=1 << 20))
        value["time"] += 1
        return rechained(key, _with(lines, line, canonical.encode(value)), FRESH, first=line - 1)

    sink = log(has_tree=has_tree)
    edit(sink, key, forge)
    found = places(look(sink))
    assert (key, len(lines_of(key)), FindingKind.FORGED_CLOSE) in found
    if has_tree:
        assert (key, line, FindingKind.ALTERED) in found


@both
@pytest.mark.parametrize("key", NAMES)
def test_a_segment_made_anew_with_another_key_in_its_opening_line_is_found(key: str, has_tree: bool) -> None:
    writer = _parts(key)[2]

    def forge(lines: list[bytes]) -> list[bytes]:
        value = canonical.decode(lines[0], "the line", canonical.Bounds(length_bytes=1 << 20))
        other = replace(KEYS[writer], private=FRESH)
        value["key"] = _opened(other)["key"]
        return rechained(key, _with(lines, 1, canonical.encode(value)), FRESH)

    sink = log(has_tree=has_tree)
    edit(sink, key, forge)
    found = places(look(sink))
    assert (key, 1, FindingKind.FORGED_CERTIFICATE) in found
    if has_tree:
        assert (key, 1, FindingKind.ALTERED) in found


def _opened(key: object) -> dict[str, object]:
    line = SegmentChain(key).open(time_ms=0, certificate=None)  # type: ignore[arg-type]
    return dict(canonical.decode(line[:-1], "the line", canonical.Bounds(length_bytes=1 << 20)))


@both
@pytest.mark.parametrize(
    ("vouched", "kind"),
    (
        ("nobody", FindingKind.UNCERTIFIED),
        ("stranger", FindingKind.UNKNOWN_SIGNER),
        ("copied", FindingKind.FORGED_CERTIFICATE),
    ),
)
@pytest.mark.parametrize("writer", (ANN, BOB, CLEO))
def test_a_whole_writer_made_anew_with_another_key_is_found(
    writer: str, vouched: str, kind: FindingKind, has_tree: bool
) -> None:
    forged = replace(KEYS[writer], private=FRESH)
    word = {
        "nobody": None,
        "stranger": certificate(forged, STRANGER),
        "copied": certificate(KEYS[writer]),
    }[vouched]
    sink = log(has_tree=has_tree)
    anew = segments_of(forged, COUNTS[writer], is_last=writer != BOB, vouched=word)
    for key, data in anew.items():
        put(sink, key, data)
    found = look(sink)
    for key in anew:
        assert (key, 1, kind) in places(found)
        assert not has_tree or (key, 1, FindingKind.ALTERED) in places(found)
    assert found.totals.vouched_writers == 2


def test_a_writer_made_anew_passes_where_nobody_vouches_and_nothing_is_sequenced_which_is_told() -> None:
    sink = log(has_tree=False)
    for key, data in segments_of(
        replace(KEYS[CLEO], private=FRESH), COUNTS[CLEO], is_last=True, vouched=None
    ).items():
        put(sink, key, data)
    found = look(sink, Demands())
    assert not found.is_tampered
    assert {FindingKind.UNVOUCHED, FindingKind.NO_TREE} <= {each.kind for each in found.findings}


def test_who_lets_uncertified_writers_pass_is_still_told_of_them() -> None:
    sink = log(has_tree=False)
    anew = segments_of(replace(KEYS[CLEO], private=FRESH), COUNTS[CLEO], is_last=True, vouched=None)
    for key, data in anew.items():
        put(sink, key, data)
    found = look(sink, replace(DEMANDS, log=None, allow_uncertified=True))
    assert not found.is_tampered
    (told,) = [each for each in found.findings if each.kind is FindingKind.UNCERTIFIED]
    assert told.gravity is Gravity.NOTE


@pytest.mark.parametrize("key", NAMES[:2])
def test_a_segment_that_was_taken_away_before_another_of_its_writer_is_found_without_a_tree(key: str) -> None:
    sink = log(has_tree=False)
    sink.delete(key)
    after = NAMES[NAMES.index(key) + 1]
    (gap,) = tampering(look(sink))
    assert (gap.kind, gap.segment, gap.line) == (FindingKind.GAP, after, 1)
    assert gap.event == id_of(key, 1)


@pytest.mark.parametrize("key", NAMES)
def test_any_segment_that_was_taken_away_is_found_by_the_tree(key: str) -> None:
    sink = log(has_tree=True)
    sink.delete(key)
    (removed,) = tampering(look(sink))
    assert (removed.kind, removed.segment, removed.line) == (FindingKind.REMOVED, key, 1)
    assert removed.event == id_of(key, 1)
    assert removed.leaf is not None


def test_a_writers_last_segment_can_be_taken_away_unsequenced_and_the_writer_is_told_as_open() -> None:
    """The limit that is named: until it is sequenced it is unproven."""
    sink = log(has_tree=False)
    sink.delete(NAMES[2])
    found = look(sink)
    assert not found.is_tampered
    told = [each for each in found.findings if each.kind is FindingKind.OPEN and each.segment == NAMES[1]]
    assert [each.gravity for each in told] == [Gravity.UNPROVEN]


def test_what_was_not_sequenced_yet_is_told_as_unproven() -> None:
    sink = sink_with({key: WHOLE[key] for key in NAMES[:3]}, has_tree=True)
    sink.put(NAMES[4], WHOLE[NAMES[4]])
    found = look(sink)
    assert not found.is_tampered
    (told,) = [each for each in found.findings if each.kind is FindingKind.UNSEQUENCED]
    assert (told.segment, told.gravity) == (NAMES[4], Gravity.UNPROVEN)
    assert (found.totals.events, found.totals.sequenced_events) == (8, 6)


def test_something_else_among_the_segments_is_told() -> None:
    sink = log(has_tree=True)
    sink.put("segments/run-a/notes.txt", b"hello")
    assert places(look(sink)) == {("segments/run-a/notes.txt", 0, FindingKind.STRAY)}


def test_a_segment_after_the_one_by_which_its_writer_ended_is_found() -> None:
    chain = SegmentChain(KEYS[CLEO])
    made = {}
    for _ in range(2):
        lines = [chain.open(time_ms=0, certificate=certificate(KEYS[CLEO]))]
        made[chain.key] = b"".join([*lines, chain.close(time_ms=0, is_last=True)])
    found = look(sink_with(made, has_tree=False))
    assert places(found) == {(chain.key, 1, FindingKind.AFTER_LAST)}


def test_a_segment_closed_for_a_dead_writer_counts_if_somebody_vouches_for_who_closed_it() -> None:
    key = NAMES[3]
    left = read_segment(key, b"".join(line + b"\n" for line in lines_of(key)[:-1]))
    by = key_of("d" * 32, RUN, 9)
    for word, expected in (
        (certificate(by), set()),
        (None, {FindingKind.UNCERTIFIED}),
        (certificate(by, STRANGER), {FindingKind.UNKNOWN_SIGNER}),
        (certificate(KEYS[ANN]), {FindingKind.FORGED_CERTIFICATE}),
    ):
        sink = log(has_tree=False)
        put(sink, key, closed_for(left, by, word, 5))
        found = look(sink)
        assert places(found) == {(key, len(lines_of(key)), kind) for kind in expected}
        assert FindingKind.SALVAGED in {each.kind for each in found.findings}


# -------------------------------------------------------------------------------------------------- the tree


def _resequenced(first: str) -> MemoryStore:
    """The same segments, in a tree of another order, by the log's own key."""
    sink = sink_with({first: WHOLE[first]}, has_tree=True)
    for key in NAMES:
        if key != first:
            sink.put(key, WHOLE[key])
    sequence(sink)
    return sink


def test_a_tree_in_another_order_passes_alone_and_is_found_by_a_checkpoint_that_was_kept() -> None:
    kept = _tree()["tlog/checkpoint"]
    sink = _resequenced(NAMES[4])
    assert not look(sink).is_tampered
    (found,) = tampering(look(sink, replace(DEMANDS, against=kept)))
    assert found.kind is FindingKind.TREE_REWRITTEN
    assert not look(log(has_tree=True), replace(DEMANDS, against=kept)).is_tampered


def test_a_tree_with_fewer_leaves_or_none_is_found_by_a_checkpoint_that_was_kept() -> None:
    kept = replace(DEMANDS, against=_tree()["tlog/checkpoint"])
    fewer = sink_with({key: WHOLE[key] for key in NAMES[:3]}, has_tree=True)
    assert [each.kind for each in tampering(look(fewer, kept))] == [FindingKind.TREE_REWRITTEN]
    none = log(has_tree=False)
    assert [each.kind for each in tampering(look(none, kept))] == [FindingKind.TREE_REWRITTEN]


def test_a_tree_that_grew_is_the_one_that_was_kept() -> None:
    sink = sink_with({key: WHOLE[key] for key in NAMES[:2]}, has_tree=True)
    kept = sink.read("tlog/checkpoint", limit_bytes=1 << 20)
    for key in NAMES[2:]:
        sink.put(key, WHOLE[key])
    sequence(sink)
    assert not look(sink, replace(DEMANDS, against=kept)).is_tampered


def test_a_checkpoint_that_somebody_else_signed_is_found() -> None:
    other = NoteSigner(LOG.origin, Ed25519PrivateKey.from_private_bytes(b"\x09" * 32))
    sink = sink_with({}, has_tree=False)
    for key in NAMES[:4]:
        sink.put(key, WHOLE[key])
    sequence(sink, replace(LOG, signers=(other,)))
    found = look(sink)
    assert [each.kind for each in tampering(found)] == [FindingKind.TREE_SIGNATURE]
    assert found.tree is None
    assert found.totals.sequenced_events == 0


def test_every_byte_of_a_checkpoint_that_was_changed_is_found() -> None:
    whole = _tree()["tlog/checkpoint"]
    for at in range(0, len(whole), 3):
        sink = log(has_tree=True)
        put(sink, "tlog/checkpoint", whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        kinds = {each.kind for each in tampering(look(sink))}
        assert kinds & {FindingKind.TREE_SIGNATURE, FindingKind.TREE_DAMAGED}


@pytest.mark.parametrize("key", sorted(key for key in _tree() if "/tile/" in key))
def test_a_part_of_the_tree_that_was_changed_or_removed_is_found(key: str) -> None:
    for new in (None, _tree()[key][:-1] + bytes([_tree()[key][-1] ^ 1])):
        sink = log(has_tree=True)
        sink.delete(key)
        if new is not None:
            sink.put(key, new)
        kinds = {each.kind for each in tampering(look(sink))}
        assert kinds & {FindingKind.TREE_ROOT, FindingKind.TREE_DAMAGED}


def test_a_checkpoint_that_was_taken_away_is_found() -> None:
    sink = _resequenced(NAMES[4])
    sink.delete("tlog/checkpoint")
    assert [each.kind for each in tampering(look(sink))] == [FindingKind.TREE_DAMAGED]


def test_a_first_sequencing_that_has_not_ended_is_told_as_unproven() -> None:
    """It leaves just what a log leaves of which the first checkpoint was taken away."""
    sink = log(has_tree=True)
    sink.delete("tlog/checkpoint")
    found = look(sink)
    assert not found.is_tampered
    assert any("very first sequencing" in str(each) for each in found.findings)
    assert look(sink, replace(DEMANDS, against=_tree()["tlog/checkpoint"])).is_tampered


def test_a_tree_whose_signer_nobody_named_is_told_as_unproven() -> None:
    found = look(log(has_tree=True), Demands(vouchers=DEMANDS.vouchers))
    assert not found.is_tampered
    assert FindingKind.TREE_UNVOUCHED in {
        each.kind for each in found.findings if each.gravity is Gravity.UNPROVEN
    }


def test_one_run_is_looked_at_alone() -> None:
    sink = log(has_tree=True)
    sink.delete(NAMES[4])
    assert not look(sink, replace(DEMANDS, run=RUN)).is_tampered
    assert look(sink, replace(DEMANDS, run="run-b")).is_tampered
