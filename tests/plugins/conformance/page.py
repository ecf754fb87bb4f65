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
from runs import BATCH_SIZE, BATCHES, EPOCHS

__all__ = ["PAGE", "page"]

PAGE: Final = Path(__file__).parents[3] / "docs" / "explanation" / "conformance.md"

_COMMAND: Final = (
    "tox run -e {name} -- tests/plugins/conformance --front-end {name} -m 'matrix or not matrix' --record"
)


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page.

    Args:
        results: by the front ends' packages, as `recording.load` gives them.
    """
    lines = [
        "# What every front end was asked",
        "",
        "One suite asks every front end the same: in its own framework's terms, and in nobody's words but those "
        "of this page. What it asks is on it, and what came of it: this page is written by the tests' results.",
        "",
        "## Promises",
        "",
        *_promises(results),
        "",
        "Each of these is a test, which trains with real processes, kills and signals them, and looks at what is "
        "on the disk then.",
        "",
        "## Exact resume",
        "",
        "Each cell of the tables below was run: trained to the interruption, started again in processes that "
        "know nothing of the first ones, and compared with the run that was never interrupted and knew nothing "
        "of Strongroom. **equal** means that every loss from there on and every weight at the end are the same "
        "floating-point numbers, on every rank, that steps and learning rates are, and that no more than the "
        "save under way was lost. A number in place of that word is the rule, below the table, that the cell "
        "follows.",
        "",
        f"The runs have {EPOCHS} epochs of {BATCHES} batches of {BATCH_SIZE} samples a rank, dropout, noise "
        "drawn while reading, AdamW, a scheduler by step, validation every two batches, and a checkpoint at "
        "every step. Several ranks are processes over gloo on CPUs.",
    ]
    for name in FRONT_ENDS:
        if results[name]["cells"]:
            lines += ["", *_matrix(results[name])]
    lines += [
        "",
        "## How to run it",
        "",
        "The tests of every change ask for every promise, and for a part of the cells: every pair of a way to "
        "train and a loader, of a loader and an interruption, and of a way and an interruption. All cells take "
        "some minutes a front end, each in an environment of its own:",
        "",
        "```console",
        *(f"$ {_COMMAND.format(name=name)}" for name in FRONT_ENDS),
        "$ python tests/plugins/conformance/page.py",
        "```",
        "",
        "The last line writes this page from what the others have kept, which needs an environment with the "
        "package and torch. A test holds that the page says what was kept, that nothing of today's tables is "
        "missing in it, and that nothing failed.",
        "",
    ]
    return "\n".join(lines)


def _promises(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    asked = [results[name] for name in FRONT_ENDS if "name" in results[name]]
    lines = [
        f"| | {' | '.join(one['name'] for one in asked)} |",
        f"| --- |{' --- |' * len(asked)}",
    ]
    for which, words in PROMISES.items():
        found = (one["promises"].get(which, "not asked") for one in asked)
        lines.append(f"| {words} | {' | '.join(found)} |")
    ran_with = (
        f"{one['name']} with "
        + " and ".join(f"{package} {version}" for package, version in one["versions"].items())
        for one in asked
    )
    return [*lines, "", f"As they were run: {'; '.join(ran_with)}."]


def _matrix(result: Mapping[str, Any]) -> list[str]:
    """The tables of one front end, a way each, and its rules."""
    rules: dict[str, int] = {}
    lines = [f"### {result['name']}"]
    for way in result["ways"]:
        lines += [
            "",
            f"**{way[0].upper()}{way[1:]}**",
            "",
            f"| | {' | '.join(result['interruptions'])} |",
            f"| --- |{' --- |' * len(result['interruptions'])}",
        ]
        for loader in result["loaders"]:
            words = []
            for interruption in result["interruptions"]:
                word = result["cells"].get(f"{way} / {loader} / {interruption}", "not run")
                if word not in ("equal", "not run") and not word.startswith("**"):
                    word = f"rule {rules.setdefault(word, len(rules) + 1)}"
                words.append(word)
            lines.append(f"| {loader} | {' | '.join(words)} |")
    if rules:
        lines += ["", *(f"{number}. {words}" for words, number in rules.items())]
    return lines


if __name__ == "__main__":
    PAGE.write_text(page({name: load(name) for name in FRONT_ENDS}), encoding="utf-8")
