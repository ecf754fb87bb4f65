"""What a restore tries, in which order, where some of it is a stranger's. Decides, and reads nothing."""

from __future__ import annotations

from collections.abc import Iterator

from strongroom.catalog import History
from strongroom.errors import IntegrityError, UntrustedError
from strongroom.layout import CheckpointName

__all__ = ["Candidates"]


class Candidates:
    """The line's checkpoints, newest first, and what is below a stranger's launch.

    A launch whose record nobody trusted has signed, and none of whose checkpoints, is a stranger's: it is
    passed over as if it had never been. One that has something trusted, or damaged, is not, whatever befell
    its record: what it went on from cannot be told, and the line ends there.

    Args:
        history: the root, launch records judged.

    Attributes:
        history: the same, less the strangers' launches that were passed over.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self._known: set[int] = set()

    def __iter__(self) -> Iterator[CheckpointName]:
        while True:
            yield from self.history.line.newest_first
            launch = self.history.line.broken_at
            if launch is None or launch not in self.history.untrusted_launches or launch in self._known:
                return
            self.history = self.history.without(launch)

    def tell(self, name: CheckpointName, error: IntegrityError | None) -> None:
        """Say what became of a candidate.

        Args:
            error: why it is none; None: it is trusted.
        """
        if not isinstance(error, UntrustedError):
            self._known.add(name.launch)
