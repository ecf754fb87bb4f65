"""A writer that slept while another took its run over: it hears of it, and what it saves never counts.

Two processes at one root: the earlier one is stopped (SIGSTOP) at some point of a save, the later
one resumes and commits, and the earlier one is let go on.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crash_children as children
import pytest
from crash_processes import WAIT_S, Child
from crash_states import assert_is_state_at, leftovers, state_at

from strongroom import Checkpointer, FencedError
from strongroom.stores.local import LocalStore


def _stopped(start: Callable[..., Child], root: Path, operation: str, where: str) -> Child:
    return _until_stopped(start(children.stop_in_a_save, str(root), operation, where))


def _until_stopped(child: Child) -> Child:
    assert child.hear() == "about to be stopped"
    ends_at = time.monotonic() + WAIT_S
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        assert time.monotonic() < ends_at, "the child was never stopped"
        time.sleep(0.005)
    return child


def _take_over(root: Path, step: int) -> None:
    """Another process resumes from step 1 and commits."""
    with Checkpointer(root) as later:
        restored = later.restore()
        assert restored is not None
        assert restored.step == 1
        later.save(step, state_at(step, writer=1)).result()


def _go_on(child: Child) -> list[Any]:
    os.kill(child.pid, signal.SIGCONT)
    code, heard = child.end()
    assert code == 0
    return heard


@pytest.mark.parametrize(
    ("operation", "where"),
    (
        ("open_writer", "00000-00.safetensors"),
        ("open_writer", "state.json"),
        ("open_writer", "MANIFEST.json"),
        ("make_durable", "step-000000000002"),
        ("list_names", "launches"),
    ),
)
@pytest.mark.parametrize("later_step", (2, 7))
def test_a_zombie_is_fenced_and_never_commits(
    start: Callable[..., Child], tmp_path: Path, operation: str, where: str, later_step: int
) -> None:
    root = tmp_path / "run"
    zombie = _stopped(start, root, operation, where)
    _take_over(root, later_step)
    first, second = _go_on(zombie)
    for kind, words in (first, second):
        assert kind == "FencedError"
        assert "launch 2 has taken run" in words
    with Checkpointer(root) as reader:
        assert [(found.step, found.launch) for found in reader.checkpoints()] == [(later_step, 2), (1, 1)]
        restored = reader.restore()
    assert restored is not None
    assert (restored.step, restored.skipped) == (later_step, ())
    assert_is_state_at(restored.state, later_step, writer=1)
    assert leftovers(LocalStore(root)) == set()


@pytest.mark.parametrize("later_step", (2, 7))
def test_a_zombie_that_had_looked_already_is_outranked(
    start: Callable[..., Child], tmp_path: Path, later_step: int
) -> None:
    """Between its last look and its commit nothing can stop it; what it commits is superseded at birth."""
    root = tmp_path / "run"
    zombie = _stopped(start, root, "put_if_absent", "COMMIT")
    _take_over(root, later_step)
    first, second = _go_on(zombie)
    assert first == 2
    assert second[0] == "FencedError"
    with Checkpointer(root) as reader:
        seen = [(found.step, found.launch, found.is_superseded) for found in reader.checkpoints()]
        assert seen == [(later_step, 2, False), (1, 1, False), (2, 1, True)]
        restored = reader.restore()
    assert restored is not None
    assert_is_state_at(restored.state, later_step, writer=1)


def test_of_two_that_claim_the_same_launch_one_gets_the_next(
    start: Callable[..., Child], tmp_path: Path
) -> None:
    """Both resumed from step 1 and saw the same numbers; whoever comes second takes the run over."""
    root = tmp_path / "run"
    with Checkpointer(root) as first:
        first.save(1, state_at(1)).result()
    second = _until_stopped(start(children.stop_in_a_claim, str(root)))
    with Checkpointer(root) as third:
        third.restore()
        assert third.save(5, state_at(5, writer=1)).result().launch == 2
        assert _go_on(second) == [(5, 3)]
        with pytest.raises(FencedError):
            third.save(6, state_at(6, writer=1)).result()
    with Checkpointer(root) as reader:
        seen = [(found.step, found.launch, found.is_superseded) for found in reader.checkpoints()]
        assert seen == [(5, 3, False), (1, 1, False), (5, 2, True)]
        restored = reader.restore()
    assert restored is not None
    assert_is_state_at(restored.state, 5)
