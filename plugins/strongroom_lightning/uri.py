"""How a user names a checkpoint: ``ckpt_path=``, ``load_from_checkpoint`` and ``save_checkpoint`` take these.

========================== ===============================================
``strongroom://latest``    the newest whole checkpoint of the callback's root
``strongroom://last``      the same, or none where there is none yet
``strongroom://best``      the best of the callback's root, as it is ranked
``strongroom://#step=N``   its step N
``strongroom://ROOT``      the newest whole checkpoint of another root
``strongroom://R#step=N``  step N of another root
``strongroom://R#best``    the best of another root, as that run was ranked
a folder that is a root    as ``strongroom://ROOT``
a checkpoint's folder      that checkpoint, if it is on its run's current line
========================== ===============================================
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any, Final

from strongroom import Checkpoint
from strongroom.errors import CheckpointNotFoundError, ConfigError
from strongroom.layout import RUN, CheckpointName

__all__ = ["SCHEME", "CheckpointUri"]

SCHEME: Final = "strongroom://"

_OWN: Final = frozenset({"", "latest", "last", "best"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointUri:
    """A checkpoint's name.

    Attributes:
        root: None for the callback's own.
        step: None for the newest, or the best.
        is_best: the best is meant, by whatever the run is ranked.
        may_be_absent: there need not be any.
        folder: the very folder that was named, where one was.
    """

    root: str | None
    step: int | None
    is_best: bool = False
    may_be_absent: bool = False
    folder: str | None = None

    @classmethod
    def parse(cls, text: str) -> CheckpointUri | None:
        """Read a URI; None where the text has another form, which is Lightning's to read.

        Raises:
            ConfigError: it begins as one and goes on otherwise.
        """
        if not text.startswith(SCHEME):
            return None
        named = text.removeprefix(SCHEME)
        # A root's own name may hold "#", where what follows the last one says which checkpoint is meant.
        match = re.fullmatch(r"(.*)#(?:step=([0-9]{1,18})|(best))", named, re.DOTALL)
        if match is None and "#" in named:
            raise ConfigError(
                f"{text!r}: expected strongroom://latest, strongroom://best, strongroom://#step=N, "
                f"strongroom://ROOT, strongroom://ROOT#step=N or strongroom://ROOT#best"
            )
        root, step, best = (named, None, None) if match is None else match.groups()
        return cls(
            root=None if root in _OWN else os.path.expanduser(root),
            step=None if step is None else int(step),
            is_best=best is not None or (root == "best" and step is None),
            may_be_absent=root == "last" and step is None and best is None,
        )

    @classmethod
    def of(cls, path: Any) -> CheckpointUri | None:
        """Read a URI, or the path of a folder that is a root or a checkpoint; None for whatever else.

        Raises:
            ConfigError: it begins as a URI and goes on otherwise.
        """
        if not isinstance(path, str | os.PathLike):
            return None  # an open file, say
        text = os.path.expanduser(str(path))  # as Lightning has it with files
        uri = cls.parse(text)
        if uri is not None or not os.path.isdir(text):
            return uri
        if os.path.isfile(os.path.join(text, RUN)):
            return cls(root=text, step=None)
        parent, folder = os.path.split(os.path.abspath(text))
        if not os.path.isfile(os.path.join(parent, RUN)):
            return None
        name = CheckpointName.parse(folder)
        return None if name is None else cls(root=parent, step=name.step, folder=folder)

    def check(self, found: Checkpoint) -> None:
        """Raise where the checkpoint that was found is not the folder that was named.

        Raises:
            CheckpointNotFoundError: the run has another one of that step now.
        """
        if self.folder is not None and found.folder != self.folder:
            raise CheckpointNotFoundError(
                f"{self.folder} of {self.root} is superseded: on the run's current line, step {self.step} is "
                f"{found.folder}; name it as strongroom://{self.root}#step={self.step}"
            )

    def __str__(self) -> str:
        # A folder may have one of the names that stand for the callback's own root.
        root = f"./{self.root}" if self.root in _OWN else self.root
        if self.step is not None:
            return f"{SCHEME}{root or 'latest'}#step={self.step}"
        if self.is_best:
            return f"{SCHEME}best" if root is None else f"{SCHEME}{root}#best"
        return f"{SCHEME}{root or ('last' if self.may_be_absent else 'latest')}"
