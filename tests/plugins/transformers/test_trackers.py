"""Trackers that upload a model by themselves, which nobody else would notice."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_timing import steps
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from strongroom.errors import ConfigError
from strongroom_security.recipients.file import create_key_file
from strongroom_transformers import SealedFolders
from strongroom_transformers.trackers import _UPLOADING

Build = Callable[..., Any]


def tracker(name: str, value: Any, *, from_beginning: bool = False) -> TrainerCallback:
    """One as transformers has it, as far as it matters; theirs need packages and accounts."""

    class Tracker(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            setattr(self, _UPLOADING[name].attribute, value)

    one = type(name, (Tracker,), {})()
    if from_beginning:
        setattr(one, _UPLOADING[name].attribute, value)
    return one


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    create_key_file(tmp_path / "kek.key")
    file = tmp_path / "strongroom.toml"
    file.write_text('[seal]\nrecipients = ["file:kek.key"]\n')
    return file


@pytest.mark.parametrize("name", _UPLOADING)
def test_theirs_are_of_these_names(name: str) -> None:
    assert f"self.{_UPLOADING[name].attribute}" in inspect.getsource(getattr(integration_utils, name))


@pytest.mark.parametrize(
    ("name", "value"),
    (
        ("ClearMLCallback", True),
        ("DVCLiveCallback", "all"),
        ("FlyteCallback", True),
        ("MLflowCallback", True),
        ("NeptuneCallback", "last"),
        ("WandbCallback", integration_utils.WandbLogModel.CHECKPOINT),
    ),
)
def test_folders_that_are_not_written_cannot_be_uploaded(
    build: Build, root: Path, name: str, value: Any
) -> None:
    outcome = build(callbacks=[tracker(name, value)])
    with pytest.raises(ConfigError, match=f"{name} uploads the folders"):
        outcome.trainer.train()
    assert steps(root) == []


@pytest.mark.parametrize(
    ("name", "value"), (("DVCLiveCallback", True), ("WandbCallback", integration_utils.WandbLogModel.END))
)
def test_a_sealed_model_is_not_uploaded_in_the_clear(
    build: Build, policy: Path, name: str, value: Any, said: Callable[[], str]
) -> None:
    trackers = [tracker(name, value, from_beginning=True)]
    sealed = build(callbacks=trackers, options={"config": policy})
    with pytest.raises(ConfigError, match=f"{name} uploads the model in the clear"):
        sealed.trainer.train()
    assert sealed.losses == []
    build(callbacks=trackers, options={"config": policy, "escapes": "warn"}, max_steps=1).trainer.train()
    assert said().count("escapes='warn' lets it") == 1


def test_who_seals_nothing_may_upload_what_there_is(build: Build, tmp_path: Path, policy: Path) -> None:
    for value in (integration_utils.WandbLogModel.END, integration_utils.WandbLogModel.FALSE):
        build(callbacks=[tracker("WandbCallback", value)], max_steps=1).trainer.train()
    folders = build(root=None, callbacks=[tracker("FlyteCallback", True)], max_steps=1)
    SealedFolders(tmp_path / "folders").attach(folders.trainer)
    folders.trainer.train()
    sealed = build(root=None, callbacks=[tracker("FlyteCallback", True)], max_steps=1)
    SealedFolders(tmp_path / "sealed", config=policy).attach(sealed.trainer)
    with pytest.raises(ConfigError, match="in the clear"):
        sealed.trainer.train()
