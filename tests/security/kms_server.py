"""Run as a program: moto's KMS, which also takes a hash where a hash is signed, as the real one does.

moto 5.2 hashes whatever it is given once more, ``MessageType`` DIGEST or not (KMS API reference, Sign).
"""

from __future__ import annotations

import sys
from threading import local
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from cryptography.hazmat.primitives.hashes import SHA256, SHA384, SHA512
from moto.kms.responses import KmsResponse
from moto.kms.utils import ECDSAPrivateKey
from moto.server import main

_ALGORITHMS = {"ECDSA_SHA_256": SHA256, "ECDSA_SHA_384": SHA384, "ECDSA_SHA_512": SHA512}

_request = local()
_respond, _sign = KmsResponse.sign, ECDSAPrivateKey.sign


def respond(self: Any) -> str:
    _request.is_of_digest = self._get_param("MessageType") == "DIGEST"
    return _respond(self)


def sign(self: Any, message: bytes, signing_algorithm: str) -> bytes:
    if not _request.is_of_digest:
        return _sign(self, message, signing_algorithm)
    return bytes(self.private_key.sign(message, ec.ECDSA(Prehashed(_ALGORITHMS[signing_algorithm]()))))


KmsResponse.sign, ECDSAPrivateKey.sign = respond, sign

if __name__ == "__main__":
    main(sys.argv[1:])
