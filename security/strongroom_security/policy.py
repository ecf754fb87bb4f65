"""The policy: what every checkpoint of a run must be, from one TOML file or from code.

It reads the file, holds its sections against each other, and hands the core what they come to. What a
section may say is its own module's (`seal`, `sign`, `verify`); where in the file something stands,
`strongroom_security.tomllines`'s.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from strongroom.auditing import NO_AUDIT, Auditor
from strongroom.config import check_digest
from strongroom.digest import DigestAlgorithm
from strongroom.errors import ConfigError
from strongroom.placement import Placement
from strongroom.roles import Role
from strongroom.sealing import Sealing
from strongroom.signing import Guard, Signing, Trust
from strongroom_security.audit import Audit
from strongroom_security.auditedsealing import AuditedSealing
from strongroom_security.intents import keep_record
from strongroom_security.members import WrongMemberError
from strongroom_security.role import ActAs
from strongroom_security.seal import Seal
from strongroom_security.sign import Sign
from strongroom_security.tomllines import line_of
from strongroom_security.verify import Verify

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from strongroom_security.recipients.base import Identity, Recipient
    from strongroom_security.roles.grants import GrantUse

__all__ = ["SecurityPolicy"]

_LOG: Final = logging.getLogger("strongroom")

_MAX_BYTES: Final = 1 << 20

_MEMBERS: Final = {
    "seal": ("recipients", "identities", "wrap", "unsealed", "timeout_s", "no_core_dumps"),
    "sign": ("key", "certificate", "passphrase", "timeout_s"),
    "verify": (
        "keys",
        "authorities",
        "threshold",
        "require",
        "trust",
        "trust_keys",
        "trust_threshold",
        "floor",
        "unsigned_launches",
    ),
    "role": ("name", "run", "launch", "save", "restore", "grant", "approvers"),
    "audit": (
        "sink",
        "key",
        "former_keys",
        "passphrase",
        "spool",
        "spool_bytes",
        "seal_s",
        "seal_events",
        "intent_s",
        "also",
        "credentials",
    ),
    "storage": ("root", "replicate_to"),
}
"""What each section may say; for code there is more."""

_NEEDED: Final = {
    "seal": ("recipients", 'name who can open what is saved: recipients = ["file:kek.key"]'),
    "sign": ("key", 'name who signs what is saved: key = "file:signer.pem"'),
    "role": ("name", 'name the role that this process has: name = "trainer-writer"'),
    "audit": ("sink", 'name where the log is: sink = "dir:audit"'),
}
"""What a section cannot do without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityPolicy:
    """What every checkpoint of a run must be.

    Attributes:
        digest: ``"blake3"`` or ``"sha256"``; None: no opinion.
        seal: checkpoints are sealed; None: they are not.
        sign: checkpoints are signed; None: they are not.
        verify: signatures are demanded, and a floor is held; None: with ``sign``, its own key's, else none.
        sealing: how files are sealed and opened. It comes from ``seal``; give one only in its place.
        signing: who signs. It comes from ``sign``.
        guard: what reading is held to. It comes from all of them.
        role: what this process may do to a root, and by whose credentials; None: no opinion. `ActAs` is one.
        audit: who touched what goes on record; None: it does not.
        auditor: keeps that record. It comes from ``audit``; give one only in its place.
        placement: where runs lie, for front ends that are given the file as their ``config``; None: where the
            program says.
    """

    digest: DigestAlgorithm | None = None
    seal: Seal | None = None
    sign: Sign | None = None
    verify: Verify | None = None
    sealing: Sealing | None = None
    signing: Signing | None = field(init=False, default=None)
    guard: Guard = field(init=False, default=Guard())
    role: Role | None = None
    audit: Audit | None = None
    auditor: Auditor = NO_AUDIT
    placement: Placement | None = None

    def __post_init__(self) -> None:
        if self.digest is not None:
            check_digest(self.digest)
        put = object.__setattr__
        if self.audit is not None:
            if self.auditor is not NO_AUDIT:
                raise ConfigError("a policy has audit= or auditor=, and both were given; give audit= alone")
            role = self.role if isinstance(self.role, ActAs) else None
            signer = None if self.sign is None else self.sign.signer
            put(self, "auditor", self.audit.auditor(signer=signer, role=role, asks_aws=self._asks_aws()))
        if self.seal is not None:
            if self.sealing is not None:
                raise ConfigError("a policy has seal= or sealing=, and both were given; give seal= alone")
            put(self, "sealing", self.seal.sealing())
        if self.sign is not None:
            signer, verify = self.sign.signer, self.verify
            if verify is None:
                verify = Verify.of_signer(signer)
            else:
                verify = verify.with_key(signer.public_key)
                verify.check_accepts(signer)
            put(self, "verify", verify)
            put(self, "signing", self.sign.signing(verify.check_accepts))
        if self.verify is not None:
            self.verify.check_says_something()
        trust = self.verify.trust() if self.verify is not None else None
        floor = self.verify.floor if self.verify is not None else None
        if self.sealing is not None and self.auditor.is_on:
            put(self, "sealing", AuditedSealing(self.sealing, self.auditor))
        put(
            self,
            "guard",
            Guard(sealing=self.sealing, trust=trust, floor=floor, auditor=self.auditor),
        )
        keep_record(self._handed_on(trust), self.auditor)
        if isinstance(self.role, ActAs):
            self.role.put_on_record(self.auditor)
            self._ask_key_services_as(self.role)
        if self.seal is not None and trust is None:
            keys: tuple[Recipient | Identity, ...] = (*self.seal.recipients, *self.seal.identities)
            public = {key.uri: None for key in keys if key.kind.startswith("hpke-")}
            if public:
                _warn_of_forgers(tuple(public))

    @property
    def grant_use(self) -> GrantUse | None:
        """That a grant of break-glass was used, for whoever records it; None: there is none, or not yet."""
        return self.role.grant_use if isinstance(self.role, ActAs) else None

    def _handed_on(self, trust: Trust | None) -> tuple[object, ...]:
        """What may be used by itself, and is to be on record all the same."""
        keys: tuple[object, ...] = ()
        if self.seal is not None:
            keys = (*self.seal.recipients, *self.seal.identities)
        signer = None if self.sign is None else self.sign.signer
        return (*keys, signer, self.sealing, trust)

    def _asks_aws(self) -> bool:
        """Whether AWS keeps a key of what is sealed."""
        if self.seal is None:
            return False
        keys: tuple[Recipient | Identity, ...] = (*self.seal.recipients, *self.seal.identities)
        return any(key.kind == "aws-kms" for key in keys)

    def _ask_key_services_as(self, role: ActAs) -> None:
        """Have the keys of AWS asked for by the credentials that the role's duties go by."""
        keys: list[object] = []
        if self.seal is not None:
            keys += [*self.seal.recipients, *self.seal.identities]
        if self.sign is not None:
            keys.append(self.sign.signer)
        if self.audit is not None and self.audit.signer is not None:
            keys.append(self.audit.signer)
        for key in keys:
            act_as = getattr(key, "act_as", None)
            if callable(act_as):
                act_as(role)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SecurityPolicy:
        """Read a policy file.

        Raises:
            ConfigError: it cannot be read, anyone may write it, it is no TOML, says nothing, has an
                unknown member, contradicts itself, names a key that cannot be had, or asks for something
                that this release cannot do. Where it can, the error names the line.
        """
        where = os.fspath(path)
        try:
            with open(where, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                data = file.read(_MAX_BYTES + 1)
        except (OSError, ValueError) as error:  # ValueError: a name with a zero character
            reason = getattr(error, "strerror", None) or error
            shown = where if str(where).isprintable() else repr(where)
            raise ConfigError(f"the policy {shown} cannot be read: {reason}") from error
        if mode & stat.S_IWOTH:
            raise ConfigError(
                f"anyone may write the policy {where}, and who does turns sealing off or names a recipient "
                f"of their own; take that right away (chmod o-w), and read it through before it is used again"
            )
        if len(data) > _MAX_BYTES:
            raise ConfigError(f"the policy {where} is too long: at most {_MAX_BYTES} bytes are read")
        try:
            text = data.decode("utf-8")
            document = tomllib.loads(text)
        except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigError(f"the policy {where} is not TOML: {error}") from None
        policy = _policy(document, text, Path(where))
        if policy.seal is None:
            _tell_of_no_seal(where, is_signed=policy.verify is not None)
        return policy


@cache
def _tell_of_no_seal(where: str, *, is_signed: bool) -> None:
    # A policy that was cut short by a full disk or a bad edit reads like one that never had the section.
    if is_signed:
        # It was not cut short before it said something: what it says is meant.
        _LOG.info("the policy %s has no [seal]: checkpoints are signed, and stored unsealed", where)
        return
    _LOG.warning("the policy %s has no [seal]: checkpoints are stored unsealed, and only hashed", where)


@cache  # once a process and set of keys, and not once for every checkpointer
def _warn_of_forgers(public: tuple[str, ...]) -> None:
    _LOG.warning(
        "the policy has keys with a public half (%s) and verifies no signatures: whoever knows that half and "
        "can write to the storage can put a sealed checkpoint of their own there, and where the private half "
        "is, it is restored. Let nobody but the writers write to the storage, or restore by secret keys "
        "alone",
        ", ".join(public),
    )


def _policy(document: Mapping[str, Any], text: str, path: Path) -> SecurityPolicy:
    def wrong(problem: str, *at: str, element: str | None = None) -> ConfigError:
        line = line_of(text, at, element)
        return ConfigError(f"the policy {path}{'' if line is None else f', line {line}'}: {problem}")

    if not document:
        raise wrong(
            "it says nothing, as a file that was cut short does; say what checkpoints must be, or use "
            "no policy"
        )
    known = ("digest", *_MEMBERS)
    unknown = next((member for member in document if member not in known), None)
    if unknown is not None:
        raise wrong(
            f"the unknown member {unknown!r:.60}; 'digest' and the sections "
            f"{', '.join(f'[{section}]' for section in _MEMBERS)} are known",
            unknown,
        )
    digest: DigestAlgorithm | None = None
    if "digest" in document:
        if not isinstance(document["digest"], str):
            raise wrong(f"digest must be text, got {document['digest']!r:.60}", "digest")
        try:
            digest = check_digest(document["digest"])
        except ConfigError as error:
            raise wrong(str(error), "digest") from None
    for section in _MEMBERS:
        if section in document:
            _check_section(document[section], section, wrong)
    base = path.parent
    placement = None
    if "storage" in document:
        try:
            placement = Placement(**document["storage"], base=base)
        except ConfigError as error:
            raise wrong(f"[storage]: {error}", "storage") from None
    try:
        return SecurityPolicy(
            digest=digest,
            seal=Seal(**document["seal"], base=base) if "seal" in document else None,
            sign=Sign(**document["sign"], base=base) if "sign" in document else None,
            verify=Verify(**document["verify"], base=base) if "verify" in document else None,
            role=ActAs(**document["role"], base=base) if "role" in document else None,
            audit=Audit(**document["audit"], base=base) if "audit" in document else None,
            placement=placement,
        )
    except WrongMemberError as error:
        raise wrong(str(error), error.section, error.member, element=error.element) from None


def _check_section(section: Any, name: str, wrong: Callable[..., ConfigError]) -> None:
    """Raise ConfigError where a section is none, is empty of what it is for, or says what nobody knows."""
    if not isinstance(section, dict):
        raise wrong(f"[{name}] must be a section", name)
    unknown = next((member for member in section if member not in _MEMBERS[name]), None)
    if unknown is not None:
        raise wrong(
            f"the unknown member {unknown!r:.60} in [{name}]; known are {', '.join(_MEMBERS[name])}",
            name,
            unknown,
        )
    if name in _NEEDED and _NEEDED[name][0] not in section:
        raise wrong(f"[{name}] names no {_NEEDED[name][0]}; {_NEEDED[name][1]}", name)
    if name == "verify" and not section:
        raise wrong('[verify] says nothing; name whose signatures count: keys = ["file:signer.pub"]', name)
