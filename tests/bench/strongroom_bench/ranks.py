"""Saves and restores of one job of four ranks, each holding a quarter of every tensor, plain and sealed.

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
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from strongroom import Checkpointer
from strongroom.workers import reading_workers, writing_workers
from strongroom_bench.figure import Figure, beside, fold, setting
from strongroom_bench.keys import close_log, create_keys, key_calls, protecting_policy, read_keys, read_signer
from strongroom_bench.measure import Contestant, interleave, seconds
from strongroom_bench.scale import Scale
from strongroom_bench.states import Saver, copy_once, done, drop, restore

__all__ = ["measure", "run_rank"]

WORLD_SIZE: Final = 4
_LIMIT_S: Final = 3600
_SEALED: Final = "strongroom, sealed"
_KEYS: Final = "ranks-keys"
_LOG: Final = "ranks-log"


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Run the job, and report what its first rank gathered."""
    create_keys(folder / _KEYS)
    found = _run_job(scale, folder)
    samples = found["samples"]
    for name in (_KEYS, _LOG, "ranks", "ranks-sealed", "ranks-kept", "ranks-sealed-kept", "dcp-kept"):
        drop(folder / name)
    threads = (
        f"{writing_workers(ranks=WORLD_SIZE)} writing and {reading_workers(ranks=WORLD_SIZE)} reading threads"
    )
    words = setting(f"{scale.state_words}, a quarter of each on each rank", f"{threads} a rank")
    walls, loads = fold(samples, "wall"), fold(samples, "load")
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
            walls,
            bar=1.00,
            setting=words,
        ),
        beside(
            "wall of a verified restore, 4 ranks / dcp.load",
            "strongroom restore",
            "dcp.load",
            loads,
            bar=0.60,
            setting=words,
        ),
        beside(
            "wall of a sealed, signed, audited save, 4 ranks / dcp.save(thread_count=2)",
            _SEALED,
            "dcp.save(thread_count=2)",
            walls,
            bar=1.10,
            setting=words,
        ),
        beside(
            "wall of a verified restore, sealed, 4 ranks / dcp.load",
            f"{_SEALED} restore",
            "dcp.load",
            loads,
            bar=0.80,
            setting=words,
        ),
    ]
    runs = scale.warm_ups + scale.rounds
    # One save more, which is what is restored again and again.
    asked = key_calls(
        found["wraps"],
        sum(found["unwraps"]),
        saves=runs + 1,
        restores=runs,
        ranks=WORLD_SIZE,
        setting=words,
    )
    return [*(replace(figure, world_size=WORLD_SIZE) for figure in figures), *asked]


def _run_job(scale: Scale, folder: Path) -> dict[str, Any]:
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
    found: dict[str, Any] = json.loads(told)
    return found


def run_rank(folder: str, scale: Scale) -> dict[str, Any]:
    """One rank's part; the samples of the slowest rank of each round, and what all ranks asked of keys."""
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
    keys = read_keys(root / _KEYS)
    policy = protecting_policy(keys, read_signer(root / _KEYS), root / _LOG)
    savers = {
        "strongroom": Saver(root / "ranks", {"model": state}),
        _SEALED: Saver(root / "ranks-sealed", {"model": state}, security=policy, digest="blake3"),
    }
    targets = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

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

    def tidied(saver: Saver) -> None:
        saver.checkpointer.wait()
        _once(saver.remove)

    def gone(path: Path) -> Callable[[], None]:
        return lambda: _once(lambda: drop(path))

    for kept, security in (("ranks-kept", None), ("ranks-sealed-kept", policy)):
        with Checkpointer(root / kept, security=security) as checkpointer:
            checkpointer.save(1, {"model": state}).result()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(root / "dcp-kept", thread_count=2))
    stock_reader = dcp.FileSystemReader(root / "dcp-kept")
    contestants = [
        *(
            Contestant(name=name, run=saver.run, tidy=partial(tidied, saver))
            for name, saver in savers.items()
        ),
        Contestant(name="dcp.save(thread_count=2)", run=lambda: stock(root / "d"), tidy=gone(root / "d")),
        Contestant(
            name="dcp.async_save(thread_count=2)",
            run=lambda: stock_async(root / "a"),
            tidy=gone(root / "a"),
        ),
        copy_once(local),
        restore(root / "ranks-kept", targets, name="strongroom restore", measure="load"),
        restore(
            root / "ranks-sealed-kept",
            targets,
            name=f"{_SEALED} restore",
            measure="load",
            security=policy,
        ),
        Contestant(
            name="dcp.load",
            run=lambda: {"load": seconds(lambda: dcp.load(targets, storage_reader=stock_reader))},
        ),
    ]
    samples = interleave(
        [_together(contestant) for contestant in contestants],
        rounds=scale.rounds,
        warm_ups=scale.warm_ups,
        flushes=scale.flushes,
    )
    for saver in savers.values():
        saver.checkpointer.close()
    close_log(policy)
    found = {
        "samples": _slowest(samples),
        "wraps": _of_all_ranks([key.wraps for key in keys]),
        "unwraps": _of_all_ranks([key.unwraps for key in keys]),
    }
    dist.destroy_process_group()
    return found if int(os.environ["RANK"]) == 0 else {}


def _once(act: Callable[[], None]) -> None:
    """Have one rank do it, once no rank is at work any more."""
    dist.barrier()
    if dist.get_rank() == 0:
        act()


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


def _of_all_ranks(counts: list[int]) -> list[int]:
    together = torch.tensor(counts)
    dist.all_reduce(together, op=dist.ReduceOp.SUM)
    return [int(count) for count in together.tolist()]
