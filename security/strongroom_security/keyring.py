"""The keyring: who can open a checkpoint, and the wrapped key of each of its files, as a document.

It owns `keyring/NNNN.json`: the value, its bounded parser, and its generations in a store
(`docs/format.md`, on keyrings). It unwraps nothing and holds no key: `strongroom_security.envelope`
and the recipients do.

A keyring lies outside what is signed, so that a rotation can add one, and comes from a stranger until
its keys were held against the headers that the manifest pins. Nothing in it is an instruction: an id
is looked up among the recipients that the policy names, and nowhere else.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal

from strongroom import canonical, layout
from strongroom.canonical import Bounds, Json
from strongroom.digest import Digest, sha256_of
from strongroom.errors import (
    AccessDeniedError,
    ConfigError,
    FormatError,
    ObjectNotFoundError,
    UnsupportedFormatError,
)
from strongroom.layout import CheckpointName
from strongroom.manifest import FORMAT, MAX_KEYRING_BYTES, check_run_id
from strongroom_security.fields import Context
from strongroom_security.recipients.base import MAX_WRAPPED_BYTES, check_id, check_kind

if TYPE_CHECKING:
    from strongroom.stores.base import Store

__all__ = [
    "KEYRING_BOUNDS",
    "MAX_RECIPIENTS",
    "WRAPPED_KEY_BYTES",
    "Keyring",
    "RecipientEntry",
    "WrapMode",
    "WrappedKey",
    "bounds_for",
    "newest_first",
    "read_generation",
    "write_generation",
]

_MAX_REMOVED: Final = 16
"""Generations, from the first on, that may be gone where a reader has to guess at what there is."""

WrapMode = Literal["checkpoint", "direct"]
"""Whether recipients wrap one key, which wraps the files' keys, or each file's key."""

KEYRING_BOUNDS: Final = Bounds(length_bytes=MAX_KEYRING_BYTES, depth=4, items=8_000_000)
"""As a manifest's: room for the keys of a million files."""

MAX_RECIPIENTS: Final = 64

_WRAPPED_TEXT_BYTES: Final = -(-MAX_WRAPPED_BYTES // 3) * 4 + 3
"""The longest wrapped key as base64, its quotes and a comma."""

_ENTRY_BYTES: Final = 256
"""What the entry of a recipient or a file comes to beside its path and its wrapped keys."""

_FURTHER_BYTES: Final = 1 << 20
"""For the document's other members and for notes."""

_FURTHER_ITEMS: Final = 10_000

WRAPPED_KEY_BYTES: Final = 60
"""A file's key under the checkpoint's: 12 of nonce, 32 of key, 16 of tag."""

_FORMAT = re.compile(r"[0-9]{1,4}\.[0-9]{1,4}")
_MEMBERS: Final = frozenset(
    {
        "attempt",
        "created_at_ms",
        "format",
        "generation",
        "keys",
        "kind",
        "launch",
        "previous",
        "recipients",
        "run",
        "step",
        "wrap",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipientEntry:
    """One who can open the checkpoint.

    Attributes:
        id: names its key, see `strongroom_security.recipients.base`.
        kind: how it wraps.
        wrapped: the checkpoint's key; None where each file's key is wrapped directly.
    """

    id: str
    kind: str
    wrapped: bytes | None

    def __post_init__(self) -> None:
        check_id(self.id, check_kind(self.kind))
        if self.wrapped is not None:
            _check_length(self.wrapped, f"the recipient {self.id}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappedKey:
    """The key of one file.

    Attributes:
        path: under ``data/``, as stored.
        wrapped: once, under the checkpoint's key; or directly, by each recipient in the keyring's order.
    """

    path: str
    wrapped: tuple[bytes, ...]

    def __post_init__(self) -> None:
        layout.check_relative_path(self.path)
        for wrapped in self.wrapped:
            _check_length(wrapped, self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyring:
    """One generation of a checkpoint's keyring.

    Attributes:
        generation: from 1; the first is pinned by ``COMMIT``, a rotation adds the next.
        previous: SHA-256 of the bytes of the generation before this one; None: this is the first.
        recipients: sorted by id; any one of them can open.
        keys: of every sealed file, sorted by path.

    Raises:
        FormatError: from the constructor too: a reader would refuse it.
    """

    run: str
    name: CheckpointName
    generation: int
    previous: Digest | None
    created_at_ms: int
    wrap: WrapMode
    recipients: tuple[RecipientEntry, ...]
    keys: tuple[WrappedKey, ...]

    def __post_init__(self) -> None:
        check_run_id(self.run)
        _check_integer("generation", self.generation, 1, layout.MAX_KEYRING)
        _check_integer("created_at_ms", self.created_at_ms, 0, canonical.MAX_INTEGER)
        if (self.previous is None) != (self.generation == 1):
            raise FormatError("the first generation has no previous one, and every other has")
        if self.previous is not None and self.previous.algorithm != "sha256":
            raise FormatError(f"'previous' should be a sha256 digest, found {self.previous}")
        if self.wrap not in ("checkpoint", "direct"):
            raise FormatError(f"'wrap' should be 'checkpoint' or 'direct', found {self.wrap!r:.60}")
        if not 1 <= len(self.recipients) <= MAX_RECIPIENTS:
            raise FormatError(f"a keyring has 1 to {MAX_RECIPIENTS} recipients, found {len(self.recipients)}")
        _check_sorted("recipients", (entry.id for entry in self.recipients))
        _check_sorted("keys", (key.path for key in self.keys))
        self._check_wraps()

    def _check_wraps(self) -> None:
        is_direct = self.wrap == "direct"
        for entry in self.recipients:
            if (entry.wrapped is None) != is_direct:
                raise FormatError(f"the recipient {entry.id} must hold a wrapped key unless wrap is 'direct'")
        count = len(self.recipients) if is_direct else 1
        for key in self.keys:
            if len(key.wrapped) != count:
                raise FormatError(
                    f"the key of {key.path} should be wrapped {count} times, not {len(key.wrapped)}"
                )
            if not is_direct and len(key.wrapped[0]) != WRAPPED_KEY_BYTES:
                raise FormatError(
                    f"the wrapped key of {key.path} should have {WRAPPED_KEY_BYTES} bytes, "
                    f"found {len(key.wrapped[0])}"
                )

    @property
    def context(self) -> Context:
        """What the checkpoint's key is bound to, if this keyring belongs where it says."""
        return Context.of(self.run, self.name)

    def position(self, recipient_id: str) -> int | None:
        """Where a recipient stands in `recipients`; None: it cannot open this keyring."""
        return next((at for at, entry in enumerate(self.recipients) if entry.id == recipient_id), None)

    def followed_by(
        self,
        *,
        created_at_ms: int,
        recipients: Iterable[RecipientEntry],
        keys: Iterable[WrappedKey] | None = None,
    ) -> Keyring:
        """The next generation.

        Args:
            created_at_ms: milliseconds since the epoch.
            recipients: in any order.
            keys: in any order; None: as they are.
        """
        return replace(
            self,
            generation=self.generation + 1,
            previous=sha256_of(self.encode()),
            created_at_ms=created_at_ms,
            recipients=tuple(sorted(recipients, key=lambda entry: entry.id)),
            keys=self.keys if keys is None else tuple(sorted(keys, key=lambda key: key.path)),
        )

    def encode(self) -> bytes:
        """The document's bytes.

        Raises:
            FormatError: it is larger than a reader accepts.
        """
        is_direct = self.wrap == "direct"
        data = canonical.with_self_digest(
            {
                "attempt": self.name.attempt,
                "created_at_ms": self.created_at_ms,
                "format": FORMAT,
                "generation": self.generation,
                "keys": [
                    {"path": key.path, "wrapped": [_text(wrapped) for wrapped in key.wrapped]}
                    if is_direct
                    else {"path": key.path, "wrapped": _text(key.wrapped[0])}
                    for key in self.keys
                ],
                "kind": "keyring",
                "launch": self.name.launch,
                "previous": str(self.previous) if self.previous else None,
                "recipients": [
                    {"id": entry.id, "kind": entry.kind}
                    if entry.wrapped is None
                    else {"id": entry.id, "kind": entry.kind, "wrapped": _text(entry.wrapped)}
                    for entry in self.recipients
                ],
                "run": self.run,
                "step": self.name.step,
                "wrap": self.wrap,
            }
        )
        if len(data) > KEYRING_BOUNDS.length_bytes:
            raise FormatError(
                f"a keyring of {len(data)} bytes; at most {KEYRING_BOUNDS.length_bytes} are read. "
                f'Write fewer files, or wrap = "checkpoint"'
            )
        return data

    @classmethod
    def decode(cls, data: bytes, what: str, bounds: Bounds = KEYRING_BOUNDS) -> Keyring:
        """Raises FormatError (damaged, malformed, out of bounds) or UnsupportedFormatError."""
        members = canonical.check_self_digest(canonical.decode(data, what, bounds), what)
        version = members.get("format")
        if isinstance(version, str) and _FORMAT.fullmatch(version) and version != FORMAT:
            raise UnsupportedFormatError(
                f"{what} is in format {version}; this release reads {FORMAT}. Use the release of Strongroom "
                f"that wrote it"
            )
        try:
            return _keyring(members)
        except (FormatError, ConfigError) as error:  # a name's parts are checked as an argument's are
            raise FormatError(f"{what}: {error}") from None


def bounds_for(paths: Iterable[str]) -> Bounds:
    """What the keyring of a checkpoint of these files comes to at most, whatever way its keys are wrapped.

    Whoever can write to the store can put any length there, and each byte of it costs who parses it.
    """
    entry_bytes = _ENTRY_BYTES + MAX_RECIPIENTS * _WRAPPED_TEXT_BYTES
    length_bytes = _FURTHER_BYTES + MAX_RECIPIENTS * (_ENTRY_BYTES + _WRAPPED_TEXT_BYTES)
    items = _FURTHER_ITEMS
    for path in paths:
        length_bytes += entry_bytes + len(path)  # ASCII that JSON does not escape
        items += 3 + MAX_RECIPIENTS
    return Bounds(
        length_bytes=min(length_bytes, KEYRING_BOUNDS.length_bytes),
        depth=KEYRING_BOUNDS.depth,
        items=min(items, KEYRING_BOUNDS.items),
    )


def newest_first(store: Store, name: CheckpointName) -> list[int]:
    """The generations of a checkpoint's keyring, the newest first; ``[1]`` where none is seen.

    Where listing is denied they are asked for one by one, up to one that is not there; of the first, 16
    may be gone.

    Raises:
        AccessDeniedError: they may not be listed, and none is found: that says nothing of the bytes.
        StoreError: the store could not be asked.
    """
    try:
        names = store.list_names(f"{name.folder}/{layout.KEYRINGS}")
    except AccessDeniedError as denied:
        return _probed(store, name, denied)
    found = [number for number in map(layout.parse_keyring_name, names) if number is not None]
    return sorted(found, reverse=True) or [1]


def read_generation(
    store: Store,
    name: CheckpointName,
    generation: int,
    *,
    limit_bytes: int = KEYRING_BOUNDS.length_bytes,
) -> bytes:
    """The bytes of one generation.

    Args:
        limit_bytes: its length at most, as `bounds_for` tells where the checkpoint's files are known.

    Raises:
        ObjectNotFoundError: it is absent.
        FormatError: it is longer than that.
        StoreError: the store could not be asked.
    """
    return store.read(layout.keyring_key(name, generation), limit_bytes=limit_bytes)


def write_generation(store: Store, keyring: Keyring) -> bool:
    """Create a generation, once and durably; False where one of its number stands already.

    Raises:
        StoreError: it was not created and never will be.
        OutcomeUnknownError: it may or may not stand.
    """
    return store.put_if_absent(layout.keyring_key(keyring.name, keyring.generation), keyring.encode())


def _probed(store: Store, name: CheckpointName, denied: AccessDeniedError) -> list[int]:
    seen: list[int] = []
    for number in range(1, layout.MAX_KEYRING + 1):
        try:
            store.stat(layout.keyring_key(name, number))
        except (ObjectNotFoundError, AccessDeniedError):
            # A bucket that may not be listed does not say whether an object is absent, either.
            if seen or number > _MAX_REMOVED:
                break
        else:
            seen.append(number)
    if not seen:
        raise AccessDeniedError(
            f"{name.folder}/{layout.KEYRINGS}/ may not be listed, and none of the first {_MAX_REMOVED} "
            "keyrings can be read; allow this identity to list the folder, or to read what is in it"
        ) from denied
    return seen[::-1]


def _keyring(members: dict[str, Json]) -> Keyring:
    _check_members(members, _MEMBERS, "the document")
    if members["kind"] != "keyring":
        raise FormatError(f"'kind' should be 'keyring', found {members['kind']!r:.60}")
    if members["format"] != FORMAT:
        raise FormatError(f"'format' should be a version, found {members['format']!r:.60}")
    wrap, previous = members["wrap"], members["previous"]
    recipients, keys = members["recipients"], members["keys"]
    if not isinstance(recipients, list) or not isinstance(keys, list):
        raise FormatError("'recipients' and 'keys' should be arrays")
    if len(recipients) > MAX_RECIPIENTS:
        raise FormatError(f"a keyring has 1 to {MAX_RECIPIENTS} recipients, found {len(recipients)}")
    return Keyring(
        run=_string(members, "run"),
        name=CheckpointName(
            launch=_integer(members, "launch"),
            step=_integer(members, "step"),
            attempt=_string(members, "attempt"),
        ),
        generation=_integer(members, "generation"),
        previous=None if previous is None else Digest.parse(_string(members, "previous")),
        created_at_ms=_integer(members, "created_at_ms"),
        wrap=wrap,
        recipients=tuple(_recipient(value, wrap) for value in recipients),
        keys=tuple(_key(value, wrap) for value in keys),
    )


def _recipient(value: Json, wrap: Json) -> RecipientEntry:
    expected = {"id", "kind"} if wrap == "direct" else {"id", "kind", "wrapped"}
    _check_members(value, expected, "a recipient")
    return RecipientEntry(
        id=_string(value, "id"),
        kind=_string(value, "kind"),
        wrapped=None if wrap == "direct" else _bytes(value["wrapped"]),
    )


def _key(value: Json, wrap: Json) -> WrappedKey:
    _check_members(value, {"path", "wrapped"}, "a key")
    wrapped = value["wrapped"]
    if wrap != "direct":
        wrapped = [wrapped]
    if not isinstance(wrapped, list) or len(wrapped) > MAX_RECIPIENTS:
        raise FormatError(
            "a key that is wrapped directly should have an array of one text for each recipient"
        )
    return WrappedKey(path=_string(value, "path"), wrapped=tuple(map(_bytes, wrapped)))


def _check_members(value: Json, expected: frozenset[str] | set[str], what: str) -> None:
    """Every member that is expected, and no other but notes."""
    if not isinstance(value, dict):
        raise FormatError(f"{what} should be a JSON object, found {type(value).__name__}")
    missing = sorted(expected - value.keys())
    if missing:
        raise FormatError(f"{what} lacks the member {missing[0]!r}")
    unknown = sorted(member for member in value.keys() - expected if not member.startswith("x-"))
    if unknown:
        raise FormatError(
            f"{what} has the unknown member {unknown[0][:60]!r}; only members that start with 'x-' may "
            f"be ignored"
        )


def _string(members: dict[str, Json], member: str) -> str:
    value = members[member]
    if not isinstance(value, str):
        raise FormatError(f"{member!r} should be a string, found {value!r:.60}")
    return value


def _integer(members: dict[str, Json], member: str) -> int:
    value = members[member]
    if type(value) is not int:
        raise FormatError(f"{member!r} should be an integer, found {value!r:.60}")
    return value


def _bytes(text: Json) -> bytes:
    """Base64 in its one spelling: padded, and without bits that decoding drops."""
    if not isinstance(text, str) or len(text) > 2 * MAX_WRAPPED_BYTES:
        raise FormatError(f"a wrapped key should be base64 of 1 to {MAX_WRAPPED_BYTES} bytes")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if _text(data) != text or not data:
        raise FormatError("a wrapped key is not base64")
    return data


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _check_length(wrapped: bytes, what: str) -> None:
    if not 1 <= len(wrapped) <= MAX_WRAPPED_BYTES:
        raise FormatError(
            f"the wrapped key of {what} has {len(wrapped)} bytes; expected 1 to {MAX_WRAPPED_BYTES}"
        )


def _check_integer(member: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise FormatError(f"{member!r} should be an integer from {low} to {high}, found {value!r:.60}")


def _check_sorted(member: str, names: Iterable[str]) -> None:
    if any(first >= second for first, second in pairwise(names)):
        raise FormatError(f"{member!r} should be listed once each, in order")
