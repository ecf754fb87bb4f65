"""A language model of a few thousand weights, made without a download, and runs of it under a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

__all__ = [
    "STEPS",
    "StopAt",
    "arguments",
    "llama",
    "lora",
    "lora_llama",
    "losses_of",
    "texts",
    "trainable",
    "trainer",
]

STEPS = 8
"""Of a whole run: 2 epochs of 4 batches."""


def llama(seed: int = 0) -> LlamaForCausalLM:
    """The base; another seed is another base."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


def lora(**changes: Any) -> LoraConfig:
    given = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.3, "target_modules": ["q_proj", "v_proj"]}
    return LoraConfig(**{**given, **changes}, task_type="CAUSAL_LM")


def lora_llama(seed: int = 0, **changes: Any) -> Any:
    """The adapters are drawn alike, whatever the base."""
    base = llama(seed)
    torch.manual_seed(5)
    return get_peft_model(base, lora(**changes))


def texts(size: int = 16) -> Dataset:
    """An Arrow table in memory, as `datasets` makes it."""
    drawn = torch.randint(0, 32, (size, 8), generator=torch.Generator().manual_seed(0)).tolist()
    return Dataset.from_dict({"input_ids": drawn, "labels": drawn})


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    given = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": 1,
        "logging_steps": 1,
        "seed": 7,
    }
    return TrainingArguments(output_dir=str(folder), **{**given, **changes})


class StopAt(TrainerCallback):  # type: ignore[misc]  # of a package without types here
    """Raises in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise ZeroDivisionError("the test's own")


def trainer(
    model: Any,
    folder: Path,
    *,
    attach: Callable[[Any], Any] = lambda made: None,
    stops_at: int | None = None,
    draw_from: int = 7,
    kind: type = Trainer,
    callbacks: list[Any] | None = None,
    eval_dataset: Any = None,
    size: int = 16,
    **changes: Any,
) -> Any:
    """A Trainer of this model; ``draw_from`` is where the random streams stand when it begins to train."""
    made = kind(
        model=model,
        args=arguments(folder, **changes),
        train_dataset=texts(size),
        eval_dataset=eval_dataset,
        callbacks=[*(callbacks or []), *([] if stops_at is None else [StopAt(stops_at)])],
    )
    attach(made)
    torch.manual_seed(draw_from)
    return made


def losses_of(one: Any) -> list[float]:
    return [entry["loss"] for entry in one.state.log_history if "loss" in entry]


def trainable(model: Any) -> dict[str, torch.Tensor]:
    """A copy of what trains."""
    return {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}


transformers.logging.set_verbosity_error()
