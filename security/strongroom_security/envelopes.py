"""Documents that several people sign, one after the other: a DSSE envelope of our own canonical bytes.

Who may sign, and how many have to, is the document's own affair (`strongroom_security.trustlist`,
`strongroom_security.roles.grants`).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass

from strongroom import canonical
from strongroom.canonical import Bounds
from strongroom.errors import ConfigError, FormatError
from strongroom_security.publickeys import check_signature_form
from strongroom_security.strictjson import base64_of, list_of, load, members_of, text_of

__all__ = ["SharedEnvelope"]

_KEY_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedEnvelope:
    """One kind of such documents.

    Attributes:
        noun: what one is called, for people.
        payload_type: DSSE's.
        max_signatures: that one may have.
        bounds: of the envelope.
    """

    noun: str
    payload_type: str
    max_signatures: int
    bounds: Bounds

    def close(self, payload: bytes, signatures: Mapping[str, bytes]) -> bytes:
        """An envelope's bytes.

        Args:
            signatures: by key id.

        Raises:
            ConfigError: there are too many.
        """
        if len(signatures) > self.max_signatures:
            raise ConfigError(f"{self.noun} has at most {self.max_signatures} signatures")
        return canonical.encode(
            {
                "payload": base64.b64encode(payload).decode("ascii"),
                "payloadType": self.payload_type,
                "signatures": [
                    {"keyid": key_id, "sig": base64.b64encode(signature).decode("ascii")}
                    for key_id, signature in sorted(signatures.items())
                ],
            }
        )

    def open(self, data: bytes, what: str) -> tuple[bytes, dict[str, bytes]]:
        """An envelope's payload, of which nothing is parsed, and its signatures by key id.

        Raises:
            FormatError: it is none.
        """
        members = members_of(
            load(data, what, self.bounds), what, required=("payload", "payloadType", "signatures")
        )
        text_of(members["payloadType"], f"the payload type of {what}", expected=self.payload_type)
        listed = list_of(members["signatures"], f"the signatures of {what}")
        if len(listed) > self.max_signatures:
            raise FormatError(f"{what} has {len(listed)} signatures; at most {self.max_signatures} are read")
        signatures: dict[str, bytes] = {}
        for each in listed:
            signed = members_of(each, f"a signature of {what}", required=("keyid", "sig"))
            key_id = text_of(signed["keyid"], f"a key id of {what}")
            if not _KEY_ID.fullmatch(key_id):
                raise FormatError(f"a key's id is 64 lower-case hex digits, found {key_id[:80]!r}")
            if key_id in signatures:
                raise FormatError(f"{what} has two signatures by {key_id}; a key signs once")
            signatures[key_id] = base64_of(signed["sig"], f"a signature of {what}")
            check_signature_form(signatures[key_id], f"the signature by {key_id} of {what}")
        return base64_of(members["payload"], f"the payload of {what}"), signatures
