"""Algorithms, callbacks and schedulers: the state of each, by the name of its class, and given back to it.

Composer knows them by that name alone, so that of two of one class the last one's state goes into both. Here
they are numbered. What an algorithm did to the model (``required_on_load``) Composer does again by evaluating
text from the checkpoint; here it is an error in words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from strongroom.errors import StateMismatchError
from strongroom.resume import has_stand_ins, rebuild

__all__ = ["algorithm_states", "check_required", "load_algorithms", "load_states", "states_of"]

Named = Mapping[str, Any]


def states_of(objects: Iterable[Any]) -> dict[str, Any]:
    """The states of all that have one."""
    return {name: state for name, one in _named(objects).items() if (state := one.state_dict())}


def algorithm_states(algorithms: Iterable[Any]) -> dict[str, Any]:
    """The states of algorithms, and which of them a model cannot be loaded without."""
    return {
        name: {
            "required": bool(one.required_on_load()),
            "text": _text(one),
            "state": {key: value for key, value in one.state_dict().items() if key != "repr"},
        }
        for name, one in _named(algorithms).items()
    }


def load_states(
    what: str, objects: Iterable[Any], saved: Named, warn: Callable[[str], None], *, path: tuple[str, ...]
) -> None:
    """Give each object its state.

    Args:
        what: they are, for what is told.
        saved: as `states_of` gave it.
        warn: is told which find none, and which states find nobody.
        path: where the states stand in the checkpoint.
    """
    own = _named(objects)
    for name, state in saved.items():
        if name not in own:
            warn(f"the checkpoint holds the state of the {what} {name}, which this program does not have")
            continue
        _load(own[name], state, own[name].state_dict, (*path, name))
    for name in own.keys() - saved.keys():
        if own[name].state_dict():
            warn(f"the {what} {name} was not there when the checkpoint was saved, and begins anew")


def check_required(algorithms: Iterable[Any], saved: Named) -> None:
    """Refuse a program without an algorithm that changed the model; the checkpoint's text is never run.

    Raises:
        StateMismatchError: names it.
    """
    own = _named(algorithms)
    missing = [one["text"] for name, one in saved.items() if one["required"] and name not in own]
    if missing:
        raise StateMismatchError(
            f"the checkpoint's model was changed by algorithms that this Trainer does not have: "
            f"{', '.join(missing)}; give it the same ones, as algorithms=[...]. Strongroom makes no object "
            f"from a text in a checkpoint, as Composer does",
            missing=missing,
        )


def load_algorithms(
    algorithms: Iterable[Any], saved: Named, warn: Callable[[str], None], *, path: tuple[str, ...]
) -> None:
    """Give each algorithm its state.

    Raises:
        StateMismatchError: one that changed the model is missing.
    """
    check_required(algorithms, saved)
    own = _named(algorithms)
    for name, one in saved.items():
        if name not in own:
            warn(f"the checkpoint was saved with the algorithm {name}, which this Trainer does not have")
            continue
        if one["required"] and one["text"] != _text(own[name]):
            warn(f"the algorithm was {one['text']} when the checkpoint was saved, and is {_text(own[name])}")
        if one["state"]:
            _load(own[name], one["state"], own[name].state_dict, (*path, name, "state"))
    for name in own.keys() - saved.keys():
        warn(f"the algorithm {name} was not there when the checkpoint was saved, and begins anew")


def _load(target: Any, state: Any, own: Callable[[], Any], path: tuple[str, ...]) -> None:
    if has_stand_ins(state):
        state = rebuild(state, own(), path=path)  # asked only where it is needed: it is users' code
    target.load_state_dict(state)


def _named(objects: Iterable[Any]) -> dict[str, Any]:
    """By the name of its class, the second and later ones with a number."""
    found: dict[str, Any] = {}
    for one in objects:
        kind = type(one).__qualname__
        name, number = kind, 1
        while name in found:
            number += 1
            name = f"{kind}#{number}"
        found[name] = one
    return found


def _text(algorithm: Any) -> str:
    """How it was made, as far as it says so; without an address, which differs from rank to rank."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(algorithm))
