"""Lightning on GPUs: one with a gradient scaler, and two over NCCL under DDP and under FSDP2.

Each run is broken off after its fourth batch and resumed, and must end with the losses and weights of one
that was not. Checked is no more than that: one small model, on one host.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rank_runs
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning_ranks import LightningLauncher

DONE = 4

one_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has fewer than 2 GPUs")

pytestmark = pytest.mark.gpu


@one_gpu
@pytest.mark.parametrize("precision", ("16-mixed", "bf16-mixed", "32-true"))
def test_one_gpu(fit: Any, precision: str) -> None:
    settings = {"accelerator": "cuda", "precision": precision, "deterministic": True}
    reference = fit(None, **settings)
    fit(until=DONE, **settings)
    fit(seed=1000, checkpoint={"every_n_epochs": 100}, **settings).ends_like(reference)


@two_gpus
@pytest.mark.parametrize(
    "way",
    (
        {"strategy": "ddp"},
        {"strategy": "ddp", "precision": "16-mixed"},
        {"strategy": partial(rank_runs.sharded, 2, 1), "module": rank_runs.ShardedNet},
        {"strategy": partial(rank_runs.sharded, 1, 2), "module": rank_runs.ShardedNet},
    ),
    ids=("ddp", "ddp with a scaler", "fsdp2", "tensor parallel"),
)
def test_two_gpus_over_nccl(launcher: LightningLauncher, tmp_path: Path, way: dict[str, Any]) -> None:
    def run(root: Path | None, **options: Any) -> list[dict[str, Any]]:
        port = find_free_network_port()
        return launcher.run(rank_runs.train_over_nccl, port, root, ranks=2, **way, **options)

    reference = run(None)
    run(tmp_path / "run", until=DONE)
    for resumed, expected in zip(run(tmp_path / "run", draw_from=99), reference, strict=True):
        assert resumed["losses"] == expected["losses"][DONE:]
        assert resumed["weights"] == expected["weights"]
