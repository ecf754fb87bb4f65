"""A store that has an end: no save begins that does not fit, and somebody hears of it before that."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import Checkpointer, ConfigError, KeepLast, SaveError, StoreUnavailableError, events
from strongroom.errors import StoreError, StoreFullError
from strongroom.saturation import Gauge, why_full
from strongroom.stores.calls import OsCalls
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom.stores.offers import Space, Spacious

Begin = Callable[..., Checkpointer]
STATE = {"w": torch.ones(2500), "step": 1}
STATE_BYTES = 10_000


class Sized(MemoryStore):
    """In memory, and as full as the test says."""

    def __init__(self, *, total_bytes: int = 1_000_000, free_bytes: int = 1_000_000) -> None:
        super().__init__()
        self.total_bytes, self.free_bytes = total_bytes, free_bytes
        self.problem: StoreError | None = None

    def space(self) -> Space:
        if self.problem is not None:
            raise self.problem
        return Space(total_bytes=self.total_bytes, free_bytes=self.free_bytes)


# ------------------------------------------------------------------------------- what a store says


def test_a_local_store_says_what_its_file_system_has_for_this_user(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "not" / "there" / "yet")
    assert isinstance(store, Spacious)
    space = store.space()
    found = os.statvfs(tmp_path)
    # Others write there meanwhile.
    assert abs(space.free_bytes - found.f_bavail * found.f_frsize) < space.total_bytes / 10
    assert 0 < space.free_bytes <= space.total_bytes <= found.f_blocks * found.f_frsize
    assert 0 <= space.used_fraction < 1
    assert not (tmp_path / "not").exists()


class Told(OsCalls):
    """A file system that says what the test wants."""

    def __init__(self, *, blocks: int, free: int, available: int) -> None:
        self._found = os.statvfs_result((4096, 4096, blocks, free, available, 0, 0, 0, 0, 255))

    def statvfs(self, path: str) -> os.statvfs_result:
        return self._found


def test_what_is_reserved_for_others_counts_as_used(tmp_path: Path) -> None:
    space = LocalStore(tmp_path, calls=Told(blocks=100, free=30, available=20)).space()
    assert (space.total_bytes, space.free_bytes) == (90 * 4096, 20 * 4096)
    assert space.used_fraction == pytest.approx(70 / 90)


def test_a_file_system_that_does_not_say_its_size_is_not_taken_for_a_full_one(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, calls=Told(blocks=0, free=0, available=0))
    with pytest.raises(StoreError, match="does not say how large it is"):
        store.space()
    assert why_full(store, 10**15) is None


# ---------------------------------------------------------------------------- before anything is written


def test_a_save_begins_where_it_fits_and_the_reserve_beside_it() -> None:
    store = Sized(total_bytes=10_000, free_bytes=1000)
    assert why_full(store, 1000) is None
    assert why_full(store, 900, reserve_bytes=100) is None
    told = why_full(store, 901, reserve_bytes=100)
    assert told is not None
    assert "1000 bytes free of 10000" in told
    assert "takes 901, and 100 more are to stay free (reserve_bytes)" in told
    assert "strongroom gc" in told
    assert "memory://" in told
    assert "reserve" not in str(why_full(store, 1001))


def test_what_does_not_say_how_full_it_is_is_not_held_up() -> None:
    assert why_full(MemoryStore(), 10**15) is None
    broken = Sized(free_bytes=0)
    broken.problem = StoreUnavailableError("no answer")
    assert why_full(broken, 10**15) is None


def test_a_save_that_does_not_fit_fails_in_the_background_and_writes_nothing(
    begin: Begin, listener: Any
) -> None:
    store = Sized()
    checkpointer = begin(store, events=[listener])
    checkpointer.save(1, STATE).result(60)
    before = store.contents()
    store.free_bytes = STATE_BYTES - 1
    handle = checkpointer.save(2, STATE)
    with pytest.raises(SaveError, match=r"step 2 failed .* step 1 is untouched") as caught:
        handle.result(60)
    assert isinstance(caught.value.__cause__, StoreFullError)
    assert "9999 bytes free of 1000000; this save takes 10000" in str(caught.value)
    assert store.contents() == before
    (failed,) = listener.of(events.SaveFailed)
    assert failed.step == 2
    assert [event.step for event in listener.of(events.SaveStarted)] == [1]
    store.free_bytes = STATE_BYTES
    assert checkpointer.save(2, STATE).result(60).step == 2
    assert begin(store).restore().step == 2


def test_a_failure_that_nobody_asked_for_raises_at_the_next_save(begin: Begin) -> None:
    store = Sized(free_bytes=0)
    checkpointer = begin(store)
    checkpointer.save(1, STATE)
    with pytest.raises(SaveError, match="0 bytes free"):
        checkpointer.save(2, STATE)


def test_the_reserve_stays_free(begin: Begin) -> None:
    store = Sized(free_bytes=STATE_BYTES + 499)
    with pytest.raises(SaveError, match="500 more are to stay free"):
        begin(store, reserve_bytes=500).save(1, STATE).result(60)
    assert begin(store, reserve_bytes=499).save(1, STATE).result(60).step == 1


@pytest.mark.parametrize("reserve", (-1, 1.5, "1G", None, True))
def test_a_reserve_is_a_whole_number_of_bytes(reserve: Any) -> None:
    with pytest.raises(ConfigError, match="reserve_bytes must be a whole number"):
        Checkpointer(MemoryStore(), reserve_bytes=reserve)


def test_what_would_be_written_while_training_waits_is_not_begun_either(begin: Begin) -> None:
    store = Sized(free_bytes=1 << 20)
    checkpointer = begin(store, memory_budget=16 << 20)
    large = {"w": torch.zeros(6 << 20, dtype=torch.float32), "v": torch.zeros(5 << 20)}
    with pytest.raises(SaveError, match="bytes free"):
        checkpointer.save(1, large).result(60)
    assert not [key for key in store.contents() if key.startswith("step-")]


class Quota(OsCalls):
    """Lets so many writes through, and no more."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.writes_left = 10**9

    def write(self, fd: int, data: memoryview) -> int:
        if self.writes_left == 0:
            raise OSError(self.code, os.strerror(self.code))
        self.writes_left -= 1
        return super().write(fd, data)


@pytest.mark.parametrize("code", (errno.EDQUOT, errno.ENOSPC))
@pytest.mark.parametrize("writes", (0, 2, 5))
def test_a_quota_that_ends_in_mid_save_leaves_what_was_committed(
    code: int, writes: int, root: Path, begin: Begin
) -> None:
    quota = Quota(code)
    checkpointer = begin(LocalStore(root, calls=quota))
    checkpointer.save(1, STATE).result(60)
    checkpointer.save(2, STATE).result(60)
    # A shard is written first, and COMMIT as the sixth.
    quota.writes_left = writes
    with pytest.raises(SaveError, match=os.strerror(code)) as caught:
        checkpointer.save(3, STATE).result(60)
    assert isinstance(caught.value.__cause__, StoreFullError)
    assert "quota" in str(caught.value)
    assert [checkpoint.step for checkpoint in begin(root).checkpoints()] == [2, 1]
    assert not list(root.glob("step-000000000003-*"))
    restored = begin(root).restore()
    assert torch.equal(restored.state["w"], STATE["w"])


# ---------------------------------------------------------------------------------- how full it gets


def test_after_each_commit_it_is_told_how_full_the_store_is(begin: Begin, listener: Any) -> None:
    store = Sized(total_bytes=1_000_000, free_bytes=600_000)
    checkpointer = begin(store, events=[listener], keep=KeepLast(count=1))
    for step in (1, 2):
        checkpointer.save(step, STATE)
    checkpointer.wait(60)
    measured = listener.of(events.StoreMeasured)
    assert len(measured) == 2
    assert (measured[0].tier, measured[0].total_bytes, measured[0].free_bytes) == (
        store.uri,
        1_000_000,
        600_000,
    )
    assert measured[0].used_fraction == pytest.approx(0.4)
    # When what the new checkpoint replaces has gone.
    assert listener.kinds.index("CheckpointRemoved") < len(listener.kinds) - 1
    assert listener.kinds[-1] == "StoreMeasured"


def test_a_store_on_a_file_system_is_measured_too(root: Path, begin: Begin, listener: Any) -> None:
    begin(root, events=[listener]).save(1, STATE).result(60)
    begin(root).restore()
    (checkpointer,) = [begin(root, events=[listener])]
    checkpointer.save(2, STATE)
    checkpointer.wait(60)
    assert listener.of(events.StoreMeasured)[-1].tier == root.as_uri()


def test_getting_full_is_said_once_as_a_warning_and_once_as_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Sized(total_bytes=100)
    gauge = Gauge(events.Emitter())
    said = []
    for free_bytes in (26, 25, 24, 20, 14, 10, 14, 20, 40, 24, 5):
        store.free_bytes = free_bytes
        caplog.clear()
        gauge.measure("demo", [store, MemoryStore("another")])
        said.append([record.levelname for record in caplog.records if "full" in record.message])
    # At 75 % and at 85 % it is not beyond them yet; once it has emptied, it is news again.
    assert said == [[], [], ["WARNING"], [], ["ERROR"], [], [], [], [], ["WARNING"], ["ERROR"]]


def test_what_is_logged_names_the_store_and_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "strongroom"):
        Gauge(events.Emitter()).measure("demo", [Sized(total_bytes=1000, free_bytes=100)])
    (record,) = caplog.records
    assert "memory://store is 90 % full, 100 bytes are free" in record.message
    assert "strongroom gc" in record.message


def test_a_store_that_cannot_be_measured_fails_nobodys_save(begin: Begin, listener: Any) -> None:
    store = Sized()
    store.problem = StoreUnavailableError("no answer")
    begin(store, events=[listener]).save(1, STATE).result(60)
    assert listener.of(events.StoreMeasured) == []
