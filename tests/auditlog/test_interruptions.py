"""A signal's handler may raise, or record, at any call of a record: nothing breaks, and nothing hangs."""

from __future__ import annotations

import linecache
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from recorders import LONG_S, Place, act, soon

from strongroom_security.auditlog.recording import filing, recording, writers, writing

MODULES = {str(module.__file__) for module in (filing, recording, writers, writing)}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@contextmanager
def at_call(count: int, do: Callable[[], None]) -> Iterator[list[str]]:
    """Do something as the so-many-th function of the log's writing begins: one of the places that Python
    runs handlers of signals at. What was done, and where.
    """
    done: list[str] = []
    seen = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        if frame.f_code.co_filename not in MODULES or done:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "call":
            seen += 1
            if seen == count:
                done.append(line)
                do()
        return trace

    sys.settrace(trace)
    try:
        yield done
    finally:
        sys.settrace(None)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("seal_events", (1, 1000), ids=["which closes its segment", "within a segment"])
def test_an_interruption_at_any_call_leaves_a_chain_without_a_hole(place: Place, seal_events: int) -> None:
    interrupted: set[int] = set()
    number = 0
    with place.auditor(seal_events=seal_events, salvages=False) as auditor:
        auditor.record(act(0))
        while True:
            number += 1
            try:
                with at_call(number, interrupt) as done:
                    auditor.record(act(number))
            except KeyboardInterrupt:
                interrupted.add(number)
            if not done:
                break
        assert len(interrupted) > 10
        lost = auditor.state().lost
    numbers = place.numbers()  # whose chains hold
    assert len(numbers) == len(set(numbers))
    assert set(range(number + 1)) - set(numbers) <= interrupted
    assert lost == 0


def test_what_a_handler_records_in_the_middle_of_a_line_is_recorded(place: Place) -> None:
    number = 0
    with place.auditor(seal_events=3, salvages=False) as auditor:

        def handle() -> None:
            auditor.state()
            auditor.record(act(1000 + number))

        auditor.record(act(0))
        while True:
            number += 1
            with at_call(number, handle) as done:
                auditor.record(act(number))
            if not done:
                break
        assert auditor.state().lost == 0
    assert number > 10
    expected = {*range(number + 1), *range(1001, 1000 + number)}
    assert sorted(place.numbers()) == sorted(expected)


def test_what_a_handler_recorded_and_another_thread_takes_up_is_waited_for_at_the_end(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_taken_up = threading.Event()
    handled: list[int] = []
    record, add = recording.Recording._record, writing.RunWriter._add

    def slowly(self: Any, *arguments: Any) -> bool:
        if threading.current_thread() is not threading.main_thread():
            is_taken_up.set()
            time.sleep(0.5)
        return record(self, *arguments)

    monkeypatch.setattr(recording.Recording, "_record", slowly)
    with place.auditor(salvages=False) as auditor:

        def interrupted(self: Any, *arguments: Any) -> bytes:
            if not handled:
                handled.append(1)
                auditor.record(act(2))
            return add(self, *arguments)

        monkeypatch.setattr(writing.RunWriter, "_add", interrupted)
        auditor.record(act(1))
        assert is_taken_up.wait(LONG_S)
    assert place.numbers() == [1, 2]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
def test_real_signals_that_raise_leave_a_chain_without_a_hole(place: Place) -> None:
    def handle(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handle)
    kept: set[int] = set()
    try:
        with place.auditor(seal_events=50, salvages=False) as auditor:
            # Who acts, and where, is found out once: a socket that is interrupted there closes late.
            auditor.record(act(1000))
            for number in range(600):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 1e-5 + (number % 60) * 5e-6)
                    auditor.record(act(number))
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    kept.add(number)
                except KeyboardInterrupt:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            assert soon(lambda: auditor.state().lost == 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    numbers = place.numbers()
    assert len(numbers) == len(set(numbers))
    assert kept <= set(numbers)
    assert os.getpid() in {event.pid for event in place.events()}
