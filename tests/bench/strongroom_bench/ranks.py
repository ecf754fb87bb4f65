"""Saves and restores of one job of four ranks, each holding a quarter of every tensor.

Every rank times the same contestants in the same order; what counts is the slowest rank. Stock DCP
gets a gloo group of its own, as its documentation advises for asynchronous saves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from strongroom import Checkpointer
from strongroom.workers import reading_workers, writing_workers
from strongroom_bench.figure import Figure, beside, fold, setting
from strongroom_bench.measure import Contestant, interleave, seconds
from strongroom_bench.scale import Scale
from strongroom_bench.states import copy_once, done, drop

__all__ = ["measure", "run_rank"]

WORLD_SIZE: Final = 4
_LIMIT_S: Final = 3600


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Run the job, and report what its first rank gathered."""
    samples = _run_job(scale, folder)
    for name in ("ranks", "ranks-kept", "dcp-kept"):
        drop(folder / name)
    threads = (
        f"{writing_workers(ranks=WORLD_SIZE)} writing and {reading_workers(ranks=WORLD_SIZE)} reading threads"
    )
    words = setting(f"{scale.state_words}, a quarter of each on each rank", f"{threads} a rank")
    figures = [
        beside(
            "stall of save, 4 ranks / one copy_ of each rank's part",
            "strongroom",
            "copy_",
            fold(samples, "stall"),
            bar=1.15,
            setting=words,
            note="must not exceed the stall of plain dcp.async_save either",
            at_most="dcp.async_save(thread_count=2)",
        ),
        beside(
            "wall of a committed, checksummed save, 4 ranks / dcp.save(thread_count=2)",
            "strongroom",
            "dcp.save(thread_count=2)",
            fold(samples, "wall"),
            bar=1.00,
            setting=words,
        ),
        beside(
            "wall of a verified restore, 4 ranks / dcp.load",
            "strongroom restore",
            "dcp.load",
            fold(samples, "load"),
            bar=0.60,
            setting=words,
        ),
    ]
    return [_of_many(figure) for figure in figures]


def _of_many(figure: Figure) -> Figure:
    return replace(figure, world_size=WORLD_SIZE)


def _run_job(scale: Scale, folder: Path) -> dict[str, dict[str, list[float]]]:
    paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory(dir=folder) as meeting:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "strongroom_bench.children", "rank", str(folder), scale.name],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(WORLD_SIZE),
                    "LOCAL_WORLD_SIZE": str(WORLD_SIZE),
                    "STRONGROOM_BENCH_MEETING": f"file://{meeting}/meeting",
                    "STRONGROOM_BENCH_ROUNDS": str(scale.rounds),
                },
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(WORLD_SIZE)
        ]
        told, _ = processes[0].communicate(timeout=_LIMIT_S)
        codes = [process.wait(timeout=60) for process in processes]
    if any(codes):
        raise RuntimeError(f"the ranks of the job ended with {codes}")
    samples: dict[str, dict[str, list[float]]] = json.loads(told)
    return samples


def run_rank(folder: str, scale: Scale) -> dict[str, Any]:
    """One rank's part; the samples of the slowest rank of each round."""
    dist.init_process_group(
        "gloo",
        init_method=os.environ["STRONGROOM_BENCH_MEETING"],
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    torch.set_num_threads(1)
    root = Path(folder)
    state = _sharded(scale)
    local = {name: tensor.to_local() for name, tensor in state.items()}
    own_group = dist.new_group(backend="gloo")
    checkpointer = Checkpointer(root / "ranks")
    steps = iter(range(1, 10**6))
    targets = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    stock_targets = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def save() -> dict[str, float]:
        began = time.perf_counter()
        handle = checkpointer.save(next(steps), {"model": state})
        stalled = time.perf_counter()
        handle.result()
        return {"stall": stalled - began, "wall": time.perf_counter() - began}

    def tidy() -> None:
        checkpointer.wait()
        dist.barrier()
        if dist.get_rank() == 0:
            for found in (root / "ranks").glob("step-*"):
                drop(found)

    def stock(path: Path) -> dict[str, float]:
        writer = dcp.FileSystemWriter(path, thread_count=2)
        return {"wall": seconds(lambda: dcp.save(state, storage_writer=writer, process_group=own_group))}

    def stock_async(path: Path) -> dict[str, float]:
        writer = dcp.FileSystemWriter(path, thread_count=2)
        began = time.perf_counter()
        future: Any = dcp.async_save(state, storage_writer=writer, process_group=own_group)
        stalled = time.perf_counter()
        done(future)
        return {"stall": stalled - began, "wall": time.perf_counter() - began}

    def gone(path: Path) -> Callable[[], None]:
        def act() -> None:
            dist.barrier()
            if dist.get_rank() == 0:
                drop(path)

        return act

    def restore() -> None:
        if Checkpointer(root / "ranks-kept").restore({"model": targets}) is None:
            raise RuntimeError("nothing was restored")

    kept = Checkpointer(root / "ranks-kept")
    kept.save(1, {"model": state}).result()
    kept.close()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(root / "dcp-kept", thread_count=2))
    stock_reader = dcp.FileSystemReader(root / "dcp-kept")
    contestants = [
        Contestant(name="strongroom", run=save, tidy=tidy),
        Contestant(name="dcp.save(thread_count=2)", run=lambda: stock(root / "d"), tidy=gone(root / "d")),
        Contestant(
            name="dcp.async_save(thread_count=2)",
            run=lambda: stock_async(root / "a"),
            tidy=gone(root / "a"),
        ),
        copy_once(local),
        Contestant(name="strongroom restore", run=lambda: {"load": seconds(restore)}),
        Contestant(
            name="dcp.load",
            run=lambda: {"load": seconds(lambda: dcp.load(stock_targets, storage_reader=stock_reader))},
        ),
    ]
    samples = interleave(
        [_together(contestant) for contestant in contestants],
        rounds=scale.rounds,
        warm_ups=scale.warm_ups,
        flushes=scale.flushes,
    )
    checkpointer.close()
    slowest = _slowest(samples)
    dist.destroy_process_group()
    return slowest if int(os.environ["RANK"]) == 0 else {}


def _together(contestant: Contestant) -> Contestant:
    def run() -> Mapping[str, float]:
        dist.barrier()
        return contestant.run()

    return Contestant(name=contestant.name, run=run, tidy=contestant.tidy)


def _sharded(scale: Scale) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    rows = scale.tensor_bytes // 4 // 64
    return {
        f"layer{number:02}": DTensor.from_local(
            torch.randn(rows // WORLD_SIZE, 64), mesh, [Shard(0)], run_check=False
        )
        for number in range(scale.tensors)
    }


def _slowest(samples: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for name, measures in samples.items():
        for measure, values in measures.items():
            slowest = torch.tensor(values, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            found.setdefault(name, {})[measure] = slowest.tolist()
    return found
