"""Data sets that keep their own place, as MosaicML's streaming ones do; Composer loses the random state.

Composer gives such a data set its state back and passes over nothing; and with the batches that it does not
pass over it leaves out the moment at which it would have put the random streams back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from composer.utils import dist
from composer_runs import BATCHES, BrokenOffError, Outcome, train
from torch.utils.data import DataLoader, IterableDataset


class Streaming(IterableDataset[Any]):
    """As much of MosaicML's ``StreamingDataset`` as Composer knows of: a place of its own, and epochs."""

    def __init__(self) -> None:
        self.next_epoch, self.begin_at = 0, 0
        self.read: list[int] = []

    def __len__(self) -> int:
        return 4 * BATCHES

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        assert from_beginning
        return {"epoch": self.next_epoch - (num_samples > 0), "sample_in_epoch": num_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_epoch = state["epoch"]
        self.begin_at = state["sample_in_epoch"] // dist.get_world_size()

    def __iter__(self) -> Any:
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(self.next_epoch)).tolist()
        begin_at, self.begin_at = self.begin_at, 0
        self.next_epoch += 1
        for index in order[begin_at:]:
            self.read.append(index)
            yield torch.full((6,), index / 10), torch.tensor(index % 3)


def stream() -> Any:
    return DataLoader(Streaming(), batch_size=4)


def natively(folder: Path, *, until: int | None = None, load_path: str | None = None) -> Outcome:
    """Composer by itself, which saves every second step."""
    options = {"save_folder": str(folder), "save_interval": "2ba", "save_overwrite": True}
    return train(None, loader=stream, until=until, load_path=load_path, **options)


@pytest.mark.parametrize("done", (4, 8))
def test_composer_alone_loses_the_random_state_and_we_do_not(root: Path, done: int) -> None:
    reference = train(None, loader=stream)

    natively(root / "native", until=done)
    lost = natively(root / "again", load_path=str(root / "native" / f"ep{done // BATCHES}-ba{done}-rank0.pt"))
    assert len(lost.losses) == 12 - done
    # Composer reads the right samples, and drops out other activations: the loss is another one.
    assert lost.losses != reference.losses[done:]

    train(root / "ours", loader=stream, until=done, checkpoint={"save_interval": f"{done}ba"})
    resumed = train(root / "ours", loader=stream, seed=1000, checkpoint={"save_interval": "1ep"})
    assert resumed.losses == reference.losses[done:]
    resumed.ends_like(reference)


@pytest.mark.parametrize("at_fit", (False, True), ids=("given to the Trainer", "given to fit"))
@pytest.mark.parametrize("done", (1, 6, 7, 11))
def test_a_stream_goes_on_where_it_was_and_reads_nothing_twice(fit: Any, done: int, at_fit: bool) -> None:
    reference = fit(None, loader=stream)
    fit(until=done, loader=stream, at_fit=at_fit)
    made: list[Any] = []

    def kept() -> Any:
        made.append(stream())
        return made[0]

    resumed = fit(seed=1000, loader=kept, at_fit=at_fit)
    resumed.ends_like(reference)
    assert len(made[0].dataset.read) == 4 * (12 - done)


def test_from_the_end_of_an_epoch(fit: Any) -> None:
    reference = fit(None, loader=stream)
    fit(until=9, loader=stream, checkpoint={"save_interval": "1ep"})
    fit(seed=1000, loader=stream, checkpoint={"save_interval": "1ep"}).ends_like(reference)


def test_data_that_no_longer_keep_their_place_are_read_again_and_that_is_told(fit: Any, said: Any) -> None:
    class Forgetful(Streaming):
        state_dict = load_state_dict = None  # type: ignore[assignment]

    fit(until=4, loader=stream)
    resumed = fit(seed=1000, loader=lambda: DataLoader(Forgetful(), batch_size=4))
    assert "keep their own place" in said.text
    assert resumed.losses == fit(None, loader=stream).losses[4:]


def test_a_broken_stream_is_the_error_that_it_is(fit: Any) -> None:
    class Broken(Streaming):
        def __iter__(self) -> Any:
            yield from ()
            raise BrokenOffError("the shard is gone")

    with pytest.raises(BrokenOffError, match="the shard is gone"):
        fit(loader=lambda: DataLoader(Broken(), batch_size=4))
