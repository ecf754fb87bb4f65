"""Whether a run that starts takes up an earlier one: a pure decision with its reason.

Which checkpoint is then taken is the restore's business (the newest whole one), not this module's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from strongroom.errors import CheckpointNotFoundError, ConfigError

__all__ = ["ResumeMode", "ResumePlan", "check_resume_mode", "plan_resume"]

ResumeMode = Literal["auto", "never", "must"]
"""``auto`` takes up a checkpoint where there is one, ``must`` insists on one, ``never`` begins anew."""

_MODES: Final[tuple[str, ...]] = get_args(ResumeMode)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan:
    """Whether to ask for a checkpoint, whether its absence is an error, and why."""

    restore: bool
    required: bool
    reason: str

    def nothing_found(self, root: str) -> str:
        """What to say when ``root`` holds no checkpoint.

        Raises:
            CheckpointNotFoundError: the plan requires one.
        """
        if self.required:
            raise CheckpointNotFoundError(
                f"resume='must', but {root} holds no committed checkpoint; "
                f"check the path, or use resume='auto' for a run's first start"
            )
        return f"{root} holds no checkpoint: the run begins at its first step"


def check_resume_mode(mode: str) -> ResumeMode:
    """Return ``mode`` if it is one.

    Raises:
        ConfigError: it is none.
    """
    if mode not in _MODES:
        raise ConfigError(f"resume must be one of {', '.join(map(repr, _MODES))}; got {mode!r}")
    return mode  # type: ignore[return-value]  # mypy does not narrow by membership


def plan_resume(
    mode: ResumeMode, *, is_first_run: bool, steps_done: int, explicit: str | None = None
) -> ResumePlan:
    """Decide whether a run that starts restores a checkpoint by itself.

    Args:
        mode: what the user chose.
        is_first_run: nothing was trained yet by the object (a trainer, say) that is about to train.
        steps_done: optimizer steps that it has behind it.
        explicit: a checkpoint that the user named for this run by other means.
    """
    if explicit is not None:
        return ResumePlan(restore=False, required=False, reason=f"{explicit} was asked for, and wins")
    if not is_first_run or steps_done > 0:
        return ResumePlan(
            restore=False, required=False, reason=f"training goes on in memory, after step {steps_done}"
        )
    if mode == "never":
        return ResumePlan(
            restore=False, required=False, reason="resume='never': a new line of checkpoints begins"
        )
    return ResumePlan(
        restore=True, required=mode == "must", reason=f"resume={mode!r}: the newest whole checkpoint"
    )
