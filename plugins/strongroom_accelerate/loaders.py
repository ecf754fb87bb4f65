"""The loaders that Accelerate has prepared: each followed, and brought back.

A prepared loader is the same object to whoever holds it. One that is prepared after the resume is brought
back when it comes: its place in the list of all says which of the checkpoint's it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from strongroom.errors import StateMismatchError
from strongroom.frontend import Place
from strongroom.resume import DataPosition, RngState, SkipMode, generators_of
from strongroom.resume.following import FollowedLoader
from strongroom_accelerate import seam
from strongroom_accelerate.voice import VOICE

__all__ = ["PreparedLoaders"]


class PreparedLoaders:
    """One run's loaders, in the order in which they were prepared.

    Args:
        accelerator: which has prepared them.
        skip: how a resume passes over batches that were trained on.
    """

    def __init__(self, accelerator: Any, skip: SkipMode) -> None:
        self._accelerator = accelerator
        self._skip = skip
        self._known: list[FollowedLoader] = []
        self._awaited: Place | None = None
        self._seeds: Sequence[int | None] = ()
        self._has_told = False
        self._made_ahead = False

    def followed(self) -> list[FollowedLoader]:
        """All of them; those that have come meanwhile are followed from now on, others are let go."""
        prepared = self._accelerator._dataloaders
        found: list[FollowedLoader] = []
        for loader in prepared:
            known = next((one for one in self._known if one.loader is loader), None)
            found.append(self._follow(loader) if known is None else known)
        for one in self._known:
            if one not in found:
                one.release()
        self._known = found
        return found

    @contextmanager
    def preparing(self, loader: Any) -> Iterator[None]:
        """Accelerate prepares a loader, inside the block; then it is followed."""
        generators = generators_of(loader)
        before = RngState.capture(generators)
        yield
        self._made_ahead = False
        self.followed()
        if self._made_ahead:  # from generators of its own, perhaps, which stand where they stood once more
            now = RngState.capture()
            before.restore(generators)
            now.restore()

    def active(self) -> FollowedLoader | None:
        """The one that training reads from: what was read in between, such as validation's, is over."""
        loaders = self.followed()
        found = max(loaders, key=lambda one: one.gave_at, default=None)
        if found is not None and found.gave_at:
            return found
        loader = seam.active_loader(self._accelerator)
        is_other = loader is not None and all(one.loader is not loader for one in loaders)
        if is_other and not self._has_told:
            self._has_told = True
            VOICE.warn(
                "training reads from a loader that accelerator.prepare() did not return, such as one that "
                "skip_first_batches() made: where it stands is in no checkpoint, and a resume begins it "
                "anew. After resume() the prepared loader goes on by itself, and nothing need be skipped"
            )
        return None

    def are_trained_on(self) -> None:
        """A step is taken: whoever still holds an iterator from before will not come back to it."""
        for one in self._known:
            one.is_trained_on()

    def number_of(self, loader: FollowedLoader | None) -> int | None:
        """Its place among all."""
        return None if loader is None else self._known.index(loader)

    def seeds(self) -> list[int | None]:
        """From which each draws its orders, as `strongroom_accelerate.seam.seed_of` gives it."""
        return [seam.seed_of(one.loader) for one in self.followed()]

    def resume_from(
        self,
        place: Place,
        seeds: Sequence[int | None],
        models: Sequence[nn.Module],
        *,
        is_new_rank: bool = False,
    ) -> tuple[str, ...]:
        """Let all go on from a place; those that were not prepared yet, once they are.

        Raises:
            StateMismatchError: there are more of them than there were.
        """
        loaders = self.followed()
        if len(loaders) > len(place.positions):
            raise StateMismatchError(
                f"the run had {len(place.positions)} prepared data loaders, and this program has "
                f"{len(loaders)}; prepare the same ones, in the same order, or begin anew with resume='never'"
            )
        for loader, seed, position in zip(loaders, seeds, place.positions, strict=False):
            seam.set_seed(loader.loader, seed)
            seam.begin_when_asked(loader.loader, is_first_epoch=_is_in_first(position))
        self._awaited, self._seeds = None, seeds
        if len(loaders) < len(place.positions):
            self._awaited = replace(place, rng=RngState.capture() if is_new_rank else place.rng)
        return replace(place, positions=place.positions[: len(loaders)]).restore(
            loaders,
            models,
            seam.job_shape(self._accelerator),
            is_new_rank=is_new_rank,
            multiple_of=self._accelerator.gradient_accumulation_steps,
        )

    def check_all_came(self) -> None:
        """Tell, once training goes on, if loaders of the checkpoint were never prepared."""
        awaited, self._awaited = self._awaited, None
        if awaited is not None and len(self._known) < len(awaited.positions):
            VOICE.warn(
                f"the run had {len(awaited.positions)} prepared data loaders, and this program has prepared "
                f"{len(self._known)}: where the others stood is not in the next checkpoint"
            )

    def release(self) -> None:
        """Let every loader be as it was."""
        for one in self._known:
            one.release()
        self._known = []

    def _follow(self, loader: Any) -> FollowedLoader:
        made = FollowedLoader(
            loader,
            stock=seam.stock_loader(loader),
            skip=self._skip,
            generators=lambda: seam.loader_generators(loader),
            read_epoch=lambda: int(loader.iteration),
            write_epoch=lambda epoch: setattr(loader, "iteration", epoch),
            ends_when_let_go=True,
            info=VOICE.info,
            warn=VOICE.warn,
        )
        self._made_ahead = seam.begin_when_asked(loader, is_first_epoch=True)
        number = len(self._known)
        self._known.append(made)
        if self._awaited is not None and number < len(self._awaited.positions):
            self._bring_back(made, number, self._awaited)
        return made

    def _bring_back(self, loader: FollowedLoader, number: int, place: Place) -> None:
        """One that is prepared after the resume; the global streams stay as they are now."""
        if number < len(self._seeds):
            seam.set_seed(loader.loader, self._seeds[number])
        seam.begin_when_asked(loader.loader, is_first_epoch=_is_in_first(place.positions[number]))
        now = RngState.capture()
        own = place.rng.of_part(f"loader{number}.")
        job = seam.job_shape(self._accelerator)
        at_once = self._accelerator.gradient_accumulation_steps
        moved = loader.in_this_job(place.positions[number], place.job, job, multiple_of=at_once)
        loader.resume_from(moved, own)
        for note in own.restore(loader.generators()):
            VOICE.warn(f"the resumed run may differ from an uninterrupted one: {note}")
        now.restore()


def _is_in_first(position: DataPosition) -> bool:
    """Whether the next iterator that is made is that of the first epoch."""
    is_full = position.batches > 0 and position.lengths == (position.batches,)
    return position.epoch == 0 and not is_full
