"""How many threads, files and chains a process has, however often its policy is loaded."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
from recorders import LONG_S, Place, act, soon

from strongroom_security import Audit
from strongroom_security.auditlog.recording import recording
from strongroom_security.auditlog.recording.auditor import LogAuditor

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no /proc")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def threads() -> int:
    return sum(each.name.startswith("strongroom-audit") for each in threading.enumerate())


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_policies_that_say_the_same_share_one_record(place: Place) -> None:
    before, auditors = threads(), []
    for number in range(10):
        auditor = Audit(sink=f"dir:{place.sink}", spool=place.spool).auditor()
        auditor.record(act(number))
        auditors.append(auditor)
    assert soon(lambda: threads() <= before + 2)
    auditors[0].close(within_s=LONG_S)
    assert place.numbers() == list(range(10))
    auditors[1].record(act(10))
    for auditor in auditors:
        auditor.close(within_s=LONG_S)
    assert place.numbers() == list(range(11))
    assert len({reading.writer for reading in place.readings()}) == 1
    assert soon(lambda: threads() <= before)


def test_policies_that_differ_share_none(place: Place) -> None:
    first = Audit(sink=f"dir:{place.sink}", spool=place.spool).auditor()
    second = Audit(sink=f"dir:{place.sink}", spool=place.spool, seal_s=4).auditor()
    for number, auditor in enumerate((first, second)):
        auditor.record(act(number))
    for auditor in (first, second):
        auditor.close(within_s=LONG_S)
    assert len({reading.writer for reading in place.readings()}) == 2


def test_the_record_of_an_auditor_that_is_gone_ends_once_it_is_in_the_sink(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_UNHELD_S", 0.02)
    before, open_before = threads(), files()
    for number in range(5):
        LogAuditor(place.settings()).record(act(number))
        gc.collect()
    assert soon(lambda: threads() <= before and files() <= open_before)
    assert sorted(place.numbers()) == list(range(5))
    ends = [reading.close is not None and reading.close.is_last for reading in place.readings()]
    assert sum(ends) == len({reading.writer for reading in place.readings()})


def test_an_auditor_goes_on_after_a_record_that_ended_meanwhile(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_UNHELD_S", 0.0)
    auditor = Audit(sink=f"dir:{place.sink}", spool=place.spool).auditor()
    for number in range(20):
        Audit(sink=f"dir:{place.sink}", spool=place.spool).auditor().record(act(number))
        gc.collect()
        auditor.record(act(100 + number))
    auditor.close(within_s=LONG_S)
    assert soon(lambda: len(place.numbers()) == 40)


def test_the_writers_of_many_runs_end_when_they_are_idle(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strongroom_security.auditlog.recording.writers.IDLE_S", 0.05)
    monkeypatch.setattr("strongroom_security.auditlog.recording.recording.IDLE_S", 0.05)
    before = files()
    with place.auditor(seal_s=0.01) as auditor:
        for number in range(40):
            auditor.record(act(number, run=f"run-{number}"))
        assert soon(lambda: files() <= before + 16 * 2 + 4 and auditor.state().pending_events == 0)
        auditor.record(act(40, run="run-0"))
    assert sorted(place.numbers()) == list(range(41))
