"""The Trainer's own folders, sealed as it writes them: none stays in the clear, and each can be had back.

Runs are taken up from the random state that they began with, as programs do: exactness is the Trainer's here.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from small_lm import STEPS, llama, losses_of, texts, trainer
from transformers import TrainerCallback

from strongroom import Checkpointer
from strongroom.errors import (
    CheckpointNotFoundError,
    ConfigError,
    IntegrityError,
    StateMismatchError,
    StoreError,
)
from strongroom.frontend import Preempted
from strongroom_security.recipients.file import create_key_file
from strongroom_transformers import SealedFolders, StrongroomCallback, unseal
from strongroom_transformers.folders import FOLDER_PART, listed, put_down

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
}


def attach(root: Path, **options: Any) -> Any:
    return lambda made: SealedFolders(root, **options).attach(made)


def run(tmp_path: Path, **changes: Any) -> Any:
    given = {"attach": attach(tmp_path / "root"), "save_steps": 2, **changes}
    return trainer(llama(), tmp_path / "out", **given)


def steps_of(root: Path) -> list[int]:
    return sorted(one.step for one in Checkpointer(root).checkpoints())


def folders_in(tmp_path: Path) -> list[str]:
    return sorted(one.name for one in (tmp_path / "out").glob("checkpoint-*"))


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders are laid down; nothing may be left there."""
    place = tmp_path / "scratch"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    one = trainer(llama(), tmp_path_factory.mktemp("whole"), save_strategy="no")
    one.train()
    return one


def test_folders_are_sealed_and_removed_and_the_run_goes_on_from_the_newest(
    tmp_path: Path, uninterrupted: Any, scratch: Path
) -> None:
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, stops_at=5).train()
    assert steps_of(tmp_path / "root") == [2, 4]
    assert folders_in(tmp_path) == []
    seen: list[int] = []

    class Looks(TrainerCallback):  # type: ignore[misc]  # of a package without types here
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(len(list(scratch.iterdir())))

    unseal(
        tmp_path / "root", tmp_path / "out" / "checkpoint-4", step=4
    )  # as a run that is killed may leave it
    resumed = run(tmp_path, callbacks=[Looks()])
    resumed.train()
    assert seen == [1, 0, 0, 0]  # laid down for the first step alone
    assert losses_of(resumed) == losses_of(uninterrupted)
    assert all(
        torch.equal(one, other)
        for one, other in zip(resumed.model.parameters(), uninterrupted.model.parameters(), strict=True)
    )
    assert folders_in(tmp_path) == []
    assert list(scratch.iterdir()) == []
    assert steps_of(tmp_path / "root") == [2, 4, 6, 8]


def test_folders_are_removed_while_it_trains_and_not_only_then(tmp_path: Path) -> None:
    standing: list[int] = []

    class Looks(TrainerCallback):  # type: ignore[misc]  # of a package without types here
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            standing.append(len(folders_in(tmp_path)))

    run(tmp_path, save_steps=1, callbacks=[Looks()]).train()
    assert max(standing) <= 2  # the one that is being committed, and the one before


def test_every_byte_comes_back_and_the_trainer_takes_it(tmp_path: Path, uninterrupted: Any) -> None:
    run(tmp_path, attach=attach(tmp_path / "root", keep_folders=True)).train()
    assert folders_in(tmp_path) == [f"checkpoint-{step}" for step in (2, 4, 6, 8)]
    back = unseal(tmp_path / "root", tmp_path / "back", step=4)
    original = tmp_path / "out" / "checkpoint-4"
    assert {name for name, _ in listed(back)} == FILES
    for name, _ in listed(original):
        assert digest(back / name) == digest(original / name), name
    assert back.stat().st_mode & 0o077 == 0
    native = trainer(llama(), tmp_path / "native", save_strategy="no")
    native.train(resume_from_checkpoint=str(back))
    assert losses_of(native) == losses_of(uninterrupted)
    newest = unseal(tmp_path / "root", tmp_path / "newest")
    assert digest(newest / "model.safetensors") == digest(tmp_path / "out/checkpoint-8/model.safetensors")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_train_is_given_counts(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        run(tmp_path).train(resume_from_checkpoint=True)
    run(tmp_path, max_steps=4).train()
    anew = run(tmp_path, max_steps=1)
    anew.train(resume_from_checkpoint=False)
    assert len(losses_of(anew)) == 1
    named = run(tmp_path, max_steps=3, save_strategy="no")
    named.train(resume_from_checkpoint=f"strongroom://{tmp_path / 'root'}#step=2")
    assert named.state.global_step == 3
    assert len(losses_of(named)) == 3


def test_under_a_policy_that_seals_nothing_is_left_in_the_clear(tmp_path: Path) -> None:
    create_key_file(tmp_path / "kek.key")
    policy = tmp_path / "policy.toml"
    policy.write_text('[seal]\nrecipients = ["file:kek.key"]\n')
    at = attach(tmp_path / "root", security=policy)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, stops_at=3, attach=at).train()
    clear = [one for one in tmp_path.rglob("*") if one.is_file() and b"lm_head" in one.read_bytes()]
    assert clear == []
    resumed = run(tmp_path, attach=at, max_steps=3)
    resumed.train()
    resumed.save_model(str(tmp_path / "export"))
    assert (tmp_path / "export" / "run.json").exists()
    assert not (tmp_path / "export" / "model.safetensors").exists()
    back = unseal(tmp_path / "root", tmp_path / "back", security=policy)
    assert b"lm_head" in (back / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="push_to_hub=True uploads what the Trainer saves, in the clear"):
        SealedFolders(tmp_path / "root", security=policy).attach(_pushing(tmp_path))


def _pushing(tmp_path: Path) -> Any:
    made = trainer(llama(), tmp_path / "out")
    made.args.push_to_hub = True
    return made


def test_told_to_stop_the_step_is_sealed_whether_or_not_it_was_due(
    tmp_path: Path, uninterrupted: Any
) -> None:
    class Signals(TrainerCallback):  # type: ignore[misc]  # of a package without types here
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Preempted) as raised:
        run(tmp_path, save_steps=100, callbacks=[Signals()]).train()
    assert raised.value.code == 128 + signal.SIGTERM
    assert steps_of(tmp_path / "root") == [3]
    assert folders_in(tmp_path) == []
    resumed = run(tmp_path)
    resumed.train()
    assert losses_of(resumed) == losses_of(uninterrupted)


def test_a_damaged_one_is_passed_over(tmp_path: Path, uninterrupted: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, stops_at=5).train()
    shard = next((tmp_path / "root").glob("step-*4-*/data/*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(IntegrityError):
        unseal(tmp_path / "root", tmp_path / "back", step=4)
    assert not (tmp_path / "back").exists()
    resumed = run(tmp_path)
    resumed.train()
    assert losses_of(resumed) == losses_of(uninterrupted)
    assert resumed.state.log_history[0]["step"] == 1


def test_the_best_model_is_loaded_although_its_folder_is_gone(tmp_path: Path, scratch: Path) -> None:
    one = run(
        tmp_path,
        save_steps=1,
        eval_dataset=texts(4),
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # so that it is not the last
        save_total_limit=1,
    )
    one.train()
    best = one.state.best_global_step
    assert best < STEPS
    assert steps_of(tmp_path / "root") == [best, STEPS]
    assert folders_in(tmp_path) == []
    assert list(scratch.iterdir()) == []
    found = Checkpointer(tmp_path / "root").restore(step=best)
    assert found is not None
    folder = tmp_path / "best"
    put_down(found.state, folder)
    weights = type(one.model).from_pretrained(folder)
    assert all(
        torch.equal(mine, kept)
        for mine, kept in zip(one.model.parameters(), weights.parameters(), strict=True)
    )


# ----------------------------------------------------------------------------------------------- refusals


def test_a_root_of_another_front_end_is_refused(tmp_path: Path) -> None:
    ours = trainer(
        llama(),
        tmp_path / "out",
        attach=lambda made: StrongroomCallback(tmp_path / "root").attach(made),
        max_steps=1,
    )
    ours.train()
    with pytest.raises(StateMismatchError, match="holds no folder"):
        run(tmp_path).train()
    with pytest.raises(StateMismatchError, match="holds no folder"):
        unseal(tmp_path / "root", tmp_path / "back")


def test_folders_that_nothing_resumes_from_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save_only_model"):
        run(tmp_path, save_only_model=True)


def test_one_callback_a_trainer_and_one_trainer_a_callback(tmp_path: Path) -> None:
    made = run(tmp_path)
    with pytest.raises(ConfigError, match="has one already"):
        SealedFolders(tmp_path / "other").attach(made)
    with pytest.raises(ConfigError, match=r"takes a transformers\.Trainer, got a list"):
        SealedFolders(tmp_path / "other").attach([])
    with pytest.raises(ConfigError, match="did you mean 'keep_folders'"):
        SealedFolders(tmp_path / "other", keep_folder=True)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="keep_folders must be True or False"):
        SealedFolders(tmp_path / "other", keep_folders="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ("../escaped", "/etc/escaped", "a/../../escaped", ""))
def test_a_name_that_leads_out_of_the_folder_writes_nothing(tmp_path: Path, name: str) -> None:
    state = {FOLDER_PART: {"files": [[name, 0]]}, "files": {name: torch.empty(0, dtype=torch.uint8)}}
    with pytest.raises(StateMismatchError, match="would lie outside of the folder"):
        put_down(state, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_a_folder_that_is_there_is_not_written_into(tmp_path: Path) -> None:
    run(tmp_path, max_steps=2).train()
    (tmp_path / "back").mkdir()
    with pytest.raises(StoreError, match="could not be written"):
        unseal(tmp_path / "root", tmp_path / "back")
    with pytest.raises(CheckpointNotFoundError):
        unseal(tmp_path / "empty", tmp_path / "other")


def test_links_are_refused_since_what_they_lead_to_is_not_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("elsewhere")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="no plain file"):
        listed(tmp_path / "folder")


@pytest.mark.parametrize("log_saves", (True, False))
def test_trackers_are_told_what_sealing_costs_unless_they_are_not_to_be(
    tmp_path: Path, log_saves: bool
) -> None:
    class Tracker(TrainerCallback):
        told: frozenset[str] = frozenset()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            self.told = self.told | {name for name in logs if name.startswith("strongroom/")}

    tracker = Tracker()
    made = run(tmp_path, attach=attach(tmp_path / "root", log_saves=log_saves))
    made.add_callback(tracker)
    made.train()
    costs = {f"strongroom/{name}" for name in ("step", "stall_s", "background_s", "bytes")}
    assert tracker.told == (costs if log_saves else set())
    assert not [entry for entry in made.state.log_history if any("strongroom" in name for name in entry)]
