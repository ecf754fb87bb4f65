"""What a user sets: the callback's own options, and those of the Trainer that a run's saves follow. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from strongroom.errors import ConfigError
from strongroom.frontend import RunSettings
from strongroom.resume.mode import ResumeMode

__all__ = [
    "SCHEME",
    "Asked",
    "asked_for",
    "check_training_arguments",
    "keep_limit",
    "name_of",
    "read_options",
]

SCHEME: Final = "strongroom://"

_NAME: Final = re.compile(r"strongroom://(?P<root>.+?)(?:#step=(?P<step>\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a call of ``train()`` wants to go on from.

    Attributes:
        mode: as `strongroom.resume.plan_resume` takes it.
        step: this one and no other; None: the newest whole one.
        native: a folder that the Trainer itself wrote, which it loads itself.
    """

    mode: ResumeMode
    step: int | None = None
    native: str | None = None


def read_options(root: str | os.PathLike[str], options: Mapping[str, Any]) -> RunSettings:
    """Check what the callback was given.

    Raises:
        ConfigError: a value that cannot work, or an unknown option.
    """
    return RunSettings.read(root, options, known=("base", "release"))


def name_of(root: str, step: int) -> str:
    """A checkpoint's name, where the Trainer would have a folder's path."""
    return f"{SCHEME}{root}#step={step}"


def asked_for(given: Any, settings: RunSettings) -> Asked:
    """What ``train(resume_from_checkpoint=given)`` means.

    Raises:
        ConfigError: a name of another run, or one that is none.
    """
    if given is None:
        return Asked(mode=settings.resume)
    if isinstance(given, bool):
        return Asked(mode="must" if given else "never")
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise ConfigError(
            f"resume_from_checkpoint must be None, True, False, {name_of(settings.root, 100)!r}, or a folder "
            f"that the Trainer wrote; got {given!r:.100}"
        )
    named = os.fspath(given)
    if not named.startswith(SCHEME):
        return Asked(mode="never", native=named)
    found = _NAME.fullmatch(named)
    if found is None or not settings.is_own(found["root"]):
        raise ConfigError(
            f"resume_from_checkpoint={named!r} is not a checkpoint of this run; it has to be "
            f"{SCHEME}{settings.root} (the newest), {name_of(settings.root, 100)!r}, a folder that the "
            f"Trainer wrote, or None"
        )
    step = found["step"]
    return Asked(mode="must", step=None if step is None else int(step))


def keep_limit(settings: RunSettings, args: Any) -> int | None:
    """How many checkpoints stay: the Trainer's ``save_total_limit``, or our ``keep``.

    Raises:
        ConfigError: both were given, and they differ.
    """
    limit: int | None = args.save_total_limit
    if limit is not None and limit <= 0:
        limit = None  # as the Trainer has it
    if settings.keep is None or limit is None or settings.keep == limit:
        return settings.keep if limit is None else limit
    raise ConfigError(
        f"keep={settings.keep} and TrainingArguments(save_total_limit={limit}) say different things; give one"
    )


def check_training_arguments(args: Any, settings: RunSettings) -> None:
    """Refuse what cannot stand beside our saves, before anything is trained.

    Raises:
        ConfigError: names it, and what to do.
    """
    keep_limit(settings, args)
    if getattr(args, "enable_jit_checkpoint", False):
        raise ConfigError(
            "enable_jit_checkpoint=True saves in the Trainer's own way when SIGTERM comes, on each rank by "
            "itself; Strongroom saves then, on all ranks after the same step: leave it False"
        )
    if args.save_only_model:
        raise ConfigError(
            "save_only_model=True asks for checkpoints that nothing can be resumed from; leave it False, and "
            "take the weights out of a checkpoint by `strongroom export ROOT --format safetensors`"
        )
    if args.deepspeed:
        raise ConfigError(
            "DeepSpeed keeps model and optimizer in its own engine, which only its own checkpoints hold; "
            "StrongroomCallback cannot stand in for them. Train with DDP or FSDP2; or let the Trainer save "
            "in its own way, and each of its folders be sealed: SealedFolders(root).attach(trainer)"
        )
