"""Fills the core's seam for trust: whose signatures over a checkpoint or a launch hold, and whether they do.

All that comes from the store is a stranger's word until a key that is known here has signed it. So the
order is: a signature file's envelope (strict and bounded), the key, the signature, the statement that was
signed, the manifest; then times and revocations; and last what the policy requires. No key service and no
network is asked.

A signature that does not count is told and passed over, since whoever can write to the store could put it
there, but for one: what ``COMMIT`` pins is part of the checkpoint, and where it is wrong, that is too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from strongroom import layout
from strongroom.config import SYSTEM_CLOCK
from strongroom.digest import sha256_of
from strongroom.errors import (
    FormatError,
    IntegrityError,
    ObjectNotFoundError,
    UnsupportedFormatError,
    UntrustedError,
)
from strongroom.manifest import MANIFEST_BOUNDS, CheckpointRef, Commit, Launch, Manifest
from strongroom.signing import Trusted
from strongroom.stores.base import Store
from strongroom_security import oms
from strongroom_security.certificates import Authority, key_of_certificate
from strongroom_security.dsse import pae
from strongroom_security.fields import encode_fields
from strongroom_security.publickeys import PublicKey
from strongroom_security.requirements import AllOf, AnyOf, Requirement, Threshold, UnsafeAllowUnsigned
from strongroom_security.signing import LAUNCH_TYPE
from strongroom_security.trustlist import Revocation, TrustList

__all__ = ["ManifestTrust"]

_LOG: Final = logging.getLogger("strongroom")

_MAX_FURTHER: Final = 64
"""Files in ``signatures/`` that are read where an authority's certificates may be in any of them."""

_MAX_REASONS: Final = 16
"""That an error tells; each is a file or a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signed:
    """A signature that a known key has made over a statement that lists the manifest.

    Attributes:
        what: names the signature's file.
        counted: by which id it counts: the key's own, or that of the authority that certified it; None: the
            requirement knows neither.
    """

    what: str
    key: PublicKey
    counted: str | None
    authority: Authority | None
    certificates: tuple[bytes, ...]
    resources: dict[str, bytes]

    @property
    def ids(self) -> tuple[str, ...]:
        """By which it may be revoked: the key's own, and that of its authority."""
        return (self.key.id,) if self.authority is None else (self.key.id, self.authority.id)


class ManifestTrust:
    """Judges by a requirement and, where there is one, a list of keys.

    Args:
        requirement: whose signatures are needed.
        trust_list: windows and revocations. A key of the requirement need not be listed. A listed key that
            the requirement does not name can sign, and does not count.
        unsigned_launches: numbers of launches whose records may be signed by nobody.
        now_ms: the clock, by which only the list's own expiry is judged.
    """

    def __init__(
        self,
        requirement: Requirement,
        *,
        trust_list: TrustList | None = None,
        unsigned_launches: Collection[int] = (),
        now_ms: Callable[[], int] = SYSTEM_CLOCK.now_ms,
    ) -> None:
        self.requirement: Final = requirement
        self.trust_list: Final = trust_list
        self._unsigned_launches = frozenset(unsigned_launches)
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._has_told = False
        self._ancestries: dict[tuple[str, str, CheckpointRef], _Ancestry] = {}
        listed = () if trust_list is None else trust_list.public_keys
        required = [key for key in requirement.keys if isinstance(key, PublicKey)]
        self._keys = {key.id: key for key in (*listed, *required)}
        self._required = {key.id for key in required}
        self._authorities = [key for key in requirement.keys if isinstance(key, Authority)]
        root_set = None if trust_list is None else trust_list.root_set
        demanded = _fingerprint(requirement, {key.id for key in listed})
        self._fingerprint = _digits("trust", demanded, "" if trust_list is None else f"list {root_set}")[:16]

    def __repr__(self) -> str:
        version = None if self.trust_list is None else self.trust_list.version
        return f"ManifestTrust({self.requirement!r}, trust_list={version})"

    @property
    def fingerprint(self) -> str:
        """16 hex digits: of the requirement and of who signs the list of keys, not of the list's version."""
        return self._fingerprint

    @property
    def accepts_unsigned(self) -> bool:
        return isinstance(self.requirement, UnsafeAllowUnsigned)

    # ------------------------------------------------------------------------------------- a checkpoint

    def judge(self, store: Store, commit: Commit, manifest: bytes) -> Trusted:
        self._tell_expiry()
        _check_pinned(commit, manifest)
        reasons: list[str] = []
        signed = self._pinned(store, commit, manifest, reasons)
        trusted, standing = self._weighed(store, commit, manifest, signed, reasons)
        if trusted is None:
            # Not before they are needed: each is a request to the store.
            signed = [*standing, *self._further(store, commit, manifest, signed, reasons)]
            trusted, standing = self._weighed(store, commit, manifest, signed, reasons)
        if trusted is not None:
            return trusted
        if isinstance(self.requirement, UnsafeAllowUnsigned) and not signed and not reasons:
            _LOG.warning(
                "UNSAFE: %s of run %s is signed by nobody, and is accepted all the same",
                commit.name,
                commit.run,
            )
            return Trusted(manifest=_decode(commit, manifest), signers=())
        if not standing and not reasons:
            reasons.append(
                "it is signed by nobody; if it is from before the run was signed, `strongroom sign` adds a "
                "signature"
            )
        raise UntrustedError(_told(f"{commit.name}", self._problem(standing) or "", reasons))

    def standing(self, store: Store, commit: Commit, manifest: bytes) -> tuple[str, ...]:
        """Whose signatures hold over a checkpoint and count to this day, whatever the requirement says.

        Args:
            commit, manifest: as in `judge`.

        Returns:
            Ids of keys that are known here and not revoked; empty where none of them has signed.

        Raises:
            UntrustedError: the signature that ``COMMIT`` pins is by a known key, and wrong.
            IntegrityError: it is not the one that ``COMMIT`` pins, or what was signed is malformed.
            StoreError: the store could not be asked.
        """
        _check_pinned(commit, manifest)
        reasons: list[str] = []
        signed = self._pinned(store, commit, manifest, reasons)
        folder = f"{commit.name.folder}/{layout.SIGNATURES}"
        found = [key_id for key_id in map(layout.parse_signature_name, store.list_names(folder)) if key_id]
        known = [key_id for key_id in found if key_id in self._keys]
        others = [key_id for key_id in found if key_id not in self._keys] if self._authorities else []
        signed += self._read_further(store, commit, manifest, [*known, *others[:_MAX_FURTHER]], reasons)
        if not signed:
            return ()
        standing = self._standing(store, commit, _decode(commit, manifest), signed, reasons)
        return tuple(dict.fromkeys(each.key.id for each in standing))

    def _weighed(
        self,
        store: Store,
        commit: Commit,
        manifest: bytes,
        signed: Sequence[_Signed],
        reasons: list[str],
    ) -> tuple[Trusted | None, Sequence[_Signed]]:
        """The manifest where signatures that hold are enough, and which ones still count."""
        if self._problem(signed) is not None:
            return None, signed
        # Only now is it somebody's word.
        decoded = _decode(commit, manifest)
        standing = self._standing(store, commit, decoded, signed, reasons)
        if self._problem(standing) is not None:
            return None, standing
        return Trusted(manifest=decoded, signers=tuple(each.key.id for each in standing)), standing

    def _problem(self, signed: Sequence[_Signed]) -> str | None:
        return self.requirement.problem({each.counted for each in signed if each.counted is not None})

    def _pinned(self, store: Store, commit: Commit, manifest: bytes, reasons: list[str]) -> list[_Signed]:
        """The signature that the commit pins, if it does, and if a known key made it.

        Raises:
            IntegrityError: it is absent, or another one.
            UntrustedError: it is wrong.
        """
        if commit.signature is None:
            return []
        key = layout.signature_key(commit.name)
        try:
            data = store.read(key, limit_bytes=oms.BUNDLE_BOUNDS.length_bytes)
        except ObjectNotFoundError:
            raise IntegrityError(f"{key} is absent, and COMMIT pins it as {commit.signature}") from None
        if not sha256_of(data).matches(commit.signature):
            raise IntegrityError(f"{key} has digest {sha256_of(data)}, and COMMIT pins {commit.signature}")
        return self._verified(data, key, manifest, reasons, file_key=None)

    def _further(
        self,
        store: Store,
        commit: Commit,
        manifest: bytes,
        signed: Sequence[_Signed],
        reasons: list[str],
    ) -> list[_Signed]:
        """What others have added, each under its key's name; what is wrong there is told and passed over."""
        seen = {each.key.id for each in signed}
        names = self._further_names(store, commit, seen, reasons)
        return self._read_further(store, commit, manifest, names, reasons)

    def _read_further(
        self,
        store: Store,
        commit: Commit,
        manifest: bytes,
        names: Iterable[str],
        reasons: list[str],
    ) -> list[_Signed]:
        found: list[_Signed] = []
        for key_id in names:
            key = layout.further_signature_key(commit.name, key_id)
            try:
                data = store.read(key, limit_bytes=oms.BUNDLE_BOUNDS.length_bytes)
                found += self._verified(data, key, manifest, reasons, file_key=key_id)
            except ObjectNotFoundError:
                continue
            except (IntegrityError, UnsupportedFormatError) as error:
                reasons.append(str(error))
        return found

    def _further_names(
        self, store: Store, commit: Commit, seen: set[str], reasons: list[str]
    ) -> Iterator[str]:
        """Ids of the keys by which signatures may have been added, as far as they are looked for."""
        asked = [key_id for key_id in self._required if key_id not in seen]
        yield from sorted(asked)
        if not self._authorities:
            return
        # Whose certificate a key has stands in its signature alone.
        folder = f"{commit.name.folder}/{layout.SIGNATURES}"
        ids = [found for found in map(layout.parse_signature_name, store.list_names(folder)) if found]
        others = [found for found in ids if found not in seen and found not in asked]
        if len(others) > _MAX_FURTHER:
            reasons.append(f"{folder}/ holds {len(others)} more; the first {_MAX_FURTHER} were looked at")
        yield from others[:_MAX_FURTHER]

    def _verified(
        self, data: bytes, what: str, manifest: bytes, reasons: list[str], *, file_key: str | None
    ) -> list[_Signed]:
        """One signature, or none where the key is not known here.

        Raises:
            FormatError: the envelope, or what a known key has signed in it, is malformed.
            UntrustedError: it is wrong, or it is over something else.
        """
        bundle = oms.decode_bundle(data, what)
        key, authority = self._signer(bundle.key_id, bundle.certificates, what, reasons)
        if key is None:
            return []
        if file_key is not None and key.id != file_key:
            raise UntrustedError(f"{what} is by the key {key.id}, not by the one that it is named by")
        if not key.verify(bundle.envelope.to_be_signed, bundle.envelope.signature):
            raise UntrustedError(f"{what}: the signature by {key.id} is wrong")
        statement = oms.decode_statement(bundle.envelope.payload, what)
        listed = statement.resources.get(layout.MANIFEST)
        if listed is None:
            raise UntrustedError(f"{what} does not list {layout.MANIFEST}, so it is over something else")
        if listed != sha256_of(manifest).value:
            raise UntrustedError(
                f"{what} is over another checkpoint: the {layout.MANIFEST} that {key.id} signed has digest "
                f"sha256:{listed.hex()}, and this one has {sha256_of(manifest)}"
            )
        counted = key.id if key.id in self._required else None if authority is None else authority.id
        if counted is None:
            reasons.append(f"{what}: {key.id} is trusted, and its signature is not one of those needed")
        return [
            _Signed(
                what=what,
                key=key,
                counted=counted,
                authority=authority,
                certificates=bundle.certificates,
                resources=statement.resources,
            )
        ]

    def _signer(
        self, key_id: str | None, certificates: tuple[bytes, ...], what: str, reasons: list[str]
    ) -> tuple[PublicKey | None, Authority | None]:
        """The key that is to verify a signature, and by whose word it is known; None: not known here.

        Raises:
            FormatError: the certificates are malformed.
        """
        if not certificates:
            key = self._keys.get(key_id or "")
            if key is None:
                reasons.append(f"{what} is by the key {key_id or 'that it does not name'}, not known here")
            return key, None
        known = self._keys.get(key_of_certificate(certificates[0], f"the first certificate of {what}").id)
        if known is not None and known.id in self._required:
            # Trusted as itself, so whoever certified it, and until when, is not asked.
            return known, None
        for authority in self._authorities:
            try:
                return authority.leaf(certificates, what), authority
            except UntrustedError as error:
                reasons.append(str(error))
        if known is None and not self._authorities:
            reasons.append(f"{what} is by a key with a certificate, and neither it nor an authority is known")
        return known, None

    def _standing(
        self,
        store: Store,
        commit: Commit,
        manifest: Manifest,
        signed: Sequence[_Signed],
        reasons: list[str],
    ) -> list[_Signed]:
        """Those signatures that still count, once it is known when they were made and what is listed.

        Raises:
            UntrustedError: the one that the commit pins lists other files than the manifest.
        """
        standing = []
        for each in signed:
            problem = _difference(each, manifest)
            if problem is not None and each.what == layout.signature_key(commit.name):
                raise UntrustedError(problem)
            problem = problem or self._outdated(each, manifest.created_at_ms)
            problem = problem or self._revoked(store, commit, each)
            if problem is None:
                standing.append(each)
            else:
                reasons.append(problem)
        return standing

    def _outdated(self, signed: _Signed, at_ms: int) -> str | None:
        listed = self.trust_list.key(signed.key.id) if self.trust_list is not None else None
        if listed is not None and (problem := listed.problem_at(at_ms)) is not None:
            return f"{signed.what}: {problem}"
        if signed.authority is not None:
            try:
                signed.authority.check_time(signed.certificates, at_ms, signed.what)
            except (UntrustedError, FormatError) as error:
                return str(error)
        return None

    def _revocations(self, ids: Sequence[str]) -> list[Revocation]:
        if self.trust_list is None:
            return []
        found = map(self.trust_list.revocation, ids)
        return [revocation for revocation in found if revocation is not None]

    def _revoked(self, store: Store, commit: Commit, signed: _Signed) -> str | None:
        for revocation in self._revocations(signed.ids):
            problem = self._not_an_ancestor(store, commit, revocation)
            if problem is not None:
                return f"{signed.what}: {revocation.id} is revoked ({revocation.reason}){problem}"
        return None

    def _not_an_ancestor(self, store: Store, commit: Commit, revocation: Revocation) -> str | None:
        """Why a checkpoint is none of those that stay good, to stand behind what was revoked; None: it is."""
        named = [each.checkpoint for each in revocation.up_to if each.run == commit.run]
        if not named:
            return ", and no checkpoint of this run is named as still good"
        broken = []
        for ref in named:
            ancestry = self._ancestry(store, commit.run, ref)
            with self._lock:
                if ancestry.has(store, commit.ref):
                    return None
            if ancestry.problem is not None:
                broken.append(ancestry.problem)
        names = ", ".join(str(ref.name) for ref in named[:4])
        return f", and this is neither {names} nor an ancestor" + "".join(f"; {each}" for each in broken[:4])

    def _ancestry(self, store: Store, run: str, ref: CheckpointRef) -> _Ancestry:
        with self._lock:
            # Each copy of a root may have kept another part of the line.
            return self._ancestries.setdefault((store.uri, run, ref), _Ancestry(run, ref))

    # ----------------------------------------------------------------------------------------- a launch

    def judge_launch(self, launch: Launch) -> None:
        self._tell_expiry()
        what = f"launch {launch.launch} of run {launch.run}"
        if launch.signature is None:
            if isinstance(self.requirement, UnsafeAllowUnsigned):
                _LOG.warning("UNSAFE: %s is signed by nobody, and is accepted all the same", what)
                return
            if launch.launch in self._unsigned_launches:
                return
            raise UntrustedError(
                f"{what} is signed by nobody; if it is from before the run was signed, [verify] "
                f"unsigned_launches can name it"
            )
        reasons: list[str] = []
        try:
            key, authority = self._signer(
                launch.signature.key_id, launch.signature.certificates, what, reasons
            )
        except FormatError as error:
            raise UntrustedError(f"{what}: {error}") from None
        if key is None or (authority is None and key.id not in self._required):
            reasons.append(f"{what} is by {launch.signature.key_id}, which is not one of those needed")
            raise UntrustedError(_told(what, "a signature by one key of the policy is needed", reasons))
        if not key.verify(pae(LAUNCH_TYPE, launch.to_be_signed), launch.signature.value):
            raise UntrustedError(f"{what}: the signature by {key.id} is wrong")
        signed = _Signed(
            what=what,
            key=key,
            counted=key.id,
            authority=authority,
            certificates=launch.signature.certificates,
            resources={},
        )
        problem = self._outdated(signed, launch.created_at_ms)
        if problem is not None:
            raise UntrustedError(problem)
        for revocation in self._revocations(signed.ids):
            last = max(
                (each.checkpoint.launch for each in revocation.up_to if each.run == launch.run), default=0
            )
            if launch.launch > last:
                good = f", and its launches are good up to {last}" if last else ""
                raise UntrustedError(f"{what}: {revocation.id} is revoked ({revocation.reason}){good}")

    def _tell_expiry(self) -> None:
        trust_list = self.trust_list
        if trust_list is None or trust_list.expires_at_ms is None or self._has_told:
            return
        if self._now_ms() >= trust_list.expires_at_ms:
            self._has_told = True
            _LOG.warning(
                "the list of trusted keys (version %d) has expired: someone may be keeping a newer one, with "
                "more keys revoked, from reaching this machine. It still counts; get the newest list",
                trust_list.version,
            )


class _Ancestry:
    """A checkpoint and what it came from, by the manifests that pin their parents by digest.

    It is followed as far as is asked, and no manifest is read twice. Not by position: whoever has a key
    can sign any position.
    """

    def __init__(self, run: str, ref: CheckpointRef) -> None:
        self.problem: str | None = None
        self._run = run
        self._known = {ref}
        self._last: CheckpointRef | None = ref

    def has(self, store: Store, ref: CheckpointRef) -> bool:
        """Whether a checkpoint is on the line.

        Raises:
            StoreError: the store could not be asked.
        """
        while ref not in self._known:
            last = self._last
            # A parent is older than its child, so there is nothing to be found below.
            if last is None or (last.launch, last.step) <= (ref.launch, ref.step):
                return False
            self._last = self._parent(store, last)
            if self._last is not None:
                self._known.add(self._last)
        return True

    def _parent(self, store: Store, ref: CheckpointRef) -> CheckpointRef | None:
        key = layout.data_key(ref.name, layout.MANIFEST)
        try:
            data = store.read(key, limit_bytes=MANIFEST_BOUNDS.length_bytes)
            if not sha256_of(data).matches(ref.manifest):
                raise IntegrityError(f"{key} has digest {sha256_of(data)}, and its child pins {ref.manifest}")
            manifest = Manifest.decode(data, key)
            if (manifest.run, manifest.name) != (self._run, ref.name):
                raise IntegrityError(f"{key} is of {manifest.name} of run {manifest.run}")
        except ObjectNotFoundError:
            self.problem = f"what {ref.name} came from cannot be told: {key} is not there any more"
            return None
        except (IntegrityError, UnsupportedFormatError) as error:
            self.problem = f"what {ref.name} came from cannot be told: {error}"
            return None
        parent = manifest.parent
        if parent is not None and (parent.launch, parent.step) >= (ref.launch, ref.step):
            self.problem = f"{key} names a parent that is not older than itself"
            return None
        return parent


def _fingerprint(requirement: Requirement, listed: Collection[str]) -> str:
    """Digits that tell one requirement from another.

    Args:
        listed: ids of the keys in the list. A requirement of exactly those is told by that alone, since with
            the list's next version there are others.
    """
    kind = type(requirement).__name__
    if isinstance(requirement, UnsafeAllowUnsigned):
        return _digits(kind, _fingerprint(requirement.requirement, listed))
    if isinstance(requirement, AllOf | AnyOf):
        parts = sorted(_fingerprint(part, listed) for part in requirement.requirements)
        return _digits(kind, *parts)
    ids = {f"{type(key).__name__} {key.id}" for key in requirement.keys}
    if listed and {key.id for key in requirement.keys} == set(listed):
        ids = {"as listed"}
    return _digits(kind, str(requirement.n) if isinstance(requirement, Threshold) else "", *sorted(ids))


def _digits(*fields: str) -> str:
    return sha256_of(encode_fields("strongroom.v1 trust", *fields)).value.hex()


def _check_pinned(commit: Commit, manifest: bytes) -> None:
    if not sha256_of(manifest).matches(commit.manifest):
        raise IntegrityError(
            f"the manifest of {commit.name} has digest {sha256_of(manifest)}, and COMMIT pins "
            f"{commit.manifest}"
        )


def _decode(commit: Commit, manifest: bytes) -> Manifest:
    what = layout.data_key(commit.name, layout.MANIFEST)
    decoded = Manifest.decode(manifest, what)
    if (decoded.run, decoded.name) != (commit.run, commit.name):
        raise IntegrityError(
            f"{what} says that it is of {decoded.name} of run {decoded.run}, and COMMIT is of {commit.name} "
            f"of run {commit.run}"
        )
    return decoded


def _difference(signed: _Signed, manifest: Manifest) -> str | None:
    """In what a signature's list differs from the manifest's: the manifest alone, or every file."""
    listed = signed.resources.keys() - {layout.MANIFEST}
    if not listed:
        return None
    files = {record.path: record.digest for record in manifest.files}
    if listed != files.keys():
        odd = min(listed ^ files.keys())
        side = "does not list" if odd in files else "lists"
        return (
            f"{signed.what} {side} {odd}, unlike the manifest: it is to list all its files, or itself alone"
        )
    for path, digest in files.items():
        # BLAKE3 of a file says nothing of its SHA-256; the manifest, which was signed, pins it.
        if digest.algorithm == "sha256" and digest.value != signed.resources[path]:
            return (
                f"{signed.what} lists {path} as sha256:{signed.resources[path].hex()}, and the manifest as "
                f"{digest}"
            )
    return None


def _told(what: str, problem: str, reasons: Sequence[str]) -> str:
    told = list(dict.fromkeys(reasons))
    more = f"; and {len(told) - _MAX_REASONS} more" if len(told) > _MAX_REASONS else ""
    why = "".join(f"; {reason}" for reason in told[:_MAX_REASONS])
    return f"{what} is not trusted: {problem}{why}{more}"
