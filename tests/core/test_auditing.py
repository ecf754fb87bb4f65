"""What the core tells the audit log: what is read says so first, what is written says so, how each ended."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from strongroom import (
    AuditError,
    Checkpointer,
    ConfigError,
    IntegrityError,
    KeepLast,
    SaveError,
    StateEncodingError,
    StoreUnavailableError,
    Tier,
    events,
)
from strongroom.acts import MAX_OBSERVED, act_of, observed
from strongroom.auditing import (
    NO_AUDIT,
    Act,
    Action,
    Activity,
    Auditor,
    Outcome,
    Phase,
    accepted_operation,
    listed,
    outcome_of,
    unlisted,
)
from strongroom.catalog import Catalog
from strongroom.dcp import StrongroomReader, StrongroomWriter
from strongroom.errors import AccessDeniedError, FencedError, NoKeyError, UntrustedError
from strongroom.exporting.export import export
from strongroom.layout import CheckpointName
from strongroom.opened import open_checkpoint
from strongroom.replication import Target, replicate
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom.testing.auditing import RecordingAuditor
from strongroom.verify import verify
from strongroom_security import Seal, SecurityPolicy, Sign
from strongroom_security.recipients.file import create_key_file
from strongroom_security.signers.generating import generate_key

NAME = CheckpointName(launch=1, step=7, attempt="0123456789abcdef")


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*unavailable")

NO_DIST: dict[str, Any] = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}


def state(number: float = 1) -> dict[str, Any]:
    return {"t": torch.full((1000,), float(number)), "extra": {"n": number}}


@pytest.fixture
def auditor() -> RecordingAuditor:
    return RecordingAuditor()


@pytest.fixture
def policy(auditor: RecordingAuditor) -> SecurityPolicy:
    return SecurityPolicy(auditor=auditor)


@pytest.fixture
def sealed(auditor: RecordingAuditor, tmp_path: Path) -> SecurityPolicy:
    return SecurityPolicy(
        auditor=auditor, seal=Seal(recipients=[create_key_file(tmp_path / "kek.key")]), digest="blake3"
    )


def saved(root: Any, policy: SecurityPolicy | None = None, steps: int = 1, **options: Any) -> None:
    with Checkpointer(root, security=policy, run_id="r", **options) as checkpointer:
        for step in range(1, steps + 1):
            checkpointer.save(step, state(step))


def damage(root: Path, step: int) -> None:
    shard = max(root.glob(f"step-{step:012d}-*/data/*.safetensors*"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-10] ^= 1
    shard.write_bytes(data)


# ------------------------------------------------------------------------------------------ an activity


def test_an_activity_tells_what_it_intends_and_how_it_ended(auditor: RecordingAuditor) -> None:
    with Activity(auditor, Action.EXPORT, root="file:///r") as activity:
        activity.intend("r", NAME)
        activity.note(size_bytes=3)
    first, last = auditor.acts
    assert (first.phase, first.outcome, first.run, first.checkpoint) == (
        Phase.INTENDED, Outcome.UNKNOWN, "r", NAME,
    )  # fmt: skip
    assert (last.phase, last.outcome, last.details) == (Phase.FINISHED, Outcome.SUCCESS, {"size_bytes": 3})
    assert first.operation == last.operation
    assert first.root == last.root == "file:///r"


def test_an_activity_that_raises_is_told_as_failed_or_as_denied(auditor: RecordingAuditor) -> None:
    for error in (NoKeyError("none"), OSError("disk")):
        with pytest.raises(type(error)), Activity(auditor, Action.SHOW):
            raise error
    assert [(act.outcome, act.reason, act.details["error"]) for act in auditor.acts] == [
        (Outcome.DENIED, "none", "NoKeyError"),
        (Outcome.FAILURE, "disk", "OSError"),
    ]


def test_an_end_is_told_once(auditor: RecordingAuditor) -> None:
    with Activity(auditor, Action.VERIFY) as activity:
        activity.conclude(Outcome.FAILURE, "damaged")
        activity.succeed()
    (act,) = auditor.acts
    assert (act.outcome, act.reason) == (Outcome.FAILURE, "damaged")


def test_only_what_was_accepted_and_goes_on_may_be_read(auditor: RecordingAuditor) -> None:
    other = RecordingAuditor()
    assert accepted_operation(auditor, "r", NAME) is None
    with Activity(auditor, Action.RESTORE) as activity:
        assert accepted_operation(auditor, "r", NAME) is None
        activity.intend("r", NAME)
        assert accepted_operation(auditor, "r", NAME) == activity.operation
        assert accepted_operation(other, "r", NAME) is None
        assert accepted_operation(auditor, "other", NAME) is None
        assert accepted_operation(auditor, "r", dataclasses.replace(NAME, step=8)) is None
    assert accepted_operation(auditor, "r", NAME) is None


def test_what_was_refused_may_not_be_read(auditor: RecordingAuditor) -> None:
    auditor.refuses = True
    with pytest.raises(AuditError), Activity(auditor, Action.RESTORE) as activity:
        try:
            activity.intend("r", NAME)
        finally:
            assert accepted_operation(auditor, "r", NAME) is None
    assert auditor.told == [("restore", "finished", "denied")]


def test_an_activity_that_nobody_holds_any_more_lets_nothing_be_read(auditor: RecordingAuditor) -> None:
    activity = Activity(auditor, Action.RESTORE)
    activity.intend("r", NAME)
    del activity
    gc.collect()
    assert accepted_operation(auditor, "r", NAME) is None


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_inherits_no_intent(auditor: RecordingAuditor) -> None:
    with Activity(auditor, Action.RESTORE) as activity:
        activity.intend("r", NAME)
        child = os.fork()
        if child == 0:
            os._exit(0 if accepted_operation(auditor, "r", NAME) is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert accepted_operation(auditor, "r", NAME) is not None


def test_the_double_and_the_absent_auditor_are_auditors(auditor: RecordingAuditor) -> None:
    assert isinstance(auditor, Auditor)
    assert isinstance(NO_AUDIT, Auditor)
    assert outcome_of(UntrustedError("x")) is Outcome.DENIED
    assert outcome_of(IntegrityError("x")) is Outcome.FAILURE


def test_a_second_tier_is_said_again_and_the_same_one_is_not(auditor: RecordingAuditor) -> None:
    with Activity(auditor, Action.RESTORE, root="file:///one") as activity:
        for root in (None, "file:///one", "file:///two", "file:///two"):
            activity.intend("r", NAME, root=root)
        assert accepted_operation(auditor, "r", NAME) == activity.operation
    assert [act.root for act in auditor.of(Action.RESTORE, Phase.INTENDED)] == ["file:///one", "file:///two"]


_LINK = (
    "https://b.s3.amazonaws.com/k?X-Amz-Credential=AKIAIOSFODNN7EXAMPLE&X-Amz-Security-Token=IQoJtoken"
    "&X-Amz-Signature=deadbeef"
)


@pytest.mark.parametrize(
    ("text", "secrets"),
    (
        (f"GET {_LINK} failed: 403", ("IQoJtoken", "deadbeef", "AKIAIOSFODNN7EXAMPLE")),
        ("GET https://h/k?sv=2024&code=verysecret failed: 403", ("verysecret",)),
        ("cannot connect to postgres://ann:hunter22@db/x failed: 403", ("hunter22",)),
        ("Authorization: Bearer abcdefghijklmnop failed: 403", ("abcdefghijklmnop",)),
    ),
)
def test_no_secret_in_an_errors_text_comes_to_the_record(
    auditor: RecordingAuditor, text: str, secrets: tuple[str, ...]
) -> None:
    with pytest.raises(OSError, match="failed"), Activity(auditor, Action.SHOW) as activity:
        activity.tell(Outcome.FAILURE, checkpoint=NAME, reason=text)
        raise OSError(text)
    Activity(auditor, Action.SHOW).conclude(Outcome.FAILURE, text)
    told = [act.reason for act in auditor.acts]
    for event in (
        events.SaveFailed(**_AT, reason=text, error="OSError", failures=1),
        events.RemovalStarted(run="r", folder=NAME.folder, root="", reason=text, operation="0" * 16),
    ):
        act = act_of(event, "file:///r")
        assert act is not None
        told.append(act.reason)
    assert len(told) == 5
    for reason in told:
        assert reason is not None
        assert not [secret for secret in secrets if secret in reason]
        assert reason.endswith("failed: 403")


def test_many_texts_have_room_in_several_details() -> None:
    ids = [f"{number:08x}-1111-2222-3333-444444444444" for number in range(100)]
    details = listed("kms_request_id", ids)
    assert list(details)[:2] == ["kms_request_id", "kms_request_id_2"]
    assert max(len(str(row)) for row in details.values()) <= 512
    assert unlisted("kms_request_id", details) == ids
    assert listed("x", []) == {}
    assert unlisted("x", {"y": "z"}) == []


# ---------------------------------------------------------------------------------------------- events

_AT: dict[str, Any] = {"run": "r", "step": 7, "launch": 1, "attempt": NAME.attempt}

_GOOD, _BAD, _DENIED = Outcome.SUCCESS, Outcome.FAILURE, Outcome.DENIED
_COPIED: dict[str, Any] = {"tier": "t", "lag_s": 1.0, "pending": 0}

_EVENTS: list[tuple[events.Event, str, Outcome, bool]] = [
    (
        events.LaunchClaimed(run="r", launch=1, parent_step=None, requests=("a",)),
        "launch finished",
        _GOOD,
        False,
    ),
    (
        events.SaveStarted(**_AT, size_bytes=1, wait_s=0.5, stage_s=0.25),
        "save started",
        Outcome.UNKNOWN,
        True,
    ),
    (
        events.CheckpointCommitted(
            **_AT, size_bytes=1, background_s=0.1, manifest_digest="d", requests=("a", "b")
        ),
        "save finished",
        _GOOD,
        True,
    ),
    (events.SaveFailed(**_AT, reason="x", error="StoreFullError", failures=1), "save finished", _BAD, True),
    (events.SaveFailed(**_AT, reason="x", error="NoKeyError", failures=1), "save finished", _DENIED, True),
    (
        events.SaveRefused(run="", step=None, reason="x", error="ZeroDivisionError"),
        "save finished",
        _BAD,
        False,
    ),
    (events.SaveSkipped(run="r", step=7, reason="x"), "save finished", _GOOD, False),
    (events.CheckpointSkipped(**_AT, reason="x", error="IntegrityError"), "restore finished", _BAD, True),
    (events.CheckpointSkipped(**_AT, reason="x", error="UntrustedError"), "restore finished", _DENIED, True),
    (
        events.RemovalStarted(run="r", folder=NAME.folder, root="", reason="x", operation="0" * 16),
        "remove started",
        Outcome.UNKNOWN,
        True,
    ),
    (events.CheckpointRemoved(**_AT, root="file:///tier", reason="x"), "remove finished", _GOOD, True),
    (events.OrphanRemoved(run="r", folder=NAME.folder, root="", reason="x"), "remove finished", _GOOD, True),
    (events.RemovalFailed(run="r", folder="", root="", reason="x"), "remove finished", _BAD, False),
    (
        events.CheckpointReplicated(**_AT, **_COPIED, size_bytes=1, sent_bytes=1, seconds=1.0),
        "replicate finished",
        _GOOD,
        True,
    ),
    (
        events.ReplicationFailed(**_AT, **_COPIED, reason="x", error="AccessDeniedError", failures=1),
        "replicate finished",
        _DENIED,
        True,
    ),
]


@pytest.mark.parametrize(("event", "what", "outcome", "has_name"), _EVENTS)
def test_an_event_comes_to_an_act(event: events.Event, what: str, outcome: Outcome, has_name: bool) -> None:
    act = act_of(event, "file:///run")
    assert act is not None
    assert (f"{act.action.value} {act.phase.value}", act.outcome) == (what, outcome)
    assert act.checkpoint == (NAME if has_name else None)
    assert act.root == (getattr(event, "root", "") or "file:///run")
    assert act.run == (event.run or None)
    assert len(act.operation) == 16
    assert all(isinstance(value, str | int | bool) for value in act.details.values())


def test_every_event_comes_to_an_act_or_is_known_to_come_to_none() -> None:
    kinds = {getattr(events, name) for name in events.__all__} - {
        events.Emitter, events.Event, events.EventSink, events.RestoreFinished, events.StoreMeasured,
    }  # fmt: skip
    assert {type(row[0]) for row in _EVENTS} == kinds


def test_start_and_end_of_a_save_are_one_operation() -> None:
    started, committed = (act_of(row[0], "") for row in _EVENTS[1:3])
    assert started is not None
    assert committed is not None
    assert started.operation == committed.operation == NAME.attempt
    assert committed.details["kms_request_id"] == "a,b"


# ------------------------------------------------------------------------------------------------ saves


def test_a_save_is_on_record_from_its_launch_to_its_commit(
    store: Any, policy: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    saved(store, policy)
    assert auditor.told == [
        ("launch", "finished", "success"),
        ("save", "started", "unknown"),
        ("save", "finished", "success"),
    ]
    _, started, committed = auditor.acts
    assert started.run == committed.run == "r"
    assert started.checkpoint == committed.checkpoint
    assert started.checkpoint is not None
    assert started.checkpoint.step == 1
    assert started.root == store.uri


def test_that_a_save_started_is_out_of_the_process_before_its_commit(store: Any) -> None:
    class Slow(RecordingAuditor):
        def secure(self, *, within_s: float) -> None:
            time.sleep(0.2)
            super().secure(within_s=within_s)

    auditor = Slow()
    seen: list[tuple[int, int]] = []

    def hook(operation: str, key: str) -> None:
        if operation == "put_if_absent" and key.endswith("COMMIT"):
            seen.append((len(auditor.of(Action.SAVE, Phase.STARTED)), len(auditor.secured)))

    store.hook = hook
    with Checkpointer(store, security=SecurityPolicy(auditor=auditor)) as checkpointer:
        checkpointer.save(1, state()).result()
        assert seen == [(1, 1)]
        assert 0 < auditor.secured[0] <= 5
    assert len(auditor.secured) == 2  # at the end of the checkpointer
    assert auditor.closed == []  # it belongs to the policy


def test_an_auditor_that_breaks_its_word_keeps_no_save_from_its_commit(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(RecordingAuditor):
        is_broken = True

        def secure(self, *, within_s: float) -> None:
            if self.is_broken:
                raise OSError("no space left")

    auditor = Broken()
    with Checkpointer(store, security=SecurityPolicy(auditor=auditor)) as checkpointer:
        assert checkpointer.save(1, state()).result().step == 1
        auditor.is_broken = False
    assert "not known whether what was recorded" in caplog.text


def test_nothing_waits_for_the_sink_on_the_training_thread(
    store: Any, policy: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    auditor.refuses = True  # whatever is intended fails: a save intends nothing
    saved(store, policy, steps=2)
    assert [act.step for act in Checkpointer(store).checkpoints()] == [2, 1]


def test_what_save_raises_at_once_is_on_record(
    store: Any, policy: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    checkpointer = Checkpointer(store, security=policy)
    with pytest.raises(ConfigError):
        checkpointer.save(-1, state())
    with pytest.raises(StateEncodingError):
        checkpointer.save(3, {"bad": object()})
    with pytest.raises(ConfigError):
        checkpointer.save(4, state(), tags="a")
    refused = auditor.of(Action.SAVE, Phase.FINISHED, Outcome.FAILURE)
    assert [(act.details.get("step"), act.details["error"]) for act in refused] == [
        (None, "ConfigError"), (3, "StateEncodingError"), (4, "ConfigError"),
    ]  # fmt: skip
    checkpointer.close()
    with pytest.raises(Exception, match="closed"):
        checkpointer.save(5, state())
    assert auditor.acts[-1].details["error"] == "ClosedError"


def test_a_save_that_fails_in_the_background_is_on_record_with_what_ended_it(
    store: Any, policy: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    with Checkpointer(store, security=policy) as checkpointer:
        store.fail(AccessDeniedError("not yours"), on="put", where="MANIFEST", times=1)
        with pytest.raises(SaveError):
            checkpointer.save(1, state()).result()
        store.fail(StoreUnavailableError("out"), on="put", where="MANIFEST", times=1)
        with pytest.raises(SaveError):
            checkpointer.save(2, state()).result()
    ended = auditor.of(Action.SAVE, Phase.FINISHED)
    assert [(act.outcome, act.details["error"]) for act in ended] == [
        (Outcome.DENIED, "AccessDeniedError"), (Outcome.FAILURE, "StoreUnavailableError"),
    ]  # fmt: skip
    started = auditor.of(Action.SAVE, Phase.STARTED)
    assert [act.operation for act in started] == [act.operation for act in ended]


def test_a_writer_that_was_overtaken_is_on_record(
    store: Any, policy: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    first = Checkpointer(store, security=policy, run_id="r")
    first.save(1, state()).result()
    with Checkpointer(store) as second:
        second.restore()
        second.save(2, state())
    with pytest.raises(FencedError):
        first.save(2, state()).result()
    with pytest.raises(FencedError):
        first.save(3, state())
    failed = auditor.of(Action.SAVE, Phase.FINISHED, Outcome.FAILURE)
    assert [act.details["error"] for act in failed] == ["FencedError", "FencedError"]
    first.close()


def test_a_skipped_save_retention_and_buffers_are_on_record(
    store: Any, policy: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    with Checkpointer(store, security=policy, keep=KeepLast(count=1)) as checkpointer:
        checkpointer.prepare(state())
        checkpointer.save(1, state()).result()
        assert checkpointer.save(1, state()).skipped
        checkpointer.save(2, state())
    assert auditor.of(Action.PREPARE)[0].outcome is Outcome.SUCCESS
    (skipped,) = [act for act in auditor.of(Action.SAVE) if act.details.get("is_skipped")]
    assert "saved already" in str(skipped.reason)
    begun, removed = auditor.of(Action.REMOVE)
    assert (begun.phase, begun.outcome) == (Phase.STARTED, Outcome.UNKNOWN)
    assert (begun.operation, begun.checkpoint) == (removed.operation, removed.checkpoint)
    assert removed.checkpoint is not None
    assert (removed.checkpoint.step, removed.outcome) == (1, Outcome.SUCCESS)
    with pytest.raises(StateEncodingError):
        Checkpointer(store, security=policy).prepare({"bad": object()})
    assert auditor.acts[-1].outcome is Outcome.FAILURE


def test_copies_to_other_tiers_are_on_record_by_tier(
    tmp_path: Path, policy: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    tier = Tier(tmp_path / "far", keep=KeepLast(count=1))
    saved(tmp_path / "run", policy, steps=2, replicate_to=[tier])
    copied = auditor.of(Action.REPLICATE, Phase.FINISHED, Outcome.SUCCESS)
    assert {act.details["tier"] for act in copied} == {(tmp_path / "far").as_uri()}
    assert copied[-1].checkpoint is not None
    assert copied[-1].checkpoint.step == 2
    # What its own retention removes there is told of there.
    assert {act.root for act in auditor.of(Action.REMOVE)} <= {(tmp_path / "far").as_uri()}


# --------------------------------------------------------------------------- what no record is known of


def test_commits_that_an_earlier_start_told_nobody_of_are_found_at_the_next(store: Any) -> None:
    saved(store, steps=2)
    known: set[int] = {1}
    auditor = RecordingAuditor(knows=lambda run, name: run == "r" and name.step in known)
    checkpointer = Checkpointer(store, security=SecurityPolicy(auditor=auditor))
    checkpointer.restore()
    checkpointer.save(3, state()).result()
    (found,) = auditor.of(Action.SAVE, Phase.OBSERVED)
    assert found.checkpoint is not None
    assert (found.checkpoint.step, found.outcome, found.run) == (2, Outcome.SUCCESS, "r")
    assert str(found.details["manifest"]).startswith("sha256:")
    # This process's own are on record, as far as it can tell.
    checkpointer.restore(step=1)
    checkpointer.save(2, state()).result()
    checkpointer.close()
    assert [act.checkpoint.step for act in auditor.of(Action.SAVE, Phase.OBSERVED) if act.checkpoint] == [
        2,
        2,
    ]


def test_an_auditor_that_cannot_even_say_what_it_knows_fails_no_save(store: Any) -> None:
    def broken(run: str, name: CheckpointName) -> bool:
        raise OSError("no index")

    saved(store)
    auditor = RecordingAuditor(knows=broken)
    with Checkpointer(store, security=SecurityPolicy(auditor=auditor)) as checkpointer:
        checkpointer.restore()
        assert checkpointer.save(2, state()).result().step == 2
    assert len(auditor.of(Action.SAVE, Phase.OBSERVED)) == 1


def test_there_is_a_bound_to_what_is_told_one_by_one(store: Any) -> None:
    saved(store, steps=3)
    history = Catalog(store).history()
    assert MAX_OBSERVED == 1_000
    acts = list(observed(history, store.uri, lambda *_: None, at_most=2))
    assert [act.checkpoint.step for act in acts if act.checkpoint] == [3, 2]
    assert [act.details.get("untold") for act in acts] == [None, 1]
    assert [act.details.get("untold") for act in observed(history, "", lambda *_: None)] == [None] * 3
    assert list(observed(history, "", lambda *_: True)) == []


class FileAuditor(RecordingAuditor):
    """Keeps its record in a file; dies, as by a power cut, when it is to record a commit."""

    def __init__(self, path: Path, *, dies: bool) -> None:
        super().__init__(knows=self._stands)
        self.path = path
        self.dies = dies

    def record(self, act: Act) -> None:
        is_commit = act.action is Action.SAVE and act.phase is Phase.FINISHED
        if self.dies and is_commit and act.checkpoint is not None and act.checkpoint.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        super().record(act)
        if is_commit and act.checkpoint is not None:
            with self.path.open("a", encoding="ascii") as file:
                file.write(json.dumps(act.checkpoint.folder) + "\n")

    def _stands(self, run: str, name: CheckpointName) -> bool:
        return self.path.exists() and name.folder in map(json.loads, self.path.read_text().splitlines())


def save_and_die(root: Path, path: Path) -> None:
    saved(root, SecurityPolicy(auditor=FileAuditor(path, dies=True)), steps=3)


def test_a_process_killed_between_a_commit_and_its_record_is_made_good_by_the_next(tmp_path: Path) -> None:
    root, path = tmp_path / "run", tmp_path / "record"
    child = subprocess.run([sys.executable, __file__, str(root), str(path)], check=False, timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert [each.step for each in Checkpointer(root).checkpoints()] == [2, 1]
    auditor = FileAuditor(path, dies=False)
    with Checkpointer(root, security=SecurityPolicy(auditor=auditor)) as checkpointer:
        checkpointer.restore()
        checkpointer.save(3, state())
    (found,) = auditor.of(Action.SAVE, Phase.OBSERVED)
    assert found.checkpoint is not None
    assert found.checkpoint.step == 2


# ------------------------------------------------------------------------------------------------ reads


def data_reads(store: Any) -> list[str]:
    return [key for name, key in store.log if name in ("read", "open_reader") and "/data/" in key]


def test_a_restore_is_on_record_before_anything_of_the_checkpoint_is_read(
    store: Any, policy: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    saved(store)
    store.log.clear()
    before: list[list[str]] = []
    auditor.on_intent = lambda _: before.append(data_reads(store))
    restored = Checkpointer(store, security=policy).restore()
    assert restored is not None
    assert before == [[]]
    intended, done = auditor.of(Action.RESTORE)
    assert (intended.phase, done.phase, done.outcome) == (Phase.INTENDED, Phase.FINISHED, Outcome.SUCCESS)
    assert intended.run == done.run == "r"
    assert intended.checkpoint == done.checkpoint
    assert done.details["skipped"] == 0
    assert int(done.details["size_bytes"]) >= 4000


def test_signatures_are_judged_after_that_is_on_record(
    store: Any, auditor: RecordingAuditor, tmp_path: Path
) -> None:
    generate_key(tmp_path / "signer.pem")
    signed = SecurityPolicy(auditor=auditor, sign=Sign(key="file:signer.pem", base=tmp_path))
    saved(store, signed)
    auditor.acts.clear()
    store.log.clear()
    auditor.refuses = True
    with pytest.raises(AuditError):
        Checkpointer(store, security=signed).restore()
    assert data_reads(store) == []
    assert not [key for key in store.keys("read") if "signature" in key]


@pytest.mark.parametrize("method", ("restore", "plan_restore"))
def test_what_cannot_be_put_on_record_is_not_read(
    store: Any, policy: SecurityPolicy, auditor: RecordingAuditor, method: str
) -> None:
    saved(store, steps=3)
    store.log.clear()
    auditor.refuses = True
    mine = state(0.0)
    with pytest.raises(AuditError):
        getattr(Checkpointer(store, security=policy), method)(mine)
    assert data_reads(store) == []  # nor an older one: this says nothing about the bytes
    assert torch.equal(mine["t"], torch.zeros(1000))
    assert [act[1:] for act in auditor.told] == [("finished", "denied")]


def test_each_checkpoint_that_is_tried_is_on_record_and_each_that_is_skipped_with_its_reason(
    root: Path, policy: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    saved(root, steps=3)
    damage(root, 3)
    restored = Checkpointer(root, security=policy).restore()
    assert restored is not None
    assert restored.step == 2
    tried = auditor.of(Action.RESTORE, Phase.INTENDED)
    assert [act.checkpoint.step for act in tried if act.checkpoint] == [3, 2]
    skipped, done = auditor.of(Action.RESTORE, Phase.FINISHED)
    assert skipped.checkpoint is not None
    assert (skipped.checkpoint.step, skipped.outcome) == (3, Outcome.FAILURE)
    assert skipped.details["is_skipped"] is True
    assert ".safetensors" in str(skipped.reason)
    assert done.checkpoint is not None
    assert (done.checkpoint.step, done.details["skipped"]) == (2, 1)


def test_a_refusal_in_the_middle_of_a_fall_back_says_what_is_undefined(
    root: Path, policy: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"t": torch.full((1 << 20,), float(step))})
    damage(root, 2)  # in the last of several blocks

    def refuse_the_second(act: Act) -> None:
        auditor.refuses = act.checkpoint is not None and act.checkpoint.step == 1

    auditor.on_intent = refuse_the_second
    with pytest.raises(AuditError, match=r"Undefined now.*: t"):
        Checkpointer(root, security=policy).restore({"t": torch.zeros(1 << 20)})


def test_a_restore_that_finds_nothing_and_one_that_fails_are_on_record(
    store: Any, policy: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    assert Checkpointer(store, security=policy).restore() is None
    assert auditor.acts[-1].details == {"is_found": False}
    saved(store)
    with pytest.raises(Exception, match="no checkpoint of step 9"):
        Checkpointer(store, security=policy).restore(step=9)
    assert (auditor.acts[-1].action, auditor.acts[-1].outcome) == (Action.RESTORE, Outcome.FAILURE)


def test_a_list_of_checkpoints_is_on_record(
    store: Any, policy: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    saved(store, steps=2)
    auditor.refuses = True  # it is not a read of a checkpoint
    assert len(Checkpointer(store, security=policy).checkpoints()) == 2
    (act,) = auditor.of(Action.LIST)
    assert (act.outcome, act.run, act.details) == (Outcome.SUCCESS, "r", {"checkpoints": 2})
    store.fail(StoreUnavailableError("out"), on="list_names")
    with pytest.raises(StoreUnavailableError):
        Checkpointer(store, security=policy).checkpoints()
    assert auditor.acts[-1].outcome is Outcome.FAILURE


def test_a_verification_is_on_record_checkpoint_by_checkpoint(
    root: Path, policy: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    saved(root, steps=2)
    damage(root, 1)
    report = verify(LocalStore(root), everything=True, guard=policy.guard)
    assert report.verdict == "damaged"
    assert auditor.told == [
        ("verify", "intended", "unknown"),
        ("verify", "finished", "success"),
        ("verify", "intended", "unknown"),
        ("verify", "finished", "failure"),
        ("verify", "finished", "failure"),
    ]
    assert len({act.operation for act in auditor.acts}) == 1
    assert "safetensors" in str(auditor.acts[3].reason)
    auditor.refuses = True
    with pytest.raises(AuditError):
        verify(LocalStore(root), guard=policy.guard)


def test_an_export_and_a_copy_are_on_record_before_they_read(
    root: Path, tmp_path: Path, policy: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    with Checkpointer(root, run_id="r") as checkpointer:
        checkpointer.save(1, {"model": {"w": torch.ones(3)}})
    store = LocalStore(root)
    (commit,) = Catalog(store).history().commits.values()
    export(open_checkpoint(store, commit, policy.guard), tmp_path / "out")
    assert auditor.told == [("export", "intended", "unknown"), ("export", "finished", "success")]
    auditor.acts.clear()
    target = Target(store=LocalStore(tmp_path / "far"))
    replicate(store, target, guard=policy.guard)
    assert auditor.told == [
        ("replicate", "intended", "unknown"),
        ("replicate", "finished", "success"),
        ("replicate", "finished", "success"),
    ]
    auditor.refuses = True
    with pytest.raises(AuditError):
        export(open_checkpoint(store, commit, policy.guard), tmp_path / "again")
    with pytest.raises(AuditError):
        replicate(store, Target(store=LocalStore(tmp_path / "further")), guard=policy.guard)
    assert not (tmp_path / "again").exists()
    assert not list((tmp_path / "further").glob("step-*"))


def test_a_copy_beside_training_is_on_record_before_it_reads(
    root: Path, tmp_path: Path, policy: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    saved(root)
    auditor.refuses = True
    near, far = tmp_path / "near", tmp_path / "far"
    tried: list[events.Event] = []

    class Listener:
        def emit(self, event: events.Event) -> None:
            tried.append(event)

    with Checkpointer(
        root, security=policy, replicate_to=[near, far], accept_missing_tiers=True, events=[Listener()]
    ) as checkpointer:
        # Training hears nothing of it.
        handle = checkpointer.save(2, state(2))
        assert handle.result().step == 2
        deadline = time.monotonic() + 30
        while len([each for each in tried if isinstance(each, events.ReplicationFailed)]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not list(near.glob("step-*/*")) + list(far.glob("step-*/*"))
        assert {target.last_error is not None for target in checkpointer.replication()} == {True}
        failed = auditor.of(Action.REPLICATE)
        assert {(act.phase, act.outcome) for act in failed} == {(Phase.FINISHED, Outcome.DENIED)}
        assert {act.details["tier"] for act in failed} == {near.as_uri(), far.as_uri()}
        auditor.acts.clear()
        auditor.refuses = False
        handle.replicated(timeout_s=60)
        checkpointer.save(3, state(3)).replicated(timeout_s=60)
    for tier in (near, far):
        acts = [act for act in auditor.of(Action.REPLICATE) if act.details["tier"] == tier.as_uri()]
        for step in (1, 2, 3):
            one = [act for act in acts if act.checkpoint is not None and act.checkpoint.step == step]
            assert [(act.phase, act.outcome) for act in one] == [
                (Phase.INTENDED, Outcome.UNKNOWN),
                (Phase.FINISHED, Outcome.SUCCESS),
            ]
            assert len({act.operation for act in one}) == 1
            assert {act.root for act in one} == {root.as_uri()}


def test_what_stands_on_a_tier_is_not_looked_through_for_keyrings_off_the_record(
    store: Any, tmp_path: Path, sealed: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    saved(store, sealed)
    far = Target(store=LocalStore(tmp_path / "far"))
    replicate(store, far, guard=sealed.guard)
    auditor.acts.clear()
    store.log.clear()
    auditor.refuses = True
    with pytest.raises(AuditError):
        replicate(store, far, guard=sealed.guard)
    assert not [key for key in store.keys("read") if "keyring" in key]
    auditor.refuses = False
    assert len(replicate(store, far, guard=sealed.guard).standing) == 1
    intended = auditor.of(Action.REPLICATE, Phase.INTENDED)
    assert [(act.run, act.checkpoint) for act in intended] == [("r", None)]


def test_a_library_that_reads_what_is_not_sealed_says_so_once_and_first(
    store: Any, policy: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    saved(store)
    (commit,) = Catalog(store).history().commits.values()
    store.log.clear()
    auditor.refuses = True
    with pytest.raises(AuditError):
        open_checkpoint(store, commit, policy.guard).state  # noqa: B018
    assert [key for key in data_reads(store) if "MANIFEST" not in key] == []
    auditor.refuses = False
    auditor.acts.clear()
    opened = open_checkpoint(store, commit, policy.guard)
    assert opened.index.names
    assert opened.state
    assert auditor.told == [("read", "intended", "unknown"), ("read", "finished", "success")]


def test_a_call_that_may_not_even_begin_is_on_record_as_denied(
    root: Path, policy: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    class Handler:
        """As a signal handler would, in the middle of a save."""

        def state_dict(self) -> dict[str, Any]:
            for call in (
                checkpointer.restore,
                lambda: checkpointer.save(9, {}),
                lambda: checkpointer.prepare({}),
            ):
                with pytest.raises(ConfigError, match="while another save"):
                    call()
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with Checkpointer(root, security=policy) as checkpointer:
        checkpointer.save(1, {"handler": Handler()}).result()
    for action in (Action.RESTORE, Action.SAVE, Action.PREPARE):
        denied = auditor.of(action, Phase.FINISHED, Outcome.DENIED)
        assert denied
        assert {act.root for act in denied} == {root.as_uri()}
        assert all("while another save" in str(act.reason) for act in denied)


# ------------------------------------------------------------------------------------------------- keys


def test_unwrapping_is_a_part_of_what_said_that_it_reads(
    store: Any, sealed: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    saved(store, sealed)
    auditor.acts.clear()
    assert Checkpointer(store, security=sealed).restore() is not None
    assert auditor.told == [
        ("restore", "intended", "unknown"),
        ("unwrap", "finished", "success"),
        ("restore", "finished", "success"),
    ]
    unwrapped = auditor.acts[1]
    assert unwrapped.operation == auditor.acts[0].operation
    assert unwrapped.details["keyring"] == 1
    assert unwrapped.details["recipient_kind"] == "file"
    assert str(unwrapped.details["recipient"]).startswith("file-")


def test_no_key_is_unwrapped_before_that_is_on_record_whoever_asks(
    store: Any, sealed: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    saved(store, sealed)
    (commit,) = Catalog(store).history().commits.values()
    auditor.acts.clear()
    opened = open_checkpoint(store, commit, sealed.guard)
    assert opened.state
    assert auditor.told == [("unwrap", "intended", "unknown"), ("unwrap", "finished", "success")]
    auditor.refuses = True
    store.log.clear()
    with pytest.raises(AuditError):
        open_checkpoint(store, commit, sealed.guard).unlocked  # noqa: B018
    assert not [key for key in store.keys("read") if "keyring" in key]
    assert auditor.told[2:] == [("unwrap", "finished", "denied")]


def test_a_key_that_is_not_here_is_on_record_as_denied(
    store: Any, sealed: SecurityPolicy, auditor: RecordingAuditor, tmp_path: Path
) -> None:
    saved(store, sealed)
    other = SecurityPolicy(auditor=auditor, seal=Seal(recipients=[create_key_file(tmp_path / "other.key")]))
    auditor.acts.clear()
    with pytest.raises(NoKeyError):
        Checkpointer(store, security=other).restore()
    assert auditor.told == [
        ("restore", "intended", "unknown"),
        ("unwrap", "finished", "denied"),
        ("restore", "finished", "denied"),
    ]


# -------------------------------------------------------------------------------------------- plain DCP


def test_plain_dcp_is_on_record(root: Path, policy: SecurityPolicy, auditor: RecordingAuditor) -> None:
    dcp.save(
        {"a": torch.ones(1000), "b": torch.zeros(10)},
        storage_writer=StrongroomWriter(root, step=1, security=policy),
    )
    assert auditor.told == [
        ("launch", "finished", "success"),
        ("save", "started", "unknown"),
        ("save", "finished", "success"),
    ]
    assert len(auditor.secured) == 1
    auditor.acts.clear()
    target = {"a": torch.zeros(1000), "b": torch.ones(10)}
    dcp.load(target, storage_reader=StrongroomReader(root, security=policy), **NO_DIST)
    assert auditor.told == [("restore", "intended", "unknown"), ("restore", "finished", "success")]
    assert torch.equal(target["a"], torch.ones(1000))
    auditor.acts.clear()
    dcp.load({"b": torch.ones(10)}, storage_reader=StrongroomReader(root, security=policy), **NO_DIST)
    _, part, done = auditor.acts
    assert part.path is not None
    assert part.path.endswith(".safetensors")
    assert part.byte_range is not None
    assert part.byte_range[1] - part.byte_range[0] == 40
    assert done.details["is_partial"] is True
    auditor.refuses = True
    with pytest.raises(CheckpointException, match="could not be put on record"):
        dcp.load({"b": torch.ones(10)}, storage_reader=StrongroomReader(root, security=policy), **NO_DIST)
    assert auditor.told[-1] == ("restore", "finished", "denied")


def test_what_fails_under_plain_dcp_is_on_record(
    root: Path, policy: SecurityPolicy, auditor: RecordingAuditor
) -> None:
    writer = StrongroomWriter(root, step=5, security=policy)
    dcp.save({"a": torch.ones(3)}, storage_writer=writer, **NO_DIST)
    with pytest.raises(CheckpointException, match="lower"):
        dcp.save({"a": torch.ones(3)}, storage_writer=writer, checkpoint_id=4, **NO_DIST)
    assert auditor.acts[-1].outcome is Outcome.FAILURE
    damage(root, 5)
    with pytest.raises(CheckpointException, match="safetensors"):
        dcp.load({"a": torch.zeros(3)}, storage_reader=StrongroomReader(root, security=policy), **NO_DIST)
    assert (auditor.acts[-1].action, auditor.acts[-1].outcome) == (Action.RESTORE, Outcome.FAILURE)
    with pytest.raises(CheckpointException, match="no checkpoint"):
        dcp.load(
            {"a": torch.zeros(3)}, storage_reader=StrongroomReader(root, step=9, security=policy), **NO_DIST
        )
    assert auditor.told[-1] == ("restore", "finished", "failure")


def test_without_an_audit_nothing_is_told(store: MemoryStore, begin: Callable[..., Checkpointer]) -> None:
    checkpointer = begin(store)
    checkpointer.save(1, state()).result()
    assert checkpointer.restore() is not None


if __name__ == "__main__":
    save_and_die(Path(sys.argv[1]), Path(sys.argv[2]))
