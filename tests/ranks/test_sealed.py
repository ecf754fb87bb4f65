"""Sealed checkpoints of many ranks: one rank talks to the keepers of keys, and no key is seen on the way."""

from __future__ import annotations

import base64
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import agreement_jobs
import layout_jobs
import model_jobs
import pytest
import sealed_jobs as jobs
import state_jobs
import torch
from crews import Crews
from fault_jobs import RAISED, Fault, go_on, save_steps, saving
from launching import Launcher
from layout_jobs import PLAIN, Layout
from sealed_jobs import under

from strongroom import Checkpointer, IntegrityError
from strongroom.stores.local import LocalStore
from strongroom.verify import verify
from strongroom_security import SecurityPolicy
from strongroom_security.recipients.file import create_key_file

RANKS = 4


def make_policy(folder: Path) -> Path:
    """A policy file with its key."""
    folder.mkdir(exist_ok=True)
    create_key_file(folder / "kek.key")
    path = folder / "strongroom.toml"
    path.write_text('[seal]\nrecipients = ["file:kek.key"]\n')
    return path


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def sharded(crews: Crews, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with two sealed checkpoints of four ranks, to be copied."""
    root = tmp_path_factory.mktemp("sharded") / "run"
    crews.run(under, policy, jobs.save_sharded, root, [1, 2], ranks=RANKS)
    return root


@pytest.fixture
def root(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "run"))


def check_sealed(root: Path, policy: Path) -> None:
    """Every file is, and every checkpoint is whole."""
    data = [path for path in root.glob("step-*/data/*") if path.name != "MANIFEST.json"]
    assert data
    assert all(path.name.endswith(".floe") for path in data)
    report = verify(LocalStore(root), everything=True, guard=SecurityPolicy.load(policy).guard)
    assert report.verdict == "whole", report.problems
    assert not any(checkpoint.is_closed for checkpoint in report.checkpoints)


def files_of(root: Path, step: int) -> Path:
    (found,) = root.glob(f"step-{step:012d}-*")
    return found / "data"


# Everything comes back


def test_a_run_moves_from_4_to_2_to_1_to_3_ranks(
    crews: Crews, fsdp2_on_cpus: None, policy: Path, tmp_path: Path
) -> None:
    crews.run(under, policy, model_jobs.save_truth, tmp_path, ranks=1)
    step = 2
    for ranks, style, more in (
        (4, "fsdp", 1),
        (2, "ddp", 1),
        (1, "plain", 1),
        (3, "fsdp", 0),
        (4, "hsdp", 0),
    ):
        step += more
        wrong = crews.run(
            under, policy, model_jobs.pass_on, tmp_path, tmp_path, style, step, more=more, ranks=ranks
        )
        assert wrong == [[]] * ranks, f"{style} on {ranks} ranks"
    check_sealed(tmp_path, policy)


TENSORS = {
    "rows": ((8, 4), torch.float32),
    "grid": ((6, 5), torch.bfloat16),
    "plain": ((7,), torch.int64),
    "empty": ((0, 3), torch.float32),
    "replicas": ((5, 3), torch.float32),
}
LAYOUTS = {
    "rows": Layout((4,), "0"),
    "grid": Layout((2, 2), "01"),
    "plain": PLAIN,
    "empty": Layout((4,), "0"),
    "replicas": Layout((4,), "R"),
}


def test_tensors_of_many_layouts_are_laid_out_anew_for_other_numbers_of_ranks(
    crews: Crews, policy: Path, tmp_path: Path
) -> None:
    other = {
        **LAYOUTS,
        "rows": Layout((2, 2), "10"),
        "grid": Layout((4,), "1"),
        "replicas": Layout((4,), "0"),
    }
    wrong = crews.run(
        under, policy, layout_jobs.move_tensors, tmp_path, TENSORS, LAYOUTS, LAYOUTS, other, ranks=RANKS
    )
    assert wrong == [[]] * RANKS
    for ranks in (2, 1, 3):
        line = dict.fromkeys(TENSORS, Layout((ranks,), "0"))
        found = crews.run(under, policy, layout_jobs.load_tensors, tmp_path, TENSORS, line, ranks=ranks)
        assert found == [[]] * ranks
    check_sealed(tmp_path, policy)


def test_replicas_under_ddp_are_sealed_by_the_ranks_that_store_them(
    crews: Crews, policy: Path, tmp_path: Path
) -> None:
    assert crews.run(under, policy, jobs.move_replicas, tmp_path, ranks=RANKS) == [[]] * RANKS
    assert {path.name[:5] for path in tmp_path.glob("step-*/data/0*.floe")} > {"00000"}
    check_sealed(tmp_path, policy)


def test_each_rank_gets_its_own_values_back(crews: Crews, policy: Path, tmp_path: Path) -> None:
    crews.run(under, policy, state_jobs.save_own, tmp_path, ranks=RANKS)
    for ranks in (4, 2):
        found = crews.run(under, policy, state_jobs.load_own, tmp_path, ranks=ranks)
        assert [one["position"] for one in found] == [10 * rank for rank in range(ranks)]
        assert [one["deep"] for one in found] == [[f"rank {rank}", 5] for rank in range(ranks)]
        assert [one["seed"] for one in found] == list(range(ranks))
    names = {path.name for path in tmp_path.glob("step-*/data/state-*")}
    assert names == {f"state-{rank:05d}.json.floe" for rank in range(RANKS)}
    check_sealed(tmp_path, policy)


def test_another_ranks_values_may_stand_in(crews: Crews, policy: Path, tmp_path: Path) -> None:
    crews.run(under, policy, state_jobs.save_own, tmp_path, ranks=2)
    found = crews.run(under, policy, state_jobs.load_with_a_stand_in, tmp_path, ranks=RANKS)
    assert [one["position"] for one in found] == [0, 10, 0, 0]
    assert [one["seed"] for one in found] == [0, 1, 0, 0]


def test_a_hundredth_of_the_rows_of_a_large_tensor_costs_two_segments(
    crews: Crews, policy: Path, tmp_path: Path
) -> None:
    crews.run(under, policy, jobs.save_large, tmp_path, ranks=1)
    bounds = [0, 2000, 2041, 2041, 4096]
    found = crews.run(under, policy, jobs.load_rows, tmp_path, bounds, ranks=RANKS)
    assert all(is_right for _, is_right in found)
    read = [count for count, _ in found]
    assert 41 * 4096 < read[1] <= 2 << 20
    assert read[2] == 0
    assert sum(read) < 20 << 20


# The keepers of keys


def test_one_rank_asks_each_recipient_once_a_save_and_one_identity_once_a_restore(
    crews: Crews, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    assert crews.run(jobs.calls_to_keepers, tmp_path / "run", log, ranks=RANKS) == [[]] * RANKS
    assert sorted(log.read_text().splitlines()) == [
        "unwrap keeper:one step 1 by rank 0",
        "unwrap keeper:one step 2 by rank 0",
        "wrap keeper:one step 1 by rank 0",
        "wrap keeper:one step 2 by rank 0",
        "wrap keeper:two step 1 by rank 0",
        "wrap keeper:two step 2 by rank 0",
    ]


@pytest.mark.parametrize(("kind", "error"), (("down", "KeyServiceError"), ("denied", "NoKeyError")))
def test_a_keeper_that_fails_fails_all_ranks_alike_and_the_next_save_works(
    crews: Crews, tmp_path: Path, kind: str, error: str
) -> None:
    log, root = tmp_path / "log", tmp_path / "run"
    outcomes = crews.run(jobs.keepers_that_fail, root, kind, log, ranks=RANKS)
    for rank, (first, second, failed, denied, restored, saved) in enumerate(outcomes):
        assert (first.step, second.step) == (1, 2)
        assert (failed.error, denied.error) == (error, error)
        assert "SaveError" in failed.bases
        for told in (failed, denied):
            assert f"keeper:one is {kind}" in told.text
            assert ("rank 0 (" in told.text) == (rank != 0)
        # Once it is back: the same checkpoint as before, and no other was made or passed over.
        assert (restored.step, saved.step) == (2, 4)
    assert sorted(path.name[:17] for path in root.glob("step-*")) == [
        f"step-{step:012d}" for step in (1, 2, 4)
    ]
    assert {line.rpartition(" by ")[2] for line in log.read_text().splitlines()} == {"rank 0"}


def test_a_keeper_that_never_answers_is_told_to_all_ranks_in_time(crews: Crews, tmp_path: Path) -> None:
    """By the ranks' own deadline no rank is taken to be missing that only waits for a keeper."""
    outcomes = crews.run(jobs.keeper_that_hangs, tmp_path / "run", tmp_path / "log", ranks=RANKS)
    for closed, failed, restored, saved in outcomes:
        for told in (closed, failed):
            assert told.error == "KeyServiceError", told
            assert "keeper:one did not answer in time" in told.text
        assert (restored.step, saved.step) == (1, 3)
    assert sorted(path.name[:17] for path in (tmp_path / "run").glob("step-*")) == [
        "step-000000000001",
        "step-000000000003",
    ]


@pytest.mark.parametrize(
    ("without", "saving", "opening"),
    (
        (2, r"rank 0 seals.* and rank 2 does not seal", "rank 2 ("),
        (
            0,
            r"rank 0 does not seal and ranks 1, 2, 3 seal",
            "rank 0, which opens it for all ranks, has no policy",
        ),
    ),
)
def test_a_rank_without_the_policy_is_an_error_that_names_it(
    without: int, saving: str, opening: str, crews: Crews, root: Path, policy: Path
) -> None:
    outcomes = crews.run(jobs.with_another_policy, root, policy, without, None, ranks=RANKS)
    for rank, (saved, *restored) in enumerate(outcomes):
        assert saved.error == "ConfigError", saved
        assert re.search(saving, saved.text), saved
        for told in restored:
            assert told.error == "NoKeyError", told
            assert ("no policy here says how to open it" if rank == without else opening) in told.text
    assert len(list(root.glob("step-*"))) == 2


def test_a_rank_that_seals_to_somebody_else_is_an_error_that_names_it(
    crews: Crews, root: Path, policy: Path, tmp_path: Path
) -> None:
    other = make_policy(tmp_path / "elsewhere")
    for saved, *_ in crews.run(jobs.with_another_policy, root, policy, 2, other, ranks=RANKS):
        assert saved.error == "ConfigError", saved
        assert re.search(r"rank 0 seals.* and rank 2 seals", saved.text), saved
    assert len(list(root.glob("step-*"))) == 2


# Who has which key


@pytest.mark.parametrize("ranks", (4, 2))
def test_a_rank_is_handed_the_keys_of_what_it_reads_and_no_others(
    ranks: int, crews: Crews, root: Path, policy: Path
) -> None:
    documents = ["index.safetensors.floe", "state.json.floe"]
    found = crews.run(jobs.keys_and_reads, root, policy, "rows", ranks=ranks)
    shards = [[f"{rank:05d}-00.safetensors.floe"] for rank in range(4)]
    if ranks == 2:
        shards = [shards[0] + shards[1], shards[2] + shards[3]]
    assert found[0][0] == []  # it has unlocked them
    for rank in range(1, ranks):
        held, read, handed = found[rank]
        assert held == read == sorted([*documents, f"state-{rank:05d}.json.floe", *shards[rank]])
        assert handed == []
    own = [[*documents, f"state-{rank:05d}.json.floe"] for rank in range(1, ranks)]
    assert found[0][2] == [*map(sorted, own), *shards[1:]]


def test_a_rank_that_reads_no_shard_is_handed_no_shard_s_key(crews: Crews, root: Path, policy: Path) -> None:
    found = crews.run(jobs.keys_and_reads, root, policy, "nothing that is there", ranks=RANKS)
    for rank in range(1, RANKS):
        assert found[rank][0] == ["index.safetensors.floe", f"state-{rank:05d}.json.floe", "state.json.floe"]


def test_no_key_crosses_the_network_in_clear(crews: Crews, tmp_path: Path, policy: Path) -> None:
    """All that is said between the ranks, against every key that any of them ever held."""
    found = crews.run(jobs.what_is_said, tmp_path / "run", policy, ranks=RANKS)
    said = b"\n".join(value for sent, _, _ in found for value in sent)
    keys = set().union(*(secrets for _, secrets, _ in found))
    sealed = [blob for _, _, handed in found for blob in handed]
    # Three ranks hand their keys over; each is handed keys twice, for documents and shards.
    assert len(sealed) == 3 + 3 * 2
    assert all(blob in said for blob in sealed)
    assert len(keys) > 20
    for key in keys:
        for start in range(0, len(key) - 11, 4):
            part = key[start : start + 12]
            if len(set(part)) < 6:
                continue
            assert part not in said
            assert part.hex().encode() not in said
            for shift in range(3):
                assert base64.b64encode(bytes(shift) + part)[4:-4] not in said


# Faults


def test_a_rank_that_is_killed_leaves_no_commit_and_the_next_save_works(
    launcher: Launcher, crews: Crews, policy: Path, tmp_path: Path
) -> None:
    crews.run(under, policy, save_steps, tmp_path / "first", [1], ranks=RANKS)
    places = {
        "writing a shard": (2, r"open_writer step-\d+-\d+-\w+/data/\d+-\d+\.safetensors\.floe"),
        "before the keyring": (0, r"put step-\d+-\d+-\w+/data/MANIFEST\.json, after"),
        "after the keyring": (0, r"put step-\d+-\d+-\w+/keyring/0001\.json, after"),
    }
    started = {}
    for name, (rank, place) in places.items():
        root = Path(shutil.copytree(tmp_path / "first", tmp_path / name.replace(" ", "-")))
        fault = Fault(kind="killed", place=place, rank=rank)
        started[name] = root, rank, launcher.start(under, policy, saving, root, [fault], 2.0, ranks=RANKS)
    for root, rank, job in started.values():
        assert job.wait([rank])[rank].exit_code == -signal.SIGKILL
        for outcome in job.wait([other for other in range(RANKS) if other != rank]).values():
            assert outcome.error is None, outcome.error
            (told,) = outcome.value
            assert (told.error, told.ranks) == ("RanksMissingError", (rank,)), told
        job.kill()
        assert not list(root.glob("step-000000000002-*/COMMIT"))
        left = [path for path in root.rglob("data/*") if path.name != "MANIFEST.json"]
        assert all(path.name.endswith(".floe") for path in left)
        assert crews.run(under, policy, go_on, root, ranks=RANKS) == [([1], 1, True, 9)] * RANKS


def test_a_rank_that_fails_fails_the_save_and_the_next_one_works(
    crews: Crews, policy: Path, tmp_path: Path
) -> None:
    crews.run(under, policy, save_steps, tmp_path, [1], ranks=RANKS)
    fault = Fault(kind="raises", place="staging", rank=2)
    for rank, (failed, saved, closed) in enumerate(
        crews.run(under, policy, saving, tmp_path, [fault], 5.0, ranks=RANKS)
    ):
        assert RAISED in failed.text
        assert ("rank 2 (" in failed.text) == (rank != 2)
        assert saved.step == 3, saved
        assert closed.error is None
    check_sealed(tmp_path, policy)


def test_values_that_differ_between_ranks_are_named_and_nothing_is_committed(
    crews: Crews, policy: Path, tmp_path: Path
) -> None:
    outcomes = crews.run(under, policy, agreement_jobs.values_that_differ, tmp_path, "number", ranks=RANKS)
    for first, then in outcomes:
        assert first.error == "RanksDisagreeError"
        assert "rank 2 and rank 0 hold different values" in first.text
        assert then.step == 2
    check_sealed(tmp_path, policy)


# Damage


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def exchange(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    assert len(first) == len(second)
    one.write_bytes(second)
    other.write_bytes(first)


DAMAGE: dict[str, Any] = {
    "one bit of rank 3's shard": (
        lambda data: flip(data / "00003-00.safetensors.floe"),
        r"00003-00.safetensors of step 2",
    ),
    "two ranks' shards exchanged": (
        lambda data: exchange(data / "00001-00.safetensors.floe", data / "00002-00.safetensors.floe"),
        r"0000[12]-00.safetensors of step 2 .* does not begin with the header",
    ),
    "two ranks' segments exchanged": (
        lambda data: exchange_bodies(data / "00001-00.safetensors.floe", data / "00002-00.safetensors.floe"),
        r"0000[12]-00.safetensors of step 2 .*segment 0 \(of 0 to 0\) is not what was sealed there",
    ),
    "two ranks' own values exchanged": (
        lambda data: exchange(data / "state-00001.json.floe", data / "state-00002.json.floe"),
        r"state-0000[12].json of step 2 .*stored digest",
    ),
    "the keyring cut short": (
        lambda data: (data.parent / "keyring/0001.json").write_bytes(b"{}"),
        "keyring 1 of step 2 .*the commit pins",
    ),
}


def exchange_bodies(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(first[:74] + second[74:])
    other.write_bytes(second[:74] + first[74:])


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_one_rank_finds_damaged_makes_all_go_back_and_say_why(
    damage: str, crews: Crews, root: Path, policy: Path
) -> None:
    harm, words = DAMAGE[damage]
    harm(files_of(root, 2))
    for step, skipped, wrong in crews.run(under, policy, jobs.load_sharded, root, ranks=RANKS):
        assert (step, wrong) == (1, [])
        ((newer, reason),) = skipped
        assert newer == 2
        assert re.search(words, reason), reason
    if "own values" not in damage:  # which one rank that comes later does not read
        with pytest.raises(IntegrityError, match=words):
            Checkpointer(root, security=policy).restore(step=2)
    report = verify(LocalStore(root), step=2, guard=SecurityPolicy.load(policy).guard)
    assert report.verdict == "damaged"
