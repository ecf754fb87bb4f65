"""Tiles by C2SP tlog-tiles: their names, widths and bytes, and a tree in a store that is read back."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.errors import ConfigError, FormatError, IntegrityError
from strongroom.stores.memory import MemoryStore
from strongroom_security.tlog.checkpoints import Checkpoint
from strongroom_security.tlog.merkle import (
    EMPTY_ROOT,
    GrowingTree,
    check_consistency,
    check_inclusion,
    leaf_hash,
    leaf_hashes,
    root_of,
)
from strongroom_security.tlog.reading import TreeReader
from strongroom_security.tlog.tiles import (
    ENTRIES,
    Edge,
    TileName,
    decode_bundle,
    encode_bundle,
    parse_tile_name,
    tile_name,
    width_at,
)
from strongroom_security.tlog.writing import create_same, grow, write_growth


def entries_of(count: int) -> list[bytes]:
    return [b"entry %d" % number for number in range(count)]


# ------------------------------------------------------------------------------------------------------ names


def test_names_are_those_of_the_specification() -> None:
    # tlog-tiles, "Merkle Tree": index 1234067 will be encoded as x001/x234/067.
    assert tile_name(0, 1234067) == "tile/0/x001/x234/067"
    assert tile_name(0, 273, 112) == "tile/0/273.p/112"
    assert tile_name(ENTRIES, 0) == "tile/entries/000"
    assert tile_name(ENTRIES, 1000, 1) == "tile/entries/x001/000.p/1"


def test_a_tree_of_70000_entries_has_the_tiles_that_the_specification_counts() -> None:
    # tlog-tiles, "Partial Tiles".
    growth = Edge().extended(b"\x00" * 32 * 70_000)
    widths = [(tile.level, len(tile.data) // 32) for tile in growth.tiles]
    assert widths.count((0, 256)) == 273
    assert [each for each in widths if each[0] == 0 and each[1] < 256] == [(0, 112)]
    assert [each for each in widths if each[0] == 1] == [(1, 256), (1, 17)]
    assert [each for each in widths if each[0] == 2] == [(2, 1)]
    # "a tree of size 256 will be represented by a full level 0 tile and a partial level 1 tile of width 1".
    assert [tile.name for tile in Edge().extended(b"\x00" * 32 * 256).tiles] == [
        "tile/0/000",
        "tile/1/000.p/1",
    ]


@given(st.integers(-1, 63), st.integers(0, 10**18), st.integers(1, 256))
def test_a_name_says_which_tile_it_is(level: int, index: int, width: int) -> None:
    name = tile_name(level, index, width)
    assert parse_tile_name(name) == TileName(level=level, index=index, width=width)


@pytest.mark.parametrize(
    "name",
    (
        "tile/0/1",
        "tile/0/x000/001",
        "tile/0/001/002",
        "tile/00/000",
        "tile/64/000",
        "tile/0/000.p/256",
        "tile/0/000.p/0",
        "tile/0/000.p/01",
        "tile/0/0000",
        "tile/entries/000.p/",
        "tile/-1/000",
        "tile/0/000/",
        "checkpoint",
        "",
    ),
)
def test_a_name_that_is_spelled_otherwise_is_none(name: str) -> None:
    with pytest.raises(FormatError):
        parse_tile_name(name)


@given(
    st.text(max_size=40)
    | st.from_regex(r"tile/(entries|[0-9]+)/(x[0-9]+/)*[0-9]+(\.p/[0-9]+)?", fullmatch=True)
)
def test_any_name_is_one_or_refused(name: str) -> None:
    try:
        found = parse_tile_name(name)
    except FormatError:
        return
    assert tile_name(found.level, found.index, found.width) == name


def test_what_is_no_tile_has_no_name() -> None:
    for level, index, width in ((64, 0, 1), (-2, 0, 1), (0, -1, 1), (0, 0, 0), (0, 0, 257)):
        with pytest.raises(ConfigError):
            tile_name(level, index, width)


# ---------------------------------------------------------------------------------------------------- bundles


@given(st.lists(st.binary(max_size=300), max_size=256))
def test_a_bundle_holds_its_entries(entries: list[bytes]) -> None:
    data = encode_bundle(entries)
    assert decode_bundle(data, len(entries), "a bundle") == entries
    for wrong in (len(entries) + 1, len(entries) - 1):
        with pytest.raises(FormatError):
            decode_bundle(data, wrong, "a bundle")


def test_lengths_are_two_bytes_the_higher_one_first() -> None:
    assert encode_bundle([b"", b"ab"]) == b"\x00\x00\x00\x02ab"
    longest = b"x" * 65535
    assert decode_bundle(encode_bundle([longest]), 1, "a bundle") == [longest]
    with pytest.raises(FormatError):
        encode_bundle([longest + b"x"])
    with pytest.raises(FormatError):
        encode_bundle([b""] * 257)


@given(st.binary(max_size=600), st.integers(0, 256))
def test_any_bytes_are_a_bundle_or_refused(data: bytes, count: int) -> None:
    try:
        assert encode_bundle(decode_bundle(data, count, "a bundle")) == data
    except FormatError:
        return


# --------------------------------------------------------------------------------------------------- the edge


def test_an_edge_has_the_root_of_its_tree_however_it_grew() -> None:
    rng = random.Random(7)
    hashes = leaf_hashes(entries_of(3_000))
    edge, size = Edge(), 0
    while size < 3_000:
        step = min(3_000 - size, rng.choice((1, 2, 5, 255, 256, 257, 700)))
        edge = edge.extended(hashes[size * 32 : (size + step) * 32]).edge
        size += step
        assert edge.size == size
        assert edge.root() == root_of(hashes[: size * 32])
    assert Edge().root() == EMPTY_ROOT


def test_an_edge_of_another_width_than_its_size_has_is_refused() -> None:
    for size, tiles in ((1, ()), (0, (b"",)), (256, (b"",)), (3, (b"\x00" * 64,)), (1, (b"\x00" * 33,))):
        with pytest.raises(FormatError):
            Edge(size=size, tiles=tiles)


# ------------------------------------------------------------------------------------------------- in a store


def written(steps: list[int]) -> tuple[MemoryStore, list[Checkpoint], list[bytes]]:
    store, edge, entries = MemoryStore(), Edge(), entries_of(sum(steps))
    heads, size = [], 0
    for step in steps:
        tail = entries[size - size % 256 : size]
        growth, files = grow(edge, tail, entries[size : size + step])
        write_growth(store, files)
        edge, size = growth.edge, size + step
        heads.append(Checkpoint(origin="example.com/log", size=size, root=edge.root()))
    return store, heads, entries


def test_a_tree_that_grew_is_read_back_at_each_of_its_sizes_with_all_its_proofs() -> None:
    store, heads, entries = written([1, 254, 1, 1, 255, 300, 200])
    whole = GrowingTree()
    whole.append(leaf_hashes(entries))
    for head in heads:
        reader = TreeReader(store, head)
        assert [entry for _, entry in reader.walk()] == entries[: head.size]
        assert list(reader.walk(head.size - 1)) == [(head.size - 1, entries[head.size - 1])]
        for index in {0, head.size // 2, head.size - 1, min(255, head.size - 1)}:
            assert reader.entry(index) == entries[index]
            proof = reader.inclusion_proof(index)
            leaf = leaf_hash(entries[index])
            check_inclusion(leaf=leaf, index=index, size=head.size, proof=proof, root=head.root)
        for old in (before for before in heads if before.size <= head.size):
            assert reader.root_at(old.size) == old.root == whole.root(old.size)
            check_consistency(
                old_size=old.size,
                old_root=old.root,
                size=head.size,
                root=head.root,
                proof=reader.consistency_proof(old.size),
            )


def test_what_is_written_again_is_the_same_and_what_differs_is_refused() -> None:
    store, _, entries = written([300])
    before = store.contents()
    _, files = grow(Edge(), (), entries)
    write_growth(store, files)
    assert store.contents() == before
    with pytest.raises(IntegrityError, match="other bytes"):
        create_same(store, "tlog/tile/0/000", b"x" * 8192)


def test_partial_tiles_may_be_removed_once_the_full_one_stands() -> None:
    store, heads, entries = written([100, 200])
    for key in store.contents():
        if re.search(r"000\.p/100$", key):
            store.delete(key)
    reader = TreeReader(store, heads[0])
    assert [entry for _, entry in reader.walk()] == entries[:100]


def test_every_file_that_is_changed_cut_or_removed_is_noticed_by_who_reads_it() -> None:
    store, heads, _ = written([66_000])
    head = heads[-1]
    keys = list(store.contents())
    chosen = [key for key in keys if "/0/" not in key and "entries" not in key]
    chosen += [key for key in keys if key.endswith(("/0/000", "/0/x000/257.p/208", "/entries/000"))]
    chosen += [key for key in keys if ".p/" in key]
    for key in sorted(set(chosen)):
        data = store.contents()[key]
        for change in (data[:-1] + bytes([data[-1] ^ 1]), data[:-1], data + b"\x00", b""):
            other = MemoryStore()
            other.plant({**store.contents(), key: change})
            with pytest.raises(IntegrityError):
                _read_some(TreeReader(other, head))
        other = MemoryStore()
        other.plant({each: found for each, found in store.contents().items() if each != key})
        with pytest.raises(IntegrityError):
            _read_some(TreeReader(other, head))


def _read_some(reader: TreeReader) -> None:
    """The first entries, the last ones, and a proof that goes through every level."""
    reader.entries(0)
    reader.entries(reader.size // 256)
    reader.inclusion_proof(0)
    reader.inclusion_proof(reader.size - 1)


def test_another_root_or_size_than_the_tree_has_is_noticed() -> None:
    store, heads, _ = written([300, 20])
    for size, root in (
        (320, heads[0].root),
        (300, heads[1].root),
        (319, heads[1].root),
        (321, heads[1].root),
    ):
        with pytest.raises(IntegrityError):
            TreeReader(store, Checkpoint(origin="o", size=size, root=root)).edge()
    reader = TreeReader(store, heads[1])
    for index in (-1, 320, 10**9):
        with pytest.raises(IntegrityError):
            reader.entry(index)


def test_a_proof_from_tiles_reads_a_tile_a_level() -> None:
    store, heads, _ = written([66_000])
    reads: list[str] = []

    class Counting(MemoryStore):
        def read(self, key: str, *, limit_bytes: int) -> bytes:
            reads.append(key)
            return store.read(key, limit_bytes=limit_bytes)

    reader = TreeReader(Counting(), heads[-1])
    reader.inclusion_proof(12_345)
    assert len(reads) <= 6


def test_widths_add_up_to_the_size() -> None:
    for size in (0, 1, 255, 256, 257, 65_535, 65_536, 70_000):
        total = sum(itertools.takewhile(bool, (width_at(size, 0, index) for index in itertools.count())))
        assert total == size
