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

How a token is reached is `pkcs11token`'s to know.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from strongroom.errors import ConfigError, IntegrityError, NoKeyError
from strongroom_security.fields import recipient_info
from strongroom_security.recipients.base import KEY_BYTES, opaque_id
from strongroom_security.recipients.pkcs11token import MODULE_VARIABLE, PIN_FILE_VARIABLE, PkcsToken
from strongroom_security.recipients.pkcs11uri import TokenKeyUri
from strongroom_security.secret import Secret

if TYPE_CHECKING:
    from strongroom_security.fields import Context

__all__ = ["MECHANISM_VARIABLE", "MODULE_VARIABLE", "PIN_FILE_VARIABLE", "Pkcs11"]

_T = TypeVar("_T")

MECHANISM_VARIABLE: Final = "STRONGROOM_PKCS11_MECHANISM"

_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16

_MECHANISMS: Final = {"aes-gcm": 1, "aes-kw": 2, "aes-kwp": 3}
_LENGTHS: Final = {1: _NONCE_BYTES + KEY_BYTES + _TAG_BYTES, 2: KEY_BYTES + 8, 3: KEY_BYTES + 8}


# Return values of PKCS #11 v2.40, 5.1, by the names of python-pkcs11's exceptions.
_WRONG_BYTES: Final = frozenset(
    {"EncryptedDataInvalid", "EncryptedDataLenRange", "WrappedKeyInvalid", "WrappedKeyLenRange"}
)
_AMBIGUOUS: Final = frozenset({"DeviceError", "FunctionFailed", "GeneralError"})
"""What tokens also answer where the bytes are wrong: SoftHSM before 2.7 has nothing else for it."""


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
        self._token: Final = PkcsToken(named, uri=self.uri, module=module, pin_file=pin_file)
        self.id: Final = opaque_id(self.kind, *named.names())
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
            raise self._token.meaning(name, "")

        return self._ask(use, within_s)

    def _ask(self, use: Callable[[_Token], _T], within_s: float) -> _T:
        def with_key(pkcs11: Any, session: Any) -> _T:
            attributes = {
                pkcs11.Attribute.CLASS: pkcs11.ObjectClass.SECRET_KEY,
                pkcs11.Attribute.KEY_TYPE: pkcs11.KeyType.AES,
            }
            key = self._token.only(self._token.find(pkcs11, session, attributes), "AES key")
            return use(_Token(pkcs11, session, key, self.uri))

        return self._token.ask(with_key, within_s=within_s)


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


def _gcm(pkcs11: Any, nonce: bytes, context: Context) -> Any:
    return pkcs11.GCMParams(nonce, recipient_info(context), 8 * _TAG_BYTES)


def _number(name: str, uri: str) -> int:
    if name not in _MECHANISMS:
        raise ConfigError(f"{uri}: {name!r} is no mechanism; expected one of {', '.join(_MECHANISMS)}")
    return _MECHANISMS[name]
