"""Plain ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` over sealed checkpoints."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import sealed_ranks
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from strongroom import (
    Checkpointer,
    IntegrityError,
    KeyServiceError,
    NoKeyError,
    StrongroomReader,
    StrongroomWriter,
    UnsealedError,
)
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom.verify import verify
from strongroom_security import SecurityPolicy

# The keeper of keys, and the store that watches, are those of the tests of sealing.
sys.path.append(str(Path(__file__).parent.parent / "security"))

from checkpoints import Keeper
from sealed_saves import MIB, SEGMENT, Needles, Watched, assert_same, is_shard, policy_of, raw, write_policy

# DCP tells every process that is alone that it takes it to be alone.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*unavailable")


def no_dist(function: Any) -> dict[str, bool]:
    return {"no_dist": True} if "no_dist" in inspect.signature(function).parameters else {}


def save(state: dict[str, Any], writer: StrongroomWriter, step: int) -> None:
    dcp.save(state, checkpoint_id=str(step), storage_writer=writer, **no_dist(dcp.save))


def load(state: dict[str, Any], reader: StrongroomReader) -> dict[str, Any]:
    dcp.load(state, storage_reader=reader, **no_dist(dcp.load))
    return state


def state() -> dict[str, Any]:
    return {
        "model": {
            "weight_that_can_be_told": torch.randn(300, 700),
            "half": torch.zeros(5, dtype=torch.bfloat16),
        },
        "extra": {"epoch": 3, "name": "a name that can be told", "list": [torch.ones(2), 2.5]},
    }


def like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 9)
    if isinstance(value, dict):
        return {key: like(item) for key, item in value.items()}
    return [like(item) for item in value] if isinstance(value, list) else "to be replaced"


def holds(error: BaseException, kind: type[BaseException]) -> bool:
    failures = getattr(error, "failures", None)
    causes = [cause[0] for cause in failures.values()] if failures else [error]
    return any(isinstance(cause, kind) for cause in causes)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return write_policy(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.mark.parametrize("digest", ("blake3", "sha256"))
def test_what_dcp_seals_dcp_loads_and_the_checkpointer_restores(
    digest: str, root: Path, policy: Path
) -> None:
    expected = state()
    save(expected, StrongroomWriter(root, security=policy, digest=digest), 5)
    assert_same(load(like(expected), StrongroomReader(root, security=policy)), expected)
    restored = Checkpointer(root, security=policy).restore()
    assert restored is not None
    assert_same(restored.state, expected)
    report = verify(LocalStore(root), guard=SecurityPolicy.load(policy).guard)
    assert report.verdict == "whole"
    assert not report.checkpoints[0].is_closed


def test_what_the_checkpointer_seals_dcp_loads(root: Path, policy: Path) -> None:
    expected = state()
    with Checkpointer(root, security=policy) as checkpointer:
        checkpointer.save(2, expected).result()
    assert_same(load(like(expected), StrongroomReader(root, step=2, security=policy)), expected)


def test_nothing_is_in_clear(root: Path, policy: Path) -> None:
    expected = state()
    save(expected, StrongroomWriter(root, security=policy), 5)
    needles = Needles(
        {
            "weight": raw(expected["model"]["weight_that_can_be_told"]),
            "name": b"weight_that_can_be_told",
            "text": b"a name that can be told",
        }
    )
    for path in root.rglob("*"):
        if path.is_file():
            assert needles.found_in(path.read_bytes()) == [], path.name
    assert len(list(root.glob("step-*/data/*.floe"))) == 4


def test_a_writer_saves_again_and_again_with_other_keys(root: Path, policy: Path) -> None:
    writer = StrongroomWriter(root, security=policy)
    for step in (1, 2, 3):
        save({"x": torch.tensor(step)}, writer, step)
        assert load({"x": torch.tensor(0)}, StrongroomReader(root, security=policy))["x"] == step
    headers = [path.read_bytes()[:74] for path in root.glob("step-*/data/*.floe")]
    assert len(set(headers)) == len(headers) == 12


def test_async_save_seals(root: Path, policy: Path) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        source = torch.arange(10)
        writer = StrongroomWriter(root, security=policy)
        dcp.async_save({"x": source}, checkpoint_id="7", storage_writer=writer).result()
    finally:
        torch.distributed.destroy_process_group()
    target = {"x": torch.zeros(10, dtype=torch.int64)}
    assert torch.equal(load(target, StrongroomReader(root, security=policy))["x"], source)


def test_a_platforms_policy_reaches_plain_dcp_use(
    root: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRONGROOM_CONFIG", str(policy))
    save(state(), StrongroomWriter(root), 5)
    assert list(root.glob("step-*/keyring/0001.json"))
    load(like(state()), StrongroomReader(root))
    monkeypatch.delenv("STRONGROOM_CONFIG")
    with pytest.raises(BaseException, match="is sealed, and no policy here says how to open it") as caught:
        load(like(state()), StrongroomReader(root))
    assert holds(caught.value, NoKeyError)


def test_who_has_another_key_is_refused(root: Path, policy: Path, tmp_path: Path) -> None:
    save(state(), StrongroomWriter(root, security=policy), 5)
    other = write_policy(tmp_path / "elsewhere")
    with pytest.raises(BaseException, match="no key here opens step 5") as caught:
        load(like(state()), StrongroomReader(root, security=other))
    assert holds(caught.value, NoKeyError)


def test_an_unsealed_checkpoint_is_refused_where_the_policy_demands_a_seal(root: Path, policy: Path) -> None:
    save(state(), StrongroomWriter(root), 5)
    with pytest.raises(BaseException, match=r"step 5 .* is not sealed") as caught:
        load(like(state()), StrongroomReader(root, security=policy))
    assert holds(caught.value, UnsealedError)
    (folder,) = root.glob("step-*")
    allowing = write_policy(policy.parent, name="allowing.toml", seal=f'unsealed = ["{folder.name}"]')
    load(like(state()), StrongroomReader(root, security=allowing))


def test_a_keeper_is_asked_once_a_save_and_its_failure_commits_nothing() -> None:
    keeper, store = Keeper(), Watched(MemoryStore())

    def fail() -> None:
        raise KeyServiceError("keeper:one cannot be reached")

    writer = StrongroomWriter(store, security=policy_of(keeper))
    save(state(), writer, 1)
    keeper.does = fail
    with pytest.raises(BaseException, match="keeper:one cannot be reached") as caught:
        save(state(), writer, 2)
    assert holds(caught.value, KeyServiceError)
    assert not any("step-000000000002" in key for key in store.inner.contents())
    keeper.does = lambda: None
    save(state(), writer, 3)
    # The one that was out of reach is asked once more before the save is given up.
    assert [context.step for context in keeper.wraps] == [1, 2, 2, 3]
    assert [found.step for found in Checkpointer(store).checkpoints()] == [3, 1]
    load(like(state()), StrongroomReader(store, security=policy_of(keeper)))
    assert [context.step for context in keeper.unwraps] == [3]


# Some rows of a large tensor

ROWS, COLUMNS = 4096, 1024
"""16 MiB of float32."""


class SomeRows(DefaultLoadPlanner):
    """Reads a few rows of ``t``."""

    def __init__(self, first: int, target: torch.Tensor) -> None:
        super().__init__()
        self._first = first
        self._target = target

    def create_local_plan(self) -> LoadPlan:
        item = ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex("t"),
            dest_offsets=torch.Size((0, 0)),
            storage_index=MetadataIndex("t", torch.Size((0, 0)), 0),
            storage_offsets=torch.Size((self._first, 0)),
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


class Large:
    """A sealed checkpoint of one tensor, in memory."""

    def __init__(self) -> None:
        self.tensor = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
        self.policy = policy_of(Keeper())
        self.store = Watched(MemoryStore())
        with Checkpointer(self.store, security=self.policy) as checkpointer:
            checkpointer.save(1, {"t": self.tensor}).result()
        shards = {key: data for key, data in self.store.written.items() if is_shard(key)}
        # Where there are several, the others hold nothing.
        self.key, data = max(shards.items(), key=lambda item: len(item[1]))
        self.stored_bytes = len(data)
        # Data ends a shard, so that where it begins can be told from the length.
        segments = -(-(self.stored_bytes - 74) // MIB)
        self.start = self.stored_bytes - 74 - 32 * segments - self.tensor.nbytes

    def read(self, first: int, count: int) -> tuple[torch.Tensor, int]:
        target = torch.zeros(count, COLUMNS)
        self.store.forget()
        reader = StrongroomReader(self.store, security=self.policy)
        dcp.load(
            {"t": self.tensor}, storage_reader=reader, planner=SomeRows(first, target), **no_dist(dcp.load)
        )
        return target, self.store.shard_bytes_read

    def expected_bytes(self, first: int, count: int) -> int:
        """The header, and each segment that holds some of the rows."""
        row_bytes = 4 * COLUMNS
        low = (self.start + first * row_bytes) // SEGMENT
        high = (self.start + (first + count) * row_bytes - 1) // SEGMENT
        end = min(74 + (high + 1) * MIB, self.stored_bytes)
        return 74 + end - (74 + low * MIB)


@pytest.fixture(scope="module")
def large() -> Large:
    return Large()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_of_some_rows_the_segments_that_hold_them_are_read_and_no_others(
    large: Large, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 1100))
    first = data.draw(st.integers(0, ROWS - count))
    found, read = large.read(first, count)
    assert torch.equal(found, large.tensor[first : first + count])
    assert read == large.expected_bytes(first, count)


def test_a_hundredth_of_the_rows_costs_two_segments_at_most(large: Large) -> None:
    for first in range(0, ROWS - 41, 239):
        found, read = large.read(first, 41)
        assert torch.equal(found, large.tensor[first : first + 41])
        assert read <= 2 * MIB + 74


def test_a_part_is_refused_where_its_segment_or_the_header_was_changed(large: Large) -> None:
    data = large.store.inner.contents()[large.key]
    try:
        for position in (9, 60, 74 + 3 * MIB + 1, 74 + 3 * MIB + 500, 74 + 4 * MIB - 1):
            changed = bytearray(data)
            changed[position] ^= 1
            large.store.inner.plant({large.key: bytes(changed)})
            with pytest.raises(BaseException, match=r"00000-0\d\.safetensors of step 1") as caught:
                large.read(800, 41)
            assert holds(caught.value, IntegrityError)
    finally:
        large.store.inner.plant({large.key: data})


def test_a_part_is_refused_of_a_file_that_a_forger_has_sealed_under_a_new_key(large: Large) -> None:
    """With the true header or its own; manifest, commit and keyring untouched."""
    forged = Large()
    contents = large.store.inner.contents()
    true, false = contents[large.key], forged.store.inner.contents()[forged.key]
    assert len(true) == len(false)
    try:
        for data in (false, true[:74] + false[74:]):
            large.store.inner.plant({large.key: data})
            with pytest.raises(BaseException, match=r"00000-0\d\.safetensors of step 1") as caught:
                large.read(2000, 41)
            assert holds(caught.value, IntegrityError)
    finally:
        large.store.inner.plant({large.key: true})


# Two ranks


def test_two_ranks_seal_and_load_in_another_layout_and_no_key_travels_in_clear(
    run_ranks: Callable[[Any, Path], None], root: Path, policy: Path
) -> None:
    run_ranks(sealed_ranks.save_sharded, root)
    shards = sorted(path.name for path in root.rglob("data/*-*.floe"))
    assert shards == ["00000-00.safetensors.floe", "00001-00.safetensors.floe"]
    run_ranks(sealed_ranks.load_resharded, root)
    restored = Checkpointer(root, security=policy).restore()
    assert restored is not None
    assert torch.equal(restored.state["sharded"], dcp_ranks.whole())


def test_a_rank_without_the_policy_fails_the_save(
    run_ranks: Callable[[Any, Path], None], root: Path, policy: Path
) -> None:
    run_ranks(sealed_ranks.save_where_one_rank_has_no_policy, root)
    assert Checkpointer(root).checkpoints() == []
    assert not list(root.glob("step-*/COMMIT"))
