"""A recipient that is a key of OpenBao's transit engine, or of HashiCorp Vault's, whose API is the same.

The server wraps and unwraps, and its key never leaves it. The wrapped bytes are the server's ciphertext
(``vault:v1:...``) behind a word that says how the context is bound to it:

``context:``
    The key is a derived one (``derived=true``): the server derives another key for each context, and
    re-wraps without showing what it wraps. The better choice.
``aad:``
    Any other AES-GCM or ChaCha20-Poly1305 key: the context is associated data. The server's ``rewrap``
    takes none, so rotation unwraps and wraps.

Which of both a key is, the server tells at the first wrap: it refuses a derived key's use without a
context, while it ignores a context that another key has no use for.

Where the server is, and who asks, comes from the variables and files of its command line (`_Server`).
Only the mount and the name of the key come from the policy, and nothing from a keyring.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import json
import os
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from strongroom.errors import ConfigError, IntegrityError, KeyServiceError, NoKeyError
from strongroom_security.fields import recipient_info
from strongroom_security.keyrequests import note_request
from strongroom_security.recipients.base import KEY_BYTES, Recipient, check_wrapped, opaque_id
from strongroom_security.recipients.calling import Deadline, TryAgainError, ask, check_endpoint
from strongroom_security.secret import Secret

if TYPE_CHECKING:
    from strongroom_security.fields import Context

__all__ = ["OpenBao"]

_NAME: Final = re.compile(
    r"(?:[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}/){1,8}[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,126}[A-Za-z0-9_])?"
)
_CIPHERTEXT: Final = re.compile(r"vault:v[1-9][0-9]{0,9}:[A-Za-z0-9+/]{1,4096}={0,2}")
_DERIVED: Final = "context"
_ASSOCIATED: Final = "aad"
_PARAMETER: Final = {_DERIVED: "context", _ASSOCIATED: "associated_data"}

_HEADER: Final = re.compile(r"[!-~]{1,16384}")
_DEFAULT_ADDRESS: Final = "https://127.0.0.1:8200"
_SOCKET_S: Final = 10.0
_ANSWER_BYTES: Final = 64 * 1024
_TOKEN_BYTES: Final = 16 * 1024
_TOKEN_FILE: Final = ".vault-token"  # noqa: S105 - where both command lines keep it
_PASSING: Final = frozenset({412, 429, 472, 473, 500, 502, 503, 504})
"""Statuses that pass: a standby that lags, a quota, a server that starts, is sealed or overloaded."""


class OpenBao:
    """Wraps and unwraps by a key of a transit engine; re-wraps under its newest version.

    Args:
        key: where the engine is mounted and the name of the key: ``transit/ckpt``.
        address: of the server; without one, the environment's.

    Raises:
        ConfigError: it is not that.
    """

    kind: Final = "openbao"

    def __init__(self, key: str, *, address: str | None = None) -> None:
        self.uri: Final = f"{self.kind}:{key}"
        if not _NAME.fullmatch(key):
            raise ConfigError(
                f"{self.uri[:200]!r} names no transit key; expected openbao:MOUNT/KEY: openbao:transit/ckpt"
            )
        self._mount, _, self._name = key.rpartition("/")
        self.id: Final = opaque_id(self.kind, self._mount.encode(), self._name.encode())
        self._address: Final = address
        self._is_derived = False

    @classmethod
    def of(cls, text: str) -> OpenBao:
        """The recipient that a policy names.

        Args:
            text: what stands behind ``openbao:``.
        """
        return cls(text)

    def __repr__(self) -> str:
        return f"<{self.uri}>"

    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        """One request, and at the first wrap by a derived key a second one; see `Recipient.wrap`."""

        def attempt(deadline: Deadline) -> bytes:
            # A key stays one or the other, so what was found out stays true.
            if not self._is_derived:
                try:
                    return self._wrap(key, context, _ASSOCIATED, deadline)
                except _IsDerivedError:
                    self._is_derived = True
            return self._wrap(key, context, _DERIVED, deadline)

        return ask(attempt, whom=self.uri, within_s=within_s)

    def _wrap(self, key: Secret, context: Context, binding: str, deadline: Deadline) -> bytes:
        answer = self._request(
            "encrypt",
            {"plaintext": _base64(key.reveal()), _PARAMETER[binding]: _base64(recipient_info(context))},
            deadline,
        )
        return self._wrapped(binding, answer)

    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        """One request; see `Identity.unwrap`."""
        binding, ciphertext = self._read(wrapped)

        def attempt(deadline: Deadline) -> Secret:
            answer = self._request(
                "decrypt",
                {"ciphertext": ciphertext, _PARAMETER[binding]: _base64(recipient_info(context))},
                deadline,
            )
            try:
                plain = base64.b64decode(self._text(answer, "plaintext"), validate=True)
            except binascii.Error:
                raise self._strange("a plaintext that is no base64") from None
            if len(plain) != KEY_BYTES:
                raise IntegrityError(f"{self.uri} unwrapped {len(plain)} bytes; a key has {KEY_BYTES}")
            return Secret(plain)

        return ask(attempt, whom=self.uri, within_s=within_s)

    def rewrap(self, wrapped: bytes, context: Context, to: Recipient, *, within_s: float) -> bytes | None:
        """One request, where ``to`` is this key and a derived one; see `Rewrapper.rewrap`."""
        binding, ciphertext = self._read(wrapped)
        if not isinstance(to, OpenBao) or binding != _DERIVED:
            return None
        if (to.id, to._address) != (self.id, self._address):
            return None

        def attempt(deadline: Deadline) -> bytes:
            answer = self._request(
                "rewrap", {"ciphertext": ciphertext, "context": _base64(recipient_info(context))}, deadline
            )
            return self._wrapped(binding, answer)

        return ask(attempt, whom=self.uri, within_s=within_s)

    def _wrapped(self, binding: str, answer: dict[str, Any]) -> bytes:
        ciphertext = self._text(answer, "ciphertext")
        if not _CIPHERTEXT.fullmatch(ciphertext):
            raise self._strange("a ciphertext of another form than vault:vN:...")
        return check_wrapped(f"{binding}:{ciphertext}".encode(), self.uri)

    def _read(self, wrapped: bytes) -> tuple[str, str]:
        check_wrapped(wrapped, self.uri)
        binding, _, ciphertext = wrapped.decode("latin-1").partition(":")
        if binding not in _PARAMETER or not _CIPHERTEXT.fullmatch(ciphertext):
            raise IntegrityError(
                f"what {self.uri} is to unwrap was not wrapped by it: expected 'context:vault:vN:...' or "
                "'aad:vault:vN:...'"
            )
        return binding, ciphertext

    def _request(self, operation: str, body: dict[str, str], deadline: Deadline) -> dict[str, Any]:
        server = _Server.from_environment(self._address, whom=self.uri)
        status, data = server.post(
            f"/v1/{self._mount}/{operation}/{self._name}", body, deadline, whom=self.uri
        )
        try:
            answer = json.loads(data) if data else {}
        except (ValueError, RecursionError):
            answer = {}
        document = answer if isinstance(answer, dict) else {}
        note_request(document.get("request_id"))
        if status == 200:
            found = document.get("data")
            if not isinstance(found, dict):
                raise self._strange("no data")
            return found
        errors = document.get("errors")
        told = "; ".join(str(each) for each in errors) if isinstance(errors, list) else ""
        raise self._meaning(operation, status, " ".join(told.split())[:300])

    def _meaning(self, operation: str, status: int, told: str) -> Exception:
        reason = f"status {status}" + (f" ({told})" if told else "")
        said = f"{self.uri}: the server answered {operation} with {reason}"
        if status in _PASSING:
            return TryAgainError(reason)
        if 300 <= status < 400:
            return KeyServiceError(
                f"{said}: it points elsewhere, and is not followed with keys in hand; set BAO_ADDR to the "
                "active server"
            )
        if status == 400 and "missing 'context' for key derivation" in told:
            return _IsDerivedError(f"{said}; the key was replaced by one of the same name")
        if status == 400 and "non-AEAD" in told:
            return ConfigError(f"{said}; use a key of type aes256-gcm96, best with derived=true")
        if status in {401, 403, 404} or "key not found" in told or "too old" in told or "too new" in told:
            return NoKeyError(
                f"{said}; see that the mount and the key are there, that the key's version may still be "
                f"used, and that the token is valid and may update {self._mount}/{operation}/{self._name}"
            )
        if status == 400 and operation != "encrypt":
            return IntegrityError(f"{said}; these bytes were not wrapped by this key for this checkpoint")
        return KeyServiceError(said)

    def _text(self, answer: dict[str, Any], name: str) -> str:
        value = answer.get(name)
        if not isinstance(value, str):
            raise self._strange(f"no {name}")
        return value

    def _strange(self, what: str) -> KeyServiceError:
        return KeyServiceError(f"{self.uri}: what answered is no transit engine: {what}")


class _IsDerivedError(NoKeyError):
    """The server asks for a context: the key is a derived one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """Where the server is and who asks, as both command lines find it; read anew for every request.

    ``BAO_ADDR``, ``BAO_TOKEN``, ``BAO_NAMESPACE``, ``BAO_CACERT``, ``BAO_CAPATH``, ``BAO_CLIENT_CERT`` and
    ``BAO_CLIENT_KEY``, each before its namesake that begins with ``VAULT_``. Without a token in the
    environment: the file at ``BAO_TOKEN_PATH``, or ``.vault-token`` in the home folder, which an agent may
    keep fresh.
    """

    address: str
    token: str = field(repr=False)
    namespace: str | None

    @classmethod
    def from_environment(cls, address: str | None, *, whom: str) -> _Server:
        token, namespace = _variable("TOKEN") or _token_of_file(whom), _variable("NAMESPACE")
        # Checked here: a header that cannot be sent would be shown in an error, and this one is a secret.
        if not _HEADER.fullmatch(token):
            raise NoKeyError(f"{whom}: what stands where the token is looked for is no token; log in again")
        if namespace is not None and not _HEADER.fullmatch(namespace):
            raise ConfigError(f"{whom}: BAO_NAMESPACE holds no namespace: {namespace!r:.100}")
        return cls(
            address=check_endpoint(address or _variable("ADDR") or _DEFAULT_ADDRESS, whom=whom),
            token=token,
            namespace=namespace,
        )

    def post(self, path: str, body: dict[str, str], deadline: Deadline, *, whom: str) -> tuple[int, bytes]:
        parts = urlsplit(self.address)
        timeout = max(0.001, min(_SOCKET_S, deadline.remaining_s()))
        host = parts.hostname or ""
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            connection = http.client.HTTPSConnection(host, parts.port, timeout=timeout, context=_tls(whom))
        else:
            connection = http.client.HTTPConnection(host, parts.port, timeout=timeout)
        # Where a program has set it for every connection, requests would be printed, with the keys in them.
        connection.set_debuglevel(0)
        headers = {"Content-Type": "application/json", "X-Vault-Token": self.token, "X-Vault-Request": "true"}
        if self.namespace:
            headers["X-Vault-Namespace"] = self.namespace
        try:
            connection.request("POST", parts.path.rstrip("/") + path, json.dumps(body), headers)
            response = connection.getresponse()
            data = response.read(_ANSWER_BYTES + 1)
            status = response.status
        except ssl.SSLCertVerificationError as error:
            reason: Exception = KeyServiceError(
                f"{whom}: the certificate of {self.address} cannot be trusted ({error.verify_message}); name "
                "the CA's certificate in BAO_CACERT"
            )
        except (OSError, http.client.HTTPException) as error:
            reason = TryAgainError(f"{type(error).__name__}: {error}")
        else:
            if len(data) <= _ANSWER_BYTES:
                return status, data
            reason = KeyServiceError(f"{whom}: {self.address} answered with more than {_ANSWER_BYTES} bytes")
        finally:
            connection.close()
        # Raised out here, so that no error with the request in its frames is its context.
        raise reason


def _variable(name: str) -> str | None:
    return os.environ.get(f"BAO_{name}") or os.environ.get(f"VAULT_{name}") or None


def _token_of_file(whom: str) -> str:
    named = os.environ.get("BAO_TOKEN_PATH")
    path = Path(named) if named else Path.home() / _TOKEN_FILE
    try:
        with path.open("rb") as file:
            data = file.read(_TOKEN_BYTES + 1)
    except OSError as error:
        raise NoKeyError(
            f"{whom}: this machine has no token: BAO_TOKEN is not set and {path} cannot be read "
            f"({error.strerror or error}); log in, or let an agent keep that file"
        ) from None
    return data.strip().decode("latin-1")


def _tls(whom: str) -> ssl.SSLContext:
    file, folder = _variable("CACERT"), _variable("CAPATH")
    certificate, key = _variable("CLIENT_CERT"), _variable("CLIENT_KEY")
    try:
        context = ssl.create_default_context(cafile=file, capath=None if file else folder)
        if certificate:
            context.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{whom}: the certificates in BAO_CACERT, BAO_CAPATH, BAO_CLIENT_CERT or BAO_CLIENT_KEY cannot "
            f"be used: {error}"
        ) from None
    return context


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
