"""How the Hugging Face Trainer trains a `RunPlan`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from processes import rank, world_size
from run_plans import (
    BATCH_SIZE,
    BATCHES,
    EPOCHS,
    INTERRUPTIONS,
    LOADERS,
    FrontEnd,
    Numbers,
    RunPlan,
    RunResult,
    classifier,
    digest_of,
)
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from strongroom_transformers import StrongroomCallback

__all__ = ["FRONT_END"]

_WAYS = {"one process": (1, 1), "DDP": (2, 2), "FSDP2": (2, 2)}


class Classifier(nn.Module):
    """The model in the Trainer's form, which does to this process what the plan says at its moment."""

    def __init__(self, plan: RunPlan) -> None:
        super().__init__()
        self.net = classifier()
        self.losses: list[float] = []
        self.batches = 0  # of the whole run
        self._interruption = None if plan.interruption is None else INTERRUPTIONS[plan.interruption]

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        one = self._interruption
        if one is not None and one.strikes(
            self.batches, rank(), world_size(), in_validation=not self.training
        ):
            one.act()
        found = self.net(x)
        loss = nn.functional.cross_entropy(found, labels)
        if self.training:
            self.batches += 1
            self.losses.append(loss.item())
        return {"loss": loss, "logits": found}


class Counted(TrainerCallback):
    """Tells the model how far the run was when it was resumed."""

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.batches = state.global_step * self.accumulate


class Told(TrainerCallback):
    """A tracker that keeps the names of the figures that it is told."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.names.update(logs)


class Streamed(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """A stream that all ranks have, and each is dealt a share of, shuffled from a generator of its own."""

    def __init__(self, shares: int) -> None:
        self.size = BATCH_SIZE * BATCHES * shares
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index in torch.randperm(self.size, generator=self.generator).tolist():
            yield torch.randn(6, generator=self.generator), torch.tensor(index % 3)


class Grouped(Trainer):
    """A Trainer whose training batches are sampled in its user's own way."""

    def get_train_dataloader(self) -> Any:
        loader = LOADERS["custom batch sampler"](self.args.world_size)
        loader.collate_fn = collated
        return self.accelerator.prepare(loader)


def collated(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    x, y = zip(*samples, strict=True)
    return {"x": torch.stack(x), "labels": torch.stack(y)}


def shard(trainer: Trainer) -> None:
    """Let the Trainer shard by FSDP2 on CPUs, where Accelerate would not."""
    state = trainer.accelerator.state
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap",
        min_num_params=1,
        cpu_ram_efficient_loading=False,
    )
    trainer.is_fsdp_enabled = True


def prepare() -> None:
    # A rank's own way of starting processes is a forkserver, from which a worker would not see the rank die.
    worker.MP_STATUS_CHECK_INTERVAL = 0.5
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Accelerate asks for it, although the group is there already.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    transformers.logging.set_verbosity_warning()
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)


def train(plan: RunPlan) -> RunResult:
    _, shares = _WAYS[plan.way]
    torch.manual_seed(7)
    model = Classifier(plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    told = Told()
    is_stream = plan.loader == "`IterableDataset`"
    with_worker = plan.loader.endswith("a worker")
    args = TrainingArguments(
        output_dir="trainer",
        per_device_train_batch_size=BATCH_SIZE,
        per_device_eval_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=plan.accumulate,
        num_train_epochs=EPOCHS,
        max_steps=EPOCHS * BATCHES // plan.accumulate if is_stream else -1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        eval_strategy="steps" if plan.validates else "no",
        eval_steps=2,
        save_strategy="no" if plan.root is None else "steps",
        save_steps=plan.every_n_steps,
        dataloader_num_workers=int(with_worker),
        dataloader_multiprocessing_context="fork" if with_worker else None,
        accelerator_config={"dispatch_batches": False},
        # The order of a divided epoch goes by it, and ranks' random streams stand at different places here.
        data_seed=7,
        seed=7,
    )
    trainer = (Grouped if plan.loader == "custom batch sampler" else Trainer)(
        model=model,
        args=args,
        data_collator=collated,
        train_dataset=Streamed(shares) if is_stream else Numbers(BATCH_SIZE * BATCHES * shares),
        eval_dataset=Numbers(BATCH_SIZE * world_size()) if plan.validates else None,
        callbacks=[told, Counted(plan.accumulate)],
        optimizers=(optimizer, scheduler),
    )
    trainer.remove_callback(PrinterCallback)
    if plan.way == "FSDP2":
        shard(trainer)
    if plan.root is not None:
        StrongroomCallback(plan.root, **plan.options).attach(trainer)
    torch.manual_seed(1000 * plan.draw_from + rank())
    trainer.train()
    if plan.way == "FSDP2":
        assert all(isinstance(one, DTensor) for one in model.parameters())
    return RunResult(
        losses=model.losses,
        weights=digest_of(model.net),
        step=trainer.state.global_step,
        lr=float(optimizer.param_groups[0]["lr"]),
        figures=sorted(told.names),
    )


def unsupported() -> None:
    """As a transformers that has renamed a method which nothing but a resume inside an epoch calls."""
    del Trainer._load_rng_state


FRONT_END = FrontEnd(
    name="Hugging Face Trainer",
    package="transformers",
    preloaded=("transformers.trainer", "accelerate", "strongroom_transformers.callback"),
    prepare=prepare,
    ways=_WAYS,
    train=train,
    loaders=("`DataLoader`", "`DataLoader`, a worker", "custom batch sampler", "`IterableDataset`"),
    unsupported=unsupported,
)
