"""Whose word on a writer's key counts: the certificates of opening lines, held against trusted keys. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from strongroom_security.auditlog.format.lines import Certificate
from strongroom_security.publickeys import PublicKey

__all__ = ["Voucher", "Vouchers"]


class Voucher(enum.Enum):
    """What a certificate comes to."""

    TRUSTED = "trusted"
    UNKNOWN = "unknown"
    """It is by a key that is not trusted, and says nothing."""
    FORGED = "forged"
    """It names a trusted key, which has not signed this."""
    NOBODY = "nobody"
    """There is none."""


class Vouchers:
    """The keys whose certificates count.

    Attributes:
        keys: by id; none: nobody was named.
    """

    def __init__(self, keys: Iterable[PublicKey] = ()) -> None:
        self.keys: Mapping[str, PublicKey] = MappingProxyType({key.id: key for key in keys})
        self._known: dict[tuple[bytes, bytes], Voucher] = {}

    def of(self, certificate: Certificate | None, certified: bytes) -> Voucher:
        """What a certificate over a writer comes to.

        Args:
            certified: what it must have signed.
        """
        if certificate is None:
            return Voucher.NOBODY
        key = self.keys.get(certificate.key_id)
        if key is None:
            return Voucher.UNKNOWN
        # Every segment of a writer repeats it, and to verify it takes longer than to read a segment's lines.
        known = self._known.get((certified, certificate.signature))
        if known is None:
            known = Voucher.TRUSTED if key.verify(certified, certificate.signature) else Voucher.FORGED
            self._known[certified, certificate.signature] = known
        return known
