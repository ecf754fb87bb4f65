"""What a sink holds: its segments by name, and their bytes. It asks the store, and judges nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from strongroom.errors import AccessDeniedError, ConfigError, FormatError, ObjectNotFoundError
from strongroom.parallel import run_all
from strongroom.stores.base import ObjectInfo, Store
from strongroom.stores.local import LocalStore
from strongroom.stores.offers import Detailing, tuning_of
from strongroom_security.auditlog.format.lines import parse_segment_key
from strongroom_security.auditlog.format.segments import MAX_SEGMENT_BYTES

__all__ = ["SEGMENTS", "Listing", "absent_folder", "device_of", "list_segments", "read_segments"]

SEGMENTS: Final = "segments"
"""The folder that writers create in, and nobody else."""

_SUFFIX: Final = ".jsonl"

_AHEAD: Final = 4
"""Segments that are read for each request that is under way at once, before the first is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The segments of a sink at one moment.

    Attributes:
        segments: by key, in the order of runs, hours, writers and numbers.
        strays: what lies among them and is none.
    """

    segments: Mapping[str, ObjectInfo]
    strays: tuple[str, ...] = ()

    def of_run(self, run: str | None) -> Listing:
        """The same, of one run alone; None: of all."""
        if run is None:
            return self
        begins = f"{SEGMENTS}/{run}/"
        return Listing(
            segments={key: info for key, info in self.segments.items() if key.startswith(begins)},
            strays=tuple(key for key in self.strays if key.startswith(begins)),
        )


def absent_folder(store: Store) -> str | None:
    """In words, that a sink's folder is not there; None: it is, or the sink is no folder.

    A store takes an absent folder for an empty one, and a log that nobody has begun is rarely what was meant.
    """
    if not isinstance(store, LocalStore) or os.path.isdir(store.root):
        return None
    return f"the audit log's folder {store.root} is not there: its path is mistyped, or its mount is away"


def device_of(store: Store) -> int | None:
    """The file system that a sink's folder is on; None: it is not there, or the sink is no folder."""
    if not isinstance(store, LocalStore):
        return None
    try:
        return os.stat(store.root).st_dev
    except OSError:
        return None


def list_segments(store: Store) -> Listing:
    """What there is, such that of no writer a segment is missed that came before one that is listed.

    A listing is no moment: a writer may add two segments while it goes on, and only the later one be seen.
    Where it looks like that it is listed once more, and what was not there the first time is left out unless
    it came before something that was.

    Raises:
        StoreError: the sink could not be listed.
    """
    found = _list(store)
    if not _has_gaps(found):
        return found
    highest: dict[str, int] = {}
    for key in found.segments:
        writer, number = _writer_of(key)
        highest[writer] = max(number, highest.get(writer, 0))
    again = _list(store)
    return Listing(
        segments={
            key: info
            for key, info in again.segments.items()
            if key in found.segments or _writer_of(key)[1] < highest.get(_writer_of(key)[0], 0)
        },
        strays=again.strays,
    )


def read_segments(
    store: Store, keys: Sequence[str], infos: Mapping[str, ObjectInfo] | None = None
) -> Iterator[tuple[str, bytes | str]]:
    """Segments' bytes, in the order asked for, some of them at once where the store likes that.

    Args:
        infos: what is known of their sizes, so that no more than some hundred MiB are held at once.

    Yields:
        a key, and the bytes, or in words why there are none: it is no more, or too long.

    Raises:
        StoreError: one could not be read.
    """
    looks = tuning_of(store).looks
    for some in _batches(keys, infos or {}, 1 if looks <= 1 else looks * _AHEAD):
        read = run_all([partial(_read, store, key) for key in some], workers=looks, name="audit-read")
        yield from zip(some, read, strict=True)


def _batches(keys: Sequence[str], infos: Mapping[str, ObjectInfo], count: int) -> Iterator[list[str]]:
    some: list[str] = []
    size_bytes = 0
    for key in keys:
        info = infos.get(key)
        # One that is too long is not read.
        more = 0 if info is None or info.size_bytes > MAX_SEGMENT_BYTES else info.size_bytes
        if some and (len(some) >= count or size_bytes + more > MAX_SEGMENT_BYTES):
            yield some
            some, size_bytes = [], 0
        some.append(key)
        size_bytes += more
    if some:
        yield some


def _read(store: Store, key: str) -> bytes | str:
    try:
        return store.read(key, limit_bytes=MAX_SEGMENT_BYTES)
    except ObjectNotFoundError:
        return "it is there no more"
    except FormatError as error:
        return str(error)


def _list(store: Store) -> Listing:
    found: dict[str, ObjectInfo | None]
    # A store that is asked one thing at a time is a file system, or as near as one: links, pipes and folders
    # may lie in it, of which none may keep the rest from being listed.
    if isinstance(store, Detailing) and tuning_of(store).looks > 1:
        found = dict(store.details(SEGMENTS))
    else:
        found = dict(_walk(store, SEGMENTS))
    segments = {
        key: info
        for key, info in sorted(found.items())
        if info is not None and parse_segment_key(key) is not None
    }
    return Listing(segments=segments, strays=tuple(key for key in sorted(found) if key not in segments))


def _walk(store: Store, prefix: str) -> Iterator[tuple[str, ObjectInfo | None]]:
    """All files below a folder; and with None what is no file, or a folder where a segment might stand."""
    for name in store.list_names(prefix):
        key = f"{prefix}/{name}"
        folder = key.removesuffix("/")
        try:
            if folder == key:
                yield key, store.stat(key)
                continue
            if folder.endswith(_SUFFIX):
                yield folder, None
            yield from _walk(store, folder)
        except ObjectNotFoundError:
            continue
        except (FormatError, ConfigError, AccessDeniedError):
            yield folder, None  # a link, a pipe, what no key can name, or a folder that somebody has shut


def _has_gaps(listing: Listing) -> bool:
    counts: dict[str, int] = {}
    highest: dict[str, int] = {}
    for key in listing.segments:
        writer, number = _writer_of(key)
        counts[writer] = counts.get(writer, 0) + 1
        highest[writer] = max(number, highest.get(writer, 0))
    return any(counts[writer] < highest[writer] for writer in counts)


def _writer_of(key: str) -> tuple[str, int]:
    parts = parse_segment_key(key)
    return ("", 0) if parts is None else (parts[2], parts[3])
