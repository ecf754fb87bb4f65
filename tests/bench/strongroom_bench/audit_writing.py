"""What the audit log costs whoever writes it: an event, many, a save, an intent to read."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Final

from strongroom.auditing import Act, Action, Outcome, Phase
from strongroom.layout import CheckpointName
from strongroom_bench.figure import Figure, beside, fold, percentile, setting
from strongroom_bench.measure import interleave, seconds
from strongroom_bench.scale import Scale
from strongroom_bench.states import Saver, drop, small_state
from strongroom_security import Audit, SecurityPolicy
from strongroom_security.signers.generating import generate_key

__all__ = ["measure"]

_WITHIN_S: Final = 60.0
_CHUNK: Final = 1_000
_ACT: Final = Act(
    action=Action.SAVE,
    phase=Phase.FINISHED,
    outcome=Outcome.SUCCESS,
    operation="0" * 16,
    root="s3://checkpoints/runs/run-a",
    run="run-a",
    checkpoint=CheckpointName(launch=1, step=100, attempt="0" * 16),
    details={"size_bytes": 1 << 40, "files": 64},
)


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Record events, save with a log and without, and intend to read; the sink is a folder."""
    place = folder / "audit-writing"
    place.mkdir()
    generate_key(place / "signer.pem")
    figures = [*_events(scale, place), _save(scale, place), _intent(scale, place)]
    drop(place)
    return figures


def _policy(place: Path, name: str) -> SecurityPolicy:
    return SecurityPolicy(
        audit=Audit(sink=f"dir:log-{name}", key="file:signer.pem", spool=f"spool-{name}", base=place)
    )


def _events(scale: Scale, place: Path) -> list[Figure]:
    auditor = _policy(place, "events").auditor
    auditor.record(_ACT)
    rates, each = [], []
    for _ in range(max(1, min(scale.events, 100_000) // _CHUNK)):
        # All threads of the process: what seals and sends is a part of what an event costs.
        began, used = time.perf_counter(), time.process_time()
        for _ in range(_CHUNK):
            auditor.record(_ACT)
        each.append((time.perf_counter() - began) / _CHUNK * 1e6)
        rates.append(_CHUNK / (time.process_time() - used))
    auditor.close(within_s=_WITHIN_S)
    words = f"segments of 1,000, P-256 in a file; {_CHUNK:,} events a round, one thread that records"
    return [
        Figure(
            figure="audit: events recorded in a second of one core",
            value=statistics.median(rates),
            unit="events/s",
            runs=len(rates),
            setting=words,
            spread={"events/s": (min(rates), max(rates))},
        ),
        Figure(
            figure="audit: record one event",
            value=statistics.median(each),
            unit="us",
            peers={"99th percentile us": percentile(each, 99)},
            runs=len(each),
            setting=words,
            spread={"us": (min(each), max(each))},
        ),
    ]


def _save(scale: Scale, place: Path) -> Figure:
    state = {"model": small_state(scale)}
    plain = Saver(place / "plain", state)
    policy = _policy(place, "save")
    audited = Saver(place / "audited", state, security=policy)
    samples = interleave(
        [audited.contestant("with a log"), plain.contestant("without")],
        rounds=scale.rounds,
        warm_ups=scale.warm_ups,
        flushes=scale.flushes,
    )
    for saver in (plain, audited):
        saver.checkpointer.close()
    policy.auditor.close(within_s=_WITHIN_S)
    return beside(
        "audit: stall of a save with a log / without",
        "with a log",
        "without",
        fold(samples, "stall"),
        setting=setting(f"{scale.small_tensors} tensors of 1 KiB"),
        note="one event is recorded while the program waits; the rest beside it",
    )


def _intent(scale: Scale, place: Path) -> Figure:
    auditor = _policy(place, "intent").auditor
    auditor.intend(_ACT)
    taken = [seconds(lambda: auditor.intend(_ACT)) * 1e3 for _ in range(10 * scale.rounds)]
    auditor.close(within_s=_WITHIN_S)
    return Figure(
        figure="audit: have an intent to read on record",
        value=statistics.median(taken),
        unit="ms",
        peers={"99th percentile ms": percentile(taken, 99)},
        runs=len(taken),
        setting="a segment of its own, fsynced in the spool and in a sink that is a folder",
        spread={"ms": (min(taken), max(taken))},
    )
