"""Lightning's telling issues, each by its number: what went wrong there, and goes right here.

Some stand in the modules of what they are about; the last test holds the list together.
"""

from __future__ import annotations

import importlib.metadata
import json
import pickletools
import re
import threading
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from strongroom import Checkpointer, ConfigError, SaveError, StateMismatchError
from strongroom.dcp import StrongroomReader
from strongroom.errors import IntegrityError
from strongroom.stores.local import LocalStore
from strongroom_lightning import StrongroomCheckpoint
from strongroom_lightning.arguments import Arguments
from strongroom_lightning.checkpointing import Checkpointing
from strongroom_security import SecurityPolicy
from strongroom_security.signers.generating import generate_key

ISSUES = {
    688, 1150, 6204, 14035, 14466, 17543, 17915, 18524, 18786, 19764, 19970, 20205, 20347, 20406, 20550,
    20749, 20825, 20953, 21406, 21431, 21557, 21691, 21800, 21822, 21938,
}  # fmt: skip

ELSEWHERE = {
    # A resume in the middle of an epoch, whose losses are those of the uninterrupted run.
    17543: "test_a_run_broken_off_anywhere_ends_as_the_uninterrupted_one",
    19764: "test_a_run_of_ranks_broken_off_anywhere_ends_as_the_uninterrupted_one",
    # Loaders that were set up before anything is restored, as estimated_stepping_batches does.
    20550: "test_loaders_asked_for_before_the_restore",
    # A signal that only one rank gets, and Slurm's, in whose handler nothing is saved.
    20825: "test_a_signal_stops_all_ranks_after_the_same_step_and_the_run_goes_on_exactly",
    **dict.fromkeys(
        (6204, 20347, 21406),
        "test_slurms_signal_puts_the_job_back_once_its_checkpoint_is_committed",
    ),
}
"""Issues whose test shows more than the one thing, and is named after that."""


def newest_folder(root: Path) -> Path:
    return max(root.glob("step-*"))


def damage(root: Path, how: str) -> None:
    """As a run leaves its newest checkpoint whose machine went down, or whose disk fails."""
    folder = newest_folder(root)
    shard = max(folder.glob("data/*.safetensors"), key=lambda path: path.stat().st_size)
    match how:
        case "torn":
            (folder / "COMMIT").unlink()
        case "short":
            shard.write_bytes(shard.read_bytes()[:-100])
        case "flipped":
            content = bytearray(shard.read_bytes())
            content[-8] ^= 1
            shard.write_bytes(content)


@pytest.fixture
def ten_steps(fit: Any) -> None:
    fit(until=10)


def test_issue_19970_a_save_that_was_cut_off_is_never_taken_for_a_checkpoint(
    ten_steps: None, fit: Any, root: Path, uninterrupted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    damage(root, "torn")
    with caplog.at_level("INFO"):
        resumed = fit()
    assert "resuming from step 9" in caplog.text
    resumed.ends_like(uninterrupted())


@pytest.mark.filterwarnings("ignore:Strongroom. step 10 .* is damaged and was skipped")
def test_issue_688_a_file_that_ends_too_early_costs_one_interval_and_not_the_run(
    ten_steps: None, fit: Any, root: Path, uninterrupted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    damage(root, "short")
    with caplog.at_level("INFO"):
        resumed = fit()
    assert "resuming from step 9" in caplog.text
    resumed.ends_like(uninterrupted())


def test_issue_21431_one_wrong_bit_is_found_and_named_before_anything_is_loaded(
    ten_steps: None, fit: Any, root: Path, uninterrupted: Any
) -> None:
    damage(root, "flipped")
    shard = max(newest_folder(root).glob("data/*.safetensors"), key=lambda path: path.stat().st_size)
    with pytest.warns(UserWarning, match=rf"step 10 .* is damaged and was skipped: .*{shard.name}"):
        resumed = fit()
    resumed.ends_like(uninterrupted())


def test_issue_21800_a_save_that_is_not_permitted_ends_the_run_in_words(
    fit: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: LocalStore, key: str, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied", key)

    monkeypatch.setattr(LocalStore, "open_writer", denied)
    with pytest.raises(SaveError, match="Permission denied"):
        fit()


class Slow:
    """A disk that takes nothing until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let_go = threading.Event()
        original = LocalStore.open_writer

        def open_writer(store: LocalStore, key: str, **options: Any) -> Any:
            if not self.let_go.wait(timeout=60):
                raise TimeoutError("training waited for the disk, and the disk for training")
            return original(store, key, **options)

        monkeypatch.setattr(LocalStore, "open_writer", open_writer)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    return Slow(monkeypatch)


class Watching(Callback):
    """Notes the weights, and lets the disk go once training is a step on."""

    def __init__(self, slow: Slow) -> None:
        self.slow = slow
        self.weights: list[dict[str, torch.Tensor]] = []
        self.named_while_writing = ""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.weights.append({name: value.clone() for name, value in module.state_dict().items()})
        ours = next(one for one in trainer.callbacks if isinstance(one, Checkpointing))
        if trainer.global_step == 6:
            self.named_while_writing = ours.last_model_path
            self.slow.let_go.set()


AT_5: dict[str, Any] = {"every_n_train_steps": 5}


def test_issue_21557_training_goes_on_while_a_checkpoint_is_written(fit: Any, root: Path, slow: Slow) -> None:
    """Saved at step 5, with a disk that stands still until training has reached step 6."""
    watching = Watching(slow)
    fit(max_steps=7, callbacks=(lambda: watching,), checkpoint=AT_5)
    assert len(watching.weights) == 7
    assert [each.step for each in Checkpointer(root).checkpoints()] == [7, 5]


def test_issue_20953_what_is_written_later_is_what_was_saved(fit: Any, root: Path, slow: Slow) -> None:
    """No weight is torn by the steps that training takes meanwhile."""
    watching = Watching(slow)
    fit(max_steps=7, callbacks=(lambda: watching,), checkpoint=AT_5)
    saved = Checkpointer(root).restore(step=5).state["model"]
    assert saved.keys() == watching.weights[5].keys()
    for name, value in watching.weights[5].items():
        assert torch.equal(saved[name], value), name


@pytest.mark.parametrize("number", (14035, 17915))
def test_issue_14035_and_issue_17915_a_checkpoint_has_a_name_only_once_it_stands(
    number: int, fit: Any, root: Path, slow: Slow
) -> None:
    """Nobody is handed the name of what is still being written: no logger, no callback, no program."""
    watching = Watching(slow)
    outcome = fit(max_steps=7, callbacks=(lambda: watching,), checkpoint=AT_5)
    assert watching.named_while_writing == ""
    assert outcome.checkpoint.last_model_path == f"strongroom://{root}#step=7"


def test_issue_18786_a_uri_is_not_taken_for_a_path(fit: Any, root: Path, uninterrupted: Any) -> None:
    bucket = StrongroomCheckpoint("s3://bucket/runs/a")
    assert bucket.dirpath == "s3://bucket/runs/a"
    fit(f"file://{root}", until=14)
    assert not list(root.parent.glob("*:*")), "no folder is named after a scheme"
    fit(f"file://{root}").ends_like(uninterrupted())


def test_issue_20205_a_bucket_goes_to_the_store_for_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    from strongroom.stores import open as opening

    with pytest.raises(ConfigError, match="gs://"):
        opening.open_store("gs://bucket/run")
    assert Arguments.is_own(StrongroomCheckpoint("s3://bucket/run")._arguments, "s3://bucket/run")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("number", (20406, 20749))
def test_issue_20406_and_issue_20749_dcps_own_load_reads_a_run_through_our_reader(
    number: int, ten_steps: None, root: Path
) -> None:
    """The hook that was asked for: readers and writers that DCP takes."""
    expected = Checkpointer(root).restore().state["model"]["net.0.weight"]
    state = {"model": {"net": {"0": {"weight": torch.zeros_like(expected)}}}}
    reader = StrongroomReader(root)
    names = [name for name in reader.read_metadata().state_dict_metadata if name.endswith("net.0.weight")]
    flat = {names[0]: state["model"]["net"]["0"]["weight"]}
    dcp.load(flat, storage_reader=StrongroomReader(root))
    assert torch.equal(flat[names[0]], expected)


def test_issue_21822_no_file_of_a_checkpoint_is_or_holds_a_pickle(ten_steps: None, root: Path) -> None:
    files = [path for path in root.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        content = path.read_bytes()
        if path.suffix == ".json":
            json.loads(content)
            continue
        with pytest.raises(ValueError):  # noqa: PT011 - whatever a pickle's reader says
            list(pickletools.genops(content))
        assert not content.startswith(b"PK"), "nor an archive, as torch.save writes"


def test_issue_21822_a_checkpoint_cannot_name_code_to_be_run(root: Path, net: Any, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    hostile = {
        "state_dict": {},
        "hyper_parameters": {"_instantiator": "os.system", "_class_path": f"touch {marker}"},
    }
    with Checkpointer(root) as checkpointer:
        lightnings = {"hyper_parameters": hostile["hyper_parameters"], "pytorch-lightning_version": "2.5.0"}
        checkpointer.save(1, {"model": {}, "optimizers": [], "lightning": lightnings})
    with pytest.raises(StateMismatchError, match=r"a function to be called, 'os\.system'"):
        net.load_from_checkpoint(f"strongroom://{root}")
    assert not marker.exists()


def test_issue_21822_what_was_not_signed_is_not_loaded(fit: Any, root: Path, tmp_path: Path) -> None:
    generate_key(tmp_path / "signer.pem")
    policy = tmp_path / "strongroom.toml"
    policy.write_text('[sign]\nkey = "file:signer.pem"\n')
    fit(until=2)  # whoever wrote that had no key
    with pytest.raises(IntegrityError, match="it is signed by nobody"):
        fit(checkpoint={"every_n_train_steps": 1, "security": SecurityPolicy.load(policy)})


@pytest.mark.parametrize("version", ("2.6.2", "2.6.3"))
def test_issue_21691_a_release_with_foreign_code_is_not_installed_and_not_used(
    version: str, fit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [text for text in importlib.metadata.requires("strongroom") or () if "lightning" in text]
    assert asked
    assert all(f"!={version}" in text for text in asked)
    monkeypatch.setattr(lightning.pytorch, "__version__", version)
    with pytest.raises(ConfigError, match=rf"Lightning {re.escape(version)} was published by an intruder"):
        fit()


@pytest.mark.parametrize("done", (14, 20))
def test_issue_21938_a_resumed_epoch_has_its_own_order_with_workers_too(
    done: int, fit: Any, uninterrupted: Any
) -> None:
    """A sampler that shuffles by the epoch's number; workers fetch as soon as the iterator is made."""
    reference = uninterrupted(loader=distributed)
    fit(until=done, loader=distributed)
    fit(loader=distributed).ends_like(reference)
    epochs = [reference.losses[start : start + 10] for start in (0, 10, 20)]
    assert epochs[0] != epochs[1] != epochs[2]


def distributed() -> DataLoader[Any]:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    samples = TensorDataset(x, torch.arange(40) % 3)
    sampler = DistributedSampler(samples, num_replicas=1, rank=0, shuffle=True)
    return DataLoader(samples, batch_size=4, sampler=sampler, num_workers=1)


def test_every_issue_has_a_test() -> None:
    texts = [path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py")]
    names = {name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    numbered = {int(number) for name in names for number in re.findall(r"issue_(\d+)", name)}
    found = numbered | {number for number, name in ELSEWHERE.items() if name in names}
    assert found == ISSUES, f"without a test: {sorted(ISSUES - found)}; unknown: {sorted(found - ISSUES)}"
