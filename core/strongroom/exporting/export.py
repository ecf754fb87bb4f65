"""Exporting a checkpoint's model as a folder of safetensors that stands alone, as the hub has them.

A receiver needs nothing of Strongroom: stock safetensors reads the weights, and whoever signed the
folder is checked by the OpenSSF's ``model_signing``. What the checkpoint holds was verified before it
is written, and the folder appears whole or not at all. What else a checkpoint holds (optimizers,
random generators, positions) is not for receivers, and stays behind.

How a folder is signed is the caller's: this module only says what is in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from strongroom import canonical, layout
from strongroom._version import __version__
from strongroom.auditing import Action, Activity
from strongroom.decoding import Decoder
from strongroom.dtypes import bytes_of
from strongroom.errors import ConfigError, FormatError, StateMismatchError
from strongroom.exporting.choice import Chosen, choose
from strongroom.exporting.newfolder import NewFile, NewFolder, WrittenFile
from strongroom.exporting.reading import PIECE_BYTES, PieceReader, needs_first_pass, pieces_of, shards_of
from strongroom.exporting.shardfiles import (
    DEFAULT_SHARD_BYTES,
    INDEX_NAME,
    PlannedFile,
    index_document,
    plan_files,
)
from strongroom.forms import mapping_pairs
from strongroom.opened import OpenedCheckpoint
from strongroom.parallel import start
from strongroom.scrubbing import SCRUBBED
from strongroom.workers import reading_workers

__all__ = [
    "CONFIG_NAME",
    "MODEL_CONFIG",
    "RECORD_NAME",
    "SIGNATURE_NAME",
    "Exported",
    "Sign",
    "export",
    "model_config",
]

CONFIG_NAME: Final = "config.json"
RECORD_NAME: Final = "strongroom.json"
"""Which checkpoint it was: nothing that a publisher would not say."""

SIGNATURE_NAME: Final = "model.sig"

MODEL_CONFIG: Final = "model_config"
"""The member of a checkpoint's provenance that becomes ``config.json``."""

Sign = Callable[[Mapping[str, bytes]], bytes]
"""Signs a folder, given the SHA-256 of each of its files by name; gives the signature file's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was exported.

    Attributes:
        files: every file of the folder, with the SHA-256 of what was written, sorted by name.
        key: the state's key that it was taken from.
        tensors: how many were written; those that are tied count once.
        size_bytes: of these.
        tied: further names of tensors -> the name that is in the folder.
        left_out: names beside them that are no tensors.
        has_config: whether the folder has a ``config.json``.
        is_signed: whether it has a signature.
    """

    files: tuple[WrittenFile, ...]
    key: str
    tensors: int
    size_bytes: int
    tied: Mapping[str, str]
    left_out: tuple[str, ...]
    has_config: bool
    is_signed: bool


def export(
    opened: OpenedCheckpoint,
    folder: str | os.PathLike[str],
    *,
    key: str | None = None,
    only: Sequence[str] | None = None,
    strip_prefix: str = "",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    config: bytes | None = None,
    further: Mapping[str, Path] | None = None,
    sign: Sign | None = None,
    workers: int | None = None,
    piece_bytes: int = PIECE_BYTES,
    on_progress: Callable[[int, int], None] | None = None,
    activity: Activity | None = None,
) -> Exported:
    """Write a checkpoint's model to a new folder.

    Args:
        opened: the checkpoint, whose manifest was verified and trusted.
        folder: the new folder; its parent exists.
        key: which of the state's values; None: ``model``, or else the one that is a module.
        only: patterns of tensors' names; None: all.
        strip_prefix: take what lies below this prefix, without it.
        max_shard_bytes: of the tensors in one file; a larger tensor has a file of its own.
        config: the bytes of ``config.json``; None: what the checkpoint's provenance has, if any.
        further: files to put beside, by the name that each gets.
        sign: signs the folder; None: it is left unsigned.
        workers: threads that read; None: as many as a restore has.
        piece_bytes: of what is read at a time; three times that is in memory at most.
        on_progress: told of bytes done and bytes in all, from any thread, one at a time.
        activity: of which this is a part; None: it is one by itself.

    Raises:
        AuditError: it could not be put on record first, and nothing was read.
        ConfigError: the folder exists, or what was asked for cannot be.
        IntegrityError: the checkpoint is damaged. There is no folder then.
        NoKeyError, KeyServiceError: it is sealed, and cannot be opened here.
        StoreError: it could not be read, or the folder could not be written.
    """
    if activity is None:
        with Activity(opened.auditor, Action.EXPORT, root=opened.store.uri) as own:
            return export(
                opened,
                folder,
                key=key,
                only=only,
                strip_prefix=strip_prefix,
                max_shard_bytes=max_shard_bytes,
                config=config,
                further=further,
                sign=sign,
                workers=workers,
                piece_bytes=piece_bytes,
                on_progress=on_progress,
                activity=own,
            )
    activity.intend(opened.manifest.run, opened.name)
    path = Path(folder).absolute()
    try:
        chosen = choose(opened.state, opened.index, key=key, only=only, strip_prefix=strip_prefix)
        if config is None:
            config = model_config(opened)
    except RecursionError:
        raise FormatError(f"a document of {opened.name} nests deeper than any that is written") from None
    files = plan_files(chosen.tensors, chosen.tied, max_shard_bytes)
    whole = {
        RECORD_NAME: _record(opened, chosen),
        **({CONFIG_NAME: config} if config is not None else {}),
        **({INDEX_NAME: index_document(files)} if len(files) > 1 else {}),
    }
    copied = dict(further or {})
    _check_names(copied, [SIGNATURE_NAME, *whole, *(file.name for file in files)])
    with NewFolder(path) as new:
        written = _write_tensors(
            opened, chosen, files, new, workers or reading_workers(), piece_bytes, on_progress
        )
        written += [new.put(name, data) for name, data in whole.items()]
        written += [new.copy(name, source) for name, source in copied.items()]
        if sign is not None:
            signature = sign({file.name: file.digest.value for file in written})
            written.append(new.put(SIGNATURE_NAME, signature))
        new.publish()
    size_bytes = sum(file.data_bytes for file in files)
    activity.note(key=chosen.key, size_bytes=size_bytes, tensors=len(chosen.tensors))
    return Exported(
        files=tuple(sorted(written, key=lambda file: file.name)),
        key=chosen.key,
        tensors=len(chosen.tensors),
        size_bytes=size_bytes,
        tied=chosen.tied,
        left_out=chosen.left_out,
        has_config=config is not None or CONFIG_NAME in copied,
        is_signed=sign is not None,
    )


# ------------------------------------------------------------------------------------- documents


def model_config(opened: OpenedCheckpoint) -> bytes | None:
    """``config.json`` as the checkpoint's provenance has it; None where that has none.

    Raises:
        ConfigError: it holds what JSON has no form for.
    """
    for pair in mapping_pairs(opened.provenance["provenance"]) or ():
        if pair[0] == MODEL_CONFIG:
            try:
                return _json_of(Decoder().decode(pair[1], (MODEL_CONFIG,)))
            except StateMismatchError as error:
                raise ConfigError(f"{_ADVICE}: {error}") from None
    return None


_ADVICE: Final = (
    f"the checkpoint's provenance has a {MODEL_CONFIG!r} that cannot be {CONFIG_NAME}; give one by config= "
    "(--config)"
)


def _json_of(value: Any) -> bytes:
    if not isinstance(value, dict):
        raise ConfigError(f"{_ADVICE}: it is a {type(value).__name__}")
    try:
        text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{_ADVICE}: {error}") from None
    if SCRUBBED in text:
        raise ConfigError(
            f"{_ADVICE}: what looked like a secret in it was replaced by {SCRUBBED} when it was saved"
        )
    try:
        return f"{text}\n".encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{_ADVICE}: {error}") from None


def _record(opened: OpenedCheckpoint, chosen: Chosen) -> bytes:
    """``strongroom.json``. No host, no user, no path; equal exports have equal records."""
    name = opened.name
    return canonical.encode(
        {
            "attempt": name.attempt,
            "kind": "export",
            "launch": name.launch,
            "left_out": sorted(chosen.left_out),
            "manifest": str(opened.commit.manifest),
            "run": opened.manifest.run,
            "step": name.step,
            "strongroom": __version__,
            "tied": dict(chosen.tied),
        }
    )


def _check_names(further: Mapping[str, Path], ours: Sequence[str]) -> None:
    """Refuse names that are ours, that are no plain names, or that a signature could not list."""
    taken = {name.casefold() for name in ours}
    for name, source in further.items():
        if name.casefold() in taken:
            raise ConfigError(f"{source} cannot be put beside: another file of the folder is called {name!r}")
        taken.add(name.casefold())
        if "/" in name or not _is_safe(name):
            raise ConfigError(
                f"{source} cannot be put beside as {name!r:.80}: a name that is safe to sign starts with a "
                "letter, digit or '_', and holds only these, '.' and '-'"
            )
        if not source.is_file():
            raise ConfigError(f"{source} is no file")


def _is_safe(name: str) -> bool:
    try:
        layout.check_relative_path(name)
    except FormatError:
        return False
    return True


# --------------------------------------------------------------------------------------- tensors


class _Told:
    """How far the work is; counted by any thread."""

    def __init__(self, total_bytes: int, tell: Callable[[int, int], None] | None) -> None:
        self._total = total_bytes
        self._tell = tell
        self._done = 0
        self._lock = threading.Lock()

    def advance(self, count_bytes: int) -> None:
        with self._lock:
            self._done += count_bytes
            if self._tell is not None:
                self._tell(self._done, self._total)


def _write_tensors(
    opened: OpenedCheckpoint,
    chosen: Chosen,
    files: Sequence[PlannedFile],
    new: NewFolder,
    workers: int,
    piece_bytes: int,
    on_progress: Callable[[int, int], None] | None,
) -> list[WrittenFile]:
    """Read pieces on several threads, and hash and write each while the next is read."""
    planned = [(file, list(pieces_of(file.tensors, piece_bytes))) for file in files]
    is_at_once = sum(len(pieces) for _, pieces in planned) <= 1
    total = sum(file.data_bytes for file in files)
    records = list(chosen.tensors.values())
    if not is_at_once and needs_first_pass(opened):
        total += sum(opened.record(shard).size_bytes for shard in shards_of(records))
    told = _Told(total, on_progress)
    reader = PieceReader(opened, records, is_at_once=is_at_once, workers=workers, advance=told.advance)
    largest = max((piece.size_bytes for _, pieces in planned for piece in pieces), default=0)
    with _Behind() as behind:
        buffers = [_memory(largest) for _ in range(1 if is_at_once else 2)]
        turn = 0
        for file, pieces in planned:
            target = new.open(file.name)
            behind.do(_writing(target, memoryview(file.header)))
            for piece in pieces:
                buffer = buffers[turn % len(buffers)][: piece.size_bytes]
                turn += 1
                # Only the last piece is written meanwhile, from the other buffer.
                reader.read(piece, buffer)
                told.advance(piece.size_bytes)
                behind.do(_writing(target, bytes_of(buffer)))
            behind.do(_finishing(target, behind.written))
    return behind.written


def _memory(size_bytes: int) -> torch.Tensor:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
    except RuntimeError:
        raise ConfigError(
            f"this machine has no memory for {size_bytes} bytes, which a row of one of the tensors takes"
        ) from None


def _writing(file: NewFile, data: memoryview) -> Callable[[], None]:
    return lambda: file.write(data)


def _finishing(file: NewFile, written: list[WrittenFile]) -> Callable[[], None]:
    return lambda: written.append(file.finish())


class _Behind:
    """Does things on another thread, in their order, one at a time.

    Attributes:
        written: the files that were finished.
    """

    def __init__(self) -> None:
        self.written: list[WrittenFile] = []
        self._last: Future[None] | None = None

    def do(self, task: Callable[[], None]) -> None:
        """Wait for what was given before, raise what that raised, and begin this."""
        self.wait()
        # Known before the thread is: an interrupt may come between the two.
        self._last = Future()
        start(task, name="strongroom-export", future=self._last)

    def wait(self) -> None:
        if self._last is not None:
            self._last.result()
        self._last = None

    def __enter__(self) -> _Behind:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        elif self._last is not None:
            # No thread goes on in a folder that is removed.
            with contextlib.suppress(CancelledError):
                self._last.exception()
