"""``[sign]`` of a policy: whose key signs what is saved."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from strongroom.errors import ConfigError
from strongroom.signing import Signing
from strongroom_security.members import TIMEOUT_S, WrongMemberError, seconds

if TYPE_CHECKING:
    from strongroom_security.signers.base import Signer

__all__ = ["Sign"]

_SECTION: Final = "sign"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Sign:
    """Checkpoints and launches are signed on save, and demanded to be on restore.

    The key is opened here, so that one that cannot be had is told before training starts.

    Args:
        key: who signs: a text as in the policy file (``"file:signer.pem"``, ``"aws-kms:..."``,
            ``"pkcs11:..."``), or a `Signer` of your own.
        certificate: a PEM file with the key's certificate and those up to its root, in this order; None:
            verifiers know the key itself.
        passphrase: where an encrypted key file's passphrase is: ``"env:NAME"`` or ``"file:PATH"``.
        timeout_s: seconds that one signature may take, tries included.
        base: the folder that relative paths are relative to; None: the current one.

    Raises:
        ConfigError: a value cannot work, or the key cannot be had.
    """

    signer: Signer
    timeout_s: float

    def __init__(
        self,
        *,
        key: str | Signer,
        certificate: str | None = None,
        passphrase: str | None = None,
        timeout_s: float = TIMEOUT_S,
        base: str | os.PathLike[str] | None = None,
    ) -> None:
        from strongroom_security.signers.opening import open_signer

        for member, value in (("certificate", certificate), ("passphrase", passphrase)):
            if value is not None and not isinstance(value, str):
                raise WrongMemberError(_SECTION, member, f"expected text, got {value!r:.60}")
        put = object.__setattr__
        put(self, "timeout_s", seconds(_SECTION, "timeout_s", timeout_s))
        folder = Path(os.curdir if base is None else base)
        try:
            put(self, "signer", open_signer(key, base=folder, certificate=certificate, passphrase=passphrase))
        except ConfigError as error:
            raise WrongMemberError(_SECTION, "key", str(error)) from None

    def signing(self, check: Callable[[Signer], None] | None = None) -> Signing:
        """What fills the core's seam.

        Args:
            check: raises where the key must not sign now.
        """
        from strongroom_security.signing import ManifestSigning

        return ManifestSigning(self.signer, within_s=self.timeout_s, check=check)

    def __repr__(self) -> str:
        signer = getattr(self, "signer", None)
        return f"Sign(key={getattr(signer, 'uri', None)!r})"
