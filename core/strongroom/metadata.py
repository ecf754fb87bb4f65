"""Stored tensors as DCP sees them: its ``Metadata``, as a lazy mapping over the index.

DCP's planners ask for the tensors that a rank loads, and a rank of a large job loads a few of many:
only what is looked at is turned into DCP's objects. Nothing here plans (`strongroom.plan`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from strongroom import dtypes
from strongroom.index import TensorRecord

__all__ = ["dcp_metadata"]


def dcp_metadata(
    records: Mapping[str, TensorRecord], values: Iterable[str] = (), planner_data: Any = None
) -> Metadata:
    """DCP's view of stored tensors; chunk ``n`` of a tensor there is chunk ``n`` here.

    Args:
        records: the tensors by DCP's name for each; a record is read when DCP asks for it.
        values: DCP's names of what is no tensor.
        planner_data: what a load planner is to find under that name.
    """
    entries = cast(
        "dict[str, STORAGE_TYPES]", _Entries(records, dict.fromkeys(values, BytesStorageMetadata()))
    )
    return Metadata(state_dict_metadata=entries, planner_data=planner_data)


class _Entries(Mapping[str, STORAGE_TYPES]):
    """An entry for each name, built when it is first looked at."""

    def __init__(self, records: Mapping[str, TensorRecord], values: Mapping[str, STORAGE_TYPES]) -> None:
        self._records = records
        self._built: dict[str, STORAGE_TYPES] = dict(values)
        self._names = dict.fromkeys((*records, *values))

    def __getitem__(self, name: str) -> STORAGE_TYPES:
        entry = self._built.get(name)
        if entry is None:
            entry = self._built[name] = _entry(self._records[name])
        return entry

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __reduce__(self) -> tuple[type, tuple[dict[str, STORAGE_TYPES]]]:
        # Whoever copies the metadata, or sends it to another process, gets DCP's own form.
        return dict, (dict(self),)


def _entry(record: TensorRecord) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtypes.torch_dtype(record.dtype)),
        size=torch.Size(record.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
            for chunk in record.chunks
        ],
    )
