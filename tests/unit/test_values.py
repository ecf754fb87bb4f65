"""Typed JSON: whatever goes in comes back with its type and every bit, and nothing else comes out."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import itertools
import json
import math
import random
import struct
import subprocess
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from strongroom import arrays, canonical, decoding, registry, values
from strongroom.atoms import ATOM_TAGS, MalformedError
from strongroom.canonical import Bounds
from strongroom.decoding import Decoder
from strongroom.errors import ConfigError, FormatError, StateEncodingError, StateMismatchError
from strongroom.keypath import Attribute, key_path
from strongroom.registry import register_codec, register_type
from strongroom.values import MAX_DEPTH, MAX_JSON_DEPTH, Encoder

BOUNDS = Bounds(length_bytes=1 << 26, depth=MAX_JSON_DEPTH)


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"
    CRIMSON = 1  # noqa: PIE796 - an alias, which is stored under its first name


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Plain:
    first: Any
    second: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    item: Any
    derived: Any = dataclasses.field(init=False, default=7)

    def __post_init__(self) -> None:
        raise AssertionError("decoding runs no code of the class")


@dataclasses.dataclass(slots=True)
class Slotted:
    item: Any


class Point(NamedTuple):
    x: Any
    y: Any = 0


Pair = namedtuple("Pair", "left right")

register_type(Color, name="test.Color")
register_type(Access, name="test.Access")
register_type(Level, name="test.Level")
register_type(Plain, name="test.Plain")
register_type(Frozen, name="test.Frozen")
register_type(Slotted, name="test.Slotted")
register_type(Point, name="test.Point")
register_type(Pair, name="test.Pair")
register_codec(
    Fraction,
    name="test.Fraction",
    encode=lambda value: (value.numerator, value.denominator),
    decode=lambda value: Fraction(*value),
)


def frozen(item: Any, derived: Any = 7) -> Frozen:
    value = object.__new__(Frozen)
    object.__setattr__(value, "item", item)
    object.__setattr__(value, "derived", derived)
    return value


@contextlib.contextmanager
def unregistered_afterwards() -> Iterator[None]:
    by_type, by_name = dict(registry._by_type), dict(registry._by_name)
    try:
        yield
    finally:
        for table, before in ((registry._by_type, by_type), (registry._by_name, by_name)):
            table.clear()
            table.update(before)  # type: ignore[arg-type]


def round_trip(value: Any) -> Any:
    data = canonical.encode(Encoder().encode(value), bounds=BOUNDS)
    return Decoder().decode(canonical.decode(data, "the state", BOUNDS))


def numbered(cases: list[Any]) -> list[str]:
    """Names for cases that have none of their own, the same on every run."""
    first = [case[0] if type(case) is tuple and len(case) == 2 else case for case in cases]
    return [f"{number}-{type(item).__name__}" for number, item in enumerate(first)]


# ------------------------------------------------------------------------------- strict equality


def identical(one: Any, two: Any) -> bool:
    """Same type and same bits, all the way down; what ``==`` overlooks counts."""
    if type(one) is not type(two):
        return False
    kind = type(one)
    if kind is float:
        return struct.pack(">d", one) == struct.pack(">d", two)
    if kind is complex:
        return identical([one.real, one.imag], [two.real, two.imag])
    if kind in {list, tuple, torch.Size}:
        return len(one) == len(two) and all(map(identical, one, two))
    if kind in {set, frozenset}:
        return len(one) == len(two) and all(any(identical(item, other) for other in two) for item in one)
    if isinstance(one, dict):
        if kind is defaultdict and one.default_factory is not two.default_factory:
            return False
        if kind is OrderedDict and not identical(vars(one), vars(two)):
            return False
        return identical(list(one.items()), list(two.items()))
    if kind is deque:
        return one.maxlen == two.maxlen and identical(list(one), list(two))
    if kind in {types.SimpleNamespace, argparse.Namespace}:
        return identical(vars(one), vars(two))
    if kind in {slice, range}:
        return identical([one.start, one.stop, one.step], [two.start, two.stop, two.step])
    if kind in {datetime, time}:
        naive = [item.replace(tzinfo=None, fold=0) for item in (one, two)]
        return naive[0] == naive[1] and one.fold == two.fold and identical(one.tzinfo, two.tzinfo)
    if kind is timezone:
        return repr(one) == repr(two)
    if kind is ZoneInfo:
        return one.key == two.key
    if kind is Decimal:
        return one.as_tuple() == two.as_tuple()
    if isinstance(one, np.generic) and kind not in {np.str_, np.bytes_}:
        return identical(np.asarray(one), np.asarray(two))
    if kind is np.ndarray:
        same = one.dtype == two.dtype and one.shape == two.shape
        return same and significant_bytes(one) == significant_bytes(two)
    if isinstance(one, enum.Enum):
        return one is two
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(identical(getattr(one, name), getattr(two, name)) for name in names)
    if isinstance(one, tuple):
        return all(map(identical, one, two))
    return bool(one == two)


def significant_bytes(array: Any) -> bytes:
    data = array.tobytes()
    if array.dtype.str in {"<f16", "<c32"}:
        data = b"".join(data[start : start + 10] for start in range(0, len(data), 16))
    return bytes(data)


NAIVE = datetime.fromisoformat("2020-01-01")
CONFUSED: list[Any] = [
    (1, True),
    (1, 1.0),
    (0.0, -0.0),
    (math.nan, -math.nan),
    ([1], (1,)),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({"a": 1}, OrderedDict(a=1)),
    (deque([1]), deque([1], 1)),
    (defaultdict(list), defaultdict(set)),
    (timezone.utc, timezone(timedelta(0), "UTC+")),
    (time(1), time(1, fold=1)),
    (NAIVE, NAIVE.replace(tzinfo=timezone.utc)),
    (Decimal("1.0"), Decimal("1.00")),
    (np.float32(0), np.float32(-0.0)),
    (np.array([1]), np.array([1], ">i8")),
    (np.str_("a"), "a"),
    (range(0), range(1, 1)),
    (b"", bytearray()),
]


@pytest.mark.parametrize(("one", "two"), CONFUSED, ids=numbered(CONFUSED))
def test_the_equality_of_these_tests_tells_apart_what_python_confuses(one: Any, two: Any) -> None:
    assert identical(one, one)
    assert identical(two, two)
    assert not identical(one, two)


# ------------------------------------------------------------------------------------ strategies


def opaque(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """The same strategy with a short name: Hypothesis would spell it out in its notes, endlessly."""
    return st.composite(lambda draw: draw(strategy))()


any_text = st.text(st.characters(exclude_categories=()), max_size=6)  # lone surrogates too
any_float = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack(">d", bits.to_bytes(8, "big"))[0]) | (
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1e16, 1e-5, 0.1])
)
any_int = (
    st.integers(-3, 3)
    | st.integers()
    | st.integers(-(2**54), 2**54)
    | st.integers(0, 4000).map(lambda bits: 1 - 2**bits)
)
zones = st.sampled_from([ZoneInfo("UTC"), ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York")])
offsets = st.timedeltas(timedelta(hours=-23, minutes=-59), timedelta(hours=23, minutes=59))
timezones = st.just(timezone.utc) | st.builds(timezone, offsets) | st.builds(timezone, offsets, any_text)
tzinfos = st.none() | timezones | zones
paths = st.lists(any_text.filter(lambda text: "\0" not in text), max_size=3).flatmap(
    lambda parts: st.sampled_from([PosixPath, PurePosixPath, PureWindowsPath]).map(lambda kind: kind(*parts))
)
decimals = st.decimals(allow_nan=False) | st.sampled_from(
    [Decimal(text) for text in ("NaN", "-NaN123", "-0E+7", "1E+400", "-Infinity", "1." + "3" * 60)]
)
TORCH_DTYPES = sorted({item for item in vars(torch).values() if isinstance(item, torch.dtype)}, key=str)
torch_atoms = (
    st.sampled_from(TORCH_DTYPES)
    | st.sampled_from([torch.device(text) for text in ("cpu", "cuda:3", "meta", "cuda")])
    | st.lists(st.integers(0, 2**62), max_size=4).map(torch.Size)
)
NUMPY_SCALARS = (
    hnp.boolean_dtypes()
    | hnp.integer_dtypes(endianness="=")
    | hnp.unsigned_integer_dtypes(endianness="=")
    | hnp.floating_dtypes(endianness="=")
    | hnp.complex_number_dtypes(endianness="=")
    | hnp.datetime64_dtypes(endianness="=")
    | hnp.timedelta64_dtypes(endianness="=")
)
numpy_scalars = NUMPY_SCALARS.flatmap(
    lambda dtype: st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize).map(
        lambda data: np.frombuffer(data, dtype)[0]
    )
)
numpy_text = any_text.map(np.str_) | st.binary(max_size=5).map(np.bytes_)


def is_storable(dtype: Any) -> bool:
    """Titles, items without bytes and long doubles in a structure are refused; others come back."""
    if dtype.base is not dtype:
        return is_storable(dtype.base)
    fields = dtype.fields or {}
    return (
        dtype.itemsize > 0
        and (dtype.kind not in "fc" or (dtype.itemsize <= 16 and dtype.str != "<f16"))
        and all(len(field) == 2 and is_storable(field[0]) for field in fields.values())
    )


array_dtypes = (hnp.array_dtypes(max_size=3) | hnp.scalar_dtypes() | hnp.datetime64_dtypes()).filter(
    is_storable
)
numpy_arrays = array_dtypes.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=3))
).map(np.asarray)

hashable_atoms = (
    st.none()
    | st.booleans()
    | any_int
    | any_float
    | any_text
    | st.binary(max_size=6)
    | st.complex_numbers()
    | st.builds(complex, any_float, any_float)
    | st.builds(range, any_int.filter(lambda n: abs(n) < 2**70), st.just(5), st.integers(1, 2**60))
    | paths
    | st.datetimes(timezones=tzinfos)
    | st.builds(
        lambda when, fold: when.replace(fold=fold), st.datetimes(timezones=tzinfos), st.integers(0, 1)
    )
    | st.dates()
    | st.builds(
        lambda when, zone, fold: when.replace(tzinfo=zone, fold=fold), st.times(), tzinfos, st.integers(0, 1)
    )
    | st.timedeltas()
    | timezones
    | zones
    | decimals
    | st.uuids()
    | torch_atoms
    | numpy_scalars
    | numpy_text
    | st.sampled_from([*Color, *Level, Access.READ, Access.READ | Access.WRITE, Access(0)])
    | st.fractions()
)
hashables = st.recursive(
    opaque(hashable_atoms),
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.frozensets(inner, max_size=3)
        | st.builds(Point, inner, inner)
        | st.builds(frozen, inner)
    ),
    max_leaves=4,
)
atoms = hashable_atoms | st.binary(max_size=6).map(bytearray) | numpy_arrays


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    hashable = opaque(hashables)
    dicts = st.dictionaries(hashable, inner, max_size=4)
    attributes = st.dictionaries(any_text, inner, max_size=3)
    lists = st.lists(inner, max_size=4)

    def ordered(pairs: dict[Any, Any], extra: dict[str, Any]) -> OrderedDict[Any, Any]:
        value = OrderedDict(pairs)
        vars(value).update(extra)
        return value

    def filled(value: Any, extra: dict[str, Any]) -> Any:
        vars(value).update(extra)
        return value

    return (
        lists
        | lists.map(tuple)
        | st.sets(hashable, max_size=4)
        | st.frozensets(hashable, max_size=4)
        | dicts
        | st.builds(ordered, dicts, st.just({}) | attributes)
        | st.builds(defaultdict, st.sampled_from([None, list, int, OrderedDict]), dicts)
        | st.dictionaries(hashable, any_int, max_size=3).map(Counter)
        | st.builds(lambda items, more: deque(items, None if more is None else len(items) + more), lists,
                    st.none() | st.integers(0, 2**40))
        | st.builds(filled, st.builds(types.SimpleNamespace), attributes)
        | st.builds(filled, st.builds(argparse.Namespace), attributes)
        | st.builds(slice, inner, inner, inner)
        | st.builds(Plain, inner, inner)
        | st.builds(frozen, inner, inner)
        | st.builds(Slotted, inner)
        | st.builds(Pair, inner, inner)
    )  # fmt: skip


anything = opaque(st.recursive(opaque(atoms), containers, max_leaves=12))
slow_to_draw = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


# --------------------------------------------------------------------------------- there and back


@slow_to_draw
@given(anything)
def test_a_value_comes_back_with_its_types_and_bits(value: Any) -> None:
    assert identical(round_trip(value), value)


@slow_to_draw
@given(anything)
def test_a_value_has_one_spelling(value: Any) -> None:
    node = Encoder().encode(value)
    data = canonical.encode(node, bounds=BOUNDS)
    assert canonical.encode(Encoder().encode(value)) == data
    assert canonical.encode(Encoder().encode(Decoder().decode(node))) == data


@given(any_float)
def test_a_float_keeps_its_bits(value: float) -> None:
    assert struct.pack(">d", round_trip(value)) == struct.pack(">d", value)


@given(st.lists(hashables, max_size=6))
def test_a_set_is_spelled_alike_whatever_the_order_it_was_filled_in(items: list[Any]) -> None:
    forward, backward = set(items), set()
    for item in reversed(items):
        backward.add(item)
    # Elements that are equal but not identical (1, True) stay as the first one did.
    if identical(forward, backward):
        assert Encoder().encode(forward) == Encoder().encode(backward)


@pytest.mark.parametrize("size", (4300, 50_000))
def test_an_integer_beyond_pythons_decimal_limit_comes_back(size: int) -> None:
    assert round_trip(-(10**size) - 1) == -(10**size) - 1


KEPT: list[Any] = [
    [{"epoch": 3, 7: (1.5, None)}, {(1, "a"): {2.5: b"\0"}}],
    {1: "int", "1": "text", 1.5: "float", None: "none", (1,): "tuple"},
    {},
    {"": {}},
    OrderedDict(),
    np.random.default_rng(7).bit_generator.state,
    random.Random(7).getstate(),
    np.random.RandomState(3).get_state(),
]


@pytest.mark.parametrize("value", KEPT, ids=numbered(KEPT))
def test_what_training_keeps_comes_back(value: Any) -> None:
    assert identical(round_trip(value), value)


def test_a_module_state_dict_keeps_its_versions() -> None:
    module = torch.nn.BatchNorm1d(2)
    state = module.state_dict()
    names = Encoder(lambda value, path: {"$": "tensor", "v": path[-1]}).encode(state)
    back = Decoder({"tensor": lambda payload, path: state[payload]}).decode(names)
    assert type(back) is OrderedDict
    assert back._metadata == state._metadata  # type: ignore[attr-defined]
    module.load_state_dict(back)


def test_decimals_do_not_depend_on_the_threads_context() -> None:
    import decimal

    with decimal.localcontext() as context:
        context.capitals, context.prec = 0, 2
        assert Encoder().encode(Decimal("1.2345E+9")) == {"$": "decimal", "v": "1.2345E+9"}
        assert identical(round_trip(Decimal("1.2345E+9")), Decimal("1.2345E+9"))


SPELLINGS: list[Any] = [
    (None, None),
    (True, True),
    (-5, -5),
    (2**53, {"$": "int", "v": "0x20000000000000"}),
    (-(2**64), {"$": "int", "v": "-0x10000000000000000"}),
    ("ü", "ü"),
    ("\udc80", {"$": "str", "v": "7bKA"}),
    (1.0, {"$": "float", "v": "1.0"}),
    (-math.inf, {"$": "float", "v": "-inf"}),
    (struct.unpack(">d", bytes.fromhex("fff0000000000001"))[0], {"$": "float", "v": "nan:fff0000000000001"}),
    (1j, {"$": "complex", "v": ["0.0", "1.0"]}),
    (b"\xff", {"$": "bytes", "v": "/w=="}),
    (bytearray(b"\xff"), {"$": "bytearray", "v": "/w=="}),
    ([1, [2]], [1, [2]]),
    ((1,), {"$": "tuple", "v": [1]}),
    ({2, 10}, {"$": "set", "v": [10, 2]}),
    (frozenset({"a"}), {"$": "frozenset", "v": ["a"]}),
    ({"b": 1, 2: "c"}, {"$": "dict", "v": [["b", 1], [2, "c"]]}),
    (OrderedDict(a=1), {"$": "ordered_dict", "v": [[], ["a", 1]]}),
    (defaultdict(list, a=[]), {"$": "defaultdict", "v": ["list", ["a", []]]}),
    (defaultdict(), {"$": "defaultdict", "v": [None]}),
    (Counter("aab"), {"$": "counter", "v": [["a", 2], ["b", 1]]}),
    (deque([1, 2], 3), {"$": "deque", "v": [3, 1, 2]}),
    (types.SimpleNamespace(a=1), {"$": "namespace", "v": [["a", 1]]}),
    (argparse.Namespace(a=1), {"$": "argparse_namespace", "v": [["a", 1]]}),
    (range(3), {"$": "range", "v": [0, 3, 1]}),
    (slice(1, None), {"$": "slice", "v": [1, None, None]}),
    (PurePosixPath("a/b"), {"$": "pure_posix_path", "v": "a/b"}),
    (PureWindowsPath("c:/a"), {"$": "pure_windows_path", "v": "c:\\a"}),
    (PosixPath("/a"), {"$": "posix_path", "v": "/a"}),
    (date(2026, 1, 2), {"$": "date", "v": "2026-01-02"}),
    (time(1, 2), {"$": "time", "v": ["01:02:00", 0, None]}),
    (
        datetime(2026, 1, 2, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        {"$": "datetime", "v": ["2026-01-02T00:00:00", 1, {"$": "zoneinfo", "v": "Europe/Berlin"}]},
    ),
    (timedelta(1, 2, 3), {"$": "timedelta", "v": [1, 2, 3]}),
    (timezone.utc, {"$": "timezone", "v": [[0, 0, 0], None]}),
    (ZoneInfo("UTC"), {"$": "zoneinfo", "v": "UTC"}),
    (Decimal("1.50"), {"$": "decimal", "v": "1.50"}),
    (UUID(int=1), {"$": "uuid", "v": "00000000-0000-0000-0000-000000000001"}),
    (torch.bfloat16, {"$": "torch.dtype", "v": "bfloat16"}),
    (torch.device("cuda", 1), {"$": "torch.device", "v": "cuda:1"}),
    (torch.Size([2, 3]), {"$": "torch.size", "v": [2, 3]}),
    (np.float32(1), {"$": "numpy.scalar", "v": ["<f4", "AACAPw=="]}),
    (np.str_("a"), {"$": "numpy.str", "v": "a"}),
    (np.bytes_(b"a"), {"$": "numpy.bytes", "v": "YQ=="}),
    (np.array(["a"]), {"$": "numpy.array", "v": ["<U1", [1], "YQAAAA=="]}),
    (
        np.array([(1, [2, 3])], [("a", "<i2"), ("b", ">i2", (2,))]),
        {"$": "numpy.array", "v": [[["a", "<i2", []], ["b", ">i2", [2]]], [1], "AQAAAgAD"]},
    ),
    (Color.CRIMSON, {"$": "object", "v": ["test.Color", "RED"]}),
    (Access.READ | Access.WRITE, {"$": "object", "v": ["test.Access", 3]}),
    (Plain(1), {"$": "object", "v": ["test.Plain", {"$": "dict", "v": [["first", 1], ["second", None]]}]}),
    (Point(1), {"$": "object", "v": ["test.Point", {"$": "dict", "v": [["x", 1], ["y", 0]]}]}),
    (Fraction(1, 3), {"$": "object", "v": ["test.Fraction", {"$": "tuple", "v": [1, 3]}]}),
]


@pytest.mark.parametrize(("value", "node"), SPELLINGS, ids=numbered(SPELLINGS))
def test_the_spelling_is_the_documented_one(value: Any, node: Any) -> None:
    assert Encoder().encode(value) == node
    assert json.dumps(Encoder().encode(value), sort_keys=True) == json.dumps(node, sort_keys=True)
    assert identical(Decoder().decode(node), value)


# ------------------------------------------------------------------------------ arrays and leaves


def stored_as_tensor(array: Any) -> tuple[dict[str, torch.Tensor], Any]:
    tensors: dict[str, torch.Tensor] = {}

    def store(tensor: torch.Tensor) -> str:
        tensors["a tensor"] = tensor.clone()
        return "a tensor"

    node = arrays.array_node(array, store)
    if node is None:
        return tensors, None
    assert node["$"] == "ndarray"
    name, dtype = arrays.array_in_shard(node["v"])
    return tensors, arrays.array_of(tensors[name], dtype)


@slow_to_draw
@given(st.data())
def test_a_numeric_array_goes_through_a_tensor_and_back(data: st.DataObject) -> None:
    kinds = (
        hnp.boolean_dtypes()
        | hnp.integer_dtypes()
        | hnp.unsigned_integer_dtypes()
        | hnp.floating_dtypes(sizes=(16, 32, 64))
        | hnp.complex_number_dtypes(sizes=(64, 128))
    )
    array = data.draw(hnp.arrays(kinds, hnp.array_shapes(min_dims=0, min_side=0, max_side=3)))
    array = data.draw(
        st.sampled_from(
            [
                array,
                array.T,
                np.asfortranarray(array),
                array[..., ::-1] if array.ndim else array,
                read_only(array),
            ]
        )
    )
    _, back = stored_as_tensor(array)
    assert identical(back, np.asarray(array, order="C"))
    assert identical(round_trip(array), np.asarray(array, order="C"))  # and inline as well


def read_only(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "array",
    (
        np.array(["2020-01-01"], "M8[D]"),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array([(1,)], [("a", "i4")]),
        np.array([1], np.longdouble),
        np.array([object()]),
        np.ma.masked_array([1.0], [True]),
    ),
    ids=lambda array: str(array.dtype),
)
def test_an_array_that_no_tensor_can_hold_stays_out_of_the_shards(array: Any) -> None:
    tensors, back = stored_as_tensor(array)
    assert back is None
    assert not tensors


REFERENCES: list[Any] = [None, [], ["name"], ["name", "O"], [1, "<f4"], ["name", "<f4", 1], ["n", ["<f4"]]]


@pytest.mark.parametrize("payload", REFERENCES, ids=numbered(REFERENCES))
def test_a_wrong_reference_to_an_array_is_refused(payload: Any) -> None:
    with pytest.raises(MalformedError):
        arrays.array_in_shard(payload)


def test_a_tensor_of_another_kind_is_no_array_of_the_stored_dtype() -> None:
    for tensor, dtype in [
        (torch.zeros(2), "<f8"),
        (torch.zeros(3), "<c8"),
        (torch.zeros(2, dtype=torch.int64), "<c16"),
    ]:
        with pytest.raises(MalformedError):
            arrays.array_of(tensor, dtype)


@pytest.mark.parametrize(
    "value", (np.str_("a\0"), np.str_("\0"), np.bytes_(b"a\0"), np.bytes_(b"")), ids=ascii
)
def test_a_numpy_string_keeps_the_nuls_at_its_end(value: Any) -> None:
    back = round_trip(value)
    assert type(back) is type(value)
    assert list(back) == list(value)


@pytest.mark.skipif(np.finfo(np.longdouble).nmant != 63, reason="only x86's long double has padding")
def test_what_pads_a_long_double_does_not_reach_the_document() -> None:
    one, two = bytearray(np.longdouble(1).tobytes()), bytearray(np.longdouble(1).tobytes())
    one[10:], two[10:] = b"\x00" * 6, b"\xff" * 6
    for shape in ((), (1,)):
        arrays_of = [np.ndarray(shape, np.longdouble, buffer=item) for item in (one, two)]
        assert Encoder().encode(arrays_of[0]) == Encoder().encode(arrays_of[1])
        assert identical(round_trip(arrays_of[1]), arrays_of[0])


@pytest.mark.skipif(
    np.finfo(np.longdouble).nmant != 63, reason="what is another machine's differs by machine"
)
def test_a_long_double_of_another_machine_is_a_mismatch() -> None:
    for node in (
        {"$": "numpy.array", "v": ["<f16", [0], ""]},
        {"$": "numpy.array", "v": ["x87:<f8", [0], ""]},
    ):
        with pytest.raises(StateMismatchError, match="another kind of machine"):
            Decoder().decode(node)


def test_an_array_owns_what_it_comes_back_with() -> None:
    back = round_trip(np.arange(3))
    back += 1
    assert back.flags.owndata
    assert back.tolist() == [1, 2, 3]


def test_an_array_is_offered_as_a_leaf_first() -> None:
    seen = []

    def leaf(value: Any, path: tuple[Any, ...]) -> Any:
        seen.append((type(value), path))
        return {"$": "ndarray", "v": "stored"} if value.dtype.kind == "f" else None

    node = Encoder(leaf).encode({"a": np.zeros(2), "b": np.array(["x"]), "c": np.float64(1)})
    assert seen == [(np.ndarray, ("a",)), (np.ndarray, ("b",))]
    assert node["v"][0] == ["a", {"$": "ndarray", "v": "stored"}]
    assert node["v"][1][1]["$"] == "numpy.array"


def test_a_leaf_learns_the_path_with_the_types_of_its_keys() -> None:
    paths = []
    state = {
        "a": [0, {1: torch.zeros(1)}],
        "b": types.SimpleNamespace(c=(torch.zeros(1),)),
        "d": Plain(torch.ones(1)),
    }
    Encoder(lambda value, path: paths.append(path) or {"$": "tensor", "v": "x"}).encode(state, ("root",))
    assert paths == [
        ("root", "a", 1, 1),
        ("root", "b", Attribute("c"), 0),
        ("root", "d", Attribute("first")),
    ]


def test_a_leaf_may_encode_and_decode_in_turn() -> None:
    class Holder:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

    def leaf(value: Any, path: tuple[Any, ...]) -> Any:
        if not isinstance(value, Holder):
            return None
        return {"$": "stateful", "v": encoder.encode(value.inner, (*path, "inner"))}

    encoder = Encoder(leaf)
    inner = {"x": [1, 2.5]}
    decoder = Decoder({"stateful": lambda *found: decoder.decode(*found)})  # noqa: PLW0108 - it is not there yet
    assert decoder.decode(encoder.encode([Holder(inner), (Holder(inner),)])) == [inner, (inner,)]
    with pytest.raises(StateEncodingError) as caught:
        encoder.encode([1, Holder({"x": [1, print]})])
    assert caught.value.key_path == "state[1]['inner']['x'][1]"
    with pytest.raises(FormatError, match=r"^state\[1\]\['y'\]"):
        decoder.decode([1, {"$": "stateful", "v": {"$": "dict", "v": [["y", {}]]}}])


def test_a_tensor_is_neither_a_key_nor_an_element_of_a_set() -> None:
    encoder = Encoder(lambda value, path: {"$": "tensor", "v": "x"})
    for value in ({torch.zeros(1): 1}, {torch.zeros(1)}, {(1, torch.zeros(1)): 1}):
        with pytest.raises(StateEncodingError, match="a Tensor cannot be stored as a key"):
            encoder.encode(value)
    with pytest.raises(FormatError, match="unknown tag 'tensor'"):
        Decoder({"tensor": lambda payload, path: 1}).decode({"$": "set", "v": [{"$": "tensor", "v": "x"}]})


def test_what_changes_after_encoding_is_not_seen() -> None:
    state: dict[str, Any] = {
        "list": [1],
        "bytes": bytearray(b"a"),
        "set": {1},
        "array": np.array(["a"]),
        "deque": deque([1]),
        "plain": Plain([1]),
        "ordered": OrderedDict(a=[1]),
        "namespace": types.SimpleNamespace(a=[1]),
    }
    node = Encoder().encode(state)
    before = json.dumps(node)
    state["list"].append(2)
    state["bytes"][0] = 0
    state["set"].add(2)
    state["array"][0] = "b"
    state["deque"].append(2)
    state["plain"].first.append(2)
    state["ordered"]["a"].append(2)
    state["namespace"].a.append(2)
    assert json.dumps(node) == before


# -------------------------------------------------------------------------------- what is refused


class TextSubclass(str):
    __slots__ = ()


class DictSubclass(dict[str, Any]):
    pass


def a_function() -> None: ...


def a_generator() -> Iterator[int]:
    yield 1


UNSAFE: list[Any] = [
    (a_function, "code has no place in a checkpoint"),
    (lambda: None, "code has no place in a checkpoint"),
    (print, "code has no place in a checkpoint"),
    ([].append, "code has no place in a checkpoint"),
    (int, "code has no place in a checkpoint"),
    (math, "code has no place in a checkpoint"),
    (a_generator(), "leave it out"),
    (sys.stdout, "leave it out"),
    (object(), "register_codec"),
    (..., "register_codec"),
    (DictSubclass(), "convert it to dict"),
    (TextSubclass("a"), "convert it to str"),
    (OrderedDict, "code has no place"),
    (defaultdict(lambda: 1), "make it a dict"),
    (np.array([object()]), "tolist"),
    (np.array([(1, 2)], np.dtype([("a", "i1"), ("b", "i8")], align=True)), "no safe encoding"),
    (np.rec.array([(1,)], [("a", "i4")]), "no safe encoding"),
    (np.ma.masked_array([1.0], [True]), "no safe encoding"),
    (np.zeros(2, "V0"), "no bytes"),
    (torch.zeros(1), "no safe encoding"),
    (itertools.count(), "leave it out"),
    (datetime(2020, 1, 1, tzinfo=type("Own", (timezone.__base__,), {})()), "zoneinfo"),  # type: ignore[misc]
]


@pytest.mark.parametrize(("value", "advice"), UNSAFE, ids=numbered(UNSAFE))
def test_what_has_no_safe_encoding_names_its_place_and_what_to_do(value: Any, advice: str) -> None:
    with pytest.raises(StateEncodingError) as caught:
        Encoder().encode({"extra": [0, {"loss_fn": value}]})
    assert caught.value.key_path == "state['extra'][1]['loss_fn']"
    assert advice in str(caught.value)


KEY_PATHS: list[Any] = [
    ({"a": types.SimpleNamespace(b=print)}, "state['a'].b"),
    ({1: (print,)}, "state[1][0]"),
    ({(1, 2): print}, "state[a tuple]"),
    ({"a": {print}}, "state['a'] (an element, a builtin_function_or_method)"),
    ({"a": {print: 1}}, "state['a'] (a key, a builtin_function_or_method)"),
    ({"a": {(1, print): 1}}, "state['a'] (a key, a tuple)[1]"),
    ({"a": Plain(1, print)}, "state['a'].second"),
    ({10**5000: print}, "state[an integer of 16610 bits]"),
    ({"x" * 500: print}, f"state['{'x' * 80}']"),
]


@pytest.mark.parametrize(("state", "path"), KEY_PATHS, ids=numbered(KEY_PATHS))
def test_the_path_is_spelled_as_python_would(state: Any, path: str) -> None:
    with pytest.raises(StateEncodingError) as caught:
        Encoder().encode(state)
    assert caught.value.key_path == path


def test_the_root_itself_has_a_path() -> None:
    assert key_path(()) == "state"
    with pytest.raises(StateEncodingError, match=r"^state: "):
        Encoder().encode(print)


def cyclic_list() -> Any:
    value: list[Any] = []
    value.append([value, value])
    return value


def cyclic_dict() -> Any:
    value: dict[str, Any] = {}
    value["self"] = Plain(value)
    return value


@pytest.mark.parametrize("value", (cyclic_list(), cyclic_dict()), ids=["list", "dict"])
def test_a_state_that_contains_itself_is_refused(value: Any) -> None:
    with pytest.raises(StateEncodingError, match="contains itself"):
        Encoder().encode(value)


WRAPS: list[Callable[[Any], Any]] = [
    lambda inner: [inner, 1],
    lambda inner: {"a": inner},
    lambda inner: OrderedDict(a=inner),
    lambda inner: defaultdict(None, a=inner),
    lambda inner: types.SimpleNamespace(a=inner),
    lambda inner: deque([inner]),
    lambda inner: slice(None, inner),
    Slotted,
    lambda inner: with_attribute(OrderedDict(), inner),
]


def with_attribute(value: Any, inner: Any) -> Any:
    value.a = inner
    return value


@pytest.mark.parametrize("wrap", WRAPS, ids=numbered(WRAPS))
def test_what_is_encoded_can_be_read_back_at_every_depth(wrap: Callable[[Any], Any]) -> None:
    value: Any = datetime(2020, 1, 1, tzinfo=timezone(timedelta(hours=1), "x"))
    refused = 0
    for _ in range(MAX_DEPTH + 2):
        try:
            node = Encoder().encode(value)
        except StateEncodingError:
            refused += 1
            data = None
        else:
            assert not refused
            data = canonical.encode(node)
            # The bound is what a reader is given, and one level less is too little at the deepest.
            assert Decoder().decode(canonical.decode(data, "it", BOUNDS)) is not None
        value = wrap(value)
    assert refused


def test_a_document_deeper_than_any_encoder_goes_is_refused() -> None:
    node: Any = 1
    for _ in range(MAX_DEPTH + 1):
        node = [node]
    with pytest.raises(FormatError, match=f"more than {MAX_DEPTH}"):
        Decoder().decode(node)


def test_shared_lists_do_not_multiply_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MAX_VALUES", 100_000)  # the real bound takes seconds to reach
    value: Any = [1]
    for _ in range(40):
        value = [value, value]
    with pytest.raises(StateEncodingError, match="referred to twice"):
        Encoder().encode(value)


def test_a_failed_encoder_can_go_on() -> None:
    encoder = Encoder()
    for _ in range(3 * MAX_DEPTH):
        with pytest.raises(StateEncodingError):
            encoder.encode([[{(print,): 1}]])
    with pytest.raises(StateEncodingError) as caught:
        encoder.encode([print])
    assert caught.value.key_path == "state[0]"
    assert encoder.encode([1]) == [1]


# ---------------------------------------------------------------------------------- strict reading

MALFORMED: list[Any] = [
    1.5,
    (1,),
    2**53,
    {},
    {"a": 1},
    {"$": "tuple"},
    {"$": "tuple", "v": [], "x": 1},
    {"$": 1, "v": []},
    {"$": "nonsense", "v": 1},
    {"$": "list", "v": []},
    {"$": "tuple", "v": "ab"},
    {"$": "tuple", "v": None},
    {"$": "int", "v": "0x5"},
    {"$": "int", "v": "0x1fffffffffffff"},
    {"$": "int", "v": "9007199254740992"},
    {"$": "int", "v": "0x0020000000000000"},
    {"$": "int", "v": "0X20000000000000"},
    {"$": "int", "v": "0x2000000000000A"},
    {"$": "int", "v": "0x2000_0000000000"},
    {"$": "int", "v": 5},
    {"$": "str", "v": "YQ=="},
    {"$": "str", "v": "/w=="},
    {"$": "float", "v": "1"},
    {"$": "float", "v": "1e0"},
    {"$": "float", "v": " 1.0"},
    {"$": "float", "v": "1_0.0"},
    {"$": "float", "v": "0.10000000000000000555"},
    {"$": "float", "v": "nan"},
    {"$": "float", "v": "infinity"},
    {"$": "float", "v": "nan:3ff0000000000000"},
    {"$": "float", "v": "nan:7FF8000000000000"},
    {"$": "float", "v": "nan:7ff8000000000000ff"},
    {"$": "float", "v": "1" * 1000 + ".0"},
    {"$": "float", "v": 1},
    {"$": "complex", "v": ["1.0"]},
    {"$": "complex", "v": "12"},
    {"$": "bytes", "v": "YR=="},
    {"$": "bytes", "v": "YQ"},
    {"$": "bytes", "v": "YQ==\n"},
    {"$": "bytes", "v": ["YQ=="]},
    {"$": "bytes", "v": "_w=="},
    {"$": "set", "v": [2, 10]},
    {"$": "set", "v": [1, 1]},
    {"$": "set", "v": [[]]},
    {"$": "set", "v": [1, True]},
    {"$": "frozenset", "v": [{"$": "dict", "v": []}]},
    {"$": "set", "v": [{"$": "decimal", "v": "sNaN"}]},
    {"$": "dict", "v": [["a", 1], ["a", 1]]},
    {"$": "dict", "v": [[1, "x"], [True, "x"]]},
    {"$": "dict", "v": [[[], 1]]},
    {"$": "dict", "v": [["a"]]},
    {"$": "dict", "v": ["ab"]},
    {"$": "dict", "v": {"a": 1}},
    {"$": "ordered_dict", "v": []},
    {"$": "ordered_dict", "v": [None]},
    {"$": "ordered_dict", "v": [[["a", 1], ["a", 1]]]},
    {"$": "ordered_dict", "v": [[[1, 1]]]},
    {"$": "defaultdict", "v": []},
    {"$": "defaultdict", "v": ["eval"]},
    {"$": "defaultdict", "v": ["os.system"]},
    {"$": "defaultdict", "v": [["list"]]},
    {"$": "deque", "v": []},
    {"$": "deque", "v": [1, 1, 2]},
    {"$": "deque", "v": [-1]},
    {"$": "deque", "v": [True, 1]},
    {"$": "deque", "v": [{"$": "int", "v": hex(2**64)}]},
    {"$": "namespace", "v": [[1, 1]]},
    {"$": "argparse_namespace", "v": [["a", 1], ["a", 2]]},
    {"$": "range", "v": [0, 1, 0]},
    {"$": "range", "v": [0, 1]},
    {"$": "range", "v": [0, True, 1]},
    {"$": "slice", "v": [1]},
    {"$": "posix_path", "v": "a//b"},
    {"$": "pure_posix_path", "v": 1},
    {"$": "date", "v": "2020-1-1"},
    {"$": "date", "v": "20200101"},
    {"$": "datetime", "v": ["2020-01-01", 0, None]},
    {"$": "datetime", "v": ["2020-01-01T00:00:00", 2, None]},
    {"$": "datetime", "v": ["2020-01-01T00:00:00", True, None]},
    {"$": "datetime", "v": ["2020-01-01T00:00:00+00:00", 0, None]},
    {"$": "datetime", "v": ["2020-01-01T00:00:00", 0, {"$": "date", "v": "2020-01-01"}]},
    {"$": "time", "v": ["24:00:00", 0, None]},
    {"$": "timedelta", "v": [0, 86400, 0]},
    {"$": "timedelta", "v": [True, 0, 0]},
    {"$": "timedelta", "v": [10**10, 0, 0]},
    {"$": "timezone", "v": [[2, 0, 0], None]},
    {"$": "timezone", "v": [[0, 0, 0], 1]},
    {"$": "zoneinfo", "v": "../../../etc/passwd"},
    {"$": "zoneinfo", "v": "/etc/passwd"},
    {"$": "zoneinfo", "v": "a.b"},
    {"$": "zoneinfo", "v": ""},
    {"$": "decimal", "v": "1_0"},
    {"$": "decimal", "v": "1e5"},
    {"$": "decimal", "v": "x"},
    {"$": "uuid", "v": "00000000000000000000000000000001"},
    {"$": "torch.dtype", "v": "float"},
    {"$": "torch.device", "v": "cuda:0:1"},
    {"$": "torch.device", "v": "CPU"},
    {"$": "torch.size", "v": [1.5]},
    {"$": "numpy.scalar", "v": ["<f4", "AAA="]},
    {"$": "numpy.scalar", "v": [">f4", "AACAPw=="]},
    {"$": "numpy.scalar", "v": ["|b1", "Ag=="]},
    {"$": "numpy.scalar", "v": ["<U1", "YQAAAA=="]},
    {"$": "numpy.scalar", "v": ["|O8", "AAAAAAAAAAA="]},
    {"$": "numpy.array", "v": ["|O8", [1], "AAAAAAAAAAA="]},
    {"$": "numpy.array", "v": ["O", [1], "AAAAAAAAAAA="]},
    {"$": "numpy.array", "v": [[["a", "|O8", []]], [1], "AAAAAAAAAAA="]},
    {"$": "numpy.array", "v": ["f4", [1], "AACAPw=="]},
    {"$": "numpy.array", "v": ["<f4,<f4", [1], "AACAPwAAgD8="]},
    {"$": "numpy.array", "v": ["<f4", [-1], "AACAPw=="]},
    {"$": "numpy.array", "v": ["<f4", [-1, -1], "AACAPw=="]},
    {"$": "numpy.array", "v": ["<f4", [True], "AACAPw=="]},
    {"$": "numpy.array", "v": ["<f4", [2], "AACAPw=="]},
    {"$": "numpy.array", "v": ["<f4", [1] * 65, "AACAPw=="]},
    {"$": "numpy.array", "v": ["<f4", [2**50] * 1_000_000, ""]},
    {"$": "numpy.array", "v": ["|V0", [2**50], ""]},
    {"$": "numpy.array", "v": [[], [2**50], ""]},
    {"$": "numpy.array", "v": ["<M8[0s]", [1], "AAAAAAAAAAA="]},
    {"$": "numpy.array", "v": [[["a", "<f4", []], ["a", "<f4", []]], [1], "AACAPwAAgD8="]},
    {"$": "numpy.array", "v": [[["", "<f4", []]], [1], "AACAPw=="]},
    {"$": "object", "v": ["test.Color"]},
    {"$": "object", "v": [1, "RED"]},
]


@pytest.mark.parametrize("node", MALFORMED, ids=numbered(MALFORMED))
def test_a_second_spelling_or_a_wrong_shape_is_refused_with_its_place(node: Any) -> None:
    with pytest.raises(FormatError, match=r"^state\['x'\]"):
        Decoder().decode({"$": "dict", "v": [["x", node]]})


UNBUILDABLE: list[Any] = [
    ({"$": "object", "v": ["os.system", "true"]}, "register_type or register_codec before restoring"),
    ({"$": "object", "v": ["test.Color", "GREEN"]}, "no member 'GREEN'"),
    ({"$": "object", "v": ["test.Color", "__class__"]}, "no member"),
    ({"$": "object", "v": ["test.Access", 64]}, "failed"),
    ({"$": "object", "v": ["test.Plain", 1]}, "rebuilt from its fields"),
    ({"$": "object", "v": ["test.Plain", {"$": "dict", "v": [["first", 1]]}]}, "lacks [second]"),
    (
        {"$": "object", "v": ["test.Point", {"$": "dict", "v": [["x", 1], ["y", 1], ["z", 1]]}]},
        "has [z] besides",
    ),
    (
        {"$": "object", "v": ["test.Slotted", {"$": "dict", "v": [[{"$": "numpy.str", "v": "item"}, 1]]}]},
        "rebuilt from its fields",
    ),
    ({"$": "object", "v": ["test.Fraction", {"$": "tuple", "v": [1, 0]}]}, "ZeroDivisionError"),
    ({"$": "zoneinfo", "v": "Atlantis/Capital"}, "tzdata"),
    ({"$": "torch.dtype", "v": "float3"}, "no dtype"),
    ({"$": "torch.dtype", "v": "load"}, "no dtype"),
    ({"$": "torch.device", "v": "abacus:0"}, "no device"),
    ({"$": "numpy.array", "v": ["<f3", [0], ""]}, "no dtype"),
]


@pytest.mark.parametrize(("node", "advice"), UNBUILDABLE, ids=numbered(UNBUILDABLE))
def test_what_this_program_cannot_build_is_a_mismatch_not_damage(node: Any, advice: str) -> None:
    with pytest.raises(StateMismatchError) as caught:
        Decoder().decode([node])
    assert str(caught.value).startswith("state[0]: ")
    assert advice in str(caught.value)


json_scalars = st.none() | st.booleans() | st.integers(-5, 2**53 - 1) | st.text("ab01=:.<", max_size=4)
TAGS = sorted({*ATOM_TAGS, *arrays.ARRAY_TAGS, *decoding._READERS, "nonsense", "tensor"})


def mutated(node: Any, draw: Callable[[Any], Any]) -> Any:
    """The document with one of its parts replaced, dropped, doubled or moved."""
    spots: list[tuple[Any, Any]] = []
    stack = [node]
    while stack:
        item = stack.pop()
        if isinstance(item, list | dict):
            keys = range(len(item)) if isinstance(item, list) else list(item)
            spots.extend((item, key) for key in keys)
            stack.extend(item[key] for key in keys)
    if not spots:
        return draw(json_scalars)
    holder, key = spots[draw(st.integers(0, len(spots) - 1))]
    other_holder, other_key = spots[draw(st.integers(0, len(spots) - 1))]
    change = draw(st.sampled_from(["replace", "wrap", "tag", "drop", "double", "move"]))
    if change == "replace":
        holder[key] = draw(json_scalars)
    elif change == "wrap":
        holder[key] = {"$": draw(st.sampled_from(TAGS)), "v": holder[key]}
    elif change == "tag" and isinstance(holder, dict):
        holder["$"] = draw(st.sampled_from(TAGS))
    elif change == "drop":
        del holder[key]
    elif change == "double" and isinstance(holder, list):
        holder.insert(key, holder[key])
    else:
        holder[key] = json.loads(json.dumps(other_holder[other_key]))
    return node


@slow_to_draw
@given(anything, st.data())
def test_a_changed_document_is_refused_or_is_the_one_spelling_of_another_value(
    value: Any, data: st.DataObject
) -> None:
    node = mutated(json.loads(json.dumps(Encoder().encode(value))), data.draw)
    try:
        other = Decoder().decode(node)
    except (FormatError, StateMismatchError):
        return
    if "test.Fraction" in json.dumps(node):
        return  # what a codec takes for the same is its own affair
    assert canonical.encode(Encoder().encode(other)) == canonical.encode(node)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    tagged = st.builds(lambda tag, payload: {"$": tag, "v": payload}, st.sampled_from(TAGS), inner)
    return st.lists(inner, max_size=4) | tagged


@slow_to_draw
@given(st.recursive(json_scalars, nested, max_leaves=20))
def test_only_the_two_errors_come_out_of_nonsense(node: Any) -> None:
    with contextlib.suppress(FormatError, StateMismatchError):
        Decoder().decode(node)


HOSTILE = """
import sys
from strongroom import canonical
from strongroom.decoding import Decoder
from strongroom.errors import FormatError, StateMismatchError
import numpy, torch, strongroom.arrays

Decoder().decode([{"$": "torch.dtype", "v": "int8"}, {"$": "numpy.scalar", "v": ["|i1", "AQ=="]}])
try:
    Decoder().decode({"$": "zoneinfo", "v": "Atlantis"})
except StateMismatchError:
    pass  # the standard library has looked into the tzdata package, and imported what it needs for that
seen = []
armed = False
BAD = {"import", "exec", "compile", "os.system", "subprocess.Popen", "pickle.find_class", "os.exec", "open"}
sys.addaudithook(lambda event, arguments: seen.append((event, arguments)) if armed and event in BAD else None)
tags = ["object", "torch.dtype", "torch.device", "zoneinfo", "numpy.array", "numpy.scalar", "defaultdict",
        "os.system", "builtins.eval", "pickle", "tuple", "namespace"]
names = ["os.system", "builtins.eval", "__import__('os').system('true')", "this", "antigravity",
         "torch.load", "onnx", "_dynamo", "tzdata.zoneinfo", "../../etc/passwd", "__class__",
         "cos\\nsystem\\n(S'true'\\ntR."]
armed = True
for tag in tags:
    for name in names:
        for payload in (name, [name], [name, name], [name, [1], ""], [[[name, name, []]], [1], ""]):
            try:
                Decoder().decode({"$": tag, "v": payload})
            except (FormatError, StateMismatchError):
                pass
armed = False
print([event for event in seen if not ("zoneinfo" in str(event[1]) and event[0] in {"open", "import"})])
"""


def test_no_name_in_a_document_is_imported_opened_or_run() -> None:
    done = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_neither_torch_nor_numpy_is_imported_for_what_needs_neither() -> None:
    program = (
        "import sys; from strongroom.values import Encoder; from strongroom.decoding import Decoder;"
        "Decoder().decode(Encoder().encode({'a': [1.5, {2}, b'x']}));"
        "print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ------------------------------------------------------------------------------------ registering


def test_every_type_with_an_encoding_of_its_own_keeps_it() -> None:
    for cls in (
        *values._WRITERS,
        *values._CONTAINERS,
        np.ndarray,
        np.float32,
        torch.dtype,
        torch.Size,
        torch.Tensor,
    ):
        with pytest.raises(ConfigError, match="encoding of its own"):
            register_codec(cls, name="test.taken", encode=str, decode=lambda value: value)


@pytest.mark.parametrize("name", ("", "1a", "a b", "a\n", "<locals>", "x" * 129, "ü"), ids=ascii)
def test_an_unsafe_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a type"):
        register_type(Plain, name=name)


def test_a_local_class_must_be_given_a_name() -> None:
    @dataclasses.dataclass
    class Local:
        item: int

    with pytest.raises(ConfigError, match="name="):
        register_type(Local)


def test_one_name_stands_for_one_class() -> None:
    with pytest.raises(ConfigError, match=r"'test\.Plain' is taken by .*Plain"):
        register_type(Slotted, name="test.Plain")
    with pytest.raises(ConfigError, match=r"registered as 'test\.Plain' already"):
        register_type(Plain, name="test.Other")
    with pytest.raises(ConfigError, match="is taken"):
        register_codec(Fraction, name="test.Plain", encode=str, decode=Fraction)
    register_type(Plain, name="test.Plain")


def test_a_class_defined_again_takes_its_names_place() -> None:
    def define() -> type[Any]:
        @register_type(name="test.Again")
        @dataclasses.dataclass
        class Again:
            item: int

        return Again

    with unregistered_afterwards():
        old, new = define(), define()
        assert type(round_trip(old(1))) is new
        assert type(round_trip(new(1))) is new


def test_registering_works_as_a_decorator_with_and_without_a_name() -> None:
    with unregistered_afterwards():
        assert register_type(TopLevel) is TopLevel
        assert round_trip(TopLevel(1)) == TopLevel(1)
        assert Encoder().encode(TopLevel(1))["v"][0] == "TopLevel"


@dataclasses.dataclass
class TopLevel:
    item: int


@dataclasses.dataclass
class Extended(Plain):
    more: Any = None


class Undecorated(Plain):
    pass


@dataclasses.dataclass
class ListLike(list[int]):
    item: int = 0


@pytest.mark.parametrize("cls", (Undecorated, ListLike, object, Encoder, "text", 5), ids=str)
def test_a_class_that_cannot_be_rebuilt_from_its_fields_is_refused(cls: Any) -> None:
    with pytest.raises(ConfigError):
        register_type(cls, name="test.refused")


def test_a_subclass_of_a_registered_class_is_another_type() -> None:
    with pytest.raises(StateEncodingError, match="Extended has no safe encoding"):
        Encoder().encode(Extended(1))
    with pytest.raises(StateEncodingError, match="Undecorated has no safe encoding"):
        Encoder().encode(Undecorated(1))


def test_attributes_that_are_no_fields_are_never_lost_silently() -> None:
    value = Plain(1)
    value.cache = 2  # type: ignore[attr-defined]
    with pytest.raises(StateEncodingError, match="attributes beside its fields, which would be lost: cache"):
        Encoder().encode(value)
    counter = Counter("a")
    counter.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(StateEncodingError, match="attributes of its own: extra"):
        Encoder().encode(counter)
    with pytest.raises(StateEncodingError, match="fields item were never set"):
        Encoder().encode(object.__new__(Slotted))


def test_a_codec_reads_what_the_class_stored_before_it_outgrew_its_fields() -> None:
    with unregistered_afterwards():
        node = Encoder().encode(Plain(1, "old"))
        registry._by_type.pop(Plain)
        registry._by_name.pop("test.Plain")
        register_codec(
            Plain,
            name="test.Plain",
            encode=lambda value: {"first": value.first},
            decode=lambda fields: Plain(fields["first"], "new"),
        )
        assert Decoder().decode(node) == Plain(1, "new")


def test_a_codecs_own_failure_names_the_place_and_keeps_the_cause() -> None:
    with unregistered_afterwards():
        register_codec(Random, name="test.Random", encode=lambda value: 1 // 0, decode=lambda value: value)
        with pytest.raises(
            StateEncodingError, match=r"state\['r'\]: .*'test\.Random' failed: ZeroDivisionError"
        ) as caught:
            Encoder().encode({"r": Random()})
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


class Random:
    pass


def test_a_codec_may_give_tensors() -> None:
    with unregistered_afterwards():
        register_codec(
            Random,
            name="test.Random",
            encode=lambda value: {"t": torch.ones(2)},
            decode=lambda parts: parts["t"],
        )
        node = Encoder(lambda value, path: {"$": "tensor", "v": key_path(path)}).encode({"r": Random()})
        assert node["v"][0][1]["v"][1] == {"$": "dict", "v": [["t", {"$": "tensor", "v": "state['r']['t']"}]]}


def test_a_path_of_the_other_system_can_still_be_read() -> None:
    back = Decoder().decode({"$": "windows_path", "v": "c:\\a"})
    assert back == PureWindowsPath("c:/a")
    assert isinstance(Path(), PosixPath)  # the tests run where that is not the native kind
