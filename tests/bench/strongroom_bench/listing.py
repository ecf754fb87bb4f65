"""What `checkpoints()` asks of the store on a long run: the first time, and where nothing changed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from strongroom import Checkpointer, layout
from strongroom.digest import sha256_of
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit, Launch, Run
from strongroom.stores.local import LocalStore
from strongroom_bench.figure import Figure, setting
from strongroom_bench.measure import seconds
from strongroom_bench.scale import Scale
from strongroom_bench.states import drop

__all__ = ["measure"]

_NOW_MS = 1_700_000_000_000


class CountingStore(LocalStore):
    """A local store that counts what it is asked."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: Counter[str] = Counter()

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        self.asked["reads"] += 1
        return super().read(key, limit_bytes=limit_bytes)

    def stat(self, key: str) -> Any:
        self.asked["stats"] += 1
        return super().stat(key)

    def list_names(self, prefix: str) -> list[str]:
        self.asked["listings"] += 1
        return super().list_names(prefix)


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """List a run of very many checkpoints, twice."""
    root = folder / "listing"
    _make_run(root, scale.checkpoints)
    store = CountingStore(root)
    checkpointer = Checkpointer(store)
    found: list[Any] = []
    first_s = seconds(lambda: found.extend(checkpointer.checkpoints()))
    first, store.asked = store.asked, Counter()
    again_s = seconds(checkpointer.checkpoints)
    again = store.asked
    drop(root)
    if len(found) != scale.checkpoints:
        raise RuntimeError(f"{len(found)} checkpoints were listed, not {scale.checkpoints}")
    peers = {
        **{f"{name} first": float(first[name]) for name in ("listings", "reads", "stats")},
        **{f"{name} again": float(again[name]) for name in ("listings", "reads", "stats")},
        "first s": first_s,
        "again s": again_s,
    }
    words = setting(f"a run of {scale.checkpoints} on a file system")
    # Besides each commit: the run record and this run's one launch; besides the root: the launches.
    is_small = first["listings"] <= 2 and again["listings"] <= 2
    return [
        Figure(
            figure="checkpoints(): reads a checkpoint, first look",
            value=(first["reads"] - 2) / scale.checkpoints,
            unit="reads",
            bar=1.0,
            peers=peers,
            runs=1,
            setting=words,
            note="the run record and the launch are two reads more; a listing each of root and launches",
            is_sound=is_small,
        ),
        Figure(
            figure="checkpoints(): reads where nothing changed",
            value=float(again["reads"]),
            unit="reads",
            bar=0.0,
            peers=peers,
            runs=1,
            setting=words,
            is_sound=is_small,
        ),
    ]


def _make_run(root: Path, count: int) -> None:
    """A run's root as that many saves leave it, as far as a listing looks."""
    run = Run(run="bench", created_at_ms=_NOW_MS)
    launch = Launch(run=run.run, launch=1, parent=None, created_at_ms=_NOW_MS, deadline_s=60)
    (root / layout.LAUNCHES).mkdir(parents=True)
    (root / layout.RUN).write_bytes(run.encode())
    (root / layout.launch_key(1)).write_bytes(launch.encode())
    for step in range(count):
        name = CheckpointName(launch=1, step=step, attempt=f"{step:016x}")
        commit = Commit(
            run=run.run, name=name, manifest=sha256_of(b""), size_bytes=0, committed_at_ms=_NOW_MS
        )
        (root / name.folder).mkdir()
        (root / name.commit_key).write_bytes(commit.encode())
