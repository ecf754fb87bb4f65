"""One run in one folder, seen from outside: started, read, frozen, killed, and what it left on the disk.

It reads what anyone could read, the lines that the training prints and the names in its folder, and asks
Strongroom nothing: what the demonstration shows does not rest on what it is there to show.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Batch", "OnDisk", "Run", "Start"]

TRAIN = Path(__file__).with_name("train.py")
LINE = re.compile(r"epoch=(\d+) batch=(\d+) step=(\d+) loss=(\S+)\n")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch that was trained on; ``step`` counts the optimizer steps that were done before it."""

    epoch: int
    batch: int
    step: int
    loss: float

    @classmethod
    def parse(cls, line: str) -> Batch | None:
        match = LINE.fullmatch(line)
        if match is None:
            return None
        epoch, batch, step, loss = match.groups()
        return cls(epoch=int(epoch), batch=int(batch), step=int(step), loss=float(loss))


@dataclass(frozen=True, kw_only=True)
class OnDisk:
    """The checkpoints in a run's folder: a step's folder holds a ``COMMIT``, or it is no checkpoint."""

    whole: tuple[int, ...]
    torn: tuple[Path, ...]

    @classmethod
    def of(cls, root: Path) -> OnDisk:
        folders = sorted(root.glob("step-*"))
        torn = tuple(folder for folder in folders if not (folder / "COMMIT").exists())
        whole = tuple(step_of(folder) for folder in folders if folder not in torn)
        return cls(whole=whole, torn=torn)


def step_of(folder: Path) -> int:
    return int(folder.name.split("-")[1])


def size_of(folder: Path) -> tuple[int, int]:
    """The number of files in a folder, and their bytes."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes)


class Start:
    """One process of one run, alive or dead."""

    def __init__(self, command: list[str], *, log: Path, temporary: Path) -> None:
        self.batches: list[Batch] = []
        self.first_batch_after_s: float | None = None
        self.began_s = time.monotonic()
        self.heard_s = self.began_s
        self._errors = log.with_suffix(".err")
        with log.open("wb") as out, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                env=os.environ | {"TMPDIR": str(temporary)},
                start_new_session=True,  # the loader's workers die with it, as with their machine
            )
        self._lines = log.open(encoding="utf-8")
        self._half_a_line = ""

    def read(self) -> None:
        """Take in what the training has printed since the last call."""
        for line in self._lines:
            self._half_a_line += line
            if not line.endswith("\n"):
                break
            batch, self._half_a_line = Batch.parse(self._half_a_line), ""
            if batch is None:
                continue
            self.heard_s = time.monotonic()
            if self.first_batch_after_s is None:
                self.first_batch_after_s = self.heard_s - self.began_s
            self.batches.append(batch)

    def seconds_per_step(self) -> float:
        steps = self.batches[-1].step - self.batches[0].step
        if self.first_batch_after_s is None or steps == 0:
            return 0.0
        return (self.heard_s - self.began_s - self.first_batch_after_s) / steps

    @property
    def exit_status(self) -> int | None:
        return self._process.poll()

    def freeze(self) -> None:
        """Stop every thread where it is, and return when they stand still (or the process has ended)."""
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, which no process can catch; harmless when it has ended already."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self.read()
        self._lines.close()

    def complaint(self, lines: int = 20) -> str:
        """The end of what the process wrote to its standard error."""
        return "\n".join(self._errors.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class Run:
    """A folder, the one command that trains there, and every start that it had.

    Args:
        folder: of this run; created.
        steps: of the optimizer, in all.
        workers: processes that load data.
        temporary: where processes put what they would remove themselves if they were not killed.
    """

    def __init__(self, folder: Path, *, steps: int, workers: int, temporary: Path) -> None:
        self.folder = folder
        self.temporary = temporary
        self.steps = steps
        self.starts: list[Start] = []
        self._command = [sys.executable, str(TRAIN), "--out", str(folder)]
        self._command += ["--steps", str(steps), "--workers", str(workers)]
        folder.mkdir(parents=True)

    @property
    def root(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def batches(self) -> list[Batch]:
        """Every batch of every start: those that were lost to a kill come again."""
        return [batch for start in self.starts for batch in start.batches]

    @contextlib.contextmanager
    def start(self) -> Iterator[Start]:
        """Run the command, always the same; whatever happens, its process does not outlive the block."""
        log = self.folder / f"start-{len(self.starts) + 1}.log"
        start = Start(self._command, log=log, temporary=self.temporary)
        self.starts.append(start)
        try:
            yield start
        finally:
            start.kill()

    def on_disk(self) -> OnDisk:
        return OnDisk.of(self.root)

    def digest(self) -> str:
        """SHA-256 of the file with the final weights."""
        return hashlib.sha256((self.folder / "model.safetensors").read_bytes()).hexdigest()
