"""The sequencer: every whole segment goes into the tree once, whoever dies and whoever else sequences too."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from segment_making import HOUR_MS, TIME_MS, Writer, lines_of

from strongroom.errors import (
    ConfigError,
    FormatError,
    IntegrityError,
    StoreUnavailableError,
    StrongroomError,
    UntrustedError,
)
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom.stores.offers import Tuning
from strongroom.testing.faults import Fault, FaultyStore, every_fault
from strongroom_security.auditlog import listing
from strongroom_security.auditlog.listing import list_segments
from strongroom_security.auditlog.sequencing import sequencing
from strongroom_security.auditlog.sequencing.choosing import Limits
from strongroom_security.auditlog.sequencing.logstate import LogState
from strongroom_security.auditlog.sequencing.sequencing import Log, Sequenced, Sequencer, sequence_once
from strongroom_security.auditlog.verifying.checking import Demands, check_log
from strongroom_security.auditlog.verifying.findings import FindingKind
from strongroom_security.tlog.merkle import leaf_hashes, root_of
from strongroom_security.tlog.notekeys import NoteSigner
from strongroom_security.tlog.reading import TreeReader
from strongroom_security.tlog.witnesses import open_checkpoint

ORIGIN = "example.com/audit"
SIGNER = NoteSigner(ORIGIN, Ed25519PrivateKey.from_private_bytes(b"\x07" * 32))
OTHER = NoteSigner(ORIGIN, Ed25519PrivateKey.from_private_bytes(b"\x08" * 32))
LOG = Log(origin=ORIGIN, signers=(SIGNER,))
NOW_NS = 10**18


def entries(sink: Any, found: Sequenced) -> list[bytes]:
    """What is in the tree, verified to the root that was signed."""
    assert found.head is not None
    return [entry for _, entry in TreeReader(sink, found.head).walk()]


def memory() -> MemoryStore:
    return MemoryStore(clock_ns=lambda: NOW_NS)


def run(sink: Any, state: LogState | None = None, **options: Any) -> Sequenced:
    return Sequencer(sink, LOG, state=state, clock_ns=lambda: NOW_NS, **options).run_once()


def test_an_empty_sink_has_no_log() -> None:
    sink = memory()
    found = run(sink)
    assert (found.head, found.note, found.lines, found.is_clean) == (None, None, 0, True)
    assert sink.contents() == {}


def test_every_line_is_an_entry_whole_segments_in_order_of_hour_writer_and_number() -> None:
    sink = memory()
    late = Writer(1, time_ms=TIME_MS + HOUR_MS)
    early, other = Writer(3), Writer(2, run=None)
    keys = late.put(sink, 2), early.put(sink, 1), other.put(sink, 2)
    found = run(sink)
    expected = [*keys[2], *keys[1], *keys[0]]
    assert entries(sink, found) == lines_of(sink, expected)
    assert (found.segments, found.lines) == (5, 20)
    assert found.head is not None
    assert found.head.root == root_of(leaf_hashes(lines_of(sink, expected)))


def test_a_clock_that_goes_back_does_not_put_a_segment_before_the_one_that_it_follows() -> None:
    sink = memory()
    writer = Writer(1)
    first = writer.put(sink)
    writer.time_ms -= 5 * HOUR_MS
    second = writer.put(sink)
    found = run(sink)
    assert entries(sink, found) == lines_of(sink, [*first, *second])
    assert found.waiting == ()
    assert sink.list_names("tlog/plans") == ["0.json"]


def test_what_comes_later_goes_on_where_the_tree_ended(tmp_path: Path) -> None:
    sink, state = memory(), LogState(tmp_path / "state")
    writers = [Writer(number) for number in range(1, 4)]
    expected: list[str] = []
    for turn in range(12):
        several = writers[turn % 3].put(sink, segments=1 + turn % 2, events=turn * 7)
        found = run(sink, state)
        expected += several
        assert found.segments == len(several)
        assert entries(sink, found) == lines_of(sink, expected)
    assert run(sink, state).segments == 0
    assert state.read() == found.note


def test_one_tree_whatever_is_remembered_and_however_much_goes_into_a_plan(tmp_path: Path) -> None:
    def sequenced(options: dict[str, Any], state: LogState | None) -> dict[str, bytes]:
        sink = memory()
        for number in range(1, 6):
            Writer(number).put(sink, segments=3, events=60)
        run(sink, state, **options)
        if state is not None:
            state.forget()
        Writer(9, time_ms=TIME_MS + HOUR_MS).put(sink, segments=2, events=5)
        run(sink, state, **options)
        tiles = {key: data for key, data in sink.contents().items() if key.startswith("tlog/tile/")}
        return {key: data for key, data in tiles.items() if ".p/" not in key} | {
            "tlog/checkpoint": sink.contents()["tlog/checkpoint"]
        }

    whole = sequenced({}, None)
    assert len(whole) > 3
    assert sequenced({"limits": Limits(segments=2)}, LogState(tmp_path / "a")) == whole
    assert sequenced({"limits": Limits(lines=1)}, LogState(tmp_path / "b")) == whole
    assert sequenced({"limits": Limits(length_bytes=20_000)}, None) == whole


def test_a_run_costs_what_is_new_and_a_tile_a_level(tmp_path: Path) -> None:
    sink, state = memory(), LogState(tmp_path / "state")
    Writer(1).put(sink, segments=4, events=1_000)
    run(sink, state)
    Writer(2, time_ms=TIME_MS + HOUR_MS).put(sink)
    counted = FaultyStore(sink)
    run(counted, state)
    reads = [each.key for each in counted.operations if each.name == "read"]
    assert len(reads) < 30
    assert len([key for key in reads if key.startswith("tlog/tile/entries/")]) == 1


# ---------------------------------------------------------------------------------------- what does not go in


def damaged(data: bytes) -> bytes:
    lines = data.split(b"\n")
    lines[1] = lines[1].replace(b'"ada"', b'"eve"')
    return b"\n".join(lines)


def test_a_damaged_segment_never_goes_in_is_located_and_blocks_nobody_else() -> None:
    sink = memory()
    key, data = Writer(1).segment(3)
    sink.put(key, damaged(data))
    good = Writer(2).put(sink)
    found = run(sink)
    assert entries(sink, found) == lines_of(sink, good)
    assert not found.is_clean
    assert [(each.key, each.line) for each in found.refused] == [(key, 2)]
    assert str(found.refused[0]).startswith(f"{key}, line 2: ")


@pytest.mark.parametrize(
    "break_it",
    (
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: b"\n".join(data.split(b"\n")[:-2]) + b"\n",
        lambda data: data + data,
        lambda data: data.replace(b'"signature":"', b'"signature":"AA'),
        lambda data: b"\x00" * 500,
    ),
    ids=["cut", "empty", "unclosed", "twice", "signature", "zeros"],
)
def test_a_segment_broken_in_any_way_stays_out(break_it: Callable[[bytes], bytes]) -> None:
    sink = memory()
    key, data = Writer(1).segment(3)
    sink.put(key, break_it(data))
    found = run(sink)
    assert found.head is None
    assert [each.key for each in found.refused] == [key]


def test_a_segment_that_was_copied_elsewhere_stays_out() -> None:
    sink = memory()
    (key,) = Writer(1).put(sink)
    copies = [key.replace("run-a", "run-b"), key.replace("20251130T", "20251129T")]
    assert key not in copies
    for copy in copies:
        sink.put(copy, sink.read(key, limit_bytes=1 << 20))
    found = run(sink)
    assert entries(sink, found) == lines_of(sink, [key])
    assert sorted(each.key for each in found.refused) == sorted(copies)


def test_a_segment_that_does_not_go_on_from_the_one_before_stays_out() -> None:
    sink = memory()
    writer, impostor = Writer(1), Writer(1)
    writer.put(sink, events=2)
    impostor.segment(5)
    key, data = impostor.segment(1)
    sink.put(key, data)
    found = run(sink)
    assert found.segments == 1
    assert [each.key for each in found.refused] == [key]
    assert "does not go on where" in found.refused[0].message


def test_a_segment_by_another_key_than_its_writers_stays_out() -> None:
    sink = memory()
    writer, thief = Writer(1), Writer(2)
    writer.put(sink)
    key, data = _continued(writer, thief)
    sink.put(key, data)
    found = run(sink)
    assert [each.key for each in found.refused] == [key]
    assert "another key" in found.refused[0].message


def _continued(writer: Writer, thief: Writer) -> tuple[str, bytes]:
    """The next segment of a writer's chain, by somebody who has read the chain and has not the key."""
    chain, stolen = writer._chain, thief._chain
    stolen._seq, stolen._prev, stolen._segment = chain._seq, chain._prev, chain._segment
    stolen._key = dataclasses.replace(stolen._key, writer=writer.name)
    return thief.segment()


def test_what_follows_a_writers_last_segment_stays_out() -> None:
    sink = memory()
    writer = Writer(1)
    key, data = writer.segment(1, is_last=True)
    sink.put(key, data)
    after = writer.put(sink)
    found = run(sink)
    assert [each.key for each in found.refused] == after
    assert "has ended" in found.refused[0].message


def test_what_was_refused_is_not_read_again_until_it_changes() -> None:
    sink = memory()
    key, data = Writer(1).segment(3)
    sink.put(key, damaged(data))
    counted = FaultyStore(sink)
    sequencer = Sequencer(counted, LOG, clock_ns=lambda: NOW_NS)
    for _ in range(3):
        assert len(sequencer.run_once().refused) == 1
    assert [each.key for each in counted.operations if each.name == "read"].count(key) == 1
    sink.delete(key)
    sink.put(key, data)
    assert sequencer.run_once().segments == 1


# ------------------------------------------------------------------------------------------------------- gaps


def test_a_segment_waits_for_the_ones_before_it_and_then_goes_in_with_a_word() -> None:
    now = [NOW_NS]
    sink = MemoryStore(clock_ns=lambda: NOW_NS)
    writer = Writer(1)
    first = writer.put(sink)
    missing = writer.segment()
    third, fourth = writer.put(sink), writer.put(sink)
    sequencer = Sequencer(sink, LOG, wait_for_gaps_s=60, clock_ns=lambda: now[0])
    found = sequencer.run_once()
    assert found.segments == 1
    assert found.is_clean
    assert [(each.key, each.missing) for each in found.waiting] == [(third[0], 2), (fourth[0], 3)]
    now[0] += 59 * 10**9
    assert sequencer.run_once().segments == 0
    now[0] += 10**9
    found = sequencer.run_once()
    assert found.gaps == (third[0],)
    assert not found.is_clean
    assert entries(sink, found) == lines_of(sink, [*first, *third, *fourth])
    # The one that was missing turns up after all.
    sink.put(*missing)
    found = sequencer.run_once()
    assert found.is_clean
    assert entries(sink, found) == lines_of(sink, [*first, *third, *fourth, missing[0]])


def test_what_turns_up_late_has_to_fit_on_both_sides() -> None:
    sink = memory()
    writer = Writer(1)
    writer.put(sink)
    writer.segment(2)
    writer.put(sink)
    run(sink, wait_for_gaps_s=0)
    for changed in (Writer(1), Writer(1)):
        changed.segment(2)
    impostor = Writer(1)
    impostor.segment()
    key, data = impostor.segment(4)
    sink.put(key, data)
    found = run(sink, wait_for_gaps_s=0)
    assert [each.key for each in found.refused] == [key]
    assert "comes after it" in found.refused[0].message


def test_a_gap_is_found_again_by_who_remembers_nothing(tmp_path: Path) -> None:
    sink = memory()
    writer = Writer(1)
    writer.put(sink)
    missing = writer.segment()
    writer.put(sink)
    run(sink, wait_for_gaps_s=0)
    sink.put(*missing)
    found = run(sink, LogState(tmp_path / "state"))
    assert (found.segments, found.is_clean) == (1, True)


# -------------------------------------------------------------------------------- another log than was signed


def test_a_log_that_was_set_back_removed_or_rewritten_is_not_gone_on_with(tmp_path: Path) -> None:
    sink, state = memory(), LogState(tmp_path / "state")
    Writer(1).put(sink)
    run(sink, state)
    first = sink.contents()
    Writer(2).put(sink, segments=3)
    run(sink, state)
    Writer(3).put(sink)

    rewritten = memory()
    Writer(9).put(rewritten, segments=9)
    run(rewritten)
    for contents, why in (
        (first, "set back"),
        ({key: data for key, data in sink.contents().items() if key != "tlog/checkpoint"}, "removed"),
        (rewritten.contents(), "is not the log that"),
    ):
        other = memory()
        other.plant(contents)
        before = other.contents()
        with pytest.raises(IntegrityError, match=why):
            run(other, state)
        assert other.contents() == before
    assert run(sink, state).segments == 1


def test_a_log_that_is_met_for_the_first_time_is_remembered_and_so_is_what_another_published(
    tmp_path: Path,
) -> None:
    sink, state = memory(), LogState(tmp_path / "state")
    Writer(1).put(sink)
    found = run(sink)
    run(sink, state)
    assert state.read() == found.note
    Writer(2).put(sink)
    found = run(sink)
    run(sink, state)
    assert state.read() == found.note


def test_what_is_remembered_of_another_log_is_not_believed(tmp_path: Path) -> None:
    other, sink = memory(), memory()
    Writer(1).put(other, segments=2)
    run(other, LogState(tmp_path / "other"))
    expected = Writer(2).put(sink, segments=3)
    run(sink, LogState(tmp_path / "state"))
    (tmp_path / "state.segments").write_bytes((tmp_path / "other.segments").read_bytes())
    expected += Writer(1).put(sink, segments=1)
    found = run(sink, LogState(tmp_path / "state"))
    assert found.is_clean
    assert entries(sink, found) == lines_of(sink, expected)


def test_what_two_processes_remember_of_one_log_counts_once(tmp_path: Path) -> None:
    sink, state = memory(), LogState(tmp_path / "state")
    Writer(1).put(sink, segments=2)
    found = run(sink, state)
    cache = tmp_path / "state.segments"
    cache.write_bytes(cache.read_bytes() * 2)
    remembered = state.remembered(LOG.keys.keys)
    assert remembered is not None
    assert found.head is not None
    assert (remembered[0].size, remembered[1]) == (found.head.size, found.head.root)


def test_a_head_by_another_key_is_not_gone_on_with_but_by_a_former_one_it_is() -> None:
    sink = memory()
    Writer(1).put(sink)
    Sequencer(sink, Log(origin=ORIGIN, signers=(OTHER,))).run_once()
    Writer(2).put(sink)
    with pytest.raises(UntrustedError):
        run(sink)
    changed = Log(origin=ORIGIN, signers=(SIGNER,), former=(OTHER.key,))
    found = Sequencer(sink, changed).run_once()
    assert found.segments == 1
    assert found.note is not None
    open_checkpoint(found.note, LOG.keys, "the head")


def test_every_tile_of_the_edge_that_was_changed_or_removed_is_noticed(tmp_path: Path) -> None:
    sink, state = memory(), LogState(tmp_path / "state")
    Writer(1).put(sink, segments=2, events=150)
    run(sink, state)
    Writer(2).put(sink)
    for key, data in sink.contents().items():
        if not key.startswith("tlog/tile/") or ".p/" not in key:
            continue
        for change in ({key: bytes([data[0] ^ 1]) + data[1:]}, {key: data[:-1]}):
            other = memory()
            other.plant({**sink.contents(), **change})
            with pytest.raises((IntegrityError, FormatError)):
                run(other, state)


def test_a_planned_segment_that_was_changed_before_it_went_in_is_told(tmp_path: Path) -> None:
    sink = memory()
    (key,) = Writer(1).put(sink)
    whole = sink.contents()[key]
    # The sequencer dies once its plan stands.
    with pytest.raises(StoreUnavailableError):
        run(FaultyStore(sink, fail_at=2, only={"put_if_absent"}, lasting=True))
    assert [name for name in sink.contents() if name.startswith("tlog/")] == ["tlog/plans/0.json"]
    sink.plant({key: damaged(whole)})
    with pytest.raises(IntegrityError, match="SHA-256"):
        run(sink)
    sink.delete(key)
    with pytest.raises(IntegrityError, match="put it back"):
        run(sink)
    sink.plant({key: whole})
    assert run(sink).segments == 1


@pytest.mark.parametrize(
    "plan",
    (
        b"",
        b"{}",
        b'{"format":"strongroom.audit-plan/1","segments":[],"size":0}',
        b'{"format":"strongroom.audit-plan/1","segments":[{"follows_gap":false,"key":"a"}],"size":0}',
    ),
    ids=["empty", "no-members", "no-segments", "no-key"],
)
def test_a_plan_that_is_none_is_refused(plan: bytes) -> None:
    sink = memory()
    Writer(1).put(sink)
    sink.put("tlog/plans/0.json", plan)
    with pytest.raises(FormatError):
        run(sink)


# ------------------------------------------------------------------------------------ whoever dies, and where


def tree_of(store: MemoryStore) -> dict[str, bytes]:
    return {key: data for key, data in store.contents().items() if key.startswith("tlog/")}


def test_whatever_fails_and_however_the_next_run_makes_the_same_tree(tmp_path: Path) -> None:
    made = memory()
    Writer(1).put(made, segments=2, events=1)
    Writer(2).put(made, segments=1, events=1)

    def fresh() -> MemoryStore:
        store = memory()
        store.plant(made.contents())
        return store

    whole = fresh()
    run(whole, limits=Limits(segments=2))
    numbers = itertools.count()
    failed = 0
    for store in every_fault(fresh, lasting=(True,)):
        state = LogState(tmp_path / f"state-{next(numbers)}")
        try:
            run(store, state, limits=Limits(segments=2))
        except StrongroomError:
            failed += 1
        assert isinstance(store.inner, MemoryStore)
        found = run(store.inner, state, limits=Limits(segments=2))
        assert tree_of(store.inner) == tree_of(whole), store
        assert state.read() == found.note
    assert failed > 60


def test_one_failure_anywhere_harms_nothing_either() -> None:
    def fresh() -> MemoryStore:
        store = memory()
        Writer(1).put(store, segments=2)
        return store

    whole = fresh()
    run(whole)
    for store in every_fault(fresh, lasting=(False,), faults=(Fault.TIMED_OUT, Fault.ANSWER_LOST)):
        assert isinstance(store.inner, MemoryStore)
        try:
            run(store)
        except StrongroomError:
            run(store.inner)
        assert tree_of(store.inner) == tree_of(whole), store


def test_of_two_sequencers_at_once_both_make_one_tree(tmp_path: Path) -> None:
    sink = LocalStore(tmp_path / "sink")
    writers = [Writer(number) for number in range(1, 5)]
    for writer in writers:
        writer.put(sink, segments=2, events=40)
    errors: list[BaseException] = []
    gate = threading.Barrier(3)

    def sequence(number: int) -> None:
        try:
            gate.wait(30)
            for _ in range(3):
                Sequencer(
                    LocalStore(tmp_path / "sink"),
                    LOG,
                    state=LogState(tmp_path / f"state-{number}"),
                    limits=Limits(segments=1 + number),
                ).run_once()
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=sequence, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not [error for error in errors if not isinstance(error, StoreUnavailableError)]
    found = run(sink, LogState(tmp_path / "state-0"))
    assert found.head is not None
    assert found.head.size == 8 * 42
    keys = set(entries(sink, found))
    assert len(keys) == 8 * 42


def test_a_sequencer_that_was_overtaken_starts_over_and_never_sets_the_head_back(tmp_path: Path) -> None:
    sink = memory()
    Writer(1).put(sink)
    run(sink)
    Writer(2).put(sink)

    class Overtaken(FaultyStore):
        """Another sequencer does it all just before this one publishes."""

        is_over = False

        def replace(self, key: str, data: Any, *, version: str | None) -> bool:
            if not self.is_over:
                self.is_over = True
                run(sink)
                Writer(3).put(sink)
                run(sink)
            return super().replace(key, data, version=version)

    found = run(Overtaken(sink))
    assert found.head is not None
    assert found.head.size == 12
    assert len(set(entries(sink, found))) == 12


_KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from test_sequencing import LOG
from strongroom.stores.calls import OsCalls
from strongroom.stores.local import LocalStore
from strongroom_security.auditlog import listing
from strongroom_security.auditlog.verifying.checking import Demands, check_log
from strongroom_security.auditlog.sequencing.choosing import Limits
from strongroom_security.auditlog.verifying.findings import FindingKind
from strongroom_security.auditlog.listing import list_segments
from strongroom_security.auditlog.sequencing.logstate import LogState
from strongroom_security.auditlog.sequencing.sequencing import Sequencer

class Deadly(OsCalls):
    left = int(sys.argv[3])

    def _count(self):
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, fd, data):
        self._count()
        return super().write(fd, data)

    def link(self, source, target, *, dir_fd):
        super().link(source, target, dir_fd=dir_fd)
        self._count()

    def rename(self, source, target, *, dir_fd):
        super().rename(source, target, dir_fd=dir_fd)
        self._count()

sink = LocalStore(sys.argv[1], calls=Deadly())
Sequencer(sink, LOG, state=LogState(Path(sys.argv[2])), limits=Limits(segments=2)).run_once()
"""


def test_a_real_kill_anywhere_leaves_a_log_that_is_gone_on_with(tmp_path: Path) -> None:
    def fill(sink: LocalStore) -> None:
        Writer(1).put(sink, segments=3, events=4)

    whole = LocalStore(tmp_path / "whole")
    fill(whole)
    expected = run(whole, limits=Limits(segments=2))
    for at in (0, 3, 7, 11):
        folder, state = tmp_path / f"sink-{at}", tmp_path / f"state-{at}"
        sink = LocalStore(folder)
        fill(sink)
        command = [
            sys.executable,
            "-c",
            _KILLED,
            str(folder),
            str(state),
            str(at),
            str(Path(__file__).parent),
        ]
        ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
        assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
        found = run(sink, LogState(state), limits=Limits(segments=2))
        assert found.note == expected.note
        assert entries(sink, found) == entries(whole, expected)


# ------------------------------------------------------------------------------------------- keys and options


def test_each_of_several_keys_signs_and_each_alone_is_enough_to_verify() -> None:
    sink = memory()
    Writer(1).put(sink)
    ecdsa = NoteSigner(ORIGIN, ec.generate_private_key(ec.SECP256R1()))
    found = sequence_once(sink, Log(origin=ORIGIN, signers=(SIGNER, ecdsa)))
    assert found.note is not None
    for signer in (SIGNER, ecdsa):
        log = Log(origin=ORIGIN, signers=(signer,)).keys
        assert open_checkpoint(found.note, log, "the head").head == found.head
    with pytest.raises(UntrustedError):
        open_checkpoint(found.note, Log(origin=ORIGIN, signers=(OTHER,)).keys, "the head")


def test_a_log_without_keys_or_with_another_name_is_refused() -> None:
    with pytest.raises(ConfigError):
        Log(origin=ORIGIN, signers=())
    with pytest.raises(ConfigError):
        Log(origin="example.com/other", signers=(SIGNER,))


def test_a_sink_that_replaces_nothing_is_refused() -> None:
    class Plain:
        uri = "plain://sink"

    with pytest.raises(ConfigError, match="another's place"):
        Sequencer(Plain(), LOG)  # type: ignore[arg-type]


def test_a_state_lies_in_a_folder_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        LogState(tmp_path / "absent" / "state")
    with pytest.raises(ConfigError):
        LogState(tmp_path)


@pytest.mark.parametrize(
    "damage", (b"", b"garbage\n", b'{"root":"","segments":[],"size":7}\n', b"\xff" * 100)
)
def test_what_is_remembered_of_the_tree_may_be_damaged_or_torn_and_is_made_again(
    tmp_path: Path, damage: bytes
) -> None:
    sink, state = memory(), LogState(tmp_path / "state")
    Writer(1).put(sink, segments=3)
    run(sink, state)
    cache = tmp_path / "state.segments"
    whole = cache.read_bytes()
    Writer(2).put(sink)
    cache.write_bytes(damage + whole[: len(whole) // 2])
    found = run(sink, state)
    assert (found.segments, found.refused) == (1, ())
    assert len(entries(sink, found)) == 16
    again = Sequencer(FaultyStore(sink), LOG, state=state)
    assert again.run_once().segments == 0


def test_following_goes_on_over_failures_and_ends_when_told() -> None:
    sink = memory()
    Writer(1).put(sink)
    stop = threading.Event()
    faulty = FaultyStore(sink, fail_at=1)
    found = []
    for each in Sequencer(faulty, LOG, clock_ns=lambda: NOW_NS).follow(0.0, stop):
        found.append(each)
        if len(found) == 3:
            stop.set()
    assert isinstance(found[0], StoreUnavailableError)
    assert isinstance(found[1], Sequenced)
    assert found[1].segments == 1
    assert isinstance(found[2], Sequenced)
    assert found[2].segments == 0


def test_following_waits_for_a_folder_that_is_away_and_ends_where_the_log_is_gone(tmp_path: Path) -> None:
    sink, away = LocalStore(tmp_path / "sink"), tmp_path / "away"
    Writer(1).put(sink)
    sequencer = Sequencer(sink, LOG, state=LogState(tmp_path / "state"))
    rounds = sequencer.follow(0.0, threading.Event())
    assert isinstance(next(rounds), Sequenced)
    (tmp_path / "sink").rename(away)
    found = next(rounds)
    assert isinstance(found, StoreUnavailableError)
    assert "its mount is away" in str(found)
    away.rename(tmp_path / "sink")
    Writer(2).put(sink)
    found = next(rounds)
    assert isinstance(found, Sequenced)
    assert found.segments == 1
    sink.delete("tlog/checkpoint")
    with pytest.raises(IntegrityError, match="the log was removed"):
        next(rounds)


def test_what_lies_below_a_mount_that_is_away_is_no_log_that_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = LocalStore(tmp_path / "sink")
    Writer(1).put(sink)
    sequencer = Sequencer(sink, LOG, state=LogState(tmp_path / "state"))
    sequencer.run_once()
    sink.delete_tree("tlog")
    with monkeypatch.context() as patched:
        patched.setattr(sequencing, "device_of", lambda _: -1)
        with pytest.raises(StoreUnavailableError, match="its mount is away"):
            sequencer.run_once()
    with pytest.raises(IntegrityError, match="the log was removed"):
        sequencer.run_once()


# ------------------------------------------------------------------------------- what is remembered, and lies


@pytest.mark.parametrize("what", ("another writer", "another end", "that it has ended"))
def test_what_is_remembered_and_was_changed_is_not_believed_though_sizes_and_root_fit(
    tmp_path: Path, what: str
) -> None:
    sink, state = memory(), LogState(tmp_path / "state")
    writer, other = Writer(1), Writer(2)
    expected = writer.put(sink)
    found = run(sink, state)
    assert found.head is not None
    cache = tmp_path / "state.segments"
    text = cache.read_text()
    if what == "another writer":
        text = text.replace(writer.name, other.name)
    elif what == "another end":
        text = text.replace('"last_hash":"', '"last_hash":"0')
    else:
        text = text.replace('"is_last":false', '"is_last":true')
    assert text != cache.read_text()
    cache.write_text(text)
    assert LogState(tmp_path / "state").remembered(LOG.keys.keys) is None
    expected += other.put(sink)
    expected += writer.put(sink)
    found = run(sink, LogState(tmp_path / "state"))
    assert (found.segments, found.is_clean) == (2, True)
    assert sorted(entries(sink, found)) == sorted(lines_of(sink, expected))
    remembered = LogState(tmp_path / "state").remembered(LOG.keys.keys)
    assert remembered is not None
    assert len(remembered[0]) == 3


def test_what_another_key_has_signed_is_not_remembered(tmp_path: Path) -> None:
    sink, state = memory(), LogState(tmp_path / "state")
    Writer(1).put(sink)
    run(sink, state)
    assert LogState(tmp_path / "state").remembered([OTHER.key]) is None
    assert LogState(tmp_path / "state").remembered([OTHER.key, SIGNER.key]) is not None


# ----------------------------------------------------------------------------------------- what is no segment


def test_links_pipes_and_folders_among_segments_are_told_and_stop_nobody(tmp_path: Path) -> None:
    sink = LocalStore(tmp_path / "log")
    (key,) = Writer(1).put(sink)
    folder = tmp_path / "log" / "segments" / "run-z" / "20251130T09"
    folder.mkdir(parents=True)
    os.mkfifo(folder / f"{'0' * 32}-000001.jsonl")
    (folder / f"{'0' * 32}-000002.jsonl").symlink_to("/etc/passwd")
    (folder / f"{'0' * 32}-000003.jsonl").mkdir()
    (folder / "linked").symlink_to(tmp_path)
    (folder / "a name\nof two lines").write_bytes(b"")
    listed = list_segments(sink)
    assert list(listed.segments) == [key]
    assert sorted(stray.rpartition("/")[2] for stray in listed.strays) == [
        *(f"{'0' * 32}-00000{number}.jsonl" for number in (1, 2, 3)),
        "a name\nof two lines",
        "linked",
    ]
    assert run(sink).segments == 1
    found = check_log(sink, Demands(log=LOG.keys))
    assert {each.segment for each in found.findings if each.kind is FindingKind.STRAY} == set(listed.strays)


def test_segments_are_held_at_once_only_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = memory()
    keys = Writer(1).put(sink, segments=4)
    infos = {key: sink.stat(key) for key in keys}
    monkeypatch.setattr(listing, "tuning_of", lambda store: Tuning(looks=4))
    monkeypatch.setattr(listing, "MAX_SEGMENT_BYTES", infos[keys[0]].size_bytes * 5 // 2)
    batches: list[int] = []
    run_all = listing.run_all

    def counted(works: Any, **options: Any) -> Any:
        batches.append(len(works))
        return run_all(works, **options)

    monkeypatch.setattr(listing, "run_all", counted)
    assert [key for key, _ in listing.read_segments(sink, keys, infos)] == keys
    assert batches == [2, 2]
