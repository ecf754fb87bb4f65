"""The keepers of keys under a real checkpointer: asked once, waited for in the background, never gone around.

And what a whole save and restore let out of the process: no key, in no form.
"""

from __future__ import annotations

import base64
import gc
import json
import logging
import os
import pickle
import statistics
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Keeper
from sealed_saves import Needles, Root, Watched, file_policy, is_shard, policy_of, raw, sealing_of

from strongroom import (
    Checkpointer,
    FormatError,
    IntegrityError,
    KeyServiceError,
    NoKeyError,
    SaveError,
    StrongroomError,
    Tolerate,
)
from strongroom.catalog import Catalog
from strongroom.events import CheckpointSkipped, Event, SaveFailed
from strongroom.signing import Guard
from strongroom.stores.memory import MemoryStore
from strongroom.verify import verify
from strongroom_security import Seal, SecurityPolicy
from strongroom_security.fields import Context
from strongroom_security.secret import Secret


def state_of(number: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(number)), "extra": {"epoch": number}}


def template() -> dict[str, Any]:
    return {"w": torch.full((1000,), 7.0), "extra": {}}


class Listener:
    """Keeps every event."""

    def __init__(self) -> None:
        self.heard: list[Event] = []

    def emit(self, event: Event) -> None:
        self.heard.append(event)


@pytest.fixture
def store() -> Watched:
    return Watched(MemoryStore())


@pytest.fixture
def gates() -> Iterator[list[threading.Event]]:
    """Opened at the end, so that no thread is left behind waiting."""
    gates: list[threading.Event] = []
    yield gates
    for gate in gates:
        gate.set()


# How often they are asked


def test_each_recipient_is_asked_once_a_save_and_one_identity_once_a_restore(store: Watched) -> None:
    one, two = Keeper("one"), Keeper("two")
    policy = policy_of(one, two)
    with Checkpointer(store, security=policy) as checkpointer:
        checkpointer.prepare(state_of(0))
        checkpointer.restore(template())
        assert one.wraps == two.wraps == one.unwraps == []
        for step in (1, 2, 3):
            checkpointer.save(step, state_of(step)).result()
        checkpointer.save(3, state_of(3))  # is there already
        expected = [Context.of(commit.run, name) for name, commit in commits(store)]
        assert one.wraps == two.wraps == expected
        assert all(context.path is None for context in expected)
        for restore in (
            lambda: checkpointer.restore(template()),
            lambda: checkpointer.restore(template(), step=3),
            lambda: checkpointer.restore(template(), only="extra"),
            lambda: checkpointer.plan_restore(template()),
        ):
            one.unwraps.clear()
            restore()
            assert (one.unwraps, two.unwraps) == ([expected[-1]], [])
    assert one.wraps == expected


def commits(store: Watched) -> list[tuple[Any, Any]]:
    return sorted(Catalog(store).history().commits.items())


def test_a_restore_that_goes_back_asks_once_for_each_checkpoint_that_it_tries(store: Watched) -> None:
    keeper = Keeper()
    with Checkpointer(store, security=policy_of(keeper)) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(step, state_of(step)).result()
        contents = store.inner.contents()
        for key, data in contents.items():
            if is_shard(key) and "step-000000000003" in key:
                store.inner.plant({key: data[:-1] + b"\0"})  # found when it is read
            if key.endswith("MANIFEST.json") and "step-000000000004" in key:
                store.inner.plant({key: data[:-1]})  # before any key is asked for
        restored = checkpointer.restore(template())
        assert restored is not None
        assert restored.step == 2
        assert [context.step for context in keeper.unwraps] == [3, 2]


def test_verifying_asks_once_for_each_checkpoint(store: Watched) -> None:
    keeper = Keeper()
    policy = policy_of(keeper)
    with Checkpointer(store, security=policy) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state_of(step)).result()
    assert verify(store, everything=True, guard=Guard(sealing=sealing_of(policy))).verdict == "whole"
    assert sorted(context.step for context in keeper.unwraps) == [1, 2, 3]


def test_directly_they_are_asked_once_a_file(store: Watched) -> None:
    keeper = Keeper()
    with Checkpointer(store, security=policy_of(keeper, wrap="direct")) as checkpointer:
        checkpointer.save(1, state_of(1)).result()
        paths = sorted(key.rpartition("/")[2] for key in store.written if key.endswith(".floe"))
        assert sorted(context.path or "" for context in keeper.wraps) == paths
        checkpointer.restore(template())
        assert sorted(context.path or "" for context in keeper.unwraps) == paths


def test_a_save_that_fails_before_it_is_written_asks_nobody(store: Watched) -> None:
    keeper = Keeper()
    with Checkpointer(store, security=policy_of(keeper)) as checkpointer:
        with pytest.raises(StrongroomError):
            checkpointer.save(1, {"w": print})
        checkpointer.save(2, state_of(2)).result()
    assert [context.step for context in keeper.wraps] == [2]


# How long training waits for them


def test_a_save_returns_while_the_keeper_has_not_answered() -> None:
    """It is asked beside the writing and not after it; the keyring and the commit alone wait for it."""
    gate, asked, written = threading.Event(), threading.Event(), threading.Event()

    def answer() -> None:
        asked.set()
        assert gate.wait(60)

    class Waiting(MemoryStore):
        def open_writer(self, key: str, *, length_bytes: int) -> Any:
            assert asked.wait(60), "the keeper was not asked before the first file was written"
            if key.endswith("MANIFEST.json"):
                written.set()
            return super().open_writer(key, length_bytes=length_bytes)

    keeper, store = Keeper(does=answer), Watched(Waiting())
    with Checkpointer(store, security=policy_of(keeper), when_busy="skip") as checkpointer:
        handle = checkpointer.save(1, state_of(1))
        assert written.wait(60)
        assert not any(key.endswith("COMMIT") or "keyring" in key for key in store.written)
        assert checkpointer.save(2, state_of(2)).skipped is not None
        gate.set()
        assert handle.result(60).step == 1
    assert len(keeper.wraps) == 1


def test_a_slow_keeper_does_not_lengthen_the_stall(store: Watched) -> None:
    keeper = Keeper()
    state = {"w": torch.randn(200_000)}
    with Checkpointer(store, security=policy_of(keeper)) as checkpointer:

        def stalls(count: int, first: int) -> float:
            seconds = []
            for step in range(first, first + count):
                began = time.perf_counter()
                checkpointer.save(step, state)
                seconds.append(time.perf_counter() - began)
                checkpointer.wait()
            return statistics.median(seconds)

        stalls(2, 0)
        fast = stalls(7, 10)
        delay_s = 0.1 + 40 * fast
        keeper.does = lambda: time.sleep(delay_s)
        slow = stalls(3, 20)
    assert slow < delay_s / 4, (fast, slow, delay_s)


# What happens where one does not do what it is asked for


def refuse() -> None:
    raise NoKeyError("keeper:one refuses: the role may not encrypt")


def be_out_of_reach() -> None:
    raise KeyServiceError("keeper:one cannot be reached: connection refused")


def break_down() -> None:
    raise RuntimeError("something that nobody thought of")


FAILURES: dict[str, tuple[Callable[[], None], str]] = {
    "denied": (refuse, "the role may not encrypt"),
    "out of reach": (be_out_of_reach, "connection refused"),
    "broken": (break_down, "keeper:one failed with RuntimeError"),
}


@pytest.mark.parametrize("wrap", ("checkpoint", "direct"))
@pytest.mark.parametrize("failure", FAILURES)
def test_a_save_whose_key_nobody_wraps_fails_and_says_so_and_the_next_one_works(
    failure: str, wrap: str, store: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    does, words = FAILURES[failure]
    keeper, other = Keeper("one"), Keeper("two")
    listener = Listener()
    weights = torch.randn(5000)
    needles = Needles({"weights": raw(weights), "text": b"a text that can be told"})
    state = {"w": weights, "extra": {"note": "a text that can be told"}}
    policy = policy_of(other, keeper, wrap=wrap)
    with Checkpointer(store, security=policy, events=[listener]) as checkpointer:
        checkpointer.save(1, state).result()
        before = store.inner.contents()
        keeper.does = does
        handle = checkpointer.save(2, state)
        with pytest.raises(SaveError, match=words) as caught:
            handle.result(60)
        assert "step 2" in str(caught.value)
        assert "It was not committed; step 1 is untouched" in str(caught.value)
        assert [event.step for event in listener.heard if isinstance(event, SaveFailed)] == [2]
        assert store.inner.contents() == before  # nothing is left of it
        assert [checkpoint.step for checkpoint in checkpointer.checkpoints()] == [1]
        keeper.does = lambda: None
        assert checkpointer.save(3, state).result().step == 3
        restored = checkpointer.restore()
        assert restored is not None
        assert torch.equal(restored.state["w"], weights)
    for key, data in store.written.items():
        assert needles.found_in(bytes(data)) == [], key
    assert "COMMIT" not in {key.rpartition("/")[2] for key in store.written if "step-000000000002" in key}
    assert sum("SaveFailed" in record.getMessage() for record in caplog.records) == 1


def test_a_save_that_failed_is_raised_at_the_next_call(store: Watched) -> None:
    keeper = Keeper(does=be_out_of_reach)
    for call in (
        lambda checkpointer: checkpointer.wait(),
        lambda checkpointer: checkpointer.close(),
        lambda checkpointer: checkpointer.save(9, state_of(9)),
    ):
        checkpointer = Checkpointer(store, security=policy_of(keeper))
        checkpointer.save(1, state_of(1))
        with pytest.raises(SaveError, match="connection refused") as caught:
            call(checkpointer)
        assert isinstance(caught.value.__cause__, KeyServiceError)
    assert commits(store) == []


def test_an_outage_is_tolerated_for_as_long_as_the_run_allows(store: Watched) -> None:
    keeper = Keeper()
    with Checkpointer(store, security=policy_of(keeper), on_failure=Tolerate(consecutive=2)) as checkpointer:
        for step in range(1, 8):
            keeper.does = be_out_of_reach if step in (2, 3, 5) else lambda: None
            checkpointer.save(step, state_of(step))
            checkpointer.wait()
        assert [checkpoint.step for checkpoint in checkpointer.checkpoints()] == [7, 6, 4, 1]


def test_an_outage_that_ends_before_the_files_are_written_fails_nothing(store: Watched) -> None:
    """A long save may outlive it: who was out of reach at its beginning is asked again at its end."""
    keeper = Keeper()

    def be_out_of_reach_once() -> None:
        keeper.does = lambda: None
        be_out_of_reach()

    keeper.does = be_out_of_reach_once
    with Checkpointer(store, security=policy_of(keeper)) as checkpointer:
        assert checkpointer.save(1, state_of(1)).result(60).step == 1
    assert len(keeper.wraps) == 2


def test_a_keeper_that_never_answers_fails_the_save_by_its_deadline(
    store: Watched, gates: list[threading.Event]
) -> None:
    keeper, other = Keeper("one"), Keeper("two")
    with Checkpointer(store, security=policy_of(keeper, other, timeout_s=0.2), timeout_s=1.0) as checkpointer:
        gates.append(keeper.hang())
        handle = checkpointer.save(1, state_of(1))
        with pytest.raises(SaveError, match="keeper:one did not answer in time"):
            handle.result(60)
        keeper.does = lambda: None
        assert checkpointer.save(2, state_of(2)).result(60).step == 2
        assert [checkpoint.step for checkpoint in checkpointer.checkpoints()] == [2]
    assert not any("COMMIT" in key for key in store.written if "step-000000000001" in key)


class Rubbish(Keeper):
    """Wraps to something that no keyring may hold."""

    answer = b""

    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        return self.answer


@pytest.mark.parametrize("answer", (b"", b"x" * 10_000))
def test_a_keeper_that_wraps_to_rubbish_fails_the_save(answer: bytes, store: Watched) -> None:
    keeper = Rubbish()
    keeper.answer = answer
    with Checkpointer(store, security=policy_of(keeper)) as checkpointer:
        handle = checkpointer.save(1, state_of(1))
        with pytest.raises(SaveError, match="a key wrapped by keeper:one has") as caught:
            handle.result(60)
        assert isinstance(caught.value.__cause__, FormatError)
    assert commits(store) == []


def test_a_run_is_not_restored_unsealed_for_lack_of_a_key(store: Watched) -> None:
    """Nor is it begun anew: that the keeper is gone says nothing of what is stored."""
    keeper = Keeper()
    with Checkpointer(store, security=policy_of(keeper)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step)).result()
    for does, kind, words in (
        (refuse, NoKeyError, "no key here opens step 2.*keeper:one refuses"),
        (be_out_of_reach, KeyServiceError, "the keys of step 2.*are out of reach.*connection refused"),
        (break_down, KeyServiceError, "keeper:one failed with RuntimeError"),
    ):
        keeper.does = does
        listener = Listener()
        checkpointer = Checkpointer(store, security=policy_of(keeper), events=[listener])
        for step in (None, 2):
            state = template()
            with pytest.raises(kind, match=words) as caught:
                checkpointer.restore(state, step=step)
            assert not isinstance(caught.value, IntegrityError)
            assert (state["w"] == 7).all()
        with pytest.raises(kind):
            checkpointer.plan_restore(template())
        assert not any(isinstance(event, CheckpointSkipped) for event in listener.heard)
        keeper.does = lambda: None
        restored = checkpointer.restore(template())
        assert restored is not None
        assert (restored.step, restored.skipped) == (2, ())


def test_a_keeper_that_hangs_ends_a_restore_in_time(store: Watched, gates: list[threading.Event]) -> None:
    keeper = Keeper()
    with Checkpointer(store, security=policy_of(keeper, timeout_s=0.2)) as checkpointer:
        checkpointer.save(1, state_of(1)).result()
        gates.append(keeper.hang())
        with pytest.raises(KeyServiceError, match="keeper:one did not answer in time"):
            checkpointer.restore(template())


def test_a_newest_checkpoint_that_is_denied_is_not_passed_over_for_an_older_one_that_is_not(
    store: Watched,
) -> None:
    class Choosy(Keeper):
        def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
            if context.step == 2:
                refuse()
            return super().unwrap(wrapped, context, within_s=within_s)

    with Checkpointer(store, security=policy_of(Choosy())) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step)).result()
        with pytest.raises(NoKeyError, match="no key here opens step 2"):
            checkpointer.restore(template())
        restored = checkpointer.restore(template(), step=1)
        assert restored is not None
        assert restored.step == 1


def test_another_identity_opens_where_the_first_cannot(store: Watched) -> None:
    keeper, glass = Keeper("one"), Keeper("glass")
    with Checkpointer(store, security=policy_of(keeper, glass)) as checkpointer:
        checkpointer.save(1, state_of(1)).result()
    for does in (refuse, be_out_of_reach):
        keeper.does = does
        security = SecurityPolicy(seal=Seal(recipients=[keeper], identities=[glass]))
        restored = Checkpointer(store, security=security).restore(template())
        assert restored is not None
        assert restored.step == 1
    assert len(glass.unwraps) == 2


# What is let out


class Keys:
    """Every key that there ever was in this process: what `Secret` was made of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: set[bytes] = set()
        made = Secret.__init__

        def init(secret: Secret, data: Any) -> None:
            made(secret, data)
            self.seen.add(secret.reveal())

        monkeypatch.setattr(Secret, "__init__", init)

    def forms(self) -> dict[bytes, str]:
        """Parts of each key, in every form that bytes are printed in."""
        forms: dict[bytes, str] = {}
        for key in tuple(self.seen):
            for start in range(0, len(key) - 11, 4):
                part = key[start : start + 12]
                if len(set(part)) < 6:
                    continue  # of a key that a test made up: most of it are zeros
                forms[part] = "raw"
                forms[part.hex().encode()] = forms[part.hex().upper().encode()] = "hexadecimal"
                # Whatever stands before it in what is encoded, these digits are within.
                for shift in range(3):
                    text = base64.b64encode(bytes(shift) + part)[4:-4]
                    forms[text] = forms[text.translate(bytes.maketrans(b"+/", b"-_"))] = "base64"
                forms[repr(part)[2:-1].encode()] = "a representation"
                forms[json.dumps(list(part))[1:-1].encode()] = "numbers"
        return forms

    def found_in(self, *texts: str | bytes) -> set[str]:
        """The forms in which some key stands in one of these."""
        data = b"\n".join(
            text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass") for text in texts
        )
        return {form for part, form in self.forms().items() if part in data}


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Keys:
    return Keys(monkeypatch)


def test_the_search_for_keys_finds_them(keys: Keys) -> None:
    data = Secret.draw().reveal()
    for text in (
        data,
        data.hex(),
        data.hex().upper(),
        base64.b64encode(b"ab" + data).decode(),
        base64.urlsafe_b64encode(b"abc" + data).decode(),
        repr(data),
        json.dumps(list(data)),
        f"x{data[3:27].hex()}y",
    ):
        assert keys.found_in(text)
    assert not keys.found_in(Secret.draw(8).reveal() * 4)


class Leaky(Keeper):
    """Whose author put the key into its errors."""

    leaks = False

    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        if self.leaks:
            raise ValueError(f"cannot wrap {key.reveal().hex()} ({key.reveal()!r})")
        return super().wrap(key, context, within_s=within_s)


def test_no_key_is_logged_told_shown_or_pickled(
    keys: Keys, store: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    """Over saves and restores that work and that fail, in all that the process says of them."""
    caplog.set_level(logging.DEBUG)
    keeper = Leaky()
    listener = Listener()
    said: list[Any] = []
    errors: list[BaseException] = []

    def failing(call: Callable[[], Any]) -> None:
        with pytest.raises(StrongroomError) as caught:
            call()
        errors.append(caught.value)

    policy = policy_of(keeper)
    checkpointer = Checkpointer(store, security=policy, events=[listener], on_failure=Tolerate(consecutive=9))
    state = {"w": torch.randn(600_000), "extra": {"epoch": 1}}
    for step in (1, 2, 3):
        said.append(checkpointer.save(step, state))
        said.append(said[-1].result(60))
    keeper.leaks = True
    handle = checkpointer.save(4, state)
    failing(lambda: handle.result(60))
    keeper.leaks = False
    said += [checkpointer.plan_restore(), checkpointer.restore(), checkpointer.checkpoints()]
    contents = store.inner.contents()
    for key, data in contents.items():
        if "step-000000000003" in key and ("keyring" in key or is_shard(key)):
            middle = len(data) // 2
            store.inner.plant({key: data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]})
            failing(lambda: checkpointer.restore(step=3))
            said.append(checkpointer.restore())
            said.append(verify(store, everything=True, guard=Guard(sealing=sealing_of(policy))))
            store.inner.plant({key: data})
    keeper.does = refuse
    failing(checkpointer.restore)
    keeper.does = break_down
    failing(checkpointer.restore)

    assert len(keys.seen) > 30
    assert "CheckpointCommitted" in caplog.text
    assert "CheckpointSkipped" in caplog.text
    assert len(errors) == 5
    texts = [caplog.text, *(repr(vars(record)) for record in caplog.records), repr(listener.heard)]
    texts += [repr(item) for item in said]
    for error in errors:
        # With the variables of every frame, as some reporters of errors collect them.
        told = traceback.TracebackException.from_exception(error, capture_locals=True)
        texts += [str(error), *told.format(chain=True)]
    assert not keys.found_in(*texts)


@pytest.fixture
def only_new_objects() -> Iterator[None]:
    """What is alive already is no longer listed."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("only_new_objects")
def test_no_object_of_a_save_or_restore_under_way_shows_or_pickles_a_key(keys: Keys) -> None:
    """Every object of ours that is alive while a save is being written and while a restore reads."""
    gate, reached = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert gate.wait(60)

    class Holding(MemoryStore):
        is_holding = False

        def open_reader(self, key: str) -> Any:
            if self.is_holding and is_shard(key):
                hold()
            return super().open_reader(key)

    holding = Holding()
    keeper = Keeper(does=hold)
    with Checkpointer(holding, security=policy_of(keeper)) as checkpointer:
        handle = checkpointer.save(1, state_of(1))
        assert reached.wait(60)
        check_objects(keys, {"_SaveSeal", "CheckpointKey", "Attempt", "Checkpointer"})
        gate.set()
        handle.result(60)
        keeper.does = lambda: None
        holding.is_holding = True
        gate.clear()
        reached.clear()
        reading = threading.Thread(target=checkpointer.restore)
        reading.start()
        assert reached.wait(60)
        check_objects(keys, {"_Unlocked", "FloeOpener", "OpenedCheckpoint", "Checkpointer"})
        gate.set()
        reading.join(60)


def check_objects(keys: Keys, wanted: set[str]) -> None:
    seen: dict[str, list[str | bytes]] = {}
    for item in gc.get_objects():
        if not type(item).__module__.startswith("strongroom"):
            continue
        texts = seen.setdefault(type(item).__name__, [])
        for show in (repr, str, pickle.dumps):
            try:
                texts.append(show(item))
            except Exception as error:  # noqa: BLE001 - to refuse is right, in any words that show nothing
                texts.append(str(error))
    assert wanted <= seen.keys()
    assert not keys.found_in(*(text for texts in seen.values() for text in texts))


# Forks and threads


def drawn_keys(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    drawn: list[bytes] = []
    draw = Secret.draw.__func__  # type: ignore[attr-defined]

    def drawing(cls: type[Secret], *size: int) -> Secret:
        secret: Secret = draw(cls, *size)
        drawn.append(secret.reveal())
        return secret

    monkeypatch.setattr(Secret, "draw", classmethod(drawing))
    return drawn


def test_a_fork_that_builds_its_own_checkpointer_seals_with_other_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = file_policy(tmp_path)
    drawn = drawn_keys(monkeypatch)
    mine = Checkpointer(tmp_path / "parent", security=policy)
    mine.save(1, state_of(1)).result()
    before = len(drawn)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a process with threads forks: that is meant
        child = os.fork()
    if child == 0:
        status = 1
        try:
            with Checkpointer(tmp_path / "child", security=policy) as own:
                own.save(1, state_of(1)).result(60)
                assert own.restore(template()) is not None
            os.write(writing, b"".join(drawn[before:]))
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    mine.save(2, state_of(2)).result()
    mine.close()
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    theirs = [told[start : start + 32] for start in range(0, len(told), 32)]
    assert len(theirs) == len(drawn[before:]) == 5  # four files, and the checkpoint's own
    assert len({*theirs, *drawn}) == len(theirs) + len(drawn)
    for name in ("parent", "child"):
        restored = Checkpointer(tmp_path / name, security=policy).restore(template())
        assert restored is not None


def test_threads_that_save_at_once_use_no_key_and_no_header_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = file_policy(tmp_path)
    drawn = drawn_keys(monkeypatch)
    problems: list[BaseException] = []

    def train(number: int) -> None:
        try:
            with Checkpointer(tmp_path / f"run{number}", security=policy) as checkpointer:
                for step in range(5):
                    checkpointer.save(step, state_of(number))
        except BaseException as error:  # noqa: BLE001 - told to the test
            problems.append(error)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []
    headers = [
        record.header
        for number in range(4)
        for step in range(5)
        for record in Root(tmp_path / f"run{number}").manifest(step).files
    ]
    assert len(set(headers)) == len(headers) == 4 * 5 * 4
    assert len(set(drawn)) == len(drawn) == 4 * 5 * 5
