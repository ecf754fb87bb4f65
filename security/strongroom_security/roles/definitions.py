"""What each role may do, as plain data: on which keys of a run, for which duty, and by which key service.

Patterns are of keys relative to the run's root; ``*`` stands for any characters, ``/`` included, as in the
policies of AWS. Everything else in this package is derived from what stands here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Final

from strongroom import incoming, layout
from strongroom.errors import ConfigError
from strongroom.replication.ledger import FOLDER as NOTES
from strongroom.roles import Duty, Operation

__all__ = [
    "LOG_ROLES",
    "ROLES",
    "Definition",
    "LogRole",
    "Rights",
    "any_role",
    "definition",
    "matches",
    "who_may",
]

_EVERYTHING: Final = ("*",)
_CHECKPOINTS: Final = ("step-*",)
_ANNOUNCEMENTS: Final = (f"{incoming.FOLDER}/*",)
_KEYRINGS: Final = (f"step-*/{layout.KEYRINGS}/*",)
_METADATA: Final = (
    layout.RUN,
    f"{layout.LAUNCHES}/*",
    f"step-*/{layout.COMMIT}",
    f"step-*/{layout.DATA}/{layout.MANIFEST}",
    # Both the writer's and those in a folder of their own; a policy has room for few patterns.
    "step-*/signature*",
)
"""What says which checkpoints there are, whose they are and how they belong together. No tensor, no key."""


def _union(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    together = tuple(dict.fromkeys((*first, *second)))
    return ("*",) if "*" in together else together


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """Which operations on which keys.

    Attributes:
        create, read, delete: patterns of keys; empty: none.
        lists: it may list the run.
        wraps, unwraps, rewraps: it may have the run's keys wrapped, opened, or wrapped anew by a key service.
        signs: it may sign by the run's signing key.
    """

    create: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    lists: bool = False
    wraps: bool = False
    unwraps: bool = False
    rewraps: bool = False
    signs: bool = False

    def may(self, operation: Operation, key: str | None = None) -> bool:
        """Whether an operation is allowed.

        Args:
            key: on which key, or on which folder; None: on any at all.
        """
        if operation is Operation.LIST:
            return self.lists
        patterns: tuple[str, ...] = getattr(self, operation.value)
        return bool(patterns) if key is None else any(matches(pattern, key) for pattern in patterns)

    def __or__(self, other: Rights) -> Rights:
        return Rights(
            create=_union(self.create, other.create),
            read=_union(self.read, other.read),
            delete=_union(self.delete, other.delete),
            lists=self.lists or other.lists,
            wraps=self.wraps or other.wraps,
            unwraps=self.unwraps or other.unwraps,
            rewraps=self.rewraps or other.rewraps,
            signs=self.signs or other.signs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One role.

    Attributes:
        name: what it is called.
        does: what it is for, in a sentence.
        restore, save: what it may do for each duty.
        restores_as_itself: the credentials for saving may also restore. Otherwise ``restore`` counts only
            where the policy names credentials of their own for it, and no document gives it to this role.
        releases: it may create what is published, and sign it by the release's key.
        audits: it may add to the audit log.
        needs_grant: it is taken up only with a grant of two approvers.
    """

    name: str
    does: str
    restore: Rights = Rights()
    save: Rights = Rights()
    restores_as_itself: bool = True
    releases: bool = False
    audits: bool = True
    needs_grant: bool = False

    @property
    def rights(self) -> Rights:
        """What its one set of credentials has to allow, whatever the duty."""
        return (self.restore | self.save) if self.restores_as_itself else self.save

    def of(self, duty: Duty) -> Rights:
        """What it may do for a duty."""
        return self.restore if duty is Duty.RESTORE else self.save


_READ_ALL: Final = Rights(read=_EVERYTHING, lists=True, unwraps=True)
_LOOK: Final = Rights(read=_METADATA, lists=True)
_LOOK_AT_NOTES: Final = Rights(read=(*_METADATA, f"{NOTES}/*"), lists=True)
_LOOK_AT_KEYRINGS: Final = Rights(read=(*_METADATA, *_KEYRINGS), lists=True)

ROLES: Final = (
    Definition(
        name="trainer-writer",
        does="saves a run's checkpoints, and can read none of them, not even its own",
        restore=_READ_ALL,
        save=Rights(create=_EVERYTHING, wraps=True, signs=True),
        restores_as_itself=False,
    ),
    Definition(
        name="validator-reader",
        does="reads and verifies a run's checkpoints, and changes nothing",
        restore=_READ_ALL,
    ),
    Definition(
        name="recovery-reader-writer",
        does="restores a run and goes on with it: a restart's step, never the steady training job",
        restore=_READ_ALL,
        save=Rights(create=_EVERYTHING, read=_EVERYTHING, lists=True, wraps=True, signs=True),
    ),
    Definition(
        name="publisher",
        does="reads a run's checkpoints and publishes from them, elsewhere",
        restore=_READ_ALL,
        releases=True,
    ),
    Definition(
        name="key-rotator",
        does="has keyrings wrapped anew by the key service; sees neither a key nor a tensor",
        restore=_LOOK_AT_KEYRINGS,
        save=_LOOK_AT_KEYRINGS | Rights(create=_KEYRINGS, rewraps=True),
    ),
    Definition(
        name="key-admin",
        does="adds and removes who can open checkpoints; sees their keys and no tensor",
        restore=_LOOK_AT_KEYRINGS,
        save=_LOOK_AT_KEYRINGS | Rights(create=_KEYRINGS, wraps=True, unwraps=True, rewraps=True),
    ),
    Definition(
        name="retention",
        does="removes checkpoints that need not be kept; reads what says which, and no tensor",
        restore=_LOOK_AT_NOTES,
        save=_LOOK_AT_NOTES | Rights(delete=(*_CHECKPOINTS, *_ANNOUNCEMENTS)),
    ),
    Definition(
        name="break-glass",
        does="reads a run in an emergency, for some hours, by a grant that two people signed",
        restore=_READ_ALL,
        needs_grant=True,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRole:
    """A role of the audit log, which is about no run and has nothing to do with checkpoints.

    It reads and lists all of the log. What others do is put there by the roles of runs (`Definition.audits`).

    Attributes:
        name: what it is called.
        does: what it is for.
        create: patterns of keys of the log's bucket.
    """

    name: str
    does: str
    create: tuple[str, ...] = ()


LOG_ROLES: Final = (
    LogRole(
        name="audit-sequencer",
        does="brings what writers recorded into the log's tree, and adds no event",
        create=("tlog/*",),
    ),
    LogRole(
        name="auditor-reader",
        does="verifies the log and asks it, and adds nothing but that it did",
        # Whoever asks is on record too: under the run that was asked about, or under none.
        create=("segments/*",),
    ),
)


def definition(name: str) -> Definition:
    """A role by its name.

    Raises:
        ConfigError: there is none of that name.
    """
    for role in ROLES:
        if role.name == name:
            return role
    raise ConfigError(f"there is no role {name!r:.60}; there are {', '.join(each.name for each in ROLES)}")


def any_role(name: str) -> Definition | LogRole:
    """A role by its name, of runs or of the log.

    Raises:
        ConfigError: there is none of that name.
    """
    for role in (*ROLES, *LOG_ROLES):
        if role.name == name:
            return role
    names = ", ".join(each.name for each in (*ROLES, *LOG_ROLES))
    raise ConfigError(f"there is no role {name!r:.60}; there are {names}")


def who_may(operation: Operation, duty: Duty, key: str) -> tuple[str, ...]:
    """The names of the roles that may do something."""
    return tuple(role.name for role in ROLES if role.of(duty).may(operation, key))


def matches(pattern: str, key: str) -> bool:
    """Whether a key is one of those that a pattern stands for."""
    return _compiled(pattern).fullmatch(key) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)
