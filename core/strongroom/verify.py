"""Verifying: every byte against what pins it, and every document against the others. Reads only.

Everything that is wrong is found and told, not the first thing alone, as `Problem` values that
name the file. Damage (bytes that are wrong, a file that is absent or one too many) is kept apart
from what could not be found out, because the store failed or a document is in a format of
another release: that says nothing about the bytes.

The order is the order of trust: ``COMMIT``, the manifest that it pins, the files that this pins.
What nothing vouches for is not parsed, so that one damaged file is never told as two. Of sealed files
every segment is opened where keys are at hand, besides the digest: whoever rewrites a file can rewrite
what pins it, and a restore would refuse it nevertheless. Keyrings come from strangers: what they say of
themselves is held against their checkpoint, and who they are for is `strongroom_security`'s.
Reading and hashing is `strongroom.hashing`'s, what the files of a checkpoint say against each other
`strongroom.consistency`'s; nothing here needs torch.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from strongroom import layout, tensorfile
from strongroom.auditing import Action, Activity, Outcome, listed
from strongroom.catalog import History
from strongroom.chain import walk
from strongroom.consistency import Consistency, rank_of
from strongroom.contents import SealedReader, open_whole
from strongroom.digest import sha256_of
from strongroom.errors import (
    CheckpointNotFoundError,
    ConfigError,
    FormatError,
    IntegrityError,
    ObjectNotFoundError,
    RollbackError,
    StoreError,
    UnsupportedFormatError,
    UntrustedError,
)
from strongroom.findings import CheckpointReport, Findings, Kind, Problem, Report, Verdict
from strongroom.hashing import Hashing, hash_files
from strongroom.keyrings import check_keyrings
from strongroom.layout import CheckpointName
from strongroom.lineage import current_line
from strongroom.manifest import (
    COMMIT_BOUNDS,
    LAUNCH_BOUNDS,
    MANIFEST_BOUNDS,
    RUN_BOUNDS,
    CheckpointRef,
    Commit,
    FileRecord,
    Launch,
    Manifest,
    Run,
)
from strongroom.opened import OpenedCheckpoint, check_sealed, open_checkpoint
from strongroom.sealing import Sealing
from strongroom.signing import MAX_SIGNATURE_BYTES, NO_GUARD, Guard, Trust, Trusted
from strongroom.stores.base import Store
from strongroom.stores.offers import tuning_of

__all__ = [
    "MAX_WORKERS",
    "CheckpointReport",
    "Kind",
    "Problem",
    "Progress",
    "Report",
    "Verdict",
    "verify",
    "verify_checkpoint",
]

MAX_WORKERS: Final = 4
"""Threads that read and hash: more do not help one disk."""

_MAX_LOOKS: Final = 20
"""How often a root is looked at anew because retention removed all that was being verified, or a
checkpoint's keyrings because a rotation did."""


_DOCUMENTS: Final = frozenset({layout.MANIFEST, layout.INDEX, layout.STATE, layout.PROVENANCE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a verification is; ``total_bytes`` is what commits announce."""

    done_bytes: int
    total_bytes: int


OnProgress = Callable[[Progress], None]


def verify(
    store: Store,
    *,
    step: int | None = None,
    everything: bool = False,
    chain: bool = False,
    guard: Guard = NO_GUARD,
    workers: int | None = None,
    on_progress: OnProgress | None = None,
    activity: Activity | None = None,
) -> Report:
    """Verify a root's records and the newest checkpoint, one of a step, or all.

    Args:
        step: which one; chosen as `History.at_step` does.
        everything: every committed checkpoint, superseded ones too.
        chain: walk the lineage, too: each manifest against what pins it.
        guard: what the policy demands, and how sealed checkpoints are opened. Where it opens none, their
            files' digests are verified, and what they hold is not. The newest checkpoint is held against
            its floor, which is not lifted by looking.
        workers: threads that read and hash; None: by the machine.
        on_progress: called after each piece that was read, from any thread, one at a time.
        activity: of which this is a part; None: it is one by itself.

    Raises:
        AuditError: a checkpoint could not be put on record first, and was not read.
        CheckpointNotFoundError: nothing is committed there, or nothing at that step, and
            nothing else is wrong.
        StoreError: the root itself could not be listed.
    """
    if activity is None:
        with Activity(guard.auditor, Action.VERIFY, root=store.uri) as own:
            report = verify(
                store,
                step=step,
                everything=everything,
                chain=chain,
                guard=guard,
                workers=workers,
                on_progress=on_progress,
                activity=own,
            )
            if report.verdict != "whole":
                own.conclude(Outcome.FAILURE, report.verdict)
        return report
    look = 0
    while True:
        look += 1
        report, has_gone = _verify(store, step, everything, chain, guard, workers, on_progress, activity)
        # A running job's retention took away all that was looked at: that is no damage.
        if not has_gone or report.checkpoints or look == _MAX_LOOKS:
            return report


def _verify(
    store: Store,
    step: int | None,
    everything: bool,
    chain: bool,
    guard: Guard,
    workers: int | None,
    on_progress: OnProgress | None,
    activity: Activity,
) -> tuple[Report, bool]:
    """Look once; and whether some of it was removed by retention meanwhile, and left out."""
    root = _Root.read(store, guard.trust)
    history = root.history
    activity.about(run=history.run.run if history.run is not None else None)
    if everything:
        chosen = history.line.ranked
    elif step is not None:
        chosen = (history.at_step(step),)
    else:
        chosen = history.line.newest_first[:1]
    _check_floor(store, root, guard, chosen)
    if not chosen and not root.findings.problems:
        raise CheckpointNotFoundError(
            f"nothing was ever committed in {store.uri}: there is nothing to verify"
        )
    total = sum(history.commits[name].size_bytes for name in chosen if name in history.commits)
    with _hashing(store, workers, on_progress, total) as hashing:
        found = [_check(store, root, name, guard, hashing, activity) for name in chosen]
    links = walk(store, history, guard) if chain else None
    for link in links or ():
        if link.is_break:
            root.findings.add(f"{link.name.folder}/", "damaged", f"the chain breaks here: {link.message}")
    reports = tuple(report for report in found if not _was_removed(store, history, report))
    report = Report(
        uri=store.uri,
        run=history.run.run if history.run else None,
        root_problems=root.findings.sorted(),
        checkpoints=reports,
        file_count=root.findings.file_count + sum(report.file_count for report in reports),
        size_bytes=root.findings.size_bytes + sum(report.size_bytes for report in reports),
        rollback_protection=guard.rollback_protection,
        chain=links,
    )
    activity.note(
        files=report.file_count, size_bytes=report.size_bytes, verdict=report.verdict, is_chain=chain
    )
    return report, len(reports) < len(found)


def _was_removed(store: Store, history: History, report: CheckpointReport) -> bool:
    """Whether files are missing because the checkpoint is none any more: ``COMMIT`` goes first."""
    if report.verdict != "damaged" or report.name not in history.commits:
        return False
    try:
        store.stat(report.name.commit_key)
    except ObjectNotFoundError:
        return True
    except (StoreError, IntegrityError):
        return False
    return False


def verify_checkpoint(
    store: Store,
    name: CheckpointName,
    *,
    guard: Guard = NO_GUARD,
    workers: int | None = None,
    on_progress: OnProgress | None = None,
    activity: Activity | None = None,
) -> CheckpointReport:
    """Verify one checkpoint by itself, whatever the rest of its root looks like.

    Args:
        store, name: where it is.
        guard, workers, on_progress, activity: as `verify` takes them.

    Raises:
        AuditError: it could not be put on record first, and was not read.
        CheckpointNotFoundError: it has no ``COMMIT``, so it never was a checkpoint.
    """
    if activity is None:
        with Activity(guard.auditor, Action.VERIFY, root=store.uri, checkpoint=name) as own:
            found = verify_checkpoint(
                store, name, guard=guard, workers=workers, on_progress=on_progress, activity=own
            )
            if found.verdict != "whole":
                own.conclude(Outcome.FAILURE, found.verdict)
        return found
    root = _Root.of(store, [name])
    if name in root.history.uncommitted:
        raise CheckpointNotFoundError(f"{name} was never committed in {store.uri}")
    commit = root.history.commits.get(name)
    with _hashing(store, workers, on_progress, commit.size_bytes if commit else 0) as hashing:
        return _check(store, root, name, guard, hashing, activity)


@contextlib.contextmanager
def _hashing(
    store: Store, workers: int | None, on_progress: OnProgress | None, total_bytes: int
) -> Iterator[Hashing]:
    done_bytes = 0
    lock = threading.Lock()

    def advance(read_bytes: int) -> None:
        nonlocal done_bytes
        with lock:
            done_bytes += read_bytes
            if on_progress is not None:
                # A file that changed since its commit may be longer than was announced.
                on_progress(Progress(done_bytes=done_bytes, total_bytes=max(total_bytes, done_bytes)))

    # Where each answer takes its time, many are waited for at once.
    count = workers or tuning_of(store).reads or min(MAX_WORKERS, os.cpu_count() or 1)
    hashing = Hashing(count, advance)
    try:
        yield hashing
    finally:
        # After an interrupt nobody waits for the rest of files of many gigabytes.
        hashing.stop()


# ------------------------------------------------------------------------------------ root records


@dataclass(frozen=True, slots=True, kw_only=True)
class _Root:
    """A root's small records, read one by one, each problem kept.

    `Catalog.history` stops at a damaged run record; a verification goes on.
    """

    history: History
    findings: Findings
    commit_problems: Mapping[CheckpointName, Problem]
    commit_bytes: Mapping[CheckpointName, int]

    @classmethod
    def read(cls, store: Store, trust: Trust | None) -> _Root:
        parsed = (CheckpointName.parse(name) for name in store.list_names("") if name.endswith("/"))
        return cls.of(store, [name for name in parsed if name is not None], has_records=True, trust=trust)

    @classmethod
    def of(
        cls,
        store: Store,
        names: list[CheckpointName],
        *,
        has_records: bool = False,
        trust: Trust | None = None,
    ) -> _Root:
        """Read what stands there of ``names``, and the run's own records if they are wanted."""
        findings = Findings()
        commits: dict[CheckpointName, Commit] = {}
        commit_bytes: dict[CheckpointName, int] = {}
        commit_findings = Findings()
        uncommitted = []
        for name in names:
            with commit_findings.about(name.commit_key):
                try:
                    data = store.read(name.commit_key, limit_bytes=COMMIT_BOUNDS.length_bytes)
                except ObjectNotFoundError:
                    uncommitted.append(name)
                    continue
                commit = Commit.decode(data, layout.COMMIT)
                if commit.name != name:
                    raise IntegrityError(f"commits {commit.name}, and stands in the folder of {name}")
                commits[name] = commit
                commit_bytes[name] = len(data)
        by_key = {problem.key: problem for problem in commit_findings.problems}
        commit_problems = {name: by_key[name.commit_key] for name in names if name.commit_key in by_key}

        run = None
        launches: dict[int, Launch] = {}
        damaged_launches: dict[int, str] = {}
        numbers: set[int] = set()
        if has_records:
            run = _read_run(store, findings, is_due=bool(commits or commit_problems or uncommitted))
            launches, damaged_launches, numbers = _read_launches(store, run, trust, findings)
            parents = {launch.parent.launch for launch in launches.values() if launch.parent is not None}
            _check_lost(numbers, parents.union(name.launch for name in names), findings)
        history = History(
            run=run,
            launches=launches,
            damaged_launches=damaged_launches,
            untrusted_launches=frozenset(
                number
                for number in damaged_launches
                if any(
                    problem.key == layout.launch_key(number) and problem.kind == "untrusted"
                    for problem in findings.problems
                )
            ),
            launch_numbers=frozenset({*numbers, *(name.launch for name in names)}),
            commits=commits,
            damaged={name: problem.message for name, problem in commit_problems.items()},
            uncommitted=tuple(uncommitted),
            line=current_line(
                [*commits, *commit_problems],
                {number: launch.parent for number, launch in launches.items()},
                damaged_launches,
            ),
        )
        root = cls(
            history=history, findings=findings, commit_problems=commit_problems, commit_bytes=commit_bytes
        )
        for number, launch in launches.items():
            root.check_reference(layout.launch_key(number), "its parent", launch.parent, findings)
        return root

    def check_reference(self, key: str, what: str, ref: CheckpointRef | None, findings: Findings) -> None:
        """Where a checkpoint that is referred to still stands, it must be the one that was meant."""
        commit = self.history.commits.get(ref.name) if ref is not None else None
        if ref is not None and commit is not None and not commit.manifest.matches(ref.manifest):
            findings.add(
                key,
                "damaged",
                f"{what} is {ref.name} with the manifest {ref.manifest}, and the one that stands there has "
                f"{commit.manifest}",
            )


def _read_run(store: Store, findings: Findings, *, is_due: bool) -> Run | None:
    with findings.about(layout.RUN, absent="it is created before everything else in a root"):
        try:
            data = store.read(layout.RUN, limit_bytes=RUN_BOUNDS.length_bytes)
        except ObjectNotFoundError:
            if not is_due:
                return None
            raise
        run = Run.decode(data, layout.RUN)
        findings.count(len(data))
        return run
    return None


def _read_launches(
    store: Store, run: Run | None, trust: Trust | None, findings: Findings
) -> tuple[dict[int, Launch], dict[int, str], set[int]]:
    launches: dict[int, Launch] = {}
    numbers: set[int] = set()
    with findings.about(f"{layout.LAUNCHES}/"):
        names = store.list_names(layout.LAUNCHES)
        for file_name in names:
            number = layout.parse_launch_name(file_name)
            if number is None:
                findings.add(f"{layout.LAUNCHES}/{file_name}", "unexpected", "is no launch record")
                continue
            numbers.add(number)
            key = layout.launch_key(number)
            with findings.about(key):
                data = store.read(key, limit_bytes=LAUNCH_BOUNDS.length_bytes)
                launch = Launch.decode(data, key)
                if launch.launch != number:
                    raise FormatError(f"says that it is launch {launch.launch}")
                if run is not None and launch.run != run.run:
                    raise IntegrityError(f"belongs to run {launch.run}, and this root to run {run.run}")
                if trust is not None:
                    trust.judge_launch(launch)
                launches[number] = launch
                findings.count(len(data))
    reasons = {problem.key: problem.message for problem in findings.problems}
    damaged = {number: reasons[key] for number in numbers if (key := layout.launch_key(number)) in reasons}
    return launches, damaged, numbers


def _check_lost(numbers: set[int], needed: set[int], findings: Findings) -> None:
    """A launch that has a folder, or that another one went on from, and has no record, has lost it.

    A number that nothing refers to was perhaps never taken: platforms number starts that come to nothing.
    """
    if any(problem.key == f"{layout.LAUNCHES}/" for problem in findings.problems):
        return
    lost = sorted(needed - numbers)
    for number in lost:
        if number - 1 in lost:
            continue
        last = number
        while last + 1 in lost:
            last += 1
        more = f"; nor is any up to launch {last}" if last > number else ""
        message = f"the record of a launch that took place is not there{more}"
        findings.add(layout.launch_key(number), "missing", message)


def _check_floor(store: Store, root: _Root, guard: Guard, chosen: Collection[CheckpointName]) -> None:
    """Hold the newest checkpoint that satisfies the policy against what is remembered outside of the root.

    A newer one that does not is told, too: it stands where a restore would look first.

    Args:
        chosen: checkpoints that are verified anyway, and told of there.
    """
    if guard.floor is None:
        return
    for name in root.history.line.newest_first:
        commit = root.history.commits.get(name)
        if commit is None:
            continue
        try:
            open_checkpoint(store, commit, Guard(trust=guard.trust))
            guard.floor.check(store.uri, commit)
        except IntegrityError as error:
            if name not in chosen:
                kind: Kind = "untrusted" if isinstance(error, UntrustedError) else "damaged"
                root.findings.add(name.commit_key, kind, str(error))
            continue
        except RollbackError as error:
            root.findings.add(name.commit_key, "rolled back", str(error))
        except (ConfigError, StoreError, UnsupportedFormatError) as error:
            root.findings.add(name.commit_key, "unreadable", str(error))
        return
    if guard.floor.run_of(store.uri) is not None and not root.history.line.newest_first:
        root.findings.add(
            layout.RUN,
            "rolled back",
            f"no checkpoint is there, and {guard.floor.uri} remembers one of this root",
        )


# --------------------------------------------------------------------------------- one checkpoint


def _check(
    store: Store, root: _Root, name: CheckpointName, guard: Guard, hashing: Hashing, activity: Activity
) -> CheckpointReport:
    """Verify one checkpoint; that it is read, and how it was found, is put on record."""
    commit = root.history.commits.get(name)
    run = root.history.run.run if root.history.run is not None else None
    activity.intend(commit.run if commit is not None else run, name)
    report = _checked(store, root, name, guard, hashing)
    worst = next((problem for problem in report.problems if problem.is_damage), None)
    worst = worst or next(iter(report.problems), None)
    refused = {"locked", "rolled back", "untrusted"}
    outcome = Outcome.DENIED if worst is not None and worst.kind in refused else Outcome.FAILURE
    activity.tell(
        Outcome.SUCCESS if report.verdict == "whole" else outcome,
        checkpoint=name,
        run=commit.run if commit is not None else run,
        reason=None if worst is None else f"{worst.key}: {worst.message}",
        details={
            "files": report.file_count,
            "is_closed": report.is_closed,
            "problems": len(report.problems),
            "size_bytes": report.size_bytes,
            "verdict": report.verdict,
            **listed("signer", report.signers),
        },
    )
    return report


def _checked(
    store: Store, root: _Root, name: CheckpointName, guard: Guard, hashing: Hashing
) -> CheckpointReport:
    findings = Findings()
    commit = root.history.commits.get(name)
    if commit is None:
        findings.problems.append(root.commit_problems[name])
    else:
        _check_commit(root, commit, findings)
    manifest, signers = _read_manifest(store, name, commit, guard.trust, findings)
    _check_names(store, name, manifest, findings)
    is_closed = False
    if manifest is not None:
        _check_lineage(root, manifest, findings)
        contents = None
        if commit is not None:
            _check_signature(store, commit, findings)
            contents = _unlock(store, commit, manifest, guard.sealing, findings)
            is_closed = contents is None
        _check_files(store, manifest, contents, findings, hashing)
    return CheckpointReport(
        name=name,
        is_closed=is_closed,
        signers=signers,
        commit=commit,
        problems=findings.sorted(),
        file_count=findings.file_count,
        size_bytes=findings.size_bytes,
    )


def _check_commit(root: _Root, commit: Commit, findings: Findings) -> None:
    run = root.history.run
    if run is not None and commit.run != run.run:
        findings.add(
            commit.name.commit_key,
            "damaged",
            f"belongs to run {commit.run}, and this root to run {run.run}",
        )
        return
    findings.count(root.commit_bytes[commit.name])


def _read_manifest(
    store: Store, name: CheckpointName, commit: Commit | None, trust: Trust | None, findings: Findings
) -> tuple[Manifest | None, tuple[str, ...]]:
    """The manifest, if it is what ``COMMIT`` pins and somebody trusted has signed; and who did.

    Where no signature is asked for and ``COMMIT`` is damaged, it is the manifest as it stands.
    """
    key = layout.data_key(name, layout.MANIFEST)
    signers: tuple[str, ...] = ()
    with findings.about(key, absent="every checkpoint has one; what it lists was not verified"):
        data = store.read(key, limit_bytes=MANIFEST_BOUNDS.length_bytes)
        found = sha256_of(data)
        if commit is not None and not found.matches(commit.manifest):
            raise IntegrityError(
                f"its digest is {found}, and COMMIT pins {commit.manifest}; what it lists was not verified"
            )
        if trust is None:
            manifest = Manifest.decode(data, layout.MANIFEST)
        elif commit is None:
            # Nothing is parsed before its signature was verified, and COMMIT says which signature that is.
            return None, ()
        else:
            judged: Trusted | None = None
            with findings.about(layout.signature_key(name)):
                judged = trust.judge(store, commit, data)
            if judged is None:
                return None, ()
            manifest, signers = judged.manifest, judged.signers
        if manifest.name != name or (commit is not None and manifest.run != commit.run):
            raise IntegrityError(f"says that it is {manifest.name} of run {manifest.run}")
        if commit is not None:
            findings.count(len(data))
            if commit.size_bytes != manifest.size_bytes:
                findings.add(
                    name.commit_key,
                    "damaged",
                    f"says that the files have {commit.size_bytes} bytes together, the manifest says "
                    f"{manifest.size_bytes}",
                )
        return manifest, signers
    return None, ()


def _check_signature(store: Store, commit: Commit, findings: Findings) -> None:
    """Hold the writer's signature against what ``COMMIT`` pins: that needs no key."""
    if commit.signature is None:
        return
    key = layout.signature_key(commit.name)
    with findings.about(key, absent="COMMIT pins it"):
        data = store.read(key, limit_bytes=MAX_SIGNATURE_BYTES)
        found = sha256_of(data)
        if not found.matches(commit.signature):
            raise IntegrityError(f"its digest is {found}, and COMMIT pins {commit.signature}")
        findings.count(len(data))


def _check_lineage(root: _Root, manifest: Manifest, findings: Findings) -> None:
    """A checkpoint goes on from an earlier one of its launch, or from where its launch took the run up."""
    key = layout.data_key(manifest.name, layout.MANIFEST)
    parent, name = manifest.parent, manifest.name
    if parent is not None and parent.launch == name.launch:
        if parent.step >= name.step:
            findings.add(key, "damaged", f"its parent, {parent.name}, is not older than itself")
    else:
        launch = root.history.launches.get(name.launch)
        if launch is not None and launch.parent != parent:
            findings.add(
                key,
                "damaged",
                f"its parent is {_named(parent)}, and launch {name.launch} took the run up from "
                f"{_named(launch.parent)}",
            )
    root.check_reference(key, "its parent", parent, findings)


def _named(ref: CheckpointRef | None) -> str:
    return str(ref.name) if ref is not None else "none"


def _check_names(store: Store, name: CheckpointName, manifest: Manifest | None, findings: Findings) -> None:
    """Nothing stands in the checkpoint's folder that does not belong there."""
    beside = {f"{layout.DATA}/", layout.COMMIT, *layout.SIDECAR_FILES}
    beside |= {f"{sidecar}/" for sidecar in layout.SIDECAR_FOLDERS}
    _check_folder(store, name.folder, beside.__contains__, findings)
    signatures = f"{name.folder}/{layout.SIGNATURES}"
    _check_folder(store, signatures, lambda each: layout.parse_signature_name(each) is not None, findings)
    if manifest is None:
        # Which files belong there is unknown, but not what a file of a checkpoint may be called.
        data = f"{name.folder}/{layout.DATA}"
        for folder in _check_folder(store, data, _may_belong, findings):
            _check_folder(store, f"{data}/{folder}", _may_be_shard, findings)
        return
    within: dict[str, set[str]] = {"": {layout.MANIFEST}}
    for record in manifest.files:
        *folders, file_name = record.path.split("/")
        prefix = ""
        for folder in folders:
            within[prefix].add(f"{folder}/")
            prefix = f"{prefix}{folder}/"
            within.setdefault(prefix, set())
        within[prefix].add(file_name)
    for prefix, names in within.items():
        folder = f"{name.folder}/{layout.DATA}/{prefix}".removesuffix("/")
        _check_folder(store, folder, names.__contains__, findings)


def _may_belong(name: str) -> bool:
    if name.endswith("/"):
        return layout.is_shard_folder(name)
    plain = name.removesuffix(layout.SEALED)
    return plain in _DOCUMENTS or _may_be_shard(name) or rank_of(plain) is not None


def _may_be_shard(name: str) -> bool:
    return layout.parse_shard_path(name.removesuffix(layout.SEALED)) is not None


def _check_folder(store: Store, folder: str, belongs: Callable[[str], bool], findings: Findings) -> list[str]:
    """Tell what does not belong in a folder; the folders that do."""
    folders = []
    with findings.about(f"{folder}/"):
        for name in store.list_names(folder):
            if not belongs(name):
                findings.add(f"{folder}/{name}", "unexpected", "it is no part of this checkpoint")
            elif name.endswith("/"):
                folders.append(name.removesuffix("/"))
    return folders


def _unlock(
    store: Store, commit: Commit, manifest: Manifest, sealing: Sealing | None, findings: Findings
) -> OpenedCheckpoint | None:
    """The checkpoint with what is needed to look into its files; None: they stay closed."""
    opened = OpenedCheckpoint(store=store, commit=commit, manifest=manifest, sealing=sealing)
    with findings.about(layout.data_key(manifest.name, layout.MANIFEST)):
        if manifest.is_sealed != (commit.keyring is not None):
            raise IntegrityError("COMMIT does not agree on whether the checkpoint is sealed")
        check_sealed(manifest, sealing)
    if not manifest.is_sealed:
        return opened
    folder = f"{manifest.name.folder}/{layout.KEYRINGS}/"
    absent = "the checkpoint is sealed, and no keyring is there"
    with findings.about(folder, absent=absent):
        # Where none is whole, that was told, and trying them would tell it again.
        if check_keyrings(store, commit, findings) and sealing is not None and opened.unlocked.keyring:
            return opened
    return None


def _check_files(
    store: Store,
    manifest: Manifest,
    opened: OpenedCheckpoint | None,
    findings: Findings,
    hashing: Hashing,
) -> None:
    """Hash every file that the manifest lists, and hold what they say against each other.

    Args:
        opened: looks into sealed files; None: what they hold is not looked at.
    """
    consistency = Consistency(manifest)
    is_closed = opened is None and manifest.is_sealed
    # The index first: it says what must stand in each shard.
    records = sorted(manifest.files, key=lambda record: record.plain_path != layout.INDEX)
    hashed = hash_files(
        store,
        manifest,
        records,
        hashing,
        keeps_whole=(lambda _: False) if is_closed else consistency.keeps_whole,
        block_digests=consistency.block_digests,
    )
    for record, outcome in hashed:
        key = layout.data_key(manifest.name, record.path)
        with findings.about(key, absent=f"the manifest lists it, with {record.size_bytes} bytes"):
            data = outcome()
            if opened is not None and record.header is not None:
                data = _content(opened, record, data, is_whole=consistency.keeps_whole(record))
            findings.count(record.size_bytes)
            if is_closed:
                continue
            for problem in consistency.take(record, data):
                findings.add(key, "damaged", problem)
    for path, problem in () if is_closed else consistency.conclude():
        stored = path if path == layout.MANIFEST else manifest.stored(path)
        findings.add(layout.data_key(manifest.name, stored), "damaged", problem)


def _content(opened: OpenedCheckpoint, record: FileRecord, stored: bytes, *, is_whole: bool) -> bytes:
    """What a sealed file holds, all of which is opened; of a shard its header."""
    opener = opened.opener(record)
    if is_whole:
        return open_whole(opener, stored)
    key = layout.data_key(opened.name, record.path)
    with SealedReader(opened.store.open_reader(key), opener) as reader:
        reader.check()
        if layout.parse_shard_path(record.plain_path) is None:
            return b""
        first = bytearray(min(8, reader.size_bytes))
        reader.read_into(0, memoryview(first))
        header = bytearray(tensorfile.header_length(bytes(first), reader.size_bytes, record.plain_path))
        reader.read_into(0, memoryview(header))
    return bytes(header)
