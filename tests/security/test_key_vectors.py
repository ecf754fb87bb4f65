"""Known answers: what was wrapped by the letter of the format opens here, and is called what it is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import make_keys
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from strongroom_security.envelope import CheckpointKey, HandOverKey
from strongroom_security.fields import Context, wrap_info
from strongroom_security.keyring import Keyring
from strongroom_security.recipients.base import Identity
from strongroom_security.recipients.opening import open_identity, open_recipient
from strongroom_security.secret import Secret

FOLDER = Path(__file__).parent / "vectors" / "keys"
RECIPIENTS = ("file", "hpke-x25519", "hpke-p256", "hpke-mlkem768-x25519")


def vector(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def test_the_vectors_are_what_their_script_writes() -> None:
    made = make_keys.all_vectors()
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(made)
    for name, document in made.items():
        assert (FOLDER / f"{name}.json").read_text() == make_keys.encoded(document)


def test_the_wrapping_key_is_derived_as_it_is_written() -> None:
    given = vector("hkdf-wrapping-key")
    context = Context(**given["context"])
    assert wrap_info(context).hex() == given["info"]
    wrapped = CheckpointKey(Secret(bytes.fromhex(given["checkpoint_key"])), context).wrap(
        "p", Secret(b"k" * 32)
    )
    assert AESGCM(bytes.fromhex(given["wrapping_key"])).decrypt(wrapped[:12], wrapped[12:], b"p") == b"k" * 32


def test_a_file_s_key_is_wrapped_as_it_is_written() -> None:
    given = vector("wrap-file-key")
    context = Context(**given["context"])
    checkpoint = CheckpointKey(Secret(bytes.fromhex(given["checkpoint_key"])), context)
    found = checkpoint.unwrap(str(context.path), bytes.fromhex(given["wrapped"]))
    assert found.reveal().hex() == given["file_key"]


def identity_of(given: dict[str, Any], folder: Path) -> Identity:
    path = folder / f"{given['kind']}.key"
    path.write_text(given["key_file"] if given["kind"] == "file" else given["private_key"])
    path.chmod(0o600)
    return open_identity(f"{given['kind'].partition('-')[0]}:{path}", base=folder)


@pytest.mark.parametrize("kind", RECIPIENTS)
def test_what_a_recipient_wrapped_is_opened(kind: str, tmp_path: Path) -> None:
    given = vector(f"wrap-recipient-{kind}")
    identity = identity_of(given, tmp_path)
    assert (identity.kind, identity.id) == (kind, given["id"])
    found = identity.unwrap(bytes.fromhex(given["wrapped"]), Context(**given["context"]), within_s=5.0)
    assert found.reveal().hex() == given["key"]


@pytest.mark.parametrize("kind", RECIPIENTS[1:])
def test_a_public_key_is_called_what_its_private_key_is(kind: str, tmp_path: Path) -> None:
    given = vector(f"wrap-recipient-{kind}")
    (tmp_path / "key.pub").write_text(given["public_key"])
    assert open_recipient("hpke:key.pub", base=tmp_path).id == given["id"]


def test_what_is_handed_over_is_opened() -> None:
    given = vector("handover")
    private = ec.derive_private_key(
        int.from_bytes(bytes.fromhex(given["private_scalar"]), "big"), ec.SECP256R1()
    )
    one_off = HandOverKey(private)
    assert one_off.public.hex() == given["public"]
    found = one_off.open(bytes.fromhex(given["handed"]), Context(**given["context"]))
    assert found is not None
    assert found.generation == given["generation"]
    assert {path: key.reveal().hex() for path, key in found.keys.items()} == given["keys"]


@pytest.mark.parametrize("name", ("keyring", "keyring-direct"))
def test_a_keyring_is_read_and_opened_by_each_of_its_recipients(name: str, tmp_path: Path) -> None:
    given = vector(name)
    keyring = Keyring.decode(given["document"].encode(), name)
    assert keyring.encode().decode() == given["document"]
    for at, entry in enumerate(keyring.recipients):
        identity = identity_of(vector(f"wrap-recipient-{entry.kind}"), tmp_path)
        assert identity.id == entry.id
        found = {}
        for key in keyring.keys:
            if entry.wrapped is None:
                context = Context.of(keyring.run, keyring.name, key.path)
                found[key.path] = identity.unwrap(key.wrapped[at], context, within_s=5.0)
            else:
                secret = identity.unwrap(entry.wrapped, keyring.context, within_s=5.0)
                found[key.path] = CheckpointKey(secret, keyring.context).unwrap(key.path, key.wrapped[0])
        assert {path: key.reveal().hex() for path, key in found.items()} == given["keys"]
