"""What a checkpoint of an Accelerate run holds.

::

    {"models": [what was prepared], "optimizers": [torch's own], "accelerate": all else that Accelerate saves,
     "files": what an engine or a hook wrote, "position": where each loader stood, "rng": the random states,
     "modes": what is frozen, "job": how many processes shared the data}

Models and optimizers are handed to the core as themselves. What an engine (DeepSpeed, Megatron-LM) has of
them is among its files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from strongroom.errors import ConfigError, StateMismatchError
from strongroom.frontend import Encoding, Place
from strongroom.resume import has_stand_ins, rebuild
from strongroom.resume.dividing import Confer, mark_differing
from strongroom_accelerate import seam

__all__ = ["OWN_PART", "gather", "load", "template"]

OWN_PART: Final = "accelerate"


def gather(
    accelerator: Any,
    place: Place,
    encoding: Encoding,
    confer: Confer,
    *,
    counted: Mapping[str, Any],
    files: Mapping[str, Any],
) -> dict[str, Any]:
    """The state to save; for all ranks. What differs between ranks is marked, and each gets its own back.

    Args:
        accelerator: whose state it is.
        place: where the run stands.
        encoding: of users' values.
        confer: how the ranks talk.
        counted: what this front end counts itself.
        files: what an engine or a hook wrote.
    """

    def rest() -> dict[str, Any]:
        scaler = accelerator.scaler
        found = {
            "schedulers": _numbered(one.state_dict() for one in seam.bare_schedulers(accelerator)),
            "objects": _numbered(one.state_dict() for one in accelerator._custom_objects),
            "scaler": None if scaler is None else scaler.state_dict(),
            "step": accelerator.step,
            "counted": dict(counted),
        }
        return {key: encoding.of(value, (OWN_PART, key)) for key, value in found.items()}

    own = rest() if accelerator.num_processes == 1 else mark_differing(OWN_PART, rest, confer)
    return {**_filled(accelerator), OWN_PART: own, "files": dict(files), **place.to_state()}


def template(accelerator: Any) -> dict[str, Any]:
    """What a restore in place fills: models and optimizers as themselves, the rest by its name.

    Raises:
        ConfigError: nothing was prepared yet.
    """
    filled = _filled(accelerator)
    if not (accelerator._models or accelerator._optimizers):
        raise ConfigError(
            "nothing to restore into: accelerator.prepare() was not called yet; prepare models and "
            "optimizers first, and resume then"
        )
    return {**filled, **dict.fromkeys((OWN_PART, "files", *Place.PARTS))}


def load(accelerator: Any, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Load what `gather` took besides models and optimizers; what this front end counts is returned.

    Raises:
        StateMismatchError: the program has other schedulers or objects.
    """
    schedulers = seam.bare_schedulers(accelerator)
    objects = accelerator._custom_objects
    _check_count("prepared schedulers", own["schedulers"], schedulers)
    _check_count("objects of register_for_checkpointing()", own["objects"], objects)
    for name, ones in (("schedulers", schedulers), ("objects", objects)):
        for number, one in enumerate(ones):
            _load(one, own[name][str(number)], (OWN_PART, name, str(number)))
    if accelerator.scaler is not None and own["scaler"]:
        _load(accelerator.scaler, own["scaler"], (OWN_PART, "scaler"))
        # FSDP2's scaler has no scale before its first step, and takes none that was loaded.
        begin = getattr(accelerator.scaler, "_lazy_init_scale_growth_tracker", None)
        if accelerator.is_fsdp2 and begin is not None:
            begin(accelerator.scaler._device)
    accelerator.step = own["step"]
    counted: Mapping[str, Any] = own["counted"]
    return counted


def _filled(accelerator: Any) -> dict[str, Any]:
    if seam.has_engine(accelerator):
        return {"models": [], "optimizers": []}
    return {"models": list(accelerator._models), "optimizers": seam.bare_optimizers(accelerator)}


def _numbered(values: Any) -> dict[str, Any]:
    return {str(number): value for number, value in enumerate(values)}


def _check_count(what: str, saved: Mapping[str, Any], present: list[Any]) -> None:
    if len(saved) != len(present):
        raise StateMismatchError(
            f"the checkpoint has {len(saved)} {what}, and this program has {len(present)}; set up the same "
            f"ones, in the same order, before resume() or load_state(), or begin anew with resume='never'"
        )


def _load(one: Any, saved: Any, path: tuple[str, ...]) -> None:
    try:
        # To be asked only where it is needed: it is users' code.
        found = rebuild(saved, one.state_dict(), path=path) if has_stand_ins(saved) else saved
        one.load_state_dict(found)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise StateMismatchError(
            f"{'.'.join(path)}: the state in the checkpoint does not fit this program's "
            f"{type(one).__qualname__} ({error!r:.300}); resume with the code that saved it"
        ) from error
