"""The example that fine-tunes by the Trainer: killed, started again, in a folder and sealed in a bucket."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "stores"))

from fine_tuning import EXAMPLES, Output, Program
from s3_servers import start_ministack

from strongroom_cli.main import main as strongroom
from strongroom_security.recipients.file import create_key_file
from strongroom_security.signers.generating import generate_key

pytest.importorskip("transformers", reason="needs transformers, which is not installed")

HERE = EXAMPLES / "transformers" / "fine_tune"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that has learned a little, to be fine-tuned."""
    folder = tmp_path_factory.mktemp("base")
    Program(script=HERE / "train.py", folder=folder).run(
        "runs/base", "--text", "source", "--steps", "6", "--out", "model"
    )
    return str(folder / "model")


@pytest.fixture(scope="module")
def undisturbed(base: str, tmp_path_factory: pytest.TempPathFactory) -> Output:
    program = Program(script=HERE / "train.py", folder=tmp_path_factory.mktemp("whole"))
    return program.run("runs/a", "--model", base)


def compare(undisturbed: Output, killed: Output, resumed: Output) -> None:
    assert "resuming from step" in resumed.told
    assert 10 <= min(resumed.losses) <= 23
    assert max(resumed.losses) == max(undisturbed.losses) == 60
    assert undisturbed.last.startswith("done; weights ")
    assert resumed.last == undisturbed.last
    for step, losses in [*killed.losses.items(), *resumed.losses.items()]:
        assert losses == undisturbed.losses[step], step


def test_a_killed_run_ends_with_the_weights_and_the_losses_of_the_other(
    base: str, undisturbed: Output, tmp_path: Path
) -> None:
    program = Program(script=HERE / "train.py", folder=tmp_path)
    killed = program.kill_at(22, "runs/a", "--model", base)
    resumed = program.run("runs/a", "--model", base)
    compare(undisturbed, killed, resumed)
    # The Trainer's own folder has no checkpoint in it.
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_a_killed_run_in_a_bucket_is_sealed_signed_and_on_record_and_ends_the_same(
    base: str,
    undisturbed: Output,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "example"
    shutil.copytree(HERE, folder)
    create_key_file(folder / "kek.key")
    generate_key(folder / "signer.pem")
    policy = str(folder / "strongroom.toml")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with start_ministack() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.make_bucket("checkpoints")
        program = Program(script=folder / "train.py", folder=tmp_path / "job")
        command = ("a", "--model", base, "--config", policy)
        killed = program.kill_at(22, *command)
        resumed = program.run(*command)
        keys = server.keys("checkpoints")
        root = "s3://checkpoints/runs/a"
        assert strongroom(["verify", root, "--all", "--security", policy]) == 0
        assert strongroom(["audit", "verify", "--security", policy]) == 0
    assert f"of {root}" in resumed.told
    compare(undisturbed, killed, resumed)
    assert all(key.startswith("runs/a/") for key in keys)
    assert any(key.endswith("signature.json") for key in keys)
    assert [key for key in keys if ".safetensors" in key and not key.endswith(".floe")] == []
    # Nothing of the run's state stands on this machine: not by us, and not by the Trainer.
    written = {path.suffix for path in (tmp_path / "job").rglob("*") if path.is_file()}
    assert written <= {".txt"}, written
