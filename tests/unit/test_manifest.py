"""The control documents: one spelling each, bounded and strict readers, and what they pin."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom import canonical
from strongroom.digest import Digest, sha256_of
from strongroom.errors import FormatError, StrongroomError, UnsupportedFormatError
from strongroom.layout import CheckpointName
from strongroom.manifest import CheckpointRef, Commit, FileRecord, Launch, Manifest, Run, check_run_id

NAME = CheckpointName(launch=3, step=12, attempt="0123456789abcdef")
REF = CheckpointRef(launch=2, step=9, attempt="f" * 16, manifest=sha256_of(b"parent"))


def record(path: str, size: int = 10) -> FileRecord:
    return FileRecord(path=path, size_bytes=size, digest=Digest("blake3", bytes(32)))


RUN = Run(run="run-1", created_at_ms=1_700_000_000_000)
LAUNCH = Launch(run="run-1", launch=3, parent=REF, created_at_ms=5, deadline_s=1800)
COMMIT = Commit(run="run-1", name=NAME, manifest=sha256_of(b"m"), size_bytes=30, committed_at_ms=7)
MANIFEST = Manifest(
    run="run-1",
    name=NAME,
    parent=REF,
    created_at_ms=6,
    algorithm="blake3",
    world_size=1,
    files=(record("00000-00.safetensors", 20), record("index.safetensors")),
)
DOCUMENTS: list[Any] = [RUN, LAUNCH, COMMIT, MANIFEST]
ids = [type(document).__name__ for document in DOCUMENTS]


def test_a_manifest_names_the_best_steps_and_where_there_are_none_it_says_nothing() -> None:
    assert b"best" not in MANIFEST.encode()
    ranked = replace(MANIFEST, best=(9, 3, 12))
    assert Manifest.decode(ranked.encode(), "it").best == (9, 3, 12)


@pytest.mark.parametrize("best", ([], [3, 3], [-1], ["3"], [True], 3, None, list(range(1025))))
def test_best_steps_that_are_none_are_refused(best: Any) -> None:
    with pytest.raises(FormatError, match="'best' should be"):
        Manifest.decode(forged(MANIFEST, changing(best=best)), "it")


def forged(document: Any, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The document with its members changed, and, where it carries one, its digest made right again."""
    members = json.loads(document.encode())
    has_digest = members.pop(canonical.SELF_DIGEST, None) is not None
    members = change(members) or members
    return canonical.with_self_digest(members) if has_digest else canonical.encode(members)


def changing(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda members: {**members, **changes}


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_a_document_comes_back_as_it_was(document: Any) -> None:
    data = document.encode()
    assert type(document).decode(data, "it") == document
    assert document.encode() == data
    assert json.loads(data)["kind"] == type(document).__name__.lower()


def test_documents_without_a_parent_come_back_too() -> None:
    import dataclasses

    for document in (LAUNCH, MANIFEST):
        orphan = dataclasses.replace(document, parent=None)
        assert type(orphan).decode(orphan.encode(), "it") == orphan


def test_a_manifest_knows_its_files_and_their_size() -> None:
    assert MANIFEST.size_bytes == 30
    assert MANIFEST.file("index.safetensors") == record("index.safetensors")
    assert MANIFEST.file("other") is None
    assert COMMIT.ref.name == NAME


@pytest.mark.parametrize(
    "paths",
    (
        ("00000-00.safetensors", "a0/00000-00.safetensors"),
        ("00/00000-00.safetensors", "a0/00000-00.safetensors"),
    ),
)
def test_one_shard_in_two_folders_is_refused(paths: tuple[str, str]) -> None:
    import dataclasses

    def of(*paths: str) -> bytes:
        files = (*(record(path, 20) for path in paths), record("index.safetensors"))
        return dataclasses.replace(MANIFEST, files=tuple(sorted(files, key=lambda file: file.path))).encode()

    with pytest.raises(FormatError, match=f"lists one shard twice, as {paths[0]} and as {paths[1]}"):
        Manifest.decode(of(*paths), "it")
    scattered = Manifest.decode(of("00/00000-00.safetensors", "a0/00000-01.safetensors"), "it")
    assert scattered.file("a0/00000-01.safetensors") is not None


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_no_single_changed_byte_reads_as_the_same_document(document: Any) -> None:
    data = document.encode()
    for position in range(len(data)):
        for bit in (1, 0x20):
            changed = bytearray(data)
            changed[position] ^= bit
            try:
                found = type(document).decode(bytes(changed), "it")
            except StrongroomError:
                continue
            # A manifest carries no digest of itself: its commit pins it.
            assert document is MANIFEST
            assert found != document


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_an_unknown_member_is_refused_and_a_note_is_not(document: Any) -> None:
    with pytest.raises(FormatError, match="unknown member 'extra'"):
        type(document).decode(forged(document, changing(extra=1)), "it")
    note = forged(document, changing(**{"x-note": [1, None, "x"]}))
    assert type(document).decode(note, "it") == document


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_a_missing_member_is_named(document: Any) -> None:
    for member in json.loads(document.encode()):
        if member == canonical.SELF_DIGEST:
            continue

        def drop(members: dict[str, Any], member: str = member) -> None:
            del members[member]

        with pytest.raises(FormatError, match=f"lacks the member '{member}'"):
            type(document).decode(forged(document, drop), "it")


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_a_member_of_the_wrong_kind_is_refused(document: Any) -> None:
    for member, value in json.loads(document.encode()).items():
        if member == canonical.SELF_DIGEST:
            continue
        for wrong in (None, True, -1, 2**53 - 1, "x", [], {}, [[]]):
            if wrong == value or (wrong is None and member == "parent") or member == "retention_class":
                continue
            with contextlib.suppress(StrongroomError):
                # What is accepted is a value that this member may have.
                found = type(document).decode(forged(document, changing(**{member: wrong})), "it")
                assert type(wrong) is type(value), (member, wrong)
                assert found != document


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
@pytest.mark.parametrize("version", ("0.0", "0.2", "1.0", "9999.9999"))
def test_another_format_is_no_damage_but_not_read(document: Any, version: str) -> None:
    with pytest.raises(UnsupportedFormatError, match=f"format {version}; this release reads 0.1"):
        type(document).decode(forged(document, changing(format=version, other="unknown")), "it")


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
@pytest.mark.parametrize("version", ("", "0", "0.1.0", "v0.1", "0.1 ", "99999.0"))
def test_what_is_no_version_is_damage(document: Any, version: str) -> None:
    with pytest.raises(FormatError):
        type(document).decode(forged(document, changing(format=version)), "it")


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_one_document_is_not_taken_for_another(document: Any) -> None:
    for other in DOCUMENTS:
        if other is not document:
            with pytest.raises(FormatError):
                type(other).decode(document.encode(), "it")


@pytest.mark.parametrize("document", DOCUMENTS[:3], ids=ids[:3])
def test_a_document_whose_own_digest_is_wrong_is_damaged(document: Any) -> None:
    members = json.loads(document.encode())
    members[canonical.SELF_DIGEST] = "sha256:" + "0" * 64
    with pytest.raises(FormatError, match="is damaged"):
        type(document).decode(canonical.encode(members), "it")
    del members[canonical.SELF_DIGEST]
    with pytest.raises(FormatError, match="has no ~digest"):
        type(document).decode(canonical.encode(members), "it")


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_the_same_members_in_another_spelling_are_refused(document: Any) -> None:
    members = json.loads(document.encode())
    for text in (
        json.dumps(members),
        json.dumps(members, indent=1),
        json.dumps(dict(reversed(members.items())), separators=(",", ":")),
        document.encode().decode() + " ",
        document.encode().decode().replace('"kind"', '"\\u006bind"'),
    ):
        with pytest.raises(FormatError):
            type(document).decode(text.encode(), "it")


def test_a_document_is_bounded_before_it_is_parsed() -> None:
    for document, limit in ((RUN, 4096), (LAUNCH, 65536), (COMMIT, 16384)):
        data = forged(document, changing(**{"x-note": "n" * limit}))
        with pytest.raises(FormatError, match=f"at most {limit} are read"):
            type(document).decode(data, "it")
    with pytest.raises(FormatError, match="nests"):
        Run.decode(forged(RUN, changing(**{"x-note": [[[[1]]]]})), "it")
    with pytest.raises(FormatError, match="items"):
        Run.decode(forged(RUN, changing(**{"x-note": [0] * 100})), "it")


PATHS = [
    "../x", "/etc/passwd", "a/../b", "a//b", "./a", "a/", "", "a\\b", "a\0b", ".hidden", "-rf", "ä", "a b",
    "x" * 600, "a/..",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS, ids=repr)
def test_a_path_that_climbs_out_or_is_odd_is_refused(path: str) -> None:
    def add(members: dict[str, Any]) -> None:
        members["files"] = sorted(
            [*members["files"], {**members["files"][0], "path": path}], key=lambda file: file["path"]
        )

    with pytest.raises(FormatError):
        Manifest.decode(forged(MANIFEST, add), "it")
    with pytest.raises(FormatError):
        record(path)


def with_files(*paths: str) -> bytes:
    def change(members: dict[str, Any]) -> None:
        members["files"] = [{**members["files"][0], "path": path} for path in paths]

    return forged(MANIFEST, change)


@pytest.mark.parametrize(
    ("paths", "told"),
    (
        (("a", "a"), "once each"),
        (("b", "a"), "sorted"),
        (("A", "a"), "differ only by case"),
        (("A/x", "a/y"), "differ only by case"),
        (("State.json", "state.json"), "differ only by case"),
        (("MANIFEST.json", "a"), "lists itself"),
    ),
    ids=str,
)
def test_files_that_are_one_to_some_file_system_are_refused(paths: tuple[str, ...], told: str) -> None:
    with pytest.raises(FormatError, match=told):
        Manifest.decode(with_files(*paths), "it")
    assert Manifest.decode(with_files("A/x", "B/x", "a.b"), "it").files[0].path == "A/x"


def test_a_file_hashed_by_another_algorithm_is_refused() -> None:
    def change(members: dict[str, Any]) -> None:
        members["files"][0]["digest"] = "sha256:" + "0" * 64

    with pytest.raises(FormatError, match="has a sha256 digest where the manifest says blake3"):
        Manifest.decode(forged(MANIFEST, change), "it")


def test_what_pins_a_manifest_is_always_sha256() -> None:
    for document in (COMMIT, LAUNCH):

        def change(members: dict[str, Any]) -> None:
            place = members if "manifest" in members else members["parent"]
            place["manifest"] = "blake3:" + "0" * 64

        with pytest.raises(FormatError, match="a sha256 digest"):
            type(document).decode(forged(document, change), "it")


@pytest.mark.parametrize("launch", (3, 4, 999_999))
def test_a_parent_is_always_of_an_older_launch(launch: int) -> None:
    def change(members: dict[str, Any]) -> None:
        members["parent"]["launch"] = launch

    with pytest.raises(FormatError, match="not older than itself"):
        Launch.decode(forged(LAUNCH, change), "it")


@pytest.mark.parametrize("run", ("a", "A-1_2.3", "x" * 128, "0"))
def test_a_run_id_may_be(run: str) -> None:
    assert check_run_id(run) == run


@pytest.mark.parametrize("run", ("", "-a", ".a", "a b", "a/b", "ä", "a\n", "x" * 129))
def test_a_run_id_may_not_be(run: str) -> None:
    with pytest.raises(FormatError, match="is not a run id"):
        check_run_id(run)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from([2**53 - 1]) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(document=st.sampled_from(DOCUMENTS), data=st.data())
def test_no_member_whatever_it_holds_does_more_than_be_refused(document: Any, data: st.DataObject) -> None:
    def change(members: dict[str, Any]) -> None:
        for _ in range(data.draw(st.integers(1, 3))):
            members[data.draw(st.sampled_from([*members, "other"]))] = data.draw(json_values)

    with contextlib.suppress(FormatError, UnsupportedFormatError):
        type(document).decode(forged(document, change), "it")


@given(st.binary(max_size=100) | st.text(max_size=60).map(str.encode))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    for kind in (Run, Launch, Commit, Manifest):
        with pytest.raises(FormatError):
            kind.decode(data, "it")
