"""The benchmarks run, with small sizes and one round, and report every figure; no time is judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console
from strongroom_bench.__main__ import main
from strongroom_bench.families import FAMILIES, NEEDS, can_be_measured
from strongroom_bench.figure import Figure, beside, percentile
from strongroom_bench.keys import key_calls
from strongroom_bench.measure import Contestant, interleave
from strongroom_bench.report import as_json, as_table
from strongroom_bench.scale import TINY

# Stock DCP warns of every save without a process group.
pytestmark = pytest.mark.filterwarnings("ignore")

FIGURES = {
    "saving": [
        "stall of save / one copy_ of the state",
        "wall of a committed, checksummed save / dcp.save(thread_count=2)",
        "wall of the same save with sha256 / dcp.save(thread_count=2)",
    ],
    "restoring": [
        "wall of a verified restore / dcp.load",
        "wall of a verified restore of many small tensors / dcp.load",
    ],
    "sealed": [
        "wall of a sealed, signed, audited save, blake3 / dcp.save(thread_count=2)",
        "wall of a sealed, signed, audited save, sha256 / dcp.save(thread_count=2)",
        "wall of a sealed save, blake3 / the same save not sealed",
        "stall of a sealed save / one copy_ of the state",
        "wall of a verified restore, sealed / dcp.load",
        "shard bytes read for 1 % of the rows of a 16 MiB tensor, sealed",
        "calls to wrap a key, a recipient and sealed save",
        "calls to unwrap a key, a sealed restore",
    ],
    "signing": [
        f"to {word} a checkpoint of {shards} shards, {algorithm}"
        for algorithm in ("sha256", "blake3")
        for shards in (4, 64, 4096)
        for word in ("sign", "judge")
    ],
    "costs": [
        "processor seconds a GiB: seal",
        "processor seconds a GiB: hash, blake3",
        "processor seconds a GiB: hash, sha256",
        "processor seconds a GiB: write",
    ],
    "ranks": [
        "stall of save, 4 ranks / one copy_ of each rank's part",
        "wall of a committed, checksummed save, 4 ranks / dcp.save(thread_count=2)",
        "wall of a verified restore, 4 ranks / dcp.load",
        "wall of a sealed, signed, audited save, 4 ranks / dcp.save(thread_count=2)",
        "wall of a verified restore, sealed, 4 ranks / dcp.load",
        "calls to wrap a key, a recipient and sealed save, 4 ranks",
        "calls to unwrap a key, a sealed restore, 4 ranks",
    ],
    "small": [
        "stall of many small tensors / _foreach_copy_",
        "wall of a save of many small tensors / dcp.async_save(thread_count=2)",
    ],
    "training": ["p95 of a step's time while a save runs / without"],
    "lightning": [
        "Lightning: stall of a save / ModelCheckpoint's",
        "Lightning: stall of a save / ModelCheckpoint + AsyncCheckpointIO's",
        "Lightning: stall of a sealed save / ModelCheckpoint's",
        "Lightning: p95 of a step without a save / with ModelCheckpoint + AsyncCheckpointIO",
        "Lightning: a step with nothing due / without a callback",
    ],
    **{
        family: [
            f"{framework}: stall of a save / {native}'s",
            f"{framework}: stall of a sealed save / {native}'s",
            f"{framework}: a step with nothing due / without Strongroom",
        ]
        for family, framework, native in (
            ("accelerate", "Accelerate", "save_state"),
            ("transformers", "Trainer", "Trainer"),
            ("composer", "Composer", "CheckpointSaver"),
        )
    },
    "starting": ["process start to verified resume / import torch plus raw read"],
    "parts": ["shard bytes read for 1 % of the rows of a 16 MiB tensor, not sealed"],
    "memory": ["peak host memory added by a save"],
    "listing": [
        "checkpoints(): reads a checkpoint, first look",
        "checkpoints(): reads where nothing changed",
    ],
    "indexes": [
        "index: encode / stock pickled .metadata",
        "index: decode / stock pickled .metadata",
        "index: size / stock pickled .metadata",
    ],
    "s3": [
        *(
            figure
            for shape in ("one object", "8 objects")
            for verb in ("upload", "download")
            for figure in (
                f"{verb} of {shape} / boto3's {verb}_fileobj",
                f"requests a GiB, {verb} of {shape}",
            )
        ),
        "peak host memory added by an upload",
    ],
    "audit": [
        "audit: events recorded in a second of one core",
        "audit: record one event",
        "audit: stall of a save with a log / without",
        "audit: have an intent to read on record",
        "audit: who read this checkpoint",
        "audit: what happened to this run in 24 h",
        "audit: build the index",
        "audit: verify chains, signatures and tree",
        "audit: sequence",
    ],
}


@pytest.mark.parametrize("family", FIGURES)
def test_every_figure_is_reported(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_be_measured(family):
        pytest.skip(f"{NEEDS[family]} is not installed; its own tests run this family")
    # The one that starts at once.
    monkeypatch.setenv("STRONGROOM_BENCH_S3", "ministack")
    figures = FAMILIES[family](TINY, tmp_path)
    assert [figure.figure for figure in figures] == FIGURES[family]
    for figure in figures:
        assert all(value >= 0 for value in figure.peers.values())
        # What is counted is the same with small sizes, on any machine.
        if figure.unit in ("calls", "reads") or figure.figure.startswith("shard bytes"):
            assert figure.holds is True
    # What a family wrote is gone, but for the records of a run.
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 4096]


def test_every_family_has_its_figures_listed_here() -> None:
    assert list(FIGURES) == list(FAMILIES)


def test_what_is_not_installed_is_left_out_and_refused_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules[main.__module__], "FAMILIES", {"parts": lambda *_: [], "absent": None})
    monkeypatch.setitem(NEEDS, "absent", "no_such_package")  # type: ignore[arg-type]
    assert main(["--folder", str(tmp_path)]) == 0
    assert "left out: absent" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--folder", str(tmp_path), "--only", "absent"])
    assert "needs the package no_such_package" in capsys.readouterr().err


def test_the_command_writes_one_object_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "figures.json"
    assert main(["--only", "parts", "--json", str(found), "--folder", str(tmp_path)]) == 0
    assert "not sealed" in capsys.readouterr().out
    listed = json.loads(found.read_text())
    assert [item["figure"] for item in listed] == FIGURES["parts"]
    assert {"figure", "value", "bar", "holds", "peers", "runs", "world_size"} <= set(listed[0])
    assert listed[0]["holds"] is True


def test_a_policy_for_everything_on_the_machine_does_not_seal_what_is_measured_as_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRONGROOM_CONFIG", str(tmp_path / "absent.toml"))
    assert main(["--only", "parts", "--folder", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("wraps", "unwraps", "held"),
    (
        ([4, 4], 3, [True, True]),
        ([4, 5], 4, [False, False]),
        # Somebody was left out, or nothing was sealed at all.
        ([4, 3], 0, [False, False]),
        ([0, 0], 3, [False, True]),
    ),
)
def test_a_save_asks_each_recipient_once_and_a_restore_one_of_them(
    wraps: list[int], unwraps: int, held: list[bool]
) -> None:
    assert [figure.holds for figure in key_calls(wraps, unwraps, saves=4, restores=3)] == held


def test_a_bar_holds_up_to_its_value_and_with_all_that_goes_with_it() -> None:
    samples = {"ours": [3.0, 1.0, 2.0], "theirs": [2.0, 2.0, 9.0], "third": [1.0, 1.0, 1.0]}
    assert beside("f", "ours", "theirs", samples, bar=1.0).holds is True
    assert beside("f", "ours", "theirs", samples, bar=0.9).holds is False
    assert beside("f", "ours", "theirs", samples).holds is None
    assert beside("f", "ours", "theirs", samples, bar=1.0, at_most="third").holds is False
    assert Figure(figure="f", value=None, bar=1.0).holds is None


def test_every_round_runs_every_contestant_once_in_an_order_of_its_own() -> None:
    ran: list[str] = []

    def contestant(name: str) -> Contestant:
        return Contestant(name=name, run=lambda: ran.append(name) or {"wall": float(len(ran))})

    taken = interleave([contestant(name) for name in "abcd"], rounds=5, warm_ups=1, flushes=False)
    rounds = ["".join(ran[start : start + 4]) for start in range(0, len(ran), 4)]
    assert len(rounds) == 6
    assert {"".join(sorted(order)) for order in rounds} == {"abcd"}
    assert len(set(rounds)) > 3
    counted = sorted(value for measures in taken.values() for value in measures["wall"])
    assert counted == list(range(5, 25))


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, percent) for percent in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert percentile([7.0], 99) == 7.0


def test_a_table_shows_what_was_met_and_what_was_missed() -> None:
    met = Figure(figure="met", value=1.0, bar=2.0, peers={"a s": 1.5}, spread={"a s": (1.0, 2.0)}, runs=7)
    missed = Figure(figure="missed", value=3.0, bar=2.0, unit="MiB")
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(as_table([met, missed], "title"))
    text = console.export_text()
    assert "1.00" in text
    assert "3 MiB" in text
    assert "a: 1.5 s (1 to 2)" in text
    assert len(json.loads(as_json([met, missed]))) == 2
