"""What has no encoding is stored as far as it can be, told, and put back or left alone on the way in."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import functools
import pathlib
import subprocess
import sys
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from strongroom import Checkpointer, PerRank, StateMismatchError, register_type, tree
from strongroom.decoding import Decoder
from strongroom.resume import described, encodable, has_stand_ins, rebuild
from strongroom.standins import LeftOut, Simplified
from strongroom.values import MAX_DEPTH


class Phase(enum.Enum):
    WARM_UP = 1
    MAIN = 2


class Parts(enum.Flag):
    HEAD = 1
    TAIL = 2


@dataclasses.dataclass(frozen=True)
class Options:
    rate: float
    loss: Any = None


class Split(NamedTuple):
    name: str
    share: float


class Config(dict[str, Any]):
    """As users write them, with attributes for keys."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Name(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "not what it holds"


class Opaque:
    pass


@register_type(name="test-losses-known")
@dataclasses.dataclass
class Known:
    value: Any


def test_what_has_an_encoding_is_left_exactly_as_it_is() -> None:
    value = {
        "numbers": [1, 2.5, None, True, 3j],
        "text": ("a", b"b", bytearray(b"c")),
        "tensor": torch.ones(2),
        "numpy": [np.float64(0.5), np.arange(3), np.dtype("float32").type(1)],
        "torch": [torch.float32, torch.device("cpu"), torch.Size([1])],
        "containers": [collections.OrderedDict(a=1), collections.deque([1], 3), {1, 2}, frozenset({3})],
        "counted": collections.Counter("aab"),
        "factory": collections.defaultdict(list, a=[1]),
        "namespace": argparse.Namespace(lr=0.1, path=pathlib.Path("data")),
        "keys": {(1, "a"): 1, 2: 3},
        "generator": torch.Generator(),
        "registered": Known({"a": 1}),
        "own": PerRank([1]),
    }
    found, losses = encodable(value)
    assert found is value
    assert losses == ()


def out(kind: str, name: str) -> LeftOut:
    return LeftOut(kind=kind, name=name)


def parts(name: str, value: Any) -> Simplified:
    return Simplified(kind=f"{__name__}.{name}", value=value)


FIELDS = "a dict of its fields"

NONE: dict[str, tuple[Any, LeftOut | Simplified, str]] = {
    "function": (torch.nn.functional.mse_loss, out("function", "torch.nn.functional.mse_loss"), ""),
    "partial": (functools.partial(Split, "a"), out("class", f"{__name__}.Split"), ""),
    "class": (Opaque, out("class", f"{__name__}.Opaque"), ""),
    "object": (Opaque(), out("object", f"{__name__}.Opaque"), ""),
    "lambda": (lambda: 1, out("function", f"{__name__}.<lambda>"), ""),
    "module": (types, out("object", "builtins.module"), ""),
    "objects": (np.array([object()]), out("object", "numpy.ndarray"), ""),
    "registered": (Known(Opaque()), out("object", f"{__name__}.Known"), ""),
    "set": ({Opaque}, out("object", "builtins.set"), ""),
    "enum": (Phase.MAIN, parts("Phase", "MAIN"), "its name"),
    "flags": (Parts.HEAD | Parts.TAIL, parts("Parts", 3), "its number"),
    "dataclass": (Options(0.5), parts("Options", {"rate": 0.5, "loss": None}), FIELDS),
    "namedtuple": (Split("a", 0.5), parts("Split", {"name": "a", "share": 0.5}), FIELDS),
    "dict": (Config(lr=1), parts("Config", {"lr": 1}), "a dict"),
    "str": (Name("x"), parts("Name", "x"), "a str"),
    "mapping": (
        types.MappingProxyType({"a": 1}),
        Simplified(kind="builtins.mappingproxy", value={"a": 1}),
        "a dict",
    ),
    "defaultdict": (
        collections.defaultdict(lambda: 1, a=2),
        Simplified(kind="collections.defaultdict", value={"a": 2}),
        "a dict",
    ),
}


@pytest.mark.parametrize("name", NONE)
def test_what_has_none_is_stored_as_far_as_it_can_be_and_told(name: str) -> None:
    value, stored, kept = NONE[name]
    found, (loss,) = encodable({"before": 1, "here": [value]}, ("callbacks",))
    assert found == {"before": 1, "here": [stored]}
    assert loss.place == "state['callbacks']['here'][0]"
    assert stored.kind in loss.what
    assert loss.kept == kept
    assert str(loss).endswith(f"kept as {kept}" if kept else "left out")


def test_only_what_cannot_be_stored_is_missing() -> None:
    """All of it together, through a real checkpoint's document and back."""
    value = {
        "keep": {"lr": 0.1, "loss": torch.nn.functional.mse_loss, "t": torch.arange(3)},
        "list": [1, Opaque(), 3],
        "args": argparse.Namespace(lr=0.1, act=torch.relu),
        "ordered": collections.OrderedDict(a=1, b=Opaque()),
        "default": collections.defaultdict(list, a=Opaque()),
        "queue": collections.deque([Opaque(), 2], 5),
        ("a", 1): Opaque(),
        Opaque: "keyed by a class",
        "nested": Options(0.5, loss=[Phase.MAIN, Opaque()]),
        "own": PerRank({"a": Opaque()}),
    }
    found, losses = encodable(value)
    tree.capture(found, rank=0)  # as a save would: no error
    assert len(losses) == 12
    back = rebuild(found)
    assert back["keep"] == {"lr": 0.1, "t": value["keep"]["t"]}
    assert back["list"][::2] == [1, 3]
    assert isinstance(back["list"][1], LeftOut)
    assert back["args"] == argparse.Namespace(lr=0.1)
    assert back["ordered"] == collections.OrderedDict(a=1)
    assert type(back["ordered"]) is collections.OrderedDict
    assert back["default"] == {}
    assert back["default"].default_factory is list
    assert back["queue"][1] == 2
    assert back["queue"].maxlen == 5
    assert set(back) == {"keep", "list", "args", "ordered", "default", "queue", "nested", "own"}
    assert back["nested"]["rate"] == 0.5
    assert back["nested"]["loss"][0] == "MAIN"
    assert back["own"] == PerRank({})


def test_the_programs_own_values_stand_where_nothing_was_stored() -> None:
    def loss() -> None: ...

    saved, _ = encodable(
        {
            "fn": loss,
            "count": 3,
            "phase": Phase.MAIN,
            "parts": Parts.TAIL,
            "options": Options(0.5, loss=loss),
            "split": Split("a", 0.5),
            "config": Config(lr=1, inner=Config(fn=loss, a=2)),
            "list": [loss, 2],
        }
    )

    def own_loss() -> None: ...

    own = {
        "fn": own_loss,
        "count": 0,
        "phase": Phase.WARM_UP,
        "parts": Parts.HEAD,
        "options": Options(9.0, loss=own_loss),
        "split": Split("b", 0.0),
        "config": Config(lr=0, inner=Config(fn=own_loss, a=0)),
        "list": [own_loss, 0],
    }
    back = rebuild(saved, own)
    assert back == {
        "fn": own_loss,
        "count": 3,
        "phase": Phase.MAIN,
        "parts": Parts.TAIL,
        "options": Options(0.5, loss=own_loss),
        "split": Split("a", 0.5),
        "config": {"lr": 1, "inner": {"fn": own_loss, "a": 2}},
        "list": [own_loss, 2],
    }
    assert back["phase"] is Phase.MAIN
    assert type(back["split"]) is Split
    assert type(back["config"]) is type(back["config"].inner) is Config
    assert own["config"]["lr"] == 0, "what the program has is not changed by that"


def test_an_object_of_another_class_at_that_place_is_not_filled() -> None:
    saved, _ = encodable({"phase": Phase.MAIN, "options": Options(0.5)})
    back = rebuild(saved, {"phase": Parts.HEAD, "options": Split("a", 1.0)})
    assert back == {"phase": "MAIN", "options": {"rate": 0.5, "loss": None}}


def test_a_module_s_state_goes_into_the_programs_own_module_and_is_no_argument() -> None:
    module = torch.nn.Linear(2, 1)
    saved, (loss,) = encodable({"ema": module})
    assert loss.kept == "its state_dict()"
    own = torch.nn.Linear(2, 1)
    assert rebuild(saved, {"ema": own})["ema"] is own
    assert torch.equal(own.weight, module.weight)
    assert set(rebuild(saved)["ema"]) == {"weight", "bias"}
    with pytest.raises(StateMismatchError, match=r"state\['callbacks'\]\['ema'\]: its state.*does not fit"):
        rebuild(saved, {"ema": torch.nn.Linear(3, 1)}, path=("callbacks",))

    omitted, (loss,) = encodable({"loss": torch.nn.MSELoss()}, objects="omit")
    assert omitted == {"loss": LeftOut(kind="object", name="torch.nn.modules.loss.MSELoss")}
    assert rebuild(omitted) == {}


@pytest.mark.parametrize("deep", (True, False))
def test_what_has_no_end_is_left_out_and_not_walked_for_ever(deep: bool) -> None:
    value: list[Any] = []
    if deep:
        for _ in range(2 * MAX_DEPTH):
            value = [value]
    else:
        value += [value, value]
    found, losses = encodable({"here": value, "kept": 1})
    tree.capture(found, rank=0)
    assert "contains itself, or is nested too deep" in losses[0].what
    assert found["kept"] == 1


def test_a_kind_that_the_caller_can_make_comes_back_and_is_no_loss() -> None:
    kind = f"{__name__}.Config"
    saved, losses = encodable({"config": Config(lr=1)}, known=[kind])
    assert losses == ()
    assert type(rebuild(saved, makers={kind: Config})["config"]) is Config
    assert has_stand_ins(saved)
    assert not has_stand_ins(rebuild(saved))


def test_configurations_come_back_as_such() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    value = omegaconf.OmegaConf.create(
        {"lr": 0.1, "twice": "${lr}", "missing": "???", "list": [1, {"a": None}]}
    )
    saved, losses = encodable({"config": value})
    tree.capture(saved, rank=0)
    assert losses == ()
    back = rebuild(saved)["config"]
    assert type(back) is omegaconf.DictConfig
    assert back.twice == 0.1
    assert omegaconf.OmegaConf.is_missing(back, "missing")
    assert back == value


def test_a_record_has_names_for_what_cannot_be_stored() -> None:
    value = {"loss": torch.nn.functional.mse_loss, "options": Options(0.5), "all": (Opaque(), Phase.MAIN)}
    assert described(value) == {
        "loss": "torch.nn.functional.mse_loss",
        "options": {"rate": 0.5, "loss": None},
        "all": (f"{__name__}.Opaque", "MAIN"),
    }


def test_a_checkpoint_cannot_make_a_configuration_call_functions() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    hostile = {"config": Simplified(kind="omegaconf.dictconfig.DictConfig", value={"a": ["${${b}:1+1}"]})}
    assert rebuild(hostile)["config"] == {"a": ["${${b}:1+1}"]}
    assert type(rebuild(hostile)["config"]) is dict
    value = omegaconf.OmegaConf.create({"home": "${oc.env:HOME}"})
    saved, (loss,) = encodable({"config": value})
    assert saved["config"].value == {"home": "${oc.env:HOME}"}, "what it refers to is not stored"
    assert "would call a function" in loss.kept


def test_every_program_reads_stand_ins_and_imports_nothing_by_their_names(tmp_path: Any) -> None:
    found, _ = encodable({"fn": torch.relu, "phase": Phase.MAIN})
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"extra": found}).result()
    code = (
        "import sys; from strongroom import Checkpointer; "
        f"print(Checkpointer({str(tmp_path)!r}).restore().state['extra']); "
        f"assert {__name__!r} not in sys.modules"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert "LeftOut(kind='function'" in child.stdout
    assert "Simplified(kind=" in child.stdout


def test_the_two_names_are_known_to_a_bare_decoder() -> None:
    node = {
        "$": "object",
        "v": ["strongroom.left-out", {"$": "dict", "v": [["kind", "class"], ["name", "a.B"]]}],
    }
    assert Decoder().decode(node) == LeftOut(kind="class", name="a.B")
    assert str(Decoder().decode(node)) == "the class a.B, which was left out of the checkpoint"


class Unruly:
    """Raises at whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError(name)


class Unready:
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not yet")

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("kind", (Unruly, Unready))
def test_what_raises_when_it_is_looked_at_is_left_out(kind: type) -> None:
    found, (loss,) = encodable({"it": kind(), "count": 1})
    assert found == {"it": LeftOut(kind="object", name=f"{__name__}.{kind.__name__}"), "count": 1}
    assert "when it was looked at" in str(loss)


@pytest.mark.parametrize(
    "tensor",
    (
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.nn.UninitializedParameter(),
    ),
    ids=("coo", "meta", "lazy"),
)
def test_tensors_that_cannot_be_carried_are_left_out(tensor: torch.Tensor) -> None:
    found, (loss,) = encodable([tensor, torch.ones(1)])
    assert isinstance(found[0], LeftOut)
    assert "dense form" in loss.remedy
    tree.capture({"state": found}, rank=0)


def test_attributes_of_an_ordered_dict_are_looked_at_too() -> None:
    value: Any = collections.OrderedDict(a=1)
    value.made_by = Opaque
    found, (loss,) = encodable(value)
    assert loss.place.endswith(".made_by")
    assert found.made_by == LeftOut(kind="class", name=f"{__name__}.Opaque")


def test_configurations_without_a_value_or_with_objects_are_no_error() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    own = omegaconf.OmegaConf.create({"a": {"b": 1}}, flags={"allow_objects": True})
    own.a.it = thing = Opaque()
    for value in (own, omegaconf.DictConfig(None)):
        found, _ = encodable({"cfg": value})
        tree.capture({"state": found}, rank=0)
        again = rebuild(found, {"cfg": value})["cfg"]
        assert again == value
    assert rebuild(encodable(own)[0], own).a.it is thing
