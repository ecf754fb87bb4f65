"""What a run takes up when it begins: the newest whole checkpoint of its root, told in the same words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strongroom.checkpointer import Checkpointer
from strongroom.errors import StateMismatchError
from strongroom.frontend.settings import RunSettings
from strongroom.frontend.voice import Voice
from strongroom.restore import Restored
from strongroom.resume.mode import ResumePlan

__all__ = ["restore_run"]


def restore_run(
    checkpointer: Checkpointer,
    settings: RunSettings,
    template: Mapping[str, Any],
    plan: ResumePlan,
    voice: Voice,
    *,
    written_by: str,
    own_part: str,
    step: int | None = None,
) -> Restored | None:
    """Fill the template from the newest whole checkpoint, if the plan says so; for all ranks.

    Args:
        checkpointer: of the run's root.
        settings: the run's.
        template: models and optimizers as themselves, every other key with None.
        plan: as `strongroom.resume.plan_resume` gives it.
        voice: the front end's.
        written_by: who writes what this front end can take up, for an error.
        own_part: the key that every checkpoint of this front end has, and no other.
        step: this one and no other.

    Returns:
        None where nothing is restored.

    Raises:
        CheckpointNotFoundError: the plan insists on a checkpoint, and there is none.
        StateMismatchError: the checkpoint does not fit the program, or another front end wrote it.
        IntegrityError, RollbackError, ...: as `strongroom.Checkpointer.restore`.
    """
    if not plan.restore:
        voice.info(f"nothing is restored from {settings.root}: {plan.reason}")
        return None
    try:
        restored = checkpointer.restore(template, step=step, accept_older=settings.accept_older, stand_in=0)
    except StateMismatchError as error:
        if own_part in error.missing:
            raise StateMismatchError(
                f"what {settings.root} holds was not written by {written_by}; give this run a root of its "
                f"own, or begin anew here with resume='never'",
                missing=error.missing,
            ) from error
        raise
    if restored is None:
        voice.info(plan.nothing_found(settings.root))
        return None
    for skipped, reason in restored.skipped:
        voice.warn(f"step {skipped} of {settings.root} is damaged and was skipped: {reason}")
    voice.info(f"resuming from step {restored.step} of {settings.root}")
    return restored
