"""What is tested here is what others can check, by a command that is not ours."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

# Keys and certificates are made as the tests of the security package make them.
sys.path.insert(0, str(Path(__file__).parent.parent / "security"))
sys.path.insert(0, str(Path(__file__).parent))

from independent import ModelSigning, make_folder

PROGRAM = "STRONGROOM_MODEL_SIGNING"
"""Says where the command is, if it is not on the path: it may live in an environment of its own."""


@pytest.fixture(scope="session")
def model_signing() -> ModelSigning:
    """The command; skipped where there is none, but not where it was to be."""
    named = os.environ.get(PROGRAM)
    program = shutil.which(named or "model_signing")
    if program is None:
        missing = f"model_signing is not installed; put it on the path, or its path into {PROGRAM}"
        if named or os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return ModelSigning(program)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to sign, in which the two orders of names that there are differ."""
    return make_folder(
        tmp_path / "data",
        {
            "MANIFEST.json": b"{}",
            "00000-00.safetensors": bytes(range(256)) * 9_000,
            "00001-00.safetensors": b"",
            "sub/part.bin": b"one",
            "sub.d/part.bin": b"two",
            "sub-d/deep/er.bin": b"three",
        },
    )
