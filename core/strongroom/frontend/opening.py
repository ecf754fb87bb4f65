"""Opening a run's root: the settings become a Checkpointer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strongroom.checkpointer import Checkpointer
from strongroom.errors import ConfigError
from strongroom.events import EventSink
from strongroom.frontend.settings import RunSettings
from strongroom.retention import KeepLast, RetentionPolicy

__all__ = ["open_run", "provenance_of"]


def open_run(
    settings: RunSettings,
    *,
    known: Callable[[], Mapping[str, Any]] = dict,
    keep: RetentionPolicy | None = None,
    events: Sequence[EventSink] = (),
) -> Checkpointer:
    """A Checkpointer of the run's own root.

    Args:
        settings: the front end's.
        known: what the framework knows of where the run comes from, as provenance; asked at each save.
        keep: which stay; None: as the settings say.
        events: who listens.
    """
    if keep is None and settings.keep is not None:
        keep = KeepLast(count=settings.keep)
    return Checkpointer(
        settings.root,
        keep=keep,
        provenance=lambda: provenance_of(settings, known()),
        events=events,
        **settings.options_for(settings.root),
    )


def provenance_of(settings: RunSettings, known: Mapping[str, Any]) -> dict[str, Any]:
    """What the user says of the run, and what the framework knows of it; what the user says counts.

    Raises:
        ConfigError: the user's function returned something else.
    """
    given = settings.provenance
    said = given() if callable(given) else given or {}
    if not isinstance(said, Mapping):
        raise ConfigError(f"provenance() must return a mapping; it returned {said!r:.200}")
    return {**known, **said}
