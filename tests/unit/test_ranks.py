"""Rounds of agreement: threads as ranks, over a real store."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from strongroom.channel import Channel, open_channel
from strongroom.errors import (
    ConfigError,
    IntegrityError,
    NoWholeCheckpointError,
    RankFailedError,
    RanksDisagreeError,
    RanksError,
    RanksMissingError,
    StateEncodingError,
    StateMismatchError,
    StoreFullError,
)
from strongroom.messages import Message
from strongroom.ranks import Ranks, Verdict, name_ranks
from strongroom.rounds import name_calls

Act = Callable[[Ranks], Any]

LONG_S = 30.0
"""Far longer than anything here takes, on whatever machine."""


def job(world_size: int) -> list[Ranks]:
    """Ranks that meet over a future instead of a process group."""
    address: Future[bytes] = Future()

    def share(data: bytes | None) -> bytes:
        if data is not None:
            address.set_result(data)
        return address.result(LONG_S)

    def meeting(rank: int) -> Callable[[float], Channel]:
        return lambda _: open_channel(rank, world_size, share)

    return [Ranks(rank, world_size, meeting(rank)) for rank in range(world_size)]


def run(ranks: list[Ranks], *acts: Act) -> list[Any]:
    """What each rank's function returned or raised; one function for all ranks or one for each."""
    each = acts if len(acts) > 1 else acts * len(ranks)

    def outcome(one: Ranks, act: Act) -> Any:
        try:
            return act(one)
        except Exception as error:  # noqa: BLE001 - what it is, the test looks at
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(outcome, ranks, each))


def propose(value: Any) -> Callable[[], Message]:
    return lambda: Message(members={"value": value})


def total(said: list[Message]) -> Verdict:
    return Verdict(shared=Message(members={"total": sum(message.members["value"] for message in said)}))


def agree(one: Ranks, *, phase: str = "adding", timeout_s: float = 5.0, **options: Any) -> Any:
    said, _ = one.lane("main").agree(phase, propose(one.rank), total, timeout_s=timeout_s, **options)
    return said.members["total"]


def raising(error: BaseException) -> Callable[[], Message]:
    def act() -> Message:
        raise error

    return act


def failing(error: BaseException, *, phase: str = "adding", timeout_s: float = 5.0) -> Act:
    return lambda one: one.lane("main").agree(phase, raising(error), total, timeout_s=timeout_s)


@pytest.fixture
def three() -> Iterator[list[Ranks]]:
    ranks = job(3)
    yield ranks
    run(ranks, lambda one: one.part(1.0))


def test_every_rank_hears_what_the_coordinator_decided_from_all_proposals(three: list[Ranks]) -> None:
    assert run(three, agree) == [3, 3, 3]


def test_what_is_for_one_rank_comes_to_it_alone(three: list[Ranks]) -> None:
    def decide(said: list[Message]) -> Verdict:
        return Verdict(own={1: Message(pieces={"mine": b"\0" * 3}), 0: Message(members={"a": 1})})

    told = run(three, lambda one: one.lane("main").agree("x", Message, decide, timeout_s=5)[1])
    assert told == [Message(members={"a": 1}), Message(pieces={"mine": b"\0\0\0"}), Message()]


def test_pieces_larger_than_the_store_takes_at_once_arrive_whole(three: list[Ranks]) -> None:
    big = os.urandom(9 << 20)

    def act(one: Ranks) -> bool:
        mine = Message(pieces={"big": big if one.rank == 2 else b"", "more": b"x"})
        said, own = one.lane("main").agree(
            "x",
            lambda: mine,
            lambda said: Verdict(shared=said[2], own=dict.fromkeys(range(3), said[2])),
            timeout_s=30,
        )
        return said.pieces["big"] == own.pieces["big"] == big

    assert run(three, act) == [True] * 3


def test_one_rank_alone_talks_to_nobody() -> None:
    alone = Ranks(0, 1)
    assert agree(alone) == 0
    with pytest.raises(StoreFullError):
        failing(StoreFullError("full"))(alone)
    alone.part(1.0)


@pytest.mark.parametrize("failed", (0, 1))
def test_an_error_anywhere_is_an_error_everywhere_of_the_same_class(three: list[Ranks], failed: int) -> None:
    error = StateMismatchError("no", missing=["a"], different=["b: c"])
    acts: list[Act] = [agree, agree, agree]
    acts[failed] = failing(error)
    outcomes = run(three, *acts)
    assert outcomes.pop(failed) is error
    for outcome in outcomes:
        assert isinstance(outcome, StateMismatchError)
        assert str(outcome) == f"rank {failed} (adding): no"
        assert (outcome.missing, outcome.different) == (("a",), ("b: c",))
    assert run(three, agree) == [3, 3, 3]


def test_an_error_of_the_decision_is_everyones(three: list[Ranks]) -> None:
    def decide(_: list[Message]) -> Verdict:
        raise NoWholeCheckpointError("none", reasons=[(3, "torn")], undefined=["w"])

    outcomes = run(three, lambda one: one.lane("main").agree("x", Message, decide, timeout_s=5))
    assert all(type(outcome) is NoWholeCheckpointError for outcome in outcomes)
    assert all(outcome.reasons == ((3, "torn"),) and outcome.undefined == ("w",) for outcome in outcomes)


def test_an_error_that_is_not_ours_names_its_class_and_rank_elsewhere(three: list[Ranks]) -> None:
    _, outcome, _ = run(three, agree, agree, failing(ZeroDivisionError("by zero")))
    assert isinstance(outcome, RankFailedError)
    assert (outcome.ranks, outcome.phase) == ((2,), "adding")
    assert "rank 2 (adding): ZeroDivisionError: by zero" in str(outcome)


def test_a_key_path_travels_with_its_error(three: list[Ranks]) -> None:
    outcome = run(three, agree, agree, failing(StateEncodingError("state['f']", "a function")))[0]
    assert isinstance(outcome, StateEncodingError)
    assert outcome.key_path == "state['f']"
    assert str(outcome) == "state['f']: rank 2 (adding): a function"


def test_a_proposal_that_cannot_be_sent_is_an_error_for_all(three: list[Ranks]) -> None:
    def act(one: Ranks) -> Any:
        return one.lane("main").agree("x", propose(object()), total, timeout_s=5)

    outcomes = run(three, agree, act, agree)
    assert isinstance(outcomes[1], TypeError)
    assert isinstance(outcomes[0], RankFailedError)


def test_ranks_that_do_not_come_are_named_with_the_phase_and_all_meet_again(three: list[Ranks]) -> None:
    run(three, agree)
    began = time.monotonic()
    outcomes = run(three, lambda one: agree(one, timeout_s=0.5), lambda one: agree(one, timeout_s=0.5), str)
    assert time.monotonic() - began < LONG_S / 2
    for outcome in outcomes[:2]:
        assert isinstance(outcome, RanksMissingError)
        assert (outcome.ranks, outcome.phase) == ((2,), "adding")
    # Who comes late hears how it ended, and that it was missed itself.
    late = run(three[2:], agree)[0]
    assert isinstance(late, RanksMissingError)
    assert late.ranks == (2,)
    assert run(three, agree) == [3, 3, 3]


def test_a_coordinator_that_does_not_come_is_named_and_all_meet_again(three: list[Ranks]) -> None:
    run(three, agree)
    outcomes = run(three[1:], lambda one: agree(one, timeout_s=0.5))
    assert all(isinstance(outcome, RanksMissingError) and outcome.ranks == (0,) for outcome in outcomes)
    # It comes late, and decides nothing that the others no longer wait for.
    late = run(three[:1], lambda one: agree(one, timeout_s=0.5))[0]
    assert isinstance(late, RanksError)
    assert run(three, agree) == [3, 3, 3]


def test_who_waits_for_a_coordinator_that_waits_for_another_names_that_one(three: list[Ranks]) -> None:
    def late(one: Ranks) -> Any:
        time.sleep(0.3)  # it comes while rank 1 waits, and goes on for longer
        return agree(one, timeout_s=2)

    outcomes = run(three[:2], late, lambda one: agree(one, timeout_s=0.7))
    # Whom the coordinator names depends on which of them it still meets.
    assert outcomes[0].ranks in ((0,), (1,), (2,))
    assert outcomes[1].ranks == (2,)


def test_a_failure_is_told_beside_the_rank_that_is_missing(three: list[Ranks]) -> None:
    run(three, agree)
    outcomes = run(three[:2], lambda one: agree(one, timeout_s=0.5), failing(StoreFullError("no space")))
    assert isinstance(outcomes[0], RanksMissingError)
    assert outcomes[0].ranks == (2,)
    assert "Rank 1 has failed meanwhile: no space" in str(outcomes[0])


def test_different_calls_are_told_at_once_and_all_meet_again(three: list[Ranks]) -> None:
    began = time.monotonic()
    outcomes = run(
        three,
        lambda one: agree(one, timeout_s=LONG_S),
        lambda one: agree(one, timeout_s=LONG_S),
        lambda one: agree(one, phase="subtracting", timeout_s=LONG_S),
    )
    assert time.monotonic() - began < LONG_S / 2
    for outcome in outcomes:
        assert isinstance(outcome, RanksDisagreeError)
        assert outcome.ranks == (2,)
        assert "rank 0: adding; rank 2: subtracting" in str(outcome)
    assert run(three, agree) == [3, 3, 3]


def test_one_that_gave_up_after_it_had_proposed_stops_the_decision(three: list[Ranks]) -> None:
    """As where an interrupt comes while it waits."""
    decided = []
    has_given_up = threading.Event()

    class GiveUpError(Exception):
        pass

    def impatient(one: Ranks) -> Any:
        lane = one.lane("main")
        channel = lane.open()
        read = channel.read

        def interrupted(*_: Any, **__: Any) -> bytes:
            channel.read = read  # type: ignore[method-assign]
            raise GiveUpError("enough")

        channel.read = interrupted  # type: ignore[method-assign]
        try:
            return agree(one)
        finally:
            has_given_up.set()

    def slow(one: Ranks) -> Any:
        assert has_given_up.wait(LONG_S)
        return agree(one)

    def lead(one: Ranks) -> Any:
        def decide(said: list[Message]) -> Verdict:
            decided.append(said)
            return total(said)

        return one.lane("main").agree("adding", propose(0), decide, timeout_s=5)

    outcomes = run(three, lead, impatient, slow)
    assert isinstance(outcomes[1], GiveUpError)
    for outcome in outcomes[::2]:
        assert isinstance(outcome, RankFailedError)
        assert outcome.ranks == (1,)
        assert "enough" in str(outcome)
    assert not decided
    assert run(three, agree) == [3, 3, 3]


@pytest.mark.parametrize("is_final", (False, True))
def test_who_gives_up_during_the_decision_undoes_it_unless_it_is_final(
    three: list[Ranks], is_final: bool
) -> None:
    has_given_up = threading.Event()

    def impatient(one: Ranks) -> Any:
        try:
            return agree(one, timeout_s=0.5)
        finally:
            has_given_up.set()

    def lead(one: Ranks) -> Any:
        def decide(said: list[Message]) -> Verdict:
            assert has_given_up.wait(LONG_S)
            return total(said)

        said, _ = one.lane("main").agree(
            "adding", propose(0), decide, timeout_s=LONG_S, is_final=is_final, linger_s=1
        )
        return said.members["total"]

    first, second, third = run(three, lead, impatient, lambda one: agree(one, timeout_s=LONG_S))
    assert isinstance(second, RanksMissingError)
    assert second.ranks == (0,)
    if is_final:
        assert (first, third) == (3, 3)
    else:
        assert type(first) is type(third) is RanksError
        assert "rank 1 gave up: rank 0, which coordinates, did not decide within 0.5 s" in str(first)
    assert run(three, agree) == [3, 3, 3]


def test_a_coordinator_that_was_stopped_for_too_long_decides_nothing(three: list[Ranks]) -> None:
    """Those who gave up could not say so: its store was stopped with it."""
    run(three, agree)
    have_given_up = [threading.Event(), threading.Event()]

    def stopped(one: Ranks) -> Any:
        channel = one.lane("main").open()
        read_all = channel.read_all

        def late(*arguments: Any, **options: Any) -> list[bytes]:
            time.sleep(2.5)  # beyond the second that it is given, and the one of grace
            assert all(each.wait(LONG_S) for each in have_given_up)
            return read_all(*arguments, **options)

        channel.read_all = late  # type: ignore[method-assign]
        try:
            return agree(one, timeout_s=1)
        finally:
            del channel.read_all

    def mute(one: Ranks) -> Any:
        channel = one.lane("main").open()
        post = channel.post

        def lost(key: str, value: bytes, **options: Any) -> None:
            if not key.endswith("withdrawn"):
                post(key, value, **options)

        channel.post = lost  # type: ignore[method-assign]
        try:
            return agree(one, timeout_s=0.2)
        finally:
            del channel.post
            have_given_up[one.rank - 1].set()

    first, *others = run(three, stopped, mute, mute)
    assert type(first) is RanksError
    assert "after the others gave up waiting for it" in str(first)
    assert all(isinstance(other, RanksMissingError) and other.ranks == (0,) for other in others)
    assert run(three, agree) == [3, 3, 3]


def test_ranks_that_left_a_call_at_different_rounds_meet_in_the_next(three: list[Ranks]) -> None:
    run(three, agree)
    outcomes = run(three, agree, agree, failing(StoreFullError("full")))
    assert not any(isinstance(outcome, int) for outcome in outcomes)
    # The coordinator alone believes that the call goes on, as where it was late.
    late = run(three[:1], lambda one: agree(one, timeout_s=0.2, goes_on=True))[0]
    assert isinstance(late, RanksMissingError)
    assert run(three, agree) == [3, 3, 3]
    assert run(three, lambda one: agree(one, goes_on=True)) == [3, 3, 3]


def test_a_named_round_is_met_in_whatever_rounds_were_missed(three: list[Ranks]) -> None:
    run(three, lambda one: agree(one, name="first"))
    run(three[:2], lambda one: agree(one, name="second", timeout_s=0.3))
    assert run(three, lambda one: agree(one, name="third")) == [3, 3, 3]


def test_time_counts_from_the_start_where_the_proposal_is_the_work(three: list[Ranks]) -> None:
    run(three, agree)

    def act(one: Ranks) -> Any:
        def work() -> Message:
            time.sleep(1.5 if one.rank == 0 else 0)
            return Message(members={"value": 1})

        return one.lane("main").agree("working", work, total, timeout_s=2, is_work=True)

    began = time.monotonic()
    outcomes = run(three[:2], act)
    assert all(isinstance(outcome, RanksMissingError) and outcome.ranks == (2,) for outcome in outcomes)
    assert time.monotonic() - began < 1.5 + 2


def test_rounds_leave_nothing_in_the_store_for_ever(three: list[Ranks]) -> None:
    big = os.urandom(9 << 20)

    def some(one: Ranks) -> Any:
        return one.lane("main").agree(
            "x",
            lambda: Message(pieces={"big": big if one.rank == 1 else b""}),
            lambda said: Verdict(shared=said[1], own={2: said[1]}),
            timeout_s=20,
        )

    def whole_cycle() -> int:
        run(three, agree)
        run(three, some)
        run(three, agree, agree, failing(StoreFullError("full")))
        run(three, failing(StoreFullError("full")), agree, agree)
        run(three, agree, agree, lambda one: agree(one, phase="other"))
        run(three, lambda one: agree(one, timeout_s=0.2), lambda one: agree(one, timeout_s=0.2), str)
        run(three[2:], agree)
        run(three, agree)
        run(three, agree)
        counts = run(three, lambda one: one.lane("main").open()._call(lambda store: store.num_keys(), 10.0))
        return int(min(counts))

    first = whole_cycle()
    assert [whole_cycle() for _ in range(3)] == [first] * 3


def test_two_lanes_do_not_meet_each_other(three: list[Ranks]) -> None:
    def act(one: Ranks) -> list[Any]:
        one.lane("background").open(10)
        beside: Future[Any] = Future()

        def background() -> None:
            for number in range(20):
                said, _ = one.lane("background").agree("b", propose(number), total, timeout_s=5)
            beside.set_result(said.members["total"])

        thread = threading.Thread(target=background)
        thread.start()
        found = [agree(one) for _ in range(20)]
        thread.join()
        return [*found, beside.result()]

    assert run(three, act) == [[3] * 20 + [57]] * 3


def test_nobody_meets_twice() -> None:
    """A second meeting would exchange its bytes for those of the training's collectives."""
    times = []

    def meet(_: float) -> Channel:
        times.append(1)
        raise RanksMissingError("no route", phase="meeting")

    lonely = Ranks(1, 2, meet)
    with pytest.raises(RanksMissingError, match="no route"):
        agree(lonely)
    with pytest.raises(RanksMissingError, match="build a new Checkpointer"):
        agree(lonely)
    assert len(times) == 1


def test_who_has_left_says_so() -> None:
    ranks = job(2)
    run(ranks, agree)
    run(ranks, lambda one: one.part(5.0))
    with pytest.raises(RanksError, match="was closed"):
        agree(ranks[0])


def test_the_coordinator_waits_at_the_end_for_those_who_live(three: list[Ranks]) -> None:
    run(three, agree)
    began = time.monotonic()
    threading.Timer(0.5, three[1].part, (1.0,)).start()
    threading.Timer(0.2, three[2].part, (1.0,)).start()
    three[0].part(10.0)
    assert 0.4 < time.monotonic() - began < 10


def test_the_coordinator_does_not_wait_at_the_end_for_those_who_were_missing(three: list[Ranks]) -> None:
    run(three, agree)
    run(three[:2], lambda one: agree(one, timeout_s=0.2))
    three[1].part(1.0)
    began = time.monotonic()
    three[0].part(LONG_S)
    assert time.monotonic() - began < LONG_S / 2


def test_a_fork_leaves_its_parents_connections_alone(three: list[Ranks]) -> None:
    run(three, agree)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            three[1].part(1.0)
            three[1].lane("main").agree("x", Message, total, timeout_s=1)
        except RanksError as error:
            status = 0 if "fork" in str(error) else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert run(three, agree) == [3, 3, 3]


def test_no_thread_and_no_port_stay_once_all_have_left() -> None:
    ranks = job(2)
    run(ranks, agree)
    run(ranks, lambda one: one.lane("background").open(5) and None)
    run(ranks, lambda one: one.part(5.0))
    until = time.monotonic() + LONG_S
    while time.monotonic() < until and any(t.name == "strongroom-ranks" for t in threading.enumerate()):
        time.sleep(0.01)
    assert not [thread for thread in threading.enumerate() if thread.name == "strongroom-ranks"]


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals to a thread")
def test_an_interrupt_is_noticed_at_once_and_told() -> None:
    ranks = job(2)
    run(ranks, agree)
    other: Future[Any] = Future()

    def follow() -> None:
        time.sleep(0.5)
        signal.raise_signal(signal.SIGINT)
        other.set_result(run(ranks[1:], agree)[0])

    thread = threading.Thread(target=follow)
    thread.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        agree(ranks[0], timeout_s=60)
    assert time.monotonic() - began < LONG_S
    thread.join()
    assert isinstance(other.result(), RankFailedError)
    assert "KeyboardInterrupt" in str(other.result())
    assert run(ranks, agree) == [1, 1]
    run(ranks, lambda one: one.part(1.0))


def test_several_processes_without_torch_distributed_are_refused() -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        Ranks.of_this_process(environment={"WORLD_SIZE": "4"})
    with pytest.raises(ConfigError, match="process_group was given"):
        Ranks.of_this_process(process_group=object(), environment={})
    assert Ranks.of_this_process(environment={"WORLD_SIZE": "1"}).is_alone


def test_ranks_are_named_in_words() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([2, 1]) == "ranks 1, 2"
    assert name_ranks(range(20)).endswith("10, 11 and 8 more")


def test_every_rank_is_told_with_its_own_call() -> None:
    assert name_calls(["a()", "a()", "b()", "b()"]) == "rank 0 called a() and ranks 2, 3 called b()"
    assert name_calls(list("abc")) == "rank 0 called a, rank 1 called b and rank 2 called c"
    assert name_calls(list("abcdefg")).endswith("rank 3 called d and ranks 4, 5, 6 called otherwise")


def test_damage_and_missing_ranks_are_never_confused(three: list[Ranks]) -> None:
    """Only an IntegrityError makes a restore fall back: a broken message must not be one."""
    run(three, agree)
    lane = three[1].lane("main")
    channel = lane.open()
    post = channel.post

    def garbled(key: str, value: bytes, **options: Any) -> None:
        post(key, b"\xff" * 20 if "proposal" in key else value, **options)

    channel.post = garbled  # type: ignore[method-assign]
    outcomes = run(three, agree)
    assert all(isinstance(outcome, RanksDisagreeError) for outcome in outcomes)
    assert not any(isinstance(outcome, IntegrityError) for outcome in outcomes)
