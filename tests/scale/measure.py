"""What a large job costs its coordinator and its readers: ``python tests/scale/measure.py``.

Prints the tables of `docs/explanation/scale.md`. Ranks are simulated: each is only what it
would have sent. Times are CPU seconds of one process, the best of three.
"""

from __future__ import annotations

import gc
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import plans

from strongroom import completeness
from strongroom.index import Index, decode_index, encode_index
from strongroom.messages import Message
from strongroom.metadata import narrowed
from strongroom.ownership import Owners, encode_held
from strongroom.plan import plan_read

__all__ = ["Costs", "Peer", "cpu_s", "measure", "measure_peer", "measure_read"]

T = TypeVar("T")


def cpu_s(call: Callable[[], T], runs: int = 3) -> tuple[float, T]:
    """The least CPU time of some runs, and the last one's result.

    Cyclic garbage is collected before and not during a run: how long that takes depends on all
    else that the process holds.
    """
    times = []
    for _ in range(runs):
        gc.collect()
        gc.disable()
        try:
            began = time.process_time()
            result = call()
            times.append(time.process_time() - began)
        finally:
            gc.enable()
    return min(times), result


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of one save and one read of a job; bytes of all ranks together."""

    tensors: int
    ranks: int
    chunks: int
    plan_bytes: int
    plan_s: float
    gathered_bytes: int
    merge_s: float
    index_bytes: int
    encode_s: float
    decode_s: float


def measure(make: Callable[[int, int], Iterator[Index]], tensors: int, ranks: int, runs: int = 3) -> Costs:
    """Take a job through the coordinator's work: own, gather, merge, write; and read the index back."""
    held, parts = [], []
    for part in make(tensors, ranks):
        held.append(encode_held(plans.held_by(part)))
        parts.append(encode_index(part, plans.BOUND))
    looks = [Message(members={"generation": 0}, pieces={"plan": data}) for data in held]
    plan_s, _ = cpu_s(lambda: Owners(ranks).decide(looks), runs)
    merge_s, index = cpu_s(lambda: _merged(parts), runs)
    encode_s, data = cpu_s(lambda: encode_index(index, plans.BOUND), runs)
    decode_s, _ = cpu_s(lambda: decode_index(data, "the index"), runs)
    return Costs(
        tensors=tensors,
        ranks=ranks,
        chunks=len(index.columns.files),
        plan_bytes=sum(map(len, held)),
        plan_s=plan_s,
        gathered_bytes=sum(map(len, parts)),
        merge_s=merge_s,
        index_bytes=len(data),
        encode_s=encode_s,
        decode_s=decode_s,
    )


def _merged(parts: Sequence[bytes]) -> Index:
    return completeness.merge((decode_index(part, "a part", is_partial=True)[0] for part in parts), {})


def measure_read(tensors: int, ranks: int, runs: int = 3) -> tuple[float, int]:
    """One rank's CPU time from the index's bytes to its planned reads, and how many these are."""
    data = encode_index(completeness.merge(plans.sharded_parts(tensors, ranks), {}), plans.BOUND)

    def plan() -> int:
        index, _ = decode_index(data, "the index")
        records = narrowed(targets, {name: index.tensors[name] for name in targets})
        return len(plan_read(targets, records))

    with plans.targets(tensors, ranks) as targets:
        return cpu_s(plan, runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Stock DCP's: what ranks send pickled, and its pickled ``.metadata``."""

    plan_bytes: int
    metadata_bytes: int
    pickle_s: float
    unpickle_s: float


def measure_peer(
    make: Callable[[int, int], Iterator[Index]], tensors: int, ranks: int, runs: int = 3
) -> Peer:
    parts = list(make(tensors, ranks))
    shapes = {name: record.shape for part in parts for name, record in part.tensors.items()}
    plan_bytes = sum(len(pickle.dumps(plans.peer_plan(plans.held_by(part), shapes))) for part in parts)
    metadata = plans.peer_metadata(completeness.merge(parts, {}))
    pickle_s, data = cpu_s(lambda: pickle.dumps(metadata), runs)
    unpickle_s, _ = cpu_s(lambda: pickle.loads(data), runs)
    return Peer(plan_bytes=plan_bytes, metadata_bytes=len(data), pickle_s=pickle_s, unpickle_s=unpickle_s)


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    for row in (heads, ["---:" for _ in heads], *rows):
        sys.stdout.write(f"| {' | '.join(map(str, row))} |\n")
    sys.stdout.write("\n")


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _s(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.1f} s"


def main() -> None:
    heads = ("tensors", "ranks", "chunks", "plans sent", "deciding who stores what", "parts sent",
             "merging, checking", "index", "encoding it", "reading it")  # fmt: skip
    jobs = [(plans.sharded_parts, 1000, ranks) for ranks in (128, 256, 512, 1024)]
    jobs += [(plans.small_parts, tensors, 64) for tensors in (25_000, 50_000, 100_000)]
    rows = []
    for make, tensors, ranks in jobs:
        costs = measure(make, tensors, ranks)
        rows.append(
            (f"{tensors:,}", f"{ranks:,}", f"{costs.chunks:,}", _mb(costs.plan_bytes), _s(costs.plan_s),
             _mb(costs.gathered_bytes), _s(costs.merge_s), _mb(costs.index_bytes), _s(costs.encode_s),
             _s(costs.decode_s))
        )  # fmt: skip
    _table(heads, rows)

    reads = [(ranks, *measure_read(1000, ranks)) for ranks in (128, 256, 512, 1024)]
    _table(
        ("ranks", "reads of one rank", "reading the index and planning them"),
        [(f"{ranks:,}", f"{count:,}", _s(seconds)) for ranks, seconds, count in reads],
    )

    ours, peer = measure(plans.sharded_parts, 1000, 512), measure_peer(plans.sharded_parts, 1000, 512)
    _table(
        ("of 1,000 tensors x 512 shards", "Strongroom", "stock DCP", "ratio"),
        [
            (what, form(one), form(other), f"{one / other:.3f}")
            for what, form, one, other in (
                ("sent to the coordinator before writing", _mb, ours.plan_bytes, peer.plan_bytes),
                ("index, `.metadata`: size", _mb, ours.index_bytes, peer.metadata_bytes),
                ("encoding it, pickling it", _s, ours.encode_s, peer.pickle_s),
                ("decoding and checking it, unpickling it", _s, ours.decode_s, peer.unpickle_s),
            )
        ],
    )


if __name__ == "__main__":
    main()
