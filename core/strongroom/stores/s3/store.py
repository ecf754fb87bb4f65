"""The store in a bucket: `strongroom.stores.base`'s promises, in requests that a write-only role may send.

It owns which request does what, and nothing of how: `creating` holds the commit's rule, `multipart` and
`writing` how large objects get there, `reading` and `listing` how they are found again. On the way of a save
there is no HEAD, GET, LIST or DELETE, but for a look after an answer that was lost.

In a bucket one name may be an object and a folder at once, and nothing here objects to that.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from strongroom.chance import uniform
from strongroom.errors import AccessDeniedError, ConfigError, OutcomeUnknownError
from strongroom.stores.base import Buffer, ObjectInfo, check_key, check_prefix
from strongroom.stores.offers import Tuning, Unfinished
from strongroom.stores.s3 import listing, reading, uploads
from strongroom.stores.s3.bucket import Bucket
from strongroom.stores.s3.calling import Patience
from strongroom.stores.s3.creating import InDoubtError, Standing, create
from strongroom.stores.s3.failures import GaveUpError
from strongroom.stores.s3.location import Location
from strongroom.stores.s3.options import S3Options
from strongroom.stores.s3.reading import S3Reader
from strongroom.stores.s3.uploads import S3Upload
from strongroom.stores.s3.writing import S3Writer, bytes_of

__all__ = ["S3Store"]


class S3Store:
    """Objects under one prefix of a bucket, which has to be there.

    Building one sends nothing. It may be used from several threads; a forked child gets a client of its own.

    Args:
        uri: ``s3://BUCKET/PREFIX``, taken by the letter.
        options: how the bucket is reached, and how hard.
        session: the boto3 session to go by, such as one with a role's credentials; None: the usual one.
        sleep: waits between tries, for so many seconds.
        monotonic: seconds, of a clock that cannot jump.
        draw: a random number between two others.
        draw_id: a write id, new at each call.

    Raises:
        ConfigError: the URI names no bucket, boto3 is missing, or it can make no client of this.
    """

    def __init__(
        self,
        uri: str,
        *,
        options: S3Options | None = None,
        session: Any | None = None,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
        draw: Callable[[float, float], float] = uniform,
        draw_id: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        where = Location.parse(uri)
        settings = options or S3Options()
        patience = Patience(
            tries=settings.tries,
            patience_s=settings.patience_s,
            sleep=sleep,
            monotonic=monotonic,
            draw=draw,
        )
        self._bucket = Bucket(where, settings, session, patience, draw_id)

    @property
    def uri(self) -> str:
        return self._bucket.where.uri

    @property
    def options(self) -> S3Options:
        """How the bucket is reached."""
        return self._bucket.options

    @property
    def tuning(self) -> Tuning:
        """What one request costs is its round trip, so many are under way at once."""
        options = self._bucket.options
        return Tuning(
            read_bytes=options.read_bytes, reads=options.reads_in_flight, looks=options.reads_in_flight
        )

    def __repr__(self) -> str:
        return f"S3Store({self.uri!r})"

    # Writing

    def open_writer(self, key: str, *, length_bytes: int) -> S3Writer:
        check_key(key)
        if length_bytes < 0:
            raise ConfigError(f"an object's length is not negative, got {length_bytes} for {key}")
        return S3Writer(self._bucket, key, length_bytes)

    def put(self, key: str, data: Buffer) -> None:
        view = bytes_of(data)
        with self.open_writer(key, length_bytes=len(view)) as writer:
            writer.write(view)
            writer.finish()

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        return self._create(key, data, until=None) is Standing.OURS

    def put_if_absent_within(self, key: str, data: Buffer, within_s: float) -> bool:
        """As `put_if_absent`, in so many seconds; see `strongroom.stores.offers.Bounded`."""
        # Untold counts as somebody else's: whoever alone writes this key knows better.
        until = self._bucket.patience.monotonic() + within_s
        return self._create(key, data, until=until) is Standing.OURS

    def replace(self, key: str, data: Buffer, *, version: str | None) -> bool:
        """Put an object in another's place, by ``If-Match``; see `strongroom.stores.offers.Replacing`."""
        standing = self._create(key, data, until=None, over=version)
        if standing is Standing.UNTOLD and version is not None:
            raise OutcomeUnknownError(
                f"{self._bucket.where.name(key)} was replaced, by this call or another: the answer was lost, "
                "and this identity may not look; read it again to see"
            )
        return standing is Standing.OURS

    def _create(self, key: str, data: Buffer, *, until: float | None, over: str | None = None) -> Standing:
        check_key(key)
        body, write_id = bytearray(bytes_of(data)), self._bucket.draw_id()
        try:
            return create(self._bucket, key, body, write_id=write_id, until=until, over=over)
        except InDoubtError as error:
            raise OutcomeUnknownError(
                f"{error}; something stands there, and it may or may not be this call's: open the root "
                "again to see"
            ) from error
        except GaveUpError as error:
            told = self._bucket.error(error, "put_object", key)
            if error.may_have_landed:
                raise OutcomeUnknownError(
                    f"{told}; it was sent, and the answer lost: it may stand or not; open the root again to "
                    "see"
                ) from error.failure
            raise told from error.failure

    def make_durable(self, prefix: str) -> None:
        # Each request was answered only once its object was durable, name included.
        check_prefix(prefix)

    # Reading

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        check_key(key)
        return reading.read(self._bucket, key, limit_bytes=limit_bytes)

    def open_reader(self, key: str) -> S3Reader:
        check_key(key)
        return reading.open_reader(self._bucket, key)

    def stat(self, key: str) -> ObjectInfo:
        check_key(key)
        try:
            found = self._bucket.ask("head_object", key).fields
        except GaveUpError as error:
            raise self._bucket.absence(error, "head_object", key) from error.failure
        return listing.info(found, "ContentLength")

    def list_names(self, prefix: str) -> list[str]:
        return listing.names(self._bucket, check_prefix(prefix))

    def outline(self, fold: str) -> Mapping[str, ObjectInfo | None]:
        """Every object, folders named ``fold`` as one each; see `strongroom.stores.offers.Outlining`."""
        check_key(fold)
        return listing.outline(self._bucket, fold)

    def details(self, prefix: str) -> Mapping[str, ObjectInfo]:
        """Every object in a folder and below; see `strongroom.stores.offers.Detailing`."""
        return listing.details(self._bucket, check_prefix(prefix))

    # Removing

    def delete(self, key: str) -> None:
        check_key(key)
        listing.delete(self._bucket, key)

    def delete_tree(self, prefix: str) -> None:
        prefix = check_prefix(prefix)
        if not prefix:
            raise ConfigError(f"delete_tree never removes a whole root; remove {self.uri} by hand")
        for keys in listing.keys_under(self._bucket, prefix):
            listing.delete_keys(self._bucket, keys)
        try:
            unfinished = listing.uploads_under(self._bucket, prefix + "/")
            for upload in unfinished:
                listing.abort(self._bucket, upload)
        except AccessDeniedError:
            # The bucket's lifecycle clears them.
            return

    # Uploads that can be gone on with

    def begin_upload(self, key: str, *, length_bytes: int) -> S3Upload:
        """Begin an object of exactly ``length_bytes``; see `strongroom.stores.offers.Resuming`."""
        check_key(key)
        return uploads.begin(self._bucket, key, length_bytes=length_bytes)

    def resume_upload(self, key: str, *, length_bytes: int, token: str) -> S3Upload | None:
        """Go on with one that was begun before; see `strongroom.stores.offers.Resuming`."""
        check_key(key)
        return uploads.resume(self._bucket, key, length_bytes=length_bytes, token=token)

    def unfinished_uploads(self) -> list[Unfinished]:
        """Those under the root; see `strongroom.stores.offers.Resuming`."""
        return listing.uploads_under(self._bucket, "")

    def abort_upload(self, upload: Unfinished) -> None:
        """Remove an unfinished upload's parts; see `strongroom.stores.offers.Resuming`."""
        listing.abort(self._bucket, upload)
