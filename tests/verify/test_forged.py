"""Files that every digest vouches for, and that do not belong together, are told all the same."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from strongroom import canonical, layout, tensorfile
from strongroom.errors import FormatError
from strongroom.index import Chunk, Index, TensorRecord
from strongroom.layout import CheckpointName
from strongroom.manifest import CheckpointRef, Launch
from strongroom.opened import encode_document
from strongroom.shards import binding
from strongroom.stores import LocalStore
from strongroom.verify import Problem, verify

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Any
    Forger = Any

SHARD = "00000-00.safetensors"


def problems(run: Run) -> list[Problem]:
    return list(verify(LocalStore(run.root), workers=1).problems)


def only(run: Run) -> tuple[str, str]:
    """The one problem: its file's name, and what is said of it."""
    (problem,) = problems(run)
    assert problem.kind == "damaged"
    return problem.key.rsplit("/", 1)[-1], problem.message


def document(forger: Forger, kind: str, members: dict[str, Any]) -> bytes:
    return encode_document(kind, forger.manifest.run, forger.name, members)


def members(forger: Forger, path: str) -> dict[str, Any]:
    bound = {"attempt", "format", "kind", "launch", "run", "step"}
    return {key: value for key, value in json.loads(forger.read(path)).items() if key not in bound}


def test_the_forger_of_these_tests_can_pin_a_file_unseen(forger: Forger, run: Run) -> None:
    for path in (SHARD, layout.INDEX, layout.STATE, layout.PROVENANCE, "state-00000.json"):
        forger.put(path, forger.read(path))
    assert problems(run) == []


# ------------------------------------------------------------------------------------------ shards


def rebuilt(forger: Forger, change: Any, metadata: dict[str, str] | None = None) -> bytes:
    """The shard with its entries changed; ``change`` gets the list of name, dtype, shape."""
    data = forger.read(SHARD)
    header = tensorfile.parse_header(data, len(data), SHARD)
    entries = [(entry.name, entry.dtype, entry.shape) for entry in header.entries]
    built, new = tensorfile.build_header(change(entries), metadata or header.metadata)
    return built + data[header.data_start :].ljust(new.end - new.data_start, b"\0")


def test_a_chunk_under_another_name_is_told(forger: Forger, run: Run) -> None:
    forger.put(SHARD, rebuilt(forger, lambda entries: [(f"{n}y", d, s) for n, d, s in entries]))
    found = problems(run)
    assert {problem.key.rsplit("/", 1)[-1] for problem in found} == {SHARD}
    assert any("lacks 'w', which the index places in it" in problem.message for problem in found)
    assert any("holds 'wy', which the index does not name" in problem.message for problem in found)


def test_a_chunk_of_another_dtype_or_shape_is_told(forger: Forger, run: Run) -> None:
    forger.put(SHARD, rebuilt(forger, lambda e: [(n, "I32" if n == "w" else d, s) for n, d, s in e]))
    assert only(run)[0] == SHARD
    assert "holds 'w' as I32[3] at byte" in only(run)[1]
    forger.put(
        SHARD, rebuilt(forger, lambda e: [(n, "F32", (1, 3)) if n == "w" else (n, d, s) for n, d, s in e])
    )
    assert "F32[1, 3]" in only(run)[1]


def test_a_chunk_that_the_index_does_not_name_is_told(forger: Forger, run: Run) -> None:
    forger.put(SHARD, rebuilt(forger, lambda entries: [*entries, ("hidden", "U8", (5,))]))
    assert "holds 'hidden', which the index does not name" in {problem.message for problem in problems(run)}


def test_a_flood_of_differences_is_counted(forger: Forger, run: Run) -> None:
    flood = [(f"hidden{number}", "U8", (1,)) for number in range(1000)]
    forger.put(SHARD, rebuilt(forger, lambda entries: entries + flood))
    found = problems(run)
    assert len(found) == 21
    assert any(re.match(r"and 98\d more entries", problem.message) for problem in found)


@pytest.mark.parametrize(
    "member", ("strongroom.run", "strongroom.launch", "strongroom.step", "strongroom.attempt")
)
def test_a_shard_that_says_it_belongs_elsewhere_is_told(forger: Forger, run: Run, member: str) -> None:
    bound = binding(forger.manifest.run, forger.name)
    bound[member] = "9" * len(bound[member])
    forger.put(SHARD, rebuilt(forger, list, bound))
    assert only(run)[0] == SHARD
    assert "belongs to another checkpoint" in only(run)[1]


def test_a_shard_that_is_no_safetensors_file_is_told(forger: Forger, run: Run) -> None:
    for data in (b"", b"abc", bytes(5000), b"\xff" * 5000, (99).to_bytes(8, "little") + b"{" * 99):
        forger.put(SHARD, data.ljust(4096, b"\0") if data else data)
        assert SHARD in {problem.key.rsplit("/", 1)[-1] for problem in problems(run)}


# ------------------------------------------------------------------------------------------- index


def test_an_index_without_a_shard_of_the_manifest_is_told(forger: Forger, run: Run) -> None:
    forger.put("00000-01.safetensors", forger.read(SHARD))
    index = forger.index()
    forger.put_index(Index(index.tensors.values(), [index.files[SHARD]], index.aliases))
    assert only(run)[0] == layout.INDEX
    assert "does not name the manifest's shards" in only(run)[1]


def test_chunks_that_overlap_are_told(forger: Forger, run: Run) -> None:
    index = forger.index()
    whole = index.tensors["w"]
    (chunk,) = whole.chunks
    twice = TensorRecord(
        "w",
        whole.dtype,
        (4,),
        (Chunk((0,), (2,), SHARD, chunk.start), Chunk((1,), (2,), SHARD, chunk.start + 4)),
    )
    records = [twice if record.name == "w" else record for record in index.tensors.values()]
    forger.put_index(Index(records, index.files.values(), index.aliases))
    assert any(
        problem.key.endswith(layout.INDEX) and "chunks of 'w' overlap" in problem.message
        for problem in problems(run)
    )


# --------------------------------------------------------------------------------------- documents


def test_a_reference_to_a_tensor_that_is_not_stored_is_told(forger: Forger, run: Run) -> None:
    text = forger.read(layout.STATE).replace(b'"v":"w"', b'"v":"z"')
    forger.put(layout.STATE, text)
    assert only(run) == (layout.STATE, "refers to the tensor 'z', which the index does not hold")


@pytest.mark.parametrize("tag", ("ndarray", "generator", "tensor", "per_rank"))
def test_every_kind_of_reference_is_followed(forger: Forger, run: Run, tag: str) -> None:
    payloads = {
        "ndarray": ["gone", "<f4"],
        "generator": ["cpu", "gone"],
        "tensor": "gone",
        "per_rank": "gone",
    }
    state = members(forger, layout.STATE)
    state["document"]["v"].append(["deep", [{"$": "tuple", "v": [{"$": tag, "v": payloads[tag]}]}]])
    forger.put(layout.STATE, document(forger, "state", state))
    file, message = only(run)
    assert "'gone'" in message
    assert file == ("state-00000.json" if tag == "per_rank" else layout.STATE)


@pytest.mark.parametrize(
    "node",
    (
        {"$": "tensor", "v": 7},
        {"$": "ndarray", "v": ["w"]},
        {"$": "generator", "v": "w"},
        {"$": "per_rank", "v": None},
        {"v": 1},
        {"$": "tuple", "v": [], "w": 1},
        {"$": 7, "v": []},
    ),
)
def test_what_is_no_node_is_told(forger: Forger, run: Run, node: dict[str, Any]) -> None:
    forger.put(layout.STATE, document(forger, "state", {"document": [node]}))
    assert only(run)[0] == layout.STATE


def test_a_document_of_another_step_is_told(forger: Forger, run: Run) -> None:
    for path in (layout.STATE, layout.PROVENANCE, "state-00000.json"):
        own = forger.read(path)
        forger.put(path, (run.folder(2) / "data" / path).read_bytes())
        file, message = only(run)
        assert file == path
        assert "belongs to another checkpoint" in message
        forger.put(path, own)


def test_one_document_in_place_of_another_is_told(forger: Forger, run: Run) -> None:
    forger.put(layout.STATE, forger.read(layout.PROVENANCE))
    file, message = only(run)
    assert file == layout.STATE
    assert "kind" in message


def test_a_value_that_a_rank_lacks_or_has_too_many_is_told(forger: Forger, run: Run) -> None:
    path = "state-00000.json"
    forger.put(path, document(forger, "rank_state", {"rank": 0, "values": [["other", 1]]}))
    assert {problem.message for problem in problems(run)} == {
        "lacks the value 'mine', which every rank stores",
        "holds the value 'other', which the state does not refer to",
    }
    forger.put(path, document(forger, "rank_state", {"rank": 0, "values": [["mine", 1], ["mine", 2]]}))
    assert only(run) == (path, "names a value twice")
    forger.put(path, document(forger, "rank_state", {"rank": 0, "values": {"mine": 1}}))
    assert only(run) == (path, "does not hold pairs of a name and a value")
    forger.put(path, document(forger, "rank_state", {"rank": 1, "values": [["mine", 1]]}))
    assert only(run) == (path, "says that it is of rank 1")


def test_a_rank_without_its_own_state_is_told(forger: Forger, run: Run) -> None:
    forger.drop("state-00000.json")
    file, message = only(run)
    assert file == layout.MANIFEST
    assert "does not list state-00000.json" in message


def test_files_of_a_rank_that_did_not_take_part_are_told(forger: Forger, run: Run) -> None:
    forger.put("state-00001.json", document(forger, "rank_state", {"rank": 1, "values": [["mine", 1]]}))
    file, message = only(run)
    assert file == layout.MANIFEST
    assert "lists state-00001.json, and says that 1 ranks wrote" in message


@pytest.mark.parametrize("path", (layout.INDEX, layout.STATE, layout.PROVENANCE))
def test_a_file_that_every_checkpoint_has_and_this_one_does_not_is_told(
    forger: Forger, run: Run, path: str
) -> None:
    forger.drop(path)
    assert (layout.MANIFEST, f"does not list {path}, which every checkpoint has") in [
        (problem.key.rsplit("/", 1)[-1], problem.message) for problem in problems(run)
    ]


def test_provenance_that_refers_to_tensors_or_has_odd_tags_is_told(forger: Forger, run: Run) -> None:
    provenance = members(forger, layout.PROVENANCE)
    forger.put(layout.PROVENANCE, document(forger, "provenance", {**provenance, "tags": [1]}))
    assert only(run) == (layout.PROVENANCE, "has tags that are not all texts")
    forger.put(
        layout.PROVENANCE,
        document(forger, "provenance", {**provenance, "metrics": {"$": "tensor", "v": "w"}}),
    )
    assert only(run)[0] == layout.PROVENANCE


def test_a_file_that_no_reader_would_accept_is_told(
    forger: Forger, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strongroom import consistency

    monkeypatch.setattr(consistency, "DOCUMENT_BOUNDS", canonical.Bounds(length_bytes=50))
    assert {problem.key.rsplit("/", 1)[-1] for problem in problems(run)} == {
        layout.STATE,
        layout.PROVENANCE,
        "state-00000.json",
    }


# ------------------------------------------------------------------- commit, manifest, launch, parent


def test_a_commit_that_says_another_size_is_told(forger: Forger, run: Run) -> None:
    forger.put_manifest(forger.manifest, size_bytes=1)
    file, message = only(run)
    assert file == layout.COMMIT
    assert "says that the files have 1 bytes together" in message


def test_a_manifest_that_says_it_is_another_checkpoint_is_told(forger: Forger, run: Run) -> None:
    other = CheckpointName(launch=2, step=4, attempt=forger.name.attempt)
    forger.put_manifest(dataclasses.replace(forger.manifest, name=other))
    assert only(run)[0] == layout.MANIFEST


def test_a_parent_that_is_not_where_the_launch_began_is_told(forger: Forger, run: Run) -> None:
    parent = forger.manifest.parent
    assert parent is not None
    forger.put_manifest(dataclasses.replace(forger.manifest, parent=None))
    assert "its parent is none, and launch 2 took the run up from step 2" in only(run)[1]
    itself = CheckpointRef(launch=2, step=3, attempt=forger.name.attempt, manifest=parent.manifest)
    forger.put_manifest(dataclasses.replace(forger.manifest, parent=itself))
    assert any("is not older than itself" in problem.message for problem in problems(run))


def test_a_parent_that_was_replaced_is_told_by_those_that_refer_to_it(
    run: Run, forger_at: Callable[[int], Forger]
) -> None:
    forger = forger_at(2)
    forger.put(layout.STATE, forger.read(layout.STATE).replace(b'["epoch",2]', b'["epoch",9]'))
    assert {problem.key for problem in problems(run)} == {
        "launches/000002.json",
        f"{run.newest.name}/data/MANIFEST.json",
    }
    assert all("its parent is step 2" in problem.message for problem in problems(run))


def test_a_launch_whose_number_or_parent_is_another_is_told(run: Run) -> None:
    path = run.root / "launches/000002.json"
    launch = Launch.decode(path.read_bytes(), "launch")
    path.write_bytes(dataclasses.replace(launch, launch=5).encode())
    assert [(problem.key, problem.kind) for problem in problems(run)] == [("launches/000002.json", "damaged")]
    path.write_bytes(dataclasses.replace(launch, parent=None).encode())
    assert only(run)[0] == layout.MANIFEST


def test_references_of_a_document_are_found_wherever_they_stand() -> None:
    from strongroom.consistency import references

    found = references(
        {
            "$": "dict",
            "v": [
                ["$", "tensor"],
                ["v", "no reference: a pair of a dict"],
                ["a", [{"$": "object", "v": ["name", {"$": "tensor", "v": "one"}]}]],
                [{"$": "tuple", "v": [1]}, {"$": "per_rank", "v": "own"}],
                ["m", {"$": "module", "v": [{"$": "dict", "v": []}, ["w", {"$": "tensor", "v": "two"}]]}],
            ],
        }
    )
    assert found.tensors == {"one", "two"}
    assert found.per_rank == {"own"}
    with pytest.raises(FormatError, match="no node"):
        references([{"x": 1}])
