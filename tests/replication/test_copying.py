"""One checkpoint, from a first tier to another: the same bytes, in an order that survives anything."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from replication_runs import MovedClock, name_of, save, state_at, steps_of, without_notes
from replication_stores import PART_BYTES, Bucket, Watched, WatchedResuming

from strongroom import Checkpointer, IntegrityError, KeepLast
from strongroom.canonical import with_self_digest
from strongroom.catalog import Catalog
from strongroom.digest import sha256_of
from strongroom.errors import (
    AccessDeniedError,
    ConfigError,
    FencedError,
    ReplicationError,
    StoreError,
    StoreUnavailableError,
)
from strongroom.events import Emitter
from strongroom.incoming import VALID_S, Announcement, RemovalMark
from strongroom.layout import COMMIT, DATA, further_signature_key, keyring_key, launch_key
from strongroom.manifest import Commit, Launch
from strongroom.replication import Report, Target, known_targets, replicate
from strongroom.replication.copying import REMOVAL_S
from strongroom.replication.courier import Courier
from strongroom.replication.ledger import Ledger
from strongroom.stores.memory import MemoryStore
from strongroom.sweep import Removal, orphans, remove
from strongroom.verify import verify


def copy(source: Any, store: Any, *, note_bytes: int = 1 << 20, **options: Any) -> Report:
    target = Target(store=store, upload_from_bytes=PART_BYTES, note_bytes=note_bytes)
    return replicate(source, target, **{"everything": True, **options})


def shard_of(store: MemoryStore, step: int) -> str:
    (key,) = [
        key
        for key in store.contents()
        if key.startswith(f"{name_of(store, step).folder}/{DATA}/0") and key.endswith(".safetensors")
    ]
    return key


def flip(store: MemoryStore, key: str) -> None:
    data = bytearray(store.contents()[key])
    data[len(data) // 2] ^= 1
    store.plant({key: bytes(data)})


def ledger_of(source: Any, target: Any) -> Ledger:
    return Ledger(source, target.uri, now_ms=lambda: 0)


class TestACopy:
    def test_holds_the_same_bytes_under_the_same_names(self, source: MemoryStore, target: Watched) -> None:
        save(source, 1, 2)
        report = copy(source, target)
        assert without_notes(target.inner) == without_notes(source)
        assert [copied.commit.name.step for copied in report.copied] == [2, 1]
        assert verify(target.inner, everything=True).verdict == "whole"

    def test_is_committed_last_and_after_all_was_read_back(
        self, source: MemoryStore, target: Watched
    ) -> None:
        save(source, 1)
        copy(source, target)
        folder = name_of(source, 1).folder
        files = {
            key for key in source.contents() if key.startswith(f"{folder}/{DATA}/") and "MANIFEST" not in key
        }
        committed = target.log.index(("put_if_absent", f"{folder}/{COMMIT}"))
        before = target.log[:committed]
        assert {key for operation, key in before if operation == "open_reader"} == files
        assert ("read", f"{folder}/{DATA}/MANIFEST.json") in before
        assert ("put_if_absent", "run.json") in before
        assert ("put_if_absent", launch_key(1)) in before
        assert ("make_durable", folder) in before
        changes = ("open_writer", "put", "put_if_absent", "make_durable")
        assert not [each for each in target.log[committed + 1 :] if each[0] in changes]

    def test_is_not_made_twice(self, source: MemoryStore, target: Watched) -> None:
        save(source, 1)
        copy(source, target)
        target.log.clear()
        report = copy(source, target)
        assert report.copied == ()
        assert [commit.name.step for commit in report.standing] == [1]
        assert target.asked("open_writer") == target.asked("open_reader") == []

    def test_is_noted_with_what_was_verified(self, source: MemoryStore, target: Watched) -> None:
        save(source, 1)
        copy(source, target)
        noted = known_targets(source)[target.uri][name_of(source, 1)]
        assert noted.how == "reading"
        assert noted.size_bytes == Checkpointer(source).checkpoints()[0].size_bytes

    def test_restores_and_the_source_is_as_it_was(self, source: MemoryStore, target: Watched) -> None:
        save(source, 1)
        before = without_notes(source)
        copy(source, target)
        restored = Checkpointer(target.inner).restore()
        assert restored is not None
        assert restored.state["weights"].equal(state_at(1)["weights"])
        assert without_notes(source) == before

    def test_that_somebody_made_by_hand_is_verified_and_noted(
        self, source: MemoryStore, target: Watched
    ) -> None:
        save(source, 1)
        target.inner.plant(source.contents())
        report = copy(source, target)
        assert [copied.sent_bytes for copied in report.copied] == [0]
        assert name_of(source, 1) in known_targets(source)[target.uri]
        assert target.asked("open_writer") == []

    def test_that_somebody_made_by_hand_and_that_is_damaged_is_told(
        self, source: MemoryStore, target: Watched
    ) -> None:
        save(source, 1, 2)
        target.inner.plant(source.contents())
        flip(target.inner, shard_of(source, 2))
        report = copy(source, target)
        assert [copied.commit.name.step for copied in report.copied] == [1]
        assert "the copy of step 2" in report.damaged[name_of(source, 2)]
        assert known_targets(source)[target.uri].keys() == {name_of(source, 1)}

    def test_of_one_step_or_of_the_newest_alone(self, source: MemoryStore, target: Watched) -> None:
        save(source, 1, 2, 3)
        copy(source, target, everything=False)
        assert steps_of(target.inner) == [3]
        copy(source, target, everything=False, step=1)
        assert steps_of(target.inner) == [3, 1]

    def test_follows_the_targets_retention(self, source: MemoryStore, target: Watched) -> None:
        save(source, 1)
        copy(source, target)
        save(source, 2, 3, resumes=True)
        keeping = Target(store=target, keep=KeepLast(count=1))
        replicate(source, keeping)
        # The one that was restored, and so read and found whole, stays as well.
        assert steps_of(target.inner) == [3, 1]

    def test_is_paced(self, source: MemoryStore, target: Watched, clock: MovedClock) -> None:
        save(source, 1, length=100_000)
        slept = []

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            clock.seconds += seconds

        courier = Courier(
            source,
            Target(store=target, max_bytes_per_second=1000),
            clock=clock.clock,
            emitter=Emitter(),
            check=lambda: None,
            sleep=sleep,
        )
        outlook = courier.look()
        courier.begin(outlook)
        copied = courier.deliver(outlook.plan.copies[0], outlook)
        assert sum(slept) == pytest.approx(copied.sent_bytes / 1000, rel=0.05)


class TestADamagedSource:
    def test_is_told_and_not_copied_and_the_others_are(self, source: MemoryStore, target: Watched) -> None:
        save(source, 1, 2)
        flip(source, shard_of(source, 2))
        report = copy(source, target)
        assert steps_of(target.inner) == [1]
        (why,) = report.damaged.values()
        assert shard_of(source, 2) in why
        assert "memory://first has the digest" in why
        assert shard_of(source, 2) not in target.inner.contents()

    def test_leaves_no_upload_behind(self, source: MemoryStore, bucket: Bucket) -> None:
        save(source, 1, length=4 * PART_BYTES)
        flip(source, shard_of(source, 1))
        assert copy(source, bucket).damaged.keys() == {name_of(source, 1)}
        assert bucket.unfinished_uploads() == []
        assert steps_of(bucket) == []

    @pytest.mark.parametrize("what", ("MANIFEST.json", "state.json", "index.safetensors"))
    def test_that_lacks_a_file_is_told(self, source: MemoryStore, target: Watched, what: str) -> None:
        save(source, 1)
        source.delete(f"{name_of(source, 1).folder}/{DATA}/{what}")
        report = copy(source, target)
        assert "is missing" in report.damaged[name_of(source, 1)]
        assert steps_of(target.inner) == []

    def test_whose_commit_is_torn_is_told_by_what_is_wrong(
        self, source: MemoryStore, target: Watched
    ) -> None:
        save(source, 1, 2)
        source.plant({name_of(source, 2).commit_key: b"{}"})
        report = copy(source, target)
        assert steps_of(target.inner) == [1]
        assert report.damaged.keys() == {name_of(source, 2)}


class TestATargetThatDoesNotGiveBackWhatWasWritten:
    def test_gets_no_commit_and_only_that_file_once_more(self, source: MemoryStore, target: Watched) -> None:
        save(source, 1)
        shard = shard_of(source, 1)

        def damage(operation: str, key: str) -> None:
            if operation == "open_reader" and key == shard:
                target.hook = None
                flip(target.inner, shard)

        target.hook = damage
        with pytest.raises(StoreUnavailableError, match=r"does not give back what was written"):
            copy(source, target)
        assert steps_of(target.inner) == []
        target.log.clear()
        copy(source, target)
        assert target.asked("open_writer") == [shard]
        assert verify(target.inner).verdict == "whole"

    def test_is_noticed_in_the_manifest_as_well(self, source: MemoryStore, target: Watched) -> None:
        save(source, 1)
        manifest = f"{name_of(source, 1).folder}/{DATA}/MANIFEST.json"

        def damage(operation: str, key: str) -> None:
            if operation == "make_durable":
                flip(target.inner, manifest)

        target.hook = damage
        with pytest.raises(StoreUnavailableError, match="MANIFEST"):
            copy(source, target)
        assert steps_of(target.inner) == []


class TestACopyThatDied:
    def test_goes_on_with_what_was_noted(self, source: MemoryStore, target: Watched) -> None:
        save(source, 1)
        name = name_of(source, 1)

        def fail(operation: str, key: str) -> None:
            if operation == "put_if_absent" and key == name.commit_key:
                raise StoreUnavailableError("the line went down")

        target.hook = fail
        with pytest.raises(StoreUnavailableError):
            copy(source, target)
        target.hook = None
        target.log.clear()
        (copied,) = copy(source, target).copied
        assert target.asked("open_writer") == []
        assert copied.sent_bytes < 2000
        assert without_notes(target.inner) == without_notes(source)

    def test_has_what_was_not_noted_removed_and_sent_anew(self, source: MemoryStore, target: Watched) -> None:
        save(source, 1)
        shard = shard_of(source, 1)
        target.inner.plant({shard: source.contents()[shard][:100]})
        copy(source, target)
        assert [key for key in target.asked("delete") if key.startswith("step-")] == [shard]
        assert without_notes(target.inner) == without_notes(source)

    def test_has_a_manifest_of_something_else_replaced(self, source: MemoryStore, target: Watched) -> None:
        save(source, 1)
        manifest = f"{name_of(source, 1).folder}/{DATA}/MANIFEST.json"
        target.inner.plant({manifest: b"half of"})
        copy(source, target)
        assert without_notes(target.inner) == without_notes(source)

    def test_costs_nothing_but_time_where_the_notes_are_damaged(
        self, source: MemoryStore, target: Watched
    ) -> None:
        save(source, 1)
        ledger_of(source, target).note_sent(name_of(source, 1), [])

        def fail(operation: str, key: str) -> None:
            if operation == "make_durable":
                raise StoreUnavailableError("the line went down")

        target.hook = fail
        with pytest.raises(StoreUnavailableError):
            copy(source, target)
        target.hook = None
        notes = [key for key in source.contents() if key.startswith("replication/")]
        source.plant(dict.fromkeys(notes, b"\xff"))
        copy(source, target)
        assert without_notes(target.inner) == without_notes(source)
        assert known_targets(source)[target.uri].keys() == {name_of(source, 1)}

    def test_takes_whole_objects_of_a_bucket_that_were_not_noted(
        self, source: MemoryStore, bucket: Bucket
    ) -> None:
        save(source, 1, length=4 * PART_BYTES)
        shard = shard_of(source, 1)
        bucket.plant({shard: source.contents()[shard]})
        copy(source, bucket)
        assert bucket.sent == {}
        assert without_notes(bucket) == without_notes(source)

    def test_replaces_wrong_objects_of_a_bucket(self, source: MemoryStore, bucket: Bucket) -> None:
        save(source, 1, length=4 * PART_BYTES)
        bucket.plant({shard_of(source, 1): source.contents()[shard_of(source, 1)]})
        flip(bucket, shard_of(source, 1))
        copy(source, bucket)
        assert without_notes(bucket) == without_notes(source)

    def test_sends_no_part_twice(self, source: MemoryStore, bucket: Bucket) -> None:
        save(source, 1, length=16 * PART_BYTES)
        shard = shard_of(source, 1)

        def fail(key: str, number: int) -> None:
            if number == 5:
                raise StoreUnavailableError("the line went down")

        bucket.part_hook = fail
        with pytest.raises(StoreUnavailableError):
            copy(source, bucket)
        assert len(bucket.unfinished_uploads()) == 1
        bucket.part_hook = None
        copy(source, bucket)
        parts = -(-len(source.contents()[shard]) // PART_BYTES)
        assert {number for key, number in bucket.sent if key == shard} == set(range(parts))
        assert set(bucket.sent.values()) == {1}
        assert bucket.unfinished_uploads() == []

    def test_sends_a_part_again_that_arrived_wrong(self, source: MemoryStore, bucket: Bucket) -> None:
        save(source, 1, length=8 * PART_BYTES)

        def fail(key: str, number: int) -> None:
            if number == 4:
                raise StoreUnavailableError("the line went down")

        bucket.part_hook = fail
        with pytest.raises(StoreUnavailableError):
            copy(source, bucket)
        bucket.part_hook = None
        ((_, _, parts),) = bucket._uploads.values()
        parts[0] = bytes(len(parts[0]))
        copy(source, bucket)
        assert bucket.sent[shard_of(source, 1), 0] == 2
        assert without_notes(bucket) == without_notes(source)

    def test_begins_an_upload_anew_that_is_gone(self, source: MemoryStore, bucket: Bucket) -> None:
        save(source, 1, length=8 * PART_BYTES)
        bucket.part_hook = lambda key, number: (_ for _ in ()).throw(StoreUnavailableError("down"))
        with pytest.raises(StoreUnavailableError):
            copy(source, bucket)
        bucket.part_hook = None
        for upload in bucket.unfinished_uploads():
            bucket.abort_upload(upload)
        copy(source, bucket)
        assert without_notes(bucket) == without_notes(source)


class TestATargetThatMayOnlyBeCreatedIn:
    @pytest.fixture
    def blind(self, bucket: Bucket) -> Bucket:
        bucket.denied |= {"read", "list", "delete", "parts"}
        return bucket

    @pytest.fixture(autouse=True)
    def waits(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        waits: list[float] = []
        monkeypatch.setattr("strongroom.replication.once.sleep", waits.append)
        return waits

    def test_is_trusted_with_the_checksums_of_parts_and_that_is_told_once(
        self, source: MemoryStore, blind: Bucket, caplog: pytest.LogCaptureFixture
    ) -> None:
        save(source, 1, 2, length=4 * PART_BYTES)
        with caplog.at_level(logging.WARNING, "strongroom"):
            report = copy(source, blind)
        assert [copied.how for copied in report.copied] == ["checksums", "checksums"]
        assert [record.message for record in caplog.records if "may not be read" in record.message] != []
        assert len([record for record in caplog.records if "may not be read" in record.message]) == 1
        blind.denied.clear()
        assert without_notes(blind) == without_notes(source)

    def test_is_given_nothing_twice(self, source: MemoryStore, blind: Bucket) -> None:
        save(source, 1)
        copy(source, blind)
        assert copy(source, blind).copied == ()

    def test_gets_an_upload_anew_where_it_may_not_be_asked_for_the_old_one(
        self, source: MemoryStore, blind: Bucket
    ) -> None:
        save(source, 1, length=8 * PART_BYTES)

        def fail(key: str, number: int) -> None:
            if number == 4:
                raise StoreUnavailableError("the line went down")

        blind.part_hook = fail
        with pytest.raises(StoreUnavailableError):
            copy(source, blind)
        blind.part_hook = None
        copy(source, blind)
        blind.denied.clear()
        assert without_notes(blind) == without_notes(source)
        assert max(blind.sent.values()) == 2

    @pytest.mark.parametrize("may_ask", (True, False), ids=["parts", "no parts"])
    def test_takes_what_an_earlier_process_sent_and_could_not_note(
        self, source: MemoryStore, blind: Bucket, may_ask: bool
    ) -> None:
        save(source, 1, length=8 * PART_BYTES)
        name = name_of(source, 1)
        copy(source, blind)
        blind.denied.clear()
        blind.delete(name.commit_key)
        blind.denied |= {"read", "list", "delete"} | (set() if may_ask else {"parts"})
        ledger = ledger_of(source, blind)
        ledger.forget(name)
        manifest_files = [key for key in source.contents() if key == shard_of(source, 1)]
        path = manifest_files[0].partition(f"/{DATA}/")[2]

        class Record:
            def __init__(self) -> None:
                self.path = path

        # As if it had been killed between the end of the upload and the note of that.
        ledger.note_upload(name, Record(), "upload-1")  # type: ignore[arg-type]
        copy(source, blind)
        blind.denied.clear()
        assert without_notes(blind) == without_notes(source)

    @pytest.mark.parametrize("paused_s", (60.0, 2 * 3600.0))
    def test_is_not_believed_to_hold_what_may_have_been_taken_for_dead_since(
        self, source: MemoryStore, blind: Bucket, waits: list[float], paused_s: float
    ) -> None:
        save(source, 1, length=8 * PART_BYTES)
        clock = MovedClock()
        # All but the commit has arrived, and is noted.
        blind.fail_on = COMMIT
        with pytest.raises(StoreUnavailableError):
            copy(source, blind, clock=clock.clock)
        blind.fail_on = None
        clock.seconds += paused_s
        if paused_s > 3600:
            # Garbage was collected there meanwhile.
            blind.delete_tree(name_of(source, 1).folder)
        blind.sent.clear()
        copy(source, blind, clock=clock.clock)
        blind.denied.clear()
        assert without_notes(blind) == without_notes(source)
        assert bool(blind.sent) == (paused_s > 3600)
        # A removal may have been under way.
        assert sum(waits) == (REMOVAL_S if paused_s > 3600 else 0)

    @pytest.mark.parametrize("forgets", (True, False), ids=["notes go", "notes cannot go"])
    def test_is_not_believed_by_who_follows_one_that_only_announced_it_anew(
        self, source: MemoryStore, blind: Bucket, monkeypatch: pytest.MonkeyPatch, forgets: bool
    ) -> None:
        save(source, 1)
        clock = MovedClock()
        blind.fail_on = COMMIT
        with pytest.raises(StoreUnavailableError):
            copy(source, blind, clock=clock.clock, note_bytes=0)
        clock.seconds += 8 * 3600.0
        blind.denied.clear()
        blind.delete_tree(name_of(source, 1).folder)
        blind.denied |= {"read", "list", "delete", "parts"}
        if not forgets:
            monkeypatch.setattr(Ledger, "forget_progress", lambda self, name: None)
        blind.fail_on = ".safetensors"
        with pytest.raises(StoreUnavailableError):
            copy(source, blind, clock=clock.clock, note_bytes=0)
        sent = [key for key in source.contents() if "/sending/" in key and "/files-" in key]
        assert bool(sent) != forgets
        blind.fail_on = None
        clock.seconds += 10.0
        copy(source, blind, clock=clock.clock, note_bytes=0)
        blind.denied.clear()
        assert without_notes(blind) == without_notes(source)

    @pytest.mark.parametrize("clock", ("monotonic", "time_ns"))
    def test_is_not_committed_to_by_a_process_that_was_stopped(
        self, source: MemoryStore, blind: Bucket, monkeypatch: pytest.MonkeyPatch, clock: str
    ) -> None:
        """Suspended, for one, which a monotonic clock does not see; or with its clock set back meanwhile."""
        save(source, 1)
        ahead = [0]
        real = getattr(time, clock)
        unit = 10**9 if clock == "time_ns" else 1
        moved = partial(
            Announcement,
            **{"wall_ns" if clock == "time_ns" else clock: lambda: real() + ahead[0] * unit},
        )
        monkeypatch.setattr("strongroom.replication.copying.Announcement", moved)
        put = blind.put_if_absent

        def stop(key: str, data: Any) -> bool:
            is_created = put(key, data)
            if key.endswith("index.safetensors") and not ahead[0]:
                ahead[0] = 36_000
                MemoryStore.delete_tree(blind, name_of(source, 1).folder)
            return is_created

        monkeypatch.setattr(blind, "put_if_absent", stop)
        courier = Courier(
            source,
            Target(store=blind),
            clock=MovedClock().clock,
            emitter=Emitter(),
            check=lambda: None,
            sleep=lambda _: None,
        )
        outlook = courier.look()
        courier.begin(outlook)
        with pytest.raises(ReplicationError, match="taken for dead"):
            courier.deliver(outlook.plan.copies[0], outlook)
        assert not any(key.endswith(COMMIT) for key in blind.contents())
        # Though it was announced a moment ago by the clock of the notes, which was set back.
        courier.deliver(outlook.plan.copies[0], outlook)
        blind.denied.clear()
        assert without_notes(blind) == without_notes(source)


class TestWhatIsRemovedThere:
    @pytest.fixture
    def bucket_half_copied(self, source: MemoryStore, bucket: Bucket) -> Bucket:
        save(source, 1)
        bucket.fail_on = COMMIT
        with pytest.raises(StoreUnavailableError):
            copy(source, bucket)
        bucket.fail_on = None
        return bucket

    def test_is_not_copied_until_it_is_gone(self, source: MemoryStore, bucket_half_copied: Bucket) -> None:
        bucket = bucket_half_copied
        name = name_of(source, 1)
        bucket.delete_tree(f"replication/incoming/{name.folder}")
        mark = RemovalMark(bucket, name)
        assert mark.set()
        before = bucket.contents()
        with pytest.raises(StoreUnavailableError, match="is being removed at memory://bucket"):
            copy(source, bucket)
        # Nor was it announced, which would keep the rest from ever being removed.
        assert bucket.contents() == before
        bucket.delete_tree(name.folder)
        mark.clear()
        copy(source, bucket)
        assert without_notes(bucket) == without_notes(source)

    @pytest.mark.parametrize("end", (".json", COMMIT), ids=["as it is announced", "before the commit"])
    def test_meanwhile_is_not_committed(self, source: MemoryStore, target: Watched, end: str) -> None:
        """Retention, which does not ask who copies: the mark is seen by whoever looks after it was made."""
        save(source, 1)
        name = name_of(source, 1)

        def mark(operation: str, key: str) -> None:
            is_first = operation == "put_if_absent" and key.startswith("replication/incoming/")
            if is_first if end == ".json" else operation == "make_durable":
                target.hook = None
                RemovalMark(target.inner, name).set()

        target.hook = mark
        with pytest.raises(StoreUnavailableError, match="is being removed"):
            copy(source, target)
        assert steps_of(target.inner) == []
        assert bool([key for key in target.inner.contents() if f"/{DATA}/" in key]) == (end == COMMIT)

    def test_is_looked_at_only_after_the_copy_was_announced(
        self, source: MemoryStore, bucket_half_copied: Bucket
    ) -> None:
        """What goes between a first look and the announcement is not relied on."""
        name = name_of(source, 1)
        target = WatchedResuming(bucket_half_copied)

        def sweep(operation: str, key: str) -> None:
            if operation == "put_if_absent" and key.startswith("replication/incoming/"):
                target.hook = None
                bucket_half_copied.delete_tree(name.folder)

        target.hook = sweep
        (copied,) = copy(source, target).copied
        assert copied.how == "reading"
        assert without_notes(bucket_half_copied) == without_notes(source)
        # All of it was sent in this very call, without a failure in between.
        assert copied.sent_bytes >= Checkpointer(source).checkpoints()[0].size_bytes

    def test_by_another_command_is_sent_again_or_stays(self, source: MemoryStore, bucket: Bucket) -> None:
        """A decision to remove, taken while a copy was dead, and carried out after it was taken up."""
        save(source, 1)
        bucket.fail_on = COMMIT
        with pytest.raises(StoreUnavailableError):
            copy(source, bucket)
        bucket.fail_on = None
        removal = Removal(kind="orphan", name=name_of(source, 1), reason="it was dead")
        copy(source, bucket)
        assert "committed after all" in (remove(bucket, removal).error or "")
        assert verify(bucket).verdict == "whole"


class TestWhatMayNotBeRead:
    def test_hides_nothing_that_is_wrong(self, source: MemoryStore, bucket: Bucket) -> None:
        save(source, 1)
        bucket.hidden = "state.json"
        put = bucket.put_if_absent

        def damage(key: str, data: Any) -> bool:
            is_created = put(key, data)
            if key.endswith("MANIFEST.json"):
                flip(bucket, shard_of(source, 1))
            return is_created

        bucket.put_if_absent = damage  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailableError, match="does not give back what was written"):
            copy(source, bucket)
        assert steps_of(bucket) == []

    def test_is_no_matter_of_checksums_while_other_files_may(
        self, source: MemoryStore, bucket: Bucket
    ) -> None:
        save(source, 1)
        bucket.hidden = "state.json"
        with pytest.raises(AccessDeniedError, match=r"state\.json"):
            copy(source, bucket)
        assert steps_of(bucket) == []


class TestATargetThatWasEmptied:
    def test_gets_the_runs_records_again(self, source: MemoryStore, target: Watched) -> None:
        save(source, 1)
        save(source, 2, resumes=True)
        courier = Courier(
            source,
            Target(store=target),
            clock=MovedClock().clock,
            emitter=Emitter(),
            check=lambda: None,
            sleep=lambda _: None,
        )

        def deliver() -> None:
            outlook = courier.look()
            courier.begin(outlook)
            for commit in outlook.plan.copies:
                courier.deliver(commit, outlook)

        deliver()
        for key in target.inner.contents():
            target.inner.delete(key)
        deliver()
        assert without_notes(target.inner) == without_notes(source)


class TestASealedCopy:
    """Committed there before it was noted, so that it is only verified."""

    @pytest.fixture
    def standing(self, source: MemoryStore, target: Watched) -> str:
        save(source, 1)
        name = name_of(source, 1)
        key = keyring_key(name, 1)
        keyring = with_self_digest({"generation": 1})
        commit = Commit.decode(source.contents()[name.commit_key], name.commit_key)
        sealed = replace(commit, keyring=sha256_of(keyring))
        source.plant({key: keyring, name.commit_key: sealed.encode()})
        target.inner.plant(source.contents())
        return key

    def test_that_has_lost_its_keyring_gets_it_again(
        self, source: MemoryStore, target: Watched, standing: str
    ) -> None:
        target.inner.delete(standing)
        (copied,) = copy(source, target).copied
        assert copied.sent_bytes == len(source.contents()[standing])
        assert without_notes(target.inner) == without_notes(source)

    def test_whose_keyring_is_damaged_is_not_taken_for_whole(
        self, source: MemoryStore, target: Watched, standing: str
    ) -> None:
        target.inner.plant({standing: b"rotted"})
        (why,) = copy(source, target).damaged.values()
        assert "sealed" in why
        assert standing in why
        assert not known_targets(source).get(target.uri)
        assert target.inner.contents()[standing] == b"rotted"
        target.inner.delete(standing)
        copy(source, target)
        assert without_notes(target.inner) == without_notes(source)

    def test_with_a_later_keyring_of_the_sources_is_whole(
        self, source: MemoryStore, target: Watched, standing: str
    ) -> None:
        later = {keyring_key(name_of(source, 1), 2): with_self_digest({"generation": 2})}
        source.plant(later)
        target.inner.plant(later)
        target.inner.delete(standing)
        (copied,) = copy(source, target).copied
        assert copied.sent_bytes == 0


class TestWhatIsUnderWay:
    def test_is_announced_before_the_first_file_and_no_longer_after_the_commit(
        self, source: MemoryStore, target: Watched
    ) -> None:
        save(source, 1)
        copy(source, target)
        created = [key for operation, key in target.log if operation in ("put_if_absent", "open_writer")]
        announced = [place for place, key in enumerate(created) if key.startswith("replication/incoming/")]
        files = [place for place, key in enumerate(created) if f"/{DATA}/" in key]
        assert announced
        assert announced[0] < files[0]
        assert target.inner.list_names("replication/incoming") == []

    def test_is_no_garbage_to_whoever_collects_it(self, source: MemoryStore, target: Watched) -> None:
        save(source, 1)
        dead: list[str] = []

        def collect(operation: str, key: str) -> None:
            if operation == "open_writer" and f"/{DATA}/" in key:
                far_later = time.time_ns() + 3600 * 10**9
                history = Catalog(target.inner).history()
                plan = orphans(target.inner, history, launch=1, now_ns=far_later)
                dead.extend(removal.path for removal in plan.removals)

        target.hook = collect
        copy(source, target)
        assert dead == []
        assert without_notes(target.inner) == without_notes(source)


class TestAnotherWriter:
    def test_that_has_another_run_there_is_refused(self, source: MemoryStore, target: Watched) -> None:
        save(source, 1)
        save(target.inner, 1)
        before = target.inner.contents()
        with pytest.raises(ConfigError, match="each run needs a root of its own"):
            copy(source, target)
        assert target.inner.contents() == before

    def test_whose_run_cannot_be_seen_but_by_its_record(self, source: MemoryStore, bucket: Bucket) -> None:
        save(source, 1)
        save(bucket, 1)
        bucket.denied |= {"list"}
        with pytest.raises(ConfigError, match="is not the one in memory://first"):
            copy(source, bucket)

    def test_that_takes_over_while_a_copy_is_made_keeps_it_from_being_committed(
        self, source: MemoryStore, target: Watched
    ) -> None:
        save(source, 1)
        run = Launch.decode(source.read(launch_key(1), limit_bytes=10_000), "launch").run

        def take_over(operation: str, key: str) -> None:
            if operation == "make_durable":
                later = Launch(run=run, launch=7, parent=None, created_at_ms=1, deadline_s=60)
                target.inner.plant({launch_key(7): later.encode()})

        target.hook = take_over
        courier = Courier(
            source,
            Target(store=target),
            clock=MovedClock().clock,
            emitter=Emitter(),
            check=lambda: None,
            sleep=lambda _: None,
        )
        courier.launch = 1
        outlook = courier.look()
        courier.begin(outlook)
        with pytest.raises(FencedError, match="launch 7 has taken the run over at memory://second"):
            courier.deliver(outlook.plan.copies[0], outlook)
        assert name_of(source, 1).commit_key not in target.inner.contents()

    def test_another_process_that_copies_keeps_this_one_from_committing(
        self, source: MemoryStore, target: Watched
    ) -> None:
        save(source, 1)

        def take_turn(operation: str, key: str) -> None:
            if operation == "make_durable":
                ledger_of(source, target).claim_turn()

        target.hook = take_turn
        with pytest.raises(ReplicationError, match="another process copies from memory://first"):
            copy(source, target)
        assert steps_of(target.inner) == []
        target.hook = None
        copy(source, target)
        assert steps_of(target.inner) == [1]

    def test_another_process_that_copies_keeps_this_one_from_removing(
        self, source: MemoryStore, target: Watched
    ) -> None:
        save(source, 1)
        target.inner.plant({shard_of(source, 1): b"being written by the other"})

        def take_turn(operation: str, key: str) -> None:
            if operation == "list_names" and key == name_of(source, 1).folder:
                ledger_of(source, target).claim_turn()

        target.hook = take_turn
        with pytest.raises(ReplicationError):
            copy(source, target)
        assert target.asked("delete") == []

    def test_a_commit_of_something_else_is_never_written_over(
        self, source: MemoryStore, target: Watched
    ) -> None:
        save(source, 1)
        name = name_of(source, 1)

        def commit(operation: str, key: str) -> None:
            if operation == "make_durable":
                target.inner.plant({name.commit_key: b"{}"})

        target.hook = commit
        report = copy(source, target)
        assert "another" in report.damaged[name]
        assert target.inner.contents()[name.commit_key] == b"{}"


class TestWhatIsAddedLater:
    def test_is_copied_too(self, source: MemoryStore, target: Watched) -> None:
        save(source, 1)
        copy(source, target)
        name = name_of(source, 1)
        keyring = with_self_digest({"generation": 2})
        added = {keyring_key(name, 2): keyring, further_signature_key(name, "ab" * 32): b"{}"}
        source.plant(added)
        assert copy(source, target).sidecars == 2
        assert without_notes(target.inner) == without_notes(source)

    def test_is_left_where_it_is_if_the_other_has_another(
        self, source: MemoryStore, target: Watched, caplog: pytest.LogCaptureFixture
    ) -> None:
        save(source, 1)
        copy(source, target)
        key = keyring_key(name_of(source, 1), 2)
        source.plant({key: with_self_digest({"generation": 2})})
        target.inner.plant({key: b"rotated there"})
        with caplog.at_level(logging.WARNING, "strongroom"):
            copy(source, target)
        assert target.inner.contents()[key] == b"rotated there"
        assert "each stays where it is" in caplog.text

    def test_and_is_damaged_is_not_copied(
        self, source: MemoryStore, target: Watched, caplog: pytest.LogCaptureFixture
    ) -> None:
        save(source, 1)
        key = keyring_key(name_of(source, 1), 2)
        source.plant({key: b"torn"})
        with caplog.at_level(logging.WARNING, "strongroom"):
            copy(source, target)
        assert steps_of(target.inner) == [1]
        assert key not in target.inner.contents()
        assert "is damaged, and not copied" in caplog.text


class TestNotes:
    def test_of_what_is_gone_from_the_first_tier_are_removed(
        self, source: MemoryStore, target: Watched
    ) -> None:
        save(source, 1, 2)
        copy(source, target)
        name = name_of(source, 1)
        source.delete(name.commit_key)
        source.delete_tree(name.folder)
        copy(source, target)
        assert not [key for key in source.contents() if name.folder in key]
        assert steps_of(target.inner) == [2, 1]

    def test_of_how_a_copy_went_are_removed_once_it_stands(
        self, source: MemoryStore, target: Watched
    ) -> None:
        save(source, 1)
        copy(source, target)
        assert not [key for key in source.contents() if "/sending/" in key]

    def test_tell_no_targets_apart_by_anything_but_their_uri(
        self, source: MemoryStore, target: Watched
    ) -> None:
        save(source, 1)
        copy(source, target)
        other = MemoryStore("third")
        copy(source, other)
        assert known_targets(source).keys() == {target.uri, other.uri}

    def test_that_cannot_be_written_keep_nothing_from_being_copied(
        self, source: MemoryStore, target: Watched, caplog: pytest.LogCaptureFixture
    ) -> None:
        save(source, 1)
        watched = Watched(source)

        def refuse(operation: str, key: str) -> None:
            if operation == "put_if_absent" and "/sending/" in key:
                raise StoreError("the quota is used up")

        watched.hook = refuse
        with caplog.at_level(logging.WARNING, "strongroom"):
            copy(watched, target)
        assert steps_of(target.inner) == [1]
        assert "cannot be noted in memory://first" in caplog.text


def test_a_root_is_not_copied_onto_itself(source: MemoryStore) -> None:
    with pytest.raises(ConfigError, match="cannot be copied onto itself"):
        copy(source, source)


def test_progress_reaches_its_total(source: MemoryStore, target: Watched) -> None:
    save(source, 1, 2)
    heard = []
    copy(source, target, on_progress=heard.append)
    assert heard[-1].done_bytes == heard[-1].total_bytes > 0


def test_every_error_of_a_source_is_its_own(source: MemoryStore, target: Watched) -> None:
    save(source, 1)
    source.delete("run.json")
    with pytest.raises(IntegrityError, match=r"run\.json is missing in memory://first"):
        copy(source, target)


def test_a_commit_is_not_sent_for_longer_than_what_announces_it_counts(source: MemoryStore) -> None:
    told: list[tuple[str, float]] = []

    class Patient(Bucket):
        def put_if_absent_within(self, key: str, data: Any, within_s: float) -> bool:
            told.append((key, within_s))
            return self.put_if_absent(key, data)

    save(source, 1)
    target = Patient()
    copy(source, target)
    assert told == [(name_of(source, 1).commit_key, VALID_S)]
    assert without_notes(target) == without_notes(source)
