"""The next keyring of one checkpoint: from a generation that can be trusted, as a change wants it.

Of the checkpoint it reads commit, manifest and keyrings, and it writes one keyring. What is to be done
is decided in `strongroom_security.changes`; which generations stand, `generations` tells.

What it holds to:

- A generation is created once, whole or not at all, and one that stands is never changed.
- A generation is a source only where its files' keys are right: they are those of the first keyring,
  which ``COMMIT`` pins, or they were unwrapped and fit the headers that the manifest pins. Else it is
  damaged or forged, and the one before it is taken, as readers do.
- A key service is asked once, where it can re-encrypt without showing the key. Keys that are here cost no
  call, so whatever they can check is checked, and what they wrapped is wrapped anew.
- Older generations are removed on purpose alone, after the newer one was opened, and where nobody loses by
  it: each of its wraps was opened or made here, or is the one that ``COMMIT`` pins.
- No number is used twice. One that is free may have been: whoever removes older generations leaves a higher
  one. So after each write it is looked whether a higher one stands; then what was written came of
  something that is gone, is removed, and all begins anew from the highest.
- What was listed and is gone when it is read is no damage: another rotation has removed it. It is looked
  again, and only what stands still counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

from strongroom.config import Clock
from strongroom.digest import sha256_of
from strongroom.errors import (
    AuditError,
    IntegrityError,
    KeyServiceError,
    NoKeyError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    StoreError,
    StoreUnavailableError,
    StrongroomError,
)
from strongroom.layout import MAX_KEYRING, CheckpointName, keyring_key
from strongroom.manifest import Commit, FileRecord
from strongroom.opened import open_checkpoint
from strongroom.signing import Guard, Trust
from strongroom.stores.base import Store
from strongroom_security.changes import (
    Change,
    SetRecipients,
    Step,
    decide,
    expected_calls,
    is_local,
    wraps_of,
)
from strongroom_security.envelope import CheckpointKey
from strongroom_security.fields import Context
from strongroom_security.generations import Findings, Standing, find_keyring
from strongroom_security.keyring import (
    Keyring,
    RecipientEntry,
    WrappedKey,
    newest_first,
    write_generation,
)
from strongroom_security.recipients.base import Identity, Recipient, Rewrapper
from strongroom_security.unwrapping import Calls, Opened, Opening, contexts_of

__all__ = ["Options", "Outcome", "Result", "Rewrapping"]

Result = Literal["rotated", "already", "would rotate", "unsealed", "gone", "failed"]

Wraps = dict[str, tuple[bytes, ...]]
"""What recipients have wrapped, by their ids, as `wraps_of` gives it."""

_MAX_RACES: Final = 16
"""How often another rotation may come first; each time it has made a generation."""


_MAX_GAP: Final = 16
"""How far above one's own number others are looked for where they cannot be listed; as readers do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one checkpoint.

    Attributes:
        result: ``"already"``: it was as wanted before. ``"unsealed"``: it has no keys. ``"gone"``: it was
            removed meanwhile, by retention for example.
        generation: the keyring that is as wanted, or in a dry run would be.
        source: the generation that it was made from.
        verified: it was opened, by everyone at hand who could be asked.
        removed: older generations that were removed, or in a dry run would be.
        calls: that key services were asked for, or in a dry run would be.
        passed_over: why newer generations were no source: they are damaged, forged, or for others.
        error: why it failed.
    """

    name: CheckpointName
    result: Result
    generation: int | None = None
    source: int | None = None
    verified: bool = False
    removed: tuple[int, ...] = ()
    calls: int = 0
    passed_over: tuple[str, ...] = ()
    error: StrongroomError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What holds for every checkpoint of a rotation.

    Attributes:
        change: what is wanted.
        identities: who may open, each key once; also those among the new recipients that can.
        verify: key services too are asked to open what was made.
        remove_old: remove the generations before the one that is as wanted, once that was opened.
        dry_run: read, and do nothing.
        clock: the time.
        trust: who judges a checkpoint's signatures before its keys are touched; None: nobody.
    """

    change: Change
    identities: tuple[Identity, ...]
    verify: bool
    remove_old: bool
    dry_run: bool
    clock: Clock
    trust: Trust | None = None


class Rewrapping:
    """Makes one checkpoint's keyring as a change wants it."""

    def __init__(self, store: Store, commit: Commit, options: Options, calls: Calls) -> None:
        self._store = store
        self._commit = commit
        self._options = options
        self._calls = calls
        self._name = commit.name
        self._context = Context.of(commit.run, commit.name)
        self._written: int | None = None
        self._made_here: frozenset[str] = frozenset()
        """Ids that the last generation made here holds a wrap for that needs nobody's word."""
        self._passed_over: tuple[str, ...] = ()

    def carry_out(self) -> Outcome:
        """Do it. What goes wrong stands in the outcome, so that the next checkpoint has its turn.

        Raises:
            AuditError: its keys could not be put on record first, and were not touched.
        """
        if self._commit.keyring is None:
            return Outcome(name=self._name, result="unsealed")
        try:
            return self._carried_out()
        except AuditError:
            raise
        except StrongroomError as error:
            if isinstance(error, IntegrityError) and self._is_gone():
                return Outcome(name=self._name, result="gone", calls=self._calls.count)
            return Outcome(
                name=self._name,
                result="failed",
                generation=self._written,
                calls=self._calls.count,
                passed_over=self._passed_over,
                error=error,
            )

    def _carried_out(self) -> Outcome:
        for _ in range(_MAX_RACES):
            stand = self._look()
            written = self._written
            try:
                outcome = self._try(stand)
            except (IntegrityError, NoKeyError):
                if self._written == written and self._has_moved(stand):
                    continue  # it was said of what stands no longer
                raise
            if outcome is not None:
                return outcome
        raise StoreUnavailableError(
            f"{_MAX_RACES} times another rotation made the next keyring of {self._name} first; do this again "
            f"once that has ended"
        )

    def _look(self) -> Standing:
        return Standing(self._store, self._commit, newest_first(self._store, self._name), self._records)

    def _has_moved(self, stand: Standing) -> bool:
        try:
            return tuple(newest_first(self._store, self._name)) != stand.numbers
        except StoreError:
            return False  # what was found first is told

    def _is_gone(self) -> bool:
        try:
            self._store.stat(self._name.commit_key)
        except ObjectNotFoundError:
            return True
        except StoreError:
            return False  # what was found first is told
        return False

    @cached_property
    def _records(self) -> tuple[FileRecord, ...]:
        # Before any key service is asked: whose word the manifest is.
        return open_checkpoint(self._store, self._commit, Guard(trust=self._options.trust)).manifest.files

    @cached_property
    def _opening(self) -> Opening:
        return Opening(self._records, self._context, self._calls)

    def _try(self, stand: Standing) -> Outcome | None:
        """One try, from what stands; None: another rotation was faster."""
        findings = Findings()
        for base in stand.whole(findings):
            if stand.has_vanished and self._has_moved(stand):
                return None
            self._passed_over = findings.texts()
            step = decide(self._options.change, base, lambda base=base: stand.older(base))  # type: ignore[misc]
            if self._options.dry_run:
                return self._foreseen(base, self._mended(step, base, stand, self._ids_at_hand(base)), stand)
            try:
                opened = self._verify(base, stand) if step.is_nothing else self._ids_at_hand(base)
                step = self._mended(step, base, stand, opened)
                following = None if step.is_nothing else self._following(base, step, stand)
            except (IntegrityError, NoKeyError) as error:
                # What adds or removes one recipient starts from the newest generation: from an older one
                # it would leave out whoever was added since.
                if isinstance(error, NoKeyError) and not isinstance(self._options.change, SetRecipients):
                    raise
                findings.errors.append(error)
                continue
            if following is None:
                return self._done(base, stand, opened=opened)
            return self._rotated(base, following, stand) if self._write(base, following) else None
        self._passed_over = ()
        worst = findings.worst()
        if isinstance(worst, IntegrityError):
            raise IntegrityError(
                f"no keyring of {self._name} holds the keys that its manifest pins: {worst}; copy its "
                f"keyring folder again from another tier"
            )
        raise worst

    def _rotated(self, base: Keyring, following: Keyring, stand: Standing) -> Outcome | None:
        """Make sure of what was written; None: another rotation went on from it, and removed it.

        Raises:
            IntegrityError: it stands otherwise than it was written, or does not open.
        """
        found = find_keyring(self._store, self._commit, following.generation)
        if found.is_absent and self._look().above(following.generation):
            return None
        if found.keyring != following:
            why = f": {found.problem}" if found.problem else ""
            raise IntegrityError(
                f"keyring {following.generation} of {self._name} does not stand as it was written{why}; the "
                f"older ones still do"
            )
        opened = self._verify(following, stand)
        return self._done(following, stand, opened=opened, source=base.generation)

    def _done(
        self, keyring: Keyring, stand: Standing, *, opened: frozenset[str], source: int | None = None
    ) -> Outcome:
        made_here = frozenset() if source is None else self._made_here
        removed = self._remove(keyring, stand, opened, made_here) if self._options.remove_old else ()
        return Outcome(
            name=self._name,
            result="already" if source is None else "rotated",
            generation=keyring.generation,
            source=source,
            verified=bool(opened),
            removed=removed,
            calls=self._calls.count,
            passed_over=self._passed_over,
        )

    def _foreseen(self, base: Keyring, step: Step, stand: Standing) -> Outcome:
        """What it would come to."""
        is_pinned = stand.is_pinned(base)
        needs_opening = not step.is_nothing and (bool(step.wrap) or not is_pinned)
        if needs_opening and not self._at_hand(base):
            raise self._nobody(base)
        generation = base.generation if step.is_nothing else stand.next_generation
        removed = stand.before(generation) if self._options.remove_old else ()
        calls = expected_calls(step, base, self._options.identities, is_pinned=is_pinned)
        if self._options.verify or removed:
            openers = {*step.keep, *(recipient.id for recipient in step.wrap)}
            asked = [each for each in self._options.identities if each.id in openers]
            calls += sum(not is_local(each.kind) for each in asked) * len(contexts_of(base, self._context))
        return Outcome(
            name=self._name,
            result="already" if step.is_nothing else "would rotate",
            generation=generation,
            source=None if step.is_nothing else base.generation,
            removed=tuple(sorted(removed)),
            calls=calls,
            passed_over=self._passed_over,
        )

    # ------------------------------------------------------------------------------- the next generation

    def _following(self, base: Keyring, step: Step, stand: Standing) -> Keyring:
        """The generation that comes next.

        Raises:
            IntegrityError: the base is damaged or forged.
            NoKeyError, KeyServiceError: it has to be opened, and nobody here can.
        """
        self._made_here = frozenset()
        at_hand = self._at_hand(base)
        local = [identity for identity in at_hand if is_local(identity.kind)]
        services = [identity for identity in at_hand if not is_local(identity.kind)]
        failed = Findings()
        opened = self._opening.by_first(base, local, failed)
        # Where a key that is here found something wrong, the keyring is opened, so that it is set right.
        if opened is None and not failed.errors and not step.new_key and stand.is_pinned(base):
            wraps = self._rewrapped(base, step.wrap, services, failed, stand.pinned_wraps(base))
            if wraps is not None:
                return self._made(base, step, stand, wraps)
        if opened is None:
            opened = self._opening.by_first(base, services, failed)
        if opened is None:
            raise failed.worst() if failed.errors else self._nobody(base)
        try:
            return self._made_with_keys(base, step, stand, opened)
        finally:
            opened.wipe()

    def _rewrapped(
        self,
        base: Keyring,
        to: Sequence[Recipient],
        services: list[Identity],
        failed: Findings,
        pinned: frozenset[str],
    ) -> Wraps | None:
        """Wraps for recipients, without the key being seen here; None: it has to be."""
        made: Wraps = {}
        sure: set[str] = set()
        # Few services can wrap for a key that lies here; where one cannot, no call was made in vain.
        for recipient in sorted(to, key=lambda recipient: not is_local(recipient.kind)):
            for keeper in sorted(services, key=lambda identity: identity.id != recipient.id):
                found = self._rewrapped_by(keeper, base, recipient, services, failed)
                if found is not None:
                    made[recipient.id] = found
                    # A wrap that nobody vouches for may be of another key, and so is what is made of it.
                    sure |= {recipient.id} if keeper.id in pinned else set()
                    break
            else:
                return None
        self._made_here = frozenset(sure)
        return made

    def _rewrapped_by(
        self,
        keeper: Identity,
        base: Keyring,
        recipient: Recipient,
        services: list[Identity],
        failed: Findings,
    ) -> tuple[bytes, ...] | None:
        if not isinstance(keeper, Rewrapper):
            return None
        made: list[bytes] = []
        try:
            for wrapped, context in zip(
                wraps_of(base, keeper.id), contexts_of(base, self._context), strict=True
            ):
                found = self._calls.rewrap(keeper, wrapped, context, recipient)
                if found is None:
                    return None
                made.append(found)
        except KeyServiceError as error:
            failed.errors.append(error)
            services.remove(keeper)  # it is silent, and asking it again to unwrap would take as long
            return None
        except (IntegrityError, NoKeyError) as error:
            failed.errors.append(error)  # who may not re-encrypt may perhaps open
            return None
        return tuple(made)

    def _made_with_keys(self, base: Keyring, step: Step, stand: Standing, opened: Opened) -> Keyring:
        if not step.new_key:
            return self._made(base, step, stand, self._wrapped(base, step, opened))
        drawn = CheckpointKey.draw(self._context)
        try:
            fresh = Opened(keys=opened.keys, checkpoint_key=drawn)
            rows = tuple(
                WrappedKey(path=path, wrapped=(drawn.wrap(path, key),)) for path, key in opened.keys.items()
            )
            return self._made(base, step, stand, self._wrapped(base, step, fresh), rows)
        finally:
            drawn.secret.wipe()

    def _wrapped(self, base: Keyring, step: Step, opened: Opened) -> Wraps:
        key = opened.checkpoint_key
        keys = list(opened.keys.values()) if key is None else [key.secret]
        # What costs nothing is wrapped anew: a copy would carry on whatever somebody put there.
        cheap = [known for known in self._known() if known.id in step.keep and is_local(known.kind)]
        made = {
            recipient.id: tuple(
                self._calls.wrap(recipient, each, context)
                for each, context in zip(keys, contexts_of(base, self._context), strict=True)
            )
            for recipient in (*step.wrap, *cheap)
        }
        self._made_here = frozenset(made)
        return made

    def _made(
        self,
        base: Keyring,
        step: Step,
        stand: Standing,
        wraps: Wraps,
        rows: tuple[WrappedKey, ...] | None = None,
    ) -> Keyring:
        """The generation from its parts.

        Args:
            wraps: of recipients that were wrapped for; the others' are copied.
            rows: the files' keys under a new key of the checkpoint; None: as they are.
        """
        kinds = {entry.id: entry.kind for entry in base.recipients}
        kinds.update({recipient.id: recipient.kind for recipient in step.wrap})
        ids = sorted({*step.keep, *(recipient.id for recipient in step.wrap)})
        columns = [wraps[each] if each in wraps else wraps_of(base, each) for each in ids]
        is_direct = base.wrap == "direct"
        if is_direct:
            by_path = zip(base.keys, zip(*columns, strict=True), strict=True)
            rows = tuple(WrappedKey(path=key.path, wrapped=row) for key, row in by_path)
        change = self._options.change
        since_ms = change.since_ms if isinstance(change, SetRecipients) else None
        return replace(
            base,
            generation=stand.next_generation,
            previous=stand.newest_digest or sha256_of(base.encode()),
            # A clock that was set back must not make it look older than the rotation that it belongs to.
            created_at_ms=max(self._options.clock.now_ms(), since_ms or 0),
            recipients=tuple(
                RecipientEntry(id=each, kind=kinds[each], wrapped=None if is_direct else column[0])
                for each, column in zip(ids, columns, strict=True)
            ),
            keys=base.keys if rows is None else rows,
        )

    def _write(self, base: Keyring, following: Keyring) -> bool:
        """Create a generation; False: look again at what stands.

        Raises:
            StoreError: it was not created; or it was, of what is gone, and cannot be removed.
        """
        try:
            is_ours = write_generation(self._store, following)
        except OutcomeUnknownError:
            if find_keyring(self._store, self._commit, following.generation).keyring == following:
                self._withdraw_if_overtaken(base, following)
            return False  # whatever stands now is looked at
        if not is_ours or self._withdraw_if_overtaken(base, following):
            return False
        self._written = following.generation
        return True

    def _withdraw_if_overtaken(self, base: Keyring, following: Keyring) -> bool:
        """Remove what was just written, where its number was used and purged before: a higher one stands.

        One that goes on from it is no such: then it was the newest, and has done its part.
        """
        higher = self._above(base, following)
        ours = sha256_of(following.encode())
        if not higher or any(keyring.previous == ours for keyring in higher):
            return False
        key = keyring_key(self._name, following.generation)
        try:
            self._store.delete(key)
        except StoreError as error:
            raise StoreUnavailableError(
                f"{key} was made of a keyring that another rotation has replaced meanwhile, so that whoever "
                f"was removed by that may open again; it could not be taken back: {error}. Remove it"
            ) from error
        return True

    def _above(self, base: Keyring, following: Keyring) -> tuple[Keyring, ...]:
        """The generations that stand above one, and are whole."""
        for _ in range(_MAX_RACES):
            stand = self._look()
            found = stand.above(following.generation)
            if found or not (stand.has_vanished and self._has_moved(stand)):
                break
        if found or not find_keyring(self._store, self._commit, base.generation).is_absent:
            return found
        # Where listing is denied, they are found by counting, which ends at the gap that a removal left.
        numbers = range(following.generation + 1, min(following.generation + _MAX_GAP, MAX_KEYRING) + 1)
        probed = (find_keyring(self._store, self._commit, number).keyring for number in numbers)
        return tuple(keyring for keyring in probed if keyring is not None)

    # --------------------------------------------------------------------------------------------- who can

    def _known(self) -> list[Recipient]:
        """Who can be wrapped for, each key once."""
        change = self._options.change
        given = change.recipients if isinstance(change, SetRecipients) else ()
        able = [identity for identity in self._options.identities if isinstance(identity, Recipient)]
        return list({recipient.id: recipient for recipient in (*able, *given)}.values())

    def _at_hand(self, keyring: Keyring) -> list[Identity]:
        return [each for each in self._options.identities if keyring.position(each.id) is not None]

    def _ids_at_hand(self, keyring: Keyring) -> frozenset[str]:
        return frozenset(identity.id for identity in self._at_hand(keyring))

    def _mended(self, step: Step, base: Keyring, stand: Standing, opened: frozenset[str]) -> Step:
        """A step that wraps anew, before older generations go, what nobody here can vouch for.

        Whoever can write to the storage can plant a keyring that is right for those who are here, and holds
        nothing for one who is not: the older ones would be the last that a break-glass key opens.

        Args:
            opened: ids of those who open it here; none: nobody can make it better.
        """
        if not (
            self._options.remove_old and opened and (stand.before(base.generation) or step.wrap or step.drop)
        ):
            return step
        unsure = set(step.keep) - opened - stand.pinned_wraps(base)
        anew = tuple(known for known in self._known() if known.id in unsure)
        kept = unsure.intersection(known.id for known in anew)
        return replace(
            step,
            keep=tuple(each for each in step.keep if each not in kept),
            wrap=(*step.wrap, *anew),
        )

    def _nobody(self, base: Keyring) -> NoKeyError:
        wanted = ", ".join(entry.id for entry in base.recipients)
        here = ", ".join(f"{identity.uri} ({identity.id})" for identity in self._options.identities)
        return NoKeyError(
            f"keyring {base.generation} of {self._name} is for {wanted}, and here is {here or 'nobody'}; "
            f"name one who can open it among the policy's recipients or identities"
        )

    # ------------------------------------------------------------------------- making sure, and removing

    def _verify(self, keyring: Keyring, stand: Standing) -> frozenset[str]:
        """Open a generation by everyone at hand who can be asked; the ids of those who did.

        Raises:
            IntegrityError: one of them finds that it is wrong.
            KeyServiceError: one that was to be asked cannot be reached.
        """
        removes = self._options.remove_old and bool(stand.before(keyring.generation))
        opened: set[str] = set()
        for identity in self._at_hand(keyring):
            if not (is_local(identity.kind) or self._options.verify or removes):
                continue
            try:
                self._opening.by(keyring, identity).wipe()
                opened.add(identity.id)
            except NoKeyError:
                continue  # a writer may wrap by this key, and not unwrap
        return frozenset(opened)

    def _remove(
        self, keyring: Keyring, stand: Standing, opened: frozenset[str], made_here: frozenset[str]
    ) -> tuple[int, ...]:
        """Remove what is older.

        Raises:
            NoKeyError: nothing shows that this one opens, or that each of its recipients can open it.
        """
        older = stand.before(keyring.generation)
        if not older:
            return ()
        if not opened:
            raise NoKeyError(
                f"the older keyrings of {self._name} stay: nobody here could open generation "
                f"{keyring.generation}, so nothing shows that it opens. Name one of its recipients that can"
            )
        ids = {entry.id for entry in keyring.recipients}
        unsure = ids - opened - made_here - stand.pinned_wraps(keyring)
        if unsure:
            raise NoKeyError(
                f"the older keyrings of {self._name} stay: nothing shows that generation "
                f"{keyring.generation} opens for {', '.join(sorted(unsure))}. Rotate to all of its "
                f"recipients, so that they are wrapped for anew, or name their keys among the identities"
            )
        for number in older:
            self._store.delete(keyring_key(self._name, number))
        return tuple(sorted(older))
