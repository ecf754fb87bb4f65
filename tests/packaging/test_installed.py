"""What an installed Strongroom is: seven packages, light to import, honest about what is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from strongroom._version import __version__

FRONT_ENDS = (
    ("strongroom_accelerate", "Strongroom", "accelerate", "accelerate"),
    ("strongroom_composer", "StrongroomCheckpoint", "composer", "composer"),
    ("strongroom_lightning", "StrongroomCheckpoint", "lightning", "lightning"),
    ("strongroom_transformers", "StrongroomCallback", "transformers", "transformers"),
)


def test_the_running_code_and_the_distribution_agree_on_the_version() -> None:
    assert version("strongroom") == __version__


@pytest.mark.parametrize(
    "package",
    (
        "strongroom",
        "strongroom_accelerate",
        "strongroom_cli",
        "strongroom_composer",
        "strongroom_lightning",
        "strongroom_security",
        "strongroom_transformers",
    ),
)
def test_every_package_tells_type_checkers_that_it_is_typed(package: str) -> None:
    # find_spec, not import: a front end may be installed without its framework.
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).with_name("py.typed").is_file()


@pytest.mark.parametrize(("package", "name", "needs", "extra"), FRONT_ENDS)
def test_a_front_end_without_its_framework_names_what_to_install(
    package: str, name: str, needs: str, extra: str
) -> None:
    # As where the framework is not installed, whatever is installed here.
    program = f"import sys; sys.modules[{needs!r}] = None\nfrom {package} import {name}"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert child.returncode == 1
    told = child.stderr.strip().splitlines()[-1]
    assert told.startswith("ModuleNotFoundError: ")
    assert f"strongroom[{extra}]" in told


@pytest.mark.parametrize("module", ("strongroom", "strongroom.errors", "strongroom_cli"))
def test_torch_is_not_imported_before_it_is_needed(module: str) -> None:
    program = f"import sys, {module}; print([name for name in ('torch', 'lightning') if name in sys.modules])"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"
