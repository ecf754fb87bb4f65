"""What the README and the guides show of a front end, as programs: run with what they take for granted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

__all__ = ["HOW_TO", "README", "run_shown"]

_ROOT = Path(__file__).parents[2]
README = _ROOT / "README.md"
HOW_TO = _ROOT / "docs" / "how-to"


def run_shown(page: Path, *words: str, given: dict[str, Any], trains: str = "...") -> dict[str, Any]:
    """Run the one Python block of a page that has these words; the names that it leaves.

    Args:
        given: names that the block uses, and does not make.
        trains: what a program has where the block has three dots.
    """
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (source,) = (block for block in blocks if all(word in block for word in words))
    source = re.sub(r"^( +)\.\.\.$", rf"\1{trains}", source, flags=re.MULTILINE)
    names = dict(given)
    exec(compile(source, str(page), "exec"), names)  # noqa: S102 - our own page
    return names
