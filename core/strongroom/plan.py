"""Planning by DCP's own planners, driven through their public methods.

They know every tensor kind that torch distributes, and how to cut a read so that one layout
becomes another. They see tensors only: the state's structure never reaches them
(`flatten_state_dict=False`), and nothing here gathers, pickles or touches data.

Of a save the planner plans what this rank holds. Which rank then stores what is
`strongroom.ownership`'s: DCP's own choice among replicas goes by single tensors, and its check of
the whole plan is quadratic before torch 2.9.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from strongroom import dtypes
from strongroom.errors import SaveError, StateEncodingError, StateMismatchError
from strongroom.index import Chunk, Index, ShardFile, TensorRecord
from strongroom.metadata import dcp_metadata
from strongroom.ownership import HeldChunk
from strongroom.pieces import has_layout_of_its_own, piece_of, placements_of, problem_of
from strongroom.shards import ChunkSpec, ShardLayout
from strongroom.stage import local_tensor

__all__ = [
    "LocalPlan",
    "chunk_number",
    "chunk_of",
    "local_data",
    "partial_index",
    "plan_local",
    "plan_read",
    "spec_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """What one rank holds of a state.

    Attributes:
        chunks: every chunk, with its unit.
        shapes: the whole shape of each tensor.
        placements: each distributed tensor's layout, in words.
    """

    chunks: tuple[HeldChunk, ...]
    shapes: Mapping[str, tuple[int, ...]]
    placements: Mapping[str, str]


def plan_local(
    tensors: Mapping[str, torch.Tensor], units: Mapping[str, str], spread: Collection[str]
) -> LocalPlan:
    """Plan which chunks of which tensors this rank holds.

    Args:
        tensors: every tensor of the state by name.
        units: the unit of each.
        spread: names of those of which any rank's replica will do.

    Raises:
        StateEncodingError: a tensor is laid out in a way that cannot be stored.
    """
    for name, tensor in tensors.items():
        problem = problem_of(tensor)
        if problem is not None:
            raise StateEncodingError(name, f"{problem}; redistribute it before saving")
    planner = DefaultSavePlanner(flatten_state_dict=False)
    # Called by position and by name as every release since 2.6 allows. No rank is its coordinator:
    # nothing but tensors is planned, and those all ranks plan.
    planner.set_up_planner(dict(tensors), is_coordinator=False)
    chunks = []
    for item in planner.create_local_plan().items:
        spec = spec_of(item)
        piece = piece_of(tensors[spec.tensor]) if has_layout_of_its_own(tensors[spec.tensor]) else None
        if piece is not None:
            offsets, sizes = map(tuple, piece)
            spec = replace(spec, offsets=offsets, sizes=sizes, is_whole=False)
        is_void = 0 in spec.sizes and tensors[spec.tensor].numel()
        if not is_void:
            # Looked at now, while every rank still hears of a refusal.
            local_data(tensors[spec.tensor], spec)
            chunks.append(HeldChunk(spec, units[spec.tensor], spec.tensor in spread))
    return LocalPlan(
        chunks=tuple(chunks),
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        placements={name: words for name, tensor in tensors.items() if (words := placements_of(tensor))},
    )


def spec_of(item: WriteItem) -> ChunkSpec:
    """A planned write as a chunk."""
    data = item.tensor_data
    if data is None:
        raise SaveError(f"the plan holds {item.index.fqn!r}, which is no tensor")
    name = dtypes.dtype_name(data.properties.dtype)
    if name is None:
        raise SaveError(f"{item.index.fqn!r} has the dtype {data.properties.dtype}, which safetensors lacks")
    return ChunkSpec(
        tensor=item.index.fqn,
        dtype=name,
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
        is_whole=tuple(data.chunk.sizes) == tuple(data.size),
    )


def local_data(tensor: torch.Tensor, spec: ChunkSpec) -> torch.Tensor:
    """The memory of one of this rank's chunks."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor
    to_local = getattr(tensor, "to_local", None)
    if to_local is not None:
        local: torch.Tensor = to_local()
        if tuple(local.shape) == spec.sizes:
            return local
    elif hasattr(tensor, "local_shards"):
        for shard in tensor.local_shards():
            if tuple(shard.metadata.shard_offsets) == spec.offsets:
                held: torch.Tensor = shard.tensor
                return held
    raise StateEncodingError(
        spec.tensor,
        f"it is planned with a chunk of {list(spec.sizes)} at {list(spec.offsets)}, which this process does "
        "not hold in one piece; redistribute it to an even layout before saving",
    )


def partial_index(
    plan: LocalPlan, shards: Sequence[tuple[ShardLayout, bytes]], aliases: Mapping[str, str]
) -> Index:
    """The index of what one rank stored.

    Args:
        plan: what the rank holds.
        shards: every file that it wrote, with its block digests.
        aliases: further names of stored tensors; those of tensors that it did not store are left out.
    """
    chunks: dict[str, list[Chunk]] = {}
    dtype_of: dict[str, str] = {}
    for shard, _ in shards:
        for spec, start in zip(shard.chunks, shard.starts, strict=True):
            chunks.setdefault(spec.tensor, []).append(Chunk(spec.offsets, spec.sizes, shard.path, start))
            dtype_of[spec.tensor] = spec.dtype
    tensors = [
        TensorRecord(name, dtype_of[name], shape, tuple(chunks[name]), plan.placements.get(name, ""))
        for name, shape in plan.shapes.items()
        if name in chunks
    ]
    files = [ShardFile(shard.path, blocks) for shard, blocks in shards]
    return Index(tensors, files, {alias: name for alias, name in aliases.items() if name in chunks})


def plan_read(
    targets: Mapping[str, torch.Tensor], records: Mapping[str, TensorRecord]
) -> list[tuple[ReadItem, torch.Tensor]]:
    """Cut the reads that fill ``targets``; each with the view of its target that it fills.

    Args:
        targets: tensors to fill, of the stored shape and dtype, of any layout.
        records: the stored tensor for each of the same names.

    Raises:
        StateMismatchError: a target is laid out in a way that cannot be filled.
    """
    different = [
        f"{name}: {problem}" for name, one in targets.items() if (problem := problem_of(one)) is not None
    ]
    if different:
        raise StateMismatchError(
            f"the checkpoint cannot be read into your state: {'; '.join(different[:20])}; redistribute it "
            "before restoring",
            different=different,
        )
    own = {name: target for name, target in targets.items() if has_layout_of_its_own(target)}
    metadata = dcp_metadata(records)
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(
        {name: target for name, target in targets.items() if name not in own},
        metadata=metadata,
        is_coordinator=True,
    )
    (plan,) = planner.create_global_plan([planner.create_local_plan()])
    final = planner.finish_plan(plan)
    with torch.no_grad():
        reads = [(item, planner.resolve_tensor(item).detach()) for item in final.items]
        for name, target in own.items():
            reads += _reads_of(name, target, metadata)
    return reads


def _reads_of(name: str, target: torch.Tensor, metadata: Metadata) -> list[tuple[ReadItem, torch.Tensor]]:
    """The reads that fill a target of which DCP's planner may not know the piece that is here."""
    piece, stored = piece_of(target), metadata.state_dict_metadata[name]
    if piece is None or not isinstance(stored, TensorStorageMetadata):
        return []
    offsets, sizes = map(torch.Size, piece)
    local = local_tensor(target).detach()
    if local.shape != sizes:
        problem = f"it has {list(local.shape)} here, where its layout leaves {list(sizes)}"
        raise StateMismatchError(f"{name}: {problem}", different=[f"{name}: {problem}"])
    reads = []
    for item in create_read_items_for_chunk_list(name, stored, [ChunkStorageMetadata(offsets, sizes)]):
        view = local
        for dimension, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            view = view.narrow(dimension, start, length)
        reads.append((item, view))
    return reads


def chunk_of(records: Mapping[str, TensorRecord], item: ReadItem) -> Chunk:
    """The stored chunk that a read refers to."""
    record = records[item.dest_index.fqn]
    return record.chunks[chunk_number(record, item.storage_index)]


def chunk_number(record: TensorRecord, index: MetadataIndex) -> int:
    """Which chunk of a stored tensor a read refers to."""
    if index.index is not None and index.index < len(record.chunks):
        hinted = record.chunks[index.index]
        if index.offset is None or tuple(index.offset) == hinted.offsets:
            return index.index
    for number, chunk in enumerate(record.chunks):
        if index.offset is None or tuple(index.offset) == chunk.offsets:
            return number
    raise SaveError(f"{index.fqn!r} has no chunk at {index.offset}")
