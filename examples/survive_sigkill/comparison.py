"""Whether two runs were the same: each loss, and the final weights. Pure: no files, no processes."""

from __future__ import annotations

from collections.abc import Sequence

from runs import Batch

__all__ = ["differences"]


def differences(
    undisturbed: Sequence[Batch], killed: Sequence[Batch], *, weights: tuple[str, str]
) -> list[str]:
    """What differs between an undisturbed run and one that was killed; empty where nothing does.

    A batch that the killed run trained on twice must have had the same loss both times. Losses are
    compared as floats, without any tolerance.

    Args:
        undisturbed: every batch that was trained on.
        killed: likewise, over all starts.
        weights: the digests of the final weights, in the same order.
    """
    expected = {(batch.epoch, batch.batch): batch for batch in undisturbed}
    found = []
    for batch in killed:
        other = expected.get((batch.epoch, batch.batch))
        if other is None:
            found.append(f"{_name(batch)} was trained on in the killed run alone")
        elif other.step != batch.step:
            found.append(f"{_name(batch)} came after {batch.step} steps, and undisturbed after {other.step}")
        elif other.loss != batch.loss:
            found.append(f"{_name(batch)} had loss {batch.loss!r}, and undisturbed {other.loss!r}")
    seen = {(batch.epoch, batch.batch) for batch in killed}
    found += [f"{_name(batch)} is missing" for where, batch in expected.items() if where not in seen]
    if weights[0] != weights[1]:
        found.append("the final weights have another digest")
    return found


def _name(batch: Batch) -> str:
    return f"batch {batch.batch + 1} of epoch {batch.epoch + 1}"
