"""A data loader that a framework's loop iterates by itself, followed from epoch to epoch, and brought back.

A loop asks a loader for an iterator once an epoch, and the iterator for batches. Both questions come through
here: what random state the iterator was made from, and how many batches were taken, is what a `DataPosition`
needs. On a resume the next iterator that is asked for is the one that the run had, as far on as it was.

The loader stays the object that it was, of a class that is a subclass of its own, so that whoever has it, or
asks what it is, sees no other. It works with any loop over any loader: nothing of a framework is known here.
"""

from __future__ import annotations

import inspect
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from torch.utils.data import DataLoader

from strongroom.resume.datasets import dataset_states, load_dataset_states
from strongroom.resume.iterating import as_it_was, is_led_to, lead, let_go
from strongroom.resume.jobs import JobShape, batches_behind
from strongroom.resume.position import DataPosition, replay
from strongroom.resume.rng import Generator, RngState, generators_of
from strongroom.resume.skipping import SkipMode, length_of, reason_to_read, skipping

__all__ = ["FollowedLoader"]


_GIVEN: Final = itertools.count(1)
"""Batches, of all loaders."""


class FollowedLoader:
    """One loader of a run.

    Args:
        loader: whatever the loop iterates.
        stock: the torch loader inside of it that has the sampler, the data set and the workers; None: itself.
        skip: how a resume passes over batches that were trained on.
        generators: the generators that it draws from, by name; None: those that are found on it.
        read_epoch: the number that its samplers go by in the epoch that begins next; None: nobody knows.
        write_epoch: sets that number; None: the loop does so by itself.
        limit: how many batches of an epoch the loop takes at most, where it counts them from the beginning
            of each iterator and not of the epoch; None: all.
        is_trained_from: whether who asks for an iterator now trains on it; what something else reads of the
            same loader, such as an evaluation on the training data, is given to it and not followed.
        ends_when_let_go: an iterator that nobody holds any more, as after a ``break``, is over: the next one
            begins an epoch, and one that is asked for while another is held, as for an evaluation inside the
            loop that trains, is no more than passing: when it is over, the other one counts again. Otherwise
            an iterator counts as under way until another one is asked for.
        info: is told how the loader was brought back, in a sentence.
        warn: is told what may be otherwise than in the run that was never interrupted.

    Raises:
        ConfigError: an object whose iteration cannot be followed, such as a list.
    """

    def __init__(
        self,
        loader: Any,
        *,
        stock: Any = None,
        skip: SkipMode = "read",
        generators: Callable[[], Mapping[str, Generator]] | None = None,
        read_epoch: Callable[[], int] | None = None,
        write_epoch: Callable[[int], None] | None = None,
        limit: Callable[[], int | None] = lambda: None,
        is_trained_from: Callable[[], bool] = lambda: True,
        ends_when_let_go: bool = False,
        info: Callable[[str], None] = lambda _: None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.loader = loader
        self._stock = loader if stock is None else stock
        self._skip = skip
        self._generators = generators
        self._read_epoch = read_epoch
        self._write_epoch = write_epoch
        self._limit = limit
        self._is_trained_from = is_trained_from
        self._ends_when_let_go = ends_when_let_go
        self._info = info
        self._warn = warn
        self._epochs = 0
        self._inside: DataPosition | None = None  # of the iterator that was asked for last; None: it is over
        self._iterator: Callable[[], _Batches | None] = lambda: None
        self._is_trained = False  # what the iterator gives
        self._untrained: int | None = None  # epochs; None: nobody says what is trained on
        self._outer: list[_Under] = []  # iterators that were under way when this one was asked for
        self._taken = 0
        self._gave_at = 0
        self._asked: RngState | None = None  # right before the last batch, where that matters
        self._back_to: tuple[DataPosition, RngState, bool] | None = None
        self._misses_workers = False
        self._own_class = type(loader)
        lead(loader, self._iterate)

    # -------------------------------------------------------------------------------------- for whoever saves

    @property
    def is_followed(self) -> bool:
        """Whether iterators of the loader still come through here."""
        return is_led_to(self.loader, self._iterate)

    @property
    def length(self) -> int | None:
        """How many batches an epoch has, on this rank; None: nobody knows."""
        return length_of(self.loader)

    @property
    def taken(self) -> int:
        """Batches taken in the epoch that is under way; 0 between epochs."""
        if self._back_to is not None:
            return self._back_to[0].batches
        self._come_back()
        return self._taken if self._is_inside() else 0

    @property
    def gave_at(self) -> int:
        """Grows with each batch that is given, of whichever loader; 0 between epochs.

        Of several loaders, the one that is being read gave the latest.
        """
        self._come_back()
        return self._gave_at if self._is_inside() else 0

    @property
    def epochs_done(self) -> int:
        """Whole epochs; one of which all batches were taken is over when the loop asks for a further one."""
        self._come_back()
        return self._epochs + (self._inside is not None and not self._is_inside())

    @property
    def untrained(self) -> int:
        """How many of the epochs that are done were not trained on, such as an evaluation's."""
        self._come_back()
        is_left = self._inside is not None and not self._is_inside()
        return 0 if self._untrained is None else self._untrained + (is_left and not self._is_trained)

    def generators(self) -> Mapping[str, Generator]:
        """What the loader draws from besides the global streams."""
        return generators_of(self._stock) if self._generators is None else self._generators()

    def position(self) -> DataPosition:
        """Where its data stand.

        With all batches taken an epoch is not over until the loop asks for one more, and is given none, as a
        resumed loop will be; or until `break_off` says that it asks no more.
        """
        if self._back_to is not None:  # nobody has asked for an iterator yet
            return self._back_to[0]
        self._come_back()
        inside = self._inside if self._is_inside() else None
        if inside is None:
            epoch = self._epochs + (self._inside is not None)
            return DataPosition(
                epoch=epoch,
                makes_workers=not self._has_workers(),
                sampler_epoch=None if self._read_epoch is None else self._read_epoch(),
                dataset_states=dataset_states([self._stock]),
            )
        return replace(inside.after(self._taken), last_batch=self._asked)

    def is_trained_on(self) -> None:
        """A step is taken on what was read last: what was under way before that is not come back to."""
        self._come_back()
        self._outer.clear()
        self._untrained = self._untrained or 0
        self._is_trained = True

    def break_off(self) -> None:
        """The loop asks the iterator of the epoch that is under way for no more: the next one begins."""
        if self._inside is not None:
            self._is_over()

    # ------------------------------------------------------------------------------------ for whoever resumes

    @property
    def goes_back_to(self) -> DataPosition | None:
        """Where the next iterator will stand; None: at its beginning."""
        return None if self._back_to is None else self._back_to[0]

    def resume_from(self, position: DataPosition, now: RngState, *, reads: bool = True) -> None:
        """Let the next iterator that is asked for be the one at ``position``.

        Args:
            position: as `position` gave it.
            now: the random state at the checkpoint: of the global streams, and of this loader's own
                generators by the names that they have here.
            reads: False: the data set goes on from its place by itself; nothing is passed over.
        """
        self._inside, self._outer = None, []
        self._epochs = position.epoch
        self._back_to = None
        self._misses_workers = not position.makes_workers and self._keeps_workers()
        if position.epoch and self._misses_workers:
            self._warn(
                "the loader has persistent workers, whose random states nothing outside of them can read: "
                "the order of the samples is the uninterrupted run's, what is drawn inside the workers is "
                "not; draw it from a generator seeded by epoch and index, or leave persistent_workers off"
            )
        if position.batches:
            self._back_to = (position, now, reads)
            return
        if self._write_epoch is not None and position.sampler_epoch is not None:
            self._write_epoch(position.sampler_epoch)
        load_dataset_states([self._stock], position.dataset_states)

    def in_this_job(
        self, position: DataPosition, before: JobShape, now: JobShape, *, multiple_of: int = 1
    ) -> DataPosition:
        """The place from which another number of processes goes on; as it is for the same number.

        Args:
            position: of the job before.
            before: which that was.
            now: which this is.
            multiple_of: batches that make up a step.
        """
        if before.replicas == now.replicas or not position.batches:
            return position
        batches, again = batches_behind(position.batches, before, now, multiple_of=multiple_of)
        self._info(
            f"the data of epoch {position.epoch} were divided among {before.replicas} processes, and are now "
            f"among {now.replicas}, which go on from batch {batches} ({again} samples again): model and "
            f"optimizers are exact, and what follows is not what it would have been"
        )
        return replace(position.after(batches), lengths=(self.length,), last_batch=None)

    def release(self) -> None:
        """Let the loader be as it was; iterators that are under way go on."""
        if self.is_followed:
            let_go(self.loader, self._own_class)

    # ---------------------------------------------------------------------------------------- what comes here

    def _iterate(self) -> Iterator[Any]:
        """The loop asks for an iterator."""
        if not self._is_trained_from():
            other: Iterator[Any] = self._own_class.__iter__(self.loader)
            return other
        self._come_back()
        back_to, self._back_to = self._back_to, None
        if self._misses_workers:
            self._misses_workers = False
            self._start_workers()
        if back_to is not None:
            return self._return_to(*back_to)
        has_workers = self._has_workers()
        sampler_epoch = None if self._read_epoch is None else self._read_epoch()
        start, states = RngState.capture(self.generators()), dataset_states([self._stock])
        iterator = self._own_class.__iter__(self.loader)
        if self._inside is not None:  # the one before was broken off
            if self._ends_when_let_go and self._is_inside():  # or not: who asks may come back to it
                self._outer.append(
                    _Under(
                        self._inside,
                        self._taken,
                        self._asked,
                        self._iterator,
                        self._is_trained,
                        self._untrained,
                    )
                )
            self._count()
        self._inside = DataPosition(
            epoch=self._epochs,
            epoch_start=start,
            makes_workers=not has_workers,
            sampler_epoch=sampler_epoch,
            dataset_states=states,
            lengths=(self.length,),
        )
        self._taken, self._asked, self._is_trained = 0, None, False
        return self._given(_Batches(self, iterator))

    def _return_to(self, position: DataPosition, now: RngState, reads: bool) -> Iterator[Any]:
        position.check_fits((self.length,))
        length = self.length
        if self._write_epoch is not None and position.sampler_epoch is not None:
            self._write_epoch(position.sampler_epoch)
        keeps_state = any(state is not None for state in position.dataset_states)
        if length is not None and position.batches >= length and not keeps_state and reads:
            # Nothing is left of this epoch, and reading it would tell nothing new.
            if self._write_epoch is not None and position.sampler_epoch is not None:
                self._write_epoch(position.sampler_epoch + 1)
            self._tell(now.restore(self.generators()))
            self._epochs, self._inside = position.epoch + 1, None
            return iter(())
        if position.makes_workers and self._has_workers():
            self._stock._iterator = None
        began = time.monotonic()
        unread = self._unread(position.batches) if reads else ()
        made: list[Iterator[Any]] = []

        def make() -> Iterator[Any]:
            if reads:
                load_dataset_states([self._stock], position.dataset_states)
            made.append(self._own_class.__iter__(self.loader))
            return made[0]

        ahead: list[Any] = []
        if not reads:
            notes = self._begin_only(position, now, make)
            how = "by the data set's own state"
        elif unread:
            if self._is_lazy:
                notes = self._pass_over(position, now, make, ahead)
            else:
                notes = replay(position, now, make, generators=self.generators(), unread=unread)
            how = "by its sampler"
        else:
            replay(position, now, make, generators=self.generators())
            # Also for what the loader made only when it was asked for its first batch.
            notes = now.restore(self.generators())
            how = f"after {time.monotonic() - began:.1f} s of reading"
        self._tell(notes)
        self._info(f"back at batch {position.batches} of epoch {position.epoch}, {how}")
        self._epochs, self._inside, self._taken = position.epoch, position.after(0), position.batches
        self._asked, self._is_trained = position.last_batch, True
        return self._given(_Batches(self, made[0], ahead=ahead, is_first=False))

    def _given(self, batches: _Batches) -> _Batches:
        self._iterator = weakref.ref(batches)
        return batches

    def _come_back(self) -> None:
        """If an iterator is over that was asked for inside of another one's loop, that one counts again."""
        while self._outer and not self._is_inside():
            under = self._outer.pop()
            held = under.iterator()
            if held is not None and not held.is_over:
                self._inside, self._taken, self._asked = under.place, under.taken, under.asked
                self._iterator, self._epochs = under.iterator, under.place.epoch
                self._is_trained, self._untrained = under.is_trained, under.untrained

    def _is_inside(self) -> bool:
        """Whether an iterator is under way."""
        is_held = self._iterator() is not None or not self._ends_when_let_go
        return self._inside is not None and is_held

    def _pass_over(
        self, position: DataPosition, now: RngState, make: Callable[[], Iterator[Any]], ahead: list[Any]
    ) -> tuple[str, ...]:
        """Let the sampler begin further on, where a loader makes its iterator when a batch is asked for.

        The first batch is read here, ahead of training.
        """
        if position.epoch_start is not None:
            position.epoch_start.restore(self.generators())
        with skipping((self._stock,), position.batches):
            iterator = make()
            if position.first_batch is not None:
                position.first_batch.restore(self.generators())
            with suppress(StopIteration):
                ahead.append(next(iterator))
        return now.restore(self.generators())

    def _begin_only(
        self, position: DataPosition, now: RngState, make: Callable[[], Iterator[Any]]
    ) -> tuple[str, ...]:
        """The iterator that the epoch began with, of data that are further on by themselves."""
        if position.epoch_start is not None:
            position.epoch_start.restore(self.generators())
        iterator = make()
        limit = self._limit()
        if limit is not None and position.batches >= limit:
            # The loop will ask for nothing; but the data set is to learn that this epoch has begun.
            next(iterator, None)
        return now.restore(self.generators())

    def _unread(self, batches: int) -> tuple[Any, ...]:
        if self._skip == "read":
            return ()
        with as_it_was(self.loader, self._own_class):
            reason = reason_to_read((self._stock,), batches)
        if reason is None:
            return (self._stock,)
        self._warn(f"skip='sampler' cannot be had, the batches are read again: {reason}")
        return ()

    def _is_asked(self, *, is_first: bool) -> None:
        if not (is_first or self._reads_ahead):
            return
        now = RngState.capture(self.generators())
        if is_first and self._inside is not None:
            self._inside = replace(self._inside, first_batch=now)
        if self._reads_ahead:
            self._asked = now

    def _has_enough(self) -> bool:
        limit = self._limit()
        return limit is not None and self._taken >= limit

    def _is_taken(self) -> None:
        self._taken += 1
        self._gave_at = next(_GIVEN)

    def _is_over(self) -> None:
        self._count()
        self._inside = None

    def _count(self) -> None:
        self._epochs += 1
        if self._untrained is not None and not self._is_trained:
            self._untrained += 1

    def _tell(self, notes: tuple[str, ...]) -> None:
        for note in dict.fromkeys(notes):
            self._warn(f"the resumed run may differ from an uninterrupted one: {note}")

    @property
    def _is_lazy(self) -> bool:
        """Whether the loader does nothing at all before it is asked for a batch."""
        return inspect.isgeneratorfunction(self._own_class.__iter__)

    @property
    def _reads_ahead(self) -> bool:
        """Whether this process may read a batch before the loop wants it; what workers draw is their own."""
        is_stock = getattr(self._own_class, "__iter__", None) is DataLoader.__iter__
        return not is_stock and not getattr(self._stock, "num_workers", 0)

    def _start_workers(self) -> None:
        """The iterator that the run had at this place found its workers there, and drew no seed for them."""
        if self._has_workers():
            return
        here = RngState.capture(self.generators())
        DataLoader.__iter__(self._stock)
        here.restore(self.generators())

    def _has_workers(self) -> bool:
        return getattr(self._stock, "_iterator", None) is not None

    def _keeps_workers(self) -> bool:
        return isinstance(self._stock, DataLoader) and self._stock.persistent_workers


@dataclass(frozen=True)
class _Under:
    """An iterator that is under way, while another one of the same loader is."""

    place: DataPosition
    taken: int
    asked: RngState | None
    iterator: Callable[[], _Batches | None]
    is_trained: bool
    untrained: int | None


class _Batches:
    """An iterator of a loader's, counted."""

    def __init__(
        self,
        owner: FollowedLoader,
        inner: Iterator[Any],
        *,
        ahead: list[Any] | None = None,
        is_first: bool = True,
    ) -> None:
        self._owner = owner
        self._inner = inner
        self._ahead = ahead or []
        self._is_first = is_first
        self._of = owner._inside
        self.is_over = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._owner._come_back()
        counts = self._owner._inside is self._of
        if counts and self._owner._has_enough():
            self._owner._is_over()
            self._ahead, self._inner = [], iter(())
            raise StopIteration
        if counts:
            self._owner._is_asked(is_first=self._is_first)
            self._of = self._owner._inside
        self._is_first = False
        try:
            batch = self._ahead.pop(0) if self._ahead else next(self._inner)
        except StopIteration:
            if self._owner._inside is self._of and not self.is_over:
                self._owner._is_over()
            self.is_over = True
            raise
        if counts:
            self._owner._is_taken()
        return batch
