"""What one call of ``save`` returns, and how failures in the background reach the training thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from strongroom.catalog import Checkpoint
from strongroom.config import OnFailure, Tolerate
from strongroom.devicecopy import Pending
from strongroom.errors import (
    ConfigError,
    FencedError,
    OutcomeUnknownError,
    StrongroomError,
    WaitTimeoutError,
)

__all__ = ["AwaitCopies", "Failures", "SaveHandle"]

AwaitCopies = Callable[[Checkpoint, float | None], None]
"""Waits, for seconds at most, until a checkpoint stands on every tier."""


class SaveHandle:
    """One call of `Checkpointer.save`.

    Attributes:
        step: the step.
        skipped: None, or why nothing is saved by this call. The handle then stands for the
            checkpoint of that step that there is already, or else for the save that is under way.
    """

    def __init__(
        self, step: int, pending: Pending | None = None, await_copies: AwaitCopies | None = None
    ) -> None:
        self.step = step
        self._pending = pending
        self._await_copies = await_copies
        self.skipped: str | None = None
        self._outcome: Future[Checkpoint] = Future()
        # Itself, or the handle of the save that a skipped call stands for.
        self._save = self
        self._is_failure_told = False

    @classmethod
    def skip(cls, earlier: SaveHandle, reason: str, *, step: int) -> SaveHandle:
        """A handle of a call that saves nothing; its result is ``earlier``'s."""
        handle = cls(step)
        handle.skipped = reason
        handle._outcome = earlier._outcome
        handle._save = earlier._save
        return handle

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Return once the state may be changed freely.

        It may as soon as ``save`` returned, but for tensors on an accelerator with
        ``overlap_device_copy=True``: those may change in the next step of the state's optimizers,
        which waits for the copy, and anywhere else after this.

        Args:
            timeout_s: for the sake of symmetry: copies within a machine are not waited for longer
                than they take.
        """
        if self._save._pending is not None:
            self._save._pending.wait()

    def result(self, timeout_s: float | None = None) -> Checkpoint:
        """The committed checkpoint.

        Args:
            timeout_s: seconds to wait; None: until the save ends, which its deadline bounds.

        Raises:
            SaveError: it did not commit; the cause is attached.
            FencedError: a later writer has taken the run over.
            WaitTimeoutError: it is still under way.
        """
        try:
            return self._outcome.result(timeout_s)
        except FutureTimeoutError:
            if self._outcome.done():
                raise
            raise WaitTimeoutError(
                f"the save of step {self.step} is still under way after {timeout_s:g} s; it goes on in the "
                "background"
            ) from None
        except StrongroomError:
            self._save._is_failure_told = True
            raise

    def replicated(self, timeout_s: float | None = None) -> Checkpoint:
        """The committed checkpoint, once it stands on every tier of ``replicate_to``, verified there.

        Args:
            timeout_s: seconds to wait, from now; None: for as long as it takes, which nothing bounds while a
                tier is out of reach.

        Raises:
            SaveError, FencedError: as `result`.
            ReplicationError: it never will: another writer has taken the run over there, it is damaged on the
                first tier, or a newer one took its place before its turn came.
            WaitTimeoutError: it is still under way.
            ConfigError: there is no other tier.
        """
        save = self._save
        if save._await_copies is None:
            raise ConfigError(
                "replicated() waits for the tiers behind the first one, and this Checkpointer has none; name "
                "them by replicate_to=, or use result()"
            )
        began = time.monotonic()
        checkpoint = self.result(timeout_s)
        left_s = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began))
        save._await_copies(checkpoint, left_s)
        return checkpoint

    def done(self) -> bool:
        """Whether it has committed or failed."""
        return self._outcome.done()

    @property
    def has_failed(self) -> bool:
        """Whether it has ended without a commit."""
        return self._outcome.done() and self._outcome.exception() is not None

    def settle(self, checkpoint: Checkpoint) -> None:
        """Say that it has committed; called once, in the background."""
        self._outcome.set_result(checkpoint)

    def mark_told(self) -> None:
        """Say that the caller knows of its failure already."""
        self._is_failure_told = True

    def fail(self, error: StrongroomError) -> None:
        """Say that it has failed; called once, in the background."""
        self._outcome.set_exception(error)

    def __repr__(self) -> str:
        state = f"skipped: {self.skipped}" if self.skipped else "done" if self.done() else "under way"
        return f"SaveHandle(step={self.step}, {state})"


class Failures:
    """Failed saves: counted, tolerated where that was asked for, else kept until someone is told.

    The background thread notes them, the training thread raises them.
    """

    def __init__(self, on_failure: OnFailure) -> None:
        self._on_failure = on_failure
        self._untold: list[tuple[SaveHandle, StrongroomError]] = []
        self._count = 0
        self._in_a_row = 0
        # Keeps a failure and its count together.
        self._lock = threading.Lock()

    def note(self, handle: SaveHandle, error: StrongroomError) -> int:
        """Take a failure up; how many there have been."""
        with self._lock:
            self._count += 1
            self._in_a_row += 1
            is_tolerated = (
                isinstance(self._on_failure, Tolerate)
                and self._in_a_row <= self._on_failure.consecutive
                # These say that going on may be wrong, which is never tolerable.
                and not isinstance(error, FencedError | OutcomeUnknownError)
            )
            if not is_tolerated:
                self._untold.append((handle, error))
            return self._count

    def end_row(self) -> None:
        """Note that a save has committed."""
        with self._lock:
            self._in_a_row = 0

    def raise_untold(self) -> None:
        """Raise the latest failure that no handle has told either; each is raised once."""
        with self._lock:
            failed = [error for handle, error in self._untold if not handle._is_failure_told]
            self._untold.clear()
        if failed:
            raise failed[-1]
