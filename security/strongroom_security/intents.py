"""No key is unwrapped that a policy with a record opens, unless that was put on record first: whoever asks.

A policy says by whose record its keepers of keys are asked (`keep_record`). Each place that asks one to
unwrap goes through here (`on_record`), so that neither a part of the policy that is used by itself, as by a
rotation, nor a sealing that was built by hand is a way round it. It asks no keeper.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from strongroom.auditing import NO_AUDIT, Action, Activity, Auditor, accepted_operation
from strongroom.layout import CheckpointName

if TYPE_CHECKING:
    from strongroom_security.fields import Context

__all__ = ["auditor_of", "keep_record", "on_record"]

_MAX_AUDITORS: Final = 8
"""Of one keeper that many policies name: those of the newest are remembered."""


class _Kept:
    """By whose record each object is used, the newest last; by what it is, since few can be compared."""

    def __init__(self) -> None:
        self._auditors: dict[int, tuple[Auditor, ...]] = {}
        self._alive: dict[int, object] = {}

    def add(self, each: object, auditor: Auditor) -> None:
        key = id(each)
        if key not in self._alive:
            try:
                self._alive[key] = weakref.ref(each, lambda _: self._forget(key))
            except TypeError:
                self._alive[key] = each  # it can only be remembered by being kept
        others = (known for known in self._auditors.get(key, ()) if known is not auditor)
        self._auditors[key] = (*others, auditor)[-_MAX_AUDITORS:]

    def of(self, each: object) -> tuple[Auditor, ...]:
        return self._auditors.get(id(each), ())

    def _forget(self, key: int) -> None:
        self._auditors.pop(key, None)
        self._alive.pop(key, None)


_KEPT: Final = _Kept()


def keep_record(objects: Iterable[object], auditor: Auditor) -> None:
    """Have what these are used for put on record by an auditor, wherever they are used in this process.

    Args:
        objects: keepers of keys, and whatever else of a policy is handed on by itself.
        auditor: of the policy that names them; one that is off asks for nothing.
    """
    if not auditor.is_on:
        return
    for each in objects:
        if each is not None:
            _KEPT.add(each, auditor)


def auditor_of(*objects: object) -> Auditor:
    """By whose record the first of these is used that is of any policy with one; `NO_AUDIT`: none is."""
    for each in objects:
        auditors = _KEPT.of(each)
        if auditors:
            return auditors[-1]
    return NO_AUDIT


@contextlib.contextmanager
def on_record(keepers: Iterable[object], context: Context, *, root: str = "") -> Iterator[None]:
    """Around asking keepers to unwrap what is bound to a context: see that it is on record.

    Mostly whoever restores, exports or rotates has said so before, and nothing is done.

    Raises:
        AuditError: it could not be put on record, and nobody was asked.
    """
    name = CheckpointName(launch=context.launch, step=context.step, attempt=context.attempt)
    with contextlib.ExitStack() as stack:
        for keeper in keepers:
            auditors = _KEPT.of(keeper)
            # A policy that was made anew from another's parts has another auditor, and the same record.
            if not auditors or any(accepted_operation(each, context.run, name) for each in auditors):
                continue
            activity = stack.enter_context(
                Activity(auditors[-1], Action.UNWRAP, root=root, run=context.run, checkpoint=name)
            )
            activity.intend(context.run, name)
        yield
