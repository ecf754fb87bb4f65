"""Several tiers seen as one run: whose word counts where they differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strongroom import ConfigError
from strongroom.catalog import History
from strongroom.digest import Digest
from strongroom.layout import CheckpointName
from strongroom.lineage import current_line
from strongroom.manifest import CheckpointRef, Commit, Launch, Run
from strongroom.merging import Merged, merge

URIS = ("file:///fast", "s3://slow", "s3://far")


def name(step: int, launch: int = 1, attempt: str = "0" * 16) -> CheckpointName:
    return CheckpointName(launch=launch, step=step, attempt=attempt)


def commit(step: int, launch: int = 1, *, manifest: int = 1, attempt: str = "0" * 16) -> Commit:
    return Commit(
        run="r",
        name=name(step, launch, attempt),
        manifest=Digest("sha256", bytes([manifest]) * 32),
        size_bytes=10,
        committed_at_ms=step,
    )


def launch(number: int, parent: Commit | None = None, *, at: int = 0) -> Launch:
    ref = (
        None
        if parent is None
        else CheckpointRef(
            launch=parent.name.launch,
            step=parent.name.step,
            attempt=parent.name.attempt,
            manifest=parent.manifest,
        )
    )
    return Launch(run="r", launch=number, parent=ref, created_at_ms=at, deadline_s=60)


def history(
    *commits: Commit,
    launches: tuple[Launch, ...] = (launch(1),),
    damaged: dict[CheckpointName, str] | None = None,
    damaged_launches: dict[int, str] | None = None,
    untrusted: tuple[int, ...] = (),
    uncommitted: tuple[CheckpointName, ...] = (),
    run: str | None = "r",
) -> History:
    by_number = {record.launch: record for record in launches}
    numbers = {*by_number, *(damaged_launches or {}), *(each.name.launch for each in commits)}
    by_name = {each.name: each for each in commits}
    return History(
        run=None if run is None else Run(run=run, created_at_ms=0),
        launches=by_number,
        damaged_launches=damaged_launches or {},
        untrusted_launches=frozenset(untrusted),
        launch_numbers=frozenset(numbers),
        commits=by_name,
        damaged=damaged or {},
        uncommitted=uncommitted,
        line=current_line([*by_name, *(damaged or {})], {n: each.parent for n, each in by_number.items()}),
    )


def merged(*histories: History | None) -> Merged:
    return merge(histories, URIS[: len(histories)])


EMPTY = history(launches=(), run=None)


def test_one_tier_is_what_it_is() -> None:
    one = history(commit(1), commit(2), uncommitted=(name(3),))
    assert merged(one).history == one
    assert merged(one).holders == {commit(1): (0,), commit(2): (0,)}


def test_the_newest_is_the_newest_of_all() -> None:
    seen = merged(history(commit(1)), history(commit(1), commit(3)), history(commit(2)))
    assert [each.step for each in seen.history.line.newest_first] == [3, 2, 1]
    assert seen.holders == {commit(1): (0, 1), commit(2): (2,), commit(3): (1,)}


def test_a_new_machine_sees_what_the_old_one_has_sent_away() -> None:
    seen = merged(EMPTY, history(commit(1), commit(2)))
    assert seen.history.run is not None
    assert seen.history.run.run == "r"
    assert seen.history.launch_numbers == {1}
    assert seen.holders[commit(2)] == (1,)


def test_a_later_launch_counts_wherever_it_stands() -> None:
    older, newer = commit(9), commit(5, 2)
    seen = merged(history(older), history(commit(4), newer, launches=(launch(1), launch(2, commit(4)))))
    assert seen.history.line.newest_first == (newer.name, name(4))
    assert seen.history.line.superseded == (older.name,)


def test_what_is_damaged_here_and_whole_there_is_whole() -> None:
    seen = merged(history(damaged={name(2): "torn"}), history(commit(2)))
    assert seen.history.damaged == {}
    assert seen.holders[commit(2)] == (1,)


def test_what_is_damaged_everywhere_is_damaged() -> None:
    seen = merged(history(commit(1), damaged={name(2): "torn"}), history(damaged={name(2): "lost"}))
    assert seen.history.damaged == {name(2): "torn"}
    assert seen.history.line.newest_first == (name(2), name(1))


def test_what_is_uncommitted_here_and_committed_there_is_committed() -> None:
    seen = merged(history(commit(1)), history(uncommitted=(name(1), name(7))))
    assert seen.history.uncommitted == (name(7),)


def test_a_launch_record_is_taken_from_the_tier_that_has_it_whole() -> None:
    second = launch(2, commit(1))
    seen = merged(
        history(commit(3, 2), damaged_launches={2: "torn"}, untrusted=(2,)),
        history(commit(1), launches=(launch(1), second)),
    )
    assert seen.history.launches[2] == second
    assert seen.history.damaged_launches == {}
    assert seen.history.untrusted_launches == frozenset()
    assert seen.history.line.broken is None
    assert seen.history.line.newest_first == (name(3, 2), name(1))


def test_a_launch_that_is_untrusted_everywhere_stays_so() -> None:
    seen = merged(history(damaged_launches={2: "forged"}, untrusted=(2,)), EMPTY)
    assert seen.history.untrusted_launches == {2}
    assert seen.history.damaged_launches == {2: "forged"}


def test_two_different_commits_of_one_name_are_both_candidates() -> None:
    ours, planted = commit(2), commit(2, manifest=9)
    seen = merged(history(planted), history(ours), history(ours))
    assert seen.history.commits[name(2)] == planted
    assert seen.variants == {name(2): (planted, ours)}
    assert seen.holders == {planted: (0,), ours: (1, 2)}


def test_two_writers_of_one_number_are_an_error_that_names_the_tiers() -> None:
    with pytest.raises(ConfigError, match=r"file:///fast and s3://slow hold different records of launch 1"):
        merged(history(), history(launches=(launch(1, at=5),)))


def test_another_run_on_a_tier_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"file:///fast holds run r, and s3://slow run s"):
        merged(history(commit(1)), history(run="s"))


def test_a_tier_out_of_reach_says_nothing() -> None:
    seen = merged(None, history(commit(1)), None)
    assert seen.holders == {commit(1): (1,)}
    assert seen.history.launch_numbers == {1}


def test_a_run_record_may_be_older_on_one_tier() -> None:
    other = replace(history(), run=Run(run="r", created_at_ms=77))
    assert merged(history(), other).history.run == Run(run="r", created_at_ms=0)
