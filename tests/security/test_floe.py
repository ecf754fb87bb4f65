"""FLOE: what others sealed opens here, what is sealed here opens elsewhere, and nothing else opens at all."""

from __future__ import annotations

import copy
import json
import math
import mmap
import os
import pickle
import subprocess
import sys
import threading
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import floe_children
import make_refused
import numpy as np
import plain_floe
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from strongroom.contents import SealedReader
from strongroom.errors import ConfigError, FormatError, IntegrityError, SaveError
from strongroom.sealing import Opener, Sealer
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom_security import floe
from strongroom_security.floe import PIECE_BYTES, STRONGROOM, FloeOpener, FloeSealer, Parameters, open_sealed
from strongroom_security.secret import Secret

VECTORS = Path(__file__).parent / "vectors"
MIB = 1 << 20
HELD = MIB - 32
"""What a segment holds."""
SMALL = Parameters(segment_bytes=64)
AAD = b"\0\0\0\x0dstrongroom.v1\0\0\0\3run"
KEY = bytes(range(7, 39))
NOISE = np.random.default_rng(7).bytes(4 * PIECE_BYTES)
EDGES = tuple(
    sorted(
        {0, 1, 2 * MIB, PIECE_BYTES, 3 * PIECE_BYTES}
        | {count * HELD + by for count in (1, 2, 3, 4, 5, 8, 12) for by in (-1, 0, 1)}
        # Where the file, and not what it holds, ends at a piece's end, or just before or after it.
        | {PIECE_BYTES - 74 - 4 * 32 + by for by in (-1, 0, 1)}
        | {2 * PIECE_BYTES - 74 - 8 * 32 + by for by in (-1, 0, 1)}
    )
)


def seal(
    plain: bytes,
    pieces: Iterable[Any] | None = None,
    *,
    key: bytes = KEY,
    aad: bytes = AAD,
    parameters: Parameters = STRONGROOM,
) -> bytes:
    sealer = FloeSealer(Secret(key), aad, parameters=parameters)
    sealed = b"".join(
        bytes(piece) for piece in sealer.seal([plain] if pieces is None else pieces, length_bytes=len(plain))
    )
    assert sealed.startswith(sealer.header)
    assert len(sealed) == sealer.sealed_bytes(len(plain))
    return sealed


def opener_of(
    sealed: bytes, *, key: bytes = KEY, aad: bytes = AAD, parameters: Parameters = STRONGROOM
) -> FloeOpener:
    header = sealed[: parameters.header_bytes]
    return FloeOpener(Secret(key), aad, header, len(sealed), parameters=parameters)


def open_segments(opener: FloeOpener, sealed: bytes, first: int, count: int) -> bytes:
    start, end = opener.stored_range(first, count)
    target = bytearray(count * opener.segment_bytes)
    filled = opener.open_into(first, memoryview(sealed)[start:end], memoryview(target))
    assert not any(target[filled:])
    return bytes(target[:filled])


def cut(data: bytes, at: Iterable[int]) -> list[memoryview]:
    """Pieces of data that meet at some places."""
    places = [0, *sorted(at), len(data)]
    return [memoryview(data)[start:end] for start, end in pairwise(places)]


# ------------------------------------------------------------------------------------- known answers

KNOWN = {path.name.removesuffix("_ct.txt") for path in (VECTORS / "floe").glob("*_ct.txt")}


def known_answer(name: str) -> tuple[bytes, bytes, Parameters]:
    plain, sealed = (
        bytes.fromhex((VECTORS / f"floe/{name}_{kind}.txt").read_text()) for kind in ("pt", "ct")
    )
    segment_bytes = 4096 if name.endswith("_4K") else 64 if name.endswith("_64") else 40
    rotation_bits = 2 if name.endswith("_rotation") else 20
    return plain, sealed, Parameters(segment_bytes=segment_bytes, rotation_bits=rotation_bits)


def test_every_published_vector_is_here() -> None:
    names = ("GCM256_IV256_4K", "GCM256_IV256_64", "rotation")
    expected = {f"cpp_{name}" for name in names} | {"go_GCM256_IV256_4K", "go_GCM256_IV256_64"}
    assert {*expected, "java_lastSegAligned", "java_lastSegEmpty", "java_rotation"} == KNOWN


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_known_answer_opens_whole_segment_by_segment_and_by_the_letter(name: str) -> None:
    plain, sealed, parameters = known_answer(name)
    opener = opener_of(sealed, key=bytes(32), aad=b"This is AAD", parameters=parameters)
    assert opener.size_bytes == len(plain)
    assert open_segments(opener, sealed, 0, opener.segment_count) == plain
    for first in reversed(range(opener.segment_count)):
        held = plain[first * opener.segment_bytes : (first + 1) * opener.segment_bytes]
        assert open_segments(opener, sealed, first, 1) == held
    # Whoever seals and opens by the letter in the tests below is held to the same answers.
    letter = plain_floe.unseal(
        bytes(32),
        b"This is AAD",
        sealed,
        segment_bytes=parameters.segment_bytes,
        rotation_mask=parameters.rotation_bits,
    )
    assert letter == plain


def test_the_rotation_vectors_do_not_open_without_rotation() -> None:
    _, sealed, _ = known_answer("cpp_rotation")
    opener = opener_of(sealed, key=bytes(32), aad=b"This is AAD", parameters=Parameters(segment_bytes=40))
    assert len(open_segments(opener, sealed, 0, 4)) == 4 * 8
    with pytest.raises(IntegrityError, match="segment 4"):
        open_segments(opener, sealed, 4, 1)


# ---------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("length", EDGES)
def test_what_is_sealed_opens_by_the_letter_of_the_specification(length: int) -> None:
    plain = NOISE[:length]
    sealed = seal(plain)
    assert plain_floe.unseal(KEY, AAD, sealed) == plain
    # Nothing is spent but a header, and 32 bytes a segment; only an empty file has an empty segment.
    assert len(sealed) == 74 + length + 32 * max(1, math.ceil(length / HELD))
    opener = opener_of(sealed)
    assert opener.size_bytes == length
    assert opener.segment_bytes == HELD
    assert open_segments(opener, sealed, 0, opener.segment_count) == plain


@pytest.mark.parametrize("length", EDGES)
def test_what_is_sealed_by_the_letter_opens(length: int) -> None:
    sealed = plain_floe.seal(KEY, AAD, NOISE[:length])
    opener = opener_of(sealed)
    assert open_segments(opener, sealed, 0, opener.segment_count) == NOISE[:length]


@given(st.data())
def test_pieces_may_be_cut_anywhere(data: st.DataObject) -> None:
    edges = st.integers(0, 6).flatmap(
        lambda count: st.integers(-1, 1).map(lambda by: max(0, count * 32 + by))
    )
    length = data.draw(edges | st.integers(0, 300), label="length")
    at = data.draw(st.lists(st.integers(0, length), max_size=12), label="cuts")
    pieces = cut(NOISE[:length], at)
    sealed = seal(NOISE[:length], pieces, parameters=SMALL)
    assert plain_floe.unseal(KEY, AAD, sealed, segment_bytes=64) == NOISE[:length]


@settings(max_examples=25)
@given(
    length=st.sampled_from(EDGES),
    at=st.lists(st.integers(0, len(NOISE)) | st.sampled_from(EDGES), max_size=8),
)
def test_long_pieces_may_be_cut_anywhere(length: int, at: list[int]) -> None:
    plain = NOISE[:length]
    assert (
        plain_floe.unseal(KEY, AAD, seal(plain, cut(plain, [place for place in at if place < length])))
        == plain
    )


def test_pieces_of_any_buffer_are_sealed_as_their_bytes() -> None:
    numbers = np.arange(100_000, dtype=np.int32).reshape(100, 1000)
    pieces = [b"ab", bytearray(b"c"), memoryview(b"xdx")[1:2], numbers.data, numbers[:0].data, b""]
    plain = b"abcd" + numbers.tobytes()
    assert plain_floe.unseal(KEY, AAD, seal(plain, iter(pieces))) == plain


def test_a_piece_counts_only_until_the_next_one_is_asked_for() -> None:
    room = bytearray(MIB // 2 + 17)

    def pieces() -> Iterator[memoryview]:
        for at in range(0, len(NOISE), len(room)):
            piece = NOISE[at : at + len(room)]
            room[: len(piece)] = piece
            yield memoryview(room)[: len(piece)]

    assert plain_floe.unseal(KEY, AAD, seal(NOISE, pieces())) == NOISE


def test_two_files_of_one_key_share_nothing() -> None:
    one, other = seal(bytes(100)), seal(bytes(100))
    assert one[:10] == other[:10]
    assert one[10:42] != other[10:42]
    assert one[42:74] != other[42:74]
    assert one[78:] != other[78:]


def test_sealers_and_openers_are_what_the_core_asks_for() -> None:
    sealer: Sealer = FloeSealer(Secret(KEY), AAD)
    opener: Opener = opener_of(seal(b""))
    assert len(sealer.header) == 74
    assert (opener.size_bytes, opener.stored_range(0, 1)) == (0, (74, 106))


# ------------------------------------------------------------------------------- pieces, memory, copies


@pytest.mark.parametrize("cuts", ((), (MIB,), range(0, len(NOISE), 777_777)), ids=("whole", "two", "many"))
def test_pieces_are_fit_to_be_written_past_the_page_cache(cuts: Iterable[int]) -> None:
    places, sizes = set(), []
    sealer = FloeSealer(Secret(KEY), AAD)
    for piece in sealer.seal(cut(NOISE, cuts), length_bytes=len(NOISE)):
        places.add(np.frombuffer(piece, np.uint8).__array_interface__["data"][0])
        sizes.append(len(piece))
    # The same memory each time, and so every offset in the file is a multiple of a piece.
    (place,) = places
    assert place % mmap.PAGESIZE == 0
    assert set(sizes[:-1]) == {PIECE_BYTES}
    assert 0 < sizes[-1] <= PIECE_BYTES


@pytest.mark.parametrize("length", (0, 1, PIECE_BYTES - 74 - 4 * 32))
def test_a_file_of_at_most_one_piece_is_one_piece(length: int) -> None:
    pieces = list(FloeSealer(Secret(KEY), AAD).seal([NOISE[:length]], length_bytes=length))
    assert [len(piece) for piece in pieces] == [len(seal(NOISE[:length]))]


class Watching:
    """AES-GCM that tells which memory it was used on."""

    def __init__(self, key: bytes, used: list[Any]) -> None:
        self._aead = AESGCM(key)
        self._used = used

    def encrypt_into(self, nonce: bytes, data: memoryview, aad: bytes, target: memoryview) -> int:
        self._used.append((data.obj, target.obj))
        return self._aead.encrypt_into(nonce, data, aad, target)

    def decrypt_into(self, nonce: bytes, data: memoryview, aad: bytes, target: memoryview) -> int:
        self._used.append((data.obj, target.obj))
        return self._aead.decrypt_into(nonce, data, aad, target)


def test_only_what_spans_pieces_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    monkeypatch.setattr(floe, "AESGCM", lambda key: Watching(key, used))
    first, second = NOISE[: 3 * HELD + 5], NOISE[: 2 * HELD]
    sealed = seal(first + second, [first, second])
    sources = [source for source, _ in used]
    assert [source is first for source in sources] == [True, True, True, False, False, False]
    assert [source is second for source in sources] == [False, False, False, False, True, False]
    assert len({id(target) for _, target in used}) == 1

    used.clear()
    target = bytearray(len(first + second))
    opener_of(sealed).open_into(0, memoryview(sealed)[74:], memoryview(target))
    assert all(source is sealed and into is target for source, into in used)
    assert len(used) == 6


def test_sealing_takes_the_same_memory_however_long_the_file_is() -> None:
    def peak(count: int) -> int:
        sealer = FloeSealer(Secret(KEY), AAD)
        tracemalloc.start()
        try:
            # Cut so that segments span pieces: what is copied is the most that is held.
            for _ in sealer.seal([NOISE] * count, length_bytes=count * len(NOISE)):
                pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(1) < 2 * MIB
    assert peak(8) < peak(1) + 64 * 1024


def test_a_segments_key_is_derived_once_for_all_that_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    made: list[bytes] = []

    def make(key: bytes) -> Watching:
        made.append(key)
        return Watching(key, used)

    monkeypatch.setattr(floe, "AESGCM", make)
    parameters = Parameters(segment_bytes=64, rotation_bits=2)
    sealed = seal(bytes(32 * 10), parameters=parameters)
    assert (len(used), len(made), len(set(made))) == (10, 3, 3)
    opener = opener_of(sealed, parameters=parameters)
    open_segments(opener, sealed, 0, 10)
    assert made[3:] == made[:3]


# ------------------------------------------------------------------------------------------ used wrongly


def test_a_sealer_seals_one_file() -> None:
    sealer = FloeSealer(Secret(KEY), AAD)
    sealer.seal([b"one"], length_bytes=3)
    with pytest.raises(SaveError, match="used before"):
        sealer.seal([b"two"], length_bytes=3)


def test_of_threads_that_use_one_sealer_at_once_one_may() -> None:
    for _ in range(50):
        sealer = FloeSealer(Secret(KEY), AAD)
        barrier = threading.Barrier(4)

        def use(sealer: FloeSealer = sealer, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            try:
                sealer.seal([b""], length_bytes=0)
            except SaveError:
                return False
            return True

        with ThreadPoolExecutor(4) as pool:
            assert sorted(pool.map(lambda use: use(), [use] * 4)) == [False, False, False, True]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_does_not_seal_a_second_file_with_its_parents_sealer() -> None:
    sealer = FloeSealer(Secret(KEY), AAD)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            sealer.seal([b"child"], length_bytes=5)
        except SaveError as error:
            status = 0 if "fork" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert list(sealer.seal([b"parent"], length_bytes=6))


@pytest.mark.parametrize(
    ("pieces", "length", "told"),
    (
        ([b"abc"], 4, "4 bytes were announced to be sealed, and only 3 came"),
        ([], 1, "only 0 came"),
        ([b"abc", b"de"], 4, "4 bytes were announced to be sealed, and 5 or more came"),
        ([b"a"], 0, "1 or more came"),
        ([bytes(32), b"a"], 32, "33 or more came"),
        ([bytes(64), bytes(32)], 64, "96 or more came"),
        ([bytes(64)], 96, "only 64 came"),
        ([bytes(64)], 97, "only 64 came"),
    ),
    ids=lambda value: str(value)[:12] if isinstance(value, str) else None,
)
def test_pieces_of_another_length_end_in_an_error_and_no_whole_file(
    pieces: list[bytes], length: int, told: str
) -> None:
    sealer = FloeSealer(Secret(KEY), AAD, parameters=SMALL)
    sealed = b""
    with pytest.raises(SaveError, match=told):
        for piece in sealer.seal(pieces, length_bytes=length):
            sealed += bytes(piece)
    assert len(sealed) < sealer.sealed_bytes(length)


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="got -1"):
        FloeSealer(Secret(KEY), AAD).sealed_bytes(-1)
    with pytest.raises(ConfigError, match="got -1"):
        FloeSealer(Secret(KEY), AAD).seal([], length_bytes=-1)


@pytest.mark.parametrize("length", (1, 16, 31, 33, 64))
def test_a_files_key_is_one_of_aes_256(length: int) -> None:
    with pytest.raises(ConfigError, match=f"32 bytes, got {length}"):
        FloeSealer(Secret.draw(length), AAD)
    with pytest.raises(ConfigError, match=f"32 bytes, got {length}"):
        FloeOpener(Secret.draw(length), AAD, seal(b"")[:74], 106)


@pytest.mark.parametrize("segment_bytes", (0, 32, PIECE_BYTES + 1))
def test_parameters_that_cannot_work_are_refused(segment_bytes: int) -> None:
    with pytest.raises(ConfigError, match=f"got {segment_bytes}"):
        Parameters(segment_bytes=segment_bytes)


@pytest.mark.parametrize(("first", "count"), ((-1, 1), (0, 5), (4, 1), (5, 0), (0, -1), (2, -1)))
def test_segments_that_a_file_does_not_have_are_nowhere(first: int, count: int) -> None:
    opener = opener_of(seal(NOISE[:100], parameters=SMALL), parameters=SMALL)
    assert opener.segment_count == 4
    with pytest.raises(ConfigError, match="of 0 to 3"):
        opener.stored_range(first, count)


@pytest.mark.parametrize(
    ("first", "stored"),
    ((0, (0, 0)), (0, (0, 63)), (0, (0, 65)), (0, (0, 227)), (3, (192, 227)), (4, (0, 64)), (-1, (0, 64))),
    ids=str,
)
def test_what_is_not_whole_segments_is_refused(first: int, stored: tuple[int, int]) -> None:
    sealed = seal(NOISE[:100], parameters=SMALL)
    assert len(sealed) == 74 + 228
    body = memoryview(sealed)[74:][slice(*stored)]
    with pytest.raises(
        IntegrityError, match=rf"{len(body)} bytes were read at segment {first} \(of 0 to 3\)"
    ):
        opener_of(sealed, parameters=SMALL).open_into(first, body, memoryview(bytearray(500)))


def test_room_that_is_too_small_is_refused_before_anything_is_opened() -> None:
    sealed = seal(NOISE[:100], parameters=SMALL)
    target = bytearray(99)
    with pytest.raises(ConfigError, match="100 bytes are to be opened into room for 99"):
        opener_of(sealed, parameters=SMALL).open_into(0, memoryview(sealed)[74:], memoryview(target))
    assert not any(target)


# ------------------------------------------------------------------------------------- what is refused

TOLD = {
    "header-cut": "header has 74 bytes, and 73 were found",
    "header-missing": "header has 74 bytes, and 0 were found",
    "header-aead-bit": "the header asks for AEAD 1, KDF 0",
    "header-kdf-bit": "the header asks for AEAD 0, KDF 1",
    "header-segment-length-bit": "segments of 1048832 bytes",
    "header-iv-length-bit": "an IV of 33",
    "other-parameters": "segments of 64 bytes",
}
"""What the error says, where that differs from what its place says."""

TOLD_AT = {
    "header": "header's tag does not fit: the key is another file's",
    "length": "no sealed file is",
    "segment": "in its length field|is not what was sealed there",
}


def case(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((VECTORS / f"refused/{name}.json").read_text())
    return found


REFUSED = sorted(path.stem for path in (VECTORS / "refused").glob("*.json"))


class Read:
    """How far a case opens, and on what it ends."""

    def __init__(self, name: str) -> None:
        self.case = case(name)
        self.file = bytes.fromhex(self.case["file"])
        keys = plain_floe.File(
            bytes.fromhex(self.case["dek"]),
            bytes.fromhex(self.case["aad"]),
            self.file[10:42],
            self.case["segment_bytes"],
        )
        # The last is what a wrong header's tag would have to be.
        self.secrets = [
            bytes.fromhex(self.case["dek"]),
            keys.message_key,
            keys.derive_key(0),
            keys.header[-32:],
        ]
        self.refused_at = "nothing"
        self.plain = b""
        self.error: IntegrityError | None = None
        segment: int | None = None
        try:
            self.refused_at = "header"
            opener = self.opener()
            self.refused_at = "segment"
            for segment in range(opener.segment_count):
                self.plain += open_segments(opener, self.file, segment, 1)
            self.refused_at, segment = "nothing", None
        except IntegrityError as error:
            self.error = error
            if "no sealed file is" in str(error):
                self.refused_at = "length"
        self.segment = segment

    @property
    def parameters(self) -> Parameters:
        return Parameters(segment_bytes=self.case["segment_bytes"])

    def opener(self) -> FloeOpener:
        key, aad = bytes.fromhex(self.case["dek"]), bytes.fromhex(self.case["aad"])
        return opener_of(self.file, key=key, aad=aad, parameters=self.parameters)


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_is_refused_where_and_as_its_vector_says(name: str) -> None:
    read = Read(name)
    assert read.refused_at == read.case["refused_at"]
    assert read.segment == read.case["segment"]
    assert read.plain.hex() == read.case["plain"]
    if read.refused_at == "nothing":
        assert read.error is None
        return
    assert read.error is not None
    assert (name in TOLD and TOLD[name] in str(read.error)) or any(
        told in str(read.error) for told in TOLD_AT[read.refused_at].split("|")
    )
    assert isinstance(read.error, FormatError) == (read.refused_at == "length" or name in TOLD)
    if read.segment is not None:
        assert f"segment {read.segment} (of 0 to " in str(read.error)


@pytest.mark.parametrize("name", REFUSED)
def test_no_refusal_shows_a_key(name: str) -> None:
    read = Read(name)
    if read.error is None:
        return
    text = "".join(traceback.format_exception(read.error)) + repr(read.error)
    for secret in read.secrets:
        assert secret.hex()[:12] not in text
        assert repr(secret)[2:20] not in text
    # No cause, and no context that a handler could print: the cipher's error is not passed on.
    assert read.error.__cause__ is None
    assert read.error.__suppress_context__ or read.error.__context__ is None


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_file_is_refused_as_one_piece_and_by_a_reader_too(name: str) -> None:
    read = Read(name)
    if read.refused_at != "segment":
        return
    opener = read.opener()
    stored = memoryview(read.file)[74:]
    target = bytearray(opener.size_bytes)
    with pytest.raises(IntegrityError, match=rf"segment {read.segment} "):
        opener.open_into(0, stored, memoryview(target))
    # What a cipher made of forged bytes is not left lying about.
    held = opener.segment_bytes
    assert not any(target[held * (read.segment or 0) :])
    store = MemoryStore()
    store.put("file", read.file)
    reader = SealedReader(store.open_reader("file"), opener)
    with reader, pytest.raises(IntegrityError, match="segment"):
        reader.read_into(0, memoryview(bytearray(reader.size_bytes)))


def test_the_vectors_are_what_their_script_makes() -> None:
    made = make_refused.all_cases()
    assert sorted(made) == REFUSED
    for name, document in made.items():
        assert (VECTORS / f"refused/{name}.json").read_text() == make_refused.encoded(document)


@settings(max_examples=300)
@given(st.data())
def test_one_flipped_bit_anywhere_is_refused(data: st.DataObject) -> None:
    plain = NOISE[: data.draw(st.integers(0, 100), label="length")]
    sealed = bytearray(seal(plain, parameters=SMALL))
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1), label="bit")
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(IntegrityError):
        opener = opener_of(bytes(sealed), parameters=SMALL)
        open_segments(opener, bytes(sealed), 0, opener.segment_count)


@given(st.data())
def test_a_file_that_is_not_as_long_as_the_manifest_says_is_refused(data: st.DataObject) -> None:
    """The header is pinned, and so is the length; the file itself was cut or lengthened."""
    plain = NOISE[: data.draw(st.integers(0, 100), label="length")]
    sealed = seal(plain, parameters=SMALL)
    found = data.draw(st.integers(74, len(sealed) - 1), label="found")
    store = MemoryStore()
    store.put("file", sealed[:found])
    opener = opener_of(sealed, parameters=SMALL)
    reader = SealedReader(store.open_reader("file"), opener)
    with reader, pytest.raises(IntegrityError):
        reader.read_into(0, memoryview(bytearray(reader.size_bytes + 1)))
        # What holds nothing is opened by no reader; its segment alone shows that it was cut.
        open_segments(opener, sealed[:found], 0, 1)


@given(st.integers(0, 500))
def test_a_length_that_no_file_has_is_refused(stored_bytes: int) -> None:
    header = seal(b"", parameters=SMALL)[:74]
    possible = {74 + 32 * -(-(plain or 1) // 32) + plain for plain in range(500)}
    # The last segment may be an empty one, although nothing here makes it so.
    possible |= {74 + 64 * count + 32 for count in range(10)}
    if stored_bytes in possible:
        opener = FloeOpener(Secret(KEY), AAD, header, stored_bytes, parameters=SMALL)
        assert opener.stored_range(0, opener.segment_count) == (74, stored_bytes)
        return
    with pytest.raises(FormatError, match=f"no sealed file is {stored_bytes} bytes long"):
        FloeOpener(Secret(KEY), AAD, header, stored_bytes, parameters=SMALL)


def test_a_file_of_more_segments_than_floe_allows_is_refused() -> None:
    header = seal(b"", parameters=SMALL)[:74]
    FloeOpener(Secret(KEY), AAD, header, 74 + 64 * 2**40, parameters=SMALL)
    with pytest.raises(FormatError, match="no sealed file is"):
        FloeOpener(Secret(KEY), AAD, header, 74 + 64 * 2**40 + 32, parameters=SMALL)
    sealer = FloeSealer(Secret(KEY), AAD, parameters=SMALL)
    assert sealer.sealed_bytes(32 * 2**40) == 74 + 64 * 2**40
    with pytest.raises(ConfigError, match="a file to seal has"):
        sealer.sealed_bytes(32 * 2**40 + 1)


def test_every_wrong_key_and_every_wrong_place_is_refused_by_the_header_alone() -> None:
    sealed = seal(b"")
    for at in range(32):
        wrong = KEY[:at] + bytes([KEY[at] ^ 0x80]) + KEY[at + 1 :]
        with pytest.raises(IntegrityError, match="tag does not fit"):
            opener_of(sealed, key=wrong)
    for aad in (b"", AAD[:-1], AAD + b"\0", AAD.replace(b"run", b"ruN")):
        with pytest.raises(IntegrityError, match="tag does not fit"):
            opener_of(sealed, aad=aad)


def test_the_headers_tag_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = seal(b"")
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)
    opener_of(sealed)
    assert compared == [(sealed[:74], sealed[:74])]


# ----------------------------------------------------------------------------------- reading in parts


@pytest.fixture(scope="module")
def long_file() -> tuple[bytes, bytes]:
    plain = NOISE[: 7 * HELD + 12_345]
    return plain, seal(plain)


RANGES = st.tuples(st.integers(0, 7 * HELD + 20_000), st.integers(0, 3 * HELD)) | st.tuples(
    st.integers(0, 7), st.integers(-2, 2), st.integers(0, 3), st.integers(-2, 2)
).map(lambda at: (max(0, at[0] * HELD + at[1]), max(0, at[2] * HELD + at[3])))


@settings(max_examples=60)
@given(asked=RANGES)
def test_any_range_reads_as_what_was_sealed(asked: tuple[int, int], long_file: tuple[bytes, bytes]) -> None:
    plain, sealed = long_file
    store = MemoryStore()
    store.put("file", sealed)
    offset, length = asked
    buffer = bytearray(length)
    with open_sealed(store.open_reader("file"), Secret(KEY), AAD) as reader:
        assert reader.size_bytes == len(plain)
        filled = reader.read_into(offset, memoryview(buffer))
    assert buffer[:filled] == plain[offset : offset + length]
    assert not any(buffer[filled:])


@settings(max_examples=60)
@given(first=st.integers(0, 7), count=st.integers(1, 8))
def test_any_run_of_segments_opens(first: int, count: int, long_file: tuple[bytes, bytes]) -> None:
    plain, sealed = long_file
    opener = opener_of(sealed)
    count = min(count, opener.segment_count - first)
    assert open_segments(opener, sealed, first, count) == plain[first * HELD : (first + count) * HELD]


@pytest.mark.parametrize("make", (LocalStore, lambda _: MemoryStore()), ids=("local", "memory"))
def test_a_file_on_any_store_is_read_by_many_threads_at_once(
    make: Callable[[Path], Any], tmp_path: Path, long_file: tuple[bytes, bytes]
) -> None:
    plain, sealed = long_file
    store = make(tmp_path)
    store.put("file", sealed)
    with open_sealed(store.open_reader("file"), Secret(KEY), AAD) as reader:

        def read(seed: int) -> bool:
            rng = np.random.default_rng(seed)
            start, end = sorted(int(place) for place in rng.integers(0, len(plain), 2))
            buffer = bytearray(end - start)
            reader.read_into(start, memoryview(buffer))
            return buffer == plain[start:end]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(100)))


def test_openers_serve_many_threads_at_once_across_keys() -> None:
    parameters = Parameters(segment_bytes=64, rotation_bits=1)
    plain = NOISE[: 32 * 64]
    sealed = seal(plain, parameters=parameters)
    opener = opener_of(sealed, parameters=parameters)

    def read(seed: int) -> bool:
        at = [int(place) for place in np.random.default_rng(seed).permutation(64)]
        return all(
            open_segments(opener, sealed, first, 1) == plain[32 * first : 32 * first + 32] for first in at
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(40)))


def test_an_object_that_is_too_short_for_a_header_is_refused() -> None:
    store = MemoryStore()
    store.put("file", seal(b"")[:40])
    with store.open_reader("file") as stored, pytest.raises(FormatError, match="40 were found"):
        open_sealed(stored, Secret(KEY), AAD)


# ------------------------------------------------------------------------------- nothing is used twice


def test_no_key_and_nonce_are_used_twice_by_threads_forks_and_spawned_processes() -> None:
    child = subprocess.run(
        [sys.executable, floe_children.__file__], capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    lines = json.loads(child.stdout)
    seals = 2 + 2 * floe_children.PROCESSES
    files = seals * 2 * floe_children.FILES
    assert len({where for where, *_ in lines}) == seals
    ivs = [tuple(line[2:]) for line in lines if line[1] == "iv"]
    used = [tuple(line[2:]) for line in lines if line[1] == "nonce"]
    assert len(ivs) == files
    assert len(used) == 10 * files
    # One file key and AAD for all files, which is worse than anything that is done with them.
    assert len(set(ivs)) == len(ivs)
    assert len({key for key, _ in used}) == 3 * files
    assert [pair for pair, times in Counter(used).items() if times > 1] == []
    assert len({nonce for _, nonce in used}) == len(used)


# -------------------------------------------------------------------------------------- nothing is told


def test_sealers_and_openers_show_no_key_and_are_not_pickled() -> None:
    sealer = FloeSealer(Secret(KEY), AAD)
    opener = opener_of(seal(b""))
    for holder in (sealer, opener, sealer._keys, opener._keys):
        assert KEY.hex()[:12] not in repr(holder)
        assert repr(KEY)[2:20] not in repr(vars(holder))
        for leak in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError):
                leak(holder)


def test_a_sealer_forgets_its_keys_once_the_file_is_sealed() -> None:
    sealer = FloeSealer(Secret(KEY), AAD)
    for _ in sealer.seal([b"x"], length_bytes=1):
        assert any(sealer._keys._message_key._data)
    assert not any(sealer._keys._message_key._data)
    assert sealer._keys._latest is None


def test_a_sealer_forgets_its_keys_where_sealing_fails() -> None:
    sealer = FloeSealer(Secret(KEY), AAD)
    with pytest.raises(SaveError):
        list(sealer.seal([b"xy"], length_bytes=1))
    assert not any(sealer._keys._message_key._data)


def test_the_files_key_is_its_owners_and_stays() -> None:
    dek = Secret(KEY)
    list(FloeSealer(dek, AAD).seal([b"x"], length_bytes=1))
    assert dek.reveal() == KEY
