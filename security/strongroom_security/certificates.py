"""Certificates under an authority of one's own: whose key signed, and when its certificate was valid.

An `Authority` is roots and names: whoever has a certificate from one of the roots, for signing, in one of
the names, is trusted as one key would be. Chains are built and verified by ``cryptography``; what is
decided here is what the certificates have to say. Nobody is asked whether one was revoked: a trust list
does that by key. Certificates out of Sigstore's public authority, which live for minutes and lean on a
transparency log, are not verified.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import verification
from cryptography.x509.oid import ExtendedKeyUsageOID

from strongroom.errors import ConfigError, FormatError, UntrustedError
from strongroom_security.fields import encode_fields
from strongroom_security.publickeys import PublicKey

__all__ = ["Authority"]

_MAX_ROOTS: Final = 100
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
            if not _is_authority(root):
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
            ConfigError: there is no such file, or no certificates in it.
        """
        if isinstance(source, Path):
            uri = f"file:{source}"
            try:
                pem = source.read_bytes()
            except OSError as error:
                raise ConfigError(
                    f"{source}, of an authority's certificates, cannot be read: {error}"
                ) from error
        else:
            uri, pem = "an authority's certificates", source.encode("utf-8", "replace")
        try:
            roots = tuple(x509.load_pem_x509_certificates(pem))
        except ValueError as error:
            raise ConfigError(f"{uri} holds no certificates in PEM: {error}") from None
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
                signer's is not for signing code, or in no name that counts.
            FormatError: one is malformed, or its key is on no curve that is signed on.
        """
        chain = _parse(certificates, what)
        signer = chain[0]
        key = _key_of(signer, what)
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
        verifier = (
            verification.PolicyBuilder()
            .store(verification.Store(list(self.roots)))
            .time(at)
            .extension_policies(ca_policy=_AUTHORITIES, ee_policy=verification.ExtensionPolicy.permit_all())
            .build_client_verifier()
        )
        try:
            verifier.verify(chain[0], chain[1:])
        except (verification.VerificationError, ValueError, UnsupportedAlgorithm) as error:
            return str(error).partition("\n")[0][:200]
        return None

    def _check_usage(self, signer: x509.Certificate, what: str) -> None:
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


def _parse(certificates: Sequence[bytes], what: str) -> list[x509.Certificate]:
    if not 1 <= len(certificates) <= _MAX_CERTIFICATES:
        raise FormatError(f"{what} has {len(certificates)} certificates; expected 1 to {_MAX_CERTIFICATES}")
    parsed = []
    for position, der in enumerate(certificates):
        try:
            parsed.append(x509.load_der_x509_certificate(der))
        except (ValueError, x509.InvalidVersion) as error:
            raise FormatError(f"certificate {position} of {what} is not X.509 in DER: {error}") from None
    return parsed


def _key_of(certificate: x509.Certificate, what: str) -> PublicKey:
    what = f"the key in the signer's certificate of {what}"
    try:
        der = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise FormatError(f"{what} cannot be read: {error}") from None
    return PublicKey.from_der(der, what)


def _extension(certificate: x509.Certificate, kind: type[_Extension], what: str) -> _Extension | None:
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise FormatError(f"the signer's certificate of {what} has a malformed extension: {error}") from None


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError, x509.DuplicateExtension):
        return False


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
    try:
        return repr(certificate.subject.rfc4514_string()[:120])
    except ValueError:
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
