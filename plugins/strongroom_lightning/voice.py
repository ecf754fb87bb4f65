"""How this front end speaks: as Lightning does, on rank 0."""

from __future__ import annotations

from typing import Final

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from strongroom.frontend import Voice

__all__ = ["VOICE"]


class _RankZero:
    def info(self, text: str) -> None:
        rank_zero_info(f"Strongroom: {text}")

    def warn(self, text: str) -> None:
        rank_zero_warn(f"Strongroom: {text}")


VOICE: Final[Voice] = _RankZero()
