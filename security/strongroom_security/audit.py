"""``[audit]`` of a policy: where the record goes of who touched which checkpoint, and who vouches for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from strongroom.errors import ConfigError
from strongroom_security.members import WrongMemberError, seconds, texts

if TYPE_CHECKING:
    from strongroom.roles import Duty
    from strongroom.stores.base import Store
    from strongroom_security.auditlog.recording.auditor import LogAuditor
    from strongroom_security.publickeys import PublicKey
    from strongroom_security.role import ActAs
    from strongroom_security.roles.credentials import Credentials
    from strongroom_security.signers.base import Signer

__all__ = ["Audit"]

_LOG: Final = logging.getLogger("strongroom")

_SECTION: Final = "audit"
_DIR: Final = "dir:"
_FILE: Final = "file:"
_S3: Final = "s3://"
_MIN_SPOOL_BYTES: Final = 1 << 20
_MAX_SEAL_EVENTS: Final = 50_000


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Audit:
    """Who touched which checkpoint goes on record: before it, for what reads; beside it, for what writes.

    The key is opened here, so that one that cannot be had is told before training starts. Nothing is sent or
    written before there is something to record.

    Args:
        sink: where the log is: ``"dir:PATH"``, ``"s3://BUCKET/PREFIX"``, or a `Store` of your own.
        key: who vouches for what this process writes: a text as in the policy file, or a `Signer`. None:
            the key of ``[sign]``.
        former_keys: who vouched before, as ``"file:PATH"`` of public keys or as `PublicKey`: whoever verifies
            the log by this policy believes them about writers, and about nothing else.
        passphrase: where an encrypted key file's passphrase is: ``"env:NAME"`` or ``"file:PATH"``.
        spool: the folder of this machine in which events wait for the sink; None: the usual one.
        spool_bytes: how much may wait there, at most.
        seal_s: after how many seconds events go to the sink; those of reads go at once.
        seal_events: how many events go there together, at most.
        intent_s: seconds that a read waits for the sink before it is refused.
        also: who else hears of events: ``"syslog:udp://HOST:PORT"``, ``"syslog:tcp://..."``,
            ``"syslog:tls://..."``, ``"syslog:unix:/dev/log"`` or ``"logging:NAME"``.
        credentials: by whose credentials a sink in a bucket is written to: ``"env"`` (this process's own),
            ``"profile:NAME"``, ``"role:ARN"`` or ``"web-identity:ARN"``.
        base: the folder that relative paths are relative to; None: the current one.

    Raises:
        ConfigError: a value cannot work, or the key cannot be had.
    """

    sink: str
    signer: Signer | None
    former_keys: tuple[PublicKey, ...]
    spool: Path | None
    spool_bytes: int
    seal_s: float
    seal_events: int
    intent_s: float
    also: tuple[str, ...]
    credentials: Credentials | None
    _store: Store | None

    def __init__(
        self,
        *,
        sink: str | Store,
        key: str | Signer | None = None,
        former_keys: Sequence[str | PublicKey] = (),
        passphrase: str | None = None,
        spool: str | os.PathLike[str] | None = None,
        spool_bytes: int | None = None,
        seal_s: float | None = None,
        seal_events: int | None = None,
        intent_s: float | None = None,
        also: Sequence[str] = (),
        credentials: str | None = None,
        base: str | os.PathLike[str] | None = None,
    ) -> None:
        from strongroom_security.auditlog.recording import settings

        folder = Path(os.path.abspath(os.curdir if base is None else base))
        put = object.__setattr__
        uri, store = _sink(sink, folder)
        put(self, "sink", uri)
        put(self, "_store", store)
        put(self, "signer", _signer(key, passphrase, folder))
        put(self, "former_keys", _former(former_keys, folder))
        put(self, "spool", _spool(spool, folder))
        put(
            self,
            "spool_bytes",
            _number("spool_bytes", settings.SPOOL_BYTES, spool_bytes, _MIN_SPOOL_BYTES, 1 << 50),
        )
        put(
            self,
            "seal_events",
            _number("seal_events", settings.SEAL_EVENTS, seal_events, 1, _MAX_SEAL_EVENTS),
        )
        put(self, "seal_s", seconds(_SECTION, "seal_s", settings.SEAL_S if seal_s is None else seal_s))
        put(
            self,
            "intent_s",
            seconds(_SECTION, "intent_s", settings.INTENT_S if intent_s is None else intent_s),
        )
        put(self, "also", _also(also))
        put(self, "credentials", _credentials(credentials, uri, folder))

    def auditor(
        self, *, signer: Signer | None = None, role: ActAs | None = None, asks_aws: bool = False
    ) -> LogAuditor:
        """What fills the core's seam.

        Args:
            signer: of ``[sign]``, where this section names no key.
            role: of the policy.
            asks_aws: whether another section of the policy has a key that AWS keeps.
        """
        from strongroom_security.auditlog.recording.auditor import LogAuditor
        from strongroom_security.auditlog.recording.settings import Settings

        vouches = self.signer or signer
        if vouches is None:
            _warn_of_no_key(self.sink)
        is_kept_by_aws = vouches is not None and vouches.kind == "aws-kms"
        return LogAuditor(
            Settings(
                sink=self.sink,
                open_sink=partial(self.open_sink, tries=1),
                signer=vouches,
                spool=self.spool,
                spool_bytes=self.spool_bytes,
                seal_s=self.seal_s,
                seal_events=self.seal_events,
                intent_s=self.intent_s,
                also=self.also,
                role=None if role is None else role.name,
                session_of=_own if role is None else role.session,
                asks_aws=asks_aws or is_kept_by_aws or self.sink[: len(_S3)] == _S3,
                same=self._same(vouches, role, asks_aws),
            )
        )

    def _same(self, signer: Signer | None, role: ActAs | None, asks_aws: bool) -> Hashable | None:
        """What a policy has in common with this one where both record as one; None: none has.

        A policy is loaded by whoever is given its path, each time: each would have threads and a chain of
        its own.
        """
        from strongroom_security.signers.file import FileSigner

        if self._store is not None:
            return None
        vouches = signer.public_key.id if isinstance(signer, FileSigner) else signer
        acts_as = None if role is None else (role.name, role.save, role.restore)
        here = [self.sink, self.credentials, self.spool, self.spool_bytes, self.seal_s, self.seal_events]
        same = (*here, self.intent_s, self.also, vouches, acts_as, asks_aws)
        try:
            hash(same)
        except TypeError:
            return None  # a signer of somebody's own
        return same

    def open_sink(self, *, tries: int | None = None) -> Store:
        """The store that the log is in, by the credentials that this section names.

        Args:
            tries: how often a bucket is sent a request, at most; None: as often as for checkpoints. Who sends
                segments tries again by itself, and has to know which try went without an answer: what stands
                there then is perhaps its own.

        Raises:
            ConfigError: boto3 is missing, or the credentials cannot be had.
        """
        from strongroom.stores.open import open_store

        if self._store is not None:
            return self._store
        if self.sink[: len(_S3)] != _S3:
            return open_store(self.sink)
        from strongroom.stores.s3 import S3Options, S3Store
        from strongroom_security.roles.credentials import Held

        options = None if tries is None else S3Options(tries=tries)
        if self.credentials is None:
            return S3Store(self.sink, options=options)
        held = Held(self.credentials, name="strongroom-audit", policy=None, whom=self.sink)
        held.check()
        return S3Store(self.sink, options=options, session=held.session)

    def __repr__(self) -> str:
        return f"Audit(sink={getattr(self, 'sink', None)!r})"


def _own(duty: Duty) -> None:
    """This process's own session, for every duty."""


@cache  # once a process and sink
def _warn_of_no_key(sink: str) -> None:
    _LOG.warning(
        "nobody vouches for what goes into the audit log %s: whoever can write there can write events of "
        "their own, and rewrite those that are not sequenced; name who does by key in [audit], or have "
        "checkpoints signed",
        sink,
    )


def _sink(sink: object, base: Path) -> tuple[str, Store | None]:
    from strongroom.stores.base import Store
    from strongroom.stores.s3.location import Location

    if isinstance(sink, str):
        if sink[: len(_DIR)] == _DIR and sink != _DIR and "\0" not in sink:
            return Path(os.path.abspath(base / sink[len(_DIR) :])).as_uri(), None
        if sink[: len(_S3)].lower() == _S3:
            try:
                return Location.parse(sink).uri, None
            except ConfigError as error:
                raise WrongMemberError(_SECTION, "sink", str(error)) from None
    elif isinstance(sink, Store):
        return sink.uri, sink
    raise WrongMemberError(
        _SECTION, "sink", f"expected 'dir:PATH' or 's3://BUCKET/PREFIX', got {sink!r:.100}"
    )


def _signer(key: str | Signer | None, passphrase: object, base: Path) -> Signer | None:
    from strongroom_security.signers.opening import open_signer

    if passphrase is not None and not isinstance(passphrase, str):
        raise WrongMemberError(_SECTION, "passphrase", f"expected text, got {passphrase!r:.60}")
    if key is None:
        if passphrase is not None:
            raise WrongMemberError(_SECTION, "passphrase", "it is of no key; name one by key")
        return None
    try:
        return open_signer(key, base=base, passphrase=passphrase)
    except ConfigError as error:
        raise WrongMemberError(_SECTION, "key", str(error)) from None


def _former(keys: object, base: Path) -> tuple[PublicKey, ...]:
    from strongroom_security.publickeys import PublicKey
    from strongroom_security.signers.opening import open_public_key

    found: list[PublicKey] = []
    for each in texts(_SECTION, "former_keys", keys):
        if isinstance(each, PublicKey):
            found.append(each)
            continue
        # No key service: a job must not depend on one for a key that it never uses.
        if not isinstance(each, str) or each[: len(_FILE)] != _FILE:
            what = f"expected 'file:PATH' of a public key, got {each!r:.60}"
            element = each if isinstance(each, str) else None
            raise WrongMemberError(_SECTION, "former_keys", what, element=element)
        try:
            found.append(open_public_key(each, base=base))
        except ConfigError as error:
            raise WrongMemberError(_SECTION, "former_keys", str(error), element=each) from None
    return tuple(found)


def _spool(spool: object, base: Path) -> Path | None:
    if spool is None:
        return None
    if isinstance(spool, os.PathLike):
        spool = os.fspath(spool)
    if not isinstance(spool, str) or not spool or "\0" in spool:
        raise WrongMemberError(_SECTION, "spool", f"expected a folder of this machine, got {spool!r:.60}")
    return base / spool


def _number(member: str, usual: int, value: object, least: int, most: int) -> int:
    if value is None:
        return usual
    if type(value) is not int or not least <= value <= most:
        raise WrongMemberError(_SECTION, member, f"expected {least} to {most}, got {value!r:.40}")
    return value


def _also(also: object) -> tuple[str, ...]:
    from strongroom_security.auditlog.recording.forwarding import receiver_of

    found: list[Any] = texts(_SECTION, "also", also)
    for text in found:
        try:
            receiver_of(text)
        except ConfigError as error:
            element = text if isinstance(text, str) else None
            raise WrongMemberError(_SECTION, "also", str(error), element=element) from None
    return tuple(found)


def _credentials(text: object, sink: str, base: Path) -> Credentials | None:
    if text is None:
        return None
    if sink[: len(_S3)] != _S3:
        raise WrongMemberError(_SECTION, "credentials", f"a sink in a folder takes none: {sink}")
    from strongroom_security.roles.credentials import Credentials as Named

    try:
        return Named.of(text, base=base)
    except ConfigError as error:
        raise WrongMemberError(_SECTION, "credentials", str(error)) from None
