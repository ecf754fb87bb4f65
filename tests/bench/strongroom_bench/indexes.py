"""The index of a large sharded job: encoding, decoding and its size, beside a pickled ``.metadata``."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from strongroom import layout
from strongroom.digest import BLOCK_BYTES, DIGEST_BYTES
from strongroom.index import Chunk, Index, ShardFile, TensorRecord, decode_index, encode_index
from strongroom.layout import CheckpointName
from strongroom.shards import binding
from strongroom_bench.figure import Figure, beside, fold, setting
from strongroom_bench.measure import Contestant, interleave, seconds
from strongroom_bench.scale import Scale

__all__ = ["measure"]

_COLUMNS = 4096
_ROWS = 32
"""Of a chunk: 512 KiB of float32, so that 1,000 tensors in 512 chunks are 250 GiB."""

_CHUNK_BYTES = 4 * _ROWS * _COLUMNS
_BAR = 0.25


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Encode and decode the same plan both ways."""
    names = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(scale.index_tensors)]
    index, stock = _ours(names, scale.index_shards), _stock(names, scale.index_shards)
    bound = binding("bench", CheckpointName(launch=1, step=1, attempt="0" * 16))
    encoded, pickled = encode_index(index, bound), pickle.dumps(stock)

    def ours() -> dict[str, float]:
        return {
            "encode": seconds(lambda: encode_index(index, bound)),
            "decode": seconds(lambda: decode_index(encoded, "the index")),
        }

    def theirs() -> dict[str, float]:
        return {
            "encode": seconds(lambda: pickle.dumps(stock)),
            "decode": seconds(lambda: pickle.loads(pickled)),
        }

    samples = interleave(
        [Contestant(name="strongroom", run=ours), Contestant(name="pickle", run=theirs)],
        rounds=scale.rounds,
        warm_ups=0,
        flushes=False,
    )
    words = setting(f"{scale.index_tensors} tensors x {scale.index_shards} shards, block digests included")
    return [
        *(
            beside(
                f"index: {measure} / stock pickled .metadata",
                "strongroom",
                "pickle",
                fold(samples, measure),
                bar=_BAR,
                setting=words,
            )
            for measure in ("encode", "decode")
        ),
        Figure(
            figure="index: size / stock pickled .metadata",
            value=len(encoded) / len(pickled),
            bar=_BAR,
            peers={"strongroom bytes": len(encoded), "pickle bytes": len(pickled)},
            runs=1,
            setting=words,
        ),
    ]


def _ours(names: list[str], shards: int) -> Index:
    file_blocks = -(-len(names) * _CHUNK_BYTES // BLOCK_BYTES)
    paths = [layout.shard_path(rank, 0) for rank in range(shards)]
    return Index(
        [
            TensorRecord(
                name,
                "F32",
                (_ROWS * shards, _COLUMNS),
                tuple(
                    Chunk((_ROWS * rank, 0), (_ROWS, _COLUMNS), path, 4096 + number * _CHUNK_BYTES)
                    for rank, path in enumerate(paths)
                ),
            )
            for number, name in enumerate(names)
        ],
        [ShardFile(path, bytes(range(DIGEST_BYTES)) * file_blocks) for path in paths],
    )


def _stock(names: list[str], shards: int) -> Metadata:
    sizes = torch.Size((_ROWS, _COLUMNS))
    return Metadata(
        state_dict_metadata={
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=torch.float32),
                size=torch.Size((_ROWS * shards, _COLUMNS)),
                chunks=[ChunkStorageMetadata(torch.Size((_ROWS * rank, 0)), sizes) for rank in range(shards)],
            )
            for name in names
        },
        storage_data={
            MetadataIndex(name, torch.Size((_ROWS * rank, 0)), rank): _StorageInfo(
                f"__{rank}_0.distcp", 4096 + number * _CHUNK_BYTES, _CHUNK_BYTES
            )
            for rank in range(shards)
            for number, name in enumerate(names)
        },
    )
