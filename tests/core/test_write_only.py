"""A writer that may create objects, and look at none: by the seam of roles, whatever the server enforces."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from strongroom import (
    AccessDeniedError,
    Checkpointer,
    ConfigError,
    KeepLast,
    OutcomeUnknownError,
    SaveError,
    StoreUnavailableError,
)
from strongroom.auditing import NO_AUDIT
from strongroom.catalog import Catalog
from strongroom.dcp import StrongroomWriter
from strongroom.roles import Duty, Operation
from strongroom.signing import NO_GUARD
from strongroom.stores import MemoryStore, Store
from strongroom.stores.limited import LimitedStore, limited

CREATING = {"open_writer", "write", "finish", "put", "put_if_absent", "make_durable", "abort"}
"""Operations for which a right to create objects is enough."""


class Writer:
    """Creates by its own credentials, and looks by others, if it has them."""

    name = "trainer-writer"

    def __init__(
        self, *, may_look: bool = False, run_id: str | None = None, launch: int | None = None
    ) -> None:
        self.may_look = may_look
        self.run_id = run_id
        self.launch = launch
        self.opened: list[LimitedStore] = []

    def may(self, operation: Operation, duty: Duty) -> bool:
        if duty is Duty.SAVE:
            return operation is Operation.CREATE
        return self.may_look and operation in (Operation.READ, Operation.LIST)

    def open(self, root: str | os.PathLike[str] | Store, duty: Duty) -> Store:
        assert isinstance(root, Store)

        def rule(operation: Operation, key: str) -> None:
            if not self.may(operation, duty):
                raise AccessDeniedError(f"the role {self.name} may not {operation.value} {key}")

        store = limited(root, rule)
        if duty is Duty.RESTORE:
            self.opened.append(store)
        return store

    def drop(self, duty: Duty) -> None:
        assert duty is Duty.RESTORE
        for store in self.opened:
            store.close("the credentials for restoring were dropped before the first save")


class Policy:
    digest = None
    sealing = None
    signing = None
    guard = NO_GUARD

    def __init__(self, role: Writer) -> None:
        self.role = role
        self.auditor = NO_AUDIT


def begin(store: Any, role: Writer, **options: Any) -> Checkpointer:
    return Checkpointer(store, security=Policy(role), collect_provenance=False, **options)


def test_a_right_to_create_is_all_that_saving_takes(memory: Any) -> None:
    store = memory
    with begin(store, Writer(), run_id="r1", launch=1) as ck:
        for step in (1, 2):
            ck.save(step, {"w": torch.full((8,), float(step))}).result(60)
    assert {operation for operation, _ in store.log} <= CREATING
    with Checkpointer(store) as reader:
        restored = reader.restore()
        assert restored is not None
        assert (restored.step, restored.checkpoint.launch) == (2, 1)
        assert torch.equal(restored.state["w"], torch.full((8,), 2.0))


def test_what_the_platform_gives_may_come_with_the_role() -> None:
    store = MemoryStore()
    with begin(store, Writer(run_id="r1", launch=7)) as ck:
        assert ck.save(1, {"w": torch.ones(2)}).result(60).launch == 7
    history = Catalog(store).history()
    assert history.run is not None
    assert history.run.run == "r1"


@pytest.mark.parametrize("given", ({"run_id": "r2"}, {"launch": 9}))
def test_arguments_do_not_contradict_the_role(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"was given, and the policy's role trainer-writer is for"):
        begin(MemoryStore(), Writer(run_id="r1", launch=7), **given)
    with begin(MemoryStore(), Writer(run_id="r1", launch=7), run_id="r1", launch=7) as ck:
        assert ck.save(1, {"w": torch.ones(2)}).result(60).launch == 7


@pytest.mark.parametrize(
    ("given", "missing"),
    (({}, "run_id and launch"), ({"run_id": "r"}, "its launch"), ({"launch": 1}, "its run_id")),
)
def test_a_writer_that_is_told_too_little_is_told_what_it_needs(given: dict[str, Any], missing: str) -> None:
    store = MemoryStore()
    ck = begin(store, Writer(), **given)
    with pytest.raises(AccessDeniedError, match=f"may not look.*{missing}.*platform.*restore"):
        ck.save(1, {"w": torch.ones(2)})
    ck.close()
    assert store.contents() == {}


def test_a_launch_that_is_taken_is_refused_and_nothing_of_it_is_touched() -> None:
    store = MemoryStore()
    with begin(store, Writer(), run_id="r", launch=3) as ck:
        ck.save(1, {"w": torch.ones(2)}).result(60)
    before = store.contents()
    second = begin(store, Writer(), run_id="r", launch=3)
    with pytest.raises(ConfigError, match=r"launch 3 of run r was given, and is taken.*above 3"):
        second.save(2, {"w": torch.zeros(2)})
    second.close()
    assert store.contents() == before


def test_the_next_start_outranks_the_one_before() -> None:
    store = MemoryStore()
    for launch in (1, 2):
        with begin(store, Writer(), run_id="r", launch=launch) as ck:
            ck.save(5, {"w": torch.full((2,), float(launch))}).result(60)
    with Checkpointer(store) as reader:
        restored = reader.restore()
        assert restored is not None
        assert restored.checkpoint.launch == 2


def test_what_restoring_found_is_what_the_save_goes_by(memory: Any) -> None:
    store = memory
    with Checkpointer(store, run_id="r9") as ck:
        ck.save(4, {"w": torch.ones(3)}).result(60)
    role = Writer(may_look=True)
    ck = begin(store, role)
    template = {"w": torch.zeros(3)}
    restored = ck.restore(template)
    assert restored is not None
    assert restored.step == 4
    store.log.clear()
    assert ck.save(5, {"w": torch.ones(3)}).result(60).launch == 2
    looked = [operation for operation, _ in store.log if operation not in CREATING]
    written = [place for place, (operation, _) in enumerate(store.log) if operation in CREATING]
    assert all(operation in ("list_names", "stat", "read") for operation in looked)
    last_look = max(place for place, (operation, _) in enumerate(store.log) if operation not in CREATING)
    assert last_look < written[0], "it has looked after its first write"
    with pytest.raises(AccessDeniedError, match="the role trainer-writer may not list"):
        ck.restore(template)
    with pytest.raises(AccessDeniedError):
        ck.checkpoints()
    ck.close()
    history = Catalog(store.inner).history()
    parent = history.launches[2].parent
    assert parent is not None
    assert (parent.launch, parent.step) == (1, 4)


def test_a_new_run_needs_no_id_where_the_root_could_be_looked_at() -> None:
    store = MemoryStore()
    with begin(store, Writer(may_look=True)) as ck:
        assert ck.restore() is None
        assert ck.save(1, {"w": torch.ones(1)}).result(60).launch == 1
    assert Catalog(store).history().run is not None


def test_two_that_begin_a_run_at_once_do_not_share_it_unseen() -> None:
    store = MemoryStore()
    ck = begin(store, Writer(may_look=True))
    assert ck.restore() is None
    other = Checkpointer(store, run_id="others")

    class Late(Writer):
        def drop(self, duty: Duty) -> None:
            # Between this one's look and its first write.
            other.save(1, {"w": torch.ones(1)}).result(60)
            super().drop(duty)

    late = begin(store, Late(may_look=True))
    with pytest.raises(ConfigError, match="holds a run already, whose id this process was not given"):
        late.save(1, {"w": torch.zeros(1)})
    late.close()
    ck.close()
    other.close()


def test_a_store_that_ignores_conditions_is_found_by_the_launch() -> None:
    class Careless(MemoryStore):
        def put_if_absent(self, key: str, data: Any) -> bool:
            self.plant({key: bytes(data)})
            return True

    ck = begin(Careless(), Writer(), run_id="r", launch=1)
    with pytest.raises(ConfigError, match=r"created launches/000001.json twice.*If-None-Match"):
        ck.save(1, {"w": torch.ones(1)})
    ck.close()


def test_a_commit_whose_answer_was_lost_is_the_writers_own() -> None:
    class Lossy(MemoryStore):
        """Does what it was asked, loses the answer, is asked again, and may not look."""

        def put_if_absent(self, key: str, data: Any) -> bool:
            created = super().put_if_absent(key, data)
            return created and not key.endswith("COMMIT")

    store = Lossy()
    with begin(store, Writer(), run_id="r", launch=1) as ck:
        assert ck.save(1, {"w": torch.ones(1)}).result(60).step == 1
    assert len(Catalog(store).history().commits) == 1


def test_an_unknown_outcome_stays_one() -> None:
    class Silent(MemoryStore):
        def put_if_absent(self, key: str, data: Any) -> bool:
            if key.endswith("COMMIT"):
                raise OutcomeUnknownError("no answer")
            return super().put_if_absent(key, data)

    ck = begin(Silent(), Writer(), run_id="r", launch=1)
    with pytest.raises(OutcomeUnknownError):
        ck.save(1, {"w": torch.ones(1)}).result(60)
    ck.close()


def test_a_failed_save_leaves_its_remains_where_it_may_not_remove_them(memory: Any) -> None:
    store = memory
    ck = begin(store, Writer(), run_id="r", launch=1)
    store.fail(StoreUnavailableError("no answer"), on="put", where="MANIFEST", times=1)
    with pytest.raises(SaveError, match="no answer"):
        ck.save(1, {"w": torch.ones(1)}).result(60)
    assert ck.save(2, {"w": torch.ones(1)}).result(60).step == 2
    ck.close()
    assert "delete_tree" not in {operation for operation, _ in store.log}


def test_retention_under_a_role_that_may_not_delete_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"role trainer-writer may not delete.*strongroom gc.*retention"):
        begin(MemoryStore(), Writer(), keep=KeepLast(count=2))


@pytest.mark.parametrize("number", (0, -1, True, "3", 1.0, 10**6))
def test_a_launch_that_is_none_is_refused(number: Any) -> None:
    with pytest.raises(ConfigError, match="launch must be a whole number from 1"):
        Checkpointer(MemoryStore(), launch=number)


def test_a_launch_may_be_given_to_whoever_may_look_too() -> None:
    store = MemoryStore()
    with Checkpointer(store, launch=5) as ck:
        assert ck.save(1, {"w": torch.ones(1)}).result(60).launch == 5
        ck.restore()
        # A rewind begins another turn, by the next free number.
        assert ck.save(2, {"w": torch.ones(1)}).result(60).launch == 6


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_plain_dcp_goes_by_the_role_too(memory: Any) -> None:
    from torch.distributed.checkpoint import save

    store = memory
    role = Writer(may_look=True)
    writer = StrongroomWriter(store, step=1, security=Policy(role))
    save({"w": torch.ones(4)}, storage_writer=writer, no_dist=True)
    first_write = next(place for place, (operation, _) in enumerate(store.log) if operation in CREATING)
    assert {operation for operation, _ in store.log[first_write:]} <= CREATING
    assert len(Catalog(store.inner).history().commits) == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_plain_dcp_needs_no_more_than_to_create_where_the_platform_tells_the_rest(memory: Any) -> None:
    from torch.distributed.checkpoint import save

    role = Writer(run_id="r", launch=4)
    writer = StrongroomWriter(memory, security=Policy(role), parent=None, scatter=2)
    save({"w": torch.ones(4)}, storage_writer=writer, checkpoint_id="1", no_dist=True)
    assert {operation for operation, _ in memory.log} <= CREATING
    (name,) = Catalog(memory.inner).history().commits
    assert (name.launch, name.step) == (4, 1)
    assert all(
        key.count("/") == 3
        for key in memory.keys("open_writer")
        if "safetensors" in key and "index" not in key
    )


@pytest.mark.parametrize("as_text", (True, False))
def test_a_run_that_another_process_restored_goes_on_from_there(as_text: bool) -> None:
    store = MemoryStore()
    with begin(store, Writer(), run_id="r", launch=1) as ck:
        ck.save(1, {"w": torch.ones(2)}).result(60)
        second = ck.save(2, {"w": torch.ones(2)}).result(60)
    parent = f"{second.folder}@{second.manifest_digest}" if as_text else second
    with begin(store, Writer(), run_id="r", launch=2, parent=parent) as ck:
        with pytest.raises(ConfigError, match="step 1 is lower than step 2"):
            ck.save(1, {"w": torch.ones(2)})
        ck.save(3, {"w": torch.ones(2)}).result(60)
    with Checkpointer(store) as reader:
        assert [(each.step, each.is_superseded) for each in reader.checkpoints()] == [
            (3, False),
            (2, False),
            (1, False),
        ]


@pytest.mark.parametrize(
    "parent", ("", "step-1@sha256:00", "step-000000000001-0001-0123456789abcdef", 5, "x@blake3:" + "0" * 64)
)
def test_a_parent_that_is_none_is_refused(parent: Any) -> None:
    with pytest.raises(ConfigError, match="parent must be a Checkpoint"):
        Checkpointer(MemoryStore(), parent=parent)


def test_a_store_that_tries_again_by_itself_is_told_how_long_a_commit_may_take() -> None:
    told: list[tuple[str, float]] = []

    class Patient(MemoryStore):
        def put_if_absent_within(self, key: str, data: Any, within_s: float) -> bool:
            told.append((key, within_s))
            return self.put_if_absent(key, data)

    with Checkpointer(Patient(), timeout_s=50.0) as ck:
        folder = ck.save(1, {"w": torch.ones(2)}).result(60).folder
    ((key, within_s),) = told
    assert key == f"{folder}/COMMIT"
    assert 0 < within_s <= 50.0
