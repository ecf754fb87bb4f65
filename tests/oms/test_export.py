"""Who gets an exported folder checks it with ``model_signing`` alone: whose it is, and that it is whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from authorities import MemorySigner, issue, issue_signer
from independent import ModelSigning

from strongroom import Checkpointer
from strongroom_cli.main import main
from strongroom_security import SecurityPolicy
from strongroom_security.recipients.file import create_key_file
from strongroom_security.signers.generating import generate_key


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 20))


def export(*arguments: str | Path) -> None:
    assert main(["export", *map(str, arguments)]) == 0


def verified_by_key(folder: Path, public_key: Path) -> tuple[str | Path, ...]:
    return "key", folder, "--signature", folder / "model.sig", "--public_key", public_key


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": model()}, provenance={"model_config": {"model_type": "tiny"}})
    return tmp_path / "run"


@pytest.fixture
def exported(run: Path, tmp_path: Path) -> Path:
    """A signed folder of several files, the public half of whose key is beside it."""
    generate_key(tmp_path / "signer.pem")
    (tmp_path / "LICENSE").write_text("free")
    out = tmp_path / "out"
    named = ("--sign", f"file:{tmp_path / 'signer.pem'}", "--add", tmp_path / "LICENSE")
    export(run, "--to", out, "--max-shard-size", "2KB", *named)
    return out


def test_an_exported_folder_is_accepted(model_signing: ModelSigning, exported: Path, tmp_path: Path) -> None:
    assert len(list(exported.glob("model-*.safetensors"))) == 2
    assert model_signing.accepts(*verified_by_key(exported, tmp_path / "signer.pub"))
    # Wherever it is put, and with its signature beside it as well as in it.
    moved = shutil.copytree(exported, tmp_path / "elsewhere" / "under another name")
    assert model_signing.accepts(*verified_by_key(moved, tmp_path / "signer.pub"))
    beside = shutil.move(moved / "model.sig", tmp_path / "beside.sig")
    assert model_signing.accepts("key", moved, "--signature", beside, "--public_key", tmp_path / "signer.pub")


def test_what_git_would_put_there_is_a_receivers_choice(
    model_signing: ModelSigning, exported: Path, tmp_path: Path
) -> None:
    arguments = verified_by_key(exported, tmp_path / "signer.pub")
    assert model_signing.accepts(*arguments, "--no-ignore-git-paths")
    (exported / ".gitattributes").write_text("*.safetensors filter=lfs")
    assert model_signing.accepts(*arguments)
    assert not model_signing.accepts(*arguments, "--no-ignore-git-paths")


def test_what_the_command_prints_for_receivers_works(
    model_signing: ModelSigning, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate_key(tmp_path / "signer.pem")
    export(run, "--to", tmp_path / "out", "--sign", f"file:{tmp_path / 'signer.pem'}")
    (told,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("check it with: "))
    words = told.removeprefix("check it with: model_signing verify ").split()
    assert words[-1] == "SIGNER.pub"
    assert model_signing.accepts(*words[:-1], tmp_path / "signer.pub")


@pytest.mark.parametrize("digest", ("blake3", "sha256"))
def test_a_folder_that_was_exported_from_a_sealed_and_signed_run_is_accepted(
    model_signing: ModelSigning, tmp_path: Path, digest: str
) -> None:
    create_key_file(tmp_path / "kek.key")
    generate_key(tmp_path / "signer.pem", curve="P-384")
    policy = tmp_path / "strongroom.toml"
    policy.write_text(
        f'digest = "{digest}"\n[seal]\nrecipients = ["file:kek.key"]\n[sign]\nkey = "file:signer.pem"\n'
    )
    with Checkpointer(tmp_path / "run", security=SecurityPolicy.load(policy)) as checkpointer:
        checkpointer.save(1, {"model": model()})
    export(tmp_path / "run", "--to", tmp_path / "out", "--security", policy)
    assert model_signing.accepts(*verified_by_key(tmp_path / "out", tmp_path / "signer.pub"))


def test_a_folder_that_a_certified_key_signed_is_accepted(
    model_signing: ModelSigning, run: Path, tmp_path: Path
) -> None:
    root = issue("root")
    intermediate = issue("intermediate", root)
    signer = MemorySigner("P-256")
    leaf = issue_signer(intermediate, signer.private)
    key = tmp_path / "signer.pem"
    key.write_bytes(signer.private_pem)
    key.chmod(0o600)
    (tmp_path / "chain.pem").write_bytes(leaf.pem + intermediate.pem)
    (tmp_path / "root.crt").write_bytes(root.pem)
    named = ("--sign", f"file:{key}", "--certificate", tmp_path / "chain.pem")
    export(run, "--to", tmp_path / "out", *named)
    arguments = ("certificate", tmp_path / "out", "--signature", tmp_path / "out/model.sig")
    assert model_signing.accepts(*arguments, "--certificate_chain", tmp_path / "root.crt")
    (tmp_path / "foreign.crt").write_bytes(issue("root").pem)
    assert not model_signing.accepts(*arguments, "--certificate_chain", tmp_path / "foreign.crt")


def _flip(folder: Path) -> None:
    path = folder / "model-00002-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _edit_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "other"}')


def _swap(folder: Path) -> None:
    one, two = sorted(folder.glob("model-*.safetensors"))
    os.rename(one, folder / "x")
    os.rename(two, one)
    os.rename(folder / "x", two)


TAMPERING: dict[str, Callable[[Path], object]] = {
    "a flipped byte": _flip,
    "an edited config": _edit_config,
    "an added file": lambda folder: (folder / "modeling.py").write_text("evil = True"),
    "a removed file": lambda folder: (folder / "config.json").unlink(),
    "a renamed file": lambda folder: (folder / "config.json").rename(folder / "config2.json"),
    "files that changed their names": _swap,
}


@pytest.mark.parametrize("tampering", TAMPERING)
def test_any_change_is_rejected(
    model_signing: ModelSigning, exported: Path, tmp_path: Path, tampering: str
) -> None:
    TAMPERING[tampering](exported)
    assert not model_signing.accepts(*verified_by_key(exported, tmp_path / "signer.pub"))


def test_a_foreign_key_is_rejected(model_signing: ModelSigning, exported: Path, tmp_path: Path) -> None:
    generate_key(tmp_path / "foreign.pem")
    assert not model_signing.accepts(*verified_by_key(exported, tmp_path / "foreign.pub"))
