"""The index says what the segments say; it grows by what is new, and whatever befalls it, it comes back."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from log_making import (
    ANN,
    KEYS,
    LOG,
    LOG_KEY,
    STRANGER,
    TIME_MS,
    VOUCHERS,
    act,
    actor,
    certificate,
    edit,
    key_of,
    keys_in,
    pristine,
    put,
    segments_of,
    sequence,
    sink_with,
)

from strongroom import canonical
from strongroom.auditing import Action, Outcome, Phase
from strongroom.errors import ConfigError, FormatError, StoreError
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom_security.auditlog import listing
from strongroom_security.auditlog.alerting.troubles import troubles_of
from strongroom_security.auditlog.asking import index as index_module
from strongroom_security.auditlog.asking.index import INDICES, Index, is_damage
from strongroom_security.auditlog.asking.indexing import refresh
from strongroom_security.auditlog.asking.queries import Question, ask_events
from strongroom_security.auditlog.asking.rows import recorded_from, rows_of
from strongroom_security.auditlog.format.events import event_of, recorded_of
from strongroom_security.auditlog.format.lines import parse_segment_key
from strongroom_security.auditlog.format.segments import SegmentChain, read_segment
from strongroom_security.auditlog.listing import list_segments
from strongroom_security.auditlog.verifying.spreading import WORTH_IT_BYTES, spread
from strongroom_security.tlog.notekeys import NoteSigner
from strongroom_security.tlog.witnesses import LogKeys

SINK = "memory:///log"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "audit.sqlite"


def opened(path: Path, sink: Any, **options: Any) -> Index:
    return Index(path, sink=sink.uri, **options)


def ids(index: Index) -> set[str]:
    return {entry.recorded.id for entry in ask_events(index, Question())}


def recorded_in(sink: Any) -> dict[str, Any]:
    """The events of a sink, read without the index."""
    found = {}
    for key in keys_in(sink):
        reading = read_segment(key, sink.read(key, limit_bytes=1 << 28))
        for _, value in reading.events():
            recorded = recorded_of(value, "the event")
            found[recorded.id] = recorded
    return found


def test_the_index_says_of_every_event_what_its_segment_says(path: Path) -> None:
    sink = sink_with(pristine(), has_tree=False)
    with opened(path, sink) as index:
        assert refresh(index, sink).events == 10
        assert {entry.recorded.id: entry.recorded for entry in ask_events(index, Question())} == recorded_in(
            sink
        )
        assert index.counts().to_json() == {
            "changed_segments": 0,
            "damaged_segments": 0,
            "doubtful_segments": 0,
            "events": 10,
            "removed_segments": 0,
            "segments": 5,
            "sequenced_events": 0,
            "unproven_events": 10,
        }


@given(
    action=st.sampled_from(Action),
    phase=st.sampled_from(Phase),
    outcome=st.sampled_from(Outcome),
    text=st.text(max_size=40),
    number=st.integers(0, 2**53 - 1),
    is_bare=st.booleans(),
)
def test_a_row_is_the_event_whatever_it_says(
    action: Action, phase: Phase, outcome: Outcome, text: str, number: int, is_bare: bool
) -> None:
    bare: dict[str, Any] = {"checkpoint": None, "path": None, "byte_range": None, "run": None, "details": {}}
    done = act(
        action=action,
        phase=phase,
        outcome=outcome,
        root=text,
        reason=text,
        **(
            bare
            if is_bare
            else {"path": text, "byte_range": (0, number), "details": {"a": number, "b": text}}
        ),
    )
    who = actor(text, ip=None, identity=None, job={}, rank=None) if is_bare else actor(text, pid=number)
    line = canonical.encode(event_of(done, who, writer=ANN, seq=number, prev="ab" * 32, time_ms=number))
    value = canonical.decode(line, "the line", canonical.Bounds(length_bytes=1 << 20))
    assert recorded_from(*rows_of(value, ANN), ANN) == recorded_of(value, "the line")


@given(st.data())
def test_what_is_no_event_is_refused_and_never_stored(data: st.DataObject) -> None:
    value = event_of(act(), actor(), writer=ANN, seq=1, prev="0" * 64, time_ms=1)
    holder = data.draw(
        st.sampled_from([value, value["strongroom"], value["actor"]["user"], value["databucket"]])
    )
    name = data.draw(st.sampled_from(sorted(holder)))
    holder[name] = data.draw(
        st.none()
        | st.text(st.characters(), max_size=3)
        | st.sampled_from([-1, 2**53, 2**70, 1.5, float("nan"), "\ud800", [], {}, [1, "a"], True])
    )
    try:
        rows = rows_of(value, ANN)
    except FormatError:
        return
    connection = sqlite3.connect(":memory:")
    connection.execute(
        f"SELECT {', '.join('?' * (len(rows[0]) + len(rows[1])))}", [*rows[0], *rows[1]]
    ).fetchone()
    connection.close()


def test_only_what_is_new_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = sink_with(pristine(), has_tree=False)
    first, *others = keys_in(sink)
    kept = {key: sink.read(key, limit_bytes=1 << 20) for key in others}
    for key in others:
        sink.delete(key)
    read: list[str] = []
    whole_read = sink.read

    def counted(key: str, *, limit_bytes: int) -> bytes:
        read.append(key)
        return whole_read(key, limit_bytes=limit_bytes)

    monkeypatch.setattr(sink, "read", counted)
    with opened(path, sink) as index:
        refresh(index, sink)
        for key, data in kept.items():
            sink.put(key, data)
        refresh(index, sink)
        again = refresh(index, sink)
    assert [key for key in read if key.startswith("segments/")] == [first, *others]
    assert (again.segments, again.events) == (0, 0)


def test_what_was_changed_is_told_and_read_again_and_stays_doubtful(path: Path) -> None:
    sink = sink_with(pristine(), has_tree=False)
    key = keys_in(sink)[0]
    with opened(path, sink) as index:
        refresh(index, sink)
        edit(sink, key, lambda lines: [lines[0], lines[1].replace(b'"step":100', b'"step":999'), *lines[2:]])
        found = refresh(index, sink)
        assert found.changed == (key,)
        assert set(found.damaged) == {key}
        assert "line 2" in found.damaged[key]
        (told,) = ask_events(index, Question(step=999))
        assert told.is_doubtful
        assert index.counts().events == 10
        assert (index.counts().changed, index.counts().damaged) == (1, 1)
        put(sink, key, pristine()[key])
        assert refresh(index, sink).changed == (key,)
        assert index.counts().damaged == 0
        assert index.counts().changed == 1


def test_what_was_removed_is_told_and_its_events_stay(path: Path) -> None:
    sink = sink_with(pristine(), has_tree=False)
    key = keys_in(sink)[4]
    with opened(path, sink) as index:
        refresh(index, sink)
        sink.delete(key)
        assert refresh(index, sink).removed == (key,)
        assert refresh(index, sink).removed == ()
        assert index.counts().removed == 1
        assert all(entry.is_doubtful for entry in ask_events(index, Question(run="run-b")))
        assert len(ids(index)) == 10
        sink.put(key, pristine()[key])
        refresh(index, sink)
        assert index.counts().removed == 0


def test_a_segment_that_the_store_calls_another_version_is_the_same_if_its_bytes_are(path: Path) -> None:
    sink = sink_with(pristine(), has_tree=False)
    key = keys_in(sink)[0]
    with opened(path, sink) as index:
        refresh(index, sink)
        put(sink, key, pristine()[key])
        found = refresh(index, sink)
        assert (found.changed, found.events) == ((), 0)


def test_it_knows_which_events_are_in_the_tree_and_at_which_leaf(path: Path) -> None:
    whole = pristine()
    sink = sink_with({key: whole[key] for key in sorted(whole)[:3]}, has_tree=True)
    with opened(path, sink) as index:
        refresh(index, sink)
        for key in sorted(whole)[3:]:
            sink.put(key, whole[key])
        refresh(index, sink)
        assert index.counts().sequenced == 6
        sequence(sink)
        refresh(index, sink)
        assert index.counts().sequenced == 10
        leaves = {entry.recorded.id: entry.leaf for entry in ask_events(index, Question())}
    lines = [line for key in sorted(whole) for line in whole[key].split(b"\n")[:-1]]
    for event, leaf in leaves.items():
        assert leaf is not None
        assert f'"uid":"{event}"'.encode() in lines[leaf]


def test_a_tree_that_cannot_be_read_leaves_events_unproven(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = sink_with(pristine(), has_tree=True)
    put(sink, "tlog/checkpoint", b"nonsense")
    with opened(path, sink) as index:
        assert refresh(index, sink).events == 10
        assert index.counts().sequenced == 0
    assert "is not known any further" in caplog.text


def test_a_damaged_segment_hides_no_other_and_none_of_its_own_whole_lines(path: Path) -> None:
    sink = sink_with(pristine(), has_tree=False)
    broken, huge, *_ = keys_in(sink)
    edit(sink, broken, lambda lines: [lines[0], b"{", b'{"class_uid":6005}', *lines[2:]])
    put(sink, huge, b"\n" * 100_001)
    with opened(path, sink) as index:
        found = refresh(index, sink)
        assert set(found.damaged) == {broken, huge}
        assert len(ids(index)) == 10 - 1 - 3


@given(st.binary(max_size=300) | st.lists(st.binary(max_size=60), max_size=6).map(b"\n".join))
@settings(max_examples=40)
def test_any_bytes_in_a_segments_place_are_taken_in_as_damaged(data: bytes) -> None:
    sink = MemoryStore()
    key = min(pristine())
    sink.put(key, data)
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder) / "index", sink) as index:
        assert set(refresh(index, sink).damaged) == {key}


# ------------------------------------------------------------------------------------------- what befalls it


def test_a_damaged_file_is_built_again_and_that_is_told(path: Path) -> None:
    sink = sink_with(pristine(), has_tree=False)
    with opened(path, sink) as index:
        refresh(index, sink)
    path.write_bytes(b"this was an index" * 500)
    with opened(path, sink, is_ours=True) as index:
        assert index.rebuilt is not None
        assert refresh(index, sink).events == 10


def test_a_damaged_page_is_met_and_the_index_starts_anew(path: Path) -> None:
    sink = sink_with(pristine(), has_tree=False)
    with opened(path, sink) as index:
        refresh(index, sink)
    data = bytearray(path.read_bytes())
    for page in range(2, len(data) // 4096):
        data[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    path.write_bytes(data)
    with opened(path, sink) as index:
        with pytest.raises(sqlite3.DatabaseError) as met:
            ids(index)
        assert is_damage(met.value)
        index.start_anew(str(met.value))
        refresh(index, sink)
        assert len(ids(index)) == 10


def test_another_programs_file_is_left_alone(path: Path, tmp_path: Path) -> None:
    sink = sink_with({}, has_tree=False)
    letter = tmp_path / "letter.txt"
    letter.write_text("Dear Ada," * 50)
    with pytest.raises(ConfigError, match="left alone"):
        opened(letter, sink)
    other = tmp_path / "other.sqlite"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE mine (value)")
    connection.commit()
    connection.close()
    with pytest.raises(ConfigError, match="left alone"):
        opened(other, sink)
    assert letter.read_text().startswith("Dear Ada,")
    assert other.stat().st_size > 0


def test_another_sinks_index_is_not_taken_for_this_ones(path: Path) -> None:
    with Index(path, sink="s3://one/log"):
        pass
    with pytest.raises(ConfigError, match="s3://one/log"):
        Index(path, sink="s3://two/log")


def test_an_index_of_another_release_is_built_again(path: Path) -> None:
    sink = sink_with(pristine(), has_tree=False)
    with opened(path, sink) as index:
        refresh(index, sink)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with opened(path, sink) as index:
        assert index.rebuilt is not None
        assert "99" in index.rebuilt
        assert refresh(index, sink).events == 10


def test_it_is_for_this_user_alone(path: Path) -> None:
    with Index(path, sink=SINK):
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700


def test_what_questions_go_by_is_made_where_it_is_missing(path: Path) -> None:
    sink = sink_with(pristine(), has_tree=False)
    with opened(path, sink) as index:
        refresh(index, sink)
        list(index.select("SELECT 1", []))
    connection = sqlite3.connect(path)
    names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
    connection.close()
    assert set(INDICES) <= names


CHILD = """
import sys
from pathlib import Path
from strongroom.stores.open import open_store
from strongroom_security.auditlog.asking.index import Index
from strongroom_security.auditlog.asking.indexing import refresh
sink = open_store(sys.argv[1])
with Index(Path(sys.argv[2]), sink=sink.uri) as index:
    print("ready", flush=True)
    print(refresh(index, sink).events, index.counts().events, flush=True)
"""


def on_disk(tmp_path: Path, writers: int = 20) -> LocalStore:
    sink = LocalStore(tmp_path / "log")
    for number in range(1, writers + 1):
        key = key_of(f"{number:032x}", "run-a", number)
        for name, data in segments_of(key, [40, 40], is_last=True, vouched=None).items():
            sink.put(name, data)
    return sink


def test_two_processes_at_once_build_one_index(tmp_path: Path, path: Path) -> None:
    sink = on_disk(tmp_path)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path / "log"), str(path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [child.communicate(timeout=60)[0].split() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert sum(int(words[1]) for words in said) == 1_600
    assert {words[2] for words in said} == {"1600"}
    with opened(path, sink) as index:
        assert len(ids(index)) == 1_600


def test_a_kill_in_the_middle_leaves_an_index_that_is_gone_on_with(tmp_path: Path, path: Path) -> None:
    sink = on_disk(tmp_path)
    for delay_s in (0.0, 0.005, 0.02, 0.05):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path / "log"), str(path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(delay_s)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    with opened(path, sink) as index:
        refresh(index, sink)
        assert len(ids(index)) == index.counts().events == 1_600
        assert index.rebuilt is None


def test_who_waits_for_another_process_waits_no_longer_than_it_may(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_LOCK_S", 0.1)
    with (
        Index(path, sink=SINK) as one,
        Index(path, sink=SINK) as other,
        one.refreshing(),
        pytest.raises(StoreError, match="another process"),
        other.refreshing(),
    ):
        pass


# ------------------------------------------------------------------------------ listing, and many processes


def test_a_segment_that_comes_while_the_sink_is_listed_makes_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a writer's two new segments a listing may show the second alone: the first was not there yet."""
    sink = LocalStore(tmp_path / "log")
    for key, data in segments_of(KEYS[ANN], [1, 1, 1, 1], is_last=True, vouched=None).items():
        sink.put(key, data)
    everything = {key: sink.stat(key) for key in list_segments(sink).segments}
    first, second, third, _ = sorted(everything)
    answers = [{key: everything[key] for key in (first, third)}, everything]
    monkeypatch.setattr(listing, "_walk", lambda store, prefix: answers.pop(0).items())
    # The fourth came after what is looked at here began, and waits for the next time.
    assert list(list_segments(sink).segments) == [first, second, third]


def _length(data: bytes) -> int:
    return len(data)


def test_work_that_is_spread_over_processes_comes_back_in_order() -> None:
    things = [bytes(number) for number in range(40)]
    expected = list(range(40))
    assert list(spread(_length, things, size_bytes=0)) == expected
    assert list(spread(_length, things, size_bytes=WORTH_IT_BYTES, processes=2)) == expected


def _dies(data: bytes) -> int:
    import multiprocessing

    if len(data) == 3 and multiprocessing.parent_process() is not None:
        os._exit(1)
    return len(data)


def test_a_process_that_is_killed_is_done_without() -> None:
    things = [bytes(number) for number in range(12)]
    assert list(spread(_dies, things, size_bytes=WORTH_IT_BYTES, processes=2)) == list(range(12))


# ------------------------------------------------------------------------------------- whom it believes


def forged(writer: str = ANN, *, seed: int = 9, number: int = 9, seq: int = 500) -> dict[str, bytes]:
    """A segment under a writer's name by somebody who has not its key."""
    key = key_of(writer, "run-a", seed)
    chain = SegmentChain(key)
    chain._segment, chain._seq = number - 1, seq
    lines = [chain.open(time_ms=TIME_MS, certificate=None)]
    lines.append(chain.add(act(0, outcome=Outcome.DENIED, reason="forged"), actor(), time_ms=TIME_MS + 1))
    lines.append(chain.close(time_ms=TIME_MS + 2, is_last=True))
    return {chain.key: b"".join(lines)}


def plan_instead(sink: Any, key: str, data: bytes) -> bytes:
    """Put a plan that names a segment in the place of the tree's first; what stood there."""
    (name,) = sink.list_names("tlog/plans")
    old: bytes = sink.read(f"tlog/plans/{name}", limit_bytes=1 << 20)
    value = canonical.decode(old, "a plan", canonical.Bounds(length_bytes=1 << 20))
    size = sum(each["lines"] for each in value["segments"])
    mine = {"key": key, "sha256": sha256(data).hexdigest(), "lines": data.count(b"\n"), "follows_gap": False}
    value["segments"] = [mine, *value["segments"][1:]]
    assert size
    put(sink, f"tlog/plans/{name}", canonical.encode(value))
    return old


def test_a_forged_plan_puts_no_event_into_the_tree_and_hides_none_that_is_there(path: Path) -> None:
    sink = sink_with(pristine(), has_tree=True)
    ((key, data),) = forged("d" * 32, number=1, seq=0).items()
    sink.put(key, data)
    plan_instead(sink, key, data)
    with opened(path, sink) as index:
        refresh(index, sink)
        leaves = {entry.recorded.id: entry.leaf for entry in ask_events(index, Question())}
        assert [event for event, leaf in leaves.items() if leaf is None] == [f"{'d' * 32}-1"]
        assert index.counts().sequenced == 10


@pytest.mark.parametrize("content", (None, b"{}"))
def test_where_a_plan_is_missing_or_none_the_trees_own_entries_tell(
    path: Path, content: bytes | None
) -> None:
    sink = sink_with(pristine(), has_tree=True)
    (name,) = sink.list_names("tlog/plans")
    sink.delete(f"tlog/plans/{name}")
    if content is not None:
        sink.put(f"tlog/plans/{name}", content)
    with opened(path, sink) as index:
        refresh(index, sink)
        assert index.counts().sequenced == 10


@pytest.mark.parametrize("count", (1, 4))
def test_a_tree_that_was_made_anew_is_not_believed_by_what_was_known_of_the_old_one(
    path: Path, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    """Whether it has become smaller, or is of other segments."""
    whole = pristine()
    first, *others = sorted(whole)
    sink = sink_with({first: whole[first]}, has_tree=True)
    with opened(path, sink) as index:
        refresh(index, sink)
        for key in others:
            sink.put(key, whole[key])
        if count == 1:
            sequence(sink)
            refresh(index, sink)
            assert index.counts().sequenced == 10
        sink.delete_tree("tlog")
        kept = sorted(whole)[-count:]
        other = sink_with({key: whole[key] for key in kept}, has_tree=True)
        for key in kept:
            other.delete(key)
        for name in sorted(_names(other, "tlog")):
            sink.put(name, other.read(name, limit_bytes=1 << 20))
        refresh(index, sink)
        held = {entry.segment for entry in ask_events(index, Question()) if entry.leaf is not None}
        assert held == set(kept)
    assert "is not the one that it was, grown" in caplog.text


def _names(sink: Any, folder: str) -> list[str]:
    found: list[str] = []
    for name in sink.list_names(folder):
        found += _names(sink, f"{folder}/{name[:-1]}") if name.endswith("/") else [f"{folder}/{name}"]
    return found


def test_a_tree_that_the_named_log_has_not_signed_proves_nothing(path: Path) -> None:
    sink = sink_with(pristine(), has_tree=True)
    with opened(path, sink) as index:
        refresh(index, sink, log=LOG.keys)
        assert (index.counts().sequenced, index.tree.is_signed) == (10, True)
        stranger = NoteSigner(LOG_KEY.key.name, Ed25519PrivateKey.from_private_bytes(b"\x09" * 32))
        refresh(index, sink, log=LogKeys(origin=LOG.origin, keys=(stranger.key,)))
        assert index.counts().sequenced == 0


def test_a_segment_by_another_key_than_its_writers_is_doubtful_and_casts_no_doubt(path: Path) -> None:
    sink = sink_with(pristine() | forged(), has_tree=False)
    with opened(path, sink) as index:
        refresh(index, sink)
        assert [e.recorded.reason for e in ask_events(index, Question()) if e.is_doubtful] == ["forged"]
        assert index.counts().doubtful == 1


@pytest.mark.parametrize(("number", "seq"), ((2, 4), (9, 2)))
def test_a_segment_that_does_not_go_on_from_its_writers_is_doubtful(
    path: Path, number: int, seq: int
) -> None:
    """By who has the key, even: what is in the tree is believed first."""
    whole = pristine()
    kept = {key: whole[key] for key in sorted(whole)[:1]}
    sink = sink_with(kept, has_tree=True)
    for key, data in forged(seed=1, number=number, seq=seq).items():
        sink.put(key, data)
    with opened(path, sink) as index:
        refresh(index, sink)
        assert [e.recorded.reason for e in ask_events(index, Question()) if e.is_doubtful] == ["forged"]


def test_it_knows_for_which_writers_a_named_signer_vouches(path: Path) -> None:
    known, strange = key_of("1" * 32, "run-a", 1), key_of("2" * 32, "run-a", 2)
    bare = key_of("3" * 32, "run-a", 3)
    segments: dict[str, bytes] = {}
    for key, vouched in (
        (known, certificate(known)),
        (strange, certificate(strange, STRANGER)),
        (bare, None),
    ):
        segments |= segments_of(key, [1], is_last=True, vouched=vouched)
    stolen = key_of("4" * 32, "run-a", 4)
    segments |= segments_of(stolen, [1], is_last=True, vouched=certificate(known))
    sink = sink_with(segments, has_tree=False)
    with opened(path, sink) as index:
        refresh(index, sink)
        assert {e.is_certified for e in ask_events(index, Question())} == {None}
        for _ in range(2):  # asked of the index the second time
            told = ask_events(index, Question(), vouchers=VOUCHERS)
            assert {e.recorded.id[0]: e.is_certified for e in told} == {
                "1": True,
                "2": False,
                "3": False,
                "4": False,
            }


@pytest.mark.parametrize("number", (b"NaN", b"1e999", b"-Infinity", b"9007199254740993"))
def test_a_number_that_canonical_json_has_not_is_damage_and_never_told(path: Path, number: bytes) -> None:
    sink = sink_with(pristine(), has_tree=False)
    key = keys_in(sink)[0]
    edit(
        sink,
        key,
        lambda lines: [lines[0], lines[1].replace(b'"size_bytes":3', b'"size_bytes":' + number), *lines[2:]],
    )
    with opened(path, sink) as index:
        assert set(refresh(index, sink).damaged) == {key}
        assert len(ids(index)) == 9
    value = json.loads(pristine()[key].split(b"\n")[1].replace(b'"size_bytes":3', b'"size_bytes":' + number))
    with pytest.raises(FormatError, match="none that canonical JSON holds"):
        rows_of(value, ANN)


def test_what_is_wrong_with_segments_is_told_by_kind(tmp_path: Path) -> None:
    sink = sink_with(pristine(), has_tree=True)
    gone, touched = keys_in(sink)[0], keys_in(sink)[-1]
    run = parse_segment_key(touched)
    assert run is not None
    sink.delete(gone)
    edit(
        sink, touched, lambda lines: [*lines[:2], lines[2].replace(b'"step":100', b'"step":101'), *lines[3:]]
    )
    with Index(tmp_path / "index.sqlite", sink=sink.uri) as index:
        refresh(index, sink)
        told = {each.what: each.keys for each in troubles_of(index, None)}
        assert told["stand in its tree and are not there"] == (gone,)
        assert told["are damaged"] == (touched,)
        assert [each.keys for each in troubles_of(index, run[0])] == [(touched,)]
        index.note_unreadable([touched])
        assert {"could not be read"} <= {each.what for each in troubles_of(index, run[0])}
        refresh(index, sink)
        assert "could not be read" not in {each.what for each in troubles_of(index, None)}


def test_a_segment_made_anew_since_it_was_sequenced_is_trouble_though_nobody_knew_the_old_one(
    tmp_path: Path,
) -> None:
    sink = sink_with(pristine(), has_tree=True)
    ((key, anew),) = segments_of(KEYS[ANN], [1], is_last=False, vouched=certificate(KEYS[ANN])).items()
    put(sink, key, anew)
    with Index(tmp_path / "index.sqlite", sink=sink.uri) as index:
        refresh(index, sink)
        told = {each.what: each.keys for each in troubles_of(index, None)}
        assert told["are not those that stand in its tree"] == (key,)
