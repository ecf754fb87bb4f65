"""Between boto3 and a server: what was asked, counted, and answers that get lost or come from elsewhere.

It listens on the events of one boto3 session, so requests, effects and errors are real.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from s3_servers import S3Server

from strongroom.stores import S3Options, S3Store

__all__ = ["Wire"]


class Wire:
    """What goes over one session's wires.

    Attributes:
        session: hand it to a store.
        operations: how often each was sent, under S3's names.
        requests: each that was sent: operation and headers.
        pauses: what the store slept between tries, in seconds.
        bounds: up to where each pause was drawn.
        most_at_once: of each operation, how many were under way at one moment.
    """

    def __init__(self, server: S3Server) -> None:
        self.server = server
        self.session = server.new_session()
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.pauses: list[float] = []
        self.bounds: list[float] = []
        self.most_at_once: Counter[str] = Counter()
        self._at_once: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._unsent: Counter[str] = Counter()
        self._answers: dict[str, list[tuple[int, str, bytes | None]]] = {}
        self._changes: list[tuple[str, Callable[[Any], None]]] = []
        self._lock = threading.Lock()
        self.session.events.register("before-send.s3", self._before)
        self.session.events.register("needs-retry.s3", self._after)

    @property
    def operations(self) -> Counter[str]:
        return Counter(operation for operation, _ in self.requests)

    def forget(self) -> None:
        """Count from here on."""
        self.requests.clear()
        self.pauses.clear()
        self.bounds.clear()

    def lose_answers(self, operation: str, count: int = 1) -> None:
        """The server does it, and the answer never comes."""
        self._lost[operation] += count

    def lose_requests(self, operation: str, count: int = 1) -> None:
        """The server never gets it, and the client cannot tell; after answers that are to get lost."""
        self._unsent[operation] += count

    def answer(
        self, operation: str, status: int, code: str, *, count: int = 1, body: bytes | None = None
    ) -> None:
        """Somebody else answers, and the server never gets it."""
        self._answers.setdefault(operation, []).extend([(status, code, body)] * count)

    def give_no_more(self, operation: str) -> None:
        """Such requests reach the server again."""
        self._answers.pop(operation, None)

    def change(self, operation: str, how: Callable[[Any], None]) -> None:
        """Change each such request on its way."""
        self._changes.append((operation, how))

    def confirm_nothing(self) -> None:
        """The server compares no SHA-256, and says nothing of one: as those do that do not know it."""
        self.session.events.register("before-parse.s3", _forget_sums)

    def store(self, bucket: str, prefix: str = "run", **options: Any) -> S3Store:
        """A store whose pauses take no time."""
        return S3Store(
            f"s3://{bucket}/{prefix}",
            options=S3Options(**{"endpoint_url": self.server.endpoint_url, **options}),
            session=self.session,
            sleep=self.pauses.append,
            draw=self._draw,
        )

    def _draw(self, least: float, most: float) -> float:
        self.bounds.append(most)
        return (least + most) / 2

    def _before(self, request: Any, event_name: str, **_: Any) -> Any:
        # Here, so that the module imports where boto3 is missing.
        from botocore.awsrequest import AWSResponse
        from botocore.exceptions import ConnectionClosedError

        operation = event_name.rpartition(".")[2]
        with self._lock:
            self.requests.append((operation, {name: _text(value) for name, value in request.headers.items()}))
            self._at_once[operation] += 1
            self.most_at_once[operation] = max(self.most_at_once[operation], self._at_once[operation])
            if self._unsent[operation] and not self._lost[operation]:
                self._unsent[operation] -= 1
                raise ConnectionClosedError(endpoint_url=request.url)
            instead = self._answers.get(operation)
            status, code, body = instead.pop(0) if instead else (0, "", None)
        for changed, how in self._changes:
            if changed == operation:
                how(request)
        if not status:
            return None
        answer = AWSResponse(request.url, status, {"content-type": "application/xml"}, None)
        is_bodiless = request.method == "HEAD"
        told = b"" if is_bodiless else f"<Error><Code>{code}</Code><Message>told</Message></Error>".encode()
        answer._content = told if body is None else body
        return answer

    def _after(self, event_name: str, caught_exception: Exception | None, **_: Any) -> None:
        from botocore.exceptions import ReadTimeoutError

        operation = event_name.rpartition(".")[2]
        with self._lock:
            self._at_once[operation] -= 1
            is_lost = self._lost[operation] > 0 and caught_exception is None
            self._lost[operation] -= is_lost
        if is_lost:
            raise ReadTimeoutError(endpoint_url=self.server.endpoint_url)


def _forget_sums(response_dict: dict[str, Any], **_: Any) -> None:
    for name in [name for name in response_dict["headers"] if name.lower().startswith("x-amz-checksum-")]:
        del response_dict["headers"][name]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
