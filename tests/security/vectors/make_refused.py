"""Writes ``refused/``: ``python tests/security/vectors/make_refused.py``. The same bytes each time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from plain_floe import MIB, NOT_FINAL, File, i2be, seal, seal_parts

FOLDER = Path(__file__).parent / "refused"

SEGMENT = 64
"""Short, so that a file of several segments is; each holds `HELD` bytes."""
HELD = SEGMENT - 32
DEK = bytes(range(32))
OTHER_DEK = bytes(range(1, 33))
AAD = b"run, launch, step, attempt, path"
OTHER_AAD = b"run, launch, step, attempt, other"
PLAIN = bytes(range(3 * HELD + 7))
"""Four segments; the last is not full."""
ALIGNED = bytes(range(3 * HELD))
"""Three segments; the last is full."""


def drawn(seed: str) -> Callable[[int], bytes]:
    """Stands in for randomness, so that a vector can be made again."""
    counter = 0

    def draw(length: int) -> bytes:
        nonlocal counter
        counter += 1
        return hashlib.sha256(f"{seed} {counter}".encode()).digest()[:length]

    return draw


def parts(plain: bytes = PLAIN, *, seed: str = "file", dek: bytes = DEK, aad: bytes = AAD) -> list[bytes]:
    return seal_parts(dek, aad, plain, segment_bytes=SEGMENT, random=drawn(seed))


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def case(
    what: str,
    file: bytes,
    refused_at: str,
    *,
    segment: int | None = None,
    plain: bytes = b"",
    dek: bytes = DEK,
    aad: bytes = AAD,
    segment_bytes: int = SEGMENT,
) -> dict[str, object]:
    return {
        "what": what,
        "dek": dek.hex(),
        "aad": aad.hex(),
        "segment_bytes": segment_bytes,
        "file": file.hex(),
        "refused_at": refused_at,
        "segment": segment,
        "plain": plain.hex(),
    }


def at_segment(what: str, file: bytes, segment: int, plain: bytes = PLAIN) -> dict[str, object]:
    """A file of which everything before a segment opens."""
    return case(what, file, "segment", segment=segment, plain=plain[: segment * HELD])


def controls() -> Iterator[tuple[str, dict[str, object]]]:
    yield "intact", case("nothing", b"".join(parts()), "nothing", plain=PLAIN)
    yield "intact-aligned", case("nothing", b"".join(parts(ALIGNED)), "nothing", plain=ALIGNED)
    yield "intact-empty", case("nothing", b"".join(parts(b"")), "nothing")
    short = seal(DEK, AAD, b"short", random=drawn("short"))
    yield "intact-1mib", case("nothing", short, "nothing", plain=b"short", segment_bytes=MIB)


def headers() -> Iterator[tuple[str, dict[str, object]]]:
    fields = {
        "aead": 0,
        "kdf": 1,
        "segment-length": 4,
        "iv-length": 9,
        "iv-first": 10,
        "iv-last": 41,
        "tag-first": 42,
        "tag-last": 73,
    }
    short = seal(DEK, AAD, b"short", random=drawn("short"))
    for name, at in fields.items():
        what = f"one bit of the header's byte {at} was flipped"
        yield f"header-{name}-bit", case(what, flipped(short, at), "header", segment_bytes=MIB)
    yield "header-cut", case("the file ends within its header", short[:73], "header", segment_bytes=MIB)
    yield "header-missing", case("the file is empty", b"", "header", segment_bytes=MIB)
    yield "other-dek", case("another key", short, "header", dek=OTHER_DEK, segment_bytes=MIB)
    yield "other-aad", case("another AAD", short, "header", aad=OTHER_AAD, segment_bytes=MIB)
    yield "no-aad", case("no AAD", short, "header", aad=b"", segment_bytes=MIB)
    what = "sealed with a segment length that the reader does not accept"
    yield "other-parameters", case(what, b"".join(parts()), "header", segment_bytes=MIB)
    tag = parts(seed="other")[0][42:]
    what = "the header's tag is that of another file under the same key and AAD"
    file = parts()
    yield "header-tag-of-another", case(what, file[0][:42] + tag + b"".join(file[1:]), "header")


def lengths() -> Iterator[tuple[str, dict[str, object]]]:
    header, *segments = parts()
    yield "header-only", case("the file ends after its header", header, "length")
    body = b"".join(segments)
    what = "the file ends within the length field, nonce or tag of a segment"
    yield "cut-within-overhead", case(what, header + body[: 2 * SEGMENT + 31], "length")
    what = "the last segment was appended once more, and is too short to stand before another one"
    yield "appended-last", case(what, header + body + segments[-1], "length")
    aligned = b"".join(parts(ALIGNED))
    yield (
        "byte-after-aligned",
        case("one byte was appended to a full last segment", aligned + b"\0", "length"),
    )


def segments_changed() -> Iterator[tuple[str, dict[str, object]]]:
    header, *segments = parts()
    offsets = {"length": 0, "nonce": 4, "ciphertext": 16}
    for name, number in (("first", 0), ("inner", 2), ("last", 3)):
        for field, at in {**offsets, "tag": len(segments[number]) - 1}.items():
            changed = [*segments]
            changed[number] = flipped(segments[number], at)
            what = f"one bit of the {field} of segment {number} was flipped"
            yield f"{name}-{field}-bit", at_segment(what, header + b"".join(changed), number)


def segments_moved() -> Iterator[tuple[str, dict[str, object]]]:
    header, *segments = parts()
    first, second, third, last = segments

    def made(what: str, changed: list[bytes], segment: int) -> dict[str, object]:
        return at_segment(what, header + b"".join(changed), segment)

    yield "swapped", made("segments 1 and 2 were swapped", [first, third, second, last], 1)
    yield "repeated", made("segment 1 stands there twice", [first, second, second, third, last], 2)
    yield "dropped-inner", made("segment 1 was taken out", [first, third, last], 1)
    yield "dropped-last", made("the last segment was cut off", [first, second, third], 2)
    yield "cut-within-last", made("the last byte was cut off", [first, second, third, last[:-1]], 3)
    yield "byte-appended", made("one byte was appended", [*segments, b"\0"], 3)
    inner = [first, second, third, second, last]
    yield "repeated-later", made("segment 1 was repeated before the last one", inner, 3)

    other = parts(seed="other")[1:]
    what = "segment 1 is the one of another file under the same key and AAD"
    yield "replayed-inner", made(what, [first, other[1], third, last], 1)
    what = "the last segment is the one of another file under the same key and AAD"
    yield "replayed-last", made(what, [first, second, third, other[3]], 3)
    what = "all segments are those of another file under the same key and AAD"
    yield "replayed-all", made(what, other, 0)
    what = "segment 1 is the one of a file under another key"
    yield "replayed-other-dek", made(what, [first, parts(dek=OTHER_DEK)[2], third, last], 1)
    what = "segment 1 is the one of a file of another place"
    yield "replayed-other-aad", made(what, [first, parts(aad=OTHER_AAD)[2], third, last], 1)

    header, *aligned = parts(ALIGNED)
    what = "a last segment was appended to a file with a full last segment"
    yield "appended-to-aligned", at_segment(what, header + b"".join([*aligned, last]), 2, ALIGNED)
    what = "a full last segment was cut off"
    yield "dropped-last-aligned", at_segment(what, header + b"".join(aligned[:-1]), 1, ALIGNED)


def ends_moved() -> Iterator[tuple[str, dict[str, object]]]:
    """What only a holder of the key can make, and what anyone can who changes the length field alone."""
    header, first, second, third = parts(ALIGNED)
    file = File(DEK, AAD, header[10:42], SEGMENT)
    as_inner = file.encrypt_segment(ALIGNED[2 * HELD :], 2, False, drawn("inner"))
    as_last = file.encrypt_segment(ALIGNED[HELD : 2 * HELD], 1, True, drawn("last"))
    length = i2be(SEGMENT, 4)

    def made(what: str, changed: list[bytes], segment: int) -> dict[str, object]:
        return at_segment(what, header + b"".join(changed), segment, ALIGNED)

    what = "the last segment was sealed as an inner one"
    yield "last-sealed-as-inner", made(what, [first, second, as_inner], 2)
    what = "the last segment was sealed as an inner one, and its length field says that it is the last"
    yield "last-sealed-as-inner-marked", made(what, [first, second, length + as_inner[4:]], 2)
    what = "the length field of the last segment says that it is an inner one"
    yield "last-marked-inner", made(what, [first, second, NOT_FINAL + third[4:]], 2)
    what = "an inner segment was sealed as the last one"
    yield "inner-sealed-as-last", made(what, [first, as_last, third], 1)
    what = "an inner segment was sealed as the last one, and its length field says that it is an inner one"
    yield "inner-sealed-as-last-marked", made(what, [first, NOT_FINAL + as_last[4:], third], 1)
    what = "the length field of an inner segment says that it is the last one"
    yield "inner-marked-last", made(what, [first, length + second[4:], third], 1)
    what = "the file was cut after an inner segment, of which the length field was made to fit"
    yield "cut-and-marked", made(what, [first, length + second[4:]], 1)


def all_cases() -> dict[str, dict[str, object]]:
    makers = (controls, headers, lengths, segments_changed, segments_moved, ends_moved)
    return {name: made for maker in makers for name, made in maker()}


def encoded(made: dict[str, object]) -> str:
    return json.dumps(made, indent=1) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.json"):
        old.unlink()
    for name, made in all_cases().items():
        (FOLDER / f"{name}.json").write_text(encoded(made))
