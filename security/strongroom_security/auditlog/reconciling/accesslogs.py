"""Amazon S3's server access logs: one request a line. Pure.

The format is the user guide's "Amazon S3 server access log format": fields apart by a space, the time in
brackets, three fields in quotation marks, ``-`` for what is not known, and more fields at the end with every
year. What stands in quotation marks the client wrote, who may have put some of its own there: such a line is
taken for the worst that it can mean.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

from strongroom.errors import FormatError
from strongroom_security.auditlog.reconciling.accesses import Access, AccessKind, Served

__all__ = ["access_of_line"]

_HEAD: Final = re.compile(
    r"(?P<owner>\S+) (?P<bucket>\S+) \[(?P<time>[^\]]{26})\] (?P<address>\S+) (?P<requester>\S+) "
    r"(?P<request>\S+) (?P<operation>\S+) (?P<key>\S+) "
)
_URI: Final = re.compile(r'(?:"[^"]*"|-) ')
_PREFIX: Final = re.compile(r"[?&]prefix=(?P<prefix>[^&\" ]*)")
_ANSWER: Final = re.compile(
    r"(?P<status>[0-9]{3}|-) (?P<error>\S+) (?P<sent>[0-9]+|-) (?P<size>[0-9]+|-) "
    r"(?P<total>[0-9]+|-) (?P<turn>[0-9]+|-)(?= )"
)
_CLIENT: Final = re.compile(r' (?:"[^"]*"|-) (?P<agent>".*"|-) (?P<version>\S+)(?P<rest>(?: [^"]*)?)')
_TIME: Final = re.compile(
    r"(?P<day>[0-9]{2})/(?P<month>[A-Z][a-z]{2})/(?P<year>[0-9]{4}):(?P<hour>[0-9]{2}):(?P<minute>[0-9]{2})"
    r":(?P<second>[0-9]{2}) (?P<sign>[+-])(?P<hours>[0-9]{2})(?P<minutes>[0-9]{2})"
)
# In English whatever this machine's language is.
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_QUOTES: Final = 6
"""Of the request, the referrer and the program, as S3 writes them; others may be the client's own."""

_LOOKED_AT: Final = frozenset(
    [
        "ACCELERATE",
        "ACL",
        "ANALYTICS",
        "ATTRIBUTES",
        "BUCKET",
        "BUCKETPOLICY",
        "BUCKETVERSIONS",
        "CORS",
        "ENCRYPTION",
        "INTELLIGENT_TIERING",
        "INVENTORY",
        "LEGAL_HOLD",
        "LIFECYCLE",
        "LOCATION",
        "LOGGING_STATUS",
        "METRICS",
        "NOTIFICATION",
        "OBJECT_ATTRIBUTES",
        "OBJECT_LEGAL_HOLD",
        "OBJECT_LOCK",
        "OBJECT_LOCK_CONFIGURATION",
        "OBJECT_RETENTION",
        "OBJECT_TAGGING",
        "OWNERSHIP_CONTROLS",
        "POLICY_STATUS",
        "PUBLIC_ACCESS_BLOCK",
        "REPLICATION",
        "REQUEST_PAYMENT",
        "RETENTION",
        "SERVICE",
        "TAGGING",
        "UPLOAD",
        "UPLOADS",
        "VERSIONING",
        "WEBSITE",
    ]
)
"""What of an object, or a bucket, a ``GET`` of another name than ``OBJECT`` tells."""


def access_of_line(line: str, source: str) -> Access | None:
    """What a line tells; None: it is about a bucket as a whole, and no listing.

    Args:
        line: without its line feed.
        source: its file and number.

    Raises:
        FormatError: it is no line of such a log.
    """
    head = _HEAD.match(line)
    if head is None:
        raise FormatError(f"{source} is no line of a server access log: its first eight fields are not there")
    uri = _URI.match(line, head.end())
    answer = _ANSWER.match(line, uri.end()) if uri is not None else None
    client = _CLIENT.fullmatch(line, answer.end()) if answer is not None else None
    is_odd = line.count('"') != _QUOTES
    if client is None and line.count('"') <= _QUOTES:
        raise FormatError(f"{source} is no line of a server access log: what follows its key is not as told")
    operation, key = head["operation"], head["key"]
    kind = kind_of(operation, has_key=key != "-")
    if kind is None:
        return None
    if key == "-":
        listed = _PREFIX.search(line, head.end(), uri.end() if uri is not None else len(line))
        key = listed["prefix"] if listed is not None else ""
    # What stands behind marks of the client's own may be its own as well: the request counts as done.
    told = answer if not is_odd else None
    return Access(
        source=source,
        time=_time(head["time"], source),
        operation=operation[:60],
        kind=kind,
        served=Served.DONE if told is None else _served(told["status"], told["error"]),
        identity=None if head["requester"] == "-" else head["requester"],
        address=None if head["address"] == "-" else head["address"],
        agent=None if client is None or client["agent"] == "-" else client["agent"][1:-1],
        request=None if head["request"] == "-" else head["request"],
        bucket=head["bucket"],
        key=unquote(key) if "%" in key else key,
        sent_bytes=None if told is None or told["sent"] == "-" else int(told["sent"][:18]),
    )


@lru_cache(maxsize=1_024)
def kind_of(operation: str, *, has_key: bool) -> AccessKind | None:
    """What an operation is for: ``REST.GET.OBJECT``; what is not known counts by its verb, as the worst.

    Args:
        has_key: whether it is about one object.
    """
    protocol, _, rest = operation.partition(".")
    verb, _, resource = rest.partition(".")
    if not has_key:
        return AccessKind.LOOK if verb in ("GET", "HEAD") and resource in _LISTINGS else None
    if protocol == "S3":
        # What S3 does by itself: a lifecycle rule deletes, or moves to another class of storage.
        return (
            AccessKind.DELETE
            if verb == "EXPIRE" or resource == "DELETEMARKER"
            else AccessKind.READ
            if verb == "RESTORE"
            else AccessKind.LOOK
        )
    if protocol == "BATCH" or verb == "DELETE":
        return AccessKind.WRITE if resource in ("UPLOAD", "OBJECT_TAGGING") else AccessKind.DELETE
    if verb == "HEAD":
        return AccessKind.LOOK
    if verb == "COPY":
        return AccessKind.READ if resource.endswith("_GET") else AccessKind.WRITE
    if verb == "GET":
        return AccessKind.LOOK if resource in _LOOKED_AT else AccessKind.READ
    if "SELECT" in rest or "RESTORE" in resource:
        return AccessKind.READ
    return AccessKind.LOOK if verb == "OPTIONS" else AccessKind.WRITE


_LISTINGS: Final = frozenset({"BUCKET", "BUCKETVERSIONS", "UPLOADS"})


def _served(status: str, error: str) -> Served:
    if status in ("401", "403") or error == "AccessDenied":
        return Served.REFUSED
    # Without a status it was S3's own doing. 304: nothing was sent, and whoever asked had it already.
    return Served.DONE if status == "-" or status.startswith("2") else Served.FAILED


def _time(text: str, source: str) -> int:
    try:
        return _moment(text)
    except ValueError:
        raise FormatError(f"{source} tells no time: expected as 06/Feb/2019:00:00:38 +0000") from None


@lru_cache(maxsize=4_096)
def _moment(text: str) -> int:
    """In ms since the epoch; many lines tell of one second."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(text)
    offset = timedelta(hours=int(match["hours"]), minutes=int(match["minutes"]))
    moment = datetime(
        int(match["year"]),
        _MONTHS.index(match["month"]) + 1,
        int(match["day"]),
        int(match["hour"]),
        int(match["minute"]),
        min(int(match["second"]), 59),  # a leap second has no place of its own
        tzinfo=timezone.utc,
    )
    ms = round(moment.timestamp() * 1000)
    return ms - round(offset.total_seconds() * 1000) * (1 if match["sign"] == "+" else -1)
