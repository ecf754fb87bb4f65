"""The columnar index: it comes back as it was, its bytes are determined, and nothing hostile gets through."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from strongroom import tensorfile
from strongroom.digest import BLOCK_BYTES, Digest, digest_of_blocks, sha256_of
from strongroom.dtypes import DTYPE_BYTES, DTYPE_CODES
from strongroom.errors import FormatError, IntegrityError
from strongroom.index import Chunk, Index, ShardFile, TensorRecord, decode_index, encode_index
from strongroom.layout import INDEX, CheckpointName
from strongroom.manifest import FileRecord, Manifest
from strongroom.shards import binding

NAME = CheckpointName(launch=1, step=7, attempt="0123456789abcdef")
BOUND = binding("run", NAME)
WHAT = "the index"


def encode(index: Index) -> bytes:
    return encode_index(index, BOUND)


def parts(index: Index) -> Any:
    return list(index.tensors.items()), list(index.files.items()), index.aliases


def example() -> Index:
    """A whole tensor, one in two chunks, a scalar, an empty one and an alias."""
    one, two = "00000-00.safetensors", "00001-00.safetensors"
    return Index(
        [
            TensorRecord(
                "a",
                "F32",
                (4, 2),
                (Chunk((0, 0), (3, 2), one, 320), Chunk((3, 0), (1, 2), two, 64)),
                "mesh 2 (dp): Shard(0)",
            ),
            TensorRecord("scalar", "BF16", (), (Chunk((), (), one, 344),)),
            TensorRecord("empty", "I64", (0, 3), (Chunk((0, 0), (0, 3), one, 346),)),
            TensorRecord("ünïcode", "U8", (5,), (Chunk((0,), (5,), two, 72),)),
        ],
        [ShardFile(one, b"1" * 32), ShardFile(two, b"2" * 64)],
        {"alias": "a", "another": "scalar"},
    )


def test_an_index_comes_back_as_it_was() -> None:
    found, metadata = decode_index(encode(example()), WHAT)
    assert parts(found) == parts(example())
    assert metadata == BOUND
    assert found.find("alias") is found.tensors["a"]
    assert found.find("a") is found.tensors["a"]
    assert found.find("nobody") is None
    assert found.names == ("a", "scalar", "empty", "ünïcode", "alias", "another")


def test_an_empty_index_comes_back() -> None:
    found, _ = decode_index(encode(Index([], [])), WHAT)
    assert parts(found) == ([], [], {})


def test_equal_indexes_give_equal_bytes() -> None:
    assert encode(example()) == encode(example())


TEXT = st.characters(exclude_categories=("Cs",))


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    paths = [f"{rank:05d}-00.safetensors" for rank in range(draw(st.integers(1, 3)))]
    records = []
    names = draw(st.lists(st.text(TEXT, max_size=5), unique=True, max_size=6))
    for name in names:
        shape = draw(st.lists(st.integers(0, 4), max_size=3).map(tuple))
        cut = draw(st.integers(0, shape[0])) if shape else 0
        spans = (
            [(0, cut), (cut, shape[0])] if shape and 0 < cut < shape[0] else [(0, shape[0] if shape else 0)]
        )
        chunks = [
            Chunk(
                (low, *[0] * (len(shape) - 1)) if shape else (),
                (high - low, *shape[1:]) if shape else (),
                draw(st.sampled_from(paths)),
                draw(st.integers(0, 2**50)),
            )
            for low, high in spans
        ]
        dtype, placements = draw(st.sampled_from(DTYPE_CODES)), draw(st.text(TEXT, max_size=200))
        records.append(TensorRecord(name, dtype, shape, tuple(chunks), placements))
    files = [ShardFile(path, bytes(32) * draw(st.integers(0, 3))) for path in paths]
    aliases = {
        f"{name} again": name for name in names if f"{name} again" not in names and draw(st.booleans())
    }
    return Index(records, files, aliases)


@given(indexes())
def test_any_index_comes_back_as_it_was(index: Index) -> None:
    data = encode(index)
    found, _ = decode_index(data, WHAT)
    assert parts(found) == parts(index)
    assert encode(found) == data
    # Stock tools can look into it.
    assert set(safetensors.numpy.load(data)) >= {"tensor.name", "chunk.start", "block.digest"}


# ----------------------------------------------------------------------------------------- hostile


def columns_of(index: Index) -> dict[str, np.ndarray[Any, Any]]:
    return safetensors.numpy.load(encode(index))


def packed(columns: dict[str, Any]) -> bytes:
    """Columns as a file that is a good safetensors file, whatever they hold."""
    names = {
        "uint8": "U8",
        "uint16": "U16",
        "uint32": "U32",
        "uint64": "U64",
        "int64": "I64",
        "float32": "F32",
    }
    arrays = {name: np.asarray(value) for name, value in columns.items()}
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    described = [(name, names[str(arrays[name].dtype)], arrays[name].shape) for name in order]
    header, _ = tensorfile.build_header(described, BOUND)
    return header + b"".join(arrays[name].tobytes() for name in order)


def changed(**columns: Any) -> bytes:
    """The example with some columns replaced, or removed where None."""
    found = columns_of(example())
    for name, value in columns.items():
        column = name.replace("_", ".")
        if value is None:
            del found[column]
        else:
            found[column] = value
    return packed(found)


U8, U64 = np.uint8, np.uint64


def test_the_forger_of_these_tests_changes_nothing_by_itself() -> None:
    assert changed() == encode(example())


HUGE = 2**61
FORGED: dict[str, bytes] = {
    "no bytes": b"",
    "a column missing": changed(chunk_start=None),
    "an unknown column": changed(more=np.zeros(1, U8)),
    "a column of signed integers": changed(chunk_start=np.zeros(5, np.int64)),
    "a column of floats": changed(chunk_start=np.zeros(5, np.float32)),
    "a column of two dimensions": changed(chunk_start=np.zeros((5, 1), U64)),
    "too few values": changed(chunk_start=np.zeros(4, U64)),
    "too many values": changed(chunk_start=np.zeros(6, U64)),
    "an integer beyond 2^62": changed(chunk_start=np.full(5, 2**62, U64)),
    "an integer of 64 bits": changed(chunk_start=np.full(5, 2**64 - 1, U64)),
    "an unknown dtype": changed(tensor_dtype=np.full(4, len(DTYPE_CODES), U8)),
    "a thousand dimensions": changed(tensor_dimensions=np.array([1000, 0, 2, 1], np.uint16)),
    "dimensions that wrap when summed": changed(tensor_dimensions=np.full(4, HUGE, U64)),
    "counts that wrap when summed": changed(tensor_chunks=np.full(4, HUGE, U64)),
    "a count too few": changed(tensor_chunks=np.array([1, 1, 1, 1], U8)),
    "a chunk in no file": changed(chunk_file=np.full(5, 2, U8)),
    "a chunk outside its tensor": changed(chunk_offsets=np.array([0, 0, 4, 0, 0, 0, 0], U8)),
    "a chunk too large": changed(chunk_sizes=np.array([4, 2, 1, 2, 0, 3, 5], U8)),
    "a chunk too small": changed(chunk_sizes=np.array([2, 2, 1, 2, 0, 3, 5], U8)),
    "a shape without end": changed(tensor_shape=np.array([HUGE, HUGE, 0, 3, 5], U64)),
    "an empty shape without end": changed(
        tensor_shape=np.array([4, 2, 0, HUGE, 5], U64), chunk_sizes=np.array([3, 2, 1, 2, 0, HUGE, 5], U64)
    ),
    "names beyond their bytes": changed(tensor_name_ends=np.array([1, 7, 12, 255], U8)),
    "names backwards": changed(tensor_name_ends=np.array([7, 1, 12, 21], U8)),
    "names with bytes left over": changed(tensor_name_ends=np.array([1, 7, 12, 13], U8)),
    "names that are no UTF-8": changed(tensor_name=np.full(21, 255, U8)),
    "a name twice": changed(
        alias_name=np.frombuffer(b"scalaranother", U8), alias_name_ends=np.array([6, 13], U8)
    ),
    "placements missing": changed(tensor_placements=None),
    "placements of other tensors": changed(tensor_placements_ends=np.array([21, 21, 21], U8)),
    "placements without end": changed(
        tensor_placements=np.full(201, 65, U8), tensor_placements_ends=np.array([201, 201, 201, 201], U8)
    ),
    "chunks that overlap": changed(
        tensor_shape=np.array([4, 1, 0, 3, 5], U8),
        chunk_offsets=np.array([0, 0, 1, 0, 0, 0, 0], U8),
        chunk_sizes=np.array([2, 1, 2, 1, 0, 3, 5], U8),
    ),
    "an alias of nothing": changed(alias_tensor=np.array([0, 4], U8)),
    "a file that is no shard": changed(
        file_path=np.frombuffer(b"../00-00.safetensors" * 2, U8), file_path_ends=np.array([20, 40], U8)
    ),
    "a file twice": changed(file_path=np.frombuffer(b"00000-00.safetensors" * 2, U8)),
    "too few digests": changed(block_digest=np.zeros(64, U8)),
    "blocks that wrap when multiplied": changed(file_blocks=np.array([HUGE, HUGE], U64)),
    "text in place of a column": tensorfile.build_header([], BOUND)[0] + b"x",
}  # fmt: skip


@pytest.mark.parametrize("data", FORGED.values(), ids=FORGED.keys())
def test_a_forged_index_is_refused_with_what_is_wrong(data: bytes) -> None:
    with pytest.raises(FormatError, match=WHAT):
        decode_index(data, WHAT)


def test_an_index_beyond_its_bound_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strongroom.index.MAX_INDEX_BYTES", 100)
    with pytest.raises(FormatError, match="at most 100 are read"):
        decode_index(encode(example()), WHAT)


integer_columns = st.sampled_from(
    ["tensor.dtype", "tensor.dimensions", "tensor.shape", "tensor.chunks", "chunk.offsets", "chunk.sizes",
     "chunk.file", "chunk.start", "alias.tensor", "file.blocks", "tensor.name.ends", "file.path.ends"]
)  # fmt: skip
values = st.integers(0, 5) | st.sampled_from([2**31, 2**32, 2**61, 2**62 - 1, 2**62, 2**63, 2**64 - 1])


@given(data=st.data())
def test_no_values_in_any_column_do_more_than_be_refused(data: st.DataObject) -> None:
    columns = columns_of(example())
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(integer_columns)
        column = columns[name].astype(U64)
        if data.draw(st.booleans()) and len(column):
            column[data.draw(st.integers(0, len(column) - 1))] = data.draw(values)
        else:
            column = np.array(data.draw(st.lists(values, max_size=8)), U64)
        columns[name] = column
    began = time.process_time()
    with contextlib.suppress(FormatError):
        index, _ = decode_index(packed(columns), WHAT)
        for record in index.tensors.values():
            stored = sum(math.prod(chunk.sizes) for chunk in record.chunks)
            assert stored == math.prod(record.shape)
            assert math.prod(size or 1 for size in record.shape) <= 2**60
    assert time.process_time() - began < 5


@given(data=st.data())
def test_no_changed_bytes_do_more_than_be_refused(data: st.DataObject) -> None:
    changed_bytes = bytearray(encode(example()))
    for _ in range(data.draw(st.integers(1, 4))):
        changed_bytes[data.draw(st.integers(0, len(changed_bytes) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FormatError):
        decode_index(bytes(changed_bytes), WHAT)


def test_a_small_file_cannot_ask_for_much(  # 2^31 chunks of a tensor without elements, in a few hundred bytes
) -> None:
    data = changed(tensor_chunks=np.array([2**31, 1, 1, 1], np.uint32))
    with pytest.raises(FormatError):
        decode_index(data, WHAT)


# ------------------------------------------------------------------------------------ in memory


def test_records_are_built_when_they_are_asked_for_and_kept() -> None:
    found, _ = decode_index(encode(example()), WHAT)
    assert "a" in found.tensors
    assert "alias" not in found.tensors
    assert list(found.tensors) == ["a", "scalar", "empty", "ünïcode"]
    assert len(found.tensors) == 4
    assert found.tensors == example().tensors
    assert found.tensors["a"] is found.tensors["a"]
    with pytest.raises(KeyError):
        found.tensors["alias"]


def test_shards_that_hold_no_byte_are_told_apart() -> None:
    one, two, three = (f"{rank:05d}-00.safetensors" for rank in range(3))
    index = Index(
        [
            TensorRecord("a", "F32", (2,), (Chunk((0,), (2,), two, 64),)),
            TensorRecord("empty", "F32", (0,), (Chunk((0,), (0,), three, 64),)),
        ],
        [ShardFile(path, b"") for path in (one, two, three)],
    )
    assert index.used_paths == {two}
    assert decode_index(encode(index), WHAT)[0].used_paths == {two}
    assert Index([], []).used_paths == frozenset()


def test_an_index_that_could_not_be_read_back_is_not_written() -> None:
    nowhere = Index([TensorRecord("a", "F32", (), (Chunk((), (), "00000-00.safetensors", 0),))], [])
    with pytest.raises(FormatError, match="does not name"):
        encode(nowhere)
    long = Index([TensorRecord("a", "F32", (0,), (), "x" * 201)], [])
    with pytest.raises(FormatError, match="201 characters"):
        encode(long)


def test_a_part_of_an_index_is_read_as_one_and_not_as_a_whole() -> None:
    part = Index(
        [TensorRecord("a", "F32", (4,), (Chunk((2,), (1,), "00001-00.safetensors", 64),))],
        [ShardFile("00001-00.safetensors", b"1" * 32)],
    )
    found, metadata = decode_index(encode(part), WHAT, is_partial=True)
    assert parts(found) == parts(part)
    assert metadata == BOUND
    with pytest.raises(FormatError, match="'a' hold 1 of 4 elements"):
        decode_index(encode(part), WHAT)


# --------------------------------------------------------------------------- against the manifest


def manifest_for(index: Index, sizes: dict[str, int], algorithm: Any = "blake3") -> Manifest:
    files = [
        FileRecord(
            path=path,
            size_bytes=sizes[path],
            digest=digest_of_blocks(index.files[path].block_digests)
            if algorithm == "blake3"
            else sha256_of(path.encode()),
        )
        for path in sorted(index.files)
    ]
    other = FileRecord(path=INDEX, size_bytes=1, digest=Digest(algorithm, bytes(32)))
    return Manifest(
        run="run", name=NAME, parent=None, created_at_ms=0, algorithm=algorithm, world_size=2,
        files=tuple(sorted([*files, other], key=lambda record: record.path)),
    )  # fmt: skip


SIZES = {"00000-00.safetensors": 500, "00001-00.safetensors": BLOCK_BYTES + 1}


def test_an_index_that_fits_its_manifest_is_accepted() -> None:
    example().check_against(manifest_for(example(), SIZES))
    example().check_against(manifest_for(example(), SIZES, "sha256"))


def test_an_index_that_does_not_fit_its_manifest_is_refused() -> None:
    index = example()
    manifest = manifest_for(index, SIZES)
    with pytest.raises(IntegrityError, match="does not name the manifest's shards"):
        Index(index.tensors.values(), list(index.files.values())[:1]).check_against(manifest)
    with pytest.raises(IntegrityError, match="block digests"):
        index.check_against(manifest_for(index, {**SIZES, "00001-00.safetensors": 10}))
    other = [ShardFile(path, b"3" * len(file.block_digests)) for path, file in index.files.items()]
    with pytest.raises(IntegrityError, match="do not add up"):
        Index(index.tensors.values(), other, index.aliases).check_against(manifest)
    for algorithm in ("blake3", "sha256"):
        short = {**SIZES, "00000-00.safetensors": 340}
        with pytest.raises(IntegrityError, match="ends beyond"):
            index.check_against(manifest_for(index, short, algorithm))


def test_chunks_that_share_bytes_are_refused() -> None:
    path = "00000-00.safetensors"

    def index(*starts: int) -> Index:
        chunks = [Chunk((), (), path, start) for start in starts]
        records = [TensorRecord(f"t{number}", "F32", (), (chunk,)) for number, chunk in enumerate(chunks)]
        # A chunk without bytes shares none, wherever it stands.
        empty = TensorRecord("empty", "F32", (0,), (Chunk((0,), (0,), path, 66),))
        return Index([*records, empty], [ShardFile(path, b"1" * 32)])

    sizes = {path: 500}
    for starts in ((64, 68, 72), (72, 64, 68), (64, 496)):
        index(*starts).check_against(manifest_for(index(*starts), sizes))
    for starts in ((64, 64), (64, 67), (100, 68, 65)):
        with pytest.raises(IntegrityError, match="share bytes of 00000-00"):
            index(*starts).check_against(manifest_for(index(*starts), sizes))
    with pytest.raises(IntegrityError, match="'t1' ends beyond 00000-00"):
        index(64, 497).check_against(manifest_for(index(64, 497), sizes))


def test_a_chunk_of_more_bytes_than_can_be_counted_ends_beyond_its_shard() -> None:
    path = "00000-00.safetensors"
    index = Index(
        [TensorRecord("a", "F64", (2**60,), (Chunk((0,), (2**60,), path, 64),))], [ShardFile(path, b"1" * 32)]
    )
    with pytest.raises(IntegrityError, match="ends beyond"):
        index.check_against(manifest_for(index, {path: 500}))


def test_an_index_stays_small() -> None:
    """20,000 tensors with names of 20 characters: within 64 bytes a chunk, names and digests included."""
    path = "00000-00.safetensors"
    index = Index(
        [TensorRecord(f"layers.{number:05d}.weight", "F32", (16, 16),
                      (Chunk((0, 0), (16, 16), path, 4096 + 1024 * number),)) for number in range(20_000)],
        [ShardFile(path, bytes(32 * 20))],
    )  # fmt: skip
    data = encode(index)
    assert len(data) < 20_000 * 64
    found, _ = decode_index(data, WHAT)
    assert len(found.tensors) == 20_000
    assert DTYPE_BYTES[found.tensors["layers.00000.weight"].dtype] == 4
