"""States of many ranks: one rank's own values, parts, whole restores, exact resumption, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import state_jobs
import torch
from crews import Crews
from launching import Launcher
from layout_jobs import Layout, save_tensors
from looking import index_of
from model_jobs import pass_on, save_truth

from strongroom_cli.main import main


@pytest.fixture(scope="module")
def sharded(crews: Crews, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of step 2 by four ranks under FSDP2."""
    plain, root = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("sharded")
    crews.run(save_truth, plain, ranks=1)
    assert crews.run(pass_on, plain, root, "fsdp", 2, ranks=4) == [[]] * 4
    return root


@pytest.mark.parametrize("ranks", (1, 2, 4))
def test_without_a_template_every_rank_gets_everything_whole(ranks: int, crews: Crews, sharded: Path) -> None:
    assert crews.run(state_jobs.load_whole_model, sharded, ranks=ranks) == [[]] * ranks


@pytest.mark.usefixtures("fsdp2_on_cpus")
@pytest.mark.parametrize(("style", "ranks"), (("fsdp x tp", 4), ("hsdp", 4), ("ddp", 2)))
def test_parts_are_restored_into_other_layouts_and_names(
    style: str, ranks: int, crews: Crews, sharded: Path
) -> None:
    assert crews.run(state_jobs.restore_parts, sharded, style, ranks=ranks) == [[]] * ranks


OWN = ["deep.inner.[0]", "generator", "own"]


def test_each_rank_gets_its_own_values_back(crews: Crews, tmp_path: Path) -> None:
    crews.run(state_jobs.save_own, tmp_path, ranks=4)
    for ranks in (4, 2):
        for rank, found in enumerate(crews.run(state_jobs.load_own, tmp_path, ranks=ranks)):
            assert found == {
                "position": 10 * rank,
                "seen": [float(rank)] * (rank + 1),
                "seed": rank,
                "deep": [f"rank {rank}", 5],
                "missing": [],
                "bare": 10 * rank,
                "bare missing": [],
                "w": True,
            }


def test_a_rank_that_there_was_not_keeps_the_callers_values_and_is_told(crews: Crews, tmp_path: Path) -> None:
    crews.run(state_jobs.save_own, tmp_path, ranks=2)
    found = crews.run(state_jobs.load_own, tmp_path, ranks=4)
    assert [one["missing"] for one in found] == [[], [], OWN, OWN]
    assert [one["position"] for one in found] == [0, 10, -1, -1]
    assert [one["seed"] for one in found] == [0, 1, 1002, 1003]
    assert [one["deep"] for one in found] == [
        ["rank 0", 5],
        ["rank 1", 5],
        ["the caller's", 5],
        ["the caller's", 5],
    ]
    assert [one["bare"] for one in found] == [0, 10, None, None]
    assert [one["bare missing"] for one in found] == [[], [], OWN, OWN]
    assert all(one["w"] for one in found)


STOOD_IN_FOR = (
    [(0, [0.0], ["rank 0", 5])] + [(10, [1.0, 1.0], ["rank 1", 5])] + 2 * [(0, [0.0], ["rank 0", 5])]
)


def test_another_ranks_values_may_stand_in_for_those_of_a_rank_that_there_was_not(
    crews: Crews, tmp_path: Path
) -> None:
    crews.run(state_jobs.save_own, tmp_path, ranks=2)
    found = crews.run(state_jobs.load_with_a_stand_in, tmp_path, ranks=4)
    assert [one["bare"] for one in found] == STOOD_IN_FOR
    assert [one["position"] for one in found] == [0, 10, 0, 0]
    assert [one["seed"] for one in found] == [0, 1, 0, 0]
    assert [one["missing"] for one in found] == [[], [], OWN, OWN]


@pytest.mark.usefixtures("fsdp2_on_cpus")
def test_what_fsdp_leaves_in_place_after_an_evaluation_is_not_saved_for_the_parameters(
    crews: Crews, tmp_path: Path
) -> None:
    assert crews.run(state_jobs.save_after_looking, tmp_path, ranks=4) == [[]] * 4


def test_tied_weights_are_stored_once_and_restored_tied(crews: Crews, tmp_path: Path) -> None:
    assert crews.run(state_jobs.move_tied, tmp_path, ranks=4) == [[]] * 4
    index = index_of(tmp_path)
    assert list(index.tensors) == ["model.embedding.weight"]
    assert dict(index.aliases) == {"model.head.weight": "model.embedding.weight"}


def test_a_sharded_tensor_of_torchs_older_kind_is_carried(crews: Crews, tmp_path: Path) -> None:
    assert crews.run(state_jobs.save_sharded_tensor, tmp_path, ranks=4) == [[]] * 4


def test_a_distributed_tensor_is_no_ranks_own(crews: Crews, tmp_path: Path) -> None:
    for kind, text in crews.run(state_jobs.save_own_shard, tmp_path, ranks=4):
        assert kind == "StateEncodingError"
        assert "PerRank" in text


@pytest.mark.usefixtures("fsdp2_on_cpus")
def test_a_resumed_job_ends_with_the_uninterrupted_ones_weights(launcher: Launcher, tmp_path: Path) -> None:
    roots = {style: tmp_path / style.replace(" ", "") for style in ("ddp", "fsdp", "fsdp x tp")}
    ends = launcher.run(state_jobs.run_through, roots, 3, 6, ranks=4)
    assert launcher.run(state_jobs.resume, roots, 6, ranks=4) == ends
    # That the end depends on what is restored: who starts from nothing comes elsewhere.
    assert all(len({end[style] for end in ends}) == 4 for style in ("fsdp", "fsdp x tp"))


def test_the_command_lists_shows_and_verifies_what_many_ranks_saved(
    crews: Crews, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {"w": ((8, 4), torch.float32), "v": ((6, 2), torch.float32)}
    crews.run(
        save_tensors, tmp_path, tensors, {"w": Layout((2, 2), "01"), "v": Layout((2, 2), "R0")}, ranks=4
    )
    assert main(["ls", str(tmp_path), "--json"]) == 0
    assert [one["step"] for one in json.loads(capsys.readouterr().out)["checkpoints"]] == [1]
    assert main(["show", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["manifest"]["world_size"] == 4
    assert {one["name"]: len(one["chunks"]) for one in shown["tensors"]} == {"v": 2, "w": 4}
    assert main(["verify", str(tmp_path)]) == 0
    capsys.readouterr()
    shard = next(tmp_path.glob("step-*/data/00002-00.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert main(["verify", str(tmp_path)]) == 1
    assert "00002-00.safetensors" in capsys.readouterr().out
