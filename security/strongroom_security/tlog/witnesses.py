"""Opening a tree head: signed by the log, and cosigned by as many witnesses as a policy asks for. Pure.

A witness says that it has seen this tree, and that it is the one it saw before, grown. Without one, a log
could show different trees to different people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strongroom.errors import ConfigError, IntegrityError, UntrustedError
from strongroom_security.tlog.checkpoints import Checkpoint
from strongroom_security.tlog.notekeys import Verified, VerifierKey, verify_note
from strongroom_security.tlog.notes import Note

__all__ = ["NO_WITNESSES", "LogKeys", "SignedCheckpoint", "WitnessPolicy", "open_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessPolicy:
    """So many of these witnesses.

    Attributes:
        keys: theirs, each of a cosignature's type.
        required: how many different names among them have to have cosigned.
    """

    keys: tuple[VerifierKey, ...] = ()
    required: int = 0

    def __post_init__(self) -> None:
        wrong = [str(key) for key in self.keys if not key.type.is_cosignature]
        if wrong:
            raise ConfigError(
                f"a witness's key is of type 04 or 06 (C2SP tlog-cosignature); found {wrong[0]}"
            )
        names = {key.name for key in self.keys}
        if not 0 <= self.required <= len(names):
            raise ConfigError(
                f"{self.required} witnesses are asked for, and the keys of {len(names)} are known; name as "
                "many keys as have to cosign, or ask for fewer"
            )


NO_WITNESSES = WitnessPolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogKeys:
    """Which log is believed.

    Attributes:
        origin: the log's.
        keys: its keys; it has to have signed by one at least. Old ones stay here until nothing is read that
            only they have signed.
        witnesses: who has to have cosigned.
    """

    origin: str
    keys: tuple[VerifierKey, ...]
    witnesses: WitnessPolicy = NO_WITNESSES

    def __post_init__(self) -> None:
        if not self.keys:
            raise ConfigError(f"no key is known of the log {self.origin}; name one at least")
        wrong = [str(key) for key in self.keys if key.type.is_cosignature]
        if wrong:
            raise ConfigError(f"a log's key is of type 01 or 02 (C2SP signed-note); found {wrong[0]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedCheckpoint:
    """A tree head whose signatures hold.

    Attributes:
        head: what it says.
        note: as it was read.
        signed: by the log.
        cosigned: by witnesses that are known, with the time that each says.
    """

    head: Checkpoint
    note: Note
    signed: tuple[Verified, ...]
    cosigned: tuple[Verified, ...]


def open_checkpoint(data: bytes, log: LogKeys, what: str) -> SignedCheckpoint:
    """A signed tree head, once the log's signature and enough cosignatures hold.

    Args:
        data: the note.
        log: which log, and who has to have signed.
        what: names it in errors.

    Raises:
        FormatError: it is no signed tree head.
        IntegrityError: it is another log's, or a signature by a known key does not hold.
        UntrustedError: the log has not signed it, or too few witnesses have cosigned it.
    """
    note = Note.parse(data, what)
    verified = verify_note(note, (*log.keys, *log.witnesses.keys), what)
    signed, cosigned = _sorted(verified)
    if not signed:
        raise UntrustedError(
            f"{what} is cosigned by {', '.join(each.key.name for each in cosigned)} but not signed by the "
            f"log; expected {' or '.join(str(key) for key in log.keys)}"
        )
    head = Checkpoint.parse(note.text, what)
    if head.origin != log.origin:
        raise IntegrityError(f"{what} is of the log {head.origin!r:.100}, expected {log.origin!r}")
    names = {each.key.name for each in cosigned}
    if len(names) < log.witnesses.required:
        raise UntrustedError(
            f"{what} (size {head.size}) is cosigned by {len(names)} of the known witnesses "
            f"({', '.join(sorted(names)) or 'none'}), {log.witnesses.required} are asked for"
        )
    return SignedCheckpoint(head=head, note=note, signed=signed, cosigned=cosigned)


def _sorted(verified: Sequence[Verified]) -> tuple[tuple[Verified, ...], tuple[Verified, ...]]:
    return (
        tuple(each for each in verified if not each.key.type.is_cosignature),
        tuple(each for each in verified if each.key.type.is_cosignature),
    )
