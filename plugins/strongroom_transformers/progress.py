"""What of the Trainer itself belongs to a run: its state, its callbacks' states, and what it has counted.

::

    {"state": the TrainerState, as its ``trainer_state.json`` would have it, but for its log, which is one
     text of JSON: "log_history", "loss": what was counted since
     the last log and since the beginning, "elapsed_s": how long the run has trained, "sampler_seed": what
     Accelerate's sampler begins from, "scores": what the checkpoints were ranked by}

The loss is counted between two logs, and no checkpoint of the Trainer's own holds that: the first log after a
resume would differ, and so would what ``train()`` returns.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

import torch
from transformers import TrainerState
from transformers.trainer_utils import compare_trainer_and_checkpoint_args

from strongroom.errors import StateMismatchError
from strongroom.frontend import Encoding, Voice
from strongroom.resume import rebuild
from strongroom_transformers import seam

__all__ = ["gathered", "latest", "put_back_losses", "restored"]

_PROCESS: Final = frozenset({"is_local_process_zero", "is_world_process_zero"})
"""Of a TrainerState: what each process knows of itself."""

_PLAIN: Final = frozenset({bool, float, int, str, type(None)})
"""What comes back from JSON as it was; of other values in a log, each is stored by itself."""


def gathered(
    trainer: Any, encoding: Encoding, *, elapsed_s: float, scores: Mapping[int, float]
) -> dict[str, Any]:
    """What is to be stored; for all ranks, which add up what they have counted."""
    if trainer.hp_search_backend is None:
        trainer.store_flos()
    exported = TrainerState(stateful_callbacks=seam.exportable_callbacks(trainer, control=True))
    state = {
        field.name: getattr(trainer.state, field.name)
        for field in dataclasses.fields(trainer.state)
        if field.name not in _PROCESS
    }
    state["stateful_callbacks"] = exported.stateful_callbacks
    state["log_history"] = _as_text(state["log_history"])
    running = trainer._tr_loss
    return {
        "state": encoding.of(state, ("trainer", "state")),
        "loss": {
            "running": running.detach().cpu(),
            "total": float(trainer._total_loss_scalar),
            "logged_at": int(trainer._globalstep_last_logged),
            "began_at": int(trainer._initial_global_step),
        },
        "elapsed_s": float(elapsed_s),
        "scores": dict(scores),
    }


def restored(trainer: Any, saved: Mapping[str, Any], max_steps: int, voice: Voice) -> None:
    """Let the Trainer stand where the checkpoint was taken; what its arguments say now counts.

    Raises:
        StateMismatchError: the checkpoint holds no such thing.
    """
    given = saved.get("state")
    if not isinstance(given, Mapping):
        raise StateMismatchError(
            "the checkpoint holds no state of a Trainer; read it with the release of Strongroom that wrote it"
        )
    own = {field.name for field in dataclasses.fields(TrainerState)} - _PROCESS
    strange = sorted(set(given) - own)
    if strange:
        voice.warn(
            f"this release of transformers knows nothing of {', '.join(strange)} in the checkpoint's "
            f"TrainerState, which is left out"
        )
    known = {name: rebuild(value, None) for name, value in given.items() if name in own}
    if isinstance(known.get("log_history"), str):
        known["log_history"] = json.loads(known["log_history"])
    state = TrainerState(**known)
    if state.train_batch_size is not None:
        compare_trainer_and_checkpoint_args(trainer.args, state)
    state.train_batch_size = trainer._train_batch_size
    state.compute_steps(trainer.args, max_steps)
    trainer.state = state
    if trainer.args.restore_callback_states_from_checkpoint:
        trainer._load_callback_state()
    else:
        _restore_callbacks(trainer, state.stateful_callbacks)


def _as_text(log: list[dict[str, Any]]) -> Any:
    """A log of plain values as one text: value by value, a long run's would hold training up for seconds."""
    is_plain = all(
        type(name) is str and type(value) in _PLAIN for entry in log for name, value in entry.items()
    )
    return json.dumps(log) if is_plain else log


def put_back_losses(trainer: Any, loss: Mapping[str, Any]) -> None:
    """Let the Trainer count on; it has set its counters to zero when its loop began."""
    counted = trainer._tr_loss
    trainer._tr_loss = torch.as_tensor(loss["running"]).to(device=counted.device, dtype=counted.dtype).clone()
    trainer._total_loss_scalar = loss["total"]
    trainer._globalstep_last_logged = loss["logged_at"]
    trainer._initial_global_step = loss["began_at"]


def _restore_callbacks(trainer: Any, states: Mapping[str, Any]) -> None:
    """Give the program's own callbacks what they had counted; what they were built with stays."""
    left = {name: list(found) if isinstance(found, list) else [found] for name, found in states.items()}
    for callback in seam.exportable_callbacks(trainer, control=False):
        waiting = left.get(type(callback).__name__)
        if not waiting:
            continue
        for name, value in waiting.pop(0).get("attributes", {}).items():
            setattr(callback, name, value)


def latest(state: Any) -> dict[str, float]:
    """The figures that were logged last, for whoever lists the run."""
    found: dict[str, float] = {}
    for entry in state.log_history[-2:]:
        found |= {
            name: float(value)
            for name, value in entry.items()
            if isinstance(value, int | float) and name not in ("step", "epoch")
        }
    return found
