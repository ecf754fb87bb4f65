"""Being attached, and what a Trainer is refused for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_timing import steps
from trained import BATCHES, EPOCHS, Net, Numbers, arguments
from transformers import PrinterCallback, Trainer, TrainerCallback

from strongroom.errors import ConfigError
from strongroom_transformers import StrongroomCallback, StrongroomTrainerMixin

Train = Callable[..., Any]


class MyTrainer(StrongroomTrainerMixin, Trainer):
    """As a user would write it."""


def given(folder: Path, **more: Any) -> dict[str, Any]:
    return {"model": Net(), "args": arguments(folder, **more), "train_dataset": Numbers(24)}


def test_among_the_callbacks_it_attaches_itself(tmp_path: Path, root: Path) -> None:
    Trainer(**given(tmp_path, save_steps=4), callbacks=[StrongroomCallback(root)]).train()
    assert steps(root) == [4, 8, 12]
    again = Trainer(**given(tmp_path, save_steps=4), callbacks=[StrongroomCallback(root)])
    again.train()
    assert again.model.losses == []


@pytest.mark.parametrize("is_root", (True, False))
def test_the_mixin(tmp_path: Path, root: Path, is_root: bool) -> None:
    strongroom = root if is_root else StrongroomCallback(root, keep=1)
    MyTrainer(**given(tmp_path, save_steps=4), strongroom=strongroom).train()
    assert steps(root) == ([4, 8, 12] if is_root else [12])


def test_the_mixin_without_a_root_is_a_trainer(tmp_path: Path, root: Path) -> None:
    MyTrainer(**given(tmp_path, save_strategy="no")).train()
    assert not root.exists()


def test_a_trainers_own_methods_are_called(tmp_path: Path, root: Path) -> None:
    """What a subclass has of its own goes on to be called, by its own class."""
    called = []

    class Own(Trainer):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            called.append("train")
            return super().train(*args, **kwargs)

        def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
            called.append("step")
            super()._maybe_log_save_evaluate(*args, **kwargs)

    trainer = Own(**given(tmp_path, save_steps=4))
    StrongroomCallback(root).attach(trainer)
    trainer.train()
    assert called.count("train") == 1
    assert called.count("step") == (BATCHES + 1) * EPOCHS
    assert steps(root) == [4, 8, 12]


def test_attaching_twice_is_once(tmp_path: Path, root: Path) -> None:
    trainer = Trainer(**given(tmp_path))
    callback = StrongroomCallback(root)
    assert callback.attach(trainer).attach(trainer) is callback
    assert [one for one in trainer.callback_handler.callbacks if one is callback] == [callback]


def test_each_trainer_wants_one_of_its_own(tmp_path: Path, root: Path) -> None:
    first, second = Trainer(**given(tmp_path)), Trainer(**given(tmp_path))
    callback = StrongroomCallback(root).attach(first)
    with pytest.raises(ConfigError, match="another Trainer"):
        callback.attach(second)
    with pytest.raises(ConfigError, match="already"):
        StrongroomCallback(root).attach(first)
    with pytest.raises(ConfigError, match=r"transformers\.Trainer"):
        StrongroomCallback(root).attach(Net())


def test_a_second_trainer_of_one_process(build: Train, tmp_path: Path) -> None:
    first, second = build(root=tmp_path / "a"), build(root=tmp_path / "b")
    first.trainer.train()
    second.trainer.train()
    assert len(first.losses) == len(second.losses) == BATCHES * EPOCHS
    assert steps(tmp_path / "a") == steps(tmp_path / "b") == list(range(1, 13))


def test_added_late_it_says_what_is_missing(tmp_path: Path, root: Path) -> None:
    trainer = Trainer(**given(tmp_path))
    trainer.add_callback(StrongroomCallback(root))
    with pytest.raises(ConfigError, match="attach"):
        trainer.train()


@pytest.mark.parametrize(
    ("argument", "words"),
    (
        ({"save_only_model": True}, "export"),
        ({"enable_jit_checkpoint": True}, "SIGTERM"),
    ),
)
def test_arguments_that_cannot_stand_beside_us(
    tmp_path: Path, root: Path, argument: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        StrongroomCallback(root).attach(Trainer(**given(tmp_path, **argument)))
    assert not root.exists()


def test_fsdp1_and_deepspeed_are_refused_in_words(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(**given(tmp_path))
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ConfigError, match="DeepSpeed"):
        StrongroomCallback(root).attach(trainer)
    trainer.is_deepspeed_enabled = False
    trainer.is_fsdp_enabled = True
    with pytest.raises(ConfigError, match="fsdp_version"):
        StrongroomCallback(root).attach(trainer)


def test_a_search_of_hyper_parameters_is_refused(tmp_path: Path, root: Path) -> None:
    trainer = Trainer(**given(tmp_path))
    StrongroomCallback(root).attach(trainer)
    with pytest.raises(ConfigError, match="hyper-parameter search"):
        trainer.train(trial={"learning_rate": 1.0})


def test_options_are_checked_at_once(root: Path) -> None:
    with pytest.raises(ConfigError, match="tolerate_failures"):
        StrongroomCallback(root, tolerate_failure=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="resume"):
        StrongroomCallback(root, resume="sometimes")  # type: ignore[arg-type]


def test_what_the_model_is_made_of_and_trained_with_is_on_record(train: Train, root: Path) -> None:
    import json

    train(save_steps=12)
    (record,) = root.glob("step-*/data/provenance.json")
    found = json.loads(record.read_text(encoding="utf-8"))
    assert "learning_rate" in json.dumps(found)


def test_printing_is_left_as_it_is(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What saving costs is told to trackers, and not shown to whoever watches the logs."""
    trainer = Trainer(**given(tmp_path, save_steps=4))
    StrongroomCallback(root).attach(trainer)
    assert any(type(one) is PrinterCallback for one in trainer.callback_handler.callbacks)
    trainer.train()
    assert "loss" in capsys.readouterr().out
    assert not any("strongroom" in name for entry in trainer.state.log_history for name in entry)


class StopsByWhatIsLogged(TrainerCallback):
    """Takes figures without a loss for figures with a good one."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if any(name.startswith("strongroom/") for name in logs):
            control.should_training_stop = True


def test_what_a_tracker_makes_of_our_figures_does_not_stop_the_run(train: Train) -> None:
    assert train(callbacks=[StopsByWhatIsLogged()], save_steps=2).step == BATCHES * EPOCHS


class HandsOn(Trainer):
    """Methods of one's own that take whatever comes."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        return super().train(*args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, trial: Any, *args: Any) -> Any:
        return super()._finalize_training(trial, *args)


def test_a_subclass_may_hand_on_what_it_is_given(train: Train, uninterrupted: Train, root: Path) -> None:
    train(kind=HandsOn, until=5)
    resumed = train(kind=HandsOn, seed=3)
    resumed.ends_like(uninterrupted())
    assert len(resumed.losses) == 7
    assert len(train(kind=HandsOn, resume=f"strongroom://{root}#step=4").losses) == 8
    assert len(train(kind=HandsOn, resume=False).losses) == BATCHES * EPOCHS


def test_a_save_by_hand_where_nothing_is_trained_is_refused(build: Train) -> None:
    outcome = build()
    with pytest.raises(ConfigError, match="nothing is being trained"):
        outcome.trainer._save_checkpoint(outcome.model, None)
