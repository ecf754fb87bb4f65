"""What an auditor is told: where its log goes, who vouches for it, and how long anything may take. Values."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from strongroom.roles import Duty
from strongroom.stores.base import Store
from strongroom_security.auditlog.recording.actors import SessionOf
from strongroom_security.auditlog.recording.forwarding import receiver_of
from strongroom_security.signers.base import Signer

__all__ = ["INTENT_S", "SEAL_EVENTS", "SEAL_S", "SPOOL_BYTES", "AuditState", "Settings"]

SPOOL_BYTES: Final = 256 << 20
SEAL_S: Final = 5.0
SEAL_EVENTS: Final = 1_000
INTENT_S: Final = 30.0


def _draw() -> tuple[str, Ed25519PrivateKey]:
    return secrets.token_hex(16), Ed25519PrivateKey.generate()


def _own(duty: Duty) -> None:
    """This process's own session, for every duty."""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an auditor is told. It is checked where it comes from.

    Attributes:
        sink: URI of where the log is.
        open_sink: opens it; called beside the program, when something is first sent, and after a failure.
        signer: vouches for each writer's key; None: nobody does.
        spool: the folder in which segments wait; None: the usual one.
        spool_bytes: how much may wait there.
        seal_s, seal_events: how old, and how long, a segment grows before it is sealed.
        intent_s: seconds in which an intent has to be in the sink.
        also: who else hears of events, as the policy's texts.
        role: the name of the policy's role.
        session_of: by whose credentials AWS is asked.
        asks_aws: whether it is, wherever the checkpoints are.
        now_ms: the clock that events are told by.
        draw: a new writer's id and key.
        salvages: whether what dead processes left is sent beside the program.
        same: what auditors have in common that share one record in a process; None: it is shared with nobody.
    """

    sink: str
    open_sink: Callable[[], Store]
    signer: Signer | None = None
    spool: Path | None = None
    spool_bytes: int = SPOOL_BYTES
    seal_s: float = SEAL_S
    seal_events: int = SEAL_EVENTS
    intent_s: float = INTENT_S
    also: tuple[str, ...] = ()
    role: str | None = None
    session_of: SessionOf = _own
    asks_aws: bool = False
    now_ms: Callable[[], int] = _now_ms
    draw: Callable[[], tuple[str, Ed25519PrivateKey]] = _draw
    salvages: bool = True
    same: Hashable | None = None

    def __post_init__(self) -> None:
        for text in self.also:
            receiver_of(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditState:
    """How an auditor stands: the metric.

    Attributes:
        pending_events, pending_bytes: recorded here, and not yet in the sink.
        oldest_s: for how long the oldest of them has waited, in seconds; 0: none waits.
        failures: of tries to send a segment, since the last one that was accepted.
        error: why the last one failed, or why the spool takes nothing; None: all is well.
        lost: events that neither the spool nor memory had room for, since this process began.
    """

    pending_events: int = 0
    pending_bytes: int = 0
    oldest_s: float = 0.0
    failures: int = 0
    error: str | None = None
    lost: int = 0
