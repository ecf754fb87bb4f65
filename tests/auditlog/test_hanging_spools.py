"""A spool that hangs, or takes nothing: who records waits for it once, and is told what is nowhere safe."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from recorders import LONG_S, Place, act, soon

from strongroom.errors import StoreUnavailableError
from strongroom.stores.base import Store
from strongroom_security.auditlog.recording.auditor import LogAuditor

UNSAFE = "are neither in"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


class SlowDisk:
    """Takes its time for each write; beside the program it takes none at all until it is let go."""

    def __init__(self) -> None:
        self.is_slow = True
        self.is_free = threading.Event()
        self.waited_for = 0
        self._write = os.write

    def write(self, descriptor: int, data: Any) -> int:
        if threading.current_thread() is threading.main_thread():
            self.waited_for += 1
        elif self.is_slow:
            self.is_free.wait(LONG_S)
        if self.is_slow:
            time.sleep(0.05)
        return self._write(descriptor, data)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    monkeypatch.setattr("strongroom_security.auditlog.recording.filing._SLOW_S", 0.04)
    monkeypatch.setattr("strongroom_security.auditlog.recording.filing._QUICK_S", 0.03)
    made = SlowDisk()
    monkeypatch.setattr(os, "write", made.write)
    return made


def down() -> Store:
    raise StoreUnavailableError("the sink is out of reach")


def test_whoever_records_waits_once_for_a_disk_that_hangs_and_not_at_all_until_it_is_quick(
    place: Place, disk: SlowDisk
) -> None:
    with place.auditor(salvages=False) as auditor:
        disk.is_slow = False
        auditor.record(act(0))
        disk.is_slow, disk.waited_for = True, 0
        for number in range(1, 50):
            auditor.record(act(number))
        assert disk.waited_for == 1
        assert auditor.state().pending_events == 50
        disk.is_slow = False
        disk.is_free.set()
        last = 50

        def is_written_at_once() -> bool:
            nonlocal last
            auditor.record(act(last))
            last += 1
            return disk.waited_for > 1

        assert soon(is_written_at_once)
    assert auditor.state().lost == 0
    assert place.numbers() == list(range(last))


def test_a_program_that_ends_while_its_disk_is_slow_loses_nothing(place: Place, disk: SlowDisk) -> None:
    disk.is_free.set()
    with place.auditor(salvages=False) as auditor:
        for number in range(20):
            auditor.record(act(number))
        auditor.close(within_s=LONG_S)
        assert place.numbers() == list(range(20))
    assert place.is_cleared()


def test_a_program_that_ends_while_its_sink_is_down_too_leaves_all_on_the_slow_disk(
    place: Place, disk: SlowDisk
) -> None:
    disk.is_free.set()
    is_down, honest = True, place.settings().open_sink
    auditor = LogAuditor(place.settings(salvages=False, open_sink=lambda: down() if is_down else honest()))
    for number in range(20):
        auditor.record(act(number))
    auditor.close(within_s=LONG_S)
    left = b"".join(path.read_bytes() for path in place.waiting())
    assert [b'"number":%d}' % number in left for number in range(20)] == [True] * 20
    is_down = False
    assert place.is_cleared()  # its threads go on until it is in the sink
    assert place.numbers() == list(range(20))


@pytest.mark.parametrize("is_up", (True, False), ids=["the sink is up", "the sink is down"])
@pytest.mark.parametrize("has_spool", (True, False), ids=["a spool", "no spool"])
def test_it_is_told_how_many_events_are_nowhere_safe(
    place: Place, caplog: pytest.LogCaptureFixture, is_up: bool, has_spool: bool
) -> None:
    if not has_spool:
        place.spool.parent.mkdir(exist_ok=True)
        place.spool.write_bytes(b"")
    is_down = not is_up
    honest = place.settings().open_sink
    with place.auditor(open_sink=lambda: down() if is_down else honest()) as auditor:
        for number in range(3):
            auditor.record(act(number))
        with caplog.at_level(logging.WARNING, "strongroom"):
            began = time.monotonic()
            auditor.secure(within_s=LONG_S)
            assert time.monotonic() - began < LONG_S / 2
        told = [record.getMessage() for record in caplog.records if UNSAFE in record.getMessage()]
        if is_up or has_spool:
            assert told == []
        else:
            (message,) = told
            assert message.startswith(f"3 events of the audit log are neither in {place.sink.as_uri()}")
            assert "the sink is out of reach" in message
        is_down = False
    assert place.numbers() == [0, 1, 2]
