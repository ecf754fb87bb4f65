"""Provenance of many ranks: rank 0 says it, every rank hears of a change, and none goes on alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import provenance_jobs
import pytest
from crews import Crews

from strongroom.decoding import Decoder


def collected(root: Path, step: int) -> Any:
    (path,) = root.glob(f"step-{step:012d}-*/data/provenance.json")
    return Decoder().decode(json.loads(path.read_bytes())["collected"])


def test_other_data_is_refused_on_every_rank(crews: Crews, tmp_path: Path) -> None:
    assert crews.run(provenance_jobs.save, tmp_path, 1, "v1", ranks=2) == [[1], []]
    for (kind, text), changes, has_changed in crews.run(provenance_jobs.resume, tmp_path, "v2", ranks=2):
        assert kind == "ProvenanceMismatchError"
        assert 'data: version was "v1" and is "v2"' in text
        assert (changes, has_changed) == ([], False)


def test_every_rank_is_told_what_has_changed(crews: Crews, tmp_path: Path) -> None:
    crews.run(provenance_jobs.save, tmp_path, 1, "v1", ranks=2)
    accepted = crews.run(provenance_jobs.resume, tmp_path, "v2", accept_changes=True, ranks=2)
    assert accepted == [(("", ""), ['data: version was "v1" and is "v2"'], True)] * 2
    alone = crews.run(provenance_jobs.resume, tmp_path, "v1", ranks=1)
    assert alone == [(("", ""), ["world_size: world_size was 2 and is 1"], True)]


def test_the_architecture_is_the_same_on_any_number_of_ranks(crews: Crews, tmp_path: Path) -> None:
    for step, ranks in ((1, 1), (2, 2)):
        crews.run(provenance_jobs.save, tmp_path, step, "v1", ranks=ranks)
    first, second = (collected(tmp_path, step) for step in (1, 2))
    assert first["architecture"] == second["architecture"]
    assert (first["world_size"], second["world_size"]) == (1, 2)


@pytest.mark.usefixtures("fsdp2_on_cpus")
def test_meshes_are_told_and_do_not_change_the_architecture(crews: Crews, tmp_path: Path) -> None:
    for step, (style, ranks) in enumerate((("fsdp", 2), ("fsdp x tp", 4)), 1):
        crews.run(provenance_jobs.save, tmp_path, step, "v1", style, ranks=ranks)
    first, second = (collected(tmp_path, step) for step in (1, 2))
    assert first["architecture"] == second["architecture"]
    assert first["meshes"] != second["meshes"]
    assert any(mesh.startswith("2x2") for mesh in second["meshes"])
