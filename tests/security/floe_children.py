"""Seals many files in threads, forks and spawned processes at once, and tells every nonce that was used.

``python floe_children.py`` prints one line for each segment: where it was sealed, and digests of file
key, IV, segment key and nonce. Every file is sealed under the same file key and AAD, which the
product never does: what must not repeat then depends on nothing but what a sealer draws.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from strongroom_security import floe
from strongroom_security.secret import Secret

DEK = bytes(range(32))
PARAMETERS = floe.Parameters(segment_bytes=64, rotation_bits=2)
FILES = 20
PLAIN_BYTES = 32 * 9 + 1
"""Ten segments, under three segment keys."""
PROCESSES = 3

Line = tuple[str, str, str, str]


def short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


class Recording:
    """AES-GCM that tells what it was used with."""

    seen: list[tuple[bytes, bytes]] = []  # noqa: RUF012  (one list of the process: that is its point)

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._aead = AESGCM(key)

    def encrypt_into(self, nonce: bytes, data: Any, aad: bytes, target: Any) -> int:
        self.seen.append((self._key, nonce))
        return self._aead.encrypt_into(nonce, data, aad, target)


def seal_files(where: str) -> list[Line]:
    """Seal `FILES` files in each of two threads."""
    lines: list[Line] = []
    start = len(Recording.seen)
    floe.AESGCM = Recording  # type: ignore[misc,assignment]

    def work() -> None:
        for _ in range(FILES):
            sealer = floe.FloeSealer(Secret(DEK), b"aad", parameters=PARAMETERS)
            for _ in sealer.seal([bytes(PLAIN_BYTES)], length_bytes=PLAIN_BYTES):
                pass
            lines.append((where, "iv", short(DEK), short(sealer.header[10:42])))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines += [(where, "nonce", short(key), short(nonce)) for key, nonce in Recording.seen[start:]]
    return lines


def child(where: str, pipe: Connection) -> None:
    pipe.send(seal_files(where))


def main() -> list[Line]:
    lines = seal_files("before")
    started = []
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        for number in range(PROCESSES):
            ours, theirs = context.Pipe()
            process = context.Process(target=child, args=(f"{method} {number}", theirs))
            process.start()
            theirs.close()
            started.append((process, ours))
    lines += seal_files("beside")
    for process, pipe in started:
        lines += pipe.recv()
        process.join()
    return lines


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main()))
