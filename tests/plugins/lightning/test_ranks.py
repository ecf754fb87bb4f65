"""Several ranks under Lightning: each gets back what it had, and the run ends as the uninterrupted one."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rank_runs
from lightning_ranks import LightningLauncher
from looking import chunks, stored_bytes

MID_EPOCH, EPOCHS_LAST_STEP, SECOND_EPOCH = 4, 6, 9
"""Batches done when the run breaks off, of 2 epochs of 6."""


def ends_like(resumed: list[dict[str, Any]], reference: list[dict[str, Any]], done: int) -> None:
    """On every rank: the losses from where it broke off, and all weights, equal as floats."""
    for rank, (one, expected) in enumerate(zip(resumed, reference, strict=True)):
        assert one["losses"] == expected["losses"][done:], rank
        assert one["weights"] == expected["weights"], rank
        assert (one["step"], one["lr"]) == (expected["step"], expected["lr"])


WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": partial(rank_runs.sharded, 2, 1), "module": rank_runs.ShardedNet},
    "tensor parallel": {"strategy": partial(rank_runs.sharded, 1, 2), "module": rank_runs.ShardedNet},
}
FINE_STEPS = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "validate": True}


@pytest.fixture(scope="module")
def reference(launcher: LightningLauncher) -> Any:
    """The uninterrupted run without our callback, once for all tests that ask for it."""
    known: dict[str, list[dict[str, Any]]] = {}

    def run(way: str, ranks: int = 2, **settings: Any) -> list[dict[str, Any]]:
        key = repr((way, ranks, sorted(settings.items())))
        if key not in known:
            known[key] = launcher.run(rank_runs.train, None, ranks=ranks, **WAYS[way], **settings)
        return known[key]

    return run


@pytest.mark.parametrize(
    ("way", "done", "settings"),
    (
        ("ddp", MID_EPOCH, {}),
        ("ddp", EPOCHS_LAST_STEP, {}),
        ("ddp", SECOND_EPOCH + 1, FINE_STEPS),
        ("fsdp2", SECOND_EPOCH, {}),
        ("fsdp2", EPOCHS_LAST_STEP, {}),
        ("fsdp2", MID_EPOCH, FINE_STEPS),
        ("tensor parallel", MID_EPOCH, {}),
    ),
)
def test_a_run_of_ranks_broken_off_anywhere_ends_as_the_uninterrupted_one(
    launcher: LightningLauncher, reference: Any, tmp_path: Path, way: str, done: int, settings: dict[str, Any]
) -> None:
    expected = reference(way, **settings)
    if way != "tensor parallel":  # whose ranks train on the same samples
        assert expected[0]["losses"] != expected[1]["losses"]
    broken = launcher.run(rank_runs.train, tmp_path / "run", until=done, ranks=2, **WAYS[way], **settings)
    assert all(one["stopped"] for one in broken)
    resumed = launcher.run(rank_runs.train, tmp_path / "run", draw_from=99, ranks=2, **WAYS[way], **settings)
    ends_like(resumed, expected, done)


def test_what_was_frozen_on_the_way_comes_back_where_the_model_is_sharded(
    launcher: LightningLauncher, tmp_path: Path
) -> None:
    def run(root: Path | None, **options: Any) -> list[dict[str, Any]]:
        settings = {**WAYS["fsdp2"], "callbacks": [rank_runs.Thaw], "max_epochs": 3}
        return launcher.run(rank_runs.train, root, ranks=2, **settings, **options)

    run(tmp_path / "run", until=SECOND_EPOCH)
    ends_like(run(tmp_path / "run", draw_from=99), run(None), SECOND_EPOCH)


# ------------------------------------------------------------------------------------- what is sharded


@pytest.fixture(scope="module")
def of_two_shards(launcher: LightningLauncher, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A root that two ranks under FSDP2 have saved step 4 in, and what they held then."""
    root = tmp_path_factory.mktemp("sharded") / "run"
    return root, launcher.run(rank_runs.train, root, until=MID_EPOCH, ranks=2, **WAYS["fsdp2"])


def test_a_sharded_model_is_saved_as_it_lies(of_two_shards: Any) -> None:
    root, _ = of_two_shards
    assert chunks(root, "model.net.0.weight") == {(0, 0): (0, (4, 6)), (4, 0): (1, (4, 6))}
    assert chunks(root, "optimizers.[0].state.model.net.0.weight.exp_avg") == {
        (0, 0): (0, (4, 6)),
        (4, 0): (1, (4, 6)),
    }
    first, second = stored_bytes(root, 2)
    assert first < 2 * second


@pytest.mark.parametrize(
    ("ranks", "way"),
    (
        (4, {"strategy": partial(rank_runs.sharded, 4, 1), "module": rank_runs.ShardedNet}),
        (4, {"strategy": partial(rank_runs.sharded, 2, 2), "module": rank_runs.ShardedNet}),
        (2, WAYS["tensor parallel"]),
        (2, WAYS["ddp"]),
        (1, {"strategy": "auto"}),
    ),
    ids=("4 shards", "2 x 2", "tensor parallel", "ddp", "one device"),
)
def test_model_and_optimizer_are_exact_under_another_layout(
    launcher: LightningLauncher, of_two_shards: Any, ranks: int, way: dict[str, Any]
) -> None:
    root, saved = of_two_shards
    for found in launcher.run(
        rank_runs.train, root, draw_from=99, callbacks=[rank_runs.StopAtStart], ranks=ranks, **way
    ):
        assert found["stopped"]
        assert found["step"] == MID_EPOCH
        assert found["weights"] == saved[0]["weights"]
        assert found["moments"] == saved[0]["moments"]


@pytest.mark.parametrize(
    "settings",
    (
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"strategy": partial(rank_runs.sharded, 2, 1, distributed=False)},
    ),
    ids=("bf16-mixed", "bf16-true", "one file"),
)
def test_kinds_of_sharded_runs(
    launcher: LightningLauncher, reference: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    way = {**WAYS["fsdp2"], **settings}
    expected = launcher.run(rank_runs.train, None, ranks=2, **way)
    launcher.run(rank_runs.train, tmp_path / "run", until=MID_EPOCH, ranks=2, **way)
    resumed = launcher.run(rank_runs.train, tmp_path / "run", draw_from=99, ranks=2, **way)
    ends_like(resumed, expected, MID_EPOCH)


def test_hooks_see_a_sharded_model_by_its_names_and_each_rank_gets_its_own_back(
    launcher: LightningLauncher, tmp_path: Path
) -> None:
    way = {"strategy": WAYS["fsdp2"]["strategy"]}
    names = ["net.0.bias", "net.0.weight", "net.3.bias", "net.3.weight"]
    for found in launcher.run(rank_runs.hooked, tmp_path / "run", until=MID_EPOCH, ranks=2, **way):
        shown = found["shown"]
        assert shown["weights"] == shown["state"] == sorted(shown["params"]) == names
        assert shown["kinds"] == ["DTensor"]
    for rank, found in enumerate(
        launcher.run(rank_runs.hooked, tmp_path / "run", callbacks=[rank_runs.StopAtStart], ranks=2, **way)
    ):
        assert found["loaded"] == {"mine": {"rank": rank}, "weights": names}


# ------------------------------------------------------------------------------- what differs by rank


def test_what_differs_by_rank_comes_back_to_each(launcher: LightningLauncher, tmp_path: Path) -> None:
    expected = launcher.run(rank_runs.count, None, ranks=2)
    assert expected[0]["mean"] != expected[1]["mean"]
    launcher.run(rank_runs.count, tmp_path / "run", until=MID_EPOCH, ranks=2)
    assert launcher.run(rank_runs.count, tmp_path / "run", draw_from=99, ranks=2) == expected


def test_an_interval_of_time_has_passed_on_all_ranks_or_on_none(
    launcher: LightningLauncher, tmp_path: Path
) -> None:
    checkpoint = {"train_time_interval": timedelta(milliseconds=1)}
    found = launcher.run(rank_runs.train, tmp_path / "run", checkpoint=checkpoint, ranks=3)
    assert [one["step"] for one in found] == [12] * 3
    assert len(list((tmp_path / "run").glob("step-*/COMMIT"))) > 1


def test_a_hook_that_fails_on_one_rank_fails_all_at_once(launcher: LightningLauncher, tmp_path: Path) -> None:
    job = launcher.start(rank_runs.train, tmp_path / "run", module=rank_runs.Raising, ranks=2)
    first, second = job.outcomes(limit_s=60)
    assert second.error is not None
    assert second.error[0] == "ValueError"
    assert first.error is not None
    assert first.error[0] == "RankFailedError"
    assert "rank 1" in first.error[1]
    assert "no state from here" in first.error[1]
    assert [path.parent.name[:17] for path in (tmp_path / "run").glob("step-*/COMMIT")] == [
        "step-000000000001"
    ]


def test_messages_come_from_rank_0_alone(launcher: LightningLauncher, tmp_path: Path) -> None:
    launcher.run(rank_runs.train, tmp_path / "run", until=MID_EPOCH, ranks=2)
    first, second = launcher.run(rank_runs.told_of, tmp_path / "run", ranks=2)
    assert second == []
    assert any("resuming from step 4" in line for line in first)
    assert len(first) == len(set(first))


# ---------------------------------------------------------------------- another number of processes


@pytest.mark.parametrize(
    ("before", "now"),
    (((2, 4), (4, 4)), ((4, 2), (2, 4)), ((2, 4), (4, 2))),
    ids=("2 to 4", "4 to 2", "smaller"),
)
def test_another_number_of_ranks_misses_no_sample_and_sees_none_twice(
    launcher: LightningLauncher, tmp_path: Path, before: tuple[int, int], now: tuple[int, int]
) -> None:
    root = tmp_path / "run"
    seen = launcher.run(rank_runs.read, root, before[1], until=2, ranks=before[0])
    seen += launcher.run(rank_runs.read, root, now[1], draw_from=99, ranks=now[0])
    assert sorted(sample for rank in seen for sample in rank) == list(range(48))
