"""Keys wrapped inside a PKCS #11 token: SoftHSM for real, its tokens in a temporary folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import PIN, SoftHsm, softhsm

from strongroom.errors import ConfigError, IntegrityError, KeyServiceError, NoKeyError
from strongroom_security.fields import Context
from strongroom_security.recipients import pkcs11 as ours
from strongroom_security.recipients import pkcs11token
from strongroom_security.recipients.base import Identity, Recipient, Rewrapper
from strongroom_security.recipients.pkcs11 import (
    MECHANISM_VARIABLE,
    MODULE_VARIABLE,
    PIN_FILE_VARIABLE,
    Pkcs11,
)
from strongroom_security.recipients.pkcs11uri import TokenKeyUri
from strongroom_security.secret import Secret
from strongroom_security.testing import RecipientContract

__all__ = ["softhsm"]

CONTEXT = Context(run="run-7f", launch=3, step=1200, attempt="0123456789abcdef")
OTHER = Context(run="run-7f", launch=3, step=1201, attempt="0123456789abcdef")
WITHIN_S = 20.0

FIRST = "checkpoints"
SECOND = "spare"
KEK = "token=checkpoints;object=kek"
SPARE = "token=spare;object=kek"
WRAP_ONLY = "token=checkpoints;object=wrap-only"


@pytest.fixture(scope="module")
def hsm(softhsm: SoftHsm) -> SoftHsm:
    """The tokens, with keys in them."""
    softhsm.make_keys(
        (FIRST, "kek", b"\x01", {}),
        (FIRST, "other", b"\x02", {}),
        (FIRST, "wrap-only", b"\x03", {"ENCRYPT": False, "DECRYPT": False}),
        (FIRST, "encrypt-only", b"\x04", {"WRAP": False, "UNWRAP": False, "DECRYPT": False}),
        (FIRST, "leaky", b"\x05", {"EXTRACTABLE": True}),
        (FIRST, "readable", b"\x06", {"SENSITIVE": False}),
        (FIRST, "twin", b"\x07", {}),
        (FIRST, "twin", b"\x08", {}),
        (SECOND, "kek", b"\x01", {}),
    )
    return softhsm


@pytest.fixture(autouse=True)
def _this_machine(hsm: SoftHsm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODULE_VARIABLE, hsm.module)
    monkeypatch.setenv(PIN_FILE_VARIABLE, str(hsm.pin_file))
    monkeypatch.delenv(MECHANISM_VARIABLE, raising=False)
    monkeypatch.setattr(pkcs11token, "_REFUSED_PINS", set())


class TestPkcs11Contract(RecipientContract):
    @pytest.fixture
    def recipient(self) -> Recipient:
        return Pkcs11(KEK)

    @pytest.fixture
    def again(self) -> Recipient:
        return Pkcs11.of(KEK)

    @pytest.fixture(params=("token=checkpoints;object=other", SPARE))
    def stranger(self, request: pytest.FixtureRequest) -> Identity:
        return Pkcs11(request.param)

    def test_a_keeper_that_never_answers_is_given_up(self, recipient: Pkcs11) -> None:
        wrapped = recipient.wrap(Secret.draw(), CONTEXT, within_s=self.within_s)
        began = time.monotonic()
        with pkcs11token.LOCK.get():  # as a thread inside the module holds it that does not come back
            with pytest.raises(KeyServiceError, match=recipient.uri):
                recipient.wrap(Secret.draw(), CONTEXT, within_s=self.short_s)
            with pytest.raises(KeyServiceError, match=recipient.uri):
                recipient.unwrap(wrapped, CONTEXT, within_s=self.short_s)
        assert time.monotonic() - began < 2 * self.short_s + 10
        recipient.unwrap(wrapped, CONTEXT, within_s=self.within_s)

    def secrets(self, recipient: Recipient) -> list[bytes]:
        return [PIN.encode()]


class TestPkcs11KeyWrapContract(TestPkcs11Contract):
    """By AES key wrap, which has no place for a context."""

    mechanism = "aes-kw"

    @pytest.fixture
    def recipient(self) -> Recipient:
        return Pkcs11(KEK, mechanism=self.mechanism)

    def test_a_key_is_not_wrapped_to_the_same_bytes_twice(self, recipient: Recipient) -> None:
        """AES key wrap is deterministic: the same key, the same bytes. Each checkpoint has its own key."""
        wraps = {recipient.wrap(Secret.draw(), CONTEXT, within_s=self.within_s) for _ in range(3)}
        assert len(wraps) == 3

    def test_a_key_opens_in_no_other_context(self, recipient: Recipient, identity: Identity) -> None:
        """It does, here: the wrapped bytes bind the key alone, and its use binds the context."""
        key = Secret.draw()
        wrapped = recipient.wrap(key, CONTEXT, within_s=self.within_s)
        assert identity.unwrap(wrapped, OTHER, within_s=self.within_s) == key


class TestPkcs11PaddedKeyWrapContract(TestPkcs11KeyWrapContract):
    mechanism = "aes-kwp"


# By which mechanism


def test_the_best_that_token_and_key_allow_is_taken_and_told_in_the_first_byte() -> None:
    key = Secret.draw()
    wrapped = Pkcs11(KEK).wrap(key, CONTEXT, within_s=WITHIN_S)
    assert (wrapped[0], len(wrapped)) == (1, 1 + 12 + 32 + 16)
    wrapped = Pkcs11(WRAP_ONLY).wrap(key, CONTEXT, within_s=WITHIN_S)
    assert (wrapped[0], len(wrapped)) == (2, 1 + 40)
    assert Pkcs11(WRAP_ONLY).unwrap(wrapped, CONTEXT, within_s=WITHIN_S) == key


@pytest.mark.parametrize(("name", "number"), (("aes-gcm", 1), ("aes-kw", 2), ("aes-kwp", 3)))
def test_a_machine_may_choose_the_mechanism(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    monkeypatch.setenv(MECHANISM_VARIABLE, name)
    key = Secret.draw()
    wrapped = Pkcs11(KEK).wrap(key, CONTEXT, within_s=WITHIN_S)
    assert wrapped[0] == number
    monkeypatch.delenv(MECHANISM_VARIABLE)
    # Whatever made it, it opens, and as nothing else.
    assert Pkcs11(KEK).unwrap(wrapped, CONTEXT, within_s=WITHIN_S) == key
    for other in {1, 2, 3} - {number}:
        with pytest.raises(IntegrityError):
            Pkcs11(KEK).unwrap(bytes([other]) + wrapped[1:], CONTEXT, within_s=WITHIN_S)


def test_a_mechanism_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="aes-gcm"):
        Pkcs11(KEK, mechanism="des")
    monkeypatch.setenv(MECHANISM_VARIABLE, "des")
    with pytest.raises(ConfigError, match="aes-gcm"):
        Pkcs11(KEK).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)


def test_the_wrapped_bytes_are_aes_gcm_by_the_letter(hsm: SoftHsm) -> None:
    """What a token made, another implementation opens that is given the same key."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.keywrap import aes_key_unwrap, aes_key_unwrap_with_padding

    from strongroom_security.fields import recipient_info

    raw, key = bytes(range(32)), Secret.draw()
    _import(hsm, "known", raw)
    named = "token=spare;object=known"
    wrapped = Pkcs11(named).wrap(key, CONTEXT, within_s=WITHIN_S)
    assert AESGCM(raw).decrypt(wrapped[1:13], wrapped[13:], recipient_info(CONTEXT)) == key.reveal()
    wrapped = Pkcs11(named, mechanism="aes-kw").wrap(key, CONTEXT, within_s=WITHIN_S)
    assert aes_key_unwrap(raw, wrapped[1:]) == key.reveal()
    wrapped = Pkcs11(named, mechanism="aes-kwp").wrap(key, CONTEXT, within_s=WITHIN_S)
    assert aes_key_unwrap_with_padding(raw, wrapped[1:]) == key.reveal()


def _import(hsm: SoftHsm, label: str, value: bytes) -> None:
    import pkcs11
    from pkcs11 import Attribute

    with (
        pkcs11token.LOCK.get(),
        pkcs11.lib(hsm.module).get_token(token_label=SECOND).open(rw=True, user_pin=PIN) as session,
    ):
        flags = ("ENCRYPT", "DECRYPT", "WRAP", "UNWRAP", "SENSITIVE", "PRIVATE", "TOKEN")
        session.create_object(
            {
                Attribute.CLASS: pkcs11.ObjectClass.SECRET_KEY,
                Attribute.KEY_TYPE: pkcs11.KeyType.AES,
                Attribute.LABEL: label,
                Attribute.VALUE: value,
                Attribute.EXTRACTABLE: False,
                **{Attribute[name]: True for name in flags},
            }
        )


# Which key


@pytest.mark.parametrize("label", ("leaky", "readable"))
def test_a_key_that_can_leave_its_token_wraps_nothing(label: str) -> None:
    with pytest.raises(ConfigError, match="CKA_EXTRACTABLE false"):
        Pkcs11(f"token=checkpoints;object={label}").wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)


def test_a_key_without_the_right_is_no_key() -> None:
    named = "token=checkpoints;object=encrypt-only"
    with pytest.raises(ConfigError, match="CKA_DECRYPT"):
        Pkcs11(named).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    wrapped = Pkcs11(named, mechanism="aes-gcm").wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    with pytest.raises(NoKeyError, match="decrypt"):
        Pkcs11(named).unwrap(wrapped, CONTEXT, within_s=WITHIN_S)
    with pytest.raises(NoKeyError, match="wrap_key"):
        Pkcs11(named, mechanism="aes-kw").wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)


@pytest.mark.parametrize(
    ("named", "error"),
    (
        ("token=absent;object=kek", NoKeyError),
        ("token=checkpoints;serial=00;object=kek", NoKeyError),
        ("token=checkpoints;object=absent", NoKeyError),
        ("token=checkpoints;object=kek;id=%ff", NoKeyError),
        ("token=checkpoints;object=twin", ConfigError),
        ("model=SoftHSM%20v2;token=checkpoint;object=kek", NoKeyError),
    ),
)
def test_a_key_that_is_not_there_or_not_the_only_one_is_told(named: str, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        Pkcs11(named).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    assert type(caught.value) is error


def test_a_key_is_named_by_every_attribute_of_the_uri() -> None:
    key = Secret.draw()
    wrapped = Pkcs11("token=checkpoints;object=twin;id=%07").wrap(key, CONTEXT, within_s=WITHIN_S)
    for named in (
        "token=checkpoints;id=%07",
        "manufacturer=SoftHSM%20project;model=SoftHSM%20v2;token=checkpoints;id=%07;type=secret-key",
    ):
        assert Pkcs11(named).unwrap(wrapped, CONTEXT, within_s=WITHIN_S) == key
    with pytest.raises((IntegrityError, NoKeyError)):
        Pkcs11("token=checkpoints;id=%08").unwrap(wrapped, CONTEXT, within_s=WITHIN_S)


def test_it_passes_nothing_on() -> None:
    assert not isinstance(Pkcs11(KEK), Rewrapper)


# The module and the PIN are this machine's


def test_the_module_comes_from_the_machine(
    hsm: SoftHsm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(MODULE_VARIABLE)
    with pytest.raises(ConfigError, match=MODULE_VARIABLE):
        Pkcs11(KEK).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    Pkcs11(KEK, module=hsm.module).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    library = tmp_path / "none.so"
    library.write_bytes(b"no library")
    for path in ("/absent.so", str(library)):
        with pytest.raises(ConfigError, match="cannot be loaded"):
            Pkcs11(KEK, module=path).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)


def test_without_python_pkcs11_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pkcs11", None)
    with pytest.raises(ConfigError, match=r"strongroom\[pkcs11\]"):
        Pkcs11(KEK).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)


def _pin_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "pin"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_pin_comes_from_a_file_for_this_user_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(PIN_FILE_VARIABLE)
    with pytest.raises(NoKeyError, match=PIN_FILE_VARIABLE):
        Pkcs11(KEK).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    path = _pin_file(tmp_path, f"{PIN}\n")
    for recipient in (Pkcs11(KEK, pin_file=path), Pkcs11(f"{KEK}?pin-source=file:{path}")):
        recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="0640"):
        Pkcs11(KEK, pin_file=path).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    path.write_bytes(b"\xff")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="UTF-8"):
        Pkcs11(KEK, pin_file=path).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)


def test_a_pin_that_was_refused_is_not_tried_again(tmp_path: Path) -> None:
    path = _pin_file(tmp_path, "11112222")
    recipient = Pkcs11(KEK, pin_file=path)
    with pytest.raises(NoKeyError, match="PinIncorrect"):
        recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    for again in (recipient, Pkcs11("token=checkpoints;object=other", pin_file=path)):
        with pytest.raises(NoKeyError, match="is not asked again") as caught:
            again.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
        assert "11112222" not in str(caught.value)
    path.write_text(PIN)
    recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)


def test_another_part_of_the_program_stays_logged_in(hsm: SoftHsm) -> None:
    import pkcs11

    with pkcs11token.LOCK.get():
        session = pkcs11.lib(hsm.module).get_token(token_label=FIRST).open(user_pin=PIN)
    try:
        key = Secret.draw()
        wrapped = Pkcs11(KEK).wrap(key, CONTEXT, within_s=WITHIN_S)
        assert Pkcs11(KEK).unwrap(wrapped, CONTEXT, within_s=WITHIN_S) == key
        with pkcs11token.LOCK.get():
            # A private object, which is seen by who is logged in alone.
            assert session.get_key(label="kek") is not None
    finally:
        with pkcs11token.LOCK.get():
            session.close()


# When it is not well


def test_a_token_that_fails_on_good_bytes_is_out_of_reach_and_on_bad_ones_it_is_damage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SoftHSM has one answer for both, so which it was is found out by another key."""
    recipient = Pkcs11(KEK)
    wrapped = recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    with pytest.raises(IntegrityError, match="GeneralError"):
        recipient.unwrap(wrapped[:-1] + bytes([wrapped[-1] ^ 1]), CONTEXT, within_s=WITHIN_S)
    # A token that stops working in the middle of a session cannot be had of SoftHSM.
    monkeypatch.setattr(ours._Token, "is_well", lambda *_: False)
    with pytest.raises(KeyServiceError, match="GeneralError"):
        recipient.unwrap(wrapped[:-1] + bytes([wrapped[-1] ^ 1]), CONTEXT, within_s=0.5)


def test_two_threads_take_turns() -> None:
    recipient, failed = Pkcs11(KEK), []

    def use() -> None:
        for _ in range(20):
            key = Secret.draw()
            wrapped = recipient.wrap(key, CONTEXT, within_s=WITHIN_S)
            if recipient.unwrap(wrapped, CONTEXT, within_s=WITHIN_S) != key:
                failed.append(key)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed


_HANGING = """
#include <string.h>
#include <unistd.h>
typedef unsigned long rv;
struct info { unsigned char v[2]; char maker[32]; unsigned long flags; char text[32]; unsigned char w[2]; };
static rv initialize(void *p) { (void)p; return 0; }
static rv get_info(struct info *i) { memset(i, 0, sizeof *i); memset(i->maker, ' ', 32);
                                     memset(i->text, ' ', 32); return 0; }
static rv hang(void) { for (;;) sleep(1000); }
static struct { unsigned char v[2]; void *f[68]; } list;
rv C_GetFunctionList(void **out) {
    for (int i = 0; i < 68; i++) list.f[i] = (void *)hang;
    list.v[0] = 2; list.v[1] = 40;
    list.f[0] = (void *)initialize; list.f[2] = (void *)get_info;
    *out = &list; return 0;
}
"""


def test_a_module_that_hangs_holds_up_neither_the_caller_nor_the_end_of_the_program(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to make such a module with")
    (tmp_path / "hang.c").write_text(_HANGING)
    library = tmp_path / "hang.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "hang.c"], check=True, timeout=60)
    program = f"""
import threading, time
from strongroom.errors import KeyServiceError
from strongroom_security.fields import Context
from strongroom_security.recipients.pkcs11 import Pkcs11
from strongroom_security.secret import Secret
context = Context(run="r", launch=1, step=1, attempt="0123456789abcdef")
recipient = Pkcs11({KEK!r}, module={str(library)!r})
for _ in range(2):
    try:
        recipient.wrap(Secret.draw(), context, within_s=0.5)
    except KeyServiceError as error:
        print(error)
print("ended")
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
    first, second, ended = child.stdout.splitlines()
    assert "within 0.5 s" in first
    assert "does not end" in second or "within 0.5 s" in second
    assert ended == "ended"


# URIs


@pytest.mark.parametrize(
    ("text", "told"),
    (
        ("", "names no key"),
        ("object=kek", "names no key"),
        ("token=a", "names no key"),
        ("model=a;object=kek", "names no key"),
        ("token=a;object=kek;slot-id=3", "slot-id"),
        ("token=a;object=kek;x-vendor=3", "x-vendor"),
        ("token=a;token=b;object=kek", "RFC 7512"),
        ("token=a;;object=kek", "RFC 7512"),
        ("token=a;object", "RFC 7512"),
        ("token=a;object=k ek", "RFC 7512"),
        ("serial=;object=kek", "RFC 7512"),
        ("token=a;object=k%zz", "RFC 7512"),
        ("token=a;object=%ff", "UTF-8"),
        ("token=a;object=kek;type=private", "secret-key"),
        ("token=a;object=kek?module-path=/tmp/evil.so", "module-path"),
        ("token=a;object=kek?module-name=evil", "module-name"),
        ("token=a;object=kek?pin-source=file:/a&module-path=/tmp/evil.so", "module-path"),
        ("token=a;object=kek?pin-source=|/usr/bin/tell", "no command"),
        ("token=a;object=kek?pin-source=relative", "file:/PATH"),
        ("token=a;object=kek?pin-source=file://host/pin", "file:/PATH"),
        ("token=a;object=kek?x=y", "'x'"),
    ),
)
def test_a_uri_that_is_none_or_says_too_much_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Pkcs11.of(text)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "where", ("?pin-value=4711", ";pin-value=4711", "?pin-source=file:/a&pin-value=4711")
)
def test_a_pin_in_a_uri_is_refused_and_not_repeated(where: str) -> None:
    with pytest.raises(ConfigError, match="pin-value") as caught:
        Pkcs11.of(f"token=a;object=kek{where}")
    assert "4711" not in str(caught.value)


@pytest.mark.parametrize("source", ("/run/pin", "file:/run/pin", "file:///run/pin", "file:%2Frun%2Fpin"))
def test_a_pin_s_file_is_named_in_each_way(source: str) -> None:
    assert TokenKeyUri.parse(f"token=a;object=b?pin-source={source}").pin_file == "/run/pin"


def _quoted(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode())


@given(
    token=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    label=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    key_id=st.binary(min_size=1),
)
def test_any_name_can_be_written(token: str, label: str, key_id: bytes) -> None:
    written = f"object={_quoted(label)};token={_quoted(token)};id=" + "".join(f"%{b:02x}" for b in key_id)
    found: Any = TokenKeyUri.parse(written)
    assert (found.token, found.label, found.key_id) == ((("token", token),), label, key_id)


def test_the_id_is_that_of_the_key_and_not_of_its_spelling() -> None:
    ids = {
        Pkcs11(text).id
        for text in (
            "token=a;object=b",
            "object=b;token=a",
            "object=%62;token=%61?pin-source=/x",
            "token=a;object=b;type=secret-key",
        )
    }
    assert len(ids) == 1
    assert (
        len(
            {
                Pkcs11(text).id
                for text in (
                    "token=a;object=b",
                    "token=b;object=a",
                    "serial=a;object=b",
                    "token=a;id=b",
                    "token=a;object=b;id=b",
                )
            }
        )
        == 5
    )
