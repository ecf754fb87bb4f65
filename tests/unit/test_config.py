"""Options are checked once, when they are given, and say what would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strongroom.auditing import NO_AUDIT
from strongroom.config import (
    SYSTEM_CLOCK,
    Clock,
    RaiseAtOnce,
    Tolerate,
    check_count,
    check_digest,
    check_seconds,
    load_policy,
)
from strongroom.errors import ConfigError
from strongroom.signing import NO_GUARD


class Policy:
    digest = "sha256"
    sealing = None
    signing = None
    guard = NO_GUARD
    role = None
    auditor = NO_AUDIT


def test_a_given_policy_is_taken_as_it_is() -> None:
    policy = Policy()
    assert load_policy(policy, {}) is policy
    assert load_policy(policy, {"STRONGROOM_CONFIG": "/nowhere"}) is policy


def test_without_a_policy_and_without_the_variable_there_is_none() -> None:
    assert load_policy(None, {}) is None


@pytest.mark.parametrize("value", ("", " "))
def test_a_variable_that_is_set_and_empty_is_no_way_to_run_unprotected(value: str) -> None:
    with pytest.raises(ConfigError, match="STRONGROOM_CONFIG is set, and names no file; unset it"):
        load_policy(None, {"STRONGROOM_CONFIG": value})
    policy = Policy()
    assert load_policy(policy, {"STRONGROOM_CONFIG": value}) is policy


def test_the_variable_names_the_policy_of_a_bare_checkpointer(tmp_path: Path) -> None:
    path = tmp_path / "strongroom.toml"
    path.write_text('digest = "sha256"\n')
    found = load_policy(None, {"STRONGROOM_CONFIG": str(path)})
    assert found is not None
    assert found.digest == "sha256"


@pytest.mark.parametrize("as_path", (True, False))
def test_a_policy_file_may_be_given_by_its_path(as_path: bool, tmp_path: Path) -> None:
    path = tmp_path / "strongroom.toml"
    path.write_text('digest = "blake3"\n')
    found = load_policy(path if as_path else str(path), {})
    assert found is not None
    assert found.digest == "blake3"


def test_a_policy_that_is_asked_for_and_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.toml")
    for source, environment in ((missing, {}), (None, {"STRONGROOM_CONFIG": missing})):
        with pytest.raises(ConfigError, match=r"missing\.toml cannot be read"):
            load_policy(source, environment)


def test_a_policy_without_the_security_package_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "strongroom_security", None)
    with pytest.raises(ConfigError, match="needs the package strongroom_security"):
        load_policy(str(tmp_path / "strongroom.toml"), {})
    assert load_policy(None, {}) is None


@pytest.mark.parametrize("source", (7, object(), ["strongroom.toml"]))
def test_what_is_neither_policy_nor_path_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="SecurityPolicy or the path"):
        load_policy(source, {})


def test_a_policys_digest_is_the_checkpointers_unless_one_is_given(tmp_path: Path) -> None:
    import torch

    from strongroom import Checkpointer

    path = tmp_path / "strongroom.toml"
    path.write_text('digest = "sha256"\n')
    for options, digest in (({}, "sha256"), ({"digest": "blake3"}, "blake3")):
        root = tmp_path / digest
        with Checkpointer(root, security=path, **options) as checkpointer:
            checkpointer.save(1, {"t": torch.ones(1)})
        (manifest,) = root.glob("step-*/data/MANIFEST.json")
        assert f'"digest":"{digest}"' in manifest.read_text()


@pytest.mark.parametrize("count", (0, -1, 1.5, "3", None, True))
def test_tolerance_is_a_whole_number_of_at_least_one(count: Any) -> None:
    with pytest.raises(ConfigError, match=r"Tolerate\.consecutive"):
        Tolerate(consecutive=count)
    assert Tolerate(consecutive=1) == Tolerate(consecutive=1)
    assert RaiseAtOnce() == RaiseAtOnce()


def test_digests_by_name() -> None:
    assert check_digest("blake3") == "blake3"
    assert check_digest("sha256") == "sha256"
    with pytest.raises(ConfigError, match="one of blake3, sha256, got 'md5'"):
        check_digest("md5")


@pytest.mark.parametrize("value", (0, -1, float("inf"), float("nan"), "1", None, True))
def test_seconds_are_a_positive_number(value: Any) -> None:
    with pytest.raises(ConfigError, match="timeout_s must be a positive number of seconds"):
        check_seconds("timeout_s", value)


def test_seconds_may_be_bounded() -> None:
    assert check_seconds("timeout_s", 5, at_most=5) == 5.0
    with pytest.raises(ConfigError, match="of at most 5"):
        check_seconds("timeout_s", 5.5, at_most=5)


@pytest.mark.parametrize("value", (-1, 1.0, "1", None, True))
def test_counts_are_whole_numbers(value: Any) -> None:
    with pytest.raises(ConfigError, match="whole number of 0 or more"):
        check_count("max_fallback", value)
    assert check_count("max_fallback", 0) == 0


def test_a_clock_before_1970_reads_as_1970() -> None:
    assert Clock(now_ns=lambda: -(10**18), monotonic=lambda: 0.0).now_ms() == 0
    assert Clock(now_ns=lambda: 1_500_000, monotonic=lambda: 0.0).now_ms() == 1
    assert SYSTEM_CLOCK.now_ms() > 1_600_000_000_000
