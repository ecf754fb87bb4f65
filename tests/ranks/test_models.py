"""Models under DDP, FSDP2, hybrid sharding, tensor parallelism and FSDP2 with it, with their optimizers."""

from __future__ import annotations

from pathlib import Path

import model_jobs
import pytest
from crews import Crews
from model_jobs import STYLES

pytestmark = pytest.mark.usefixtures("fsdp2_on_cpus")


@pytest.fixture(scope="module")
def truth(crews: Crews, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the plain model, saved by one process."""
    root = tmp_path_factory.mktemp("truth")
    crews.run(model_jobs.save_truth, root, ranks=1)
    return root


def test_the_plain_models_checkpoint_is_restored_in_every_style(crews: Crews, truth: Path) -> None:
    assert crews.run(model_jobs.restore_everywhere, truth, STYLES, ranks=4) == [[]] * 4


@pytest.mark.parametrize("style", STYLES[1:])
def test_a_checkpoint_of_every_style_is_restored_in_every_other(
    style: str, crews: Crews, truth: Path, tmp_path: Path
) -> None:
    assert crews.run(model_jobs.pass_on, truth, tmp_path, style, 2, ranks=4) == [[]] * 4
    others = tuple(other for other in STYLES if other != style)
    assert crews.run(model_jobs.restore_everywhere, tmp_path, others, ranks=4) == [[]] * 4
    assert crews.run(model_jobs.restore_everywhere, tmp_path, ("plain",), ranks=1) == [[]]


@pytest.mark.parametrize("style", STYLES[1:])
def test_training_goes_on_as_the_plain_model_would(
    style: str, crews: Crews, truth: Path, tmp_path: Path
) -> None:
    assert crews.run(model_jobs.pass_on, truth, tmp_path, style, 2, more=2, ranks=4) == [[]] * 4
