"""Who can write to the storage, and knows the recipients' public keys, makes nothing that is restored.

The forger here is the strongest one: the true contents are known, and the forged files have the true lengths,
the true names and a keyring of their own, sealed to the very recipients that the policy names. What is
missing is the keys of the files that the manifest pins by their headers. And who writes a checkpoint that
is not sealed at all is not believed either.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from plain_floe import File as FloeFile
from sealed_saves import MIB, Watched, assert_same, file_policy, sealing_of

from strongroom import (
    Checkpointer,
    IntegrityError,
    NoKeyError,
    NoWholeCheckpointError,
    RollbackError,
    StrongroomWriter,
    UnsealedError,
    canonical,
    layout,
)
from strongroom.catalog import Catalog
from strongroom.contents import open_whole
from strongroom.digest import FileHasher, digest_of_bytes, sha256_of
from strongroom.index import Index, ShardFile, decode_index, encode_index
from strongroom.manifest import MANIFEST_BOUNDS, Commit, FileRecord, Manifest
from strongroom.signing import Guard
from strongroom.stores.memory import MemoryStore
from strongroom.verify import verify
from strongroom_cli.main import main
from strongroom_security import Seal, SecurityPolicy
from strongroom_security.envelope import HandOverKey
from strongroom_security.fields import Context, file_aad
from strongroom_security.keyring import Keyring
from strongroom_security.recipients.hpke import create_key_pair

SHARD = "00000-00.safetensors.floe"


def state_of(number: int) -> dict[str, Any]:
    """A shard of two segments; ``v`` lies in the second one."""
    value = float(number)
    return {"a": torch.full((300_000,), value), "v": torch.full((5,), value), "extra": {"epoch": number}}


def template() -> dict[str, Any]:
    return {"a": torch.full((300_000,), 7.0), "v": torch.full((5,), 7.0), "extra": {}}


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> tuple[SecurityPolicy, SecurityPolicy]:
    """Of writers, who have public keys alone; and of a reader, who has a private one besides."""
    folder = tmp_path_factory.mktemp("keys")
    for name, suite in (("one", "x25519"), ("two", "p256")):
        create_key_pair(folder / name, suite)
    recipients = ["hpke:one.pub", "hpke:two.pub"]
    writer = SecurityPolicy(seal=Seal(recipients=recipients, base=folder))
    reader = SecurityPolicy(seal=Seal(recipients=recipients, identities=["hpke:two.key"], base=folder))
    return writer, reader


@pytest.fixture(scope="module")
def pristine(policies: tuple[SecurityPolicy, SecurityPolicy]) -> dict[str, bytes]:
    """Two sealed checkpoints, by a writer who cannot open them."""
    store = MemoryStore()
    with Checkpointer(store, security=policies[0]) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step)).result()
        with pytest.raises(NoKeyError):
            checkpointer.restore(template())
    return store.contents()


class Forger:
    """Writes what it likes in the newest checkpoint's folder."""

    def __init__(self, contents: dict[str, bytes], policies: tuple[SecurityPolicy, SecurityPolicy]) -> None:
        self.store = MemoryStore()
        self.store.plant(contents)
        self.writer, self.reader = policies
        self.name = max(Catalog(self.store).history().commits)
        self.manifest = Manifest.decode(self.read(layout.MANIFEST), "manifest")
        self.context = Context.of(self.manifest.run, self.name)

    def read(self, path: str) -> bytes:
        return self.store.read(layout.data_key(self.name, path), limit_bytes=1 << 28)

    def write(self, path: str, data: bytes) -> None:
        self.store.plant({layout.data_key(self.name, path): data})

    @property
    def commit(self) -> Commit:
        return Commit.decode(self.store.read(self.name.commit_key, limit_bytes=1 << 20), "COMMIT")

    def put_commit(self, **members: Any) -> None:
        self.store.plant({self.name.commit_key: replace(self.commit, **members).encode()})

    def plain(self, path: str) -> bytes:
        """What a file holds: the forger knows the run's state, from wherever."""
        (record,) = (record for record in self.manifest.files if record.path == path)
        unlocked = sealing_of(self.reader).unlock(self.store, self.commit, self.manifest)
        return open_whole(unlocked.opener(record), self.read(path))

    def evil(self, path: str) -> bytes:
        """What it shall hold instead: of a shard other weights, of everything else what it holds."""
        plain = self.plain(path)
        if path != SHARD:
            return plain
        true, false = (torch.full((300_000,), number).numpy().tobytes() for number in (2.0, 666.0))
        assert true in plain
        return plain.replace(true, false)

    def seal(self, *paths: str, header: str = "its own") -> Keyring:
        """Seal files anew under new keys, each as long as before; the keyring for them."""
        seal = sealing_of(self.writer).seal_save(self.manifest.run, self.name, None)
        contents = {path: self.evil(path) for path in paths}
        for record in self.manifest.files:
            sealer = seal.sealer(record.path)
            if record.path in paths:
                plain = contents[record.path]
                sealed = b"".join(map(bytes, sealer.seal([plain], length_bytes=len(plain))))
                assert len(sealed) == record.size_bytes
                assert record.header is not None
                self.write(
                    record.path,
                    sealed if header == "its own" else record.header + sealed[len(record.header) :],
                )
        data = seal.keyring([record.path for record in self.manifest.files], within_s=10)
        return Keyring.decode(data, "the forger's")

    def put_keyring(self, keyring: Keyring, how: str) -> None:
        first = layout.keyring_key(self.name, 1)
        second = layout.keyring_key(self.name, 2)
        old = self.store.read(first, limit_bytes=1 << 20)
        if how.startswith("added"):
            new = replace(keyring, generation=2, previous=sha256_of(old)).encode()
            self.store.plant({second: new})
            if how.endswith("removed"):
                self.store.delete(first)
        elif how != "none":
            self.store.plant({first: keyring.encode()})
            if how == "replaced and pinned":
                self.put_commit(keyring=sha256_of(keyring.encode()))


@pytest.fixture
def forger(pristine: dict[str, bytes], policies: tuple[SecurityPolicy, SecurityPolicy]) -> Forger:
    return Forger(pristine, policies)


READS: dict[str, dict[str, Any]] = {
    "the whole": {},
    "a part in the first segment": {"only": "a"},
    "a part in the last segment": {"only": "v"},
}


def check_refused(forger: Forger, only: dict[str, Any], words: str, *, may_be_touched: bool = False) -> None:
    store = Watched(forger.store)
    checkpointer = Checkpointer(store, security=forger.reader)
    state = template()
    with pytest.raises(IntegrityError, match=words) as caught:
        checkpointer.restore(state, step=2, **only)
    assert not isinstance(caught.value, UnsealedError)
    undefined = getattr(caught.value, "undefined", ())
    for name in ("a", "v"):
        assert (state[name] == 7).all() or name in undefined
        assert may_be_touched or not (state[name] == 666).any()

    state = template()
    restored = checkpointer.restore(state, **only)
    assert restored is not None
    assert restored.step == 1
    assert [step for step, _ in restored.skipped] == [2]
    for name in ("a", "v"):
        assert (state[name] == (1 if not only or only["only"] == name else 7)).all()

    report = verify(forger.store, step=2, guard=Guard(sealing=sealing_of(forger.reader)))
    assert report.verdict == "damaged"


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("header", ("its own", "the pinned one"))
@pytest.mark.parametrize("keyring", ("none", "added", "added, the first one removed", "replaced"))
def test_a_shard_under_a_new_key_with_manifest_and_commit_untouched(
    keyring: str, header: str, read: str, forger: Forger
) -> None:
    forged = forger.seal(SHARD, header=header)
    forger.put_keyring(forged, keyring)
    words = {
        "none": "begin with the header"
        if header == "its own"
        else r"segment [01] \(of 0 to 1\) is not what was",
        "added, the first one removed": "keyring 2 .* tag does not fit.*keyring 1 of step 2.*is absent",
        "replaced": "keyring 1 of step 2 .* the commit pins",
    }
    check_refused(forger, READS[read], words.get(keyring, words["none"]))


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("files", ("the shard", "every file"))
def test_a_new_keyring_that_the_commit_is_made_to_pin(files: str, read: str, forger: Forger) -> None:
    paths = [record.path for record in forger.manifest.files] if files == "every file" else [SHARD]
    forger.put_keyring(forger.seal(*paths), "replaced and pinned")
    # A document is read whole, so that its digest is looked at before any key is asked for.
    words = "00000-00.safetensors.floe of step 2.*header's tag does not fit"
    check_refused(
        forger, READS[read], words if files == "the shard" else "provenance.json of step 2.*stored digest"
    )


def test_a_new_keyring_beside_files_that_are_true_changes_nothing(forger: Forger) -> None:
    """Its keys fit no header that the manifest pins, so those of the first one are used."""
    forger.put_keyring(forger.seal(), "added")
    state = template()
    restored = Checkpointer(forger.store, security=forger.reader).restore(state)
    assert restored is not None
    assert (restored.step, restored.skipped) == (2, ())
    assert (state["a"] == 2).all()


def test_the_partial_reads_of_these_tests_are_partial(forger: Forger) -> None:
    store = Watched(forger.store)
    checkpointer = Checkpointer(store, security=forger.reader)
    for only, most in (("a", 2 * MIB), ("v", MIB // 2)):
        store.forget()
        checkpointer.restore(template(), only=only, step=2)
        assert 0 < store.shard_bytes_read < most


def test_who_holds_a_file_s_key_deceives_no_read_of_the_whole(forger: Forger) -> None:
    """A recipient that may open and should not write: with the true key and the true header."""
    unlocked = sealing_of(forger.reader).unlock(forger.store, forger.commit, forger.manifest)
    (record,) = (record for record in forger.manifest.files if record.path == SHARD)
    one_off = HandOverKey.draw()
    handed = one_off.open(unlocked.hand_over(one_off.public, [SHARD]), forger.context)
    assert handed is not None
    assert record.header is not None
    aad = file_aad(replace(forger.context, path=SHARD))
    file = FloeFile(handed.keys[SHARD].reveal(), aad, record.header[10:42], MIB)
    assert file.header == record.header
    evil = forger.evil(SHARD)
    pieces = [evil[: MIB - 32], evil[MIB - 32 :]]
    sealed = [file.encrypt_segment(piece, at, at == 1, os.urandom) for at, piece in enumerate(pieces)]
    forger.write(SHARD, b"".join([record.header, *sealed]))
    words = "00000-00.safetensors of step 2.*stored digest .* is not the manifest's"
    check_refused(forger, {}, words, may_be_touched=True)


# No silent downgrade


def unseal(forger: Forger, *, pins_keyring: bool, is_mixed: bool = False) -> None:
    """Rewrite the newest checkpoint as one that was never sealed, with a manifest and a commit that fit."""
    records = []
    for number, record in enumerate(forger.manifest.files):
        if is_mixed and number:
            records.append(record)
            continue
        plain = forger.evil(record.path)
        path = record.plain_path
        if path == layout.INDEX:
            index, bound = decode_index(plain, "index")
            hasher = FileHasher("blake3")
            hasher.update(forger.evil(SHARD))
            hasher.digest()  # which takes the last block in
            shards = [ShardFile(SHARD.removesuffix(".floe"), hasher.block_digests)]
            plain = encode_index(Index(index.tensors.values(), shards, index.aliases), bound)
        forger.write(path, plain)
        records.append(FileRecord(path=path, size_bytes=len(plain), digest=digest_of_bytes("blake3", plain)))
    for record in set(forger.manifest.files) - set(records):
        forger.store.delete(layout.data_key(forger.name, record.path))
    manifest = replace(forger.manifest, files=tuple(sorted(records, key=lambda record: record.path)))
    forger.write(layout.MANIFEST, manifest.encode())
    pins = {} if pins_keyring else {"keyring": None}
    forger.put_commit(manifest=sha256_of(manifest.encode()), size_bytes=manifest.size_bytes, **pins)
    if not pins_keyring:
        forger.store.delete_tree(f"{forger.name.folder}/{layout.KEYRINGS}")


def test_a_checkpoint_that_was_rewritten_as_unsealed_is_refused(forger: Forger) -> None:
    unseal(forger, pins_keyring=False)
    # Whoever asks for nothing gets what the forger made.
    restored = Checkpointer(forger.store).restore(step=2)
    assert restored is not None
    with pytest.raises(UnsealedError, match=r"step 2 .* is not sealed, and the policy has \[seal\]"):
        Checkpointer(forger.store, security=forger.reader).restore(template(), step=2)
    state = template()
    restored = Checkpointer(forger.store, security=forger.reader).restore(state)
    assert restored is not None
    assert restored.step == 1
    assert [(step, "is not sealed" in reason) for step, reason in restored.skipped] == [(2, True)]
    assert (state["a"] == 1).all()


@pytest.mark.parametrize(
    ("pins_keyring", "is_mixed", "words"),
    (
        (True, False, "do not agree on whether the checkpoint is sealed"),
        (True, True, "1 of 4 files|[34] of 4 files are sealed; all must be, or none"),
        (False, True, "files are sealed; all must be, or none"),
    ),
)
def test_a_checkpoint_that_is_half_unsealed_is_no_checkpoint(
    pins_keyring: bool, is_mixed: bool, words: str, forger: Forger
) -> None:
    unseal(forger, pins_keyring=pins_keyring, is_mixed=is_mixed)
    check_refused(forger, {}, words)


def test_names_that_say_one_thing_and_headers_that_say_another_are_refused(forger: Forger) -> None:
    """A manifest that calls sealed files unsealed, or the other way round."""
    for change in (
        lambda record: {"path": record.plain_path, "digest": str(record.digest), "size": record.size_bytes},
        lambda record: {**record.to_json(), "path": record.plain_path},
        lambda record: {key: value for key, value in record.to_json().items() if key != "header"},
    ):
        forged = Forger(forger.store.contents(), (forger.writer, forger.reader))
        members = canonical.decode(forged.read(layout.MANIFEST), "manifest", MANIFEST_BOUNDS)
        assert isinstance(members, dict)
        members["files"] = [change(record) for record in forged.manifest.files]
        data = canonical.encode(members)
        forged.write(layout.MANIFEST, data)
        forged.put_commit(manifest=sha256_of(data))
        check_refused(forged, {}, "must have a header if, and only if|do not agree on whether")


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A run whose steps 2 and 3 are sealed, and 1 and 4 are not; each goes on from the one before."""
    root = tmp_path / "run"
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state_of(1)).result()
    with Checkpointer(
        root, security=file_policy(tmp_path, seal='unsealed = ["step-000000000001-0001-*"]')
    ) as sealing:
        sealing.restore()
        for step in (2, 3):
            sealing.save(step, state_of(step)).result()
    # Who cannot open the newest can go on from it by name.
    no_dist = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is .*unavailable")
        dcp.save(state_of(4), storage_writer=StrongroomWriter(root, step=4), **no_dist)
    return root


def folder_of(root: Path, step: int) -> str:
    (found,) = root.glob(f"step-{step:012d}-*")
    return found.name


def test_an_unsealed_checkpoint_is_passed_over_and_named_by_step_refused(mixed: Path, tmp_path: Path) -> None:
    checkpointer = Checkpointer(mixed, security=file_policy(tmp_path))
    state = template()
    for read in (checkpointer.restore, checkpointer.plan_restore):
        with pytest.raises(UnsealedError, match=rf"step 4 .*unsealed = \['{folder_of(mixed, 4)}'\]"):
            read(state, step=4)
    assert (state["a"] == 7).all()
    found = checkpointer.restore(state)
    assert found is not None
    assert found.step == 3
    ((step, reason),) = found.skipped
    assert (step, "is not sealed" in reason) == (4, True)
    assert_same(state["a"], state_of(3)["a"])
    plan = checkpointer.plan_restore(template())
    assert plan is not None
    assert plan.step == 3


def test_where_no_checkpoint_is_sealed_none_is_restored(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step)).result()
    checkpointer = Checkpointer(root, security=file_policy(tmp_path))
    state = template()
    with pytest.raises(NoWholeCheckpointError, match=r"step 2: .*is not sealed.*step 1: .*is not sealed"):
        checkpointer.restore(state)
    with pytest.raises(RollbackError):
        Checkpointer(root, security=file_policy(tmp_path), max_fallback=0).restore(state)
    assert (state["a"] == 7).all()
    with pytest.raises(NoWholeCheckpointError, match="is not sealed"):
        Checkpointer(tmp_path / "new", security=file_policy(tmp_path), init_from=root).restore(state)


def exact(folder: str) -> str:
    return folder


def by_launch(folder: str) -> str:
    return f"step-*-{folder[18:22]}-*"


@pytest.mark.parametrize("pattern", (exact, by_launch))
def test_an_unsealed_checkpoint_is_restored_where_the_policy_names_it(
    pattern: Callable[[str], str], mixed: Path, tmp_path: Path
) -> None:
    """How a run is taken up that was not sealed before: what is saved from then on is."""
    policy = file_policy(tmp_path, seal=f'unsealed = ["{pattern(folder_of(mixed, 4))}"]')
    with Checkpointer(mixed, security=policy) as checkpointer:
        state = template()
        restored = checkpointer.restore(state)
        assert restored is not None
        assert (restored.step, restored.skipped) == (4, ())
        assert_same(state["a"], state_of(4)["a"])
        with pytest.raises(UnsealedError):
            checkpointer.restore(template(), step=1)
        checkpointer.restore(state)
        checkpointer.save(5, state_of(5)).result()
    restored = Checkpointer(mixed, security=file_policy(tmp_path)).restore()
    assert restored is not None
    assert (restored.step, restored.skipped) == (5, ())


def test_a_name_on_the_list_excuses_nothing_but_the_lack_of_a_seal(mixed: Path, tmp_path: Path) -> None:
    policy = file_policy(tmp_path, seal=f'unsealed = ["{folder_of(mixed, 4)}", "{folder_of(mixed, 3)}"]')
    shard = mixed / folder_of(mixed, 4) / "data" / "00000-00.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(IntegrityError, match="do not have the digest"):
        Checkpointer(mixed, security=policy).restore(template(), step=4)
    # And a sealed one is opened, whatever the list says.
    with pytest.raises(NoKeyError):
        Checkpointer(
            mixed, security=file_policy(tmp_path / "other", seal='unsealed = ["step-00000000000*-0001-*"]')
        ).restore(step=3)


def test_the_command_calls_an_unsealed_checkpoint_damaged_where_the_policy_demands_a_seal(
    mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file_policy(tmp_path)
    security = ["--security", str(tmp_path / "strongroom.toml")]
    for command in (["show", str(mixed), "4"], ["plan", str(mixed), "4", "--ranks", "1"]):
        assert main([*command, *security]) == 1
        assert "step 4" in capsys.readouterr().err
    assert main(["verify", str(mixed), "4", *security]) == 1
    assert "is not sealed" in capsys.readouterr().out
    assert main(["verify", str(mixed), "3", *security]) == 0
    assert main(["verify", str(mixed), "4"]) == 0
    file_policy(tmp_path, seal=f'unsealed = ["{folder_of(mixed, 4)}"]')
    assert main(["verify", str(mixed), "4", *security]) == 0
