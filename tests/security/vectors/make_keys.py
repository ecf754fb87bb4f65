"""Writes ``keys/``: ``python tests/security/vectors/make_keys.py``. The same bytes each time.

It follows `docs/format.md`, RFC 5869, RFC 9180 and X-Wing by the letter, and shares nothing with the
product. Everything that is random elsewhere is derived from a label here, but for one thing: the library
draws what ML-KEM encapsulates, so that the ciphertext is taken from the vector that stands.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

FOLDER = Path(__file__).parent / "keys"

RUN, LAUNCH, STEP, ATTEMPT = "run-7f", 3, 1200, "0123456789abcdef"
NAMES = (RUN, str(LAUNCH), str(STEP), ATTEMPT)
PATHS = ("00000-00.safetensors.floe", "index.safetensors.floe", "state.json.floe")
FORMAT = "0.1"

X25519, P256, X_WING = 0x0020, 0x0010, 0x647A
"""IANA's numbers of the KEMs; of the KDF and the AEAD: HKDF-SHA256 1, AES-256-GCM 2."""
X_WING_LABEL = rb"\.//^" + b"\\"


def drawn(label: str, length: int = 32) -> bytes:
    """Stands in for randomness, so that a vector can be made again."""
    return hashlib.sha256(f"strongroom vector: {label}".encode()).digest()[:length]


CHECKPOINT_KEY = drawn("checkpoint key")
FILE_KEYS = {path: drawn(f"key of {path}") for path in PATHS}


def fields(*texts: str) -> bytes:
    return b"".join(len(text).to_bytes(4, "big") + text.encode() for text in texts)


def extract(digest: str, salt: bytes, ikm: bytes) -> bytes:
    return hmac.digest(salt or bytes(hashlib.new(digest).digest_size), ikm, digest)


def expand(digest: str, prk: bytes, info: bytes, length: int) -> bytes:
    """RFC 5869, for no more than one block."""
    return hmac.digest(prk, info + b"\1", digest)[:length]


def sealed_under(key: bytes, nonce: bytes, plain: bytes, aad: bytes) -> bytes:
    return nonce + AESGCM(key).encrypt(nonce, plain, aad)


def opaque_id(kind: str, *names: bytes) -> str:
    parts = (b"strongroom.v1 id", kind.encode(), *names)
    hashed = hashlib.sha256(b"".join(len(part).to_bytes(4, "big") + part for part in parts)).hexdigest()
    return f"{kind}-{hashed[:32]}"


# HPKE: RFC 9180, base mode, one shot


def labeled_extract(suite: bytes, salt: bytes, label: bytes, ikm: bytes) -> bytes:
    return extract("sha256", salt, b"HPKE-v1" + suite + label + ikm)


def labeled_expand(suite: bytes, prk: bytes, label: bytes, info: bytes, length: int) -> bytes:
    return expand("sha256", prk, length.to_bytes(2, "big") + b"HPKE-v1" + suite + label + info, length)


def scheduled(kem: int, shared: bytes, info: bytes, plain: bytes) -> bytes:
    """The ciphertext, from the KEM's shared secret."""
    suite = b"HPKE" + kem.to_bytes(2, "big") + b"\0\1" + b"\0\2"
    context = (
        b"\0"
        + labeled_extract(suite, b"", b"psk_id_hash", b"")
        + labeled_extract(suite, b"", b"info_hash", info)
    )
    secret = labeled_extract(suite, shared, b"secret", b"")
    key = labeled_expand(suite, secret, b"key", context, 32)
    nonce = labeled_expand(suite, secret, b"base_nonce", context, 12)
    return AESGCM(key).encrypt(nonce, plain, b"")


def dhkem(kem: int, agreed: bytes, enc: bytes, public: bytes) -> bytes:
    suite = b"KEM" + kem.to_bytes(2, "big")
    prk = labeled_extract(suite, b"", b"eae_prk", agreed)
    return labeled_expand(suite, prk, b"shared_secret", enc + public, 32)


def point(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
    )


def p256_key(label: str) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(int.from_bytes(drawn(label), "big") >> 1, ec.SECP256R1())


def sealed_to_p256(private: ec.EllipticCurvePrivateKey, info: bytes, plain: bytes, label: str) -> bytes:
    ephemeral = p256_key(label)
    enc = point(ephemeral)
    agreed = ephemeral.exchange(ec.ECDH(), private.public_key())
    return enc + scheduled(P256, dhkem(P256, agreed, enc, point(private)), info, plain)


def sealed_to_x25519(private: X25519PrivateKey, info: bytes, plain: bytes, label: str) -> bytes:
    ephemeral = X25519PrivateKey.from_private_bytes(drawn(label))
    enc, public = ephemeral.public_key().public_bytes_raw(), private.public_key().public_bytes_raw()
    agreed = ephemeral.exchange(private.public_key())
    return enc + scheduled(X25519, dhkem(X25519, agreed, enc, public), info, plain)


def hybrid_halves(seed: bytes) -> tuple[MLKEM768PrivateKey, X25519PrivateKey]:
    expanded = hashlib.shake_256(seed).digest(96)
    return MLKEM768PrivateKey.from_seed_bytes(expanded[:64]), X25519PrivateKey.from_private_bytes(
        expanded[64:]
    )


def sealed_to_hybrid(seed: bytes, info: bytes, plain: bytes, label: str, standing: bytes | None) -> bytes:
    mlkem, x25519 = hybrid_halves(seed)
    if standing is None:
        shared, ciphertext = mlkem.public_key().encapsulate()
    else:
        ciphertext = standing[:1088]
        shared = mlkem.decapsulate(ciphertext)
    ephemeral = X25519PrivateKey.from_private_bytes(drawn(label))
    share, public = ephemeral.public_key().public_bytes_raw(), x25519.public_key().public_bytes_raw()
    agreed = ephemeral.exchange(x25519.public_key())
    combined = hashlib.sha3_256(shared + agreed + share + public + X_WING_LABEL).digest()
    return ciphertext + share + scheduled(X_WING, combined, info, plain)


# The vectors


def context(path: str | None = None) -> dict[str, object]:
    return {"run": RUN, "launch": LAUNCH, "step": STEP, "attempt": ATTEMPT, "path": path}


RECIPIENT_INFO = fields("strongroom.v1 recipient", *NAMES)
WRAPPING_KEY = expand(
    "sha384", extract("sha384", b"", CHECKPOINT_KEY), fields("strongroom.v1 wrap", *NAMES), 32
)


def wrapped_file_key(path: str) -> bytes:
    return sealed_under(WRAPPING_KEY, drawn(f"nonce of {path}", 12), FILE_KEYS[path], path.encode())


def hkdf_wrapping_key() -> dict[str, object]:
    return {
        "what": "the key that wraps files' keys: HKDF-SHA-384 of the checkpoint's key, without salt",
        "context": context(),
        "checkpoint_key": CHECKPOINT_KEY.hex(),
        "info": fields("strongroom.v1 wrap", *NAMES).hex(),
        "pseudorandom_key": extract("sha384", b"", CHECKPOINT_KEY).hex(),
        "wrapping_key": WRAPPING_KEY.hex(),
    }


def wrap_file_key() -> dict[str, object]:
    return {
        "what": "a file's key under the checkpoint's: nonce, AES-256-GCM with the path as associated data",
        "context": context(PATHS[0]),
        "checkpoint_key": CHECKPOINT_KEY.hex(),
        "file_key": FILE_KEYS[PATHS[0]].hex(),
        "wrapped": wrapped_file_key(PATHS[0]).hex(),
    }


def wrapped_by_file(key: bytes, info: bytes, label: str) -> bytes:
    return sealed_under(drawn("key file"), drawn(label, 12), key, info)


def file_recipient() -> dict[str, object]:
    kek = drawn("key file")
    named = expand("sha384", extract("sha384", b"", kek), b"strongroom.v1 file id", 32)
    words = (
        "# Strongroom key file: the next line opens every checkpoint that was sealed to it. Keep it secret."
    )
    return {
        "what": "the checkpoint's key, wrapped by a key file",
        "context": context(),
        "key_file": f"{words}\n{base64.b64encode(kek).decode()}\n",
        "id": opaque_id("file", named),
        "kind": "file",
        "key": CHECKPOINT_KEY.hex(),
        "wrapped": wrapped_by_file(CHECKPOINT_KEY, RECIPIENT_INFO, "nonce of key file").hex(),
    }


def pem(private: X25519PrivateKey | ec.EllipticCurvePrivateKey) -> tuple[str, str]:
    encoding = serialization.Encoding.PEM
    return (
        private.private_bytes(
            encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode(),
        private.public_key().public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo).decode(),
    )


def armoured(half: str, raw: bytes) -> str:
    text = base64.b64encode(raw).decode()
    lines = [text[start : start + 64] for start in range(0, len(text), 64)]
    label = f"MLKEM768-X25519 {half} KEY"
    return "\n".join([f"-----BEGIN {label}-----", *lines, f"-----END {label}-----", ""])


def hpke_recipient(
    suite: str, keys: tuple[str, str], public: bytes, wrapped: bytes
) -> tuple[str, dict[str, object]]:
    kind = f"hpke-{suite}"
    return f"wrap-recipient-{kind}", {
        "what": f"the checkpoint's key, sealed to a public key of {suite}",
        "context": context(),
        "private_key": keys[0],
        "public_key": keys[1],
        "id": opaque_id(kind, public),
        "kind": kind,
        "key": CHECKPOINT_KEY.hex(),
        "wrapped": wrapped.hex(),
    }


def hpke_recipients() -> Iterator[tuple[str, dict[str, object]]]:
    x25519 = X25519PrivateKey.from_private_bytes(drawn("x25519"))
    wrapped = sealed_to_x25519(x25519, RECIPIENT_INFO, CHECKPOINT_KEY, "ephemeral x25519")
    yield hpke_recipient("x25519", pem(x25519), x25519.public_key().public_bytes_raw(), wrapped)

    p256 = p256_key("p256")
    wrapped = sealed_to_p256(p256, RECIPIENT_INFO, CHECKPOINT_KEY, "ephemeral p256")
    yield hpke_recipient("p256", pem(p256), point(p256), wrapped)

    seed = drawn("hybrid")
    first, second = hybrid_halves(seed)
    public = first.public_key().public_bytes_raw() + second.public_key().public_bytes_raw()
    standing = FOLDER / "wrap-recipient-hpke-mlkem768-x25519.json"
    old = bytes.fromhex(json.loads(standing.read_text())["wrapped"]) if standing.exists() else None
    wrapped = sealed_to_hybrid(seed, RECIPIENT_INFO, CHECKPOINT_KEY, "ephemeral hybrid", old)
    keys = armoured("PRIVATE", seed), armoured("PUBLIC", public)
    yield hpke_recipient("mlkem768-x25519", keys, public, wrapped)


def handover() -> dict[str, object]:
    private = p256_key("one-off")
    packed = (1).to_bytes(4, "big")
    for path in PATHS:
        packed += len(path).to_bytes(4, "big") + path.encode() + FILE_KEYS[path]
    return {
        "what": "files' keys, sealed to another rank's one-off key",
        "context": context(),
        "private_scalar": private.private_numbers().private_value.to_bytes(32, "big").hex(),
        "public": point(private).hex(),
        "generation": 1,
        "keys": {path: key.hex() for path, key in FILE_KEYS.items()},
        "handed": sealed_to_p256(
            private, fields("strongroom.v1 handover", *NAMES), packed, "ephemeral handover"
        ).hex(),
    }


def canonical(value: object) -> bytes:
    """RFC 8785, for members in ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def keyring(made: dict[str, dict[str, object]], *, is_direct: bool) -> dict[str, object]:
    entries = sorted(
        (vector for name, vector in made.items() if name.startswith("wrap-recipient-")),
        key=lambda vector: str(vector["id"]),
    )
    recipients = [
        {
            "id": entry["id"],
            "kind": entry["kind"],
            "wrapped": base64.b64encode(bytes.fromhex(str(entry["wrapped"]))).decode(),
        }
        for entry in entries
    ]
    keys: list[dict[str, object]] = [
        {"path": path, "wrapped": base64.b64encode(wrapped_file_key(path)).decode()} for path in PATHS
    ]
    if is_direct:
        recipients = [{"id": entry["id"], "kind": "file"} for entry in entries if entry["kind"] == "file"]
        for key in keys:
            path = str(key["path"])
            info = fields("strongroom.v1 recipient", *NAMES, path)
            wrapped = wrapped_by_file(FILE_KEYS[path], info, f"direct nonce of {path}")
            key["wrapped"] = [base64.b64encode(wrapped).decode()]
    document: dict[str, object] = {
        "attempt": ATTEMPT,
        "created_at_ms": 1_700_000_000_000,
        "format": FORMAT,
        "generation": 1,
        "keys": keys,
        "kind": "keyring",
        "launch": LAUNCH,
        "previous": None,
        "recipients": recipients,
        "run": RUN,
        "step": STEP,
        "wrap": "direct" if is_direct else "checkpoint",
    }
    digest = "sha256:" + hashlib.sha256(canonical(document)).hexdigest()
    return {
        "what": "a keyring; its recipients are those of the other vectors",
        "keys": {path: key.hex() for path, key in FILE_KEYS.items()},
        "document": canonical({**document, "~digest": digest}).decode(),
    }


def all_vectors() -> dict[str, dict[str, object]]:
    made = {
        "hkdf-wrapping-key": hkdf_wrapping_key(),
        "wrap-file-key": wrap_file_key(),
        "wrap-recipient-file": file_recipient(),
        **dict(hpke_recipients()),
        "handover": handover(),
    }
    return {
        **made,
        "keyring": keyring(made, is_direct=False),
        "keyring-direct": keyring(made, is_direct=True),
    }


def encoded(made: dict[str, object]) -> str:
    return json.dumps(made, indent=1) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, made in all_vectors().items():
        (FOLDER / f"{name}.json").write_text(encoded(made))
