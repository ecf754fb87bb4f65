"""Training data of `datasets`: Arrow tables in memory, transforms that draw, and streams that shuffle."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from small_lm import StopAt, arguments, llama, losses_of, texts
from transformers import Trainer

from strongroom_transformers import StrongroomCallback


def noisy(batch: dict[str, Any]) -> dict[str, Any]:
    """Replaces words while it reads, as augmentations do."""
    words = torch.tensor(batch["input_ids"])
    found = torch.where(torch.rand(words.shape) < 0.3, torch.randint(0, 32, words.shape), words)
    return {"input_ids": found.tolist(), "labels": batch["labels"]}


DATA: dict[str, Any] = {
    "a table": texts,
    "a table that draws": lambda: texts().with_transform(noisy),
    "a shuffled view": lambda: texts(24).shuffle(seed=3).select(range(16)),
    "a stream": lambda: texts().to_iterable_dataset(num_shards=2),
    "a stream that shuffles": lambda: texts().to_iterable_dataset().shuffle(seed=3, buffer_size=8),
    "a stream that draws": lambda: texts().to_iterable_dataset().map(noisy, batched=True, batch_size=2),
}


def run(
    kind: str, folder: Path, root: Path | None, *, stops_at: int | None = None, draw_from: int = 7
) -> Any:
    saving = {} if root is not None else {"save_strategy": "no"}
    made = Trainer(
        model=llama(),
        args=arguments(folder, max_steps=8, num_train_epochs=1, **saving),
        train_dataset=DATA[kind](),
        callbacks=[] if stops_at is None else [StopAt(stops_at)],
    )
    if root is not None:
        StrongroomCallback(root).attach(made)
    torch.manual_seed(draw_from)
    return made


@pytest.mark.parametrize(("kind", "step"), (*((kind, 6) for kind in DATA), ("a stream that shuffles", 3)))
def test_a_run_on_it_is_taken_up_exactly(tmp_path: Path, kind: str, step: int) -> None:
    whole = run(kind, tmp_path / "whole", None)
    whole.train()
    with pytest.raises(ZeroDivisionError):
        run(kind, tmp_path / "out", tmp_path / "root", stops_at=step).train()
    resumed = run(kind, tmp_path / "out", tmp_path / "root", draw_from=99)
    resumed.train()
    assert losses_of(resumed) == losses_of(whole)
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True)
    )
