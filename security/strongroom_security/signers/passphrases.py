"""Where the passphrase of an encrypted private key is: a policy says so, and never the passphrase itself.

==============  ==========================================================================
``env:NAME``    an environment variable
``file:PATH``   a file for this user alone (`keyfiles.read_private`); a line break at its end is no part of it
==============  ==========================================================================

No command is run for one. An error shows neither a passphrase nor what may have been meant as one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from strongroom.errors import ConfigError
from strongroom_security.recipients.keyfiles import read_private
from strongroom_security.secret import Secret

__all__ = ["read_passphrase"]

_LIMIT_BYTES: Final = 1023
"""The longest that OpenSSL takes for a key in PEM (``PEM_BUFSIZE`` is 1,024)."""

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")


def read_passphrase(text: str, *, base: Path) -> Secret:
    """The passphrase that a source names.

    Args:
        text: ``env:NAME`` or ``file:PATH``.
        base: what a relative path is relative to.

    Raises:
        ConfigError: it is no source, the variable or file is not there, others can reach the file, or there
            is no passphrase in it.
    """
    kind, _, rest = text.partition(":")
    if kind == "env" and _NAME.fullmatch(rest):
        return _checked(_of_environment(rest), f"the environment variable {rest}")
    if kind == "file" and rest:
        path = base / rest
        return _checked(_of_file(path), f"the passphrase file {path}")
    # It is not repeated: it may be the passphrase.
    raise ConfigError(
        "the passphrase of a private key is named by where it is, env:NAME or file:PATH, and what was given "
        "is neither; if it was the passphrase, it has been shown to whoever can read the policy"
    )


def _of_environment(name: str) -> Secret | None:
    if name not in os.environ:
        raise ConfigError(
            f"the environment variable {name} is not set; it is to hold a private key's passphrase"
        )
    data = os.fsencode(os.environ[name])
    return Secret(data) if data else None


def _of_file(path: Path) -> Secret | None:
    data = read_private(path, limit_bytes=_LIMIT_BYTES + 2).removesuffix(b"\n").removesuffix(b"\r")
    return Secret(data) if data else None


def _checked(found: Secret | None, where: str) -> Secret:
    if found is None:
        raise ConfigError(f"{where} is empty, where a passphrase was expected")
    if found.size_bytes > _LIMIT_BYTES:
        raise ConfigError(f"{where} holds {found.size_bytes} bytes; a passphrase has at most {_LIMIT_BYTES}")
    return found
