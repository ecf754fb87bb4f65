"""SIGKILL at every step of a copy: the next process goes on, sends nothing twice, and both tiers agree."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import replication_children as children
import torch
from replication_runs import name_of, save, steps_of
from replication_stores import Watched, WatchedBucket

from strongroom import Checkpointer
from strongroom.layout import COMMIT, DATA
from strongroom.replication import Target, known_targets, replicate
from strongroom.stores.local import LocalStore
from strongroom.verify import verify
from strongroom_cli.main import main
from strongroom_security import SecurityPolicy

sys.path.insert(0, str(Path(__file__).parent.parent / "stores"))

from s3_servers import S3Server, moto_s3

__all__ = ["moto_s3"]

WAIT_S = 60

Run = Callable[..., tuple[int, list[Any]]]


@pytest.fixture(scope="module")
def nursery() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch", "strongroom.checkpointer", "replication_children"])
    return context


@pytest.fixture
def run(nursery: Any) -> Iterator[Run]:
    """Runs ``job(*arguments, pipe)`` in a process of its own: how it ended, and what it said."""
    begun = []

    def go(job: Callable[..., None], *arguments: Any) -> tuple[int, list[Any]]:
        ours, theirs = nursery.Pipe()
        process = nursery.Process(target=job, args=(*arguments, theirs))
        process.start()
        begun.append(process)
        theirs.close()
        heard = []
        while ours.poll(WAIT_S):
            try:
                heard.append(ours.recv())
            except EOFError:
                break
        process.join(WAIT_S)
        ours.close()
        assert process.exitcode is not None, "a child process does not end"
        return process.exitcode, heard

    yield go
    for process in begun:
        process.kill()
        process.join(WAIT_S)
        process.close()


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is sealed and signed, and the policy beside it."""
    folder = tmp_path_factory.mktemp("sealed")
    for key, kind in (("kek.key", "file"), ("signer.pem", "sign-p256")):
        assert main(["keys", "init", str(folder / key), "--kind", kind]) == 0
    policy = folder / "policy.toml"
    policy.write_text('[seal]\nrecipients = ["file:kek.key"]\n[sign]\nkey = "file:signer.pem"\n')
    with Checkpointer(folder / "run", security=policy) as checkpointer:
        checkpointer.save(1, {"weights": torch.arange(5000.0)}).result()
    return folder


def files_of(root: Path) -> dict[str, bytes]:
    """All that a root holds but notes and temporary files."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "replication" not in path.relative_to(root).parts and path.name[0] != "."
    }


def test_a_kill_at_any_step_of_a_copy_between_folders(run: Run, sealed: Path, tmp_path: Path) -> None:
    guard = SecurityPolicy.load(sealed / "policy.toml").guard
    expected = files_of(sealed / "run")
    assert "signature.json" in {key.rpartition("/")[2] for key in expected}
    noted_at = set()
    at = 1
    while True:
        first, second = tmp_path / f"{at}" / "first", tmp_path / f"{at}" / "second"
        shutil.copytree(sealed / "run", first)
        code, heard = run(children.copy_and_be_killed, str(first), str(second), at)
        if heard == ["done"]:
            break
        assert code == -signal.SIGKILL
        source, target = LocalStore(first), Watched(LocalStore(second))
        if list(second.glob(f"step-*/{COMMIT}")):
            assert verify(LocalStore(second), guard=guard).verdict == "whole"
        noted = children.noted(source, target.uri, 1)
        noted_at.add(len(noted))
        replicate(source, Target(store=target), everything=True)
        prefix = f"{name_of(source, 1).folder}/{DATA}/"
        assert not {key.removeprefix(prefix) for key in target.asked("open_writer")} & noted
        assert files_of(first) == files_of(second) == expected
        shutil.rmtree(tmp_path / f"{at}")
        at += 1
    assert at > 20
    # Killed before the first file was noted, between some, and after the last.
    files = [key for key in expected if f"/{DATA}/" in key and "MANIFEST" not in key]
    assert {0, len(files)} < noted_at


def test_a_job_that_is_killed_again_and_again_has_all_on_both_tiers_in_the_end(
    nursery: Any, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    promised = 0
    for saves in (1, 4, 2, 7, 3):
        ours, theirs = nursery.Pipe()
        process = nursery.Process(target=children.train_until_killed, args=(str(first), str(second), theirs))
        process.start()
        theirs.close()
        try:
            for _ in range(saves):
                assert ours.poll(WAIT_S)
                promised = ours.recv()
        finally:
            process.kill()
            process.join(WAIT_S)
            process.close()
            ours.close()
    with Checkpointer(first, replicate_to=[second]) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        # The last save may have been committed without anybody being told.
        assert restored.step in (promised, promised + 1)
        checkpointer.save(restored.step + 1, {"last": torch.ones(3)}).replicated(WAIT_S)
    assert files_of(second).keys() >= {key for key in files_of(first) if key.endswith(f"/{COMMIT}")}
    for root in (first, second):
        assert verify(LocalStore(root), everything=True).verdict == "whole"
    assert steps_of(LocalStore(first)) == steps_of(LocalStore(second)) != []
    assert not list(first.glob("replication/*/sending/*"))


def test_what_was_copied_is_what_its_signer_signed(sealed: Path, tmp_path: Path) -> None:
    guard = SecurityPolicy.load(sealed / "policy.toml").guard
    shutil.copytree(sealed / "run", tmp_path / "first")
    replicate(LocalStore(tmp_path / "first"), Target(store=LocalStore(tmp_path / "second")))
    reports = [
        verify(LocalStore(tmp_path / name), everything=True, guard=guard) for name in ("first", "second")
    ]
    assert [report.verdict for report in reports] == ["whole", "whole"]
    assert reports[0].checkpoints[0].signers == reports[1].checkpoints[0].signers != ()
    with Checkpointer(tmp_path / "second", security=sealed / "policy.toml") as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None
    assert restored.state["weights"].equal(torch.arange(5000.0))


def test_a_job_that_is_killed_in_an_upload_sends_no_part_twice(
    run: Run, moto_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "first", 1, length=9 << 20)
    uri = f"s3://{moto_s3.make_bucket()}/run"
    code, heard = run(children.upload_and_be_killed, str(tmp_path / "first"), uri, moto_s3.environment, 3)
    assert code == -signal.SIGKILL
    before = heard[0]
    assert len(before) >= 3
    for name, value in moto_s3.environment.items():
        monkeypatch.setenv(name, value)
    source = LocalStore(tmp_path / "first")
    bucket = WatchedBucket(children.open_bucket(uri, moto_s3.endpoint_url))
    replicate(source, Target(store=bucket, upload_from_bytes=children.S3_PART_BYTES))
    sent = [number for _, number in bucket.sent]
    # A part that was on its way when the process died may have arrived, and nobody was told.
    assert not set(sent) & set(before)
    assert len(sent) + len(before) <= 8
    assert bucket.unfinished_uploads() == []
    assert verify(bucket).verdict == "whole"
    assert steps_of(bucket) == [1]
    assert known_targets(source).keys() == {uri}
    restored = Checkpointer(bucket).restore()
    assert restored is not None
    assert restored.step == 1
