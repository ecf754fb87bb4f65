"""A recipient that is an AES key in a PKCS #11 token: an HSM, a smart card, SoftHSM.

The key never leaves the token, and Strongroom refuses to wrap by one that could. The policy names it by an
RFC 7512 URI; the module that is loaded and the PIN come from this machine. The first of the wrapped bytes
says how the rest was made:

======  ===========================================================================================
``1``   AES-GCM (PKCS #11 v2.40, 2.12.2): a random 12-byte nonce, the encrypted key, a 16-byte tag,
        with `recipient_info` of the context as associated data
``2``   AES key wrap, RFC 3394 (``CKM_AES_KEY_WRAP``)
``3``   AES key wrap with padding, RFC 5649 (``CKM_AES_KEY_WRAP_PAD``)
======  ===========================================================================================

The first is taken where the token offers it. The other two bind the key alone and no context: what opens
under another context there is still this key, and whatever is derived from it is bound by its own info.

A token is used by one thread at a time: python-pkcs11 tells a module that it will not be called by two.
A call opens a session and closes it, and a forked child initialises the module anew, as PKCS #11 demands.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, TypeVar

from strongroom.errors import ConfigError, IntegrityError, KeyServiceError, NoKeyError
from strongroom_security.fields import recipient_info
from strongroom_security.recipients.base import KEY_BYTES, opaque_id
from strongroom_security.recipients.calling import Deadline, PerProcess, TryAgainError, ask, library
from strongroom_security.recipients.keyfiles import read_private
from strongroom_security.recipients.pkcs11uri import TokenKeyUri
from strongroom_security.secret import Secret

if TYPE_CHECKING:
    from strongroom_security.fields import Context

__all__ = ["MECHANISM_VARIABLE", "MODULE_VARIABLE", "PIN_FILE_VARIABLE", "Pkcs11"]

_T = TypeVar("_T")

MODULE_VARIABLE: Final = "STRONGROOM_PKCS11_MODULE"
PIN_FILE_VARIABLE: Final = "STRONGROOM_PKCS11_PIN_FILE"
MECHANISM_VARIABLE: Final = "STRONGROOM_PKCS11_MECHANISM"

_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_PIN_LIMIT_BYTES: Final = 1024

_MECHANISMS: Final = {"aes-gcm": 1, "aes-kw": 2, "aes-kwp": 3}
_LENGTHS: Final = {1: _NONCE_BYTES + KEY_BYTES + _TAG_BYTES, 2: KEY_BYTES + 8, 3: KEY_BYTES + 8}


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
_WRONG_BYTES: Final = frozenset(
    {"EncryptedDataInvalid", "EncryptedDataLenRange", "WrappedKeyInvalid", "WrappedKeyLenRange"}
)
_AMBIGUOUS: Final = frozenset({"DeviceError", "FunctionFailed", "GeneralError"})
"""What tokens also answer where the bytes are wrong: SoftHSM before 2.7 has nothing else for it."""

_LOCK: Final = PerProcess(Lock)
_INITIALISED: Final[dict[str, int]] = {}
"""Which process initialised a module; a forked child finds its parent's number."""
_REFUSED_PINS: Final[set[tuple[str, bytes, bytes]]] = set()
"""Module, token and a keyed digest of the PIN: a few wrong tries lock a token for good."""
_DIGEST_KEY: Final = os.urandom(32)


class Pkcs11:
    """Wraps and unwraps by an AES key inside a PKCS #11 token.

    Args:
        text: what stands behind ``pkcs11:`` in the URI: ``token=`` or ``serial=``, and ``object=`` (the key's
            label) or ``id=``. ``?pin-source=file:/PATH`` may name the PIN's file.
        module: the path of the module to load; without one, `MODULE_VARIABLE` of the environment.
        pin_file: a file with the PIN, for this user alone; without one, the URI's, and then
            `PIN_FILE_VARIABLE`.
        mechanism: ``aes-gcm``, ``aes-kw`` or ``aes-kwp``, to wrap by that one; without one,
            `MECHANISM_VARIABLE`, and then the best that the token offers.

    Raises:
        ConfigError: it is no such URI, or one that would choose the module or tell the PIN.
    """

    kind: Final = "pkcs11"

    def __init__(
        self,
        text: str,
        *,
        module: str | None = None,
        pin_file: str | os.PathLike[str] | None = None,
        mechanism: str | None = None,
    ) -> None:
        named = TokenKeyUri.parse(text)
        self.uri: Final = f"{self.kind}:{text}"
        self._named: Final = named
        self.id: Final = opaque_id(self.kind, *named.names())
        self._module: Final = module
        self._pin_file: Final = pin_file or named.pin_file
        self._mechanism: Final = mechanism
        if mechanism is not None:
            _number(mechanism, self.uri)

    @classmethod
    def of(
        cls,
        text: str,
        *,
        module: str | None = None,
        pin_file: str | os.PathLike[str] | None = None,
        mechanism: str | None = None,
    ) -> Pkcs11:
        """The recipient that a policy names; the arguments are the class's."""
        return cls(text, module=module, pin_file=pin_file, mechanism=mechanism)

    def __repr__(self) -> str:
        return f"<{self.uri}>"

    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        """See `Recipient.wrap`."""

        def use(token: _Token) -> bytes:
            token.refuse_one_that_can_leave()
            asked = self._mechanism or os.environ.get(MECHANISM_VARIABLE)
            number = _number(asked, self.uri) if asked else token.best()
            return bytes([number]) + token.wrap(number, key, context)

        return self._ask(use, within_s)

    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        """See `Identity.unwrap`."""
        number = wrapped[0] if wrapped else 0
        if len(wrapped) - 1 != _LENGTHS.get(number):
            raise IntegrityError(
                f"what {self.uri} is to unwrap was not wrapped by it: {len(wrapped)} bytes that begin with "
                f"{number}"
            )

        def use(token: _Token) -> Secret:
            try:
                return token.unwrap(number, wrapped[1:], context)
            except token.pkcs11.PKCS11Error as error:
                name = type(error).__name__
            if name in _WRONG_BYTES or (name in _AMBIGUOUS and token.is_well(number, context)):
                raise IntegrityError(
                    f"{self.uri}: the token answered {name}; these bytes were not wrapped by this key for "
                    "this checkpoint"
                )
            raise self._meaning(name, "")

        return self._ask(use, within_s)

    def _ask(self, use: Callable[[_Token], _T], within_s: float) -> _T:
        def attempt(deadline: Deadline) -> _T:
            pkcs11 = library("pkcs11", extra="pkcs11", whom=self.uri)
            lock = _LOCK.get()
            if not lock.acquire(timeout=deadline.remaining_s()):
                raise KeyServiceError(f"{self.uri}: the token is busy with a call that does not end")
            try:
                with self._session(pkcs11) as session:
                    return use(_Token(pkcs11, session, self._find_key(pkcs11, session), self.uri))
            except pkcs11.PKCS11Error as error:
                name, told = type(error).__name__, str(error)
            finally:
                lock.release()
            # Raised out here, so that no error with key bytes in its frames is its context.
            raise self._meaning(name, told)

        return ask(attempt, whom=self.uri, within_s=within_s)

    def _meaning(self, name: str, told: str) -> Exception:
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
        for name, expected in self._named.token:
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

    def _find_key(self, pkcs11: Any, session: Any) -> Any:
        attributes = {
            pkcs11.Attribute.CLASS: pkcs11.ObjectClass.SECRET_KEY,
            pkcs11.Attribute.KEY_TYPE: pkcs11.KeyType.AES,
        }
        if self._named.label is not None:
            attributes[pkcs11.Attribute.LABEL] = self._named.label
        if self._named.key_id is not None:
            attributes[pkcs11.Attribute.ID] = self._named.key_id
        found = list(session.get_objects(attributes))
        if not found:
            raise NoKeyError(f"{self.uri}: the token holds no AES key of that name that this user can see")
        if len(found) > 1:
            raise ConfigError(f"{self.uri}: {len(found)} keys of the token fit; name one by object= and id=")
        return found[0]


class _Token:
    """An open session and the key in it."""

    def __init__(self, pkcs11: Any, session: Any, key: Any, uri: str) -> None:
        self.pkcs11 = pkcs11
        self._session = session
        self._key = key
        self._uri = uri

    def refuse_one_that_can_leave(self) -> None:
        """Refuse to wrap by a key that its token would hand out."""
        attribute = self.pkcs11.Attribute
        if self._is(attribute.EXTRACTABLE) or not self._is(attribute.SENSITIVE):
            raise ConfigError(
                f"{self._uri}: this key can be read out of its token; make one with CKA_SENSITIVE true and "
                "CKA_EXTRACTABLE false, and rotate to it"
            )

    def best(self) -> int:
        """The number of the best mechanism that token and key allow."""
        offered = self._session.token.slot.get_mechanisms()
        attribute, mechanism = self.pkcs11.Attribute, self.pkcs11.Mechanism
        may_encrypt = self._is(attribute.ENCRYPT) and self._is(attribute.DECRYPT)
        may_wrap = self._is(attribute.WRAP) and self._is(attribute.UNWRAP)
        if may_encrypt and mechanism.AES_GCM in offered:
            return _MECHANISMS["aes-gcm"]
        if may_wrap and mechanism.AES_KEY_WRAP in offered:
            return _MECHANISMS["aes-kw"]
        if may_wrap and mechanism.AES_KEY_WRAP_PAD in offered:
            return _MECHANISMS["aes-kwp"]
        raise ConfigError(
            f"{self._uri}: neither CKM_AES_GCM with CKA_ENCRYPT and CKA_DECRYPT, nor CKM_AES_KEY_WRAP(_PAD) "
            "with CKA_WRAP and CKA_UNWRAP, is to be had of this token and key"
        )

    def wrap(self, number: int, key: Secret, context: Context) -> bytes:
        """A key, wrapped by one of the mechanisms."""
        pkcs11 = self.pkcs11
        if number == _MECHANISMS["aes-gcm"]:
            nonce = os.urandom(_NONCE_BYTES)
            return nonce + bytes(
                self._may("encrypt")(
                    key.reveal(),
                    mechanism=pkcs11.Mechanism.AES_GCM,
                    mechanism_param=_gcm(pkcs11, nonce, context),
                )
            )
        copy = self._session.create_object(
            {
                pkcs11.Attribute.CLASS: pkcs11.ObjectClass.SECRET_KEY,
                pkcs11.Attribute.KEY_TYPE: pkcs11.KeyType.AES,
                pkcs11.Attribute.VALUE: key.reveal(),
                **self._of_this_session(),
            }
        )
        try:
            return bytes(self._may("wrap_key")(copy, mechanism=self._key_wrap(number)))
        finally:
            copy.destroy()

    def unwrap(self, number: int, wrapped: bytes, context: Context) -> Secret:
        """What `wrap` wrapped."""
        pkcs11 = self.pkcs11
        if number == _MECHANISMS["aes-gcm"]:
            parameters = _gcm(pkcs11, wrapped[:_NONCE_BYTES], context)
            return self._secret(
                self._may("decrypt")(
                    wrapped[_NONCE_BYTES:], mechanism=pkcs11.Mechanism.AES_GCM, mechanism_param=parameters
                )
            )
        copy = self._may("unwrap_key")(
            pkcs11.ObjectClass.SECRET_KEY,
            pkcs11.KeyType.AES,
            wrapped,
            mechanism=self._key_wrap(number),
            template=self._of_this_session(),
        )
        try:
            return self._secret(copy[pkcs11.Attribute.VALUE])
        finally:
            copy.destroy()

    def is_well(self, number: int, context: Context) -> bool:
        """Whether the token opens what it has just wrapped, so that a failure before was the bytes'."""
        drawn = Secret.draw(KEY_BYTES)
        try:
            return self.unwrap(number, self.wrap(number, drawn, context), context) == drawn
        except self.pkcs11.PKCS11Error:
            return False

    def _secret(self, data: bytes) -> Secret:
        if len(data) != KEY_BYTES:
            raise IntegrityError(f"{self._uri} unwrapped {len(data)} bytes; a key has {KEY_BYTES}")
        return Secret(data)

    def _key_wrap(self, number: int) -> Any:
        mechanism = self.pkcs11.Mechanism
        return mechanism.AES_KEY_WRAP if number == _MECHANISMS["aes-kw"] else mechanism.AES_KEY_WRAP_PAD

    def _of_this_session(self) -> dict[Any, bool]:
        attribute = self.pkcs11.Attribute
        return {attribute.TOKEN: False, attribute.SENSITIVE: False, attribute.EXTRACTABLE: True}

    def _may(self, name: str) -> Callable[..., Any]:
        """What the key does. python-pkcs11 gives a key the methods that its attributes allow."""
        found: Callable[..., Any] | None = getattr(self._key, name, None)
        if found is None:
            raise NoKeyError(f"{self._uri}: the token does not allow {name} with this key (CKA_...)")
        return found

    def _is(self, attribute: Any) -> bool:
        try:
            return bool(self._key[attribute])
        except (self.pkcs11.AttributeTypeInvalid, self.pkcs11.FunctionFailed):
            return False


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


def _gcm(pkcs11: Any, nonce: bytes, context: Context) -> Any:
    return pkcs11.GCMParams(nonce, recipient_info(context), 8 * _TAG_BYTES)


def _number(name: str, uri: str) -> int:
    if name not in _MECHANISMS:
        raise ConfigError(f"{uri}: {name!r} is no mechanism; expected one of {', '.join(_MECHANISMS)}")
    return _MECHANISMS[name]
