"""Which segments of a sink go into the tree next: read, held against what is in it, and refused or planned.

It reads and decides, and changes nothing in the sink. `ordering` knows the rules between segments, `segments`
those within one.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

from strongroom.errors import FormatError, IntegrityError
from strongroom.stores.base import ObjectInfo, Store
from strongroom_security.auditlog.format.lines import MAX_LINE_BYTES, Open
from strongroom_security.auditlog.format.segments import SegmentReading, read_segment
from strongroom_security.auditlog.listing import read_segments
from strongroom_security.auditlog.sequencing.ordering import Candidate, Sequence, candidates, place_of
from strongroom_security.auditlog.sequencing.plans import Facts, Plan, Planned
from strongroom_security.auditlog.verifying.trusting import Voucher, Vouchers

__all__ = ["Chooser", "Chosen", "Limits", "Refused", "Waiting"]

_NS: Final = 1_000_000_000

_WAY_OUT: Final = (
    "put it back as it was (an older version of the object where the bucket keeps versions, or a backup); if "
    "it is lost for good, or the plan is none of the sequencer's, this log cannot grow any more: move tlog/ "
    "out of the sink, keep its last head, and begin another log with a key, an origin and a state of its own"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much goes in by one plan; what is more goes in by the next, in the same run.

    Attributes:
        segments, lines, length_bytes: of one plan; one segment goes in whatever it has.
    """

    segments: int = 2_000
    lines: int = 200_000
    length_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A segment that does not go into the tree, since it is not as its writer wrote it.

    Attributes:
        line: from 1; 0: it is about the segment as a whole.
        message: what is wrong.
    """

    key: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.key}{f', line {self.line}' if self.line else ''}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A segment that waits for one before it.

    Attributes:
        missing: the number of the segment that it waits for.
        age_s: how long it has been in the sink.
    """

    key: str
    missing: int
    age_s: int

    def __str__(self) -> str:
        return f"{self.key}: waits for the writer's segment {self.missing}, for {self.age_s} s by now"


@dataclass(slots=True)
class Chosen:
    """What goes in by one plan.

    Attributes:
        segments: as the plan lists them.
        facts: of the same segments.
        lines: all of theirs: the entries.
        refused: what does not go in, and why.
        waiting: what does not go in yet.
    """

    segments: list[Planned] = field(default_factory=list)
    facts: list[Facts] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)
    length_bytes: int = 0

    def add(self, reading: SegmentReading, data: bytes, facts: Facts, *, follows_gap: bool) -> None:
        self.segments.append(Planned.of(reading, data, follows_gap=follows_gap))
        self.facts.append(facts)
        self.lines += reading.lines
        self.length_bytes += len(data)

    def is_full(self, limits: Limits) -> bool:
        return (
            len(self.segments) >= limits.segments
            or len(self.lines) >= limits.lines
            or self.length_bytes >= limits.length_bytes
        )


class Chooser:
    """Chooses from one sink, again and again; what it once refused it does not read again.

    Args:
        wait_s: how long a segment waits for the ones before it.
        vouchers: whose certificates count where two claim one writer's id; none: whoever comes first has it.
    """

    def __init__(
        self,
        sink: Store,
        *,
        wait_s: float,
        limits: Limits,
        vouchers: Vouchers | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._sink = sink
        self._wait_s = wait_s
        self._limits = limits
        self._vouchers = vouchers or Vouchers()
        self._clock_ns = clock_ns
        self._refused: dict[str, tuple[str, Refused]] = {}

    def choose(self, listed: Mapping[str, ObjectInfo], sequence: Sequence) -> Chosen:
        """What goes in next; ``sequence`` holds it then.

        Raises:
            StoreError: a segment could not be read.
        """
        chosen = Chosen()
        wanted: dict[str, Candidate] = {}
        coming: set[tuple[str, int]] = set()
        for each in candidates(listed, sequence):
            version, refused = self._refused.get(each.key, ("", None))
            if refused is not None and version == listed[each.key].version:
                chosen.refused.append(refused)
            elif (
                sequence.is_next(each)
                or (each.writer, each.number - 1) in coming
                or self._has_waited(listed[each.key])
            ):
                wanted[each.key] = each
                coming.add((each.writer, each.number))
            else:
                chosen.waiting.append(self._waiting(each, listed[each.key]))
        certified = self._certified(listed, wanted, sequence)
        for key, data in read_segments(self._sink, list(wanted), listed):
            self._judge(wanted[key], listed[key], data, sequence, chosen, certified)
            if chosen.is_full(self._limits):
                break
        return chosen

    def _certified(
        self, listed: Mapping[str, ObjectInfo], wanted: Mapping[str, Candidate], sequence: Sequence
    ) -> dict[str, set[bytes]]:
        """Of each writer's id that two claim, the keys that somebody trusted has certified for it."""
        if not self._vouchers.keys:
            return {}
        of_writer: dict[str, list[Candidate]] = defaultdict(list)
        for each in candidates(listed, sequence):
            of_writer[each.writer].append(each)
        found: dict[str, set[bytes]] = {}
        for writer in {each.writer for each in wanted.values()}:
            several = of_writer[writer]
            if len({each.number for each in several}) == len(several):
                continue
            keys = found.setdefault(writer, set())
            for key, data in read_segments(self._sink, [each.key for each in several], listed):
                opened = None if isinstance(data, str) else _opened(key, data)
                if opened is not None and opened.writer == writer:
                    voucher = self._vouchers.of(opened.certificate, opened.certified())
                    if voucher is Voucher.TRUSTED:
                        keys.add(opened.key)
        return found

    def follow(self, plan: Plan, sequence: Sequence, infos: Mapping[str, ObjectInfo] | None = None) -> Chosen:
        """What goes in by a plan that stands; ``sequence`` holds it then.

        Args:
            infos: what is known of segments' sizes.

        Raises:
            IntegrityError: a segment of it was changed or removed since, or never could go in.
            StoreError: a segment could not be read.
        """
        chosen = Chosen()
        planned = {each.key: each for each in plan.segments}
        for key, data in read_segments(self._sink, list(planned), infos):
            where = f"{self._sink.uri}/{key}, which the plan for size {plan.size} lists,"
            if isinstance(data, str):
                raise IntegrityError(f"{where} cannot be put into the tree: {data}; {_WAY_OUT}")
            found = sha256(data).hexdigest()
            if found != planned[key].digest:
                raise IntegrityError(
                    f"{where} has the SHA-256 {found}, and had {planned[key].digest} when it was planned; "
                    f"{_WAY_OUT}"
                )
            reading = read_segment(key, data)
            wrong = _wrong(reading)
            facts = Facts.read(reading)
            conflict = "it is in the tree already" if key in sequence else None
            if wrong is None and facts is not None:
                conflict = conflict or sequence.conflict(facts)
            if wrong is not None or facts is None or conflict is not None:
                raise IntegrityError(f"{where} cannot go into the tree: {wrong or conflict}; {_WAY_OUT}")
            chosen.add(reading, data, facts, follows_gap=planned[key].follows_gap)
            sequence.accept(facts)
        if tuple(chosen.segments) != plan.segments:
            raise IntegrityError(
                f"the plan for size {plan.size} says other lengths than its segments have; {_WAY_OUT}"
            )
        return chosen

    def _judge(
        self,
        each: Candidate,
        info: ObjectInfo,
        data: bytes | str,
        sequence: Sequence,
        chosen: Chosen,
        certified: Mapping[str, set[bytes]],
    ) -> None:
        follows_gap = not sequence.is_next(each)
        if follows_gap and not self._has_waited(info):
            chosen.waiting.append(self._waiting(each, info))
            return
        if isinstance(data, str):
            chosen.refused.append(Refused(key=each.key, line=0, message=data))
            return
        try:
            reading = read_segment(each.key, data)
        except FormatError as error:
            refused = Refused(key=each.key, line=0, message=str(error))
            self._refused[each.key] = (info.version, refused)
            chosen.refused.append(refused)
            return
        wrong, facts = _wrong(reading), Facts.read(reading)
        keys = certified.get(each.writer)
        if keys and reading.opened is not None and reading.opened.key not in keys:
            wrong = Refused(
                key=each.key,
                line=1,
                message=f"two claim the id of writer {each.writer}: somebody trusted has certified the "
                "other's key, and not this one's, which took an id that is not its own",
            )
        if wrong is None and facts is not None:
            conflict = (
                "the writer's segment of this number is in the tree, from another place"
                if sequence.is_duplicate(each)
                else sequence.conflict(facts)
            )
            wrong = None if conflict is None else Refused(key=each.key, line=1, message=conflict)
        if wrong is not None or facts is None:
            refused = wrong or Refused(key=each.key, line=0, message="it is not whole")
            self._refused[each.key] = (info.version, refused)
            chosen.refused.append(refused)
            return
        chosen.add(reading, data, facts, follows_gap=follows_gap)
        sequence.accept(facts)

    def _has_waited(self, info: ObjectInfo) -> bool:
        return self._clock_ns() - info.modified_ns >= self._wait_s * _NS

    def _waiting(self, each: Candidate, info: ObjectInfo) -> Waiting:
        age_s = max(0, self._clock_ns() - info.modified_ns) // _NS
        return Waiting(key=each.key, missing=each.number - 1, age_s=age_s)


def _opened(key: str, data: bytes) -> Open | None:
    first, is_whole, _ = data[:MAX_LINE_BYTES].partition(b"\n")
    return read_segment(key, first + is_whole).opened


def _wrong(reading: SegmentReading) -> Refused | None:
    """What is wrong with a segment in itself; None: nothing."""
    for problem in reading.problems:
        return Refused(key=problem.key, line=problem.line, message=problem.message)
    opened = reading.opened
    if opened is not None and place_of(opened) != reading.key:
        return Refused(
            key=reading.key,
            line=1,
            message=f"by its opening line it stands at {place_of(opened)}; it was copied or moved here",
        )
    return None
