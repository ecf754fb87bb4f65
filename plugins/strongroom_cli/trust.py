"""``strongroom trust``: shows the list of trusted keys, and writes its next version, signed."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from strongroom import layout
from strongroom.config import SYSTEM_CLOCK
from strongroom.digest import sha256_of
from strongroom.errors import (
    ConfigError,
    FormatError,
    IntegrityError,
    ObjectNotFoundError,
    StoreError,
    UntrustedError,
)
from strongroom.manifest import MANIFEST_BOUNDS
from strongroom.roles import Duty, open_root
from strongroom.signing import Guard
from strongroom_cli import words
from strongroom_cli.console import line, new_console, new_table, print_json
from strongroom_cli.standing import read_history
from strongroom_security.floors import FileFloor, FolderFloor
from strongroom_security.publickeys import PublicKey
from strongroom_security.signers.base import Signer
from strongroom_security.signers.opening import open_public_key, open_signer
from strongroom_security.trust import ManifestTrust
from strongroom_security.trustlist import (
    Revocation,
    TrustedKey,
    TrustList,
    UpTo,
    add_signature,
    root_set_id,
    sign_trust_list,
    unverified,
)

__all__ = ["run"]

_LIMIT_BYTES: Final = 12 << 20
_ID_SHOWN: Final = 16


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    path = Path(options.file)
    options.activity.note(file=path.name)
    if options.verb == "show":
        return _show(options, path)
    signers = [
        open_signer(text, base=Path(), passphrase=options.passphrase if text.startswith("file:") else None)
        for text in options.root_key
    ]
    if options.verb == "sign":
        return _sign(options, path, signers)
    if options.verb == "init":
        found = TrustList(version=1, issued_at_ms=SYSTEM_CLOCK.now_ms())
        return _write(options, path, _renewed(found, options.expires), signers)
    data = _read(path)
    # Whoever signs the next version vouches for all of it, so one of them must have signed this one.
    found = TrustList.verify(data, str(path), [signer.public_key for signer in signers])
    memory = _memory(options, signers)
    if memory is not None:
        # Else an older list that was put back would be signed anew, without what was revoked since.
        memory.check(found)
    changed = replace(found, version=found.version + 1, issued_at_ms=SYSTEM_CLOCK.now_ms())
    changed = _renewed(changed, options.expires)
    if options.verb == "add-key":
        changed = _with_key(changed, options)
    elif options.verb == "revoke":
        changed = _with_revocation(changed, options)
    return _write(options, path, changed, signers, was=found, memory=memory)


# --------------------------------------------------------------------------------------- what is remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """The policy's floor, and by whose signatures it knows the list.

    Attributes:
        roots: the policy's, or whoever signs now where it names no list.
        threshold: how many of them have to have signed a list that is remembered.
    """

    floor: FileFloor | FolderFloor
    roots: tuple[PublicKey, ...]
    threshold: int

    def check(self, found: TrustList) -> None:
        """Raise RollbackError where a newer list was seen, or another one of the same version."""
        self.floor.check_trust(root_set_id(self.roots), found.version, found.digest)

    def lift(self, data: bytes, what: str) -> str | None:
        """Remember a list that is signed as the policy demands; why it is not remembered, or None."""
        try:
            found = TrustList.verify(data, what, self.roots, self.threshold)
            self.floor.lift_trust(root_set_id(self.roots), found.version, found.digest)
        except UntrustedError as error:
            # Remembered now, it would have every policy refuse the list before while this one lacks names.
            return f"not yet remembered by {self.floor.uri}: {error}"
        except (ConfigError, StoreError) as error:
            return f"NOT remembered by {self.floor.uri}: {error}"
        return None


def _memory(options: argparse.Namespace, signers: Sequence[Signer]) -> _Memory | None:
    guard: Guard = options.guard
    if not isinstance(guard.floor, FileFloor | FolderFloor):
        return None
    listed = guard.trust.trust_list if isinstance(guard.trust, ManifestTrust) else None
    if listed is not None and listed.roots:
        return _Memory(floor=guard.floor, roots=listed.roots, threshold=listed.threshold)
    return _Memory(floor=guard.floor, roots=tuple(each.public_key for each in signers), threshold=1)


# --------------------------------------------------------------------------------------------------- changes


def _renewed(trust: TrustList, expires_at_ms: int | None) -> TrustList:
    if expires_at_ms is not None:
        expires_at_ms = None if expires_at_ms < 0 else expires_at_ms
    else:
        expires_at_ms = trust.expires_at_ms
    if expires_at_ms is not None and expires_at_ms <= trust.issued_at_ms:
        raise ConfigError(
            f"the list would have expired when it is issued ({words.when(expires_at_ms)}); give --expires "
            f"with a later time, or --expires never"
        )
    return replace(trust, expires_at_ms=expires_at_ms)


def _with_key(trust: TrustList, options: argparse.Namespace) -> TrustList:
    key = _public_key(options.public)
    with _told_as_usage():
        added = TrustedKey(
            key=key,
            name=options.name,
            not_before_ms=options.not_before,
            not_after_ms=options.not_after,
        )
    listed = trust.key(added.key.id)
    if listed is not None and not options.replace:
        raise ConfigError(
            f"{added.key.id} is listed already, as {listed.name!r}; give --replace to change its name and "
            f"window"
        )
    others = [each for each in trust.keys if each.key != added.key]
    with _told_as_usage():
        return replace(trust, keys=tuple(sorted([*others, added], key=lambda each: each.key.id)))


def _with_revocation(trust: TrustList, options: argparse.Namespace) -> TrustList:
    key_id = _public_key(options.key).id if ":" in options.key else options.key
    guard = options.guard
    if options.up_to and guard.trust is None:
        sys.stderr.write(
            "strongroom: no policy here demands signatures, so what --up-to names was held against its own "
            "digests alone; give --security, with the [verify] that restores go by\n"
        )
    up_to = tuple(dict.fromkeys(_named(text, options) for text in options.up_to))
    options.activity.note(key=key_id, why=options.reason)
    with _told_as_usage():
        added = Revocation(id=key_id, reason=options.reason, revoked_at_ms=SYSTEM_CLOCK.now_ms(), up_to=up_to)
    if trust.revocation(key_id) is not None and not options.replace:
        raise ConfigError(f"{key_id} is revoked already; give --replace to change the reason or --up-to")
    others = [each for each in trust.revoked if each.id != key_id]
    with _told_as_usage():
        return replace(trust, revoked=tuple(sorted([*others, added], key=lambda each: each.id)))


@contextlib.contextmanager
def _told_as_usage() -> Iterator[None]:
    """What cannot stand in a list was given on the command line: nothing is damaged."""
    try:
        yield
    except FormatError as error:
        raise ConfigError(str(error)) from None


def _named(text: str, options: argparse.Namespace) -> UpTo:
    """The checkpoint that ``ROOT:STEP`` means, held against its manifest and, if there is one, the policy.

    Raises:
        IntegrityError: it is damaged, or not signed as the policy demands.
    """
    root, colon, step = text.rpartition(":")
    if not colon or not root or not step.isascii() or not step.isdigit() or len(step) > 12:
        raise ConfigError(f"--up-to takes ROOT:STEP, as runs/a:1200; got {text!r:.100}")
    store = open_root(root, options.policy, Duty.RESTORE)
    guard: Guard = options.guard
    history = read_history(store)
    commit = history.whole(history.at_step(int(step)))
    options.activity.intend(commit.run, commit.name, root=store.uri)
    key = layout.data_key(commit.name, layout.MANIFEST)
    try:
        manifest = store.read(key, limit_bytes=MANIFEST_BOUNDS.length_bytes)
    except ObjectNotFoundError:
        raise IntegrityError(f"{key} is absent, and COMMIT pins it") from None
    if not sha256_of(manifest).matches(commit.manifest):
        raise IntegrityError(f"{key} has digest {sha256_of(manifest)}, and COMMIT pins {commit.manifest}")
    if guard.trust is not None:
        guard.trust.judge(store, commit, manifest)
    return UpTo(run=commit.run, checkpoint=commit.ref)


def _public_key(text: str) -> PublicKey:
    return open_public_key(text if ":" in text else f"file:{text}", base=Path())


# --------------------------------------------------------------------------------------------- files, signing


def _sign(options: argparse.Namespace, path: Path, signers: Sequence[Signer]) -> int:
    data = _read(path)
    memory = _memory(options, signers)
    if memory is not None:
        memory.check(unverified(data, str(path))[0])
    for signer in signers:
        data = add_signature(data, signer)
    _replace(path, data)
    trust, claimed = unverified(data, str(path))
    note = memory.lift(data, str(path)) if memory is not None else None
    return _tell(options, path, trust, claimed, "signed", note=note)


def _write(
    options: argparse.Namespace,
    path: Path,
    trust: TrustList,
    signers: Sequence[Signer],
    *,
    was: TrustList | None = None,
    memory: _Memory | None = None,
) -> int:
    if was is None and os.path.lexists(path):
        raise ConfigError(f"{path} exists; a list is begun in a file that did not exist")
    with _told_as_usage():
        data = sign_trust_list(trust, signers)
    _replace(path, data)
    note = memory.lift(data, str(path)) if memory is not None else None
    claimed = [signer.public_key.id for signer in signers]
    status = _tell(options, path, trust, claimed, "wrote", was=was, note=note)
    if options.verb == "revoke" and not options.json:
        _tell_of_unlisted(trust)
    return status


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_LIMIT_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero character
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _replace(path: Path, data: bytes) -> None:
    """Put a list in the place of the one before, all at once and durably."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error


# --------------------------------------------------------------------------------------------------- telling


def _show(options: argparse.Namespace, path: Path) -> int:
    data = _read(path)
    roots = [_public_key(text) for text in options.root or ()]
    if not roots and options.threshold != 1:
        raise ConfigError("--threshold is of the roots that --root names, and it names none")
    if roots:
        TrustList.verify(data, str(path), roots, options.threshold)
    trust, claimed = unverified(data, str(path))
    return _tell(options, path, trust, claimed, "verified" if roots else "NOT VERIFIED, for want of --root:")


def _tell(
    options: argparse.Namespace,
    path: Path,
    trust: TrustList,
    claimed: Sequence[str],
    did: str,
    *,
    was: TrustList | None = None,
    note: str | None = None,
) -> int:
    if options.json:
        said = _to_json(path, trust, claimed, is_verified=did in ("verified", "wrote"))
        said["previous_version"] = None if was is None else was.version
        said["note"] = note
        print_json(said)
        return 0
    console = new_console()
    before = "" if was is None else f" (was {was.version})"
    console.print(line(f"{did} ", (str(path), "bold"), f", version {trust.version}{before}"), soft_wrap=True)
    if note is not None:
        console.print(line((note, "yellow")), soft_wrap=True)
    expires = trust.expires_at_ms
    until = "never expires" if expires is None else f"expires {words.when(expires)}"
    if expires is not None and expires <= SYSTEM_CLOCK.now_ms():
        until = f"EXPIRED {words.when(expires)}"
    console.print(line((f"issued {words.when(trust.issued_at_ms)}, {until}", "dim")), soft_wrap=True)
    for key_id in claimed:
        console.print(line(("signature by ", "dim"), key_id), soft_wrap=True)
    _print_keys(console, trust)
    return 0


def _tell_of_unlisted(trust: TrustList) -> None:
    """A mistyped id revokes nobody."""
    for revocation in trust.revoked:
        if trust.key(revocation.id) is None:
            note = f"{revocation.id} is not among the keys listed: see that it is the one that is meant"
            new_console().print(line((note, "yellow")), soft_wrap=True)


def _print_keys(console: Console, trust: TrustList) -> None:
    if trust.keys:
        table = new_table("KEY", "NAME", "FROM", "UNTIL", "")
        for each in trust.keys:
            revoked = "REVOKED" if trust.revocation(each.key.id) is not None else ""
            table.add_row(
                line((each.key.id, "bold")),
                line(each.name),
                line(words.when(each.not_before_ms)),
                line(words.when(each.not_after_ms)),
                line((revoked, "bold red")),
            )
        console.print(table)
    for revocation in trust.revoked:
        console.print(
            line(
                ("revoked ", "bold red"),
                revocation.id,
                f" {words.when(revocation.revoked_at_ms)}: {revocation.reason}",
            ),
            soft_wrap=True,
        )
        for named in revocation.up_to:
            console.print(
                line(
                    f"  but for {named.checkpoint.name} of run {named.run}, and what it came from "
                    f"({str(named.checkpoint.manifest)[: 7 + _ID_SHOWN]}...)"
                ),
                soft_wrap=True,
            )


def _to_json(path: Path, trust: TrustList, claimed: Sequence[str], *, is_verified: bool) -> dict[str, Any]:
    return {
        "digest": str(trust.digest),
        "expires_at_ms": trust.expires_at_ms,
        "file": str(path),
        "issued_at_ms": trust.issued_at_ms,
        "keys": [
            {
                "id": each.key.id,
                "name": each.name,
                "not_after_ms": each.not_after_ms,
                "not_before_ms": each.not_before_ms,
            }
            for each in trust.keys
        ],
        "revoked": [
            {
                "id": each.id,
                "reason": each.reason,
                "revoked_at_ms": each.revoked_at_ms,
                "up_to": [{**named.checkpoint.to_json(), "run": named.run} for named in each.up_to],
            }
            for each in trust.revoked
        ],
        "signatures": list(claimed),
        "verified": is_verified,
        "version": trust.version,
    }
