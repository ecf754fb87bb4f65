"""Values of users that no checkpoint can hold: found when a fit starts, named once, and put back on a resume.

Hyper-parameters, states of callbacks, schedulers and the datamodule, and what ``on_save_checkpoint`` hooks
add: `strongroom.resume` says what can be stored of it. Here stand the places at which Lightning keeps such
values, and what a user is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from lightning_utilities.core.rank_zero import rank_zero_info

from strongroom.frontend.encoding import Encoding as Noted
from strongroom.frontend.settings import Unencodable
from strongroom.resume import Loss, encodable, has_stand_ins, rebuild
from strongroom.resume.losses import qualified_name
from strongroom.resume.rebuilding import ABSENT, Makers, plain
from strongroom.standins import LeftOut, Simplified
from strongroom_lightning.namespace import Namespace
from strongroom_lightning.voice import VOICE

__all__ = ["Encoding", "in_programs_values"]

_ARGUMENTS: Final = ("hyper_parameters", "datamodule_hyper_parameters")
"""Lightning's keys of what a module and a datamodule are built from."""

_TENSORS: Final = ("state_dict", "optimizer_states")
"""What is large, and was not saved through here."""

_CLASSES: Final = ("hparams_type", "datamodule_hparams_type")
"""Lightning's keys of the classes of these, which are stored along with them."""


_ADVICE: Final = (
    "It has to be given to load_from_checkpoint() again. Leave functions, classes and modules out by "
    "save_hyperparameters(ignore=[...])."
)


class Encoding(Noted):
    """The values of one fit, as they can be stored.

    Args:
        policy: ``"warn"`` stores what can be stored and names the rest once; ``"refuse"`` is an error.
        namespace: the package of Lightning's.
    """

    def __init__(self, policy: Unencodable, namespace: Namespace) -> None:
        super().__init__(policy, VOICE, advice=_ADVICE)
        self._makers = _makers(namespace)

    def check(self, trainer: Any) -> None:
        """Look at all that exists before the first step: no ``on_save_checkpoint`` hook is called.

        Raises:
            StateEncodingError: something has no encoding, and the policy is to refuse that.
        """
        self.storable(_known_at_start(trainer))

    def storable(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """What can be stored of Lightning's checkpoint; what is lost and was not yet told of is told.

        Raises:
            StateEncodingError: something has no encoding, and the policy is to refuse that.
        """
        found: dict[str, Any] = {}
        losses: list[Loss] = []
        for key, value in checkpoint.items():
            if key in _CLASSES:
                continue
            found[key], lost = encodable(
                value,
                ("lightning", key),
                objects="omit" if key in _ARGUMENTS else "state",
                known=self._makers,
            )
            losses += lost
        self.tell(losses)
        return found


def in_programs_values(
    checkpoint: dict[str, Any], namespace: Namespace | None, trainer: Any = None
) -> dict[str, Any]:
    """A restored checkpoint without stand-ins: what was left out is what the program has there.

    Args:
        checkpoint: in Lightning's form.
        namespace: the package of Lightning's; None: nobody's, and what was simplified stays plain.
        trainer: whose callbacks and datamodule have values of their own; None: nobody has.
    """
    affected = [key for key in checkpoint if key not in _TENSORS and has_stand_ins(checkpoint[key])]
    if not affected:
        return checkpoint
    # To be asked only where it is needed: it is users' code.
    own = {} if trainer is None else _states(trainer)
    makers = _makers(namespace) if namespace is not None else None
    found = dict(checkpoint)
    for key in affected:
        if makers is None:
            found[key] = plain(checkpoint[key])
        else:
            found[key] = rebuild(
                checkpoint[key], own.get(key, ABSENT), path=("lightning", key), makers=makers
            )
    if "callbacks" in affected and type(found["callbacks"]) is dict:
        states = found["callbacks"]
        found["callbacks"] = {
            name: _Uncopied(state) if type(state) is dict else state for name, state in states.items()
        }
    for key, of_class in zip(_ARGUMENTS, _CLASSES, strict=True):
        if key in affected and type(found[key]) is not dict:
            found[of_class] = type(found[key])  # Lightning makes it of a plain dict once more
    if trainer is None:
        missing = [
            f"{name} ({item.kind} {item.name})"
            for key in _ARGUMENTS
            for name, item in _entries(checkpoint.get(key))
            if isinstance(item, LeftOut)
        ]
        if missing:
            rank_zero_info(
                f"Strongroom: hyper-parameters without an encoding are not in the checkpoint; give what "
                f"needs them as arguments, as in load_from_checkpoint(path, name=...): {', '.join(missing)}"
            )
    told = [key for key in affected if key not in _ARGUMENTS]
    if trainer is not None and told:
        rank_zero_info(
            f"Strongroom: some values in {', '.join(map(repr, told))} have no encoding and were not stored "
            f"as they were; there the program's own stay where it has them"
        )
    return found


class _Uncopied(dict[Any, Any]):
    """A callback's state with objects of the program's own in it.

    Lightning hands each callback a deep copy: its own objects would come back to it as others, and those
    that cannot be copied (a lock, an open file) would end the resume.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return dict(self)


def _entries(hyper_parameters: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(hyper_parameters, Simplified):
        hyper_parameters = hyper_parameters.value
    return hyper_parameters.items() if isinstance(hyper_parameters, dict) else ()


def _known_at_start(trainer: Any) -> dict[str, Any]:
    known = _states(trainer)
    known["lr_schedulers"] = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    for owner in (trainer.lightning_module, trainer.datamodule):
        if owner is not None and owner.hparams:
            known[owner.CHECKPOINT_HYPER_PARAMS_KEY] = owner.hparams
    return known


def _states(trainer: Any) -> dict[str, Any]:
    """The states of callbacks and of the datamodule, by Lightning's keys."""
    states: dict[str, Any] = {
        "callbacks": {
            callback.state_key: state for callback in trainer.callbacks if (state := callback.state_dict())
        }
    }
    if trainer.datamodule is not None and (state := trainer.datamodule.state_dict()):
        states[type(trainer.datamodule).__qualname__] = state
    return states


def _makers(namespace: Namespace) -> Makers:
    return {qualified_name(kind): kind for kind in namespace.attribute_dicts}
