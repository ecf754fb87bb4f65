"""One round of agreement: every rank proposes, the coordinator decides, every rank hears of it.

What a round says and when ranks go through one is `strongroom.ranks`'s and its callers' business;
here is how a round ends, on every rank, whoever fails, dies, stops or gives up in it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from strongroom.errors import FormatError, RanksDisagreeError, RanksError, RanksMissingError
from strongroom.messages import Message, error_members, error_of

if TYPE_CHECKING:
    from strongroom.channel import Channel

__all__ = [
    "LAST_WORD_S",
    "Round",
    "Verdict",
    "check_same_call",
    "name_calls",
    "name_ranks",
    "wait_for_count",
]

_MOST_GRACE_S: Final = 10.0
_LEAST_GRACE_S: Final = 1.0

LAST_WORD_S: Final = 2.0
"""How long an error is held up to be told: by the coordinator, until the others have read it; by
another rank, while the coordinator does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the coordinator decided.

    Attributes:
        shared: for every rank.
        own: for single ranks, besides.
    """

    shared: Message = field(default_factory=Message)
    own: Mapping[int, Message] = field(default_factory=dict)


_MAX_CALLS: Final = 3
"""Different calls that an error tells beside rank 0's."""


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words: ``rank 3``, ``ranks 1, 2``; the first few where there are many."""
    listed = sorted(ranks)
    few = ", ".join(map(str, listed[:12]))
    more = f" and {len(listed) - 12} more" if len(listed) > 12 else ""
    return f"rank{'s' if len(listed) > 1 else ''} {few}{more}"


def name_calls(calls: Sequence[str]) -> str:
    """Which rank called what, each call once and rank 0's first; a few where there are many."""
    callers: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        callers.setdefault(call, []).append(rank)
    (first, _), *others = callers.items()
    words = [f"rank 0 called {first}"]
    words += [f"{name_ranks(ranks)} called {call}" for call, ranks in others[:_MAX_CALLS]]
    more = [rank for _, ranks in others[_MAX_CALLS:] for rank in ranks]
    if more:
        words.append(f"{name_ranks(more)} called otherwise")
    return f"{', '.join(words[:-1])} and {words[-1]}"


def check_same_call(calls: Sequence[str], phase: str) -> None:
    """Raise RanksDisagreeError where ranks were not called alike.

    Args:
        calls: of every rank, in words.
        phase: what they were doing.
    """
    differing = [rank for rank, call in enumerate(calls) if call != calls[0]]
    if differing:
        raise RanksDisagreeError(
            f"{name_calls(calls)}: all ranks must make the same calls, with the same step, in the same order",
            ranks=differing,
            phase=phase,
        )


def wait_for_count(channel: Channel, key: str, count: int, bound_s: float) -> None:
    """Return once a counter has come that far, or after so many seconds."""
    until = time.monotonic() + bound_s
    pause_s = 0.001
    while time.monotonic() < until and channel.add(key, 0) < count:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


class Round:
    """One round on one rank.

    Everything about it stands under keys of its own, so whoever comes late finds how it ended:

    - ``proposal/RANK``: a rank's message or its error; rank 0 leaves a mark that it has come;
    - ``withdrawn``: the error of a rank that proposed and gave up before it heard the decision;
    - ``verdict``: the decision or the error, for all; ``own/RANK``: what is for one rank besides;
    - ``acks``: how many ranks have heard of the end, or raised before it.
    """

    def __init__(self, channel: Channel, prefix: str, phase: str, timeout_s: float, *, is_work: bool) -> None:
        self.has_met = False
        self.silent: frozenset[int] = frozenset()
        self._channel = channel
        self._rank = channel.rank
        self._world_size = channel.world_size
        self._phase = phase
        self._timeout_s = timeout_s
        self._grace_s = min(_MOST_GRACE_S, max(_LEAST_GRACE_S, timeout_s / 4))
        self._until = time.monotonic() + timeout_s if is_work else None
        self._ends_at = 0.0
        self._prefix = prefix
        self._verdict = f"{prefix}/verdict"
        self._withdrawn = f"{prefix}/withdrawn"
        self._acks = f"{prefix}/acks"
        self._is_whole = False

    def _proposal(self, rank: int) -> str:
        return f"{self._prefix}/proposal/{rank}"

    def _own(self, rank: int) -> str:
        return f"{self._prefix}/own/{rank}"

    # ------------------------------------------------------------------------------- the coordinator

    def lead(
        self,
        propose: Callable[[], Message],
        decide: Callable[[list[Message]], Verdict],
        linger_s: float,
        *,
        is_final: bool,
    ) -> tuple[Message, Message]:
        try:
            mine = propose()
            said = [mine, *self._gather()]
            self._check_wanted()
            verdict = decide(said)
            if not is_final:
                self._check_wanted()
            for rank, message in verdict.own.items():
                if rank != 0:
                    self._channel.post(self._own(rank), message.encode())
            told = {"own": sorted(verdict.own), "said": dict(verdict.shared.members)}
            encoded = Message(members=told, pieces=verdict.shared.pieces).encode()
        except _FailedElsewhereError as failed:
            self._tell(failed.rank, failed.members, failed.phase)
            raise error_of(failed.members, rank=failed.rank, phase=failed.phase) from None
        except BaseException as error:
            if isinstance(error, RanksMissingError):
                self.silent = frozenset(error.ranks) - {0}
            self._tell(0, error_members(error), self._phase)
            raise
        self._channel.post(self._verdict, encoded)
        self._linger(linger_s)
        self._is_whole = True
        return verdict.shared, verdict.own.get(0, Message())

    def sweep(self) -> None:
        """Forget what the round left behind."""
        keys = [self._verdict, self._withdrawn, self._acks, self._proposal(0)]
        if self._is_whole:
            # Every rank has taken its own away.
            self._channel.drop(keys)
        else:
            for rank in range(1, self._world_size):
                keys += [self._proposal(rank), self._own(rank)]
            self._channel.sweep(keys)

    def _gather(self) -> list[Message]:
        """What the others propose.

        Raises:
            RanksMissingError: some have not come in time.
            RanksDisagreeError: they are doing something else.
        """
        self._ends_at = until = time.monotonic() + self._timeout_s if self._until is None else self._until
        self._channel.post(self._proposal(0), b"")
        keys = {rank: self._proposal(rank) for rank in range(1, self._world_size)}
        encoded = self._channel.read_all(keys, until=until, missing=self._missing, ended=self._ended)
        self.has_met = True
        said: list[Message] = []
        elsewhere: dict[str, list[int]] = {}
        failed: _FailedElsewhereError | None = None
        for rank, data in enumerate(encoded, start=1):
            message = _decode(data, rank)
            phase = message.members["phase"]
            if "error" in message.members:
                failed = failed or _FailedElsewhereError(rank, message.members["error"], phase)
            elif phase != self._phase:
                elsewhere.setdefault(phase, []).append(rank)
            else:
                said.append(Message(members=message.members["said"], pieces=message.pieces))
        if failed is not None:
            raise failed
        if elsewhere:
            theirs = "; ".join(f"{name_ranks(ranks)}: {phase}" for phase, ranks in elsewhere.items())
            raise RanksDisagreeError(
                f"rank 0: {self._phase}; {theirs}. All ranks must make the same calls in the same order",
                ranks=sorted(rank for ranks in elsewhere.values() for rank in ranks),
                phase=self._phase,
            )
        return said

    def _check_wanted(self) -> None:
        """Raise where a rank waits for the decision no longer."""
        withdrawn = self._channel.look(self._withdrawn)
        if withdrawn is not None:
            members = Message.decode(withdrawn).members
            rank, error = members["rank"], dict(members["error"])
            if error["kind"] == RanksMissingError.__name__:
                # Not "missing" for those who hear this: they know that nothing was decided.
                error |= {"kind": RanksError.__name__, "text": f"rank {rank} gave up: {error['text']}"}
            raise _FailedElsewhereError(rank, error, self._phase)
        late_s = time.monotonic() - self._ends_at - self._grace_s
        if late_s > 0:
            # Not "missing": who hears this knows that nothing was decided.
            raise RanksError(
                f"rank 0 was stopped, or too slow, and comes {late_s:.0f} s after the others gave up waiting "
                f"for it ({self._phase})",
                ranks=(0,),
                phase=self._phase,
            )

    def _ended(self, ranks: Sequence[int]) -> RanksMissingError:
        return RanksMissingError(
            f"{name_ranks(ranks)} ended, or went with the host, and did not answer ({self._phase})"
            f"{self._failed_besides(ranks)}. What it has printed, or the log of its system, says why",
            ranks=ranks,
            phase=self._phase,
        )

    def _missing(self, ranks: Sequence[int]) -> RanksMissingError:
        besides = self._failed_besides(ranks)
        return RanksMissingError(
            f"{name_ranks(ranks)} did not answer within {self._timeout_s:g} s ({self._phase}): dead, "
            f"stopped, slow, or not called{besides}. Every rank must make the same calls; a larger timeout_s "
            "gives slow ones more time",
            ranks=ranks,
            phase=self._phase,
        )

    def _failed_besides(self, absent: Sequence[int]) -> str:
        """An error that another rank has proposed: the likeliest cause of what is missing."""
        for rank in range(1, self._world_size):
            data = None if rank in absent else self._channel.look(self._proposal(rank))
            error = None if data is None else Message.decode(data).members.get("error")
            if error is not None:
                return f". {name_ranks([rank]).capitalize()} has failed meanwhile: {error['text']}"
        return ""

    def _tell(self, rank: int, members: Mapping[str, Any], phase: str) -> None:
        """Tell everyone that the round failed; whoever cannot be told runs into its own timeout."""
        told = Message(members={"error": dict(members), "failed": rank, "phase": phase})
        with contextlib.suppress(RanksError):
            self._channel.post(self._verdict, told.encode())
        self._linger(LAST_WORD_S)

    def _linger(self, bound_s: float) -> None:
        """Stay, so that the others do not take this process's end for the error."""
        if bound_s > 0:
            with contextlib.suppress(RanksError):
                wait_for_count(self._channel, self._acks, self._world_size - 1 - len(self.silent), bound_s)

    # ------------------------------------------------------------------------------ the other ranks

    def follow(self, propose: Callable[[], Message]) -> tuple[Message, Message]:
        mine = self._rank
        encoded: bytes | None = None
        is_posted = False
        own = Message()
        try:
            message = propose()
            members = {"phase": self._phase, "said": dict(message.members)}
            encoded = Message(members=members, pieces=message.pieces).encode()
            now = time.monotonic()
            until = self._grace_s + (now + self._timeout_s if self._until is None else self._until)
            self._channel.post(self._proposal(mine), encoded, within_s=max(until - now, LAST_WORD_S))
            is_posted = True
            verdict = _decode(self._channel.read(self._verdict, until=until, missing=self._undecided), 0)
            if mine in verdict.members.get("own", ()):
                own = _decode(self._channel.read(self._own(mine), until=until, missing=self._undecided), 0)
        except BaseException as error:
            self._give_up(error, is_heard=encoded is not None, is_posted=is_posted)
            raise
        self._acknowledge()
        # Nobody reads these any more: the round has ended.
        self._channel.drop([self._proposal(mine), self._own(mine)])
        if "failed" in verdict.members:
            raise error_of(
                verdict.members["error"], rank=verdict.members["failed"], phase=verdict.members["phase"]
            )
        return Message(members=verdict.members["said"], pieces=verdict.pieces), own

    def _give_up(self, error: BaseException, *, is_heard: bool, is_posted: bool) -> None:
        """Let the coordinator know, if it can be reached, that this rank takes no part."""
        members = error_members(error)
        # Who does not answer is not waited for again; the word is left for when it wakes.
        within_s = LAST_WORD_S if self._channel.is_answering else 0.0
        with contextlib.suppress(RanksError):
            if is_heard:
                # The proposal may be there, whatever this rank knows of it.
                told = Message(members={"error": members, "rank": self._rank})
                self._channel.post(self._withdrawn, told.encode(), within_s=within_s)
            if not is_posted:
                told = Message(members={"error": members, "phase": self._phase})
                self._channel.post(self._proposal(self._rank), told.encode(), within_s=within_s)
            self._acknowledge()

    def _acknowledge(self) -> None:
        if self._channel.is_answering:
            with contextlib.suppress(RanksError):
                self._channel.add(self._acks, 1, within_s=LAST_WORD_S)

    def _undecided(self) -> RanksMissingError:
        """The error of a rank that waited in vain: names those who have not come, or else rank 0."""
        why = ""
        absent: list[int] = []
        try:
            absent = self._channel.absent(
                [self._proposal(rank) for rank in range(self._world_size)], within_s=LAST_WORD_S
            )
        except RanksMissingError:
            why = ", and its process does not answer"
        if absent and absent != [0]:
            return RanksMissingError(
                f"{name_ranks(absent)} did not come within {self._timeout_s:g} s ({self._phase}): dead, "
                "stopped, slow, or not called. Every rank must make the same calls; a larger timeout_s gives "
                "slow ones more time",
                ranks=absent,
                phase=self._phase,
            )
        return RanksMissingError(
            f"rank 0, which coordinates, did not decide within {self._timeout_s:g} s ({self._phase}){why}: "
            "it is dead, stopped or slow, or was not called",
            ranks=(0,),
            phase=self._phase,
        )


def _decode(data: bytes, rank: int) -> Message:
    try:
        return Message.decode(data)
    except FormatError as error:
        raise RanksDisagreeError(f"rank {rank}: {error}", ranks=(rank,), phase="talking") from None


class _FailedElsewhereError(Exception):
    """Another rank's error."""

    def __init__(self, rank: int, members: Mapping[str, Any], phase: str) -> None:
        super().__init__(rank)
        self.rank = rank
        self.members = members
        self.phase = phase
