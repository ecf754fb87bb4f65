"""Signed checkpoints through the Checkpointer: what is signed, what is refused, what nothing may go below."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Keeper

from strongroom import Checkpointer, KeepLast
from strongroom.canonical import with_self_digest
from strongroom.catalog import Catalog
from strongroom.chain import walk
from strongroom.config import SYSTEM_CLOCK, Clock
from strongroom.digest import sha256_of
from strongroom.errors import (
    ConfigError,
    IntegrityError,
    KeyServiceError,
    NoWholeCheckpointError,
    RollbackError,
    SaveError,
    StoreFullError,
    StrongroomError,
    UntrustedError,
)
from strongroom.layout import launch_key, signature_key
from strongroom.manifest import Commit, Launch
from strongroom.signing import NO_GUARD, Guard
from strongroom.stores.base import ObjectReader
from strongroom.stores.local import LocalStore
from strongroom.verify import verify
from strongroom_security import (
    AllOf,
    RequireSigner,
    Seal,
    SecurityPolicy,
    Sign,
    Threshold,
    UnsafeAllowUnsigned,
    Verify,
    oms,
)
from strongroom_security.cosigning import add_signature
from strongroom_security.publickeys import PublicKey
from strongroom_security.rotation import SetRecipients, rotate
from strongroom_security.signers.file import FileSigner
from strongroom_security.signers.generating import generate_key
from strongroom_security.trust import ManifestTrust


class Counted:
    """A signer that counts, and may be told to do something first."""

    kind = "file"
    certificates: tuple[bytes, ...] = ()

    def __init__(self, path: Path, does: Callable[[], None] = lambda: None) -> None:
        if not path.exists():
            generate_key(path)
        self._signer = FileSigner.read(path, uri=f"file:{path.name}")
        self.uri = self._signer.uri
        self.does = does
        self.count = 0

    @property
    def public_key(self) -> PublicKey:
        return self._signer.public_key

    def sign(self, message: bytes, *, within_s: float) -> bytes:
        self.count += 1
        self.does()
        return self._signer.sign(message, within_s=within_s)


class Watched(LocalStore):
    """Tells what was read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.was_read: list[str] = []

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        self.was_read.append(key)
        return super().read(key, limit_bytes=limit_bytes)

    def open_reader(self, key: str) -> ObjectReader:
        self.was_read.append(key)
        return super().open_reader(key)


@pytest.fixture
def alice(tmp_path: Path) -> Counted:
    return Counted(tmp_path / "alice.pem")


@pytest.fixture
def bob(tmp_path: Path) -> Counted:
    return Counted(tmp_path / "bob.pem")


def signed_by(signer: Counted, **verify: Any) -> SecurityPolicy:
    verify.setdefault("keys", [signer.public_key])
    return SecurityPolicy(sign=Sign(key=signer), verify=Verify(**verify))


def demanding(*signers: Counted, **verify: Any) -> SecurityPolicy:
    return SecurityPolicy(verify=Verify(keys=[signer.public_key for signer in signers], **verify))


def weight(step: int) -> torch.Tensor:
    return torch.full((8, 8), float(step))


def save(root: Path, policy: SecurityPolicy | None, *steps: int, **options: Any) -> None:
    """Go on with a run, as a process that was started anew."""
    with Checkpointer(root, security=policy or SecurityPolicy(), **options) as ck:
        ck.restore(accept_older=True)
        for step in steps:
            ck.save(step, {"weight": weight(step)}).result(60)


def restored(root: Path, policy: SecurityPolicy, **options: Any) -> Any:
    with Checkpointer(root, security=policy, **options) as ck:
        return ck.restore({"weight": torch.zeros(8, 8)})


def folder_of(root: Path, step: int) -> Path:
    (found,) = root.glob(f"step-{step:012d}-*")
    return found


def commit_of(root: Path, step: int) -> Commit:
    return Commit.decode((folder_of(root, step) / "COMMIT").read_bytes(), "COMMIT")


def recommitted(root: Path, step: int) -> None:
    """Commit what stands in a folder now, as anyone who can write to the storage can."""
    folder = folder_of(root, step)
    commit = json.loads((folder / "COMMIT").read_bytes())
    del commit["~digest"]
    commit["manifest"] = str(sha256_of((folder / "data/MANIFEST.json").read_bytes()))
    signature = folder / "signature.json"
    commit["signature"] = str(sha256_of(signature.read_bytes())) if signature.exists() else None
    (folder / "COMMIT").write_bytes(with_self_digest(commit))


def unsigned(root: Path, step: int) -> None:
    (folder_of(root, step) / "signature.json").unlink()
    recommitted(root, step)


# ----------------------------------------------------------------------------------------- what is signed


def test_a_bundle_lists_every_file_and_commit_pins_it(tmp_path: Path, alice: Counted) -> None:
    root = tmp_path / "run"
    save(root, signed_by(alice), 1)
    folder = folder_of(root, 1)
    data = (folder / "signature.json").read_bytes()
    assert commit_of(root, 1).signature == sha256_of(data)
    statement = oms.decode_statement(oms.decode_bundle(data, "it").envelope.payload, "it")
    files = {
        path.relative_to(folder / "data").as_posix(): sha256_of(path.read_bytes()).value
        for path in (folder / "data").rglob("*")
        if path.is_file()
    }
    assert statement.resources == files
    assert len(files) >= 5


def test_with_blake3_it_lists_the_manifest_which_pins_the_rest(tmp_path: Path, alice: Counted) -> None:
    root = tmp_path / "run"
    save(root, signed_by(alice), 1, digest="blake3")
    data = (folder_of(root, 1) / "signature.json").read_bytes()
    statement = oms.decode_statement(oms.decode_bundle(data, "it").envelope.payload, "it")
    assert list(statement.resources) == ["MANIFEST.json"]
    assert restored(root, demanding(alice)).step == 1


def test_one_signature_a_launch_and_one_a_save_and_no_file_is_read_again(
    tmp_path: Path, alice: Counted
) -> None:
    store = Watched(tmp_path / "run")
    with Checkpointer(store, security=signed_by(alice)) as ck:
        for step in (1, 2, 3):
            ck.save(step, {"weight": weight(step)}).result(60)
    assert alice.count == 1 + 3
    assert not [key for key in store.was_read if "/data/" in key]


def test_a_signer_that_fails_is_a_failed_save_and_nothing_is_committed(
    tmp_path: Path, alice: Counted
) -> None:
    root = tmp_path / "run"
    save(root, signed_by(alice), 1)

    def refuse() -> None:
        if alice.count > 3:
            raise KeyServiceError("it is down")

    alice.does = refuse
    with Checkpointer(root, security=signed_by(alice)) as ck:
        ck.restore()
        handle = ck.save(2, {"weight": weight(2)})
        with pytest.raises(SaveError, match=r"alice\.pem.*it is down"):
            handle.result(60)
        assert [checkpoint.step for checkpoint in ck.checkpoints()] == [1]


def test_a_signer_that_never_answers_does_not_outlast_its_time(tmp_path: Path, alice: Counted) -> None:
    gate = threading.Event()
    policy = SecurityPolicy(sign=Sign(key=alice, timeout_s=0.2))
    with Checkpointer(tmp_path / "run", security=policy) as ck:
        ck.save(1, {"weight": weight(1)}).result(60)
        alice.does = lambda: gate.wait(60) and None
        handle = ck.save(2, {"weight": weight(2)})
        with pytest.raises(SaveError, match="did not answer in time"):
            handle.result(60)
        gate.set()


def test_what_is_signed_is_hashed_by_sha256_unless_told_otherwise(tmp_path: Path, alice: Counted) -> None:
    for name, options, expected in (
        ("usual", {}, "sha256"),
        ("asked", {"digest": "blake3"}, "blake3"),
    ):
        save(tmp_path / name, signed_by(alice), 1, **options)
        manifest = json.loads((folder_of(tmp_path / name, 1) / "data/MANIFEST.json").read_bytes())
        assert manifest["digest"] == expected


# -------------------------------------------------------------------------------------- what is refused


def test_sign_alone_demands_its_own_keys_signature(tmp_path: Path, alice: Counted, bob: Counted) -> None:
    root = tmp_path / "run"
    save(root, SecurityPolicy(sign=Sign(key=alice)), 1)
    assert restored(root, SecurityPolicy(sign=Sign(key=alice))).step == 1
    with pytest.raises(NoWholeCheckpointError, match=alice.public_key.id):
        restored(root, SecurityPolicy(sign=Sign(key=bob)))


def test_an_unsigned_checkpoint_is_skipped_with_its_reason_and_refused_by_step(
    tmp_path: Path, alice: Counted
) -> None:
    root = tmp_path / "run"
    save(root, signed_by(alice), 1, 2, 3)
    unsigned(root, 3)
    found = restored(root, demanding(alice))
    assert found.step == 2
    assert torch.equal(found.state["weight"], weight(2))
    ((step, reason),) = found.skipped
    assert step == 3
    assert alice.public_key.id in reason
    with (
        Checkpointer(root, security=demanding(alice)) as ck,
        pytest.raises(UntrustedError, match=alice.public_key.id),
    ):
        ck.restore({"weight": torch.zeros(8, 8)}, step=3)


def test_what_is_not_trusted_counts_against_max_fallback(tmp_path: Path, alice: Counted) -> None:
    root = tmp_path / "run"
    save(root, signed_by(alice), 1, 2, 3)
    unsigned(root, 3)
    unsigned(root, 2)
    with pytest.raises(RollbackError, match="max_fallback"):
        restored(root, demanding(alice), max_fallback=1)
    assert restored(root, demanding(alice), max_fallback=2).step == 1


def test_another_keys_signature_is_refused(tmp_path: Path, alice: Counted, bob: Counted) -> None:
    root = tmp_path / "run"
    save(root, signed_by(bob), 1)
    with pytest.raises(NoWholeCheckpointError, match=bob.public_key.id):
        restored(root, demanding(alice))


def test_a_signature_that_is_absent_where_commit_pins_one_is_damage(tmp_path: Path, alice: Counted) -> None:
    root = tmp_path / "run"
    save(root, signed_by(alice), 1, 2)
    (folder_of(root, 2) / "signature.json").unlink()
    assert restored(root, demanding(alice)).step == 1
    # Also where nobody asks for signatures: COMMIT says that there is one.
    report = verify(LocalStore(root))
    assert [(problem.key, problem.kind) for problem in report.problems] == [
        (signature_key(commit_of(root, 2).name), "missing")
    ]


def test_nothing_of_an_unsigned_checkpoint_is_parsed(tmp_path: Path, alice: Counted) -> None:
    root = tmp_path / "run"
    save(root, signed_by(alice), 1)
    folder = folder_of(root, 1)
    (folder / "data/MANIFEST.json").write_bytes(b"[" * 100_000)
    unsigned(root, 1)
    with (
        Checkpointer(root, security=demanding(alice)) as ck,
        pytest.raises(UntrustedError),
    ):
        ck.restore(step=1)
    # Without the demand it is the parser that refuses it.
    with (
        Checkpointer(root, security=SecurityPolicy()) as ck,
        pytest.raises(IntegrityError, match=r"nests|JSON|deep"),
    ):
        ck.restore(step=1)


def test_no_keeper_of_keys_is_asked_for_what_is_not_signed(tmp_path: Path, alice: Counted) -> None:
    root, keeper = tmp_path / "run", Keeper()
    seal = Seal(recipients=[keeper])
    save(root, SecurityPolicy(seal=seal, sign=Sign(key=alice)), 1)
    assert restored(root, SecurityPolicy(seal=seal, verify=Verify(keys=[alice.public_key]))).step == 1
    assert len(keeper.unwraps) == 1
    unsigned(root, 1)
    policy = SecurityPolicy(seal=seal, verify=Verify(keys=[alice.public_key]))
    with pytest.raises(NoWholeCheckpointError):
        restored(root, policy)
    with Checkpointer(root, security=policy) as ck, pytest.raises(NoWholeCheckpointError):
        ck.plan_restore()
    report = verify(LocalStore(root), guard=policy.guard)
    assert [problem.kind for problem in report.problems] == ["untrusted"]
    commits = [commit_of(root, 1)]
    change = SetRecipients(recipients=(Keeper("two"),))
    outcome = rotate(
        LocalStore(root), commits, change, identities=[keeper], trust=policy.guard.trust
    ).outcomes[0]
    assert isinstance(outcome.error, UntrustedError)
    assert len(keeper.unwraps) == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is .*unavailable")
def test_a_plain_dcp_reader_refuses_it_too(tmp_path: Path, alice: Counted) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from strongroom.dcp import StrongroomReader

    root = tmp_path / "run"
    save(root, signed_by(alice), 1)
    target = {"weight": torch.zeros(8, 8)}
    dcp.load(target, storage_reader=StrongroomReader(root, security=demanding(alice)), no_dist=True)
    assert torch.equal(target["weight"], weight(1))
    unsigned(root, 1)
    # DCP wraps what a reader raises.
    with pytest.raises(CheckpointException, match="is not trusted"):
        dcp.load(target, storage_reader=StrongroomReader(root, security=demanding(alice)), no_dist=True)


def test_unsafe_allow_unsigned_takes_what_nobody_signed_and_nothing_that_is_wrongly_signed(
    tmp_path: Path, alice: Counted, bob: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    lax = SecurityPolicy(verify=Verify(keys=[alice.public_key], require=False))
    assert isinstance(lax.verify.requirement, UnsafeAllowUnsigned)  # type: ignore[union-attr]
    save(tmp_path / "nobody", None, 1)
    assert restored(tmp_path / "nobody", lax).step == 1
    assert any("UNSAFE" in record.message for record in caplog.records)
    save(tmp_path / "bob", signed_by(bob), 1)
    with pytest.raises(NoWholeCheckpointError):
        restored(tmp_path / "bob", lax)


def test_what_a_policy_signs_it_must_accept(alice: Counted, bob: Counted) -> None:
    with pytest.raises(ConfigError, match=r"\[verify\] keys: .*could not be restored"):
        signed_by(alice, keys=[bob.public_key])


# ----------------------------------------------------------------------------------------- launch records


def test_a_launch_record_is_signed_and_one_that_is_not_ends_the_line(tmp_path: Path, alice: Counted) -> None:
    root = tmp_path / "run"
    save(root, signed_by(alice), 1, 2)
    save(root, signed_by(alice), 3)
    path = root / launch_key(2)
    launch = Launch.decode(path.read_bytes(), "it")
    assert launch.signature is not None
    assert launch.signature.key_id == alice.public_key.id
    # A writer to the storage makes launch 2 go on from step 1, so that step 2 is superseded.
    forged = json.loads(path.read_bytes())
    del forged["~digest"]
    forged["parent"] = commit_of(root, 1).ref.to_json()
    path.write_bytes(with_self_digest(forged))
    history = Catalog(LocalStore(root), demanding(alice).guard.trust).history()
    assert [name.step for name in history.line.newest_first] == [3]
    assert "launch 2" in (history.line.broken or "")
    # The newest stands; below it nothing is taken on a stranger's word.
    assert restored(root, demanding(alice)).step == 3
    shard = folder_of(root, 3) / "data/00000-00.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(NoWholeCheckpointError, match="what is older cannot be told"):
        restored(root, demanding(alice))
    report = verify(LocalStore(root), guard=demanding(alice).guard)
    assert (launch_key(2), "untrusted") in [(problem.key, problem.kind) for problem in report.root_problems]


def test_a_strangers_launch_is_passed_over_as_if_it_had_never_been(
    tmp_path: Path, alice: Counted, bob: Counted
) -> None:
    root = tmp_path / "run"
    save(root, signed_by(alice), 1, 2)
    save(root, None, 3)
    with Checkpointer(root, security=signed_by(bob)) as ck:
        ck.save(4, {"weight": weight(4)}).result(60)
    found = restored(root, demanding(alice))
    assert found.step == 2
    assert [step for step, _ in found.skipped] == [4, 3]
    with Checkpointer(root, security=demanding(alice)) as ck:
        plan = ck.plan_restore()
        assert plan is not None
        assert plan.step == 2
    with pytest.raises(RollbackError, match="max_fallback"):
        restored(root, demanding(alice), max_fallback=1)


# ---------------------------------------------------------------------------------- rollback and freeze


@pytest.fixture(params=("file", "dir"))
def floor(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    (tmp_path / "apart").mkdir()
    return f"file:{tmp_path}/apart/floor.json" if request.param == "file" else f"dir:{tmp_path}/apart"


def test_yesterdays_copy_of_the_root_is_refused_by_who_has_seen_todays(
    tmp_path: Path, alice: Counted, floor: str
) -> None:
    root = tmp_path / "run"
    writer, client = signed_by(alice), demanding(alice, floor=floor)
    save(root, writer, 1, 2)
    shutil.copytree(root, tmp_path / "yesterday")
    save(root, writer, 3)
    assert restored(root, client).step == 3
    shutil.rmtree(root)
    shutil.copytree(tmp_path / "yesterday", root)
    with pytest.raises(RollbackError, match=r"step 2 .*remembers .*step 3"):
        restored(root, demanding(alice, floor=floor))
    # By step, too: a step below the floor is asked for on purpose, or not at all.
    with (
        Checkpointer(root, security=demanding(alice, floor=floor)) as ck,
        pytest.raises(RollbackError),
    ):
        ck.restore(step=1)
    report = verify(LocalStore(root), guard=demanding(alice, floor=floor).guard)
    assert [problem.kind for problem in report.root_problems] == ["rolled back"]
    assert report.verdict == "damaged"
    # Who has not seen today's has no protection, and is told so.
    assert restored(root, demanding(alice)).rollback_protection == "none"


def test_a_writer_remembers_what_it_has_committed(tmp_path: Path, alice: Counted, floor: str) -> None:
    root = tmp_path / "run"
    policy = signed_by(alice, floor=floor)
    save(root, policy, 1)
    shutil.copytree(root, tmp_path / "yesterday")
    save(root, policy, 2)
    shutil.rmtree(root)
    shutil.copytree(tmp_path / "yesterday", root)
    with pytest.raises(RollbackError):
        restored(root, policy)


def test_a_fall_back_below_the_floor_is_refused_and_says_what_was_skipped(
    tmp_path: Path, alice: Counted, floor: str
) -> None:
    root = tmp_path / "run"
    policy = signed_by(alice, floor=floor)
    save(root, policy, 1, 2)
    unsigned(root, 2)
    with pytest.raises(RollbackError, match=r"What is newer was skipped: step 2"):
        restored(root, policy)


def test_going_on_from_an_older_copy_on_purpose_leads_above_the_floor(
    tmp_path: Path, alice: Counted, floor: str
) -> None:
    root = tmp_path / "run"
    policy = signed_by(alice, floor=floor)
    save(root, policy, 1)
    shutil.copytree(root, tmp_path / "yesterday")
    save(root, policy, 2, 3)
    shutil.rmtree(root)
    shutil.copytree(tmp_path / "yesterday", root)
    # Not by saving alone: all of that would lie below the floor.
    with Checkpointer(root, security=policy) as ck, pytest.raises(RollbackError, match="launches up to 1"):
        ck.save(2, {"weight": weight(2)})
    save(root, policy, 2)
    found = restored(root, policy)
    assert (found.step, found.checkpoint.launch) == (2, 3)
    # Launch 2, which the older copy has lost, is claimed too: no record is missing.
    report = verify(LocalStore(root), everything=True, chain=True, guard=policy.guard)
    assert report.verdict == "whole", report.problems


def test_looking_at_an_older_checkpoint_on_purpose_lowers_no_floor(
    tmp_path: Path, alice: Counted, floor: str
) -> None:
    root = tmp_path / "run"
    policy = signed_by(alice, floor=floor)
    save(root, policy, 1)
    shutil.copytree(root, tmp_path / "yesterday")
    save(root, policy, 2)
    with Checkpointer(root, security=policy) as ck:
        found = ck.restore({"weight": torch.zeros(8, 8)}, step=1, accept_older=True)
        assert found is not None
    shutil.rmtree(root)
    shutil.copytree(tmp_path / "yesterday", root)
    with pytest.raises(RollbackError):
        restored(root, policy)


@pytest.mark.parametrize("all_of_it", (True, False), ids=("everything", "the checkpoints"))
def test_an_emptied_root_is_no_new_one(all_of_it: bool, tmp_path: Path, alice: Counted, floor: str) -> None:
    root, other = tmp_path / "run", tmp_path / "other"
    policy = signed_by(alice, floor=floor)
    save(root, policy, 1, 2)
    save(other, signed_by(alice), 7)
    for path in list(root.iterdir()):
        if all_of_it or path.name.startswith("step-"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(RollbackError, match="were taken away"):
        restored(root, policy)
    with pytest.raises(RollbackError, match="were taken away"):
        restored(root, policy, init_from=other)
    # Nor is it by whoever saves without looking; and nothing is written there.
    with Checkpointer(root, security=policy) as ck, pytest.raises(RollbackError):
        ck.save(1, {"weight": weight(1)})
    assert (root / "run.json").exists() is not all_of_it
    report = verify(LocalStore(root), guard=policy.guard)
    assert "rolled back" in [problem.kind for problem in report.root_problems]
    with Checkpointer(root, security=policy) as ck:
        assert ck.restore({"weight": torch.zeros(8, 8)}, accept_older=True) is None
        ck.save(1, {"weight": weight(1)}).result(60)


def test_without_a_floor_launch_records_still_tell_of_checkpoints_that_are_gone(tmp_path: Path) -> None:
    root = tmp_path / "run"
    save(root, None, 1)
    save(root, None, 2)
    for path in root.glob("step-*"):
        shutil.rmtree(path)
    with pytest.raises(RollbackError, match="launch 2 went on from step 1"):
        restored(root, SecurityPolicy())


def test_a_floor_that_cannot_be_written_is_told_and_stops_nothing(
    tmp_path: Path, alice: Counted, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    policy = signed_by(alice, floor=f"file:{tmp_path}/floor.json")
    save(root, policy, 1)

    def full(*_: object, **__: object) -> None:
        raise StoreFullError("no space left")

    assert policy.guard.floor is not None
    monkeypatch.setattr(type(policy.guard.floor), "lift", full)
    save(root, policy, 2)
    assert restored(root, policy).step == 2
    told = [record.message for record in caplog.records if "could not be told of step 2" in record.message]
    assert len(told) == 2
    assert all("no space left" in message for message in told)


@pytest.mark.parametrize("kind", ("file", "dir"))
def test_a_floor_inside_its_own_root_is_refused_before_anything_is_saved(
    kind: str, tmp_path: Path, alice: Counted
) -> None:
    root = tmp_path / "run"
    root.mkdir()
    floor = f"file:{root}/floor.json" if kind == "file" else f"dir:{root}"
    with (
        Checkpointer(root, security=signed_by(alice, floor=floor)) as ck,
        pytest.raises(ConfigError, match="lies inside"),
    ):
        ck.save(1, {"weight": weight(1)})
    assert not list(root.iterdir())


def planted(root: Path, step: int, launch: int) -> None:
    """A checkpoint as anyone makes it who can create files."""
    folder = root / f"step-{step:012d}-{launch:04d}-{'ab' * 8}"
    (folder / "data").mkdir(parents=True)
    (folder / "data/MANIFEST.json").write_bytes(b"{}")
    commit = json.loads((folder_of(root, 1) / "COMMIT").read_bytes())
    del commit["~digest"]
    commit |= {
        "attempt": "ab" * 8, "launch": launch, "manifest": str(sha256_of(b"{}")), "signature": None,
        "step": step,
    }  # fmt: skip
    (folder / "COMMIT").write_bytes(with_self_digest(commit))


def test_planted_checkpoints_make_retention_remove_none_of_the_true_ones(
    tmp_path: Path, alice: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    with Checkpointer(root, security=signed_by(alice), keep=KeepLast(count=3)) as ck:
        for step in (1, 2, 3):
            ck.save(step, {"weight": weight(step)}).result(60)
        ck.wait()
        for step in (901, 902, 903):
            planted(root, step, 1)
        ck.save(4, {"weight": weight(4)}).result(60)
        ck.wait()
    assert sorted(int(path.name[5:17]) for path in root.glob("step-*")) == [2, 3, 4, 901, 902, 903]
    assert sum("counts for nothing in retention" in record.message for record in caplog.records) == 3


def test_what_was_committed_just_now_stays_whatever_claims_to_be_newer(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with Checkpointer(root, keep=KeepLast(count=1)) as ck:
        ck.save(1, {"weight": weight(1)}).result(60)
        ck.wait()
        planted(root, 901, 1)
        ck.save(2, {"weight": weight(2)}).result(60)
        ck.wait()
    assert 2 in [int(path.name[5:17]) for path in root.glob("step-*")]


def test_a_planted_newest_hides_no_rollback_from_verify(tmp_path: Path, alice: Counted, floor: str) -> None:
    root = tmp_path / "run"
    policy = signed_by(alice, floor=floor)
    save(root, policy, 1)
    shutil.copytree(root, tmp_path / "yesterday")
    save(root, policy, 2)
    shutil.rmtree(root)
    shutil.copytree(tmp_path / "yesterday", root)
    planted(root, 999_999, 1)
    report = verify(LocalStore(root), step=1, guard=policy.guard)
    assert sorted(problem.kind for problem in report.root_problems) == ["rolled back", "untrusted"]


@pytest.mark.filterwarnings("ignore:torch.distributed is .*unavailable")
def test_a_plain_dcp_writer_goes_on_from_no_planted_parent(tmp_path: Path, alice: Counted) -> None:
    import torch.distributed.checkpoint as dcp

    from strongroom.dcp import StrongroomWriter

    root = tmp_path / "run"
    save(root, signed_by(alice), 1)
    planted(root, 901, 1)
    writer = StrongroomWriter(root, step=2, security=signed_by(alice))
    dcp.save({"weight": weight(2)}, storage_writer=writer, no_dist=True)
    launch = Launch.decode((root / launch_key(2)).read_bytes(), "it")
    assert launch.parent == commit_of(root, 1).ref


def test_a_rewind_that_was_asked_for_goes_on_above_the_floor(
    tmp_path: Path, alice: Counted, floor: str
) -> None:
    root = tmp_path / "run"
    policy = signed_by(alice, floor=floor)
    save(root, policy, 1, 2, 3)
    with Checkpointer(root, security=policy) as ck:
        restored_at = ck.restore({"weight": torch.zeros(8, 8)}, step=1, accept_older=True)
        assert restored_at is not None
        ck.save(2, {"weight": weight(20)}).result(60)
    found = restored(root, policy)
    assert found.step == 2
    assert torch.equal(found.state["weight"], weight(20))


def test_another_checkpoint_at_the_same_position_is_named_for_what_it_is(
    tmp_path: Path, alice: Counted, floor: str
) -> None:
    root = tmp_path / "run"
    policy = signed_by(alice)
    save(root, policy, 1)
    shutil.copytree(root, tmp_path / "other")
    save(root, policy, 2)
    save(tmp_path / "other", policy, 2)
    client = demanding(alice, floor=floor)
    assert restored(root, client).step == 2
    shutil.rmtree(root)
    shutil.copytree(tmp_path / "other", root)
    with pytest.raises(RollbackError, match="equivocation"):
        restored(root, demanding(alice, floor=floor))


def test_the_root_of_another_run_by_the_same_signer_is_refused(
    tmp_path: Path, alice: Counted, floor: str
) -> None:
    root, other = tmp_path / "run", tmp_path / "other"
    save(root, signed_by(alice), 1, run_id="mine")
    save(other, signed_by(alice), 1, 2, 3, run_id="theirs")
    assert restored(root, demanding(alice, floor=floor)).step == 1
    shutil.rmtree(root)
    shutil.copytree(other, root)
    # Remembered ...
    with pytest.raises(RollbackError, match=r"theirs.*mine|mine.*theirs"):
        restored(root, demanding(alice, floor=floor))
    # ... or given, with no floor at all.
    with pytest.raises(ConfigError, match="holds run theirs, and run_id='mine' was given"):
        restored(root, demanding(alice), run_id="mine")


def test_what_a_restore_could_not_finish_lifts_no_floor(tmp_path: Path, alice: Counted, floor: str) -> None:
    root = tmp_path / "run"
    save(root, signed_by(alice), 1, 2)
    shard = folder_of(root, 2) / "data/00000-00.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    # Signed as it is, step 2 is damaged: the floor is where step 1 was found whole.
    assert restored(root, demanding(alice, floor=floor)).step == 1
    assert restored(root, demanding(alice, floor=floor)).step == 1


# ------------------------------------------------------------------------------------------- the chain


def test_a_chain_is_walked_and_an_absent_parent_is_told_from_one_that_differs(
    tmp_path: Path, alice: Counted
) -> None:
    root = tmp_path / "run"
    policy = signed_by(alice)
    save(root, policy, 1, 2, 3)
    save(root, policy, 4)
    store = LocalStore(root)

    def states(guard: Guard) -> list[tuple[int, str]]:
        return [(link.name.step, link.state) for link in walk(store, Catalog(store).history(), guard)]

    assert states(policy.guard) == [(4, "linked"), (3, "linked"), (2, "linked"), (1, "linked")]
    links = walk(store, Catalog(store).history(), policy.guard)
    assert all(link.signers == (alice.public_key.id,) for link in links)

    shutil.copytree(root, tmp_path / "kept")
    shutil.rmtree(folder_of(root, 2))
    assert states(policy.guard) == [(4, "linked"), (3, "linked"), (2, "absent"), (1, "gap")]
    report = verify(store, chain=True, guard=policy.guard)
    assert report.verdict == "whole"
    assert [link.state for link in report.chain or ()] == ["linked", "linked", "absent", "gap"]

    # Another checkpoint, by the same signer, in the place of step 3.
    save(tmp_path / "elsewhere", policy, 3)
    manifest = (folder_of(tmp_path / "elsewhere", 3) / "data/MANIFEST.json").read_bytes()
    (folder_of(root, 3) / "data/MANIFEST.json").write_bytes(manifest)
    recommitted(root, 3)
    assert states(NO_GUARD)[:2] == [(4, "linked"), (3, "differs")]
    report = verify(store, chain=True)
    assert report.verdict == "damaged"
    assert any("the chain breaks here" in problem.message for problem in report.root_problems)


def test_retention_leaves_a_chain_that_is_whole_as_far_as_it_goes(tmp_path: Path, alice: Counted) -> None:
    root = tmp_path / "run"
    save(root, signed_by(alice), 1, 2, 3, 4, keep=KeepLast(count=2))
    report = verify(LocalStore(root), chain=True, everything=True, guard=demanding(alice).guard)
    assert report.verdict == "whole"
    assert [link.state for link in report.chain or ()] == ["linked", "linked", "absent"]


# ------------------------------------------------------------------------------------- further signatures


def test_a_threshold_is_met_by_a_signature_that_is_added(
    tmp_path: Path, alice: Counted, bob: Counted
) -> None:
    root = tmp_path / "run"
    store = LocalStore(root)
    save(root, signed_by(alice), 1)
    both = SecurityPolicy(verify=Verify(requirement=Threshold(2, [alice.public_key, bob.public_key])))
    with pytest.raises(NoWholeCheckpointError, match=bob.public_key.id):
        restored(root, both)
    trust = both.guard.trust
    assert isinstance(trust, ManifestTrust)
    added = add_signature(store, commit_of(root, 1), bob, within_s=30, trust=trust)
    assert (added.is_new, added.missing) == (True, None)
    assert added.key.endswith(f"signatures/{bob.public_key.id}.json")
    assert restored(root, both).step == 1
    every = AllOf(RequireSigner([alice.public_key]), RequireSigner([bob.public_key]))
    report = verify(store, guard=SecurityPolicy(verify=Verify(requirement=every)).guard)
    assert report.verdict == "whole"
    assert set(report.checkpoints[0].signers) == {alice.public_key.id, bob.public_key.id}
    again = add_signature(store, commit_of(root, 1), bob, within_s=30)
    assert not again.is_new


def test_nobody_is_led_to_sign_what_nobody_trusted_made(tmp_path: Path, alice: Counted, bob: Counted) -> None:
    root, keeper = tmp_path / "run", Keeper()
    seal = Seal(recipients=[keeper])
    save(root, SecurityPolicy(seal=seal), 1)
    either = SecurityPolicy(seal=seal, verify=Verify(keys=[alice.public_key, bob.public_key]))
    trust = either.guard.trust
    assert isinstance(trust, ManifestTrust)
    store, commit = LocalStore(root), commit_of(root, 1)
    with pytest.raises(UntrustedError, match="--unsigned"):
        add_signature(store, commit, bob, within_s=30, sealing=either.sealing, trust=trust)
    assert (bob.count, keeper.unwraps) == (0, [])
    added = add_signature(
        store, commit, bob, within_s=30, sealing=either.sealing, trust=trust, is_unsigned=True
    )
    assert added.missing is None
    # A signature that COMMIT pins and that is wrong is nobody's to sign beside.
    save(tmp_path / "other", signed_by(alice), 1)
    path = folder_of(tmp_path / "other", 1) / "signature.json"
    path.write_bytes(path.read_bytes().replace(b'"sig":"', b'"sig":"MA'))
    recommitted(tmp_path / "other", 1)
    with pytest.raises(IntegrityError):
        add_signature(
            LocalStore(tmp_path / "other"), commit_of(tmp_path / "other", 1), bob, within_s=30, trust=trust
        )


def test_what_is_damaged_gets_no_signature(tmp_path: Path, alice: Counted, bob: Counted) -> None:
    root = tmp_path / "run"
    save(root, signed_by(alice), 1)
    shard = folder_of(root, 1) / "data/00000-00.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(IntegrityError, match="is not signed, because it is not whole"):
        add_signature(LocalStore(root), commit_of(root, 1), bob, within_s=30)
    assert not (folder_of(root, 1) / "signatures").exists()
    assert bob.count == 0


def test_a_run_from_before_it_was_signed_can_be_signed_afterwards(tmp_path: Path, alice: Counted) -> None:
    root = tmp_path / "run"
    save(root, None, 1)
    # Its launch was signed by nobody, and that record stands for ever; its checkpoint can be.
    add_signature(LocalStore(root), commit_of(root, 1), alice, within_s=30)
    assert restored(root, demanding(alice)).step == 1


def test_launches_from_before_a_run_was_signed_can_be_named(tmp_path: Path, alice: Counted) -> None:
    root, store = tmp_path / "run", LocalStore(tmp_path / "run")
    save(root, None, 1, 2)
    for step in (1, 2):
        add_signature(store, commit_of(root, step), alice, within_s=30)
    save(root, signed_by(alice), 3)
    report = verify(store, everything=True, chain=True, guard=demanding(alice).guard)
    assert report.verdict == "damaged"
    assert any("unsigned_launches" in problem.message for problem in report.problems)
    named = demanding(alice, unsigned_launches=[1])
    report = verify(store, everything=True, chain=True, guard=named.guard)
    assert report.verdict == "whole", report.problems
    unsigned(root, 3)
    assert restored(root, named).step == 2
    with pytest.raises(ConfigError, match="unsigned_launches"):
        demanding(alice, unsigned_launches=["1"])


def test_what_demands_signatures_and_makes_none_saves_nothing(tmp_path: Path, alice: Counted) -> None:
    root = tmp_path / "run"
    with (
        Checkpointer(root, security=demanding(alice)) as ck,
        pytest.raises(ConfigError, match=r"give it \[sign\]"),
    ):
        ck.save(1, {"weight": weight(1)})
    assert not root.exists()
    save(root, demanding(alice, require=False), 1)


@pytest.mark.parametrize("how", ("revoked", "expired"))
def test_a_key_that_has_ended_signs_no_more(
    how: str, tmp_path: Path, alice: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strongroom_security import verify as section
    from strongroom_security.trustlist import Revocation, TrustedKey, TrustList, sign_trust_list

    roots = Counted(tmp_path / "root.pem")
    revoked = ()
    if how == "revoked":
        revoked = (Revocation(id=alice.public_key.id, reason="stolen", revoked_at_ms=5, up_to=()),)
    good_until = 2**45 if how == "expired" else None
    key = TrustedKey(key=alice.public_key, name="alice", not_before_ms=None, not_after_ms=good_until)
    listed = TrustList(version=1, issued_at_ms=1, expires_at_ms=None, keys=(key,), revoked=revoked)
    (tmp_path / "trust.json").write_bytes(sign_trust_list(listed, [roots]))

    def policy() -> SecurityPolicy:
        return signed_by(alice, trust=tmp_path / "trust.json", trust_keys=[roots.public_key])

    if how == "expired":
        # While it is good it signs; and it stops in the middle of a run.
        with Checkpointer(tmp_path / "run", security=policy()) as ck:
            ck.save(1, {"weight": weight(1)}).result(60)
            later = Clock(now_ns=lambda: 2**45 * 1_000_000, monotonic=SYSTEM_CLOCK.monotonic)
            monkeypatch.setattr(section, "SYSTEM_CLOCK", later)
            with pytest.raises(SaveError, match=r"must not sign any more.*expired"):
                ck.save(2, {"weight": weight(2)}).result(60)
    with pytest.raises(ConfigError, match=r"must not sign any more.*(stolen|expired)"):
        policy()


def test_a_stranger_in_the_place_of_a_signature_is_named(
    tmp_path: Path, alice: Counted, bob: Counted
) -> None:
    root = tmp_path / "run"
    save(root, signed_by(alice), 1)
    place = folder_of(root, 1) / "signatures"
    place.mkdir()
    shutil.copy(folder_of(root, 1) / "signature.json", place / f"{bob.public_key.id}.json")
    with pytest.raises(IntegrityError, match="not that key's signature"):
        add_signature(LocalStore(root), commit_of(root, 1), bob, within_s=30)


# ------------------------------------------------------------------------------------------------ storage


@pytest.mark.parametrize("what", ("signature.json", "signatures/{id}.json"))
def test_flipping_any_bit_of_a_signature_is_found(what: str, tmp_path: Path, alice: Counted) -> None:
    root = tmp_path / "run"
    save(root, signed_by(alice), 1)
    folder = folder_of(root, 1)
    path = folder / what.format(id=alice.public_key.id)
    if what != "signature.json":
        path.parent.mkdir()
        (folder / "signature.json").rename(path)
        recommitted(root, 1)
    whole = path.read_bytes()
    for position in range(0, len(whole), 97):
        changed = bytearray(whole)
        changed[position] ^= 1
        path.write_bytes(changed)
        if what == "signature.json":
            recommitted(root, 1)
        with Checkpointer(root, security=demanding(alice)) as ck, pytest.raises(StrongroomError):
            ck.restore(step=1)
    path.write_bytes(whole)
    if what == "signature.json":
        recommitted(root, 1)
    assert restored(root, demanding(alice)).step == 1
