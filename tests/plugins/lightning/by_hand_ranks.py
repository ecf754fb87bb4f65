"""What ranks do in the tests of saving by hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import rank_runs
from lightning.pytorch.callbacks import Callback

from strongroom_lightning.loading import read
from strongroom_lightning.uri import CheckpointUri


class AtTheEnd(Callback):
    """Saves by hand, on every rank, in each way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint("strongroom://latest")
        trainer.save_checkpoint(self.folder / "x.ckpt")
        trainer.save_checkpoint(self.folder / "x.safetensors", weights_only=True)


class IntoAFolder(Callback):
    """Hands weights over into the place of a folder, which only rank 0 would notice."""

    def on_train_end(self, trainer: Any, *args: Any) -> None:
        os.makedirs("folder.safetensors", exist_ok=True)
        trainer.save_checkpoint("folder.safetensors", weights_only=True)


def hand_over_into_a_folder(folder: Path) -> None:
    os.chdir(folder)
    rank_runs.train(folder / "run", callbacks=(IntoAFolder,), checkpoint={"every_n_epochs": 2}, max_epochs=1)


def save_each_way(folder: Path, **way: Any) -> dict[str, Any]:
    os.chdir(folder)
    done = rank_runs.train(
        folder / "run", callbacks=(lambda: AtTheEnd(folder),), checkpoint={"every_n_epochs": 2}, **way
    )
    # One rank of a job that still runs reads alone.
    uri = CheckpointUri.of(folder / "x.ckpt")
    assert uri is not None
    state = read(uri)["state_dict"]
    return {
        "weights": done["weights"],
        "read": {name: value.flatten().tolist() for name, value in state.items()},
    }
