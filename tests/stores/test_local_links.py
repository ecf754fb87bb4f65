"""A symbolic link planted below a root leads nowhere: nothing outside is read, written or removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from strongroom.errors import ConfigError, FormatError, StoreError
from strongroom.stores import LocalStore


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that no store has any business in."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_bytes(b"secret")
    (folder / "data").mkdir()
    return folder


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "run")
    store.put("run.json", b"{}")
    return store


_READS: dict[str, Callable[[LocalStore, str], object]] = {
    "read": lambda store, key: store.read(key, limit_bytes=100),
    "open_reader": lambda store, key: store.open_reader(key),
    "stat": lambda store, key: store.stat(key),
}
_WRITES: dict[str, Callable[[LocalStore, str], object]] = {
    "open_writer": lambda store, key: store.open_writer(key, length_bytes=1),
    "put": lambda store, key: store.put(key, b"x"),
    "put_if_absent": lambda store, key: store.put_if_absent(key, b"x"),
}


@pytest.mark.parametrize("target", ("secret", "absent", "data"))
@pytest.mark.parametrize("call", _READS)
def test_an_object_that_is_a_link_is_damage(
    store: LocalStore, tmp_path: Path, outside: Path, call: str, target: str
) -> None:
    (tmp_path / "run" / "object").symlink_to(outside / target)
    with pytest.raises(FormatError, match="symbolic link"):
        _READS[call](store, "object")


@pytest.mark.parametrize("target", ("secret", "absent", "data"))
@pytest.mark.parametrize("call", _WRITES)
def test_nothing_is_written_through_a_link_at_an_objects_name(
    store: LocalStore, tmp_path: Path, outside: Path, call: str, target: str
) -> None:
    (tmp_path / "run" / "object").symlink_to(outside / target)
    with pytest.raises(StoreError):
        _WRITES[call](store, "object")
    assert _content(outside) == {"secret": b"secret"}


def test_a_commit_that_is_a_link_is_told_as_one_and_never_as_somebody_elses(
    store: LocalStore, tmp_path: Path, outside: Path
) -> None:
    (tmp_path / "run" / "COMMIT").symlink_to(outside / "secret")
    with pytest.raises(StoreError, match="COMMIT is a symbolic link"):
        store.put_if_absent("COMMIT", b"x")


@pytest.mark.parametrize("call", _READS)
def test_a_folder_that_is_a_link_is_damage_on_the_way_to_an_object(
    store: LocalStore, tmp_path: Path, outside: Path, call: str
) -> None:
    (tmp_path / "run" / "step").symlink_to(outside)
    with pytest.raises(FormatError, match=f"{tmp_path}/run/step is a symbolic link"):
        _READS[call](store, "step/secret")
    with pytest.raises(FormatError, match="symbolic link"):
        _READS[call](store, "step/data/absent")
    with pytest.raises(FormatError, match="symbolic link"):
        store.list_names("step")
    with pytest.raises(FormatError, match="symbolic link"):
        store.list_names("step/data")


@pytest.mark.parametrize("call", _WRITES)
def test_nothing_is_written_below_a_folder_that_is_a_link(
    store: LocalStore, tmp_path: Path, outside: Path, call: str
) -> None:
    (tmp_path / "run" / "step").symlink_to(outside)
    for key in ("step/new", "step/data/new", "step/new/new"):
        with pytest.raises(StoreError, match="symbolic link"):
            _WRITES[call](store, key)
    assert _content(outside) == {"secret": b"secret"}
    assert not (outside / "new").exists()


def test_nothing_is_removed_through_a_link(store: LocalStore, tmp_path: Path, outside: Path) -> None:
    (tmp_path / "run" / "step").symlink_to(outside)
    with pytest.raises(StoreError, match="symbolic link"):
        store.delete("step/secret")
    with pytest.raises(StoreError, match="symbolic link"):
        store.delete_tree("step")
    with pytest.raises(StoreError, match="symbolic link"):
        store.delete_tree("step/data")
    assert _content(outside) == {"secret": b"secret"}


def test_a_link_in_a_tree_is_removed_and_what_it_points_to_stays(
    store: LocalStore, tmp_path: Path, outside: Path
) -> None:
    store.put("step/data/object", b"x")
    (tmp_path / "run" / "step" / "data" / "folder").symlink_to(outside)
    (tmp_path / "run" / "step" / "data" / "file").symlink_to(outside / "secret")
    store.delete_tree("step")
    assert store.list_names("") == ["run.json"]
    assert _content(outside) == {"secret": b"secret"}


def test_a_link_is_deleted_as_a_name_and_listed_as_no_folder(
    store: LocalStore, tmp_path: Path, outside: Path
) -> None:
    (tmp_path / "run" / "folder").symlink_to(outside)
    assert store.list_names("") == ["folder", "run.json"]
    store.delete("folder")
    assert store.list_names("") == ["run.json"]
    assert _content(outside) == {"secret": b"secret"}


def test_a_folder_swapped_for_a_link_after_it_was_used_is_not_followed(
    store: LocalStore, tmp_path: Path, outside: Path
) -> None:
    store.put("step/object", b"x")
    (tmp_path / "run" / "step" / "object").unlink()
    (tmp_path / "run" / "step").rmdir()
    (tmp_path / "run" / "step").symlink_to(outside)
    with pytest.raises(StoreError, match="symbolic link"):
        store.put("step/new", b"x")
    with pytest.raises(StoreError, match="symbolic link"):
        store.make_durable("step")
    with pytest.raises(StoreError, match="symbolic link"):
        store.put_if_absent("step/COMMIT", b"x")
    assert _content(outside) == {"secret": b"secret"}


@pytest.mark.parametrize(
    "key", ("../outside/secret", "a/../../outside/secret", "/etc/passwd", "./run.json", "a/./b")
)
def test_a_key_that_climbs_out_is_refused_before_anything_is_opened(
    store: LocalStore, outside: Path, key: str
) -> None:
    for call in (*_READS.values(), *_WRITES.values()):
        with pytest.raises(ConfigError):
            call(store, key)
    for remove in (store.delete, store.delete_tree, store.list_names, store.make_durable):
        with pytest.raises(ConfigError):
            remove(key)
    assert _content(outside) == {"secret": b"secret"}


def test_a_link_loop_is_told_as_a_link(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "run" / "loop").symlink_to("loop")
    with pytest.raises(FormatError, match="symbolic link"):
        store.read("loop/object", limit_bytes=1)


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
