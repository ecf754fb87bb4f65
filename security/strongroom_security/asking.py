"""One question to one keeper of keys, guarded: whatever the keeper does, there is an answer or an error.

A keeper may be anybody's code. It may raise anything, with a key in its text or in the frames that it came
through; return anything; or never end. It knows nothing of keyrings, and counts and paces nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final, TypeVar

from strongroom.errors import (
    ConfigError,
    FormatError,
    IntegrityError,
    KeyServiceError,
    NoKeyError,
    StrongroomError,
)

__all__ = ["ask"]

_GRACE_S: Final = 1.0
"""A keeper ends its own call; one that does not is left behind this much later."""

_T = TypeVar("_T")


def ask(question: Callable[[float], _T], *, who: str, within_s: float) -> _T:
    """What a keeper answers.

    Args:
        question: asks it within so many seconds, and looks at what it returned: it runs on a thread of its
            own, so that no frame that an error shows here has held a key.
        who: the keeper, as the policy names it.
        within_s: what it may take.

    Raises:
        ConfigError, IntegrityError, KeyServiceError, NoKeyError: the keeper's own, told by its name.
        KeyServiceError: it raised something else, or did not end.
    """
    answer: Future[_T] = Future()

    def run() -> None:
        try:
            found = question(within_s)
        except BaseException as error:  # noqa: BLE001 - one that ends its thread is told of as any other
            answer.set_exception(_told(error, who))
        else:
            answer.set_result(found)

    try:
        # A daemon: what waits for a dead service must not keep the interpreter from ending.
        threading.Thread(target=run, name="strongroom-keys", daemon=True).start()
    except RuntimeError as error:
        raise KeyServiceError(f"{who} could not be asked: {error}") from None
    wait([answer], within_s + _GRACE_S)
    if not answer.done():
        raise KeyServiceError(
            f"{who} did not answer in time; see that it is up and reachable from here, then do it again"
        )
    return answer.result()


def _told(error: BaseException, who: str) -> StrongroomError:
    """An error that names the keeper and shows nothing that it may not; always a new one."""
    for kind in (FormatError, IntegrityError, ConfigError, KeyServiceError, NoKeyError):
        if isinstance(error, kind):
            try:
                text = str(error)
            except BaseException:  # noqa: BLE001 - a keeper's own code; it may do anything
                break
            return kind(text if who in text else f"{who}: {text}")
    # Whoever wrote that keeper did not mean it to be shown: its text may hold anything, a key too.
    return KeyServiceError(f"{who} failed with {type(error).__name__}, of which nothing can be shown")
