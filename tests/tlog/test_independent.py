"""Against implementations that share no code with this one: each reads what the other writes.

``pymerkle`` (the tree of RFC 9162) runs on every Python that is tested. ``aics-tlog`` (C2SP tlog-tiles,
signed-note, tlog-checkpoint and tlog-cosignature) needs Python 3.12, and is passed over on older ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from strongroom.stores.local import LocalStore
from strongroom_security.tlog.checkpoints import Checkpoint
from strongroom_security.tlog.merkle import (
    GrowingTree,
    check_inclusion,
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    leaf_hashes,
)
from strongroom_security.tlog.notekeys import KeyType, NoteSigner, VerifierKey
from strongroom_security.tlog.notes import Note, NoteSignature
from strongroom_security.tlog.reading import TreeReader
from strongroom_security.tlog.tiles import Edge
from strongroom_security.tlog.witnesses import LogKeys, WitnessPolicy, open_checkpoint
from strongroom_security.tlog.writing import grow, write_growth

ORIGIN = "example.com/log"
LOG_KEY = Ed25519PrivateKey.from_private_bytes(b"\x07" * 32)
WITNESS_KEY = Ed25519PrivateKey.from_private_bytes(b"\x08" * 32)
ENTRIES = [b"entry %d" % number for number in range(700)]


def tree() -> GrowingTree:
    found = GrowingTree()
    found.append(leaf_hashes(ENTRIES))
    return found


def test_pymerkle_makes_the_same_trees_and_proofs() -> None:
    pymerkle: Any = pytest.importorskip("pymerkle")
    theirs = pymerkle.InmemoryTree(algorithm="sha256")
    ours = tree()
    for entry in ENTRIES[:70]:
        theirs.append_entry(entry)
    for size in (1, 2, 3, 7, 8, 31, 32, 33, 70):
        assert theirs.get_root(size) == ours.root(size)
        for index in range(size):
            leaf, *path = theirs.prove_inclusion(index + 1, size).serialize()["path"]
            # Theirs lie in the order of the tree, with the leaf among them.
            found = {each.hex() for each in inclusion_proof(ours.node, index, size)}
            assert {leaf, *path} == found | {leaf_hash(ENTRIES[index]).hex()}


@pytest.fixture
def aics() -> Any:
    return pytest.importorskip("aics_tlog")


def write(folder: Path, steps: tuple[int, ...]) -> Checkpoint:
    store, edge, size = LocalStore(folder), Edge(), 0
    for step in steps:
        growth, files = grow(edge, ENTRIES[size - size % 256 : size], ENTRIES[size : size + step])
        write_growth(store, files)
        edge, size = growth.edge, size + step
    return Checkpoint(origin=ORIGIN, size=size, root=edge.root())


def test_another_implementation_reads_our_tiles_and_verifies_our_tree(aics: Any, tmp_path: Path) -> None:
    head = write(tmp_path, (3, 254, 400))
    reader = aics.FileSystemTileReader(tmp_path / "tlog")
    assert aics.tree_root_from_tiles(reader, head.size) == head.root
    verified = aics.VerifiedTileReader(reader, head.size, head.root)
    verified.check_root()
    ours = tree()
    for index in (0, 255, 256, 656):
        assert verified.entry(index) == ENTRIES[index]
        path = aics.inclusion_proof_from_tiles(reader, index, head.size)
        assert path == inclusion_proof(ours.node, index, head.size)
        assert aics.verify_inclusion(leaf_hash(ENTRIES[index]), index, head.size, path, head.root)
    for old in (1, 256, 300, 657):
        path = aics.consistency_proof_from_tiles(reader, old, head.size)
        assert path == consistency_proof(ours.node, old, head.size)
        assert aics.verify_consistency(old, head.size, ours.root(old), head.root, path)


def test_we_read_the_tiles_of_another_implementation(aics: Any, tmp_path: Path) -> None:
    aics.TileWriter(ENTRIES).write_to(tmp_path / "tlog")
    head = Checkpoint(origin=ORIGIN, size=700, root=aics.MerkleTree(ENTRIES).root())
    reader = TreeReader(LocalStore(tmp_path), head)
    assert [entry for _, entry in reader.walk()] == ENTRIES
    check_inclusion(
        leaf=leaf_hash(ENTRIES[300]),
        index=300,
        size=700,
        proof=aics.MerkleTree(ENTRIES).inclusion_proof(300),
        root=head.root,
    )
    assert {path.relative_to(tmp_path) for path in (tmp_path / "tlog").rglob("*") if path.is_file()} == {
        Path("tlog") / name for name in grow(Edge(), (), ENTRIES)[1]
    }


def test_heads_signed_here_are_verified_there_and_the_other_way_round(aics: Any) -> None:
    head = Checkpoint(origin=ORIGIN, size=700, root=tree().root())
    signer = NoteSigner(ORIGIN, LOG_KEY)
    vkey = aics.parse_vkey(str(signer.key))
    note = Note(text=head.text(), signatures=(signer.sign(head.text()),))
    parsed = aics.parse_note(note.to_bytes())
    assert aics.verify_note(parsed, [vkey])
    assert aics.parse_checkpoint(parsed.text).root == head.root

    theirs = aics.sign_checkpoint(aics.parse_checkpoint(head.text()), LOG_KEY, ORIGIN)
    log = LogKeys(origin=ORIGIN, keys=(signer.key,))
    assert open_checkpoint(theirs.to_bytes(), log, "the head").head == head
    assert aics.format_vkey(aics.vkey_from_ed25519(ORIGIN, LOG_KEY.public_key())) == str(signer.key)


def test_cosignatures_made_there_are_verified_here(aics: Any) -> None:
    head = Checkpoint(origin=ORIGIN, size=700, root=tree().root())
    signer = NoteSigner(ORIGIN, LOG_KEY)
    public = WITNESS_KEY.public_key().public_bytes_raw()
    key = VerifierKey(name="witness.example/w1", type=KeyType.COSIGNATURE, public=public)
    assert str(key) == aics.format_vkey(aics.cosignature_vkey("witness.example/w1", WITNESS_KEY.public_key()))
    stamp_s = 1_700_000_000
    blob, _ = aics.sign_cosignature(WITNESS_KEY, "witness.example/w1", stamp_s, ORIGIN, head.size, head.root)
    cosignature = NoteSignature(name=key.name, key_id=key.key_id, value=blob)
    note = Note(text=head.text(), signatures=(signer.sign(head.text()), cosignature))
    log = LogKeys(origin=ORIGIN, keys=(signer.key,), witnesses=WitnessPolicy(keys=(key,), required=1))
    assert open_checkpoint(note.to_bytes(), log, "the head").cosigned[0].stamp_s == stamp_s
