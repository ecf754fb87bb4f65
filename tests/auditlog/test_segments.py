"""The format of a segment (docs/format.md, 17): made as its clauses say, and each way to break it told."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from strongroom import canonical
from strongroom.auditing import Act, Action, Outcome, Phase
from strongroom.errors import FormatError
from strongroom.layout import CheckpointName
from strongroom_security.auditlog.format.events import Actor, recorded_of
from strongroom_security.auditlog.format.segments import (
    ProblemKind,
    SegmentChain,
    SegmentReading,
    WriterKey,
    closed_for,
    continues,
    read_segment,
)

WRITER = "0123456789abcdef0123456789abcdef"
TIME_MS = 1_764_496_000_000
NAME = CheckpointName(launch=3, step=1200, attempt="00112233445566aa")
ACTOR = Actor(
    user="ada",
    uid="1000",
    pid=42,
    process="train.py",
    host="node-7",
    ip="10.0.0.7",
    job={"slurm.SLURM_JOB_ID": "17"},
    rank=0,
    identity="arn:aws:sts::123456789012:assumed-role/trainer/i-1",
    role="trainer-writer",
)


def key(seed: int = 1, writer: str = WRITER) -> WriterKey:
    private = Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
    return WriterKey(writer=writer, run="run-a", private=private, host="node-7", pid=42)


def act(**changes: Any) -> Act:
    members: dict[str, Any] = {
        "action": Action.RESTORE,
        "phase": Phase.FINISHED,
        "outcome": Outcome.SUCCESS,
        "operation": "0011223344556677",
        "root": "s3://bucket/runs/run-a",
        "run": "run-a",
        "checkpoint": NAME,
        "details": {"size_bytes": 4096, "seconds": "1.5", "is_sealed": True},
    }
    return Act(**{**members, **changes})


def segment(chain: SegmentChain, events: int, *, is_last: bool = False) -> tuple[str, bytes]:
    lines = [chain.open(time_ms=TIME_MS, certificate=None)]
    lines += [chain.add(act(details={"n": n}), ACTOR, time_ms=TIME_MS + n) for n in range(events)]
    lines.append(chain.close(time_ms=TIME_MS + events, is_last=is_last))
    return chain.key, b"".join(lines)


def whole(events: int = 4) -> tuple[str, list[bytes]]:
    name, data = segment(SegmentChain(key()), events)
    return name, data.split(b"\n")[:-1]


def read(name: str, lines: list[bytes], torn: bytes = b"") -> SegmentReading:
    return read_segment(name, b"".join(line + b"\n" for line in lines) + torn)


def places(reading: SegmentReading) -> set[tuple[int, ProblemKind]]:
    return {(problem.line, problem.kind) for problem in reading.problems}


def test_a_segment_is_found_where_its_writer_run_and_hour_say() -> None:
    name, _ = whole()
    assert name == f"segments/run-a/20251130T09/{WRITER}-000001.jsonl"


def test_what_a_writer_makes_is_whole_from_segment_to_segment() -> None:
    chain = SegmentChain(key())
    readings = [read_segment(*segment(chain, events, is_last=events == 0)) for events in (3, 1, 0)]
    assert all(reading.is_whole for reading in readings)
    assert continues(readings[0], readings[1])
    assert continues(readings[1], readings[2])
    assert not continues(readings[0], readings[2])
    assert not continues(readings[1], readings[1])
    assert [reading.close is not None and reading.close.is_last for reading in readings] == [
        False,
        False,
        True,
    ]


def test_hash_and_signature_are_what_the_clauses_say_by_other_means() -> None:
    _, lines = whole()
    assert json.loads(lines[0])["prev"] == "0" * 64
    for before, line in itertools.pairwise(lines):
        value = json.loads(line)
        assert (value.get("strongroom") or value)["prev"] == hashlib.sha256(before).hexdigest()
    close = json.loads(lines[-1])
    signature = base64.b64decode(close.pop("signature"))
    spelled = json.dumps(close, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    field = b"strongroom.v1 audit close"
    public = Ed25519PublicKey.from_public_bytes(base64.b64decode(json.loads(lines[0])["key"]))
    public.verify(signature, len(field).to_bytes(4, "big") + field + spelled)


def test_an_event_says_in_ocsf_who_did_what_to_which_checkpoint_and_comes_back() -> None:
    _, lines = whole(1)
    value = json.loads(lines[1])
    assert (value["class_uid"], value["category_uid"], value["activity_id"], value["type_uid"]) == (
        6005,
        6,
        1,
        600501,
    )
    assert value["metadata"]["version"] == "1.5.0"
    recorded = recorded_of(value, "it")
    assert recorded.id == value["metadata"]["uid"] == f"{WRITER}-1"
    assert (recorded.user, recorded.host, recorded.ip) == ("ada", "node-7", "10.0.0.7")
    assert recorded.identity == ACTOR.identity
    assert recorded.role == "trainer-writer"
    assert recorded.checkpoint == NAME.folder
    assert recorded.run == "run-a"
    assert (recorded.action, recorded.phase, recorded.outcome) == ("restore", "finished", "success")


def test_what_cannot_be_spelled_or_is_too_long_is_recorded_all_the_same() -> None:
    chain = SegmentChain(key())
    lines = [chain.open(time_ms=TIME_MS, certificate=None)]
    odd = act(
        root="s3://b/\udcff" + "r" * 9000,
        path="p" * 9000,
        reason="\ud800" + "ä" * 5000,
        details={f"d{n}": "\udc80" * 5000 for n in range(500)} | {"half": 0.5, "huge": 2**80},
    )
    lines.append(chain.add(odd, ACTOR, time_ms=TIME_MS))
    lines.append(chain.close(time_ms=TIME_MS))
    assert read_segment(chain.key, b"".join(lines)).is_whole


EDITS: dict[str, Callable[[bytes], bytes]] = {
    "a figure": lambda line: line.replace(b'"time":17644960', b'"time":17644961'),
    "a member's name": lambda line: line.replace(b'"seq":', b'"sep":'),
    "the link": lambda line: line.replace(b'"prev":"', b'"prev":"f'),
    "a byte that is no JSON": lambda line: line[:-1] + b"\x00",
    "a space": lambda line: line.replace(b'":', b'": ', 1),
    "a member twice": lambda line: line[:-1] + b',"time":1}',
    "no JSON object": lambda _: b"[]",
    "nothing": lambda _: b"",
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_any_line_is_told_where_it_is(edit: str) -> None:
    name, lines = whole()
    for at in range(len(lines)):
        changed = [*lines]
        changed[at] = EDITS[edit](lines[at])
        assert changed[at] != lines[at]
        told = {line for line, _ in places(read(name, changed))}
        assert at + 1 in told, (edit, at, told)


def test_a_line_that_was_taken_out_put_in_or_moved_is_told_where() -> None:
    name, lines = whole(6)
    for at in range(1, len(lines) - 1):
        assert (at + 1, ProblemKind.MISSING) in places(read(name, lines[:at] + lines[at + 1 :]))
        again = read(name, [*lines[: at + 1], lines[at], *lines[at + 1 :]])
        assert (at + 2, ProblemKind.OUT_OF_ORDER) in places(again)
    for at in range(1, len(lines) - 2):
        moved = [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]
        assert at + 1 in {line for line, _ in places(read(name, moved))}
    no_opening = read(name, lines[1:])
    assert no_opening.opened is None
    assert (1, ProblemKind.MALFORMED) in places(no_opening)


def test_a_cut_is_told_at_every_byte() -> None:
    name, lines = whole(2)
    data = b"".join(line + b"\n" for line in lines)
    for length in range(len(data)):
        kinds = {problem.kind for problem in read_segment(name, data[:length]).problems}
        assert ProblemKind.UNCLOSED in kinds, length
        assert (ProblemKind.TORN in kinds) is (data[length - 1 : length] not in (b"\n", b"")), length


def test_a_closing_line_by_another_key_is_forged() -> None:
    name, lines = whole()
    forger = key(seed=2)
    chain = SegmentChain(forger)
    _, forged = segment(chain, 4)
    # The whole segment made anew by somebody with a key of their own, who keeps the true opening line's key.
    opened = json.loads(lines[0])
    remade = forged.split(b"\n")[:-1]
    mine = json.loads(remade[0])
    assert mine["key"] != opened["key"]
    mine["key"] = opened["key"]
    remade[0] = canonical.encode(mine)
    assert {kind for _, kind in places(read(name, remade))} & {ProblemKind.FORGED_CLOSE, ProblemKind.CHANGED}
    close = json.loads(lines[-1])
    close["is_last"] = True
    assert places(read(name, [*lines[:-1], canonical.encode(close)])) == {
        (len(lines), ProblemKind.FORGED_CLOSE)
    }


def test_a_segment_that_was_put_at_another_ones_place_is_told() -> None:
    chain = SegmentChain(key())
    first, _ = segment(chain, 2)
    _, second = segment(chain, 2)
    assert (1, ProblemKind.ELSEWHERE) in places(read_segment(first, second))
    other = first.replace("run-a", "run-b")
    assert (1, ProblemKind.ELSEWHERE) in places(read_segment(other, second))


def test_what_a_dead_writer_left_is_closed_by_another_and_says_so() -> None:
    name, lines = whole(3)
    torn = b'{"activity_id":1,"act'
    left = read(name, lines[:-1], torn)
    by = key(seed=7, writer="f" * 32)
    data = closed_for(left, by, None, TIME_MS + 10)
    again = read_segment(name, data)
    assert again.is_whole
    assert again.lines[:-1] == tuple(lines[:-1])
    assert again.close is not None
    assert again.close.is_last
    assert again.close.salvaged is not None
    assert again.close.salvaged.writer == "f" * 32
    assert again.close.salvaged.torn == torn
    with pytest.raises(FormatError, match="closed already"):
        closed_for(again, by, None, TIME_MS)


def test_a_damaged_segment_is_not_closed_for_its_writer() -> None:
    name, lines = whole(3)
    left = read(name, [lines[0], lines[2], lines[3]])
    with pytest.raises(FormatError, match=r"is damaged.*missing"):
        closed_for(left, key(seed=7, writer="f" * 32), None, TIME_MS)


@pytest.mark.parametrize(
    "name",
    (
        "segments/run-a/20251130T09/x.jsonl",
        f"segments/../20251130T09/{WRITER}-000001.jsonl",
        f"segments/run-a/20251130T09/{WRITER}-0000001.jsonl",
        f"segments/run-a/20251130T09/{WRITER}-000000.jsonl",
        f"tlog/run-a/20251130T09/{WRITER}-000001.jsonl",
    ),
)
def test_a_name_that_is_no_segments_is_refused(name: str) -> None:
    with pytest.raises(FormatError, match="not the name of a segment"):
        read_segment(name, b"")


@given(st.binary(max_size=400))
def test_any_bytes_are_read_without_an_error_and_never_pass(data: bytes) -> None:
    name, _ = whole(0)
    assert not read_segment(name, data).is_whole


@given(st.data())
def test_any_json_in_a_line_is_read_without_an_error(data: st.DataObject) -> None:
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=8,
    )
    name, lines = whole(1)
    event = json.loads(lines[1])
    holder = data.draw(st.sampled_from(["strongroom", "metadata", "actor", "src_endpoint", "class_uid"]))
    event[holder] = data.draw(values)
    line = json.dumps(event).encode()
    reading = read_segment(name, b"\n".join([lines[0], line, lines[2], b""]), is_canonical=False)
    assert not reading.is_whole
    for number, value in reading.events():
        try:
            recorded_of(value, f"line {number}")
        except FormatError:
            continue
