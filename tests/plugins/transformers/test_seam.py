"""Names of the Trainer's that nothing promises to keep: each is needed, and its absence is told at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from trained import Net, Numbers, arguments
from transformers import Trainer, TrainerState, trainer
from transformers.trainer_callback import CallbackHandler

from strongroom.errors import ConfigError
from strongroom_transformers import StrongroomCallback, seam


@pytest.fixture
def one(tmp_path: Path) -> Trainer:
    return Trainer(model=Net(), args=arguments(tmp_path), train_dataset=Numbers(24))


@pytest.mark.parametrize("name", (*seam._REPLACED, *seam._NEEDED))
def test_a_trainer_without_a_method(one: Trainer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Trainer, name)
    with pytest.raises(ConfigError, match=rf"not supported.*Trainer\.{name}"):
        StrongroomCallback("run").attach(one)


@pytest.mark.parametrize("name", seam._ATTRIBUTES)
def test_a_trainer_without_an_attribute(one: Trainer, name: str) -> None:
    delattr(one, name)
    with pytest.raises(ConfigError, match=name):
        seam.check_supported(one)


@pytest.mark.parametrize(
    ("method", "parameter"), [(method, name) for method, names in seam._READ.items() for name in names]
)
def test_a_method_without_a_parameter(
    one: Trainer, method: str, parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(self: Trainer, something: int) -> None: ...

    monkeypatch.setattr(Trainer, method, other)
    with pytest.raises(ConfigError, match=rf"{method}\({parameter}=\)"):
        seam.check_supported(one)


@pytest.mark.parametrize("name", ("on_epoch_begin", "on_save"))
def test_a_handler_without_an_event(one: Trainer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(CallbackHandler, name)
    with pytest.raises(ConfigError, match=rf"CallbackHandler\.{name}"):
        seam.check_supported(one)


@pytest.mark.parametrize("name", seam._STATE)
def test_a_state_without_a_name(one: Trainer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(TrainerState, name)
    with pytest.raises(ConfigError, match=rf"TrainerState\.{name}"):
        seam.check_supported(one)


def test_a_trainer_that_skips_otherwise(one: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(trainer, "skip_first_batches")
    with pytest.raises(ConfigError, match="skip_first_batches"):
        seam.check_supported(one)


@pytest.mark.parametrize("name", seam._LOSS)
def test_a_loop_that_counts_otherwise(one: Trainer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def _inner_training_loop(self: Trainer) -> None: ...

    monkeypatch.setattr(Trainer, "_inner_training_loop", _inner_training_loop)
    with pytest.raises(ConfigError, match=name):
        seam.check_supported(one)


def test_this_transformers_has_them_all(one: Trainer) -> None:
    seam.check_supported(one)
