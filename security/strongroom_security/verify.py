"""``[verify]`` of a policy: whose signatures a checkpoint needs, and below what nothing may go.

It puts together what the policy names: keys, certificate authorities, a signed list of keys, and a floor.
Whether a signature counts is `strongroom_security.trust`'s to say.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from strongroom.config import SYSTEM_CLOCK
from strongroom.errors import ConfigError, StrongroomError
from strongroom.layout import MAX_LAUNCH
from strongroom_security.members import WrongMemberError, flag, texts

if TYPE_CHECKING:
    from strongroom.signing import Floor, Trust
    from strongroom_security.certificates import Authority
    from strongroom_security.publickeys import PublicKey
    from strongroom_security.requirements import Requirement
    from strongroom_security.signers.base import Signer
    from strongroom_security.trustlist import TrustList

__all__ = ["Verify"]

_SECTION: Final = "verify"
_AUTHORITY_MEMBERS: Final = ("roots", "names")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Verify:
    """Checkpoints are verified before anything of them is parsed.

    Args:
        keys: whose signatures count: texts as in the policy file (``"file:signer.pub"``), or `PublicKey`
            objects.
        authorities: certificate authorities of which a signer's certificate counts: tables with ``roots``
            (a PEM file) and ``names`` (of which the certificate must have one), or `Authority` objects.
        threshold: how many different ones of them must have signed.
        requirement: in place of these three, in code: ``AllOf(RequireSigner([a]), Threshold(2, [b, c, d]))``.
        require: False lets pass, loudly, what nobody has signed.
        trust: a signed list of keys (``trust.json``), their windows and revocations.
        trust_keys: who signs that list.
        trust_threshold: how many of them must have.
        floor: what remembers the highest verified checkpoint: ``"file:PATH"``, ``"dir:PATH"`` or
            ``"s3://BUCKET/PREFIX"``.
        unsigned_launches: numbers of launches from before the run was signed, of which the records may be
            signed by nobody. Their checkpoints may not.
        base: the folder that relative paths are relative to; None: the current one.

    Raises:
        ConfigError: a value cannot work, or what it names cannot be had.
        RollbackError: the list of keys is older than one that the floor remembers.
        UntrustedError: the list of keys is not signed as it should be.
    """

    requirement: Requirement | None
    trust_list: TrustList | None
    floor: Floor | None
    must: bool
    unsigned_launches: frozenset[int]

    def __init__(
        self,
        *,
        keys: Sequence[str | PublicKey] = (),
        authorities: Sequence[Mapping[str, Any] | Authority] = (),
        threshold: int | None = None,
        requirement: Requirement | None = None,
        require: bool = True,
        trust: str | os.PathLike[str] | None = None,
        trust_keys: Sequence[str | PublicKey] = (),
        trust_threshold: int = 1,
        floor: str | Floor | None = None,
        unsigned_launches: Sequence[int] = (),
        base: str | os.PathLike[str] | None = None,
    ) -> None:
        folder = Path(os.curdir if base is None else base)
        must = flag(_SECTION, "require", require)
        put = object.__setattr__
        put(self, "must", must)
        put(self, "unsigned_launches", _launches(unsigned_launches))
        put(self, "floor", _floor(floor, folder))
        put(self, "trust_list", _trust_list(trust, trust_keys, trust_threshold, self.floor, folder))
        put(
            self,
            "requirement",
            _requirement(
                (*_keys("keys", keys, folder), *_authorities(authorities, folder)),
                threshold,
                requirement,
                self.trust_list,
                must=must,
            ),
        )

    def trust(self) -> Trust | None:
        """What fills the core's seam; None: no signature is asked for."""
        from strongroom_security.trust import ManifestTrust

        if self.requirement is None:
            return None
        return ManifestTrust(
            self.requirement, trust_list=self.trust_list, unsigned_launches=self.unsigned_launches
        )

    def with_key(self, key: PublicKey) -> Verify:
        """The same, which asks for a key's signature where none was asked for by name."""
        if self.requirement is not None:
            return self
        requirement = _requirement((key,), None, None, None, must=self.must)
        return Verify._of(
            requirement,
            trust_list=self.trust_list,
            floor=self.floor,
            must=self.must,
            unsigned_launches=self.unsigned_launches,
        )

    @classmethod
    def of_signer(cls, signer: Signer) -> Verify:
        """What ``[sign]`` alone comes to: its own key's signature is demanded."""
        return cls._of(_one_of((signer.public_key,), 1), trust_list=None, floor=None, must=True)

    @classmethod
    def _of(
        cls,
        requirement: Requirement | None,
        *,
        trust_list: TrustList | None,
        floor: Floor | None,
        must: bool,
        unsigned_launches: frozenset[int] = frozenset(),
    ) -> Verify:
        made = cls.__new__(cls)
        members = {
            "requirement": requirement,
            "trust_list": trust_list,
            "floor": floor,
            "must": must,
            "unsigned_launches": unsigned_launches,
        }
        for name, value in members.items():
            object.__setattr__(made, name, value)
        return made

    def check_says_something(self) -> None:
        """Raise ConfigError where signatures are demanded, and nobody is named whose count."""
        if self.requirement is not None or (not self.must and self.floor is not None):
            return
        raise WrongMemberError(
            _SECTION, "keys", 'nobody is named whose signatures count; name them: keys = ["file:signer.pub"]'
        )

    def check_accepts(self, signer: Signer) -> None:
        """Raise ConfigError where what this policy signs now is not what it verifies."""
        if self.requirement is None:
            return
        reasons = [why for key in self.requirement.keys if (why := _mismatch(key, signer)) is not None]
        if len(reasons) == len(self.requirement.keys):
            more = "".join(f"; {reason}" for reason in dict.fromkeys(filter(None, reasons)))
            raise WrongMemberError(
                _SECTION,
                "keys",
                f"{signer.uri}, by which this policy signs (key {signer.public_key.id}), is not among those "
                "whose signatures count, so that what it saves could not be restored; name its public key by "
                f"keys, or who certifies it by authorities{more}",
            )
        problem = None if self.trust_list is None else _ended(self.trust_list, signer.public_key.id)
        if problem is not None:
            raise WrongMemberError(
                _SECTION,
                "trust",
                f"{signer.uri} must not sign any more, because nothing of it would be restored: {problem}. "
                "Sign by another key",
            )

    def __repr__(self) -> str:
        floor = getattr(self, "floor", None)
        return f"Verify({getattr(self, 'requirement', None)!r}, floor={getattr(floor, 'uri', None)!r})"


def _mismatch(key: PublicKey | Authority, signer: Signer) -> str | None:
    """None where a signer's signature counts by a key or an authority; else why not, or nothing to say."""
    from strongroom_security.certificates import Authority

    if not isinstance(key, Authority):
        return None if key.id == signer.public_key.id else ""
    if not signer.certificates:
        return ""
    try:
        key.leaf(signer.certificates, signer.uri)
        key.check_time(signer.certificates, SYSTEM_CLOCK.now_ms(), signer.uri)
    except StrongroomError as error:
        return str(error)
    return None


def _ended(trust_list: TrustList, key_id: str) -> str | None:
    """Why a key must not sign now; None where it may."""
    revocation = trust_list.revocation(key_id)
    if revocation is not None:
        return f"key {key_id} is revoked ({revocation.reason})"
    listed = trust_list.key(key_id)
    return None if listed is None else listed.problem_at(SYSTEM_CLOCK.now_ms())


def _launches(value: object) -> frozenset[int]:
    member = "unsigned_launches"
    numbers = texts(_SECTION, member, value)
    for number in numbers:
        if type(number) is not int or not 1 <= number <= MAX_LAUNCH:
            raise WrongMemberError(
                _SECTION, member, f"expected launches' numbers, as in [1, 2], got {number!r:.60}"
            )
    return frozenset(numbers)


def _one_of(keys: Sequence[PublicKey | Authority], threshold: int) -> Requirement:
    from strongroom_security.requirements import RequireSigner, Threshold

    return RequireSigner(keys) if threshold == 1 else Threshold(threshold, keys)


def _requirement(
    keys: Sequence[PublicKey | Authority],
    threshold: int | None,
    requirement: Requirement | None,
    trust_list: TrustList | None,
    *,
    must: bool,
) -> Requirement | None:
    from strongroom_security.requirements import Requirement as IsRequirement
    from strongroom_security.requirements import UnsafeAllowUnsigned

    if requirement is not None:
        if keys or threshold is not None:
            raise ConfigError(
                "Verify has requirement= or keys=, authorities= and threshold=; give one of the two"
            )
        if not isinstance(requirement, IsRequirement):
            raise ConfigError(f"requirement must be such as RequireSigner([key]), got {requirement!r:.60}")
        found = requirement
    else:
        if threshold is not None and (type(threshold) is not int or threshold < 1):
            raise WrongMemberError(
                _SECTION, "threshold", f"expected a number of at least 1, got {threshold!r:.60}"
            )
        if not keys and trust_list is not None:
            keys = trust_list.public_keys
        if not keys:
            if threshold is not None:
                raise WrongMemberError(
                    _SECTION, "threshold", "there are no keys that it could be of; name keys"
                )
            return None
        try:
            found = _one_of(keys, threshold or 1)
        except ConfigError as error:
            raise WrongMemberError(_SECTION, "threshold", str(error)) from None
    return found if must else UnsafeAllowUnsigned(found)


def _keys(member: str, value: object, base: Path) -> tuple[PublicKey, ...]:
    from strongroom_security.publickeys import PublicKey
    from strongroom_security.signers.opening import open_public_key

    found: list[PublicKey] = []
    for each in texts(_SECTION, member, value):
        if isinstance(each, PublicKey):
            found.append(each)
            continue
        if not isinstance(each, str):
            raise WrongMemberError(_SECTION, member, f"expected texts or public keys, got {each!r:.60}")
        try:
            found.append(open_public_key(each, base=base))
        except ConfigError as error:
            raise WrongMemberError(_SECTION, member, str(error), element=each) from None
    return tuple(found)


def _authorities(value: object, base: Path) -> tuple[Authority, ...]:
    from strongroom_security.certificates import Authority

    member = "authorities"
    found: list[Authority] = []
    for each in texts(_SECTION, member, value):
        if isinstance(each, Authority):
            found.append(each)
            continue
        if not isinstance(each, Mapping) or set(each) != set(_AUTHORITY_MEMBERS):
            raise WrongMemberError(
                _SECTION,
                member,
                "each must be a table with roots and names, as in "
                f'{{roots = "ca.pem", names = ["trainer@example.org"]}}, got {each!r:.80}',
            )
        roots, names = each["roots"], texts(_SECTION, member, each["names"])
        if not isinstance(roots, str) or not all(isinstance(name, str) for name in names):
            raise WrongMemberError(_SECTION, member, "roots must be a path, and names a list of texts")
        try:
            found.append(Authority.read(base / roots.removeprefix("file:"), names))
        except ConfigError as error:
            raise WrongMemberError(_SECTION, member, str(error), element=roots) from None
    return tuple(found)


def _floor(value: object, base: Path) -> Floor | None:
    from strongroom.signing import Floor as IsFloor
    from strongroom_security.floors import open_floor

    if value is None:
        return None
    if not isinstance(value, str):
        if isinstance(value, IsFloor):
            return value
        raise WrongMemberError(
            _SECTION, "floor", f"expected text such as 'file:floor.json', got {value!r:.60}"
        )
    try:
        return open_floor(value, base=base)
    except ConfigError as error:
        raise WrongMemberError(_SECTION, "floor", str(error)) from None


def _trust_list(
    path: object, keys: object, threshold: object, floor: Floor | None, base: Path
) -> TrustList | None:
    from strongroom_security.floors import FileFloor, FolderFloor
    from strongroom_security.trustlist import TrustList

    roots = _keys("trust_keys", keys, base)
    if path is None:
        if roots:
            raise WrongMemberError(
                _SECTION, "trust_keys", "they sign the list that trust names, and none is named"
            )
        return None
    if not isinstance(path, str | os.PathLike):
        raise WrongMemberError(_SECTION, "trust", f"expected a path, got {path!r:.60}")
    if not roots:
        raise WrongMemberError(_SECTION, "trust_keys", "name who signs the list, as in ['file:root.pub']")
    if type(threshold) is not int or not 1 <= threshold <= len({key.id for key in roots}):
        raise WrongMemberError(
            _SECTION,
            "trust_threshold",
            f"expected a number from 1 to the number of trust_keys, got {threshold!r:.60}",
        )
    try:
        return TrustList.read(
            base / path, roots, threshold, floor=floor if isinstance(floor, FileFloor | FolderFloor) else None
        )
    except ConfigError as error:
        raise WrongMemberError(_SECTION, "trust", str(error)) from None
