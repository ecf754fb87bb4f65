"""What tells a process to stop: real signals to this process and to a fork of it, and a user's function."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from strongroom.errors import ConfigError
from strongroom.resume.preemption import NoticeWatch, StopNotice, StopSignals, check_signals

TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    """A signal that a test leaves to its default action must not end the tests."""
    before = {number: signal.getsignal(number) for number in (TERM, USR1, INT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Heard(list[StopNotice]):
    """Notices, in the order in which they came."""

    @property
    def signals(self) -> list[int | None]:
        return [notice.signal for notice in self]


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def status_of_fork(act: Callable[[], None]) -> int:
    """How a fork ends that does this and then nothing more: its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException:  # noqa: BLE001 - what a fork raises must not go on in the tests
            os._exit(99)
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_signal_is_noted_and_ends_nothing() -> None:
    heard = Heard()
    signals = StopSignals([TERM, USR1], heard.append, rank=3)
    assert signals.install() is None
    send(TERM)
    send(USR1)
    signals.remove()
    assert heard == [
        StopNotice(reason="SIGTERM", signal=15, rank=3),
        StopNotice(reason="SIGUSR1", signal=10, rank=3),
    ]
    assert [notice.exit_status for notice in heard] == [143, 138]


def test_a_handler_of_the_program_goes_on_working_and_is_put_back() -> None:
    called: list[int] = []

    def users(number: int, frame: Any) -> None:
        called.append(number)

    signal.signal(TERM, users)
    heard = Heard()
    signals = StopSignals([TERM], heard.append)
    signals.install()
    send(TERM)
    assert (heard.signals, called) == ([TERM], [TERM])
    signals.remove()
    assert signal.getsignal(TERM) is users
    send(TERM)
    assert (heard.signals, called) == ([TERM], [TERM, TERM])


def test_put_in_place_twice_it_notes_a_signal_once_and_puts_the_first_one_back() -> None:
    heard = Heard()
    before = signal.getsignal(USR1)
    signals = StopSignals([USR1], heard.append)
    signals.install()
    signals.install()
    send(USR1)
    assert heard.signals == [USR1]
    signals.remove()
    signals.remove()
    assert signal.getsignal(USR1) == before


def test_a_handler_that_a_framework_put_on_top_is_left_out_once_ours_is_on_top_again() -> None:
    called: list[int] = []
    heard = Heard()
    before = signal.getsignal(TERM)
    signals = StopSignals([TERM], heard.append)
    signals.install()
    signal.signal(TERM, lambda number, frame: called.append(number))
    signals.install()
    send(TERM)
    assert (heard.signals, called) == ([TERM], [])
    signals.remove()
    assert signal.getsignal(TERM) == before


def test_two_runs_in_one_process_both_hear_and_leave_in_any_order() -> None:
    outer, inner = Heard(), Heard()
    before = signal.getsignal(USR1)
    first = StopSignals([USR1], outer.append)
    second = StopSignals([USR1], inner.append)
    first.install()
    second.install()
    send(USR1)
    assert (outer.signals, inner.signals) == ([USR1], [USR1])
    first.remove()  # not on top: its handler stays below, and only hands on
    signal.signal(USR1, signal.SIG_IGN) if before == signal.SIG_DFL else None
    second.install()
    second.remove()
    assert outer.signals == [USR1]


def test_a_handler_put_on_top_meanwhile_stays_and_ours_below_it_is_silent() -> None:
    heard = Heard()
    called: list[int] = []
    signal.signal(USR1, lambda number, frame: called.append(number))
    signals = StopSignals([USR1], heard.append)
    signals.install()
    ours = signal.getsignal(USR1)
    assert callable(ours)

    def on_top(number: int, frame: Any) -> None:
        ours(number, frame)

    signal.signal(USR1, on_top)
    signals.remove()
    assert signal.getsignal(USR1) is on_top
    send(USR1)
    assert (heard.signals, called) == ([], [USR1])


def test_a_second_interrupt_is_not_waited_with() -> None:
    signal.signal(INT, signal.default_int_handler)
    heard = Heard()
    signals = StopSignals([INT], heard.append)
    signals.install()
    send(INT)
    assert heard.signals == [INT]
    with pytest.raises(KeyboardInterrupt):
        send(INT)
    signals.remove()


def test_on_another_thread_than_the_main_one_it_says_that_it_does_nothing() -> None:
    before = signal.getsignal(TERM)
    said: list[str | None] = []
    signals = StopSignals([TERM], Heard().append)
    thread = threading.Thread(target=lambda: said.append(signals.install()))
    thread.start()
    thread.join()
    assert said[0] is not None
    assert "main thread" in said[0]
    assert signal.getsignal(TERM) == before
    signals.remove()


def test_a_fork_such_as_a_loaders_worker_outlives_a_jobs_warning_and_can_be_terminated() -> None:
    heard = Heard()
    signal.signal(TERM, signal.SIG_DFL)
    signal.signal(USR1, signal.SIG_DFL)
    signals = StopSignals([TERM, USR1], heard.append)
    signals.install()
    assert status_of_fork(lambda: send(USR1)) == 7
    assert status_of_fork(lambda: send(TERM)) == -TERM
    signals.remove()
    assert heard == []


def test_a_fork_has_the_programs_own_handler() -> None:
    signal.signal(TERM, lambda number, frame: os._exit(5))
    heard = Heard()
    signals = StopSignals([TERM], heard.append)
    signals.install()
    assert status_of_fork(lambda: send(TERM)) == 5
    signals.remove()


@pytest.mark.parametrize("names", ("SIGTERM", ["TERM"], ["SIGKILL"], ["SIGSEGV"], [15]))
def test_what_cannot_tell_a_run_to_stop_is_refused(names: Any) -> None:
    with pytest.raises(ConfigError, match="SIGTERM"):
        check_signals(names)


def test_signals_are_named_once() -> None:
    assert check_signals(["SIGUSR1", "SIGTERM", "SIGUSR1"]) == (USR1, TERM)
    assert check_signals([]) == ()


# ------------------------------------------------------------------------------------------- notices


def watched(ask: Callable[[], Any], until: Callable[[Heard, list[str]], bool]) -> tuple[Heard, list[str]]:
    """What was told and complained of until that was the case, 10 s at most."""
    heard, complaints = Heard(), list[str]()
    watch = NoticeWatch(ask, heard.append, complaints.append, every_s=0.01, rank=2)
    watch.start()
    deadline = time.monotonic() + 10
    while not until(heard, complaints) and time.monotonic() < deadline:
        time.sleep(0.005)
    watch.stop()
    return heard, complaints


def test_a_notice_is_told_once_with_its_reason() -> None:
    answers = iter([None, False, "", "spot: 2026-11-30T12:02:00Z", "never asked for"])
    heard, complaints = watched(lambda: next(answers), lambda heard, _: bool(heard))
    time.sleep(0.05)
    assert heard == [StopNotice(reason="spot: 2026-11-30T12:02:00Z", rank=2)]
    assert heard[0].exit_status == 143
    assert complaints == []
    assert next(answers) == "never asked for"


def test_a_function_that_raises_is_complained_of_once_and_asked_again() -> None:
    count = 0

    def ask() -> bool:
        nonlocal count
        count += 1
        if count < 5:
            raise OSError("no route to the metadata service")
        return True

    heard, complaints = watched(ask, lambda heard, _: bool(heard))
    assert heard == [StopNotice(reason="spot_notice", rank=2)]
    assert len(complaints) == 1
    assert "no route to the metadata service" in complaints[0]


def test_a_function_that_never_returns_keeps_nobody_waiting() -> None:
    never = threading.Event()
    began = time.monotonic()
    heard, complaints = watched(lambda: never.wait(60), lambda heard, _: time.monotonic() - began > 0.05)
    assert time.monotonic() - began < 5
    assert (heard, complaints) == ([], [])
    never.set()
