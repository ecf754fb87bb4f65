"""The tutorials keep their promise: killed and started again, the program ends with the same weights.

Those of the third one are the examples, whose own tests kill them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import DOCS, ROOT, files

TUTORIALS = DOCS / "tutorial"


def shorter(program: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert program.count(old) == 1, f"the tutorial has changed: {old!r}"
        program = program.replace(old, new)
    return program


def start(program: str, folder: Path) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    # One thread: on a busy machine the many that wait for one another take minutes.
    return subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def last_line(program: str, folder: Path) -> tuple[str, str]:
    """Run to the end; the last line, and all that was printed."""
    output, errors = (child := start(program, folder)).communicate()
    assert child.returncode == 0, errors
    return output.splitlines()[-1], output


def kill_at(program: str, folder: Path, line: str) -> None:
    with start(program, folder) as child:
        assert child.stdout is not None
        for printed in child.stdout:
            if printed.startswith(line):
                child.kill()
                break
    assert child.returncode == -9


def test_the_loop_ends_with_the_same_weights_after_a_kill(tmp_path: Path) -> None:
    program = shorter(
        files(TUTORIALS / "own-loop.md")["loop.py"],
        ("time.sleep(0.02)", "time.sleep(0.001)"),
        ("1001)", "401)"),
    )
    expected, _ = last_line(program, tmp_path / "whole")
    kill_at(program, tmp_path / "killed", "step 200")
    found, output = last_line(program, tmp_path / "killed")
    assert found == expected
    assert "starting at step 1\n" not in output


def test_the_lightning_run_ends_with_the_same_weights_after_a_kill(tmp_path: Path) -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("needs lightning, which is not installed")
    program = shorter(
        files(TUTORIALS / "index.md")["train.py"],
        ("time.sleep(0.02)", "time.sleep(0.001)"),
        ("max_epochs=4", "max_epochs=2"),
    )
    expected, _ = last_line(program, tmp_path / "whole")
    kill_at(program, tmp_path / "killed", "epoch 0 step 100")
    found, output = last_line(program, tmp_path / "killed")
    assert found == expected
    assert "step 0 loss" not in output


def test_the_lines_of_the_third_tutorial_are_those_of_the_examples_in_their_order() -> None:
    page = (TUTORIALS / "frameworks.md").read_text(encoding="utf-8")
    shown = re.findall(r"<!-- lines of (\S+) -->\n```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(shown) == 3
    for name, lines in shown:
        source = (ROOT / name).read_text(encoding="utf-8").splitlines()
        rest = iter(source)
        missing = [line for line in lines.splitlines() if line and line not in rest]
        assert missing == [], name
        marked = [line for line in source if "# Strongroom" in line]
        assert [line for line in marked if line not in lines.splitlines()] == [], name
