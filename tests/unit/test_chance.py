"""What runs beside training draws nothing from the streams that training draws from (promise 7)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from strongroom import chance
from strongroom.replication.lag import random_pause_s
from strongroom.stores.s3.calling import Patience
from strongroom_security import aws
from strongroom_security.auditlog.recording.spool import Spool
from strongroom_security.recipients import calling


def test_chance_is_no_stream_of_trainings() -> None:
    before = random.getstate()
    values = list(range(100))
    chance.shuffle(values)
    assert sorted(values) == list(range(100))
    assert values != list(range(100))
    assert len({chance.uniform(0.0, 1.0) for _ in range(10)}) == 10
    assert random.getstate() == before


def test_pauses_between_tries_draw_nothing_of_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    before = random.getstate()
    assert random_pause_s(3) > 0
    assert 0.0 <= Patience(tries=2, patience_s=1.0).draw(0.0, 1.0) <= 1.0

    paused: list[float] = []
    failures = iter([aws.Failure(code="Throttling", message="", status=400)] * 2)
    monkeypatch.setattr(aws, "once", lambda *_, **__: (None, next(failures, None)))
    assert aws.repeatedly(print, {}, whom="aws", tries=4, sleep=paused.append) == (None, None)
    assert len(paused) == 2

    def unreachable(_: calling.Deadline) -> str:
        if len(paused) < 4:
            raise calling.TryAgainError("busy")
        return "there"

    assert calling.ask(unreachable, whom="a keeper", within_s=60, sleep=paused.append) == "there"
    assert random.getstate() == before


def test_what_is_refused_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = aws.Failure(code="AccessDenied", message="", status=403)
    monkeypatch.setattr(aws, "once", lambda *_, **__: (None, refused))
    told = aws.repeatedly(print, {}, whom="aws", tries=4, sleep=lambda _: pytest.fail("it waited"))
    assert told == (None, refused)


def test_looking_for_what_dead_processes_left_draws_nothing_of_trainings(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "dir:log")
    spool.prepare()
    for name in "abc":
        (spool.path / name).mkdir()
    before = random.getstate()
    assert list(spool.orphans()) == []
    assert random.getstate() == before
