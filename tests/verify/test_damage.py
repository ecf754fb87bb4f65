"""Promise 3: whatever is done to a file of a run, verification names that file, and no other."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strongroom import Checkpointer, CheckpointNotFoundError, hashing
from strongroom.stores import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom.verify import Progress, Report, verify, verify_checkpoint

if TYPE_CHECKING:
    Run = Any


def verified(run: Run, **options: Any) -> Report:
    return verify(LocalStore(run.root), workers=1, **options)


def told(report: Report) -> dict[str, str]:
    """Each named file, and the kind of its problem."""
    return {problem.key: problem.kind for problem in report.problems}


def test_a_whole_run_is_whole_and_every_file_was_read(run: Run) -> None:
    report = verified(run, everything=True)
    contents = run.contents()
    assert report.problems == ()
    assert report.verdict == "whole"
    assert [checkpoint.name.step for checkpoint in report.checkpoints] == [3, 2, 1]
    assert report.file_count == len(contents)
    assert report.size_bytes == sum(map(len, contents.values()))
    assert report.rollback_protection == "none"


def test_without_a_choice_the_newest_is_verified_and_a_step_chooses_another(run: Run) -> None:
    assert [checkpoint.name.step for checkpoint in verified(run).checkpoints] == [3]
    assert [checkpoint.name.step for checkpoint in verified(run, step=1).checkpoints] == [1]


def test_a_step_that_was_never_committed_is_not_found(run: Run) -> None:
    with pytest.raises(CheckpointNotFoundError, match="committed steps are 3, 2, 1"):
        verified(run, step=7)


def test_a_superseded_checkpoint_is_verified_with_everything(run: Run) -> None:
    with Checkpointer(run.root) as checkpointer:
        checkpointer.restore(step=1)
        checkpointer.save(2, {"w": 1})
    report = verified(run, everything=True)
    assert report.verdict == "whole"
    assert [(item.name.step, item.name.launch) for item in report.checkpoints] == [
        (2, 3),
        (1, 1),
        (3, 2),
        (2, 1),
    ]


# ------------------------------------------------------------------------------------ single bytes


def test_every_changed_byte_of_every_file_of_a_checkpoint_names_that_file(run: Run) -> None:
    store, name = LocalStore(run.root), run.name(3)
    for file in run.files():
        path = run.newest / file
        whole = path.read_bytes()
        # Every byte once; with the other digest, which only differs in how a file is hashed, some.
        for position in range(0, len(whole), 7 if run.is_sha256 else 1):
            changed = bytearray(whole)
            changed[position] ^= 1 << (position % 8)
            path.write_bytes(changed)
            report = verify_checkpoint(store, name, workers=1)
            assert report.verdict == "damaged", (file, position)
            assert {problem.key for problem in report.problems} == {run.key(path)}, (file, position)
        path.write_bytes(whole)
    assert verify_checkpoint(store, name, workers=1).problems == ()


@pytest.mark.parametrize("pristine", ("blake3",), indirect=True)
def test_every_changed_byte_of_a_run_or_launch_record_names_that_file(run: Run) -> None:
    for path in (run.root / "run.json", *sorted((run.root / "launches").iterdir())):
        whole = path.read_bytes()
        for position in range(len(whole)):
            changed = bytearray(whole)
            changed[position] ^= 1 << (position % 8)
            path.write_bytes(changed)
            report = verified(run)
            assert report.verdict == "damaged", (path.name, position)
            assert told(report) == {run.key(path): "damaged"}, (path.name, position)
        path.write_bytes(whole)


# ------------------------------------------------------------------------------------- whole files


def _every_file(run: Run) -> list[Path]:
    return [
        run.root / key for key in sorted(run.contents()) if not key.startswith("step-") or "-0002-" in key
    ]


def test_a_file_cut_short_is_named(run: Run) -> None:
    for path in _every_file(run):
        whole = path.read_bytes()
        for length in (0, 1, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:length])
            assert told(verified(run)) == {run.key(path): "damaged"}, (path, length)
        path.write_bytes(whole)


def test_a_file_that_grew_is_named(run: Run) -> None:
    for path in _every_file(run):
        whole = path.read_bytes()
        for more in (b"\0", b" ", b"\n", whole, bytes(1 << 20)):
            path.write_bytes(whole + more)
            assert told(verified(run)) == {run.key(path): "damaged"}, (path, more[:10])
        path.write_bytes(whole)


def test_a_missing_file_is_named_as_missing(run: Run) -> None:
    for path in _every_file(run):
        if path.name == "COMMIT":
            continue
        whole = path.read_bytes()
        path.unlink()
        assert told(verified(run)) == {run.key(path): "missing"}, path
        path.write_bytes(whole)


def test_without_its_commit_a_folder_is_no_checkpoint(run: Run) -> None:
    (run.newest / "COMMIT").unlink()
    assert [checkpoint.name.step for checkpoint in verified(run).checkpoints] == [2]
    with pytest.raises(CheckpointNotFoundError):
        verified(run, step=3)
    with pytest.raises(CheckpointNotFoundError):
        verify_checkpoint(LocalStore(run.root), run.name(3))


def test_a_renamed_file_is_one_missing_and_one_too_many(run: Run) -> None:
    for file in run.files():
        if file == "COMMIT":
            continue
        path = run.newest / file
        for name in (f"{path.name}.bak", "x", path.name.upper()):
            other = path.with_name(name)
            if other != path:
                path.rename(other)
                assert told(verified(run)) == {run.key(path): "missing", run.key(other): "unexpected"}
                other.rename(path)


def test_a_file_of_another_step_is_named(run: Run) -> None:
    for file in run.files():
        path = run.newest / file
        whole = path.read_bytes()
        shutil.copy(run.folder(2) / file, path)
        assert told(verified(run)) == {run.key(path): "damaged"}, file
        path.write_bytes(whole)


def test_all_data_of_another_step_is_told_by_its_manifest(run: Run) -> None:
    shutil.rmtree(run.newest / "data")
    shutil.copytree(run.folder(2) / "data", run.newest / "data")
    assert told(verified(run)) == {f"{run.newest.name}/data/MANIFEST.json": "damaged"}


def test_a_whole_checkpoint_under_another_name_is_told_by_its_commit(run: Run) -> None:
    moved = run.newest.with_name(run.newest.name.replace("000000000003", "000000000009"))
    run.newest.rename(moved)
    report = verified(run)
    assert told(report)[f"{moved.name}/COMMIT"] == "damaged"
    assert report.checkpoints[0].name.step == 9


def test_what_stands_in_a_checkpoint_and_is_no_part_of_it_is_named(run: Run) -> None:
    extras = ["extra", "data/extra.bin", "data/more/x", "data/00000-01.safetensors", "data/[red]\n\x1b[31m"]
    for extra in extras:
        path = run.newest / extra
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    more = f"{run.newest.name}/data/more/"
    expected = {run.key(run.newest / extra): "unexpected" for extra in extras if extra != "data/more/x"}
    assert told(verified(run)) == {**expected, more: "unexpected"}


def test_what_stands_among_the_launches_and_is_none_is_named(run: Run) -> None:
    (run.root / "launches" / "000002.json.bak").write_bytes(b"x")
    assert told(verified(run)) == {"launches/000002.json.bak": "unexpected"}


def test_what_may_stand_beside_the_data_is_no_problem_and_what_may_not_is_named(run: Run) -> None:
    (run.newest / "signature.json").write_bytes(b"{}")
    for folder, name in (("signatures", f"{'ab' * 32}.json"), ("keyring", "0001.json")):
        (run.newest / folder).mkdir()
        (run.newest / folder / name).write_bytes(b"{}")
    assert verified(run).problems == ()
    stray = run.newest / "signatures" / "0001.json"
    stray.write_bytes(b"{}")
    assert told(verified(run)) == {run.key(stray): "unexpected"}


def test_what_else_lies_in_the_root_is_no_problem(run: Run) -> None:
    (run.root / "notes.txt").write_bytes(b"x")
    shutil.copytree(run.newest, run.root / f"{run.newest.name}.bak")
    assert verified(run, everything=True).problems == ()


def test_a_link_in_place_of_a_file_is_damage_even_where_it_leads_to_the_right_bytes(run: Run) -> None:
    for path in _every_file(run):
        elsewhere = run.root.parent / "elsewhere"
        shutil.copy(path, elsewhere)
        path.unlink()
        path.symlink_to(elsewhere)
        assert told(verified(run)) == {run.key(path): "damaged"}, path
        path.unlink()
        shutil.move(elsewhere, path)


def test_a_folder_or_a_pipe_in_place_of_a_file_is_damage(run: Run) -> None:
    path = run.newest / "data/state.json"
    path.unlink()
    path.mkdir()
    assert told(verified(run)) == {run.key(path): "missing", f"{run.key(path)}/": "unexpected"}
    path.rmdir()
    os.mkfifo(path)
    assert told(verified(run)) == {run.key(path): "damaged"}


def test_lost_launch_records_are_named_once_for_each_gap(run: Run) -> None:
    (run.root / "launches/000001.json").unlink()
    assert told(verified(run)) == {"launches/000001.json": "missing"}
    shutil.rmtree(run.root / "launches")
    report = verified(run)
    assert told(report) == {"launches/000001.json": "missing"}
    assert "up to launch 2" in report.problems[0].message


def test_records_of_another_run_are_named(run: Run, tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "other", run_id="other") as checkpointer:
        checkpointer.save(1, {"w": 1})
    shutil.copy(tmp_path / "other/launches/000001.json", run.root / "launches/000001.json")
    assert told(verified(run)) == {"launches/000001.json": "damaged"}
    shutil.copy(tmp_path / "other/run.json", run.root / "run.json")
    # What stands there now is another root's: nothing in it belongs to that run.
    assert told(verified(run)) == {
        "launches/000002.json": "damaged",
        f"{run.newest.name}/COMMIT": "damaged",
    }


# ------------------------------------------------------------------------------ more than one thing


def test_every_problem_is_told_and_not_the_first_alone(run: Run) -> None:
    (run.root / "run.json").write_bytes(b"{}")
    (run.root / "launches/000001.json").write_bytes(b"")
    (run.newest / "COMMIT").write_bytes(b"COMMIT")
    (run.newest / "data/state.json").unlink()
    (run.newest / "data/provenance.json").write_bytes(b"x")
    (run.newest / "data/extra").write_bytes(b"x")
    (run.folder(1) / "data/index.safetensors").write_bytes(bytes(100))
    newest, oldest = run.newest.name, run.folder(1).name
    assert told(verified(run, everything=True)) == {
        "run.json": "damaged",
        "launches/000001.json": "damaged",
        f"{newest}/COMMIT": "damaged",
        f"{newest}/data/state.json": "missing",
        f"{newest}/data/provenance.json": "damaged",
        f"{newest}/data/extra": "unexpected",
        f"{oldest}/data/index.safetensors": "damaged",
    }


def test_what_a_damaged_manifest_lists_is_not_blamed(run: Run) -> None:
    path = run.newest / "data/MANIFEST.json"
    text = path.read_bytes()
    digest = text.index(b'"digest":"', text.index(b'"files"')) + 20
    path.write_bytes(text[:digest] + bytes([text[digest] ^ 1]) + text[digest + 1 :])
    report = verified(run)
    assert told(report) == {run.key(path): "damaged"}
    assert "was not verified" in report.problems[0].message


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_damage_to_any_files_names_exactly_these(pristine: Run, data: st.DataObject) -> None:
    contents = pristine.contents()
    # Of what pins other files only the files themselves are damaged in the tests above.
    files = [key for key in contents if not key.endswith(("COMMIT", "MANIFEST.json", "run.json"))]
    store = MemoryStore()
    damaged = {}
    for key in data.draw(st.lists(st.sampled_from(sorted(files)), unique=True, max_size=4)):
        whole = contents[key]
        begin = data.draw(st.integers(0, len(whole)))
        end = data.draw(st.integers(begin, min(len(whole), begin + 40)))
        changed = whole[:begin] + data.draw(st.binary(max_size=40)) + whole[end:]
        if changed != whole:
            damaged[key] = changed
    for key, content in {**contents, **damaged}.items():
        store.put(key, content)
    report = verify(store, everything=True, workers=1)
    assert told(report) == dict.fromkeys(damaged, "damaged")


# ----------------------------------------------------------------------------------- large files


@pytest.fixture
def large(tmp_path: Path, pristine: Run) -> Run:
    """A checkpoint whose shard has several blocks, and the digest of ``pristine``'s."""
    import torch

    algorithm = "sha256" if pristine.is_sha256 else "blake3"
    with Checkpointer(tmp_path / "large", digest=algorithm) as checkpointer:
        checkpointer.save(3, {"w": torch.arange(1_000_000.0), "v": torch.arange(40_000)})
    return type(pristine)(tmp_path / "large")


@pytest.mark.parametrize("workers", (1, 3))
def test_a_large_file_is_hashed_in_parts_and_the_damaged_blocks_are_told(
    large: Run, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "_SPAN_BYTES", 2 << 20)
    store = LocalStore(large.root)
    assert verify(store, workers=workers).problems == ()
    path = large.newest / "data/00000-00.safetensors"
    content = bytearray(path.read_bytes())
    assert len(content) > 4 << 20
    content[(1 << 20) + 5] ^= 1
    content[-1] ^= 1
    path.write_bytes(content)
    (problem,) = verify(store, workers=workers).problems
    assert problem.key == large.key(path)
    if not large.is_sha256:
        assert f"bytes 1048576 to 2097151, 4194304 to {len(content) - 1} is wrong" in problem.message


def test_a_header_that_reaches_into_the_next_part_is_read_whole(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "_SPAN_BYTES", 64)
    monkeypatch.setattr(hashing, "BLOCK_BYTES", 64)
    report = verified(run)
    if not run.is_sha256:
        # Blocks of another length have other digests, which is all that may be wrong.
        assert all("its digest is" in problem.message for problem in report.problems)
    else:
        assert report.problems == ()


def test_progress_only_grows_and_ends_at_what_was_announced(large: Run) -> None:
    seen: list[Progress] = []
    report = verify(LocalStore(large.root), workers=3, on_progress=seen.append)
    assert report.verdict == "whole"
    assert [item.done_bytes for item in seen] == sorted(item.done_bytes for item in seen)
    assert {item.total_bytes for item in seen} == {seen[-1].done_bytes}
    assert seen[-1].done_bytes > 4 << 20


def test_an_interrupt_ends_the_work_at_the_next_block(large: Run) -> None:
    read = []

    def interrupt(progress: Progress) -> None:
        read.append(progress.done_bytes)
        if len(read) == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.3)  # as a slow disk would: the main thread hears of it meanwhile

    (large.newest / "data/index.safetensors").unlink()  # so that the shard is the first that is read
    with pytest.raises(KeyboardInterrupt):
        verify(LocalStore(large.root), workers=2, on_progress=interrupt)
    blocks = -(-(large.newest / "data/00000-00.safetensors").stat().st_size // (1 << 20))
    assert len(read) < blocks
    # One that was being started when the interrupt came is nobody's to wait for; it ends all the same.
    for thread in threading.enumerate():
        if thread.name.startswith("hash"):
            thread.join(60)
            assert not thread.is_alive()


def test_what_a_listener_raises_ends_the_work(large: Run) -> None:
    def refuse(progress: Progress) -> None:
        raise ValueError("no")

    for workers in (1, 3):
        with pytest.raises(ValueError, match="no"):
            verify(LocalStore(large.root), workers=workers, on_progress=refuse)


# ------------------------------------------------------------------------------------ reads alone


def test_verification_only_reads(run: Run) -> None:
    from strongroom.testing import FaultyStore

    (run.newest / "data/state.json").unlink()
    before = run.contents()
    store = FaultyStore(LocalStore(run.root))
    verify(store, everything=True)
    verbs = {operation.name for operation in store.operations}
    assert verbs <= {"read", "open_reader", "read_into", "stat", "list_names"}
    assert run.contents() == before


def test_a_root_that_is_not_there_is_not_found_and_not_created(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="nothing was ever committed"):
        verify(LocalStore(tmp_path / "nothing"))
    assert not (tmp_path / "nothing").exists()


def test_a_damaged_record_is_told_also_where_nothing_was_committed(run: Run) -> None:
    for folder in run.root.glob("step-*"):
        shutil.rmtree(folder)
    (run.root / "run.json").write_bytes(b"x")
    report = verified(run)
    assert report.checkpoints == ()
    assert told(report) == {"run.json": "damaged"}
