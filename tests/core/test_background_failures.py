"""A background failure is never silent, is told once, and costs nothing that was committed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import (
    AccessDeniedError,
    ClosedError,
    ConfigError,
    DeadlineExceededError,
    OutcomeUnknownError,
    RaiseAtOnce,
    SaveError,
    StateEncodingError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    Tolerate,
    WaitTimeoutError,
    events,
)
from strongroom.stores.local import LocalStore

STATE = {"t": torch.ones(4)}


@pytest.fixture
def broken(store: Any) -> Any:
    """A store whose shards fail until ``store.hook`` is taken away."""
    store.fail(StoreUnavailableError("the disk does not answer"), on="finish")
    return store


def failed(checkpointer: Any, step: int) -> Any:
    """A save that has failed, which nobody was told of yet."""
    handle = checkpointer.save(step, STATE)
    while not handle.done():
        checkpointer._in_flight.job.result(60)
    return handle


def test_a_failure_is_raised_by_the_next_save_which_saves_nothing(broken: Any, begin: Any) -> None:
    checkpointer = begin(broken)
    failed(checkpointer, 1)
    with pytest.raises(SaveError, match=r"step 1 failed in the background.*does not answer") as caught:
        checkpointer.save(2, STATE)
    assert isinstance(caught.value.__cause__, StoreUnavailableError)
    broken.hook = None
    checkpointer.save(2, STATE).result()
    checkpointer.close()
    assert [c.step for c in checkpointer.checkpoints()] == [2]


@pytest.mark.parametrize("method", ("wait", "close"))
def test_a_failure_is_raised_by_wait_and_close(method: str, broken: Any, begin: Any) -> None:
    checkpointer = begin(broken)
    checkpointer.save(1, STATE)
    with pytest.raises(SaveError, match="step 1 failed"):
        getattr(checkpointer, method)()
    getattr(checkpointer, method)()


def test_a_failure_that_the_handle_told_is_not_told_again(broken: Any, begin: Any) -> None:
    checkpointer = begin(broken)
    handle = checkpointer.save(1, STATE)
    for _ in range(2):
        with pytest.raises(SaveError, match="step 1 failed"):
            handle.result(60)
    checkpointer.wait()
    checkpointer.close()


def test_a_failure_told_by_the_handle_of_a_skipped_save_is_not_told_again(broken: Any, begin: Any) -> None:
    gate = broken.hold(on="open_writer")
    checkpointer = begin(broken)
    checkpointer.save(1, STATE)
    gate.wait_reached()
    skipped = checkpointer.save(1, STATE)
    assert skipped.skipped is not None
    broken.fail(StoreUnavailableError("gone"), on="write")
    gate.open()
    with pytest.raises(SaveError, match="gone"):
        skipped.result(60)
    checkpointer.wait()


def test_a_failure_that_was_told_by_wait_is_not_told_by_close(broken: Any, begin: Any) -> None:
    checkpointer = begin(broken)
    checkpointer.save(1, STATE)
    with pytest.raises(SaveError):
        checkpointer.wait()
    checkpointer.close()


def test_a_failure_is_logged_once_and_counted(
    broken: Any, begin: Any, listener: Any, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = begin(broken, events=[listener])
    for step in (1, 2):
        with pytest.raises(SaveError):
            checkpointer.save(step, STATE).result(60)
    checkpointer.wait()
    assert [event.failures for event in listener.of(events.SaveFailed)] == [1, 2]
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 2
    assert errors[0].strongroom["step"] == 1  # type: ignore[attr-defined]


def test_a_failure_leaves_what_was_committed_and_nothing_of_itself(
    store: Any, root: Path, begin: Any
) -> None:
    checkpointer = begin(store)
    first = checkpointer.save(1, STATE).result()
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    store.fail(StoreUnavailableError("gone"), on="put_if_absent", where="COMMIT")
    with pytest.raises(SaveError, match="step 1 is untouched"):
        checkpointer.save(2, {"t": torch.zeros(4)}).result(60)
    store.hook = None
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    assert begin(root).restore().checkpoint == first


# -------------------------------------------------------------------------------------- tolerance


def test_so_many_failures_in_a_row_are_tolerated_and_one_more_raises(
    broken: Any, begin: Any, listener: Any, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = begin(broken, on_failure=Tolerate(consecutive=2), events=[listener])
    failed(checkpointer, 1)
    failed(checkpointer, 2)
    checkpointer.wait()
    assert len(listener.of(events.SaveFailed)) == 2
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 2
    failed(checkpointer, 3)
    with pytest.raises(SaveError, match="step 3"):
        checkpointer.wait()


def test_a_save_that_works_begins_the_count_anew(broken: Any, begin: Any) -> None:
    checkpointer = begin(broken, on_failure=Tolerate(consecutive=1))
    fault = broken.hook
    for step in (1, 3, 5):
        broken.hook = fault
        failed(checkpointer, step)
        broken.hook = None
        checkpointer.save(step + 1, STATE).result(60)
    checkpointer.close()


def test_a_tolerated_failure_is_still_told_by_its_handle(broken: Any, begin: Any) -> None:
    checkpointer = begin(broken, on_failure=Tolerate(consecutive=9))
    handle = failed(checkpointer, 1)
    with pytest.raises(SaveError):
        handle.result()


def test_an_unknown_outcome_is_not_tolerated(store: Any, begin: Any) -> None:
    store.fail(OutcomeUnknownError("no answer came"), on="put_if_absent", where="COMMIT")
    checkpointer = begin(store, on_failure=Tolerate(consecutive=9))
    checkpointer.save(1, STATE)
    with pytest.raises(OutcomeUnknownError):
        checkpointer.wait()


@pytest.mark.parametrize("bad", (RaiseAtOnce, Tolerate, "raise", None, 3))
def test_what_is_no_policy_for_failures_is_refused(bad: Any, root: Path, begin: Any) -> None:
    with pytest.raises(ConfigError, match="on_failure"):
        begin(root, on_failure=bad)


# ----------------------------------------------------------------------------------------- context


def test_leaving_the_context_waits_and_raises_what_failed(broken: Any, begin: Any) -> None:
    with pytest.raises(SaveError, match="step 1"), begin(broken) as checkpointer:
        checkpointer.save(1, STATE)
    with pytest.raises(ClosedError):
        checkpointer.save(2, STATE)


def test_leaving_the_context_with_an_exception_commits_what_is_in_flight(store: Any, begin: Any) -> None:
    gate = store.hold(on="open_writer")
    with pytest.raises(ZeroDivisionError), begin(store) as checkpointer:
        checkpointer.save(1, STATE)
        gate.wait_reached()
        gate.open()
        raise ZeroDivisionError
    assert [c.step for c in checkpointer.checkpoints()] == [1]


def test_an_exception_on_the_way_out_is_never_masked_by_a_failed_save(
    broken: Any, begin: Any, listener: Any
) -> None:
    with pytest.raises(ZeroDivisionError), begin(broken, events=[listener]) as checkpointer:
        checkpointer.save(1, STATE)
        raise ZeroDivisionError
    assert len(listener.of(events.SaveFailed)) == 1


def test_an_exception_on_the_way_out_is_never_masked_by_a_store_that_hangs(
    store: Any, begin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gate = store.hold(on="open_writer")
    with pytest.raises(ZeroDivisionError), begin(store, timeout_s=0.05) as checkpointer:
        checkpointer.save(1, STATE)
        gate.wait_reached()
        raise ZeroDivisionError
    assert any("ZeroDivisionError pending" in record.getMessage() for record in caplog.records)
    gate.open()


def test_a_closed_checkpointer_saves_restores_and_waits_no_more(root: Path, begin: Any) -> None:
    checkpointer = begin(root)
    checkpointer.save(1, STATE)
    checkpointer.close()
    checkpointer.close()
    for call in (
        lambda: checkpointer.save(2, STATE),
        checkpointer.restore,
        checkpointer.wait,
        checkpointer.__enter__,
    ):
        with pytest.raises(ClosedError, match="build a new one"):
            call()
    assert [c.step for c in checkpointer.checkpoints()] == [1]


def test_a_wait_that_ends_first_says_so_and_close_can_be_tried_again(store: Any, begin: Any) -> None:
    gate = store.hold(on="open_writer")
    checkpointer = begin(store)
    checkpointer.save(1, STATE)
    for call in (checkpointer.wait, checkpointer.close):
        with pytest.raises(WaitTimeoutError, match=r"step 1 is still under way.*goes on in the background"):
            call(timeout_s=0)
    gate.open()
    checkpointer.close()
    assert [c.step for c in checkpointer.checkpoints()] == [1]


# ----------------------------------------------------------------------------------------- causes


def test_a_deadline_that_passes_while_files_are_written_keeps_the_save_from_committing(
    store: Any, begin: Any, clock: Any
) -> None:
    gate = store.hold(on="open_writer", where="safetensors")
    checkpointer = begin(store, timeout_s=10, clock=clock.clock)
    handle = checkpointer.save(1, STATE)
    gate.wait_reached()
    clock.monotonic_s += 10
    gate.open()
    with pytest.raises(DeadlineExceededError, match="deadline of 10 s passed"):
        handle.result(60)
    assert checkpointer.checkpoints() == []


def test_a_deadline_that_passes_just_before_the_commit_keeps_the_save_from_committing(
    store: Any, begin: Any, clock: Any
) -> None:
    gate = store.hold(on="list_names", where="launches")
    gate.open()
    checkpointer = begin(store, timeout_s=10, clock=clock.clock)
    checkpointer.save(1, STATE).result(60)
    gate = store.hold(on="list_names", where="launches")
    handle = checkpointer.save(2, STATE)
    gate.wait_reached()
    clock.monotonic_s += 10.5
    gate.open()
    with pytest.raises(DeadlineExceededError, match="about to commit"):
        handle.result(60)
    assert not any("step-000000000002" in key for key in store.keys("put_if_absent"))
    assert [c.step for c in checkpointer.checkpoints()] == [1]


def test_a_wall_clock_that_jumps_does_not_touch_a_deadline(store: Any, begin: Any, clock: Any) -> None:
    gate = store.hold(on="open_writer")
    handle = begin(store, timeout_s=10, clock=clock.clock).save(1, STATE)
    gate.wait_reached()
    clock.jump(1e6)
    gate.open()
    assert handle.result(60).step == 1


def test_a_full_disk_fails_the_save_and_the_next_works_once_there_is_room(
    store: Any, root: Path, begin: Any
) -> None:
    checkpointer = begin(store)
    first = checkpointer.save(1, STATE).result()
    store.fail(StoreFullError("no space left"), on=("write", "put", "finish"))
    with pytest.raises(SaveError, match="no space left") as caught:
        checkpointer.save(2, STATE).result(60)
    assert isinstance(caught.value.__cause__, StoreFullError)
    assert checkpointer.checkpoints() == [first]
    store.hook = None
    checkpointer.save(2, STATE).result(60)
    assert [c.step for c in checkpointer.checkpoints()] == [2, 1]
    assert len([path for path in root.iterdir() if path.name.startswith("step-")]) == 2


def test_a_root_that_is_a_file_is_refused_when_the_checkpointer_is_built(tmp_path: Path, begin: Any) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"file"):
        begin(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_root_that_becomes_a_file_or_lies_below_one_fails_the_first_save(
    tmp_path: Path, begin: Any
) -> None:
    checkpointers = [begin(tmp_path / "file"), begin(tmp_path / "file" / "run")]
    (tmp_path / "file").write_text("mine")
    for checkpointer in checkpointers:
        with pytest.raises(StoreError):
            checkpointer.save(1, STATE)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_root_that_cannot_be_written_to_is_found_by_the_first_save_itself(store: Any, begin: Any) -> None:
    store.fail(AccessDeniedError("read-only file system"), on=("put", "put_if_absent", "open_writer"))
    checkpointer = begin(store)
    with pytest.raises(AccessDeniedError, match="read-only"):
        checkpointer.save(1, STATE)
    store.hook = None
    checkpointer.save(1, STATE).result(60)


def test_a_folder_on_which_nothing_can_be_created_is_an_error_of_the_first_save(begin: Any) -> None:
    # procfs refuses new files to everyone, root included.
    with pytest.raises((StoreError, ConfigError)):
        begin(LocalStore("/proc/self/strongroom")).save(1, STATE)


def test_a_state_that_cannot_be_encoded_raises_at_once_and_the_next_save_works(
    root: Path, begin: Any
) -> None:
    checkpointer = begin(root)
    with pytest.raises(StateEncodingError):
        checkpointer.save(1, {"bad": object()})
    assert checkpointer.checkpoints() == []
    checkpointer.save(1, STATE).result()
    assert [c.step for c in checkpointer.checkpoints()] == [1]


def test_a_failure_that_nobody_foresaw_is_told_as_well(store: Any, begin: Any) -> None:
    store.fail(RuntimeError("a bug in a third party's store"), on="finish")
    checkpointer = begin(store)
    checkpointer.save(1, STATE)
    with pytest.raises(SaveError, match="third party") as caught:
        checkpointer.wait()
    assert isinstance(caught.value.__cause__, RuntimeError)


class MuteError(Exception):
    """An error that cannot say what it is about."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("odd", (SystemExit(3), GeneratorExit(), MuteError()))
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_a_store_raises_the_save_has_failed_and_the_next_one_works(
    store: Any, begin: Any, odd: BaseException
) -> None:
    store.fail(odd, on="finish")
    checkpointer = begin(store)
    handle = checkpointer.save(1, STATE)
    with pytest.raises(SaveError, match="step 1 failed in the background"):
        handle.result(60)
    store.hook = None
    assert checkpointer.save(2, STATE).result().step == 2
    checkpointer.close()
