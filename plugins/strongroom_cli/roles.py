"""``strongroom roles``: writes the policies of roles, compares what stands with them, and makes grants."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path
from typing import Any, Final

from strongroom.config import SYSTEM_CLOCK
from strongroom.errors import ConfigError, FormatError
from strongroom_cli import words
from strongroom_cli.console import line, new_console, new_table, print_json
from strongroom_cli.roles_arguments import ROLE_NAMES
from strongroom_security.roles.comparing import Finding, Verdict
from strongroom_security.roles.definitions import LOG_ROLES, ROLES, Definition, LogRole, any_role
from strongroom_security.roles.grants import APPROVERS_NEEDED, Grant, approve, read_grant, unapproved
from strongroom_security.roles.rendering import render_all, render_role, text_of
from strongroom_security.roles.site import Oidc, Site, Transition
from strongroom_security.signers.opening import open_signer

__all__ = ["run"]

_GAPS: Final = 1
_UNREADABLE: Final = 4
_LIMIT_BYTES: Final = 65_536
_HOUR_MS: Final = 3_600_000

_STYLES: Final[dict[Verdict, str]] = {"fine": "green", "gap": "bold red", "unknown": "yellow"}


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    if options.verb == "render":
        return _render(options)
    if options.verb == "check":
        return _check(options)
    if options.verb == "grant":
        return _grant(options)
    return _approve(options)


def _site(options: argparse.Namespace) -> Site:
    return Site(
        bucket=options.bucket,
        prefix=options.prefix if options.prefix.endswith("/") else f"{options.prefix}/",
        run=options.run,
        account=options.account,
        partition=options.partition,
        kms_keys=tuple(options.kms_key),
        sign_key=options.sign_key,
        release_key=options.release_key,
        audit_bucket=options.audit_bucket,
        admin=options.admin,
        role_prefix=options.role_prefix,
        releases=options.releases if options.releases.endswith("/") else f"{options.releases}/",
        oidc=_oidc(options),
        lock_days=options.lock_days,
        audit_lock_days=options.audit_lock_days,
        undelete_days=options.undelete_days,
        transitions=tuple(_transition(text) for text in options.transition),
    )


def _oidc(options: argparse.Namespace) -> Oidc | None:
    provider, audience = options.oidc_provider, options.audience
    if not any((provider, audience, options.subject)):
        return None
    if provider is None or audience is None or not options.subject:
        raise ConfigError("--oidc-provider, --audience and --subject belong together; give all three or none")
    return Oidc(provider=provider, audience=audience, subjects=_subjects(options))


def _subjects(options: argparse.Namespace) -> dict[str, str]:
    """Whose token takes which role up: ``ROLE=SUB``, or ``SUB`` where one role alone is asked for."""
    named = options.role if isinstance(options.role, list) else [options.role]
    only = named[0] if len(set(named)) == 1 else None
    found: dict[str, str] = {}
    for text in options.subject:
        role, is_given, subject = text.partition("=")
        if not is_given or role not in ROLE_NAMES:  # a subject may hold '=', too
            role, subject = only, text
        if role is None:
            raise ConfigError(
                f"--subject: {text!r:.100} would take up every role, so that a trainer's token reads what it "
                f"must not; give each role a subject of its own, as trainer-writer={text[:60]}"
            )
        if role in found:
            raise ConfigError(f"--subject: {role} has two, {found[role]!r:.100} and {subject!r:.100}")
        found[role] = subject
    return found


def _transition(text: str) -> Transition:
    days, _, storage_class = text.partition(":")
    if not (days.isascii() and days.isdigit() and len(days) < 6):
        raise ConfigError(f"--transition: expected DAYS:CLASS, as 90:GLACIER_IR, got {text!r:.60}")
    return Transition(days=int(days), storage_class=storage_class)


# ----------------------------------------------------------------------------------------------------- render


def _render(options: argparse.Namespace) -> int:
    site = _site(options)
    files = render_all(site) if options.all else render_role(any_role(options.role), site)
    if options.out is None:
        if options.json:
            print_json({"files": files})
        else:
            sys.stdout.write(text_of(files))
        return 0
    folder = Path(options.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, document in files.items():
            (folder / name).write_text(text_of(document), encoding="ascii")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{folder} cannot be written: {reason}") from error
    if options.json:
        print_json({"files": sorted(files), "folder": str(folder)})
        return 0
    console = new_console()
    for name in files:
        console.print(line("wrote ", (str(folder / name), "bold")), soft_wrap=True)
    return 0


# ------------------------------------------------------------------------------------------------------ check


def _check(options: argparse.Namespace) -> int:
    from strongroom_security.roles.comparing import compare
    from strongroom_security.roles.looking import Looker

    site = _site(options)
    names = options.role
    roles: tuple[Definition | LogRole, ...]
    if names is None:
        roles = (*ROLES, *(LOG_ROLES if site.audit_bucket is not None else ()))
    else:
        roles = tuple(any_role(name) for name in dict.fromkeys(names))
    looker = Looker(profile=options.profile)
    findings = compare(site, roles, looker.look(site, roles), named=names is not None)
    status = _status_of(findings)
    if options.json:
        print_json({"bucket": site.bucket, "findings": [each.to_json() for each in findings]})
        return status
    _print(findings)
    return status


def _status_of(findings: list[Finding]) -> int:
    verdicts = {each.verdict for each in findings}
    if "gap" in verdicts:
        return _GAPS
    return _UNREADABLE if "unknown" in verdicts else 0


def _print(findings: list[Finding]) -> None:
    console = new_console()
    table = new_table("", "WHAT", "FOUND")
    for each in findings:
        table.add_row(line((each.verdict, _STYLES[each.verdict])), line(each.what), line(each.found))
    console.print(table)
    for each in findings:
        if each.verdict != "fine":
            console.print(line((f"{each.what}: ", "bold"), each.advice), soft_wrap=True)
    gaps, unknown = (sum(each.verdict == verdict for each in findings) for verdict in ("gap", "unknown"))
    console.print(
        line(
            f"{words.count(gaps, 'gap')}, {unknown} unknown, {len(findings) - gaps - unknown} as it should be"
        )
    )


# ----------------------------------------------------------------------------------------------------- grants


def _grant(options: argparse.Namespace) -> int:
    path, now_ms = Path(options.file), SYSTEM_CLOCK.now_ms()
    try:
        grant = Grant(
            role=options.role,
            run=options.run,
            who=options.who,
            reason=options.reason,
            not_before_ms=now_ms,
            not_after_ms=now_ms + options.hours * _HOUR_MS,
            nonce=secrets.token_hex(16),
        )
    except FormatError as error:  # given on the command line: nothing is damaged
        raise ConfigError(str(error)) from None
    _say(options, grant)
    data = unapproved(grant)
    if options.approver is not None:
        signer = open_signer(options.approver, base=Path(), passphrase=options.passphrase)
        data = approve(data, str(path), signer)
    try:
        with open(path, "xb") as file:
            file.write(data)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be made: {getattr(error, 'strerror', None) or error}") from error
    return _tell(options, path, data)


def _approve(options: argparse.Namespace) -> int:
    path = Path(options.file)
    try:
        with open(path, "rb") as file:
            data = file.read(_LIMIT_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if options.key is None:
        return _tell(options, path, data)
    _say(options, read_grant(data, str(path))[0])
    signer = open_signer(options.key, base=Path(), passphrase=options.passphrase)
    data = approve(data, str(path), signer)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    return _tell(options, path, data)


def _say(options: argparse.Namespace, grant: Grant) -> None:
    """Put on record which grant it is, before anybody signs it."""
    options.activity.note(
        grant=str(grant.digest),
        role=grant.role,
        who=grant.who,
        why=grant.reason,
        not_after_ms=grant.not_after_ms,
    )
    options.activity.intend(grant.run, None)


def _tell(options: argparse.Namespace, path: Path, data: bytes) -> int:
    from strongroom_security.roles.grants import signed_by

    grant, _ = read_grant(data, str(path))
    claimed = signed_by(data, str(path))
    if options.json:
        said: dict[str, Any] = {
            "digest": str(grant.digest),
            "file": str(path),
            "not_after_ms": grant.not_after_ms,
            "not_before_ms": grant.not_before_ms,
            "reason": grant.reason,
            "role": grant.role,
            "run": grant.run,
            "signatures": list(claimed),
            "who": grant.who,
        }
        print_json(said)
        return 0
    console = new_console()
    console.print(line((str(path), "bold"), f": {grant.who} may be {grant.role} on run {grant.run}"))
    console.print(line(f"from {words.when(grant.not_before_ms)} to {words.when(grant.not_after_ms)}"))
    console.print(line(f"because: {grant.reason}"), soft_wrap=True)
    for key_id in claimed:
        console.print(line(("signature by ", "dim"), key_id), soft_wrap=True)
    missing = APPROVERS_NEEDED - len(claimed)
    if missing > 0:
        console.print(line((f"{words.count(missing, 'approval')} missing", "yellow")))
    return 0
