"""``strongroom audit``: which module carries a verb out; and that whoever reads the log is on record, too."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Final

from strongroom.auditing import NO_AUDIT, Action, Activity
from strongroom.config import load_policy
from strongroom_cli import auditing

__all__ = ["run"]

_MODULES: Final = {"keygen": "audit_sequence"}
"""Of a verb that is not alone in its module."""

_READING: Final = ("alerts", "prove", "query", "reconcile", "show", "verify")
"""Verbs that read what others did, which is an act itself."""


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    name = _MODULES.get(options.verb, f"audit_{options.verb}")
    work: Callable[[argparse.Namespace], int] = importlib.import_module(f"strongroom_cli.{name}").run
    if options.verb not in _READING:
        return work(options)
    options.policy = policy = load_policy(options.security)
    auditor = NO_AUDIT if policy is None else policy.auditor
    try:
        with Activity(
            auditor, Action.AUDIT, details={"command": f"audit {options.verb}"}
        ) as options.activity:
            status = work(options)
            auditing.end(options.activity, status)
    finally:
        auditing.leave(policy)
    return status
