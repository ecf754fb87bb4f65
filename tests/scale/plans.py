"""Jobs that were never run: what each of many ranks would have stored, as Strongroom and as DCP tell it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from strongroom.digest import BLOCK_BYTES, DIGEST_BYTES
from strongroom.index import Chunk, Index, ShardFile, TensorRecord
from strongroom.layout import CheckpointName, shard_path
from strongroom.ownership import HeldChunk
from strongroom.shards import ChunkSpec, binding

__all__ = [
    "BOUND",
    "held_by",
    "name_of",
    "peer_metadata",
    "peer_plan",
    "sharded_parts",
    "small_parts",
    "targets",
]

BOUND = binding("run", CheckpointName(launch=1, step=7, attempt="0123456789abcdef"))

COLUMNS = 4096
"""Of each sharded tensor, as of a hidden layer; 16 rows a rank are 256 KiB of float32."""

ROWS_EACH = 16
HEADER_BYTES = 65536


def name_of(number: int) -> str:
    """As the parameters of a transformer are called."""
    return f"model.layers.{number // 8:04d}.feed_forward.w{number % 8}.weight"


def sharded_parts(tensors: int, ranks: int) -> Iterator[Index]:
    """Every tensor sharded evenly over all ranks along dimension 0: the index of each rank."""
    shape = (ROWS_EACH * ranks, COLUMNS)
    bytes_each = ROWS_EACH * COLUMNS * 4
    names = [name_of(number) for number in range(tensors)]
    blocks = -(-(HEADER_BYTES + tensors * bytes_each) // BLOCK_BYTES)
    for rank in range(ranks):
        path = shard_path(rank, 0)
        records = [
            TensorRecord(
                name,
                "F32",
                shape,
                (
                    Chunk(
                        (ROWS_EACH * rank, 0), (ROWS_EACH, COLUMNS), path, HEADER_BYTES + number * bytes_each
                    ),
                ),
                f"mesh {ranks} (dp): Shard(0)",
            )
            for number, name in enumerate(names)
        ]
        yield Index(records, [ShardFile(path, bytes(DIGEST_BYTES) * blocks)])


def small_parts(tensors: int, ranks: int) -> Iterator[Index]:
    """Very many small replicated tensors, each stored whole by one of the ranks."""
    each = -(-tensors // ranks)
    for rank in range(ranks):
        path = shard_path(rank, 0)
        records = [
            TensorRecord(
                f"model.experts.{number:06d}.bias",
                "F32",
                (256,),
                (Chunk((0,), (256,), path, HEADER_BYTES + 1024 * place),),
            )
            for place, number in enumerate(range(rank * each, min(tensors, (rank + 1) * each)))
        ]
        blocks = -(-(HEADER_BYTES + 1024 * len(records)) // BLOCK_BYTES)
        yield Index(records, [ShardFile(path, bytes(DIGEST_BYTES) * blocks)])


def peer_metadata(index: Index) -> Metadata:
    """The same plan as stock DCP keeps it: its file system writer's ``.metadata``, pickled by the caller."""
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for record in index.tensors.values():
        entries[record.name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=torch.float32),
            size=torch.Size(record.shape),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
                for chunk in record.chunks
            ],
        )
        bytes_each = 4 * record.chunks[0].sizes[0] * (record.chunks[0].sizes[1:] or (1,))[0]
        for number, chunk in enumerate(record.chunks):
            place = MetadataIndex(record.name, torch.Size(chunk.offsets), number)
            # DCP's file name for a rank's first file, and the length of torch.save's form.
            file = f"__{int(chunk.path[:5])}_0.distcp"
            storage[place] = _StorageInfo(file, chunk.start, bytes_each + 1577)
    return Metadata(state_dict_metadata=entries, storage_data=storage)


def held_by(part: Index) -> list[HeldChunk]:
    """What a rank that stored this would have told of what it holds."""
    return [
        HeldChunk(
            ChunkSpec(record.name, record.dtype, chunk.offsets, chunk.sizes, chunk.sizes == record.shape),
            record.name.rsplit(".", 1)[0],
            True,
        )
        for record in part.tensors.values()
        for chunk in record.chunks
    ]


def peer_plan(held: Sequence[HeldChunk], shapes: dict[str, tuple[int, ...]]) -> SavePlan:
    """What a rank of ``dcp.save`` sends to its coordinator, pickled by the caller."""
    return SavePlan(
        [
            WriteItem(
                index=MetadataIndex(one.chunk.tensor, torch.Size(one.chunk.offsets), 0),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(one.chunk.offsets), torch.Size(one.chunk.sizes)),
                    properties=TensorProperties(dtype=torch.float32),
                    size=torch.Size(shapes[one.chunk.tensor]),
                ),
            )
            for one in held
        ]
    )


@contextmanager
def targets(tensors: int, ranks: int) -> Iterator[dict[str, torch.Tensor]]:
    """What one rank of the job of `sharded_parts` holds; its other ranks are made up."""
    dist.init_process_group("fake", store=FakeStore(), rank=ranks // 3, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        local = torch.empty(ROWS_EACH, COLUMNS)
        yield {
            name_of(number): DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            for number in range(tensors)
        }
    finally:
        dist.destroy_process_group()
