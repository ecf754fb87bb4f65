"""Whatever happens to a run, in whatever order: a model that is simple enough to be right says what is left.

Hypothesis makes up histories of several processes at one root: saves, saves that fail at some
operation, resumes, rewinds, processes that begin and that were thought dead, flipped bits and lost
files. After each step a new process must list and restore exactly what the model expects.

``HYPOTHESIS_PROFILE=deep pytest -o faulthandler_timeout=0`` makes up a hundred times as many, for
half an hour or so.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from crash_states import TestClock, age, assert_is_state_at, numbers_from, state_at
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strongroom import Checkpointer, KeepLast
from strongroom.canonical import decode
from strongroom.errors import (
    FencedError,
    IntegrityError,
    NoWholeCheckpointError,
    OutcomeUnknownError,
    RollbackError,
    SaveError,
    StoreError,
    StrongroomError,
)
from strongroom.events import Event, LaunchClaimed
from strongroom.layout import COMMIT, LAUNCHES, RUN, CheckpointName
from strongroom.manifest import LAUNCH_BOUNDS
from strongroom.restore import Restored
from strongroom.stores.base import Store
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom.testing import Fault, FaultyStore

_TIMEOUT_S = 600
_MAX_FALLBACK = 2


class Claim:
    """Hears which launch a process has."""

    launch: int | None = None

    def emit(self, told: Event) -> None:
        if isinstance(told, LaunchClaimed):
            self.launch = told.launch


@dataclass
class Process:
    """A checkpointer, and what it should have in mind."""

    checkpointer: Checkpointer
    store: FaultyStore
    keep: int
    claim: Claim
    restored: CheckpointName | None = None
    newest: CheckpointName | None = None
    verified: set[CheckpointName] = field(default_factory=set)

    @property
    def floor(self) -> int:
        """The step that this process has reached."""
        reached = self.newest or self.restored
        return reached.step if reached is not None else 0


@dataclass(frozen=True)
class Record:
    """A checkpoint that was committed: who saved it, and its files as they were then."""

    writer: int
    files: dict[str, bytes]


class AnyHistory(RuleBasedStateMachine):
    """A root, the processes that use it, and the model: ``committed``."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = TestClock()
        self.draw = numbers_from(1)
        self.writers = itertools.count(1)
        self.committed: dict[CheckpointName, Record] = {}
        self.processes: list[Process] = []
        self.store = self.make_store()

    # What a subclass decides: where the root is, and how to reach behind the store.

    def make_store(self) -> Store:
        raise NotImplementedError

    def contents(self) -> dict[str, bytes]:
        raise NotImplementedError

    def overwrite(self, key: str, data: bytes) -> None:
        raise NotImplementedError

    def let_time_pass(self) -> None:
        raise NotImplementedError

    # The model. It is asked of a root's contents, since they may be damaged for a while.

    def parents(self, contents: dict[str, bytes]) -> dict[int, CheckpointName | None]:
        """Each launch's parent, as its record says."""
        parents: dict[int, CheckpointName | None] = {}
        for key, data in contents.items():
            if key.startswith(f"{LAUNCHES}/"):
                record: Any = decode(data, key, LAUNCH_BOUNDS)
                above = record["parent"]
                parents[record["launch"]] = above and CheckpointName(
                    launch=above["launch"], step=above["step"], attempt=above["attempt"]
                )
        return parents

    def ranked(self, contents: dict[str, bytes]) -> tuple[list[CheckpointName], list[CheckpointName]]:
        """The line newest first, and what it has left behind."""
        parents = self.parents(contents)
        rest = sorted(self.committed, reverse=True)
        line: list[CheckpointName] = []
        launch, top = (rest[0].launch if rest else 0), 10**12
        while launch:
            line += [name for name in rest if name.launch == launch and name.step <= top]
            parent = parents[launch]
            launch, top = (parent.launch, parent.step) if parent else (0, 0)
        return line, [name for name in rest if name not in line]

    def is_whole(self, name: CheckpointName, contents: dict[str, bytes]) -> bool:
        """Whether no file of a checkpoint was touched since it was committed."""
        return _files_of(name, contents) == self.committed[name].files

    def has_its_commit(self, name: CheckpointName, contents: dict[str, bytes]) -> bool:
        return contents[name.commit_key] == self.committed[name].files[COMMIT]

    def expected(
        self, contents: dict[str, bytes]
    ) -> tuple[CheckpointName | None, list[int], type[StrongroomError] | None]:
        """What a resume gives: a checkpoint, after skipping these; or an error."""
        skipped: list[int] = []
        for name in self.ranked(contents)[0]:
            if self.is_whole(name, contents):
                return name, skipped, None
            skipped.append(name.step)
            if len(skipped) > _MAX_FALLBACK:
                return None, skipped, RollbackError
        if not self.committed and any(self.parents(contents).values()):
            # A launch went on from a checkpoint, of which the commit is gone: it was taken away.
            return None, skipped, RollbackError
        return None, skipped, NoWholeCheckpointError if skipped else None

    def let_go(
        self, process: Process, new: CheckpointName, before: dict[str, bytes], after: dict[str, bytes]
    ) -> list[CheckpointName]:
        """What retention removes after a commit: whatever is wrong with their data, it cannot see."""
        line, left_behind = self.ranked(after)
        readable = [name for name in line + left_behind if name == new or self.has_its_commit(name, before)]
        verified = process.verified | {parent for parent in self.parents(after).values() if parent}
        kept = {*readable[: process.keep], *[name for name in readable if name in verified][:1]}
        return [name for name in readable if name not in kept]

    # Processes

    @initialize(keep=st.integers(1, 4), steps=st.lists(st.integers(1, 2), min_size=1, max_size=4))
    def the_first_process_begins(self, keep: int, steps: list[int]) -> None:
        self.a_process_begins(keep=keep, resumes=False)
        for ahead in steps:
            assert self._save(self.processes[0], self.processes[0].floor + ahead) is None

    @precondition(lambda self: len(self.processes) < 4)
    @rule(keep=st.integers(1, 4), resumes=st.booleans())
    def a_process_begins(self, keep: int, resumes: bool) -> None:
        store, claim = FaultyStore(self.store), Claim()
        process = Process(
            checkpointer=Checkpointer(
                store,
                keep=KeepLast(count=keep),
                timeout_s=_TIMEOUT_S,
                max_fallback=_MAX_FALLBACK,
                clock=self.clock.clock,
                draw=self.draw,
                events=[claim],
            ),
            store=store,
            keep=keep,
            claim=claim,
        )
        self.processes.append(process)
        if resumes:
            self._restore(process)

    @precondition(lambda self: len(self.processes) > 1)
    @rule(data=st.data())
    def a_process_ends(self, data: st.DataObject) -> None:
        self.processes.remove(data.draw(st.sampled_from(self.processes)))

    @rule(data=st.data())
    def a_process_resumes(self, data: st.DataObject) -> None:
        self._restore(data.draw(st.sampled_from(self.processes)))

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def a_process_rewinds(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from(self.processes))
        step = data.draw(st.sampled_from(sorted({name.step for name in self.committed})))
        contents = self.contents()
        line, left_behind = self.ranked(contents)
        name = next(name for name in line + left_behind if name.step == step)
        if self.is_whole(name, contents):
            self._is_restored(process, process.checkpointer.restore(step=step), name)
        else:
            with pytest.raises(IntegrityError):
                process.checkpointer.restore(step=step)

    def _restore(self, process: Process) -> None:
        name, skipped, error = self.expected(self.contents())
        event(f"a resume: {error.__name__ if error else f'{len(skipped)} skipped' if name else 'nothing'}")
        if error is not None:
            with pytest.raises(error):
                process.checkpointer.restore()
            return
        restored = process.checkpointer.restore()
        if name is None:
            assert restored is None
            return
        assert restored is not None
        assert [step for step, _ in restored.skipped] == skipped
        self._is_restored(process, restored, name)

    def _is_restored(self, process: Process, restored: Restored | None, name: CheckpointName) -> None:
        self._assert_is(restored, name)
        process.restored, process.claim.launch, process.newest = name, None, None
        process.verified.add(name)

    def _assert_is(self, restored: Restored | None, name: CheckpointName) -> None:
        assert restored is not None
        assert restored.checkpoint.folder == name.folder
        assert_is_state_at(restored.state, name.step, writer=self.committed[name].writer)

    # Saves

    @rule(data=st.data(), ahead=st.integers(0, 2))
    def a_process_saves(self, data: st.DataObject, ahead: int) -> None:
        process = data.draw(st.sampled_from(self.processes))
        is_fenced = process.claim.launch is not None and process.claim.launch < max(
            self.parents(self.contents())
        )
        is_there = process.newest is not None and ahead == 0
        error = self._save(process, process.floor + ahead)
        assert isinstance(error, FencedError) == (is_fenced and not is_there)
        assert error is None or is_fenced

    @rule(keep=st.integers(1, 4), steps=st.lists(st.integers(1, 2), min_size=1, max_size=3))
    def a_new_process_resumes_and_saves(self, keep: int, steps: list[int]) -> None:
        """What happens most: the others are zombies from then on, and may not know it."""
        if len(self.processes) > 3:
            self.processes.pop(0)
        if self.expected(self.contents())[2] is None:
            self.a_process_begins(keep=keep, resumes=True)
            for ahead in steps:
                assert self._save(self.processes[-1], self.processes[-1].floor + ahead) is None

    @rule(
        data=st.data(),
        ahead=st.integers(0, 2),
        after=st.integers(0, 40),
        fault=st.sampled_from(Fault),
        lasting=st.booleans(),
    )
    def a_save_meets_a_fault(
        self, data: st.DataObject, ahead: int, after: int, fault: Fault, lasting: bool
    ) -> None:
        process = data.draw(st.sampled_from(self.processes))
        store: Any = process.store
        store.fail_at, store.fault, store.lasting = len(store.operations) + 1 + after, fault, lasting
        error = self._save(process, process.floor + ahead)
        assert error is None or isinstance(error, FencedError | SaveError | StoreError)
        store.fail_at = None

    def _save(self, process: Process, step: int) -> StrongroomError | None:
        """Save, and let the model follow; the failure that the process was told of, if any."""
        writer = next(self.writers)
        before = self.contents()
        first = len(process.store.operations)
        is_there = process.newest is not None and process.newest.step == step
        name: CheckpointName | None = None
        failure: StrongroomError | None = None
        try:
            handle = process.checkpointer.save(step, state_at(step, writer=writer))
            saved = handle.result()
        except StrongroomError as error:
            failure = error
        else:
            assert (handle.skipped is not None) == is_there
            name = None if is_there else CheckpointName.parse(saved.folder)
        process.checkpointer.wait()
        event(f"a save: {'there' if is_there else type(failure).__name__ if failure else 'committed'}")
        failed = [operation for operation in process.store.operations[first:] if operation.failed]
        after = self.contents()
        if process.claim.launch is not None:
            assert self.parents(after)[process.claim.launch] == process.restored
        if name is not None:
            process.newest = name
            self.committed[name] = Record(writer, _files_of(name, after))
            for gone in self.let_go(process, name, before, after):
                event("retention lets one go")
                if failed and gone.commit_key in after:
                    continue
                assert gone.commit_key not in after
                del self.committed[gone]
        lost = [o.key for o in failed if o.name == "put_if_absent" and o.key.endswith(f"/{COMMIT}")]
        if lost and process.store.fault is Fault.ANSWER_LOST:
            event("a commit whose answer was lost")
            # Nobody was told, and it stands all the same.
            assert isinstance(failure, OutcomeUnknownError)
            standing = CheckpointName.parse(lost[0].removesuffix(f"/{COMMIT}"))
            assert standing is not None
            self.committed[standing] = Record(writer, _files_of(standing, after))
        return failure

    # Damage

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def a_bit_flips(self, data: st.DataObject) -> None:
        key = self._some_file(data)
        if content := self.contents()[key]:
            event(f"a bit flips in {key.rpartition('/')[2]}")
            self.overwrite(key, _flipped(content, data.draw(st.integers(0, 8 * len(content) - 1))))

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def a_bit_of_a_tensor_flips(self, data: st.DataObject) -> None:
        """What nothing but a digest can tell from training: in the newest, or the one before it."""
        contents = self.contents()
        name = data.draw(st.sampled_from(self.ranked(contents)[0][:2]))
        key = f"{name.folder}/data/00000-00.safetensors"
        if content := contents.get(key):
            event("a bit of a tensor flips")
            # Tensors stand at the end of a shard, some three hundred bytes of them.
            bit = 8 * len(content) - data.draw(st.integers(1, 8 * 300))
            self.overwrite(key, _flipped(content, bit))

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def a_file_is_lost(self, data: st.DataObject) -> None:
        key = self._some_file(data)
        self.store.delete(key)
        if key.endswith(f"/{COMMIT}"):
            # Without it nothing tells it from a save that died.
            self.committed = {
                name: record for name, record in self.committed.items() if name.commit_key != key
            }

    def _some_file(self, data: st.DataObject) -> str:
        line, left_behind = self.ranked(self.contents())
        name = data.draw(st.sampled_from(line + left_behind))
        return f"{name.folder}/{data.draw(st.sampled_from(sorted(_files_of(name, self.contents()))))}"

    @precondition(lambda self: RUN in self.contents())
    @rule(data=st.data(), is_lost=st.booleans())
    def the_runs_own_records_are_damaged_for_a_while(self, data: st.DataObject, is_lost: bool) -> None:
        """Whatever they say, what comes back is a checkpoint that is whole, and the right one."""
        contents = self.contents()
        key = data.draw(st.sampled_from(sorted(key for key in contents if not key.startswith("step-"))))
        if is_lost:
            self.store.delete(key)
        else:
            self.overwrite(
                key, _flipped(contents[key], data.draw(st.integers(0, 8 * len(contents[key]) - 1)))
            )
        name, _, _ = self.expected(contents)
        try:
            restored = self._new().restore()
        except (IntegrityError, RollbackError):
            pass
        else:
            if name is None:
                assert restored is None
            else:
                self._assert_is(restored, name)
        self.overwrite(key, contents[key])

    @rule()
    def hours_pass(self) -> None:
        self.let_time_pass()

    # What must hold

    def _new(self) -> Checkpointer:
        return Checkpointer(self.store, max_fallback=_MAX_FALLBACK)

    @invariant()
    def a_new_process_lists_what_was_committed_and_nothing_else(self) -> None:
        contents = self.contents()
        line, left_behind = self.ranked(contents)
        expected = [
            (name.folder, name in left_behind)
            for name in line + left_behind
            if self.has_its_commit(name, contents)
        ]
        seen = [(found.folder, found.is_superseded) for found in self._new().checkpoints()]
        assert seen == expected

    @invariant()
    def a_new_process_resumes_from_the_newest_whole_one(self) -> None:
        store = FaultyStore(self.store)
        self._restore(Process(checkpointer=self._new(), store=store, keep=1, claim=Claim()))


def _files_of(name: CheckpointName, contents: dict[str, bytes]) -> dict[str, bytes]:
    start = f"{name.folder}/"
    return {key.removeprefix(start): data for key, data in contents.items() if key.startswith(start)}


def _flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


class AnyHistoryInMemory(AnyHistory):
    store: MemoryStore

    def make_store(self) -> Store:
        return MemoryStore(clock_ns=self.clock.now_ns)

    def contents(self) -> dict[str, bytes]:
        return self.store.contents()

    def overwrite(self, key: str, data: bytes) -> None:
        self.store.plant({key: data})

    def let_time_pass(self) -> None:
        self.clock.seconds += 2 * _TIMEOUT_S + 1


class AnyHistoryOnDisk(AnyHistory):
    store: LocalStore

    def make_store(self) -> Store:
        self.folder = Path(tempfile.mkdtemp(prefix="any-history-"))
        return LocalStore(self.folder / "run")

    def contents(self) -> dict[str, bytes]:
        root = self.folder / "run"
        return {
            str(path.relative_to(root)): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }

    def overwrite(self, key: str, data: bytes) -> None:
        path = self.folder / "run" / key
        # A new file, as a copy from elsewhere would be: times alone may be too coarse to show a change.
        changed = path.with_name(f".{path.name}.changed")
        changed.write_bytes(data)
        changed.replace(path)

    def let_time_pass(self) -> None:
        age(self.folder)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)


_ASKED = settings.default.max_examples
_IS_DEEP = _ASKED > 100

pytestmark = pytest.mark.timeout(7200 if _IS_DEEP else 300)


def _examples(count: int) -> settings:
    """Few by default; as many as a profile asks for, where it asks for many."""
    return settings(
        max_examples=_ASKED if _IS_DEEP else count,
        stateful_step_count=40,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


TestAnyHistoryInMemory = AnyHistoryInMemory.TestCase
TestAnyHistoryInMemory.settings = _examples(30)
TestAnyHistoryOnDisk = AnyHistoryOnDisk.TestCase
TestAnyHistoryOnDisk.settings = _examples(8)
