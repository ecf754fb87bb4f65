"""The storage reader for ``dcp.load``."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
)
from torch.distributed.checkpoint.storage import StorageReader

from strongroom.auditing import NO_AUDIT, Action, Activity, Outcome
from strongroom.catalog import Catalog
from strongroom.config import load_policy
from strongroom.decoding import Decoder
from strongroom.dryrun import extents_by_file, is_part
from strongroom.errors import (
    CheckpointNotFoundError,
    ConfigError,
    IntegrityError,
    StateMismatchError,
    StrongroomError,
)
from strongroom.fetch import fetch
from strongroom.fitting import difference
from strongroom.index import Index, TensorRecord
from strongroom.metadata import dcp_metadata
from strongroom.opened import OpenedCheckpoint, open_checkpoint
from strongroom.roles import Duty, check_root, open_root
from strongroom.signing import NO_GUARD
from strongroom.values import Node
from strongroom.workers import reading_workers

if TYPE_CHECKING:
    from strongroom.stores.base import Store

from strongroom.dcp.naming import fqn_of, is_step, step_of

__all__ = ["StrongroomReader"]

_PARTS_TOLD: Final = 64
"""Files of a partial read that are told of one by one."""


class StrongroomReader(StorageReader):
    """Reads a committed checkpoint under ``dcp.load``.

    Every block is verified before it is used. There is no fall-back: DCP has bound the load to
    this checkpoint by then (`Checkpointer.restore` does fall back).

    Args:
        root: the run's root.
        step: which checkpoint; or give it to ``dcp.load`` as ``checkpoint_id``; None: the
            newest. With several ranks give it, so that all read the same one.
        security: a policy or its file's path; None: the file that ``STRONGROOM_CONFIG`` names,
            if it is set. Each rank judges and unlocks a checkpoint by itself.
        accept_older: allow one below the policy's floor.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Store,
        *,
        step: int | None = None,
        security: Any = None,
        accept_older: bool = False,
    ) -> None:
        super().__init__()
        self._policy = policy = load_policy(security)
        check_root(root, policy)
        self._guard = policy.guard if policy is not None else NO_GUARD
        self._auditor = policy.auditor if policy is not None else NO_AUDIT
        self._activity: Activity | None = None
        self._accept_older = accept_older
        self._root = root
        self._step = None if step is None else step_of(step)
        self._opened: OpenedCheckpoint | None = None
        self._failure: StrongroomError | None = None
        self._records: Mapping[str, TensorRecord] = {}
        self._values: dict[str, Node] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)
        self._opened, self._failure = None, None
        self._leave()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's view of the checkpoint.

        ``dcp.load`` swallows what this raises and goes on to complain of something else, so a
        failure is kept and raised by the call that follows, `set_up_storage_reader`.
        """
        self._leave()
        self._activity = Activity(self._auditor, Action.RESTORE)
        try:
            return self._read_metadata(self._activity)
        except StrongroomError as error:
            self._end(error)
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
        try:
            self._read(opened, plan, planner)
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    def _read(self, opened: OpenedCheckpoint, plan: LoadPlan, planner: LoadPlanner) -> None:
        if self._activity is None or self._activity.has_ended:
            # A second load by the same metadata: it reads again.
            self._activity = Activity(self._auditor, Action.RESTORE, root=opened.store.uri)
            self._activity.intend(opened.manifest.run, opened.name)
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
        read_bytes = fetch(opened, reads, self._records, workers=reading_workers(), touched=set())
        self._activity.note(size_bytes=read_bytes, tensors=len({item.storage_index.fqn for item, _ in reads}))
        if self._auditor.is_on:
            self._tell_parts(self._activity, opened, reads)
        for item, target in reads:
            planner.commit_tensor(item, target)

    def _tell_parts(self, activity: Activity, opened: OpenedCheckpoint, reads: Sequence[Any]) -> None:
        """Where a part of the checkpoint was read, which bytes of which files, as far as there are few."""
        extents = extents_by_file([(item, target) for item, target in reads], self._records)
        if not is_part(opened, extents):
            return
        activity.note(files=len(extents), is_partial=True)
        for path in sorted(extents)[:_PARTS_TOLD]:
            activity.tell(
                Outcome.SUCCESS,
                checkpoint=opened.name,
                run=opened.manifest.run,
                path=opened.record(path).path,
                byte_range=extents[path],
                details={"is_partial": True},
            )

    def _leave(self) -> None:
        """Say that what was begun went no further than to what the checkpoint says of itself."""
        if self._activity is not None:
            self._activity.note(is_read=False)
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        """Say how what was begun has ended: well, where nothing failed."""
        activity, self._activity = self._activity, None
        if activity is None:
            return
        if error is None:
            activity.succeed()
        else:
            activity.fail(error)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_step(checkpoint_id)

    def _read_metadata(self, activity: Activity) -> Metadata:
        store = open_root(self._root, self._policy, Duty.RESTORE)
        activity.about(root=store.uri)
        history = Catalog(store, self._guard.trust).history()
        if not history.has_commits:
            raise CheckpointNotFoundError(f"nothing is committed in {store.uri}: there is nothing to load")
        name = history.at_step(self._step) if self._step is not None else history.line.newest_first[0]
        activity.about(checkpoint=name)
        commit = history.commits.get(name)
        if commit is None:
            raise IntegrityError(history.damaged[name])
        activity.intend(commit.run, name)
        opened = open_checkpoint(store, commit, self._guard)
        if self._guard.floor is not None and not self._accept_older:
            self._guard.floor.check(store.uri, commit)
        self._records = _Records(opened.index)
        self._values, mapping = _flat(opened.state)
        self._opened = opened
        return dcp_metadata(self._records, self._values, planner_data=mapping)

    def _load_value(self, planner: LoadPlanner, item: Any) -> None:
        value = Decoder().decode(self._values[item.storage_index.fqn], (item.storage_index.fqn,))
        # DCP's planners take a value in torch.save's form only. What is pickled here, and read
        # back by the planner at once, is a plain value that was just decoded: nothing of the file.
        data = io.BytesIO()
        torch.save(value, data)  # noqa: TID251 - see above
        data.seek(0)
        planner.load_bytes(item, data)


class _Records(Mapping[str, TensorRecord]):
    """Stored tensors by DCP's names, aliases included."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._stored = {fqn_of(name): name for name in index.names}

    def __getitem__(self, fqn: str) -> TensorRecord:
        return self._index.tensors[self._index.aliases.get(self._stored[fqn], self._stored[fqn])]

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


class _Refusing(dict[str, Any]):
    """Metadata of a checkpoint that could not be read: looking into it raises why."""

    def __init__(self, error: StrongroomError) -> None:
        super().__init__()
        self._error = error

    def _refuse(self, *_: object) -> NoReturn:
        raise self._error

    __contains__ = __getitem__ = __iter__ = __len__ = get = items = keys = values = _refuse


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
