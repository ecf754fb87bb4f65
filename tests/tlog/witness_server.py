"""A witness by C2SP tlog-witness, over real HTTP: what it knows it keeps in memory."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from strongroom.errors import IntegrityError
from strongroom_security.tlog.merkle import check_consistency
from strongroom_security.tlog.notekeys import KeyType, VerifierKey
from strongroom_security.tlog.notes import NoteSignature

STAMP_S = 1_700_000_000


class WitnessServer:
    """Cosigns what one log shows it, each tree only if it is the one before, grown.

    Args:
        name: its key's.
        log_name, log_public: whose heads it cosigns: origin and Ed25519 key.
        lie: changes a status and a body before they are sent.
    """

    def __init__(
        self,
        name: str,
        log_name: str,
        log_public: bytes,
        *,
        lie: Callable[[int, bytes], tuple[int, bytes]] | None = None,
    ) -> None:
        self._private = Ed25519PrivateKey.generate()
        self.key = VerifierKey(
            name=name, type=KeyType.COSIGNATURE, public=self._private.public_key().public_bytes_raw()
        )
        self._log_name = log_name
        self._log_public = Ed25519PublicKey.from_public_bytes(log_public)
        self._lock = threading.Lock()
        self.size = 0
        self.root = b""
        self.asked: list[int] = []
        self.lie = lie
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, answer = owner._answer(self.path, body)
                owner.asked.append(status)
                if owner.lie is not None:
                    status, answer = owner.lie(status, answer)
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_request(self, code: object = "-", size: object = "-") -> None:
                """Nothing on standard error."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/witness"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def _answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        if path != "/witness/add-checkpoint":
            return 404, b""
        request, _, note = body.partition(b"\n\n")
        text, _, signatures = note.rpartition(b"\n\n")
        text += b"\n"
        lines = request.decode("ascii").split("\n")
        if not lines[0].startswith("old ") or len(lines) > 64:
            return 400, b""
        old, proof = int(lines[0][4:]), [base64.b64decode(line, validate=True) for line in lines[1:]]
        origin, size_text, root_text = text.decode().split("\n")[:3]
        size, root = int(size_text), base64.b64decode(root_text)
        if origin != self._log_name:
            return 404, b"unknown log"
        if not self._is_signed(text, signatures.decode()):
            return 403, b"not signed"
        if old > size:
            return 400, b""
        with self._lock:
            if old != self.size:
                return 409, b"%d\n" % self.size
            try:
                check_consistency(old_size=old, old_root=self.root, size=size, root=root, proof=proof)
            except IntegrityError:
                if old or proof:
                    return 422, b"not consistent"
            self.size, self.root = size, root
        return 200, self._cosign(text.decode()).line().encode()

    def _is_signed(self, text: bytes, signatures: str) -> bool:
        for line in signatures.rstrip("\n").split("\n"):
            value = base64.b64decode(line.rpartition(" ")[2])[4:]
            try:
                self._log_public.verify(value, text)
                return True
            except InvalidSignature:
                continue
        return False

    def _cosign(self, text: str) -> NoteSignature:
        message = f"cosignature/v1\ntime {STAMP_S}\n{text}".encode()
        value = STAMP_S.to_bytes(8, "big") + self._private.sign(message)
        return NoteSignature(name=self.key.name, key_id=self.key.key_id, value=value)
