"""Any tensor, in any layout over four ranks, comes back in any other: random ones, many to a job."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import state_jobs
import torch
from crews import Crews
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layout_jobs import PLAIN, Layout

MESHES: dict[tuple[int, ...], list[tuple[int, ...]]] = {
    (4,): [(0, 1, 2, 3)],
    (3,): [(0, 1, 2), (0, 2, 3), (1, 2, 3)],
    (2,): [(0, 1), (2, 3), (0, 3)],
    (1,): [(0,), (3,)],
    (2, 2): [(0, 1, 2, 3), (0, 2, 1, 3)],
    (1, 4): [(0, 1, 2, 3)],
    (3, 1): [(0, 1, 3)],
    (2, 1, 2): [(0, 1, 2, 3)],
}
"""Few, since each makes groups that live as long as the ranks do."""

TYPES = [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.float8_e4m3fn]


@st.composite
def layouts(draw: st.DrawFn, dimensions: int) -> Layout:
    mesh = draw(st.sampled_from([(), *MESHES]))
    if not mesh:
        return PLAIN
    letters = ["R", *map(str, range(dimensions))]
    if len(mesh) == 2 and dimensions and draw(st.booleans()):
        # What FSDP2 makes of a tensor that another library has sharded along its first dimension.
        return Layout(mesh, "S0", draw(st.sampled_from(MESHES[mesh])))
    words = "".join(draw(st.sampled_from(letters)) for _ in mesh)
    return Layout(mesh, words, draw(st.sampled_from(MESHES[mesh])))


@st.composite
def cases(draw: st.DrawFn) -> Any:
    """Some tensors, the layouts to save them in, and others to restore them into, twice."""
    shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple).filter(lambda shape: math.prod(shape) <= 200)
    tensors = {
        f"t{number}": (draw(shapes), draw(st.sampled_from(TYPES)))
        for number in range(draw(st.integers(1, 4)))
    }
    before, *afters = [
        {name: draw(layouts(len(shape))) for name, (shape, _) in tensors.items()} for _ in range(3)
    ]
    return tensors, before, afters


@settings(
    max_examples=max(5, settings.default.max_examples // 20),
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(batch=st.lists(cases(), min_size=1, max_size=6))
def test_any_layout_is_restored_into_any_other(crews: Crews, batch: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert crews.run(state_jobs.run_cases, Path(folder), batch, ranks=4) == [[]] * 4
