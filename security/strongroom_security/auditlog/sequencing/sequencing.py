"""The sequencer: brings what writers have put into a sink into the log's tree, and signs the tree's head.

It owns the order of effects. A plan says which segments come next (`plans`), and is created once; then the
entries and tiles of the larger tree are created, the same bytes by whoever does it; and last the signed head
takes the place of the one before. So it may be killed anywhere, or run twice at once: the next run goes on
with the plan that stands. What may go in, and in which order, `choosing` decides; what is remembered between
runs is `logstate`'s.

A run costs what is new and a tile a level: the tree's right edge is read, and its entries only where nothing
is remembered of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from strongroom.errors import (
    ConfigError,
    IntegrityError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    StoreError,
    StoreUnavailableError,
)
from strongroom.stores.base import Store
from strongroom.stores.offers import Replacing
from strongroom_security.auditlog.listing import absent_folder, device_of, list_segments
from strongroom_security.auditlog.sequencing.choosing import Chooser, Chosen, Limits, Refused, Waiting
from strongroom_security.auditlog.sequencing.logstate import LogState
from strongroom_security.auditlog.sequencing.ordering import Sequence
from strongroom_security.auditlog.sequencing.plans import MAX_PLAN_BYTES, Plan, plan_key
from strongroom_security.auditlog.verifying.trusting import Vouchers
from strongroom_security.tlog.checkpoints import Checkpoint
from strongroom_security.tlog.merkle import EMPTY_ROOT, check_consistency
from strongroom_security.tlog.notekeys import KeyType, NoteSigner, VerifierKey
from strongroom_security.tlog.notes import MAX_NOTE_BYTES, Note, NoteSignature
from strongroom_security.tlog.reading import CHECKPOINT, PREFIX, TreeReader
from strongroom_security.tlog.tiles import TILE_WIDTH, Edge
from strongroom_security.tlog.witnesses import (
    NO_WITNESSES,
    LogKeys,
    SignedCheckpoint,
    WitnessPolicy,
    open_checkpoint,
)
from strongroom_security.tlog.witnessing import Witness
from strongroom_security.tlog.writing import grow, write_growth

__all__ = ["Log", "Sequenced", "Sequencer", "sequence_once"]

_LOG: Final = logging.getLogger("strongroom")
_KEY: Final = f"{PREFIX}/{CHECKPOINT}"
_TURNS: Final = 5
"""How often another sequencer may be faster in one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Which log a sequencer makes.

    Attributes:
        origin: the log's.
        signers: its keys, each of which signs.
        former: keys that signed before, and sign no more.
        witnesses: who is asked to cosign.
        policy: whose cosignatures count, and how many a head has to have before it is published.
    """

    origin: str
    signers: tuple[NoteSigner, ...]
    former: tuple[VerifierKey, ...] = ()
    witnesses: tuple[Witness, ...] = ()
    policy: WitnessPolicy = NO_WITNESSES

    def __post_init__(self) -> None:
        if not self.signers:
            raise ConfigError(f"no key signs the log {self.origin}; name one at least")
        wrong = [each.key.name for each in self.signers if each.key.name != self.origin]
        if wrong:
            raise ConfigError(f"the log's keys sign as {self.origin}; one signs as {wrong[0]}")
        if bool(self.witnesses) != bool(self.policy.keys):
            raise ConfigError(
                "witnesses are named by their URLs and by their keys; one of the two is missing"
            )
        if self.witnesses and all(each.key.type is not KeyType.ED25519 for each in self.signers):
            raise ConfigError(
                "a log that asks witnesses signs by an Ed25519 key too (C2SP tlog-tiles); name one"
            )

    @property
    def keys(self) -> LogKeys:
        """Whose signature a head of this log bears."""
        return LogKeys(origin=self.origin, keys=(*(each.key for each in self.signers), *self.former))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequenced:
    """What a run came to.

    Attributes:
        head: the log's head after it; None: nothing was ever put into the log.
        note: the same, signed.
        segments, lines: how many went in by this run.
        gaps: segments that went in although the one before them is missing.
        refused: what did not go in, and why.
        waiting: what does not go in yet.
        cosigned: names of the witnesses that cosigned the head.
        unwitnessed: what witnesses said that contradicts this log, though enough others have cosigned.
        taken_at: the size of a log that was taken as it was found, since nothing was remembered of it; None:
            there was no log, or it was held against what was remembered.
    """

    head: Checkpoint | None
    note: bytes | None
    segments: int = 0
    lines: int = 0
    gaps: tuple[str, ...] = ()
    refused: tuple[Refused, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    cosigned: tuple[str, ...] = ()
    unwitnessed: tuple[str, ...] = ()
    taken_at: int | None = None

    @property
    def is_clean(self) -> bool:
        """Whether nothing is missing, nothing was refused, and no witness contradicts."""
        return not self.gaps and not self.refused and not self.unwitnessed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Current:
    """The log as it stands in the sink, verified.

    Attributes:
        signed: None: there is no log yet.
        version: of the object that the head is.
        edge: of its tree.
        tail: the entries of its last bundle, where that is not full.
    """

    head: Checkpoint
    signed: SignedCheckpoint | None
    version: str | None
    edge: Edge
    tail: tuple[bytes, ...]


class Sequencer:
    """Sequences one sink, again and again; used by one thread at a time.

    Args:
        sink: which has to be able to replace an object (`strongroom.stores.offers.Replacing`).
        log: which log, and who signs.
        state: what is remembered between runs; None: nothing, so that a log that was set back is not noticed,
            and what is in the tree is read from it once.
        wait_for_gaps_s: how long a segment waits for the ones before it.
        vouchers: whose certificates over writers count, where two claim one writer's id.
        limits: of one plan.
        clock_ns: nanoseconds since the epoch.

    Raises:
        ConfigError: the sink cannot replace an object.
    """

    def __init__(
        self,
        sink: Store,
        log: Log,
        *,
        state: LogState | None = None,
        wait_for_gaps_s: float = 3600.0,
        vouchers: Vouchers | None = None,
        limits: Limits | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        if not isinstance(sink, Replacing):
            raise ConfigError(
                f"{sink.uri} cannot put one object in another's place at once, which a log's head needs; "
                "keep the log in a folder or in a bucket"
            )
        self._sink: Store = sink
        self._replacing: Replacing = sink
        self._log = log
        self._state = state
        self._chooser = Chooser(
            sink, wait_s=wait_for_gaps_s, limits=limits or Limits(), vouchers=vouchers, clock_ns=clock_ns
        )
        self._unwitnessed: dict[str, str] = {}
        self._sequence: Sequence | None = None
        self._taken_at: int | None = None
        self._device: int | None = None

    def run_once(self) -> Sequenced:
        """Bring everything into the tree that can go in now.

        Raises:
            IntegrityError: the log in the sink is not the one that was signed before, grown, or not whole, or
                a planned segment was changed or removed. Nothing is signed.
            UntrustedError: its head is not signed by the log's keys.
            StoreError: the sink or too many witnesses could not be asked, or the sink's folder is not there;
                what was begun is gone on with next time.
        """
        done = _Done()
        self._unwitnessed = {}
        self._taken_at = None
        self._refuse_what_is_away()
        try:
            for _ in range(_TURNS):
                found = self._run(done)
                if found is not None:
                    self._device = device_of(self._sink)
                    return found
                self._sequence = None
        except IntegrityError as error:
            self._sequence = None
            # What lies below a mount that went away is no log that was changed.
            self._refuse_what_is_away(error)
            raise
        except BaseException:
            # It may hold what was chosen and never went in.
            self._sequence = None
            raise
        raise StoreUnavailableError(
            f"{self._sink.uri}: another sequencer was faster {_TURNS} times; leave the log to one of them"
        )

    def follow(self, every_s: float, stop: threading.Event) -> Iterator[Sequenced | StoreError]:
        """Run again and again, until told to stop; what could not be asked is told, and asked again.

        Raises:
            IntegrityError, UntrustedError: as `run_once`: this does not pass by itself.
        """
        while not stop.is_set():
            try:
                yield self.run_once()
            except (StoreError, OutcomeUnknownError) as error:
                yield error if isinstance(error, StoreError) else StoreUnavailableError(str(error))
            stop.wait(every_s)

    def _refuse_what_is_away(self, error: IntegrityError | None = None) -> None:
        """Tell a folder that is out of reach from a log that is not the one that was signed.

        Args:
            error: what is wrong with what is there.

        Raises:
            StoreUnavailableError: it is out of reach.
        """
        absent = absent_folder(self._sink)
        is_known = error is not None and self._device is not None
        if absent is None and is_known and device_of(self._sink) != self._device:
            absent = f"{self._sink.uri} is on another file system than before: its mount is away ({error})"
        if absent is not None:
            raise StoreUnavailableError(absent) from error

    def _run(self, done: _Done) -> Sequenced | None:
        """One run; None: another sequencer was faster."""
        current = self._open()
        self._check_state(current)
        self._catch_up(current)
        listed = list_segments(self._sink).segments
        while True:
            sequence = self._catch_up(current)
            plan = self._standing_plan(current.head.size)
            if plan is not None:
                chosen = self._chooser.follow(plan, sequence, listed)
            else:
                chosen = self._chooser.choose(listed, sequence)
                if not chosen.segments:
                    return done.told(current.signed, chosen, self._unwitnessed, self._taken_at)
                plan = Plan(size=current.head.size, segments=tuple(chosen.segments))
                if not self._create(plan):
                    # Another's plan stands, and is carried out in this one's place.
                    self._sequence = None
                    continue
            grown = self._carry_out(chosen, current)
            if grown is None:
                return None
            if self._state is not None:
                self._state.remember(chosen.facts, grown.head.size, grown.head.root, self._log.signers[0])
            done.add(plan)
            current = grown

    # What stands

    def _open(self) -> _Current:
        try:
            version = self._sink.stat(_KEY).version
            data = self._sink.read(_KEY, limit_bytes=MAX_NOTE_BYTES)
        except ObjectNotFoundError:
            head = Checkpoint(origin=self._log.origin, size=0, root=EMPTY_ROOT)
            return _Current(head=head, signed=None, version=None, edge=Edge(), tail=())
        signed = open_checkpoint(data, self._log.keys, f"{self._sink.uri}/{_KEY}")
        reader = TreeReader(self._sink, signed.head)
        is_full = signed.head.size % TILE_WIDTH == 0
        return _Current(
            head=signed.head,
            signed=signed,
            version=version,
            edge=reader.edge(),
            tail=() if is_full else tuple(reader.entries(signed.head.size // TILE_WIDTH)),
        )

    def _check_state(self, current: _Current) -> None:
        """Refuse a log that is not the one that was signed last, grown."""
        if self._state is None:
            return
        note = self._state.read()
        if note is None:
            self._taken_at = current.head.size or None
            self._note_state(current)
            return
        before = open_checkpoint(note, self._log.keys, f"the state {self._state.path}").head
        where = f"{self._sink.uri}/{_KEY}"
        advice = (
            "find out who has written there, and put the log back from a copy; nothing is signed until then"
        )
        if current.signed is None:
            raise IntegrityError(
                f"{where} is absent, and the state {self._state.path} holds a head of size {before.size} "
                f"that was signed and published there: the log was removed; {advice}"
            )
        if current.head.size < before.size:
            raise IntegrityError(
                f"{where} has size {current.head.size}, and size {before.size} was signed and published "
                f"there: the log was set back; {advice}"
            )
        try:
            check_consistency(
                old_size=before.size,
                old_root=before.root,
                size=current.head.size,
                root=current.head.root,
                proof=TreeReader(self._sink, current.head).consistency_proof(before.size),
            )
        except IntegrityError as error:
            raise IntegrityError(
                f"{where} is not the log that the state {self._state.path} knows, grown: {error}; {advice}"
            ) from error
        if current.head.size > before.size:
            # Published by another sequencer, or by one that died before it could remember.
            self._note_state(current)

    def _note_state(self, current: _Current) -> None:
        if self._state is not None and current.signed is not None:
            self._state.write(current.signed.note.to_bytes())

    def _catch_up(self, current: _Current) -> Sequence:
        """What is in the tree: as this process knows it, as it is remembered, or read from the tree."""
        if self._sequence is not None and self._sequence.size == current.head.size:
            return self._sequence
        reader = TreeReader(self._sink, current.head)
        remembered = None if self._state is None else self._state.remembered(self._log.keys.keys)
        if remembered is not None:
            sequence, root = remembered
            if sequence.size > current.head.size or reader.root_at(sequence.size) != root:
                remembered = None
        sequence = Sequence() if remembered is None else remembered[0]
        if remembered is None and self._state is not None:
            self._state.forget()
        if sequence.size < current.head.size:
            _LOG.info("reading entries %s to %s of the log", sequence.size, current.head.size)
            found = sequence.follow(reader.walk(sequence.size))
            if self._state is not None:
                self._state.remember(found, current.head.size, current.head.root, self._log.signers[0])
        self._sequence = sequence
        return sequence

    # What is done

    def _standing_plan(self, size: int) -> Plan | None:
        key = plan_key(size)
        try:
            data = self._sink.read(key, limit_bytes=MAX_PLAN_BYTES)
        except ObjectNotFoundError:
            return None
        return Plan.parse(data, size, f"{self._sink.uri}/{key}")

    def _create(self, plan: Plan) -> bool:
        """Create a plan; whether it is this one that stands, and not another's."""
        try:
            return self._sink.put_if_absent(plan_key(plan.size), plan.to_bytes())
        except OutcomeUnknownError as error:
            if self._standing_plan(plan.size) is None:
                raise StoreUnavailableError(str(error)) from error
            return False  # whatever stands there now is carried out

    def _carry_out(self, chosen: Chosen, current: _Current) -> _Current | None:
        """Make the larger tree, and publish its head; None: another head was published meanwhile."""
        growth, files = grow(current.edge, current.tail, chosen.lines)
        write_growth(self._sink, files)
        head = Checkpoint(origin=self._log.origin, size=growth.edge.size, root=growth.edge.root())
        data = self._signed(head, current).to_bytes()
        try:
            if not self._replacing.replace(_KEY, data, version=current.version):
                return None
        except OutcomeUnknownError as error:
            _LOG.info("looking what stands: %s", error)
        # Looked at again, so that a head that another sequencer published since is never replaced unseen.
        version = self._sink.stat(_KEY).version
        if self._sink.read(_KEY, limit_bytes=MAX_NOTE_BYTES) != data:
            return None
        if self._state is not None:
            self._state.write(data)
        tail = [*current.tail, *chosen.lines]
        return _Current(
            head=head,
            signed=open_checkpoint(data, self._known(), f"{self._sink.uri}/{_KEY}"),
            version=version,
            edge=growth.edge,
            tail=tuple(tail[len(tail) - head.size % TILE_WIDTH :]),
        )

    def _signed(self, head: Checkpoint, current: _Current) -> Note:
        """A head, signed by the log and cosigned by its witnesses."""
        text = head.text()
        note = Note(text=text, signatures=tuple(each.sign(text) for each in self._log.signers))
        cosignatures: list[NoteSignature] = []
        names: set[str] = set()
        failures: list[StoreError] = []
        contradictions: list[IntegrityError] = []
        reader = TreeReader(self._sink, head)
        for witness in self._log.witnesses:
            try:
                found = witness.cosign(
                    note,
                    head.size,
                    reader.consistency_proof,
                    self._log.policy.keys,
                    old_size=current.head.size,
                )
            except StoreError as error:
                failures.append(error)
                continue
            except IntegrityError as error:
                # One that lies must not keep a log from growing that enough others have seen grow.
                contradictions.append(error)
                self._unwitnessed[witness.url] = str(error)
                continue
            cosignatures += [each.signature for each in found]
            names |= {each.key.name for each in found}
        if len(names) < self._log.policy.required:
            if contradictions:
                raise contradictions[0]
            reasons = "; ".join(str(each) for each in failures) or "the others answered by other keys"
            raise StoreUnavailableError(
                f"{len(names)} witnesses cosigned the log's head of size {head.size}, and "
                f"{self._log.policy.required} have to before it is published: {reasons}"
            )
        for failure in failures:
            _LOG.warning("%s", failure)
        for contradiction in contradictions:
            _LOG.error("%s; published all the same, by the word of %s", contradiction, sorted(names))
        return Note(text=text, signatures=(*note.signatures, *cosignatures))

    def _known(self) -> LogKeys:
        keys = self._log.keys
        return LogKeys(origin=keys.origin, keys=keys.keys, witnesses=self._log.policy)


class _Done:
    """What went in so far by one run."""

    def __init__(self) -> None:
        self._segments = 0
        self._lines = 0
        self._gaps: list[str] = []

    def add(self, plan: Plan) -> None:
        self._segments += len(plan.segments)
        self._lines += plan.end - plan.size
        self._gaps += [each.key for each in plan.segments if each.follows_gap]

    def told(
        self,
        signed: SignedCheckpoint | None,
        last: Chosen,
        unwitnessed: Mapping[str, str],
        taken_at: int | None,
    ) -> Sequenced:
        return Sequenced(
            head=None if signed is None else signed.head,
            note=None if signed is None else signed.note.to_bytes(),
            segments=self._segments,
            lines=self._lines,
            gaps=tuple(self._gaps),
            refused=tuple(last.refused),
            waiting=tuple(last.waiting),
            cosigned=() if signed is None else tuple(sorted({each.key.name for each in signed.cosigned})),
            unwitnessed=tuple(unwitnessed.values()),
            taken_at=taken_at,
        )


def sequence_once(
    sink: Store,
    log: Log,
    *,
    state: LogState | None = None,
    wait_for_gaps_s: float = 3600.0,
    vouchers: Vouchers | None = None,
) -> Sequenced:
    """Bring everything into the tree that can go in now; see `Sequencer.run_once`."""
    return Sequencer(sink, log, state=state, wait_for_gaps_s=wait_for_gaps_s, vouchers=vouchers).run_once()
