"""``strongroom audit show``: one event, all of it, as it stands in the log."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Final

from strongroom_cli.audit_log import asked, open_index, sink_of, tell
from strongroom_cli.console import print_json
from strongroom_cli.words import printable
from strongroom_security.auditlog.format.segments import read_segment
from strongroom_security.auditlog.listing import read_segments
from strongroom_security.auditlog.sequencing.proving import EventId

__all__ = ["run"]

_DAMAGED: Final = 1
_NOT_FOUND: Final = 3


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    event = EventId.parse(options.event)
    sink = sink_of(options, options.policy)
    options.activity.about(root=sink.uri)
    options.activity.note(event=str(event))
    with open_index(options, sink) as index:
        where, _ = asked(options, index, sink, lambda: index.segment_of(event.writer, event.seq))
    if where is None:
        tell(f"{sink.uri} holds no {event}")
        return _NOT_FOUND
    ((_, data),) = read_segments(sink, [where.key])
    if isinstance(data, str):
        tell(f"{where.key}, which held {event}, cannot be read: {data}")
        return _DAMAGED
    reading = read_segment(where.key, data)
    place = event.seq - reading.first_seq
    value = reading.values[place] if 0 <= place < len(reading.values) else None
    for problem in reading.problems:
        tell(str(problem))
    if value is None:
        tell(f"{where.key} held {event}, and holds nothing that can be read in its place")
        return _DAMAGED
    leaf = None if where.leaf is None else where.leaf + place
    if options.json:
        print_json(
            {
                "event": value,
                "leaf": leaf,
                "line": place + 1,
                "problems": [
                    {"kind": each.kind.value, "line": each.line, "message": each.message}
                    for each in reading.problems
                ],
                "segment": where.key,
            }
        )
    else:
        text = json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True)
        sys.stdout.write("".join(f"{printable(each)}\n" for each in text.split("\n")))
        standing = "not in the tree" if leaf is None else f"leaf {leaf} of the tree, by its plans"
        tell(f"{where.key}, line {place + 1}; {standing}")
    return _DAMAGED if reading.problems else 0
