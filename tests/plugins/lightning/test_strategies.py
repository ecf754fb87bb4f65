"""Strategies are judged at the start, by what they do, and one that cannot work is refused with words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from strongroom.errors import ConfigError
from strongroom_lightning.namespace import LIGHTNING
from strongroom_lightning.strategies import check_optimizers, check_strategy

CPUS = [torch.device("cpu")]


def check(strategy: Any) -> None:
    check_strategy(SimpleNamespace(strategy=strategy), LIGHTNING)


class Mine(DDPStrategy):
    """A strategy of a user's own, which changes nothing of how a run is kept."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return super().broadcast(obj, src)


@pytest.mark.parametrize(
    "strategy",
    (
        SingleDeviceStrategy("cpu"),
        DDPStrategy(parallel_devices=CPUS),
        DDPStrategy(parallel_devices=CPUS, start_method="fork"),
        Mine(parallel_devices=CPUS),
    ),
    ids=lambda strategy: f"{type(strategy).__name__} {getattr(strategy, '_start_method', '')}",
)
def test_what_keeps_model_and_optimizers_as_they_are_is_supported(strategy: Any) -> None:
    check(strategy)


def test_fsdp2_is_supported() -> None:
    strategy = ModelParallelStrategy()
    strategy.parallel_devices = CPUS
    check(strategy)


@pytest.mark.parametrize(
    ("name", "advice"),
    (
        ("FSDPStrategy", "flat pieces, whose optimizers' state is of no parameter; shard by fully_shard"),
        ("DeepSpeedStrategy", "DeepSpeed's engine owns the optimizers"),
        ("XLAStrategy", "use one of these"),
    ),
)
def test_another_strategy_is_refused_and_told_what_to_use(name: str, advice: str) -> None:
    kind = type(name, (), {})
    with pytest.raises(ConfigError, match=f"supports one device, DDP .* strategy is {name}") as refused:
        check(kind())
    assert advice in str(refused.value)


def test_lightnings_own_fsdp1_is_refused() -> None:
    from lightning.pytorch.strategies import FSDPStrategy

    with pytest.raises(ConfigError, match="the first version of FSDP"):
        check(FSDPStrategy(parallel_devices=CPUS))


def test_a_strategy_that_keeps_optimizers_its_own_way_is_refused() -> None:
    class Keeping(DDPStrategy):
        def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
            return {}

    with pytest.raises(ConfigError, match="Keeping overrides optimizer_state"):
        check(Keeping(parallel_devices=CPUS))


def test_a_device_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="SingleDeviceStrategy trains on 'meta'"):
        check(SingleDeviceStrategy("meta"))


def test_weights_that_drift_apart_are_refused() -> None:
    with pytest.raises(ConfigError, match="weights drift apart"):
        check(DDPStrategy(parallel_devices=CPUS, model_averaging_period=4))


def test_a_communication_hook_with_a_state_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="a state of its own"):
        check(DDPStrategy(parallel_devices=CPUS, ddp_comm_state=object()))


def test_an_optimizer_that_divides_its_state_is_refused() -> None:
    divided = SimpleNamespace(consolidate_state_dict=lambda: None)
    with pytest.raises(ConfigError, match="divides its state among the ranks"):
        check_optimizers(SimpleNamespace(optimizers=[divided]))


def test_a_gradient_scaler_comes_back(fit: Any) -> None:
    def settings() -> dict[str, Any]:
        # One that grows every other step, so that it has moved whenever the run breaks off.
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}

    def scale_of(outcome: Any) -> float:
        return float(outcome.trainer.precision_plugin.scaler.get_scale())

    reference = fit(None, **settings())
    broken = fit(until=5, **settings())
    assert scale_of(broken) == 1024.0
    resumed = fit(seed=1000, checkpoint={"every_n_epochs": 100}, **settings())
    resumed.ends_like(reference)
    assert scale_of(resumed) == scale_of(reference) > 1024.0
