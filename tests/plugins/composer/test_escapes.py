"""Under a policy that seals, nothing of a run's state stands in the clear, whoever wrote it."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import composer_jobs as jobs
import numpy as np
import pytest
import torch
from composer.callbacks import ExportForInferenceCallback
from composer_runs import Interrupt, Net, train

from strongroom import Checkpointer, ConfigError
from strongroom_composer import StrongroomCheckpoint
from strongroom_composer.escapes import is_sealed
from strongroom_security.recipients.file import create_key_file

MARKER = np.float32(1.2345e-21)
"""A weight that no training moves; its bytes are looked for in every file."""


class Marked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("marker", torch.full((256,), float(MARKER)))


SAVER = {"save_folder": "native", "save_interval": "2ba", "save_filename": "ba{batch}.pt"}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a run writes, under a policy that seals and is in force for the process."""
    create_key_file(tmp_path / "kek.key")
    file = tmp_path / "strongroom.toml"
    file.write_text('[seal]\nrecipients = ["file:kek.key"]\n')
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("STRONGROOM_CONFIG", str(file))
    return tmp_path / "work"


def in_the_clear(folder: Path) -> list[str]:
    """The files that hold the marker."""
    sought = np.full(8, MARKER).tobytes()
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and sought in path.read_bytes()
    )


def test_without_a_policy_composers_files_are_as_they_were(root: Path) -> None:
    train(root, model=Marked, until=3, **SAVER)
    assert "native/ba2.pt" in in_the_clear(root.parent)


def test_what_composer_saves_besides_is_sealed_in_its_place(work: Path, said: Any) -> None:
    outcome = train("run", model=Marked, until=5, save_num_checkpoints_to_keep=1, **SAVER)
    assert in_the_clear(work) == []
    # Composer's own counting, linking and removing goes on.
    assert sorted(path.name for path in (work / "native").iterdir()) == ["ba4.pt", "latest-rank0.pt"]
    assert is_sealed(str(work / "native" / "latest-rank0.pt"))
    assert "sealed as well: CheckpointSaver (native)" in said.text
    with tarfile.open(work / "native" / "ba4.pt") as archive:
        archive.extractall(work / "unpacked", filter="data")
    with Checkpointer(work / "unpacked") as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None
    assert restored.step == 4
    assert torch.equal(restored.state["model"]["marker"], outcome.weights["marker"])
    assert restored.state["composer"]["timestamp"]["batch"] == 4


def test_sealing_what_composer_saves_changes_nothing_of_the_run(work: Path, uninterrupted: Any) -> None:
    settings = {"validate": True}
    reference = uninterrupted(**settings)
    train("run", until=8, checkpoint={"save_interval": "5ba"}, **SAVER, **settings)
    # A start again: Composer is told to load its newest, which is sealed, and ours goes on from ours.
    native = {
        **SAVER,
        "autoresume": True,
        "run_name": "crab",
        "save_overwrite": True,
        "auto_log_hparams": False,
    }
    resumed = train("run", seed=1000, checkpoint={"save_interval": "5ba"}, **native, **settings)
    resumed.ends_like(reference)


def test_a_sealed_file_alone_cannot_be_begun_from(work: Path) -> None:
    train("run", until=3, **SAVER)
    with pytest.raises(ConfigError, match=r"native/ba2.pt is sealed by Strongroom"):
        train("elsewhere", load_path="native/ba2.pt")


def test_weights_only_and_by_hand(work: Path) -> None:
    class ByHand(Interrupt):
        def batch_end(self, state: Any, logger: Any) -> None:
            if int(state.timestamp.batch) == 2:
                self.trainer.save_checkpoint("by-hand/{batch}.pt", weights_only=True)

        def init(self, state: Any, logger: Any) -> None:
            from strongroom_composer.seam import trainer_of

            self.trainer = trainer_of(state)

    train("run", model=Marked, until=3, callbacks=(lambda: ByHand(99),))
    assert is_sealed("by-hand/2.pt")
    assert in_the_clear(work) == []


def test_refused_before_anything_is_trained(work: Path) -> None:
    with pytest.raises(ConfigError, match=r"these write its state too: CheckpointSaver \(native\)"):
        train("run", checkpoint={"escapes": "refuse"}, **SAVER)
    assert in_the_clear(work) == []


def test_refused_when_a_program_saves_by_hand(work: Path) -> None:
    outcome = train("run", model=Marked, checkpoint={"escapes": "refuse"}, max_duration="2ba")
    with pytest.raises(ConfigError, match="about to be written in the clear"):
        outcome.trainer.save_checkpoint("by-hand.pt")
    with pytest.raises(ConfigError, match="export_for_inference would write the weights in the clear"):
        outcome.trainer.export_for_inference("torchscript", "exported.pt")
    assert in_the_clear(work) == []


def test_allowed_and_told(work: Path, said: Any) -> None:
    train("run", model=Marked, until=3, checkpoint={"escapes": "warn"}, **SAVER)
    assert "these write its state in the clear, as escapes='warn' lets them: CheckpointSaver" in said.text
    assert in_the_clear(work) == ["native/ba2.pt"]


def test_what_cannot_be_sealed_is_refused(work: Path) -> None:
    def export() -> Any:
        return ExportForInferenceCallback("torchscript", "exported.pt")

    with pytest.raises(ConfigError, match="cannot be sealed: ExportForInferenceCallback"):
        train("run", callbacks=(export,))


def test_another_trainer_of_the_process_is_left_alone(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train("run", until=1)
    monkeypatch.delenv("STRONGROOM_CONFIG")
    train(None, model=Marked, until=3, **SAVER)
    assert in_the_clear(work) == ["native/ba2.pt"]


@pytest.mark.parametrize("way", ("DDP", "FSDP2 full", "FSDP2 sharded"))
def test_with_ranks(launcher: Any, work: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRONGROOM_CONFIG")  # ranks of later tests would have it too
    checkpoint = {"save_interval": "1ba", "security": str(work.with_name("strongroom.toml"))}
    settings = {**SAVER, "save_folder": str(work / "native"), "checkpoint": checkpoint}
    launcher.run(jobs.trained, work / "run", way, until=3, ranks=2, **settings)
    (file,) = (path for path in (work / "native").rglob("*") if path.is_file() and not path.is_symlink())
    assert is_sealed(str(file))


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="escapes must be one of"):
        StrongroomCheckpoint("run", escapes="hide")  # type: ignore[arg-type]
