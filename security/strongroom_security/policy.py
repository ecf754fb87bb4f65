"""The policy: what every checkpoint of a run must be, from one TOML file or from code.

It checks what is asked for, opens the keys that are named, and hands the core what that comes to. What a
recipient's text means is `strongroom_security.recipients.opening`'s to say; how files are sealed,
`strongroom_security.sealing`'s; where in the file something stands, `strongroom_security.tomllines`'s.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from strongroom.config import check_digest, check_seconds
from strongroom.digest import DigestAlgorithm
from strongroom.errors import ConfigError
from strongroom.sealing import Sealing
from strongroom_security.tomllines import line_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from strongroom_security.keyring import WrapMode
    from strongroom_security.recipients.base import Identity, Recipient

__all__ = ["Seal", "SecurityPolicy"]

_LOG: Final = logging.getLogger("strongroom")

_MAX_BYTES: Final = 1 << 20

_TIMEOUT_S: Final = 30.0
"""A call to a key service takes milliseconds; the rest is for repeated tries."""
_LONGEST_S: Final = 3600.0

_NOT_YET: Final = {
    "sign": "signing",
    "verify": "verifying signatures",
    "audit": "the audit log",
    "role": "roles",
}
"""Sections that the format of the file has and this release cannot carry out."""

_SEAL_MEMBERS: Final = ("recipients", "identities", "wrap", "unsealed", "timeout_s", "no_core_dumps")

# A folder's name has three dashes and the pattern has them outside of brackets, so that its launch is the
# folder's whole launch, whatever stands before and after it.
_WILD: Final = r"(?:[0-9a-f*?]|\[!?[0-9a-f-]+\])+"
_OF_A_LAUNCH: Final = re.compile(rf"step-{_WILD}-[0-9]{{4,6}}-{_WILD}")


class _WrongMemberError(ConfigError):
    """A member of ``[seal]`` that cannot work; the loader adds where in the file it stands."""

    def __init__(self, member: str, problem: str, *, element: str | None = None) -> None:
        super().__init__(f"[seal] {member}: {problem}")
        self.member = member
        self.element = element


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Seal:
    """Checkpoints are sealed on save, and refused on restore where they are not.

    Keys are opened here, so that what is missing is told before training starts.

    Args:
        recipients: who can open what is saved, at least one: texts as in the policy file
            (``"file:kek.key"``), or objects of your own. Each of them alone can open.
        identities: who may open besides the recipients that can: keys that were recipients before, or
            a private key whose public half is a recipient.
        wrap: ``"checkpoint"``: one call to each key service and save; ``"direct"``: one call a file.
        unsealed: checkpoints that may be unsealed: folders' names, where the parts besides the launch may
            have ``*``, ``?`` and ``[...]`` as in a shell.
        timeout_s: seconds that one call to a key service may take, tries included.
        no_core_dumps: turn core dumps off for this process, before any key is read.
        base: the folder that relative paths are relative to; None: the current one.

    Raises:
        ConfigError: a value cannot work, or a key cannot be had.
    """

    recipients: tuple[Recipient, ...]
    identities: tuple[Identity, ...]
    wrap: WrapMode
    unsealed: tuple[str, ...]
    timeout_s: float
    no_core_dumps: bool

    def __init__(
        self,
        *,
        recipients: Sequence[str | Recipient],
        identities: Sequence[str | Identity] = (),
        wrap: WrapMode = "checkpoint",
        unsealed: Sequence[str] = (),
        timeout_s: float = _TIMEOUT_S,
        no_core_dumps: bool = False,
        base: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(no_core_dumps, bool):
            raise _WrongMemberError("no_core_dumps", f"expected true or false, got {no_core_dumps!r:.60}")
        if wrap not in ("checkpoint", "direct"):
            raise _WrongMemberError("wrap", f"expected 'checkpoint' or 'direct', got {wrap!r:.60}")
        folder = Path(os.curdir if base is None else base)
        put = object.__setattr__
        put(self, "wrap", wrap)
        put(self, "no_core_dumps", no_core_dumps)
        put(self, "timeout_s", _seconds(timeout_s))
        put(self, "unsealed", _patterns(unsealed))
        if no_core_dumps:
            from strongroom_security.coredumps import forbid_core_dumps

            forbid_core_dumps()
        put(self, "recipients", _recipients(recipients, folder))
        put(self, "identities", _identities(identities, folder))

    @property
    def openers(self) -> tuple[Identity, ...]:
        """Who can open here: the recipients that can, then the identities; each key once."""
        from strongroom_security.recipients.base import Identity

        able = [recipient for recipient in self.recipients if isinstance(recipient, Identity)]
        by_id: dict[str, Identity] = {}
        for identity in (*able, *self.identities):
            by_id.setdefault(identity.id, identity)
        return tuple(by_id.values())

    def sealing(self) -> Sealing:
        """What fills the core's seam."""
        from strongroom_security.sealing import EnvelopeSealing

        return EnvelopeSealing(
            self.recipients,
            self.identities,
            wrap=self.wrap,
            unsealed_names=self.unsealed,
            within_s=self.timeout_s,
        )

    def __repr__(self) -> str:
        # A debugger or a crash reporter shows it while it is being built, too.
        recipients = [recipient.uri for recipient in getattr(self, "recipients", ())]
        identities = [identity.uri for identity in getattr(self, "identities", ())]
        return f"Seal(recipients={recipients}, identities={identities}, wrap={getattr(self, 'wrap', None)!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityPolicy:
    """What every checkpoint of a run must be.

    Attributes:
        digest: ``"blake3"`` or ``"sha256"``; None: no opinion.
        seal: checkpoints are sealed; None: they are not.
        sealing: how files are sealed and opened. It comes from ``seal``; give one only in its place.
    """

    digest: DigestAlgorithm | None = None
    seal: Seal | None = None
    sealing: Sealing | None = None

    def __post_init__(self) -> None:
        if self.digest is not None:
            check_digest(self.digest)
        if self.seal is None:
            return
        if self.sealing is not None:
            raise ConfigError("a policy has seal= or sealing=, and both were given; give seal= alone")
        object.__setattr__(self, "sealing", self.seal.sealing())
        keys: tuple[Recipient | Identity, ...] = (*self.seal.recipients, *self.seal.identities)
        public = {key.uri: None for key in keys if key.kind.startswith("hpke-")}
        if public:
            _warn_of_forgers(tuple(public))

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
            _tell_of_no_seal(where)
        return policy


@cache
def _tell_of_no_seal(where: str) -> None:
    # A policy that was cut short by a full disk or a bad edit reads like one that never had the section.
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
    asked = [section for section in _NOT_YET if section in document]
    if asked:
        wanted = ", ".join(f"[{section}] ({_NOT_YET[section]})" for section in asked)
        raise wrong(
            f"it asks for {wanted}, which this release of Strongroom cannot do; it refuses to run without. "
            f"Use a release that can, or take the section out if that is meant",
            asked[0],
        )
    unknown = next((member for member in document if member not in ("digest", "seal")), None)
    if unknown is not None:
        raise wrong(f"the unknown member {unknown!r:.60}; 'digest' and the section [seal] are known", unknown)
    digest: DigestAlgorithm | None = None
    if "digest" in document:
        if not isinstance(document["digest"], str):
            raise wrong(f"digest must be text, got {document['digest']!r:.60}", "digest")
        try:
            digest = check_digest(document["digest"])
        except ConfigError as error:
            raise wrong(str(error), "digest") from None
    if "seal" not in document:
        return SecurityPolicy(digest=digest)
    section = document["seal"]
    if not isinstance(section, dict):
        raise wrong("[seal] must be a section", "seal")
    unknown = next((member for member in section if member not in _SEAL_MEMBERS), None)
    if unknown is not None:
        raise wrong(
            f"the unknown member {unknown!r:.60} in [seal]; known are {', '.join(_SEAL_MEMBERS)}",
            "seal",
            unknown,
        )
    if "recipients" not in section:
        raise wrong(
            '[seal] names no recipients; name who can open what is saved: recipients = ["file:kek.key"]',
            "seal",
        )
    try:
        return SecurityPolicy(digest=digest, seal=Seal(**section, base=path.parent))
    except _WrongMemberError as error:
        raise wrong(str(error), "seal", error.member, element=error.element) from None


def _texts(member: str, value: object) -> list[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise _WrongMemberError(member, f"expected a list of texts, got {value!r:.60}")
    return list(value)


def _recipients(value: object, base: Path) -> tuple[Recipient, ...]:
    from strongroom_security.recipients.base import Recipient, check_id
    from strongroom_security.recipients.opening import open_recipient

    member = "recipients"
    found: dict[str, Recipient] = {}
    for each in _texts(member, value):
        name = each if isinstance(each, str) else None
        if name is None and not isinstance(each, Recipient):
            raise _WrongMemberError(member, f"expected texts or recipients, got {each!r:.60}")
        try:
            recipient: Recipient = open_recipient(name, base=base) if name is not None else each
        except ConfigError as error:
            raise _WrongMemberError(member, str(error), element=name) from None
        check_id(recipient.id, recipient.kind)
        other = found.setdefault(recipient.id, recipient)
        if other is not recipient:
            raise _WrongMemberError(
                member, f"{recipient.uri} and {other.uri} are one key; name it once", element=name
            )
    if not found:
        raise _WrongMemberError(member, 'at least one is needed, as in ["file:kek.key"]')
    return tuple(found.values())


def _identities(value: object, base: Path) -> tuple[Identity, ...]:
    from strongroom_security.recipients.base import Identity
    from strongroom_security.recipients.opening import open_identity

    member = "identities"
    found: list[Identity] = []
    for each in _texts(member, value):
        name = each if isinstance(each, str) else None
        if name is None and not isinstance(each, Identity):
            raise _WrongMemberError(member, f"expected texts or identities, got {each!r:.60}")
        try:
            found.append(open_identity(name, base=base) if name is not None else each)
        except ConfigError as error:
            raise _WrongMemberError(member, str(error), element=name) from None
    return tuple(found)


def _patterns(value: object) -> tuple[str, ...]:
    member = "unsealed"
    patterns = _texts(member, value)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise _WrongMemberError(member, f"expected folders' names, got {pattern!r:.60}")
        if not pattern.startswith("step-") or "/" in pattern:
            raise _WrongMemberError(
                member,
                f"{pattern!r:.100} is no checkpoint's folder; such names begin with 'step-', as in "
                f"'step-000000001200-0003-0123456789abcdef'",
                element=pattern,
            )
        if _OF_A_LAUNCH.fullmatch(pattern) is None:
            raise _WrongMemberError(
                member,
                f"{pattern!r:.100} does not say which launch: whoever can write to the storage could put an "
                f"unsealed checkpoint under a launch of their own. Name folders, or all of one launch as in "
                f"'step-*-0001-*'",
                element=pattern,
            )
    return tuple(patterns)


def _seconds(value: object) -> float:
    try:
        return check_seconds("it", value, at_most=_LONGEST_S)
    except ConfigError as error:
        raise _WrongMemberError("timeout_s", str(error)) from None
