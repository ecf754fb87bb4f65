"""Fills the core's seam for signing: an OMS bundle over ``data/``, and a signature in each launch record.

It owns what is signed: which files a bundle lists, and the type under which a launch is. How a bundle is
spelled is `strongroom_security.oms`'s, who holds the key `strongroom_security.signers`'. No file is read: the
digests were taken as the files were written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from strongroom import layout
from strongroom.digest import sha256_of
from strongroom.manifest import FileRecord, Launch, LaunchSignature
from strongroom_security import dsse, oms
from strongroom_security.keyrequests import Requests, collecting
from strongroom_security.signers.base import Signer, sign_checked

__all__ = ["LAUNCH_TYPE", "ManifestSigning", "resources_of"]

LAUNCH_TYPE: Final = "application/vnd.strongroom.launch+json"
"""Of a launch record, as DSSE's payload type: it can be shown as nothing else."""


def resources_of(manifest: bytes, files: Sequence[FileRecord]) -> dict[str, bytes]:
    """What a bundle lists: name under ``data/`` -> SHA-256.

    Every file where the manifest's digests are SHA-256; else the manifest, which pins the others.
    """
    listed = {record.path: record.digest.value for record in files if record.digest.algorithm == "sha256"}
    return {**listed, layout.MANIFEST: sha256_of(manifest).value}


class ManifestSigning:
    """Signs by one key.

    Args:
        signer: who holds it.
        within_s: what one signature may take.
        check: raises where the key must not sign now, because it is revoked, say; None: nobody minds.
    """

    def __init__(
        self, signer: Signer, *, within_s: float, check: Callable[[Signer], None] | None = None
    ) -> None:
        self.signer: Final = signer
        self._within_s = within_s
        self._check = check

    @property
    def fingerprint(self) -> str:
        return self.signer.public_key.id[:16]

    def sign_launch(self, launch: Launch, *, within_s: float) -> LaunchSignature:
        self._check_key()
        message = dsse.pae(LAUNCH_TYPE, launch.to_be_signed)
        signature = sign_checked(self.signer, message, within_s=min(within_s, self._within_s))
        return LaunchSignature(
            key_id=self.signer.public_key.id, value=signature, certificates=tuple(self.signer.certificates)
        )

    def sign_checkpoint(self, manifest: bytes, files: Sequence[FileRecord], *, within_s: float) -> bytes:
        self._check_key()
        payload = oms.statement(resources_of(manifest, files))
        return oms.sign_payload(payload, self.signer, within_s=min(within_s, self._within_s))

    def sign_and_tell(
        self, manifest: bytes, files: Sequence[FileRecord], *, within_s: float
    ) -> tuple[bytes, tuple[str, ...]]:
        """As `strongroom.signing.TellingSigning.sign_and_tell`."""
        with collecting(Requests()) as requests:
            signature = self.sign_checkpoint(manifest, files, within_s=within_s)
        return signature, requests.ids

    def sign_launch_and_tell(
        self, launch: Launch, *, within_s: float
    ) -> tuple[LaunchSignature, tuple[str, ...]]:
        """As `strongroom.signing.TellingLaunchSigning.sign_launch_and_tell`."""
        with collecting(Requests()) as requests:
            signature = self.sign_launch(launch, within_s=within_s)
        return signature, requests.ids

    def _check_key(self) -> None:
        if self._check is not None:
            self._check(self.signer)
