"""Finding and reading what lies in a bucket: few requests, the caller's memory, never two objects mixed."""

from __future__ import annotations

import http.server
import socketserver
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from s3_events import Wire
from s3_servers import S3Server

from strongroom.errors import (
    AccessDeniedError,
    FormatError,
    ObjectNotFoundError,
    StoreError,
    StoreUnavailableError,
)
from strongroom.stores import S3Options, S3Store
from strongroom.stores.offers import Outlining, tuning_of

MIB = 1 << 20


@pytest.fixture
def wire(moto_s3: S3Server) -> Wire:
    return Wire(moto_s3)


@pytest.fixture
def bucket(moto_s3: S3Server) -> str:
    return moto_s3.make_bucket()


# Requests


def test_a_small_object_is_read_in_one_request_and_a_large_one_by_ranges(wire: Wire, bucket: str) -> None:
    data = bytes(range(256)) * (5 * MIB // 2 // 256)
    store = wire.store(bucket, read_bytes=MIB)
    store.put("object", data)
    wire.forget()
    assert store.read("object", limit_bytes=len(data)) == data
    assert wire.operations == {"GetObject": 1}
    wire.forget()
    buffer = bytearray(len(data))
    with store.open_reader("object") as reader:
        assert reader.read_into(0, memoryview(buffer)) == len(data)
        assert reader.read_into(len(data), memoryview(bytearray(10))) == 0
    assert buffer == data
    assert wire.operations == {"HeadObject": 1, "GetObject": 3}
    assert all("If-Match" in headers for operation, headers in wire.requests if operation == "GetObject")


def test_reading_many_ranges_needs_no_more_connections_than_readers(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket)
    store.put("object", bytes(MIB))
    buffer = memoryview(bytearray(1000))
    with store.open_reader("object") as reader:
        for number in range(20):
            reader.read_into(number * 1000, buffer)
    pools = store._bucket.client()._client._endpoint.http_session._manager.pools
    assert sum(pools[key].num_connections for key in pools.keys()) == 1  # noqa: SIM118 - no dictionary


def test_a_bucket_says_how_it_is_used_best(wire: Wire, bucket: str) -> None:
    tuning = tuning_of(wire.store(bucket))
    assert (tuning.read_bytes, tuning.reads, tuning.looks) == (8 * MIB, 16, 16)


def test_what_is_too_long_is_refused_and_not_fetched(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket)
    store.put("object", bytes(4 * MIB))
    with pytest.raises(FormatError, match="at most 10"):
        store.read("object", limit_bytes=10)


# Two objects never mix


def test_an_object_that_was_replaced_while_it_was_read_is_noticed(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket)
    store.put("object", b"first")
    buffer = bytearray(5)
    with store.open_reader("object") as reader:
        wire.server.behind.put_object(Bucket=bucket, Key="run/object", Body=b"other")
        with pytest.raises(StoreUnavailableError, match="was replaced while it was read"):
            reader.read_into(0, memoryview(buffer))
        store.delete("object")
        with pytest.raises(ObjectNotFoundError):
            reader.read_into(0, memoryview(buffer))


class _Stubborn(http.server.BaseHTTPRequestHandler):
    """Cuts every first answer short, and can ignore ranges."""

    protocol_version = "HTTP/1.1"
    data = bytes(range(256)) * 4096
    cuts = 0
    ignores_ranges = False
    asked: tuple[str, ...] = ()
    headers_of_get: tuple[tuple[str, str], ...] = (("ETag", '"tag"'),)

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.data)))
        self.send_header("ETag", '"tag"')
        self.end_headers()

    def do_GET(self) -> None:
        kind = type(self)
        kind.asked = (*kind.asked, self.headers.get("Range", ""))
        wanted = self.headers.get("Range")
        data = self.data
        if wanted is None or self.ignores_ranges:
            self.send_response(200)
        else:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            data = data[int(first) : int(last) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(self.data)}")
        self.send_header("Content-Length", str(len(data)))
        for name, value in kind.headers_of_get:
            self.send_header(name, value)
        self.end_headers()
        if kind.cuts:
            kind.cuts -= 1
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        else:
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the parent's name
        pass


@pytest.fixture
def stubborn(moto_s3: S3Server) -> Iterator[tuple[type[_Stubborn], S3Store]]:
    class Handler(_Stubborn):
        pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    store = S3Store(
        "s3://bucket/run",
        options=S3Options(endpoint_url=f"http://127.0.0.1:{server.server_port}"),
        session=moto_s3.session,
        sleep=lambda _: None,
    )
    yield Handler, store
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_an_answer_that_breaks_off_is_gone_on_with(stubborn: tuple[type[_Stubborn], S3Store]) -> None:
    handler, store = stubborn
    handler.cuts = 2
    assert store.read("object", limit_bytes=2 * MIB) == handler.data
    handler.cuts, handler.asked = 2, ()
    buffer = bytearray(MIB)
    with store.open_reader("object") as reader:
        assert reader.read_into(0, memoryview(buffer)) == MIB
    assert buffer == handler.data
    # What had come was not asked for again.
    assert handler.asked == (
        f"bytes=0-{MIB - 1}",
        f"bytes={MIB // 2}-{MIB - 1}",
        f"bytes={MIB * 3 // 4}-{MIB - 1}",
    )


def test_an_answer_that_always_breaks_off_is_an_error(stubborn: tuple[type[_Stubborn], S3Store]) -> None:
    handler, store = stubborn
    handler.cuts = 1000
    with pytest.raises(StoreUnavailableError, match="10 tries"):
        store.read("object", limit_bytes=2 * MIB)
    with store.open_reader("object") as reader, pytest.raises(StoreUnavailableError, match="10 tries"):
        reader.read_into(0, memoryview(bytearray(MIB)))


def test_a_server_that_ignores_ranges_is_noticed(stubborn: tuple[type[_Stubborn], S3Store]) -> None:
    handler, store = stubborn
    handler.ignores_ranges = True
    with store.open_reader("object") as reader:
        with pytest.raises(StoreError, match="were asked for"):
            reader.read_into(100, memoryview(bytearray(10)))
        # All of it is all of it, range or not.
        assert reader.read_into(0, memoryview(bytearray(MIB))) == MIB


# Absent, or only out of sight


def test_what_an_identity_may_not_look_at_is_absent_only_where_it_is_not_listed(
    wire: Wire, bucket: str
) -> None:
    store = wire.store(bucket)
    store.put("there", b"x")
    for key, expected in (
        ("absent", ObjectNotFoundError),
        ("ther", ObjectNotFoundError),
        ("there", AccessDeniedError),
    ):
        wire.answer("HeadObject", 403, "", count=2)
        wire.answer("GetObject", 403, "AccessDenied")
        with pytest.raises(expected):
            store.stat(key)
        with pytest.raises(expected):
            store.open_reader(key)
        with pytest.raises(expected):
            store.read(key, limit_bytes=10)
    wire.answer("HeadObject", 403, "")
    wire.answer("ListObjectsV2", 403, "AccessDenied")
    with pytest.raises(AccessDeniedError, match="s3:GetObject was refused"):
        store.stat("absent")


def test_a_head_that_tells_nothing_is_asked_about_where_there_is_an_answer(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket)
    store.put("there", b"x")
    # boto3 asks once more by itself, in case that the bucket is in another region.
    wire.answer("HeadObject", 400, "", count=2)
    wire.answer("ListObjectsV2", 400, "ExpiredToken")
    with pytest.raises(AccessDeniedError, match="have expired"):
        store.stat("there")
    wire.answer("HeadObject", 403, "")
    wire.answer("ListObjectsV2", 403, "RequestTimeTooSkewed")
    with pytest.raises(AccessDeniedError, match="clock is off"):
        store.stat("there")


def test_what_answers_without_what_s3_answers_is_told(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket, tries=1)
    page = b"<html><body>Please log in</body></html>"
    for operation, ask in (
        ("HeadObject", lambda: store.stat("object")),
        ("ListObjectsV2", lambda: store.list_names("")),
        ("PutObject", lambda: store.put("object", b"x")),
    ):
        wire.answer(operation, 200, "", body=page)
        with pytest.raises(StoreUnavailableError, match="does not speak S3"):
            ask()


def test_an_absent_bucket_is_no_absent_object(wire: Wire) -> None:
    for ask in (
        lambda store: store.stat("run.json"),
        lambda store: store.open_reader("run.json"),
        lambda store: store.read("run.json", limit_bytes=1),
        lambda store: store.list_names(""),
        lambda store: store.put("object", b"x"),
        lambda store: store.put_if_absent("object", b"x"),
        lambda store: store.delete_tree("folder"),
    ):
        with pytest.raises(StoreError, match="there is no bucket absent-bucket at http://127") as told:
            ask(wire.store("absent-bucket"))
        assert not isinstance(told.value, ObjectNotFoundError)


# Listing


def test_a_listing_goes_on_until_its_end(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket)
    names = [f"{number:03d}" for number in range(7)]
    for name in names:
        store.put(f"folder/{name}", b"x")
    wire.forget()
    wire.change("ListObjectsV2", _two_at_a_time)
    assert store.list_names("folder") == names
    assert wire.operations == {"ListObjectsV2": 4}
    assert set(store.outline("data")) == {f"folder/{name}" for name in names}
    store.delete_tree("folder")
    assert wire.server.keys(bucket) == []


def _two_at_a_time(request: Any) -> None:
    request.url += "&max-keys=2"


def test_an_outline_takes_few_entries_of_a_checkpoint(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket)
    assert isinstance(store, Outlining)
    for step in range(3):
        for path in ("COMMIT", "signature.json", "keyring/0001.json", *(f"data/{n:05d}" for n in range(9))):
            store.put(f"step-{step}/{path}", b"xy")
    store.put("run.json", b"{}")
    wire.forget()
    outline = store.outline("data")
    assert wire.operations == {"ListObjectsV2": 1}
    assert len(outline) == 3 * 4 + 1
    assert outline["step-0/data/"] is None
    assert outline["step-2/COMMIT"] == store.stat("step-2/COMMIT")


_PARTS = st.sampled_from(("data", "x-data", "data-x", "a", "b", "keyring"))
_KEYS = st.lists(_PARTS, min_size=1, max_size=4).map("/".join)


@settings(max_examples=15)
@given(keys=st.sets(_KEYS, max_size=6), folds=st.booleans())
def test_an_outline_is_the_same_on_every_server(moto_s3: S3Server, keys: set[str], folds: bool) -> None:
    wire = Wire(moto_s3)
    bucket = moto_s3.make_bucket()
    for key in (
        *(f"run/{key}" for key in keys),
        "other/data/x",
        "run/",
        "run/a/",
        "run/data//x",
        "run/.hidden",
    ):
        moto_s3.behind.put_object(Bucket=bucket, Key=key, Body=b"x")
    if not folds:
        wire.change("ListObjectsV2", _take_no_delimiter)
    expected: set[str] = set()
    for key in keys:
        parts = key.split("/")
        folders = [number for number, part in enumerate(parts[:-1]) if part == "data"]
        expected.add("/".join(parts[: folders[0] + 1]) + "/" if folders else key)
    outline = wire.store(bucket).outline("data")
    assert set(outline) - {"data/"} == expected - {"data/"}
    assert all((info is None) == key.endswith("/") for key, info in outline.items())


def _take_no_delimiter(request: Any) -> None:
    request.url = request.url.replace("delimiter=%2Fdata%2F", "")


def test_a_server_that_refuses_to_fold_is_listed_whole(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket)
    for path in ("COMMIT", "data/a", "data/b"):
        store.put(f"step-1/{path}", b"x")
    wire.answer("ListObjectsV2", 400, "InvalidArgument")
    assert set(store.outline("data")) == {"step-1/COMMIT", "step-1/data/"}
    wire.answer("ListObjectsV2", 403, "AccessDenied")
    with pytest.raises(AccessDeniedError):
        store.outline("data")


def test_foreign_objects_do_not_break_a_listing(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket)
    store.put("step-1/COMMIT", b"x")
    for key in (
        "run/",
        "run/step-1/",
        "run/empty/",
        "run//odd",
        "run/ä b",
        "run/step-1/.COMMIT.0123456789abcdef.tmp",
    ):
        wire.server.behind.put_object(Bucket=bucket, Key=key, Body=b"")
    assert store.list_names("") == ["empty/", "step-1/", "ä b"]
    assert store.list_names("step-1") == ["COMMIT"]
    assert set(store.outline("data")) == {"step-1/COMMIT"}


def test_a_root_may_be_a_whole_bucket_or_have_names_of_all_kinds(wire: Wire, bucket: str) -> None:
    for prefix in ("", "a b/ä%20+&?#x"):
        store = wire.store(bucket, prefix)
        store.put("folder/object", b"x")
        assert store.list_names("") == ["folder/"]
        assert store.read("folder/object", limit_bytes=1) == b"x"
        assert set(store.outline("data")) == {"folder/object"}
        store.delete_tree("folder")
        assert store.list_names("") == []


# Removing


def test_what_a_server_says_in_its_answer_about_one_object_is_an_error(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket)
    store.put("folder/object", b"x")
    told = "<Key>run/folder/object</Key><Code>AccessDenied</Code><Message>told</Message>"
    body = f"<DeleteResult><Error>{told}</Error></DeleteResult>".encode()
    wire.answer("DeleteObjects", 200, "", body=body)
    with pytest.raises(AccessDeniedError, match="s3:DeleteObject was refused"):
        store.delete_tree("folder")
    wire.answer(
        "DeleteObjects",
        200,
        "",
        body=body.replace(b"</Error>", b"</Error>" + f"<Error>{told}</Error>".encode()),
    )
    with pytest.raises(AccessDeniedError, match="2 objects were not deleted"):
        store.delete_tree("folder")


def test_removing_is_asked_for_with_a_checksum_that_old_servers_know(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket)
    store.put("folder/object", b"x")
    wire.forget()
    store.delete_tree("folder")
    assert [("Content-MD5" in headers) for op, headers in wire.requests if op == "DeleteObjects"] == [True]


def test_keys_that_no_batch_can_hold_are_removed_one_by_one(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket)
    store.put("folder/object", b"x")
    wire.server.behind.put_object(Bucket=bucket, Key="run/folder/x\x01y", Body=b"x")
    wire.forget()
    store.delete_tree("folder")
    assert wire.server.keys(bucket) == []
    assert wire.operations["DeleteObject"] == 1


def test_a_batch_that_the_server_cannot_read_is_removed_one_by_one(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket)
    for name in ("a", "b"):
        store.put(f"folder/{name}", b"x")
    wire.answer("DeleteObjects", 400, "MalformedXML")
    store.delete_tree("folder")
    assert wire.server.keys(bucket) == []
    store.put("folder/a", b"x")
    wire.answer("DeleteObjects", 403, "AccessDenied")
    with pytest.raises(AccessDeniedError):
        store.delete_tree("folder")
    assert wire.server.keys(bucket) == ["run/folder/a"]


# What is not S3's word


PAGE = b"<html><body><h1>404 Not Found</h1></body></html>"


def _looks(store: S3Store, key: str) -> dict[str, Callable[[], object]]:
    return {
        "stat": lambda: store.stat(key),
        "open_reader": lambda: store.open_reader(key),
        "read": lambda: store.read(key, limit_bytes=10),
    }


@pytest.mark.parametrize("look", ("stat", "open_reader", "read"))
def test_a_404_that_is_not_s3s_is_no_absence(wire: Wire, bucket: str, look: str) -> None:
    store = wire.store(bucket, tries=2)
    store.put("there", b"x")
    wire.answer("HeadObject", 404, "")
    wire.answer("GetObject", 404, "", body=PAGE, count=2)
    with pytest.raises(StoreUnavailableError, match=r"does not speak S3|answered that it does not exist"):
        _looks(store, "there")[look]()
    wire.answer("GetObject", 404, "", body=b"", count=2)
    wire.answer("HeadObject", 404, "")
    with pytest.raises(StoreUnavailableError):
        _looks(store, "there")[look]()
    wire.answer("HeadObject", 404, "")
    wire.answer("ListObjectsV2", 404, "NoSuchAccessPoint")
    wire.answer("GetObject", 404, "NoSuchAccessPoint")
    with pytest.raises(StoreError, match="NoSuchAccessPoint") as told:
        _looks(store, "there")[look]()
    assert not isinstance(told.value, ObjectNotFoundError)


def test_a_listing_that_is_not_there_is_never_an_empty_one(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket, tries=2)
    for code, body in (("", PAGE), ("", b""), ("NoSuchAccessPoint", None), ("NoSuchKey", None)):
        wire.answer("ListObjectsV2", 404, code, body=body, count=2 if body is not None else 1)
        with pytest.raises(StoreError) as told:
            store.list_names("")
        assert not isinstance(told.value, ObjectNotFoundError)


def test_every_head_that_finds_nothing_is_made_sure_of(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket)
    store.put("there", b"x")
    for _ in range(2):
        wire.forget()
        with pytest.raises(ObjectNotFoundError):
            store.stat("ther")
        assert wire.operations == {"HeadObject": 1, "ListObjectsV2": 1}


def test_who_may_not_list_makes_sure_by_reading(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket)
    store.put("there", b"x")
    store.put("empty", b"")
    for key, expected in (
        ("absent", ObjectNotFoundError),
        ("there", StoreUnavailableError),
        ("empty", StoreUnavailableError),
    ):
        wire.answer("HeadObject", 404, "")
        wire.answer("ListObjectsV2", 403, "AccessDenied")
        with pytest.raises(expected):
            store.stat(key)


def test_a_404_on_the_way_of_a_save_is_tried_again(wire: Wire, bucket: str) -> None:
    wire.answer("PutObject", 404, "", body=PAGE)
    assert wire.store(bucket).put_if_absent("COMMIT", b"x") is True


def test_a_login_page_is_no_object_and_another_buckets_listing_none_of_ours(
    wire: Wire, stubborn: tuple[type[_Stubborn], S3Store], bucket: str
) -> None:
    handler, elsewhere = stubborn
    for headers in ((), (("ETag", '"page"'), ("Content-Type", "text/html; charset=utf-8"))):
        handler.headers_of_get = headers
        with pytest.raises(StoreUnavailableError, match="does not speak S3"):
            elsewhere.read("object", limit_bytes=2 * MIB)
    listing = b"<ListBucketResult><Name>other</Name><IsTruncated>false</IsTruncated></ListBucketResult>"
    wire.answer("ListObjectsV2", 200, "", body=listing)
    with pytest.raises(StoreUnavailableError, match="lists another bucket, 'other'"):
        wire.store(bucket, tries=1).list_names("")


def test_a_listing_that_never_ends_is_an_error(
    wire: Wire, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strongroom.stores.s3.listing._MOST_PAGES", 20)
    monkeypatch.setattr("strongroom.stores.s3.listing._MOST_EMPTY_PAGES", 10)
    store = wire.store(bucket)
    entry = "<Contents><Key>run/k{}</Key><Size>1</Size></Contents>"
    for entries, tokens, pages in (
        ("", range(100), 11),
        (entry, range(100), 21),
        (entry, (1, 2) * 50, 3),
        ("<Contents><Key>run/k</Key><Size>1</Size></Contents>", range(100), 2),
        ("", ("",), 1),
    ):
        wire.forget()
        for number, token in enumerate(tokens):
            following = f"<NextContinuationToken>{token}</NextContinuationToken>" if token != "" else ""
            page = f"<Name>{bucket}</Name><IsTruncated>true</IsTruncated>{following}{entries.format(number)}"
            told = f"<ListBucketResult>{page}</ListBucketResult>".encode()
            wire.answer("ListObjectsV2", 200, "", body=told)
        with pytest.raises(StoreError, match="leads nowhere"):
            store.list_names("")
        assert wire.operations == {"ListObjectsV2": pages}
        wire.give_no_more("ListObjectsV2")


def test_an_archived_object_has_to_be_restored_first(wire: Wire, bucket: str) -> None:
    store = wire.store(bucket)
    store.put("object", b"x")
    wire.answer("GetObject", 403, "InvalidObjectState")
    with pytest.raises(StoreError, match=r"archive class.*restore-object") as told:
        store.read("object", limit_bytes=1)
    assert not isinstance(told.value, AccessDeniedError)


# What drips


@pytest.mark.parametrize("chunked", (False, True))
def test_an_answer_that_drips_is_not_waited_for_for_ever(moto_s3: S3Server, chunked: bool) -> None:
    """One byte at a time, each of them in time."""
    head = b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: 100000\r\n\r\n'
    if chunked:
        head = head.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n")
    drop = b"1\r\na\r\n" if chunked else b"a"
    over = threading.Event()
    clock = {"now": 0.0}

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(head)
            while not over.is_set():
                try:
                    self.request.sendall(drop)
                except OSError:
                    return
                clock["now"] += 0.9
                over.wait(0.001)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        store = S3Store(
            "s3://bucket/run",
            options=S3Options(
                endpoint_url=f"http://127.0.0.1:{server.server_address[1]}", read_timeout_s=1.0, tries=1
            ),
            session=moto_s3.session,
            monotonic=lambda: clock["now"],
        )
        try:
            with pytest.raises(StoreUnavailableError, match="too slowly"):
                store.read("object", limit_bytes=MIB)
            assert clock["now"] < 1000
        finally:
            over.set()
            server.shutdown()
            thread.join(10)
