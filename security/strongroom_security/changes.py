"""What a rotation wants of a keyring, and what that takes: decisions alone, without I/O and without keys.

`strongroom_security.rotation` carries them out. A change says how things shall be and not what to do, so
that doing it again, after a crash or beside another rotation, finds less to do and in the end nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strongroom.errors import ConfigError
from strongroom_security.recipients.base import Rewrapper

if TYPE_CHECKING:
    from strongroom_security.keyring import Keyring
    from strongroom_security.recipients.base import Identity, Recipient

__all__ = [
    "AddRecipient",
    "Change",
    "RemoveRecipient",
    "SetRecipients",
    "Step",
    "decide",
    "expected_calls",
    "is_local",
    "wraps_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRecipients:
    """These can open, and nobody else.

    Attributes:
        recipients: at least one, each once.
        new_checkpoint_key: the checkpoint's key is drawn anew, and the files' keys wrapped under it.
        again: key services wrap anew what they have wrapped before, under the newest version of their key.
        since_ms: what ``new_checkpoint_key`` and ``again`` ask for is done where it was done since then
            (milliseconds since the epoch); None: the rotation's own beginning.
    """

    recipients: tuple[Recipient, ...]
    new_checkpoint_key: bool = False
    again: bool = False
    since_ms: int | None = None

    def __post_init__(self) -> None:
        if not self.recipients:
            raise ConfigError("a checkpoint that nobody can open is lost; name at least one recipient")
        ids = [recipient.id for recipient in self.recipients]
        if len(set(ids)) != len(ids):
            twice = next(recipient.uri for recipient in self.recipients if ids.count(recipient.id) > 1)
            raise ConfigError(f"{twice} is named twice, or another name of it is; name each recipient once")


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRecipient:
    """This one can open, besides those who can."""

    recipient: Recipient


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveRecipient:
    """This one cannot open, and all others can.

    Attributes:
        id: as it stands in keyrings.
    """

    id: str


Change = SetRecipients | AddRecipient | RemoveRecipient


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How the next generation differs from one that stands.

    Attributes:
        keep: ids of recipients whose wraps stay good.
        wrap: who gets a wrap: added, or wrapped for anew.
        drop: ids of recipients that are left out.
        new_key: the checkpoint's key is drawn anew.
    """

    keep: tuple[str, ...] = ()
    wrap: tuple[Recipient, ...] = ()
    drop: tuple[str, ...] = ()
    new_key: bool = False

    @property
    def is_nothing(self) -> bool:
        return not self.wrap and not self.drop


def decide(change: Change, base: Keyring, older: Callable[[], Sequence[Keyring]]) -> Step:
    """What makes a keyring as the change wants it.

    Args:
        change: what is wanted.
        base: the keyring that stands.
        older: the generations before it that are whole, newest first; asked for where it matters.

    Raises:
        ConfigError: the change cannot be made to this keyring.
    """
    ids = [entry.id for entry in base.recipients]
    if isinstance(change, AddRecipient):
        added = () if change.recipient.id in ids else (change.recipient,)
        return Step(keep=tuple(ids), wrap=added)
    if isinstance(change, RemoveRecipient):
        if ids == [change.id]:
            raise ConfigError(
                f"{change.id} alone can open {base.name}; add another recipient before this one is removed"
            )
        return Step(
            keep=tuple(each for each in ids if each != change.id),
            drop=tuple(each for each in ids if each == change.id),
        )
    wanted = {recipient.id: recipient for recipient in change.recipients}
    new_key = change.new_checkpoint_key and not _is_made_since(
        change.since_ms, base, older, lambda keyring: keyring.keys
    )
    if new_key and base.wrap == "direct":
        raise ConfigError(
            f"{base.name} has no checkpoint key: each of its files' keys is wrapped directly. Rotate it "
            "without a new one"
        )
    renewed = {
        each
        for each in ids
        if each in wanted and (new_key or (change.again and _is_stale(change, base, older, wanted[each])))
    }
    return Step(
        keep=tuple(each for each in ids if each in wanted and each not in renewed),
        wrap=tuple(each for each in change.recipients if each.id not in ids or each.id in renewed),
        drop=tuple(each for each in ids if each not in wanted),
        new_key=new_key,
    )


def expected_calls(step: Step, base: Keyring, identities: Iterable[Identity], *, is_pinned: bool) -> int:
    """Calls to keepers of keys that a step takes, where each does what its kind can.

    Args:
        step: what is to be done.
        base: the keyring that stands.
        identities: who is at hand.
        is_pinned: the keyring need not be opened to be trusted.
    """
    at_hand = [identity for identity in identities if base.position(identity.id) is not None]
    wraps = [recipient for recipient in step.wrap if not is_local(recipient.kind)]
    is_rewrapped = (
        is_pinned
        and not step.new_key
        and len(wraps) == len(step.wrap)
        and any(isinstance(identity, Rewrapper) for identity in at_hand)
    )
    is_opened_here = any(is_local(identity.kind) for identity in at_hand)
    needs_opening = not step.is_nothing and (bool(step.wrap) or not is_pinned)
    opens = int(needs_opening and not is_opened_here and not is_rewrapped)
    return (opens + len(wraps)) * (len(base.keys) if base.wrap == "direct" else 1)


def is_local(kind: str) -> bool:
    """Whether a recipient of this kind works in this process, so that using it costs no call."""
    return kind == "file" or kind.startswith("hpke-")


def wraps_of(keyring: Keyring, recipient_id: str) -> tuple[bytes, ...]:
    """What a recipient has wrapped: the checkpoint's key, or each file's in the order of the paths."""
    position = keyring.position(recipient_id)
    if position is None:
        return ()
    wrapped = keyring.recipients[position].wrapped
    return (wrapped,) if wrapped is not None else tuple(key.wrapped[position] for key in keyring.keys)


def _is_stale(
    change: SetRecipients, base: Keyring, older: Callable[[], Sequence[Keyring]], recipient: Recipient
) -> bool:
    """Whether a key service has to wrap anew. A key in a file has no versions."""
    return not is_local(recipient.kind) and not _is_made_since(
        change.since_ms, base, older, lambda keyring: wraps_of(keyring, recipient.id)
    )


def _is_made_since(
    since_ms: int | None,
    base: Keyring,
    older: Callable[[], Sequence[Keyring]],
    part: Callable[[Keyring], Hashable],
) -> bool:
    """Whether a part of a keyring was made since a time; a rotation of something else copies it.

    Where the older generations were removed, the oldest that is left counts as its maker.
    """
    if since_ms is None or base.created_at_ms < since_ms:
        return False
    made_at_ms = base.created_at_ms
    for keyring in older():
        if part(keyring) != part(base):
            break
        made_at_ms = keyring.created_at_ms
    return made_at_ms >= since_ms
