"""Segments as writers make them, for tests of what is done with segments."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from strongroom.auditing import Act, Action, Outcome, Phase
from strongroom.stores.base import Store
from strongroom_security.auditlog.format.events import Actor
from strongroom_security.auditlog.format.segments import SegmentChain, WriterKey

TIME_MS = 1_764_496_000_000
HOUR_MS = 3_600_000
ACTOR = Actor(user="ada", uid="1000", pid=42, process="train.py", host="node-7")


class Writer:
    """One process that records: segment after segment, each with so many events."""

    def __init__(self, number: int = 1, *, run: str | None = "run-a", time_ms: int = TIME_MS) -> None:
        self.name = f"{number:032x}"
        private = Ed25519PrivateKey.from_private_bytes(bytes([number % 251 + 1]) * 32)
        self._chain = SegmentChain(
            WriterKey(writer=self.name, run=run, private=private, host="node-7", pid=42)
        )
        self._run = run
        self.time_ms = time_ms

    def segment(self, events: int = 2, *, is_last: bool = False) -> tuple[str, bytes]:
        """The next segment: its key, and its bytes."""
        lines = [self._chain.open(time_ms=self.time_ms, certificate=None)]
        for number in range(events):
            act = Act(
                action=Action.RESTORE,
                phase=Phase.FINISHED,
                outcome=Outcome.SUCCESS,
                operation="0011223344556677",
                run=self._run,
                details={"n": number},
            )
            lines.append(self._chain.add(act, ACTOR, time_ms=self.time_ms + number))
        lines.append(self._chain.close(time_ms=self.time_ms + events, is_last=is_last))
        return self._chain.key, b"".join(lines)

    def put(self, sink: Store, segments: int = 1, events: int = 2) -> list[str]:
        """Put so many segments into a sink; their keys."""
        keys = []
        for _ in range(segments):
            key, data = self.segment(events)
            assert sink.put_if_absent(key, data)
            keys.append(key)
        return keys


def lines_of(sink: Store, keys: list[str]) -> list[bytes]:
    """The lines of segments, one behind the other: what their entries have to be."""
    found: list[bytes] = []
    for key in keys:
        found += sink.read(key, limit_bytes=1 << 26).split(b"\n")[:-1]
    return found
