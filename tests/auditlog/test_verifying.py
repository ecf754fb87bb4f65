"""Whatever lies in a sink, verifying it ends with findings: no error, and nothing that was changed passes."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_making import (
    ANN,
    DEMANDS,
    KEYS,
    certificate,
    key_of,
    keys_in,
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
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom_security.auditlog.asking.index import Index
from strongroom_security.auditlog.asking.indexing import refresh
from strongroom_security.auditlog.format.lines import Certificate
from strongroom_security.auditlog.format.segments import ProblemKind, SegmentChain
from strongroom_security.auditlog.verifying import checking
from strongroom_security.auditlog.verifying.checking import Demands, check_log
from strongroom_security.auditlog.verifying.findings import Finding, FindingKind, Gravity
from strongroom_security.auditlog.verifying.holding import hold
from strongroom_security.auditlog.verifying.trusting import Voucher, Vouchers
from strongroom_security.auditlog.verifying.verifying import difference

KEY = min(pristine())
LINES = pristine()[KEY].split(b"\n")[:-1]
BOUNDS = canonical.Bounds(length_bytes=1 << 20)

PARTS = ["checkpoint", "tile/entries/000.p/20", "tile/0/000.p/20"]

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.sampled_from(["open", "close", "strongroom.audit/1", ANN, "0" * 64, 6005]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["kind", "seq", "prev", "class_uid", "strongroom", "metadata", "writer", "key"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


SOME_LINES = st.lists(st.sampled_from([*LINES, b"", b"{}", b"\xff"]), max_size=7).map(b"\n".join)


@given(st.binary(max_size=400) | SOME_LINES)
@settings(max_examples=50)
def test_any_bytes_in_a_segments_place_come_to_findings(data: bytes) -> None:
    for has_tree in (False, True):
        sink = sink_with({}, has_tree=False)
        for key, whole in pristine().items():
            sink.put(key, whole)
        if has_tree:
            sequence(sink)
        put(sink, KEY, data)
        found = look(sink)
        assert found.is_tampered
        assert KEY in {finding.segment for finding in tampering(found)}
        json.dumps([finding.to_json() for finding in found.findings])
        assert all(str(finding) for finding in found.findings)


@given(st.data())
def test_any_json_in_a_lines_place_comes_to_findings(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(LINES) - 1))
    value = data.draw(JSON | st.just(json.loads(LINES[at])))
    if isinstance(value, dict) and data.draw(st.booleans()):
        members = json.loads(LINES[at])
        members.update({name: inner for name, inner in value.items() if name in members})
        value = members
    line = json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
    if line == LINES[at]:
        return
    sink = MemoryStore()
    sink.put(KEY, b"".join(each + b"\n" for each in [*LINES[:at], line, *LINES[at + 1 :]]))
    assert look(sink).is_tampered


@given(st.dictionaries(st.sampled_from(PARTS), st.binary(max_size=300), min_size=1))
@settings(max_examples=40)
def test_any_bytes_in_the_trees_place_come_to_findings(parts: dict[str, bytes]) -> None:
    sink = sink_with(pristine(), has_tree=True)
    for name, data in parts.items():
        put(sink, f"tlog/{name}", data)
    assert look(sink).is_tampered


@given(st.lists(st.binary(max_size=60) | st.sampled_from(LINES), max_size=20))
def test_any_entries_are_put_together_to_segments_or_told(entries: list[bytes]) -> None:
    holding = hold(entries, len(entries))
    assert sum(each.lines for each in holding.segments.values()) <= len(entries)
    if entries and not entries[0].startswith(b'{"certificate":'):
        assert holding.problems


def test_a_tree_that_breaks_off_holds_only_whole_segments() -> None:
    entries = [line for key in sorted(pristine()) for line in pristine()[key].split(b"\n")[:-1]]
    assert len(hold(entries, len(entries)).segments) == 5
    assert len(hold(entries[:-1], len(entries)).segments) == 4


def test_a_segment_that_is_twice_in_the_tree_is_told() -> None:
    holding = hold([*LINES, *LINES], 2 * len(LINES))
    assert [leaf for leaf, _ in holding.problems] == [len(LINES)]


def test_a_tree_of_something_else_is_told() -> None:
    from log_making import LOG

    from strongroom_security.tlog.checkpoints import Checkpoint
    from strongroom_security.tlog.merkle import leaf_hashes, root_of
    from strongroom_security.tlog.notes import Note
    from strongroom_security.tlog.tiles import encode_bundle

    entries = [b"hello", b"world"]
    hashes = leaf_hashes(entries)
    head = Checkpoint(origin=LOG.origin, size=2, root=root_of(hashes))
    sink = sink_with(pristine(), has_tree=False)
    sink.put("tlog/tile/entries/000.p/2", encode_bundle(entries))
    sink.put("tlog/tile/0/000.p/2", hashes)
    signature = LOG.signers[0].sign(head.text())
    sink.put("tlog/checkpoint", Note(text=head.text(), signatures=(signature,)).to_bytes())
    (found,) = tampering(look(sink))
    assert (found.kind, found.leaf) == (FindingKind.TREE_CONTENT, 0)


def test_a_writer_that_calls_its_events_otherwise_is_told() -> None:
    """By its own key: the chain is whole, and says of itself what is not so."""

    def renamed(lines: list[bytes]) -> list[bytes]:
        value = canonical.decode(lines[1], "the line", BOUNDS)
        value["metadata"]["uid"] = f"{'f' * 32}-1"
        return rechained(KEY, [lines[0], canonical.encode(value), *lines[2:]], KEYS[ANN].private, first=1)

    sink = MemoryStore()
    sink.put(KEY, b"".join(line + b"\n" for line in renamed(LINES)))
    assert places(look(sink)) == {(KEY, 2, FindingKind.MISNAMED)}


def test_two_histories_of_one_writer_by_its_own_key_do_not_both_pass() -> None:
    """A process that was copied, key and all, and went on twice."""
    word = certificate(KEYS[ANN])
    one = segments_of(KEYS[ANN], [1, 1], is_last=False, vouched=word)
    other = segments_of(replace(KEYS[ANN], pid=KEYS[ANN].pid), [2, 1], is_last=False, vouched=word)
    mixed = {min(one): one[min(one)], max(other): other[max(other)]}
    assert places(look(sink_with(mixed, has_tree=False))) == {(max(other), 1, FindingKind.BROKEN)}


def test_a_kind_stands_for_each_problem_of_a_segment() -> None:
    assert {each.value for each in ProblemKind} <= {each.value for each in FindingKind}


def test_where_two_segments_differ() -> None:
    assert difference([b"a", b"b"], [b"a", b"c"]) == 2
    assert difference([b"a"], [b"a", b"b"]) == 2
    assert difference([b"a", b"b"], [b"a"]) == 2
    assert difference([b"a"], [b"a"]) == 2  # what differs stands behind the last line


def test_a_certificate_counts_by_its_key_and_over_just_this_writer() -> None:
    key = key_of("e" * 32, "run-a", 5)
    word = certificate(key)
    vouchers = DEMANDS.vouchers
    assert vouchers.of(word, key.certified()) is Voucher.TRUSTED
    assert vouchers.of(word, key.certified()) is Voucher.TRUSTED
    assert vouchers.of(word, replace(key, host="elsewhere").certified()) is Voucher.FORGED
    assert vouchers.of(None, key.certified()) is Voucher.NOBODY
    assert Vouchers().of(word, key.certified()) is Voucher.UNKNOWN
    assert vouchers.of(Certificate(key_id=word.key_id, signature=b"x"), key.certified()) is Voucher.FORGED


def test_one_good_certificate_of_a_writer_is_enough() -> None:
    """The keeper of the key may have been out of reach when the first segments were opened."""
    chain = SegmentChain(KEYS[ANN])
    made = {}
    for word in (None, certificate(KEYS[ANN]), None):
        lines = [chain.open(time_ms=0, certificate=word), chain.close(time_ms=1, is_last=False)]
        made[chain.key] = b"".join(lines)
    found = look(sink_with(made, has_tree=False))
    assert not found.is_tampered
    assert found.totals.vouched_writers == 1


def test_a_segment_that_goes_away_while_it_is_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = sink_with(pristine(), has_tree=False)
    listed = checking.list_segments(sink)
    sink.delete(KEY)
    monkeypatch.setattr(checking, "list_segments", lambda store: listed)
    assert (KEY, 0, FindingKind.UNREADABLE) in places(look(sink))


def test_a_large_log_is_read_by_several_processes_and_comes_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strongroom_security.auditlog.verifying import spreading

    sink = sink_with(pristine(), has_tree=True)
    first, second, *_ = keys_in(sink)
    put(sink, first, pristine()[first][:-9])
    put(sink, second, pristine()[second].replace(b'"step":100', b'"step":101'))
    alone = look(sink)
    monkeypatch.setattr(spreading, "WORTH_IT_BYTES", 1)
    monkeypatch.setattr(spreading, "processors", lambda: 2)
    assert look(sink) == alone


def test_findings_say_where_they_are_in_words() -> None:
    finding = Finding(kind=FindingKind.CHANGED, message="it is not", segment="s", line=3, event="w-2", leaf=9)
    assert str(finding) == "s, line 3 (event w-2), leaf 9 of the tree: it is not"
    assert finding.gravity is Gravity.TAMPERED
    assert str(Finding(kind=FindingKind.NO_TREE, message="nothing")) == "nothing"


def test_progress_is_told() -> None:
    seen: list[tuple[int, int]] = []
    check_log(sink_with(pristine(), has_tree=False), Demands(), progress=lambda *each: seen.append(each))
    assert seen == [(number, 5) for number in range(1, 6)]


def test_a_log_that_grows_while_it_is_verified_and_indexed_is_never_taken_for_a_changed_one(
    tmp_path: Path,
) -> None:
    """Writers put segments there and the sequencer takes them up, in the midst of every reading."""
    sink = LocalStore(tmp_path / "log")
    has_ended = threading.Event()
    failed: list[BaseException] = []

    def grow() -> None:
        try:
            for number in range(1, 13):
                key = key_of(f"{number:032x}", "run-a", number)
                made = segments_of(key, [1, 2, 1], is_last=True, vouched=certificate(key))
                for place, (name, data) in enumerate(made.items()):
                    sink.put_if_absent(name, data)
                    if (number + place) % 3 == 0:
                        sequence(sink)
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)
        finally:
            has_ended.set()

    thread = threading.Thread(target=grow)
    thread.start()
    looks = 0
    with Index(tmp_path / "index.sqlite", sink=sink.uri) as index:
        is_over = False
        while not is_over:
            is_over = has_ended.is_set()
            assert [str(each) for each in tampering(look(sink))] == []
            found = refresh(index, sink)
            assert (found.changed, found.removed, found.damaged, found.unreadable) == ((), (), {}, {})
            looks += 1
        counts = index.counts()
    thread.join()
    assert failed == []
    assert looks > 1
    assert counts.events == 48
    assert look(sink).totals.events == 48
