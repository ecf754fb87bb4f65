"""What ranks run in the tests of whole states; importable by name, since ranks are other processes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layout_jobs import PLAIN, TIMEOUT_S, Layout, checkpointer, mesh_of, raw, refusal, same, truth
from model_jobs import Net, build, everything, train, truth_after, unlike
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from strongroom import PerRank

ROWS = Layout((4,), "0")


def rank() -> int:
    return dist.get_rank()


# --------------------------------------------------------------------------------- without a template


def load_whole_model(root: Path) -> list[str]:
    """Restore all of a run without a template; what is not the plain run's."""
    with checkpointer(root) as opened:
        restored = opened.restore()
    return unlike(flat(restored.state), truth_after(restored.step))


def flat(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A restored model and optimizer by the names of `model_jobs.everything`."""
    found = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    bare = Net()
    # As `model_jobs.build` groups them.
    biases = [name for name, _ in bare.named_parameters() if name.endswith("bias")]
    others = [name for name, _ in bare.named_parameters() if not name.endswith("bias")]
    for number, values in state["optimizer"]["state"].items():
        found |= {f"{key} of {[*others, *biases][number]}": value for key, value in values.items()}
    return found


# ------------------------------------------------------------------------------------ parts of a state


def restore_parts(root: Path, style: str) -> list[str]:
    """Restore a model alone, then one layer, then under other names; what is not as it should be."""
    wrong = []
    expected = truth_after(2)
    with checkpointer(root) as opened:
        model, optimizer = build(style)
        train(model, optimizer, range(1))
        before = everything(model, optimizer)
        opened.restore({"model": model, "optimizer": optimizer}, only="model")
        after = everything(model, optimizer)
        wanted = {**before, **{name: value for name, value in expected.items() if name.startswith("model.")}}
        wrong += [f"the model alone: {name}" for name in unlike(after, wanted)]

        model, optimizer = build(style)
        train(model, optimizer, range(1))
        before = everything(model, optimizer)
        opened.restore({"model": model}, only=["model.first.*", "model.norm.weight"])
        after = everything(model, optimizer)
        chosen = ("model.first.weight", "model.first.bias", "model.norm.weight")
        wrong += [
            f"one layer: {name}"
            for name in unlike(after, {**before, **{name: expected[name] for name in chosen}})
        ]

        model, optimizer = build(style)
        opened.restore({"net": model, "adam": optimizer}, rename={"net": "model", "adam": "optimizer"})
        wrong += [f"renamed: {name}" for name in unlike(everything(model, optimizer), expected)]

        model, optimizer = build(style)
        bare = getattr(model, "module", model).state_dict()
        tensors = {name: torch.zeros_like(value) for name, value in bare.items()}
        opened.restore({"model": tensors}, strict=False)
        moved = {f"model.{name}": gathered(value) for name, value in tensors.items()}
        wanted = {name: value for name, value in expected.items() if name.startswith("model.")}
        wrong += [f"as a dict: {name}" for name in unlike(moved, wanted)]
    return wrong


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# -------------------------------------------------------------------------------- one rank's own values


def save_own(root: Path) -> None:
    """Values of each rank's own, of several kinds, beside one that all have alike."""
    generator = torch.Generator().manual_seed(rank())
    state = {
        "w": truth((3,)),
        "own": PerRank({"position": 10 * rank(), "seen": torch.full((rank() + 1,), float(rank()))}),
        "generator": PerRank(generator),
        "deep": {"inner": [PerRank(f"rank {rank()}"), 5]},
    }
    with checkpointer(root) as opened:
        opened.save(1, state).result(timeout_s=TIMEOUT_S)


def load_own(root: Path) -> Any:
    """What comes back, into a template and without one."""
    generator = torch.Generator().manual_seed(1000 + rank())
    state = {
        "w": torch.zeros(3),
        "own": PerRank({"position": -1, "seen": torch.full((rank() + 1,), -1.0)}),
        "generator": PerRank(generator),
        "deep": {"inner": [PerRank("the caller's"), 0]},
    }
    with checkpointer(root) as opened:
        restored = opened.restore(state)
        bare = opened.restore()
    own = restored.state["own"]
    return {
        "position": own["position"],
        "seen": own["seen"].tolist(),
        "seed": next(seed for seed in (rank(), 1000 + rank()) if same_generator(generator, seed)),
        "deep": restored.state["deep"]["inner"],
        "missing": sorted(restored.missing),
        "bare": bare.state["own"] and bare.state["own"]["position"],
        "bare missing": sorted(bare.missing),
        "w": same(state["w"], truth((3,))),
    }


def load_with_a_stand_in(root: Path) -> Any:
    """What comes back, into a template and without one, where rank 0 stands in for ranks that were not."""
    generator = torch.Generator().manual_seed(1000 + rank())
    state = {"own": PerRank({"position": -1, "seen": torch.zeros(1)}), "generator": PerRank(generator)}
    with checkpointer(root) as opened:
        bare = opened.restore(stand_in=0)
        restored = opened.restore(state, only=["generator", "own.position"], stand_in=0)
    return {
        "position": restored.state["own"]["position"],
        "seed": next(seed for seed in (0, 1, 1000 + rank()) if same_generator(generator, seed)),
        "bare": (
            bare.state["own"]["position"],
            bare.state["own"]["seen"].tolist(),
            bare.state["deep"]["inner"],
        ),
        "missing": sorted(bare.missing),
    }


def same_generator(generator: torch.Generator, seed: int) -> bool:
    return torch.equal(generator.get_state(), torch.Generator().manual_seed(seed).get_state())


# --------------------------------------------------------------------------------------- FSDP2's habits


def save_after_looking(root: Path) -> list[str]:
    """Save between a look at the loss and the next step, when FSDP2 has whole parameters in place."""
    model, optimizer = build("fsdp")
    train(model, optimizer, range(2))
    model.eval()
    with torch.no_grad():
        model(torch.randn(2, 6))
    with checkpointer(root) as opened:
        opened.save(2, {"optimizer": optimizer, "model": model}).result(timeout_s=TIMEOUT_S)
    wrong = [f"saved: {name}" for name in load_whole_model(root)]
    # And so on the way back.
    model, optimizer = build("fsdp")
    model.eval()
    with torch.no_grad():
        model(torch.randn(2, 6))
    with checkpointer(root) as opened:
        opened.restore({"optimizer": optimizer, "model": model})
    wrong += [f"restored: {name}" for name in unlike(everything(model, optimizer), truth_after(2))]
    with torch.no_grad():
        loss = model(torch.ones(2, 6))
    plain, adam = build("plain")
    train(plain, adam, range(2))
    plain.eval()
    with torch.no_grad():
        expected = plain(torch.ones(2, 6))
    return wrong if torch.equal(loss, expected) else [*wrong, "its output"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


def move_tied(root: Path) -> list[str]:
    """Save a model with tied weights that FSDP2 has sharded; restore it sharded and plain."""
    model = Tied()
    expected = model.embedding.weight.detach().clone()
    fully_shard(model, mesh=mesh_of((4,)))
    wrong = []
    with checkpointer(root) as opened:
        opened.save(1, {"model": model}).result(timeout_s=TIMEOUT_S)
        for turn, sharded in enumerate((True, False)):
            other = Tied()
            with torch.no_grad():
                other.embedding.weight.zero_()
            if sharded:
                fully_shard(other, mesh=mesh_of((4,)))
            opened.restore({"model": other})
            weights = other.embedding.weight, other.head.weight
            if not all(torch.equal(gathered(weight), expected) for weight in weights):
                wrong.append(f"turn {turn}")
    return wrong


def save_sharded_tensor(root: Path) -> list[str]:
    """torch's older `ShardedTensor`, there and back, also into other layouts."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ShardMetadata

    whole = truth((7, 2))
    bounds = [0, 3, 4, 4, 7]

    def made(values: torch.Tensor) -> Any:
        start, end = bounds[rank()], bounds[rank() + 1]
        shards = []
        if end > start:
            metadata = ShardMetadata([start, 0], [end - start, 2], f"rank:{rank()}/cpu")
            shards = [sharded_tensor.Shard(values[start:end].clone(), metadata)]
        return sharded_tensor.init_from_local_shards(shards, 7, 2)

    saved = made(whole)
    wrong = []
    with checkpointer(root) as opened:
        opened.save(1, {"w": saved}).result(timeout_s=TIMEOUT_S)
        if not same(opened.restore().state["w"], whole):
            wrong.append("without a template")
        for name, layout in {"plain": PLAIN, "rows": ROWS, "columns": Layout((4,), "1")}.items():
            target = layout.lay(torch.zeros_like(whole))
            opened.restore({"w": target})
            if not same(target, layout.lay(whole)):
                wrong.append(name)
        target = made(torch.zeros_like(whole))
        opened.restore({"w": target})
        found = b"".join(raw(shard.tensor) for shard in target.local_shards())
        if found != b"".join(raw(shard.tensor) for shard in saved.local_shards()):
            wrong.append("as it was")
    return wrong


def save_own_shard(root: Path) -> tuple[str, str]:
    """A distributed tensor that is marked as one rank's own."""
    with checkpointer(root) as opened:
        return refusal(
            lambda: opened.save(1, {"w": PerRank(ROWS.lay(truth((8, 2))))}).result(timeout_s=TIMEOUT_S)
        )


# ------------------------------------------------------------------------------------ exact resumption


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A digest of this rank's part of everything."""
    values = [*model.state_dict().values()]
    for state in optimizer.state.values():
        values.extend(state.values())
    return hashlib.sha256(b"".join(map(raw, values))).hexdigest()


def run_through(roots: Mapping[str, Path], save_at: int, end: int) -> dict[str, str]:
    """In each style train, save on the way, and train on while that is written; digests of the ends."""
    ends = {}
    for style, root in roots.items():
        model, optimizer = build(style, dropout=0.3)
        torch.manual_seed(50 + rank())
        with checkpointer(root) as opened:
            train(model, optimizer, range(save_at), own_data=True)
            rng = PerRank(torch.get_rng_state())
            opened.save(save_at, {"model": model, "optimizer": optimizer, "rng": rng})
            train(model, optimizer, range(save_at, end), own_data=True)
        ends[style] = digest_of(model, optimizer)
    return ends


def resume(roots: Mapping[str, Path], end: int) -> dict[str, str]:
    """In each style restore and train to the end; digests of it."""
    ends = {}
    for style, root in roots.items():
        model, optimizer = build(style, dropout=0.3)
        state = {"model": model, "optimizer": optimizer, "rng": PerRank(torch.get_rng_state())}
        with checkpointer(root) as opened:
            restored = opened.restore(state)
        torch.set_rng_state(restored.state["rng"])
        train(model, optimizer, range(restored.step, end), own_data=True)
        ends[style] = digest_of(model, optimizer)
    return ends


# ------------------------------------------------------------------------------------- random layouts


def run_cases(root: Path, cases: Sequence[Any]) -> list[str]:
    """Save each case's tensors in its layouts and restore them in others; what is not the truth."""
    wrong = []
    for number, (tensors, before, afters) in enumerate(cases):
        wholes = {name: truth(*described, seed=number) for name, described in tensors.items()}
        with checkpointer(root / str(number)) as opened:
            state = {name: before[name].lay(whole) for name, whole in wholes.items()}
            opened.save(1, state).result(timeout_s=TIMEOUT_S)
            for after in afters:
                found = {name: after[name].lay(torch.zeros_like(whole)) for name, whole in wholes.items()}
                opened.restore(found)
                wrong += [
                    f"case {number}, {name}: {before[name]} to {after[name]}"
                    for name, whole in wholes.items()
                    if not same(found[name], after[name].lay(whole))
                ]
    return wrong
