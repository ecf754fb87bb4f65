"""Masks of a language model are drawn while batches are read, one batch ahead of training.

The Trainer itself takes up such a run with other masks; ours are those of the run that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from trained import BATCH_SIZE, BATCHES
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, PreTrainedTokenizerFast

tokenizers = pytest.importorskip("tokenizers")

WORDS = 40


class Texts(Dataset[dict[str, list[int]]]):
    """Texts of a few words."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        size = BATCHES * BATCH_SIZE
        words = torch.randint(5, WORDS, (size, 8), generator=generator).tolist()
        lengths = torch.randint(3, 9, (size,), generator=generator).tolist()
        self.texts = [some[:length] for some, length in zip(words, lengths, strict=True)]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.texts[index]}


class Masked(BertForMaskedLM):
    """A tiny BERT, with tied weights, that keeps what it was shown."""

    def __init__(self) -> None:
        super().__init__(
            BertConfig(
                vocab_size=WORDS,
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=16,
                max_position_embeddings=16,
            )
        )
        self.losses: list[float] = []
        self.shown: list[list[int]] = []

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        found = super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        if self.training:
            self.shown.append(input_ids.flatten().tolist())
            self.losses.append(found.loss.item())
        return found


def _collator() -> DataCollatorForLanguageModeling:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = {name: number for number, name in enumerate([*special, *(f"w{n}" for n in range(WORDS - 5))])}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")  # noqa: S106 - no password
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model),
        pad_token="[PAD]",  # noqa: S106 - as above
        mask_token="[MASK]",  # noqa: S106 - as above
        unk_token="[UNK]",  # noqa: S106 - as above
    )
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4)


def _settings() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"model": Masked(), "data": Texts(), "more": {"data_collator": _collator()}}


def test_batches_of_like_lengths(train: Callable[..., Any]) -> None:
    """Their order is drawn from the global stream when an epoch is begun."""
    grouped = {"train_sampling_strategy": "group_by_length"}
    reference = train(root=None, **_settings(), **grouped)
    for done in (4, 8):
        train(until=done, resume=done == 8, **_settings(), **grouped)
    resumed = train(seed=5, **_settings(), **grouped)
    assert resumed.model.shown == reference.model.shown[8:]
    assert resumed.losses == reference.losses[8:]


def test_masks_are_those_of_the_uninterrupted_run_and_the_trainers_own_are_not(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    reference = train(root=None, **_settings())
    shown = reference.model.shown

    train(until=4, **_settings())
    ours = train(seed=5, **_settings())
    assert ours.model.shown == shown[4:]
    assert ours.losses == reference.losses[4:]

    train(root=None, until=4, **_settings())
    folder = str(tmp_path / "trainer" / "checkpoint-4")
    native = train(root=None, seed=5, resume=folder, **_settings())
    assert len(native.model.shown) == len(shown[4:])
    assert native.model.shown != shown[4:]
    assert native.model.shown[1:] != shown[5:]
