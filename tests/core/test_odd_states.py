"""States and programs that are legal and odd: reserved names, classes, lazy modules, default devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from strongroom import ConfigError, StateEncodingError, StateMismatchError
from strongroom.stores.memory import MemoryStore


def test_the_one_name_that_safetensors_reserves_is_a_name_like_any_other(there_and_back: Any) -> None:
    state = there_and_back({"__metadata__": torch.ones(2), "extra": {"__metadata__": torch.zeros(1)}})
    assert torch.equal(state["__metadata__"], torch.ones(2))
    assert torch.equal(state["extra"]["__metadata__"], torch.zeros(1))


@pytest.mark.parametrize("value", (optim.AdamW, nn.Linear, optim.lr_scheduler.StepLR))
def test_a_class_with_a_state_dict_method_is_code_and_no_state(value: type, begin: Any) -> None:
    with pytest.raises(StateEncodingError, match=r"state\['cls'\]: code has no place in a checkpoint"):
        begin(MemoryStore()).save(1, {"cls": value})


def test_a_lazy_module_that_was_never_called_is_named(there_and_back: Any) -> None:
    with pytest.raises(StateMismatchError, match=r"m\.weight: belongs to a lazy module .* call it once"):
        there_and_back({"m": nn.Linear(3, 3)}, {"m": nn.LazyLinear(3)})


def test_a_tag_that_is_no_text_is_refused_at_once(begin: Any) -> None:
    with pytest.raises(ConfigError, match="valid Unicode"):
        begin(MemoryStore()).save(1, {}, tags=["\ud800"])


@pytest.fixture
def _another_default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.usefixtures("_another_default_device")
def test_the_programs_default_device_changes_nothing(there_and_back: Any) -> None:
    rows = torch.ones(4, 3, device="cpu")
    state = {"t": rows, "columns": rows.t(), "a": np.ones(3)}
    target = torch.zeros(4, 3, device="cpu")
    restored = there_and_back(state, {"t": target, "columns": torch.zeros(4, 3, device="cpu").t(), "a": None})
    assert torch.equal(target, rows)
    assert torch.equal(restored["columns"], rows.t())
    assert there_and_back({"t": rows}, None)["t"].device.type == "cpu"
