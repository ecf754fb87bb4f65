"""A log of very many events: sequenced, indexed, asked both headline questions, and verified."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from strongroom.auditing import Act, Action, Outcome, Phase
from strongroom.layout import CheckpointName
from strongroom.stores.local import LocalStore
from strongroom.workers import processors
from strongroom_bench.figure import Figure
from strongroom_bench.measure import seconds
from strongroom_bench.scale import Scale
from strongroom_bench.states import drop
from strongroom_security.auditlog.asking.index import Index
from strongroom_security.auditlog.asking.indexing import refresh
from strongroom_security.auditlog.asking.queries import READS, Question, ask_operations
from strongroom_security.auditlog.format.events import Actor
from strongroom_security.auditlog.format.segments import SegmentChain, WriterKey
from strongroom_security.auditlog.sequencing.sequencing import Log, Sequencer
from strongroom_security.auditlog.verifying.checking import Demands, VerifiedLog, check_log
from strongroom_security.auditlog.verifying.spreading import spread
from strongroom_security.tlog.notekeys import NoteSigner

__all__ = ["measure"]

_TIME_MS: Final = 1_764_496_000_000
_DAY_MS: Final = 86_400_000
_WRITERS: Final = 40
_RUNS: Final = 10
_STEPS: Final = 200
"""Checkpoints of a run."""
_SEGMENT_EVENTS: Final = 1_000
_DAYS: Final = 5
_ROWS: Final = 100
"""As `strongroom audit query` shows without being asked for more."""
_BAR_S: Final = 1.0
_ORIGIN: Final = "bench.example/audit"


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Make the log, and read it in every way."""
    root = folder / "audit"
    sink = LocalStore(root / "log")
    each = max(2, scale.events // _WRITERS)
    made = sum(spread(partial(_write, root / "log", each), range(_WRITERS), size_bytes=scale.events * 1_000))
    signer = NoteSigner(_ORIGIN, Ed25519PrivateKey.from_private_bytes(b"\x07" * 32))
    log = Log(origin=_ORIGIN, signers=(signer,))
    sequence_s = seconds(lambda: Sequencer(sink, log).run_once())
    with Index(root / "index.sqlite", sink=sink.uri) as index:
        build_s = seconds(lambda: refresh(index, sink))
        counts = index.counts()
        if counts.events != made or counts.sequenced != made:
            raise RuntimeError(
                f"of {made} events {counts.events} were indexed, {counts.sequenced} as sequenced"
            )
        again_s = seconds(lambda: refresh(index, sink))
        who = Question(run="run-3", step=_STEPS // 2, actions=READS, or_intended=True)
        what = Question(run="run-3", since_ms=_TIME_MS + (_DAYS - 1) * _DAY_MS)
        who_s, found_who = _asked(index, who)
        what_s, found_what = _asked(index, what)
    size_mib = (root / "index.sqlite").stat().st_size / 2**20
    verified: list[VerifiedLog] = []
    verify_s = seconds(lambda: verified.append(check_log(sink, Demands(log=log.keys))))
    if verified[0].is_tampered or verified[0].totals.sequenced_events != made:
        raise RuntimeError(f"the log that was made is not whole: {verified[0].findings[:3]}")
    drop(root)
    words = f"{made:,} events of {_WRITERS} writers, {processors()} processors"
    more: dict[str, Any] = {"runs": 1, "setting": words}
    return [
        Figure(
            figure="audit: who read this checkpoint",
            value=who_s,
            unit="s",
            bar=_BAR_S,
            peers={"answered rows": float(found_who)},
            is_sound=found_who > 0,
            **more,
        ),
        Figure(
            figure="audit: what happened to this run in 24 h",
            value=what_s,
            unit="s",
            bar=_BAR_S,
            peers={"answered rows": float(found_what)},
            is_sound=found_what > 0,
            **more,
        ),
        Figure(
            figure="audit: build the index",
            value=build_s,
            unit="s",
            peers={
                "where nothing is new s": again_s,
                "at events/s": made / build_s,
                "file MiB": size_mib,
            },
            **more,
        ),
        Figure(
            figure="audit: verify chains, signatures and tree",
            value=verify_s,
            unit="s",
            peers={"at events/s": made / verify_s},
            **more,
        ),
        Figure(
            figure="audit: sequence",
            value=sequence_s,
            unit="s",
            peers={"at events/s": made / sequence_s},
            **more,
        ),
    ]


def _asked(index: Index, question: Question) -> tuple[float, int]:
    found: list[Any] = []
    took_s = seconds(lambda: found.extend(ask_operations(index, question, limit=_ROWS)))
    return took_s, len(found)


def _write(root: Path, count: int, number: int) -> int:
    """One writer's segments: what it intended and how that ended, over some days, of all checkpoints."""
    run = f"run-{number % _RUNS}"
    key = WriterKey(
        writer=f"{number + 1:032x}",
        run=run,
        private=Ed25519PrivateKey.from_private_bytes(bytes([number + 1]) * 32),
        host=f"node-{number}",
        pid=number + 1,
    )
    actor = Actor(
        user="trainer",
        uid="1000",
        pid=number + 1,
        process="train.py",
        host=key.host,
        ip="10.0.0.7",
        job={"slurm.SLURM_JOB_ID": "12", "slurm.SLURM_PROCID": str(number)},
        rank=number,
        identity=f"arn:aws:sts::111122223333:assumed-role/trainer/{number}",
        role="trainer-writer",
    )
    chain = SegmentChain(key)
    lines: list[bytes] = []
    for place in range(count):
        time_ms = _TIME_MS + place * _DAYS * _DAY_MS // count
        if place % _SEGMENT_EVENTS == 0:
            lines = [chain.open(time_ms=time_ms, certificate=None)]
        lines.append(chain.add(_act(run, number, place, count), actor, time_ms=time_ms))
        if place % _SEGMENT_EVENTS == _SEGMENT_EVENTS - 1 or place == count - 1:
            lines.append(chain.close(time_ms=time_ms, is_last=place == count - 1))
            path = root / chain.key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"".join(lines))
    return count


def _act(run: str, number: int, place: int, count: int) -> Act:
    is_end = place % 2 == 1
    return Act(
        action=(Action.RESTORE, Action.SAVE, Action.VERIFY, Action.UNWRAP)[place // 2 % 4],
        phase=Phase.FINISHED if is_end else Phase.INTENDED,
        outcome=Outcome.SUCCESS if is_end else Outcome.UNKNOWN,
        operation=f"{number:04x}{place // 2:012x}",
        root=f"s3://checkpoints/runs/{run}",
        run=run,
        checkpoint=CheckpointName(launch=1, step=place * _STEPS // count, attempt="a" * 16),
        details={"size_bytes": 1 << 30, "seconds": "12.5"} if is_end else {},
    )
