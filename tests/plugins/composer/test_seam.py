"""Composer's inner places: each is there, and a Composer without it is refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composer import Callback, Trainer
from composer.core import Event
from composer_runs import Net, Numbers, train
from torch.utils.data import DataLoader

from strongroom import ConfigError
from strongroom_composer import StrongroomCheckpoint, seam

NAMES = [(owner, said, name) for owner, said, names in seam._NEEDED for name in names]


class Looking(Callback):
    """Keeps the state of a Trainer."""

    def init(self, state: Any, logger: Any) -> None:
        self.state = state


@pytest.fixture
def looked_at() -> Any:
    """A state as Composer makes it."""
    looking = Looking()
    train(None, callbacks=(lambda: looking,), max_duration="1ba")
    return looking.state


@pytest.mark.parametrize(("owner", "said", "name"), NAMES, ids=[f"{said}.{name}" for _, said, name in NAMES])
def test_a_composer_without_one_of_the_names_is_refused(
    looked_at: Any, monkeypatch: pytest.MonkeyPatch, owner: Any, said: str, name: str
) -> None:
    state = looked_at
    seam.check_supported(state)
    # What is inherited, and members of an enumeration, cannot be taken out: another name stands for them.
    is_inherited = any(hasattr(base, name) for base in getattr(owner, "__bases__", ()))
    is_own = not is_inherited and owner is not Event
    expected = name if is_own else f"{name}_gone"
    if is_own:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(seam, "_NEEDED", ((owner, said, (expected,)),))
    with pytest.raises(
        ConfigError, match=rf"unsupported version of Composer.*found 0\.32.*lacks {said}.{expected}"
    ):
        seam.check_supported(state)


@pytest.mark.parametrize("name", seam._OF_THE_STATE)
def test_a_state_without_one_of_the_names_is_refused(
    looked_at: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    state = looked_at
    monkeypatch.delattr(state, name)
    with pytest.raises(ConfigError, match=rf"unsupported version of Composer.*State\(\)\.{name}"):
        seam.check_supported(state)


def test_an_older_composer_is_refused(looked_at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = looked_at
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.31.0")
    with pytest.raises(
        ConfigError, match=r"expected mosaicml 0\.32\.1 or a later one like it, found 0\.31\.0"
    ):
        seam.check_supported(state)


def test_what_composer_serializes_is_what_is_known(looked_at: Any) -> None:
    state = looked_at
    assert tuple(state.serialized_attributes) == seam.SERIALIZED


class Order(Callback):
    """What Composer's loop does, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def fit_start(self, state: Any, logger: Any) -> None:
        self.seen.append("fit_start")
        model, train = state.model, state.model.train

        def noted(mode: bool = True) -> Any:
            self.seen.append("train()")
            return train(mode)

        model.train = noted

    def run_event(self, event: Event, state: Any, logger: Any) -> None:
        if event in (Event.ITERATION_START, Event.EPOCH_START, Event.BEFORE_DATALOADER, Event.FIT_END):
            self.seen.append(event.value)
        super().run_event(event, state, logger)


class Noting(DataLoader[Any]):
    """A loader that says when an iterator of it is made."""

    seen: list[str]

    def __iter__(self) -> Any:
        self.seen.append("iter")
        return super().__iter__()


def test_the_loop_begins_behind_model_train_and_looks_at_loaders_before_it() -> None:
    order = Order()

    def loader() -> Any:
        made = Noting(Numbers(8), batch_size=4)
        made.seen = order.seen
        return made

    train(
        None,
        loader=loader,
        validate=loader,
        eval_interval="1ep",
        callbacks=(lambda: order,),
        max_duration="1ep",
    )
    # The evaluation's loader is looked at; then the loop, which asks the training loader once an epoch.
    assert order.seen[:3] == ["fit_start", "iter", "train()"]
    first = order.seen.index("before_dataloader")
    assert order.seen[3:first] == ["iteration_start", "epoch_start", "iter"]
    assert order.seen[:first].count("train()") == 1


def test_a_callback_without_a_trainer_is_refused(looked_at: Any, tmp_path: Any) -> None:
    state = looked_at
    ours = StrongroomCheckpoint(tmp_path)
    state.callbacks.append(ours)
    with pytest.raises(ConfigError, match=r"a callback of composer\.Trainer"):
        ours.init(state, None)


def test_nothing_of_composer_stays_replaced_when_a_fit_is_over(fit: Any) -> None:
    before = dict(vars(Trainer))
    outcome = fit()
    assert "train" not in vars(outcome.trainer.state.model)
    assert type(outcome.trainer.state.train_dataloader) is DataLoader
    assert "train" not in outcome.trainer.state.dataset_resumption
    assert dict(vars(Trainer)) == before
    resumed = fit()
    assert "train" not in resumed.trainer.state.dataset_resumption


def test_a_trainer_that_nothing_refers_to_closes_its_callbacks(tmp_path: Any) -> None:
    class Closing(Callback):
        closed = 0

        def close(self, state: Any, logger: Any) -> None:
            type(self).closed += 1

    def build() -> None:
        model = Net()
        Trainer(
            model=model,
            callbacks=[Closing(), StrongroomCheckpoint(tmp_path / "run")],
            device="cpu",
            progress_bar=False,
            seed=1,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        )

    build()
    assert Closing.closed == 1
