"""Every public operation is on record, well ended or not: the operations are walked, and each one is run.

What is walked and stands in neither of the two lists here fails a test: whoever adds an operation says what
it is on record as, or why it is not.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import inspect
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from strongroom import Checkpointer, ConfigError, StrongroomError
from strongroom.dcp import StrongroomReader, StrongroomWriter
from strongroom_cli import auditing
from strongroom_cli.main import _parser, main
from strongroom_security import SecurityPolicy
from strongroom_security.auditlog.format.events import Recorded, recorded_of
from strongroom_security.auditlog.format.segments import read_segment
from strongroom_security.recipients.file import create_key_file
from strongroom_security.roles.comparing import Answer
from strongroom_security.roles.definitions import ROLES
from strongroom_security.roles.looking import Looker
from strongroom_security.roles.rendering import render_all
from strongroom_security.roles.site import Site
from strongroom_security.signers.generating import generate_key

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*unavailable")

NO_DIST: dict[str, Any] = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}
RUN = "demo"
POLICY = """
[seal]
recipients = ["file:kek.key"]
[sign]
key = "file:signer.pem"
[verify]
keys = ["file:signer.pub"]
floor = "file:floor.json"
"""
AUDIT = """
[audit]
sink = "dir:sink"
spool = "spool"
"""


def state(number: float = 1) -> dict[str, Any]:
    return {"model": {"w": torch.full((64,), float(number))}}


@dataclass(frozen=True)
class World:
    """A run of two checkpoints, and a policy with everything in it whose log is empty yet."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "run"

    @property
    def toml(self) -> Path:
        return self.folder / "audited.toml"

    @contextlib.contextmanager
    def policy(self) -> Iterator[SecurityPolicy]:
        policy = SecurityPolicy.load(self.toml)
        try:
            yield policy
        finally:
            policy.auditor.close(within_s=30)

    @contextlib.contextmanager
    def checkpointer(self, root: Path | None = None) -> Iterator[Checkpointer]:
        with self.policy() as policy, Checkpointer(root or self.root, security=policy) as checkpointer:
            yield checkpointer

    def cli(self, *words: str, policy: Path | None = None) -> int:
        """Run a command where the files are, under the policy."""
        with _chdir(self.folder):
            return main([*words, "--security", str(policy or self.toml)])

    def recorded(self) -> list[Recorded]:
        """All that is in the sink, in the order in which it was recorded; every segment is whole."""
        found = []
        for path in sorted((self.folder / "sink" / "segments").rglob("*.jsonl")):
            key = path.relative_to(self.folder / "sink").as_posix()
            reading = read_segment(key, path.read_bytes())
            assert reading.is_whole, reading.problems
            found += [recorded_of(value, key) for _, value in reading.events()]
        return sorted(found, key=lambda event: (event.time, event.seq))


@contextlib.contextmanager
def _chdir(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once, by a policy without a log: what is on record is what a case did."""
    folder = tmp_path_factory.mktemp("template")
    create_key_file(folder / "kek.key")
    create_key_file(folder / "other.key")
    for name in ("signer.pem", "root.pem", "approver.pem"):
        generate_key(folder / name)
    (folder / "plain.toml").write_text(POLICY)
    (folder / "audited.toml").write_text(POLICY + AUDIT)
    (folder / "bare.toml").write_text(AUDIT)
    with Checkpointer(folder / "run", run_id=RUN, security=folder / "plain.toml") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
    with _chdir(folder):
        assert main(["trust", "init", "trust.json", "--root-key", "file:root.pem"]) == 0
        grant = ("roles", "grant", "grant.json", "--run", RUN, "--who", "ann", "--reason", "a drill")
        assert main([*grant]) == 0
    return folder


@pytest.fixture
def world(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.delenv("STRONGROOM_CONFIG", raising=False)
    folder = tmp_path / "world"
    shutil.copytree(template, folder)
    (folder / "floor.json").unlink()  # it remembers the template's root
    return World(folder)


Act = Callable[[World], object]


@dataclass(frozen=True)
class Case:
    """An operation.

    Attributes:
        action: what it is on record as.
        good, bad: run it so that it ends well, and so that it does not.
        reads: whether a checkpoint is read: then that is on record before.
        about: the step that it is about; None: it is about none.
        outcome: of the bad one.
    """

    action: str
    good: Act
    bad: Act
    reads: bool = False
    about: int | None = None
    outcome: str = "failure"


def raises(act: Act) -> Act:
    def tried(world: World) -> None:
        with pytest.raises((StrongroomError, CheckpointExceptions)):
            act(world)

    return tried


CheckpointExceptions = dcp.api.CheckpointException


def says(status: int, *words: str, policy: str | None = None) -> Act:
    def ran(world: World) -> None:
        filled = [word.format(folder=world.folder) for word in words]
        assert world.cli(*filled, policy=None if policy is None else world.folder / policy) == status

    return ran


def method(act: Callable[[Checkpointer], object]) -> Act:
    def ran(world: World) -> None:
        with world.checkpointer() as checkpointer:
            act(checkpointer)

    return ran


def restored_and_saved(number: int, value: Any) -> Act:
    def act(checkpointer: Checkpointer) -> None:
        checkpointer.restore()
        checkpointer.save(number, value).result()

    return method(act)


def without_a_run(world: World) -> None:
    (world.root / "run.json").unlink()
    with world.checkpointer() as checkpointer:
        checkpointer.checkpoints()


def dcp_load(world: World, **options: Any) -> None:
    with world.policy() as policy, Checkpointer(world.root, security=policy):
        target = {"model": {"w": torch.zeros(64)}}
        dcp.load(target, storage_reader=StrongroomReader(world.root, security=policy, **options), **NO_DIST)


def dcp_save(world: World, step: int) -> None:
    with world.policy() as policy:
        dcp.save(state(), storage_writer=StrongroomWriter(world.root, step=step, security=policy), **NO_DIST)


def checked(world: World, *, is_good: bool) -> None:
    site = Site(bucket="checkpoints", account="111122223333")
    files = render_all(site)
    said: dict[str, Any] = {
        name.removesuffix(".json").replace(".", " "): Answer(value=document)
        for name, document in files.items()
        if name.startswith("bucket.")
    }
    said |= {f"role {role.name}": Answer() for role in ROLES}
    if not is_good:
        said["bucket versioning"] = Answer(value={})
    with pytest.MonkeyPatch.context() as patched:
        # AWS answers, as far as the command asks.
        patched.setattr(Looker, "look", lambda *_: said)
        status = world.cli("roles", "check", "--bucket", "checkpoints", "--account", "111122223333")
    assert status == (0 if is_good else 1)


_NOWHERE = "{folder}/nowhere"
_ROOT = "{folder}/run"
_BY_ROOT = ("--root-key", "file:root.pem")
_KEY = "arn:aws:kms:eu-west-1:111122223333:key/0123abcd"
_SITE = ("--bucket", "checkpoints", "--kms-key", _KEY, "--audit-bucket", "checkpoints-audit")
_GRANTED = ("--run", RUN, "--who", "ann", "--reason", "x")

COVERED: dict[str, Case] = {
    # the core
    "Checkpointer.save": Case(
        "save", restored_and_saved(3, state()), raises(restored_and_saved(3, {"bad": object()}))
    ),
    "Checkpointer.restore": Case(
        "restore",
        method(lambda checkpointer: checkpointer.restore()),
        raises(method(lambda checkpointer: checkpointer.restore(step=9))),
        reads=True,
        about=2,
    ),
    "Checkpointer.plan_restore": Case(
        "plan",
        method(lambda checkpointer: checkpointer.plan_restore()),
        raises(method(lambda checkpointer: checkpointer.plan_restore(step=9))),
        reads=True,
        about=2,
    ),
    "Checkpointer.prepare": Case(
        "prepare",
        method(lambda checkpointer: checkpointer.prepare(state())),
        raises(method(lambda checkpointer: checkpointer.prepare({"bad": object()}))),
    ),
    "Checkpointer.checkpoints": Case(
        "list", method(lambda checkpointer: checkpointer.checkpoints()), raises(without_a_run)
    ),
    # plain DCP
    "StrongroomReader": Case(
        "restore", dcp_load, raises(partial(dcp_load, step=9)), reads=True, about=2
    ),
    "StrongroomWriter": Case(
        "save", partial(dcp_save, step=3), raises(partial(dcp_save, step=1)), about=3
    ),
    # the command
    "ls": Case("list", says(0, "ls", _ROOT), says(3, "ls", _NOWHERE)),
    "show": Case("show", says(0, "show", _ROOT, "1"), says(3, "show", _ROOT, "9"), reads=True, about=1),
    "provenance": Case(
        "provenance", says(0, "provenance", _ROOT), says(3, "provenance", _ROOT, "9"), reads=True, about=2
    ),
    "plan": Case(
        "plan",
        says(0, "plan", _ROOT, "--ranks", "2"),
        says(3, "plan", _ROOT, "9", "--ranks", "2"),
        reads=True,
        about=2,
    ),
    "verify": Case("verify", says(0, "verify", _ROOT), says(3, "verify", _ROOT, "9"), reads=True, about=2),
    "export": Case(
        "export",
        says(0, "export", _ROOT, "--to", "{folder}/out"),
        says(3, "export", _ROOT, "9", "--to", "{folder}/out"),
        reads=True,
        about=2,
    ),
    "sign": Case(
        "sign",
        says(0, "sign", _ROOT, "--key", "file:root.pem"),
        says(2, "sign", _ROOT, policy="bare.toml"),
        reads=True,
        about=2,
    ),
    "gc": Case("collect", says(0, "gc", _ROOT, "--keep-last", "1"), says(3, "gc", _NOWHERE)),
    "replicate": Case(
        "replicate",
        says(0, "replicate", _ROOT, "--to", "{folder}/far"),
        says(3, "replicate", _ROOT, "9", "--to", "{folder}/far"),
        reads=True,
        about=2,
    ),
    "keys init": Case(
        "keys", says(0, "keys", "init", "new.key"), says(2, "keys", "init", "kek.key")
    ),
    "keys list": Case(
        "keys", says(0, "keys", "list", _ROOT, "1"), says(3, "keys", "list", _NOWHERE), reads=True, about=1
    ),
    "keys rotate": Case(
        "rotate",
        says(0, "keys", "rotate", _ROOT, "2", "--to", "file:kek.key", "--to", "file:other.key"),
        says(3, "keys", "rotate", _ROOT, "9"),
        reads=True,
        about=2,
    ),
    "keys add-recipient": Case(
        "recipients",
        says(0, "keys", "add-recipient", _ROOT, "file:other.key", "2"),
        says(3, "keys", "add-recipient", _ROOT, "file:other.key", "9"),
        reads=True,
        about=2,
    ),
    "keys remove-recipient": Case(
        "recipients",
        says(4, "keys", "remove-recipient", _ROOT, "file:kek.key", "2"),
        says(3, "keys", "remove-recipient", _ROOT, "file:other.key", "2"),
    ),
    "trust show": Case(
        "trust",
        says(0, "trust", "show", "trust.json"),
        says(2, "trust", "show", "nowhere.json"),
    ),
    "trust init": Case(
        "trust",
        says(0, "trust", "init", "new.json", *_BY_ROOT),
        says(2, "trust", "init", "trust.json", *_BY_ROOT),
    ),
    "trust add-key": Case(
        "trust",
        says(0, "trust", "add-key", "trust.json", "--public", "signer.pub", "--name", "s", *_BY_ROOT),
        says(2, "trust", "add-key", "nowhere.json", "--public", "signer.pub", "--name", "s", *_BY_ROOT),
    ),
    "trust revoke": Case(
        "trust",
        says(
            0, "trust", "revoke", "trust.json", "file:signer.pub", "--reason", "x", "--up-to", f"{_ROOT}:1",
            *_BY_ROOT,
        ),
        says(
            3, "trust", "revoke", "trust.json", "file:signer.pub", "--reason", "x", "--up-to", f"{_ROOT}:9",
            *_BY_ROOT,
        ),
        reads=True,
        about=1,
    ),
    "trust renew": Case(
        "trust",
        says(0, "trust", "renew", "trust.json", *_BY_ROOT),
        says(2, "trust", "renew", "nowhere.json", *_BY_ROOT),
    ),
    "trust sign": Case(
        "trust",
        says(0, "trust", "sign", "trust.json", *_BY_ROOT),
        says(2, "trust", "sign", "nowhere.json", *_BY_ROOT),
    ),
    "floor show": Case("floor", says(0, "floor", "show"), says(2, "floor", "show", policy="bare.toml")),
    "floor forget": Case("floor", lambda world: None, says(3, "floor", "forget", "other-run")),
    "roles render": Case(
        "roles",
        says(0, "roles", "render", "--all", *_SITE),
        says(2, "roles", "render", "--all", *_SITE, "--transition", "soon"),
    ),
    "roles check": Case("roles", partial(checked, is_good=True), partial(checked, is_good=False)),
    "roles grant": Case(
        "grant",
        says(0, "roles", "grant", "new.json", *_GRANTED),
        says(2, "roles", "grant", "grant.json", *_GRANTED),
    ),
    "roles approve": Case(
        "approve",
        says(0, "roles", "approve", "grant.json", "--key", "file:approver.pem"),
        says(2, "roles", "approve", "nowhere.json", "--key", "file:approver.pem"),
    ),
}  # fmt: skip

UNRECORDED = {
    "Checkpointer.wait": "it waits for a save, which tells its own end",
    "Checkpointer.close": "likewise; it sees the record out of the process",
    "Checkpointer.replication": "it tells what this process knows, and looks at nothing",
    "Checkpointer.confer": "the ranks talk to each other, and nothing is looked at",
}
"""Operations that record nothing themselves, and why."""

_HOOKS = "DCP calls it in the course of one load or save, which is on record as a whole"
"""Of methods of the storage reader and writer."""


def operations() -> list[str]:
    """Every public operation: methods, and verbs of the command."""
    found = [
        f"Checkpointer.{name}"
        for name, member in vars(Checkpointer).items()
        if not name.startswith("_") and callable(member)
    ]
    return [*found, "StrongroomReader", "StrongroomWriter", *commands(_parser())]


def commands(parser: argparse.ArgumentParser, *words: str) -> list[str]:
    verbs = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    if not verbs:
        return [" ".join(words)]
    return [
        name for each in verbs for word, sub in each.choices.items() for name in commands(sub, *words, word)
    ]


def test_every_operation_is_covered_here_or_is_known_not_to_be_on_record() -> None:
    walked = [name for name in operations() if name.split()[0] not in auditing.UNRECORDED]
    assert set(walked) == COVERED.keys() | UNRECORDED.keys()
    assert not COVERED.keys() & UNRECORDED.keys()


def test_every_verb_of_the_command_has_an_action() -> None:
    walked = {name for name in commands(_parser()) if name.split()[0] not in auditing.UNRECORDED}
    assert {" ".join(filter(None, which)) for which in auditing.ACTIONS} == walked


def test_what_dcp_calls_of_reader_and_writer_is_known() -> None:
    found = {
        name
        for each in (StrongroomReader, StrongroomWriter)
        for name, member in vars(each).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, classmethod))
    }
    assert found == {
        "finish", "prepare_global_plan", "prepare_local_plan", "read_data", "read_metadata", "reset",
        "set_up_storage_reader", "set_up_storage_writer", "validate_checkpoint_id", "write_data",
    }, _HOOKS  # fmt: skip


_DONE_OTHERWISE = {"keys remove-recipient", "floor forget"}
"""Of which the good case has a test of its own below."""


@pytest.mark.parametrize("name", sorted(COVERED.keys() - _DONE_OTHERWISE))
def test_what_ends_well_is_on_record(world: World, name: str) -> None:
    case = COVERED[name]
    case.good(world)
    check_good(world, case)


def check_good(world: World, case: Case) -> None:
    events = world.recorded()
    own = [event for event in events if event.action == case.action]
    last = own[-1]
    assert (last.phase, last.outcome) == ("finished", "success"), events
    check_actor(events)
    if case.about is not None:
        assert case.about in {event.step for event in own}
        assert {event.run for event in own} == {RUN}
    if case.reads:
        first = events[0]
        assert (first.action, first.phase, first.outcome) == (case.action, "intended", "unknown")
        assert first.step == case.about
        assert first.root == world.root.as_uri()
        unwrapped = [event for event in events if event.action == "unwrap"]
        assert {event.operation for event in unwrapped} <= {first.operation}, "unwrapped on its own"


def check_actor(events: list[Recorded]) -> None:
    assert {event.pid for event in events} == {os.getpid()}
    assert {event.host for event in events} == {socket.gethostname()}
    assert {event.user for event in events} == {getpass.getuser()}


@pytest.mark.parametrize("name", sorted(COVERED))
def test_what_does_not_end_well_is_on_record(world: World, name: str) -> None:
    case = COVERED[name]
    case.bad(world)
    events = world.recorded()
    last = [event for event in events if event.action == case.action][-1]
    assert (last.phase, last.outcome) == ("finished", case.outcome)
    assert last.reason
    check_actor(events)


def test_a_new_key_is_on_record_where_there_is_a_policy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRONGROOM_CONFIG", str(world.toml))
    with _chdir(world.folder):
        assert main(["keys", "init", "new.key"]) == 0
        assert main(["keys", "init", "new.key"]) == 2
    events = world.recorded()
    assert [(event.action, event.outcome) for event in events] == [("keys", "success"), ("keys", "failure")]
    check_actor(events)


def test_that_nothing_is_on_record_for_want_of_a_policy_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (world.folder / "kek.key").unlink()
    monkeypatch.setenv("STRONGROOM_CONFIG", str(world.toml))
    with _chdir(world.folder):
        assert main(["keys", "init", "kek.key"]) == 0
        assert "not on record" in capsys.readouterr().err
        assert main(["ls", "run"]) == 0


def test_a_recipient_less_and_a_run_forgotten_are_on_record(world: World) -> None:
    assert world.cli("keys", "add-recipient", str(world.root), "file:other.key") == 0
    assert world.cli("keys", "remove-recipient", str(world.root), "file:other.key") == 0
    with world.checkpointer() as checkpointer:
        checkpointer.restore()  # lifts the floor
    assert world.cli("floor", "forget", RUN) == 0
    events = world.recorded()
    changed = [event for event in events if event.action == "recipients"]
    finished = [event for event in changed if event.phase == "finished" and event.step is not None]
    of_one = [event for event in finished if event.step == 2]
    assert [(event.details["keyring_before"], event.details["keyring"]) for event in of_one] == [
        (1, 2),
        (2, 3),
    ]
    assert (events[-1].action, events[-1].outcome, events[-1].run) == ("floor", "success", RUN)


def test_a_sink_that_is_out_of_reach_lets_nothing_be_read(world: World) -> None:
    text = world.toml.read_text().replace('sink = "dir:sink"', 'sink = "dir:file/sink"\nintent_s = 0.2')
    (world.folder / "file").write_text("no folder")
    world.toml.write_text(text)
    for words in (
        ["show"],
        ["verify"],
        ["provenance"],
        ["plan", "--ranks", "1"],
        ["keys", "rotate"],
        ["keys", "list"],
    ):
        command, *rest = words
        verb = [rest.pop(0)] if command == "keys" else []
        assert world.cli(command, *verb, str(world.root), *rest) == 4, command
    assert world.cli("ls", str(world.root)) == 0
    with world.checkpointer() as checkpointer:
        # Saves go on: they wait for no sink.
        assert checkpointer.save(5, state()).result(timeout_s=60).step == 5


def test_keyrings_of_a_whole_run_are_looked_at_once_that_is_on_record(world: World) -> None:
    assert world.cli("keys", "list", str(world.root)) == 0
    events = world.recorded()
    assert [(event.action, event.phase, event.run, event.step) for event in events] == [
        ("keys", "intended", RUN, None),
        ("keys", "finished", RUN, None),
    ]


@pytest.mark.parametrize("sink", ("run", "run/log", "other/../run/log", "link/log"))
def test_a_log_within_the_root_is_refused(
    world: World, sink: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (world.folder / "link").symlink_to(world.root)
    world.toml.write_text(world.toml.read_text().replace('sink = "dir:sink"', f'sink = "dir:{sink}"'))
    policy = SecurityPolicy.load(world.toml)
    with pytest.raises(ConfigError, match=r"is the root .* or lies inside it"):
        Checkpointer(world.root, security=policy)
    with pytest.raises(ConfigError, match="lies inside it"):
        Checkpointer(world.folder / "first", replicate_to=[world.root], security=policy)
    with pytest.raises(ConfigError, match="lies inside it"):
        StrongroomReader(world.root, security=policy)
    with pytest.raises(ConfigError, match="lies inside it"):
        StrongroomWriter(world.root, step=9, security=policy)
    assert world.cli("verify", str(world.root)) == 2
    assert "lies inside it" in capsys.readouterr().err
    assert not (world.root / "log").exists()
    # A log beside the root whose name begins alike is fine.
    world.toml.write_text(world.toml.read_text().replace(f'sink = "dir:{sink}"', 'sink = "dir:run-log"'))
    assert world.cli("verify", str(world.root)) == 0


def test_what_is_damaged_is_on_record_with_its_reason(world: World) -> None:
    shard = max(
        world.root.glob("step-000000000002-*/data/*.safetensors*"), key=lambda path: path.stat().st_size
    )
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    assert world.cli("verify", str(world.root)) == 1
    one, whole = [
        event for event in world.recorded() if event.phase == "finished" and event.action == "verify"
    ]
    assert (one.step, one.outcome, one.details["verdict"]) == (2, "failure", "damaged")
    assert "safetensors" in str(one.reason)
    assert whole.outcome == "failure"
    with world.checkpointer() as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None
    assert restored.step == 1
    skips = [event for event in world.recorded() if event.details.get("is_skipped")]
    assert [(event.action, event.step, event.outcome) for event in skips] == [("restore", 2, "failure")]
