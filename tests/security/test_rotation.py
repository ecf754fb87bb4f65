"""Rotation: who can open is changed, what is sealed is not; at no moment is a checkpoint without a key."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sealed_roots import (
    CountedKey,
    Reencrypting,
    commits_of,
    keyrings_of,
    make_checkpoint,
    make_root,
    what_is_sealed,
)

from strongroom import Checkpointer
from strongroom.config import Clock
from strongroom.digest import Digest, sha256_of
from strongroom.errors import (
    AccessDeniedError,
    ConfigError,
    IntegrityError,
    KeyServiceError,
    NoKeyError,
    OutcomeUnknownError,
    StoreUnavailableError,
    StrongroomError,
)
from strongroom.layout import MAX_KEYRING
from strongroom.manifest import Commit
from strongroom.opened import open_checkpoint
from strongroom.pace import Pace
from strongroom.signing import NO_GUARD
from strongroom.stores.base import Store
from strongroom.stores.open import open_store
from strongroom_security import Seal, SecurityPolicy
from strongroom_security.changes import decide, wraps_of
from strongroom_security.envelope import CheckpointKey
from strongroom_security.fields import Context
from strongroom_security.keyring import Keyring, WrappedKey
from strongroom_security.recipients.base import Identity
from strongroom_security.recipients.file import FileKey, create_key_file
from strongroom_security.recipients.hpke import HpkePrivateKey, create_key_pair, read_key
from strongroom_security.rotation import (
    AddRecipient,
    Change,
    Outcome,
    Progress,
    RemoveRecipient,
    Report,
    SetRecipients,
    rotate,
)
from strongroom_security.sealing import EnvelopeSealing
from strongroom_security.secret import Secret
from strongroom_security.unwrapping import Calls

HERE = Path(__file__).parent


def generation_opened(store: Store, commit: Commit, identity: Identity) -> int | None:
    """By which generation a reader who has this key alone can open every file; None: by none."""
    manifest = open_checkpoint(store, commit, NO_GUARD).manifest
    try:
        unlocked = EnvelopeSealing((), [identity]).unlock(store, commit, manifest)
    except (IntegrityError, NoKeyError):
        return None
    for record in manifest.files:
        unlocked.opener(record)
    return unlocked.keyring


def opens(root: Path, identity: Identity) -> list[int | None]:
    store = open_store(root)
    return [generation_opened(store, commit, identity) for commit in commits_of(store)]


def rotated(root: Path, change: Change, **options: Any) -> Report:
    """Everything rotated, by one worker, so that calls are counted exactly."""
    store = options.pop("store", None) or open_store(root)
    return rotate(store, commits_of(store), change, **{"workers": 1, **options})


def only(report: Report) -> Outcome:
    (outcome,) = report.outcomes
    return outcome


def failure(report: Report) -> StrongroomError:
    outcome = only(report)
    assert outcome.result == "failed"
    assert outcome.error is not None
    return outcome.error


def to(*recipients: Any, **options: Any) -> SetRecipients:
    return SetRecipients(recipients=recipients, **options)


def generation_file(root: Path, generation: int, step: int = 1) -> Path:
    (folder,) = root.glob(f"step-{step:012d}-*/keyring")
    return Path(folder / f"{generation:04d}.json")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def key(tmp_path: Path) -> FileKey:
    return create_key_file(tmp_path / "kek.key")


@pytest.fixture
def glass(tmp_path: Path) -> HpkePrivateKey:
    return create_key_pair(tmp_path / "glass", "x25519")


# ------------------------------------------------------------------------------------------------- a new KEK


def test_a_new_key_that_the_service_can_reencrypt_for_takes_one_call_a_checkpoint(root: Path) -> None:
    old, new = Reencrypting("old"), Reencrypting("new")
    make_root(root, [old], steps=5)
    before = what_is_sealed(root)
    old.counts.clear()
    report = rotated(root, to(new), identities=[old])
    assert (report.count("rotated"), report.calls) == (5, 5)
    assert (old.counts, new.counts) == ({"rewrap": 5}, {})
    assert what_is_sealed(root) == before
    assert opens(root, new) == [2] * 5
    assert opens(root, old) == [1] * 5


def test_where_the_service_cannot_the_key_is_unwrapped_and_wrapped(root: Path) -> None:
    old, new = CountedKey("old"), CountedKey("new")
    make_root(root, [old], steps=3)
    old.counts.clear()
    report = rotated(root, to(new), identities=[old])
    assert (report.count("rotated"), report.calls) == (3, 6)
    assert (old.counts, new.counts) == ({"unwrap": 3}, {"wrap": 3})
    assert opens(root, new) == [2] * 3


def test_a_service_that_cannot_for_this_target_is_asked_to_unwrap(root: Path, key: FileKey) -> None:
    old = Reencrypting("old")
    make_root(root, [old])
    old.counts.clear()
    report = rotated(root, to(key), identities=[old])
    assert (report.calls, old.counts) == (1, {"unwrap": 1})
    assert opens(root, key) == [2]


def test_a_key_that_is_here_opens_without_a_call_to_the_service(root: Path, key: FileKey) -> None:
    old, new = CountedKey("old"), CountedKey("new")
    make_root(root, [old, key])
    old.counts.clear()
    report = rotated(root, to(new, key), identities=[old, key])
    assert (report.calls, old.counts, new.counts) == (1, {}, {"wrap": 1})
    assert only(report).verified
    assert opens(root, new) == opens(root, key) == [2]


def test_from_file_to_file_there_are_no_calls(root: Path, key: FileKey, tmp_path: Path) -> None:
    new = create_key_file(tmp_path / "new.key")
    make_root(root, [key], steps=3)
    report = rotated(root, to(new), identities=[key])
    assert (report.count("rotated"), report.calls) == (3, 0)
    assert all(outcome.verified for outcome in report.outcomes)
    assert opens(root, new) == [2] * 3


def test_a_keyring_says_what_it_follows(root: Path) -> None:
    old, new = CountedKey("old"), CountedKey("new")
    make_root(root, [old])
    rotated(root, to(new), identities=[old])
    first, second = generation_file(root, 1).read_bytes(), keyrings_of(root)[2]
    assert second.previous == sha256_of(first)
    assert second.generation == 2
    assert second.created_at_ms > Keyring.decode(first, "first").created_at_ms
    assert second.keys == Keyring.decode(first, "first").keys


def test_what_is_as_wanted_is_skipped_without_a_call(root: Path) -> None:
    old, new = CountedKey("old"), CountedKey("new")
    make_root(root, [old], steps=3)
    rotated(root, to(new), identities=[old])
    before = {path: path.read_bytes() for path in root.rglob("*.json")}
    calls = old.calls, new.calls
    report = rotated(root, to(new), identities=[old])
    assert (report.count("already"), report.calls) == (3, 0)
    assert (old.calls, new.calls) == calls
    assert {path: path.read_bytes() for path in root.rglob("*.json")} == before


def test_only_what_is_lacking_is_wrapped(root: Path, glass: HpkePrivateKey, tmp_path: Path) -> None:
    kept, new = CountedKey("kept"), CountedKey("new")
    public = read_key(tmp_path / "glass.pub")
    make_root(root, [kept, public])
    kept.counts.clear()
    rotated(root, to(kept, public, new), identities=[kept])
    assert (kept.counts, new.counts) == ({"unwrap": 1}, {"wrap": 1})
    assert opens(root, kept) == opens(root, new) == opens(root, glass) == [2]


def test_a_run_goes_on_and_restores_by_the_new_key_alone(root: Path, tmp_path: Path) -> None:
    old, new = create_key_file(tmp_path / "old.key"), create_key_file(tmp_path / "new.key")
    state = {"w": torch.arange(7.0), "extra": {"epoch": 3}}
    with Checkpointer(root, security=SecurityPolicy(seal=Seal(recipients=[old]))) as checkpointer:
        checkpointer.save(1, state).result(timeout_s=60)
    before = what_is_sealed(root)
    assert only(rotated(root, to(new), identities=[old], remove_old=True)).removed == (1,)
    assert what_is_sealed(root) == before
    with Checkpointer(root, security=SecurityPolicy(seal=Seal(recipients=[new]))) as checkpointer:
        restored = checkpointer.restore({"w": torch.zeros(7), "extra": {}})
        assert restored is not None
        assert restored.state["w"].tolist() == state["w"].tolist()  # type: ignore[attr-defined]
        checkpointer.save(2, state).result(timeout_s=60)
    with (
        Checkpointer(root, security=SecurityPolicy(seal=Seal(recipients=[old]))) as checkpointer,
        pytest.raises(NoKeyError),
    ):
        checkpointer.restore(state, step=1)


# -------------------------------------------------------------------------------------- a new checkpoint key


def test_a_new_checkpoint_key_wraps_the_same_file_keys_under_another_one(root: Path) -> None:
    key, other = CountedKey("key"), CountedKey("other")
    make_root(root, [key, other], steps=2)
    before = what_is_sealed(root)
    key.counts.clear()
    report = rotated(root, to(key, new_checkpoint_key=True), identities=[key])
    assert (report.count("rotated"), key.counts) == (2, {"unwrap": 2, "wrap": 2})
    assert what_is_sealed(root) == before
    assert opens(root, key) == [2, 2]
    first, second = keyrings_of(root)[1], keyrings_of(root)[2]
    assert [row.path for row in first.keys] == [row.path for row in second.keys]
    assert not {row.wrapped for row in first.keys} & {row.wrapped for row in second.keys}
    # Who had opened the old keyring, and kept the checkpoint's key, cannot open the new one by it.
    context = first.context
    secret = other.unwrap(wraps_of(first, other.id)[0], context, within_s=1.0)
    with pytest.raises(IntegrityError):
        CheckpointKey(secret, context).unwrap(second.keys[0].path, second.keys[0].wrapped[0])


@pytest.mark.parametrize("option", ("new_checkpoint_key", "again"))
def test_a_rotation_that_wraps_anew_goes_on_where_it_was_stopped(option: str, root: Path) -> None:
    key = Reencrypting("key")
    make_root(root, [key], steps=6)
    stopping = KeyboardInterrupt()

    def stop(progress: Progress) -> None:
        if progress.done == 2:
            raise stopping

    change = to(key, since_ms=10_000, **{option: True})
    with pytest.raises(KeyboardInterrupt):
        rotated(root, change, identities=[key], on_progress=stop)
    report = rotated(root, change, identities=[key])
    assert (report.count("already"), report.count("rotated")) == (2, 4)
    assert rotated(root, change, identities=[key]).calls == 0
    assert opens(root, key) == [2] * 6
    # Without saying that it is the same, it is another one.
    report = rotated(root, to(key, **{option: True}), identities=[key])
    assert report.count("rotated") == 6
    assert report.since_ms is not None


def test_a_clock_that_was_set_back_does_not_make_it_begin_anew(root: Path) -> None:
    key = CountedKey("key")
    make_root(root, [key])
    change = to(key, new_checkpoint_key=True, since_ms=10_000)
    late = Clock(now_ns=lambda: 5_000_000_000, monotonic=lambda: 0.0)
    assert only(rotated(root, change, clock=late)).result == "rotated"
    assert only(rotated(root, change, clock=late)).result == "already"


def test_a_rotation_of_something_else_meanwhile_does_not_count_for_it(root: Path, key: FileKey) -> None:
    service, more = Reencrypting("service"), create_key_file(root.parent / "more.key")
    make_root(root, [service, key])
    rotated(root, AddRecipient(recipient=more), identities=[key])  # its keyring is new, and its keys are not
    for option in ("again", "new_checkpoint_key"):
        change = to(service, key, more, since_ms=10_000, **{option: True})
        assert only(rotated(root, change, identities=[key])).result == "rotated"
        assert only(rotated(root, change, identities=[key])).result == "already"
    assert opens(root, service) == opens(root, more) == [4]


def test_a_service_wraps_anew_under_its_newest_version_by_one_call(root: Path, key: FileKey) -> None:
    service = Reencrypting("service")
    make_root(root, [service], steps=2)
    before = wraps_of(keyrings_of(root)[1], service.id)
    service.counts.clear()
    report = rotated(root, to(service, again=True))
    assert (report.count("rotated"), service.counts) == (2, {"rewrap": 2})
    assert wraps_of(keyrings_of(root)[2], service.id) != before
    # A key in a file has no versions.
    make_checkpoint(root, EnvelopeSealing([key]), 3, 2)
    store = open_store(root)
    assert rotate(store, commits_of(store)[2:], to(key, again=True)).count("already") == 1


# --------------------------------------------------------------------------------- adding, removing, direct


def test_a_recipient_is_added_once(root: Path, glass: HpkePrivateKey, tmp_path: Path) -> None:
    service = CountedKey("service")
    make_root(root, [service], steps=2)
    change = AddRecipient(recipient=read_key(tmp_path / "glass.pub"))
    assert rotated(root, change, identities=[service]).count("rotated") == 2
    assert rotated(root, change, identities=[service]).count("already") == 2
    assert opens(root, glass) == opens(root, service) == [2, 2]


def test_one_is_added_to_a_chosen_checkpoint_alone(root: Path, key: FileKey) -> None:
    service = CountedKey("service")
    store = make_root(root, [service], steps=3)
    rotate(store, commits_of(store)[1:2], AddRecipient(recipient=key), identities=[service])
    assert opens(root, key) == [None, 2, None]


def test_a_recipient_is_removed_without_any_key(root: Path, key: FileKey) -> None:
    service = CountedKey("service")
    make_root(root, [service, key], steps=2)
    service.counts.clear()
    report = rotated(root, RemoveRecipient(id=key.id))
    assert (report.count("rotated"), report.calls, service.counts) == (2, 0, {})
    assert rotated(root, RemoveRecipient(id=key.id)).count("already") == 2
    assert [entry.id for entry in keyrings_of(root)[2].recipients] == [service.id]
    assert opens(root, service) == [2, 2]
    assert opens(root, key) == [1, 1]  # it keeps what it had, until the older keyring is removed


def test_the_last_recipient_stays(root: Path, key: FileKey) -> None:
    make_root(root, [key])
    with pytest.raises(ConfigError, match="alone can open"):
        raise failure(rotated(root, RemoveRecipient(id=key.id), identities=[key]))
    with pytest.raises(ConfigError, match="nobody can open is lost"):
        to()
    with pytest.raises(ConfigError, match="is named twice"):
        to(key, key)
    assert opens(root, key) == [1]


def test_keys_that_are_wrapped_directly_are_rotated_one_by_one(root: Path, key: FileKey) -> None:
    old, new = Reencrypting("old"), Reencrypting("new")
    make_root(root, [old, key], steps=2, files=4, wrap="direct")
    before = what_is_sealed(root)
    old.counts.clear()
    # The first keyring is pinned, so the service need not show it; the key that is here is not asked.
    report = rotated(root, to(new), identities=[old])
    assert (report.count("rotated"), old.counts) == (2, {"rewrap": 8})
    assert opens(root, new) == [2, 2]
    report = rotated(root, AddRecipient(recipient=key), identities=[new])
    assert (report.count("rotated"), new.counts["unwrap"]) == (2, 8 + 8)  # the other 8 were the test's
    assert keyrings_of(root)[3].wrap == "direct"
    assert opens(root, key) == [3, 3]
    assert rotated(root, RemoveRecipient(id=new.id), identities=[key]).count("rotated") == 2
    assert opens(root, new) == [3, 3]
    assert what_is_sealed(root) == before
    with pytest.raises(ConfigError, match="has no checkpoint key"):
        raise rotated(root, to(key, new_checkpoint_key=True)).failed[0].error or KeyError


def test_what_is_not_sealed_is_left_alone(root: Path, key: FileKey) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"w": torch.zeros(3)}).result(timeout_s=60)
    before = what_is_sealed(root)
    assert only(rotated(root, to(key))).result == "unsealed"
    assert what_is_sealed(root) == before
    assert list(root.glob("*/keyring")) == []


# --------------------------------------------------------------------------------------------------- dry run


@pytest.mark.parametrize("remove_old", (False, True))
@pytest.mark.parametrize("kinds", ((Reencrypting, Reencrypting), (CountedKey, CountedKey)))
def test_a_dry_run_does_nothing_and_tells_what_would_be_done(
    kinds: tuple[type[CountedKey], type[CountedKey]], remove_old: bool, root: Path
) -> None:
    old, new = kinds[0]("old"), kinds[1]("new")
    make_root(root, [old], steps=3)
    before = {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in root.rglob("*.*") if path.is_file()
    }
    old.counts.clear()
    options = {"identities": [old], "remove_old": remove_old}
    foreseen = rotated(root, to(new), dry_run=True, **options)
    assert (old.counts, new.counts) == ({}, {})
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before
    assert len(list(root.rglob("keyring/*"))) == 3
    done = rotated(root, to(new), **options)
    assert foreseen.count("would rotate") == done.count("rotated") == 3
    assert foreseen.calls == done.calls
    for one, other in zip(foreseen.outcomes, done.outcomes, strict=True):
        assert (one.generation, one.source, one.removed) == (other.generation, other.source, other.removed)
    assert rotated(root, to(new), dry_run=True, **options).count("already") == 3


def test_a_dry_run_foretells_the_calls_whoever_opens(root: Path, key: FileKey) -> None:
    old, new, more = CountedKey("old"), CountedKey("new"), Reencrypting("more")
    make_root(root, [old, key], steps=2)
    for change, identities in (
        (AddRecipient(recipient=new), (old,)),
        (AddRecipient(recipient=more), (old, key)),
        (to(old, key, new_checkpoint_key=True), (key,)),
        (to(more, new), (old,)),
        (to(more, again=True), ()),
        (RemoveRecipient(id=new.id), (more,)),
    ):
        foreseen = rotated(root, change, identities=identities, dry_run=True).calls
        assert rotated(root, change, identities=identities).calls == foreseen, change


def test_a_dry_run_tells_that_nobody_here_can_open(root: Path, key: FileKey) -> None:
    make_root(root, [CountedKey("gone")])
    with pytest.raises(NoKeyError, match="and here is file:"):
        raise failure(rotated(root, to(key), dry_run=True))


# --------------------------------------------------------------------------------- damage, strangers, refusal


def cut(data: bytes) -> bytes:
    return data[:-20]


def flipped(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def emptied(_: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("harm", (cut, flipped, emptied))
def test_a_damaged_generation_is_passed_over(
    harm: Callable[[bytes], bytes], root: Path, key: FileKey
) -> None:
    old, new = CountedKey("old"), CountedKey("new")
    make_root(root, [old])
    rotated(root, AddRecipient(recipient=key), identities=[old])
    path = generation_file(root, 2)
    path.write_bytes(harm(path.read_bytes()))
    found = sha256_of(path.read_bytes())
    outcome = only(rotated(root, to(new), identities=[old]))
    assert (outcome.result, outcome.source, outcome.generation) == ("rotated", 1, 3)
    assert "keyring 2" in outcome.passed_over[0]
    assert opens(root, new) == [3]
    assert keyrings_of(root)[3].previous == found


@pytest.mark.parametrize("kind", (CountedKey, Reencrypting))
def test_one_whose_file_keys_are_not_those_of_the_manifest_is_passed_over(
    kind: type[CountedKey], root: Path
) -> None:
    """As whoever can write to the storage makes one, of what lies there: whole, and good for nothing."""
    old, new = kind("old"), kind("new")
    make_root(root, [old], steps=2)
    mine, other = keyrings_of(root, 1)[1], keyrings_of(root, 2)[1]
    forged = mine.followed_by(created_at_ms=2, recipients=mine.recipients, keys=other.keys)
    generation_file(root, 2).write_bytes(forged.encode())
    report = rotated(root, to(new), identities=[old])
    assert [(each.result, each.source) for each in report.outcomes] == [("rotated", 1), ("rotated", 1)]
    assert opens(root, new) == [3, 2]


def test_one_that_a_forger_made_for_the_public_key_is_passed_over(root: Path, glass: HpkePrivateKey) -> None:
    """It opens, and all in it fits together; what it lacks is the keys that made the pinned headers."""
    store = make_root(root, [glass], steps=2)
    (commit, _) = commits_of(store)
    first = keyrings_of(root)[1]
    seal = EnvelopeSealing([read_key(root.parent / "glass.pub")]).seal_save(commit.run, commit.name, None)
    for row in first.keys:
        seal.sealer(row.path)
    paths = [row.path for row in first.keys]
    forged = Keyring.decode(seal.keyring(paths, within_s=10.0), "a forged keyring")
    generation_file(root, 2).write_bytes(replace(forged, generation=2, previous=first_digest(root)).encode())
    new = CountedKey("new")
    for change, generation in ((RemoveRecipient(id=new.id), 1), (AddRecipient(recipient=new), 3)):
        outcome = rotated(root, change, identities=[glass]).outcomes[0]
        assert "the header's tag does not fit" in outcome.passed_over[0]
        assert outcome.generation == generation
    assert opens(root, new) == [3, 2]


def first_digest(root: Path) -> Digest:
    return sha256_of(generation_file(root, 1).read_bytes())


def test_one_that_lacks_a_files_key_is_passed_over(root: Path) -> None:
    old, new = CountedKey("old"), CountedKey("new")
    make_root(root, [old])
    first = keyrings_of(root)[1]
    forged = first.followed_by(created_at_ms=2, recipients=first.recipients, keys=first.keys[1:])
    generation_file(root, 2).write_bytes(forged.encode())
    outcome = only(rotated(root, to(new), identities=[old]))
    assert (outcome.source, "lacks the key" in outcome.passed_over[0]) == (1, True)
    assert opens(root, new) == [3]


def test_keys_of_files_that_are_none_are_left_out(root: Path, key: FileKey) -> None:
    old = CountedKey("old")
    make_root(root, [old])
    first = keyrings_of(root)[1]
    more = WrappedKey(path="zzz.safetensors.floe", wrapped=(bytes(60),))
    added = first.followed_by(created_at_ms=2, recipients=first.recipients, keys=(*first.keys, more))
    generation_file(root, 2).write_bytes(added.encode())
    assert only(rotated(root, to(key), identities=[old])).source == 2
    assert keyrings_of(root)[3].keys == first.keys


def test_one_that_only_looks_as_wanted_is_noticed_by_the_keys_that_are_here(root: Path, key: FileKey) -> None:
    old = CountedKey("old")
    make_root(root, [old])
    first = keyrings_of(root)[1]
    (entry,) = first.recipients
    looks_right = replace(entry, id=key.id, kind=key.kind)
    generation_file(root, 2).write_bytes(
        first.followed_by(created_at_ms=2, recipients=[looks_right]).encode()
    )
    outcome = only(rotated(root, to(key), identities=[old]))
    assert (outcome.result, outcome.source, outcome.generation) == ("rotated", 1, 3)
    assert opens(root, key) == [3]


def test_a_wrap_that_somebody_exchanged_is_not_carried_on(root: Path, glass: HpkePrivateKey) -> None:
    """The break-glass key is at nobody's hand for years: its wrap must not rot unseen."""
    old, new = CountedKey("old"), CountedKey("new")
    public = read_key(root.parent / "glass.pub")
    make_root(root, [old, public])
    first = keyrings_of(root)[1]
    harmed = [
        replace(entry, wrapped=bytes(len(entry.wrapped or b""))) if entry.id == glass.id else entry
        for entry in first.recipients
    ]
    generation_file(root, 2).write_bytes(first.followed_by(created_at_ms=2, recipients=harmed).encode())
    rotated(root, to(new, public), identities=[old])
    assert opens(root, glass) == opens(root, new) == [3]


def test_with_the_harmed_key_at_hand_the_service_opens_and_it_is_set_right(
    root: Path, glass: HpkePrivateKey
) -> None:
    old, new = Reencrypting("old"), Reencrypting("new")
    make_root(root, [old, glass])
    first = keyrings_of(root)[1]
    harmed = [
        replace(entry, wrapped=bytes(len(entry.wrapped or b""))) if entry.id == glass.id else entry
        for entry in first.recipients
    ]
    generation_file(root, 2).write_bytes(first.followed_by(created_at_ms=2, recipients=harmed).encode())
    outcome = only(rotated(root, to(new, glass), identities=[old]))
    assert (outcome.result, outcome.source, outcome.verified) == ("rotated", 2, True)
    assert opens(root, glass) == opens(root, new) == [3]
    assert only(rotated(root, to(new, glass), identities=[old])).result == "already"


def test_a_keyring_of_another_checkpoint_is_no_source(root: Path, key: FileKey) -> None:
    old = CountedKey("old")
    make_root(root, [old], steps=2)
    rotated(root, to(key), identities=[old])
    shutil.copy(generation_file(root, 2, step=2), generation_file(root, 3, step=1))
    outcome = rotated(root, to(old), identities=[key]).outcomes[0]
    assert (outcome.result, outcome.source) == ("rotated", 2)
    assert "says that it is generation 2 of step 2" in outcome.passed_over[0]


def test_where_every_generation_is_damaged_it_says_so_and_the_others_go_on(root: Path, key: FileKey) -> None:
    make_root(root, [key], steps=3)
    generation_file(root, 1, step=2).write_bytes(b"{}")
    new = CountedKey("new")
    report = rotated(root, to(new), identities=[key])
    assert [outcome.result for outcome in report.outcomes] == ["rotated", "failed", "rotated"]
    with pytest.raises(IntegrityError, match="COMMIT pins"):
        raise report.failed[0].error or KeyError
    assert not generation_file(root, 2, step=2).exists()


def test_damage_beside_a_keyring_for_others_is_not_called_damage(root: Path, key: FileKey) -> None:
    """A restore falls back for damage, so nothing that may be otherwise is called that."""
    make_root(root, [CountedKey("owner")])
    generation_file(root, 2).write_bytes(b"{}")
    assert isinstance(failure(rotated(root, to(key))), NoKeyError)


def test_a_damaged_manifest_is_damage(root: Path, key: FileKey) -> None:
    make_root(root, [key])
    (path,) = root.glob("step-*/data/MANIFEST.json")
    path.write_bytes(path.read_bytes().replace(b'"world_size":1', b'"world_size":2'))
    assert isinstance(failure(rotated(root, to(CountedKey("new")), identities=[key])), IntegrityError)


def test_a_stranger_rotates_nothing(root: Path, key: FileKey, tmp_path: Path) -> None:
    make_root(root, [CountedKey("owner")])
    stranger = create_key_file(tmp_path / "stranger.key")
    for change in (to(key), to(key, new_checkpoint_key=True), AddRecipient(recipient=key)):
        for identities in ((), (stranger,)):
            with pytest.raises(NoKeyError, match="is for counted-"):
                raise failure(rotated(root, change, identities=identities))
    assert list(keyrings_of(root)) == [1]


def test_who_cannot_open_the_newest_adds_nobody_to_an_older_one(root: Path, key: FileKey) -> None:
    """Else whoever was added since would be left out of the newest, without a word."""
    old, new = CountedKey("old"), CountedKey("new")
    make_root(root, [old])
    rotated(root, to(new), identities=[old])
    with pytest.raises(NoKeyError, match="keyring 2"):
        raise failure(rotated(root, AddRecipient(recipient=key), identities=[old]))
    # Setting who can open leaves nobody out unseen.
    assert only(rotated(root, to(key), identities=[old])).source == 1


def test_a_refusal_is_no_damage_and_names_no_older_keyring(root: Path, key: FileKey) -> None:
    old = CountedKey("old")
    make_root(root, [old])
    old.failing["unwrap"] = NoKeyError("counted:old: you may not")
    with pytest.raises(NoKeyError, match="you may not"):
        raise failure(rotated(root, to(key), identities=[old]))


def test_a_service_that_may_not_reencrypt_may_still_open(root: Path) -> None:
    old, new = Reencrypting("old"), Reencrypting("new")
    make_root(root, [old])
    old.failing["rewrap"] = NoKeyError("no ReEncrypt here")
    assert only(rotated(root, to(new), identities=[old])).result == "rotated"
    assert opens(root, new) == [2]


@pytest.mark.parametrize("kind", (CountedKey, Reencrypting))
def test_a_service_that_is_down_is_asked_once_and_done_with(kind: type[CountedKey], root: Path) -> None:
    old, new = kind("old"), kind("new")
    make_root(root, [old], steps=2)
    old.counts.clear()
    for what in ("rewrap", "unwrap"):
        old.failing[what] = KeyServiceError("counted:old did not answer")
    report = rotated(root, to(new), identities=[old])
    assert [type(outcome.error) for outcome in report.failed] == [KeyServiceError, KeyServiceError]
    assert (old.calls, report.calls) == (2, 2)
    old.failing.clear()
    assert rotated(root, to(new), identities=[old]).count("rotated") == 2
    assert opens(root, new) == [2, 2]


def test_another_key_opens_where_one_service_is_down(root: Path) -> None:
    down, up, new = CountedKey("down"), CountedKey("up"), CountedKey("new")
    make_root(root, [down, up])
    down.failing["unwrap"] = KeyServiceError("counted:down did not answer")
    assert only(rotated(root, to(new), identities=[down, up])).result == "rotated"
    assert opens(root, new) == [2]


def test_a_service_that_is_down_for_the_new_key_leaves_all_as_it_was(root: Path, key: FileKey) -> None:
    new = CountedKey("new")
    make_root(root, [key])
    new.failing["wrap"] = KeyServiceError("counted:new did not answer")
    assert isinstance(failure(rotated(root, to(new, key), identities=[key])), KeyServiceError)
    assert list(keyrings_of(root)) == [1]


class Odd(CountedKey):
    """A keeper that somebody else wrote: what it does in place of wrapping and unwrapping."""

    instead: Callable[[Secret, Context], Any] | None = None

    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        if self.instead is not None and context.step == 2:
            return self.instead(key, context)  # type: ignore[no-any-return]
        return super().wrap(key, context, within_s=within_s)

    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        key = super().unwrap(wrapped, context, within_s=within_s)
        if self.instead is not None and context.step == 2:
            return self.instead(key, context)  # type: ignore[no-any-return]
        return key

    def rewrap(self, wrapped: bytes, context: Context, to: Any, *, within_s: float) -> bytes | None:
        if not isinstance(to, CountedKey):
            return None
        key = self._key.unwrap(wrapped, context, within_s=within_s)
        if self.instead is not None and context.step == 2:
            return self.instead(key, context)  # type: ignore[no-any-return]
        return to._key.wrap(key, context, within_s=within_s)


def raising(kind: type[BaseException]) -> Callable[[Secret, Context], Any]:
    def raise_it(key: Secret, context: Context) -> Any:
        raise kind("the key is " + key.reveal().hex())

    return raise_it


def sleeping(key: Secret, context: Context) -> bytes:
    time.sleep(2.5)
    return bytes(60)


ODD: dict[str, tuple[Callable[[Secret, Context], Any], str]] = {
    "raises": (raising(ValueError), "ValueError, of which nothing can be shown"),
    "exits": (raising(SystemExit), "SystemExit, of which nothing can be shown"),
    "interrupts": (raising(KeyboardInterrupt), "KeyboardInterrupt, of which nothing can be shown"),
    "returns a number": (lambda key, context: 7, "expected"),
    "returns a text": (lambda key, context: "a text", "expected"),
    "never ends": (sleeping, "did not answer in time"),
}


@pytest.mark.parametrize("does", ODD)
@pytest.mark.parametrize("when", ("wraps", "opens", "wraps for another"))
@pytest.mark.parametrize("workers", (1, 2))
def test_whatever_a_keeper_does_fails_one_checkpoint_alone(
    workers: int, when: str, does: str, root: Path, key: FileKey
) -> None:
    odd, other = Odd("odd"), CountedKey("other")
    make_root(root, [key] if when == "wraps" else [odd], steps=3)
    odd.instead, told = ODD[does]
    change = to(odd) if when == "wraps" else to(other if when == "wraps for another" else key)
    identities = [key] if when == "wraps" else [odd]
    report = rotated(root, change, identities=identities, within_s=0.2, workers=workers)
    assert [outcome.result for outcome in report.outcomes] == ["rotated", "failed", "rotated"]
    (failed,) = report.failed
    assert isinstance(failed.error, KeyServiceError)
    assert odd.uri in str(failed.error)
    assert told in str(failed.error)
    assert "the key is" not in str(failed.error)
    assert failed.error.__cause__ is failed.error.__context__ is None
    odd.instead = None
    assert not rotated(root, change, identities=identities).failed


# --------------------------------------------------------------------------------- verifying and removing


def test_services_are_asked_to_open_what_was_made_where_that_is_wanted(root: Path) -> None:
    old, new = Reencrypting("old"), Reencrypting("new")
    make_root(root, [old])
    report = rotated(root, to(new), identities=[old])
    assert (only(report).verified, new.counts) == (False, {})
    report = rotated(root, to(new), identities=[old], verify=True)
    assert (only(report).result, only(report).verified, new.counts) == ("already", True, {"unwrap": 1})


def test_what_was_made_and_does_not_open_is_an_error(root: Path, key: FileKey) -> None:
    class Forgetful(CountedKey):
        def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
            return super().wrap(Secret.draw(), context, within_s=within_s)

    new = Forgetful("new")
    make_root(root, [key])
    report = rotated(root, to(new), identities=[key], remove_old=True)
    assert isinstance(failure(report), IntegrityError)
    assert only(report).generation == 2
    assert opens(root, key) == [1]
    # Done again, it goes by the older one, and nothing is lost by that.
    assert isinstance(failure(rotated(root, to(new), identities=[key], remove_old=True)), IntegrityError)
    assert only(rotated(root, to(CountedKey("sound")), identities=[key], remove_old=True)).source == 1


def test_older_generations_are_removed_once_the_newest_was_opened(root: Path) -> None:
    old, new = Reencrypting("old"), Reencrypting("new")
    make_root(root, [old], steps=2)
    before = what_is_sealed(root)
    rotated(root, to(old, new), identities=[old])
    report = rotated(root, to(new), identities=[old], remove_old=True)
    assert [outcome.removed for outcome in report.outcomes] == [(1, 2), (1, 2)]
    assert all(outcome.verified for outcome in report.outcomes)
    assert list(keyrings_of(root)) == [3]
    assert opens(root, new) == [3, 3]
    assert opens(root, old) == [None, None]
    assert what_is_sealed(root) == before
    calls = old.calls, new.calls
    assert rotated(root, to(new), remove_old=True).count("already") == 2
    assert (old.calls, new.calls) == calls  # nothing is left to be removed, so nobody is asked


def test_nothing_is_removed_that_nobody_could_replace(
    root: Path, key: FileKey, glass: HpkePrivateKey
) -> None:
    public = read_key(root.parent / "glass.pub")
    make_root(root, [key])
    with pytest.raises(NoKeyError, match="nothing shows that it opens"):
        raise failure(rotated(root, to(public), identities=[key], remove_old=True))
    assert (opens(root, key), opens(root, glass)) == ([1], [2])
    assert isinstance(failure(rotated(root, to(public), identities=[key], remove_old=True)), NoKeyError)
    assert list(keyrings_of(root)) == [1, 2]  # what is as wanted is not made again
    assert only(rotated(root, to(public), identities=[glass], remove_old=True)).removed == (1,)
    assert opens(root, glass) == [2]


def test_a_service_that_does_not_answer_keeps_the_older_ones(root: Path, key: FileKey) -> None:
    new = CountedKey("new")
    make_root(root, [key])
    new.failing["unwrap"] = KeyServiceError("counted:new did not answer")
    assert isinstance(failure(rotated(root, to(new), identities=[key], remove_old=True)), KeyServiceError)
    assert opens(root, key) == [1]
    new.failing["unwrap"] = NoKeyError("counted:new: you may wrap, and not unwrap")
    assert isinstance(failure(rotated(root, to(new), identities=[key], remove_old=True)), NoKeyError)
    assert opens(root, key) == [1]


def plant_one_without_glass(root: Path, glass: HpkePrivateKey) -> None:
    """A newest generation that is right for all but one."""
    newest = max(keyrings_of(root).items())[1]
    harmed = [
        replace(entry, wrapped=bytes(len(entry.wrapped or b""))) if entry.id == glass.id else entry
        for entry in newest.recipients
    ]
    planted = newest.followed_by(created_at_ms=2, recipients=harmed)
    generation_file(root, planted.generation).write_bytes(planted.encode())


@pytest.mark.parametrize("kind", (CountedKey, Reencrypting))
def test_the_last_keyring_that_break_glass_opens_goes_once_another_was_made_for_it(
    kind: type[CountedKey], root: Path, glass: HpkePrivateKey
) -> None:
    service, public = kind("service"), read_key(root.parent / "glass.pub")
    make_root(root, [service, public])
    plant_one_without_glass(root, glass)
    change = to(service, public)
    foreseen = only(rotated(root, change, identities=[service], remove_old=True, dry_run=True))
    outcome = only(rotated(root, change, identities=[service], remove_old=True))
    assert (outcome.result, outcome.source, outcome.generation) == ("rotated", 2, 3)
    assert (foreseen.result, foreseen.generation, foreseen.removed) == ("would rotate", 3, outcome.removed)
    assert list(keyrings_of(root)) == [3]
    assert opens(root, glass) == opens(root, service) == [3]
    assert only(rotated(root, change, identities=[service], remove_old=True)).result == "already"


@pytest.mark.parametrize("kind", (CountedKey, Reencrypting))
@pytest.mark.parametrize("change", ("remove", "add"))
def test_it_stays_where_its_key_is_not_at_hand(
    change: str, kind: type[CountedKey], root: Path, glass: HpkePrivateKey
) -> None:
    service, other, new = kind("service"), kind("other"), kind("new")
    make_root(root, [service, other, read_key(root.parent / "glass.pub")])
    plant_one_without_glass(root, glass)
    wanted = RemoveRecipient(id=other.id) if change == "remove" else AddRecipient(recipient=new)
    with pytest.raises(NoKeyError, match=f"nothing shows that generation 3 opens for {glass.id}"):
        raise failure(rotated(root, wanted, identities=[service], remove_old=True))
    assert opens(root, glass) == [1]
    # In one go with others who are new, it is set right.
    change_to = to(service, new, read_key(root.parent / "glass.pub"))
    assert only(rotated(root, change_to, identities=[service], remove_old=True)).result == "rotated"
    assert opens(root, glass) == opens(root, service) == opens(root, new) == [4]
    assert list(keyrings_of(root)) == [4]


def test_a_wrap_that_the_commit_pins_needs_nobody(root: Path, glass: HpkePrivateKey) -> None:
    service, other = CountedKey("service"), CountedKey("other")
    make_root(root, [service, other, read_key(root.parent / "glass.pub")])
    outcome = only(rotated(root, RemoveRecipient(id=other.id), identities=[service], remove_old=True))
    assert (outcome.result, outcome.removed) == ("rotated", (1,))
    assert opens(root, glass) == [2]


def test_the_pinned_wrap_of_another_checkpoint_key_is_none(root: Path, glass: HpkePrivateKey) -> None:
    """Copied beside keys under a new one it is right to the byte, and opens nothing."""
    service, public = CountedKey("service"), read_key(root.parent / "glass.pub")
    make_root(root, [service, public])
    first = keyrings_of(root)[1]
    rotated(root, to(service, new_checkpoint_key=True), identities=[service])
    second = keyrings_of(root)[2]
    (pinned,) = (entry for entry in first.recipients if entry.id == glass.id)
    planted = second.followed_by(created_at_ms=3, recipients=[*second.recipients, pinned])
    generation_file(root, 3).write_bytes(planted.encode())
    change = AddRecipient(recipient=CountedKey("new"))
    assert isinstance(failure(rotated(root, change, identities=[service], remove_old=True)), NoKeyError)
    assert opens(root, glass) == [1]


def test_a_newer_generation_that_is_damaged_removes_none_that_opens(root: Path, key: FileKey) -> None:
    make_root(root, [key])
    rotated(root, AddRecipient(recipient=CountedKey("more")), identities=[key])
    generation_file(root, 2).write_bytes(b"{}")
    report = rotated(root, to(key), identities=[key], remove_old=True)
    assert (only(report).result, only(report).generation, only(report).removed) == ("already", 1, ())
    assert opens(root, key) == [1]


# ----------------------------------------------------------------------------------- two at once, and crashes


class Around:
    """A store that does something first, or in place of what is asked."""

    def __init__(self, store: Store, **replaced: Callable[..., Any]) -> None:
        self._store = store
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(self._store, name)


def test_of_two_that_want_the_same_the_slower_one_finds_it_done(root: Path) -> None:
    old, new = CountedKey("old"), CountedKey("new")
    store = make_root(root, [old])

    def late(key: str, data: bytes) -> bool:
        rotated(root, to(new), identities=[old])
        return store.put_if_absent(key, data)

    outcome = only(rotated(root, to(new), identities=[old], store=Around(store, put_if_absent=late)))
    assert (outcome.result, outcome.generation) == ("already", 2)
    assert list(keyrings_of(root)) == [1, 2]


def test_of_two_that_want_different_things_the_slower_one_goes_on_from_the_others(
    root: Path, key: FileKey
) -> None:
    old, new = CountedKey("old"), CountedKey("new")
    store = make_root(root, [old])
    raced: list[str] = []

    def late(name: str, data: bytes) -> bool:
        if not raced:
            raced.append(name)
            rotated(root, AddRecipient(recipient=key), identities=[old])
        return store.put_if_absent(name, data)

    changed = Around(store, put_if_absent=late)
    outcome = only(rotated(root, AddRecipient(recipient=new), identities=[old], store=changed))
    assert (outcome.result, outcome.source, outcome.generation) == ("rotated", 2, 3)
    assert opens(root, old) == opens(root, new) == opens(root, key) == [3]


def test_whoever_always_loses_gives_up(root: Path, key: FileKey) -> None:
    store = make_root(root, [key])
    changed = Around(store, put_if_absent=lambda name, data: False)
    error = failure(rotated(root, to(CountedKey("new")), identities=[key], store=changed))
    assert isinstance(error, StoreUnavailableError)


def test_a_lost_answer_is_looked_up(root: Path) -> None:
    old, new = CountedKey("old"), CountedKey("new")
    store = make_root(root, [old], steps=2)

    def written_and_lost(name: str, data: bytes) -> bool:
        if "000000000001" in name or raced:
            store.put_if_absent(name, data)
        raced.append(name)
        raise OutcomeUnknownError("the answer was lost")

    raced: list[str] = []
    changed = Around(store, put_if_absent=written_and_lost)
    report = rotated(root, to(new), identities=[old], store=changed)
    assert [(each.result, each.generation) for each in report.outcomes] == [("already", 2), ("already", 2)]
    assert opens(root, new) == [2, 2]


def test_a_store_that_keeps_something_else_is_found_out(root: Path, key: FileKey) -> None:
    store = make_root(root, [key])

    def harmed(name: str, data: bytes) -> bool:
        return store.put_if_absent(name, flipped(data))

    changed = Around(store, put_if_absent=harmed)
    report = rotated(root, to(CountedKey("new")), identities=[key], store=changed, remove_old=True)
    assert "does not stand as it was written" in str(failure(report))
    assert opens(root, key) == [1]


def once(then: Callable[[], object]) -> Callable[[], None]:
    """Does something the first time that it is called."""
    done: list[bool] = []

    def do() -> None:
        if not done:
            done.append(True)
            then()

    return do


@pytest.mark.parametrize("change", ("set", "add", "remove"))
def test_a_keyring_that_another_rotation_removes_before_it_is_read_is_no_damage(
    change: str, root: Path, key: FileKey
) -> None:
    old, more, new = CountedKey("old"), CountedKey("more"), CountedKey("new")
    store = make_root(root, [old, more])
    another = AddRecipient(recipient=key)
    meanwhile = once(lambda: rotated(root, another, identities=[old, more], remove_old=True))
    rotated(root, to(old, more, again=True), identities=[old, more])

    def listed(prefix: str) -> list[str]:
        names = store.list_names(prefix)
        if prefix.endswith("keyring"):
            meanwhile()
        return list(names)

    wanted = {
        "set": to(old, new),
        "add": AddRecipient(recipient=new),
        "remove": RemoveRecipient(id=more.id),
    }[change]
    moved = Around(store, list_names=listed)
    outcome = only(rotated(root, wanted, identities=[old, more], store=moved))
    assert (outcome.result, outcome.source, outcome.passed_over) == ("rotated", 3, ())
    assert generation_file(root, 3).exists()
    assert not generation_file(root, 2).exists()


def test_while_a_removal_is_half_done_an_older_one_is_not_taken_for_the_newest(
    root: Path, key: FileKey
) -> None:
    old = CountedKey("old")
    store = make_root(root, [old])
    rotated(root, AddRecipient(recipient=key), identities=[old])

    def others() -> None:
        rotated(root, AddRecipient(recipient=CountedKey("another")), identities=[old])
        generation_file(root, 2).unlink()

    meanwhile = once(others)

    def listed(prefix: str) -> list[str]:
        names = store.list_names(prefix)
        if prefix.endswith("keyring"):
            meanwhile()
        return list(names)

    outcome = only(rotated(root, to(old), identities=[old], store=Around(store, list_names=listed)))
    assert (outcome.result, outcome.source, outcome.generation) == ("rotated", 3, 4)


def test_one_that_is_listed_and_stays_absent_counts(root: Path, key: FileKey) -> None:
    store = make_root(root, [key])

    def listed(prefix: str) -> list[str]:
        return [*store.list_names(prefix), *(["0007.json"] if prefix.endswith("keyring") else [])]

    haunted = Around(store, list_names=listed)
    outcome = only(rotated(root, AddRecipient(recipient=CountedKey("new")), identities=[key], store=haunted))
    assert (outcome.source, outcome.generation) == (1, 8)
    assert "keyring 7" in outcome.passed_over[0]
    generation_file(root, 8).unlink()
    generation_file(root, 1).unlink()
    assert isinstance(failure(rotated(root, to(key), identities=[key], store=haunted)), IntegrityError)


def test_what_was_written_and_gone_on_from_and_removed_is_no_damage(root: Path, key: FileKey) -> None:
    old, new = CountedKey("old"), CountedKey("new")
    store = make_root(root, [old])
    another = AddRecipient(recipient=key)
    meanwhile = once(lambda: rotated(root, another, identities=[old, new], remove_old=True))

    def put(name: str, data: bytes) -> bool:
        is_ours = store.put_if_absent(name, data)
        meanwhile()
        return is_ours

    changed = Around(store, put_if_absent=put)
    outcome = only(rotated(root, AddRecipient(recipient=new), identities=[old, new], store=changed))
    assert (outcome.result, outcome.error) == ("already", None)
    assert opens(root, key) == opens(root, new) == [3]
    assert sorted(keyrings_of(root)) == [3]


def no_listing(store: Store) -> Callable[[str], list[str]]:
    def listed(prefix: str) -> list[str]:
        if prefix.endswith("keyring"):
            raise AccessDeniedError("no listing here")
        return list(store.list_names(prefix))

    return listed


@pytest.mark.parametrize("is_lost", (False, True), ids=("", "the answer is lost"))
@pytest.mark.parametrize("may_list", (True, False), ids=("", "no listing"))
def test_a_number_that_was_purged_is_not_made_again_from_what_is_gone(
    may_list: bool, is_lost: bool, root: Path
) -> None:
    """Else the slow one lets whoever was removed open again, and says that all went well."""
    kept, gone, added = CountedKey("kept"), CountedKey("gone"), CountedKey("added")
    store = make_root(root, [kept, gone])

    def others() -> None:
        rotated(root, to(kept, gone, new_checkpoint_key=True), identities=[kept])
        rotated(root, AddRecipient(recipient=CountedKey("another")), identities=[kept])
        outcome = only(rotated(root, RemoveRecipient(id=gone.id), identities=[kept]))
        assert (outcome.result, outcome.generation) == ("rotated", 4)
        for number in (1, 2, 3):
            generation_file(root, number).unlink()

    meanwhile = once(others)

    def late(name: str, data: bytes) -> bool:
        meanwhile()
        is_ours = store.put_if_absent(name, data)
        if is_lost and name.endswith("0002.json"):
            raise OutcomeUnknownError("lost")
        return is_ours

    slow = Around(store, put_if_absent=late, **({} if may_list else {"list_names": no_listing(store)}))
    outcome = only(rotated(root, AddRecipient(recipient=added), identities=[kept], store=slow))
    assert (outcome.result, outcome.source, outcome.generation) == ("rotated", 4, 5)
    assert sorted(keyrings_of(root)) == [4, 5]
    assert opens(root, gone) == [None]
    assert opens(root, added) == opens(root, kept) == [5]


def test_what_cannot_be_taken_back_is_told(root: Path) -> None:
    kept, gone, added = CountedKey("kept"), CountedKey("gone"), CountedKey("added")
    store = make_root(root, [kept, gone])

    def others() -> None:
        rotated(root, RemoveRecipient(id=gone.id), identities=[kept])
        rotated(root, to(kept, new_checkpoint_key=True), identities=[kept], remove_old=True)

    meanwhile = once(others)

    def late(name: str, data: bytes) -> bool:
        meanwhile()
        return store.put_if_absent(name, data)

    def kept_back(name: str) -> None:
        raise AccessDeniedError("no deleting here")

    slow = Around(store, put_if_absent=late, delete=kept_back)
    error = failure(rotated(root, AddRecipient(recipient=added), identities=[kept], store=slow))
    assert isinstance(error, StoreUnavailableError)
    assert "0002.json was made of a keyring that another rotation has replaced" in str(error)


def test_one_that_only_looks_newer_takes_nothing_back(root: Path, key: FileKey) -> None:
    new = CountedKey("new")
    store = make_root(root, [key])

    def put(name: str, data: bytes) -> bool:
        is_ours = store.put_if_absent(name, data)
        generation_file(root, 50).write_bytes(b"{}")
        return is_ours

    changed = Around(store, put_if_absent=put)
    assert only(rotated(root, to(new), identities=[key], store=changed)).generation == 2
    assert opens(root, new) == [2]


def test_a_root_that_may_not_be_listed_is_rotated_all_the_same(root: Path) -> None:
    old, new = CountedKey("old"), CountedKey("new")
    store = make_root(root, [old])

    def listed(prefix: str) -> list[str]:
        if prefix.endswith("keyring"):
            raise AccessDeniedError("no listing here")
        return store.list_names(prefix)

    changed = Around(store, list_names=listed)
    rotated(root, to(new), identities=[old], store=changed)
    assert only(rotated(root, to(new), identities=[old], store=changed)).result == "already"
    assert only(rotated(root, to(old), identities=[new], store=changed)).generation == 3
    assert opens(root, old) == [3]


def test_when_no_number_is_left_nothing_is_written(root: Path, key: FileKey) -> None:
    make_root(root, [key])
    generation_file(root, MAX_KEYRING).write_bytes(b"{}")
    with pytest.raises(ConfigError, match="the last number that there is"):
        raise failure(rotated(root, to(CountedKey("new")), identities=[key]))
    assert opens(root, key) == [1]


def test_what_retention_removes_meanwhile_is_no_damage(root: Path, key: FileKey) -> None:
    store = make_root(root, [key], steps=3)
    commits = commits_of(store)
    store.delete(commits[0].name.commit_key)
    store.delete_tree(commits[0].name.folder)
    (half_gone,) = root.glob("step-000000000002-*")
    (half_gone / "COMMIT").unlink()
    (half_gone / "keyring" / "0001.json").unlink()
    report = rotate(store, commits, to(CountedKey("new")), identities=[key], workers=1)
    assert [outcome.result for outcome in report.outcomes] == ["gone", "gone", "rotated"]
    assert not list(root.glob("step-000000000001-*"))


def child(root: Path, old: str, new: str, *, workers: int, pause_s: float = 0.01) -> subprocess.Popen[str]:
    arguments = [str(root), old, new, "10000", str(workers), str(pause_s)]
    return subprocess.Popen(
        [sys.executable, str(HERE / "rotating_child.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_killed_at_any_point_and_done_again_it_converges(root: Path) -> None:
    seed = random.randrange(2**32)
    sys.stdout.write(f"seed {seed}\n")
    luck = random.Random(seed)
    steps = 24
    old, new = CountedKey("old"), CountedKey("new")
    store = make_root(root, [old], steps=steps)
    before = what_is_sealed(root)
    kills = 0
    for _ in range(10):
        process = child(root, "old", "new", workers=luck.choice((1, 3)))
        assert process.stdout is not None
        for _ in range(luck.randrange(steps)):  # it tells of those that were done before, too
            process.stdout.readline()
        time.sleep(luck.random() * 0.02)
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        # At no moment is there a checkpoint that neither key opens.
        for commit in commits_of(store):
            opened = [generation_opened(store, commit, identity) for identity in (old, new)]
            assert any(opened), (seed, commit.name)
    assert kills > 2
    change = to(new, new_checkpoint_key=True, since_ms=10_000)
    assert not rotated(root, change, identities=[old], remove_old=True).failed
    assert rotated(root, change, remove_old=True).count("already") == steps
    assert opens(root, old) == [None] * steps
    assert set(opens(root, new)) == {2}
    assert what_is_sealed(root) == before


def test_an_interrupt_ends_it_soon_and_nothing_goes_on_behind(root: Path) -> None:
    steps = 60
    make_root(root, [CountedKey("old")], steps=steps)
    # So slow that it cannot end before the signal comes, however busy the machine is.
    process = child(root, "old", "new", workers=4, pause_s=0.3)
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in told
    left = opens(root, CountedKey("new")).count(None)
    assert 0 < left < steps
    again = child(root, "old", "new", workers=4)
    again.communicate(timeout=120)
    assert again.returncode == 0
    assert opens(root, CountedKey("new")) == [2] * steps


# --------------------------------------------------------------------------------------------------- at scale


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    """In memory, where it can be: it is of 64,000 files."""
    shared = Path("/dev/shm")  # noqa: S108 - what is put there has a name of its own
    if not (shared.is_dir() and os.access(shared, os.W_OK)):
        yield tmp_path / "run"
        return
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        yield Path(folder) / "run"


def test_a_thousand_checkpoints_of_64_shards_by_one_call_each(large: Path) -> None:
    old, new = Reencrypting("old"), Reencrypting("new")
    store = make_root(large, [old], steps=1000, files=64)
    before = what_is_sealed(large)
    assert sum(name.endswith(".floe") for name in before) == 64_000
    old.counts.clear()
    told: list[Progress] = []
    commits = commits_of(store)
    report = rotate(store, commits[:400], to(new), identities=[old], workers=1, on_progress=told.append)
    assert (report.count("rotated"), report.calls, old.counts) == (400, 400, {"rewrap": 400})
    report = rotate(store, commits, to(new), identities=[old], workers=1)
    assert (report.count("already"), report.count("rotated"), report.calls) == (400, 600, 600)
    assert (old.counts, new.counts) == ({"rewrap": 1000}, {})
    assert told[-1] == Progress(done=400, total=400, calls=400)
    assert what_is_sealed(large) == before
    assert len(list(large.glob("step-*/keyring/*"))) == 2000
    for commit in random.Random(1).sample(commits, 20):
        assert generation_opened(store, commit, new) == 2


# ------------------------------------------------------------------------------------------ its own manners


def test_several_workers_do_the_same(root: Path) -> None:
    old, new = CountedKey("old"), CountedKey("new")
    make_root(root, [old], steps=20)
    told: list[Progress] = []
    report = rotated(root, to(new), identities=[old], workers=4, on_progress=told.append)
    assert [outcome.name.step for outcome in report.outcomes] == list(range(1, 21))
    assert [progress.done for progress in told] == list(range(1, 21))
    assert {progress.total for progress in told} == {20}
    assert told[-1].calls == report.calls == 40
    assert opens(root, new) == [2] * 20


def test_calls_to_services_keep_to_a_rate_and_keys_that_are_here_do_not(key: FileKey) -> None:
    now, slept = [0.0], list[float]()

    def sleep(pause_s: float) -> None:
        slept.append(pause_s)
        now[0] += pause_s

    calls = Calls(Pace(5.0, monotonic=lambda: now[0], sleep=sleep), within_s=1.0)
    context = Context(run="r", launch=1, step=1, attempt="0" * 16)
    secret = Secret.draw()
    for _ in range(10):
        calls.unwrap(key, calls.wrap(key, secret, context), context)
    assert (slept, calls.count) == ([], 0)
    service, other = Reencrypting("a"), Reencrypting("b")
    for _ in range(5):
        wrapped = calls.wrap(service, secret, context)
        calls.rewrap(service, wrapped, context, other)
        assert calls.rewrap(service, wrapped, context, key) is None
        calls.unwrap(service, wrapped, context)
    assert calls.count == 15
    assert now[0] >= 15 / 5.0 - 0.2


@pytest.mark.parametrize(
    "options",
    ({"workers": 0}, {"workers": 257}, {"workers": True}, {"calls_per_second": 0}, {"within_s": 0}),
)
def test_an_option_that_cannot_work_is_refused(options: dict[str, Any], root: Path, key: FileKey) -> None:
    make_root(root, [key])
    with pytest.raises(ConfigError):
        rotated(root, to(key), **options)


def test_no_key_stands_in_what_is_told(root: Path, key: FileKey, caplog: pytest.LogCaptureFixture) -> None:
    secrets: list[bytes] = []

    class Watched(CountedKey):
        def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
            secrets.append(key.reveal())
            return super().wrap(key, context, within_s=within_s)

    make_root(root, [key])
    report = rotated(root, to(Watched("new"), key, new_checkpoint_key=True), identities=[key])
    assert only(report).result == "rotated"
    assert len(secrets) == 1
    for text in (repr(report), caplog.text):
        assert secrets[0].hex() not in text
        assert repr(secrets[0])[2:-1] not in text


# ------------------------------------------------------------------------------------ decisions by themselves

NAMES = ("a", "b", "c", "d")
KEYS = {name: CountedKey(name) for name in NAMES}

changes = st.one_of(
    st.lists(st.sampled_from(NAMES), min_size=1, unique=True).map(lambda names: ("set", names)),
    st.sampled_from(NAMES).map(lambda name: ("add", [name])),
    st.sampled_from(NAMES).map(lambda name: ("remove", [name])),
    st.lists(st.sampled_from(NAMES), min_size=1, unique=True).map(lambda names: ("renew", names)),
)


def change_of(kind: str, names: Sequence[str]) -> Change:
    if kind == "add":
        return AddRecipient(recipient=KEYS[names[0]])
    if kind == "remove":
        return RemoveRecipient(id=KEYS[names[0]].id)
    return to(*(KEYS[name] for name in names), new_checkpoint_key=kind == "renew")


def model(kind: str, names: Sequence[str], before: set[str]) -> set[str]:
    if kind == "add":
        return before | set(names)
    if kind == "remove":
        return before - set(names) or before  # the last one stays
    return set(names)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(history=st.lists(st.tuples(changes, st.integers(0, 2)), max_size=6))
def test_whatever_is_asked_for_in_whatever_order_the_right_ones_can_open(
    history: list[tuple[tuple[str, list[str]], int]], tmp_path: Path
) -> None:
    root = Path(tempfile.mkdtemp(dir=tmp_path))
    store = make_root(root, [KEYS["a"]], files=2)
    (commit,) = commits_of(store)
    able = {"a"}
    for (kind, names), trouble in history:
        puts: list[str] = []

        def put(name: str, data: bytes, *, puts: list[str] = puts, trouble: int = trouble) -> bool:
            puts.append(name)
            if trouble and len(puts) == 1:
                if trouble == 1:
                    store.put_if_absent(name, data)
                raise OutcomeUnknownError("lost")
            return store.put_if_absent(name, data)

        report = rotate(
            Around(store, put_if_absent=put),  # type: ignore[arg-type]
            [commit],
            change_of(kind, names),
            identities=list(KEYS.values()),
        )
        able = model(kind, names, able)
        newest = max(keyrings_of(root).items())[1]
        assert {entry.id for entry in newest.recipients} == {KEYS[name].id for name in able}
        for name in able:
            assert generation_opened(store, commit, KEYS[name]) == newest.generation
        if kind != "remove":
            assert not report.failed
    shutil.rmtree(root)


@given(names=st.lists(st.sampled_from(NAMES), min_size=1, unique=True), change=changes)
def test_a_decision_that_was_carried_out_is_nothing_the_next_time(
    names: list[str], change: tuple[str, list[str]]
) -> None:
    kind, wanted = change
    if kind == "renew" or (kind == "remove" and names == wanted):
        return
    context = Context(run="r", launch=1, step=1, attempt="0" * 16)
    sealing = EnvelopeSealing([KEYS[name] for name in names], clock=lambda: 1.0)
    seal = sealing.seal_save("r", _name_of(context), None)
    seal.sealer("a.floe")
    base = Keyring.decode(seal.keyring(["a.floe"], within_s=10.0), "a keyring")
    step = decide(change_of(kind, wanted), base, tuple)
    assert {*step.keep, *step.drop} == {entry.id for entry in base.recipients}
    assert not set(step.keep) & set(step.drop)
    entries = {entry.id: entry for entry in base.recipients}
    some = base.recipients[0]
    after = base.followed_by(
        created_at_ms=2,
        recipients=[
            *(entries[each] for each in step.keep),
            *(replace(some, id=recipient.id, kind=recipient.kind) for recipient in step.wrap),
        ],
    )
    assert decide(change_of(kind, wanted), after, tuple).is_nothing
    assert {entry.id for entry in after.recipients} == {
        KEYS[name].id for name in model(kind, wanted, set(names))
    }


def _name_of(context: Context) -> Any:
    from strongroom.layout import CheckpointName

    return CheckpointName(launch=context.launch, step=context.step, attempt=context.attempt)
