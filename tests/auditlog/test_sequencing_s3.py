"""The sequencer in a bucket: a real server keeps the log's head, and refuses to have it replaced unseen."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from s3_servers import S3Server, ministack_s3, moto_s3
from segment_making import Writer, lines_of
from test_sequencing import LOG, entries

from strongroom.errors import StoreUnavailableError
from strongroom.stores.s3 import S3Options, S3Store
from strongroom_security.auditlog.sequencing.choosing import Limits
from strongroom_security.auditlog.sequencing.logstate import LogState
from strongroom_security.auditlog.sequencing.sequencing import Sequencer

__all__ = ["ministack_s3", "moto_s3"]


def open_sink(server: S3Server, bucket: str) -> S3Store:
    return S3Store(
        f"s3://{bucket}/audit",
        options=S3Options(endpoint_url=server.endpoint_url),
        session=server.session,
    )


@pytest.fixture(params=("moto", "ministack"))
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue(f"{request.param}_s3")
    return found


def test_a_log_in_a_bucket_grows_and_is_read_back(server: S3Server, tmp_path: Path) -> None:
    bucket = server.make_bucket()
    state = LogState(tmp_path / "state")
    writers = [Writer(number) for number in (1, 2)]
    expected: list[str] = []
    for events in (100, 200):
        for writer in writers:
            expected += writer.put(open_sink(server, bucket), 1, events)
        sink = open_sink(server, bucket)
        found = Sequencer(sink, LOG, state=state).run_once()
        assert entries(sink, found) == lines_of(sink, expected)
    assert found.head is not None
    assert found.head.size == 608


def test_of_several_sequencers_in_a_bucket_all_make_one_log(server: S3Server) -> None:
    bucket = server.make_bucket()
    for number in (1, 2, 3):
        Writer(number).put(open_sink(server, bucket), 2, 5)
    errors: list[BaseException] = []

    def sequence(segments: int) -> None:
        try:
            Sequencer(open_sink(server, bucket), LOG, limits=Limits(segments=segments)).run_once()
        except BaseException as error:  # noqa: BLE001 - looked at below, in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=sequence, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not [error for error in errors if not isinstance(error, StoreUnavailableError)]
    sink = open_sink(server, bucket)
    found = Sequencer(sink, LOG).run_once()
    assert found.head is not None
    assert found.head.size == len(set(entries(sink, found))) == 6 * 7
