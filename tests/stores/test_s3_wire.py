"""Whatever befalls a request to a bucket: a save is whole or was never there, a restore is right or refused.

One process's life runs over a bad wire on which first the first request fails, then the second, and so on,
for every kind of fault; afterwards the bucket is looked at past the wire. Parts and shards are made small, so
that a few kilobytes go out as several shards in several parts each. Faults that a client cannot tell from
another one here are left to ``-m soak``.
"""

from __future__ import annotations

import http.client
import itertools
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import unescape

import pytest
import torch
from s3_servers import S3Server
from wire_proxy import Fault, Request, WireProxy, any_request

from strongroom import Checkpointer, KeepLast
from strongroom.catalog import Catalog
from strongroom.errors import (
    OutcomeUnknownError,
    SaveError,
    StoreError,
    StoreUnavailableError,
    StrongroomError,
)
from strongroom.keeping import find_garbage
from strongroom.layout import COMMIT
from strongroom.stores.memory import MemoryStore
from strongroom.stores.s3 import S3Options, S3Store
from strongroom.sweep import remove

PART_BYTES = 4096
TRIES = 4
"""Of each request; a lasting fault uses them up."""


# What is saved


def state_at(step: int) -> dict[str, Any]:
    """A few kilobytes that no other step has."""
    seeded = torch.Generator().manual_seed(step)
    return {
        "weights": torch.randn(1500, generator=seeded),
        "moments": {"exp_avg": torch.randn(1500, generator=seeded)},
        "extra": {"step": step, "loss": 1.0 / (step + 1)},
    }


def assert_is_state_at(state: Any, step: int) -> None:
    expected = state_at(step)
    assert state["extra"] == expected["extra"]
    assert torch.equal(state["weights"], expected["weights"])
    assert torch.equal(state["moments"]["exp_avg"], expected["moments"]["exp_avg"])


def assert_whole(contents: Mapping[str, bytes]) -> list[int]:
    """Everything that a new process lists restores bit for bit, and the newest by itself; the steps."""
    store = MemoryStore()
    store.plant(dict(contents))
    steps = [checkpoint.step for checkpoint in Checkpointer(store).checkpoints()]
    for step in steps:
        restored = Checkpointer(store).restore(step=step)
        assert restored is not None
        assert_is_state_at(restored.state, step)
    newest = Checkpointer(store).restore()
    assert [] if newest is None else (newest.step, newest.skipped) == (steps[0], ())
    return steps


# The bucket, past the wire


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A bucket on a server that asks for no signature, by requests that cost little."""

    server: S3Server
    name: str
    connection: http.client.HTTPConnection

    def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        self.connection.request(method, f"/{self.name}{path}", body)
        answer = self.connection.getresponse()
        data = answer.read()
        assert answer.status < 300, data
        return data

    def plant(self, prefix: str, contents: Mapping[str, bytes]) -> None:
        for key, data in contents.items():
            self.ask("PUT", f"/{prefix}/{key}", data)

    def contents(self, prefix: str) -> dict[str, bytes]:
        listed = self.ask("GET", f"?list-type=2&prefix={prefix}/").decode()
        assert "<IsTruncated>true" not in listed
        keys = [unescape(key) for key in re.findall("<Key>(.*?)</Key>", listed)]
        return {key.removeprefix(f"{prefix}/"): self.ask("GET", f"/{key}") for key in keys}

    def unfinished(self, prefix: str) -> list[str]:
        """The keys of uploads that were begun and not ended."""
        listed = self.ask("GET", f"?uploads&prefix={prefix}/").decode()
        return [unescape(key).removeprefix(f"{prefix}/") for key in re.findall("<Key>(.*?)</Key>", listed)]


@pytest.fixture(scope="module")
def bucket(ministack_s3: S3Server) -> Iterator[Bucket]:
    """On ministack, which takes parts of any size and compares every checksum."""
    connection = http.client.HTTPConnection("127.0.0.1", ministack_s3.port, timeout=60)
    yield Bucket(server=ministack_s3, name=ministack_s3.make_bucket(), connection=connection)
    connection.close()


@pytest.fixture(scope="module")
def wire(ministack_s3: S3Server) -> Iterator[WireProxy]:
    with WireProxy(ministack_s3.port) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def _small_parts_and_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strongroom.stores.s3.options.MIN_PART_BYTES", 1024)
    monkeypatch.setattr("strongroom.shards.MIN_PART_BYTES", PART_BYTES)


_prefixes = (f"case-{number}" for number in itertools.count(1))


class OneClient:
    """A session that makes one client for each endpoint: making one takes longer than a save."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._clients: dict[str, Any] = {}

    def client(self, service: str, *, endpoint_url: str, **options: Any) -> Any:
        if endpoint_url not in self._clients:
            self._clients[endpoint_url] = self._session.client(service, endpoint_url=endpoint_url, **options)
        return self._clients[endpoint_url]


class World:
    """Runs that each begin with the same checkpoint of step 1, saved by a process that has ended."""

    def __init__(self, bucket: Bucket, wire: WireProxy) -> None:
        self.bucket = bucket
        self.wire = wire
        self.session = OneClient(bucket.server.session)
        store = MemoryStore()
        with Checkpointer(store) as checkpointer:
            checkpointer.save(1, state_at(1)).result()
        self.old = store.contents()

    def begin(self, contents: Mapping[str, bytes] | None = None) -> str:
        """A new run; its prefix."""
        prefix = next(_prefixes)
        self.bucket.plant(prefix, self.old if contents is None else contents)
        return prefix

    def store(self, prefix: str, *, tries: int = TRIES, past_the_wire: bool = False) -> S3Store:
        endpoint = self.bucket.server.endpoint_url if past_the_wire else self.wire.endpoint_url
        options = S3Options(
            endpoint_url=endpoint,
            addressing_style="path",
            part_bytes=PART_BYTES,
            parts_in_flight=3,
            tries=tries,
        )
        return S3Store(
            f"s3://{self.bucket.name}/{prefix}",
            options=options,
            session=self.session,
            sleep=lambda seconds: None,
        )


@pytest.fixture(scope="module")
def world(bucket: Bucket, wire: WireProxy) -> World:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strongroom.shards.MIN_PART_BYTES", PART_BYTES)
        return World(bucket, wire)


# A save


@dataclass(frozen=True, kw_only=True)
class Life:
    """What one process's life over a bad wire came to.

    Attributes:
        error: that it heard of.
        requests: that it sent, failed ones included.
        contents: of the run afterwards, looked at past the wire.
    """

    prefix: str
    error: StrongroomError | None
    requests: list[Request]
    contents: Mapping[str, bytes]

    def failed(self, end_of_path: str) -> list[Request]:
        """Its requests for objects whose keys end so that failed on the wire."""
        return [each for each in self.requests if each.fault is not None and each.path.endswith(end_of_path)]


def live(world: World, *, keep: KeepLast | None = None) -> Life:
    """Save step 2 and end, over the wire as it is armed."""
    prefix = world.begin()
    before, error = len(world.wire.requests), None
    try:
        with Checkpointer(world.store(prefix), keep=keep) as checkpointer:
            checkpointer.save(2, state_at(2)).result()
    except StrongroomError as caught:
        error = caught
    world.wire.disarm()
    requests = world.wire.requests[before:]
    return Life(prefix=prefix, error=error, requests=requests, contents=world.bucket.contents(prefix))


def each_in_turn(
    world: World,
    kinds: Kinds,
    *,
    lasting: bool,
    counts: Callable[[Request], bool] | None = None,
    keep: KeepLast | None = None,
) -> Iterator[tuple[Fault, Life]]:
    """A life in which the first request fails, then the second, and so on until none is left to fail."""
    for number in itertools.count(1):
        fault = kinds[number % len(kinds)]
        world.wire.arm(fault, at=number, lasting=lasting, counts=counts or counts_for(fault))
        life = live(world, keep=keep)
        if world.wire.hits == 0:
            assert life.error is None
            assert number > 1, "no request was failed"
            return
        yield fault, life


def assert_agrees(life: Life) -> None:
    """What the process heard is what there is, and the old checkpoint is as it was."""
    steps = assert_whole(life.contents)
    commits = [
        key for key in life.contents if key.startswith("step-000000000002") and key.endswith(f"/{COMMIT}")
    ]
    assert len(commits) <= 1
    if life.error is None:
        assert steps == [2, 1]
    elif isinstance(life.error, OutcomeUnknownError) and life.failed(f"/{COMMIT}"):
        assert steps in ([1], [2, 1])
    else:
        # The record of the run, or of this launch, may be as unknown; a checkpoint never.
        assert isinstance(life.error, SaveError | StoreError)
        assert steps == [1]


def collect_garbage(world: World, life: Life) -> None:
    """As `strongroom gc` does a month later: checkpoints are left, and what a run has besides."""
    store = world.store(life.prefix, past_the_wire=True)
    plan = find_garbage(store, Catalog(store).history(), None, now_ns=time.time_ns() + 30 * 86_400 * 10**9)
    assert [outcome for outcome in (remove(store, each) for each in plan.removals) if outcome.error] == []
    assert world.bucket.unfinished(life.prefix) == []
    contents = world.bucket.contents(life.prefix)
    committed = tuple(key.removesuffix(COMMIT) for key in life.contents if key.endswith(f"/{COMMIT}"))
    assert contents == {
        key: data
        for key, data in life.contents.items()
        if not key.startswith("step-") or key.startswith(committed)
    }


def counts_for(fault: Fault) -> Callable[[Request], bool]:
    """Which requests of a save a fault is about."""
    if fault is Fault.ERROR_IN_200:
        # S3 answers so only where the answer takes long to find: the parts of an upload are joined.
        return lambda request: request.method == "POST" and "uploadId" in request.query
    if fault in (Fault.REQUEST_CUT, Fault.REQUEST_SHORT):
        return lambda request: request.sent_bytes > 0
    if fault is Fault.ANSWER_CUT:
        # The others' answers have no body to be cut.
        return lambda request: request.method != "PUT"
    return any_request


Kinds = tuple[Fault, ...]
"""Faults that take turns, so that each request meets one of them."""


def kinds(*always: Kinds) -> Any:
    """These on every run; and each fault by itself where minutes do not count."""
    alone = [pytest.param((fault,), marks=pytest.mark.soak) for fault in Fault if (fault,) not in always]
    return pytest.mark.parametrize(
        "kinds", (*always, *alone), ids=lambda kinds: ", ".join(fault.value for fault in kinds)
    )


@kinds(
    (Fault.DROPPED, Fault.RESET),
    (Fault.ANSWER_LOST, Fault.UNAVAILABLE_AFTER),
    (Fault.LATE,),
    (Fault.REQUEST_CUT, Fault.REQUEST_SHORT),
    (Fault.ANSWER_CUT,),
    (Fault.ERROR, Fault.UNAVAILABLE, Fault.SLOW_DOWN),
    (Fault.ERROR_IN_200,),
)
def test_one_failure_anywhere_in_a_save_is_survived(world: World, kinds: Kinds) -> None:
    for fault, life in each_in_turn(world, kinds, lasting=False):
        if fault is Fault.REQUEST_SHORT and life.error is not None:
            # A list of parts that was cut is refused as it is: no wire does that, but a broken proxy.
            assert "MalformedXML" in str(life.error)
        else:
            assert life.error is None
        assert_agrees(life)
        if fault.reaches_the_server and any(is_begin(each) for each in life.failed("")):
            # Its id was lost with the answer: nothing but the bucket's listing knows of it.
            collect_garbage(world, life)
        assert world.bucket.unfinished(life.prefix) == []


def is_begin(request: Request) -> bool:
    """Whether it begins an upload in parts."""
    return request.method == "POST" and request.query == "uploads"


@kinds(
    (Fault.DROPPED, Fault.SLOW_DOWN),
    (Fault.ANSWER_LOST, Fault.UNAVAILABLE_AFTER),
    (Fault.ERROR_IN_200,),
)
def test_a_failure_that_lasts_from_anywhere_in_a_save_on_is_told_as_it_is(world: World, kinds: Kinds) -> None:
    for fault, life in each_in_turn(world, kinds, lasting=True):
        assert_agrees(life)
        assert (life.error is None) == (fault is Fault.SLOW)
        collect_garbage(world, life)


@pytest.mark.parametrize(
    "fault",
    (Fault.DROPPED, Fault.ANSWER_LOST, Fault.LATE, Fault.REQUEST_CUT, Fault.UNAVAILABLE_AFTER),
    ids=lambda fault: fault.value,
)
def test_an_upload_whose_parts_do_not_get_through_is_given_up_at_once_and_leaves_none(
    world: World, fault: Fault
) -> None:
    """Also those that arrive when it has been given up."""

    def is_part(request: Request) -> bool:
        return "partNumber=" in request.query

    prefix, body = world.begin(), bytes(3 * PART_BYTES)
    world.wire.arm(fault, at=2, lasting=True, counts=is_part)
    with pytest.raises(StoreError), world.store(prefix).open_writer("long", length_bytes=len(body)) as writer:
        writer.write(body)
        writer.finish()
    world.wire.disarm()
    assert world.bucket.unfinished(prefix) == []
    assert world.bucket.contents(prefix) == world.old
    # And so in a save, of which all else is removed as well, since this identity may.
    world.wire.arm(fault, at=2, lasting=True, counts=is_part)
    life = live(world)
    assert isinstance(life.error, SaveError | StoreError)
    assert_agrees(life)
    assert world.bucket.unfinished(life.prefix) == []
    assert not [key for key in life.contents if key.startswith("step-000000000002")]


def test_a_wire_that_is_slow_all_the_time_changes_nothing(world: World) -> None:
    world.wire.arm(Fault.SLOW, lasting=True)
    life = live(world)
    assert life.error is None
    assert world.wire.hits == len(life.requests) > 10
    assert_agrees(life)


@pytest.mark.parametrize("lasting", (False, True), ids=["once", "lasting"])
def test_a_failure_while_retention_removes_the_old_takes_nothing_of_the_new(
    world: World, lasting: bool
) -> None:
    def counts(request: Request) -> bool:
        return request.method == "DELETE" or (request.method == "POST" and "delete" in request.query)

    reached = 0
    kinds = (Fault.ANSWER_LOST, Fault.UNAVAILABLE)
    for _, life in each_in_turn(world, kinds, lasting=lasting, counts=counts, keep=KeepLast(count=1)):
        reached += 1
        assert assert_whole(life.contents) in ([2], [2, 1])
        # What retention was kept from is done by the next process; what it has gone on from stays.
        later = world.store(life.prefix, past_the_wire=True)
        with Checkpointer(later, keep=KeepLast(count=1)) as checkpointer:
            checkpointer.restore()
            checkpointer.save(3, state_at(3)).result()
        assert assert_whole(world.bucket.contents(life.prefix)) == [3, 2]
        assert world.bucket.unfinished(life.prefix) == []
    assert reached >= 2


def test_two_failures_anywhere_in_a_save_are_survived_or_told(world: World) -> None:
    """Drawn at random, the same on every run: what no single failure shows."""
    drawn = random.Random(20261130)
    heard = set()
    for _ in range(12):
        first, second = drawn.choice(list(Fault)), drawn.choice(list(Fault))
        when = drawn.randrange(1, 19)
        seen = itertools.count(1)

        def counts(request: Request, chosen: int = when, seen: Iterator[int] = seen) -> bool:
            return next(seen) >= chosen

        world.wire.arm(first, then=(second,), counts=counts)
        life = live(world)
        assert_agrees(life)
        collect_garbage(world, life)
        heard.add(life.error is None)
    assert True in heard


# A restore


def restore(world: World, prefix: str) -> tuple[Any, int]:
    """What a process that only reads gets over the wire as it is armed, and how many requests failed."""
    try:
        return Checkpointer(world.store(prefix)).restore(), world.wire.hits
    except StrongroomError as error:
        return error, world.wire.hits
    finally:
        world.wire.disarm()


@pytest.fixture(scope="module")
def two_steps(world: World) -> str:
    """A run with two checkpoints; its prefix."""
    store = MemoryStore()
    store.plant(world.old)
    with Checkpointer(store) as checkpointer:
        checkpointer.restore()
        checkpointer.save(2, state_at(2)).result()
    return world.begin(store.contents())


READ_FAULTS = [
    fault for fault in Fault if fault not in (Fault.REQUEST_CUT, Fault.REQUEST_SHORT, Fault.ERROR_IN_200)
]
"""What reads have no body for, and no answer that comes after its headers."""


@pytest.mark.parametrize("fault", READ_FAULTS, ids=lambda fault: fault.value)
def test_one_failure_anywhere_in_a_restore_is_survived(world: World, two_steps: str, fault: Fault) -> None:
    for number in itertools.count(1):
        world.wire.arm(fault, at=number)
        restored, hits = restore(world, two_steps)
        assert not isinstance(restored, StrongroomError)
        assert (restored.step, restored.skipped) == (2, ())
        assert_is_state_at(restored.state, 2)
        if not hits:
            break
    assert number > 10


@pytest.mark.parametrize("fault", READ_FAULTS, ids=lambda fault: fault.value)
def test_a_failure_that_lasts_is_no_damage_and_falls_back_to_nothing(
    world: World, two_steps: str, fault: Fault
) -> None:
    refused = 0
    for number in itertools.count(1):
        world.wire.arm(fault, at=number, lasting=True)
        restored, hits = restore(world, two_steps)
        if isinstance(restored, StrongroomError):
            assert isinstance(restored, StoreUnavailableError)
            refused += 1
        else:
            assert (restored.step, restored.skipped) == (2, ())
            assert_is_state_at(restored.state, 2)
        if not hits:
            break
    assert refused == (0 if fault is Fault.SLOW else number - 1)
