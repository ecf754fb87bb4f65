"""Taking something from the first of several copies that is whole.

A checkpoint may stand on several tiers, byte for byte the same, and every byte of it is verified. So a copy
that is damaged, or that cannot be read, is passed over for the next one, and the checkpoint is damaged only
where every copy is. Where one copy is damaged and another one cannot be read, nothing is known of the
checkpoint: that is the other one's error, and no damage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from strongroom.errors import IntegrityError, StoreError, StrongroomError
from strongroom.stores.base import Store

__all__ = ["OnPassedOver", "first_whole", "tell_passed_over", "worst"]

_LOG: Final = logging.getLogger("strongroom")

_T = TypeVar("_T")

OnPassedOver = Callable[[Store, StrongroomError], None]
"""Told of each copy that was passed over, and why."""


def tell_passed_over(store: Store, error: StrongroomError) -> None:
    """Write it to the log."""
    _LOG.warning("the copy in %s is passed over for the next tier's: %s", store.uri, error)


def first_whole(
    stores: Sequence[Store], act: Callable[[Store], _T], on_passed_over: OnPassedOver = tell_passed_over
) -> _T:
    """What ``act`` makes of the first copy for which it raises neither `IntegrityError` nor `StoreError`.

    Args:
        stores: at least one.

    Raises:
        StoreError: no copy is whole, and this one could not be read.
        IntegrityError: every copy is damaged; that of the first.
    """
    errors: list[StrongroomError] = []
    for number, store in enumerate(stores, start=1):
        try:
            return act(store)
        except (IntegrityError, StoreError) as error:
            errors.append(error)
            if number < len(stores):
                on_passed_over(store, error)
    raise worst(errors)


def worst(errors: Sequence[StrongroomError]) -> StrongroomError:
    """Which of several copies' errors is the checkpoint's: one that says nothing about bytes comes first."""
    return next((error for error in errors if isinstance(error, StoreError)), errors[0])
