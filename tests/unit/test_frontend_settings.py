"""What a user may set in every front end: each value checked once, before anything of a run exists."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from strongroom.config import RaiseAtOnce, Tolerate
from strongroom.errors import ConfigError
from strongroom.frontend import DEFAULTS, RunOptions, RunSettings, check_flags, check_interval, provenance_of


def read(root: Any = "runs/a", **given: Any) -> RunSettings:
    return RunSettings.read(root, given)


def test_every_option_has_a_default_and_every_default_is_an_option() -> None:
    assert set(DEFAULTS) == set(get_type_hints(RunOptions))


def test_with_nothing_said_everything_is_as_the_defaults_say() -> None:
    settings = read()
    assert settings.resume == "auto"
    assert settings.keep is None
    assert settings.escapes == "seal"
    assert settings.preemption_signals == (signal.SIGTERM, signal.SIGUSR1)
    assert settings.options["on_failure"] == RaiseAtOnce()
    assert settings.options["security"] is None


def test_an_unknown_option_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match="there is no option 'securty'; did you mean 'security'"):
        read(securty="policy.toml")
    with pytest.raises(
        ConfigError, match=r"there is no option 'zzz'; there are .*accept_older, .*unencodable"
    ):
        read(zzz=1)
    with pytest.raises(ConfigError, match="did you mean 'save_interval'"):
        RunSettings.read("runs/a", {"save_intervall": 3}, known=["save_interval"])


@pytest.mark.parametrize(
    ("option", "value", "words"),
    (
        ("resume", "maybe", "resume"),
        ("skip", "guess", "skip must be one of 'read', 'sampler'"),
        ("keep", 0, "keep must be how many of the newest stay"),
        ("keep", True, "keep must be how many of the newest stay"),
        ("escapes", "hide", "escapes must be one of 'seal', 'refuse', 'warn' or None; got|got 'hide'"),
        ("unencodable", "drop", "unencodable must be one of 'warn', 'refuse'"),
        ("provenance", 3, "provenance must be a mapping"),
        ("preemption_signals", ["SIGKILL"], "SIGTERM"),
        ("spot_notice", "http://169.254.169.254", "spot_notice must be a function"),
        ("spot_notice_every_s", 0, "spot_notice_every_s"),
        ("timeout_s", -1, "timeout_s"),
        ("tolerate_failures", -1, "tolerate_failures"),
        ("requeue", "no", "requeue must be True or False; got 'no'"),
        ("accept_older", 1, "accept_older must be True or False"),
        ("log_saves", None, "log_saves must be True or False"),
        ("accept_missing_tiers", "yes", "accept_missing_tiers must be True or False"),
    ),
)
def test_a_value_that_cannot_work_is_an_error_that_names_it(option: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(**{option: value})


@pytest.mark.parametrize("root", (None, 3, b"runs/a"))
def test_a_root_is_a_path_or_a_uri_and_has_no_default(root: Any) -> None:
    with pytest.raises(ConfigError, match=r"dirpath must be the run's root.*no default"):
        RunSettings.read(root, {}, root_name="dirpath")


def test_a_path_is_meant_here_and_now_and_a_uri_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert read("runs/a").root == str(tmp_path / "runs/a")
    assert read("~/a").root == str(tmp_path / "home/a")
    assert read("s3://bucket/~/a").root == "s3://bucket/~/a"
    assert read(Path("runs/a")).is_own(str(tmp_path / "runs/../runs/a"))
    os.symlink("runs", tmp_path / "link")
    assert read("runs/a").is_own(str(tmp_path / "link/a"))
    assert not read("runs/a").is_own(str(tmp_path / "runs/b"))


def test_what_is_said_of_the_runs_own_root_is_not_said_of_another() -> None:
    settings = read(run_id="r1", launch=3, replicate_to=["/far"], digest="sha256", tolerate_failures=2)
    own, other = settings.options_for(settings.root), settings.options_for("/elsewhere")
    assert (own["run_id"], own["launch"], own["replicate_to"]) == ("r1", 3, ["/far"])
    assert own["on_failure"] == Tolerate(consecutive=2)
    assert other["digest"] == "sha256"
    assert not {"run_id", "launch", "replicate_to", "accept_missing_tiers", "reserve_bytes"} & set(other)


def test_a_policys_file_is_named_once() -> None:
    with pytest.raises(ConfigError, match="give it or security="):
        read(config="policy.toml", security="policy.toml")


def test_a_platforms_file_places_the_run_below_its_root(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(
        f'[storage]\nroot = "{tmp_path}/fast"\nreplicate_to = ["{tmp_path}/far"]\n'
    )
    settings = read("team/a", config=tmp_path / "policy.toml")
    assert settings.root == str(tmp_path / "fast/team/a")
    assert [str(one) for one in settings.options["replicate_to"]] == [str(tmp_path / "far/team/a")]


def test_no_signals_at_all_can_be_asked_for() -> None:
    assert read(preemption_signals=()).preemption_signals == ()
    assert read(preemption_signals=["SIGUSR2"]).preemption_signals == (signal.SIGUSR2,)


def test_flags_and_intervals_are_checked_by_name() -> None:
    check_flags(one=True, other=False)
    with pytest.raises(ConfigError, match="other must be True or False; got 'no'"):
        check_flags(one=True, other="no")
    assert [check_interval("n", one) for one in (None, 0, 5)] == [None, 0, 5]
    for wrong in (-1, True, 2.0, "3", timedelta(1)):
        with pytest.raises(ConfigError, match="n must be a whole number"):
            check_interval("n", wrong)


def test_what_the_user_says_of_the_run_counts_more_than_what_the_framework_knows() -> None:
    known = {"trainer": "ours", "data": "unknown"}
    assert provenance_of(read(provenance={"data": "v3"}), known) == {"trainer": "ours", "data": "v3"}
    assert provenance_of(read(provenance=lambda: {"data": "v4"}), known)["data"] == "v4"
    assert provenance_of(read(), known) == known
    with pytest.raises(ConfigError, match="must return a mapping; it returned 'v3'"):
        provenance_of(read(provenance=lambda: "v3"), known)
