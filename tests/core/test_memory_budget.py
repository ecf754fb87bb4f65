"""Host memory for a save is bounded; what has no room is written while training waits."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strongroom import StoreFullError
from strongroom.layout import CheckpointName
from strongroom.plan import plan_local
from strongroom.shards import binding, lay_out
from strongroom.streaming import streamed_pieces

MIB = 1 << 20


def state() -> dict[str, Any]:
    return {
        "big": torch.arange(6 * MIB, dtype=torch.float32),  # 24 MiB
        "fits": torch.arange(2 * MIB, dtype=torch.float32) * 2,  # 8 MiB
        "crooked": torch.arange(4 * MIB, dtype=torch.float32).reshape(2048, 2048).t(),  # 16 MiB
        "scalar": torch.tensor(3.0),
        "lazy": torch.complex(torch.ones(4), torch.ones(4)).conj(),
        "empty": torch.empty(0, 7),
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_what_has_no_room_is_written_all_the_same(root: Path, begin: Any, caplog: Any) -> None:
    checkpointer = begin(root, memory_budget=20 * MIB)
    for step in (1, 2):
        checkpointer.save(step, state()).result()
    restored = begin(root).restore()
    assert_same(restored.state, state())
    assert len(list(root.glob("step-*-0001-*/data/*.safetensors"))) >= 6  # index and two shards, twice
    assert checkpointer._stager._stage.size_bytes <= 20 * MIB + MIB
    assert "are written while training waits" in caplog.text
    assert caplog.text.count("are written while training waits") == 1


def test_what_was_written_while_training_waited_is_of_that_moment(root: Path, begin: Any) -> None:
    values = state()
    checkpointer = begin(root, memory_budget=20 * MIB)
    handle = checkpointer.save(1, values)
    values["big"].zero_()
    values["crooked"].zero_()
    handle.result()
    assert_same(begin(root).restore().state, state())


def test_a_store_that_is_full_while_training_waits_raises_there_and_leaves_nothing(
    memory: Any, begin: Any
) -> None:
    checkpointer = begin(memory, memory_budget=20 * MIB)
    checkpointer.save(1, {"t": torch.ones(3)}).result()
    memory.fail(StoreFullError("no space"), on="write", where="safetensors", times=1)
    with pytest.raises(StoreFullError):
        checkpointer.save(2, state())
    checkpointer.wait()
    assert [name for name in memory.list_names("") if "step-000000000002" in name] == []
    checkpointer.save(3, state()).result()
    assert [one.step for one in checkpointer.checkpoints()] == [3, 1]


@given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    way=st.sampled_from(("plain", "transposed", "sliced", "conjugate")),
)
def test_streamed_bytes_are_those_that_a_copy_would_have(shape: list[int], way: str) -> None:
    tensor = torch.randn(shape, dtype=torch.complex64)
    if way == "transposed" and tensor.dim() > 1:
        tensor = tensor.transpose(0, 1)
    elif way == "sliced" and tensor.dim() > 0:
        tensor = tensor[..., ::2]
    elif way == "conjugate":
        tensor = tensor.conj()
    plan = plan_local({"t": tensor}, {"t": "t"}, ())
    specs = [held.chunk for held in plan.chunks]
    metadata = binding("run", CheckpointName(launch=1, step=1, attempt="0" * 16))
    (layout,) = lay_out(specs, rank=0, parts=1, metadata=metadata)
    data = b"".join(bytes(piece) for piece in streamed_pieces(layout, {specs[0]: tensor}, metadata))
    assert len(data) == layout.size_bytes
    expected = torch.view_as_real(tensor.resolve_conj()).clone().numpy().tobytes()
    assert data[layout.header_bytes :] == expected


def test_a_budget_bounds_what_a_save_adds_to_the_process(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import resource, sys, torch
        from strongroom import Checkpointer

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

        state = {f"t{n}": torch.ones(4 << 20) for n in range(16)}  # 256 MiB in 16 MiB tensors
        with Checkpointer(sys.argv[1] + "/warm") as checkpointer:
            checkpointer.save(1, {"t": torch.ones(1)})
        before = peak()
        with Checkpointer(sys.argv[1] + "/run", memory_budget=32 << 20) as checkpointer:
            for step in range(3):
                checkpointer.save(step, state).result()
        print(peak() - before)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    # 32 MiB of budget, and what documents, threads and pieces take; far below the 256 MiB of a copy.
    assert int(done.stdout) < 32 * MIB + 64 * MIB


def test_fifty_saves_take_no_more_memory_than_a_few(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import resource, sys, torch
        from strongroom import Checkpointer, KeepLast

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

        state = {f"t{n}": torch.ones(1 << 20) for n in range(16)}  # 64 MiB in 4 MiB tensors
        with Checkpointer(sys.argv[1] + "/warm") as checkpointer:
            checkpointer.save(1, {"t": torch.ones(1)})
        before = peak()
        peaks = []
        with Checkpointer(sys.argv[1] + "/run", keep=KeepLast(count=2)) as checkpointer:
            for step in range(50):
                checkpointer.save(step, {"model": state, "extra": {"step": step}}).result()
                peaks.append(peak() - before)
        print(*peaks)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    peaks = [int(word) for word in done.stdout.split()]
    # The design's bar: 1.05 x the state and 128 MiB, flat.
    assert peaks[-1] <= 1.05 * 64 * MIB + 128 * MIB
    assert peaks[-1] - peaks[4] <= 4 * MIB
