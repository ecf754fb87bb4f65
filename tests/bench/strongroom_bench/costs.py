"""Processor time of sealing, hashing and writing: each alone on one thread, in the pieces of a save.

A save does these side by side, on several threads and while a disk is busy, so its wall time is not
their sum. What they take of the processors is taken from training all the same.
"""

from __future__ import annotations

import mmap
import resource
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch

from strongroom.digest import DigestAlgorithm, FileHasher
from strongroom.layout import CheckpointName
from strongroom.shards import WRITE_BYTES
from strongroom.stores.local import LocalStore
from strongroom_bench.figure import Figure, Samples
from strongroom_bench.measure import Contestant, interleave
from strongroom_bench.scale import MIB, Scale
from strongroom_bench.states import drop
from strongroom_security.fields import Context, file_aad
from strongroom_security.floe import PIECE_BYTES, FloeSealer
from strongroom_security.secret import Secret

__all__ = ["measure"]

_COPY: Final = "copy of the same bytes"
_FILE: Final = Context.of(
    "bench", CheckpointName(launch=1, step=1, attempt="0" * 16), "00000-00.safetensors.floe"
)
_FED: Final = f"fed {WRITE_BYTES // MIB} MiB at a time"
_STEPS: Final = {
    "seal": f"FLOE with AES-256-GCM, handed out {PIECE_BYTES // MIB} MiB at a time",
    "hash, blake3": _FED,
    "hash, sha256": _FED,
    "write": f"local store, {_FED}, fsync included; not what the kernel writes out later by itself",
}


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Do each step alone, over as many bytes as the large state has, beside one copy of them."""
    # Memory as a save has it: it begins a page, and is more than any cache holds.
    source, target = (memoryview(mmap.mmap(-1, scale.state_bytes)) for _ in range(2))
    for memory in (source, target):
        torch.frombuffer(memory, dtype=torch.float32).normal_()
    store = LocalStore(folder / "costs")

    def seal() -> None:
        sealed = FloeSealer(Secret.draw(), file_aad(_FILE)).seal([source], length_bytes=len(source))
        deque(sealed, maxlen=0)

    def digest(algorithm: DigestAlgorithm) -> None:
        hasher = FileHasher(algorithm)
        for piece in _pieces(source):
            hasher.update(piece)
        hasher.digest()

    def write() -> None:
        with store.open_writer("written", length_bytes=len(source)) as writer:
            for piece in _pieces(source):
                writer.write(piece)
            writer.finish()

    def copy() -> None:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

    samples = interleave(
        [
            Contestant(name="seal", run=lambda: _taken(seal)),
            Contestant(name="hash, blake3", run=lambda: _taken(lambda: digest("blake3"))),
            Contestant(name="hash, sha256", run=lambda: _taken(lambda: digest("sha256"))),
            Contestant(name="write", run=lambda: _taken(write), tidy=lambda: store.delete("written")),
            Contestant(name=_COPY, run=lambda: _taken(copy)),
        ],
        rounds=scale.rounds,
        warm_ups=scale.warm_ups,
        flushes=scale.flushes,
    )
    drop(folder / "costs")
    gib = scale.state_bytes / (1024 * MIB)
    words = f"{scale.state_bytes // MIB} MiB, one thread"
    return [
        _figure(step, samples[step], samples[_COPY]["processor"], gib, f"{words}, {how}")
        for step, how in _STEPS.items()
    ]


def _figure(step: str, taken: Mapping[str, Samples], copy: Samples, gib: float, words: str) -> Figure:
    each = {f"{name} s/GiB": [value / gib for value in values] for name, values in taken.items()}
    each[f"{_COPY} s/GiB"] = [value / gib for value in copy]
    medians = {name: statistics.median(values) for name, values in each.items()}
    return Figure(
        figure=f"processor seconds a GiB: {step}",
        value=medians["processor s/GiB"],
        unit="s/GiB",
        peers=medians,
        runs=len(copy),
        setting=words,
        spread={name: (min(values), max(values)) for name, values in each.items()},
    )


def _pieces(data: memoryview) -> Iterator[memoryview]:
    """As a save hands them on."""
    for start in range(0, len(data), WRITE_BYTES):
        yield data[start : start + WRITE_BYTES]


def _taken(work: Callable[[], None]) -> dict[str, float]:
    """Seconds of this thread's processor time, of what kind they were, and by the clock."""
    began, usage = time.perf_counter(), resource.getrusage(resource.RUSAGE_THREAD)
    cpu = time.thread_time()
    work()
    cpu = time.thread_time() - cpu
    ended, now = time.perf_counter(), resource.getrusage(resource.RUSAGE_THREAD)
    return {
        "processor": cpu,
        "user": now.ru_utime - usage.ru_utime,
        "system": now.ru_stime - usage.ru_stime,
        "wall": ended - began,
    }
