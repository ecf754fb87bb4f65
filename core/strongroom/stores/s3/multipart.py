"""One multipart upload: begun, its parts sent in any order, and completed or aborted.

Who sends which part when, and by which thread, is for `writing` and `uploads`. An upload that was aborted
while a part was on its way may keep that part (S3 API reference, AbortMultipartUpload), so it is looked at
and aborted again, where this identity may look.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from strongroom.errors import AccessDeniedError, StoreError, StoreUnavailableError
from strongroom.stores.s3.bucket import Bucket, after
from strongroom.stores.s3.creating import (
    CLEARING_TRIES,
    WRITE_ID,
    Standing,
    create,
    exists_error,
    look_whose,
    remove_quietly,
)
from strongroom.stores.s3.failures import GaveUpError
from strongroom.stores.s3.listing import uploads_under
from strongroom.stores.s3.options import MAX_PARTS

__all__ = ["Multipart", "SentPart", "part_length"]

_LOG: Final = logging.getLogger("strongroom")
_MIB: Final = 1 << 20
_ABORTS: Final = 3


def part_length(length_bytes: int, part_bytes: int) -> int:
    """How long the parts of an object are: as given, unless there would be too many."""
    least = -(-length_bytes // MAX_PARTS)
    return part_bytes if least <= part_bytes else -(-least // _MIB) * _MIB


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPart:
    """A part that the server has.

    Attributes:
        etag: the server's name for these bytes.
        length_bytes: how many.
        sha256: their digest, in base64; None: the server does not tell.
    """

    etag: str
    length_bytes: int
    sha256: str | None


class Multipart:
    """An upload under way; `send` may be called from several threads at once.

    Args:
        upload_id: the server's name for it.
        write_id: what its object will carry; None: another process began it.
        was_lost: whether there may be another upload of the same key, whose answer was lost.
    """

    def __init__(
        self,
        bucket: Bucket,
        key: str,
        *,
        length_bytes: int,
        upload_id: str,
        write_id: str | None,
        was_lost: bool = False,
    ) -> None:
        self.key = key
        self.upload_id = upload_id
        self._bucket = bucket
        self._length_bytes = length_bytes
        self._write_id = write_id
        self._was_lost = was_lost
        self._may_stand = False
        self._parts: dict[int, SentPart] = {}
        self._lock = threading.Lock()

    @classmethod
    def begin(cls, bucket: Bucket, key: str, *, length_bytes: int) -> Multipart:
        """Begin one.

        Raises:
            StoreError: the server refused.
        """
        write_id = bucket.draw_id()
        answer = bucket.must(
            "create_multipart_upload", key, ChecksumAlgorithm="SHA256", Metadata={WRITE_ID: write_id}
        )
        upload_id = str(answer.fields["UploadId"])
        return cls(
            bucket,
            key,
            length_bytes=length_bytes,
            upload_id=upload_id,
            write_id=write_id,
            was_lost=answer.was_lost,
        )

    @property
    def parts(self) -> dict[int, SentPart]:
        """What has arrived, by number from 0."""
        with self._lock:
            return dict(self._parts)

    def note(self, number: int, part: SentPart) -> None:
        """A part that has arrived before."""
        with self._lock:
            self._parts[number] = part

    def send(self, number: int, body: bytearray, *, is_given_up: Callable[[], bool] = _never) -> None:
        """Send a part, counted from 0, over what stands there of it.

        Raises:
            StoreError: it could not be sent.
        """
        checksums = self._bucket.checksums
        total = checksums.of(body)
        try:
            answer = self._bucket.ask(
                "upload_part",
                self.key,
                is_given_up=is_given_up,
                check=lambda fields: checksums.confirm(fields, total, body),
                UploadId=self.upload_id,
                PartNumber=number + 1,
                Body=body,
                **checksums.fields(total),
            )
        except GaveUpError as error:
            if error.failure.is_gone_upload:
                raise self._vanished() from error.failure
            raise self._bucket.error(error, "upload_part", self.key) from error.failure
        self.note(
            number, SentPart(etag=str(answer.fields["ETag"]), length_bytes=len(body), sha256=total.sha256)
        )

    def complete(self) -> None:
        """Make the object; on return it is whole and durable.

        Raises:
            StoreError: something else stands there, or the server refused.
        """
        parts = self.parts
        listed = [
            {"PartNumber": number + 1, "ETag": part.etag}
            | ({} if part.sha256 is None else {"ChecksumSHA256": part.sha256})
            for number, part in sorted(parts.items())
        ]
        try:
            self._bucket.ask(
                "complete_multipart_upload",
                self.key,
                UploadId=self.upload_id,
                IfNoneMatch="*",
                MultipartUpload={"Parts": listed},
            )
        except GaveUpError as error:
            self._settle(error)
        if self._was_lost:
            self._abort_strays()

    def abort(self) -> None:
        """Give it up, and remove its parts where this identity may; it never raises a store's error."""
        try:
            for _ in range(_ABORTS):
                self._abort_one(self.upload_id)
                if not self._keeps_parts():
                    break
        except StoreError as error:
            # The bucket's lifecycle clears them.
            _LOG.debug("parts of an upload stay for the bucket's lifecycle: %s", error)
        if self._was_lost:
            self._abort_strays()
        if self._may_stand:
            self._remove_ours()

    def _settle(self, error: GaveUpError) -> None:
        """What a failed completion comes to: nothing, where an earlier try of it was done."""
        failure = error.failure
        if not (failure.exists or failure.is_gone_upload):
            self._may_stand = error.may_have_landed
            raise self._bucket.error(error, "complete_multipart_upload", self.key) from failure
        if not error.was_lost:
            raise self._vanished() if failure.is_gone_upload else exists_error(self._bucket, self.key)
        standing = self._look()
        if standing is Standing.OTHERS:
            raise exists_error(self._bucket, self.key) from failure
        if standing is Standing.UNTOLD and failure.is_gone_upload and not self._stands():
            raise self._vanished() from failure
        # Untold, and it stands: nobody but this attempt ever writes this key, so an earlier try did it.

    def _look(self) -> Standing:
        return look_whose(self._bucket, self.key, write_id=self._write_id, length_bytes=self._length_bytes)

    def _stands(self) -> bool:
        """Whether anything stands at the key, told by writing alone: an empty object cannot be created there.

        Where it can, this save fails, so what is left of that is part of nothing. And where an answer to that
        was lost, what stands may be just this empty one, so the save fails as well.

        Raises:
            StoreError: it could not be told.
        """
        try:
            standing = create(self._bucket, self.key, bytearray(), write_id=self._bucket.draw_id())
        except GaveUpError as error:
            raise self._bucket.error(error, "put_object", self.key) from error.failure
        if standing is Standing.OURS:
            remove_quietly(self._bucket, self.key)
            return False
        if standing is Standing.UNTOLD:
            raise StoreUnavailableError(
                f"{self._bucket.where.name(self.key)}: whether it was made could not be found out, since "
                "answers got lost and this identity may not look; save again"
            )
        return True

    def _vanished(self) -> StoreError:
        return StoreError(
            f"{self._bucket.where.name(self.key)}: its upload is gone, so something aborted it: a lifecycle "
            "rule with a shorter time than a save takes, or garbage collection; save again"
        )

    def _abort_one(self, upload_id: str) -> None:
        try:
            self._bucket.ask(
                "abort_multipart_upload", self.key, is_given_up=after(CLEARING_TRIES), UploadId=upload_id
            )
        except GaveUpError as error:
            if not error.failure.is_gone_upload:
                raise self._bucket.error(error, "abort_multipart_upload", self.key) from error.failure

    def _keeps_parts(self) -> bool:
        try:
            found = self._bucket.ask(
                "list_parts",
                self.key,
                is_given_up=after(CLEARING_TRIES),
                UploadId=self.upload_id,
                MaxParts=1,
            )
        except GaveUpError:
            # It is gone, as it has to be; or this identity may not look.
            return False
        return bool(found.fields.get("Parts"))

    def _remove_ours(self) -> None:
        """Remove the object, where the answer to its completion was lost and it was made all the same."""
        try:
            standing = self._look()
        except StoreError as error:
            _LOG.debug("an object may stay until garbage collection: %s", error)
            return
        if standing is Standing.OURS:
            remove_quietly(self._bucket, self.key)

    def _abort_strays(self) -> None:
        """Abort what an answer that got lost has begun besides, where this identity may look."""
        try:
            for stray in uploads_under(self._bucket, self.key, is_given_up=after(CLEARING_TRIES)):
                if stray.key == self.key and stray.token != self.upload_id:
                    self._abort_one(stray.token)
        except AccessDeniedError:
            return
        except StoreError as error:
            _LOG.debug("an upload stays for the bucket's lifecycle: %s", error)
