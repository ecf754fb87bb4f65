"""Open a sealed checkpoint without Strongroom, by a private key and the package `cryptography` alone.

python break_glass.py CHECKPOINT-FOLDER PRIVATE-KEY NEW-FOLDER
"""

import base64
import contextlib
import hashlib
import json
import os
import struct
import sys
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric import mlkem, x25519
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, MLKEM768X25519PrivateKey, Suite
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand
from cryptography.hazmat.primitives.serialization import load_pem_private_key


def opened(path):
    if not (folder / path).is_file():  # a pipe would be waited for, for ever
        raise ValueError(f"{path} is not there, or is no file")
    return (folder / path).open("rb")


def document(path, pinned=None):
    data = opened(path).read(1 << 28)
    if pinned not in (None, "sha256:" + hashlib.sha256(data).hexdigest()):
        raise ValueError(f"{path} is not what COMMIT pins")
    return json.loads(data)


def fields(*texts):
    return b"".join(struct.pack(">I", len(text.encode())) + text.encode() for text in texts)


def private_key(data):
    if b"MLKEM768-X25519" not in data:
        key = load_pem_private_key(data, None)
        return key, KEM.X25519 if isinstance(key, x25519.X25519PrivateKey) else KEM.P256
    seed = hashlib.shake_256(base64.b64decode(b"".join(data.split(b"\n")[1:-2]))).digest(96)  # X-Wing's
    one, two = mlkem.MLKEM768PrivateKey.from_seed_bytes, x25519.X25519PrivateKey.from_private_bytes
    return MLKEM768X25519PrivateKey(one(seed[:64]), two(seed[64:])), KEM.MLKEM768_X25519


def unwrapped(text, *path):
    return suite.decrypt(base64.b64decode(text), private, fields("strongroom.v1 recipient", *names, *path))


def keys_of(keyring, at):  # the files' keys, as the recipient at that place in the keyring has them
    if keyring["wrap"] == "direct":
        return {key["path"]: unwrapped(key["wrapped"][at], key["path"]) for key in keyring["keys"]}
    hkdf = HKDF(SHA384(), 32, None, fields("strongroom.v1 wrap", *names))
    aead = AESGCM(hkdf.derive(unwrapped(keyring["recipients"][at]["wrapped"])))
    pairs = [(key["path"], base64.b64decode(key["wrapped"])) for key in keyring["keys"]]
    return {path: aead.decrypt(wrapped[:12], wrapped[12:], path.encode()) for path, wrapped in pairs}


def segment_keys(file, key):  # FLOE's, where the header that the manifest pins was made with this key
    header, aad = bytes.fromhex(file["header"]), fields("strongroom.v1", *names, file["path"])

    def derive(key, purpose, length):
        return HKDFExpand(SHA384(), length, header[:42] + purpose + aad).derive(key)

    if header != struct.pack(">BBII", 0, 0, 1 << 20, 32) + header[10:42] + derive(key, b"HEADER_TAG:", 32):
        raise InvalidTag
    message_key = derive(key, b"MESSAGE_KEY:", 48)
    return lambda turn: derive(message_key, b"DEK:" + struct.pack(">Q", turn << 20), 32)


def unlocked(generation):
    keyring = document(f"keyring/{generation}", commit["keyring"] if generation == "0001.json" else None)
    for at in range(len(keyring["recipients"])):
        with contextlib.suppress(Exception):  # it is another's, or made to stop whoever reads it
            keys = keys_of(keyring, at)
            return {file["path"]: segment_keys(file, keys[file["path"]]) for file in manifest["files"]}
    raise ValueError(f"{generation} has nothing for this private key that fits MANIFEST.json")


def open_file(file, segment_key, source, target):
    if source.read(74).hex() != file["header"] or source.seek(0, 2) != file["size"]:
        raise ValueError("its header or length is not what MANIFEST.json says")
    for number, start in enumerate(range(source.seek(74), file["size"], 1 << 20)):
        segment, aad = source.read(1 << 20), struct.pack(">Q?", number, start + (1 << 20) >= file["size"])
        target.write(AESGCM(segment_key(number >> 20)).decrypt(segment[4:16], segment[16:], aad))


sys.excepthook = lambda kind, error, _: sys.stderr.write(f"refused: {error} ({kind.__name__})\n")
folder, key_file, output = map(Path, sys.argv[1:])
commit = document("COMMIT")
manifest = document("data/MANIFEST.json", commit["manifest"])
names = [str(manifest[member]) for member in ("run", "launch", "step", "attempt")]
private, kem = private_key(key_file.read_bytes())
suite, keys, reasons = Suite(kem, KDF.HKDF_SHA256, AEAD.AES_256_GCM), None, ""
for generation in sorted(os.listdir(folder / "keyring"), reverse=True):
    try:
        keys = keys or unlocked(generation)
    except Exception as error:  # noqa: BLE001 - whatever stands in one keyring, another may open
        reasons += f"\n{generation}: {str(error) or type(error).__name__}"
if keys is None:
    sys.exit("refused: no keyring here holds, for this key, the keys that MANIFEST.json pins" + reasons)
output.mkdir(parents=True)
for file in manifest["files"]:
    target = output / file["path"].removesuffix(".floe").replace("/", "_")
    try:
        with opened(f"data/{file['path']}") as source, target.open("xb") as plain:
            open_file(file, keys[file["path"]], source, plain)
    except Exception as error:
        target.unlink(missing_ok=True)
        raise ValueError(f"{file['path']}: {str(error) or 'it is not what was sealed there'}") from error
