"""Several ranks under a policy that seals: what other callbacks write is sealed by all of them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import escape_ranks
import pytest
from lightning_ranks import LightningLauncher

from strongroom import Checkpointer
from strongroom_security.recipients.file import create_key_file


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    create_key_file(tmp_path / "kek.key")
    file = tmp_path / "strongroom.toml"
    file.write_text('[seal]\nrecipients = ["file:kek.key"]\n')
    return file


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def in_the_clear(folder: Path) -> list[str]:
    """Files that hold the marker, or that torch could read."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files, "something was written"
    marker = escape_ranks.MARKER.tobytes() * 4
    return [
        str(path.relative_to(folder))
        for path in files
        if zipfile.is_zipfile(path) or marker in path.read_bytes() or path.suffix in {".ckpt", ".distcp"}
    ]


@pytest.mark.parametrize("way", escape_ranks.WAYS)
def test_what_another_callback_writes_is_sealed_by_all_ranks_and_taken_up_again(
    launcher: LightningLauncher, work: Path, policy: Path, way: str
) -> None:
    ended = launcher.run(escape_ranks.train_beside, work, way, policy, ranks=2)
    assert in_the_clear(work) == []
    assert not list(work.rglob("*.sealing"))
    held = Checkpointer(work / "other" / "last.ckpt", security=policy).restore()
    assert held is not None
    assert held.step == 12
    model = {name: value.double().flatten().tolist() for name, value in held.state["model"].items()}
    assert model == ended[0]["weights"]
    for found, (at_start, steps) in zip(
        ended, launcher.run(escape_ranks.take_up, work, way, policy, ranks=2), strict=True
    ):
        assert at_start["weights"] == found["weights"]
        assert at_start["moments"] == found["moments"]
        assert (at_start["step"], at_start["lr"]) == (12, found["lr"])
        assert steps == list(range(13, 19))
    for weights in launcher.run(escape_ranks.validate, work, way, policy, ranks=2):
        assert weights == ended[0]["weights"]
    assert in_the_clear(work) == []


def test_what_was_sealed_of_shards_comes_back_into_another_layout(
    launcher: LightningLauncher, work: Path, policy: Path
) -> None:
    (ended, _) = launcher.run(escape_ranks.train_beside, work, "fsdp2", policy, ranks=2)
    for found in launcher.run(escape_ranks.bring_back, work, "ddp", policy, ranks=2):
        assert found["weights"] == ended["weights"]
        assert found["moments"] == ended["moments"]


@pytest.mark.parametrize("way", ("ddp", "fsdp2"))
def test_a_finders_trial_is_sealed_and_taken_back_on_every_rank(
    launcher: LightningLauncher, work: Path, policy: Path, way: str
) -> None:
    for done in launcher.run(escape_ranks.find_rate, work, way, policy, ranks=2):
        assert done["step"] == 6
    assert in_the_clear(work) == []
