"""Names of a module's parameters and buffers, whatever wraps it.

`DistributedDataParallel`, `torch.compile`, activation checkpointing and their like put a module
into another one, and a level into every name. A checkpoint holds the names of the bare module,
so that it restores into the module wrapped, bare, or wrapped in something else. Wrappers are
found by the objects: a child that a user called ``module`` keeps its name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch

__all__ = ["BareNames", "Member", "is_flattened_by_fsdp1", "members", "sharded_by_fsdp1"]

_WRAPPERS: Final = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "_fsdp_wrapped_module",
    ),
)
"""Where each wrapper is defined, its class, and what it calls the module that it wraps."""

_HIDDEN: Final = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Levels that the wrapper's own ``state_dict()`` already leaves out."""


@dataclass(frozen=True, slots=True)
class Member:
    """One module at one place in another.

    Attributes:
        module: the module itself.
        raw: its prefix by the attributes that lead to it, as ``_metadata`` has it.
        shown: its prefix in ``state_dict()``.
        bare: its prefix in a checkpoint.
        is_wrapper: whether it stands for the module that it wraps.
    """

    module: torch.nn.Module
    raw: str
    shown: str
    bare: str
    is_wrapper: bool


def members(module: torch.nn.Module) -> Iterator[Member]:
    """A module and all within it, in the order of ``state_dict()``; a shared one at each of its places."""
    classes = _loaded_wrappers()
    stack = [(module, "", "", "")]
    while stack:
        current, raw, shown, bare = stack.pop()
        inner = next((attribute for cls, attribute in classes if isinstance(current, cls)), None)
        yield Member(current, raw, shown, bare, inner is not None)
        for name, child in reversed(current._modules.items()):
            if child is not None:
                is_inner = name == inner
                stack.append(
                    (
                        child,
                        f"{raw}{name}.",
                        shown if is_inner and name in _HIDDEN else f"{shown}{name}.",
                        bare if is_inner else f"{bare}{name}.",
                    )
                )


def _loaded_wrappers() -> list[tuple[type, str]]:
    """Wrappers that this process can have made: one whose module was never imported was never used."""
    return [
        (getattr(sys.modules[home], name), attribute)
        for home, name, attribute in _WRAPPERS
        if hasattr(sys.modules.get(home), name)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class BareNames:
    """What a module's names are without its wrappers. All empty where nothing is wrapped.

    Attributes:
        shown: prefixes in ``state_dict()`` -> prefixes in a checkpoint.
        raw: prefixes in ``_metadata`` -> prefixes in a checkpoint.
        wrappers: prefixes in ``_metadata`` of the wrappers themselves.
    """

    shown: dict[str, str] = field(default_factory=dict)
    raw: dict[str, str] = field(default_factory=dict)
    wrappers: frozenset[str] = frozenset()

    @classmethod
    def of(cls, module: torch.nn.Module) -> BareNames:
        return cls.among(list(members(module)))

    @classmethod
    def among(cls, found: list[Member]) -> BareNames:
        if not any(member.is_wrapper for member in found):
            return cls()
        return cls(
            shown={member.shown: member.bare for member in found},
            raw={member.raw: member.bare for member in found},
            wrappers=frozenset(member.raw for member in found if member.is_wrapper),
        )

    def key(self, name: str) -> str:
        """A name of ``state_dict()`` as a checkpoint has it."""
        if not self.shown:
            return name
        # What a module's own hooks put there may have dots of its own.
        end = len(name)
        while True:
            end = name.rfind(".", 0, end)
            prefix = name[: end + 1]
            if prefix in self.shown:
                return self.shown[prefix] + name[len(prefix) :]
            if end < 0:
                return name

    def bare_versions(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """A ``state_dict()``'s ``_metadata``, by prefixes (without their last dot) of the bare module."""
        if not self.raw:
            return metadata
        return {
            self.raw.get(f"{prefix}." if prefix else "", f"{prefix}.")[:-1]: versions
            for prefix, versions in metadata.items()
            if (f"{prefix}." if prefix else "") not in self.wrappers
        }

    def own_versions(self, prefixes: list[str], stored: dict[str, Any]) -> dict[str, Any]:
        """The inverse, for a module whose ``_metadata`` has these prefixes."""
        plain = {"version": 1}
        if not self.raw:
            return {**dict.fromkeys(prefixes, plain), **stored}
        found = {}
        for prefix in prefixes:
            raw = f"{prefix}." if prefix else ""
            bare = self.raw.get(raw, raw)[:-1]
            found[prefix] = plain if raw in self.wrappers else stored.get(bare, plain)
        return found


def sharded_by_fsdp1(module: torch.nn.Module) -> str | None:
    """Why the state of a module that FSDP's first version wraps cannot be carried; None: it can be.

    Its ``state_dict()`` gives parts that know their place (DTensor, ShardedTensor) in one of its
    modes alone; in the others it gathers every parameter, or gives flat pieces that fit nothing.
    """
    home = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    fsdp = getattr(home, "FullyShardedDataParallel", None)
    if fsdp is None or not any(isinstance(member.module, fsdp) for member in members(module)):
        return None
    mode = fsdp.get_state_dict_type(module).state_dict_type
    if mode is None or mode.name != "SHARDED_STATE_DICT":
        return (
            "is wrapped in FullyShardedDataParallel, whose state_dict() is not sharded here; use "
            "torch.distributed.fsdp.fully_shard instead, or call "
            "FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)"
        )
    return None


def is_flattened_by_fsdp1(parameter: torch.Tensor) -> bool:
    """Whether FSDP's first version keeps a parameter, or a view of one, in flat pieces."""
    return getattr(parameter, "_fsdp_flattened", False) is True
