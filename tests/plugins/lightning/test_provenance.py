"""Where a Lightning run's checkpoints come from, and what a policy makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from strongroom import ConfigError, OnChange, ProvenanceMismatchError, RollbackError
from strongroom.catalog import Catalog
from strongroom.opened import open_checkpoint
from strongroom.signing import NO_GUARD
from strongroom.stores.local import LocalStore
from strongroom.verify import verify
from strongroom_security import SecurityPolicy
from strongroom_security.recipients.file import create_key_file
from strongroom_security.signers.generating import generate_key


def provenance_of(root: Path) -> dict[str, Any]:
    store = LocalStore(root)
    history = Catalog(store).history()
    return open_checkpoint(store, history.whole(history.newest()), NO_GUARD).provenance


def test_hyper_parameters_and_what_is_given_are_recorded(fit: Any, net: Any, root: Path) -> None:
    fit(
        root,
        module=lambda: net(width=12),
        checkpoint={"provenance": {"data": {"version": "2026-11"}}, "retention_class": "weekly"},
    )
    told = json.dumps(provenance_of(root))
    assert "width" in told
    assert "2026-11" in told
    manifest = json.loads(next(root.glob("step-*/data/MANIFEST.json")).read_bytes())
    assert manifest["retention_class"] == "weekly"


def test_other_data_is_refused_on_resume_and_other_hyper_parameters_are_told(
    fit: Any, net: Any, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"scheduler": None, "width": 8}
    fit(
        root,
        until=5,
        module=lambda: net(**options, options={"dropped": 1}),
        checkpoint={"every_n_train_steps": 1, "provenance": {"data": {"version": "one"}}},
    )
    with pytest.raises(ProvenanceMismatchError, match=r"data.*one.*two"):
        fit(root, checkpoint={"provenance": {"data": {"version": "two"}}})
    fit(
        root,
        module=lambda: net(**options, options={"dropped": 2}),
        checkpoint={"provenance": {"data": {"version": "two"}}, "on_change": OnChange(data="warn")},
    )
    told = " ".join(record.message for record in caplog.records)
    assert "hyper_parameters" in told
    assert "dropped" in told


def test_hyper_parameters_that_look_like_secrets_are_warned_of(fit: Any, net: Any, root: Path) -> None:
    with pytest.warns(UserWarning, match=r"hyper_parameters.*api_key.*look like secrets"):
        fit(root, max_epochs=1, module=lambda: net(options={"api_key": "A9f3-77aZ-q01x"}))
    assert "A9f3-77aZ-q01x" not in json.dumps(provenance_of(root))


def test_a_resume_below_the_floor_takes_a_word(fit: Any, root: Path, tmp_path: Path) -> None:
    generate_key(tmp_path / "signer.pem")
    policy = tmp_path / "strongroom.toml"
    policy.write_text('[sign]\nkey = "file:signer.pem"\n[verify]\nfloor = "file:floor.json"\n')
    options = {"every_n_train_steps": 1, "security": policy, "run_id": "mine"}
    fit(root, until=3, checkpoint=options)
    shutil.copytree(root, tmp_path / "yesterday")
    fit(root, until=6, checkpoint=options)
    shutil.rmtree(root)
    with pytest.raises(RollbackError, match="were taken away"):
        fit(root, checkpoint=options)
    shutil.copytree(tmp_path / "yesterday", root)
    with pytest.raises(RollbackError, match="goes back"):
        fit(root, checkpoint=options)
    fit(root, checkpoint={**options, "accept_older": True})
    with pytest.raises(ConfigError, match="holds run mine"):
        fit(root, checkpoint={**options, "run_id": "theirs"})


def test_one_argument_seals_and_signs(fit: Any, root: Path, tmp_path: Path, uninterrupted: Any) -> None:
    create_key_file(tmp_path / "kek.key")
    generate_key(tmp_path / "signer.pem")
    policy = tmp_path / "strongroom.toml"
    policy.write_text('[seal]\nrecipients = ["file:kek.key"]\n[sign]\nkey = "file:signer.pem"\n')
    options = {"every_n_train_steps": 1, "security": policy}
    fit(root, until=9, checkpoint=options)
    fit(root, checkpoint=options).ends_like(uninterrupted())
    report = verify(LocalStore(root), everything=True, guard=SecurityPolicy.load(policy).guard)
    assert report.verdict == "whole", report.problems
    assert all(len(checkpoint.signers) == 1 for checkpoint in report.checkpoints)
