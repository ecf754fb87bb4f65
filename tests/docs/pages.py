"""What the documentation shows, as programs: the blocks of a page that are marked, in their order.

A page is one session in one folder. In front of a block stands one of these comments:

- ``<!-- executed by the tests -->``: Python is run, in one process for the whole page, and so is a
  shell's (``console``); a block with a ``title`` is a file, which is written instead.
- ``<!-- printed by the tests -->``: these lines were printed before, in this order; ``...`` in a line
  stands for any text.

A comment ``<!-- executed by the tests, unseen`` holds Python itself: what a page takes for granted.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DOCS", "README", "Block", "blocks", "differs", "files", "program", "run", "run_page"]

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"

_BLOCK = re.compile(
    r"<!-- (?P<what>executed|printed) by the tests -->\n"
    r"```(?P<language>\w+)(?: title=\"(?P<title>[\w.-]+)\")?\n(?P<text>.*?)^```$"
    r"|<!-- executed by the tests, unseen\n(?P<unseen>.*?)^-->$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One marked block.

    Attributes:
        kind: ``python``, ``console``, ``file`` or ``printed``.
        text: its lines.
        line: the number of its first line in the page.
        title: the file's name.
    """

    kind: str
    text: str
    line: int
    title: str = ""


def blocks(page: Path) -> list[Block]:
    """The marked blocks of a page."""
    source = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(source):
        part = "unseen" if match["unseen"] is not None else "text"
        kind = "python" if part == "unseen" else match["language"]
        if match["what"] == "printed":
            kind = "printed"
        elif match["title"]:
            kind = "file"
        if kind not in {"python", "console", "file", "printed"}:
            raise ValueError(f"{page.name}: a block in {kind} cannot be executed")
        line = source.count("\n", 0, match.start(part)) + 1
        found.append(Block(kind=kind, text=match[part], line=line, title=match["title"] or ""))
    return found


def files(page: Path) -> dict[str, str]:
    """The files that a page shows, by name."""
    return {block.title: block.text for block in blocks(page) if block.kind == "file"}


def program(page: Path) -> str:
    """The page as one program, each block at the line at which it stands in the page."""
    source = ""
    for block in blocks(page):
        text = block.text
        if block.kind == "console":
            text = f"__import__('subprocess').run(['bash', '-euo', 'pipefail', '-c', {text!r}], check=True)\n"
        elif block.kind == "file":
            text = f"__import__('pathlib').Path({block.title!r}).write_text({text!r}, encoding='utf-8')\n"
        elif block.kind == "printed":
            continue
        source += "\n" * (block.line - 1 - source.count("\n")) + text
    return source


def run(source: str, folder: Path) -> str:
    """Run a program in a folder; what it printed."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",  # on a busy machine threads that wait for one another take minutes
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "120",
    }
    child = subprocess.run(
        [sys.executable, "-c", source], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert child.returncode == 0, f"{child.stdout}\n{child.stderr}"
    return child.stdout


def run_page(page: Path, folder: Path) -> None:
    """Run a page, and hold what it printed against what it says that it prints."""
    output = run(program(page), folder)
    for block in blocks(page):
        if block.kind == "printed":
            missing = differs(block.text, output)
            assert missing is None, f"{page.name}:{block.line}: {missing!r} was not printed in:\n{output}"


def differs(shown: str, printed: str) -> str | None:
    """The first line that is shown and was not printed after those before it; None where all were."""
    rest = iter(printed.splitlines())
    for line in filter(str.strip, shown.splitlines()):
        pattern = ".*".join(re.escape(" ".join(part.split())) for part in line.split("..."))
        pattern = pattern.replace(r"\ ", r"\s*")
        if not any(re.fullmatch(pattern, " ".join(found.split())) for found in rest):
            return line
    return None
