"""What every recipient must do, as tests that its author runs.

Subclass `RecipientContract` in a test module, and say how the recipient is made::

    class TestMyVault(RecipientContract):
        @pytest.fixture
        def recipient(self):
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

        def secrets(self, recipient):
            return [recipient.token.encode()]

Where the recipient itself cannot open, as a public key, say with a fixture ``identity`` who can.
It needs pytest.
"""
# ruff: noqa: S101 - these are tests, and assert is how a test speaks

from __future__ import annotations

import copy
import pickle  # noqa: TID251 - what holds a key must refuse it
import re
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import pytest

from strongroom.errors import IntegrityError, KeyServiceError, NoKeyError
from strongroom_security.contracts import WAIT_S, in_child, outcome, shows
from strongroom_security.fields import Context
from strongroom_security.recipients.base import (
    KEY_BYTES,
    MAX_WRAPPED_BYTES,
    Identity,
    Recipient,
    check_id,
    check_kind,
)
from strongroom_security.secret import Secret

__all__ = ["RecipientContract"]

_CHECKPOINT = Context(run="run-7f", launch=3, step=1200, attempt="0123456789abcdef")
_FILE = replace(_CHECKPOINT, path="00000-00.safetensors.floe")


class RecipientContract:
    """One recipient, and whoever can open what was wrapped for it."""

    within_s: ClassVar[float] = 20.0
    """Seconds that are plenty for one call to this keeper."""

    short_s: ClassVar[float] = 0.5
    """Seconds after which a keeper that never answers is given up."""

    others: ClassVar[tuple[Context, ...]] = (
        replace(_CHECKPOINT, run="run-7g"),
        replace(_CHECKPOINT, run="run-7"),
        replace(_CHECKPOINT, launch=4),
        replace(_CHECKPOINT, step=1201),
        replace(_CHECKPOINT, step=120),
        replace(_CHECKPOINT, attempt="0123456789abcdee"),
        _FILE,
    )

    @pytest.fixture
    def recipient(self) -> Recipient:
        """The recipient under test."""
        raise NotImplementedError("a subclass's `recipient` fixture makes the recipient under test")

    @pytest.fixture
    def again(self) -> Recipient:
        """The same key, opened once more: as another process or machine would."""
        raise NotImplementedError("a subclass's `again` fixture opens the same key once more")

    @pytest.fixture
    def stranger(self) -> Identity:
        """An identity of the same kind that holds another key."""
        raise NotImplementedError("a subclass's `stranger` fixture makes an identity with another key")

    @pytest.fixture
    def identity(self, recipient: Recipient) -> Identity:
        """Who can open; by default the recipient itself."""
        assert isinstance(recipient, Identity), "say with a fixture `identity` who opens"
        return recipient

    @pytest.fixture
    def silent(self) -> Recipient | None:
        """The recipient with a keeper that accepts calls and never answers; None: it asks nobody."""
        return None

    def secrets(self, recipient: Recipient) -> list[bytes]:
        """What must never be shown besides the keys that are wrapped: tokens, a key in memory."""
        return []

    # Wrapping and opening

    def test_what_is_wrapped_is_unwrapped(self, recipient: Recipient, identity: Identity) -> None:
        for context in (_CHECKPOINT, _FILE):
            key = Secret.draw(KEY_BYTES)
            wrapped = recipient.wrap(key, context, within_s=self.within_s)
            assert type(wrapped) is bytes
            assert identity.unwrap(wrapped, context, within_s=self.within_s) == key

    def test_a_key_is_not_wrapped_to_the_same_bytes_twice(self, recipient: Recipient) -> None:
        key = Secret.draw(KEY_BYTES)
        wraps = [recipient.wrap(key, _CHECKPOINT, within_s=self.within_s) for _ in range(3)]
        assert len(set(wraps)) == 3

    def test_a_wrapped_key_has_a_bounded_length_and_does_not_show_the_key(self, recipient: Recipient) -> None:
        key = Secret.draw(KEY_BYTES)
        wrapped = recipient.wrap(key, _CHECKPOINT, within_s=self.within_s)
        assert KEY_BYTES <= len(wrapped) <= MAX_WRAPPED_BYTES
        assert not shows(wrapped, [key.reveal(), *self.secrets(recipient)])

    def test_another_process_opens_what_this_one_wrapped(
        self, recipient: Recipient, again: Recipient
    ) -> None:
        if not isinstance(again, Identity):
            pytest.skip("it can wrap and never open")
        key = Secret.draw(KEY_BYTES)
        wrapped = recipient.wrap(key, _CHECKPOINT, within_s=self.within_s)
        assert again.unwrap(wrapped, _CHECKPOINT, within_s=self.within_s) == key

    # What is refused

    @pytest.mark.parametrize("position", range(len(others)))
    def test_a_key_opens_in_no_other_context(
        self, recipient: Recipient, identity: Identity, position: int
    ) -> None:
        key = Secret.draw(KEY_BYTES)
        other = self.others[position]
        wrapped = recipient.wrap(key, _CHECKPOINT, within_s=self.within_s)
        self._refuses(recipient, identity, wrapped, other, key)
        wrapped = recipient.wrap(key, other, within_s=self.within_s)
        self._refuses(recipient, identity, wrapped, _CHECKPOINT, key)

    def test_a_wrapped_key_that_was_changed_is_refused(
        self, recipient: Recipient, identity: Identity
    ) -> None:
        key = Secret.draw(KEY_BYTES)
        wrapped = recipient.wrap(key, _CHECKPOINT, within_s=self.within_s)
        for changed in _changed(wrapped):
            self._refuses(recipient, identity, changed, _CHECKPOINT, key)

    @pytest.mark.parametrize(
        "wrapped", (b"", b"\0", b"{}", b"vault:v1:", b"\xff" * 60, bytes(MAX_WRAPPED_BYTES))
    )
    def test_what_was_never_wrapped_is_refused(
        self, recipient: Recipient, identity: Identity, wrapped: bytes
    ) -> None:
        self._refuses(recipient, identity, wrapped, _CHECKPOINT, Secret.draw(KEY_BYTES))

    def test_another_key_does_not_open_it(self, recipient: Recipient, stranger: Identity) -> None:
        key = Secret.draw(KEY_BYTES)
        wrapped = recipient.wrap(key, _CHECKPOINT, within_s=self.within_s)
        self._refuses(recipient, stranger, wrapped, _CHECKPOINT, key)

    # What it is called

    def test_the_id_is_one_and_begins_with_the_kind(self, recipient: Recipient, identity: Identity) -> None:
        assert check_id(recipient.id, check_kind(recipient.kind)) == recipient.id
        assert (identity.id, identity.kind) == (recipient.id, recipient.kind)

    def test_the_id_is_the_key_s_own(
        self, recipient: Recipient, again: Recipient, stranger: Identity
    ) -> None:
        assert again.id == recipient.id
        assert stranger.id != recipient.id
        assert stranger.kind == recipient.kind

    def test_the_id_tells_nothing_of_where_the_key_is(self, recipient: Recipient) -> None:
        known = set(re.split("[^a-z0-9]+", recipient.kind))
        told = [
            word
            for word in re.split("[^a-z0-9]+", recipient.uri.lower())
            if len(word) >= 6 and word in recipient.id and word not in known
        ]
        assert not told

    # Where it may be used

    def test_several_threads_use_it_at_once(self, recipient: Recipient, identity: Identity) -> None:
        errors: list[BaseException] = []

        def use() -> None:
            try:
                for _ in range(3):
                    key = Secret.draw(KEY_BYTES)
                    wrapped = recipient.wrap(key, _CHECKPOINT, within_s=self.within_s)
                    assert identity.unwrap(wrapped, _CHECKPOINT, within_s=self.within_s) == key
            except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
                errors.append(error)

        threads = [threading.Thread(target=use, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        if errors:
            raise errors[0]

    def test_a_forked_child_uses_it(self, recipient: Recipient, identity: Identity) -> None:
        # Used before the fork, so that what must not be shared by two processes is there to be shared.
        recipient.wrap(Secret.draw(KEY_BYTES), _CHECKPOINT, within_s=self.within_s)
        key = Secret.draw(KEY_BYTES)
        wrapped = in_child(lambda: recipient.wrap(key, _CHECKPOINT, within_s=self.within_s))
        assert identity.unwrap(wrapped, _CHECKPOINT, within_s=self.within_s) == key
        opened = in_child(lambda: identity.unwrap(wrapped, _CHECKPOINT, within_s=self.within_s).reveal())
        assert Secret(opened) == key

    # What is shown

    def test_neither_its_text_nor_its_pickle_shows_a_secret(
        self, recipient: Recipient, identity: Identity
    ) -> None:
        for each in (recipient, identity):
            secrets = self.secrets(each) if isinstance(each, Recipient) else []
            shown = [repr(each), str(each), each.uri, each.id]
            assert not any(shows(text.encode(), secrets) for text in shown)
            for serialise in (pickle.dumps, copy.copy, copy.deepcopy):
                assert not shows(outcome(serialise, each), secrets)

    # How long it takes

    def test_a_keeper_that_never_answers_is_given_up(self, silent: Recipient | None) -> None:
        if silent is None:
            pytest.skip("it asks nobody, so nobody can be silent")
        began = time.monotonic()
        with pytest.raises(KeyServiceError) as caught:
            silent.wrap(Secret.draw(KEY_BYTES), _CHECKPOINT, within_s=self.short_s)
        assert silent.uri in str(caught.value)
        if isinstance(silent, Identity):
            with pytest.raises(KeyServiceError):
                silent.unwrap(bytes(60), _CHECKPOINT, within_s=self.short_s)
        assert time.monotonic() - began < 2 * self.short_s + 10

    def _refuses(
        self, recipient: Recipient, identity: Identity, wrapped: bytes, context: Context, key: Secret
    ) -> None:
        """Damage or no key; never "out of reach", which would say that trying again helps."""
        with pytest.raises((IntegrityError, NoKeyError)) as caught:
            identity.unwrap(wrapped, context, within_s=self.within_s)
        text = "".join(traceback.format_exception(caught.value)).encode()
        assert not shows(text, [key.reveal(), *self.secrets(recipient)])


def _changed(wrapped: bytes) -> Iterator[bytes]:
    """Wrapped bytes with a bit flipped here and there, cut, and grown."""
    size = len(wrapped)
    for position in sorted({0, 1, 7, 12, size // 3, size // 2, size - 17, size - 2, size - 1}):
        if 0 <= position < size:
            yield wrapped[:position] + bytes([wrapped[position] ^ 1]) + wrapped[position + 1 :]
    yield wrapped[:-1]
    yield wrapped[1:]
    yield wrapped[: size // 2]
    yield wrapped + b"\0"
    yield wrapped + wrapped
