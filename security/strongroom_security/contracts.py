"""What the contracts for third parties share: a call in a forked child, and whether bytes show a secret."""

from __future__ import annotations

import os
import pickle  # noqa: TID251 - what holds a key must refuse it
import signal
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Final

__all__ = ["WAIT_S", "in_child", "outcome", "shows"]

WAIT_S: Final = 60.0
"""Until a thread or a forked child is taken to hang."""


def outcome(serialise: Callable[[object], object], value: object) -> bytes:
    """What came of it, or the words in which it was refused."""
    try:
        result = serialise(value)
    except (TypeError, pickle.PicklingError) as error:
        return str(error).encode()
    return result if isinstance(result, bytes) else repr(result).encode()


def shows(data: bytes, secrets: list[bytes]) -> bool:
    """Whether bytes hold any part of a secret, as it is or in a usual spelling."""
    for secret in secrets:
        for spelling in (secret, secret.hex().encode(), repr(secret)[2:-1].encode()):
            length = min(8, len(spelling))
            if any(spelling[at : at + length] in data for at in range(len(spelling) - length + 1)):
                return True
    return False


def in_child(call: Callable[[], bytes]) -> bytes:
    """What a call returns in a forked child."""
    receiver, sender = os.pipe()
    with warnings.catch_warnings():
        # That a process with threads forks is what is tried here.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.write(sender, b"\1" + call())
        except BaseException as error:  # noqa: BLE001 - a child that raised would go on as a second pytest
            os.write(sender, b"\0" + "".join(traceback.format_exception(error)).encode()[:60_000])
        finally:
            os._exit(0)
    os.close(sender)
    try:
        # Not by select(), which knows no file descriptor above 1023.
        if not wait([receiver], WAIT_S):
            raise TimeoutError(f"the forked child did not end within {WAIT_S} s")
        answer = os.read(receiver, 65536)
    finally:
        os.close(receiver)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if answer[:1] != b"\1":
        raise AssertionError(answer[1:].decode())
    return answer[1:]
