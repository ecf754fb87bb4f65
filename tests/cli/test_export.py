"""What ``export`` tells, to people and to programs; its exit statuses; who signs; what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from strongroom import Checkpointer, IntegrityError
from strongroom.catalog import Catalog
from strongroom.digest import sha256_of
from strongroom.exporting.export import export
from strongroom.opened import open_checkpoint
from strongroom.stores.local import LocalStore
from strongroom_security import SecurityPolicy
from strongroom_security.dsse import pae
from strongroom_security.oms import decode_bundle, decode_statement
from strongroom_security.publickeys import PublicKey
from strongroom_security.recipients.file import create_key_file
from strongroom_security.signers.generating import generate_key

Strongroom = Callable[..., Any]

UNSIGNED = "NOT SIGNED"


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a model at steps 1 and 2, which differ."""
    made = model()
    with Checkpointer(tmp_path / "run", run_id="demo") as checkpointer:
        for step in (1, 2):
            with torch.no_grad():
                made[0].bias.fill_(step)
            checkpointer.save(step, {"model": made}, provenance={"model_config": {"model_type": "tiny"}})
    return tmp_path / "run"


@pytest.fixture
def signer(tmp_path: Path) -> Path:
    generate_key(tmp_path / "signer.pem")
    return tmp_path / "signer.pem"


def bias(folder: Path) -> float:
    return float(load_file(folder / "model.safetensors")["0.bias"][0])


def damage(run: Path, step: int) -> None:
    (folder,) = run.glob(f"step-{step:012d}-*")
    shard = next((folder / "data").glob("0*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def assert_signed(folder: Path, key: PublicKey) -> None:
    """Without the program that receivers use: that is tried elsewhere, where it is installed."""
    bundle = decode_bundle((folder / "model.sig").read_bytes(), "the bundle")
    envelope = bundle.envelope
    assert key.verify(pae(envelope.payload_type, envelope.payload), envelope.signature)
    stated = decode_statement(envelope.payload, "the statement").resources
    assert dict(stated) == {
        path.name: sha256_of(path.read_bytes()).value for path in folder.iterdir() if path.name != "model.sig"
    }


# -------------------------------------------------------------------------------------------- what is told


def test_the_newest_model_is_exported_and_that_nobody_signs_it_is_said_loudly(
    strongroom: Strongroom, run: Path, tmp_path: Path
) -> None:
    done = strongroom("export", run, "--to", tmp_path / "out")
    assert done.status == 0
    assert "exported: step 2 of run demo, model: 7 tensors" in done.out
    assert UNSIGNED in done.err
    assert bias(tmp_path / "out") == 2
    assert json.loads((tmp_path / "out/config.json").read_bytes()) == {"model_type": "tiny"}
    assert not (tmp_path / "out/model.sig").exists()


def test_a_step_can_be_asked_for(strongroom: Strongroom, run: Path, tmp_path: Path) -> None:
    assert strongroom("export", run, 1, "--to", tmp_path / "out").status == 0
    assert bias(tmp_path / "out") == 1


def test_json_has_the_documented_members(
    strongroom: Strongroom, run: Path, signer: Path, tmp_path: Path
) -> None:
    done = strongroom("export", run, "--to", tmp_path / "out", "--sign", f"file:{signer}", "--json")
    assert (done.status, done.err) == (0, "")
    document = done.json
    assert set(document) == {
        "checkpoint", "files", "format", "has_config", "key", "left_out", "root", "signature", "size_bytes",
        "tensors", "tied", "to",
    }  # fmt: skip
    assert document["checkpoint"]["step"] == 2
    assert document["root"] == run.as_uri()
    assert document["to"] == str(tmp_path / "out")
    assert (document["format"], document["key"], document["tensors"]) == ("safetensors", "model", 7)
    key = PublicKey.from_pem(signer.with_suffix(".pub").read_bytes(), "the key")
    assert document["signature"] == {
        "file": "model.sig",
        "key": f"file:{signer}",
        "key_id": key.id,
        "kind": "file",
    }
    assert document["files"] == [
        {
            "digest": str(sha256_of(path.read_bytes())),
            "file": path.name,
            "size_bytes": path.stat().st_size,
        }
        for path in sorted((tmp_path / "out").iterdir())
    ]


def test_json_of_an_unsigned_folder_says_so_twice(strongroom: Strongroom, run: Path, tmp_path: Path) -> None:
    done = strongroom("export", run, "--to", tmp_path / "out", "--json")
    assert done.json["signature"] is None
    assert UNSIGNED in done.err


def test_what_is_tied_or_left_out_and_a_config_that_is_not_there_are_told(
    strongroom: Strongroom, tmp_path: Path
) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(2, 2)
            self.b = self.a

        def get_extra_state(self) -> Any:
            return {"note": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": Tied()})
    done = strongroom("export", tmp_path / "run", "--to", tmp_path / "out")
    assert "b.weight is a.weight" in done.out
    assert "left out: _extra_state" in done.out
    assert "no config.json" in done.out


def test_options_reach_what_is_exported(strongroom: Strongroom, run: Path, tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("free")
    (tmp_path / "own.json").write_text('{"mine": 1}')
    done = strongroom(
        "export", run, "--to", tmp_path / "out", "--key", "model", "--only", "0.*", "--only", "1.weight",
        "--strip-prefix", "", "--config", tmp_path / "own.json", "--add", tmp_path / "LICENSE",
        "--max-shard-size", "24B", "--format", "safetensors",
    )  # fmt: skip
    assert done.status == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "LICENSE",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "strongroom.json",
    ]
    assert (tmp_path / "out/config.json").read_text() == '{"mine": 1}'


# -------------------------------------------------------------------------------------------- who signs


def test_the_key_that_is_named_signs_every_file(
    strongroom: Strongroom, run: Path, signer: Path, tmp_path: Path
) -> None:
    done = strongroom("export", run, "--to", tmp_path / "out", "--sign", f"file:{signer}")
    assert (done.status, done.err) == (0, "")
    key = PublicKey.from_pem(signer.with_suffix(".pub").read_bytes(), "the key")
    assert_signed(tmp_path / "out", key)
    assert key.id in done.out
    assert f"model_signing verify key {tmp_path / 'out'} --signature {tmp_path / 'out/model.sig'}" in done.out


def test_an_encrypted_key_takes_its_passphrase_from_where_it_is_said_to_be(
    strongroom: Strongroom, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORDS", "correct horse battery staple")
    key = generate_key(tmp_path / "signer.pem", passphrase="env:WORDS")  # noqa: S106
    named = ("--sign", f"file:{tmp_path / 'signer.pem'}")
    assert strongroom("export", run, "--to", tmp_path / "none", *named).status == 2
    done = strongroom("export", run, "--to", tmp_path / "out", *named, "--passphrase", "env:WORDS")
    assert done.status == 0
    assert_signed(tmp_path / "out", key)


def sealed_and_signed(folder: Path) -> Path:
    """A policy, and a run that was saved by it."""
    create_key_file(folder / "kek.key")
    generate_key(folder / "signer.pem")
    policy = folder / "strongroom.toml"
    policy.write_text('[seal]\nrecipients = ["file:kek.key"]\n[sign]\nkey = "file:signer.pem"\n')
    with Checkpointer(folder / "run", security=SecurityPolicy.load(policy)) as checkpointer:
        checkpointer.save(1, {"model": model()}).result()
    return policy


def test_a_sealed_run_is_exported_in_clear_by_who_can_open_it_and_signed_by_the_policys_key(
    strongroom: Strongroom, tmp_path: Path
) -> None:
    policy = sealed_and_signed(tmp_path)
    done = strongroom("export", tmp_path / "run", "--to", tmp_path / "out", "--security", policy)
    assert (done.status, done.err) == (0, "")
    found = load_file(tmp_path / "out/model.safetensors")
    expected = model().state_dict()
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert_signed(tmp_path / "out", PublicKey.from_pem((tmp_path / "signer.pub").read_bytes(), "the key"))


@pytest.mark.parametrize("piece_bytes", (1 << 20, 1 << 30))
@pytest.mark.parametrize("digest", ("blake3", "sha256"))
def test_sealed_tensors_come_out_bit_for_bit_and_a_flipped_byte_leaves_nothing(
    digest: str, piece_bytes: int, tmp_path: Path
) -> None:
    create_key_file(tmp_path / "kek.key")
    (tmp_path / "strongroom.toml").write_text(f'digest = "{digest}"\n[seal]\nrecipients = ["file:kek.key"]\n')
    policy = SecurityPolicy.load(tmp_path / "strongroom.toml")
    state = {f"t{number}": torch.randn(700_001) for number in range(4)}
    with Checkpointer(tmp_path / "run", security=policy) as checkpointer:
        checkpointer.save(1, {"model": state}).result()
    store = LocalStore(tmp_path / "run")
    history = Catalog(store).history()
    opened = open_checkpoint(store, history.commits[history.line.newest_first[0]], policy.guard)
    export(opened, tmp_path / "out", piece_bytes=piece_bytes)
    found = load_file(tmp_path / "out/model.safetensors")
    assert set(found) == set(state)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    for shard in (tmp_path / "run").rglob("0*.safetensors.floe"):
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"safetensors"):
        export(opened, tmp_path / "none", piece_bytes=piece_bytes)
    assert not [path for path in tmp_path.iterdir() if "none" in path.name]


def test_a_key_that_is_named_signs_in_place_of_the_policys(strongroom: Strongroom, tmp_path: Path) -> None:
    policy = sealed_and_signed(tmp_path)
    key = generate_key(tmp_path / "other.pem")
    named = ("--security", policy, "--sign", f"file:{tmp_path / 'other.pem'}")
    assert strongroom("export", tmp_path / "run", "--to", tmp_path / "out", *named).status == 0
    assert_signed(tmp_path / "out", key)


def test_a_sealed_run_without_its_policy_is_no_export(strongroom: Strongroom, tmp_path: Path) -> None:
    sealed_and_signed(tmp_path)
    done = strongroom("export", tmp_path / "run", "--to", tmp_path / "out")
    assert done.status == 4
    assert "is sealed" in done.err
    assert not (tmp_path / "out").exists()


def test_a_signature_is_judged_before_anything_is_exported(strongroom: Strongroom, tmp_path: Path) -> None:
    policy = sealed_and_signed(tmp_path)
    stranger = generate_key(tmp_path / "stranger.pem")
    policy.write_text(
        '[seal]\nrecipients = ["file:kek.key"]\n[verify]\nkeys = ["file:stranger.pub"]\nrequire = true\n'
    )
    done = strongroom("export", tmp_path / "run", "--to", tmp_path / "out", "--security", policy)
    assert done.status == 1, stranger
    assert not (tmp_path / "out").exists()


def test_an_old_copy_of_the_root_is_refused_and_an_old_step_of_the_newest_is_not(
    strongroom: Strongroom, tmp_path: Path
) -> None:
    generate_key(tmp_path / "signer.pem")
    policy = tmp_path / "strongroom.toml"
    policy.write_text(
        '[sign]\nkey = "file:signer.pem"\n[verify]\nkeys = ["file:signer.pub"]\nfloor = "file:floor"\n'
    )
    with Checkpointer(tmp_path / "run", security=SecurityPolicy.load(policy)) as checkpointer:
        checkpointer.save(1, {"model": model()}).result()
        shutil.copytree(tmp_path / "run", tmp_path / "yesterday")
        checkpointer.save(2, {"model": model()}).result()
    named = ("--security", policy)
    assert strongroom("export", tmp_path / "run", 1, "--to", tmp_path / "one", *named).status == 0
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "yesterday").rename(tmp_path / "run")
    done = strongroom("export", tmp_path / "run", "--to", tmp_path / "out", *named)
    assert done.status == 4
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------------- what is refused


def test_a_damaged_newest_is_no_reason_to_hand_over_an_older_one(
    strongroom: Strongroom, run: Path, tmp_path: Path
) -> None:
    damage(run, 2)
    done = strongroom("export", run, "--to", tmp_path / "out")
    assert done.status == 1
    assert "of step 2 (launch 1" in done.err
    assert list(tmp_path.iterdir()) == [run]
    assert strongroom("export", run, 1, "--to", tmp_path / "out").status == 0


def test_a_damaged_commit_of_the_newest_likewise(strongroom: Strongroom, run: Path, tmp_path: Path) -> None:
    (commit,) = run.glob("step-000000000002-*/COMMIT")
    commit.write_bytes(commit.read_bytes()[:-5])
    done = strongroom("export", run, "--to", tmp_path / "out")
    assert done.status == 1
    assert "step 2 cannot be exported" in done.err


def test_what_is_not_there_is_not_found(strongroom: Strongroom, run: Path, tmp_path: Path) -> None:
    assert strongroom("export", run, 7, "--to", tmp_path / "out").status == 3
    assert strongroom("export", tmp_path / "nowhere", "--to", tmp_path / "out").status == 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    (
        (("--format", "dcp"), "dcp is for a later release"),
        (("--format", "torch"), "torch is for a later release"),
        (("--format", "gguf"), "is no format"),
        (("--max-shard-size", "5XB"), "is no size"),
        (("--key", "nothing"), "has no 'nothing'"),
        (("--only", "nothing"), "fits 'nothing'"),
        (("--sign", "file:nothing.pem"), "nothing.pem"),
        (("--certificate", "chain.pem"), "belong to --sign"),
        (("--passphrase", "env:X"), "belong to --sign"),
        (("--config", "nothing.json"), "cannot be read"),
        (("--add", "nothing.txt"), "is no file"),
    ),
)
def test_what_cannot_be_is_a_usage_error_and_leaves_nothing(
    arguments: tuple[str, ...], told: str, strongroom: Strongroom, run: Path, tmp_path: Path
) -> None:
    done = strongroom("export", run, "--to", tmp_path / "out", *arguments)
    assert done.status == 2
    assert told in done.err
    assert list(tmp_path.iterdir()) == [run]


def test_a_place_within_the_run_is_refused(strongroom: Strongroom, run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    before = sorted(run.iterdir())
    for place in (run / "out", tmp_path / "link" / "out", run / ".." / "run" / "out"):
        done = strongroom("export", run, "--to", place)
        assert done.status == 2
        assert "would lie within the run" in done.err
    assert sorted(run.iterdir()) == before


def test_without_a_place_it_is_a_usage_error(strongroom: Strongroom, run: Path) -> None:
    done = strongroom("export", run)
    assert done.status == 2
    assert "--to" in done.err


@pytest.mark.parametrize("text", ("[]", "not json", '{"a"', "[" * 100_000))
def test_a_config_that_is_no_object_is_refused(
    text: str, strongroom: Strongroom, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.json").write_text(text)
    done = strongroom("export", run, "--to", tmp_path / "out", "--config", tmp_path / "bad.json")
    assert done.status == 2
    assert "cannot be config.json" in done.err


def test_two_files_of_one_name_cannot_be_put_beside(
    strongroom: Strongroom, run: Path, tmp_path: Path
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "LICENSE").write_text(folder)
    added = ("--add", tmp_path / "a/LICENSE", "--add", tmp_path / "b/LICENSE")
    done = strongroom("export", run, "--to", tmp_path / "out", *added)
    assert done.status == 2
    assert "two files" in done.err


def test_a_place_that_is_taken_is_refused_before_torch_is_imported(
    run: Path, tmp_path: Path, program: Strongroom
) -> None:
    (tmp_path / "out").mkdir()
    done = program("export", run, "--to", tmp_path / "out")
    assert done.status == 2
    assert "nothing is replaced" in done.err
    script = (
        "import sys; from strongroom_cli.main import main; status = main(sys.argv[1:]); "
        "assert status == 2, status; assert 'torch' not in sys.modules"
    )
    taken = ["export", str(run), "--to", str(tmp_path / "out")]
    subprocess.run([sys.executable, "-c", script, *taken], check=True, capture_output=True)


def test_it_works_as_a_program(run: Path, signer: Path, tmp_path: Path, program: Strongroom) -> None:
    done = program("export", "run", "--to", "out", "--sign", "file:signer.pem", cwd=tmp_path)
    assert (done.status, done.err) == (0, "")
    assert_signed(tmp_path / "out", PublicKey.from_pem(signer.with_suffix(".pub").read_bytes(), "the key"))
