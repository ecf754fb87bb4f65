"""The script of docs/how-to: it holds files against their manifest where there is no Strongroom."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from strongroom import Checkpointer
from strongroom_security import Seal, SecurityPolicy
from strongroom_security.recipients.file import create_key_file

SCRIPT = Path(__file__).parents[2] / "docs" / "how-to" / "check_blake3.py"

# Neither site-packages nor this checkout can be seen; blake3 alone lies in the folder that is added.
CHILD = """
import runpy, sys
folder, script, *sys.argv[1:] = sys.argv[1:]
sys.path.append(folder)
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def blake3_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    spec = importlib.util.find_spec("blake3")
    assert spec is not None
    assert spec.origin is not None
    (folder / "blake3").symlink_to(Path(spec.origin).parent)
    return folder


@pytest.fixture(params=("plain", "sealed"))
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    seal = None
    if request.param == "sealed":
        create_key_file(tmp_path / "kek.key")
        seal = Seal(recipients=["file:kek.key"], base=tmp_path)
    state = {"weights": torch.randn(700, 700), "empty": torch.empty(0), "extra": {"epoch": 1}}
    with Checkpointer(tmp_path / "run", security=SecurityPolicy(seal=seal)) as ck:
        ck.save(1, state).result(60)
    (folder,) = (tmp_path / "run").glob("step-*")
    return folder / "data"


def run(packages: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", CHILD, str(packages), str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def check(data: Path, packages: Path) -> tuple[int, str]:
    done = run(packages, str(data))
    assert not done.stderr
    return done.returncode, done.stdout


def test_it_is_short() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 40


def test_a_whole_checkpoint_is_right(data: Path, blake3_alone: Path) -> None:
    status, told = check(data, blake3_alone)
    assert status == 0
    assert told.endswith("files are right\n")


def shard(data: Path) -> Path:
    return next(path for path in sorted(data.iterdir()) if path.stat().st_size > 1 << 20)


def flip(data: Path) -> str:
    path = shard(data)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return f"{path.name}: other bytes"


def cut(data: Path) -> str:
    path = shard(data)
    path.write_bytes(path.read_bytes()[: 1 << 20])
    return f"{path.name}: other bytes"


def add(data: Path) -> str:
    (data / "more").write_bytes(b"")
    return "more: not listed"


def remove(data: Path) -> str:
    path = shard(data)
    path.unlink()
    return f"{path.name}: missing"


def link(data: Path) -> str:
    path = shard(data)
    path.rename(data.parent / "elsewhere")
    path.symlink_to(data.parent / "elsewhere")
    return f"{path.name}: missing, or a link"


def link_folder(data: Path) -> str:
    (data / "more").symlink_to(data.parent)
    return "more: not listed"


@pytest.mark.parametrize("tamper", (flip, cut, add, remove, link, link_folder))
def test_what_is_wrong_is_named(tamper: Callable[[Path], str], data: Path, blake3_alone: Path) -> None:
    expected = tamper(data)
    status, told = check(data, blake3_alone)
    assert status == 1
    assert expected in told


@pytest.mark.parametrize("arguments", ((), ("one", "two"), ("nowhere",), (".",)))
def test_without_a_checkpoint_it_says_how_it_is_used(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blake3_alone: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(blake3_alone, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: python check_blake3.py CHECKPOINT/data")
    assert done.stderr.count("\n") == 1
