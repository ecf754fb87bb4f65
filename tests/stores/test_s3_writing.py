"""Objects in parts: many on their way, in bounded memory, confirmed by the server, nothing left behind."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from s3_events import Wire
from s3_servers import S3Server

from strongroom.errors import (
    AccessDeniedError,
    ConfigError,
    OutcomeUnknownError,
    StoreError,
    StoreUnavailableError,
)
from strongroom.stores import S3Store
from strongroom.stores.offers import Resuming, Upload
from strongroom.stores.s3.multipart import part_length
from strongroom.stores.s3.room import Room

MIB = 1 << 20


@pytest.fixture(params=("moto_s3", "ministack_s3"))
def wire(request: pytest.FixtureRequest) -> Wire:
    server: S3Server = request.getfixturevalue(request.param)
    return Wire(server)


@pytest.fixture
def bucket(wire: Wire) -> str:
    return wire.server.make_bucket()


def _raw(wire: Wire, bucket: str, key: str) -> bytes:
    return bytes(wire.server.behind.get_object(Bucket=bucket, Key=f"run/{key}")["Body"].read())


def _pattern(size_bytes: int, start: int = 0) -> bytes:
    return random.Random(start).randbytes(size_bytes)


# Parts


def test_no_object_needs_more_parts_than_there_may_be() -> None:
    assert part_length(1, 16 * MIB) == 16 * MIB
    assert part_length(10_000 * 16 * MIB, 16 * MIB) == 16 * MIB
    longer = part_length(10_000 * 16 * MIB + 1, 16 * MIB)
    assert longer == 17 * MIB
    assert part_length(5 << 40, 16 * MIB) * 10_000 >= 5 << 40


def test_an_object_lies_there_as_it_was_written_whatever_the_pieces(wire: Wire, bucket: str) -> None:
    data = _pattern(12 * MIB)
    store = wire.store(bucket, part_bytes=5 * MIB)
    block = bytearray(7 * MIB // 2)
    with store.open_writer("large", length_bytes=len(data)) as writer:
        for start in range(0, len(data), len(block)):
            piece = data[start : start + len(block)]
            # The caller's buffer is used again at once.
            block[: len(piece)] = piece
            writer.write(memoryview(block)[: len(piece)])
        block[:] = bytes(len(block))
        writer.finish()
    assert _raw(wire, bucket, "large") == data
    assert wire.operations["UploadPart"] == 3


def test_no_more_parts_are_on_their_way_than_may_be_however_many_write(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket, part_bytes=5 * MIB, parts_in_flight=2)
    contents = [_pattern(11 * MIB, number) for number in range(4)]
    errors: list[BaseException] = []

    def write(number: int) -> None:
        try:
            with store.open_writer(f"{number}", length_bytes=11 * MIB) as writer:
                writer.write(contents[number])
                writer.finish()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert 1 <= wire.most_at_once["UploadPart"] <= 2
    for number in range(4):
        assert _raw(wire, bucket, f"{number}") == contents[number]


def test_writers_of_one_thread_do_not_wait_for_each_other(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket, part_bytes=5 * MIB, parts_in_flight=1)
    writers = [store.open_writer(f"{number}", length_bytes=6 * MIB) for number in range(3)]
    for writer in writers:
        writer.write(bytes(4 * MIB))
    for writer in writers:
        writer.write(bytes(2 * MIB))
        writer.finish()
    assert len(wire.server.keys(bucket)) == 3


def test_buffers_are_used_again_and_given_back() -> None:
    room = Room(limit_bytes=100, limit_parts=3, part_bytes=50)
    room.enter()
    first = room.buffer(50)
    room.give_back(first)
    assert room.buffer(50) is first
    room.give_back(first)
    assert len(room.buffer(49)) == 49
    room.leave()
    room.enter()
    assert room.buffer(50) is not first


def test_room_is_given_once_there_is_some_and_a_large_part_goes_alone() -> None:
    room = Room(limit_bytes=100, limit_parts=3, part_bytes=50)
    assert room.take(60, is_given_up=lambda: True)
    assert not room.take(50, is_given_up=lambda: True)
    assert room.take(1, is_given_up=lambda: True)
    assert room.take(1, is_given_up=lambda: True)
    assert not room.take(1, is_given_up=lambda: True)
    for length_bytes in (60, 1, 1):
        room.release(length_bytes)
    assert room.take(500, is_given_up=lambda: True)
    assert not room.take(1, is_given_up=lambda: True)


# What goes wrong


def test_a_writer_that_was_given_up_leaves_no_parts(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket, part_bytes=5 * MIB)
    with (
        pytest.raises(ZeroDivisionError),
        store.open_writer("large", length_bytes=20 * MIB) as writer,
    ):
        writer.write(bytes(11 * MIB))
        raise ZeroDivisionError
    assert wire.server.uploads(bucket) == wire.server.keys(bucket) == []
    wire.answer("AbortMultipartUpload", 403, "AccessDenied")
    with store.open_writer("large", length_bytes=20 * MIB) as writer:
        writer.write(bytes(6 * MIB))
    assert wire.server.uploads(bucket) == ["run/large"]


def test_giving_up_takes_few_tries(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket, part_bytes=5 * MIB)
    wire.answer("AbortMultipartUpload", 503, "SlowDown", count=100)
    with store.open_writer("large", length_bytes=20 * MIB) as writer:
        writer.write(bytes(6 * MIB))
    assert wire.operations["AbortMultipartUpload"] == 3


def test_a_part_that_fails_for_good_ends_its_object_alone(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket, part_bytes=5 * MIB)
    wire.answer("UploadPart", 403, "AccessDenied")
    with pytest.raises(AccessDeniedError, match="s3:PutObject"):
        _write(store, "large", bytes(16 * MIB))
    _write(store, "other", bytes(6 * MIB))
    assert wire.server.keys(bucket) == ["run/other"]
    assert wire.server.uploads(bucket) == []


def test_an_upload_begun_twice_for_a_lost_answer_is_cleared_with_its_object(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket, part_bytes=5 * MIB)
    wire.lose_answers("CreateMultipartUpload", 2)
    _write(store, "large", bytes(6 * MIB))
    assert wire.operations["CreateMultipartUpload"] == 3
    assert wire.server.uploads(bucket) == []


def test_bytes_that_changed_on_the_way_are_sent_again(wire: Wire, bucket: str) -> None:
    _let_it_compare(wire)
    damage = _DamageOnce()
    wire.change("UploadPart", damage)
    data = _pattern(6 * MIB)
    _write(wire.store(bucket, part_bytes=5 * MIB), "large", data)
    assert damage.count == 1
    assert wire.operations["UploadPart"] == 3
    assert _raw(wire, bucket, "large") == data


def test_bytes_that_always_change_on_the_way_make_no_object(wire: Wire, bucket: str) -> None:
    _let_it_compare(wire)
    store = wire.store(bucket, part_bytes=5 * MIB)
    wire.change("UploadPart", _damage)
    wire.change("PutObject", _damage)
    with pytest.raises(StoreUnavailableError, match="other bytes than were sent"):
        _write(store, "large", bytes(6 * MIB))
    with pytest.raises(StoreUnavailableError, match="other bytes than were sent"):
        store.put("small", b"small")
    with pytest.raises(StoreUnavailableError, match="other bytes than were sent"):
        store.put_if_absent("COMMIT", b"small")
    assert wire.server.keys(bucket) == wire.server.uploads(bucket) == []


def test_wrong_bytes_that_cannot_be_removed_leave_a_commit_in_doubt(moto_s3: S3Server) -> None:
    wire, bucket = Wire(moto_s3), moto_s3.make_bucket()
    _let_it_compare(wire)
    wire.change("PutObject", _damage)
    wire.answer("DeleteObject", 403, "AccessDenied")
    with pytest.raises(OutcomeUnknownError, match="could not be removed"):
        wire.store(bucket).put_if_absent("COMMIT", b"x")


def test_a_server_that_does_not_confirm_gets_md5_too_and_is_named_once(
    moto_s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    wire, bucket = Wire(moto_s3), moto_s3.make_bucket()
    wire.confirm_nothing()
    store = wire.store(bucket)
    for number in range(3):
        store.put(f"{number}", b"x")
    assert ["Content-MD5" in headers for _, headers in wire.requests] == [False, True, True]
    assert [record.message for record in caplog.records if "does not confirm" in record.message] == [
        f"{store.uri}: the server does not confirm SHA-256 of uploads; Content-MD5 goes along from now on"
    ]


def _let_it_compare(wire: Wire) -> None:
    """Moto repeats the SHA-256 that it was sent, whatever came with it; its ETag tells the truth."""
    if wire.server.name == "moto":
        wire.confirm_nothing()


def _damage(request: Any) -> None:
    request.body = bytes([request.body[0] ^ 1]) + bytes(request.body[1:])


class _DamageOnce:
    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def __call__(self, request: Any) -> None:
        with self._lock:
            if self.count:
                return
            self.count += 1
        _damage(request)


def _write(store: S3Store, key: str, data: bytes) -> None:
    with store.open_writer(key, length_bytes=len(data)) as writer:
        writer.write(data)
        writer.finish()


def test_a_bucket_with_a_default_retention_takes_what_is_written(moto_s3: S3Server) -> None:
    wire, bucket = Wire(moto_s3), "locked-for-a-day"
    wire.server.behind.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    wire.server.behind.put_object_lock_configuration(
        Bucket=bucket,
        ObjectLockConfiguration={
            "ObjectLockEnabled": "Enabled",
            "Rule": {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}},
        },
    )
    store = wire.store(bucket, part_bytes=5 * MIB)
    store.put("small", b"small")
    assert store.put_if_absent("COMMIT", b"x")
    _write(store, "large", bytes(6 * MIB))
    assert store.read("small", limit_bytes=5) == b"small"
    for operation, headers in wire.requests:
        if operation in ("PutObject", "UploadPart"):
            # S3 wants either of these where a default retention stands.
            assert headers["x-amz-sdk-checksum-algorithm"] == "SHA256"
            assert "x-amz-checksum-sha256" in headers
            assert "x-amz-trailer" not in headers
    assert wire.operations["UploadPart"] == 2


# Uploads that another process goes on with


def _begin(store: S3Store, data: bytes, numbers: tuple[int, ...]) -> str:
    upload = store.begin_upload("large", length_bytes=len(data))
    for number in numbers:
        upload.write_part(number, _part(upload, data, number))
    return upload.token


def _part(upload: Upload, data: bytes, number: int) -> bytes:
    return data[number * upload.part_bytes : (number + 1) * upload.part_bytes]


def test_an_upload_is_gone_on_with_and_no_part_is_sent_twice(wire: Wire, bucket: str) -> None:
    data = _pattern(12 * MIB)
    token = _begin(wire.store(bucket, part_bytes=5 * MIB), data, (2, 0))
    assert token.isprintable()
    assert len(token) <= 1024
    # Other options do not change an upload under way.
    store = wire.store(bucket)
    assert isinstance(store, Resuming)
    upload = store.resume_upload("large", length_bytes=len(data), token=token)
    assert isinstance(upload, Upload)
    assert [upload.has_part(number, _part(upload, data, number)) for number in range(3)] == [
        True,
        False,
        True,
    ]
    assert not upload.has_part(0, bytes(upload.part_bytes))
    with pytest.raises(StoreError, match="part 1, and 0 more, of 3"):
        upload.finish()
    upload.write_part(1, _part(upload, data, 1))
    upload.finish()
    upload.abort()
    assert _raw(wire, bucket, "large") == data
    assert wire.operations["UploadPart"] == 3
    assert store.resume_upload("large", length_bytes=len(data), token=token) is None


def test_an_upload_of_something_else_is_not_gone_on_with(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket, part_bytes=5 * MIB)
    token = _begin(store, bytes(12 * MIB), (0, 2))
    assert store.resume_upload("large", length_bytes=11 * MIB, token=token) is None
    assert store.resume_upload("large", length_bytes=4 * MIB, token=token) is None
    with pytest.raises(ConfigError, match="at least 1 byte"):
        store.begin_upload("large", length_bytes=0)


def test_a_part_of_another_length_is_refused(wire: Wire, bucket: str) -> None:
    upload = wire.store(bucket, part_bytes=5 * MIB).begin_upload("large", length_bytes=6 * MIB)
    for number, length_bytes in ((0, MIB), (1, 5 * MIB), (2, 1), (-1, 5 * MIB)):
        with pytest.raises(StoreError, match="handed over"):
            upload.write_part(number, bytes(length_bytes))
    upload.abort()
    upload.abort()
    with pytest.raises(StoreError, match="ended"):
        upload.write_part(0, bytes(5 * MIB))


def test_a_finished_upload_never_replaces_what_stands(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket, part_bytes=5 * MIB)
    data = bytes(6 * MIB)
    store.put("large", b"first")
    upload = store.begin_upload("large", length_bytes=len(data))
    for number in range(2):
        upload.write_part(number, _part(upload, data, number))
    with pytest.raises(StoreError, match="never overwritten"):
        upload.finish()
    upload.abort()
    assert _raw(wire, bucket, "large") == b"first"


def test_an_upload_that_was_made_unheard_is_finished(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket, part_bytes=5 * MIB)
    data = _pattern(6 * MIB)
    token = _begin(store, data, (0, 1))
    upload = store.resume_upload("large", length_bytes=len(data), token=token)
    assert upload is not None
    wire.lose_answers("CompleteMultipartUpload")
    upload.finish()
    assert _raw(wire, bucket, "large") == data


def test_what_was_left_unfinished_is_found_and_removed(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket, part_bytes=5 * MIB)
    token = _begin(store, bytes(6 * MIB), (0,))
    wire.server.behind.create_multipart_upload(Bucket=bucket, Key="another/run")
    found = store.unfinished_uploads()
    assert [(each.key, each.token) for each in found] == [("large", token)]
    assert found[0].began_ns > 0
    store.abort_upload(found[0])
    store.abort_upload(found[0])
    assert wire.server.uploads(bucket) == ["another/run"]


def test_removing_a_tree_removes_its_unfinished_uploads(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket, part_bytes=5 * MIB)
    for key in ("step-1/data/x", "step-10/data/x"):
        store.begin_upload(key, length_bytes=6 * MIB)
    store.put("step-1/COMMIT", b"x")
    store.delete_tree("step-1")
    assert wire.server.uploads(bucket) == ["run/step-10/data/x"]
    wire.answer("ListMultipartUploads", 403, "AccessDenied")
    store.delete_tree("step-10")


def test_an_interrupt_while_parts_are_on_their_way_ends_the_writer(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket, part_bytes=5 * MIB)

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    wire.change("UploadPart", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _write(store, "large", bytes(16 * MIB))
    assert wire.server.uploads(bucket) == wire.server.keys(bucket) == []
