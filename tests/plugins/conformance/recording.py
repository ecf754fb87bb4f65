"""What came of the suite: a file a front end, ``results/NAME.json``, from which the page is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from asking import front_end_of
from cells import axes, product

__all__ = ["FAILS", "PROPERTY", "RESULTS", "Record", "keep", "load"]

RESULTS: Final = Path(__file__).parent / "results"

PROPERTY: Final = "conformance"
"""Under which a test's report carries it."""

FAILS: Final = "**fails**"
"""What stands for a test that does not pass."""

Record = Callable[[str, str, str], None]

_DISTRIBUTIONS: Final = {"composer": "mosaicml"}
"""Where a package's distribution is called otherwise."""


def load(name: str) -> dict[str, Any]:
    """What is known of a front end."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return {"promises": {}, "cells": {}}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def keep(found: Iterable[tuple[str, str, str, str]]) -> None:
    """Add what tests came to: (front end, kind, name, word), of which the last word counts."""
    news: dict[str, dict[str, dict[str, str]]] = {}
    for name, kind, which, word in found:
        news.setdefault(name, {"promises": {}, "cells": {}})[kind][which] = word
    for name, new in news.items():
        front_end, old = front_end_of(name), load(name)
        cells = {**old["cells"], **new["cells"]}
        ordered = [" / ".join(cell) for cell in product(front_end)]
        ways, loaders, interruptions = axes(front_end)
        distribution = _DISTRIBUTIONS.get(name, name)
        told = {
            "name": front_end.name,
            "versions": {one: version(one).partition("+")[0] for one in (distribution, "torch")},
            "ways": list(ways),
            "loaders": list(loaders),
            "interruptions": list(interruptions),
            "promises": {**old["promises"], **new["promises"]},
            # Cells of axes that are no more have gone.
            "cells": {which: cells[which] for which in ordered if which in cells},
        }
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps(told, indent=1, ensure_ascii=False)
        (RESULTS / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")
