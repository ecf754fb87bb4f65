"""Runs that are resumed, rewound, begun anew and written to twice: which checkpoint then is the newest."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import Checkpointer, FencedError, IntegrityError, NoWholeCheckpointError, SaveError, events

Begin = Callable[..., Checkpointer]


def state(value: float) -> dict[str, Any]:
    return {"t": torch.full((3,), float(value))}


def save(checkpointer: Checkpointer, *steps: int, value: float | None = None) -> None:
    for step in steps:
        checkpointer.save(step, state(step if value is None else value)).result(60)
    checkpointer.wait(60)


def line(root: Any) -> list[tuple[int, int]]:
    """(launch, step) of the checkpoints on the line, newest first."""
    found = Checkpointer(root).checkpoints()
    return [(c.launch, c.step) for c in found if not c.is_superseded]


def superseded(root: Any) -> list[tuple[int, int]]:
    return [(c.launch, c.step) for c in Checkpointer(root).checkpoints() if c.is_superseded]


def damage(root: Path, launch: int, step: int, name: str = "00000-00.safetensors") -> None:
    """Flip one bit of a file's last byte."""
    (path,) = root.glob(f"step-{step:012d}-{launch:04d}-*/data/{name}")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture
def run(root: Path, begin: Begin) -> Path:
    """A run whose first launch saved steps 1 to 3."""
    save(begin(root), 1, 2, 3)
    return root


def test_the_first_save_claims_a_launch_and_the_others_go_on_in_it(root: Path, begin: Begin) -> None:
    checkpointer = begin(root)
    checkpointer.restore()
    assert not root.exists()
    save(checkpointer, 1, 2)
    assert sorted(path.name for path in (root / "launches").iterdir()) == ["000001.json"]
    assert line(root) == [(1, 2), (1, 1)]


def test_a_resumed_run_goes_on_in_a_new_launch(run: Path, begin: Begin) -> None:
    checkpointer = begin(run)
    restored = checkpointer.restore()
    assert restored is not None
    assert (restored.step, restored.checkpoint.launch, restored.skipped) == (3, 1, ())
    save(checkpointer, 4)
    assert line(run) == [(2, 4), (1, 3), (1, 2), (1, 1)]


def test_resuming_alone_claims_nothing(run: Path, begin: Begin) -> None:
    for _ in range(3):
        begin(run).restore()
    assert len(list((run / "launches").iterdir())) == 1


def test_several_launches_in_a_row_make_one_line(run: Path, begin: Begin) -> None:
    for step in (4, 5, 6):
        checkpointer = begin(run)
        assert checkpointer.restore().step == step - 1
        save(checkpointer, step)
    assert line(run) == [(4, 6), (3, 5), (2, 4), (1, 3), (1, 2), (1, 1)]


def test_a_rewind_leaves_behind_what_came_after_and_never_sees_it_again(run: Path, begin: Begin) -> None:
    checkpointer = begin(run)
    assert checkpointer.restore(step=1).step == 1
    # Until something is saved, the run has not gone on from there.
    assert line(run) == [(1, 3), (1, 2), (1, 1)]
    save(checkpointer, 2, value=20)
    assert line(run) == [(2, 2), (1, 1)]
    assert superseded(run) == [(1, 3), (1, 2)]
    fresh = begin(run)
    restored = fresh.restore()
    assert (restored.step, restored.state["t"].tolist()) == (2, [20] * 3)


def test_a_rewound_run_reaches_its_old_steps_again_and_the_new_ones_count(run: Path, begin: Begin) -> None:
    checkpointer = begin(run)
    checkpointer.restore(step=1)
    save(checkpointer, 2, 3, 4, value=7)
    assert line(run) == [(2, 4), (2, 3), (2, 2), (1, 1)]
    for step in (2, 3):
        restored = begin(run).restore(step=step)
        assert (restored.checkpoint.launch, restored.state["t"].tolist()) == (2, [7] * 3)


def test_what_was_left_behind_can_still_be_asked_for_by_its_step(run: Path, begin: Begin) -> None:
    checkpointer = begin(run)
    checkpointer.restore(step=1)
    save(checkpointer, 2)
    restored = begin(run).restore(step=3)
    assert restored.checkpoint.is_superseded
    assert restored.state["t"].tolist() == [3] * 3


def test_a_rewind_onto_what_was_left_behind_makes_it_the_line_again(run: Path, begin: Begin) -> None:
    checkpointer = begin(run)
    checkpointer.restore(step=1)
    save(checkpointer, 2)
    back = begin(run)
    back.restore(step=3)
    save(back, 4)
    assert line(run) == [(3, 4), (1, 3), (1, 2), (1, 1)]
    assert superseded(run) == [(2, 2)]


def test_one_writer_may_rewind_itself(run: Path, begin: Begin) -> None:
    checkpointer = begin(run)
    checkpointer.restore()
    save(checkpointer, 4, 5)
    checkpointer.restore(step=4)
    save(checkpointer, 5, value=50)
    assert line(run) == [(3, 5), (2, 4), (1, 3), (1, 2), (1, 1)]
    assert begin(run).restore().state["t"].tolist() == [50] * 3


def test_a_run_begun_anew_in_an_old_root_never_resumes_the_old_one(run: Path, begin: Begin) -> None:
    anew = begin(run)
    save(anew, 1, value=100)
    assert line(run) == [(2, 1)]
    assert superseded(run) == [(1, 3), (1, 2), (1, 1)]
    restored = begin(run).restore()
    assert (restored.step, restored.state["t"].tolist()) == (1, [100] * 3)


def test_a_run_that_died_before_its_first_commit_leaves_the_line_alone(
    store: Any, run: Path, begin: Begin
) -> None:
    from strongroom import SaveError, StoreUnavailableError

    store.fail(StoreUnavailableError("gone"), on="finish")
    with pytest.raises(SaveError):
        save(begin(store), 1)
    assert len(list((run / "launches").iterdir())) == 2
    assert line(run) == [(1, 3), (1, 2), (1, 1)]


def test_a_damaged_newest_is_skipped_and_saving_goes_on_from_the_one_before(run: Path, begin: Begin) -> None:
    damage(run, 1, 3)
    checkpointer = begin(run)
    restored = checkpointer.restore()
    assert restored.step == 2
    assert [step for step, _ in restored.skipped] == [3]
    assert "00000-00.safetensors" in restored.skipped[0][1]
    save(checkpointer, 3, value=30)
    assert line(run) == [(2, 3), (1, 2), (1, 1)]
    # The damaged one is off the line: nothing is skipped any more.
    again = begin(run).restore()
    assert (again.step, again.skipped, again.state["t"].tolist()) == (3, (), [30] * 3)


# ------------------------------------------------------------------------------------ two writers


def test_the_later_of_two_writers_takes_the_run_over(run: Path, begin: Begin, listener: Any) -> None:
    early, late = begin(run, events=[listener]), begin(run)
    early.restore()
    late.restore()
    save(early, 4)
    save(late, 4, value=40)
    handle = early.save(5, state(5))
    with pytest.raises(
        FencedError, match=r"launch 3 has taken run .* over; this process is launch 2.*step 3"
    ):
        handle.result(60)
    assert len(listener.of(events.SaveFailed)) == 1
    assert line(run) == [(3, 4), (1, 3), (1, 2), (1, 1)]
    assert superseded(run) == [(2, 4)]
    save(late, 5)
    assert line(run)[0] == (3, 5)


def test_nothing_is_committed_into_a_root_whose_files_were_removed_meanwhile(run: Path, begin: Begin) -> None:
    checkpointer = begin(run)
    save(checkpointer, 4)
    shutil.rmtree(run)
    with pytest.raises(SaveError, match=r"launches/[0-9]+\.json is gone .* in a new root"):
        checkpointer.save(5, state(5)).result()
    assert not list(run.glob("*/COMMIT"))


def test_a_writer_that_was_taken_over_hears_of_it_at_its_next_call_and_every_time(
    run: Path, begin: Begin
) -> None:
    early = begin(run)
    save(early, 4)
    save(begin(run), 4)
    early.save(5, state(5))
    with pytest.raises(FencedError):
        early.wait()
    folders = sorted(path.name for path in run.iterdir())
    for step in (6, 7):
        with pytest.raises(FencedError):
            early.save(step, state(step))
    early.close()
    assert sorted(path.name for path in run.iterdir()) == folders, "a fenced writer wrote all the same"
    assert all(c.step < 5 for c in begin(run).checkpoints())


def test_a_zombie_that_cannot_look_is_outranked_all_the_same(store: Any, run: Path, begin: Begin) -> None:
    from strongroom import AccessDeniedError

    zombie = begin(store)
    save(zombie, 4)
    late = begin(run)
    late.restore(step=2)
    save(late, 3, value=33)
    # A write-only role: listing is denied, so the zombie commits.
    store.fail(AccessDeniedError("no list"), on="list_names")
    save(zombie, 99)
    assert line(run)[0] == (3, 3)
    assert (2, 99) in superseded(run)
    assert begin(run).restore().step == 3


def test_two_writers_that_begin_at_the_same_moment_get_different_launches(store: Any, begin: Begin) -> None:
    first, second = begin(store), begin(store)
    is_nested = []

    def hook(operation: str, key: str) -> None:
        # The second claims its launch just when the first is about to.
        if operation == "put_if_absent" and key.startswith("launches/") and not is_nested:
            is_nested.append(True)
            second.save(1, state(2)).result(60)

    store.hook = hook
    handle = first.save(1, state(1))
    handle.result(60)
    assert line(store) == [(2, 1)]
    with pytest.raises(FencedError):
        second.save(2, state(3)).result(60)


# ------------------------------------------------------------------------------- damaged records


@pytest.fixture
def three_launches(root: Path, begin: Begin) -> Path:
    for step in (1, 2, 3):
        checkpointer = begin(root)
        checkpointer.restore()
        save(checkpointer, step)
    return root


def test_a_missing_launch_record_costs_nothing_while_the_newest_is_whole(
    three_launches: Path, begin: Begin
) -> None:
    (three_launches / "launches" / "000002.json").unlink()
    checkpointer = begin(three_launches)
    assert checkpointer.restore().step == 3
    save(checkpointer, 4)
    assert line(three_launches) == [(4, 4), (3, 3), (2, 2)]
    assert superseded(three_launches) == [(1, 1)]


@pytest.mark.parametrize("how", ("missing", "damaged"))
def test_a_lost_launch_record_ends_the_fall_back_rather_than_let_it_guess(
    how: str, three_launches: Path, begin: Begin
) -> None:
    record = three_launches / "launches" / "000002.json"
    if how == "missing":
        record.unlink()
    else:
        record.write_bytes(record.read_bytes().replace(b'"launch":2', b'"launch":5'))
    damage(three_launches, 3, 3)
    damage(three_launches, 2, 2)
    with pytest.raises(NoWholeCheckpointError, match="what is older cannot be told") as caught:
        begin(three_launches).restore()
    assert [step for step, _ in caught.value.reasons] == [3, 2, 2]
    assert "launch" in caught.value.reasons[-1][1]
    assert begin(three_launches).restore(step=1).step == 1


def test_the_number_of_a_damaged_launch_is_not_taken_again(three_launches: Path, begin: Begin) -> None:
    (three_launches / "launches" / "000003.json").write_bytes(b"{}")
    checkpointer = begin(three_launches)
    assert checkpointer.restore().step == 3
    save(checkpointer, 4)
    assert line(three_launches)[0] == (4, 4)


def test_the_number_of_a_missing_launch_with_a_checkpoint_is_not_taken_again(
    three_launches: Path, begin: Begin
) -> None:
    (three_launches / "launches" / "000003.json").unlink()
    checkpointer = begin(three_launches)
    checkpointer.restore()
    save(checkpointer, 4)
    assert line(three_launches)[0] == (4, 4)


@pytest.mark.parametrize("how", ("missing", "damaged"))
def test_without_its_run_record_a_root_with_checkpoints_is_an_error_and_never_begun_anew(
    how: str, three_launches: Path, begin: Begin
) -> None:
    record = three_launches / "run.json"
    if how == "missing":
        record.unlink()
    else:
        record.write_bytes(record.read_bytes()[:-3])
    for call in (begin(three_launches).restore, begin(three_launches).checkpoints):
        with pytest.raises(IntegrityError, match=r"run\.json"):
            call()
    with pytest.raises(IntegrityError, match=r"run\.json"):
        begin(three_launches).save(4, state(4))
    # A run record that was lost is not replaced by another run's.
    assert how == "damaged" or not record.exists()


def test_a_checkpoint_of_another_run_is_damage_and_not_resumed(
    root: Path, tmp_path: Path, begin: Begin
) -> None:
    save(begin(root), 1)
    save(begin(tmp_path / "other"), 9)
    (stray,) = (tmp_path / "other").glob("step-*")
    stray.rename(root / stray.name)
    restored = begin(root).restore()
    assert restored.step == 1
    assert [step for step, _ in restored.skipped] == [9]
    assert "belongs to run" in restored.skipped[0][1]


# ------------------------------------------------------------------------------------- the clock


@pytest.mark.parametrize("jump_s", (-1e8, 1e8, -1.8e9))
def test_a_clock_that_jumps_between_saves_changes_neither_order_nor_retention(
    jump_s: float, root: Path, begin: Begin, clock: Any
) -> None:
    from strongroom import KeepLast

    first = begin(root, clock=clock.clock, keep=KeepLast(count=2))
    save(first, 1, 2)
    clock.jump(jump_s)
    save(first, 3)
    second = begin(root, clock=clock.clock, keep=KeepLast(count=2))
    assert second.restore().step == 3
    clock.jump(-2 * jump_s)
    save(second, 4)
    assert line(root) == [(2, 4), (1, 3)]
