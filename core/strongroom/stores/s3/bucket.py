"""A root in a bucket, as everything here asks it: requests with retries, told as store errors.

It owns the client of this process, the room for parts on their way, and how uploads are confirmed. What is
asked, and what to make of it, is for `creating`, `writing`, `reading`, `listing` and `uploads` to know.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from strongroom.errors import ConfigError, StoreError, StoreUnavailableError
from strongroom.stores.s3.calling import Patience
from strongroom.stores.s3.checksums import Checksums
from strongroom.stores.s3.failures import GaveUpError, TryFailedError, explain, too_late
from strongroom.stores.s3.location import Location
from strongroom.stores.s3.options import S3Options
from strongroom.stores.s3.room import Room

if TYPE_CHECKING:
    from strongroom.stores.s3.client import Client

__all__ = ["Answer", "Bucket", "after"]

_BARE_DENIALS: Final = ("", "403", "AccessDenied")
"""What a denial is called where nothing more is told."""
_SHORTEST_WAIT_S: Final = 1 / 16
"""For whoever is in a hurry: less than a connection takes would fail for sure."""


def _never() -> bool:
    return False


def after(tries: int) -> Callable[[], bool]:
    """Gives a request up after so many tries: for clearing up, which others do as well."""
    count = itertools.count(1)
    return lambda: next(count) >= tries


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a request answered.

    Attributes:
        fields: as boto3 tells them.
        was_lost: whether an earlier try may have been done, and its answer lost.
    """

    fields: Mapping[str, Any]
    was_lost: bool = False


class Bucket:
    """A root in a bucket; safe to use from several threads, and in a forked child by a client of its own.

    Raises:
        ConfigError: boto3 is missing, or can make no client of this.
    """

    def __init__(
        self,
        where: Location,
        options: S3Options,
        session: Any | None,
        patience: Patience,
        draw_id: Callable[[], str],
    ) -> None:
        self.where = where
        self.options = options
        self.patience = patience
        self.draw_id = draw_id
        self.checksums = Checksums(where.uri)
        self._session = session
        self.forget()
        _EVERY.add(self)
        self.client()

    def forget(self) -> None:
        """Begin anew: in a forked child, where sockets are the parent's and locks may be held by nobody."""
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._hurried: dict[float, Client] = {}
        self.room = Room(
            limit_parts=self.options.parts_in_flight,
            limit_bytes=self.options.parts_in_flight * self.options.part_bytes,
            part_bytes=self.options.part_bytes,
        )

    def client(self) -> Client:
        """This process' client."""
        with self._lock:
            if self._client is None:
                self._client = _open(self.options, self._session)
            return self._client

    def client_within(self, within_s: float) -> Client:
        """As `client`; one whose waits are so short that a request is sent, and was answered or never will
        be, about then."""
        options = self.options
        if within_s >= options.connect_timeout_s + options.read_timeout_s:
            return self.client()
        # boto3 fixes timeouts when a client is made, which takes its time: a few of them do for all.
        wait_s = float(2.0 ** math.floor(math.log2(max(within_s, _SHORTEST_WAIT_S))))
        with self._lock:
            if wait_s not in self._hurried:
                hurried = dataclasses.replace(
                    options,
                    connect_timeout_s=min(options.connect_timeout_s, wait_s / 2),
                    read_timeout_s=min(options.read_timeout_s, wait_s),
                )
                self._hurried[wait_s] = _open(hurried, self._session)
            return self._hurried[wait_s]

    def renew(self) -> None:
        """Have the next request go by a new client; what is under way ends by the old one."""
        with self._lock:
            self._client = None
            self._hurried = {}

    def ask(
        self,
        operation: str,
        key: str | None = None,
        *,
        is_given_up: Callable[[], bool] = _never,
        check: Callable[[Mapping[str, Any]], None] | None = None,
        until: float | None = None,
        **parameters: Any,
    ) -> Answer:
        """Ask, as often as it takes.

        Args:
            operation: boto3's name of it.
            key: of the object that it is about; None: it is about the bucket.
            is_given_up: asked before another try.
            check: refuses an answer by `TryFailedError`, as if it had not come.
            until: after this, by the clock of `patience`, nothing is sent.

        Raises:
            GaveUpError: it failed for good.
        """
        parameters["Bucket"] = self.where.bucket
        if key is not None:
            parameters["Key"] = self.where.key(key)

        def once() -> Mapping[str, Any]:
            fields = self._try(operation, parameters, until)
            if check is not None:
                check(fields)
            return fields

        fields, was_lost = self.repeat(once, is_given_up=is_given_up, until=until)
        return Answer(fields=fields, was_lost=was_lost)

    def _try(self, operation: str, parameters: Mapping[str, Any], until: float | None) -> Mapping[str, Any]:
        if until is None:
            return self.client().ask(operation, parameters)
        monotonic = self.patience.monotonic
        left_s = until - monotonic()
        if left_s <= 0:
            raise too_late()
        return self.client_within(left_s).ask(operation, parameters, is_late=lambda: monotonic() >= until)

    def repeat(
        self,
        once: Callable[[], Any],
        *,
        is_given_up: Callable[[], bool] = _never,
        until: float | None = None,
    ) -> tuple[Any, bool]:
        """What one try after another comes to, and whether an answer was lost on the way."""
        renewed: list[bool] = []

        def attempt() -> Any:
            try:
                answer = once()
            except TryFailedError as failure:
                if not failure.may_be_expired or renewed or self._session is not None:
                    raise
                # boto3 reads a static credential once; whoever keeps it fresh has written a new one.
                renewed.append(True)
                self.renew()
                answer = once()
            return answer

        return self.patience.call(attempt, is_given_up=is_given_up, until=until)

    def must(self, operation: str, key: str | None = None, **parameters: Any) -> Answer:
        """As `ask`.

        Raises:
            StoreError: it failed for good, and why.
        """
        try:
            return self.ask(operation, key, **parameters)
        except GaveUpError as error:
            raise self.error(error, operation, key) from error.failure

    def error(self, given_up: GaveUpError, operation: str, key: str | None) -> StoreError:
        """What a failed request comes to, for people."""
        return explain(given_up, operation, key, self.where, self.client().endpoint)

    def absence(self, given_up: GaveUpError, operation: str, key: str) -> StoreError:
        """As `error`, for a look at an object: whether it is absent is made sure of.

        Without the right to list, S3 answers 403 for what is absent; and a 404 to HEAD has no body, so it may
        be the bucket's, or some gateway's.
        """
        failure = given_up.failure
        is_denied = failure.status == 403 and failure.code in _BARE_DENIALS
        is_vague = operation == "head_object" and failure.status in (400, 404)
        if not is_denied and not is_vague:
            return self.error(given_up, operation, key)
        wanted = self.where.key(key)
        try:
            # The shortest key of all that begin so comes first.
            listed = self.ask("list_objects_v2", Prefix=wanted, MaxKeys=1).fields.get("Contents", [])
        except GaveUpError as error:
            # Its answer has a body, which tells more: an absent bucket, an expired token.
            if not error.failure.is_denied or error.failure.code not in _BARE_DENIALS:
                return self.error(error, "list_objects_v2", None)
            return self.error(given_up, operation, key) if is_denied else self._absence_by_reading(key)
        stands = any(entry.get("Key") == wanted for entry in listed)
        if not stands and failure.status != 400:
            absent = TryFailedError("it is not listed", status=404, code="NoSuchKey")
            return self.error(GaveUpError(absent, tries=given_up.tries, was_lost=False), operation, key)
        return self._hidden(key) if failure.status == 404 else self.error(given_up, operation, key)

    def _absence_by_reading(self, key: str) -> StoreError:
        parameters = {"Bucket": self.where.bucket, "Key": self.where.key(key), "Range": "bytes=0-0"}

        def once() -> None:
            _, body = self.client().get(parameters)
            body.close(is_whole=False)

        try:
            self.repeat(once)
        except GaveUpError as error:
            # An empty object has no such range.
            is_empty = error.failure.status == 416
            return self._hidden(key) if is_empty else self.error(error, "get_object", key)
        return self._hidden(key)

    def _hidden(self, key: str) -> StoreError:
        return StoreUnavailableError(
            f"{self.where.name(key)}: one request was answered that it does not exist, and the next that it "
            f"does: something before the bucket answers at {self.client().endpoint}, or it has just been "
            "written; try again"
        )


def _open(options: S3Options, session: Any | None) -> Client:
    try:
        from strongroom.stores.s3.client import Client
    except ImportError as error:
        raise ConfigError(
            f"a root in a bucket needs the package boto3, 1.36 or newer, which cannot be imported ({error}); "
            "install it with: pip install 'strongroom[s3]'"
        ) from error
    return Client(options, session)


_EVERY: weakref.WeakSet[Bucket] = weakref.WeakSet()


def _forget_all() -> None:
    for each in list(_EVERY):
        each.forget()


os.register_at_fork(after_in_child=_forget_all)
