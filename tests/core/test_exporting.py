"""A model handed over as safetensors: every bit of it, whole or not at all, and nothing else."""

from __future__ import annotations

import errno
import getpass
import itertools
import json
import math
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, load_model

from strongroom import Checkpointer, ConfigError, FormatError, IntegrityError, PerRank, layout
from strongroom.catalog import Catalog
from strongroom.columns import Chunk, TensorRecord
from strongroom.digest import DigestAlgorithm, sha256_of
from strongroom.dtypes import DTYPE_BYTES, bytes_of, dtype_name, torch_dtype
from strongroom.errors import StoreFullError
from strongroom.exporting.choice import choose
from strongroom.exporting.export import Exported, export
from strongroom.exporting.newfolder import NewFile, NewFolder
from strongroom.exporting.reading import pieces_of
from strongroom.exporting.shardfiles import parse_size, plan_files
from strongroom.index import Index, ShardFile, encode_index
from strongroom.layout import CheckpointName
from strongroom.opened import OpenedCheckpoint, encode_document, open_checkpoint
from strongroom.shards import ChunkSpec, binding, lay_out
from strongroom.signing import NO_GUARD
from strongroom.stores.calls import OsCalls
from strongroom.stores.memory import MemoryStore
from strongroom.transaction import Attempt, Deadline, begin_run, claim_launch
from strongroom.values import Encoder

MiB = 1 << 20


class Tied(torch.nn.Module):
    """A small language model's shape: tied embeddings, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight


class Noted(Tied):
    """The same, with a state that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"a note": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def saved(state: Mapping[str, Any], **options: Any) -> MemoryStore:
    store = MemoryStore()
    given = {name: options.pop(name) for name in ("provenance",) if name in options}
    with Checkpointer(store, run_id="demo", **options) as checkpointer:
        checkpointer.save(7, state, **given).result()
    return store


def opened(store: Any) -> OpenedCheckpoint:
    history = Catalog(store).history()
    return open_checkpoint(store, history.commits[history.line.newest_first[0]], NO_GUARD)


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        assert not set(tensors) & set(found)
        found |= tensors
    return found


def metadata_of(path: Path) -> dict[str, str]:
    with safetensors.safe_open(path, "pt") as file:
        return dict(file.metadata())


def assert_same_bits(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert bytes(bytes_of(found[name])) == bytes(bytes_of(tensor.contiguous())), name


# ------------------------------------------------------- a checkpoint of many ranks, made by one


def cut(tensor: torch.Tensor, places: Sequence[Sequence[int]]) -> list[tuple[tuple[int, ...], Any]]:
    """The cells of a grid: for each dimension the places where it is cut."""
    spans = []
    for size, cuts in zip(tensor.shape, places, strict=True):
        edges = sorted({0, *(place for place in cuts if 0 < place < size), size})
        spans.append(list(itertools.pairwise(edges)) if size else [(0, 0)])
    cells = []
    for cell in itertools.product(*spans):
        part = tensor
        for dimension, (begin, end) in enumerate(cell):
            part = part.narrow(dimension, begin, end - begin)
        cells.append((tuple(begin for begin, _ in cell), part.contiguous()))
    return cells


def save_cut(
    store: MemoryStore,
    tensors: Mapping[str, torch.Tensor],
    places: Mapping[str, Sequence[Sequence[int]]],
    *,
    algorithm: DigestAlgorithm,
    ranks: int,
) -> None:
    """Commit tensors that lie in pieces in the files of several ranks, as a mesh leaves them."""
    run = begin_run(store, draw_run_id=lambda: "demo", now_ms=0)
    launch = claim_launch([store], run=run.run, parent=None, taken=(), deadline_s=60, now_ms=0)
    name = CheckpointName(launch=1, step=7, attempt="0123456789abcdef")
    attempt = Attempt(
        store,
        seal=None,
        signing=None,
        launch=launch,
        name=name,
        parent=None,
        algorithm=algorithm,
        world_size=ranks,
        deadline=Deadline.after(60, time.monotonic),
        now_ms=lambda: 0,
    )
    bound = binding(run.run, name)
    data: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
    of_rank: list[list[ChunkSpec]] = [[] for _ in range(ranks)]
    for key, tensor in tensors.items():
        cells = cut(tensor, places[key])
        for number, (offsets, part) in enumerate(cells):
            dtype = dtype_name(tensor.dtype)
            assert dtype is not None
            spec = ChunkSpec(f"model.{key}", dtype, offsets, tuple(part.shape), is_whole=len(cells) == 1)
            data[spec.tensor, offsets] = part
            of_rank[number % ranks].append(spec)
    records, files = [], []
    chunks: dict[str, list[Chunk]] = {f"model.{key}": [] for key in tensors}
    for rank, specs in enumerate(of_rank):
        for shard in lay_out(specs, rank=rank, parts=2, metadata=bound) if specs else []:
            pieces = [shard.header(bound), *(bytes_of(data[s.tensor, s.offsets]) for s in shard.chunks)]
            written = attempt.write(shard.path, pieces, length_bytes=shard.size_bytes)
            records.append(written.record)
            files.append(ShardFile(shard.path, written.block_digests))
            for spec, start in zip(shard.chunks, shard.starts, strict=True):
                chunks[spec.tensor].append(Chunk(spec.offsets, spec.sizes, shard.path, start))
    index = Index(
        [
            TensorRecord(
                f"model.{key}", dtype_name(one.dtype) or "", tuple(one.shape), tuple(chunks[f"model.{key}"])
            )
            for key, one in tensors.items()
        ],
        files,
    )
    module = {
        "$": "module",
        "v": [{"$": "dict", "v": []}, *([key, {"$": "tensor", "v": f"model.{key}"}] for key in tensors)],
    }
    empty = Encoder().encode({}, ())
    documents = {
        layout.INDEX: encode_index(index, bound),
        layout.STATE: encode_document(
            "state", run.run, name, {"document": {"$": "dict", "v": [["model", module]]}}
        ),
        layout.PROVENANCE: encode_document(
            "provenance",
            run.run,
            name,
            {"metrics": empty, "producer": {}, "provenance": empty, "tags": []},
        ),
    }
    records += [attempt.write_whole(path, data).record for path, data in documents.items()]
    attempt.commit(records)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], dict[str, list[list[int]]]]:
    tensors, places = {}, {}
    for number in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(0, 7), max_size=3))
        dtype = torch_dtype(draw(st.sampled_from(list(DTYPE_BYTES))))
        size = math.prod(shape) * dtype.itemsize
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
        tensors[f"t{number}"] = raw.view(dtype).view(shape)
        places[f"t{number}"] = [draw(st.lists(st.integers(1, 6), max_size=2)) for _ in shape]
    return tensors, places


@settings(max_examples=60)
@given(
    cut_tensors(),
    st.sampled_from(["blake3", "sha256"]),
    st.integers(1, 3),
    st.sampled_from([1, 16, 100, 10**9]),
    st.sampled_from([1, 40, 10**9]),
)
def test_whatever_mesh_a_model_lay_on_its_tensors_come_out_bit_for_bit(
    made: tuple[dict[str, torch.Tensor], dict[str, list[list[int]]]],
    algorithm: DigestAlgorithm,
    ranks: int,
    piece_bytes: int,
    max_shard_bytes: int,
) -> None:
    tensors, places = made
    store = MemoryStore()
    save_cut(store, tensors, places, algorithm=algorithm, ranks=ranks)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        exported = export(opened(store), out, piece_bytes=piece_bytes, max_shard_bytes=max_shard_bytes)
        assert_same_bits(loaded(out), tensors)
    assert exported.tensors == len(tensors)
    assert exported.size_bytes == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("algorithm", ("blake3", "sha256"))
def test_large_tensors_cut_along_columns_come_out_bit_for_bit(
    algorithm: DigestAlgorithm, tmp_path: Path
) -> None:
    tensors = {"wide": torch.randn(700, 1500), "long": torch.randn(3 * MiB // 4 + 5)}
    places = {"wide": [[350], [1, 749, 1200]], "long": [[5, MiB // 4]]}
    store = MemoryStore()
    save_cut(store, tensors, places, algorithm=algorithm, ranks=3)
    export(opened(store), tmp_path / "out", piece_bytes=MiB)
    assert_same_bits(loaded(tmp_path / "out"), tensors)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(["F32", "U8", "F64"]))),
    st.integers(1, 200),
)
def test_pieces_are_bounded_and_add_up_to_the_file(
    described: list[tuple[list[int], str]], piece_bytes: int
) -> None:
    tensors = [
        (f"t{number}", TensorRecord(f"t{number}", dtype, tuple(shape), ()))
        for number, (shape, dtype) in enumerate(described)
    ]
    pieces = list(pieces_of(tensors, piece_bytes))
    row_bytes = {
        name: record.size_bytes // max(1, record.shape[0] if record.shape else 1) for name, record in tensors
    }
    taken = dict.fromkeys(row_bytes, 0)
    for piece in pieces:
        assert piece.size_bytes == sum(part.size_bytes for part in piece.parts)
        assert piece.size_bytes <= piece_bytes or (
            len(piece.parts) == 1 and piece.size_bytes == row_bytes[piece.parts[0].name]
        )
        for part in piece.parts:
            taken[part.name] += part.size_bytes
    assert taken == {name: record.size_bytes for name, record in tensors}


class Counting(MemoryStore):
    """Counts the bytes of shards that are read."""

    read_bytes = 0

    def open_reader(self, key: str) -> Any:
        reader = super().open_reader(key)
        store = self

        class Reader(type(reader)):  # type: ignore[misc]
            def read_into(self, offset_bytes: int, buffer: memoryview) -> int:
                filled = int(super().read_into(offset_bytes, buffer))
                store.read_bytes += filled
                return filled

        reader.__class__ = Reader
        return reader


@pytest.mark.parametrize(("algorithm", "times"), (("blake3", 1), ("sha256", 2)))
def test_no_shard_is_read_again_for_every_file_that_is_written(
    algorithm: str, times: int, tmp_path: Path
) -> None:
    store = Counting()
    state = {f"t{number}": torch.randn(MiB) for number in range(8)}
    with Checkpointer(store, digest=algorithm) as checkpointer:
        checkpointer.save(7, {"model": state}).result()
    export(opened(store), tmp_path / "out", piece_bytes=2 * MiB, max_shard_bytes=8 * MiB)
    total = sum(tensor.nbytes for tensor in state.values())
    # A block on the border of two pieces, of which there are 16, is read for both.
    assert store.read_bytes <= times * total + 20 * MiB


# ------------------------------------------------------------------------------- which tensors


def test_names_are_those_of_the_state_dict_whatever_they_are_stored_as(tmp_path: Path) -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = torch.nn.ParameterDict(
                {
                    "we%ird=name[0]@x": torch.nn.Parameter(torch.ones(2)),
                    "0": torch.nn.Parameter(torch.zeros(3)),
                }
            )

    model = Odd()
    export(opened(saved({"model": model})), tmp_path / "out")
    assert_same_bits(loaded(tmp_path / "out"), model.state_dict())


def test_only_the_model_is_handed_over(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {
        "optimizer": optimizer,
        "model": model,
        "generator": torch.Generator(),
        "extra": {"secret": "hyper-parameter", "running": torch.ones(5)},
        "mine": PerRank({"x": torch.ones(2)}),
    }
    exported = export(opened(saved(state)), tmp_path / "out")
    assert_same_bits(loaded(tmp_path / "out"), model.state_dict())
    assert exported.left_out == ()
    assert b"hyper-parameter" not in b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())


def test_tied_tensors_are_written_once_and_told_where_loaders_look(tmp_path: Path) -> None:
    model = Tied()
    exported = export(opened(saved({"model": model})), tmp_path / "out")
    assert exported.tied == {"head.weight": "embed.weight"}
    assert "head.weight" not in loaded(tmp_path / "out")
    assert metadata_of(tmp_path / "out/model.safetensors") == {
        "format": "pt",
        "head.weight": "embed.weight",
    }
    record = json.loads((tmp_path / "out/strongroom.json").read_bytes())
    assert record["tied"] == {"head.weight": "embed.weight"}
    other = Tied()
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    load_model(other, tmp_path / "out/model.safetensors", strict=True)
    assert torch.equal(other.head.weight, model.embed.weight)


def test_a_tensor_that_is_stored_under_a_name_outside_of_the_model_is_the_models_all_the_same(
    tmp_path: Path,
) -> None:
    model = torch.nn.Linear(3, 2)
    export(opened(saved({"average": model.weight, "model": model})), tmp_path / "out")
    assert_same_bits(loaded(tmp_path / "out"), model.state_dict())


def test_what_is_no_tensor_is_left_out_and_named(tmp_path: Path) -> None:
    exported = export(opened(saved({"model": Noted()})), tmp_path / "out")
    assert exported.left_out == ("_extra_state",)
    assert json.loads((tmp_path / "out/strongroom.json").read_bytes())["left_out"] == ["_extra_state"]


def test_a_state_dict_that_was_saved_as_a_plain_dict_is_a_model_too(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    export(opened(saved({"weights": model.state_dict(), "step": 5})), tmp_path / "out")
    assert_same_bits(loaded(tmp_path / "out"), model.state_dict())


def test_nested_dicts_and_lists_are_named_by_dots(tmp_path: Path) -> None:
    state = {"model": {"a": {"b": torch.ones(1)}, "c": [torch.zeros(2), (torch.ones(3),)], 5: torch.ones(4)}}
    export(opened(saved(state)), tmp_path / "out")
    assert set(loaded(tmp_path / "out")) == {"a.b", "c.0", "c.1.0", "5"}


def test_a_state_that_plain_dcp_had_flattened_is_found_by_its_prefix() -> None:
    index = Index([TensorRecord("model%2Ea", "F32", (0,), ())], [])
    document = {"$": "dict", "v": [["model.a", {"$": "tensor", "v": "model%2Ea"}], ["other", 1]]}
    assert set(choose(document, index, key="model").tensors) == {"a"}


def test_the_only_module_is_the_model_and_of_several_one_must_be_named(tmp_path: Path) -> None:
    one, other = torch.nn.Linear(1, 2), torch.nn.Linear(2, 3)
    assert export(opened(saved({"net": one, "x": torch.ones(2)})), tmp_path / "one").key == "net"
    several = opened(saved({"student": one, "teacher": other}))
    with pytest.raises(ConfigError, match=r"several that could be it \('student', 'teacher'\).*--key"):
        export(several, tmp_path / "none")
    export(several, tmp_path / "teacher", key="teacher")
    assert_same_bits(loaded(tmp_path / "teacher"), other.state_dict())


@pytest.mark.parametrize(
    ("key", "told"),
    (
        ("nothing", "has no 'nothing'; its keys are 'model'"),
        ("optimizer", "is an optimizer"),
        ("mine", "each rank's own"),
        ("number", "holds no tensor"),
    ),
)
def test_what_is_no_model_is_refused_by_name(key: str, told: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    state = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "mine": PerRank(torch.ones(1)),
        "number": 5,
    }
    with pytest.raises(ConfigError, match=told):
        export(opened(saved(state)), tmp_path / "out", key=key)
    assert list(tmp_path.iterdir()) == []


def test_patterns_choose_among_the_tensors_and_one_that_fits_nothing_is_refused(tmp_path: Path) -> None:
    checkpoint = opened(saved({"model": Tied()}))
    export(checkpoint, tmp_path / "out", only=["layers.0", "*.running_*"])
    assert set(loaded(tmp_path / "out")) == {
        "layers.0.weight",
        "layers.0.bias",
        "norm.running_mean",
        "norm.running_var",
    }
    with pytest.raises(ConfigError, match=r"fits 'layers\.7'"):
        export(checkpoint, tmp_path / "none", only=["layers.0", "layers.7"])
    # Where the name that is stored is not asked for, its other name is.
    export(checkpoint, tmp_path / "head", only=["head.*"])
    assert set(loaded(tmp_path / "head")) == {"head.weight"}


def test_a_prefix_is_left_off(tmp_path: Path) -> None:
    outer = torch.nn.Module()
    outer.net = torch.nn.Linear(2, 2)
    outer.net_of_another_kind = torch.nn.Linear(2, 2)
    checkpoint = opened(saved({"model": outer}))
    for prefix in ("net", "net."):
        export(checkpoint, tmp_path / f"out{prefix}", strip_prefix=prefix)
        assert_same_bits(loaded(tmp_path / f"out{prefix}"), outer.net.state_dict())
    with pytest.raises(ConfigError, match="holds no tensor below 'nothing'"):
        export(checkpoint, tmp_path / "none", strip_prefix="nothing")


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    state = {"model": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}}
    with pytest.raises(ConfigError, match=r"exported as 'a\.b', a name that another has"):
        export(opened(saved(state)), tmp_path / "out")


def test_the_name_that_safetensors_keeps_for_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'__metadata__', a name that safetensors keeps"):
        export(opened(saved({"model": {"__metadata__": torch.ones(1)}})), tmp_path / "out")


@pytest.mark.parametrize(
    "document",
    (
        [],
        {"$": "dict", "v": [["model", {"$": "module", "v": []}]]},
        {"$": "dict", "v": [["model", {"$": "module", "v": [{}, ["a"]]}]]},
        {"$": "dict", "v": [["model", {"$": "tensor", "v": "not there"}]]},
        {"$": "dict", "v": [["model", {"$": "tensor", "v": 5}]]},
        {"$": "dict", "v": [[{"$": "dict", "v": 5}, 1]]},
    ),
)
def test_a_malformed_document_is_damage(document: Any) -> None:
    with pytest.raises(FormatError):
        choose(document, Index([], []))


# ----------------------------------------------------------------------------------- the files


def test_one_file_has_the_plain_name_and_no_index(tmp_path: Path) -> None:
    exported = export(opened(saved({"model": torch.nn.Linear(2, 2)})), tmp_path / "out")
    assert [file.name for file in exported.files] == ["model.safetensors", "strongroom.json"]
    assert not exported.has_config
    assert not exported.is_signed


def test_several_files_are_numbered_and_the_index_says_which_tensor_lies_where(tmp_path: Path) -> None:
    state = {"a": torch.ones(10), "big": torch.ones(100), "b": torch.ones(10), "c": torch.ones(15)}
    exported = export(opened(saved({"model": state})), tmp_path / "out", max_shard_bytes=100)
    assert [file.name for file in exported.files] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
        "strongroom.json",
    ]
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_bytes())
    assert index["metadata"] == {"total_size": 4 * 135}
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], state[name])
    assert set(index["weight_map"]) == set(state)
    by_file = {
        file: {n for n, f in index["weight_map"].items() if f == file}
        for file in index["weight_map"].values()
    }
    # The large one alone; the small ones as many as fit.
    assert sorted(map(sorted, by_file.values())) == [["a", "b"], ["big"], ["c"]]


def test_each_tensor_is_aligned_to_its_elements(tmp_path: Path) -> None:
    state = {
        "a": torch.ones(3, dtype=torch.uint8),
        "b": torch.ones(2, dtype=torch.float64),
        "c": torch.ones(1),
    }
    export(opened(saved({"model": state})), tmp_path / "out")
    data = (tmp_path / "out/model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:begin]).items():
        if name != "__metadata__":
            assert (begin + entry["data_offsets"][0]) % state[name].itemsize == 0


def test_a_tied_name_never_stands_in_for_the_formats_own_member() -> None:
    record = TensorRecord("a", "F32", (0,), ())
    (file,) = plan_files({"a": record}, {"format": "a"}, 100)
    assert json.loads(file.header[8:])["__metadata__"] == {"format": "pt"}


def test_a_header_longer_than_readers_accept_is_refused_and_says_what_to_do() -> None:
    record = TensorRecord("a", "F32", (0,), ())
    with pytest.raises(ConfigError, match="choose a smaller size for one file"):
        plan_files({"a" * 101_000_000: record}, {}, 100)


@pytest.mark.parametrize(
    ("text", "size"),
    (
        ("5GB", 5 * 10**9),
        ("5gb", 5 * 10**9),
        ("512MiB", 512 << 20),
        (" 2 GiB ", 2 << 30),
        ("1.5GB", 1_500_000_000),
        ("0.5KB", 500),
        ("1000000", 1_000_000),
        ("10B", 10),
        ("1TB", 10**12),
    ),
)
def test_sizes_are_read_as_the_hub_reads_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ("", "GB", "5XB", "-5GB", "0", "0.1B", "1e9", "5 G B", "\u0665GB", "1.GB", "9" * 20)
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_size(text)


def test_equal_exports_have_equal_bytes(tmp_path: Path) -> None:
    checkpoint = opened(saved({"model": Tied()}))
    for name in ("a", "b"):
        export(checkpoint, tmp_path / name, max_shard_bytes=500, piece_bytes=100 if name == "a" else 10**6)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("a", "b")
    )
    assert first == second


def test_the_record_tells_which_checkpoint_it_was_and_nothing_of_machine_or_user(tmp_path: Path) -> None:
    checkpoint = opened(saved({"model": torch.nn.Linear(2, 2)}))
    export(checkpoint, tmp_path / "out")
    text = (tmp_path / "out/strongroom.json").read_text()
    record = json.loads(text)
    assert set(record) == {
        "attempt", "kind", "launch", "left_out", "manifest", "run", "step", "strongroom", "tied",
    }  # fmt: skip
    assert (record["run"], record["step"]) == ("demo", 7)
    assert record["manifest"] == str(checkpoint.commit.manifest)
    for word in (socket.gethostname(), getpass.getuser(), str(tmp_path)):
        assert f'"{word}"' not in text


# ------------------------------------------------------------------------------------ config.json


def test_the_config_comes_from_the_provenance(tmp_path: Path) -> None:
    config = {"model_type": "tiny", "rate": 0.1, "layers": [1, 2], "dtype": None}
    provenance = {"model_config": config, "secret": "not for receivers"}
    exported = export(
        opened(saved({"model": torch.nn.Linear(1, 1)}, provenance=provenance)), tmp_path / "out"
    )
    assert exported.has_config
    assert json.loads((tmp_path / "out/config.json").read_bytes()) == config
    assert b"not for receivers" not in b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())


def test_a_config_that_is_given_is_taken_as_it_is(tmp_path: Path) -> None:
    given = b'{"model_type":   "tiny"}'
    store = saved({"model": torch.nn.Linear(1, 1)}, provenance={"model_config": {"other": 1}})
    export(opened(store), tmp_path / "out", config=given)
    assert (tmp_path / "out/config.json").read_bytes() == given


@pytest.mark.parametrize(
    "config", ("a text", {"a": b"bytes"}, {"a": float("nan")}, {(1, 2): 3}, {"password": "hunter2"})
)
def test_a_config_that_cannot_be_one_is_refused(config: Any, tmp_path: Path) -> None:
    store = saved({"model": torch.nn.Linear(1, 1)}, provenance={"model_config": config})
    with pytest.raises(ConfigError, match="--config"):
        export(opened(store), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------ whole or not at all


def shards_in(store: MemoryStore) -> list[str]:
    (folder,) = (name for name in store.list_names("") if name.startswith("step-"))
    return [
        f"{folder}data/{name}" for name in store.list_names(f"{folder}data") if layout.parse_shard_path(name)
    ]


def flip(store: MemoryStore, key: str, place: int) -> None:
    data = bytearray(store.read(key, limit_bytes=1 << 30))
    data[place] ^= 1
    store.delete(key)
    store.put(key, bytes(data))


@pytest.mark.parametrize("piece_bytes", (MiB, 1 << 30))
@pytest.mark.parametrize("algorithm", ("blake3", "sha256"))
def test_damage_anywhere_in_what_is_exported_leaves_nothing(
    algorithm: str, piece_bytes: int, tmp_path: Path
) -> None:
    state = {"model": [torch.randn(MiB) for _ in range(3)]}
    for number in range(len(shards_in(saved(state, digest=algorithm)))):
        store = saved(state, digest=algorithm)
        key = shards_in(store)[number]
        flip(store, key, -5)
        with pytest.raises(IntegrityError, match=key.rpartition("/")[2]):
            export(opened(store), tmp_path / "out", piece_bytes=piece_bytes)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("algorithm", ("blake3", "sha256"))
def test_a_shard_that_is_missing_or_cut_short_leaves_nothing(algorithm: str, tmp_path: Path) -> None:
    state = {"model": [torch.randn(MiB) for _ in range(3)]}
    for length in (None, 100, 2 * MiB):
        store = saved(state, digest=algorithm)
        key = shards_in(store)[0]
        data = store.read(key, limit_bytes=1 << 30)
        store.delete(key)
        if length is not None:
            store.put(key, data[:length])
        with pytest.raises(IntegrityError, match=key.rpartition("/")[2]):
            export(opened(store), tmp_path / "out", piece_bytes=MiB)
        assert list(tmp_path.iterdir()) == []


def test_a_byte_that_changes_after_its_file_was_verified_is_found(tmp_path: Path) -> None:
    """The memory that is checked is the memory that is written, also where a file has one digest."""
    store = saved({"model": [torch.randn(MiB) for _ in range(3)]}, digest="sha256")
    key = shards_in(store)[-1]
    seen: list[int] = []

    def change(done: int, total: int) -> None:
        # The first pass over all files ends where the half that reads their tensors begins.
        if not seen and done >= total // 2:
            seen.append(done)
            flip(store, key, -5)

    with pytest.raises(IntegrityError, match="do not have the digest"):
        export(opened(store), tmp_path / "out", piece_bytes=MiB, workers=1, on_progress=change)
    assert seen
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ("folder", "file", "link to nothing"))
def test_what_stands_at_the_place_is_never_replaced(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
    elif kind == "file":
        out.write_bytes(b"mine")
    else:
        out.symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="exists; nothing is replaced"):
        export(opened(saved({"model": torch.nn.Linear(1, 1)})), out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert kind != "file" or out.read_bytes() == b"mine"


def test_what_appears_at_the_place_meanwhile_is_never_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def sign(_: Mapping[str, bytes]) -> bytes:
        out.mkdir()
        return b"signature"

    with pytest.raises(ConfigError, match="exists; nothing is replaced"):
        export(opened(saved({"model": torch.nn.Linear(1, 1)})), out, sign=sign)
    assert list(tmp_path.iterdir()) == [out]
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("when", ("while it is read", "while it is written"))
def test_an_interrupt_leaves_nothing_and_no_thread(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = opened(saved({"model": Tied()}))
    result, write = Future.result, NewFile.write
    interrupted: list[int] = []

    def slow(file: NewFile, data: memoryview) -> None:
        time.sleep(0.2)
        write(file, data)

    def wait(future: Future[Any], timeout: float | None = None) -> Any:
        if when == "while it is written" and not interrupted and not future.done():
            interrupted.append(1)
            raise KeyboardInterrupt
        return result(future, timeout)

    def tell(_done: int, _total: int) -> None:
        if when == "while it is read":
            raise KeyboardInterrupt

    monkeypatch.setattr(NewFile, "write", slow)
    # As it comes most likely: where the main thread waits for the other one.
    monkeypatch.setattr(Future, "result", wait)
    with pytest.raises(KeyboardInterrupt):
        export(checkpoint, tmp_path / "out", piece_bytes=200, on_progress=tell)
    assert not any(thread.name == "strongroom-export" for thread in threading.enumerate())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_parent_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder; make it first"):
        export(opened(saved({"model": torch.nn.Linear(1, 1)})), tmp_path / "no" / "out")


def test_until_it_is_whole_the_folder_has_another_name(tmp_path: Path) -> None:
    names: list[list[str]] = []

    def sign(_: Mapping[str, bytes]) -> bytes:
        names.append([path.name for path in tmp_path.iterdir()])
        return b"signature"

    export(opened(saved({"model": torch.nn.Linear(1, 1)})), tmp_path / "out", sign=sign)
    ((unfinished,),) = names
    assert unfinished.startswith(".out.unfinished-")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


class Watched(OsCalls):
    """Real calls, told in order; and one that fails, if so asked."""

    def __init__(self, fail: str = "", code: int = 0) -> None:
        self.log: list[tuple[str, str]] = []
        self._paths: dict[int, str] = {}
        self._fail, self._code = fail, code

    def _seen(self, what: str, path: str) -> None:
        self.log.append((what, path))
        if what == self._fail:
            raise OSError(self._code, os.strerror(self._code), path)

    def open(self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
        fd = super().open(path, flags, mode, dir_fd=dir_fd)
        self._paths[fd] = Path(path).name
        return fd

    def write(self, fd: int, data: memoryview) -> int:
        self._seen("write", self._paths[fd])
        return super().write(fd, data)

    def fsync(self, fd: int) -> None:
        self._seen("fsync", self._paths[fd])
        super().fsync(fd)

    def rename_no_replace(self, source: str, target: str, *, dir_fd: int) -> None:
        self._seen("rename", target)
        super().rename_no_replace(source, target, dir_fd=dir_fd)


def test_everything_is_durable_before_it_is_seen(tmp_path: Path) -> None:
    calls = Watched()
    with NewFolder(tmp_path / "out", calls) as folder:
        folder.put("a", b"1")
        folder.put("b", b"2")
        folder.publish()
    log = [(what, "made" if "unfinished" in path else path) for what, path in calls.log if what != "write"]
    assert log == [
        ("fsync", "a"),
        ("fsync", "b"),
        ("fsync", "made"),
        ("rename", "out"),
        ("fsync", tmp_path.name),
    ]


@pytest.mark.parametrize("call", ("write", "fsync", "rename"))
def test_a_full_disk_leaves_nothing_and_says_so(call: str, tmp_path: Path) -> None:
    with (
        pytest.raises(StoreFullError, match="free space"),
        NewFolder(tmp_path / "out", Watched(call, errno.ENOSPC)) as folder,
    ):
        folder.put("a", b"1")
        folder.publish()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_cannot_refuse_to_replace_is_used_all_the_same(tmp_path: Path) -> None:
    with NewFolder(tmp_path / "out", Watched("rename", errno.EINVAL)) as folder:
        folder.put("a", b"1")
        folder.publish()
    assert (tmp_path / "out/a").read_bytes() == b"1"


# ----------------------------------------------------------------------- what is put beside, and signed


def test_whoever_signs_is_told_the_digest_of_every_file(tmp_path: Path) -> None:
    told: dict[str, bytes] = {}

    def sign(resources: Mapping[str, bytes]) -> bytes:
        told.update(resources)
        return b"signature"

    (tmp_path / "LICENSE").write_text("free")
    exported = export(
        opened(saved({"model": Tied()})),
        tmp_path / "out",
        max_shard_bytes=500,
        config=b"{}",
        further={"LICENSE": tmp_path / "LICENSE"},
        sign=sign,
    )
    out = tmp_path / "out"
    assert exported.is_signed
    assert (out / "model.sig").read_bytes() == b"signature"
    assert told == {
        path.name: sha256_of(path.read_bytes()).value for path in out.iterdir() if path.name != "model.sig"
    }
    assert {"LICENSE", "config.json", "strongroom.json", "model.safetensors.index.json"} < set(told)
    assert {file.name: file.size_bytes for file in exported.files} == {
        path.name: path.stat().st_size for path in out.iterdir()
    }


def test_a_signer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def sign(_: Mapping[str, bytes]) -> bytes:
        raise ConfigError("no key")

    with pytest.raises(ConfigError, match="no key"):
        export(opened(saved({"model": Tied()})), tmp_path / "out", sign=sign)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ("config.json", "MODEL.safetensors", "model.sig", ".gitignore", "a/b", "..", "", "a\\b", "a\n")
)
def test_a_file_put_beside_never_takes_another_ones_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    with pytest.raises(ConfigError, match="cannot be put beside"):
        export(
            opened(saved({"model": torch.nn.Linear(1, 1)})),
            tmp_path / "out",
            config=b"{}",
            further={name: tmp_path / "x"},
        )
    assert not (tmp_path / "out").exists()


def test_progress_grows_and_ends_where_it_said(tmp_path: Path) -> None:
    for algorithm in ("blake3", "sha256"):
        told: list[tuple[int, int]] = []
        store = saved({"model": Tied()}, digest=algorithm)
        tell: Callable[[int, int], None] = lambda done, total: told.append((done, total))  # noqa: B023, E731
        exported: Exported = export(opened(store), tmp_path / algorithm, piece_bytes=200, on_progress=tell)
        assert [done for done, _ in told] == sorted(done for done, _ in told)
        assert told[-1][0] == told[-1][1] >= exported.size_bytes
