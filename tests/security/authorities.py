"""Keys and certificates that tests sign with: made on the spot, kept in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from strongroom_security.publickeys import PublicKey, hash_of

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
"""The first second of what is issued here, unless told otherwise."""

SIGNER_NAME = "spiffe://example.org/trainer"

CURVES: dict[str, ec.EllipticCurve] = {
    "P-256": ec.SECP256R1(),
    "P-384": ec.SECP384R1(),
    "P-521": ec.SECP521R1(),
}

PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


class MemorySigner:
    """Signs by a key in this process, as the protocol of signers asks."""

    kind = "memory"
    uri = "memory:test"

    def __init__(self, curve: str = "P-256", certificates: Sequence[bytes] = ()) -> None:
        self.private = ec.generate_private_key(CURVES[curve])
        self.public_key = PublicKey.of(self.private.public_key())
        self.certificates = tuple(certificates)

    def sign(self, message: bytes, *, within_s: float) -> bytes:
        return self.private.sign(message, ec.ECDSA(hash_of(self.public_key.curve)))

    @property
    def private_pem(self) -> bytes:
        return self.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@dataclass(frozen=True, kw_only=True)
class Issued:
    """A certificate and the key it is for."""

    certificate: x509.Certificate
    key: PrivateKey

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(Encoding.DER)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)


def issue(
    name: str,
    issuer: Issued | None = None,
    *,
    key: PrivateKey | None = None,
    is_authority: bool = True,
    start: datetime = START,
    days: int = 365,
    names: Sequence[x509.GeneralName] = (),
    usage: str | None = "default",
    purposes: Sequence[x509.ObjectIdentifier] = (),
    extra: Sequence[tuple[x509.ExtensionType, bool]] = (),
    hash_: hashes.HashAlgorithm | None = None,
) -> Issued:
    """A certificate; without an issuer it signs itself.

    Args:
        usage: ``"signature"``, ``"certificates"``, None for no such extension, or what fits.
    """
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if usage == "default":
        usage = "certificates" if is_authority else "signature"
    if usage is not None:
        builder = builder.add_extension(
            x509.KeyUsage(
                digital_signature=usage == "signature",
                content_commitment=False,
                key_encipherment=usage == "encipherment",
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=usage == "certificates",
                crl_sign=usage == "certificates",
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if purposes:
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    for extension, critical in extra:
        builder = builder.add_extension(extension, critical=critical)
    signing = issuer.key if issuer else key
    return Issued(certificate=builder.sign(signing, hash_ or hashes.SHA256()), key=key)


def issue_signer(
    issuer: Issued | None,
    key: PrivateKey,
    *,
    name: str = SIGNER_NAME,
    start: datetime = START,
    days: int = 90,
) -> Issued:
    """A signer's certificate as it should be."""
    return issue(
        "trainer",
        issuer,
        key=key,
        is_authority=False,
        start=start,
        days=days,
        names=[x509.UniformResourceIdentifier(name)],
        purposes=[ExtendedKeyUsageOID.CODE_SIGNING],
    )
