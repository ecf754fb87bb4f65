"""What ranks run in the tests of layouts; importable by name, since ranks are other processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from strongroom import Checkpointer, PerRank, StrongroomError, Tolerate
from strongroom.events import Event, SaveStarted

TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Layout:
    """How a tensor lies over ranks.

    Attributes:
        mesh: the mesh's shape; empty: a plain tensor on every rank.
        words: a letter for each dimension of the mesh: a digit for the tensor's dimension that it
            shards, - for its last one, R for a replica, S for dimension 0 after the mesh's other
            dimension has cut it (what FSDP2 makes of a tensor that is sharded already).
        ranks: which ranks take part, in the mesh's order; None: all, in order.
    """

    mesh: tuple[int, ...] = ()
    words: str = ""
    ranks: tuple[int, ...] | None = None

    @property
    def placements(self) -> list[Placement]:
        return [
            Replicate()
            if letter == "R"
            else _StridedShard(0, split_factor=self.mesh[1])
            if letter == "S"
            else Shard(-1 if letter == "-" else int(letter))
            for letter in self.words
        ]

    def holders(self) -> tuple[int, ...]:
        return self.ranks or tuple(range(math.prod(self.mesh)))

    def lay(self, whole: torch.Tensor) -> torch.Tensor:
        """A tensor of this layout with the values of ``whole``; cut here: nobody waits for anybody."""
        if not self.mesh:
            return whole.clone()
        mesh = mesh_of(self.mesh, self.holders())
        part = whole
        cuts = list(zip(self.words, self.mesh, mesh.get_coordinate() or (), strict=False))
        for letter, count, place in reversed(cuts) if "S" in self.words else cuts:
            if letter != "R":
                part = cut(part, int({"S": "0", "-": "-1"}.get(letter, letter)), count, place)
        return DTensor.from_local(
            part.clone(), mesh, self.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )


def cut(whole: torch.Tensor, dimension: int, count: int, place: int) -> torch.Tensor:
    """One of so many pieces along a dimension: full ones first, then what is left, then empty ones."""
    length = -(-whole.shape[dimension] // count)
    start = min(place * length, whole.shape[dimension])
    return whole.narrow(dimension, start, min(length, whole.shape[dimension] - start))


PLAIN = Layout()

_MESHES: dict[Any, DeviceMesh] = {}


def mesh_of(shape: tuple[int, ...], ranks: tuple[int, ...] | None = None) -> DeviceMesh:
    """A mesh over some ranks, made once a process: each makes new groups."""
    ranks = ranks or tuple(range(math.prod(shape)))
    if (shape, ranks) not in _MESHES:
        _MESHES[shape, ranks] = DeviceMesh("cpu", torch.tensor(ranks).reshape(shape))
    return _MESHES[shape, ranks]


def truth(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """A tensor of which every element is another, as far as its type can tell them apart."""
    generator = torch.Generator().manual_seed(seed + math.prod(shape))
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if dtype.is_complex or dtype.is_floating_point:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(shape, generator=generator, dtype=wide).to(dtype)
    return torch.randint(0, 100, shape, generator=generator, dtype=torch.int64).to(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of this rank's part of a tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(found: Any, expected: Any) -> bool:
    """Whether two values are equal: tensors bit for bit, in type and layout too."""
    if isinstance(expected, torch.Tensor):
        return (
            type(found) is type(expected)
            and found.dtype == expected.dtype
            and found.shape == expected.shape
            and getattr(found, "placements", None) == getattr(expected, "placements", None)
            and raw(found) == raw(expected)
        )
    if isinstance(expected, Mapping):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


@contextmanager
def checkpointer(root: Path, **options: Any) -> Any:
    with Checkpointer(root, **{"timeout_s": TIMEOUT_S, **options}) as opened:
        yield opened


def refusal(act: Any) -> tuple[str, str]:
    """The type's name and the text of what an act raises."""
    try:
        act()
    except StrongroomError as error:
        return type(error).__name__, str(error)
    return "", ""


# ------------------------------------------------------------------------------------ single tensors

Tensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def save_tensors(root: Path, tensors: Tensors, layouts: Mapping[str, Layout]) -> None:
    """Save the truth of each tensor, each in its layout."""
    state = {name: layouts[name].lay(whole) for name, whole in truths(tensors).items()}
    with checkpointer(root) as opened:
        opened.save(1, state).result(timeout_s=TIMEOUT_S)


def load_tensors(root: Path, tensors: Tensors, *layouts: Mapping[str, Layout]) -> list[str]:
    """Restore each tensor into each layout, and without a template; what is not the truth."""
    wholes = truths(tensors)
    wrong = []
    with checkpointer(root) as opened:
        for targets in layouts:
            state = {name: targets[name].lay(torch.zeros_like(whole)) for name, whole in wholes.items()}
            restored = opened.restore(state).state
            wrong += [
                f"{name} into {targets[name]}"
                for name, whole in wholes.items()
                if restored[name] is not state[name] or not same(state[name], targets[name].lay(whole))
            ]
        restored = opened.restore().state
        names = {**wholes, **restored}
    return wrong + [name for name in names if not same(restored.get(name), wholes.get(name))]


def move_tensors(
    root: Path, tensors: Tensors, before: Mapping[str, Layout], *after: Mapping[str, Layout]
) -> list[str]:
    """`save_tensors`, then `load_tensors`."""
    save_tensors(root, tensors, before)
    return load_tensors(root, tensors, *after)


def truths(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: truth(*described, seed=len(name)) for name, described in tensors.items()}


# ------------------------------------------------------------------------------------ what is stored


def replicas(sizes: list[int]) -> Any:
    """A module whose parameters have so many elements, the same on all ranks."""
    torch.manual_seed(0)
    named = {f"p{number}": nn.Parameter(torch.randn(size)) for number, size in enumerate(sizes)}
    return {"model": nn.ParameterDict(named)}


def save_state(root: Path, make: Any, *arguments: Any) -> int:
    """Save what a function makes; how many bytes this rank staged for it."""
    state = make(*arguments)
    listener = Listener()
    with checkpointer(root, events=[listener]) as opened:
        opened.save(1, state).result(timeout_s=TIMEOUT_S)
    return next(event.size_bytes for event in listener.heard if isinstance(event, SaveStarted))


class Listener:
    """Keeps every event."""

    def __init__(self) -> None:
        self.heard: list[Event] = []

    def emit(self, event: Event) -> None:
        self.heard.append(event)


def refused_save(root: Path, make: Any, *arguments: Any) -> list[tuple[str, str]]:
    """How the saves of two odd states are refused, and that an even one is saved then.

    The second save tells whether anything of the first was kept.
    """
    with checkpointer(root, on_failure=Tolerate(consecutive=5)) as opened:
        opened.save(1, {"w": ROWS.lay(truth((8, 2)))}).result(timeout_s=TIMEOUT_S)
        told = [
            refusal(lambda step=step: opened.save(step, make(*arguments)).result(timeout_s=TIMEOUT_S))
            for step in (2, 3)
        ]
        opened.save(4, {"w": ROWS.lay(truth((8, 2), seed=4))}).result(timeout_s=TIMEOUT_S)
        found = opened.restore()
    assert (found.step, same(found.state["w"], truth((8, 2), seed=4))) == (4, True)
    return told


ROWS = Layout((4,), "0")


def unreduced() -> Any:
    placements = [Partial()]
    return {"w": DTensor.from_local(torch.ones(2, 2), mesh_of((4,)), placements, run_check=False)}


def in_several_pieces() -> Any:
    placements = [_StridedShard(0, split_factor=2)]
    return {"w": DTensor.from_local(torch.ones(2, 2), mesh_of((4,)), placements, run_check=False)}


def of_other_shapes() -> Any:
    return {"w": torch.ones(2 + dist.get_rank() % 2)}


def on_rank_2_alone() -> Any:
    more = {"more": torch.ones(2)} if dist.get_rank() == 2 else {}
    return {"w": torch.ones(2), **more}


def of_other_values() -> Any:
    return {"w": torch.ones(2), "extra": {"epoch": 3 if dist.get_rank() in (1, 3) else 2}}


def of_other_tensors() -> Any:
    return {"w": torch.full((2,), int(dist.get_rank() == 3))}


def own_buffers() -> Any:
    """A module whose buffers differ from rank to rank, and a burden that is rank 0's alone."""
    model = nn.BatchNorm1d(3)
    with torch.no_grad():
        model.running_mean.fill_(dist.get_rank())
        model.running_var.fill_(10.0 + dist.get_rank())
        model.num_batches_tracked.fill_(100 + dist.get_rank())
    return {"model": model, "burden": Layout((1,), "0").lay(truth((1000,)))}


def save_before_and_after_parameters_become_buffers(root: Path) -> None:
    """Two saves of layers whose biases are parameters first, then buffers that differ from rank to rank."""
    layers = nn.ModuleList(nn.Linear(2, 6) for _ in range(4))
    with checkpointer(root) as opened:
        opened.save(1, {"layers": layers})
        for layer in layers:
            del layer.bias
            layer.register_buffer("bias", torch.full((6,), float(dist.get_rank())))
        opened.save(2, {"layers": layers})


def hybrid_module(count: int) -> Any:
    """Parameters sharded over two ranks, each shard on two."""
    layout = Layout((2, 2), "R0")
    named = {f"p{number}": nn.Parameter(layout.lay(truth((6, 4), seed=number))) for number in range(count)}
    return {"model": nn.ParameterDict(named)}


def load_anew(root: Path) -> Any:
    """What a restore without a template gives, as plain lists."""
    with checkpointer(root) as opened:
        return as_lists(opened.restore().state)


def as_lists(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return {key: as_lists(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def refused_load(root: Path, make: Any) -> tuple[str, str]:
    """How a restore is refused; what was to be filled is untouched."""
    state = make()
    before = raw(state["w"])
    with checkpointer(root) as opened:
        told = refusal(lambda: opened.restore(state))
    assert raw(state["w"]) == before
    return told


def save_again_and_again(root: Path) -> Any:
    """Saves of one state as it changes: how often each was planned, what it sent, whether it came back."""
    from strongroom import saving

    own = PerRank(truth((2,)))
    base = {"w": ROWS.lay(truth((8, 2))), "v": Layout((2, 2), "01").lay(truth((4, 4))), "own": own}
    # Each change alone, on top of those before it.
    changes: dict[str, Any] = {
        "first": {},
        "other values": {"w": base["w"] + 1},
        "another shape on rank 1": {"own": PerRank(truth((2 + (dist.get_rank() == 1),)))},
        "another mesh": {"v": Layout((2, 2), "01", (0, 2, 1, 3)).lay(truth((4, 4), seed=5))},
        "another shape": {"w": ROWS.lay(truth((5, 2)))},
        "another type": {"w": ROWS.lay(truth((5, 2), torch.bfloat16))},
        "as at first": base,
        "once more": {},
    }
    planned, sent, wrong = {}, {}, []
    with (
        counted_calls(saving, "plan_local") as plans,
        counted_calls(saving, "encode_held") as sendings,
        checkpointer(root) as opened,
    ):
        state = base
        for step, (name, change) in enumerate(changes.items()):
            state = {**state, **change}
            before = len(plans), len(sendings)
            opened.save(step, state).result(timeout_s=TIMEOUT_S)
            planned[name], sent[name] = len(plans) - before[0], len(sendings) - before[1]
            expected = {**state, "own": state["own"].value}
            found = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
            with checkpointer(root) as other:
                other.restore(found)
            wrong += [f"{key}, {name}" for key in expected if not same(found[key], expected[key])]
    return {"planned": planned, "sent": sent, "wrong": wrong}


@contextmanager
def counted_calls(module: Any, name: str) -> Any:
    """A list that grows with each call of a module's function."""
    function, calls = getattr(module, name), []

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        return function(*arguments, **options)

    setattr(module, name, counted)
    try:
        yield calls
    finally:
        setattr(module, name, function)
