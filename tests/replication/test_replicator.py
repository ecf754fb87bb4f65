"""Copies beside a job: what is promised to whom, what is tried again, what is given up, and what is told."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from replication_runs import Listener, MovedClock, name_of, save, steps_of, without_notes
from replication_stores import Watched

from strongroom import Checkpointer, KeepLast
from strongroom.catalog import Catalog
from strongroom.errors import (
    ConfigError,
    FencedError,
    ReplicationError,
    StoreUnavailableError,
    WaitTimeoutError,
)
from strongroom.events import CheckpointReplicated, Emitter, ReplicationFailed
from strongroom.layout import DATA, CheckpointName, launch_key
from strongroom.manifest import Launch
from strongroom.replication import Notes, Replicator, Target, known_targets, read_notes
from strongroom.replication.lag import ALARM_S, WARN_S, LagWatch, lag_s, pause_s
from strongroom.replication.ledger import Ledger
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore

Begin = Callable[..., Replicator]

WAIT_S = 30.0


def fail_all(operation: str, key: str) -> None:
    raise StoreUnavailableError("the target is down")


def commit_of(root: MemoryStore, step: int) -> Any:
    return Catalog(root).history().commits[name_of(root, step)]


def wait_for(condition: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(3000):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("it never came to that")


class TestWhatIsCommitted:
    def test_comes_to_every_target(self, source: MemoryStore, begin: Begin) -> None:
        save(source, 1, 2)
        one, other = MemoryStore("one"), MemoryStore("other")
        replicator = begin(source, one, other)
        replicator.wake(commit_of(source, 2))
        for step in (1, 2):
            replicator.wait(name_of(source, step), WAIT_S)
        assert steps_of(one) == steps_of(other) == [2, 1]
        assert all(state.last_step == 2 and state.pending == () for state in replicator.state())

    def test_and_left_by_an_earlier_job_comes_too(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1)
        begin(source, target).begin()
        wait_for(lambda: steps_of(target.inner) == [1])

    def test_comes_newest_first_also_while_older_ones_are_on_their_way(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1, 2, 3)
        replicator = begin(source, target)
        reached, may_go_on = threading.Event(), threading.Event()

        def hold(operation: str, key: str) -> None:
            if operation == "make_durable" and "-000000000003-" in key.replace("step", ""):
                reached.set()
                may_go_on.wait(WAIT_S)

        target.hook = hold
        replicator.wake(commit_of(source, 3))
        assert reached.wait(WAIT_S)
        save(source, 4, resumes=True)
        replicator.wake(commit_of(source, 4))
        may_go_on.set()
        replicator.wait(name_of(source, 1), WAIT_S)
        order = [key for key in target.asked("put_if_absent") if key.endswith("COMMIT")]
        assert [int(key[5:17]) for key in order] == [3, 4, 2, 1]

    def test_is_told_with_the_lag_and_what_still_waits(
        self, source: MemoryStore, target: Watched, begin: Begin, listener: Listener, clock: MovedClock
    ) -> None:
        save(source, 1, 2)
        commit = commit_of(source, 2)
        clock.seconds = commit.committed_at_ms / 1000 + 90
        replicator = begin(source, target, emitter=Emitter([listener]), clock=clock.clock)
        replicator.wake(commit)
        replicator.wait(name_of(source, 1), WAIT_S)
        first, second = listener.of(CheckpointReplicated)
        assert (first.step, first.pending, first.tier) == (2, 1, "memory://second")
        assert (second.step, second.pending) == (1, 0)
        assert first.lag_s == pytest.approx(90, abs=0.01)
        assert first.sent_bytes > first.size_bytes > 0

    def test_brings_the_launch_of_a_writer_before_its_first_checkpoint(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1)
        record = Launch(
            run=Launch.decode(source.read(launch_key(1), limit_bytes=9999), "launch").run,
            launch=2,
            parent=None,
            created_at_ms=1,
            deadline_s=60,
        ).encode()
        source.plant({launch_key(2): record})
        replicator = begin(source, target)
        replicator.begin(2)
        wait_for(lambda: launch_key(2) in target.inner.contents())

    def test_takes_no_thread_once_all_is_there(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1)
        replicator = begin(source, target)
        replicator.wake(commit_of(source, 1))
        replicator.wait(name_of(source, 1), WAIT_S)
        wait_for(lambda: not [t for t in threading.enumerate() if t.name == "strongroom-replicate"])


class TestATargetThatFails:
    def test_is_tried_again_and_told_of_once(
        self, source: MemoryStore, target: Watched, begin: Begin, listener: Listener
    ) -> None:
        save(source, 1)
        target.hook = fail_all
        replicator = begin(source, target, emitter=Emitter([listener]))
        replicator.wake(commit_of(source, 1))
        wait_for(lambda: replicator.state()[0].failures > 5)
        (state,) = replicator.state()
        assert state.last_error == "the target is down"
        assert state.pending == (name_of(source, 1),)
        with pytest.raises(
            WaitTimeoutError, match=r"still to come to: memory://second \(the target is down\)"
        ):
            replicator.wait(name_of(source, 1), 0.01)
        target.hook = None
        replicator.wait(name_of(source, 1), WAIT_S)
        (failed,) = listener.of(ReplicationFailed)
        assert (failed.step, failed.reason, failed.pending) == (1, "the target is down", 1)
        wait_for(lambda: replicator.state()[0].last_error is None)

    def test_keeps_no_other_from_getting_its_copy(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1)
        target.hook = fail_all
        good = MemoryStore("good")
        replicator = begin(source, target, good)
        replicator.wake(commit_of(source, 1))
        wait_for(lambda: steps_of(good) == [1])
        wait_for(lambda: replicator.is_verified_elsewhere(name_of(source, 1)))

    def test_by_one_checkpoint_gets_the_others(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1, 2)
        folder = name_of(source, 2).folder

        def fail(operation: str, key: str) -> None:
            if key.startswith(folder) and operation == "make_durable":
                raise StoreUnavailableError("that folder alone")

        target.hook = fail
        replicator = begin(source, target)
        replicator.wake(commit_of(source, 2))
        replicator.wait(name_of(source, 1), WAIT_S)
        assert steps_of(target.inner) == [1]

    def test_by_something_that_is_no_error_of_ours_is_tried_again(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1)
        left = [2]

        def fail(operation: str, key: str) -> None:
            if left[0]:
                left[0] -= 1
                raise RuntimeError("a store with a bug")

        target.hook = fail
        replicator = begin(source, target)
        replicator.wake(commit_of(source, 1))
        replicator.wait(name_of(source, 1), WAIT_S)

    def test_keeps_a_program_that_ends_for_a_bounded_time_alone(
        self, source: MemoryStore, target: Watched, begin: Begin, caplog: pytest.LogCaptureFixture
    ) -> None:
        save(source, 1)
        target.hook = fail_all
        replicator = begin(source, target, is_main_alive=lambda: False, linger_s=0.05)
        with caplog.at_level(logging.ERROR, "strongroom"):
            replicator.wake(commit_of(source, 1))
            wait_for(lambda: "and the program ends" in caplog.text)

    def test_is_left_to_another_process_for_a_while_and_then_taken_over(
        self, source: MemoryStore, target: Watched, begin: Begin, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("strongroom.replication.upkeep._TURN_TAKEN_S", 0.05)
        save(source, 1)
        taken = []

        def take_turn(operation: str, key: str) -> None:
            if operation == "make_durable" and not taken:
                taken.append(Ledger(source, target.uri, now_ms=lambda: 0).claim_turn())

        target.hook = take_turn
        replicator = begin(source, target)
        replicator.wake(commit_of(source, 1))
        replicator.wait(name_of(source, 1), WAIT_S)
        assert replicator.state()[0].failures == 1
        assert Ledger(source, target.uri, now_ms=lambda: 0).newest_turn() == taken[0] + 1

    def test_is_asked_again_at_the_next_commit_where_no_thread_was_to_be_had(
        self, source: MemoryStore, target: Watched, begin: Begin, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(source, 1)
        replicator = begin(source, target)

        def refuse(*_: Any, **__: Any) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr("strongroom.replication.upkeep.start", refuse)
            replicator.wake(commit_of(source, 1))
        assert "can't start new thread" in str(replicator.state()[0].last_error)
        replicator.wake(commit_of(source, 1))
        replicator.wait(name_of(source, 1), WAIT_S)


class TestAProgramThatEnds:
    """Without closing anything: the interpreter waits for what is copied, and not for what cannot be."""

    def run(self, tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
        save(tmp_path / "first", 1)
        program = (
            "import sys; sys.modules['torch'] = None\n"
            "from strongroom.replication import Replicator, Target\n"
            "from strongroom.stores.local import LocalStore\n"
            f"source, path = LocalStore({str(tmp_path / 'first')!r}), {str(tmp_path / 'second')!r}\n"
        )
        return subprocess.run(
            [sys.executable, "-c", program + body], capture_output=True, text=True, timeout=60, check=False
        )

    def test_is_waited_for_until_all_is_copied(self, tmp_path: Path) -> None:
        done = self.run(
            tmp_path,
            "target = Target(store=LocalStore(path), max_bytes_per_second=20_000)\n"
            "Replicator(source, [target]).begin()\n",
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert steps_of(LocalStore(tmp_path / "second")) == [1]

    def test_is_not_kept_by_a_target_that_fails(self, tmp_path: Path) -> None:
        (tmp_path / "second").mkdir()
        (tmp_path / "second" / "launches").write_text("a file where a folder has to be")
        done = self.run(
            tmp_path, "Replicator(source, [Target(store=LocalStore(path))], linger_s=0.2).begin()\n"
        )
        assert done.returncode == 0
        assert "and the program ends" in done.stderr


class TestATargetThatIsGivenUp:
    def test_for_another_writer_ends_what_waits_for_it(
        self, source: MemoryStore, target: Watched, begin: Begin, caplog: pytest.LogCaptureFixture
    ) -> None:
        save(source, 1)
        target.inner.plant(source.contents())
        save(target.inner, 2, resumes=True)
        save(source, 3)
        replicator = begin(source, target)
        replicator.wake(commit_of(source, 3))
        with pytest.raises(ReplicationError, match="another writer has taken launch 2") as caught:
            replicator.wait(name_of(source, 3), WAIT_S)
        assert caught.value.tiers == ("memory://second",)
        assert isinstance(replicator.fenced, FencedError)
        assert replicator.state()[0].is_stopped
        assert steps_of(target.inner) == [2, 1]
        assert "nothing more is copied to memory://second" in caplog.text

    def test_for_another_run_is_told(self, source: MemoryStore, target: Watched, begin: Begin) -> None:
        save(source, 1)
        save(target.inner, 1)
        replicator = begin(source, target)
        replicator.wake(commit_of(source, 1))
        with pytest.raises(ReplicationError, match="each run needs a root of its own"):
            replicator.wait(name_of(source, 1), WAIT_S)
        # The next save is told.
        assert isinstance(replicator.fenced, ConfigError)

    def test_is_taken_up_again_once_the_run_was_taken_back(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1)
        target.inner.plant(source.contents())
        save(target.inner, 2, resumes=True)
        replicator = begin(source, target)
        replicator.begin(1)
        wait_for(lambda: replicator.fenced is not None)
        # It has restored, and writes under no turn for now.
        replicator.begin(None)
        assert replicator.fenced is None
        source.plant(without_notes(target.inner))
        save(source, 3, resumes=True)
        replicator.begin(3)
        replicator.wake(commit_of(source, 3))
        replicator.wait(name_of(source, 3), WAIT_S)
        assert replicator.fenced is None
        assert steps_of(target.inner) == [3, 2, 1]


class TestWaiting:
    def test_ends_where_a_checkpoint_is_damaged_on_the_first_tier(
        self, source: MemoryStore, target: Watched, begin: Begin, listener: Listener
    ) -> None:
        save(source, 1, 2)
        name = name_of(source, 2)
        source.delete(f"{name.folder}/{DATA}/state.json")
        replicator = begin(source, target, emitter=Emitter([listener]))
        replicator.wake(commit_of(source, 2))
        with pytest.raises(ReplicationError, match=r"state\.json in memory://first is missing"):
            replicator.wait(name, WAIT_S)
        replicator.wait(name_of(source, 1), WAIT_S)
        assert [event.step for event in listener.of(ReplicationFailed)] == [2]

    def test_lets_the_policy_choose_another_one_for_a_damaged_one(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1, 2)
        source.delete(f"{name_of(source, 2).folder}/{DATA}/state.json")
        replicator = begin(source, Target(store=target, keep=KeepLast(count=1)))
        replicator.begin()
        replicator.wait(name_of(source, 1), WAIT_S)
        assert steps_of(target.inner) == [1]

    def test_is_over_at_once_for_what_has_gone_from_here_since(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1, 2)
        name = name_of(source, 1)
        replicator = begin(source, target)
        replicator.wake(commit_of(source, 2))
        replicator.wait(name, WAIT_S)
        source.delete(name.commit_key)
        source.delete_tree(name.folder)
        save(source, 3, resumes=True)
        replicator.wake(commit_of(source, 3))
        replicator.wait(name_of(source, 3), WAIT_S)
        replicator.wait(name, WAIT_S)

    def test_ends_at_once_where_one_of_several_targets_refuses(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1)
        other = MemoryStore("other")
        save(other, 1)
        target.hook = fail_all
        replicator = begin(source, target, other)
        replicator.wake(commit_of(source, 1))
        with pytest.raises(ReplicationError) as caught:
            replicator.wait(name_of(source, 1))
        assert caught.value.tiers == ("memory://other",)

    def test_ends_where_a_newer_one_has_made_it_superfluous(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1, 2)
        replicator = begin(source, Target(store=target, keep=KeepLast(count=1)))
        replicator.wake(commit_of(source, 2))
        replicator.wait(name_of(source, 2), WAIT_S)
        with pytest.raises(ReplicationError, match="it would not stay there: not kept by KeepLast"):
            replicator.wait(name_of(source, 1), WAIT_S)

    def test_ends_where_it_is_gone_from_the_first_tier(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1, 2)
        name = name_of(source, 1)
        source.delete_tree(name.folder)
        with pytest.raises(ReplicationError, match="gone from the first tier before it was copied"):
            begin(source, target).wait(name, WAIT_S)

    def test_is_over_at_once_for_what_was_copied_by_an_earlier_job(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1)
        begin(source, target).wait(name_of(source, 1), WAIT_S)
        target.log.clear()
        begin(source, target).wait(name_of(source, 1), WAIT_S)
        assert target.asked("open_writer") == []

    def test_goes_on_where_the_target_was_seen_emptied(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1, 2)
        replicator = begin(source, target)
        replicator.wake(commit_of(source, 2))
        replicator.wait(name_of(source, 1), WAIT_S)
        for key in list(target.inner.contents()):
            target.inner.delete(key)
        seen = threading.Event()
        target.hook = lambda operation, key: seen.set() if operation == "open_writer" else None
        replicator.begin()
        assert seen.wait(WAIT_S)
        replicator.wait(name_of(source, 1), WAIT_S)
        assert steps_of(target.inner) == [2, 1]

    def test_goes_on_where_the_target_was_seen_to_have_lost_one(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1, 2)
        replicator = begin(source, target)
        replicator.wake(commit_of(source, 2))
        replicator.wait(name_of(source, 1), WAIT_S)
        target.inner.delete_tree(name_of(source, 1).folder)
        seen = threading.Event()
        target.hook = lambda operation, key: seen.set() if operation == "open_writer" else None
        replicator.begin()
        assert seen.wait(WAIT_S)
        replicator.wait(name_of(source, 1), WAIT_S)
        assert steps_of(target.inner) == [2, 1]

    def test_ends_when_the_copying_is_ended(self, source: MemoryStore, target: Watched, begin: Begin) -> None:
        save(source, 1)
        target.hook = fail_all
        replicator = begin(source, target)
        replicator.wake(commit_of(source, 1))
        with pytest.raises(ReplicationError, match=r"1 for memory://second, the newest of step 1"):
            replicator.close(0)
        with pytest.raises(WaitTimeoutError, match="copies nothing any more"):
            replicator.wait(name_of(source, 1))
        replicator.close(0)


class TestClosing:
    def test_waits_for_what_is_on_its_way(self, source: MemoryStore, target: Watched, begin: Begin) -> None:
        save(source, 1, 2)
        replicator = begin(source, target)
        replicator.wake(commit_of(source, 2))
        replicator.close(WAIT_S)
        assert steps_of(target.inner) == [2, 1]

    def test_cuts_a_throttled_copy_short(self, source: MemoryStore, target: Watched, begin: Begin) -> None:
        save(source, 1, length=100_000)
        replicator = begin(source, Target(store=target, max_bytes_per_second=10_000))
        replicator.wake(commit_of(source, 1))
        wait_for(lambda: target.asked("open_writer") != [])
        with pytest.raises(ReplicationError):
            replicator.close(0)
        wait_for(lambda: not [t for t in threading.enumerate() if t.name == "strongroom-replicate"])
        assert steps_of(target.inner) == []


class TestWhatTheFirstTierMayLose:
    def held(self, replicator: Replicator, source: MemoryStore) -> dict[int, str]:
        history = Catalog(source).history()
        return {name.step: why for name, why in replicator.held(history).items()}

    def test_is_nothing_before_it_was_copied(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1, 2)
        replicator = begin(source, target)
        assert self.held(replicator, source).keys() == {1, 2}
        assert not replicator.is_verified_elsewhere(name_of(source, 1))

    def test_is_what_is_verified_elsewhere(self, source: MemoryStore, target: Watched, begin: Begin) -> None:
        save(source, 1, 2)
        replicator = begin(source, target)
        replicator.wake(commit_of(source, 2))
        replicator.wait(name_of(source, 1), WAIT_S)
        assert self.held(replicator, source) == {}
        assert replicator.is_verified_elsewhere(name_of(source, 1))

    def test_is_what_was_passed_over_once_a_newer_one_is_safe(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1, 2)
        reached, may_go_on = threading.Event(), threading.Event()

        def hold(operation: str, key: str) -> None:
            if operation == "make_durable":
                reached.set()
                may_go_on.wait(WAIT_S)

        target.hook = hold
        replicator = begin(source, Target(store=target, keep=KeepLast(count=1)))
        replicator.wake(commit_of(source, 2))
        assert reached.wait(WAIT_S)
        assert self.held(replicator, source).keys() == {1, 2}
        assert not replicator.is_verified_elsewhere(name_of(source, 1))
        may_go_on.set()
        replicator.wait(name_of(source, 2), WAIT_S)
        assert self.held(replicator, source) == {}
        assert replicator.is_verified_elsewhere(name_of(source, 1))

    def test_is_not_held_up_by_a_second_target_that_fails(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1)
        target.hook = fail_all
        replicator = begin(source, MemoryStore("good"), target)
        replicator.wake(commit_of(source, 1))
        wait_for(lambda: replicator.state()[1].failures > 0 and replicator.state()[0].pending == ())
        assert self.held(replicator, source) == {}

    def test_waits_for_a_second_target_that_goes_well(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1)
        may_go_on = threading.Event()
        target.hook = lambda operation, key: may_go_on.wait(WAIT_S) and None
        replicator = begin(source, MemoryStore("good"), target)
        replicator.wake(commit_of(source, 1))
        wait_for(lambda: replicator.state()[0].pending == ())
        assert self.held(replicator, source) == {1: "it is on its way to memory://second"}
        may_go_on.set()

    def test_comes_back_where_the_target_has_lost_it(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1)
        begin(source, target).wait(name_of(source, 1), WAIT_S)
        target.inner.delete_tree(name_of(source, 1).folder)
        again = begin(source, target)
        again.begin()
        wait_for(lambda: steps_of(target.inner) == [1])

    def lose_a_shard(self, target: Watched, name: CheckpointName) -> None:
        shard = next(
            key for key in target.inner.contents() if key.startswith(name.folder) and "00000-" in key
        )
        target.inner.delete(shard)

    def test_is_nothing_of_which_the_target_has_lost_a_file_before_this_start(
        self, source: MemoryStore, target: Watched, begin: Begin, listener: Listener
    ) -> None:
        save(source, 1, 2)
        begin(source, target).wait(name_of(source, 1), WAIT_S)
        self.lose_a_shard(target, name_of(source, 1))
        replicator = begin(source, target, emitter=Emitter([listener]))
        replicator.begin()
        with pytest.raises(ReplicationError, match=r"is damaged: .* is not there"):
            replicator.wait(name_of(source, 1), WAIT_S)
        assert self.held(replicator, source).keys() == {1}
        wait_for(lambda: [event.step for event in listener.of(ReplicationFailed)] == [1])
        assert known_targets(source)[target.uri].keys() == {name_of(source, 2)}

    def test_is_nothing_that_was_found_damaged_or_another_there(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1, 2)
        begin(source, target).wait(name_of(source, 1), WAIT_S)
        source.delete_tree("replication")
        self.lose_a_shard(target, name_of(source, 1))
        replicator = begin(source, target)
        replicator.begin()
        replicator.wait(name_of(source, 2), WAIT_S)
        with pytest.raises(ReplicationError, match="is damaged"):
            replicator.wait(name_of(source, 1), WAIT_S)
        assert "where it cannot be put" in self.held(replicator, source)[1]
        assert not replicator.is_verified_elsewhere(name_of(source, 1))
        target.inner.plant({name_of(source, 1).commit_key: b"torn"})
        again = begin(source, target)
        again.begin()
        again.wait(name_of(source, 2), WAIT_S)
        assert self.held(again, source).keys() == {1}

    def test_is_only_what_stands_there_at_the_moment(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1)
        replicator = begin(source, target)
        replicator.wake(commit_of(source, 1))
        replicator.wait(name_of(source, 1), WAIT_S)
        for key in list(target.inner.contents()):
            target.inner.delete(key)
        assert self.held(replicator, source).keys() == {1}
        wait_for(lambda: steps_of(target.inner) == [1])

    def test_is_nothing_while_nobody_can_tell_what_stands_there(
        self, source: MemoryStore, target: Watched, begin: Begin
    ) -> None:
        save(source, 1)
        replicator = begin(source, target)
        replicator.wake(commit_of(source, 1))
        replicator.wait(name_of(source, 1), WAIT_S)
        target.hook = fail_all
        assert "it cannot be seen whether it still does" in self.held(replicator, source)[1]
        target.hook = None
        assert self.held(replicator, source) == {}


class TestLag:
    def test_is_the_age_of_the_oldest_that_waits(self, source: MemoryStore) -> None:
        save(source, 1, 2)
        commits = [commit_of(source, 2), commit_of(source, 1)]
        assert lag_s(commits, commits[1].committed_at_ms + 5000) == 5
        assert lag_s(commits, commits[1].committed_at_ms - 5000) == 0
        assert lag_s([], 1) == 0

    def test_is_told_once_for_each_mark_that_it_passes(self) -> None:
        watch = LagWatch()
        assert [watch.passed(lag) for lag in (10, WARN_S + 1, WARN_S + 2, ALARM_S + 1, ALARM_S + 2)] == [
            None,
            logging.WARNING,
            None,
            logging.ERROR,
            None,
        ]
        assert watch.passed(0) is None
        assert watch.passed(ALARM_S + 1) == logging.ERROR

    def test_grows_while_the_target_is_down_and_is_logged(
        self,
        source: MemoryStore,
        target: Watched,
        begin: Begin,
        clock: MovedClock,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        save(source, 1)
        commit = commit_of(source, 1)
        clock.seconds = commit.committed_at_ms / 1000
        target.hook = fail_all
        replicator = begin(source, target, clock=clock.clock)
        with caplog.at_level(logging.WARNING, "strongroom"):
            replicator.wake(commit)
            assert replicator.state()[0].lag_s < 1
            clock.seconds += 2 * WARN_S
            assert replicator.state()[0].lag_s == pytest.approx(2 * WARN_S, abs=1)
            clock.seconds += ALARM_S
            replicator.state()
        told = [record.levelno for record in caplog.records if "behind" in record.message]
        assert told == [logging.WARNING, logging.ERROR]

    def test_pauses_grow_up_to_a_minute(self) -> None:
        assert [pause_s(failures, 1.0) for failures in (1, 2, 3, 100)] == [1, 2, 4, 60]
        assert pause_s(1, 0.0) == 0.5


def test_targets_are_named_once_and_are_not_the_first_tier(source: MemoryStore) -> None:
    target = Target(store=MemoryStore("second"))
    with pytest.raises(ConfigError, match="memory://second is given twice"):
        Replicator(source, [target, target])
    with pytest.raises(ConfigError, match="cannot be copied onto itself"):
        Replicator(source, [Target(store=source)])


def test_a_target_inside_the_first_tier_is_refused(tmp_path: Path) -> None:
    for first, second in (("run", "run/copy"), ("run/fast", "run")):
        with pytest.raises(ConfigError, match="one lies inside the other"):
            Replicator(LocalStore(tmp_path / first), [Target(store=LocalStore(tmp_path / second))])


def test_a_target_that_is_the_first_tier_under_another_name_is_given_up(tmp_path: Path, begin: Begin) -> None:
    save(tmp_path / "first", 1)
    (tmp_path / "second").symlink_to(tmp_path / "first")
    source = LocalStore(tmp_path / "first")
    replicator = begin(source, LocalStore(tmp_path / "second"))
    replicator.begin()
    with pytest.raises(ReplicationError, match="under another name"):
        replicator.wait(name_of(source, 1), WAIT_S)
    assert read_notes(source) == Notes(targets={})


def test_a_target_is_checked_when_it_is_made(source: MemoryStore) -> None:
    with pytest.raises(ConfigError, match="max_bytes_per_second"):
        Target(store=source, max_bytes_per_second=0)
    with pytest.raises(ConfigError, match="a target is a Store"):
        Target(store="runs/a")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="upload_from_bytes"):
        Target(store=source, upload_from_bytes=0)


def test_a_checkpointer_does_not_see_the_notes(source: MemoryStore, target: Watched, begin: Begin) -> None:
    save(source, 1)
    begin(source, target).wait(name_of(source, 1), WAIT_S)
    with Checkpointer(source) as checkpointer:
        assert [each.step for each in checkpointer.checkpoints()] == [1]
