"""What a root holds: run, launches, commits, and the line they make. Reads only.

One listing, and one small read for each commit that was not read before: a commit is created
once, so what was read stays true while the store says that the object has not changed. Where the
store can tell that in its listing (`strongroom.stores.offers.Outlining`), nothing else is asked.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from strongroom import layout
from strongroom.errors import (
    CheckpointNotFoundError,
    FormatError,
    IntegrityError,
    ObjectNotFoundError,
    StoreUnavailableError,
    StrongroomError,
    UntrustedError,
)
from strongroom.layout import CheckpointName
from strongroom.lineage import Line, current_line
from strongroom.manifest import COMMIT_BOUNDS, LAUNCH_BOUNDS, RUN_BOUNDS, Commit, Launch, Run
from strongroom.parallel import run_all
from strongroom.signing import Trust
from strongroom.stores.base import Store
from strongroom.stores.offers import Outlining, tuning_of

__all__ = ["Catalog", "Checkpoint", "History"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint, as users see it.

    Attributes:
        step: the step it was saved at.
        launch: the writer's turn that saved it.
        attempt: 16 hex digits, random.
        manifest_digest: SHA-256 of its manifest, as ``sha256:<hex>``: pins every byte of it.
        size_bytes: of all its files.
        committed_at_ms: milliseconds since the epoch, by the writer's clock.
        folder: its folder's name under the root.
        is_superseded: whether the run has gone on from an older checkpoint since.
    """

    step: int
    launch: int
    attempt: str
    manifest_digest: str
    size_bytes: int
    committed_at_ms: int
    folder: str
    is_superseded: bool

    @classmethod
    def of(cls, commit: Commit, *, is_superseded: bool = False) -> Checkpoint:
        return cls(
            step=commit.name.step,
            launch=commit.name.launch,
            attempt=commit.name.attempt,
            manifest_digest=str(commit.manifest),
            size_bytes=commit.size_bytes,
            committed_at_ms=commit.committed_at_ms,
            folder=commit.name.folder,
            is_superseded=is_superseded,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A root at one moment.

    Attributes:
        run: None where nothing was ever saved.
        launches: every whole launch record, by number.
        untrusted_launches: those of the damaged ones of which the record is signed by nobody who is trusted.
        launch_numbers: every number taken, damaged records included.
        commits: every whole commit.
        damaged: folders whose ``COMMIT`` is there but wrong, with the reason.
        uncommitted: folders without a ``COMMIT``: saves that died, or are under way.
        line: which of `commits` and `damaged` counts as newest, and then what.
    """

    run: Run | None
    launches: Mapping[int, Launch]
    damaged_launches: Mapping[int, str]
    untrusted_launches: frozenset[int]
    launch_numbers: frozenset[int]
    commits: Mapping[CheckpointName, Commit]
    damaged: Mapping[CheckpointName, str]
    uncommitted: tuple[CheckpointName, ...]
    line: Line

    @property
    def has_commits(self) -> bool:
        """Whether anything was ever committed here, be it whole or damaged."""
        return bool(self.commits or self.damaged)

    def checkpoints(self) -> list[Checkpoint]:
        """Every whole commit: the current line newest first, then what it superseded."""
        on_line = set(self.line.newest_first)
        return [
            Checkpoint.of(self.commits[name], is_superseded=name not in on_line)
            for name in self.line.ranked
            if name in self.commits
        ]

    def at_step(self, step: int) -> CheckpointName:
        """The checkpoint that a step means: the one on the line, else of the newest launch.

        Raises:
            CheckpointNotFoundError: none was committed at that step.
        """
        for name in self.line.ranked:
            if name.step == step:
                return name
        steps = sorted({name.step for name in self.line.ranked}, reverse=True)
        there = f"committed steps are {', '.join(map(str, steps[:10]))}" if steps else "there is none"
        more = f" and {len(steps) - 10} more" if len(steps) > 10 else ""
        raise CheckpointNotFoundError(f"no checkpoint of step {step} is committed here; {there}{more}")

    def newest(self) -> CheckpointName:
        """The newest checkpoint on the line, whole or not.

        Raises:
            CheckpointNotFoundError: none was ever committed.
        """
        if not self.line.newest_first:
            raise CheckpointNotFoundError("no checkpoint is committed here")
        return self.line.newest_first[0]

    def whole(self, name: CheckpointName) -> Commit:
        """A checkpoint's commit.

        Raises:
            IntegrityError: it is damaged.
        """
        commit = self.commits.get(name)
        if commit is None:
            raise IntegrityError(self.damaged[name])
        return commit

    def without(self, launch: int) -> History:
        """The same root, had a launch never been: where it turned out to be a stranger's."""
        commits = {name: commit for name, commit in self.commits.items() if name.launch != launch}
        damaged = {name: reason for name, reason in self.damaged.items() if name.launch != launch}
        line = current_line(
            [*commits, *damaged],
            {number: record.parent for number, record in self.launches.items()},
            self.damaged_launches,
        )
        return replace(self, commits=commits, damaged=damaged, line=line)

    @property
    def verified(self) -> frozenset[CheckpointName]:
        """Checkpoints that some writer restored, and so read and found whole, before its launch."""
        return frozenset(launch.parent.name for launch in self.launches.values() if launch.parent is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outline:
    """What a listing told.

    Attributes:
        names: attempts that have a folder.
        launch_files: names under ``launches/``.
        versions: of every object outside of ``data/``; None: the listing does not tell them.
    """

    names: list[CheckpointName]
    launch_files: list[str]
    versions: Mapping[str, str] | None = field(default=None)


class Catalog:
    """Reads a root's history; keeps the commits and launches that it has read.

    Args:
        trust: who judges launch records, which decide what is newest; None: nobody. Commits are judged
            with their checkpoints.
    """

    def __init__(self, store: Store, trust: Trust | None = None) -> None:
        self._store = store
        self._trust = trust
        self._commits: dict[CheckpointName, tuple[str, Commit]] = {}
        self._launches: dict[int, Launch] = {}
        self._known_run: tuple[str, Run] | None = None
        self._lock = threading.Lock()

    def history(self, *, stand_in: Run | None = None) -> History:
        """The root as it is now.

        Args:
            stand_in: the run's record from elsewhere, for where this root's is missing or damaged.

        Raises:
            IntegrityError: there are commits, and ``run.json`` is missing or damaged.
            UnsupportedFormatError: a document is whole and of another format.
            StoreError: the store could not be asked.
        """
        # Retention looks from the background while the training thread lists.
        with self._lock:
            return self._history(stand_in)

    def _history(self, stand_in: Run | None) -> History:
        outline = self._outline()
        commits: dict[CheckpointName, Commit] = {}
        damaged: dict[CheckpointName, str] = {}
        uncommitted = []
        # Where each answer takes its time, many are waited for at once.
        looks = tuning_of(self._store).looks
        found = run_all(
            [partial(self._commit_or_why, name, outline.versions) for name in outline.names],
            workers=looks,
            name="strongroom-catalog",
        )
        for name, commit in zip(outline.names, found, strict=True):
            if commit is None:
                uncommitted.append(name)
            elif isinstance(commit, IntegrityError):
                damaged[name] = str(commit)
            else:
                commits[name] = commit
        self._commits = {name: read for name, read in self._commits.items() if name in commits}

        try:
            run = self._run(outline.versions) or stand_in
        except FormatError:
            if stand_in is None:
                raise
            run = stand_in
        if run is None and (commits or damaged):
            raise IntegrityError(
                f"{layout.RUN} is missing in {self._store.uri}, where checkpoints were committed; copy it "
                "back from another copy of this run"
            )
        for name, commit in list(commits.items()):
            if run is not None and commit.run != run.run:
                damaged[name] = (
                    f"{name.commit_key} belongs to run {commit.run}, and this root to run {run.run}"
                )
                del commits[name]
        launches, damaged_launches, untrusted, numbers = self._read_launches(run, outline.launch_files)
        line = current_line(
            [*commits, *damaged],
            {number: launch.parent for number, launch in launches.items()},
            damaged_launches,
        )
        return History(
            run=run,
            launches=launches,
            damaged_launches=damaged_launches,
            untrusted_launches=frozenset(untrusted),
            launch_numbers=frozenset({*numbers, *(name.launch for name in outline.names)}),
            commits=commits,
            damaged=damaged,
            uncommitted=tuple(uncommitted),
            line=line,
        )

    def _outline(self) -> _Outline:
        if not isinstance(self._store, Outlining):
            folders = [name for name in self._store.list_names("") if name.endswith("/")]
            names = [name for name in map(CheckpointName.parse, folders) if name is not None]
            return _Outline(names=names, launch_files=self._store.list_names(layout.LAUNCHES))
        listed = self._store.outline(layout.DATA)
        folders = sorted({key.partition("/")[0] for key in listed if "/" in key})
        prefix = f"{layout.LAUNCHES}/"
        return _Outline(
            names=[name for name in map(CheckpointName.parse, folders) if name is not None],
            launch_files=[key.removeprefix(prefix) for key in listed if key.startswith(prefix)],
            versions={key: info.version for key, info in listed.items() if info is not None},
        )

    def _run(self, versions: Mapping[str, str] | None) -> Run | None:
        try:
            version = self._version(layout.RUN, versions)
            if self._known_run is None or self._known_run[0] != version:
                data = self._store.read(layout.RUN, limit_bytes=RUN_BOUNDS.length_bytes)
                self._known_run = version, Run.decode(data, layout.RUN)
        except ObjectNotFoundError:
            self._known_run = None
            return None
        return self._known_run[1]

    def _version(self, key: str, versions: Mapping[str, str] | None) -> str:
        """What the store says of an object, by what it listed or when asked.

        Raises:
            ObjectNotFoundError: it is absent.
        """
        if versions is None:
            return self._store.stat(key).version
        version = versions.get(key)
        if version is None:
            raise ObjectNotFoundError(f"{key} does not exist in {self._store.uri}")
        return version

    def _commit_or_why(
        self, name: CheckpointName, versions: Mapping[str, str] | None
    ) -> Commit | IntegrityError | None:
        """A folder's commit, or why it is none; None: it has none."""
        try:
            return self._commit(name, versions)
        except ObjectNotFoundError:
            return None
        except IntegrityError as error:
            return error

    def _commit(self, name: CheckpointName, versions: Mapping[str, str] | None) -> Commit:
        version = self._version(name.commit_key, versions)
        known = self._commits.get(name)
        if known is not None and known[0] == version:
            return known[1]
        try:
            data = self._store.read(name.commit_key, limit_bytes=COMMIT_BOUNDS.length_bytes)
        except ObjectNotFoundError as error:
            # It has just been seen. That it went away meanwhile is one thing, and a store that says of what
            # it lists that it is not there another: nothing may be taken for uncommitted on its word.
            if layout.COMMIT in self._store.list_names(name.folder):
                raise StoreUnavailableError(
                    f"{self._store.uri} lists {name.commit_key}, and says that it is not there: {error}; "
                    "see what stands between here and the store, and try again"
                ) from error
            raise
        commit = Commit.decode(data, name.commit_key)
        if commit.name != name:
            raise IntegrityError(f"{name.commit_key} says that it commits {commit.name}, not {name}")
        self._commits[name] = (version, commit)
        return commit

    def _read_launches(
        self, run: Run | None, file_names: Sequence[str]
    ) -> tuple[dict[int, Launch], dict[int, str], set[int], set[int]]:
        parsed = map(layout.parse_launch_name, file_names)
        numbers = sorted({number for number in parsed if number is not None})
        found = run_all(
            [partial(self._launch_or_why, number, run) for number in numbers],
            workers=tuning_of(self._store).looks,
            name="strongroom-catalog",
        )
        launches: dict[int, Launch] = {}
        damaged: dict[int, str] = {}
        untrusted: set[int] = set()
        for number, launch in zip(numbers, found, strict=True):
            if isinstance(launch, Launch):
                launches[number] = launch
                continue
            damaged[number] = str(launch)
            if isinstance(launch, UntrustedError):
                untrusted.add(number)
        return launches, damaged, untrusted, set(numbers)

    def _launch_or_why(self, number: int, run: Run | None) -> Launch | StrongroomError:
        try:
            return self._launch(number, run)
        except (IntegrityError, ObjectNotFoundError) as error:
            return error

    def _launch(self, number: int, run: Run | None) -> Launch:
        key = layout.launch_key(number)
        launch = self._launches.get(number)
        if launch is None:
            launch = Launch.decode(self._store.read(key, limit_bytes=LAUNCH_BOUNDS.length_bytes), key)
            if launch.launch != number:
                raise FormatError(f"{key} says that it is launch {launch.launch}")
            if self._trust is not None:
                self._trust.judge_launch(launch)
            self._launches[number] = launch
        if run is not None and launch.run != run.run:
            raise IntegrityError(f"{key} belongs to run {launch.run}, and this root to run {run.run}")
        return launch
