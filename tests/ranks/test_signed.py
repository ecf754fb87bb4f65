"""Signed checkpoints of many ranks: one rank signs and judges, and the others need no key for it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import signed_jobs as jobs
from crews import Crews
from sealed_jobs import save_sharded, under

from strongroom.canonical import with_self_digest
from strongroom.catalog import Catalog
from strongroom.digest import sha256_of
from strongroom.stores.local import LocalStore
from strongroom.verify import verify
from strongroom_security import SecurityPolicy
from strongroom_security.signers.generating import generate_key

RANKS = 4


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    generate_key(folder / "signer.pem")
    generate_key(folder / "other.pem")
    return folder


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f'digest = "sha256"\n{text}')
    return path


@pytest.fixture
def signing(keys: Path) -> Path:
    return written(keys, "signing.toml", '[sign]\nkey = "file:signer.pem"\n')


@pytest.fixture
def verifying(keys: Path) -> Path:
    return written(keys, "verifying.toml", '[verify]\nkeys = ["file:signer.pub"]\n')


def test_a_job_signs_once_for_all_and_restores_what_it_signed(
    crews: Crews, tmp_path: Path, signing: Path
) -> None:
    root = tmp_path / "run"
    crews.run(under, signing, save_sharded, root, [1, 2], ranks=RANKS)
    report = verify(LocalStore(root), everything=True, guard=SecurityPolicy.load(signing).guard)
    assert report.verdict == "whole", report.problems
    assert all(len(checkpoint.signers) == 1 for checkpoint in report.checkpoints)
    assert crews.run(under, signing, jobs.restored_step, root, ranks=RANKS) == [2] * RANKS


def test_only_the_rank_that_signs_needs_the_key(
    crews: Crews, tmp_path: Path, signing: Path, verifying: Path
) -> None:
    root = tmp_path / "run"
    crews.run(jobs.save_under_own_policies, root, signing, verifying, ranks=RANKS)
    report = verify(LocalStore(root), guard=SecurityPolicy.load(verifying).guard)
    assert report.verdict == "whole", report.problems
    for told in crews.run(jobs.save_under_own_policies, root, verifying, signing, ranks=RANKS):
        assert told.error == "ConfigError"
        assert re.search(r"rank 0 does not sign and ranks 1, 2, 3 sign", told.text)


def test_what_one_rank_refuses_is_skipped_by_all(crews: Crews, tmp_path: Path, signing: Path) -> None:
    root = tmp_path / "run"
    crews.run(under, signing, save_sharded, root, [1, 2], ranks=RANKS)
    newest = Catalog(LocalStore(root)).history().newest()
    signature = root / newest.folder / "signature.json"
    bundle = json.loads(signature.read_bytes())
    bundle["dsseEnvelope"]["payload"] = bundle["dsseEnvelope"]["payload"][::-1]
    signature.write_text(json.dumps(bundle))
    commit = root / newest.commit_key
    members = json.loads(commit.read_bytes())
    members["signature"] = str(sha256_of(signature.read_bytes()))
    del members["~digest"]
    commit.write_bytes(with_self_digest(members))
    assert crews.run(under, signing, jobs.restored_step, root, ranks=RANKS) == [1] * RANKS


def test_a_root_below_the_floor_is_refused_on_every_rank(
    crews: Crews, tmp_path: Path, keys: Path, signing: Path
) -> None:
    root = tmp_path / "run"
    policy = written(
        keys, "floor.toml", '[sign]\nkey = "file:signer.pem"\n[verify]\nfloor = "file:floor.json"\n'
    )
    crews.run(under, signing, save_sharded, root, [1], ranks=RANKS)
    shutil.copytree(root, tmp_path / "yesterday")
    crews.run(under, policy, save_sharded, root, [2], ranks=RANKS)
    shutil.rmtree(root)
    shutil.copytree(tmp_path / "yesterday", root)
    for told in crews.run(under, policy, jobs.restore_told, root, ranks=RANKS):
        assert told.error == "RollbackError", told
        assert "floor.json" in told.text
