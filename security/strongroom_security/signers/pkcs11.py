"""A signer that is an elliptic-curve key in a PKCS #11 token: an HSM, a smart card, SoftHSM.

The token is given the message's hash (``CKM_ECDSA``, PKCS #11 v2.40, 2.3.6) and answers with the two numbers
of the signature side by side, which are written as DER here. The private key never leaves it, and one that
could is refused.

The public key is read from the token, too, from the first of these that is there: the public key's object
with the private key's ``CKA_ID``, a certificate's object with that id, then either by its label. A token
whose public key lies elsewhere signs for nobody here, since nothing would verify what it answers.

How a token is reached is `strongroom_security.recipients.pkcs11token`'s to know.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import Hash

from strongroom.errors import ConfigError, KeyServiceError, NoKeyError
from strongroom_security.publickeys import PublicKey, hash_of
from strongroom_security.recipients.calling import Deadline
from strongroom_security.recipients.pkcs11token import PkcsToken
from strongroom_security.recipients.pkcs11uri import TokenKeyUri
from strongroom_security.signers.base import PUBLIC_KEY_WITHIN_S, check_leaf, check_signing_curve

__all__ = ["Pkcs11Signer"]

_CURVES: Final[dict[bytes, ec.EllipticCurve]] = {
    bytes.fromhex("06082a8648ce3d030107"): ec.SECP256R1(),
    bytes.fromhex("06052b81040022"): ec.SECP384R1(),
}
"""``CKA_EC_PARAMS``: the DER of a named curve's object identifier (RFC 5480, 2.1.1.1)."""

_OCTET_STRING: Final = 0x04


class Pkcs11Signer:
    """Signs by a key on P-256 or P-384 inside a PKCS #11 token.

    Args:
        text: what stands behind ``pkcs11:`` in the URI: ``token=`` or ``serial=``, and ``object=`` (the key's
            label) or ``id=``. ``?pin-source=file:/PATH`` may name the PIN's file.
        module: the path of the module to load; without one, ``STRONGROOM_PKCS11_MODULE`` of the environment.
        pin_file: a file with the PIN, for this user alone; without one, the URI's, and then that of
            ``STRONGROOM_PKCS11_PIN_FILE``.
        certificates: in DER, the key's own first.
        within_s: seconds that asking for the public key may take where nobody says how many.

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
        certificates: tuple[bytes, ...] = (),
        within_s: float = PUBLIC_KEY_WITHIN_S,
    ) -> None:
        named = TokenKeyUri.parse(text, kind="private")
        self.uri: Final = f"{self.kind}:{text}"
        self.certificates: Final = certificates
        self._token: Final = PkcsToken(named, uri=self.uri, module=module, pin_file=pin_file)
        self._within_s: Final = within_s
        # What two threads find at once is the same, and a forked child may have its parent's.
        self._public_key: PublicKey | None = None

    @property
    def public_key(self) -> PublicKey:
        """See `Signer.public_key`."""
        return self._ask_once(self._within_s)

    def sign(self, message: bytes, *, within_s: float) -> bytes:
        """See `Signer.sign`."""
        deadline = Deadline(within_s)
        public_key = self._ask_once(within_s)
        hasher = Hash(hash_of(public_key.curve))
        hasher.update(message)
        digest = hasher.finalize()

        def use(pkcs11: Any, session: Any) -> bytes:
            key = self._find_key(pkcs11, session)
            sign = getattr(
                key, "sign", None
            )  # python-pkcs11 gives a key the methods that its attributes allow
            if sign is None:
                raise NoKeyError(f"{self.uri}: the token does not allow this key to sign (CKA_SIGN)")
            return bytes(sign(digest, mechanism=pkcs11.Mechanism.ECDSA))

        return self._as_der(self._token.ask(use, within_s=deadline.remaining_s()), public_key)

    def _as_der(self, raw: bytes, public_key: PublicKey) -> bytes:
        size = public_key.key.key_size // 8
        if len(raw) != 2 * size:
            raise KeyServiceError(
                f"{self.uri}: the token answered with {len(raw)} bytes; a signature on this curve has "
                f"{2 * size}"
            )
        return encode_dss_signature(int.from_bytes(raw[:size], "big"), int.from_bytes(raw[size:], "big"))

    def _ask_once(self, within_s: float) -> PublicKey:
        if self._public_key is None:
            found = self._token.ask(self._read_public_key, within_s=within_s)
            check_leaf(self.certificates, found, uri=self.uri)
            self._public_key = found
        return self._public_key

    def _find_key(self, pkcs11: Any, session: Any) -> Any:
        attribute = pkcs11.Attribute
        found = self._token.find(
            pkcs11,
            session,
            {attribute.CLASS: pkcs11.ObjectClass.PRIVATE_KEY, attribute.KEY_TYPE: pkcs11.KeyType.EC},
        )
        if not found and self._token.find(pkcs11, session, {attribute.CLASS: pkcs11.ObjectClass.PRIVATE_KEY}):
            raise ConfigError(
                f"{self.uri} names a private key of another kind; name an elliptic-curve key on P-256 or "
                f"P-384"
            )
        key = self._token.only(found, "elliptic-curve private key")
        if _is(pkcs11, key, attribute.EXTRACTABLE) or not _is(pkcs11, key, attribute.SENSITIVE):
            raise ConfigError(
                f"{self.uri}: this key can be read out of its token; make one with CKA_SENSITIVE true and "
                "CKA_EXTRACTABLE false, and have that one trusted"
            )
        return key

    def _read_public_key(self, pkcs11: Any, session: Any) -> PublicKey:
        key = self._find_key(pkcs11, session)
        for found in _public_halves(pkcs11, session, key):
            return check_signing_curve(found, self.uri)
        curve = _CURVES.get(_value(pkcs11, key, pkcs11.Attribute.EC_PARAMS) or b"")
        if curve is None:
            raise ConfigError(f"{self.uri} is a key on another curve than P-256 and P-384; make one on these")
        raise ConfigError(
            f"{self.uri}: the token shows neither the public key nor a certificate of this private key, so "
            f"nothing could verify what it signs; write one into the token under the same CKA_ID, as by "
            f"pkcs11-tool --write-object signer.pub.der --type pubkey --id ID"
        )

    def __repr__(self) -> str:
        return f"<{self.uri}>"


def _public_halves(pkcs11: Any, session: Any, key: Any) -> Iterator[PublicKey]:
    """What the token shows as the public key of a private one, the surest first."""
    attribute, classes = pkcs11.Attribute, pkcs11.ObjectClass
    names = (attribute.ID, attribute.LABEL)
    for name in names:
        value = _value(pkcs11, key, name)
        if not value:
            continue
        for each in session.get_objects(
            {attribute.CLASS: classes.PUBLIC_KEY, attribute.KEY_TYPE: pkcs11.KeyType.EC, name: value}
        ):
            curve = _CURVES.get(_value(pkcs11, each, attribute.EC_PARAMS) or b"")
            point = _value(pkcs11, each, attribute.EC_POINT)
            if curve is not None and point and (found := _key_at(point, curve)) is not None:
                yield found
        for each in session.get_objects({attribute.CLASS: classes.CERTIFICATE, name: value}):
            if (found := _key_certified(_value(pkcs11, each, attribute.VALUE) or b"")) is not None:
                yield found


def _key_at(point: bytes, curve: ec.EllipticCurve) -> PublicKey | None:
    """The key of ``CKA_EC_POINT``, which is a DER OCTET STRING that some tokens leave unwrapped."""
    size = 1 + 2 * (curve.key_size // 8)
    if len(point) == size + 2 and point[0] == _OCTET_STRING and point[1] == size:
        point = point[2:]
    try:
        return PublicKey.of(ec.EllipticCurvePublicKey.from_encoded_point(curve, point))
    except ValueError:
        return None


def _key_certified(der: bytes) -> PublicKey | None:
    try:
        key = x509.load_der_x509_certificate(der).public_key()
        return PublicKey.of(key) if isinstance(key, ec.EllipticCurvePublicKey) else None
    except (ValueError, UnsupportedAlgorithm, ConfigError):
        return None


def _value(pkcs11: Any, found: Any, attribute: Any) -> Any:
    """An attribute of an object; None where the object has none."""
    try:
        return found[attribute]
    except (pkcs11.AttributeTypeInvalid, pkcs11.AttributeSensitive, pkcs11.FunctionFailed):
        return None


def _is(pkcs11: Any, key: Any, attribute: Any) -> bool:
    return bool(_value(pkcs11, key, attribute))
