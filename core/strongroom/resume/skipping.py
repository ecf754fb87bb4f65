"""Passing over batches without reading them: the sampler is advanced, the data set is not asked.

Reading again is exact and costs what reading costs. Where a loader draws its order in a sampler, as map-style
data do, the order alone can be brought to the position, which costs next to nothing. What is then not the
same is whatever reading itself decides: augmentations drawn in workers (these start anew, and batches fall
to other ones), and what a data set remembers of the samples that it gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, get_args

from torch.utils.data import DataLoader, IterableDataset

from strongroom.errors import ConfigError, StateMismatchError

__all__ = ["SkipMode", "check_skip_mode", "length_of", "reason_to_read", "skipping"]

SkipMode = Literal["read", "sampler"]
"""``read`` takes batches again and throws them away, ``sampler`` passes over their indices alone."""

_MODES: Final[tuple[str, ...]] = get_args(SkipMode)


def check_skip_mode(mode: str) -> SkipMode:
    """Return ``mode`` if it is one.

    Raises:
        ConfigError: it is none.
    """
    if mode not in _MODES:
        raise ConfigError(f"skip must be one of {', '.join(map(repr, _MODES))}; got {mode!r}")
    return mode  # type: ignore[return-value]  # mypy does not narrow by membership


def reason_to_read(loaders: Sequence[object], batches: int) -> str | None:
    """Why the first ``batches`` of these loaders can be passed over by reading alone; None: they need not be.

    Several loaders advance together, one batch each; one that is shorter than that would have been begun
    again meanwhile.
    """
    for number, loader in enumerate(loaders):
        name = f"loader {number} ({type(loader).__name__})"
        if not isinstance(loader, DataLoader):
            return f"{name} is no torch DataLoader, whose sampler could be advanced"
        if isinstance(loader.dataset, IterableDataset):
            return f"{name} reads an IterableDataset, which has no sampler"
        if hasattr(loader, "load_state_dict") or type(loader).__iter__ is not DataLoader.__iter__:
            return f"{name} makes its iterators in a way of its own"
        if len(loaders) > 1 and batches > (length_of(loader) or 0):
            return f"{name} has fewer than {batches} batches, and was begun again beside a longer one"
    return None


@contextmanager
def skipping(loaders: Sequence[Any], batches: int) -> Iterator[Callable[[], None]]:
    """Let the next iterator of each loader begin ``batches`` further on.

    Yields a function to be called inside the block, once the iterators are made: a loader without workers
    draws its order when its first batch is asked for, and this is that moment.

    Raises:
        StateMismatchError: from that function: there are not that many batches.
    """
    ahead: list[tuple[Any, str, _Ahead]] = []
    for loader in loaders:
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler = _Ahead(getattr(loader, name), batches)
        ahead.append((loader, name, sampler))
        # An iterator with persistent workers is used again, and has a sampler of its own to ask.
        iterator = getattr(loader, "_iterator", None)
        if getattr(iterator, "_index_sampler", None) is sampler.inner:
            ahead.append((iterator, "_index_sampler", sampler))
    for owner, name, sampler in ahead:
        vars(owner)[name] = sampler  # a DataLoader refuses to be assigned another one

    def pass_over() -> None:
        for _, _, sampler in ahead:
            sampler.pass_over()

    try:
        yield pass_over
    finally:
        for owner, name, sampler in ahead:
            vars(owner)[name] = sampler.inner
            sampler.is_over = True


class _Ahead:
    """A sampler whose iterators begin further on, until that is over.

    A loader's iterator with workers asks for two, and uses the second. One with persistent workers keeps
    the sampler for as long as it lives, and asks again in every epoch.
    """

    def __init__(self, inner: Any, batches: int) -> None:
        self.inner = inner
        self._batches = batches
        self._latest: _Indices | None = None
        self.is_over = False

    def __iter__(self) -> Iterator[Any]:
        indices: Iterator[Any] = iter(self.inner)
        if self.is_over:
            return indices
        self._latest = _Indices(indices, self._batches)
        return self._latest

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def pass_over(self) -> None:
        if self._latest is None:
            return
        self._latest.pass_over()
        if self._latest.missing:
            raise StateMismatchError(
                f"the data ended after {self._batches - self._latest.missing} batches, and the checkpoint "
                f"was taken after {self._batches}: give the run the data and the batch size that it had, or "
                f"begin anew"
            )


class _Indices:
    """Indices, those of the first batches left out when the first is asked for."""

    def __init__(self, indices: Iterator[Any], batches: int) -> None:
        self._indices = indices
        self.missing = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.pass_over()
        return next(self._indices)

    def pass_over(self) -> None:
        while self.missing:
            try:
                next(self._indices)
            except StopIteration:
                return
            self.missing -= 1


def length_of(loader: Any) -> int | None:
    """How many batches a loader has; None: it does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
