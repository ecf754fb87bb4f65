"""Shards in folders, for stores that count requests by how names begin: a checkpoint like any other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import Checkpointer, ConfigError, KeepLast, layout, shards
from strongroom.errors import IntegrityError
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom.testing import SimDisk
from strongroom.verify import verify
from strongroom_security import Seal, SecurityPolicy, Sign
from strongroom_security.recipients.file import create_key_file
from strongroom_security.signers.generating import generate_key

Begin = Callable[..., Checkpointer]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has several shards however small its state is."""
    monkeypatch.setattr(shards, "MIN_PART_BYTES", 4096)
    monkeypatch.setattr("strongroom.checkpointer.writing_workers", lambda: 4)


def state(step: int = 1) -> dict[str, Any]:
    return {f"w{number}": torch.full((2000,), float(number + step)) for number in range(8)}


def save(root: Any, *steps: int, **options: Any) -> None:
    with Checkpointer(root, **{"scatter": 16, **options}) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step)).result(60)


def folder_of(root: Path, step: int = 1) -> Path:
    (found,) = root.glob(f"step-{step:012d}-*")
    return found


def shards_of(folder: Path) -> list[str]:
    data = folder / "data"
    paths = [path.relative_to(data).as_posix() for path in data.rglob("*") if path.is_file()]
    return sorted(path for path in paths if layout.parse_shard_path(path.removesuffix(layout.SEALED)))


def assert_restores(root: Any, step: int = 1, **options: Any) -> None:
    restored = Checkpointer(root, **options).restore()
    assert restored is not None
    assert (restored.step, restored.skipped) == (step, ())
    for name, expected in state(step).items():
        assert torch.equal(restored.state[name], expected)


def test_shards_lie_in_folders_and_all_else_where_it_always_does(root: Path) -> None:
    save(root, 1)
    found = shards_of(folder_of(root))
    assert len(found) == 4
    assert len({path[:2] for path in found}) == 4
    assert all(layout.is_shard_folder(path[:3]) for path in found)
    beside = {path.name for path in (folder_of(root) / "data").iterdir() if path.is_file()}
    assert {"MANIFEST.json", "index.safetensors", "state.json"} <= beside
    assert not any(layout.parse_shard_path(name) for name in beside)
    # Whoever reads it asks for nothing special.
    assert_restores(root)
    assert verify(LocalStore(root), everything=True).verdict == "whole"


def test_without_the_option_no_shard_is_in_a_folder(root: Path) -> None:
    save(root, 1, scatter=None)
    assert not any("/" in path for path in shards_of(folder_of(root)))


def test_a_run_may_begin_to_scatter_and_end_it(root: Path) -> None:
    save(root, 1, scatter=None)
    with Checkpointer(root, scatter=256) as checkpointer:
        checkpointer.restore()
        checkpointer.save(2, state(2)).result(60)
    with Checkpointer(root) as checkpointer:
        checkpointer.restore()
        checkpointer.save(3, state(3)).result(60)
    assert [any("/" in path for path in shards_of(folder_of(root, step))) for step in (1, 2, 3)] == [
        False,
        True,
        False,
    ]
    assert_restores(root, 3)
    assert verify(LocalStore(root), everything=True).verdict == "whole"


def test_a_plain_copy_of_it_is_a_run(root: Path, tmp_path: Path) -> None:
    save(root, 1, 2)
    shutil.copytree(root, tmp_path / "copy")
    shutil.rmtree(root)
    assert_restores(tmp_path / "copy", 2)
    memory = MemoryStore()
    copied = tmp_path / "copy"
    memory.plant(
        {
            path.relative_to(copied).as_posix(): path.read_bytes()
            for path in copied.rglob("*")
            if path.is_file()
        }
    )
    assert_restores(memory, 2)


@pytest.mark.parametrize("digest", ("sha256", "blake3"))
def test_sealed_and_signed_it_needs_no_exception(root: Path, tmp_path: Path, digest: str) -> None:
    create_key_file(tmp_path / "kek.key")
    generate_key(tmp_path / "signer.pem", curve="P-256", passphrase=None)
    policy = SecurityPolicy(
        seal=Seal(recipients=["file:kek.key"], base=tmp_path),
        sign=Sign(key="file:signer.pem", base=tmp_path),
        digest=digest,  # type: ignore[arg-type]
    )
    save(root, 1, security=policy)
    found = shards_of(folder_of(root))
    assert len({path[:2] for path in found}) == 4
    assert all(path.endswith(".safetensors.floe") for path in found)
    assert_restores(root, security=policy)
    report = verify(LocalStore(root), everything=True, guard=policy.guard)
    assert report.verdict == "whole"
    # Its path is part of what a shard is sealed to: in another folder it is another file.
    one, two = (folder_of(root) / "data" / path for path in found[:2])
    kept = one.read_bytes()
    one.write_bytes(two.read_bytes())
    with pytest.raises(IntegrityError, match="none is whole"):
        Checkpointer(root, security=policy).restore()
    one.write_bytes(kept)
    assert_restores(root, security=policy)


def test_a_part_of_a_tensor_is_read_from_a_folder_too(root: Path) -> None:
    save(root, 1)
    restored = Checkpointer(root).restore({"w3": torch.zeros(2000)}, strict=False)
    assert torch.equal(restored.state["w3"], state()["w3"])


@pytest.mark.parametrize(
    "extra", ("a0/00000-77.safetensors", "7f/00009-00.safetensors", "{0}/extra.bin", "{0}/a0/x", "zz/x")
)
def test_verify_finds_a_file_too_many_in_or_beside_the_folders(root: Path, extra: str) -> None:
    save(root, 1)
    folder = shards_of(folder_of(root))[0][:2]
    path = folder_of(root) / "data" / extra.format(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"more")
    report = verify(LocalStore(root))
    assert report.verdict == "damaged"
    (problem,) = report.checkpoints[0].problems
    assert problem.kind == "unexpected"
    assert path.as_posix().startswith((root / problem.key).as_posix().rstrip("/"))


def test_verify_finds_what_is_missing_moved_or_changed_in_a_folder(root: Path) -> None:
    save(root, 1, 2, 3)
    for step, damage in (
        (1, Path.unlink),
        (2, lambda path: path.rename(path.parent.parent / path.name)),
        (3, lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\1")),
    ):
        folder = folder_of(root, step)
        damage(folder / "data" / shards_of(folder)[0])
    found = verify(LocalStore(root), everything=True).checkpoints
    assert [[problem.kind for problem in each.problems] for each in found] == [
        ["damaged"],
        ["missing", "unexpected"],
        ["missing"],
    ]


def test_where_the_manifest_is_damaged_shards_are_known_by_their_names_alone(root: Path) -> None:
    save(root, 1)
    data = folder_of(root) / "data"
    (data / "MANIFEST.json").write_bytes(b"{}")
    (data / "a1").mkdir()
    (data / "a1" / "extra.bin").write_bytes(b"more")
    (data / "more").mkdir()
    problems = verify(LocalStore(root)).checkpoints[0].problems
    assert {problem.key.partition("/data/")[2] for problem in problems if problem.kind == "unexpected"} == {
        "a1/extra.bin",
        "more/",
    }


def test_the_manifest_lists_the_folder_and_the_index_does(root: Path) -> None:
    save(root, 1)
    folder = folder_of(root)
    listed = json.loads((folder / "data" / "MANIFEST.json").read_bytes())["files"]
    assert [file["path"] for file in listed if "/" in file["path"]] == shards_of(folder)


def test_what_is_written_while_training_waits_is_scattered_as_well(
    root: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "MIN_PART_BYTES", 8 * MIB)
    checkpointer = begin(root, scatter=16, memory_budget=16 * MIB)
    large = {name: torch.full((3 * MIB,), 1.0) for name in ("a", "b", "c")}
    checkpointer.save(1, large).result(60)
    found = shards_of(folder_of(root))
    assert len(found) >= 2
    assert all("/" in path for path in found)
    assert torch.equal(begin(root).restore().state["c"], large["c"])


def test_retention_and_dead_saves_leave_no_folder_behind(root: Path, begin: Begin) -> None:
    save(root, 1, 2, 3, keep=KeepLast(count=1))
    assert [path.name[5:17] for path in root.glob("step-*")] == ["000000000003"]


def test_no_power_cut_takes_a_folder_of_shards_from_what_was_committed(tmp_path: Path) -> None:
    disk = SimDisk(tmp_path, samples=8)
    with Checkpointer(LocalStore(disk.folder / "run", calls=disk), scatter=16) as checkpointer:
        checkpointer.save(1, state()).result(60)
        disk.promise(1)
    seen = set()
    for after in disk.crash_states():
        store = after.store("run")
        restored = Checkpointer(store).restore()
        seen.add((restored is not None, bool(after.promised)))
        if restored is not None:
            assert all(torch.equal(restored.state[name], tensor) for name, tensor in state().items())
    assert seen == {(False, False), (True, False), (True, True)}


@pytest.mark.parametrize("scatter", (1, -1, 257, "16", 2.5, True))
def test_shards_go_over_a_number_of_folders(scatter: Any) -> None:
    with pytest.raises(ConfigError, match="from 2 to 256"):
        Checkpointer(MemoryStore(), scatter=scatter)
