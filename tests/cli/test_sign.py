"""``strongroom sign``, ``verify`` under a policy, ``verify --chain``, and keys that sign."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import Checkpointer
from strongroom_security.publickeys import PublicKey

Strongroom = Callable[..., Any]

NO_TORCH = """
import sys
sys.modules["torch"] = None  # importing it is an error
from strongroom_cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def keys(here: Path, strongroom: Strongroom) -> Path:
    for name in ("alice", "bob"):
        assert strongroom("keys", "init", f"{name}.pem", "--kind", "sign-p256").status == 0
    (here / "alice.toml").write_text('[sign]\nkey = "file:alice.pem"\n')
    (here / "both.toml").write_text('[verify]\nkeys = ["file:alice.pub", "file:bob.pub"]\nthreshold = 2\n')
    return here


@pytest.fixture
def run(keys: Path) -> Path:
    with Checkpointer("run", security="alice.toml") as checkpointer:
        for step in (100, 200, 300):
            checkpointer.save(step, {"w": torch.ones(3) * step}).result(timeout_s=60)
    return keys / "run"


def id_of(path: Path) -> str:
    return PublicKey.from_pem(path.read_bytes(), "it").id


@pytest.mark.parametrize(("kind", "curve"), (("sign-p256", "P-256"), ("sign-p384", "P-384")))
def test_a_pair_of_keys_is_made_of_which_one_is_the_owners_alone(
    here: Path, strongroom: Strongroom, kind: str, curve: str
) -> None:
    made = strongroom("keys", "init", "signer.pem", "--kind", kind, "--json").json
    assert made["files"] == ["signer.pem", "signer.pub"]
    assert (made["key"], made["verify"]) == ("file:signer.pem", "file:signer.pub")
    assert stat.S_IMODE((here / "signer.pem").stat().st_mode) == 0o600
    key = PublicKey.from_pem((here / "signer.pub").read_bytes(), "it")
    assert (key.id, key.curve) == (made["id"], curve)
    again = strongroom("keys", "init", "signer.pem", "--kind", kind)
    assert again.status == 2
    assert "exists" in again.err


def test_a_key_may_be_encrypted(here: Path, strongroom: Strongroom, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGNER_PASSPHRASE", "long and drawn")
    source = ("--passphrase", "env:SIGNER_PASSPHRASE")
    assert strongroom("keys", "init", "signer.pem", "--kind", "sign-p256", *source).status == 0
    assert b"ENCRYPTED" in (here / "signer.pem").read_bytes()
    with Checkpointer("run") as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).result(timeout_s=60)
    refused = strongroom("sign", "run", "--key", "file:signer.pem")
    assert refused.status == 2
    assert "passphrase" in refused.err
    assert strongroom("sign", "run", "--key", "file:signer.pem", *source).status == 0
    assert strongroom("keys", "init", "x.key", *source).status == 2


def test_a_second_signature_meets_the_policy(run: Path, strongroom: Strongroom) -> None:
    before = strongroom("verify", "run", "--security", "both.toml")
    assert before.status == 1
    assert "untrusted" in before.out
    assert id_of(run.parent / "bob.pub") in before.out
    signed = strongroom("sign", "run", "300", "--key", "file:bob.pem", "--security", "both.toml")
    assert signed.status == 0, signed.err
    assert "signed by" in signed.out
    assert "asks for more" not in signed.out
    report = strongroom("verify", "run", "--security", "both.toml", "--json").json
    assert report["verdict"] == "whole"
    assert sorted(report["checkpoints"][0]["signers"]) == sorted(
        id_of(run.parent / f"{name}.pub") for name in ("alice", "bob")
    )
    again = strongroom("sign", "run", "300", "--key", "file:bob.pem", "--json").json
    assert (again["is_new"], again["missing"], again["key"]) == (False, None, id_of(run.parent / "bob.pub"))


def test_signing_says_what_the_policy_still_asks_for(keys: Path, strongroom: Strongroom) -> None:
    with Checkpointer("run") as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).result(timeout_s=60)
    refused = strongroom("sign", "run", "--key", "file:bob.pem", "--security", "both.toml")
    assert refused.status == 1
    assert "--unsigned" in refused.err
    signed = strongroom("sign", "run", "--key", "file:bob.pem", "--security", "both.toml", "--unsigned")
    assert signed.status == 0
    assert "asks for more" in signed.out
    assert id_of(keys / "alice.pub") in signed.out.replace("\n", "")


def test_what_is_damaged_is_not_signed(run: Path, strongroom: Strongroom) -> None:
    shard = next(run.glob("step-000000000300-*")) / "data/00000-00.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    done = strongroom("sign", "run", "--key", "file:bob.pem")
    assert done.status == 1
    assert "not whole" in done.err
    assert not list(run.glob("step-*/signatures"))


def test_nobody_signs_who_is_not_named(run: Path, strongroom: Strongroom) -> None:
    done = strongroom("sign", "run")
    assert done.status == 2
    assert "--key" in done.err
    assert strongroom("sign", "run", "--security", "alice.toml").status == 0
    assert strongroom("sign", "run", "--certificate", "x.pem").status == 2
    assert strongroom("sign", "run", "7", "--key", "file:bob.pem").status == 3


def test_verify_tells_who_signed_and_what_the_floor_is(run: Path, strongroom: Strongroom) -> None:
    (run.parent / "floor.toml").write_text(
        '[sign]\nkey = "file:alice.pem"\n[verify]\nfloor = "file:floor.json"\n'
    )
    plain = strongroom("verify", "run")
    assert "rollback protection: none" in plain.out
    assert "signed by" not in plain.out
    with Checkpointer("run", security="floor.toml") as checkpointer:
        assert checkpointer.restore() is not None
    shutil.copytree(run, run.parent / "yesterday")
    with Checkpointer("run", security="floor.toml") as checkpointer:
        checkpointer.restore()
        checkpointer.save(400, {"w": torch.ones(3)}).result(timeout_s=60)
    told = strongroom("verify", "run", "--all", "--security", "floor.toml")
    assert told.status == 0
    assert f"signed by {id_of(run.parent / 'alice.pub')} (4 checkpoints)" in told.out
    assert re.search(r"rollback protection: file:.*floor\.json", told.out)
    shutil.rmtree(run)
    shutil.move(run.parent / "yesterday", run)
    back = strongroom("verify", "run", "--security", "floor.toml", "--json")
    assert back.status == 1
    assert [problem["kind"] for problem in back.json["problems"]] == ["rolled back"]


def test_signatures_that_nobody_judged_are_told(run: Path, strongroom: Strongroom) -> None:
    plain = strongroom("verify", "run", "--all")
    assert plain.status == 0
    assert "signatures of 3 checkpoints stand here, and nobody judged them" in plain.out
    assert strongroom("verify", "run", "--json").json["unjudged"] == 1
    judged = strongroom("verify", "run", "--all", "--security", "alice.toml")
    assert "nobody judged" not in judged.out
    assert strongroom("verify", "run", "--security", "alice.toml", "--json").json["unjudged"] == 0
    # Damage changes nothing about that: a signature stands there.
    next(run.glob("step-*300-*/data/state.json")).write_bytes(b"{}")
    damaged = strongroom("verify", "run", "--json")
    assert (damaged.status, damaged.json["unjudged"]) == (1, 1)


def test_a_signature_that_was_added_later_is_one_that_nobody_judged(
    keys: Path, strongroom: Strongroom
) -> None:
    with Checkpointer("run") as checkpointer:
        for step in (100, 200):
            checkpointer.save(step, {"w": torch.ones(3)}).result(timeout_s=60)
    unsigned = strongroom("verify", "run", "--all")
    assert "signatures" not in unsigned.out
    assert strongroom("verify", "run", "--all", "--json").json["unjudged"] == 0
    assert strongroom("sign", "run", "200", "--key", "file:bob.pem").status == 0
    assert strongroom("verify", "run", "--all", "--json").json["unjudged"] == 1
    assert "signatures of 1 checkpoint stand here" in strongroom("verify", "run", "--all").out


def test_the_chain_is_told(run: Path, strongroom: Strongroom) -> None:
    assert "chain: 3 checkpoints linked" in strongroom("verify", "run", "--chain").out
    shutil.rmtree(next(run.glob("step-000000000200-*")))
    told = strongroom("verify", "run", "--chain")
    assert told.status == 0
    assert "step 200, launch 1: absent" in told.out
    report = strongroom("verify", "run", "--chain", "--json").json
    assert [link["state"] for link in report["chain"]] == ["linked", "absent", "gap"]
    assert strongroom("verify", "run", "--json").json["chain"] is None


def test_none_of_it_waits_for_torch(run: Path) -> None:
    for arguments in (
        ("sign", "run", "--key", "file:bob.pem"),
        ("verify", "run", "--chain", "--security", "alice.toml"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", NO_TORCH, *arguments], cwd=run.parent, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
