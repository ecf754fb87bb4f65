"""Tiers: where a run's checkpoints lie, the fastest place first, seen as one place.

It owns who is opened by whose credentials, what is there on all tiers together, and where a checkpoint can be
read. How records of several tiers become one is `strongroom.merging`'s; how they come to a tier,
`strongroom.replication`'s.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final

from strongroom.catalog import Catalog, History
from strongroom.config import check_keep
from strongroom.errors import AccessDeniedError, IntegrityError, StoreError
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit
from strongroom.merging import Merged, merge
from strongroom.pace import check_rate
from strongroom.replication.planning import check_apart
from strongroom.retention import RetentionPolicy
from strongroom.roles import Duty, Operation
from strongroom.stores.local import LocalStore
from strongroom.stores.open import open_store

if TYPE_CHECKING:
    from strongroom.roles import Role
    from strongroom.signing import Trust
    from strongroom.stores.base import Store

__all__ = ["Tier", "Tiers"]

_LOG: Final = logging.getLogger("strongroom")


@dataclass(frozen=True, slots=True)
class Tier:
    """A place to which checkpoints are copied after they were committed on the first tier.

    Attributes:
        root: as a `Checkpointer`'s.
        keep: which checkpoints stay there, and are copied there in the first place; None: all.
        max_bytes_per_second: how fast they are copied at most; None: as fast as it can be done.

    Raises:
        ConfigError: an argument cannot work.
    """

    root: str | os.PathLike[str] | Store
    _: KW_ONLY
    keep: RetentionPolicy | None = None
    max_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        check_keep(self.keep)
        check_rate(self.max_bytes_per_second)


class Tiers:
    """One run's tiers.

    Args:
        root: the first tier: saves are committed there.
        further: the others, the fastest first.
        role: by whose credentials they are opened; None: by those of whoever runs this. Of a role that
            saves, a folder of this machine is the job's own, and opened as it is where there are others
            behind it.
        trust: who judges launch records.
        accepts_missing: whether a tier that is out of reach is passed over, with a warning, or an error.

    Attributes:
        accepts_missing: whether a tier that is out of reach is passed over.
        missing: why tiers were out of reach when `history` was asked last; empty where all were seen.
        is_own: whether the first tier is opened as it is, and no role says what may be done there.
        stores: for saving, by tier.
        settings: of the tiers behind the first.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Store,
        further: Sequence[Tier] = (),
        *,
        role: Role | None = None,
        trust: Trust | None = None,
        accepts_missing: bool = False,
    ) -> None:
        roots = (root, *(tier.root for tier in further))
        first = open_store(root) if role is None or further else None
        is_writer = role is None or role.may(Operation.CREATE, Duty.SAVE)
        self.is_own = is_own = role is None or (bool(further) and is_writer and isinstance(first, LocalStore))
        self._role = role
        self._trust = trust
        self.accepts_missing = accepts_missing
        self._is_told = False
        self.missing: tuple[str, ...] = ()
        self._has_stopped_reading = False
        self._merged: Merged | None = None
        self._reading: tuple[Store, ...] = ()
        self._catalogs: tuple[Catalog, ...] = ()
        self.settings = tuple(further)

        def opened(number: int, duty: Duty) -> Store:
            if number == 0 and first is not None and is_own:
                return first
            return open_store(roots[number]) if role is None else role.open(roots[number], duty)

        numbers = range(len(roots))
        self.stores = tuple(opened(number, Duty.SAVE) for number in numbers)
        reading = self.stores if role is None else tuple(opened(number, Duty.RESTORE) for number in numbers)
        self._read_by(reading)
        check_apart(self.uris)

    @property
    def first(self) -> Store:
        """The first tier, for saving."""
        return self.stores[0]

    @property
    def uris(self) -> tuple[str, ...]:
        """What the tiers are called, the first one first."""
        return tuple(store.uri for store in self.stores)

    @property
    def readable(self) -> tuple[Store, ...]:
        """For reading, by tier."""
        return self._reading

    @property
    def own_catalog(self) -> Catalog:
        """What the first tier alone holds, to whom saves."""
        is_read_alike = self._reading[0] is self.first
        return self._catalogs[0] if is_read_alike else Catalog(self.first, self._trust)

    def history(self) -> History:
        """The run as it is now, on all tiers together.

        Raises:
            ConfigError: the tiers are not of one run.
            IntegrityError, UnsupportedFormatError: as `Catalog.history`.
            StoreError: a tier could not be asked, and that is not accepted.
        """
        if len(self._catalogs) == 1:
            return self._catalogs[0].history()
        found: list[History | None] = []
        errors: list[StoreError] = []
        recordless: dict[int, IntegrityError] = {}
        for number, (catalog, uri) in enumerate(zip(self._catalogs, self.uris, strict=True)):
            try:
                found.append(catalog.history())
            except IntegrityError as error:
                # Its run's record is lost or damaged: another tier's will do.
                found.append(None)
                recordless[number] = error
            except StoreError as error:
                if not self.accepts_missing:
                    raise type(error)(
                        f"the tier {uri} could not be looked at, and what is newest may be there: {error}. "
                        "accept_missing_tiers=True goes on without it"
                    ) from error
                found.append(None)
                errors.append(error)
        if len(errors) == len(found):
            raise errors[0]
        run = next((history.run for history in found if history is not None and history.run), None)
        for number, lost in recordless.items():
            if run is None:
                raise lost
            _LOG.warning("%s is read by another tier's record of the run: %s", self.uris[number], lost)
            found[number] = self._catalogs[number].history(stand_in=run)
        self.missing = tuple(str(missed) for missed in errors)
        for missed in errors:
            if not self._is_told:
                _LOG.warning("a tier is out of reach, and what is only there is not seen: %s", missed)
        self._is_told = bool(errors)
        self._merged = merge(found, self.uris)
        return self._merged.history

    def look(self) -> History | None:
        """As `history`; None where nobody lets this process look.

        Raises:
            StoreError: a tier could not be asked.
        """
        try:
            return self.history()
        except AccessDeniedError:
            return None

    def holders(self, commit: Commit) -> tuple[int, ...]:
        """The tiers on which a commit stood when `history` was asked last, the fastest first."""
        if self._merged is None:
            return (0,)
        return self._merged.holders.get(commit, (0,))

    def variants(self, name: CheckpointName) -> tuple[Commit, ...]:
        """All the commits of one name, where tiers hold different ones; else nothing."""
        return () if self._merged is None else self._merged.variants.get(name, ())

    def stop_reading(self) -> None:
        """Let go of the credentials for restoring: what follows reads by those for saving, if it may."""
        if self._role is None or self._has_stopped_reading:
            return
        self._has_stopped_reading = True
        self._role.drop(Duty.RESTORE)
        self._read_by(self.stores)

    def _read_by(self, stores: tuple[Store, ...]) -> None:
        known = dict(zip(map(id, self._reading), self._catalogs, strict=True))
        self._reading = stores
        self._catalogs = tuple(known.get(id(store)) or Catalog(store, self._trust) for store in stores)
        self._merged = None
