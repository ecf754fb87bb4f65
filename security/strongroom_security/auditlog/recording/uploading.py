"""One segment's way into the sink: created once, and never over what stands there."""

from __future__ import annotations

from strongroom.errors import AccessDeniedError, FormatError, StoreUnavailableError
from strongroom.stores.base import Store
from strongroom.stores.offers import create_within
from strongroom_security.auditlog.format.segments import MAX_SEGMENT_BYTES

__all__ = ["upload"]


def upload(store: Store, key: str, data: bytes, *, within_s: float, may_stand: bool) -> bytes | None:
    """Put a segment into the sink; what stands in its place if that is something else, and None if not.

    Where something stands that this identity may not read, it is taken for ours only if it may be: if an
    earlier try was sent and had no answer. Else somebody who saw the writer's id was here first, and what
    stands there counts as nothing of ours.

    Args:
        may_stand: an earlier try to send these bytes ended without an answer.

    Raises:
        StrongroomError: the sink did not take it, or nothing says whether it did; try again.
    """
    if create_within(store, key, data, within_s):
        return None
    try:
        found = store.read(key, limit_bytes=MAX_SEGMENT_BYTES)
    except AccessDeniedError:
        return None if may_stand else b""
    except FormatError:
        return b""  # longer than any segment: something else
    if not found and data:
        # On a folder that a name appears in before its bytes, they are still to come.
        raise StoreUnavailableError(f"{store.uri}/{key} stands there and is empty; looking again")
    return None if found == data else found
