"""The half of a save on the training thread: what a rank holds is seen, and what it owns is copied.

The other half is `strongroom.parts`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from strongroom import paths
from strongroom.budget import Split, available_bytes, split
from strongroom.devicecopy import CudaCopier, DeviceCopier, Pending, fence_before_step, own_copier
from strongroom.dtypes import bytes_of
from strongroom.errors import ConfigError, SaveError
from strongroom.messages import Message
from strongroom.ownership import encode_held
from strongroom.parallel import run_all
from strongroom.plan import LocalPlan, local_data, plan_local
from strongroom.provenance.recording import Recorder, encode_given
from strongroom.ranks import Ranks
from strongroom.shards import ChunkSpec, ShardLayout, WrittenFile, lay_out
from strongroom.stage import Stage, StagedShard, picker
from strongroom.streaming import streamed_pieces
from strongroom.tree import Captured, Capturer
from strongroom.values import MAX_DEPTH, Node

__all__ = [
    "NO_PROVENANCE",
    "Provenance",
    "StagedSave",
    "Stager",
]

_LOG: Final = logging.getLogger("strongroom")

_ORDINARY: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors that are their own memory."""

Write = Callable[[ShardLayout, Iterable[bytes | memoryview]], WrittenFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What a user says about a checkpoint, already in typed form.

    Attributes:
        recorder: what makes a document of it; None on ranks that write none.
        facts: what the `Checkpointer` knows about the checkpoint besides.
    """

    provenance: Node
    metrics: Node
    tags: tuple[str, ...]
    recorder: Recorder | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        provenance: Mapping[str, Any] | None,
        metrics: Mapping[str, Any] | None,
        tags: Iterable[str],
        recorder: Recorder | None = None,
    ) -> Provenance:
        """Snapshot what was given, to the save and to the recorder.

        Raises:
            ConfigError: a tag is no text, or the provenance no dict.
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
        given = (provenance or {}) if recorder is None else recorder.given(provenance)
        return cls(
            provenance=encode_given(given, "provenance"),
            metrics=encode_given(metrics or {}, "metrics"),
            tags=listed,
            recorder=recorder,
        )


NO_PROVENANCE: Final = Provenance.of(None, None, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSave:
    """A snapshot of one rank that training can no longer change.

    Attributes:
        document: the typed document of what all ranks share.
        rank_document: this rank's own values by name.
        aliases: further names of tensors.
        plan: what the rank holds.
        shards: what it stores, in host memory.
        written: what it has stored already, since no memory was left for it.
        compared: a digest of each small value that must be the same on all ranks.
        pending: copies from accelerators that must end before the shards hold what they should.
    """

    rank: int
    document: Node
    rank_document: Sequence[Node]
    aliases: Mapping[str, str]
    plan: LocalPlan
    shards: list[StagedShard]
    written: list[tuple[ShardLayout, WrittenFile]]
    compared: Mapping[str, str]
    pending: Pending | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of all this rank's shards."""
        layouts = (*(shard.layout for shard in self.shards), *(layout for layout, _ in self.written))
        return sum(layout.size_bytes for layout in layouts)


class Stager:
    """Takes one rank's snapshots; keeps the buffers and the plan of the last one for the next.

    A snapshot has two steps, between which the ranks agree on who stores what: `look` walks the
    state and copies nothing, `take` copies what this rank turned out to own.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        parts: int,
        budget_bytes: int | None = None,
        available: Callable[[], int | None] = available_bytes,
        is_overlapped: bool = False,
        copier: Callable[[], DeviceCopier | None] = own_copier,
        scatter: int = 0,
    ) -> None:
        self._ranks = ranks
        self._is_overlapped = is_overlapped
        self._copier = copier
        self._early: frozenset[int] = frozenset()
        self._plan_spread: set[str] = set()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._budget_bytes = budget_bytes
        self._available = available
        self._split: Split | None = None
        self._split_of: tuple[ChunkSpec, ...] | None = None
        self._picker: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]] | None = None
        self._picked: tuple[ChunkSpec, ...] | None = None
        self._parts = parts
        self._scatter = scatter
        # Made anew by the first save, which knows whether there is an accelerator.
        self._stage = self._new_stage()
        self._bound_length = 0
        self._capturer = Capturer(rank=ranks.rank)
        self._captured: Captured | None = None
        self._fingerprint: object = None
        self._plan: LocalPlan | None = None
        self._is_plan_known = False
        self._generation = 0
        self._specs: tuple[ChunkSpec, ...] = ()
        self._specs_of: LocalPlan | None = None

    def look(self, state: Mapping[str, Any]) -> Message:
        """Walk a state and say what this rank holds, where the coordinator does not know it already.

        Raises:
            StateEncodingError: a value has no safe encoding.
        """
        self._captured = captured = self._capturer.capture(state)
        if self._is_overlapped:
            self._optimizers = list(_optimizers_in(state))
        if self._plan is None or captured.fingerprint != self._fingerprint:
            # Nothing is kept before this is done: where it raises, the next save must plan anew.
            spread = _spread(state, captured.units)
            plan = plan_local(captured.tensors, captured.units, spread)
            self._plan_spread = spread
            self._plan, self._fingerprint, self._is_plan_known = plan, captured.fingerprint, False
        if self._is_plan_known:
            return Message(members={"generation": self._generation})
        return Message(
            members={"generation": 0},
            pieces={} if self._ranks.is_alone else {"plan": encode_held(self._plan.chunks)},
        )

    @property
    def held_bytes(self) -> int:
        """Of all chunks that this rank could store, of the state that it looked at last."""
        return 0 if self._plan is None else sum(held.chunk.size_bytes for held in self._plan.chunks)

    def learn(self, verdict: Message, own: Message) -> None:
        """Take up what the coordinator said of who stores what."""
        if self._plan is None:
            raise SaveError("a decision came before anything was planned")
        self._is_plan_known = True
        if self._ranks.is_alone:
            if self._specs_of is not self._plan:
                self._specs = tuple(held.chunk for held in self._plan.chunks)
        elif "owned" in own.pieces:
            places = np.frombuffer(own.pieces["owned"], np.uint32).tolist()
            self._specs = tuple(self._plan.chunks[place].chunk for place in places)
        self._specs_of = self._plan
        self._generation = verdict.members.get("generation", 0)

    def take(self, metadata: Mapping[str, str], write: Write) -> StagedSave:
        """Copy what this rank owns of the state that it looked at last.

        What the memory budget has no room for is written at once.

        Args:
            metadata: the binding of the checkpoint.
            write: writes one shard and returns its record.

        Raises:
            StoreError: what was written at once could not be.
        """
        captured, plan = self._captured, self._plan
        if captured is None or plan is None:
            raise SaveError("a snapshot was taken before its state was looked at")
        stage, parted = self._fitting(metadata), self._within_budget()
        shards = stage.copy(
            parted.staged,
            self._pick(captured, parted.staged),
            metadata,
            early=self._early,
        )
        pending = self._settled(stage.pending)
        written = []
        if parted.streamed:
            tensors = {spec: local_data(captured.tensors[spec.tensor], spec) for spec in parted.streamed}
            layouts = lay_out(
                parted.streamed,
                rank=self._ranks.rank,
                parts=self._parts,
                metadata=metadata,
                first_part=len(shards),
                scatter=self._scatter,
            )
            files = run_all(
                [partial(write, layout, streamed_pieces(layout, tensors, metadata)) for layout in layouts],
                workers=self._parts,
                name="strongroom-shard",
            )
            written = list(zip(layouts, files, strict=True))
        compared = {} if self._ranks.is_alone else _digests(captured.compared)
        self.forget()
        return StagedSave(
            rank=self._ranks.rank,
            document=captured.document,
            rank_document=captured.rank_document,
            aliases=captured.aliases,
            plan=plan,
            shards=shards,
            written=written,
            compared=compared,
            pending=pending,
        )

    def _pick(self, captured: Captured, specs: tuple[ChunkSpec, ...]) -> Sequence[torch.Tensor]:
        """The memory of each chunk, without a step of Python's for each where all are ordinary tensors."""
        if self._picker is None or self._picked is not specs:
            places = {name: place for place, name in enumerate(captured.tensors)}
            self._picker = picker([places[spec.tensor] for spec in specs])
            self._picked = specs
        tensors = self._picker(list(captured.tensors.values()))
        if _ORDINARY.issuperset(map(type, tensors)):
            return tensors
        return [local_data(tensor, spec) for tensor, spec in zip(tensors, specs, strict=True)]

    def _settled(self, pending: Pending | None) -> Pending | None:
        """Wait for copies from accelerators, or see to it that training does before it changes anything."""
        if pending is None:
            return None
        if not self._is_overlapped:
            pending.wait()
            return None
        if self._optimizers:
            fence_before_step(pending, self._optimizers)
        else:
            # Nobody can be asked to wait later.
            pending.fence()
        return pending

    def prepare(self, metadata: Mapping[str, str]) -> int:
        """Allocate and touch the buffers for what this rank owns; their bytes."""
        if self._plan is None:
            raise SaveError("buffers were prepared before a state was looked at")
        stage = self._fitting(metadata)
        stage.prepare(self._within_budget().staged, metadata)
        self.forget()
        return stage.size_bytes

    def _new_stage(self) -> Stage:
        copier = self._copier()
        return Stage(
            rank=self._ranks.rank,
            parts=self._parts,
            is_pinned=isinstance(copier, CudaCopier),
            copier=copier,
            scatter=self._scatter,
        )

    def _within_budget(self) -> Split:
        """What is copied and what is not; decided anew where what this rank owns has changed."""
        if self._split is None or self._split_of is not self._specs:
            budget_bytes = self._budget_bytes
            if budget_bytes is None:
                available = self._available()
                # What the buffers of the last state take is given back first.
                budget_bytes = None if available is None else available + self._stage.size_bytes
            self._split, self._split_of = split(self._specs, budget_bytes), self._specs
            self._early = frozenset(
                number
                for number, spec in enumerate(self._split.staged)
                if spec.tensor not in self._plan_spread
            )
            if self._split.streamed:
                _LOG.warning(
                    "%d of %d bytes of this rank's state are written while training waits: the host memory "
                    "for a copy is limited to %d bytes, by memory_budget or by what is available",
                    self._split.streamed_bytes,
                    self._split.streamed_bytes + self._split.staged_bytes,
                    budget_bytes,
                )
        return self._split

    def _fitting(self, metadata: Mapping[str, str]) -> Stage:
        """The stage, anew where a binding is longer or shorter than what it was laid out for."""
        length = sum(map(len, metadata.values()))
        if length != self._bound_length:
            self._stage, self._bound_length = self._new_stage(), length
        return self._stage

    def forget(self) -> None:
        """Let go of the state's tensors, or a state_dict's temporaries would live on."""
        self._captured, self._optimizers = None, []


def _optimizers_in(value: Any, depth: int = 0) -> Iterator[torch.optim.Optimizer]:
    if isinstance(value, torch.optim.Optimizer):
        yield value
    elif isinstance(value, Mapping | list | tuple) and depth < MAX_DEPTH:
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _optimizers_in(item, depth + 1)


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    found = {}
    for name, tensor in tensors.items():
        data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        raw = bytes_of(data).tobytes()
        found[name] = hashlib.sha256(f"{data.dtype}{tuple(data.shape)}".encode() + raw).hexdigest()[:32]
    return found


def _spread(state: Mapping[str, Any], units: Mapping[str, str]) -> set[str]:
    """Names of parameters and of what optimizers keep of them: any rank's replica of these will do.

    Everything else has its top-level key or its module's buffers as its unit.
    """
    others = {paths.spell((key,)) for key in state}
    return {
        name
        for name, unit in units.items()
        if unit not in others and (name == unit or name.startswith(f"{unit}."))
    }
