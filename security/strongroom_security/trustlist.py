"""The list of trusted keys, ``trust.json``: until when each key is good, and which ones are revoked.

It is a DSSE envelope, signed by a number of root keys that policies name; its payload is canonical JSON.
Each list has a version, and a floor refuses one that is older than what was seen. What a window or a
revocation means for a checkpoint is `strongroom_security.trust`'s to say. `docs/how-to/trust-and-revoke.md`
describes the format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from strongroom import canonical
from strongroom.canonical import MAX_INTEGER, Bounds, Json
from strongroom.digest import Digest, sha256_of
from strongroom.errors import ConfigError, FormatError, UnsupportedFormatError, UntrustedError
from strongroom.manifest import CheckpointRef, check_run_id
from strongroom_security.dsse import pae
from strongroom_security.envelopes import SharedEnvelope
from strongroom_security.publickeys import PublicKey
from strongroom_security.strictjson import list_of, members_of, text_of

if TYPE_CHECKING:
    from strongroom_security.signers.base import Signer

__all__ = [
    "FORMAT",
    "PAYLOAD_TYPE",
    "Revocation",
    "TrustList",
    "TrustedKey",
    "UpTo",
    "add_signature",
    "root_set_id",
    "sign_trust_list",
    "unverified",
]

PAYLOAD_TYPE: Final = "application/vnd.strongroom.trust+json"
FORMAT: Final = "0.1"

MAX_KEYS: Final = 1000
MAX_SIGNATURES: Final = 64
_MAX_UP_TO: Final = 100
_MAX_NAME_CHARS: Final = 200
_MAX_REASON_CHARS: Final = 1000

_ENVELOPE_BOUNDS: Final = Bounds(length_bytes=12 << 20, depth=4, items=1000)
_PAYLOAD_BOUNDS: Final = Bounds(length_bytes=8 << 20, depth=6, items=1_200_000)
"""Room for the largest numbers of keys, revocations and named checkpoints, all at once."""

_KEY_ID = re.compile(r"[0-9a-f]{64}")
_WITHIN_S: Final = 30.0


_ENVELOPE: Final = SharedEnvelope(
    noun="a list of trusted keys",
    payload_type=PAYLOAD_TYPE,
    max_signatures=MAX_SIGNATURES,
    bounds=_ENVELOPE_BOUNDS,
)


class TrustFloor(Protocol):
    """What a floor remembers of lists; `strongroom_security.floors` has two."""

    def check_trust(self, key: str, version: int, digest: Digest) -> None: ...

    def lift_trust(self, key: str, version: int, digest: Digest) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedKey:
    """One key, and when what it signs is good.

    Attributes:
        name: for people.
        not_before_ms: the first moment, milliseconds since the epoch; None: from ever.
        not_after_ms: the first moment at which it is good no more; None: for ever.
    """

    key: PublicKey
    name: str
    not_before_ms: int | None = None
    not_after_ms: int | None = None

    def __post_init__(self) -> None:
        _check_words("name", self.name, _MAX_NAME_CHARS)
        for time in (self.not_before_ms, self.not_after_ms):
            if time is not None:
                _check_integer("a key's window", time, 0)
        if (
            self.not_before_ms is not None
            and self.not_after_ms is not None
            and self.not_before_ms >= self.not_after_ms
        ):
            raise FormatError(f"the key {self.name!r} is good from {self.not_before_ms} and ends before it")

    def problem_at(self, at_ms: int) -> str | None:
        """Why what the key signed at a time is not good; None where it is."""
        if self.not_before_ms is not None and at_ms < self.not_before_ms:
            return (
                f"key {self.key.id} ({self.name}) is good from {self.not_before_ms} ms on, not at {at_ms} ms"
            )
        if self.not_after_ms is not None and at_ms >= self.not_after_ms:
            return (
                f"key {self.key.id} ({self.name}) expired at {_when(self.not_after_ms)}, and this is of "
                f"{_when(at_ms)}"
            )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpTo:
    """A checkpoint that is good although its key is revoked, and so is what it came from."""

    run: str
    checkpoint: CheckpointRef

    def __post_init__(self) -> None:
        check_run_id(self.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocation:
    """A key, or a certificate authority, that is trusted no more, whatever the time it says it signed at.

    Attributes:
        id: the key's or the authority's.
        reason: for people.
        revoked_at_ms: for people.
        up_to: checkpoints that stay good, with their ancestors.
    """

    id: str
    reason: str
    revoked_at_ms: int
    up_to: tuple[UpTo, ...] = ()

    def __post_init__(self) -> None:
        _check_id(self.id)
        _check_words("reason", self.reason, _MAX_REASON_CHARS)
        _check_integer("revoked_at_ms", self.revoked_at_ms, 0)
        if len(self.up_to) > _MAX_UP_TO or len(set(self.up_to)) != len(self.up_to):
            raise FormatError(
                f"a revocation names up to {_MAX_UP_TO} checkpoints, each once; {self.id} names "
                f"{len(self.up_to)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustList:
    """Keys, their windows, and revocations, at one version.

    Attributes:
        version: grows by one with each change.
        expires_at_ms: from when on a newer list should be there; None: never. An expired list still counts,
            and each use of it is told.
        keys: sorted by id.
        revoked: sorted by id.
        roots: by which it was verified; empty: it was not. They are no part of the list.
        threshold: how many of them had to have signed it.

    Raises:
        FormatError: a value is out of bounds, or something is listed twice.
    """

    version: int
    issued_at_ms: int
    expires_at_ms: int | None = None
    keys: tuple[TrustedKey, ...] = ()
    revoked: tuple[Revocation, ...] = ()
    roots: tuple[PublicKey, ...] = field(default=(), compare=False, repr=False)
    threshold: int = field(default=1, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_integer("version", self.version, 1)
        _check_integer("issued_at_ms", self.issued_at_ms, 0)
        if self.expires_at_ms is not None:
            _check_integer("expires_at_ms", self.expires_at_ms, self.issued_at_ms)
        _check_listed("keys", [each.key.id for each in self.keys])
        _check_listed("revoked", [each.id for each in self.revoked])

    @property
    def public_keys(self) -> tuple[PublicKey, ...]:
        """Every key that is listed, revoked ones included: what they signed may still be good."""
        return tuple(each.key for each in self.keys)

    @property
    def root_set(self) -> str | None:
        """Names the root keys by which it was verified (`root_set_id`); None: it was not."""
        return root_set_id(self.roots) if self.roots else None

    @property
    def digest(self) -> Digest:
        """SHA-256 of what the root keys sign."""
        return sha256_of(self.encode())

    def key(self, key_id: str) -> TrustedKey | None:
        """What the list says of a key; None: nothing."""
        return next((each for each in self.keys if each.key.id == key_id), None)

    def revocation(self, key_id: str) -> Revocation | None:
        """A key's or an authority's revocation; None: it has none."""
        return next((each for each in self.revoked if each.id == key_id), None)

    def encode(self) -> bytes:
        """The payload that root keys sign.

        Raises:
            FormatError: it is longer than a reader takes.
        """
        return canonical.encode(
            {
                "expires_at_ms": self.expires_at_ms,
                "format": FORMAT,
                "issued_at_ms": self.issued_at_ms,
                "keys": [
                    {
                        "id": each.key.id,
                        "name": each.name,
                        "not_after_ms": each.not_after_ms,
                        "not_before_ms": each.not_before_ms,
                        "public": each.key.pem.decode("ascii"),
                    }
                    for each in self.keys
                ],
                "kind": "trust",
                "revoked": [
                    {
                        "id": each.id,
                        "reason": each.reason,
                        "revoked_at_ms": each.revoked_at_ms,
                        "up_to": [{**named.checkpoint.to_json(), "run": named.run} for named in each.up_to],
                    }
                    for each in self.revoked
                ],
                "version": self.version,
            },
            what="the list of trusted keys",
            bounds=_PAYLOAD_BOUNDS,
        )

    @classmethod
    def decode(cls, payload: bytes, what: str) -> TrustList:
        """Read a payload whose signatures were verified.

        Raises:
            FormatError: malformed, out of bounds, not canonical, or with an unknown member.
            UnsupportedFormatError: whole, and of another format.
        """
        value = canonical.decode(payload, what, _PAYLOAD_BOUNDS)
        if isinstance(value, dict) and isinstance(value.get("format"), str) and value["format"] != FORMAT:
            raise UnsupportedFormatError(
                f"{what} has format {value['format'][:40]!r}, and this release reads {FORMAT}; use the "
                f"release of Strongroom that wrote it"
            )
        members = members_of(
            value,
            what,
            required=("expires_at_ms", "format", "issued_at_ms", "keys", "kind", "revoked", "version"),
        )
        text_of(members["format"], f"the format of {what}", expected=FORMAT)
        text_of(members["kind"], f"the kind of {what}", expected="trust")
        try:
            return cls(
                version=members["version"],
                issued_at_ms=members["issued_at_ms"],
                expires_at_ms=members["expires_at_ms"],
                keys=tuple(_key(each, what) for each in list_of(members["keys"], f"the keys of {what}")),
                revoked=tuple(
                    _revocation(each, what) for each in list_of(members["revoked"], f"the revoked of {what}")
                ),
            )
        except FormatError as error:
            raise FormatError(f"{what}: {error}") from None

    @classmethod
    def read(
        cls,
        path: str | Path,
        roots: Sequence[PublicKey],
        threshold: int = 1,
        *,
        floor: TrustFloor | None = None,
    ) -> TrustList:
        """The list in a file, once enough root keys have signed it.

        Args:
            path: of the file. Who may write it does not matter: it is signed.
            roots: whose signatures count.
            threshold: how many different ones of them must hold.
            floor: refuses an older list than one that was read before, and remembers this one.

        Raises:
            ConfigError: it cannot be read, there are fewer roots than the threshold, or what the floor
                remembers cannot be read.
            UntrustedError: too few of them have signed it.
            FormatError, UnsupportedFormatError: it is malformed, or of another format.
            RollbackError: it is older than one that the floor remembers, or another one of the same version.
            StoreError: the floor cannot remember it.
        """
        what = f"the list of trusted keys {path}"
        found = cls.verify(_bytes_of(Path(path), what), what, roots, threshold)
        if floor is not None:
            roots_id = root_set_id(roots)
            floor.check_trust(roots_id, found.version, found.digest)
            floor.lift_trust(roots_id, found.version, found.digest)
        return found

    @classmethod
    def verify(cls, data: bytes, what: str, roots: Sequence[PublicKey], threshold: int = 1) -> TrustList:
        """The list in an envelope, once enough root keys have signed it; until then nothing of it is parsed.

        Raises:
            ConfigError: there are fewer roots than the threshold.
            UntrustedError: too few of them have signed it.
            FormatError, UnsupportedFormatError: it is malformed, or of another format.
        """
        known = {root.id: root for root in roots}
        if type(threshold) is not int or not 1 <= threshold <= len(known):
            raise ConfigError(
                f"{what} needs a threshold from 1 to the number of its root keys, {len(known)}; got "
                f"{threshold!r:.40}"
            )
        payload, signatures = _ENVELOPE.open(data, what)
        message = pae(PAYLOAD_TYPE, payload)
        good: set[str] = set()
        reasons = []
        for key_id, signature in signatures.items():
            root = known.get(key_id)
            if root is None:
                reasons.append(f"{key_id} is no root key of the policy")
            elif root.verify(message, signature):
                good.add(key_id)
            else:
                reasons.append(f"the signature by {key_id} is wrong")
        if len(good) < threshold:
            missing = ", ".join(sorted(known.keys() - good))
            why = "".join(f"; {reason}" for reason in reasons)
            raise UntrustedError(
                f"{what} has {len(good)} of {threshold} root keys' signatures; of {missing} none holds{why}. "
                f"Have it signed, or get the list from whoever signs it"
            )
        return replace(cls.decode(payload, what), roots=tuple(known.values()), threshold=threshold)


def root_set_id(roots: Iterable[PublicKey]) -> str:
    """Names a set of root keys: what a floor remembers a list's version by."""
    return sha256_of("".join(sorted({root.id for root in roots})).encode("ascii")).value.hex()


def unverified(data: bytes, what: str) -> tuple[TrustList, tuple[str, ...]]:
    """What an envelope says, and which keys' signatures it claims to have; nobody's word so far.

    Raises:
        FormatError, UnsupportedFormatError: it is malformed, or of another format.
    """
    payload, signatures = _ENVELOPE.open(data, what)
    return TrustList.decode(payload, what), tuple(signatures)


def sign_trust_list(trust: TrustList, signers: Sequence[Signer], *, within_s: float = _WITHIN_S) -> bytes:
    """The bytes of ``trust.json``.

    Args:
        signers: root keys, at least one.
        within_s: seconds that each may take.

    Raises:
        ConfigError: no signer is given, or one twice.
        KeyServiceError, NoKeyError: who keeps a key was not reached in time, or refused.
    """
    payload = trust.encode()
    signatures: dict[str, bytes] = {}
    for signer in signers:
        if signer.public_key.id in signatures:
            raise ConfigError(f"{signer.uri} was given twice; each root key signs once")
        signatures[signer.public_key.id] = _signed(payload, signer, within_s)
    if not signatures:
        raise ConfigError("a list of trusted keys is signed by at least one root key; none was given")
    return _ENVELOPE.close(payload, signatures)


def add_signature(data: bytes, signer: Signer, *, within_s: float = _WITHIN_S) -> bytes:
    """The bytes of ``trust.json`` with one signature more, or a key's signature made anew.

    What is signed is for the caller to have looked at: that the other signatures hold is not asked here.

    Raises:
        FormatError, UnsupportedFormatError: it is malformed, or of another format.
        KeyServiceError, NoKeyError: who keeps the key was not reached in time, or refused.
    """
    what = "the list of trusted keys"
    payload, signatures = _ENVELOPE.open(data, what)
    TrustList.decode(payload, what)
    return _ENVELOPE.close(payload, {**signatures, signer.public_key.id: _signed(payload, signer, within_s)})


def _signed(payload: bytes, signer: Signer, within_s: float) -> bytes:
    from strongroom_security.signers.base import sign_checked

    return sign_checked(signer, pae(PAYLOAD_TYPE, payload), within_s=within_s)


def _key(value: Json, what: str) -> TrustedKey:
    members = members_of(value, "a key", required=("id", "name", "not_after_ms", "not_before_ms", "public"))
    key_id = _check_id(text_of(members["id"], "a key's id"))
    pem = text_of(members["public"], f"the public key {key_id}")
    try:
        key = PublicKey.from_pem(pem.encode("utf-8"), f"the public key {key_id} of {what}")
    except ConfigError as error:
        raise FormatError(str(error)) from None
    if key.id != key_id or key.pem.decode("ascii") != pem:
        raise FormatError(f"the key that is named {key_id} is {key.id}, or spelled otherwise than in its PEM")
    return TrustedKey(
        key=key,
        name=text_of(members["name"], f"the name of {key_id}"),
        not_before_ms=members["not_before_ms"],
        not_after_ms=members["not_after_ms"],
    )


def _revocation(value: Json, what: str) -> Revocation:
    members = members_of(value, "a revocation", required=("id", "reason", "revoked_at_ms", "up_to"))
    key_id = text_of(members["id"], "a revoked key's id")
    return Revocation(
        id=key_id,
        reason=text_of(members["reason"], "a revocation's reason"),
        revoked_at_ms=members["revoked_at_ms"],
        up_to=tuple(_up_to(each, what) for each in list_of(members["up_to"], "a revocation's up_to")),
    )


def _up_to(value: Json, what: str) -> UpTo:
    members = members_of(
        value, "a checkpoint in up_to", required=("attempt", "launch", "manifest", "run", "step")
    )
    ref = {name: each for name, each in members.items() if name != "run"}
    return UpTo(
        run=text_of(members["run"], "the run of a checkpoint in up_to"),
        checkpoint=CheckpointRef.from_json(ref, what),
    )


def _bytes_of(path: Path, what: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_ENVELOPE_BOUNDS.length_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero character
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{what} cannot be read: {reason}") from error


def _when(at_ms: int) -> str:
    try:
        return f"{datetime.fromtimestamp(at_ms // 1000, timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
    except (ValueError, OverflowError, OSError):
        return f"{at_ms} ms since 1970"


def _check_id(key_id: str) -> str:
    if not _KEY_ID.fullmatch(key_id):
        raise FormatError(f"a key's id is 64 lower-case hex digits, found {key_id[:80]!r}")
    return key_id


def _check_integer(member: str, value: object, low: int) -> None:
    if type(value) is not int or not low <= value <= MAX_INTEGER:
        raise FormatError(f"{member} should be an integer from {low} to {MAX_INTEGER}, found {value!r:.40}")


def _check_words(member: str, text: str, longest: int) -> None:
    if not 1 <= len(text) <= longest or not text.isprintable() or not text.strip():
        raise FormatError(f"a {member} has 1 to {longest} printable characters, found {text[:60]!r}")


def _check_listed(member: str, ids: Sequence[str]) -> None:
    if len(ids) > MAX_KEYS:
        raise FormatError(f"{member} lists {len(ids)}; at most {MAX_KEYS} are read")
    if any(first >= second for first, second in pairwise(ids)):
        raise FormatError(f"{member} should list each id once, in order")
