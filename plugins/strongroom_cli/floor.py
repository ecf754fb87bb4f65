"""``strongroom floor``: tells what the policy's floor remembers, and has it forget a run."""

from __future__ import annotations

import argparse
from typing import Any

from strongroom.errors import CheckpointNotFoundError, ConfigError, FormatError
from strongroom.manifest import check_run_id
from strongroom_cli.console import line, new_console, new_table, print_json
from strongroom_security.floors import FileFloor, FolderFloor
from strongroom_security.floors.rules import Remembered

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    floor = _floor(options)
    options.activity.note(floor=floor.uri)
    if options.verb == "show":
        return _show(options, floor)
    return _forget(options, floor)


def _floor(options: argparse.Namespace) -> FileFloor | FolderFloor:
    policy = options.policy
    if policy is None:
        raise ConfigError("no policy is given; name its file by --security, or by STRONGROOM_CONFIG")
    floor = policy.guard.floor
    if not isinstance(floor, FileFloor | FolderFloor):
        raise ConfigError(
            'the policy has no floor; name one in its [verify], as in floor = "file:/var/lib/strongroom.json"'
        )
    return floor


def _show(options: argparse.Namespace, floor: FileFloor | FolderFloor) -> int:
    remembered = floor.remembered()
    if options.json:
        print_json({"floor": floor.uri, **_to_json(remembered)})
        return 0
    console = new_console()
    console.print(line((floor.uri, "bold")), soft_wrap=True)
    if not (remembered.roots or remembered.runs or remembered.trust):
        console.print(line(("remembers nothing yet", "dim")))
        return 0
    _print(remembered)
    return 0


def _forget(options: argparse.Namespace, floor: FileFloor | FolderFloor) -> int:
    try:
        run_id = check_run_id(options.run)
    except FormatError as error:
        raise ConfigError(str(error)) from None
    options.activity.about(run=run_id)
    forgotten = floor.forget(run_id)
    if not (forgotten.roots or forgotten.runs):
        raise CheckpointNotFoundError(
            f"{floor.uri} remembers no run {run_id}; strongroom floor show lists those that it does"
        )
    if options.json:
        said = _to_json(forgotten)
        print_json({"floor": floor.uri, "forgotten": {"roots": said["roots"], "runs": said["runs"]}})
        return 0
    new_console().print(line((f"{floor.uri} forgot", "bold")), soft_wrap=True)
    _print(forgotten)
    return 0


def _print(remembered: Remembered) -> None:
    console = new_console()
    if remembered.runs:
        table = new_table("RUN", "LAUNCH", "STEP", "MANIFEST", right=("LAUNCH", "STEP"))
        for run_id, refs in sorted(remembered.runs.items()):
            for ref in refs:
                table.add_row(line((run_id, "bold")), str(ref.launch), str(ref.step), line(str(ref.manifest)))
        console.print(table)
    if remembered.roots:
        table = new_table("ROOT", "RUN")
        for root, run_id in sorted(remembered.roots.items()):
            table.add_row(line((root, "bold")), line(run_id))
        console.print(table)
    if remembered.trust:
        table = new_table("LIST OF TRUSTED KEYS, BY ITS ROOT KEYS", "VERSION", "DIGEST", right=("VERSION",))
        for roots, (version, digest) in sorted(remembered.trust.items()):
            table.add_row(line((roots, "bold")), str(version), line(str(digest)))
        console.print(table)


def _to_json(remembered: Remembered) -> dict[str, Any]:
    return {
        "roots": [{"root": root, "run": run_id} for root, run_id in sorted(remembered.roots.items())],
        "runs": [
            {**ref.to_json(), "run": run_id}
            for run_id, refs in sorted(remembered.runs.items())
            for ref in refs
        ],
        "trust": [
            {"digest": str(digest), "roots": roots, "version": version}
            for roots, (version, digest) in sorted(remembered.trust.items())
        ],
    }
