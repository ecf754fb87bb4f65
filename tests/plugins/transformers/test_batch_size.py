"""``auto_find_batch_size``: each try begins from what ``train()`` began with, and saves a line of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from test_timing import steps
from trained import BATCH_SIZE, BATCHES, EPOCHS, Net

Train = Callable[..., Any]


class Full(Net):
    """A model for which batches of some size have no room, from some batch on."""

    def __init__(self, *, room: int, after: int) -> None:
        super().__init__()
        self.room, self.after, self.sizes = room, after, []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            if len(x) > self.room and len(self.losses) >= self.after:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            self.sizes.append(len(x))
        return super().forward(x, labels)


def full(room: int = 3, after: int = 3) -> Full:
    torch.manual_seed(0)
    return Full(room=room, after=after)


def test_a_second_try_begins_from_what_the_first_began_with(
    train: Train, uninterrupted: Train, root: Path
) -> None:
    outcome = train(model=full(), auto_find_batch_size=True)
    assert outcome.model.sizes[:4] == [4, 4, 4, 3]
    smaller = uninterrupted(per_device_train_batch_size=3)
    assert outcome.losses[3:] == smaller.losses
    assert torch.equal(outcome.model.net[0].weight, smaller.model.net[0].weight)
    assert outcome.step == smaller.step == 16
    # The first try's own checkpoints are of a line that is left.
    assert steps(root)[-1] == 16


def test_it_is_taken_up_with_the_size_that_was_found(train: Train, uninterrupted: Train) -> None:
    train(model=full(), auto_find_batch_size=True, until=5)
    resumed = train(model=full(), auto_find_batch_size=True, seed=8)
    smaller = uninterrupted(per_device_train_batch_size=3)
    assert set(resumed.model.sizes) == {3}
    assert resumed.losses == smaller.losses[5:]
    assert torch.equal(resumed.model.net[0].weight, smaller.model.net[0].weight)


def test_without_a_lack_of_room_it_is_a_run_like_any_other(train: Train, uninterrupted: Train) -> None:
    train(auto_find_batch_size=True, until=4)
    resumed = train(auto_find_batch_size=True, seed=8)
    assert len(resumed.losses) == BATCHES * EPOCHS - 4
    assert resumed.trainer._train_batch_size == BATCH_SIZE
    resumed.ends_like(uninterrupted())
