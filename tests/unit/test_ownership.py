"""Who stores what: each chunk once, replicas spread by size, units whole, and no word too many."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strongroom import ownership
from strongroom.messages import Message
from strongroom.ownership import HeldChunk, Owners, assign, decode_held, encode_held
from strongroom.shards import ChunkSpec


def replica(name: str, size: int = 1, *, unit: str | None = None, is_spread: bool = True) -> HeldChunk:
    return HeldChunk(ChunkSpec(name, "F32", (0,), (size,), True), unit or name, is_spread)


def shard(name: str, number: int, size: int = 1) -> HeldChunk:
    return HeldChunk(ChunkSpec(name, "F32", (size * number,), (size,), False), name, True)


def stored(held: list[list[HeldChunk]]) -> list[list[HeldChunk]]:
    """What each rank stores."""
    return [[own[place] for place in places] for own, places in zip(held, assign(held), strict=True)]


def test_one_rank_stores_all_that_it_holds() -> None:
    assert assign([[replica("a"), replica("b", is_spread=False)]]) == [[0, 1]]


def test_what_one_rank_alone_holds_it_stores() -> None:
    held = [[shard("w", rank)] for rank in range(3)] + [[]]
    assert assign(held) == [[0], [0], [0], []]


def test_replicas_are_spread_by_their_size() -> None:
    sizes = {"a": 8, "b": 5, "c": 5, "d": 3, "e": 3}
    held = [[replica(name, size) for name, size in sizes.items()] for _ in range(3)]
    totals = [sum(one.chunk.sizes[0] for one in own) for own in stored(held)]
    assert totals == [8, 8, 8]


def test_what_a_rank_stores_of_its_own_counts() -> None:
    held = [[replica("a", 4), replica("b", 4)], [replica("a", 4), replica("b", 4)]]
    held[0].append(shard("w", 0, 100))
    assert [[one.chunk.tensor for one in own] for own in stored(held)] == [["w"], ["a", "b"]]


def test_what_may_differ_comes_from_the_first_rank_and_counts_as_its_burden() -> None:
    held = [
        [replica("p", 5), replica("q", 5), replica("buffer", 10, unit="buffers", is_spread=False)]
        for _ in range(2)
    ]
    assert [[one.chunk.tensor for one in own] for own in stored(held)] == [["buffer"], ["p", "q"]]


def test_a_unit_is_one_ranks_even_where_that_is_uneven() -> None:
    names = [f"m{number}" for number in range(5)]
    held = [[*(replica(name, unit="m") for name in names), replica("p", 1)] for _ in range(2)]
    assert [[one.chunk.tensor for one in own] for own in stored(held)] == [names, ["p"]]


def test_parts_of_a_unit_on_different_ranks_are_theirs() -> None:
    # Moments of a parameter that is sharded, and the counter beside them that all ranks have.
    held = [
        [
            HeldChunk(ChunkSpec("s.exp_avg", "F32", (rank,), (1,), False), "s", True),
            replica("s.step", unit="s"),
        ]
        for rank in range(2)
    ]
    assert [[one.chunk.tensor for one in own] for own in stored(held)] == [
        ["s.exp_avg", "s.step"],
        ["s.exp_avg"],
    ]


def test_ranks_may_hold_other_things_in_another_order() -> None:
    held = [[replica("a"), replica("b")], [replica("c"), replica("b"), replica("a")], []]
    names = [one.chunk.tensor for own in stored(held) for one in own]
    assert sorted(names) == ["a", "b", "c"]


def test_tensors_of_one_name_and_other_shapes_are_both_stored_and_refused_later() -> None:
    held = [[replica("a", 2)], [replica("a", 3)]]
    assert assign(held) == [[0], [0]]


@st.composite
def holdings(draw: st.DrawFn) -> list[list[HeldChunk]]:
    """Chunks on any subsets of some ranks, each rank's in an order of its own."""
    ranks = draw(st.integers(1, 5))
    held: list[list[HeldChunk]] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(0, 12))):
        unit = draw(st.sampled_from(["one", "two", "three"]))
        # A unit is spread or not as a whole: it says what its tensors are.
        chunk = HeldChunk(
            ChunkSpec(f"t{number}", "F32", (0,), (draw(st.integers(0, 50)),), True), unit, unit != "three"
        )
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            held[rank].append(chunk)
    return [draw(st.permutations(own)) for own in held]


@given(holdings())
def test_each_chunk_is_stored_once_by_a_rank_that_holds_it(held: list[list[HeldChunk]]) -> None:
    owned = assign(held)
    taken = [held[rank][place].chunk for rank, places in enumerate(owned) for place in places]
    assert sorted(chunk.tensor for chunk in taken) == sorted(
        {one.chunk.tensor for own in held for one in own}
    )
    assert all(places == sorted(set(places)) for places in owned)


@given(holdings())
def test_what_the_same_ranks_hold_of_a_unit_one_of_them_stores(held: list[list[HeldChunk]]) -> None:
    holders: dict[str, tuple[int, ...]] = {}
    for rank, own in enumerate(held):
        for one in own:
            holders[one.chunk.tensor] = (*holders.get(one.chunk.tensor, ()), rank)
    owners: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for rank, own in enumerate(stored(held)):
        for one in own:
            owners.setdefault((one.unit, holders[one.chunk.tensor]), set()).add(rank)
            if not one.is_spread:
                assert rank == holders[one.chunk.tensor][0]
    assert all(len(ranks) == 1 for ranks in owners.values())


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(2, 6))
def test_no_rank_stores_much_more_than_its_share_of_replicas(sizes: list[int], ranks: int) -> None:
    held = [[replica(f"t{number:02}", size) for number, size in enumerate(sizes)] for _ in range(ranks)]
    totals = [sum(one.chunk.sizes[0] for one in own) for own in stored(held)]
    # Whoever stores most had no more than its share before its last one.
    assert max(totals) <= (sum(sizes) + (ranks - 1) * max(sizes)) / ranks


@given(holdings())
def test_what_is_held_travels_as_it_is(held: list[list[HeldChunk]]) -> None:
    for own in held:
        assert decode_held(encode_held(own)) == own


def test_any_name_and_rank_of_dimension_travels() -> None:
    own = [
        HeldChunk(ChunkSpec("", "F64", (), (), True), "\udc80=\u2028", False),
        HeldChunk(ChunkSpec("a.\U0001f600", "BOOL", (2**40, 0, 1), (1, 2**40, 0), False), "a", True),
    ]
    assert decode_held(encode_held(own)) == own


# ------------------------------------------------------------------------- the coordinator's memory


def look(generation: int, held: list[HeldChunk] | None = None) -> Message:
    pieces = {} if held is None else {"plan": encode_held(held)}
    return Message(members={"generation": generation}, pieces=pieces)


def places(told: Message) -> list[int]:
    return [int(place) for place in np.frombuffer(told.pieces["owned"], np.uint32)]


def test_one_rank_alone_is_told_nothing() -> None:
    assert Owners(1).decide([look(0)]) == (0, {})


def test_ranks_are_told_once_and_then_nothing_while_nothing_changes() -> None:
    owners = Owners(2)
    generation, told = owners.decide(
        [look(0, [replica("a", 2), replica("b")]), look(0, [replica("a", 2), replica("b")])]
    )
    assert {rank: places(message) for rank, message in told.items()} == {0: [0], 1: [1]}
    assert owners.decide([look(generation), look(generation)]) == (generation, {})


def test_where_one_rank_holds_something_else_all_are_told_anew() -> None:
    owners = Owners(2)
    first, _ = owners.decide([look(0, [replica("a")]), look(0, [replica("a")])])
    second, told = owners.decide([look(first), look(0, [replica("a"), shard("w", 0)])])
    assert second != first
    assert {rank: places(message) for rank, message in told.items()} == {0: [0], 1: [1]}


def test_a_rank_that_has_not_heard_is_told_again() -> None:
    owners = Owners(2)
    first, _ = owners.decide([look(0, [replica("a")]), look(0, [replica("a")])])
    # Rank 1 was lost on its way to the verdict, and says what it holds once more.
    second, told = owners.decide([look(first), look(0, [replica("a")])])
    assert set(told) == {0, 1}
    third, told = owners.decide([look(first), look(second)])
    assert third == second
    assert set(told) == {0}


def test_chunks_are_told_apart_where_their_hashes_are_not() -> None:
    one, other = np.random.default_rng(0).integers(0, 2**63, 2, np.uint64) | np.uint64(1)
    rows = np.array([[0, int(one)], [int(other), 0], [0, int(one)]], np.int64)
    order, starts = ownership._alike(rows)
    runs = [sorted(run.tolist()) for run in np.split(order, starts[1:])]
    assert sorted(runs) == [[0, 2], [1]]
