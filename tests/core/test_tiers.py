"""Several tiers behind one Checkpointer: what is newest, where it is read, what stands where, what goes."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import (
    AccessDeniedError,
    Checkpointer,
    ConfigError,
    FencedError,
    IntegrityError,
    KeepLast,
    ReplicationError,
    RollbackError,
    StoreUnavailableError,
    Tier,
    WaitTimeoutError,
)
from strongroom.catalog import Catalog
from strongroom.stores import LocalStore, MemoryStore
from strongroom.stores.offers import Space
from strongroom.verify import verify
from strongroom_security import SecurityPolicy
from strongroom_security.sign import Sign
from strongroom_security.signers.generating import generate_key
from strongroom_security.verify import Verify

SHARD = "data/00000-00.safetensors"


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((300_000,), value), "extra": {"value": value}}


def template() -> dict[str, Any]:
    return {"w": torch.zeros(300_000), "extra": {}}


def folder_of(root: Path, step: int) -> Path:
    (found,) = root.glob(f"step-{step:012d}-*")
    return found


def committed(root: Path) -> list[int]:
    return sorted(name.step for name in Catalog(LocalStore(root)).history().commits)


@pytest.fixture
def fast(tmp_path: Path) -> Path:
    return tmp_path / "fast"


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    return tmp_path / "slow"


def saved(fast: Path, slow: Path, *steps: int, **options: Any) -> None:
    """A run of which every checkpoint stands on both tiers."""
    with Checkpointer(fast, replicate_to=[slow], **options) as ck:
        for step in steps:
            ck.save(step, state(float(step))).replicated(60)


def test_a_replicated_checkpoint_stands_on_both_tiers_byte_for_byte(fast: Path, slow: Path) -> None:
    saved(fast, slow, 1, 2)
    assert committed(fast) == committed(slow) == [1, 2]
    there = {path.relative_to(slow): path.read_bytes() for path in slow.rglob("*") if path.is_file()}
    for path, data in there.items():
        assert (fast / path).read_bytes() == data, path
    ours = {path.relative_to(fast) for path in fast.rglob("*") if path.is_file()}
    assert {path for path in ours if path.parts[0] != "replication"} == set(there)


def test_the_slow_tier_alone_restores(fast: Path, slow: Path) -> None:
    saved(fast, slow, 1)
    shutil.rmtree(fast)
    with Checkpointer(slow) as ck:
        restored = ck.restore(template())
        assert restored is not None
        assert torch.equal(restored.state["w"], state(1.0)["w"])


def test_a_new_machine_goes_on_from_the_slow_tier(fast: Path, slow: Path) -> None:
    saved(fast, slow, 1, 2)
    shutil.rmtree(fast)
    with Checkpointer(fast, replicate_to=[slow]) as ck:
        restored = ck.restore(template())
        assert restored is not None
        assert restored.step == 2
        assert ck.save(3, state(3.0)).replicated(60).launch == 2
        assert [each.step for each in ck.checkpoints()] == [3, 2, 1]
    assert committed(fast) == [3]
    assert committed(slow) == [1, 2, 3]
    history = Catalog(LocalStore(fast)).history()
    assert history.launches[2].parent is not None
    assert history.launches[2].parent.step == 2


def test_the_newest_of_all_tiers_is_restored(fast: Path, slow: Path) -> None:
    saved(fast, slow, 1, 2)
    shutil.rmtree(folder_of(fast, 2))
    with Checkpointer(fast, replicate_to=[slow]) as ck:
        restored = ck.restore(template())
        assert restored is not None
        assert restored.step == 2
        assert restored.skipped == ()


def test_the_fastest_tier_that_holds_it_is_read(fast: Path, slow: Path) -> None:
    saved(fast, slow, 1)
    for path in slow.rglob("*.safetensors"):
        path.unlink()
    with Checkpointer(fast, replicate_to=[slow]) as ck:
        assert ck.restore(template()) is not None


@pytest.mark.parametrize("digest", ("blake3", "sha256"))
@pytest.mark.parametrize(
    "file",
    (
        SHARD,
        "data/MANIFEST.json",
        "data/index.safetensors",
        "data/state.json",
        "data/provenance.json",
        "COMMIT",
    ),
)
@pytest.mark.parametrize("harm", ("flip", "cut", "remove"))
def test_a_file_damaged_on_one_tier_is_read_from_the_other(
    fast: Path, slow: Path, file: str, harm: str, digest: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved(fast, slow, 1, 2, digest=digest)
    damage(folder_of(fast, 2) / file, harm)
    with Checkpointer(fast, replicate_to=[slow]) as ck, caplog.at_level(logging.WARNING, "strongroom"):
        restored = ck.restore(template())
    assert restored is not None
    assert restored.step == 2
    assert restored.skipped == ()
    assert torch.equal(restored.state["w"], state(2.0)["w"])
    assert restored.state["extra"] == {"value": 2.0}
    if file != "COMMIT":
        assert "passed over for the next tier's" in caplog.text


def test_each_tier_may_have_lost_another_file(fast: Path, slow: Path) -> None:
    saved(fast, slow, 1)
    damage(folder_of(fast, 1) / SHARD, "flip")
    damage(folder_of(slow, 1) / "data/state.json", "flip")
    with Checkpointer(fast, replicate_to=[slow]) as ck:
        restored = ck.restore(template())
        assert restored is not None
        assert torch.equal(restored.state["w"], state(1.0)["w"])


def test_what_is_damaged_on_every_tier_is_skipped(fast: Path, slow: Path) -> None:
    saved(fast, slow, 1, 2)
    for root in (fast, slow):
        damage(folder_of(root, 2) / SHARD, "flip")
    with Checkpointer(fast, replicate_to=[slow]) as ck:
        restored = ck.restore(template())
        assert restored is not None
        assert restored.step == 1
        assert [step for step, _ in restored.skipped] == [2]
        assert torch.equal(restored.state["w"], state(1.0)["w"])


def test_damage_here_and_no_answer_there_is_no_damage(fast: Path, slow: Path) -> None:
    saved(fast, slow, 1, 2)
    damage(folder_of(fast, 2) / SHARD, "flip")

    class Mute(LocalStore):
        def open_reader(self, key: str) -> Any:
            if key.endswith("safetensors"):
                raise StoreUnavailableError("no answer")
            return super().open_reader(key)

    with (
        Checkpointer(fast, replicate_to=[Mute(slow)]) as ck,
        pytest.raises(StoreUnavailableError, match="no answer"),
    ):
        ck.restore(template())


def test_a_planted_commit_on_one_tier_does_not_hide_the_true_one(fast: Path, slow: Path) -> None:
    saved(fast, slow, 1, 2)
    other = fast.parent / "other"
    with Checkpointer(other, run_id=Catalog(LocalStore(fast)).history().run.run) as ck:  # type: ignore[union-attr]
        ck.save(2, state(9.0)).result(60)
    # Well-formed, of this run and of this name, and of a manifest that is not there.
    true = (folder_of(fast, 2) / "COMMIT").read_bytes()
    history = Catalog(LocalStore(fast)).history()
    commit = next(each for name, each in history.commits.items() if name.step == 2)
    forged = type(commit)(
        run=commit.run,
        name=commit.name,
        manifest=next(iter(Catalog(LocalStore(other)).history().commits.values())).manifest,
        size_bytes=commit.size_bytes,
        committed_at_ms=commit.committed_at_ms,
    ).encode()
    assert forged != true
    (folder_of(fast, 2) / "COMMIT").write_bytes(forged)
    with Checkpointer(fast, replicate_to=[slow]) as ck:
        restored = ck.restore(template())
        assert restored is not None
        assert (restored.step, restored.skipped) == (2, ())
        assert torch.equal(restored.state["w"], state(2.0)["w"])


# A tier that is out of reach


class Away(MemoryStore):
    """A tier that nobody reaches."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("away")
        self.error = error or StoreUnavailableError("no route to it")

    def _fails(self, *_: Any, **__: Any) -> Any:
        raise self.error

    list_names = read = stat = put_if_absent = put = open_writer = open_reader = _fails


def test_a_tier_out_of_reach_is_an_error_that_says_how_to_go_on(fast: Path) -> None:
    with Checkpointer(fast) as ck:
        ck.save(1, state(1.0)).result(60)
    for error in (StoreUnavailableError("no route to it"), AccessDeniedError("who are you")):
        ck = Checkpointer(fast, replicate_to=[Away(error)])
        with pytest.raises(type(error), match=r"the tier memory://away.*accept_missing_tiers=True"):
            ck.restore(template())
        ck.close()


def test_a_tier_out_of_reach_may_be_accepted(fast: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(fast) as ck:
        ck.save(1, state(1.0)).result(60)
    ck = Checkpointer(fast, replicate_to=[Away()], accept_missing_tiers=True)
    restored = ck.restore(template())
    assert restored is not None
    assert "a tier is out of reach" in caplog.text
    handle = ck.save(2, state(2.0))
    assert handle.result(60).launch == 2
    with pytest.raises(WaitTimeoutError, match="memory://away"):
        handle.replicated(0.2)
    with pytest.raises(
        ReplicationError, match=r"1 for memory://away, the newest of step 2.*strongroom replicate"
    ) as told:
        ck.close(0.2)
    assert told.value.tiers == ("memory://away",)


def test_no_tier_at_all_is_an_error(fast: Path) -> None:
    ck = Checkpointer(Away(), replicate_to=[Away2()], accept_missing_tiers=True)
    with pytest.raises(StoreUnavailableError):
        ck.restore(template())
    ck.close()


class Away2(Away):
    @property
    def uri(self) -> str:
        return "memory://away2"


# Launches


def test_a_launch_is_claimed_on_every_tier(fast: Path, slow: Path) -> None:
    with Checkpointer(fast, replicate_to=[slow]) as ck:
        ck.save(1, state(1.0)).replicated(60)
        record = (fast / "launches/000001.json").read_bytes()
        assert (slow / "launches/000001.json").read_bytes() == record
        assert (slow / "run.json").read_bytes() == (fast / "run.json").read_bytes()


def test_a_zombie_with_a_disk_of_its_own_is_fenced_by_the_tier_that_both_share(
    fast: Path, slow: Path, tmp_path: Path
) -> None:
    zombie = Checkpointer(fast, replicate_to=[slow])
    zombie.save(1, state(1.0)).replicated(60)
    with Checkpointer(tmp_path / "elsewhere", replicate_to=[slow]) as successor:
        assert successor.restore(template()) is not None
        successor.save(2, state(2.0)).replicated(60)
    handle = zombie.save(3, state(3.0))
    with pytest.raises((ReplicationError, FencedError), match=r"launch 2|taken"):
        handle.replicated(60)
    with pytest.raises(FencedError, match=r"launch 2|taken|another writer"):
        zombie.save(4, state(4.0))
    assert committed(slow) == [1, 2]
    with pytest.raises(ReplicationError):
        zombie.close(0.0)


def test_another_run_on_a_tier_is_refused_before_anything_is_written(fast: Path, slow: Path) -> None:
    with Checkpointer(slow, run_id="other") as ck:
        ck.save(1, state(1.0)).result(60)
    ck = Checkpointer(fast, replicate_to=[slow], run_id="mine")
    with pytest.raises(ConfigError, match=r"run other"):
        ck.save(1, state(1.0))
    ck.close()
    assert not fast.exists()
    with Checkpointer(fast) as ck:
        ck.save(1, state(1.0)).result(60)
    ck = Checkpointer(fast, replicate_to=[slow])
    with pytest.raises(ConfigError, match=r"holds run .*, and .* run other"):
        ck.restore(template())
    ck.close()


# Retention


def test_the_first_tier_keeps_what_is_nowhere_else(fast: Path) -> None:
    away = Away()
    ck = Checkpointer(fast, keep=KeepLast(count=1), replicate_to=[away], accept_missing_tiers=True)
    for step in (1, 2, 3):
        ck.save(step, state(float(step))).result(60)
    ck.wait()
    assert committed(fast) == [1, 2, 3]
    with pytest.raises(ReplicationError):
        ck.close(0.0)


def test_the_first_tier_lets_go_of_what_a_slower_one_has_verified(fast: Path, slow: Path) -> None:
    with Checkpointer(fast, keep=KeepLast(count=1), replicate_to=[slow]) as ck:
        for step in (1, 2, 3, 4):
            ck.save(step, state(float(step))).replicated(60)
            ck.wait()
    assert committed(fast) == [4]
    assert committed(slow) == [1, 2, 3, 4]


def test_each_tier_has_a_retention_of_its_own(fast: Path, slow: Path) -> None:
    tier = Tier(slow, keep=KeepLast(count=2))
    with Checkpointer(fast, replicate_to=[tier]) as ck:
        for step in (1, 2, 3, 4):
            ck.save(step, state(float(step))).replicated(60)
    assert committed(fast) == [1, 2, 3, 4]
    assert committed(slow) == [3, 4]


# What is asked wrongly


@pytest.mark.parametrize("given", ("s3://bucket", Path("x"), 5, Tier("x")))
def test_tiers_are_a_list(fast: Path, given: Any) -> None:
    with pytest.raises(ConfigError, match="replicate_to must be a list"):
        Checkpointer(fast, replicate_to=given)


def test_a_tier_that_is_the_first_or_lies_inside_it_is_refused(fast: Path) -> None:
    for other in (fast, fast / "copies", fast.parent):
        with pytest.raises(ConfigError, match="one place, or one lies inside the other"):
            Checkpointer(fast, replicate_to=[other])


def test_a_tier_is_checked_when_it_is_built() -> None:
    with pytest.raises(ConfigError, match="keep must be a retention policy"):
        Tier("x", keep=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_bytes_per_second"):
        Tier("x", max_bytes_per_second=0)


def test_replicated_without_tiers_says_so(fast: Path) -> None:
    with Checkpointer(fast) as ck, pytest.raises(ConfigError, match="replicate_to"):
        ck.save(1, state(1.0)).replicated(60)


def test_leaving_with_an_exception_does_not_wait_for_ever(fast: Path) -> None:
    with (
        pytest.raises(KeyError),
        Checkpointer(fast, replicate_to=[Away()], accept_missing_tiers=True, timeout_s=1.0) as ck,
    ):
        ck.save(1, state(1.0)).result(60)
        raise KeyError("x")


def test_how_far_each_tier_is_can_be_asked(fast: Path, slow: Path) -> None:
    with Checkpointer(fast, replicate_to=[slow]) as ck:
        ck.save(1, state(1.0)).replicated(60)
        (seen,) = ck.replication()
        assert (seen.uri, seen.pending, seen.last_step) == (LocalStore(slow).uri, (), 1)
    with Checkpointer(fast) as ck:
        assert ck.replication() == ()


def test_plan_restore_sees_all_tiers(fast: Path, slow: Path) -> None:
    saved(fast, slow, 1)
    shutil.rmtree(fast)
    with Checkpointer(fast, replicate_to=[slow]) as ck:
        plan = ck.plan_restore(template())
        assert plan is not None
        assert plan.checkpoint.step == 1


def test_damage_on_every_tier_of_a_step_that_was_asked_for_raises(fast: Path, slow: Path) -> None:
    saved(fast, slow, 1, 2)
    for root in (fast, slow):
        damage(folder_of(root, 2) / SHARD, "flip")
    with Checkpointer(fast, replicate_to=[slow]) as ck, pytest.raises(IntegrityError, match="step 2"):
        ck.restore(template(), step=2)


# What an earlier job has left, and what has lost its records


def test_a_job_that_only_restores_copies_what_an_earlier_one_has_left(fast: Path, slow: Path) -> None:
    with Checkpointer(fast) as ck:
        for step in (1, 2):
            ck.save(step, state(float(step))).result(60)
    with Checkpointer(fast, replicate_to=[slow]) as ck:
        assert ck.restore(template()) is not None
    assert committed(slow) == [1, 2]


def test_a_recovered_run_is_whole_and_its_line_goes_on(fast: Path, slow: Path) -> None:
    saved(fast, slow, 1, 2)
    shutil.rmtree(fast)
    with Checkpointer(fast, replicate_to=[slow]) as ck:
        ck.restore(template())
        ck.save(3, state(3.0)).replicated(60)
    report = verify(LocalStore(fast), everything=True)
    assert report.verdict == "whole", report.problems
    assert Catalog(LocalStore(fast)).history().line.broken is None


@pytest.mark.parametrize("which", ("fast", "slow"))
@pytest.mark.parametrize("harm", ("flip", "cut", "remove"))
def test_a_run_record_that_one_tier_has_lost_is_taken_from_the_other(
    fast: Path, slow: Path, which: str, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved(fast, slow, 1, 2)
    damage({"fast": fast, "slow": slow}[which] / "run.json", harm)
    with Checkpointer(fast, replicate_to=[slow]) as ck:
        restored = ck.restore(template())
        assert restored is not None
        assert restored.step == 2
    assert "by another tier's record of the run" in caplog.text


def test_nothing_found_where_a_tier_is_missing_is_no_new_run(fast: Path) -> None:
    away = Away()
    ck = Checkpointer(fast, replicate_to=[away], accept_missing_tiers=True)
    with pytest.raises(StoreUnavailableError, match=r"a tier is out of reach.*accept_older=True begins anew"):
        ck.restore(template())
    assert ck.restore(template(), accept_older=True) is None
    with contextlib.suppress(ReplicationError):
        ck.close(0.0)


def test_a_first_tier_that_an_outage_has_filled_is_emptied_once_it_is_over(
    fast: Path, slow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"keep": KeepLast(count=1), "accept_missing_tiers": True}
    ck = Checkpointer(fast, replicate_to=[Away()], **options)
    for step in (1, 2, 3):
        ck.save(step, state(float(step))).result(60)
    ck.wait()
    with pytest.raises(ReplicationError):
        ck.close(0.0)
    assert committed(fast) == [1, 2, 3]

    full = {"is": True}
    usual = LocalStore.space

    def space(self: LocalStore) -> Space:
        if self.root == str(fast) and len(list(fast.glob("step-*"))) >= 3 and full["is"]:
            return Space(total_bytes=10**9, free_bytes=0)
        return usual(self)

    monkeypatch.setattr(LocalStore, "space", space)
    with Checkpointer(fast, replicate_to=[slow], **options) as ck:
        assert ck.restore(template()) is not None
        deadline = time.monotonic() + 60
        while committed(slow) != [1, 2, 3] and time.monotonic() < deadline:
            time.sleep(0.02)
        # By now all of it stands elsewhere, and nothing was committed that retention could follow.
        assert ck.save(4, state(4.0)).replicated(60).step == 4
    # Step 3 was restored, and so was once found whole by reading.
    assert committed(fast) == [3, 4]


def test_what_the_policy_remembers_is_remembered_of_every_tier(
    fast: Path, slow: Path, tmp_path: Path
) -> None:
    policy = SecurityPolicy(
        sign=Sign(key=_signer(tmp_path)),
        verify=Verify(floor=f"file:{tmp_path / 'floor.json'}", base=tmp_path),
    )
    with Checkpointer(fast, replicate_to=[slow], security=policy) as ck:
        ck.save(1, state(1.0)).replicated(60)
    for root in (fast, slow):
        shutil.rmtree(root)
    with (
        Checkpointer(tmp_path / "other", replicate_to=[slow], security=policy) as ck,
        pytest.raises(RollbackError, match=r"slow.*taken away"),
    ):
        ck.restore(template())


def _signer(folder: Path) -> str:
    generate_key(folder / "signer.pem")
    return f"file:{folder / 'signer.pem'}"


def damage(path: Path, harm: str) -> None:
    data = bytearray(path.read_bytes())
    if harm == "remove":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
