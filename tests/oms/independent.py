"""The independent command ``model_signing``, run as others would run it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 120


@dataclass(frozen=True)
class ModelSigning:
    """The independent command ``model_signing``; called with its arguments, it returns how that ended."""

    program: str

    def __call__(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.program, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        )

    def sign(self, method: str, *arguments: str | Path) -> None:
        """Sign, and have it succeed."""
        done = self("sign", method, *arguments)
        assert (done.returncode, done.stdout) == (0, "Signing succeeded\n"), done.stderr

    def accepts(self, method: str, *arguments: str | Path) -> bool:
        """Whether it says that a signature holds; anything but a plain yes or no fails the test."""
        done = self("verify", method, *arguments)
        if done.returncode == 0 and done.stdout.endswith("Verification succeeded\n"):
            return True
        assert done.returncode == 1, done
        assert "Verification failed with error: " in done.stderr, done
        return False

    def reason(self, method: str, *arguments: str | Path) -> str:
        """Why it refuses what it is given."""
        done = self("verify", method, *arguments)
        assert done.returncode == 1, done
        _, found, reason = done.stderr.partition("Verification failed with error: ")
        assert found, done
        return reason.strip()


def make_folder(root: Path, files: dict[str, bytes]) -> Path:
    """Files by their paths under a folder."""
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return root
