"""Every kind of loader: what a resumed run reads, and that it goes on as the uninterrupted one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from strongroom.errors import ConfigError, StateMismatchError

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata, with torch 2.13
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning"),
]

DONE = (4, 10, 16)
"""Batches done when the run breaks off, of 3 epochs of 10: inside the first epoch, at its end, inside the
next."""


def quiet_data(size: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(size, 6, generator=generator), torch.arange(size) % 3)


class Recording(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Says what was read of it; draws while reading."""

    def __init__(self) -> None:
        self.data = quiet_data().tensors
        self.read: list[int] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(index)
        return self.data[0][index] + 0.1 * torch.randn(6), self.data[1][index]


class ByLength(Sampler[list[int]]):
    """A batch sampler of a user's own: groups of neighbours, shuffled by an epoch number, and no state."""

    def __init__(self) -> None:
        self.epoch = 0
        self.sampler = self  # where Lightning looks for set_epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(100 + self.epoch)
        for group in torch.randperm(10, generator=generator).tolist():
            yield list(range(4 * group, 4 * group + 4))


class Ordered(Sampler[int]):
    """A sampler whose order goes on from epoch to epoch, drawn from a generator that it carries."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(8)

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Any:
        yield from torch.randperm(40, generator=self.generator).tolist()


class Ordered10(Ordered):
    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Any:
        yield from torch.randperm(10, generator=self.generator).tolist()


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """A stream that can say where it stands, shuffled anew by the epochs that it counts."""

    def __init__(self) -> None:
        self.at, self.epoch, self.read = 0, 0, 0

    def __iter__(self) -> Any:
        data = quiet_data().tensors
        if self.at == 40:
            self.at, self.epoch = 0, self.epoch + 1
        order = torch.randperm(40, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.at < 40:
            index = order[self.at]
            self.at += 1
            self.read += 1
            yield data[0][index], data[1][index]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at, self.epoch = state_dict["at"], state_dict["epoch"]


class Sized(Stream):
    def __len__(self) -> int:
        return 40


KINDS: dict[str, Any] = {
    "custom batch sampler": lambda: DataLoader(quiet_data(), batch_sampler=ByLength()),
    "custom sampler": lambda: DataLoader(quiet_data(), batch_size=4, sampler=Ordered()),
    "a last batch that is dropped": lambda: DataLoader(
        quiet_data(43), batch_size=4, shuffle=True, drop_last=True
    ),
    "one sample a batch": lambda: DataLoader(
        quiet_data(10), batch_sampler=BatchSampler(Ordered10(), 1, drop_last=False)
    ),
    "stateful": lambda: StatefulDataLoader(Recording(), batch_size=4, shuffle=True),
    "stateful, with workers": lambda: StatefulDataLoader(
        quiet_data(), batch_size=4, shuffle=True, num_workers=1
    ),
    "stateful, of a stream": lambda: StatefulDataLoader(Sized(), batch_size=4),
    "stateful, of a stream without a length": lambda: StatefulDataLoader(Stream(), batch_size=4),
    "stream without a length": lambda: DataLoader(Stream(), batch_size=4),
    "stream": lambda: DataLoader(Sized(), batch_size=4),
    "stream, with workers": lambda: DataLoader(Stream(), batch_size=4, num_workers=1),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_every_kind_goes_on_as_if_nothing_had_happened(fit: Any, uninterrupted: Any, kind: Any) -> None:
    options = {"loader": kind}
    reference = uninterrupted(**options)
    assert len(reference.losses) == 30
    for done in DONE:
        fit(until=done, checkpoint={"every_n_train_steps": done, "resume": "never"}, **options)
        resumed = fit(seed=1, checkpoint={"every_n_epochs": 100}, **options)
        assert len(resumed.losses) == 30 - done
        resumed.ends_like(reference)


@pytest.mark.parametrize("mode", ("min_size", "max_size", "max_size_cycle"))
def test_several_loaders_in_every_mode_that_trains(fit: Any, uninterrupted: Any, net: Any, mode: Any) -> None:
    class Two(net):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            (x, y), more = batch
            return super().training_step([x if more is None else x + more[0].mean(), y], batch_idx)

    def loader() -> Any:
        own = torch.Generator().manual_seed(1)
        return CombinedLoader(
            [
                DataLoader(quiet_data(), batch_size=4, shuffle=True),
                DataLoader(quiet_data(24), batch_size=4, shuffle=True, generator=own),
            ],
            mode,
        )

    options = {"loader": loader, "module": Two}
    reference = uninterrupted(**options)
    assert len(reference.losses) == (18 if mode == "min_size" else 30)
    for done in (4, 8, 16):
        fit(until=done, checkpoint={"every_n_train_steps": done, "resume": "never"}, **options)
        fit(seed=1, checkpoint={"every_n_epochs": 100}, **options).ends_like(reference)


@pytest.mark.parametrize("done", DONE)
def test_the_sampler_alone_is_advanced_where_that_is_asked_for(
    fit: Any, uninterrupted: Any, done: int
) -> None:
    def loader() -> Any:
        return DataLoader(Recording(), batch_size=4, shuffle=True)

    reference = uninterrupted(loader=loader)
    fit(until=done, checkpoint={"every_n_train_steps": done}, loader=loader)
    samples = Recording()
    resumed = fit(
        seed=1,
        checkpoint={"every_n_epochs": 100, "skip": "sampler"},
        loader=lambda: DataLoader(samples, batch_size=4, shuffle=True),
    )
    # Nothing was read again, and what is drawn while reading in this process is exact all the same.
    assert len(samples.read) == 4 * (30 - done)
    resumed.ends_like(reference)


@pytest.mark.parametrize(
    "persists",
    (
        False,
        # They are told of, for what may be drawn inside of them.
        pytest.param(True, marks=pytest.mark.filterwarnings("ignore:.*persistent workers")),
    ),
)
def test_the_order_is_exact_where_workers_read_and_the_sampler_is_advanced(
    fit: Any, uninterrupted: Any, persists: bool
) -> None:
    def loader() -> Any:
        return DataLoader(
            quiet_data(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=persists
        )

    fit(until=15, checkpoint={"every_n_train_steps": 15}, loader=loader)
    options = {"every_n_epochs": 100, "skip": "sampler"}
    fit(seed=1, checkpoint=options, loader=loader).ends_like(uninterrupted(loader=loader))


def test_what_has_no_sampler_is_read_again_and_that_is_told(fit: Any, uninterrupted: Any) -> None:
    def loader() -> Any:
        return DataLoader(Sized(), batch_size=4)

    fit(until=4, checkpoint={"every_n_train_steps": 4}, loader=loader)
    with pytest.warns(UserWarning, match="skip='sampler' cannot be had.*IterableDataset"):
        resumed = fit(seed=1, checkpoint={"every_n_epochs": 100, "skip": "sampler"}, loader=loader)
    resumed.ends_like(uninterrupted(loader=loader))


def test_an_unknown_way_to_skip_is_refused(fit: Any) -> None:
    with pytest.raises(ConfigError, match="skip must be one of"):
        fit(checkpoint={"skip": "guess"})


@pytest.mark.parametrize("done", DONE)
def test_a_stateful_loader_is_not_read_again(fit: Any, uninterrupted: Any, done: int) -> None:
    def loader() -> Any:
        return StatefulDataLoader(Sized(), batch_size=4)

    reference = uninterrupted(loader=loader)
    fit(until=done, checkpoint={"every_n_train_steps": done}, loader=loader)
    stream = Sized()
    resumed = fit(
        seed=1,
        checkpoint={"every_n_epochs": 100},
        loader=lambda: StatefulDataLoader(stream, batch_size=4),
    )
    resumed.ends_like(reference)
    assert stream.read == 4 * len(resumed.losses)


class Counting:
    """A loader that is no torch DataLoader and counts its epochs, as streaming libraries do."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Any:
        self.epoch += 1
        return iter(self._batches(self.epoch))

    def _batches(self, epoch: int) -> Any:
        data = quiet_data().tensors
        order = torch.randperm(10, generator=torch.Generator().manual_seed(epoch)).tolist()
        return [(data[0][4 * n : 4 * n + 4], data[1][4 * n : 4 * n + 4]) for n in order]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]


def test_what_a_loader_keeps_between_two_epochs_is_put_back(fit: Any, uninterrupted: Any) -> None:
    reference = uninterrupted(loader=Counting)
    fit(until=20, checkpoint={"every_n_epochs": 1}, loader=Counting)
    resumed = fit(seed=1, checkpoint={"every_n_epochs": 100}, loader=Counting)
    assert len(resumed.losses) == 10
    resumed.ends_like(reference)


@pytest.mark.parametrize("done", (4, 10, 14, 20, 24))
def test_loaders_made_anew_every_two_epochs(fit: Any, uninterrupted: Any, net: Any, done: int) -> None:
    """Each has a generator that begins anew with it: one made in the wrong epoch shuffles otherwise."""

    class Remaking(net):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            own = torch.Generator().manual_seed(6)
            return DataLoader(quiet_data(), batch_size=4, shuffle=True, generator=own)

    settings = {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 4, "module": Remaking}
    reference = uninterrupted(loader=lambda: None, **settings)
    fit(until=done, checkpoint={"every_n_train_steps": done}, loader=lambda: None, **settings)
    resumed = fit(seed=1, checkpoint={"every_n_epochs": 100}, loader=lambda: None, **settings)
    resumed.ends_like(reference)


@pytest.mark.parametrize("done", (4, 14, 20, 30))
@pytest.mark.parametrize("every", (1, 2))
def test_loaders_made_anew_by_epoch_and_chance(
    fit: Any, uninterrupted: Any, net: Any, every: int, done: int
) -> None:
    """Which data are in it depends on the epoch in which it is made, and on what is drawn then."""

    class Choosing(net):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            chosen = torch.randperm(30)[:20] + 30 * self.trainer.current_epoch
            return DataLoader(Subset(quiet_data(120), chosen.tolist()), batch_size=2, shuffle=True)

    settings = {"reload_dataloaders_every_n_epochs": every, "max_epochs": 4, "module": Choosing}
    reference = uninterrupted(loader=lambda: None, **settings)
    fit(until=done, checkpoint={"every_n_train_steps": done}, loader=lambda: None, **settings)
    resumed = fit(seed=1, checkpoint={"every_n_epochs": 100}, loader=lambda: None, **settings)
    resumed.ends_like(reference)


@pytest.mark.parametrize("done", (4, 7, 9))
def test_the_rest_of_an_epoch_may_be_left_out(fit: Any, uninterrupted: Any, net: Any, done: int) -> None:
    class Leaving(net):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 6 else None

    reference = uninterrupted(module=Leaving)
    fit(until=done, module=Leaving)
    fit(seed=1, checkpoint={"every_n_epochs": 100}, module=Leaving).ends_like(reference)


@pytest.mark.parametrize("workers", (0, 1))
def test_other_data_inside_an_epoch_are_an_error_in_words(fit: Any, workers: int) -> None:
    def loader(size: int, batch_size: int = 4) -> Any:
        return lambda: DataLoader(quiet_data(size), batch_size=batch_size, num_workers=workers)

    fit(until=4, checkpoint={"every_n_train_steps": 4}, loader=loader(40))
    for other in (loader(44), loader(40, 2), loader(12)):
        with pytest.raises(StateMismatchError, match="after batch 4 of epoch 0, of 10 batches; this run has"):
            fit(loader=other)


def test_data_may_grow_between_two_epochs(fit: Any) -> None:
    fit(until=12, checkpoint={"every_n_epochs": 1}, loader=lambda: DataLoader(quiet_data(40), batch_size=4))
    grown = fit(
        checkpoint={"every_n_epochs": 1}, loader=lambda: DataLoader(quiet_data(48), batch_size=4), seed=1
    )
    assert len(grown.losses) == 24


@pytest.mark.parametrize("settings", ({"overfit_batches": 3}, {"limit_train_batches": 0.5}), ids=str)
def test_a_part_of_the_data(fit: Any, uninterrupted: Any, settings: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You requested to overfit but enabled train")
        reference = uninterrupted(**settings)
        a_part = len(reference.losses) // 3
        assert a_part in {3, 5}
        for done in (2, a_part, a_part + 1):
            fit(until=done, checkpoint={"every_n_train_steps": done, "resume": "never"}, **settings)
            fit(seed=1, checkpoint={"every_n_epochs": 100}, **settings).ends_like(reference)


def test_sequential_loaders_are_lightnings_to_refuse(fit: Any) -> None:
    def loader() -> Any:
        return CombinedLoader([DataLoader(quiet_data(), batch_size=4)], "sequential")

    with pytest.raises(ValueError, match="does not support the `CombinedLoader"):
        fit(loader=loader)


@pytest.mark.parametrize("done", DONE)
def test_issue_20550_a_loader_that_was_asked_for_before_the_restore_keeps_its_place(
    fit: Any, uninterrupted: Any, net: Any, done: int
) -> None:
    class OneCycle(net):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            steps = int(self.trainer.estimated_stepping_batches)  # makes the training loader, right here
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def loader() -> Any:
        return StatefulDataLoader(Recording(), batch_size=4, shuffle=True)

    options = {"module": OneCycle, "loader": loader}
    reference = uninterrupted(**options)
    fit(until=done, checkpoint={"every_n_train_steps": done}, **options)
    fit(seed=1, checkpoint={"every_n_epochs": 100}, **options).ends_like(reference)
