"""Whatever fails around the auditor, nothing recorded is lost, nothing stalls, and reads fail closed."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from recorders import LONG_S, Place, act, soon

from strongroom.auditing import Action, Phase
from strongroom.errors import AuditError, StoreUnavailableError
from strongroom.stores.base import Store
from strongroom.stores.local import LocalStore
from strongroom_security.auditlog.recording.auditor import LogAuditor
from strongroom_security.auditlog.recording.salvage import Salvaged

HERE = Path(__file__).parent


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """A file system of its own at a folder, which root alone can have."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    with mounted(folder, "-t", "tmpfs", "-o", f"size={kilobytes}k", "none"):
        yield


def fill(folder: Path) -> Path:
    """Leave no room on the disk of a folder."""
    filler = folder / "filler"
    descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT)
    try:
        for size in (1 << 16, 1 << 12, 1):
            with suppress(OSError):
                while os.write(descriptor, b"x" * size):
                    pass
    finally:
        os.close(descriptor)
    return filler


class Switch:
    """Opens a sink that is up or down."""

    def __init__(self, place: Place) -> None:
        self.is_up = False
        self._place = place

    def __call__(self) -> Store:
        if not self.is_up:
            raise StoreUnavailableError("the sink is out of reach")
        return LocalStore(self._place.sink)


def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what failed tried again soon."""
    monkeypatch.setattr("strongroom_security.auditlog.recording.sending._FIRST_S", 0.02)
    monkeypatch.setattr("strongroom_security.auditlog.recording.sending._LONGEST_S", 0.05)
    monkeypatch.setattr("strongroom_security.auditlog.recording.filing._TRY_AGAIN_S", 0.02)
    monkeypatch.setattr("strongroom_security.auditlog.recording.recording._SPOOL_AGAIN_S", 0.02)


def test_a_sink_that_is_down_stalls_no_save_and_refuses_reads_until_it_is_up(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quickly(monkeypatch)
    switch = Switch(place)
    with (
        caplog.at_level(logging.INFO, "strongroom"),
        place.auditor(open_sink=switch, intent_s=0.3, seal_s=0.01) as auditor,
    ):
        for number in range(20):
            auditor.record(act(number))
        began = time.monotonic()
        auditor.secure(within_s=LONG_S)
        assert time.monotonic() - began < LONG_S / 2  # it failed again, and stands on the disk here
        with pytest.raises(
            AuditError, match=r"did not take it within 0\.3 s .*out of reach.*Nothing was read"
        ):
            auditor.intend(act(20))
        state = auditor.state()
        assert (state.pending_events, state.lost) == (21, 0)
        assert state.failures > 0
        assert state.error is not None
        switch.is_up = True
        assert soon(lambda: auditor.state().pending_events == 0)
        assert auditor.state().error is None
        auditor.intend(act(21))
    assert place.numbers() == list(range(22))
    told = [record.message for record in caplog.records if "the audit log's sink" in record.message]
    assert len(told) == 2  # once that it fails, however often it did; once that it works again


def test_a_sink_that_was_down_to_the_end_has_all_by_the_next_start(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    quickly(monkeypatch)
    done = subprocess.run(
        [sys.executable, str(HERE / "recording_child.py"), "record", str(place.sink.parent), "7"],
        env={**os.environ, "STRONGROOM_TEST_SINK_IS_A_FILE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert place.waiting() != []
    place.sink.unlink()
    with place.auditor() as auditor:
        auditor.record(act(100))
        assert soon(lambda: place.waiting() == [] or set(range(7)) <= set(place.numbers()))
    assert sorted(place.numbers()) == [*range(7), 100]


def test_a_folder_that_became_a_file_is_a_sink_that_is_down(place: Place) -> None:
    place.sink.parent.mkdir(exist_ok=True)
    place.sink.write_bytes(b"")
    with place.auditor(intent_s=0.2) as auditor:
        auditor.record(act(1))
        with pytest.raises(AuditError):
            auditor.intend(act(2))
        place.sink.unlink()
        auditor.intend(act(3))
    assert place.numbers() == [1, 2, 3]


def test_a_sink_that_is_full_takes_all_once_there_is_room(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    quickly(monkeypatch)
    with small_disk(place.sink, 256):
        filler = fill(place.sink)
        with place.auditor(intent_s=0.3) as auditor:
            for number in range(10):
                auditor.record(act(number))
            with pytest.raises(AuditError, match="did not take it"):
                auditor.intend(act(10))
            filler.unlink()
            auditor.intend(act(11))
        assert place.numbers() == list(range(12))


def test_a_sink_that_can_only_be_read_refuses_reads(place: Place) -> None:
    with small_disk(place.sink, 256):
        subprocess.run(["mount", "-o", "remount,ro", str(place.sink)], check=True)
        with place.auditor(intent_s=0.2) as auditor:
            auditor.record(act(1))
            with pytest.raises(AuditError, match=r"[Rr]ead-only"):
                auditor.intend(act(2))
            subprocess.run(["mount", "-o", "remount,rw", str(place.sink)], check=True)
            auditor.secure(within_s=LONG_S)
        assert place.numbers() == [1, 2]


@pytest.mark.parametrize("is_up", (True, False), ids=["the sink is up", "the sink is down, too"])
def test_a_full_disk_for_the_spool_loses_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, is_up: bool
) -> None:
    quickly(monkeypatch)
    switch = Switch(place)
    switch.is_up = is_up
    with small_disk(place.spool, 64), place.auditor(open_sink=switch, seal_events=20, intent_s=1) as auditor:
        auditor.record(act(0))
        filler = fill(place.spool)
        for number in range(1, 200):
            auditor.record(act(number))
        if is_up:
            auditor.intend(act(200))  # it is on record in the sink, which is what counts
        else:
            assert auditor.state().error is not None
            filler.unlink()
            auditor.record(act(200))
            switch.is_up = True
        auditor.close(within_s=LONG_S)
        assert place.numbers() == list(range(201))


def test_a_line_that_a_full_disk_cut_goes_on_where_it_was_cut(place: Place) -> None:
    written: list[int] = []
    whole = os.write

    def short(descriptor: int, data: Any) -> int:
        written.append(len(data))
        if len(written) == 3:
            return whole(descriptor, bytes(data)[:50])
        if len(written) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(descriptor, data)

    with pytest.MonkeyPatch.context() as patch, place.auditor() as auditor:
        patch.setattr(os, "write", short)
        for number in range(5):
            auditor.record(act(number))
        auditor.close(within_s=LONG_S)
    assert place.numbers() == list(range(5))


def test_a_process_that_dies_while_lines_wait_in_memory_leaves_a_log_without_a_hole(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after a line that the disk did not take is not on the disk before it."""
    from strongroom_security.auditlog.recording import filing, writing

    monkeypatch.setattr(filing, "_TRY_AGAIN_S", 0.0)
    monkeypatch.setattr(writing.RunWriter, "flush", lambda _: None)
    whole, is_full = os.write, [False]

    def write(descriptor: int, data: Any) -> int:
        if is_full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(descriptor, data)

    switch, died = Switch(place), Place(tmp_path / "died")
    with place.auditor(seal_events=4, open_sink=switch) as auditor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "write", write)
            for number in range(20):
                is_full[0] = number == 2
                auditor.record(act(number))
            shutil.copytree(place.spool, died.spool)
        switch.is_up = True
    assert place.numbers() == list(range(20))
    died.sink = place.sink  # by which the spool goes
    settings = died.settings(open_sink=lambda: LocalStore(tmp_path / "died" / "sink"), salvages=False)
    dead = LogAuditor(settings)
    assert dead.salvage().error is None
    dead.close(within_s=LONG_S)
    died.sink = tmp_path / "died" / "sink"
    assert died.numbers() == [0, 1]


def test_a_spool_that_cannot_be_made_leaves_memory_and_says_so(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.spool.parent.mkdir(exist_ok=True)
    place.spool.write_bytes(b"")  # no folder
    with caplog.at_level(logging.WARNING, "strongroom"), place.auditor() as auditor:
        for number in range(5):
            auditor.record(act(number))
        auditor.intend(act(5))
    assert place.numbers() == list(range(6))
    assert "memory alone" in caplog.text


def test_what_finds_no_room_is_counted_and_the_gap_is_on_record(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quickly(monkeypatch)
    switch = Switch(place)
    with (
        caplog.at_level(logging.WARNING, "strongroom"),
        place.auditor(open_sink=switch, spool_bytes=20_000, seal_s=0.01, intent_s=0.2) as auditor,
    ):
        for number in range(100):
            auditor.record(act(number, action=Action.SAVE if number % 2 else Action.RESTORE))
        lost = auditor.state().lost
        assert 0 < lost < 100
        assert auditor.state().pending_bytes < 20_000 + 2_000
        with pytest.raises(AuditError, match="has room for it"):
            auditor.intend(act(100))
        switch.is_up = True
        assert soon(lambda: any(event.action == "audit" for event in place.events()))
    (gap,) = [event for event in place.events() if event.action == Action.AUDIT.value]
    assert gap.phase == Phase.OBSERVED.value
    assert gap.details["lost_events"] == lost + 1
    assert gap.details["lost_save"] + gap.details["lost_restore"] == lost + 1
    assert place.numbers() == list(range(100 - lost))
    assert "no room" in caplog.text


def test_memory_is_bounded_where_the_spool_takes_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strongroom_security.auditlog.recording.writing.MEMORY_LINES", 50)
    place.spool.parent.mkdir(exist_ok=True)
    place.spool.write_bytes(b"")
    switch = Switch(place)
    with place.auditor(open_sink=switch) as auditor:
        for number in range(100):
            auditor.record(act(number))
        assert auditor.state().lost == 51  # the opening line is one of them
        switch.is_up = True
    assert place.numbers() == list(range(49))
    (gap,) = [event for event in place.events() if event.action == Action.AUDIT.value]
    assert gap.details["lost_events"] == 51


def test_a_spool_that_somebody_removes_loses_nothing_that_its_process_has_open(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    quickly(monkeypatch)
    with place.auditor(seal_events=5) as auditor:
        auditor.intend(act(0))
        for number in range(1, 4):
            auditor.record(act(number))
        shutil.rmtree(place.spool)
        auditor.intend(act(4))
        auditor.record(act(5))
        assert soon(lambda: len(place.waiting()) == 1)  # in a folder that was made again
    assert place.numbers() == list(range(6))
    assert auditor.state().error is None


def test_two_processes_with_one_id_lose_no_event(place: Place) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "recording_child.py"), "cloned", str(place.sink.parent), str(first)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for first in (10, 20)
    ]
    for _ in range(3):
        for process in processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "secured\n"
    for process in processes:
        process.communicate(timeout=LONG_S)
        assert process.returncode == 0
    assert sorted(place.numbers()) == [10, 11, 12, 20, 21, 22]
    (told,) = [event for event in place.events() if event.action == Action.AUDIT.value]
    assert told.details["ended_writer"] == "ab" * 16


def test_an_intent_of_a_process_whose_id_another_has_is_in_the_sink_all_the_same(place: Place) -> None:
    drawn = place.settings().draw()

    def once() -> Callable[[], Any]:
        given = iter([drawn])
        return lambda: next(given, None) or place.settings().draw()

    with place.auditor(draw=once()) as first, place.auditor(draw=once(), spool=place.spool / "b") as second:
        first.intend(act(1))
        second.intend(act(2))
        assert sorted(place.numbers()) == [1, 2]
    assert LogAuditor(place.settings()).salvage() == Salvaged()


def test_what_fails_for_a_reason_that_nobody_foresaw_is_counted_and_told(place: Place) -> None:
    class Broken(dict[str, str]):
        def items(self) -> NoReturn:
            raise RuntimeError("anybody's code")

    with place.auditor() as auditor:
        auditor.record(replace(act(1), details=Broken(a="b")))
        auditor.record(act(2))
        assert auditor.state().lost == 1
        assert soon(lambda: auditor.state().pending_events >= 2)
    (gap,) = [event for event in place.events() if "lost_events" in event.details]
    assert (gap.details["lost_events"], gap.details["lost_save"]) == (1, 1)
    assert place.numbers() == [2]


def test_what_fails_before_there_is_any_record_is_told_by_the_first_one(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise RuntimeError("no thread can be started")

    with place.auditor() as auditor:
        with monkeypatch.context() as patched:
            patched.setattr("strongroom_security.auditlog.recording.recording.find_spool", fail)
            auditor.record(act(1))
        assert auditor.state().lost == 1
        auditor.record(act(2))
        assert auditor.state().lost == 1
    (gap,) = [event for event in place.events() if "lost_events" in event.details]
    assert gap.details["lost_events"] == 1
    assert place.numbers() == [2]
