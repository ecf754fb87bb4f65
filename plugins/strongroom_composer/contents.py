"""What a checkpoint of a Composer run holds, and how it comes back.

::

    {"model": the ComposerModel, "optimizers": [its optimizers], "composer": all else that Composer puts into
     a checkpoint, "measured": what was measured, and the parts of a `strongroom.frontend.Place`}

Model and optimizers are handed to the core as themselves, so that what is sharded stays sharded. The rest is
what ``State.serialized_attributes`` names, gathered one by one: ``State.state_dict`` would gather or copy the
model on the way, and knows objects by their class alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from strongroom import PerRank
from strongroom.errors import StateMismatchError
from strongroom.frontend import Encoding, Place
from strongroom.resume import has_stand_ins, rebuild
from strongroom.resume.dividing import Confer, mark_differing
from strongroom.tree import is_stateful
from strongroom_composer import metrics, objects, seam

__all__ = [
    "OWN_PART",
    "check_algorithms",
    "gather",
    "gather_by_hand",
    "restore_at_fit",
    "restore_at_load",
    "template",
]

OWN_PART: Final = "composer"
"""The part that every checkpoint of this front end has, and no other front end's."""

Warn = Callable[[str], None]


def template(state: Any) -> dict[str, Any]:
    """What a restore fills in place, and the names of the rest."""
    return {
        "model": seam.bare_model(state),
        "optimizers": list(state.optimizers),
        OWN_PART: None,
        "measured": None,
        **dict.fromkeys(Place.PARTS),
    }


def gather(state: Any, ours: Any, place: Place, encoding: Encoding, confer: Confer) -> dict[str, Any]:
    """The whole state of a moment; for all ranks.

    Args:
        state: Composer's.
        ours: our callback, whose state is none.
        place: where the run stands.
        encoding: of users' values.
        confer: how the ranks talk.
    """
    return {
        "model": seam.bare_model(state),
        "optimizers": list(state.optimizers),
        OWN_PART: _encoded_rest(state, ours, encoding, confer),
        "measured": PerRank(encoding.of(metrics.capture(state), ("measured",))),
        **place.to_state(),
    }


def gather_by_hand(
    state: Any, ours: Any, encoding: Encoding, confer: Confer, *, weights_only: bool
) -> dict[str, Any]:
    """What a checkpoint holds that a program saves at any moment: nobody knows where its data stand then."""
    found: dict[str, Any] = {"model": seam.bare_model(state)}
    if not weights_only:
        found["optimizers"] = list(state.optimizers)
        found[OWN_PART] = _encoded_rest(state, ours, encoding, confer)
    return found


def restore_at_load(state: Any, ours: Any, saved: Mapping[str, Any], warn: Warn) -> None:
    """Put back what there is while the Trainer is built.

    Args:
        state: Composer's; its model and optimizers are filled already.
        ours: our callback.
        saved: the restored state's own part.
        warn: is told what finds no place.

    Raises:
        StateMismatchError: the program lacks what the model was changed by.
    """
    path = (OWN_PART, "algorithms")
    objects.load_algorithms(state.algorithms, saved["algorithms"], warn, path=path)
    state.timestamp = seam.timestamp_from(saved["timestamp"])
    state.rank_zero_seed = saved["rank_zero_seed"]
    others = [one for one in state.callbacks if one is not ours]
    objects.load_states("callback", others, saved["callbacks"], warn, path=(OWN_PART, "callbacks"))
    for name, value in saved["others"].items():
        _put_back(state, name, value, warn)


def check_algorithms(state: Any, saved: Mapping[str, Any]) -> None:
    """Refuse a program without an algorithm that changed the model.

    Raises:
        StateMismatchError: names it.
    """
    objects.check_required(state.algorithms, saved)


def restore_at_fit(
    state: Any,
    saved: Mapping[str, Any],
    measured: Mapping[str, Any],
    groups: list[dict[str, Any]],
    warn: Warn,
) -> None:
    """Put back what may be given to ``fit`` only: schedulers, evaluators and their metrics, the scaler.

    Args:
        state: Composer's.
        saved: the restored state's own part.
        measured: the restored measurements.
        groups: the optimizers' settings as they were restored: a scheduler that was made since has set
            others.
        warn: is told what finds no place.
    """
    path = (OWN_PART, "schedulers")
    objects.load_states("scheduler", state.schedulers, saved["schedulers"], warn, path=path)
    own = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    for group, restored in zip(own, groups, strict=True):
        group.update(restored)
    # An empty state is that of a scaler that scales nothing.
    if saved["scaler"] and state.scaler is not None and state.scaler.is_enabled():
        state.scaler.load_state_dict(saved["scaler"])
    if measured:
        for note in metrics.restore(state, rebuild(measured, path=("measured",))):
            warn(note)


def _encoded_rest(state: Any, ours: Any, encoding: Encoding, confer: Confer) -> Any:
    """With what differs between ranks marked; for all of them."""

    def rest() -> Any:
        return encoding.of(_rest(state, ours), (OWN_PART,))

    return rest() if seam.job_shape(state).world_size == 1 else mark_differing(OWN_PART, rest, confer)


def _rest(state: Any, ours: Any) -> dict[str, Any]:
    dataset = seam.dataset_of(state)
    return {
        "timestamp": state.timestamp.state_dict(),
        "rank_zero_seed": state.rank_zero_seed,
        "run_name": state.run_name,
        "schedulers": objects.states_of(state.schedulers),
        "algorithms": objects.algorithm_states(state.algorithms),
        "callbacks": objects.states_of(one for one in state.callbacks if one is not ours),
        "scaler": {} if state.scaler is None else state.scaler.state_dict(),
        "dataset": (
            dataset.state_dict(int(state.timestamp.sample_in_epoch), True)
            if seam.keeps_own_place(dataset)
            else None
        ),
        "others": {
            name: value.state_dict() if is_stateful(value) else value
            for name in state.serialized_attributes
            if name not in seam.SERIALIZED
            for value in (getattr(state, name),)
        },
    }


def _put_back(state: Any, name: str, value: Any, warn: Warn) -> None:
    if name not in state.serialized_attributes or not hasattr(state, name):
        warn(f"the checkpoint holds State.{name}, which this program does not add to State")
        return
    own = getattr(state, name)
    if is_stateful(own):
        if has_stand_ins(value):
            value = rebuild(value, own.state_dict(), path=(OWN_PART, "others", name))
        own.load_state_dict(value)
        return
    try:
        setattr(state, name, rebuild(value, own, path=(OWN_PART, "others", name)))
    except AttributeError as error:
        raise StateMismatchError(
            f"State.{name} cannot be set ({error}); let it have a load_state_dict"
        ) from error
