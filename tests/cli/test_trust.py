"""``strongroom trust``: a list of keys is begun, changed, signed and shown, and a policy goes by it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from strongroom import Checkpointer, UntrustedError
from strongroom_security import SecurityPolicy
from strongroom_security.publickeys import PublicKey

Strongroom = Callable[..., Any]

ROOT = ("--root-key", "file:root.pem")


def make_key(name: str) -> str:
    """A key pair's files; the key's id."""
    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path = Path(f"{name}.pem")
    path.write_bytes(private)
    path.chmod(0o600)
    public = PublicKey.of(key.public_key())
    Path(f"{name}.pub").write_bytes(public.pem)
    return public.id


@pytest.fixture
def ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Key pairs in the current folder, and their ids."""
    monkeypatch.chdir(tmp_path)
    return {name: make_key(name) for name in ("root", "second", "trainer", "validator")}


@pytest.fixture
def listed(ids: dict[str, str], strongroom: Strongroom) -> dict[str, str]:
    """A list, ``trust.json``, of version 2, which names the trainer."""
    assert strongroom("trust", "init", "trust.json", *ROOT).status == 0
    done = strongroom("trust", "add-key", "trust.json", "--public", "trainer.pub", "--name", "trainer", *ROOT)
    assert (done.status, done.err) == (0, "")
    return ids


def shown(strongroom: Strongroom, *more: str) -> Any:
    return strongroom("trust", "show", "trust.json", "--json", "--root", "root.pub", *more).json


def test_a_list_is_begun_and_each_change_is_the_next_version(
    listed: dict[str, str], strongroom: Strongroom
) -> None:
    done = strongroom(
        "trust", "add-key", "trust.json", "--public", "file:validator.pub", "--name", "validator",
        "--not-before", "2026-01-01", "--not-after", "2027-01-01T12:00:00Z", *ROOT, "--json",
    )  # fmt: skip
    assert (done.status, done.err) == (0, "")
    said = shown(strongroom)
    assert said["version"] == done.json["version"] == 3
    assert said["digest"] == done.json["digest"]
    assert said["verified"] is True
    assert said["signatures"] == [listed["root"]]
    by_name = {each["name"]: each for each in said["keys"]}
    assert by_name["trainer"] == {
        "id": listed["trainer"], "name": "trainer", "not_after_ms": None, "not_before_ms": None,
    }  # fmt: skip
    assert by_name["validator"]["id"] == listed["validator"]
    assert by_name["validator"]["not_before_ms"] == 1_767_225_600_000
    assert by_name["validator"]["not_after_ms"] == 1_798_804_800_000
    assert not list(Path().glob(".*tmp"))


def test_a_list_is_shown_for_people(listed: dict[str, str], strongroom: Strongroom) -> None:
    assert (
        strongroom("trust", "revoke", "trust.json", listed["trainer"], "--reason", "stolen", *ROOT).status
        == 0
    )
    done = strongroom("trust", "show", "trust.json", "--root", "root.pub")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("verified trust.json, version 3")
    assert "never expires" in done.out
    assert f"signature by {listed['root']}" in done.out
    (row,) = [each.split() for each in done.out.splitlines() if each.startswith(listed["trainer"])]
    assert row == [listed["trainer"], "trainer", "-", "-", "REVOKED"]
    assert f"revoked {listed['trainer']}" in done.out
    assert ": stolen" in done.out


def test_what_nobody_was_asked_to_verify_is_told_so(listed: dict[str, str], strongroom: Strongroom) -> None:
    assert strongroom("trust", "show", "trust.json").out.startswith("NOT VERIFIED")
    assert strongroom("trust", "show", "trust.json", "--json").json["verified"] is False


def test_a_list_by_another_root_is_refused(listed: dict[str, str], strongroom: Strongroom) -> None:
    before = Path("trust.json").read_bytes()
    done = strongroom("trust", "show", "trust.json", "--root", "second.pub")
    assert (done.status, done.out) == (1, "")
    assert "root keys' signatures" in done.err
    for verb in (("renew",), ("revoke", listed["trainer"], "--reason", "r")):
        done = strongroom("trust", verb[0], "trust.json", *verb[1:], "--root-key", "file:second.pem")
        assert (done.status, done.out) == (1, "")
    assert Path("trust.json").read_bytes() == before


def test_a_threshold_of_roots_signs_one_after_the_other(
    listed: dict[str, str], strongroom: Strongroom
) -> None:
    both = ("--root", "root.pub", "--root", "second.pub", "--threshold", "2")
    assert strongroom("trust", "show", "trust.json", *both).status == 1
    done = strongroom("trust", "sign", "trust.json", "--root-key", "file:second.pem")
    assert (done.status, done.err) == (0, "")
    assert "signed trust.json, version 2" in done.out
    assert "trainer" in done.out
    assert strongroom("trust", "show", "trust.json", *both).status == 0
    once = strongroom("trust", "renew", "trust.json", *ROOT, "--root-key", "file:second.pem")
    assert once.status == 0
    assert strongroom("trust", "show", "trust.json", *both).status == 0


def test_a_list_expires_when_it_is_told_to(listed: dict[str, str], strongroom: Strongroom) -> None:
    assert strongroom("trust", "renew", "trust.json", "--expires", "2999-01-01", *ROOT).status == 0
    assert shown(strongroom)["expires_at_ms"] == 32_472_144_000_000
    done = strongroom("trust", "renew", "trust.json", *ROOT)
    assert "expires 2999-01-01" in done.out or "expires 2998-12-31" in done.out
    done = strongroom("trust", "renew", "trust.json", "--expires", "2020-01-01", *ROOT)
    assert (done.status, done.out) == (2, "")
    assert "would have expired" in done.err
    assert strongroom("trust", "renew", "trust.json", "--expires", "never", *ROOT).status == 0
    assert (shown(strongroom)["expires_at_ms"], shown(strongroom)["version"]) == (None, 5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    (
        (("init", "trust.json", *ROOT), "trust.json exists"),
        (("add-key", "trust.json", "--public", "trainer.pub", "--name", "t", *ROOT), "is listed already"),
        (("add-key", "trust.json", "--public", "gone.pub", "--name", "t", *ROOT), "gone.pub"),
        (("add-key", "trust.json", "--public", "validator.pub", "--name", " ", *ROOT), "printable"),
        (("add-key", "trust.json", "--public", "validator.pub", "--name", "v", "--not-after", "soon", *ROOT),
         "is no day or moment"),
        (("revoke", "trust.json", "abc", "--reason", "r", *ROOT), "64 lower-case hex digits"),
        (("revoke", "trust.json", "0" * 64, "--reason", "r", "--up-to", "1200", *ROOT), "takes ROOT:STEP"),
        (("revoke", "gone.json", "0" * 64, "--reason", "r", *ROOT), "gone.json cannot be read"),
        (("renew", "trust.json"), "--root-key"),
        (("renew", "trust.json", "--root-key", "file:gone.pem"), "gone.pem"),
        (("init", "gone/trust.json", *ROOT), "cannot be written"),
        (("show", "trust.json", "--threshold", "2"), "--threshold is of the roots"),
        (("show", "trust.json", "--root", "root.pub", "--threshold", "0"), "is not a number"),
    ),
    ids=lambda value: value[:40] if isinstance(value, str) else "-",
)  # fmt: skip
def test_what_cannot_be_done_is_told_and_changes_nothing(
    arguments: tuple[str, ...], words: str, listed: dict[str, str], strongroom: Strongroom
) -> None:
    before = Path("trust.json").read_bytes()
    done = strongroom("trust", *arguments)
    assert (done.status, done.out) == (2, "")
    assert words in done.err
    assert Path("trust.json").read_bytes() == before


def test_a_key_and_a_revocation_are_changed_where_that_is_meant(
    listed: dict[str, str], strongroom: Strongroom
) -> None:
    add = ("trust", "add-key", "trust.json", "--public", "trainer.pub", "--name", "renamed", *ROOT)
    assert strongroom(*add).status == 2
    assert strongroom(*add, "--replace").status == 0
    assert [each["name"] for each in shown(strongroom)["keys"]] == ["renamed"]
    revoke = ("trust", "revoke", "trust.json", "file:trainer.pub", *ROOT, "--reason")
    assert strongroom(*revoke, "lost").status == 0
    assert strongroom(*revoke, "stolen").status == 2
    assert strongroom(*revoke, "stolen", "--replace").status == 0
    assert [(each["id"], each["reason"]) for each in shown(strongroom)["revoked"]] == [
        (listed["trainer"], "stolen")
    ]


def test_a_revoked_key_that_is_not_listed_is_pointed_out(
    listed: dict[str, str], strongroom: Strongroom
) -> None:
    done = strongroom("trust", "revoke", "trust.json", "0" * 64, "--reason", "a typing error", *ROOT)
    assert done.status == 0
    assert f"{'0' * 64} is not among the keys listed" in done.out
    done = strongroom("trust", "show", "trust.json")
    assert "is not among" not in done.out


# --------------------------------------------------------------------------------------- what it comes to


POLICY = """
[sign]
key = "file:trainer.pem"
[verify]
keys = ["file:trainer.pub"]
trust = "trust.json"
trust_keys = ["file:root.pub"]
"""


@pytest.fixture
def run(listed: dict[str, str]) -> Path:
    """A signed run of three checkpoints, and the policy that it was written under."""
    Path("strongroom.toml").write_text(POLICY)
    with Checkpointer("run", security=SecurityPolicy.load("strongroom.toml")) as checkpointer:
        for step in (100, 200, 300):
            checkpointer.save(step, {"w": torch.full((2,), float(step))}).result(timeout_s=60)
    return Path("run")


def restored_step(step: int | None = None) -> int:
    with Checkpointer("run", security=SecurityPolicy.load("strongroom.toml")) as checkpointer:
        restored = checkpointer.restore({"w": torch.zeros(2)}, step=step)
        assert restored is not None
        return int(restored.step)


def test_a_revoked_key_stays_good_up_to_a_named_checkpoint(
    run: Path, listed: dict[str, str], strongroom: Strongroom
) -> None:
    assert restored_step() == 300
    done = strongroom(
        "trust", "revoke", "trust.json", listed["trainer"], "--reason", "a laptop was stolen",
        "--up-to", "run:200", "--security", "strongroom.toml", *ROOT,
    )  # fmt: skip
    assert (done.status, done.err) == (0, "")
    assert "but for step 200" in done.out
    (revoked,) = shown(strongroom)["revoked"]
    (named,) = revoked["up_to"]
    commit = json.loads(next(run.glob("step-000000000200-*/COMMIT")).read_bytes())
    assert (named["manifest"], named["run"], named["step"]) == (commit["manifest"], commit["run"], 200)
    # A policy does not sign by a key that is revoked.
    others = POLICY.replace("trainer.pem", "validator.pem")
    others = others.replace(
        'keys = ["file:trainer.pub"]', 'keys = ["file:trainer.pub", "file:validator.pub"]'
    )
    Path("strongroom.toml").write_text(others)
    assert restored_step() == 200
    assert restored_step(100) == 100
    with pytest.raises(UntrustedError, match=r"is revoked \(a laptop was stolen\)"):
        restored_step(300)


def test_a_checkpoint_that_is_named_is_verified_first(
    run: Path, listed: dict[str, str], strongroom: Strongroom
) -> None:
    before = Path("trust.json").read_bytes()
    manifest = next(run.glob("step-000000000200-*/data/MANIFEST.json"))
    whole = manifest.read_bytes()
    revoke = ("trust", "revoke", "trust.json", listed["trainer"], "--reason", "r", *ROOT, "--up-to")
    manifest.write_bytes(whole[:-1])
    done = strongroom(*revoke, "run:200")
    assert (done.status, done.out) == (1, "")
    assert "COMMIT pins" in done.err
    manifest.unlink()
    assert strongroom(*revoke, "run:200").status == 1
    manifest.write_bytes(whole)
    next(run.glob("step-000000000200-*/signature.json")).unlink()
    done = strongroom(*revoke, "run:200", "--security", "strongroom.toml")
    assert (done.status, done.out) == (1, "")
    assert "signature.json is absent" in done.err
    assert strongroom(*revoke, "run:999").status == 3
    assert Path("trust.json").read_bytes() == before


def test_a_crash_leaves_a_whole_list(
    listed: dict[str, str], strongroom: Strongroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Path("trust.json").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    done = strongroom("trust", "renew", "trust.json", *ROOT)
    assert (done.status, done.out) == (2, "")
    assert "trust.json cannot be written: No space left on device" in done.err
    assert Path("trust.json").read_bytes() == before
    assert not list(Path().glob(".*tmp"))


# ---------------------------------------------------------------------------------------------- the floor


@pytest.fixture
def floored(listed: dict[str, str]) -> dict[str, str]:
    """A list, and a policy that trusts it and has a floor."""
    Path("policy.toml").write_text(
        '[verify]\ntrust = "trust.json"\ntrust_keys = ["file:root.pub"]\nfloor = "file:floor.json"\n'
    )
    return listed


WITH_POLICY = ("--security", "policy.toml", *ROOT)


def test_an_older_list_that_was_put_back_is_not_signed_anew(
    floored: dict[str, str], strongroom: Strongroom
) -> None:
    old = Path("trust.json").read_bytes()
    done = strongroom("trust", "revoke", "trust.json", floored["trainer"], "--reason", "r", *WITH_POLICY)
    assert (done.status, done.err) == (0, "")
    assert "version 3 (was 2)" in done.out
    Path("copy.json").write_bytes(old)
    add = ("--public", "validator.pub", "--name", "v")
    for verb in (("renew", "copy.json"), ("add-key", "copy.json", *add), ("sign", "copy.json")):
        done = strongroom("trust", *verb, *WITH_POLICY)
        assert (done.status, done.out) == (4, "")
        assert "is version 2, and" in done.err
        assert Path("copy.json").read_bytes() == old
    done = strongroom("trust", "renew", "trust.json", *WITH_POLICY, "--json")
    assert (done.json["version"], done.json["previous_version"], done.json["note"]) == (4, 3, None)


def test_a_list_is_remembered_once_all_have_signed_it(
    floored: dict[str, str], strongroom: Strongroom
) -> None:
    assert strongroom("trust", "sign", "trust.json", "--root-key", "file:second.pem").status == 0
    Path("policy.toml").write_text(
        '[verify]\ntrust = "trust.json"\ntrust_keys = ["file:root.pub", "file:second.pub"]\n'
        'trust_threshold = 2\nfloor = "file:floor.json"\n'
    )
    Path("next.json").write_bytes(Path("trust.json").read_bytes())
    done = strongroom("trust", "renew", "next.json", *WITH_POLICY)
    assert done.status == 0
    assert "not yet remembered by file:" in done.out

    def remembered() -> list[int]:
        said = strongroom("floor", "show", "--json", "--security", "policy.toml").json
        return [each["version"] for each in said["trust"]]

    assert remembered() == [2]
    sign = ("sign", "next.json", "--root-key", "file:second.pem", "--security", "policy.toml")
    assert strongroom("trust", *sign).status == 0
    done = strongroom("floor", "show", "--security", "policy.toml")
    assert done.status == 4  # the policy's own list is the older one now
    os.replace("next.json", "trust.json")
    assert remembered() == [3]
