"""Accelerate's telling issues, each by its number: what went wrong there, and goes right here.

Some stand in the modules of what they are about; the last test holds the list together.
"""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate_issues import in_folder, project
from accelerate_runs import FrontEndLauncher, Loop, new_accelerator, train, train_often
from torch import nn

from strongroom import Checkpointer
from strongroom.stores.local import LocalStore
from strongroom_accelerate import Strongroom

ISSUES = {
    1163, 1171, 1601, 1982, 2016, 3306, 3662, 3701, 3746, 3839, 3938, 3971, 4165, 4195, 4204, 4233,
}  # fmt: skip

ELSEWHERE = {
    2016: "test_issue_2016_natively_order_and_losses_differ_and_ours_are_the_uninterrupted_runs",
    4233: "test_every_kind_of_loader_goes_on",
}
"""Issues whose test stands in another module."""


def steps_of(root: Path) -> list[int]:
    with Checkpointer(root) as checkpointer:
        return sorted(one.step for one in checkpointer.checkpoints())


def test_issue_3746_and_3701_training_goes_on_while_a_checkpoint_is_written(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()
    original = LocalStore.open_writer

    def open_writer(store: LocalStore, key: str, **options: Any) -> Any:
        assert let_go.wait(timeout=60), "training waited for the disk, and the disk for training"
        return original(store, key, **options)

    monkeypatch.setattr(LocalStore, "open_writer", open_writer)
    loop = Loop(root)
    loop.train(1)
    handle = loop.accelerator.save_state("first")
    saved = loop.weights
    loop.train(3)
    let_go.set()
    assert handle.result().step == 1
    loop.accelerator.load_state("first")
    assert loop.weights == saved  # as they were when it was called, not when it was written
    loop.run.close()


def test_issue_4195_a_loader_that_keeps_its_place_gives_the_order_that_it_would_have(
    root: Path, uninterrupted: Any
) -> None:
    train_often([{"root": root, "until": 4, "loader": "stateful"}])
    train(root, seed=99, loader="stateful").ends_like(uninterrupted(loader="stateful"))


def test_issue_4204_workers_of_such_a_loader_divide_the_data_among_two_processes(
    launcher: FrontEndLauncher, tmp_path: Path
) -> None:
    plans: list[dict[str, Any]] = [
        {"root": tmp_path / "whole", "loader": "stateful, workers"},
        {"root": tmp_path / "run", "loader": "stateful, workers", "until": 4},
        {"root": tmp_path / "run", "loader": "stateful, workers", "seed": 99},
    ]
    for whole, _, resumed in launcher.run(train_often, plans, ranks=2):
        assert resumed.has_resumed
        resumed.ends_like(whole)


def test_issue_3938_and_4165_each_process_has_its_own_place_and_none_writes_over_anothers(
    launcher: FrontEndLauncher, tmp_path: Path
) -> None:
    launcher.run(train_often, [{"root": tmp_path / "run", "until": 3}], ranks=2)
    for folder in (tmp_path / "run").glob("step-*"):
        written = [json.loads(path.read_bytes()) for path in sorted(folder.rglob("state-*.json"))]
        assert len(written) == 2
        assert written[0] != written[1]


def test_issue_3306_the_next_number_is_restored(root: Path) -> None:
    loop = Loop(root, accelerator=project())
    for _ in range(2):
        loop.train(1)
        loop.accelerator.save_state()
    loop.run.close()
    again = Loop(root, accelerator=project(), seed=99)
    again.accelerator.load_state()
    assert again.accelerator.save_iteration == 2
    again.begin_anew()
    again.train(1)
    again.accelerator.save_state()
    again.accelerator.load_state("checkpoints/checkpoint_1")
    assert again.run.steps_done == 2
    again.run.close()


def test_issue_1601_saving_after_a_resume_meets_no_folder_that_exists(root: Path) -> None:
    for done in (0, 1, 2):
        loop = Loop(root, accelerator=project())
        assert loop.run.resume() == bool(done)
        loop.begin_anew()
        loop.train(1)
        assert loop.accelerator.save_state().result().step == done + 1
        loop.run.close()


def test_issue_1163_nothing_goes_before_the_new_one_is_committed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(root, accelerator=project(total_limit=1))
    loop.train(1)
    loop.accelerator.save_state().result()
    loop.train(1)

    def denied(self: LocalStore, key: str, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied", key)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "open_writer", denied)
        with pytest.raises(Exception, match="Permission denied"):
            loop.accelerator.save_state().result()
    assert steps_of(root) == [1]
    loop.train(1)
    loop.accelerator.save_state().result()
    loop.run.close()
    assert steps_of(root) == [3]


def test_issue_1982_one_process_removes_what_is_over_the_limit(
    launcher: FrontEndLauncher, tmp_path: Path
) -> None:
    assert launcher.run(in_folder, tmp_path, "save_often", ranks=2) == [5, 5]
    assert steps_of(tmp_path / "run") == [4, 5]


@pytest.mark.parametrize("name", ("save_on_the_main_one", "step_on_the_main_one"))
def test_issue_1171_and_3662_a_save_on_one_process_alone_is_an_error_that_says_what_to_do(
    name: str, launcher: FrontEndLauncher, tmp_path: Path
) -> None:
    outcomes = launcher.start(in_folder, tmp_path, name, ranks=2).outcomes()
    assert outcomes[0].error is not None
    kind, words = outcomes[0].error
    assert kind == "RanksMissingError"
    assert "rank 1" in words
    assert "take the call out of `if accelerator.is_main_process:`" in words
    assert not (tmp_path / "run").exists() or steps_of(tmp_path / "run") == []


class Tied(nn.Module):
    """An optimizer's state has holes: of a parameter that never had a gradient, and one that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x))
        return out


def test_issue_3971_and_3839_an_optimizer_state_with_holes_comes_back(root: Path) -> None:
    def begin() -> tuple[Any, Any, Strongroom]:
        accelerator = new_accelerator()
        strongroom = Strongroom(accelerator, root, every_n_steps=1)
        torch.manual_seed(7)
        model = Tied()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        return model, optimizer, strongroom

    def step(model: Any, optimizer: Any, strongroom: Strongroom) -> float:
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        strongroom.step()
        return loss.item()

    run = begin()
    losses = [step(*run) for _ in range(2)]
    run[2].wait()
    losses.append(step(*run))
    run[2].close()
    again = begin()
    again[2].resume()
    assert again[2].steps_done == 3
    again[2].close()
    assert len(losses) == 3
    for one, other in zip(run[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(again[1].optimizer.state) == len(run[1].optimizer.state)


def test_every_telling_issue_has_a_test() -> None:
    folder = Path(__file__).parent
    source = "\n".join(path.read_text() for path in folder.glob("test_*.py"))
    found: set[int] = set()
    for name in re.findall(r"def (test_issue_\w+)", source):
        found |= set(map(int, re.findall(r"(?<=_)(\d{4})(?=_)", name)))
    for number, name in ELSEWHERE.items():
        assert f"def {name}(" in source
        found.add(number)
    assert found == ISSUES
