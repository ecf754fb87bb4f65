"""How the command behaves towards terminals, pipes, signals and hostile text."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Strongroom = Callable[..., Any]

STEERS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""All that steers a terminal, but the end of a line."""

COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]")

NO_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise AssertionError("torch was imported")

sys.meta_path.insert(0, NoTorch())
from strongroom_cli.main import main
sys.exit(main(sys.argv[1:]))
"""

AS_NOBODY = """
import contextlib, io, os, sys
from strongroom_cli.main import main
# Everything is imported before that other user may be unable to read this Python.
for command in ("ls", "show", "verify"):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main([command, sys.argv[2]])
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
sys.exit(main(sys.argv[1:]))
"""


def in_terminal(*arguments: Any, columns: int = 100, **environment: str) -> tuple[int, str]:
    """Run the command on a terminal of its own; its status and all that it wrote there."""
    ours, theirs = pty.openpty()
    plain = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    child = subprocess.Popen(
        [sys.executable, "-m", "strongroom_cli", *map(str, arguments)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**plain, "TERM": "xterm-256color", "COLUMNS": str(columns), **environment},
    )
    os.close(theirs)
    written = bytearray()
    # Linux reports the other end's close as an I/O error.
    with contextlib.suppress(OSError):
        while piece := os.read(ours, 65536):
            written += piece
    os.close(ours)
    return child.wait(), written.decode()


# ------------------------------------------------------------------------------------ no torch here


@pytest.mark.parametrize(
    "arguments", (("ls",), ("show", "300"), ("show", "300", "--json"), ("verify", "--all"))
)
def test_the_command_never_imports_torch(root: Path, arguments: tuple[str, ...]) -> None:
    command, *options = arguments
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, command, str(root), *options], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


# --------------------------------------------------------------------------------- as a program


@pytest.mark.parametrize("file", ("COMMIT", "data/MANIFEST.json", "data/00000-00.safetensors"))
def test_one_changed_byte_makes_the_program_exit_1_and_name_the_file(
    program: Strongroom, root: Path, newest: Path, file: str
) -> None:
    content = bytearray((newest / file).read_bytes())
    content[len(content) // 2] ^= 4
    (newest / file).write_bytes(content)
    done = program("verify", root)
    assert (done.status, done.err) == (1, "")
    assert done.out.startswith(f"{newest.name}/{file}: damaged: ")


def test_a_file_that_may_not_be_read_makes_the_program_exit_4(root: Path, newest: Path) -> None:
    """By real permissions: as another user, where this one is root and may read everything."""
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    for folder in root.parents:
        if folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)

    def strongroom(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", AS_NOBODY, command, str(root)], capture_output=True, text=True
        )

    assert strongroom("verify").returncode == 0
    (newest / "data/state.json").chmod(0)
    done = strongroom("verify")
    assert (done.returncode, done.stderr) == (4, "")
    assert done.stdout.startswith(f"{newest.name}/data/state.json: unreadable: ")
    done = strongroom("show")
    assert (done.returncode, done.stdout) == (4, "")
    root.chmod(0)
    done = strongroom("ls")
    root.chmod(0o755)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith("strongroom: cannot ")


def test_a_reader_that_has_left_is_no_error_message(root: Path) -> None:
    for arguments in (("ls",), ("show", "300"), ("show", "300", "--json"), ("verify", "--all", "--json")):
        command, *options = arguments
        child = subprocess.Popen(
            [sys.executable, "-m", "strongroom_cli", command, str(root), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
        child.stderr.close()
        assert child.wait() == 141


def test_an_output_that_cannot_be_written_is_told(root: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "strongroom_cli", "ls", str(root)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 74
    assert done.stderr == "strongroom: the output could not be written: No space left on device\n"


def test_an_interrupt_is_one_line_and_status_130(root: Path) -> None:
    program = (
        "import os, signal, sys, time, strongroom_cli.verify as command\n"
        "def verify(*args, **options):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "command.verify = verify\n"
        "from strongroom_cli.main import main\n"
        "sys.exit(main(['verify', sys.argv[1]]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(root)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "strongroom: interrupted\n")


@pytest.mark.parametrize("debug", (False, True))
def test_a_bug_is_told_as_one_and_not_as_a_verdict(
    strongroom: Strongroom, root: Path, monkeypatch: pytest.MonkeyPatch, debug: bool
) -> None:
    from strongroom_cli import verify as command

    def broken(*args: Any, **options: Any) -> Any:
        raise ValueError("some\x1b[31m bug")

    monkeypatch.setattr(command, "verify", broken)
    monkeypatch.setenv("STRONGROOM_DEBUG", "1" if debug else "0")
    done = strongroom("verify", root)
    assert (done.status, done.out) == (70, "")
    assert "strongroom: unexpected ValueError: some\\x1b[31m bug. This is a bug in Strongroom" in done.err
    assert ("Traceback" in done.err) == debug
    if not debug:
        assert done.err.count("\n") == 1


def test_an_expected_error_has_a_traceback_only_when_asked_for(
    strongroom: Strongroom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert strongroom("ls", tmp_path).err.count("\n") == 1
    monkeypatch.setenv("STRONGROOM_DEBUG", "1")
    done = strongroom("ls", tmp_path)
    assert done.status == 3
    assert "Traceback" in done.err


# ------------------------------------------------------------------------------------ hostile text


@pytest.mark.parametrize("arguments", (("ls",), ("show", "300"), ("verify", "--all"), ("verify", "250")))
def test_nothing_that_a_checkpoint_holds_steers_a_terminal(
    strongroom: Strongroom, root: Path, newest: Path, arguments: tuple[str, ...]
) -> None:
    for name in ("a\x1b[2J[red]x", "b\n\r\x9b31m", "c\u202e\u2066", os.fsdecode(b"d\xff\x1b]0;t\x07")):
        (newest / name).write_bytes(b"x")
        (root / "launches" / name).write_bytes(b"x")
    command, *options = arguments
    done = strongroom(command, root, *options)
    assert STEERS.search(done.out + done.err) is None
    if command == "verify":
        assert "a\\x1b[2J[red]x" in done.out
        assert "b\\n\\r\\x9b31m" in done.out
    if command == "show":
        assert "evil\\x1b[31m\\x07[red]bold[/red]\\r\\n\\u202e\\u2066:smiley:" in done.out
    assert strongroom(command, root, *options, "--json").json


def test_hostile_text_in_a_damaged_record_does_not_reach_the_terminal(
    strongroom: Strongroom, root: Path, newest: Path
) -> None:
    text = b'{"format":"0.1\x1b[31m","kind":"\\u001b[2J","x":1}'
    for path in (newest / "COMMIT", root / "run.json", root / "launches/000001.json"):
        path.write_bytes(text)
        for command in ("ls", "show", "verify"):
            done = strongroom(command, root)
            assert STEERS.search(done.out + done.err) is None


def test_a_locale_that_cannot_spell_a_name_is_no_crash(program: Strongroom, tmp_path: Path) -> None:
    from strongroom import Checkpointer

    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"Größe": 1, "名": 2}, tags=["é"])
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    for command in ("ls", "show", "verify"):
        done = program(command, tmp_path / "run", env=ascii_only)
        assert (done.status, done.err) == (0, "")
        assert done.out.isascii()


# --------------------------------------------------------------------------- terminals and pipes


def test_a_terminal_has_colours_and_a_pipe_has_none(program: Strongroom, root: Path) -> None:
    status, written = in_terminal("ls", root)
    assert status == 0
    assert COLOUR.search(written)
    assert "\x1b" not in program("ls", root).out


def test_no_color_is_honoured(root: Path) -> None:
    for command in ("ls", "show", "verify"):
        status, written = in_terminal(command, root, NO_COLOR="1")
        assert status == 0
        assert COLOUR.search(written) is None


def test_no_columns_at_all_are_not_taken_at_their_word(root: Path) -> None:
    command = [sys.executable, "-m", "strongroom_cli", "ls", str(root)]
    environment = {**os.environ, "COLUMNS": "0"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    assert "newest" in result.stdout


@pytest.mark.parametrize(
    ("root_name", "closed", "status"),
    (("a", ">&-", 0), ("a", ">&- 2>&-", 0), ("absent", "2>&-", 3), ("absent", ">&- 2>&-", 3)),
)
def test_output_that_was_closed_beforehand_changes_no_status(
    root_name: str, closed: str, status: int, root: Path
) -> None:
    """A scheduler may start the command so; status 1 would be taken for damage."""
    place = root if root_name == "a" else root.parent / "absent"
    command = ["sh", "-c", f'"$0" -m strongroom_cli verify "$1" {closed}', sys.executable, str(place)]
    assert subprocess.run(command, check=False, timeout=60).returncode == status


def test_a_pipe_gets_every_column_in_full(program: Strongroom, root: Path, newest: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    done = program("ls", root, env=environment)
    assert newest.name in done.out
    rows = [line for line in done.out.splitlines() if "step-" in line]
    assert len(rows) == 4


@pytest.mark.parametrize("columns", (30, 45, 71, 72, 80, 111, 112, 200))
def test_a_listing_fits_the_terminal(
    strongroom: Strongroom, root: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = strongroom("ls", root)
    assert done.status == 0
    assert max(len(line.rstrip()) for line in done.out.splitlines()) <= columns
    if columns >= 45:
        assert "superseded" in done.out
    assert strongroom("show", root, 300).status == 0


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_long_work_shows_a_bar_on_a_terminal_and_only_there(
    strongroom: Strongroom, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strongroom_cli import console

    monkeypatch.setenv("TERM", "xterm")
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert strongroom("verify", root).status == 0
    assert terminal.getvalue() == ""  # it was over at once
    monkeypatch.setattr(console, "_PATIENCE_S", 0.0)
    assert strongroom("verify", root).status == 0
    assert "verifying" in terminal.getvalue()
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    assert strongroom("verify", root).status == 0
    assert pipe.getvalue() == ""
