"""The index: where each chunk of each tensor lies. Columnar, so that size and time stay small.

It is itself a safetensors file whose tensors are the columns (`docs/format.md`, clause 7), so
that stock tools can look into it. Texts are stored as one column of UTF-8 bytes and one of
end positions; integers in the narrowest unsigned type that holds the column's largest value.

The index knows tensors, chunks, files and block digests. It knows neither torch nor a store.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from strongroom import layout, tensorfile
from strongroom.digest import BLOCK_BYTES, DIGEST_BYTES, digest_of_blocks
from strongroom.dtypes import DTYPE_BYTES, DTYPE_CODES
from strongroom.errors import FormatError, IntegrityError
from strongroom.manifest import Manifest

__all__ = ["MAX_INDEX_BYTES", "Chunk", "Index", "ShardFile", "TensorRecord", "decode_index", "encode_index"]

MAX_INDEX_BYTES: Final = 4 << 30
"""Room for 50 million chunks at about 60 bytes, and the block digests of 64 TiB."""

_MAX_DIMENSIONS: Final = 64
_MAX_ELEMENTS: Final = 2**60
_UNSIGNED: Final = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64}
Column = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A hyper-rectangle of a tensor and where its row-major bytes lie.

    Attributes:
        offsets, sizes: elements per dimension, within the whole tensor.
        path: the shard, under ``data/``.
        start: of the chunk's first byte within the (unsealed) shard.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: str
    start: int


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A stored tensor: its name, dtype name (`strongroom.dtypes`), whole shape and chunks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A shard and the concatenated BLAKE3 digests of its blocks (empty with ``sha256``)."""

    path: str
    block_digests: bytes


class Index:
    """The decoded index: tensors by name, aliases, shards.

    Attributes:
        tensors: every stored tensor, in stored order.
        aliases: further names of stored tensors (tied storages): alias -> stored name.
        files: every shard.
    """

    def __init__(
        self,
        tensors: Iterable[TensorRecord],
        files: Iterable[ShardFile],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.tensors = {record.name: record for record in tensors}
        self.files = {file.path: file for file in files}
        self.aliases = dict(aliases or {})

    def find(self, name: str) -> TensorRecord | None:
        """The tensor stored under a name or an alias."""
        return self.tensors.get(self.aliases.get(name, name))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every name that a tensor can be asked for by, aliases included."""
        return (*self.tensors, *self.aliases)

    def check_against(self, manifest: Manifest) -> None:
        """Hold shards, block digests and chunk ranges against the manifest's files and each other.

        Raises:
            IntegrityError: they do not fit; names the file.
        """
        listed = {r.path: r for r in manifest.files if layout.parse_shard_path(r.path) is not None}
        if set(listed) != set(self.files):
            differing = sorted(set(listed) ^ set(self.files))
            raise IntegrityError(
                f"{layout.INDEX} of {manifest.name} does not name the manifest's shards: {differing[:5]}"
            )
        for path, record in listed.items():
            if manifest.algorithm != "blake3":
                continue
            blocks = self.files[path].block_digests
            if len(blocks) != -(-record.size_bytes // BLOCK_BYTES) * DIGEST_BYTES:
                raise IntegrityError(
                    f"{layout.INDEX} of {manifest.name} has {len(blocks) // DIGEST_BYTES} block digests for "
                    f"{path}, which has {record.size_bytes} bytes"
                )
            if not digest_of_blocks(blocks).matches(record.digest):
                raise IntegrityError(
                    f"{layout.INDEX} of {manifest.name}: the block digests of {path} do not add up to the "
                    f"manifest's digest {record.digest}"
                )
        ranges: dict[str, list[tuple[int, int]]] = {path: [] for path in listed}
        for tensor in self.tensors.values():
            item_bytes = DTYPE_BYTES[tensor.dtype]
            for chunk in tensor.chunks:
                end = chunk.start + math.prod(chunk.sizes) * item_bytes
                if end > listed[chunk.path].size_bytes:
                    raise IntegrityError(
                        f"{layout.INDEX} of {manifest.name}: a chunk of {tensor.name!r} ends beyond "
                        f"{chunk.path}"
                    )
                if end > chunk.start:
                    ranges[chunk.path].append((chunk.start, end))
        for path, taken in ranges.items():
            taken.sort()
            # What is stored once is read once: a small file must not claim to fill a large memory.
            if any(first[1] > second[0] for first, second in pairwise(taken)):
                raise IntegrityError(
                    f"{layout.INDEX} of {manifest.name}: two chunks share bytes of {path}; each is stored in "
                    "bytes of its own"
                )


def encode_index(index: Index, metadata: Mapping[str, str]) -> bytes:
    """The index's bytes; equal indexes and metadata give equal bytes.

    Args:
        index: what to write.
        metadata: the binding of run, launch, step and attempt (`strongroom.shards`).
    """
    tensors = list(index.tensors.values())
    chunks = [chunk for record in tensors for chunk in record.chunks]
    files = list(index.files.values())
    file_numbers = {file.path: number for number, file in enumerate(files)}
    tensor_numbers = {record.name: number for number, record in enumerate(tensors)}
    columns: dict[str, Column] = {
        **_text_column("tensor.name", [record.name for record in tensors]),
        "tensor.dtype": _column([DTYPE_CODES.index(record.dtype) for record in tensors]),
        "tensor.dimensions": _column([len(record.shape) for record in tensors]),
        "tensor.shape": _column([size for record in tensors for size in record.shape]),
        "tensor.chunks": _column([len(record.chunks) for record in tensors]),
        "chunk.offsets": _column([offset for chunk in chunks for offset in chunk.offsets]),
        "chunk.sizes": _column([size for chunk in chunks for size in chunk.sizes]),
        "chunk.file": _column([file_numbers[chunk.path] for chunk in chunks]),
        "chunk.start": _column([chunk.start for chunk in chunks]),
        **_text_column("alias.name", list(index.aliases)),
        "alias.tensor": _column([tensor_numbers[name] for name in index.aliases.values()]),
        **_text_column("file.path", [file.path for file in files]),
        "file.blocks": _column([len(file.block_digests) // DIGEST_BYTES for file in files]),
        "block.digest": np.frombuffer(b"".join(file.block_digests for file in files), np.uint8),
    }
    # Wider elements first, as stock readers want them; then by name, so that bytes are determined.
    order = sorted(columns, key=lambda name: (-columns[name].itemsize, name))
    described = [(name, f"U{8 * columns[name].itemsize}", (len(columns[name]),)) for name in order]
    header, _ = tensorfile.build_header(described, metadata)
    return header + b"".join(columns[name].tobytes() for name in order)


def decode_index(data: bytes, what: str) -> tuple[Index, Mapping[str, str]]:
    """Read an index and its metadata.

    Raises:
        FormatError: malformed in any way, out of bounds, or a tensor whose chunks do not add
            up to it.
    """
    if len(data) > MAX_INDEX_BYTES:
        raise FormatError(f"{what} has {len(data)} bytes; at most {MAX_INDEX_BYTES} are read")
    header = tensorfile.parse_header(data, len(data), what)
    columns = _Columns(data, header, what)

    paths = columns.texts("file.path")
    for path in paths:
        if layout.parse_shard_path(path) is None:
            raise FormatError(f"{what}: {path[:80]!r} is not a shard's path")
    blocks = columns.integers("file.blocks", len(paths)).tolist()
    digests = columns.raw("block.digest")
    if sum(blocks) * DIGEST_BYTES != len(digests):
        raise FormatError(f"{what} has {len(digests)} bytes of block digests for {sum(blocks)} blocks")
    files = []
    position = 0
    for path, count in zip(paths, blocks, strict=True):
        files.append(ShardFile(path, digests[position : position + count * DIGEST_BYTES]))
        position += count * DIGEST_BYTES

    tensors = _decode_tensors(columns, paths, what)
    aliases = columns.texts("alias.name")
    targets = columns.integers("alias.tensor", len(aliases)).tolist()
    if any(target >= len(tensors) for target in targets):
        raise FormatError(f"{what} has an alias of a tensor that it does not hold")
    columns.close()

    index = Index(
        tensors,
        files,
        {alias: tensors[target].name for alias, target in zip(aliases, targets, strict=True)},
    )
    if len(index.files) != len(files) or len(set(index.names)) != len(tensors) + len(aliases):
        raise FormatError(f"{what} names a tensor or a shard twice")
    return index, header.metadata


def _decode_tensors(columns: _Columns, paths: list[str], what: str) -> list[TensorRecord]:
    names = columns.texts("tensor.name")
    dtypes = columns.integers("tensor.dtype", len(names)).tolist()
    dimensions = columns.integers("tensor.dimensions", len(names))
    if any(code >= len(DTYPE_CODES) for code in dtypes) or any(dimensions > _MAX_DIMENSIONS):
        raise FormatError(
            f"{what} has a tensor of an unknown dtype or of more than {_MAX_DIMENSIONS} dimensions"
        )
    shape_column = columns.integers("tensor.shape", int(dimensions.sum())).tolist()
    counts = columns.integers("tensor.chunks", len(names))
    file_numbers = columns.integers("chunk.file", None)
    chunk_total = len(file_numbers)
    # Each count is bounded before they are summed, so that no sum can wrap around.
    if any(counts > chunk_total) or int(counts.sum()) != chunk_total:
        raise FormatError(f"{what} has {chunk_total} chunks, which is not what its tensors add up to")
    extents = int((dimensions * counts).sum())
    offsets_column = columns.integers("chunk.offsets", extents).tolist()
    sizes_column = columns.integers("chunk.sizes", extents).tolist()
    file_column = file_numbers.tolist()
    start_column = columns.integers("chunk.start", chunk_total).tolist()
    if any(number >= len(paths) for number in file_column):
        raise FormatError(f"{what} has a chunk in a shard that it does not name")

    tensors = []
    at_shape = at_chunk = at_extent = 0
    for number, name in enumerate(names):
        rank = int(dimensions[number])
        shape = tuple(shape_column[at_shape : at_shape + rank])
        at_shape += rank
        chunks = []
        for _ in range(int(counts[number])):
            chunks.append(
                Chunk(
                    tuple(offsets_column[at_extent : at_extent + rank]),
                    tuple(sizes_column[at_extent : at_extent + rank]),
                    paths[file_column[at_chunk]],
                    start_column[at_chunk],
                )
            )
            at_extent += rank
            at_chunk += 1
        record = TensorRecord(name, DTYPE_CODES[dtypes[number]], shape, tuple(chunks))
        _check_chunks(record, what)
        tensors.append(record)
    return tensors


def _check_chunks(record: TensorRecord, what: str) -> None:
    """Chunks lie within the tensor and hold as many elements as it does."""
    elements = math.prod(record.shape)
    # An empty tensor's other dimensions are bounded too: strides are computed from them.
    if math.prod(size or 1 for size in record.shape) > _MAX_ELEMENTS:
        raise FormatError(f"{what}: {record.name[:80]!r} has the shape {list(record.shape)}")
    for chunk in record.chunks:
        for offset, size, whole in zip(chunk.offsets, chunk.sizes, record.shape, strict=True):
            if offset + size > whole:
                raise FormatError(f"{what}: a chunk of {record.name[:80]!r} lies outside of it")
    stored = sum(math.prod(chunk.sizes) for chunk in record.chunks)
    if stored != elements:
        raise FormatError(f"{what}: the chunks of {record.name[:80]!r} hold {stored} of {elements} elements")


def _column(values: Sequence[int]) -> Column:
    largest = max(values, default=0)
    bits = next(bits for bits in (8, 16, 32, 64) if largest < 2**bits)
    return np.array(values, dtype=f"<u{bits // 8}")


def _text_column(name: str, texts: Sequence[str]) -> dict[str, Column]:
    encoded = [text.encode("utf-8") for text in texts]
    ends = np.cumsum([len(text) for text in encoded], dtype=np.uint64).tolist()
    return {name: np.frombuffer(b"".join(encoded), np.uint8), f"{name}.ends": _column(ends)}


class _Columns:
    """The columns of a decoded file, each taken once; none may be left over."""

    def __init__(self, data: bytes, header: tensorfile.Header, what: str) -> None:
        self._data = data
        self._left = {entry.name: entry for entry in header.entries}
        self._what = what

    def integers(self, name: str, length: int | None) -> npt.NDArray[np.int64]:
        entry = self._left.pop(name, None)
        if entry is None or entry.dtype not in _UNSIGNED or len(entry.shape) != 1:
            raise FormatError(f"{self._what} lacks the column {name!r} of unsigned integers")
        if length is not None and entry.shape[0] != length:
            raise FormatError(f"{self._what}: {name!r} has {entry.shape[0]} values where {length} are due")
        kind = np.dtype(_UNSIGNED[entry.dtype]).newbyteorder("<")
        values = np.frombuffer(self._data, kind, entry.shape[0], entry.start)
        if len(values) and int(values.max()) >= 2**62:
            raise FormatError(f"{self._what}: {name!r} holds {int(values.max())}")
        return values.astype(np.int64)

    def raw(self, name: str) -> bytes:
        entry = self._left.pop(name, None)
        if entry is None or entry.dtype != "U8" or len(entry.shape) != 1:
            raise FormatError(f"{self._what} lacks the column {name!r} of bytes")
        return self._data[entry.start : entry.start + entry.shape[0]]

    def texts(self, name: str) -> list[str]:
        blob = self.raw(name)
        ends = self.integers(f"{name}.ends", None).tolist()
        texts = []
        start = 0
        for end in ends:
            if not start <= end <= len(blob):
                raise FormatError(f"{self._what}: {name!r} has an end at {end} of {len(blob)} bytes")
            try:
                texts.append(blob[start:end].decode("utf-8"))
            except UnicodeDecodeError:
                raise FormatError(f"{self._what}: {name!r} holds bytes that are not UTF-8") from None
            start = end
        if start != len(blob):
            raise FormatError(f"{self._what}: {name!r} has bytes that belong to no text")
        return texts

    def close(self) -> None:
        if self._left:
            raise FormatError(f"{self._what} has the unknown column {min(self._left)[:60]!r}")
