"""The examples that fine-tune, started as a user starts them: to the end, killed, and started again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["EXAMPLES", "Output", "Program"]

EXAMPLES = Path(__file__).parents[2] / "examples"

_STEP = re.compile(r"step (\d+) loss (\S+)\n")


@dataclass(frozen=True, kw_only=True)
class Output:
    """What one start of a program printed.

    Attributes:
        losses: as text, with all their digits, by step; of a step of several batches, each batch's.
        last: the last line.
        told: all of it, standard error included.
    """

    losses: Mapping[int, tuple[str, ...]]
    last: str
    told: str

    @classmethod
    def of(cls, lines: Sequence[str], told: str) -> Output:
        losses: dict[int, tuple[str, ...]] = {}
        for line in lines:
            if match := _STEP.fullmatch(line):
                step = int(match[1])
                losses[step] = (*losses.get(step, ()), match[2])
        return cls(losses=losses, last=lines[-1].strip() if lines else "", told=told)


@dataclass(frozen=True, kw_only=True)
class Program:
    """An example's script, in a folder of its own.

    Attributes:
        script: the file.
        folder: in which it is started.
        variables: of its environment, besides this process's.
    """

    script: Path
    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def run(self, *arguments: str) -> Output:
        """To the end."""
        return self._read(self.start(*arguments))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "errors.txt").open("w") as errors:
            # One thread: on a busy machine the many that wait for one another take minutes.
            return subprocess.Popen(
                [sys.executable, "-u", str(self.script), *arguments],
                cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **self.variables},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def _read(self, child: subprocess.Popen[str]) -> Output:
        with child:
            assert child.stdout is not None
            lines = list(child.stdout)
        output = Output.of(lines, "".join(lines) + (self.folder / "errors.txt").read_text())
        assert child.returncode == 0, output.told
        return output

    def kill_at(self, step: int, *arguments: str) -> Output:
        """SIGKILL once it has told of ``step``; what it had printed until then, and is still in the pipe."""
        with self.start(*arguments) as child:
            assert child.stdout is not None
            lines = []
            for line in child.stdout:
                lines.append(line)
                if line.startswith(f"step {step} "):
                    child.kill()
        output = Output.of(lines, "".join(lines) + (self.folder / "errors.txt").read_text())
        assert child.returncode == -9, output.told
        return output
