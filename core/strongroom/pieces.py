"""Which piece of a distributed tensor this process holds, and which layouts have none.

DCP's planners know a piece by its first element and its sizes, and they know that of every layout
but one: where FSDP2 shards a dimension that tensor or expert parallelism has sharded already, torch
describes the result by a placement of its own, and where the sizes do not come out even DCP reads
another piece out of it than the one that is there. That layout is worked out here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from strongroom.columns import Box

__all__ = ["has_layout_of_its_own", "piece_of", "placements_of", "problem_of"]


def placements_of(tensor: torch.Tensor) -> str:
    """A distributed tensor's layout, in words; empty for others."""
    mesh, placements = _layout(tensor)
    if mesh is None:
        return ""
    shape = "x".join(map(str, mesh.shape))
    names = f" ({', '.join(mesh.mesh_dim_names)})" if mesh.mesh_dim_names else ""
    words = ", ".join("Replicate" if one.is_replicate() else f"Shard({one.dim})" for one in placements)
    return f"mesh {shape}{names}: {words}"[:200]


def problem_of(tensor: torch.Tensor) -> str | None:
    """Why a tensor's layout can be neither stored nor filled, or None where it can."""
    mesh, placements = _layout(tensor)
    if mesh is None:
        return None
    if any(placement.is_partial() for placement in placements):
        return "a DTensor with a Partial placement holds unreduced sums"
    for placement in placements:
        if not placement.is_replicate() and not isinstance(getattr(placement, "dim", None), int):
            return f"a DTensor with the placement {placement} is not known here"
    strided = [number for number, placement in enumerate(placements) if _split_factor(placement) > 1]
    for number in strided:
        dimension = placements[number].dim
        others = [
            (place, one)
            for place, one in enumerate(placements)
            if place != number and not one.is_replicate() and one.dim == dimension
        ]
        cut_before = math.prod(mesh.shape[place] for place, _ in others if place > number)
        is_known = cut_before == _split_factor(placements[number])
        if not is_known or any(place in strided for place, _ in others):
            return (
                f"a DTensor with the placements {tuple(placements)} on a mesh {tuple(mesh.shape)} may leave "
                f"a rank with several separate pieces of dimension {dimension}"
            )
    return None


def has_layout_of_its_own(tensor: torch.Tensor) -> bool:
    """Whether DCP's planners may not know which piece of a tensor this process holds."""
    # Also one that counts as cut into one piece: torch 2.7 plans wrong rows for it where they are uneven.
    return any(hasattr(placement, "split_factor") for placement in _layout(tensor)[1])


def piece_of(tensor: torch.Tensor) -> Box | None:
    """Offsets and sizes of what this process holds of such a tensor; None: it takes no part.

    FSDP2 cuts last: what it shards are the pieces that the other dimensions of the mesh left.
    """
    mesh, placements = _layout(tensor)
    coordinate = mesh.get_coordinate() if mesh is not None else None
    if coordinate is None:
        return None
    cuts = [
        (_split_factor(placement) > 1, number)
        for number, placement in enumerate(placements)
        if not placement.is_replicate()
    ]
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    for _, number in sorted(cuts):
        dimension = placements[number].dim
        # As `torch.chunk` cuts: full pieces first, then what is left, then empty ones.
        length = -(-sizes[dimension] // mesh.shape[number])
        start = min(coordinate[number] * length, sizes[dimension])
        offsets[dimension] += start
        sizes[dimension] = min(length, sizes[dimension] - start)
    return tuple(offsets), tuple(sizes)


def _layout(tensor: torch.Tensor) -> tuple[Any, Sequence[Any]]:
    """A distributed tensor's mesh and placements; None and nothing for others."""
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)
    return (None, ()) if mesh is None or placements is None else (mesh, placements)


def _split_factor(placement: Any) -> int:
    """Into how many pieces a dimension counts as cut before this placement cuts it; else 1."""
    return getattr(placement, "split_factor", 1)
