"""How many bytes of shards are read for a few rows of a large tensor."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from strongroom import Checkpointer, StrongroomReader, layout
from strongroom.stores.local import LocalReader, LocalStore
from strongroom_bench.figure import Figure, setting
from strongroom_bench.scale import MIB, Scale
from strongroom_bench.states import drop
from strongroom_security import SecurityPolicy

__all__ = ["measure", "read_rows"]

_COLUMNS: Final = 1024
_ROWS: Final = 4096
"""16 MiB of float32."""
_WANTED: Final = 41
"""1 % of the rows."""
_PLACES: Final = 7
"""Where they are read, from the first row to the last. Now and then they lie across two blocks."""


class _Rows(DefaultLoadPlanner):
    """Reads a few rows of ``t``, whatever the storage."""

    def __init__(self, target: torch.Tensor, first_row: int) -> None:
        super().__init__()
        self._target = target
        self._first_row = first_row

    def create_local_plan(self) -> LoadPlan:
        item = ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex("t"),
            dest_offsets=torch.Size((0, 0)),
            storage_index=MetadataIndex("t", torch.Size((0, 0)), 0),
            storage_offsets=torch.Size((self._first_row, 0)),
            lengths=self._target.shape,
        )
        return LoadPlan([item])

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = {"t": self._target}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...


class _CountingReader(LocalReader):
    counted = 0

    def read_into(self, offset_bytes: int, buffer: memoryview) -> int:
        count = super().read_into(offset_bytes, buffer)
        _CountingReader.counted += count
        return count


class _ShardCountingStore(LocalStore):
    """A local store that counts the bytes read of shards."""

    def open_reader(self, key: str) -> LocalReader:
        reader = super().open_reader(key)
        if layout.parse_shard_path(key.rpartition("/")[2].removesuffix(layout.SEALED)) is not None:
            reader.__class__ = _CountingReader
        return reader


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Read 1 % of the rows of a tensor of 16 MiB, from ours and from stock DCP's storage."""
    return [read_rows("shard bytes read for 1 % of the rows of a 16 MiB tensor, not sealed", folder)]


def read_rows(name: str, folder: Path, *, security: SecurityPolicy | None = None) -> Figure:
    """The same of a checkpoint that is sealed, where a policy says so."""
    tensor = torch.randn(_ROWS, _COLUMNS)
    ours, stock = folder / "rows", folder / "rows-dcp"
    with Checkpointer(ours, security=security) as checkpointer:
        checkpointer.save(1, {"t": tensor}).result()
    dcp.save({"t": tensor}, storage_writer=dcp.FileSystemWriter(stock))

    read: dict[str, list[float]] = {"strongroom MiB": [], "dcp.load MiB": []}
    for place in range(_PLACES):
        first = place * (_ROWS - _WANTED) // (_PLACES - 1)
        _CountingReader.counted = 0
        _load(tensor, first, StrongroomReader(_ShardCountingStore(ours), security=security))
        read["strongroom MiB"].append(_CountingReader.counted / MIB)
        before = _read_bytes()
        _load(tensor, first, dcp.FileSystemReader(stock))
        read["dcp.load MiB"].append((_read_bytes() - before) / MIB)
    for path in (ours, stock):
        drop(path)
    medians = {name: statistics.median(counts) for name, counts in read.items()}
    wanted = tensor[:_WANTED].nbytes / MIB
    return Figure(
        figure=name,
        value=medians["strongroom MiB"],
        unit="MiB",
        bar=2.0,
        peers={**medians, "wanted MiB": wanted},
        runs=_PLACES,
        setting=setting(f"through dcp.load, one process, rows at {_PLACES} places"),
        note="dcp.load's are all bytes that the process read meanwhile (rchar)",
        spread={name: (min(counts), max(counts)) for name, counts in read.items()},
        # Fewer bytes than are wanted would say that they were not counted.
        is_sound=min(read["strongroom MiB"]) >= wanted,
    )


def _load(tensor: torch.Tensor, first: int, reader: Any) -> None:
    wanted = tensor[first : first + _WANTED]
    target = torch.zeros_like(wanted)
    dcp.load({"t": tensor}, storage_reader=reader, planner=_Rows(target, first))
    if not torch.equal(target, wanted):
        raise RuntimeError("other rows came back than were saved")


def _read_bytes() -> int:
    first, *_ = Path("/proc/self/io").read_text().splitlines()
    return int(first.removeprefix("rchar: "))
