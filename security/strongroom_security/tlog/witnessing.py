"""Asking witnesses to cosign a tree head: the client side of C2SP tlog-witness, over HTTP.

A witness is shown that the tree only grew since it last cosigned, and answers with its signature. What it
answers is believed only as far as it verifies.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from strongroom.errors import ConfigError, FormatError, IntegrityError, StoreError, StoreUnavailableError
from strongroom_security.tlog.checkpoints import parse_decimal
from strongroom_security.tlog.notekeys import Verified, VerifierKey
from strongroom_security.tlog.notes import Note, NoteSignature, encode_base64

__all__ = ["Witness", "request_body"]

_MAX_ANSWER_BYTES: Final = 64 << 10
_CONFLICT: Final = 409
_TRIES: Final = 3
"""The first asks by what is remembered, the second by what the witness says; and once more, in a race."""


def request_body(old_size: int, proof: list[bytes], note: Note) -> bytes:
    """What is sent to a witness."""
    lines = [f"old {old_size}\n", *(encode_base64(each) + "\n" for each in proof), "\n"]
    return "".join(lines).encode("ascii") + note.to_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """A witness at its submission prefix.

    Attributes:
        url: ``http://`` or ``https://``, to which ``/add-checkpoint`` is added.
        timeout_s: for each wait on the network.
        within_s: for a whole answer, however slowly it drips.

    Raises:
        ConfigError: it is no such URL.
    """

    url: str
    timeout_s: float = 10.0
    within_s: float = 30.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            _ = parts.port
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"a witness is at an http:// or https:// URL, found {self.url[:100]!r}")
        if parts.username is not None or parts.password is not None:
            raise ConfigError("a witness's URL holds no user and no password: witnesses ask for none")

    def cosign(
        self,
        note: Note,
        size: int,
        prove: Callable[[int], list[bytes]],
        keys: tuple[VerifierKey, ...],
        *,
        old_size: int = 0,
    ) -> list[Verified]:
        """Ask for cosignatures on a tree head.

        Args:
            note: the signed tree head.
            size: of its tree.
            prove: the proof that this tree is the one of so many entries, grown.
            keys: the witnesses'; what others have signed is left out.
            old_size: the size that the witness cosigned last, as far as it is known; it says so itself where
                this is wrong.

        Returns:
            The signatures that hold, none where the witness is not one of ``keys``.

        Raises:
            StoreUnavailableError: it could not be reached, or answered by an error of its own.
            StoreError: it refused, or its answer is none of the protocol's, or no signature of its key.
            IntegrityError: it has cosigned a larger tree than this log's.
        """
        for _ in range(_TRIES):
            status, answer = self._post(request_body(old_size, prove(old_size), note))
            if status == http.client.OK:
                return self._verified(answer, note, keys)
            if status != _CONFLICT:
                raise self._refused(status, answer)
            old_size = self._size_of(answer)
            if old_size > size:
                raise IntegrityError(
                    f"the witness {self.url} has cosigned a tree of {old_size} entries of this log, and this "
                    f"one has {size}: the log was set back, or another one is signed by its key"
                )
        raise StoreUnavailableError(
            f"the witness {self.url} named another size each of {_TRIES} times; try again later"
        )

    def _post(self, body: bytes) -> tuple[int, bytes]:
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", parts.port
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(host, port, timeout=self.timeout_s)
        deadline = _Deadline(connection)
        timer = threading.Timer(self.within_s, deadline.cut)
        timer.daemon = True
        timer.start()
        try:
            connection.connect()
            deadline.socket = connection.sock
            connection.request(
                "POST",
                parts.path.rstrip("/") + "/add-checkpoint",
                body=body,
                headers={"Content-Type": "text/plain; charset=utf-8"},
            )
            response = connection.getresponse()
            answer = response.read(_MAX_ANSWER_BYTES + 1)
            if deadline.is_over:
                raise TimeoutError(f"no whole answer within {self.within_s:g} s")
            return response.status, answer
        except (OSError, http.client.HTTPException) as error:
            raise StoreUnavailableError(
                f"the witness {self.url} could not be asked: {type(error).__name__}: {error}"
            ) from error
        finally:
            timer.cancel()
            connection.close()

    def _verified(self, answer: bytes, note: Note, keys: tuple[VerifierKey, ...]) -> list[Verified]:
        what = f"the answer of the witness {self.url}"
        if len(answer) > _MAX_ANSWER_BYTES:
            raise StoreError(f"{what} has more than {_MAX_ANSWER_BYTES} bytes")
        try:
            lines = answer.decode("utf-8").split("\n")
        except UnicodeDecodeError:
            raise StoreError(f"{what} is not UTF-8") from None
        if lines.pop() != "" or not lines:
            raise StoreError(f"{what} is not made of signature lines")
        found: list[Verified] = []
        for signature in _signatures(lines, what):
            for key in keys:
                if key.matches(signature) and all(each.key != key for each in found):
                    try:
                        stamp_s = key.check(note.text, signature.value)
                    except IntegrityError as error:
                        raise StoreError(f"{what}: {error}") from error
                    found.append(Verified(key=key, signature=signature, stamp_s=stamp_s))
        return found

    def _size_of(self, answer: bytes) -> int:
        what = f"the size that the witness {self.url} answered"
        try:
            text = answer[:64].decode("ascii")
        except UnicodeDecodeError:
            raise StoreError(f"{what} is not a number") from None
        try:
            return parse_decimal(text.removesuffix("\n"), what)
        except FormatError as error:
            raise StoreError(str(error)) from error

    def _refused(self, status: int, answer: bytes) -> StoreError:
        told = answer[:200].decode("ascii", "replace").strip()
        answered = f"the witness {self.url} answered {status}" + (f": {told!r}" if told else "")
        if status in (403, 404):
            return StoreError(f"{answered}; tell its operator this log's origin and key")
        if status == 422:
            return StoreError(f"{answered}: the tree is not the one that it has seen before, grown")
        if status >= 500 or status == 429:
            return StoreUnavailableError(f"{answered}; try again later")
        return StoreError(answered)


class _Deadline:
    """Ends a connection from another thread: a wait for each byte can be short, and all of them long."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self.socket: socket.socket | None = None
        self.is_over = False

    def cut(self) -> None:
        self.is_over = True
        # A response that ends with its connection takes the socket over from it.
        found = self.socket or self._connection.sock
        if found is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(found, socket.SHUT_RDWR)


def _signatures(lines: list[str], what: str) -> list[NoteSignature]:
    try:
        return [NoteSignature.parse(line, what) for line in lines]
    except FormatError as error:
        raise StoreError(str(error)) from error
