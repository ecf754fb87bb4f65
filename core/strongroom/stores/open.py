"""From what a user calls a root to the store that holds it. No I/O beyond looking at the root."""

from __future__ import annotations

import os
from urllib.parse import unquote_to_bytes, urlsplit

from strongroom.errors import ConfigError
from strongroom.stores.base import Store
from strongroom.stores.local import LocalStore

__all__ = ["open_store"]


def open_store(root: str | os.PathLike[str] | Store) -> Store:
    """The store at ``root``; nothing is created, and a `Store` is returned as it is.

    Args:
        root: a folder's path, a ``file://`` URI (percent-encoded), or a store.

    Raises:
        ConfigError: it is none of these, or its folder is a file.
    """
    if isinstance(root, str):
        is_uri = "://" in root or root[:6].lower() == "file:/"
        return LocalStore(_path_of_uri(root) if is_uri else root)
    if isinstance(root, os.PathLike):
        return LocalStore(root)
    if isinstance(root, Store):
        return root
    raise ConfigError(f"a root is a path, a file:// URI or a Store, got a {type(root).__name__}")


def _path_of_uri(uri: str) -> str:
    scheme, _, _ = uri.partition(":")
    if scheme.lower() != "file":
        raise ConfigError(
            f"the root {uri!r} has the scheme {scheme!r}; this release takes paths and file:// URIs"
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
