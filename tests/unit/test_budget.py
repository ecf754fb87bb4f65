"""What is copied and what is written at once, by a budget; and what the system says is available."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.budget import MIN_BUDGET_BYTES, available_bytes, check_budget, split
from strongroom.errors import ConfigError
from strongroom.shards import ChunkSpec


def specs(sizes: list[int]) -> list[ChunkSpec]:
    return [ChunkSpec(f"t{number}", "U8", (0,), (size,), True) for number, size in enumerate(sizes)]


@given(sizes=st.lists(st.integers(0, 100), max_size=20), budget=st.integers(0, 500))
def test_what_is_staged_fits_the_budget_and_nothing_is_lost(sizes: list[int], budget: int) -> None:
    chunks = specs(sizes)
    parted = split(chunks, budget)
    assert parted.staged_bytes <= budget
    assert sorted((*parted.staged, *parted.streamed), key=lambda spec: int(spec.tensor[1:])) == chunks
    if parted.streamed:
        left = budget - parted.staged_bytes
        assert all(spec.size_bytes > left for spec in parted.streamed)


def test_without_a_budget_all_is_staged_in_its_order() -> None:
    chunks = specs([3, 1, 2])
    assert split(chunks, None).staged == tuple(chunks)
    assert split(chunks, 6).staged == tuple(chunks)


@pytest.mark.parametrize("budget", (0, -1, MIN_BUDGET_BYTES - 1, 1e9, True, "1 GiB"))
def test_a_budget_that_is_none_is_refused_with_the_numbers(budget: object) -> None:
    with pytest.raises(ConfigError, match="16777216"):
        check_budget(budget)


@pytest.fixture
def system(tmp_path: Path) -> tuple[Path, Path]:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    cgroup.mkdir()
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 1000 kB\n")
    return proc, cgroup


def test_what_is_available_is_most_of_the_kernels_estimate(system: tuple[Path, Path]) -> None:
    assert available_bytes({}, *system) == int(1000 * 1024 * 0.8)


def test_a_control_groups_limit_counts_where_it_is_lower(system: tuple[Path, Path]) -> None:
    _, cgroup = system
    (cgroup / "memory.max").write_text("500000\n")
    (cgroup / "memory.current").write_text("400000\n")
    (cgroup / "memory.stat").write_text("anon 300000\ninactive_file 50000\n")
    assert available_bytes({}, *system) == int(150000 * 0.8)
    (cgroup / "memory.max").write_text("max\n")
    assert available_bytes({}, *system) == int(1000 * 1024 * 0.8)


def test_processes_on_one_host_share(system: tuple[Path, Path]) -> None:
    assert available_bytes({"LOCAL_WORLD_SIZE": "4"}, *system) == int(1000 * 1024 * 0.8) // 4


def test_a_system_that_does_not_tell_sets_no_limit(tmp_path: Path) -> None:
    assert available_bytes({}, tmp_path, tmp_path) is None
