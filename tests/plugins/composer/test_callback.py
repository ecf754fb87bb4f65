"""What the callback takes, when it saves, what stays, and what it says."""

from __future__ import annotations

import logging
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import composer_runs
import pytest
import torch
from composer import Callback, Time, Trainer
from composer.core import Event
from composer_runs import Interrupt, Net, stock_loader, train

from strongroom import Checkpointer, ConfigError, StateMismatchError, Tier
from strongroom.errors import CheckpointNotFoundError
from strongroom_composer import StrongroomCheckpoint


def steps_of(root: Path) -> list[int]:
    return sorted(one.step for one in Checkpointer(root).checkpoints())


# ---------------------------------------------------------------------------------------------- when it saves


def every_fourth(state: Any, event: Event) -> bool:
    return event == Event.BATCH_CHECKPOINT and int(state.timestamp.batch) % 4 == 0


@pytest.mark.parametrize(
    ("interval", "steps"),
    (
        ("4ba", [4, 8, 12]),
        ("1ep", [6, 12]),
        (1, [6, 12]),
        (2, [12]),
        (Time.from_batch(5), [5, 10, 12]),
        ("20sp", [5, 10, 12]),
        ("0.5dur", [6, 12]),
        (every_fourth, [4, 8, 12]),
    ),
)
def test_it_saves_when_composers_own_saver_would_and_a_resumed_run_too(
    fit: Any, root: Path, interval: Any, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(checkpoint={"save_interval": interval})
    assert steps_of(root) == steps
    native = root.with_name("native")
    train(None, save_folder=str(native), save_interval=interval, save_filename="{batch}")
    assert sorted(int(path.name) for path in native.iterdir() if path.name.isdecimal()) == steps
    # Broken off behind the first, and taken up.
    again = root.with_name("again")
    fit(again, until=steps[0] + 1 if steps[0] < 11 else 11, checkpoint={"save_interval": interval})
    fit(again, checkpoint={"save_interval": interval})
    assert steps_of(again) == steps


@pytest.mark.parametrize(
    "interval",
    ("soon", "10flops", object(), None, timedelta(minutes=1), True, "-1ba"),
    ids=lambda one: str(one)[:8],
)
def test_what_is_no_interval_is_refused_when_it_is_given(interval: Any) -> None:
    with pytest.raises(ConfigError, match="save_interval must be a time string"):
        StrongroomCheckpoint("run", save_interval=interval)


# ------------------------------------------------------------------------------------------------- what stays


@pytest.mark.parametrize("name", ("num_checkpoints_to_keep", "keep"))
def test_so_many_stay_also_of_those_from_before_a_resume(fit: Any, root: Path, name: str) -> None:
    checkpoint = {"save_interval": "2ba", name: 2}
    fit(until=7, checkpoint=checkpoint)
    assert steps_of(root) == [4, 6]
    fit(checkpoint=checkpoint)
    # What was resumed from stays until a later one is known to be whole.
    assert steps_of(root)[-2:] == [10, 12]
    assert not {2, 4, 8} & set(steps_of(root))


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"num_checkpoints_to_keep": 2, "keep": 2}, "say the same"),
        ({"num_checkpoints_to_keep": 0}, "at least 1"),
        ({"num_checkpoints_to_keep": True}, "at least 1"),
        ({"overwrite": True}, "nothing is ever overwritten"),
        ({"weights_only": True}, "nothing could be resumed"),
        ({"ignore_keys": ["rng"]}, "a checkpoint is whole"),
        ({"remote_file_name": "x"}, "replicate_to"),
        ({"save_intervall": "1ba"}, "did you mean 'save_interval'"),
        ({"timeout": 3}, "did you mean 'timeout_s'"),
    ),
)
def test_arguments_that_mean_nothing_here_say_what_is_there(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StrongroomCheckpoint("run", **options)


def test_all_stay_unless_it_is_told(fit: Any, root: Path) -> None:
    fit(checkpoint={"save_interval": "3ba", "num_checkpoints_to_keep": -1})
    assert steps_of(root) == [3, 6, 9, 12]


# --------------------------------------------------------------------------------------------- the run's root


def test_the_runs_name_is_filled_in_and_found_again(tmp_path: Path, uninterrupted: Any) -> None:
    place = tmp_path / "runs" / "{run_name}-of-{world_size}"
    train(place, until=5, run_name="crab")
    assert steps_of(tmp_path / "runs" / "crab-of-1") == [1, 2, 3, 4, 5]
    resumed = train(place, seed=1000, run_name="crab")
    resumed.ends_like(uninterrupted())
    assert resumed.trainer.state.run_name == "crab"


def test_a_resumed_run_keeps_the_name_that_it_is_given(fit: Any) -> None:
    fit(until=5, run_name="before")
    assert fit(run_name="after").trainer.state.run_name == "after"


def test_a_drawn_name_in_the_root_is_told(tmp_path: Path, said: Any) -> None:
    train(tmp_path / "{run_name}", until=1)
    assert "give the Trainer a run_name" in said.text


@pytest.mark.parametrize("name", ("rank", "local_rank", "node_rank"))
def test_a_root_of_each_rank_is_refused(name: str) -> None:
    for place in (f"runs/{{{name}}}", f"runs/{{{name}:02d}}"):
        with pytest.raises(ConfigError, match="all ranks of a run share one root"):
            StrongroomCheckpoint(place)
    with pytest.raises(ConfigError, match="all ranks of a run share one root"):
        StrongroomCheckpoint("runs/a", replicate_to=[Tier("far/{rank}")])


def test_a_name_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\{epoch\}"):
        train(tmp_path / "{epoch}")


def test_tiers_are_filled_in_too(tmp_path: Path) -> None:
    far = tmp_path / "far" / "{run_name}"
    options = {"save_interval": "1ep", "replicate_to": [str(far), Tier(tmp_path / "{run_name}" / "farther")]}
    train(tmp_path / "near", run_name="crab", checkpoint=options)
    assert steps_of(tmp_path / "far" / "crab") == [6, 12]
    assert steps_of(tmp_path / "crab" / "farther") == [6, 12]


# ------------------------------------------------------------------------------------- what a run begins with


def test_what_is_there_wins_over_load_path(fit: Any, root: Path, uninterrupted: Any, said: Any) -> None:
    train(
        None, save_folder="weights", save_interval="1ep", save_filename="pretrained.pt", save_overwrite=True
    )
    pretrained = {"load_path": "weights/pretrained.pt", "load_weights_only": True}
    reference = fit(None, **pretrained)
    assert reference.losses != uninterrupted().losses
    fit(until=4, **pretrained)
    assert "the run begins at its first step" in said.text
    resumed = fit(seed=1000, **pretrained)
    assert "what load_path='weights/pretrained.pt' loaded is replaced" in said.text
    resumed.ends_like(reference)


# Composer says so of every callback that it finds no state for.
@pytest.mark.filterwarnings("ignore:StrongroomCheckpoint is not in the state_dict:UserWarning")
def test_a_whole_state_at_load_path_is_gone_on_with_and_then_ours(fit: Any, uninterrupted: Any) -> None:
    train(None, save_folder="native", save_interval="3ba", save_filename="ba{batch}.pt", until=4)
    reference = uninterrupted()
    options = {"load_path": "native/ba3.pt"}
    broken = fit(until=5, seed=7, **options)
    assert broken.losses == reference.losses[3:5]
    resumed = fit(seed=1000, **options)
    assert len(resumed.losses) == 7
    resumed.ends_like(reference)


def test_composers_own_saver_beside_ours_is_told_and_its_autoresume_gives_way(
    fit: Any, uninterrupted: Any, said: Any
) -> None:
    native = {
        "save_folder": "native",
        "save_interval": "2ba",
        "autoresume": True,
        "run_name": "crab",
        "save_overwrite": True,
    }
    reference = uninterrupted()
    fit(until=6, checkpoint={"save_interval": "5ba"}, **native)
    assert "CheckpointSaver (native) saves this run too" in said.text
    # Composer has step 4 of its own, ours is step 5.
    resumed = fit(seed=1000, checkpoint={"save_interval": "5ba"}, **native)
    assert "loaded is replaced" in said.text
    assert len(resumed.losses) == 7
    resumed.ends_like(reference)


def test_must_and_never(fit: Any, root: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="resume='must'"):
        fit(checkpoint={"resume": "must"})
    fit(until=5)
    assert len(fit(until=5, checkpoint={"save_interval": "1ba", "resume": "never"}).losses) == 5


def test_another_programs_root_is_refused(fit: Any, root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(3, {"model": torch.zeros(3)}).result()
    with pytest.raises(
        StateMismatchError, match="was not written by StrongroomCheckpoint of strongroom_comp"
    ):
        fit()


def test_another_model_is_told_by_name(fit: Any) -> None:
    fit(until=5)
    with pytest.raises(StateMismatchError, match=r"net\.0"):
        fit(model=lambda: Net(width=9))


def test_less_data_is_told(fit: Any) -> None:
    fit(until=5)
    with pytest.raises(StateMismatchError, match=r"6 batches.*4 batches"):
        fit(loader=lambda: stock_loader(batches=4))


# --------------------------------------------------------------------------------------------- fits, Trainers


def test_a_finished_run_trains_nothing_and_says_so(fit: Any, said: Any, uninterrupted: Any) -> None:
    fit(checkpoint={"save_interval": "1ep"})
    again = fit(checkpoint={"save_interval": "1ep"})
    assert again.losses == []
    assert "this run is already finished" in said.text
    again.ends_like(uninterrupted())
    more = fit(checkpoint={"save_interval": "1ep"}, max_duration="3ep")
    assert len(more.losses) == 6


class Twice:
    """One Trainer that trains twice."""

    def __init__(self, root: Path | None, *, break_first: bool = False, **settings: Any) -> None:
        torch.manual_seed(7)
        self.average, model = composer_runs.Average(), Net()
        callbacks: list[Any] = [self.average]
        if root is not None:
            callbacks.append(StrongroomCheckpoint(root, save_interval="1ba"))
        self.interrupt = Interrupt(4 if break_first else -1)
        callbacks.append(self.interrupt)
        self.trainer = Trainer(
            model=model,
            optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
            train_dataloader=stock_loader(),
            callbacks=callbacks,
            seed=7,
            device="cpu",
            progress_bar=False,
            **settings,
        )


def test_a_second_fit_goes_on_in_memory_and_saves_on(root: Path) -> None:
    trained = []
    for place in (None, root):
        trained.append(Twice(place))
        trained[-1].trainer.fit(duration="1ep")
        trained[-1].trainer.fit(duration="4ba")
        trained[-1].trainer.close()
    reference, ours = trained
    assert ours.average.losses == reference.average.losses
    assert steps_of(root) == list(range(1, 11))
    # One launch: a later start may go back to any of them.
    assert len(list((root / "launches").iterdir())) == 1
    resumed = Twice(root)
    resumed.trainer.fit(duration="2ba")
    resumed.trainer.close()
    assert steps_of(root)[-1] == 12


def test_time_that_was_saved_is_not_reset(root: Path) -> None:
    ours = Twice(root)
    ours.trainer.fit(duration="1ep")
    with pytest.raises(ConfigError, match=r"fit\(reset_time=True\) counts steps from 0 .* come to step 6 of"):
        ours.trainer.fit(reset_time=True)
    ours.trainer.close()
    assert steps_of(root) == [1, 2, 3, 4, 5, 6]


@pytest.mark.filterwarnings("ignore:.* is not in the state_dict")
def test_what_load_path_loaded_is_reset_once_and_what_was_resumed_is_not(root: Path, said: Any) -> None:
    weights = train(None, max_duration="3ba", save_folder=str(root.with_name("native")))
    weights.trainer.close()
    pretrained = str(root.with_name("native") / "ep0-ba3-rank0.pt")
    runs = []
    for place, until in ((None, -1), (root, 5), (root, -1)):
        runs.append(Twice(place, load_path=pretrained))
        runs[-1].interrupt.before_batch = until
        with suppress(composer_runs.BrokenOffError):
            runs[-1].trainer.fit(duration="9ba", reset_time=True)
        runs[-1].trainer.close()
    reference, _, resumed = runs
    assert "reset_time=True resets nothing: the run goes on from step 5" in said.text
    assert resumed.trainer.state.timestamp.batch == reference.trainer.state.timestamp.batch == 9
    assert resumed.average.losses == reference.average.losses[5:]


def test_a_fit_that_was_broken_off_can_be_repeated(root: Path) -> None:
    ours = Twice(root, break_first=True)
    with pytest.raises(composer_runs.BrokenOffError):
        ours.trainer.fit(duration="1ep")
    assert steps_of(root) == [1, 2, 3, 4]
    ours.interrupt.before_batch = -1
    ours.trainer.fit(duration="3ba")
    ours.trainer.close()
    assert steps_of(root) == [1, 2, 3, 4, 5, 6, 7]


def test_a_closed_trainers_callback_works_in_another_trainer(root: Path, uninterrupted: Any) -> None:
    first = Twice(root)
    first.trainer.fit(duration="1ep")
    first.trainer.close()
    (ours,) = (one for one in first.trainer.state.callbacks if isinstance(one, StrongroomCheckpoint))
    torch.manual_seed(99)
    model, average = Net(), composer_runs.Average()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        train_dataloader=stock_loader(),
        max_duration="2ep",
        callbacks=[average, ours],
        seed=1000,
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    assert average.losses == uninterrupted().losses[6:]
    with pytest.raises(RuntimeError, match="closed"):
        trainer.fit(duration="1ep")


def test_a_trainer_that_only_evaluates_has_the_runs_weights(fit: Any, root: Path) -> None:
    trained = fit()
    model = Net()
    trainer = Trainer(
        model=model, callbacks=[StrongroomCheckpoint(root)], device="cpu", progress_bar=False, seed=1,
        optimizers=torch.optim.AdamW(model.parameters()), eval_dataloader=stock_loader(batches=1),
    )  # fmt: skip
    trainer.eval()
    trainer.close()
    for name, value in model.state_dict().items():
        assert torch.equal(value, trained.weights[name])


def test_two_of_them_are_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="more than one StrongroomCheckpoint"):
        train(root, callbacks=(lambda: StrongroomCheckpoint("other"),))


class Seen(Callback):
    """Looks at what other callbacks are shown."""

    def after_load(self, state: Any, logger: Any) -> None:
        self.loaded = int(state.timestamp.batch)


def test_other_callbacks_are_told_that_all_is_loaded_once_it_is(fit: Any) -> None:
    fit(until=5)
    torch.manual_seed(7)
    seen = Seen()
    fit(callbacks=(lambda: seen,))
    assert seen.loaded == 5


def test_it_has_no_state_of_its_own_in_composers_checkpoints() -> None:
    assert StrongroomCheckpoint("run").state_dict() == {}


def test_llm_foundry_builds_it_from_plain_arguments() -> None:
    (found,) = entry_points(group="llmfoundry_callbacks", name="strongroom")
    kind = found.load()
    assert kind is StrongroomCheckpoint
    arguments = {"root": "runs/{run_name}", "save_interval": "100ba", "num_checkpoints_to_keep": 3}
    made = kind(**arguments, preemption_signals=["SIGTERM"], replicate_to=["far"], skip="sampler")
    assert isinstance(made, Callback)


def test_what_it_says_goes_through_composers_logger(fit: Any, said: Any) -> None:
    fit(until=5)
    fit()
    ours = [one for one in said.records if one.name == "composer.strongroom"]
    assert {one.levelno for one in ours} == {logging.INFO}
    assert "resuming from step 5" in said.text
    assert "back at batch 5 of epoch 0, after" in said.text
