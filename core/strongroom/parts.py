"""The half of a save in the background: each rank writes its part, and the coordinator commits them.

A part is what one rank stores: the chunks that it owns, and its own values. The coordinator holds
the parts of all ranks against each other, writes what they share, and commits.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from strongroom import completeness, layout
from strongroom._version import __version__
from strongroom.canonical import Json
from strongroom.differing import (
    check_aliases,
    check_compared,
    differing_documents,
    explain_difference,
)
from strongroom.errors import OutcomeUnknownError, RanksError, RanksMissingError, SaveError
from strongroom.index import Index, decode_index, encode_index
from strongroom.manifest import Commit, FileRecord
from strongroom.messages import Message
from strongroom.opened import decode_document, encode_document
from strongroom.parallel import run_all
from strongroom.plan import partial_index
from strongroom.provenance.progress import progress_in
from strongroom.ranks import Lane, Ranks, Verdict
from strongroom.saving import Provenance, StagedSave
from strongroom.shards import WrittenFile, binding
from strongroom.stage import StagedShard
from strongroom.transaction import Attempt, Committed
from strongroom.values import Node

__all__ = ["Part", "fail_together", "producer", "write_together"]

_LINGER_S: Final = 10.0
"""How long the coordinator stays reachable for ranks that have yet to hear of the outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank has written, on stable storage, and what it says of values common to all.

    Attributes:
        files: every file of its own.
        index: its chunks, its shards and their block digests.
        document: SHA-256 of the document that all ranks share, as hex digits.
        compared: a digest of each small value that must be the same everywhere.
        aliases: further names of tensors.
    """

    rank: int
    files: tuple[FileRecord, ...]
    index: Index
    document: str
    compared: Mapping[str, str]
    aliases: Mapping[str, str]

    def message(self, keys: bytes | None = None) -> Message:
        """What the coordinator is told; ``keys`` are those of sealed files, sealed to it."""
        sealed = {} if keys is None else {"keys": keys}
        return Message(
            members={
                "aliases": dict(self.aliases),
                "compared": dict(self.compared),
                "document": self.document,
                "files": [record.to_json() for record in self.files],
            },
            pieces={"index": encode_index(self.index, {}), **sealed},
        )

    @classmethod
    def of(cls, message: Message, rank: int) -> Part:
        what = f"the index of rank {rank}"
        index, _ = decode_index(message.pieces["index"], what, is_partial=True)
        said = message.members
        return cls(
            rank=rank,
            files=tuple(FileRecord.from_json(value, f"a file of rank {rank}") for value in said["files"]),
            index=index,
            document=said["document"],
            compared=said["compared"],
            aliases=said["aliases"],
        )


def write_together(
    attempt: Attempt,
    staged: StagedSave,
    provenance: Provenance,
    ranks: Ranks,
    *,
    workers: int,
    invitation: bytes = b"",
) -> Commit:
    """Write this rank's part, and commit once every rank has written its own.

    Args:
        workers: threads that write.
        invitation: the public half of the coordinator's one-off key, to which a rank seals its files' keys.

    Raises:
        NoKeyError, KeyServiceError: the checkpoint's key could not be wrapped.
        RanksError: a rank is missing or failed, or ranks hold different values.
        OutcomeUnknownError: the coordinator was lost after all was written: it may have committed.
        StrongroomError: it was not committed; why.
    """
    if attempt.seal is not None and ranks.is_coordinator:
        # A key service answers while files are written.
        attempt.seal.begin_wrapping()
    document = _shared_document(attempt, staged)
    if ranks.is_alone:
        part = _write_part(attempt, staged, document, workers=workers)
        return _commit_parts(attempt, [part], staged, document, provenance).commit
    lane = ranks.lane("background")
    has_written = False
    committed: Commit | None = None

    def propose() -> Message:
        nonlocal has_written
        part = _write_part(attempt, staged, document, workers=workers)
        if not ranks.is_coordinator:
            # The coordinator makes its own folder durable; a name that this rank made may need its own.
            attempt.make_durable()
        has_written = True
        return part.message(_handed(attempt, b"" if ranks.is_coordinator else invitation))

    def decide(said: list[Message]) -> Verdict:
        nonlocal committed
        parts = [Part.of(message, rank) for rank, message in enumerate(said)]
        if attempt.seal is not None:
            for message in said[1:]:
                attempt.seal.take_over(message.pieces["keys"])
        differing = differing_documents([part.document for part in parts])
        if differing:
            return Verdict(shared=Message(members={"differing": differing}))
        committed = _commit_parts(attempt, parts, staged, document, provenance).commit
        return Verdict(shared=Message(pieces={"commit": committed.encode()}))

    try:
        said, _ = lane.agree(
            _phase(attempt),
            propose,
            decide,
            timeout_s=max(0.0, attempt.deadline.left_s),
            linger_s=_LINGER_S,
            name=str(attempt.name),
            is_work=True,
            is_final=True,
        )
    except RanksError as error:
        if committed is not None:
            # It stands, whoever could not be told.
            return committed
        if isinstance(error, RanksMissingError) and has_written and error.ranks == (0,):
            raise OutcomeUnknownError(
                f"{error}. All of this rank's files are written; whether rank 0 has committed them, "
                "restore() will tell"
            ) from error
        raise
    if "differing" in said.members:
        _explain(lane, attempt, document, ranks.rank, said.members["differing"])
    return Commit.decode(said.pieces["commit"], "the coordinator's commit")


def fail_together(attempt: Attempt, ranks: Ranks, error: BaseException) -> Commit:
    """Let the other ranks know that this one has no part to write.

    Raises:
        SaveError: always.
    """

    def propose() -> Message:
        raise SaveError(f"staging failed: {type(error).__name__}: {error}") from error

    def decide(_: list[Message]) -> Verdict:
        raise SaveError("a save without this rank's part cannot be committed")

    timeout_s = max(0.0, attempt.deadline.left_s)
    ranks.lane("background").agree(
        _phase(attempt),
        propose,
        decide,
        timeout_s=timeout_s,
        linger_s=_LINGER_S,
        name=str(attempt.name),
        is_work=True,
    )
    raise SaveError("a save without this rank's part was agreed on")


def _handed(attempt: Attempt, invitation: bytes) -> bytes | None:
    """The keys of what this rank has sealed, for the coordinator; which keeps its own."""
    if attempt.seal is None:
        return None
    return attempt.seal.hand_over(invitation) if invitation else b""


def _phase(attempt: Attempt) -> str:
    return f"writing {attempt.name}"


def _explain(lane: Lane, attempt: Attempt, document: bytes, rank: int, differing: Sequence[int]) -> None:
    """Raise RanksDisagreeError, on all ranks, that says where documents differ."""

    def decide(said: list[Message]) -> Verdict:
        def parsed(data: bytes) -> Node:
            return decode_document(data, "state", attempt.run, attempt.name, "a rank's state")["document"]

        raise explain_difference(
            parsed(document), {other: parsed(said[other].pieces["document"]) for other in differing}
        )

    lane.agree(
        "comparing what all ranks should have alike",
        lambda: Message(pieces={"document": document} if rank in differing else {}),
        decide,
        timeout_s=max(1.0, attempt.deadline.left_s),
        linger_s=_LINGER_S,
        name=f"{attempt.name}/comparing",
    )


def _shared_document(attempt: Attempt, staged: StagedSave) -> bytes:
    """The document that every rank has alike, and the coordinator writes."""
    return encode_document("state", attempt.run, attempt.name, {"document": staged.document})


def _write_part(attempt: Attempt, staged: StagedSave, document: bytes, *, workers: int) -> Part:
    """Write this rank's shards and its own values.

    Args:
        document: as `_shared_document` gives it.

    Raises:
        StrongroomError: something was not written.
    """
    bound = binding(attempt.run, attempt.name)
    if staged.pending is not None:
        staged.pending.wait()
    written = run_all(
        [partial(_write_shard, attempt, shard, bound) for shard in staged.shards],
        workers=workers,
        name="strongroom-shard",
    )
    layouts = [shard.layout for shard in staged.shards]
    files = [*zip(layouts, written, strict=True), *staged.written]
    index = partial_index(staged.plan, [(layout, file.block_digests) for layout, file in files], {})
    records = [file.record for _, file in files]
    if staged.rank_document:
        members: dict[str, Json] = {"rank": staged.rank, "values": staged.rank_document}
        own = encode_document("rank_state", attempt.run, attempt.name, members)
        records.append(attempt.write_whole(layout.rank_state_path(staged.rank), own).record)
    return Part(
        rank=staged.rank,
        files=tuple(records),
        index=index,
        document=hashlib.sha256(document).hexdigest(),
        compared=staged.compared,
        aliases=staged.aliases,
    )


def _commit_parts(
    attempt: Attempt,
    parts: Sequence[Part],
    staged: StagedSave,
    document: bytes,
    provenance: Provenance,
) -> Committed:
    """Hold the parts of all ranks against each other, write what they share, and commit.

    Args:
        staged: the coordinator's own: every tensor that it has seen must be there whole.

    Raises:
        RanksDisagreeError: a value that is common to all differs between ranks.
        StrongroomError: it was not committed (or, `OutcomeUnknownError`, may be); why.
    """
    check_compared([part.compared for part in parts])
    aliases = check_aliases([part.aliases for part in parts])
    index = completeness.merge([part.index for part in parts], aliases, staged.plan.shapes)
    records = [record for part in parts for record in part.files]
    documents = {
        layout.INDEX: encode_index(index, binding(attempt.run, attempt.name)),
        layout.STATE: document,
        layout.PROVENANCE: encode_document(
            "provenance",
            attempt.run,
            attempt.name,
            _provenance_members(attempt, staged, index, provenance),
        ),
    }
    for path, data in documents.items():
        records.append(attempt.write_whole(path, data).record)
    return attempt.commit(records)


def _provenance_members(
    attempt: Attempt, staged: StagedSave, index: Index, provenance: Provenance
) -> dict[str, Json]:
    recorder = provenance.recorder
    if recorder is None:
        raise SaveError("a rank that records nothing was to write what is recorded")

    def facts() -> dict[str, Any]:
        meshes = sorted({words.partition(":")[0] for words in staged.plan.placements.values()})
        return {
            **provenance.facts,
            **progress_in(staged.document, list(map(list, staged.rank_document))),
            "architecture": recorder.architecture.digest(staged.plan, staged.document, index),
            "meshes": [mesh.removeprefix("mesh ") for mesh in meshes],
        }

    return recorder.members(
        provenance=provenance.provenance,
        metrics=provenance.metrics,
        tags=provenance.tags,
        producer=producer(),
        facts=facts,
        within_s=attempt.deadline.left_s,
    )


def _write_shard(attempt: Attempt, shard: StagedShard, bound: Mapping[str, str]) -> WrittenFile:
    return attempt.write(shard.layout.path, shard.pieces(bound), length_bytes=shard.layout.size_bytes)


def producer() -> dict[str, Json]:
    """What wrote the checkpoint, for people who wonder later."""
    return {
        "python": platform.python_version(),
        "strongroom": __version__,
        "torch": str(torch.__version__),
    }
