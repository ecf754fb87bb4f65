"""What a release would publish: the wheel and the source archive that ``tox run -e pkg`` has just built."""

from __future__ import annotations

import email
import os
import re
import subprocess
import tarfile
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest

PACKAGES = {
    "strongroom",
    "strongroom_accelerate",
    "strongroom_cli",
    "strongroom_composer",
    "strongroom_lightning",
    "strongroom_security",
    "strongroom_transformers",
}
FRAMEWORKS = {"accelerate", "composer", "lightning", "mosaicml", "pytorch-lightning", "transformers"}
SOURCE_ROOTS = {"core", "security", "plugins"}
CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def archives() -> Path:
    folder = os.environ.get("STRONGROOM_ARCHIVES")
    if folder is None:
        pytest.skip("no archives were built; run `tox run -e pkg`")
    return Path(folder)


@pytest.fixture(scope="session")
def wheel(archives: Path) -> Path:
    (found,) = archives.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def wheel_names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="session")
def sdist(archives: Path) -> Path:
    (found,) = archives.glob("*.tar.gz")
    return found


@pytest.fixture(scope="session")
def sdist_names(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="session")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_holds_the_seven_packages_and_nothing_beside_them(wheel_names: list[str]) -> None:
    tops = {name.partition("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES


def test_every_python_file_of_the_checkout_is_in_the_wheel(wheel_names: list[str]) -> None:
    sources = {
        path.relative_to(CHECKOUT / root).as_posix()
        for root in SOURCE_ROOTS
        for path in (CHECKOUT / root).rglob("*.py")
    }
    assert sources
    assert {name for name in wheel_names if name.endswith(".py")} == sources


def test_every_package_in_the_wheel_is_marked_as_typed(wheel_names: list[str]) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(wheel_names)


def test_the_licence_travels_with_the_wheel(wheel_names: list[str], metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert [name for name in wheel_names if name.endswith(".dist-info/licenses/LICENSE")]


def test_a_framework_is_only_ever_an_extra(metadata: Message) -> None:
    plain = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    names = {re.split(r"[^A-Za-z0-9-]", line, maxsplit=1)[0] for line in plain}
    assert "torch" in names
    assert names & FRAMEWORKS == set()


def test_an_extra_exists_only_for_what_works(metadata: Message) -> None:
    found = set(metadata.get_all("Provides-Extra", []))
    assert found == {
        "accelerate",
        "aws",
        "composer",
        "lightning",
        "pkcs11",
        "pytorch-lightning",
        "s3",
        "transformers",
    }


def test_the_extra_that_holds_torch_back_conflicts_with_every_other_framework(sdist: Path) -> None:
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    with tarfile.open(sdist) as archive:
        (name,) = (name for name in archive.getnames() if re.fullmatch(r"[^/]+/pyproject\.toml", name))
        settings = tomllib.load(archive.extractfile(name))
    frameworks = {
        extra
        for extra, needs in settings["project"]["optional-dependencies"].items()
        if any(re.match(rf"({'|'.join(FRAMEWORKS)})\b", need) for need in needs)
    }
    declared = {frozenset(one["extra"] for one in pair) for pair in settings["tool"]["uv"]["conflicts"]}
    assert len(frameworks) == 5
    assert declared == {frozenset({"composer", other}) for other in frameworks - {"composer"}}


def test_the_source_archive_can_run_every_check(sdist_names: set[str]) -> None:
    wanted = {".ci/run", "tox.ini", "mkdocs.yml", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md"}
    assert wanted <= sdist_names
    for folder in ("docs", "examples", "tests", *SOURCE_ROOTS):
        here = {path.relative_to(CHECKOUT) for path in (CHECKOUT / folder).rglob("*") if path.is_file()}
        assert {path.as_posix() for path in here if "__pycache__" not in path.parts} <= sdist_names


def test_a_clean_install_of_the_wheel_runs_the_command(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "clean", with_pip=True)
    programs = tmp_path / "clean" / "bin"
    # What other tests do without: names of other machines.
    environment = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}

    def run(*command: str | Path) -> str:
        child = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert child.returncode == 0, child.stdout + child.stderr
        return child.stdout

    run(programs / "python", "-m", "pip", "install", "-q", os.environ["STRONGROOM_TORCH"], wheel)
    run(programs / "python", "-m", "pip", "check")
    where = run(programs / "python", "-c", "import strongroom; print(strongroom.__file__)")
    assert Path(where.strip()).is_relative_to(tmp_path / "clean")
    assert "verify" in run(programs / "strongroom", "--help")
