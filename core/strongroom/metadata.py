"""Stored tensors as DCP sees them: its ``Metadata``, as a lazy mapping over the index.

DCP's planners ask for the tensors that a rank loads, and a rank of a large job loads a few of many:
only what is looked at is turned into DCP's objects. Nothing here plans (`strongroom.plan`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from strongroom import dtypes
from strongroom.columns import Box
from strongroom.index import TensorRecord
from strongroom.pieces import has_layout_of_its_own, piece_of

__all__ = ["dcp_metadata", "narrowed"]

_FEW: Final = 8
"""So many chunks of a tensor are not worth choosing among."""


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


def narrowed(
    targets: Mapping[str, torch.Tensor], records: Mapping[str, TensorRecord]
) -> dict[str, TensorRecord]:
    """The records, with only those chunks that hold something of what this process holds of its targets.

    A tensor of ``n`` chunks on each of ``n`` ranks would else cost every rank ``n`` of DCP's
    objects to find the one that it reads. Planning and fetching must be given the same records.
    """
    wide = {
        name: target
        for name, target in targets.items()
        if len(records[name].chunks) > _FEW and type(target) not in (torch.Tensor, torch.nn.Parameter)
    }
    if not wide:
        return dict(records)
    # What a rank would save of a tensor is what it holds of it.
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(wide), is_coordinator=False)
    boxes: dict[str, list[Box]] = {name: [] for name in wide}
    for item in planner.create_local_plan().items:
        if item.tensor_data is not None:
            target, chunk = wide[item.index.fqn], item.tensor_data.chunk
            piece = piece_of(target) if has_layout_of_its_own(target) else None
            boxes[item.index.fqn].append(piece or (chunk.offsets, chunk.sizes))
    return {
        name: record.reached_by(boxes[name]) if name in boxes else record for name, record in records.items()
    }


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
