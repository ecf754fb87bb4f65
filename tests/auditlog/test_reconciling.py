"""Accesses held against events: what is ours, what went round the library, and what is merely told."""

from __future__ import annotations

import gzip
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from happenings import DAY, HOUR, MINUTE, NOW, ROLE, ROOT, RUN, TRAINER, VALIDATOR, Log, name

from strongroom.auditing import Action, Outcome, Phase
from strongroom.errors import ConfigError
from strongroom.stores.memory import MemoryStore
from strongroom_security.auditlog.reconciling import sources
from strongroom_security.auditlog.reconciling.accesses import Access, AccessKind, Damage, Served, Subject
from strongroom_security.auditlog.reconciling.commits import CommitStanding, Committed, judge_commits
from strongroom_security.auditlog.reconciling.identities import Likeness, likeness
from strongroom_security.auditlog.reconciling.joining import Joined, Settings, Verdict, Watched, join
from strongroom_security.auditlog.reconciling.operations import LONGEST_MS, Operations
from strongroom_security.auditlog.reconciling.sources import LogFile, find_logs, read_log

FIXTURES = Path(__file__).parent / "fixtures"
WATCHED = Watched(run=RUN, root=ROOT, bucket="bucket", prefix="runs/run-a/")
AGENT = "[Boto3/1.44 strongroom/0.1]"
MALLORY = "arn:aws:iam::111122223333:user/mallory"
SHARD = "data/00000-00.safetensors"
LATE = NOW + DAY


def access(
    kind: AccessKind = AccessKind.READ,
    *,
    at: int,
    key: str | None = None,
    step: int = 100,
    path: str = SHARD,
    identity: str | None = VALIDATOR.identity,
    address: str | None = "192.0.2.2",
    agent: str | None = AGENT,
    **members: Any,
) -> Access:
    if key is None and kind in (AccessKind.READ, AccessKind.WRITE, AccessKind.DELETE, AccessKind.LOOK):
        key = f"runs/run-a/{name(step).folder}/{path}"
    members = {"served": Served.DONE, "operation": f"REST.{kind.name}", "source": "log:1"} | members
    return Access(
        kind=kind,
        time=at,
        bucket=None if key is None else "bucket",
        key=key,
        identity=identity,
        address=address,
        agent=agent,
        **members,
    )


def joined(log: Log, *accesses: Access | Damage, watched: Watched = WATCHED, **settings: Any) -> Joined:
    operations = Operations(log.events, run=watched.run, root=watched.root)
    return join(accesses, operations, watched, Settings(**{"until_ms": LATE} | settings))


def verdict(log: Log, one: Access, **settings: Any) -> Verdict:
    found = joined(log, one, **settings)
    return found.findings[0].verdict if found.findings else Verdict.MATCHED


def saved_and_read() -> Log:
    log = Log()
    log.save(100, at=NOW - HOUR)
    log.read(100, at=NOW)
    return log


# ----------------------------------------------------------------------------------------------- bypasses


def test_a_read_within_a_restore_on_record_is_ours() -> None:
    found = joined(
        saved_and_read(), access(at=NOW), access(at=NOW - 10 * MINUTE), access(at=NOW + 10 * MINUTE)
    )
    assert (found.matched, found.findings) == (3, [])


def test_a_read_of_which_nothing_is_on_record_went_round_the_library() -> None:
    log = Log()
    log.save(100, at=NOW - 5 * HOUR)
    found = joined(log, access(at=NOW, identity=MALLORY, agent="aws-cli/2", sent_bytes=10, request="R1"))
    (finding,) = found.bypasses
    assert (finding.verdict, finding.identity, finding.address) == (Verdict.BYPASS, MALLORY, "192.0.2.2")
    assert (finding.where, finding.first, finding.sent_bytes) == (name(100).folder, NOW, 10)
    assert (finding.objects, finding.requests) == ([f"runs/run-a/{name(100).folder}/{SHARD}"], ["R1"])


def test_a_read_at_another_time_than_a_restore_went_round() -> None:
    assert verdict(saved_and_read(), access(at=NOW + HOUR)) is Verdict.BYPASS
    assert verdict(saved_and_read(), access(at=NOW + HOUR), window_ms=2 * HOUR) is Verdict.MATCHED


def test_a_read_of_another_checkpoint_than_was_restored_went_round() -> None:
    assert verdict(saved_and_read(), access(at=NOW, step=99)) is Verdict.BYPASS


def test_a_read_by_another_than_who_restored_went_round() -> None:
    found = joined(saved_and_read(), access(at=NOW, identity=MALLORY))
    (finding,) = found.bypasses
    assert (finding.verdict, finding.beside) == (Verdict.OTHER_IDENTITY, VALIDATOR.identity)


def test_a_read_without_credentials_went_round_whoever_restores_meanwhile() -> None:
    assert verdict(saved_and_read(), access(at=NOW, identity=None)) is Verdict.OTHER_IDENTITY


def test_a_read_with_the_same_credentials_by_another_program_went_round() -> None:
    assert verdict(saved_and_read(), access(at=NOW, agent="aws-cli/2.30")) is Verdict.OTHER_PROGRAM
    assert verdict(saved_and_read(), access(at=NOW, agent=None)) is Verdict.MATCHED


def test_a_trainer_that_saves_has_no_business_in_reading_what_it_saved() -> None:
    log = Log()
    log.save(100, at=NOW)
    trainer = {"identity": TRAINER.identity, "address": TRAINER.ip}
    assert verdict(log, access(at=NOW, **trainer)) is Verdict.BYPASS  # type: ignore[arg-type]
    small = access(at=NOW, path="COMMIT", **trainer)  # type: ignore[arg-type]
    assert verdict(log, small) is Verdict.MATCHED


@pytest.mark.parametrize(
    ("action", "kind", "expected"),
    (
        (Action.SAVE, AccessKind.WRITE, Verdict.MATCHED),
        (Action.RESTORE, AccessKind.WRITE, Verdict.BYPASS),
        (Action.REMOVE, AccessKind.DELETE, Verdict.MATCHED),
        (Action.SAVE, AccessKind.DELETE, Verdict.BYPASS),
        (Action.RESTORE, AccessKind.DELETE, Verdict.BYPASS),
        (Action.REPLICATE, AccessKind.READ, Verdict.MATCHED),
        (Action.REMOVE, AccessKind.READ, Verdict.BYPASS),
    ),
)
def test_each_operation_accounts_for_what_it_does_and_for_nothing_else(
    action: Action, kind: AccessKind, expected: Verdict
) -> None:
    log = Log()
    log.read(100, at=NOW, action=action)
    assert verdict(log, access(kind, at=NOW)) is expected


def test_a_save_that_failed_may_remove_what_it_wrote() -> None:
    log = Log()
    log.tell(Action.SAVE, Phase.STARTED, at=NOW, checkpoint=name(100), operation="1" * 16)
    log.tell(Action.SAVE, outcome=Outcome.FAILURE, at=NOW, checkpoint=name(100), operation="1" * 16)
    mine = access(AccessKind.DELETE, at=NOW, identity=ROLE)
    assert verdict(log, mine) is Verdict.MATCHED


def test_new_keyrings_and_signatures_are_written_by_whoever_changes_them() -> None:
    log = Log()
    log.read(100, at=NOW, action=Action.ROTATE)
    assert verdict(log, access(AccessKind.WRITE, at=NOW, path="keyring/0002.json")) is Verdict.MATCHED
    assert verdict(log, access(AccessKind.WRITE, at=NOW, path="COMMIT")) is Verdict.BYPASS


def test_lists_and_small_documents_are_anybodys_who_is_at_work_there() -> None:
    log = Log()
    log.tell(Action.LIST, at=NOW, by=VALIDATOR)
    for key in ("run.json", "launches/000001.json", f"{name(7).folder}/COMMIT"):
        assert verdict(log, access(at=NOW, key=f"runs/run-a/{key}")) is Verdict.MATCHED
        theirs = access(at=NOW, key=f"runs/run-a/{key}", identity=MALLORY)
        assert verdict(log, theirs) is Verdict.BYPASS
    assert verdict(log, access(at=NOW, step=7)) is Verdict.BYPASS
    assert verdict(log, access(AccessKind.DELETE, at=NOW, key="runs/run-a/run.json")) is Verdict.BYPASS


def test_an_operation_without_an_end_lasts_as_long_as_its_process_is_known_to_have_lived() -> None:
    log = Log()
    log.tell(Action.EXPORT, Phase.INTENDED, at=NOW, by=VALIDATOR, checkpoint=name(100))
    assert verdict(log, access(at=NOW + 2 * HOUR)) is Verdict.BYPASS
    log.tell(Action.LIST, at=NOW + 2 * HOUR, by=VALIDATOR)
    assert verdict(log, access(at=NOW + 2 * HOUR)) is Verdict.MATCHED
    log.tell(Action.LIST, at=NOW + 3 * DAY, by=VALIDATOR)
    assert verdict(log, access(at=NOW + 2 * LONGEST_MS), until_ms=NOW + 9 * DAY) is Verdict.BYPASS


# --------------------------------------------------------------------------------------------------- keys


def unwrap(at: int, *, step: int = 100, run: str = RUN, **members: Any) -> Access:
    subject = Subject(run=run, folder=name(step).folder)
    return access(AccessKind.UNWRAP, at=at, subject=subject, operation="Decrypt", **members)


def test_an_unwrap_within_a_restore_is_ours_and_any_other_went_round() -> None:
    assert verdict(saved_and_read(), unwrap(NOW)) is Verdict.MATCHED
    assert verdict(saved_and_read(), unwrap(NOW, step=7)) is Verdict.BYPASS
    assert verdict(saved_and_read(), unwrap(NOW, identity=MALLORY)) is Verdict.OTHER_IDENTITY


def test_an_unwrap_is_known_by_its_request_whatever_the_clocks_say() -> None:
    log = Log()
    ids = {"kms_request_id": "q-0,q-1", "kms_request_id_2": "q-2"}
    log.tell(Action.UNWRAP, at=NOW, by=VALIDATOR, checkpoint=name(100), **ids)
    assert verdict(log, unwrap(NOW + 5 * HOUR, request="q-2")) is Verdict.MATCHED
    assert verdict(log, unwrap(NOW + 5 * HOUR, request="q-3")) is Verdict.BYPASS
    assert verdict(log, unwrap(NOW, request="q-1", identity=MALLORY)) is Verdict.OTHER_IDENTITY


def test_another_runs_keys_are_not_looked_at() -> None:
    found = joined(saved_and_read(), unwrap(NOW, run="run-b"), access(at=NOW, key="runs/run-b/run.json"))
    assert (found.others, found.findings) == (2, [])


def test_every_use_of_a_key_that_is_named_counts_whatever_it_says_it_is_for() -> None:
    watched = replace(WATCHED, kms_keys=frozenset({"1234"}))
    used = access(AccessKind.SIGN, at=NOW, kms_key="arn:aws:kms:r:1:key/1234", identity=MALLORY)
    assert [each.verdict for each in joined(saved_and_read(), used, watched=watched).bypasses] == [
        Verdict.BYPASS
    ]
    assert joined(saved_and_read(), used).others == 1
    ours = replace(used, identity=VALIDATOR.identity)
    assert joined(saved_and_read(), ours, watched=watched).matched == 1


# --------------------------------------------------------------------------------------- told, and no more


def test_the_same_role_in_another_session_is_told_and_is_no_bypass() -> None:
    other = "arn:aws:sts::111122223333:assumed-role/validator-reader/job-99"
    found = joined(saved_and_read(), access(at=NOW, identity=other))
    assert [each.verdict for each in found.findings] == [Verdict.OTHER_SESSION]
    assert found.bypasses == []


def test_an_event_that_does_not_say_by_whom_is_told_unless_it_came_from_the_same_address() -> None:
    log = Log()
    log.read(100, at=NOW, by=replace(VALIDATOR, identity=None))
    assert verdict(log, access(at=NOW, address="192.0.2.77")) is Verdict.NO_IDENTITY
    assert verdict(log, access(at=NOW)) is Verdict.MATCHED


def test_what_was_refused_or_failed_is_no_bypass() -> None:
    refused = access(at=NOW, identity=MALLORY, served=Served.REFUSED)
    failed = access(at=NOW, identity=MALLORY, served=Served.FAILED)
    found = joined(saved_and_read(), refused, failed)
    assert [each.verdict for each in found.findings] == [Verdict.REFUSED]
    assert (found.failed, found.bypasses) == (1, [])


def test_a_stranger_that_looks_is_told() -> None:
    found = joined(saved_and_read(), access(AccessKind.LOOK, at=NOW, identity=MALLORY))
    assert [each.verdict for each in found.findings] == [Verdict.LOOK]


def test_a_look_by_whom_one_expects_is_told_as_that() -> None:
    look = access(AccessKind.LOOK, at=NOW, identity=MALLORY)
    assert verdict(Log(), look, expected=(MALLORY,)) is Verdict.EXPECTED


def test_a_thousand_ranks_that_restore_one_checkpoint_are_all_accounted_for() -> None:
    log = Log()
    for rank in range(1000):
        log.read(100, at=NOW, by=replace(VALIDATOR, rank=rank, ip=f"192.0.{rank // 250}.{rank % 250}"))
    reads = [
        access(at=NOW, address=f"192.0.{rank // 250}.{rank % 250}", path=f"data/{rank:05d}-00.safetensors")
        for rank in range(1000)
    ]
    assert joined(log, *reads).matched == 1000


def test_whom_one_expects_without_events_is_told_apart() -> None:
    backup = "arn:aws:sts::111122223333:assumed-role/backup/x"
    found = joined(
        Log(), access(at=NOW, identity=backup), expected=("arn:aws:iam::111122223333:role/service/backup",)
    )
    assert [each.verdict for each in found.findings] == [Verdict.EXPECTED]


def test_what_is_too_young_is_left_open_and_what_is_too_old_is_passed_over() -> None:
    found = joined(
        Log(), access(at=NOW), access(at=NOW - 2 * HOUR), since_ms=NOW - HOUR, until_ms=NOW - MINUTE
    )
    assert (found.open, found.others, found.findings) == (1, 1, [])


def test_a_write_that_a_later_launch_has_accounted_for_is_told_as_that() -> None:
    log = Log()
    log.tell(Action.SAVE, Phase.OBSERVED, at=NOW + 5 * HOUR, checkpoint=name(100), writer="b" * 32)
    assert verdict(log, access(AccessKind.WRITE, at=NOW)) is Verdict.OBSERVED
    assert verdict(log, access(AccessKind.READ, at=NOW)) is Verdict.BYPASS


def test_whoever_finds_a_commit_has_not_made_it() -> None:
    log = Log()
    log.tell(Action.SAVE, Phase.OBSERVED, at=NOW, checkpoint=name(100))
    assert verdict(log, access(AccessKind.WRITE, at=NOW, identity=ROLE)) is Verdict.OBSERVED
    assert verdict(log, access(at=NOW, key="runs/run-a/run.json", identity=ROLE)) is Verdict.BYPASS


def test_one_request_that_two_logs_tell_of_counts_once() -> None:
    twice = [access(at=NOW, identity=MALLORY, request="R"), access(at=NOW, identity=MALLORY, request="R")]
    assert joined(Log(), *twice).findings[0].count == 1


def test_alike_accesses_are_one_finding_and_damage_is_counted() -> None:
    reads = [access(at=NOW + n, identity=MALLORY, path=f"data/{n:05d}-00.safetensors") for n in range(50)]
    found = joined(Log(), *reads, *[Damage(source="log:9", reason="it is no line")] * 200)
    (finding,) = found.findings
    assert (finding.count, finding.first, finding.last, len(finding.objects)) == (50, NOW, NOW + 49, 5)
    assert (found.damage_count, len(found.damages)) == (200, 100)


def test_a_restore_that_storage_knows_nothing_of_is_told() -> None:
    log = saved_and_read()
    log.read(50, at=NOW + HOUR)
    far = [access(at=NOW - 3 * HOUR, identity=MALLORY), access(at=NOW + 5 * HOUR, identity=MALLORY)]
    writes = [access(AccessKind.WRITE, at=NOW - HOUR, identity=ROLE), access(at=NOW)]
    found = joined(log, *far, *writes)
    assert [(each.action, each.folder) for each in found.unseen] == [("restore", name(50).folder)]


def test_a_prefix_that_its_log_has_encoded_twice_is_known() -> None:
    watched = replace(WATCHED, prefix="my runs/a/")
    once = access(at=NOW, key="my%20runs/a/run.json", identity=MALLORY)
    assert len(joined(Log(), once, watched=watched).bypasses) == 1


@pytest.mark.parametrize("encoded", ("%2F", "%252F", "%25252F"))
def test_a_shard_is_no_small_document_however_often_its_key_was_encoded(encoded: str) -> None:
    log = Log()
    log.tell(Action.LIST, at=NOW, by=VALIDATOR)
    shard = f"{name(100).folder}{encoded}{SHARD}"
    assert verdict(log, access(at=NOW, key=f"runs/run-a/{shard}")) is Verdict.BYPASS
    letter = f"%25{ord('s'):x}{shard[1:]}"
    assert verdict(log, access(at=NOW, key=f"runs/run-a/{letter}")) is Verdict.BYPASS
    prefix = f"runs{encoded}run-a/{name(100).folder}/{SHARD}"
    assert verdict(log, access(at=NOW, key=prefix)) is Verdict.BYPASS


def test_what_is_read_of_a_root_and_is_no_document_of_a_run_is_nobodys() -> None:
    log = Log()
    log.tell(Action.LIST, at=NOW, by=VALIDATOR)
    assert verdict(log, access(at=NOW, key="runs/run-a/copy-of-a-shard")) is Verdict.BYPASS


def test_a_read_by_an_access_point_of_some_bucket_counts_where_its_key_is_like_a_runs() -> None:
    point = "arn:aws:s3:eu-central-1:111122223333:accesspoint/loot"
    read = replace(access(at=NOW, identity=MALLORY), bucket=point)
    assert verdict(Log(), read) is Verdict.BYPASS
    found = joined(Log(), replace(read, key="holiday.jpg"), watched=replace(WATCHED, prefix=""))
    assert (found.findings, found.others) == ([], 1)
    assert joined(Log(), replace(read, bucket="another")).others == 1


# ------------------------------------------------------------------------------------------------ identity


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    (
        (ROLE, ROLE, Likeness.SAME),
        (ROLE, "arn:aws:sts::111122223333:assumed-role/trainer-writer/job-8", Likeness.PRINCIPAL),
        (ROLE, "arn:aws:iam::111122223333:role/ml/trainer-writer", Likeness.SAME),
        (ROLE, "arn:aws:sts::999922223333:assumed-role/trainer-writer/job-7", Likeness.OTHER),
        (ROLE, "arn:aws:iam::111122223333:user/trainer-writer", Likeness.OTHER),
        (MALLORY, "arn:aws:iam::111122223333:user/staff/mallory", Likeness.SAME),
        ("arn:aws:iam::111122223333:root", "arn:aws:iam::111122223333:root", Likeness.SAME),
        ("service:a", "service:b", Likeness.OTHER),
        (ROLE, None, Likeness.UNKNOWN),
        (None, None, Likeness.UNKNOWN),
    ),
)
def test_two_names_of_one_identity_are_known_as_that(
    one: str | None, other: str | None, expected: Likeness
) -> None:
    assert likeness(one, other) is expected
    assert likeness(other, one) is expected


# ------------------------------------------------------------------------------------------------- commits


def standing(log: Log, step: int = 100, *, at: int = NOW) -> CommitStanding | None:
    commit = Committed(folder=name(step).folder, step=step, launch=1, time=at)
    operations = Operations(log.events, run=RUN, root=ROOT)
    found = judge_commits([commit], operations, since_ms=None, until_ms=LATE)
    return found[0].standing if found else None


def test_a_commit_on_record_from_its_beginning_is_not_told() -> None:
    log = Log()
    log.save(100, at=NOW)
    assert standing(log) is None


def test_a_commit_that_the_log_does_not_know_is_told_as_what_it_is() -> None:
    log = Log()
    log.tell(Action.LAUNCH, at=NOW - HOUR)
    assert standing(log) is CommitStanding.UNRECORDED
    assert standing(log, at=NOW - 2 * HOUR) is CommitStanding.EARLIER
    assert standing(Log()) is CommitStanding.EARLIER
    log.tell(Action.SAVE, Phase.OBSERVED, at=NOW, checkpoint=name(100))
    assert standing(log) is CommitStanding.OBSERVED
    log.tell(Action.SAVE, at=NOW, checkpoint=name(100))
    assert standing(log) is CommitStanding.UNSTARTED


# ------------------------------------------------------------------------------------------------- sources


def all_of(*places: Path | str, **options: Any) -> list[Access | Damage]:
    found: list[Access | Damage] = []
    for file in find_logs([str(place) for place in places], **options):
        found += [file] if isinstance(file, Damage) else list(read_log(file))
    return found


def test_the_fixtures_show_a_bypass_in_both_logs() -> None:
    log = Log()
    log.save(100, at=1_796_029_142_000)
    log.read(100, at=1_796_029_199_000)
    for fixture, count in (("access-log.txt", 5), ("cloudtrail.json", 4)):
        found = joined(log, *all_of(FIXTURES / fixture), until_ms=2 * NOW)
        assert found.matched == count - (fixture == "access-log.txt"), found.findings
        assert [each.identity for each in found.bypasses] == [MALLORY]


def test_folders_and_packed_files_are_read_whole(tmp_path: Path) -> None:
    nested = tmp_path / "AWSLogs" / "2026" / "11"
    nested.mkdir(parents=True)
    lines = (FIXTURES / "access-log.txt").read_bytes()
    (nested / "trail.json.gz").write_bytes(gzip.compress((FIXTURES / "cloudtrail.json").read_bytes()))
    # As "cat a.gz b.gz" leaves them: one member after another.
    (tmp_path / "log.gz").write_bytes(gzip.compress(lines) + gzip.compress(lines))
    shutil.copy(FIXTURES / "access-log.txt", tmp_path / "2026-11-30-09-30-00-0123456789ABCDEF")
    found = all_of(tmp_path)
    assert {type(each) for each in found} == {Access}
    assert len(found) == 5 + 12 + 6


def test_what_is_damaged_is_told_with_its_place_and_hides_nothing_else(tmp_path: Path) -> None:
    lines = (FIXTURES / "access-log.txt").read_bytes().splitlines()
    lines[2] = b"\xff\x00 no line"
    lines.insert(4, b"x" * 200_000)
    (tmp_path / "log").write_bytes(b"\n".join(lines))
    found = all_of(tmp_path / "log")
    assert [each.source.rpartition(":")[2] for each in found if isinstance(each, Damage)] == ["3", "5"]
    assert sum(isinstance(each, Access) for each in found) == 5


def test_a_packed_file_that_is_cut_off_is_damaged_behind_what_it_tells(tmp_path: Path) -> None:
    packed = gzip.compress((FIXTURES / "access-log.txt").read_bytes() * 400)
    (tmp_path / "log").write_bytes(packed[: len(packed) - 9])
    found = all_of(tmp_path / "log")
    assert isinstance(found[-1], Damage)
    assert "cut off" in found[-1].reason
    assert len(found) > 100


def test_a_document_that_never_ends_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_DOCUMENT_BYTES", 4 << 20)
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(b"[" + b" " * (8 << 20)))
    (told,) = all_of(tmp_path)
    assert isinstance(told, Damage)
    assert "in one document" in told.reason


def test_logs_in_a_store_are_read_like_those_in_a_folder() -> None:
    store = MemoryStore()
    store.put("AWSLogs/trail.json.gz", gzip.compress((FIXTURES / "cloudtrail.json").read_bytes()))
    file = LogFile(name="trail", store=store, key="AWSLogs/trail.json.gz")
    assert len(list(read_log(file))) == 5
    (missing,) = read_log(LogFile(name="none", store=store, key="none"))
    assert isinstance(missing, Damage)


def test_files_that_were_delivered_before_are_not_opened(tmp_path: Path) -> None:
    for called in (
        "2026-11-01-00-00-00-0123456789ABCDEF",
        "1_CloudTrail_eu_20261101T0000Z_abcDEF.json",
        "other",
    ):
        (tmp_path / called).write_text("no line\n")
    assert len(all_of(tmp_path)) == 3
    assert [each.source for each in all_of(tmp_path, since_ms=1_796_000_000_000)] == [f"{tmp_path}/other:1"]


def test_a_place_where_nothing_is_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no log at"):
        list(find_logs([str(tmp_path / "none")]))


def test_who_only_asks_about_a_run_does_not_begin_its_log() -> None:
    log = Log()
    log.tell(Action.AUDIT, at=NOW)
    assert Operations(log.events, run=RUN, root=ROOT).first is None
    log.tell(Action.LIST, at=NOW + MINUTE)
    assert Operations(log.events, run=RUN, root=ROOT).first == NOW + MINUTE
