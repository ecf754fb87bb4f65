"""``strongroom keys``: makes keys, lists keyrings, and changes who can open. It reads and writes no shard."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from rich.console import Console

from strongroom.catalog import History
from strongroom.config import SYSTEM_CLOCK
from strongroom.errors import CheckpointNotFoundError, ConfigError, IntegrityError, StrongroomError
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit
from strongroom.roles import Duty
from strongroom.signing import Trust
from strongroom.stores.base import Store
from strongroom_cli import words
from strongroom_cli.auditing import open_store_of
from strongroom_cli.console import Bar, line, new_console, new_table, print_json
from strongroom_cli.standing import read_history, run_of
from strongroom_security import Seal, SecurityPolicy
from strongroom_security.keyring import newest_first
from strongroom_security.recipients.base import Identity, Recipient, check_id
from strongroom_security.recipients.opening import open_recipient
from strongroom_security.rotation import (
    AddRecipient,
    Change,
    FoundKeyring,
    Outcome,
    Progress,
    RemoveRecipient,
    Report,
    Result,
    SetRecipients,
    find_keyring,
    rotate,
)

if TYPE_CHECKING:
    from strongroom_security.recipients.hpke import HpkeSuite

__all__ = ["run"]

_DAMAGED: Final = 1
_USAGE: Final = 2
_UNREADABLE: Final = 4

_WITHIN_S: Final = 30.0
"""As a policy's own default."""

_LOOKS: Final = 8
"""How often keyrings are listed while a rotation is removing some of them."""

_CURVES: Final = {"sign-p256": "P-256", "sign-p384": "P-384"}

_RESULTS: Final[tuple[Result, ...]] = ("rotated", "would rotate", "already", "unsealed", "gone", "failed")


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    if options.verb == "init":
        return _init(options)
    seal = _seal(options.policy)
    guard = options.guard
    store = open_store_of(options, Duty.RESTORE if options.verb == "list" else Duty.SAVE)
    history = read_history(store, guard)
    options.activity.about(run=run_of(history))
    if options.verb == "list":
        return _list(options, store, history, seal)
    return _rotate(options, store, history, seal, guard.trust)


def _seal(policy: object) -> Seal | None:
    return policy.seal if isinstance(policy, SecurityPolicy) else None


# --------------------------------------------------------------------------------------------------- init


def _init(options: argparse.Namespace) -> int:
    path = Path(options.path)
    if options.kind.startswith("sign-"):
        return _init_signer(options, path)
    if options.passphrase is not None:
        raise ConfigError("--passphrase encrypts a key that signs, as of --kind sign-p256; leave it out")
    made: Recipient
    if options.kind == "file":
        from strongroom_security.recipients.file import create_key_file

        made = create_key_file(path)
        files, recipient, identity = [str(path)], f"file:{path}", f"file:{path}"
    else:
        from strongroom_security.recipients.hpke import create_key_pair

        made = create_key_pair(path, cast("HpkeSuite", options.kind.removeprefix("hpke-")))
        files = [f"{path}.key", f"{path}.pub"]
        recipient, identity = f"hpke:{path}.pub", f"hpke:{path}.key"
    if options.json:
        print_json(
            {"files": files, "id": made.id, "identity": identity, "kind": made.kind, "recipient": recipient}
        )
        return 0
    console = new_console()
    console.print(line("made ", (files[0], "bold"), ", which opens what is sealed to it: keep it secret"))
    for other in files[1:]:
        console.print(line("made ", (other, "bold"), ", which can seal and never open: give it to writers"))
    console.print(line(("id         ", "dim"), made.id))
    console.print(line(("recipients ", "dim"), recipient))
    if identity != recipient:
        console.print(line(("identities ", "dim"), identity))
    return 0


def _init_signer(options: argparse.Namespace, path: Path) -> int:
    from strongroom_security.signers.generating import generate_key, public_path

    made = generate_key(path, curve=_CURVES[options.kind], passphrase=options.passphrase)
    public = public_path(path)
    if options.json:
        print_json(
            {
                "files": [str(path), str(public)],
                "id": made.id,
                "key": f"file:{path}",
                "kind": options.kind,
                "verify": f"file:{public}",
            }
        )
        return 0
    console = new_console()
    console.print(line("made ", (str(path), "bold"), ", which signs: keep it secret"), soft_wrap=True)
    told = ", which verifies: give it to everyone who restores"
    console.print(line("made ", (str(public), "bold"), told), soft_wrap=True)
    console.print(line(("id            ", "dim"), made.id), soft_wrap=True)
    console.print(line(("[sign] key    ", "dim"), f"file:{path}"), soft_wrap=True)
    console.print(line(("[verify] keys ", "dim"), f"file:{public}"), soft_wrap=True)
    return 0


# --------------------------------------------------------------------------------------------------- list


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """A checkpoint's keyrings, newest first; a problem where even its commit is damaged."""

    name: CheckpointName
    is_sealed: bool
    generations: tuple[FoundKeyring, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Here:
    """What the policy calls a recipient, and whether it can open here."""

    uri: str
    can_open: bool


def _list(options: argparse.Namespace, store: Store, history: History, seal: Seal | None) -> int:
    here = {} if seal is None else _here(seal)
    commits, damaged = _chosen(history, options.step)
    _intend(options, commits)
    found = [_listed(store, commit) for commit in commits]
    found.extend(
        _Listed(name=name, is_sealed=False, problem=reason) for name, reason in sorted(damaged.items())
    )
    if options.json:
        print_json(
            {
                "checkpoints": [_listed_json(each, here) for each in found],
                "root": store.uri,
                "run": history.run.run if history.run else None,
            }
        )
        return 0
    _print_listed(new_console(), found, here)
    return 0


def _intend(options: argparse.Namespace, commits: Sequence[Commit]) -> None:
    """Put on record, before any is read, whose keyrings are looked at: a checkpoint's, or a run's.

    Raises:
        AuditError: it was not accepted.
    """
    sealed = [commit for commit in commits if commit.keyring is not None]
    if sealed:
        # Once for all of them: no key is unwrapped, and a run may have thousands.
        options.activity.intend(sealed[0].run, None if options.step is None else sealed[0].name)


def _here(seal: Seal) -> dict[str, _Here]:
    openers = {identity.id for identity in seal.openers}
    named: tuple[Recipient | Identity, ...] = (*seal.identities, *seal.recipients)
    return {each.id: _Here(uri=each.uri, can_open=each.id in openers) for each in named}


def _listed(store: Store, commit: Commit) -> _Listed:
    if commit.keyring is None:
        return _Listed(name=commit.name, is_sealed=False)
    return _Listed(name=commit.name, is_sealed=True, generations=_generations(store, commit))


def _generations(store: Store, commit: Commit) -> tuple[FoundKeyring, ...]:
    """All of them, newest first. What a rotation removes before it is read is no damage: look again."""
    for _ in range(_LOOKS):
        numbers = newest_first(store, commit.name)
        found = tuple(find_keyring(store, commit, number) for number in numbers)
        if not any(each.is_absent for each in found) or newest_first(store, commit.name) == numbers:
            break
    return found


def _listed_json(listed: _Listed, here: dict[str, _Here]) -> dict[str, Any]:
    return {
        **_name_json(listed.name),
        "generations": [_generation_json(found, here) for found in listed.generations],
        "problem": listed.problem,
        "sealed": listed.is_sealed,
    }


def _generation_json(found: FoundKeyring, here: dict[str, _Here]) -> dict[str, Any]:
    keyring = found.keyring
    entries = () if keyring is None else keyring.recipients
    return {
        "created_at_ms": None if keyring is None else keyring.created_at_ms,
        "digest": None if found.digest is None else str(found.digest),
        "files": None if keyring is None else len(keyring.keys),
        "generation": found.generation,
        "problem": None if found.problem is None else str(found.problem),
        "recipients": [
            {
                "can_open": entry.id in here and here[entry.id].can_open,
                "id": entry.id,
                "kind": entry.kind,
                "uri": here[entry.id].uri if entry.id in here else None,
            }
            for entry in entries
        ],
        "wrap": None if keyring is None else keyring.wrap,
    }


def _print_listed(console: Console, found: Sequence[_Listed], here: dict[str, _Here]) -> None:
    table = new_table("STEP", "KEYRING", "MADE", "RECIPIENT", "HERE", right=("STEP", "KEYRING"))
    notes = []
    for listed in found:
        step = str(listed.name.step)
        if listed.problem is not None:
            notes.append(line((f"step {step} ", "bold"), ("is damaged: ", "red"), listed.problem))
        elif not listed.is_sealed:
            table.add_row(step, words.NOTHING, words.NOTHING, "not sealed", words.NOTHING)
        for generation in listed.generations:
            if generation.problem is not None:
                notes.append(
                    line((f"step {step} ", "bold"), ("is damaged: ", "red"), str(generation.problem))
                )
            if generation.keyring is None:
                continue
            for entry in generation.keyring.recipients:
                table.add_row(
                    step,
                    str(generation.generation),
                    words.when(generation.keyring.created_at_ms),
                    entry.id,
                    line(*_who(here.get(entry.id))),
                )
    if table.row_count:
        console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)
    if not found:
        console.print("nothing was committed yet")


def _who(here: _Here | None) -> tuple[str | tuple[str, str], ...]:
    if here is None:
        return (words.NOTHING,)
    return here.uri, (", opens" if here.can_open else ", seals", "green" if here.can_open else "dim")


# ------------------------------------------------------------------------------------------------- rotate


def _rotate(
    options: argparse.Namespace, store: Store, history: History, seal: Seal | None, trust: Trust | None
) -> int:
    change = _change(options, seal)
    commits, damaged = _chosen(history, options.step)
    if isinstance(change, RemoveRecipient):
        _intend(options, commits)
        _check_named(change.id, store, commits)
    if isinstance(change, SetRecipients) and change.since_ms is not None and not options.dry_run:
        sys.stderr.write(f"strongroom: where this is interrupted, go on with --since {change.since_ms}\n")
    with Bar("rotating", counts=True) as bar:

        def show(progress: Progress) -> None:
            bar.show(progress.done, progress.total)

        report = rotate(
            store,
            commits,
            change,
            identities=() if seal is None else seal.openers,
            workers=options.workers,
            calls_per_second=options.rate,
            verify=options.verify,
            remove_old=options.remove_old,
            dry_run=options.dry_run,
            on_progress=show,
            within_s=_WITHIN_S if seal is None else seal.timeout_s,
            trust=trust,
            activity=options.activity,
        )
    unusable = [
        Outcome(name=name, result="failed", error=IntegrityError(reason)) for name, reason in damaged.items()
    ]
    report = Report(outcomes=(*report.outcomes, *unusable), since_ms=report.since_ms)
    if options.json:
        print_json(_report_json(store, history, report, is_dry=options.dry_run))
    else:
        _print_report(new_console(), report, is_dry=options.dry_run)
    return _status(report)


def _change(options: argparse.Namespace, seal: Seal | None) -> Change:
    here = Path()
    if options.verb == "add-recipient":
        return AddRecipient(recipient=open_recipient(options.recipient, base=here))
    if options.verb == "remove-recipient":
        return RemoveRecipient(id=_id_of(options.recipient, seal))
    if options.to is not None:
        recipients = tuple(open_recipient(text, base=here) for text in options.to)
    elif seal is not None:
        recipients = seal.recipients
    else:
        raise ConfigError(
            "nothing says who shall be able to open: name a policy that has [seal], by --security or "
            "STRONGROOM_CONFIG, or recipients by --to"
        )
    needs_time = options.new_checkpoint_key or options.again
    if options.since is not None and not needs_time:
        raise ConfigError("--since goes on with --new-checkpoint-key or --again; name which one it was")
    # Drawn here, so that it can be told before anything is done. See `rotate` for the one more.
    now_ms = SYSTEM_CLOCK.now_ms() + 1 if options.since is None else options.since
    return SetRecipients(
        recipients=recipients,
        new_checkpoint_key=options.new_checkpoint_key,
        again=options.again,
        since_ms=now_ms if needs_time else None,
    )


def _id_of(text: str, seal: Seal | None) -> str:
    """A recipient's id. Where the policy names it, its key need not be at hand any more."""
    if ":" not in text:
        try:
            return check_id(text)
        except StrongroomError as error:
            raise ConfigError(f"{error}; `strongroom keys list` shows those of a run") from None
    named: tuple[Recipient | Identity, ...] = () if seal is None else (*seal.recipients, *seal.identities)
    for each in named:
        if each.uri == text:
            return each.id
    return open_recipient(text, base=Path()).id


def _check_named(recipient_id: str, store: Store, commits: Sequence[Commit]) -> None:
    """Refuse an id that stands nowhere: it may be mistyped, and whoever was meant could still open.

    Raises:
        CheckpointNotFoundError: no keyring names it; tells which ids there are.
    """
    there: set[str] = set()
    for commit in commits:
        if commit.keyring is None:
            continue
        for found in _generations(store, commit):
            if found.keyring is not None:
                there.update(entry.id for entry in found.keyring.recipients)
        if recipient_id in there:
            return
    if there:  # else there is nothing to go by, and what is damaged is told where it is looked at
        raise CheckpointNotFoundError(
            f"no keyring that was looked at names {recipient_id}, so nothing was changed; those that are "
            f"there are {', '.join(sorted(there))}"
        )


def _chosen(history: History, step: int | None) -> tuple[list[Commit], dict[CheckpointName, str]]:
    """The commits that are meant, newest first; and of all, those that are damaged.

    Raises:
        CheckpointNotFoundError: no checkpoint of that step.
        IntegrityError: it is damaged.
    """
    if step is not None:
        return [history.whole(history.at_step(step))], {}
    whole = [history.commits[name] for name in history.line.ranked if name in history.commits]
    return whole, dict(history.damaged)


def _print_report(console: Console, report: Report, *, is_dry: bool) -> None:
    for outcome in report.outcomes:
        step = f"step {outcome.name.step}"
        for reason in outcome.passed_over:
            console.print(
                line((step, "bold"), ": ", ("passed over", "yellow"), f": {reason}"), soft_wrap=True
            )
        if outcome.error is not None:
            console.print(line((step, "bold"), ": ", ("failed", "red"), f": {outcome.error}"), soft_wrap=True)
    told = {
        "rotated": "rotated",
        "would rotate": "would be rotated",
        "already": "as wanted before",
        "unsealed": "not sealed",
        "gone": "removed meanwhile",
        "failed": "failed",
    }
    counts = [f"{report.count(result):,} {told[result]}" for result in _RESULTS if report.count(result)]
    removed = sum(len(outcome.removed) for outcome in report.outcomes)
    if removed:
        older = words.count(removed, "older keyring")
        counts.append(f"{older} would be removed" if is_dry else f"{older} removed")
    calls = f"{words.count(report.calls, 'call')} to key services"
    console.print(
        line(("; ".join(counts) or "nothing was committed yet", "bold"), f"; {calls}"), soft_wrap=True
    )
    unverified = sum(
        outcome.result in ("rotated", "already") and not outcome.verified for outcome in report.outcomes
    )
    if unverified and not is_dry:
        console.print(
            line(
                (
                    f"{words.count(unverified, 'keyring')} not opened: no key that lies here opens them. ",
                    "dim",
                ),
                ("Before an old key goes, run this again with --verify", "dim"),
            ),
            soft_wrap=True,
        )


def _report_json(store: Store, history: History, report: Report, *, is_dry: bool) -> dict[str, Any]:
    return {
        "calls": report.calls,
        "checkpoints": [_outcome_json(outcome) for outcome in report.outcomes],
        "counts": {result.replace(" ", "_"): report.count(result) for result in _RESULTS},
        "dry_run": is_dry,
        "root": store.uri,
        "run": history.run.run if history.run else None,
        "since_ms": report.since_ms,
    }


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    error = outcome.error
    return {
        **_name_json(outcome.name),
        "calls": outcome.calls,
        "error": None if error is None else {"message": str(error), "status": _status_of(error)},
        "generation": outcome.generation,
        "passed_over": list(outcome.passed_over),
        "removed": list(outcome.removed),
        "result": outcome.result.replace(" ", "_"),
        "source": outcome.source,
        "verified": outcome.verified,
    }


def _name_json(name: CheckpointName) -> dict[str, Any]:
    return {"attempt": name.attempt, "folder": name.folder, "launch": name.launch, "step": name.step}


def _status(report: Report) -> int:
    """Damage is certain, so it goes first; then what may pass or be granted."""
    found = {_status_of(outcome.error) for outcome in report.failed if outcome.error is not None}
    return next((status for status in (_DAMAGED, _UNREADABLE, _USAGE) if status in found), 0)


def _status_of(error: StrongroomError) -> int:
    if isinstance(error, IntegrityError):
        return _DAMAGED
    return _USAGE if isinstance(error, ConfigError) else _UNREADABLE
