"""Checkpoints that an earlier day wrote are read, and today's writer still writes those bytes."""

from __future__ import annotations

import importlib.util
import math
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from strongroom import Checkpointer, UnsupportedFormatError

HERE = Path(__file__).parent
GOLDEN = HERE / "0.1"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_make", HERE / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_golden_root_is_one_run_of_two_launches() -> None:
    found = [(c.step, c.launch, c.is_superseded) for c in Checkpointer(GOLDEN).checkpoints()]
    assert found == [(3, 2, False), (1, 1, False), (2, 1, True)]


@pytest.mark.parametrize("step", (1, 2, 3))
def test_a_golden_checkpoint_restores_to_the_state_that_was_saved(make: ModuleType, step: int) -> None:
    expected = make.state(step)
    template = make.state(step + 5)
    template["extra"] = template["rank"] = None
    restored = Checkpointer(GOLDEN).restore(template, step=step)
    assert restored is not None

    for name, value in expected["model"].state_dict().items():
        assert torch.equal(restored.state["model"].state_dict()[name], value), name
    assert restored.state["model"].head.weight is restored.state["model"].embedding.weight
    theirs, ours = restored.state["optimizer"].state_dict(), expected["optimizer"].state_dict()
    assert theirs["param_groups"] == ours["param_groups"]
    assert torch.equal(theirs["state"][0]["momentum_buffer"], ours["state"][0]["momentum_buffer"])
    assert restored.state["rank"] == {"seed": step}
    assert_same(restored.state["extra"], expected["extra"])


def test_todays_writer_writes_the_golden_bytes(make: ModuleType, tmp_path: Path) -> None:
    root = tmp_path / "run"
    make.write(root)
    golden = {path.relative_to(GOLDEN): path for path in GOLDEN.rglob("*") if path.is_file()}
    written = {path.relative_to(root): path for path in root.rglob("*") if path.is_file()}
    assert sorted(written) == sorted(golden)
    for name, path in golden.items():
        # What wrote a checkpoint stands in its provenance, which manifest, commit and children pin.
        if name.name in {"provenance.json", "MANIFEST.json", "COMMIT", "000002.json"}:
            continue
        assert written[name].read_bytes() == path.read_bytes(), f"the format of {name} has changed"


def test_another_version_of_the_format_is_refused_by_name(tmp_path: Path) -> None:
    from strongroom import canonical

    root = tmp_path / "run"
    shutil.copytree(GOLDEN, root)
    record = canonical.decode(
        (root / "run.json").read_bytes(), "run.json", canonical.Bounds(length_bytes=4096)
    )
    record.pop(canonical.SELF_DIGEST)
    (root / "run.json").write_bytes(canonical.with_self_digest({**record, "format": "0.2"}))
    with pytest.raises(UnsupportedFormatError, match=r"0\.2.*reads 0\.1"):
        Checkpointer(root).restore()


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert math.copysign(1, found) == math.copysign(1, expected)
        assert found == expected or (math.isnan(found) and math.isnan(expected))
    else:
        assert found == expected
