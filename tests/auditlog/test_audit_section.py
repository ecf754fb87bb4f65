"""``[audit]`` of a policy, in its file and in code; and ``strongroom audit flush``, which goes by it."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from recorders import LONG_S, Place, act

from strongroom.auditing import NO_AUDIT, Auditor
from strongroom.errors import ConfigError, StoreError
from strongroom.stores.memory import MemoryStore
from strongroom_cli.main import main
from strongroom_security import Audit, SecurityPolicy, Sign
from strongroom_security import audit as section
from strongroom_security.auditlog.recording.auditor import LogAuditor
from strongroom_security.auditlog.recording.settings import Settings
from strongroom_security.signers.file import FileSigner
from strongroom_security.signers.generating import generate_key

HERE = Path(__file__).parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    generate_key(tmp_path / "signer.pem")
    generate_key(tmp_path / "audit.pem")
    section._warn_of_no_key.cache_clear()
    return tmp_path


@pytest.fixture
def load(folder: Path) -> Callable[[str], SecurityPolicy]:
    def load(text: str) -> SecurityPolicy:
        (folder / "policy.toml").write_text(text)
        return SecurityPolicy.load(folder / "policy.toml")

    return load


def settings_of(policy: SecurityPolicy) -> Settings:
    assert isinstance(policy.auditor, LogAuditor)
    return policy.auditor.settings


def test_a_policy_without_it_records_nothing(load: Callable[[str], SecurityPolicy]) -> None:
    assert load('digest = "sha256"').auditor is NO_AUDIT


def test_loading_a_policy_writes_nothing_and_starts_no_thread(
    load: Callable[[str], SecurityPolicy], folder: Path
) -> None:
    before = set(folder.iterdir()), threading.active_count()
    policy = load('[sign]\nkey = "file:signer.pem"\n[audit]\nsink = "dir:log"\nspool = "spool"\n')
    assert isinstance(policy.auditor, Auditor)
    assert (set(folder.iterdir()) - {folder / "policy.toml"}, threading.active_count()) == before


def test_all_that_it_may_say_reaches_the_auditor(load: Callable[[str], SecurityPolicy], folder: Path) -> None:
    policy = load(
        """
        [audit]
        sink = "s3://audit/log"
        key = "file:audit.pem"
        spool = "spool"
        spool_bytes = 2000000
        seal_s = 1.5
        seal_events = 10
        intent_s = 3
        also = ["logging:audit", "syslog:unix:/dev/log"]
        credentials = "profile:audit"
        """
    )
    found = settings_of(policy)
    assert found.sink == "s3://audit/log"
    assert found.signer is not None
    assert found.signer.public_key == FileSigner.read(folder / "audit.pem").public_key
    assert found.spool == folder / "spool"
    assert (found.spool_bytes, found.seal_s, found.seal_events, found.intent_s) == (2_000_000, 1.5, 10, 3.0)
    assert found.also == ("logging:audit", "syslog:unix:/dev/log")
    assert found.asks_aws


def test_the_key_that_signs_checkpoints_vouches_where_no_other_is_named(
    load: Callable[[str], SecurityPolicy], folder: Path
) -> None:
    policy = load('[sign]\nkey = "file:signer.pem"\n[audit]\nsink = "dir:log"\n')
    signer = settings_of(policy).signer
    assert signer is not None
    assert signer.public_key == FileSigner.read(folder / "signer.pem").public_key
    assert settings_of(policy).sink == (folder / "log").as_uri()


def test_a_log_that_nobody_vouches_for_is_warned_of_once(
    load: Callable[[str], SecurityPolicy], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert settings_of(load('[audit]\nsink = "dir:log"\n')).signer is None
    told = [record for record in caplog.records if "nobody vouches" in record.message]
    assert [record.levelno for record in told] == [logging.WARNING]


@pytest.mark.parametrize(
    ("text", "told"),
    (
        ("", r"line 1: \[audit\] names no sink"),
        ('sink = "log"', r"line 2: \[audit\] sink: expected 'dir:PATH'"),
        ('sink = "dir:"', r"line 2: \[audit\] sink: expected"),
        ('sink = "s3://"', r"line 2: \[audit\] sink: .*names no bucket"),
        ('sink = "dir:log"\nkey = "file:no.pem"', r"line 3: \[audit\] key: "),
        ('sink = "dir:log"\npassphrase = "env:X"', r"line 3: \[audit\] passphrase: it is of no key"),
        ('sink = "dir:log"\nformer_keys = "file:a"', r"line 3: \[audit\] former_keys: expected a list"),
        ('sink = "dir:log"\nformer_keys = ["file:no"]', r"line 3: \[audit\] former_keys: "),
        ('sink = "dir:log"\nformer_keys = ["aws-kms:x"]', r"line 3: \[audit\] former_keys: expected 'file:"),
        ('sink = "dir:log"\nspool = 7', r"line 3: \[audit\] spool: expected a folder"),
        ('sink = "dir:log"\nspool_bytes = 1', r"line 3: \[audit\] spool_bytes: expected 1048576 to"),
        ('sink = "dir:log"\nseal_s = 0', r"line 3: \[audit\] seal_s: "),
        ('sink = "dir:log"\nseal_events = true', r"line 3: \[audit\] seal_events: expected 1 to"),
        ('sink = "dir:log"\nintent_s = "1"', r"line 3: \[audit\] intent_s: "),
        ('sink = "dir:log"\nalso = ["mail:x"]', r"line 3: \[audit\] also: expected 'syslog:udp"),
        ('sink = "dir:log"\nalso = "logging:x"', r"line 3: \[audit\] also: expected a list"),
        ('sink = "dir:log"\ncredentials = "env"', r"line 3: \[audit\] credentials: a sink in a folder"),
        ('sink = "s3://log"\ncredentials = "me"', r"line 3: \[audit\] credentials: expected 'env'"),
        ('sink = "dir:log"\nwhere = 1', r"line 3: the unknown member 'where' in \[audit\]"),
    ),
)
def test_what_cannot_work_is_told_with_its_line(
    load: Callable[[str], SecurityPolicy], text: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        load(f"[audit]\n{text}\n")


def test_code_may_name_a_store_and_a_signer_of_its_own(folder: Path) -> None:
    sink = MemoryStore()
    signer = FileSigner.read(folder / "audit.pem")
    policy = SecurityPolicy(audit=Audit(sink=sink, key=signer, spool=folder / "spool"))
    policy.auditor.record(act(1))
    policy.auditor.close(within_s=LONG_S)
    (hour,) = sink.list_names("segments/run-a")
    assert len(sink.list_names(f"segments/run-a/{hour.rstrip('/')}")) == 1


def test_a_policy_has_one_record_and_not_two(folder: Path) -> None:
    audit = Audit(sink="dir:log", key="file:audit.pem")
    with pytest.raises(ConfigError, match="give audit= alone"):
        SecurityPolicy(audit=audit, auditor=audit.auditor())
    assert SecurityPolicy(sign=Sign(key="file:signer.pem"), audit=audit).audit is audit


def test_without_a_spool_of_its_own_events_wait_where_state_belongs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    auditor = Audit(sink="dir:log", key="file:audit.pem").auditor()
    auditor.record(act(1))
    (spool,) = (folder / "state" / "strongroom" / "audit").iterdir()
    assert spool.stat().st_mode & 0o777 == 0o700
    (writer,) = spool.iterdir()
    assert {path.stat().st_mode & 0o777 for path in writer.iterdir()} == {0o600}
    auditor.close(within_s=LONG_S)


def test_without_such_a_place_they_wait_among_temporary_files_and_that_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    auditor = Audit(sink="dir:log", key="file:audit.pem").auditor()
    auditor.record(act(1))
    auditor.close(within_s=LONG_S)
    assert "a restart of this machine empties" in caplog.text
    assert Place(folder / "x").readings() == []
    assert len(list((folder / "log").rglob("*.jsonl"))) == 1


def left_by_a_killed_process(folder: Path) -> None:
    """A process that recorded five events and was killed."""
    program = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1]); from recorders import act; "
        "from strongroom_security import SecurityPolicy; a = SecurityPolicy.load('policy.toml').auditor; "
        "[a.record(act(n)) for n in range(5)]; os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(HERE)], cwd=folder, timeout=60)
    assert done.returncode == -9


def test_flush_sends_what_a_killed_process_left(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "policy.toml").write_text(
        '[audit]\nsink = "dir:sink"\nspool = "spool"\nkey = "file:audit.pem"\nseal_s = 3600\n'
    )
    left_by_a_killed_process(folder)
    assert main(["audit", "flush", "--security", "policy.toml", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["segments"], told["events"], told["left"], told["error"]) == (1, 5, 0, None)
    assert Place(folder).numbers() == [0, 1, 2, 3, 4]
    assert main(["audit", "flush", "--security", "policy.toml"]) == 0


def test_flush_says_what_still_waits_and_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "policy.toml").write_text(
        '[audit]\nsink = "dir:sink"\nspool = "spool"\nkey = "file:audit.pem"\nseal_s = 3600\n'
    )
    left_by_a_killed_process(folder)
    (folder / "sink").write_bytes(b"")
    assert main(["audit", "flush", "--security", "policy.toml"]) == 1
    assert "1 still wait here" in capsys.readouterr().err


def test_flush_says_what_waits_for_another_sink(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '[audit]\nsink = "dir:{}"\nspool = "spool"\nkey = "file:audit.pem"\nseal_s = 3600\n'
    (folder / "policy.toml").write_text(text.format("sink"))
    left_by_a_killed_process(folder)
    (waits,) = (folder / "spool").iterdir()
    (folder / "other.toml").write_text(text.format("other"))
    assert main(["audit", "flush", "--security", "other.toml"]) == 1
    assert f"waiting for another sink, in {waits}: 1 segment" in capsys.readouterr().err
    assert main(["audit", "flush", "--security", "other.toml", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["elsewhere"] == {str(waits): 1}
    assert main(["audit", "flush", "--security", "policy.toml"]) == 0
    assert main(["audit", "flush", "--security", "other.toml"]) == 0


def test_what_a_living_process_writes_for_another_sink_is_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = '[audit]\nsink = "dir:{}"\nspool = "spool"\nkey = "file:audit.pem"\nseal_s = 3600\n'
    (folder / "policy.toml").write_text(text.format("sink"))
    (folder / "other.toml").write_text(text.format("other"))
    auditor = SecurityPolicy.load(folder / "policy.toml").auditor
    auditor.record(act(1))
    assert main(["audit", "flush", "--security", "other.toml"]) == 0
    auditor.close(within_s=LONG_S)


def test_a_folder_that_cannot_be_made_is_not_said_to_have_been_removed(folder: Path) -> None:
    audit = Audit(sink="dir:/proc/strongroom/log", key="file:audit.pem", spool="spool", base=folder)
    with pytest.raises(StoreError, match="it cannot be made, or was removed") as caught:
        audit.open_sink().put_if_absent("segments/a", b"")
    assert "run's root" not in str(caught.value)


def test_events_that_a_logger_hears_by_the_pages_name_are_not_printed_by_commands(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (HERE.parents[1] / "docs" / "how-to" / "audit.md").read_text(encoding="utf-8")
    (name,) = set(re.findall(r'"(logging:[^"]+)"', page))
    command = [sys.executable, "-m", "strongroom_cli", "audit", "verify", "--security", "policy.toml"]
    (folder / "sink").mkdir()
    (folder / "policy.toml").write_text(
        f'[audit]\nsink = "dir:sink"\nspool = "spool"\nkey = "file:audit.pem"\nalso = ["{name}"]\n'
    )
    done = subprocess.run(command, cwd=folder, timeout=60, capture_output=True, text=True)
    assert done.returncode == 3
    assert "class_uid" not in done.stderr


def test_flush_needs_a_policy_that_says_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "policy.toml").write_text('digest = "sha256"\n')
    assert main(["audit", "flush", "--security", "policy.toml"]) == 2
    assert "no policy with a section [audit]" in capsys.readouterr().err
