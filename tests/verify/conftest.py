"""A small real run with two launches, damaged in every way; and a forger who can pin what he likes."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import Checkpointer, PerRank, layout
from strongroom.digest import DigestAlgorithm, FileHasher, sha256_of
from strongroom.index import Index, ShardFile, decode_index, encode_index
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit, FileRecord, Manifest
from strongroom.shards import binding

DIGESTS: tuple[DigestAlgorithm, ...] = ("blake3", "sha256")


def small_state(step: int) -> dict[str, Any]:
    return {
        "w": torch.arange(3.0) + step,
        "x": {"epoch": step, "b": torch.tensor([step])},
        "mine": PerRank(step),
    }


class Run:
    """A root on disk: steps 1 and 2 of launch 1, and step 3 of launch 2, which is the newest."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def is_sha256(self) -> bool:
        return b'"digest":"sha256"' in (self.newest / "data/MANIFEST.json").read_bytes()

    @property
    def newest(self) -> Path:
        return self.folder(3)

    def folder(self, step: int) -> Path:
        (found,) = self.root.glob(f"step-{step:012d}-*")
        return found

    def name(self, step: int) -> CheckpointName:
        name = CheckpointName.parse(self.folder(step).name)
        assert name is not None
        return name

    def files(self, step: int = 3) -> list[str]:
        """Every file of a checkpoint, under its folder."""
        folder = self.folder(step)
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def key(self, path: Path) -> str:
        return str(path.relative_to(self.root))

    def contents(self) -> dict[str, bytes]:
        return {self.key(path): path.read_bytes() for path in self.root.rglob("*") if path.is_file()}


class Forger:
    """Changes a checkpoint and pins the change: what no digest shows, only a look at what it says."""

    def __init__(self, run: Run, step: int = 3) -> None:
        self.run = run
        self.step = step
        self.folder = run.folder(step)
        self.name = run.name(step)
        self.manifest = Manifest.decode((self.folder / "data/MANIFEST.json").read_bytes(), "manifest")

    def read(self, path: str) -> bytes:
        return (self.folder / "data" / path).read_bytes()

    def index(self) -> Index:
        return decode_index(self.read(layout.INDEX), "index")[0]

    def put(self, path: str, data: bytes) -> None:
        """A file under data/ and its record; of a shard, its block digests in the index too."""
        hasher = FileHasher(self.manifest.algorithm)
        hasher.update(data)
        record = FileRecord(path=path, size_bytes=len(data), digest=hasher.digest())
        (self.folder / "data" / path).write_bytes(data)
        kept = [other for other in self.manifest.files if other.path != path]
        self._pin(files=tuple(sorted([*kept, record], key=lambda file: file.path)))
        if layout.parse_shard_path(path) is not None:
            index = self.index()
            files = {**index.files, path: ShardFile(path, hasher.block_digests)}
            self.put_index(Index(index.tensors.values(), files.values(), index.aliases))

    def put_index(self, index: Index) -> None:
        self.put(layout.INDEX, encode_index(index, binding(self.manifest.run, self.name)))

    def drop(self, path: str) -> None:
        (self.folder / "data" / path).unlink()
        self._pin(files=tuple(record for record in self.manifest.files if record.path != path))

    def _pin(self, **changes: Any) -> None:
        self.put_manifest(dataclasses.replace(self.manifest, **changes))

    def put_manifest(self, manifest: Manifest, **changes: Any) -> None:
        self.manifest = manifest
        encoded = manifest.encode()
        (self.folder / "data/MANIFEST.json").write_bytes(encoded)
        commit = Commit(
            run=manifest.run,
            name=self.name,
            manifest=sha256_of(encoded),
            size_bytes=manifest.size_bytes,
            committed_at_ms=1,
        )
        (self.folder / "COMMIT").write_bytes(dataclasses.replace(commit, **changes).encode())


def make_run(root: Path, digest: DigestAlgorithm) -> Run:
    with Checkpointer(root, digest=digest) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, small_state(step), metrics={"loss": 0.5}, tags=["t"])
    with Checkpointer(root, digest=digest) as checkpointer:
        checkpointer.restore()
        checkpointer.save(3, small_state(3))
    return Run(root)


@pytest.fixture(scope="session", params=DIGESTS)
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("pristine") / "run", request.param)


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Run], Run]:
    numbers = iter(range(1_000_000))

    def copy(run: Run) -> Run:
        return Run(Path(shutil.copytree(run.root, tmp_path / f"copy-{next(numbers)}")))

    return copy


@pytest.fixture
def run(pristine: Run, copy_of: Callable[[Run], Run]) -> Run:
    return copy_of(pristine)


@pytest.fixture
def forger(run: Run) -> Forger:
    return Forger(run)


@pytest.fixture
def forger_at(run: Run) -> Callable[[int], Forger]:
    return lambda step: Forger(run, step)
