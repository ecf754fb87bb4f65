"""What a Lightning run tells the audit log: what it resumes from and what it saves, well ended or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strongroom import AuditError, ConfigError, StateEncodingError
from strongroom.auditing import Action, Outcome, Phase
from strongroom.loading import load
from strongroom.testing.auditing import RecordingAuditor
from strongroom_lightning.attributes import Attributes
from strongroom_lightning.checkpointing import Checkpointing
from strongroom_security import SecurityPolicy

ENTRY_POINTS = {
    "setup": "opens the run; nothing is read before Lightning asks where to resume",
    "teardown": "closes it: the last save tells its own end",
    "on_exception": "likewise, and may save once more: a save like any other",
    "on_save_checkpoint": "adds the ranking to what is saved",
    "on_load_checkpoint": "takes it up from what was restored",
    "format_checkpoint_name": "fills a pattern",
    "to_yaml": "writes down what the ranking knows",
}
"""Lightning's ways into the callback. Resuming and saving happen at the places that `setup` replaces."""


@pytest.fixture
def auditor() -> RecordingAuditor:
    return RecordingAuditor()


@pytest.fixture
def options(auditor: RecordingAuditor) -> dict[str, Any]:
    return {"every_n_train_steps": 4, "security": SecurityPolicy(auditor=auditor), "run_id": "r"}


def test_every_entry_point_is_known() -> None:
    ways = {
        name
        for kind in (Checkpointing, Attributes)
        for name, value in vars(kind).items()
        if callable(value) and not name.startswith("_")
    }
    assert ways == ENTRY_POINTS.keys()


def test_saves_and_the_restore_of_a_run_are_on_record(
    fit: Any, root: Path, auditor: RecordingAuditor, options: dict[str, Any]
) -> None:
    fit(root, until=9, checkpoint=options)
    assert [(act.phase, act.outcome) for act in auditor.of(Action.RESTORE)] == [
        (Phase.FINISHED, Outcome.SUCCESS)
    ]
    saved = auditor.of(Action.SAVE, Phase.FINISHED, Outcome.SUCCESS)
    assert [act.checkpoint.step for act in saved if act.checkpoint] == [4, 8]
    assert {act.run for act in saved} == {"r"}
    assert len(auditor.secured) >= 2
    auditor.acts.clear()
    fit(root, until=10, checkpoint=options)
    intended, done = auditor.of(Action.RESTORE)
    assert (intended.phase, done.outcome) == (Phase.INTENDED, Outcome.SUCCESS)
    assert intended.checkpoint is not None
    assert (intended.checkpoint.step, intended.run) == (8, "r")


def test_a_named_checkpoint_is_on_record(
    fit: Any, root: Path, auditor: RecordingAuditor, options: dict[str, Any]
) -> None:
    fit(root, until=9, checkpoint=options)
    auditor.acts.clear()
    fit(root, until=10, checkpoint=options, ckpt_path=f"strongroom://{root}#step=4")
    (intended,) = auditor.of(Action.RESTORE, Phase.INTENDED)
    assert intended.checkpoint is not None
    assert intended.checkpoint.step == 4


def test_a_run_that_cannot_be_put_on_record_does_not_resume(
    fit: Any, root: Path, auditor: RecordingAuditor, options: dict[str, Any]
) -> None:
    fit(root, until=9, checkpoint=options)
    auditor.refuses = True
    auditor.acts.clear()
    with pytest.raises(AuditError):
        fit(root, until=10, checkpoint=options)
    assert [(act.action, act.outcome) for act in auditor.acts] == [(Action.RESTORE, Outcome.DENIED)]


def test_a_save_by_hand_is_on_record(
    fit: Any, root: Path, auditor: RecordingAuditor, options: dict[str, Any], tmp_path: Path
) -> None:
    trainer = fit(root, checkpoint={**options, "every_n_train_steps": 100}).trainer
    auditor.acts.clear()
    trainer.save_checkpoint(tmp_path / "apart.ckpt")
    (saved,) = auditor.of(Action.SAVE, Phase.FINISHED, Outcome.SUCCESS)
    assert saved.checkpoint is not None
    assert saved.checkpoint.step == trainer.global_step
    assert "apart.ckpt" in saved.root


def test_weights_that_are_handed_over_are_on_record_as_an_export_first(
    fit: Any, root: Path, auditor: RecordingAuditor, options: dict[str, Any], tmp_path: Path
) -> None:
    trainer = fit(root, checkpoint={**options, "every_n_train_steps": 100}).trainer
    auditor.acts.clear()
    trainer.save_checkpoint(tmp_path / "x.safetensors", weights_only=True)
    intended, done = auditor.acts
    assert (intended.action, intended.phase, intended.run) == (Action.EXPORT, Phase.INTENDED, "r")
    assert (done.phase, done.outcome, done.root) == (Phase.FINISHED, Outcome.SUCCESS, root.as_uri())
    assert done.details["step"] == trainer.global_step
    assert done.details["tensors"] == len(trainer.lightning_module.state_dict())
    auditor.refuses = True
    with pytest.raises(AuditError):
        trainer.save_checkpoint(tmp_path / "y.safetensors", weights_only=True)
    assert not (tmp_path / "y.safetensors").exists()
    assert auditor.acts[-1].outcome is Outcome.DENIED


def test_weights_that_cannot_be_written_are_on_record_as_a_failure(
    fit: Any, root: Path, auditor: RecordingAuditor, options: dict[str, Any], tmp_path: Path
) -> None:
    trainer = fit(root, checkpoint={**options, "every_n_train_steps": 100}).trainer
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(ConfigError, match="cannot be a safetensors file"):
        trainer.save_checkpoint(tmp_path / "folder.safetensors", weights_only=True)
    assert auditor.of(Action.EXPORT)[-1].outcome is Outcome.FAILURE


def test_a_checkpoint_that_is_loaded_without_a_run_is_on_record_first(
    fit: Any, root: Path, auditor: RecordingAuditor, options: dict[str, Any]
) -> None:
    fit(root, until=9, checkpoint=options)
    auditor.acts.clear()
    assert load(root, security=options["security"]).step == 8
    assert [(act.phase, act.outcome) for act in auditor.of(Action.RESTORE)] == [
        (Phase.INTENDED, Outcome.UNKNOWN),
        (Phase.FINISHED, Outcome.SUCCESS),
    ]
    auditor.refuses = True
    with pytest.raises(AuditError):
        load(root, security=options["security"])


def test_a_save_that_fails_is_on_record(
    fit: Any, root: Path, auditor: RecordingAuditor, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from strongroom_lightning import contents

    gather = contents.gather

    def with_what_cannot_be_saved(*args: Any, **options: Any) -> Any:
        state, loaders = gather(*args, **options)
        return {**state, "bad": object()}, loaders

    monkeypatch.setattr(contents, "gather", with_what_cannot_be_saved)
    with pytest.raises(StateEncodingError):
        fit(root, checkpoint=options)
    (failed,) = auditor.of(Action.SAVE, Phase.FINISHED)
    assert (failed.outcome, failed.details["error"]) == (Outcome.FAILURE, "StateEncodingError")
