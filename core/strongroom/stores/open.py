"""From what a user calls a root to the store that holds it. No I/O beyond looking at a folder."""

from __future__ import annotations

import os
from urllib.parse import unquote_to_bytes, urlsplit

from strongroom.errors import ConfigError
from strongroom.stores.base import Store
from strongroom.stores.local import LocalStore
from strongroom.stores.s3.store import S3Store

__all__ = ["open_store"]


def open_store(root: str | os.PathLike[str] | Store) -> Store:
    """The store at ``root``; nothing is created, and a `Store` is returned as it is.

    Args:
        root: a folder's path, a ``file://`` URI (percent-encoded), an ``s3://`` one (by the letter), or a
            store.

    Raises:
        ConfigError: it is none of these, its folder is a file, or boto3 is missing for a bucket.
    """
    if isinstance(root, str):
        if root[:5].lower() == "s3://":
            return S3Store(root)
        if root[:3].lower() == "s3:":
            raise ConfigError(
                f"the root {root!r} looks like a bucket's URI and is none; write s3://BUCKET/PREFIX (or, for "
                f"a folder of that name, ./{root})"
            )
        is_uri = "://" in root or root[:6].lower() == "file:/"
        return LocalStore(_path_of_uri(root) if is_uri else root)
    if isinstance(root, os.PathLike):
        if os.fsdecode(root)[:4].lower() == "s3:/":
            raise ConfigError(
                f"the root {os.fsdecode(root)!r} is a bucket's URI that went through a path, which takes one "
                "'/' away; pass it as a string"
            )
        return LocalStore(root)
    if isinstance(root, Store):
        return root
    raise ConfigError(f"a root is a path, a file:// or s3:// URI or a Store, got a {type(root).__name__}")


def _path_of_uri(uri: str) -> str:
    scheme, _, _ = uri.partition(":")
    if scheme.lower() != "file":
        raise ConfigError(
            f"the root {uri!r} has the scheme {scheme!r}; this release takes paths, file:// and s3:// URIs"
        )
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise ConfigError(f"the root {uri!r} is not a URI: {error}") from None
    if parts.netloc.lower() not in ("", "localhost"):
        raise ConfigError(
            f"the root {uri!r} names the host {parts.netloc!r}; file:// reaches this machine only"
        )
    if not parts.path.startswith("/"):
        raise ConfigError(f"the root {uri!r} holds no absolute path; write file:///folder")
    if parts.query or parts.fragment:
        raise ConfigError(f"the root {uri!r} has a '?' or '#'; in a folder's name write %3F or %23")
    return os.fsdecode(unquote_to_bytes(parts.path))
