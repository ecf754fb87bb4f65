"""Staging: whatever a tensor's strides, dtype or pending operations, its bytes come to lie in its shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strongroom import stage
from strongroom.dtypes import dtype_name
from strongroom.errors import ConfigError
from strongroom.layout import CheckpointName
from strongroom.shards import ChunkSpec, binding
from strongroom.stage import Stage, StagedShard
from strongroom.tensorfile import parse_header

BOUND = binding("run", CheckpointName(launch=1, step=7, attempt="0123456789abcdef"))

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)


def spec_of(name: str, tensor: torch.Tensor) -> ChunkSpec:
    dtype = dtype_name(tensor.dtype)
    assert dtype is not None
    sizes = tuple(tensor.shape)
    return ChunkSpec(tensor=name, dtype=dtype, offsets=(0,) * len(sizes), sizes=sizes, is_whole=True)


def bytes_of(tensor: torch.Tensor) -> bytes:
    if tensor.numel() == 0:
        return b""
    packed = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return torch.cat([packed, packed])[: tensor.numel()].view(torch.uint8).numpy().tobytes()


def staged_bytes(shards: Sequence[StagedShard]) -> dict[str, bytes]:
    found = {}
    for shard in shards:
        data = b"".join(bytes(piece) for piece in shard.pieces(BOUND))
        header = parse_header(data, len(data), "a shard")
        for entry in header.entries:
            found[entry.name] = data[entry.start : entry.start + entry.size_bytes]
    return found


def copied(tensors: Sequence[torch.Tensor], staging: Stage | None = None) -> list[bytes]:
    """Each tensor's bytes as they were staged."""
    staging = staging or Stage(rank=0, parts=2)
    specs = [spec_of(f"t{number}", tensor) for number, tensor in enumerate(tensors)]
    found = staged_bytes(staging.copy(specs, tensors, BOUND))
    return [found[spec.entry] for spec in specs]


@st.composite
def any_tensor(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = (torch.arange(float(np.prod([size + 1 for size in shape]))) - 7).to(dtype)
    tensor = tensor.reshape([size + 1 for size in shape])[tuple(slice(1, None) for _ in shape)]
    kinds = ["strided", "packed", "parameter", "moved", "expanded", "conj", "neg"]
    match draw(st.sampled_from(kinds)):
        case "packed":
            return tensor.contiguous()
        case "parameter":
            return torch.nn.Parameter(tensor, requires_grad=dtype.is_floating_point)
        case "moved":
            return tensor.permute(tuple(reversed(range(tensor.ndim))))
        case "expanded":
            return tensor.expand(2, *tensor.shape)
        case "conj" if dtype.is_complex:
            return (tensor * (1 + 2j)).conj()
        case "neg" if dtype.is_complex:
            return (tensor * (1 + 2j)).conj().imag
        case _:
            return tensor


@given(st.lists(any_tensor(), max_size=40), st.booleans())
def test_every_tensor_s_bytes_are_those_of_its_values(tensors: list[torch.Tensor], many: bool) -> None:
    if many:
        # Enough neighbours of each that they are copied together.
        tensors = [tensor for tensor in tensors for _ in range(9)]
    assert copied(tensors) == [bytes_of(tensor) for tensor in tensors]


def test_small_neighbours_are_copied_together_and_large_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    cat = torch.cat
    monkeypatch.setattr(
        torch, "cat", lambda tensors, **out: calls.append(len(tensors)) or cat(tensors, **out)
    )
    tensors = [torch.randn(256) for _ in range(1000)] + [torch.randn(1 << 16), torch.tensor(2.5)]
    assert copied(tensors) == [bytes_of(tensor) for tensor in tensors]
    assert sum(calls) > 1000 - stage._MIN_ROWS
    assert max(calls) * 256 < 1 << 15


def test_tensors_that_no_one_call_can_join_are_copied_one_by_one() -> None:
    # A wider dtype than was announced: joining refuses it, as it refuses several devices.
    tensors = [torch.full((4,), float(number)) for number in range(20)]
    specs = [spec_of(f"t{number}", tensor.to(torch.int8)) for number, tensor in enumerate(tensors)]
    found = staged_bytes(Stage(rank=0, parts=1).copy(specs, tensors, BOUND))
    assert [found[spec.entry] for spec in specs] == [bytes([number] * 4) for number in range(20)]


def test_buffers_are_used_again_while_shapes_stay_and_hold_the_new_values() -> None:
    staging = Stage(rank=0, parts=1)
    tensors = [torch.zeros(100) for _ in range(30)]
    specs = [spec_of(f"t{number}", tensor) for number, tensor in enumerate(tensors)]
    staging.prepare(specs, BOUND)
    first = staging.copy(specs, tensors, BOUND)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    second = staging.copy(list(specs), tensors, BOUND)
    assert [shard.image.obj is other.image.obj for shard, other in zip(first, second, strict=True)] == [True]
    assert copied(tensors, staging) == [bytes_of(tensor) for tensor in tensors]
    assert staging.size_bytes >= 30 * 400


def test_another_shape_gets_buffers_of_its_own() -> None:
    staging = Stage(rank=0, parts=1)
    assert copied([torch.ones(3)] * 9, staging) == [bytes_of(torch.ones(3))] * 9
    assert copied([torch.ones(2, 2)] * 12, staging) == [bytes_of(torch.ones(2, 2))] * 12


def test_every_chunk_needs_its_tensor() -> None:
    specs = [spec_of("a", torch.ones(3)), spec_of("b", torch.ones(3))]
    with pytest.raises(ConfigError, match="1 tensors were given for 2 chunks"):
        Stage(rank=0, parts=1).copy(specs, [torch.ones(3)], BOUND)


@pytest.mark.gpu
def test_tensors_on_several_devices_are_copied() -> None:
    tensors: list[Any] = [torch.randn(64, device=("cpu", "cuda")[number % 2]) for number in range(40)]
    tensors += [torch.randn(64, device="cuda") for _ in range(40)]
    assert copied(tensors) == [bytes_of(tensor.cpu()) for tensor in tensors]


def test_groups_follow_each_other_without_a_gap() -> None:
    places = [
        (ChunkSpec(f"t{number}", "F32", (0, 0), sizes, is_whole=True), 0, number)
        for number, sizes in enumerate([(3, 2), (1, 2), (5, 2), (5, 3), (1 << 14, 2), (2, 2)])
    ]
    groups = [[place[2] for place in group] for group in stage._groups(places)]
    assert groups == [[0, 1, 2], [3], [4], [5]]


def test_a_shard_begins_with_a_page_so_that_it_can_be_written_past_the_page_cache() -> None:
    staging = Stage(rank=0, parts=3)
    tensors = [torch.ones(size << 18) for size in (9, 8, 7)]
    specs = [spec_of(f"t{number}", tensor) for number, tensor in enumerate(tensors)]
    shards = staging.copy(specs, tensors, BOUND)
    assert len(shards) == 3
    for shard in shards:
        assert np.frombuffer(shard.image, np.uint8).__array_interface__["data"][0] % 4096 == 0
