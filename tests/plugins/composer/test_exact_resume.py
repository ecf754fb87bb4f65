"""A run that was broken off and started again ends as the uninterrupted one: every loss, every weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composer_runs import Drawing, Noise

EVERYTHING: dict[str, Any] = {
    "validate": True,
    "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7),
    "callbacks": (Drawing,),
    "algorithms": (Noise,),
}


@pytest.mark.parametrize("done", range(1, 12))
def test_a_run_broken_off_anywhere_ends_as_the_uninterrupted_one(
    fit: Any, uninterrupted: Any, done: int
) -> None:
    reference = uninterrupted(**EVERYTHING)
    broken = fit(until=done, checkpoint={"save_interval": f"{done}ba"}, **EVERYTHING)
    assert broken.losses == reference.losses[:done]
    resumed = fit(seed=1000, checkpoint={"save_interval": "100ep"}, **EVERYTHING)
    assert len(resumed.losses) == len(reference.losses) - done
    resumed.ends_like(reference)
