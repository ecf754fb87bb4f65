"""Copies from an accelerator that end after ``save`` returned; a slow device stands in for one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from strongroom import Checkpointer
from strongroom.stores.memory import MemoryStore


class SlowDevice:
    """Copies nothing until somebody waits, which is when an accelerator may get to it at the latest.

    Its tensors are ordinary ones; every floating-point tensor counts as lying on it.
    """

    def __init__(self) -> None:
        self.log: list[str] = []

    def is_far(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point()

    def start(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Any:
        device = self

        class Copies:
            is_done = False
            lock = threading.Lock()

            def _copy(self) -> None:
                with self.lock, torch.no_grad():
                    if not self.is_done:
                        torch._foreach_copy_(list(targets), list(sources))
                        self.is_done = True

            def wait(self) -> None:
                device.log.append("wait")
                self._copy()

            def fence(self) -> None:
                device.log.append("fence")
                self._copy()

        return Copies()


@pytest.fixture
def trained() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def on(device: SlowDevice, checkpointer: Checkpointer) -> Checkpointer:
    checkpointer._stager._copier = lambda: device
    return checkpointer


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def restored(memory: Any) -> dict[str, torch.Tensor]:
    return Checkpointer(memory).restore().state["model"]  # type: ignore[union-attr, no-any-return]


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_save_waits_for_the_device_where_nothing_else_was_asked_for(trained: Any, begin: Any) -> None:
    model, optimizer = trained
    device, store = SlowDevice(), MemoryStore()
    checkpointer = on(device, begin(store))
    before = snapshot(model)
    handle = checkpointer.save(1, {"model": model, "optimizer": optimizer})
    assert "wait" in device.log
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    handle.result()
    assert_equal(restored(store), before)


def test_an_overlapped_copy_is_fenced_before_the_optimizers_next_step(
    trained: Any, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strongroom import parts

    model, optimizer = trained
    device, store = SlowDevice(), MemoryStore()
    gate = threading.Event()
    write_part = parts._write_part

    def held_up(*arguments: Any, **options: Any) -> Any:
        assert gate.wait(60)
        return write_part(*arguments, **options)

    monkeypatch.setattr(parts, "_write_part", held_up)
    checkpointer = on(device, begin(store, overlap_device_copy=True))
    before = snapshot(model)
    handle = checkpointer.save(1, {"model": model, "optimizer": optimizer})
    # The batch norm's statistics change in the next forward pass, before any step: they come first.
    assert device.log == ["fence"]
    model(torch.randn(8, 4)).sum().backward()
    assert device.log == ["fence"]
    optimizer.step()
    assert device.log == ["fence", "fence"]
    optimizer.step()
    assert device.log == ["fence", "fence"]
    gate.set()
    handle.result()
    assert_equal(restored(store), before)


def test_without_an_optimizer_the_fence_comes_at_once(trained: Any, begin: Any) -> None:
    model, _ = trained
    device = SlowDevice()
    checkpointer = on(device, begin(MemoryStore(), overlap_device_copy=True))
    checkpointer.save(1, {"model": model})
    assert device.log[:2] == ["fence", "fence"]


def test_whoever_changes_the_state_in_another_way_waits_until_it_is_staged(trained: Any, begin: Any) -> None:
    model, optimizer = trained
    device, store = SlowDevice(), MemoryStore()
    checkpointer = on(device, begin(store, overlap_device_copy=True))
    before = snapshot(model)
    handle = checkpointer.save(1, {"model": model, "optimizer": optimizer})
    handle.wait_staged(timeout_s=60)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    handle.result()
    assert_equal(restored(store), before)


@pytest.mark.gpu
@pytest.mark.parametrize("is_overlapped", (False, True))
def test_tensors_on_a_cuda_device_are_those_of_the_moment_of_the_save(
    begin: Any, root: Any, is_overlapped: bool
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.BatchNorm1d(4096)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    checkpointer = begin(root, overlap_device_copy=is_overlapped)
    for step in range(4):
        model(torch.randn(64, 4096, device="cuda")).sum().backward()
        optimizer.step()
        before = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        checkpointer.save(step, {"model": model, "optimizer": optimizer})
        model(torch.randn(64, 4096, device="cuda")).sum().backward()
        optimizer.step()
        checkpointer.wait()
        assert_equal(begin(root).restore().state["model"], before)
    assert all(buffer.is_pinned() for buffer in checkpointer._stager._stage._buffers)
