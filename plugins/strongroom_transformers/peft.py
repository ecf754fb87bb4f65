"""Models with adapters: what is trained is stored, and the base that it was trained on is pinned by digest.

LoRA and its kin leave a model's own weights alone and train a thousandth of their number beside them. A
checkpoint that held the base again with every save would be a thousand times too large; one that did not say
which base it was would be resumed onto another one without a word. So what belongs to adapters, what trains,
and all buffers are stored, sharded where they are, and the rest is pinned: names, shapes, types and bytes.

A model without adapters is stored whole, frozen parts too: nothing says where else those could be had.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from strongroom import canonical
from strongroom.digest import DigestAlgorithm, FileHasher
from strongroom.dtypes import bytes_of
from strongroom.errors import ConfigError, StateMismatchError
from strongroom.wrappers import members

__all__ = ["BASE_PART", "BaseRule", "ModelWeights", "check_base_rule", "has_adapters"]

BASE_PART: Final = "base"
"""The key under which a checkpoint names the weights that it does not hold."""

BaseRule = Literal["digest", "store"]
"""Of the weights below adapters: they are named by their digest, or stored like all else."""

_ADAPTED: Final = (
    ("peft.tuners.tuners_utils", "BaseTunerLayer"),
    ("peft.utils.other", "AuxiliaryTrainingWrapper"),
)
"""What adapters are made of: layers that hold theirs beside the layer that they adapt."""


def check_base_rule(given: str) -> BaseRule:
    """Return it if it is one.

    Raises:
        ConfigError: it is none.
    """
    if given not in ("digest", "store"):
        raise ConfigError(f"base must be one of 'digest', 'store', got {given!r}")
    return given  # type: ignore[return-value]  # mypy does not narrow by membership


class ModelWeights:
    """What of a run's model a checkpoint holds.

    Args:
        base: what becomes of the weights below adapters.
        algorithm: of their digest.
    """

    def __init__(self, base: BaseRule = "digest", algorithm: DigestAlgorithm = "blake3") -> None:
        self._rule = base
        self._algorithm: DigestAlgorithm = algorithm
        self._model: weakref.ref[nn.Module] | None = None
        self._base: _Base | None = None

    def parts(self, model: nn.Module) -> dict[str, Any]:
        """What is stored, and what a restore fills in place.

        Raises:
            StateMismatchError: the base is no longer what it was when this run began.
        """
        base = self._base_of(model)
        if base is None:
            return {"model": model}
        return {"model": base.beside(model), BASE_PART: base.record()}

    def restored(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Look whether the adapters that came back belong to this base.

        Raises:
            StateMismatchError: they were trained on another one.
        """
        base = self._base_of(model)
        if base is None:
            return
        expected = state.get(BASE_PART)
        algorithm = expected.get("algorithm") if isinstance(expected, Mapping) else None
        if not isinstance(expected, Mapping) or algorithm not in ("blake3", "sha256"):
            raise StateMismatchError(
                f"the checkpoint names no base that its adapters belong to ({expected!r:.100}); read it with "
                f"the release of Strongroom that wrote it"
            )
        found = base.record() if algorithm == base.algorithm else _record(base.members, algorithm)
        if dict(expected) != found:
            raise StateMismatchError(
                f"the adapters in the checkpoint were trained on another base: expected "
                f"{_spelled(expected)}, found {_spelled(found)}. Load the base that the run had (the same "
                f"files and revision, dtype and quantization, made by the same steps), or begin anew with "
                f"resume_from_checkpoint=False. A base that cannot be made again is stored with base='store'"
            )

    def _base_of(self, model: nn.Module) -> _Base | None:
        if self._rule == "store":
            return None
        if self._model is None or self._model() is not model:
            self._model = weakref.ref(model)
            self._base = _Base(model, self._algorithm) if has_adapters(model) else None
        return self._base


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has put adapters into a model, by itself or on the model's own request."""
    return any(True for _ in _places_of_adapters(model))


class _Base:
    """The weights below the adapters of one model, and what is beside them."""

    def __init__(self, model: nn.Module, algorithm: DigestAlgorithm) -> None:
        self.algorithm: DigestAlgorithm = algorithm
        self._adapted = tuple(_places_of_adapters(model))
        self._trained: set[str] = set()
        self._found: dict[str, Any] | None = None
        self._versions: tuple[int, ...] = ()
        self._look(model)

    def beside(self, model: nn.Module) -> nn.Module:
        """A module of the same parameters and buffers, without the base's, under the same names."""
        self._look(model)
        shown = nn.Module()
        for bare, name, parameter in _parameters(model):
            if f"{bare}{name}" not in self.members:
                _within(shown, bare)._parameters[name] = parameter
        for one in members(model):
            transient = one.module._non_persistent_buffers_set
            for name, buffer in one.module._buffers.items():
                if buffer is not None and name not in transient and not one.is_wrapper:
                    _within(shown, one.bare)._buffers[name] = buffer
        return shown

    def record(self) -> dict[str, Any]:
        """Its digest, as a checkpoint carries it.

        Raises:
            StateMismatchError: it has changed since the first time.
        """
        versions = tuple(
            0 if isinstance(one, DTensor) else one._version for _, one in sorted(self.members.items())
        )
        if self._found is not None and versions == self._versions:
            return dict(self._found)
        found = _record(self.members, self.algorithm)
        if self._found is not None and found != self._found:
            raise StateMismatchError(
                f"the weights below the adapters were {_spelled(self._found)} when this run began, and are "
                f"now {_spelled(found)}: no program could begin again from a checkpoint that names these. "
                f"Do not merge adapters, or change the base otherwise, while it is trained; or store it, "
                f"with base='store'"
            )
        self._found, self._versions = found, versions
        return dict(found)

    def _look(self, model: nn.Module) -> None:
        """What trains, or ever did, is no part of the base."""
        every = {f"{bare}{name}": parameter for bare, name, parameter in _parameters(model)}
        self._trained |= {name for name, one in every.items() if one.requires_grad}
        self.members = {
            name: one
            for name, one in every.items()
            if name not in self._trained and not name.startswith(self._adapted)
        }


def _places_of_adapters(model: nn.Module) -> Iterator[str]:
    """Prefixes of the names of what belongs to adapters."""
    kinds = tuple(
        found for home, name in _ADAPTED if (found := getattr(sys.modules.get(home), name, None)) is not None
    )
    if not kinds:
        return
    for one in members(model):
        if isinstance(one.module, kinds):
            for name in (*one.module.adapter_layer_names, *one.module.other_param_names):
                yield f"{one.bare}{name}."
        if hasattr(one.module, "peft_config") and "prompt_encoder" in one.module._modules:
            yield f"{one.bare}prompt_encoder."


def _parameters(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    for one in members(model):
        for name, parameter in one.module._parameters.items():
            if parameter is not None:
                yield one.bare, name, parameter


def _within(root: nn.Module, bare: str) -> nn.Module:
    found = root
    for part in filter(None, bare.split(".")):
        found = found._modules.setdefault(part, nn.Module())  # type: ignore[assignment]  # none is None here
    return found


def _record(of: Mapping[str, torch.Tensor], algorithm: DigestAlgorithm) -> dict[str, Any]:
    """Names, shapes, types and bytes, in the order of the names; for all ranks, where it is sharded."""
    ordered = sorted(of.items())
    hasher = FileHasher(algorithm)
    outline = [[name, str(one.dtype), list(one.shape)] for name, one in ordered]
    hasher.update(canonical.encode(outline))
    length = 0
    for _, one in ordered:
        whole: Any = one.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        if whole.is_meta:
            raise ConfigError(
                "weights below the adapters are on no device, so that nobody can say which they are; load "
                "them, or store what is there with base='store'"
            )
        whole = whole.cpu().resolve_conj().resolve_neg().contiguous()
        length += whole.nbytes
        if whole.numel():
            hasher.update(bytes_of(whole))
    digest = hasher.digest()
    return {"algorithm": algorithm, "digest": str(digest), "tensors": len(ordered), "bytes": length}


def _spelled(record: Mapping[str, Any]) -> str:
    return f"{record.get('digest')} ({record.get('tensors')} tensors, {record.get('bytes')} bytes)"
