"""``strongroom gc`` on a run of the Trainer's: what it holds to be the best stays."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from small_lm import STEPS, llama, texts, trainer

from strongroom import Checkpointer
from strongroom_cli.main import main
from strongroom_transformers import StrongroomCallback


def test_whoever_collects_from_outside_leaves_the_best_that_the_trainer_found(tmp_path: Path) -> None:
    root = tmp_path / "root"
    one = trainer(
        llama(),
        tmp_path / "out",
        attach=lambda made: StrongroomCallback(root).attach(made),
        eval_dataset=texts(4),
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # it gets worse by that
    )
    one.train()
    best = one.state.best_global_step
    assert best < STEPS - 1
    assert main(["gc", str(root), "--keep-last", "1"]) == 0
    assert [one.step for one in Checkpointer(root).checkpoints()] == [STEPS, best]
