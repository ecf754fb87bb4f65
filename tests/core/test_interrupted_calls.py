"""What comes in between a call: an interrupt, a signal's handler, a fork, another job's retention."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import Checkpointer, ConfigError
from strongroom.errors import CheckpointNotFoundError
from strongroom.verify import verify


def test_an_interrupt_while_the_save_begins_does_not_lose_sight_of_it(
    store: Any, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = begin(store)
    weights = torch.full((1000,), 1.0)
    checkpointer.save(1, {"w": weights}).result()
    checkpointer.wait()
    let_go = threading.Event.set
    # By its number: a thread that is only beginning is not known to `threading.current_thread` yet.
    main = threading.get_ident()

    def interrupted(event: threading.Event) -> None:
        let_go(event)
        if threading.get_ident() == main:
            raise KeyboardInterrupt

    gate = store.hold(on="open_writer")
    monkeypatch.setattr(threading.Event, "set", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.save(2, {"w": weights.fill_(2)})
    monkeypatch.undo()
    gate.wait_reached()
    threading.Timer(0.2, gate.open).start()
    checkpointer.save(3, {"w": weights.fill_(3)})  # waits, since the buffers are in use
    checkpointer.close()
    for step in (1, 2, 3):
        restored = begin(store).restore(step=step)
        assert restored.state["w"].unique().tolist() == [step]


def test_a_save_whose_thread_was_interrupted_before_it_was_let_go_never_begins(
    store: Any, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = begin(store)
    weights = torch.full((1000,), 1.0)
    checkpointer.save(1, {"w": weights}).result()
    checkpointer.wait()
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.save(2, {"w": weights.fill_(2)})
    monkeypatch.undo()
    checkpointer.save(3, {"w": weights.fill_(3)})
    checkpointer.close()
    assert [one.step for one in begin(store).checkpoints()] == [3, 1]
    assert begin(store).restore().state["w"].unique().tolist() == [3]


def test_a_save_that_could_not_begin_leaves_nothing_behind(
    store: Any, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = begin(store)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="new thread"):
        checkpointer.save(1, {"w": torch.ones(2)})
    monkeypatch.undo()
    assert checkpointer.save(1, {"w": torch.ones(2)}).skipped is None
    checkpointer.wait(10)
    assert [checkpoint.step for checkpoint in checkpointer.checkpoints()] == [1]


class Handler:
    """State whose ``state_dict`` calls the checkpointer, as a signal's handler may at that moment."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def state_dict(self) -> dict[str, Any]:
        self.call()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_save_from_within_a_save_is_refused_and_the_next_one_is_not(store: Any, begin: Any) -> None:
    checkpointer = begin(store)
    inner = Handler(lambda: checkpointer.save(2, {"w": torch.ones(2)}))
    with pytest.raises(ConfigError, match="save was called while another save or restore"):
        checkpointer.save(1, {"inner": inner})
    checkpointer.save(3, {"w": torch.ones(2)}).result()
    assert [checkpoint.step for checkpoint in checkpointer.checkpoints()] == [3]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_neither_saves_for_its_parent_nor_waits_for_it(store: Any, begin: Any) -> None:
    checkpointer = begin(store)
    gate = store.hold(on="open_writer")
    checkpointer.save(1, {"w": torch.ones(2)})
    gate.wait_reached()
    child = os.fork()
    if child == 0:
        try:
            checkpointer.save(2, {"w": torch.ones(2)})
        except ConfigError:
            checkpointer.close()
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    gate.open()
    assert status == 0
    checkpointer.close()
    assert [checkpoint.step for checkpoint in begin(store).checkpoints()] == [1]


def removed_once_read(store: Any, writer: Checkpointer, folder: str) -> None:
    """Let a running job commit step 2 and remove step 1 when a reader has begun with that."""

    def hook(operation: str, key: str) -> None:
        if operation == "read" and key == f"{folder}/data/MANIFEST.json":
            store.hook = None
            writer.save(2, {"w": torch.full((3,), 2.0)}).result()
            writer.wait()
            store.inner.delete(f"{folder}/COMMIT")
            store.inner.delete_tree(folder)

    store.hook = hook


def test_what_retention_removes_while_it_is_read_is_not_damaged(store: Any, root: Path, begin: Any) -> None:
    writer = begin(root)
    folder = writer.save(1, {"w": torch.ones(3)}).result().folder
    removed_once_read(store, writer, folder)
    target = torch.zeros(3)
    restored = begin(store).restore({"w": target})
    assert (restored.step, restored.skipped, target.tolist()) == (2, (), [2.0] * 3)


def test_a_removed_step_that_was_asked_for_is_not_found_and_not_damaged(
    store: Any, root: Path, begin: Any
) -> None:
    writer = begin(root)
    folder = writer.save(1, {"w": torch.ones(3)}).result().folder
    removed_once_read(store, writer, folder)
    with pytest.raises(CheckpointNotFoundError, match="committed steps are 2"):
        begin(store).restore(step=1)


@pytest.mark.parametrize("everything", (False, True))
def test_a_verification_does_not_take_what_retention_removes_for_damage(
    everything: bool, store: Any, root: Path, begin: Any
) -> None:
    writer = begin(root)
    folder = writer.save(1, {"w": torch.ones(3)}).result().folder
    removed_once_read(store, writer, folder)
    report = verify(store, everything=everything)
    assert report.verdict == "whole"
    assert [checkpoint.name.step for checkpoint in report.checkpoints] == [2]
