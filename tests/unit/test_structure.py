"""What the architecture promises and no linter can see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import strongroom


def test_importing_strongroom_imports_no_torch_until_a_name_needs_it() -> None:
    program = (
        "import sys, strongroom; strongroom.IntegrityError; strongroom.KeepLast; strongroom.Checkpoint; "
        "assert 'torch' not in sys.modules; strongroom.Checkpointer; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", strongroom.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(strongroom, name) is not None


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Saver'"):
        strongroom.Saver  # noqa: B018


def test_the_core_names_the_security_package_in_one_place_only() -> None:
    core = Path(strongroom.__file__).parent
    naming = [
        str(path.relative_to(core))
        for path in sorted(core.rglob("*.py"))
        if '"strongroom_security' in path.read_text(encoding="utf-8")
        or "import strongroom_security" in path.read_text(encoding="utf-8")
        or "from strongroom_security" in path.read_text(encoding="utf-8")
    ]
    assert naming == ["config.py"]
