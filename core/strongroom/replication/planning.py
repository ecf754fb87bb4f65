"""What a target lacks, in which order it gets it, and what it never will. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from strongroom import retention
from strongroom.catalog import History
from strongroom.errors import ConfigError, FencedError
from strongroom.layout import CheckpointName
from strongroom.lineage import current_line
from strongroom.manifest import Commit
from strongroom.retention import KeepAll, RetentionPolicy

__all__ = ["Plan", "check_apart", "check_target", "plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done for one target.

    Attributes:
        copies: what it lacks, in the order of copying: what a restore would take first comes first.
        to_verify: what stands there and was not verified by this ledger: another process may have died
            between its commit and its note, or somebody has copied it by hand.
        standing: what stands there, verified.
        passed_over: what it is not to have, with the reason: its policy prefers others, most of them newer.
        conflicts: what cannot be copied, since something else stands there under the same name.
        ranked: all that stands on either, in the order of the line that both make together.
    """

    copies: tuple[Commit, ...]
    to_verify: tuple[Commit, ...]
    standing: tuple[Commit, ...]
    passed_over: Mapping[CheckpointName, str]
    conflicts: Mapping[CheckpointName, str]
    ranked: tuple[CheckpointName, ...]

    @property
    def waiting(self) -> tuple[Commit, ...]:
        """What is not known to stand there yet, and should."""
        return (*self.copies, *self.to_verify)


def check_apart(uris: Sequence[str]) -> None:
    """Raise ConfigError where a tier is another one, or lies inside it."""
    folders = [f"{uri.rstrip('/')}/" for uri in uris]
    for number, folder in enumerate(folders):
        for other in folders[:number]:
            if folder.startswith(other) or other.startswith(folder):
                raise ConfigError(
                    f"{other} cannot be copied to {folder}: they are one place, or one lies inside the "
                    "other; give each tier a place of its own"
                )


def check_target(
    source: History, target: History | None, *, source_uri: str, uri: str, launch: int | None
) -> None:
    """See whether the target may be written to at all.

    Args:
        target: None: it may not be looked at.
        launch: of the writer for whom copies are made; None: nobody is writing.

    Raises:
        ConfigError: it holds another run.
        FencedError: another writer has taken the run over there.
    """
    if target is None:
        return
    if source.run is not None and target.run is not None and source.run.run != target.run.run:
        raise ConfigError(
            f"{uri} holds run {target.run.run}, and {source_uri} is run {source.run.run}: each run needs a "
            f"root of its own on every tier"
        )
    for number, record in source.launches.items():
        there = target.launches.get(number)
        if there is not None and there != record:
            raise FencedError(
                f"another writer has taken launch {number} at {uri}: its record there is not the one in "
                f"{source_uri}. Nothing more is copied there; stop one of the two, or give each its own root"
            )
    # Not of folders that nobody committed: any stray object would make one.
    records = target.launches.keys() | target.damaged_launches.keys()
    latest = max(records | {name.launch for name in target.commits}, default=0)
    if launch is not None and latest > launch:
        raise FencedError(
            f"launch {latest} has taken the run over at {uri}; this process is launch {launch} and commits "
            f"nothing more there. Stop one of the two, or give each its own root"
        )


def plan(
    source: History,
    target: History | None,
    keep: RetentionPolicy | None,
    *,
    verified: Collection[Commit],
    left_out: Collection[CheckpointName] = (),
) -> Plan:
    """Decide what a target gets.

    Args:
        source: the first tier.
        target: None: it may not be looked at, and holds what was noted.
        keep: the target's policy: what it would remove at once is not copied; None: everything is.
        verified: checkpoints of the source that were verified on the target.
        left_out: those that cannot be copied, such as damaged ones: the policy chooses among the others.
    """
    noted = {commit.name: commit for commit in verified}
    there: Mapping[CheckpointName, Commit] = noted if target is None else target.commits
    conflicts = _conflicts(source, there, {} if target is None else target.damaged)
    apart = {*left_out, *conflicts}
    ours = {name: commit for name, commit in source.commits.items() if name not in apart}
    decisions = retention.plan(
        _ranked(source, target, [*ours, *(name for name in there if name not in apart)]),
        keep if keep is not None else KeepAll(),
        verified=source.verified if target is None else source.verified | target.verified,
    )
    copies: list[Commit] = []
    to_verify: list[Commit] = []
    standing: list[Commit] = []
    passed_over: dict[CheckpointName, str] = {}
    for decision in decisions:
        name = decision.name
        commit = ours.get(name)
        if commit is None:
            continue
        if name in there:
            (standing if noted.get(name) == commit else to_verify).append(commit)
        elif decision.is_kept:
            copies.append(commit)
        else:
            passed_over[name] = f"it would not stay there: {decision.reason}"
    return Plan(
        copies=tuple(copies),
        to_verify=tuple(to_verify),
        standing=tuple(standing),
        passed_over=passed_over,
        conflicts=conflicts,
        ranked=_ranked(source, target, [*source.commits, *there]),
    )


def _conflicts(
    source: History, there: Mapping[CheckpointName, Commit], damaged: Mapping[CheckpointName, str]
) -> dict[CheckpointName, str]:
    found = {
        name: f"the copy there is damaged: {why}" for name, why in damaged.items() if name in source.commits
    }
    for name, commit in there.items():
        if name in source.commits and source.commits[name] != commit:
            found[name] = f"another checkpoint of this name stands there, with the manifest {commit.manifest}"
    return found


def _ranked(
    source: History, target: History | None, names: Collection[CheckpointName]
) -> tuple[CheckpointName, ...]:
    """All that stands on either, in the order of the line that both make together."""
    histories = [source] if target is None else [target, source]
    parents = {number: record.parent for each in histories for number, record in each.launches.items()}
    return current_line(set(names), parents).ranked
