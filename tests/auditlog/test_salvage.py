"""What a dead process left is in the log all the same, wherever it died, and whoever else looks for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from recorders import LONG_S, Place, act, soon

from strongroom.auditing import Action
from strongroom.errors import StoreUnavailableError
from strongroom.stores.base import Store
from strongroom.stores.local import LocalStore
from strongroom_security.auditlog.format.events import Actor
from strongroom_security.auditlog.format.segments import SegmentChain
from strongroom_security.auditlog.recording.auditor import LogAuditor
from strongroom_security.auditlog.recording.salvage import Salvaged
from strongroom_security.auditlog.recording.settings import Settings
from strongroom_security.auditlog.recording.spool import Spool

HERE = Path(__file__).parent
WRITER = "cd" * 16
BOOT = Path("/proc/sys/kernel/random/boot_id")
DEAD = Actor(user="jo", uid="1000", pid=4711, process="train.py", host="node-3")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def segments_of_a_writer(settings: Settings) -> list[bytes]:
    """Two segments of three events each, the second one without its end."""
    from strongroom_security.auditlog.format.segments import WriterKey

    key = WriterKey(writer=WRITER, run="run-a", private=settings.draw()[1], host="node-3", pid=4711)
    chain = SegmentChain(key)
    found = []
    for first in (0, 3):
        lines = [chain.open(time_ms=1_796_000_000_000, certificate=None)]
        lines += [chain.add(act(first + each), DEAD, time_ms=1_796_000_000_000 + each) for each in range(3)]
        found.append(b"".join(lines))
        if first == 0:
            found[0] += chain.close(time_ms=1_796_000_000_100)
    return found


def leave(place: Place, *, closed: bytes | None, opened: bytes | None) -> None:
    """What a process leaves that is killed: its folder, which nobody locks."""
    folder = Spool(place.spool, place.settings().sink).begin(WRITER)
    if closed is not None:
        folder.closed_path(1).write_bytes(closed)
    if opened is not None:
        folder.open_path(2).write_bytes(opened)
    folder.disown()


def salvage(place: Place, **changes: object) -> Salvaged:
    auditor = LogAuditor(place.settings(salvages=False, **changes))
    done = auditor.salvage()
    auditor.close(within_s=LONG_S)
    return done


def test_wherever_a_process_is_killed_nothing_that_it_recorded_is_missing(place: Place) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "recording_child.py"), "killed", str(place.sink.parent), "12"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    recorded = [int(line) for line in done.stdout.split()]
    assert len(recorded) == 12
    found = salvage(place)
    assert (found.left, found.error) == (0, None)
    numbers = set(place.numbers())
    for process, count in enumerate(recorded):
        assert {process * 1000 + each for each in range(count)} <= numbers
    assert place.is_cleared()


def test_a_segment_cut_at_any_byte_keeps_every_whole_line_and_tells_of_the_torn_one(tmp_path: Path) -> None:
    closed, opened = segments_of_a_writer(Place(tmp_path).settings())
    ends = [place + 1 for place, byte in enumerate(opened) if byte == ord("\n")]
    cuts = {0, 1, len(opened)} | {end + by for end in ends for by in (-1, 0, 7)}
    for cut in sorted(each for each in cuts if each <= len(opened)):
        place = Place(tmp_path / str(cut))
        leave(place, closed=closed, opened=opened[:cut])
        whole = sum(end <= cut for end in ends)
        is_torn = cut not in (0, *ends)
        found = salvage(place)
        assert (found.left, found.error, found.torn) == (0, None, int(is_torn)), cut
        assert place.numbers() == list(range(3 + max(0, whole - 1))), cut
        closes = [reading.close for reading in place.readings() if reading.writer == WRITER]
        if whole:
            (salvaged,) = [close.salvaged for close in closes if close is not None and close.salvaged]
            assert (salvaged.torn != b"") is is_torn
            assert salvaged.pid == os.getpid()
        assert place.is_cleared()


def test_that_something_was_salvaged_is_on_record(place: Place) -> None:
    closed, opened = segments_of_a_writer(place.settings())
    leave(place, closed=closed, opened=opened[:-20])
    salvage(place)
    (told,) = [event for event in place.events() if event.action == Action.AUDIT.value]
    assert told.details["salvaged_writer"] == WRITER
    assert (told.details["segment"], told.details["events"]) == (2, 2)
    assert told.details["torn_bytes"] > 0
    assert told.run == "run-a"


def test_the_next_start_salvages_by_itself(place: Place) -> None:
    closed, opened = segments_of_a_writer(place.settings())
    leave(place, closed=closed, opened=opened)
    with place.auditor() as auditor:
        auditor.record(act(100))
        assert soon(lambda: set(range(6)) <= set(place.numbers()))
    assert sorted(place.numbers()) == [*range(6), 100]


def test_nothing_to_salvage_leaves_nothing(place: Place) -> None:
    assert salvage(place) == Salvaged()
    assert place.readings() == []


def test_what_a_living_process_writes_is_left_alone(place: Place) -> None:
    with place.auditor(salvages=False) as living:
        living.record(act(1))
        assert salvage(place) == Salvaged()
        assert len(place.waiting()) == 1
    assert place.numbers() == [1]


def test_two_that_salvage_at_once_send_each_segment_once(place: Place) -> None:
    closed, opened = segments_of_a_writer(place.settings())
    leave(place, closed=closed, opened=opened)
    done: list[Salvaged] = []
    threads = [threading.Thread(target=lambda: done.append(salvage(place))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert sum(each.segments for each in done) == 2
    assert [each.error for each in done] == [None] * 4
    assert place.numbers() == list(range(6))


def test_a_sink_that_is_down_leaves_all_for_later(place: Place) -> None:
    closed, opened = segments_of_a_writer(place.settings())
    leave(place, closed=closed, opened=opened)

    def open_sink() -> Store:
        raise StoreUnavailableError("the sink is out of reach")

    found = salvage(place, open_sink=open_sink)
    assert (found.segments, found.left) == (0, 2)
    assert found.error is not None
    assert len(place.waiting()) == 2
    assert salvage(place).segments == 2
    assert place.numbers() == list(range(6))


def test_whoever_salvages_after_another_that_failed_sends_the_same_bytes(place: Place) -> None:
    _, opened = segments_of_a_writer(place.settings())
    leave(place, closed=None, opened=opened)

    def open_sink() -> Store:
        raise StoreUnavailableError("the sink is out of reach")

    salvage(place, open_sink=open_sink)
    (closed,) = place.waiting()
    kept = closed.read_bytes()
    salvage(place)
    assert [path.read_bytes() for path in place.sink.rglob(f"{WRITER}-*.jsonl")] == [kept]


def test_what_was_sent_and_not_cleared_away_is_found_in_the_sink(place: Place) -> None:
    """Whoever salvaged before died between the two, and its closing line is another than this one's."""
    closed, opened = segments_of_a_writer(place.settings())
    leave(place, closed=closed, opened=opened)
    salvage(place)
    leave(place, closed=closed, opened=opened)
    assert salvage(place).error is None
    assert place.numbers() == list(range(6))
    assert place.is_cleared()


def test_a_copied_spool_loses_no_event_of_the_process_that_goes_on(place: Place) -> None:
    """The copy is salvaged while its writer goes on: the two agree up to a line, and differ from there."""
    closed, opened = segments_of_a_writer(place.settings())
    shorter = opened[: opened.rindex(b"\n", 0, -1) + 1]
    leave(place, closed=closed, opened=shorter)
    salvage(place)
    leave(place, closed=closed, opened=opened)
    salvage(place)
    assert sorted(place.numbers()) == list(range(6))
    (again,) = [event for event in place.events() if "first_recorded_as" in event.details]
    assert (again.user, again.host, again.pid) == ("jo", "node-3", 4711)
    assert again.details["first_recorded_as"].startswith(WRITER)
    assert again.time == 1_796_000_000_002


def test_a_damaged_segment_is_sent_as_evidence(place: Place) -> None:
    closed, opened = segments_of_a_writer(place.settings())
    damaged = opened.replace(b'"number":4', b'"number":9')
    leave(place, closed=closed, opened=damaged)
    assert salvage(place).left == 0
    stands = [path.read_bytes() for path in place.sink.rglob(f"{WRITER}-000002.jsonl")]
    assert stands == [damaged]


def spoil(segment: bytes) -> bytes:
    """Its opening line is no line of JSON any more."""
    return b"{" + segment


@pytest.mark.parametrize("which", ("the closed one", "the open one", "both"))
def test_a_segment_whose_opening_line_is_damaged_is_recorded_again_and_kept(place: Place, which: str) -> None:
    closed, opened = segments_of_a_writer(place.settings())
    kept = {}
    if which != "the open one":
        kept["000001"] = closed = spoil(closed)
    if which != "the closed one":
        kept["000002"] = opened = spoil(opened)
    leave(place, closed=closed, opened=opened)
    found = salvage(place)
    assert (found.left, found.error) == (0, None)
    assert sorted(place.numbers()) == list(range(6))
    again = [event for event in place.events() if "first_recorded_as" in event.details]
    assert len(again) == 3 * len(kept)
    assert {(event.user, event.host, event.pid) for event in again} == {("jo", "node-3", 4711)}
    told = [event for event in place.events() if "opening line is damaged" in (event.reason or "")]
    assert {(event.outcome, event.run) for event in told} == {("failure", "run-a")}
    assert len(told) == len(kept)
    aside = {path.name: path.read_bytes() for path in place.spool.rglob("damaged/*")}
    assert aside == {f"{WRITER}-{number}.jsonl": data for number, data in kept.items()}
    assert salvage(place) == Salvaged()


def left_by_a_host(place: Place, host_and_boot: str) -> Path:
    closed, opened = segments_of_a_writer(place.settings())
    leave(place, closed=closed, opened=opened)
    (lock,) = place.spool.rglob("lock")
    lock.write_text(host_and_boot + "\n")
    return lock


def test_what_another_host_left_a_short_while_ago_may_be_a_living_process_s(place: Place) -> None:
    """Locks need not hold between machines that share the spool."""
    left_by_a_host(place, "another-host another-boot")
    assert salvage(place) == Salvaged()
    assert len(place.waiting()) == 2
    auditor = LogAuditor(place.settings(salvages=False))
    assert auditor.salvage(of_any_host=True).segments == 2
    auditor.close(within_s=LONG_S)
    assert place.numbers() == list(range(6))


@pytest.mark.parametrize(("hours", "is_taken"), ((23, False), (25, True)))
def test_what_another_host_left_is_salvaged_once_nothing_happened_there_for_a_day(
    place: Place, hours: int, is_taken: bool
) -> None:
    folder = left_by_a_host(place, "another-host another-boot").parent
    then = time.time() - hours * 3600
    for path in folder.iterdir():
        os.utime(path, (then, then))
    assert salvage(place).segments == (2 if is_taken else 0)
    assert place.numbers() == (list(range(6)) if is_taken else [])


@pytest.mark.parametrize("is_renamed", (False, True), ids=["it started again", "in another container"])
def test_what_this_machine_left_is_salvaged_at_once(place: Place, is_renamed: bool) -> None:
    if is_renamed and not BOOT.exists():
        pytest.skip("containers of one kernel cannot be told here")
    boot = BOOT.read_text().strip() if is_renamed else "another-boot"
    left_by_a_host(place, f"{'another-host' if is_renamed else socket.gethostname()} {boot}")
    assert salvage(place).segments == 2
    assert place.numbers() == list(range(6))


def test_a_sink_that_is_a_bucket_has_a_folder_of_its_own_in_the_spool(place: Place) -> None:
    assert Spool(place.spool, "s3://a/log").path != Spool(place.spool, "s3://b/log").path
    assert LocalStore(place.sink).uri == place.settings().sink
