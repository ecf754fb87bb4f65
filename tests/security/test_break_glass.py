"""The script of docs/how-to: it opens a sealed checkpoint where there is no Strongroom, or refuses."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import FILES, NAME, RUN, Keeper, save
from safetensors.torch import load_file

from strongroom import Checkpointer, layout
from strongroom.auditing import NO_AUDIT
from strongroom.digest import sha256_of
from strongroom.manifest import Commit, Manifest
from strongroom.signing import Guard
from strongroom.stores.local import LocalStore
from strongroom_security.fields import Context
from strongroom_security.keyring import Keyring, RecipientEntry, write_generation
from strongroom_security.recipients.hpke import HpkeSuite, create_key_pair, read_key
from strongroom_security.sealing import EnvelopeSealing

SCRIPT = Path(__file__).parents[2] / "docs" / "how-to" / "break_glass.py"
SUITES: tuple[HpkeSuite, ...] = ("x25519", "p256", "mlkem768-x25519")

# Neither site-packages nor this checkout can be seen: -S leaves the former out, -I the variables and the
# current folder. What may be imported besides the standard library lies in one folder.
CHILD = """
import runpy, sys
folder, script, *sys.argv[1:] = sys.argv[1:]
sys.path.append(folder)
try:
    import strongroom
except ImportError:
    pass
else:
    raise SystemExit("strongroom could be imported")
try:
    runpy.run_path(script, run_name="__main__")
finally:
    foreign = {"strongroom", "strongroom_security", "torch", "blake3"}
    if foreign & {name.partition(".")[0] for name in sys.modules}:
        raise SystemExit("imported what it may not")
"""


@pytest.fixture(scope="module")
def cryptography_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which cryptography and what it stands on can be imported, and nothing else."""
    folder = tmp_path_factory.mktemp("packages")
    for name in ("cryptography", "cffi", "_cffi_backend", "typing_extensions"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            found = Path(spec.origin)
            found = found.parent if found.name == "__init__.py" else found
            (folder / found.name).symlink_to(found)
    return folder


@pytest.fixture
def run_script(cryptography_alone: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(checkpoint: Path, key: Path, output: str = "opened") -> subprocess.CompletedProcess[str]:
        arguments = [str(cryptography_alone), str(SCRIPT), str(checkpoint), str(key), str(tmp_path / output)]
        return subprocess.run(
            [sys.executable, "-I", "-S", "-c", CHILD, *arguments], capture_output=True, text=True, timeout=120
        )

    return run


def make(
    root: Path, key: Path, suite: HpkeSuite = "x25519", **options: object
) -> tuple[LocalStore, Commit, Manifest]:
    """A sealed checkpoint, written by one who has the public half alone."""
    create_key_pair(key, suite)
    store = LocalStore(root)
    sealing = EnvelopeSealing([Keeper(), read_key(key.with_name(f"{key.name}.pub"))], **options)  # type: ignore[arg-type]
    return store, *save(store, sealing)


def read_all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_script_is_short_enough_to_be_read_in_an_emergency() -> None:
    _, _, code = SCRIPT.read_text().split('"""')
    lines = [line for line in code.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) <= 72


@pytest.mark.parametrize("wrap", ("checkpoint", "direct"))
@pytest.mark.parametrize("suite", SUITES)
def test_every_file_is_opened_with_the_private_key_alone(
    run_script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, suite: HpkeSuite, wrap: str
) -> None:
    make(tmp_path / "root", tmp_path / "glass", suite, wrap=wrap)
    done = run_script(tmp_path / "root" / NAME.folder, tmp_path / "glass.key")
    assert (done.returncode, done.stderr) == (0, "")
    assert read_all(tmp_path / "opened") == dict(FILES)


def test_a_checkpoint_of_a_run_is_opened_into_files_that_other_tools_read(
    run_script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    create_key_pair(tmp_path / "glass")
    sealing = EnvelopeSealing([read_key(tmp_path / "glass.pub")])
    policy = SimpleNamespace(
        digest=None,
        sealing=sealing,
        signing=None,
        guard=Guard(sealing=sealing),
        role=None,
        auditor=NO_AUDIT,
    )
    weights = torch.arange(1_000_000, dtype=torch.float32)
    with Checkpointer(tmp_path / "root", security=policy) as checkpointer:
        checkpointer.save(7, {"weights": weights, "epoch": 3}).result(timeout_s=60)
    (folder,) = (tmp_path / "root").glob("step-*")
    done = run_script(folder, tmp_path / "glass.key")
    assert (done.returncode, done.stderr) == (0, "")
    assert torch.equal(load_file(tmp_path / "opened" / "00000-00.safetensors")["weights"], weights)
    assert '"epoch",3' in (tmp_path / "opened" / "state.json").read_text()


@pytest.mark.parametrize(
    "size", (0, 1, 2**20 - 33, 2**20 - 32, 2**20 - 31, 3 * (2**20 - 32), 3 * (2**20 - 32) + 1)
)
def test_files_of_any_length_are_opened(
    run_script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, size: int
) -> None:
    create_key_pair(tmp_path / "glass")
    data = (b"0123456789abcde" * (size // 15 + 1))[:size]
    save(
        LocalStore(tmp_path / "root"),
        EnvelopeSealing([read_key(tmp_path / "glass.pub")]),
        files={"file": data},
    )
    assert run_script(tmp_path / "root" / NAME.folder, tmp_path / "glass.key").returncode == 0
    assert (tmp_path / "opened" / "file").read_bytes() == data


def test_the_newest_generation_that_opens_is_used(
    run_script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The break-glass key was added later, and what came after it is for somebody else, or rubbish."""
    store = LocalStore(tmp_path / "root")
    keeper = Keeper()
    save(store, EnvelopeSealing([keeper]))
    create_key_pair(tmp_path / "glass")
    first = Keyring.decode(store.read(layout.keyring_key(NAME, 1), limit_bytes=2**20), "it")
    secret = keeper.unwrap(first.recipients[0].wrapped or b"", Context.of(RUN, NAME), within_s=1.0)

    def entry(recipient: object) -> RecipientEntry:
        wrapped = recipient.wrap(secret, Context.of(RUN, NAME), within_s=1.0)  # type: ignore[attr-defined]
        return RecipientEntry(id=recipient.id, kind=recipient.kind, wrapped=wrapped)  # type: ignore[attr-defined]

    second = first.followed_by(
        created_at_ms=1, recipients=[entry(keeper), entry(read_key(tmp_path / "glass.pub"))]
    )
    write_generation(store, second)
    write_generation(store, second.followed_by(created_at_ms=2, recipients=[entry(keeper)]))
    store.put(layout.keyring_key(NAME, 4), b"rubbish")
    done = run_script(tmp_path / "root" / NAME.folder, tmp_path / "glass.key")
    assert (done.returncode, done.stderr) == (0, "")
    assert read_all(tmp_path / "opened") == dict(FILES)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


SHARD = f"data/00000-00.safetensors{layout.SEALED}"

DAMAGE: dict[str, Callable[[Path], object]] = {
    "a segment": lambda folder: flip(folder / SHARD, 74 + 1000),
    "a tag": lambda folder: flip(folder / SHARD, -1),
    "a nonce": lambda folder: flip(folder / SHARD, 74 + 4),
    "the header in the file": lambda folder: flip(folder / SHARD, 20),
    "a cut": lambda folder: (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-1]),
    "a segment less": lambda folder: (folder / SHARD).write_bytes(
        (folder / SHARD).read_bytes()[: 74 + 2**20]
    ),
    "a byte more": lambda folder: (folder / SHARD).write_bytes((folder / SHARD).read_bytes() + b"\0"),
    "files exchanged": lambda folder: exchange(
        folder / "data/state.json.floe", folder / "data/index.safetensors.floe"
    ),
    "the manifest": lambda folder: flip(folder / "data/MANIFEST.json", 400),
    "the keyring": lambda folder: flip(folder / "keyring/0001.json", 400),
    "no keyring": lambda folder: (folder / "keyring/0001.json").unlink(),
    "a file gone": lambda folder: (folder / SHARD).unlink(),
    "a pipe for a file": lambda folder: ((folder / SHARD).unlink(), os.mkfifo(folder / SHARD)),
    "no commit": lambda folder: (folder / "COMMIT").unlink(),
    "no keyring folder": lambda folder: shutil.rmtree(folder / "keyring"),
}


def exchange(one: Path, two: Path) -> None:
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


@pytest.mark.parametrize("what", list(DAMAGE))
def test_what_was_changed_is_refused_and_nothing_of_that_file_is_left(
    run_script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, what: str
) -> None:
    make(tmp_path / "root", tmp_path / "glass")
    DAMAGE[what](tmp_path / "root" / NAME.folder)
    done = run_script(tmp_path / "root" / NAME.folder, tmp_path / "glass.key")
    assert done.returncode != 0
    assert done.stderr.startswith("refused: ")
    assert "Traceback" not in done.stderr
    assert ": (" not in done.stderr.replace("  ", " ")  # a reason stands before the error's kind
    left = read_all(tmp_path / "opened") if (tmp_path / "opened").exists() else {}
    assert all(FILES[name] == data for name, data in left.items())
    assert len(left) < len(FILES)


def changed(folder: Path, **members: object) -> bytes:
    return json.dumps({**json.loads((folder / "keyring/0001.json").read_bytes()), **members}).encode()


def with_strangers(folder: Path) -> bytes:
    recipients = json.loads((folder / "keyring/0001.json").read_bytes())["recipients"]
    return changed(folder, recipients=[{"wrapped": ""}, {"wrapped": 1}, {}, None, *recipients])


BAD_KEYRINGS: dict[str, Callable[[Path], bytes | None]] = {
    "a list": lambda _: b"[]",
    "null": lambda _: b"null",
    "empty": lambda _: b"",
    "deep": lambda _: b"[" * 100_000,
    "not text": lambda _: b"\xff\xfe",
    "no recipients": lambda folder: changed(folder, recipients=None),
    "recipients that are none": lambda folder: changed(folder, recipients=[{"wrapped": 1}, 2]),
    "strangers before": with_strangers,
    "a short key": lambda folder: changed(folder, keys=[{"path": "state.json.floe", "wrapped": "AAAA"}]),
    "no keys": lambda folder: changed(folder, keys=[]),
    "direct in name": lambda folder: changed(folder, wrap="direct"),
    "a folder": lambda folder: (folder / "keyring/0002.json").mkdir(),
    "a pipe": lambda folder: os.mkfifo(folder / "keyring/0002.json"),
    "a link to nowhere": lambda folder: (folder / "keyring/0002.json").symlink_to("nowhere"),
}


@pytest.mark.parametrize("what", list(BAD_KEYRINGS))
def test_no_newer_keyring_stops_what_an_older_one_opens(
    run_script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, what: str
) -> None:
    """Whoever can write to the storage can put one there; it must not lock out who comes with the key."""
    make(tmp_path / "root", tmp_path / "glass")
    folder = tmp_path / "root" / NAME.folder
    data = BAD_KEYRINGS[what](folder)
    if data is not None:
        (folder / "keyring/0002.json").write_bytes(data)
    done = run_script(folder, tmp_path / "glass.key")
    assert (done.returncode, done.stderr) == (0, "")
    assert read_all(tmp_path / "opened") == dict(FILES)


def test_where_none_opens_the_reason_of_each_is_said(
    run_script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    make(tmp_path / "root", tmp_path / "glass")
    create_key_pair(tmp_path / "other")
    folder = tmp_path / "root" / NAME.folder
    os.mkfifo(folder / "keyring/0002.json")
    done = run_script(folder, tmp_path / "other.key")
    assert done.returncode == 1
    assert "0002.json: keyring/0002.json is not there, or is no file" in done.stderr
    assert "0001.json: 0001.json has nothing for this private key" in done.stderr


def test_another_key_and_another_checkpoint_s_keys_are_refused(
    run_script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    store, _, _ = make(tmp_path / "root", tmp_path / "glass")
    create_key_pair(tmp_path / "other")
    done = run_script(tmp_path / "root" / NAME.folder, tmp_path / "other.key")
    assert done.returncode != 0
    assert "no keyring here holds" in done.stderr
    # A second generation that was taken from another checkpoint, and the first one gone.
    other = replace(NAME, step=7)
    save(store, EnvelopeSealing([read_key(tmp_path / "glass.pub")]), name=other)
    foreign = store.read(layout.keyring_key(other, 1), limit_bytes=2**20)
    store.delete(layout.keyring_key(NAME, 1))
    store.put(layout.keyring_key(NAME, 2), foreign)
    done = run_script(tmp_path / "root" / NAME.folder, tmp_path / "glass.key")
    assert done.returncode != 0
    assert "no keyring here holds" in done.stderr


def test_a_forged_file_and_keyring_are_refused_by_the_pinned_header(
    run_script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The forger has the public key and the store; the manifest and its commit are as they were."""
    store, _, _ = make(tmp_path / "root", tmp_path / "glass")
    forged = LocalStore(tmp_path / "forged")
    save(forged, EnvelopeSealing([read_key(tmp_path / "glass.pub")]), files={**FILES, "state.json": b"[]"})
    first = store.read(layout.keyring_key(NAME, 1), limit_bytes=2**20)
    for path in FILES:
        key = layout.data_key(NAME, path + layout.SEALED)
        store.delete(key)
        store.put(key, forged.read(key, limit_bytes=2**26))
    fake = Keyring.decode(forged.read(layout.keyring_key(NAME, 1), limit_bytes=2**20), "it")
    write_generation(store, replace(fake, generation=2, previous=sha256_of(first)))
    done = run_script(tmp_path / "root" / NAME.folder, tmp_path / "glass.key")
    assert done.returncode != 0
    assert "its header or length is not what MANIFEST.json says" in done.stderr
    assert not any((tmp_path / "opened").iterdir())


def test_nothing_is_written_over(
    run_script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    make(tmp_path / "root", tmp_path / "glass")
    (tmp_path / "opened").mkdir()
    done = run_script(tmp_path / "root" / NAME.folder, tmp_path / "glass.key")
    assert done.returncode != 0
    assert "FileExistsError" in done.stderr
