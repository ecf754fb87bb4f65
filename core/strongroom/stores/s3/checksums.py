"""What the server has to confirm of the bytes that it was sent.

Each body goes out with its SHA-256, which the server compares before it keeps anything. The algorithm is
named beside it, as boto3 does: a bucket with a default retention takes nothing without that, or
``Content-MD5``. A server that does not confirm the sum may not know it (Ceph before 2025, and others): from
then on ``Content-MD5`` goes along, which all of them compare, and the ETag that comes back has to be just
that.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from strongroom.stores.s3.failures import TryFailedError

__all__ = ["Checksums", "Sum", "md5_hex", "sha256_base64"]

_LOG: Final = logging.getLogger("strongroom")
_MD5_TAG: Final = re.compile(r'"?([0-9a-f]{32})"?')


def sha256_base64(data: bytes | bytearray | memoryview) -> str:
    """As S3's headers spell it."""
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def md5_hex(data: bytes | bytearray | memoryview) -> str:
    """As an ETag spells it; against accidents, not against people."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """Of one body."""

    sha256: str
    md5: str | None


class Checksums:
    """What one server has shown that it confirms; safe to use from several threads."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._wants_md5 = False

    def of(self, body: bytearray) -> Sum:
        return Sum(sha256=sha256_base64(body), md5=md5_hex(body) if self._wants_md5 else None)

    def fields(self, total: Sum) -> dict[str, Any]:
        """What goes along with a body."""
        fields = {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": total.sha256}
        if total.md5 is not None:
            fields["ContentMD5"] = base64.b64encode(bytes.fromhex(total.md5)).decode()
        return fields

    def confirm(self, answer: Mapping[str, Any], total: Sum, body: bytearray) -> None:
        """Compare what the server says that it has with what it was sent.

        Raises:
            TryFailedError: it has other bytes.
        """
        echoed = answer.get("ChecksumSHA256")
        if echoed is not None:
            if echoed != total.sha256:
                raise _other_bytes("SHA-256", total.sha256, str(echoed))
            return
        if not self._wants_md5:
            self._wants_md5 = True
            _LOG.warning(
                "%s: the server does not confirm SHA-256 of uploads; Content-MD5 goes along from now on",
                self._uri,
            )
        if answer.get("ServerSideEncryption", "AES256") != "AES256" or answer.get("SSECustomerAlgorithm"):
            # Then the ETag is no digest of the bytes.
            return
        match = _MD5_TAG.fullmatch(str(answer.get("ETag", "")))
        expected = total.md5 or md5_hex(body)
        if match is not None and match[1] != expected:
            raise _other_bytes("MD5", expected, match[1])


def _other_bytes(what: str, sent: str, kept: str) -> TryFailedError:
    return TryFailedError(
        f"{what} of what was sent is {sent}, and of what the server has {kept}",
        status=400,
        code="BadDigest",
    )
