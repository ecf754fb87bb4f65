"""What else a run is made of, one by one: it is there again when the run goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composer import Callback
from composer_runs import train

DONE = 5
"""Batches trained on when the run breaks off; measured after two and four."""


def again(root: Any, make: Any, **settings: Any) -> Any:
    """A run that was broken off and taken up, with a callback of a kind; the callback that went on."""
    train(root, until=DONE, callbacks=(make,), checkpoint={"save_interval": f"{DONE}ba"}, **settings)
    found = make()
    train(root, seed=1000, callbacks=(lambda: found,), checkpoint={"save_interval": "1ep"}, **settings)
    return found


class Measured(Callback):
    """What a callback that goes by measurements is shown before each step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def batch_start(self, state: Any, logger: Any) -> None:
        metrics = state.eval_metrics.get("eval", {})
        updated = {name: one._update_count for name, one in metrics.items()}
        values = {name: float(one.compute()) for name, one in metrics.items() if updated[name]}
        shown = {name: float(one) for name, one in state.eval_metric_values.items()}
        self.seen.append((updated, values, shown, sorted(state.total_loss_dict)))


@pytest.mark.parametrize("at_fit", (False, True), ids=("given to the Trainer", "given to fit"))
def test_callbacks_are_shown_what_was_measured_last(root: Any, at_fit: bool) -> None:
    settings = {"validate": True, "at_fit": at_fit}
    whole = Measured()
    train(None, callbacks=(lambda: whole,), **settings)
    resumed = again(root, Measured, **settings)
    assert resumed.seen == whole.seen[DONE:]
    assert resumed.seen[0][1]  # something was measured


@pytest.mark.parametrize("at_fit", (False, True), ids=("given to the Trainer", "given to fit"))
@pytest.mark.parametrize(
    "scheduler",
    (
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20),
    ),
    ids=("LambdaLR", "CosineAnnealingLR", "OneCycleLR"),
)
def test_schedulers_that_set_a_rate_when_they_are_made(
    fit: Any, uninterrupted: Any, scheduler: Any, at_fit: bool
) -> None:
    settings = {"scheduler": scheduler, "at_fit": at_fit}
    fit(until=DONE, checkpoint={"save_interval": f"{DONE}ba"}, **settings)
    fit(seed=1000, checkpoint={"save_interval": "1ep"}, **settings).ends_like(uninterrupted(**settings))


class Freezing(Callback):
    """Freezes a layer on its way, and puts another into evaluation mode for good."""

    def batch_end(self, state: Any, logger: Any) -> None:
        if int(state.timestamp.batch) == 3:
            for parameter in state.model.net[0].parameters():
                parameter.requires_grad_(False)
                parameter.grad = None
            state.model.net[1].eval()


def test_what_was_frozen_on_the_way_stays_frozen(fit: Any, uninterrupted: Any) -> None:
    settings = {"callbacks": (Freezing,)}
    fit(until=DONE, checkpoint={"save_interval": f"{DONE}ba"}, **settings)
    fit(seed=1000, checkpoint={"save_interval": "1ep"}, **settings).ends_like(uninterrupted(**settings))


class Counter:
    """An attribute of the state with a state of its own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Adding(Callback):
    """Adds to what Composer serializes: an object with a state, and a plain value."""

    def init(self, state: Any, logger: Any) -> None:
        state.counter, state.seen = Counter(), {"samples": 0}
        state.serialized_attributes += ["counter", "seen"]

    def batch_end(self, state: Any, logger: Any) -> None:
        state.counter.count += 1
        state.seen["samples"] += 4
        self.found = (state.counter.count, state.seen["samples"])


def test_what_a_program_adds_to_the_state_comes_back(root: Any, said: Any) -> None:
    assert again(root, Adding).found == (12, 48)
    train(root.with_name("other"), until=DONE, callbacks=(Adding,))
    train(root.with_name("other"))
    assert "the checkpoint holds State.counter, which this program does not add to State" in said.text


class Scaling(Callback):
    """A scaler that scales, as with half precision on a GPU."""

    def fit_start(self, state: Any, logger: Any) -> None:
        state.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.scales: list[float] = []

    def batch_start(self, state: Any, logger: Any) -> None:
        self.scales.append(state.scaler.state_dict()["scale"])

    def batch_end(self, state: Any, logger: Any) -> None:
        saved = state.scaler.state_dict()
        state.scaler.load_state_dict({**saved, "scale": saved["scale"] * 2})


def test_a_scaler_goes_on_with_its_scale(root: Any) -> None:
    assert again(root, Scaling).scales == [8.0 * 2**step for step in range(DONE, 12)]
