"""What runs in a process of its own, since it is about a whole process: its start, its memory.

Run as ``python -m strongroom_bench.children JOB ARGUMENTS``; prints one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

__all__ = ["run", "status_bytes"]


def run(job: str, *arguments: str) -> dict[str, Any]:
    """Run one of this module's jobs in a new process; what it found."""
    folders = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    found = subprocess.run(
        [sys.executable, "-m", __name__, job, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))},
        capture_output=True,
        text=True,
    )
    if found.returncode != 0:
        raise RuntimeError(f"the process for {job!r} ended with {found.returncode}: {found.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(found.stdout)
    return answer


def resume(root: str, tensors: str) -> dict[str, Any]:
    """Resume as a training script does: build the tensors, then fill them."""
    import torch

    from strongroom import Checkpointer

    size = _stored_bytes(Path(root)) // int(tensors) // 4096 * 1024
    state = {f"layer{number:02}": torch.empty(size) for number in range(int(tensors))}
    with Checkpointer(root) as checkpointer:
        restored = checkpointer.restore({"model": state})
    return {"step": restored.step if restored is not None else None}


def _stored_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("step-*/data/*-*.safetensors"))


def raw(path: str, tensors: str) -> dict[str, Any]:
    """Import torch and read as many bytes into as many tensors."""
    import torch

    size = Path(path).stat().st_size // int(tensors)
    state = [torch.empty(size, dtype=torch.uint8) for _ in range(int(tensors))]
    with Path(path).open("rb", buffering=0) as file:
        for tensor in state:
            view = tensor.numpy().data
            while view:
                view = view[file.readinto(view) :]
    return {}


def memory(root: str, saver: str, tensors: str, tensor_bytes: str, saves: str) -> dict[str, Any]:
    """Save again and again; how much host memory the process held at its peak, after each save."""
    import torch

    state = {f"layer{number:02}": torch.randn(int(tensor_bytes) // 4) for number in range(int(tensors))}
    save = _strongroom_saver(root, state) if saver == "strongroom" else _async_saver(root, state)
    before = status_bytes("VmRSS")
    # From here on: a process's peak so far is of no interest.
    Path("/proc/self/clear_refs").write_text("5")
    peaks = []
    for step in range(1, int(saves) + 1):
        save(step)
        peaks.append(status_bytes("VmHWM") - before)
    return {"added": peaks}


def rank(folder: str, scale: str) -> dict[str, Any]:
    """One rank of the job of `strongroom_bench.ranks`."""
    from dataclasses import replace

    from strongroom_bench.ranks import run_rank
    from strongroom_bench.scale import SCALES

    return run_rank(folder, replace(SCALES[scale], rounds=int(os.environ["STRONGROOM_BENCH_ROUNDS"])))


def _strongroom_saver(root: str, state: dict[str, Any]) -> Any:
    import torch

    from strongroom import Checkpointer
    from strongroom_bench.states import drop

    warm = Checkpointer(f"{root}-warm")
    # What is imported late, and threads that torch starts, are not memory of a save.
    warm.save(1, {"t": torch.ones(1)}).result()
    warm.close()
    checkpointer = Checkpointer(root)

    def save(step: int) -> None:
        checkpointer.save(step, {"model": state}).result()
        for found in Path(root).glob("step-*"):
            drop(found)

    return save


def _async_saver(root: str, state: dict[str, Any]) -> Any:
    import torch
    import torch.distributed.checkpoint as dcp

    from strongroom_bench.states import done, drop

    def save(step: int, of: dict[str, Any] | None = None) -> None:
        writer = dcp.FileSystemWriter(f"{root}/{step}", thread_count=2)
        done(dcp.async_save(state if of is None else of, storage_writer=writer))
        drop(Path(root))

    save(0, {"t": torch.ones(1)})
    return save


def upload(*given: str) -> dict[str, Any]:
    """The upload of `strongroom_bench.objects` whose memory is looked at."""
    from strongroom_bench.objects import measure_memory

    return measure_memory(*given)


def status_bytes(field: str) -> int:
    """A size of this process, such as ``VmRSS`` or ``VmHWM``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


_JOBS = {"resume": resume, "raw": raw, "memory": memory, "rank": rank, "upload": upload}

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    sys.stdout.write(json.dumps(_JOBS[sys.argv[1]](*sys.argv[2:])))
