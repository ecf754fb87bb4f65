"""Where in its data a run stood, and how an iterator is brought back there.

A stock data loader cannot say where it stands, but what it yields is a function of the random state from
which its iterator was made. So a position is that state, the number of batches taken since, and the random
state at the checkpoint itself: make the iterator again, take as many batches, put the checkpoint's random
state back. Batches are read again and thrown away; the order, the augmentations (in workers too) and
everything drawn afterwards are then those of the run that was never interrupted.

A loader that reads one batch ahead has drawn that one, too, before the checkpoint: from the state at which
the last batch taken was asked for, which is put back before that one is read again.

The condition: what decides about later batches is drawn from the global streams when the iterator is made or
its first batch is taken, as stock samplers do, or else from generators of the loader's own. What a loader
draws from the global streams later on (a shuffle buffer in the training process, a shorter loader that is
begun again beside a longer one) is mixed with what training draws in between, and training is not replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strongroom.errors import ConfigError, StateMismatchError
from strongroom.resume.rng import Generator, RngState
from strongroom.resume.skipping import skipping

__all__ = ["DataPosition", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataPosition:
    """Batches taken from the iterator of one epoch, and what that iterator was made from.

    Attributes:
        epoch: whole epochs before this one.
        batches: batches taken in this epoch; 0 is the point between two epochs, before an iterator exists.
        epoch_start: the random state right before this epoch's iterator was made; None between epochs.
        first_batch: the random state right before the first batch was asked for, where anything may have
            drawn in between: without workers a loader draws its order only then. None: nothing has.
        last_batch: the random state right before the last batch that was taken was asked for: a loader that
            reads one ahead has drawn the next one from it. None: what reading draws is not followed.
        makes_workers: that iterator started its own workers and drew their seed. Persistent workers are
            reused by later epochs' iterators, which draw one number less.
        sampler_epoch: what samplers were told by ``set_epoch``; None where none was told.
        loader_states: the states of loaders that keep their own position, to be used in place of taking
            batches again; empty for stock loaders.
        dataset_states: the states of data sets that keep one, right before this epoch's iterator was made,
            or between two epochs; None for a data set that keeps none.
        lengths: how many batches each loader had; None for one that did not know.
        loaders_epoch: the epoch at whose beginning the loaders were made, where they are made more than once.
        loaders_start: the random state right before; None where they are made once, when a run begins.
    """

    epoch: int
    batches: int = 0
    epoch_start: RngState | None = None
    first_batch: RngState | None = None
    last_batch: RngState | None = None
    makes_workers: bool = True
    sampler_epoch: int | None = None
    loader_states: tuple[Any, ...] = ()
    dataset_states: tuple[Any, ...] = ()
    lengths: tuple[int | None, ...] = ()
    loaders_epoch: int | None = None
    loaders_start: RngState | None = None

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.batches < 0:
            raise ConfigError(
                f"a data position counts from 0; got epoch {self.epoch} and batch {self.batches}"
            )
        if self.batches and self.epoch_start is None:
            raise ConfigError("a position inside an epoch needs the random state from which the epoch began")

    def after(self, batches: int, loader_states: tuple[Any, ...] = ()) -> DataPosition:
        """The position in the same epoch with ``batches`` taken."""
        return replace(self, batches=batches, loader_states=loader_states)

    def check_fits(self, lengths: tuple[int | None, ...]) -> None:
        """Prove that the loaders are as long as they were: a count of batches means nothing in other data.

        Between two epochs there is no such count, and the data may have changed.

        Raises:
            StateMismatchError: they are not.
        """
        if self.batches and self.lengths and lengths != self.lengths:
            raise StateMismatchError(
                f"the checkpoint was taken after batch {self.batches} of epoch {self.epoch}, of "
                f"{_counted(self.lengths)}; this run has {_counted(lengths)}: give it the data and the batch "
                f"size that it had, resume from a checkpoint taken at an epoch's end, or begin anew"
            )

    def to_state(self) -> dict[str, Any]:
        """A value of plain containers, numbers, strings and arrays, as a checkpoint carries it."""
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "epoch_start": _to_state(self.epoch_start),
            "first_batch": _to_state(self.first_batch),
            "last_batch": _to_state(self.last_batch),
            "makes_workers": self.makes_workers,
            "sampler_epoch": self.sampler_epoch,
            "loader_states": self.loader_states,
            "dataset_states": self.dataset_states,
            "lengths": self.lengths,
            "loaders_epoch": self.loaders_epoch,
            "loaders_start": _to_state(self.loaders_start),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> DataPosition:
        """Read what `to_state` gave.

        Raises:
            StateMismatchError: the value is something else.
        """
        try:
            return cls(
                epoch=state["epoch"],
                batches=state["batches"],
                epoch_start=_from_state(state["epoch_start"]),
                first_batch=_from_state(state["first_batch"]),
                last_batch=_from_state(state.get("last_batch")),
                makes_workers=state["makes_workers"],
                sampler_epoch=state["sampler_epoch"],
                loader_states=tuple(state["loader_states"]),
                dataset_states=tuple(state["dataset_states"]),
                lengths=tuple(state["lengths"]),
                loaders_epoch=state.get("loaders_epoch"),
                loaders_start=_from_state(state.get("loaders_start")),
            )
        except (KeyError, TypeError, ConfigError) as error:
            raise StateMismatchError(
                f"the data position in the checkpoint is not one that this release writes ({error!r}); "
                f"read it with the release that wrote it"
            ) from error


def replay(
    position: DataPosition,
    now: RngState,
    make_iterator: Callable[[], Iterator[object]],
    *,
    generators: Mapping[str, Generator] | None = None,
    unread: Sequence[object] = (),
) -> tuple[str, ...]:
    """Bring the data of a resumed run to where the checkpoint was taken.

    Before the call the front end has told samplers their epoch and, where ``position.makes_workers``, let go
    of workers that it may have started already.

    Args:
        position: a position inside an epoch.
        now: the random state at the checkpoint, put back last.
        make_iterator: makes the epoch's iterator as training does, loads the loaders' own states into it
            where the position holds some, and returns it; the front end keeps it for training.
        generators: the loaders' own generators by name, as they were captured.
        unread: the loaders whose samplers are advanced in place of taking batches again, all of them or none
            (`strongroom.resume.skipping.reason_to_read` says whether they can be).

    Returns:
        What could not be put back, one sentence each.

    Raises:
        StateMismatchError: the data ended before the position was reached.
    """
    if position.epoch_start is None:
        raise ConfigError("between two epochs there is nothing to take again; restore the random state alone")
    notes = position.epoch_start.restore(generators)
    if unread and not position.loader_states:
        with skipping(unread, position.batches) as pass_over:
            make_iterator()
            if position.first_batch is not None:
                position.first_batch.restore(generators)
            pass_over()
        return _distinct(notes, now.restore(generators))
    iterator = make_iterator()
    if position.first_batch is not None:
        position.first_batch.restore(generators)
    if not position.loader_states:
        for taken in range(position.batches):
            if position.last_batch is not None and taken == position.batches - 1:
                position.last_batch.restore(generators)
            try:
                next(iterator)
            except StopIteration:
                raise StateMismatchError(
                    f"the data of epoch {position.epoch} ended after {taken} batches, and the checkpoint was "
                    f"taken after {position.batches}: give the run the data and the batch size that it had, "
                    f"or begin anew"
                ) from None
    return _distinct(notes, now.restore(generators))


def _distinct(*notes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(note for some in notes for note in some))


def _counted(lengths: tuple[int | None, ...]) -> str:
    known = ["an unknown number of" if length is None else str(length) for length in lengths]
    return f"{', '.join(known)} batches" if known else "no loader"


def _to_state(rng: RngState | None) -> dict[str, Any] | None:
    return None if rng is None else rng.to_state()


def _from_state(state: Mapping[str, Any] | None) -> RngState | None:
    return None if state is None else RngState.from_state(state)
