"""Provenance by the real checkpointer: what a checkpoint says of itself, and what a resume does about it."""

from __future__ import annotations

import base64
import json
import logging
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strongroom import Change, ConfigError, OnChange, ProvenanceMismatchError, StateEncodingError
from strongroom.decoding import Decoder

LOG = "strongroom"


def state() -> dict[str, Any]:
    return {"model": torch.nn.Linear(2, 3), "extra": {"epoch": 4}}


def document(root: Path, step: int = 1) -> dict[str, Any]:
    (path,) = root.glob(f"step-{step:012d}-*/data/provenance.json")
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def given(root: Path, step: int = 1) -> Any:
    return Decoder().decode(document(root, step)["provenance"])


def collected(root: Path, step: int = 1) -> Any:
    return Decoder().decode(document(root, step)["collected"])


# ---------------------------------------------------------------------------------------- what is recorded


def test_what_the_run_and_the_save_say_come_together(root: Path, begin: Any) -> None:
    run_wide = {"hyper_parameters": {"lr": 0.1}, "data": {"version": "v1", "cursor": 0}, "epoch": 1}
    checkpointer = begin(root, provenance=run_wide)
    checkpointer.save(1, state(), provenance={"data": {"cursor": 7}, "epoch": 2}).result()
    assert given(root) == {
        "hyper_parameters": {"lr": 0.1},
        "data": {"version": "v1", "cursor": 7},
        "epoch": 2,
    }
    assert run_wide["data"] == {"version": "v1", "cursor": 0}


def test_what_is_known_late_is_asked_at_each_save(root: Path, begin: Any) -> None:
    cursor = iter((3, 5))
    checkpointer = begin(root, provenance=lambda: {"data": {"cursor": next(cursor)}})
    for step in (1, 2):
        checkpointer.save(step, state()).result()
    assert [given(root, step)["data"]["cursor"] for step in (1, 2)] == [3, 5]


def test_a_snapshot_is_taken_before_save_returns(root: Path, begin: Any) -> None:
    said = {"data": {"shards": [1]}}
    handle = begin(root).save(1, state(), provenance=said)
    said["data"]["shards"].append(2)
    handle.result()
    assert given(root) == {"data": {"shards": [1]}}


def test_what_can_be_gathered_is(root: Path, begin: Any) -> None:
    checkpointer = begin(root, retention_class="gold")
    checkpointer.save(1, state()).result()
    first = checkpointer.save(2, state()).result()
    found = collected(root, 2)
    assert {"code", "environment", "host"} <= set(found)
    assert found["environment"]["torch"] == str(torch.__version__)
    assert found["host"]["user"]
    assert found["architecture"].startswith("sha256:")
    assert (found["retention_class"], found["world_size"], found["epoch"]) == ("gold", 1, 4)
    assert found["parent"]["step"] == 1
    assert found["began_at_ms"] <= found["saved_at_ms"] <= first.committed_at_ms
    assert found["architecture"] == collected(root)["architecture"]


def test_gathering_can_be_turned_off(root: Path, begin: Any) -> None:
    checkpointer = begin(root, collect_provenance=False, provenance={"data": "v1"})
    checkpointer.save(1, state()).result()
    assert "collected" not in document(root)
    assert given(root) == {"data": "v1"}
    assert begin(root, collect_provenance=False).restore(state()).changes == ()


def test_gathering_draws_no_random_number_and_changes_no_variable(root: Path, begin: Any) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state(), dict(os.environ)
    begin(root).save(1, state_without_draws()).result()
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state(), dict(os.environ)
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
    assert before[3] == after[3]


def state_without_draws() -> dict[str, Any]:
    return {"w": torch.zeros(3)}


@pytest.mark.parametrize("wrong", (["a"], "text", 3))
def test_what_is_no_dict_is_refused(root: Path, begin: Any, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="provenance"):
        begin(root, provenance=wrong)
    with pytest.raises(ConfigError, match=r"provenance must be a dict"):
        begin(root).save(1, state(), provenance=wrong)
    with pytest.raises(ConfigError, match=r"provenance of the Checkpointer must be a dict"):
        begin(root, provenance=lambda: wrong).save(1, state())
    with pytest.raises(ConfigError, match="on_change"):
        begin(root, on_change={"data": "warn"})


def test_a_value_without_a_safe_encoding_is_named(root: Path, begin: Any) -> None:
    with pytest.raises(StateEncodingError, match=r"\['provenance'\]\['hyper_parameters'\]\['fn'\]"):
        begin(root, provenance={"hyper_parameters": {"fn": print}}).save(1, state())


# ------------------------------------------------------------------------------------------------ resuming


SAVED = {
    "data": {"version": "v1", "cursor": 7},
    "hyper_parameters": {"lr": 0.1, "warmup": 10},
    "model": {"layers": 2},
}


@pytest.fixture
def saved(root: Path, begin: Any) -> Path:
    for step in (1, 2):
        checkpointer = begin(root, provenance=SAVED)
        if step == 2:
            checkpointer.restore(state())
        checkpointer.save(step, state()).result()
        checkpointer.close()
    return root


def changes(restored: Any) -> list[tuple[str, str]]:
    return [(change.kind, change.name) for change in restored.changes]


def test_other_data_is_refused_before_anything_is_changed(saved: Path, begin: Any) -> None:
    template = state()
    before = template["model"].weight.clone()
    checkpointer = begin(saved, provenance={**SAVED, "data": {"version": "v2"}})
    with pytest.raises(ProvenanceMismatchError) as refused:
        checkpointer.restore(template)
    text = str(refused.value)
    assert text.startswith("step 2 (")  # The newest: no older one is tried.
    for part in (
        'data: version was "v1" and is "v2"',
        "accept_changes=True",
        "on_change=OnChange(data='warn')",
        "Nothing was changed",
    ):
        assert part in text
    assert refused.value.different == ('data: version was "v1" and is "v2"',)
    assert torch.equal(template["model"].weight, before)
    assert template["extra"] == {"epoch": 4}


def test_a_refused_change_can_be_accepted(saved: Path, begin: Any, caplog: pytest.LogCaptureFixture) -> None:
    other = {**SAVED, "data": {"version": "v2"}}
    expected = (Change(kind="data", name="version", was='"v1"', now='"v2"'),)
    with caplog.at_level(logging.WARNING, LOG):
        assert begin(saved, provenance=other).restore(state(), accept_changes=True).changes == expected
        assert len([one for one in caplog.records if "v2" in one.getMessage()]) == 1
        caplog.clear()
        assert (
            begin(saved, provenance=other, on_change=OnChange(data="warn")).restore(state()).changes
            == expected
        )
        assert len([one for one in caplog.records if "v2" in one.getMessage()]) == 1
        caplog.clear()
        assert (
            begin(saved, provenance=other, on_change=OnChange(data="allow")).restore(state()).changes
            == expected
        )
        assert not caplog.records


def test_other_hyper_parameters_are_one_warning_that_lists_each(
    saved: Path, begin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    other = {**SAVED, "hyper_parameters": {"lr": 0.2, "decay": 1}, "model": {"layers": 3}}
    with caplog.at_level(logging.WARNING, LOG):
        restored = begin(saved, provenance=other).restore(state())
    assert changes(restored) == [
        ("hyper_parameters", "decay"),
        ("hyper_parameters", "lr"),
        ("hyper_parameters", "warmup"),
        ("model", "layers"),
    ]
    (record,) = caplog.records
    for part in (
        "lr was 0.1 and is 0.2",
        "decay was absent and is 1",
        "warmup was 10",
        "layers was 2 and is 3",
    ):
        assert part in record.getMessage()


@pytest.mark.parametrize("kind", ("hyper_parameters", "model"))
def test_any_kind_can_be_refused(saved: Path, begin: Any, kind: str) -> None:
    other = {**SAVED, kind: {"layers": 9, "lr": 9}}
    checkpointer = begin(saved, provenance=other, on_change=OnChange(**{kind: "refuse"}))
    with pytest.raises(ProvenanceMismatchError, match=f"OnChange\\({kind}='warn'\\)"):
        checkpointer.restore(state())


def test_the_same_program_on_the_same_data_has_changed_nothing(
    saved: Path, begin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, LOG):
        assert begin(saved, provenance=SAVED).restore(state()).changes == ()
        assert begin(saved).restore(state()).changes == ()
    assert not caplog.records


def test_a_refusal_does_not_hide_behind_a_damaged_checkpoint(saved: Path, begin: Any) -> None:
    (shard,) = saved.glob("step-000000000002-*/data/00000-00.safetensors")
    shard.write_bytes(shard.read_bytes()[:-4] + b"\xff\xff\xff\xff")
    checkpointer = begin(saved, provenance={**SAVED, "data": {"version": "v2"}})
    with pytest.raises(ProvenanceMismatchError, match=r"step 2 .*v2"):
        checkpointer.restore(state())
    with pytest.raises(ProvenanceMismatchError, match=r"step 1 .*v2"):
        checkpointer.restore(state(), step=1)


def test_what_a_damaged_checkpoint_left_undefined_is_said_with_the_refusal(root: Path, begin: Any) -> None:
    large = {"w": torch.zeros(3 << 20)}  # Several blocks: some are read before the damaged one.
    begin(root, provenance=SAVED).save(1, large).result()
    newer = begin(root, provenance={"data": {"version": "v2"}})
    newer.restore(large, accept_changes=True)
    newer.save(2, large).result()
    (shard,) = root.glob("step-000000000002-*/data/00000-00.safetensors")
    shard.write_bytes(shard.read_bytes()[:-4] + b"\xff\xff\xff\xff")
    checkpointer = begin(root, provenance={"data": {"version": "v2"}})
    with pytest.raises(ProvenanceMismatchError, match=r"step 1 .*Undefined now.* w$"):
        checkpointer.restore(large)


def test_another_runs_checkpoint_is_not_compared(saved: Path, tmp_path: Path, begin: Any) -> None:
    fork = begin(tmp_path / "fork", init_from=saved, provenance={"data": {"version": "v2"}})
    restored = fork.restore(state())
    assert restored.init_from == saved.as_uri()
    assert restored.changes == ()


def test_damaged_provenance_is_damage(saved: Path, begin: Any) -> None:
    (path,) = saved.glob("step-000000000002-*/data/provenance.json")
    path.write_bytes(path.read_bytes().replace(b'"v1"', b'"v2"'))
    restored = begin(saved, provenance=SAVED).restore(state())
    assert restored.step == 1
    assert "provenance.json" in restored.skipped[0][1]


# ------------------------------------------------------------------------------------ in other processes


PROGRAM = textwrap.dedent(
    """
    import json, logging, sys
    import torch
    from strongroom import Checkpointer

    logging.basicConfig(format="%(message)s")
    root, *rest = sys.argv[1:]
    with Checkpointer(root, provenance={"hyper_parameters": json.loads(rest[0])}) as checkpointer:
        state = {"w": torch.ones(3)}
        restored = checkpointer.restore(state)
        print(json.dumps([[c.kind, c.name] for c in restored.changes] if restored else []))
        checkpointer.save(restored.step + 1 if restored else 1, state, provenance={"argv": sys.argv})
    """
)


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(
        ["git", "-c", "user.name=n", "-c", "user.email=e@x", *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"},
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with the program that trains."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    return folder


def train(project: Path, root: Path, *arguments: str, **environment: str) -> tuple[Any, str]:
    """Run the program; the changes that it was told of, and its log."""
    done = subprocess.run(
        [sys.executable, str(project / "train.py"), str(root), *(arguments or ("{}",))],
        capture_output=True,
        text=True,
        cwd=project.parent,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_changed_code_is_told_by_what_has_changed(project: Path, root: Path) -> None:
    assert train(project, root) == ([], "")
    assert train(project, root) == ([], "")
    (project / "model.py").write_text("layers = 2\n")
    told, log = train(project, root)
    assert told == [["code", "changes"]]
    assert log.count("differs from this one") == 1
    git(project, "add", ".")
    git(project, "commit", "--quiet", "-m", "second")
    told, _ = train(project, root)
    assert told == [["code", "changes"], ["code", "commit"]]
    (project / "train.py").write_text(PROGRAM + "# changed\n")
    told, log = train(project, root)
    assert told == [["code", "changes"], ["code", "entry.digest"]]
    assert "entry.digest was" in log


def test_a_changed_package_is_told(project: Path, root: Path, tmp_path: Path) -> None:
    train(project, root)
    installed = tmp_path / "more/odd_package-1.5.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-package\nVersion: 1.5\n")
    told, _ = train(project, root, PYTHONPATH=str(tmp_path / "more"))
    assert told == [["environment", "packages"]]


# None of these is anybody's; they only have the forms.
PLANTED = {
    "AWS_ACCESS_KEY_ID": "AKIA" + "Q7ZK2M5X3B4N6P2R",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/planted-example-key",
    "WANDB_API_KEY": "3f9d5a7b1c2e4d6f8a0b3c5d7e9f1a2b4c6d8e0f",
    "HF_TOKEN": "hf_" + "plantedPlantedPlantedPlanted012345",
    "GITHUB_TOKEN": "ghp_" + "plantedplantedplantedplantedplanted0",
    "DB_PASSWORD": "correct-horse-7-planted",
    "SLURM_JWT": "eyJhbGciOiJIUzI1NiJ9." + "eyJwbGFudGVkIjoxfQ.cGxhbnRlZC1zaWduYXR1cmU",
    "MY_OWN_SETTING": "planted-in-a-variable-that-nobody-lists",
    "KUBERNETES_SERVICE_HOST": "10.9.8.7",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "train-with-hf_" + "plantedInTheJobsName0123456789ab",
}
REMOTE = "https://somebody:planted-in-the-remote@git.example.com/team/project.git"
FLAG = "planted-as-an-argument"


def test_no_secret_from_anywhere_gets_into_a_checkpoint(project: Path, root: Path) -> None:
    git(project, "remote", "add", "origin", REMOTE)
    (project / ".env").write_text("API_KEY=planted-in-a-file\n")
    hyper_parameters = {
        "lr": 0.1,
        "api_key": "planted-in-hyper-parameters",
        "dataset": "s3://reader:planted-in-a-url@bucket/data",
        "note": f"log in with {PLANTED['WANDB_API_KEY']} please",
        "command": "serve --password=planted-in-a-command",
    }
    _, log = train(project, root, json.dumps(hyper_parameters), "--auth-token", FLAG, **PLANTED)
    assert "['hyper_parameters']['api_key']" in log
    found = document(root)
    assert collected(root)["code"]["repository"] == "https://git.example.com/team/project.git"
    assert collected(root)["job"]["slurm"]["SLURM_JOB_ID"] == "4711"
    assert given(root)["hyper_parameters"]["lr"] == 0.1
    assert found["tags"] == []
    secrets = {value for name, value in PLANTED.items() if name not in ("SLURM_JOB_ID", "SLURM_JOB_NAME")}
    secrets |= {PLANTED["SLURM_JOB_NAME"].removeprefix("train-with-"), FLAG, "planted"}
    for path in (path for path in root.rglob("*") if path.is_file()):
        data = path.read_bytes()
        for secret in secrets:
            raw = secret.encode()
            for form in (raw, base64.b64encode(raw).rstrip(b"=")[:-1], raw.hex().encode()):
                assert form not in data, (path.name, secret)
        for secret in secrets:
            assert secret not in log
