"""A sink is anybody's code, and anybody may stand at its keys: what it raises, claims, or never says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorders import LONG_S, HangingStore, Place, act, soon

from strongroom.auditing import Action
from strongroom.errors import AccessDeniedError, AuditError, OutcomeUnknownError
from strongroom.stores.local import LocalStore
from strongroom_security.auditlog.format.lines import segment_key
from strongroom_security.auditlog.format.segments import hour_of
from strongroom_security.auditlog.recording.spool import Spool

NOW_MS = 1_796_000_000_000
FIRST = "ab" * 16


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


class Foreign:
    """A store whose creating and reading are somebody else's."""

    def __init__(self, beneath: LocalStore, **others: Callable[..., Any]) -> None:
        self.beneath = beneath
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beneath, name)


def denied(key: str, **_: Any) -> bytes:
    raise AccessDeniedError(f"{key} cannot be read by who may only create")


def drawing(place: Place, drawn: list[str]) -> Callable[[], Any]:
    """Draws `FIRST`, and then others; which, stands in ``drawn``."""

    def draw() -> Any:
        writer, key = place.settings().draw()
        drawn.append(writer if drawn else FIRST)
        return drawn[-1], key

    return draw


def squat(place: Place, number: int) -> Path:
    """Put something else where the first writer's next segment is to stand."""
    path = place.sink / segment_key("run-a", hour_of(NOW_MS), FIRST, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"something else\n")
    return path


# --------------------------------------------------------------------------------------------- what it raises


def test_an_exception_of_somebody_else_s_store_in_a_salvage_stops_no_sending(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[str] = []

    def orphans(self: Spool, **_: Any) -> Any:
        raised.append("orphans")
        raise RuntimeError("anybody's code")

    monkeypatch.setattr(Spool, "orphans", orphans)
    monkeypatch.setattr("strongroom_security.auditlog.recording.recording._SPOOL_AGAIN_S", 0.01)
    with place.auditor() as auditor:
        auditor.record(act(1))
        assert soon(lambda: len(raised) > 1)  # it was tried again
        auditor.intend(act(2))
    assert place.numbers() == [1, 2]


def test_a_store_that_raises_anything_leaves_what_is_salvaged_for_later(place: Place) -> None:
    from test_salvage import WRITER, leave, segments_of_a_writer

    refused: list[str] = []
    store = LocalStore(place.sink)

    def create(key: str, data: bytes) -> bool:
        if WRITER in key:
            refused.append(key)
            raise RuntimeError("anybody's code")
        return store.put_if_absent(key, data)

    closed, opened = segments_of_a_writer(place.settings())
    leave(place, closed=closed, opened=opened)
    sink = Foreign(store, put_if_absent=create)
    with place.auditor(open_sink=lambda: sink) as auditor:
        auditor.record(act(100))
        assert soon(lambda: refused != [])
        auditor.intend(act(101))
        found = auditor.salvage()
        assert (found.left, found.error) == (2, "RuntimeError: anybody's code")
    assert place.numbers() == [100, 101]
    with place.auditor() as auditor:
        assert auditor.salvage().error is None
    assert sorted(place.numbers()) == [*range(6), 100, 101]


# --------------------------------------------------------------------------------------------- what it claims


def test_a_sink_in_which_something_else_stands_everywhere_is_taken_to_be_wrong(place: Place) -> None:
    """Few ids are given up for it; after those it is tried now and then, and whoever watches is told."""
    is_lying, drawn, tries = True, list[str](), list[str]()
    store = LocalStore(place.sink)

    def create(key: str, data: bytes) -> bool:
        tries.append(key)
        return not is_lying and store.put_if_absent(key, data)

    def read(key: str, *, limit_bytes: int) -> bytes:
        return b"something else\n" if is_lying else store.read(key, limit_bytes=limit_bytes)

    sink = Foreign(store, put_if_absent=create, read=read)
    with place.auditor(
        open_sink=lambda: sink, draw=drawing(place, drawn), intent_s=0.2, salvages=False
    ) as auditor:
        auditor.record(act(1))
        auditor.secure(within_s=0.2)
        assert soon(lambda: auditor.state().error is not None)
        assert "something else stands at" in (auditor.state().error or "")
        with pytest.raises(AuditError, match="something else stands at"):
            auditor.intend(act(2))
        time.sleep(0.2)
        assert len(drawn) == 4
        assert len(tries) < 20
        assert auditor.state().lost == 0
        is_lying = False
    assert sorted(place.numbers()) == [1, 2]


@pytest.mark.parametrize("may_read", (True, False), ids=["it can be read", "it can only be created"])
def test_what_somebody_put_where_an_intent_is_to_stand_is_not_taken_for_it(
    place: Place, may_read: bool
) -> None:
    drawn = list[str]()
    store = LocalStore(place.sink)
    sink = store if may_read else Foreign(store, read=denied)
    with place.auditor(open_sink=lambda: sink, draw=drawing(place, drawn), now_ms=lambda: NOW_MS) as auditor:
        auditor.intend(act(1))
        squatted = [squat(place, number) for number in (2, 3, 4)]
        auditor.intend(act(2))
        for path in squatted:
            assert path.read_bytes() == b"something else\n"
            path.unlink()
        assert sorted(place.numbers()) == [1, 2]
        auditor.intend(act(3))
    assert sorted(place.numbers()) == [1, 2, 3]
    (told,) = [event for event in place.events() if event.action == Action.AUDIT.value]
    assert told.details["ended_writer"] == FIRST
    assert len(drawn) == 2


def test_a_read_is_refused_where_something_stands_at_every_key_and_none_can_be_read(place: Place) -> None:
    sink = Foreign(LocalStore(place.sink), put_if_absent=lambda *_: False, read=denied)
    with place.auditor(open_sink=lambda: sink, intent_s=0.2, salvages=False) as auditor:
        with pytest.raises(AuditError, match=r"did not take it within 0\.2 s.*Nothing was read"):
            auditor.intend(act(1))
        assert auditor.state().pending_events > 0
        del sink.put_if_absent
    assert place.numbers() == [1]


@pytest.mark.parametrize("lost", (OutcomeUnknownError("no answer"), RuntimeError("anybody's code")))
def test_a_segment_whose_answer_was_lost_is_ours_where_it_can_only_be_created(
    place: Place, lost: Exception
) -> None:
    tries, drawn = list[str](), list[str]()
    store = LocalStore(place.sink)

    def create(key: str, data: bytes) -> bool:
        is_created = store.put_if_absent(key, data)
        tries.append(key)
        if len(tries) == 1:
            raise lost
        return is_created

    sink = Foreign(store, put_if_absent=create, read=denied)
    with place.auditor(open_sink=lambda: sink, draw=drawing(place, drawn)) as auditor:
        auditor.intend(act(1))
        assert tries[1:] == tries[:1]
    assert place.numbers() == [1]
    assert drawn == [FIRST]


# ----------------------------------------------------------------------------------------- what it never says


def test_a_sink_that_hangs_costs_the_next_save_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strongroom_security.auditlog.recording.delivering._HANGS_S", 0.1)
    is_free = threading.Event()
    sink = HangingStore(LocalStore(place.sink), is_free.wait)
    with place.auditor(open_sink=lambda: sink) as auditor:
        auditor.record(act(1))
        auditor.secure(within_s=0.2)
        for number in (2, 3):
            auditor.record(act(number))
            began = time.monotonic()
            auditor.secure(within_s=LONG_S)
            assert time.monotonic() - began < LONG_S / 2
        assert auditor.state().pending_events == 3
        assert len([path for path in place.waiting() if path.suffix == ".jsonl"]) == 3
        is_free.set()
        assert soon(lambda: auditor.state().pending_events == 0)
    assert place.numbers() == [1, 2, 3]
