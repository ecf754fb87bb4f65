"""Whole runs in a bucket: saved, restored, kept, verified and copied, with the same bytes as in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from s3_events import Wire
from s3_servers import S3Server

from strongroom import Checkpointer, IntegrityError, KeepLast
from strongroom.stores import open_store
from strongroom.verify import verify

MIB = 1 << 20


@pytest.fixture(params=("moto_s3", "ministack_s3"))
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A server that a plain ``s3://`` root finds."""
    server: S3Server = request.getfixturevalue(request.param)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server


def _state(step: int, elements: int = MIB // 4) -> dict[str, object]:
    return {
        "large": torch.full((elements,), float(step)),
        "small": torch.tensor([step]),
        "extra": {"step": step},
    }


def _is_whole(root: str | Path) -> bool:
    return not verify(open_store(root), everything=True).problems


def test_a_run_is_saved_kept_restored_and_verified(server: S3Server) -> None:
    bucket = server.make_bucket()
    root = f"s3://{bucket}/runs/a"
    with Checkpointer(root, keep=KeepLast(count=2)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, _state(step)).result(timeout_s=60)
    with Checkpointer(root) as checkpointer:
        assert [checkpoint.step for checkpoint in checkpointer.checkpoints()] == [3, 2]
        restored = checkpointer.restore(_state(0))
    assert restored is not None
    assert restored.step == 3
    assert torch.equal(restored.state["large"], torch.full((MIB // 4,), 3.0))
    assert _is_whole(root)
    assert not any("step-000000000001" in key for key in server.keys(bucket))
    assert server.uploads(bucket) == []


def test_a_save_never_heard_of_leaves_the_previous_checkpoint(moto_s3: S3Server) -> None:
    wire, bucket = Wire(moto_s3), moto_s3.make_bucket()
    # A shard for each worker, of two parts each.
    with Checkpointer(wire.store(bucket, part_bytes=5 * MIB)) as checkpointer:
        checkpointer.save(1, _state(1, 6 * MIB)).result(timeout_s=60)
        assert wire.operations["CompleteMultipartUpload"] > 0
        wire.answer("CompleteMultipartUpload", 403, "AccessDenied")
        with pytest.raises(Exception, match="s3:PutObject was refused"):
            checkpointer.save(2, _state(2, 6 * MIB)).result(timeout_s=60)
        # What was told once is not raised again.
        checkpointer.save(3, _state(3)).result(timeout_s=60)
    assert [c.step for c in Checkpointer(wire.store(bucket)).checkpoints()] == [3, 1]
    assert moto_s3.uploads(bucket) == []


def test_a_commit_whose_answer_was_lost_stands(moto_s3: S3Server) -> None:
    wire, bucket = Wire(moto_s3), moto_s3.make_bucket()
    with Checkpointer(wire.store(bucket)) as checkpointer:
        checkpointer.save(1, {"x": torch.zeros(2)}).result(timeout_s=60)
        commits: list[object] = []

        def lose_the_first(request: Any) -> None:
            if "COMMIT" in request.url:
                commits.append(request)
                wire.lose_answers("PutObject", len(commits) == 1)

        wire.change("PutObject", lose_the_first)
        checkpointer.save(2, {"x": torch.zeros(2)}).result(timeout_s=60)
    assert len(commits) == 2
    assert [c.step for c in Checkpointer(wire.store(bucket)).checkpoints()] == [2, 1]


def test_a_flipped_bit_in_a_bucket_is_found_and_named(moto_s3: S3Server) -> None:
    wire, bucket = Wire(moto_s3), moto_s3.make_bucket()
    with Checkpointer(wire.store(bucket)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, _state(step)).result(timeout_s=60)
    shard = next(key for key in moto_s3.keys(bucket) if "step-000000000002" in key and "00000-0" in key)
    data = bytearray(moto_s3.behind.get_object(Bucket=bucket, Key=shard)["Body"].read())
    data[-1] ^= 1
    moto_s3.behind.put_object(Bucket=bucket, Key=shard, Body=bytes(data))
    with Checkpointer(wire.store(bucket)) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        assert restored.step == 1
        assert shard.rpartition("/")[2] in restored.skipped[0][1]
        with pytest.raises(IntegrityError):
            checkpointer.restore(step=2)


def test_a_run_copied_out_of_a_bucket_is_a_run_in_a_folder(server: S3Server, tmp_path: Path) -> None:
    bucket = server.make_bucket()
    with Checkpointer(f"s3://{bucket}/run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, _state(step)).result(timeout_s=60)
    for key in server.keys(bucket):
        path = tmp_path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        server.behind.download_file(bucket, key, str(path))
    with Checkpointer(tmp_path / "run") as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        assert restored.step == 2
        assert torch.equal(restored.state["large"], torch.full((MIB // 4,), 2.0))
        checkpointer.save(3, _state(3)).result(timeout_s=60)
    assert _is_whole(tmp_path / "run")


def test_a_run_copied_from_a_folder_into_a_bucket_is_a_run_there(server: S3Server, tmp_path: Path) -> None:
    bucket = server.make_bucket()
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, _state(step)).result(timeout_s=60)
    for path in sorted(tmp_path.rglob("*")):
        if path.is_file():
            server.behind.upload_file(str(path), bucket, str(path.relative_to(tmp_path)))
    with Checkpointer(f"s3://{bucket}/run") as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        assert restored.step == 2
        checkpointer.save(3, _state(3)).result(timeout_s=60)
    assert _is_whole(f"s3://{bucket}/run")
