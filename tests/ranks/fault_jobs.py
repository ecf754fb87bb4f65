"""What ranks run in the tests of faults, and how a rank is made to fail at one place.

A fault is something that one rank does to itself when it comes to a certain place: it raises,
sleeps, kills or stops its own process. Places are reached through what a user hands in: objects
in the state, and the store. Only the copy into host buffers has no such place and is wrapped.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from strongroom import Checkpointer, PerRank, StrongroomError, stage
from strongroom.stores.local import LocalStore
from strongroom.testing import Fault as StoreFault
from strongroom.testing import FaultyStore

__all__ = ["Fault", "Told", "restoring", "restoring_with_faulty_store", "saving", "state_of", "values"]

RAISED = "the fault that the test asked for"


class AskedForError(Exception):
    """What a rank raises that was told to; none of Strongroom's."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What one rank does to itself, and where.

    Attributes:
        kind: ``raises``, ``killed``, ``stopped`` or ``slow``.
        place: ``call``, ``capture``, ``staging``, ``load``, or an operation of the store and a
            pattern of its key: ``put_if_absent launches/``. With ``, after`` at its end: once it is done.
        rank: which rank.
        slow_s: how long a slow rank takes.
    """

    kind: str
    place: str
    rank: int
    slow_s: float = 0.0

    def here(self) -> None:
        """Do it."""
        if self.kind == "raises":
            raise AskedForError(RAISED)
        if self.kind == "slow":
            time.sleep(self.slow_s)
        else:
            # To this very thread: sent to the process it may come to another, and this one goes on a bit.
            signal.pthread_kill(
                threading.get_ident(), signal.SIGKILL if self.kind == "killed" else signal.SIGSTOP
            )


@dataclass(frozen=True, kw_only=True)
class Told:
    """How one call ended on one rank.

    Attributes:
        step: what it gave; None: it raised.
        error: the class of what it raised, or of its cause where that is a failed save's.
        bases: of that class.
        text: of the error.
        ranks: that the error names.
        seconds: how long it took.
    """

    step: int | None
    error: str | None
    bases: tuple[str, ...]
    text: str
    ranks: tuple[int, ...]
    seconds: float


class Switch:
    """Whether a fault is still to come; it comes once."""

    def __init__(self, *faults: Fault) -> None:
        self.waiting = [fault for fault in faults if fault.rank == dist.get_rank()]
        self.is_armed = False

    def at(self, place: str) -> None:
        for fault in self.waiting:
            if self.is_armed and re.match(fault.place + "$", place):
                self.waiting.remove(fault)
                fault.here()
                return


class Stateful:
    """An object in the state."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch

    def state_dict(self) -> dict[str, Any]:
        self.switch.at("capture")
        return {"seen": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.switch.at("load")


class TrippedStore:
    """A store with a switch at each operation."""

    def __init__(self, root: Path, switch: Switch) -> None:
        self._inner = LocalStore(root)
        self._switch = switch

    @property
    def uri(self) -> str:
        return self._inner.uri

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._inner, name)

        def tripped(*arguments: Any, **options: Any) -> Any:
            place = f"{name} {arguments[0]}" if arguments else name
            self._switch.at(place)
            result = operation(*arguments, **options)
            self._switch.at(f"{place}, after")
            return result

        return tripped


def values(step: int) -> torch.Tensor:
    """What the checkpoint of a step holds."""
    return torch.arange(64, dtype=torch.float32) + 1000 * step


def state_of(step: int, switch: Switch | None = None) -> dict[str, Any]:
    return {
        # Eight tensors: each of four ranks stores some of them.
        "w": {f"t{number}": values(step) + number for number in range(8)},
        "object": Stateful(switch or Switch()),
        "mine": PerRank({"rank": dist.get_rank(), "step": step}),
        "step": step,
    }


def holds(state: dict[str, Any], step: int) -> bool:
    return all(torch.equal(state["w"][f"t{number}"], values(step) + number) for number in range(8))


@contextlib.contextmanager
def wrapped_copy(switch: Switch) -> Iterator[None]:
    """The place ``staging``."""
    copy = stage.Stage.copy

    def tripped(self: Any, *arguments: Any, **options: Any) -> Any:
        switch.at("staging")
        return copy(self, *arguments, **options)

    stage.Stage.copy = tripped  # type: ignore[method-assign]
    try:
        yield
    finally:
        stage.Stage.copy = copy  # type: ignore[method-assign]


def told(call: Callable[[], Any]) -> Told:
    began = time.monotonic()
    try:
        step = call()
    except Exception as error:  # noqa: BLE001 - told to the test
        # The cause of a failed save says whose fault it was.
        cause = error.__cause__ if isinstance(error.__cause__, StrongroomError) else error
        return Told(
            step=None,
            error=type(cause).__name__,
            bases=tuple(cls.__name__ for cls in (*type(error).__mro__, *type(cause).__mro__)),
            text=str(error),
            ranks=tuple(getattr(cause, "ranks", ())),
            seconds=time.monotonic() - began,
        )
    return Told(step=step, error=None, bases=(), text="", ranks=(), seconds=time.monotonic() - began)


def saving(root: Path, faults: list[Fault], timeout_s: float, is_last: bool = False) -> list[Told]:
    """Restore what is there, save step 2 with faults, and (whoever lives) step 3 without.

    Args:
        is_last: leave the last one out.
    """
    switch = Switch(*faults)
    checkpointer = Checkpointer(TrippedStore(root, switch), timeout_s=timeout_s)
    state = state_of(0)
    restored = checkpointer.restore(state)
    assert restored is not None
    assert holds(state, 1)
    # None of them is still in it when one fails.
    dist.barrier()
    calls = []
    with wrapped_copy(switch):
        switch.is_armed = True

        def second() -> int:
            switch.at("call")
            return checkpointer.save(2, state_of(2, switch)).result(60).step

        calls.append(told(second))
        switch.is_armed = False
        is_mortal = any(fault.kind in ("killed", "stopped") for fault in faults)
        if not is_mortal and not is_last:
            dist.barrier()
            calls.append(told(lambda: checkpointer.save(3, state_of(3)).result(60).step))
            calls.append(told(checkpointer.close))
    return calls


def restoring(
    root: Path | list[Path],
    faults: list[Fault],
    timeout_s: float,
    tells_skipped: bool = False,
    is_first: bool = False,
) -> list[Told]:
    """Restore with faults, and (whoever lives) again without.

    Args:
        root: of all ranks, or a list of one each.
        tells_skipped: give the checkpoints that were skipped as text.
        is_first: the faulty restore is also the first talk between the ranks.
    """
    switch = Switch(*faults)
    mine = root[dist.get_rank()] if isinstance(root, list) else root
    checkpointer = Checkpointer(TrippedStore(mine, switch), timeout_s=timeout_s)
    skipped: list[str] = []

    def restore() -> int:
        switch.at("call")
        state = state_of(0, switch)
        restored = checkpointer.restore(state)
        assert restored is not None
        assert holds(restored.state, restored.step)
        assert restored.state["mine"] == {"rank": dist.get_rank(), "step": restored.step}
        skipped.extend(f"step {step}: {reason}" for step, reason in restored.skipped)
        return restored.step

    if not is_first:
        checkpointer.restore(only="nothing that is there", strict=False)
    dist.barrier()
    switch.is_armed = True
    calls = [told(restore)]
    switch.is_armed = False
    if tells_skipped:
        calls[0] = replace(calls[0], text="; ".join(skipped))
    if not is_first and not any(fault.kind in ("killed", "stopped") for fault in faults):
        dist.barrier()
        calls.append(told(restore))
        calls.append(told(checkpointer.close))
    return calls


def restoring_with_faulty_store(root: Path, rank: int, operation: str, fault: str, timeout_s: float) -> Told:
    """Restore while the store of one rank fails at each operation of one kind."""
    store: Any = LocalStore(root)
    if dist.get_rank() == rank:
        store = FaultyStore(store, fail_at=1, fault=StoreFault[fault], lasting=True, only=[operation])
    checkpointer = Checkpointer(store, timeout_s=timeout_s)

    def restore() -> int:
        restored = checkpointer.restore(state_of(0))
        assert restored is not None
        return restored.step

    outcome = told(restore)
    checkpointer.close()
    return outcome


def save_steps(root: Path, steps: list[int]) -> list[int]:
    with Checkpointer(root, timeout_s=30) as checkpointer:
        return [checkpointer.save(step, state_of(step)).result(60).step for step in steps]


def go_on(root: Path) -> tuple[list[int], int, bool, int]:
    """A job that comes after: what is listed, what is restored, whether it is whole, and the next save."""
    with Checkpointer(root, timeout_s=30) as checkpointer:
        listed = [checkpoint.step for checkpoint in checkpointer.checkpoints()]
        state = state_of(0)
        restored = checkpointer.restore(state)
        assert restored is not None
        assert not restored.skipped
        is_whole = holds(state, restored.step) and restored.state["mine"] == {
            "rank": dist.get_rank(),
            "step": restored.step,
        }
        return listed, restored.step, is_whole, checkpointer.save(9, state_of(9)).result(60).step
