"""Each promise, asked of every front end through nothing but the options that all of them take."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import Asked
from recording import Record
from run_plans import BATCHES, EPOCHS, INTERRUPTIONS, RunPlan, RunResult

from strongroom import Checkpointer
from strongroom.loading import load
from strongroom_cli.main import main
from strongroom_security.recipients.file import create_key_file
from strongroom_security.signers.generating import generate_key

BATCHES_OF_ALL = EPOCHS * BATCHES
FAILS = "exception on one rank"


def steps_of(root: Path, **options: Any) -> list[int]:
    """The steps of which a checkpoint is committed, the oldest first."""
    return sorted(one.step for one in Checkpointer(root, **options).checkpoints())


def goes_on_exactly(asked: Asked, plan: RunPlan, folder: Path, *, done: int) -> None:
    """A run that is taken up after so many batches ends as the one that was never interrupted."""
    assert plan.draw_from != RunPlan.draw_from, "whoever goes on stands elsewhere in every random stream"
    ends_as_if_never_interrupted(asked, plan, asked.train(plan, folder / "work"), folder, done=done)


def ends_as_if_never_interrupted(
    asked: Asked, plan: RunPlan, resumed: list[RunResult], folder: Path, *, done: int
) -> None:
    for one, whole in zip(resumed, asked.reference(plan, folder / "alone"), strict=True):
        assert one.losses == whole.losses[done:]
        assert one.weights == whole.weights
        assert (one.step, one.lr) == (whole.step, whole.lr)


@pytest.fixture(autouse=True)
def _on_record(request: pytest.FixtureRequest, record: Record) -> None:
    (which,) = request.node.get_closest_marker("promise").args
    record("promises", which, "kept")


# ---------------------------------------------------------------------------- runs that several tests look at


@pytest.fixture(scope="module")
def kept_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """What was trained, once for all tests of a front end that look at it."""
    known: dict[tuple[str, str], tuple[Path, Any]] = {}

    def run(asked: Asked, name: str, train: Callable[[Path], Any]) -> tuple[Path, Any]:
        key = (asked.name, name)
        if key not in known:
            folder = tmp_path_factory.mktemp(asked.name)
            known[key] = (folder, train(folder))
        return known[key]

    yield run
    for folder, _ in known.values():
        shutil.rmtree(folder)


@pytest.fixture
def saved_always(asked: Asked, kept_runs: Callable[..., Any]) -> tuple[Path, list[RunResult]]:
    """The root of a run of one process that was saved at every step, and what came of it."""
    folder, results = kept_runs(
        asked,
        "saved",
        lambda folder: asked.train(RunPlan(root=folder / "run"), folder / "work"),
    )
    return folder / "run", results


@pytest.fixture
def broken_off(asked: Asked, kept_runs: Callable[..., Any], tmp_path: Path) -> Path:
    """The root of a run of one process that ended by an error, some steps on: a copy, for this test alone."""

    def train(folder: Path) -> None:
        (ended,) = asked.end(RunPlan(root=folder / "run", interruption=FAILS), folder / "work")
        assert ended.error is not None
        assert ended.error[0] == "RuntimeError"

    folder, _ = kept_runs(asked, "broken off", train)
    shutil.copytree(folder / "run", tmp_path / "run")
    assert len(steps_of(tmp_path / "run")) >= 3
    return tmp_path / "run"


@pytest.fixture
def sealed(asked: Asked, kept_runs: Callable[..., Any]) -> Path:
    """The folder of a run under one file that seals, signs and audits; it was broken off, and went on."""

    def train(folder: Path) -> None:
        platform = folder / "platform"
        platform.mkdir()
        create_key_file(platform / "kek.key")
        generate_key(platform / "signer.pem")
        policy = platform / "strongroom.toml"
        policy.write_text(
            '[seal]\nrecipients = ["file:kek.key"]\n'
            '[sign]\nkey = "file:signer.pem"\n'
            '[audit]\nsink = "dir:audit"\nspool = "spool"\nkey = "file:signer.pem"\n'
        )
        plan = {"root": folder / "run", "options": {"config": str(policy)}}
        (ended,) = asked.end(RunPlan(**plan, interruption=FAILS), folder / "work")
        assert ended.error is not None
        assert ended.error[0] == "RuntimeError", ended.error
        done = steps_of(folder / "run", security=str(policy))[-1]
        goes_on_exactly(asked, RunPlan(**plan, draw_from=99), folder, done=done)

    folder, _ = kept_runs(asked, "sealed", train)
    found: Path = folder
    return found


# ---------------------------------------------------------------------------------------------- the promises


@pytest.mark.promise("resume")
def test_a_run_goes_on_from_the_newest_that_is_whole(asked: Asked, broken_off: Path, tmp_path: Path) -> None:
    newest = steps_of(broken_off)[-1]
    (folder,) = broken_off.glob(f"step-{newest:012}-*")
    torn = broken_off / folder.name.replace(f"{newest:012}", f"{newest + 1:012}")
    shutil.copytree(folder, torn, ignore=shutil.ignore_patterns("COMMIT"))
    goes_on_exactly(asked, RunPlan(root=broken_off, draw_from=99), tmp_path, done=newest)
    assert steps_of(broken_off)[-1] == BATCHES_OF_ALL


@pytest.mark.promise("unchanged")
def test_saving_changes_nothing_of_the_run(
    asked: Asked, saved_always: tuple[Path, list[RunResult]], tmp_path: Path
) -> None:
    root, results = saved_always
    ends_as_if_never_interrupted(asked, RunPlan(root=root), results, tmp_path, done=0)
    assert steps_of(root) == list(range(1, BATCHES_OF_ALL + 1))
    shared = RunPlan(root=tmp_path / "run", way=asked.way(2))
    ends_as_if_never_interrupted(asked, shared, asked.train(shared, tmp_path / "work"), tmp_path, done=0)


@pytest.mark.promise("intervals")
def test_what_the_interval_says_is_saved(asked: Asked, tmp_path: Path) -> None:
    plan = {"root": tmp_path / "run", "every_n_steps": 2, "accumulate": 2, "validates": False}
    (ended,) = asked.end(RunPlan(**plan, interruption=FAILS), tmp_path / "work")
    assert ended.error is not None
    before = steps_of(tmp_path / "run")
    # A framework may take its accumulated batches for one, and count it once.
    assert before in ([2], [2, 4])
    goes_on_exactly(asked, RunPlan(**plan, draw_from=99), tmp_path, done=2 * before[-1])
    assert steps_of(tmp_path / "run") == [2, 4, 6]


@pytest.mark.promise("retention")
def test_as_many_stay_as_it_was_told(asked: Asked, tmp_path: Path) -> None:
    plan = RunPlan(root=tmp_path / "run", validates=False, options={"keep": 2})
    asked.train(plan, tmp_path / "work")
    assert steps_of(tmp_path / "run") == [BATCHES_OF_ALL - 1, BATCHES_OF_ALL]


@pytest.mark.promise("preemption")
def test_told_to_stop_on_one_rank_all_ranks_stop_together(asked: Asked, tmp_path: Path) -> None:
    plan = {"root": tmp_path / "run", "way": asked.way(2), "every_n_steps": 1000}
    ended = asked.end(RunPlan(**plan, interruption="SIGTERM on one rank"), tmp_path / "work")
    assert [one.status for one in ended] == [128 + signal.SIGTERM] * 2, ended
    (step,) = steps_of(tmp_path / "run")
    assert INTERRUPTIONS["SIGTERM on one rank"].batch < step < BATCHES_OF_ALL
    goes_on_exactly(asked, RunPlan(**plan, draw_from=99), tmp_path, done=step)


@pytest.mark.promise("fall-back")
def test_a_damaged_checkpoint_is_passed_over_and_told(asked: Asked, broken_off: Path, tmp_path: Path) -> None:
    newest = steps_of(broken_off)[-1]
    (shard, *_) = sorted(broken_off.glob(f"step-{newest:012}-*/data/*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    plan = RunPlan(root=broken_off, draw_from=99)
    (ended,) = asked.end(plan, tmp_path / "work")
    assert ended.result is not None, ended.error
    ends_as_if_never_interrupted(asked, plan, [ended.result], tmp_path, done=newest - 1)
    assert any("damaged" in line and f"step {newest} " in line for line in ended.said), ended.said


@pytest.mark.promise("failure")
def test_a_save_that_fails_in_the_background_is_loud(asked: Asked, tmp_path: Path) -> None:
    plan = {"root": tmp_path / "run"}
    (ended,) = asked.end(RunPlan(**plan, interruption="full disk"), tmp_path / "work")
    assert ended.error is not None
    kind, words = ended.error
    assert kind == "SaveError", ended.error
    assert "failed in the background" in words
    stands = steps_of(tmp_path / "run")[-1]
    assert stands >= INTERRUPTIONS["full disk"].batch - 1
    goes_on_exactly(asked, RunPlan(**plan, draw_from=99), tmp_path, done=stands)


@pytest.mark.promise("one file")
def test_one_file_seals_signs_and_audits(sealed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = str(sealed / "platform" / "strongroom.toml")
    assert main(["verify", str(sealed / "run"), "--all", "--security", policy]) == 0
    capsys.readouterr()
    checkpoints = list((sealed / "run").glob("step-*"))
    assert len(checkpoints) == BATCHES_OF_ALL
    for one in checkpoints:
        assert (one / "signature.json").is_file()
        assert list(one.rglob("*.safetensors.floe"))
    assert main(["audit", "query", "--security", policy, "--json"]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out)["rows"] if row["outcome"] == "success"]
    assert all(row["certified"] for row in rows)
    saved = [row["step"] for row in rows if row["action"] == "save"]
    assert sorted(saved) == list(range(1, BATCHES_OF_ALL + 1))
    # The first start asked too, and found nothing.
    restored = [row["step"] for row in rows if row["action"] == "restore" and row["step"] is not None]
    assert restored == [max(step for step, launch in map(_place_of, checkpoints) if launch == 1)]


@pytest.mark.promise("no plaintext")
def test_nothing_holds_a_weight_in_the_clear(
    sealed: Path, saved_always: tuple[Path, list[RunResult]]
) -> None:
    # To the last bit the weights of the run that was not sealed: so it is known what to look for.
    clear, _ = saved_always
    marks = {mark for step in steps_of(clear) for mark in _marks(load(clear, step=step).state)}
    assert len(marks) >= BATCHES_OF_ALL
    assert _marks_in(clear, marks) == marks
    assert _marks_in(sealed, marks) == set()


@pytest.mark.promise("version")
def test_an_unsupported_version_is_refused_at_the_start(asked: Asked, tmp_path: Path) -> None:
    (ended,) = asked.end(RunPlan(root=tmp_path / "run"), tmp_path / "work", is_unsupported=True)
    assert ended.error is not None
    kind, words = ended.error
    assert kind == "ConfigError", ended.error
    assert asked.front_end.package in words.lower(), "it says of what"
    assert "use an older" in words or "install" in words, "it says what to do"
    assert not list(tmp_path.glob("run/step-*"))


@pytest.mark.promise("another's root")
def test_another_front_ends_root_is_refused(asked: Asked, tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as other:
        other.save(3, {"network": {"weight": torch.ones(3)}, "epoch": 1})
    (ended,) = asked.end(RunPlan(root=tmp_path / "run"), tmp_path / "work")
    assert ended.error is not None
    kind, words = ended.error
    assert kind == "StateMismatchError", ended.error
    assert "was not written by" in words
    assert "resume='never'" in words
    assert steps_of(tmp_path / "run") == [3]


@pytest.mark.promise("stall")
def test_loggers_are_told_how_long_training_was_held_up(
    saved_always: tuple[Path, list[RunResult]],
) -> None:
    _, (result,) = saved_always
    assert {"strongroom/step", "strongroom/stall_s", "strongroom/background_s"} <= set(result.figures)


# ------------------------------------------------------------------------------------ what is looked for


def _place_of(checkpoint: Path) -> tuple[int, int]:
    """Its step, and the launch that saved it, by its name."""
    _, step, launch, _ = checkpoint.name.split("-")
    return int(step), int(launch)


def _marks(state: Any) -> Iterator[bytes]:
    """The first bytes of every tensor of a state that is long enough to be like no other."""
    if isinstance(state, torch.Tensor):
        if state.is_floating_point() and state.numel() >= 16 and state.count_nonzero() >= 16:
            yield state.contiguous().numpy().tobytes()[:64]
    elif isinstance(state, dict):
        for value in state.values():
            yield from _marks(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _marks(value)


def _marks_in(folder: Path, marks: set[bytes]) -> set[bytes]:
    """Those that stand in any file."""
    contents = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert contents
    return {mark for mark in marks if any(mark in content for content in contents)}
