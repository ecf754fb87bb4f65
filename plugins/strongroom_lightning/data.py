"""Where the training data of a fit stand, followed as Lightning moves on, and brought back on a resume.

Lightning makes the first epoch's iterator while it sets up, long before the first batch, and every later
epoch's right before it. A resumed fit makes it once too often, from a random state that is not the run's.
What counts is therefore watched here, at the three moments at which an iterator is made or used first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from strongroom.errors import ConfigError
from strongroom.resume import (
    DataPosition,
    RngState,
    SkipMode,
    dataset_states,
    load_dataset_states,
    reason_to_read,
    replay,
)
from strongroom_lightning import seam

__all__ = ["TrainingData", "tell_of_differences"]


class TrainingData:
    """The data of one fit.

    Args:
        fit_loop: Lightning's.
        skip: how a resume passes over the batches that were trained on.
    """

    def __init__(self, fit_loop: Any, skip: SkipMode) -> None:
        self._fit_loop = fit_loop
        self._skip = skip
        self._made_from: tuple[RngState, tuple[Any, ...]] | None = None
        self._epoch: DataPosition | None = None
        self._batches_before = 0  # counted by Lightning, but not taken from this epoch's iterator
        self._resume_from: tuple[DataPosition, RngState] | None = None
        self._loaders_from: tuple[int, RngState] | None = None

    def resume_from(self, position: DataPosition, rng: RngState) -> None:
        """Let the fit that is being set up go on from here."""
        self._resume_from = (position, rng)

    def move(self, batches: Callable[[int], int]) -> DataPosition:
        """Go on from another batch of the epoch than the checkpoint has, and with no loader's own state."""
        if self._resume_from is None:
            raise ConfigError("nothing is resumed")
        position, rng = self._resume_from
        # The loaders are as long as such a job has them.
        lengths = seam.loader_lengths(self._fit_loop)
        moved = replace(position.after(batches(position.batches)), lengths=lengths)
        self._resume_from = (moved, rng)
        return moved

    @property
    def _loaders(self) -> list[Any]:
        combined = self._fit_loop._combined_loader
        return [] if combined is None else list(combined.flattened)

    @property
    def is_resuming_inside_epoch(self) -> bool:
        return self._resume_from is not None and self._resume_from[0].batches > 0

    def random_state(self) -> RngState:
        """All that training draws from, the loaders' own generators included."""
        return RngState.capture(seam.loader_generators(self._fit_loop))

    def put_back(self, rng: RngState) -> tuple[str, ...]:
        return rng.restore(seam.loader_generators(self._fit_loop))

    def make_loaders(self, make: Callable[[], None]) -> None:
        """Let Lightning make the loaders, or keep those that it has.

        Those that are made anew every few epochs a resume makes as they were made: they may go by the epoch
        that it was, and be drawn.
        """
        if not seam.makes_loaders_anew(self._fit_loop):
            make()
            return
        before = self._fit_loop._combined_loader
        epoch, start = seam.epochs_done(self._fit_loop), RngState.capture()
        position = None if self._resume_from is None or self._loaders_from else self._resume_from[0]
        if position is not None and position.loaders_epoch is not None and position.loaders_start is not None:
            epoch, start = position.loaders_epoch, position.loaders_start
            start.restore()
        with seam.in_epoch(self._fit_loop, epoch):
            make()
        if self._fit_loop._combined_loader is not before:
            self._loaders_from = epoch, start

    def loaders_are_ready(self) -> None:
        """Lightning is about to make an iterator while it sets up."""
        self._made_from = self.random_state(), dataset_states(self._loaders)

    def training_begins(self) -> None:
        """Set-up is over: what it drew is undone, and the run is where its checkpoint was taken."""
        if self._resume_from is None:
            return
        position, rng = self._resume_from
        if position.batches == 0:
            seam.settle(self._fit_loop)
            seam.load_states_between_epochs(self._fit_loop, position.loader_states)
        seam.remember_reload(self._fit_loop, position.epoch, is_inside=position.batches > 0)
        tell_of_differences(self.put_back(rng))
        if position.epoch and not position.makes_workers and seam.has_persistent_workers(self._fit_loop):
            rank_zero_warn(
                "Strongroom: the loader has persistent workers, whose random states nothing outside of them "
                "can read: the order of the samples is the uninterrupted run's, what is drawn inside the "
                "workers is not; draw it from a generator seeded by epoch and index, or leave "
                "persistent_workers off"
            )

    def epoch_begins(self, fetcher: Any, go_on: Callable[[Any], None]) -> None:
        """Lightning is about to use an epoch's iterator; ``go_on`` is its own preparation for that."""
        if seam.fetches_itself(self._fit_loop):
            raise ConfigError(
                "a training_step that takes dataloader_iter fetches batches by itself, so that nobody knows "
                "where in the data it stands; take a batch instead"
            )
        resume_from, self._resume_from = self._resume_from, None
        made_from, self._made_from = self._made_from, None
        if resume_from is not None and resume_from[0].batches > 0:
            go_on(fetcher)
            self._return_to(fetcher, *resume_from)
            return
        before = self.random_state(), dataset_states(self._loaders)
        if resume_from is not None:
            before = before[0], resume_from[0].dataset_states
            load_dataset_states(self._loaders, before[1])
        iterator = fetcher.combined_loader._iterator
        go_on(fetcher)
        is_new = fetcher.combined_loader._iterator is not iterator
        if not is_new and (resume_from is not None or made_from is None):
            # The iterator that was made during set-up belongs to a random state that is not the run's.
            self.put_back(before[0])
            load_dataset_states(self._loaders, before[1])
            iter(fetcher)
            is_new = True
        self._count_from(fetcher, taken=0)
        epoch = seam.epochs_done(self._fit_loop)
        start, states = before if is_new or made_from is None else made_from
        loaders_epoch, loaders_start = self._loaders_from or (None, None)
        self._epoch = DataPosition(
            epoch=epoch,
            epoch_start=start,
            dataset_states=states,
            first_batch=None if is_new else self.random_state(),
            makes_workers=not is_new,
            sampler_epoch=epoch,
            lengths=seam.loader_lengths(self._fit_loop),
            loaders_epoch=loaders_epoch,
            loaders_start=loaders_start,
        )

    def epoch_is_over(self) -> None:
        """The next epoch's iterator does not exist yet."""
        loaders_epoch, loaders_start = self._loaders_from or (None, None)
        self._epoch = DataPosition(
            epoch=seam.epochs_done(self._fit_loop),
            makes_workers=False,
            dataset_states=dataset_states(self._loaders),
            loaders_epoch=loaders_epoch,
            loaders_start=loaders_start,
        )
        self._batches_before = seam.batches_taken(self._fit_loop)

    def position(self, loader_states: tuple[Any, ...]) -> DataPosition | None:
        """Where the data stand; None before the first epoch.

        Args:
            loader_states: the states of those loaders that keep their own.
        """
        if self._epoch is None:
            return None
        batches = seam.batches_taken(self._fit_loop) - self._batches_before
        # A loader's own state is of use where it tells of the batch trained on last, not of one that was
        # fetched ahead, and where no other loader has to be read again.
        is_ahead = bool(getattr(self._fit_loop._data_fetcher, "batches", ()))
        is_complete = len(loader_states) == len(self._fit_loop._combined_loader.flattened)
        # Nor where ranks are dealt what another sampler shuffles: such a loader draws another order when it
        # is given its state than when it begins.
        is_dealt = any(map(seam.is_dealt_out, self._loaders))
        is_of_use = not is_ahead and not is_dealt and (is_complete or not batches)
        return self._epoch.after(batches, loader_states if is_of_use else ())

    def _return_to(self, fetcher: Any, position: DataPosition, rng: RngState) -> None:
        combined = fetcher.combined_loader
        position.check_fits(seam.loader_lengths(self._fit_loop))
        unread = () if position.loader_states else self._passed_over(combined.flattened, position.batches)

        def make_iterator() -> Any:
            if position.makes_workers:
                combined.reset()
            if position.loader_states:
                combined._load_state_dicts(list(position.loader_states))
            else:
                load_dataset_states(self._loaders, position.dataset_states)
            return iter(fetcher)

        began = time.monotonic()
        notes = replay(
            position,
            rng,
            make_iterator,
            generators=seam.loader_generators(self._fit_loop),
            unread=unread,
        )
        tell_of_differences(notes)
        if position.loader_states:
            how = "by the loaders' own states"
        elif unread:
            how = "by its sampler"
        else:
            how = f"after {time.monotonic() - began:.1f} s of reading"
        rank_zero_info(f"Strongroom: back at batch {position.batches} of epoch {position.epoch}, {how}")
        self._count_from(fetcher, taken=position.batches)
        self._epoch = position.after(0)
        seam.settle(self._fit_loop)

    def _passed_over(self, loaders: list[Any], batches: int) -> tuple[Any, ...]:
        """The loaders that need not be read again, all or none."""
        if self._skip == "read":
            return ()
        reason = reason_to_read(loaders, batches)
        if reason is None:
            return tuple(loaders)
        rank_zero_warn(f"Strongroom: skip='sampler' cannot be had, the batches are read again: {reason}")
        return ()

    def _count_from(self, fetcher: Any, *, taken: int) -> None:
        counted = seam.batches_taken(self._fit_loop)
        self._batches_before = counted - taken
        fetcher.fetched = counted + len(getattr(fetcher, "batches", ()))


def tell_of_differences(notes: tuple[str, ...]) -> None:
    """Warn of what could not be put back."""
    for note in notes:
        rank_zero_warn(f"Strongroom: the resumed run may differ from an uninterrupted one: {note}")
