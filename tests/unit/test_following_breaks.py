"""A followed loader under a loop that takes part of an epoch, or breaks it off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


class _Keeping(_Noisy):
    """Goes on where it was told, and counts its epochs when they begin."""

    def __init__(self) -> None:
        self.begun, self.begin_at = 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        begin_at, self.begin_at = self.begin_at, 0
        self.begun += 1
        return iter([self[index] for index in range(begin_at, 12)])


def test_a_loop_that_takes_so_many_batches_takes_no_more_of_an_epoch_that_it_comes_back_to() -> None:
    torch.manual_seed(3)
    loader: Any = DataLoader(_Noisy(), batch_size=2, shuffle=True)
    followed = FollowedLoader(loader, limit=lambda: 4)
    epoch, seen = iter(loader), []
    for number in range(4):
        if number == 3:
            position, now = followed.position(), RngState.capture()
        seen.append(next(epoch))

    torch.manual_seed(9)
    again: Any = DataLoader(_Noisy(), batch_size=2, shuffle=True)
    back = FollowedLoader(again, limit=lambda: 4)
    back.resume_from(position, now)
    (last,) = again  # the fourth; the loader has six
    assert torch.equal(last, seen[3])
    assert (back.taken, back.position().epoch) == (0, 1)


def test_an_epoch_that_the_loop_breaks_off_is_over() -> None:
    loader: Any = DataLoader(_Noisy(), batch_size=2)
    followed = FollowedLoader(loader)
    next(iter(loader))
    assert followed.position().batches == 1
    followed.break_off()
    assert (followed.position().epoch, followed.position().batches) == (1, 0)
    followed.break_off()
    assert followed.position().epoch == 1


def test_a_data_set_that_goes_on_by_itself_learns_that_a_full_epoch_has_begun() -> None:
    data = _Keeping()

    class Loader:
        dataset = data

        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from data

    loader = Loader()
    followed = FollowedLoader(loader, limit=lambda: 12)
    taken = [one for _, one in zip(range(12), loader, strict=False)]
    position, now = followed.position(), RngState.capture()
    followed.release()
    data.begun, data.begin_at = 0, 12
    again = FollowedLoader(loader, limit=lambda: 12)
    again.resume_from(position, now, reads=False)
    assert len(taken) == 12
    assert list(loader) == []
    assert data.begun == 1
    assert len(list(loader)) == 12


def test_an_iterator_that_somebody_still_holds_is_not_come_back_to_once_a_later_one_is_trained_on() -> None:
    loader: Any = DataLoader(_Noisy(), batch_size=2, shuffle=True)
    followed = FollowedLoader(loader, ends_when_let_go=True)
    held = iter(loader)
    next(held)
    for _ in loader:
        followed.is_trained_on()
    assert (followed.position().batches, followed.position().epoch, followed.epochs_done) == (0, 2, 2)


def test_a_loop_that_is_read_from_inside_of_itself_goes_on_where_it_was() -> None:
    def evaluated(loader: Any, *, breaks_off: bool) -> None:
        for _ in loader:
            if breaks_off:
                break

    def run(loader: Any, after: int) -> tuple[list[Any], list[Any]]:
        seen, places = [], []
        for number, one in enumerate(loader, after):
            seen.append(one)
            evaluated(loader, breaks_off=number % 2 == 0)
            places.append((followed.position(), RngState.capture(), followed.epochs_done))
        return seen, places

    torch.manual_seed(3)
    loader: Any = DataLoader(_Noisy(), batch_size=2, shuffle=True)
    followed = FollowedLoader(loader, ends_when_let_go=True)
    seen, places = run(loader, 0)
    assert [(place.batches, place.epoch, done) for place, _, done in places] == [
        (number, 0, 0) for number in range(1, 7)
    ]
    assert (followed.position().batches, followed.position().epoch) == (0, 1)
    for number in (2, 3):
        position, now, _ = places[number]
        torch.manual_seed(9)
        loader = DataLoader(_Noisy(), batch_size=2, shuffle=True)
        followed = FollowedLoader(loader, ends_when_let_go=True)
        followed.resume_from(position, now)
        again, _ = run(loader, number + 1)
        assert all(map(torch.equal, again, seen[number + 1 :]))
        assert len(again) == 5 - number
        assert followed.position().epoch == 1
