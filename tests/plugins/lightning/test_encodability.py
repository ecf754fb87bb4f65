"""Hyper-parameters and callbacks' states as real programs have them: none stops a run or is lost silently."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import pathlib
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.saving import _load_state
from lightning.pytorch.utilities.parsing import AttributeDict
from torch.utils.data import DataLoader

from strongroom import Checkpointer, ConfigError, StateEncodingError
from strongroom.catalog import Catalog
from strongroom.opened import open_checkpoint
from strongroom.signing import NO_GUARD
from strongroom.stores.local import LocalStore
from strongroom_lightning import StrongroomCheckpoint, contents
from strongroom_lightning.encoding import in_programs_values
from strongroom_lightning.namespace import LIGHTNING

SAID = "Strongroom: no pickle is in a checkpoint"


class Phase(enum.Enum):
    WARM_UP = 1
    MAIN = 2


@dataclasses.dataclass
class Options:
    rate: float
    act: Any = torch.relu


class Opaque:
    pass


class Keeper(Callback):
    """A callback as users write them: its whole ``vars`` are its state."""

    def __init__(self) -> None:
        self.batches = 0
        self.phase = Phase.WARM_UP
        self.score = lambda value: -value
        self.later: Any = None

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.batches += 1
        if self.batches > 2:
            self.phase = Phase.MAIN
        if self.batches > 4:
            self.later = Opaque()

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)


def texts(record: Any) -> list[str]:
    return [text for each in record if (text := str(each.message)).startswith(SAID)]


@pytest.fixture
def said() -> Any:
    """What Strongroom warned of; warnings of Lightning's about such values are its own affair."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        yield lambda: texts(record)


def real_options() -> dict[str, Any]:
    omegaconf = pytest.importorskip("omegaconf")
    return {
        "loss": torch.nn.functional.mse_loss,
        "head": torch.nn.Linear,
        "criterion": torch.nn.MSELoss(),
        "cfg": omegaconf.OmegaConf.create({"lr": 0.1, "double": "${lr}"}),
        "attributes": AttributeDict(a=1),
        "args": argparse.Namespace(workers=2),
        "nested": {"inner": [Options(0.5)], "phase": Phase.MAIN},
        "path": pathlib.Path("data"),
        "seeds": np.arange(3),
        "rate": np.float32(0.25),
        "dtype": torch.bfloat16,
        "object": Opaque(),
    }


def test_a_run_with_the_values_of_real_users_is_saved_told_once_and_resumed_exactly(
    fit: Any, root: Any, net: Any, uninterrupted: Any, said: Callable[[], list[str]]
) -> None:
    reference = uninterrupted()
    fit(until=14, module=lambda: net(options=real_options()), callbacks=(Keeper,))
    at_start, at_step_5 = said()
    for place in ("['loss']", "['head']", "['criterion']", "['object']", "['nested']['inner'][0]"):
        assert f"state['lightning']['hyper_parameters']['options']{place}" in at_start
    for kept in ("['cfg']", "['attributes']", "['args']", "['path']", "['seeds']", "['rate']", "['dtype']"):
        assert kept not in at_start
    assert "['callbacks']['Keeper']['score'] (a function, " in at_start
    assert "['callbacks']['Keeper']['phase'] (a " in at_start
    assert "kept as its name" in at_start
    assert "save_hyperparameters(ignore=[...])" in at_start
    assert "register_type or register_codec for " in at_start
    assert "['callbacks']['Keeper']['later'] (an object, " in at_step_5
    assert "['score']" not in at_step_5

    keeper = Keeper()
    own = keeper.score
    resumed = fit(module=lambda: net(options=real_options()), callbacks=(lambda: keeper,))
    resumed.ends_like(reference)
    assert len(resumed.losses) < len(reference.losses)
    assert keeper.batches == 30
    assert keeper.phase is Phase.MAIN
    assert keeper.score is own


def test_what_a_callback_kept_comes_back_at_the_place_where_it_was_saved(fit: Any, root: Any) -> None:
    with pytest.warns(UserWarning, match=SAID):
        fit(until=4, callbacks=(Keeper,))

    class Looking(Keeper):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            seen.append((self.batches, self.phase, callable(self.score)))

        @property
        def state_key(self) -> str:
            return "Keeper"

    seen: list[Any] = []
    with pytest.warns(UserWarning, match=SAID):
        fit(until=4, callbacks=(Looking,))
    assert seen == [(4, Phase.MAIN, True)]


def test_hyper_parameters_come_back_but_for_what_was_left_out(
    fit: Any, root: Any, net: Any, said: Callable[[], list[str]]
) -> None:
    fit(until=2, module=lambda: net(options=real_options()))
    with Checkpointer(root) as checkpointer:
        state = checkpointer.restore().state
    options = in_programs_values(contents.in_lightnings_form(state), LIGHTNING)["hyper_parameters"]["options"]
    assert set(real_options()) - set(options) == {"loss", "head", "criterion", "object"}
    assert type(options["cfg"]) is type(real_options()["cfg"])
    assert options["cfg"].double == 0.1
    assert type(options["attributes"]) is AttributeDict
    assert options["args"] == argparse.Namespace(workers=2)
    assert options["nested"] == {"inner": [{"rate": 0.5}], "phase": "MAIN"}
    assert options["path"] == pathlib.Path("data")
    assert options["seeds"].tolist() == [0, 1, 2]
    assert type(options["rate"]) is np.float32
    assert options["dtype"] is torch.bfloat16
    store = LocalStore(root)
    history = Catalog(store).history()
    recorded = json.dumps(open_checkpoint(store, history.whole(history.newest()), NO_GUARD).provenance)
    assert "torch.nn.functional.mse_loss" in recorded, "other code would be told on a resume"


def test_a_module_of_one_configuration_gets_one_again(fit: Any, root: Any, net: Any) -> None:
    omegaconf = pytest.importorskip("omegaconf")

    class Configured(lightning.LightningModule):
        training_step, configure_optimizers = net.training_step, net.configure_optimizers
        scheduler = None

        def __init__(self, cfg: Any) -> None:
            super().__init__()
            self.save_hyperparameters(cfg)
            self.net = torch.nn.Sequential(torch.nn.Linear(6, cfg.model.width), torch.nn.Linear(8, 3))
            self.register_buffer("average", torch.zeros(8))
            self.losses = []

    configuration = omegaconf.OmegaConf.create({"model": {"width": 8}})
    fit(
        until=3,
        module=lambda: Configured(configuration),
        checkpoint={"unencodable": "refuse", "every_n_train_steps": 1},
    )
    with Checkpointer(root) as checkpointer:
        state = checkpointer.restore().state
    checkpoint = in_programs_values(contents.in_lightnings_form(state), LIGHTNING)
    assert checkpoint["hyper_parameters"] == configuration
    # As Lightning's load_from_checkpoint does with a checkpoint of its own.
    again = _load_state(Configured, checkpoint, strict=True)
    assert type(again.hparams) is omegaconf.DictConfig
    assert torch.equal(again.net[0].weight, state["model"]["net.0.weight"])


def test_a_value_that_turns_up_later_is_left_out_and_told_once(
    fit: Any, root: Any, net: Any, said: Callable[[], list[str]], uninterrupted: Any
) -> None:
    class Hooked(net):  # type: ignore[misc]
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"a": 1, "b": Opaque()}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            seen.append(checkpoint["mine"])

    seen: list[Any] = []
    fit(until=4, module=Hooked)
    (told,) = said()
    assert "state['lightning']['mine']['b'] (an object, " in told
    fit(module=Hooked).ends_like(uninterrupted())
    assert seen == [{"a": 1}]


def test_a_scheduler_with_a_function_in_it_is_saved_and_goes_on(
    fit: Any, net: Any, said: Callable[[], list[str]]
) -> None:
    class Scaled(torch.optim.lr_scheduler.LRScheduler):
        def __init__(self, optimizer: Any) -> None:
            self.scale = lambda step: 1 / (1 + step)
            super().__init__(optimizer)

        def get_lr(self) -> list[float]:
            return [rate * self.scale(self.last_epoch) for rate in self.base_lrs]

    class Scheduled(net):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": Scaled(optimizer), "interval": "step"},
            }

    reference = fit(None, module=Scheduled)
    fit(until=4, module=Scheduled)
    assert "['lr_schedulers'][0]['scale'] (a function, " in said()[0]
    fit(module=Scheduled).ends_like(reference)


def test_the_state_of_a_datamodule_is_looked_at_too(fit: Any, net: Any) -> None:
    class Data(lightning.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.kept: Any = Opaque()

        def train_dataloader(self) -> Any:
            return DataLoader([(torch.ones(6), torch.tensor(0))] * 2)

        def state_dict(self) -> dict[str, Any]:
            return {"kept": self.kept, "count": 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            assert state_dict == {"kept": self.kept, "count": 1}

    for epochs in (1, 2):
        with pytest.warns(UserWarning, match=r"Data'\]\['kept'\] \(an object"):
            fit(module=net, loader=Data, max_epochs=epochs)


def with_adjacency(net: Any, *, is_taken_out: bool = False) -> Callable[[], Any]:
    """A module that keeps a sparse matrix among its buffers."""

    class Graph(net):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("adjacency", torch.eye(3).to_sparse())

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"].setdefault("adjacency", self.adjacency)

    class Dense(Graph):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            del checkpoint["state_dict"]["adjacency"]

    return Dense if is_taken_out else Graph


def with_a_rule(net: Any) -> Callable[[], Any]:
    """A module whose optimizer keeps a function with its settings."""

    class Ruled(net):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([{"params": list(self.parameters()), "rule": lambda rate: rate}])

    return Ruled


@pytest.mark.parametrize(
    ("make", "place"),
    (
        (with_adjacency, "state['model']['adjacency']: a tensor of layout torch.sparse_coo"),
        (with_a_rule, "state['optimizers'][0]['param_groups'][0]['rule']: code has no place"),
    ),
)
def test_what_cannot_be_left_out_is_refused_before_the_first_step(
    fit: Any, net: Any, make: Callable[[Any], Any], place: str
) -> None:
    kept = make(net)()
    with pytest.raises(StateEncodingError, match=re.escape(place)):
        fit(module=lambda: kept, checkpoint={"every_n_train_steps": 1000})
    assert kept.losses == []


def test_what_a_hook_takes_out_of_the_model_is_only_warned_of(fit: Any, net: Any) -> None:
    told = r"state\['model'\]\['adjacency'\].*Unless an on_save_checkpoint hook takes it out"
    for until, count in ((4, 4), (None, 26)):
        with pytest.warns(UserWarning, match=told):
            outcome = fit(until=until, module=with_adjacency(net, is_taken_out=True))
        assert len(outcome.losses) == count


def test_tensors_without_an_encoding_in_a_callbacks_state_stop_no_run(
    fit: Any, said: Callable[[], list[str]]
) -> None:
    class Confusion(Callback):
        def __init__(self) -> None:
            self.matrix = torch.eye(3).to_sparse()
            self.count = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return dict(vars(self))

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            vars(self).update(state_dict)

    fit(until=4, callbacks=(Confusion,))
    (told,) = said()
    assert "['matrix'] (a torch.Tensor of torch.sparse_coo and torch.float32 on cpu): left out" in told
    again = Confusion()
    fit(callbacks=(lambda: again,))
    assert again.count == 30
    assert again.matrix.is_sparse


def test_a_callbacks_own_objects_come_back_to_it_as_themselves(
    fit: Any, said: Callable[[], list[str]]
) -> None:
    class Guarded(Callback):
        def __init__(self) -> None:
            self.lock, self.thing, self.count = threading.Lock(), Opaque(), 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return dict(vars(self))

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            assert type(state_dict) is dict
            vars(self).update(state_dict)

    fit(until=4, callbacks=(Guarded,))
    assert len(said()) == 1
    again = Guarded()
    lock, thing = again.lock, again.thing
    fit(callbacks=(lambda: again,))
    assert again.lock is lock
    assert again.thing is thing
    assert again.count == 30


@pytest.mark.parametrize("given", ("ignore", None))
def test_the_policy_is_checked_at_once(root: Any, given: Any) -> None:
    with pytest.raises(ConfigError, match="unencodable must be one of 'warn', 'refuse'"):
        StrongroomCheckpoint(root, unencodable=given)


def test_load_from_checkpoint_says_what_has_to_be_given_again(
    fit: Any, root: Any, net: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class WithLoss(net):  # type: ignore[misc]
        def __init__(self, loss: Any, phase: Any = Phase.MAIN) -> None:
            super().__init__()
            self.save_hyperparameters()

    with pytest.warns(UserWarning, match=r"\['hyper_parameters'\]\['loss'\] \(a function"):
        fit(until=2, module=lambda: WithLoss(torch.nn.functional.cross_entropy))
    with caplog.at_level("INFO"), pytest.raises(TypeError, match="'loss'"):
        WithLoss.load_from_checkpoint(f"strongroom://{root}")
    assert "loss (function torch.nn.functional.cross_entropy)" in caplog.text
    again = WithLoss.load_from_checkpoint(f"strongroom://{root}", loss=torch.nn.functional.mse_loss)
    assert again.hparams["loss"] is torch.nn.functional.mse_loss
    assert again.hparams["phase"] == "MAIN"
