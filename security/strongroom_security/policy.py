"""The policy file: one TOML file by which a platform sets what every run must do."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from strongroom.config import check_digest
from strongroom.digest import DigestAlgorithm
from strongroom.errors import ConfigError
from strongroom.sealing import Sealing

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["SecurityPolicy"]

_MAX_BYTES: Final = 1 << 20

_NOT_YET: Final = {
    "seal": "sealing",
    "sign": "signing",
    "verify": "verifying signatures",
    "audit": "the audit log",
    "role": "roles",
}
"""Sections that the format of the file has and this release cannot carry out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityPolicy:
    """What every checkpoint of a run must be.

    Attributes:
        digest: ``"blake3"`` or ``"sha256"``; None: no opinion.
        sealing: how files are sealed and opened; None: they are not.
    """

    digest: DigestAlgorithm | None = None
    sealing: Sealing | None = None

    def __post_init__(self) -> None:
        if self.digest is not None:
            check_digest(self.digest)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SecurityPolicy:
        """Read a policy file.

        Raises:
            ConfigError: it cannot be read, is no TOML, has an unknown member, or asks for
                something that this release cannot do.
        """
        where = os.fspath(path)
        try:
            data = Path(where).read_bytes()
        except OSError as error:
            raise ConfigError(f"the policy {where} cannot be read: {error.strerror or error}") from error
        if len(data) > _MAX_BYTES:
            raise ConfigError(f"the policy {where} has {len(data)} bytes; at most {_MAX_BYTES} are read")
        try:
            document = tomllib.loads(data.decode("utf-8"))
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"the policy {where} is not TOML: {error}") from None
        return cls._from_document(document, where)

    @classmethod
    def _from_document(cls, document: Mapping[str, Any], where: str) -> SecurityPolicy:
        asked = [f"[{section}] ({what})" for section, what in _NOT_YET.items() if section in document]
        if asked:
            raise ConfigError(
                f"the policy {where} asks for {', '.join(asked)}, which this release of Strongroom cannot "
                "do; it "
                f"refuses to run without. Use a release that can, or take the section out if that is meant"
            )
        unknown = sorted(set(document) - {"digest"})
        if unknown:
            raise ConfigError(f"the policy {where} has the unknown member {unknown[0]!r}; 'digest' is known")
        digest = document.get("digest")
        if digest is None:
            return cls()
        if not isinstance(digest, str):
            raise ConfigError(f"the policy {where}: digest must be text, got {digest!r:.60}")
        return cls(digest=check_digest(digest))
