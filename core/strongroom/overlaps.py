"""Tensors that share some of their memory without being the same view of it.

A checkpoint holds each by itself, so filling one may change what another was filled with. That is fine
where the checkpoint's values agree on what is shared, as they do when it was shared when they were
saved; and where they do not, no order of filling is right. So such tensors are filled apart, and
put together only at the end, where it shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

import torch

from strongroom.dtypes import bytes_of
from strongroom.stage import local_tensor
from strongroom.survey import is_sharded

__all__ = ["overlapping", "put_together"]


def overlapping(targets: Mapping[str, torch.Tensor], names: Iterable[str]) -> set[str]:
    """Names of tensors whose stretches of memory overlap; equal views of one memory count as one.

    Stretches: a tensor of columns counts from its first element to its last, so some are named
    that share nothing. That costs a copy and is no error.
    """
    stretches = []
    for name in names:
        target = targets[name]
        if is_sharded(target):
            continue
        local = local_tensor(target)
        if local.numel() == 0:
            continue
        reach = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
        start = local.data_ptr()
        view = (start, start + (reach + 1) * local.element_size(), tuple(local.shape), local.stride())
        stretches.append((str(local.device), view, name))
    found: set[str] = set()
    for _, on_device in groupby(sorted(stretches), key=lambda stretch: stretch[0]):
        end = 0
        before: list[str] = []
        last = None
        for _, view, name in on_device:
            if view == last:
                # Of one view two names are filled with one value, or were refused.
                before.append(name)
            elif view[0] < end:
                found.update((*before, name))
                before.append(name)
            else:
                before = [name]
            end = max(end, view[1])
            last = view
    return found


def put_together(parts: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> list[str]:
    """Copy each tensor's value to it; names of those that then hold something else.

    Args:
        parts: by name, a tensor that shares memory with others, and its value.
    """
    with torch.no_grad():
        for target, value in parts.values():
            local_tensor(target).copy_(local_tensor(value))
        return [name for name, (target, value) in parts.items() if not _is_same(target, value)]


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits: a NaN is itself."""
    one, other = (
        bytes_of(local_tensor(tensor).cpu().resolve_conj().resolve_neg().contiguous())
        for tensor in (first, second)
    )
    return bytes(one) == bytes(other)
