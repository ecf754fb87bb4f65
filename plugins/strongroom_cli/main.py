"""The command line: arguments, exit statuses, and what an error looks like. No command's own work.

A command is imported once it was asked for, so that ``--version`` and a usage error come at
once. Nothing that is reached from here imports torch.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final

from strongroom import __version__
from strongroom.errors import (
    CheckpointNotFoundError,
    ConfigError,
    IntegrityError,
    StrongroomError,
)
from strongroom_cli.audit_arguments import add_audit
from strongroom_cli.export_arguments import add_export
from strongroom_cli.gc_arguments import add_gc
from strongroom_cli.keys_arguments import add_keys
from strongroom_cli.replicate_arguments import add_replicate
from strongroom_cli.roles_arguments import add_roles
from strongroom_cli.trust_arguments import add_floor, add_trust
from strongroom_cli.words import printable

__all__ = [
    "BROKEN_PIPE",
    "BUG",
    "DAMAGED",
    "INTERRUPTED",
    "NOT_FOUND",
    "NO_OUTPUT",
    "UNREADABLE",
    "USAGE",
    "main",
]

DAMAGED: Final = 1
USAGE: Final = 2
NOT_FOUND: Final = 3
UNREADABLE: Final = 4
"""Denied, no key, an I/O error, out of reach, another format: nothing is known of the bytes."""
BUG: Final = 70
"""EX_SOFTWARE of <sysexits.h>: never to be taken for a verdict."""
NO_OUTPUT: Final = 74
"""EX_IOERR, likewise: a full disk, say, behind a redirected output."""
INTERRUPTED: Final = 130
"""128 + SIGINT, as shells report it."""
BROKEN_PIPE: Final = 141
"""128 + SIGPIPE, likewise: whoever read the output has left."""

_DEBUG: Final = "STRONGROOM_DEBUG"

_TENSORS_SHOWN: Final = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status.

    Args:
        arguments: without the program's name; None: this process's.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # Closed by whoever started the command (``>&-``), and so unwanted; the status still tells.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # Any character that a checkpoint holds can be written then, if need be as an escape.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    _tell_warnings()
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        _tell("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except OSError as error:
        # A store's errors are StoreErrors: this one is the output's.
        _trace()
        _discard_output()
        _tell(f"the output could not be written: {error.strerror or error}")
        return NO_OUTPUT
    except StrongroomError as error:
        _trace()
        _tell(str(error))
        return _status_of(error)
    except Exception as error:  # noqa: BLE001
        # A bug must look neither like a verdict nor like a wall of text.
        _trace()
        _tell(
            f"unexpected {type(error).__name__}: {error}. This is a bug in Strongroom and says nothing about "
            f"the checkpoints; please report it to the project, with what {_DEBUG}=1 shows"
        )
        return BUG


def _tell_warnings() -> None:
    """Let what the core warns of look like everything else that is said on standard error."""
    log = logging.getLogger("strongroom")
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setLevel(logging.WARNING)
        handler.setFormatter(_Told("strongroom: %(message)s"))
        log.addHandler(handler)
        log.propagate = False


class _Told(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _run(arguments: Sequence[str] | None) -> int:
    try:
        return _carry_out(_parser().parse_args(arguments))
    finally:
        # Here, where an error can still be told.
        sys.stdout.flush()


def _carry_out(options: argparse.Namespace) -> int:
    from strongroom.roles import check_root
    from strongroom.signing import NO_GUARD
    from strongroom_cli import auditing

    run = _work_of(options.command)
    if options.command in auditing.UNRECORDED:
        return run(options)
    # By every command, before anything is read: a policy that cannot be had is never passed over.
    options.policy = policy = auditing.policy_of(options)
    options.guard = policy.guard if policy is not None else NO_GUARD
    if getattr(options, "root", None) is not None:
        check_root(options.root, policy)
    try:
        with auditing.activity_of(options, policy) as options.activity:
            status = run(options)
            auditing.end(options.activity, status)
    finally:
        auditing.leave(policy)
    return status


def _work_of(command: str) -> Callable[[argparse.Namespace], int]:
    """What carries a command out, imported now that it was asked for."""
    work = importlib.import_module(f"strongroom_cli.{command}")
    run: Callable[[argparse.Namespace], int] = work.run
    return run


def _status_of(error: StrongroomError) -> int:
    if isinstance(error, IntegrityError):
        return DAMAGED
    if isinstance(error, ConfigError):
        return USAGE
    return NOT_FOUND if isinstance(error, CheckpointNotFoundError) else UNREADABLE


def _discard_output() -> None:
    """Python flushes once more as it ends, and must find nothing to complain about."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(message: str) -> None:
    try:
        sys.stderr.write(f"strongroom: {printable(message)}\n")
        sys.stderr.flush()
    except OSError:
        return  # Nobody listens; the status still tells.


def _trace() -> None:
    if os.environ.get(_DEBUG, "") not in ("", "0"):
        traceback.print_exc()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="strongroom",
        description="Look at a run's checkpoints, verify them, and say who can open them.",
        epilog="Exit status: 0 whole, 1 damaged, 2 not used correctly, 3 not found, 4 denied or unreadable.",
    )
    parser.add_argument("--version", action="version", version=f"strongroom {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    _command(commands, "ls", "list committed checkpoints, newest first")

    show = _command(commands, "show", "show one checkpoint: manifest, provenance, tensors, state")
    show.add_argument("step", metavar="STEP", nargs="?", type=_natural, help="default: the newest")
    show.add_argument(
        "--tensors",
        metavar="N",
        type=_natural,
        default=_TENSORS_SHOWN,
        help=f"list at most N tensors (default: {_TENSORS_SHOWN}); --json lists all of them",
    )

    provenance = _command(commands, "provenance", "tell where one checkpoint comes from")
    provenance.add_argument("step", metavar="STEP", nargs="?", type=_natural, help="default: the newest")
    provenance.add_argument(
        "--format",
        choices=("json", "slsa", "openlineage"),
        help="for other tools: JSON, an in-toto statement for SLSA, or an OpenLineage event",
    )
    provenance.add_argument("--builder", metavar="URI", help="of SLSA: who vouches for how it was made")
    provenance.add_argument(
        "--sign", action="store_true", help="of SLSA: a bundle that the policy's signer has signed"
    )

    plan = _command(commands, "plan", "tell what each of N ranks would read in a restore; no shard is opened")
    plan.add_argument("step", metavar="STEP", nargs="?", type=_natural, help="default: the newest")
    plan.add_argument("--ranks", metavar="N", type=_natural, required=True, help="ranks of the job")

    verify = _command(commands, "verify", "read every byte, and name what is wrong")
    chosen = verify.add_mutually_exclusive_group()
    chosen.add_argument("step", metavar="STEP", nargs="?", type=_natural, help="default: the newest")
    chosen.add_argument("--all", action="store_true", help="every committed checkpoint")

    add_export(commands, _command, _natural)
    verify.add_argument(
        "--chain",
        action="store_true",
        help="walk the lineage too: each checkpoint against what went on from it",
    )

    sign = _command(commands, "sign", "verify one checkpoint, and add a signature to it")
    sign.add_argument("step", metavar="STEP", nargs="?", type=_natural, help="default: the newest")
    sign.add_argument("--key", metavar="KEY", help="who signs, as file:PATH (default: the policy's)")
    sign.add_argument("--certificate", metavar="FILE", help="its certificates, PEM, its own first")
    sign.add_argument("--passphrase", metavar="SOURCE", help="of an encrypted key: env:NAME or file:PATH")
    sign.add_argument(
        "--unsigned",
        action="store_true",
        help="be the first to vouch for it: nobody whom the policy trusts has signed it",
    )

    add_gc(commands, _command, _natural)
    add_replicate(commands, _command, _natural)
    add_keys(commands, _command, _natural)
    add_trust(commands)
    add_floor(commands)
    add_roles(commands)
    add_audit(commands)
    return parser


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}."
    )
    command.add_argument("root", metavar="ROOT", help="the run: a folder, or a file:// or s3:// URI")
    command.add_argument("--json", action="store_true", help="one JSON object, for programs")
    command.add_argument(
        "--security",
        metavar="FILE",
        help="the policy file (default: the one that the variable STRONGROOM_CONFIG names)",
    )
    return command


def _natural(text: str) -> int:
    # ASCII digits only: int() takes signs, spaces, underscores and other scripts' digits too.
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a number from 0 to 999999999999")
    return int(text)
