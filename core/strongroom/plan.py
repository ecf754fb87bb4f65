"""Planning by DCP's own planners, driven through their public methods.

They know every tensor kind that torch distributes, and how to cut a read so that one layout
becomes another. They see tensors only: the state's structure never reaches them
(`flatten_state_dict=False`), and nothing here gathers, pickles or touches data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from strongroom import dtypes
from strongroom.errors import SaveError
from strongroom.index import Chunk, Index, ShardFile, TensorRecord
from strongroom.ranks import Ranks
from strongroom.shards import ChunkSpec, ShardLayout

__all__ = ["SavePlanning", "build_index", "dcp_metadata", "plan_read", "plan_save", "spec_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlanning:
    """What this rank stores, and (on the coordinator) what all ranks store together."""

    specs: tuple[ChunkSpec, ...]
    metadata: Metadata


def plan_save(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> SavePlanning:
    """Plan which rank stores which chunk of which tensor."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    # Called by position and by name as every release since 2.6 allows.
    planner.set_up_planner(dict(tensors), is_coordinator=ranks.is_coordinator)
    plans, metadata = planner.create_global_plan(ranks.gather(planner.create_local_plan()))
    final = planner.finish_plan(ranks.broadcast(plans)[ranks.rank])
    return SavePlanning(specs=tuple(spec_of(item) for item in final.items), metadata=metadata)


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


def build_index(
    metadata: Metadata,
    shards: list[tuple[ShardLayout, bytes]],
    aliases: Mapping[str, str],
) -> Index:
    """The index of a save: every planned chunk must have been written exactly once.

    Args:
        metadata: what DCP planned, over all ranks.
        shards: every file written by any rank, with its block digests.
        aliases: further names of stored tensors.

    Raises:
        SaveError: a planned chunk was not written, or one was written that nobody planned.
    """
    written: dict[tuple[str, tuple[int, ...]], tuple[str, int]] = {}
    for shard, _ in shards:
        for spec, start in zip(shard.chunks, shard.starts, strict=True):
            place = (spec.tensor, spec.offsets)
            if place in written:
                raise SaveError(f"{spec.entry!r} was written twice: {written[place][0]} and {shard.path}")
            written[place] = (shard.path, start)
    tensors = []
    for name, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            continue
        chunks = []
        for chunk in stored.chunks:
            found = written.pop((name, tuple(chunk.offsets)), None)
            if found is None:
                raise SaveError(f"{name!r} at {tuple(chunk.offsets)} was planned and never written")
            chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), *found))
        dtype = dtypes.dtype_name(stored.properties.dtype)
        if dtype is None:
            raise SaveError(f"{name!r} has the dtype {stored.properties.dtype}, which safetensors lacks")
        tensors.append(TensorRecord(name, dtype, tuple(stored.size), tuple(chunks)))
    if written:
        raise SaveError(f"{min(written)[0]!r} was written without being planned")
    files = [ShardFile(shard.path, blocks) for shard, blocks in shards]
    return Index(tensors, files, aliases)


def dcp_metadata(records: Mapping[str, TensorRecord]) -> Metadata:
    """DCP's view of stored tensors; chunk ``n`` of a tensor there is chunk ``n`` here."""
    return Metadata(
        state_dict_metadata={
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=dtypes.torch_dtype(record.dtype)),
                size=torch.Size(record.shape),
                chunks=[
                    ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
                    for chunk in record.chunks
                ],
            )
            for name, record in records.items()
        }
    )


def plan_read(
    targets: Mapping[str, torch.Tensor], records: Mapping[str, TensorRecord]
) -> list[tuple[ReadItem, torch.Tensor]]:
    """Cut the reads that fill ``targets``; each with the view of its target that it fills.

    Args:
        targets: tensors to fill, of the stored shape and dtype, of any layout.
        records: the stored tensor for each of the same names.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(targets), metadata=dcp_metadata(records), is_coordinator=True)
    (plan,) = planner.create_global_plan([planner.create_local_plan()])
    final = planner.finish_plan(plan)
    with torch.no_grad():
        return [(item, planner.resolve_tensor(item).detach()) for item in final.items]


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
