"""How chunks are laid out over files: the same way every time, evenly, and bound to one checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from strongroom import shards
from strongroom.digest import digest_of_bytes
from strongroom.dtypes import DTYPE_BYTES
from strongroom.errors import FormatError, IntegrityError, StoreUnavailableError
from strongroom.layout import CheckpointName
from strongroom.pace import Pace
from strongroom.shards import ChunkSpec, binding, check_binding, lay_out, write_file
from strongroom.stores.memory import MemoryStore
from strongroom.testing import FaultyStore

NAME = CheckpointName(launch=1, step=7, attempt="0123456789abcdef")
BOUND = binding("run", NAME)
MiB = 1 << 20


def whole(name: str, size: int, dtype: str = "F32") -> ChunkSpec:
    return ChunkSpec(tensor=name, dtype=dtype, offsets=(0,), sizes=(size,), is_whole=True)


def test_a_part_of_a_tensor_is_named_by_where_it_begins() -> None:
    part = ChunkSpec(tensor="t", dtype="F32", offsets=(4, 0), sizes=(2, 3), is_whole=False)
    assert part.entry == "t@4,0"
    assert part.size_bytes == 24
    assert whole("t", 3).entry == "t"


def test_small_states_stay_in_one_file() -> None:
    (layout,) = lay_out([whole("a", 10), whole("b", 20)], rank=3, parts=8, metadata=BOUND)
    assert layout.path == "00003-00.safetensors"


def test_nothing_at_all_is_one_empty_file() -> None:
    (layout,) = lay_out([], rank=0, parts=4, metadata=BOUND)
    assert layout.size_bytes == layout.header_bytes
    assert safetensors.deserialize(layout.header(BOUND)) == []


def test_large_states_are_spread_evenly() -> None:
    chunks = [whole(f"t{number}", size * MiB) for number, size in enumerate([9, 1, 4, 4, 2, 7, 3, 2])]
    layouts = lay_out(chunks, rank=0, parts=4, metadata=BOUND)
    assert len(layouts) == 4
    sizes = [layout.size_bytes for layout in layouts]
    assert max(sizes) <= 4 / 3 * max(sum(sizes) / 4, 9 * MiB * 4)
    assert sorted(chunk.entry for layout in layouts for chunk in layout.chunks) == sorted(
        chunk.entry for chunk in chunks
    )


def test_no_header_outgrows_what_stock_readers_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MAX_PART_ENTRIES", 10)
    layouts = lay_out([whole(f"t{number}", 1) for number in range(95)], rank=0, parts=1, metadata=BOUND)
    assert len(layouts) == 10
    assert max(len(layout.chunks) for layout in layouts) == 10


specs = st.lists(
    st.builds(
        whole,
        st.text("abc.", min_size=1, max_size=4),
        st.integers(0, 9),
        st.sampled_from(sorted(DTYPE_BYTES)),
    ),
    unique_by=lambda spec: spec.entry,
    max_size=8,
)


@given(specs, st.integers(1, 4), st.randoms())
def test_a_layout_does_not_depend_on_the_order_of_its_chunks(chunks: Any, parts: int, random: Any) -> None:
    shuffled = list(chunks)
    random.shuffle(shuffled)
    layouts = lay_out(chunks, rank=0, parts=parts, metadata=BOUND)
    assert lay_out(shuffled, rank=0, parts=parts, metadata=BOUND) == layouts
    for layout in layouts:
        position = layout.header_bytes
        for chunk, start in zip(layout.chunks, layout.starts, strict=True):
            assert start == position
            assert (start - layout.header_bytes) % DTYPE_BYTES[chunk.dtype] == 0
            position += chunk.size_bytes
        assert position == layout.size_bytes
        data = layout.header(BOUND) + bytes(layout.size_bytes - layout.header_bytes)
        assert {name for name, _ in safetensors.deserialize(data)} == {c.entry for c in layout.chunks}


def test_a_header_has_one_length_for_every_binding_of_a_run() -> None:
    (layout,) = lay_out([whole("t", 3)], rank=0, parts=1, metadata=BOUND)
    late = binding("run", CheckpointName(launch=999_999, step=10**12 - 1, attempt="f" * 16))
    assert len(layout.header(late)) == layout.header_bytes
    with pytest.raises(FormatError, match="header"):
        layout.header(binding("a run of another length" * 9, NAME))


@pytest.mark.parametrize("member", sorted(BOUND))
def test_a_shard_of_another_checkpoint_is_told_by_its_binding(member: str) -> None:
    check_binding(dict(BOUND), "run", NAME, "a shard")
    for wrong in ({**BOUND, member: "other"}, {k: v for k, v in BOUND.items() if k != member}, {}):
        with pytest.raises(IntegrityError, match="belongs to another checkpoint"):
            check_binding(wrong, "run", NAME, "a shard")
    with pytest.raises(IntegrityError):
        check_binding({**BOUND, "more": "x"}, "run", NAME, "a shard")


@pytest.mark.parametrize("algorithm", ("blake3", "sha256"))
@given(pieces=st.lists(st.binary(max_size=50), max_size=5), big=st.booleans())
def test_a_file_is_written_and_hashed_in_one_pass(algorithm: Any, pieces: list[bytes], big: bool) -> None:
    if big:
        pieces = [*pieces, bytes(2 * MiB + 3), b"end"]
    data = b"".join(pieces)
    store = MemoryStore()
    written = write_file(store, NAME, "state.json", pieces, length_bytes=len(data), algorithm=algorithm)
    assert store.read(f"{NAME.folder}/data/state.json", limit_bytes=1 << 30) == data
    assert written.record.size_bytes == len(data)
    assert written.record.digest == digest_of_bytes(algorithm, data)
    blocks = -(-len(data) // MiB) if algorithm == "blake3" else 0
    assert len(written.block_digests) == 32 * blocks


def test_a_file_is_written_no_faster_than_its_pace() -> None:
    waits: list[float] = []
    pace = Pace(1 << 20, monotonic=lambda: 0.0, sleep=waits.append)
    data = bytes(9 * MiB)
    write_file(
        MemoryStore(), NAME, "state.json", [data], length_bytes=len(data), algorithm="blake3", pace=pace
    )
    assert waits == pytest.approx([3.9, 7.9, 8.9])


def test_a_file_that_could_not_be_written_whole_is_an_error_and_gone() -> None:
    for operation in ("open_writer", "write", "finish"):
        inner = MemoryStore()
        store = FaultyStore(inner, fail_at=1, only={operation})
        with pytest.raises(StoreUnavailableError):
            write_file(store, NAME, "state.json", [b"abc"], length_bytes=3, algorithm="blake3")
        assert inner.list_names(NAME.folder) == [], operation
