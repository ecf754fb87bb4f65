"""A save asks each recipient once; a restore tells damage from what may pass, and opens with any one key."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FILES, NAME, RUN, Keeper, contents, save, write_files

from strongroom import canonical, layout
from strongroom.digest import sha256_of
from strongroom.errors import (
    AccessDeniedError,
    ClosedError,
    ConfigError,
    FormatError,
    IntegrityError,
    KeyServiceError,
    NoKeyError,
    SaveError,
    StoreUnavailableError,
    StrongroomError,
    UnsealedError,
    UnsupportedFormatError,
)
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit, Manifest
from strongroom.sealing import Sealing
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom_security.envelope import CheckpointKey, HandedOver, HandOverKey, hand_over
from strongroom_security.fields import Context
from strongroom_security.keyring import Keyring, RecipientEntry, WrappedKey, write_generation
from strongroom_security.recipients.base import Identity
from strongroom_security.recipients.file import create_key_file
from strongroom_security.recipients.hpke import HpkeSuite, create_key_pair, read_key
from strongroom_security.sealing import EnvelopeSealing
from strongroom_security.secret import Secret

CONTEXT = Context.of(RUN, NAME)
PATHS = sorted(path + layout.SEALED for path in FILES)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def gates() -> Iterator[list[threading.Event]]:
    """Opened at the end, so that no thread is left behind waiting."""
    gates: list[threading.Event] = []
    yield gates
    for gate in gates:
        gate.set()


def keyring_of(store: MemoryStore, generation: int = 1, name: CheckpointName = NAME) -> Keyring:
    data = store.read(layout.keyring_key(name, generation), limit_bytes=2**28)
    return Keyring.decode(data, "it")


def denied() -> None:
    raise NoKeyError("keeper:one refuses")


def out_of_reach() -> None:
    raise KeyServiceError("keeper:one does not answer")


# Any one key opens


def test_it_fills_the_seam() -> None:
    assert isinstance(EnvelopeSealing([Keeper()]), Sealing)


def test_each_recipient_alone_opens(store: MemoryStore, tmp_path: Path) -> None:
    suites: tuple[HpkeSuite, ...] = ("x25519", "p256", "mlkem768-x25519")
    keys = [
        create_key_file(tmp_path / "kek.key"),
        *(create_key_pair(tmp_path / suite, suite) for suite in suites),
    ]
    commit, manifest = save(store, EnvelopeSealing([*keys, Keeper()]))
    for key in (*keys, Keeper()):
        unlocked = EnvelopeSealing([], [key]).unlock(store, commit, manifest)
        assert unlocked.keyring == 1
        assert contents(store, unlocked, manifest) == dict(FILES)


def test_a_writer_with_public_keys_alone_seals_and_cannot_open(store: MemoryStore, tmp_path: Path) -> None:
    create_key_pair(tmp_path / "breakglass")
    writer = EnvelopeSealing([read_key(tmp_path / "breakglass.pub")])
    commit, manifest = save(store, writer)
    with pytest.raises(NoKeyError, match="names nobody who can open"):
        writer.unlock(store, commit, manifest)
    private = read_key(tmp_path / "breakglass.key")
    assert isinstance(private, Identity)
    reader = EnvelopeSealing([read_key(tmp_path / "breakglass.pub")], [private])
    assert contents(store, reader.unlock(store, commit, manifest), manifest) == dict(FILES)


def test_a_recipient_that_can_open_need_not_be_named_as_an_identity_too(store: MemoryStore) -> None:
    keeper = Keeper()
    sealing = EnvelopeSealing([keeper], [keeper])
    commit, manifest = save(store, sealing)
    sealing.unlock(store, commit, manifest)
    assert len(keeper.unwraps) == 1
    assert "identities=['keeper:one']" in repr(sealing)


def test_a_policy_without_recipients_restores_and_never_saves(store: MemoryStore) -> None:
    with pytest.raises(ConfigError, match="can restore and not save"):
        EnvelopeSealing([], [Keeper()]).seal_save(RUN, NAME, None)


@pytest.mark.parametrize(
    ("make", "words"),
    (
        (lambda: EnvelopeSealing([]), "none is named"),
        (lambda: EnvelopeSealing([Keeper(), Keeper()]), "name it once"),
        (lambda: EnvelopeSealing([Keeper()], wrap="both"), "wrap must be"),  # type: ignore[arg-type]
        (lambda: EnvelopeSealing([Keeper()], within_s=0), "within_s"),
        (lambda: EnvelopeSealing([Keeper()], within_s=float("nan")), "within_s"),
    ),
    ids=("nobody", "twice", "wrap", "no time", "no number"),
)
def test_what_cannot_work_is_refused_at_once(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_an_id_that_no_keyring_may_hold_is_refused_at_once() -> None:
    keeper = Keeper()
    keeper.id = "arn:aws:kms:eu-central-1:123456789012:key/abc"
    with pytest.raises(FormatError, match="is not a recipient's id"):
        EnvelopeSealing([keeper])


# A save


def test_every_file_has_a_key_of_its_own(store: MemoryStore) -> None:
    sealing = EnvelopeSealing([Keeper()])
    keys: set[bytes] = set()
    for step in range(3):
        seal = sealing.seal_save(RUN, replace(NAME, step=step), None)
        one_off = HandOverKey.draw()
        for path in PATHS:
            seal.sealer(path)
        found = one_off.open(seal.hand_over(one_off.public), Context.of(RUN, replace(NAME, step=step)))
        assert found is not None
        keys |= {key.reveal() for key in found.keys.values()}
    assert len(keys) == 3 * len(PATHS)


def test_a_file_has_one_sealer() -> None:
    seal = EnvelopeSealing([Keeper()]).seal_save(RUN, NAME, None)
    seal.sealer(PATHS[0])
    with pytest.raises(SaveError, match="has a sealer already"):
        seal.sealer(PATHS[0])


def test_a_path_that_climbs_is_refused() -> None:
    seal = EnvelopeSealing([Keeper()]).seal_save(RUN, NAME, None)
    with pytest.raises(FormatError):
        seal.sealer("../escape")


def test_sealers_are_taken_from_many_threads_at_once(store: MemoryStore) -> None:
    sealing = EnvelopeSealing([Keeper()])
    seal = sealing.seal_save(RUN, NAME, None)
    paths = [f"{rank:05d}-00.safetensors.floe" for rank in range(400)]
    seen: list[bytes] = []
    lost: list[str] = []

    def take(part: list[str]) -> None:
        for path in part:
            try:
                seen.append(seal.sealer(path).header)
            except SaveError:
                lost.append(path)

    # Each path twice, from two threads: one of them gets it.
    threads = [threading.Thread(target=take, args=(paths[start % 4 :: 4],)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(seen)) == len(seen) == len(paths)
    assert sorted(lost) == paths
    assert [key.path for key in Keyring.decode(seal.keyring(paths, within_s=20), "it").keys] == paths


def test_a_recipient_is_called_once_a_save_while_files_are_still_being_written(
    store: MemoryStore, gates: list[threading.Event]
) -> None:
    keeper, other = Keeper("one"), Keeper("two")
    gate = threading.Event()
    keeper.does = lambda: gate.wait(30) and None
    gates.append(gate)
    seal = EnvelopeSealing([keeper, other]).seal_save(RUN, NAME, None)
    seal.begin_wrapping()  # returns although nobody answers
    seal.begin_wrapping()
    records = write_files(store, seal)
    gate.set()
    data = seal.keyring([record.path for record in records], within_s=20)
    assert keeper.wraps == other.wraps == [CONTEXT]
    assert [entry.id for entry in Keyring.decode(data, "it").recipients] == sorted([keeper.id, other.id])


def test_wrapping_that_was_not_begun_begins_when_the_keyring_is_asked_for() -> None:
    keeper = Keeper()
    seal = EnvelopeSealing([keeper]).seal_save(RUN, NAME, None)
    seal.sealer(PATHS[0])
    assert seal.keyring(PATHS[:1], within_s=20)
    assert keeper.wraps == [CONTEXT]


def test_a_keyring_holds_the_keys_of_the_files_that_count_and_of_no_other() -> None:
    seal = EnvelopeSealing([Keeper()], clock=lambda: 1_700_000_000.5).seal_save(RUN, NAME, None)
    for path in PATHS:
        seal.sealer(path)
    keyring = Keyring.decode(seal.keyring(PATHS[1:], within_s=20), "it")
    assert [key.path for key in keyring.keys] == PATHS[1:]
    assert (keyring.run, keyring.name, keyring.generation) == (RUN, NAME, 1)
    assert keyring.created_at_ms == 1_700_000_000_500


def test_a_key_that_was_never_handed_over_fails_the_save() -> None:
    seal = EnvelopeSealing([Keeper()]).seal_save(RUN, NAME, None)
    seal.sealer(PATHS[0])
    with pytest.raises(SaveError, match=rf"the key of {PATHS[1]} was never handed over.*2 of 3 keys"):
        seal.keyring(PATHS[:3], within_s=20)


@pytest.mark.parametrize("wrap", ("checkpoint", "direct"))
def test_a_recipient_that_does_not_answer_fails_the_save_in_time_and_by_name(
    wrap: Any, gates: list[threading.Event]
) -> None:
    slow = Keeper("slow")
    gates.append(slow.hang())
    seal = EnvelopeSealing([Keeper(), slow], wrap=wrap).seal_save(RUN, NAME, None)
    seal.sealer(PATHS[0])
    began = time.monotonic()
    with pytest.raises(KeyServiceError, match="keeper:slow did not answer in time") as caught:
        seal.keyring(PATHS[:1], within_s=0.3)
    assert time.monotonic() - began < 10
    assert "keeper:one" not in str(caught.value)


@pytest.mark.parametrize("wrap", ("checkpoint", "direct"))
def test_a_recipient_that_refuses_fails_the_save_at_once(wrap: Any, gates: list[threading.Event]) -> None:
    slow = Keeper("slow")
    gates.append(slow.hang())
    seal = EnvelopeSealing([Keeper(does=denied), slow], wrap=wrap).seal_save(RUN, NAME, None)
    seal.sealer(PATHS[0])
    began = time.monotonic()
    with pytest.raises(NoKeyError, match="keeper:one refuses"):
        seal.keyring(PATHS[:1], within_s=25)
    assert time.monotonic() - began < 20


def test_a_recipient_that_was_out_of_reach_when_the_save_began_is_asked_again_at_its_end() -> None:
    keeper, other = Keeper("one", does=out_of_reach), Keeper("two")
    seal = EnvelopeSealing([keeper, other]).seal_save(RUN, NAME, None)
    seal.sealer(PATHS[0])
    seal.begin_wrapping()
    while not all(call.future.done() for call in seal._wraps):
        time.sleep(0.01)
    with pytest.raises(KeyServiceError):
        seal.keyring(PATHS[:1], within_s=20)
    keeper.does = lambda: None
    assert seal.keyring(PATHS[:1], within_s=20)
    assert len(keeper.wraps) == 3
    assert len(other.wraps) == 1


def test_a_recipient_that_refused_is_not_asked_again() -> None:
    keeper = Keeper(does=denied)
    seal = EnvelopeSealing([keeper]).seal_save(RUN, NAME, None)
    for _ in range(3):
        with pytest.raises(NoKeyError):
            seal.keyring([], within_s=20)
    assert len(keeper.wraps) == 1


def test_an_error_that_names_nobody_gets_the_recipient_s_name() -> None:
    def fails() -> None:
        raise KeyServiceError("over quota")

    seal = EnvelopeSealing([Keeper(does=fails)]).seal_save(RUN, NAME, None)
    with pytest.raises(KeyServiceError, match=r"^keeper:one: over quota$"):
        seal.keyring([], within_s=20)


def test_an_error_that_nobody_foresaw_is_told_and_its_text_is_not() -> None:
    def fails() -> None:
        raise ValueError("the key is deadbeef")

    keeper = Keeper(does=fails)
    seal = EnvelopeSealing([keeper]).seal_save(RUN, NAME, None)
    with pytest.raises(KeyServiceError, match="keeper:one failed with ValueError") as caught:
        seal.keyring([], within_s=20)
    assert "deadbeef" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


class _UntoldError(NoKeyError):
    def __str__(self) -> str:
        raise SystemExit("deadbeef")


class _ChattyError(NoKeyError):
    """Its text is fine, and it carries more than that."""

    def __init__(self, key: bytes) -> None:
        super().__init__("keeper:one refuses")
        self.key = key


@pytest.mark.parametrize("does", ("wrap", "unwrap"))
@pytest.mark.parametrize("error", (SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError, _UntoldError))
def test_whatever_a_keeper_raises_is_its_own_failure_at_once(
    store: MemoryStore, does: str, error: type[BaseException]
) -> None:
    def raises() -> None:
        raise error("deadbeef")

    keeper = Keeper()
    sealing = EnvelopeSealing([keeper])
    commit, manifest = save(store, sealing)
    seal = sealing.seal_save(RUN, NAME, None)
    keeper.does = raises
    began = time.monotonic()
    with pytest.raises(KeyServiceError, match=f"keeper:one failed with {error.__name__}") as caught:
        seal.keyring([], within_s=25) if does == "wrap" else sealing.unlock(store, commit, manifest)
    assert time.monotonic() - began < 20
    assert "deadbeef" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_an_error_of_a_keeper_brings_neither_its_class_nor_its_frames_along() -> None:
    def refuses(key: Secret, context: Context, *, within_s: float) -> bytes:
        plain = key.reveal()
        raise _ChattyError(plain)

    keeper = Keeper()
    keeper.wrap = refuses  # type: ignore[method-assign]
    seal = EnvelopeSealing([keeper]).seal_save(RUN, NAME, None)
    with pytest.raises(NoKeyError, match=r"^keeper:one refuses$") as caught:
        seal.keyring([], within_s=20)
    assert type(caught.value) is NoKeyError
    assert "refuses" not in [entry.name for entry in caught.traceback]


@pytest.mark.parametrize("answer", (None, "text", 7, bytearray(60)))
def test_a_recipient_that_wraps_to_no_bytes_fails_the_save_by_name(answer: Any) -> None:
    keeper = Keeper()
    keeper.wrap = lambda key, context, *, within_s: answer  # type: ignore[method-assign]
    seal = EnvelopeSealing([keeper]).seal_save(RUN, NAME, None)
    with pytest.raises(KeyServiceError, match=f"keeper:one wrapped a key to {type(answer).__name__}"):
        seal.keyring([], within_s=20)


@pytest.mark.parametrize("wrap", ("checkpoint", "direct"))
def test_a_recipient_has_its_own_time_and_not_the_whole_of_the_save_s(
    wrap: Any, gates: list[threading.Event]
) -> None:
    slow = Keeper("slow")
    gates.append(slow.hang())
    seal = EnvelopeSealing([Keeper(), slow], wrap=wrap, within_s=0.2).seal_save(RUN, NAME, None)
    seal.sealer(PATHS[0])
    began = time.monotonic()
    with pytest.raises(KeyServiceError, match=r"^keeper:slow did not answer in time"):
        seal.keyring(PATHS[:1], within_s=28)
    assert time.monotonic() - began < 15


def test_directly_a_recipient_has_its_time_anew_for_each_file(gates: list[threading.Event]) -> None:
    keeper = Keeper()
    keeper.does = lambda: time.sleep(0.5)
    seal = EnvelopeSealing([keeper], wrap="direct", within_s=0.6).seal_save(RUN, NAME, None)
    for path in PATHS:
        seal.sealer(path)
    assert seal.keyring(PATHS, within_s=28)  # 2 s in all, and 1.6 are given for one


def test_a_recipient_that_hung_when_the_save_began_is_asked_again_at_its_end(
    gates: list[threading.Event],
) -> None:
    keeper = Keeper()
    gates.append(keeper.hang())
    seal = EnvelopeSealing([keeper], within_s=0.1).seal_save(RUN, NAME, None)
    seal.sealer(PATHS[0])
    seal.begin_wrapping()
    while not seal._wraps[0].was_out_of_reach:
        time.sleep(0.01)
    keeper.does = lambda: None
    assert seal.keyring(PATHS[:1], within_s=20)


def test_a_recipient_for_whom_no_thread_starts_fails_the_save_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    seal = EnvelopeSealing([Keeper()]).seal_save(RUN, NAME, None)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyServiceError, match="keeper:one could not be asked: can't start new thread"):
            seal.keyring([], within_s=20)
    assert seal.keyring([], within_s=20)


def test_a_recipient_that_wraps_to_nothing_fails_the_save() -> None:
    keeper = Keeper()
    keeper.wrap = lambda key, context, *, within_s: b""  # type: ignore[method-assign]
    seal = EnvelopeSealing([keeper]).seal_save(RUN, NAME, None)
    with pytest.raises(FormatError, match="wrapped by keeper:one has 0 bytes"):
        seal.keyring([], within_s=20)


def test_the_keys_are_gone_once_the_keyring_is_made() -> None:
    seal = EnvelopeSealing([Keeper()]).seal_save(RUN, NAME, None)
    seal.sealer(PATHS[0])
    seal.keyring(PATHS[:1], within_s=20)
    with pytest.raises(SaveError, match="was made already"):
        seal.keyring(PATHS[:1], within_s=20)
    with pytest.raises(ClosedError):
        seal.hand_over(HandOverKey.draw().public)
    assert seal._checkpoint_key is not None
    with pytest.raises(ClosedError):
        seal._checkpoint_key.secret.reveal()


@pytest.mark.parametrize("made", (False, True), ids=("failed", "made"))
def test_the_keys_of_a_save_are_wiped_when_it_ends_well_or_not(made: bool) -> None:
    sealing = EnvelopeSealing([Keeper()])
    one_off, other = sealing.one_off(), sealing.seal_save(RUN, NAME, None)
    seal = sealing.seal_save(RUN, NAME, one_off)
    seal.sealer(PATHS[0])
    other.sealer(PATHS[1])
    handed = other.hand_over(one_off.public)
    seal.take_over(handed)
    seal.begin_wrapping()
    if made:
        seal.keyring(PATHS[:2], within_s=20)
    for each in (seal, seal, other):
        each.discard()
    keys = [*seal._keys.values(), *other._keys.values()]
    assert len(keys) == 3
    assert seal._checkpoint_key is not None
    for key in (*keys, seal._checkpoint_key.secret):
        with pytest.raises(ClosedError):
            key.reveal()
    calls: tuple[Callable[[], object], ...] = (
        lambda: seal.sealer(PATHS[2]),
        lambda: seal.hand_over(one_off.public),
        lambda: seal.take_over(handed),
        lambda: seal.keyring(PATHS[:1], within_s=20),
        seal.begin_wrapping,
    )
    for call in calls:
        with pytest.raises(SaveError, match="its keys are gone"):
            call()


# Several ranks


def test_the_coordinator_s_keyring_has_every_rank_s_keys(store: MemoryStore) -> None:
    sealing = EnvelopeSealing([Keeper()])
    one_off = sealing.one_off()
    coordinator = sealing.seal_save(RUN, NAME, one_off)
    records = write_files(store, coordinator, files={"00000-00.safetensors": b"rank 0"})
    for rank in (1, 2, 3):
        other = sealing.seal_save(RUN, NAME, None)
        records += write_files(store, other, files={f"{rank:05d}-00.safetensors": b"rank %d" % rank})
        coordinator.take_over(other.hand_over(one_off.public))
    manifest = Manifest(
        run=RUN,
        name=NAME,
        parent=None,
        created_at_ms=0,
        algorithm="blake3",
        world_size=4,
        files=tuple(records),
    )
    keyring = coordinator.keyring([record.path for record in records], within_s=20)
    store.put(layout.keyring_key(NAME, 1), keyring)
    commit = Commit(
        run=RUN,
        name=NAME,
        manifest=sha256_of(b""),
        size_bytes=0,
        committed_at_ms=0,
        keyring=sha256_of(keyring),
    )
    unlocked = sealing.unlock(store, commit, manifest)
    assert contents(store, unlocked, manifest)["00003-00.safetensors"] == b"rank 3"


def test_keys_that_were_not_sealed_to_this_attempt_are_refused() -> None:
    sealing = EnvelopeSealing([Keeper()])
    one_off = sealing.one_off()
    coordinator = sealing.seal_save(RUN, NAME, one_off)
    for run, name, public in (
        ("run-7g", NAME, one_off.public),
        (RUN, replace(NAME, step=1), one_off.public),
        (RUN, replace(NAME, attempt="f" * 16), one_off.public),
        (RUN, NAME, sealing.one_off().public),
    ):
        other = sealing.seal_save(run, name, None)
        other.sealer(PATHS[0])
        with pytest.raises(SaveError, match="not sealed to this attempt"):
            coordinator.take_over(other.hand_over(public))
    for handed in (b"", b"x" * 200):
        with pytest.raises(SaveError, match="not sealed to this attempt"):
            coordinator.take_over(handed)


def test_two_ranks_that_wrote_one_file_fail_the_save() -> None:
    sealing = EnvelopeSealing([Keeper()])
    one_off = sealing.one_off()
    coordinator = sealing.seal_save(RUN, NAME, one_off)
    others = [sealing.seal_save(RUN, NAME, None) for _ in range(2)]
    for other in others:
        other.sealer(PATHS[0])
    coordinator.take_over(others[0].hand_over(one_off.public))
    coordinator.take_over(others[0].hand_over(one_off.public))  # the same again is no contradiction
    with pytest.raises(SaveError, match=f"different keys of {PATHS[0]}"):
        coordinator.take_over(others[1].hand_over(one_off.public))


def test_a_rank_that_asked_for_no_keys_takes_none() -> None:
    sealing = EnvelopeSealing([Keeper()])
    other = sealing.seal_save(RUN, NAME, None)
    with pytest.raises(SaveError, match="no one-off key"):
        other.take_over(b"anything")
    with pytest.raises(ConfigError, match="one_off"):
        sealing.seal_save(RUN, NAME, object())  # type: ignore[arg-type]


def test_a_rank_opens_the_files_that_it_was_handed_the_keys_of_and_no_other(store: MemoryStore) -> None:
    sealing = EnvelopeSealing([Keeper()])
    commit, manifest = save(store, sealing)
    unlocked = sealing.unlock(store, commit, manifest)
    one_off = sealing.one_off()
    rank = sealing.locked(manifest)
    assert rank.keyring == 0
    first, second, *_ = manifest.files
    with pytest.raises(NoKeyError, match=f"the key of {first.path}"):
        rank.opener(first)
    rank.take_over(one_off, unlocked.hand_over(one_off.public, [first.path]))
    assert rank.keyring == 1
    assert rank.opener(first).size_bytes == first.plain_bytes
    with pytest.raises(NoKeyError):
        rank.opener(second)
    rank.take_over(one_off, unlocked.hand_over(one_off.public, [second.path]))
    assert rank.opener(second).size_bytes == second.plain_bytes
    assert rank.opener(first).size_bytes == first.plain_bytes


def test_keys_that_were_handed_to_the_wrong_rank_are_no_damage(store: MemoryStore) -> None:
    sealing = EnvelopeSealing([Keeper()])
    commit, manifest = save(store, sealing)
    unlocked = sealing.unlock(store, commit, manifest)
    handed = unlocked.hand_over(sealing.one_off().public, PATHS)
    rank = sealing.locked(manifest)
    for wrong in (handed, b"", b"x" * 300):
        with pytest.raises(NoKeyError, match="not sealed to this rank"):
            rank.take_over(sealing.one_off(), wrong)
    with pytest.raises(NoKeyError, match=r"the key of absent\.floe"):
        unlocked.hand_over(sealing.one_off().public, ["absent.floe"])


def test_a_wrong_key_that_was_handed_over_is_refused_by_the_pinned_header(store: MemoryStore) -> None:
    sealing = EnvelopeSealing([Keeper()])
    _, manifest = save(store, sealing)
    one_off = sealing.one_off()
    rank = sealing.locked(manifest)
    wrong = HandedOver(generation=1, keys={PATHS[0]: Secret.draw()})
    rank.take_over(one_off, hand_over(one_off.public, wrong, CONTEXT))
    with pytest.raises(IntegrityError, match=f"{PATHS[0]} of step 1200"):
        rank.opener(manifest.files[0])


# A restore


def test_a_restore_calls_a_key_service_once_and_only_for_its_own_key(store: MemoryStore) -> None:
    keeper, other = Keeper("one"), Keeper("two")
    commit, manifest = save(store, EnvelopeSealing([keeper]))
    EnvelopeSealing([], [other, keeper]).unlock(store, commit, manifest)
    assert keeper.unwraps == [CONTEXT]
    assert other.unwraps == []


def test_identities_are_asked_in_the_policy_s_order_and_no_further_than_needed(store: MemoryStore) -> None:
    keepers = [Keeper(name) for name in ("one", "two", "three")]
    commit, manifest = save(store, EnvelopeSealing(keepers))
    keepers[1].does = denied
    EnvelopeSealing([], [keepers[1], keepers[2], keepers[0]]).unlock(store, commit, manifest)
    assert [len(keeper.unwraps) for keeper in keepers] == [0, 1, 1]


def test_who_cannot_open_is_told_who_could(store: MemoryStore) -> None:
    keeper, other = Keeper("one"), Keeper("two")
    commit, manifest = save(store, EnvelopeSealing([keeper]))
    with pytest.raises(NoKeyError, match=rf"keyring 1 of step 1200.*{keeper.id}.*keeper:two \({other.id}\)"):
        EnvelopeSealing([], [other]).unlock(store, commit, manifest)


@pytest.mark.parametrize(
    ("does", "kind"), ((denied, NoKeyError), (out_of_reach, KeyServiceError)), ids=("denied", "out of reach")
)
def test_another_identity_opens_where_one_refuses_or_is_out_of_reach(
    store: MemoryStore, does: Callable[[], None], kind: type[StrongroomError]
) -> None:
    keeper, glass = Keeper("one"), Keeper("glass")
    commit, manifest = save(store, EnvelopeSealing([keeper, glass]))
    keeper.does = does
    assert EnvelopeSealing([keeper], [glass]).unlock(store, commit, manifest).keyring == 1
    with pytest.raises(kind, match="keeper:one"):
        EnvelopeSealing([keeper]).unlock(store, commit, manifest)


def test_a_keeper_that_never_answers_is_left_behind(store: MemoryStore, gates: list[threading.Event]) -> None:
    keeper = Keeper()
    commit, manifest = save(store, EnvelopeSealing([keeper]))
    gates.append(keeper.hang())
    began = time.monotonic()
    with pytest.raises(KeyServiceError, match="keeper:one did not answer in time"):
        EnvelopeSealing([keeper], within_s=0.2).unlock(store, commit, manifest)
    assert time.monotonic() - began < 10


def test_what_may_pass_is_never_called_damage(store: MemoryStore) -> None:
    """A damaged generation beside one whose keeper is out of reach: no reason to go back a checkpoint."""
    keeper = Keeper()
    commit, manifest = save(store, EnvelopeSealing([keeper]))
    store.put(layout.keyring_key(NAME, 2), b"{}")
    for does, kind in ((out_of_reach, KeyServiceError), (denied, NoKeyError)):
        keeper.does = does
        with pytest.raises(kind):
            EnvelopeSealing([keeper]).unlock(store, commit, manifest)
    with pytest.raises(NoKeyError):
        EnvelopeSealing([], [Keeper("two")]).unlock(store, commit, manifest)


def test_a_store_that_denies_or_is_out_of_reach_raises_as_itself() -> None:
    class Refusing(MemoryStore):
        error: type[StrongroomError] | None = None

        def read(self, key: str, *, limit_bytes: int) -> bytes:
            if self.error is not None:
                raise self.error(key)
            return super().read(key, limit_bytes=limit_bytes)

    store = Refusing()
    sealing = EnvelopeSealing([Keeper()])
    commit, manifest = save(store, sealing)
    for error in (AccessDeniedError, StoreUnavailableError):
        store.error = error
        with pytest.raises(error):
            sealing.unlock(store, commit, manifest)


# Damage, and worse


def damaged(store: MemoryStore, commit: Commit, manifest: Manifest, words: str, sealing: Sealing) -> None:
    with pytest.raises(IntegrityError, match=words) as caught:
        sealing.unlock(store, commit, manifest)
    assert not isinstance(caught.value, FormatError | UnsealedError)
    assert "restore an older step" in str(caught.value)


def test_a_keyring_that_is_gone_is_damage(store: MemoryStore) -> None:
    sealing = EnvelopeSealing([Keeper()])
    commit, manifest = save(store, sealing)
    store.delete(layout.keyring_key(NAME, 1))
    damaged(store, commit, manifest, "keyring 1 of step 1200.* is absent", sealing)


def test_the_first_keyring_is_the_one_that_the_commit_pins(store: MemoryStore) -> None:
    """One that holds the very same keys, and would open, is another one all the same."""
    keeper = Keeper()
    sealing = EnvelopeSealing([keeper])
    commit, manifest = save(store, sealing)
    other = replace(keyring_of(store), created_at_ms=7)
    store.plant({layout.keyring_key(NAME, 1): other.encode()})
    damaged(store, commit, manifest, "keyring 1 .* the commit pins sha256:", sealing)
    assert keeper.unwraps == []
    pinned = replace(commit, keyring=sha256_of(other.encode()))
    assert sealing.unlock(store, pinned, manifest).keyring == 1


def test_no_byte_of_a_keyring_can_be_changed(store: MemoryStore) -> None:
    sealing = EnvelopeSealing([Keeper()])
    commit, manifest = save(store, sealing)
    key = layout.keyring_key(NAME, 1)
    good = store.contents()[key]
    for position in range(0, len(good), 7):
        store.plant({key: good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :]})
        damaged(store, commit, manifest, "the commit pins", sealing)
        damaged(store, replace(commit, keyring=None), manifest, "keyring 1", sealing)


def swapped(keyring: Keyring, **members: Any) -> Keyring:
    return replace(keyring, **members)


def test_a_keyring_of_another_checkpoint_is_refused_without_a_call(store: MemoryStore) -> None:
    keeper = Keeper()
    sealing = EnvelopeSealing([keeper])
    commit, manifest = save(store, sealing)
    for run, name in (
        (RUN, replace(NAME, step=1201)),
        (RUN, replace(NAME, launch=4)),
        (RUN, replace(NAME, attempt="f" * 16)),
        ("run-7g", replace(NAME, step=1)),
    ):
        other = EnvelopeSealing([keeper])
        save(store, other, run=run, name=name)
        foreign = keyring_of(store, name=name).encode()
        store.plant({layout.keyring_key(NAME, 1): foreign})
        keeper.unwraps.clear()
        pinned = replace(commit, keyring=sha256_of(foreign))
        damaged(store, pinned, manifest, "keyring 1 .* says that it is generation 1 of", sealing)
        assert keeper.unwraps == []


def test_wrapped_keys_of_another_checkpoint_do_not_open_in_this_one(store: MemoryStore) -> None:
    """The document says that it belongs here; the wrapped bytes are bound to where they were made."""
    sealing = EnvelopeSealing([Keeper()])
    commit, manifest = save(store, sealing)
    other = replace(NAME, step=1201)
    save(store, sealing, name=other)
    foreign = replace(keyring_of(store, name=other), name=NAME).encode()
    store.plant({layout.keyring_key(NAME, 1): foreign})
    damaged(store, replace(commit, keyring=sha256_of(foreign)), manifest, "did not wrap this key", sealing)


def test_keys_that_were_exchanged_between_files_do_not_open(store: MemoryStore) -> None:
    sealing = EnvelopeSealing([Keeper()])
    commit, manifest = save(store, sealing)
    keyring = keyring_of(store)
    first, second, *rest = keyring.keys
    mixed = replace(
        keyring,
        keys=(replace(first, wrapped=second.wrapped), replace(second, wrapped=first.wrapped), *rest),
    ).encode()
    store.plant({layout.keyring_key(NAME, 1): mixed})
    damaged(
        store,
        replace(commit, keyring=sha256_of(mixed)),
        manifest,
        f"the wrapped key of {first.path}",
        sealing,
    )


def test_a_key_that_is_missing_is_damage(store: MemoryStore) -> None:
    keeper = Keeper()
    sealing = EnvelopeSealing([keeper])
    commit, manifest = save(store, sealing)
    keyring = keyring_of(store)
    short = replace(keyring, keys=keyring.keys[1:]).encode()
    store.plant({layout.keyring_key(NAME, 1): short})
    damaged(
        store, replace(commit, keyring=sha256_of(short)), manifest, f"lacks the key of {PATHS[0]}", sealing
    )
    assert keeper.unwraps == []


@pytest.mark.parametrize("wrap", ("checkpoint", "direct"))
def test_a_key_of_another_length_is_damage(store: MemoryStore, wrap: Any) -> None:
    keeper = Keeper()
    sealing = EnvelopeSealing([keeper], wrap=wrap)
    commit, manifest = save(store, sealing)
    keeper.unwrap = lambda wrapped, context, *, within_s: Secret(b"short")  # type: ignore[method-assign]
    damaged(store, commit, manifest, "keeper:one unwrapped 5 bytes; a key has 32", sealing)


@pytest.mark.parametrize("wrap", ("checkpoint", "direct"))
@pytest.mark.parametrize("kind", (bytes, bytearray, type(None), str))
def test_a_keeper_that_unwraps_to_no_secret_is_named_and_no_local_holds_what_it_gave(
    store: MemoryStore, wrap: Any, kind: type
) -> None:
    keeper = Keeper()
    sealing = EnvelopeSealing([keeper], wrap=wrap)
    commit, manifest = save(store, sealing)
    given = {bytes: b"deadbeef" * 4, bytearray: bytearray(b"deadbeef" * 4), str: "deadbeef" * 4}.get(kind)
    keeper.unwrap = lambda wrapped, context, *, within_s: given  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(KeyServiceError, match=f"keeper:one unwrapped to {kind.__name__}") as caught:
        sealing.unlock(store, commit, manifest)
    told = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    own = [frame for frame in told.stack if frame.filename != __file__]
    assert own
    assert "deadbeef" not in "".join(str(frame.locals) for frame in own)


def test_a_key_that_its_keeper_wiped_already_is_no_damage(store: MemoryStore) -> None:
    keeper = Keeper()
    sealing = EnvelopeSealing([keeper])
    commit, manifest = save(store, sealing)
    wiped = Secret(bytes(32))
    wiped.wipe()
    keeper.unwrap = lambda wrapped, context, *, within_s: wiped  # type: ignore[method-assign]
    with pytest.raises(KeyServiceError, match="keeper:one failed with ClosedError"):
        sealing.unlock(store, commit, manifest)


def test_a_key_too_many_is_no_harm(store: MemoryStore) -> None:
    sealing = EnvelopeSealing([Keeper()])
    commit, manifest = save(store, sealing)
    keyring = keyring_of(store)
    more = replace(keyring, keys=(*keyring.keys, WrappedKey(path="z.floe", wrapped=(bytes(60),)))).encode()
    store.plant({layout.keyring_key(NAME, 1): more})
    unlocked = sealing.unlock(store, replace(commit, keyring=sha256_of(more)), manifest)
    assert contents(store, unlocked, manifest) == dict(FILES)


def forged_keyring(recipient: Any, keys: dict[str, Secret], keyring: Keyring) -> Keyring:
    """What someone writes who has the store and the recipients' public keys, and nothing else."""
    own = CheckpointKey.draw(CONTEXT)
    entry = RecipientEntry(
        id=recipient.id, kind=recipient.kind, wrapped=recipient.wrap(own.secret, CONTEXT, within_s=1.0)
    )
    return replace(
        keyring,
        recipients=(entry,),
        keys=tuple(
            WrappedKey(path=path, wrapped=(own.wrap(path, key),)) for path, key in sorted(keys.items())
        ),
    )


@pytest.mark.parametrize("generation", (1, 2))
def test_a_forger_with_the_public_keys_is_refused_by_the_pinned_headers(
    store: MemoryStore, tmp_path: Path, generation: int
) -> None:
    private = create_key_pair(tmp_path / "breakglass")
    public = read_key(tmp_path / "breakglass.pub")
    sealing = EnvelopeSealing([public], [private])
    commit, manifest = save(store, sealing)
    forger = sealing.seal_save(RUN, NAME, HandOverKey.draw())
    one_off = HandOverKey.draw()
    fresh = MemoryStore()
    write_files(fresh, forger)  # files of the same lengths, sealed for the same place under the forger's keys
    found = one_off.open(forger.hand_over(one_off.public), CONTEXT)
    assert found is not None
    keyring = forged_keyring(public, dict(found.keys), keyring_of(store))
    if generation == 2:
        keyring = replace(keyring, generation=2, previous=sha256_of(keyring_of(store).encode()))
    store.plant({**fresh.contents(), layout.keyring_key(NAME, generation): keyring.encode()})
    if generation == 1:
        pinned = replace(commit, keyring=sha256_of(keyring.encode()))
        damaged(store, pinned, manifest, f"{PATHS[0]} of step 1200.*header's tag does not fit", sealing)
        return
    # The true keys stand in the first generation, and the forged files do not open with them.
    unlocked = sealing.unlock(store, commit, manifest)
    assert unlocked.keyring == 1
    with pytest.raises(IntegrityError):
        contents(store, unlocked, manifest)


def test_a_keyring_that_is_right_for_all_files_but_one_is_refused(store: MemoryStore) -> None:
    keeper = Keeper()
    sealing = EnvelopeSealing([keeper])
    commit, manifest = save(store, sealing)
    true = sealing.unlock(store, commit, manifest)
    one_off = HandOverKey.draw()
    found = one_off.open(true.hand_over(one_off.public, PATHS), CONTEXT)
    assert found is not None
    keys = {**found.keys, PATHS[-1]: Secret.draw()}
    keyring = forged_keyring(keeper, keys, keyring_of(store))
    store.plant({layout.keyring_key(NAME, 1): keyring.encode()})
    damaged(store, replace(commit, keyring=sha256_of(keyring.encode())), manifest, PATHS[-1], sealing)


def test_a_manifest_s_header_or_length_that_was_changed_does_not_fit_the_key(store: MemoryStore) -> None:
    sealing = EnvelopeSealing([Keeper()])
    commit, manifest = save(store, sealing)
    first, *rest = manifest.files
    assert first.header is not None
    for position in range(len(first.header)):
        header = bytearray(first.header)
        header[position] ^= 1
        other = replace(manifest, files=(replace(first, header=bytes(header)), *rest))
        damaged(store, commit, other, first.path, sealing)


# Generations


def rotated(store: MemoryStore, recipients: list[Keeper], identity: Keeper) -> Keyring:
    """A further generation that other recipients open, written as a rotation would."""
    newest = keyring_of(
        store,
        max(layout.parse_keyring_name(name) or 0 for name in store.list_names(f"{NAME.folder}/keyring")),
    )
    position = newest.position(identity.id)
    assert position is not None
    wrapped = newest.recipients[position].wrapped
    assert wrapped is not None
    secret = identity.unwrap(wrapped, CONTEXT, within_s=1.0)
    entries = [
        RecipientEntry(id=each.id, kind=each.kind, wrapped=each.wrap(secret, CONTEXT, within_s=1.0))
        for each in recipients
    ]
    following = newest.followed_by(created_at_ms=1, recipients=entries)
    assert write_generation(store, following)
    return following


def test_the_newest_generation_that_opens_is_used(store: MemoryStore) -> None:
    old, new = Keeper("old"), Keeper("new")
    commit, manifest = save(store, EnvelopeSealing([old]))
    rotated(store, [new, old], old)
    rotated(store, [new], new)
    assert EnvelopeSealing([], [new]).unlock(store, commit, manifest).keyring == 3
    assert EnvelopeSealing([], [old]).unlock(store, commit, manifest).keyring == 2
    assert EnvelopeSealing([], [old, new]).unlock(store, commit, manifest).keyring == 3


def test_the_old_generation_may_be_removed(store: MemoryStore) -> None:
    old, new = Keeper("old"), Keeper("new")
    commit, manifest = save(store, EnvelopeSealing([old]))
    rotated(store, [new], old)
    store.delete(layout.keyring_key(NAME, 1))
    assert EnvelopeSealing([new]).unlock(store, commit, manifest).keyring == 2
    with pytest.raises(NoKeyError):
        EnvelopeSealing([old]).unlock(store, commit, manifest)


def test_a_newer_generation_that_is_damaged_or_of_a_later_format_is_passed_over(store: MemoryStore) -> None:
    keeper = Keeper()
    sealing = EnvelopeSealing([keeper])
    commit, manifest = save(store, sealing)
    rotated(store, [keeper], keeper)
    keyring = json.loads(keyring_of(store, 2).encode())
    keyring.pop("~digest")
    later = canonical.with_self_digest({**keyring, "format": "7.0"})
    for data in (b"", b"{}", later, os.urandom(100), b"x" * 1000):
        store.plant({layout.keyring_key(NAME, 2): data})
        assert sealing.unlock(store, commit, manifest).keyring == 1
    store.plant({layout.keyring_key(NAME, 2): later})
    store.delete(layout.keyring_key(NAME, 1))
    with pytest.raises(UnsupportedFormatError, match=r"format 7\.0"):
        sealing.unlock(store, commit, manifest)


def test_a_generation_that_says_another_number_is_passed_over(store: MemoryStore) -> None:
    keeper = Keeper()
    sealing = EnvelopeSealing([keeper])
    commit, manifest = save(store, sealing)
    rotated(store, [keeper], keeper)
    store.put(layout.keyring_key(NAME, 3), keyring_of(store, 2).encode())
    assert sealing.unlock(store, commit, manifest).keyring == 2


def test_a_key_service_is_not_asked_the_same_twice(store: MemoryStore) -> None:
    """Generations that repeat one wrapped key, with files' keys that are wrong: one call for all of them."""
    keeper = Keeper()
    sealing = EnvelopeSealing([keeper])
    commit, manifest = save(store, sealing)
    first = keyring_of(store)
    wrong = tuple(replace(key, wrapped=(bytes(60),)) for key in first.keys)
    for generation in range(2, 12):
        data = replace(first, generation=generation, previous=sha256_of(b""), keys=wrong).encode()
        store.put(layout.keyring_key(NAME, generation), data)
    assert sealing.unlock(store, commit, manifest).keyring == 1
    assert len(keeper.unwraps) == 1


def test_a_key_service_that_is_out_of_reach_is_not_asked_for_every_generation(store: MemoryStore) -> None:
    keeper = Keeper()
    sealing = EnvelopeSealing([keeper])
    commit, manifest = save(store, sealing)
    for _ in range(5):
        rotated(store, [keeper], keeper)
    keeper.unwraps.clear()
    keeper.does = out_of_reach
    with pytest.raises(KeyServiceError):
        sealing.unlock(store, commit, manifest)
    assert len(keeper.unwraps) == 1


class Rotating(MemoryStore):
    """Somebody rotates between listing and reading, as often as there is something left to do."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: list[Callable[[], object]] = []
        self.lists = 0

    def list_names(self, prefix: str) -> list[str]:
        names = super().list_names(prefix)
        self.lists += 1
        if self.meanwhile:
            (now, *later), self.meanwhile = self.meanwhile, []  # which lists too
            now()
            self.meanwhile = later
        return names


def replaced(store: MemoryStore, recipients: list[Keeper], identity: Keeper) -> None:
    """Rotate, and remove every older generation."""
    newest = rotated(store, recipients, identity).generation
    for generation in range(1, newest):
        key = layout.keyring_key(NAME, generation)
        if key in store.contents():
            store.delete(key)


@pytest.mark.parametrize("times", (1, 3))
def test_a_generation_that_vanishes_between_listing_and_reading_is_no_damage(times: int) -> None:
    store, keeper = Rotating(), Keeper()
    sealing = EnvelopeSealing([keeper])
    commit, manifest = save(store, sealing)
    store.meanwhile = [lambda: replaced(store, [keeper], keeper)] * times
    assert sealing.unlock(store, commit, manifest).keyring == times + 1


def test_a_generation_for_this_identity_that_is_added_meanwhile_is_found() -> None:
    store, old, new = Rotating(), Keeper("old"), Keeper("new")
    commit, manifest = save(store, EnvelopeSealing([old]))
    store.meanwhile = [lambda: rotated(store, [new], old)]
    assert EnvelopeSealing([], [new]).unlock(store, commit, manifest).keyring == 2


def test_who_was_silent_is_not_asked_again_when_generations_change_and_is_told_of() -> None:
    store, keeper, other = Rotating(), Keeper(), Keeper("other")
    commit, manifest = save(store, EnvelopeSealing([keeper, other]))
    store.meanwhile = [lambda: rotated(store, [other], other)] * 3
    keeper.does = out_of_reach
    with pytest.raises(KeyServiceError, match="keeper:one does not answer"):
        EnvelopeSealing([], [keeper]).unlock(store, commit, manifest)
    assert len(keeper.unwraps) == 1


def test_keyrings_that_never_stand_still_are_no_damage_and_are_not_looked_at_for_ever() -> None:
    store, keeper = Rotating(), Keeper()
    sealing = EnvelopeSealing([keeper])
    commit, manifest = save(store, sealing)
    store.meanwhile = [lambda: replaced(store, [keeper], keeper)] * 500
    with pytest.raises(KeyServiceError, match="changed each of the 20 times"):
        sealing.unlock(store, commit, manifest)
    assert store.lists < 60


def test_a_keyring_that_stays_absent_is_damage_after_two_looks() -> None:
    store = Rotating()
    sealing = EnvelopeSealing([Keeper()])
    commit, manifest = save(store, sealing)
    store.delete(layout.keyring_key(NAME, 1))
    damaged(store, commit, manifest, "keyring 1 of step 1200.* is absent", sealing)
    assert store.lists == 2


def test_a_generation_larger_than_the_checkpoint_s_files_need_is_passed_over(store: MemoryStore) -> None:
    keeper = Keeper()
    sealing = EnvelopeSealing([keeper])
    commit, manifest = save(store, sealing)
    following = rotated(store, [keeper], keeper)
    more = tuple(WrappedKey(path=f"z{number:06d}.floe", wrapped=(bytes(60),)) for number in range(40_000))
    larger = replace(following, keys=(*following.keys, *more)).encode()
    store.plant({layout.keyring_key(NAME, 2): larger})
    keeper.unwraps.clear()
    assert sealing.unlock(store, commit, manifest).keyring == 1
    assert len(keeper.unwraps) == 1


# A total time


def test_all_identities_together_have_the_time_that_the_restore_gives(
    store: MemoryStore, gates: list[threading.Event]
) -> None:
    keepers = [Keeper(str(number)) for number in range(5)]
    commit, manifest = save(store, EnvelopeSealing(keepers))
    gates.extend(keeper.hang() for keeper in keepers)
    began = time.monotonic()
    with pytest.raises(KeyServiceError, match=r"keeper:0 did not answer in time.*keeper:1 was not asked"):
        EnvelopeSealing([], keepers, within_s=25).unlock(store, commit, manifest, within_s=0.3)
    assert time.monotonic() - began < 15
    assert [len(keeper.unwraps) for keeper in keepers] == [1, 0, 0, 0, 0]


def test_directly_all_files_together_have_the_time_that_the_restore_gives(store: MemoryStore) -> None:
    keeper = Keeper()
    commit, manifest = save(store, EnvelopeSealing([keeper], wrap="direct"))
    keeper.does = lambda: time.sleep(0.3)
    with pytest.raises(KeyServiceError, match="keeper:one"):
        EnvelopeSealing([keeper]).unlock(store, commit, manifest, within_s=0.4)
    assert len(keeper.unwraps) == 2
    assert EnvelopeSealing([keeper]).unlock(store, commit, manifest, within_s=25).keyring == 1


def test_a_flood_of_generations_costs_few_calls_and_does_not_hide_the_first(store: MemoryStore) -> None:
    keeper = Keeper()
    sealing = EnvelopeSealing([keeper])
    commit, manifest = save(store, sealing)
    first = keyring_of(store)
    for generation in range(2, 200):
        entry = replace(first.recipients[0], wrapped=os.urandom(60))
        data = replace(first, generation=generation, previous=sha256_of(b""), recipients=(entry,)).encode()
        store.put(layout.keyring_key(NAME, generation), data)
    assert sealing.unlock(store, commit, manifest).keyring == 1
    assert len(keeper.unwraps) == 17


# Each file's key wrapped by the recipient itself


def test_directly_a_recipient_is_called_once_a_file(store: MemoryStore) -> None:
    keepers = [Keeper("one"), Keeper("two")]
    commit, manifest = save(store, EnvelopeSealing(keepers, wrap="direct"))
    for keeper in keepers:
        assert sorted(context.path or "" for context in keeper.wraps) == PATHS
        unlocked = EnvelopeSealing([], [keeper]).unlock(store, commit, manifest)
        assert contents(store, unlocked, manifest) == dict(FILES)
        assert sorted(context.path or "" for context in keeper.unwraps) == PATHS
    assert keyring_of(store).wrap == "direct"


def test_directly_wrapped_keys_that_were_exchanged_do_not_open(store: MemoryStore) -> None:
    sealing = EnvelopeSealing([Keeper()], wrap="direct")
    commit, manifest = save(store, sealing)
    keyring = keyring_of(store)
    first, second, *rest = keyring.keys
    mixed = replace(
        keyring, keys=(replace(first, wrapped=second.wrapped), replace(second, wrapped=first.wrapped), *rest)
    ).encode()
    store.plant({layout.keyring_key(NAME, 1): mixed})
    damaged(store, replace(commit, keyring=sha256_of(mixed)), manifest, "did not wrap this key", sealing)


def test_directly_each_call_has_its_own_time(store: MemoryStore) -> None:
    keeper = Keeper()
    commit, manifest = save(store, EnvelopeSealing([keeper], wrap="direct"))
    keeper.does = lambda: time.sleep(0.4)
    sealing = EnvelopeSealing([keeper], within_s=0.5)
    assert sealing.unlock(store, commit, manifest).keyring == 1


def test_any_policy_opens_what_either_way_of_wrapping_wrote(store: MemoryStore) -> None:
    keeper = Keeper()
    commit, manifest = save(store, EnvelopeSealing([keeper], wrap="direct"))
    assert EnvelopeSealing([keeper]).unlock(store, commit, manifest).keyring == 1


# What else the seam asks


def test_a_file_that_is_not_sealed_has_no_opener(store: MemoryStore) -> None:
    sealing = EnvelopeSealing([Keeper()])
    commit, manifest = save(store, sealing)
    unlocked = sealing.unlock(store, commit, manifest)
    first = manifest.files[0]
    with pytest.raises(UnsealedError, match=f"{first.path} of step 1200"):
        unlocked.opener(replace(first, header=None))
    with pytest.raises(NoKeyError, match="is not among the 4 keys"):
        unlocked.opener(replace(first, path="absent.floe"))


def test_nobody_waits_for_a_keeper_that_hangs_when_the_program_ends() -> None:
    program = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from checkpoints import NAME, RUN, Keeper
from strongroom_security.sealing import EnvelopeSealing
keeper = Keeper()
keeper.does = lambda: time.sleep(1000)
EnvelopeSealing([keeper]).seal_save(RUN, NAME, None).begin_wrapping()
"""
    child = subprocess.run([sys.executable, "-c", program, str(Path(__file__).parent)], timeout=100)
    assert child.returncode == 0


def test_checkpoints_that_may_be_unsealed_are_named_by_folder() -> None:
    sealing = EnvelopeSealing([Keeper()], unsealed_names=[NAME.folder, "step-00000000000?-0001-*"])
    assert sealing.accepts_unsealed(NAME)
    assert not sealing.accepts_unsealed(replace(NAME, attempt="f" * 16))
    assert sealing.accepts_unsealed(CheckpointName(launch=1, step=7, attempt="f" * 16))
    assert not sealing.accepts_unsealed(CheckpointName(launch=1, step=17, attempt="f" * 16))
    assert not EnvelopeSealing([Keeper()]).accepts_unsealed(NAME)


def test_nothing_shows_or_pickles_or_copies_a_key(store: MemoryStore) -> None:
    sealing = EnvelopeSealing([Keeper()])
    commit, manifest = save(store, sealing)
    seal = sealing.seal_save(RUN, NAME, sealing.one_off())
    seal.sealer(PATHS[0])
    unlocked = sealing.unlock(store, commit, manifest)
    one_off = HandOverKey.draw()
    found = one_off.open(unlocked.hand_over(one_off.public, PATHS), CONTEXT)
    assert found is not None
    keys = [key.reveal() for key in found.keys.values()]
    for each in (sealing, seal, unlocked):
        assert not any(key.hex()[:8] in repr(each) or repr(key)[2:12] in repr(each) for key in keys)
    for holder in (seal, unlocked):
        for serialise in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError):
                serialise(holder)


def test_one_sealing_is_used_on_both_sides_of_a_fork(tmp_path: Path) -> None:
    sealing = EnvelopeSealing([create_key_file(tmp_path / "kek.key")])
    store = LocalStore(tmp_path / "root")
    save(store, sealing)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a process with threads forks: that is meant
        child = os.fork()
    step = 1 if child == 0 else 2
    outcome = 1
    try:
        commit, manifest = save(LocalStore(tmp_path / "root"), sealing, name=replace(NAME, step=step))
        assert contents(store, sealing.unlock(store, commit, manifest), manifest) == dict(FILES)
        outcome = 0
    finally:
        if child == 0:
            os._exit(outcome)
    assert os.waitpid(child, 0)[1] == 0
    headers = [
        record["header"]
        for folder in (tmp_path / "root").glob("step-*")
        for record in json.loads((folder / "data" / "MANIFEST.json").read_bytes())["files"]
    ]
    assert len(headers) == len(set(headers)) == 3 * len(FILES)
