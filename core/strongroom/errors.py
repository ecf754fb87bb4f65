"""The whole exception tree; every error that Strongroom raises on purpose stands here.

::

    StrongroomError
    ├── ConfigError                 an argument, option, policy or environment that cannot work
    ├── StateError                  about the caller's state
    │   ├── StateEncodingError      a value has no safe encoding; names its key path
    │   └── StateMismatchError      checkpoint and caller's state differ; lists all differences
    ├── IntegrityError              bytes were read and are wrong, or a committed object is absent
    │   ├── FormatError             bytes that do not follow the format, or exceed its bounds
    │   ├── UnsealedError           not sealed, where the policy demands that checkpoints are
    │   ├── UntrustedError          not signed by whom the policy trusts, where it demands that
    │   └── NoWholeCheckpointError  commits exist, none is whole; carries every reason
    ├── NoKeyError                  sealed, and no key here opens it, or who keeps the key refuses
    ├── KeyServiceError             who keeps a key (KMS, vault, HSM) timed out, throttles or is out of reach
    ├── AuditError                  it could not be put on record first, so it was not done
    ├── ProvenanceMismatchError     the program has other data (or code) than the checkpoint was saved with
    ├── RollbackError               further back than allowed: too many skipped, or below the floor
    ├── UnsupportedFormatError      whole, but written in a format that this release does not read
    ├── CheckpointNotFoundError     no committed checkpoint by that step
    ├── StoreError                  the store could not do what was asked
    │   ├── ObjectNotFoundError     the object is definitely absent
    │   ├── ObjectExistsError       an object of that name stands already, and is never overwritten
    │   ├── AccessDeniedError       the store refused (permissions, credentials)
    │   ├── StoreFullError          no space or quota left
    │   └── StoreUnavailableError   timed out, throttled, I/O error, out of reach
    ├── ReplicationError            a checkpoint is not on every tier that it should be on
    ├── SaveError                   a save did not commit
    │   ├── DeadlineExceededError   the attempt's deadline passed before its commit
    │   └── OutcomeUnknownError     the commit was sent and its answer lost: it may stand
    ├── RanksError                  the ranks of one job could not act together; names ranks and phase
    │   ├── RanksMissingError       some did not answer within the timeout: dead, stopped or slow
    │   ├── RanksDisagreeError      they were asked for different things, or hold different values
    │   └── RankFailedError         one failed with an error that is not Strongroom's own
    ├── WaitTimeoutError            a wait ended first; what was waited for goes on
    ├── FencedError                 a later writer has taken the run over
    └── ClosedError                 the checkpointer was closed

What may make a restore fall back to an older checkpoint is an `IntegrityError` and nothing
else: a store or a keeper of keys that denies, throttles, timed out or is out of reach says nothing
about the bytes, so it raises.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AccessDeniedError",
    "AuditError",
    "CheckpointNotFoundError",
    "ClosedError",
    "ConfigError",
    "DeadlineExceededError",
    "FencedError",
    "FormatError",
    "IntegrityError",
    "KeyServiceError",
    "NoKeyError",
    "NoWholeCheckpointError",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "OutcomeUnknownError",
    "ProvenanceMismatchError",
    "RankFailedError",
    "RanksDisagreeError",
    "RanksError",
    "RanksMissingError",
    "ReplicationError",
    "RollbackError",
    "SaveError",
    "StateEncodingError",
    "StateError",
    "StateMismatchError",
    "StoreError",
    "StoreFullError",
    "StoreUnavailableError",
    "StrongroomError",
    "UnsealedError",
    "UnsupportedFormatError",
    "UntrustedError",
    "WaitTimeoutError",
]


class StrongroomError(Exception):
    """The parent of every error that Strongroom raises on purpose."""


class ConfigError(StrongroomError):
    """An argument, option, policy or environment that cannot work."""


class StateError(StrongroomError):
    """About the state that the caller handed in."""


class StateEncodingError(StateError):
    """A value in the state has no safe encoding.

    Attributes:
        key_path: where the value stands, as ``state['extra']['loss_fn']``.
    """

    def __init__(self, key_path: str, problem: str) -> None:
        super().__init__(f"{key_path}: {problem}")
        self.key_path = key_path


class StateMismatchError(StateError):
    """The checkpoint and the caller's state do not fit; raised before anything is written.

    Attributes:
        missing: names the caller asks for that the checkpoint lacks.
        unexpected: names the checkpoint holds that the caller's state has no place for.
        different: one sentence for each name whose shape, dtype or kind differs.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        different: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.different = tuple(different)


class IntegrityError(StrongroomError):
    """Bytes were read and are wrong, or an object that a commit pins is absent."""


class FormatError(IntegrityError):
    """Bytes that do not follow the format or exceed one of its bounds."""


class UnsealedError(IntegrityError):
    """The policy demands sealed checkpoints, and this one is not: nothing says who wrote it."""


class UntrustedError(IntegrityError):
    """The policy demands signatures, and nobody whom it trusts with this stands for it.

    It is unsigned, a signature is wrong, or whoever made it is not, no longer or not yet trusted.
    """


class NoWholeCheckpointError(IntegrityError):
    """Commits exist, but none of them is whole.

    Attributes:
        reasons: ``(step, reason)`` for every candidate, in the order they were tried.
        undefined: names of the caller's tensors that were written to and hold no defined value.
    """

    def __init__(
        self,
        message: str,
        *,
        reasons: Sequence[tuple[int, str]] = (),
        undefined: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)
        self.undefined = tuple(undefined)


class NoKeyError(StrongroomError):
    """The checkpoint is sealed and no key here opens it: none fits, or who keeps it refuses.

    It says nothing about the bytes, so a restore does not fall back.
    """


class KeyServiceError(StrongroomError):
    """Who keeps a key (a KMS, a vault, an HSM) timed out, throttles or is out of reach.

    It says nothing about the bytes, so a restore does not fall back.
    """


class AuditError(StrongroomError):
    """What was about to be done could not be put on record first, and was not done.

    Reads fail closed: a checkpoint that nobody could be shown to have read is not read.
    """


class ProvenanceMismatchError(StrongroomError):
    """What the program trains with is not what the checkpoint was saved with, and that was to be refused.

    Raised before anything is written into the caller's state; it says nothing about the bytes, so a
    restore does not fall back.

    Attributes:
        different: one sentence for each change that is refused.
    """

    def __init__(self, message: str, *, different: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.different = tuple(different)


class RollbackError(StrongroomError):
    """Restoring would go back further than allowed.

    Attributes:
        reasons: ``(step, reason)`` for every checkpoint that was skipped.
    """

    def __init__(self, message: str, *, reasons: Sequence[tuple[int, str]] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)


class UnsupportedFormatError(StrongroomError):
    """A whole document in a format that this release does not read."""


class CheckpointNotFoundError(StrongroomError):
    """No committed checkpoint by that step."""


class StoreError(StrongroomError):
    """The store could not do what was asked."""


class ObjectNotFoundError(StoreError):
    """The object is definitely absent: the store was asked and answered."""


class ObjectExistsError(StoreError):
    """An object of that name stands already; none is ever overwritten."""


class AccessDeniedError(StoreError):
    """The store refused: permissions or credentials."""


class StoreFullError(StoreError):
    """No space, inodes or quota left."""


class StoreUnavailableError(StoreError):
    """Timed out, throttled, failed with an I/O error, or out of reach."""


class ReplicationError(StrongroomError):
    """A checkpoint is not on every tier that it should be on; on the first one it stands all the same.

    Attributes:
        tiers: URIs of those that it is not on.
    """

    def __init__(self, message: str, *, tiers: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tiers = tuple(tiers)


class SaveError(StrongroomError):
    """A save did not commit; the last committed checkpoint is untouched."""


class DeadlineExceededError(SaveError):
    """The attempt's deadline passed before its commit, so it never commits."""


class OutcomeUnknownError(SaveError):
    """The commit was sent and its answer lost: the checkpoint may stand.

    Opening the root again tells; nothing that was committed before is affected.
    """


class RanksError(StrongroomError):
    """The ranks of one job could not act together; nothing was committed or loaded by it.

    Attributes:
        ranks: the ranks that it is about.
        phase: what they were doing.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = (), phase: str = "") -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.phase = phase


class RanksMissingError(RanksError):
    """Some ranks did not answer within the timeout: they died, were stopped, or are slow."""


class RanksDisagreeError(RanksError):
    """Ranks were asked for different things, or hold different values where one is common to all."""


class RankFailedError(RanksError):
    """Another rank failed with an error that is not Strongroom's own."""


class WaitTimeoutError(StrongroomError):
    """A bounded wait ended before what it waited for; that goes on in the background."""


class FencedError(StrongroomError):
    """A later writer has taken the run over; this one must not commit any more."""


class ClosedError(StrongroomError):
    """The checkpointer was closed."""
