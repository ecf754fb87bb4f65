"""Tasks on threads, also while the interpreter is ending."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from strongroom import Checkpointer
from strongroom.parallel import run_all, start


def test_results_come_in_the_order_of_the_tasks() -> None:
    assert run_all([lambda n=n: n * n for n in range(20)], workers=3, name="t") == [n * n for n in range(20)]


def test_tasks_run_at_once() -> None:
    barrier = threading.Barrier(3)
    run_all([lambda: barrier.wait(30)] * 3, workers=3, name="t")


def test_an_error_is_raised_once_what_was_under_way_has_ended() -> None:
    has_begun, has_ended = threading.Event(), threading.Event()

    def slow() -> None:
        has_begun.set()
        threading.Event().wait(0.05)
        has_ended.set()

    def failing() -> None:
        assert has_begun.wait(30)
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        run_all([slow, failing, *[slow] * 50], workers=2, name="t")
    assert has_ended.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("t-")]


def test_a_started_task_gives_its_result_or_its_error() -> None:
    assert start(lambda: 3, name="t").result(30) == 3
    with pytest.raises(ZeroDivisionError):
        start(lambda: 1 // 0, name="t").result(30)


def test_a_script_that_never_closes_still_commits_its_last_save(tmp_path: Path) -> None:
    program = (
        "import sys, torch; from strongroom import Checkpointer; "
        "Checkpointer(sys.argv[1]).save(7, {'x': [torch.ones(3 << 20) for _ in range(6)]})"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")], check=True)
    assert [found.step for found in Checkpointer(tmp_path / "run").checkpoints()] == [7]
