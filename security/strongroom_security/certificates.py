"""Certificates under an authority of one's own: whose key signed, and when its certificate was valid.

A certificate is read whole and at once, since it may be anyone's: `parse_certificate` is the only place. An
`Authority` is roots and names: whoever has a certificate from one of the roots, for signing, in one of
the names, is trusted as one key would be. Chains are built and verified by ``cryptography``; what is
decided here is what the certificates have to say. Nobody is asked whether one was revoked: a trust list
does that by key. Certificates out of Sigstore's public authority, which live for minutes and lean on a
transparency log, are not verified.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import verification
from cryptography.x509.oid import ExtendedKeyUsageOID

from strongroom.errors import ConfigError, FormatError, UntrustedError
from strongroom_security.fields import encode_fields
from strongroom_security.publickeys import PublicKey
from strongroom_security.recipients.keyfiles import read_public

__all__ = ["Authority", "key_of_certificate", "parse_certificate"]

_MAX_ROOTS: Final = 100
_MAX_ROOT_FILE_BYTES: Final = 1 << 20
_MAX_CERTIFICATES: Final = 10
_Extension = TypeVar("_Extension", bound=x509.ExtensionType)
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:.+")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Authority:
    """Whose certificates count, and in which names.

    Attributes:
        roots: certificates of authorities; a chain ends at one of them.
        names: a certificate holds at least one of these as an alternative name: a URI
            (``spiffe://example.org/trainer``), an e-mail address or a host name, compared whole.
        uri: where it was read, for people.

    Raises:
        ConfigError: no root or no name, a root that is not an authority's, or too many.
    """

    roots: tuple[x509.Certificate, ...]
    names: tuple[str, ...]
    uri: str

    def __post_init__(self) -> None:
        if not 1 <= len(self.roots) <= _MAX_ROOTS:
            raise ConfigError(f"{self.uri} holds {len(self.roots)} certificates; expected 1 to {_MAX_ROOTS}")
        # Without a name, everybody whom the authority ever certified could sign.
        if not self.names or not all(self.names):
            raise ConfigError(
                f"{self.uri} comes without names; give those that a signer's certificate may hold: a URI, an "
                f"e-mail address or a host name"
            )
        for root in self.roots:
            try:
                _check_whole(root, self.uri)
            except FormatError as error:
                raise ConfigError(str(error)) from None
            if not _is_authority(root, self.uri):
                raise ConfigError(
                    f"{self.uri} holds the certificate of {_who(root)}, which is not one of an authority "
                    f"(basicConstraints); give the root that signers' certificates come from"
                )

    @classmethod
    def read(cls, source: Path | str, names: Collection[str]) -> Authority:
        """An authority from certificates in PEM.

        Args:
            source: a file, or the PEM text itself.
            names: as in `Authority`.

        Raises:
            ConfigError: there is no such file, anyone may write it, or there are no certificates in it.
        """
        if isinstance(source, Path):
            uri = f"file:{source}"
            try:
                pem = read_public(source, limit_bytes=_MAX_ROOT_FILE_BYTES)
            except ConfigError as error:
                raise ConfigError(
                    f"{source}, of an authority's certificates, cannot be read: {error}"
                ) from error
        else:
            uri, pem = "an authority's certificates", source.encode("utf-8", "replace")
        try:
            with _told(f"{uri} holds no certificates in PEM"):
                roots = tuple(x509.load_pem_x509_certificates(pem))
        except FormatError as error:
            raise ConfigError(str(error)) from None
        return cls(roots=roots, names=tuple(names), uri=uri)

    @property
    def id(self) -> str:
        """64 lower-case hex digits, the same for the same roots and names in any order."""
        hasher = hashlib.sha256()
        for der in sorted({root.public_bytes(Encoding.DER) for root in self.roots}):
            hasher.update(len(der).to_bytes(4, "big") + der)
        hasher.update(encode_fields("strongroom.v1 authority", *sorted(set(self.names))))
        return hasher.hexdigest()

    def __repr__(self) -> str:
        return f"<Authority {self.uri} for {', '.join(self.names)}>"

    def leaf(self, certificates: Sequence[bytes], what: str) -> PublicKey:
        """The key of whoever signed, once their certificates were found to lead here.

        They are judged at a time when all of them were valid; whether that was when something was signed
        is asked by `check_time`.

        Args:
            certificates: in DER, the signer's first.
            what: names the signature in errors.

        Raises:
            UntrustedError: they lead to no root; one never was valid together with the others; the
                signer's is an authority's, not for signing code, or in no name that counts.
            FormatError: one is malformed, or its key is on no curve that is signed on.
        """
        chain = _parse(certificates, what)
        signer = chain[0]
        key = _key_of(signer, f"the key in the signer's certificate of {what}")
        self._check_usage(signer, what)
        self._check_name(signer, what)
        # Whichever certificates the chain turns out to take, it holds from the day of the youngest on.
        days = {max(_from(signer), _from(certificate)) for certificate in (*chain, *self.roots)}
        problem = None
        for at in sorted(day for day in days if day <= signer.not_valid_after_utc):
            problem = self._problem(chain, at)
            if problem is None:
                return key
        raise UntrustedError(
            f"{what} is signed by {_who(signer)}, whose certificates do not lead to {self.uri}: "
            f"{problem or 'it was never valid'}"
        )

    def check_time(self, certificates: Sequence[bytes], at_ms: int, what: str = "the signature") -> None:
        """Find out whether certificates that lead here were valid at a time.

        Args:
            certificates: in DER, the signer's first; as `leaf` found them to be.
            at_ms: milliseconds since 1970, UTC.
            what: names the signature in errors.

        Raises:
            UntrustedError: one was not valid then, or not yet; or the root that they lead to was not.
            FormatError: one is malformed.
        """
        chain = _parse(certificates, what)
        for certificate in chain:
            start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
            # The last second counts whole (RFC 5280, 4.1.2.5).
            if not _ms(start) <= at_ms < _ms(end) + 1000:
                raise UntrustedError(
                    f"{what} is of {_text(at_ms)}, and the certificate of {_who(certificate)} is valid from "
                    f"{start:%Y-%m-%dT%H:%M:%SZ} to {end:%Y-%m-%dT%H:%M:%SZ}"
                )
        problem = self._problem(chain, datetime.fromtimestamp(at_ms // 1000, timezone.utc))
        if problem is not None:
            raise UntrustedError(
                f"{what} is of {_text(at_ms)}, when the certificates of {_who(chain[0])} did not lead to "
                f"{self.uri}: {problem}"
            )

    def _problem(self, chain: list[x509.Certificate], at: datetime) -> str | None:
        """Why certificates do not lead to a root at a time, or None where they do."""
        try:
            with _told("they cannot be verified"):
                verifier = (
                    verification.PolicyBuilder()
                    .store(verification.Store(list(self.roots)))
                    .time(at)
                    .extension_policies(
                        ca_policy=_AUTHORITIES, ee_policy=verification.ExtensionPolicy.permit_all()
                    )
                    .build_client_verifier()
                )
                verifier.verify(chain[0], chain[1:])
        except FormatError as error:
            return str(error)
        return None

    def _check_usage(self, signer: x509.Certificate, what: str) -> None:
        # What an authority signs is certificates; with one key for both, a file could be taken for one.
        if _is_authority(signer, what):
            raise UntrustedError(
                f"{what} is signed by {_who(signer)}, whose certificate is an authority's "
                f"(basicConstraints); issue one for the signer alone"
            )
        usage = _extension(signer, x509.KeyUsage, what)
        if usage is None or not usage.digital_signature:
            raise UntrustedError(
                f"{what} is signed by {_who(signer)}, whose certificate is not for signatures; issue one "
                f"with the key usage digitalSignature"
            )
        purposes = _extension(signer, x509.ExtendedKeyUsage, what)
        # A server's certificate from the same authority, in a name that counts, is no signer's.
        if purposes is None or ExtendedKeyUsageOID.CODE_SIGNING not in purposes:
            raise UntrustedError(
                f"{what} is signed by {_who(signer)}, whose certificate is not for signing code; issue one "
                f"with the extended key usage codeSigning"
            )

    def _check_name(self, signer: x509.Certificate, what: str) -> None:
        held = _names(signer, what)
        if not any(_kind_and_name(name) in held for name in self.names):
            found = ", ".join(sorted(name for _, name in held))[:200] or "none"
            raise UntrustedError(
                f"{what} is signed by {_who(signer)}, whose certificate holds the names {found}; "
                f"{self.uri} is trusted for {', '.join(self.names)}"
            )


def _signs_certificates(
    policy: verification.Policy, certificate: x509.Certificate, usage: x509.KeyUsage | None
) -> None:
    if usage is not None and not usage.key_cert_sign:
        raise ValueError(f"{_who(certificate)} may not sign certificates (keyUsage)")


def _is_for_signing_code(
    policy: verification.Policy, certificate: x509.Certificate, purposes: x509.ExtendedKeyUsage | None
) -> None:
    anything = ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE
    if purposes is not None and not {ExtendedKeyUsageOID.CODE_SIGNING, anything} & set(purposes):
        raise ValueError(f"{_who(certificate)} does not certify for signing code (extendedKeyUsage)")


# The library's own policy is that of the web: it would have authorities be for clients of servers.
_AUTHORITIES: Final = (
    verification.ExtensionPolicy.permit_all()
    .require_present(x509.BasicConstraints, verification.Criticality.AGNOSTIC, None)
    .may_be_present(x509.KeyUsage, verification.Criticality.AGNOSTIC, _signs_certificates)
    .may_be_present(x509.ExtendedKeyUsage, verification.Criticality.AGNOSTIC, _is_for_signing_code)
)


def parse_certificate(der: bytes, what: str) -> x509.Certificate:
    """A certificate, of which all that is asked later was found to be readable.

    Args:
        what: names it in errors.

    Raises:
        FormatError: it is malformed in any way.
    """
    with _told(f"{what} is not X.509 in DER"):
        certificate = x509.load_der_x509_certificate(der)
    _check_whole(certificate, what)
    return certificate


def key_of_certificate(der: bytes, what: str) -> PublicKey:
    """The key that a certificate is for, whoever issued it.

    Raises:
        FormatError: the certificate is malformed, or its key is on no curve that is signed on.
    """
    return _key_of(parse_certificate(der, what), f"the key in {what}")


@contextlib.contextmanager
def _told(problem: str) -> Iterator[None]:
    """Make a FormatError of whatever the library has to say of a certificate."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        # Which of its exceptions a malformed certificate comes to is nowhere promised: ValueError, TypeError,
        # InvalidVersion, DuplicateExtension and UnsupportedAlgorithm have been seen.
        text = str(error).partition("\n")[0][:200] or type(error).__name__
        raise FormatError(f"{problem}: {text}") from None


def _check_whole(certificate: x509.Certificate, what: str) -> None:
    """Ask for all that the library reads only when it is asked."""
    with _told(f"{what} is malformed"):
        for name in (certificate.subject, certificate.issuer):
            name.rfc4514_string()
        for each in certificate.extensions:
            repr(each.value)
        certificate.public_key()
        _ = certificate.signature_hash_algorithm, certificate.serial_number
        _ms(certificate.not_valid_before_utc), _ms(certificate.not_valid_after_utc)


def _parse(certificates: Sequence[bytes], what: str) -> list[x509.Certificate]:
    if not 1 <= len(certificates) <= _MAX_CERTIFICATES:
        raise FormatError(f"{what} has {len(certificates)} certificates; expected 1 to {_MAX_CERTIFICATES}")
    return [
        parse_certificate(der, f"certificate {position} of {what}")
        for position, der in enumerate(certificates)
    ]


def _key_of(certificate: x509.Certificate, what: str) -> PublicKey:
    with _told(f"{what} cannot be read"):
        der = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return PublicKey.from_der(der, what)


def _extension(certificate: x509.Certificate, kind: type[_Extension], what: str) -> _Extension | None:
    with _told(f"the certificate of {what} has a malformed extension"):
        return next((each.value for each in certificate.extensions if isinstance(each.value, kind)), None)


def _is_authority(certificate: x509.Certificate, what: str) -> bool:
    constraints = _extension(certificate, x509.BasicConstraints, what)
    return constraints is not None and constraints.ca


def _names(certificate: x509.Certificate, what: str) -> set[tuple[str, str]]:
    """The alternative names of the kinds that count, each behind its kind."""
    alternative = _extension(certificate, x509.SubjectAlternativeName, what)
    if alternative is None:
        return set()
    return {
        *(("uri", uri) for uri in alternative.get_values_for_type(x509.UniformResourceIdentifier)),
        *(("e-mail", address) for address in alternative.get_values_for_type(x509.RFC822Name)),
        *(("host", host.lower()) for host in alternative.get_values_for_type(x509.DNSName)),
    }


def _kind_and_name(name: str) -> tuple[str, str]:
    """Of which kind a name is, by its looks: no host is taken for an address, or an address for a URI."""
    if _URI.fullmatch(name):
        return "uri", name
    return ("e-mail", name) if "@" in name else ("host", name.lower())


def _who(certificate: x509.Certificate) -> str:
    """Whose certificate it is, for people; never an error, since it stands in those of others."""
    try:
        with _told("the subject cannot be read"):
            return repr(certificate.subject.rfc4514_string()[:120])
    except FormatError:
        return "a subject that cannot be read"


def _from(certificate: x509.Certificate) -> datetime:
    return certificate.not_valid_before_utc


def _ms(time: datetime) -> int:
    return int(time.timestamp()) * 1000


def _text(at_ms: int) -> str:
    try:
        return f"{datetime.fromtimestamp(at_ms // 1000, timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
    except (ValueError, OverflowError, OSError):
        return f"{at_ms} ms since 1970"
