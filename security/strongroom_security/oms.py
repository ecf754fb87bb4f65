"""OpenSSF Model Signing (OMS) v1.0: statements about folders, and the bundles that carry them signed.

The format is github.com/ossf/model-signing-spec, ``spec/v1.0.md``; its independent reader is the command
``model_signing``. A *statement* (in-toto v1) lists files by name and SHA-256, and its subject is one digest
over all of them; a *bundle* (Sigstore v0.3) wraps a statement, one signature over it, and either the id
of the key or a chain of certificates. What is written here follows the specification to the letter. What
is read is the part of it that says the same to every reader: method ``files``, SHA-256, names that are
safe to join to a root, each member known. The pure part does no I/O; `sign_folder` walks a folder.

Nothing here says whether a signature is right or whose it is: `strongroom_security.publickeys` and
`strongroom_security.certificates` do. Statements of other predicates (SLSA) are built, and not read.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strongroom.canonical import Bounds, Json, encode
from strongroom.errors import ConfigError, FormatError
from strongroom.layout import check_relative_path, collisions
from strongroom_security.dsse import PAYLOAD_TYPE, Envelope, pae
from strongroom_security.signers.base import Signer, sign_checked
from strongroom_security.strictjson import base64_of, list_of, load, members_of, text_of

__all__ = [
    "BUNDLE_BOUNDS",
    "GIT_PATHS",
    "MEDIA_TYPE",
    "SIGNATURE_PREDICATE",
    "STATEMENT_TYPE",
    "Bundle",
    "Statement",
    "attest",
    "decode_bundle",
    "decode_statement",
    "encode_bundle",
    "sign_folder",
    "sign_payload",
    "statement",
    "subject_digest",
]

SIGNATURE_PREDICATE: Final = "https://model_signing/signature/v1.0"
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
MEDIA_TYPE: Final = "application/vnd.dev.sigstore.bundle.v0.3+json"

GIT_PATHS: Final = (".git", ".gitattributes", ".github", ".gitignore")
"""What the format leaves out of every folder, at its root (``spec/v1.0.md``, 6.2)."""

_PAYLOAD_BOUNDS: Final = Bounds(length_bytes=48 << 20, depth=8, items=1_000_000)
"""Room for 100,000 files: a file takes 130 bytes and its name, 200 as the independent writer indents
it, and four members of JSON."""

BUNDLE_BOUNDS: Final = Bounds(length_bytes=65 << 20, depth=12, items=1_000)
"""A payload in base64 and the little around it; the depth is that of a transparency log's entry, so that
such a bundle is refused for what it is."""

_MAX_CERTIFICATES: Final = 10
_MAX_IGNORED: Final = 1_000
_MAX_NAME_CHARS: Final = 512
_SHA256_HEX = re.compile(r"[0-9a-f]{64}")
_SHA256_BYTES: Final = 32
_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What a signature says about a folder.

    Attributes:
        resources: the SHA-256 of each file, by its path under the folder, in the order of the list.
        subject: the digest over all of them, as found right; other statements name the folder by it.
        ignored: paths that the signer left out; whoever reads them reads what nobody signed.
    """

    resources: dict[str, bytes]
    subject: bytes
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A signed statement, as it lies in a file. Either there is a key's id, or there are certificates.

    Attributes:
        envelope: the payload and its signature.
        key_id: names the key that should verify it (`PublicKey.id`); a hint that nobody signed.
        certificates: in DER, the signer's first, then whose signed it.
    """

    envelope: Envelope
    key_id: str | None = None
    certificates: tuple[bytes, ...] = ()


def subject_digest(resources: Mapping[str, bytes]) -> bytes:
    """One digest over all files: SHA-256 over their digests, in the order of their names' code points.

    Args:
        resources: path under the folder to SHA-256, as 32 bytes.
    """
    return _digest_in_order([resources[name] for name in sorted(resources)])


def statement(
    resources: Mapping[str, bytes], *, subject: str = "data", ignored: Collection[str] = ()
) -> bytes:
    """The payload that says what a folder holds: compact JSON, its members sorted.

    Args:
        resources: path under the folder to SHA-256, as 32 bytes.
        subject: the folder's own name, for people.
        ignored: paths under the folder that were left out.

    Raises:
        FormatError: a name that is not safe to join to a root, two that some file system takes for one,
            a digest that is none, more than a reader takes, or nothing to sign.
    """
    _check_names(list(resources), "the statement")
    for name, digest in resources.items():
        if len(digest) != _SHA256_BYTES:
            raise FormatError(f"the digest of {name} has {len(digest)} bytes; SHA-256 has {_SHA256_BYTES}")
    for path in ignored:
        _check_ignored(path, "the statement", resources)
    serialization: dict[str, Json] = {"allow_symlinks": False, "hash_type": "sha256", "method": "files"}
    if ignored:
        serialization["ignore_paths"] = sorted(ignored)
    predicate = {
        # The specification orders by name; model_signing lists in any order that it is given.
        "resources": [
            {"algorithm": "sha256", "digest": resources[name].hex(), "name": name}
            for name in sorted(resources)
        ],
        "serialization": serialization,
    }
    return attest({subject: subject_digest(resources)}, SIGNATURE_PREDICATE, predicate)


def attest(subject: Mapping[str, bytes], predicate_type: str, predicate: Json) -> bytes:
    """The payload of an in-toto statement v1: compact JSON, its members sorted.

    Args:
        subject: what it is about: names, for people, and the SHA-256 of each, as 32 bytes. For a signed
            folder that is `subject_digest`.
        predicate_type: a URI, as ``https://slsa.dev/provenance/v1``.
        predicate: what is said of the subject; without fractions (`strongroom.canonical`).

    Raises:
        FormatError: no subject, a digest that is none, a predicate that has no canonical form, or more
            than a reader takes.
    """
    if not subject:
        raise FormatError("a statement is about something; expected a subject, got none")
    for name, digest in subject.items():
        if not name or len(digest) != _SHA256_BYTES:
            raise FormatError(
                f"the subject {name!r} has a digest of {len(digest)} bytes; expected a name, and "
                f"{_SHA256_BYTES} bytes of SHA-256"
            )
    return encode(
        {
            "_type": STATEMENT_TYPE,
            "predicate": predicate,
            "predicateType": predicate_type,
            "subject": [
                {"digest": {"sha256": digest.hex()}, "name": name} for name, digest in sorted(subject.items())
            ],
        },
        what="the statement",
        bounds=_PAYLOAD_BOUNDS,
    )


def decode_statement(payload: bytes, what: str) -> Statement:
    """Read the payload of a bundle whose signature was found right.

    Args:
        payload: as it was signed.
        what: names the bundle in errors.

    Raises:
        FormatError: not a statement about a folder's files by SHA-256; a member is missing, unknown or
            malformed; a name is listed twice, unsafe, out of order, or some file system takes it for
            another; the subject is not the digest of what is listed.
    """
    what = f"the statement of {what}"
    members = members_of(
        load(payload, what, _PAYLOAD_BOUNDS),
        what,
        required=("_type", "predicate", "predicateType", "subject"),
    )
    text_of(members["_type"], f"the type of {what}", expected=STATEMENT_TYPE)
    text_of(members["predicateType"], f"the predicate type of {what}", expected=SIGNATURE_PREDICATE)
    predicate = members_of(
        members["predicate"], f"the predicate of {what}", required=("resources", "serialization")
    )
    ignored = _read_serialization(predicate["serialization"], what)
    resources = _read_resources(predicate["resources"], what)
    for path in ignored:
        _check_ignored(path, what, resources)
    stated = _read_subject(members["subject"], what)
    found = _digest_in_order(list(resources.values()))
    if stated != found:
        raise FormatError(
            f"{what} is inconsistent: its subject is {stated.hex()}, and what it lists comes to {found.hex()}"
        )
    return Statement(resources=resources, subject=found, ignored=ignored)


def encode_bundle(
    payload: bytes,
    signature: bytes,
    *,
    key_id: str | None = None,
    certificates: Sequence[bytes] = (),
) -> bytes:
    """The bytes of a bundle: compact JSON, its members sorted.

    Args:
        payload: a statement.
        signature: ECDSA in DER, over the payload's `pae` of type `PAYLOAD_TYPE`.
        key_id: whose it is (`PublicKey.id`), or
        certificates: in DER: the signer's, then the one whose key signed that, and so on.

    Raises:
        ConfigError: neither a key's id nor certificates are given, or both are.
        FormatError: what a reader would refuse.
    """
    if (key_id is None) == (not certificates):
        raise ConfigError("a bundle names either a key's id or certificates; give exactly one of them")
    material: dict[str, Json] = {"tlogEntries": []}
    if key_id is not None:
        material["publicKey"] = {"hint": _check_key_id(key_id, "the bundle")}
    else:
        _check_count(certificates, "the bundle")
        material["x509CertificateChain"] = {
            "certificates": [{"rawBytes": base64.b64encode(der).decode("ascii")} for der in certificates]
        }
    envelope = Envelope(payload_type=PAYLOAD_TYPE, payload=payload, signature=signature)
    return encode(
        {"dsseEnvelope": envelope.to_json(), "mediaType": MEDIA_TYPE, "verificationMaterial": material},
        what="the bundle",
        bounds=BUNDLE_BOUNDS,
    )


def decode_bundle(data: bytes, what: str) -> Bundle:
    """Read a bundle; of its payload nothing is parsed before somebody has verified the signature.

    Args:
        data: the file's bytes.
        what: names the file in errors.

    Raises:
        FormatError: not a Sigstore bundle v0.3 with one signed in-toto statement and either a key's id
            or a chain of certificates; or malformed.
    """
    bundle = members_of(
        load(data, what, BUNDLE_BOUNDS), what, required=("dsseEnvelope", "mediaType", "verificationMaterial")
    )
    text_of(bundle["mediaType"], f"the media type of {what}", expected=MEDIA_TYPE)
    envelope = Envelope.from_json(bundle["dsseEnvelope"], f"the envelope of {what}")
    material = bundle["verificationMaterial"]
    key_id, certificates = _read_material(material, f"the verification material of {what}")
    return Bundle(envelope=envelope, key_id=key_id, certificates=certificates)


def sign_payload(payload: bytes, signer: Signer, *, within_s: float) -> bytes:
    """The bytes of a bundle over a statement, signed here and now.

    Args:
        payload: as `statement` or `attest` gives it.
        signer: its certificates are put in if it has any, and its key's id if not.
        within_s: how long whoever keeps the key may take.

    Raises:
        ConfigError, KeyServiceError, NoKeyError: as of `strongroom_security.signers.base.sign_checked`.
    """
    signature = sign_checked(signer, pae(PAYLOAD_TYPE, payload), within_s=within_s)
    if signer.certificates:
        return encode_bundle(payload, signature, certificates=signer.certificates)
    return encode_bundle(payload, signature, key_id=signer.public_key.id)


def sign_folder(folder: Path, signer: Signer, *, ignore: Collection[str] = (), within_s: float) -> bytes:
    """The bytes of a bundle over every file in a folder, as ``model_signing verify`` reads it.

    Args:
        folder: read whole; no link in it is followed.
        signer: who signs.
        ignore: paths under the folder that are left out, each with all below it, besides `GIT_PATHS`.
            The bundle's own path belongs here if it is to lie in the folder.
        within_s: how long whoever keeps the key may take.

    Raises:
        ConfigError: the folder is none, or cannot be read; it holds a link or a special file.
        FormatError: a name in it is not safe to join to a root, two of them are one to some file system,
            or there is nothing to sign.
        KeyServiceError, NoKeyError: as of `sign_payload`.
    """
    ignored = sorted({*GIT_PATHS, *ignore})
    try:
        paths = sorted(_files_under(folder, "", frozenset(ignored)))
        # Names are judged before anything is read: hashing a large folder takes minutes.
        _check_names(paths, str(folder))
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            digests = list(pool.map(lambda path: _sha256_of_file(folder / path), paths))
        name = folder.resolve().name or "model"
    except OSError as error:
        raise ConfigError(f"{folder} cannot be signed: {error}") from error
    resources = dict(zip(paths, digests, strict=True))
    return sign_payload(statement(resources, subject=name, ignored=ignored), signer, within_s=within_s)


# ------------------------------------------------------------------------------------------ statements


def _digest_in_order(digests: Sequence[bytes]) -> bytes:
    return hashlib.sha256(b"".join(digests)).digest()


def _read_subject(value: Json, what: str) -> bytes:
    subjects = list_of(value, f"the subject of {what}")
    if len(subjects) != 1:
        raise FormatError(f"{what} has {len(subjects)} subjects; expected the one folder that it is about")
    subject = members_of(subjects[0], f"the subject of {what}", required=("digest", "name"))
    if not text_of(subject["name"], f"the subject's name of {what}"):
        raise FormatError(f"the subject's name of {what} is empty")
    digests = members_of(subject["digest"], f"the subject's digest of {what}", required=("sha256",))
    return _hex_digest(digests["sha256"], f"the subject's digest of {what}")


def _read_serialization(value: Json, what: str) -> tuple[str, ...]:
    """What the statement left out, once it was found to be about whole files by SHA-256."""
    what = f"the serialization of {what}"
    members = members_of(
        value,
        what,
        required=("allow_symlinks", "hash_type", "method"),
        # Of the method "shards", which is then refused by its name.
        optional=("ignore_paths", "shard_size"),
    )
    text_of(members["method"], f"the method of {what}", expected="files")
    text_of(members["hash_type"], f"the hash type of {what}", expected="sha256")
    if "shard_size" in members:
        raise FormatError(f"{what} has a shard size, which the method 'files' has not")
    if members["allow_symlinks"] is not False:
        raise FormatError(f"{what} follows symbolic links, which no checkpoint holds; sign it without")
    ignored = list_of(members.get("ignore_paths", []), f"the ignored paths of {what}")
    if len(ignored) > _MAX_IGNORED:
        raise FormatError(f"{what} ignores {len(ignored)} paths; at most {_MAX_IGNORED} are read")
    return tuple(text_of(path, f"an ignored path of {what}") for path in ignored)


def _read_resources(value: Json, what: str) -> dict[str, bytes]:
    resources: dict[str, bytes] = {}
    for position, item in enumerate(list_of(value, f"the resources of {what}")):
        where = f"resource {position} of {what}"
        members = members_of(item, where, required=("algorithm", "digest", "name"))
        name = text_of(members["name"], f"the name of {where}")
        text_of(members["algorithm"], f"the algorithm of {where}", expected="sha256")
        if name in resources:
            raise FormatError(f"{what} lists {name[:80]!r} twice")
        resources[name] = _hex_digest(members["digest"], f"the digest of {where}")
    names = list(resources)
    _check_names(names, what)
    # The specification orders by code points, the independent writer by folders and then by them.
    if names != sorted(names) and names != sorted(names, key=lambda name: name.split("/")):
        raise FormatError(f"{what} does not list its resources in the order of their names")
    return resources


def _check_names(names: list[str], what: str) -> None:
    if not names:
        raise FormatError(f"{what} lists no file; expected one at least")
    for name in names:
        try:
            check_relative_path(name)
        except FormatError as error:
            raise FormatError(f"{what} lists a file by an unsafe name: {error}") from None
    twins = collisions(names)
    if twins:
        raise FormatError(
            f"{what} lists {twins[0][0]!r} and {twins[0][1]!r}, which some file systems take for one"
        )
    files = set(names)
    for name in names:
        folder = name.rpartition("/")[0]
        while folder:
            if folder in files:
                raise FormatError(f"{what} lists {folder!r} as a file, and {name!r} in it")
            folder = folder.rpartition("/")[0]


def _check_ignored(path: str, what: str, resources: Collection[str]) -> None:
    """Refuse what no reader could leave out in the same way (``spec/v1.0.md``, 6.2.1)."""
    parts = path.split("/")
    if (
        len(path) > _MAX_NAME_CHARS
        or any(part in ("", ".", "..") for part in parts)
        or not path.isprintable()
        or re.search(r"[\\*?\[]", path)
    ):
        raise FormatError(f"{what} ignores {path[:80]!r}; expected a path under the folder, without patterns")
    if path in resources or any(name.startswith(f"{path}/") for name in resources):
        raise FormatError(f"{what} both lists and ignores {path!r}")


def _hex_digest(value: Json, what: str) -> bytes:
    text = text_of(value, what)
    if not _SHA256_HEX.fullmatch(text):
        raise FormatError(f"{what} is {text[:80]!r}; expected 64 lower-case hex digits of SHA-256")
    return bytes.fromhex(text)


# --------------------------------------------------------------------------------------------- bundles


def _read_material(value: Json, what: str) -> tuple[str | None, tuple[bytes, ...]]:
    if isinstance(value, dict) and ("certificate" in value or value.get("tlogEntries")):
        raise FormatError(
            f"{what} rests on a transparency log (Fulcio, Rekor), which this release does not verify; it "
            f"verifies signatures of keys and of certificates under an authority of one's own"
        )
    members = members_of(
        value, what, required=(), optional=("publicKey", "tlogEntries", "x509CertificateChain")
    )
    list_of(members.get("tlogEntries", []), f"the log entries of {what}")  # none: refused above
    if ("publicKey" in members) == ("x509CertificateChain" in members):
        raise FormatError(
            f"{what} is to hold a public key's id or a chain of certificates; exactly one of them"
        )
    if "publicKey" in members:
        key = members_of(members["publicKey"], f"the public key of {what}", required=("hint",))
        return _check_key_id(text_of(key["hint"], f"the key's id of {what}"), what), ()
    chain = members_of(
        members["x509CertificateChain"], f"the certificates of {what}", required=("certificates",)
    )
    certificates = list_of(chain["certificates"], f"the certificates of {what}")
    _check_count(certificates, what)
    return None, tuple(
        base64_of(
            members_of(item, f"certificate {position} of {what}", required=("rawBytes",))["rawBytes"],
            f"certificate {position} of {what}",
        )
        for position, item in enumerate(certificates)
    )


def _check_key_id(key_id: str, what: str) -> str:
    if not _SHA256_HEX.fullmatch(key_id):
        raise FormatError(
            f"{what} names its key by {key_id[:80]!r}; expected 64 lower-case hex digits, the SHA-256 of the "
            f"key's PEM"
        )
    return key_id


def _check_count(certificates: Sequence[object], what: str) -> None:
    if not 1 <= len(certificates) <= _MAX_CERTIFICATES:
        raise FormatError(f"{what} holds {len(certificates)} certificates; expected 1 to {_MAX_CERTIFICATES}")


# --------------------------------------------------------------------------------------------- folders


def _files_under(folder: Path, prefix: str, ignored: Collection[str]) -> Iterator[str]:
    """Paths of regular files, relative to the folder that the walk began at."""
    # Asked of the folder itself: what it is a link to was never named by whoever signs.
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise ConfigError(f"{folder} is not a folder; no link to one is followed either")
    with os.scandir(folder) as entries:
        for entry in entries:
            path = f"{prefix}{entry.name}"
            if path in ignored:
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _files_under(folder / entry.name, f"{path}/", ignored)
            elif entry.is_file(follow_symlinks=False):
                yield path
            else:
                raise ConfigError(
                    f"{folder / entry.name} is a link or a special file, which cannot be signed; put the "
                    f"file itself there, or ignore {path!r}"
                )


def _sha256_of_file(path: Path) -> bytes:
    hasher = hashlib.sha256()
    # Without waiting: what was put at the file's place meanwhile may be a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{path} was replaced while its folder was being signed")
        buffer = bytearray(_CHUNK_BYTES)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            hasher.update(view[:count])
    return hasher.digest()
