"""The contract that a third party runs: each of its tests fails on a signer that breaks what it says."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from _pytest.outcomes import Failed
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed, decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from test_signers_file import certificate

from strongroom.errors import FormatError, KeyServiceError
from strongroom_security.publickeys import PublicKey
from strongroom_security.signer_testing import SignerContract

KEY = ec.derive_private_key(0x5EC7E7C0FFEE, ec.SECP256R1())
OTHER = ec.generate_private_key(ec.SECP256R1())
SECRET = b"\x5e\xc7\xe7\xc0\xff\xee\x01\x02\x03"


class Sound:
    """A signer that keeps the contract; each of those below breaks one word of it."""

    kind = "sound"
    uri = "sound:one"
    certificates: tuple[bytes, ...] = ()

    def __init__(self, key: ec.EllipticCurvePrivateKey = KEY) -> None:
        self._key = key
        self._secret = SECRET

    @property
    def public_key(self) -> PublicKey:
        return PublicKey.of(self._key.public_key())

    def sign(self, message: bytes, *, within_s: float) -> bytes:
        return self._key.sign(message, ec.ECDSA(SHA256()))

    def __repr__(self) -> str:
        return "<Sound>"

    def __reduce__(self) -> Any:
        raise TypeError("not pickled")


class Contract(SignerContract):
    __test__ = False
    within_s = 5.0

    def secrets(self, signer: Any) -> list[bytes]:
        return [SECRET]


def holds(name: str, signer: Any, *, stranger: Any = None, again: Any = None, silent: Any = None) -> None:
    """Run one test of the contract."""
    contract = Contract()
    given: dict[str, Any] = {
        "signer": signer,
        "again": again or type(signer)(),
        "stranger": stranger or Sound(OTHER),
        "silent": silent,
    }
    test = getattr(contract, f"test_{name}")
    code = test.__func__.__code__
    wanted = [each for each in code.co_varnames[1 : code.co_argcount] if each in given]
    if "position" in code.co_varnames[: code.co_argcount]:
        for position in range(len(contract.messages)):
            test(**{key: given[key] for key in wanted}, position=position)
    else:
        test(**{key: given[key] for key in wanted})


TESTS = [
    "any_message_is_signed",
    "a_signature_is_over_its_message_alone",
    "a_signature_is_by_its_key_alone",
    "what_another_process_signs_this_one_verifies",
    "what_it_answers_is_what_strongroom_accepts",
    "it_has_what_a_signer_has",
    "the_key_is_the_same_each_time_and_everywhere",
    "its_first_certificate_is_for_its_key",
    "several_threads_use_it_at_once",
    "a_forked_child_uses_it",
    "neither_its_text_nor_its_pickle_shows_a_secret",
]


@pytest.mark.parametrize("name", TESTS)
def test_a_sound_signer_passes(name: str) -> None:
    holds(name, Sound())


def test_every_test_of_the_contract_is_tried_here() -> None:
    found = {name.removeprefix("test_") for name in dir(SignerContract) if name.startswith("test_")}
    assert found == {*TESTS, "a_keeper_that_never_answers_is_given_up"}
    assert set(TESTS) == {name for _, name in BROKEN}


class RefusesEmptyMessages(Sound):
    def sign(self, message: bytes, *, within_s: float) -> bytes:
        if not message:
            raise KeyServiceError("a message has at least one byte")
        return super().sign(message, within_s=within_s)


class RefusesLongMessages(Sound):
    def sign(self, message: bytes, *, within_s: float) -> bytes:
        if len(message) > 4096:
            raise KeyServiceError("too long")
        return super().sign(message, within_s=within_s)


class TakesHashesForHashes(Sound):
    def sign(self, message: bytes, *, within_s: float) -> bytes:
        if len(message) == 32:
            return self._key.sign(message, ec.ECDSA(Prehashed(SHA256())))
        return super().sign(message, within_s=within_s)


class HashesOtherwise(Sound):
    def sign(self, message: bytes, *, within_s: float) -> bytes:
        return self._key.sign(message, ec.ECDSA(SHA384()))


class AnswersSideBySide(Sound):
    def sign(self, message: bytes, *, within_s: float) -> bytes:
        r, s = decode_dss_signature(super().sign(message, within_s=within_s))
        return r.to_bytes(32, "big") + s.to_bytes(32, "big")


class AnswersABytearray(Sound):
    def sign(self, message: bytes, *, within_s: float) -> Any:
        return bytearray(super().sign(message, within_s=within_s))


class Believing(PublicKey):
    """A key that thinks any signature its own."""

    def verify(self, message: bytes, signature: bytes) -> bool:
        return True


class BelievesAnything(Sound):
    @property
    def public_key(self) -> PublicKey:
        return Believing.of(self._key.public_key())


class SignsTheBeginning(Sound):
    class Key(PublicKey):
        def verify(self, message: bytes, signature: bytes) -> bool:
            return PublicKey.of(self.key).verify(message[:8], signature)

    @property
    def public_key(self) -> PublicKey:
        return self.Key.of(self._key.public_key())

    def sign(self, message: bytes, *, within_s: float) -> bytes:
        return super().sign(message[:8], within_s=within_s)


class KeepsItsKeyHere(Sound):
    def __init__(self) -> None:
        super().__init__(ec.generate_private_key(ec.SECP256R1()))


class IsNamedOddly(Sound):
    kind = "Sound Signer"


class HasNoPublicKeyOfOurs(Sound):
    @property
    def public_key(self) -> Any:
        return self._key.public_key()


class ChangesItsKey(Sound):
    def sign(self, message: bytes, *, within_s: float) -> bytes:
        self._key = ec.generate_private_key(ec.SECP256R1())
        return super().sign(message, within_s=within_s)


class IsCertifiedForAnother(Sound):
    def __init__(self) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import Encoding

        super().__init__()
        self.certificates = (x509.load_pem_x509_certificate(certificate(OTHER)).public_bytes(Encoding.DER),)


class ListsItsCertificates(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.certificates: Any = []


class IsForOneThread(Sound):
    def __init__(self) -> None:
        super().__init__()
        self._busy = threading.Lock()

    def sign(self, message: bytes, *, within_s: float) -> bytes:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("in use")
        time.sleep(0.05)
        self._busy.release()
        return super().sign(message, within_s=within_s)


class MixesUpThreads(Sound):
    def sign(self, message: bytes, *, within_s: float) -> bytes:
        self._message = message
        time.sleep(0.05)
        return super().sign(self._message, within_s=within_s)


class IsForOneProcess(Sound):
    def __init__(self) -> None:
        super().__init__()
        self._made_in = os.getpid()

    def sign(self, message: bytes, *, within_s: float) -> bytes:
        if os.getpid() != self._made_in:
            raise RuntimeError("a socket of another process")
        return super().sign(message, within_s=within_s)


class ShowsItsSecret(Sound):
    def __repr__(self) -> str:
        return f"<Sound {self._secret!r}>"


class PicklesItsSecret(Sound):
    def __reduce__(self) -> Any:
        return (bytes, (self._secret,))


BROKEN: list[tuple[Callable[[], Sound], str]] = [
    (RefusesEmptyMessages, "any_message_is_signed"),
    (RefusesLongMessages, "any_message_is_signed"),
    (TakesHashesForHashes, "any_message_is_signed"),
    (HashesOtherwise, "any_message_is_signed"),
    (AnswersSideBySide, "any_message_is_signed"),
    (AnswersABytearray, "any_message_is_signed"),
    (AnswersABytearray, "what_it_answers_is_what_strongroom_accepts"),
    (HashesOtherwise, "what_it_answers_is_what_strongroom_accepts"),
    (BelievesAnything, "a_signature_is_over_its_message_alone"),
    (SignsTheBeginning, "a_signature_is_over_its_message_alone"),
    (BelievesAnything, "a_signature_is_by_its_key_alone"),
    (KeepsItsKeyHere, "what_another_process_signs_this_one_verifies"),
    (IsNamedOddly, "it_has_what_a_signer_has"),
    (HasNoPublicKeyOfOurs, "it_has_what_a_signer_has"),
    (KeepsItsKeyHere, "the_key_is_the_same_each_time_and_everywhere"),
    (ChangesItsKey, "the_key_is_the_same_each_time_and_everywhere"),
    (IsCertifiedForAnother, "its_first_certificate_is_for_its_key"),
    (ListsItsCertificates, "its_first_certificate_is_for_its_key"),
    (IsForOneThread, "several_threads_use_it_at_once"),
    (MixesUpThreads, "several_threads_use_it_at_once"),
    (IsForOneProcess, "a_forked_child_uses_it"),
    (ShowsItsSecret, "neither_its_text_nor_its_pickle_shows_a_secret"),
    (PicklesItsSecret, "neither_its_text_nor_its_pickle_shows_a_secret"),
]


@pytest.mark.parametrize(("make", "name"), BROKEN, ids=[f"{make.__name__}-{name}" for make, name in BROKEN])
def test_a_signer_that_breaks_its_word_fails(make: Callable[[], Sound], name: str) -> None:
    with pytest.raises((AssertionError, Failed, FormatError, KeyServiceError, RuntimeError)):
        holds(name, make())


def test_two_signers_with_one_key_are_told() -> None:
    for name in ("a_signature_is_by_its_key_alone", "the_key_is_the_same_each_time_and_everywhere"):
        with pytest.raises(AssertionError):
            holds(name, Sound(), stranger=Sound())


class IsSilent(Sound):
    def sign(self, message: bytes, *, within_s: float) -> bytes:
        raise KeyServiceError(f"{self.uri} did not answer")


class IsSilentAndNamesNobody(Sound):
    def sign(self, message: bytes, *, within_s: float) -> bytes:
        raise KeyServiceError("no answer")


class CallsSilenceAnError(Sound):
    def sign(self, message: bytes, *, within_s: float) -> bytes:
        raise TimeoutError("no answer")


class ShowsItsSecretWhenItGivesUp(Sound):
    def sign(self, message: bytes, *, within_s: float) -> bytes:
        raise KeyServiceError(f"{self.uri} did not answer to {self._secret.hex()}")


def test_a_keeper_that_never_answers_is_given_up() -> None:
    name = "a_keeper_that_never_answers_is_given_up"
    holds(name, Sound(), silent=IsSilent())
    with pytest.raises(pytest.skip.Exception):
        holds(name, Sound())
    for silent in (IsSilentAndNamesNobody(), ShowsItsSecretWhenItGivesUp()):
        with pytest.raises(AssertionError):
            holds(name, Sound(), silent=silent)
    with pytest.raises(TimeoutError):
        holds(name, Sound(), silent=CallsSilenceAnError())
    with pytest.raises(Failed):
        holds(name, Sound(), silent=Sound())


def test_a_keeper_that_is_waited_for_too_long_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class IsSlow(Sound):
        def sign(self, message: bytes, *, within_s: float) -> bytes:
            later = time.monotonic() + 1000
            monkeypatch.setattr(time, "monotonic", lambda: later)
            raise KeyServiceError(f"{self.uri} did not answer")

    with pytest.raises(AssertionError):
        holds("a_keeper_that_never_answers_is_given_up", Sound(), silent=IsSlow())


def test_a_forked_child_is_waited_for_whatever_number_its_pipe_has() -> None:
    """A process may have more than 1,024 files open, which not every way of waiting bears."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held: list[int] = []
    try:
        while not held or held[-1] < 1100:
            held.append(os.open(os.devnull, os.O_RDONLY))
        holds("a_forked_child_uses_it", Sound())
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
