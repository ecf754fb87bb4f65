"""Which front ends are asked (``--front-end``), by what, and what is kept of the answers (``--record``)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import cells
import recording
from asking import FRONT_ENDS, Asked, front_end_of, importable
from run_plans import FrontEnd


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption(
        "--front-end",
        action="append",
        choices=FRONT_ENDS,
        help="ask this front end; may be repeated. Otherwise all whose framework is installed",
    )
    group.addoption(
        "--record",
        action="store_true",
        help="keep what comes of it in tests/plugins/conformance/results, which the documentation shows",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "promise(name): which of `promises.PROMISES` the test holds")


def _asked_of(config: pytest.Config) -> list[str]:
    return config.getoption("--front-end", default=None) or importable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test once for each front end; tests of the matrix once for each cell of it."""
    if "asked" not in metafunc.fixturenames and "front_end" not in metafunc.fixturenames:
        return
    names = _asked_of(metafunc.config)
    choices = {"pair": cells.cover, "cell": cells.product}
    wanted = [argument for argument in choices if argument in metafunc.fixturenames]
    if not wanted:
        metafunc.parametrize("asked_name", names, ids=names, scope="session")
        return
    found = [(name, cell) for name in names for cell in choices[wanted[0]](front_end_of(name))]
    metafunc.parametrize(
        ("asked_name", wanted[0]), found, ids=[" / ".join((name, *cell)) for name, cell in found]
    )


@pytest.fixture(scope="session")
def everyone_asked() -> Iterator[Callable[[str], Asked]]:
    """Front ends with their processes, each made once."""
    known: dict[str, Asked] = {}

    def ask(name: str) -> Asked:
        if name not in known:
            known[name] = Asked(name).__enter__()
        return known[name]

    yield ask
    for one in known.values():
        one.__exit__(None, None, None)


@pytest.fixture
def asked(everyone_asked: Callable[[str], Asked], asked_name: str) -> Asked:
    """The front end that this test asks."""
    return everyone_asked(asked_name)


@pytest.fixture
def front_end(asked_name: str) -> FrontEnd:
    return front_end_of(asked_name)


@pytest.fixture
def record(asked_name: str, record_property: Callable[[str, Any], None]) -> recording.Record:
    """Keeps what a test comes to if it passes: of which kind it is, its name, and the word for it."""

    def keep(kind: str, name: str, word: str) -> None:
        record_property(recording.PROPERTY, [asked_name, kind, name, word])

    return keep


# ------------------------------------------------------------- what is kept, in the process that hears of all


_FOUND: list[tuple[str, str, str, str]] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Hear of every test, in whichever process it ran."""
    if report.when == "call":
        told = [value for name, value in report.user_properties if name == recording.PROPERTY]
        for name, kind, which, word in told:
            _FOUND.append((name, kind, which, word if report.passed else recording.FAILS))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what came of it, once, if that is wanted."""
    is_of_many = hasattr(session.config, "workerinput")
    if session.config.getoption("--record", default=False) and not is_of_many:
        recording.keep(_FOUND)
