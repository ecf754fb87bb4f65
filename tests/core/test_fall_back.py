"""Damaged checkpoints: skipped, told, bounded, overwritten; and what is no damage is never skipped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from strongroom import (
    AccessDeniedError,
    Checkpointer,
    CheckpointNotFoundError,
    IntegrityError,
    NoWholeCheckpointError,
    RollbackError,
    StateMismatchError,
    StoreError,
    StoreUnavailableError,
    UnsupportedFormatError,
    events,
)

Begin = Callable[..., Checkpointer]
SHARD = "00000-00.safetensors"


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


class Training:
    """A model, its optimizer and more, which train deterministically."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        self.model = net()
        self.optimizer = optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.tensor = torch.zeros(5)
        self.generator = torch.Generator().manual_seed(1)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "tensor": self.tensor,
            "generator": self.generator,
            "extra": {"seen": self.tensor[0].item()},
        }

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(6, 4)).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.tensor += 1
        torch.randn(1, generator=self.generator)

    def bytes(self) -> bytes:
        """All of it, bit for bit."""
        parts = [value.detach().numpy().tobytes() for value in self.model.state_dict().values()]
        for values in self.optimizer.state.values():
            parts += [value.numpy().tobytes() for value in values.values()]
        parts += [repr(self.optimizer.state_dict()["param_groups"]).encode()]
        parts += [repr(self.scheduler.state_dict()).encode(), self.tensor.numpy().tobytes()]
        parts += [self.generator.get_state().numpy().tobytes()]
        return b"|".join(parts)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with steps 1 to 6 of a training."""
    root = tmp_path_factory.mktemp("pristine") / "run"
    training = Training()
    with Checkpointer(root) as checkpointer:
        for step in range(1, 7):
            training.step()
            checkpointer.save(step, training.state())
    return root


@pytest.fixture
def run(pristine: Path, root: Path) -> Path:
    """A copy of it: a recursive copy of a run is a run."""
    shutil.copytree(pristine, root)
    return root


def file_of(root: Path, step: int, name: str) -> Path:
    (path,) = root.glob(f"step-{step:012d}-*/{name}")
    return path


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def damage(root: Path, *steps: int) -> None:
    for step in steps:
        flip(file_of(root, step, f"data/{SHARD}"))


def expected(root: Path, step: int) -> bytes:
    """What a clean restore of a step gives."""
    training = Training()
    Checkpointer(root).restore(training.state(), step=step)
    return training.bytes()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped bit": flip,
    "a flipped first byte": lambda path: flip(path, 0),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "too long": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "missing": lambda path: path.unlink(),
}
FILES = [
    "COMMIT",
    "data/MANIFEST.json",
    "data/index.safetensors",
    "data/state.json",
    "data/provenance.json",
    f"data/{SHARD}",
]


@pytest.mark.parametrize("how", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("with_template", (True, False), ids=("into a template", "anew"))
def test_a_damaged_file_is_named_and_the_checkpoint_skipped(
    how: Any, name: str, with_template: bool, run: Path, begin: Begin
) -> None:
    want = expected(run, 5)
    path = file_of(run, 6, name)
    how(path)
    training = Training()
    restored = begin(run).restore(training.state() if with_template else None)
    if name == "COMMIT" and not path.exists():
        # Without it the folder was never a checkpoint.
        assert (restored.step, restored.skipped) == (5, ())
    else:
        assert restored.step == 5
        ((step, reason),) = restored.skipped
        assert step == 6
        assert name.removeprefix("data/") in reason
    if with_template:
        assert training.bytes() == want


def test_a_file_of_another_step_in_its_place_is_found(run: Path, begin: Begin) -> None:
    for name in FILES:
        one, two = file_of(run, 6, name), file_of(run, 5, name)
        kept = one.read_bytes()
        one.write_bytes(two.read_bytes())
        restored = begin(run).restore(Training().state())
        assert restored.step == 5, name
        assert name.removeprefix("data/") in restored.skipped[0][1]
        one.write_bytes(kept)


def test_a_folder_under_another_steps_name_is_found(run: Path, begin: Begin) -> None:
    (folder,) = run.glob("step-000000000006-*")
    folder.rename(run / folder.name.replace("step-000000000006", "step-000000000099"))
    restored = begin(run).restore()
    assert restored.step == 5
    assert [step for step, _ in restored.skipped] == [99]


def test_after_a_fall_back_no_byte_of_a_failed_checkpoint_remains(run: Path, begin: Begin) -> None:
    want = expected(run, 3)
    training = Training()
    for _ in range(4):
        training.step()
    damage(run, 6, 5, 4)
    restored = begin(run).restore(training.state())
    assert restored.step == 3
    assert training.bytes() == want
    assert restored.state["extra"] == {"seen": 3.0}
    # And it trains on as the run did.
    other = Training()
    Checkpointer(run).restore(other.state(), step=3)
    for one in (training, other):
        torch.manual_seed(1)
        one.step()
    assert training.bytes() == other.bytes()


def test_state_that_the_older_checkpoint_lacks_does_not_survive_from_the_newer(
    root: Path, begin: Begin
) -> None:
    """At step 0 the optimizer had no state yet; the damaged step 1 has some."""
    training = Training()
    with begin(root) as checkpointer:
        checkpointer.save(0, training.state())
        training.step()
        checkpointer.save(1, training.state())
    flip(file_of(root, 1, f"data/{SHARD}"))
    fresh = Training()
    fresh.step()
    restored = begin(root).restore(fresh.state())
    assert restored.step == 0
    assert not fresh.optimizer.state
    assert fresh.bytes() == Training().bytes()


def test_nothing_is_loaded_into_an_object_from_a_damaged_checkpoint(run: Path, begin: Begin) -> None:
    loaded: list[Any] = []

    class Watching:
        def state_dict(self) -> Any:
            return {}

        def load_state_dict(self, state: Any) -> None:
            loaded.append(state["last_epoch"])

    damage(run, 6, 5)
    begin(run).restore({"scheduler": Watching(), "model": net()}, strict=False)
    assert loaded == [4]


def test_each_skipped_checkpoint_is_told_with_its_step_and_reason(
    run: Path, begin: Begin, listener: Any
) -> None:
    damage(run, 6, 5)
    restored = begin(run, events=[listener]).restore()
    assert [step for step, _ in restored.skipped] == [6, 5]
    assert [(event.step, event.reason) for event in listener.of(events.CheckpointSkipped)] == list(
        restored.skipped
    )
    (finished,) = listener.of(events.RestoreFinished)
    assert (finished.step, finished.skipped) == (4, 2)


# ------------------------------------------------------------------------------------------ bounds


def test_a_fourth_skipped_checkpoint_is_a_rollback_error(run: Path, begin: Begin) -> None:
    damage(run, 6, 5, 4)
    assert begin(run).restore().step == 3
    damage(run, 3)
    with pytest.raises(RollbackError, match="accept_older=True") as caught:
        begin(run).restore()
    assert [step for step, _ in caught.value.reasons] == [6, 5, 4, 3]
    restored = begin(run).restore(accept_older=True)
    assert restored.step == 2
    assert len(restored.skipped) == 4


@pytest.mark.parametrize("allowed", (0, 1, 5))
def test_max_fallback_is_how_many_may_be_skipped(allowed: int, run: Path, begin: Begin) -> None:
    damage(run, *range(6, 6 - allowed, -1))
    assert begin(run, max_fallback=allowed).restore().step == 6 - allowed
    damage(run, 6 - allowed)
    with pytest.raises((RollbackError, NoWholeCheckpointError)):
        begin(run, max_fallback=allowed).restore()


def test_when_all_are_damaged_the_error_says_why_and_is_never_nothing_to_restore(
    run: Path, begin: Begin
) -> None:
    damage(run, 1, 2, 3, 4, 5, 6)
    with pytest.raises(NoWholeCheckpointError) as caught:
        begin(run, max_fallback=9).restore()
    assert [step for step, _ in caught.value.reasons] == [6, 5, 4, 3, 2, 1]
    assert caught.value.undefined == ()
    assert all(SHARD in reason for _, reason in caught.value.reasons)


def big_state(value: float) -> dict[str, torch.Tensor]:
    """Two tensors of several blocks each: a damage in the second is met after the first was filled."""
    return {name: torch.full((1_500_000,), float(value)) for name in ("a", "b")}


@pytest.mark.parametrize("digest", ("blake3", "sha256"))
def test_when_all_are_damaged_the_tensors_that_were_written_to_are_named(
    digest: str, root: Path, begin: Begin
) -> None:
    with begin(root, digest=digest) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, big_state(step))
    damage(root, 1, 2)
    template = {name: torch.zeros(1_500_000) for name in ("a", "b")}
    with pytest.raises(NoWholeCheckpointError, match=r"Undefined now.*a, b") as caught:
        begin(root).restore(template)
    assert caught.value.undefined == ("a", "b")
    assert {step for step, _ in caught.value.reasons} == {1, 2}


def test_a_rollback_error_names_the_tensors_that_are_undefined_now(root: Path, begin: Begin) -> None:
    with begin(root, digest="sha256") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, big_state(step))
    damage(root, 2)
    template = {name: torch.zeros(1_500_000) for name in ("a", "b")}
    with pytest.raises(RollbackError, match=r"Undefined now.*a, b"):
        begin(root, max_fallback=0).restore(template)


@pytest.mark.parametrize("digest", ("blake3", "sha256"))
def test_a_large_damaged_checkpoint_is_overwritten_whole(digest: str, root: Path, begin: Begin) -> None:
    with begin(root, digest=digest) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, big_state(step))
    damage(root, 2)
    template = {name: torch.zeros(1_500_000) for name in ("a", "b")}
    assert begin(root).restore(template).step == 1
    for name, tensor in template.items():
        assert tensor.unique().tolist() == [1.0], name


def test_an_older_checkpoint_that_lacks_what_was_overwritten_is_a_mismatch_that_says_what_is_undefined(
    root: Path, begin: Begin
) -> None:
    with begin(root) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(1_500_000)})
        checkpointer.save(2, big_state(2))
    damage(root, 2)
    for strict in (True, False):
        template = {name: torch.zeros(1_500_000) for name in ("a", "b")}
        with pytest.raises(StateMismatchError) as caught:
            begin(root).restore(template, strict=strict)
        assert caught.value.missing == ("b",)
        assert "undefined" in str(caught.value).lower()
        assert "Nothing was changed" not in str(caught.value)


def test_a_mismatch_found_after_filling_says_that_tensors_were_changed(begin: Begin, memory: Any) -> None:
    import dataclasses

    from strongroom import register_type, registry

    @dataclasses.dataclass
    class Gone:
        x: int

    register_type(Gone, name="core-tests.Gone")
    begin(memory).save(1, {"t": torch.ones(2), "extra": Gone(1)}).result()
    del registry._by_name["core-tests.Gone"], registry._by_type[Gone]
    with pytest.raises(StateMismatchError, match=r"core-tests\.Gone.*tensors hold step 1"):
        begin(memory).restore({"t": torch.zeros(2), "extra": None})


# --------------------------------------------------------------------------------------- one step


def test_a_step_that_was_asked_for_and_is_damaged_raises_and_never_falls_back(
    run: Path, begin: Begin
) -> None:
    damage(run, 4)
    training = Training()
    before = training.bytes()
    with pytest.raises(IntegrityError, match=SHARD):
        begin(run).restore(training.state(), step=4)
    assert training.bytes() == before
    flip(file_of(run, 3, "COMMIT"), 5)
    with pytest.raises(IntegrityError, match="COMMIT"):
        begin(run).restore(step=3)
    file_of(run, 2, "COMMIT").unlink()
    with pytest.raises(CheckpointNotFoundError):
        begin(run).restore(step=2)


def test_a_damaged_step_that_was_read_into_tensors_names_them(root: Path, begin: Begin) -> None:
    begin(root, digest="sha256").save(1, big_state(1)).result()
    damage(root, 1)
    with pytest.raises(NoWholeCheckpointError) as caught:
        begin(root).restore({name: torch.zeros(1_500_000) for name in ("a", "b")}, step=1)
    assert caught.value.undefined == ("a", "b")


# ---------------------------------------------------------------------------------- what is no damage

ERRORS = [
    AccessDeniedError("denied"),
    StoreUnavailableError("timed out"),
    StoreError("something else"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_store_that_cannot_be_asked_raises_whatever_it_was_asked_and_never_falls_back(
    error: StoreError, memory: Any, begin: Begin
) -> None:
    store = memory
    with begin(store) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"t": torch.ones(3), "extra": [1]})
    store.log.clear()
    assert begin(store).restore({"t": torch.zeros(3), "extra": 0}).step == 2
    asked = len(store.log)
    assert {"list_names", "stat", "read", "open_reader", "read_into"} <= {name for name, _ in store.log}

    for fail_at in range(asked):
        left = [fail_at]

        def hook(operation: str, key: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                raise error

        store.hook = hook
        with pytest.raises(type(error)) as caught:
            begin(store).restore({"t": torch.zeros(3), "extra": 0})
        assert caught.value is error, fail_at
        with pytest.raises(type(error)):
            left[0] = fail_at
            begin(store).restore(step=2)
    store.hook = None


def test_a_checkpoint_in_another_format_is_not_skipped_but_refused(run: Path, begin: Begin) -> None:
    from strongroom import canonical

    path = file_of(run, 6, "COMMIT")
    members = json.loads(path.read_bytes())
    del members[canonical.SELF_DIGEST]
    path.write_bytes(canonical.with_self_digest({**members, "format": "0.7"}))
    for call in (begin(run).restore, begin(run).checkpoints):
        with pytest.raises(UnsupportedFormatError, match=r"format 0\.7; this release reads 0\.1"):
            call()
