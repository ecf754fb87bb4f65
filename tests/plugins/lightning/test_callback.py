"""What the callback saves, restores, refuses and says."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import typing
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

from strongroom import Checkpointer
from strongroom.errors import (
    CheckpointNotFoundError,
    ConfigError,
    SaveError,
    StateEncodingError,
    StateMismatchError,
)
from strongroom_lightning import StrongroomCheckpoint, seam
from strongroom_lightning.namespace import LIGHTNING
from strongroom_lightning.uri import CheckpointUri


def steps(root: Path) -> list[int]:
    return [one.step for one in reversed(Checkpointer(root).checkpoints()) if not one.is_superseded]


def launches(root: Path) -> list[int]:
    return sorted({one.launch for one in Checkpointer(root).checkpoints()})


# --------------------------------------------------------------------------------------- when it saves


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    (
        ({}, [10, 20, 30]),
        ({"every_n_train_steps": 8}, [8, 16, 24, 30]),
        ({"every_n_epochs": 2}, [20, 30]),
        ({"every_n_epochs": 2, "every_n_train_steps": 7}, [7, 14, 20, 21, 28, 30]),
        ({"train_time_interval": timedelta(days=1)}, [30]),
        ({"train_time_interval": timedelta(microseconds=1)}, list(range(1, 31))),
        ({"every_n_train_steps": 5, "keep": 2}, [25, 30]),
    ),
    ids=str,
)
def test_it_saves_at_its_intervals_and_at_the_end(
    fit: Any, root: Path, checkpoint: dict[str, Any], expected: list[int]
) -> None:
    fit(checkpoint={"resume": "auto", **checkpoint})
    assert steps(root) == expected


def test_steps_are_the_optimizers(fit: Any, root: Path) -> None:
    fit(checkpoint={"every_n_train_steps": 5}, accumulate_grad_batches=3)
    assert steps(root) == [5, 10, 12]


def test_a_run_that_is_stopped_while_it_accumulates_is_saved_all_the_same(fit: Any, root: Path) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = trainer.fit_loop.total_batch_idx == 4

    options = {"checkpoint": {"every_n_train_steps": 100}, "accumulate_grad_batches": 2}
    fit(callbacks=(Stop,), **options)
    assert steps(root) == [2]
    assert len(fit(**options).losses) == 25  # the epoch goes on where it was stopped


def test_nothing_is_saved_while_gradients_are_accumulated(fit: Any, root: Path) -> None:
    class Clock(Callback):
        now = 0.0

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.checkpoint_callback._clock = lambda: self.now

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.now = 100.0 * (batch_idx >= 2)  # the third batch: halfway to step 2

    checkpoint = {"train_time_interval": timedelta(seconds=10)}
    fit(max_epochs=1, checkpoint=checkpoint, accumulate_grad_batches=2, callbacks=(Clock,))
    assert steps(root) == [2, 5]


def test_sanity_checking_and_evaluation_neither_save_nor_resume(fit: Any, root: Path, net: Any) -> None:
    outcome = fit(max_epochs=1, validate=True, num_sanity_val_steps=2)
    assert steps(root) == list(range(1, 11))
    data = DataLoader(TensorDataset(torch.randn(4, 6), torch.zeros(4, dtype=torch.long)))
    fresh = net()
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    outcome.trainer.validate(fresh, data, verbose=False)
    assert all(torch.equal(before[name], value) for name, value in fresh.state_dict().items())
    assert steps(root) == list(range(1, 11))
    assert launches(root) == [1]


def test_a_development_run_touches_nothing(fit: Any, root: Path) -> None:
    fit(fast_dev_run=True)
    assert not root.exists()


def test_no_other_checkpoint_is_written(fit: Any, root: Path) -> None:
    outcome = fit(max_epochs=1)
    assert [type(one) for one in outcome.trainer.checkpoint_callbacks] == [StrongroomCheckpoint]
    assert [entry.name for entry in root.parent.iterdir()] == [root.name]


# ------------------------------------------------------------------------------------- when it resumes


def test_it_says_from_where_it_resumes(fit: Any, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(until=4)
    with caplog.at_level(logging.INFO):
        fit(seed=1)
    assert f"resuming from step 4 of {root}" in caplog.text
    assert "back at batch 4 of epoch 0" in caplog.text


def test_a_first_start_says_that_it_is_one(fit: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fit(max_epochs=1)
    assert "holds no checkpoint: the run begins" in caplog.text


@pytest.mark.parametrize("limit", ({"max_epochs": 2}, {"max_epochs": -1, "max_steps": 13}), ids=str)
def test_a_finished_run_trains_nothing_and_says_so(
    fit: Any, root: Path, limit: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    first = fit(**limit)
    before = steps(root)
    with caplog.at_level(logging.INFO):
        again = fit(seed=1, **limit)
    assert again.losses == []
    assert "already finished" in caplog.text
    assert all(torch.equal(value, first.weights[name]) for name, value in again.weights.items())
    assert (steps(root), launches(root)) == (before, [1])


def test_must_insists_on_a_checkpoint(fit: Any, root: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="resume='must'"):
        fit(checkpoint={"every_n_train_steps": 1, "resume": "must"})
    assert not root.exists()
    fit(until=4)
    assert len(fit(seed=1, checkpoint={"every_n_train_steps": 5, "resume": "must"}).losses) == 26


def test_never_begins_a_new_line_and_leaves_the_old_one_readable(
    fit: Any, root: Path, uninterrupted: Any
) -> None:
    fit(max_epochs=1, checkpoint={"every_n_train_steps": 5})
    fit(checkpoint={"every_n_train_steps": 10, "resume": "never"}).ends_like(uninterrupted())
    assert steps(root) == [10, 20, 30]
    everything = Checkpointer(root).checkpoints()
    assert [one.step for one in everything if one.is_superseded] == [10, 5]


def test_a_second_fit_of_the_same_trainer_goes_on_in_memory_and_on_the_same_line(
    fit: Any, root: Path, net: Any
) -> None:
    outcome = fit(max_epochs=1, checkpoint={"every_n_epochs": 1})
    trainer = outcome.trainer
    trainer.fit_loop.max_epochs = 2
    data = DataLoader(TensorDataset(torch.randn(40, 6), torch.zeros(40, dtype=torch.long)), batch_size=4)
    with torch.no_grad():
        outcome.module.average.fill_(5.0)
    trainer.fit(outcome.module, data)
    assert trainer.global_step == 20
    assert outcome.module.average.max() > 0.5  # it was not restored
    assert steps(root) == [10, 20]
    assert launches(root) == [1, 2]


def test_a_lightning_checkpoint_that_is_named_wins(
    fit: Any, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(None, max_epochs=1).trainer.save_checkpoint(root.parent / "own.ckpt")
    fit(until=3, seed=1)
    with caplog.at_level(logging.INFO):
        resumed = fit(seed=2, ckpt_path=str(root.parent / "own.ckpt"))
    assert len(resumed.losses) == 20
    assert "own.ckpt' was asked for, and wins" in caplog.text


def test_our_checkpoints_can_be_named(fit: Any, root: Path, uninterrupted: Any) -> None:
    fit(until=15)
    for ckpt_path, done in (
        (f"strongroom://{root}", 15),
        ("strongroom://latest", 15),
        ("strongroom://#step=12", 12),
        (f"strongroom://{root}#step=7", 7),
    ):
        resumed = fit(seed=1, ckpt_path=ckpt_path, checkpoint={"every_n_epochs": 50})
        assert len(resumed.losses) == 30 - done
        resumed.ends_like(uninterrupted())
        shutil.rmtree(root)
        fit(until=15)


def test_another_roots_checkpoint_can_begin_a_run(fit: Any, root: Path, uninterrupted: Any) -> None:
    fit(until=15)
    other = root.with_name("other")
    resumed = fit(other, seed=1, ckpt_path=f"strongroom://{root}#step=14", checkpoint={"every_n_epochs": 1})
    resumed.ends_like(uninterrupted())
    assert steps(other) == [20, 30]
    assert steps(root) == list(range(1, 16))


def test_evaluation_takes_a_named_checkpoint(fit: Any, root: Path, net: Any) -> None:
    outcome = fit(max_epochs=1, validate=True)
    data = DataLoader(TensorDataset(torch.randn(4, 6), torch.zeros(4, dtype=torch.long)))
    fresh = net()
    outcome.trainer.validate(fresh, data, ckpt_path="strongroom://latest", verbose=False)
    assert all(torch.equal(outcome.weights[name], value) for name, value in fresh.state_dict().items())


def test_a_name_that_is_none_is_an_error(fit: Any) -> None:
    with pytest.raises(ConfigError, match="expected strongroom://latest"):
        fit(ckpt_path="strongroom://run#epoch=3")
    with pytest.raises(CheckpointNotFoundError, match="holds no committed checkpoint"):
        fit(ckpt_path="strongroom://latest")


def test_uris_read_as_they_are_written() -> None:
    for text in ("strongroom://latest", "strongroom://latest#step=3", "strongroom://runs/a#step=0"):
        assert str(CheckpointUri.parse(text)) == text
    assert CheckpointUri.parse("runs/a.ckpt") is None


# ------------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("width", "message"),
    ((9, r"net\.0\.weight: \[8, 6\] in the checkpoint, \[9, 6\] in the model.*resume='never'"),),
)
def test_another_shape_is_an_error_that_names_the_way_out(
    fit: Any, net: Any, width: int, message: str
) -> None:
    fit(max_epochs=1)
    with pytest.raises(StateMismatchError, match=message) as caught:
        fit(module=lambda: net(width=width))
    assert len(caught.value.different) == 4


def test_another_name_is_an_error_that_names_the_way_out(fit: Any, net: Any) -> None:
    class Renamed(net):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", self.average)
            del self.average

        def on_train_batch_end(self, *args: Any) -> None:
            pass

    fit(max_epochs=1)
    with pytest.raises(StateMismatchError, match="resume='never'") as caught:
        fit(module=Renamed)
    assert (caught.value.missing, caught.value.unexpected) == (("mean",), ("average",))


def test_other_optimizers_are_an_error_that_names_the_way_out(fit: Any, net: Any) -> None:
    class Partial(net):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net[0].parameters())

    fit(max_epochs=1)
    with pytest.raises(StateMismatchError, match=r"optimizers do not fit.*resume='never'"):
        fit(module=Partial)


def test_lenient_loading_is_the_modules_choice(fit: Any, net: Any) -> None:
    class Grown(net):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("extra", torch.zeros(1))
            self.strict_loading = False

    first = fit(max_epochs=1)
    again = fit(max_epochs=1, module=Grown)
    assert all(torch.equal(again.weights[name], value) for name, value in first.weights.items())


def test_a_checkpoint_of_another_program_is_not_mistaken_for_ones_own(fit: Any, root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(3, {"weights": torch.zeros(2)})
    with pytest.raises(StateMismatchError, match=r"was not written by StrongroomCheckpoint.*'weights'"):
        fit()


# ----------------------------------------------------------------------------------- hooks and values


def test_hyper_parameters_without_safe_encoding_are_an_error_at_the_start(
    fit: Any, root: Path, net: Any
) -> None:
    module = net(options={"loss": torch.nn.functional.mse_loss})
    with pytest.raises(StateEncodingError, match=r"\['hyper_parameters'\]\['options'\]\['loss'\]"):
        fit(module=lambda: module, checkpoint={"unencodable": "refuse"})
    assert module.losses == []
    assert not root.exists()


def test_what_a_hook_adds_comes_back_to_its_hook(fit: Any, net: Any) -> None:
    class Hooked(net):  # type: ignore[misc]
        seen: typing.ClassVar[list[Any]] = []

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert "state_dict" in checkpoint
            assert "optimizer_states" in checkpoint
            checkpoint["mine"] = {("a", 1): torch.arange(3)}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen.append(checkpoint["mine"])

    fit(until=4, module=Hooked)
    fit(module=Hooked)
    assert [list(value) for value in Hooked.seen] == [[("a", 1)]]
    assert Hooked.seen[0][("a", 1)].tolist() == [0, 1, 2]


def test_a_hook_that_adds_what_cannot_be_encoded_is_named(fit: Any, net: Any) -> None:
    class Hooked(net):  # type: ignore[misc]
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = object()

    with pytest.raises(StateEncodingError, match=r"state\['lightning'\]\['mine'\]"):
        fit(module=Hooked, checkpoint={"unencodable": "refuse"})


def test_a_hook_may_leave_weights_out(fit: Any, root: Path, net: Any) -> None:
    class Slim(net):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.strict_loading = False
            self.frozen = torch.nn.Linear(50, 50).requires_grad_(False)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            for name in [name for name in checkpoint["state_dict"] if name.startswith("frozen.")]:
                del checkpoint["state_dict"][name]

    reference = fit(None, module=Slim)
    fit(until=4, module=Slim)
    assert "frozen.weight" not in Checkpointer(root).restore().state["model"]
    # The seed makes the frozen part, as a download would.
    fit(module=Slim).ends_like(reference)


def test_hooks_that_draw_do_not_change_the_run(fit: Any, net: Any, uninterrupted: Any) -> None:
    class Drawing(net):  # type: ignore[misc]
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            torch.rand(7)

    fit(module=Drawing).ends_like(uninterrupted())


def test_the_state_of_a_datamodule_comes_back(root: Path) -> None:
    class Data(lightning.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.epochs = 0

        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.ones(4, 6), torch.zeros(4, dtype=torch.long)))

        def state_dict(self) -> dict[str, Any]:
            return {"epochs": self.trainer.current_epoch}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.epochs = state_dict["epochs"]

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(6, 3)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for epochs, expected in ((2, 0), (3, 2)):
        data = Data()
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            callbacks=[StrongroomCheckpoint(root)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), data)
        assert data.epochs == expected


# --------------------------------------------------------------------------------------- what fails


class Break(Callback):
    """Puts a file where the root was: no later save can succeed."""

    def __init__(self, root: Path, before_batch: int) -> None:
        self.root, self.before_batch = root, before_batch

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.before_batch:
            trainer.callbacks[-1]._fit.checkpointer.wait()
            shutil.move(self.root, self.root.with_name("moved"))
            self.root.write_text("in the way")


def test_a_save_that_fails_in_the_background_ends_the_run(fit: Any, root: Path) -> None:
    with pytest.raises(SaveError, match="step 5"):
        fit(callbacks=(lambda: Break(root, 4),))


def test_a_last_save_that_fails_is_not_silent(fit: Any, root: Path) -> None:
    with pytest.raises(SaveError, match="step 30"):
        fit(checkpoint={"every_n_train_steps": 15}, callbacks=(lambda: Break(root, 20),))


@pytest.mark.filterwarnings("ignore:Strongroom. closing")
def test_what_ended_the_run_is_not_masked_by_a_save_that_failed(fit: Any, root: Path) -> None:
    fit(until=5, callbacks=(lambda: Break(root, 4),))  # which expects the interruption and nothing else


def test_a_broken_off_run_leaves_its_last_save_committed(fit: Any, root: Path) -> None:
    fit(until=9)
    assert steps(root) == list(range(1, 10))


def test_after_a_fit_the_trainer_is_as_lightning_made_it(fit: Any) -> None:
    for outcome in (fit(max_epochs=1), fit(until=3, checkpoint={"resume": "never"})):
        trainer = outcome.trainer
        for owner in (trainer._checkpoint_connector, trainer.strategy, trainer.fit_loop):
            assert not [
                name
                for name, value in vars(owner).items()
                if callable(value) and "StrongroomC" in repr(value)
            ]
        assert "on_advance_end" not in vars(trainer.fit_loop)
        assert "on_run_start" not in vars(trainer.fit_loop.epoch_loop)
        assert "resume_start" not in vars(trainer._checkpoint_connector)


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"every_n_train_steps": -1}, "every_n_train_steps must be"),
        ({"train_time_interval": timedelta(0)}, "timedelta above zero"),
        ({"resume": "always"}, "resume must be one of"),
        ({"keep": 0}, "keep must be"),
    ),
    ids=str,
)
def test_arguments_are_checked_at_once(root: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StrongroomCheckpoint(root, **arguments)


def test_arguments_have_types_that_a_command_line_can_read() -> None:
    hints = typing.get_type_hints(StrongroomCheckpoint.__init__)
    assert hints["resume"] == typing.Literal["auto", "never", "must"]
    assert hints["train_time_interval"] == timedelta | None


def test_two_of_them_are_refused(fit: Any, root: Path) -> None:
    with pytest.raises(ConfigError, match="a run has one"):
        fit(callbacks=(lambda: StrongroomCheckpoint(root),))


def test_the_other_packages_trainer_is_refused(root: Path) -> None:
    trainer = pytorch_lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigError, match="this Trainer to pytorch_lightning; take both from one package"):
        StrongroomCheckpoint(root).setup(trainer, None, "fit")  # type: ignore[arg-type]


def test_an_old_lightning_is_refused(fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning.pytorch, "__version__", "2.4.0")
    with pytest.raises(ConfigError, match=r"Lightning 2\.4\.0 is too old"):
        fit()


@pytest.mark.parametrize(
    ("path", "name"),
    [(path, name) for path, names in seam._NEEDED.items() for name in names],
    ids=lambda value: value,
)
def test_a_lightning_that_lacks_a_name_is_refused_at_the_start(
    path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = lightning.Trainer(accelerator="cpu", devices=1, logger=False)
    seam.check_supported(trainer, LIGHTNING)
    monkeypatch.setattr(seam, "_NEEDED", {path: (f"{name}_of_old", name)})
    with pytest.raises(ConfigError, match=rf"the Trainer has no {path}\.{name}_of_old; use an older"):
        seam.check_supported(trainer, LIGHTNING)


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_a_training_step_that_fetches_by_itself_is_refused(fit: Any, net: Any) -> None:
    class Fetching(net):  # type: ignore[misc]
        def training_step(self, dataloader_iter: Any) -> torch.Tensor:
            batch, batch_idx, _ = next(dataloader_iter)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ConfigError, match="nobody knows where in the data"):
        fit(module=Fetching)


def test_without_lightning_the_error_names_both_packages() -> None:
    code = (
        "import sys; sys.modules['lightning'] = None; import strongroom_lightning.pytorch_lightning; "
        "from strongroom_lightning import StrongroomCheckpoint"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == 1
    assert "ModuleNotFoundError" in child.stderr
    assert "strongroom[lightning]" in child.stderr
    assert "strongroom[pytorch-lightning]" in child.stderr
