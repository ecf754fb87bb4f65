"""Names in a store: what is built is taken apart again, and no other name is taken for ours."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom import layout
from strongroom.errors import ConfigError, FormatError
from strongroom.layout import (
    MAX_LAUNCH,
    MAX_PART,
    MAX_RANK,
    MAX_SCATTER,
    MAX_STEP,
    CheckpointName,
    check_relative_path,
    check_scatter,
    collisions,
    data_key,
    is_shard_folder,
    launch_key,
    parse_launch_name,
    parse_shard_path,
    rank_state_path,
    shard_path,
)

steps = st.integers(0, MAX_STEP) | st.sampled_from([0, 1, 999_999, MAX_STEP])
launches = st.integers(1, MAX_LAUNCH) | st.sampled_from([1, 9_999, 10_000, 99_999, 100_000, MAX_LAUNCH])
attempts = st.binary(min_size=8, max_size=8).map(bytes.hex)
names = st.builds(CheckpointName, launch=launches, step=steps, attempt=attempts)
NAME = CheckpointName(launch=3, step=1200, attempt="0123456789abcdef")

# Close to real names, so that a change of one character is often still nearly one.
near_names = st.builds(
    lambda text, at, character: text[:at] + character + text[at + 1 :],
    names.map(lambda name: name.folder) | st.just("000003.json") | st.just("00000-00.safetensors"),
    st.integers(0, 50),
    st.sampled_from(["", "0", "/", "-", ".", "A", "\n", "٣", "_0", " "]),
)


@given(names)
def test_a_checkpoints_folder_is_read_back(name: CheckpointName) -> None:
    assert CheckpointName.parse(name.folder) == name
    assert CheckpointName.parse(name.folder + "/") == name


def test_known_names() -> None:
    assert NAME.folder == "step-000000001200-0003-0123456789abcdef"
    assert NAME.commit_key == f"{NAME.folder}/COMMIT"
    assert data_key(NAME, "MANIFEST.json") == f"{NAME.folder}/data/MANIFEST.json"
    assert launch_key(3) == "launches/000003.json"
    assert shard_path(7, 12) == "00007-12.safetensors"
    assert rank_state_path(7) == "state-00007.json"
    assert str(NAME) == "step 1200 (launch 3, attempt 0123456789abcdef)"
    assert (
        CheckpointName(launch=12_345, step=1, attempt="0" * 16).folder
        == f"step-000000000001-12345-{'0' * 16}"
    )


@given(near_names | st.text(max_size=45))
def test_a_name_is_ours_only_if_it_comes_out_of_its_own_parts_again(text: str) -> None:
    name = CheckpointName.parse(text)
    assert name is None or text in {name.folder, name.folder + "/"}
    number = parse_launch_name(text)
    assert number is None or launch_key(number) == f"launches/{text}"
    shard = parse_shard_path(text)
    assert shard is None or shard_path(*shard) == text.rpartition("/")[2]


@pytest.mark.parametrize(
    "text",
    (
        "",
        "/",
        "step-",
        "data",
        f"x{NAME.folder}",
        f"{NAME.folder}x",
        f"{NAME.folder}//",
        f"/{NAME.folder}",
        f"{NAME.folder}/COMMIT",
        f"{NAME.folder}\n",
        NAME.folder.upper(),
        "step-00000001200-0003-0123456789abcdef",
        "step-0000000001200-0003-0123456789abcdef",
        "step-000000001200-0000-0123456789abcdef",
        "step-000000001200-003-0123456789abcdef",
        "step-000000001200-00003-0123456789abcdef",
        "step-000000001200-1000000-0123456789abcdef",
        "step-000000001200-0003-0123456789ABCDEF",
        "step-000000001200-0003-0123456789abcde",
        "step--00000001200-0003-0123456789abcdef",
        "step-00000000120٠-0003-0123456789abcdef",  # noqa: RUF001 - a digit, and not one of ours
        "../step-000000001200-0003-0123456789abcdef",
    ),
    ids=ascii,
)
def test_a_hostile_or_foreign_folder_is_not_ours(text: str) -> None:
    assert CheckpointName.parse(text) is None


@given(names, names)
def test_names_sort_as_lineage_compares_them(one: CheckpointName, two: CheckpointName) -> None:
    assert (one < two) == ((one.launch, one.step, one.attempt) < (two.launch, two.step, two.attempt))
    if one.launch == two.launch and one.step != two.step:
        assert (one < two) == (one.folder < two.folder)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"step": -1}, "a step lies between"),
        ({"step": MAX_STEP + 1}, "a step lies between"),
        ({"launch": 0}, "a launch lies between"),
        ({"launch": MAX_LAUNCH + 1}, "a launch lies between"),
        ({"attempt": ""}, "16 lower-case hex digits"),
        ({"attempt": "0" * 15}, "16 lower-case hex digits"),
        ({"attempt": "A" * 16}, "16 lower-case hex digits"),
        ({"attempt": "0" * 16 + "\n"}, "16 lower-case hex digits"),
        ({"attempt": "../../../../../a"}, "16 lower-case hex digits"),
    ),
    ids=str,
)
def test_a_name_out_of_range_is_not_built(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointName(**{"launch": 3, "step": 1200, "attempt": "0" * 16, **change})


@given(st.integers(1, MAX_LAUNCH), st.integers(0, MAX_RANK), st.integers(0, MAX_PART))
def test_launches_and_shards_are_read_back(launch: int, rank: int, part: int) -> None:
    assert parse_launch_name(launch_key(launch).removeprefix("launches/")) == launch
    assert parse_shard_path(shard_path(rank, part)) == (rank, part)
    check_relative_path(shard_path(rank, part))
    check_relative_path(rank_state_path(rank))


@given(st.integers(0, MAX_RANK), st.integers(0, MAX_PART), st.integers(2, MAX_SCATTER))
def test_a_scattered_shard_is_read_back_whatever_folder_it_is_in(rank: int, part: int, scatter: int) -> None:
    path = shard_path(rank, part, scatter=scatter)
    assert parse_shard_path(path) == (rank, part)
    assert is_shard_folder(path[:2])
    assert is_shard_folder(path[:3])
    assert check_relative_path(path) == path
    assert parse_shard_path(f"ff/{path[3:]}") == (rank, part)


@pytest.mark.parametrize(("ranks", "parts"), ((1, 64), (64, 1), (16, 4), (5, 13), (1024, 3)))
@pytest.mark.parametrize("scatter", (2, 10, 16, 256))
def test_shards_are_spread_evenly(ranks: int, parts: int, scatter: int) -> None:
    paths = [shard_path(rank, part, scatter=scatter) for rank in range(ranks) for part in range(parts)]
    filled = Counter(path[:2] for path in paths)
    assert max(filled.values()) <= 2 * -(-len(paths) // scatter)
    assert len(filled) >= min(scatter, len(paths)) / 2
    if ranks == 1 or parts == 1:
        assert max(filled.values()) == -(-len(paths) // scatter)


def test_folders_of_shards_lie_as_far_apart_as_two_digits_can() -> None:
    assert [shard_path(rank, 0, scatter=4)[:2] for rank in range(5)] == ["00", "40", "80", "c0", "00"]
    assert len({shard_path(rank, 0, scatter=256)[:2] for rank in range(256)}) == 256


@pytest.mark.parametrize("folder", ("", "a", "abc", "A0", "g0", "a0/a0", "a0//", "\u0660\u0661", "data"))
def test_no_other_folder_may_hold_shards(folder: str) -> None:
    assert not is_shard_folder(folder)


@pytest.mark.parametrize("scatter", (1, -1, 257, True, 2.0, "16"))
def test_shards_are_spread_over_a_number_of_folders(scatter: Any) -> None:
    with pytest.raises(ConfigError, match="a number of folders from 2 to 256"):
        check_scatter(scatter)


@pytest.mark.parametrize(
    "text",
    (
        "00000-000.safetensors",
        "00000-0000.safetensors",
        "0-0.safetensors",
        "100000-00.safetensors",
        "00000-00.safetensors.floe",
        "a/00000-00.safetensors",
        "A0/00000-00.safetensors",
        "abc/00000-00.safetensors",
        "a0/a0/00000-00.safetensors",
        "a0/0-0.safetensors",
        "a0/",
        "/00000-00.safetensors",
    ),
)
def test_a_shards_path_has_one_spelling(text: str) -> None:
    assert parse_shard_path(text) is None


@pytest.mark.parametrize(
    "text", ("000000.json", "00003.json", "0000003.json", "000003.json/", "000003.JSON", "000003")
)
def test_a_launch_records_name_has_one_spelling(text: str) -> None:
    assert parse_launch_name(text) is None


def test_a_name_that_could_not_be_read_back_is_not_built() -> None:
    for build in (
        lambda: launch_key(0),
        lambda: launch_key(MAX_LAUNCH + 1),
        lambda: shard_path(-1, 0),
        lambda: shard_path(MAX_RANK + 1, 0),
        lambda: shard_path(0, -1),
        lambda: shard_path(0, MAX_PART + 1),
        lambda: rank_state_path(MAX_RANK + 1),
    ):
        with pytest.raises(ConfigError, match="lies between"):
            build()


HOSTILE_PATHS = [
    "",
    "/",
    "/etc/passwd",
    "..",
    "../x",
    "a/../b",
    "a/..",
    ".",
    "./a",
    "a//b",
    "a/",
    ".hidden",
    "a/.hidden",
    "a\\b",
    "c:",
    "c:/a",
    "a\0",
    "a\n",
    "a b",
    "-rf",
    "a/-rf",
    "~",
    "$HOME",
    "ä",
    "a\u0308",
    "a" * 513,
    "a\u202etxt",
]


@pytest.mark.parametrize("path", HOSTILE_PATHS, ids=lambda path: ascii(path)[:30])
def test_a_path_that_is_not_safe_to_join_is_refused(path: str) -> None:
    with pytest.raises(FormatError) as caught:
        check_relative_path(path)
    assert len(str(caught.value)) < 1000


@given(st.text(st.sampled_from("ab0._-/\\~ :\0ä"), max_size=12))
def test_a_path_that_passes_stays_below_its_root(path: str) -> None:
    import posixpath

    with contextlib.suppress(FormatError):
        assert check_relative_path(path) == path
        assert posixpath.normpath(f"/root/{path}") == f"/root/{path}"
        assert path.isascii()
        assert not {"..", ".", ""} & set(path.split("/"))


@pytest.mark.parametrize(
    "path", (layout.MANIFEST, layout.INDEX, layout.STATE, layout.PROVENANCE, "a/b_c/D-1.x", "a" * 512)
)
def test_our_own_paths_are_safe(path: str) -> None:
    assert check_relative_path(path) == path


@pytest.mark.parametrize(
    ("paths", "expected"),
    (
        ([], []),
        (["a", "b", "a/b"], []),
        (["a", "a"], []),
        (["a", "A"], [("a", "A")]),
        (["x/a", "x/A"], [("x/a", "x/A")]),
        (["A/x", "a/y"], [("A", "a")]),
        (["a/x", "a/y"], []),
        (["straße", "STRASSE"], [("straße", "STRASSE")]),
        (["\u00e9", "e\u0301"], [("\u00e9", "e\u0301")]),
        (["\u0390", "\u1fd3"], [("\u0390", "\u1fd3")]),
        (["a", "A", "ä"], [("a", "A")]),
    ),
    ids=str,
)
def test_paths_that_some_file_system_takes_for_one_are_found(
    paths: list[str], expected: list[tuple[str, str]]
) -> None:
    assert collisions(paths) == expected


@given(st.lists(st.text("aAbB/éE\u0301", max_size=4), max_size=5))
def test_no_collision_is_overlooked_whatever_the_order(paths: list[str]) -> None:
    assert bool(collisions(paths)) == bool(collisions(paths[::-1]))
    for one, other in collisions(paths):
        assert one != other
        assert one.casefold() == other.casefold() or not (one + other).isascii()
