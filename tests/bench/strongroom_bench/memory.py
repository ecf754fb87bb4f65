"""How much host memory a save adds at its peak, and whether that grows from save to save."""

from __future__ import annotations

from pathlib import Path

from strongroom_bench.children import run
from strongroom_bench.figure import Figure, setting
from strongroom_bench.scale import MIB, Scale
from strongroom_bench.states import drop

__all__ = ["measure"]

_FLAT_BYTES = 16 * MIB
"""What the peak may grow after the third save: less than any buffer of a save."""

_STOCK_SAVES = 3


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Save in a process of its own, and look at its resident set."""
    sizes = (str(scale.tensors), str(scale.tensor_bytes))
    ours = run("memory", str(folder / "memory"), "strongroom", *sizes, str(scale.memory_saves))["added"]
    stock_saves = min(_STOCK_SAVES, scale.memory_saves)
    stock = run("memory", str(folder / "memory-dcp"), "dcp", *sizes, str(stock_saves))["added"]
    for path in folder.glob("memory*"):
        drop(path)
    early = ours[min(2, len(ours) - 1)]
    return [
        Figure(
            figure="peak host memory added by a save",
            value=max(ours) / MIB,
            unit="MiB",
            bar=1.05 * scale.state_bytes / MIB + 128,
            peers={
                "first save MiB": ours[0] / MIB,
                "third save MiB": early / MIB,
                "last save MiB": ours[-1] / MIB,
                "state MiB": scale.state_bytes / MIB,
                f"dcp.async_save(thread_count=2), {stock_saves} saves MiB": max(stock) / MIB,
            },
            runs=len(ours),
            setting=setting(f"{scale.state_words}, {len(ours)} saves, VmHWM of a process of its own"),
            note=f"must not grow by more than {_FLAT_BYTES // MIB} MiB after the third save either",
            is_sound=ours[-1] - early <= _FLAT_BYTES,
        )
    ]
