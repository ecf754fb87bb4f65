"""The tree of RFC 6962: known trees, every proof of every small tree, and no proof that was changed."""

from __future__ import annotations

import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.errors import ConfigError, IntegrityError
from strongroom_security.tlog.merkle import (
    EMPTY_ROOT,
    GrowingTree,
    check_consistency,
    check_inclusion,
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    leaf_hashes,
    root_of,
)

# Inputs and roots of certificate-transparency-go's reference tree (merkletree/tree_test.go, trillian's
# testonly/reference.go): the leaves, and the root of each tree of the first n of them.
INPUTS = ("", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f")
ROOTS = (
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
)
LIMIT = 260


def naive_root(leaves: list[bytes]) -> bytes:
    """MTH, as RFC 6962, 2.1 writes it down."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    left, right = naive_root(leaves[:split]), naive_root(leaves[split:])
    return hashlib.sha256(b"\x01" + left + right).digest()


def naive_path(index: int, leaves: list[bytes]) -> list[bytes]:
    """PATH, as RFC 6962, 2.1.1 writes it down."""
    if len(leaves) == 1:
        return []
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    if index < split:
        return [*naive_path(index, leaves[:split]), naive_root(leaves[split:])]
    return [*naive_path(index - split, leaves[split:]), naive_root(leaves[:split])]


def naive_proof(old: int, leaves: list[bytes], is_whole: bool = True) -> list[bytes]:
    """SUBPROOF, as RFC 6962, 2.1.2 writes it down."""
    if old == len(leaves):
        return [] if is_whole else [naive_root(leaves)]
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    if old <= split:
        return [*naive_proof(old, leaves[:split], is_whole), naive_root(leaves[split:])]
    return [*naive_proof(old - split, leaves[split:], False), naive_root(leaves[:split])]


LEAVES = [b"entry %d" % number for number in range(LIMIT)]


def tree_of(leaves: list[bytes]) -> GrowingTree:
    tree = GrowingTree()
    tree.append(leaf_hashes(leaves))
    return tree


def test_the_reference_trees_have_their_roots() -> None:
    leaves = [bytes.fromhex(text) for text in INPUTS]
    tree = tree_of(leaves)
    for count, root in enumerate(ROOTS, 1):
        assert root_of(leaf_hashes(leaves[:count])).hex() == root
        assert tree.root(count).hex() == root
    assert EMPTY_ROOT.hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_the_reference_proofs_are_made_and_hold() -> None:
    # RFC 6962, 2.1.3: the tree of seven leaves d0 to d6, in the letters of its figure.
    leaves = [bytes([number]) for number in range(7)]
    a, b, c, d, e, f = (leaf_hash(leaf) for leaf in leaves[:6])
    tree = tree_of(leaves)
    g = root_of(a + b)
    h = root_of(c + d)
    i = root_of(e + f)
    j = leaf_hash(leaves[6])
    k, ell = root_of(g + h)[:0] + tree.root(4), root_of(leaf_hashes(leaves[4:]))
    assert inclusion_proof(tree.node, 0, 7) == [b, h, ell]
    assert inclusion_proof(tree.node, 3, 7) == [c, g, ell]
    assert inclusion_proof(tree.node, 4, 7) == [f, j, k]
    assert inclusion_proof(tree.node, 6, 7) == [i, k]
    assert consistency_proof(tree.node, 3, 7) == [c, d, g, ell]
    assert consistency_proof(tree.node, 4, 7) == [ell]
    assert consistency_proof(tree.node, 6, 7) == [i, j, k]


def test_every_tree_grown_in_any_steps_is_the_one_that_the_rfc_defines() -> None:
    for step in (1, 2, 3, 7, 64):
        tree = GrowingTree()
        for begin in range(0, LIMIT, step):
            tree.append(leaf_hashes(LEAVES[begin : begin + step]))
        for size in range(LIMIT + 1):
            assert tree.root(size) == naive_root(LEAVES[:size]) == root_of(leaf_hashes(LEAVES[:size]))


def test_every_inclusion_proof_of_every_small_tree_holds_and_is_the_rfcs() -> None:
    tree = tree_of(LEAVES)
    for size in range(1, LIMIT + 1):
        root = tree.root(size)
        for index in range(size):
            proof = inclusion_proof(tree.node, index, size)
            if size < 40:
                assert proof == naive_path(index, LEAVES[:size])
            check_inclusion(leaf=leaf_hash(LEAVES[index]), index=index, size=size, proof=proof, root=root)


def test_every_consistency_proof_of_every_small_tree_holds_and_is_the_rfcs() -> None:
    tree = tree_of(LEAVES)
    roots = [tree.root(size) for size in range(LIMIT + 1)]
    for size in range(LIMIT + 1):
        for old in range(size + 1):
            proof = consistency_proof(tree.node, old, size)
            if old > 0 and size < 40:
                assert proof == naive_proof(old, LEAVES[:size])
            check_consistency(old_size=old, old_root=roots[old], size=size, root=roots[size], proof=proof)


def altered(proof: list[bytes]) -> list[list[bytes]]:
    """A proof with each hash changed, left out, doubled, swapped with the next, and with one more."""
    found = [[*proof, bytes(32)], [bytes(32), *proof]]
    for at, each in enumerate(proof):
        changed = bytes([each[0] ^ 1]) + each[1:]
        found += [
            [*proof[:at], changed, *proof[at + 1 :]],
            [*proof[:at], *proof[at + 1 :]],
            [*proof[:at], each, *proof[at:]],
        ]
        if at + 1 < len(proof):
            found.append([*proof[:at], proof[at + 1], each, *proof[at + 2 :]])
    return found


def test_no_inclusion_proof_that_was_altered_holds() -> None:
    tree = tree_of(LEAVES)
    for size in (1, 2, 3, 6, 7, 8, 13, 33):
        root = tree.root(size)
        for index in range(size):
            proof, leaf = inclusion_proof(tree.node, index, size), leaf_hash(LEAVES[index])
            wrong = [(leaf, index, size, each, root) for each in altered(proof)]
            wrong += [
                (leaf_hash(LEAVES[index] + b"!"), index, size, proof, root),
                (leaf, index, size, proof, bytes(32)),
                (leaf, size, size, proof, root),
                (leaf, -1, size, proof, root),
            ]
            wrong += [(leaf, other, size, proof, root) for other in range(size) if other != index]
            for parts in wrong:
                with pytest.raises(IntegrityError):
                    check_inclusion(
                        leaf=parts[0], index=parts[1], size=parts[2], proof=parts[3], root=parts[4]
                    )


def test_no_consistency_proof_that_was_altered_holds() -> None:
    tree = tree_of(LEAVES)
    for size, old in itertools.product((1, 2, 3, 6, 7, 8, 13, 33), repeat=2):
        if old > size:
            continue
        old_root, root = tree.root(old), tree.root(size)
        proof = consistency_proof(tree.node, old, size)
        wrong = [(old, old_root, size, root, each) for each in altered(proof)]
        wrong += [(old, bytes(32), size, root, proof), (size + 1, old_root, size, root, proof)]
        wrong += [(-1, old_root, size, root, proof)]
        if old:
            wrong.append((old, old_root, size, bytes(32), proof))
        for parts in wrong:
            with pytest.raises(IntegrityError):
                check_consistency(
                    old_size=parts[0], old_root=parts[1], size=parts[2], root=parts[3], proof=parts[4]
                )


def test_a_proof_is_asked_of_what_the_tree_has() -> None:
    tree = tree_of(LEAVES)
    for index, size in ((0, 0), (5, 5), (-1, 3)):
        with pytest.raises(ConfigError):
            inclusion_proof(tree.node, index, size)
    with pytest.raises(ConfigError):
        consistency_proof(tree.node, 4, 3)


@given(st.integers(1, 5_000), st.data())
def test_proofs_of_larger_trees_hold(size: int, data: st.DataObject) -> None:
    tree = _large()
    index, old = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size))
    root = tree.root(size)
    leaf = leaf_hash(b"%d" % index)
    check_inclusion(
        leaf=leaf, index=index, size=size, proof=inclusion_proof(tree.node, index, size), root=root
    )
    proof = consistency_proof(tree.node, old, size)
    check_consistency(old_size=old, old_root=tree.root(old), size=size, root=root, proof=proof)


_TREES: list[GrowingTree] = []


def _large() -> GrowingTree:
    if not _TREES:
        _TREES.append(tree_of([b"%d" % number for number in range(5_000)]))
    return _TREES[0]
