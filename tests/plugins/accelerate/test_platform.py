"""What a platform asks for: sealed, signed, audited runs, no plaintext, figures, loud failures, good ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.tracking import GeneralTracker
from accelerate_runs import BATCHES, Loop, Progress, classifier, terminate, train

from strongroom import Checkpointer, ConfigError, SaveError
from strongroom.frontend import Preempted
from strongroom.stores.local import LocalStore
from strongroom_accelerate import Strongroom
from strongroom_security.recipients.file import create_key_file
from strongroom_security.signers.generating import generate_key

HERE = Path(__file__).parent
MARKER = 0.3717


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One file that seals, signs and audits."""
    create_key_file(tmp_path / "kek.key")
    generate_key(tmp_path / "signer.pem")
    path = tmp_path / "strongroom.toml"
    path.write_text(
        '[seal]\nrecipients = ["file:kek.key"]\n[sign]\nkey = "file:signer.pem"\n'
        '[audit]\nsink = "dir:audit"\n'
    )
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return path


def in_the_clear(folder: Path) -> list[Path]:
    """The files that hold a marked weight."""
    marked = torch.full((4,), MARKER).numpy().tobytes()
    return [path for path in folder.rglob("*") if path.is_file() and marked in path.read_bytes()]


def mark(loop: Loop) -> None:
    with torch.no_grad():
        loop.model[0].weight.fill_(MARKER)


def test_a_run_is_sealed_signed_and_audited_by_one_argument(policy: Path, tmp_path: Path) -> None:
    loop = Loop("run", every_n_steps=2, config=policy)
    written: list[str] = []

    def hook(models: Any, weights: Any, folder: str) -> None:
        torch.save(models[0].state_dict(), f"{folder}/own.bin")
        written.append(folder)

    loop.accelerator.register_save_state_pre_hook(hook)
    loop.train(3)
    mark(loop)
    loop.accelerator.save_state("named")
    loop.run.close()
    assert written
    assert in_the_clear(tmp_path / "work") == []
    assert any((tmp_path / "audit").rglob("*"))
    again = Loop("run", config=policy, seed=99)
    assert again.run.resume()
    assert again.run.steps_done == 3
    again.run.close()


def test_what_would_write_a_sealed_run_in_the_clear_is_refused(policy: Path, tmp_path: Path) -> None:
    loop = Loop("run", config=policy)
    mark(loop)
    with pytest.raises(ConfigError, match=r"accelerator.save_model\(\) writes in the clear"):
        loop.accelerator.save_model(loop.model, "export")
    with pytest.raises(ConfigError, match=r"accelerator.save\(\) writes in the clear"):
        loop.accelerator.save(loop.model.state_dict(), "model.bin")
    assert in_the_clear(tmp_path / "work") == []
    loop.run.close()
    assert "save_model" not in vars(loop.accelerator)


def test_it_is_written_where_that_is_allowed(policy: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop("run", config=policy, escapes="warn")
    loop.accelerator.save_model(loop.model, "export")
    assert Path("export/model.safetensors").is_file()
    assert "accelerator.save_model() writes in the clear" in caplog.text
    loop.run.close()


def test_a_native_folder_is_refused_where_escapes_are(policy: Path, caplog: pytest.LogCaptureFixture) -> None:
    native = Loop(None)
    native.accelerator.save_state("native")
    loop = Loop("run", config=policy, escapes="refuse")
    with pytest.raises(ConfigError, match="nothing in it is sealed"):
        loop.accelerator.load_state("native")
    loop.run.close()
    other = Loop("run", config=policy)
    other.accelerator.load_state("native")
    assert "though this run's policy seals" in caplog.text
    other.run.close()


class Tracker(GeneralTracker):  # type: ignore[misc]  # the framework is untyped
    """Keeps what it is told."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[dict[str, Any], int | None]] = []

    @property
    def tracker(self) -> Any:
        return self.told

    def store_init_configuration(self, values: Any) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self.told.append((values, step))


def test_trackers_are_told_what_saves_cost_under_the_step_that_the_program_is_at(root: Path) -> None:
    tracker = Tracker()

    def begin(accelerator: Any) -> None:
        accelerator.init_trackers("run")

    loop = Loop(root, accelerator={"log_with": [tracker]}, before_prepare=begin, every_n_steps=1)
    loop.train(2)
    loop.accelerator.log({"loss": 1.0}, step=70)
    loop.train(1)
    loop.run.close()
    names = {name for values, _ in tracker.told for name in values}
    assert {"strongroom/step", "strongroom/stall_s", "strongroom/bytes", "loss"} <= names
    assert [step for values, step in tracker.told if values.get("strongroom/step") == 3] == [70, 70]
    assert [step for values, step in tracker.told if "strongroom/stall_s" in values][:2] == [1, 2]


def test_a_tracker_that_fails_ends_no_run(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Tracker):
        def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
            raise OSError("no network")

    loop = Loop(
        root,
        accelerator={"log_with": [Failing()]},
        before_prepare=lambda one: one.init_trackers("run"),
        every_n_steps=1,
    )
    loop.train(3)
    loop.run.close()
    assert caplog.text.count("took no figures of saves") == 1


def test_a_save_that_fails_in_the_background_is_loud_at_the_next_step(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(root, every_n_steps=1)
    loop.train(2)
    loop.run.wait()

    def denied(self: LocalStore, key: str, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied", key)

    monkeypatch.setattr(LocalStore, "open_writer", denied)
    with pytest.raises(SaveError, match="Permission denied"):
        loop.train(3)
    loop.run.close()
    with Checkpointer(root) as checkpointer:
        assert [one.step for one in checkpointer.checkpoints()] == [2, 1]


def test_a_last_save_that_fails_is_loud_when_the_block_is_left(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: LocalStore, key: str, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied", key)

    loop = Loop(root)
    monkeypatch.setattr(LocalStore, "open_writer", denied)
    with pytest.raises(SaveError, match="Permission denied"), loop.run:
        loop.train(1)
    assert "save_state" not in vars(loop.accelerator)


def test_leaving_the_block_saves_the_last_step(root: Path) -> None:
    loop = Loop(root, every_n_steps=4)
    with loop.run:
        loop.train(6)
    with Checkpointer(root) as checkpointer:
        assert [one.step for one in checkpointer.checkpoints()] == [6, 4]


def test_an_exception_in_the_block_saves_nothing_and_stays_what_it_is(root: Path) -> None:
    loop = Loop(root, every_n_steps=4)
    with pytest.raises(ZeroDivisionError), loop.run:
        loop.train(6)
        1 / 0  # noqa: B018 - raises
    with Checkpointer(root) as checkpointer:
        assert [one.step for one in checkpointer.checkpoints()] == [4]


def test_intervals_are_steps_epochs_and_the_end_of_the_last(root: Path, tmp_path: Path) -> None:
    def saved(name: str, **options: Any) -> list[int]:
        by_epochs = options.pop("by_epochs", False)
        train(tmp_path / name, strongroom=options, by_epochs=by_epochs)
        with Checkpointer(tmp_path / name) as checkpointer:
            return sorted(one.step for one in checkpointer.checkpoints())

    assert saved("steps", every_n_steps=5, by_epochs=True) == [5, 10, 12]
    assert saved("epochs", every_n_epochs=1, by_epochs=True) == [6, 12]
    assert saved("own loop", every_n_epochs=1) == [6, 12]
    assert saved("one", every_n_epochs=1, keep=1) == [12]
    assert saved("end", by_epochs=True) == [12]


def test_told_to_stop_a_run_saves_where_it_stands_and_ends_with_143(root: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    loop = Loop(root)
    with pytest.raises(Preempted) as stopped, loop.run:
        loop.train(2)
        terminate()
        loop.train(4)
    assert stopped.value.code == 143
    assert stopped.value.step == 3
    assert signal.getsignal(signal.SIGTERM) == before
    again = Loop(root, seed=99)
    assert again.run.resume()
    assert again.run.steps_done == 3
    again.run.close()


def test_a_loop_that_never_says_step_leaves_signals_alone(root: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    loop = Loop(root)
    loop.run.resume()
    loop.train(1, steps=False)
    loop.accelerator.save_state("here")
    assert signal.getsignal(signal.SIGTERM) == before
    loop.run.close()


ENDS = {
    "nothing": ("", 0),
    "end_training": ("loop.accelerator.end_training()", 0),
    "an exception": ("1 / 0", 1),
    "exit": ("sys.exit(5)", 5),
}

SCRIPT = f"""
import os, sys
sys.path[:0] = [{str(HERE)!r}]
from accelerate_runs import Loop
for name, (last, status) in {ENDS!r}.items():
    child = os.fork()
    if child:
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert ended == status, (name, ended)
    else:
        loop = Loop(f"run {{name}}", every_n_steps=1)
        loop.train(3)
        exec(last)
        break
"""
"""Each end is that of a process of its own, which has imported everything already."""


def test_a_script_that_closes_nothing_loses_nothing(root: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr
    for name in ENDS:
        with Checkpointer(root.with_name(f"run {name}")) as checkpointer:
            assert [one.step for one in checkpointer.checkpoints()] == [3, 2, 1], name


@pytest.mark.parametrize(
    ("arguments", "words"),
    (
        ({"every_n_step": 1}, "did you mean 'every_n_steps'"),
        ({"every_n_steps": -1}, "every_n_steps must be a whole number"),
        ({"every": 5}, "must be a timedelta"),
        ({"scratch": "s3://bucket/x"}, "scratch must be a folder"),
        ({"resume": "always"}, "resume must be one of"),
        ({"escapes": "maybe"}, "escapes must be one of"),
    ),
)
def test_a_wrong_argument_is_an_error_at_once(arguments: Any, words: str, root: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        Loop(root, **arguments)


def test_the_arguments_in_another_order_are_an_error_in_words(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"accelerate.Accelerator first, and then its root; got PosixPath"):
        Strongroom(root, Loop(None).accelerator)


def test_a_checkpoint_that_must_be_there_is_missed(root: Path) -> None:
    loop = Loop(root, resume="must")
    with pytest.raises(Exception, match=r"resume='must', but .* holds no committed checkpoint"):
        loop.run.resume()
    loop.run.close()


def test_another_front_ends_root_is_refused_in_words(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"model": classifier(), "lightning": {}}).result()
    loop = Loop(root)
    with pytest.raises(Exception, match="was not written by Strongroom for Accelerate"):
        loop.run.resume()
    loop.run.close()


def test_modes_that_the_script_changed_on_its_way_come_back(root: Path) -> None:
    loop = Loop(root)
    loop.train(2)
    loop.model[0].weight.requires_grad_(False)
    loop.run.save()
    loop.run.close()
    again = Loop(root)
    again.run.resume()
    assert not again.model[0].weight.requires_grad
    again.run.close()


def test_a_scaler_comes_back(root: Path) -> None:
    """A mock for the scaler of a GPU, which a CPU has none of."""

    class Scaler(Progress):
        def scale(self, loss: Any) -> Any:
            return loss

        def step(self, optimizer: Any, closure: Any = None) -> None:
            optimizer.step()

        def update(self) -> None:
            self.epoch += 1

    def with_scaler(accelerator: Any) -> None:
        accelerator.scaler = Scaler()

    loop = Loop(root, before_prepare=with_scaler, every_n_steps=1)
    loop.train(2)
    loop.run.close()
    again = Loop(root, before_prepare=with_scaler)
    again.run.resume()
    assert again.accelerator.scaler.epoch == 2
    again.run.close()


def test_two_steps_cost_no_save_where_none_is_due(root: Path) -> None:
    loop = Loop(root)
    loop.train(BATCHES)
    assert not os.path.exists(root)
    loop.run.close()
