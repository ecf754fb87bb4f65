"""Composer's telling issues, each by its number: what went wrong there, and goes right here.

Some stand in the modules of what they are about; the last test holds the list together.
"""

from __future__ import annotations

import pickletools
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import composer_jobs as jobs
import composer_runs
import pytest
from composer import Callback
from composer_runs import stock_loader, train
from torch.utils.data import DataLoader

from strongroom import Checkpointer, Tier
from strongroom.errors import IntegrityError
from strongroom.stores.local import LocalStore

ISSUES = {3902, 3860, 3725, 3649, 1090, 2461, 2715, 2087, 3080}

PULL_REQUESTS = {3376, 2368, 3345, 3937}
"""Whose story is told in a change, not in an issue."""

ELSEWHERE = {
    # Each rank's random state, also with data that keep their own place.
    3725: "test_composer_alone_loses_the_random_state_and_we_do_not",
}
"""Issues whose test shows more than the one thing, and is named after that."""


def steps_of(root: Path) -> list[int]:
    return sorted(one.step for one in Checkpointer(root).checkpoints())


def newest_folder(root: Path) -> Path:
    return max(root.glob("step-*"))


def test_issue_3902_what_is_resumed_is_what_was_committed_wherever_that_is(
    tmp_path: Path, uninterrupted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Composer looked for the newest in a temporary folder, for a saver of a user's own to a bucket."""
    bucket, elsewhere = f"file://{tmp_path}/bucket/run", tmp_path / "elsewhere"
    train(bucket, until=5)
    # Another machine, on which nothing but the place itself is left.
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    resumed = train(bucket, seed=1000)
    assert len(resumed.losses) == 7
    resumed.ends_like(uninterrupted())
    assert list(elsewhere.iterdir()) == []


def test_issue_3860_a_resume_of_which_a_rank_is_missing_ends_in_an_error_that_names_it(
    launcher: Any, tmp_path: Path
) -> None:
    """Composer's waited for ever."""
    root = tmp_path / "run"
    launcher.run(jobs.trained, root, "DDP", until=3, ranks=2)
    job = launcher.start(jobs.killed_before_loading, root, ranks=2)
    outcome = job.wait([0])[0]
    job.kill()
    assert outcome.error is not None
    kind, words = outcome.error
    assert kind == "RanksMissingError", words
    assert "rank 1" in words


class Slow(composer_runs.Numbers):
    """Reading takes its time, and is counted."""

    read: list[int]

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.x[index], self.y[index]


def test_issue_3649_a_resume_need_not_read_what_was_read(fit: Any) -> None:
    """Composer's reads the first batch of every epoch before, and all of this one's."""
    read: list[int] = []

    def loader() -> Any:
        made = stock_loader()
        made.dataset.__class__ = Slow
        made.dataset.read = read
        return made

    reference = fit(None, loader=loader)
    fit(until=9, loader=loader)
    read.clear()
    resumed = fit(seed=1000, loader=loader, checkpoint={"save_interval": "1ep", "skip": "sampler"})
    resumed.ends_like(reference)
    assert len(read) == 4 * 3  # what is left of the second epoch


def test_issue_1090_a_resume_reads_no_epoch_that_is_over(fit: Any) -> None:
    """Composer asks the loader for a batch of every epoch before: with workers, each takes its time."""
    made: list[Any] = []

    class Counted(DataLoader[Any]):
        begun = 0

        def __iter__(self) -> Any:
            self.begun += 1
            return super().__iter__()

    def loader() -> Any:
        made.append(Counted(composer_runs.Numbers(4 * 6), batch_size=4, shuffle=True))
        return made[-1]

    options = {"loader": loader, "max_duration": "5ep"}
    reference = fit(None, **options)
    fit(until=27, **options)
    resumed = fit(seed=1000, **options)
    resumed.ends_like(reference)
    assert made[-1].begun == 1


def test_issue_2461_control_c_saves_before_it_ends_the_run(fit: Any, root: Path, uninterrupted: Any) -> None:
    """Composer's handler ends the process where it stands."""

    class Interrupted(Callback):
        def batch_start(self, state: Any, logger: Any) -> None:
            if int(state.timestamp.batch) == 4:
                signal.raise_signal(signal.SIGINT)

    checkpoint = {"save_interval": "100ep", "preemption_signals": ("SIGTERM", "SIGINT")}
    with pytest.raises(SystemExit) as left:
        fit(checkpoint=checkpoint, callbacks=(Interrupted,))
    assert left.value.code == 130
    assert steps_of(root) == [5]
    fit(seed=1000).ends_like(uninterrupted())


def test_issue_2715_a_shard_that_does_not_arrive_is_no_checkpoint(
    fit: Any, root: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: Any
) -> None:
    """Composer's sharded saves left shards out of the bucket, and the run went on."""
    fit(until=4, checkpoint={"save_interval": "4ba"})
    (shard,) = newest_folder(root).glob("data/0*.safetensors")
    original, lost = LocalStore.open_writer, []

    def open_writer(store: LocalStore, key: str, **options: Any) -> Any:
        if "safetensors" in key and not lost:
            lost.append(key)
            raise ConnectionError("the upload was cut off")
        return original(store, key, **options)

    monkeypatch.setattr(LocalStore, "open_writer", open_writer)
    with pytest.raises(Exception, match="the upload was cut off"):
        fit(seed=1000, checkpoint={"save_interval": "4ba"})
    assert lost
    assert steps_of(root) == [4]
    monkeypatch.undo()
    fit(seed=2000).ends_like(uninterrupted())
    # And one that is taken away later is missed by name.
    shard.unlink()
    with pytest.raises(IntegrityError, match=shard.name):
        Checkpointer(root).restore(step=4)


def test_issue_2087_what_is_kept_is_counted_over_all_starts(fit: Any, root: Path) -> None:
    """Composer's count begins anew, and what earlier starts saved stays for ever."""
    checkpoint = {"save_interval": "1ba", "num_checkpoints_to_keep": 2}
    for number, until in enumerate((3, 5, 8), start=7):
        fit(until=until, seed=number, checkpoint=checkpoint)
    fit(checkpoint=checkpoint)
    assert len(steps_of(root)) <= 3  # the newest two, and what was resumed from
    assert steps_of(root)[-2:] == [11, 12]


def test_issue_3080_a_store_that_is_slow_keeps_no_collective_waiting(launcher: Any, tmp_path: Path) -> None:
    """Composer's ranks waited for rank 0's upload in a collective, until its timeout ended them."""
    for found in launcher.run(jobs.trained_on_a_slow_store, tmp_path / "run", ranks=2):
        # The store took nothing of one save until five steps of collectives had gone by.
        assert found["batch"] == 12
    assert 12 in steps_of(tmp_path / "run")


def test_pr_3376_nothing_points_to_a_checkpoint_that_is_not_all_there(
    fit: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Composer's link to the newest was there before the shards that it stood for."""
    order: list[str] = []
    original, put = LocalStore.open_writer, LocalStore.put_if_absent

    def open_writer(store: LocalStore, key: str, **options: Any) -> Any:
        order.append(key)
        return original(store, key, **options)

    def put_if_absent(store: LocalStore, key: str, data: Any) -> bool:
        order.append(key)
        return put(store, key, data)

    monkeypatch.setattr(LocalStore, "open_writer", open_writer)
    monkeypatch.setattr(LocalStore, "put_if_absent", put_if_absent)
    fit(until=4, checkpoint={"save_interval": "4ba"})
    of_save = [key for key in order if key.startswith("step-")]
    assert of_save[-1].endswith("/COMMIT")
    assert sum(key.endswith("/COMMIT") for key in of_save) == 1
    assert any(".safetensors" in key for key in of_save)


def test_pr_2368_what_is_copied_to_a_bucket_keeps_no_step_waiting(
    fit: Any, root: Path, tmp_path: Path
) -> None:
    """Composer's step waited for the upload of the one before."""
    let_go, steps = threading.Event(), []
    original = LocalStore.open_writer

    def open_writer(store: LocalStore, key: str, **options: Any) -> Any:
        if "far" in str(getattr(store, "root", store)):
            assert let_go.wait(60), "training waited for the bucket, and the bucket for training"
        return original(store, key, **options)

    class Last(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            steps.append(int(state.timestamp.batch))
            if steps[-1] == 12:
                let_go.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "open_writer", open_writer)
        fit(
            checkpoint={"save_interval": "4ba", "replicate_to": [Tier(tmp_path / "far")]},
            callbacks=(Last,),
        )
    assert steps[-1] == 12
    assert steps_of(tmp_path / "far")[-1] == 12


def test_pr_3345_an_error_on_one_rank_is_an_error_on_all(launcher: Any, tmp_path: Path) -> None:
    """Composer's upload raised on one rank, and the others waited for it."""
    began = time.monotonic()
    for ended in launcher.run(jobs.a_disk_fails_on_one_rank, tmp_path / "run", ranks=2):
        assert "No space left on device" in ended
    assert time.monotonic() - began < 120  # no timeout of a collective
    assert steps_of(tmp_path / "run")[-1] in (3, 4)


def test_pr_3937_nothing_of_a_checkpoint_is_a_pickle(fit: Any, root: Path) -> None:
    """Composer loads by ``weights_only=False`` and by ``pickle.load``: a checkpoint runs code."""
    fit(until=5, validate=True, algorithms=(composer_runs.Noise,))
    files = [path for path in root.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        assert not _is_pickle(path.read_bytes()), path
        assert b"torch_utils" not in path.read_bytes()


def _is_pickle(content: bytes) -> bool:
    try:
        return content[:1] == b"\x80" and any(pickletools.genops(content))
    except (ValueError, EOFError):
        return False


def test_the_list_is_complete() -> None:
    folder = Path(__file__).parent
    written = "".join(path.read_text() for path in folder.glob("test_*.py"))
    tests = re.findall(r"^def (test_\w+)", written, re.MULTILINE)
    named = {int(number) for test in tests for number in re.findall(r"^test_issue_(\d+)", test)}
    of_changes = {int(number) for test in tests for number in re.findall(r"^test_pr_(\d+)", test)}
    assert named | ELSEWHERE.keys() >= ISSUES
    assert not named & ELSEWHERE.keys()
    assert of_changes == PULL_REQUESTS
    assert set(ELSEWHERE.values()) <= set(tests)
