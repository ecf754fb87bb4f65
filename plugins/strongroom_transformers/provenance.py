"""What a Trainer knows of where its run comes from."""

from __future__ import annotations

from typing import Any, Final

from strongroom.resume import described

__all__ = ["known_of"]

_DECISIVE: Final = (
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "bf16",
    "data_seed",
    "fp16",
    "gradient_accumulation_steps",
    "label_smoothing_factor",
    "learning_rate",
    "lr_scheduler_type",
    "max_grad_norm",
    "max_steps",
    "num_train_epochs",
    "optim",
    "per_device_train_batch_size",
    "seed",
    "warmup_steps",
    "weight_decay",
)
"""Of some hundred TrainingArguments: those that decide what is trained."""


def known_of(trainer: Any) -> dict[str, Any]:
    """Hyper-parameters and the model's kind, as provenance has them."""
    args = trainer.args
    given = {name: getattr(args, name) for name in _DECISIVE if hasattr(args, name)}
    plain = {
        name: str(getattr(value, "value", value)) if hasattr(value, "value") else value
        for name, value in given.items()
    }
    return {"hyper_parameters": described(plain)}
