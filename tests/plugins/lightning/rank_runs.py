"""Small runs for several ranks, importable by name; what they return can be compared as floats."""

from __future__ import annotations

import logging
import os
import runpy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning
import lightning_ranks
import torch
import torch.distributed as dist
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from samples import Numbers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset

from strongroom_lightning import StrongroomCheckpoint

__all__ = [
    "Apart",
    "Numbers",
    "RankNet",
    "ShardedNet",
    "Stop",
    "StoppedError",
    "rank_by",
    "sharded",
    "train",
    "whole",
]


class StoppedError(Exception):
    """What ends a run in the middle, on every rank."""


class RankNet(lightning.LightningModule):
    """Dropout that differs by rank, a scheduler, losses of each rank's own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, width), nn.Dropout(0.3), nn.ReLU(), nn.Linear(width, 3))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ShardedNet(RankNet):
    """The same, sharded by ``fully_shard``, or by tensor parallelism, or both; born on the meta device."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.net = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        with torch.device("meta"):
            self.net = nn.Sequential(
                nn.Linear(6, self.hparams.width),
                nn.Dropout(0.3),
                nn.ReLU(),
                nn.Linear(self.hparams.width, 3),
            )
        tensor, data = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        if tensor.size() > 1:
            parallelize_module(self.net, tensor, {"0": ColwiseParallel(), "3": RowwiseParallel()})
        if data.size() > 1:
            for part in (self.net[0], self.net[3], self.net):
                fully_shard(part, mesh=data)


def sharded(data: int = 2, tensor: int = 1, *, distributed: bool = True) -> Any:
    """Lightning's strategy for so many shards."""
    return ModelParallelStrategy(data, tensor, save_distributed_checkpoint=distributed)


class Stop(Callback):
    """Ends the run before a given batch, counted from 0 over the whole run.

    Args:
        before_batch: which.
        how: called then; raises `StoppedError` unless told otherwise.
        ranks: on which ranks; None: on all.
    """

    def __init__(
        self, before_batch: int, how: Callable[[], None] | None = None, ranks: Sequence[int] | None = None
    ) -> None:
        self.before_batch, self.how, self.ranks = before_batch, how, ranks

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx != self.before_batch:
            return
        if self.ranks is not None and trainer.global_rank not in self.ranks:
            return
        if self.how is not None:
            self.how()
        raise StoppedError


def train(
    root: Path | None,
    *,
    draw_from: int = 7,
    until: int | None = None,
    how: Callable[[], None] | None = None,
    stop_ranks: Sequence[int] | None = None,
    strategy: Any = "ddp",
    module: Callable[[], lightning.LightningModule] = RankNet,
    loader: Callable[[], Any] | None = None,
    batches: int = 6,
    validate: bool = False,
    checkpoint: dict[str, Any] | None = None,
    callbacks: Sequence[Callable[[], Callback]] = (),
    ckpt_path: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train a fresh module on every rank; 2 epochs of ``batches`` unless told otherwise.

    Args:
        root: where to save; None trains without our callback.
        draw_from: what each rank's generator is seeded with after the model was made.
        until: break off before this batch, counted over the whole run; ``how`` and ``stop_ranks`` as `Stop`.
        strategy: Lightning's, or what makes one.
        checkpoint: arguments of `StrongroomCheckpoint`; it saves at every step unless told otherwise.
        settings: arguments of the Trainer.

    Returns:
        ``losses`` of this rank, ``weights`` whole (as they are on every rank), ``step``, and
        ``lr``; ``stopped`` where `StoppedError` ended it.
    """
    # The order of a distributed sampler goes by this seed, as does the model's beginning.
    lightning.seed_everything(7, verbose=False)
    net = module()
    # From here on the ranks draw apart, and a process that resumes from where it happens to stand.
    torch.manual_seed(1000 * draw_from + lightning_ranks.rank())
    everyone: list[Callback] = [make() for make in callbacks]
    if root is not None:
        everyone.insert(0, StrongroomCheckpoint(root, **(checkpoint or {"every_n_train_steps": 1})))
    if until is not None:
        everyone.append(Stop(until, how, stop_ranks))
    ranks = lightning_ranks.world_size()
    trainer = lightning.Trainer(
        devices=ranks,
        strategy=strategy() if callable(strategy) else strategy,
        callbacks=everyone,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=root is not None,
        **{"accelerator": "cpu", "max_epochs": 2, **settings},
    )
    data = loader() if loader is not None else DataLoader(Numbers(4 * batches * ranks), 4, shuffle=True)
    validation = DataLoader(Numbers(4 * ranks), batch_size=4) if validate else None
    stopped = False
    try:
        trainer.fit(net, data, validation, ckpt_path=ckpt_path)
    except StoppedError:
        stopped = True
    return {
        "losses": net.losses,
        "weights": whole(net),
        "moments": moments(trainer, net),
        "step": trainer.global_step,
        "lr": float(trainer.optimizers[0].param_groups[0]["lr"]) if trainer.optimizers else None,
        "stopped": stopped,
    }


def whole(module: nn.Module) -> dict[str, list[float]]:
    """Every tensor of a module, gathered where it is distributed; floats, since these cross processes."""
    found = {}
    for name, value in module.state_dict().items():
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name] = full.double().flatten().tolist()
    return found


def moments(trainer: Any, module: nn.Module) -> dict[str, list[float]]:
    """What the optimizer keeps of every parameter, gathered likewise."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = {}
    for parameter, state in trainer.optimizers[0].state.items() if trainer.optimizers else ():
        for key, value in state.items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{names[parameter]} {key}"] = full.double().flatten().tolist()
    return found


class StopAtStart(Callback):
    """Ends the run when all was restored and nothing trained."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        raise StoppedError


class Thaw(Callback):
    """Freezes a weight in every other epoch, in a hook that a resume inside an epoch does not run again."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[0].weight.requires_grad_(trainer.current_epoch % 2 == 1)


class OwnCount(Callback):
    """A state that differs by rank: what each has seen, and one key that rank 0 has alone."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.seen["mean"] = self.seen.get("mean", torch.zeros(())) + outputs["loss"].detach()
        self.seen["text"] = f"rank {trainer.global_rank}"
        if trainer.is_global_zero:
            self.seen["first"] = torch.ones(2)
        pl_module.told = {key: str(value) for key, value in self.seen.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "alike": 5}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def count(root: Path | None, **options: Any) -> dict[str, str]:
    """What `OwnCount` came to on this rank."""
    kept: list[RankNet] = []

    def module() -> RankNet:
        kept.append(RankNet())
        return kept[0]

    train(root, module=module, callbacks=[OwnCount], **options)
    told: dict[str, str] = kept[0].told
    return told


class Indices(Dataset[torch.Tensor]):
    """Samples that are known by their numbers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Reader(lightning.LightningModule):
    """Remembers the samples that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.losses: list[float] = []
        self.read: list[int] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.read += [int(one) for one in batch]
        return self.net(batch / 100).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def read(root: Path, batch_size: int, **options: Any) -> list[int]:
    """The samples that this rank was trained on, in one epoch of 48."""
    kept: list[Reader] = []

    def module() -> Reader:
        kept.append(Reader())
        return kept[0]

    def loader() -> Any:
        return DataLoader(Indices(48), batch_size, shuffle=True)

    reader = {"module": module, "loader": loader, "max_epochs": 1}
    kept.clear()
    train(root, **{**reader, **options})
    return kept[0].read


def told_of(root: Path, **options: Any) -> list[str]:
    """What a run has said of itself on this rank."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("lightning.pytorch")
    logger.setLevel(logging.INFO)
    logger.addHandler(Listener())
    train(root, **options)
    return [line for line in lines if line.startswith("Strongroom")]


def example(script: Path, root: Path, steps: int) -> str:
    """What an example's ``main`` returns."""
    warnings.simplefilter("ignore")  # as people run it
    found: str = runpy.run_path(str(script))["main"](str(root), steps)
    return found


class Hooked(ShardedNet):
    """Looks at what Lightning's hooks are shown of a sharded model."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        (optimizer,) = checkpoint["optimizer_states"]
        self.shown = {
            "weights": sorted(checkpoint["state_dict"]),
            "kinds": sorted({type(value).__name__ for value in checkpoint["state_dict"].values()}),
            "state": sorted(optimizer["state"]),
            "params": optimizer["param_groups"][0]["params"],
        }
        checkpoint["mine"] = {"rank": self.global_rank}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = {"mine": checkpoint["mine"], "weights": sorted(checkpoint["state_dict"])}


def hooked(root: Path, **options: Any) -> dict[str, Any]:
    """What `Hooked` has seen."""
    kept: list[Hooked] = []

    def module() -> Hooked:
        kept.append(Hooked())
        return kept[0]

    train(root, module=module, **options)
    return {"shown": getattr(kept[0], "shown", None), "loaded": getattr(kept[0], "loaded", None)}


class Raising(RankNet):
    """A hook that fails on one rank, once the first checkpoint stands."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.global_step == 2 and self.global_rank == 1:
            raise ValueError("no state from here")


def train_over_nccl(port: int, root: Path | None, **options: Any) -> dict[str, Any]:
    """`train` on a GPU a rank, in a group that Lightning makes."""
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    found = train(root, accelerator="cuda", **options)
    assert dist.get_backend() == "nccl"
    return found


class Apart(RankNet):
    """A metric that each rank sees otherwise, so that each alone would call another checkpoint the best."""

    def on_validation_epoch_end(self) -> None:
        sign = 1 if self.trainer.global_rank == 0 else -1
        score = sign * [0.5, 0.2, 0.3][min(self.trainer.current_epoch, 2)]
        self.log("apart", score, sync_dist=False, rank_zero_only=False)
        if self.trainer.is_global_zero:
            self.log("of_one", score, rank_zero_only=True)


def rank_by(root: Path, monitor: str, **checkpoint: Any) -> dict[str, Any]:
    """Train 3 epochs, ranked; what each rank then says of it, and the weights that ``"best"`` gives it."""
    lightning.seed_everything(7, verbose=False)
    ranks = lightning_ranks.world_size()
    ours = StrongroomCheckpoint(root, monitor=monitor, **checkpoint)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp",
        callbacks=[ours],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=3,
        num_sanity_val_steps=0,
    )
    net, data = Apart(), DataLoader(Numbers(4 * 2 * ranks), 4)
    # Lightning would have metrics reduced, and evaluation without a sampler that fills up.
    warnings.simplefilter("ignore", PossibleUserWarning)
    trainer.fit(net, data, data)
    told = {
        "best": ours.best_model_path,
        "scores": [score.item() for score in ours.best_k_models.values()],
        "last": ours.last_model_path,
    }
    trainer.validate(net, data, ckpt_path="best", verbose=False)
    return {**told, "weights": whole(net)}


class DyingAt(RankNet):
    """Rank 1 is killed in a hook of its module, at the second checkpoint or the fifth batch."""

    place = ""

    def on_train_batch_start(self, *args: Any) -> None:
        if self.place == "on_train_batch_start" and self.trainer.fit_loop.total_batch_idx == 4:
            self._die()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.place == "on_save_checkpoint" and self.trainer.global_step == 2:
            self._die()

    def _die(self) -> None:
        if self.trainer.global_rank == 1:
            lightning_ranks.die()


def die_at(root: Path, place: str) -> None:
    """A run of which rank 1 is killed, saved at every step."""
    DyingAt.place = place
    train(root, module=DyingAt)
