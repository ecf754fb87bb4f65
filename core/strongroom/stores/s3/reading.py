"""Reading: whole small objects in one request, large ones by ranges, straight into the caller's memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from strongroom.errors import FormatError, StoreError, StoreUnavailableError
from strongroom.stores.s3.bucket import Bucket
from strongroom.stores.s3.failures import GaveUpError, TryFailedError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["S3Reader", "open_reader", "read"]

_MIB: Final = 1 << 20
_RANGE: Final = re.compile(r"bytes ([0-9]+)-([0-9]+)/([0-9]+|\*)")


def read(bucket: Bucket, key: str, *, limit_bytes: int) -> bytes:
    """The whole object, in one request.

    Raises:
        ObjectNotFoundError: it is absent.
        FormatError: it is longer than ``limit_bytes``, of which nothing was kept.
    """
    parameters = {"Bucket": bucket.where.bucket, "Key": bucket.where.key(key)}

    def once() -> bytes | int:
        answer, body = bucket.client().get(parameters)
        is_whole = False
        try:
            length_bytes = int(answer["ContentLength"])
            if length_bytes > limit_bytes:
                # The rest is not fetched: the connection is dropped.
                return length_bytes
            buffer = bytearray(length_bytes)
            _fill(body, memoryview(buffer), _Patience.of(bucket, length_bytes))
            is_whole = True
        finally:
            body.close(is_whole=is_whole)
        return bytes(buffer)

    try:
        found, _ = bucket.repeat(once)
    except GaveUpError as error:
        raise bucket.absence(error, "get_object", key) from error.failure
    if isinstance(found, int):
        raise FormatError(
            f"{bucket.where.name(key)} holds {found} bytes, at most {limit_bytes} were expected"
        )
    whole: bytes = found
    return whole


def open_reader(bucket: Bucket, key: str) -> S3Reader:
    """Open an object for ranged reads.

    Raises:
        ObjectNotFoundError: it is absent.
    """
    try:
        found = bucket.ask("head_object", key).fields
    except GaveUpError as error:
        raise bucket.absence(error, "head_object", key) from error.failure
    return S3Reader(bucket, key, size_bytes=int(found["ContentLength"]), etag=found.get("ETag"))


class S3Reader:
    """One version of an object; `read_into` may be called from several threads at once.

    Every range is asked for under the condition that the object is still the one that was opened: bytes of
    two objects never mix.
    """

    def __init__(self, bucket: Bucket, key: str, *, size_bytes: int, etag: str | None) -> None:
        self._bucket = bucket
        self._key = key
        self._size_bytes = size_bytes
        self._etag = etag
        self._is_closed = False

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read_into(self, offset_bytes: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset_bytes``; return how many bytes were filled.

        Raises:
            StoreUnavailableError: another object stands there since it was opened; open it again.
        """
        if self._is_closed:
            raise StoreError(f"{self._bucket.where.name(self._key)}: its reader was closed")
        if not buffer.nbytes:
            return 0
        target = buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
        target = target[: max(0, self._size_bytes - offset_bytes)]
        step_bytes = self._bucket.options.read_bytes
        for begin in range(0, len(target), step_bytes):
            self._read_range(offset_bytes + begin, target[begin : begin + step_bytes])
        return len(target)

    def close(self) -> None:
        self._is_closed = True

    def _read_range(self, offset_bytes: int, target: memoryview) -> None:
        filled = 0

        def once() -> None:
            nonlocal filled
            begin = offset_bytes + filled
            # What an earlier try has brought is not asked for again.
            filled += self._read_once(begin, target[filled:])
            if filled < len(target):
                raise TryFailedError(
                    f"the answer ended after {filled} of {len(target)} bytes",
                    code="BodyCutShort",
                    was_sent=True,
                )

        try:
            self._bucket.repeat(once)
        except GaveUpError as error:
            if error.failure.exists:
                raise StoreUnavailableError(
                    f"{self._bucket.where.name(self._key)} was replaced while it was read; nothing that "
                    "Strongroom writes is: see who does, and read it again"
                ) from error.failure
            raise self._bucket.absence(error, "get_object", self._key) from error.failure

    def _read_once(self, begin: int, target: memoryview) -> int:
        parameters: dict[str, Any] = {
            "Bucket": self._bucket.where.bucket,
            "Key": self._bucket.where.key(self._key),
            "Range": f"bytes={begin}-{begin + len(target) - 1}",
        }
        if self._etag:
            parameters["IfMatch"] = self._etag
        answer, body = self._bucket.client().get(parameters)
        filled = 0
        try:
            self._check_range(answer, begin, len(target))
            patience = _Patience.of(self._bucket, len(target))
            filled = _fill(body, target, patience, is_short_fine=True)
        finally:
            body.close(is_whole=filled == len(target))
        return filled

    def _check_range(self, answer: Any, begin: int, length_bytes: int) -> None:
        match = _RANGE.fullmatch(str(answer.get("ContentRange", "")))
        if match is not None:
            is_right = int(match[1]) == begin and int(match[2]) - begin + 1 == length_bytes
        else:
            is_right = begin == 0 and answer.get("ContentLength") == length_bytes
        if not is_right:
            raise TryFailedError(
                f"bytes {begin} to {begin + length_bytes - 1} were asked for, and "
                f"{answer.get('ContentRange') or 'all of them'} came",
                code="WrongRange",
                is_passing=False,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Patience:
    """How long a body may take as a whole: what drips never makes one wait too long.

    Attributes:
        until: by `monotonic`.
    """

    monotonic: Callable[[], float]
    until: float

    @classmethod
    def of(cls, bucket: Bucket, length_bytes: int) -> _Patience:
        """Two of the longest waits, and one more for each MiB."""
        monotonic = bucket.patience.monotonic
        waits = 2 + length_bytes / _MIB
        return cls(monotonic, monotonic() + waits * bucket.options.read_timeout_s)

    def check(self) -> None:
        if self.monotonic() > self.until:
            raise TryFailedError("the answer came too slowly, and was not waited for", code="TooSlow")


def _fill(body: Any, target: memoryview, patience: _Patience, *, is_short_fine: bool = False) -> int:
    """Read a body into memory until that is full.

    Raises:
        TryFailedError: it broke off.
    """
    filled = 0
    while filled < len(target):
        try:
            patience.check()
            count = body.read_into(target[filled:])
        except TryFailedError:
            if is_short_fine and filled:
                return filled
            raise
        if count == 0:
            if is_short_fine:
                return filled
            raise TryFailedError(
                f"the answer ended after {filled} of {len(target)} bytes", code="BodyCutShort"
            )
        filled += count
    return filled
