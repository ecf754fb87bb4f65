"""Whether a log is as it was written: what is wrong, how bad that is, and where. Pure.

`Verifier` takes the readings of segments one by one, holds each against what the log's tree holds of it, and
at the end each writer's segments against each other. What it finds are values; it reads nothing. Which
signatures vouch for a writer is `trusting`'s, what the tree holds `holding`'s, the order of things
`checking`'s.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from strongroom_security.auditlog.format.events import event_id
from strongroom_security.auditlog.format.lines import FIRST_PREV, Close, Open, Salvage, parse_segment_key
from strongroom_security.auditlog.format.segments import Problem, SegmentReading, hour_of
from strongroom_security.auditlog.verifying.findings import Finding, FindingKind, Gravity, Totals
from strongroom_security.auditlog.verifying.holding import HeldSegment
from strongroom_security.auditlog.verifying.trusting import Voucher, Vouchers

__all__ = ["Summary", "Verifier", "difference", "summary_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What of a segment it is judged by: all but its lines.

    Attributes:
        digest: SHA-256 of it as it stands.
        lines, events: how many it has.
        problems: in itself.
    """

    key: str
    writer: str
    number: int
    digest: bytes
    lines: int
    events: int
    first_seq: int
    first_prev: str
    next_seq: int
    last_hash: str
    opened: Open | None
    close: Close | None
    problems: tuple[Problem, ...]

    @property
    def is_whole(self) -> bool:
        return not self.problems

    @property
    def is_last(self) -> bool:
        return self.close is not None and self.close.is_last

    def event_at(self, line: int) -> str | None:
        """The id of a line, from 1; None: it is about no line, or its place is not known."""
        if self.opened is None or not line:
            return None
        return event_id(self.writer, self.opened.seq + line - 1)


def summary_of(reading: SegmentReading, digest: bytes) -> Summary:
    """What of a reading it is judged by."""
    return Summary(
        key=reading.key,
        writer=reading.writer,
        number=reading.number,
        digest=digest,
        lines=len(reading.lines),
        events=len(reading.events()),
        first_seq=reading.first_seq,
        first_prev=reading.first_prev,
        next_seq=reading.next_seq,
        last_hash=reading.last_hash,
        opened=reading.opened,
        close=reading.close,
        problems=reading.problems,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """That somebody vouches for a writer's key, or nobody."""

    segment: str
    line: int
    event: str | None
    voucher: Voucher
    key_id: str
    is_salvager: bool


_LOOKED_BACK = 1_000
"""Missing segments that are told apart by whether the tree holds them, before one that is there."""


class Verifier:
    """Holds a log's segments against themselves, the tree, and each other.

    Args:
        vouchers: whose certificates count.
        allow_uncertified: let writers pass for which nobody vouches.
        held: what the tree holds, by key; None: there is no tree.
    """

    def __init__(
        self,
        vouchers: Vouchers,
        *,
        allow_uncertified: bool = False,
        held: Mapping[str, HeldSegment] | None = None,
    ) -> None:
        self._vouchers = vouchers
        self._allow_uncertified = allow_uncertified
        self._held = held
        self._findings: list[Finding] = []
        self._segments: dict[str, list[Summary]] = defaultdict(list)
        self._claims: dict[tuple[str, bytes], list[_Claim]] = defaultdict(list)
        self._seen: set[str] = set()
        self._removed: dict[str, set[int]] = defaultdict(set)
        self._events = 0
        self._sequenced_segments = 0
        self._sequenced_events = 0
        self._salvaged_segments = 0
        self._salvaged_events = 0

    def tell(self, findings: Iterable[Finding]) -> None:
        """Take in what was found elsewhere."""
        self._findings.extend(findings)

    def is_altered(self, key: str, digest: bytes) -> bool:
        """Whether the tree holds another segment of that name; `add` then wants what it holds.

        Args:
            digest: SHA-256 of the segment as it stands.
        """
        held = None if self._held is None else self._held.get(key)
        return held is not None and held.digest != digest

    def add(self, segment: Summary, *, differs_at: int = 0) -> None:
        """Take in a segment.

        Args:
            differs_at: the first line in which it is not what the tree holds, where it `is_altered`.
        """
        self._seen.add(segment.key)
        held = None if self._held is None else self._held.get(segment.key)
        self._events += segment.events
        for problem in segment.problems:
            self._find(FindingKind(problem.kind.value), problem.message, segment, problem.line)
        self._check_hour(segment)
        self._check_opening(segment)
        if held is not None and held.digest == segment.digest:
            self._sequenced_segments += 1
            self._sequenced_events += segment.events
        elif held is not None:
            what = (
                f"line {differs_at} is not the one that the tree holds"
                if segment.lines == held.lines
                else f"{segment.lines} lines stand here, and the tree holds {held.lines}; the first that "
                f"differs is line {differs_at}"
            )
            self._find(FindingKind.ALTERED, what, segment, differs_at)
        elif self._held is not None:
            self._find(
                FindingKind.UNSEQUENCED,
                f"it is not in the tree yet, with {segment.events} events: whoever may write to the sink "
                "could take it away unseen",
                segment,
            )
        self._note_certificates(segment)
        self._segments[segment.writer].append(segment)

    def add_unreadable(self, key: str, why: str) -> None:
        """Take in that a segment was listed and cannot be read."""
        self._seen.add(key)
        self._findings.append(Finding(kind=FindingKind.UNREADABLE, message=why, segment=key))

    def finish(self) -> tuple[list[Finding], Totals]:
        """All that was found, in the order of places; and how much was looked at."""
        self._tell_removed()
        for writer in sorted(self._segments):
            self._check_writer(
                writer, sorted(self._segments[writer], key=lambda each: (each.number, each.key))
            )
        vouched = self._check_certificates()
        if self._held is None and self._seen:
            self._findings.append(
                Finding(
                    kind=FindingKind.UNSEQUENCED,
                    message=f"{self._events} events in {len(self._seen)} segments are in no tree: whoever "
                    "may write to the sink could take segments away unseen",
                )
            )
        totals = Totals(
            segments=len(self._seen),
            events=self._events,
            sequenced_segments=self._sequenced_segments,
            sequenced_events=self._sequenced_events,
            writers=len(self._segments),
            vouched_writers=len(vouched & set(self._segments)),
            salvaged_segments=self._salvaged_segments,
            salvaged_events=self._salvaged_events,
        )
        order = {gravity: place for place, gravity in enumerate(Gravity)}
        found = sorted(
            dict.fromkeys(self._findings),
            key=lambda each: (order[each.gravity], each.segment or "", each.line, each.leaf or 0),
        )
        return found, totals

    # ------------------------------------------------------------------------------------------- one segment

    def _find(self, kind: FindingKind, message: str, segment: Summary, line: int = 0) -> None:
        held = None if self._held is None else self._held.get(segment.key)
        self._findings.append(
            Finding(
                kind=kind,
                message=message,
                segment=segment.key,
                line=line,
                event=segment.event_at(line),
                leaf=held.first_leaf + line - 1 if held is not None and line else None,
            )
        )

    def _check_hour(self, segment: Summary) -> None:
        parts = parse_segment_key(segment.key)
        if parts is None or segment.opened is None:
            return
        hour = hour_of(segment.opened.time)
        if hour != parts[1]:
            self._find(
                FindingKind.ELSEWHERE,
                f"it says that it was opened in the hour {hour}; it was put in another's place",
                segment,
                1,
            )

    def _check_opening(self, segment: Summary) -> None:
        """No line comes before the first one to say what its seq must be; but the signed last one does."""
        opened, close = segment.opened, segment.close
        if opened is None or close is None or close.salvaged is not None:
            return
        expected = close.seq - close.events - 1
        if opened.seq != expected and segment.lines == close.events + 2 and close.is_signed_by(opened.key):
            self._find(
                FindingKind.CHANGED,
                f"the line says seq {opened.seq}; by the signed closing line it was seq {expected}",
                segment,
                1,
            )

    def _note_certificates(self, segment: Summary) -> None:
        if segment.opened is not None:
            opened = segment.opened
            self._claims[opened.writer, opened.key].append(
                _Claim(
                    segment=segment.key,
                    line=1,
                    event=segment.event_at(1),
                    voucher=self._vouchers.of(opened.certificate, opened.certified()),
                    key_id="" if opened.certificate is None else opened.certificate.key_id,
                    is_salvager=False,
                )
            )
        salvage: Salvage | None = None if segment.close is None else segment.close.salvaged
        if salvage is not None:
            place = segment.lines
            self._salvaged_segments += 1
            self._salvaged_events += segment.events
            self._find(
                FindingKind.SALVAGED,
                f"vouched for by its salvager alone (writer {salvage.writer}, host {salvage.host!r:.80}, key "
                f"{hashlib.sha256(salvage.key).hexdigest()[:16]}), which closed it for a dead writer, and "
                f"could have written its {segment.events} events anew"
                + (f"; {len(salvage.torn)} bytes of a torn line were left out" if salvage.torn else ""),
                segment,
                place,
            )
            self._claims[salvage.writer, salvage.key].append(
                _Claim(
                    segment=segment.key,
                    line=place,
                    event=segment.event_at(place),
                    voucher=self._vouchers.of(salvage.certificate, salvage.certified()),
                    key_id="" if salvage.certificate is None else salvage.certificate.key_id,
                    is_salvager=True,
                )
            )

    # ------------------------------------------------------------------------------------------- all of them

    def _tell_removed(self) -> None:
        for key, held in (self._held or {}).items():
            if key not in self._seen:
                self._removed[held.writer].add(held.number)
                self._findings.append(
                    Finding(
                        kind=FindingKind.REMOVED,
                        message=f"the tree holds this segment, with {held.lines} lines "
                        f"(seq {held.first_seq} to {held.first_seq + held.lines - 1}); it was removed",
                        segment=key,
                        line=1,
                        event=event_id(held.writer, held.first_seq),
                        leaf=held.first_leaf,
                    )
                )

    def _check_writer(self, writer: str, segments: Sequence[Summary]) -> None:
        removed = self._removed.get(writer, set())
        before: Summary | None = None
        for segment in segments:
            if before is not None and segment.number == before.number:
                other, this = (segment, before) if self._is_rather(segment, before) else (before, segment)
                self._at(
                    this,
                    FindingKind.DUPLICATE,
                    f"segment {segment.number} of this writer is {other.key} already",
                )
                before = other
                continue
            expected = 1 if before is None else before.number + 1
            missing = set(range(expected, min(segment.number, expected + _LOOKED_BACK)))
            if missing - removed:
                self._tell_gap(writer, segment, before, expected)
            elif not missing:
                self._check_continues(segment, before)
            if before is not None and before.is_last:
                self._at(segment, FindingKind.AFTER_LAST, f"{before.key} says that it was the writer's last")
            before = segment
        if before is not None and not before.is_last and max(removed, default=0) < before.number:
            self._findings.append(
                Finding(
                    kind=FindingKind.OPEN,
                    message=f"writer {writer} has not ended: it lives, was killed, or what followed was cut "
                    "off before it was sequenced",
                    segment=before.key,
                    line=before.lines,
                )
            )

    def _is_rather(self, segment: Summary, before: Summary) -> bool:
        """Whether of two segments of one number the second is the writer's: the tree has it, or a signer."""
        held = (self._is_held(segment), self._is_held(before))
        return held[0] if held[0] != held[1] else self._is_certified(segment) > self._is_certified(before)

    def _is_certified(self, segment: Summary) -> bool:
        opened = segment.opened
        if opened is None:
            return False
        return self._vouchers.of(opened.certificate, opened.certified()) is Voucher.TRUSTED

    def _is_held(self, segment: Summary) -> bool:
        """Whether the tree holds it, just as it stands."""
        held = None if self._held is None else self._held.get(segment.key)
        return held is not None and held.digest == segment.digest

    def _tell_gap(self, writer: str, segment: Summary, before: Summary | None, expected: int) -> None:
        last = segment.number - 1
        what = f"segment {last} is" if expected == last else f"segments {expected} to {last} are"
        first = 0 if before is None else before.next_seq
        self._at(
            segment,
            FindingKind.GAP,
            f"{what} missing, of this writer and before this one: seq {first} to {segment.first_seq - 1}",
            event=event_id(writer, first),
        )

    def _check_continues(self, segment: Summary, before: Summary | None) -> None:
        if not segment.is_whole or (before is not None and not before.is_whole):
            return  # what is wrong inside was told, and what follows from it is not told again
        if before is None:
            if segment.first_seq != 0 or segment.first_prev != FIRST_PREV:
                self._at(
                    segment, FindingKind.BROKEN, "it is a writer's first, and says that some came before"
                )
            return
        if segment.opened is None or before.opened is None:
            return
        if segment.opened.key != before.opened.key:
            self._at(segment, FindingKind.BROKEN, f"it has another key than {before.key}, of the same writer")
        elif segment.first_seq != before.next_seq:
            self._at(
                segment,
                FindingKind.BROKEN,
                f"it begins with seq {segment.first_seq}; {before.key} ends before seq {before.next_seq}",
            )
        elif segment.first_prev != before.last_hash:
            self._at(
                segment,
                FindingKind.BROKEN,
                f"it goes on from a line with the hash {segment.first_prev[:16]}...; the last of "
                f"{before.key} has {before.last_hash[:16]}...: one of the two was written anew",
            )

    def _at(self, segment: Summary, kind: FindingKind, message: str, *, event: str | None = None) -> None:
        self._findings.append(
            Finding(
                kind=kind,
                message=message,
                segment=segment.key,
                line=1,
                event=segment.event_at(1) if event is None else event,
            )
        )

    def _check_certificates(self) -> set[str]:
        """Tell of writers that nobody vouches for; those that somebody does."""
        vouched: set[str] = set()
        if not self._vouchers.keys:
            if self._claims:
                self._findings.append(
                    Finding(
                        kind=FindingKind.UNVOUCHED,
                        message=f"{len(self._claims)} writers are vouched for by nobody: no key was named "
                        "that must have certified them, and all lines of one could have been written anew",
                    )
                )
            return vouched
        for (writer, _), claims in sorted(self._claims.items()):
            is_vouched = any(claim.voucher is Voucher.TRUSTED for claim in claims)
            if is_vouched:
                vouched.add(writer)
            for claim in claims:
                if claim.voucher is Voucher.FORGED:
                    self._claim(claim, FindingKind.FORGED_CERTIFICATE, "its certificate is not over this key")
            if is_vouched:
                continue
            for claim in claims:
                if claim.voucher is Voucher.UNKNOWN:
                    self._claim(
                        claim,
                        FindingKind.UNKNOWN_SIGNER,
                        f"its certificate is by a key that is not trusted, {claim.key_id[:16]!r}: another's, "
                        "or one that vouched before; if so, name it by --signer or former_keys in [audit]",
                    )
                elif claim.voucher is Voucher.NOBODY:
                    self._claim(claim, FindingKind.UNCERTIFIED, "nobody vouches for the key that signs it")
        return vouched

    def _claim(self, claim: _Claim, kind: FindingKind, message: str) -> None:
        self._findings.append(
            Finding(
                kind=kind,
                message=f"{message}{' (that of the process that closed it)' if claim.is_salvager else ''}",
                segment=claim.segment,
                line=claim.line,
                event=claim.event,
                is_excused=kind is FindingKind.UNCERTIFIED and self._allow_uncertified,
            )
        )


def difference(was: Sequence[bytes], now: Sequence[bytes]) -> int:
    """The first line, from 1, in which two segments differ."""
    for place, (before, after) in enumerate(zip_longest(was, now), 1):
        if before != after:
            return place
    return len(now) + 1  # only what follows the last line feed
