"""TRL's Trainers are Trainers: attached to one, the callback takes a run up exactly, LoRA or not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

pytest.importorskip("trl", reason="TRL is not installed")

sys.path.insert(0, str(Path(__file__).parent))

from small_lm import StopAt, llama, lora, losses_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from strongroom_transformers import StrongroomCallback

# TRL and PEFT ask a transformers model by the names that transformers 5.24 has renamed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing\\w*. is deprecated:FutureWarning"),
]

WORDS = 28
_SPECIAL = {"unk_token": "[UNK]", "pad_token": "[PAD]", "eos_token": "[EOS]"}


def tokenizer() -> PreTrainedTokenizerFast:
    known = {f"w{number}": number for number in range(WORDS)}
    known |= {word: WORDS + number for number, word in enumerate(_SPECIAL.values())}
    made = Tokenizer(WordLevel(known, unk_token=_SPECIAL["unk_token"]))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, **_SPECIAL)


def sentences(seed: int, words: int) -> list[str]:
    drawn = torch.randint(0, WORDS, (16, words), generator=torch.Generator().manual_seed(seed)).tolist()
    return [" ".join(f"w{number}" for number in one) for one in drawn]


def sft(folder: Path, **given: Any) -> Any:
    """Supervised fine-tuning of all weights."""
    data = Dataset.from_dict({"text": sentences(0, 6)})
    args = SFTConfig(output_dir=str(folder), max_length=8, **given)
    return SFTTrainer(model=llama(), args=args, train_dataset=data, processing_class=tokenizer())


def dpo(folder: Path, **given: Any) -> Any:
    """Preferences, by adapters that TRL puts on; the reference is the model without them."""
    data = Dataset.from_dict(
        {"prompt": sentences(1, 3), "chosen": sentences(2, 4), "rejected": sentences(3, 4)}
    )
    args = DPOConfig(output_dir=str(folder), max_length=12, **given)
    base = llama()
    torch.manual_seed(5)
    return DPOTrainer(
        model=base, args=args, train_dataset=data, processing_class=tokenizer(), peft_config=lora()
    )


def run(
    make: Any, folder: Path, root: Path | None, *, stops_at: int | None = None, draw_from: int = 7
) -> Any:
    made = make(
        folder,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        save_strategy="steps",
        save_steps=1 if root is not None else 1000,
        logging_steps=1,
        seed=7,
    )
    if root is None:
        made.args.save_strategy = "no"
    else:
        StrongroomCallback(root).attach(made)
    if stops_at is not None:
        made.add_callback(StopAt(stops_at))
    torch.manual_seed(draw_from)
    return made


@pytest.mark.parametrize(("make", "step"), ((sft, 3), (dpo, 5)), ids=("SFT", "DPO with LoRA"))
def test_a_run_is_taken_up_exactly(tmp_path: Path, make: Any, step: int) -> None:
    whole = run(make, tmp_path / "whole", None)
    whole.train()
    with pytest.raises(ZeroDivisionError):
        run(make, tmp_path / "out", tmp_path / "root", stops_at=step).train()
    resumed = run(make, tmp_path / "out", tmp_path / "root", draw_from=99)
    resumed.train()
    assert losses_of(resumed) == losses_of(whole)
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True)
    )
