"""The policy file: what it may say in this release, and that what it may not is never overlooked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from strongroom.config import Policy
from strongroom.errors import ConfigError
from strongroom_security import SecurityPolicy


def load(tmp_path: Path, text: str | bytes) -> SecurityPolicy:
    path = tmp_path / "strongroom.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return SecurityPolicy.load(path)


def test_a_policy_sets_the_digest(tmp_path: Path) -> None:
    assert load(tmp_path, 'digest = "sha256"').digest == "sha256"
    assert load(tmp_path, "# nothing to say\n").digest is None


def test_a_policy_is_what_the_core_asks_for() -> None:
    assert isinstance(SecurityPolicy(digest="sha256"), Policy)
    with pytest.raises(dataclasses.FrozenInstanceError):
        SecurityPolicy().digest = "sha256"  # type: ignore[misc]


@pytest.mark.parametrize("section", ("seal", "sign", "verify", "audit", "role"))
@pytest.mark.parametrize("body", ("", "key = 1\n"))
def test_protection_that_this_release_cannot_give_is_refused_and_never_ignored(
    section: str, body: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=section):
        load(tmp_path, f"[{section}]\n{body}")


@pytest.mark.parametrize(
    ("text", "told"),
    (
        ("digest = 'md5'", "blake3, sha256"),
        ("digest = 7", "must be text"),
        ("digets = 'sha256'", "unknown member 'digets'"),
        ("[other]\na = 1", "unknown member 'other'"),
        ("digest = ", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        (b"#" * (1 << 20) + b"##", "at most"),
    ),
    ids=lambda value: str(value)[:20],
)
def test_a_policy_that_is_wrong_says_where_and_why(text: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        load(tmp_path, text)
    assert told == "blake3, sha256" or "strongroom.toml" in str(caught.value)


def test_a_policy_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            SecurityPolicy.load(path)


def test_a_digest_that_there_is_not_is_refused_in_code_too() -> None:
    with pytest.raises(ConfigError, match="blake3, sha256"):
        SecurityPolicy(digest="md5")  # type: ignore[arg-type]
