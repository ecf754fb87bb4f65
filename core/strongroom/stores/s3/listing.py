"""What a bucket holds, a page of 1,000 names a request, and removing it.

Foreign objects do no harm: what is no key of Strongroom's is left out of outlines, and the empty "folders"
that consoles make (a key that ends in ``/``) out of everything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from strongroom.errors import AccessDeniedError, ConfigError, StoreError
from strongroom.stores.base import ObjectInfo, check_key, is_temporary
from strongroom.stores.offers import Unfinished
from strongroom.stores.s3.bucket import Bucket
from strongroom.stores.s3.failures import GaveUpError, TryFailedError

__all__ = [
    "abort",
    "delete",
    "delete_keys",
    "details",
    "info",
    "keys_under",
    "names",
    "outline",
    "uploads_under",
]

_BATCH: Final = 1000
"""What one DeleteObjects takes (S3 API reference)."""
_MOST_PAGES: Final = 100_000
_MOST_EMPTY_PAGES: Final = 1000
"""In a row: servers send some where they skip what is hidden."""
_REFUSED_BATCHES: Final = ("InternalError", "InvalidRequest", "MalformedXML")
"""What servers call a batch that they cannot read, since a key in it is nothing that XML can hold."""
_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""No character of XML 1.0 (section 2.2), in which a batch is written."""
_REFUSED_DELIMITERS: Final = ("InvalidArgument", "InvalidRequest", "NotImplemented")


def info(fields: Mapping[str, Any], size: str) -> ObjectInfo:
    """What an answer or a listing says of an object.

    Args:
        size: what the field is called there.
    """
    return ObjectInfo(
        size_bytes=int(fields[size]),
        version=str(fields.get("ETag", "")).strip('"'),
        modified_ns=_nanoseconds(fields.get("LastModified")),
    )


def names(bucket: Bucket, prefix: str) -> list[str]:
    """The names directly in a folder, sorted; folders end in ``/``."""
    folder = bucket.where.folder(prefix)
    found: set[str] = set()
    for page in _pages(bucket, folder, delimiter="/"):
        for entry in page.get("CommonPrefixes") or []:
            found.add(str(entry["Prefix"])[len(folder) :])
        for entry in page.get("Contents") or []:
            found.add(str(entry["Key"])[len(folder) :])
    return sorted(name for name in found if name not in ("", "/") and not is_temporary(name))


def keys_under(bucket: Bucket, prefix: str) -> Iterator[Sequence[str]]:
    """Whole keys, as the server calls them, of all objects in a folder and below; a page at a time."""
    for page in _pages(bucket, bucket.where.folder(prefix)):
        yield [str(entry["Key"]) for entry in page.get("Contents") or []]


def outline(bucket: Bucket, fold: str) -> dict[str, ObjectInfo | None]:
    """See `strongroom.stores.offers.Outlining`.

    The server folds what it can by a delimiter of several characters. What it does not fold (the first folder
    below the root, and everything on a server that takes only one character) is folded here.
    """
    root = bucket.where.folder("")
    found: dict[str, ObjectInfo | None] = {}
    for page in _folded_pages(bucket, root, f"/{fold}/"):
        for entry in page.get("CommonPrefixes") or []:
            _note(found, str(entry["Prefix"])[len(root) :], None, fold)
        for entry in page.get("Contents") or []:
            _note(found, str(entry["Key"])[len(root) :], info(entry, "Size"), fold)
    return found


def details(bucket: Bucket, prefix: str) -> dict[str, ObjectInfo]:
    """See `strongroom.stores.offers.Detailing`."""
    root = bucket.where.folder("")
    found: dict[str, ObjectInfo | None] = {}
    for page in _pages(bucket, bucket.where.folder(prefix)):
        for entry in page.get("Contents") or []:
            _note(found, str(entry["Key"])[len(root) :], info(entry, "Size"), fold=None)
    return {key: entry for key, entry in found.items() if entry is not None}


def uploads_under(
    bucket: Bucket, prefix: str, *, is_given_up: Callable[[], bool] | None = None
) -> list[Unfinished]:
    """Unfinished uploads of the keys that begin so.

    Args:
        prefix: the beginning of a key, which need not end at a folder.
        is_given_up: asked before another try.
    """
    giving_up: dict[str, Any] = {} if is_given_up is None else {"is_given_up": is_given_up}
    begins = bucket.where.key(prefix)
    found: list[Unfinished] = []
    markers: dict[str, Any] = {}
    progress = _Progress(bucket)
    while True:
        page = bucket.must("list_multipart_uploads", Prefix=begins, **markers, **giving_up).fields
        for entry in page.get("Uploads") or []:
            key = str(entry["Key"])
            # Not every server heeds the prefix here.
            if key.startswith(begins):
                found.append(
                    Unfinished(
                        key=key[len(bucket.where.prefix) :],
                        token=str(entry["UploadId"]),
                        began_ns=_nanoseconds(entry.get("Initiated")),
                    )
                )
        following = {
            "KeyMarker": str(page.get("NextKeyMarker") or ""),
            "UploadIdMarker": str(page.get("NextUploadIdMarker") or ""),
        }
        if not page.get("IsTruncated"):
            return found
        progress.check(following["KeyMarker"] and tuple(following.values()), page.get("Uploads"))
        markers = following


def abort(bucket: Bucket, upload: Unfinished) -> None:
    """Remove an unfinished upload's parts; absent is fine.

    Raises:
        StoreError: the server refused.
    """
    try:
        bucket.ask("abort_multipart_upload", upload.key, UploadId=upload.token)
    except GaveUpError as error:
        if not error.failure.is_gone_upload:
            raise bucket.error(error, "abort_multipart_upload", upload.key) from error.failure


def delete_keys(bucket: Bucket, keys: Sequence[str]) -> None:
    """Remove objects by whole keys, as the server calls them; absent is fine.

    Raises:
        StoreError: some could not be removed.
    """
    alone = [key for key in keys if _NOT_XML.search(key)]
    together = [key for key in keys if not _NOT_XML.search(key)]
    for batch in (together[start : start + _BATCH] for start in range(0, len(together), _BATCH)):
        listed = [{"Key": key} for key in batch]
        try:
            answer = bucket.ask("delete_objects", Delete={"Objects": listed, "Quiet": True}).fields
        except GaveUpError as error:
            if error.failure.code not in _REFUSED_BATCHES:
                raise bucket.error(error, "delete_objects", None) from error.failure
            alone += batch
            continue
        errors = answer.get("Errors") or []
        if errors:
            raise _not_deleted(bucket, errors)
    for key in alone:
        delete(bucket, key.removeprefix(bucket.where.prefix))


def delete(bucket: Bucket, key: str) -> None:
    """Remove one object; absent is fine.

    Raises:
        StoreError: the server refused.
    """
    try:
        bucket.ask("delete_object", key)
    except GaveUpError as error:
        if not error.failure.is_absent:
            raise bucket.error(error, "delete_object", key) from error.failure


def _folded_pages(bucket: Bucket, prefix: str, delimiter: str) -> Iterator[Mapping[str, Any]]:
    """As `_pages`; without a delimiter where the server refuses one of several characters."""
    pages = _pages(bucket, prefix, delimiter=delimiter)
    try:
        first = next(pages)
    except StoreError as error:
        cause = error.__cause__
        if not isinstance(cause, TryFailedError) or cause.code not in _REFUSED_DELIMITERS:
            raise
        yield from _pages(bucket, prefix)
        return
    yield first
    yield from pages


def _pages(bucket: Bucket, prefix: str, *, delimiter: str | None = None) -> Iterator[Mapping[str, Any]]:
    parameters = {"Prefix": prefix} | ({} if delimiter is None else {"Delimiter": delimiter})
    token: str | None = None
    progress = _Progress(bucket)
    while True:
        page = bucket.must(
            "list_objects_v2", **parameters, **({} if token is None else {"ContinuationToken": token})
        ).fields
        yield page
        if not page.get("IsTruncated"):
            return
        following = page.get("NextContinuationToken")
        progress.check(following, page.get("Contents") or page.get("CommonPrefixes"))
        token = str(following)


class _Progress:
    """Sees that a listing comes to an end: what stands before the bucket may make pages up for ever."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._seen: set[object] = set()
        self._last: object = None
        self._empty_pages = 0

    def check(self, following: object, entries: Sequence[object] | None) -> None:
        """Raise StoreError where there should be more and the page led nowhere.

        Args:
            following: where the next page begins.
            entries: what was on this one.
        """
        self._empty_pages = 0 if entries else self._empty_pages + 1
        leads_on = following and following not in self._seen and (not entries or entries[0] != self._last)
        self._seen.add(following)
        self._last = entries[0] if entries else self._last
        if not leads_on or self._empty_pages > _MOST_EMPTY_PAGES or len(self._seen) > _MOST_PAGES:
            raise StoreError(
                f"{self._bucket.where.uri}: the server says again and again that there is more to list, and "
                f"after {len(self._seen)} pages it leads nowhere; see the endpoint and the proxy"
            )


def _note(found: dict[str, ObjectInfo | None], name: str, entry: ObjectInfo | None, fold: str | None) -> None:
    folder, is_folded, _ = ("", "", "") if fold is None else f"/{name}".partition(f"/{fold}/")
    kept = f"{folder}/{fold}"[1:] if is_folded else name
    try:
        check_key(kept)
    except ConfigError:
        return
    if is_folded:
        found[kept + "/"] = None
    elif entry is not None:
        found[kept] = entry


def _nanoseconds(when: object) -> int:
    # Whole seconds: a HEAD tells no more, and what a listing says must be the same.
    return int(when.timestamp()) * 10**9 if isinstance(when, datetime) else 0


def _not_deleted(bucket: Bucket, errors: Sequence[Mapping[str, Any]]) -> StoreError:
    first = errors[0]
    code, key = str(first.get("Code", "")), str(first.get("Key", ""))
    failure = TryFailedError(
        str(first.get("Message", "")), status=403 if "Denied" in code else 400, code=code
    )
    name = key.removeprefix(bucket.where.prefix)
    told = bucket.error(GaveUpError(failure, tries=1, was_lost=False), "delete_objects", name)
    if len(errors) == 1:
        return told
    message = f"{len(errors)} objects were not deleted, the first: {told}"
    return AccessDeniedError(message) if isinstance(told, AccessDeniedError) else StoreError(message)
