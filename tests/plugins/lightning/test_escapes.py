"""Under a policy that seals, nothing of a run's state stands in the clear, whoever wrote it."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from strongroom import Checkpointer, ConfigError
from strongroom_lightning import StrongroomCheckpoint
from strongroom_lightning.escapes import guard
from strongroom_lightning.namespace import LIGHTNING
from strongroom_security import SecurityPolicy
from strongroom_security.recipients.file import create_key_file

pytestmark = [
    pytest.mark.filterwarnings("ignore:Starting from v1.9.0:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*overridden after:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

MARKER = np.float32(1.2345e-21)
"""A weight that no training moves; its bytes are looked for in every file."""


class Marked(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.lr, self.batch_size = nn.Linear(4, 1), 0.01, 4
        self.register_buffer("marker", torch.full((256,), float(MARKER)))
        self.trained = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trained += 1
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> DataLoader[Any]:
        samples = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(0)))
        return DataLoader(samples, batch_size=self.batch_size)


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A policy that seals, in force for the process; what the run writes is in ``work``."""
    create_key_file(tmp_path / "kek.key")
    file = tmp_path / "strongroom.toml"
    file.write_text('[seal]\nrecipients = ["file:kek.key"]\n')
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("STRONGROOM_CONFIG", str(file))
    return file


def trainer_with(*callbacks: Any, escapes: Any = None, **options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        callbacks=[StrongroomCheckpoint("run", every_n_train_steps=2, escapes=escapes), *callbacks],
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, "logger": False, **options},
    )


def in_the_clear(folder: Path) -> list[str]:
    """Files that hold the marker, or that torch could read."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files, "something was written"
    return [
        path.name
        for path in files
        if zipfile.is_zipfile(path) or MARKER.tobytes() * 4 in path.read_bytes() or path.suffix == ".ckpt"
    ]


class ByHand(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.strategy.save_checkpoint(trainer._checkpoint_connector.dump_checkpoint(False), "by-hand.ckpt")


class Late(Callback):
    """Another checkpoint callback, added in the middle of a run."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            late = ModelCheckpoint("late", every_n_train_steps=1, save_top_k=-1)
            late.setup(trainer, module, "fit")
            trainer.callbacks.append(late)


class Failing(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            raise KeyError("as planned")


ESCAPES: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "a ModelCheckpoint": (
        lambda: [ModelCheckpoint("other", monitor="loss", save_last=True, every_n_train_steps=1)],
        "ModelCheckpoint (to ",
    ),
    "a linked last one": (
        lambda: [ModelCheckpoint("other", save_last="link", every_n_train_steps=2)],
        "ModelCheckpoint (to ",
    ),
    "a LearningRateFinder": (
        lambda: [LearningRateFinder(num_training_steps=3, early_stop_threshold=None, update_attr=False)],
        "LearningRateFinder (to ",
    ),
    "a BatchSizeFinder": (
        lambda: [BatchSizeFinder(max_trials=1, steps_per_trial=1)],
        "BatchSizeFinder (to ",
    ),
    "what a callback saves": (lambda: [ByHand()], ""),
    "a callback that comes late": (lambda: [Late()], ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ESCAPES)
def test_what_else_writes_state_is_sealed_and_listed_at_the_start(
    name: str, policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, listed = ESCAPES[name]
    module = Marked()
    with caplog.at_level("INFO"):
        trainer_with(*make()).fit(module)
    assert module.trained >= 6
    assert in_the_clear(tmp_path / "work") == []
    said = [record.message for record in caplog.records if "is sealed as well" in record.message]
    assert len(said) == bool(listed)
    assert listed in "".join(said)
    assert [each.step for each in Checkpointer("run").checkpoints()][-3:] == [6, 4, 2]
    # Nothing that was under way is left over, and no trial of a finder's.
    assert not [path.name for path in Path().iterdir() if path.name.startswith(".")]
    assert not list(Path().rglob("*.sealing"))


@pytest.mark.filterwarnings("ignore:.*was called without a model")
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
def test_what_a_failed_run_leaves_is_sealed_too(policy: Path, tmp_path: Path) -> None:
    """Lightning's own callback for it comes after ours, which has let go of the run by then."""
    trainer = trainer_with(OnExceptionCheckpoint("crash"), Failing())
    with pytest.raises(KeyError, match="as planned"):
        trainer.fit(Marked())
    assert in_the_clear(tmp_path / "work") == []
    assert Checkpointer("crash/on_exception.ckpt").checkpoints()[0].step == 4


def test_what_slurms_handler_would_write_is_sealed(policy: Path, tmp_path: Path) -> None:
    trainer = trainer_with()
    trainer.fit(Marked())
    trainer.save_checkpoint(trainer._checkpoint_connector.hpc_save_path(str(tmp_path / "work")))
    assert Path("hpc_ckpt_1.ckpt").is_dir()
    assert in_the_clear(tmp_path / "work") == []


def test_before_and_after_a_fit_nothing_is_written_in_the_clear(policy: Path, tmp_path: Path) -> None:
    trainer, module = trainer_with(), Marked()
    tuner = Tuner(trainer)
    tuner.lr_find(module, num_training=3, early_stop_threshold=None, update_attr=False)
    assert not list(Path().glob(".lr_find*"))
    trainer.fit(module)
    trainer.save_checkpoint("after.ckpt")
    assert in_the_clear(tmp_path / "work") == []


def test_what_was_sealed_is_taken_up_again(policy: Path, tmp_path: Path) -> None:
    other = ModelCheckpoint("other", monitor="loss", every_n_train_steps=3, save_top_k=1, save_last=True)
    module = Marked()
    trainer_with(other).fit(module)
    assert module.trained == 6
    assert Path(other.best_model_path).is_dir()
    weight = Checkpointer(other.best_model_path).restore().state["model"]["net.weight"]
    again = Marked()
    trainer = trainer_with(max_epochs=2)
    with pytest.warns(UserWarning, match="by another callback.*this resume is Lightning's own"):
        trainer.fit(again, ckpt_path=other.last_model_path)
    assert again.trained == 6
    tested = Marked()
    tested.test_step = lambda *args: None  # type: ignore[method-assign]
    trainer_with().test(tested, again.train_dataloader(), ckpt_path=other.best_model_path)
    assert torch.equal(tested.net.weight, weight)


def test_a_file_of_an_earlier_run_is_replaced(policy: Path, tmp_path: Path) -> None:
    Path("other").mkdir()
    torch.save({"marker": torch.full((64,), float(MARKER))}, "other/last.ckpt")
    trainer_with(
        ModelCheckpoint("other", save_last=True, every_n_train_steps=3, enable_version_counter=False)
    ).fit(Marked())
    assert Path("other/last.ckpt").is_dir()
    assert in_the_clear(tmp_path / "work") == []


@pytest.mark.parametrize("name", ("a ModelCheckpoint", "a LearningRateFinder", "a BatchSizeFinder"))
def test_by_policy_they_are_refused_before_anything_is_trained(name: str, policy: Path) -> None:
    make, listed = ESCAPES[name]
    module = Marked()
    with pytest.raises(ConfigError, match="these write its state too") as refused:
        trainer_with(*make(), escapes="refuse").fit(module)
    assert listed in str(refused.value)
    assert module.trained == 0
    assert not list(Path().iterdir())


def test_what_comes_later_is_refused_when_it_would_write(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"late.*was about to be written in the clear"):
        trainer_with(Late(), escapes="refuse").fit(Marked())
    assert in_the_clear(tmp_path / "work") == []


def test_by_policy_they_may_write_in_the_clear_and_are_listed(policy: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"write its state in the clear.*ModelCheckpoint \(to "):
        trainer_with(ModelCheckpoint("other"), escapes="warn").fit(Marked())
    assert in_the_clear(tmp_path / "work") == ["epoch=0-step=6.ckpt"]


@pytest.mark.parametrize("escapes", (None, "refuse"))
def test_without_a_policy_that_seals_nothing_changes(
    escapes: Any, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STRONGROOM_CONFIG")
    trainer = trainer_with(ModelCheckpoint("other"), escapes=escapes)
    trainer.fit(Marked())
    assert "epoch=0-step=6.ckpt" in in_the_clear(tmp_path / "work")
    assert "save_checkpoint" not in vars(trainer.strategy)


def test_a_policy_given_to_the_callback_counts_as_well(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STRONGROOM_CONFIG")
    ours = StrongroomCheckpoint("run", security=SecurityPolicy.load(policy))
    trainer = lightning.Trainer(
        callbacks=[ours, ModelCheckpoint("other")], max_epochs=1, accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Marked())
    assert in_the_clear(tmp_path / "work") == []


def test_a_place_where_nothing_can_be_sealed_is_refused_at_the_start(policy: Path) -> None:
    module = Marked()
    with pytest.raises(ConfigError, match=r"write its state where Strongroom cannot: ModelCheckpoint"):
        trainer_with(ModelCheckpoint("memory://other")).fit(module)
    assert module.trained == 0


class Uploading(CSVLogger):
    """As loggers of services are: told to upload what a ModelCheckpoint wrote."""

    _log_model = True

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        for path in checkpoint_callback.best_k_models:
            uploaded.append(path)
            assert in_the_clear(Path(path)) == []


uploaded: list[str] = []


def test_what_a_logger_uploads_is_sealed(
    policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uploaded.clear()
    with caplog.at_level("INFO"):
        trainer_with(
            ModelCheckpoint("other", monitor="loss"), logger=Uploading("logs"), log_every_n_steps=1
        ).fit(Marked())
    assert len(uploaded) == 1
    assert "Uploading (uploads what ModelCheckpoint writes)" in caplog.text
    assert in_the_clear(tmp_path / "work") == []


def test_alone_it_hands_a_logger_nothing_to_upload(policy: Path) -> None:
    uploaded.clear()
    trainer_with(logger=Uploading("logs"), log_every_n_steps=1).fit(Marked())
    assert uploaded == []


def test_the_policy_is_checked_at_once(policy: Path) -> None:
    with pytest.raises(ConfigError, match="escapes must be one of 'seal', 'refuse', 'warn' or None"):
        StrongroomCheckpoint("run", escapes="hide")  # type: ignore[arg-type]


def test_processes_that_hand_weights_back_by_a_file_are_refused(policy: Path) -> None:
    trainer = trainer_with(strategy="ddp_spawn", devices=2)
    with pytest.raises(ConfigError, match="hand the weights back through a temporary file"):
        trainer.callbacks[-1].setup(trainer, Marked(), "fit")  # type: ignore[attr-defined]
    allowed = trainer_with(escapes="warn", strategy="ddp_spawn", devices=2)
    with pytest.warns(UserWarning, match="DDPStrategy .hands the weights back"):
        guard(allowed, LIGHTNING, [], "warn", {})
