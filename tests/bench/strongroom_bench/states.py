"""The states that are saved, and stock ways to save them."""

from __future__ import annotations

import importlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from strongroom import Checkpointer
from strongroom_bench.measure import Contestant, seconds
from strongroom_bench.scale import Scale

__all__ = [
    "Saver",
    "Tensors",
    "async_save",
    "copy_once",
    "done",
    "drop",
    "empty_like",
    "foreach_copy",
    "kept_stager",
    "large_state",
    "raw_write",
    "restore",
    "safetensors_save",
    "small_state",
    "stock_load",
    "stock_save",
    "torch_save",
]

Tensors = dict[str, torch.Tensor]

_WRITE_BYTES: Final = 4 << 20


def large_state(scale: Scale) -> Tensors:
    """Random float32, touched, in tensors of equal size."""
    return {f"layer{number:02}": torch.randn(scale.tensor_bytes // 4) for number in range(scale.tensors)}


def small_state(scale: Scale) -> Tensors:
    """Many tensors of 1 KiB."""
    return {f"t{number:05}": torch.randn(256) for number in range(scale.small_tensors)}


def empty_like(state: Mapping[str, torch.Tensor]) -> Tensors:
    """Targets of the same shapes, touched."""
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def drop(folder: Path) -> None:
    """Remove what a contestant wrote."""
    shutil.rmtree(folder, ignore_errors=True)


class Saver:
    """Strongroom in its steady state: one checkpointer, saving again and again.

    Args:
        root: where.
        state: what is saved.
        options: of the `Checkpointer`.
    """

    def __init__(self, root: Path, state: Mapping[str, Any], **options: Any) -> None:
        self.checkpointer = Checkpointer(root, **options)
        self._root = root
        self._state = state
        self._step = 0

    @property
    def saves(self) -> int:
        """How many were begun."""
        return self._step

    def run(self) -> dict[str, float]:
        """Save once: the stall of the training thread, and the time until the commit stands."""
        self._step += 1
        began = time.perf_counter()
        handle = self.checkpointer.save(self._step, self._state)
        stalled = time.perf_counter()
        handle.result()
        return {"stall": stalled - began, "wall": time.perf_counter() - began}

    def tidy(self) -> None:
        self.checkpointer.wait()
        self.remove()

    def remove(self) -> None:
        """Remove what was saved; where several ranks save together one of them does."""
        for found in self._root.glob("step-*"):
            drop(found)

    def contestant(self, name: str = "strongroom") -> Contestant:
        return Contestant(name=name, run=self.run, tidy=self.tidy)


def stock_save(folder: Path, state: Tensors, *, threads: int) -> Contestant:
    """``dcp.save`` into a fresh folder: no checksum, no commit."""
    path = folder / f"dcp-{threads}"

    def run() -> dict[str, float]:
        writer = dcp.FileSystemWriter(path, thread_count=threads)
        return {"wall": seconds(lambda: dcp.save(state, storage_writer=writer))}

    return Contestant(name=f"dcp.save(thread_count={threads})", run=run, tidy=lambda: drop(path))


def async_save(folder: Path, state: Tensors, *, threads: int, stager: Any = None) -> Contestant:
    """``dcp.async_save``: its stall, and the time until its future is done.

    Args:
        stager: one that keeps its buffers from save to save (`kept_stager`); None: DCP's default.
    """
    kept = "" if stager is None else ", kept stager"
    path = folder / f"async-{threads}{'' if stager is None else '-kept'}"
    options = {} if stager is None else {"async_stager": stager}

    def run() -> dict[str, float]:
        writer = dcp.FileSystemWriter(path, thread_count=threads)
        began = time.perf_counter()
        future: Any = dcp.async_save(state, storage_writer=writer, **options)
        stalled = time.perf_counter()
        done(future)
        return {"stall": stalled - began, "wall": time.perf_counter() - began}

    return Contestant(name=f"dcp.async_save(thread_count={threads}{kept})", run=run, tidy=lambda: drop(path))


def kept_stager() -> Any:
    """A stager of DCP's that keeps its buffers in ordinary memory; None before torch 2.9, which has none."""
    staging: Any = importlib.import_module("torch.distributed.checkpoint.staging")
    if not hasattr(staging, "DefaultStager"):
        return None
    options = staging.StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    return staging.DefaultStager(options)


def done(future: Any) -> None:
    """Wait for what ``dcp.async_save`` returned: a future, or since torch 2.9 a pair of them."""
    getattr(future, "upload_completion", future).result()


def torch_save(folder: Path, state: Tensors) -> Contestant:
    """``torch.save`` and fsync."""
    return _one_file(folder / "torch.pt", "torch.save", lambda path: torch.save(state, path))


def safetensors_save(folder: Path, state: Tensors) -> Contestant:
    """``safetensors.torch.save_file`` and fsync."""
    return _one_file(
        folder / "stock.safetensors",
        "safetensors.save_file",
        lambda path: safetensors.torch.save_file(state, path),
    )


def raw_write(folder: Path, state: Tensors) -> Contestant:
    """The state's bytes, written 4 MiB at a time by one thread, and fsync: what the disk can do."""

    def write(path: Path) -> None:
        with path.open("wb", buffering=0) as file:
            for tensor in state.values():
                view = tensor.numpy().data.cast("B")
                for start in range(0, len(view), _WRITE_BYTES):
                    file.write(view[start : start + _WRITE_BYTES])

    return _one_file(folder / "raw", "raw write", write)


def _one_file(path: Path, name: str, write: Callable[[Path], object]) -> Contestant:
    def durable() -> None:
        write(path)
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    return Contestant(name=f"{name} + fsync", run=lambda: {"wall": seconds(durable)}, tidy=path.unlink)


def copy_once(state: Tensors) -> Contestant:
    """One ``copy_`` of every tensor, into memory that was touched before."""
    targets = empty_like(state)

    def run() -> None:
        for name, target in targets.items():
            target.copy_(state[name])

    return Contestant(name="copy_", run=lambda: {"stall": seconds(run)})


def foreach_copy(state: Tensors) -> Contestant:
    """One ``torch._foreach_copy_`` of all tensors, into memory that was touched before."""
    targets = list(empty_like(state).values())
    sources = list(state.values())
    return Contestant(
        name="_foreach_copy_", run=lambda: {"stall": seconds(lambda: torch._foreach_copy_(targets, sources))}
    )


def restore(
    root: Path,
    targets: Mapping[str, Any],
    *,
    name: str = "strongroom",
    measure: str = "wall",
    **options: Any,
) -> Contestant:
    """Restores by a new `Checkpointer` each time, as a process that resumes has; its end is not timed.

    Args:
        options: of the `Checkpointer`.
    """
    opened: list[Checkpointer] = []

    def run() -> dict[str, float]:
        began = time.perf_counter()
        opened.append(Checkpointer(root, **options))
        restored = opened[-1].restore({"model": targets})
        taken = time.perf_counter() - began
        if restored is None:
            raise RuntimeError(f"nothing was restored from {root}")
        return {measure: taken}

    def tidy() -> None:
        while opened:
            opened.pop().close()

    return Contestant(name=name, run=run, tidy=tidy)


def stock_load(folder: Path, targets: Tensors) -> Contestant:
    """``dcp.load`` into tensors that are there: nothing is verified."""
    return Contestant(
        name="dcp.load",
        run=lambda: {"wall": seconds(lambda: dcp.load(targets, storage_reader=dcp.FileSystemReader(folder)))},
    )
