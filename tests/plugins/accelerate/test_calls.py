"""``save_state`` and ``load_state`` of scripts that know nothing of us, and what else an Accelerator does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import ProjectConfiguration
from accelerate_runs import BATCHES, Loop, Numbers, Progress, new_accelerator
from torch.utils.data import DataLoader

from strongroom import Checkpointer, CheckpointNotFoundError, ConfigError, StateMismatchError
from strongroom.handle import SaveHandle


def steps_of(root: Path) -> list[int]:
    with Checkpointer(root) as checkpointer:
        return sorted(one.step for one in checkpointer.checkpoints())


def test_a_script_without_a_word_of_ours_saves_into_the_root_and_loads_by_its_names(root: Path) -> None:
    loop = Loop(root)
    loop.train(2, steps=False)
    handle = loop.accelerator.save_state("out/first")
    assert isinstance(handle, SaveHandle)
    assert handle.result().step == 2  # counted by the optimizer's own steps
    at_two = loop.weights
    loop.train(3, steps=False)
    loop.accelerator.save_state("out/second")
    reference = loop.losses[2:]
    loop.run.close()
    assert not Path("out").exists()
    assert steps_of(root) == [2, 5]

    again = Loop(root, seed=99)
    again.accelerator.load_state("out/first")
    assert again.weights == at_two
    again.train(3, steps=False)
    assert again.losses == reference
    again.run.close()


@pytest.mark.parametrize("place", ("second", "/elsewhere/second", 4, None, "root"))
def test_a_checkpoint_is_found_by_name_by_step_or_as_the_newest(place: Any, root: Path) -> None:
    loop = Loop(root)
    loop.train(2)
    loop.accelerator.save_state("out/first")
    loop.train(2)
    loop.accelerator.save_state("out/second")
    expected = loop.weights
    loop.train(1)
    loop.accelerator.load_state(root if place == "root" else place)
    assert loop.weights == expected
    assert loop.run.steps_done == 4
    loop.run.close()


def test_a_name_that_nobody_knows_is_an_error_that_lists_those_that_are_known(root: Path) -> None:
    loop = Loop(root)
    loop.train(1)
    loop.accelerator.save_state("out/first")
    with pytest.raises(CheckpointNotFoundError, match="'out/first'"):
        loop.accelerator.load_state("out/third")
    loop.run.close()


def test_a_step_that_is_saved_already_has_a_name_besides(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(root, every_n_steps=1)
    loop.train(2)
    assert loop.accelerator.save_state("out/epoch").skipped is not None
    assert "'out/epoch' means it from now on" in caplog.text
    expected = loop.weights
    loop.train(2)
    loop.run.close()
    again = Loop(root)
    again.accelerator.load_state("out/epoch")
    assert again.weights == expected
    assert again.run.steps_done == 2
    again.run.close()


def test_training_goes_on_from_a_step_that_was_loaded_as_a_new_line(root: Path) -> None:
    loop = Loop(root, every_n_steps=2)
    loop.train(6)
    loop.accelerator.load_state(2)
    loop.begin_anew()
    loop.train(4)
    assert loop.losses[6:] == loop.losses[2:6]
    loop.run.close()
    assert steps_of(root) == [2, 4, 4, 6, 6]


def test_objects_of_a_script_come_back_and_others_are_an_error_in_words(root: Path) -> None:
    loop = Loop(root)
    progress = Progress()
    loop.accelerator.register_for_checkpointing(progress)
    progress.epoch, progress.seen = 3, 0.1 + 0.2
    loop.train(1)
    loop.run.save()
    loop.run.close()
    again = Loop(root)
    other = Progress()
    again.accelerator.register_for_checkpointing(other)
    assert again.run.resume()
    assert (other.epoch, other.seen) == (3, 0.1 + 0.2)
    again.run.close()
    bare = Loop(root)
    with pytest.raises(StateMismatchError, match=r"1 objects of register_for_checkpointing\(\).*has 0"):
        bare.run.resume()
    bare.run.close()


def test_an_object_that_no_checkpoint_can_hold_is_named_and_stays_the_programs(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd:
        def __init__(self) -> None:
            self.state: dict[str, Any] = {"count": 1, "function": print}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    loop = Loop(root)
    odd = Odd()
    loop.accelerator.register_for_checkpointing(odd)
    loop.train(1)
    loop.run.save()
    loop.run.close()
    assert "['objects']['0']['function']" in caplog.text
    again = Loop(root)
    own = Odd()
    own.state["count"] = 5
    again.accelerator.register_for_checkpointing(own)
    again.run.resume()
    assert own.state == {"count": 1, "function": print}
    again.run.close()


def test_a_native_folder_is_loaded_as_accelerate_does(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    native = Loop(None)
    native.train(2)
    native.accelerator.save_state("native")
    loop = Loop(root, seed=99)
    loop.accelerator.load_state("native")
    assert loop.weights == native.weights
    assert "was written by Accelerate itself" in caplog.text
    # It was asked for, and wins over what the root holds.
    assert not loop.run.resume()
    assert "load_state('native') was asked for, and wins" in caplog.text
    loop.run.close()


def test_batches_are_not_skipped_twice(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(root, every_n_steps=5)
    loop.train(6)
    loop.run.close()
    again = Loop(root, seed=99)
    skipped = again.accelerator.skip_first_batches(again.data, 0)
    assert skipped is again.data
    again.run.resume()
    assert again.accelerator.skip_first_batches(again.data, 5) is again.data
    assert "skips nothing" in caplog.text
    again.train(1)
    assert again.losses == loop.losses[5:]
    again.run.close()


def test_a_loader_that_was_not_prepared_is_told_of(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(root)
    loop.data = loop.accelerator.skip_first_batches(loop.data, 2)
    loop.train(2)
    assert caplog.text.count("training reads from a loader that accelerator.prepare() did not return") == 1
    loop.run.close()


def test_what_is_prepared_bit_by_bit_and_after_the_resume_goes_on_too(root: Path) -> None:
    def second(loop: Loop) -> Any:
        torch.manual_seed(loop.run.steps_done)
        return loop.accelerator.prepare(DataLoader(Numbers(12), batch_size=2, shuffle=True))

    loop = Loop(root)
    other = iter(second(loop))
    for _ in range(3):
        next(other)
    loop.train(2)
    loop.run.save()
    expected = next(other)[1].tolist()
    loop.train(1)
    loop.run.close()

    again = Loop(root, seed=99)
    again.run.resume()
    late = iter(second(again))
    again.ask()  # both are asked for before training goes on
    assert next(late)[1].tolist() == expected
    again.train(1)
    assert again.losses == loop.losses[2:]
    again.run.close()


def test_further_loaders_than_the_run_had_are_an_error(root: Path) -> None:
    loop = Loop(root)
    loop.train(1)
    loop.run.save()
    loop.run.close()
    again = Loop(root)
    again.accelerator.prepare(DataLoader(Numbers(4)))
    with pytest.raises(StateMismatchError, match="had 1 prepared data loaders, and this program has 2"):
        again.run.resume()
    again.run.close()


def test_resuming_before_anything_is_prepared_is_an_error_that_says_so(root: Path) -> None:
    loop = Loop(root)
    loop.train(1)
    loop.run.save()
    loop.run.close()
    again = Loop(root)
    again.accelerator.free_memory()
    with pytest.raises(ConfigError, match="prepare\\(\\) was not called yet"):
        again.run.resume()
    again.run.close()


def test_after_memory_was_freed_another_training_begins(root: Path, tmp_path: Path) -> None:
    loop = Loop(root, every_n_steps=1)
    loop.train(3)
    loop.run.close()
    loop.accelerator.free_memory()
    again = Loop(tmp_path / "other", every_n_steps=1)
    again.train(2)
    again.accelerator.clear()
    assert again.run.steps_done == 0
    again.run.close()
    assert steps_of(tmp_path / "other") == [1, 2]


def test_an_accelerator_has_one_strongroom_at_a_time_and_is_as_it_was_afterwards(root: Path) -> None:
    from strongroom_accelerate import Strongroom

    loop = Loop(root)
    with pytest.raises(ConfigError, match=f"saves into {root} already"):
        Strongroom(loop.accelerator, root.with_name("other"))
    changed = {name for name in vars(loop.accelerator) if callable(vars(loop.accelerator)[name])}
    assert {"save_state", "load_state", "prepare_data_loader"} <= changed
    kind = object.__getattribute__(loop.data, "__class__")
    loop.run.close()
    loop.run.close()
    assert not {"save_state", "load_state", "prepare_data_loader"} & set(vars(loop.accelerator))
    assert "_strongroom_iterate" not in vars(loop.data)
    assert kind is not None
    with pytest.raises(ConfigError, match="was closed"):
        loop.run.step()
    Strongroom(loop.accelerator, root.with_name("other")).close()


def test_nothing_is_saved_before_anything_is_prepared(root: Path) -> None:
    from strongroom_accelerate import Strongroom

    accelerator = new_accelerator()
    run = Strongroom(accelerator, root, every_n_steps=1)
    for ask in (run.step, run.save, accelerator.save_state):
        with pytest.raises(ConfigError, match=r"accelerator.prepare\(\) was not called yet"):
            ask()
    run.close()


def test_steps_of_an_optimizer_that_was_not_prepared_are_told(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(root, every_n_steps=1)
    for _ in range(1000):
        assert loop.run.step() is None
    assert "no optimizer that was prepared has taken a step" in caplog.text
    loop.run.close()


def test_hooks_write_into_a_private_folder_whose_files_are_part_of_the_checkpoint(root: Path) -> None:
    places: list[str] = []

    def save(models: Any, weights: Any, folder: str) -> None:
        places.append(folder)
        torch.rand(3)  # users' code draws
        assert len(models) == len(weights) == 1
        (Path(folder) / "unet").mkdir()
        (Path(folder) / "unet" / "config.json").write_text("{}")
        (Path(folder) / "empty").touch()
        weights.pop()

    loaded: list[str] = []

    def load(models: Any, folder: str) -> None:
        models.pop()
        loaded.append((Path(folder) / "unet" / "config.json").read_text())
        assert (Path(folder) / "empty").read_bytes() == b""

    loop = Loop(root, every_n_steps=2)
    loop.accelerator.register_save_state_pre_hook(save)
    loop.train(BATCHES)
    loop.run.close()
    assert places
    assert not any(Path(place).parent.exists() for place in places)

    again = Loop(root, seed=99)
    again.accelerator.register_load_state_pre_hook(load)
    again.accelerator.load_state(4)
    assert loaded == ["{}"]
    again.train(2)
    assert again.losses == loop.losses[4:]
    again.run.close()


def test_names_and_limits_of_a_project_hold(root: Path) -> None:
    settings = ProjectConfiguration(project_dir=".", automatic_checkpoint_naming=True, total_limit=2)
    loop = Loop(root, accelerator={"project_config": settings})
    for _ in range(4):
        loop.train(1)
        loop.accelerator.save_state()
    loop.run.close()
    assert steps_of(root) == [3, 4]
    assert not Path("checkpoints").exists()

    settings = ProjectConfiguration(project_dir=".", automatic_checkpoint_naming=True, total_limit=2)
    again = Loop(root, accelerator={"project_config": settings}, seed=99)
    again.accelerator.load_state()
    assert again.run.steps_done == 4
    assert again.accelerator.save_iteration == 4
    again.accelerator.load_state("checkpoints/checkpoint_2")
    assert again.run.steps_done == 3
    again.run.close()


def test_saving_between_two_steps_is_told_of(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(root, accelerator={"gradient_accumulation_steps": 2})
    x, y = next(iter(loop.data))
    with loop.accelerator.accumulate(loop.model):
        loop.accelerator.backward(torch.nn.functional.cross_entropy(loop.model(x), y))
        assert loop.run.step() is None
        loop.accelerator.save_state("inside")
    assert "gradients that are being accumulated are in no checkpoint" in caplog.text
    loop.run.close()
