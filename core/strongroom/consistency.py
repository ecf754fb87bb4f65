"""What the files of one checkpoint say, held against each other. Pure: bytes in, words out.

Each file was found to be the one that the manifest lists before it comes here. That makes it
what was written; whether what was written belongs together is judged here: bindings, the
shards' headers against the index, the documents' references, one rank against another.
No torch: nothing is built from a document, its references are collected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from strongroom import layout, tensorfile
from strongroom.atoms import text_of
from strongroom.canonical import Json
from strongroom.errors import FormatError, IntegrityError
from strongroom.index import MAX_INDEX_BYTES, Index, decode_index
from strongroom.manifest import FileRecord, Manifest
from strongroom.opened import DOCUMENT_BOUNDS, decode_document
from strongroom.shards import ChunkSpec, check_binding

__all__ = ["Consistency", "References", "rank_of", "references"]

_MAX_TOLD: Final = 20
"""Differences told one by one; a shard of another layout would give a quarter of a million."""


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """What a typed document refers to: names of tensors, and of each rank's own values."""

    tensors: frozenset[str]
    per_rank: frozenset[str]


def references(document: Json) -> References:
    """Collect them.

    Raises:
        FormatError: something in the document is no node.
    """
    tensors: set[str] = set()
    per_rank: set[str] = set()
    stack = [document]
    while stack:
        node = stack.pop()
        if type(node) is list:
            stack.extend(node)
        if type(node) is not dict:
            continue
        if set(node) != {"$", "v"} or type(node["$"]) is not str:
            raise FormatError(f"holds an object that is no node: its members are {sorted(node)[:5]}")
        tag, payload = node["$"], node["v"]
        if tag == "tensor":
            tensors.add(_name(tag, payload))
        elif tag in ("ndarray", "generator"):
            if type(payload) is not list or len(payload) != 2:
                raise FormatError(f"holds a {tag} without its two parts")
            tensors.add(_name(tag, payload[0] if tag == "ndarray" else payload[1]))
        elif tag == "per_rank":
            per_rank.add(_name(tag, payload))
        else:
            stack.append(payload)
    return References(tensors=frozenset(tensors), per_rank=frozenset(per_rank))


def _name(tag: str, payload: Json) -> str:
    try:
        return text_of(payload)
    except (TypeError, ValueError):
        raise FormatError(f"holds a {tag} that names nothing") from None


class Consistency:
    """Takes a checkpoint's files one by one, the index first, and says what does not fit.

    Attributes:
        index: None until it was taken, and where it is unusable.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.index: Index | None = None
        self._manifest = manifest
        self._in_shards: dict[str, dict[str, tensorfile.Entry]] = {}
        self._state: References | None = None
        self._ranks: dict[int, tuple[frozenset[str], References]] = {}

    def keeps_whole(self, record: FileRecord) -> bool:
        """Whether `take` wants all of a file; never of one that no reader would accept."""
        path = record.plain_path
        return self._parser(path) is not None and record.plain_bytes <= _limit_bytes(path)

    def block_digests(self, path: str) -> bytes | None:
        """What the index says of a shard's blocks; None where nothing is known."""
        file = self.index.files.get(path) if self.index is not None else None
        return file.block_digests if file is not None else None

    def take(self, record: FileRecord, data: bytes) -> Iterator[str]:
        """Judge a file.

        Args:
            record: which one.
            data: all that it holds if `keeps_whole`, else a shard's header.

        Raises:
            IntegrityError: it is malformed, or belongs to another checkpoint.
            UnsupportedFormatError: it is in a format that this release does not read.
        """
        path = record.plain_path
        parser = self._parser(path)
        if parser is not None:
            if record.plain_bytes > _limit_bytes(path):
                raise FormatError(f"has {record.plain_bytes} bytes; at most {_limit_bytes(path)} are read")
            yield from parser(path, data)
        elif layout.parse_shard_path(path) is not None:
            yield from self._shard(record, data)

    def conclude(self) -> Iterator[tuple[str, str]]:
        """What only all files together show, as pairs of a plain path under ``data/`` and a problem."""
        listed = {record.plain_path for record in self._manifest.files}
        for path in (layout.INDEX, layout.STATE, layout.PROVENANCE):
            if path not in listed:
                yield layout.MANIFEST, f"does not list {path}, which every checkpoint has"
        for path in sorted(listed):
            shard = layout.parse_shard_path(path)
            rank = shard[0] if shard is not None else rank_of(path)
            if rank is not None and rank >= self._manifest.world_size:
                yield (
                    layout.MANIFEST,
                    f"lists {path}, and says that {self._manifest.world_size} ranks wrote the checkpoint",
                )
        documents = [(layout.STATE, self._state)] if self._state is not None else []
        documents += [(layout.rank_state_path(rank), found) for rank, (_, found) in self._ranks.items()]
        if self.index is not None:
            for path, found in documents:
                for name in sorted(found.tensors):
                    if self.index.find(name) is None:
                        yield path, f"refers to the tensor {name!r:.80}, which the index does not hold"
        if self._state is not None:
            yield from self._ranks_differ(self._state)

    def _parser(self, path: str) -> Callable[[str, bytes], Iterator[str]] | None:
        if path == layout.INDEX:
            return self._take_index
        if path == layout.STATE:
            return self._take_state
        if path == layout.PROVENANCE:
            return self._take_provenance
        return self._take_rank_state if rank_of(path) is not None else None

    # ----------------------------------------------------------------------------------- index

    def _take_index(self, path: str, data: bytes) -> Iterator[str]:
        index, metadata = decode_index(data, path)
        check_binding(metadata, self._manifest.run, self._manifest.name, path)
        self.index = index
        self._in_shards = {file: {} for file in index.files}
        try:
            index.check_against(self._manifest)
        except IntegrityError as error:
            yield str(error)
        for tensor in index.tensors.values():
            for chunk in tensor.chunks:
                entry = ChunkSpec(
                    tensor.name, tensor.dtype, chunk.offsets, chunk.sizes, chunk.sizes == tensor.shape
                ).entry
                entries = self._in_shards[chunk.path]
                if entry in entries:
                    yield f"places {entry!r:.80} in {chunk.path} twice"
                entries[entry] = tensorfile.Entry(entry, tensor.dtype, chunk.sizes, chunk.start)

    # ---------------------------------------------------------------------------------- shards

    def _shard(self, record: FileRecord, data: bytes) -> Iterator[str]:
        path = record.plain_path
        header = tensorfile.parse_header(data, record.plain_bytes, path)
        check_binding(header.metadata, self._manifest.run, self._manifest.name, path)
        expected = self._in_shards.get(path)
        if expected is None:
            return  # The index is unusable, or was told not to name this shard.
        told = list(_entries_differ({entry.name: entry for entry in header.entries}, expected))
        yield from told[:_MAX_TOLD]
        if len(told) > _MAX_TOLD:
            yield f"and {len(told) - _MAX_TOLD} more entries are not what the index says"

    # ------------------------------------------------------------------------------- documents

    def _take_state(self, path: str, data: bytes) -> Iterator[str]:
        self._state = references(self._document(path, "state", data)["document"])
        yield from ()

    def _take_rank_state(self, path: str, data: bytes) -> Iterator[str]:
        rank = rank_of(path)
        document = self._document(path, "rank_state", data)
        if rank is None or document["rank"] != rank:
            raise IntegrityError(f"says that it is of rank {document['rank']!r:.40}")
        pairs = document["values"]
        if type(pairs) is not list or not all(
            type(pair) is list and len(pair) == 2 and type(pair[0]) is str for pair in pairs
        ):
            raise FormatError("does not hold pairs of a name and a value")
        names = frozenset(pair[0] for pair in pairs)
        if len(names) != len(pairs):
            yield "names a value twice"
        self._ranks[rank] = names, references([pair[1] for pair in pairs])

    def _take_provenance(self, path: str, data: bytes) -> Iterator[str]:
        document = self._document(path, "provenance", data)
        tags = document["tags"]
        if type(tags) is not list or not all(type(tag) is str for tag in tags):
            yield "has tags that are not all texts"
        found = references([document["metrics"], document["provenance"], document.get("collected")])
        for name in sorted(found.tensors | found.per_rank):
            yield f"refers to {name!r:.80}, and holds nothing but plain values"

    def _document(self, path: str, kind: str, data: bytes) -> dict[str, Json]:
        return decode_document(data, kind, self._manifest.run, self._manifest.name, path)

    def _ranks_differ(self, state: References) -> Iterator[tuple[str, str]]:
        """Every rank stored the same names of own values, and the common state asks for just these."""
        listed = {record.plain_path for record in self._manifest.files}
        asked = state.per_rank.union(*(found.per_rank for _, found in self._ranks.values()))
        for rank in range(self._manifest.world_size if asked or self._ranks else 0):
            path = layout.rank_state_path(rank)
            if rank not in self._ranks:
                if path not in listed:
                    yield (
                        layout.MANIFEST,
                        f"does not list {path}, and the state has values of each rank's own",
                    )
                continue
            names, _ = self._ranks[rank]
            for name in sorted(asked - names):
                yield path, f"lacks the value {name!r:.80}, which every rank stores"
            for name in sorted(names - asked):
                yield path, f"holds the value {name!r:.80}, which the state does not refer to"


def _limit_bytes(path: str) -> int:
    return MAX_INDEX_BYTES if path == layout.INDEX else DOCUMENT_BOUNDS.length_bytes


def rank_of(path: str) -> int | None:
    """The rank whose own state a path holds, or None."""
    digits = path.removeprefix("state-").removesuffix(".json")
    if len(digits) != 5 or not digits.isascii() or not digits.isdigit():
        return None
    return int(digits) if layout.rank_state_path(int(digits)) == path else None


def _entries_differ(
    found: dict[str, tensorfile.Entry], expected: dict[str, tensorfile.Entry]
) -> Iterator[str]:
    for name, entry in expected.items():
        stands = found.get(name)
        if stands is None:
            yield f"lacks {name!r:.80}, which the index places in it"
        elif stands != entry:
            yield f"holds {name!r:.80} as {_spelled(stands)}, and the index says {_spelled(entry)}"
    for name in found:
        if name not in expected:
            yield f"holds {name!r:.80}, which the index does not name"


def _spelled(entry: tensorfile.Entry) -> str:
    return f"{entry.dtype}{list(entry.shape)} at byte {entry.start}"
