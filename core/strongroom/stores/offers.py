"""What a store may offer besides `Store`; who uses an offer does without where it is not made.

Each is a protocol of its own, found by ``isinstance`` (`Bounded`, `Replacing`, `Outlining`, `Detailing`,
`Resuming`, `Spacious`), and `tuning_of` says how a store likes to be used. A store that offers nothing works.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from strongroom.errors import ObjectNotFoundError
from strongroom.stores.base import Buffer, ObjectInfo, Store

__all__ = [
    "Bounded",
    "Detailing",
    "Outlining",
    "Replacing",
    "Resuming",
    "Space",
    "Spacious",
    "Tuning",
    "Unfinished",
    "Upload",
    "create_within",
    "details_of",
    "tuning_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How a store is used best.

    Attributes:
        read_bytes: what one ranged read asks for, at most; a multiple of 1 MiB.
        reads: how many ranged reads are under way at once; None: as many as this process has processors
            for, since they, and not the store, are what takes time.
        looks: how many small objects are asked for at once.
    """

    read_bytes: int = 2 << 20
    reads: int | None = None
    looks: int = 1


_USUAL: Final = Tuning()


def create_within(store: Store, key: str, data: Buffer, within_s: float) -> bool:
    """`Bounded.put_if_absent_within` where the store offers it, else `Store.put_if_absent`."""
    if isinstance(store, Bounded):
        return store.put_if_absent_within(key, data, max(0.0, within_s))
    return store.put_if_absent(key, data)


def tuning_of(store: Store) -> Tuning:
    """How a store is used best: what it says in ``tuning``, else what suits a disk."""
    tuning = getattr(store, "tuning", _USUAL)
    return tuning if isinstance(tuning, Tuning) else _USUAL


@runtime_checkable
class Bounded(Protocol):
    """A store that tries again by itself, for longer than a commit may take, and can be told to hurry."""

    def put_if_absent_within(self, key: str, data: Buffer, within_s: float) -> bool:
        """As `Store.put_if_absent`, but that nothing that could create the object is sent after so long.

        What was sent just before may still land a little later: no later than the store waits for an answer,
        and that is no longer than ``within_s``.

        Raises:
            StoreError: the object was not created by this call and never will be.
            OutcomeUnknownError: the object may stand or not, or still come to stand.
        """


@runtime_checkable
class Replacing(Protocol):
    """A store in which one object can take another's place at once: for the few that are mutable by design.

    No part of a checkpoint is ever one of those.
    """

    def replace(self, key: str, data: Buffer, *, version: str | None) -> bool:
        """Put an object whole, at once and durably in another's place; say whether this call did.

        A reader sees all of the old bytes or all of the new ones, and after a crash one of the two stands.

        Args:
            version: `ObjectInfo.version` of what has to stand there; None: nothing may. Where something else
                stands the answer is False, and that something stays.

        Raises:
            StoreError: nothing was replaced by this call and never will be.
            OutcomeUnknownError: the one or the other may stand.
        """


@runtime_checkable
class Outlining(Protocol):
    """A store that tells what it holds in few requests, however many files a checkpoint has."""

    def outline(self, fold: str) -> Mapping[str, ObjectInfo | None]:
        """Every object under the root, but for what lies in folders of one name.

        Args:
            fold: the name of those folders. Of each, its own key stands for all that it holds, with a
                trailing ``/`` and None.

        Raises:
            StoreError: as `Store.list_names`.
        """


@runtime_checkable
class Detailing(Protocol):
    """A store that tells how large and how old things are to whoever may list them and read none."""

    def details(self, prefix: str) -> Mapping[str, ObjectInfo]:
        """Every object in a folder and below it, by key; what goes away meanwhile may be left out.

        Raises:
            StoreError: as `Store.list_names`.
        """


def details_of(store: Store, prefix: str) -> Iterator[ObjectInfo]:
    """How large and how old each object is in a folder and below, by what the store offers or by asking."""
    if isinstance(store, Detailing):
        yield from store.details(prefix).values()
        return
    for name in store.list_names(prefix):
        path = f"{prefix}/{name}"
        if name.endswith("/"):
            yield from details_of(store, path.removesuffix("/"))
            continue
        try:
            yield store.stat(path)
        except ObjectNotFoundError:
            continue


@runtime_checkable
class Upload(Protocol):
    """One object on its way in parts, which another process may take up; see `Resuming`.

    `has_part` and `write_part` may be called from several threads at once.
    """

    @property
    def token(self) -> str:
        """What `Resuming.resume_upload` needs: printable, at most 1,024 characters, and no secret."""

    @property
    def part_bytes(self) -> int:
        """The length of every part but the last."""

    def has_part(self, number: int, data: Buffer) -> bool:
        """Whether a part, counted from 0, has arrived before, and holds just these bytes."""

    def write_part(self, number: int, data: Buffer) -> None:
        """Send a part, over what stands there of it.

        Raises:
            StoreError: the store refused, or the part is not as long as it has to be.
        """

    def finish(self) -> None:
        """Make the object of all parts; on return it is whole and durable, and never there in part.

        Raises:
            ObjectExistsError: something stands there already.
            StoreError: a part is missing, or the store refused.
        """

    def abort(self) -> None:
        """Give it up, and remove its parts where this identity may; fine when repeated or after `finish`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """An upload that was begun and neither finished nor given up.

    Attributes:
        key: of the object that it would make.
        token: the upload's.
        began_ns: nanoseconds since the epoch, by the store's clock.
    """

    key: str
    token: str
    began_ns: int


@runtime_checkable
class Resuming(Protocol):
    """A store in which an upload that was cut short can be gone on with, and not only anew."""

    def begin_upload(self, key: str, *, length_bytes: int) -> Upload:
        """Begin an object of exactly ``length_bytes`` (at least 1).

        Raises:
            StoreError: the store refused.
        """

    def resume_upload(self, key: str, *, length_bytes: int, token: str) -> Upload | None:
        """Go on with one that this or another process began; None where it is no more, or not like this.

        Raises:
            StoreError: the store could not be asked, or this identity may not ask.
        """

    def unfinished_uploads(self) -> list[Unfinished]:
        """Those under the root.

        Raises:
            StoreError: as `resume_upload`.
        """

    def abort_upload(self, upload: Unfinished) -> None:
        """Remove an unfinished upload's parts; absent is fine.

        Raises:
            StoreError: the store refused.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """How full a store is.

    Attributes:
        total_bytes: what this identity could ever store.
        free_bytes: what it still can.
    """

    total_bytes: int
    free_bytes: int

    @property
    def used_fraction(self) -> float:
        """From 0 to 1."""
        return 0.0 if self.total_bytes <= 0 else 1.0 - min(1.0, max(0.0, self.free_bytes / self.total_bytes))


@runtime_checkable
class Spacious(Protocol):
    """A store that has an end, and knows it."""

    def space(self) -> Space:
        """How full it is.

        Raises:
            StoreError: it could not be found out.
        """
