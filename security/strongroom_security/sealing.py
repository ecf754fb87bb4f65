"""What a policy's ``[seal]`` comes to: fills the seam `strongroom.sealing` with keys, keyrings and FLOE.

It owns who is asked for what, when, and for how long; the bytes are `envelope`'s, `keyring`'s, `floe`'s
and the recipients'. A save asks each recipient once (in background threads, while the files are still
being written), and a restore one identity at a time until a keyring opens whose keys fit the headers
that the manifest pins.

What fails is told apart, since a restore falls back to an older checkpoint for damage and for nothing
else: nobody here has a key, or was refused (`NoKeyError`); who keeps the key cannot be reached
(`KeyServiceError`); the keyring is absent, malformed, of another checkpoint or holds other keys
(`IntegrityError`). Where several of these are found, the first of that order is raised.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from strongroom.digest import sha256_of
from strongroom.errors import (
    ConfigError,
    IntegrityError,
    KeyServiceError,
    NoKeyError,
    ObjectNotFoundError,
    SaveError,
    StrongroomError,
    UnsealedError,
    UnsupportedFormatError,
)
from strongroom.layout import CheckpointName
from strongroom_security.asking import Call, results
from strongroom_security.envelope import CheckpointKey, HandedOver, HandOverKey, hand_over
from strongroom_security.fields import Context, file_aad
from strongroom_security.floe import FloeOpener, FloeSealer
from strongroom_security.intents import on_record
from strongroom_security.keyrequests import Requests, collecting, note_opened
from strongroom_security.keyring import (
    Keyring,
    RecipientEntry,
    WrapMode,
    WrappedKey,
    bounds_for,
    newest_first,
    read_generation,
)
from strongroom_security.recipients.base import Identity, Recipient, check_id, check_wrapped
from strongroom_security.secret import KEY_BYTES, Secret

if TYPE_CHECKING:
    from strongroom.manifest import Commit, FileRecord, Manifest
    from strongroom.sealing import OneOff
    from strongroom.stores.base import Store

__all__ = ["EnvelopeSealing"]

_WITHIN_S: Final = 30.0
"""How long one call may take. A key service answers in milliseconds; the rest is for its repetition."""

_MAX_TRIED: Final = 16
"""Generations that are tried besides the first. Whoever can write to the store can add any number."""

_MAX_LOOKS: Final = 20
"""How often the keyrings are listed anew because a rotation added or removed some meanwhile."""

_T = TypeVar("_T")


class EnvelopeSealing:
    """Seals every file under a key of its own, and the keys under one that each recipient wraps.

    It holds no state, so it may be used by any thread, and on both sides of a fork.

    Args:
        recipients: who can open what is saved; none: this policy restores and never saves.
        identities: who may open besides those recipients that can.
        wrap: ``"checkpoint"``, or ``"direct"``: each recipient wraps every file's key by itself.
        unsealed_names: names of checkpoints' folders that may be unsealed; ``*`` and ``?`` as in a shell.
        within_s: seconds that one call to a recipient or an identity may take.
        clock: seconds since the epoch.

    Raises:
        ConfigError: nobody is named, one is named twice, or a value cannot work.
    """

    def __init__(
        self,
        recipients: Sequence[Recipient],
        identities: Sequence[Identity] = (),
        *,
        wrap: WrapMode = "checkpoint",
        unsealed_names: Sequence[str] = (),
        within_s: float = _WITHIN_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if wrap not in ("checkpoint", "direct"):
            raise ConfigError(f"wrap must be 'checkpoint' or 'direct', got {wrap!r:.60}")
        if not within_s > 0:
            raise ConfigError(f"within_s must be more than 0 seconds, got {within_s!r:.60}")
        if not recipients and not identities:
            raise ConfigError("sealing needs a recipient, or for restoring alone an identity; none is named")
        self._recipients = _sorted_recipients(recipients)
        self._identities = _distinct_identities(recipients, identities)
        self._wrap: WrapMode = wrap
        self._unsealed_names = tuple(unsealed_names)
        self._within_s = within_s
        self._clock = clock

    @property
    def fingerprint(self) -> str:
        ids = "\n".join((self._wrap, *(recipient.id for recipient in self._recipients)))
        return hashlib.sha256(ids.encode()).hexdigest()[:16]

    def one_off(self) -> HandOverKey:
        return HandOverKey.draw()

    def seal_save(self, run: str, name: CheckpointName, one_off: OneOff | None) -> _SaveSeal:
        """As `Sealing.seal_save`.

        Raises:
            ConfigError: the policy names no recipient.
        """
        if not self._recipients:
            raise ConfigError(
                "the policy names identities and no recipient, so it can restore and not save; name at "
                "least one recipient"
            )
        return _SaveSeal(
            Context.of(run, name),
            recipients=self._recipients,
            wrap=self._wrap,
            within_s=self._within_s,
            clock=self._clock,
            one_off=None if one_off is None else _hand_over_key(one_off),
        )

    def unlock(
        self, store: Store, commit: Commit, manifest: Manifest, *, within_s: float | None = None
    ) -> _Unlocked:
        """As `Sealing.unlock`. Where ``wrap`` was direct, an identity is called once a file.

        Args:
            within_s: seconds that all calls to identities may take together; None: each has its own
                time, and there is no other bound.

        Raises:
            StoreError: the store could not be asked for the keyrings.
        """
        deadline = math.inf if within_s is None else time.monotonic() + within_s
        return _Unlocking(self._identities, self._within_s, deadline, store, commit, manifest).unlock()

    def locked(self, manifest: Manifest) -> _Unlocked:
        return _Unlocked(Context.of(manifest.run, manifest.name), generation=0, keys={})

    def accepts_unsealed(self, name: CheckpointName) -> bool:
        return any(fnmatchcase(name.folder, pattern) for pattern in self._unsealed_names)

    def __repr__(self) -> str:
        recipients = [recipient.uri for recipient in self._recipients]
        identities = [identity.uri for identity in self._identities]
        return f"EnvelopeSealing(recipients={recipients}, identities={identities}, wrap={self._wrap!r})"


def _sorted_recipients(recipients: Sequence[Recipient]) -> tuple[Recipient, ...]:
    """By id, as they stand in a keyring."""
    by_id: dict[str, Recipient] = {}
    for recipient in recipients:
        check_id(recipient.id, recipient.kind)
        other = by_id.setdefault(recipient.id, recipient)
        if other is not recipient:
            raise ConfigError(f"{recipient.uri} and {other.uri} are one key; name it once")
    return tuple(by_id[identifier] for identifier in sorted(by_id))


def _distinct_identities(
    recipients: Sequence[Recipient], identities: Sequence[Identity]
) -> tuple[Identity, ...]:
    """Each key once, in the policy's order: first the recipients that can open."""
    able = [recipient for recipient in recipients if isinstance(recipient, Identity)]
    by_id: dict[str, Identity] = {}
    for identity in (*able, *identities):
        by_id.setdefault(identity.id, identity)
    return tuple(by_id.values())


def _hand_over_key(one_off: OneOff) -> HandOverKey:
    if not isinstance(one_off, HandOverKey):
        raise ConfigError(
            f"a one-off key comes from this sealing's own one_off(), got {type(one_off).__name__}"
        )
    return one_off


class _SaveSeal:
    """Fills `strongroom.sealing.SaveSeal`."""

    def __init__(
        self,
        context: Context,
        *,
        recipients: Sequence[Recipient],
        wrap: WrapMode,
        within_s: float,
        clock: Callable[[], float],
        one_off: HandOverKey | None,
    ) -> None:
        self._context = context
        self._recipients = recipients
        self._wrap: WrapMode = wrap
        self._within_s = within_s
        self._clock = clock
        self._one_off = one_off
        self._lock = threading.Lock()
        self._keys: dict[str, Secret] = {}
        self._checkpoint_key: CheckpointKey | None = None
        self._wraps: list[Call[bytes]] = []
        self._requests = Requests()
        self._is_made = False
        self._has_ended = False

    def sealer(self, path: str) -> FloeSealer:
        """As `SaveSeal.sealer`.

        Raises:
            SaveError: the file has a sealer already. A second one would leave the first one's key
                without a place in the keyring, and the file for ever closed.
        """
        key = Secret.draw(KEY_BYTES)
        sealer = FloeSealer(key, file_aad(_at(self._context, path)))
        with self._lock:
            self._check_goes_on()
            if self._keys.setdefault(path, key) is not key:
                raise SaveError(f"{path} has a sealer already; what is written again has a new name")
        return sealer

    def hand_over(self, public: bytes) -> bytes:
        with self._lock:
            self._check_goes_on()
            keys = dict(self._keys)
        return hand_over(public, HandedOver(generation=0, keys=keys), self._context)

    def take_over(self, handed: bytes) -> None:
        if self._one_off is None:
            raise SaveError("keys were handed to a rank that has no one-off key for this attempt")
        found = self._one_off.open(handed, self._context)
        if found is None:
            raise SaveError(
                f"{len(handed)} bytes were handed over that were not sealed to this attempt, {self._name}"
            )
        with self._lock:
            self._check_goes_on()
            for path, key in found.keys.items():
                if self._keys.setdefault(path, key) != key:
                    raise SaveError(f"two ranks handed over different keys of {path}")

    def begin_wrapping(self) -> None:
        if self._wrap == "direct":
            return  # each recipient wraps every file's key, and the last is known when it was handed over
        with self._lock:
            self._check_goes_on()
            if self._checkpoint_key is not None:
                return  # one call to each recipient, however often this is called
            key = self._checkpoint_key = CheckpointKey.draw(self._context)
            with collecting(self._requests):
                self._wraps = [
                    Call(
                        [partial(_wrapped, recipient, key.secret, self._context)],
                        who=recipient.uri,
                        within_s=self._within_s,
                    )
                    for recipient in self._recipients
                ]

    @property
    def request_ids(self) -> tuple[str, ...]:
        """As `strongroom.sealing.Requesting.request_ids`."""
        return self._requests.ids

    def keyring(self, paths: Collection[str], *, within_s: float) -> bytes:
        with self._lock:
            if self._is_made:
                raise SaveError(f"the keyring of {self._name} was made already, and its keys are gone")
            self._check_goes_on()
            missing = sorted(set(paths) - self._keys.keys())
            keys = {path: self._keys[path] for path in sorted(paths) if path in self._keys}
        if missing:
            raise SaveError(
                f"the key of {missing[0]} was never handed over, so {self._name} could not be opened "
                f"({len(missing)} of {len(paths)} keys are missing)"
            )
        deadline = time.monotonic() + within_s
        if self._wrap == "direct":
            recipients, wrapped = self._directly(keys, deadline)
        else:
            recipients, wrapped = self._under_checkpoint_key(keys, deadline)
        document = Keyring(
            run=self._context.run,
            name=_name_of(self._context),
            generation=1,
            previous=None,
            created_at_ms=int(self._clock() * 1000),
            wrap=self._wrap,
            recipients=recipients,
            keys=wrapped,
        )
        data = document.encode()
        with self._lock:
            self._is_made = True
            self._wipe()
        return data

    def discard(self) -> None:
        """As `SaveSeal.discard`. What is asked of it afterwards is a `SaveError`."""
        with self._lock:
            self._has_ended = True
            self._wipe()

    def _under_checkpoint_key(
        self, keys: Mapping[str, Secret], deadline: float
    ) -> tuple[tuple[RecipientEntry, ...], tuple[WrappedKey, ...]]:
        self.begin_wrapping()
        with self._lock:
            key = self._checkpoint_key
            # A long save may outlive an outage that its beginning met.
            with collecting(self._requests):
                self._wraps = [call.again() if call.was_out_of_reach else call for call in self._wraps]
        if key is None:
            raise SaveError(f"{self._name} has no key of its own yet")
        wrapped = tuple(WrappedKey(path=path, wrapped=(key.wrap(path, each),)) for path, each in keys.items())
        answers = results(self._wraps, deadline)
        recipients = tuple(
            RecipientEntry(id=recipient.id, kind=recipient.kind, wrapped=answer)
            for recipient, (answer,) in zip(self._recipients, answers, strict=True)
        )
        return recipients, wrapped

    def _directly(
        self, keys: Mapping[str, Secret], deadline: float
    ) -> tuple[tuple[RecipientEntry, ...], tuple[WrappedKey, ...]]:
        with collecting(self._requests):
            calls = [
                Call(
                    [
                        partial(_wrapped, recipient, key, _at(self._context, path))
                        for path, key in keys.items()
                    ],
                    who=recipient.uri,
                    within_s=self._within_s,
                    deadline=deadline,
                )
                for recipient in self._recipients
            ]
        columns = results(calls, deadline)
        wrapped = tuple(
            WrappedKey(path=path, wrapped=row)
            for path, row in zip(keys, zip(*columns, strict=True), strict=True)
        )
        recipients = tuple(
            RecipientEntry(id=recipient.id, kind=recipient.kind, wrapped=None)
            for recipient in self._recipients
        )
        return recipients, wrapped

    def _wipe(self) -> None:
        """The keyring has the keys, or nobody will; nothing here is to be found in a core dump later."""
        for key in self._keys.values():
            key.wipe()
        if self._checkpoint_key is not None:
            self._checkpoint_key.secret.wipe()

    def _check_goes_on(self) -> None:
        if self._has_ended:
            raise SaveError(f"the save of {self._name} has ended, and its keys are gone")

    @property
    def _name(self) -> str:
        return str(_name_of(self._context))

    def __repr__(self) -> str:
        return f"<the sealing of {self._name}, {len(self._keys)} files>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("the sealing of a save holds keys and is not pickled or copied")


class _Unlocked:
    """Fills `strongroom.sealing.Unlocked`."""

    def __init__(self, context: Context, *, generation: int, keys: Mapping[str, Secret]) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._generation = generation
        self._keys = dict(keys)

    @property
    def keyring(self) -> int:
        return self._generation

    def opener(self, record: FileRecord) -> FloeOpener:
        return _opener(self._key(record.path), self._context, record)

    def hand_over(self, public: bytes, paths: Iterable[str]) -> bytes:
        keys = {path: self._key(path) for path in paths}
        return hand_over(public, HandedOver(generation=self._generation, keys=keys), self._context)

    def take_over(self, one_off: OneOff, handed: bytes) -> None:
        """As `Unlocked.take_over`.

        Raises:
            NoKeyError: it was not sealed to that key for this checkpoint.
        """
        found = _hand_over_key(one_off).open(handed, self._context)
        if found is None:
            # No IntegrityError: this says something of another rank, and nothing of the checkpoint.
            raise NoKeyError(
                f"{len(handed)} bytes came as the keys of {_name_of(self._context)} that were not sealed to "
                f"this rank for it"
            )
        with self._lock:
            self._generation = found.generation
            self._keys.update(found.keys)

    def _key(self, path: str) -> Secret:
        with self._lock:
            key = self._keys.get(path)
        if key is None:
            raise NoKeyError(
                f"the key of {path} of {_name_of(self._context)} is not among the {len(self._keys)} keys here"
            )
        return key

    def __repr__(self) -> str:
        return f"<the keys of {len(self._keys)} files of {_name_of(self._context)}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("the keys of a checkpoint are not pickled or copied; they are handed over sealed")


@dataclass(slots=True)
class _Findings:
    """Why nothing opened so far, by what it means."""

    out_of_reach: list[str] = field(default_factory=list)
    no_key: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)

    def error(self, name: CheckpointName) -> StrongroomError:
        """The most cautious reading: what may pass, or be granted, is never called damage."""
        if self.out_of_reach:
            return KeyServiceError(f"the keys of {name} are out of reach: {'; '.join(self.out_of_reach)}")
        if self.no_key:
            return NoKeyError(f"no key here opens {name}: {'; '.join(self.no_key)}")
        if self.unsupported:
            return UnsupportedFormatError("; ".join(self.unsupported))
        return IntegrityError(
            f"no keyring of {name} holds the keys that its manifest pins: {'; '.join(self.damage)}; restore "
            f"an older step, or copy its keyring folder again from another tier"
        )


class _Unlocking:
    """One search for a generation that opens; each key service is asked the same thing once."""

    def __init__(
        self,
        identities: Sequence[Identity],
        within_s: float,
        deadline: float,
        store: Store,
        commit: Commit,
        manifest: Manifest,
    ) -> None:
        self._identities = identities
        self._within_s = within_s
        self._deadline = deadline
        self._store = store
        self._commit = commit
        self._name = manifest.name
        self._context = Context.of(manifest.run, manifest.name)
        self._records = [record for record in manifest.files if record.header is not None]
        self._findings = _Findings()
        self._answers: dict[tuple[str, str | None, bytes], Secret | StrongroomError] = {}
        self._silent: set[str] = set()
        self._bounds = bounds_for(record.path for record in manifest.files)

    def unlock(self) -> _Unlocked:
        if not self._identities:
            raise NoKeyError(
                f"{self._name} is sealed, and the policy here names nobody who can open; name an identity"
            )
        with on_record(self._identities, self._context, root=self._store.uri):
            return self._unlocked()

    def _unlocked(self) -> _Unlocked:
        found = newest_first(self._store, self._name)
        for _ in range(_MAX_LOOKS):
            unlocked = self._try(found)
            if unlocked is not None:
                return unlocked
            before, found = found, newest_first(self._store, self._name)
            if found == before:
                raise self._findings.error(self._name)
            # A rotation came in between: what it removed is no damage, and what it added was not tried.
            # Who did not answer stays silent, so what was found of them stays too.
            self._findings = _Findings(out_of_reach=self._findings.out_of_reach)
        raise KeyServiceError(
            f"the keyrings of {self._name} changed each of the {_MAX_LOOKS} times that they were read; do it "
            f"again once nobody rotates them"
        )

    def _try(self, found: Sequence[int]) -> _Unlocked | None:
        # The first is pinned by the commit, so however many were added, it is not out of sight.
        for generation in (*[number for number in found if number > 1][:_MAX_TRIED], 1):
            keyring = self._read(generation)
            keys = None if keyring is None else self._open(keyring)
            if keys is not None:
                return _Unlocked(self._context, generation=generation, keys=keys)
        return None

    def _read(self, generation: int) -> Keyring | None:
        """The keyring, if it is whole and this checkpoint's."""
        what = f"keyring {generation} of {self._name}"
        try:
            data = read_generation(self._store, self._name, generation, limit_bytes=self._bounds.length_bytes)
            self._check_pin(generation, data, what)
            keyring = Keyring.decode(data, what, self._bounds)
        except ObjectNotFoundError:
            self._findings.damage.append(f"{what} is absent")
            return None
        except UnsupportedFormatError as error:
            self._findings.unsupported.append(str(error))
            return None
        except IntegrityError as error:
            self._findings.damage.append(str(error))
            return None
        if keyring.generation != generation or keyring.context != self._context:
            self._findings.damage.append(
                f"{what} says that it is generation {keyring.generation} of {keyring.name} of run "
                f"{keyring.run}"
            )
            return None
        return keyring

    def _check_pin(self, generation: int, data: bytes, what: str) -> None:
        pinned = self._commit.keyring
        if generation == 1 and pinned is not None and not sha256_of(data).matches(pinned):
            raise IntegrityError(f"{what} has digest {sha256_of(data)}, and the commit pins {pinned}")

    def _open(self, keyring: Keyring) -> dict[str, Secret] | None:
        """The keys of every sealed file, once each of them fits the header that the manifest pins."""
        what = f"keyring {keyring.generation} of {self._name}"
        able = [
            (identity, position)
            for identity in self._identities
            if (position := keyring.position(identity.id)) is not None
        ]
        if not able:
            wanted = ", ".join(entry.id for entry in keyring.recipients)
            here = ", ".join(f"{identity.uri} ({identity.id})" for identity in self._identities)
            self._findings.no_key.append(f"{what} is for {wanted}, and here is {here}")
        for identity, position in able:
            if identity.id in self._silent:
                continue
            try:
                keys = self._keys(keyring, identity, position)
                note_opened(identity.id, identity.kind)
                return keys
            except KeyServiceError as error:
                self._silent.add(identity.id)
                self._findings.out_of_reach.append(str(error))
            except (NoKeyError, ConfigError) as error:
                self._findings.no_key.append(str(error))
            except IntegrityError as error:
                self._findings.damage.append(f"{what}: {error}")
        return None

    def _keys(self, keyring: Keyring, identity: Identity, position: int) -> dict[str, Secret]:
        wrapped = {key.path: key.wrapped for key in keyring.keys}
        missing = [record.path for record in self._records if record.path not in wrapped]
        if missing:
            raise IntegrityError(f"it lacks the key of {missing[0]} ({len(missing)} are missing)")
        entry = keyring.recipients[position].wrapped
        checkpoint_key = None
        if entry is not None:
            secret = self._unwrap(identity, entry, self._context)
            checkpoint_key = CheckpointKey(secret, self._context)
        keys: dict[str, Secret] = {}
        for record in self._records:
            if checkpoint_key is not None:
                key = checkpoint_key.unwrap(record.path, wrapped[record.path][0])
            else:
                context = _at(self._context, record.path)
                key = self._unwrap(identity, wrapped[record.path][position], context)
            _opener(key, self._context, record)  # refuses a key that is not the one that sealed
            keys[record.path] = key
        return keys

    def _unwrap(self, identity: Identity, wrapped: bytes, context: Context) -> Secret:
        """Ask an identity, unless it was asked the same before: a generation may repeat the last one's."""
        question = (identity.id, context.path, wrapped)
        if question not in self._answers:
            within_s = min(self._within_s, self._deadline - time.monotonic())
            if within_s <= 0:
                raise KeyServiceError(
                    f"{identity.uri} was not asked: the time for opening {self._name} was over; see that "
                    f"every keeper is up and reachable from here, then do it again"
                )
            try:
                self._answers[question] = _unwrapped(identity, wrapped, context, within_s, self._deadline)
            except StrongroomError as error:
                self._answers[question] = error
        answer = self._answers[question]
        if isinstance(answer, StrongroomError):
            raise answer
        return answer


def _wrapped(recipient: Recipient, key: Secret, context: Context, within_s: float) -> bytes:
    wrapped: object = recipient.wrap(key, context, within_s=within_s)
    if not isinstance(wrapped, bytes):
        raise KeyServiceError(f"{recipient.uri} wrapped a key to {type(wrapped).__name__}; expected bytes")
    return check_wrapped(wrapped, recipient.uri)


def _unwrapped(
    identity: Identity, wrapped: bytes, context: Context, within_s: float, deadline: float
) -> Secret:
    def ask(within_s: float) -> Secret:
        key: object = identity.unwrap(wrapped, context, within_s=within_s)
        if not isinstance(key, Secret):
            raise KeyServiceError(f"{identity.uri} unwrapped to {type(key).__name__}; expected a Secret")
        if key.size_bytes != KEY_BYTES:
            key.wipe()
            raise IntegrityError(f"{identity.uri} unwrapped {key.size_bytes} bytes; a key has {KEY_BYTES}")
        key.reveal()  # raises where it was wiped already
        return key

    # What the keeper gave is looked at on that thread: no frame that an error shows here has held it.
    ((key,),) = results([Call([ask], who=identity.uri, within_s=within_s)], deadline)
    return key


def _opener(key: Secret, context: Context, record: FileRecord) -> FloeOpener:
    if record.header is None:
        raise UnsealedError(f"{record.path} of {_name_of(context)} is not sealed")
    try:
        return FloeOpener(key, file_aad(_at(context, record.path)), record.header, record.size_bytes)
    except IntegrityError as error:
        raise IntegrityError(f"{record.path} of {_name_of(context)}: {error}") from None


def _at(context: Context, path: str) -> Context:
    return replace(context, path=path)


def _name_of(context: Context) -> CheckpointName:
    return CheckpointName(launch=context.launch, step=context.step, attempt=context.attempt)
