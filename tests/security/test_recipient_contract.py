"""The contract that a third party runs: each of its tests fails on a recipient that breaks what it says."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from _pytest.outcomes import Failed

from strongroom.errors import IntegrityError, KeyServiceError
from strongroom_security.fields import Context
from strongroom_security.recipients.base import MAX_WRAPPED_BYTES, opaque_id
from strongroom_security.recipients.file import FileKey
from strongroom_security.secret import Secret
from strongroom_security.testing import RecipientContract

KEK = bytes(range(100, 132))


class Sound:
    """A recipient that keeps the contract; each of those below breaks one word of it."""

    kind = "sound"

    def __init__(self, kek: bytes = KEK) -> None:
        self._inner = FileKey(Secret(kek), uri="file:inner")
        self._kek = kek
        self.id = opaque_id(self.kind, self._inner.id.encode())
        self.uri = "sound:somewhere/secretplace"

    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        return self._inner.wrap(key, context, within_s=within_s)

    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        return self._inner.unwrap(wrapped, context, within_s=within_s)

    def __repr__(self) -> str:
        return "<Sound>"

    def __reduce__(self) -> Any:
        raise TypeError("not pickled")


class Contract(RecipientContract):
    __test__ = False
    within_s = 5.0

    def secrets(self, recipient: Any) -> list[bytes]:
        return [KEK]


def holds(name: str, recipient: Any, *, stranger: Any = None, again: Any = None, silent: Any = None) -> None:
    """Run one test of the contract."""
    contract = Contract()
    given: dict[str, Any] = {
        "recipient": recipient,
        "identity": recipient,
        "again": again or type(recipient)(),
        "stranger": stranger or Sound(b"x" * 32),
        "silent": silent,
    }
    test = getattr(contract, f"test_{name}")
    code = test.__func__.__code__
    wanted = code.co_varnames[1 : code.co_argcount]
    if "position" in wanted:
        for position in range(len(contract.others)):
            test(**{key: given[key] for key in wanted if key in given}, position=position)
    elif "wrapped" in wanted:
        for wrapped in (b"", b"{}", b"\xff" * 60):
            test(**{key: given[key] for key in wanted if key in given}, wrapped=wrapped)
    else:
        test(**{key: given[key] for key in wanted})


TESTS = [
    "what_is_wrapped_is_unwrapped",
    "a_key_is_not_wrapped_to_the_same_bytes_twice",
    "a_wrapped_key_has_a_bounded_length_and_does_not_show_the_key",
    "another_process_opens_what_this_one_wrapped",
    "a_key_opens_in_no_other_context",
    "a_wrapped_key_that_was_changed_is_refused",
    "what_was_never_wrapped_is_refused",
    "another_key_does_not_open_it",
    "the_id_is_one_and_begins_with_the_kind",
    "the_id_is_the_key_s_own",
    "the_id_tells_nothing_of_where_the_key_is",
    "several_threads_use_it_at_once",
    "a_forked_child_uses_it",
    "neither_its_text_nor_its_pickle_shows_a_secret",
]


@pytest.mark.parametrize("name", TESTS)
def test_a_sound_recipient_passes(name: str) -> None:
    holds(name, Sound())


def test_every_test_of_the_contract_is_tried_here() -> None:
    found = {name.removeprefix("test_") for name in dir(RecipientContract) if name.startswith("test_")}
    assert found == {*TESTS, "a_keeper_that_never_answers_is_given_up"}


class LosesKeys(Sound):
    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        super().unwrap(wrapped, context, within_s=within_s)
        return Secret.draw()


class Repeats(Sound):
    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        self._first = getattr(self, "_first", None) or super().wrap(key, context, within_s=within_s)
        return self._first


class WrapsInClear(Sound):
    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        return super().wrap(key, context, within_s=within_s) + key.reveal()[:12]


class WrapsTooLong(Sound):
    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        return super().wrap(key, context, within_s=within_s) + bytes(MAX_WRAPPED_BYTES)


class KeepsKeysHere(Sound):
    def __init__(self) -> None:
        super().__init__(os.urandom(32))


class ForgetsTheContext(Sound):
    ignored = ("run", "launch", "step", "attempt", "path")
    blank = Context(run="r", launch=1, step=0, attempt="0" * 16)

    def _blank(self, context: Context) -> Context:
        return replace(context, **{field: getattr(self.blank, field) for field in self.ignored})

    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        return super().wrap(key, self._blank(context), within_s=within_s)

    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        return super().unwrap(wrapped, self._blank(context), within_s=within_s)


class ForgetsTheRun(ForgetsTheContext):
    ignored = ("run",)


class ForgetsTheStep(ForgetsTheContext):
    ignored = ("step",)


class ForgetsTheAttempt(ForgetsTheContext):
    ignored = ("attempt",)


class ForgetsTheLaunch(ForgetsTheContext):
    ignored = ("launch",)


class ForgetsThePath(ForgetsTheContext):
    ignored = ("path",)


class ReadsTheBeginning(Sound):
    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        return super().unwrap(wrapped[:60], context, within_s=within_s)


class CallsDamageAnOutage(Sound):
    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        try:
            return super().unwrap(wrapped, context, within_s=within_s)
        except IntegrityError:
            raise KeyServiceError("try again") from None


class ShowsItsKeyInErrors(Sound):
    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        try:
            return super().unwrap(wrapped, context, within_s=within_s)
        except IntegrityError as error:
            raise IntegrityError(f"with {self._kek.hex()}") from error


class ShowsItsKeyInCauses(Sound):
    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        try:
            raise ValueError(self._kek)
        except ValueError as cause:
            if len(wrapped) != 60:
                raise IntegrityError("wrong") from cause
        return super().unwrap(wrapped, context, within_s=within_s)


class OpensAnything(Sound):
    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        return Secret(b"k" * 32)


class IsNamedOddly(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.id = "other-0123456789abcdef"


class IsNamedAnew(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.id = opaque_id(self.kind, os.urandom(8))


class IsNamedByItsPlace(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.id = "sound-secretplace"


class IsForOneThread(Sound):
    def __init__(self) -> None:
        super().__init__()
        self._busy = threading.Lock()

    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("in use")
        time.sleep(0.05)
        self._busy.release()
        return super().wrap(key, context, within_s=within_s)


class IsForOneProcess(Sound):
    def __init__(self) -> None:
        super().__init__()
        self._made_in = os.getpid()

    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        if os.getpid() != self._made_in:
            raise RuntimeError("a socket of another process")
        return super().wrap(key, context, within_s=within_s)


class ShowsItsKey(Sound):
    def __repr__(self) -> str:
        return f"<Sound {self._kek!r}>"


class PicklesItsKey(Sound):
    def __reduce__(self) -> Any:
        return (bytes, (self._kek,))


BROKEN: list[tuple[Callable[[], Sound], str]] = [
    (LosesKeys, "what_is_wrapped_is_unwrapped"),
    (Repeats, "a_key_is_not_wrapped_to_the_same_bytes_twice"),
    (WrapsInClear, "a_wrapped_key_has_a_bounded_length_and_does_not_show_the_key"),
    (WrapsTooLong, "a_wrapped_key_has_a_bounded_length_and_does_not_show_the_key"),
    (KeepsKeysHere, "another_process_opens_what_this_one_wrapped"),
    (ForgetsTheRun, "a_key_opens_in_no_other_context"),
    (ForgetsTheLaunch, "a_key_opens_in_no_other_context"),
    (ForgetsTheStep, "a_key_opens_in_no_other_context"),
    (ForgetsTheAttempt, "a_key_opens_in_no_other_context"),
    (ForgetsThePath, "a_key_opens_in_no_other_context"),
    (ReadsTheBeginning, "a_wrapped_key_that_was_changed_is_refused"),
    (CallsDamageAnOutage, "a_wrapped_key_that_was_changed_is_refused"),
    (ShowsItsKeyInErrors, "a_wrapped_key_that_was_changed_is_refused"),
    (ShowsItsKeyInCauses, "what_was_never_wrapped_is_refused"),
    (OpensAnything, "what_was_never_wrapped_is_refused"),
    (IsNamedOddly, "the_id_is_one_and_begins_with_the_kind"),
    (IsNamedAnew, "the_id_is_the_key_s_own"),
    (IsNamedByItsPlace, "the_id_tells_nothing_of_where_the_key_is"),
    (IsForOneThread, "several_threads_use_it_at_once"),
    (IsForOneProcess, "a_forked_child_uses_it"),
    (ShowsItsKey, "neither_its_text_nor_its_pickle_shows_a_secret"),
    (PicklesItsKey, "neither_its_text_nor_its_pickle_shows_a_secret"),
]


@pytest.mark.parametrize(("make", "name"), BROKEN, ids=[make.__name__ for make, _ in BROKEN])
def test_a_recipient_that_breaks_its_word_fails(make: Callable[[], Sound], name: str) -> None:
    with pytest.raises((AssertionError, Failed, IntegrityError, KeyServiceError, RuntimeError)):
        holds(name, make())


def test_a_key_that_another_one_opens_fails() -> None:
    with pytest.raises(Failed):
        holds("another_key_does_not_open_it", Sound(), stranger=Sound())


class IsSilent(Sound):
    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        raise KeyServiceError(f"{self.uri} did not answer")

    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        raise KeyServiceError(f"{self.uri} did not answer")


class IsSilentAndNamesNobody(IsSilent):
    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        raise KeyServiceError("no answer")


class CallsSilenceDamage(IsSilent):
    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        raise IntegrityError("no answer")


def test_a_keeper_that_never_answers_is_given_up() -> None:
    name = "a_keeper_that_never_answers_is_given_up"
    holds(name, Sound(), silent=IsSilent())
    with pytest.raises(pytest.skip.Exception):
        holds(name, Sound())
    with pytest.raises(AssertionError):
        holds(name, Sound(), silent=IsSilentAndNamesNobody())
    with pytest.raises(IntegrityError):
        holds(name, Sound(), silent=CallsSilenceDamage())
    with pytest.raises(Failed):
        holds(name, Sound(), silent=Sound())


def test_a_keeper_that_is_waited_for_too_long_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1000.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now, 1000.0))
    with pytest.raises(AssertionError):
        holds("a_keeper_that_never_answers_is_given_up", Sound(), silent=IsSilent())
