"""The object that a program holds: attached to its Accelerator, it saves the run and resumes it by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from strongroom.frontend import RunOptions
from strongroom.handle import SaveHandle
from strongroom_accelerate import seam
from strongroom_accelerate.arguments import Arguments
from strongroom_accelerate.attached import AttachedRun

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = ["Strongroom"]


class Strongroom:
    """Saves a run under an Accelerator into a root of its own, and takes it up again.

    Made before ``prepare()``. From then on the Accelerator's ``save_state`` and ``load_state`` go to the
    root. All methods are for all ranks, at the same places, as Accelerate's own are.

    Args:
        accelerator: the program's.
        root: where the run lies: a path, a ``file://`` or ``s3://`` URI; one run each.
        every_n_steps: save whenever so many steps of the optimizer were taken; None or 0: not by steps.
        every_n_epochs: save whenever so many epochs are over; None or 0: not by epochs.
        every: save when so much time has passed since the last save; rank 0's clock decides.
        scratch: a folder that all ranks see, where files lie until they stand in a checkpoint that DeepSpeed,
            Megatron-LM or a hook of ``register_save_state_pre_hook`` writes; needed on several hosts. None: a
            temporary folder.
        options: `strongroom.frontend.RunOptions`.

    Raises:
        ConfigError: an argument cannot work, this Accelerator has a Strongroom already, or its version or
            way of training is not supported.
    """

    def __init__(
        self,
        accelerator: Any,
        root: str | os.PathLike[str],
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        every: timedelta | None = None,
        scratch: str | os.PathLike[str] | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        seam.check_supported(accelerator)
        arguments = Arguments.of(
            root,
            every_n_steps=every_n_steps,
            every_n_epochs=every_n_epochs,
            every=every,
            scratch=scratch,
            **options,
        )
        self._run = AttachedRun(accelerator, arguments)

    @property
    def root(self) -> str:
        """Where the run lies."""
        return self._run.root

    @property
    def steps_done(self) -> int:
        """Steps of the optimizer since the run's very beginning."""
        return self._run.standing.steps

    @property
    def epochs_done(self) -> int:
        """Whole epochs since then; one whose batches are all taken is over when the loop asks for a next."""
        return self._run.standing.epochs

    def resume(self) -> bool:
        """Take up the newest whole checkpoint of the root, if there is one; after ``prepare()``.

        Models, optimizers, schedulers, the scaler, registered objects and random states are as they were, and
        each prepared loader goes on where it stood: the next loop over it begins there.

        Returns:
            whether there was one.

        Raises:
            StateMismatchError: it does not fit the program; nothing has changed.
            ...: as `strongroom.Checkpointer.restore`.
        """
        return self._run.resume()

    def step(self) -> SaveHandle | None:
        """A batch is trained on: to be called once for each, when all that belongs to it is done.

        Where gradients are being accumulated, nothing happens until the optimizer has taken its step.

        Returns:
            the save, if one was due.

        Raises:
            SaveError: an earlier save has failed.
            Preempted: the run was told to stop; it is saved. A ``SystemExit``: leave it alone.
            RankFailedError: another rank has failed.
        """
        return self._run.step()

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are still to be trained of so many, by their numbers, counted from 0.

        ::

            for epoch in strongroom.epochs(3):
                for batch in loader:
                    ...
                    strongroom.step()

        An epoch is over, and saved where that is due, when the loop comes back for the next one; so what is
        done after its last batch, such as validation, belongs to it. After the last one the run is saved.
        """
        return self._run.epochs(count)

    def save(self) -> SaveHandle:
        """Save where the run stands, between two steps, whatever is due.

        Raises:
            SaveError: an earlier save has failed.
        """
        return self._run.save_named(None, {})

    def wait(self) -> None:
        """Until what was saved is committed.

        Raises:
            SaveError: it failed.
        """
        self._run.wait()

    def close(self) -> None:
        """The run is over: wait for what is being written, and let the Accelerator be as it was.

        ``accelerator.end_training()`` does this too, and so does leaving a ``with`` block; harmless when
        repeated.

        Raises:
            SaveError, ReplicationError: the last save failed, or does not stand everywhere.
        """
        self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Without an exception, save the last step if it is not saved; with one, save nothing."""
        if error is None:
            try:
                self._run.save_last_step()
            except BaseException as failure:
                self._run.end(failure)
                raise
        self._run.end(error)
