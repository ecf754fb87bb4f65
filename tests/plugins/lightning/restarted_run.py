"""A run for torchrun, one of whose processes is killed once: `test_restarts.py` starts it.

``python -m torch.distributed.run ... restarted_run.py ROOT RANK BATCH``: that rank kills itself before that
batch of the first start. Rank 0 says at the end, in a file beside the root, what the run came to.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import lightning_ranks
import rank_runs
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy

MEETING = timedelta(seconds=30)

__all__ = ["Batches", "train"]


class Batches(Callback):
    """Which batches were trained on, counted over the whole run."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.seen.append(trainer.fit_loop.total_batch_idx)


def train(root: Path | None, dies: tuple[int, int] | None = None) -> dict[str, Any]:
    """2 epochs of 6 batches, saved at every second step.

    Args:
        dies: the rank and the batch at which it kills itself, the first time; None: it does not.
    """
    batches = Batches()
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    rank, batch = dies if dies is not None and is_first else (None, None)
    done = rank_runs.train(
        root,
        checkpoint={"every_n_train_steps": 2},
        until=batch,
        how=lightning_ranks.die,
        stop_ranks=[rank],
        # Processes that begin again may miss each other in gloo, for half an hour; then torchrun tries again.
        strategy=DDPStrategy(timeout=MEETING) if dies is not None else "ddp",
        # As a process that begins anew, wherever it stands.
        draw_from=7 if is_first else 99,
        callbacks=[lambda: batches],
    )
    return {"weights": done["weights"], "step": done["step"], "batches": batches.seen}


def main(root: Path, rank: int, batch: int) -> None:
    lightning_ranks.as_lightning_rank()
    found = train(root, (rank, batch))
    if lightning_ranks.rank() == 0:
        Path(f"{root}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
