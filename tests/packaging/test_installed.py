"""What an installed Strongroom is: seven packages, light to import, honest about what is missing."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from strongroom._version import __version__
from strongroom.errors import ConfigError

NOT_IN_THIS_RELEASE = {
    "strongroom_accelerate": "Strongroom",
    "strongroom_composer": "StrongroomCheckpoint",
    "strongroom_transformers": "StrongroomCallback",
}


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


@pytest.mark.parametrize(("package", "name"), NOT_IN_THIS_RELEASE.items())
def test_a_front_end_that_does_not_exist_yet_says_so_when_it_is_used(package: str, name: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__ == []
    with pytest.raises(ConfigError, match=rf"{name}: this release has no .* use strongroom\.Checkpointer"):
        getattr(module, name)


@pytest.mark.parametrize("package", NOT_IN_THIS_RELEASE)
def test_a_missing_front_end_cannot_be_mistaken_for_a_missing_framework(package: str) -> None:
    program = f"try:\n    from {package} import Anything\nexcept ImportError:\n    print('trains on unsaved')"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert child.returncode == 1
    assert child.stdout == ""
    assert "ConfigError" in child.stderr


@pytest.mark.parametrize("module", ("strongroom", "strongroom.errors", "strongroom_cli"))
def test_torch_is_not_imported_before_it_is_needed(module: str) -> None:
    program = f"import sys, {module}; print([name for name in ('torch', 'lightning') if name in sys.modules])"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"
