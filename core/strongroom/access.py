"""How a checkpoint is opened on every rank of a job, though one rank alone judges and unlocks it.

It owns who verifies signatures and holds a checkpoint against the floor: the coordinator, before anything
is parsed or any key is asked for; the others are told the manifest's digest. And it owns which rank is
handed which keys, and when: those of the index and the documents with the decision to try a checkpoint,
those of shards once a rank has said which it reads. No round of talk is made for it; keys travel with what
`strongroom.restore` agrees on, sealed to each rank's one-off key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from strongroom import layout
from strongroom.auditing import Activity
from strongroom.catalog import History
from strongroom.copies import first_whole
from strongroom.errors import NoKeyError, RollbackError
from strongroom.manifest import Commit
from strongroom.messages import Message
from strongroom.opened import OpenedCheckpoint, open_checkpoint
from strongroom.ranks import Ranks
from strongroom.sealing import Unlocked
from strongroom.signing import Guard
from strongroom.stores.base import Store

__all__ = ["Access"]

_SHARE: Final = 0.75
"""Of the time that ranks wait for each other, what unlocking may take."""


class Access:
    """How a checkpoint is opened on every rank, though one alone judges and unlocks it.

    On the coordinator it holds the checkpoint that is tried and its keys, and hands each rank those
    of the files that it is about to read; on another rank, what it was handed.
    """

    def __init__(
        self,
        guard: Guard,
        ranks: Ranks,
        timeout_s: float,
        activity: Activity,
        stand_in: int | None = None,
    ) -> None:
        # Before the other ranks take this one for dead, who keeps the key is to be named.
        self._within_s = _SHARE * timeout_s
        self._guard = guard
        self._activity = activity
        self._stand_in = stand_in
        self._sealing = sealing = guard.sealing
        self._ranks = ranks
        self._admitted: OpenedCheckpoint | None = None
        self._own = sealing.one_off() if sealing is not None and not ranks.is_alone else None
        self._publics: list[bytes] = []
        self._unlocked: Unlocked | None = None
        self._handed = b""

    def introduce(self) -> dict[str, bytes]:
        """What this rank lets others seal keys to."""
        return {"public": self._own.public} if self._own is not None else {}

    @property
    def fingerprint(self) -> str:
        """Tells what this rank demands of a checkpoint; empty: nothing."""
        return self._guard.fingerprint

    def meet(self, said: Sequence[Message]) -> None:
        """On the coordinator: what each rank lets keys be sealed to; empty where it opens nothing."""
        self._publics = [message.pieces.get("public", b"") for message in said]

    def admit(
        self, roots: Sequence[str], stores: tuple[Store, ...], commit: Commit, *, accept_older: bool
    ) -> dict[int, Message]:
        """On the coordinator: judge a checkpoint, then unlock it.

        Args:
            roots: what the run's root, and its further tiers, are called.
            stores: where the checkpoint stands.

        Returns:
            what each rank needs to hold it against its state.

        Raises:
            AuditError: it could not be put on record first, and nothing of it was read.
            IntegrityError: it is damaged; or not signed, or not sealed, where it should be.
            RollbackError: it is below the floor, and ``accept_older`` was not said.
            NoKeyError, KeyServiceError: it cannot be unlocked here.
        """
        self._unlocked = self._admitted = None
        self._activity.intend(commit.run, commit.name, root=stores[0].uri)
        must_unlock = self._sealing is not None and not self._ranks.is_alone and commit.keyring is not None
        if not must_unlock and self._guard.trust is None and self._guard.floor is None:
            # A rank that is alone unlocks when it first needs a key.
            return {}
        store, *others = stores
        self._admitted = opened = open_checkpoint(store, commit, self._guard, others=tuple(others))
        self._activity.vouched(opened.signers)
        if self._guard.floor is not None and not accept_older:
            for root in roots:
                self._guard.floor.check(root, commit)
        sealing = self._sealing
        if sealing is None or not must_unlock:
            return {}
        self._unlocked = first_whole(
            stores,
            lambda each: sealing.unlock(each, commit, opened.manifest, within_s=self._within_s),
        )
        told = {}
        for rank in range(1, self._ranks.world_size):
            own = layout.rank_state_path(opened.owner_for(rank, self._stand_in))
            paths = (layout.INDEX, layout.STATE, own)
            told[rank] = self._hand(rank, [opened.files[path].path for path in paths if path in opened.files])
        return told

    def remember(self, roots: Sequence[str], commit: Commit) -> None:
        """On the coordinator: lift the floor to a checkpoint that every rank has found whole."""
        for root in roots:
            self._guard.remember(root, commit)

    def check_emptied(self, roots: Sequence[str], history: History) -> None:
        """On the coordinator: refuse to take a root for a new one that checkpoints were taken away from.

        Raises:
            RollbackError: the floor remembers a run here, or a launch went on from a checkpoint.
            ConfigError, StoreError: what is remembered cannot be read.
        """
        floor = self._guard.floor
        for root in roots:
            run = None if floor is None else floor.run_of(root)
            if floor is None or run is None:
                continue
            highest = floor.highest(run)
            seen = "" if highest is None else f", at launch {highest.launch}, step {highest.step}"
            raise RollbackError(
                f"no checkpoint is committed at {root}, and {floor.uri} remembers one of run {run} there"
                f"{seen}: they were taken away. Find out why; accept_older=True begins anew"
            )
        went_on = [launch for launch in history.launches.values() if launch.parent is not None]
        if went_on:
            last = max(went_on, key=lambda launch: launch.launch)
            raise RollbackError(
                f"no checkpoint is committed at {' or '.join(roots)}, and launch {last.launch} went on from "
                f"{last.parent.name if last.parent else 'one'} there: they were taken away. Find out why; "
                "accept_older=True begins anew"
            )

    def hand(self, said: Sequence[Message]) -> dict[int, Message]:
        """On the coordinator: the keys of what each rank said that it reads."""
        if self._unlocked is None:
            return {}
        return {
            rank: self._hand(rank, message.members["files"])
            for rank, message in enumerate(said)
            if rank and message.members.get("files")
        }

    def _hand(self, rank: int, paths: Sequence[str]) -> Message:
        public = self._publics[rank]
        if not public or self._unlocked is None:
            # That rank has no policy, and says so itself when it finds the checkpoint sealed.
            return Message()
        return Message(pieces={"keys": self._unlocked.hand_over(public, paths)})

    def begin(self, own: Message) -> None:
        """What this rank was handed for a checkpoint that is tried now."""
        self._handed = own.pieces.get("keys", b"")
        if not self._ranks.is_coordinator:
            self._unlocked = None

    def add(self, own: Message) -> None:
        """Further keys for it."""
        handed = own.pieces.get("keys", b"")
        if handed and self._unlocked is not None and self._own is not None:
            self._unlocked.take_over(self._own, handed)

    def open(self, stores: tuple[Store, ...], commit: Commit) -> OpenedCheckpoint:
        """Open the checkpoint with what this rank has.

        Args:
            stores: where it stands.

        Raises:
            AuditError: it could not be put on record first, and nothing of it was read.
            IntegrityError, NoKeyError, KeyServiceError, StoreError: it cannot be.
        """
        # Each rank says what it reads itself; the coordinator has, before it judged the checkpoint.
        self._activity.intend(commit.run, commit.name, root=stores[0].uri)
        if self._admitted is not None and self._admitted.commit == commit:
            opened = self._admitted
        else:
            # Judged by the coordinator already, of which the ``COMMIT`` comes that pins the manifest.
            store, *others = stores
            opened = open_checkpoint(store, commit, Guard(sealing=self._sealing), others=tuple(others))
        if opened.manifest.is_sealed and self._sealing is not None and not self._ranks.is_alone:
            if self._unlocked is None and self._own is not None:
                if not self._handed:
                    raise NoKeyError(
                        f"{commit.name} is sealed, and rank 0, which opens it for all ranks, has no policy "
                        "that says how: give every rank the same policy"
                    )
                self._unlocked = self._sealing.locked(opened.manifest)
                self._unlocked.take_over(self._own, self._handed)
            return replace(opened, keys=self._unlocked)
        return opened
