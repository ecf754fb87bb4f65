"""Random number generators: capture their states, put them back.

Covered: Python's ``random``, NumPy's global generator, torch's CPU generator, those of the accelerator in
use, and any generators handed over by name. Capturing never moves a stream. Not covered, because no other
process can reach them: generators inside a data loader's worker processes; those are seeded from the main
process whenever workers start, which `strongroom.resume.position` makes happen again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch

from strongroom.errors import StateMismatchError

__all__ = ["AcceleratorRng", "Generator", "RngState", "generators_of"]

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""What can be captured by name."""

_GENERATOR_TYPES: Final = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

_LOADER_PARTS: Final = (
    "sampler",
    "batch_sampler",
    "batch_sampler.sampler",
    # A batch sampler whose batches another one deals out to several ranks.
    "batch_sampler.batch_sampler",
    "batch_sampler.batch_sampler.sampler",
    # A sampler whose indices another one deals out to several ranks.
    "sampler.dataset._sampler",
    "batch_sampler.sampler.dataset._sampler",
    "dataset",
    # A stream of samples that another data set deals out.
    "dataset.dataset",
    "collate_fn",
)
"""Where a data loader's own generators are looked for, besides the loader itself: one level deep each."""

PlainValue = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AcceleratorRng:
    """The generator states of every visible device of one kind, and which of them was current."""

    device_type: str
    current: int
    states: tuple[np.ndarray[Any, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RngState:
    """The states of all generators that a training process draws from, at one moment."""

    python: PlainValue
    numpy: PlainValue
    torch_cpu: np.ndarray[Any, Any]
    accelerator: AcceleratorRng | None = None
    generators: Mapping[str, PlainValue] = field(default_factory=dict)

    @classmethod
    def capture(cls, generators: Mapping[str, Generator] | None = None) -> RngState:
        """Read every state; no stream moves, and no accelerator is woken up."""
        return cls(
            python=_python_state(random.getstate()),
            numpy=np.random.get_state(legacy=False),
            torch_cpu=_copied(torch.get_rng_state()),
            accelerator=_capture_accelerator(),
            generators={name: _generator_state(one) for name, one in (generators or {}).items()},
        )

    def restore(self, generators: Mapping[str, Generator] | None = None) -> tuple[str, ...]:
        """Put every state back.

        Returns:
            What could not be put back because this process lacks it, one sentence each.
        """
        random.setstate(_python_tuple(self.python))
        np.random.set_state(self.numpy)
        torch.set_rng_state(torch.from_numpy(self.torch_cpu.copy()))
        notes = list(_restore_accelerator(self.accelerator))
        present = dict(generators or {})
        for name, state in self.generators.items():
            if name in present:
                _restore_generator(name, present.pop(name), state)
            else:
                notes.append(f"the checkpoint holds a state for the generator {name}, which this run lacks")
        notes += [f"the checkpoint holds no state for the generator {name}" for name in present]
        return tuple(notes)

    def of_part(self, prefix: str) -> RngState:
        """The same streams, and of the generators those of one part, by the names that they have there."""
        own = {
            name.removeprefix(prefix): one for name, one in self.generators.items() if name.startswith(prefix)
        }
        return replace(self, generators=own)

    def to_state(self) -> PlainValue:
        """A value of plain containers, numbers, strings and arrays, as a checkpoint carries it."""
        accelerator = self.accelerator
        return {
            "python": self.python,
            "numpy": self.numpy,
            "torch_cpu": self.torch_cpu,
            "accelerator": None
            if accelerator is None
            else {
                "device_type": accelerator.device_type,
                "current": accelerator.current,
                "states": accelerator.states,
            },
            "generators": dict(self.generators),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RngState:
        """Read what `to_state` gave.

        Raises:
            StateMismatchError: the value is something else.
        """
        try:
            accelerator = state["accelerator"]
            return cls(
                python=state["python"],
                numpy=state["numpy"],
                torch_cpu=np.asarray(state["torch_cpu"], dtype=np.uint8),
                accelerator=None
                if accelerator is None
                else AcceleratorRng(
                    device_type=accelerator["device_type"],
                    current=accelerator["current"],
                    states=tuple(accelerator["states"]),
                ),
                generators=dict(state["generators"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatchError(
                f"the random state in the checkpoint is not one that this release writes ({error!r}); "
                f"read it with the release that wrote it"
            ) from error


def generators_of(loader: object) -> dict[str, Generator]:
    """The generators that a data loader carries: on itself, its samplers, its dataset, its collate function.

    Names are stable from run to run (``sampler.generator``); a generator found twice keeps its first name.
    """
    found: dict[str, Generator] = {}
    for name, one in _attributes(loader):
        if not any(one is known for known in found.values()):
            found[name] = one
    return found


def _attributes(loader: object) -> Iterator[tuple[str, Generator]]:
    for part in ("", *_LOADER_PARTS):
        owner: object | None = loader
        for name in filter(None, part.split(".")):
            owner = getattr(owner, name, None)
        for name, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, _GENERATOR_TYPES):
                yield (f"{part}.{name}" if part else name), value


def _python_state(state: tuple[Any, ...]) -> PlainValue:
    version, words, gauss_next = state
    return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss_next": gauss_next}


def _python_tuple(state: PlainValue) -> tuple[Any, ...]:
    return (state["version"], tuple(int(word) for word in state["words"]), state["gauss_next"])


def _copied(state: torch.Tensor) -> np.ndarray[Any, Any]:
    return state.cpu().numpy().copy()


def _generator_state(generator: Generator) -> PlainValue:
    if isinstance(generator, torch.Generator):
        return {"kind": "torch", "state": _copied(generator.get_state())}
    if isinstance(generator, np.random.Generator):
        return {"kind": "numpy", "state": dict(generator.bit_generator.state)}
    if isinstance(generator, np.random.RandomState):
        return {"kind": "numpy-legacy", "state": generator.get_state(legacy=False)}
    return {"kind": "python", "state": _python_state(generator.getstate())}


def _restore_generator(name: str, generator: Generator, saved: PlainValue) -> None:
    kind, state = saved["kind"], saved["state"]
    if isinstance(generator, torch.Generator) and kind == "torch":
        generator.set_state(torch.from_numpy(state.copy()))
    elif isinstance(generator, np.random.Generator) and kind == "numpy":
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState) and kind == "numpy-legacy":
        generator.set_state(state)
    elif isinstance(generator, random.Random) and kind == "python":
        generator.setstate(_python_tuple(state))
    else:
        raise StateMismatchError(
            f"the generator {name} is a {type(generator).__name__}, the checkpoint's was of the kind "
            f"{kind!r}; use the same kind, or begin anew"
        )


def _accelerator() -> tuple[str, ModuleType] | None:
    """The device kind in use and torch's module for it; None on machines without one."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    return device.type, torch.get_device_module(device)


def _capture_accelerator() -> AcceleratorRng | None:
    found = _accelerator()
    if found is None:
        return None
    device_type, module = found
    # A device that was never used has drawn nothing. Asking it would create its context: seconds, and
    # hundreds of megabytes, for a run that trains on the CPU.
    if not getattr(module, "is_initialized", lambda: True)():
        return None
    if hasattr(module, "get_rng_state_all"):
        states = tuple(_copied(state) for state in module.get_rng_state_all())
        return AcceleratorRng(device_type=device_type, current=module.current_device(), states=states)
    return AcceleratorRng(device_type=device_type, current=0, states=(_copied(module.get_rng_state()),))


def _restore_accelerator(saved: AcceleratorRng | None) -> Iterator[str]:
    if saved is None:
        return
    found = _accelerator()
    if found is None or found[0] != saved.device_type:
        yield f"the checkpoint holds random states of {saved.device_type} devices, which this process lacks"
        return
    module = found[1]
    if not hasattr(module, "get_rng_state_all"):
        module.set_rng_state(torch.from_numpy(saved.states[0].copy()))
        return
    count, current = module.device_count(), module.current_device()
    # The device in use is the one that matters. Its number may differ from the one it had: another set
    # of visible devices, another place on the host.
    targets = {current: saved.current}
    if count == len(saved.states) and current == saved.current:
        targets = {index: index for index in range(count)}
    elif count != 1 or len(saved.states) != 1:
        yield (
            f"the random state of {saved.device_type}:{saved.current} was put back on {saved.device_type}:"
            f"{current}; those of other devices were not, since the sets of devices differ"
        )
    for index, source in targets.items():
        module.set_rng_state(torch.from_numpy(saved.states[source].copy()), index)
