"""What a `Checkpointer` is given, checked once: each function raises ConfigError that says what is wrong."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from strongroom.catalog import Checkpoint
from strongroom.config import check_count
from strongroom.digest import Digest
from strongroom.errors import ConfigError, FormatError
from strongroom.layout import MAX_LAUNCH, MAX_STEP, CheckpointName
from strongroom.manifest import MAX_BEST, CheckpointRef, check_retention_class, check_run_id
from strongroom.selection import Selection
from strongroom.stores.base import Store
from strongroom.tiers import Tier

if TYPE_CHECKING:
    from strongroom.roles import Role

__all__ = [
    "check_best",
    "check_class",
    "check_launch",
    "check_parent",
    "check_run",
    "check_step",
    "check_tiers",
    "check_told",
    "selection_of",
]


def selection_of(
    strict: bool,
    only: str | Sequence[str] | None,
    rename: Mapping[str, str] | None,
    stand_in: int | None = None,
) -> Selection:
    """Which part of a checkpoint is restored."""
    patterns = (only,) if isinstance(only, str) else None if only is None else tuple(only)
    if stand_in is not None:
        check_count("stand_in", stand_in)
    return Selection(strict=strict, only=patterns, rename=dict(rename or {}), stand_in=stand_in)


def check_step(step: Any) -> int:
    """A step, as an int."""
    # numpy and torch integers are welcome; True, which passes for an int in all three, is not.
    is_bool = isinstance(step, bool) or str(getattr(step, "dtype", "")) in ("bool", "torch.bool")
    try:
        number = None if is_bool else step.__index__()
    except (AttributeError, TypeError):
        number = None
    if number is None or not 0 <= number <= MAX_STEP:
        raise ConfigError(f"step must be an integer from 0 to {MAX_STEP}, got {step!r:.60}")
    return int(number)


def check_best(steps: Any) -> tuple[int, ...]:
    """The steps that a run holds to be its best, the best first."""
    if isinstance(steps, str) or not isinstance(steps, Iterable):
        raise ConfigError(f"best must be steps, the best first, got {steps!r:.60}")
    found = tuple(map(check_step, steps))
    if len(set(found)) != len(found) or len(found) > MAX_BEST:
        raise ConfigError(f"best must name no step twice, and {MAX_BEST} at most, got {found!r:.60}")
    return found


def check_tiers(given: Any) -> tuple[Tier, ...]:
    """The tiers behind the first one."""
    if isinstance(given, str | os.PathLike | Tier | Store) or not isinstance(given, Sequence):
        raise ConfigError(f"replicate_to must be a list of roots or Tier values, got {given!r:.80}")
    return tuple(tier if isinstance(tier, Tier) else Tier(tier) for tier in given)


def check_launch(number: Any) -> int | None:
    """The number of a writer's turn, where one was given."""
    if number is None:
        return None
    if type(number) is not int or not 1 <= number <= MAX_LAUNCH:
        raise ConfigError(f"launch must be a whole number from 1 to {MAX_LAUNCH}, got {number!r:.60}")
    return number


def check_parent(parent: Any) -> CheckpointRef | None:
    """What a run goes on from that another process has restored: a `Checkpoint`, or ``FOLDER@DIGEST``."""
    if parent is None:
        return None
    if isinstance(parent, Checkpoint):
        parent = f"{parent.folder}@{parent.manifest_digest}"
    folder, at, digest = parent.partition("@") if isinstance(parent, str) else ("", "", "")
    name = CheckpointName.parse(folder)
    try:
        if name is None or not at:
            raise FormatError("no folder of a checkpoint, or no digest")
        found = Digest.parse(digest)
        if found.algorithm != "sha256":
            raise FormatError("a manifest's digest is of SHA-256")
    except FormatError as error:
        raise ConfigError(
            f"parent must be a Checkpoint, as Restored.checkpoint, or its text FOLDER@sha256:DIGEST, got "
            f"{parent!r:.120}: {error}"
        ) from None
    return CheckpointRef(launch=name.launch, step=name.step, attempt=name.attempt, manifest=found)


def check_told(argument: str, given: Any, role: Role | None, by_role: Any) -> Any:
    """What was given, or else what the policy's role says; both may say the same.

    Args:
        argument: what it is called.
        by_role: what the role says; None: nothing.
    """
    if given is None or by_role is None or given == by_role:
        return by_role if given is None else given
    raise ConfigError(
        f"{argument}={given!r:.80} was given, and the policy's role {role.name if role else ''} is for "
        f"{by_role!r:.80}; leave one of the two out"
    )


def check_class(name: Any) -> str | None:
    """A retention class, where one was given."""
    if name is None:
        return None
    try:
        return check_retention_class(name)
    except (FormatError, TypeError) as error:
        raise ConfigError(f"retention_class must be a name: {error}") from None


def check_run(run_id: Any) -> str | None:
    """A run's id, where one was given."""
    if run_id is None:
        return None
    try:
        return check_run_id(run_id)
    except (FormatError, TypeError) as error:
        raise ConfigError(f"run_id must be a run id: {error}") from None
