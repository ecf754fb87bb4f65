"""Models and optimizers under the ways to spread them over ranks; importable by name, as ranks need it."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.distributed as dist
from layout_jobs import TIMEOUT_S, checkpointer, mesh_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STYLES = ("plain", "ddp", "fsdp", "hsdp", "tp", "fsdp x tp")
EXACT = frozenset({"plain", "ddp", "fsdp", "hsdp"})
"""Styles in which every rank does the plain model's arithmetic, where ranks are a power of two."""


class Net(nn.Module):
    """Uneven layers, one that is frozen, a parameter without any gradient, and a buffer that counts."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 7)
        self.frozen = nn.Linear(7, 5).requires_grad_(False)
        self.norm = nn.LayerNorm(5)
        self.unused = nn.Parameter(torch.randn(3, 2))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(batch)
        hidden = self.dropout(torch.relu(self.first(batch)))
        return self.norm(self.frozen(self.second(hidden))).square().mean()


@functools.cache
def grid(outer: str, inner: str) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=(outer, inner))


def build(style: str, dropout: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model in some style, with an optimizer that has no state yet."""
    model: nn.Module = Net(dropout)
    world = dist.get_world_size()
    line = mesh_of((world,))
    if "tp" in style:
        mesh = grid("dp", "tp")["tp"] if style == "fsdp x tp" else line
        parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    if "fsdp" in style or style == "hsdp":
        mesh = (
            line if style == "fsdp" else grid("dp", "tp")["dp"] if "tp" in style else grid("copies", "shards")
        )
        for part in (model.first, model.second, model.frozen, model):
            fully_shard(part, mesh=mesh)
    bare = model
    if style == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    biases = [parameter for name, parameter in bare.named_parameters() if name.endswith("bias")]
    others = [parameter for name, parameter in bare.named_parameters() if not name.endswith("bias")]
    groups = [{"params": others}, {"params": biases, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *, own_data: bool = False
) -> None:
    """Some steps, on data that all ranks have alike unless each is to have its own."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if own_data else 0))
        model(torch.randn(4, 6, generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()


def can_train() -> str | None:
    """Why this torch cannot train what ``fully_shard`` has sharded over gloo; None: it can."""
    for style in ("fsdp", "hsdp", "fsdp x tp"):
        try:
            train(*build(style), range(1))
        except (AttributeError, RuntimeError) as error:
            return f"{style}: {str(error).splitlines()[0]}"
    return None


@functools.cache
def truth_after(steps: int) -> dict[str, torch.Tensor]:
    """Everything of a plain model that was trained so long, by name."""
    model, optimizer = build("plain")
    train(model, optimizer, range(steps))
    return everything(model, optimizer)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of a model and its optimizer, whole, by name; for all ranks that share them."""
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    found = {f"model.{name}": whole(tensor) for name, tensor in bare.state_dict().items()}
    for name, parameter in bare.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{key} of {name}"] = whole(value)
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def unlike(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, is_exact: bool = True
) -> list[str]:
    """Names of what one side lacks, or holds with another value."""
    wrong = sorted(found.keys() ^ expected.keys())
    for name in found.keys() & expected.keys():
        one, other = found[name], expected[name]
        is_same = torch.equal(one, other) if is_exact else torch.allclose(one, other, atol=1e-5)
        if one.dtype != other.dtype or one.shape != other.shape or not is_same:
            wrong.append(name)
    return wrong


def save_truth(root: Path, steps: int = 2) -> None:
    """A checkpoint of the plain model, by whoever calls this alone."""
    model, optimizer = build("plain")
    train(model, optimizer, range(steps))
    with checkpointer(root) as opened:
        opened.save(steps, {"model": model, "optimizer": optimizer}).result(timeout_s=TIMEOUT_S)


def pass_on(source: Path, target: Path, style: str, step: int, *, more: int = 0) -> list[str]:
    """Restore in a style, hold it against the plain run's, train on, and save; what is wrong on the way."""
    model, optimizer = build(style)
    state = {"model": model, "optimizer": optimizer}
    with checkpointer(source) as opened:
        restored = opened.restore(state)
    wrong = [f"restored: {name}" for name in unlike(everything(model, optimizer), truth_after(restored.step))]
    if more:
        train(model, optimizer, range(restored.step, restored.step + more))
        trained = everything(model, optimizer)
        expected = truth_after(restored.step + more)
        wrong += [f"trained: {name}" for name in unlike(trained, expected, is_exact=style in EXACT)]
    with checkpointer(target) as opened:
        opened.save(step, state).result(timeout_s=TIMEOUT_S)
    return wrong


def restore_everywhere(root: Path, styles: tuple[str, ...], steps: int = 2) -> list[str]:
    """Restore in each style, into models with and without optimizer state; what is not the plain run's."""
    wrong = []
    with checkpointer(root) as opened:
        for style in styles:
            model, optimizer = build(style)
            for turn in ("new", "trained"):
                opened.restore({"model": model, "optimizer": optimizer})
                names = unlike(everything(model, optimizer), truth_after(steps))
                wrong += [f"{style}, {turn}: {name}" for name in names]
                train(model, optimizer, range(1))
    return wrong
