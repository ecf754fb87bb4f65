"""Reading a whole log, and finding out whether it is as it was written: the order of things, no judgement.

The tree's checkpoint is read first, and the segments are listed after it: what was sequenced stood in the
sink before, so that a log that grows meanwhile is no different from one that does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from strongroom.errors import FormatError, IntegrityError
from strongroom.stores.base import Store
from strongroom_security.auditlog.format.segments import read_segment
from strongroom_security.auditlog.listing import list_segments, read_segments
from strongroom_security.auditlog.sequencing.plans import PLANS
from strongroom_security.auditlog.verifying.findings import Finding, FindingKind, Gravity, Totals
from strongroom_security.auditlog.verifying.holding import HeldSegment, Holding, hold
from strongroom_security.auditlog.verifying.spreading import spread
from strongroom_security.auditlog.verifying.trusting import Vouchers
from strongroom_security.auditlog.verifying.verifying import Summary, Verifier, difference, summary_of
from strongroom_security.tlog.checkpoints import Checkpoint
from strongroom_security.tlog.notes import Note
from strongroom_security.tlog.reading import PREFIX, TreeReader, read_checkpoint
from strongroom_security.tlog.witnesses import LogKeys, SignedCheckpoint, open_checkpoint

__all__ = ["Demands", "TreeStanding", "VerifiedLog", "check_log"]

_FIRST_PLAN: Final = "0.json"
_CHECKPOINT: Final = "the tree's checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What a log is held to.

    Attributes:
        vouchers: whose certificates over writers count; none: nobody is asked for.
        log: who must have signed the tree's checkpoint; None: nobody.
        against: a signed checkpoint that was kept elsewhere: the tree must be that one, or one grown from it.
        run: look at this run's segments alone; None: at all.
        allow_uncertified: let writers pass for which nobody vouches.
    """

    vouchers: Vouchers = field(default_factory=Vouchers)
    log: LogKeys | None = None
    against: bytes | None = None
    run: str | None = None
    allow_uncertified: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeStanding:
    """The tree that a log has.

    Attributes:
        signed_by, cosigned_by: whose signatures were verified, by name.
    """

    origin: str
    size: int
    root: bytes
    signed_by: tuple[str, ...]
    cosigned_by: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "cosigned_by": list(self.cosigned_by),
            "origin": self.origin,
            "root": self.root.hex(),
            "signed_by": list(self.signed_by),
            "size": self.size,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedLog:
    """What was found.

    Attributes:
        findings: the worst first.
        tree: None where there is none, or its checkpoint cannot be believed.
    """

    findings: tuple[Finding, ...]
    totals: Totals
    tree: TreeStanding | None

    @property
    def is_tampered(self) -> bool:
        return any(finding.gravity is Gravity.TAMPERED for finding in self.findings)

    @property
    def is_untrusted(self) -> bool:
        """Whether somebody vouches for a part of it who is not trusted."""
        return any(finding.gravity is Gravity.UNTRUSTED for finding in self.findings)


def check_log(
    store: Store, demands: Demands, *, progress: Callable[[int, int], None] | None = None
) -> VerifiedLog:
    """Read a log and find out.

    Args:
        store: the sink.
        progress: told of how many segments of how many were read.

    Raises:
        StoreError: something could not be read, so that nothing is known of it.
        IntegrityError: the kept checkpoint is none, or is signed by nobody who should have.
    """
    kept = None if demands.against is None else _kept(demands.against, demands.log)
    told: list[Finding] = []
    reader, tree = _open_tree(store, demands, told, kept)
    held: dict[str, HeldSegment] | None = None
    if reader is not None:
        held = _of_run(_hold(reader, told, kept).segments, demands.run)
    elif any(finding.gravity is Gravity.TAMPERED for finding in told):
        held = {}  # there is, or was, a tree, and it cannot be believed in anything
    verifier = Verifier(demands.vouchers, allow_uncertified=demands.allow_uncertified, held=held)
    verifier.tell(told)
    listing = list_segments(store).of_run(demands.run)
    verifier.tell(
        Finding(
            kind=FindingKind.STRAY,
            segment=key,
            message="by its name or its kind (a link, a pipe, a folder) it is no segment, and it lies where "
            "writers put those: somebody put it here",
        )
        for key in listing.strays
    )
    keys = list(listing.segments)
    digests = {key: each.digest for key, each in (held or {}).items()}
    size_bytes = sum(info.size_bytes for info in listing.segments.values())
    read = spread(
        partial(_summary, digests), read_segments(store, keys, listing.segments), size_bytes=size_bytes
    )
    for done, (key, found) in enumerate(zip(keys, read, strict=True), 1):
        if isinstance(found, str):
            verifier.add_unreadable(key, found)
        elif held is not None and reader is not None and verifier.is_altered(key, found.digest):
            verifier.add(found, differs_at=_difference(store, reader, held[key]))
        else:
            verifier.add(found)
        if progress is not None:
            progress(done, len(keys))
    findings, totals = verifier.finish()
    return VerifiedLog(findings=tuple(findings), totals=totals, tree=tree)


def _summary(held: Mapping[str, bytes], read: tuple[str, bytes | str]) -> Summary | str:
    """What a segment comes to; in words where it cannot be read. In another process, perhaps."""
    key, data = read
    if isinstance(data, str):
        return data
    digest = hashlib.sha256(data).digest()
    try:
        # What the tree holds as it stands was spelled canonically when it was sequenced.
        return summary_of(read_segment(key, data, is_canonical=held.get(key) != digest), digest)
    except FormatError as error:
        return str(error)


def _difference(store: Store, reader: TreeReader, held: HeldSegment) -> int:
    """The first line in which a segment is not what the tree holds."""
    ((_, data),) = read_segments(store, [held.key])
    now = [] if isinstance(data, str) else data.split(b"\n")[:-1]
    was: list[bytes] = []
    try:
        for _, entry in reader.walk(held.first_leaf):
            was.append(entry)
            if len(was) == held.lines:
                break
    except IntegrityError:
        pass  # the tree is damaged further on, and that was told
    return difference(was, now)


# -------------------------------------------------------------------------------------------------- the tree


def _kept(data: bytes, log: LogKeys | None) -> Checkpoint:
    """The checkpoint that was kept; one that is not right is no evidence of anything."""
    head, _ = _head(data, log, "the checkpoint that was kept")
    return head


def _head(data: bytes, log: LogKeys | None, what: str) -> tuple[Checkpoint, SignedCheckpoint | None]:
    if log is None:
        return Checkpoint.parse(Note.parse(data, what).text, what), None
    opened = open_checkpoint(data, log, what)
    return opened.head, opened


def _open_tree(
    store: Store, demands: Demands, findings: list[Finding], kept: Checkpoint | None
) -> tuple[TreeReader | None, TreeStanding | None]:
    data = read_checkpoint(store)
    if data is None:
        # A plan for a tree of some size is made once that size was published.
        is_later = any(name != _FIRST_PLAN for name in store.list_names(PLANS))
        data = read_checkpoint(store) if is_later else None
        if data is None:
            findings.append(_no_tree(store, kept, demands.log, is_later=is_later))
            return None, None
    try:
        head, opened = _head(data, demands.log, _CHECKPOINT)
    except FormatError as error:
        findings.append(Finding(kind=FindingKind.TREE_DAMAGED, message=str(error)))
        return None, None
    except IntegrityError as error:  # UntrustedError is one
        findings.append(Finding(kind=FindingKind.TREE_SIGNATURE, message=str(error)))
        return None, None
    if opened is None:
        findings.append(
            Finding(
                kind=FindingKind.TREE_UNVOUCHED,
                message="no key was named that must have signed the tree's checkpoint: whoever may write to "
                "the tree could have made another one",
            )
        )
    standing = TreeStanding(
        origin=head.origin,
        size=head.size,
        root=head.root,
        signed_by=() if opened is None else tuple(each.key.name for each in opened.signed),
        cosigned_by=() if opened is None else tuple(each.key.name for each in opened.cosigned),
    )
    return TreeReader(store, head), standing


def _no_tree(store: Store, kept: Checkpoint | None, log: LogKeys | None, *, is_later: bool) -> Finding:
    """What it means that there is no checkpoint."""
    if kept is not None and kept.size:
        return Finding(
            kind=FindingKind.TREE_REWRITTEN,
            message=f"there is no tree any more; the checkpoint that was kept is of {kept.size} entries",
        )
    if is_later:
        return Finding(
            kind=FindingKind.TREE_DAMAGED,
            message="the tree's checkpoint is missing, and plans tell that there was one: it was removed",
        )
    if log is not None:
        return Finding(
            kind=FindingKind.TREE_MISSING,
            message=f"there is no checkpoint of the log {log.origin}, whose key was named: the tree was "
            "removed, or nothing was ever sequenced. If this log is new, sequence it first (strongroom audit "
            "sequence), and until then verify it without the log's key",
        )
    if store.list_names(PREFIX):
        return Finding(
            kind=FindingKind.NO_TREE,
            message="the tree's checkpoint is missing, and parts of a tree are there: the very first "
            "sequencing is under way or was cut short, or the checkpoint was removed; sequence again",
        )
    return Finding(kind=FindingKind.NO_TREE, message="nothing was sequenced: there is no tree")


def _hold(reader: TreeReader, findings: list[Finding], kept: Checkpoint | None) -> Holding:
    try:
        reader.edge()
    except IntegrityError as error:
        findings.append(Finding(kind=FindingKind.TREE_ROOT, message=str(error)))
        return Holding(segments={}, problems=())
    if kept is not None:
        _check_grown(reader, kept, findings)
    walked = _Walk(reader)
    holding = hold(walked.entries(), reader.size)
    if walked.error is not None:
        findings.append(
            Finding(kind=FindingKind.TREE_DAMAGED, message=str(walked.error), leaf=walked.entries_read)
        )
    findings.extend(
        Finding(kind=FindingKind.TREE_CONTENT, message=why, leaf=leaf) for leaf, why in holding.problems
    )
    return holding


def _check_grown(reader: TreeReader, kept: Checkpoint, findings: list[Finding]) -> None:
    head = reader.head
    if head.origin != kept.origin:
        wrong = (
            f"the tree is of the log {head.origin!r:.100}, and the one that was kept of {kept.origin!r:.100}"
        )
    elif head.size < kept.size:
        wrong = f"the tree has {head.size} entries, and had {kept.size} when its checkpoint was kept"
    else:
        try:
            root = reader.root_at(kept.size)
        except IntegrityError as error:
            findings.append(Finding(kind=FindingKind.TREE_DAMAGED, message=str(error)))
            return
        if root == kept.root:
            return
        wrong = (
            f"the first {kept.size} entries have the root {root.hex()[:16]}..., and had "
            f"{kept.root.hex()[:16]}... when its checkpoint was kept: the tree was made anew, of other "
            "entries or in another order"
        )
    findings.append(Finding(kind=FindingKind.TREE_REWRITTEN, message=wrong))


class _Walk:
    """The entries of a tree up to where it is damaged.

    Attributes:
        error: why it ended early; None: it did not.
        entries_read: how many there were.
    """

    def __init__(self, reader: TreeReader) -> None:
        self._reader = reader
        self.error: IntegrityError | None = None
        self.entries_read = 0

    def entries(self) -> Iterator[bytes]:
        try:
            for _, entry in self._reader.walk():
                self.entries_read += 1
                yield entry
        except IntegrityError as error:
            self.error = error


def _of_run(held: dict[str, HeldSegment], run: str | None) -> dict[str, HeldSegment]:
    return held if run is None else {key: each for key, each in held.items() if each.run == run}
