"""What tells a process that it must stop soon: signals, and notices that a user's function knows of.

Telling is all that happens here. A signal's handler takes a note and returns; what follows (the ranks agree
where to stop, save there, end) is for `strongroom.resume.stopping` and the front end, between two steps.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from strongroom.errors import ConfigError

__all__ = ["NoticeWatch", "SpotNotice", "StopNotice", "StopSignals", "check_signals"]

SpotNotice = Callable[[], "bool | str | None"]
"""A user's function: whether this host is about to be taken away, or why in a few words."""

Tell = Callable[["StopNotice"], None]

_NO_SIGNAL_STATUS: Final = 128 + signal.SIGTERM
"""The exit status of a stop that no signal asked for: as if one had. 0 would say that the job is done."""

_STOPPING: Final = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU", "SIGQUIT")
"""Signals that job managers send ahead of the end, or that a terminal sends. Others mean a fault, or stop no
program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopNotice:
    """Why a run is to stop.

    Attributes:
        reason: in a few words.
        signal: the number of the signal that said so; None: none did.
        rank: who was told.
    """

    reason: str
    signal: int | None = None
    rank: int = 0

    @property
    def exit_status(self) -> int:
        """What the process should end with: 128 and the signal's number, as a shell has it."""
        return _NO_SIGNAL_STATUS if self.signal is None else 128 + self.signal

    def to_state(self) -> dict[str, Any]:
        """As members of a message between ranks."""
        return {"reason": self.reason, "signal": self.signal, "rank": self.rank}

    @classmethod
    def from_state(cls, state: Any) -> StopNotice:
        """Read what `to_state` gave."""
        return cls(reason=state["reason"], signal=state["signal"], rank=state["rank"])


def check_signals(names: Sequence[str]) -> tuple[signal.Signals, ...]:
    """The signals of these names (``"SIGTERM"``), each once.

    Raises:
        ConfigError: one is no signal, or none that can mean "stop soon" here.
    """
    if isinstance(names, str):
        raise ConfigError(f"signals are given as a list of names, such as ['SIGTERM']; got {names!r}")
    found: list[signal.Signals] = []
    for name in names:
        if name not in _STOPPING or not hasattr(signal, name):
            raise ConfigError(
                f"{name!r} cannot tell a run to stop; use names among {', '.join(_STOPPING)}, "
                f"or none at all to leave signals alone"
            )
        found.append(signal.Signals[name])
    return tuple(dict.fromkeys(found))


class StopSignals:
    """Handlers that take a note, for as long as a run trains.

    Each calls whatever handler of the program was there before, so that a user's own goes on working; one
    that would end the process at once (the default action, ``KeyboardInterrupt``) waits: a signal that asks
    to stop is answered between two steps. ``SIGINT`` a second time is not waited with.

    A fork made meanwhile has the handlers too. There ``SIGUSR1`` and its like do nothing, where they would
    have killed a data loader's worker; every other signal does what it would have done without us.

    Args:
        signals: which.
        tell: is called inside the handler; must not take a lock.
        rank: who is told.
    """

    def __init__(self, signals: Sequence[signal.Signals], tell: Tell, *, rank: int = 0) -> None:
        self._signals = tuple(signals)
        self._tell = tell
        self._rank = rank
        self._before: dict[int, Any] = {}
        self._told: set[int] = set()
        self._process_id = os.getpid()
        self._is_active = False

    def install(self) -> str | None:
        """Put the handlers in place; when repeated, on top of what others have put there meanwhile.

        Returns:
            None, or why signals are not heeded, in a sentence.
        """
        if not self._signals:
            return None
        if threading.current_thread() is not threading.main_thread():
            return (
                "signals are not heeded, since training does not run on the main thread, and Python lets no "
                "other one handle them: a job that is told to stop loses what came after its last checkpoint"
            )
        was_active, self._is_active = self._is_active, True
        for number in self._signals:
            current = signal.getsignal(number)
            if current == self._handle:
                continue
            if not was_active:
                self._before[number] = current
            signal.signal(number, self._handle)
        return None

    def before(self, number: int) -> Any:
        """The handler that was there when ours came."""
        return self._before.get(number)

    def remove(self) -> None:
        """Put back what was there; harmless when repeated.

        Where someone has put a handler on top meanwhile, it stays, and ours below it only hands on.
        """
        self._is_active = False
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            # None: it was not set by Python, which cannot put it back.
            if before is not None and signal.getsignal(number) == self._handle:
                signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if not self._is_active or os.getpid() != self._process_id:
            self._do_as_before(number, frame, before)
            return
        is_repeated = number in self._told
        self._told.add(number)
        self._tell(StopNotice(reason=signal.Signals(number).name, signal=number, rank=self._rank))
        if before is signal.default_int_handler and not is_repeated:
            return
        if callable(before):
            before(number, frame)

    def _do_as_before(self, number: int, frame: FrameType | None, before: Any) -> None:
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL and (not self._is_active or number not in _FOR_THE_JOB):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_FOR_THE_JOB: Final = frozenset(
    getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2", "SIGXCPU") if hasattr(signal, name)
)
"""What a job manager sends to every process of a job, a loader's workers too, and nobody else to a child."""


class NoticeWatch:
    """Asks a user's function, again and again, on a thread of its own: it may take its time.

    A function that raises is told of once, and asked again. One that never returns keeps nobody waiting.

    Args:
        ask: the function; a true value means stop, a string says why.
        tell: is called with what it said, once.
        complain: is called with a sentence when it raises for the first time.
        every_s: seconds between one answer and the next question.
        rank: who is told.
    """

    def __init__(
        self, ask: SpotNotice, tell: Tell, complain: Callable[[str], None], *, every_s: float, rank: int = 0
    ) -> None:
        self._ask = ask
        self._tell = tell
        self._complain = complain
        self._every_s = every_s
        self._rank = rank
        self._over = threading.Event()

    def start(self) -> None:
        """Begin to ask."""
        # A daemon: a question that is never answered must not keep the interpreter from ending.
        threading.Thread(target=self._watch, name="strongroom-notice", daemon=True).start()

    def stop(self) -> None:
        """Ask no more; a question that is being answered is not waited for."""
        self._over.set()

    def _watch(self) -> None:
        has_complained = False
        while not self._over.is_set():
            said: object = None
            try:
                said = self._ask()
            except Exception as error:  # noqa: BLE001 - the user's function; told below, and asked again
                if not has_complained and not self._over.is_set():
                    has_complained = True
                    self._complain(
                        f"spot_notice raised {error!r:.300}; it is asked again every {self._every_s:g} s, "
                        f"and is not told of again"
                    )
            if said and not self._over.is_set():
                reason = said if isinstance(said, str) else "spot_notice"
                self._tell(StopNotice(reason=reason[:300], rank=self._rank))
                return
            self._over.wait(self._every_s)
