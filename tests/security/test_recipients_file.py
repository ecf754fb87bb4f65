"""A key in a file: the contract of every recipient, and who may reach the file."""

from __future__ import annotations

import base64
import copy
import os
import pickle
from pathlib import Path

import pytest

from strongroom.errors import ConfigError, IntegrityError
from strongroom_security import Seal
from strongroom_security.fields import Context
from strongroom_security.recipients.base import Identity, Recipient
from strongroom_security.recipients.file import FileKey, create_key_file
from strongroom_security.recipients.keyfiles import in_others_reach
from strongroom_security.recipients.opening import open_identity, open_recipient
from strongroom_security.secret import Secret
from strongroom_security.testing import RecipientContract

CONTEXT = Context(run="run-7f", launch=3, step=1200, attempt="0123456789abcdef")


class TestFileKey(RecipientContract):
    @pytest.fixture
    def recipient(self, tmp_path: Path) -> Recipient:
        return create_key_file(tmp_path / "kek.key")

    @pytest.fixture
    def again(self, recipient: Recipient, tmp_path: Path) -> Recipient:
        return FileKey.read(tmp_path / "kek.key")

    @pytest.fixture
    def stranger(self, tmp_path: Path) -> Identity:
        return create_key_file(tmp_path / "other.key")

    def secrets(self, recipient: Recipient) -> list[bytes]:
        path = Path(recipient.uri.removeprefix("file:"))
        return [base64.b64decode(path.read_bytes().split(b"\n")[1]), path.read_bytes().split(b"\n")[1]]


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    create_key_file(tmp_path / "kek.key")
    return tmp_path / "kek.key"


def test_a_key_file_is_its_owner_s_alone_whatever_the_process_s_mask(tmp_path: Path) -> None:
    for mask in (0o000, 0o022, 0o777):
        before = os.umask(mask)
        try:
            create_key_file(tmp_path / f"{mask}.key")
        finally:
            os.umask(before)
        assert (tmp_path / f"{mask}.key").stat().st_mode & 0o777 == 0o600


def test_a_key_file_says_what_it_is_and_holds_32_bytes(key_file: Path) -> None:
    words, key, end = key_file.read_text().split("\n")
    assert words.startswith("# Strongroom key file")
    assert len(base64.b64decode(key, validate=True)) == 32
    assert end == ""


def test_every_key_file_has_a_key_of_its_own(tmp_path: Path) -> None:
    assert len({create_key_file(tmp_path / f"{number}.key").id for number in range(8)}) == 8


def test_a_key_file_is_never_written_over(key_file: Path) -> None:
    before = key_file.read_bytes()
    with pytest.raises(ConfigError, match="never written over"):
        create_key_file(key_file)
    assert key_file.read_bytes() == before


def test_a_key_is_not_written_through_a_link_that_leads_nowhere_yet(tmp_path: Path) -> None:
    (tmp_path / "link.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError):
        create_key_file(tmp_path / "link.key")
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent/kek\.key cannot be created"):
        create_key_file(tmp_path / "absent" / "kek.key")


@pytest.mark.parametrize("mode", (0o640, 0o604, 0o620, 0o602, 0o610, 0o644, 0o777))
def test_a_key_that_others_can_reach_is_refused(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}"):
        FileKey.read(key_file)


@pytest.mark.parametrize("mode", (0o600, 0o400, 0o700))
def test_a_key_that_its_owner_alone_can_reach_is_read(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    assert FileKey.read(key_file).id.startswith("file-")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_key_that_another_user_could_replace_is_refused(key_file: Path) -> None:
    os.chown(key_file, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        FileKey.read(key_file)


def test_a_link_leads_to_a_key_whose_own_mode_counts(key_file: Path) -> None:
    link = key_file.with_name("link.key")
    link.symlink_to(key_file)
    assert FileKey.read(link).id == FileKey.read(key_file).id
    key_file.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644"):
        FileKey.read(link)


@pytest.mark.parametrize(
    ("mode", "owner", "group", "is_reached"),
    (
        (0o100440, 0, 2000, False),  # as Kubernetes mounts a secret with fsGroup
        (0o100400, 0, 2000, False),
        (0o100440, 0, 3000, True),  # a group of others
        (0o100440, 1000, 2000, True),  # our own, which needs no group
        (0o100460, 0, 2000, True),
        (0o100444, 0, 2000, True),
        (0o100404, 0, 2000, True),
    ),
)
def test_root_may_hand_a_key_to_a_group_of_this_process(
    mode: int, owner: int, group: int, is_reached: bool
) -> None:
    assert in_others_reach(mode, owner, group, user=1000, groups={1000, 2000}) == is_reached


def test_root_itself_needs_no_group() -> None:
    assert in_others_reach(0o100440, 0, 0, user=0, groups={0})


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(mode=0o700)
    for name in ("pipe", "folder"):
        with pytest.raises(ConfigError):
            FileKey.read(tmp_path / name)
    with pytest.raises(ConfigError, match="is not there"):
        FileKey.read(tmp_path / "absent")


def test_a_file_that_holds_anything_else_is_refused_and_not_shown(key_file: Path) -> None:
    words, key, _ = key_file.read_bytes().split(b"\n")
    short = base64.b64encode(b"0123456789abcdef0123456789abcde")
    long = base64.b64encode(b"0123456789abcdef0123456789abcdef0")
    wrong = [
        b"",
        key,
        key + b"\n",
        words + b"\n" + key,
        words + b"\n" + short + b"\n",
        words + b"\n" + long + b"\n",
        words + b"\n" + key + b"\n\n",
        words + b"\n" + key[:-1] + b"\n",
        words + b"\n" + b" " + key + b"\n",
        words + b"\r\n" + key + b"\r\n",
        words[:-1] + b"\n" + key + b"\n",
        words + b"\n" + key + b"\n" + key + b"\n",
        words + b"\n" + key + b"\n" + key,
        words + b"\n" + b"A" * 10_000 + b"\n",
        os.urandom(32),
    ]
    for data in wrong:
        key_file.write_bytes(data)
        with pytest.raises(ConfigError) as caught:
            FileKey.read(key_file)
        assert str(key_file) in str(caught.value)
        assert key.decode()[:12] not in str(caught.value)


def test_a_long_file_is_not_read_to_its_end(key_file: Path) -> None:
    key_file.write_bytes(bytes(1 << 20))
    with pytest.raises(ConfigError, match="is longer than 4096 bytes"):
        FileKey.read(key_file)


def test_the_id_is_derived_one_way(key_file: Path) -> None:
    raw = base64.b64decode(key_file.read_bytes().split(b"\n")[1])
    shown = FileKey.read(key_file).id.removeprefix("file-")
    assert len(shown) == 32
    assert shown not in (raw.hex()[:32], raw.hex()[32:])


def test_a_wrapped_key_has_a_nonce_a_key_and_a_tag(key_file: Path) -> None:
    recipient = FileKey.read(key_file)
    assert len(recipient.wrap(Secret.draw(), CONTEXT, within_s=1.0)) == 12 + 32 + 16


def test_a_key_is_neither_pickled_nor_copied(key_file: Path) -> None:
    for serialise in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled or copied"):
            serialise(FileKey.read(key_file))


def test_an_error_says_what_may_have_happened(key_file: Path) -> None:
    recipient = FileKey.read(key_file, uri="file:kek.key")
    with pytest.raises(IntegrityError, match=r"file:kek\.key did not wrap this key for this checkpoint"):
        recipient.unwrap(bytes(60), CONTEXT, within_s=1.0)


def test_a_policy_names_it_by_a_path_relative_to_itself(key_file: Path) -> None:
    relative = open_recipient("file:kek.key", base=key_file.parent)
    absolute = open_identity(f"file:{key_file}", base=Path("/nowhere"))
    assert relative.id == absolute.id
    assert relative.uri == "file:kek.key"


@pytest.mark.parametrize(
    "text", ("", "file", "file:", "kek.key", "ftp:kek.key", "File:kek.key", ":kek.key", "age1xyz")
)
def test_a_kind_that_is_not_known_is_an_error_that_lists_those_that_are(text: str, tmp_path: Path) -> None:
    for opening in (open_recipient, open_identity):
        with pytest.raises(ConfigError, match=r"file:PATH, hpke:PATH, aws-kms:.*, openbao:.*, pkcs11:"):
            opening(text, base=tmp_path)


def frames_of(error: BaseException | None) -> str:
    """Every variable of every frame that an error and what it came from passed through."""
    shown = []
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_globals.get("__name__", "").startswith("strongroom"):
                shown += [repr(value) for value in trace.tb_frame.f_locals.values()]
            trace = trace.tb_next
        error = error.__cause__ or error.__context__
    return "\n".join(shown)


@pytest.mark.parametrize("what", ("mode", "ends", "length", "header"))
def test_no_frame_of_an_error_holds_the_key(what: str, key_file: Path) -> None:
    """A crash reporter sends the variables of every frame to people who may not have the key."""
    words, line, _ = key_file.read_bytes().split(b"\n")
    if what == "mode":
        key_file.chmod(0o644)
    elif what == "ends":
        key_file.write_bytes(key_file.read_bytes().replace(b"\n", b"\r\n"))
    elif what == "length":
        key_file.write_bytes(key_file.read_bytes() * 40)
    else:
        key_file.write_bytes(words[:-1] + b"\n" + line + b"\n")
    for read in (
        lambda: FileKey.read(key_file),
        lambda: Seal(recipients=["file:kek.key"], base=key_file.parent),
    ):
        with pytest.raises(ConfigError) as caught:
            read()
        shown = frames_of(caught.value)
        assert "kek.key" in shown
        assert line[:20].decode() not in shown
        assert repr(base64.b64decode(line))[2:20] not in shown


def test_a_name_that_no_file_has_is_told(tmp_path: Path) -> None:
    for text in ("file:\0x", "hpke:\0x"):
        with pytest.raises(ConfigError, match="no file has such a name"):
            open_recipient(text, base=tmp_path)
