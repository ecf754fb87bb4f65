"""The keyring as a document: one spelling, a bounded and strict reader, create-once generations."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom import canonical, layout
from strongroom.digest import Digest, sha256_of
from strongroom.errors import (
    AccessDeniedError,
    ConfigError,
    FormatError,
    ObjectNotFoundError,
    StoreUnavailableError,
    UnsupportedFormatError,
)
from strongroom.layout import CheckpointName
from strongroom.stores.base import ObjectInfo
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom_security.fields import Context
from strongroom_security.keyring import (
    KEYRING_BOUNDS,
    MAX_RECIPIENTS,
    Keyring,
    RecipientEntry,
    WrapMode,
    WrappedKey,
    bounds_for,
    newest_first,
    read_generation,
    write_generation,
)
from strongroom_security.recipients.base import (
    MAX_WRAPPED_BYTES,
    check_id,
    check_kind,
    check_wrapped,
    opaque_id,
)

NAME = CheckpointName(launch=3, step=12, attempt="0123456789abcdef")
UNDER_ONE = Keyring(
    run="run-1",
    name=NAME,
    generation=1,
    previous=None,
    created_at_ms=1_700_000_000_000,
    wrap="checkpoint",
    recipients=(
        RecipientEntry(id="file-0123456789abcdef", kind="file", wrapped=b"\1" * 60),
        RecipientEntry(id="hpke-p256-0123456789abcdef", kind="hpke-p256", wrapped=b"\2" * 113),
    ),
    keys=(
        WrappedKey(path="00000-00.safetensors.floe", wrapped=(b"\3" * 60,)),
        WrappedKey(path="index.safetensors.floe", wrapped=(b"\4" * 60,)),
    ),
)
DIRECT = replace(
    UNDER_ONE,
    wrap="direct",
    recipients=tuple(replace(entry, wrapped=None) for entry in UNDER_ONE.recipients),
    keys=tuple(replace(key, wrapped=(b"\5" * 60, b"\6" * 113)) for key in UNDER_ONE.keys),
)
KEYRINGS = pytest.mark.parametrize("keyring", (UNDER_ONE, DIRECT), ids=lambda keyring: keyring.wrap)


def forged(keyring: Keyring, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The document with its members changed, and its digest made right again."""
    members = json.loads(keyring.encode())
    members.pop(canonical.SELF_DIGEST)
    change(members)
    return canonical.with_self_digest(members)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@KEYRINGS
def test_a_keyring_comes_back_as_it_was(keyring: Keyring) -> None:
    assert Keyring.decode(keyring.encode(), "it") == keyring
    assert Keyring.decode(keyring.encode(), "it").encode() == keyring.encode()


def test_a_keyring_says_where_it_belongs_and_who_can_open_it() -> None:
    assert UNDER_ONE.context == Context(run="run-1", launch=3, step=12, attempt="0123456789abcdef")
    assert UNDER_ONE.position("hpke-p256-0123456789abcdef") == 1
    assert UNDER_ONE.position("file-ffffffffffffffff") is None


@st.composite
def keyrings(draw: st.DrawFn) -> Keyring:
    kinds = st.sampled_from(["file", "aws-kms", "hpke-mlkem768-x25519"])
    tails = st.text("0123456789abcdef", min_size=8, max_size=32)
    recipients = draw(st.dictionaries(tails, kinds, min_size=1, max_size=5))
    paths = draw(
        st.sets(st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,20}(/[a-z]{1,5})?", fullmatch=True), max_size=5)
    )
    wrapped = st.binary(min_size=1, max_size=200)
    direct = draw(st.booleans())
    generation = draw(st.integers(1, 9999))
    entries = [
        RecipientEntry(id=f"{kind}-{tail}", kind=kind, wrapped=None if direct else draw(wrapped))
        for tail, kind in recipients.items()
    ]
    each = st.lists(wrapped, min_size=len(entries), max_size=len(entries)).map(tuple)
    one = st.binary(min_size=60, max_size=60).map(lambda data: (data,))
    return Keyring(
        run=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True)),
        name=CheckpointName(
            launch=draw(st.integers(1, layout.MAX_LAUNCH)),
            step=draw(st.integers(0, layout.MAX_STEP)),
            attempt="f" * 16,
        ),
        generation=generation,
        previous=None if generation == 1 else sha256_of(draw(st.binary(max_size=4))),
        created_at_ms=draw(st.integers(0, canonical.MAX_INTEGER)),
        wrap="direct" if direct else "checkpoint",
        recipients=tuple(sorted(entries, key=lambda entry: entry.id)),
        keys=tuple(WrappedKey(path=path, wrapped=draw(each if direct else one)) for path in sorted(paths)),
    )


@given(keyrings())
def test_every_keyring_has_one_spelling(keyring: Keyring) -> None:
    data = keyring.encode()
    assert Keyring.decode(data, "it") == keyring
    assert canonical.encode(json.loads(data)) == data


@KEYRINGS
def test_no_byte_can_be_changed_and_none_left_out(keyring: Keyring) -> None:
    data = keyring.encode()
    for position in range(len(data)):
        for bit in (1, 32):
            with pytest.raises(FormatError):
                Keyring.decode(data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :], "it")
        with pytest.raises(FormatError):
            Keyring.decode(data[:position], "it")
        with pytest.raises(FormatError):
            Keyring.decode(data[:position] + data[position + 1 :], "it")
    with pytest.raises(FormatError):
        Keyring.decode(data + b" ", "it")


@given(st.binary(max_size=200))
def test_what_is_no_keyring_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        Keyring.decode(data, "it")


@KEYRINGS
def test_every_member_is_needed_and_none_may_have_another_type(keyring: Keyring) -> None:
    members = json.loads(keyring.encode())
    members.pop(canonical.SELF_DIGEST)
    allowed = (("previous", None), ("created_at_ms", 2**53 - 1), ("keys", []), ("run", "text"))
    for member in members:
        with pytest.raises(FormatError, match=member):
            Keyring.decode(forged(keyring, lambda members, member=member: members.pop(member)), "it")
        for other in (None, True, -1, 2**53 - 1, "", "text", [], {}, [None], [{}], {"": 0}):
            if (member, other) not in allowed:
                with pytest.raises(FormatError):
                    Keyring.decode(
                        forged(keyring, lambda members, new={member: other}: members.update(new)), "it"
                    )


@KEYRINGS
@pytest.mark.parametrize("part", ("recipients", "keys"))
def test_every_member_of_an_entry_is_needed_and_none_may_have_another_type(
    keyring: Keyring, part: str
) -> None:
    for member in json.loads(keyring.encode())[part][0]:
        with pytest.raises(FormatError):
            Keyring.decode(forged(keyring, lambda members, member=member: members[part][0].pop(member)), "it")
        for other in (None, True, 7, "", "!", [], [[]], {}):
            with pytest.raises(FormatError):
                Keyring.decode(
                    forged(
                        keyring,
                        lambda members, member=member, other=other: members[part][0].update({member: other}),
                    ),
                    "it",
                )


@KEYRINGS
def test_a_note_is_ignored_and_any_other_further_member_is_refused(keyring: Keyring) -> None:
    places: list[Callable[[dict[str, Any]], dict[str, Any]]] = [
        lambda members: members,
        lambda members: members["recipients"][0],
        lambda members: members["keys"][0],
    ]
    for place in places:
        noted = forged(keyring, lambda members, place=place: place(members).update({"x-ticket": [1, None]}))
        assert Keyring.decode(noted, "it") == keyring
        for member in ("endpoint", "arn", "uri", "module", "xticket", "X-ticket"):
            with pytest.raises(FormatError, match=f"unknown member '{member}'"):
                Keyring.decode(
                    forged(
                        keyring,
                        lambda members, place=place, member=member: place(members).update({member: "x"}),
                    ),
                    "it",
                )


def test_a_keyring_of_another_format_is_named_and_not_called_damage() -> None:
    with pytest.raises(UnsupportedFormatError, match=r"it is in format 9\.7"):
        Keyring.decode(forged(UNDER_ONE, lambda members: members.update(format="9.7")), "it")
    # It may say anything else.
    with pytest.raises(UnsupportedFormatError):
        Keyring.decode(forged(UNDER_ONE, lambda members: members.update(format="9.7", news=1)), "it")


BAD_PATHS = ("", "/a", "../a", "a/../b", "a//b", ".a", "a/.b", "a\\b", "a b", "a\n", "ä", "a/" * 300 + "a")


@pytest.mark.parametrize("path", BAD_PATHS)
def test_a_path_that_climbs_or_is_absolute_is_refused(path: str) -> None:
    with pytest.raises(FormatError):
        Keyring.decode(forged(UNDER_ONE, lambda members: members["keys"][0].update(path=path)), "it")


@KEYRINGS
def test_entries_stand_once_each_and_in_order(keyring: Keyring) -> None:
    for part in ("recipients", "keys"):
        with pytest.raises(FormatError, match="once each, in order"):
            Keyring.decode(forged(keyring, lambda members, part=part: members[part].reverse()), "it")
        with pytest.raises(FormatError, match="once each, in order"):
            Keyring.decode(
                forged(keyring, lambda members, part=part: members[part].insert(0, members[part][0])), "it"
            )


def test_a_wrapped_key_has_one_spelling() -> None:
    good = b64(b"\3" * 60)
    odd = b64(b"\3" * 61)  # ends in bits that decoding drops
    for text in (
        good + "====",
        good + " ",
        "\n" + good,
        good[:-1],
        good.replace("A", "-"),
        odd[:-3] + "x==",
        "A=",
        "=",
    ):
        with pytest.raises(FormatError):
            Keyring.decode(
                forged(UNDER_ONE, lambda members, text=text: members["recipients"][0].update(wrapped=text)),
                "it",
            )


def test_the_wraps_fit_the_way_of_wrapping() -> None:
    changes: list[tuple[Keyring, Callable[[dict[str, Any]], Any]]] = [
        (UNDER_ONE, lambda members: members.update(wrap="direct")),
        (DIRECT, lambda members: members.update(wrap="checkpoint")),
        (UNDER_ONE, lambda members: members["keys"][0].update(wrapped=b64(bytes(59)))),
        (UNDER_ONE, lambda members: members["keys"][0].update(wrapped=b64(bytes(61)))),
        (UNDER_ONE, lambda members: members["keys"][0].update(wrapped=[b64(bytes(60))])),
        (DIRECT, lambda members: members["keys"][0]["wrapped"].pop()),
        (DIRECT, lambda members: members["keys"][0]["wrapped"].append(b64(bytes(60)))),
        (DIRECT, lambda members: members["recipients"][0].update(wrapped=b64(bytes(60)))),
        (DIRECT, lambda members: members["keys"][1].update(wrapped=b64(bytes(60)))),
    ]
    for keyring, change in changes:
        with pytest.raises(FormatError):
            Keyring.decode(forged(keyring, change), "it")


def test_sizes_and_counts_are_bounded() -> None:
    longest = b64(bytes(MAX_WRAPPED_BYTES))
    Keyring.decode(forged(UNDER_ONE, lambda members: members["recipients"][0].update(wrapped=longest)), "it")
    for wrapped in (b64(bytes(MAX_WRAPPED_BYTES + 1)), b64(bytes(100_000)), ""):
        with pytest.raises(FormatError):
            Keyring.decode(
                forged(
                    UNDER_ONE,
                    lambda members, wrapped=wrapped: members["recipients"][0].update(wrapped=wrapped),
                ),
                "it",
            )

    def crowd(count: int) -> bytes:
        many = [
            {"id": f"file-{number:08d}", "kind": "file", "wrapped": b64(bytes(60))} for number in range(count)
        ]
        return forged(UNDER_ONE, lambda members: members.update(recipients=many))

    assert len(Keyring.decode(crowd(MAX_RECIPIENTS), "it").recipients) == MAX_RECIPIENTS
    for count in (0, MAX_RECIPIENTS + 1, 1000):
        with pytest.raises(FormatError, match="recipients"):
            Keyring.decode(crowd(count), "it")


def test_it_does_not_nest_deeper_than_it_has_to() -> None:
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(FormatError, match="deep"):
        Keyring.decode(forged(UNDER_ONE, lambda members: members.update({"x-note": deep})), "it")


def test_what_a_reader_would_refuse_is_not_built() -> None:
    for changes in (
        {"generation": 0},
        {"generation": layout.MAX_KEYRING + 1, "previous": sha256_of(b"")},
        {"generation": 2},
        {"previous": sha256_of(b"")},
        {"generation": 2, "previous": Digest("blake3", bytes(32))},
        {"recipients": DIRECT.recipients},
        {"keys": DIRECT.keys},
        {"wrap": "direct", "keys": DIRECT.keys},
        {"created_at_ms": -1},
        {"created_at_ms": 2**53},
        {"run": "no run"},
        {"wrap": "both"},
        {"recipients": ()},
        {"recipients": tuple(reversed(UNDER_ONE.recipients))},
        {"keys": tuple(reversed(UNDER_ONE.keys))},
    ):
        with pytest.raises(FormatError):
            replace(UNDER_ONE, **changes)  # type: ignore[arg-type]


# Ids


@pytest.mark.parametrize(
    "text", ("file-0123", "aws-kms-0123456789abcdef0123456789abcdef", "a" * 64, "a2345678")
)
def test_an_id_is_short_and_plain(text: str) -> None:
    assert check_id(text) == text


@pytest.mark.parametrize(
    "text",
    (
        "",
        "file-01",
        "a" * 65,
        "File-01234",
        "file_01234",
        "file-01234-",
        "-file-01234",
        "file-01234\n",
        "file/01234",
        "fïle-01234",
    ),
)
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        check_id(text)


def test_an_id_begins_with_its_kind() -> None:
    assert check_id("aws-kms-01234567", "aws-kms")
    for kind in ("aws-kms-0", "aws-km", "kms", "file"):
        with pytest.raises(FormatError, match="does not begin with its kind"):
            check_id("aws-kms-01234567", kind)


@pytest.mark.parametrize("kind", ("", "-file", "file-", "File", "f" * 33, "a_b"))
def test_what_is_no_kind_is_refused(kind: str) -> None:
    with pytest.raises(FormatError):
        check_kind(kind)


def test_an_opaque_id_tells_keys_apart_and_nothing_of_their_names() -> None:
    ids = {
        opaque_id("file", b"one"),
        opaque_id("file", b"two"),
        opaque_id("file", b"on", b"e"),
        opaque_id("file", b"o", b"ne"),
        opaque_id("aws-kms", b"one"),
    }
    assert len(ids) == 5
    assert opaque_id("file", b"one") == opaque_id("file", b"one")
    assert len(opaque_id("f" * 31, b"x")) == 64
    with pytest.raises(ConfigError):
        opaque_id("file")


def test_a_wrapped_key_that_no_keyring_may_hold_is_refused() -> None:
    assert check_wrapped(b"x", "file:kek.key") == b"x"
    for wrapped in (b"", bytes(MAX_WRAPPED_BYTES + 1)):
        with pytest.raises(FormatError, match=r"file:kek\.key"):
            check_wrapped(wrapped, "file:kek.key")


@pytest.mark.parametrize("wrap", ("checkpoint", "direct"))
@pytest.mark.parametrize("files", (1, 40))
def test_the_largest_keyring_of_a_checkpoint_s_files_is_within_their_bounds(
    wrap: WrapMode, files: int
) -> None:
    longest = bytes(MAX_WRAPPED_BYTES)
    is_direct = wrap == "direct"
    entries = tuple(
        RecipientEntry(id=f"keeper-{number:057d}", kind="keeper", wrapped=None if is_direct else longest)
        for number in range(MAX_RECIPIENTS)
    )
    paths = [f"{number:05d}".ljust(512, "x") for number in range(files)]
    wrapped = (longest,) * MAX_RECIPIENTS if is_direct else (bytes(60),)
    keys = tuple(WrappedKey(path=path, wrapped=wrapped) for path in paths)
    keyring = replace(UNDER_ONE, wrap=wrap, recipients=entries, keys=keys)
    assert Keyring.decode(keyring.encode(), "it", bounds_for(paths)) == keyring


def test_a_keyring_beyond_what_the_checkpoint_s_files_need_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounds = bounds_for([key.path for key in UNDER_ONE.keys])
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    store = MemoryStore()
    store.put(layout.keyring_key(NAME, 1), b" " * (bounds.length_bytes + 1))
    with pytest.raises(FormatError, match=f"at most {bounds.length_bytes} were expected"):
        read_generation(store, NAME, 1, limit_bytes=bounds.length_bytes)
    with pytest.raises(FormatError, match=f"at most {bounds.length_bytes} are read"):
        Keyring.decode(b" " * (bounds.length_bytes + 1), "it", bounds)
    with pytest.raises(FormatError, match=f"more than {bounds.items} items"):
        Keyring.decode(b"[" + b"0," * bounds.items + b"0]", "it", bounds)
    assert bounds.length_bytes < 1 << 22
    assert bounds_for(["a"] * 1_000_000) == KEYRING_BOUNDS


# Generations


def next_one(keyring: Keyring) -> Keyring:
    return keyring.followed_by(created_at_ms=keyring.created_at_ms + 1, recipients=keyring.recipients)


def test_a_generation_names_the_one_before_it_by_its_bytes() -> None:
    second = next_one(UNDER_ONE)
    assert (second.generation, second.previous) == (2, sha256_of(UNDER_ONE.encode()))
    assert second.keys == UNDER_ONE.keys
    third = second.followed_by(
        created_at_ms=9, recipients=reversed(second.recipients), keys=reversed(second.keys)
    )
    assert (third.generation, third.previous) == (3, sha256_of(second.encode()))
    assert third.recipients == UNDER_ONE.recipients
    assert third.keys == UNDER_ONE.keys
    assert Keyring.decode(third.encode(), "it") == third


@pytest.mark.parametrize("kind", ("memory", "local"))
def test_generations_are_created_once_and_read_newest_first(kind: str, tmp_path: Path) -> None:
    store = MemoryStore() if kind == "memory" else LocalStore(tmp_path)
    assert newest_first(store, NAME) == [1]
    with pytest.raises(ObjectNotFoundError):
        read_generation(store, NAME, 1)
    second = next_one(UNDER_ONE)
    assert write_generation(store, UNDER_ONE)
    assert write_generation(store, second)
    assert not write_generation(store, replace(second, created_at_ms=5))
    store.put(f"{NAME.folder}/keyring/0010.json", b"{}")
    for other in ("0000.json", "00002.json", "2.json", "note.txt", "0003.json.bak", "deeper/0004.json"):
        store.put(f"{NAME.folder}/keyring/{other}", b"{}")
    assert newest_first(store, NAME) == [10, 2, 1]
    assert read_generation(store, NAME, 2) == second.encode()


class NoListing(MemoryStore):
    """A role that may read what it can name, and list nothing."""

    error: type[Exception] = ObjectNotFoundError

    def list_names(self, prefix: str) -> list[str]:
        raise AccessDeniedError(f"{prefix} may not be listed")

    def stat(self, key: str) -> ObjectInfo:
        try:
            return super().stat(key)
        except ObjectNotFoundError:
            raise self.error(key) from None


@pytest.mark.parametrize("error", (ObjectNotFoundError, AccessDeniedError))
def test_where_listing_is_denied_generations_are_asked_for_in_turn(error: type[Exception]) -> None:
    store = NoListing()
    store.error = error
    keyring = UNDER_ONE
    for _ in range(3):
        assert write_generation(store, keyring)
        keyring = next_one(keyring)
    assert newest_first(store, NAME) == [3, 2, 1]


@pytest.mark.parametrize("error", (ObjectNotFoundError, AccessDeniedError))
def test_where_listing_is_denied_old_generations_may_be_gone(error: type[Exception]) -> None:
    store = NoListing()
    store.error = error
    for number in (16, 17):
        store.put(f"{NAME.folder}/keyring/{number:04d}.json", b"{}")
    assert newest_first(store, NAME) == [17, 16]


def test_to_find_no_keyring_where_listing_is_denied_is_no_damage() -> None:
    with pytest.raises(AccessDeniedError, match="allow this identity to list"):
        newest_first(NoListing(), NAME)


def test_a_store_that_is_out_of_reach_is_no_store_without_keyrings() -> None:
    store = NoListing()
    store.error = StoreUnavailableError
    with pytest.raises(StoreUnavailableError):
        newest_first(store, NAME)


def test_a_keyring_of_many_files_is_read_in_reasonable_memory_and_keeps_its_order() -> None:
    keys = tuple(
        WrappedKey(path=f"{rank:05d}-00.safetensors.floe", wrapped=(os.urandom(60),)) for rank in range(5000)
    )
    keyring = replace(UNDER_ONE, keys=keys)
    assert Keyring.decode(keyring.encode(), "it") == keyring
