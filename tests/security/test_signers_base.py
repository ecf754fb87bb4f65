"""How a signer is asked, and what is made of what it answers: it may be anybody's code."""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256, SHA384

from strongroom.errors import ConfigError, KeyServiceError, NoKeyError
from strongroom_security.publickeys import PublicKey
from strongroom_security.signers.base import is_signer, sign_checked
from strongroom_security.signers.file import FileSigner

MESSAGE = b"what is to be signed"
WITHIN_S = 5.0
TOKEN = "s.secrettoken"  # noqa: S105 - of nothing


class Keeper:
    """A signer of somebody's."""

    kind = "keeper"
    uri = "keeper:one"
    certificates: tuple[bytes, ...] = ()

    def __init__(self, answer: Callable[[Keeper, bytes], Any] | None = None) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.answer = answer or (lambda keeper, message: keeper.signed(message))
        self.asked = 0

    def signed(self, message: bytes) -> bytes:
        return self.key.sign(message, ec.ECDSA(SHA256()))

    @property
    def public_key(self) -> PublicKey:
        self.asked += 1
        return PublicKey.of(self.key.public_key())

    def sign(self, message: bytes, *, within_s: float) -> Any:
        return self.answer(self, message)


def test_a_signature_that_holds_is_handed_on() -> None:
    keeper = Keeper()
    signature = sign_checked(keeper, MESSAGE, within_s=WITHIN_S)
    assert keeper.public_key.verify(MESSAGE, signature)


def _side_by_side(keeper: Keeper, message: bytes) -> bytes:
    r, s = decode_dss_signature(keeper.signed(message))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


WRONG: dict[str, Callable[[Keeper, bytes], Any]] = {
    "nothing": lambda keeper, message: b"",
    "none": lambda keeper, message: None,
    "text": lambda keeper, message: "signature",
    "a bytearray": lambda keeper, message: bytearray(keeper.signed(message)),
    "of another message": lambda keeper, message: keeper.signed(message + b"\0"),
    "by another key": lambda keeper, message: Keeper().signed(message),
    "with another hash": lambda keeper, message: keeper.key.sign(message, ec.ECDSA(SHA384())),
    "of the hash of the hash": lambda keeper, message: keeper.signed(hashlib.sha256(message).digest()),
    "with something behind it": lambda keeper, message: keeper.signed(message) + b"\0",
    "side by side": _side_by_side,
    "long": lambda keeper, message: bytes(100_000),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_answer_is_refused_by_the_keeper_s_name(which: str) -> None:
    with pytest.raises(KeyServiceError, match="keeper:one"):
        sign_checked(Keeper(WRONG[which]), MESSAGE, within_s=WITHIN_S)


@pytest.mark.parametrize("which", ("none", "text", "a bytearray"))
def test_an_answer_of_another_type_is_told_by_it(which: str) -> None:
    with pytest.raises(KeyServiceError, match=r"keeper:one answered with a .*, where a signature is bytes"):
        sign_checked(Keeper(WRONG[which]), MESSAGE, within_s=WITHIN_S)


def _raising(error: BaseException) -> Callable[[Keeper, bytes], Any]:
    def answer(keeper: Keeper, message: bytes) -> Any:
        raise error

    return answer


@pytest.mark.parametrize(
    ("error", "expected"),
    (
        (NoKeyError("no right"), NoKeyError),
        (KeyServiceError("down"), KeyServiceError),
        (ConfigError("no such key"), ConfigError),
        (ValueError(TOKEN), KeyServiceError),
        (SystemExit(TOKEN), KeyServiceError),
    ),
)
def test_what_a_keeper_raises_is_told_by_its_name_and_shows_nothing(
    error: BaseException, expected: type[Exception]
) -> None:
    with pytest.raises(expected, match="keeper:one") as caught:
        sign_checked(Keeper(_raising(error)), MESSAGE, within_s=WITHIN_S)
    assert type(caught.value) is expected
    assert TOKEN not in "".join(traceback.format_exception(caught.value))


def test_a_keeper_that_does_not_end_is_left_behind() -> None:
    def hangs(keeper: Keeper, message: bytes) -> Any:
        time.sleep(30)

    began = time.monotonic()
    with pytest.raises(KeyServiceError, match="keeper:one did not answer in time"):
        sign_checked(Keeper(hangs), MESSAGE, within_s=0.2)
    assert time.monotonic() - began < 15


def test_a_public_key_that_cannot_be_had_is_no_signature() -> None:
    class Hidden(Keeper):
        @property
        def public_key(self) -> PublicKey:
            raise KeyServiceError("down")

    with pytest.raises(KeyServiceError, match="keeper:one: down"):
        sign_checked(Hidden(), MESSAGE, within_s=WITHIN_S)


def test_whether_something_is_a_signer_is_found_out_without_asking_it() -> None:
    keeper = Keeper()
    assert is_signer(keeper)
    assert keeper.asked == 0
    assert is_signer(FileSigner(keeper.key, uri="file:signer.pem"))

    class Verifier:
        kind, uri, certificates = "verifier", "verifier:one", ()
        public_key = None

    for no_signer in (Verifier(), Keeper, "file:signer.pem", None):
        assert not is_signer(no_signer)
