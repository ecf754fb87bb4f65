"""What a front end says, and to whom: figures of saves, values that are lost, sentences, replaced methods."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from strongroom.errors import ConfigError, StateEncodingError
from strongroom.events import CheckpointCommitted, CheckpointReplicated, SaveFailed, SaveSkipped, SaveStarted
from strongroom.frontend import (
    Encoding,
    Figures,
    LoggedVoice,
    Replacements,
    check_escapes,
    policy_seals,
    replace_for_good,
)
from strongroom_security.recipients.file import create_key_file


@dataclass
class Heard:
    """A voice that remembers."""

    said: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)

    def info(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.warned.append(text)


class Opaque:
    """Nothing can be stored of it."""

    def __init__(self) -> None:
        self.handle = open


# ------------------------------------------------------------------------------------------------ figures

OF_A_SAVE: dict[str, Any] = {"run": "r", "step": 5, "launch": 1, "attempt": "a"}
STARTED = SaveStarted(**OF_A_SAVE, size_bytes=9, wait_s=0.25, stage_s=0.5)
COMMITTED = CheckpointCommitted(**OF_A_SAVE, size_bytes=9, background_s=2.0, manifest_digest="d")
COPIED = CheckpointReplicated(
    **OF_A_SAVE, tier="t", size_bytes=9, sent_bytes=9, seconds=1.0, lag_s=3.0, pending=0
)
FAILED = SaveFailed(**OF_A_SAVE, reason="full", error="SaveError", failures=2)


def test_figures_wait_until_they_are_handed_on_in_order() -> None:
    figures, taken = Figures(), list[Mapping[str, float]]()
    assert not figures.are_new
    for event in (STARTED, COMMITTED, SaveSkipped(run="r", step=6, reason="busy"), COPIED, FAILED):
        figures.emit(event)
    assert figures.are_new
    figures.hand_to([("log", taken.append)], pytest.fail)
    assert not figures.are_new
    assert taken == [
        {"strongroom/step": 5, "strongroom/stall_s": 0.75},
        {"strongroom/step": 5, "strongroom/background_s": 2.0, "strongroom/bytes": 9},
        {"strongroom/step": 5, "strongroom/lag_s": 3.0},
        {"strongroom/step": 5, "strongroom/failures": 2},
    ]


def test_a_logger_that_fails_is_given_no_more_and_ends_nothing() -> None:
    figures, taken, complaints = Figures(), list[Mapping[str, float]](), list[str]()

    def broken(_: Mapping[str, float]) -> None:
        raise OSError("the tracking server is gone")

    for _ in range(2):
        figures.emit(STARTED)
        figures.emit(COMMITTED)
        figures.hand_to([("broken", broken), ("log", taken.append)], complaints.append)
    assert len(taken) == 4
    assert len(complaints) == 1
    assert "broken" in complaints[0]
    assert "the tracking server is gone" in complaints[0]


def test_a_run_that_never_comes_to_a_step_does_not_hoard_figures() -> None:
    figures, taken = Figures(), list[Mapping[str, float]]()
    for _ in range(3000):
        figures.emit(STARTED)
    figures.hand_to([("log", taken.append)], pytest.fail)
    assert len(taken) == 1000


# ------------------------------------------------------------------------------------------------ encoding


def test_what_cannot_be_stored_is_named_once_and_the_rest_is_stored() -> None:
    voice = Heard()
    encoding = Encoding("warn", voice, advice="Keep it in your program.")
    value = {"step": 3, "hook": Opaque(), "nested": [1, Opaque()]}
    found = encoding.of(value, ("callbacks",))
    assert found["step"] == 3
    assert found["nested"][0] == 1
    assert len(voice.warned) == 1
    assert "callbacks" in voice.warned[0]
    assert "hook" in voice.warned[0]
    assert "nested" in voice.warned[0]
    assert "Keep it in your program" in voice.warned[0]
    encoding.of(value, ("callbacks",))
    assert len(voice.warned) == 1
    encoding.of({"other": Opaque()}, ("callbacks",))
    assert len(voice.warned) == 2
    assert "other" in voice.warned[1]


def test_where_that_is_refused_it_is_an_error_that_names_all() -> None:
    voice = Heard()
    with pytest.raises(StateEncodingError, match=r"unencodable='refuse'.*first.*second"):
        Encoding("refuse", voice).of({"first": Opaque(), "second": Opaque()}, ("state",))
    assert voice.warned == []


def test_very_many_are_counted() -> None:
    voice = Heard()
    Encoding("warn", voice).of([Opaque() for _ in range(25)], ("state",))
    assert "and 5 more" in voice.warned[0]


# ------------------------------------------------------------------------------------------- voice, escapes


def test_only_the_first_rank_speaks_and_percent_signs_are_no_format(
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_first = False
    voice = LoggedVoice(logger=logging.getLogger("front"), is_first=lambda: is_first)
    with caplog.at_level(logging.INFO, logger="front"):
        voice.info("silent")
        is_first = True
        voice.info("100 %s of it")
        voice.warn("look %d")
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("INFO", "Strongroom: 100 %s of it"),
        ("WARNING", "Strongroom: look %d"),
    ]


def test_escapes_are_sealed_where_nothing_is_said() -> None:
    assert [check_escapes(one) for one in (None, "seal", "refuse", "warn")] == [
        "seal",
        "seal",
        "refuse",
        "warn",
    ]
    with pytest.raises(ConfigError, match="got 'ignore'"):
        check_escapes("ignore")


def test_a_run_is_sealed_where_its_policy_says_so(tmp_path: Path) -> None:
    assert not policy_seals(None)
    create_key_file(tmp_path / "kek.key")
    (tmp_path / "policy.toml").write_text('[seal]\nrecipients = ["file:kek.key"]\n')
    assert policy_seals(tmp_path / "policy.toml")


# ------------------------------------------------------------------------------------------- replacements


class Trainer:
    def train(self) -> str:
        return "theirs"


def test_methods_are_replaced_on_one_instance_and_put_back_in_any_order_of_owners() -> None:
    trainer, other = Trainer(), Trainer()
    trainer.train = lambda: "user's"  # type: ignore[method-assign]  # as users do
    replaced = Replacements()
    for owner in (trainer, other):
        replaced.replace(owner, "train", lambda theirs: lambda: f"ours of {theirs()}")
    replaced.replace(trainer, "train", lambda theirs: lambda: f"again {theirs()}")
    assert trainer.train() == "again ours of user's"
    assert other.train() == "ours of theirs"
    assert Trainer().train() == "theirs"
    replaced.undo()
    replaced.undo()
    assert trainer.train() == "user's"
    assert other.train() == "theirs"
    assert "train" not in vars(other)


def test_a_method_can_be_replaced_for_good() -> None:
    trainer = Trainer()
    replace_for_good(trainer, "train", lambda theirs: lambda: f"ours of {theirs()}")
    assert trainer.train() == "ours of theirs"
