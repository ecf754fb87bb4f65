"""The keyrings of one checkpoint as they stand, and which of them a rotation may go by. It writes nothing.

A keyring comes from a stranger until its keys were tried. What can be told without trying them is told
here: that it is whole and this checkpoint's, that no file's key is lacking, and whether its files' keys
are those that the commit pins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from strongroom.digest import Digest, sha256_of
from strongroom.errors import (
    ConfigError,
    IntegrityError,
    KeyServiceError,
    NoKeyError,
    ObjectNotFoundError,
    StrongroomError,
    UnsupportedFormatError,
)
from strongroom.layout import MAX_KEYRING, keyring_key
from strongroom.manifest import Commit, FileRecord
from strongroom.stores.base import Store
from strongroom_security.changes import wraps_of
from strongroom_security.keyring import Keyring, read_generation

__all__ = ["Findings", "FoundKeyring", "Standing", "find_keyring"]

_MAX_TRIED: Final = 16
"""Generations that are looked at besides the first: what no reader tries is no source either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundKeyring:
    """One generation, as it stands in the store.

    Attributes:
        digest: SHA-256 of its bytes; None: they could not be read.
        keyring: None where it is no keyring of this checkpoint.
        problem: why it is none.
        is_absent: nothing stands there; what was listed a moment ago was removed, perhaps.
    """

    generation: int
    digest: Digest | None = None
    keyring: Keyring | None = None
    problem: IntegrityError | UnsupportedFormatError | None = None
    is_absent: bool = False


def find_keyring(store: Store, commit: Commit, generation: int) -> FoundKeyring:
    """One generation of a checkpoint's keyring.

    Raises:
        StoreError: the store could not be asked.
    """
    what = f"keyring {generation} of {commit.name}"
    digest: Digest | None = None
    try:
        data = read_generation(store, commit.name, generation)
        digest = sha256_of(data)
        if generation == 1 and commit.keyring is not None and not digest.matches(commit.keyring):
            raise IntegrityError(f"{what} has digest {digest}, and COMMIT pins {commit.keyring}")
        keyring = Keyring.decode(data, what)
        if (keyring.generation, keyring.run, keyring.name) != (generation, commit.run, commit.name):
            raise IntegrityError(
                f"{what} says that it is generation {keyring.generation} of {keyring.name} of run "
                f"{keyring.run}"
            )
    except ObjectNotFoundError:
        problem = IntegrityError(f"{what} is absent")
        return FoundKeyring(generation=generation, problem=problem, is_absent=True)
    except (IntegrityError, UnsupportedFormatError) as error:
        return FoundKeyring(generation=generation, digest=digest, problem=error)
    return FoundKeyring(generation=generation, digest=digest, keyring=keyring)


@dataclass(slots=True)
class Findings:
    """Why keyrings were passed over, or an identity did not open one."""

    errors: list[StrongroomError] = field(default_factory=list)

    def texts(self) -> tuple[str, ...]:
        return tuple(str(error) for error in self.errors)

    def worst(self) -> StrongroomError:
        """What they come to, read with the most caution: what may pass, or be granted, is no damage."""
        for kind in (KeyServiceError, NoKeyError, UnsupportedFormatError, IntegrityError):
            told = [error for error in self.errors if isinstance(error, kind)]
            if told:
                return told[0] if len(told) == 1 else kind("; ".join(map(str, told)))
        raise ConfigError("nothing was found, so there is nothing to tell")


class Standing:
    """The generations that stand at one moment, each read once.

    Args:
        numbers: of all of them, newest first.
        records: the checkpoint's sealed files.
    """

    def __init__(
        self, store: Store, commit: Commit, numbers: Sequence[int], records: Sequence[FileRecord]
    ) -> None:
        self.numbers: Final = tuple(numbers)
        self._store = store
        self._commit = commit
        self._paths = {record.path for record in records}
        self._found: dict[int, FoundKeyring] = {}

    @property
    def next_generation(self) -> int:
        """A number that nothing stands at.

        Raises:
            ConfigError: there is none left.
        """
        newest = self.numbers[0]
        if newest >= MAX_KEYRING:
            raise ConfigError(
                f"{keyring_key(self._commit.name, newest)} has the last number that there is, so no keyring "
                f"can follow it; remove those that no rotation has made"
            )
        return newest + 1

    def before(self, generation: int) -> tuple[int, ...]:
        """The numbers of what is older."""
        return tuple(number for number in self.numbers if number < generation)

    def whole(self, findings: Findings) -> Iterator[Keyring]:
        """Keyrings that could be gone by, in the order in which readers try them."""
        for number in (*[number for number in self.numbers if number > 1][:_MAX_TRIED], 1):
            found = self._find(number)
            if found.keyring is not None:
                yield found.keyring
            elif found.problem is not None:
                findings.errors.append(found.problem)

    def older(self, keyring: Keyring) -> tuple[Keyring, ...]:
        """Those before a keyring, newest first."""
        found = (self._find(number).keyring for number in self.before(keyring.generation))
        return tuple(each for each in found if each is not None)

    def above(self, generation: int) -> tuple[Keyring, ...]:
        """Those after a number that are whole."""
        found = (self._find(number).keyring for number in self.numbers if number > generation)
        return tuple(each for each in found if each is not None)

    @property
    def has_vanished(self) -> bool:
        """Whether one that was listed was not there when it was read."""
        return any(self._found[number].is_absent for number in self.numbers if number in self._found)

    def pinned_wraps(self, keyring: Keyring) -> frozenset[str]:
        """Ids whose wraps are, to the byte, those of the first keyring, which the commit pins."""
        first = self._find(1).keyring
        if first is None or first.wrap != keyring.wrap:
            return frozenset()
        if first.wrap == "checkpoint" and first.keys != keyring.keys:
            return frozenset()  # they may be of another key of the checkpoint
        return frozenset(
            entry.id
            for entry in keyring.recipients
            if wraps_of(keyring, entry.id) == wraps_of(first, entry.id)
        )

    def is_pinned(self, keyring: Keyring) -> bool:
        """Whether a keyring's files' keys are known to be right without opening it.

        What wraps the checkpoint's key is then its keeper's to judge, who binds it to this checkpoint.
        """
        if keyring.generation == 1:
            return True
        first = self._find(1).keyring
        return first is not None and keyring.wrap == first.wrap == "checkpoint" and keyring.keys == first.keys

    @property
    def newest_digest(self) -> Digest | None:
        """SHA-256 of what stands at the highest number, be it damaged or not; None: it cannot be read."""
        return self._find(self.numbers[0]).digest

    def _find(self, number: int) -> FoundKeyring:
        if number not in self._found:
            self._found[number] = self._completed(find_keyring(self._store, self._commit, number))
        return self._found[number]

    def _completed(self, found: FoundKeyring) -> FoundKeyring:
        """With the keys of the checkpoint's files and of no others; a problem where one is lacking."""
        if found.keyring is None:
            return found
        keys = tuple(key for key in found.keyring.keys if key.path in self._paths)
        if len(keys) == len(self._paths):
            return replace(found, keyring=replace(found.keyring, keys=keys))
        missing = min(self._paths - {key.path for key in keys})
        problem = f"keyring {found.generation} of {self._commit.name} lacks the key of {missing}"
        return replace(found, keyring=None, problem=IntegrityError(problem))
