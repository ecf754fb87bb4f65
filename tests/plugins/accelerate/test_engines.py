"""DeepSpeed and Megatron-LM save model and optimizer themselves; their files are part of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from accelerate_runs import new_accelerator
from torch import nn

from strongroom import Checkpointer, StateMismatchError
from strongroom_accelerate import Strongroom
from strongroom_security.recipients.file import create_key_file

MARKER = 0.3717


class Engine(nn.Module):
    """A mock, since DeepSpeed is nothing that runs here: it saves as DeepSpeed's engine does, by pickles."""

    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.full((8,), MARKER))
        self.seen: list[Path] = []

    def save_checkpoint(self, folder: str, tag: str = "megatron", **options: Any) -> None:
        place = Path(folder) / tag
        place.mkdir(parents=True)
        torch.save({"weight": self.weight, **options}, place / "mp_rank_00_model_states.pt")
        (Path(folder) / "latest").write_text(tag)
        self.seen.append(Path(folder))

    def load_checkpoint(self, folder: str, tag: str = "megatron", **options: Any) -> None:
        assert (Path(folder) / "latest").read_text() == tag
        self.weight = torch.load(Path(folder) / tag / "mp_rank_00_model_states.pt")["weight"]
        self.seen.append(Path(folder))


def begin(root: str, way: DistributedType, **options: Any) -> tuple[Any, Strongroom, Engine]:
    accelerator = new_accelerator()
    PartialState._shared_state["distributed_type"] = way
    accelerator.state.distributed_type = way
    engine = Engine()
    accelerator._models.append(engine)
    return accelerator, Strongroom(accelerator, root, every_n_steps=1, **options), engine


@pytest.mark.parametrize("way", (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM), ids=str)
def test_an_engine_saves_into_a_private_folder_that_is_sealed_and_wiped(
    way: DistributedType, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create_key_file(tmp_path / "kek.key")
    policy = tmp_path / "strongroom.toml"
    policy.write_text('[seal]\nrecipients = ["file:kek.key"]\n')
    accelerator, strongroom, engine = begin("run", way, config=policy)
    strongroom.step()
    first = engine.weight.clone()
    engine.weight += 1
    strongroom.step()
    strongroom.close()
    assert "saves model and optimizer itself" in caplog.text
    marked = torch.full((4,), MARKER).numpy().tobytes()
    assert not [path for path in root.rglob("*") if path.is_file() and marked in path.read_bytes()]

    accelerator, strongroom, again = begin("run", way, config=policy)
    again.weight.zero_()
    assert strongroom.resume()
    assert torch.equal(again.weight, engine.weight)
    assert strongroom.steps_done == 2
    accelerator.load_state(1)
    assert torch.equal(again.weight, first)
    strongroom.close()
    assert not any(folder.parent.exists() for folder in (*engine.seen, *again.seen))


def test_what_save_state_is_given_besides_is_the_engines(root: Path, tmp_path: Path) -> None:
    accelerator, strongroom, engine = begin("run", DistributedType.DEEPSPEED, scratch=tmp_path / "scratch")
    accelerator.save_state("named", client_state=5).result()
    assert engine.seen[0].is_relative_to(tmp_path / "scratch")
    strongroom.close()
    with Checkpointer("run") as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None
    files = restored.state["files"]
    assert sorted(files) == ["engine/latest", "engine/pytorch_model/mp_rank_00_model_states.pt"]
    (tmp_path / "back.pt").write_bytes(files["engine/pytorch_model/mp_rank_00_model_states.pt"].numpy())
    assert torch.load(tmp_path / "back.pt")["client_state"] == 5


def test_an_engine_finds_nothing_in_a_checkpoint_of_another_way(root: Path) -> None:
    accelerator = new_accelerator()
    with Strongroom(accelerator, "run") as strongroom:
        accelerator.prepare(torch.nn.Linear(2, 2))
        strongroom.save()
    _, other, _ = begin("run", DistributedType.DEEPSPEED)
    with pytest.raises(StateMismatchError, match="engine has saved nothing in the checkpoint"):
        other.resume()
    other.close()
