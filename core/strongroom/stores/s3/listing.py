"""What a bucket holds, a page of 1,000 names a request, and removing it.

Foreign objects do no harm: what is no key of Strongroom's is left out of outlines, and the empty "folders"
that consoles make (a key that ends in ``/``) out of everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from strongroom.errors import AccessDeniedError, ConfigError, StoreError
from strongroom.stores.base import ObjectInfo, check_key, is_temporary
from strongroom.stores.offers import Unfinished
from strongroom.stores.s3.bucket import Bucket
from strongroom.stores.s3.failures import GaveUpError, TryFailedError

__all__ = ["abort", "delete_keys", "details", "info", "keys_under", "names", "outline", "uploads_under"]

_BATCH: Final = 1000
"""What one DeleteObjects takes (S3 API reference)."""
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
        if following == markers or not following["KeyMarker"]:
            raise _endless(bucket)
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
    for start in range(0, len(keys), _BATCH):
        batch = [{"Key": key} for key in keys[start : start + _BATCH]]
        answer = bucket.must("delete_objects", Delete={"Objects": batch, "Quiet": True}).fields
        errors = answer.get("Errors") or []
        if errors:
            raise _not_deleted(bucket, errors)


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
    while True:
        page = bucket.must(
            "list_objects_v2", **parameters, **({} if token is None else {"ContinuationToken": token})
        ).fields
        yield page
        if not page.get("IsTruncated"):
            return
        following = page.get("NextContinuationToken")
        if not following or following == token:
            raise _endless(bucket)
        token = str(following)


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


def _endless(bucket: Bucket) -> StoreError:
    return StoreError(
        f"{bucket.where.uri}: the server says that there is more to list, and not where it begins"
    )


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
