"""Checkpoints read without a run: ``load_from_checkpoint``, and Trainers that have no callback of ours."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.core import saving
from torch.utils.data import DataLoader

from strongroom import Checkpointer
from strongroom.errors import CheckpointNotFoundError, ConfigError, NoKeyError, StateMismatchError
from strongroom_lightning import StrongroomCheckpoint
from strongroom_lightning.filesystem import StrongroomFileSystem
from strongroom_lightning.uri import CheckpointUri
from strongroom_security.recipients.file import create_key_file


class Small(lightning.LightningModule):
    def __init__(self, width: int = 3, name: str = "a") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Linear(width, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Data(lightning.LightningDataModule):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.epochs = 0

    def train_dataloader(self) -> Any:
        return DataLoader(
            torch.utils.data.TensorDataset(torch.ones(8, 6), torch.ones(8).long()), batch_size=4
        )

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]


def run(root: Path, module: Any, **options: Any) -> lightning.Trainer:
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=4,
        max_epochs=-1,
        callbacks=[StrongroomCheckpoint(root, every_n_train_steps=2, **options)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=Data(8))
    return trainer


def without_callback() -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished run of steps 2 and 4, and the module that it trained."""
    root = tmp_path_factory.mktemp("saved") / "run"
    module = Small(width=5)
    run(root, module)
    return root, module


def checkpoint_folder(root: Path, step: int) -> Path:
    (found,) = root.glob(f"step-{step:012d}-*")
    return found


def test_a_module_is_built_and_filled_whatever_names_the_checkpoint(saved: Any) -> None:
    root, module = saved
    weights = module.state_dict()
    for name in (
        f"strongroom://{root}",
        str(root),
        root,
        f"strongroom://{root}#step=4",
        checkpoint_folder(root, 4),
    ):
        loaded = Small.load_from_checkpoint(name)
        assert loaded.hparams.width == 5
        assert all(torch.equal(value, weights[key]) for key, value in loaded.state_dict().items())
    for name in (f"strongroom://{root}#step=2", checkpoint_folder(root, 2)):
        assert not torch.equal(Small.load_from_checkpoint(name).net[0].weight, weights["net.0.weight"])


def test_what_is_given_overrides_what_was_saved(saved: Any) -> None:
    loaded = Small.load_from_checkpoint(saved[0], name="b")
    assert (loaded.hparams.width, loaded.hparams.name) == (5, "b")


def test_a_data_module_is_built_from_its_own_hyper_parameters(saved: Any) -> None:
    assert Data.load_from_checkpoint(saved[0], size=9).hparams.size == 9
    assert Data.load_from_checkpoint(f"strongroom://{saved[0]}").hparams.size == 8


@pytest.mark.parametrize(
    "where",
    (
        "meta",
        torch.device("meta"),
        {"cpu": "meta"},
        lambda storage, place: torch.UntypedStorage(0, device="meta"),
    ),
    ids=("text", "device", "dict", "function"),
)
def test_tensors_come_back_where_map_location_says(saved: Any, where: Any) -> None:
    loaded = saving.pl_load(saved[0], map_location=where)
    assert {value.device.type for value in loaded["state_dict"].values()} == {"meta"}
    stays = saving.pl_load(saved[0], map_location={"cuda:1": "meta"})
    assert {value.device.type for value in stays["state_dict"].values()} == {"cpu"}


def test_building_a_module_reads_nothing_of_the_optimizers(saved: Any) -> None:
    assert "optimizer_states" not in saving.pl_load(saved[0])


def test_where_nothing_of_ours_was_imported_lightning_opens_it_through_fsspec(saved: Any) -> None:
    root, module = saved
    unaware = saving.pl_load.__wrapped__  # Lightning's own function
    loaded = unaware(f"strongroom://{root}#step=4")  # by torch.load, which takes no code from it
    assert torch.equal(loaded["state_dict"]["net.0.weight"], module.net[0].weight)
    assert loaded["hyper_parameters"]["width"] == 5
    assert len(loaded["optimizer_states"]) == 1


def test_the_file_system_only_reads() -> None:
    with pytest.raises(ConfigError, match="cannot be opened for writing"):
        StrongroomFileSystem().open("strongroom://run", "wb")


def test_a_trainer_without_the_callback_takes_our_checkpoints(saved: Any) -> None:
    root, module = saved
    for name in (f"strongroom://{root}#step=4", str(root), checkpoint_folder(root, 4)):
        fresh = Small(width=5)
        without_callback().validate(fresh, Data(8).train_dataloader(), ckpt_path=name, verbose=False)
        assert torch.equal(fresh.net[0].weight, module.net[0].weight)


def test_a_trainer_without_the_callback_can_train_on(saved: Any) -> None:
    trainer = without_callback()
    trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = -1, 6
    trainer.fit(Small(width=5), datamodule=Data(8), ckpt_path=f"strongroom://{saved[0]}#step=4")
    assert trainer.global_step == 6


def test_lightnings_own_checkpoints_are_read_as_ever(tmp_path: Path, saved: Any) -> None:
    trainer = without_callback()
    trainer.strategy.connect(Small(width=7))
    trainer.save_checkpoint(tmp_path / "lightnings.ckpt")
    assert Small.load_from_checkpoint(tmp_path / "lightnings.ckpt", weights_only=True).hparams.width == 7


def test_one_process_of_a_job_loads_alone(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert Small.load_from_checkpoint(saved[0]).hparams.width == 5


def test_names_that_lead_nowhere_are_told(saved: Any, tmp_path: Path) -> None:
    root, _ = saved
    with pytest.raises(ConfigError, match="names no root"):
        Small.load_from_checkpoint("strongroom://latest")
    with pytest.raises(CheckpointNotFoundError, match="step 3"):
        Small.load_from_checkpoint(f"strongroom://{root}#step=3")
    with pytest.raises(CheckpointNotFoundError, match="holds no committed checkpoint"):
        Small.load_from_checkpoint(f"strongroom://{tmp_path}/nowhere")
    with Checkpointer(tmp_path / "other") as other:
        other.save(1, {"model": torch.ones(2)})
    with pytest.raises(StateMismatchError, match="was not written by StrongroomCheckpoint"):
        Small.load_from_checkpoint(tmp_path / "other")


def test_a_folder_that_the_run_has_left_behind_is_told(saved: Any, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(saved[0], root)
    left = checkpoint_folder(root, 4)
    module = Small(width=5)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=4,
        callbacks=[StrongroomCheckpoint(root, every_n_train_steps=2)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=Data(8), ckpt_path="strongroom://#step=2")
    with pytest.raises(CheckpointNotFoundError, match=f"{left.name} of {root} is superseded"):
        Small.load_from_checkpoint(left)
    assert Small.load_from_checkpoint(f"strongroom://{root}#step=4").hparams.width == 5


def test_a_sealed_checkpoint_opens_by_the_environments_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_key_file(tmp_path / "kek.key")
    policy = tmp_path / "strongroom.toml"
    policy.write_text('[seal]\nrecipients = ["file:kek.key"]\n')
    run(tmp_path / "run", Small(width=5), security=policy)
    with pytest.raises(NoKeyError):
        Small.load_from_checkpoint(tmp_path / "run")
    monkeypatch.setenv("STRONGROOM_CONFIG", str(policy))
    assert Small.load_from_checkpoint(tmp_path / "run").hparams.width == 5


def test_only_a_root_and_its_checkpoints_are_taken_for_ours(saved: Any, tmp_path: Path) -> None:
    root, _ = saved
    assert CheckpointUri.of(tmp_path) is None
    assert CheckpointUri.of(root / "launches") is None
    assert CheckpointUri.of(root / "run.json") is None
    assert CheckpointUri.of(None) is None
    step = CheckpointUri.of(f"{checkpoint_folder(root, 2)}/")
    assert step is not None
    assert (step.root, step.step) == (str(root), 2)


def test_the_best_of_a_ranked_run_is_loaded(tmp_path: Path, saved: Any) -> None:
    class Falling(Small):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("figure", abs(self.trainer.global_step - 1.0))  # best at step 2
            return super().training_step(batch, batch_idx)

    module = Falling(width=5)
    run(tmp_path / "run", module, monitor="figure")
    best = Small.load_from_checkpoint(f"strongroom://{tmp_path / 'run'}#best")
    second = Small.load_from_checkpoint(f"strongroom://{tmp_path / 'run'}#step=2")
    assert torch.equal(best.net[0].weight, second.net[0].weight)
    assert not torch.equal(best.net[0].weight, module.net[0].weight)
    with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint that was ranked"):
        Small.load_from_checkpoint(f"strongroom://{saved[0]}#best")
