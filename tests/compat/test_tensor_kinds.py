"""Kinds of tensors that training uses beyond float32: carried bit for bit, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils._pytree import tree_map

from strongroom import Checkpointer, StateEncodingError, StateMismatchError
from strongroom.stores.memory import MemoryStore

DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64)


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    item_bytes = torch.empty(0, dtype=dtype).element_size()
    count = item_bytes * int(torch.Size(shape).numel())
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> list[int]:
    found: list[int] = tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_module_of_this_dtype_comes_back_bit_for_bit(dtype: torch.dtype, round_trip: Any) -> None:
    def build() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(random(dtype, 4, 3), requires_grad=dtype.is_complex)
        module.register_buffer("scale", random(dtype, 5))
        return module

    saved, fresh = build(), build()
    round_trip({"m": saved}, {"m": fresh})
    for name, tensor in saved.state_dict().items():
        assert bits(fresh.state_dict()[name]) == bits(tensor)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.complex64), ids=str)
def test_training_in_this_dtype_goes_on_where_it_was(dtype: torch.dtype, round_trip: Any) -> None:
    def build(steps: int) -> tuple[nn.Module, optim.Optimizer]:
        model = nn.Linear(3, 2, dtype=dtype)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        advance(model, optimizer, steps)
        return model, optimizer

    def advance(model: nn.Module, optimizer: optim.Optimizer, steps: int) -> None:
        for number in range(steps):
            model(torch.full((2, 3), number + 1, dtype=dtype)).abs().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    saved, fresh = build(2), build(0)
    round_trip({"m": saved[0], "o": saved[1]}, {"m": fresh[0], "o": fresh[1]})
    for model, optimizer in (saved, fresh):
        advance(model, optimizer, 2)
    for one, two in zip(saved[0].parameters(), fresh[0].parameters(), strict=True):
        assert bits(one) == bits(two)


class Quantized(torch.Tensor):
    """A subclass with a dispatch of its own and two tensors in it, as torchao makes them."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[no-any-return]
            cls, codes.shape, dtype=torch.float32, device="cpu"
        )

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Quantized:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        plain = tree_map(lambda value: value.codes * value.scale if isinstance(value, cls) else value, args)
        return func(*plain, **(kwargs or {}))


def quantized() -> Quantized:
    return Quantized(torch.ones(2, 3, dtype=torch.int8), torch.tensor(0.5))


def test_a_tensor_subclass_is_refused_by_its_key_and_its_name() -> None:
    module = nn.Linear(3, 2)
    module.weight = nn.Parameter(quantized(), requires_grad=False)
    with Checkpointer(MemoryStore()) as checkpointer:
        for state, place in (
            ({"x": {"t": quantized()}}, "state['x']['t']"),
            ({"model": nn.Sequential(module)}, "state['model']['0']['weight']"),
            ({"sd": module.state_dict()}, "state['sd']['weight']"),
        ):
            with pytest.raises(
                StateEncodingError, match=r"subclass Quantized is not carried.*register_codec"
            ) as caught:
                checkpointer.save(1, state)
            assert caught.value.key_path == place
        assert checkpointer.checkpoints() == []


def test_a_template_with_a_tensor_subclass_is_refused_and_nothing_is_written() -> None:
    module, other = nn.Linear(3, 2), torch.zeros(2)
    module.weight = nn.Parameter(quantized(), requires_grad=False)
    with Checkpointer(MemoryStore()) as checkpointer:
        checkpointer.save(1, {"m": nn.Linear(3, 2), "t": torch.ones(2)}).result()
        with pytest.raises(StateMismatchError, match=r"m\.weight.*subclass Quantized"):
            checkpointer.restore({"m": module, "t": other})
    assert other.tolist() == [0, 0]


def test_the_parts_of_a_subclass_are_carried(round_trip: Any) -> None:
    saved, target = quantized(), {"codes": torch.zeros(2, 3, dtype=torch.int8), "scale": torch.zeros(())}
    round_trip({"q": {"codes": saved.codes, "scale": saved.scale}}, {"q": target})
    assert torch.equal(target["codes"], saved.codes)
    assert target["scale"].item() == 0.5
