"""Ranks that stay: a job which runs one function after another, so that no test pays for starting it.

For tests that leave their ranks alive. A rank that raises leaves the others somewhere in a
collective, so that its crew is let go and the next call starts a fresh one.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from launching import Job, Launcher

__all__ = ["Crew", "CrewError", "Crews"]

LIMIT_S = 120.0


class CrewError(AssertionError):
    """A function raised on some ranks.

    Attributes:
        errors: the traceback by rank; of those that never answered, a word that says so.
    """

    def __init__(self, errors: dict[int, str]) -> None:
        ranks: dict[str, list[int]] = {}
        for rank, text in sorted(errors.items()):
            ranks.setdefault(text, []).append(rank)
        super().__init__("\n".join(f"ranks {where}: {text}" for text, where in ranks.items()))
        self.errors = errors


class Crew:
    """One job that serves calls."""

    def __init__(self, launcher: Launcher, ranks: int) -> None:
        context = multiprocessing.get_context("forkserver")
        pairs = [context.Pipe() for _ in range(ranks)]
        self._pipes = [mine for mine, _ in pairs]
        self._job: Job = launcher.start(serve, [theirs for _, theirs in pairs], ranks=ranks)
        for _, theirs in pairs:
            theirs.close()
        self.is_sound = True

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """What ``function(*arguments, **options)`` returned on each rank.

        Raises:
            CrewError: it raised somewhere, or did not return in time.
        """
        for pipe in self._pipes:
            pipe.send((function, arguments, options))
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        values: list[Any] = [None] * len(self._pipes)
        errors: dict[int, str] = {}
        while waiting:
            # Once one has raised, those that wait for it in a collective are given little time.
            answered = wait(list(waiting), timeout=2.0 if errors else LIMIT_S)
            for pipe in answered:
                rank = waiting.pop(pipe)
                try:
                    values[rank], error = pipe.recv()
                except EOFError:
                    error = "it died"
                if error is not None:
                    errors[rank] = error
            if not answered:
                errors |= dict.fromkeys(waiting.values(), "it did not answer")
                break
        if errors:
            self.is_sound = False
            self._job.kill()
            raise CrewError(errors)
        return values

    def leave(self) -> None:
        if self.is_sound:
            self.is_sound = False
            for pipe in self._pipes:
                pipe.send(None)
            self._job.outcomes()


class Crews:
    """A crew for each number of ranks, started when first asked for."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._crews: dict[int, Crew] = {}

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int, **options: Any) -> list[Any]:
        """What the function returned on each rank of a gloo group."""
        crew = self._crews.get(ranks)
        if crew is None or not crew.is_sound:
            self._crews[ranks] = crew = Crew(self._launcher, ranks)
        return crew.call(function, *arguments, **options)

    def leave(self) -> None:
        for crew in self._crews.values():
            crew.leave()


def serve(pipes: list[Connection]) -> None:
    """Answer calls until there are no more."""
    import torch.distributed as dist

    pipe = pipes[dist.get_rank()]
    for other in pipes:
        if other is not pipe:
            other.close()
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        if call is None:
            return
        function, arguments, options = call
        try:
            answer = function(*arguments, **options), None
        except BaseException:  # noqa: BLE001 - told to the test
            answer = None, traceback.format_exc()
        pipe.send(answer)
