"""The only module that knows boto3: requests by name, answers as they come, failures as `TryFailedError`.

Nothing is tried twice here: botocore's own retries are off, since they would not tell whether an earlier
answer was lost.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import boto3  # type: ignore[import-untyped]
from botocore import exceptions  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.parsers import ResponseParserError  # type: ignore[import-untyped]

from strongroom._version import __version__
from strongroom.errors import ConfigError, StoreUnavailableError, StrongroomError
from strongroom.stores.s3.failures import (
    CREDENTIALS,
    NO_CREDENTIALS,
    TLS,
    UNREACHABLE,
    UNREADABLE,
    TryFailedError,
    too_late,
)
from strongroom.stores.s3.options import S3Options

__all__ = ["Body", "Client"]

_NO_CREDENTIALS: Final = (
    exceptions.NoCredentialsError,
    exceptions.NoAuthTokenError,
    exceptions.PartialCredentialsError,
    exceptions.CredentialRetrievalError,
    exceptions.TokenRetrievalError,
    exceptions.RefreshWithMFAUnsupportedError,
    exceptions.SSOError,
)
_UNREACHED: Final = (
    exceptions.ConnectTimeoutError,
    exceptions.EndpointConnectionError,
    exceptions.ProxyConnectionError,
)
_MAX_TOLD_CHARS: Final = 400
_REQUIRED: Final[Mapping[str, tuple[str, ...]]] = {
    "complete_multipart_upload": ("ETag",),
    "create_multipart_upload": ("UploadId",),
    "get_object": ("ContentLength", "ETag"),
    "head_object": ("ContentLength", "ETag"),
    "list_objects_v2": ("Name",),
    "put_object": ("ETag",),
    "upload_part": ("ETag",),
}
"""Without which an answer is none of S3's: some proxy's page, say, would pass for an empty listing."""
_SECRETS: Final = re.compile(r"(?<=//)[^\s/\"'@]*:[^\s\"']*@")
"""A user and a password in a URL."""
_OTHER_NAMES: Final = re.compile(r":|-s3alias$")
"""In what a bucket is asked by where it may well answer by another name: an access point's ARN, an alias."""
_COPIED_BYTES: Final = 256 << 10


class Client:
    """A client for one process; safe to use from several threads.

    Args:
        session: the boto3 session that it goes by; None: the usual one of this machine.

    Raises:
        ConfigError: boto3 cannot make a client of this.
    """

    def __init__(self, options: S3Options, session: Any | None) -> None:
        try:
            if session is None:
                session = boto3.Session(profile_name=options.profile_name)
            self._client = session.client(
                "s3",
                region_name=options.region_name,
                endpoint_url=options.endpoint_url,
                verify=options.ca_bundle,
                config=_config(options),
            )
        except (exceptions.BotoCoreError, ValueError) as error:
            raise ConfigError(f"boto3 can make no client for S3 here: {_told(error)}") from error
        # Servers older than 2025 know no other checksum for this request, and boto3 sends that no more.
        self._client.meta.events.register("before-call.s3.DeleteObjects", _add_md5)
        self._asking = threading.local()
        self._client.meta.events.register_first("before-send.s3", self._refuse_late)

    @property
    def endpoint(self) -> str:
        """Where requests go."""
        return str(self._client.meta.endpoint_url)

    def ask(
        self,
        operation: str,
        parameters: Mapping[str, Any],
        *,
        is_late: Callable[[], bool] | None = None,
    ) -> Mapping[str, Any]:
        """One try at one request.

        Args:
            operation: boto3's name of it.
            parameters: as boto3 takes them.
            is_late: asked right before it is sent, when credentials have been waited for: whether it must not
                be any more.

        Raises:
            TryFailedError: there was no answer, or not the one that was asked for.
        """
        self._asking.is_late = is_late
        try:
            answer: Mapping[str, Any] = getattr(self._client, operation)(**parameters)
        except TryFailedError:
            raise
        except Exception as error:
            raise _failure(error, operation) from error
        finally:
            self._asking.is_late = None
        strange = _strangeness(operation, parameters, answer)
        if strange is not None:
            if "Body" in answer:
                answer["Body"].close()
            raise TryFailedError(f"its answer to {operation} {strange}", code=UNREADABLE)
        return answer

    def get(self, parameters: Mapping[str, Any]) -> tuple[Mapping[str, Any], Body]:
        """One try at reading; the body is still to be read, and then to be closed."""
        answer = self.ask("get_object", parameters)
        return answer, Body(answer["Body"])

    def _refuse_late(self, **_: object) -> None:
        is_late = getattr(self._asking, "is_late", None)
        if is_late is not None and is_late():
            raise too_late()


class Body:
    """The bytes of an answer, on their way."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        # urllib3 reads into a buffer of its own and copies; http.client's answer below it does not.
        direct = getattr(getattr(stream, "_raw_stream", None), "_fp", None)
        self._direct = direct if isinstance(direct, http.client.HTTPResponse) else None

    def read_into(self, buffer: memoryview) -> int:
        """Fill the beginning of a buffer by what comes in one wait; 0 where there is nothing more.

        Raises:
            TryFailedError: the rest did not come.
        """
        try:
            if self._direct is not None:
                return _read_once(self._direct, buffer)
            data: bytes = self._stream.read(min(len(buffer), _COPIED_BYTES))
        except (exceptions.BotoCoreError, OSError, http.client.HTTPException) as error:
            raise TryFailedError(f"the answer broke off: {_told(error)}", code="BodyCutShort") from error
        buffer[: len(data)] = data
        return len(data)

    def close(self, *, is_whole: bool) -> None:
        """Let the connection be used again where the answer was read to its end, else drop it."""
        if is_whole and self._direct is not None and self._direct.isclosed():
            self._stream._raw_stream.release_conn()
        else:
            self._stream.close()


def _read_once(direct: http.client.HTTPResponse, buffer: memoryview) -> int:
    """What one wait brings: `HTTPResponse.readinto` goes on until the buffer is full, however slowly."""
    stream, left_bytes = getattr(direct, "fp", None), getattr(direct, "length", None)
    if stream is None:
        return 0
    if direct.chunked or left_bytes is None or not hasattr(stream, "readinto1"):
        data = direct.read1(min(len(buffer), _COPIED_BYTES))
        buffer[: len(data)] = data
        return len(data)
    count = int(stream.readinto1(buffer[:left_bytes]))
    direct.length = left_bytes - count
    if not direct.length:
        # It sees that nothing is left, and lets go of the connection.
        direct.readinto(bytearray(1))
    return count


def _strangeness(operation: str, asked: Mapping[str, Any], answer: Mapping[str, Any]) -> str | None:
    """Why an answer is none of this bucket's, though it says that all is well; None: it is."""
    for required in _REQUIRED.get(operation, ()):
        if answer.get(required) is None:
            return f"has no {required}"
    if operation == "get_object" and str(answer.get("ContentType", "")).startswith("text/html"):
        # Nothing that is stored here is one.
        return "is a web page"
    if operation == "list_objects_v2" and not _OTHER_NAMES.search(asked["Bucket"]):
        name = answer["Name"]
        return None if name == asked["Bucket"] else f"lists another bucket, {name!r:.80}"
    return None


def _config(options: S3Options) -> Any:
    style = {} if options.addressing_style is None else {"s3": {"addressing_style": options.addressing_style}}
    proxies = {} if options.proxies is None else {"proxies": dict(options.proxies)}
    return Config(
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        retries={"total_max_attempts": 1},
        max_pool_connections=options.parts_in_flight + options.reads_in_flight + 8,
        # Where a checksum is wanted we send it ourselves: old servers refuse those that boto3 adds by itself.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        tcp_keepalive=True,
        user_agent_extra=f"strongroom/{__version__}",
        **style,
        **proxies,
    )


def _add_md5(params: dict[str, Any], **_: object) -> None:
    body = params.get("body")
    if isinstance(body, bytes | bytearray):
        digest = hashlib.md5(body, usedforsecurity=False).digest()
        params["headers"].setdefault("Content-MD5", base64.b64encode(digest).decode())


def _failure(error: Exception, operation: str) -> TryFailedError:
    """What an error of boto3's means, or one of ours that came up in it.

    Raises:
        Exception: the error itself, where it is neither.
    """
    if isinstance(error, exceptions.ClientError):
        told = error.response.get("Error", {})
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = str(told.get("Code", ""))[:80]
        if status == 404 and code in ("", "404") and operation != "head_object":
            # Some gateway's: S3's own has a body, but for HEAD, and says what is not there.
            return TryFailedError("a 404 that is none of S3's", status=404, code=UNREADABLE)
        return TryFailedError(str(told.get("Message", ""))[:_MAX_TOLD_CHARS], status=int(status), code=code)
    if isinstance(error, StrongroomError):
        # The session's credentials are handed out by Strongroom, and had to be renewed on the way.
        is_passing = isinstance(error, StoreUnavailableError)
        return TryFailedError(
            str(error)[:_MAX_TOLD_CHARS], code=CREDENTIALS, was_sent=False, is_passing=is_passing
        )
    if isinstance(error, _NO_CREDENTIALS):
        return TryFailedError(_told(error), code=NO_CREDENTIALS, was_sent=False, is_passing=False)
    if isinstance(error, exceptions.SSLError):
        is_refused = "CERTIFICATE" in str(error).upper() or "WRONG_VERSION" in str(error).upper()
        return TryFailedError(_told(error), code=TLS, was_sent=not is_refused, is_passing=not is_refused)
    if isinstance(error, _UNREACHED):
        return TryFailedError(_told(error), code=UNREACHABLE, was_sent=False)
    if isinstance(error, exceptions.HTTPClientError):
        # It was connected: a time-out of reading, a connection that was closed, an answer cut short.
        return TryFailedError(_told(error), code="AnswerLost")
    if isinstance(error, ResponseParserError):
        return TryFailedError(_told(error), code=UNREADABLE)
    if isinstance(error, exceptions.BotoCoreError):
        return TryFailedError(_told(error), code=type(error).__name__, was_sent=False, is_passing=False)
    if isinstance(error, OSError | http.client.HTTPException):
        return TryFailedError(_told(error), code="AnswerLost")
    raise error


def _told(error: BaseException) -> str:
    return _SECRETS.sub("***@", f"{type(error).__name__}: {error}")[:_MAX_TOLD_CHARS]
