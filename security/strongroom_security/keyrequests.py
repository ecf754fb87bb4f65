"""What was asked of keepers of keys, for whoever keeps a record of it: ids of requests, and who opened.

A key service names each request, and its own log has that name: by it the two can be held against each other.
The names are collected by a context variable that follows a question into its threads (`asking`,
`recipients.calling`), so that no recipient and no protocol has to hand them on.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from strongroom.auditing import listed

if TYPE_CHECKING:
    from strongroom.auditing import Detail

__all__ = ["Requests", "collecting", "note_opened", "note_request"]

_MAX_CHARS: Final = 20_000
"""Kept of the ids of one activity, as an event has room for: more than 500, as most key services call
requests. Where ``wrap`` is direct there is one a file."""
_ID_CHARS: Final = 128


class Requests:
    """What one activity asked; filled from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: list[str] = []
        self._chars = 0
        self._count = 0
        self._opened_by: tuple[str, str] | None = None

    def add(self, request_id: str) -> None:
        with self._lock:
            self._count += 1
            kept = request_id[:_ID_CHARS]
            if self._chars + len(kept) < _MAX_CHARS:
                self._ids.append(kept)
                self._chars += len(kept) + 1

    def note_opened(self, recipient_id: str, kind: str) -> None:
        with self._lock:
            self._opened_by = recipient_id, kind

    @property
    def ids(self) -> tuple[str, ...]:
        """In the order in which they were answered; the first ones, where there are very many."""
        with self._lock:
            return tuple(self._ids)

    @property
    def details(self) -> dict[str, Detail]:
        """As a record has them."""
        with self._lock:
            found = listed("kms_request_id", self._ids)
            if self._count > len(self._ids):
                found["kms_requests"] = self._count
            if self._opened_by is not None:
                found["recipient"], found["recipient_kind"] = self._opened_by
            return found


_HERE: Final[contextvars.ContextVar[Requests | None]] = contextvars.ContextVar(
    "strongroom_key_requests", default=None
)


@contextlib.contextmanager
def collecting(requests: Requests) -> Iterator[Requests]:
    """Collect what is asked within, also on threads that carry this context on."""
    token = _HERE.set(requests)
    try:
        yield requests
    finally:
        _HERE.reset(token)


def note_request(request_id: object) -> None:
    """Tell whoever collects what a service called a request that it answered."""
    requests = _HERE.get()
    if requests is None or not isinstance(request_id, str) or not request_id:
        return
    # A comma would part it in two.
    if request_id.isascii() and request_id.isprintable() and "," not in request_id:
        requests.add(request_id)


def note_opened(recipient_id: str, kind: str) -> None:
    """Tell whoever collects by which recipient a keyring was opened."""
    requests = _HERE.get()
    if requests is not None:
        requests.note_opened(recipient_id, kind)
