"""Reading chunks: whatever a target's size and strides, it gets its bytes, and each shard is opened once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strongroom import Checkpointer, IntegrityError, StoreUnavailableError, fetch
from strongroom.stores.memory import MemoryStore

MiB = 1 << 20


class Counting(MemoryStore):
    """A store in memory that counts the shards that are opened and closed."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = 0
        self.closed = 0
        self.fails_after: int | None = None

    def open_reader(self, key: str) -> Any:
        reader = super().open_reader(key)
        if not key.endswith(".safetensors") or "index" in key:
            return reader
        self.opened += 1
        store = self

        class Reader(type(reader)):  # type: ignore[misc]
            def close(self) -> None:
                store.closed += 1
                super().close()

            def read_into(self, offset_bytes: int, buffer: memoryview) -> int:
                if store.fails_after is not None and offset_bytes >= store.fails_after:
                    raise StoreUnavailableError("no answer")
                return int(super().read_into(offset_bytes, buffer))

        reader.__class__ = Reader
        return reader


def saved(state: dict[str, Any], **options: Any) -> Counting:
    store = Counting()
    with Checkpointer(store, **options) as checkpointer:
        checkpointer.save(1, state).result()
    return store


sizes = st.lists(st.sampled_from([0, 1, 3, 1000, MiB // 4 - 1, MiB // 4, MiB // 4 + 1, MiB]), max_size=12)


@settings(max_examples=25)
@given(sizes, st.sampled_from(["blake3", "sha256"]), st.randoms())
def test_tensors_of_any_size_come_back_from_wherever_they_lie(
    lengths: list[int], digest: str, random: Any
) -> None:
    state = {f"t{number}": torch.randn(length) for number, length in enumerate(lengths)}
    store = saved({"model": state}, digest=digest)
    wanted = {name: tensor for name, tensor in state.items() if random.random() < 0.7}
    targets = {name: torch.full_like(tensor, -1) for name, tensor in wanted.items()}
    Checkpointer(store).restore({"model": targets}, strict=False)
    for name, tensor in wanted.items():
        assert torch.equal(targets[name], tensor), name
    assert store.opened == store.closed


def test_targets_of_any_stride_are_filled() -> None:
    state = {name: torch.randn(3, 4) for name in "abc"} | {"one": torch.randn(1, 1)}
    store = saved(state)
    targets = {
        "a": torch.zeros(4, 3).t(),
        "b": torch.zeros(6, 8)[::2, ::2],
        "c": torch.zeros(3, 4),
        # One element counts as contiguous, whatever its strides.
        "one": torch.zeros(4, 4)[::4, ::2][:, 1:],
    }
    assert targets["one"].is_contiguous()
    assert targets["one"].stride() == (16, 2)
    Checkpointer(store).restore(targets)
    for name, tensor in state.items():
        assert torch.equal(targets[name], tensor), name


def test_a_shard_is_opened_once_however_many_threads_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_TASK_RUNS", 1)
    state = {f"t{number}": torch.randn(MiB) for number in range(6)}
    store = saved({"model": state})
    shards = len([key for key in store.list_names(store.list_names("")[-1] + "data") if key[0].isdigit()])
    targets = {name: torch.zeros(MiB) for name in state}
    Checkpointer(store).restore({"model": targets})
    assert all(torch.equal(targets[name], tensor) for name, tensor in state.items())
    assert store.opened == store.closed == shards


@pytest.mark.parametrize("digest", ("blake3", "sha256"))
def test_no_shard_stays_open_where_one_cannot_be_read(digest: str) -> None:
    store = saved({"model": [torch.randn(MiB) for _ in range(8)]}, digest=digest)
    store.fails_after = 4 * MiB
    with pytest.raises(StoreUnavailableError, match="no answer"):
        Checkpointer(store).restore()
    assert store.opened == store.closed > 0


def test_a_wrong_block_among_many_small_tensors_is_found() -> None:
    store = saved({"model": {f"t{number}": torch.randn(1000) for number in range(2000)}})
    folder = next(name for name in store.list_names("") if name.startswith("step-"))
    key = f"{folder}data/00000-00.safetensors"
    data = bytearray(store.read(key, limit_bytes=1 << 30))
    data[3 * MiB + 5] ^= 1
    store.delete(key)
    store.put(key, bytes(data))
    with pytest.raises(IntegrityError, match=f"bytes {3 * MiB} to {4 * MiB}"):
        Checkpointer(store).restore(step=1)
