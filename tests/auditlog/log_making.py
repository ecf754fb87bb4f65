"""A small log that is whole, and hands that change it, for tests of who notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from strongroom import canonical
from strongroom.auditing import Act, Action, Outcome, Phase
from strongroom.layout import CheckpointName
from strongroom.stores.base import Store
from strongroom.stores.memory import MemoryStore
from strongroom_security.auditlog.format.events import Actor
from strongroom_security.auditlog.format.lines import Certificate, Close, hash_of
from strongroom_security.auditlog.format.segments import SegmentChain, WriterKey, read_segment
from strongroom_security.auditlog.listing import list_segments
from strongroom_security.auditlog.sequencing.sequencing import Log, Sequencer
from strongroom_security.auditlog.verifying.checking import Demands, VerifiedLog, check_log
from strongroom_security.auditlog.verifying.findings import Finding, FindingKind, Gravity
from strongroom_security.auditlog.verifying.trusting import Vouchers
from strongroom_security.publickeys import PublicKey
from strongroom_security.tlog.notekeys import NoteSigner

TIME_MS = 1_764_496_000_000
RUN = "run-a"
OTHER_RUN = "run-b"
ANN, BOB, CLEO = ("a" * 32, "b" * 32, "c" * 32)

VOUCHER = ec.derive_private_key(11, ec.SECP256R1())
STRANGER = ec.derive_private_key(12, ec.SECP256R1())
VOUCHERS = Vouchers([PublicKey.of(VOUCHER.public_key())])

ORIGIN = "example.com/audit"
LOG_KEY = NoteSigner(ORIGIN, Ed25519PrivateKey.from_private_bytes(b"\x07" * 32))
LOG = Log(origin=ORIGIN, signers=(LOG_KEY,))
DEMANDS = Demands(vouchers=VOUCHERS, log=LOG.keys)

Edit = Callable[[list[bytes]], list[bytes]]


def key_of(writer: str, run: str | None, seed: int) -> WriterKey:
    private = Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
    return WriterKey(writer=writer, run=run, private=private, host="node-7", pid=seed)


def certificate(key: WriterKey, by: ec.EllipticCurvePrivateKey = VOUCHER) -> Certificate:
    signature = by.sign(key.certified(), ec.ECDSA(hashes.SHA256()))
    return Certificate(key_id=PublicKey.of(by.public_key()).id, signature=signature)


def actor(name: str = "ada", **changes: Any) -> Actor:
    known: dict[str, Any] = {
        "user": name,
        "uid": "1000",
        "pid": 42,
        "process": "train.py",
        "host": "node-7",
        "ip": "10.0.0.7",
        "job": {"slurm.SLURM_JOB_ID": "12"},
        "role": "trainer-writer",
        "identity": f"arn:aws:sts::1:assumed-role/trainer/{name}",
        "rank": 0,
    }
    return Actor(**(known | changes))


def act(number: int = 0, *, run: str | None = RUN, **changes: Any) -> Act:
    known: dict[str, Any] = {
        "action": Action.RESTORE,
        "phase": Phase.FINISHED,
        "outcome": Outcome.SUCCESS,
        "operation": f"{number:016x}",
        "root": "s3://bucket/runs/a",
        "run": run,
        "checkpoint": CheckpointName(launch=1, step=100, attempt="a" * 16),
        "path": "shard-0",
        "byte_range": (0, 4096),
        "details": {"size_bytes": 3, "seconds": 1.5, "is_whole": True},
    }
    return Act(**(known | changes))


def segments_of(
    key: WriterKey, counts: list[int], *, is_last: bool, vouched: Certificate | None
) -> dict[str, bytes]:
    """A writer's segments, with so many events each."""
    chain = SegmentChain(key)
    found: dict[str, bytes] = {}
    number = 0
    for place, count in enumerate(counts, 1):
        lines = [chain.open(time_ms=TIME_MS, certificate=vouched)]
        for _ in range(count):
            lines.append(chain.add(act(number, run=key.run), actor(), time_ms=TIME_MS + number))
            number += 1
        lines.append(chain.close(time_ms=TIME_MS + number, is_last=is_last and place == len(counts)))
        found[chain.key] = b"".join(lines)
    return found


KEYS = {
    writer: key_of(writer, run, seed)
    for writer, run, seed in ((ANN, RUN, 1), (BOB, RUN, 2), (CLEO, OTHER_RUN, 3))
}
COUNTS = {ANN: [2, 3, 1], BOB: [2], CLEO: [2]}


def pristine() -> dict[str, bytes]:
    """Two runs, three writers, five segments; Ann and Cleo have ended, Bob is at work. Always the same."""
    return dict(_pristine())


@cache
def _pristine() -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for writer, key in KEYS.items():
        found |= segments_of(key, COUNTS[writer], is_last=writer != BOB, vouched=certificate(key))
    return found


def sink_with(segments: dict[str, bytes], *, has_tree: bool) -> MemoryStore:
    sink = MemoryStore()
    for key, data in segments.items():
        sink.put(key, data)
    if has_tree:
        sequence(sink)
    return sink


def sequence(sink: Store, log: Log = LOG) -> bytes:
    """Sequence all that there is; the signed checkpoint."""
    Sequencer(sink, log, wait_for_gaps_s=0).run_once()
    return sink.read("tlog/checkpoint", limit_bytes=1 << 20)


def put(sink: Store, key: str, data: bytes) -> None:
    """Put something in an object's place, as somebody may who is not held to create only."""
    sink.delete(key)
    sink.put(key, data)


def edit(sink: Store, key: str, change: Edit) -> None:
    data = sink.read(key, limit_bytes=1 << 28)
    put(sink, key, b"".join(line + b"\n" for line in change(data.split(b"\n")[:-1])))


def keys_in(sink: Store) -> list[str]:
    return list(list_segments(sink).segments)


def look(sink: Store, demands: Demands | None = None) -> VerifiedLog:
    """Verify as whoever has all keys does; before anything was sequenced they name no key of the log."""
    if demands is None:
        has_head = "checkpoint" in sink.list_names("tlog")
        demands = DEMANDS if has_head else Demands(vouchers=VOUCHERS)
    return check_log(sink, demands)


def tampering(found: VerifiedLog) -> list[Finding]:
    wrong = (Gravity.TAMPERED, Gravity.UNTRUSTED)
    return [finding for finding in found.findings if finding.gravity in wrong]


def places(found: VerifiedLog) -> set[tuple[str | None, int, FindingKind]]:
    """Where, and of which kind."""
    return {(finding.segment, finding.line, finding.kind) for finding in tampering(found)}


def rechained(key: str, lines: list[bytes], by: Ed25519PrivateKey, first: int = 0) -> list[bytes]:
    """Lines of which one was changed, and all after it made to follow; closed by a key that may not be it."""
    out = list(lines[: first + 1])
    for line in lines[first + 1 :]:
        value = canonical.decode(line, "a line", canonical.Bounds(length_bytes=1 << 20))
        holder = value["strongroom"] if "class_uid" in value else value
        holder["prev"] = hash_of(out[-1])
        out.append(canonical.encode(value))
    close = read_segment(key, b"".join(line + b"\n" for line in out)).values[-1]
    assert close is not None
    unsigned = Close.from_json(dict(close), "the closing line")
    signer = WriterKey(writer=unsigned.writer, run=None, private=by, host="", pid=0)
    out[-1] = canonical.encode(replace(unsigned, signature=signer.sign(unsigned)).to_json())
    return out


def leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a decoded line that is no object and no list."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, (*at, name))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from leaves(inner, (*at, place))
    else:
        yield at


def changed(line: bytes, path: tuple[Any, ...]) -> bytes:
    """A line with one value of it changed, spelled as it must be."""
    value = canonical.decode(line, "a line", canonical.Bounds(length_bytes=1 << 20))
    holder = value
    for name in path[:-1]:
        holder = holder[name]
    old = holder[path[-1]]
    holder[path[-1]] = _another(old)
    return canonical.encode(value)


def _another(old: Any) -> Any:
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return old + 1
    if isinstance(old, str):
        return ("b" if old[:1] == "a" else "a") + old[1:]
    return "a"
