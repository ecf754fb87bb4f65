"""What a restore would do is told before anything is touched, and is then what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import Checkpointer, IntegrityError, PerRank, StateMismatchError, layout
from strongroom.catalog import Catalog, Checkpoint
from strongroom.dryrun import RestorePlan, plan_restore
from strongroom.events import Event, RestoreFinished
from strongroom.opened import open_checkpoint
from strongroom.selection import Selection
from strongroom.signing import NO_GUARD
from strongroom.stores.local import LocalStore


class Told:
    """Remembers how many bytes each restore has read."""

    def __init__(self) -> None:
        self.restored: list[int] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, RestoreFinished):
            self.restored.append(event.size_bytes)


def state(**changed: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(400, 1000), torch.nn.Linear(1000, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 400)).sum().backward()
    optimizer.step()
    values = {
        "model": model,
        "optimizer": optimizer,
        "extra": {"epoch": 3, "t": torch.arange(5)},
        "mine": PerRank({"seed": 1}),
        **changed,
    }
    return {key: value for key, value in values.items() if value is not None}


@pytest.fixture(params=("blake3", "sha256"))
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with Checkpointer(tmp_path / "run", digest=request.param) as checkpointer:
        checkpointer.save(5, state()).result(timeout_s=60)
    return tmp_path / "run"


def plan(root: Path, template: Any, *, rank: int = 0, world_size: int = 1, **selection: Any) -> RestorePlan:
    store = LocalStore(root)
    (commit,) = Catalog(store).history().commits.values()
    return plan_restore(
        open_checkpoint(store, commit, NO_GUARD),
        template,
        checkpoint=Checkpoint.of(commit),
        rank=rank,
        world_size=world_size,
        selection=Selection(**selection),
    )


@pytest.mark.parametrize("only", (None, ("model",), ("model.0",), ("optimizer", "extra"), ("extra.t",)))
def test_a_plan_tells_what_the_restore_then_reads(root: Path, only: tuple[str, ...] | None) -> None:
    planned = plan(root, state(), only=only)
    told = Told()
    with Checkpointer(root, events=[told]) as checkpointer:
        checkpointer.restore(state(), only=only)
    (read,) = told.restored
    assert planned.fits
    assert planned.step == 5
    assert planned.size_bytes == sum(file.size_bytes for file in planned.reads) == read
    names = {name for file in planned.reads for name in file.tensors}
    assert any(name.startswith("model.0") for name in names) == (only is None or only[0].startswith("model"))


def test_a_plan_without_a_state_is_of_everything(root: Path) -> None:
    planned = plan(root, None)
    stored = [path for path in root.rglob("*.safetensors") if path.name != layout.INDEX]
    assert planned.fits
    assert [read.path for read in planned.reads] == sorted(path.name for path in stored)
    assert "model.0.weight" in {name for read in planned.reads for name in read.tensors}


def test_a_plan_touches_nothing_and_opens_no_shard(root: Path) -> None:
    for path in root.rglob("*-*.safetensors"):
        path.unlink()
    template = state()
    with torch.no_grad():
        for parameter in template["model"].parameters():
            parameter.fill_(7)
    assert plan(root, template).fits
    assert all(bool((parameter == 7).all()) for parameter in template["model"].parameters())


def test_a_plan_tells_all_that_does_not_fit_as_the_restore_would(root: Path) -> None:
    template = state(
        model=torch.nn.Sequential(torch.nn.Linear(400, 999), torch.nn.Linear(999, 3)),
        extra=None,
        more=torch.ones(1),
        optimizer=None,
    )
    planned = plan(root, template)
    assert not planned.fits
    assert planned.missing == ("more",)
    assert set(planned.unexpected) == {"extra", "optimizer"}
    assert [text.split(":")[0] for text in planned.different] == [
        "model.0.weight",
        "model.0.bias",
        "model.1.weight",
    ]
    assert planned.reads == ()
    with Checkpointer(root) as checkpointer, pytest.raises(StateMismatchError) as caught:
        checkpointer.restore(template)
    assert caught.value.missing == planned.missing
    assert caught.value.unexpected == planned.unexpected
    assert caught.value.different == planned.different
    assert not plan(root, template, strict=False).fits
    assert plan(root, {**template, "model": None}, strict=False).fits


def test_a_plan_of_a_rank_that_stored_nothing_says_what_stays(root: Path) -> None:
    planned = plan(root, state(), rank=3, world_size=4)
    assert planned.fits
    assert len(planned.missing_per_rank) == 1
    assert plan(root, state()).missing_per_rank == ()


def test_a_plan_reads_well(root: Path) -> None:
    lines = str(plan(root, state())).splitlines()
    assert lines[0].startswith("step 5 fits: rank 0 of 1 would read ")
    assert lines[1].startswith("  00000-00.safetensors: ")
    lines = str(plan(root, state(extra=None), rank=3, world_size=4)).splitlines()
    assert lines[:3] == [
        "step 5 does not fit this state",
        "  in the checkpoint and not in the state:",
        "    extra",
    ]
    many = {f"more{number:02d}": torch.ones(1) for number in range(30)}
    lines = str(plan(root, {**state(), **many})).splitlines()
    assert lines[1] == "  missing in the checkpoint:"
    assert lines[-1] == "    and 10 more"


def test_a_plan_of_a_damaged_index_is_an_error(root: Path) -> None:
    (index,) = root.rglob(layout.INDEX)
    data = bytearray(index.read_bytes())
    data[-1] ^= 1
    index.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"index\.safetensors"):
        plan(root, state())


def test_a_checkpointer_plans_what_it_then_restores(root: Path) -> None:
    told = Told()
    with Checkpointer(root, events=[told]) as checkpointer:
        planned = checkpointer.plan_restore(state(), only="model")
        assert planned is not None
        assert planned.fits
        restored = checkpointer.restore(state(), only="model")
    assert restored is not None
    assert planned.checkpoint == restored.checkpoint
    assert [planned.size_bytes] == told.restored


def test_a_checkpointer_plans_the_newest_checkpoint_that_says_what_it_holds(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.restore(state())
        checkpointer.save(6, state()).result(timeout_s=60)
        (newer,) = root.glob(f"step-000000000006-*/data/{layout.INDEX}")
        newer.write_bytes(b"x")
        planned = checkpointer.plan_restore(state())
        assert planned is not None
        assert planned.step == 5
        with pytest.raises(IntegrityError, match=r"index\.safetensors"):
            checkpointer.plan_restore(state(), step=6)


def test_there_is_no_plan_where_nothing_was_committed(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "nothing") as checkpointer:
        assert checkpointer.plan_restore(state()) is None
    assert not (tmp_path / "nothing").exists()
