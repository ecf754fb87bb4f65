"""What the documentation shows runs as it stands there, and prints what it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from pages import DOCS, README, blocks, differs, program, run_page

PAGES = [page for page in sorted(DOCS.rglob("*.md")) if program(page).strip()]


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_page_runs_as_it_stands(page: Path, tmp_path: Path) -> None:
    if "strongroom_lightning" in program(page) and importlib.util.find_spec("lightning") is None:
        pytest.skip("needs lightning, which is not installed")
    run_page(page, tmp_path)


def test_pages_are_found() -> None:
    assert len(PAGES) > 5


def test_a_page_that_fails_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n\n<!-- executed by the tests -->\n```python\nprint(1)\n1 / 0\n```\n")
    with pytest.raises(AssertionError, match=r"line 6(?s:.*)ZeroDivisionError"):
        run_page(page, tmp_path)


def test_a_shell_block_that_fails_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- executed by the tests -->\n```console\nfalse | true\n```\n")
    with pytest.raises(AssertionError, match="CalledProcessError"):
        run_page(page, tmp_path)


def test_a_page_that_prints_something_else_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    printed = "<!-- printed by the tests -->\n```text\nstep 2\n```\n"
    page.write_text(f"<!-- executed by the tests -->\n```python\nprint('step 1')\n```\n{printed}")
    with pytest.raises(AssertionError, match="'step 2' was not printed"):
        run_page(page, tmp_path)


def test_printed_lines_are_compared_in_order_with_room_for_what_changes() -> None:
    printed = "step 1  took 3 s\nstep 2  took 4 s\n"
    assert differs("step 1 took ... s\nstep 2 ...\n", printed) is None
    assert differs("step 2 ...\nstep 1 ...\n", printed) == "step 1 ..."
    assert differs("step 3 ...\n", printed) == "step 3 ..."


def test_a_mark_is_in_front_of_a_block() -> None:
    for page in (README, *DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        marks = text.count("<!-- executed by the tests") + text.count("<!-- printed by the tests")
        assert len(blocks(page)) == marks, page
