"""``strongroom export``: a checkpoint's model as a folder of safetensors, signed anew for its receivers.

What can be refused is refused before torch is imported and a shard is read.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from strongroom.auditing import Activity
from strongroom.errors import CheckpointNotFoundError, ConfigError, IntegrityError
from strongroom.exporting.newfolder import check_absent
from strongroom.exporting.shardfiles import parse_size
from strongroom.opened import OpenedCheckpoint, open_checkpoint
from strongroom.roles import Duty
from strongroom.signing import Guard
from strongroom.stores.base import Store
from strongroom.stores.limited import unlimited
from strongroom.stores.local import LocalStore
from strongroom_cli import words
from strongroom_cli.auditing import open_store_of
from strongroom_cli.console import Bar, line, new_console, new_table, print_json
from strongroom_cli.standing import Standing, read_history, run_of, standings
from strongroom_security import SecurityPolicy

if TYPE_CHECKING:
    from strongroom.exporting.export import Exported
    from strongroom_security.sign import Sign

__all__ = ["run"]

_MAX_CONFIG_BYTES: Final = 16 << 20
_SUBJECT: Final = "model"
"""What the signed statement calls the folder, wherever that is put: a folder's own name may be a secret."""

_FILES_SHOWN: Final = 20

_UNSIGNED: Final = (
    "the folder is NOT SIGNED: no receiver can tell who made it, or whether it was changed; --sign KEY, or "
    "[sign] of the policy, says who signs"
)


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    policy = options.policy
    folder = Path(options.to)
    check_absent(folder.absolute())
    max_shard_bytes = parse_size(options.max_shard_size)
    config = _read_config(Path(options.config)) if options.config is not None else None
    further = _further(options.add)
    sign = _sign(options, policy)
    store = open_store_of(options, Duty.RESTORE)
    _check_outside(store, folder)
    standing, opened = _open(store, options.step, options.guard, options.activity)

    from strongroom.exporting.export import export

    with Bar("exporting") as bar:
        exported = export(
            opened,
            folder,
            key=options.key,
            only=options.only,
            strip_prefix=options.strip_prefix,
            max_shard_bytes=max_shard_bytes,
            config=config,
            further=further,
            sign=(lambda resources: _bundle(resources, sign)) if sign is not None else None,
            on_progress=bar.show,
            activity=options.activity,
        )
    if options.json:
        print_json(_to_json(store.uri, standing, folder, exported, sign))
    else:
        _print(new_console(), standing, opened, folder, exported, sign)
    if sign is None:
        sys.stderr.write(f"strongroom: {_UNSIGNED}\n")
    return 0


def _open(
    store: Store, step: int | None, guard: Guard, activity: Activity
) -> tuple[Standing, OpenedCheckpoint]:
    """The checkpoint that is asked for, judged by the policy before anything of it is parsed."""
    history = read_history(store, guard)
    activity.about(run=run_of(history))
    if step is None and not history.line.newest_first:
        raise CheckpointNotFoundError(f"nothing was committed yet in {store.uri}")
    name = history.at_step(step) if step is not None else history.line.newest_first[0]
    activity.about(checkpoint=name)
    commit = history.commits.get(name)
    if commit is None:
        raise IntegrityError(f"step {name.step} cannot be exported: {history.damaged[name]}")
    activity.intend(commit.run, name)
    opened = open_checkpoint(store, commit, guard)
    activity.vouched(opened.signers)
    newest = next((each for each in history.line.newest_first if each in history.commits), None)
    if guard.floor is not None and newest is not None:
        # An older step may be asked for; but the root must not be an old copy.
        if newest != name:
            open_checkpoint(store, history.commits[newest], guard)
        guard.floor.check(store.uri, history.commits[newest])
    return next(item for item in standings(history) if item.name == name), opened


def _check_outside(store: Store, folder: Path) -> None:
    """Nothing but checkpoints belongs in a run's root: ``verify`` would call the folder unexpected."""
    beneath = unlimited(store)
    if isinstance(beneath, LocalStore) and folder.resolve().is_relative_to(Path(beneath.root).resolve()):
        raise ConfigError(f"{folder} would lie within the run {store.uri}; name a folder outside of it")


# ---------------------------------------------------------------------------------- what is put in


def _read_config(path: Path) -> bytes:
    """A file that is to become ``config.json``, as it is."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        is_object = len(data) <= _MAX_CONFIG_BYTES and isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise ConfigError(f"{path} cannot be config.json: it is no JSON object, or a very large one")
    return data


def _further(paths: list[str]) -> dict[str, Path]:
    further: dict[str, Path] = {}
    for text in paths:
        path = Path(text)
        if path.name in further:
            raise ConfigError(f"--add names two files that are called {path.name!r}")
        if not path.is_file():
            raise ConfigError(f"{path}, which --add names, is no file")
        further[path.name] = path
    return further


# -------------------------------------------------------------------------------------- who signs


def _sign(options: argparse.Namespace, policy: object) -> Sign | None:
    """Who signs; asked for the public key at once, so that a key that cannot be had is told first."""
    if options.sign is None:
        if options.certificate is not None or options.passphrase is not None:
            raise ConfigError("--certificate and --passphrase belong to --sign KEY, which is not given")
        sign = policy.sign if isinstance(policy, SecurityPolicy) else None
    else:
        from strongroom_security.sign import Sign

        sign = Sign(key=options.sign, certificate=options.certificate, passphrase=options.passphrase)
    if sign is not None:
        sign.signer.public_key  # noqa: B018
    return sign


def _bundle(resources: Mapping[str, bytes], sign: Sign) -> bytes:
    """An OpenSSF Model Signing bundle over what was written: the digests are of the bytes that were.

    What is read back could already be something else.
    """
    from strongroom.exporting.export import SIGNATURE_NAME
    from strongroom_security import oms

    payload = oms.statement(resources, subject=_SUBJECT, ignored=(SIGNATURE_NAME,))
    return oms.sign_payload(payload, sign.signer, within_s=sign.timeout_s)


# -------------------------------------------------------------------------------------------- output


def _to_json(
    uri: str, standing: Standing, folder: Path, exported: Exported, sign: Sign | None
) -> dict[str, Any]:
    return {
        "checkpoint": standing.to_json(),
        "files": [
            {"digest": str(file.digest), "file": file.name, "size_bytes": file.size_bytes}
            for file in exported.files
        ],
        "format": "safetensors",
        "has_config": exported.has_config,
        "key": exported.key,
        "left_out": list(exported.left_out),
        "root": uri,
        "signature": _signature_json(sign),
        "size_bytes": exported.size_bytes,
        "tensors": exported.tensors,
        "tied": dict(exported.tied),
        "to": str(folder),
    }


def _signature_json(sign: Sign | None) -> dict[str, Any] | None:
    if sign is None:
        return None
    from strongroom.exporting.export import SIGNATURE_NAME

    signer = sign.signer
    return {"file": SIGNATURE_NAME, "key_id": signer.public_key.id, "kind": signer.kind, "key": signer.uri}


def _print(
    console: Console,
    standing: Standing,
    opened: OpenedCheckpoint,
    folder: Path,
    exported: Exported,
    sign: Sign | None,
) -> None:
    table = new_table("FILE", "SIZE", "SHA-256", right=("SIZE",))
    for file in exported.files[:_FILES_SHOWN]:
        table.add_row(line(file.name), words.size(file.size_bytes), f"{file.digest.value.hex()[:16]}...")
    console.print(table)
    if len(exported.files) > _FILES_SHOWN:
        console.print(line((f"... {len(exported.files) - _FILES_SHOWN:,} more", "dim")))
    console.print(
        line(
            ("exported", "bold green"),
            f": step {standing.name.step} of run {opened.manifest.run}, {exported.key}: "
            f"{words.count(exported.tensors, 'tensor')}, {words.size(exported.size_bytes)}, to {folder}",
        ),
        soft_wrap=True,
    )
    for alias, kept in list(exported.tied.items())[:_FILES_SHOWN]:
        console.print(line(f"  {alias}", (" is ", "dim"), kept), soft_wrap=True)
    for name in exported.left_out[:_FILES_SHOWN]:
        console.print(line(("left out: ", "yellow"), name, (", which is no tensor", "dim")), soft_wrap=True)
    if not exported.has_config:
        told = "no config.json: the checkpoint has no model_config in its provenance; --config FILE gives one"
        console.print(line((told, "yellow")), soft_wrap=True)
    if sign is not None:
        _print_signature(console, folder, sign)


def _print_signature(console: Console, folder: Path, sign: Sign) -> None:
    from strongroom.exporting.export import SIGNATURE_NAME

    signer = sign.signer
    where = shlex.quote(str(folder))
    how = f"{where} --signature {shlex.quote(str(folder / SIGNATURE_NAME))}"
    how = (
        f"certificate {how} --certificate_chain ROOT.pem"
        if signer.certificates
        else f"key {how} --public_key SIGNER.pub"
    )
    console.print(line(f"signed by {signer.uri}, key {signer.public_key.id}"), soft_wrap=True)
    console.print(line(("check it with: ", "dim"), f"model_signing verify {how}"), soft_wrap=True)
