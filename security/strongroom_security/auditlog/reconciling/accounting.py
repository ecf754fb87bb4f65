"""Which operations account for which accesses: what each does to a run's objects and keys. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from strongroom import layout
from strongroom.auditing import Action
from strongroom.layout import CheckpointName
from strongroom_security.auditlog.reconciling.accesses import AccessKind
from strongroom_security.auditlog.reconciling.operations import Operation

__all__ = ["TOUCHING", "accounts_for", "folder_of", "is_at_large", "is_of_a_run"]

_READING: Final = frozenset(
    each.value
    for each in (
        Action.RESTORE,
        Action.READ,
        Action.PLAN,
        Action.SHOW,
        Action.PROVENANCE,
        Action.VERIFY,
        Action.EXPORT,
        Action.IMPORT,
        Action.SIGN,
        Action.UNWRAP,
        Action.KEYS,
        Action.ROTATE,
        Action.RECIPIENTS,
        Action.REPLICATE,
        Action.BREAK_GLASS,
        Action.TRUST,
        Action.FLOOR,
    )
)
_SAVING: Final = frozenset({Action.SAVE.value, Action.IMPORT.value, Action.REPLICATE.value})
_CHANGING: Final = frozenset({Action.ROTATE.value, Action.RECIPIENTS.value})
_REMOVING: Final = frozenset({Action.REMOVE.value, Action.COLLECT.value})

_ANY: Final = _READING | _SAVING | _REMOVING | {Action.LIST.value, Action.LAUNCH.value}


_COPYING: Final = "replication"
"""The folder of a root with notes about copies (docs/format.md, 16)."""

TOUCHING: Final = frozenset(
    each.value for each in (Action.RESTORE, Action.VERIFY, Action.EXPORT, Action.SAVE, Action.REMOVE)
)
"""What never comes off without an object being read, written or deleted."""


def accounts_for(operation: Operation, kind: AccessKind, where: str) -> bool:
    """Whether an operation on a checkpoint may do such a thing to one of its objects.

    Args:
        where: the object's key under the root.
    """
    action = operation.action
    if kind is AccessKind.LOOK:
        return action in _ANY
    if kind is AccessKind.READ:
        # A save looks at its own small documents again, and never at what it has written of the state.
        return action in _READING or (action in _ANY and _is_small(where))
    if kind is AccessKind.DELETE:
        failed = action in _SAVING and not (operation.has_ended and operation.has_succeeded)
        return action in _REMOVING or failed
    if kind is AccessKind.UNWRAP:
        return action in _READING or action in _CHANGING
    if kind is AccessKind.WRITE:
        inside = where.partition("/")[2]
        if inside.startswith(f"{layout.KEYRINGS}/") and action in _CHANGING:
            return True
        if inside.startswith(f"{layout.SIGNATURES}/") and action == Action.SIGN.value:
            return True
        return action in _SAVING
    if kind is AccessKind.SIGN:
        return action in _SAVING or action == Action.SIGN.value
    return action in _SAVING or action in _CHANGING


def is_at_large(kind: AccessKind, where: str) -> bool:
    """Whether any operation on the run may do such a thing to an object, whatever checkpoint it is about."""
    if folder_of(where) is None:
        if kind is AccessKind.READ:
            return _is_small(where)
        # What makes a root this run's is written once, and nothing of ours removes it.
        return not (kind is AccessKind.DELETE and where == layout.RUN)
    return kind is AccessKind.LOOK or (kind is AccessKind.READ and _is_small(where))


def is_of_a_run(where: str) -> bool:
    """Whether a key under some root looks like one that a run has."""
    return folder_of(where) is not None or where == layout.RUN or where.startswith(f"{layout.LAUNCHES}/")


def _is_small(where: str) -> bool:
    """Whether a key is of a document that whoever lists a run reads."""
    top, _, inside = where.partition("/")
    if not _is_folder(top):
        return where == layout.RUN or top in (layout.LAUNCHES, _COPYING)
    return inside in (layout.COMMIT, layout.SIGNATURE) or inside.startswith(f"{layout.SIGNATURES}/")


def folder_of(where: str) -> str | None:
    """The checkpoint's folder that a key under the root begins with; None: it begins with none."""
    top = where.partition("/")[0]
    return top if _is_folder(top) else None


@lru_cache(maxsize=65_536)
def _is_folder(top: str) -> bool:
    return CheckpointName.parse(top) is not None
