"""What listeners hear: each event once, at its moment, and never at the run's expense."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import KeepLast, SaveError, StoreUnavailableError, events
from strongroom.stores.memory import MemoryStore

STATE = {"t": torch.ones(100)}


def test_a_run_is_told_in_order_and_each_thing_once(store: Any, begin: Any, listener: Any) -> None:
    checkpointer = begin(store, keep=KeepLast(count=1), events=[listener])
    assert checkpointer.restore() is None
    assert listener.kinds == []
    checkpointer.save(1, STATE)
    checkpointer.wait()
    checkpointer.save(1, STATE)
    checkpointer.save(2, STATE)
    checkpointer.wait()
    checkpointer.restore()
    checkpointer.close()
    assert listener.kinds == [
        "LaunchClaimed",
        "SaveStarted",
        "CheckpointCommitted",
        "SaveSkipped",
        "SaveStarted",
        "CheckpointCommitted",
        "RemovalStarted",
        "CheckpointRemoved",
        "RestoreFinished",
    ]


def test_events_say_what_they_are_about(begin: Any, listener: Any) -> None:
    memory = MemoryStore()
    first = begin(memory, events=[listener], run_id="job-7").save(5, STATE).result()
    (launch,) = listener.of(events.LaunchClaimed)
    assert (launch.run, launch.launch, launch.parent_step) == ("job-7", 1, None)
    (started,) = listener.of(events.SaveStarted)
    assert (started.run, started.step, started.launch, started.attempt) == ("job-7", 5, 1, first.attempt)
    assert 400 <= started.size_bytes <= first.size_bytes
    assert min(started.wait_s, started.stage_s) >= 0
    (committed,) = listener.of(events.CheckpointCommitted)
    assert (committed.step, committed.launch, committed.attempt) == (5, 1, first.attempt)
    assert committed.size_bytes == first.size_bytes
    assert committed.background_s >= 0

    resumed = begin(memory, events=[listener])
    resumed.restore()
    resumed.save(6, STATE).result()
    (restored,) = listener.of(events.RestoreFinished)
    assert (restored.run, restored.step, restored.launch, restored.skipped) == ("job-7", 5, 1, 0)
    assert restored.size_bytes >= 400
    assert restored.seconds >= 0
    assert listener.of(events.LaunchClaimed)[-1].parent_step == 5


def test_a_launch_is_claimed_once_and_again_after_a_rewind(begin: Any, listener: Any) -> None:
    checkpointer = begin(MemoryStore(), events=[listener])
    for step in (1, 2, 3):
        checkpointer.save(step, STATE).result()
    checkpointer.restore(step=1)
    checkpointer.save(2, STATE).result()
    assert [(e.launch, e.parent_step) for e in listener.of(events.LaunchClaimed)] == [(1, None), (2, 1)]


def test_a_start_is_told_while_the_store_still_hangs_and_a_commit_only_after_it(
    store: Any, begin: Any, listener: Any
) -> None:
    gate = store.hold(on="put_if_absent", where="COMMIT")
    handle = begin(store, events=[listener]).save(1, STATE)
    gate.wait_reached()
    assert listener.kinds == ["LaunchClaimed", "SaveStarted"]
    gate.open()
    handle.result(60)
    assert listener.kinds == ["LaunchClaimed", "SaveStarted", "CheckpointCommitted"]


def test_who_waits_for_a_checkpoint_finds_its_commit_told(store: Any, begin: Any) -> None:
    heard: list[Any] = []

    class Looking:
        def emit(self, event: Any) -> None:
            if isinstance(event, events.CheckpointCommitted):
                heard.append([key for key in store.keys("put_if_absent") if key.endswith("COMMIT")])

    begin(store, events=[Looking()]).save(1, STATE).result()
    assert len(heard) == 1
    assert len(heard[0]) == 1


def test_a_failed_save_is_told_with_its_reason(store: Any, begin: Any, listener: Any) -> None:
    store.fail(StoreUnavailableError("the disk is gone"), on="finish", times=1)
    checkpointer = begin(store, events=[listener])
    with pytest.raises(SaveError) as caught:
        checkpointer.save(1, STATE).result()
    (failed,) = listener.of(events.SaveFailed)
    assert (failed.step, failed.failures, failed.reason) == (1, 1, str(caught.value))
    assert listener.of(events.CheckpointCommitted) == []


def test_a_skipped_save_is_told_with_its_reason(begin: Any, listener: Any) -> None:
    checkpointer = begin(MemoryStore(), events=[listener])
    checkpointer.save(1, STATE).result()
    handle = checkpointer.save(1, STATE)
    (skipped,) = listener.of(events.SaveSkipped)
    assert (skipped.step, skipped.reason) == (1, handle.skipped)


class Failing:
    def emit(self, event: Any) -> None:
        raise ZeroDivisionError(type(event).__name__)


def test_a_sink_that_fails_never_breaks_a_save_or_a_restore(
    begin: Any, listener: Any, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = begin(MemoryStore(), events=[Failing(), listener], keep=KeepLast(count=1))
    checkpointer.save(1, STATE)
    checkpointer.save(2, STATE)
    checkpointer.wait()
    assert checkpointer.restore().step == 2
    checkpointer.close()
    # The other sink hears everything, and each failure of the first is in the log.
    assert len(listener.kinds) == 8
    told = [record for record in caplog.records if "event sink" in record.getMessage()]
    assert len(told) == 8
    assert all(record.exc_info is not None for record in told)


def test_every_event_is_in_the_log_with_its_fields_and_one_level_a_kind(
    begin: Any, listener: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="strongroom")
    checkpointer = begin(MemoryStore(), events=[listener], keep=KeepLast(count=1))
    for step in (1, 2):
        checkpointer.save(step, STATE)
    checkpointer.wait()
    logged = [record for record in caplog.records if hasattr(record, "strongroom")]
    assert [record.strongroom for record in logged] == [dataclasses.asdict(event) for event in listener.heard]
    levels = {record.getMessage().split()[0]: record.levelname for record in logged}
    assert levels == {
        "LaunchClaimed": "INFO",
        "SaveStarted": "DEBUG",
        "CheckpointCommitted": "INFO",
        "RemovalStarted": "DEBUG",
        "CheckpointRemoved": "DEBUG",
    }


def test_events_are_frozen_values() -> None:
    event = events.SaveSkipped(run="r", step=1, reason="x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.step = 2  # type: ignore[misc]
    assert event == events.SaveSkipped(run="r", step=1, reason="x")


def test_looking_at_a_root_tells_nothing(root: Path, begin: Any, listener: Any) -> None:
    begin(root).save(1, STATE).result()
    checkpointer = begin(root, events=[listener])
    checkpointer.checkpoints()
    checkpointer.wait()
    checkpointer.close()
    assert listener.heard == []
