"""What a user gives the callback, checked once: before any Trainer exists."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from strongroom.errors import ConfigError
from strongroom.frontend import RunSettings
from strongroom.tiers import Tier

__all__ = ["Arguments", "Interval"]

Interval = Callable[[Any, Any], bool]
"""Says of Composer's state and one of its checkpoint events whether to save."""

_COMPOSERS: Final[Mapping[str, str]] = {
    "folder": "the run's root is the first argument",
    "save_folder": "the run's root is the first argument",
    "filename": "checkpoints are named by their step",
    "latest_filename": "the newest is found by itself",
    "remote_file_name": "give the bucket as root, or copy to it by replicate_to=[...]",
    "latest_remote_file_name": "the newest is found by itself, in a bucket too",
    "num_concurrent_uploads": "give the bucket as root, or copy to it by replicate_to=[...]",
    "upload_timeout_in_seconds": "timeout_s bounds a save",
    "overwrite": "nothing is ever overwritten: a run that goes back begins a new line of checkpoints",
    "weights_only": "nothing could be resumed from that; `strongroom export` takes the model out",
    "ignore_keys": "a checkpoint is whole; Checkpointer.restore(only=...) takes a part of it",
}
"""Arguments of Composer's own CheckpointSaver that mean nothing here, and what is there in their place."""

_EACH_RANKS_OWN: Final = ("rank", "local_rank", "node_rank")


@dataclass(frozen=True, kw_only=True)
class Arguments(RunSettings):
    """The callback's arguments, in the terms of the core.

    Attributes:
        save_interval: as it was given.
    """

    save_interval: Any

    @classmethod
    def of(
        cls,
        root: str | os.PathLike[str],
        *,
        save_interval: Any,
        num_checkpoints_to_keep: int | None,
        **options: Any,
    ) -> Arguments:
        """Check what the callback was given.

        Args:
            options: of `strongroom.frontend.RunOptions`.

        Raises:
            ConfigError: a value that cannot work, or two that exclude each other.
        """
        for name in options:
            if name in _COMPOSERS:
                raise ConfigError(f"there is no option {name!r}: {_COMPOSERS[name]}")
        keep = _kept(num_checkpoints_to_keep)
        if keep is not None or num_checkpoints_to_keep == -1:
            if options.get("keep") is not None:
                raise ConfigError("num_checkpoints_to_keep and keep say the same: give one of them")
            options["keep"] = keep
        known = ("save_interval", "num_checkpoints_to_keep")
        run = RunSettings.read(root, options, known=known)
        for place in (run.root, *run.options["replicate_to"]):
            _check_is_shared(place)
        return cls(**vars(run), save_interval=save_interval)

    def in_run(self, fill: Callable[[str], str]) -> Arguments:
        """With ``{run_name}`` and its like filled in, in the root and in the tiers.

        Args:
            fill: does so, as Composer does.
        """

        def filled(tier: Any) -> Any:
            if isinstance(tier, Tier):
                return replace(tier, root=filled(tier.root))
            return fill(os.fspath(tier)) if isinstance(tier, str | os.PathLike) else tier

        tiers = tuple(map(filled, self.options["replicate_to"]))
        return replace(self, root=fill(self.root), options={**self.options, "replicate_to": tiers})


def _kept(count: Any) -> int | None:
    """How many stay; None: all."""
    if count is None or (count == -1 and type(count) is int):
        return None
    if type(count) is not int or count < 1:
        raise ConfigError(
            f"num_checkpoints_to_keep must be -1 for all, or at least 1, since a run is resumed from the "
            f"newest; got {count!r}"
        )
    return count


def _check_is_shared(place: Any) -> None:
    text = str(getattr(place, "root", place))
    for name in _EACH_RANKS_OWN:
        if re.search(r"\{" + name + r"[!:}]", text):
            raise ConfigError(
                f"{text} has {{{name}}} in it: all ranks of a run share one root; take it out, or use "
                f"{{run_name}}"
            )
