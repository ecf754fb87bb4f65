"""Certificates: only a chain to one's own root, for signing code, in a name that counts, makes a signer."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from authorities import CURVES, SIGNER_NAME, START, Issued, PrivateKey, issue, issue_signer
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from strongroom.errors import ConfigError, FormatError, UntrustedError
from strongroom_security.certificates import Authority, key_of_certificate
from strongroom_security.publickeys import PublicKey

CODE_SIGNING = ExtendedKeyUsageOID.CODE_SIGNING
URI = x509.UniformResourceIdentifier(SIGNER_NAME)
DAY = timedelta(days=1)


def new_key(curve: str = "P-256") -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(CURVES[curve])


def authority(*roots: Issued, names: tuple[str, ...] = (SIGNER_NAME,)) -> Authority:
    return Authority(roots=tuple(root.certificate for root in roots), names=names, uri="file:roots.pem")


def ms(time: datetime) -> int:
    return int(time.timestamp()) * 1000


ROOT = issue("root")
INTERMEDIATE = issue("intermediate", ROOT)
KEY = new_key()
LEAF = issue_signer(INTERMEDIATE, KEY)
CHAIN = (LEAF.der, INTERMEDIATE.der)


# ------------------------------------------------------------------------------------------------ chains


@pytest.mark.parametrize("curve", CURVES)
def test_a_chain_to_the_root_gives_the_signers_key(curve: str) -> None:
    key = new_key(curve)
    found = authority(ROOT).leaf((issue_signer(INTERMEDIATE, key).der, INTERMEDIATE.der), "it")
    assert found == PublicKey.of(key.public_key())


@pytest.mark.parametrize(
    "chain",
    (CHAIN, (*CHAIN, ROOT.der), (LEAF.der, ROOT.der, INTERMEDIATE.der)),
    ids=("without the root", "with the root", "in another order"),
)
def test_the_root_may_be_sent_along(chain: tuple[bytes, ...]) -> None:
    assert authority(ROOT).leaf(chain, "it").id == PublicKey.of(KEY.public_key()).id


def test_any_of_several_roots_will_do() -> None:
    assert authority(issue("other"), ROOT).leaf(CHAIN, "it")


def test_a_certificate_straight_from_the_root_will_do() -> None:
    assert authority(ROOT).leaf((issue_signer(ROOT, KEY).der,), "it")


def test_an_intermediate_may_be_what_one_trusts() -> None:
    assert authority(INTERMEDIATE).leaf((LEAF.der,), "it")


@pytest.mark.parametrize("kind", ("RSA", "P-384", "P-521"))
def test_authorities_may_have_keys_of_other_kinds(kind: str) -> None:
    key: PrivateKey = rsa.generate_private_key(65537, 2048) if kind == "RSA" else new_key(kind)
    root = issue("root", key=key)
    assert authority(root).leaf((issue_signer(root, KEY).der,), "it")


def forged(root: Issued) -> tuple[bytes, ...]:
    """A certificate that names the root as its issuer, signed by someone else."""
    pretender = Issued(certificate=root.certificate, key=new_key())
    return (issue_signer(pretender, KEY).der,)


NOT_AN_AUTHORITY = issue("server", ROOT, is_authority=False, names=[URI], purposes=[CODE_SIGNING])
NO_CERTIFIER = issue("archive", ROOT, usage="signature")
FOR_SERVERS = issue("servers", ROOT, purposes=[ExtendedKeyUsageOID.SERVER_AUTH])
NARROW = issue(
    "narrow",
    ROOT,
    extra=[(x509.NameConstraints([x509.UniformResourceIdentifier("example.org")], None), True)],
)
SHORT = issue("short", ROOT)
SHORT_ROOT = Issued(
    certificate=x509.CertificateBuilder(
        ROOT.certificate.subject,
        ROOT.certificate.subject,
        ROOT.certificate.public_key(),  # type: ignore[arg-type]
        1,
        START,
        START + 365 * DAY,
    )
    .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    .sign(ROOT.key, hashes.SHA256()),
    key=ROOT.key,
)

ASTRAY: dict[str, tuple[Authority, tuple[bytes, ...]]] = {
    "under another root": (authority(issue("root")), CHAIN),
    "without the certificate between": (authority(ROOT), (LEAF.der,)),
    "forged in the root's name": (authority(ROOT), forged(ROOT)),
    "by itself": (authority(ROOT), (issue_signer(None, KEY).der,)),
    "by itself, and sending the root along": (authority(ROOT), (issue_signer(None, KEY).der, ROOT.der)),
    "by another signer": (authority(ROOT), (issue_signer(LEAF, KEY).der, LEAF.der, INTERMEDIATE.der)),
    "by what is no authority": (
        authority(ROOT),
        (issue_signer(NOT_AN_AUTHORITY, KEY).der, NOT_AN_AUTHORITY.der),
    ),
    "by who may not certify": (authority(ROOT), (issue_signer(NO_CERTIFIER, KEY).der, NO_CERTIFIER.der)),
    "by who certifies servers": (authority(ROOT), (issue_signer(FOR_SERVERS, KEY).der, FOR_SERVERS.der)),
    "longer than the root allows": (authority(SHORT_ROOT), CHAIN),
    "by a key that can be broken": (
        authority(weak := issue("weak", key=rsa.generate_private_key(65537, 1024))),  # noqa: S505 - what is refused
        (issue_signer(weak, KEY).der,),
    ),
    "with a rule that nobody here knows": (
        authority(ROOT),
        (
            issue(
                "trainer",
                ROOT,
                key=KEY,
                is_authority=False,
                names=[URI],
                purposes=[CODE_SIGNING],
                extra=[(x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"\x05\x00"), True)],
            ).der,
        ),
    ),
    "under names that cannot be judged": (authority(ROOT), (issue_signer(NARROW, KEY).der, NARROW.der)),
}


@pytest.mark.parametrize("case", ASTRAY)
def test_a_chain_that_leads_elsewhere_makes_no_signer(case: str) -> None:
    trusted, chain = ASTRAY[case]
    with pytest.raises(
        UntrustedError, match=r"^step 7 is signed by 'CN=trainer'.*do not lead to file:roots\.pem"
    ):
        trusted.leaf(chain, "step 7")


def test_an_authority_for_signing_code_alone_is_one() -> None:
    signing = issue("signing", ROOT, purposes=[CODE_SIGNING])
    assert authority(ROOT).leaf((issue_signer(signing, KEY).der, signing.der), "it")


# ------------------------------------------------------------------------------------- usage and names


@pytest.mark.parametrize(
    ("usage", "purposes", "reason"),
    (
        ("encipherment", [CODE_SIGNING], "not for signatures; .*digitalSignature"),
        (None, [CODE_SIGNING], "not for signatures; .*digitalSignature"),
        ("signature", [], "not for signing code; .*codeSigning"),
        ("signature", [ExtendedKeyUsageOID.SERVER_AUTH], "not for signing code; .*codeSigning"),
        ("signature", [ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE], "not for signing code; .*codeSigning"),
    ),
)
def test_a_certificate_for_something_else_makes_no_signer(
    usage: str | None, purposes: list[x509.ObjectIdentifier], reason: str
) -> None:
    leaf = issue("trainer", ROOT, key=KEY, is_authority=False, usage=usage, purposes=purposes, names=[URI])
    with pytest.raises(UntrustedError, match=reason):
        authority(ROOT).leaf((leaf.der,), "it")


def leaf_named(*names: x509.GeneralName) -> tuple[bytes, ...]:
    return (issue("trainer", ROOT, key=KEY, is_authority=False, names=names, purposes=[CODE_SIGNING]).der,)


@pytest.mark.parametrize(
    ("trusted", "held"),
    (
        ("spiffe://example.org/trainer", x509.UniformResourceIdentifier("spiffe://example.org/trainer")),
        ("release@example.org", x509.RFC822Name("release@example.org")),
        ("trainer.example.org", x509.DNSName("trainer.example.org")),
        ("Trainer.Example.org", x509.DNSName("trainer.example.ORG")),
    ),
)
def test_a_name_of_any_kind_counts(trusted: str, held: x509.GeneralName) -> None:
    chain = leaf_named(x509.DNSName("other.example.org"), held)
    assert authority(ROOT, names=("x.example.org", trusted)).leaf(chain, "it")


@pytest.mark.parametrize(
    ("trusted", "held"),
    (
        ("spiffe://example.org/trainer", x509.UniformResourceIdentifier("spiffe://example.org/trainer/")),
        ("spiffe://example.org/trainer", x509.UniformResourceIdentifier("spiffe://example.org/trainer2")),
        ("spiffe://example.org/trainer", x509.UniformResourceIdentifier("spiffe://EXAMPLE.org/trainer")),
        ("release@example.org", x509.RFC822Name("Release@example.org")),
        ("release@example.org", x509.DNSName("release@example.org")),
        ("release@example.org", x509.UniformResourceIdentifier("release@example.org")),
        ("example.org", x509.DNSName("trainer.example.org")),
        ("trainer.example.org", x509.DNSName("*.example.org")),
        ("trainer.example.org", x509.RFC822Name("trainer.example.org")),
    ),
)
def test_a_name_that_is_only_like_one_does_not_count(trusted: str, held: x509.GeneralName) -> None:
    with pytest.raises(UntrustedError, match=rf"holds the names .*{held.value[-5:]}.*is trusted for"):
        authority(ROOT, names=(trusted,)).leaf(leaf_named(held), "it")


def test_the_subjects_own_name_does_not_count() -> None:
    with pytest.raises(UntrustedError, match="holds the names none"):
        authority(ROOT, names=("trainer",)).leaf(leaf_named(), "it")


# --------------------------------------------------------------------------------------------------- time


def test_certificates_that_were_valid_together_are_judged_whatever_the_time_is_now() -> None:
    old = issue("old", start=START - 9000 * DAY, days=400)
    leaf = issue_signer(old, KEY, start=START - 8900 * DAY, days=3)
    assert authority(old).leaf((leaf.der,), "it")


def test_an_intermediate_that_was_issued_anew_still_leads_to_the_root() -> None:
    later = issue("intermediate", ROOT, key=INTERMEDIATE.key, start=START + 30 * DAY)
    assert authority(ROOT).leaf((LEAF.der, later.der), "it")


def test_certificates_that_never_were_valid_together_make_no_signer() -> None:
    short = issue("short", ROOT, days=10)
    leaf = issue_signer(short, KEY, start=START + 20 * DAY)
    with pytest.raises(UntrustedError, match="not valid at validation time"):
        authority(ROOT).leaf((leaf.der, short.der), "it")


def test_a_time_within_all_windows_is_fine() -> None:
    trusted = authority(ROOT)
    trusted.check_time(CHAIN, ms(START))
    trusted.check_time(CHAIN, ms(START + 45 * DAY))
    # The last second counts whole.
    trusted.check_time(CHAIN, ms(START + 90 * DAY) + 999)


@pytest.mark.parametrize(
    "at_ms",
    (0, ms(START) - 1, ms(START + 90 * DAY) + 1000, 2**53 - 1, -1, 10**30),
    ids=("1970", "just before", "just after", "the last that JSON has", "before 1970", "beyond all"),
)
def test_a_time_outside_of_the_signers_window_is_refused(at_ms: int) -> None:
    authority(ROOT).leaf(CHAIN, "step 7")
    with pytest.raises(
        UntrustedError, match=r"step 7 is of .*'CN=trainer' is valid from 2026-01-01T00:00:00Z to"
    ):
        authority(ROOT).check_time(CHAIN, at_ms, "step 7")


def test_a_time_outside_of_another_certificates_window_is_refused() -> None:
    short = issue("short", ROOT, days=10)
    chain = (issue_signer(short, KEY).der, short.der)
    authority(ROOT).check_time(chain, ms(START + 9 * DAY))
    with pytest.raises(UntrustedError, match="the certificate of 'CN=short' is valid from"):
        authority(ROOT).check_time(chain, ms(START + 11 * DAY))


def test_a_time_outside_of_the_roots_window_is_refused_though_nobody_sent_it_along() -> None:
    root = issue("root", days=10)
    chain = (issue_signer(root, KEY).der,)
    authority(root).check_time(chain, ms(START + 9 * DAY))
    with pytest.raises(
        UntrustedError, match="is of 2026-01-12T00:00:00Z, when the certificates of 'CN=trainer' did"
    ):
        authority(root).check_time(chain, ms(START + 11 * DAY))


# ---------------------------------------------------------------------------------------------- malformed


@pytest.mark.parametrize(
    ("chain", "reason"),
    (
        ((), "has 0 certificates"),
        ((LEAF.der,) * 11, "has 11 certificates"),
        ((b"",), "certificate 0 of it is not X.509"),
        ((LEAF.der, b"junk"), "certificate 1 of it is not X.509"),
        ((LEAF.der + b"\0",), "certificate 0 of it is not X.509"),
        ((LEAF.der[:-1],), "certificate 0 of it is not X.509"),
        ((LEAF.pem,), "certificate 0 of it is not X.509"),
    ),
    ids=("none", "a flood", "empty", "junk", "a byte behind", "a byte too few", "PEM"),
)
def test_malformed_certificates_are_refused(chain: tuple[bytes, ...], reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        authority(ROOT).leaf(chain, "it")
    with pytest.raises(FormatError, match=reason):
        authority(ROOT).check_time(chain, ms(START), "it")


@pytest.mark.parametrize(
    "key",
    (
        ec.generate_private_key(ec.SECP256K1()),
        rsa.generate_private_key(65537, 2048),
        ed25519.Ed25519PrivateKey.generate(),
    ),
    ids=("secp256k1", "RSA", "Ed25519"),
)
def test_a_signers_key_of_another_kind_is_refused(key: PrivateKey) -> None:
    with pytest.raises(
        FormatError, match=r"the key in the signer's certificate of it.*P-256, P-384 or P-521"
    ):
        authority(ROOT).leaf((issue_signer(ROOT, key).der,), "it")


@pytest.mark.filterwarnings("ignore:Parsed a serial number")  # the library's word on some of the changed ones
def test_no_changed_byte_of_a_certificate_goes_unnoticed() -> None:
    leaf = issue_signer(ROOT, KEY).der
    for position in range(len(leaf)):
        changed = leaf[:position] + bytes([leaf[position] ^ 0x41]) + leaf[position + 1 :]
        with pytest.raises((FormatError, UntrustedError)):
            authority(ROOT).leaf((changed,), "it")


VERSION_AT = LEAF.der.index(bytes.fromhex("a003020102")) + 4
COMMON_NAME = bytes.fromhex("0603550403")
"""What stands before a subject's name: then come its string type and its length."""


def with_byte(der: bytes, position: int, value: int) -> bytes:
    return der[:position] + bytes([value]) + der[position + 1 :]


@pytest.mark.filterwarnings("ignore")  # the library's word on some of the changed ones
def test_a_certificate_of_a_version_that_there_is_not_is_malformed() -> None:
    of_version_10 = with_byte(LEAF.der, VERSION_AT, 9)
    with pytest.raises(FormatError, match=r"not X\.509"):
        authority(ROOT).leaf((of_version_10, INTERMEDIATE.der), "it")
    with pytest.raises(FormatError, match=r"not X\.509"):
        key_of_certificate(of_version_10, "it")


@pytest.mark.filterwarnings("ignore")
def test_a_name_in_any_string_type_is_read_or_refused() -> None:
    places = [at + len(COMMON_NAME) for at in range(len(LEAF.der)) if LEAF.der.startswith(COMMON_NAME, at)]
    assert len(places) == 2
    for place in places:
        for tag in range(256):
            with pytest.raises((FormatError, UntrustedError)):
                authority(ROOT).leaf((with_byte(LEAF.der, place, tag), INTERMEDIATE.der), "it")
                # Its own tag, so unchanged.
                raise UntrustedError("")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", (0, 1))
def test_no_damaged_certificate_is_anything_but_refused(which: int) -> None:
    chance = random.Random(which)
    trusted = authority(ROOT)
    for _ in range(600):
        changed = bytearray(CHAIN[which])
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            at = chance.randrange(len(changed))
            changed[at] = chance.choice((chance.randrange(256), changed[at] ^ 1, changed[at] ^ 0x80, 0, 0xFF))
        chain = [*CHAIN]
        chain[which] = bytes(changed)
        for ask in (
            lambda chain=chain: trusted.leaf(chain, "it"),
            lambda chain=chain: trusted.check_time(chain, ms(START + DAY), "it"),
            lambda chain=chain: key_of_certificate(chain[0], "it"),
        ):
            with contextlib.suppress(FormatError, UntrustedError):
                ask()


def test_an_authoritys_own_certificate_makes_no_signer() -> None:
    """Although it is for signing code, in a name that counts, and may sign files by its key usage."""
    signer = issue(
        "trainer",
        INTERMEDIATE,
        key=KEY,
        usage="signature",
        purposes=[CODE_SIGNING],
        names=[URI],
    )
    with pytest.raises(UntrustedError, match="'CN=trainer', whose certificate is an authority's"):
        authority(ROOT).leaf((signer.der, INTERMEDIATE.der), "it")


# -------------------------------------------------------------------------------------------- authorities


def test_a_file_of_roots_is_read_as_a_public_key_is(tmp_path: Path) -> None:
    path = tmp_path / "roots.pem"
    path.write_bytes(ROOT.pem)
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="anyone may write"):
        Authority.read(path, [SIGNER_NAME])
    path.chmod(0o644)
    assert Authority.read(path, [SIGNER_NAME]).roots == (ROOT.certificate,)
    os.truncate(path, (1 << 20) + 1)
    with pytest.raises(ConfigError, match="cannot be read"):
        Authority.read(path, [SIGNER_NAME])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="cannot be read"):
        Authority.read(tmp_path / "pipe", [SIGNER_NAME])


@pytest.mark.filterwarnings("ignore")
def test_a_root_that_is_malformed_is_the_policys_error() -> None:
    at = ROOT.der.index(bytes.fromhex("a003020102")) + 4
    body = base64.encodebytes(with_byte(ROOT.der, at, 9)).decode()
    with pytest.raises(ConfigError, match="no certificates in PEM"):
        Authority.read(f"-----BEGIN CERTIFICATE-----\n{body}-----END CERTIFICATE-----\n", [SIGNER_NAME])


def test_an_authority_is_read_from_a_file_or_a_text(tmp_path: Path) -> None:
    path = tmp_path / "roots.pem"
    path.write_bytes(b"# ours\n" + ROOT.pem + issue("other").pem)
    from_file = Authority.read(path, [SIGNER_NAME])
    assert len(from_file.roots) == 2
    assert from_file.uri == f"file:{path}"
    assert from_file.leaf(CHAIN, "it")
    assert Authority.read(path.read_text(), [SIGNER_NAME]).id == from_file.id
    assert repr(from_file) == f"<Authority file:{path} for {SIGNER_NAME}>"


def test_an_authoritys_id_is_of_its_roots_and_names_in_any_order() -> None:
    other = issue("other")
    whole = authority(ROOT, other, names=("a", "b"))
    assert whole.id == authority(other, ROOT, names=("b", "a")).id
    assert len(whole.id) == 64
    assert (
        len({whole.id, authority(ROOT, names=("a", "b")).id, authority(ROOT, other, names=("ab",)).id}) == 3
    )


def test_an_authority_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without names"):
        authority(ROOT, names=())
    with pytest.raises(ConfigError, match="without names"):
        authority(ROOT, names=("",))
    with pytest.raises(ConfigError, match="holds 0 certificates"):
        authority()
    with pytest.raises(ConfigError, match="'CN=trainer', which is not one of an authority"):
        authority(LEAF)
    with pytest.raises(ConfigError, match=r"absent\.pem, of an authority's certificates, cannot be read"):
        Authority.read(tmp_path / "absent.pem", ["a"])
    with pytest.raises(ConfigError, match="holds no certificates in PEM"):
        Authority.read("", ["a"])
    with pytest.raises(ConfigError, match="holds no certificates in PEM"):
        Authority.read(
            KEY.public_key()
            .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
            .decode(),
            ["a"],
        )


def test_the_published_chain_makes_no_signer() -> None:
    vector = json.loads((Path(__file__).parent / "vectors/oms/certificate.bundle.json").read_text())
    listed = vector["verificationMaterial"]["x509CertificateChain"]["certificates"]
    chain = [base64.b64decode(item["rawBytes"]) for item in listed]
    root = x509.load_der_x509_certificate(chain[-1])
    trusted = Authority(roots=(root,), names=("intermediate-ca",), uri="file:roots.pem")
    with pytest.raises(UntrustedError, match="whose certificate is an authority's"):
        trusted.leaf(chain, "it")
    trusted.check_time(chain, ms(datetime(2025, 6, 1, tzinfo=timezone.utc)))
