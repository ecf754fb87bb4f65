"""Under a policy that seals, nothing else of the Trainer writes its state in the clear.

``save_model()`` is the user's own export: it is sealed, as a Strongroom root of its own in place of the
folder's files, or refused, or let through, as ``escapes`` has it. All else that the Trainer would write of
its state is written by its ``_save_checkpoint``, which is ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from strongroom import Checkpointer
from strongroom.errors import ConfigError
from strongroom.frontend import RunSettings, policy_seals, replace_for_good
from strongroom_transformers.voice import VOICE

__all__ = ["guard", "leaving_folders_alone"]


def guard(trainer: Any, settings: RunSettings, *, own_saves_pass: bool = False) -> None:
    """See to what else writes the run's weights, where its checkpoints are sealed.

    Args:
        trainer: the Trainer.
        settings: the run's.
        own_saves_pass: the Trainer's own checkpoints are written as ever, and somebody sees to them.
    """
    if not policy_seals(settings.options["security"]):
        return

    def guarded(original: Callable[..., None]) -> Callable[..., None]:
        seals = _guarded(original, trainer, settings)

        def save_model(output_dir: str | None = None, _internal_call: bool = False) -> None:
            (original if own_saves_pass and _internal_call else seals)(output_dir, _internal_call)

        return save_model

    replace_for_good(trainer, "save_model", guarded)


def _guarded(original: Callable[..., None], trainer: Any, settings: RunSettings) -> Callable[..., None]:
    def save_model(output_dir: str | None = None, _internal_call: bool = False) -> None:
        place = os.fspath(output_dir or trainer.args.output_dir)
        if settings.escapes == "refuse":
            raise ConfigError(
                f"save_model() was about to write {place} in the clear, in a run whose checkpoints are "
                f"sealed; take the weights out of a checkpoint by `strongroom export {settings.root}`, where "
                f"that is allowed, or use escapes='seal'"
            )
        if settings.escapes == "seal" and settings.is_own(place):
            raise ConfigError(
                f"save_model() would put a checkpoint of the weights alone between those of the run in "
                f"{place}, which could not be resumed any more; give it a folder of its own, as "
                f"save_model('export'). What the run has saved is in {place} already"
            )
        if settings.escapes == "warn":
            VOICE.warn(
                f"save_model() writes {place} in the clear, as escapes='warn' lets it; this run's "
                f"checkpoints are sealed"
            )
            original(output_dir, _internal_call)
            return
        with Checkpointer(place, **settings.options_elsewhere) as checkpointer:
            checkpointer.save(trainer.state.global_step, {"model": trainer.model}).result()
        VOICE.info(
            f"save_model(): the model is sealed in {place}, as this run's checkpoints are; for the files "
            f"that from_pretrained() takes: strongroom export {place} --to DIR --format safetensors"
        )

    return save_model


@contextmanager
def leaving_folders_alone(args: Any) -> Iterator[None]:
    """For a time the Trainer deletes no folder of checkpoints: the best one is in none of them."""
    limit, args.save_total_limit = args.save_total_limit, None
    try:
        yield
    finally:
        args.save_total_limit = limit
