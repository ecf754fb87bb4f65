"""What each rank of another job would read, against counting blocks by hand, and what really is read."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strongroom import Checkpointer, ConfigError, PerRank, layout
from strongroom.catalog import Catalog
from strongroom.config import SYSTEM_CLOCK
from strongroom.digest import BLOCK_BYTES
from strongroom.events import Event, RestoreFinished
from strongroom.index import Chunk, Index, ShardFile, TensorRecord, encode_index
from strongroom.layout import CheckpointName
from strongroom.opened import OpenedCheckpoint, encode_document, open_checkpoint
from strongroom.parts import producer
from strongroom.shards import ChunkSpec, binding, lay_out
from strongroom.shares import MAX_RANKS, Shares, shares_of
from strongroom.signing import NO_GUARD
from strongroom.stores.memory import MemoryStore
from strongroom.transaction import Attempt, Deadline, begin_run, claim_launch

Algorithm = Literal["blake3", "sha256"]


class Told:
    """Remembers how many bytes each restore has read."""

    def __init__(self) -> None:
        self.restored: list[int] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, RestoreFinished):
            self.restored.append(event.size_bytes)


def committed(
    held: list[list[ChunkSpec]],
    shapes: dict[str, tuple[int, ...]],
    own: list[dict[str, str]],
    algorithm: Algorithm = "blake3",
) -> OpenedCheckpoint:
    """A checkpoint that several ranks wrote, of zeros.

    Args:
        held: each rank's chunks.
        own: each rank's own values: a name, and the tensor that it is.
    """
    store = MemoryStore()
    begin_run(store, draw_run_id=lambda: "run", now_ms=1)
    launch = claim_launch([store], run="run", parent=None, taken=(), deadline_s=60, now_ms=1)
    name = CheckpointName(launch=launch.launch, step=7, attempt="0123456789abcdef")
    attempt = Attempt(
        store,
        launch=launch,
        name=name,
        parent=None,
        algorithm=algorithm,
        world_size=len(held),
        deadline=Deadline.after(60, SYSTEM_CLOCK.monotonic),
        now_ms=lambda: 2,
    )
    bound = binding("run", name)
    records, files = [], []
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    for rank, specs in enumerate(held):
        for shard in lay_out(specs, rank=rank, parts=2, metadata=bound) if specs else []:
            data = shard.header(bound).ljust(shard.size_bytes, b"\0")
            written = attempt.write(shard.path, [data], length_bytes=shard.size_bytes)
            records.append(written.record)
            files.append(ShardFile(shard.path, written.block_digests))
            for spec, start in zip(shard.chunks, shard.starts, strict=True):
                chunks[spec.tensor].append(Chunk(spec.offsets, spec.sizes, shard.path, start))
        if own[rank]:
            values = [[key, {"$": "tensor", "v": tensor}] for key, tensor in own[rank].items()]
            document = encode_document("rank_state", "run", name, {"rank": rank, "values": values})
            records.append(attempt.write_whole(layout.rank_state_path(rank), document).record)
    index = Index(
        [TensorRecord(tensor, "F32", shape, tuple(chunks[tensor])) for tensor, shape in shapes.items()], files
    )
    mine = {tensor for values in own for tensor in values.values()}
    pairs: list[Any] = [[key, {"$": "tensor", "v": key}] for key in shapes if key not in mine]
    pairs += [[key, {"$": "per_rank", "v": key}] for key in {key: None for values in own for key in values}]
    empty: Any = {"$": "dict", "v": []}
    common = {
        layout.INDEX: encode_index(index, bound),
        layout.STATE: encode_document("state", "run", name, {"document": {"$": "dict", "v": pairs}}),
        layout.PROVENANCE: encode_document(
            "provenance",
            "run",
            name,
            {"metrics": empty, "provenance": empty, "producer": producer(), "tags": []},
        ),
    }
    records += [attempt.write_whole(path, data).record for path, data in common.items()]
    attempt.commit(records)
    (commit,) = Catalog(store).history().commits.values()
    return open_checkpoint(store, commit, NO_GUARD)


def spec(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], whole: tuple[int, ...]) -> ChunkSpec:
    return ChunkSpec(name, "F32", offsets, sizes, sizes == whole)


def by_hand(opened: OpenedCheckpoint, owners: dict[str, int], world_size: int) -> dict[int, dict[str, int]]:
    """Every row of every chunk, asked for by the rank that ``torch.chunk`` gives it to."""
    blocks: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for tensor in opened.index.tensors.values():
        for chunk in tensor.chunks:
            for rank, begin, end in rows_of(chunk, tensor, owners, world_size):
                for block in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
                    blocks[rank][chunk.path].add(block)
    amounts: dict[int, dict[str, int]] = {}
    for rank, files in blocks.items():
        amounts[rank] = {}
        for path, touched in files.items():
            size = opened.record(path).size_bytes
            amounts[rank][path] = sum(
                min((block + 1) * BLOCK_BYTES, size) - block * BLOCK_BYTES for block in touched
            )
            if opened.manifest.algorithm == "sha256":
                amounts[rank][path] = size
    return amounts


def rows_of(
    chunk: Chunk, tensor: TensorRecord, owners: dict[str, int], world_size: int
) -> Iterator[tuple[int, int, int]]:
    size = 4
    for extent in chunk.sizes:
        size *= extent
    if not size:
        return
    if tensor.name in owners:
        if owners[tensor.name] < world_size:
            yield owners[tensor.name], chunk.start, chunk.start + size
    elif not tensor.shape:
        for rank in range(world_size):
            yield rank, chunk.start, chunk.start + size
    else:
        pieces = torch.arange(tensor.shape[0]).chunk(world_size)
        rank_of_row = [rank for rank, piece in enumerate(pieces) for _ in piece]
        row_bytes = size // chunk.sizes[0]
        for row in range(chunk.sizes[0]):
            start = chunk.start + row * row_bytes
            yield rank_of_row[chunk.offsets[0] + row], start, start + row_bytes


def amounts_of(shares: Shares) -> dict[int, dict[str, int]]:
    return {
        share.rank: {file.path: file.size_bytes for file in share.files}
        for share in shares.ranks
        if share.files
    }


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[OpenedCheckpoint, dict[str, int]]:
    """Tensors of up to several blocks, cut into rows or columns, spread over ranks."""
    ranks = draw(st.integers(1, 3))
    held: list[list[ChunkSpec]] = [[] for _ in range(ranks)]
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(draw(st.integers(0, 4))):
        width = draw(st.sampled_from([1, 1000, 300_000]))
        shape = draw(st.sampled_from([(), (0, 3), (1, width), (5, width), (7, width), (9,)]))
        name = f"t{number}"
        shapes[name] = shape
        dimension = draw(st.integers(0, max(0, len(shape) - 1)))
        whole = shape[dimension] if shape else 1
        bounds = [0, *sorted(draw(st.sets(st.integers(1, max(1, whole - 1)), max_size=2))), whole]
        for low, high in itertools.pairwise(bounds) if whole > 1 else [(0, whole)]:
            offsets = tuple(low if at == dimension else 0 for at in range(len(shape)))
            sizes = tuple(high - low if at == dimension else size for at, size in enumerate(shape))
            if low < high or 0 in shape:
                held[draw(st.integers(0, ranks - 1))].append(spec(name, offsets, sizes, shape))
    own: list[dict[str, str]] = [{} for _ in range(ranks)]
    for rank in range(ranks) if draw(st.booleans()) else ():
        name = f"own.rank{rank}"
        shapes[name] = (3,)
        held[rank].append(spec(name, (0,), (3,), (3,)))
        own[rank] = {"own": name}
    owners = {values["own"]: rank for rank, values in enumerate(own) if values}
    return committed(held, shapes, own, draw(st.sampled_from(["blake3", "sha256"]))), owners


@settings(max_examples=40, deadline=None)
@given(checkpoints(), st.integers(1, 9))
def test_shares_are_what_counting_blocks_by_hand_gives(
    found: tuple[OpenedCheckpoint, dict[str, int]], world_size: int
) -> None:
    opened, owners = found
    shares = shares_of(opened, world_size)
    assert amounts_of(shares) == by_hand(opened, owners, world_size)
    saved_by = set(owners.values())
    assert [share.has_own_state for share in shares.ranks] == [rank in saved_by for rank in range(world_size)]
    assert shares.ownerless == tuple(sorted(rank for rank in saved_by if rank >= world_size))
    lacking = set(range(world_size)) - saved_by if saved_by else set()
    assert shares.lacking == tuple(sorted(lacking))


def test_a_job_of_fewer_ranks_leaves_values_without_an_owner() -> None:
    held = [[spec(f"own.rank{rank}", (0,), (3,), (3,))] for rank in range(4)]
    shapes = {f"own.rank{rank}": (3,) for rank in range(4)}
    opened = committed(held, shapes, [{"own": f"own.rank{rank}"} for rank in range(4)])
    shares = shares_of(opened, 2)
    assert shares.ownerless == (2, 3)
    assert shares.lacking == ()
    assert [[file.path for file in share.files] for share in shares.ranks] == [
        ["00000-00.safetensors"],
        ["00001-00.safetensors"],
    ]
    assert shares_of(opened, 6).lacking == (4, 5)


@pytest.mark.parametrize("digest", ("blake3", "sha256"))
def test_one_rank_would_read_what_a_restore_reads(digest: str) -> None:
    """Against the bytes that a restore tells to have read."""
    store = MemoryStore()
    state = {
        "a": torch.zeros(1000, 700),
        "b": torch.zeros(3, 5),
        "s": torch.tensor(1.0),
        "mine": PerRank({"t": torch.ones(4), "n": 3}),
        "empty": torch.zeros(0, 4),
    }
    told = Told()
    with Checkpointer(store, digest=digest, events=[told]) as checkpointer:
        checkpointer.save(1, state).result(timeout_s=60)
        checkpointer.restore()
    (commit,) = Catalog(store).history().commits.values()
    shares = shares_of(open_checkpoint(store, commit, NO_GUARD), 1)
    (read,) = told.restored
    assert shares.size_bytes == shares.ranks[0].size_bytes == read


def test_a_job_has_some_ranks_and_not_too_many() -> None:
    opened = committed([[]], {}, [{}])
    for world_size in (0, -1, MAX_RANKS + 1):
        with pytest.raises(ConfigError, match="ranks, got"):
            shares_of(opened, world_size)
    assert len(shares_of(opened, 3).ranks) == 3
