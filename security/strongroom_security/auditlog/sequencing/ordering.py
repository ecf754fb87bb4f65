"""In which order segments go into the tree, and which of them may: decided from what is in it already. Pure.

A writer's segments go in one after the other, each going on where the one before has ended. What a segment's
lines say of one another is `segments`'; here it is segment against segment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from strongroom.errors import IntegrityError
from strongroom_security.auditlog.format.lines import (
    FIRST_PREV,
    Open,
    parse_segment_key,
    segment_key,
)
from strongroom_security.auditlog.format.segments import hour_of
from strongroom_security.auditlog.format.splitting import Stray, split
from strongroom_security.auditlog.sequencing.plans import Facts

__all__ = ["Candidate", "Sequence", "candidates", "place_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A segment that is not in the tree."""

    key: str
    writer: str
    number: int


class Sequence:
    """What is in a tree, as far as the next segments have to know; about 300 bytes a segment."""

    def __init__(self) -> None:
        self.size = 0
        self._keys: dict[str, None] = {}
        self._names: dict[str, None] = {}
        self._tips: dict[str, Facts] = {}
        # At the rims of gaps: what begins after one, and what ends before one.
        self._begins: dict[tuple[str, int], Facts] = {}
        self._ends: dict[tuple[str, int], Facts] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def is_duplicate(self, candidate: Candidate) -> bool:
        """Whether the writer's segment of that number is in the tree, from another place."""
        return f"{candidate.writer}-{candidate.number}" in self._names

    def is_next(self, candidate: Candidate) -> bool:
        """Whether the segment before it is in the tree, or there is none before it."""
        tip = self._tips.get(candidate.writer)
        if tip is None or candidate.number > tip.number:
            return candidate.number == (1 if tip is None else tip.number + 1)
        return candidate.number == 1 or (candidate.writer, candidate.number - 1) in self._ends

    def conflict(self, facts: Facts) -> str | None:
        """Why a segment cannot be one of this writer's, by what is in the tree of it; None: it can."""
        if facts.number == 1 and (facts.first_seq != 0 or facts.first_prev != FIRST_PREV):
            return f"it is the writer's first, and begins with seq {facts.first_seq} after another line"
        tip = self._tips.get(facts.writer)
        if tip is None:
            return None
        if facts.public != tip.public:
            return f"it has another key than {tip.key}, of the same writer"
        before = tip if facts.number == tip.number + 1 else self._ends.get((facts.writer, facts.number - 1))
        if before is not None and (facts.first_seq, facts.first_prev) != (before.next_seq, before.last_hash):
            return (
                f"it does not go on where {before.key} ended: it opens with seq {facts.first_seq} after "
                f"{facts.first_prev[:16]}..., expected seq {before.next_seq} after {before.last_hash[:16]}..."
            )
        after = self._begins.get((facts.writer, facts.number + 1))
        if after is not None and (facts.next_seq, facts.last_hash) != (after.first_seq, after.first_prev):
            return f"{after.key}, which comes after it, does not go on where it ends"
        if facts.number > tip.number:
            if tip.is_last:
                return f"its writer has ended with {tip.key}"
            if facts.first_seq < tip.next_seq:
                return f"it opens with seq {facts.first_seq}, and {tip.key} ends with seq {tip.next_seq - 1}"
        return None

    def accept(self, facts: Facts) -> None:
        """A segment went into the tree."""
        self.size += facts.lines
        self._keys[facts.key] = None
        self._names[f"{facts.writer}-{facts.number}"] = None
        writer, number = facts.writer, facts.number
        tip = self._tips.get(writer)
        if tip is None or number > tip.number:
            if number != (1 if tip is None else tip.number + 1):
                self._begins[writer, number] = facts
                if tip is not None:
                    self._ends[writer, tip.number] = tip
            self._tips[writer] = facts
            return
        if self._ends.pop((writer, number - 1), None) is None and number > 1:
            self._begins[writer, number] = facts
        if self._begins.pop((writer, number + 1), None) is None:
            self._ends[writer, number] = facts

    def follow(self, entries: Iterable[tuple[int, bytes]]) -> list[Facts]:
        """Learn from the tree itself what it holds from `size` on.

        Args:
            entries: with their indices, verified.

        Returns:
            What was learned.

        Raises:
            IntegrityError: the entries are not segments that were put in whole.
        """
        found: list[Facts] = []
        for each in split(entries):
            if isinstance(each, Stray):
                raise IntegrityError(f"entry {each.first} of the log's tree: {each.message}")
            facts = Facts.of(place_of(each.opened), each.opened, each.close, each.lines, each.last_line)
            found.append(facts)
            self.accept(facts)
        return found


def candidates(keys: Iterable[str], sequence: Sequence) -> list[Candidate]:
    """The segments that are not in the tree, in the order in which they go in: by hour, writer and number.

    Of one writer none comes before one with a lower number, also where its clock went back.
    """
    of_writer: dict[str, list[tuple[int, str, str]]] = defaultdict(list)
    for key in keys:
        parts = parse_segment_key(key)
        if parts is not None and key not in sequence:
            of_writer[parts[2]].append((parts[3], parts[1], key))
    found: list[tuple[str, str, int, str]] = []
    for writer, several in of_writer.items():
        latest = ""
        for number, hour, key in sorted(several):
            latest = max(latest, hour)
            found.append((latest, writer, number, key))
    return [Candidate(key=key, writer=writer, number=number) for _, writer, number, key in sorted(found)]


def place_of(opened: Open) -> str:
    """Where a segment stands that opens like this."""
    return segment_key(opened.run, hour_of(opened.time), opened.writer, opened.segment)
