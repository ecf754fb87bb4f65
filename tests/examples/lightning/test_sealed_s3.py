"""The example with sealed checkpoints in a bucket, against a server that speaks S3."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "stores"))

from s3_servers import start_ministack

from strongroom import Checkpointer
from strongroom_security.recipients.file import create_key_file
from strongroom_security.signers.generating import generate_key

HERE = Path(__file__).parents[3] / "examples" / "lightning" / "sealed_s3"


@pytest.mark.filterwarnings("ignore:.*does not have many workers:")
@pytest.mark.filterwarnings("ignore:The number of training batches:")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_it_saves_sealed_into_the_bucket_and_resumes_from_there(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "example"
    shutil.copytree(HERE, folder)
    create_key_file(folder / "kek.key")
    generate_key(folder / "signer.pem")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    monkeypatch.chdir(tmp_path)
    with start_ministack() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.make_bucket("checkpoints")
        for max_steps in (20, 40):
            monkeypatch.setattr(sys, "argv", ["train.py", "first", str(max_steps)])
            runpy.run_path(str(folder / "train.py"), run_name="__main__")
        said = capsys.readouterr()
        logged = " ".join(record.message for record in caplog.records)
        root = "s3://checkpoints/runs/first"
        assert f"step 40 of {root}; the best: strongroom://{root}#step=" in said.out
        assert f"Strongroom: resuming from step 20 of {root}" in logged
        keys = server.keys("checkpoints")
        with Checkpointer(root, security=str(folder / "strongroom.toml")) as reader:
            restored = reader.restore()
    assert restored is not None
    assert restored.step == 40
    weights = restored.state["model"]["net.0.weight"]
    assert isinstance(weights, torch.Tensor)
    assert all(key.startswith("runs/first/") for key in keys)
    assert any(key.endswith("signature.json") for key in keys)
    assert [key for key in keys if ".safetensors" in key and not key.endswith(".floe")] == []
    assert not (tmp_path / "first").exists()
