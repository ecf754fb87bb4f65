"""By one policy a Trainer's checkpoints are sealed, signed and on record; nothing else holds its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_timing import steps
from trained import Net

from strongroom import Checkpointer
from strongroom.errors import ConfigError
from strongroom_security.recipients.file import create_key_file
from strongroom_security.signers.generating import generate_key

Train = Callable[..., Any]

MARKER = np.float32(1.2345e-21)
"""A weight that no training moves; its bytes are looked for in every file."""


class Marked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("marker", torch.full((256,), float(MARKER)))


def marked() -> Marked:
    torch.manual_seed(0)
    return Marked()


def in_the_clear(folder: Path) -> list[Path]:
    needle = MARKER.tobytes() * 8
    return [file for file in folder.rglob("*") if file.is_file() and needle in file.read_bytes()]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    create_key_file(tmp_path / "kek.key")
    generate_key(tmp_path / "signer.pem")
    file = tmp_path / "strongroom.toml"
    file.write_text(
        '[seal]\nrecipients = ["file:kek.key"]\n[sign]\nkey = "file:signer.pem"\n'
        '[audit]\nsink = "dir:audit"\nspool = "spool"\nkey = "file:signer.pem"\n'
    )
    return file


def test_a_clear_run_is_found_by_this_test(train: Train, tmp_path: Path) -> None:
    train(model=marked(), save_steps=6)
    assert in_the_clear(tmp_path)


def test_one_file_seals_signs_and_audits(
    train: Train, uninterrupted: Train, tmp_path: Path, root: Path, policy: Path
) -> None:
    options = {"config": policy}
    train(model=marked(), options=options, until=5)
    resumed = train(model=marked(), options=options, seed=3, load_best_model_at_end=False)
    assert resumed.losses == uninterrupted(model=marked()).losses[5:]
    assert in_the_clear(tmp_path) == []
    assert len(list(root.glob("step-*/signature.json"))) == 12
    assert any((tmp_path / "audit").rglob("*"))


def test_a_damaged_sealed_checkpoint_is_passed_over(train: Train, root: Path, policy: Path) -> None:
    options = {"config": policy}
    train(model=marked(), options=options, until=3)
    (newest,) = root.glob("step-000000000003-*")
    shard = next(newest.glob("data/*.floe"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert len(train(model=marked(), options=options).losses) == 10


@pytest.mark.parametrize("escapes", ("seal", "refuse", "warn"))
def test_save_model_is_the_users_export(
    build: Train, tmp_path: Path, policy: Path, escapes: str, said: Callable[[], str]
) -> None:
    outcome = build(model=marked(), options={"config": policy, "escapes": escapes}, save_steps=12)
    outcome.trainer.train()
    place = tmp_path / "export"
    if escapes == "refuse":
        with pytest.raises(ConfigError, match="in the clear"):
            outcome.trainer.save_model(str(place))
        assert not place.exists()
        return
    outcome.trainer.save_model(str(place))
    if escapes == "warn":
        assert in_the_clear(place)
        assert "in the clear" in said()
        return
    assert in_the_clear(tmp_path) == []
    assert "strongroom export" in said()
    with Checkpointer(place, security=policy) as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None
    assert torch.equal(restored.state["model"]["marker"], outcome.model.marker)


def test_an_export_into_the_runs_own_root_is_refused(train: Train, root: Path, policy: Path) -> None:
    settings = {"options": {"config": policy}, "output_dir": str(root), "save_steps": 4}
    outcome = train(until=5, **settings)
    with pytest.raises(ConfigError, match="folder of its own"):
        outcome.trainer.save_model()
    assert len(train(seed=3, **settings).losses) == 8


def test_without_a_policy_save_model_is_the_trainers(build: Train, tmp_path: Path) -> None:
    outcome = build(save_steps=12)
    outcome.trainer.save_model(str(tmp_path / "export"))
    assert (tmp_path / "export" / "model.safetensors").is_file()


def test_what_no_checkpoint_can_hold_is_named_once(build: Train, root: Path, said: Callable[[], str]) -> None:
    from trained import Drawing

    class Functions(Drawing):
        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"seen": [], "rule": lambda step: step}}

    outcome = build(callbacks=[Functions()], save_steps=4)
    outcome.trainer.train()
    assert steps(root) == [4, 8, 12]
    assert said().count("no pickle is in a checkpoint") == 1
