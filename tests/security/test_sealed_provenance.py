"""Where a sealed checkpoint comes from is sealed with it: its clear files say nothing of it."""

from __future__ import annotations

import json
import os
import pwd
import socket
from pathlib import Path

import pytest
import torch
from sealed_saves import file_policy

from strongroom import Checkpointer, NoKeyError, OnChange, ProvenanceMismatchError
from strongroom_cli.main import main
from strongroom_security import SecurityPolicy

SAID = {
    "hyper_parameters": {"telltale_rate": 0.15625, "schedule": "telltale-schedule"},
    "data": {"version": "telltale-data", "uri": "s3://telltale-bucket/corpus"},
    "model": {"name": "telltale-model"},
}
METRICS = {"telltale_loss": 0.71875}


@pytest.fixture
def policy(tmp_path: Path) -> SecurityPolicy:
    return file_policy(tmp_path / "policy")


@pytest.fixture
def root(tmp_path: Path, policy: SecurityPolicy, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    found = tmp_path / "run"
    with Checkpointer(found, security=policy, provenance=SAID) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}, metrics=METRICS, tags=["telltale-tag"])
    return found


def test_no_clear_file_holds_a_hyper_parameter_metric_user_or_host(root: Path) -> None:
    user, host = pwd.getpwuid(os.getuid()).pw_name, socket.gethostname()
    needles = [b"telltale", b"0.15625", b"0.71875", f'"{user}"'.encode(), b"hyper_parameters", b"corpus"]
    # A host's name of few letters occurs in random bytes; as JSON has it, it does not.
    needles.append(f'"{host}"'.encode())
    files = [path for path in root.rglob("*") if path.is_file()]
    assert any(path.name == "provenance.json.floe" for path in files)
    for path in files:
        for needle in needles:
            assert needle not in path.read_bytes(), (path.name, needle)


def test_whoever_has_the_key_is_told_and_nobody_else(
    root: Path, policy: SecurityPolicy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["provenance", str(root), "--format", "json"]) == 4
    assert main(["provenance", str(root)]) == 4
    assert "telltale" not in capsys.readouterr().out
    told = str(tmp_path / "policy/strongroom.toml")
    for form in ("json", "slsa", "openlineage"):
        assert main(["provenance", str(root), "--format", form, "--security", told]) == 0
        out = capsys.readouterr().out
        assert "telltale-data" in out
        json.loads(out)


def test_a_resume_compares_what_is_sealed(root: Path, policy: SecurityPolicy) -> None:
    other = {**SAID, "data": {"version": "telltale-other"}}
    with Checkpointer(root, security=policy, provenance=other) as checkpointer:
        with pytest.raises(ProvenanceMismatchError, match="telltale-other"):
            checkpointer.restore({"w": torch.zeros(3)})
        assert checkpointer.restore({"w": torch.zeros(3)}, accept_changes=True)
    with (
        Checkpointer(root, provenance=SAID, on_change=OnChange(data="allow")) as keyless,
        pytest.raises(NoKeyError),
    ):
        keyless.restore({"w": torch.zeros(3)})
