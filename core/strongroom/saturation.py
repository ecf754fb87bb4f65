"""How full a store is: whether a save has room there before it writes anything, and who is told in time.

A store that does not know (`strongroom.stores.offers.Spacious`), or cannot be asked, is not looked at: what
does not fit then fails as it is written.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Final

from strongroom.errors import StoreError
from strongroom.events import Emitter, StoreMeasured
from strongroom.stores.base import Store
from strongroom.stores.offers import Space, Spacious

__all__ = ["ALERT_FRACTION", "HEALTHY_FRACTION", "Gauge", "why_full"]

_LOG: Final = logging.getLogger("strongroom")

HEALTHY_FRACTION: Final = 0.75
"""A store is fine that is used up to here: our own choice, and what `ALERT_FRACTION` is, too."""
ALERT_FRACTION: Final = 0.85
"""Beyond this somebody is to act at once, while there is still room for a checkpoint or two."""


def why_full(store: Store, needed_bytes: int, *, reserve_bytes: int = 0) -> str | None:
    """Why a save must not begin; None: it may.

    Args:
        needed_bytes: what all ranks will write together.
        reserve_bytes: what is to be free afterwards.
    """
    space = _space(store)
    if space is None or needed_bytes + reserve_bytes <= space.free_bytes:
        return None
    kept = f", and {reserve_bytes} more are to stay free (reserve_bytes)" if reserve_bytes else ""
    lower = ", or lower reserve_bytes" if reserve_bytes else ""
    return (
        f"{store.uri} has {space.free_bytes} bytes free of {space.total_bytes}; this save takes "
        f"{needed_bytes}{kept}. Nothing was written. Let fewer checkpoints stay (keep=, or `strongroom gc "
        f"--keep-last`), make room there{lower}"
    )


class Gauge:
    """Says after each commit how full stores are, and speaks up once where one is getting too full."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self._told: dict[str, int] = {}
        self._aside: threading.Thread | None = None

    def measure(self, run: str, stores: Iterable[Store]) -> None:
        """Look at every store that knows; never raises into training."""
        for store in stores:
            space = _space(store)
            if space is not None:
                self._tell(run, store.uri, space)

    def measure_aside(self, run: str, stores: Sequence[Store]) -> None:
        """As `measure`, on a thread of its own: nobody waits for a store that does not answer.

        One that has not answered yet is not asked again, and keeps no program from ending.
        """
        asked = self._aside
        if not stores or (asked is not None and asked.is_alive()):
            return
        self._aside = threading.Thread(
            target=self.measure, args=(run, stores), name="strongroom-gauge", daemon=True
        )
        self._aside.start()

    def _tell(self, run: str, uri: str, space: Space) -> None:
        used = space.used_fraction
        self._emitter.emit(
            StoreMeasured(
                run=run,
                tier=uri,
                total_bytes=space.total_bytes,
                free_bytes=space.free_bytes,
                used_fraction=used,
            )
        )
        level = logging.ERROR if used > ALERT_FRACTION else logging.WARNING if used > HEALTHY_FRACTION else 0
        if level > self._told.get(uri, 0):
            _LOG.log(
                level,
                "%s is %.0f %% full, %d bytes are free: let fewer checkpoints stay (keep=, or `strongroom gc "
                "--keep-last`), or make room",
                uri,
                100 * used,
                space.free_bytes,
            )
        # Once it has got better, getting worse is news again.
        self._told[uri] = level


def _space(store: Store) -> Space | None:
    if not isinstance(store, Spacious):
        return None
    try:
        return store.space()
    except StoreError as error:
        _LOG.debug("%s does not say how full it is: %s", store.uri, error)
        return None
