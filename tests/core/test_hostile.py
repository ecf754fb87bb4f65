"""Checkpoints that somebody made up, every digest right: refused with an error of ours, and nothing else.

Whoever can write to the storage of an unsigned run can forge its content. That must not become
more than wrong content: no crash, no loop without end, no file outside the root.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn, optim

from strongroom import (
    Checkpointer,
    FormatError,
    IntegrityError,
    PerRank,
    StateError,
    StrongroomError,
    canonical,
)
from strongroom.digest import digest_of_bytes, sha256_of
from strongroom.index import Index, decode_index, encode_index
from strongroom.stores.memory import MemoryStore


def training() -> dict[str, Any]:
    """A state with one of everything that a document has a form of its own for."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = optim.AdamW(model.parameters())
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": optim.lr_scheduler.StepLR(optimizer, 1),
        "generator": torch.Generator(),
        "tensor": torch.ones(3),
        "list": [torch.ones(2), (torch.zeros(1), 5)],
        "extra": {"rank": PerRank({"t": torch.ones(2)}), "plain": {1: [None, "x", 2.5]}},
    }


class Forger:
    """A checkpoint whose files may be rewritten with every digest made right again."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.store = MemoryStore()
        if state is None:
            state = training()
            state["model"](torch.randn(4, 2)).sum().backward()
            state["optimizer"].step()
        with Checkpointer(self.store, digest="sha256") as checkpointer:
            self.folder = checkpointer.save(1, state).result().folder
        self.contents = self.store.contents()

    def document(self, name: str) -> Any:
        return json.loads(self.contents[f"{self.folder}/data/{name}"])

    def forge(self, name: str, data: Any) -> MemoryStore:
        """The same run with one file of the checkpoint replaced."""
        contents = dict(self.contents)
        content = data if isinstance(data, bytes) else canonical.encode(data)
        contents[f"{self.folder}/data/{name}"] = content
        manifest = json.loads(contents[f"{self.folder}/data/MANIFEST.json"])
        for record in manifest["files"]:
            if record["path"] == name:
                record |= {"size": len(content), "digest": str(digest_of_bytes("sha256", content))}
        return self._pinned(contents, canonical.encode(manifest))

    def forge_manifest(self, manifest: Any) -> MemoryStore:
        return self._pinned(dict(self.contents), canonical.encode(manifest))

    def _pinned(self, contents: dict[str, bytes], manifest: bytes) -> MemoryStore:
        contents[f"{self.folder}/data/MANIFEST.json"] = manifest
        commit = json.loads(contents[f"{self.folder}/COMMIT"])
        del commit[canonical.SELF_DIGEST]
        commit["manifest"] = str(sha256_of(manifest))
        contents[f"{self.folder}/COMMIT"] = canonical.with_self_digest(commit)
        store = MemoryStore()
        store.plant(contents)
        return store

    def state(self, document: Any) -> MemoryStore:
        return self.forge("state.json", {**self.document("state.json"), "document": document})


@pytest.fixture(scope="module")
def forger() -> Forger:
    return Forger()


def node(tag: str, payload: Any) -> dict[str, Any]:
    return {"$": tag, "v": payload}


def as_dict(**values: Any) -> dict[str, Any]:
    return node("dict", [[name, value] for name, value in values.items()])


def nested(tag: str, depth: int, inner: Any = None) -> Any:
    found = inner
    for _ in range(depth):
        found = node(tag, found)
    return found


def attempt(store: MemoryStore, template: Any = None, **options: Any) -> Any:
    return Checkpointer(store).restore(template, **options)


def test_the_forger_of_these_tests_changes_nothing_by_itself(forger: Forger) -> None:
    store = forger.state(forger.document("state.json")["document"])
    assert store.contents() == forger.contents
    assert attempt(store, training()).step == 1


DOCUMENTS: dict[str, Any] = {
    "nothing": None,
    "a list": [],
    "an unknown tag": as_dict(a=node("pickle", "gASVAA==")),
    "a tag that is no text": as_dict(a={"$": 1, "v": 1}),
    "no tag": as_dict(a={"x": 1}),
    "more than tag and payload": as_dict(a={"$": "tuple", "v": [], "x": 1}),
    "a tensor that is not stored": as_dict(a=node("tensor", "no such")),
    "a tensor named by a number": as_dict(a=node("tensor", 7)),
    "a tensor named by a list": as_dict(a=node("tensor", ["tensor"])),
    "an array of a tensor that is not stored": as_dict(a=node("ndarray", ["no such", "<f4"])),
    "an array of another dtype": as_dict(a=node("ndarray", ["tensor", "<i8"])),
    "an array of a pickle": as_dict(a=node("ndarray", ["tensor", "|O8"])),
    "an array without parts": as_dict(a=node("ndarray", None)),
    "a generator without parts": as_dict(a=node("generator", [])),
    "a generator whose state is none": as_dict(a=node("generator", ["cpu", "tensor"])),
    "a generator on an odd device": as_dict(a=node("generator", [7, "tensor"])),
    "a module without parts": as_dict(model=node("module", [])),
    "a module that is no list": as_dict(model=node("module", {"a": 1})),
    "a module whose versions are no dict": as_dict(model=node("module", [[], ["0.weight", None]])),
    "a module whose versions are of a rank": as_dict(model=node("module", [node("per_rank", "extra.rank")])),
    "a module with odd pairs": as_dict(model=node("module", [node("dict", []), ["0.weight"]])),
    "an optimizer without parts": as_dict(optimizer=node("optimizer", [])),
    "an optimizer whose groups are no list": as_dict(
        optimizer=node("optimizer", [None, [], node("dict", []), node("dict", [])])
    ),
    "an optimizer whose groups have no parameters": as_dict(
        optimizer=node("optimizer", [[node("dict", [])], [], node("dict", []), node("dict", [])])
    ),
    "an optimizer with state of nobody": as_dict(
        optimizer=node(
            "optimizer",
            [[node("dict", [["params", ["a"]]])], [["b", None]], node("dict", []), node("dict", [])],
        )
    ),
    "an optimizer whose parameters are lists": as_dict(
        optimizer=node(
            "optimizer", [[node("dict", [["params", [["a"]]]])], [], node("dict", []), node("dict", [])]
        )
    ),
    "an optimizer whose further state is no dict": as_dict(optimizer=node("optimizer", [[], [], 7, 7])),
    "a value of a rank named by a list": as_dict(a=node("per_rank", [])),
    "objects within objects": as_dict(a=nested("stateful", 480)),
    "tuples within tuples": as_dict(a=nested("tuple", 200, [])),
    "a key twice": node("dict", [["a", 1], ["a", 2]]),
    "a key that cannot be one": node("dict", [[[], 1]]),
    "a tensor as a key": node("dict", [[node("tensor", "tensor"), 1]]),
    "a rank's value as a key": node("dict", [[node("per_rank", "extra.rank"), 1]]),
    "a float that is none": as_dict(a=node("float", "x")),
}


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS.keys())
@pytest.mark.parametrize("how", ("anew", "into a template"))
def test_a_forged_document_is_refused(document: Any, how: str, forger: Forger) -> None:
    store = forger.state(document)
    with pytest.raises((IntegrityError, StateError)):
        attempt(store, None if how == "anew" else training())


def test_values_of_a_rank_that_refer_to_each_other_are_refused_and_not_followed_for_ever() -> None:
    forger = Forger({"a": PerRank(1), "b": PerRank(2)})
    ranks = forger.document("state-00000.json")
    for values in (
        [["a", node("per_rank", "a")], ["b", 2]],
        [["a", node("per_rank", "b")], ["b", node("per_rank", "a")]],
        [["a", [node("per_rank", "b")] * 3], ["b", [node("per_rank", "a")] * 3]],
    ):
        store = forger.forge("state-00000.json", {**ranks, "values": values})
        for template in (None, {"a": None, "b": None}):
            with pytest.raises(IntegrityError):
                attempt(store, template)


@pytest.mark.parametrize("values", (None, {}, [1], [["a"]], [["a", 1, 2]], [[1, 2]]), ids=repr)
def test_a_forged_document_of_a_rank_is_refused(values: Any) -> None:
    forger = Forger({"a": PerRank(1)})
    ranks = forger.document("state-00000.json")
    with pytest.raises(IntegrityError):
        attempt(forger.forge("state-00000.json", {**ranks, "values": values}))


@pytest.mark.parametrize("member", ("run", "step", "launch", "attempt", "kind", "format", "document", "more"))
def test_a_document_that_belongs_elsewhere_or_has_odd_members_is_refused(member: str, forger: Forger) -> None:
    document = forger.document("state.json")
    with pytest.raises(StrongroomError):
        attempt(forger.forge("state.json", {**document, member: "other"}), training())
    if member != "more":
        del document[member]
        with pytest.raises(StrongroomError):
            attempt(forger.forge("state.json", document), training())


def test_a_note_in_a_document_is_ignored(forger: Forger) -> None:
    document = {**forger.document("state.json"), "x-note": {"anything": [1]}}
    assert attempt(forger.forge("state.json", document), training()).step == 1


def test_a_thousand_references_to_one_array_give_one_array() -> None:
    forger = Forger({"a": np.ones(3, ">f4")})
    ((_, reference),) = forger.document("state.json")["document"]["v"]
    restored = attempt(forger.state(as_dict(a=[reference] * 1000)))
    assert restored is not None
    assert len({id(array) for array in restored.state["a"]}) == 1


def test_bytes_that_two_tensors_claim_are_refused() -> None:
    forger = Forger({"a": torch.ones(8), "b": torch.zeros(8)})
    index, metadata = decode_index(forger.contents[f"{forger.folder}/data/index.safetensors"], "the index")
    a, b = index.tensors.values()
    moved = replace(b, chunks=(replace(b.chunks[0], start=a.chunks[0].start + 4),))
    index = Index([a, moved], index.files.values(), index.aliases)
    with pytest.raises(IntegrityError, match="two chunks share bytes of 00000-00"):
        attempt(forger.forge("index.safetensors", encode_index(index, metadata)))


def test_a_file_that_says_it_is_huge_is_never_read_whole(forger: Forger) -> None:
    manifest = forger.document("MANIFEST.json")
    for record in manifest["files"]:
        record["size"] = 2**48
    store = forger.forge_manifest(manifest)
    with pytest.raises(IntegrityError, match=r"at most|longer|bytes"):
        attempt(store, training())


def test_a_shard_that_is_shorter_than_its_manifest_says_is_damage(forger: Forger) -> None:
    manifest = forger.document("MANIFEST.json")
    for record in manifest["files"]:
        if record["path"].startswith("00000"):
            record["size"] += 1
    with pytest.raises(IntegrityError, match=r"00000-00\.safetensors"):
        attempt(forger.forge_manifest(manifest), training())


@pytest.mark.parametrize("path", ("../../run.json", "/etc/passwd", "data/../../x", "..", "a\\b"))
def test_a_manifest_whose_paths_climb_out_is_refused(path: str, forger: Forger) -> None:
    manifest = forger.document("MANIFEST.json")
    manifest["files"][0]["path"] = path
    manifest["files"].sort(key=lambda record: record["path"])
    with pytest.raises(IntegrityError, match="not a safe path"):
        attempt(forger.forge_manifest(manifest))


# ------------------------------------------------------------------------------------------- links


@pytest.fixture
def saved(root: Path, begin: Any) -> Path:
    with begin(root) as checkpointer:
        checkpointer.save(1, {"t": torch.ones(3)})
        checkpointer.save(2, {"t": torch.full((3,), 2.0)})
    return root


@pytest.mark.parametrize("what", ("data", "data/00000-00.safetensors", "data/state.json", "COMMIT", "."))
def test_a_link_in_a_checkpoint_is_not_followed_even_to_the_right_bytes(
    what: str, saved: Path, tmp_path: Path, begin: Any
) -> None:
    (folder,) = saved.glob("step-000000000002-*")
    target = folder / what if what != "." else folder
    aside = tmp_path / "aside"
    target.rename(aside)
    target.symlink_to(aside)
    restored = begin(saved).restore()
    assert restored.step == 1
    if what != ".":
        assert [step for step, _ in restored.skipped] == [2]


@pytest.mark.parametrize("what", ("launches", "run.json"))
def test_a_link_in_place_of_a_record_is_not_followed(
    what: str, saved: Path, tmp_path: Path, begin: Any
) -> None:
    aside = tmp_path / "aside"
    (saved / what).rename(aside)
    (saved / what).symlink_to(aside)
    with pytest.raises(StrongroomError):
        begin(saved).save(3, {"t": torch.ones(3)})


def test_nothing_is_written_or_removed_through_a_link(saved: Path, tmp_path: Path, begin: Any) -> None:
    from strongroom import KeepLast

    outside = tmp_path / "outside"
    (outside / "data").mkdir(parents=True)
    (outside / "COMMIT").write_text("mine")
    (outside / "data" / "mine").write_text("mine")
    (saved / "step-000000000000-0001-0123456789abcdef").symlink_to(outside)
    checkpointer = begin(saved, keep=KeepLast(count=1))
    checkpointer.restore()
    checkpointer.save(3, {"t": torch.ones(3)}).result()
    checkpointer.wait()
    assert (outside / "COMMIT").read_text() == (outside / "data" / "mine").read_text() == "mine"


def test_a_pipe_in_place_of_a_file_does_not_hang(saved: Path, begin: Any) -> None:
    (path,) = saved.glob("step-000000000002-*/data/00000-00.safetensors")
    path.unlink()
    os.mkfifo(path)
    assert begin(saved).restore().step == 1


# ----------------------------------------------------------------------------------------- fuzzing


def places(document: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at]
    if isinstance(document, dict | list):
        for key, item in document.items() if isinstance(document, dict) else enumerate(document):
            found += places(item, (*at, key))
    return found


def replaced(document: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    key, *rest = at
    copied = dict(document) if isinstance(document, dict) else list(document)
    copied[key] = replaced(document[key], tuple(rest), value)
    return copied


tags = st.sampled_from(
    ["tensor", "ndarray", "generator", "module", "optimizer", "stateful", "per_rank", "dict", "ordered_dict",
     "tuple", "set", "counter", "defaultdict", "deque", "float", "int", "bytes", "object", "numpy.array"]
)  # fmt: skip
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from(["tensor", "model.0.weight", "extra.rank", "params", "cpu", "<f4", "", "x"])
)
forged_nodes = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.builds(node, tags, inner)
        | st.builds(
            lambda pairs: node("dict", pairs), st.lists(st.tuples(scalars, inner).map(list), max_size=3)
        )
    ),
    max_leaves=6,
)


@settings(
    max_examples=max(1, 150 * settings.default.max_examples // 100),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_no_document_does_more_than_be_refused(forger: Forger, data: st.DataObject) -> None:
    document = forger.document("state.json")["document"]
    for _ in range(data.draw(st.integers(1, 2))):
        document = replaced(document, data.draw(st.sampled_from(places(document))), data.draw(forged_nodes))
    try:
        store = forger.state(document)
    except FormatError:
        return  # no JSON of ours
    build: Callable[[], Any]
    for build in (lambda: None, training):
        try:
            attempt(store, build(), strict=data.draw(st.booleans()))
        except StrongroomError as error:
            assert isinstance(error, IntegrityError | StateError), error  # noqa: PT017
