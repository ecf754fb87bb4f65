"""``ckpt_path="strongroom://..."``: how a user names a checkpoint by hand.

========================== ===============================================
``strongroom://latest``    the newest whole checkpoint of the callback's root
``strongroom://#step=N``   its step N
``strongroom://ROOT``      the newest whole checkpoint of another root
``strongroom://R#step=N``  step N of another root
========================== ===============================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from strongroom.errors import ConfigError

__all__ = ["CheckpointUri"]

_SCHEME: Final = "strongroom://"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointUri:
    """A checkpoint's name: ``root`` is None for the callback's own, ``step`` is None for the newest."""

    root: str | None
    step: int | None

    @classmethod
    def parse(cls, text: str) -> CheckpointUri | None:
        """Read a URI; None where the text has another form, which is Lightning's to read.

        Raises:
            ConfigError: it begins as one and goes on otherwise.
        """
        if not text.startswith(_SCHEME):
            return None
        match = re.fullmatch(r"([^#]*)(?:#step=([0-9]{1,18}))?", text.removeprefix(_SCHEME))
        if match is None:
            raise ConfigError(
                f"ckpt_path={text!r}: expected strongroom://latest, strongroom://#step=N, strongroom://ROOT "
                f"or strongroom://ROOT#step=N"
            )
        root, step = match.groups()
        return cls(root=None if root in {"", "latest"} else root, step=None if step is None else int(step))

    def __str__(self) -> str:
        return f"{_SCHEME}{self.root or 'latest'}" + ("" if self.step is None else f"#step={self.step}")
