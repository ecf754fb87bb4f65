"""Sealed saves and restores of a large state, beside plain ones and beside stock PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch.distributed.checkpoint as dcp

from strongroom import Checkpointer
from strongroom.workers import reading_workers, writing_workers
from strongroom_bench.figure import Figure, beside, fold, setting
from strongroom_bench.keys import (
    close_log,
    create_keys,
    key_calls,
    protecting_policy,
    read_keys,
    read_signer,
)
from strongroom_bench.measure import interleave
from strongroom_bench.parts import read_rows
from strongroom_bench.scale import Scale
from strongroom_bench.states import (
    Saver,
    Tensors,
    copy_once,
    drop,
    empty_like,
    large_state,
    restore,
    stock_load,
    stock_save,
)
from strongroom_security import SecurityPolicy

__all__ = ["measure"]

_STOCK: Final = "dcp.save(thread_count=2)"
_PLAIN: Final = "strongroom, not sealed"
_PLAIN_SHA256: Final = "strongroom, not sealed, sha256"
_SEALED: Final = "strongroom, sealed"
_SEALED_SHA256: Final = "strongroom, sealed, sha256"


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Time sealed saves and restores, and count what they ask of their keys."""
    create_keys(folder / "sealed-keys")
    keys = read_keys(folder / "sealed-keys")
    policy = protecting_policy(keys, read_signer(folder / "sealed-keys"), folder / "sealed-log")
    drop(folder / "sealed-keys")
    state = large_state(scale)
    words = f"{scale.state_words}, sealed to {len(keys)} keys, signed, audited"
    saves, saved = _saves(scale, folder / "sealed", state, policy, words)
    restores, restored = _restores(scale, folder / "sealed-restores", state, policy, words)
    # One save more, which is what is restored again and again.
    counts = key_calls(
        [key.wraps for key in keys],
        sum(key.unwraps for key in keys),
        saves=saved + 1,
        restores=restored,
        setting=f"{words}, {writing_workers()} shards a save",
    )
    rows = read_rows(
        "shard bytes read for 1 % of the rows of a 16 MiB tensor, sealed",
        folder,
        security=policy,
    )
    close_log(policy)
    drop(folder / "sealed-log")
    return [*saves, *restores, rows, *counts]


def _saves(
    scale: Scale, root: Path, state: Tensors, policy: SecurityPolicy, words: str
) -> tuple[list[Figure], int]:
    """The figures, and how many sealed saves were made for them."""
    sealed = {
        _SEALED: Saver(root / "blake3", {"model": state}, security=policy, digest="blake3"),
        _SEALED_SHA256: Saver(root / "sha256", {"model": state}, security=policy, digest="sha256"),
    }
    plain = {
        _PLAIN: Saver(root / "plain", {"model": state}),
        _PLAIN_SHA256: Saver(root / "plain-sha256", {"model": state}, digest="sha256"),
    }
    samples = interleave(
        [
            *(saver.contestant(name) for name, saver in (sealed | plain).items()),
            stock_save(root, state, threads=2),
            copy_once(state),
        ],
        rounds=scale.rounds,
        warm_ups=scale.warm_ups,
        flushes=scale.flushes,
    )
    for saver in (sealed | plain).values():
        saver.checkpointer.close()
    drop(root)
    threads = f"{words}, {writing_workers()} writing threads"
    whole = "fsync on, staging included"
    walls = fold(samples, "wall")
    figures = [
        beside(
            "wall of a sealed, signed, audited save, blake3 / dcp.save(thread_count=2)",
            _SEALED,
            _STOCK,
            walls,
            bar=1.10,
            setting=setting(threads, whole),
        ),
        beside(
            "wall of a sealed, signed, audited save, sha256 / dcp.save(thread_count=2)",
            _SEALED_SHA256,
            _STOCK,
            walls,
            bar=1.60,
            setting=setting(threads, whole, digest="sha256"),
        ),
        beside(
            "wall of a sealed save, blake3 / the same save not sealed",
            _SEALED,
            _PLAIN,
            walls,
            setting=setting(threads, whole),
        ),
        beside(
            "stall of a sealed save / one copy_ of the state",
            _SEALED,
            "copy_",
            fold(samples, "stall"),
            setting=setting(threads),
        ),
    ]
    return figures, sum(saver.saves for saver in sealed.values())


def _restores(
    scale: Scale, root: Path, state: Tensors, policy: SecurityPolicy, words: str
) -> tuple[list[Figure], int]:
    """The figures, and how many sealed restores were made for them."""
    for name, security in (("plain", None), ("sealed", policy)):
        with Checkpointer(root / name, security=security, digest="blake3") as checkpointer:
            checkpointer.save(1, {"model": state}).result()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(root / "dcp", thread_count=2))
    targets = empty_like(state)
    samples = interleave(
        [
            restore(root / "sealed", targets, name=_SEALED, security=policy),
            restore(root / "plain", targets, name=_PLAIN),
            stock_load(root / "dcp", targets),
        ],
        rounds=scale.rounds,
        warm_ups=scale.warm_ups,
        flushes=scale.flushes,
    )
    drop(root)
    figures = [
        beside(
            "wall of a verified restore, sealed / dcp.load",
            _SEALED,
            "dcp.load",
            fold(samples, "wall"),
            bar=0.80,
            setting=setting(
                words,
                f"{reading_workers()} reading threads",
                "into tensors that are there, page cache warm for both",
            ),
        )
    ]
    return figures, scale.warm_ups + scale.rounds
