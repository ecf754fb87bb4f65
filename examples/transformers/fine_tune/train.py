"""Fine-tune a tiny byte-level Llama on Python's own manual, by the Trainer of Hugging Face.

    python train.py runs/base --text source --out base     # first it learns source code
    python train.py runs/a --model base                    # then it is fine-tuned on prose
    python train.py a --model base --config strongroom.toml      # the same, sealed into a bucket

The program that one would write. It knows nothing of kills: whatever happens to it, it is started again by
the same command. What Strongroom adds is marked.
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.utils import logging

from strongroom_transformers import StrongroomCallback  # Strongroom

CONTEXT = 64  # bytes that the model sees at once
BATCH_SIZE = 8
ACCUMULATE = 2  # batches in one step of the optimizer
EPOCHS = 3


class Text(Dataset[dict[str, Tensor]]):
    """The beginning of a text, in pieces that are cropped at random."""

    def __init__(self, name: str, pieces: int) -> None:
        if name == "manual":
            source = "".join(topics.values()).encode()
        else:
            files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
            source = b"".join(file.read_bytes() for file in files)
        self.bytes = torch.frombuffer(bytearray(source[: (pieces + 1) * CONTEXT]), dtype=torch.uint8)
        self.pieces = pieces

    def __len__(self) -> int:
        return self.pieces

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * CONTEXT + int(torch.randint(CONTEXT, ()))
        piece = self.bytes[start : start + CONTEXT].long()
        return {"input_ids": piece, "labels": piece}


class Lines(TrainerCallback):
    """One line a step: two runs can be compared."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']!r}", flush=True)


def new_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        attention_dropout=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("root", help="the run's; with --config, below the platform's")
    parser.add_argument("--text", choices=("manual", "source"), default="manual")
    parser.add_argument("--model", help="a folder of a model to begin from")
    parser.add_argument("--out", help="a folder to write the model to")
    parser.add_argument("--steps", type=int, default=60, help="of the optimizer (%(default)s)")
    parser.add_argument("--config", help="a policy: sealing, signing, audit, the storage")
    options = parser.parse_args()

    set_seed(1)
    # How many threads share a sum decides the order of its additions, and so its last bits.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = new_model() if options.model is None else LlamaForCausalLM.from_pretrained(options.model)
    arguments = TrainingArguments(
        output_dir="trainer",
        use_cpu=True,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=ACCUMULATE,
        learning_rate=3e-3,
        warmup_steps=5,
        save_steps=5,
        save_total_limit=3,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        seed=1,
    )
    logging.set_verbosity_info()
    text = Text(options.text, options.steps // EPOCHS * ACCUMULATE * BATCH_SIZE)
    trainer = Trainer(model=model, args=arguments, train_dataset=text, callbacks=[Lines()])
    StrongroomCallback(options.root, config=options.config).attach(trainer)  # Strongroom: the one line
    trainer.train()

    if options.out is not None:
        model.save_pretrained(options.out)
    weights = model.state_dict().values()
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights))
    print("done; weights", digest.hexdigest()[:16])


if __name__ == "__main__":
    main()
