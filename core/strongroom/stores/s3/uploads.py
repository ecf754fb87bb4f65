"""Uploads that another process may go on with: what a replicator that was killed takes up again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from strongroom.errors import ConfigError, StoreError
from strongroom.stores.base import Buffer
from strongroom.stores.s3.bucket import Bucket
from strongroom.stores.s3.checksums import md5_hex, sha256_base64
from strongroom.stores.s3.failures import GaveUpError
from strongroom.stores.s3.multipart import Multipart, SentPart, part_length
from strongroom.stores.s3.writing import bytes_of

__all__ = ["S3Upload", "begin", "resume"]

_MD5_TAG: Final = re.compile(r'"?([0-9a-f]{32})"?')


def begin(bucket: Bucket, key: str, *, length_bytes: int) -> S3Upload:
    """Begin one; see `strongroom.stores.offers.Resuming`."""
    _check_length(length_bytes)
    multipart = Multipart.begin(bucket, key, length_bytes=length_bytes)
    part_bytes = part_length(length_bytes, bucket.options.part_bytes)
    return S3Upload(bucket, multipart, length_bytes=length_bytes, part_bytes=part_bytes)


def resume(bucket: Bucket, key: str, *, length_bytes: int, token: str) -> S3Upload | None:
    """Go on with one, or None; see `strongroom.stores.offers.Resuming`."""
    _check_length(length_bytes)
    multipart = Multipart(bucket, key, length_bytes=length_bytes, upload_id=token, write_id=None)
    try:
        found = _list_parts(bucket, key, token)
    except GaveUpError as error:
        if error.failure.is_gone_upload or error.failure.is_absent:
            return None
        raise bucket.error(error, "list_parts", key) from error.failure
    # It may have been begun by other options: the parts that stand say how long they are.
    usual = part_length(length_bytes, bucket.options.part_bytes)
    part_bytes = max((part.length_bytes for part in found.values()), default=usual)
    if len(found) == 1 and part_bytes != usual and part_bytes * (max(found) + 1) >= length_bytes:
        # Only a last part, which is shorter than the others.
        part_bytes = usual
    count = -(-length_bytes // part_bytes)
    if any(number >= count for number in found) or part_bytes < 1:
        return None
    for number, part in found.items():
        expected = min(part_bytes, length_bytes - number * part_bytes)
        if part.length_bytes != expected:
            return None
        multipart.note(number, part)
    return S3Upload(bucket, multipart, length_bytes=length_bytes, part_bytes=part_bytes)


class S3Upload:
    """One multipart upload; see `strongroom.stores.offers.Upload`."""

    def __init__(self, bucket: Bucket, multipart: Multipart, *, length_bytes: int, part_bytes: int) -> None:
        self._bucket = bucket
        self._multipart = multipart
        self._length_bytes = length_bytes
        self._part_bytes = part_bytes
        self._is_finished = False
        self._has_ended = False

    @property
    def token(self) -> str:
        return self._multipart.upload_id

    @property
    def part_bytes(self) -> int:
        return self._part_bytes

    def has_part(self, number: int, data: Buffer) -> bool:
        part = self._multipart.parts.get(number)
        view = bytes_of(data)
        if part is None or part.length_bytes != len(view):
            return False
        if part.sha256 is not None:
            return part.sha256 == sha256_base64(view)
        match = _MD5_TAG.fullmatch(part.etag)
        return match is not None and match[1] == md5_hex(view)

    def write_part(self, number: int, data: Buffer) -> None:
        if self._has_ended:
            raise StoreError(f"{self._name}: its upload has ended; nothing more is sent")
        view = bytes_of(data)
        expected = min(self._part_bytes, self._length_bytes - number * self._part_bytes)
        if number < 0 or len(view) != expected or expected <= 0:
            raise StoreError(
                f"{self._name}: part {number} of {self._length_bytes} bytes in parts of {self._part_bytes} "
                f"has {max(0, expected)} bytes, and {len(view)} were handed over"
            )
        room = self._bucket.room
        room.take(len(view), is_given_up=lambda: False)
        try:
            body = data if isinstance(data, bytearray) else bytearray(view)
            self._multipart.send(number, body)
        finally:
            room.release(len(view))

    def finish(self) -> None:
        if self._has_ended:
            raise StoreError(f"{self._name}: its upload has ended already")
        count = -(-self._length_bytes // self._part_bytes)
        missing = sorted(set(range(count)) - set(self._multipart.parts))
        if missing:
            raise StoreError(
                f"{self._name}: part {missing[0]}, and {len(missing) - 1} more, of {count} were not sent; "
                "send all of them before finish"
            )
        self._multipart.complete()
        self._has_ended = self._is_finished = True

    def abort(self) -> None:
        if not self._is_finished:
            self._has_ended = True
            self._multipart.abort()

    @property
    def _name(self) -> str:
        return self._bucket.where.name(self._multipart.key)


def _check_length(length_bytes: int) -> None:
    if length_bytes < 1:
        raise ConfigError(f"an upload has at least 1 byte, got {length_bytes}; put an empty object at once")


def _list_parts(bucket: Bucket, key: str, token: str) -> dict[int, SentPart]:
    found: dict[int, SentPart] = {}
    marker: dict[str, Any] = {}
    while True:
        page = bucket.ask("list_parts", key, UploadId=token, **marker).fields
        for entry in page.get("Parts") or []:
            found[int(entry["PartNumber"]) - 1] = _sent(entry)
        following = page.get("NextPartNumberMarker")
        if not page.get("IsTruncated"):
            return found
        if following is None or int(following) <= marker.get("PartNumberMarker", 0):
            raise StoreError(
                f"{bucket.where.name(key)}: the server says that there are more parts, and not where they "
                "begin"
            )
        marker = {"PartNumberMarker": int(following)}


def _sent(entry: Mapping[str, Any]) -> SentPart:
    sha256 = entry.get("ChecksumSHA256")
    return SentPart(
        etag=str(entry["ETag"]),
        length_bytes=int(entry["Size"]),
        sha256=None if sha256 is None else str(sha256),
    )
