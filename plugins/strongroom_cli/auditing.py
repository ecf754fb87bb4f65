"""What a command is on record: which action, begun when its policy is known, ended by its exit status.

A command says itself which checkpoints it is about to read, by ``options.activity``, before it reads them.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Final

from strongroom.auditing import NO_AUDIT, Action, Activity, Outcome
from strongroom.config import Policy, load_policy
from strongroom.errors import ConfigError
from strongroom.roles import Duty, open_root
from strongroom_cli.words import printable

if TYPE_CHECKING:
    from strongroom.stores.base import Store

__all__ = ["ACTIONS", "UNRECORDED", "activity_of", "end", "leave", "open_store_of", "policy_of"]

ACTIONS: Final[dict[tuple[str, str | None], Action]] = {
    ("export", None): Action.EXPORT,
    ("floor", "forget"): Action.FLOOR,
    ("floor", "show"): Action.FLOOR,
    ("gc", None): Action.COLLECT,
    ("keys", "add-recipient"): Action.RECIPIENTS,
    ("keys", "init"): Action.KEYS,
    ("keys", "list"): Action.KEYS,
    ("keys", "remove-recipient"): Action.RECIPIENTS,
    ("keys", "rotate"): Action.ROTATE,
    ("ls", None): Action.LIST,
    ("plan", None): Action.PLAN,
    ("provenance", None): Action.PROVENANCE,
    ("replicate", None): Action.REPLICATE,
    ("roles", "approve"): Action.APPROVE,
    ("roles", "check"): Action.ROLES,
    ("roles", "grant"): Action.GRANT,
    ("roles", "render"): Action.ROLES,
    ("show", None): Action.SHOW,
    ("sign", None): Action.SIGN,
    ("trust", "add-key"): Action.TRUST,
    ("trust", "init"): Action.TRUST,
    ("trust", "renew"): Action.TRUST,
    ("trust", "revoke"): Action.TRUST,
    ("trust", "show"): Action.TRUST,
    ("trust", "sign"): Action.TRUST,
    ("verify", None): Action.VERIFY,
}
"""What each command and verb is on record; one that is not here has its own way (`UNRECORDED`)."""

UNRECORDED: Final[dict[str, str]] = {
    "audit": "it is about the log itself, and tells what it does there by itself",
}
"""Commands that are on record by other ways than this, and which."""

_LEAVING_S: Final = 5.0
"""How long a command's end waits at most until its record is in the sink, or safe on this machine."""

_BEFORE_A_POLICY: Final = {
    ("keys", "init"),
    ("roles", "approve"),
    ("roles", "check"),
    ("roles", "grant"),
    ("roles", "render"),
    ("trust", "init"),
    ("trust", "show"),
}
"""They may make the very file that the policy names, so that it need not be there yet."""


def _which(options: argparse.Namespace) -> tuple[str, str | None]:
    return options.command, getattr(options, "verb", None)


def policy_of(options: argparse.Namespace) -> Policy | None:
    """The policy that a command goes by.

    Raises:
        ConfigError: it cannot be had; never passed over, but where the command may be what makes it whole:
            then it is told that nothing is on record.
    """
    named = getattr(options, "security", None)
    try:
        return load_policy(named)
    except ConfigError as error:
        if named is not None or _which(options) not in _BEFORE_A_POLICY:
            raise
        told = f"what this does is not on record, since the policy cannot be had: {error}"
        sys.stderr.write(f"strongroom: {printable(told)}\n")
        return None


def activity_of(options: argparse.Namespace, policy: Policy | None) -> Activity:
    """A command as an activity, by its policy's auditor."""
    action = ACTIONS[_which(options)]
    auditor = policy.auditor if policy is not None else NO_AUDIT
    words = " ".join(word for word in _which(options) if word is not None)
    return Activity(auditor, action, details={"command": words})


def open_store_of(options: argparse.Namespace, duty: Duty) -> Store:
    """The store at the command's root, by the policy's role; the record says which it is.

    Raises:
        AccessDeniedError, ConfigError, StoreError: as `open_root`.
    """
    store = open_root(options.root, options.policy, duty)
    options.activity.about(root=store.uri)
    return store


def end(activity: Activity, status: int) -> None:
    """Say how a command has ended that raised nothing, by its exit status."""
    if status == 0:
        activity.succeed()
    else:
        activity.conclude(Outcome.FAILURE, f"exit status {status}")


def leave(policy: Policy | None) -> None:
    """See the record out of this process's hands: a command records nothing more."""
    if policy is not None and policy.auditor.is_on:
        policy.auditor.close(within_s=_LEAVING_S)
