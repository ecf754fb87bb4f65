"""Under Accelerate's own launchers: ``accelerate launch``, and ``notebook_launcher``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from strongroom import Checkpointer

HERE = Path(__file__).parent

LAUNCHED = """
import sys
sys.path[:0] = [{folder!r}]
from accelerate_runs import Loop
loop = Loop("run", every_n_steps=2)
loop.run.resume()
loop.train(4)
loop.accelerator.end_training()
"""

NOTEBOOK = """
import sys
sys.path[:0] = [{folder!r}]
from accelerate import notebook_launcher
from accelerate_runs import in_notebook
if __name__ == "__main__":
    notebook_launcher(in_notebook, ("run",), num_processes=2, use_port="{port}")
"""


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _run(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    # Of a session of its own, so that nothing of it outlives a test that fails.
    with subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as started:
        try:
            _, said = started.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            raise
    assert started.returncode == 0, said[-4000:]


def steps_of(root: Path) -> list[int]:
    with Checkpointer(root) as checkpointer:
        return sorted(one.step for one in checkpointer.checkpoints())


def test_accelerate_launch_starts_two_processes_that_save_and_go_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED.format(folder=str(HERE)))
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2",
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
        "--num_cpu_threads_per_process", "1", "--main_process_port", "0", str(script),
    ]  # fmt: skip
    _run(command, tmp_path)
    assert steps_of(tmp_path / "run") == [2, 4]
    _run(command, tmp_path)
    assert steps_of(tmp_path / "run") == [2, 4, 6, 8]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="notebook_launcher forks")
def test_notebook_launcher_starts_two_processes_that_save(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NOTEBOOK.format(folder=str(HERE), port=_free_port()))
    _run([sys.executable, str(script)], tmp_path)
    assert steps_of(tmp_path / "run") == [2, 4]
