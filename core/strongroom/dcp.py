"""For plain ``torch.distributed.checkpoint``: a storage writer and reader over our format.

`StrongroomWriter` works under ``dcp.save`` and ``dcp.async_save``, `StrongroomReader` under
``dcp.load``, on any number of ranks; coordination and planning are DCP's own then. What is
written is an ordinary checkpoint: committed at once, digested, on the run's line. Values that
are no tensors are stored as typed JSON, never pickled.

Only public bases are used, with the signatures that every torch since 2.6 calls.
"""

from __future__ import annotations

import dataclasses
import io
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from strongroom import layout, paths, plan, stage
from strongroom.atoms import node
from strongroom.catalog import Catalog, Checkpoint
from strongroom.config import SYSTEM_CLOCK, Clock, check_seconds, choose_digest, load_policy
from strongroom.decoding import Decoder
from strongroom.digest import DigestAlgorithm
from strongroom.errors import (
    CheckpointNotFoundError,
    ConfigError,
    IntegrityError,
    SaveError,
    StateMismatchError,
    StrongroomError,
)
from strongroom.fetch import fetch
from strongroom.fill import difference
from strongroom.index import TensorRecord, encode_index
from strongroom.layout import ATTEMPT_HEX_DIGITS, MAX_STEP, CheckpointName
from strongroom.manifest import CheckpointRef, FileRecord, Launch
from strongroom.opened import OpenedCheckpoint, encode_document, open_checkpoint
from strongroom.parallel import run_all
from strongroom.saving import default_workers, producer
from strongroom.shards import ShardLayout, WrittenFile, binding, lay_out
from strongroom.stores.open import open_store
from strongroom.transaction import Attempt, Deadline, begin_run, claim_launch
from strongroom.values import Encoder, Node

if TYPE_CHECKING:
    from strongroom.stores.base import Store

__all__ = ["StrongroomReader", "StrongroomWriter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ticket:
    """What the coordinator tells every rank of an attempt, inside DCP's plan; nothing secret."""

    launch: Launch
    name: CheckpointName
    parent: CheckpointRef | None
    rank: int
    world_size: int
    values: tuple[tuple[str, tuple[Any, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """What a rank tells the coordinator: its files, and the values that it encoded."""

    shards: tuple[tuple[ShardLayout, bytes], ...]
    records: tuple[FileRecord, ...]
    values: tuple[tuple[str, Node], ...]


class StrongroomWriter(StorageWriter):
    """Writes ``dcp.save``'s state as one committed checkpoint.

    Args:
        root: the run's root: a path, a ``file://`` URI or a `Store`.
        step: the step of the next save; or give it to ``dcp.save`` as ``checkpoint_id``.
        parent: what the run goes on from when this writer claims its launch: ``"newest"``, the
            number of a step, or None to begin a line of its own.
        security: a policy or its file's path; None: the file that ``STRONGROOM_CONFIG`` names,
            if it is set.
        digest: ``"blake3"`` or ``"sha256"``; None: the policy's, else ``"blake3"``.
        timeout_s: seconds after which a save never commits.
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
        clock: Clock = SYSTEM_CLOCK,
        draw: Any = secrets.token_hex,
    ) -> None:
        super().__init__()
        self._root = root
        self._step = None if step is None else _step_of(step)
        self._parent = parent
        self._algorithm: DigestAlgorithm = choose_digest(digest, load_policy(security))
        self._timeout_s = check_seconds("timeout_s", timeout_s)
        self._clock = clock
        self._draw = draw
        self._launch: Launch | None = None
        self._newest: CheckpointRef | None = None
        self._is_coordinator = True
        self._used: set[CheckpointName] = set()
        self._ticket: _Ticket | None = None
        self._deadline: Deadline | None = None
        self.committed: Checkpoint | None = None
        """The last checkpoint that this writer committed (on the coordinator)."""

    # ------------------------------------------------------------- what DCP calls, in its order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._step = _step_of(checkpoint_id)

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
        store = open_store(self._root)
        launch = self._launch or self._claim(store)
        step = 0 if self._step is None else self._step
        before = self._newest or launch.parent
        if before is not None and step < before.step:
            raise ConfigError(
                f"step {step} is lower than step {before.step}, from which this writer goes on: it would "
                "never be the newest; StrongroomWriter(root, parent=STEP) goes back to an older one"
            )
        name = CheckpointName(launch=launch.launch, step=step, attempt=self._draw(ATTEMPT_HEX_DIGITS // 2))
        tickets = [
            _Ticket(
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
        self._ticket = tickets[0]
        return [
            dataclasses.replace(rank_plan, storage_data=ticket)
            for rank_plan, ticket in zip(plans, tickets, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        ticket = self._ticket_of(plan)
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(self._write(ticket, plan, planner))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: check that everything planned was written, and commit."""
        ticket = self._ticket
        if ticket is None:
            raise SaveError("finish() without a plan: this writer did not coordinate the save")
        attempt = self._attempt(open_store(self._root), ticket)
        written = [
            result.storage_data
            for rank_results in results
            for result in rank_results
            if isinstance(result.storage_data, _Written)
        ]
        try:
            committed = attempt.commit(self._finish(attempt, ticket, metadata, written))
        except StrongroomError:
            attempt.abort()
            raise
        self._newest = committed.ref
        self.committed = Checkpoint.of(committed.commit)
        self._ticket = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            _step_of(checkpoint_id)
        except ConfigError:
            return False
        return True

    # ---------------------------------------------------------------------------------- inside

    def _claim(self, store: Store) -> Launch:
        now_ms = self._clock.now_ms()
        run = begin_run(store, draw_run_id=lambda: str(self._draw(16)), now_ms=now_ms)
        history = Catalog(store).history()
        parent: CheckpointRef | None = None
        if self._parent == "newest":
            newest = next((name for name in history.line.newest_first if name in history.commits), None)
            parent = history.commits[newest].ref if newest else None
        elif self._parent is not None:
            parent = history.commits[history.at_step(self._parent)].ref
        self._launch = claim_launch(
            store,
            run=run.run,
            parent=parent,
            taken=history.launch_numbers,
            deadline_s=max(1, int(self._timeout_s)),
            now_ms=now_ms,
        )
        return self._launch

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

    def _attempt(self, store: Store, ticket: _Ticket) -> Attempt:
        return Attempt(
            store,
            launch=ticket.launch,
            name=ticket.name,
            parent=ticket.parent,
            algorithm=self._algorithm,
            world_size=ticket.world_size,
            deadline=self._deadline or Deadline.after(self._timeout_s, self._clock.monotonic),
            now_ms=self._clock.now_ms,
        )

    def _write(self, ticket: _Ticket, save_plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        attempt = self._attempt(open_store(self._root), ticket)
        tensors = [item for item in save_plan.items if item.type is not WriteItemType.BYTE_IO]
        values = tuple(
            (item.index.fqn, _encode(planner, item))
            for item in save_plan.items
            if item.type is WriteItemType.BYTE_IO
        )
        by_place = {(name_of(item.index.fqn), plan.spec_of(item).offsets): item for item in tensors}
        bound = binding(attempt.run, attempt.name)
        specs = [dataclasses.replace(plan.spec_of(item), tensor=name_of(item.index.fqn)) for item in tensors]
        shards = lay_out(specs, rank=ticket.rank, parts=default_workers(), metadata=bound) if specs else []
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
        told = _Written(
            shards=tuple((shard, file.block_digests) for shard, file in zip(shards, files, strict=True)),
            records=tuple(file.record for file in files),
            values=values,
        )
        size = sum(file.record.size_bytes for file in files)
        return [WriteResult(index=MetadataIndex("strongroom"), size_in_bytes=size, storage_data=told)]

    def _finish(
        self, attempt: Attempt, ticket: _Ticket, metadata: Metadata, written: list[_Written]
    ) -> list[FileRecord]:
        stored = {name_of(fqn): entry for fqn, entry in metadata.state_dict_metadata.items()}
        if len(stored) != len(metadata.state_dict_metadata):
            raise SaveError("two names of the state are spelled alike in the checkpoint; rename one")
        shards = [shard for rank in written for shard in rank.shards]
        index = plan.build_index(Metadata(state_dict_metadata=stored), shards, {})
        values = {fqn: value for rank in written for fqn, value in rank.values}
        for fqn, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata) and fqn not in values:
                raise SaveError(f"{fqn!r} was planned and never written")
        leaves = {
            fqn: node("tensor", name_of(fqn)) if isinstance(entry, TensorStorageMetadata) else values[fqn]
            for fqn, entry in metadata.state_dict_metadata.items()
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


class StrongroomReader(StorageReader):
    """Reads a committed checkpoint under ``dcp.load``.

    Every block is verified before it is used. There is no fall-back: DCP has bound the load to
    this checkpoint by then (`Checkpointer.restore` does fall back).

    Args:
        root: the run's root.
        step: which checkpoint; or give it to ``dcp.load`` as ``checkpoint_id``; None: the
            newest. With several ranks give it, so that all read the same one.
    """

    def __init__(self, root: str | os.PathLike[str] | Store, *, step: int | None = None) -> None:
        super().__init__()
        self._root = root
        self._step = None if step is None else _step_of(step)
        self._opened: OpenedCheckpoint | None = None
        self._failure: StrongroomError | None = None
        self._records: dict[str, TensorRecord] = {}
        self._values: dict[str, Node] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._step = _step_of(checkpoint_id)
        self._opened, self._failure = None, None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's view of the checkpoint.

        ``dcp.load`` swallows what this raises and goes on to complain of something else, so a
        failure is kept and raised by the call that follows, `set_up_storage_reader`.
        """
        try:
            return self._read_metadata()
        except StrongroomError as error:
            self._failure = error
            return Metadata(state_dict_metadata=_Refusing(error))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if self._failure is not None:
            raise self._failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        opened = self._opened
        if opened is None:
            raise ConfigError("read_data() before read_metadata(): use this reader under dcp.load")
        reads = []
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                self._load_value(planner, item)
                continue
            with torch.no_grad():
                target = planner.resolve_tensor(item).detach()
            record = self._records[item.storage_index.fqn]
            problem = difference(target.new_empty(0), dataclasses.replace(record, shape=(0,), chunks=()))
            if problem is not None:
                raise StateMismatchError(f"{item.dest_index.fqn} has another dtype: {problem}")
            reads.append((item, target))
        fetch(opened, reads, self._records, workers=default_workers(), touched=set())
        for item, target in reads:
            planner.commit_tensor(item, target)
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return StrongroomWriter.validate_checkpoint_id(checkpoint_id)

    def _read_metadata(self) -> Metadata:
        store = open_store(self._root)
        history = Catalog(store).history()
        if not history.has_commits:
            raise CheckpointNotFoundError(f"nothing is committed in {store.uri}: there is nothing to load")
        name = history.at_step(self._step) if self._step is not None else history.line.newest_first[0]
        commit = history.commits.get(name)
        if commit is None:
            raise IntegrityError(history.damaged[name])
        opened = open_checkpoint(store, commit)
        self._records = {_fqn_of(name): record for name, record in opened.index.tensors.items()}
        self._records.update(
            {_fqn_of(alias): opened.index.tensors[name] for alias, name in opened.index.aliases.items()}
        )
        self._values, mapping = _flat(opened.state)
        self._opened = opened
        metadata = plan.dcp_metadata(self._records)
        metadata.state_dict_metadata.update({fqn: BytesStorageMetadata() for fqn in self._values})
        metadata.planner_data = mapping
        return metadata

    def _load_value(self, planner: LoadPlanner, item: Any) -> None:
        value = Decoder().decode(self._values[item.storage_index.fqn], (item.storage_index.fqn,))
        # DCP's planners take a value in torch.save's form only. What is pickled here, and read
        # back by the planner at once, is a plain value that was just decoded: nothing of the file.
        data = io.BytesIO()
        torch.save(value, data)  # noqa: TID251 - see above
        data.seek(0)
        planner.load_bytes(item, data)


class _Refusing(dict[str, Any]):
    """Metadata of a checkpoint that could not be read: looking into it raises why."""

    def __init__(self, error: StrongroomError) -> None:
        super().__init__()
        self._error = error

    def _refuse(self, *_: object) -> NoReturn:
        raise self._error

    __contains__ = __getitem__ = __iter__ = __len__ = get = items = keys = values = _refuse


def name_of(fqn: str) -> str:
    """The stored name of DCP's name for a tensor."""
    return paths.spell(paths.from_dotted(fqn))


def _fqn_of(name: str) -> str:
    """DCP's name for a stored tensor: indices lose their brackets, as its flattening spells them."""
    return ".".join(
        part[1:-1] if part.startswith("[") and part[1:-1].isdecimal() else part for part in name.split(".")
    )


def _step_of(value: Any) -> int:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(text, str) and text.isdecimal():
        text = int(text)
    if not isinstance(text, int) or isinstance(text, bool) or not 0 <= text <= MAX_STEP:
        raise ConfigError(
            f"checkpoint_id names a step here: a number from 0 to {MAX_STEP}, got {value!r:.80}"
        )
    return text


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
    data: memoryview = host.reshape(-1).view(torch.uint8).numpy().data
    return data


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


def _flat(document: Node) -> tuple[dict[str, Node], dict[str, tuple[Any, ...]]]:
    """A document as DCP names things: values that are no tensors by name, and every name's path."""
    values: dict[str, Node] = {}
    mapping: dict[str, tuple[Any, ...]] = {}
    _flatten(document, (), values, mapping)
    return values, mapping


_TENSOR: Final = "tensor"


def _flatten(
    found: Node, path: tuple[Any, ...], values: dict[str, Node], mapping: dict[str, tuple[Any, ...]]
) -> None:
    fqn = ".".join(map(str, path))
    tag, payload = (found.get("$"), found.get("v")) if type(found) is dict else (None, None)
    pairs = payload[1:] if tag in ("module", "ordered_dict") and type(payload) is list else payload
    if tag in ("dict", "module", "ordered_dict") and type(pairs) is list and pairs:
        for key, item in pairs:
            if type(key) is str:
                _flatten(item, (*path, key), values, mapping)
    elif type(found) is list and found:
        for number, item in enumerate(found):
            _flatten(item, (*path, number), values, mapping)
    elif tag == _TENSOR:
        mapping[fqn] = path
    elif tag not in ("optimizer", "stateful", "generator", "ndarray", "per_rank"):
        values[fqn] = found
        mapping[fqn] = path
