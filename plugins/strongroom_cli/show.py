"""``strongroom show``: one checkpoint, looked into. What is shown was verified; tensor data is not read."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console

from strongroom import layout
from strongroom.canonical import Json
from strongroom.catalog import History
from strongroom.errors import CheckpointNotFoundError, FormatError, IntegrityError
from strongroom.index import Index, TensorRecord
from strongroom.layout import CheckpointName
from strongroom.opened import OpenedCheckpoint, open_checkpoint
from strongroom.roles import Duty
from strongroom_cli import words
from strongroom_cli.auditing import open_store_of
from strongroom_cli.console import line, new_console, new_table, print_json
from strongroom_cli.outline import Line, outline, plain
from strongroom_cli.standing import STYLES, WORDS, Standing, read_history, run_of, standings

__all__ = ["read_provenance", "run"]

_FILES_SHOWN: Final = 20
_LABEL_WIDTH: Final = 10


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    store = open_store_of(options, Duty.RESTORE)
    history = read_history(store, options.guard)
    options.activity.about(run=run_of(history))
    name = _choose(history, options.step, store.uri)
    options.activity.about(checkpoint=name)
    commit = history.commits.get(name)
    if commit is None:
        raise IntegrityError(f"step {name.step} cannot be shown: {history.damaged[name]}")
    options.activity.intend(commit.run, name)
    opened = open_checkpoint(store, commit, options.guard)
    options.activity.vouched(opened.signers)
    standing = next(item for item in standings(history) if item.name == name)
    try:
        contents = _Contents.read(opened)
        if options.json:
            print_json(_to_json(store.uri, standing, contents))
        else:
            _print(new_console(), store.uri, standing, contents, options.tensors)
    except RecursionError:
        raise FormatError(f"a document of {name} nests deeper than any that is written") from None
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """All that is shown, read and verified before a word of it is printed."""

    opened: OpenedCheckpoint
    index: Index
    state: Json
    rank_states: Mapping[int, Mapping[str, Json]]
    provenance: Mapping[str, Json]

    @classmethod
    def read(cls, opened: OpenedCheckpoint) -> _Contents:
        ranks = range(opened.manifest.world_size)
        return cls(
            opened=opened,
            index=opened.index,
            state=opened.state,
            rank_states={
                rank: opened.rank_state(rank)
                for rank in ranks
                if layout.rank_state_path(rank) in opened.files
            },
            provenance=read_provenance(opened),
        )


def read_provenance(opened: OpenedCheckpoint) -> dict[str, Any]:
    """The members of ``provenance.json``.

    Raises:
        IntegrityError: it is damaged, or its tags or producer are no such thing.
    """
    document = opened.provenance
    tags, producer = document["tags"], document["producer"]
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise FormatError(f"{layout.PROVENANCE} of {opened.name} has tags that are not all texts")
    if not isinstance(producer, dict):
        raise FormatError(f"{layout.PROVENANCE} of {opened.name} has a producer that is no object")
    return document


def _choose(history: History, step: int | None, uri: str) -> CheckpointName:
    if step is not None:
        return history.at_step(step)
    if not history.line.newest_first:
        raise CheckpointNotFoundError(f"nothing was committed yet in {uri}")
    return history.line.newest_first[0]


def _to_json(uri: str, standing: Standing, contents: _Contents) -> dict[str, Any]:
    provenance = contents.provenance
    return {
        "aliases": contents.index.aliases,
        "checkpoint": standing.to_json(),
        "collected": plain(provenance.get("collected")),
        "manifest": json.loads(contents.opened.manifest.encode()),
        "metrics": plain(provenance["metrics"]),
        "producer": provenance["producer"],
        "provenance": plain(provenance["provenance"]),
        "rank_states": {
            str(rank): [[name, value] for name, value in values.items()]
            for rank, values in contents.rank_states.items()
        },
        "root": uri,
        "signers": list(contents.opened.signers),
        "state": contents.state,
        "tags": provenance["tags"],
        "tensors": [_tensor_json(record) for record in contents.index.tensors.values()],
    }


def _tensor_json(record: TensorRecord) -> dict[str, Any]:
    return {
        "chunks": [
            {
                "file": chunk.path,
                "offsets": list(chunk.offsets),
                "sizes": list(chunk.sizes),
                "start": chunk.start,
            }
            for chunk in record.chunks
        ],
        "dtype": record.dtype,
        "name": record.name,
        "shape": list(record.shape),
        "size_bytes": record.size_bytes,
    }


# ------------------------------------------------------------------------------------ for people


def _signed_by(opened: OpenedCheckpoint) -> str:
    """Whose signatures were verified; where nobody asked, whether there is one at all."""
    if opened.signers:
        return ", ".join(opened.signers)
    if opened.commit.signature is None:
        return "nobody"
    return "not judged: no policy here says whose signatures count"


def _print(
    console: Console,
    uri: str,
    standing: Standing,
    contents: _Contents,
    tensor_limit: int,
) -> None:
    opened, provenance = contents.opened, contents.provenance
    manifest, name = opened.manifest, opened.name
    console.print(
        line(
            (f"step {name.step}", "bold"),
            (f"  launch {name.launch}, attempt {name.attempt}  ", "dim"),
            (WORDS[standing.status], STYLES[standing.status]),
        )
    )
    saved = words.when(standing.committed_at_ms)
    ago = words.age(standing.committed_at_ms, now_ms=time.time_ns() // 1_000_000)
    parent = str(manifest.parent.name) if manifest.parent else "none: the first of its line"
    for label, value in (
        ("root", uri),
        ("folder", name.folder),
        ("run", manifest.run),
        ("saved", f"{saved} ({ago})"),
        ("size", f"{words.size(manifest.size_bytes)} in {words.count(len(manifest.files), 'file')}"),
        ("written by", words.count(manifest.world_size, "rank")),
        ("digest", manifest.algorithm),
        ("manifest", str(opened.commit.manifest)),
        ("signed by", _signed_by(opened)),
        ("parent", parent),
        (
            "producer",
            ", ".join(f"{tool} {version}" for tool, version in provenance["producer"].items())
            or words.NOTHING,
        ),
        ("tags", ", ".join(provenance["tags"]) or words.NOTHING),
    ):
        console.print(line((label.ljust(_LABEL_WIDTH + 2), "dim"), value), soft_wrap=True)
    describe = _Tensors(contents.index).describe
    _print_outline(console, "metrics", outline(provenance["metrics"], describe))
    _print_outline(console, "provenance", outline(provenance["provenance"], describe))
    _print_outline(console, "gathered", outline(provenance.get("collected"), describe))
    _print_files(console, opened)
    _print_tensors(console, contents.index, tensor_limit)
    _print_outline(console, "state", outline(contents.state, describe))
    for rank, values in contents.rank_states.items():
        pairs = [[key, value] for key, value in values.items()]
        lines = outline({"$": "dict", "v": pairs}, describe)
        _print_outline(console, f"state of rank {rank}", lines)


def _print_outline(console: Console, title: str, lines: Iterable[Line]) -> None:
    listed = list(lines)
    if not listed:
        return
    console.print()
    console.print(line((title, "bold")))
    for item in listed:
        indent = "  " * (item.depth + 1)
        value = f": {item.value}" if item.value else ""
        console.print(line(indent, (item.label, "cyan"), value), soft_wrap=True)


def _print_files(console: Console, opened: OpenedCheckpoint) -> None:
    files = opened.manifest.files
    console.print()
    console.print(line(("files", "bold"), (" under data/", "dim")))
    table = new_table("  NAME", "SIZE", "DIGEST", right=("SIZE",))
    for record in files[:_FILES_SHOWN]:
        table.add_row(
            line(f"  {record.path}"), words.size(record.size_bytes), f"{record.digest.value.hex()[:16]}..."
        )
    console.print(table)
    if len(files) > _FILES_SHOWN:
        console.print(line((f"  ... {len(files) - _FILES_SHOWN:,} more", "dim")))


def _print_tensors(console: Console, index: Index, limit: int) -> None:
    records = list(index.tensors.values())
    total = sum(record.size_bytes for record in records)
    tied = f", {words.count(len(index.aliases), 'further name')} of these" if index.aliases else ""
    console.print()
    console.print(
        line(
            ("tensors", "bold"),
            (f"  {words.count(len(records), 'tensor')}, {words.size(total)}{tied}", "dim"),
        )
    )
    shown = records[:limit]
    if shown:
        table = new_table("  NAME", "DTYPE", "SHAPE", "SIZE", right=("SIZE",))
        for record in shown:
            table.add_row(
                line(f"  {record.name}"), record.dtype, _shape(record), words.size(record.size_bytes)
            )
        console.print(table)
    for alias, stored in list(index.aliases.items())[:limit]:
        console.print(line(f"  {alias}", (" is ", "dim"), stored), soft_wrap=True)
    if len(records) > len(shown):
        console.print(line((f"  ... {len(records) - len(shown):,} more (--tensors N shows more)", "dim")))


def _shape(record: TensorRecord) -> str:
    return " x ".join(map(str, record.shape)) or "scalar"


class _Tensors:
    def __init__(self, index: Index) -> None:
        self._index = index

    def describe(self, name: str) -> str:
        record = self._index.find(name)
        if record is None:
            return f"{name} (not stored)"
        return f"{record.dtype}{list(record.shape)}"
