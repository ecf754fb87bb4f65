"""One policy seals, signs and audits a run; its record says what Composer knows, and its loggers are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from composer.loggers import InMemoryLogger, LoggerDestination
from composer_runs import train

from strongroom import Checkpointer
from strongroom.errors import IntegrityError
from strongroom_cli.main import main
from strongroom_security.recipients.file import create_key_file
from strongroom_security.signers.generating import generate_key


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """One file that seals, signs and audits."""
    create_key_file(tmp_path / "kek.key")
    generate_key(tmp_path / "signer.pem")
    file = tmp_path / "strongroom.toml"
    file.write_text(
        '[seal]\nrecipients = ["file:kek.key"]\n[sign]\nkey = "file:signer.pem"\n'
        '[audit]\nsink = "dir:audit"\n'
    )
    return file


@pytest.mark.parametrize("argument", ("security", "config"))
def test_one_file_seals_signs_and_audits(
    fit: Any, root: Path, policy: Path, uninterrupted: Any, argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = {"save_interval": "4ba", argument: str(policy)}
    fit(until=5, checkpoint=checkpoint)
    fit(seed=1000, checkpoint=checkpoint).ends_like(uninterrupted())
    assert main(["verify", str(root), "--all", "--security", str(policy)]) == 0
    assert main(["audit", "verify", "--security", str(policy)]) == 0
    capsys.readouterr()
    assert not list(root.rglob("*.safetensors"))
    assert list(root.rglob("*.safetensors.floe"))


def test_another_signer_is_not_trusted(fit: Any, policy: Path, tmp_path: Path) -> None:
    fit(until=5, checkpoint={"save_interval": "4ba", "security": str(policy)})
    (tmp_path / "other").mkdir()
    generate_key(tmp_path / "other" / "signer.pem")
    other = tmp_path / "other" / "strongroom.toml"
    other.write_text(policy.read_text().replace("file:kek.key", f"file:{tmp_path / 'kek.key'}"))
    with pytest.raises(IntegrityError, match="is not trusted"):
        fit(checkpoint={"security": str(other)})


def test_what_composer_knows_of_the_run_is_on_record(root: Path) -> None:
    train(root, until=2, auto_log_hparams=True, run_name="crab")
    with Checkpointer(root) as checkpointer:
        (newest, *_) = checkpointer.checkpoints()
    (file,) = root.glob(f"step-{newest.step:012d}-*/data/provenance.json")
    said = json.loads(file.read_text())
    assert "crab" in json.dumps(said)
    assert "hyper_parameters" in json.dumps(said)


def test_what_a_user_says_counts(root: Path) -> None:
    checkpoint = {"save_interval": "1ba", "provenance": {"data": {"version": "2026-11"}}}
    train(root, until=2, checkpoint=checkpoint)
    (file, *_) = root.glob("step-*/data/provenance.json")
    assert "2026-11" in file.read_text()


def test_the_figures_of_each_save_come_to_the_loggers(root: Path) -> None:
    memory = InMemoryLogger()
    train(root, loggers=[memory], checkpoint={"save_interval": "4ba"})
    assert [value for _, value in memory.data["strongroom/step"]][-1] == 12
    stalls = memory.data["strongroom/stall_s"]
    assert len(stalls) == 3
    assert all(0 <= value < 60 for _, value in stalls)
    assert {"strongroom/background_s", "strongroom/bytes"} <= memory.data.keys()


class Broken(LoggerDestination):
    """A logger that takes nothing of ours."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if any(name.startswith("strongroom/") for name in metrics):
            raise ConnectionError("the tracking server is away")


def test_a_logger_that_fails_is_told_once_and_ends_nothing(fit: Any, said: Any, uninterrupted: Any) -> None:
    fit(loggers=[Broken()]).ends_like(uninterrupted())
    assert said.text.count("Broken took no figures of saves") == 1


def test_no_figures_where_none_are_wanted(root: Path) -> None:
    memory = InMemoryLogger()
    train(root, loggers=[memory], checkpoint={"save_interval": "4ba", "log_saves": False})
    assert not [name for name in memory.data if name.startswith("strongroom/")]
