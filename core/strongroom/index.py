"""The index: where each chunk of each tensor lies. Columnar, so that size and time stay small.

It is itself a safetensors file whose tensors are the columns (`docs/format.md`, clause 7), so
that stock tools can look into it. Texts are stored as one column of UTF-8 bytes and one of
end positions; integers in the narrowest unsigned type that holds the column's largest value.

This module owns the file and holds it against the manifest; the columns in memory are
`strongroom.columns`, whether chunks cover their tensors is `strongroom.cover`'s. The index knows
tensors, chunks, files and block digests. It knows neither torch nor a store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from strongroom import cover, layout, tensorfile
from strongroom.columns import Chunk, Columns, Integers, TensorRecord, TensorRecords
from strongroom.digest import BLOCK_BYTES, DIGEST_BYTES, digest_of_blocks
from strongroom.dtypes import DTYPE_CODES
from strongroom.errors import FormatError, IntegrityError
from strongroom.manifest import Manifest

__all__ = [
    "MAX_INDEX_BYTES",
    "MAX_PLACEMENTS_LENGTH",
    "Chunk",
    "Index",
    "ShardFile",
    "TensorRecord",
    "decode_index",
    "encode_index",
]

MAX_INDEX_BYTES: Final = 4 << 30
"""Room for 50 million chunks at about 60 bytes, and the block digests of 64 TiB."""

MAX_PLACEMENTS_LENGTH: Final = 200
"""Characters of `TensorRecord.placements`."""

_MAX_DIMENSIONS: Final = 64
_UNSIGNED: Final = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64}
Column = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A shard and the concatenated BLAKE3 digests of its blocks (empty with ``sha256``)."""

    path: str
    block_digests: bytes


class Index:
    """The index: tensors by name, aliases, shards.

    Attributes:
        columns: what it holds of tensors and chunks.
        tensors: every stored tensor, in stored order; records are built when asked for.
        aliases: further names of stored tensors (tied storages): alias -> stored name.
        files: every shard.
    """

    def __init__(
        self,
        tensors: Iterable[TensorRecord],
        files: Iterable[ShardFile],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        records = {record.name: record for record in tensors}
        self.files = {file.path: file for file in files}
        self.aliases = dict(aliases or {})
        self._hold(Columns.of(list(records.values()), self.files), records.values())

    def _hold(self, columns: Columns, built: Iterable[TensorRecord] = ()) -> None:
        self.columns = columns
        self.tensors: Mapping[str, TensorRecord] = TensorRecords(columns, built)

    @classmethod
    def of_columns(
        cls, columns: Columns, files: Iterable[ShardFile], aliases: Mapping[str, str] | None = None
    ) -> Index:
        """An index over columns whose ``paths`` are just those of the files, in their order."""
        index = cls((), files, aliases)
        index._hold(columns)
        return index

    def find(self, name: str) -> TensorRecord | None:
        """The tensor stored under a name or an alias."""
        return self.tensors.get(self.aliases.get(name, name))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every name that a tensor can be asked for by, aliases included."""
        return (*self.tensors, *self.aliases)

    @cached_property
    def used_paths(self) -> frozenset[str]:
        """The shards that hold at least one byte of a tensor."""
        used = np.unique(self.columns.files[self.columns.chunk_elements > 0])
        return frozenset(self.columns.paths[number] for number in used.tolist())

    def check_against(self, manifest: Manifest) -> None:
        """Hold shards, block digests and chunk ranges against the manifest's files and each other.

        Raises:
            IntegrityError: they do not fit; names the file.
        """
        what = f"{layout.INDEX} of {manifest.name}"
        records = {record.plain_path: record for record in manifest.files}
        listed = {path: r for path, r in records.items() if layout.parse_shard_path(path) is not None}
        if set(listed) != set(self.files) or len(self.columns.paths) != len(self.files):
            differing = sorted(set(listed) ^ {*self.files, *self.columns.paths})
            raise IntegrityError(f"{what} does not name the manifest's shards: {differing[:5]}")
        for path, record in listed.items():
            blocks = self.files[path].block_digests
            if record.header is not None and blocks:
                raise IntegrityError(f"{what} has block digests for {path}, which is sealed and has none")
            if manifest.algorithm != "blake3" or record.header is not None:
                continue
            if len(blocks) != -(-record.size_bytes // BLOCK_BYTES) * DIGEST_BYTES:
                raise IntegrityError(
                    f"{what} has {len(blocks) // DIGEST_BYTES} block digests for {path}, which has "
                    f"{record.size_bytes} bytes"
                )
            if not digest_of_blocks(blocks).matches(record.digest):
                raise IntegrityError(
                    f"{what}: the block digests of {path} do not add up to the manifest's digest "
                    f"{record.digest}"
                )
        self._check_ranges([listed[path].plain_bytes for path in self.columns.paths], what)

    def _check_ranges(self, sizes: Sequence[int], what: str) -> None:
        """Every chunk lies within its shard, and shares no byte with another."""
        columns = self.columns
        whole = np.array(sizes, np.int64)[columns.files]
        elements = columns.chunk_elements
        ends = columns.starts + elements * columns.item_bytes[columns.tensor_of]
        # Elements too: the bytes of 2^60 of them wrap around.
        outside = (elements > whole) | (ends > whole)
        if outside.any():
            chunk = int(outside.argmax())
            raise IntegrityError(
                f"{what}: a chunk of {columns.names[int(columns.tensor_of[chunk])]!r} ends beyond "
                f"{columns.paths[int(columns.files[chunk])]}"
            )
        filled = np.flatnonzero(elements)
        order = filled[np.lexsort((columns.starts[filled], columns.files[filled]))]
        files = columns.files[order]
        # What is stored once is read once: a small file must not claim to fill a large memory.
        shared = (files[1:] == files[:-1]) & (columns.starts[order][1:] < ends[order][:-1])
        if shared.any():
            raise IntegrityError(
                f"{what}: two chunks share bytes of {columns.paths[int(files[int(shared.argmax())])]}; each "
                "is stored in bytes of its own"
            )


def encode_index(index: Index, metadata: Mapping[str, str]) -> bytes:
    """The index's bytes; equal indexes and metadata give equal bytes.

    Args:
        index: what to write: the whole, or a rank's part of it.
        metadata: the binding of run, launch, step and attempt (`strongroom.shards`).

    Raises:
        FormatError: it could not be read back.
    """
    held = index.columns
    files = list(index.files.values())
    if held.paths != tuple(index.files):
        raise FormatError(
            f"the index holds chunks in shards that it does not name: {held.paths[len(files) :]}"
        )
    for name, placements in zip(held.names, held.placements, strict=True):
        if len(placements) > MAX_PLACEMENTS_LENGTH:
            raise FormatError(
                f"the placements of {name!r} are told in {len(placements)} characters; at most "
                f"{MAX_PLACEMENTS_LENGTH} are read"
            )
    tensor_numbers = {name: number for number, name in enumerate(held.names)}
    columns: dict[str, Column] = {
        **_text_column("tensor.name", held.names),
        "tensor.dtype": _column(held.dtypes),
        "tensor.dimensions": _column(held.dimensions),
        "tensor.shape": _column(held.shape),
        "tensor.chunks": _column(held.counts),
        **_text_column("tensor.placements", held.placements),
        "chunk.offsets": _column(held.offsets),
        "chunk.sizes": _column(held.sizes),
        "chunk.file": _column(held.files),
        "chunk.start": _column(held.starts),
        **_text_column("alias.name", list(index.aliases)),
        "alias.tensor": _column([tensor_numbers[name] for name in index.aliases.values()]),
        **_text_column("file.path", held.paths),
        "file.blocks": _column([len(file.block_digests) // DIGEST_BYTES for file in files]),
        "block.digest": np.frombuffer(b"".join(file.block_digests for file in files), np.uint8),
    }
    # Wider elements first, as stock readers want them; then by name, so that bytes are determined.
    order = sorted(columns, key=lambda name: (-columns[name].itemsize, name))
    described = [(name, f"U{8 * columns[name].itemsize}", (len(columns[name]),)) for name in order]
    header, _ = tensorfile.build_header(described, metadata)
    return b"".join([header, *(columns[name].tobytes() for name in order)])


def decode_index(data: bytes, what: str, *, is_partial: bool = False) -> tuple[Index, Mapping[str, str]]:
    """Read an index and its metadata.

    Args:
        data: the file.
        what: names it in errors.
        is_partial: one rank's part, whose chunks need not add up to their tensors.

    Raises:
        FormatError: malformed in any way, out of bounds, or a tensor that its chunks do not
            cover exactly once.
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

    held = _decode_tensors(columns, paths, what)
    aliases = columns.texts("alias.name")
    targets = columns.integers("alias.tensor", len(aliases)).tolist()
    if any(target >= len(held.names) for target in targets):
        raise FormatError(f"{what} has an alias of a tensor that it does not hold")
    columns.close()
    if len(set(paths)) != len(paths) or len({*held.names, *aliases}) != len(held.names) + len(aliases):
        raise FormatError(f"{what} names a tensor or a shard twice")
    fault = cover.fault_of(held, is_partial=is_partial)
    if fault is not None:
        raise FormatError(f"{what}: {fault.problem}")
    index = Index.of_columns(
        held, files, {alias: held.names[target] for alias, target in zip(aliases, targets, strict=True)}
    )
    return index, header.metadata


def _decode_tensors(columns: _Columns, paths: tuple[str, ...], what: str) -> Columns:
    names = columns.texts("tensor.name")
    placements = columns.texts("tensor.placements")
    if len(placements) != len(names) or any(len(text) > MAX_PLACEMENTS_LENGTH for text in set(placements)):
        raise FormatError(
            f"{what} does not have placements of at most {MAX_PLACEMENTS_LENGTH} characters for each tensor"
        )
    dtypes = columns.integers("tensor.dtype", len(names))
    dimensions = columns.integers("tensor.dimensions", len(names))
    if (dtypes >= len(DTYPE_CODES)).any() or (dimensions > _MAX_DIMENSIONS).any():
        raise FormatError(
            f"{what} has a tensor of an unknown dtype or of more than {_MAX_DIMENSIONS} dimensions"
        )
    shape = columns.integers("tensor.shape", int(dimensions.sum()))
    counts = columns.integers("tensor.chunks", len(names))
    files = columns.integers("chunk.file", None)
    # Each count is bounded before they are summed, so that no sum can wrap around.
    if (counts > len(files)).any() or int(counts.sum()) != len(files):
        raise FormatError(f"{what} has {len(files)} chunks, which is not what its tensors add up to")
    extents = int((dimensions * counts).sum())
    if (files >= len(paths)).any():
        raise FormatError(f"{what} has a chunk in a shard that it does not name")
    return Columns(
        names=names,
        placements=placements,
        dtypes=dtypes,
        dimensions=dimensions,
        shape=shape,
        counts=counts,
        offsets=columns.integers("chunk.offsets", extents),
        sizes=columns.integers("chunk.sizes", extents),
        files=files,
        starts=columns.integers("chunk.start", len(files)),
        paths=paths,
    )


def _column(values: Sequence[int] | Integers) -> Column:
    column = np.asarray(values, np.int64)
    largest = int(column.max()) if len(column) else 0
    bits = next(bits for bits in (8, 16, 32, 64) if largest < 2**bits)
    return column.astype(f"<u{bits // 8}")


def _text_column(name: str, texts: Sequence[str]) -> dict[str, Column]:
    encoded = [text.encode("utf-8") for text in texts]
    ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
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

    def texts(self, name: str) -> tuple[str, ...]:
        blob = self.raw(name)
        ends = self.integers(f"{name}.ends", None)
        if (np.diff(ends, prepend=0) < 0).any() or (int(ends[-1]) if len(ends) else 0) != len(blob):
            raise FormatError(f"{self._what}: the ends of {name!r} do not divide its {len(blob)} bytes")
        bounds = [0, *ends.tolist()]
        try:
            if blob.isascii():
                text = blob.decode("ascii")
                return tuple([text[start:end] for start, end in pairwise(bounds)])
            return tuple([blob[start:end].decode("utf-8") for start, end in pairwise(bounds)])
        except UnicodeDecodeError:
            raise FormatError(f"{self._what}: {name!r} holds bytes that are not UTF-8") from None

    def close(self) -> None:
        if self._left:
            raise FormatError(f"{self._what} has the unknown column {min(self._left)[:60]!r}")
