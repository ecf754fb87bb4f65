"""A tree in a store, as it grows: each file is created once, with the same bytes whoever creates it.

So whoever was cut short, and whoever does the same at the same time, does no harm; what stands there with
other bytes is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strongroom.errors import IntegrityError, OutcomeUnknownError
from strongroom.parallel import run_all
from strongroom.stores.base import Store
from strongroom.stores.offers import tuning_of
from strongroom_security.tlog.merkle import leaf_hashes
from strongroom_security.tlog.reading import PREFIX
from strongroom_security.tlog.tiles import ENTRIES, TILE_WIDTH, Edge, Growth, encode_bundle, tile_name

__all__ = ["create_same", "grow", "write_growth"]


def grow(
    edge: Edge, last_entries: Sequence[bytes], entries: Sequence[bytes]
) -> tuple[Growth, dict[str, bytes]]:
    """What a tree becomes with more entries; the names of its new files, and their bytes.

    Args:
        last_entries: those of the last bundle, where that is not full.
    """
    growth = edge.extended(leaf_hashes(entries))
    files: dict[str, bytes] = {}
    index = edge.size // TILE_WIDTH
    together = [*last_entries, *entries]
    for begin in range(0, len(together), TILE_WIDTH):
        bundle = together[begin : begin + TILE_WIDTH]
        files[tile_name(ENTRIES, index, len(bundle))] = encode_bundle(bundle)
        index += 1
    files.update((tile.name, tile.data) for tile in growth.tiles)
    return growth, files


def write_growth(store: Store, files: Mapping[str, bytes], *, prefix: str = PREFIX) -> None:
    """Create the files of a growth, several at once where the store likes that.

    Raises:
        IntegrityError: one stands with other bytes.
        StoreError: the store refused.
    """
    run_all(
        [
            lambda name=name, data=data: create_same(store, f"{prefix}/{name}", data)  # type: ignore[misc]
            for name, data in files.items()
        ],
        workers=tuning_of(store).looks,
        name="strongroom-tlog",
    )


def create_same(store: Store, key: str, data: bytes) -> None:
    """Create an object, or find the same bytes there.

    Raises:
        IntegrityError: other bytes stand there.
        StoreError: the store refused.
    """
    try:
        if store.put_if_absent(key, data):
            return
    except OutcomeUnknownError:
        # Whoever created it, what counts is what stands there; and if it is nothing, this is tried again.
        if store.put_if_absent(key, data):
            return
    found = store.read(key, limit_bytes=max(len(data), 1))
    if found != data:
        raise IntegrityError(
            f"{store.uri}/{key} holds other bytes than this tree has there; it was changed, or another tree "
            "is written to the same place"
        )
