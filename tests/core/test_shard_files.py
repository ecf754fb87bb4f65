"""The bytes of a checkpoint, read by tools that know nothing of Strongroom."""

from __future__ import annotations

import _pickle
import hashlib
import json
import marshal
import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from blake3 import blake3
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file

from strongroom import IntegrityError
from strongroom.dtypes import DTYPE_BYTES, torch_dtype

DIGESTS = ("blake3", "sha256")


def manifest_of(root: Path, folder: str) -> dict[str, Any]:
    return json.loads((root / folder / "data" / "MANIFEST.json").read_bytes())


def test_stock_safetensors_opens_a_shard_and_finds_the_values(root: Path, begin: Any) -> None:
    state = {"model": torch.nn.Linear(3, 4), "deep": [{"t": torch.arange(5)}], "scalar": torch.tensor(2.5)}
    checkpoint = begin(root).save(3, state).result()
    path = root / checkpoint.folder / "data" / "00000-00.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        assert set(file.keys()) == {"model.weight", "model.bias", "deep.[0].t", "scalar"}
        assert torch.equal(file.get_tensor("model.weight"), state["model"].weight)
        assert torch.equal(file.get_tensor("deep.[0].t"), torch.arange(5))
        assert file.get_tensor("scalar").item() == 2.5
        metadata = file.metadata()
    assert metadata["strongroom.step"] == "000000000003"
    assert metadata["strongroom.launch"] == "000001"
    assert metadata["strongroom.attempt"] == checkpoint.attempt


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_stock_safetensors_opens_every_dtype_that_is_stored(name: str, root: Path, begin: Any) -> None:
    dtype = torch_dtype(name)
    tensor = torch.tensor([0, 1, 1, 0]).to(dtype)
    checkpoint = begin(root).save(1, {"t": tensor, "empty": tensor[:0], "other": torch.ones(3)}).result()
    found = load_file(root / checkpoint.folder / "data" / "00000-00.safetensors")
    assert found["t"].dtype == dtype
    assert found["t"].view(torch.uint8).equal(tensor.view(torch.uint8))
    assert found["empty"].shape == (0,)


def test_a_large_state_is_spread_over_several_shards_that_stock_tools_open(
    root: Path, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strongroom.workers.processors", lambda: 2)
    state = {f"t{number}": torch.full((1 << 20,), float(number)) for number in range(9)}
    checkpoint = begin(root).save(1, state).result()
    shards = sorted((root / checkpoint.folder / "data").glob("00000-*.safetensors"))
    assert len(shards) == 4
    sizes = [path.stat().st_size for path in shards]
    assert max(sizes) < 2 * min(sizes)
    found = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    assert set(found) == set(state)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    target = {name: torch.zeros(1 << 20) for name in state}
    begin(root).restore(target)
    assert all(torch.equal(target[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("digest", DIGESTS)
def test_each_file_is_pinned_by_the_digest_that_was_chosen(digest: str, root: Path, begin: Any) -> None:
    state = {"t": torch.arange(700_000), "extra": list(range(100))}
    checkpoint = begin(root, digest=digest).save(1, state).result()
    manifest = manifest_of(root, checkpoint.folder)
    assert manifest["digest"] == digest
    data = root / checkpoint.folder / "data"
    names = {record["path"] for record in manifest["files"]} | {"MANIFEST.json"}
    assert names == {path.name for path in data.iterdir()}
    for record in manifest["files"]:
        content = (data / record["path"]).read_bytes()
        assert record["size"] == len(content)
        if digest == "sha256":
            found = hashlib.sha256(content).hexdigest()
        else:
            blocks = [content[start : start + (1 << 20)] for start in range(0, len(content), 1 << 20)]
            found = blake3(b"".join(blake3(block).digest() for block in blocks)).hexdigest()
        assert record["digest"] == f"{digest}:{found}"


@pytest.mark.parametrize("digest", DIGESTS)
def test_commit_pins_the_manifest_by_plain_sha256(digest: str, root: Path, begin: Any) -> None:
    checkpoint = begin(root, digest=digest).save(1, {"t": torch.ones(1)}).result()
    commit = json.loads((root / checkpoint.folder / "COMMIT").read_bytes())
    manifest = (root / checkpoint.folder / "data" / "MANIFEST.json").read_bytes()
    assert (
        commit["manifest"] == f"sha256:{hashlib.sha256(manifest).hexdigest()}" == checkpoint.manifest_digest
    )


def test_control_documents_end_in_the_digest_of_themselves(root: Path, begin: Any) -> None:
    begin(root).save(1, {"t": torch.ones(1)}).result()
    documents = [root / "run.json", root / "launches" / "000001.json", *root.glob("step-*/COMMIT")]
    assert len(documents) == 3
    for path in documents:
        text = path.read_bytes()
        before, _, digest = text.rpartition(b',"~digest":"sha256:')
        assert digest.endswith(b'"}')
        assert hashlib.sha256(before + b"}").hexdigest().encode() == digest[:-2]


def test_the_parent_of_each_checkpoint_is_the_one_before_it(root: Path, begin: Any) -> None:
    with begin(root) as writer:
        checkpoints = [writer.save(step, {"t": torch.ones(1)}).result() for step in (1, 2)]
    resumed = begin(root)
    resumed.restore()
    checkpoints.append(resumed.save(3, {"t": torch.ones(1)}).result())
    parents = [manifest_of(root, checkpoint.folder)["parent"] for checkpoint in checkpoints]
    assert parents[0] is None
    for parent, before in zip(parents[1:], checkpoints[:-1], strict=True):
        assert (parent["launch"], parent["step"], parent["attempt"]) == (
            before.launch,
            before.step,
            before.attempt,
        )
        assert parent["manifest"] == before.manifest_digest


def test_equal_states_give_equal_bytes_but_for_what_binds_them(
    root: Path, tmp_path: Path, begin: Any
) -> None:
    def build() -> dict[str, Any]:
        torch.manual_seed(4)
        return {"model": torch.nn.Linear(3, 3), "set": {"b", "a"}, "d": {1: "x", "k": [1.5]}}

    from strongroom.config import Clock

    same = {"clock": Clock(now_ns=lambda: 10**18, monotonic=lambda: 0.0), "draw": lambda n: "ab" * n}
    for where in (root, tmp_path / "other"):
        begin(where, **same).save(1, build()).result()
    one, two = (
        {p.relative_to(where): p.read_bytes() for p in where.rglob("*") if p.is_file()}
        for where in (root, tmp_path / "other")
    )
    assert one == two


def test_the_index_is_a_safetensors_file_too(root: Path, begin: Any) -> None:
    checkpoint = begin(root).save(1, {"a": torch.ones(2, 3), "b": torch.ones(1)}).result()
    columns = load_numpy(root / checkpoint.folder / "data" / "index.safetensors")
    names = bytes(columns["tensor.name"]).decode()
    ends = columns["tensor.name.ends"].tolist()
    assert [names[start:end] for start, end in zip([0, *ends], ends, strict=False)] == ["a", "b"]
    assert columns["tensor.shape"].tolist() == [2, 3, 1]
    assert columns["block.digest"].size == 32


def test_no_file_holds_a_pickle(root: Path, begin: Any) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "rng": np.random.get_state(), "extra": {(1, 2): {3}}}
    begin(root).save(1, state).result()
    for path in root.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert b"PK\x03\x04" not in data[:4]
            for start in (0, 8):
                with pytest.raises(ValueError):  # noqa: PT011 - whatever pickletools says of what is none
                    list(pickletools.genops(data[start:]))


def test_files_are_readable_by_whoever_the_umask_lets(root: Path, begin: Any) -> None:
    before = os.umask(0o027)
    try:
        begin(root).save(1, {"t": torch.ones(1)}).result()
    finally:
        os.umask(before)
    for path in root.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path


def test_restoring_reaches_no_unpickler(root: Path, begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def training() -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "extra": {}}

    saved = training()
    saved["model"](torch.ones(1, 2)).sum().backward()
    saved["optimizer"].step()
    saved["extra"] = {"rng": torch.get_rng_state(), "numpy": np.random.get_state(), "set": {1}}
    begin(root).save(1, saved).result()

    def mine(*_: Any, **__: Any) -> Any:
        raise AssertionError("restore reached an unpickler")

    for module, names in (
        (pickle, ("load", "loads", "Unpickler", "_Unpickler", "_load", "_loads")),
        (_pickle, ("load", "loads", "Unpickler")),
        (marshal, ("load", "loads")),
        (torch, ("load",)),
        (torch.serialization, ("load", "_load", "_legacy_load")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, mine)
    checkpointer = begin(root)
    assert checkpointer.restore(training()).step == checkpointer.restore().step == 1


def test_a_pickle_planted_in_any_file_is_damage_and_never_runs(
    root: Path, tmp_path: Path, begin: Any
) -> None:
    trap = tmp_path / "sprung"

    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (trap,))

    payload = pickle.dumps(Trap())
    begin(root).save(1, {"t": torch.ones(3), "extra": {"a": 1}}).result()
    for path in [p for p in root.rglob("*") if p.is_file()]:
        kept = path.read_bytes()
        for planted in (payload, kept + payload, payload + kept):
            path.write_bytes(planted)
            if path.parent.name == "launches":
                # Not needed while the newest checkpoint is whole.
                assert begin(root).restore({"t": torch.zeros(3), "extra": 0}).step == 1
                continue
            with pytest.raises(IntegrityError):
                begin(root).restore({"t": torch.zeros(3), "extra": 0})
        path.write_bytes(kept)
    assert not trap.exists()
