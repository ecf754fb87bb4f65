"""How many threads a rank takes of the host that it shares."""

from __future__ import annotations

import pytest

from strongroom.workers import MAX_WORKERS, local_ranks, reading_workers, writing_workers


@pytest.mark.parametrize(
    ("cores", "ranks", "reading", "writing"),
    (
        (1, 1, 1, 2),
        (2, 1, 2, 4),
        (2, 4, 1, 1),
        (4, 4, 1, 2),
        (96, 8, MAX_WORKERS, MAX_WORKERS),
        (1, 64, 1, 1),
    ),
)
def test_ranks_of_one_host_share_its_processors(cores: int, ranks: int, reading: int, writing: int) -> None:
    assert reading_workers(cores, ranks) == reading
    assert writing_workers(cores, ranks) == writing


@pytest.mark.parametrize(
    ("said", "ranks"),
    (("8", 8), ("1", 1), ("", 1), ("0", 1), ("-2", 1), ("many", 1), ("²", 1), ("9" * 40, 1)),
)
def test_the_launcher_says_how_many_share_the_host_or_nobody_does(said: str, ranks: int) -> None:
    assert local_ranks({"LOCAL_WORLD_SIZE": said}) == ranks
    assert local_ranks({}) == 1
