"""The storage writer for ``dcp.save`` and ``dcp.async_save``."""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from strongroom import completeness, layout, stage
from strongroom.acts import ActSink, reconcile
from strongroom.atoms import node
from strongroom.auditing import NO_AUDIT, reason_of
from strongroom.catalog import Catalog, Checkpoint, History
from strongroom.config import SYSTEM_CLOCK, Clock, check_seconds, choose_digest, load_policy
from strongroom.digest import DigestAlgorithm
from strongroom.dtypes import bytes_of
from strongroom.errors import (
    AccessDeniedError,
    ConfigError,
    IntegrityError,
    NoWholeCheckpointError,
    SaveError,
    StrongroomError,
)
from strongroom.events import CheckpointCommitted, Event, LaunchClaimed, SaveFailed, SaveRefused, SaveStarted
from strongroom.index import Chunk, Index, ShardFile, TensorRecord, decode_index, encode_index
from strongroom.layout import ATTEMPT_HEX_DIGITS, CheckpointName, check_scatter
from strongroom.manifest import CheckpointRef, FileRecord, Launch
from strongroom.opened import encode_document, open_checkpoint
from strongroom.parallel import run_all
from strongroom.parts import producer
from strongroom.plan import spec_of
from strongroom.roles import Duty, check_root, open_root
from strongroom.sealing import OneOff
from strongroom.shards import ShardLayout, WrittenFile, binding, lay_out
from strongroom.signing import NO_GUARD, Guard, LaunchRequests
from strongroom.transaction import Attempt, Deadline, begin_run, claim_launch
from strongroom.turns import launch_to_exceed
from strongroom.values import Encoder, Node
from strongroom.workers import writing_workers

if TYPE_CHECKING:
    from strongroom.stores.base import Store

from strongroom.dcp.naming import is_step, name_of, step_of

__all__ = ["StrongroomWriter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ticket:
    """What the coordinator tells every rank of an attempt, inside DCP's plan; nothing secret."""

    launch: Launch
    name: CheckpointName
    parent: CheckpointRef | None
    rank: int
    world_size: int
    values: tuple[tuple[str, tuple[Any, ...]], ...]
    invitation: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """What a rank tells the coordinator: its files, its part of the index, the values that it encoded.

    Attributes:
        keys: those of its sealed files, sealed to the coordinator's one-off key.
    """

    keys: bytes
    index: bytes
    records: tuple[FileRecord, ...]
    values: tuple[tuple[str, Node], ...]


class StrongroomWriter(StorageWriter):
    """Writes ``dcp.save``'s state as one committed checkpoint.

    Args:
        root: the run's root: a path, a ``file://`` or ``s3://`` URI, or a `Store`.
        step: the step of the next save; or give it to ``dcp.save`` as ``checkpoint_id``.
        parent: what the run goes on from when this writer claims its launch: ``"newest"``, the
            number of a step, or None to begin a line of its own.
        security: a policy or its file's path; None: the file that ``STRONGROOM_CONFIG`` names,
            if it is set.
        digest: ``"blake3"`` or ``"sha256"``; None: the policy's, else ``"blake3"``.
        timeout_s: seconds after which a save never commits.
        accept_older: go on although the root is an older one than the policy's floor remembers.
        scatter: over how many folders shards are spread, as a `Checkpointer`'s.
        clock: the time.
        draw: random hex digits for ``n`` bytes.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Store,
        *,
        step: int | None = None,
        parent: int | Literal["newest"] | None = "newest",
        security: Any = None,
        digest: str | None = None,
        timeout_s: float = 1800.0,
        accept_older: bool = False,
        scatter: int | None = None,
        clock: Clock = SYSTEM_CLOCK,
        draw: Any = secrets.token_hex,
    ) -> None:
        super().__init__()
        self._root = root
        self._step = None if step is None else step_of(step)
        self._parent = parent
        policy = load_policy(security)
        check_root(root, policy)
        self._algorithm: DigestAlgorithm = choose_digest(digest, policy)
        self._policy = policy
        self._sealing = policy.sealing if policy is not None else None
        self._signing = policy.signing if policy is not None else None
        self._guard = policy.guard if policy is not None else NO_GUARD
        self._auditor = policy.auditor if policy is not None else NO_AUDIT
        self._acts: ActSink | None = None
        self._one_off: OneOff | None = None
        self._attempt_made: Attempt | None = None
        self._timeout_s = check_seconds("timeout_s", timeout_s)
        self._accept_older = accept_older
        self._scatter = check_scatter(0 if scatter is None else scatter)
        self._clock = clock
        self._draw = draw
        self._launch: Launch | None = None
        self._newest: CheckpointRef | None = None
        self._is_coordinator = True
        self._used: set[CheckpointName] = set()
        self._ticket: _Ticket | None = None
        self._unended: _Ticket | None = None
        self._deadline: Deadline | None = None
        self.committed: Checkpoint | None = None
        """The last checkpoint that this writer committed (on the coordinator)."""

    # ------------------------------------------------------------- what DCP calls, in its order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)
        if self._unended is not None:
            # The save before ended outside of this writer: on another rank, or in DCP.
            self._tell_failed(self._unended, SaveError("the save was begun and not finished"))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._step is None:
            raise ConfigError(
                "give the step: StrongroomWriter(root, step=...), or checkpoint_id= of dcp.save"
            )
        self._is_coordinator = is_coordinator
        self._deadline = Deadline.after(self._timeout_s, self._clock.monotonic)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: claim the launch, draw the attempt, and hand both to every rank."""
        try:
            return self._ticketed(plans)
        except BaseException as error:
            self._tell(
                SaveRefused(
                    run=self._launch.run if self._launch is not None else "",
                    step=self._step,
                    reason=reason_of(error),
                    error=type(error).__name__,
                )
            )
            raise

    def _ticketed(self, plans: list[SavePlan]) -> list[SavePlan]:
        launch = self._launch or self._claim()
        step = 0 if self._step is None else self._step
        before = self._newest or launch.parent
        if before is not None and step < before.step:
            raise ConfigError(
                f"step {step} is lower than step {before.step}, from which this writer goes on: it would "
                "never be the newest; StrongroomWriter(root, parent=STEP) goes back to an older one"
            )
        name = CheckpointName(launch=launch.launch, step=step, attempt=self._draw(ATTEMPT_HEX_DIGITS // 2))
        self._one_off = self._sealing.one_off() if self._sealing is not None else None
        tickets = [
            _Ticket(
                invitation=self._one_off.public if self._one_off is not None else b"",
                launch=launch,
                name=name,
                parent=before,
                rank=rank,
                world_size=len(plans),
                values=tuple((fqn, tuple(path)) for fqn, path in (rank_plan.planner_data or {}).items())
                if isinstance(rank_plan.planner_data, Mapping)
                else (),
            )
            for rank, rank_plan in enumerate(plans)
        ]
        self._ticket = self._unended = tickets[0]
        return [
            dataclasses.replace(rank_plan, storage_data=ticket)
            for rank_plan, ticket in zip(plans, tickets, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        ticket = self._ticket_of(plan)
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        self._tell(
            SaveStarted(
                run=ticket.launch.run,
                step=ticket.name.step,
                launch=ticket.name.launch,
                attempt=ticket.name.attempt,
                size_bytes=sum(
                    spec_of(item).size_bytes for item in plan.items if item.type is not WriteItemType.BYTE_IO
                ),
                wait_s=0.0,
                stage_s=0.0,
            )
        )
        try:
            future.set_result(self._write(ticket, plan, planner))
        except BaseException as error:
            self._tell_failed(ticket, error)
            raise
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: check that everything planned was written, and commit."""
        ticket = self._ticket
        if ticket is None:
            raise SaveError("finish() without a plan: this writer did not coordinate the save")
        attempt = self._attempt(ticket)
        written = [
            result.storage_data
            for rank_results in results
            for result in rank_results
            if isinstance(result.storage_data, _Written)
        ]
        try:
            if attempt.seal is not None:
                attempt.seal.begin_wrapping()
                for rank in written:
                    if rank.keys:
                        attempt.seal.take_over(rank.keys)
            committed = attempt.commit(self._finish(attempt, ticket, metadata, written))
        except StrongroomError as error:
            self._tell_failed(ticket, error)
            attempt.abort()
            raise
        self._tell(
            CheckpointCommitted(
                run=ticket.launch.run,
                step=ticket.name.step,
                launch=ticket.name.launch,
                attempt=ticket.name.attempt,
                size_bytes=committed.commit.size_bytes,
                background_s=self._timeout_s - attempt.deadline.left_s,
                manifest_digest=str(committed.commit.manifest),
                requests=attempt.requests,
                signer=attempt.signer,
            )
        )
        self._newest = committed.ref
        self.committed = Checkpoint.of(committed.commit)
        self._guard.remember(self._open(Duty.SAVE).uri, committed.commit)
        self._ticket = self._unended = self._attempt_made = self._one_off = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_step(checkpoint_id)

    # ---------------------------------------------------------------------------------- inside

    def _tell(self, event: Event) -> None:
        """Put on record what happened; no other listener hears of it."""
        if not self._auditor.is_on:
            return
        if self._acts is None:
            try:
                uri = self._open(Duty.SAVE).uri
            except StrongroomError:
                # What keeps it from being opened is what is told.
                uri = ""
            self._acts = ActSink(self._auditor, uri)
        self._acts.emit(event)

    def _tell_failed(self, ticket: _Ticket, error: BaseException) -> None:
        self._unended = None
        self._tell(
            SaveFailed(
                run=ticket.launch.run,
                step=ticket.name.step,
                launch=ticket.name.launch,
                attempt=ticket.name.attempt,
                reason=reason_of(error),
                error=type(error).__name__,
                failures=1,
            )
        )

    def _open(self, duty: Duty) -> Store:
        return open_root(self._root, self._policy, duty)

    def _claim(self) -> Launch:
        now_ms = self._clock.now_ms()
        role = self._policy.role if self._policy is not None else None
        run_id, number = (role.run_id, role.launch) if role is not None else (None, None)
        store = self._open(Duty.RESTORE)
        # Before a run record is written: a root that lost its own must not get another run's.
        history: History | None
        try:
            history = Catalog(store, self._guard.trust).history()
        except AccessDeniedError:
            if run_id is None or number is None:
                raise
            # Who may only create is told by the platform which run and which turn it is.
            history = None
        self._guard.check_saves(self._signing)
        above, parent = 0, None
        if history is not None:
            above = launch_to_exceed(self._guard.floor, store.uri, history, accept_older=self._accept_older)
            parent = self._find_parent(store, history)
        if role is not None:
            role.drop(Duty.RESTORE)
            store = self._open(Duty.SAVE)
        run = begin_run(
            store,
            draw_run_id=lambda: run_id or str(self._draw(16)),
            now_ms=now_ms,
            known=history.run if history is not None else None,
            is_given=run_id is not None,
        )
        if run_id is not None and run.run != run_id:
            raise ConfigError(
                f"{store.uri} belongs to run {run.run}, and the policy's [role] says run {run_id}; each run "
                "needs a root of its own"
            )
        signing = None if self._signing is None else LaunchRequests(self._signing)
        self._launch = claim_launch(
            [store],
            run=run.run,
            parent=parent,
            taken=history.launch_numbers if history is not None else (),
            deadline_s=max(1, int(self._timeout_s)),
            now_ms=now_ms,
            signing=signing,
            above=above,
            number=number,
        )
        before = None if parent is None else parent.step
        self._tell(
            LaunchClaimed(
                run=run.run,
                launch=self._launch.launch,
                parent_step=before,
                requests=() if signing is None else signing.requests,
            )
        )
        if history is not None:
            own = self._acts.committed if self._acts is not None else ()
            reconcile(self._auditor, history, store.uri, own=own)
        return self._launch

    def _find_parent(self, store: Store, history: History) -> CheckpointRef | None:
        """What the launch goes on from: judged, since the launch pins it and is signed."""
        if self._parent is None:
            return None
        candidates = (
            history.line.newest_first if self._parent == "newest" else (history.at_step(self._parent),)
        )
        reasons: list[tuple[int, str]] = []
        for name in candidates:
            try:
                commit = history.whole(name)
                open_checkpoint(store, commit, Guard(trust=self._guard.trust))
            except IntegrityError as error:
                if self._parent != "newest":
                    raise
                reasons.append((name.step, str(error)))
                continue
            if self._guard.floor is not None and not self._accept_older:
                self._guard.floor.check(store.uri, commit)
            return commit.ref
        if reasons:
            told = "; ".join(f"step {step}: {reason}" for step, reason in reasons)
            raise NoWholeCheckpointError(
                f"none of the checkpoints here can be gone on from: {told}. parent=None begins a new line",
                reasons=reasons,
            )
        return None

    def _ticket_of(self, plan: SavePlan) -> _Ticket:
        # The coordinator trusts its own, since DCP's plan cache replays an older plan's.
        ticket = self._ticket if self._is_coordinator else plan.storage_data
        if not isinstance(ticket, _Ticket):
            raise SaveError("the plan does not carry what StrongroomWriter.prepare_global_plan put there")
        if ticket.name in self._used:
            raise ConfigError(
                "the planner's plan cache replays the plan of an earlier save, so that this rank would write "
                "into a checkpoint that is committed; use DefaultSavePlanner(enable_plan_caching=False)"
            )
        self._used = {ticket.name}
        return ticket

    def _attempt(self, ticket: _Ticket) -> Attempt:
        """The attempt of a ticket: one for what is written and what is committed, or keys would be lost."""
        made = self._attempt_made
        if made is None or made.name != ticket.name:
            made = self._attempt_made = self._new_attempt(ticket)
        return made

    def _new_attempt(self, ticket: _Ticket) -> Attempt:
        sealing, one_off = self._sealing, self._one_off if self._is_coordinator else None
        if bool(ticket.invitation) != (sealing is not None):
            raise ConfigError("some ranks seal and others do not; give every rank the same policy")
        return Attempt(
            self._open(Duty.SAVE),
            seal=None if sealing is None else sealing.seal_save(ticket.launch.run, ticket.name, one_off),
            signing=self._signing,
            launch=ticket.launch,
            name=ticket.name,
            parent=ticket.parent,
            algorithm=self._algorithm,
            world_size=ticket.world_size,
            deadline=self._deadline or Deadline.after(self._timeout_s, self._clock.monotonic),
            now_ms=self._clock.now_ms,
            auditor=self._auditor,
        )

    def _write(self, ticket: _Ticket, save_plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        attempt = self._attempt(ticket)
        tensors = [item for item in save_plan.items if item.type is not WriteItemType.BYTE_IO]
        values = tuple(
            (item.index.fqn, _encode(planner, item))
            for item in save_plan.items
            if item.type is WriteItemType.BYTE_IO
        )
        by_place = {(name_of(item.index.fqn), spec_of(item).offsets): item for item in tensors}
        bound = binding(attempt.run, attempt.name)
        specs = [dataclasses.replace(spec_of(item), tensor=name_of(item.index.fqn)) for item in tensors]
        shards = (
            lay_out(specs, rank=ticket.rank, parts=writing_workers(), metadata=bound, scatter=self._scatter)
            if specs
            else []
        )
        # A planner that copies from a device need not be safe to call from several threads.
        lock = threading.Lock()

        def pieces(shard: ShardLayout) -> Iterator[bytes | memoryview]:
            yield shard.header(bound)
            for spec in shard.chunks:
                with lock:
                    tensor = planner.resolve_data(by_place[spec.tensor, spec.offsets])
                yield _bytes_of(tensor, spec.entry)

        def write(shard: ShardLayout) -> WrittenFile:
            return attempt.write(shard.path, pieces(shard), length_bytes=shard.size_bytes)

        files = run_all(
            [partial(write, shard) for shard in shards], workers=len(shards), name="strongroom-shard"
        )
        if ticket.rank != 0:
            # The coordinator makes names durable when it commits; these were made by this process.
            attempt.make_durable()
        wholes = {name_of(item.index.fqn): _shape_of(item) for item in tensors}
        is_handed = attempt.seal is not None and not self._is_coordinator
        told = _Written(
            keys=attempt.seal.hand_over(ticket.invitation) if attempt.seal and is_handed else b"",
            index=encode_index(_part(wholes, shards, files), {}),
            records=tuple(file.record for file in files),
            values=values,
        )
        size = sum(file.record.size_bytes for file in files)
        return [WriteResult(index=MetadataIndex("strongroom"), size_in_bytes=size, storage_data=told)]

    def _finish(
        self, attempt: Attempt, ticket: _Ticket, metadata: Metadata, written: list[_Written]
    ) -> list[FileRecord]:
        entries = metadata.state_dict_metadata
        if len({name_of(fqn) for fqn in entries}) != len(entries):
            raise SaveError("two names of the state are spelled alike in the checkpoint; rename one")
        index = completeness.merge(
            (decode_index(rank.index, "a rank's part of the index", is_partial=True)[0] for rank in written),
            {},
            planned=[
                name_of(fqn) for fqn, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
            ],
        )
        values = {fqn: value for rank in written for fqn, value in rank.values}
        for fqn, entry in entries.items():
            if isinstance(entry, BytesStorageMetadata) and fqn not in values:
                raise SaveError(f"{fqn!r} was planned and never written")
        leaves = {
            fqn: node("tensor", name_of(fqn)) if isinstance(entry, TensorStorageMetadata) else values[fqn]
            for fqn, entry in entries.items()
        }
        mapping = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
        bound = binding(attempt.run, attempt.name)
        empty = Encoder().encode({}, ())
        documents = {
            layout.INDEX: encode_index(index, bound),
            layout.STATE: encode_document(
                "state", attempt.run, attempt.name, {"document": _nested(leaves, mapping)}
            ),
            layout.PROVENANCE: encode_document(
                "provenance",
                attempt.run,
                attempt.name,
                {"metrics": empty, "producer": producer(), "provenance": empty, "tags": []},
            ),
        }
        records = [record for rank in written for record in rank.records]
        return records + [attempt.write_whole(path, data).record for path, data in documents.items()]


def _shape_of(item: WriteItem) -> tuple[int, ...]:
    return tuple(item.tensor_data.size) if item.tensor_data is not None else ()


def _part(
    wholes: Mapping[str, tuple[int, ...]], shards: Sequence[ShardLayout], files: Sequence[WrittenFile]
) -> Index:
    """The index of what this rank wrote."""
    chunks: dict[str, list[Chunk]] = {name: [] for name in wholes}
    dtypes: dict[str, str] = {}
    for shard in shards:
        for spec, start in zip(shard.chunks, shard.starts, strict=True):
            chunks[spec.tensor].append(Chunk(spec.offsets, spec.sizes, shard.path, start))
            dtypes[spec.tensor] = spec.dtype
    return Index(
        [TensorRecord(name, dtypes[name], shape, tuple(chunks[name])) for name, shape in wholes.items()],
        [ShardFile(shard.path, file.block_digests) for shard, file in zip(shards, files, strict=True)],
    )


def _encode(planner: SavePlanner, item: WriteItem) -> Node:
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise ConfigError(
            f"{item.index.fqn!r} is no tensor, and {type(planner).__name__} would pickle it; use a planner "
            "with lookup_object, such as DefaultSavePlanner"
        )
    return Encoder().encode(lookup(item.index), (item.index.fqn,))


def _bytes_of(tensor: Any, entry: str) -> memoryview:
    if not isinstance(tensor, torch.Tensor):
        raise SaveError(f"the planner gave a {type(tensor).__name__} for the tensor {entry!r}")
    stage.check_tensor(tensor, entry)
    with torch.no_grad():
        host = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    return bytes_of(host)


def _nested(leaves: Mapping[str, Node], mapping: Mapping[str, Any]) -> Node:
    """The state's document: nested as DCP's planner says it was, else flat."""
    root: dict[Any, Any] = {}
    for fqn, leaf in leaves.items():
        path = tuple(mapping.get(fqn, (fqn,)))
        inner = root
        for key in path[:-1]:
            inner = inner.setdefault(key, _Branch())
        inner[path[-1]] = _Leaf(leaf)
    return _branch_node(root)


class _Branch(dict[Any, Any]):
    """A dict or list of the state that DCP had flattened."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    node: Node


def _branch_node(branch: Any) -> Node:
    if isinstance(branch, _Leaf):
        return branch.node
    if isinstance(branch, _Branch) and list(branch) == list(range(len(branch))):
        return [_branch_node(item) for item in branch.values()]
    key_encoder = Encoder()
    return node("dict", [[key_encoder.encode(key), _branch_node(item)] for key, item in branch.items()])
