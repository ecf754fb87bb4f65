"""What ranks do in the tests of issues; importable by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import ProjectConfiguration
from accelerate_runs import Loop

__all__ = ["in_folder", "project"]


def project(**options: Any) -> dict[str, Any]:
    """Arguments of an Accelerator that names its checkpoints by itself."""
    settings = ProjectConfiguration(project_dir=".", automatic_checkpoint_naming=True, **options)
    return {"project_config": settings}


def in_folder(folder: Path, name: str) -> Any:
    """Do one of these there."""
    os.chdir(folder)
    return _ACTS[name]()


def _save_often() -> int:
    loop = Loop("run", accelerator=project(total_limit=2))
    for _ in range(5):
        loop.train(1)
        loop.accelerator.save_state()
    loop.run.close()
    return int(loop.accelerator.save_iteration)


def _save_on_the_main_one() -> None:
    loop = Loop("run", timeout_s=3)
    loop.train(1)
    if loop.accelerator.is_main_process:
        loop.accelerator.save_state("mine")
    loop.train(1)


def _step_on_the_main_one() -> None:
    loop = Loop("run", every_n_steps=1, timeout_s=3)
    loop.train(1, steps=loop.accelerator.is_main_process)
    loop.train(1, steps=loop.accelerator.is_main_process)


def _join_uneven() -> tuple[int, int]:
    loop = Loop("run", every_n_steps=2)
    # A mock: Accelerate joins where there are several devices, and torch joins on CPUs as well.
    type(loop.accelerator).multi_device = property(lambda _: True)
    with loop.accelerator.join_uneven_inputs([loop.model], even_batches=False):
        loop.train(3 - loop.accelerator.process_index)
    steps = loop.run.steps_done
    loop.run.close()
    return steps, loop.accelerator.process_index


_ACTS: Mapping[str, Callable[[], Any]] = {
    "join_uneven": _join_uneven,
    "save_often": _save_often,
    "save_on_the_main_one": _save_on_the_main_one,
    "step_on_the_main_one": _step_on_the_main_one,
}
