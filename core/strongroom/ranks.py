"""The ranks of one job, and how they come to act as one.

`Ranks` is this process among its job's processes. `Ranks.agree` is the one form that their talk
takes: every rank proposes, the coordinator decides from all proposals, every rank gets the
decision; an error anywhere becomes an error everywhere. With one rank it is two function calls.

What is said is the callers' business; how it travels is `strongroom.channel`'s.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from strongroom.errors import ConfigError, RanksError, RanksMissingError
from strongroom.messages import Message, error_members, error_of

if TYPE_CHECKING:
    from strongroom.channel import Channel

__all__ = ["Lane", "Ranks", "Verdict", "name_ranks"]

_GRACE_S: Final = 10.0
"""How much longer than the coordinator the others wait: for word of whom it missed."""

_FAREWELL: Final = "farewell"

_LINGER_AFTER_FAILURE_S: Final = 2.0
"""How long the coordinator then waits: ranks that are dead take nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the coordinator decided.

    Attributes:
        shared: for every rank.
        own: for single ranks, besides.
    """

    shared: Message = field(default_factory=Message)
    own: Mapping[int, Message] = field(default_factory=dict)


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words: ``rank 3``, ``ranks 1, 2``; the first few where there are many."""
    listed = sorted(ranks)
    few = ", ".join(map(str, listed[:12]))
    more = f" and {len(listed) - 12} more" if len(listed) > 12 else ""
    return f"rank{'s' if len(listed) > 1 else ''} {few}{more}"


class Ranks:
    """This process among the processes of its job; rank 0 coordinates.

    Building one touches no other process. The first talk opens the connections: it shares one
    small tensor over the job's group, on the calling thread, and never uses the group again.

    Args:
        rank: this process, from 0.
        world_size: how many there are.
        meet: returns a `Channel` to the others; called once on every rank. None: there are none.
    """

    def __init__(self, rank: int, world_size: int, meet: Callable[[], Channel] | None = None) -> None:
        if world_size > 1 and meet is None:
            raise ConfigError(f"{world_size} ranks need a way to meet")
        self.rank = rank
        self.world_size = world_size
        self._meet = meet
        self._channel: Channel | None = None
        self._lanes: dict[str, Lane] = {}

    @classmethod
    def of_this_process(cls, process_group: Any = None, environment: Mapping[str, str] = os.environ) -> Ranks:
        """Who this process is: by torch.distributed if it is running, else the only one.

        Args:
            process_group: the processes that save together; None: all.

        Raises:
            ConfigError: the job has several processes and torch.distributed is not running, or
                this process is not in the group.
        """
        # A process that never imported torch.distributed cannot be part of a group.
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            if process_group is not None:
                raise ConfigError("process_group was given, and torch.distributed is not initialized")
            launched = environment.get("WORLD_SIZE", "1")
            if launched.isdecimal() and int(launched) > 1:
                raise ConfigError(
                    f"WORLD_SIZE says that this job has {launched} processes, and torch.distributed is not "
                    "initialized: call torch.distributed.init_process_group before building a Checkpointer"
                )
            return cls(0, 1)
        rank = int(distributed.get_rank(process_group))
        world_size = int(distributed.get_world_size(process_group))
        if rank < 0:
            raise ConfigError(
                "this process is not in the process_group that was given; build a Checkpointer "
                "on its members only"
            )
        if world_size == 1:
            return cls(0, 1)

        def meet() -> Channel:
            from strongroom.meeting import meet_over_group

            return meet_over_group(process_group, rank, world_size)

        return cls(rank, world_size, meet)

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides, writes the manifest and commits."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1

    def lane(self, name: str) -> Lane:
        """The talk of one thread at a time; each lane counts its own rounds."""
        if name not in self._lanes:
            self._lanes[name] = Lane(self, name)
        return self._lanes[name]

    def channel(self) -> Channel:
        """The connection to the others; the first call is for all ranks.

        Raises:
            RanksError: they cannot be reached.
        """
        if self._channel is None:
            if self._meet is None:
                raise ConfigError("a job of one rank has nobody to talk to")
            self._channel = self._meet()
        return self._channel

    def part(self, wait_s: float) -> None:
        """Say good-bye; the coordinator stays reachable for a while for those who are still reading.

        Args:
            wait_s: how long at most.
        """
        channel, self._channel = self._channel, None
        self._lanes.clear()
        if channel is None:
            return
        with contextlib.suppress(RanksError):
            if not self.is_coordinator:
                channel.add(_FAREWELL, 1)
                return
            wait_for_count(channel, _FAREWELL, self.world_size - 1, wait_s)


def wait_for_count(channel: Channel, key: str, count: int, bound_s: float) -> None:
    """Return once a counter has come that far, or after so many seconds."""
    until = time.monotonic() + bound_s
    pause_s = 0.001
    while time.monotonic() < until and channel.add(key, 0) < count:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


class Lane:
    """Rounds of agreement among all ranks, one after the other.

    Every rank must go through the same rounds; a round that failed counts, so that ranks which
    raised in it still meet in the next.
    """

    def __init__(self, ranks: Ranks, name: str) -> None:
        self._ranks = ranks
        self._name = name
        self._round = 0
        self._channel: Channel | None = None
        self._stale: list[str] = []

    def open(self) -> None:
        """Connect; for a lane whose rounds run on another thread than the first one's."""
        if self._channel is None and not self._ranks.is_alone:
            channel = self._ranks.channel()
            self._channel = channel if self._name == "main" else channel.beside()

    def agree(
        self,
        phase: str,
        propose: Callable[[], Message],
        decide: Callable[[list[Message]], Verdict],
        *,
        timeout_s: float,
        linger_s: float = 0.0,
    ) -> tuple[Message, Message]:
        """Propose, and return what the coordinator decided: for all, and for this rank.

        Args:
            phase: what the ranks are doing, for errors.
            propose: this rank's message.
            decide: takes every rank's message in rank order; runs on the coordinator alone.
            timeout_s: after which the coordinator waits no more for a rank.
            linger_s: how long the coordinator waits until the others have taken the decision, where
                its process may end right after.

        Raises:
            RanksMissingError: ranks did not answer in time; names them and the phase.
            Exception: what ``propose`` or ``decide`` raised, here or (as an error of the same
                class that names the rank) elsewhere.
        """
        if self._ranks.is_alone:
            verdict = decide([propose()])
            return verdict.shared, verdict.own.get(0, Message())
        self._round += 1
        self.open()
        talk = _Round(self._channel, self._ranks, f"{self._name}/{self._round}/{phase}", phase)  # type: ignore[arg-type]
        if self._ranks.is_coordinator:
            stale, self._stale = self._stale, talk.keys
            return talk.lead(propose, decide, timeout_s, linger_s, stale)
        return talk.follow(propose, timeout_s)


class _Round:
    """One round on one rank."""

    def __init__(self, channel: Channel, ranks: Ranks, prefix: str, phase: str) -> None:
        self._channel = channel
        self._ranks = ranks
        self._phase = phase
        self._proposal = f"{prefix}/proposal/"
        self._verdict = f"{prefix}/verdict"
        self._own = f"{prefix}/own/"
        self._withdrawn = f"{prefix}/withdrawn"
        self._acks = f"{prefix}/acks"

    @property
    def keys(self) -> list[str]:
        """What the round leaves behind; nobody needs it once all ranks are in the next one."""
        others = range(self._ranks.world_size)
        return [self._verdict, self._withdrawn, self._acks, *(f"{self._own}{rank}" for rank in others)]

    def lead(
        self,
        propose: Callable[[], Message],
        decide: Callable[[list[Message]], Verdict],
        timeout_s: float,
        linger_s: float,
        stale: Sequence[str],
    ) -> tuple[Message, Message]:
        try:
            mine = propose()
            until = time.monotonic() + timeout_s
            others = self._gather(until, timeout_s)
            self._channel.drop(stale)
            failed = [rank for rank, message in enumerate(others, start=1) if "error" in message.members]
            if failed:
                raise _FailedElsewhereError(failed[0], others[failed[0] - 1].members["error"])
            verdict = decide([mine, *others])
            for rank, message in verdict.own.items():
                if rank != 0:
                    self._channel.post(f"{self._own}{rank}", message.encode())
            if self._channel.is_there(self._withdrawn):
                raise RanksMissingError(
                    f"a rank gave up waiting for rank 0 ({self._phase}), which came too late; nothing was "
                    "done",
                    ranks=(0,),
                    phase=self._phase,
                )
        except _FailedElsewhereError as failed_elsewhere:
            self._tell(failed_elsewhere.rank, failed_elsewhere.members)
            self._linger(linger_s)
            raise error_of(failed_elsewhere.members, rank=failed_elsewhere.rank, phase=self._phase) from None
        except BaseException as error:
            self._tell(0, error_members(error))
            self._linger(min(linger_s, _LINGER_AFTER_FAILURE_S))
            raise
        self._channel.post(
            self._verdict,
            Message(
                members={"own": sorted(verdict.own), "said": dict(verdict.shared.members)},
                pieces=verdict.shared.pieces,
            ).encode(),
        )
        self._linger(linger_s)
        return verdict.shared, verdict.own.get(0, Message())

    def _linger(self, bound_s: float) -> None:
        with contextlib.suppress(RanksError):
            wait_for_count(self._channel, self._acks, self._ranks.world_size - 1, bound_s)

    def follow(self, propose: Callable[[], Message], timeout_s: float) -> tuple[Message, Message]:
        key = f"{self._proposal}{self._ranks.rank}"
        try:
            message = propose()
        except BaseException as error:
            self._channel.post(key, Message(members={"error": error_members(error)}).encode())
            raise
        self._channel.post(key, message.encode())
        until = time.monotonic() + timeout_s + _GRACE_S
        own = Message()
        try:
            verdict = Message.decode(self._channel.read(self._verdict, until=until, missing=self._lost))
            if self._ranks.rank in verdict.members.get("own", ()):
                own = Message.decode(
                    self._channel.read(f"{self._own}{self._ranks.rank}", until=until, missing=self._lost)
                )
        except BaseException:
            self._withdraw()
            raise
        self._channel.add(self._acks, 1)
        if "failed" in verdict.members:
            raise error_of(verdict.members["error"], rank=verdict.members["failed"], phase=self._phase)
        return Message(members=verdict.members["said"], pieces=verdict.pieces), own

    def _gather(self, until: float, timeout_s: float) -> list[Message]:
        keys = [f"{self._proposal}{rank}" for rank in range(1, self._ranks.world_size)]

        def missing(places: list[int]) -> RanksError:
            ranks = [place + 1 for place in places]
            return RanksMissingError(
                f"{name_ranks(ranks)} did not answer within {timeout_s:g} s ({self._phase}): dead, stopped, "
                "slow, or not called. Every rank must make the same calls; a larger timeout_s gives slow "
                "ones more time",
                ranks=ranks,
                phase=self._phase,
            )

        messages = self._channel.read_all(keys, until=until, missing=missing)
        self._channel.drop(keys)
        return [Message.decode(data) for data in messages]

    def _tell(self, rank: int, members: Mapping[str, Any]) -> None:
        """Tell everyone that the round failed; whoever cannot be told runs into its own timeout."""
        told = Message(members={"error": dict(members), "failed": rank})
        try:
            self._channel.post(self._verdict, told.encode())
        except RanksError:
            return

    def _withdraw(self) -> None:
        try:
            self._channel.post(self._withdrawn, b"")
        except RanksError:
            return

    def _lost(self) -> RanksMissingError:
        return RanksMissingError(
            f"rank 0, which coordinates, did not decide in time ({self._phase}): it is dead, stopped or "
            "slow, or waits for another rank",
            ranks=(0,),
            phase=self._phase,
        )


class _FailedElsewhereError(Exception):
    """Another rank's error."""

    def __init__(self, rank: int, members: Mapping[str, Any]) -> None:
        super().__init__(rank)
        self.rank = rank
        self.members = members
