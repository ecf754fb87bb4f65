"""Which segments are doubtful because they do not go on from their writer's others. Pure.

Whoever may create in a sink may put a segment there under another's name. It cannot sign it by that writer's
key, nor be the line that the next one follows. What the log's tree holds is believed before what it does not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from strongroom_security.auditlog.format.lines import FIRST_PREV

__all__ = ["Link", "doubts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A segment, as far as it hangs together with others of its writer.

    Attributes:
        id: its number in the index: what was taken in earlier has a lower one.
        opened: whose it says it is: writer, key, run, host and process, as a number; None: that is not known.
        leaf: of its opening line in the tree; None: it is not known to be there.
        is_whole: nothing is wrong with it in itself.
    """

    id: int
    number: int
    opened: int | None
    first_seq: int
    first_prev: str
    next_seq: int
    last_hash: str
    leaf: int | None
    is_whole: bool


def doubts(links: Iterable[Link]) -> dict[int, str]:
    """Why some segments of one writer are doubtful, by their numbers in the index.

    Those with a flaw of their own are passed over: they are doubtful already, and no others for their sake.
    """
    whole = sorted(
        (each for each in links if each.is_whole and each.opened is not None),
        key=lambda each: (each.leaf is None, each.leaf or 0, each.number, each.id),
    )
    found: dict[int, str] = {}
    numbers: list[int] = []
    accepted: dict[int, Link] = {}
    for each in whole:
        why = _conflict(each, whole[0], numbers, accepted)
        if why is not None:
            found[each.id] = why
            continue
        numbers.insert(bisect_left(numbers, each.number), each.number)
        accepted[each.number] = each
    return found


def _conflict(link: Link, first: Link, numbers: list[int], accepted: dict[int, Link]) -> str | None:
    if link.opened != first.opened:
        return "it is by another key, run or process than the writer's other segments"
    if link.number in accepted:
        return "the writer has another segment of that number"
    if link.number == 1 and (link.first_seq, link.first_prev) != (0, FIRST_PREV):
        return "it is the writer's first, and goes on from another line"
    place = bisect_left(numbers, link.number)
    before = accepted[numbers[place - 1]] if place else None
    after = accepted[numbers[place]] if place < len(numbers) else None
    if before is not None and not _follows(before, link):
        return "it does not go on where the segment before it ends"
    if after is not None and not _follows(link, after):
        return "the segment behind it does not go on where it ends"
    return None


def _follows(before: Link, after: Link) -> bool:
    if after.number == before.number + 1:
        return (after.first_seq, after.first_prev) == (before.next_seq, before.last_hash)
    return after.first_seq > before.next_seq
