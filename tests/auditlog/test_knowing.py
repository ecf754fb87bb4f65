"""A launch tells of commits that are not on record, and not again of those that are."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from recorders import Place, act
from s3_identities import Enforcing, enforcing, statement

from strongroom import Checkpointer
from strongroom.auditing import Action, Knowing, Outcome, Phase
from strongroom.layout import CheckpointName
from strongroom.stores.local import LocalStore
from strongroom.stores.s3 import S3Options, S3Store
from strongroom_security import SecurityPolicy
from strongroom_security.auditlog.format.events import Recorded
from strongroom_security.auditlog.recording import knowing
from strongroom_security.auditlog.recording.auditor import LogAuditor

__all__ = ["enforcing"]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def name(step: int) -> CheckpointName:
    return CheckpointName(launch=1, step=step, attempt=f"{step:016x}")


def record(auditor: LogAuditor, step: int, **members: Any) -> None:
    auditor.record(act(step, checkpoint=name(step), **members))


def observed(place: Place) -> list[int | None]:
    """The steps that were found to have been committed, by whoever told."""
    return [event.step for event in place.events() if event.phase == Phase.OBSERVED.value]


def save(root: Path, auditor: LogAuditor, *steps: int) -> None:
    with Checkpointer(root, security=SecurityPolicy(auditor=auditor), run_id="run-a") as checkpointer:
        for step in steps:
            checkpointer.save(step, {"t": torch.ones(1)})


def test_what_is_in_the_sink_is_known_to_a_later_process_and_what_is_not_there_is_not(place: Place) -> None:
    with place.auditor() as auditor:
        assert isinstance(auditor, Knowing)
        record(auditor, 1)
        record(auditor, 2, phase=Phase.OBSERVED)
        record(auditor, 3, phase=Phase.STARTED, outcome=Outcome.UNKNOWN)
        record(auditor, 4, outcome=Outcome.FAILURE)
        record(auditor, 5, run="run-b")
        record(auditor, 6, action=Action.REMOVE)
    with place.auditor() as auditor:
        known = [auditor.knows("run-a", name(step)) for step in range(1, 8)]
        assert known == [True, True, False, False, False, False, False]
        assert auditor.knows("run-b", name(5))
        assert auditor.knows("no/run", name(1)) is None


def test_what_this_process_has_recorded_is_known_before_the_sink_has_it(place: Place) -> None:
    with place.auditor() as auditor:
        record(auditor, 1)
        assert place.events() == []
        assert auditor.knows("run-a", name(1))


def test_a_launch_observes_what_is_not_on_record_and_no_later_one_does_again(
    place: Place, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    with Checkpointer(root, run_id="run-a") as checkpointer:  # by nobody's record
        for step in (1, 2):
            checkpointer.save(step, {"t": torch.ones(1)})
    for steps in ((3, 4), (5,), (6,)):
        with place.auditor() as auditor:
            save(root, auditor, *steps)
    assert sorted(observed(place), key=str) == [1, 2]
    saved = [each.step for each in place.events() if _is_end_of_a_save(each)]
    assert sorted(saved, key=str) == [3, 4, 5, 6]


def _is_end_of_a_save(event: Recorded) -> bool:
    return event.action == "save" and event.phase == Phase.FINISHED.value


def test_the_sink_is_asked_once_a_launch(place: Place) -> None:
    opened: list[None] = []

    def open_sink() -> LocalStore:
        if threading.current_thread().name == "strongroom-audit-known":
            opened.append(None)
        return LocalStore(place.sink)

    with place.auditor(open_sink=open_sink) as auditor:
        for step in range(1_000):
            auditor.knows("run-a", name(step))
    assert len(opened) == 1


def test_where_there_is_more_than_may_be_read_the_newest_is_known_and_the_rest_cannot_be_told(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for hour in range(4):
        with place.auditor(now_ms=lambda hour=hour: hour * 3_600_000) as auditor:
            record(auditor, hour)
    monkeypatch.setattr(knowing, "_MAX_SEGMENTS", 2)
    with place.auditor() as auditor:
        assert [auditor.knows("run-a", name(step)) for step in range(4)] == [None, None, True, True]


def test_a_sink_that_does_not_answer_is_left_after_a_while(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_free = threading.Event()

    class Hanging(LocalStore):
        def list_names(self, prefix: str) -> list[str]:
            is_free.wait(60)
            return super().list_names(prefix)

    known = knowing.Known(lambda: Hanging(place.sink), within_s=0.05)
    assert known.knows("run-a", name(1)) is None
    is_free.set()


def test_what_is_damaged_tells_of_nothing(place: Place) -> None:
    with place.auditor() as auditor:
        record(auditor, 1)
    (path,) = place.sink.rglob("*.jsonl")
    path.write_bytes(path.read_bytes().replace(b'"step":1', b'"step":2'))
    with place.auditor() as auditor:
        assert not auditor.knows("run-a", name(1))
        assert not auditor.knows("run-a", name(2))


def test_in_a_bucket_who_may_read_knows_and_who_may_only_create_cannot_tell(
    place: Place, enforcing: Enforcing
) -> None:
    bucket = enforcing.bucket()
    options = S3Options(endpoint_url=enforcing.address, addressing_style="path", tries=1, patience_s=0.2)
    create = statement("s3:PutObject", f"arn:aws:s3:::{bucket}/log/segments/*")
    writer = enforcing.user(create)
    reader = enforcing.user(
        create,
        statement("s3:GetObject", f"arn:aws:s3:::{bucket}/log/*"),
        statement("s3:ListBucket", f"arn:aws:s3:::{bucket}"),
    )
    known = []
    for who in (writer, writer, reader):

        def open_sink(who: Any = who) -> S3Store:
            return S3Store(f"s3://{bucket}/log", options=options, session=who.session())

        with place.auditor(sink=f"s3://{bucket}/log", open_sink=open_sink) as auditor:
            known.append((auditor.knows("run-a", name(1)), auditor.knows("run-a", name(2))))
            if who is writer and len(known) == 1:
                record(auditor, 1)
                auditor.secure(within_s=20)
    assert known == [(None, None), (None, None), (True, False)]
