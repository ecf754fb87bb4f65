"""Creating an object that must not be there yet, or in the place of one that was seen.

Every request that makes an object visible carries ``If-None-Match: *``, or ``If-Match`` with the ETag of the
one that it replaces. Where an earlier try's answer was lost and the next one hears that the object exists, it
may be this call's own: each call draws a write id, which it stores with the object, and a look tells. Where
this identity may not look, that stays open (`Standing.UNTOLD`), and the caller knows whether anybody else
could have written that key.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from typing import Any, Final

from strongroom.errors import (
    AccessDeniedError,
    ObjectExistsError,
    StoreError,
    StoreUnavailableError,
)
from strongroom.stores.s3.bucket import Bucket, after
from strongroom.stores.s3.failures import GaveUpError, TryFailedError

__all__ = [
    "CLEARING_TRIES",
    "WRITE_ID",
    "InDoubtError",
    "Standing",
    "create",
    "exists_error",
    "look_whose",
    "remove_quietly",
]

_LOG: Final = logging.getLogger("strongroom")

WRITE_ID: Final = "strongroom-write"
"""The object's metadata in which a call's write id stands (``x-amz-meta-strongroom-write``)."""

CLEARING_TRIES: Final = 3
"""How often a request that clears up is sent: garbage collection and the bucket's lifecycle do the rest."""


class InDoubtError(StoreUnavailableError):
    """Something stands there, and whose it is, or whether it is right, could not be found out."""


class Standing(enum.Enum):
    """Whose object stands at a key."""

    OURS = "ours"
    OTHERS = "others"
    UNTOLD = "untold"
    """An earlier answer was lost, and this identity may not look."""


def create(
    bucket: Bucket,
    key: str,
    body: bytearray,
    *,
    write_id: str,
    until: float | None = None,
    over: str | None = None,
) -> Standing:
    """Create an object in one request, unless something stands there.

    Args:
        over: the ETag of an object in whose place this one is put, unless another stands there, or none.
        body: no ``bytes``: boto3 makes a stream of those, and asks the server before it sends one.
        write_id: this call's, new for each.
        until: as `Bucket.ask` has it.

    Raises:
        GaveUpError: the request failed for good.
        InDoubtError: it could not be asked whose object stands, or wrong bytes could not be removed.
        StoreError: the server has other bytes than it was sent.
    """
    total = bucket.checksums.of(body)
    condition: dict[str, Any] = {"IfNoneMatch": "*"} if over is None else {"IfMatch": f'"{over}"'}
    try:
        answer = bucket.ask(
            "put_object",
            key,
            Body=body,
            **condition,
            Metadata={WRITE_ID: write_id},
            until=until,
            **bucket.checksums.fields(total),
        )
    except GaveUpError as error:
        is_gone = over is not None and error.failure.is_absent
        if not error.failure.exists and not is_gone:
            raise
        if is_gone and not error.was_lost:
            return Standing.OTHERS
        return look_whose(bucket, key, write_id=write_id, until=until) if error.was_lost else Standing.OTHERS
    try:
        bucket.checksums.confirm(answer.fields, total, body)
    except TryFailedError as failure:
        told = bucket.error(GaveUpError(failure, tries=1, was_lost=False), "put_object", key)
        if over is not None:
            # The old one is gone, and to remove what has come in its place would leave nothing.
            raise InDoubtError(str(told)) from failure
        if remove_quietly(bucket, key):
            raise told from failure
        raise InDoubtError(f"{told}; and what it has could not be removed") from failure
    return Standing.OURS


def look_whose(
    bucket: Bucket,
    key: str,
    *,
    write_id: str | None,
    length_bytes: int | None = None,
    until: float | None = None,
) -> Standing:
    """Whose object it is that stands at a key.

    Args:
        write_id: what this call stored with it.
        length_bytes: where the id is not known, as in an upload that another process began, an object of this
            length at a key that is one attempt's own counts as ours.
        until: as `Bucket.ask` has it.

    Raises:
        InDoubtError: it could not be asked, or the object is gone again.
    """
    try:
        found = bucket.ask("head_object", key, until=until).fields
    except GaveUpError as error:
        told = bucket.error(error, "head_object", key)
        if isinstance(told, AccessDeniedError):
            return Standing.UNTOLD
        if error.failure.status == 404:
            raise InDoubtError(
                f"{bucket.where.name(key)} stood a moment ago and is gone: something removes what is "
                "written here, or answers in the bucket's place"
            ) from error.failure
        raise InDoubtError(str(told)) from error.failure
    if write_id is not None:
        return Standing.OURS if _write_id(found) == write_id else Standing.OTHERS
    return Standing.OURS if found.get("ContentLength") == length_bytes else Standing.OTHERS


def exists_error(bucket: Bucket, key: str) -> ObjectExistsError:
    return ObjectExistsError(
        f"{bucket.where.name(key)} exists; an object is never overwritten: write it under another name"
    )


def remove_quietly(bucket: Bucket, key: str) -> bool:
    """Remove what this call has left at a key, where it may; whether it did. Else garbage collection does."""
    try:
        bucket.must("delete_object", key, is_given_up=after(CLEARING_TRIES))
    except StoreError as error:
        _LOG.debug("an unfinished object stays until garbage collection: %s", error)
        return False
    return True


def _write_id(found: Mapping[str, Any]) -> object:
    # Servers differ in how they spell the names of metadata.
    metadata = found.get("Metadata") or {}
    return next((value for name, value in metadata.items() if name.lower() == WRITE_ID), None)
