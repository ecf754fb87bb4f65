"""The page says what came of the tests, of all that they ask today, and nothing of it failed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from asking import FRONT_ENDS
from cells import axes, product
from page import PAGE, page
from promises import PROMISES
from recording import FAILS, load
from run_plans import FrontEnd


def test_every_promise_has_a_test() -> None:
    tests = ast.parse((Path(__file__).parent / "test_promises.py").read_text(encoding="utf-8"))
    marked = [
        ast.literal_eval(mark.args[0])
        for test in tests.body
        if isinstance(test, ast.FunctionDef)
        for mark in test.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise"
    ]
    assert marked == list(PROMISES)


def test_the_page_is_what_was_kept() -> None:
    kept = {name: load(name) for name in FRONT_ENDS}
    assert PAGE.read_text(encoding="utf-8") == page(kept)


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_nothing_that_was_kept_has_failed_or_is_missing(name: str) -> None:
    kept = load(name)
    assert kept["promises"] == dict.fromkeys(PROMISES, "kept")
    assert FAILS not in kept["cells"].values()
    assert len(kept["cells"]) == len(kept["ways"]) * len(kept["loaders"]) * len(kept["interruptions"])


def test_what_was_kept_is_of_what_is_asked_today(front_end: FrontEnd, asked_name: str) -> None:
    kept = load(asked_name)
    assert (kept["ways"], kept["loaders"], kept["interruptions"]) == tuple(map(list, axes(front_end)))
    assert list(kept["cells"]) == [" / ".join(cell) for cell in product(front_end)]
