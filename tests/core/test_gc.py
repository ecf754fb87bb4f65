"""Garbage as somebody sees it who is not the writer: what may go, what stays, and why."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import AccessDeniedError, Checkpointer, KeepLast, StoreUnavailableError, events, sweep
from strongroom.catalog import Catalog, History
from strongroom.errors import ConfigError, SaveError
from strongroom.keeping import Keeper, check_may_remove, find_garbage
from strongroom.layout import CheckpointName
from strongroom.retention import KeepAll, RetentionPolicy
from strongroom.roles import Duty, Operation
from strongroom.stores.limited import limited
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom.stores.offers import Unfinished, Upload
from strongroom.sweep import Plan

Begin = Callable[..., Checkpointer]
STATE = {"t": torch.ones(3)}
HOUR_NS = 3600 * 10**9


class Uploading(MemoryStore):
    """In memory, with uploads that somebody began: what an object store offers besides."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[Unfinished] = []

    def begin_upload(self, key: str, *, length_bytes: int) -> Upload:
        raise NotImplementedError

    def resume_upload(self, key: str, *, length_bytes: int, token: str) -> Upload | None:
        return None

    def unfinished_uploads(self) -> list[Unfinished]:
        return list(self.uploads)

    def abort_upload(self, upload: Unfinished) -> None:
        self.uploads.remove(upload)


def upload(folder: str, *, began_ns: int) -> Unfinished:
    key = f"{folder}/data/00000-00.safetensors"
    return Unfinished(key=key, token=f"of {folder}", began_ns=began_ns)


def save(checkpointer: Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save(step, STATE)
    checkpointer.wait(60)


def look(store: Any, keep: RetentionPolicy | None = None, *, later_s: float = 0.0, **options: Any) -> Plan:
    now_ns = time.time_ns() + int(later_s * 10**9)
    return find_garbage(store, Catalog(store).history(), keep, now_ns=now_ns, **options)


def carry_out(store: Any, plan: Plan) -> list[sweep.Outcome]:
    return [sweep.remove(store, removal) for removal in plan.removals]


def going(plan: Plan) -> list[tuple[str, int]]:
    return [(removal.kind, removal.name.step) for removal in plan.removals]


def reasons(plan: Plan) -> dict[int, str]:
    return {decision.name.step: decision.reason for decision in plan.kept}


def leave_uncommitted(root: Path, of_step: int, *, step: int, launch: int = 1) -> Path:
    """What a killed process leaves of a save."""
    (whole,) = root.glob(f"step-{of_step:012d}-*")
    left = root / f"step-{step:012d}-{launch:04d}-0123456789abcdef"
    shutil.copytree(whole, left)
    (left / "COMMIT").unlink()
    return left


# -------------------------------------------------------------------------------------- retention


def test_without_a_policy_no_checkpoint_goes(root: Path, begin: Begin) -> None:
    save(begin(root), 1, 2, 3)
    plan = look(LocalStore(root), later_s=10**9)
    assert plan.removals == ()
    assert sorted(reasons(plan)) == [1, 2, 3]


def test_a_policy_lets_the_oldest_go_with_their_sizes_and_a_reason(root: Path, begin: Begin) -> None:
    save(begin(root), 1, 2, 3)
    store = LocalStore(root)
    plan = look(store, KeepLast(count=1))
    assert going(plan) == [("checkpoint", 2), ("checkpoint", 1)]
    assert [removal.reason for removal in plan.removals] == ["not kept by KeepLast(count=1)"] * 2
    sizes = {checkpoint.step: checkpoint.size_bytes for checkpoint in begin(root).checkpoints()}
    assert [removal.size_bytes for removal in plan.removals] == [sizes[2], sizes[1]]
    assert all(outcome.error is None for outcome in carry_out(store, plan))
    assert [path.name.split("-")[1] for path in root.glob("step-*")] == ["000000000003"]


def test_looking_removes_nothing(store: Any, begin: Begin) -> None:
    save(begin(store), 1, 2)
    store.log.clear()
    assert look(store, KeepLast(count=1)).removals
    assert not [name for name, _ in store.log if name.startswith(("delete", "put", "open_writer"))]


def test_the_newest_and_the_newest_verified_stay_whatever_the_policy(root: Path, begin: Begin) -> None:
    class KeepNothing:
        def keep(self, ranked: Sequence[CheckpointName]) -> Collection[CheckpointName]:
            return ()

    save(begin(root), 1, 2, 3)
    later = begin(root)
    later.restore(step=2)
    save(later, 3, 4)
    plan = look(LocalStore(root), KeepNothing())
    assert reasons(plan)[4] == "the newest checkpoint"
    assert "verified by reading" in reasons(plan)[2]
    assert [step for _, step in going(plan)] == [3, 1, 3]


def test_what_a_writer_has_just_gone_on_from_stays_before_its_first_commit(
    store: Any, root: Path, begin: Begin
) -> None:
    save(begin(root), 1, 2, 3, 4)
    begin(root).restore(step=3)
    other = begin(root)
    other.restore(step=3)
    save(other, 4)
    rewinding = begin(store)
    rewinding.restore(step=1)
    under_way = store.hold(on="put_if_absent", where="COMMIT")
    handle = rewinding.save(2, STATE)
    under_way.wait_reached()
    # Step 3 was verified too, and is newer: without the writer's launch step 1 would be nobody's.
    plan = look(LocalStore(root), KeepLast(count=1))
    assert "launch 3 goes on from it" in reasons(plan)[1]
    carry_out(LocalStore(root), plan)
    under_way.open()
    assert handle.result(60).step == 2
    assert begin(root).restore().step == 2


def test_a_damaged_commit_is_left_alone_and_takes_nobodys_place(root: Path, begin: Begin) -> None:
    save(begin(root), 1, 2, 3)
    (commit,) = root.glob("step-000000000003-*/COMMIT")
    commit.write_bytes(b"{}")
    plan = look(LocalStore(root), KeepLast(count=1), later_s=10**9)
    assert going(plan) == [("checkpoint", 1)]
    assert "counts for nothing, and is left alone" in reasons(plan)[3]
    assert reasons(plan)[2] == "the newest checkpoint"


def test_what_is_held_stays(root: Path, begin: Begin) -> None:
    save(begin(root), 1, 2, 3)

    def held(history: History) -> dict[CheckpointName, str]:
        return {name: "on no other tier yet" for name in history.commits if name.step == 1}

    plan = look(LocalStore(root), KeepLast(count=1), held=held)
    assert going(plan) == [("checkpoint", 2)]
    assert reasons(plan)[1] == "on no other tier yet"


def test_a_keeper_frees_a_fast_tier_only_of_what_is_held_no_more(
    root: Path, begin: Begin, clock: Any, listener: Any
) -> None:
    store = LocalStore(root)
    catalog = Catalog(store)
    waiting = {1, 2}

    def held(history: History) -> dict[CheckpointName, str]:
        return {name: "on no other tier yet" for name in history.commits if name.step in waiting}

    keeper = Keeper(
        store,
        catalog,
        KeepLast(count=1),
        clock=clock.clock,
        emitter=events.Emitter([listener]),
        held=held,
    )
    checkpointer = begin(store)
    for step in (1, 2, 3):
        save(checkpointer, step)
    (newest,) = [commit for name, commit in catalog.history().commits.items() if name.step == 3]
    keeper.retain(newest, ())
    assert sorted(name.step for name in catalog.history().commits) == [1, 2, 3]
    waiting.remove(1)
    keeper.retain(newest, ())
    assert sorted(name.step for name in catalog.history().commits) == [2, 3]
    assert [event.step for event in listener.of(events.CheckpointRemoved)] == [1]


# ---------------------------------------------------------------------------------------- orphans


def test_what_a_dead_save_left_goes_past_twice_its_deadline_and_not_before(root: Path, begin: Begin) -> None:
    save(begin(root, timeout_s=100), 1)
    left = leave_uncommitted(root, 1, step=2)
    store = LocalStore(root)
    plan = look(store, later_s=150)
    assert plan.removals == ()
    assert "perhaps yet to be: its deadline is 100 s" in reasons(plan)[2]
    plan = look(store, later_s=250)
    assert going(plan) == [("orphan", 2)]
    files = [path for path in left.rglob("*") if path.is_file()]
    assert plan.removals[0].size_bytes == sum(path.stat().st_size for path in files)
    assert "never committed, and past twice its deadline of 100 s" in plan.removals[0].reason
    carry_out(store, plan)
    assert not left.exists()


def test_a_folder_that_is_still_being_filled_stays_however_old_its_first_file_is(
    root: Path, begin: Begin
) -> None:
    save(begin(root, timeout_s=100), 1)
    left = leave_uncommitted(root, 1, step=2)
    for path in (left / "data").iterdir():
        if path.name != "state.json":
            _age(path, 1000)
    # As when a checkpoint is brought to this tier, which may take longer than any save.
    assert look(LocalStore(root)).removals == ()
    _age(left / "data" / "state.json", 1000)
    assert going(look(LocalStore(root))) == [("orphan", 2)]


def _age(path: Path, seconds: float) -> None:
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def test_a_sweep_that_was_cut_short_is_gone_on_with(store: Any, root: Path, begin: Begin) -> None:
    save(begin(root, timeout_s=1), 1, 2)
    store.fail(StoreUnavailableError("gone"), on="delete_tree", times=1)
    (outcome,) = carry_out(store, look(store, KeepLast(count=1)))
    assert (outcome.error, outcome.is_half_done) == ("gone", True)
    plan = look(store, KeepLast(count=1), later_s=60)
    assert going(plan) == [("orphan", 1)]
    carry_out(store, plan)
    assert [path.name.split("-")[1] for path in root.glob("step-*")] == ["000000000002"]


def test_what_is_committed_after_all_is_kept() -> None:
    """It was committed late, or hidden by something while the root was looked at."""
    store = MemoryStore()
    with Checkpointer(store) as checkpointer:
        save(checkpointer, 1)
    (name,) = Catalog(store).history().commits
    commit = store.read(name.commit_key, limit_bytes=1 << 20)
    store.delete(name.commit_key)
    plan = find_garbage(store, Catalog(store).history(), None, now_ns=time.time_ns() + 24 * HOUR_NS)
    (removal,) = plan.removals
    store.put(name.commit_key, commit)
    outcome = sweep.remove(store, removal)
    assert outcome.error is not None
    assert "committed after all" in outcome.error
    assert Checkpointer(store).restore() is not None
    store.delete(name.commit_key)
    assert sweep.remove(store, removal).error is None
    assert store.list_names(name.folder) == []


def test_one_removal_that_fails_leaves_the_checkpoint_whole_and_stops_no_other(
    store: Any, root: Path, begin: Begin
) -> None:
    save(begin(root), 1, 2, 3)
    store.fail(AccessDeniedError("no delete"), on="delete", times=1)
    outcomes = carry_out(store, look(store, KeepLast(count=1)))
    assert [(outcome.error, outcome.is_half_done) for outcome in outcomes] == [
        ("no delete", False),
        (None, False),
    ]
    assert [checkpoint.step for checkpoint in begin(root).checkpoints()] == [3, 2]
    assert begin(root).restore(step=2).step == 2


def test_a_link_in_what_is_left_leads_nowhere_and_stops_no_other_removal(root: Path, begin: Begin) -> None:
    save(begin(root, timeout_s=1), 1)
    linked, other = (leave_uncommitted(root, 1, step=step) for step in (2, 3))
    (root.parent / "mine.txt").write_text("mine")
    (linked / "data" / "link").symlink_to(root.parent / "mine.txt")
    plan = look(LocalStore(root), later_s=60)
    assert going(plan) == [("orphan", 3)]
    assert "left alone" in reasons(plan)[2]
    assert "symbolic link" in reasons(plan)[2]
    carry_out(LocalStore(root), plan)
    assert (linked.exists(), other.exists()) == (True, False)


def test_names_that_are_no_keys_stand_in_nobodys_way(root: Path, begin: Begin) -> None:
    save(begin(root, timeout_s=1), 1)
    left = leave_uncommitted(root, 1, step=2)
    (left / "data" / "notes of mine.txt").touch()
    (left / "a folder").mkdir()
    plan = look(LocalStore(root), later_s=60)
    assert going(plan) == [("orphan", 2)]
    carry_out(LocalStore(root), plan)
    assert not left.exists()


def test_who_may_list_and_not_read_finds_the_same(root: Path, begin: Begin) -> None:
    save(begin(root, timeout_s=1), 1)
    leave_uncommitted(root, 1, step=2)

    def rule(operation: Operation, key: str) -> None:
        if operation is Operation.READ and "/data/" in key:
            raise AccessDeniedError(key)

    store = limited(LocalStore(root), rule)
    assert look(store, later_s=60).removals == look(LocalStore(root), later_s=60).removals
    details = LocalStore(root).details("")
    assert {key: LocalStore(root).stat(key) for key in details} == details
    assert len(details) == sum(path.is_file() for path in root.rglob("*"))


# ---------------------------------------------------------------------------------------- uploads


def test_uploads_go_once_nobody_can_be_going_on_with_them(begin: Begin) -> None:
    store = Uploading()
    save(begin(store, timeout_s=100), 1)
    now_ns = time.time_ns()
    dead = upload("step-000000000002-0001-0123456789abcdef", began_ns=now_ns - 201 * 10**9)
    under_way = upload("step-000000000003-0001-0123456789abcdef", began_ns=now_ns - 150 * 10**9)
    # The record of its launch is lost, so that its deadline is anybody's guess.
    unknown = upload("step-000000000003-0002-0123456789abcdef", began_ns=now_ns - 47 * HOUR_NS)
    not_ours = upload("films", began_ns=0)
    store.uploads = [dead, under_way, unknown, not_ours]
    plan = look(store)
    assert [(removal.kind, removal.path) for removal in plan.removals] == [("upload", dead.key)]
    assert plan.removals[0].size_bytes is None
    carry_out(store, plan)
    assert store.uploads == [under_way, unknown, not_ours]
    assert [removal.upload for removal in look(store, later_s=2 * 3600).removals] == [under_way, unknown]


def test_an_upload_that_a_later_launch_may_be_going_on_with_has_its_time(begin: Begin) -> None:
    store = Uploading()
    save(begin(store, timeout_s=1), 1)
    later = begin(store, timeout_s=1000)
    later.restore()
    save(later, 2)
    store.uploads = [upload("step-000000000001-0001-0123456789abcdef", began_ns=time.time_ns())]
    assert look(store, later_s=1900).removals == ()
    assert len(look(store, later_s=2100).removals) == 1


def test_a_keeper_ends_dead_uploads_after_a_commit_and_leaves_its_own(begin: Begin, listener: Any) -> None:
    store = Uploading()
    checkpointer = begin(store, timeout_s=100, keep=KeepAll(), events=[listener])
    save(checkpointer, 1)
    folder = checkpointer.checkpoints()[0].folder
    dead = upload("step-000000000000-0001-0123456789abcdef", began_ns=0)
    store.uploads = [dead]
    save(checkpointer, 2)
    assert store.uploads == []
    (event,) = listener.of(events.OrphanRemoved)
    assert event.folder == dead.key
    assert folder in {checkpoint.folder for checkpoint in checkpointer.checkpoints()}


def test_a_store_that_will_not_list_its_uploads_is_told_and_retention_is_done(
    begin: Begin, listener: Any
) -> None:
    class Closed(Uploading):
        def unfinished_uploads(self) -> list[Unfinished]:
            raise AccessDeniedError("no listing of uploads")

    store = Closed()
    save(begin(store, keep=KeepLast(count=1), events=[listener]), 1, 2)
    assert [checkpoint.step for checkpoint in begin(store).checkpoints()] == [2]
    told = "it is not known whether there are unfinished uploads: no listing of uploads"
    assert {event.reason for event in listener.of(events.RemovalFailed)} == {told}
    plan = look(store, KeepLast(count=1), later_s=10**9)
    assert plan.unknown == ("whether there are unfinished uploads: no listing of uploads",)


# ---------------------------------------------------------------------------------------- who may


class Someone:
    """A role that may or may not delete."""

    name = "someone"
    run_id = None
    launch = None

    def __init__(self, *, may_delete: bool) -> None:
        self._may_delete = may_delete

    def may(self, operation: Operation, duty: Duty) -> bool:
        return operation is not Operation.DELETE or (self._may_delete and duty is Duty.SAVE)

    def open(self, root: Any, duty: Duty) -> Any:
        raise NotImplementedError

    def drop(self, duty: Duty) -> None:
        raise NotImplementedError


def test_who_may_not_delete_is_sent_to_the_command_instead_of_keeping_a_policy() -> None:
    check_may_remove(None)
    check_may_remove(Someone(may_delete=True))
    with pytest.raises(ConfigError, match=r"role someone may not delete.*`strongroom gc ROOT --keep-last N`"):
        check_may_remove(Someone(may_delete=False))


def test_a_save_under_way_survives_the_command(store: Any, root: Path, begin: Begin) -> None:
    checkpointer = begin(store)
    save(checkpointer, 1, 2)
    under_way = store.hold(on="put_if_absent", where="COMMIT")
    handle = checkpointer.save(3, STATE)
    under_way.wait_reached()
    plan = look(LocalStore(root), KeepLast(count=1))
    assert going(plan) == [("checkpoint", 1)]
    carry_out(LocalStore(root), plan)
    under_way.open()
    try:
        assert handle.result(60).step == 3
    except SaveError as error:  # pragma: no cover
        pytest.fail(str(error))
    assert begin(root).restore().step == 3
