"""The auditor: what is recorded is in the log, in order, whoever records it and however the process ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from recorders import LONG_S, HangingStore, Place, act, soon

from strongroom.auditing import Action, Auditor, Outcome, Phase
from strongroom.errors import AuditError, KeyServiceError
from strongroom.stores.local import LocalStore
from strongroom_security.auditlog.recording.auditor import LogAuditor
from strongroom_security.signers.file import FileSigner
from strongroom_security.signers.generating import generate_key

HERE = Path(__file__).parent
_QUIET = ("-W", "ignore::DeprecationWarning")
"""Since 3.12 Python warns of forks beside threads; that they go well is what is tested here."""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def signer(tmp_path: Path) -> FileSigner:
    generate_key(tmp_path / "signer.pem")
    return FileSigner.read(tmp_path / "signer.pem")


class DistantSigner:
    """A keeper on another machine: it can be out of reach."""

    kind = "aws-kms"
    uri = "aws-kms:alias/audit"
    certificates = ()

    def __init__(self, beneath: FileSigner) -> None:
        self._beneath = beneath
        self.is_up = threading.Event()

    @property
    def public_key(self) -> Any:
        return self._beneath.public_key

    def sign(self, message: bytes, *, within_s: float) -> bytes:
        if not self.is_up.is_set():
            raise KeyServiceError(f"{self.uri} is out of reach")
        return self._beneath.sign(message, within_s=within_s)


def child(place: Place, what: str, *more: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            *_QUIET,
            str(HERE / "recording_child.py"),
            what,
            str(place.sink.parent),
            *more,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def test_it_fills_the_seam_of_the_core(place: Place) -> None:
    with place.auditor() as auditor:
        assert isinstance(auditor, Auditor)
        assert auditor.is_on


def test_building_one_touches_nothing_and_starts_no_thread(place: Place) -> None:
    before = threading.active_count()
    auditor = LogAuditor(place.settings())
    auditor.secure(within_s=1)
    auditor.close(within_s=1)
    assert threading.active_count() == before
    assert not place.spool.exists()
    assert not place.sink.exists()


def test_what_is_recorded_is_in_the_sink_in_its_order_and_the_end_is_told(place: Place) -> None:
    with place.auditor(seal_events=10) as auditor:
        for number in range(35):
            auditor.record(act(number))
    assert place.numbers() == list(range(35))
    closes = [reading.close for reading in place.readings()]
    assert [close is not None and close.is_last for close in closes] == [False, False, False, True]
    assert place.is_cleared()


def test_an_event_says_what_was_done_and_by_whom(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with place.auditor(role="trainer-writer") as auditor:
        auditor.record(
            act(7, action=Action.RESTORE, outcome=Outcome.DENIED, phase=Phase.FINISHED, reason="no grant")
        )
    (event,) = place.events()
    assert (event.action, event.outcome, event.reason, event.run) == (
        "restore",
        "denied",
        "no grant",
        "run-a",
    )
    assert (event.pid, event.rank, event.role) == (os.getpid(), 3, "trainer-writer")
    assert event.user
    assert event.host
    assert event.job["slurm.SLURM_JOB_ID"] == "4711"


def test_each_run_has_a_writer_of_its_own(place: Place) -> None:
    with place.auditor() as auditor:
        for number, run in enumerate(("run-a", "run-b", None, "not a run's id", "run-a")):
            auditor.record(act(number, run=run))
    assert sorted({reading.run or "_" for reading in place.readings()}) == ["_", "run-a", "run-b"]
    assert sorted(place.numbers()) == [0, 1, 2, 3, 4]


def test_events_go_to_the_sink_by_their_age(place: Place) -> None:
    with place.auditor(seal_s=0.05) as auditor:
        auditor.record(act(1))
        assert soon(lambda: place.numbers() == [1])
        assert soon(lambda: auditor.state().pending_events == 0)


def test_an_intent_is_in_the_sink_when_it_returns_with_all_before_it(place: Place) -> None:
    with place.auditor() as auditor:
        for number in range(3):
            auditor.record(act(number))
        auditor.intend(act(3, action=Action.RESTORE, phase=Phase.INTENDED))
        assert place.numbers() == [0, 1, 2, 3]


def test_intents_of_many_threads_each_return_with_theirs_in_the_sink(place: Place) -> None:
    missing: list[int] = []
    with place.auditor() as auditor:

        def read(number: int) -> None:
            for each in range(number * 10, number * 10 + 5):
                auditor.intend(act(each))
                if each not in place.numbers():
                    missing.append(each)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
    assert missing == []
    assert len(place.numbers()) == 40


def test_eight_threads_record_while_segments_are_sealed(place: Place) -> None:
    with place.auditor(seal_events=7, seal_s=0.001) as auditor:

        def record(thread: int) -> None:
            for number in range(200):
                auditor.record(act(thread * 1000 + number))

        threads = [threading.Thread(target=record, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
    numbers = place.numbers()
    assert len(numbers) == len(set(numbers)) == 1600
    for thread in range(8):
        own = [number for number in numbers if number // 1000 == thread]
        assert own == sorted(own)


def test_secured_events_are_in_the_sink(place: Place) -> None:
    with place.auditor() as auditor:
        auditor.record(act(1))
        auditor.secure(within_s=LONG_S)
        assert place.numbers() == [1]


def test_after_its_end_an_auditor_records_under_a_new_writer(place: Place) -> None:
    with place.auditor() as auditor:
        auditor.record(act(1))
        auditor.close(within_s=LONG_S)
        auditor.record(act(2))
    assert sorted(place.numbers()) == [1, 2]
    assert len({reading.writer for reading in place.readings()}) == 2


def test_a_clock_that_goes_backwards_changes_no_order(place: Place) -> None:
    times = iter([1_800_000_000_000 - each * 3_600_000 for each in range(20)])
    with place.auditor(now_ms=lambda: next(times), seal_events=3) as auditor:
        for number in range(6):
            auditor.record(act(number))
    assert place.numbers() == list(range(6))
    told = [event.time for event in place.events()]
    assert told == sorted(told, reverse=True)


@pytest.mark.parametrize("now_ms", (-1, -(10**15), 253_402_300_800_000, 10**18))
def test_a_clock_that_no_calendar_has_stops_neither_recording_nor_reading(place: Place, now_ms: int) -> None:
    with place.auditor(now_ms=lambda: now_ms) as auditor:
        auditor.record(act(1))
        auditor.intend(act(2))
        assert auditor.state().lost == 0
    assert place.numbers() == [1, 2]
    assert len({reading.writer for reading in place.readings()}) == 1


def test_an_event_too_long_for_a_line_is_recorded_without_what_makes_it_so(place: Place) -> None:
    long = {f"name_{number}": "\u20ac" * 512 for number in range(64)}
    with place.auditor() as auditor:
        auditor.record(act(1, details=long))
        auditor.record(act(2))
    first, second = place.events()
    assert first.details == {"shortened": True}
    assert second.details["number"] == 2


def test_who_vouches_for_a_writer_stands_in_its_segments(place: Place, signer: FileSigner) -> None:
    with place.auditor(signer=signer) as auditor:
        auditor.record(act(1))
    (reading,) = place.readings()
    assert reading.opened is not None
    certificate = reading.opened.certificate
    assert certificate is not None
    assert certificate.key_id == signer.public_key.id
    assert signer.public_key.verify(reading.opened.certified(), certificate.signature)


def test_while_nobody_vouches_saves_go_on_and_reads_are_refused(place: Place, signer: FileSigner) -> None:
    distant = DistantSigner(signer)
    with place.auditor(signer=distant, intent_s=0.2) as auditor:
        auditor.record(act(1))
        with pytest.raises(AuditError, match=r"vouches for no writer.*out of reach"):
            auditor.intend(act(2))
    # That it was tried stands in the log all the same.
    assert place.numbers() == [1, 2]


def test_a_certificate_that_comes_late_is_in_the_segments_from_then_on(
    place: Place, signer: FileSigner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strongroom_security.auditlog.recording.certifying._PAUSE_S", 0.01)
    distant = DistantSigner(signer)
    with place.auditor(signer=distant) as auditor:
        auditor.record(act(1))
        distant.is_up.set()
        auditor.intend(act(2))
    certificates = [
        reading.opened.certificate is not None for reading in place.readings() if reading.opened is not None
    ]
    assert certificates[:2] == [False, True]
    assert place.numbers() == [1, 2]


def test_the_end_of_a_program_is_the_end_of_its_log(place: Place) -> None:
    done = child(place, "record", "5")
    assert (done.returncode, done.stderr) == (0, "")
    assert place.numbers() == [0, 1, 2, 3, 4]
    last = place.readings()[-1].close
    assert last is not None
    assert last.is_last


def test_a_forked_child_records_under_a_writer_of_its_own(place: Place) -> None:
    done = child(place, "fork")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(place.numbers()) == [1, 2, 3]
    writers = {event.id.rpartition("-")[0]: event.pid for event in place.events()}
    assert len(writers) == len(set(writers.values())) == 2


def test_forked_children_that_record_nothing_leave_nothing(place: Place) -> None:
    done = child(place, "fork-quietly")
    assert (done.returncode, done.stderr) == (0, "")
    assert place.numbers() == [1, 2]
    assert len({reading.writer for reading in place.readings()}) == 1
    assert place.is_cleared()


def test_a_child_of_multiprocessing_ends_its_log_too(place: Place) -> None:
    done = child(place, "multiprocessing")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(place.numbers()) == [1, 2, 3]
    assert place.is_cleared()


def test_recording_never_waits_for_a_sink_that_hangs_and_reading_not_for_long(place: Place) -> None:
    is_free = threading.Event()
    sink = HangingStore(LocalStore(place.sink), is_free.wait)
    with place.auditor(open_sink=lambda: sink, intent_s=0.2, seal_events=2) as auditor:
        auditor.record(act(0))
        auditor.record(act(1))
        began = time.monotonic()
        for number in range(2, 500):
            auditor.record(act(number))
        assert time.monotonic() - began < LONG_S / 2
        with pytest.raises(AuditError, match=r"did not take it within 0.2 s"):
            auditor.intend(act(500))
        auditor.secure(within_s=0.1)
        assert auditor.state().pending_events == 501
        assert auditor.state().oldest_s > 0
        is_free.set()
    assert place.numbers() == list(range(501))


def test_the_caller_is_told_who_it_is_that_may_not_know(place: Place) -> None:
    """What cannot be recorded for any other reason is an error of the log, too."""
    with place.auditor() as auditor:
        with pytest.raises(AuditError, match="could not be put on record first"):
            auditor.intend(act(1, outcome=None))
        auditor.record(act(2, outcome=None))  # and never one of whoever records
        auditor.record(act(3))
    assert place.numbers() == [3]
