"""The contract with Accelerate: each name that the seam needs is there, or the start is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
from accelerate import Accelerator, FullyShardedDataParallelPlugin, data_loader
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from accelerate_runs import Loop, new_accelerator

from strongroom import ConfigError
from strongroom_accelerate import Strongroom, seam

NAMES = [(path, name) for path, names in seam._NEEDED.items() for name in names]
OF_LOADERS = [(kind, name) for kind, names in seam._OF_LOADERS.items() for name in names]


@pytest.mark.parametrize(("path", "name"), NAMES, ids=[f"{p}.{n}".lstrip(".") for p, n in NAMES])
def test_a_name_that_is_missing_is_an_error_at_the_start(
    path: str, name: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = new_accelerator()
    seam.check_supported(accelerator)
    owner: Any = getattr(accelerator, path) if path else accelerator
    if hasattr(type(owner), name):
        monkeypatch.delattr(type(owner), name)
    vars(owner).pop(name, None)
    words = rf"Accelerate {accelerate.__version__} is not supported .*: expected .*{name}.* of it, and found"
    with pytest.raises(ConfigError, match=words):
        Strongroom(accelerator, root)


@pytest.mark.parametrize(("kind", "name"), OF_LOADERS)
def test_a_name_of_its_loaders_that_is_missing_is_an_error_at_the_start(
    kind: str, name: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = new_accelerator()
    owner = getattr(data_loader, kind)
    for one in owner.__mro__:
        if name in vars(one):
            monkeypatch.delattr(one, name)
    with pytest.raises(ConfigError, match=f"{kind}.{name}"):
        Strongroom(accelerator, root)


def test_what_prepared_loaders_have_is_what_the_seam_reads() -> None:
    loop = Loop(None)
    assert loop.data.base_dataloader is seam.stock_loader(loop.data)
    assert loop.data.iteration == 0
    assert loop.data.total_batch_size == 4
    assert seam.job_shape(loop.accelerator).batch_size == 4
    sampler = data_loader.SeedableRandomSampler(range(4), data_seed=5)
    assert sampler.initial_seed == 5


def test_an_old_release_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate, "__version__", "1.14.2")
    with pytest.raises(ConfigError, match=r"1\.14\.2 is too old for Strongroom; use 1\.15 or newer"):
        Strongroom(new_accelerator(), root)


def _train_by(accelerator: Accelerator, way: DistributedType) -> Accelerator:
    PartialState._shared_state["distributed_type"] = way
    accelerator.state.distributed_type = way
    return accelerator


def test_fsdp1_is_refused_in_words(root: Path) -> None:
    accelerator = _train_by(new_accelerator(), DistributedType.FSDP)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    with pytest.raises(ConfigError, match=r"shards by FSDP1.*fsdp_version=2"):
        Strongroom(accelerator, root)


def test_xla_is_refused_in_words(root: Path) -> None:
    with pytest.raises(ConfigError, match="trains through XLA"):
        Strongroom(_train_by(new_accelerator(), DistributedType.XLA), root)
