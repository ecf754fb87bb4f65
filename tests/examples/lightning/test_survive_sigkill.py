"""The demonstration, run small: it proves what it says, tells what it does, and can fail."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

EXAMPLE = Path(__file__).parents[3] / "examples" / "survive_sigkill"
WEIGHTS = "a" * 64, "a" * 64


def demo(*options: str, example: Path = EXAMPLE, **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(example / "demo.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, **settings)


@pytest.fixture(scope="module")
def parts() -> Iterator[SimpleNamespace]:
    """The example's modules; it is a folder of scripts and no package."""
    sys.path.insert(0, str(EXAMPLE))
    names = ("account", "comparison", "demo", "runs")
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in names:
            sys.modules.pop(name, None)


# ------------------------------------------------------------------------------------- the whole


def test_a_run_killed_twice_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    # With this seed a checkpoint is whole before the first kill.
    result = demo("--steps", "14", "--kills", "2", "--workers", "0", "--seed", "5", "--keep", str(folder))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    told = result.stdout
    assert "--seed 5" in " ".join(told.split())
    assert told.count("SIGKILL") == 1 + 2  # the title, and each kill
    assert "SIGKILL inside the save of step" in told
    assert "half-written" in told
    assert told.count("the same command again") == 2
    assert "it resumed from step" in told
    assert "equal, bit for bit" in told
    assert "The run survived." in told
    weights = [(folder / run / "model.safetensors").read_bytes() for run in ("undisturbed", "killed")]
    assert weights[0] == weights[1]
    root = folder / "killed" / "checkpoints"
    assert f"strongroom ls {root}" in told
    assert len(list((root / "launches").iterdir())) >= 2
    # Whether the half-written one still lies there depends on how fast the last run's saves were:
    # each commit sweeps what earlier launches left behind.
    assert list(root.glob("step-*/COMMIT"))


def test_a_run_that_ends_with_other_weights_is_found_out(tmp_path: Path) -> None:
    example = shutil.copytree(EXAMPLE, tmp_path / "example", ignore=shutil.ignore_patterns("__pycache__"))
    train = example / "train.py"
    text = train.read_text(encoding="utf-8")
    save = "    save_file(model.state_dict()"
    one_bit = (
        "    if options.out.name == 'killed':\n"
        "        model.places.weight.data.view(torch.int32)[0, 0] ^= 1\n"
    )
    assert text.count(save) == 1
    train.write_text(text.replace(save, one_bit + save), encoding="utf-8")
    result = demo("--steps", "10", "--kills", "0", "--workers", "0", example=example)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "the runs differ in 1 place" in result.stdout
    assert "the final weights have another digest" in result.stdout
    assert "The run did not survive." in result.stdout


def test_a_training_that_fails_is_shown_with_its_own_words() -> None:
    result = demo("--steps", "10000000")
    assert result.returncode == 1
    assert "the training ended with exit status 1" in result.stdout
    assert "bytes of source; use fewer --steps" in result.stdout


@pytest.fixture
def temporary() -> Iterator[Path]:
    """An empty folder with a short name: the loader's workers put sockets there, whose paths are short."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_an_interrupt_ends_every_process_and_leaves_nothing(temporary: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-u", str(EXAMPLE / "demo.py")]
    environment = os.environ | {"TMPDIR": str(temporary)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:  # type: ignore[call-overload]
        told = ""
        for line in process.stdout:
            told += line
            if "training from the first step" in line:
                process.send_signal(number)
                process.send_signal(number)  # impatient: the second may find the cleaning up under way
        assert process.wait() == 130, told
    assert "interrupted" in told
    assert "Traceback" not in told
    assert list(temporary.iterdir()) == []
    deadline = time.monotonic() + 60
    while processes_that_name(temporary) and time.monotonic() < deadline:
        time.sleep(0.05)  # killed they are; dying takes them a moment on a busy machine
    assert processes_that_name(temporary) == []


def processes_that_name(folder: Path) -> list[bytes]:
    commands = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # gone since
            commands.append(entry.read_bytes())
    return [command for command in commands if os.fsencode(folder) in command]


@pytest.mark.parametrize(
    ("options", "complaint"),
    (
        (("--kills", "-1"), "--kills: expected 0 or more"),
        (("--kills", "9", "--steps", "20"), "9 kills need 45 steps or more"),
        (("--keep", str(EXAMPLE)), "is not empty"),
    ),
)
def test_what_cannot_work_is_refused_before_anything_is_started(
    options: tuple[str, ...], complaint: str
) -> None:
    result = demo(*options)
    assert result.returncode == 2
    assert complaint in result.stderr


# --------------------------------------------------------------------------------- the comparison


@pytest.fixture
def batches(parts: SimpleNamespace) -> list[Any]:
    """Two epochs of four batches, two batches a step."""
    return [
        parts.runs.Batch(epoch=number // 4, batch=number % 4, step=number // 2, loss=5.0 - 0.1 * number)
        for number in range(8)
    ]


def replaced(parts: SimpleNamespace, batch: Any, **values: Any) -> Any:
    return parts.runs.Batch(**{**vars(batch), **values})


def test_equal_runs_have_no_differences_whatever_was_trained_on_again(
    parts: SimpleNamespace, batches: list[Any]
) -> None:
    again = [*batches[:5], *batches[2:7], *batches[4:]]
    assert parts.comparison.differences(batches, again, weights=WEIGHTS) == []


def test_the_last_bit_of_one_loss_is_a_difference(parts: SimpleNamespace, batches: list[Any]) -> None:
    other = [*batches]
    other[3] = replaced(parts, batches[3], loss=math.nextafter(batches[3].loss, 0.0))
    (difference,) = parts.comparison.differences(batches, other, weights=WEIGHTS)
    assert "batch 4 of epoch 1 had loss" in difference


def test_a_loss_that_differs_only_where_it_is_trained_on_again_is_a_difference(
    parts: SimpleNamespace, batches: list[Any]
) -> None:
    again = replaced(parts, batches[1], loss=0.5)
    (difference,) = parts.comparison.differences(batches, [*batches, again], weights=WEIGHTS)
    assert "batch 2 of epoch 1 had loss 0.5" in difference


def test_missing_foreign_and_shifted_batches_are_differences(
    parts: SimpleNamespace, batches: list[Any]
) -> None:
    foreign = replaced(parts, batches[0], epoch=7)
    shifted = replaced(parts, batches[2], step=5)
    found = parts.comparison.differences(batches, [*batches[1:], foreign, shifted], weights=WEIGHTS)
    assert len(found) == 3
    assert "batch 1 of epoch 8 was trained on in the killed run alone" in found
    assert "batch 3 of epoch 1 came after 5 steps, and undisturbed after 1" in found
    assert "batch 1 of epoch 1 is missing" in found


def test_other_weights_are_a_difference(parts: SimpleNamespace, batches: list[Any]) -> None:
    weights = "a" * 64, "b" * 64
    (difference,) = parts.comparison.differences(batches, batches, weights=weights)
    assert difference == "the final weights have another digest"


# -------------------------------------------------------------------------------------- the parts


@given(seed=st.integers(0, 10**6), kills=st.integers(0, 8), more=st.integers(0, 200))
def test_kills_come_in_order_before_the_end_and_one_inside_a_save(
    parts: SimpleNamespace, seed: int, kills: int, more: int
) -> None:
    steps = max(10, 5 * kills) + more
    strikes = parts.demo.draw_strikes(seed=seed, steps=steps, kills=kills)
    assert strikes == parts.demo.draw_strikes(seed=seed, steps=steps, kills=kills)
    after = [strike.after_step for strike in strikes]
    assert len(after) == kills
    assert after == sorted(set(after))
    assert all(1 <= step < steps - 1 for step in after)
    assert sum(strike.is_in_save for strike in strikes) == min(1, kills)


def test_a_line_that_a_kill_cut_short_is_no_batch(parts: SimpleNamespace) -> None:
    line = "epoch=1 batch=3 step=12 loss=2.5625\n"
    assert parts.runs.Batch.parse(line) == parts.runs.Batch(epoch=1, batch=3, step=12, loss=2.5625)
    assert all(parts.runs.Batch.parse(line[:length]) is None for length in range(len(line)))


def test_a_folder_without_a_commit_is_torn(parts: SimpleNamespace, tmp_path: Path) -> None:
    whole, torn = (tmp_path / f"step-{step:012d}-0001-{'0' * 16}" for step in (5, 10))
    for folder in (whole, torn):
        (folder / "data").mkdir(parents=True)
        (folder / "data" / "00000-00.safetensors").write_bytes(b"12345678")
    (whole / "COMMIT").write_bytes(b"{}")
    disk = parts.runs.OnDisk.of(tmp_path)
    assert disk == parts.runs.OnDisk(whole=(5,), torn=(torn,))
    assert parts.runs.size_of(torn) == (1, 8)


def test_a_kill_before_the_first_save_has_done_the_steps_that_were_printed(parts: SimpleNamespace) -> None:
    batches = [parts.runs.Batch(epoch=0, batch=step, step=step, loss=1.0) for step in range(3)]
    nothing = parts.runs.OnDisk(whole=(), torn=())
    assert parts.demo.furthest(batches, nothing, []) == 2
    saved = parts.runs.OnDisk(whole=(4,), torn=())
    assert parts.demo.furthest(batches, saved, [Path(f"step-{5:012d}-0001-{'0' * 16}")]) == 5
