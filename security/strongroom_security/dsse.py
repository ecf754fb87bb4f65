"""DSSE envelopes: a payload, what type it is of, and one signature over both.

The format is DSSE v1.0 (github.com/secure-systems-lab/dsse, ``protocol.md`` and ``envelope.md``), with
exactly one signature. The type is signed with the payload, so that nothing that was signed as one kind
of document can be shown as another.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Final

from strongroom.canonical import Json
from strongroom.errors import FormatError
from strongroom_security.publickeys import check_signature_form
from strongroom_security.strictjson import base64_of, list_of, members_of, text_of

__all__ = ["PAYLOAD_TYPE", "Envelope", "pae"]

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
"""Of in-toto statements."""


def pae(payload_type: str, payload: bytes) -> bytes:
    """What is signed: DSSE's pre-authentication encoding."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A signed payload. That the signature is right is not said by it.

    Attributes:
        payload_type: a media type.
        payload: the document.
        signature: ECDSA in DER, over `to_be_signed`.
    """

    payload_type: str
    payload: bytes
    signature: bytes

    @property
    def to_be_signed(self) -> bytes:
        return pae(self.payload_type, self.payload)

    def to_json(self) -> dict[str, Json]:
        """The envelope as JSON's objects and strings."""
        return {
            "payload": base64.b64encode(self.payload).decode("ascii"),
            "payloadType": self.payload_type,
            # The writer that everybody knows gives an empty key id, and some readers want the member.
            "signatures": [{"keyid": "", "sig": base64.b64encode(self.signature).decode("ascii")}],
        }

    @classmethod
    def from_json(cls, value: Json, what: str, *, payload_type: str = PAYLOAD_TYPE) -> Envelope:
        """Read what `to_json` and others write.

        Args:
            value: as parsed by `strongroom_security.strictjson.load`.
            what: names the envelope in errors.
            payload_type: the one that it has to be of.

        Raises:
            FormatError: a member is missing, unknown or malformed; another type of payload; no
                signature, several, or one that is not ECDSA in DER.
        """
        members = members_of(value, what, required=("payload", "payloadType", "signatures"))
        text_of(members["payloadType"], f"the payload type of {what}", expected=payload_type)
        signatures = list_of(members["signatures"], f"the signatures of {what}")
        if len(signatures) != 1:
            raise FormatError(f"{what} has {len(signatures)} signatures; exactly one is read")
        signed = members_of(signatures[0], f"the signature of {what}", required=("sig",), optional=("keyid",))
        # Nobody signed it, and nothing is looked up by it; a filled one would only mislead.
        if signed.get("keyid") not in (None, ""):
            raise FormatError(f"the signature of {what} names a key id of its own; expected an empty one")
        signature = base64_of(signed["sig"], f"the signature of {what}")
        check_signature_form(signature, f"the signature of {what}")
        return cls(
            payload_type=payload_type,
            payload=base64_of(members["payload"], f"the payload of {what}"),
            signature=signature,
        )
