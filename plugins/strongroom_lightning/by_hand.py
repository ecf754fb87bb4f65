"""``trainer.save_checkpoint(...)`` by hand, in a Trainer that has the callback.

======================================= ==================================================================
a path                                  becomes
======================================= ==================================================================
``x.safetensors``, ``weights_only``     a safetensors file of the module's weights, for others to read
the run's root, what lies in it,        a checkpoint of the run, like any other. Inside a fit it is saved
``strongroom://latest``                 as soon as the step is over, and training waits until it stands
any other path, ``strongroom://ROOT``   a root of its own that holds this one checkpoint, at once
======================================= ==================================================================

What else Lightning's own callbacks save by the same method is theirs, and goes Lightning's way.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from strongroom import Checkpointer, KeepLast, PerRank
from strongroom.config import load_policy
from strongroom.errors import ConfigError
from strongroom.resume import RngState
from strongroom_lightning import contents
from strongroom_lightning.arguments import Arguments
from strongroom_lightning.encoding import Encoding
from strongroom_lightning.handing_over import hand_over
from strongroom_lightning.namespace import Namespace
from strongroom_lightning.uri import CheckpointUri

if TYPE_CHECKING:
    from strongroom_lightning.fit import Fit
from strongroom_lightning.saving import Ending

__all__ = ["ByHand"]

_WEIGHTS: Final = ".safetensors"


class _SaveCheckpoint:
    """A Trainer's ``save_checkpoint``. No closure, so that a copy of the Trainer has its own."""

    def __init__(self, by_hand: ByHand, trainer: Any, callback: Any, original: Callable[..., None]) -> None:
        self.by_hand = by_hand
        self._trainer = trainer
        self._callback = callback
        self._original = original

    def __call__(
        self, filepath: Any, weights_only: bool | None = None, storage_options: Any | None = None
    ) -> None:
        trainer, is_there = self._trainer, any(one is self._callback for one in self._trainer.callbacks)
        if not is_there or trainer.model is None or self.by_hand.is_lightnings_own(sys._getframe(1)):
            self._original(filepath, weights_only, storage_options)
            return
        self.by_hand.save(trainer, filepath, weights_only=bool(weights_only), storage_options=storage_options)


class ByHand:
    """What is saved by hand, from the callback's first stage in a Trainer on.

    Args:
        namespace: the package of Lightning.
        arguments: the callback's.
        open_root: opens a root, with what is said of it besides.
    """

    def __init__(
        self, namespace: Namespace, arguments: Arguments, open_root: Callable[..., Checkpointer]
    ) -> None:
        self._namespace = namespace
        self._arguments = arguments
        self._open = open_root
        self._fit: Fit | None = None
        self._ending: Ending | None = None
        self._encoding = Encoding(arguments.unencodable, namespace)
        self._left_at: int | None = None

    def fit_begins(self, fit: Fit) -> None:
        self._fit, self._ending, self._encoding = fit, None, fit.encoding

    def fit_ends(self) -> None:
        """Between stages, training still stands where a whole fit has left it."""
        fit, self._fit = self._fit, None
        if fit is not None:
            self._ending = fit.saving.ending
            self._left_at = fit.saving.left_at

    def take_over(self, trainer: Any, callback: Any) -> None:
        """Let ``trainer.save_checkpoint`` come here from now on; harmless when repeated.

        Args:
            callback: which the Trainer must still have.
        """
        original = trainer.save_checkpoint
        if not isinstance(original, _SaveCheckpoint) or original.by_hand is not self:
            trainer.save_checkpoint = _SaveCheckpoint(self, trainer, callback, original)

    def save(self, trainer: Any, filepath: Any, *, weights_only: bool, storage_options: Any) -> None:
        """What the method does, if it is the user who calls it."""
        if storage_options is not None:
            raise ConfigError(
                "save_checkpoint(storage_options=...) means nothing to Strongroom: a store takes its "
                "options from the environment and the policy; leave it out"
            )
        path = os.fspath(filepath) if isinstance(filepath, str | os.PathLike) else filepath
        if not isinstance(path, str):
            raise ConfigError(f"save_checkpoint takes a path or a strongroom:// URI; got {filepath!r:.200}")
        # As Lightning's own files have it.
        self._save(trainer, os.path.expanduser(path), weights_only=weights_only)

    def is_lightnings_own(self, frame: FrameType | None) -> bool:
        """Whether one of Lightning's callbacks is saving: a file of its own, that it looks for again."""
        callbacks = self._namespace.callbacks
        kinds = (callbacks.Checkpoint, callbacks.BatchSizeFinder, callbacks.LearningRateFinder)
        while frame is not None:
            if isinstance(frame.f_locals.get("self"), kinds):
                return True
            frame = frame.f_back
        return False

    def _save(self, trainer: Any, path: str, *, weights_only: bool) -> None:
        if path.endswith(_WEIGHTS):
            self._hand_over(trainer, path, weights_only=weights_only)
            return
        uri = CheckpointUri.parse(path)
        if uri is not None and (uri.is_best or uri.step not in {None, trainer.global_step}):
            raise ConfigError(
                f"save_checkpoint({path!r}): what is saved is where training stands, step "
                f"{trainer.global_step}; write strongroom://latest, strongroom://ROOT or a path"
            )
        root = path if uri is None else uri.root
        if root is not None and not self._lies_in_own(root):
            self._save_apart(trainer, root, weights_only=weights_only)
            return
        if weights_only:
            raise ConfigError(
                f"save_checkpoint({path!r}, weights_only=True): {self._arguments.dirpath} holds what the run "
                f"resumes from; give the model alone a path of its own, such as model.safetensors"
            )
        self._save_into_run(trainer, path)

    def _lies_in_own(self, root: str) -> bool:
        own = self._arguments.dirpath
        if "://" in root or "://" in own:
            return f"{root}/".startswith(f"{own.rstrip('/')}/")
        return os.path.realpath(root) == os.path.realpath(own) or os.path.realpath(root).startswith(
            os.path.join(os.path.realpath(own), "")
        )

    def _save_into_run(self, trainer: Any, path: str) -> None:
        fit = self._fit
        if fit is not None and fit.saving.ending is None:
            fit.saving.save_after_this_step()
            return
        if trainer.global_step != (self._left_at if fit is None else fit.saving.left_at):
            raise ConfigError(
                f"save_checkpoint({path!r}): a run's own root takes what stands between two steps of a fit, "
                f"and step {trainer.global_step}, where training stands, does not; save into another path"
            )
        if fit is not None:
            fit.checkpointer.wait()  # the end of training has been saved by itself

    def _hand_over(self, trainer: Any, path: str, *, weights_only: bool) -> None:
        if not weights_only:
            raise ConfigError(
                f"save_checkpoint({path!r}) would write weights alone: say weights_only=True, or give a path "
                f"that does not end with {_WEIGHTS}"
            )
        policy = load_policy(self._arguments.options["security"])
        if policy is not None and policy.sealing is not None:
            raise ConfigError(
                f"save_checkpoint({path!r}) would leave the weights for anyone to read, and the policy seals "
                f"them; `strongroom export {self._arguments.dirpath} --to FOLDER` does that where it is meant"
            )
        hand_over(trainer, path, self._arguments)

    def _save_apart(self, trainer: Any, root: str, *, weights_only: bool) -> None:
        """Save into a root of its own and wait for it; an earlier one that was saved there by hand goes."""
        fit = self._fit
        ending = self._ending if fit is None else fit.saving.ending
        now = RngState.capture() if fit is None else fit.data.random_state()
        loops = {} if ending is None else {"fit_loop": ending.fit_loop}
        # Such a root may be written again, and only such a one: the core refuses that of another run.
        where = root if "://" in root else os.path.realpath(root)
        run_id = f"by-hand-{hashlib.sha256(os.fsencode(where)).hexdigest()[:16]}"
        metrics = contents.scalars(trainer.callback_metrics)
        with self._open(root, run_id=run_id, keep=KeepLast(count=1)) as apart:
            state, _ = contents.gather(
                trainer, self._encoding.storable, apart.confer, weights_only=weights_only, loops=loops
            )
            if fit is None:
                now.restore()
            else:
                fit.data.put_back(now)  # a hook may draw; saving must not change the run
            if not weights_only:
                position = None if ending is None else ending.position
                rng = now if ending is None else ending.rng
                state["position"] = PerRank(None if position is None else position.to_state())
                state["rng"] = PerRank(rng.to_state())
            apart.save(trainer.global_step, state, metrics=metrics).result()
        rank_zero_info(f"Strongroom: step {trainer.global_step} is saved in {root}")
        if not weights_only and fit is not None and ending is None:
            rank_zero_warn(
                f"Strongroom: {root} was saved while a step was under way, so that training which goes on "
                f"from it is not exact; strongroom://latest, or a save after fit, is"
            )
