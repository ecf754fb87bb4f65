"""Running a few tasks at once, also while the interpreter is ending.

`concurrent.futures` takes no more work once the main thread has ended, which is when the last
save of a script that never called ``close`` is still being written. Plain threads do, and the
interpreter waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

__all__ = ["run_all", "start"]

_WAKE_S: Final = 0.1
"""How late an interrupt is seen at most by who waits for tasks."""

_T = TypeVar("_T")


def start(task: Callable[[], _T], *, name: str, future: Future[_T] | None = None) -> Future[_T]:
    """Run a task on a thread of its own, for which the interpreter waits before it ends.

    Args:
        future: told of the task's end. When this raises (an interrupt, no thread to be had), it is
            cancelled where the task never runs, and else follows it all the same.
    """
    followed: Future[_T] = Future() if future is None else future
    is_let_go = threading.Event()

    def run() -> None:
        # Else it would keep the interpreter for a whole switch interval (5 ms) before its starter,
        # which may be training, gets it back.
        is_let_go.wait()
        if followed.set_running_or_notify_cancel():
            _settle(task, followed)

    try:
        threading.Thread(target=run, name=name, daemon=False).start()
    except BaseException:
        # An interrupt comes most likely here, where start() waits for the thread.
        followed.cancel()
        raise
    finally:
        is_let_go.set()
    return followed


def run_all(tasks: Sequence[Callable[[], _T]], *, workers: int, name: str) -> list[_T]:
    """Run tasks on up to ``workers`` threads; return their results in the order of the tasks.

    When one fails, none is begun any more; the error is raised once those under way have ended,
    so that nothing of them goes on behind the caller's back. An interrupt is raised at once, and
    none is begun any more either.
    """
    if len(tasks) <= 1 or workers <= 1:
        return [task() for task in tasks]
    results: list[Future[_T]] = [Future() for _ in tasks]
    waiting = iter(list(zip(tasks, results, strict=True)))
    lock = threading.Lock()
    has_failed = threading.Event()

    def work() -> None:
        while not has_failed.is_set():
            with lock:
                pair = next(waiting, None)
            if pair is None:
                return
            _settle(*pair)
            if pair[1].exception() is not None:
                has_failed.set()

    threads = [
        threading.Thread(target=work, name=f"{name}-{number}", daemon=False)
        for number in range(min(workers, len(tasks)))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            # A signal may be taken by another thread, and then wakes no wait of this one's that has no end.
            while thread.is_alive():
                thread.join(_WAKE_S)
    except BaseException:
        has_failed.set()
        raise
    for result in results:
        if result.done():
            result.result()
    return [result.result() for result in results]


def _settle(task: Callable[[], _T], future: Future[_T]) -> None:
    try:
        future.set_result(task())
    except BaseException as error:  # noqa: BLE001 - raised again by whoever asks the future
        future.set_exception(error)
