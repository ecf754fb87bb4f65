"""Which Ed25519 public keys are none: points of small order, whose signatures hold for any text. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["is_of_small_order"]

_P: Final = 2**255 - 19
_EIGHTH: Final = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
"""The y of a point of order 8; that of the others is its negative."""
_YS: Final = frozenset([0, 1, _P - 1, _EIGHTH, _P - _EIGHTH])


def is_of_small_order(public: bytes) -> bool:
    """Whether eight times this point is the neutral one, however its y is spelled.

    Args:
        public: 32 bytes, as RFC 8032 encodes a point.
    """
    return (int.from_bytes(public, "little") & ((1 << 255) - 1)) % _P in _YS
