"""Sealed checkpoints changed by whoever can write to the storage: each change is refused, named, passed over.

Nothing of a changed checkpoint is used: what is filled already is told to be undefined, no object is
handed its state, and a restore of the newest goes back to the whole checkpoint before it and says why.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sealed_saves import MIB, assert_same, file_policy, sealing_of

from strongroom import (
    AccessDeniedError,
    Checkpointer,
    IntegrityError,
    NoKeyError,
    NoWholeCheckpointError,
    PerRank,
    StoreError,
    StoreUnavailableError,
    canonical,
    layout,
)
from strongroom.catalog import Catalog
from strongroom.contents import SealedReader
from strongroom.digest import FileHasher, sha256_of
from strongroom.errors import ObjectNotFoundError
from strongroom.findings import Report
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit, Manifest
from strongroom.signing import Guard
from strongroom.stores.memory import MemoryStore
from strongroom.verify import verify
from strongroom_security import SecurityPolicy

SHARD, OTHER_SHARD = "00000-00.safetensors.floe", "00000-01.safetensors.floe"
INDEX, STATE, OWN, PROVENANCE = (
    f"{name}.floe" for name in ("index.safetensors", "state.json", "state-00000.json", "provenance.json")
)
FILES = (SHARD, OTHER_SHARD, INDEX, STATE, OWN, PROVENANCE)

Contents = dict[str, bytes]


class Witness:
    """An object in the state, to which nobody hands what is not whole."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.loaded: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state["value"])


def state_of(number: int) -> dict[str, Any]:
    """Two large tensors, so that there are two shards of one length, and one of everything else."""
    generator = torch.Generator().manual_seed(number)
    return {
        "v": torch.randn(300_000, generator=generator),
        "w": torch.randn(300_000, generator=generator),
        "a": torch.randn(5, generator=generator),
        "b": torch.randn(5, generator=generator),
        "extra": {"epoch": number},
        "mine": PerRank({"number": number}),
        "object": Witness(number),
    }


class Run:
    """A run in memory, or what somebody made of it.

    Steps 1 to 3 of a first launch, and step 3 of a second one that went on from step 2: the newest.
    """

    def __init__(self, contents: Contents, policy: SecurityPolicy) -> None:
        self.contents = contents
        self.policy = policy

    @classmethod
    def make(
        cls, policy: SecurityPolicy, run_id: str = "run-a", attempt: str = "a", last_step: int = 3
    ) -> Run:
        """All attempts are called alike, so that two runs' newest checkpoints differ in one thing alone."""
        store = MemoryStore()

        def begin() -> Checkpointer:
            return Checkpointer(store, security=policy, run_id=run_id, draw=lambda size: attempt * (2 * size))

        with begin() as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(step, state_of(step)).result()
        with begin() as checkpointer:
            checkpointer.restore(step=2)
            checkpointer.save(last_step, state_of(33)).result()
        return cls(store.contents(), policy)

    def copy(self) -> Run:
        return Run(dict(self.contents), self.policy)

    @property
    def store(self) -> MemoryStore:
        store = MemoryStore()
        store.plant(self.contents)
        return store

    def name(self, step: int = 3, launch: int = 2) -> CheckpointName:
        (found,) = (
            name for name in self.names if (name.step, name.launch) == (step, launch if step == 3 else 1)
        )
        return found

    @property
    def names(self) -> list[CheckpointName]:
        parsed = (CheckpointName.parse(key.partition("/")[0]) for key in self.contents)
        return sorted({name for name in parsed if name is not None})

    @property
    def newest(self) -> CheckpointName:
        return self.name(3)

    def key(self, path: str, name: CheckpointName | None = None) -> str:
        """Of a file by its place: under ``data/``, or ``COMMIT`` or ``keyring/...``."""
        folder = (name or self.newest).folder
        return f"{folder}/{path}" if path in FOLDERLESS else f"{folder}/data/{path}"

    def read(self, path: str, name: CheckpointName | None = None) -> bytes:
        return self.contents[self.key(path, name)]

    def write(self, path: str, data: bytes, name: CheckpointName | None = None) -> None:
        self.contents[self.key(path, name)] = data

    def remove(self, path: str) -> None:
        del self.contents[self.key(path)]

    def flip(self, path: str, position: int) -> None:
        data = bytearray(self.read(path))
        data[position] ^= 1
        self.write(path, bytes(data))

    @property
    def commit(self) -> Commit:
        return Commit.decode(self.read("COMMIT"), "COMMIT")

    @property
    def keyring(self) -> dict[str, Any]:
        members: dict[str, Any] = json.loads(self.read(KEYRING))
        del members["~digest"]
        return members

    def put_keyring(self, members: dict[str, Any], *, is_pinned: bool) -> None:
        """Replace the keyring by a whole document; and let the commit pin it, where that is meant."""
        data = canonical.with_self_digest(members)
        self.write(KEYRING, data)
        if is_pinned:
            self.write("COMMIT", replace(self.commit, keyring=sha256_of(data)).encode())


KEYRING = "keyring/0001.json"
FOLDERLESS = ("COMMIT", KEYRING, "keyring/0002.json")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run; one that was hashed otherwise, and one whose keys are wrapped directly; and of the first one
    others that differ in the newest one's run, step or attempt.
    """
    folder = tmp_path_factory.mktemp("keys")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strongroom.shards.MIN_PART_BYTES", MIB)
        patch.setattr("strongroom.checkpointer.writing_workers", lambda: 2)
        blake3, sha256, direct = (
            file_policy(folder, name=f"{number}.toml", top=top, seal=seal)
            for number, (top, seal) in enumerate(
                (("", ""), ('digest = "sha256"', ""), ("", 'wrap = "direct"'))
            )
        )
        return {
            "blake3": Run.make(blake3),
            "sha256": Run.make(sha256),
            "direct": Run.make(direct),
            "foreign": Run.make(blake3, "run-b"),
            "another step": Run.make(blake3, last_step=4),
            "another attempt": Run.make(blake3, attempt="b"),
        }


@pytest.fixture
def run(runs: dict[str, Run]) -> Run:
    return runs["blake3"].copy()


@pytest.fixture
def foreign(runs: dict[str, Run]) -> Run:
    """Another run of the same keys, whose steps, launches and attempts are the same ones."""
    return runs["foreign"]


def template() -> dict[str, Any]:
    state = state_of(0)
    for name in "vwab":
        state[name].fill_(7)
    return {**state, "extra": {}, "mine": PerRank(None)}


def check_untouched(state: dict[str, Any], undefined: Iterable[str]) -> None:
    """Whatever is no longer what it was is told to be undefined, and no object was handed anything."""
    changed = {name for name in "vwab" if not (state[name] == 7).all()}
    assert changed <= set(undefined)
    assert state["object"].loaded == []


def check_whole(restored: Any, state: dict[str, Any], number: int) -> None:
    expected = state_of(number)
    for name in "vwab":
        assert_same(state[name], expected[name])
    assert restored.state["extra"] == {"epoch": number}
    assert restored.state["mine"] == {"number": number}
    assert state["object"].loaded == [number]


def check_refused(run: Run, words: str, *, file: str | None = None) -> None:
    """The newest is refused by name, and passed over for step 2; both say which file and step, and why."""
    state = template()
    checkpointer = Checkpointer(run.store, security=run.policy)
    with pytest.raises(IntegrityError) as caught:
        checkpointer.restore(state, step=3)
    told = str(caught.value)
    assert re.search(words, told), told
    assert "step 3 (launch 2" in told or run.newest.folder in told
    assert file is None or file.removesuffix(".floe") in told
    check_untouched(state, getattr(caught.value, "undefined", ()))

    state = template()
    restored = checkpointer.restore(state)
    assert restored is not None
    assert restored.step == 2
    ((step, reason),) = restored.skipped
    assert step == 3
    assert re.search(words, reason), reason
    assert file is None or file.removesuffix(".floe") in reason
    check_whole(restored, state, 2)

    report = verify(run.store, step=3, guard=Guard(sealing=sealing_of(run.policy)), workers=1)
    assert report.verdict == "damaged", report.problems
    if file is not None:
        assert any(file in problem.key for problem in report.problems), report.problems


@pytest.mark.parametrize("kind", ("blake3", "sha256", "direct", "foreign", "another attempt"))
def test_what_these_tests_change_is_whole_before(kind: str, runs: dict[str, Run]) -> None:
    run = runs[kind]
    assert len(run.read(SHARD)) == len(run.read(OTHER_SHARD)) > MIB
    state = template()
    restored = Checkpointer(run.store, security=run.policy).restore(state)
    assert restored is not None
    assert (restored.step, restored.skipped) == (3, ())
    check_whole(restored, state, 33)
    report = verify(run.store, everything=True, guard=Guard(sealing=sealing_of(run.policy)))
    assert report.verdict == "whole"
    assert len(report.checkpoints) == 4


# One bit

SEGMENT_START = 74
REGIONS = {
    "parameters": 3,
    "segment length in the parameters": 5,
    "IV": 10 + 9,
    "header tag": 42 + 30,
    "first segment's mark": SEGMENT_START,
    "first segment's nonce": SEGMENT_START + 4 + 11,
    "first segment's first byte": SEGMENT_START + 16,
    "first segment's last byte": SEGMENT_START + MIB - 17,
    "first segment's tag": SEGMENT_START + MIB - 1,
    "last segment's length": SEGMENT_START + MIB + 3,
    "last segment's nonce": SEGMENT_START + MIB + 4,
    "last segment's first byte": SEGMENT_START + MIB + 16,
    "last segment's last byte": -17,
    "last segment's tag": -1,
}


@pytest.mark.parametrize("kind", ("blake3", "sha256"))
@pytest.mark.parametrize("region", REGIONS)
def test_one_bit_of_a_shard(region: str, kind: str, runs: dict[str, Run]) -> None:
    run = runs[kind].copy()
    run.flip(SHARD, REGIONS[region])
    words = "header" if REGIONS[region] in range(SEGMENT_START) else r"segment [01] \(of 0 to 1\)"
    check_refused(run, f"{words}.*restore an older step", file=SHARD)


@pytest.mark.parametrize("file", (INDEX, STATE, OWN, PROVENANCE))
@pytest.mark.parametrize("position", (0, 20, 70, 75, 80, 95, -17, -1))
def test_one_bit_of_a_document(file: str, position: int, run: Run) -> None:
    run.flip(file, position)
    check_refused(run, "stored digest .* is not the manifest's", file=file)


@pytest.mark.parametrize("file", ("MANIFEST.json", KEYRING, "COMMIT"))
def test_one_bit_of_what_is_in_clear(file: str, run: Run) -> None:
    """Also of the header that the manifest pins, and of the keyring's digest that the commit pins."""
    data = run.read(file)
    places = [
        len(data) // 2,
        *(match.end() + 9 for match in re.finditer(rb'"(header|keyring|wrapped)":"', data)),
    ]
    for position in places:
        changed = run.copy()
        changed.flip(file, position)
        words = {
            "MANIFEST.json": "stored digest .* which COMMIT pins",
            KEYRING: "keyring 1 of step 3 .* the commit pins",
            "COMMIT": "COMMIT",
        }
        check_refused(changed, words[file])


# Too short, too long, gone


LENGTHS: dict[str, Callable[[bytes], bytes]] = {
    "one byte less": lambda data: data[:-1],
    "a header alone": lambda data: data[:SEGMENT_START],
    "nothing": lambda data: b"",
    "one byte more": lambda data: data + b"\0",
    "its segments twice": lambda data: data + data[SEGMENT_START:],
}
OF_SEVERAL_SEGMENTS: dict[str, Callable[[bytes], bytes]] = {
    "no last segment": lambda data: data[: SEGMENT_START + MIB],
    "no first segment": lambda data: data[:SEGMENT_START] + data[SEGMENT_START + MIB :],
    "its first segment twice": lambda data: data[: SEGMENT_START + MIB] + data[SEGMENT_START:],
}
WRONG_LENGTH = "bytes, the manifest says|longer than the manifest's"


@pytest.mark.parametrize("file", (SHARD, INDEX, STATE, OWN, PROVENANCE))
@pytest.mark.parametrize("change", LENGTHS)
def test_a_file_of_another_length(change: str, file: str, run: Run) -> None:
    run.write(file, LENGTHS[change](run.read(file)))
    check_refused(run, WRONG_LENGTH, file=file)


@pytest.mark.parametrize("change", OF_SEVERAL_SEGMENTS)
def test_a_shard_that_lacks_a_segment_or_has_one_twice(change: str, run: Run) -> None:
    run.write(SHARD, OF_SEVERAL_SEGMENTS[change](run.read(SHARD)))
    check_refused(run, WRONG_LENGTH, file=SHARD)


@pytest.mark.parametrize("file", (*FILES, "MANIFEST.json"))
def test_a_file_that_is_gone(file: str, run: Run) -> None:
    run.remove(file)
    check_refused(run, "missing", file=file)


def test_a_keyring_that_is_gone(run: Run) -> None:
    run.remove(KEYRING)
    check_refused(run, r"keyring 1 of step 3 .* is absent")


@pytest.mark.parametrize("file", FILES)
def test_a_file_under_another_name(file: str, run: Run) -> None:
    run.write("00000-07.safetensors.floe", run.read(file))
    run.remove(file)
    check_refused(run, "missing", file=file)


# What was sealed for another place


Elsewhere = Callable[[str, str], bytes]


@pytest.fixture
def elsewhere(runs: dict[str, Run]) -> Elsewhere:
    """The file of a checkpoint that differs from the newest one in just one thing."""

    def elsewhere(where: str, path: str) -> bytes:
        newest = runs["blake3"].newest
        run, name = {
            "another step": (runs["another step"], replace(newest, step=4)),
            "another launch": (runs["blake3"], replace(newest, launch=1)),
            "another attempt": (runs["another attempt"], replace(newest, attempt="b" * 16)),
            "another run": (runs["foreign"], newest),
        }[where]
        return run.read(path, name)

    return elsewhere


def check_swapped(run: Run, file: str) -> None:
    is_shard = file in (SHARD, OTHER_SHARD)
    words = "does not begin with the header" if is_shard else f"stored digest|{WRONG_LENGTH}"
    check_refused(run, words, file=file)


def test_two_shards_of_one_checkpoint_that_were_exchanged(run: Run) -> None:
    first, second = run.read(SHARD), run.read(OTHER_SHARD)
    run.write(SHARD, second)
    check_swapped(run, SHARD)
    run.write(OTHER_SHARD, first)
    check_refused(run, "does not begin with the header", file="00000-0")


@pytest.mark.parametrize(("one", "other"), tuple(itertools.combinations((INDEX, STATE, OWN, PROVENANCE), 2)))
def test_two_documents_that_were_exchanged(one: str, other: str, run: Run) -> None:
    first, second = run.read(one), run.read(other)
    run.write(one, second)
    run.write(other, first)
    check_refused(run, WRONG_LENGTH)


ELSEWHERE = ("another step", "another launch", "another attempt", "another run")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("where", ELSEWHERE)
def test_a_file_of_another_checkpoint(file: str, where: str, run: Run, elsewhere: Elsewhere) -> None:
    """Sealed to the same recipients, for the same path, and a place that differs in one thing."""
    other = elsewhere(where, file)
    if file.startswith("00000-"):
        assert len(other) == len(run.read(file))
    run.write(file, other)
    check_swapped(run, file)


@pytest.mark.parametrize("where", ("another shard", *ELSEWHERE))
@pytest.mark.parametrize("which", ("all segments", "the last one"))
def test_segments_from_elsewhere_under_the_true_header(
    where: str, which: str, run: Run, elsewhere: Elsewhere
) -> None:
    """What the pinned header says is true then; the segments are not of its file."""
    other = run.read(OTHER_SHARD) if where == "another shard" else elsewhere(where, SHARD)
    start = SEGMENT_START if which == "all segments" else SEGMENT_START + MIB
    run.write(SHARD, run.read(SHARD)[:start] + other[start:])
    number = 0 if which == "all segments" else 1
    check_refused(run, rf"segment {number} \(of 0 to 1\) is not what was sealed there", file=SHARD)


def test_segments_of_one_length_that_were_exchanged_within_a_file(runs: dict[str, Run]) -> None:
    """The true ones, at other places; the marks and sizes say nothing."""
    policy, store = runs["blake3"].policy, MemoryStore()
    with Checkpointer(store, security=policy) as checkpointer:
        checkpointer.save(1, {"t": torch.randn(600_000)}).result()
    (name,) = Catalog(store).history().commits
    key = layout.data_key(name, SHARD)
    data = store.contents()[key]
    first, second, last = (data[start : start + MIB] for start in range(SEGMENT_START, len(data), MIB))
    for order in ((second, first, last), (first, first, last), (second, second, last)):
        store.plant({key: data[:SEGMENT_START] + b"".join(order)})
        state = {"t": torch.full((600_000,), 7.0)}
        with pytest.raises(IntegrityError, match=r"segment [01] \(of 0 to 2\) is not what was sealed there"):
            Checkpointer(store, security=policy).restore(state)


# Replays


def test_the_manifest_of_another_checkpoint(run: Run, foreign: Run) -> None:
    for other in (run.read("MANIFEST.json", run.name(2)), foreign.read("MANIFEST.json")):
        run.write("MANIFEST.json", other)
        check_refused(run, "MANIFEST.json of step 3 .* which COMMIT pins", file="MANIFEST.json")


def test_everything_of_an_older_checkpoint_under_the_newest_name(run: Run) -> None:
    """But for the commit, which says whose name it is."""
    old, new = run.name(2).folder, run.newest.folder
    for key, data in list(run.contents.items()):
        if key.startswith(f"{old}/") and not key.endswith("COMMIT"):
            run.contents[key.replace(old, new)] = data
    check_refused(run, "which COMMIT pins")


@pytest.mark.parametrize("which", ("of the run", "of another run"))
def test_a_whole_checkpoint_from_elsewhere_under_the_newest_name(which: str, run: Run, foreign: Run) -> None:
    """Its commit among it, which tells where it belongs."""
    source = run.copy() if which == "of the run" else foreign
    old = source.name(2).folder if which == "of the run" else source.newest.folder
    new = run.newest.folder
    kept = {key: data for key, data in run.contents.items() if not key.startswith(f"{new}/")}
    moved_in = {
        key.replace(old, new): data for key, data in source.contents.items() if key.startswith(f"{old}/")
    }
    run.contents = {**kept, **moved_in}
    check_refused(run, "COMMIT.*(belongs to run run-b|commits step 2|says that it is step 2|step 2)")


def test_the_keyring_of_another_checkpoint(run: Run, elsewhere: Elsewhere) -> None:
    for other in (elsewhere(where, KEYRING) for where in ELSEWHERE):
        run.write(KEYRING, other)
        check_refused(run, "keyring 1 of step 3 .* the commit pins")
        # And where the commit is made to pin it.
        pinned = run.copy()
        pinned.write("COMMIT", replace(run.commit, keyring=sha256_of(other)).encode())
        check_refused(pinned, "keyring 1 of step 3 .* says that it is generation 1 of step")


@pytest.mark.parametrize("others", ("data", "keyring", "data and keyring"))
def test_the_foreign_run_s_files_and_keys_together(others: str, run: Run, foreign: Run) -> None:
    """All that is sealed fits together, under a manifest and a commit that pin something else."""
    for key, data in foreign.contents.items():
        is_data = key.startswith(f"{run.newest.folder}/data/") and not key.endswith("MANIFEST.json")
        is_keyring = key == run.key(KEYRING)
        if (is_data and "data" in others) or (is_keyring and "keyring" in others):
            run.contents[key] = data
    check_refused(run, "the commit pins" if others == "keyring" else f"stored digest|{WRONG_LENGTH}")


# The commit's pin


def test_a_commit_that_pins_another_keyring(run: Run) -> None:
    run.write("COMMIT", replace(run.commit, keyring=sha256_of(b"another")).encode())
    check_refused(run, "keyring 1 of step 3 .* the commit pins sha256:")


def test_a_commit_that_pins_none(run: Run) -> None:
    run.write("COMMIT", replace(run.commit, keyring=None).encode())
    check_refused(run, "do not agree on whether the checkpoint is sealed|COMMIT does not agree")


def test_a_manifest_whose_pins_were_changed_and_pinned_again(run: Run) -> None:
    """Headers, lengths and paths, by somebody who can write a commit: the keys do not fit those."""
    manifest = Manifest.decode(run.read("MANIFEST.json"), "manifest")
    shard = next(record for record in manifest.files if record.path == SHARD)
    second = next(record for record in manifest.files if record.path == OTHER_SHARD)
    assert shard.header is not None
    assert second.header is not None
    flipped = bytearray(shard.header)
    flipped[20] ^= 1
    changes = {
        "its header": (replace(shard, header=bytes(flipped)), second),
        "another's header": (replace(shard, header=second.header), second),
        "exchanged headers": (replace(shard, header=second.header), replace(second, header=shard.header)),
        "exchanged records": (replace(second, path=SHARD), replace(shard, path=OTHER_SHARD)),
    }
    for records in changes.values():
        files = [record for record in manifest.files if record.path not in (SHARD, OTHER_SHARD)]
        other = replace(manifest, files=tuple(sorted([*files, *records], key=lambda record: record.path)))
        changed = run.copy()
        changed.write("MANIFEST.json", other.encode())
        changed.write("COMMIT", replace(run.commit, manifest=sha256_of(other.encode())).encode())
        check_refused(changed, "0000[0-9]-0[01].safetensors.floe of step 3 .*header's tag does not fit")


# The keyring's fields, by somebody who can write a commit that pins them, and by one who cannot


def moved(of: Run, **members: Any) -> dict[str, Any]:
    return {**of.keyring, **members}


def rewrapped(
    run: Run, change: Callable[[list[dict[str, Any]]], None], member: str = "keys"
) -> dict[str, Any]:
    keyring = run.keyring
    change(keyring[member])
    return keyring


def flipped(text: str, position: int) -> str:
    """Wrapped bytes of which one bit is another."""
    import base64

    data = bytearray(base64.b64decode(text))
    data[position] ^= 1
    return base64.b64encode(data).decode()


def flip_wrapped(entries: list[dict[str, Any]], position: int) -> None:
    entries[0]["wrapped"] = flipped(entries[0]["wrapped"], position)


def exchange(entries: list[dict[str, Any]]) -> None:
    entries[0]["wrapped"], entries[1]["wrapped"] = entries[1]["wrapped"], entries[0]["wrapped"]


def rename(entries: list[dict[str, Any]]) -> None:
    """Each key under the name of the file after it."""
    wrapped = [entry["wrapped"] for entry in entries]
    for entry, other in zip(entries, [*wrapped[1:], wrapped[0]], strict=True):
        entry["wrapped"] = other


FIELDS: dict[str, tuple[Callable[[Run], dict[str, Any]], str]] = {
    "run": (lambda run: moved(run, run="run-b"), "says that it is generation 1 of .* of run run-b"),
    "step": (lambda run: moved(run, step=2), "says that it is generation 1 of step 2"),
    "launch": (lambda run: moved(run, launch=1), r"says that it is generation 1 of step 3 \(launch 1"),
    "attempt": (lambda run: moved(run, attempt="f" * 16), "says that it is generation 1 of .*ffff"),
    "generation": (lambda run: moved(run, generation=2, previous=f"sha256:{'0' * 64}"), "is generation 2 of"),
    "kind": (lambda run: moved(run, kind="manifest"), "'kind' should be 'keyring'"),
    "wrap": (lambda run: moved(run, wrap="direct"), "keyring 1"),
    "unknown": (lambda run: moved(run, url="https://example.org"), "unknown member 'url'"),
    "no keys": (lambda run: moved(run, keys=[]), "lacks the key of 00000-00"),
    "a key less": (
        lambda run: rewrapped(run, lambda keys: keys.pop(1) and None),
        "lacks the key of 00000-01",
    ),
    "no recipients": (lambda run: moved(run, recipients=[]), "1 to 64 recipients"),
    "a key's nonce": (
        lambda run: rewrapped(run, lambda keys: flip_wrapped(keys, 0)),
        "wrapped key of 00000-00",
    ),
    "a key's bytes": (
        lambda run: rewrapped(run, lambda keys: flip_wrapped(keys, 20)),
        "wrapped key of 00000-00",
    ),
    "a key's tag": (
        lambda run: rewrapped(run, lambda keys: flip_wrapped(keys, 59)),
        "wrapped key of 00000-00",
    ),
    "exchanged keys": (lambda run: rewrapped(run, exchange), "wrapped key of 00000-00"),
    "renamed keys": (lambda run: rewrapped(run, rename), "wrapped key of 00000-00"),
    "the recipient's nonce": (
        lambda run: rewrapped(run, lambda entries: flip_wrapped(entries, 0), "recipients"),
        "file:kek.key did not wrap this key for this checkpoint",
    ),
    "the recipient's bytes": (
        lambda run: rewrapped(run, lambda entries: flip_wrapped(entries, 30), "recipients"),
        "file:kek.key did not wrap this key for this checkpoint",
    ),
    "the recipient's tag": (
        lambda run: rewrapped(run, lambda entries: flip_wrapped(entries, 59), "recipients"),
        "file:kek.key did not wrap this key for this checkpoint",
    ),
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_the_keyring(field: str, run: Run) -> None:
    change, words = FIELDS[field]
    members = change(run)
    run.put_keyring(members, is_pinned=False)
    check_refused(run, "keyring 1 of step 3 .* the commit pins")
    run.put_keyring(members, is_pinned=True)
    check_refused(run, words)


@pytest.mark.parametrize("where", ELSEWHERE)
@pytest.mark.parametrize("member", ("recipients", "keys", "both"))
def test_wrapped_keys_replayed_from_another_checkpoint(
    where: str, member: str, run: Run, elsewhere: Elsewhere
) -> None:
    """In a keyring that says that it is this checkpoint's, and that the commit pins."""
    other = json.loads(elsewhere(where, KEYRING))
    members = ("recipients", "keys") if member == "both" else (member,)
    run.put_keyring({**run.keyring, **{name: other[name] for name in members}}, is_pinned=True)
    words = "wrapped key of 00000-00" if member == "keys" else "did not wrap this key for this checkpoint"
    check_refused(run, words)


@pytest.mark.parametrize("change", ("exchanged", "replayed", "flipped"))
def test_directly_wrapped_keys_are_bound_to_their_files(change: str, runs: dict[str, Run]) -> None:
    run = runs["direct"].copy()
    keyring = run.keyring
    if change == "exchanged":
        exchange(keyring["keys"])
    elif change == "replayed":
        keyring["keys"] = json.loads(run.read(KEYRING, run.name(2)))["keys"]
    else:
        keyring["keys"][2]["wrapped"][0] = flipped(keyring["keys"][2]["wrapped"][0], 40)
    run.put_keyring(keyring, is_pinned=True)
    check_refused(run, "file:kek.key did not wrap this key for this checkpoint")


def test_a_newer_keyring_that_is_nonsense_changes_nothing(run: Run) -> None:
    """Anybody who can write can add one; the first one is pinned, and opens as before."""
    run.write("keyring/0002.json", b"{}")
    state = template()
    restored = Checkpointer(run.store, security=run.policy).restore(state)
    assert restored is not None
    assert (restored.step, restored.skipped) == (3, ())
    check_whole(restored, state, 33)


# What verifying says


def verified(run: Run, store: Any = None, *, has_keys: bool = True) -> Report:
    sealing = sealing_of(run.policy) if has_keys else None
    return verify(store or run.store, step=3, guard=Guard(sealing=sealing), workers=1)


def pin(run: Run) -> None:
    """What anybody can do who may write: the manifest and the commit say what is there now."""
    manifest = Manifest.decode(run.read("MANIFEST.json"), "manifest")
    files = []
    for record in manifest.files:
        hasher = FileHasher(manifest.algorithm)
        hasher.update(run.read(record.path))
        files.append(replace(record, digest=hasher.digest()))
    data = replace(manifest, files=tuple(files)).encode()
    run.write("MANIFEST.json", data)
    run.write("COMMIT", replace(run.commit, manifest=sha256_of(data)).encode())


@pytest.mark.parametrize("kind", ("blake3", "sha256"))
@pytest.mark.parametrize("file", FILES)
def test_a_wrong_segment_under_a_rewritten_digest_is_damage_to_who_has_a_key(
    file: str, kind: str, runs: dict[str, Run]
) -> None:
    """Whole means that it can be restored: the last segment is opened as well as the one with the header."""
    run = runs[kind].copy()
    run.flip(file, -1)
    pin(run)
    report = verified(run)
    assert report.verdict == "damaged"
    (problem,) = report.problems
    assert (problem.key, problem.kind) == (run.key(file), "damaged")
    assert "segment" in problem.message
    assert report.file_count == verified(runs[kind]).file_count - 1
    # Without a key nobody can tell, and the report says that nothing was opened.
    closed = verified(run, has_keys=False)
    assert closed.verdict == "whole"
    assert all(checkpoint.is_closed for checkpoint in closed.checkpoints)


def with_second(run: Run, /, **members: Any) -> dict[str, Any]:
    first = sha256_of(run.read(KEYRING))
    return {**run.keyring, "generation": 2, "previous": str(first), **members}


STRANGERS: dict[str, tuple[dict[str, Any], str]] = {
    "another run": ({"run": "run-z"}, "its run is 'run-z'"),
    "another step": ({"step": 7}, "its step is 7"),
    "another launch": ({"launch": 7}, "its launch is 7"),
    "another attempt": ({"attempt": "0" * 16}, "its attempt is"),
    "another generation": ({"generation": 3}, "its generation is 3"),
    "a generation that is true": ({"generation": True}, "its generation is True"),
    "another kind": ({"kind": "commit"}, "its kind is 'commit'"),
    "another one before": ({"previous": f"sha256:{'0' * 64}"}, "its previous is"),
    "none before": ({"previous": None}, "its previous is None"),
}


@pytest.mark.parametrize("has_keys", (True, False))
@pytest.mark.parametrize("what", STRANGERS)
def test_a_newer_keyring_that_is_another_s_is_told(what: str, has_keys: bool, run: Run) -> None:
    members, told = STRANGERS[what]
    run.write("keyring/0002.json", canonical.with_self_digest(with_second(run, **members)))
    report = verified(run, has_keys=has_keys)
    (problem,) = report.problems
    assert (problem.key, problem.kind) == (run.key("keyring/0002.json"), "damaged")
    assert told in problem.message
    assert report.checkpoints[0].is_closed is not has_keys


@pytest.mark.parametrize("data", (b"", b"{}", b"[]", b"[" * 10_000, b"rubbish", b'{"a":1}'))
def test_a_newer_keyring_that_is_damaged_is_told_and_the_files_are_opened(data: bytes, run: Run) -> None:
    run.write("keyring/0002.json", data)
    report = verified(run)
    (problem,) = report.problems
    assert (problem.key, problem.kind) == (run.key("keyring/0002.json"), "damaged")
    assert not report.checkpoints[0].is_closed


def test_a_newer_keyring_of_another_format_is_no_verdict(run: Run) -> None:
    run.write("keyring/0002.json", canonical.with_self_digest(with_second(run, format="9.9")))
    report = verified(run)
    assert [problem.kind for problem in report.problems] == ["unsupported"]
    assert report.verdict == "unverified"


def test_what_is_no_keyring_is_unexpected_among_them(run: Run) -> None:
    for name in ("0000.json", "1.json", "0002.json.bak", "0003.json/0003.json"):
        run.contents[f"{run.newest.folder}/keyring/{name}"] = b"{}"
    problems = verified(run).problems
    assert [problem.kind for problem in problems] == ["unexpected"] * 4
    assert f"{run.newest.folder}/keyring/0003.json/" in {problem.key for problem in problems}


def test_a_keyring_that_was_rotated_is_whole_with_the_first_and_without(run: Run) -> None:
    run.write("keyring/0002.json", canonical.with_self_digest(with_second(run)))
    assert verified(run).verdict == "whole"
    run.remove(KEYRING)
    assert verified(run).verdict == "whole"


def test_one_damaged_keyring_is_told_once(run: Run) -> None:
    run.flip(KEYRING, 500)
    (problem,) = verified(run).problems
    assert (problem.key, problem.kind) == (run.key(KEYRING), "damaged")
    assert "COMMIT pins" in problem.message


class Rotating(MemoryStore):
    """A store in which a rotation takes the first keyring away once it was listed."""

    lists = 0

    def list_names(self, prefix: str) -> list[str]:
        names = list(super().list_names(prefix))
        if prefix.endswith("/keyring"):
            self.lists += 1
            with contextlib.suppress(ObjectNotFoundError):
                self.delete(f"{prefix}/0001.json")
        return names


def test_a_keyring_that_a_rotation_takes_away_meanwhile_is_no_damage(run: Run) -> None:
    run.write("keyring/0002.json", canonical.with_self_digest(with_second(run)))
    store = Rotating()
    store.plant(run.contents)
    assert verified(run, store).verdict == "whole"
    assert store.lists >= 2


def test_a_keyring_that_is_listed_and_never_there_is_missing_in_the_end(run: Run) -> None:
    class Listing(MemoryStore):
        def list_names(self, prefix: str) -> list[str]:
            return [*super().list_names(prefix), *(["0002.json"] if prefix.endswith("/keyring") else [])]

    store = Listing()
    store.plant(run.contents)
    (problem,) = verified(run, store).problems
    assert (problem.key, problem.kind) == (run.key("keyring/0002.json"), "missing")


# What says nothing about the bytes


def check_raises(run: Run, store: Any, kind: type[Exception], words: str) -> None:
    """On the newest, by name or not, without going back a checkpoint, and before anything is touched."""
    checkpointer = Checkpointer(store, security=run.policy)
    state = template()
    for read in (
        lambda: checkpointer.restore(state),
        lambda: checkpointer.restore(state, step=3),
        lambda: checkpointer.plan_restore(state),
    ):
        with pytest.raises(kind, match=words):
            read()
        check_untouched(state, ())


def test_a_keyring_that_nobody_here_can_open_is_no_damage(run: Run) -> None:
    keyring = run.keyring
    keyring["recipients"][0]["id"] = "file-" + "0" * 32
    run.put_keyring(keyring, is_pinned=True)
    check_raises(run, run.store, NoKeyError, f"keyring 1 of step 3 .* is for file-{'0' * 32}")


@pytest.mark.parametrize("error", (AccessDeniedError, StoreUnavailableError))
@pytest.mark.parametrize("place", ("keyring", "data/index", "data/00000-01"))
def test_a_store_that_refuses_or_is_out_of_reach_is_no_damage(
    error: type[StoreError], place: str, run: Run
) -> None:
    class Refusing(MemoryStore):
        def check(self, key: str) -> None:
            if f"{run.newest.folder}/{place}" in key:
                raise error(f"{key}: not now")

        def read(self, key: str, *, limit_bytes: int) -> bytes:
            self.check(key)
            return super().read(key, limit_bytes=limit_bytes)

        def open_reader(self, key: str) -> Any:
            self.check(key)
            return super().open_reader(key)

    store = Refusing()
    store.plant(run.contents)
    checkpointer = Checkpointer(store, security=run.policy)
    state = template()
    for step in (None, 3):
        with pytest.raises(error, match="not now"):
            checkpointer.restore(state, step=step)
        assert state["object"].loaded == []


# Several at once


def test_what_is_damaged_in_a_row_is_all_told(run: Run) -> None:
    run.flip(SHARD, 500)
    run.write(STATE, b"", run.name(2))
    state = template()
    restored = Checkpointer(run.store, security=run.policy).restore(state)
    assert restored is not None
    assert restored.step == 1
    assert [step for step, _ in restored.skipped] == [3, 2]
    assert "00000-00.safetensors" in restored.skipped[0][1]
    assert "state.json" in restored.skipped[1][1]
    check_whole(restored, state, 1)


def test_where_none_is_whole_every_reason_is_told_and_what_is_undefined(run: Run) -> None:
    for name in run.names:
        run.write(SHARD, run.read(SHARD, name)[:-1] + b"\0", name)
    assert len(Catalog(run.store).history().commits) == 4
    state = template()
    with pytest.raises(NoWholeCheckpointError) as caught:
        Checkpointer(run.store, security=run.policy).restore(state)
    assert [step for step, _ in caught.value.reasons] == [3, 2, 1]
    assert all("00000-00.safetensors" in reason for _, reason in caught.value.reasons)
    check_untouched(state, caught.value.undefined)
    assert layout.SEALED == ".floe"


class _Joined:
    """An opener of segments of 7 bytes and a tag, which are not sealed at all."""

    segment_bytes = 7

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def stored_range(self, first: int, count: int) -> tuple[int, int]:
        return 8 * first, min(8 * (first + count), self.size_bytes + max(1, -(-self.size_bytes // 7)))

    def open_into(self, first: int, stored: memoryview, target: memoryview) -> int:
        plain = b"".join(bytes(stored[at + 1 : at + 8]) for at in range(0, len(stored), 8))
        target[: len(plain)] = plain
        return len(plain)


@given(st.integers(0, 60), st.integers(0, 70), st.integers(0, 70))
def test_any_range_is_read_whether_its_segments_are_whole_or_cut(size: int, start: int, length: int) -> None:
    plain = bytes(range(1, size + 1))
    stored = b"".join(b"#" + plain[at : at + 7] for at in range(0, max(1, size), 7))
    store = MemoryStore()
    store.put("file", stored)
    buffer = bytearray(length)
    with SealedReader(store.open_reader("file"), _Joined(size)) as reader:
        assert reader.read_into(start, memoryview(buffer)) == len(plain[start : start + length])
    assert buffer == plain[start : start + length].ljust(length, b"\0")
