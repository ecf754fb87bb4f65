"""``strongroom audit alerts``: its arguments; the work is `alerted`'s, which is imported when it is asked."""

from __future__ import annotations

import argparse
from typing import Any

from strongroom_cli.audit_sequence import add_sink

__all__ = ["add_alerts", "run"]


def add_alerts(verbs: Any) -> None:
    """Add ``alerts``."""
    # Here: that module adds this verb.
    from strongroom_cli.audit_arguments import add_index, moment

    alerts = verbs.add_parser(
        "alerts",
        help="go through the rules for what somebody should look at",
        description="Go through simple rules over what is on record. Exit status: 0 nobody needs to look, 1 "
        "somebody should, 3 there is no log, or nothing of that run in it, 4 the log could not be read.",
    )
    which = alerts.add_mutually_exclusive_group()
    which.add_argument("--run", metavar="RUN", help="one run, by its id (default: all)")
    which.add_argument("--all", action="store_true", help="all runs, and what is about none")
    alerts.add_argument(
        "--since",
        metavar="WHEN",
        type=moment,
        default=("now", 24 * 3_600_000),
        help="what is judged, and besides it whatever came only since alerts were asked for the last time: "
        "24h, 30m, 7d; or a time by ISO 8601 (default: 24h)",
    )
    alerts.add_argument("--rules", metavar="FILE", help="what the rules are set to, TOML")
    alerts.add_argument(
        "--now", metavar="TIME", type=moment, help="judge as if it were then (default: it is now)"
    )
    alerts.add_argument(
        "--record",
        action="store_true",
        help="put what was found on record as well, once, and so to whoever else hears of events",
    )
    add_sink(alerts)
    add_index(alerts)
    alerts.add_argument("--json", action="store_true", help="one JSON object, for programs")


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    from strongroom_cli import alerted

    return alerted.run(options)
