"""``[seal]`` of a policy: who can open what is saved.

Keys are opened here. What a recipient's text means is `strongroom_security.recipients.opening`'s to say; how
files are sealed, `strongroom_security.sealing`'s.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from strongroom.errors import ConfigError
from strongroom.sealing import Sealing
from strongroom_security.members import TIMEOUT_S, WrongMemberError, flag, seconds, texts

if TYPE_CHECKING:
    from strongroom_security.keyring import WrapMode
    from strongroom_security.recipients.base import Identity, Recipient

__all__ = ["Seal"]

_SECTION: Final = "seal"

# A folder's name has three dashes and the pattern has them outside of brackets, so that its launch is the
# folder's whole launch, whatever stands before and after it.
_WILD: Final = r"(?:[0-9a-f*?]|\[!?[0-9a-f-]+\])+"
_OF_A_LAUNCH: Final = re.compile(rf"step-{_WILD}-[0-9]{{4,6}}-{_WILD}")


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
        timeout_s: float = TIMEOUT_S,
        no_core_dumps: bool = False,
        base: str | os.PathLike[str] | None = None,
    ) -> None:
        if wrap not in ("checkpoint", "direct"):
            raise WrongMemberError(_SECTION, "wrap", f"expected 'checkpoint' or 'direct', got {wrap!r:.60}")
        folder = Path(os.curdir if base is None else base)
        put = object.__setattr__
        put(self, "wrap", wrap)
        put(self, "no_core_dumps", flag(_SECTION, "no_core_dumps", no_core_dumps))
        put(self, "timeout_s", seconds(_SECTION, "timeout_s", timeout_s))
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


def _recipients(value: object, base: Path) -> tuple[Recipient, ...]:
    from strongroom_security.recipients.base import Recipient, check_id
    from strongroom_security.recipients.opening import open_recipient

    member = "recipients"
    found: dict[str, Recipient] = {}
    for each in texts(_SECTION, member, value):
        name = each if isinstance(each, str) else None
        if name is None and not isinstance(each, Recipient):
            raise WrongMemberError(_SECTION, member, f"expected texts or recipients, got {each!r:.60}")
        try:
            recipient: Recipient = open_recipient(name, base=base) if name is not None else each
        except ConfigError as error:
            raise WrongMemberError(_SECTION, member, str(error), element=name) from None
        check_id(recipient.id, recipient.kind)
        other = found.setdefault(recipient.id, recipient)
        if other is not recipient:
            raise WrongMemberError(
                _SECTION, member, f"{recipient.uri} and {other.uri} are one key; name it once", element=name
            )
    if not found:
        raise WrongMemberError(_SECTION, member, 'at least one is needed, as in ["file:kek.key"]')
    return tuple(found.values())


def _identities(value: object, base: Path) -> tuple[Identity, ...]:
    from strongroom_security.recipients.base import Identity
    from strongroom_security.recipients.opening import open_identity

    member = "identities"
    found: list[Identity] = []
    for each in texts(_SECTION, member, value):
        name = each if isinstance(each, str) else None
        if name is None and not isinstance(each, Identity):
            raise WrongMemberError(_SECTION, member, f"expected texts or identities, got {each!r:.60}")
        try:
            found.append(open_identity(name, base=base) if name is not None else each)
        except ConfigError as error:
            raise WrongMemberError(_SECTION, member, str(error), element=name) from None
    return tuple(found)


def _patterns(value: object) -> tuple[str, ...]:
    member = "unsealed"
    patterns = texts(_SECTION, member, value)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise WrongMemberError(_SECTION, member, f"expected folders' names, got {pattern!r:.60}")
        if not pattern.startswith("step-") or "/" in pattern:
            raise WrongMemberError(
                _SECTION,
                member,
                f"{pattern!r:.100} is no checkpoint's folder; such names begin with 'step-', as in "
                f"'step-000000001200-0003-0123456789abcdef'",
                element=pattern,
            )
        if _OF_A_LAUNCH.fullmatch(pattern) is None:
            raise WrongMemberError(
                _SECTION,
                member,
                f"{pattern!r:.100} does not say which launch: whoever can write to the storage could put an "
                f"unsealed checkpoint under a launch of their own. Name folders, or all of one launch as in "
                f"'step-*-0001-*'",
                element=pattern,
            )
    return tuple(patterns)
