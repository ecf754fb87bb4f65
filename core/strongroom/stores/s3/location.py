"""Where in a bucket a root is: from a URI to a bucket and a prefix, and between keys here and there. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from strongroom.errors import ConfigError

__all__ = ["Location"]

_BUCKET = re.compile(
    # An access point stands for a bucket.
    r"arn:[A-Za-z0-9-]+:s3[A-Za-z0-9-]*:[A-Za-z0-9-]*:[0-9]*:accesspoint[:/][A-Za-z0-9-]{1,63}"
    r"|[A-Za-z0-9][A-Za-z0-9._-]{1,254}"
)
_MAX_PREFIX_BYTES: Final = 500
"""A key has at most 1,024 bytes (Amazon S3 user guide), and one of ours up to 512."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A root in a bucket.

    Attributes:
        bucket: its name, or an access point's ARN.
        prefix: what every key begins with; empty, or ends in ``/``.
    """

    bucket: str
    prefix: str

    @classmethod
    def parse(cls, uri: str) -> Location:
        """The root that a URI names; it is taken by the letter, as every tool for S3 does.

        Raises:
            ConfigError: it names none.
        """
        scheme, separator, rest = uri.partition("://")
        if not separator or scheme.lower() != "s3":
            raise ConfigError(f"a root in a bucket is s3://BUCKET/PREFIX, got {uri!r:.200}")
        match = _BUCKET.match(rest)
        bucket = match[0] if match else ""
        path = rest[len(bucket) :]
        if not bucket or (path and not path.startswith("/")):
            raise ConfigError(
                f"the root {uri!r:.200} names no bucket; expected s3://BUCKET/PREFIX, and a bucket's name is "
                "of letters, digits, '.', '-' and '_'"
            )
        parts = path.strip("/").split("/") if path.strip("/") else []
        if any(part in ("", ".", "..") or not part.isprintable() for part in parts):
            raise ConfigError(
                f"the root {uri!r:.200} has a part that is empty, '.', '..' or not printable; tools that "
                "copy buckets to folders would lose it"
            )
        prefix = "".join(part + "/" for part in parts)
        if len(prefix.encode()) > _MAX_PREFIX_BYTES:
            raise ConfigError(
                f"the root's prefix has {len(prefix.encode())} bytes; at most {_MAX_PREFIX_BYTES} leave room "
                f"for keys: {uri[:100]!r}..."
            )
        return cls(bucket=bucket, prefix=prefix)

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def key(self, key: str) -> str:
        """What the server calls an object."""
        return self.prefix + key

    def folder(self, prefix: str) -> str:
        """What the keys of all objects in a folder begin with; ``""`` is the root."""
        return f"{self.prefix}{prefix}/" if prefix else self.prefix

    def name(self, key: str) -> str:
        """The object's URI, for people."""
        return f"s3://{self.bucket}/{self.prefix}{key}"
