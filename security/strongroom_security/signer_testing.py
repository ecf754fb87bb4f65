"""What every signer must do, as tests that its author runs.

Subclass `SignerContract` in a test module, and say how the signer is made::

    class TestMyVault(SignerContract):
        @pytest.fixture
        def signer(self):
            return MyVault("key-one")

        @pytest.fixture
        def again(self):
            return MyVault("key-one")               # as another process would open it

        @pytest.fixture
        def stranger(self):
            return MyVault("key-two")

        @pytest.fixture
        def silent(self):
            return MyVault("key-one", endpoint=...) # connects, and is never answered

        def secrets(self, signer):
            return [signer.token.encode()]

It needs pytest.
"""
# ruff: noqa: S101 - these are tests, and assert is how a test speaks

from __future__ import annotations

import copy
import pickle  # noqa: TID251 - what holds a key must refuse it
import threading
import time
import traceback
from functools import partial
from typing import ClassVar

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from strongroom.errors import KeyServiceError
from strongroom_security.contracts import WAIT_S, in_child, outcome, shows
from strongroom_security.publickeys import PublicKey
from strongroom_security.recipients.base import check_kind
from strongroom_security.signers.base import Signer, is_signer, sign_checked

__all__ = ["SignerContract"]

_MESSAGE = b"DSSEv1 28 application/vnd.in-toto+json 2 {}"


class SignerContract:
    """One signer, and another one of its kind."""

    within_s: ClassVar[float] = 20.0
    """Seconds that are plenty for one call to this keeper."""

    short_s: ClassVar[float] = 0.5
    """Seconds after which a keeper that never answers is given up."""

    messages: ClassVar[tuple[bytes, ...]] = (
        _MESSAGE,
        b"",
        b"\0",
        b"\xff\xfe no text",
        bytes(32),  # of the length of a hash, and none
        bytes(48),
        bytes(4097),  # one more than AWS KMS takes of a message
        b"resource " * 200_000,
    )

    @pytest.fixture
    def signer(self) -> Signer:
        """The signer under test."""
        raise NotImplementedError("a subclass's `signer` fixture makes the signer under test")

    @pytest.fixture
    def again(self) -> Signer:
        """The same key, opened once more: as another process or machine would."""
        raise NotImplementedError("a subclass's `again` fixture opens the same key once more")

    @pytest.fixture
    def stranger(self) -> Signer:
        """A signer of the same kind that holds another key."""
        raise NotImplementedError("a subclass's `stranger` fixture makes a signer with another key")

    @pytest.fixture
    def silent(self) -> Signer | None:
        """The signer with a keeper that accepts calls and never answers; None: it asks nobody."""
        return None

    def secrets(self, signer: Signer) -> list[bytes]:
        """What must never be shown: tokens, passphrases, a key in memory."""
        return []

    # Signing

    @pytest.mark.parametrize("position", range(len(messages)))
    def test_any_message_is_signed(self, signer: Signer, position: int) -> None:
        message = self.messages[position]
        signature = signer.sign(message, within_s=self.within_s)
        assert type(signature) is bytes
        assert signer.public_key.verify(message, signature)

    def test_a_signature_is_over_its_message_alone(self, signer: Signer) -> None:
        signature = signer.sign(_MESSAGE, within_s=self.within_s)
        for other in (b"", _MESSAGE[:-1], _MESSAGE + b"\0", b" " + _MESSAGE, _MESSAGE.swapcase()):
            assert not signer.public_key.verify(other, signature)

    def test_a_signature_is_by_its_key_alone(self, signer: Signer, stranger: Signer) -> None:
        signature = signer.sign(_MESSAGE, within_s=self.within_s)
        assert not stranger.public_key.verify(_MESSAGE, signature)
        signature = stranger.sign(_MESSAGE, within_s=self.within_s)
        assert not signer.public_key.verify(_MESSAGE, signature)

    def test_what_another_process_signs_this_one_verifies(self, signer: Signer, again: Signer) -> None:
        signature = again.sign(_MESSAGE, within_s=self.within_s)
        assert signer.public_key.verify(_MESSAGE, signature)

    def test_what_it_answers_is_what_strongroom_accepts(self, signer: Signer) -> None:
        signature = sign_checked(signer, _MESSAGE, within_s=self.within_s)
        assert signer.public_key.verify(_MESSAGE, signature)

    # What it is called

    def test_it_has_what_a_signer_has(self, signer: Signer) -> None:
        assert is_signer(signer)
        assert check_kind(signer.kind) == signer.kind
        assert isinstance(signer.uri, str)
        assert isinstance(signer.public_key, PublicKey)

    def test_the_key_is_the_same_each_time_and_everywhere(
        self, signer: Signer, again: Signer, stranger: Signer
    ) -> None:
        before = signer.public_key
        signer.sign(_MESSAGE, within_s=self.within_s)
        assert before == signer.public_key == again.public_key
        assert stranger.public_key != before
        assert (again.kind, stranger.kind) == (signer.kind, signer.kind)

    def test_its_first_certificate_is_for_its_key(self, signer: Signer) -> None:
        assert type(signer.certificates) is tuple
        certified = [x509.load_der_x509_certificate(each).public_key() for each in signer.certificates]
        for leaf in certified[:1]:
            assert isinstance(leaf, ec.EllipticCurvePublicKey)
            assert PublicKey.of(leaf) == signer.public_key

    # Where it may be used

    def test_several_threads_use_it_at_once(self, signer: Signer) -> None:
        errors: list[BaseException] = []

        def use(number: int) -> None:
            try:
                for turn in range(3):
                    message = b"%d %d" % (number, turn)
                    signature = signer.sign(message, within_s=self.within_s)
                    assert signer.public_key.verify(message, signature)
            except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
                errors.append(error)

        threads = [threading.Thread(target=use, args=(number,), daemon=True) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        if errors:
            raise errors[0]

    def test_a_forked_child_uses_it(self, signer: Signer, again: Signer) -> None:
        # Used before the fork, so that what must not be shared by two processes is there to be shared.
        signer.sign(_MESSAGE, within_s=self.within_s)
        # One has asked for its public key, and the other has not.
        for each in (signer, again):
            signature = in_child(partial(each.sign, _MESSAGE, within_s=self.within_s))
            assert signer.public_key.verify(_MESSAGE, signature)
        # Nor did the children take away what the parent needs.
        assert signer.public_key.verify(_MESSAGE, signer.sign(_MESSAGE, within_s=self.within_s))

    # What is shown

    def test_neither_its_text_nor_its_pickle_shows_a_secret(self, signer: Signer) -> None:
        signer.sign(_MESSAGE, within_s=self.within_s)
        secrets = self.secrets(signer)
        shown = [repr(signer), str(signer), signer.uri, repr(signer.public_key), repr(signer.certificates)]
        assert not any(shows(text.encode(), secrets) for text in shown)
        for serialise in (pickle.dumps, copy.copy, copy.deepcopy):
            assert not shows(outcome(serialise, signer), secrets)

    # How long it takes

    def test_a_keeper_that_never_answers_is_given_up(self, silent: Signer | None) -> None:
        if silent is None:
            pytest.skip("it asks nobody, so nobody can be silent")
        began = time.monotonic()
        with pytest.raises(KeyServiceError) as caught:
            silent.sign(_MESSAGE, within_s=self.short_s)
        assert silent.uri in str(caught.value)
        text = "".join(traceback.format_exception(caught.value)).encode()
        assert not shows(text, self.secrets(silent))
        with pytest.raises(KeyServiceError):
            sign_checked(silent, _MESSAGE, within_s=self.short_s)
        assert time.monotonic() - began < 2 * self.short_s + 10
