"""The page says what came of the tests, of all that they ask today, and nothing of it failed."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_promises  # by its folder, which the conftest knows
from asking import FRONT_ENDS
from cells import axes, product
from page import PAGE, page
from promises import PROMISES
from recording import FAILS, load
from runs import FrontEnd


def test_every_promise_has_a_test() -> None:
    marks = [mark for value in vars(test_promises).values() for mark in getattr(value, "pytestmark", ())]
    assert [mark.args[0] for mark in marks if mark.name == "promise"] == list(PROMISES)


def test_the_page_is_what_was_kept() -> None:
    kept = {name: load(name) for name in FRONT_ENDS}
    assert PAGE.read_text(encoding="utf-8") == page(kept), (
        f"write it anew: python {Path(page.__code__.co_filename)}"
    )


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_nothing_that_was_kept_has_failed_or_is_missing(name: str) -> None:
    kept = load(name)
    assert kept["promises"] == dict.fromkeys(PROMISES, "kept")
    assert FAILS not in kept["cells"].values()
    count = len(kept["ways"]) * len(kept["loaders"]) * len(kept["interruptions"])
    assert len(kept["cells"]) == count


def test_what_was_kept_is_of_what_is_asked_today(front_end: FrontEnd, asked_name: str) -> None:
    kept = load(asked_name)
    assert (kept["ways"], kept["loaders"], kept["interruptions"]) == tuple(map(list, axes(front_end)))
    assert list(kept["cells"]) == [" / ".join(cell) for cell in product(front_end)]
