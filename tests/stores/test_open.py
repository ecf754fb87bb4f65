"""What a user may call a root, and what is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from strongroom.errors import ConfigError
from strongroom.stores import LocalStore, MemoryStore, S3Store, Store, open_store


def _root(store: Store) -> str:
    assert isinstance(store, LocalStore)
    return store.root


def test_a_path_opens_a_folder(tmp_path: Path) -> None:
    assert _root(open_store(tmp_path / "run")) == str(tmp_path / "run")
    assert _root(open_store(str(tmp_path / "run"))) == str(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("uri", "path"),
    (
        ("file:///runs/a", "/runs/a"),
        ("FILE:///runs/a/", "/runs/a"),
        ("file://localhost/runs/a", "/runs/a"),
        ("file:///runs/a%20b%3Fc%23d", "/runs/a b?c#d"),
        ("file:///runs/%C3%A4", "/runs/ä"),
    ),
)
def test_a_file_uri_opens_the_folder_it_names(uri: str, path: str) -> None:
    assert _root(open_store(uri)) == path


def test_a_uri_of_a_store_opens_that_store_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "a b?c#d%20ä")
    assert _root(open_store(store.uri)) == store.root


def test_an_s3_uri_opens_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3", reason="roots in buckets need boto3")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    store = open_store("s3://bucket/runs/a/")
    assert isinstance(store, S3Store)
    assert store.uri == "s3://bucket/runs/a"
    assert open_store("S3://bucket").uri == "s3://bucket"


def test_a_bucket_that_went_through_a_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="pass it as a string"):
        open_store(Path("s3://bucket/runs"))


def test_a_store_is_taken_as_it_is() -> None:
    store = MemoryStore()
    assert open_store(store) is store


@pytest.mark.parametrize(
    ("root", "told"),
    (
        ("s3://a", "names no bucket"),
        ("gs://bucket", "'gs'.*paths, file:// and s3:// URIs"),
        ("file://elsewhere/runs", "'elsewhere'"),
        ("file://localhost", "no absolute path"),
        ("file:///runs/a?b", "%3F"),
        ("file:///runs/a#b", "%23"),
        ("file:///runs/%00", "folder's path"),
        ("", "folder's path"),
        (7, "got a int"),
        (None, "got a NoneType"),
    ),
)
def test_any_other_root_is_refused_with_the_reason(root: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        open_store(root)


def test_a_file_uri_with_one_slash_is_a_uri_too(tmp_path: Path) -> None:
    store = open_store(f"file:{tmp_path}/run")
    assert isinstance(store, LocalStore)
    assert store.uri == f"file://{tmp_path}/run"
