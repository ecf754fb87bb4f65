"""Another process, as a crash test sees it: it talks through a pipe, and it may be killed."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

__all__ = ["WAIT_S", "Child"]

WAIT_S = 60.0
"""How long a test waits for a process that should have spoken, or ended, long ago."""


@dataclass(frozen=True)
class Child:
    """A process and the pipe through which it talks."""

    process: BaseProcess
    pipe: Connection

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def hear(self) -> Any:
        """The next thing that it says; EOFError once it has died."""
        assert self.pipe.poll(WAIT_S), "a child process says nothing"
        return self.pipe.recv()

    def say(self, word: Any) -> None:
        self.pipe.send(word)

    def end(self) -> tuple[int, list[Any]]:
        """Wait for its end: the exit code, and all that it had still said."""
        heard = []
        while True:
            try:
                heard.append(self.hear())
            except EOFError:
                break
        self.process.join(WAIT_S)
        assert self.process.exitcode is not None, "a child process does not end"
        return self.process.exitcode, heard
