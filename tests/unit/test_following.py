"""A loader that is followed, and brought back to where it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from strongroom.resume import RngState
from strongroom.resume.following import FollowedLoader


class _Noisy(Dataset[torch.Tensor]):
    """Reading draws."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(())


class _OneAhead:
    """Reads the next batch before it gives one, as some frameworks' loaders do to know which is the last."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[torch.Tensor]:
        batches = iter(self.inner)
        current = next(batches)
        for following in batches:
            yield current
            current = following
        yield current


def _loader(ahead: bool) -> Any:
    inner: Any = DataLoader(_Noisy(), batch_size=2, shuffle=True)
    return _OneAhead(inner) if ahead else inner


@pytest.mark.parametrize("taken", (1, 3, 5))
@pytest.mark.parametrize("ahead", (False, True), ids=["as it is", "one ahead"])
def test_what_reading_draws_while_training_draws_too_is_read_again(ahead: bool, taken: int) -> None:
    torch.manual_seed(3)
    loader = _loader(ahead)
    followed = FollowedLoader(loader)
    batches, seen = iter(loader), []
    for number in range(6):
        if number == taken:
            position, now = followed.position(), RngState.capture()
        seen.append(next(batches))
        torch.rand(3)  # as dropout would

    torch.manual_seed(99)
    again = _loader(ahead)
    FollowedLoader(again).resume_from(position, now)
    resumed = []
    for batch in again:
        resumed.append(batch)
        torch.rand(3)

    assert torch.equal(torch.stack(resumed), torch.stack(seen[taken:]))
