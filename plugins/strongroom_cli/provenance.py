"""``strongroom provenance``: where a checkpoint comes from, for people, programs, and other tools' formats.

What is told was verified; no tensor is read. A SLSA statement is bound to the same subject as the
checkpoint's signature, so that whoever has verified one knows what the other is about.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final

from rich.console import Console

from strongroom import layout
from strongroom.digest import sha256_of
from strongroom.errors import ConfigError, FormatError, IntegrityError
from strongroom.manifest import MANIFEST_BOUNDS
from strongroom.opened import OpenedCheckpoint, open_checkpoint
from strongroom.provenance import openlineage, slsa
from strongroom.provenance.records import Record
from strongroom.roles import Duty
from strongroom_cli import words
from strongroom_cli.auditing import open_store_of
from strongroom_cli.console import line, new_console, print_json
from strongroom_cli.outline import outline, plain
from strongroom_cli.show import read_provenance
from strongroom_cli.standing import read_history, run_of

__all__ = ["FORMATS", "record_of", "run", "slsa_statement"]

FORMATS: Final = ("json", "slsa", "openlineage")

_LABEL_WIDTH: Final = 12


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    form = "json" if options.json and options.format is None else options.format
    if options.sign and form != "slsa":
        raise ConfigError("--sign signs a statement, which --format slsa makes; give both")
    store = open_store_of(options, Duty.RESTORE)
    history = read_history(store, options.guard)
    options.activity.about(run=run_of(history))
    name = history.at_step(options.step) if options.step is not None else history.newest()
    options.activity.about(checkpoint=name)
    commit = history.whole(name)
    options.activity.intend(commit.run, name)
    opened = open_checkpoint(store, commit, options.guard)
    options.activity.vouched(opened.signers)
    try:
        record = record_of(store.uri, opened)
    except RecursionError:
        raise FormatError(f"the provenance of {name} nests deeper than any that is written") from None
    if form is None:
        _print(new_console(), record, opened)
    elif form == "json":
        print_json(_to_json(record))
    elif form == "openlineage":
        print_json(openlineage.run_event(record))
    else:
        statement = slsa_statement(record, _stored_manifest(opened), builder=options.builder or slsa.BUILDER)
        sys.stdout.write((_signed(statement, options) if options.sign else statement).decode() + "\n")
    return 0


def record_of(root: str, opened: OpenedCheckpoint) -> Record:
    """What a checkpoint's documents say of where it comes from, as plain JSON.

    Raises:
        IntegrityError: they are damaged.
        NoKeyError, KeyServiceError: they are sealed, and cannot be opened here.
    """
    document = read_provenance(opened)
    given, collected, metrics = (
        _object(plain(document.get(name)))  # A dict with keys that are no texts stays the node that it is.
        for name in ("provenance", "collected", "metrics")
    )
    return Record(
        root=root,
        commit=opened.commit,
        manifest=opened.manifest,
        given=given,
        collected=collected,
        metrics=metrics,
        tags=document["tags"],
        producer=document["producer"],
    )


def slsa_statement(record: Record, manifest: bytes, *, builder: str = slsa.BUILDER) -> bytes:
    """The payload of an in-toto statement about what the checkpoint's signature is about.

    Args:
        manifest: as it is stored: its notes are signed too, and written anew it would have none.
        builder: URI of whoever vouches for how it was made.
    """
    from strongroom_security import oms
    from strongroom_security.signing import resources_of

    resources = resources_of(manifest, record.manifest.files)
    return oms.attest(
        {"data": oms.subject_digest(resources)}, slsa.PREDICATE_TYPE, slsa.predicate(record, builder=builder)
    )


def _stored_manifest(opened: OpenedCheckpoint) -> bytes:
    """The manifest's bytes, which must be those that were verified."""
    what = f"{layout.MANIFEST} of {opened.name}"
    data = opened.store.read(
        layout.data_key(opened.name, layout.MANIFEST), limit_bytes=MANIFEST_BOUNDS.length_bytes
    )
    found = sha256_of(data)
    if not found.matches(opened.commit.manifest):
        raise IntegrityError(
            f"{what} was changed while it was read: its digest {found} is not COMMIT's; read again"
        )
    return data


def _signed(statement: bytes, options: argparse.Namespace) -> bytes:
    """A Sigstore bundle over a statement, by the policy's signer."""
    from strongroom_security import SecurityPolicy, oms

    policy = options.policy
    sign = policy.sign if isinstance(policy, SecurityPolicy) else None
    if sign is None:
        raise ConfigError("--sign needs a policy with [sign], which says who signs; name it with --security")
    return oms.sign_payload(statement, sign.signer, within_s=sign.timeout_s)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _to_json(record: Record) -> dict[str, Any]:
    manifest, commit = record.manifest, record.commit
    return {
        "checkpoint": {
            "attempt": manifest.name.attempt,
            "committed_at_ms": commit.committed_at_ms,
            "folder": manifest.name.folder,
            "launch": manifest.name.launch,
            "manifest_digest": str(commit.manifest),
            "parent": None if manifest.parent is None else manifest.parent.to_json(),
            "retention_class": manifest.retention_class,
            "step": manifest.name.step,
            "world_size": manifest.world_size,
        },
        "collected": record.collected,
        "metrics": record.metrics,
        "producer": record.producer,
        "provenance": record.given,
        "root": record.root,
        "run": manifest.run,
        "tags": record.tags,
    }


def _print(console: Console, record: Record, opened: OpenedCheckpoint) -> None:
    manifest, commit = record.manifest, record.commit
    console.print(line((str(manifest.name), "bold"), ("  of run ", "dim"), manifest.run), soft_wrap=True)
    parent = str(manifest.parent.name) if manifest.parent else "none: the first of its line"
    for label, value in (
        ("saved", words.when(commit.committed_at_ms)),
        ("written by", words.count(manifest.world_size, "rank")),
        ("manifest", str(commit.manifest)),
        ("parent", parent),
        ("class", manifest.retention_class or words.NOTHING),
        ("tags", ", ".join(record.tags) or words.NOTHING),
    ):
        console.print(line((label.ljust(_LABEL_WIDTH), "dim"), value), soft_wrap=True)
    document = opened.provenance
    for title, member in (("told", "provenance"), ("gathered", "collected"), ("metrics", "metrics")):
        listed = list(outline(document.get(member), str))
        console.print()
        console.print(line((title, "bold"), "" if listed else "  nothing"))
        for item in listed:
            indent = "  " * (item.depth + 1)
            value = f": {item.value}" if item.value else ""
            console.print(line(indent, (item.label, "cyan"), value), soft_wrap=True)
