"""Proving one event: the file, the script that checks it without Strongroom, and the commands around both."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from segment_making import Writer, lines_of

from strongroom import canonical
from strongroom.errors import ConfigError, FormatError, IntegrityError, UntrustedError
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom_cli.main import main
from strongroom_security.auditlog.sequencing.logkeys import generate_log_key, read_log_key
from strongroom_security.auditlog.sequencing.proving import EventId, Proven, Unproven, prove, read_proof
from strongroom_security.auditlog.sequencing.sequencing import Log, sequence_once
from strongroom_security.tlog.notekeys import KeyType, NoteSigner, VerifierKey
from strongroom_security.tlog.notes import Note, NoteSignature
from strongroom_security.tlog.proofs import TlogProof
from strongroom_security.tlog.witnesses import LogKeys

ORIGIN = "example.com/audit"
SIGNER = NoteSigner(ORIGIN, Ed25519PrivateKey.from_private_bytes(b"\x07" * 32))
LOG = Log(origin=ORIGIN, signers=(SIGNER,))
SCRIPT = Path(__file__).parents[2] / "docs" / "how-to" / "check_audit_proof.py"


def sequenced(segments: int = 3, events: int = 5) -> tuple[MemoryStore, list[str], Writer]:
    sink, writer = MemoryStore(), Writer(1)
    keys = writer.put(sink, segments, events)
    sequence_once(sink, LOG)
    return sink, keys, writer


def proven(sink: MemoryStore, event: EventId, log: LogKeys = LOG.keys) -> Proven:
    found = prove(sink, event, log)
    assert isinstance(found, Proven)
    return found


def test_every_line_of_a_log_is_proven_and_its_file_says_which_it_is() -> None:
    sink, keys, writer = sequenced()
    lines = lines_of(sink, keys)
    for seq, line in enumerate(lines):
        found = proven(sink, EventId(writer=writer.name, seq=seq))
        assert (found.line, found.index) == (line, seq)
        value, signed = read_proof(found.proof, LOG.keys, "the proof")
        assert value == json.loads(line)
        assert signed.head.size == len(lines)


def test_an_event_is_found_though_its_segment_or_the_plans_were_removed() -> None:
    sink, keys, writer = sequenced()
    event = EventId(writer=writer.name, seq=9)
    before = proven(sink, event)
    for key in (*keys, "tlog/plans/0.json"):
        sink.delete(key)
    assert proven(sink, event) == before


@pytest.mark.parametrize("wrong", ("nothing", "not a plan", "elsewhere", "beyond the tree"))
def test_a_plan_that_is_wrong_leads_no_proof_astray(wrong: str) -> None:
    sink, _, writer = sequenced()
    event = EventId(writer=writer.name, seq=9)
    before = proven(sink, event)
    plan = json.loads(sink.contents()["tlog/plans/0.json"])
    if wrong == "elsewhere":
        plan["segments"].reverse()
    elif wrong == "beyond the tree":
        plan["segments"][0]["lines"] = 10_000
    planted = {"nothing": b"{}", "not a plan": b"\xff"}.get(wrong, canonical.encode(plan))
    sink.plant({"tlog/plans/0.json": planted, "tlog/plans/3.json": b"{}"})
    assert proven(sink, event) == before


def test_what_is_not_in_the_log_yet_is_unproven_and_what_is_nowhere_too() -> None:
    sink, _, writer = sequenced()
    (key,) = writer.put(sink)
    found = prove(sink, EventId(writer=writer.name, seq=21), LOG.keys)
    assert isinstance(found, Unproven)
    assert found.segment == key
    found = prove(sink, EventId(writer="f" * 32, seq=0), LOG.keys)
    assert isinstance(found, Unproven)
    assert found.segment is None
    empty = MemoryStore()
    Writer(1).put(empty)
    found = prove(empty, EventId(writer=writer.name, seq=0), LOG.keys)
    assert isinstance(found, Unproven)
    assert "ever sequenced" in found.message


@pytest.mark.parametrize("text", ("", "a-1", "0" * 32, "0" * 32 + "-01", "0" * 32 + "--1", "A" * 32 + "-1"))
def test_an_event_is_named_by_writer_and_number(text: str) -> None:
    with pytest.raises(ConfigError, match="WRITER-SEQ"):
        EventId.parse(text)
    assert str(EventId.parse("0" * 32 + "-17")) == "0" * 32 + "-17"


def test_a_log_that_another_key_signed_or_whose_tree_was_changed_proves_nothing() -> None:
    sink, _, writer = sequenced()
    event = EventId(writer=writer.name, seq=3)
    other = NoteSigner(ORIGIN, Ed25519PrivateKey.generate())
    with pytest.raises(UntrustedError):
        prove(sink, event, LogKeys(origin=ORIGIN, keys=(other.key,)))
    bundle = "tlog/tile/entries/000.p/21"
    data = sink.contents()[bundle]
    sink.plant({bundle: data.replace(b"ada", b"eve", 1)})
    with pytest.raises(IntegrityError, match="changed after it was signed"):
        prove(sink, event, LOG.keys)


def test_a_proof_without_the_event_or_with_another_one_is_refused() -> None:
    sink, _, writer = sequenced()
    whole = TlogProof.parse(proven(sink, EventId(writer=writer.name, seq=3)).proof, "the proof")
    bare = TlogProof(index=whole.index, path=whole.path, note=whole.note)
    with pytest.raises(FormatError, match="does not hold the line"):
        read_proof(bare.to_bytes(), LOG.keys, "the proof")
    assert whole.extra is not None
    other = TlogProof(
        index=whole.index, path=whole.path, note=whole.note, extra=whole.extra.replace(b"ada", b"eve")
    )
    with pytest.raises(IntegrityError):
        read_proof(other.to_bytes(), LOG.keys, "the proof")


# ------------------------------------------------------------------------------ the script that knows nothing


def check(file: Path, *keys: str) -> subprocess.CompletedProcess[str]:
    """Run the script as its page says, with nothing of Strongroom in reach."""
    return subprocess.run(
        [sys.executable, "-I", "-c", _ALONE, str(SCRIPT), str(file), *keys],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


_ALONE = """
import runpy, sys
for name in ("strongroom", "strongroom_security"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def cosigned(note: bytes) -> tuple[bytes, str]:
    """A head with one more line, by a witness; and that witness's key."""
    private = Ed25519PrivateKey.from_private_bytes(b"\x09" * 32)
    key = VerifierKey(
        name="witness.example/w1", type=KeyType.COSIGNATURE, public=private.public_key().public_bytes_raw()
    )
    parsed = Note.parse(note, "the head")
    value = (1_700_000_000).to_bytes(8, "big")
    value += private.sign(f"cosignature/v1\ntime 1700000000\n{parsed.text}".encode())
    line = NoteSignature(name=key.name, key_id=key.key_id, value=value)
    return Note(text=parsed.text, signatures=(*parsed.signatures, line)).to_bytes(), str(key)


def altered_lines(text: str) -> list[tuple[str, str]]:
    """The text with each of its lines altered in what it says, left out, and doubled, and what that was."""
    found = []
    lines = text.split("\n")[:-1]
    for number, line in enumerate(lines):
        for at in {0, len(line) // 2, max(len(line) - 5, 0)} if line else ():
            other = "B" if line[at] != "B" else "C"
            changed = line[:at] + other + line[at + 1 :]
            found.append((f"line {number}, character {at}", [*lines[:number], changed, *lines[number + 1 :]]))
        found.append((f"without line {number}", [*lines[:number], *lines[number + 1 :]]))
        found.append((f"line {number} twice", [*lines[:number], line, *lines[number:]]))
    return [(what, "\n".join(each) + "\n") for what, each in found]


@pytest.mark.parametrize("kind", ("ed25519", "ecdsa"))
def test_the_script_accepts_a_proof_and_refuses_each_altered_part(kind: str, tmp_path: Path) -> None:
    signer = SIGNER if kind == "ed25519" else NoteSigner(ORIGIN, ec.generate_private_key(ec.SECP256R1()))
    sink, writer = MemoryStore(), Writer(1)
    writer.put(sink, 3, 5)
    log = Log(origin=ORIGIN, signers=(signer,))
    sequence_once(sink, log)
    found = proven(sink, EventId(writer=writer.name, seq=9), log.keys)
    parsed = TlogProof.parse(found.proof, "the proof")
    note, witness = cosigned(parsed.note)
    whole = TlogProof(index=parsed.index, path=parsed.path, note=note, extra=parsed.extra).to_bytes().decode()
    file = tmp_path / "event.tlog-proof"
    file.write_text(whole)
    done = check(file, str(signer.key), witness)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"entry 9 of 21 of {ORIGIN}:\n{found.line.decode()}\n"

    # The rest in one process, by the same script: a process for each would take a minute.
    cases = altered_lines(whole)
    cases += [("another index", whole.replace("\nindex 9\n", "\nindex 8\n"))]
    cases += [("another size", whole.replace("\n21\n", "\n22\n"))]
    cases += [("an index beyond the tree", whole.replace("\nindex 9\n", "\nindex 21\n"))]
    cases += [("cut", whole[: len(whole) // 2]), ("empty", ""), ("no note", whole.split("\n\n")[0])]
    for index in ("+9", "0_9", "09", "\u0669", " 9", "9 "):
        cases += [(f"the index as {index!r}", whole.replace("\nindex 9\n", f"\nindex {index}\n"))]
    for size in ("+21", "2_1", "021", "\u0662\u0661"):
        cases += [(f"the size as {size!r}", whole.replace("\n21\n", f"\n{size}\n"))]
    cases += [("without its last line feed", whole.removesuffix("\n"))]
    own = NoteSignature(name=ORIGIN, key_id=signer.key.key_id, value=bytes(64)).line()
    cases += [("a second signature by the log's key, and none", whole + own)]
    timeless = parsed.note.decode().rpartition("\n\n")[0] + "\n"
    word = Ed25519PrivateKey.from_private_bytes(b"\x09" * 32).sign(
        f"cosignature/v1\ntime 0\n{timeless}".encode()
    )
    line = NoteSignature(
        name="witness.example/w1", key_id=VerifierKey.parse(witness).key_id, value=bytes(8) + word
    ).line()
    cases += [("a cosignature of no time", whole[: whole.rindex("\u2014")] + line)]
    wrong = str(NoteSigner(ORIGIN, Ed25519PrivateKey.generate()).key)
    keyed = [(what, text, [str(signer.key), witness]) for what, text in cases]
    keyed += [("another log's key", whole, [wrong, witness])]
    keyed += [("another log's name", whole, [str(signer.key).replace("audit", "other"), witness])]
    keyed += [("another witness", whole, [str(signer.key), wrong])]
    # A signature may stand there twice, and an empty extra line at the end is the only other thing that says
    # nothing; both verify as before.
    harmless = {
        f"line {number} twice" for number, line in enumerate(whole.split("\n")) if line.startswith("\u2014")
    }
    (tmp_path / "cases.json").write_text(json.dumps([each for each in keyed if each[0] not in harmless]))
    done = subprocess.run(
        [sys.executable, "-I", "-c", _EACH, str(SCRIPT), str(tmp_path / "cases.json"), str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""
    assert json.loads(done.stdout) == []
    assert len(keyed) > 40


_EACH = """
import contextlib, io, json, runpy, sys
script, cases, file = sys.argv[1:]
accepted = []
for what, text, keys in json.load(open(cases)):
    with open(file, "w", newline="", encoding="utf-8") as out:
        out.write(text)
    sys.argv = [script, file, *keys]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(script, run_name="__main__")
        accepted.append(what)
    except SystemExit as end:
        if not end.code or not isinstance(end.code, str):
            accepted.append(what)
print(json.dumps(accepted))
"""


def test_the_script_has_sixty_lines() -> None:
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) <= 60


# ----------------------------------------------------------------------------------------------- the commands


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STRONGROOM_CONFIG", raising=False)
    return tmp_path


SEQUENCE = (
    "audit",
    "sequence",
    "--sink",
    "dir:audit",
    "--key",
    "file:log.pem",
    "--origin",
    ORIGIN,
    "--state",
    "log.state",
)


def test_from_keygen_to_a_proof_by_the_command(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink, writer = LocalStore(place / "audit"), Writer(1)
    (key,) = writer.put(sink)
    assert main(["audit", "keygen", "--to", "log.pem", "--origin", ORIGIN]) == 0
    vkey = capsys.readouterr().out.strip()
    assert str(VerifierKey.parse(vkey)) == vkey
    assert (place / "log.pem").stat().st_mode & 0o777 == 0o600

    event = f"{writer.name}-1"
    command = ["audit", "prove", event, "--sink", "dir:audit", "--log-key", vkey]
    assert main(command) == 3
    assert main([*SEQUENCE, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["size"], told["segments"], told["lines"], told["refused"]) == (4, 1, 4, [])
    assert main(list(SEQUENCE)) == 0
    assert "0 segments with 0 lines went into the log; its size is 4" in capsys.readouterr().out

    assert main(command) == 0
    assert capsys.readouterr().out == f"{event}.tlog-proof: entry 1 of 4 of {ORIGIN}\n"
    assert main(command) == 2
    assert "name a new file" in capsys.readouterr().err
    assert main([*command, "--to", "-"]) == 0
    proof = capsys.readouterr().out.encode()
    assert proof == (place / f"{event}.tlog-proof").read_bytes()
    log = LogKeys(origin=ORIGIN, keys=(VerifierKey.parse(vkey),))
    assert read_proof(proof, log, "the proof")[0]["metadata"]["uid"] == event

    damaged = sink.read(key, limit_bytes=1 << 20)
    sink.put(key.replace("run-a", "run-b"), damaged)
    assert main(list(SEQUENCE)) == 1
    assert "refused: segments/run-b/" in capsys.readouterr().out
    (place / "audit" / "tlog" / "checkpoint").unlink()
    assert main(list(SEQUENCE)) == 1
    assert "the log was removed" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ("ed25519", "ecdsa-p256"))
def test_a_key_of_each_kind_signs(place: Path, kind: str) -> None:
    key = generate_log_key(place / "log.pem", ORIGIN, kind=kind)
    assert read_log_key("file:log.pem", ORIGIN).key == key
    with pytest.raises(ConfigError, match="exists"):
        generate_log_key(place / "log.pem", ORIGIN)


def _pem(private: object) -> bytes:
    found: bytes = private.private_bytes(  # type: ignore[attr-defined]
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return found


@pytest.mark.parametrize(
    ("make", "why"),
    (
        (lambda: b"", "is empty"),
        (lambda: base64.b64encode(os.urandom(200)), "cannot be used"),
        (lambda: _pem(rsa.generate_private_key(public_exponent=65537, key_size=2048)), "of kind RSA"),
        (lambda: _pem(ec.generate_private_key(ec.SECP384R1())), "P-256"),
    ),
    ids=("empty", "noise", "rsa", "p384"),
)
def test_a_file_that_holds_no_key_of_a_log_is_refused(
    place: Path, make: Callable[[], bytes], why: str
) -> None:
    path = place / "log.pem"
    path.write_bytes(make())
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=why):
        read_log_key("file:log.pem", ORIGIN)


def test_a_key_that_others_can_reach_is_refused_and_so_is_a_name_that_is_none(place: Path) -> None:
    generate_log_key(place / "log.pem", ORIGIN)
    (place / "log.pem").chmod(0o640)
    with pytest.raises(ConfigError, match="others"):
        read_log_key("file:log.pem", ORIGIN)
    for text in ("log.pem", "file:", "file:absent.pem"):
        with pytest.raises(ConfigError):
            read_log_key(text, ORIGIN)
    for origin in ("", "a b", "a+b", "a\nb", "a" * 256):
        with pytest.raises(ConfigError, match="origin"):
            generate_log_key(place / "other.pem", origin)
    assert not (place / "other.pem").exists()


def test_following_takes_in_what_comes_and_ends_cleanly_on_a_signal(place: Path) -> None:
    sink = LocalStore(place / "audit")
    Writer(1).put(sink)
    generate_log_key(place / "log.pem", ORIGIN)
    command = [sys.executable, "-m", "strongroom_cli", *SEQUENCE, "--follow", "--every", "50ms", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["size"] == 4
        Writer(2).put(sink, events=3)
        assert json.loads(process.stdout.readline())["size"] == 9
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
