"""Schedulers, scalers, random states and anything else with ``state_dict`` and ``load_state_dict``."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as lrs

from strongroom import StateEncodingError, StateMismatchError
from strongroom.stores.memory import MemoryStore


class Halving:
    """A callable with state of its own, as LambdaLR may be given."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 0.5**self.calls


def _sequential(o: optim.Optimizer) -> Any:
    first, second = lrs.LinearLR(o, 0.1, total_iters=3), lrs.CosineAnnealingLR(o, 5)
    return lrs.SequentialLR(o, [first, second], milestones=[3])


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lrs.ConstantLR,
    "LinearLR": lrs.LinearLR,
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 9),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.5, total_steps=20),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="exp_range", gamma=0.9),
    "LambdaLR of a function": lambda o: lrs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR of an object": lambda o: lrs.LambdaLR(o, Halving()),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda epoch: 0.9),
    "SequentialLR": _sequential,
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)]),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: optim.swa_utils.SWALR(o, 0.05, 4),
}
# Before 2.7, torch's SequentialLR calls its own parts in a way that torch itself deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")


def _keeps_code(make: Callable[[optim.Optimizer], Any]) -> bool:
    """Whether this torch puts a function into the scheduler's state (SWALR did, before 2.7)."""
    return any(map(callable, turn(make)[1].state_dict().values()))


def turn(make: Callable[[optim.Optimizer], Any]) -> tuple[optim.Optimizer, Any]:
    optimizer = optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1, momentum=0.9)
    return optimizer, make(optimizer)


def advance(optimizer: optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lrs.ReduceLROnPlateau) else []))
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_a_scheduler_goes_on_where_it_was(make: Any, there_and_back: Any) -> None:
    optimizer, scheduler = turn(make)
    if _keeps_code(make):
        with pytest.raises(StateEncodingError, match=r"state\['scheduler'\].*code has no place"):
            there_and_back({"scheduler": scheduler}, {"scheduler": scheduler})
        return
    advance(optimizer, scheduler, 4)
    resumed, goes_on = turn(make)
    state = there_and_back(
        {"optimizer": optimizer, "scheduler": scheduler}, {"scheduler": goes_on, "optimizer": resumed}
    )
    assert state["scheduler"] is goes_on
    assert advance(resumed, goes_on, 6) == advance(optimizer, scheduler, 6)


def test_an_averaged_model_keeps_its_count(round_trip: Any) -> None:
    saved, fresh = (optim.swa_utils.AveragedModel(nn.Linear(2, 2)) for _ in range(2))
    saved.update_parameters(nn.Linear(2, 2))
    saved.update_parameters(nn.Linear(2, 2))
    round_trip({"ema": saved}, {"ema": fresh})
    assert fresh.n_averaged.item() == 2
    assert torch.equal(fresh.module.weight, saved.module.weight)


def test_a_grad_scaler_keeps_its_scale(round_trip: Any) -> None:
    def build() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)

    saved, fresh = build(), build()
    saved.scale(torch.ones(1))  # the scale comes into being with the first use
    saved.update(64.0)
    round_trip({"scaler": saved}, {"scaler": fresh})
    assert fresh.get_scale() == 64.0


def test_a_scaler_that_is_switched_off_has_an_empty_state(round_trip: Any) -> None:
    scalers = [torch.amp.GradScaler("cpu", enabled=False) for _ in range(2)]
    round_trip({"scaler": scalers[0]}, {"scaler": scalers[1]})


class Meter:
    """Any object with the two methods."""

    def __init__(self) -> None:
        self.state: Any = {"total": torch.zeros(2), "seen": 0}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_an_object_with_the_two_methods_is_saved_by_them(round_trip: Any) -> None:
    saved, fresh = Meter(), Meter()
    saved.state = {"total": torch.ones(2), "seen": 3, "nested": [{"x": (torch.arange(2), None)}]}
    state = round_trip({"meter": saved, "all": [saved]}, {"meter": fresh, "all": [Meter()]})
    assert state["meter"] is fresh
    for meter in (fresh, state["all"][0]):
        assert torch.equal(meter.state["total"], torch.ones(2))
        assert meter.state["seen"] == 3
        assert meter.state["nested"][0]["x"][0].tolist() == [0, 1]
    assert round_trip({"meter": saved})["meter"]["seen"] == 3


def test_an_object_takes_a_state_dict_that_was_saved_as_a_value(round_trip: Any) -> None:
    fresh = Meter()
    round_trip({"meter": {"seen": 4}}, {"meter": fresh})
    assert fresh.state == {"seen": 4}


def test_an_object_never_gets_memory_that_it_gave(round_trip: Any) -> None:
    meter = Meter()
    before = meter.state["total"]
    round_trip({"meter": meter}, {"meter": meter})
    assert meter.state["total"].data_ptr() != before.data_ptr()


def test_modules_come_first_then_optimizers_then_the_rest(round_trip: Any) -> None:
    order: list[str] = []

    class Model(nn.Linear):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            order.append("model")
            return super().load_state_dict(*args, **kwargs)

    class Optimizer(optim.SGD):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            order.append("optimizer")
            return super().load_state_dict(*args, **kwargs)

    class Last(Meter):
        def load_state_dict(self, state: Any) -> None:
            order.append("rest")

    model = Model(1, 1)
    state = {"z": Last(), "optimizer": Optimizer(model.parameters(), lr=0.1), "a": Last(), "model": model}
    round_trip(state, state)
    assert order == ["model", "optimizer", "rest", "rest"]


# ------------------------------------------------------------------------------------------ random


def test_a_torch_generator_goes_on_in_place(there_and_back: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    torch.randn(5, generator=generator)
    fresh = torch.Generator()
    state = there_and_back({"g": generator}, {"g": fresh})
    assert state["g"] is fresh
    assert torch.equal(torch.randn(9, generator=fresh), torch.randn(9, generator=generator))


def test_a_torch_generator_comes_back_without_a_template(round_trip: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    torch.randn(5, generator=generator)
    anew = round_trip({"g": generator})["g"]
    assert isinstance(anew, torch.Generator)
    assert torch.equal(torch.randn(9, generator=anew), torch.randn(9, generator=generator))


def test_saving_moves_no_random_stream(begin: Any) -> None:
    def states() -> list[Any]:
        return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]

    model = nn.Linear(1, 1)
    before = states()
    checkpointer = begin(MemoryStore())
    checkpointer.save(1, {"model": model, "rng": torch.get_rng_state()}).result()
    assert states() == before
    checkpointer.restore()
    assert states() == before


def test_the_random_states_of_python_numpy_and_torch_come_back(round_trip: Any) -> None:
    rng = np.random.default_rng(3)
    state = {
        "python": random.Random(3).getstate(),
        "numpy": np.random.RandomState(3).get_state(),
        "numpy dict": np.random.RandomState(3).get_state(legacy=False),
        "generator": rng.bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    anew = round_trip(state)
    one, two = random.Random(), random.Random(3)
    one.setstate(anew["python"])
    assert one.random() == two.random()
    for name in ("numpy", "numpy dict"):
        legacy = np.random.RandomState()
        legacy.set_state(anew[name])
        assert legacy.rand() == np.random.RandomState(3).rand()
    other = np.random.default_rng()
    other.bit_generator.state = anew["generator"]
    assert other.random() == rng.random()
    assert torch.equal(anew["torch"], state["torch"])


def test_a_generator_that_the_checkpoint_lacks_is_a_mismatch(begin: Any) -> None:
    memory = MemoryStore()
    begin(memory).save(1, {"g": 7}).result()
    with pytest.raises(StateMismatchError, match=r"g is a torch\.Generator here"):
        begin(memory).restore({"g": torch.Generator()})
