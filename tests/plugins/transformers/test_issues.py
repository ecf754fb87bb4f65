"""What users of the Trainer have reported of its checkpoints: each is right here, tested by its number.

Where the Trainer itself is still wrong, the test shows that too.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_timing import steps
from trained import BATCHES, EPOCHS

from strongroom.errors import CheckpointNotFoundError

Train = Callable[..., Any]
LAST = BATCHES * EPOCHS

ISSUES = {17032, 35525, 35782}
PULLS = {40790, 41723, 46386}


def torn(root: Path, step: int) -> None:
    """What is left of a save that died after all but its last file was written."""
    (newest,) = root.glob(f"step-{step:012}-*")
    beyond = root / newest.name.replace(f"{step:012}", f"{step + 1:012}")
    shutil.copytree(newest, beyond, ignore=shutil.ignore_patterns("COMMIT"))


def test_issue_35782_a_save_that_died_is_not_taken_up(
    train: Train, root: Path, tmp_path: Path, uninterrupted: Train
) -> None:
    train(until=5)
    torn(root, 5)
    train(seed=3).ends_like(uninterrupted())

    train(root=None, until=5)
    (tmp_path / "trainer" / "checkpoint-5" / "trainer_state.json").unlink()
    with pytest.raises(FileNotFoundError):  # the Trainer's own
        train(root=None, resume=True, seed=3)


def test_issue_35525_where_the_newest_cannot_be_loaded_the_one_before_is(
    train: Train, root: Path, tmp_path: Path, uninterrupted: Train
) -> None:
    train(until=5)
    for step in (4, 5):
        (folder,) = root.glob(f"step-{step:012}-*")
        shard = next(folder.glob("data/*.safetensors"))
        content = bytearray(shard.read_bytes())
        content[-5] ^= 1
        shard.write_bytes(content)
    resumed = train(seed=3)
    assert len(resumed.losses) == LAST - 3
    resumed.ends_like(uninterrupted())

    train(root=None, until=5)
    weights = tmp_path / "trainer" / "checkpoint-5" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 0x40
    weights.write_bytes(content)
    # The Trainer's own goes on from what is damaged, and nobody is told.
    native = train(root=None, resume=True, seed=3)
    assert native.step == LAST
    assert native.losses != uninterrupted().losses[5:]


def test_pr_40790_one_call_for_the_first_start_and_for_every_other(
    train: Train, root: Path, uninterrupted: Train
) -> None:
    """No flag has to be changed after the first start; and who means that there must be one can say so."""
    assert len(train(until=4).losses) == 4
    assert len(train(seed=2).losses) == LAST - 4
    shutil.rmtree(root)
    with pytest.raises(CheckpointNotFoundError):
        train(resume=True)


def test_issue_17032_random_states_come_back_at_an_epochs_end_too(train: Train, uninterrupted: Train) -> None:
    settings = {"save_strategy": "epoch"}
    train(until=BATCHES + 2, **settings)
    resumed = train(seed=3, **settings)
    assert len(resumed.losses) == BATCHES
    resumed.ends_like(uninterrupted())


def test_pr_46386_a_checkpoint_goes_to_its_root_and_is_staged_nowhere(
    train: Train, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    bucket = tmp_path / "bucket"
    train(root=root.as_uri(), options={"replicate_to": [bucket]}, save_steps=4)
    assert steps(root) == steps(bucket) == [4, 8, 12]
    assert list(temporary.iterdir()) == []
    assert list((tmp_path / "trainer").iterdir()) == []
    shutil.rmtree(root)  # another machine
    resumed = train(root=root, options={"replicate_to": [bucket]}, save_steps=4)
    assert resumed.losses == []


def test_every_issue_has_a_test() -> None:
    texts = [path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py")]
    names = {name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    issues = {int(number) for name in names for number in re.findall(r"issue_(\d+)", name)}
    pulls = {int(number) for name in names for number in re.findall(r"pr_(\d+)", name)}
    assert (issues, pulls) == (ISSUES, PULLS)
