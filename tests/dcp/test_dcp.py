"""Plain ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` over our writer and reader."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from strongroom import (
    Checkpointer,
    CheckpointNotFoundError,
    ConfigError,
    IntegrityError,
    StateEncodingError,
    StrongroomReader,
    StrongroomWriter,
)

# DCP tells every process that is alone that it takes it to be alone.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*unavailable")


def save(state: dict[str, Any], writer: StrongroomWriter, step: int) -> None:
    dcp.save(state, checkpoint_id=str(step), storage_writer=writer, **no_dist(dcp.save))


def load(state: dict[str, Any], reader: StrongroomReader) -> dict[str, Any]:
    dcp.load(state, storage_reader=reader, **no_dist(dcp.load))
    return state


def no_dist(function: Any) -> dict[str, bool]:
    return {"no_dist": True} if "no_dist" in inspect.signature(function).parameters else {}


def state() -> dict[str, Any]:
    return {
        "model": {
            "layers.0.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
            "half": torch.full((5,), -0.0, dtype=torch.bfloat16),
            "scalar": torch.tensor(7),
            "empty": torch.empty(0, 3),
        },
        "extra": {"epoch": 3, "name": "a", "list": [torch.ones(2), 2.5], "none": None},
    }


def like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 9)
    if isinstance(value, dict):
        return {key: like(item) for key, item in value.items()}
    if isinstance(value, list):
        return [like(item) for item in value]
    return "to be replaced"


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def test_what_dcp_saves_dcp_loads(tmp_path: Path) -> None:
    save(state(), StrongroomWriter(tmp_path), 5)
    assert_same(load(like(state()), StrongroomReader(tmp_path)), state())


def test_what_dcp_saves_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    writer = StrongroomWriter(tmp_path)
    save(state(), writer, 5)

    checkpointer = Checkpointer(tmp_path)
    (checkpoint,) = checkpointer.checkpoints()
    assert writer.committed == checkpoint
    assert checkpoint.step == 5
    restored = checkpointer.restore()
    assert restored is not None
    assert_same(restored.state, state())


def test_a_module_saved_by_dcp_is_filled_in_place_by_the_checkpointer(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    save({"model": model.state_dict()}, StrongroomWriter(tmp_path), 1)
    other = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    Checkpointer(tmp_path).restore({"model": other})
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def test_what_the_checkpointer_saves_dcp_loads(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    model.tied = model.weight
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, {"model": model, "extra": {"epoch": 3, "list": [torch.ones(2), "x"]}})
    target = {
        "model": {key: torch.zeros_like(value) for key, value in model.state_dict().items()},
        "extra": {"epoch": None, "list": [torch.zeros(2), None]},
    }
    load(target, StrongroomReader(tmp_path, step=2))
    for name, value in model.state_dict().items():
        assert torch.equal(target["model"][name], value)
    assert target["extra"]["epoch"] == 3
    assert torch.equal(target["extra"]["list"][0], torch.ones(2))
    assert target["extra"]["list"][1] == "x"


def test_one_element_that_keeps_the_strides_of_where_it_was_cut_is_carried(tmp_path: Path) -> None:
    one = torch.arange(4.0)[::2][1:]
    assert one.stride() == (2,)
    save({"one": one}, StrongroomWriter(tmp_path), 1)
    assert load({"one": torch.zeros(4)[::2][1:]}, StrongroomReader(tmp_path))["one"].tolist() == [2.0]


def test_a_writer_saves_again_and_again_on_one_line(tmp_path: Path) -> None:
    writer = StrongroomWriter(tmp_path)
    for step in (1, 2, 3):
        save({"x": torch.tensor(step)}, writer, step)
    assert [(found.step, found.launch) for found in Checkpointer(tmp_path).checkpoints()] == [
        (3, 1),
        (2, 1),
        (1, 1),
    ]
    save({"x": torch.tensor(4)}, StrongroomWriter(tmp_path), 4)
    assert [found.step for found in Checkpointer(tmp_path).checkpoints() if not found.is_superseded] == [
        4,
        3,
        2,
        1,
    ]


def test_a_writer_with_an_older_parent_supersedes_what_came_after_it(tmp_path: Path) -> None:
    writer = StrongroomWriter(tmp_path)
    for step in (1, 2):
        save({"x": torch.tensor(step)}, writer, step)
    save({"x": torch.tensor(-2)}, StrongroomWriter(tmp_path, parent=1), 2)
    assert load({"x": torch.tensor(0)}, StrongroomReader(tmp_path))["x"] == -2
    assert [(found.step, found.is_superseded) for found in Checkpointer(tmp_path).checkpoints()] == [
        (2, False),
        (1, False),
        (2, True),
    ]


def test_a_lower_step_than_the_line_has_is_refused(tmp_path: Path) -> None:
    save({"x": torch.tensor(5)}, StrongroomWriter(tmp_path), 5)
    with pytest.raises(BaseException, match="lower than step 5"):
        save({"x": torch.tensor(4)}, StrongroomWriter(tmp_path), 4)


def test_async_save_commits(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        source = torch.arange(10)
        future = dcp.async_save({"x": source}, checkpoint_id="7", storage_writer=StrongroomWriter(tmp_path))
        future.result()
    finally:
        torch.distributed.destroy_process_group()
    assert_same(load({"x": torch.zeros(10, dtype=torch.int64)}, StrongroomReader(tmp_path)), {"x": source})


def test_no_pickle_is_written(tmp_path: Path) -> None:
    save(state(), StrongroomWriter(tmp_path), 5)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        with pytest.raises(Exception, match=r".*"):
            pickle.loads(path.read_bytes())
        assert b"ctorch" not in path.read_bytes()
    (shard,) = tmp_path.rglob("data/*-*.safetensors")
    with safe_open(shard, "pt") as opened:
        assert set(opened.keys()) >= {"model.layers.0.weight", "model.half"}


def test_a_value_without_a_safe_encoding_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BaseException, match="loss_fn") as caught:
        save({"x": torch.ones(1), "extra": {"loss_fn": print}}, StrongroomWriter(tmp_path), 1)
    assert _holds(caught.value, StateEncodingError)
    assert Checkpointer(tmp_path).checkpoints() == []


def test_a_damaged_shard_is_an_integrity_error(tmp_path: Path) -> None:
    save(state(), StrongroomWriter(tmp_path), 5)
    (shard,) = tmp_path.rglob("data/*-*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(BaseException, match=shard.name) as caught:
        load(like(state()), StrongroomReader(tmp_path))
    assert _holds(caught.value, IntegrityError)


def test_a_damaged_manifest_is_not_blurred_by_dcp(tmp_path: Path) -> None:
    save(state(), StrongroomWriter(tmp_path), 5)
    (manifest,) = tmp_path.rglob("MANIFEST.json")
    manifest.write_bytes(manifest.read_bytes().replace(b'"step":5', b'"step":6'))
    with pytest.raises(BaseException, match=r"MANIFEST\.json") as caught:
        load(like(state()), StrongroomReader(tmp_path))
    assert _holds(caught.value, IntegrityError)


def test_a_checkpoint_whose_write_failed_is_never_seen(tmp_path: Path) -> None:
    class Broken(StrongroomWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            super().write_data(plan, planner)
            raise OSError("the disk went away")

    with pytest.raises(BaseException, match="the disk went away"):
        save(state(), Broken(tmp_path), 5)
    assert Checkpointer(tmp_path).checkpoints() == []


def test_a_step_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(BaseException, match="give the step"):
        dcp.save(state(), storage_writer=StrongroomWriter(tmp_path), **no_dist(dcp.save))
    with pytest.raises(ConfigError, match="names a step"):
        StrongroomWriter(tmp_path).reset("some/folder")


def _holds(error: BaseException, kind: type[BaseException]) -> bool:
    failures = getattr(error, "failures", None)
    causes = [cause[0] for cause in failures.values()] if failures else [error]
    return any(isinstance(cause, kind) for cause in causes)


def test_a_platforms_policy_reaches_plain_dcp_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tmp_path / "strongroom.toml"
    policy.write_text('digest = "sha256"\n')
    monkeypatch.setenv("STRONGROOM_CONFIG", str(policy))
    save(state(), StrongroomWriter(tmp_path / "run"), 5)
    (manifest,) = tmp_path.rglob("MANIFEST.json")
    assert b'"digest":"sha256"' in manifest.read_bytes()

    policy.write_text("[seal]\n")
    with pytest.raises(ConfigError, match="recipients"):
        StrongroomWriter(tmp_path / "run")


def test_what_there_is_not_is_told_from_what_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(BaseException, match="nothing is committed") as caught:
        load(like(state()), StrongroomReader(tmp_path))
    assert _holds(caught.value, CheckpointNotFoundError)

    save(state(), StrongroomWriter(tmp_path), 5)
    (commit,) = tmp_path.rglob("COMMIT")
    commit.write_bytes(commit.read_bytes()[:-1])
    with pytest.raises(BaseException, match="COMMIT") as caught:
        load(like(state()), StrongroomReader(tmp_path))
    assert _holds(caught.value, IntegrityError)
