"""``trainer.save_checkpoint`` by hand, and checkpoints that hold the model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from safetensors.torch import load_file, load_model
from torch.utils.data import DataLoader, Dataset

from strongroom import Checkpointer
from strongroom.errors import CheckpointNotFoundError, ConfigError, StateMismatchError, StoreError
from strongroom.exporting.onefile import write_weights
from strongroom_security.recipients.file import create_key_file


class Numbers(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return torch.ones(6), torch.tensor(1)


class Saving(Callback):
    """Calls ``save_checkpoint`` once, in one of Lightning's hooks, at a step."""

    def __init__(self, path: Any, *, hook: str = "on_train_batch_end", step: int = 5, **options: Any) -> None:
        self.calls = 0

        def call(trainer: Any, *args: Any) -> None:
            if trainer.global_step == step and not self.calls:
                self.calls += 1
                trainer.save_checkpoint(path, **options)

        setattr(self, hook, call)


def steps(root: Any) -> list[int]:
    return [one.step for one in reversed(Checkpointer(root).checkpoints()) if not one.is_superseded]


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


SELDOM = {"every_n_train_steps": 100}


def test_a_path_after_fit_becomes_a_root_that_lightning_reads(fit: Any, root: Path, net: Any) -> None:
    outcome = fit(checkpoint=SELDOM, max_steps=12, max_epochs=-1)
    path = root.parent / "model.ckpt"
    outcome.trainer.save_checkpoint(path)
    assert steps(path) == [12]
    assert same(net.load_from_checkpoint(path).state_dict(), outcome.weights)


def test_training_goes_on_exactly_from_what_was_saved_after_fit(
    fit: Any, root: Path, uninterrupted: Any
) -> None:
    outcome = fit(checkpoint=SELDOM, max_steps=12, max_epochs=-1)
    outcome.trainer.save_checkpoint(root.parent / "model.ckpt")
    resumed = fit(root.parent / "next", seed=1, checkpoint=SELDOM, ckpt_path=str(root.parent / "model.ckpt"))
    resumed.ends_like(uninterrupted())


def test_it_stands_when_the_call_returns_and_changes_nothing(
    fit: Any, root: Path, uninterrupted: Any
) -> None:
    class Looking(Saving):
        def on_train_batch_start(self, *args: Any) -> None:
            if self.calls:
                assert steps(root.parent / "x.ckpt") == [5]

    with pytest.warns(UserWarning, match="saved while a step was under way"):
        outcome = fit(checkpoint=SELDOM, callbacks=(lambda: Looking(root.parent / "x.ckpt"),))
    outcome.ends_like(uninterrupted())


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before:")
def test_a_resume_from_the_middle_of_a_step_says_that_it_is_not_exact(fit: Any, root: Path) -> None:
    with pytest.warns(UserWarning, match="saved while a step was under way"):
        fit(checkpoint=SELDOM, callbacks=(lambda: Saving(root.parent / "x.ckpt"),), max_epochs=1)
    with pytest.warns(UserWarning, match="Lightning's own, not exact"):
        resumed = fit(
            root.parent / "n", checkpoint=SELDOM, ckpt_path=str(root.parent / "x.ckpt"), max_epochs=2
        )
    assert resumed.trainer.current_epoch == 2


@pytest.mark.parametrize("name", ("strongroom://latest", "{root}/here.ckpt", "strongroom://{root}"))
def test_the_runs_own_root_takes_it_as_soon_as_the_step_is_over(
    fit: Any, root: Path, uninterrupted: Any, name: str
) -> None:
    fit(checkpoint=SELDOM, until=6, callbacks=(lambda: Saving(name.format(root=root)),))
    assert steps(root) == [5]
    fit(checkpoint=SELDOM, seed=1).ends_like(uninterrupted())


@pytest.mark.parametrize("hook", ("on_train_end", "on_fit_end"))
def test_at_the_end_of_training_it_is_there_already(fit: Any, root: Path, hook: str) -> None:
    class Ending(Callback):
        pass

    def call(trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint("strongroom://latest")
        assert steps(root) == [30]

    ending = Ending()
    setattr(ending, hook, call)
    outcome = fit(checkpoint=SELDOM, callbacks=(lambda: ending,))
    outcome.trainer.save_checkpoint("strongroom://latest")  # and after it
    assert steps(root) == [30]


def test_where_nothing_exact_could_be_saved_the_runs_root_takes_nothing(fit: Any, root: Path) -> None:
    outcome = fit(checkpoint={"every_n_train_steps": 4}, until=6)
    with pytest.raises(ConfigError, match=r"step 6, where training stands, does not; save into another path"):
        outcome.trainer.save_checkpoint("strongroom://latest")
    with pytest.raises(ConfigError, match="what is saved is where training stands"):
        outcome.trainer.save_checkpoint("strongroom://other#step=4")
    with pytest.raises(ConfigError, match="give the model alone a path of its own"):
        outcome.trainer.save_checkpoint(root, weights_only=True)
    with pytest.raises(ConfigError, match="storage_options"):
        outcome.trainer.save_checkpoint("x.ckpt", storage_options={})


def test_what_was_saved_by_hand_is_replaced_and_another_run_is_not(fit: Any, root: Path) -> None:
    outcome = fit(checkpoint=SELDOM, max_steps=3, max_epochs=-1)
    path = root.parent / "x.ckpt"
    outcome.trainer.save_checkpoint(path)
    outcome.trainer.save_checkpoint(path)
    outcome.trainer.save_checkpoint(path)
    assert len(list(path.glob("step-*"))) <= 2  # and never none
    fit(root.parent / "other", checkpoint=SELDOM, max_steps=3, max_epochs=-1)
    with pytest.raises(ConfigError, match="run"):
        outcome.trainer.save_checkpoint(root.parent / "other")


def test_weights_alone_by_hand(fit: Any, root: Path, net: Any) -> None:
    outcome = fit(checkpoint=SELDOM, max_steps=3, max_epochs=-1)
    outcome.trainer.save_checkpoint("small.ckpt", weights_only=True)
    assert same(net.load_from_checkpoint("small.ckpt").state_dict(), outcome.weights)
    with pytest.raises(StateMismatchError, match="holds the model alone"):
        fit(root.parent / "next", checkpoint=SELDOM, ckpt_path="small.ckpt")


def test_a_safetensors_file_of_the_weights(fit: Any, root: Path) -> None:
    outcome = fit(checkpoint=SELDOM, max_steps=3, max_epochs=-1)
    outcome.trainer.save_checkpoint("model.safetensors", weights_only=True)
    assert same(load_file("model.safetensors"), outcome.weights)
    assert [path.name for path in root.parent.iterdir() if path.is_file()] == ["model.safetensors"]
    with pytest.raises(ConfigError, match="say weights_only=True"):
        outcome.trainer.save_checkpoint("model.safetensors")


def test_a_sealing_policy_lets_no_plain_weights_out(fit: Any, root: Path, net: Any, monkeypatch: Any) -> None:
    create_key_file(root.parent / "kek.key")
    policy = root.parent / "strongroom.toml"
    policy.write_text('[seal]\nrecipients = ["file:kek.key"]\n')
    outcome = fit(checkpoint={**SELDOM, "security": str(policy)}, max_steps=3, max_epochs=-1)
    with pytest.raises(ConfigError, match="the policy seals them; `strongroom export"):
        outcome.trainer.save_checkpoint("model.safetensors", weights_only=True)
    outcome.trainer.save_checkpoint("sealed.ckpt")
    assert not list(Path("sealed.ckpt").rglob("*.safetensors"))
    assert list(Path("sealed.ckpt").rglob("*.safetensors.floe"))
    monkeypatch.setenv("STRONGROOM_CONFIG", str(policy))
    assert same(net.load_from_checkpoint("sealed.ckpt").state_dict(), outcome.weights)


def test_what_lightnings_callbacks_save_is_theirs(fit: Any, root: Path) -> None:
    other = ModelCheckpoint(dirpath=root.parent / "theirs", every_n_train_steps=5, save_last=True)
    fit(checkpoint=SELDOM, callbacks=(lambda: other,), max_epochs=1)
    assert Path(other.best_model_path).is_file()
    assert (root.parent / "theirs" / "last.ckpt").is_file()


def test_without_a_model_lightning_says_so_itself(fit: Any) -> None:
    with pytest.raises(AttributeError, match="a model is attached"):
        lightning.Trainer(logger=False, accelerator="cpu").save_checkpoint("x.ckpt")


def test_a_run_that_saves_weights_alone(fit: Any, root: Path, net: Any) -> None:
    only = {"every_n_train_steps": 5, "save_weights_only": True, "monitor": "loss", "save_top_k": -1}
    outcome = fit(checkpoint=only, max_epochs=1)
    assert steps(root) == [5, 10]
    assert set(Checkpointer(root).restore().state) == {"model", "lightning"}
    assert same(net.load_from_checkpoint(root).state_dict(), outcome.weights)
    fresh = net()
    outcome.trainer.validate(fresh, DataLoader(Numbers(4)), ckpt_path="strongroom://#step=10", verbose=False)
    assert same(fresh.state_dict(), outcome.weights)
    assert net.load_from_checkpoint(f"strongroom://{root}#best").hparams.width == 8
    with pytest.raises(StateMismatchError, match="no state of the optimizers to train on with"):
        fit(checkpoint=only)


def test_tied_weights_are_written_once_and_tied_again(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(4, 3)
            self.head = torch.nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight

    module, other = Tied(), Tied()
    write_weights(tmp_path / "m.safetensors", module.state_dict())
    assert list(load_file(tmp_path / "m.safetensors")) == ["embed.weight"]
    load_model(other, tmp_path / "m.safetensors")
    assert torch.equal(other.head.weight, module.head.weight)


def test_weights_that_overlap_or_lie_apart_are_written(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {"whole": whole, "part": whole[1:], "turned": whole.T, "none": torch.zeros(0)}
    write_weights(tmp_path / "new" / "m.safetensors", tensors)
    assert same(load_file(tmp_path / "new" / "m.safetensors"), tensors)


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_weights(path, {"a": torch.ones(2)})
    with pytest.raises(ConfigError, match="cannot hold b"):
        write_weights(path, {"a": torch.zeros(2), "b": 3})
    assert torch.equal(load_file(path)["a"], torch.ones(2))
    with pytest.raises(ConfigError, match="name a file"):
        write_weights("s3://bucket/m.safetensors", {"a": torch.ones(2)})
    assert [one.name for one in tmp_path.iterdir()] == ["m.safetensors"]
    with pytest.raises(StoreError, match="could not be written"):
        write_weights("/proc/m.safetensors", {"a": torch.ones(2)})  # safetensors' own error


def test_where_it_goes_is_a_path_and_a_home_folder_is_expanded(
    fit: Any, net: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = fit(max_epochs=1)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    outcome.trainer.save_checkpoint("~/by-hand")
    for name in ("~/by-hand", "strongroom://~/by-hand", Path("~/by-hand"), tmp_path / "home" / "by-hand"):
        assert same(net.load_from_checkpoint(name).state_dict(), outcome.weights)
    assert not Path("~").exists()
    for path in (None, 5, b"by-hand"):
        with pytest.raises(ConfigError, match="takes a path or a strongroom:// URI; got"):
            outcome.trainer.save_checkpoint(path)


def test_nothing_is_loaded_where_nothing_was_saved(root: Path, net: Any) -> None:
    root.mkdir()
    with pytest.raises((CheckpointNotFoundError, OSError)):
        net.load_from_checkpoint(root)
