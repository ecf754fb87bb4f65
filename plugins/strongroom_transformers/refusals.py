"""Trainers that cannot be saved so, refused when they are attached, with what to do."""

from __future__ import annotations

from typing import Any

from strongroom.errors import ConfigError

__all__ = ["check_trainer"]


def check_trainer(trainer: Any) -> None:
    """Refuse a Trainer whose state is not where it could be saved from.

    Raises:
        ConfigError: says why, and what to do.
    """
    if trainer.is_deepspeed_enabled:
        raise ConfigError(
            "DeepSpeed keeps model and optimizer in its own engine, which only its own checkpoints hold; "
            "StrongroomCallback cannot stand in for them. Train with DDP or FSDP2; or let the Trainer save "
            "in its own way, and each of its folders be sealed: SealedFolders(root).attach(trainer)"
        )
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) == 1:
        raise ConfigError(
            "FSDP1 flattens the parameters, and its checkpoints are another kind of state; use FSDP2: "
            "TrainingArguments(fsdp_config={'fsdp_version': 2, ...}), or fsdp_version: 2 in Accelerate's "
            "configuration; or let the Trainer save in its own way, and each of its folders be sealed: "
            "SealedFolders(root).attach(trainer)"
        )
    if getattr(trainer, "is_fsdp_xla_enabled", False):
        raise ConfigError("training under XLA is not supported: nothing here was ever run on a TPU")
