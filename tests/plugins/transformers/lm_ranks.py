"""What ranks run that train a small language model together, and the process that they are forked from."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch  # noqa: E402 - as below
from processes import FrontEndLauncher, rank, warnings_are_errors  # noqa: E402 - found by them
from small_lm import llama, lora_llama, losses_of, trainer  # noqa: E402 - as above
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402 - as above
from torch.distributed.fsdp import fully_shard  # noqa: E402 - as above
from torch.distributed.tensor import DTensor  # noqa: E402 - as above
from transformers import TrainerCallback  # noqa: E402 - as above

from strongroom import Checkpointer  # noqa: E402 - as above
from strongroom_transformers import SealedFolders, StrongroomCallback  # noqa: E402 - as above
from strongroom_transformers.peft import ModelWeights  # noqa: E402 - as above

__all__ = ["SIZE", "STEPS", "adapters", "folders", "launcher", "sharded_adapters"]

SIZE, STEPS = 32, 8
"""Samples, and steps that two ranks take for two epochs of them."""


def launcher() -> FrontEndLauncher:
    """Importing takes longer than all tests together: one for all of them."""
    preloaded = ("accelerate", "transformers", "transformers.trainer", "peft", "datasets", "small_lm")
    return FrontEndLauncher(preloaded=preloaded, prepare=_as_rank)


def adapters(folder: Path, root: Path | None, **given: Any) -> dict[str, Any]:
    """A LoRA run."""
    return _train(
        lora_llama(),
        folder,
        root,
        lambda made: StrongroomCallback(str(root)).attach(made),
        **given,
    )


def folders(folder: Path, root: Path | None, **given: Any) -> dict[str, Any]:
    """A run whose folders are sealed."""
    return _train(llama(), folder, root, lambda made: SealedFolders(str(root)).attach(made), **given)


def sharded_adapters(root: Path) -> dict[str, Any]:
    """A LoRA model under FSDP2, saved and restored into another one, without a Trainer: that wants a GPU."""
    weights, restored = ModelWeights(), ModelWeights()
    model, other = (_sharded(lora_llama()) for _ in range(2))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, weights.parts(model)).result()
        found = checkpointer.restore(restored.parts(other))
    assert found is not None
    restored.restored(other, found.state)
    return {
        "digest": weights.parts(model)["base"]["digest"],
        "whole": ModelWeights().parts(lora_llama())["base"]["digest"],
        "sharded": all(isinstance(one, DTensor) for one in other.parameters()),
        "same": all(
            torch.equal(one.to_local(), same.to_local())
            for one, same in zip(model.parameters(), other.parameters(), strict=True)
        ),
    }


def _sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _train(
    model: Any, folder: Path, root: Path | None, attach: Callable[[Any], Any], **given: Any
) -> dict[str, Any]:
    told = given.pop("signal_at", None)
    seen = _Seen(told)
    one = trainer(
        model,
        folder,
        attach=attach if root is not None else lambda made: None,
        size=SIZE,
        callbacks=[seen],
        **({"save_strategy": "no"} if root is None else {}),
        **{"draw_from": 7, **given},
    )
    one.train()
    weights = hashlib.sha256()
    for parameter in one.model.parameters():
        weights.update(parameter.detach().numpy().tobytes())
    return {"losses": losses_of(one), "weights": weights.hexdigest(), "trained": seen.steps}


class _Seen(TrainerCallback):  # type: ignore[misc]  # of a package without types here
    """Counts steps, and tells rank 1 to stop in the middle of one."""

    def __init__(self, told: int | None) -> None:
        self._told = told
        self.steps = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._told == state.global_step and rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1


def _as_rank() -> None:
    warnings_are_errors(["ignore:.*is_gradient_checkpointing. is deprecated:FutureWarning"])
    os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
