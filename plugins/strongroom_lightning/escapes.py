"""Under a policy that seals, nothing else of the run writes its state in the clear.

Other callbacks write checkpoints as well: Lightning's own, its finders for their trials, its Slurm handler.
All of them go through the strategy's ``save_checkpoint``. There a guard stands from the first ``setup`` on,
while the strategy lives: what comes there is sealed, as a Strongroom root of its own in place of the file, or
refused. What a program writes by itself (``torch.save``, a prediction writer) does not come there.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from strongroom import Checkpointer, PerRank
from strongroom.errors import CheckpointNotFoundError, ConfigError
from strongroom.frontend import EscapePolicy, replace_for_good
from strongroom.resume import RngState
from strongroom_lightning import contents, seam
from strongroom_lightning.encoding import Encoding, in_programs_values
from strongroom_lightning.namespace import Namespace
from strongroom_lightning.strategies import keep_as_they_are

__all__ = ["guard"]

_REMOTE: Final = re.compile(r"(?!file:|s3:)[a-z][a-z0-9+.-]*://")


def guard(
    trainer: Any,
    namespace: Namespace,
    others: Sequence[Any],
    policy: EscapePolicy,
    options: Mapping[str, Any],
) -> None:
    """Tell what else in the Trainer writes state, and see to it; harmless when repeated.

    Args:
        trainer: Lightning's, whose run is sealed.
        namespace: the package that it is of.
        others: the Trainer's checkpoint callbacks that are none of ours.
        policy: what is done about it.
        options: what a `strongroom.Checkpointer` is told that seals it.

    Raises:
        ConfigError: something writes state, and is refused; or writes where nothing can be sealed.
    """
    found = seam.writers_of_state(trainer, namespace, others)
    if seam.hands_weights_back_by_file(trainer):
        if policy != "warn":
            raise ConfigError(
                "this run's checkpoints are sealed, and the processes that this strategy spawns hand "
                "the weights back through a temporary file in the clear; use strategy='ddp' in a script, or "
                "allow it by escapes='warn'"
            )
        found.append(f"{type(trainer.strategy).__name__} (hands the weights back by a temporary file)")
    if found and policy == "refuse":
        raise ConfigError(
            f"this run's checkpoints are sealed, and these write its state too: {'; '.join(found)}. Take "
            f"them out of the Trainer, or let what they write be sealed by escapes='seal'"
        )
    if policy == "warn":
        if found:
            rank_zero_warn(
                f"Strongroom: this run's checkpoints are sealed, but these write its state in the clear, as "
                f"escapes='warn' lets them: {'; '.join(found)}"
            )
        return
    remote = [one for one in found if _REMOTE.search(one)]
    if remote:
        raise ConfigError(
            f"this run's checkpoints are sealed, and these write its state where Strongroom cannot: "
            f"{'; '.join(remote)}. Let them write to a folder or to s3://, or take them out of the Trainer"
        )
    strategy = trainer.strategy
    told = getattr(vars(strategy).get("save_checkpoint"), _MARK, None)
    if found and told != found:
        rank_zero_info(
            f"Strongroom: what else writes this run's state is sealed as well: {'; '.join(found)}. In place "
            f"of each file stands a folder, which ckpt_path= takes"
        )
    if told is None:
        sealing = _Sealing(trainer, namespace, options)
        replace_for_good(strategy, "load_checkpoint", sealing.loads)
        replace_for_good(strategy, "save_checkpoint", sealing.saves if policy == "seal" else _refuses)
        if policy == "seal":
            # What a sharded model's ranks would gather in memory, each of them has to seal by itself.
            keep_as_they_are(trainer, replace_for_good)
    setattr(vars(strategy)["save_checkpoint"], _MARK, found)


_MARK: Final = "strongroom_told"


def _refuses(original: Callable[..., None]) -> Callable[..., None]:
    def save_checkpoint(checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        raise ConfigError(
            f"{os.fspath(filepath)} was about to be written in the clear, in a run whose checkpoints are "
            f"sealed; write no checkpoint besides StrongroomCheckpoint's, or use escapes='seal'"
        )

    return save_checkpoint


class _Sealing:
    """What comes to one strategy, sealed in place of the file that it was to be.

    Args:
        trainer: whose strategy it is.
        namespace: the package that it is of.
        options: of the `strongroom.Checkpointer` values that it makes.
    """

    def __init__(self, trainer: Any, namespace: Namespace, options: Mapping[str, Any]) -> None:
        self._trainer = trainer
        self._namespace = namespace
        self._options = options
        self._encoding = Encoding("warn", namespace)

    def saves(self, original: Callable[..., None]) -> Callable[..., None]:
        def save_checkpoint(checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
            step = int(checkpoint.get("global_step", self._trainer.global_step))
            state = self._state(checkpoint)
            # Names may have a time in them, which is each rank's own.
            place = self._trainer.strategy.broadcast(os.fspath(filepath))
            if "://" in place:
                self._save(place, step, state)
            else:
                self._save_in_place_of(Path(place), step, state)

        return save_checkpoint

    def loads(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
            place = os.fspath(checkpoint_path)
            if not (Path(place) / "run.json").is_file():
                return original(checkpoint_path, *args, **kwargs)
            resumes = bool(self._trainer.strategy.optimizers)
            with Checkpointer(place, **self._options) as checkpointer:
                restored = contents.restore(self._trainer, checkpointer, resumes=resumes, accept_older=False)
            if restored is None:
                raise CheckpointNotFoundError(f"{place} holds no checkpoint; name another one")
            if not {"model", "lightning"} <= set(restored.state):
                raise contents.not_ours(place, restored.step, restored.state)
            return in_programs_values(
                contents.in_lightnings_form(restored.state), self._namespace, self._trainer
            )

        return load_checkpoint

    def _state(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """What Lightning has put together, as a checkpoint of ours holds it."""
        rest = dict(checkpoint)
        model_state = rest.pop("state_dict")
        weights_only = rest.pop("optimizer_states", None) is None
        rest = self._encoding.storable(rest)
        lightning = rest if self._trainer.world_size == 1 else PerRank(rest)
        state = contents.parts(self._trainer, model_state, lightning, weights_only=weights_only)
        if not weights_only:
            # It may come from the middle of a step: where its data stand is as Lightning's file has it.
            state["rng"] = PerRank(RngState.capture().to_state())
        return state

    def _save(self, root: str, step: int, state: Mapping[str, Any]) -> None:
        with Checkpointer(root, **self._options) as checkpointer:
            checkpointer.save(step, state).result()

    def _save_in_place_of(self, place: Path, step: int, state: Mapping[str, Any]) -> None:
        """Save beside what is there, and put it in its place once it is committed."""
        strategy = self._trainer.strategy
        unique = strategy.broadcast(secrets.token_hex(4))
        beside = place.with_name(f".{place.name}.{unique}.sealing")
        self._save(str(beside), step, state)
        if self._trainer.is_global_zero:
            before = place.with_name(f".{place.name}.{unique}.before")
            if os.path.lexists(place):
                place.rename(before)
            beside.rename(place)
            if before.is_dir() and not before.is_symlink():
                shutil.rmtree(before)
            elif os.path.lexists(before):
                before.unlink()
        strategy.barrier("strongroom_sealed")
