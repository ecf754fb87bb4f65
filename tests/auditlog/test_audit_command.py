"""``strongroom audit verify``, ``query`` and ``show``, as people and programs meet them."""

from __future__ import annotations

import csv
import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from log_making import (
    ANN,
    CLEO,
    LOG_KEY,
    RUN,
    STRANGER,
    TIME_MS,
    VOUCHER,
    act,
    actor,
    certificate,
    edit,
    key_of,
    keys_in,
    pristine,
    put,
    sequence,
)

from strongroom import Checkpointer
from strongroom.auditing import Action, Phase
from strongroom.stores.local import LocalStore
from strongroom_cli import audit_query
from strongroom_cli.main import main
from strongroom_cli.words import printable
from strongroom_security import SecurityPolicy
from strongroom_security.auditlog.asking.queries import ask_events
from strongroom_security.auditlog.format.segments import SegmentChain, closed_for, read_segment
from strongroom_security.publickeys import PublicKey
from strongroom_security.signers.generating import generate_key
from strongroom_security.tlog.notekeys import NoteSigner

HOSTILE = "evil\x1b[31m\x07[red]\r\n\u202e=cmd()"


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.out.isascii()
        assert self.out.count("\n") == 1
        return json.loads(self.out)


Audit = Callable[..., Done]


@pytest.fixture
def audit(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Audit:
    """The command in this process, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("STRONGROOM_CONFIG", raising=False)

    def run(*arguments: Any) -> Done:
        capsys.readouterr()
        try:
            status = main(["audit", *map(str, arguments)])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else -1
        captured = capsys.readouterr()
        return Done(status, captured.out, captured.err)

    return run


@pytest.fixture
def sink(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "log")
    for key, data in pristine().items():
        store.put(key, data)
    return store


def public_key(path: Path, key: Any = VOUCHER) -> str:
    path.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return str(path)


# ----------------------------------------------------------------------------------------------------- verify


def test_a_whole_log_is_told_as_whole_and_who_vouches(audit: Audit, sink: LocalStore, tmp_path: Path) -> None:
    sequence(sink)
    signer = public_key(tmp_path / "audit.pub")
    named = ("--sink", f"dir:{tmp_path / 'log'}", "--signer", signer, "--log-key", str(LOG_KEY.key))
    done = audit("verify", *named)
    assert done.status == 0
    assert "10 events in 5 segments by 3 writers, 3 of them vouched for" in done.out
    assert "the log is as it was written" in done.out
    assert "has not ended" in done.out
    said = audit("verify", *named, "--json").json
    assert said["tampered"] is False
    assert said["tree"]["signed_by"] == [LOG_KEY.key.name]
    assert said["totals"]["unproven_events"] == 0
    assert [each["kind"] for each in said["findings"]] == ["open"]


def test_tampering_is_told_with_its_exact_place_and_status_1(
    audit: Audit, sink: LocalStore, tmp_path: Path
) -> None:
    key = keys_in(sink)[1]
    edit(sink, key, lambda lines: [*lines[:2], lines[2].replace(b'"step":100', b'"step":101'), *lines[3:]])
    done = audit("verify", "--sink", tmp_path / "log")
    assert done.status == 1
    assert f"tampered changed: {key}, line 3 (event {ANN}-6): " in done.out
    assert "the log is not as it was written" in done.out
    done = audit("verify", "--sink", tmp_path / "log", "--json")
    assert done.status == 1
    (found,) = [each for each in done.json["findings"] if each["gravity"] == "tampered"]
    assert (found["segment"], found["line"], found["event"]) == (key, 3, f"{ANN}-6")


def test_what_was_salvaged_is_counted_apart(audit: Audit, sink: LocalStore, tmp_path: Path) -> None:
    key = keys_in(sink)[-1]
    left = pristine()[key].rstrip(b"\n").rpartition(b"\n")[0] + b"\n"
    by = key_of("d" * 32, None, 9)
    put(sink, key, closed_for(read_segment(key, left), by, certificate(by), TIME_MS))
    sequence(sink)
    signer = public_key(tmp_path / "audit.pub")
    named = ("--sink", f"dir:{tmp_path / 'log'}", "--signer", signer, "--log-key", str(LOG_KEY.key))
    done = audit("verify", *named)
    assert done.status == 0
    assert "2 events in 1 segment are vouched for by who closed them for a dead writer" in done.out
    assert "the log is as it was written" not in done.out
    totals = audit("verify", *named, "--json").json["totals"]
    assert (totals["salvaged_segments"], totals["salvaged_events"]) == (1, 2)


def test_a_log_whose_key_is_named_has_a_tree(audit: Audit, sink: LocalStore, tmp_path: Path) -> None:
    done = audit("verify", "--sink", f"dir:{tmp_path / 'log'}", "--log-key", LOG_KEY.key)
    assert done.status == 1
    assert "sequence it first (strongroom audit sequence)" in " ".join(done.out.split())


def test_nothing_of_a_run_is_no_log_that_is_whole(audit: Audit, sink: LocalStore, tmp_path: Path) -> None:
    named = ("verify", "--sink", tmp_path / "log", "--run", "zzz")
    for _ in range(2):
        done = audit(*named)
        assert (done.status, done.out) == (3, "")
        assert "nothing of run zzz is in the log" in done.err
        sequence(sink)
    assert audit(*named[:-1], RUN).status == 0


def test_an_empty_folder_is_an_empty_log_and_no_folder_is_none(audit: Audit, tmp_path: Path) -> None:
    assert audit("keygen", "--to", tmp_path / "log.pem", "--origin", "example.com/audit").status == 0
    command = ("sequence", "--sink", f"dir:{tmp_path / 'log'}", "--key", f"file:{tmp_path / 'log.pem'}")
    command += ("--origin", "example.com/audit", "--state", str(tmp_path / "state"))
    for more in ((), ("--follow",)):
        done = audit(*command, *more)
        assert (done.status, done.out) == (3, "")
        assert "is not there" in done.err
        assert not (tmp_path / "log").exists()
    (tmp_path / "log").mkdir()
    done = audit(*command)
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("0 segments")
    assert audit("verify", "--sink", tmp_path / "log").status == 3


def test_a_log_that_is_taken_as_found_is_told_unless_it_is_meant(
    audit: Audit, sink: LocalStore, tmp_path: Path
) -> None:
    assert audit("keygen", "--to", tmp_path / "log.pem", "--origin", "example.com/audit").status == 0
    command = ("sequence", "--sink", f"dir:{tmp_path / 'log'}", "--key", f"file:{tmp_path / 'log.pem'}")
    command += ("--origin", "example.com/audit", "--state")
    began = audit(*command, tmp_path / "state")
    assert (began.status, began.err) == (0, "")
    size = audit(*command, tmp_path / "state", "--json").json["size"]
    text = f"no state: took the log as found, at size {size}"
    done = audit(*command, tmp_path / "mistyped")
    assert done.status == 0
    assert f"warning: {text}" in done.err
    assert audit(*command, tmp_path / "mistyped").err == ""
    done = audit(*command, tmp_path / "meant", "--first")
    assert (done.status, done.err) == (0, "")
    assert text in done.out
    done = audit(*command, tmp_path / "another", "--first", "--json")
    assert (done.json["taken_at"], done.err) == (size, "")
    assert audit(*command, tmp_path / "another", "--json").json["taken_at"] is None


def test_the_logs_key_is_changed_without_a_break(audit: Audit, sink: LocalStore, tmp_path: Path) -> None:
    old, new = (
        audit("keygen", "--to", tmp_path / name, "--origin", "example.com/audit").out.strip()
        for name in ("old.pem", "new.pem")
    )
    command = ("sequence", "--sink", f"dir:{tmp_path / 'log'}", "--origin", "example.com/audit")
    command += ("--state", str(tmp_path / "state"), "--key")
    verify = ("verify", "--sink", tmp_path / "log", "--log-key")
    assert audit(*command, f"file:{tmp_path / 'old.pem'}").status == 0
    assert audit(*command, f"file:{tmp_path / 'new.pem'}").status == 1
    assert audit(*command, f"file:{tmp_path / 'new.pem'}", "--former-key", old).status == 0
    kept = tmp_path / "kept.note"
    kept.write_bytes(sink.read("tlog/checkpoint", limit_bytes=1 << 20))
    assert audit(*verify, new, "--log-key", old, "--against", kept).status == 0
    more = SegmentChain(key_of("d" * 32, RUN, 5))
    data = more.open(time_ms=TIME_MS, certificate=None) + more.close(time_ms=TIME_MS, is_last=True)
    sink.put(more.key, data)
    assert audit(*command, f"file:{tmp_path / 'new.pem'}", "--former-key", old).status == 0
    assert audit(*verify, new).status == 0
    assert audit(*verify, new, "--log-key", old, "--against", kept).status == 0
    assert audit(*command, f"file:{tmp_path / 'new.pem'}").status == 0


def test_the_sequencer_knows_by_a_signer_whose_a_writers_id_is(
    audit: Audit, sink: LocalStore, tmp_path: Path
) -> None:
    squatter = SegmentChain(key_of(ANN, RUN, 77))
    data = squatter.open(time_ms=TIME_MS - 3_600_000, certificate=None) + squatter.close(time_ms=TIME_MS)
    sink.put(squatter.key, data)
    assert audit("keygen", "--to", tmp_path / "log.pem", "--origin", "example.com/audit").status == 0
    command = ("sequence", "--sink", f"dir:{tmp_path / 'log'}", "--key", f"file:{tmp_path / 'log.pem'}")
    command += ("--origin", "example.com/audit", "--state", str(tmp_path / "state"), "--json")
    done = audit(*command, "--signer", public_key(tmp_path / "audit.pub"))
    assert done.status == 1
    assert [each["key"] for each in done.json["refused"]] == [squatter.key]
    assert done.json["segments"] == 5
    assert done.json["unwitnessed"] == []


def test_a_writer_by_another_signer_is_refused(audit: Audit, sink: LocalStore, tmp_path: Path) -> None:
    done = audit("verify", "--sink", tmp_path / "log", "--signer", public_key(tmp_path / "x.pub", STRANGER))
    assert done.status == 1
    assert done.out.count("untrusted unknown-signer") == 5
    assert "or one that vouched before" in done.out
    assert "vouched for by keys that are not trusted" in done.out
    assert "is not as it was written" not in done.out


def test_a_key_that_vouched_before_is_believed_about_writers_and_about_nothing_else(
    audit: Audit, sink: LocalStore, tmp_path: Path
) -> None:
    public_key(tmp_path / "old.pub")
    generate_key(tmp_path / "new.pem")
    begins = f'[audit]\nsink = "dir:log"\nspool = "spool"\nkey = "file:{tmp_path / "new.pem"}"\n'
    policy = tmp_path / "strongroom.toml"
    policy.write_text(begins)
    done = audit("verify", "--security", policy, "--json")
    assert (done.status, done.json["tampered"], done.json["untrusted"]) == (1, False, True)
    policy.write_text(f'{begins}former_keys = ["file:old.pub"]\n')
    done = audit("verify", "--security", policy, "--json")
    totals = done.json["totals"]
    assert (done.status, done.json["untrusted"]) == (0, False)
    # The three, and the question before this one: by the new key.
    assert (totals["writers"], totals["vouched_writers"]) == (4, 4)
    loaded = SecurityPolicy.load(policy)
    assert loaded.audit is not None
    (former,) = loaded.audit.former_keys
    assert former == PublicKey.of(VOUCHER.public_key())
    assert loaded.verify is None


def test_where_nobody_is_named_who_vouches_that_is_said(
    audit: Audit, sink: LocalStore, tmp_path: Path
) -> None:
    done = audit("verify", "--sink", tmp_path / "log")
    assert done.status == 0
    assert "vouched for by nobody" in done.out
    assert "10 of 10 events are unproven" in done.out


def test_a_tree_that_is_not_the_one_that_was_kept_is_refused(
    audit: Audit, sink: LocalStore, tmp_path: Path
) -> None:
    kept = tmp_path / "kept.note"
    kept.write_bytes(sequence(sink))
    named = ("verify", "--sink", tmp_path / "log", "--log-key", LOG_KEY.key, "--against", kept)
    assert audit(*named).status == 0
    sink.delete_tree("tlog")
    done = audit(*named)
    assert done.status == 1
    assert "there is no tree any more" in done.out
    assert audit("verify", "--sink", tmp_path / "log", "--against", tmp_path / "none").status == 2
    kept.write_bytes(b"nonsense")
    assert audit(*named).status == 1


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    (
        (("verify",), 2, "no audit log is named"),
        (("verify", "--sink", "NOWHERE"), 3, "nowhere is not there: its path is mistyped"),
        (("verify", "--sink", "dir:NOWHERE", "--run", "run-a"), 3, "is not there"),
        (("verify", "--sink", "NOWHERE", "--witness-key", "x"), 2, "--log-key"),
        (("verify", "--sink", "NOWHERE", "--log-key", "x"), 2, "NAME"),
        (("query", "--sink", "dir:NOWHERE"), 3, "is not there"),
        (("query", "--sink", "dir:NOWHERE", "--no-refresh"), 3, "holds no audit log"),
        (("query", "--sink", "dir:NOWHERE", "--no-refresh", "--run", "run-a"), 3, "nothing of run run-a"),
        (("query", "--since", "yesterday"), 2, "is no moment"),
        (("query", "--outcome", "maybe"), 2, "is not an outcome"),
        (("query", "--action", "peek"), 2, "is not an action"),
        (("query", "--sink", "NOWHERE", "--checkpoint", "run-a", "last"), 2, "is no step"),
        (("query", "--sink", "NOWHERE", "--checkpoint", "NOWHERE/run", "1"), 3, "is no run's root"),
        (("query", "--sink", "NOWHERE", "--run", "-"), 2, "neither a run's id nor its root"),
        (("show", "--sink", "NOWHERE", "event"), 2, "WRITER-SEQ"),
        (("show", "--sink", "NOWHERE", f"{ANN}-1"), 3, f"holds no {ANN}-1"),
    ),
)
def test_what_cannot_be_done_is_said_with_a_status_of_its_own(
    audit: Audit, tmp_path: Path, arguments: tuple[str, ...], status: int, said: str
) -> None:
    done = audit(*(each.replace("NOWHERE", str(tmp_path / "nowhere")) for each in arguments))
    assert done.status == status, done.err
    assert said in done.err
    assert "Traceback" not in done.err


# -------------------------------------------------------------------------------------------- query and show


def test_a_checkpoint_is_asked_for_and_a_row_is_an_operation(
    audit: Audit, sink: LocalStore, tmp_path: Path
) -> None:
    named = ("--sink", tmp_path / "log")
    done = audit("query", *named, "--checkpoint", RUN, 100)
    assert done.status == 0
    assert done.out.count("restore") == 8
    assert "2025-11-30 09:46:40" in done.out
    assert "assumed-role/trainer/ada" in done.out
    assert "node-7 (10.0.0.7)" in done.out
    assert "0 are in its tree, and 10 are unproven" in done.out
    said = audit("query", *named, "--checkpoint", RUN, 100, "--json", "--limit", 1).json
    assert (said["has_more"], said["run"], said["step"], len(said["rows"])) == (True, RUN, 100, 1)
    assert said["index"]["unproven_events"] == 10
    sequence(sink)
    assert "10 are in its tree;" in audit("query", *named, "--run", RUN).out
    assert (
        audit("query", *named, "--run", RUN, "--all", "--json", "--limit", 0).json["rows"][0]["leaf"]
        is not None
    )


def test_a_run_that_is_not_in_the_log_is_told_apart_from_one_of_which_nothing_fits(
    audit: Audit, sink: LocalStore, tmp_path: Path
) -> None:
    named = ("query", "--sink", tmp_path / "log", "--json")
    for more in ((), ("--limit", 0)):
        done = audit(*named, "--run", "zzz", *more)
        assert (done.status, done.json["rows"]) == (3, [])
        assert "nothing of run zzz is on record" in done.err
        done = audit(*named, "--run", RUN, "--outcome", "denied", *more)
        assert (done.status, done.json["rows"], done.err) == (0, [], "")


def test_a_commit_that_was_found_does_not_look_like_a_save(audit: Audit, tmp_path: Path) -> None:
    sink = LocalStore(tmp_path / "log")
    chain = SegmentChain(key_of(ANN, RUN, 1))
    found = act(1, action=Action.SAVE, phase=Phase.OBSERVED)
    lines = [chain.open(time_ms=TIME_MS, certificate=None), chain.add(found, actor(), time_ms=TIME_MS)]
    sink.put(chain.key, b"".join([*lines, chain.close(time_ms=TIME_MS)]))
    named = ("query", "--sink", tmp_path / "log", "--run", RUN)
    (row,) = audit(*named, "--json").json["rows"]
    assert (row["action"], row["phase"]) == ("save", "observed")
    for more in ((), ("--all",)):
        out = audit(*named, *more).out
        assert "observed" in out
        assert "success" not in out


def test_the_same_question_gives_the_same_json(audit: Audit, sink: LocalStore, tmp_path: Path) -> None:
    asked = ("query", "--sink", tmp_path / "log", "--run", RUN, "--since", "2025-11-30T00:00Z", "--json")
    assert audit(*asked).out == audit(*asked).out


def test_nothing_is_read_of_the_log_with_no_refresh(audit: Audit, sink: LocalStore, tmp_path: Path) -> None:
    named = ("query", "--sink", tmp_path / "log", "--json")
    assert audit(*named, "--no-refresh").json["rows"] == []
    assert len(audit(*named).json["rows"]) == 10
    sink.delete_tree("segments")
    assert len(audit(*named, "--no-refresh").json["rows"]) == 10
    done = audit("query", "--sink", tmp_path / "log")
    assert "is no more; its events are still told" in done.err
    assert "the log was touched: 5 segments removed" in done.out


def test_an_index_that_is_damaged_is_built_again_while_it_is_asked(
    audit: Audit, sink: LocalStore, tmp_path: Path
) -> None:
    index = tmp_path / "index.sqlite"
    named = ("query", "--sink", tmp_path / "log", "--index", index, "--json")
    whole = audit(*named)
    data = bytearray(index.read_bytes())
    for page in range(2, len(data) // 4096):
        data[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    index.write_bytes(data)
    again = audit(*named)
    assert again.out == whole.out
    assert "was built anew" in again.err
    other = tmp_path / "notes.txt"
    other.write_text("mine " * 100)
    assert audit("query", "--sink", tmp_path / "log", "--index", other).status == 2
    assert other.read_text() == "mine " * 100


def test_rows_become_a_csv_file_that_no_spreadsheet_carries_out(audit: Audit, tmp_path: Path) -> None:
    sink = LocalStore(tmp_path / "log")
    chain = SegmentChain(key_of(ANN, RUN, 1))
    lines = [chain.open(time_ms=TIME_MS, certificate=None)]
    lines += [
        chain.add(act(1), actor(user, identity=user, host=user), time_ms=TIME_MS)
        for user in ("=1+1", "@x", HOSTILE)
    ]
    sink.put(chain.key, b"".join([*lines, chain.close(time_ms=TIME_MS)]))
    file = tmp_path / "rows.csv"
    done = audit("query", "--sink", tmp_path / "log", "--all", "--csv", file)
    assert done.status == 0
    with file.open(newline="", encoding="utf-8") as table:
        rows = list(csv.DictReader(table))
    assert {row["user"] for row in rows} == {"'=1+1", "'@x", printable(HOSTILE)}
    assert {row["time"] for row in rows} == {"2025-11-30T09:46:40.000Z"}
    assert audit("query", "--sink", tmp_path / "log", "--csv", file).status == 2
    shown = audit("query", "--sink", tmp_path / "log")
    assert "\x1b" not in shown.out
    assert "\u202e" not in shown.out


def test_an_event_is_shown_as_it_stands(audit: Audit, sink: LocalStore, tmp_path: Path) -> None:
    named = ("--sink", tmp_path / "log")
    event = f"{CLEO}-2"
    done = audit("show", *named, event)
    assert done.status == 0
    value = json.loads(done.out)
    assert value["metadata"]["uid"] == event
    assert f"{keys_in(sink)[4]}, line 3; not in the tree" in done.err
    sequence(sink)
    said = audit("show", *named, event, "--json").json
    assert said["event"] == value
    assert isinstance(said["leaf"], int)
    edit(sink, keys_in(sink)[4], lambda lines: [*lines[:2], lines[2][:-5], *lines[3:]])
    done = audit("show", *named, event, "--no-refresh")
    assert done.status == 1
    assert "holds nothing that can be read in its place" in done.err


# ------------------------------------------------------------------------------------------- by a real policy


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    from strongroom_security.signers.generating import generate_key

    generate_key(tmp_path / "signer.pem")
    file = tmp_path / "strongroom.toml"
    file.write_text('[sign]\nkey = "file:signer.pem"\n\n[audit]\nsink = "dir:log"\nspool = "spool"\n')
    return file


def test_who_saved_and_who_read_a_real_checkpoint_is_told_by_its_root(
    audit: Audit, tmp_path: Path, policy_file: Path
) -> None:
    policy = SecurityPolicy.load(policy_file)
    root = tmp_path / "runs" / "a"
    state = {"weight": torch.ones(3)}
    with Checkpointer(root, run_id="demo", security=policy) as checkpointer:
        checkpointer.save(7, state)
        checkpointer.wait()
        checkpointer.restore(state, step=7)
    policy.auditor.close(within_s=10)
    named = ("--security", policy_file)
    read = audit("query", *named, "--checkpoint", root, 7, "--json").json
    assert read["run"] == "demo"
    assert [(row["action"], row["outcome"]) for row in read["rows"]] == [("restore", "success")]
    assert read["rows"][0]["pid"] > 0
    happened = audit("query", *named, "--run", root, "--since", "24h", "--json", "--limit", 0).json["rows"]
    assert {"launch", "save", "restore"} <= {row["action"] for row in happened}
    assert audit("query", *named, "--run", "demo", "--since", "0s", "--json").json["rows"] == []
    found = audit("verify", *named, "--json")
    assert found.status == 0
    assert found.json["totals"]["vouched_writers"] == found.json["totals"]["writers"]


def test_whoever_asks_is_on_record_too(audit: Audit, tmp_path: Path, policy_file: Path) -> None:
    named = ("--security", policy_file)
    (tmp_path / "log").mkdir()
    for _ in range(2):  # to ask about a run puts nothing of it on record
        done = audit("query", *named, "--run", "run-a", "--outcome", "denied")
        assert (done.status, done.out) == (3, "")
        assert "nothing of run run-a is on record" in done.err
    assert audit("show", *named, f"{ANN}-1").status == 3
    rows = audit("query", *named, "--action", "audit", "--json").json["rows"]
    assert [(row["action"], row["outcome"], row["run"]) for row in rows] == [
        ("audit", "failure", None),
        ("audit", "success", "run-a"),
        ("audit", "success", "run-a"),
    ]
    events = audit("query", *named, "--action", "audit", "--run", "run-a", "--all", "--json").json["rows"]
    details = [event["details"] for event in events if event["run"] == "run-a"]
    assert {"command": "audit query", "asked_run": "run-a"}.items() <= details[-1].items()


# ---------------------------------------------------------------------------- all rows, as they are taken


@pytest.mark.parametrize("what", (("--all",), ()))
def test_all_rows_are_told_as_they_are_taken_and_are_the_same(
    audit: Audit, sink: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: tuple[str, ...]
) -> None:
    named = ("query", "--sink", tmp_path / "log", *what)
    whole = audit(*named, "--json", "--limit", 1000)
    monkeypatch.setattr(audit_query, "print_json", lambda told: pytest.fail("it was put off to the end"))
    assert audit(*named, "--json", "--limit", 0).out == whole.out
    monkeypatch.undo()


def test_all_rows_become_a_csv_file_and_an_index_that_fails_leaves_none(
    audit: Audit, sink: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = ("query", "--sink", f"dir:{tmp_path / 'log'}", "--index", tmp_path / "index", "--limit", 0)
    assert audit(*named, "--all", "--csv", tmp_path / "a.csv").status == 0
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 11

    def failing(*arguments: Any, **options: Any) -> Any:
        yield from islice(ask_events(*arguments, **options), 2)
        raise sqlite3.DatabaseError("malformed")

    monkeypatch.setattr(audit_query, "ask_events", failing)
    done = audit(*named, "--all", "--csv", tmp_path / "b.csv")
    assert (done.status, (tmp_path / "b.csv").exists()) == (4, False)
    assert "the index could not be read" in done.err


def test_a_tree_that_the_named_log_has_not_signed_is_told_as_unproven(
    audit: Audit, sink: LocalStore, tmp_path: Path
) -> None:
    sequence(sink)
    named = ("query", "--sink", tmp_path / "log")
    assert "10 are in its tree;" in audit(*named, "--log-key", str(LOG_KEY.key)).out
    stranger = NoteSigner(LOG_KEY.key.name, Ed25519PrivateKey.from_private_bytes(b"\x09" * 32))
    assert "and 10 are unproven" in audit(*named, "--log-key", str(stranger.key)).out
    assert audit(*named, "--origin", "example.com/other").status == 2
