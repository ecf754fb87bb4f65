"""What every test starts from: the installed package, no policy from outside, reproducible randomness."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The conformance suites are tests too, although they are shipped in the package.
pytest.register_assert_rewrite("strongroom.testing.conformance", "strongroom_security.testing")

# torch looks up the name of each peer that it connects to, and a name server that is slow, or loses the
# question, holds it up for seconds. Names of this machine are in a file; no test asks for another.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

settings.register_profile("default", deadline=None, print_blob=True)
# The same examples on every run, so that a red run is about the change and not about luck.
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True)
settings.register_profile("deep", parent=settings.get_profile("default"), max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default"))


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test the checkout where the built wheel was meant: a file left out of it would go unseen."""
    # Whoever is started in the background by a shell ignores interrupts, which some tests send themselves.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "TOX_ENV_NAME" not in os.environ:
        return
    site_packages = Path(sysconfig.get_path("purelib"))
    for package in (
        "strongroom",
        "strongroom_accelerate",
        "strongroom_cli",
        "strongroom_composer",
        "strongroom_lightning",
        "strongroom_transformers",
    ):
        spec = importlib.util.find_spec(package)
        found = spec.origin if spec is not None else None
        if found is not None and not Path(found).is_relative_to(site_packages):
            raise pytest.UsageError(f"{package} comes from {found}; expected it in {site_packages}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a CUDA device where there is none, and say so."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device; torch sees none")


@pytest.fixture(autouse=True)
def _no_callbacks_in_the_way_of_interrupts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hypothesis is called at each collection of garbage: an interrupt that comes just then would be lost."""
    kept = list(gc.callbacks)
    if "interrupt" in request.node.name:
        # In place: it is this very list that the interpreter looks at.
        gc.callbacks.clear()
    yield
    if "interrupt" in request.node.name:
        gc.callbacks[:] = kept


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A developer's policy must not reach a test, nor the width of a terminal, nor what earlier runs cached.

    pytest loads readline, which tells the width to every process that is started then: its own workers are.
    """
    monkeypatch.delenv("STRONGROOM_CONFIG", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    # An index of a log that stood in a folder of the same name would tell that this one was tampered with.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def strace() -> str:
    """The path of a working ``strace``; the test is skipped, with the reason, where none can be had."""
    path = shutil.which("strace")
    if path is None:
        pytest.skip("strace is not installed")
    probe = subprocess.run([path, "-qq", "-e", "trace=none", "true"], capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"strace may not trace a process here: {probe.stderr.strip()}")
    return path
