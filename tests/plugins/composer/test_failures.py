"""What goes wrong: loud, in words, and without harm to what was committed."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import composer_runs
import pytest
import torch
from composer import Algorithm, Callback, Event, Trainer
from composer.algorithms import Alibi, BlurPool, SqueezeExcite
from composer.core import engine
from composer_runs import Average, BrokenOffError, Net, stock_loader, train

from strongroom import Checkpointer, SaveError, StateEncodingError, StateMismatchError
from strongroom.frontend import Preempted
from strongroom.stores.local import LocalStore
from strongroom_composer import StrongroomCheckpoint


def steps_of(root: Path) -> list[int]:
    return sorted(one.step for one in Checkpointer(root).checkpoints())


# ------------------------------------------------------------------------------------------ a disk that fails


class FullDisk:
    """A store that takes nothing from the moment on that it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self.has_refused = threading.Event()
        original = LocalStore.open_writer

        def open_writer(store: LocalStore, key: str, **options: Any) -> Any:
            if self.is_full:
                self.has_refused.set()
                raise OSError(28, "No space left on device", key)
            return original(store, key, **options)

        monkeypatch.setattr(LocalStore, "open_writer", open_writer)

    def fill_once(self, root: Path, steps: list[int]) -> None:
        """Be full, once these are committed: saves are written in the background, fast or slowly."""
        while steps_of(root) != steps:
            time.sleep(0.01)
        self.is_full = True

    def clear_once_it_refused(self) -> None:
        """Take everything again, once something was not taken."""
        assert self.has_refused.wait(60)
        self.is_full = False


class At(Callback):
    """Calls something before a batch."""

    def __init__(self, batch: int, act: Any) -> None:
        self.batch, self.act = batch, act

    def batch_start(self, state: Any, logger: Any) -> None:
        if int(state.timestamp.batch) == self.batch:
            self.act()


def test_a_save_that_fails_in_the_background_ends_the_run_at_the_next(
    fit: Any, root: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: Any
) -> None:
    disk = FullDisk(monkeypatch)
    with pytest.raises(SaveError, match="No space left on device"):
        fit(callbacks=(lambda: At(4, lambda: setattr(disk, "is_full", True)),))
    left = steps_of(root)
    assert left in ([1, 2, 3], [1, 2, 3, 4])
    disk.is_full = False
    fit(seed=1000).ends_like(uninterrupted())


def test_the_last_save_that_fails_is_raised_when_fit_ends(
    fit: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    with pytest.raises(SaveError, match="No space left on device"):
        fit(
            checkpoint={"save_interval": "1ep"},
            callbacks=(lambda: At(8, lambda: disk.fill_once(root, [6])),),
        )
    assert steps_of(root) == [6]


def test_so_many_failures_may_be_tolerated(
    fit: Any, root: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: Any
) -> None:
    disk = FullDisk(monkeypatch)
    acts = (
        lambda: At(5, lambda: disk.fill_once(root, [4])),
        lambda: At(9, disk.clear_once_it_refused),
    )
    checkpoint = {"save_interval": "4ba", "tolerate_failures": 1}
    fit(checkpoint=checkpoint, callbacks=acts).ends_like(uninterrupted())
    assert steps_of(root) == [4, 12]


# ----------------------------------------------------------------------------------------- being told to stop


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))
def test_a_signal_saves_at_the_next_boundary_and_ends_with_its_status(
    fit: Any, root: Path, uninterrupted: Any, number: signal.Signals
) -> None:
    before = [signal.getsignal(one) for one in signal.Signals if one not in (signal.SIGKILL, signal.SIGSTOP)]
    checkpoint = {"save_interval": "100ep", "preemption_signals": ("SIGTERM", "SIGUSR1", "SIGINT")}
    with pytest.raises(Preempted) as left:
        fit(checkpoint=checkpoint, callbacks=(lambda: At(4, lambda: os.kill(os.getpid(), number)),))
    assert left.value.code == 128 + number
    assert left.value.step == 5
    assert steps_of(root) == [5]
    # Composer's own handlers are back.
    assert before == [
        signal.getsignal(one) for one in signal.Signals if one not in (signal.SIGKILL, signal.SIGSTOP)
    ]
    assert signal.getsignal(signal.SIGTERM) is engine.sigterm_handler
    resumed = fit(seed=1000, checkpoint={"save_interval": "100ep"})
    resumed.ends_like(uninterrupted())


def test_with_no_signals_composers_own_handler_ends_the_run_at_once(fit: Any, root: Path) -> None:
    with pytest.raises(SystemExit) as left:
        fit(
            checkpoint={"save_interval": "1ba", "preemption_signals": ()},
            callbacks=(lambda: At(4, lambda: os.kill(os.getpid(), signal.SIGTERM)),),
        )
    assert not isinstance(left.value, Preempted)
    assert left.value.code == 143
    assert steps_of(root) == [1, 2, 3, 4]


def test_a_notice_stops_the_run(fit: Any, root: Path) -> None:
    told = threading.Event()

    def notice() -> str | None:
        return "the host is wanted back" if told.is_set() else None

    def wait_for_the_question() -> None:
        told.set()
        threading.Event().wait(0.3)

    with pytest.raises(Preempted, match="the host is wanted back"):
        fit(
            checkpoint={"save_interval": "100ep", "spot_notice": notice, "spot_notice_every_s": 0.05},
            callbacks=(lambda: At(3, wait_for_the_question),),
        )
    assert len(steps_of(root)) == 1


def test_a_stop_before_the_first_step_saves_nothing(fit: Any, root: Path) -> None:
    class Early(Callback):
        def fit_start(self, state: Any, logger: Any) -> None:
            self.first = True

        def epoch_start(self, state: Any, logger: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Preempted) as left:
        fit(callbacks=(Early,), checkpoint={"save_interval": "100ep"})
    assert left.value.step == 1
    assert steps_of(root) == [1]


# -------------------------------------------------------------------------------- errors, closing in mid-step


def test_an_error_in_training_saves_nothing_and_is_the_error_that_it_is(
    fit: Any, root: Path, said: Any
) -> None:
    with pytest.raises(ZeroDivisionError):
        fit(checkpoint={"save_interval": "2ba"}, callbacks=(lambda: At(5, lambda: 1 / 0),))
    assert steps_of(root) == [2, 4]
    assert signal.getsignal(signal.SIGTERM) is engine.sigterm_handler


def test_closing_in_the_middle_of_a_step_saves_nothing(root: Path) -> None:
    """As at exit, after Composer's handler of a signal that is not ours has raised SystemExit."""
    model = Net()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters()),
        train_dataloader=stock_loader(),
        max_duration="1ep",
        callbacks=[StrongroomCheckpoint(root, save_interval="1ba"), At(3, lambda *_: trainer.close())],
        device="cpu",
        progress_bar=False,
        seed=7,
    )
    with pytest.raises(RuntimeError, match="already closed"):
        trainer.fit()
    assert steps_of(root) == [1, 2, 3]
    assert signal.getsignal(signal.SIGTERM) is engine.sigterm_handler


def test_an_error_while_the_trainer_is_built_leaves_nothing_open(root: Path) -> None:
    class Refusing(Callback):
        def after_load(self, state: Any, logger: Any) -> None:
            raise BrokenOffError

    with pytest.raises(BrokenOffError):
        train(root, callbacks=(Refusing,))
    train(root, until=3)
    assert steps_of(root) == [1, 2, 3]


# ------------------------------------------------------------------------------------------------- algorithms


def widened() -> Any:
    return Surgery()


class Surgery(Algorithm):
    """Changes the model: it cannot be loaded without."""

    def __init__(self, by: int = 2) -> None:
        self.by = by

    def __repr__(self) -> str:
        return f"Surgery(by={self.by})"

    @staticmethod
    def required_on_load() -> bool:
        return True

    def match(self, event: Event, state: Any) -> bool:
        return event == Event.INIT

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        torch.manual_seed(1)
        for module in state.model.modules():
            if isinstance(module, torch.nn.Sequential):
                module.append(torch.nn.Linear(3, 3))
        state.optimizers[0].add_param_group({"params": list(state.model.net[-1].parameters())})


def test_an_algorithm_that_changed_the_model_is_wanted_again_by_name_and_never_made_from_a_text(
    fit: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(until=4, algorithms=(widened,))
    # Composer would evaluate this text, if it were among its own algorithms.
    monkeypatch.setattr("builtins.eval", lambda *args: pytest.fail("a text from a checkpoint was run"))
    with pytest.raises(
        StateMismatchError, match=r"algorithms that this Trainer does not have: Surgery\(by=2\)"
    ):
        fit()
    reference = fit(None, algorithms=(widened,))
    fit(seed=1000, algorithms=(widened,)).ends_like(reference)


@pytest.mark.parametrize("algorithm", (SqueezeExcite, BlurPool, Alibi))
def test_composers_own_that_change_models_say_so(algorithm: Any) -> None:
    assert algorithm.required_on_load()


def test_an_algorithm_with_other_arguments_is_told(fit: Any, said: Any) -> None:
    fit(until=4, algorithms=(lambda: Surgery(2),))
    fit(algorithms=(lambda: Surgery(3),))
    assert "the algorithm was Surgery(by=2) when the checkpoint was saved, and is Surgery(by=3)" in said.text


def test_algorithms_and_callbacks_that_come_and_go_are_told(fit: Any, said: Any) -> None:
    class Gone(Average):
        pass

    fit(until=4, callbacks=(Gone,), algorithms=(composer_runs.Noise,))
    fit(until=6)
    assert "the state of the callback" in said.text
    assert "saved with the algorithm Noise, which this Trainer does not have" in said.text
    fit(algorithms=(composer_runs.Noise,))
    assert "the algorithm Noise was not there when the checkpoint was saved, and begins anew" in said.text


class Named(Average):
    """Of which there are two."""


def test_two_callbacks_of_one_class_keep_a_state_each(fit: Any) -> None:
    def two() -> tuple[Named, Named]:
        first, second = Named(), Named()
        first.count, second.count = 100, 200
        return first, second

    first, second = two()
    fit(until=4, callbacks=(lambda: first, lambda: second))
    assert (first.count, second.count) == (104, 204)
    again, other = Named(), Named()
    fit(callbacks=(lambda: again, lambda: other))
    assert (again.count, other.count) == (112, 212)


# --------------------------------------------------------------------------------------- what has no encoding


class Strange(Callback):
    """Its state holds what no checkpoint can hold."""

    def __init__(self) -> None:
        self.key, self.count = object(), 0

    def batch_end(self, state: Any, logger: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"key": self.key, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.key, self.count = state["key"], state["count"]


def test_what_has_no_encoding_is_told_once_and_stays_the_programs_own(fit: Any, said: Any) -> None:
    fit(until=4, callbacks=(Strange,))
    (warning,) = (one for one in said.records if "no pickle is in a checkpoint" in one.getMessage())
    assert "callbacks" in warning.getMessage()
    assert "key" in warning.getMessage()
    strange = Strange()
    own = strange.key
    fit(callbacks=(lambda: strange,))
    assert strange.key is own
    assert strange.count == 12


def test_or_it_is_refused(fit: Any) -> None:
    with pytest.raises(StateEncodingError, match="unencodable='refuse'"):
        fit(callbacks=(Strange,), checkpoint={"save_interval": "1ba", "unencodable": "refuse"})


def test_data_of_which_nobody_knows_how_far_they_were_read_are_refused(root: Path) -> None:
    batches = [(torch.zeros(4, 6), torch.zeros(4, dtype=torch.long))] * 6
    with pytest.raises(Exception, match="of which nobody can see how far it was read"):
        train(root, loader=lambda: batches, device_train_microbatch_size=4)
