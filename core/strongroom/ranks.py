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
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from strongroom.errors import ConfigError, RanksError, RanksMissingError
from strongroom.messages import Message
from strongroom.rounds import LAST_WORD_S, Round, Verdict, check_same_call, name_ranks, wait_for_count

if TYPE_CHECKING:
    from strongroom.channel import Channel

__all__ = ["Lane", "Ranks", "Verdict", "check_same_call", "name_ranks"]

_MEETING_S: Final = 60.0

_FAREWELL: Final = "farewell"


class Ranks:
    """This process among the processes of its job; rank 0 coordinates.

    Building one touches no other process. The first talk opens the connections: it shares one
    small tensor over the job's group, on the calling thread, and never uses the group again.

    Args:
        rank: this process, from 0.
        world_size: how many there are.
        meet: takes how many seconds it may last, and returns a `Channel` to the others; called once
            on every rank. None: there are none.
    """

    def __init__(self, rank: int, world_size: int, meet: Callable[[float], Channel] | None = None) -> None:
        if world_size > 1 and meet is None:
            raise ConfigError(f"{world_size} ranks need a way to meet")
        self.rank = rank
        self.world_size = world_size
        self._meet = meet
        self._process_id = os.getpid()
        self._channel: Channel | None = None
        self._unmet: RanksError | None = None
        self._lanes: dict[str, Lane] = {}
        self._silent: frozenset[int] = frozenset()

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

        def meet(within_s: float) -> Channel:
            from strongroom.meeting import meet_over_group

            return meet_over_group(process_group, rank, world_size, within_s)

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

    def channel(self, within_s: float) -> Channel:
        """The connection to the others; the first call is for all ranks.

        Args:
            within_s: how long it may take to meet.

        Raises:
            RanksError: they cannot be reached; every later call says so too.
        """
        if self._unmet is not None:
            raise self._unmet
        if self._channel is None:
            if self._meet is None:
                raise ConfigError("a job of one rank has nobody to talk to")
            # Never twice: others that have met use the job's group for training by now, and a second
            # meeting would exchange its bytes for theirs.
            self._unmet = RanksMissingError(
                "this rank has not met the others when it first tried to, and only then could it; build a "
                "new Checkpointer on every rank",
                phase="meeting",
            )
            self._channel = self._meet(within_s)
            self._unmet = None
        return self._channel

    def note_silent(self, ranks: Iterable[int]) -> None:
        """Remember who did not answer last: for them nobody waits at the end."""
        self._silent = frozenset(ranks)

    def part(self, wait_s: float) -> None:
        """Say good-bye; the coordinator stays reachable for a while for those who are still reading.

        Args:
            wait_s: how long at most.
        """
        channel = self._channel
        if channel is None or self._process_id != os.getpid():
            # A fork has no say in its parent's connections.
            return
        self._channel, self._lanes = None, {}
        self._unmet = RanksError("this rank has left the others: its Checkpointer was closed", phase="closed")
        with contextlib.suppress(RanksError):
            if self.is_coordinator:
                wait_for_count(channel, _FAREWELL, self.world_size - 1 - len(self._silent), wait_s)
            else:
                channel.add(_FAREWELL, 1, within_s=LAST_WORD_S)
        channel.close()


class Lane:
    """Rounds of agreement among all ranks, one after the other.

    Every rank must make the same calls; one that failed counts, so that ranks which raised in it
    still meet in the next, whatever round of it each had come to.
    """

    def __init__(self, ranks: Ranks, name: str) -> None:
        self._ranks = ranks
        self._name = name
        self._call = 0
        self._round = 0
        self._channel: Channel | None = None
        self._over: list[Round] = []

    def open(self, within_s: float = _MEETING_S) -> Channel:
        """Connect; for a lane whose rounds run on another thread than the first one's."""
        if self._channel is None:
            channel = self._ranks.channel(within_s)
            self._channel = channel if self._name == "main" else channel.beside()
        return self._channel

    def agree(
        self,
        phase: str,
        propose: Callable[[], Message],
        decide: Callable[[list[Message]], Verdict],
        *,
        timeout_s: float,
        linger_s: float = 0.0,
        name: str | None = None,
        goes_on: bool = False,
        is_work: bool = False,
        is_final: bool = False,
    ) -> tuple[Message, Message]:
        """Propose, and return what the coordinator decided: for all, and for this rank.

        Args:
            phase: what the ranks are doing, for errors.
            propose: this rank's message.
            decide: takes every rank's message in rank order; runs on the coordinator alone.
            timeout_s: after which the coordinator waits no more for a rank. The others wait a little
                longer, for word of whom it missed.
            linger_s: how long the coordinator waits until the others have taken the decision, where
                its process may end right after.
            name: the round's own, where calls are not what is counted.
            goes_on: whether this is a further round of the call that the last one began.
            is_final: whether the decision, once made, stands whoever has given up waiting for it.
            is_work: whether the time begins before the proposal and not after it, as where to propose
                is to do the work.

        Raises:
            RanksMissingError: ranks did not answer in time; names them and the phase.
            RanksDisagreeError: another rank is doing something else; names it and both.
            Exception: what ``propose`` or ``decide`` raised, here or (as an error of the same
                class that names the rank) elsewhere.
        """
        if self._ranks.is_alone:
            verdict = decide([propose()])
            return verdict.shared, verdict.own.get(0, Message())
        if name is None:
            self._call, self._round = (self._call, self._round + 1) if goes_on else (self._call + 1, 1)
            name = f"{self._call}.{self._round}"
        channel = self.open(timeout_s)
        channel.phase = phase
        talk = Round(channel, f"{self._name}/{name}", phase, timeout_s, is_work=is_work)
        if not self._ranks.is_coordinator:
            return talk.follow(propose)
        over, self._over = self._over, []
        try:
            return talk.lead(propose, decide, linger_s, is_final=is_final)
        finally:
            # What this round was met in by all ranks, nobody looks back from.
            if talk.has_met:
                for earlier in over:
                    earlier.sweep()
                over = []
            self._over = [*over, talk]
            self._ranks.note_silent(talk.silent)
