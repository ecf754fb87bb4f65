"""The policy: what a file may say, that what is wrong is told with its line, and nothing is overlooked."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sealed_roots import CountedKey, keyrings_of

from strongroom import Checkpointer
from strongroom.config import Policy
from strongroom.errors import ConfigError, UnsealedError
from strongroom.layout import CheckpointName
from strongroom_security import Seal, SecurityPolicy
from strongroom_security.fields import Context
from strongroom_security.keyring import WrapMode
from strongroom_security.policy import _tell_of_no_seal, _warn_of_forgers
from strongroom_security.recipients.file import create_key_file
from strongroom_security.recipients.hpke import create_key_pair
from strongroom_security.secret import Secret
from strongroom_security.tomllines import line_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load(folder: Path, text: str | bytes) -> SecurityPolicy:
    path = folder / "strongroom.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return SecurityPolicy.load(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a policy finds two key files and a pair."""
    create_key_file(tmp_path / "kek.key")
    create_key_file(tmp_path / "old.key")
    create_key_pair(tmp_path / "glass", "p256")
    return tmp_path


@pytest.fixture(autouse=True)
def _each_test_is_warned() -> None:
    _warn_of_forgers.cache_clear()
    _tell_of_no_seal.cache_clear()


# ------------------------------------------------------------------------------------------------ the digest


def test_a_policy_sets_the_digest(tmp_path: Path) -> None:
    assert load(tmp_path, 'digest = "sha256"').digest == "sha256"


@pytest.mark.parametrize("text", ("", "\n", "# [seal]\n# recipients = []\n"))
def test_a_policy_that_says_nothing_is_refused(text: str, tmp_path: Path) -> None:
    """So reads a file that was cut short, or commented out for a moment."""
    with pytest.raises(ConfigError, match="it says nothing"):
        load(tmp_path, text)


def test_a_policy_that_seals_nothing_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        load(tmp_path, 'digest = "sha256"')
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "has no [seal]: checkpoints are stored unsealed" in record.getMessage()


def test_a_policy_that_anyone_may_write_is_refused(folder: Path) -> None:
    load(folder, '[seal]\nrecipients = ["file:kek.key"]')
    for mode in (0o666, 0o602):
        (folder / "strongroom.toml").chmod(mode)
        with pytest.raises(ConfigError, match="anyone may write the policy"):
            SecurityPolicy.load(folder / "strongroom.toml")
    (folder / "strongroom.toml").chmod(0o664)
    assert SecurityPolicy.load(folder / "strongroom.toml").seal is not None


def test_a_seal_that_is_not_built_yet_can_be_shown() -> None:
    assert repr(Seal.__new__(Seal)) == "Seal(recipients=[], identities=[], wrap=None)"


def test_a_policy_is_what_the_core_asks_for(folder: Path) -> None:
    for policy in (SecurityPolicy(digest="sha256"), load(folder, '[seal]\nrecipients = ["file:kek.key"]')):
        assert isinstance(policy, Policy)
        with pytest.raises(dataclasses.FrozenInstanceError):
            policy.digest = "sha256"  # type: ignore[misc]


def test_a_digest_that_there_is_not_is_refused_in_code_too() -> None:
    with pytest.raises(ConfigError, match="blake3, sha256"):
        SecurityPolicy(digest="md5")  # type: ignore[arg-type]


@pytest.mark.parametrize("section", ("attest", "quorum"))
def test_protection_that_this_release_does_not_know_is_refused_and_never_ignored(
    section: str, folder: Path
) -> None:
    sealed = '[seal]\nrecipients = ["file:kek.key"]\n\n'
    with pytest.raises(ConfigError, match=rf"line 4: the unknown member '{section}'"):
        load(folder, f"{sealed}[{section}]\nkey = 1\n")


@pytest.mark.parametrize(
    ("text", "told"),
    (
        ("digest = 'md5'", "line 1: digest must be one of blake3, sha256"),
        ("\ndigest = 7", "line 2: digest must be text"),
        ("digets = 'sha256'", "line 1: the unknown member 'digets'"),
        ("#\n[other]\na = 1", "line 2: the unknown member 'other'"),
        ("digest = ", "is not TOML"),
        ("[seal]\nrecipients = [", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        (b"#" * (1 << 20) + b"##", "at most"),
    ),
    ids=lambda value: str(value)[:20],
)
def test_a_policy_that_is_wrong_says_where_and_why(text: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        load(tmp_path, text)
    assert "strongroom.toml" in str(caught.value)


def test_a_policy_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.toml", tmp_path, tmp_path / "x\0y"):
        with pytest.raises(ConfigError, match="cannot be read"):
            SecurityPolicy.load(path)


# ------------------------------------------------------------------------------------------------ the seal


def test_a_policy_names_who_can_open_with_paths_relative_to_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    policy = load(
        folder,
        """
        [seal]
        recipients = ["file:kek.key", "hpke:glass.pub"]
        identities = ["file:old.key"]
        wrap = "direct"
        unsealed = ["step-000000000001-0007-*"]
        timeout_s = 2.5
        """,
    )
    assert policy.sealing is not None
    assert policy.seal is not None
    assert [recipient.uri for recipient in policy.seal.recipients] == ["file:kek.key", "hpke:glass.pub"]
    assert [identity.uri for identity in policy.seal.openers] == ["file:kek.key", "file:old.key"]
    assert (policy.seal.wrap, policy.seal.timeout_s, policy.seal.no_core_dumps) == ("direct", 2.5, False)
    assert policy.sealing.accepts_unsealed(CheckpointName(launch=7, step=1, attempt="0" * 16))
    for launch, step in ((7, 11), (8, 1), (70_007, 1)):
        assert not policy.sealing.accepts_unsealed(CheckpointName(launch=launch, step=step, attempt="0" * 16))


def test_what_a_policy_leaves_out_has_a_default(folder: Path) -> None:
    seal = load(folder, 'seal.recipients = ["file:kek.key"]').seal
    assert seal is not None
    assert (seal.identities, seal.wrap, seal.unsealed, seal.timeout_s) == ((), "checkpoint", (), 30.0)


WRONG = {
    'recipients = ["file:kek.key"]\nwrp = "direct"': (2, "the unknown member 'wrp' in [seal]"),
    'wrap = "checkpoint"': (0, "names no recipients"),
    "recipients = []": (1, "at least one is needed"),
    'recipients = "file:kek.key"': (1, "expected a list of texts"),
    "recipients = [7]": (1, "expected texts or recipients, got 7"),
    'recipients = [\n"file:kek.key",\n\n"file:none.key"]': (4, "none.key is not there"),
    'recipients = ["file:kek.key", "file:./kek.key"]': (1, "are one key"),
    'recipients = ["kek.key"]': (1, "names no recipient or identity"),
    'recipients = ["s3:kek.key"]': (1, "names no recipient or identity"),
    'recipients = ["file:glass.pub"]': (1, "has mode 0644"),
    'recipients = ["file:kek.key"]\nidentities = ["hpke:glass.pub"]': (2, "can seal and never open"),
    'recipients = ["file:kek.key"]\nidentities = {a = 1}': (2, "expected a list of texts"),
    'recipients = ["file:kek.key"]\nwrap = "twice"': (2, "expected 'checkpoint' or 'direct', got 'twice'"),
    'recipients = ["file:kek.key"]\nwrap = ["direct"]': (2, "expected 'checkpoint' or 'direct'"),
    'recipients = ["file:kek.key"]\ntimeout_s = 0': (2, "must be a positive number of seconds"),
    'recipients = ["file:kek.key"]\ntimeout_s = 3601': (2, "of at most 3600"),
    'recipients = ["file:kek.key"]\ntimeout_s = true': (2, "must be a positive number of seconds"),
    'recipients = ["file:kek.key"]\ntimeout_s = inf': (2, "must be a positive number of seconds"),
    'recipients = ["file:kek.key"]\nno_core_dumps = 1': (2, "expected true or false, got 1"),
    'recipients = ["file:kek.key"]\nunsealed = ["*"]': (2, "is no checkpoint's folder"),
    'recipients = ["file:kek.key"]\nunsealed = [\n"step-*-0001-*",\n"step-0*"]': (4, "not say which launch"),
    'recipients = ["file:kek.key"]\nunsealed = ["step-????????????-*-*"]': (2, "not say which launch"),
    'recipients = ["file:kek.key"]\nunsealed = ["step-000000000001-*"]': (2, "not say which launch"),
    'recipients = ["file:kek.key"]\nunsealed = ["step-*-0001*"]': (2, "not say which launch"),
    'recipients = ["file:kek.key"]\nunsealed = ["step-*-000?-*"]': (2, "not say which launch"),
    'recipients = ["file:kek.key"]\nunsealed = ["step-*-000[1]-*"]': (2, "not say which launch"),
    'recipients = ["file:kek.key"]\nunsealed = ["step-*[-0001-*"]': (2, "not say which launch"),
    'recipients = ["file:kek.key"]\nunsealed = ["step-[-0001-]*-*-*"]': (2, "not say which launch"),
    'recipients = ["file:kek.key"]\nunsealed = ["step-000000000001/data"]': (2, "no checkpoint's folder"),
    'recipients = ["file:kek.key"]\nunsealed = [1]': (2, "expected folders' names"),
    'recipients = ["file:kek.key"]\nunsealed = "step-1"': (2, "expected a list of texts"),
}


@pytest.mark.parametrize("body", WRONG)
def test_what_is_wrong_in_a_seal_is_told_with_its_line(body: str, folder: Path) -> None:
    line, told = WRONG[body]
    with pytest.raises(ConfigError) as caught:
        load(folder, f'digest = "sha256"\n\n[seal]\n{body}\n')
    assert f"strongroom.toml, line {3 + line}: " in str(caught.value)
    assert told in str(caught.value)


def test_a_seal_that_is_no_section_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 1: \[seal\] must be a section"):
        load(folder, "seal = true")


def test_the_same_is_refused_in_code(folder: Path) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        Seal(recipients=[])
    with pytest.raises(ConfigError, match="is not there"):
        Seal(recipients=["file:none.key"], base=folder)
    with pytest.raises(ConfigError, match="expected texts or recipients"):
        Seal(recipients=[object()])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="expected texts or identities"):
        Seal(recipients=["file:kek.key"], identities=[object()], base=folder)  # type: ignore[list-item]
    seal = Seal(recipients=["file:kek.key"], base=folder)
    with pytest.raises(ConfigError, match="both were given"):
        SecurityPolicy(seal=seal, sealing=seal.sealing())


def test_recipients_may_be_objects_of_the_callers_own(folder: Path) -> None:
    mine = CountedKey("a")
    seal = Seal(recipients=[mine, "file:kek.key"], identities=[CountedKey("b")], base=folder)
    assert seal.recipients[0] is mine
    assert [identity.uri for identity in seal.openers] == ["counted:a", "file:kek.key", "counted:b"]
    assert SecurityPolicy(seal=seal).sealing is not None


@pytest.mark.parametrize("wrap", ("checkpoint", "direct"))
def test_what_a_seal_says_of_wraps_and_time_holds_for_saves_and_restores(
    wrap: WrapMode, tmp_path: Path
) -> None:
    granted: list[float] = []

    class Timed(CountedKey):
        def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
            granted.append(within_s)
            return super().wrap(key, context, within_s=within_s)

        def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
            granted.append(within_s)
            return super().unwrap(wrapped, context, within_s=within_s)

    policy = SecurityPolicy(seal=Seal(recipients=[Timed("a")], wrap=wrap, timeout_s=2.5))
    with Checkpointer(tmp_path / "run", security=policy) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).result(timeout_s=60)
        (keyring,) = keyrings_of(tmp_path / "run").values()
        assert keyring.wrap == wrap
        if wrap == "checkpoint":
            assert granted == [2.5]
        granted.clear()
        assert checkpointer.restore({"w": torch.zeros(3)}) is not None
    assert granted
    assert max(granted) <= 2.5


def test_a_seal_shows_no_key(folder: Path) -> None:
    policy = load(folder, '[seal]\nrecipients = ["file:kek.key"]')
    key = (folder / "kek.key").read_text().split("\n")[1]
    assert "file:kek.key" in repr(policy)
    assert key not in repr(policy)


def test_a_missing_key_is_told_before_training_starts(folder: Path, tmp_path: Path) -> None:
    (folder / "strongroom.toml").write_text('[seal]\nrecipients = ["file:gone.key"]')
    with pytest.raises(ConfigError, match=r"line 2.*gone\.key is not there"):
        Checkpointer(tmp_path / "run", security=folder / "strongroom.toml")
    assert not (tmp_path / "run").exists()


def test_a_policy_seals_and_restores_and_refuses_what_is_not_sealed(folder: Path, tmp_path: Path) -> None:
    state = {"w": torch.arange(5.0)}
    with Checkpointer(tmp_path / "run") as plain:
        plain.save(1, state).result(timeout_s=60)
    sealed = '[seal]\nrecipients = ["file:kek.key"]\n'
    load(folder, sealed)
    with Checkpointer(tmp_path / "run", security=folder / "strongroom.toml") as checkpointer:
        with pytest.raises(UnsealedError, match="unsealed = "):
            checkpointer.restore({"w": torch.zeros(5)}, step=1)
        checkpointer.save(2, state).result(timeout_s=60)
        restored = checkpointer.restore({"w": torch.zeros(5)})
        assert restored is not None
        assert (restored.step, restored.state["w"].tolist()) == (2, [0.0, 1.0, 2.0, 3.0, 4.0])
    load(folder, f'{sealed}unsealed = ["step-00000000000[1-3]-0001-*"]\n')
    with Checkpointer(tmp_path / "run", security=folder / "strongroom.toml") as checkpointer:
        assert checkpointer.restore({"w": torch.zeros(5)}, step=1) is not None


# -------------------------------------------------------------------------------------------- forged for


@pytest.mark.parametrize(
    ("body", "is_told"),
    (
        ('recipients = ["file:kek.key"]', False),
        ('recipients = ["file:kek.key", "hpke:glass.pub"]', True),
        ('recipients = ["file:kek.key"]\nidentities = ["hpke:glass.key"]', True),
    ),
)
def test_public_keys_without_signatures_are_a_loud_warning_once(
    body: str, is_told: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        load(folder, f"[seal]\n{body}")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * is_told
    if is_told:
        assert "hpke:glass." in caplog.text
        assert "verifies no signatures" in caplog.text


# ------------------------------------------------------------------------------------------ what is loaded

IMPORTS = """
import sys
from strongroom_security import SecurityPolicy
policy = SecurityPolicy.load(sys.argv[1])
heavy = {"boto3", "botocore", "cryptography", "pkcs11", "torch"}
print(sorted({name.partition(".")[0] for name in sys.modules} & heavy))
"""


@pytest.mark.parametrize(
    ("text", "found"),
    (
        ('digest = "sha256"', "[]"),
        ('[seal]\nrecipients = ["file:kek.key", "hpke:glass.pub"]', "['cryptography']"),
        (
            '[seal]\nrecipients = ["aws-kms:arn:aws:kms:eu-west-1:123456789012:key/abc"]',
            "['cryptography']",
        ),
    ),
)
def test_a_policy_loads_nothing_that_it_does_not_need(text: str, found: str, folder: Path) -> None:
    (folder / "strongroom.toml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, str(folder / "strongroom.toml")], capture_output=True, text=True
    )
    assert done.stdout.strip() == found, done.stderr


CORE_DUMPS = """
import ctypes, os, resource, sys
from strongroom.errors import ConfigError
from strongroom_security import Seal
resource.setrlimit(resource.RLIMIT_CORE, (100, resource.getrlimit(resource.RLIMIT_CORE)[1]))
prctl = ctypes.CDLL(None).prctl
def state():
    dumpable = prctl(3, 0, 0, 0, 0) if sys.platform.startswith("linux") else 0
    return resource.getrlimit(resource.RLIMIT_CORE), dumpable
before = state()
Seal(recipients=["file:kek.key"], base=sys.argv[1])
assert state() == before
try:
    Seal(recipients=["file:none.key"], base=sys.argv[1], no_core_dumps=True)
except ConfigError:
    print("refused")
print(state())
child = os.fork()
if child == 0:
    os._exit(state() != ((0, 0), 0))
print(os.waitpid(child, 0)[1])
"""


def test_core_dumps_can_be_turned_off_before_any_key_is_read(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CORE_DUMPS, str(folder)], capture_output=True, text=True)
    assert done.stdout.split("\n")[:3] == ["refused", "((0, 0), 0)", "0"], done.stderr


# ------------------------------------------------------------------------------------------------- lines


@pytest.mark.parametrize(
    ("text", "at", "element", "line"),
    (
        ("a = 1\n\n[seal]\n# b\nb = 2\n", ("seal", "b"), None, 5),
        ("a = 1\n\n[ seal ] # here\nb = 2\n", ("seal",), None, 3),
        ("seal.b = 1\n", ("seal", "b"), None, 1),
        ("seal.b = 1\n", ("seal",), None, 1),
        ('x = """\n[seal]\nb = 1\n"""\n[seal]\n"b" = 1\n', ("seal", "b"), None, 6),
        ("[seal]\nb = [\n 'x',\n 'y',\n]\nc = 1\n", ("seal", "b"), "y", 4),
        ("[seal]\nb = [\n 'x',\n 'y',\n]\nc = 1\n", ("seal", "c"), None, 6),
        ("[seal.b.c]\nd = 1\n", ("seal", "b"), None, 1),
        ("[seal]\r\nb = 1\r\nc = 2\r\n", ("seal", "c"), None, 3),
        ("seal = {a = 1, b = 2}\n", ("seal", "b"), None, 1),
        ("[[seal]]\na = 1\n", ("seal",), None, 1),
        ("x = 'a\x0cb'".replace("\x0c", "\u2028") + "\nc = 1\n", ("c",), None, 2),
        ("a = 1\n", ("b",), None, None),
        ("a = 1\n", (), None, None),
        ("a = [\n" + "1,\n" * 2000 + "]\nb = 1\n", ("b",), None, None),
    ),
)
def test_the_line_of_a_member_is_found_however_it_is_written(
    text: str, at: tuple[str, ...], element: str | None, line: int | None
) -> None:
    tomllib.loads(text)
    assert line_of(text, at, element) == line


@given(
    st.lists(
        st.sampled_from(["", "# note", "x = '[a]'", "y = [\n1,\n2\n]", "z = '''\n[b]\nk = 1\n'''"]),
        unique=True,
    ),
    st.lists(st.sampled_from(["", "# k = 1", "p = 1", "q = [\n'k',\n]"]), unique=True),
)
def test_the_line_is_right_whatever_stands_around_it(before: list[str], within: list[str]) -> None:
    lines = [*before, "[a]", *within, "k = 7", "", "[b]", "k = 8"]
    text = "\n".join(lines)
    tomllib.loads(text)
    assert text.split("\n")[(line_of(text, ("a", "k")) or 0) - 1] == "k = 7"
    assert text.split("\n")[(line_of(text, ("b", "k")) or 0) - 1] == "k = 8"
