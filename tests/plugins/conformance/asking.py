"""What the suite does with a front end: finds it, starts its ranks, and takes down how each of them ended."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

# First: it knows the folder of what follows.
from run_plans import BATCHES, EPOCHS, FrontEnd, RunPlan, RunResult  # isort: skip
from processes import FrontEndLauncher, Job

__all__ = ["FRONT_ENDS", "Asked", "Ended", "front_end_of", "importable"]

FRONT_ENDS: Final = ("lightning", "composer", "accelerate", "transformers")
"""By the names of their packages, of the modules here (``conform_...``), and of their tox environments."""


def importable() -> list[str]:
    """Those whose framework is installed."""
    found = {name: importlib.util.find_spec(name) for name in FRONT_ENDS}
    # Folders of tests are called as the frameworks are, and would do for packages where those are missing.
    return [name for name, spec in found.items() if spec is not None and spec.origin is not None]


@cache
def front_end_of(name: str) -> FrontEnd:
    """A front end by its package's name."""
    with warnings.catch_warnings():
        # What frameworks say of each other when they are imported is nothing that these tests are about.
        warnings.simplefilter("ignore")
        found: FrontEnd = importlib.import_module(f"conform_{name}").FRONT_END
    return found


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one rank's part came to its end.

    Attributes:
        result: what came of it; None: it did not come to its end.
        status: of a `SystemExit`.
        error: the kind and the words of anything else that was raised.
        said: what was logged, and warned of.
    """

    result: RunResult | None = None
    status: Any = None
    error: tuple[str, str] | None = None
    said: Sequence[str] = ()


class Asked:
    """One front end, with processes to train in.

    Args:
        name: its package's.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.front_end = front_end_of(name)
        preloaded = (*self.front_end.preloaded, "asking", f"conform_{name}")
        self._launcher = FrontEndLauncher(preloaded, self.front_end.prepare)
        self._references: dict[tuple[str, str, int, bool], list[RunResult]] = {}

    def __enter__(self) -> Asked:
        self._launcher.__enter__()
        return self

    def __exit__(self, *reason: object) -> None:
        self._launcher.__exit__(*reason)

    def start(self, plan: RunPlan, folder: Path) -> Job:
        """Begin to train, in a folder that is the working directory."""
        return self._launcher.start(train, self.name, plan, folder, ranks=self.ranks_of(plan))

    def train(self, plan: RunPlan, folder: Path) -> list[RunResult]:
        """What came of it on each rank; fails the test where it does not come to its end."""
        found: list[RunResult] = self._launcher.run(train, self.name, plan, folder, ranks=self.ranks_of(plan))
        return found

    def end(self, plan: RunPlan, folder: Path, *, is_unsupported: bool = False) -> list[Ended]:
        """How each rank ended, however it did; warnings are no errors there, but kept."""
        found: list[Ended] = self._launcher.run(
            end, self.name, plan, folder, is_unsupported=is_unsupported, ranks=self.ranks_of(plan)
        )
        return found

    def reference(self, plan: RunPlan, folder: Path) -> list[RunResult]:
        """The uninterrupted run of a plan, without Strongroom; once for all that ask for it."""
        key = plan.way, plan.loader, plan.accumulate, plan.validates
        if key not in self._references:
            way, loader, accumulate, validates = key
            alone = RunPlan(root=None, way=way, loader=loader, accumulate=accumulate, validates=validates)
            self._references[key] = found = self.train(alone, folder)
            for one in found:
                assert len(one.losses) == EPOCHS * BATCHES, f"{alone} is not what the suite asked for"
                assert one.step == EPOCHS * BATCHES // accumulate, f"{alone} counts steps otherwise"
        return self._references[key]

    def ranks_of(self, plan: RunPlan) -> int:
        """How many processes train."""
        return self.front_end.ways[plan.way][0]

    def way(self, ranks: int) -> str:
        """The first way of so many ranks."""
        return next(name for name, (count, _) in self.front_end.ways.items() if count == ranks)


# ------------------------------------------------------------------------------------------- what a rank does


def train(name: str, plan: RunPlan, folder: Path) -> RunResult:
    """Train on this rank."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    # What is written for a while is looked at, too.
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
    return front_end_of(name).train(plan)


def end(name: str, plan: RunPlan, folder: Path, *, is_unsupported: bool = False) -> Ended:
    """Train on this rank, whatever comes of it."""
    front_end = front_end_of(name)
    if is_unsupported:
        assert front_end.unsupported is not None, f"conform_{name} does not say what takes a name away"
        front_end.unsupported()
    found: dict[str, Any] = {}
    with _listening() as said:
        try:
            found["result"] = train(name, plan, folder)
        except SystemExit as left:
            found["status"] = left.code
        except BaseException as error:  # noqa: BLE001 - told to the test
            found["error"] = (type(error).__name__, str(error))
    return Ended(said=[str(one) for one in said], **found)


@contextmanager
def _listening() -> Iterator[list[str]]:
    """What is said meanwhile: through any logger, whoever its handlers belong to, or as a warning."""
    said: list[str] = []
    for logger in logging.root.manager.loggerDict.values():
        # A rank is told to be quiet, which is no part of what is asked.
        if isinstance(logger, logging.Logger) and logger.level > logging.WARNING:
            logger.setLevel(logging.WARNING)
    make = logging.getLogRecordFactory()

    def record(*arguments: Any, **options: Any) -> logging.LogRecord:
        made = make(*arguments, **options)
        said.append(made.getMessage())
        return made

    logging.setLogRecordFactory(record)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield said
            said += [str(one.message) for one in warned]
    finally:
        logging.setLogRecordFactory(make)
