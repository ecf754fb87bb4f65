"""``strongroom audit query``: who read a checkpoint, when and from where; and what happened to a run."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from strongroom import layout
from strongroom.config import SYSTEM_CLOCK, Policy
from strongroom.errors import CheckpointNotFoundError, ConfigError, FormatError, ObjectNotFoundError
from strongroom.manifest import RUN_BOUNDS, Run, check_run_id
from strongroom.roles import Duty, open_root
from strongroom_cli import words
from strongroom_cli.audit_arguments import READS as READING
from strongroom_cli.audit_arguments import WRITES as WRITING
from strongroom_cli.audit_log import asked, explained, nothing_there, open_index, sink_of, tell, vouchers_of
from strongroom_cli.console import line, new_console, new_table, print_json
from strongroom_security.auditlog.asking.index import Index, IndexCounts
from strongroom_security.auditlog.asking.queries import (
    READS,
    WRITES,
    Entry,
    Operation,
    Question,
    ask_events,
    ask_operations,
    is_on_record,
)
from strongroom_security.auditlog.verifying.trusting import Vouchers

__all__ = ["run"]

_COLUMNS: Final = (
    "time",
    "ended",
    "action",
    "phase",
    "outcome",
    "user",
    "identity",
    "role",
    "host",
    "ip",
    "pid",
    "rank",
    "run",
    "launch",
    "step",
    "attempt",
    "path",
    "root",
    "reason",
    "operation",
    "sequenced",
    "doubtful",
    "certified",
    "events",
)
"""Of a CSV file; the same for events and for operations."""

_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""How a cell begins that a spreadsheet would carry out."""

_STYLES: Final = {
    "denied": "bold red",
    "failure": "red",
    "observed": "yellow",
    "success": "green",
    "unknown": "yellow",
}
_REASON_CHARS: Final = 80
_NOT_FOUND: Final = 3

_Row = Entry | Operation


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    sink = sink_of(options, options.policy)
    question = _question(options)
    options.activity.about(root=sink.uri, run=question.run)
    options.activity.note(**_told(options))
    vouchers = vouchers_of(options, options.policy)
    absent = nothing_there(options, sink)
    if absent is not None:
        tell(absent)
        return _NOT_FOUND
    if options.limit == 0 and (options.json or options.csv is not None):
        with open_index(options, sink) as index:
            (counts, missing), refreshed = asked(
                options, index, sink, lambda: (index.counts(), _missing(index, question, sink.uri))
            )
            told = _told_of(
                options, question, sink.uri, counts, has_more=False, refreshed=refreshed is not None
            )
            # Nothing is put off until the last row is there: there may be more than fit into memory.
            explained(lambda: _stream(options, question, told, _ask(index, options, question, vouchers)))
        return _end(options, missing)
    limit = None if options.limit == 0 else options.limit + 1
    with open_index(options, sink) as index:
        (rows, counts, missing), refreshed = asked(
            options,
            index,
            sink,
            lambda: (
                list(islice(_ask(index, options, question, vouchers), limit)),
                index.counts(),
                _missing(index, question, sink.uri),
            ),
        )
    has_more = options.limit > 0 and len(rows) > options.limit
    rows = rows[: options.limit] if has_more else rows
    if options.csv is not None:
        _write_csv(Path(options.csv), rows)
    if options.json:
        told = _told_of(
            options, question, sink.uri, counts, has_more=has_more, refreshed=refreshed is not None
        )
        print_json({**told, "rows": [_json_of(row) for row in rows] if options.csv is None else len(rows)})
    elif rows or missing is None:
        _print(new_console(), options, question, rows, counts, has_more=has_more)
    return _end(options, missing)


def _missing(index: Index, question: Question, uri: str) -> str | None:
    """In words, why no answer says anything: there is no such run, or no log; None: there is."""
    if question.run is not None and "audit" not in question.actions and not is_on_record(index, question.run):
        return f"nothing of run {question.run} is on record in {uri}"
    return None if index.counts().segments else f"{uri} holds no audit log"


def _end(options: argparse.Namespace, missing: str | None) -> int:
    if missing is None:
        return 0
    tell(missing)
    options.activity.succeed()  # the question was answered
    return _NOT_FOUND


def _ask(index: Index, options: argparse.Namespace, question: Question, vouchers: Vouchers) -> Iterator[_Row]:
    if options.all:
        yield from ask_events(index, question, vouchers=vouchers)
    else:
        yield from ask_operations(index, question, vouchers=vouchers)


def _told_of(
    options: argparse.Namespace,
    question: Question,
    uri: str,
    counts: IndexCounts,
    *,
    has_more: bool,
    refreshed: bool,
) -> dict[str, Any]:
    """What is told beside the rows."""
    return {
        "all": options.all,
        "has_more": has_more,
        "index": counts.to_json(),
        "refreshed": refreshed,
        "run": question.run,
        "since": question.since_ms,
        "sink": uri,
        "step": question.step,
        "until": question.until_ms,
    }


def _stream(
    options: argparse.Namespace, question: Question, told: dict[str, Any], rows: Iterator[_Row]
) -> None:
    if options.csv is not None:
        written = _write_csv(Path(options.csv), rows)
        if options.json:
            print_json({**told, "rows": written})
        else:
            new_console().print(line("wrote ", (options.csv, "bold"), f": {words.count(written, 'row')}"))
        return
    # The same object as `print_json` writes, member by member.
    between = "{"
    for name in sorted([*told, "rows"]):
        sys.stdout.write(f"{between}{json.dumps(name)}: ")
        if name == "rows":
            sys.stdout.write("[")
            for place, row in enumerate(rows):
                sys.stdout.write((", " if place else "") + _text_of(_json_of(row)))
            sys.stdout.write("]")
        else:
            sys.stdout.write(_text_of(told[name]))
        between = ", "
    sys.stdout.write("}\n")


def _text_of(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=True, sort_keys=True)


# ---------------------------------------------------------------------------------------------- the question


def _question(options: argparse.Namespace) -> Question:
    now_ms = SYSTEM_CLOCK.now_ms()
    run_id, step = options.run, None
    if options.checkpoint is not None:
        run_id, step = options.checkpoint[0], _step(options.checkpoint[1])
    actions, or_intended = frozenset[str](), False
    wanted: frozenset[str] | None = options.action
    if wanted is None and step is not None and not options.all:
        wanted = frozenset([READING])
    if wanted is not None:
        or_intended = READING in wanted
        actions = wanted - {READING, WRITING}
        actions |= READS if READING in wanted else frozenset()
        actions |= WRITES if WRITING in wanted else frozenset()
    return Question(
        run=None if run_id is None else _run_of(run_id, options.policy),
        step=step,
        launch=options.launch,
        since_ms=_ms(options.since, now_ms),
        until_ms=_ms(options.until, now_ms),
        actor=options.actor,
        host=options.host,
        role=options.role,
        actions=actions,
        or_intended=or_intended,
        outcomes=options.outcome or frozenset(),
    )


def _step(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise ConfigError(f"--checkpoint takes a root and a step, and {text!r:.40} is no step")
    return int(text)


def _ms(moment: tuple[str, int] | None, now_ms: int) -> int | None:
    if moment is None:
        return None
    kind, ms = moment
    return now_ms - ms if kind == "now" else ms


def _run_of(text: str, policy: Policy | None) -> str:
    """The id of a run that is named by its root, or by its id.

    Raises:
        CheckpointNotFoundError: no run's root is there.
        FormatError: what stands there is none.
    """
    if "/" not in text and not Path(text).is_dir():
        try:
            return check_run_id(text)
        except FormatError as error:
            raise ConfigError(f"{text!r:.100} is neither a run's id nor its root: {error}") from None
    store = open_root(text, policy, Duty.RESTORE)
    try:
        data = store.read(layout.RUN, limit_bytes=RUN_BOUNDS.length_bytes)
    except ObjectNotFoundError:
        raise CheckpointNotFoundError(
            f"{store.uri} is no run's root: it has no {layout.RUN}; where the run is gone, name it by its id"
        ) from None
    return Run.decode(data, layout.RUN).run


def _told(options: argparse.Namespace) -> dict[str, str]:
    """What was asked, for the record of who asks."""
    named = ("checkpoint", "run", "launch", "actor", "host", "role", "action", "outcome", "since", "until")
    found = {}
    for name in named:
        value = getattr(options, name)
        if value is not None:
            several = sorted(value) if isinstance(value, frozenset) else value
            found[f"asked_{name}"] = (
                " ".join(map(str, several)) if isinstance(several, list | tuple) else str(several)
            )
    return found


# ------------------------------------------------------------------------------------------------ the answer


def _json_of(row: _Row) -> dict[str, Any]:
    return row.to_json()


def _print(
    console: Console,
    options: argparse.Namespace,
    question: Question,
    rows: Sequence[_Row],
    counts: IndexCounts,
    *,
    has_more: bool,
) -> None:
    if options.csv is not None:
        console.print(line("wrote ", (options.csv, "bold"), f": {words.count(len(rows), 'row')}"))
    elif rows:
        _print_table(console, question, rows)
        console.print()
    else:
        console.print(line("nothing of that is on record"))
    if has_more:
        console.print(line((f"there are more than these {len(rows):,}; see --limit", "yellow")))
    console.print(
        line(
            (
                f"of {words.count(counts.events, 'event')} in the log, {counts.sequenced:,} are in its tree",
                "dim",
            ),
            (f", and {counts.events - counts.sequenced:,} are unproven", "yellow")
            if counts.sequenced < counts.events
            else "",
            ("; 'strongroom audit verify' tells whether it is as it was written", "dim"),
        ),
        soft_wrap=True,
    )
    doubtful = [
        f"{words.count(number, 'segment')} {what}"
        for number, what in (
            (counts.damaged, "damaged"),
            (counts.doubtful, "that do not go on from the others of their writer"),
            (counts.changed, "changed since it was first read"),
            (counts.removed, "removed"),
        )
        if number
    ]
    if doubtful:
        console.print(line((f"the log was touched: {'; '.join(doubtful)}", "bold red")), soft_wrap=True)


def _print_table(console: Console, question: Question, rows: Sequence[_Row]) -> None:
    columns: dict[str, Callable[[dict[str, Any]], Any]] = {
        "TIME (UTC)": lambda row: _utc(row["time"]),
        "ACTION": lambda row: line(row["action"]),
        "OUTCOME": lambda row: line(
            (_outcome(row), _STYLES.get(_outcome(row), _STYLES.get(row["outcome"], "")))
        ),
        "WHO": lambda row: line(row["identity"] or row["user"]),
        "ROLE": lambda row: line(row["role"] or words.NOTHING),
        "FROM": lambda row: line(row["host"] + (f" ({row['ip']})" if row["ip"] else "")),
        "RUN": lambda row: line(row["run"] or words.NOTHING),
        "STEP": lambda row: words.NOTHING if row["step"] is None else str(row["step"]),
        "RANK": lambda row: words.NOTHING if row["rank"] is None else str(row["rank"]),
        "": lambda row: line(*_remarks(row)),
    }
    if question.run is not None:
        del columns["RUN"]
    if question.step is not None:
        del columns["STEP"]
    flat = [_flat(row) for row in rows]
    for name, member in (("ROLE", "role"), ("RANK", "rank")):
        if all(row[member] is None for row in flat):
            del columns[name]
    table = new_table(*columns, right=("STEP", "RANK"))
    for row in flat:
        table.add_row(*(cell(row) for cell in columns.values()))
    console.print(table)


def _outcome(row: dict[str, Any]) -> str:
    if row["phase"] == "observed" and row["outcome"] == "success":
        return "observed"  # somebody else found that it had come off
    if row["outcome"] != "unknown":
        return str(row["outcome"])
    return str(row["phase"]) if row["phase"] else "no end on record"


def _remarks(row: dict[str, Any]) -> list[str | tuple[str, str]]:
    found: list[str | tuple[str, str]] = []
    if row["doubtful"]:
        found.append(("in a segment that was touched ", "bold red"))
    elif row["certified"] is False:
        found.append(("by a writer that nobody vouches for ", "bold red"))
    elif not row["sequenced"]:
        found.append(("unproven ", "yellow"))
    if row["path"]:
        found.append(f"{row['path']} ")
    if row["reason"]:
        found.append(words.shortened(row["reason"], _REASON_CHARS))
    return found


def _flat(row: _Row) -> dict[str, Any]:
    """A row by the names of the columns."""
    found = row.to_json()
    if isinstance(row, Entry):
        found.update(ended=None, sequenced=row.leaf is not None, events=[found["id"]])
    else:
        found.update(time=found["begun"])
    return found


def _write_csv(path: Path, rows: Iterable[_Row]) -> int:
    """Write a new file; how many rows. What cannot be written whole is not left there."""
    written = 0
    try:
        with path.open("x", encoding="utf-8", newline="") as file, _removed_on_failure(path):
            table = csv.writer(file)
            table.writerow(_COLUMNS)
            for row in rows:
                written += 1
                found = _flat(row)
                for moment in ("time", "ended"):
                    found[moment] = "" if found[moment] is None else _iso(found[moment])
                found["events"] = " ".join(found["events"])
                table.writerow([_cell(found[column]) for column in _COLUMNS])
    except FileExistsError:
        raise ConfigError(f"{path} exists; name a new file by --csv") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    return written


@contextlib.contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _cell(value: Any) -> str:
    """A value as text, in which what no terminal should be told is spelled out.

    What a spreadsheet would take for a formula gets a ' before it, as text has there.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    is_formula = isinstance(value, str) and text.startswith(_FORMULA)
    return words.printable(f"'{text}" if is_formula else text)


def _utc(ms: int) -> str:
    return _iso(ms).replace("T", " ").partition(".")[0]


def _iso(ms: int) -> str:
    try:
        moment = datetime.fromtimestamp(ms // 1000, tz=timezone.utc)
    except (OverflowError, OSError, ValueError):
        return f"{ms} ms"  # a writer's clock may say anything
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ms % 1000:03d}Z"
