"""A PKCS #11 token: opened, logged in to and asked for one key, by one thread at a time.

It finds the module, the token and the PIN, and says what a token's failures mean; what is done with a key
is its user's, who recipients and signers are. python-pkcs11 tells a module that it will not be called by two
threads, so all of this process's questions to tokens take turns. A question opens a session and closes
it, and a forked child initialises the module anew, as PKCS #11 demands.

The policy says which token and key (`TokenKeyUri`); the module that is loaded and the PIN come from this
machine.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, Final, TypeVar

from strongroom.errors import ConfigError, KeyServiceError, NoKeyError
from strongroom_security.recipients.calling import Deadline, PerProcess, TryAgainError, ask, library
from strongroom_security.recipients.keyfiles import read_private
from strongroom_security.recipients.pkcs11uri import TokenKeyUri

__all__ = ["LOCK", "MODULE_VARIABLE", "PIN_FILE_VARIABLE", "PkcsToken"]

_T = TypeVar("_T")

MODULE_VARIABLE: Final = "STRONGROOM_PKCS11_MODULE"
PIN_FILE_VARIABLE: Final = "STRONGROOM_PKCS11_PIN_FILE"

_PIN_LIMIT_BYTES: Final = 1024

# Return values of PKCS #11 v2.40, 5.1, by the names of python-pkcs11's exceptions.
_PASSING: Final = frozenset(
    {
        "DeviceError",
        "DeviceMemory",
        "DeviceRemoved",
        "FunctionCancelled",
        "FunctionFailed",
        "GeneralError",
        "HostMemory",
        "OperationActive",
        "SessionClosed",
        "SessionCount",
        "SessionHandleInvalid",
    }
)
_PIN_REFUSED: Final = frozenset({"PinIncorrect", "PinInvalid", "PinLenRange"})
_REFUSED: Final = frozenset(
    {
        "AnotherUserAlreadyLoggedIn",
        "AttributeSensitive",
        "FunctionRejected",
        "KeyHandleInvalid",
        "PinExpired",
        "PinLocked",
        "TokenNotPresent",
        "TokenNotRecognised",
        "UserNotLoggedIn",
        "UserPinNotInitialized",
        *_PIN_REFUSED,
    }
)

LOCK: Final = PerProcess(Lock)
"""Held while a module is called, by whatever part of this process calls it."""
_INITIALISED: Final[dict[str, int]] = {}
"""Which process initialised a module; a forked child finds its parent's number."""
_REFUSED_PINS: Final[set[tuple[str, bytes, bytes]]] = set()
"""Module, token and a keyed digest of the PIN: a few wrong tries lock a token for good."""
_DIGEST_KEY: Final = os.urandom(32)


class PkcsToken:
    """The token that a URI names, and the questions to it.

    Args:
        named: what the URI says.
        uri: the URI, for people.
        module: the path of the module to load; without one, `MODULE_VARIABLE` of the environment.
        pin_file: a file with the PIN, for this user alone; without one, the URI's, and then
            `PIN_FILE_VARIABLE`.
    """

    def __init__(
        self,
        named: TokenKeyUri,
        *,
        uri: str,
        module: str | None = None,
        pin_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self.uri: Final = uri
        self.named: Final = named
        self._module: Final = module
        self._pin_file: Final = pin_file or named.pin_file

    def ask(self, use: Callable[[Any, Any], _T], *, within_s: float) -> _T:
        """What a token answers, within so many seconds.

        Args:
            use: is called with python-pkcs11 and an open session, as often as the token fails in a way that
                passes.
            within_s: seconds, tries and the wait for one's turn included.

        Raises:
            NoKeyError, KeyServiceError, ConfigError: as recipients' and signers' protocols say.
        """

        def attempt(deadline: Deadline) -> _T:
            pkcs11 = library("pkcs11", extra="pkcs11", whom=self.uri)
            lock = LOCK.get()
            if not lock.acquire(timeout=deadline.remaining_s()):
                raise KeyServiceError(f"{self.uri}: the token is busy with a call that does not end")
            try:
                with self._session(pkcs11) as session:
                    return use(pkcs11, session)
            except pkcs11.PKCS11Error as error:
                name, told = type(error).__name__, str(error)
            finally:
                lock.release()
            # Raised out here, so that no error with key bytes in its frames is its context.
            raise self.meaning(name, told)

        return ask(attempt, whom=self.uri, within_s=within_s)

    def find(self, pkcs11: Any, session: Any, attributes: Mapping[Any, Any]) -> list[Any]:
        """The objects of a token that have these attributes, and the label and id of the URI."""
        wanted = dict(attributes)
        if self.named.label is not None:
            wanted[pkcs11.Attribute.LABEL] = self.named.label
        if self.named.key_id is not None:
            wanted[pkcs11.Attribute.ID] = self.named.key_id
        return list(session.get_objects(wanted))

    def only(self, found: list[Any], what: str) -> Any:
        """The one key that was found.

        Raises:
            NoKeyError: there is none.
            ConfigError: there are several.
        """
        if not found:
            raise NoKeyError(f"{self.uri}: the token holds no {what} of that name that this user can see")
        if len(found) > 1:
            raise ConfigError(f"{self.uri}: {len(found)} keys of the token fit; name one by object= and id=")
        return found[0]

    def meaning(self, name: str, told: str) -> Exception:
        """The error that a token's answer comes to, by the name of python-pkcs11's exception."""
        reason = f"{name}: {told}" if told else name
        if name in _PASSING:
            return TryAgainError(reason)
        if name in _REFUSED:
            return NoKeyError(
                f"{self.uri}: the token refused ({reason}); see its PIN, and what this user may do"
            )
        return KeyServiceError(f"{self.uri}: the token answered {reason}")

    @contextmanager
    def _session(self, pkcs11: Any) -> Iterator[Any]:
        path = self._module or os.environ.get(MODULE_VARIABLE)
        if not path:
            raise ConfigError(
                f"{self.uri}: no PKCS #11 module is named; set {MODULE_VARIABLE} to the path of the token's "
                "library"
            )
        token = self._find_token(pkcs11, _open_module(pkcs11, path, self.uri))
        session = self._log_in(pkcs11, token, path)
        try:
            yield session
        finally:
            with suppress(pkcs11.PKCS11Error):  # a session that cannot be closed is the token's to end
                session.close()

    def _find_token(self, pkcs11: Any, module: Any) -> Any:
        present = []
        for slot in module.get_slots(token_present=True):
            with suppress(pkcs11.TokenNotPresent, pkcs11.TokenNotRecognised):  # pulled out, or not set up
                present.append(slot.get_token())
        fitting = [token for token in present if self._fits(token)]
        if len(fitting) == 1:
            return fitting[0]
        seen = ", ".join(sorted(repr(token.label) for token in present)) or "none"
        if fitting:
            raise ConfigError(f"{self.uri}: {len(fitting)} tokens fit; name one by serial= as well")
        raise NoKeyError(f"{self.uri}: the token is not there; the module shows: {seen:.300}")

    def _fits(self, token: Any) -> bool:
        shown = {
            "token": token.label,
            "serial": token.serial,
            "manufacturer": token.manufacturer_id,
            "model": token.model,
        }
        for name, expected in self.named.token:
            found = shown[name]
            text = found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found)
            if text.rstrip(" \0") != expected:
                return False
        return True

    def _log_in(self, pkcs11: Any, token: Any, path: str) -> Any:
        pin = self._pin()
        if pin is None:
            if pkcs11.TokenFlag.LOGIN_REQUIRED in token.flags:
                raise NoKeyError(
                    f"{self.uri}: this machine has no PIN for the token; put it into a file for this user "
                    f"alone, and set {PIN_FILE_VARIABLE} to its path"
                )
            return token.open()
        serial = token.serial if isinstance(token.serial, bytes) else str(token.serial).encode()
        tried = (path, serial, hmac.digest(_DIGEST_KEY, pin.encode(), "sha256"))
        if tried in _REFUSED_PINS:
            raise NoKeyError(
                f"{self.uri}: the token refused this PIN before, and is not asked again, since a few wrong "
                "ones lock it; put the right one into the PIN's file"
            )
        try:
            return token.open(user_pin=pin)
        except pkcs11.UserAlreadyLoggedIn:
            # By another part of this program: its sessions and this one share the log-in, and it ends it.
            return token.open()
        except pkcs11.PKCS11Error as error:
            if type(error).__name__ in _PIN_REFUSED:
                _REFUSED_PINS.add(tried)
            raise

    def _pin(self) -> str | None:
        path = self._pin_file or os.environ.get(PIN_FILE_VARIABLE)
        if not path:
            return None
        try:
            return read_private(Path(path), limit_bytes=_PIN_LIMIT_BYTES).decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise ConfigError(f"{self.uri}: the PIN in {os.fspath(path)} is not UTF-8") from None


def _open_module(pkcs11: Any, path: str, uri: str) -> Any:
    """The module, initialised by this process."""
    try:
        module = pkcs11.lib(path)
    except pkcs11.PKCS11Error as error:
        raise ConfigError(f"{uri}: the PKCS #11 module {path} cannot be loaded: {error}") from None
    if _INITIALISED.get(path, os.getpid()) != os.getpid():
        with suppress(pkcs11.PKCS11Error):  # there is nothing to finalise: the child begins without
            module.finalize()
        module.initialize()
    _INITIALISED[path] = os.getpid()
    return module
