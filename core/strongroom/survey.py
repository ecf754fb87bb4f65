"""Many tensors looked at together: whether each can be stored, and which are one memory.

What is asked of every tensor of a state is asked in lists, since training waits for it.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import attrgetter
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from strongroom import dtypes, stage
from strongroom.errors import StateEncodingError
from strongroom.guards import Guard, guard_of
from strongroom.keypath import Path, key_path

__all__ = ["Survey", "is_carried", "is_distributed", "is_sharded", "memory_of", "survey"]

_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was found out, in lists of one entry a tensor.

    Attributes:
        shapes, dtypes: of each.
        placements: for each tensor that is distributed, its position and how it is.
        shared: positions of tensors that show the same of the same memory, in order.
        addresses: where the part of each that this process holds starts.
        suspects: positions of tensors that start where another one does.
        guard: tells quickly whether tensors are like these; None: it cannot be told.
    """

    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    placements: list[Any]
    shared: list[list[int]] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    suspects: list[int] = field(default_factory=list)
    guard: Guard | None = None


_NOTHING: Final = Survey(shapes=[], dtypes=[], placements=[])
_SHAPE: Final = attrgetter("shape")
_MIN_GUARDED: Final = 256
"""Tensors below which asking each costs nothing worth saving."""

_LOWEST: Final = 1 << 40
"""Addresses below belong to tensors that are empty, on the meta device, or freed: of a view of a freed
storage it is the view's offset. A system that has its heap there costs a closer look, and no more."""


def survey(tensors: Sequence[torch.Tensor], paths: Sequence[Path], last: Survey | None = None) -> Survey:
    """Look at tensors.

    Args:
        tensors: what is to be stored.
        paths: where each stands, for errors.
        last: what was found out last time; what is equal is shared with it.

    Raises:
        StateEncodingError: one cannot be stored; names the first.
    """
    if last is None or len(last.shapes) != len(tensors):
        last = _NOTHING
    guard = last.guard
    if guard is not None and guard.holds(tensors):
        # Nothing but their memory can be another.
        return _located(list(map(torch.Tensor.data_ptr, tensors)), tensors, tensors, paths, last, last)
    kinds = list(map(type, tensors))
    placements: list[Any] = []
    held: Sequence[torch.Tensor] = tensors
    if not set(kinds) <= _PLAIN:
        held, placements = _held(tensors, kinds, paths)
    try:
        addresses = list(map(torch.Tensor.data_ptr, held))
        found_dtypes = [tensor.dtype for tensor in held]
        # Compared one by one: as many tuples at once would set off Python's garbage collector.
        is_same = last is not _NOTHING and all(map(operator.eq, map(_SHAPE, tensors), last.shapes))
        shapes = last.shapes if is_same else list(map(_SHAPE, tensors))
    except RuntimeError:
        _refuse_first(held, paths)
        raise
    if found_dtypes == last.dtypes:
        found_dtypes = last.dtypes
    elif any(dtypes.dtype_name(dtype) is None for dtype in set(found_dtypes)):
        _refuse_first(held, paths)
    seen = Survey(
        shapes=shapes,
        dtypes=found_dtypes,
        placements=placements,
        guard=guard_of(tensors) if not placements and len(tensors) >= _MIN_GUARDED else None,
    )
    return _located(addresses, tensors, held, paths, seen, last)


def _located(
    addresses: list[int],
    tensors: Sequence[torch.Tensor],
    held: Sequence[torch.Tensor],
    paths: Sequence[Path],
    seen: Survey,
    last: Survey,
) -> Survey:
    """A survey with what depends on where the tensors lie."""
    if addresses == last.addresses:
        addresses, suspects = last.addresses, last.suspects
    else:
        if min(addresses, default=_LOWEST) < _LOWEST:
            nowhere = [address < _LOWEST for address in addresses]
            _refuse_first(compress(held, nowhere), compress(paths, nowhere))
        suspects = _suspects(addresses)
    shared = _shared(suspects, tensors, held) if suspects else []
    return replace(seen, shared=shared, addresses=addresses, suspects=suspects)


def _held(
    tensors: Sequence[torch.Tensor], kinds: list[type], paths: Sequence[Path]
) -> tuple[list[torch.Tensor], list[Any]]:
    """The part of each tensor that this process holds, and how those that are distributed are."""
    held = list(tensors)
    placements: list[Any] = []
    with torch.no_grad():
        for position, (tensor, kind) in enumerate(zip(tensors, kinds, strict=True)):
            if kind in _PLAIN:
                continue
            if is_sharded(tensor):
                held[position] = _held_shard(tensor, paths[position])
                placements.append((position, str(tensor.metadata())))  # type: ignore[attr-defined]
                continue
            stage.check_tensor(tensor, key_path(paths[position]))
            local = stage.local_tensor(tensor)
            if type(local) not in _PLAIN:
                wait = getattr(local, "wait", None)  # a collective that has not ended
                local = wait() if wait is not None else local
            if type(local) not in _PLAIN:
                raise StateEncodingError(
                    key_path(paths[position]),
                    f"a distributed tensor whose part here is of the subclass {type(local).__qualname__} is "
                    f"not carried",
                )
            held[position] = local
            # By their types, too: to torch 2.7 a dimension that FSDP2 shards over a mesh of tensor
            # parallelism is the same as one that is sharded by rows.
            laid = tuple([(type(one), one) for one in tensor.placements])  # type: ignore[attr-defined]
            placements.append((position, laid, tensor.device_mesh))  # type: ignore[attr-defined]
    return held, placements


def _held_shard(tensor: Any, path: Path) -> torch.Tensor:
    """The first of the pieces that a process holds."""
    shards = tensor.local_shards()
    for shard in shards:
        stage.check_tensor(shard.tensor, key_path(path))
    return shards[0].tensor if shards else torch.empty(0, dtype=tensor.dtype)


def _refuse_first(tensors: Iterable[torch.Tensor], paths: Iterable[Path]) -> None:
    for tensor, path in zip(tensors, paths, strict=True):
        stage.check_tensor(tensor, key_path(path))


def _suspects(addresses: list[int]) -> list[int]:
    """Positions of tensors that start where another one does."""
    if len(set(addresses)) == len(addresses):
        return []
    several = {address for address, count in Counter(addresses).items() if count > 1}
    return list(compress(range(len(addresses)), map(several.__contains__, addresses)))


def _shared(
    suspects: list[int], tensors: Sequence[torch.Tensor], held: Sequence[torch.Tensor]
) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for position in suspects:
        memory = memory_of(tensors[position], held[position])
        if memory is not None:
            groups.setdefault(memory, []).append(position)
    return [group for group in groups.values() if len(group) > 1]


def memory_of(tensor: torch.Tensor, local: torch.Tensor) -> Any:
    """A key that two tensors share exactly when they are the same view of the same memory; None: of none."""
    if local.numel() == 0 or is_sharded(tensor):
        return None
    return (
        local.device,
        local.data_ptr(),
        local.dtype,
        tuple(local.shape),
        local.stride(),
        local.is_conj(),
        local.is_neg(),
        tuple(tensor.shape),
        str(getattr(tensor, "placements", "")),
    )


def is_carried(tensor: torch.Tensor) -> bool:
    """Whether it is of a class whose data are all there is to it."""
    return type(tensor) in _PLAIN or is_sharded(tensor) or isinstance(tensor, DTensor)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether other ranks may hold other parts of it."""
    return isinstance(tensor, DTensor) or is_sharded(tensor)


def is_sharded(tensor: Any) -> bool:
    """Whether it is a `ShardedTensor`, which torch's older sharding makes."""
    home = sys.modules.get("torch.distributed._shard.sharded_tensor.api")
    kind = getattr(home, "ShardedTensor", None)
    return kind is not None and isinstance(tensor, kind)
