"""Signed checkpoints for the tests, written by hand, so that anything about them can be made wrong."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from strongroom import layout
from strongroom.digest import DigestAlgorithm, digest_of_bytes, sha256_of
from strongroom.layout import CheckpointName
from strongroom.manifest import CheckpointRef, Commit, FileRecord, Launch, LaunchSignature, Manifest
from strongroom.stores.base import Store
from strongroom_security import oms
from strongroom_security.dsse import pae
from strongroom_security.publickeys import PublicKey
from strongroom_security.signers.file import FileSigner
from strongroom_security.signing import LAUNCH_TYPE, resources_of

__all__ = [
    "AT_MS", "RUN", "Certifier", "Written", "bundle", "key_of", "launch", "line", "name_of", "private",
    "signer", "write",
]  # fmt: skip

RUN = "run-a"
AT_MS = 1_800_000_000_000
"""January 2027: when the checkpoints say that they were made."""

FILES: Mapping[str, bytes] = {
    "00000-00.safetensors": b"weights",
    "index.safetensors": b"index",
    "state.json": b"{}",
}


@cache
def private(name: str, curve: str = "P-256") -> ec.EllipticCurvePrivateKey:
    """A key that is the same wherever a test names it."""
    kind: ec.EllipticCurve = ec.SECP256R1() if curve == "P-256" else ec.SECP384R1()
    return ec.derive_private_key(
        int.from_bytes(sha256_of(f"{name} {curve}".encode()).value[:31], "big"), kind
    )


def signer(name: str, curve: str = "P-256", *, certificates: tuple[bytes, ...] = ()) -> FileSigner:
    return FileSigner(private(name, curve), uri=f"file:{name}.pem", certificates=certificates)


def key_of(name: str, curve: str = "P-256") -> PublicKey:
    return PublicKey.of(private(name, curve).public_key())


def name_of(launch: int, step: int) -> CheckpointName:
    return CheckpointName(
        launch=launch, step=step, attempt=sha256_of(f"{launch} {step}".encode()).value.hex()[:16]
    )


def bundle(payload: bytes, by: FileSigner, *, hint: str | None = None) -> bytes:
    """What a key has signed, and says so truly or not."""
    signature = by.sign(pae("application/vnd.in-toto+json", payload), within_s=9)
    if by.certificates and hint is None:
        return oms.encode_bundle(payload, signature, certificates=by.certificates)
    return oms.encode_bundle(payload, signature, key_id=hint or by.public_key.id)


@dataclass(frozen=True, kw_only=True)
class Written:
    """A checkpoint that stands in a store."""

    store: Store
    commit: Commit
    manifest: Manifest

    @property
    def data(self) -> bytes:
        return self.manifest.encode()

    @property
    def payload(self) -> bytes:
        """What a signature over it says."""
        return oms.statement(resources_of(self.data, self.manifest.files))

    def sign(self, by: FileSigner, **options: Any) -> bytes:
        return bundle(self.payload, by, **options)

    def add(self, data: bytes, key_id: str) -> None:
        """Put a further signature beside it."""
        self.store.put(layout.further_signature_key(self.commit.name, key_id), data)


def write(
    store: Store,
    by: FileSigner | None,
    *,
    run: str = RUN,
    launch: int = 1,
    step: int = 10,
    parent: CheckpointRef | None = None,
    created_at_ms: int = AT_MS,
    algorithm: DigestAlgorithm = "sha256",
    files: Mapping[str, bytes] = FILES,
    signature: bytes | None = None,
) -> Written:
    """Write a whole checkpoint.

    Args:
        by: whose signature the commit pins; None: nobody's.
        signature: the bytes of ``signature.json``, whatever they are.
    """
    name = name_of(launch, step)
    for path, data in files.items():
        store.put(layout.data_key(name, path), data)
    manifest = Manifest(
        run=run,
        name=name,
        parent=parent,
        created_at_ms=created_at_ms,
        algorithm=algorithm,
        world_size=1,
        files=tuple(
            FileRecord(path=path, size_bytes=len(data), digest=digest_of_bytes(algorithm, data))
            for path, data in sorted(files.items())
        ),
    )
    store.put(layout.data_key(name, layout.MANIFEST), manifest.encode())
    if signature is None and by is not None:
        signature = bundle(oms.statement(resources_of(manifest.encode(), manifest.files)), by)
    if signature is not None:
        store.put(layout.signature_key(name), signature)
    commit = Commit(
        run=run,
        name=name,
        manifest=sha256_of(manifest.encode()),
        size_bytes=manifest.size_bytes,
        committed_at_ms=created_at_ms,
        signature=None if signature is None else sha256_of(signature),
    )
    store.put_if_absent(name.commit_key, commit.encode())
    return Written(store=store, commit=commit, manifest=manifest)


def line(store: Store, by: FileSigner, positions: Sequence[tuple[int, int]], **options: Any) -> list[Written]:
    """Checkpoints, each the parent of the next."""
    written: list[Written] = []
    for number, step in positions:
        parent = written[-1].commit.ref if written else None
        written.append(write(store, by, launch=number, step=step, parent=parent, **options))
    return written


def launch(by: FileSigner | None, number: int = 1, *, run: str = RUN, created_at_ms: int = AT_MS) -> Launch:
    unsigned = Launch(run=run, launch=number, parent=None, created_at_ms=created_at_ms, deadline_s=600)
    if by is None:
        return unsigned
    return Launch(
        run=run,
        launch=number,
        parent=None,
        created_at_ms=created_at_ms,
        deadline_s=600,
        signature=LaunchSignature(
            key_id=by.public_key.id,
            value=by.sign(pae(LAUNCH_TYPE, unsigned.to_be_signed), within_s=9),
            certificates=by.certificates,
        ),
    )


class Certifier:
    """An authority's own side: it issues certificates for signing code, all of 2027 by default."""

    def __init__(self, name: str = "authority") -> None:
        self._key = private(name)
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.root = (
            self._builder(self._key, self._subject, 2020, 2040)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = self.root.public_bytes(Encoding.PEM).decode("ascii")

    def signer(
        self, name: str, *, uri: str = "spiffe://example.org/trainer", until: int = 2028
    ) -> FileSigner:
        """A signer with a certificate."""
        key = private(name)
        issued = (
            self._builder(key, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), 2027, until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.KeyUsage(
                    digital_signature=True, content_commitment=False, key_encipherment=False,
                    data_encipherment=False, key_agreement=False, key_cert_sign=False, crl_sign=False,
                    encipher_only=False, decipher_only=False,
                ),
                critical=True,
            )
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )  # fmt: skip
        return signer(name, certificates=(issued.public_bytes(Encoding.DER),))

    def _builder(
        self, key: ec.EllipticCurvePrivateKey, subject: x509.Name, first: int, last: int
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(dt.datetime(first, 1, 1, tzinfo=dt.timezone.utc))
            .not_valid_after(dt.datetime(last, 1, 1, tzinfo=dt.timezone.utc))
        )
