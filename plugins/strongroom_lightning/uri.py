"""``ckpt_path="strongroom://..."``: how a user names a checkpoint by hand.

========================== ===============================================
``strongroom://latest``    the newest whole checkpoint of the callback's root
``strongroom://last``      the same, or none where there is none yet
``strongroom://best``      the best of the callback's root, as it is ranked
``strongroom://#step=N``   its step N
``strongroom://ROOT``      the newest whole checkpoint of another root
``strongroom://R#step=N``  step N of another root
``strongroom://R#best``    the best of another root, as that run was ranked
========================== ===============================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from strongroom.errors import ConfigError

__all__ = ["CheckpointUri"]

_SCHEME: Final = "strongroom://"

_OWN: Final = frozenset({"", "latest", "last", "best"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointUri:
    """A checkpoint's name.

    Attributes:
        root: None for the callback's own.
        step: None for the newest, or the best.
        is_best: the best is meant, by whatever the run is ranked.
        may_be_absent: there need not be any.
    """

    root: str | None
    step: int | None
    is_best: bool = False
    may_be_absent: bool = False

    @classmethod
    def parse(cls, text: str) -> CheckpointUri | None:
        """Read a URI; None where the text has another form, which is Lightning's to read.

        Raises:
            ConfigError: it begins as one and goes on otherwise.
        """
        if not text.startswith(_SCHEME):
            return None
        match = re.fullmatch(r"([^#]*)(?:#(?:step=([0-9]{1,18})|(best)))?", text.removeprefix(_SCHEME))
        if match is None:
            raise ConfigError(
                f"ckpt_path={text!r}: expected strongroom://latest, strongroom://best, strongroom://#step=N, "
                f"strongroom://ROOT, strongroom://ROOT#step=N or strongroom://ROOT#best"
            )
        root, step, best = match.groups()
        return cls(
            root=None if root in _OWN else root,
            step=None if step is None else int(step),
            is_best=best is not None or (root == "best" and step is None),
            may_be_absent=root == "last" and step is None and best is None,
        )

    def __str__(self) -> str:
        if self.step is not None:
            return f"{_SCHEME}{self.root or 'latest'}#step={self.step}"
        if self.is_best:
            return f"{_SCHEME}best" if self.root is None else f"{_SCHEME}{self.root}#best"
        return f"{_SCHEME}{self.root or ('last' if self.may_be_absent else 'latest')}"
