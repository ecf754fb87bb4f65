"""Promise 3, of a restore: what is damaged is skipped, by name, and the next older one is loaded whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from strongroom import Checkpointer, PerRank, StrongroomError

if TYPE_CHECKING:
    Run = Any

STRIDE = 23
"""Every so many bytes: each byte is verification's business, and costs a restore here."""


def restore_from(run: Run) -> tuple[int, tuple[tuple[int, str], ...]]:
    """Restore into fresh tensors; what came must be the values of the step that it says."""
    state = {"w": torch.zeros(3), "x": {"epoch": 0, "b": torch.tensor([0])}, "mine": PerRank(0)}
    with Checkpointer(run.root) as checkpointer:
        restored = checkpointer.restore(state)
    assert restored is not None
    step = restored.step
    assert torch.equal(state["w"], torch.arange(3.0) + step)  # type: ignore[arg-type]
    assert restored.state["x"]["epoch"] == step
    assert restored.state["x"]["b"].item() == step
    assert restored.state["mine"] == step
    return step, restored.skipped


def assert_falls_back(run: Run, path: Path, what: Any) -> None:
    step, skipped = restore_from(run)
    assert step == 2, what
    ((skipped_step, reason),) = skipped
    assert skipped_step == 3, what
    assert path.name in reason, (what, reason)


def damages(whole: bytes, older: bytes) -> Iterator[tuple[str, bytes]]:
    for position in {*range(0, len(whole), STRIDE), len(whole) - 1}:
        changed = bytearray(whole)
        changed[position] ^= 1 << (position % 8)
        yield f"byte {position}", bytes(changed)
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        yield f"cut to {length}", whole[:length]
    for more in (b"\0", b"\n", whole):
        yield f"{len(more)} bytes more", whole + more
    yield "of the older step", older


@pytest.fixture
def fallen_back_to(run: Run) -> Run:
    assert restore_from(run) == (3, ())
    return run


def test_every_damaged_file_makes_a_restore_fall_back_and_is_named(fallen_back_to: Run) -> None:
    run = fallen_back_to
    for file in run.files():
        path = run.newest / file
        whole = path.read_bytes()
        for what, content in damages(whole, (run.folder(2) / file).read_bytes()):
            path.write_bytes(content)
            assert_falls_back(run, path, (file, what))
        path.write_bytes(whole)
    assert restore_from(run) == (3, ())


def test_every_missing_or_renamed_file_makes_a_restore_fall_back_and_is_named(run: Run) -> None:
    for file in run.files():
        if file == "COMMIT":
            continue
        path = run.newest / file
        other = path.with_name("00001-00.safetensors")
        path.rename(other)
        assert_falls_back(run, path, file)
        other.rename(path)


def test_a_missing_commit_is_a_save_that_never_was(run: Run) -> None:
    (run.newest / "COMMIT").unlink()
    assert restore_from(run) == (2, ())


def test_a_file_too_many_is_no_reason_to_fall_back(run: Run) -> None:
    (run.newest / "data/extra").write_bytes(b"x")
    assert restore_from(run) == (3, ())


def test_a_damaged_run_record_is_an_error_that_names_it(run: Run) -> None:
    path = run.root / "run.json"
    whole = path.read_bytes()
    for _, content in damages(whole, b""):
        path.write_bytes(content)
        with pytest.raises(StrongroomError, match=r"run\.json"):
            restore_from(run)
    path.unlink()
    with pytest.raises(StrongroomError, match=r"run\.json is missing"):
        restore_from(run)


def test_a_damaged_launch_record_ends_the_line_and_is_named(run: Run) -> None:
    shutil.rmtree(run.newest / "data")
    path = run.root / "launches/000002.json"
    whole = path.read_bytes()
    for content in (b"", whole[:-1], whole.replace(b"step", b"stfp")):
        path.write_bytes(content)
        with pytest.raises(StrongroomError, match=r"000002\.json"):
            restore_from(run)


def test_a_damaged_shard_without_a_byte_of_a_tensor_makes_a_restore_fall_back(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"epoch": step})
    (shard,) = tmp_path.glob("step-000000000002-*/data/*-00.safetensors")
    for damage in (lambda: shard.write_bytes(shard.read_bytes()[::-1]), shard.unlink):
        damage()
        restored = Checkpointer(tmp_path).restore()
        assert restored is not None
        assert restored.step == 1
        assert shard.name in restored.skipped[0][1]
