"""Weights that leave a run by themselves are on record as an export, before they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from strongroom.auditing import NO_AUDIT, Action, Activity
from strongroom.config import load_policy
from strongroom.errors import StrongroomError
from strongroom.frontend.settings import RunSettings
from strongroom.layout import RUN
from strongroom.manifest import RUN_BOUNDS, Run
from strongroom.stores.open import open_store

__all__ = ["on_record_as_export"]

Note = Callable[..., None]
"""Takes more of what a record says, by name."""


@contextmanager
def on_record_as_export(settings: RunSettings, details: Mapping[str, Any]) -> Iterator[Note]:
    """What happens inside is an export of this run's weights; where nothing is audited, nothing else happens.

    Args:
        settings: the run's.
        details: what is taken out, and where to.

    Yields:
        what is to be called with more that is worth recording of it, once that is known.

    Raises:
        AuditError: it could not be put on record; nothing inside was done.
    """
    policy = load_policy(settings.options["security"])
    auditor = NO_AUDIT if policy is None else policy.auditor
    if not auditor.is_on:
        yield _nothing
        return
    store = open_store(settings.root)
    with Activity(auditor, Action.EXPORT, root=store.uri, details=dict(details)) as activity:
        activity.intend(_run_of(store), None)
        yield activity.note


def _nothing(**_: Any) -> None:
    """Nobody keeps a record."""


def _run_of(store: Any) -> str | None:
    """The run's id, where the root says it to whoever asks."""
    try:
        return Run.decode(store.read(RUN, limit_bytes=RUN_BOUNDS.length_bytes), RUN).run
    except StrongroomError:
        return None
