"""The page that shows what came of the suite: ``python tests/plugins/conformance/page.py`` writes it anew."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

from asking import FRONT_ENDS
from promises import PROMISES
from recording import load
from run_plans import BATCH_SIZE, BATCHES, EPOCHS

__all__ = ["COMMAND", "PAGE", "page"]

PAGE: Final = Path(__file__).parents[3] / "docs" / "explanation" / "conformance.md"

COMMAND: Final = (
    "tox run -e {name} -- tests/plugins/conformance --front-end {name} --record -m 'matrix or not matrix'"
)
"""Asks one front end for everything, and keeps what comes of it."""

_TEXT: Final = """\
# What every front end was asked

One suite asks every front end the same, each in its own framework, and this page is written from what came of
it. What they have in common, [their reference](../reference/front-ends.md) says.

## Promises

{promises}

Each line is a test: real processes train, are killed and told to stop, and what is on the disk then is looked
at. As they were run: {versions}.

## Exact resume

Each cell of the tables that follow was run: trained to the interruption, started again in processes that
know nothing of the first ones, and compared with the run that was never interrupted and knew nothing of
Strongroom. **equal** means that every loss from there on, and every weight at the end, is the same
floating-point number, on every rank; that steps and learning rates are the same; and that no more than the
save under way was lost. Where a cell follows a documented rule instead, its number stands there, and the
rule below the table.

The runs have {epochs} epochs of {batches} batches of {batch_size} samples a rank, dropout, noise drawn while
reading, AdamW, a scheduler by step, validation every two steps, and a checkpoint at every step. Several
ranks are processes over gloo on CPUs.

{matrices}

## How to ask again

The tests of every change ask for every promise and for a part of the cells, in which every pair of a way to
train and a loader, of a loader and an interruption, and of a way and an interruption occurs. For everything,
some minutes a front end, each in an environment of its own:

```console
{commands}
```

What comes of it is kept beside the suite. This page is then written, and a test holds that it says what was
kept, that nothing is missing that is asked today, and that nothing failed:

```console
python tests/plugins/conformance/page.py
```
"""


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page.

    Args:
        results: by the front ends' packages, as `recording.load` gives them.
    """
    asked = [results[name] for name in FRONT_ENDS if "name" in results[name]]
    return _TEXT.format(
        promises=_promises(asked),
        versions="; ".join(
            f"{one['name']} with {' and '.join(' '.join(pair) for pair in one['versions'].items())}"
            for one in asked
        ),
        epochs=EPOCHS,
        batches=BATCHES,
        batch_size=BATCH_SIZE,
        matrices="\n\n".join(map(_matrix, asked)),
        commands="\n".join(COMMAND.format(name=name) for name in FRONT_ENDS),
    )


def _promises(asked: list[Mapping[str, Any]]) -> str:
    lines = _head([one["name"] for one in asked])
    for which, words in PROMISES.items():
        found = (one["promises"].get(which, "not asked") for one in asked)
        lines.append(f"| {words} | {' | '.join(found)} |")
    return "\n".join(lines)


def _matrix(result: Mapping[str, Any]) -> str:
    """The tables of one front end, a way each, and its rules."""
    rules: dict[str, int] = {}
    lines = [f"### {result['name']}"]
    for way in result["ways"]:
        lines += ["", f"**{way[0].upper()}{way[1:]}**", "", *_head(result["interruptions"])]
        for loader in result["loaders"]:
            found = []
            for interruption in result["interruptions"]:
                word = result["cells"].get(f"{way} / {loader} / {interruption}", "not run")
                if word not in ("equal", "not run") and not word.startswith("**"):
                    word = f"rule {rules.setdefault(word, len(rules) + 1)}"
                found.append(word)
            lines.append(f"| {loader} | {' | '.join(found)} |")
    if rules:
        lines += ["", *(f"{number}. {words}" for words, number in rules.items())]
    return "\n".join(lines)


def _head(columns: list[str]) -> list[str]:
    return [f"| | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]


if __name__ == "__main__":
    PAGE.write_text(page({name: load(name) for name in FRONT_ENDS}), encoding="utf-8")
