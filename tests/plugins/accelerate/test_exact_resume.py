"""One process: broken off anywhere, the run ends as the one that was never interrupted, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate_runs import BATCHES, EPOCHS, LOADERS, BrokenOffError, Loop, Outcome, train

Reference = Callable[..., Outcome]


def _goes_on(root: Path, reference: Outcome, *, until: int, **options: Any) -> None:
    with pytest.raises(BrokenOffError):
        train(root, until=until, **options)
    resumed = train(root, seed=99, **options)
    assert resumed.has_resumed
    resumed.ends_like(reference)


@pytest.mark.parametrize("until", range(1, BATCHES * EPOCHS))
def test_a_run_broken_off_anywhere_ends_as_the_uninterrupted_one(
    until: int, root: Path, uninterrupted: Reference
) -> None:
    _goes_on(root, uninterrupted(), until=until)


@pytest.mark.parametrize("until", (3, 6, 7))
def test_a_loop_by_epochs_goes_on_in_its_epoch(until: int, root: Path, uninterrupted: Reference) -> None:
    _goes_on(root, uninterrupted(), until=until, by_epochs=True)


@pytest.mark.parametrize("accumulate", (2, 4))
@pytest.mark.parametrize("until", (5, 9))
def test_where_gradients_are_accumulated_it_goes_on_behind_the_last_step(
    until: int, accumulate: int, root: Path, uninterrupted: Reference
) -> None:
    """Batches that are in no step yet are trained on again."""
    _goes_on(root, uninterrupted(accumulate=accumulate), until=until, accumulate=accumulate)


@pytest.mark.parametrize("loader", sorted(set(LOADERS) - {"stock", "stateful, workers"}))
@pytest.mark.parametrize("until", (2, 8))
def test_every_kind_of_loader_goes_on(until: int, loader: str, root: Path, uninterrupted: Reference) -> None:
    _goes_on(root, uninterrupted(loader=loader), until=until, loader=loader)


@pytest.mark.parametrize("until", (2, 8))
def test_workers_of_a_loader_that_keeps_its_place_go_on(until: int, root: Path, tmp_path: Path) -> None:
    """In the first epoch they draw otherwise than without us: Accelerate starts them when it prepares it."""
    reference = train(tmp_path / "reference", loader="stateful, workers")
    _goes_on(root, reference, until=until, loader="stateful, workers")


@pytest.mark.parametrize("loader", sorted(set(LOADERS) - {"stateful, workers"}))
def test_saving_changes_nothing_of_the_run(loader: str, root: Path, uninterrupted: Reference) -> None:
    train(root, loader=loader, strongroom={"every_n_steps": 3}).ends_like(uninterrupted(loader=loader))


def test_the_sampler_alone_can_be_brought_forward(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BrokenOffError):
        train(root, until=4)
    assert train(root, seed=99, strongroom={"skip": "sampler"}).has_resumed
    assert "back at batch 4 of epoch 0, by its sampler" in caplog.text


def test_a_run_that_is_over_trains_nothing(root: Path, uninterrupted: Reference) -> None:
    train(root, by_epochs=True)
    again = train(root, by_epochs=True, seed=99)
    assert again.losses == []
    again.ends_like(uninterrupted())


def test_a_run_interrupted_again_and_again_ends_the_same(root: Path, uninterrupted: Reference) -> None:
    for until, seed in ((2, 7), (5, 1), (6, 2), (10, 3)):
        with pytest.raises(BrokenOffError):
            train(root, until=until, seed=seed)
    train(root, seed=99).ends_like(uninterrupted())


def test_where_a_script_accumulates_gradients_by_itself_a_step_is_one_of_the_optimizer(root: Path) -> None:
    reference = Loop(None)
    reference.train(8, every=2)
    broken = Loop(root, every_n_steps=1)
    broken.train(5, every=2)
    assert broken.run.steps_done == 2
    broken.run.close()
    resumed = Loop(root, seed=99)
    assert resumed.run.resume()
    resumed.train(4, every=2)
    assert resumed.losses == reference.losses[4:]
    assert resumed.weights == reference.weights


def test_an_epoch_that_ends_between_a_scripts_own_steps_is_told(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(root, every_n_epochs=1)
    for _ in loop.run.epochs(2):
        loop.train(BATCHES, every=4)
    assert caplog.text.count("an epoch ended 2 batches behind the optimizer's last step") == 1
    loop.run.close()


def test_an_evaluation_on_the_training_data_is_no_epoch(root: Path) -> None:
    def trained(loop: Loop) -> list[int]:
        found = []
        while loop.run.epochs_done < 3:
            loop.train(BATCHES)
            loop.begin_anew()
            sum(1 for _ in loop.data)
            found.append(loop.run.epochs_done)
            if loop.run.steps_done == 2 * BATCHES:
                loop.run.save().result()
                break
        return found

    first = Loop(root, every_n_steps=100)
    assert trained(first) == [1, 2]
    first.run.close()
    resumed = Loop(root, every_n_steps=100)
    resumed.run.resume()
    assert resumed.run.epochs_done == 2
    assert trained(resumed) == [3]
    resumed.run.close()
