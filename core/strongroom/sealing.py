"""The seam that sealing fills: what the core asks of whoever seals files as they are written, and opens them.

The core knows nothing of keys and ciphers. It names a file, hands over its bytes in order, and is
given what is to be stored; or it reads a range of what is stored, and is given the bytes that were
sealed. `strongroom_security` is what fills the seam.

The life of a save: every rank has a `SaveSeal` for the attempt and takes a `Sealer` from it for each
file. The coordinator's public half of a one-off key (`OneOff`) travels with the decision to save;
each other rank hands its files' keys over, sealed to it; the coordinator alone makes the keyring.

The life of a restore: the coordinator unlocks a checkpoint's keys (`Unlocked`), and hands each rank
those of the files that it is about to read, sealed to that rank's one-off key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from strongroom.layout import CheckpointName

if TYPE_CHECKING:
    from strongroom.manifest import Commit, FileRecord, Manifest
    from strongroom.stores.base import Store

__all__ = ["OneOff", "Opener", "Requesting", "SaveSeal", "Sealer", "Sealing", "Unlocked", "requests_of"]

Buffer = bytes | bytearray | memoryview


class Sealer(Protocol):
    """Seals one file, once, in order, on one thread."""

    @property
    def header(self) -> bytes:
        """What the sealed file begins with, and the manifest pins; known before the first byte."""

    def sealed_bytes(self, plain_bytes: int) -> int:
        """The length of the sealed file."""

    def seal(self, pieces: Iterable[Buffer], *, length_bytes: int) -> Iterator[memoryview]:
        """The sealed file in order, header first, in pieces of a few MiB.

        Each piece is memory that is used again: it counts until the next one is asked for.

        Args:
            pieces: what to seal, in pieces of any size.
            length_bytes: their sum.

        Raises:
            SaveError: the pieces have another length, or the sealer was used before.
        """


class Opener(Protocol):
    """Opens parts of one sealed file, in any order, on any thread.

    A sealed file is a header and then segments of equal length but for the last; each can be
    fetched and opened by itself. All lengths and offsets are bytes.
    """

    @property
    def size_bytes(self) -> int:
        """The length of what was sealed."""

    @property
    def segment_bytes(self) -> int:
        """What each segment but the last holds of it."""

    def stored_range(self, first: int, count: int) -> tuple[int, int]:
        """Where segments ``first`` to ``first + count - 1`` stand in the stored file: start and end."""

    def open_into(self, first: int, stored: memoryview, target: memoryview) -> int:
        """Open consecutive segments; return how many bytes of ``target`` were filled.

        Args:
            first: the number of the first segment, from 0.
            stored: exactly the bytes of `stored_range`.
            target: at least as long as what they hold.

        Raises:
            IntegrityError: a segment is not what was sealed at that place of that file. Nothing in
                ``target`` may be used then.
        """


class OneOff(Protocol):
    """A key pair that one save or restore uses to hand keys over, and nothing afterwards."""

    @property
    def public(self) -> bytes:
        """What others seal to; no secret."""


class SaveSeal(Protocol):
    """The sealing of one attempt on one rank; `sealer` may be called from any thread."""

    def sealer(self, path: str) -> Sealer:
        """A sealer with a key of its own for one file.

        Args:
            path: under ``data/``, as stored.
        """

    def hand_over(self, public: bytes) -> bytes:
        """The keys of every file that this rank has sealed, sealed to the coordinator's one-off key."""

    def take_over(self, handed: bytes) -> None:
        """On the coordinator: what another rank handed over.

        Raises:
            SaveError: it was not sealed to this attempt.
        """

    def discard(self) -> None:
        """Forget every key: the attempt has ended, well or not. Fine when repeated."""

    def begin_wrapping(self) -> None:
        """On the coordinator: begin to wrap the checkpoint's key for each recipient, in the background."""

    def keyring(self, paths: Collection[str], *, within_s: float) -> bytes:
        """On the coordinator: the bytes of the first keyring.

        Args:
            paths: every file of the checkpoint, as stored; the keys of others are left out.
            within_s: how long the recipients may still take.

        Raises:
            KeyServiceError, NoKeyError: a recipient could not be reached in time, or refused.
            SaveError: a file's key was never handed over.
        """


@runtime_checkable
class Requesting(Protocol):
    """A `SaveSeal` that can tell by which requests its key was wrapped."""

    @property
    def request_ids(self) -> tuple[str, ...]:
        """What key services call them in their own logs."""


def requests_of(seal: object) -> tuple[str, ...]:
    """By which requests a save's key was wrapped, as far as its seal tells."""
    return seal.request_ids if isinstance(seal, Requesting) else ()


class Unlocked(Protocol):
    """The keys of a committed checkpoint, or of some of its files, in this process."""

    @property
    def keyring(self) -> int:
        """The generation that opened."""

    def opener(self, record: FileRecord) -> Opener:
        """Opens one of the checkpoint's files.

        Raises:
            NoKeyError: its key is not among these.
            IntegrityError: its key is not the one that the manifest pins by the file's header.
        """

    def hand_over(self, public: bytes, paths: Iterable[str]) -> bytes:
        """The keys of some files, sealed to another rank's one-off key."""

    def take_over(self, one_off: OneOff, handed: bytes) -> None:
        """Add the keys that the coordinator handed over to this rank."""


@runtime_checkable
class Sealing(Protocol):
    """What a policy's ``[seal]`` comes to."""

    @property
    def fingerprint(self) -> str:
        """Tells who can open what is saved, in a few digits: the same on every rank of a job."""

    def one_off(self) -> OneOff:
        """A new key pair."""

    def seal_save(self, run: str, name: CheckpointName, one_off: OneOff | None) -> SaveSeal:
        """Begin to seal an attempt.

        Args:
            one_off: on the coordinator of several ranks: the pair whose public half went to the others.
        """

    def unlock(
        self, store: Store, commit: Commit, manifest: Manifest, *, within_s: float | None = None
    ) -> Unlocked:
        """Unwrap a checkpoint's keys; at most one call to a key service for each keyring tried.

        Args:
            within_s: how long it may take in all; None: as long as the policy gives each keeper.

        Raises:
            NoKeyError: no identity here opens it.
            KeyServiceError: who keeps the key cannot be reached.
            IntegrityError: no keyring of the checkpoint holds the keys that its manifest pins.
        """

    def locked(self, manifest: Manifest) -> Unlocked:
        """No keys yet: for a rank that is handed them."""

    def accepts_unsealed(self, name: CheckpointName) -> bool:
        """Whether the policy names this checkpoint as one that may be unsealed."""
