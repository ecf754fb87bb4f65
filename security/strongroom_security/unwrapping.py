"""Asking keepers of keys for a rotation: counted, paced, bounded; and what a keyring opens to.

A key service is called for every checkpoint of a run, so its calls are counted and may be held to a
rate. Keys that are in this process cost nothing, and are neither. Whatever a keeper raises or returns, and
where it does not end, is an error that names it, as in a save: it fails one checkpoint and no other. The
keys of a keyring count as opened only when each sealed file's was held against the header that the manifest
pins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from strongroom.errors import ConfigError, IntegrityError, KeyServiceError, NoKeyError
from strongroom.manifest import FileRecord
from strongroom.pace import Pace
from strongroom_security.asking import ask
from strongroom_security.changes import is_local, wraps_of
from strongroom_security.envelope import CheckpointKey
from strongroom_security.fields import Context, file_aad
from strongroom_security.floe import FloeOpener
from strongroom_security.generations import Findings
from strongroom_security.intents import on_record
from strongroom_security.keyring import Keyring
from strongroom_security.recipients.base import Identity, Recipient, Rewrapper, check_wrapped
from strongroom_security.secret import KEY_BYTES, Secret

__all__ = ["Calls", "Opened", "Opening", "contexts_of"]


class Calls:
    """Asks keepers; one checkpoint's own count, at a pace that all share.

    What opens a key, or has a service open it, is on record before: see `intents`.

    Args:
        pace: in calls.
        within_s: seconds that one call may take.
        root: where the checkpoint is, for the record.
    """

    def __init__(self, pace: Pace, within_s: float, *, root: str = "") -> None:
        self._pace = pace
        self._within_s = within_s
        self._root = root
        self.count = 0

    def wrap(self, recipient: Recipient, key: Secret, context: Context) -> bytes:
        """As `Recipient.wrap`."""
        self._spend(recipient.kind)

        def question(within_s: float) -> bytes:
            wrapped: object = recipient.wrap(key, context, within_s=within_s)
            return _checked(wrapped, recipient.uri, recipient.uri)

        return ask(question, who=recipient.uri, within_s=self._within_s)

    def unwrap(self, identity: Identity, wrapped: bytes, context: Context) -> Secret:
        """As `Identity.unwrap`.

        Raises:
            AuditError: it could not be put on record, and was not asked for.
        """

        def question(within_s: float) -> Secret:
            key: object = identity.unwrap(wrapped, context, within_s=within_s)
            if not isinstance(key, Secret):
                raise KeyServiceError(f"{identity.uri} unwrapped to {type(key).__name__}; expected a Secret")
            if key.size_bytes != KEY_BYTES:
                raise IntegrityError(
                    f"{identity.uri} unwrapped {key.size_bytes} bytes; a key has {KEY_BYTES}"
                )
            key.reveal()  # raises where it was wiped already
            return key

        with on_record([identity], context, root=self._root):
            self._spend(identity.kind)
            return ask(question, who=identity.uri, within_s=self._within_s)

    def rewrap(self, keeper: Rewrapper, wrapped: bytes, context: Context, to: Recipient) -> bytes | None:
        """As `Rewrapper.rewrap`.

        Raises:
            AuditError: it could not be put on record, and was not asked for.
        """
        who = keeper.uri if isinstance(keeper, Identity) else to.uri

        def question(within_s: float) -> bytes | None:
            made: object = keeper.rewrap(wrapped, context, to, within_s=within_s)
            return None if made is None else _checked(made, who, to.uri)

        with on_record([keeper, to], context, root=self._root):
            self._pace.spend(1)
            self.count += 1
            found = ask(question, who=who, within_s=self._within_s)
        if found is None:
            self.count -= 1  # it knew without asking
        return found

    def _spend(self, kind: str) -> None:
        if not is_local(kind):
            self._pace.spend(1)
            self.count += 1


@dataclass(slots=True, kw_only=True)
class Opened:
    """What a keyring opens to.

    Attributes:
        keys: of every file that it holds, by path.
        checkpoint_key: None where the files' keys are wrapped directly.
    """

    keys: dict[str, Secret]
    checkpoint_key: CheckpointKey | None

    def wipe(self) -> None:
        """Clear the keys."""
        for key in self.keys.values():
            key.wipe()
        if self.checkpoint_key is not None:
            self.checkpoint_key.secret.wipe()


class Opening:
    """Opens keyrings of one checkpoint.

    Args:
        records: its sealed files.
        context: of the attempt.
        calls: by which keepers are asked.
    """

    def __init__(self, records: Sequence[FileRecord], context: Context, calls: Calls) -> None:
        self._records = records
        self._context = context
        self._calls = calls

    def by_first(self, keyring: Keyring, identities: Sequence[Identity], failed: Findings) -> Opened | None:
        """Open by the first identity that can; None: none can, and why stands in ``failed``."""
        for identity in identities:
            try:
                return self.by(keyring, identity)
            except ConfigError as error:  # this machine cannot use it, which says nothing of the keyring
                failed.errors.append(NoKeyError(str(error)))
            except (IntegrityError, KeyServiceError, NoKeyError) as error:
                failed.errors.append(error)
        return None

    def by(self, keyring: Keyring, identity: Identity) -> Opened:
        """Open by one of the recipients.

        Raises:
            IntegrityError: what it holds is wrong, or its keys are not those that the manifest pins.
            NoKeyError, KeyServiceError: as `Identity.unwrap`.
        """
        unwrapped = [
            self._calls.unwrap(identity, wrapped, context)
            for wrapped, context in zip(
                wraps_of(keyring, identity.id), contexts_of(keyring, self._context), strict=True
            )
        ]
        opened = self._opened(keyring, unwrapped)
        for record in self._records:
            self._check(record, opened.keys[record.path])
        return opened

    def _opened(self, keyring: Keyring, unwrapped: Sequence[Secret]) -> Opened:
        if keyring.wrap == "direct":
            paths = [key.path for key in keyring.keys]
            return Opened(keys=dict(zip(paths, unwrapped, strict=True)), checkpoint_key=None)
        checkpoint_key = CheckpointKey(unwrapped[0], self._context)
        return Opened(
            keys={key.path: checkpoint_key.unwrap(key.path, key.wrapped[0]) for key in keyring.keys},
            checkpoint_key=checkpoint_key,
        )

    def _check(self, record: FileRecord, key: Secret) -> None:
        """The header commits to the key."""
        aad = file_aad(replace(self._context, path=record.path))
        try:
            FloeOpener(key, aad, record.header or b"", record.size_bytes)
        except IntegrityError as error:
            raise IntegrityError(f"the key of {record.path}: {error}") from None


def contexts_of(keyring: Keyring, attempt: Context) -> list[Context]:
    """What each of `wraps_of` is bound to."""
    if keyring.wrap == "checkpoint":
        return [attempt]
    return [replace(attempt, path=key.path) for key in keyring.keys]


def _checked(wrapped: object, who: str, uri: str) -> bytes:
    if not isinstance(wrapped, bytes):
        raise KeyServiceError(f"{who} wrapped a key to {type(wrapped).__name__}; expected bytes")
    return check_wrapped(wrapped, uri)
