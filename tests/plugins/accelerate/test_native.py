"""Accelerate's own resume beside ours: order and noise are lost there, and are not here."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate_runs import BATCHES, BrokenOffError, Numbers, classifier, new_accelerator, train
from torch import nn
from torch.utils.data import DataLoader

AT = 3


def _native(
    folder: Path | None, *, seed: int, save_at: int | None = None
) -> tuple[list[list[float]], list[float]]:
    """As Accelerate's documentation has it: ``load_state``, ``skip_first_batches``; batches and losses."""
    accelerator = new_accelerator()
    torch.manual_seed(7)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = DataLoader(Numbers(4 * BATCHES), batch_size=4, shuffle=True)
    torch.manual_seed(seed)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    read: list[list[float]] = []
    losses: list[float] = []
    if folder is not None and save_at is None:
        accelerator.load_state(str(folder))
        data = accelerator.skip_first_batches(data, AT)
    for x, y in data:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        read.append(y.tolist())
        losses.append(loss.item())
        if save_at == len(losses):
            accelerator.save_state(str(folder))
    return read, losses


def test_issue_2016_natively_order_and_losses_differ_and_ours_are_the_uninterrupted_runs(
    root: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "native"
    read, losses = _native(folder, seed=7, save_at=AT)
    read_again, losses_again = _native(folder, seed=99)
    assert read_again != read[AT:]
    assert losses_again != losses[AT:]

    reference = train(None)
    try:
        train(root, until=AT)
    except BrokenOffError:
        ours = train(root, seed=99)
    assert ours.losses == reference.losses[AT:]
    ours.ends_like(reference)
