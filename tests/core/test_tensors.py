"""Tensors and arrays through a checkpoint: every dtype, every layout, ties, and what is refused."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from strongroom import Checkpointer, StateEncodingError, StateMismatchError
from strongroom.dtypes import DTYPE_BYTES, torch_dtype
from strongroom.stores.memory import MemoryStore

CARRIED = [torch_dtype(name) for name in DTYPE_BYTES]


def scaled(examples: int) -> settings:
    """So many examples in the default profile, and in proportion in the others."""
    return settings(max_examples=max(1, examples * settings.default.max_examples // 100))


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose every bit is random, NaN payloads included."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    item_bytes = torch.empty(0, dtype=dtype).element_size()
    count = int(np.prod(shape, dtype=np.int64)) * item_bytes
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


def forget(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same kind, with other bits."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


# ------------------------------------------------------------------------------------------ dtypes


@pytest.mark.parametrize("dtype", CARRIED, ids=str)
@pytest.mark.parametrize("shape", ((), (1,), (3, 5), (0,), (0, 3), (2, 0, 4)), ids=str)
def test_every_dtype_comes_back_bit_for_bit(
    dtype: torch.dtype, shape: tuple[int, ...], round_trip: Any, bits_of: Any
) -> None:
    tensor = random_bits(dtype, shape)
    anew = round_trip({"t": tensor})["t"]
    assert (anew.dtype, anew.shape) == (dtype, tensor.shape)
    assert bits_of(anew) == bits_of(tensor)

    target = forget(tensor)
    assert round_trip({"t": tensor}, {"t": target})["t"] is target
    assert bits_of(target) == bits_of(tensor)


def test_all_dtypes_share_one_file(there_and_back: Any, bits_of: Any) -> None:
    state = {str(dtype): random_bits(dtype, (3, 7)) for dtype in CARRIED}
    restored = there_and_back(state)
    assert list(restored) == list(state)
    for name, tensor in state.items():
        assert restored[name].dtype == tensor.dtype, name
        assert bits_of(restored[name]) == bits_of(tensor), name


def test_floats_that_compare_unequal_to_themselves_keep_their_bits(round_trip: Any, bits_of: Any) -> None:
    patterns = [0x7F800001, 0xFFC12345, 0x80000000, 0x7F800000, 0x00000001]
    tensor = torch.frombuffer(bytearray(struct.pack("<5I", *patterns)), dtype=torch.float32)
    assert bits_of(round_trip({"t": tensor})["t"]) == bits_of(tensor)


def _sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


def _sparse_csr() -> torch.Tensor:
    return torch.eye(3).to_sparse_csr()


def _quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


def _nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def _jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


class Labelled(torch.Tensor):
    """A subclass that might hold what its bytes do not show."""


def _subclass() -> torch.Tensor:
    return torch.ones(3).as_subclass(Labelled)


def _parameter_of_a_subclass() -> torch.Tensor:
    return torch.nn.Parameter(_subclass())


class Scaled(torch.nn.Parameter):
    """A parameter that carries more than its data, as quantizing libraries make them."""


def _parameter_subclass() -> torch.Tensor:
    return Scaled(torch.ones(3))


def _uninitialized() -> torch.Tensor:
    return torch.nn.UninitializedParameter()


def _freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def _view_of_what_was_freed() -> torch.Tensor:
    base = torch.ones(8)
    view = base[2:5]
    base.untyped_storage().resize_(0)
    return view


REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "complex128": lambda: torch.ones(2, dtype=torch.complex128),
    "complex32": lambda: torch.empty(2, dtype=torch.complex32),
    "sparse": _sparse,
    "sparse_csr": _sparse_csr,
    "quantized": _quantized,
    "nested": _nested,
    "jagged": _jagged,
    "meta": lambda: torch.empty(2, device="meta"),
    "subclass": _subclass,
    "parameter of a subclass": _parameter_of_a_subclass,
    "subclass of Parameter": _parameter_subclass,
    "uninitialized": _uninitialized,
    "freed": _freed,
    "a view of what was freed": _view_of_what_was_freed,
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_carried_is_refused_at_save_and_named(make: Any, begin: Any) -> None:
    memory = MemoryStore()
    checkpointer = begin(memory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls most of these experimental
        bad = make()
    with pytest.raises(StateEncodingError) as caught:
        checkpointer.save(1, {"extra": {"bad": [torch.ones(1), bad]}})
    assert caught.value.key_path == "state['extra']['bad'][1]"
    assert checkpointer.checkpoints() == []


@pytest.mark.parametrize("count", (3, 300))
def test_memory_that_was_freed_after_the_last_save_is_refused(count: int, begin: Any) -> None:
    tensors = {f"t{number}": torch.ones(2) for number in range(count)}
    checkpointer = begin(MemoryStore())
    checkpointer.save(1, {"many": tensors}).result()
    tensors["t1"].untyped_storage().resize_(0)
    with pytest.raises(StateEncodingError, match=r"state\['many'\]\['t1'\].*freed"):
        checkpointer.save(2, {"many": tensors})
    tensors["t1"] = torch.zeros(2)
    checkpointer.save(3, {"many": tensors}).result()


@pytest.mark.parametrize("make", (_freed, _view_of_what_was_freed))
def test_memory_that_was_freed_is_not_filled(make: Any, begin: Any) -> None:
    memory = MemoryStore()
    begin(memory).save(1, {"t": torch.ones(3)}).result()
    with pytest.raises(StateMismatchError, match="t: its memory was freed here"):
        begin(memory).restore({"t": make()})


def test_a_lazy_module_is_refused_by_the_name_of_its_parameter(begin: Any) -> None:
    with pytest.raises(StateEncodingError, match=r"state\['model'\]\['weight'\].*[Ll]azy|initialize"):
        begin(MemoryStore()).save(1, {"model": torch.nn.LazyLinear(3)})


# ----------------------------------------------------------------------------------------- layouts

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.t(),
    "strided": lambda t: t[::2, 1::3],
    "a row": lambda t: t[3],
    "one element": lambda t: t[2, 3],
    "permuted": lambda t: t.reshape(2, 3, 2, 4).permute(3, 1, 0, 2),
    "channels last": lambda t: t.reshape(2, 3, 2, 4).to(memory_format=torch.channels_last),
    "with an offset": lambda t: t.reshape(-1)[5:11],
    "requires a gradient": lambda t: t.clone().requires_grad_(),
    "of a graph": lambda t: t.clone().requires_grad_() * 2,
}


@pytest.mark.parametrize("view", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_view_is_saved_as_what_it_shows(view: Any, round_trip: Any) -> None:
    base = torch.arange(48.0).reshape(6, 8)
    tensor = view(base)
    anew = round_trip({"t": tensor})["t"]
    assert torch.equal(anew, tensor)
    assert not anew.requires_grad


@pytest.mark.parametrize("view", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_view_is_filled_in_place_and_nothing_beside_it(view: Any, round_trip: Any) -> None:
    tensor = view(torch.arange(48.0).reshape(6, 8)).detach()
    base = torch.full((6, 8), -1.0)
    target = view(base).detach()
    strides = target.stride()
    outside = torch.ones_like(base, dtype=torch.bool)
    if target.untyped_storage().data_ptr() == base.untyped_storage().data_ptr():
        view(outside).fill_(False)
    assert round_trip({"t": tensor}, {"t": target})["t"] is target
    assert torch.equal(target, tensor)
    assert target.stride() == strides
    assert (base[outside] == -1.0).all()


def test_a_conjugated_and_a_negated_view_are_saved_as_their_values(round_trip: Any) -> None:
    base = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    state = {"plain": base, "conj": base.conj(), "neg": base.conj().imag}
    assert state["conj"].is_conj()
    assert state["neg"].is_neg()
    anew = round_trip(state)
    for name, tensor in state.items():
        assert torch.equal(anew[name], tensor.resolve_conj().resolve_neg()), name

    template = {
        "plain": torch.zeros(4, dtype=torch.complex64),
        "conj": torch.zeros(4, dtype=torch.complex64).conj(),
        "neg": torch.zeros(4, dtype=torch.complex64).conj().imag,
    }
    round_trip(state, template)
    for name, tensor in state.items():
        assert torch.equal(template[name], tensor), name


def test_overlapping_views_are_each_saved_as_what_they_show(round_trip: Any) -> None:
    base = torch.arange(10.0)
    state = {"low": base[:6], "high": base[4:], "windows": base.as_strided((4, 3), (1, 1))}
    anew = round_trip(state)
    for name, tensor in state.items():
        assert torch.equal(anew[name], tensor), name
    # Nothing is shared afterwards: each is a tensor of its own.
    anew["low"].zero_()
    assert torch.equal(anew["high"], state["high"])


def test_an_expanded_tensor_comes_back_at_its_full_shape(round_trip: Any) -> None:
    tensor = torch.tensor([[3.0], [4.0]]).expand(2, 5)
    assert torch.equal(round_trip({"t": tensor})["t"], tensor)


def test_an_expanded_tensor_cannot_be_filled_in_place_and_the_error_says_so(begin: Any) -> None:
    memory = MemoryStore()
    begin(memory).save(1, {"a": torch.ones(2), "t": torch.ones(2, 5)}).result()
    untouched = torch.zeros(2)
    with pytest.raises(StateMismatchError, match=r"t: .*share memory") as caught:
        begin(memory).restore({"a": untouched, "t": torch.zeros(2, 1).expand(2, 5)})
    assert len(caught.value.different) == 1
    assert untouched.tolist() == [0, 0]


@scaled(40)
@given(data=st.data())
def test_any_strided_view_comes_back(data: st.DataObject) -> None:
    base = torch.arange(256, dtype=torch.int32)
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    strides = tuple(data.draw(st.integers(0, 12)) for _ in shape)
    tensor = base.as_strided(shape, strides, data.draw(st.integers(0, 40)))
    memory = MemoryStore()
    with Checkpointer(memory) as checkpointer:
        checkpointer.save(1, {"t": tensor}).result()
        restored = checkpointer.restore()
    assert restored is not None
    assert torch.equal(restored.state["t"], tensor)


# -------------------------------------------------------------------------------------------- ties


def test_tensors_of_the_same_memory_are_stored_once_and_come_back_tied(root: Path, begin: Any) -> None:
    tensor = torch.randn(1000)
    checkpoint = begin(root).save(1, {"a": tensor, "deep": {"b": [tensor.detach()]}}).result()
    assert checkpoint.size_bytes < 2 * tensor.nbytes
    state = begin(root).restore().state
    assert state["a"].data_ptr() == state["deep"]["b"][0].data_ptr()
    state["a"][0] = 7
    assert state["deep"]["b"][0][0] == 7


def test_views_of_one_memory_that_differ_in_dtype_shape_or_place_are_not_tied(round_trip: Any) -> None:
    tensor = torch.arange(6, dtype=torch.int32)
    state = {
        "flat": tensor,
        "shaped": tensor.view(2, 3),
        "float": tensor.view(torch.float32),
        "transposed": tensor.view(2, 3).t(),
        "head": tensor[:3],
        "square": tensor[:4].view(2, 2),
        "square transposed": tensor[:4].view(2, 2).t(),
    }
    anew = round_trip(state)
    pointers = set()
    for name, original in state.items():
        assert torch.equal(anew[name], original), name
        assert anew[name].dtype == original.dtype
        pointers.add(anew[name].data_ptr())
    assert len(pointers) == len(state)


def test_empty_tensors_are_never_taken_for_one_another(round_trip: Any) -> None:
    state = {"a": torch.empty(0), "b": torch.empty(0, 3), "c": torch.empty(0, dtype=torch.int8)}
    anew = round_trip(state)
    assert [(t.shape, t.dtype) for t in anew.values()] == [(t.shape, t.dtype) for t in state.values()]


class Tied(torch.nn.Module):
    """An embedding whose weight is the head's as well."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_tied_parameters_stay_tied_and_are_stored_once(there_and_back: Any, root: Path) -> None:
    saved, fresh = Tied(), Tied()
    there_and_back({"model": saved}, {"model": fresh})
    assert fresh.head.weight is fresh.embed.weight
    assert torch.equal(fresh.head.weight, saved.embed.weight)
    state = Checkpointer(root).restore().state
    assert state["model"]["embed.weight"].data_ptr() == state["model"]["head.weight"].data_ptr()


def test_a_tied_checkpoint_fills_an_untied_model(round_trip: Any) -> None:
    saved, fresh = Tied(), Tied(tied=False)
    round_trip({"model": saved}, {"model": fresh})
    assert torch.equal(fresh.embed.weight, saved.embed.weight)
    assert torch.equal(fresh.head.weight, saved.embed.weight)
    assert fresh.head.weight is not fresh.embed.weight


def test_an_untied_checkpoint_does_not_fit_a_tied_model(begin: Any) -> None:
    memory = MemoryStore()
    begin(memory).save(1, {"model": Tied(tied=False)}).result()
    fresh = Tied()
    before = fresh.embed.weight.detach().clone()
    with pytest.raises(StateMismatchError, match="shares its memory") as caught:
        begin(memory).restore({"model": fresh})
    assert len(caught.value.different) == 1
    assert torch.equal(fresh.embed.weight, before)


def test_one_module_under_two_names_is_filled_once_for_both(round_trip: Any) -> None:
    saved, fresh = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    state = round_trip({"a": saved, "b": saved}, {"a": fresh, "b": fresh})
    assert state["a"] is state["b"] is fresh
    assert torch.equal(fresh.weight, saved.weight)


# ------------------------------------------------------------------------------------------- NumPy

ARRAYS: dict[str, Any] = {
    "C order": np.arange(12.0).reshape(3, 4),
    "Fortran order": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "strided": np.arange(24)[::3],
    "reversed": np.arange(5)[::-1],
    "big-endian": np.arange(5, dtype=">i4"),
    "big-endian complex": np.array([1 + 2j, 3 - 4j], dtype=">c8"),
    "complex64": np.array([[1 + 2j]], dtype=np.complex64),
    "complex128": np.array([1 + 2j, complex(np.nan, -0.0)]),
    "datetime64": np.array(["2020-01-01", "NaT"], dtype="datetime64[ns]"),
    "structured": np.array([(1, 2.5)], dtype=[("a", "<i2"), ("b", "<f8", ())]),
    "0-d": np.array(7.5),
    "empty": np.empty((0, 3), np.float32),
    "bool": np.array([True, False]),
    "uint16": np.array([65535], np.uint16),
    "float16": np.array([1.5, np.inf], np.float16),
    "text": np.array(["a", "bcd"]),
    "bytes": np.array([b"x\0y"]),
    "long double": np.array([1], np.longdouble) / 3,
    "read-only": np.frombuffer(b"12345678", np.int64),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS.keys())
def test_an_array_comes_back_with_its_dtype_shape_and_values(array: Any, round_trip: Any) -> None:
    anew = round_trip({"a": array, "in": [array]})
    for found in (anew["a"], anew["in"][0]):
        assert type(found) is np.ndarray
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found, array)
        assert found.flags.c_contiguous


def test_an_array_that_a_template_names_is_replaced_not_written_to(round_trip: Any) -> None:
    mine = np.zeros(3)
    restored = round_trip({"a": np.arange(3.0)}, {"a": mine, "t": torch.zeros(1)}, strict=False)["a"]
    assert restored.tolist() == [0, 1, 2]
    assert mine.tolist() == [0, 0, 0]


def test_an_array_of_objects_is_refused(begin: Any) -> None:
    with pytest.raises(StateEncodingError, match=r"state\['a'\].*objects"):
        begin(MemoryStore()).save(1, {"a": np.array([object()])})


SCALARS = [
    np.float32(0.1),
    np.int64(-3),
    np.bool_(True),
    np.datetime64("2020-01-01T00:00:00"),
    np.complex64(1j),
]


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda scalar: type(scalar).__name__)
def test_a_numpy_scalar_stays_one(scalar: Any, round_trip: Any) -> None:
    found = round_trip({"s": scalar})["s"]
    assert type(found) is type(scalar)
    assert found.tobytes() == scalar.tobytes()


def test_a_matrix_and_its_first_row_are_filled_in_the_memory_that_they_share(begin: Any, root: Path) -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    begin(root).save(1, {"matrix": matrix, "row": matrix[0], "column": matrix[:, 1]}).result()
    here = torch.zeros(3, 4)
    state = {"matrix": here, "row": here[0], "column": here[:, 1]}
    restored = begin(root).restore(state)
    assert torch.equal(here, matrix)
    assert restored.state["row"] is state["row"]


def test_tensors_that_share_memory_for_which_the_checkpoint_holds_different_values_are_an_error(
    begin: Any, root: Path
) -> None:
    begin(root).save(1, {"matrix": torch.zeros(3, 4), "row": torch.ones(4)}).result()
    here = torch.full((3, 4), 7.0)
    with pytest.raises(StateMismatchError, match="share some of their memory") as caught:
        begin(root).restore({"matrix": here, "row": here[0]})
    assert set(caught.value.different) <= {"matrix", "row"}
    assert "Your tensors hold step 1" in str(caught.value)


def test_neighbours_in_one_memory_share_nothing(begin: Any, root: Path) -> None:
    begin(root).save(1, {"left": torch.ones(3, 2), "right": torch.zeros(3, 2)}).result()
    here = torch.full((3, 4), 7.0)
    begin(root).restore({"left": here[:, :2], "right": here[:, 2:]})
    assert torch.equal(here, torch.tensor([1.0, 1.0, 0.0, 0.0]).repeat(3, 1))
