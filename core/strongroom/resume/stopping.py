"""Where all ranks of a job stop, once one of them was told to.

Training has boundaries, between one step and the next, which every rank passes in the same order; a rank
may be a few ahead of another. All must stop at the same one, or those behind wait for ever in a collective.
To ask each other at every boundary would cost every step something, so they do not:

1. On each rank a thread looks every half second whether any rank was told (by a signal, a notice) to stop.
2. If so, the thread *holds* its rank: training waits at the next boundary that it comes to, and the thread
   tells rank 0 which one that is.
3. Rank 0 chooses the furthest of them. Nobody is past it, since everybody is held; those who are not there
   yet go on to it.

No training thread takes part but by waiting, so a rank in the middle of a collective, a validation or a long
step can answer. A boundary at which nothing was said costs a fraction of a microsecond.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from strongroom.errors import RankFailedError, RanksError, RanksMissingError
from strongroom.messages import Message, text_of
from strongroom.ranks import Ranks, name_ranks
from strongroom.resume.preemption import StopNotice
from strongroom.rounds import LAST_WORD_S, wait_for_count

if TYPE_CHECKING:
    from strongroom.channel import Channel

__all__ = ["StopVote"]

_LOG: Final = logging.getLogger("strongroom")

_LOOK_EVERY_S: Final = 0.5

_LOOKS_PER_S: Final = 1000
"""How often rank 0 is asked at most by all ranks together."""

_FAREWELL_S: Final = 10.0

_PHASE: Final = "agreeing where to stop"

_TOLD: Final = "told"
_FAILED: Final = "failed"
_HEARD: Final = "heard"
_DECISION: Final = "decision"


class _End:
    """What the thread is told at the end.

    Args:
        error: why this rank ends before the others, if it does.
    """

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class StopVote:
    """One run's agreement to stop, on one rank. `begin`, `at_boundary` and `end` are for all ranks.

    Args:
        ranks: who they are; no others talk over these.
        timeout_s: how long ranks wait for each other's answer, once one was told.
    """

    def __init__(self, ranks: Ranks, *, timeout_s: float = 60.0) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._look_every_s = max(_LOOK_EVERY_S, ranks.world_size / _LOOKS_PER_S)
        # Its ``put`` may be called from a signal's handler, whatever the interrupted code was doing.
        self._news: SimpleQueue[StopNotice | _End] = SimpleQueue()
        self._lock = threading.Lock()
        self._passed = 0
        self._is_held = False
        self._notice: StopNotice | None = None
        self._decision: Future[tuple[int, StopNotice]] = Future()
        self._thread: threading.Thread | None = None
        self._lost: RanksError | None = None
        self._is_over = threading.Event()

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def passed(self) -> int:
        """How many boundaries this rank has come to."""
        return self._passed

    def begin(self) -> None:
        """Meet the others, and watch.

        Raises:
            RanksError: they cannot be reached.
        """
        if self._ranks.is_alone or self._thread is not None:
            return
        channel = self._ranks.channel(self._timeout_s)
        beside = channel.beside()
        beside.phase = _PHASE
        # Connected here, where a fault is still the caller's to see.
        beside.connect(self._timeout_s)
        self._thread = threading.Thread(
            target=self._watch, args=(beside,), name="strongroom-stopping", daemon=True
        )
        self._thread.start()

    def tell(self, notice: StopNotice) -> None:
        """This process is to stop. May be called on any thread, and in a signal's handler."""
        self._news.put(notice)

    def at_boundary(self) -> StopNotice | None:
        """Say, at the same places on every rank, whether all stop here, and why; afterwards it says so again.

        Raises:
            RankFailedError: another rank has failed; training cannot go on.
            RanksMissingError: this run was told to stop, and ranks do not answer.
        """
        if self._thread is None:
            self._passed += 1
            return self._told_alone()
        with self._lock:
            here = self._passed + 1
            if not self._is_held:
                self._passed = here
                if self._lost is None:
                    return None
        if not self._is_held:
            return self._told_and_lost()
        stop_at, notice = self._await_decision()
        with self._lock:
            self._passed = here
        return notice if here >= stop_at else None

    def end(self, error: BaseException | None = None) -> None:
        """This rank passes no boundary any more.

        Args:
            error: why, if it is not that the run has ended for all. The others are told, and end too.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._news.put(_End(error))
        if error is None and self._ranks.is_coordinator:
            # The thread goes on answering meanwhile: others may be a step behind, and be told now.
            self._ranks.part(_FAREWELL_S)
        else:
            thread.join(2 * LAST_WORD_S)
            self._ranks.part(0.0)
        self._is_over.set()
        thread.join(2 * LAST_WORD_S)

    def _told_alone(self) -> StopNotice | None:
        if self._notice is None and not self._news.empty():
            told = self._news.get()
            self._notice = told if isinstance(told, StopNotice) else None
        return self._notice

    def _told_and_lost(self) -> StopNotice | None:
        if self._lost is not None and not self._news.empty():
            raise self._lost
        return None

    def _await_decision(self) -> tuple[int, StopNotice]:
        # The thread's own waits end before this one.
        bound_s = 2 * self._timeout_s + _FAREWELL_S
        try:
            return self._decision.result(bound_s)
        except FutureTimeoutError:
            raise RanksMissingError(
                f"the ranks did not agree where to stop within {bound_s:g} s; the last committed checkpoint "
                f"is untouched",
                phase=_PHASE,
            ) from None

    # ------------------------------------------------------------------------------------- the thread

    def _watch(self, channel: Channel) -> None:
        try:
            notice = self._await_notice(channel)
            if notice is not None:
                self._settle(*self._vote(channel, notice))
        except RankFailedError as error:
            _LOG.error("%s", error)
            self._fail(error)
        except RanksError as error:
            if self._is_held:
                # Training may be in a collective that a rank is missing from, and not hear of it for long.
                _LOG.error("%s", error)
                self._fail(error)
            else:
                # Not this thread's to end the run: saving finds out by itself whether rank 0 is gone.
                self._lost = error
                if not self._is_over.is_set():
                    _LOG.warning("a notice to stop cannot reach all ranks any more: %s", error)
        finally:
            channel.close()

    def _await_notice(self, channel: Channel) -> StopNotice | None:
        """Until any rank is told; None: the run is over."""
        while not self._is_over.is_set():
            try:
                news = self._news.get(timeout=self._look_every_s)
            except Empty:
                news = None
            if isinstance(news, _End):
                if news.error is not None:
                    if not channel.absent([_FAILED]):
                        # What ended this rank follows from it: of both it is the one worth knowing.
                        self._learn_of_failure(channel)
                    self._tell_of(channel, news.error)
                    return None
                if not self._ranks.is_coordinator:
                    # A vote that comes now must not wait for this rank.
                    channel.post(_ready(self.rank), self._where())
                    return None
            elif news is not None:
                channel.post(_TOLD, Message(members=news.to_state()).encode())
            absent = channel.absent([_TOLD, _FAILED])
            if 1 not in absent:
                self._learn_of_failure(channel)
            if 0 not in absent:
                told = channel.look(_TOLD)
                return None if told is None else StopNotice.from_state(Message.decode(told).members)
        return None

    def _vote(self, channel: Channel, notice: StopNotice) -> tuple[int, StopNotice]:
        with self._lock:
            self._is_held = True
        mine = self._where()
        until = time.monotonic() + self._timeout_s
        if not self._ranks.is_coordinator:
            channel.post(_ready(self.rank), mine)
            answer = channel.read(_DECISION, until=until + LAST_WORD_S, missing=self._no_decision)
            members = Message.decode(answer).members
            if "missing" in members:
                raise self._missing(members["missing"])
            return members["boundary"], StopNotice.from_state(members["notice"])
        try:
            others = {rank: _ready(rank) for rank in range(1, self._ranks.world_size)}
            said = channel.read_all(others, until=until, missing=self._missing, ended=self._ended)
        except RanksMissingError as error:
            channel.post(_DECISION, Message(members={"missing": list(error.ranks)}).encode())
            raise
        boundary = max(Message.decode(one).members["boundary"] for one in (mine, *said))
        decision = {"boundary": boundary, "notice": notice.to_state()}
        channel.post(_DECISION, Message(members=decision).encode())
        return boundary, notice

    def _where(self) -> bytes:
        """The earliest boundary at which this rank can stop."""
        with self._lock:
            return Message(members={"boundary": self._passed + 1}).encode()

    def _tell_of(self, channel: Channel, error: BaseException) -> None:
        why = text_of(error)
        told = f"{type(error).__name__}: {why:.300}" if why else type(error).__name__
        channel.post(_FAILED, Message(members={"rank": self.rank, "error": told}).encode())
        channel.add(_HEARD, 1)
        if self._ranks.is_coordinator:
            # The store ends with this process.
            wait_for_count(channel, _HEARD, self._ranks.world_size, LAST_WORD_S)

    def _learn_of_failure(self, channel: Channel) -> None:
        found = channel.look(_FAILED)
        if found is None:
            return
        channel.add(_HEARD, 1)
        members = Message.decode(found).members
        raise RankFailedError(
            f"rank {members['rank']} has failed ({members['error']}), and training cannot go on without it; "
            f"rank {self.rank} ends at its next step, or when what it waits for gives up. The last committed "
            f"checkpoint is untouched",
            ranks=(members["rank"],),
            phase="training",
        )

    def _settle(self, boundary: int, notice: StopNotice) -> None:
        self._decision.set_result((boundary, notice))

    def _fail(self, error: RanksError) -> None:
        with self._lock:
            self._is_held = True
        self._decision.set_exception(error)

    def _ended(self, ranks: Sequence[int]) -> RanksMissingError:
        return RanksMissingError(
            f"this run was told to stop, and {name_ranks(ranks)} had ended: no checkpoint can be saved "
            f"without all ranks; the last committed one is untouched",
            ranks=ranks,
            phase=_PHASE,
        )

    def _missing(self, ranks: Sequence[int]) -> RanksMissingError:
        return RanksMissingError(
            f"this run was told to stop, and {name_ranks(ranks)}, dead or stopped, did not answer within "
            f"{self._timeout_s:g} s: no checkpoint can be saved without all ranks; the last committed one is "
            f"untouched",
            ranks=ranks,
            phase=_PHASE,
        )

    def _no_decision(self) -> RanksMissingError:
        return RanksMissingError(
            f"this run was told to stop, and rank 0 did not say where within {self._timeout_s:g} s: it is "
            f"dead or stopped. The last committed checkpoint is untouched",
            ranks=(0,),
            phase=_PHASE,
        )


def _ready(rank: int) -> str:
    return f"ready/{rank}"
