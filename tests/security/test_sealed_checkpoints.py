"""Sealed checkpoints by the real checkpointer: all comes back, little is read, others can read nothing."""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sealed_saves import (
    MIB,
    SEGMENT,
    Needles,
    Root,
    Watched,
    assert_same,
    file_policy,
    is_shard,
    raw,
    sealing_of,
    write_policy,
)
from torch import nn

from strongroom import (
    Checkpointer,
    CheckpointNotFoundError,
    KeepLast,
    NoKeyError,
    PerRank,
    StateMismatchError,
    layout,
)
from strongroom.events import Event, RestoreFinished
from strongroom.layout import CheckpointName
from strongroom.shards import ChunkSpec, binding, lay_out
from strongroom.signing import Guard
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom.verify import verify
from strongroom_cli.main import main
from strongroom_security import SecurityPolicy

DIGESTS = ("blake3", "sha256")


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SecurityPolicy]:
    """A policy for each digest, both of one key file."""
    folder = tmp_path_factory.mktemp("policies")
    return {
        digest: file_policy(folder, name=f"{digest}.toml", top=f'digest = "{digest}"') for digest in DIGESTS
    }


@pytest.fixture(scope="module")
def policy(policies: dict[str, SecurityPolicy]) -> SecurityPolicy:
    return policies["blake3"]


@pytest.fixture
def many_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shards for a state of a few MiB, where it takes more otherwise."""
    monkeypatch.setattr("strongroom.shards.MIN_PART_BYTES", MIB)
    monkeypatch.setattr("strongroom.checkpointer.writing_workers", lambda: 2)


# Everything comes back


class Training:
    """A model, its optimizer and more, which train deterministically."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        self.model = nn.Sequential(nn.Linear(24, 300), nn.BatchNorm1d(300), nn.Linear(300, 5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.generator = torch.Generator().manual_seed(1)
        self.steps = 0

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "generator": self.generator,
            "extra": {"steps": self.steps, "nested": [(1, 2.5), None, {"k": b"bytes"}], 3: {"set": {1, 2}}},
            "mine": PerRank({"position": self.steps, "seen": torch.full((3,), self.steps)}),
        }

    def step(self) -> None:
        self.optimizer.zero_grad()
        batch = torch.randn(8, 24, generator=self.generator)
        self.model(batch).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.steps += 1

    def tensors(self) -> dict[str, Any]:
        states = [dict(values) for values in self.optimizer.state.values()]
        return {"model": self.model, "optimizer": states, "generator": self.generator.get_state()}


@pytest.mark.parametrize("digest", DIGESTS)
@pytest.mark.parametrize("wrap", ("checkpoint", "direct"))
def test_a_training_goes_on_exactly_where_it_was_saved(digest: str, wrap: str, tmp_path: Path) -> None:
    policy = file_policy(tmp_path, top=f'digest = "{digest}"', seal=f'wrap = "{wrap}"')
    root = Root(tmp_path / "run")
    whole = Training()
    with Checkpointer(root.path, security=policy) as checkpointer:
        for _ in range(3):
            whole.step()
        checkpointer.save(3, whole.state()).result()
        for _ in range(3):
            whole.step()
    resumed = Training()
    restored = Checkpointer(root.path, security=policy).restore(resumed.state())
    assert restored is not None
    assert restored.skipped == ()
    assert restored.state["extra"] == {**resumed.state()["extra"], "steps": 3}
    assert restored.state["mine"]["position"] == 3
    assert torch.equal(restored.state["mine"]["seen"], torch.full((3,), 3))
    resumed.steps = 3
    for _ in range(3):
        resumed.step()
    assert_same(resumed.tensors(), whole.tensors())
    manifest = root.manifest(3)
    assert manifest.is_sealed
    assert manifest.algorithm == digest
    assert all(record.path.endswith(".floe") for record in manifest.files)


def one_of_each() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    return {
        "float": torch.randn(700, 300, generator=generator),
        "half": torch.randn(33, generator=generator).to(torch.bfloat16),
        "crooked": torch.randn(40, 50, generator=generator).t(),
        "scalar": torch.tensor(2.5),
        "bools": torch.rand(17, generator=generator) > 0.5,
        "empty": torch.empty(0, 3),
        "none of it": torch.empty(0),
        "complex": torch.randn(6, dtype=torch.complex64, generator=generator).conj(),
        "array": np.arange(5.0),
        "values": {"epoch": 3, "nan": float("inf"), "text": "Grüße", (1, 2): [True, None]},
    }


def template(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.full_like(value, 7) if isinstance(value, torch.Tensor) else None
        for name, value in state.items()
    }


@pytest.mark.parametrize("digest", DIGESTS)
def test_every_kind_of_value_comes_back_with_a_template_and_without(
    digest: str, policies: dict[str, SecurityPolicy], tmp_path: Path
) -> None:
    state = one_of_each()
    array = state.pop("array")
    expected = {name: value.resolve_conj() if name == "complex" else value for name, value in state.items()}
    with Checkpointer(tmp_path, security=policies[digest]) as checkpointer:
        checkpointer.save(1, {**state, "array": array}).result()
        for wanted in ({**template(state), "array": None}, None):
            restored = checkpointer.restore(wanted)
            assert restored is not None
            found = dict(restored.state)
            assert np.array_equal(found.pop("array"), array)
            assert_same(found, expected)


def test_twenty_thousand_small_tensors_come_back(policy: SecurityPolicy, tmp_path: Path) -> None:
    flat = torch.randn(20_000 * 64)
    state = {f"layer.{number}": flat[64 * number : 64 * number + 64] for number in range(20_000)}
    found = {name: torch.zeros(64) for name in state}
    with Checkpointer(tmp_path, security=policy) as checkpointer:
        checkpointer.save(1, {"model": state}).result()
        checkpointer.restore({"model": found})
    assert torch.equal(torch.cat(list(found.values())), flat)


def test_nothing_at_all_and_tensors_without_elements_come_back(
    policy: SecurityPolicy, tmp_path: Path
) -> None:
    with Checkpointer(tmp_path, security=policy) as checkpointer:
        for step, state in enumerate(({}, {"empty": torch.empty(0, 4)}, {"scalar": torch.tensor(1)})):
            checkpointer.save(step, state).result()
            restored = checkpointer.restore()
            assert restored is not None
            assert_same(restored.state, state)


def test_what_has_no_room_in_memory_is_sealed_while_training_waits(
    policy: SecurityPolicy, tmp_path: Path
) -> None:
    state = {
        "big": torch.arange(5 * MIB, dtype=torch.float32),
        "crooked": torch.arange(3 * MIB, dtype=torch.float32).reshape(1024, -1).t(),
        "fits": torch.arange(1000),
        "values": {"epoch": 3},
    }
    expected = {name: value.clone() if name != "values" else value for name, value in state.items()}
    store = Watched(MemoryStore())
    with Checkpointer(store, security=policy, memory_budget=16 * MIB) as checkpointer:
        handle = checkpointer.save(1, state)
        assert any(is_shard(key) for key in store.written)  # written before ``save`` returned
        state["big"].zero_()
        handle.result()
    restored = Checkpointer(store, security=policy).restore()
    assert restored is not None
    assert_same(restored.state, expected)
    assert all(key.endswith(".floe") for key in store.written if is_shard(key))


def test_a_save_that_is_slowed_down_on_purpose_is_whole(policy: SecurityPolicy, tmp_path: Path) -> None:
    state = {"w": torch.randn(300_000)}
    with Checkpointer(tmp_path, security=policy, max_bytes_per_second=20 * MIB) as checkpointer:
        checkpointer.save(1, state).result()
        restored = checkpointer.restore()
        assert restored is not None
        assert_same(restored.state, state)


def test_a_run_begins_from_another_runs_sealed_checkpoint(policy: SecurityPolicy, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    with Checkpointer(old, security=policy) as checkpointer:
        checkpointer.save(7, {"w": torch.ones(5), "extra": {"epoch": 1}}).result()
    before = {path: path.read_bytes() for path in Root(old).files()}
    with Checkpointer(new, security=policy, init_from=old) as checkpointer:
        target = {"w": torch.zeros(5), "extra": {}}
        restored = checkpointer.restore(target)
        assert restored is not None
        assert restored.init_from == LocalStore(old).uri
        assert torch.equal(target["w"], torch.ones(5))
        checkpointer.save(8, target).result()
        restored = checkpointer.restore(target)
        assert restored is not None
        assert (restored.step, restored.init_from) == (8, None)
    assert {path: path.read_bytes() for path in Root(old).files()} == before
    with pytest.raises(NoKeyError):
        Checkpointer(tmp_path / "third", init_from=old).restore()


def test_a_checkpoint_that_retention_removes_leaves_nothing_of_its_keys(
    policy: SecurityPolicy, tmp_path: Path
) -> None:
    root = Root(tmp_path)
    with Checkpointer(tmp_path, security=policy, keep=KeepLast(count=1)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": torch.ones(3)})
        checkpointer.wait()
        restored = checkpointer.restore()
        assert restored is not None
        assert restored.step == 3
    assert [path.parent.parent.name for path in root.files() if path.parent.name == "keyring"] == [
        root.folder(3).name
    ]


# Sizes around the edges of segments


RUN_ID = "run-7f"
NAME = CheckpointName(launch=1, step=1, attempt="0" * 16)


def tensor_that_fills(plain_bytes: int) -> torch.Tensor:
    """Bytes of a tensor ``t`` so many that its shard, before it is sealed, is so long."""
    metadata = binding(RUN_ID, NAME)
    for length in range(plain_bytes, -1, -1):
        spec = ChunkSpec("t", "U8", (0,), (length,), True)
        (found,) = lay_out([spec], rank=0, parts=1, metadata=metadata)
        if found.size_bytes == plain_bytes:
            generator = torch.Generator().manual_seed(length)
            return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)
    raise AssertionError(f"no shard is {plain_bytes} bytes long")


@settings(max_examples=12)
@given(segments=st.integers(1, 3), beyond=st.integers(-3, 3), wanted=st.sampled_from(DIGESTS))
@example(segments=1, beyond=0, wanted="blake3")
@example(segments=2, beyond=0, wanted="sha256")
@example(segments=2, beyond=1, wanted="blake3")
def test_a_shard_that_ends_near_the_edge_of_a_segment_comes_back(
    segments: int, beyond: int, wanted: str, policies: dict[str, SecurityPolicy]
) -> None:
    store = Watched(MemoryStore())
    state = {"t": tensor_that_fills(segments * SEGMENT + beyond)}
    with Checkpointer(store, security=policies[wanted], run_id=RUN_ID) as checkpointer:
        checkpointer.save(1, state).result()
        (shard,) = (key for key in store.written if is_shard(key))
        count = segments + (beyond > 0)
        assert len(store.written[shard]) == 74 + segments * SEGMENT + beyond + 32 * count
        found = {"t": torch.zeros_like(state["t"])}
        checkpointer.restore(found)
    assert torch.equal(found["t"], state["t"])


# How much is read


class Told:
    """Remembers how many bytes each restore says that it has read."""

    def __init__(self) -> None:
        self.restored: list[int] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, RestoreFinished):
            self.restored.append(event.size_bytes)


def test_a_plan_says_what_the_store_is_then_asked_for(
    policies: dict[str, SecurityPolicy], many_shards: None
) -> None:
    """Whatever part of the state it is of: the segments that it needs, once each.

    A plan does not count the header, which is read to be held against the manifest, nor the 74 bytes by
    which the blocks of a whole file's digest lie across its segments.
    """
    generator = random.Random(3)
    sizes = [0, 1, 5000, 100_000, 262_000, 262_136, 262_144, 400_000, 700_000, 1_000_003]
    state = {f"t{number}": torch.randn(size) for number, size in enumerate(sizes)}
    state |= {f"small{number}": torch.randn(50) for number in range(30)}
    for digest in DIGESTS:
        store, told = Watched(MemoryStore()), Told()
        checkpointer = Checkpointer(store, security=policies[digest], events=[told])
        checkpointer.save(1, {"m": state, "extra": {"epoch": 1}}).result()
        assert sum(map(is_shard, store.written)) == 2
        parts = [list(state), *([name] for name in ("t0", "t1", "t9", "small3"))]
        parts += [generator.sample(list(state), generator.randint(1, 12)) for _ in range(12)]
        for names in parts:
            target = {"m": {name: torch.full_like(state[name], -1) for name in names}, "extra": {}}
            store.forget()
            plan = checkpointer.plan_restore(target, strict=False)
            assert plan is not None
            assert not any(map(is_shard, store.read_bytes))
            store.forget()
            checkpointer.restore(target, strict=False)
            assert plan.size_bytes == told.restored[-1], (digest, names)
            planned = {read.path + layout.SEALED: read.size_bytes for read in plan.reads}
            asked = {key.rpartition("/")[2]: key for key in store.read_bytes if is_shard(key)}
            assert planned.keys() == asked.keys()
            for path, key in asked.items():
                beside = store.read_bytes[key] - planned[path]
                assert 74 <= beside <= 74 * store.reads[key], (digest, names)
            for name in names:
                assert torch.equal(target["m"][name], state[name])
        checkpointer.close()


def test_of_a_part_that_is_asked_for_only_its_segments_are_read(policy: SecurityPolicy) -> None:
    """Eight tensors of 16 MiB together, one of which is wanted, and then a small one between them."""
    store = Watched(MemoryStore())
    state = {f"t{number}": torch.randn(512 * 1024) for number in range(8)} | {"u": torch.randn(100)}
    with Checkpointer(store, security=policy) as checkpointer:
        checkpointer.save(1, {"m": state}).result()
        for name, most in (("t3", 4 * MIB), ("u", 2 * MIB)):
            store.forget()
            target = {"m": {key: torch.zeros_like(value) for key, value in state.items()}}
            checkpointer.restore(target, only=f"m.{name}")
            assert torch.equal(target["m"][name], state[name])
            assert all(not value.any() for key, value in target["m"].items() if key != name)
            assert state[name].nbytes <= store.shard_bytes_read <= most


def test_a_restore_of_no_tensor_opens_no_shard(policy: SecurityPolicy) -> None:
    store = Watched(MemoryStore())
    with Checkpointer(store, security=policy) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(10), "extra": {"epoch": 4}}).result()
        store.forget()
        restored = checkpointer.restore({"extra": {}}, strict=False, only="extra")
        assert restored is not None
        assert restored.state["extra"] == {"epoch": 4}
    assert store.shard_bytes_read == 0


def test_a_state_that_does_not_fit_is_told_before_a_shard_is_opened(policy: SecurityPolicy) -> None:
    store = Watched(MemoryStore())
    with Checkpointer(store, security=policy) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(10)}).result()
        store.forget()
        target = torch.zeros(11)
        with pytest.raises(StateMismatchError):
            checkpointer.restore({"w": target})
    assert store.shard_bytes_read == 0
    assert not target.any()


# What others can read


def recognisable() -> tuple[dict[str, Any], dict[str, Any], Needles]:
    """A state, what goes with it, and every text and run of bytes in them that others could know again.

    All of it is random, so that eight bytes of it do not occur anywhere by chance.
    """
    source = random.Random(41)

    def text(label: str) -> str:
        return f"{label}{source.randbytes(24).hex()}"

    words = {
        label: text(label)
        for label in (
            "module",
            "buffer",
            "key",
            "value",
            "deep",
            "odd",
            "tag",
            "metric",
            "note",
            "own",
        )
    }
    number = source.getrandbits(200)
    array = np.frombuffer(source.randbytes(4000), np.uint8)
    generator = torch.Generator().manual_seed(9)
    model = nn.Module()
    model.add_module(words["module"], nn.Linear(400, 500))
    model.register_buffer(words["buffer"], torch.randn(9, generator=generator))
    optimizer = torch.optim.Adam(model.parameters())
    model.get_submodule(words["module"])(torch.randn(3, 400, generator=generator)).sum().backward()
    optimizer.step()
    small = torch.randn(6, generator=generator)
    large = torch.randn(300, 1000, generator=generator)
    mine = torch.randn(40, generator=generator)
    state = {
        "model": model,
        "optimizer": optimizer,
        words["key"]: {words["deep"]: [words["value"], (number, {words["odd"]: None})]},
        "small": small,
        "large": large,
        "array": array,
        "mine": PerRank({words["own"]: 1, "t": mine}),
        "raw": source.randbytes(60),
    }
    extras = {
        "metrics": {words["metric"]: 0.5},
        "provenance": {"note": words["note"]},
        "tags": [words["tag"]],
    }
    needles = {label: word.encode() for label, word in words.items()}
    needles["number"] = hex(number).encode()
    needles["bytes"] = base64.b64encode(state["raw"])[:76]
    needles["array"] = array.tobytes()
    tensors = {"small": small, "large": large, "mine": mine, "buffer's": model.get_buffer(words["buffer"])}
    tensors |= dict(model.named_parameters())
    for parameter, values in optimizer.state.items():
        label = f"state of {tuple(parameter.shape)}"
        tensors |= {f"{label}: {key}": value for key, value in values.items() if value.numel() > 4}
    needles |= {f"tensor {name}": raw(tensor) for name, tensor in tensors.items()}
    return state, extras, Needles(needles)


@pytest.mark.parametrize("wrap", ("checkpoint", "direct"))
def test_no_run_of_sixteen_bytes_of_anything_occurs_in_any_file(
    wrap: str, tmp_path: Path, many_shards: None
) -> None:
    state, extras, needles = recognisable()
    policy = file_policy(tmp_path, seal=f'wrap = "{wrap}"')
    sealed, plain = Root(tmp_path / "sealed"), Root(tmp_path / "plain")
    for root, security in ((sealed, policy), (plain, None)):
        with Checkpointer(root.path, security=security) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, state, **extras).result()
    # The search finds each of them where it is to be found.
    found = {needle for path in plain.files() for needle in needles.found_in(path.read_bytes())}
    assert found == needles.names
    assert len(list(sealed.files())) == len(list(plain.files())) + 2
    for path in sealed.files():
        assert needles.found_in(path.read_bytes()) == [], path.name
        assert needles.found_in(str(path).encode()) == []
        # Nor a name that this format gives to things inside of files.
        assert b"dtype" not in path.read_bytes()
        assert b"exp_avg" not in path.read_bytes()


def test_nothing_is_ever_written_in_clear_on_the_way(tmp_path: Path) -> None:
    """Not for a moment, under no name, in a save that is staged and in one that is streamed."""
    state, extras, needles = recognisable()
    policy = file_policy(tmp_path)
    for budget in (None, 16 * MIB):
        if budget is not None:
            state["big"] = torch.randn(5 * MIB)
        store = Watched(MemoryStore())
        with Checkpointer(store, security=policy, memory_budget=budget) as checkpointer:
            checkpointer.save(1, state, **extras).result()
        assert len(store.written) >= 8
        for key, data in store.written.items():
            assert needles.found_in(bytes(data)) == [], key


PATHS = r"(\d{5}-\d\d\.safetensors|index\.safetensors|(state|state-\d{5}|provenance)\.json)\.floe"
CLEAR = {
    "manifest": {
        "attempt": r"[0-9a-f]{16}",
        "created_at_ms": r"\d{13}",
        "digest": "blake3|sha256",
        "files[].digest": r"blake3:[0-9a-f]{64}",
        "files[].header": r"[0-9a-f]{148}",
        "files[].path": PATHS,
        "files[].size": r"\d+",
        "format": r"0\.1",
        "kind": "manifest",
        "launch": r"\d+",
        "parent": "None",
        "parent.attempt": r"[0-9a-f]{16}",
        "parent.launch": r"\d+",
        "parent.manifest": r"sha256:[0-9a-f]{64}",
        "parent.step": r"\d+",
        "retention_class": "None",
        "run": r"[0-9a-f]{32}",
        "step": r"\d+",
        "world_size": "1",
    },
    "keyring": {
        "attempt": r"[0-9a-f]{16}",
        "created_at_ms": r"\d{13}",
        "format": r"0\.1",
        "generation": "1",
        "keys[].path": PATHS,
        "keys[].wrapped": r"[A-Za-z0-9+/]{80}",
        "kind": "keyring",
        "launch": r"\d+",
        "previous": "None",
        "recipients[].id": r"file-[0-9a-f]{32}",
        "recipients[].kind": "file",
        "recipients[].wrapped": r"[A-Za-z0-9+/]{80}",
        "run": r"[0-9a-f]{32}",
        "step": r"\d+",
        "wrap": "checkpoint",
        "~digest": r"sha256:[0-9a-f]{64}",
    },
    "commit": {
        "attempt": r"[0-9a-f]{16}",
        "committed_at_ms": r"\d{13}",
        "format": r"0\.1",
        "keyring": r"sha256:[0-9a-f]{64}",
        "kind": "commit",
        "launch": r"\d+",
        "manifest": r"sha256:[0-9a-f]{64}",
        "run": r"[0-9a-f]{32}",
        "signature": "None",
        "size": r"\d+",
        "step": r"\d+",
        "~digest": r"sha256:[0-9a-f]{64}",
    },
    "run": {
        "created_at_ms": r"\d{13}",
        "format": r"0\.1",
        "kind": "run",
        "run": r"[0-9a-f]{32}",
        "~digest": r"sha256:[0-9a-f]{64}",
    },
    "launch": {
        "created_at_ms": r"\d{13}",
        "deadline_s": r"\d+",
        "format": r"0\.1",
        "kind": "launch",
        "launch": r"\d+",
        "parent": "None",
        "run": r"[0-9a-f]{32}",
        "signature": "None",
        "~digest": r"sha256:[0-9a-f]{64}",
    },
}
"""All that a sealed run says in clear, and what it looks like. Whatever is added must be added here."""


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, f"{place}.{key}" if place else key)
    elif isinstance(value, list) and value:
        for item in value:
            yield from leaves(item, f"{place}[]")
    else:
        yield place, value


def test_what_stands_in_clear_is_on_a_list(tmp_path: Path) -> None:
    state, extras, _ = recognisable()
    root = Root(tmp_path / "run")
    with Checkpointer(root.path, security=file_policy(tmp_path)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state, **extras).result()
    seen = set()
    for path in root.files():
        if path.suffix == ".floe":
            continue
        document = json.loads(path.read_bytes())
        allowed = CLEAR[document["kind"]]
        for place, value in leaves(document):
            assert place in allowed, f"{path.name}: {place}"
            assert re.fullmatch(allowed[place], str(value)), f"{path.name}: {place} = {value}"
            seen.add((document["kind"], place))
    assert seen == {(kind, place) for kind, places in CLEAR.items() for place in places}
    names = {path.name for path in root.files() if path.suffix != ".floe"}
    assert names == {"run.json", "000001.json", "MANIFEST.json", "COMMIT", "0001.json"}


def test_sealed_files_of_equal_states_share_nothing(policy: SecurityPolicy, tmp_path: Path) -> None:
    """Neither from step to step nor within a file: equal tensors are not told by their ciphertext."""
    root = Root(tmp_path)
    with Checkpointer(tmp_path, security=policy) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"a": torch.zeros(300_000), "b": torch.zeros(300_000)}).result()
    blocks: list[bytes] = []
    for path in root.files():
        if path.suffix == ".floe":
            data = path.read_bytes()[74:]
            blocks += [data[start : start + 16] for start in range(0, len(data) - 15, 16)]
    assert len(set(blocks)) == len(blocks)


# Verify, and the command


@pytest.fixture
def run(tmp_path: Path) -> tuple[Root, Path]:
    """A sealed run of two steps, and its policy file."""
    policy = write_policy(tmp_path)
    root = Root(tmp_path / "run")
    with Checkpointer(root.path, security=policy) as checkpointer:
        for step in (1, 2):
            state = {"secretweight": torch.randn(400_000), "extra": {"secretword": "xyzzy"}}
            checkpointer.save(step, state, tags=["secrettag"]).result()
    return root, policy


@pytest.fixture
def strangers(tmp_path: Path) -> Path:
    """A policy of somebody else, whose key opens nothing of the run."""
    return write_policy(tmp_path / "elsewhere")


def test_verifying_with_the_key_looks_into_every_file(run: tuple[Root, Path]) -> None:
    root, policy = run
    sealing = sealing_of(SecurityPolicy.load(policy))
    report = verify(LocalStore(root.path), everything=True, guard=Guard(sealing=sealing))
    assert report.verdict == "whole"
    assert not any(checkpoint.is_closed for checkpoint in report.checkpoints)


def test_verifying_without_a_policy_tells_that_nothing_was_opened(run: tuple[Root, Path]) -> None:
    root, _ = run
    report = verify(LocalStore(root.path), everything=True)
    assert report.verdict == "whole"
    assert all(checkpoint.is_closed for checkpoint in report.checkpoints)


def test_verifying_with_a_key_that_does_not_open_is_no_verdict(
    run: tuple[Root, Path], strangers: Path
) -> None:
    root, _ = run
    report = verify(LocalStore(root.path), guard=SecurityPolicy.load(strangers).guard)
    assert report.verdict == "unverified"
    (problem,) = report.problems
    assert problem.kind == "locked"
    assert "file-" in problem.message


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def command(*arguments: Any) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return command


@pytest.mark.parametrize("way", ("option", "variable"))
def test_the_command_shows_a_sealed_run_to_who_has_the_key(
    run: tuple[Root, Path], command: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    root, policy = run
    key: tuple[Any, ...] = ("--security", policy)
    if way == "variable":
        monkeypatch.setenv("STRONGROOM_CONFIG", str(policy))
        key = ()
    status, out, _ = command("show", root.path, *key)
    assert status == 0
    assert "secretweight" in out
    assert "secrettag" in out
    status, out, _ = command("plan", root.path, "--ranks", "2", *key)
    assert status == 0
    assert "2 ranks" in out
    status, out, _ = command("verify", root.path, "--all", *key)
    assert status == 0
    assert "not opened" not in out
    assert command("ls", root.path, *key)[0] == 0


def test_the_command_tells_who_has_no_key(run: tuple[Root, Path], command: Any, strangers: Path) -> None:
    root, _ = run
    for key in ((), ("--security", strangers)):
        for arguments in (("show", root.path), ("plan", root.path, "--ranks", "2")):
            status, out, err = command(*arguments, *key)
            assert status == 4, arguments
            assert out == ""
            assert "secret" not in err
            assert "sealed" in err if not key else "no key here opens step 2" in err
        status, out, _ = command("ls", root.path, *key)
        assert status == 0
        assert "2 checkpoints" in out
    status, out, _ = command("verify", root.path, "--json", "--security", strangers)
    assert status == 4
    assert json.loads(out)["verdict"] == "unverified"
    status, out, _ = command("verify", root.path, "--all")
    assert status == 0
    assert "2 sealed checkpoints verified as stored, and not opened" in out


def test_the_command_refuses_a_policy_that_cannot_be_had(run: tuple[Root, Path], command: Any) -> None:
    root, policy = run
    (policy.parent / "kek.key").unlink()
    for arguments in (("ls",), ("show",), ("plan", "--ranks", "1"), ("verify",)):
        name, *more = arguments
        status, out, err = command(name, root.path, *more, "--security", policy)
        assert status == 2
        assert "kek.key is not there" in err
        assert out == ""


def test_without_a_policy_a_sealed_checkpoint_is_not_restored_and_not_passed_over(
    run: tuple[Root, Path],
) -> None:
    root, policy = run
    with Checkpointer(root.path) as checkpointer:
        assert [checkpoint.step for checkpoint in checkpointer.checkpoints()] == [2, 1]
        target = torch.zeros(400_000)
        for read in (checkpointer.restore, checkpointer.plan_restore):
            with pytest.raises(NoKeyError, match=r"step 2 .* is sealed, and no policy here says how"):
                read({"secretweight": target, "extra": {}})
        assert not target.any()
    with pytest.raises(CheckpointNotFoundError):
        Checkpointer(root.path, security=policy).restore(step=9)


def test_a_policy_may_be_given_as_a_path_or_by_the_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = write_policy(tmp_path)
    for number, security in enumerate((policy, str(policy), None)):
        monkeypatch.setenv("STRONGROOM_CONFIG", str(policy)) if security is None else None
        root = Root(tmp_path / f"run{number}")
        with Checkpointer(root.path, security=security) as checkpointer:
            checkpointer.save(1, {"w": torch.ones(2)}).result()
        assert root.manifest(1).is_sealed
    assert layout.SEALED == ".floe"
