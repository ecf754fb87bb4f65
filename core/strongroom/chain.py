"""The chain of a run's checkpoints: from the newest down, each pinned by the one that went on from it.

It owns the walk, and what a link that does not hold is called: a parent that is absent, as retention
leaves it, is another thing than one that differs. Each manifest is opened as for a restore, signatures
first; no other file is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strongroom.catalog import History
from strongroom.errors import IntegrityError, StrongroomError
from strongroom.layout import CheckpointName
from strongroom.manifest import CheckpointRef
from strongroom.opened import open_checkpoint
from strongroom.signing import Guard
from strongroom.stores.base import Store

__all__ = ["Link", "walk"]

LinkState = Literal["linked", "absent", "gap", "differs", "damaged", "unreadable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One checkpoint of the chain, and how it hangs on the one above it.

    Attributes:
        name: which one.
        state: ``"linked"``: it is the one that was pinned above, or the newest. ``"absent"``: it was
            pinned and is not there. ``"gap"``: it stands below an absent one, and nothing here says
            that it was that one's parent. ``"differs"``: another stands in its place. ``"damaged"``:
            its manifest is wrong, or its signatures do not satisfy the policy. ``"unreadable"``: it could
            not be found out.
        message: in words; empty where it is linked.
        signers: ids of the keys whose signatures were verified.
    """

    name: CheckpointName
    state: LinkState
    message: str = ""
    signers: tuple[str, ...] = ()

    @property
    def is_break(self) -> bool:
        """Whether the chain is broken here: bytes are there, and are not what was pinned."""
        return self.state in ("differs", "damaged")


def walk(store: Store, history: History, guard: Guard) -> tuple[Link, ...]:
    """Walk the current line from its newest checkpoint down.

    Returns:
        the links, newest first; empty where nothing was committed.
    """
    links: list[Link] = []
    waiting = list(history.line.newest_first)
    expected: CheckpointRef | None = None
    is_new = True
    while waiting or expected is not None:
        if expected is None:
            name = waiting.pop(0)
            is_linked = is_new
        else:
            name = expected.name
            is_linked = True
            # Whatever is newer than the parent and on the line was saved by nobody who went on from it.
            while (
                waiting
                and waiting[0] != name
                and (waiting[0].launch, waiting[0].step)
                > (
                    name.launch,
                    name.step,
                )
            ):
                waiting.pop(0)
            if waiting and waiting[0] == name:
                waiting.pop(0)
        is_new = False
        link, expected = _link(store, history, guard, name, expected, is_linked=is_linked)
        links.append(link)
    if history.line.broken is not None and links:
        lowest = links[-1]
        links.append(Link(name=lowest.name, state="damaged", message=f"below it: {history.line.broken}"))
    return tuple(links)


def _link(
    store: Store,
    history: History,
    guard: Guard,
    name: CheckpointName,
    expected: CheckpointRef | None,
    *,
    is_linked: bool,
) -> tuple[Link, CheckpointRef | None]:
    """One link, and what its manifest pins below it."""
    if name in history.damaged:
        return Link(name=name, state="damaged", message=history.damaged[name]), None
    commit = history.commits.get(name)
    if commit is None:
        message = "it was pinned by the one above, and is not there: retention removes older ones"
        return Link(name=name, state="absent", message=message), None
    if expected is not None and not commit.manifest.matches(expected.manifest):
        message = (
            f"the one above went on from a manifest {expected.manifest}, and the one that stands here has "
            f"{commit.manifest}: it was replaced"
        )
        return Link(name=name, state="differs", message=message), None
    try:
        opened = open_checkpoint(store, commit, guard)
    except IntegrityError as error:
        return Link(name=name, state="damaged", message=str(error)), None
    except StrongroomError as error:
        return Link(name=name, state="unreadable", message=str(error)), None
    below = opened.manifest.parent
    if is_linked:
        return Link(name=name, state="linked", signers=opened.signers), below
    message = "what went on from it is not there any more, so nothing here pins it"
    return Link(name=name, state="gap", message=message, signers=opened.signers), below
