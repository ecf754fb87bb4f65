"""Questions to keepers of keys, guarded: whatever a keeper does, there is an answer or an error.

A keeper may be anybody's code. It may raise anything, with a key in its text or in the frames that it came
through; return anything; or never end. It knows nothing of keyrings, and counts and paces nothing.
"""

from __future__ import annotations

import contextvars
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Final, Generic, TypeVar

from strongroom.errors import (
    ConfigError,
    FormatError,
    IntegrityError,
    KeyServiceError,
    NoKeyError,
    StrongroomError,
)

__all__ = ["Call", "ask", "results"]

_GRACE_S: Final = 1.0
"""A keeper ends its own call; one that does not is left behind this much later."""

_T = TypeVar("_T")


def ask(question: Callable[[float], _T], *, who: str, within_s: float) -> _T:
    """What a keeper answers to one question.

    Args:
        question: asks it within so many seconds, and looks at what it returned: it runs on a thread of its
            own, so that no frame that an error shows here has held a key.
        who: the keeper, as the policy names it.
        within_s: what it may take.

    Raises:
        ConfigError, IntegrityError, KeyServiceError, NoKeyError: the keeper's own, told by its name.
        KeyServiceError: it raised something else, or did not end.
    """
    ((answer,),) = results([Call([question], who=who, within_s=within_s)])
    return answer


class Call(Generic[_T]):
    """Questions to one keeper of keys, in turn, on a thread of their own.

    The thread is left behind where the keeper does not end, and whatever the keeper does, the answer
    is there or an error that names it: who waits is never left without one.

    Args:
        questions: each is asked with the seconds that it may take.
        who: the keeper, as the policy names it.
        within_s: what each question may take.
        deadline: on the monotonic clock; when all have to be answered.
    """

    def __init__(
        self,
        questions: Sequence[Callable[[float], _T]],
        *,
        who: str,
        within_s: float,
        deadline: float = math.inf,
    ) -> None:
        self.who: Final = who
        self.future: Final[Future[list[_T]]] = Future()
        self.due = math.inf
        """On the monotonic clock: when the keeper has had its time for the question that it is asked."""
        self._questions = questions
        self._within_s = within_s
        self._deadline = deadline
        self._next_question_s()
        # A daemon: what waits for a dead service must not keep the interpreter from ending.
        # The context goes with the question: whoever keeps a record collects what was asked (`keyrequests`).
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(self._run,), name="strongroom-keys", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self.future.set_exception(KeyServiceError(f"{who} could not be asked: {error}"))

    def _run(self) -> None:
        try:
            answers = [question(self._next_question_s()) for question in self._questions]
        except BaseException as error:  # noqa: BLE001 - a keeper that ends its thread is told of as any other
            self.future.set_exception(_told(error, self.who))
        else:
            self.future.set_result(answers)

    def _next_question_s(self) -> float:
        now = time.monotonic()
        within_s = max(0.0, min(self._within_s, self._deadline - now))
        self.due = now + within_s + _GRACE_S
        return within_s

    @property
    def was_out_of_reach(self) -> bool:
        if self.future.done():
            return isinstance(self.future.exception(), KeyServiceError)
        return self.due <= time.monotonic()

    def again(self) -> Call[_T]:
        return Call(self._questions, who=self.who, within_s=self._within_s, deadline=self._deadline)


def results(calls: Sequence[Call[_T]], deadline: float = math.inf) -> list[list[_T]]:
    """What every call returned.

    Args:
        deadline: on the monotonic clock; besides the time that each keeper has for each question.

    Raises:
        StrongroomError: what the first that failed raised.
        KeyServiceError: some did not end in time; names them.
    """
    while True:
        failed = [call.future.exception() for call in calls if call.future.done()]
        for error in failed:
            if error is not None:
                raise error
        pending = [call for call in calls if not call.future.done()]
        if not pending:
            return [call.future.result() for call in calls]
        now = time.monotonic()
        slow = [call.who for call in pending if min(call.due, deadline) <= now]
        if slow:
            raise KeyServiceError(
                f"{', '.join(slow)} did not answer in time; see that it is up and reachable from here, then "
                f"do it again"
            )
        next_s = min(deadline, now + threading.TIMEOUT_MAX, *(call.due for call in pending)) - now
        wait([call.future for call in pending], next_s, return_when=FIRST_EXCEPTION)


def _told(error: BaseException, who: str) -> StrongroomError:
    """An error of a keeper, so that it names the keeper and shows nothing that it may not.

    It is always a new one: what was raised may be of any class, and drags along the frames that it
    came through, with the key in them.
    """
    for kind in (FormatError, IntegrityError, ConfigError, KeyServiceError, NoKeyError):
        if isinstance(error, kind):
            try:
                text = str(error)
            except BaseException:  # noqa: BLE001 - a keeper's own code; it may do anything
                break
            return kind(text if who in text else f"{who}: {text}")
    # Whoever wrote that keeper did not mean it to be shown: its text may hold anything, a key too.
    return KeyServiceError(f"{who} failed with {type(error).__name__}, of which nothing can be shown")
