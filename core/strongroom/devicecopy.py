"""Copies from accelerators to host memory, on streams of their own.

The copy of a device's tensors is queued behind what training has queued already, and runs beside
what it queues next. Until it is done the tensors must not change: `Pending.fence` makes later
work of training wait for it on the device, `Pending.wait` makes the host wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

__all__ = ["CudaCopier", "DeviceCopier", "Pending", "fence_before_step", "own_copier"]


class Pending(Protocol):
    """Copies that are under way."""

    def wait(self) -> None:
        """Return once the bytes are in host memory; on any thread."""

    def fence(self) -> None:
        """Let work that this thread queues from now on begin only after the copies."""


class DeviceCopier(Protocol):
    """Starts copies."""

    def is_far(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on an accelerator of this kind."""

    def start(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Pending:
        """Copy each source, on any device, to the target in (pinned) host memory of the same place."""


class CudaCopier:
    """Copies on one side stream a CUDA device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def is_far(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def start(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Pending:
        by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for target, source in zip(targets, sources, strict=True):
            by_device.setdefault(source.device, []).append((target, source))
        events = []
        for device, pairs in by_device.items():
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
                    # Its memory must not be given to somebody else while the copy reads it.
                    source.record_stream(stream)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(stream)
            events.append((device, event))
        return _CudaPending(events)


class _CudaPending:
    def __init__(self, events: Iterable[tuple[torch.device, torch.cuda.Event]]) -> None:
        self._events = tuple(events)

    def wait(self) -> None:
        for _, event in self._events:
            event.synchronize()

    def fence(self) -> None:
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)


def own_copier() -> DeviceCopier | None:
    """What copies from this process's accelerators; None where it uses none.

    Asks for nothing that would set CUDA up: a process that has not could not be forked any more.
    """
    return CudaCopier() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def fence_before_step(pending: Pending, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Let the next step of each optimizer wait, on the device, for the copies; the later ones do not."""
    for optimizer in optimizers:
        handles: list[Any] = []
        handles.append(optimizer.register_step_pre_hook(_once(pending, handles)))


def _once(pending: Pending, handles: list[Any]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        for handle in handles:
            handle.remove()
        pending.fence()

    return hook
