"""Check a proof of Strongroom's audit log without Strongroom. It needs Python and the package cryptography.

    python check_audit_proof.py PROOF LOG-KEY [WITNESS-KEY ...]

LOG-KEY is what `strongroom audit keygen` printed. Every WITNESS-KEY named has to have cosigned. The event is
printed once all of it holds (C2SP tlog-proof, tlog-checkpoint, signed-note, tlog-cosignature; RFC 6962).
"""

import re
import sys
from base64 import b64decode, b64encode
from hashlib import sha256
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519


def bytes_of(text):
    data = b64decode(text, validate=True)
    return data if b64encode(data).decode() == text else sys.exit("base64 that is not spelled in its one way")


def check_signature(note, signatures, vkey):
    """Exit unless signatures are by this key, and each that says so is, over the note."""
    name, key_id, public = vkey.split("+", 2)
    kind, public = bytes_of(public)[0], bytes_of(public)[1:]
    parts = [(dash, who, bytes_of(value)) for dash, who, value in (each.split(" ") for each in signatures)]
    ours = ("\u2014", name, key_id)
    values = [value[4:] for dash, who, value in parts if (dash, who, value[:4].hex()) == ours]
    for value in values or sys.exit(f"not signed by {name} ({key_id})"):
        if kind == 2:  # ECDSA
            serialization.load_der_public_key(public).verify(value, note, ec.ECDSA(hashes.SHA256()))
        elif kind == 1 or (kind == 4 and any(value[:8])):  # a witness's: it says when
            when = b"" if kind == 1 else b"cosignature/v1\ntime %d\n" % int.from_bytes(value[:8], "big")
            ed25519.Ed25519PublicKey.from_public_bytes(public).verify(value[8 if when else 0 :], when + note)
        else:
            sys.exit(f"a key or a signature of another kind: {vkey}")


def root_of(entry, index, size, path):
    """The root to which a path leads (RFC 9162, 2.1.3.2)."""
    found, last, path = sha256(b"\x00" + entry).digest(), size - 1, list(path)
    while last > 0:
        if index & 1 or index < last:  # else it has no sibling on this level
            step = path.pop(0)
            found = sha256(b"\x01" + (step + found if index & 1 else found + step)).digest()
        index, last = index >> 1, last >> 1
    return found if not path else sys.exit("the path is too long")


def main(file, log_key, *witness_keys):
    head, note, signatures = Path(file).read_bytes().decode().split("\n\n")
    kind, extra, index, *path = head.split("\n")
    origin, size, root = note.split("\n")[:3]
    named = ("c2sp.org/tlog-proof@v1", "extra ", "index ", log_key.split("+")[0])
    if (kind, extra[:6], index[:6], origin) != named:
        sys.exit("no proof of this log")
    numbers = [re.fullmatch("0|[1-9][0-9]{0,18}", each) for each in (index[6:], size)]
    if not all(numbers) or signatures[-1:] != "\n":
        sys.exit("a number or an end that is not spelled in its one way")
    for key in (log_key, *witness_keys):
        check_signature(f"{note}\n".encode(), signatures[:-1].split("\n"), key)
    entry, index, size = bytes_of(extra[6:]), int(index[6:]), int(size)
    if not 0 <= index < size or root_of(entry, index, size, map(bytes_of, path)) != bytes_of(root):
        sys.exit("the entry is not in the log's tree")
    sys.stdout.write(f"entry {index} of {size} of {origin}:\n{entry.decode()}\n")


try:
    main(*sys.argv[1:])
except (InvalidSignature, ValueError, IndexError, TypeError) as error:
    sys.exit(f"the proof does not hold: {type(error).__name__}: {error}")
