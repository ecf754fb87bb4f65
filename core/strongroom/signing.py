"""The seam that signing fills: who signs what is saved, and who judges what may be read.

The core knows nothing of keys and signatures. It names what is to be signed, stores what comes back
at its place, and asks before it believes a manifest. `strongroom_security` is what fills the seam.

Only the coordinator of a job signs and judges: the other ranks of a job trust it, and are told which
manifest it is by the digest in ``COMMIT``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from strongroom.auditing import NO_AUDIT, Auditor
from strongroom.errors import ConfigError, StrongroomError

if TYPE_CHECKING:
    from strongroom.manifest import CheckpointRef, Commit, FileRecord, Launch, LaunchSignature, Manifest
    from strongroom.sealing import Sealing
    from strongroom.stores.base import Store

__all__ = [
    "MAX_SIGNATURE_BYTES",
    "NO_GUARD",
    "Floor",
    "Guard",
    "LaunchRequests",
    "Signing",
    "TellingLaunchSigning",
    "TellingSigning",
    "Trust",
    "Trusted",
    "sign_telling",
]

_LOG: Final = logging.getLogger("strongroom")

MAX_SIGNATURE_BYTES: Final = 256 << 20
"""A signature file's length: room for the names and digests of as many files as a manifest may list."""


@runtime_checkable
class Signing(Protocol):
    """What a policy's ``[sign]`` comes to."""

    @property
    def fingerprint(self) -> str:
        """Tells whose key signs: the same on every rank of a job."""

    def sign_launch(self, launch: Launch, *, within_s: float) -> LaunchSignature:
        """Sign a launch's record (`strongroom.manifest.Launch.to_be_signed`).

        Raises:
            KeyServiceError, NoKeyError: whoever keeps the key was not reached in time, or refused.
        """

    def sign_checkpoint(self, manifest: bytes, files: Sequence[FileRecord], *, within_s: float) -> bytes:
        """The bytes of ``signature.json``.

        Args:
            manifest: the bytes of ``data/MANIFEST.json``.
            files: what it lists, sorted by path. No file is read: the digests are in the records.
            within_s: how long whoever keeps the key may take.

        Raises:
            KeyServiceError, NoKeyError: whoever keeps the key was not reached in time, or refused.
        """


@runtime_checkable
class TellingSigning(Protocol):
    """A `Signing` that can tell by which requests it had something signed."""

    def sign_and_tell(
        self, manifest: bytes, files: Sequence[FileRecord], *, within_s: float
    ) -> tuple[bytes, tuple[str, ...]]:
        """As `Signing.sign_checkpoint`, and what key services call the requests in their own logs."""


@runtime_checkable
class TellingLaunchSigning(Protocol):
    """A `Signing` that can tell by which requests it had a launch signed."""

    def sign_launch_and_tell(
        self, launch: Launch, *, within_s: float
    ) -> tuple[LaunchSignature, tuple[str, ...]]:
        """As `Signing.sign_launch`, and what key services call the requests in their own logs."""


class LaunchRequests:
    """Signs by another `Signing`, and remembers by which requests launches were signed.

    Attributes:
        requests: their ids, as far as who signs tells.
    """

    def __init__(self, signing: Signing) -> None:
        self.requests: tuple[str, ...] = ()
        self._signing = signing

    @property
    def fingerprint(self) -> str:
        return self._signing.fingerprint

    def sign_launch(self, launch: Launch, *, within_s: float) -> LaunchSignature:
        if not isinstance(self._signing, TellingLaunchSigning):
            return self._signing.sign_launch(launch, within_s=within_s)
        signature, requests = self._signing.sign_launch_and_tell(launch, within_s=within_s)
        self.requests += requests
        return signature

    def sign_checkpoint(self, manifest: bytes, files: Sequence[FileRecord], *, within_s: float) -> bytes:
        return self._signing.sign_checkpoint(manifest, files, within_s=within_s)


def sign_telling(
    signing: Signing, manifest: bytes, files: Sequence[FileRecord], *, within_s: float
) -> tuple[bytes, tuple[str, ...]]:
    """Have a checkpoint signed; the signature, and by which requests, as far as who signs tells."""
    if isinstance(signing, TellingSigning):
        return signing.sign_and_tell(manifest, files, within_s=within_s)
    return signing.sign_checkpoint(manifest, files, within_s=within_s), ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trusted:
    """A manifest that was judged, and for whose word it stands.

    Attributes:
        manifest: decoded only after its signatures were verified.
        signers: ids of the keys whose signatures hold; empty where the policy lets it be unsigned.
    """

    manifest: Manifest
    signers: tuple[str, ...]


@runtime_checkable
class Trust(Protocol):
    """What a policy's ``[verify]`` comes to."""

    @property
    def fingerprint(self) -> str:
        """Tells whose signatures count, in a few digits: the same on every rank of a job."""

    @property
    def accepts_unsigned(self) -> bool:
        """Whether what nobody signed passes."""

    def judge(self, store: Store, commit: Commit, manifest: bytes) -> Trusted:
        """Verify a checkpoint's signatures, before its manifest is parsed.

        Args:
            commit: as it stands, and so far nobody's word.
            manifest: the bytes of ``data/MANIFEST.json``, of which the digest is that in ``COMMIT``.

        Raises:
            UntrustedError: unsigned, wrongly signed, or by nobody who is trusted with it.
            IntegrityError: a signature is not the one that ``COMMIT`` pins, or the manifest, signed
                though it is, is malformed or of another checkpoint.
            StoreError: the store could not be asked.
        """

    def judge_launch(self, launch: Launch) -> None:
        """Verify a launch record's signature.

        Raises:
            UntrustedError: unsigned, wrongly signed, or by nobody who is trusted with it.
        """


@runtime_checkable
class Floor(Protocol):
    """What remembers, outside of the root, the highest checkpoint that was verified of each run."""

    @property
    def uri(self) -> str:
        """Where it remembers, for people."""

    def check(self, root: str, commit: Commit) -> None:
        """Hold a checkpoint, of which the signatures were verified, against what is remembered.

        Args:
            root: the store's URI: whose run it was is remembered, too.

        Raises:
            RollbackError: it is lower than what was verified before; it is another checkpoint at the
                same position; or the root was another run's.
            ConfigError, StoreError: what is remembered cannot be read. Nothing is restored then.
        """

    def run_of(self, root: str) -> str | None:
        """Whose run a root was when it was seen last; None: it never was.

        Raises:
            ConfigError, StoreError: what is remembered cannot be read.
        """

    def highest(self, run: str) -> CheckpointRef | None:
        """The highest checkpoint that is remembered of a run; None: none is.

        Raises:
            ConfigError, StoreError: what is remembered cannot be read.
        """

    def lift(self, root: str, commit: Commit) -> None:
        """Remember a checkpoint that was verified whole, or committed here; never goes down.

        Raises:
            RollbackError: the root is remembered as another run's.
            ConfigError, StoreError: it cannot be remembered.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What reading is held to.

    Attributes:
        sealing: how sealed files are opened; None: they are not.
        trust: who judges signatures; None: nobody asks for them.
        floor: what nothing may go below; None: there is no protection against an old copy of the root.
        auditor: has to have accepted what is to be read, before it is.
    """

    sealing: Sealing | None = None
    trust: Trust | None = None
    floor: Floor | None = None
    auditor: Auditor = NO_AUDIT

    @property
    def fingerprint(self) -> str:
        """Tells whose signatures are demanded, in a few digits; empty: nobody's."""
        return "" if self.trust is None else self.trust.fingerprint

    def check_saves(self, signing: Signing | None) -> None:
        """Raise ConfigError where what is saved could not be restored by the same policy."""
        if self.trust is None or signing is not None or self.trust.accepts_unsigned:
            return
        raise ConfigError(
            "the policy demands signatures ([verify]) and names no key that signs, so that nothing saved "
            "under it could be restored under it: give it [sign], or require = false in [verify]"
        )

    def remember(self, root: str, commit: Commit) -> None:
        """Lift the floor, if there is one.

        Where it cannot be, that is told and no error: the checkpoint is whole, and the next one tries again.
        """
        if self.floor is None:
            return
        try:
            self.floor.lift(root, commit)
        except StrongroomError as error:
            _LOG.warning(
                "%s could not be told of step %d: until it is, an older copy of the root would pass for the "
                "newest: %s",
                self.floor.uri,
                commit.name.step,
                error,
            )

    @property
    def rollback_protection(self) -> str:
        """Where the floor is, or ``"none"``."""
        return "none" if self.floor is None else self.floor.uri


NO_GUARD: Final = Guard()
"""Digests alone."""
