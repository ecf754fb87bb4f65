"""Public keys: the name that everybody gives them, and signatures that hold or do not."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from hypothesis import given
from hypothesis import strategies as st

from strongroom.errors import ConfigError, FormatError
from strongroom_security.publickeys import PublicKey, check_signature_form, hash_of

CURVES = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1(), "P-521": ec.SECP521R1()}
HASHES = {"P-256": hashes.SHA256(), "P-384": hashes.SHA384(), "P-521": hashes.SHA512()}
ORDERS = {  # NIST SP 800-186, 3.2.1
    "P-256": 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551,
}
PRIVATE = {name: ec.generate_private_key(curve) for name, curve in CURVES.items()}
MESSAGE = b"what was signed"


def pem_of(key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def der_of(key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def signature_by(curve: str) -> bytes:
    return PRIVATE[curve].sign(MESSAGE, ec.ECDSA(HASHES[curve]))


@pytest.mark.parametrize("curve", CURVES)
def test_a_key_is_named_by_the_digest_of_its_pem(curve: str) -> None:
    key = PublicKey.of(PRIVATE[curve].public_key())
    pem = pem_of(PRIVATE[curve].public_key())
    assert pem.endswith(b"-----END PUBLIC KEY-----\n")
    assert (key.curve, key.pem, key.id) == (curve, pem, hashlib.sha256(pem).hexdigest())
    assert repr(key) == f"<PublicKey {curve} {key.id}>"


@pytest.mark.parametrize("curve", CURVES)
def test_a_key_is_the_same_however_it_was_read(curve: str) -> None:
    public = PRIVATE[curve].public_key()
    key = PublicKey.of(public)
    loose = b"\n# a comment\n" + pem_of(public).replace(b"\n", b"\r\n")
    for other in (
        PublicKey.from_pem(pem_of(public), "x"),
        PublicKey.from_pem(loose, "x"),
        PublicKey.from_der(der_of(public), "x"),
    ):
        assert other == key
        assert hash(other) == hash(key)
        assert other.id == key.id
    another = PublicKey.of(ec.generate_private_key(CURVES[curve]).public_key())
    assert another != key
    assert key != key.id


def test_a_published_bundle_names_its_key_as_the_key_is_named_here() -> None:
    vector = json.loads((Path(__file__).parent / "vectors/oms/certificate.bundle.json").read_text())
    material = vector["verificationMaterial"]["x509CertificateChain"]["certificates"]
    certificate = x509.load_der_x509_certificate(base64.b64decode(material[0]["rawBytes"]))
    public = certificate.public_key()
    assert isinstance(public, ec.EllipticCurvePublicKey)
    hint = json.loads((Path(__file__).parent / "vectors/oms/key.bundle.json").read_text())
    # Both published bundles were made by one key.
    assert PublicKey.of(public).id == hint["verificationMaterial"]["publicKey"]["hint"]


@pytest.mark.parametrize("curve", CURVES)
def test_a_signature_holds_for_its_key_and_message_alone(curve: str) -> None:
    key = PublicKey.of(PRIVATE[curve].public_key())
    signature = signature_by(curve)
    assert key.verify(MESSAGE, signature)
    assert not key.verify(MESSAGE + b".", signature)
    assert not PublicKey.of(ec.generate_private_key(CURVES[curve]).public_key()).verify(MESSAGE, signature)


def test_a_signature_with_another_curves_hash_does_not_hold() -> None:
    signature = PRIVATE["P-384"].sign(MESSAGE, ec.ECDSA(hashes.SHA256()))
    assert not PublicKey.of(PRIVATE["P-384"].public_key()).verify(MESSAGE, signature)


@pytest.mark.parametrize("curve", CURVES)
def test_the_hash_is_of_the_curves_size(curve: str) -> None:
    assert hash_of(curve).name == HASHES[curve].name
    with pytest.raises(ConfigError, match="P-224"):
        hash_of("P-224")


def test_both_values_that_are_equally_valid_are_accepted() -> None:
    """Signers of this format give either, and no name of a checkpoint rests on a signature's bytes."""
    key = PublicKey.of(PRIVATE["P-256"].public_key())
    r, s = decode_dss_signature(signature_by("P-256"))
    assert key.verify(MESSAGE, encode_dss_signature(r, ORDERS["P-256"] - s))


def malformed(signature: bytes) -> dict[str, bytes]:
    r, s = decode_dss_signature(signature)
    size = len(signature)
    return {
        "nothing": b"",
        "zeros": bytes(size),
        "a byte behind it": signature + b"\0",
        "a byte too few": signature[:-1],
        "raw, as other formats have it": r.to_bytes(32, "big") + s.to_bytes(32, "big"),
        "a length in two bytes": b"\x30\x81" + signature[1:],
        "a set instead of a sequence": b"\x31" + signature[1:],
        "r padded with a zero": b"\x30"
        + bytes([size - 1])
        + b"\x02"
        + bytes([signature[3] + 1])
        + b"\0"
        + signature[4:],
        "r of zero": encode_dss_signature(0, s),
        "s of zero": encode_dss_signature(r, 0),
        "a negative s": bytes.fromhex("30060201010201ff"),
        "s beyond the order": encode_dss_signature(r, s + ORDERS["P-256"]),
        "numbers beyond all curves": encode_dss_signature(2**521, 2**521),
        "a thousand bytes": encode_dss_signature(2**4000 + 1, s),
    }


@pytest.mark.parametrize("which", malformed(signature_by("P-256")))
def test_a_malformed_signature_does_not_hold(which: str) -> None:
    key = PublicKey.of(PRIVATE["P-256"].public_key())
    assert not key.verify(MESSAGE, malformed(signature_by("P-256"))[which])


@pytest.mark.parametrize("which", sorted(set(malformed(signature_by("P-256"))) - {"s beyond the order"}))
def test_a_malformed_signature_is_refused_by_its_form(which: str) -> None:
    with pytest.raises(FormatError, match="the seal"):
        check_signature_form(malformed(signature_by("P-256"))[which], "the seal")


@given(st.binary(max_size=150))
def test_no_bytes_are_taken_for_a_signature_by_accident(signature: bytes) -> None:
    assert not PublicKey.of(PRIVATE["P-256"].public_key()).verify(MESSAGE, signature)


FOREIGN = {
    "RSA": (rsa.generate_private_key(65537, 2048).public_key(), "of kind RSA"),
    "Ed25519": (ed25519.Ed25519PrivateKey.generate().public_key(), "of kind Ed25519"),
    "secp256k1": (ec.generate_private_key(ec.SECP256K1()).public_key(), "secp256k1"),
    "P-224": (ec.generate_private_key(ec.SECP224R1()).public_key(), "secp224r1"),
    "Brainpool": (ec.generate_private_key(ec.BrainpoolP256R1()).public_key(), "brainpoolP256r1"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_key_that_nothing_here_is_signed_with_is_refused(kind: str) -> None:
    key, reason = FOREIGN[kind]
    with pytest.raises(ConfigError, match=f"signer.pub.*{reason}.*P-256, P-384 or P-521"):
        PublicKey.from_pem(pem_of(key), "signer.pub")
    with pytest.raises(FormatError, match=f"the KMS's.*{reason}.*P-256, P-384 or P-521"):
        PublicKey.from_der(der_of(key), "the KMS's key")
    if isinstance(key, ec.EllipticCurvePublicKey):
        with pytest.raises(ConfigError, match=reason):
            PublicKey.of(key)


def test_a_private_key_is_not_read_as_a_public_one() -> None:
    pem = PRIVATE["P-256"].private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with pytest.raises(ConfigError, match=r"signer.pem holds a private key.*-pubout") as caught:
        PublicKey.from_pem(pem, "signer.pem")
    assert pem.splitlines()[1].decode() not in str(caught.value)


def test_a_certificate_is_not_read_as_a_public_key() -> None:
    with pytest.raises(ConfigError, match=r"cert.pem holds a certificate"):
        PublicKey.from_pem(b"-----BEGIN CERTIFICATE-----\n", "cert.pem")


def test_a_file_holds_one_key() -> None:
    one, other = (pem_of(PRIVATE[curve].public_key()) for curve in ("P-256", "P-384"))
    assert PublicKey.from_pem(b"# the trainer's\n" + one + b"\n", "signer.pub").pem == one
    for both in (one + other, one + one, b"# two\n" + other + b"\n" + one):
        with pytest.raises(ConfigError, match=r"signer.pub holds 2 keys .* a file of its own"):
            PublicKey.from_pem(both, "signer.pub")


@pytest.mark.parametrize(
    "junk", (b"", b"junk", b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n")
)
def test_junk_is_no_key(junk: bytes) -> None:
    with pytest.raises(ConfigError, match=r"signer.pub is not a public key in PEM"):
        PublicKey.from_pem(junk, "signer.pub")
    with pytest.raises(FormatError, match="the key is not a public key in DER"):
        PublicKey.from_der(junk, "the key")


def test_a_point_off_the_curve_is_no_key() -> None:
    der = bytearray(der_of(PRIVATE["P-256"].public_key()))
    der[-1] ^= 1
    with pytest.raises(FormatError, match="the key is not a public key in DER"):
        PublicKey.from_der(bytes(der), "the key")


def test_bytes_behind_a_key_are_refused() -> None:
    with pytest.raises(FormatError, match="the key is not a public key in DER"):
        PublicKey.from_der(der_of(PRIVATE["P-256"].public_key()) + b"\0", "the key")
