"""A job's turn at writing a run: its launch, claimed by the coordinator and joined by the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from strongroom import layout
from strongroom.catalog import History
from strongroom.config import Clock
from strongroom.errors import (
    AccessDeniedError,
    ConfigError,
    ObjectNotFoundError,
    RollbackError,
    StoreError,
)
from strongroom.manifest import LAUNCH_BOUNDS, CheckpointRef, Launch, Run
from strongroom.messages import Message
from strongroom.ranks import Ranks, Verdict, name_ranks
from strongroom.signing import NO_GUARD, Floor, Guard, LaunchRequests, Signing
from strongroom.stores.base import Store
from strongroom.tiers import Tiers
from strongroom.transaction import begin_run, claim_launch

__all__ = ["Turn", "Turns", "launch_to_exceed"]

_LOG: Final = logging.getLogger("strongroom")

_DRAWN_RUN_DIGITS: Final = 32
"""Hex digits of a run id that nobody gave."""

_CONSENT: Final = (
    "Find out why, and call restore(accept_older=True) before the first save only if that is meant"
)

_LOOKS_S: Final = (0.05, 0.2, 1.0, 3.0)
"""Pauses between looks for a record that another rank has just written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A launch, and where its line begins."""

    launch: Launch
    parent: CheckpointRef | None
    requests: tuple[str, ...] = ()
    """By which the launch was signed, as key services call them; on the coordinator."""


class Turns:
    """Begins turns under one root.

    Args:
        tiers: where the run lies.
        run_id: the run's id where it was given.
        launch: the launch's number where it was given.
        timeout_s: the deadline of this job's saves, and how long ranks wait for each other.
        signing: who signs launch records; None: nobody.
        guard: what the policy demands, and what remembers how far the run has come.
        draw: random hex digits for ``n`` bytes.

    Attributes:
        current: the turn that this job is in; None: it has not begun one, or has left it.
        found: what the root held when the last turn was begun here; None: it was not looked at.
    """

    def __init__(
        self,
        tiers: Tiers,
        ranks: Ranks,
        *,
        run_id: str | None,
        launch: int | None = None,
        timeout_s: float,
        clock: Clock,
        draw: Callable[[int], str],
        signing: Signing | None = None,
        guard: Guard = NO_GUARD,
    ) -> None:
        self.current: Turn | None = None
        self.found: History | None = None
        self._tiers = tiers
        self._store = tiers.first
        self._ranks = ranks
        self._run_id = run_id
        self._launch = launch
        self._timeout_s = timeout_s
        self._clock = clock
        self._draw = draw
        self._signing = signing
        self._guard = guard

    def begin(self, parent: CheckpointRef | None, *, accept_older: bool = False) -> Turn:
        """Claim a launch; on the coordinator.

        Args:
            parent: the checkpoint that the job goes on from.
            accept_older: whether it was said that the root may be an older one than was seen before.

        Raises:
            ConfigError: the root belongs to another run than the one that was given, or what is saved could
                not be restored by the same policy.
            RollbackError: the root has lost launches that the floor remembers, or is another run's.
            StrongroomError: no launch could be claimed.
        """
        now_ms = self._clock.now_ms()
        # Before a run record is written: a root that lost its own must not get another run's.
        history = self.found = self._look()
        self._guard.check_saves(self._signing)
        above = self._to_exceed(history, accept_older=accept_older)
        # What follows creates, and goes by the credentials for that alone.
        self._tiers.stop_reading()
        run, stores = self._begin_run(history, now_ms)
        if history is not None and len(self._tiers.stores) > 1:
            self._bring_launches(history)
        signing = None if self._signing is None else LaunchRequests(self._signing)
        launch = claim_launch(
            stores,
            run=run.run,
            parent=parent,
            taken=history.launch_numbers if history is not None else (),
            above=above,
            number=self._launch,
            deadline_s=max(1, int(self._timeout_s)),
            now_ms=now_ms,
            signing=signing,
        )
        # A number that was given is one start's, and this one's is taken now.
        self._launch = None
        requests = () if signing is None else signing.requests
        self.current = Turn(launch=launch, parent=parent, requests=requests)
        return self.current

    def _look(self) -> History | None:
        """What the root holds; None to who may not look at it, and was told what there is to know.

        Raises:
            AccessDeniedError: who may not look was told too little.
        """
        try:
            return self._tiers.history()
        except AccessDeniedError as error:
            told = {"run_id": self._run_id, "launch": self._launch}
            missing = [name for name, value in told.items() if value is None]
            if not missing:
                return None
            raise AccessDeniedError(
                f"{error}. A process that may not look at {self._store.uri} cannot find out its "
                f"{' and '.join(missing)}: have the platform give them (run_id= and launch=, or run and "
                "launch in [role]), or name credentials for restoring ([role] restore)"
            ) from error

    def _to_exceed(self, history: History | None, *, accept_older: bool) -> int:
        if history is not None:
            return max(
                launch_to_exceed(self._guard.floor, uri, history, accept_older=accept_older)
                for uri in self._tiers.uris
            )
        floor = self._guard.floor
        highest = floor.highest(self._run_id) if floor is not None and self._run_id is not None else None
        return highest.launch if highest is not None else 0

    def _begin_run(self, history: History | None, now_ms: int) -> tuple[Run, list[Store]]:
        """The run's record on every tier; and the tiers on which it stands, the one that most share first."""
        known = history.run if history is not None else None
        if known is not None:
            self._check_run(known, " and ".join(self._tiers.uris), known)
        stores: list[Store] = []
        for store in self._tiers.stores:
            try:
                run = begin_run(
                    store,
                    draw_run_id=lambda: self._run_id or self._draw(_DRAWN_RUN_DIGITS // 2),
                    now_ms=now_ms,
                    known=known,
                    is_given=self._run_id is not None,
                )
            except StoreError as error:
                if store is self._store or not self._tiers.accepts_missing:
                    raise
                _LOG.warning("the launch is not claimed on %s, which is out of reach: %s", store.uri, error)
                continue
            self._check_run(run, store.uri, known)
            known = run
            stores.append(store)
        if known is None:  # the first tier is never passed over
            raise ConfigError("a run has at least one tier")
        return known, stores[::-1]

    def _bring_launches(self, history: History) -> None:
        """Give the first tier the records of launches that it has lost or never had: its line needs them."""
        own = self._tiers.own_catalog.history()
        for number in sorted(history.launches.keys() - own.launches.keys() - own.damaged_launches.keys()):
            self._store.put_if_absent(layout.launch_key(number), history.launches[number].encode())

    def _check_run(self, run: Run, where: str, known: Run | None) -> None:
        """Raise ConfigError where a tier is another run's than was given, or than another tier is."""
        if self._run_id is not None and run.run != self._run_id:
            raise ConfigError(
                f"{where} belongs to run {run.run}, and run_id={self._run_id!r} was given; each run needs a "
                "root of its own"
            )
        if known is not None and run.run != known.run:
            raise ConfigError(
                f"{where} belongs to run {run.run}, and another tier to run {known.run}; each run needs "
                "roots of its own"
            )

    def join(self, record: bytes) -> Turn:
        """Take part in the launch that the coordinator has claimed, and leave any other."""
        launch = Launch.decode(record, "the coordinator's launch")
        if self.current is None or self.current.launch != launch:
            self.current = Turn(launch=launch, parent=launch.parent)
        return self.current

    def leave(self) -> None:
        """The next save begins another turn."""
        self.current = None

    def meet(self, record: bytes) -> None:
        """See whether every rank finds the launch's record at its root, just as it was written.

        Raises:
            ConfigError: one does not: what it wrote would be missing from the checkpoint.
            RanksError: a rank is missing.
        """
        if self._ranks.is_alone:
            return

        def look() -> Message:
            key = layout.launch_key(Launch.decode(record, "the coordinator's launch").launch)
            return Message(members={"sees_it": _holds(self._store, key, record)})

        def decide(said: list[Message]) -> Verdict:
            blind = [rank for rank, message in enumerate(said) if not message.members["sees_it"]]
            if blind:
                raise ConfigError(
                    f"{name_ranks(blind)} cannot see at {self._store.uri} what rank 0 has written there: the "
                    "root must be one place for all ranks, such as a shared file system"
                )
            return Verdict()

        try:
            self._ranks.lane("main").agree(
                "looking at the root", look, decide, timeout_s=self._timeout_s, goes_on=True
            )
        except BaseException:
            self.leave()
            raise

    def likely_run(self) -> str:
        """The run id that the first save will find, or one as long."""
        if self.current is not None:
            return self.current.launch.run
        history = self._tiers.look()
        found = history.run if history is not None else None
        return found.run if found is not None else self._run_id or "0" * _DRAWN_RUN_DIGITS


def launch_to_exceed(floor: Floor | None, root: str, history: History, *, accept_older: bool) -> int:
    """The launch that a new one has to be above, so that what it saves lies above the floor; 0: any.

    Args:
        history: what the root holds.
        accept_older: whether it was said that the root may be an older one, or another run's, than was seen.

    Raises:
        RollbackError: it is, and that was not said.
        ConfigError, StoreError: what is remembered cannot be read.
    """
    if floor is None:
        return 0
    run = history.run.run if history.run is not None else None
    before = floor.run_of(root)
    if before not in (None, run) and not accept_older:
        whose = f"run {run}'s" if run else "empty"
        raise RollbackError(
            f"{root} is {whose}, and {floor.uri} remembers that it was run {before}'s: "
            f"what was there was taken away or swapped. {_CONSENT}"
        )
    highest = floor.highest(run) if run is not None else None
    if highest is None:
        return 0
    last = max(history.launch_numbers, default=0)
    if not history.has_commits and not accept_older:
        raise RollbackError(
            f"no checkpoint is committed at {root}, and {floor.uri} remembers launch {highest.launch}, step "
            f"{highest.step} of run {run}: they were taken away. {_CONSENT}"
        )
    if last < highest.launch and not accept_older:
        raise RollbackError(
            f"{root} has launches up to {last}, and {floor.uri} remembers launch {highest.launch}, step "
            f"{highest.step} of run {run}: an older copy of the root was put in its place. {_CONSENT}"
        )
    return highest.launch


def _holds(store: Store, key: str, expected: bytes) -> bool:
    """Whether a store holds exactly this; True where this role may not look."""
    for pause_s in (*_LOOKS_S, None):
        try:
            return store.read(key, limit_bytes=LAUNCH_BOUNDS.length_bytes) == expected
        except AccessDeniedError:
            return True
        except ObjectNotFoundError:
            if pause_s is None:
                return False
            # A network file system may take a moment to show a new name to other hosts.
            time.sleep(pause_s)
    return False
