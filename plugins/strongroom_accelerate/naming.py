"""What ``save_state(output_dir)`` called the steps that it saved, and what ``load_state(input_dir)`` means.

A folder's name in a script is a name of a step here. Each checkpoint holds the names of all before it on its
line, so that the newest one knows them all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from strongroom.errors import CheckpointNotFoundError, ConfigError

__all__ = ["StepNames"]

_MOST: Final = 1000
"""Names; the oldest are forgotten."""


class StepNames:
    """The names of one run's steps."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}

    def note(self, name: str, step: int) -> None:
        """From now on the name means this step."""
        self._steps.pop(name, None)
        self._steps[name] = step
        while len(self._steps) > _MOST:
            del self._steps[next(iter(self._steps))]

    def to_state(self) -> dict[str, int]:
        """What a checkpoint carries."""
        return dict(self._steps)

    def learn(self, state: Mapping[str, int]) -> None:
        """Know what a checkpoint knew, and what was noted since."""
        self._steps = {**state, **self._steps}

    def step_of(self, name: str) -> int | None:
        """What the name means; None: nothing that is known. Its last part will do where it is one step's."""
        if name in self._steps:
            return self._steps[name]
        alike = {step for known, step in self._steps.items() if _last(known) == _last(name)}
        return alike.pop() if len(alike) == 1 else None

    def unknown(self, name: str, root: str) -> CheckpointNotFoundError:
        """The error for a name that means nothing."""
        known = ", ".join(map(repr, list(self._steps)[-20:])) or "none"
        return CheckpointNotFoundError(
            f"load_state({name!r}): {root} knows no checkpoint by that name, and there is no such folder. "
            f"Known are: {known}. Give one of these, a step's number, or nothing for the newest one"
        )


def name_of(place: Any) -> str:
    """A folder as scripts give it, as a name.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(place, str | os.PathLike):
        raise ConfigError(f"a folder's name is a text or a path; got {place!r}")
    found = os.path.normpath(os.path.expanduser(os.fspath(place)))
    if not isinstance(found, str):
        raise ConfigError(f"a folder's name is a text or a path; got {place!r}")
    return found


def _last(name: str) -> str:
    return os.path.basename(name)
