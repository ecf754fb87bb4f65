"""A save in two halves: staged on the training thread, written and committed in the background."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from strongroom import layout, stage, tree
from strongroom._version import __version__
from strongroom.canonical import Json
from strongroom.errors import ConfigError
from strongroom.index import encode_index
from strongroom.manifest import FileRecord
from strongroom.opened import encode_document
from strongroom.parallel import run_all
from strongroom.plan import SavePlanning, build_index, plan_save
from strongroom.ranks import Ranks
from strongroom.shards import ChunkSpec, WrittenFile, binding
from strongroom.stage import Stage, StagedShard
from strongroom.transaction import Attempt, Committed
from strongroom.tree import Captured
from strongroom.values import Encoder, Node

__all__ = [
    "MAX_WORKERS",
    "Provenance",
    "StagedSave",
    "Stager",
    "default_workers",
    "producer",
    "write_checkpoint",
]

MAX_WORKERS: Final = 4
"""Threads that hash and write one rank's shards: more do not help one disk."""


def default_workers() -> int:
    """Threads for this machine."""
    return max(1, min(MAX_WORKERS, os.cpu_count() or 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What a user says about a checkpoint, already in typed form."""

    provenance: Node
    metrics: Node
    tags: tuple[str, ...]

    @classmethod
    def of(
        cls, provenance: Mapping[str, Any] | None, metrics: Mapping[str, Any] | None, tags: Iterable[str]
    ) -> Provenance:
        """Snapshot what was given.

        Raises:
            ConfigError: a tag is no text.
            StateEncodingError: a value has no safe encoding.
        """
        if isinstance(tags, str):
            raise ConfigError(f"tags must be a sequence of texts, got the text {tags!r:.60}")
        listed = tuple(tags)
        for tag in listed:
            if not isinstance(tag, str):
                raise ConfigError(f"a tag must be text, got {tag!r:.60}")
            try:
                tag.encode("utf-8")
            except UnicodeEncodeError:
                raise ConfigError(f"a tag must be valid Unicode, got {tag!r:.60}") from None
        encoder = Encoder(_scalar_tensor)
        return cls(
            provenance=encoder.encode(dict(provenance or {}), ("provenance",)),
            metrics=encoder.encode(dict(metrics or {}), ("metrics",)),
            tags=listed,
        )


def _scalar_tensor(value: Any, path: tuple[Any, ...]) -> Node | None:
    """A metric is often a tensor of one element: it stands as the number it is."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return Encoder(lambda *_: None).encode(value.detach().item(), path)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSave:
    """A snapshot that training can no longer change."""

    rank: int
    captured: Captured
    planning: SavePlanning
    shards: list[StagedShard]

    @property
    def size_bytes(self) -> int:
        return sum(shard.layout.size_bytes for shard in self.shards)


class Stager:
    """Takes snapshots; keeps the buffers and the plan of the last one for the next."""

    def __init__(self, ranks: Ranks, *, parts: int) -> None:
        self._ranks = ranks
        self._stage = Stage(rank=ranks.rank, parts=parts)
        self._planned: tuple[Any, SavePlanning] | None = None

    def take(self, state: Mapping[str, Any], metadata: Mapping[str, str]) -> StagedSave:
        """Copy a state.

        Args:
            state: as `strongroom.tree.capture` takes it.
            metadata: any binding of the run.

        Raises:
            StateEncodingError: a value has no safe encoding.
        """
        captured = tree.capture(state, rank=self._ranks.rank)
        planning = self._plan(captured.tensors)
        tensors = [_chunk_of(captured.tensors[spec.tensor], spec) for spec in planning.specs]
        shards = self._stage.copy(planning.specs, tensors, metadata)
        # The originals are copied: let go of them, or a state_dict's temporaries would live on.
        captured.tensors.clear()
        return StagedSave(rank=self._ranks.rank, captured=captured, planning=planning, shards=shards)

    def _plan(self, tensors: Mapping[str, torch.Tensor]) -> SavePlanning:
        """Plan, or take the last plan where names, shapes, dtypes and placements are the same."""
        key = [
            (name, tensor.shape, tensor.dtype, str(getattr(tensor, "placements", "")))
            for name, tensor in tensors.items()
        ]
        if self._planned is None or self._planned[0] != key:
            self._planned = (key, plan_save(tensors, self._ranks))
        return self._planned[1]


def _chunk_of(tensor: torch.Tensor, spec: ChunkSpec) -> torch.Tensor:
    local = stage.local_tensor(tensor)
    if tuple(local.shape) != spec.sizes:
        raise ConfigError(
            f"{spec.tensor!r} is planned in a chunk of {list(spec.sizes)}, and this process holds "
            f"{list(local.shape)}; a tensor sharded in more than one piece a process is not carried yet"
        )
    return local


def write_checkpoint(
    attempt: Attempt, staged: StagedSave, provenance: Provenance, *, workers: int
) -> Committed:
    """Write every file of an attempt and commit it.

    Raises:
        StrongroomError: it was not committed (or, `OutcomeUnknownError`, may be); why.
    """
    bound = binding(attempt.run, attempt.name)
    records: list[FileRecord] = []
    written = run_all(
        [partial(_write_shard, attempt, shard, bound) for shard in staged.shards],
        workers=workers,
        name="strongroom-shard",
    )
    records.extend(file.record for file in written)
    index = build_index(
        staged.planning.metadata,
        [(shard.layout, file.block_digests) for shard, file in zip(staged.shards, written, strict=True)],
        staged.captured.aliases,
    )
    documents = {
        layout.INDEX: encode_index(index, bound),
        layout.STATE: _document(attempt, "state", {"document": staged.captured.document}),
        layout.PROVENANCE: _document(
            attempt,
            "provenance",
            {
                "metrics": provenance.metrics,
                "producer": producer(),
                "provenance": provenance.provenance,
                "tags": list(provenance.tags),
            },
        ),
    }
    if staged.captured.rank_document:
        members = {"rank": staged.rank, "values": staged.captured.rank_document}
        documents[layout.rank_state_path(staged.rank)] = _document(attempt, "rank_state", members)
    for path, data in documents.items():
        records.append(attempt.write_whole(path, data).record)
    return attempt.commit(records)


def _write_shard(attempt: Attempt, shard: StagedShard, bound: Mapping[str, str]) -> WrittenFile:
    return attempt.write(shard.layout.path, shard.pieces(bound), length_bytes=shard.layout.size_bytes)


def _document(attempt: Attempt, kind: str, members: dict[str, Json]) -> bytes:
    return encode_document(kind, attempt.run, attempt.name, members)


def producer() -> dict[str, Json]:
    """What wrote the checkpoint, for people who wonder later."""
    return {
        "python": platform.python_version(),
        "strongroom": __version__,
        "torch": str(torch.__version__),
    }
