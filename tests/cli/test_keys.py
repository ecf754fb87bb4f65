"""``strongroom keys``: what each verb does and tells, and its exit statuses."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import Checkpointer
from strongroom_cli import console
from strongroom_security import Seal, SecurityPolicy
from strongroom_security.recipients.file import FileKey, create_key_file
from strongroom_security.recipients.hpke import create_key_pair

Strongroom = Callable[..., Any]

STEPS = (300, 200, 100)

NO_TORCH = """
import sys
sys.modules["torch"] = None  # importing it is an error
from strongroom_cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="session")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of three sealed checkpoints, the keys, and policies that name them."""
    folder = tmp_path_factory.mktemp("keys")
    old = create_key_file(folder / "old.key")
    create_key_file(folder / "new.key")
    create_key_pair(folder / "glass", "p256")
    with Checkpointer(folder / "run", security=SecurityPolicy(seal=Seal(recipients=[old]))) as checkpointer:
        for step in sorted(STEPS):
            checkpointer.save(step, {"w": torch.ones(3)}).result(timeout_s=60)
    (folder / "old.toml").write_text('[seal]\nrecipients = ["file:old.key"]\n')
    (folder / "new.toml").write_text('[seal]\nrecipients = ["file:new.key"]\nidentities = ["file:old.key"]\n')
    return folder


@pytest.fixture
def here(sealed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a copy of it."""
    shutil.copytree(sealed, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def id_of(name: str) -> str:
    return FileKey.read(Path(name)).id


def newest(done: Any) -> dict[int, list[str]]:
    """By step, the ids in the newest keyring, of what ``keys list --json`` printed."""
    return {
        each["step"]: [recipient["id"] for recipient in each["generations"][0]["recipients"]]
        for each in done.json["checkpoints"]
    }


def harm(here: Path, pattern: str) -> None:
    for path in here.glob(pattern):
        path.write_bytes(path.read_bytes()[:-5])


# ------------------------------------------------------------------------------------------------------ init


@pytest.mark.parametrize("kind", ("hpke-x25519", "hpke-p256", "hpke-mlkem768-x25519"))
def test_init_makes_a_pair_of_key_files(kind: str, strongroom: Strongroom, here: Path) -> None:
    done = strongroom("keys", "init", "mine", "--kind", kind, "--json")
    assert (done.status, done.err) == (0, "")
    assert done.json["kind"] == kind
    assert done.json["files"] == ["mine.key", "mine.pub"]
    assert (done.json["recipient"], done.json["identity"]) == ("hpke:mine.pub", "hpke:mine.key")
    assert (here / "mine.key").stat().st_mode & 0o777 == 0o600
    (here / "mine.toml").write_text(
        '[seal]\nrecipients = ["hpke:mine.pub"]\nidentities = ["hpke:mine.key"]\n'
    )
    assert SecurityPolicy.load(here / "mine.toml").seal is not None


def test_init_makes_a_key_file_that_a_policy_can_name(strongroom: Strongroom, here: Path) -> None:
    done = strongroom("keys", "init", "mine.key")
    assert (done.status, done.err) == (0, "")
    assert "recipients file:mine.key" in done.out
    assert id_of("mine.key") in done.out
    assert (here / "mine.key").stat().st_mode & 0o777 == 0o600
    key = (here / "mine.key").read_text().split("\n")[1]
    assert key not in done.out


def test_init_never_writes_over_a_key(strongroom: Strongroom, here: Path) -> None:
    before = (here / "old.key").read_bytes()
    done = strongroom("keys", "init", "old.key")
    assert (done.status, done.out) == (2, "")
    assert "old.key exists" in done.err
    assert (here / "old.key").read_bytes() == before


def test_init_makes_the_very_key_that_the_policy_lacks(
    strongroom: Strongroom, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "later.toml").write_text('[seal]\nrecipients = ["file:later.key"]\n')
    monkeypatch.setenv("STRONGROOM_CONFIG", str(here / "later.toml"))
    assert strongroom("keys", "list", "run").status == 2
    assert strongroom("keys", "init", "later.key").status == 0
    assert strongroom("keys", "list", "run").status == 0


# ------------------------------------------------------------------------------------------------------ list


def test_list_shows_who_can_open_and_who_of_them_is_here(strongroom: Strongroom, here: Path) -> None:
    done = strongroom("keys", "list", "run", "--security", "old.toml")
    assert (done.status, done.err) == (0, "")
    rows = [line.split() for line in done.out.splitlines()]
    assert rows[0] == ["STEP", "KEYRING", "MADE", "RECIPIENT", "HERE"]
    assert [row[0] for row in rows[1:]] == [str(step) for step in STEPS]
    assert all(row[1] == "1" and row[-3:] == [id_of("old.key"), "file:old.key,", "opens"] for row in rows[1:])


def test_list_as_json_has_the_documented_members(strongroom: Strongroom, here: Path) -> None:
    done = strongroom("keys", "list", "run", "200", "--json", "--security", "old.toml")
    assert set(done.json) == {"checkpoints", "root", "run"}
    (checkpoint,) = done.json["checkpoints"]
    assert set(checkpoint) == {
        "attempt", "folder", "generations", "launch", "problem", "sealed", "step",
    }  # fmt: skip
    assert (checkpoint["step"], checkpoint["sealed"], checkpoint["problem"]) == (200, True, None)
    (generation,) = checkpoint["generations"]
    assert set(generation) == {
        "created_at_ms", "digest", "files", "generation", "problem", "recipients", "wrap",
    }  # fmt: skip
    assert (generation["generation"], generation["wrap"], generation["problem"]) == (1, "checkpoint", None)
    assert generation["recipients"] == [
        {"can_open": True, "id": id_of("old.key"), "kind": "file", "uri": "file:old.key"}
    ]
    without = strongroom("keys", "list", "run", "200", "--json").json["checkpoints"][0]["generations"][0]
    assert without["recipients"][0]["uri"] is None


def test_list_tells_of_what_is_damaged_or_not_sealed(strongroom: Strongroom, here: Path) -> None:
    with Checkpointer(here / "run") as checkpointer:
        checkpointer.save(400, {"w": torch.ones(3)}).result(timeout_s=60)
    harm(here, "run/step-000000000100-*/keyring/0001.json")
    harm(here, "run/step-000000000200-*/COMMIT")
    done = strongroom("keys", "list", "run")
    assert done.status == 0
    assert "not sealed" in done.out
    assert "step 100 is damaged: keyring 1" in done.out
    assert "step 200 is damaged: " in done.out
    found = {each["step"]: each for each in strongroom("keys", "list", "run", "--json").json["checkpoints"]}
    assert (found[400]["sealed"], found[400]["generations"]) == (False, [])
    assert "COMMIT pins" in found[100]["generations"][0]["problem"]
    assert "COMMIT" in found[200]["problem"]


# ---------------------------------------------------------------------------------------------------- rotate


def test_rotate_makes_the_policy_s_recipients_those_who_can_open(strongroom: Strongroom, here: Path) -> None:
    shards = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in here.rglob("*.floe")}
    policy = ("--security", "new.toml")
    done = strongroom("keys", "rotate", "run", "--dry-run", *policy)
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("3 would be rotated; 0 calls to key services")
    assert len(list(here.glob("run/*/keyring/*"))) == 3
    done = strongroom("keys", "rotate", "run", *policy)
    assert (done.status, done.err) == (0, "")
    assert done.out == "3 rotated; 0 calls to key services\n"
    assert strongroom("keys", "rotate", "run", *policy).out.startswith("3 as wanted before; ")
    assert newest(strongroom("keys", "list", "run", "--json")) == {step: [id_of("new.key")] for step in STEPS}
    assert strongroom("keys", "rotate", "run", "--remove-old", *policy).out.startswith(
        "3 as wanted before; 3 older keyrings removed; "
    )
    assert strongroom("verify", "run", "--all", *policy).status == 0
    assert strongroom("verify", "run", "--all", "--security", "old.toml").status == 4
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in shards} == shards


def test_rotate_takes_one_step_and_other_recipients(strongroom: Strongroom, here: Path) -> None:
    done = strongroom(
        "keys", "rotate", "run", "200", "--to", "file:new.key", "--to", "hpke:glass.pub", "--workers", "2",
        "--rate", "100.5", "--verify", "--security", "old.toml",
    )  # fmt: skip
    assert (done.status, done.out) == (0, "1 rotated; 0 calls to key services\n")
    found = newest(strongroom("keys", "list", "run", "--json"))
    assert [len(found[step]) for step in STEPS] == [1, 2, 1]


def test_rotate_without_a_policy_needs_recipients_who_can_open(strongroom: Strongroom, here: Path) -> None:
    done = strongroom("keys", "rotate", "run", "--to", "file:old.key", "--new-checkpoint-key")
    assert done.status == 0
    assert done.out.startswith("3 rotated; ")


def test_a_new_checkpoint_key_goes_on_by_the_time_that_it_tells(strongroom: Strongroom, here: Path) -> None:
    policy = ("--security", "old.toml")
    done = strongroom("keys", "rotate", "run", "200", "--new-checkpoint-key", "--json", *policy)
    since = str(done.json["since_ms"])
    assert done.err == f"strongroom: where this is interrupted, go on with --since {since}\n"
    again = strongroom("keys", "rotate", "run", "--new-checkpoint-key", "--since", since, "--json", *policy)
    assert (again.status, again.json["counts"]["already"], again.json["counts"]["rotated"]) == (0, 1, 2)


def test_rotate_as_json_has_the_documented_members(strongroom: Strongroom, here: Path) -> None:
    done = strongroom("keys", "rotate", "run", "--json", "--security", "new.toml")
    assert set(done.json) == {"calls", "checkpoints", "counts", "dry_run", "root", "run", "since_ms"}
    assert done.json["counts"] == {
        "already": 0, "failed": 0, "gone": 0, "rotated": 3, "unsealed": 0, "would_rotate": 0,
    }  # fmt: skip
    assert [each["step"] for each in done.json["checkpoints"]] == list(STEPS)
    for each in done.json["checkpoints"]:
        assert set(each) == {
            "attempt", "calls", "error", "folder", "generation", "launch", "passed_over", "removed", "result",
            "source", "step", "verified",
        }  # fmt: skip
        assert (each["result"], each["generation"], each["source"]) == ("rotated", 2, 1)
        assert (each["verified"], each["error"], each["removed"]) == (True, None, [])
    done = strongroom(
        "keys", "rotate", "run", "--json", "--dry-run", "--to", "file:old.key", "--security", "new.toml"
    )
    assert done.json["counts"]["would_rotate"] == 3
    assert {each["result"] for each in done.json["checkpoints"]} == {"would_rotate"}


def test_a_keyring_that_nobody_here_opened_is_told(strongroom: Strongroom, here: Path) -> None:
    done = strongroom("keys", "rotate", "run", "--to", "hpke:glass.pub", "--security", "old.toml")
    assert done.status == 0
    assert "3 keyrings not opened" in done.out
    done = strongroom(
        "keys", "rotate", "run", "--to", "hpke:glass.pub", "--remove-old", "--security", "old.toml"
    )
    assert (done.status, done.out.count("nothing shows that it opens")) == (4, 3)


# ---------------------------------------------------------------------------------------- add and remove one


def test_add_recipient_lets_one_more_open(strongroom: Strongroom, here: Path) -> None:
    policy = ("--security", "old.toml")
    done = strongroom("keys", "add-recipient", "run", "hpke:glass.pub", *policy)
    assert (done.status, done.out.split(";")[0]) == (0, "3 rotated")
    assert strongroom("keys", "add-recipient", "run", "file:new.key", "100", *policy).status == 0
    found = newest(strongroom("keys", "list", "run", "--json"))
    assert [len(found[step]) for step in STEPS] == [2, 2, 3]
    (here / "glass.toml").write_text(
        '[seal]\nrecipients = ["hpke:glass.pub"]\nidentities = ["hpke:glass.key"]\n'
    )
    assert strongroom("verify", "run", "--all", "--security", "glass.toml").status == 0


@pytest.mark.parametrize("by", ("uri", "id", "policy"))
def test_remove_recipient_lets_one_open_no_more(by: str, strongroom: Strongroom, here: Path) -> None:
    strongroom("keys", "add-recipient", "run", "file:new.key", "--security", "old.toml")
    named = id_of("old.key") if by == "id" else "file:old.key"
    policy = ("--security", str(here / "new.toml")) if by == "policy" else ()
    done = strongroom("keys", "remove-recipient", "run", named, *policy)
    assert (done.status, done.out.split(";")[0]) == (0, "3 rotated")
    assert newest(strongroom("keys", "list", "run", "--json")) == {step: [id_of("new.key")] for step in STEPS}


def test_who_was_removed_is_still_known_by_the_older_keyrings(strongroom: Strongroom, here: Path) -> None:
    strongroom("keys", "add-recipient", "run", "file:new.key", "100", "--security", "old.toml")
    remove = ("keys", "remove-recipient", "run", "file:new.key", "--security", "old.toml")
    assert strongroom(*remove).out.startswith("1 rotated; 2 as wanted before; ")
    assert strongroom(*remove).out.startswith("3 as wanted before; ")


@pytest.mark.parametrize("by", ("uri", "id"))
@pytest.mark.parametrize("step", ((), ("200",)))
@pytest.mark.parametrize("dry", ((), ("--dry-run",)))
def test_one_that_no_keyring_names_is_3_and_those_that_are_there_are_told(
    dry: tuple[str, ...], step: tuple[str, ...], by: str, strongroom: Strongroom, here: Path
) -> None:
    strongroom("keys", "add-recipient", "run", "file:new.key", "100", "--security", "old.toml")
    if not step:
        create_key_file(here / "other.key")
    else:
        shutil.copy("new.key", "other.key")  # that one is named, and by another step
    named = id_of("other.key") if by == "id" else "file:other.key"
    done = strongroom("keys", "remove-recipient", "run", named, *step, *dry)
    assert (done.status, done.out) == (3, "")
    assert f"names {id_of('other.key')}, so nothing was changed" in done.err
    assert id_of("old.key") in done.err
    assert (id_of("new.key") in done.err.partition("those that are there")[2]) is not bool(step)


# ------------------------------------------------------------------------------------------- exit statuses


@pytest.mark.parametrize(
    ("arguments", "told"),
    (
        (("rotate", "run"), "nothing says who shall be able to open"),
        (("rotate", "run", "--to", "file:gone.key"), "gone.key is not there"),
        (("rotate", "run", "--to", "gone"), "names no recipient"),
        (("rotate", "run", "--to", "file:new.key", "--since", "5"), "--since goes on with"),
        (("rotate", "run", "--since", "now"), "is not a number of milliseconds"),
        (("rotate", "run", "--rate", "0"), "is not a number above 0"),
        (("rotate", "run", "--rate", "nan"), "is not a number above 0"),
        (("rotate", "run", "--workers", "0"), "is not a number from 1 to 256"),
        (("rotate",), "required: ROOT"),
        (("add-recipient", "run"), "required: RECIPIENT"),
        (("remove-recipient", "run", "nobody"), "is not a recipient's id"),
        (("init", "x", "--kind", "rsa"), "invalid choice"),
        ((), "required: VERB"),
        (("list", "run", "--security", "gone.toml"), "cannot be read"),
    ),
)
def test_what_is_not_used_correctly_is_2(
    arguments: tuple[str, ...], told: str, strongroom: Strongroom, here: Path
) -> None:
    done = strongroom("keys", *arguments)
    assert (done.status, done.out) == (2, "")
    assert told in done.err


def test_the_last_recipient_is_not_removed_and_that_is_2(strongroom: Strongroom, here: Path) -> None:
    done = strongroom("keys", "remove-recipient", "run", id_of("old.key"))
    assert done.status == 2
    assert done.out.count("alone can open") == 3


@pytest.mark.parametrize("verb", (("list",), ("rotate",), ("add-recipient", "file:new.key")))
def test_no_run_or_no_such_step_is_3(verb: tuple[str, ...], strongroom: Strongroom, here: Path) -> None:
    name, *recipient = verb
    for root, step in (("nowhere", ()), ("run", ("7",))):
        done = strongroom("keys", name, root, *recipient, *step, "--security", "old.toml")
        assert (done.status, done.out) == (3, "")


def test_no_key_is_4(strongroom: Strongroom, here: Path) -> None:
    done = strongroom("keys", "rotate", "run", "--to", "file:new.key")
    assert done.status == 4
    assert done.out.count(f"is for {id_of('old.key')}") == 3
    found = strongroom("keys", "rotate", "run", "--to", "file:new.key", "--json").json["checkpoints"]
    assert {each["error"]["status"] for each in found} == {4}


def test_a_key_service_out_of_reach_is_4(
    strongroom: Strongroom, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAO_ADDR", "http://127.0.0.1:9")
    monkeypatch.setenv("BAO_TOKEN", "a-token")
    (here / "bao.toml").write_text(
        '[seal]\nrecipients = ["openbao:transit/ckpt"]\nidentities = ["file:old.key"]\ntimeout_s = 0.2\n'
    )
    done = strongroom("keys", "rotate", "run", "200", "--security", "bao.toml")
    assert done.status == 4
    assert "could not be used within 0.2 s" in done.out
    assert len(list(here.glob("run/*/keyring/*"))) == 3


@pytest.mark.parametrize("harmed", ("keyring/0001.json", "COMMIT", "data/MANIFEST.json"))
def test_damage_is_1_and_the_others_are_rotated(harmed: str, strongroom: Strongroom, here: Path) -> None:
    harm(here, f"run/step-000000000200-*/{harmed}")
    done = strongroom("keys", "rotate", "run", "--security", "new.toml")
    assert done.status == 1
    assert "step 200: failed: " in done.out
    assert "2 rotated; 1 failed; 0 calls to key services" in done.out
    assert strongroom("keys", "rotate", "run", "200", "--security", "new.toml").status == 1


def test_what_is_passed_over_is_told(strongroom: Strongroom, here: Path) -> None:
    (folder,) = here.glob("run/step-000000000200-*/keyring")
    (folder / "0002.json").write_bytes(b"{}")
    done = strongroom("keys", "rotate", "run", "--security", "new.toml")
    assert done.status == 0
    assert "step 200: passed over: keyring 2" in done.out


# ----------------------------------------------------------------------------------------------- its manners


@pytest.mark.parametrize("verb", ("list", "rotate"))
def test_it_waits_for_no_torch(verb: str, here: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, "keys", verb, "run", "--security", "new.toml"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_usage_waits_for_no_cryptography(here: Path) -> None:
    program = (
        "import sys\n"
        "from strongroom_cli.main import main\n"
        "try:\n"
        "    main(['keys', 'rotate', '--help'])\n"
        "finally:\n"
        "    print('cryptography' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.endswith("False\n")
    assert "--new-checkpoint-key" in done.stdout


def test_long_work_is_counted_in_checkpoints(
    strongroom: Strongroom, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(console, "_PATIENCE_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    done = strongroom("keys", "rotate", "run", "--security", "new.toml")
    assert done.status == 0
    assert "rotating" in terminal.getvalue()
    assert "3/3" in terminal.getvalue()
