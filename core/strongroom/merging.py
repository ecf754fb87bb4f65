"""One run on several tiers, seen as one: whose word counts where they differ. Pure.

Tiers hold the same run: the same records, byte for byte, some of them not there yet. So what is whole on
any tier is whole, and a record that is absent or damaged on one tier is taken from another. Two whole records
that differ are never mixed: of launches that is an error, since two writers took one number; of commits each
is a candidate of its own, since one of them may be planted, and its signature tells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strongroom.catalog import History
from strongroom.errors import ConfigError
from strongroom.layout import CheckpointName
from strongroom.lineage import current_line
from strongroom.manifest import Commit, Launch, Run

__all__ = ["Merged", "merge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Several tiers as one.

    Attributes:
        history: the run. A commit is the fastest tier's, where tiers differ.
        holders: for each commit, by their numbers, the tiers on which it stands, the fastest first.
        variants: for names that tiers hold different commits of: all of them, the fastest tier's first.
    """

    history: History
    holders: Mapping[Commit, tuple[int, ...]]
    variants: Mapping[CheckpointName, tuple[Commit, ...]]


def merge(histories: Sequence[History | None], uris: Sequence[str]) -> Merged:
    """See tiers as one.

    Args:
        histories: of each tier, the fastest first; None: it is out of reach, and that was accepted.
        uris: what the tiers are called.

    Raises:
        ConfigError: they are not of one run, or two writers have taken one launch number.
    """
    there = [(number, history) for number, history in enumerate(histories) if history is not None]
    run = _run(there, uris)
    launches: dict[int, tuple[int, Launch]] = {}
    damaged_launches: dict[int, str] = {}
    untrusted: set[int] = set()
    commits: dict[CheckpointName, list[Commit]] = {}
    holders: dict[Commit, list[int]] = defaultdict(list)
    damaged: dict[CheckpointName, str] = {}
    for tier, history in there:
        for number, launch in history.launches.items():
            first = launches.setdefault(number, (tier, launch))
            if first[1] != launch:
                raise _two_writers(number, uris[first[0]], uris[tier])
        for name, commit in history.commits.items():
            variants = commits.setdefault(name, [])
            if commit not in variants:
                variants.append(commit)
            holders[commit].append(tier)
        for number, reason in history.damaged_launches.items():
            damaged_launches.setdefault(number, reason)
        untrusted |= history.untrusted_launches
        for name, reason in history.damaged.items():
            damaged.setdefault(name, reason)
    damaged_launches = {n: reason for n, reason in damaged_launches.items() if n not in launches}
    damaged = {name: reason for name, reason in damaged.items() if name not in commits}
    uncommitted = {
        name: None
        for _, history in there
        for name in history.uncommitted
        if name not in commits and name not in damaged
    }
    history = History(
        run=run,
        launches={number: launch for number, (_, launch) in launches.items()},
        damaged_launches=damaged_launches,
        untrusted_launches=frozenset(untrusted & damaged_launches.keys()),
        launch_numbers=frozenset().union(*(history.launch_numbers for _, history in there)),
        commits={name: variants[0] for name, variants in commits.items()},
        damaged=damaged,
        uncommitted=tuple(uncommitted),
        line=current_line(
            [*commits, *damaged],
            {number: launch.parent for number, (_, launch) in launches.items()},
            damaged_launches,
        ),
    )
    return Merged(
        history=history,
        holders={commit: tuple(tiers) for commit, tiers in holders.items()},
        variants={name: tuple(variants) for name, variants in commits.items() if len(variants) > 1},
    )


def _run(there: Sequence[tuple[int, History]], uris: Sequence[str]) -> Run | None:
    first: tuple[int, Run] | None = None
    for tier, history in there:
        if history.run is None:
            continue
        if first is None:
            first = tier, history.run
        elif history.run.run != first[1].run:
            raise ConfigError(
                f"{uris[first[0]]} holds run {first[1].run}, and {uris[tier]} run {history.run.run}: the "
                "tiers of a run hold that run alone; give each run roots of its own"
            )
    return first[1] if first is not None else None


def _two_writers(number: int, one: str, other: str) -> ConfigError:
    return ConfigError(
        f"{one} and {other} hold different records of launch {number}: two writers took that number while "
        "they could not see each other. See which of the two is to go on, and name its tiers alone; or move "
        f"launches/{number:06d}.json and that launch's folders away from the other"
    )
