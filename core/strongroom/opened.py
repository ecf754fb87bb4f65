"""Opening a committed checkpoint: commit, manifest, index and documents, each verified before the next.

The order is the order of trust: the commit's own digest, then the manifest that it pins, then
what the manifest pins. Nothing is parsed before its bytes were held against a digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from strongroom import canonical, layout
from strongroom.auditing import NO_AUDIT, Action, Activity, Auditor, accepted_operation
from strongroom.canonical import Bounds, Json
from strongroom.contents import open_whole
from strongroom.copies import first_whole
from strongroom.digest import digest_of_bytes, sha256_of
from strongroom.errors import (
    FormatError,
    IntegrityError,
    NoKeyError,
    ObjectNotFoundError,
    UnsealedError,
    UnsupportedFormatError,
)
from strongroom.index import MAX_INDEX_BYTES, Index, decode_index
from strongroom.layout import CheckpointName
from strongroom.manifest import (
    FORMAT,
    MANIFEST_BOUNDS,
    Commit,
    FileRecord,
    Manifest,
)
from strongroom.sealing import Opener, Sealing, Unlocked
from strongroom.shards import check_binding
from strongroom.signing import Guard
from strongroom.stores.base import Store
from strongroom.tensorfile import MAX_HEADER_BYTES

__all__ = [
    "ADVICE",
    "DOCUMENT_BOUNDS",
    "OpenedCheckpoint",
    "check_sealed",
    "decode_document",
    "encode_document",
    "open_checkpoint",
]

ADVICE: Final = "restore an older step, or copy this file again from another tier"

DOCUMENT_BOUNDS: Final = Bounds(length_bytes=1 << 30, depth=512, items=50_000_000)
"""What a state or provenance document may hold at most; a larger one is refused at save."""


@dataclass(frozen=True, kw_only=True)
class OpenedCheckpoint:
    """A checkpoint whose manifest was verified. Its other files are verified as they are read.

    One thread opens it; reading shards (`strongroom.fetch`) may use several. Files are called by
    their plain names, whether they are sealed or not.

    Attributes:
        store: where it is read.
        others: where it stands besides, byte for byte the same: a file that is damaged, or cannot be read,
            is taken from the next one.
        sealing: how sealed files are opened; None: they are not.
        signers: ids of the keys whose signatures were verified; empty where nobody asked for them.
        keys: the checkpoint's keys where this process was handed them; None: it unlocks them itself
            when it first needs one.
        auditor: has to have accepted what is read of it; where whoever opened it has not seen to that, the
            first file that is read does.
    """

    store: Store
    commit: Commit
    manifest: Manifest
    sealing: Sealing | None = None
    signers: tuple[str, ...] = ()
    keys: Unlocked | None = None
    others: tuple[Store, ...] = ()
    auditor: Auditor = NO_AUDIT

    @property
    def stores(self) -> tuple[Store, ...]:
        """Every store that it stands in, in the order in which they are read."""
        return (self.store, *self.others)

    @property
    def name(self) -> CheckpointName:
        return self.manifest.name

    @cached_property
    def _is_on_record(self) -> bool:
        """See that it is on record that something of it is read; mostly whoever opened it has said so.

        Raises:
            AuditError: it could not be put there, and nothing is read.
        """
        auditor, run = self.auditor, self.manifest.run
        # Of what is sealed, its keys are not unwrapped before that is on record.
        if (
            auditor.is_on
            and not self.manifest.is_sealed
            and accepted_operation(auditor, run, self.name) is None
        ):
            with Activity(
                auditor, Action.READ, root=self.store.uri, run=run, checkpoint=self.name
            ) as activity:
                activity.intend(run, self.name)
        return True

    @cached_property
    def files(self) -> dict[str, FileRecord]:
        """The manifest's files by their plain paths."""
        return {record.plain_path: record for record in self.manifest.files}

    @cached_property
    def unlocked(self) -> Unlocked:
        """The keys of a sealed checkpoint.

        Raises:
            NoKeyError: nothing here opens it.
            KeyServiceError: who keeps its key cannot be reached.
            IntegrityError: its keyrings are damaged.
        """
        if self.keys is not None:
            return self.keys
        if self.sealing is None:
            raise NoKeyError(
                f"{self.name} of run {self.manifest.run} is sealed, and no policy here says how to open it: "
                "name the policy file, whose [seal] section names the keys, by security=, --security or "
                "STRONGROOM_CONFIG"
            )
        sealing = self.sealing
        return first_whole(self.stores, lambda store: sealing.unlock(store, self.commit, self.manifest))

    def opener(self, record: FileRecord) -> Opener:
        """Opens a sealed file, of which the header is the pinned one.

        Raises:
            IntegrityError: the key is not the file's, or the file is not as long as its format says.
            NoKeyError, KeyServiceError: as `unlocked`.
        """
        return self.unlocked.opener(record)

    @cached_property
    def index(self) -> Index:
        """The index, verified and consistent with the manifest.

        Raises:
            IntegrityError: it is missing, damaged, malformed or of another checkpoint.
        """
        what = f"{layout.INDEX} of {self.name}"
        index, metadata = decode_index(self.read(layout.INDEX, limit_bytes=MAX_INDEX_BYTES), what)
        check_binding(metadata, self.manifest.run, self.name, what)
        index.check_against(self.manifest)
        return index

    @cached_property
    def state(self) -> Json:
        """The typed document that all ranks share (`strongroom.tree`)."""
        return self.document(layout.STATE, "state")["document"]

    @cached_property
    def provenance(self) -> dict[str, Json]:
        """Where the checkpoint comes from: the members of ``provenance.json``."""
        return self.document(layout.PROVENANCE, "provenance")

    def owner_for(self, rank: int, stand_in: int | None = None) -> int:
        """Whose own values a rank is given: its own, or where it stored none those of ``stand_in``."""
        stored_some = layout.rank_state_path(rank) in self.files
        return rank if stored_some or stand_in is None else stand_in

    def rank_state(self, rank: int) -> dict[str, Json]:
        """One rank's own values by name; empty where it stored none."""
        path = layout.rank_state_path(rank)
        if path not in self.files:
            return {}
        pairs = self.document(path, "rank_state")["values"]
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs
        ):
            raise FormatError(f"{path} of {self.name} does not hold pairs of a name and a value")
        return dict(pairs)

    def document(self, path: str, kind: str) -> dict[str, Json]:
        """A JSON file of this checkpoint: its members, once it was verified and found to belong here."""
        data = self.read(path, limit_bytes=DOCUMENT_BOUNDS.length_bytes)
        return decode_document(data, kind, self.manifest.run, self.name, f"{path} of {self.name}")

    def read(self, path: str, *, limit_bytes: int) -> bytes:
        """One of the manifest's files, whole and verified.

        Raises:
            IntegrityError: it is missing, of another length, or its digest is not the manifest's.
            StoreError: the store could not be asked.
        """
        record = self.record(path)
        self._is_on_record  # noqa: B018 - said once, before the first of its files is read
        what = f"{path} of {self.name}"
        if record.plain_bytes > limit_bytes:
            raise FormatError(f"{what} has {record.plain_bytes} bytes; at most {limit_bytes} are read")
        return first_whole(self.stores, lambda store: self._read(store, record, what))

    def _read(self, store: Store, record: FileRecord, what: str) -> bytes:
        try:
            data = store.read(layout.data_key(self.name, record.path), limit_bytes=record.size_bytes)
        except ObjectNotFoundError:
            raise self.missing(record) from None
        except FormatError:
            raise IntegrityError(
                f"{what} is longer than the manifest's {record.size_bytes} bytes; {ADVICE}"
            ) from None
        if len(data) != record.size_bytes:
            raise IntegrityError(
                f"{what} has {len(data)} bytes, the manifest says {record.size_bytes}; {ADVICE}"
            )
        found = digest_of_bytes(self.manifest.algorithm, data)
        if not found.matches(record.digest):
            raise IntegrityError(
                f"{what}: stored digest {found} is not the manifest's {record.digest}; {ADVICE}"
            )
        if record.header is None:
            return data
        unlocked = self.unlocked
        try:
            return open_whole(unlocked.opener(record), data)
        except IntegrityError as error:
            raise IntegrityError(f"{what}: {error}; {ADVICE}") from error

    def check_unused(self) -> None:
        """Verify the files that a restore takes nothing from: a damaged one is damage all the same.

        These are the provenance, and shards that hold no byte of a tensor.

        Raises:
            IntegrityError, StoreError: as `read`.
        """
        self.provenance  # noqa: B018 - read and verified when it is first asked for
        used = self.index.used_paths
        for path in self.index.files:
            if path not in used:
                self.read(path, limit_bytes=8 + MAX_HEADER_BYTES)

    def record(self, path: str) -> FileRecord:
        """The manifest's word on a file that this format cannot do without."""
        record = self.files.get(path)
        if record is None:
            raise IntegrityError(f"the manifest of {self.name} does not list {path}")
        return record

    def missing(self, record: FileRecord) -> IntegrityError:
        return IntegrityError(
            f"{record.path} of {self.name} is missing; the manifest lists it with {record.size_bytes} "
            f"bytes; {ADVICE}"
        )


def open_checkpoint(
    store: Store, commit: Commit, guard: Guard, *, others: tuple[Store, ...] = ()
) -> OpenedCheckpoint:
    """Read and verify a checkpoint's manifest; its signatures before it is parsed.

    Args:
        guard: what the policy demands. Without one, signatures are not looked at, and a sealed
            checkpoint's files stay closed.
        others: further stores in which it stands.

    Raises:
        IntegrityError: it is missing, damaged, malformed, or of another checkpoint; or, as
            `UntrustedError` or `UnsealedError`, it is not signed or not sealed as the policy demands.
        UnsupportedFormatError: it is whole, in a format that this release does not read.
        StoreError: the store could not be asked.
    """
    what = f"{layout.MANIFEST} of {commit.name}"
    stores = (store, *others)
    data = first_whole(stores, lambda each: _read_manifest(each, commit, what))
    signers: tuple[str, ...] = ()
    trust = guard.trust
    if trust is None:
        manifest = Manifest.decode(data, what)
    else:
        trusted = first_whole(stores, lambda each: trust.judge(each, commit, data))
        manifest, signers = trusted.manifest, trusted.signers
    if manifest.name != commit.name or manifest.run != commit.run:
        raise IntegrityError(f"{what} says that it is {manifest.name} of run {manifest.run}")
    if manifest.is_sealed != (commit.keyring is not None):
        raise IntegrityError(f"{what} and COMMIT do not agree on whether the checkpoint is sealed; {ADVICE}")
    check_sealed(manifest, guard.sealing)
    return OpenedCheckpoint(
        store=store,
        others=others,
        commit=commit,
        manifest=manifest,
        sealing=guard.sealing,
        signers=signers,
        auditor=guard.auditor,
    )


def _read_manifest(store: Store, commit: Commit, what: str) -> bytes:
    """A manifest's bytes, which are those that ``COMMIT`` pins."""
    try:
        data = store.read(
            layout.data_key(commit.name, layout.MANIFEST), limit_bytes=MANIFEST_BOUNDS.length_bytes
        )
    except ObjectNotFoundError:
        raise IntegrityError(f"{what} is missing; {ADVICE}") from None
    found = sha256_of(data)
    if not found.matches(commit.manifest):
        raise IntegrityError(
            f"{what}: stored digest {found} is not {commit.manifest}, which COMMIT pins; {ADVICE}"
        )
    return data


def check_sealed(manifest: Manifest, sealing: Sealing | None) -> None:
    """Raise UnsealedError where a policy demands sealed checkpoints, and does not except this one."""
    if sealing is None or manifest.is_sealed or sealing.accepts_unsealed(manifest.name):
        return
    raise UnsealedError(
        f"{manifest.name} is not sealed, and the policy has [seal]: anyone with access to the storage may "
        f"have written it. If it is meant, name it in the policy: unsealed = [{manifest.name.folder!r}]"
    )


def encode_document(kind: str, run: str, name: CheckpointName, members: dict[str, Json]) -> bytes:
    """A JSON file's bytes, bound to its checkpoint.

    Raises:
        FormatError: it holds more than could be read back.
    """
    data = canonical.encode(
        {
            **members,
            "attempt": name.attempt,
            "format": FORMAT,
            "kind": kind,
            "launch": name.launch,
            "run": run,
            "step": name.step,
        }
    )
    if len(data) > DOCUMENT_BOUNDS.length_bytes:
        raise FormatError(
            f"the {kind} document of {name} has {len(data)} bytes; at most {DOCUMENT_BOUNDS.length_bytes} "
            "are read back. Keep large data in tensors or arrays, which are stored apart"
        )
    return data


def decode_document(data: bytes, kind: str, run: str, name: CheckpointName, what: str) -> dict[str, Json]:
    """The members of `encode_document`'s bytes, less the binding, which must be this checkpoint's."""
    value = canonical.decode(data, what, DOCUMENT_BOUNDS)
    if not isinstance(value, dict):
        raise FormatError(f"{what} is not a JSON object")
    bound = {"attempt": name.attempt, "kind": kind, "launch": name.launch, "run": run, "step": name.step}
    if value.get("format") != FORMAT:
        raise UnsupportedFormatError(
            f"{what} is in format {value.get('format')!r:.40}; this release reads {FORMAT}"
        )
    for member, expected in bound.items():
        if value.get(member) != expected:
            raise IntegrityError(
                f"{what} says {member} {value.get(member)!r:.80} where {expected!r} was expected; it "
                "belongs to another checkpoint"
            )
    expected_members = {"state": {"document"}, "rank_state": {"rank", "values"}}.get(
        kind, {"provenance", "metrics", "tags", "producer"}
    )
    members = {key: item for key, item in value.items() if key not in bound and key != "format"}
    optional = {"collected"} if kind == "provenance" else set()
    unknown = {key for key in members if not key.startswith("x-") and key not in optional} ^ expected_members
    if unknown:
        raise FormatError(f"{what} has unknown members or lacks some: {sorted(unknown)[:5]}")
    return members
