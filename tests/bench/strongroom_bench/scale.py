"""How large and how often: the full run, a quick look, and the size that tests run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["FULL", "QUICK", "SCALES", "TINY", "Scale"]

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The sizes of one run of the benchmarks.

    Attributes:
        name: said in the report.
        rounds, warm_ups: of everything that is interleaved.
        tensors, tensor_bytes: the large state: float32.
        small_tensors: of 1 KiB each.
        layers, width, steps: of the training loop, and the steps a segment of it lasts.
        memory_saves: saves that must not grow the process.
        checkpoints: in the run that is listed.
        index_tensors, index_shards: of the plan that is encoded.
        events: in the audit log that is read.
        flushes: whether dirty pages are flushed before each timed run.
    """

    name: str
    rounds: int
    warm_ups: int
    tensors: int
    tensor_bytes: int
    small_tensors: int
    layers: int
    width: int
    steps: int
    memory_saves: int
    checkpoints: int
    index_tensors: int
    index_shards: int
    events: int
    flushes: bool

    @property
    def state_bytes(self) -> int:
        return self.tensors * self.tensor_bytes

    @property
    def state_words(self) -> str:
        return f"{self.state_bytes / MIB:g} MiB of float32 in {self.tensors} tensors"


FULL: Final = Scale(
    name="full",
    rounds=7,
    warm_ups=1,
    tensors=64,
    tensor_bytes=16 * MIB,
    small_tensors=20_000,
    layers=4,
    width=1536,
    steps=40,
    memory_saves=50,
    checkpoints=10_000,
    index_tensors=1_000,
    index_shards=512,
    events=1_000_000,
    flushes=True,
)
"""What the bars are about."""

QUICK: Final = Scale(
    name="quick",
    rounds=3,
    warm_ups=1,
    tensors=16,
    tensor_bytes=16 * MIB,
    small_tensors=2_000,
    layers=4,
    width=512,
    steps=40,
    memory_saves=10,
    checkpoints=1_000,
    index_tensors=200,
    index_shards=64,
    events=50_000,
    flushes=True,
)
"""A look in about a minute; its figures say little."""

TINY: Final = Scale(
    name="tiny",
    rounds=1,
    warm_ups=0,
    tensors=4,
    tensor_bytes=MIB // 4,
    small_tensors=20,
    layers=1,
    width=16,
    steps=2,
    memory_saves=2,
    checkpoints=3,
    index_tensors=3,
    index_shards=2,
    events=200,
    flushes=False,
)
"""What the tests run: every line of the benchmarks, and no measurement."""

SCALES: Final = {scale.name: scale for scale in (FULL, QUICK, TINY)}
