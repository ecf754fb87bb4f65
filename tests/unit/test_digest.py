"""Digests: however the bytes come in, block for block, and against known answers."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from strongroom.digest import (
    BLOCK_BYTES,
    DIGEST_ALGORITHMS,
    DIGEST_BYTES,
    Digest,
    FileHasher,
    block_digest,
    digest_of_blocks,
    digest_of_bytes,
    sha256_of,
)
from strongroom.errors import ConfigError, FormatError

PATTERN = bytes(range(251))


def pattern(length: int) -> bytes:
    """The input of BLAKE3's official test vectors: 0, 1, ..., 250, 0, 1, ..."""
    return (PATTERN * (length // 251 + 1))[:length]


DATA = pattern(3 * BLOCK_BYTES + 12_345)


def blocks_of(data: bytes) -> list[bytes]:
    return [blake3(data[at : at + BLOCK_BYTES]).digest() for at in range(0, len(data), BLOCK_BYTES)]


@pytest.mark.parametrize(
    ("length", "expected"),
    (
        # From the test vectors that the BLAKE3 reference implementation publishes.
        (0, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
        (1, "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"),
        (1024, "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7"),
        (1025, "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444"),
    ),
)
def test_a_blocks_digest_is_plain_blake3(length: int, expected: str) -> None:
    assert block_digest(pattern(length)).hex() == expected
    assert digest_of_bytes("blake3", pattern(length)).value == (
        blake3(bytes.fromhex(expected)).digest() if length else bytes.fromhex(expected)
    )


def test_sha256_of_known_bytes() -> None:
    # FIPS 180-4's example, and the digest of nothing.
    assert sha256_of(b"abc").value.hex() == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert str(sha256_of(b"")) == "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert digest_of_bytes("sha256", DATA).value == hashlib.sha256(DATA).digest()


@pytest.mark.parametrize(
    "length",
    (
        0,
        1,
        BLOCK_BYTES - 1,
        BLOCK_BYTES,
        BLOCK_BYTES + 1,
        2 * BLOCK_BYTES - 1,
        2 * BLOCK_BYTES,
        3 * BLOCK_BYTES + 5,
    ),
)
def test_a_files_digest_is_blake3_over_its_blocks_digests(length: int) -> None:
    data = DATA[:length]
    hasher = FileHasher("blake3")
    hasher.update(data)
    found = hasher.digest()
    assert hasher.block_digests == b"".join(blocks_of(data))
    assert len(hasher.block_digests) == DIGEST_BYTES * -(-length // BLOCK_BYTES)
    assert found == digest_of_blocks(hasher.block_digests) == digest_of_bytes("blake3", data)
    assert found.value == blake3(b"".join(blocks_of(data))).digest()


near_a_block = st.sampled_from([0, BLOCK_BYTES, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES]).flatmap(
    lambda edge: st.integers(max(0, edge - 2), min(len(DATA), edge + 2))
)


@given(
    st.sampled_from(DIGEST_ALGORITHMS),
    st.lists(st.integers(0, len(DATA)) | near_a_block, max_size=8),
    st.sampled_from([bytes, bytearray, memoryview]),
)
def test_pieces_of_any_size_give_the_digest_of_the_whole(algorithm: Any, cuts: list[int], kind: Any) -> None:
    hasher = FileHasher(algorithm)
    edges = [0, *sorted(cuts), len(DATA)]
    for start, end in pairwise(edges):
        hasher.update(kind(DATA[start:end]))
    assert hasher.digest() == digest_of_bytes(algorithm, DATA)
    assert hasher.block_digests == (b"".join(blocks_of(DATA)) if algorithm == "blake3" else b"")


def test_a_piece_may_be_any_contiguous_memory() -> None:
    array = np.arange(60_000, dtype=np.float64).reshape(3, -1)
    for algorithm in DIGEST_ALGORITHMS:
        hasher = FileHasher(algorithm)
        for piece in (array[:1], np.empty((0, 3)), array[1:], memoryview(b"")):
            hasher.update(memoryview(piece))
        assert hasher.digest() == digest_of_bytes(algorithm, array.tobytes())


def test_what_was_fed_may_change_afterwards() -> None:
    for algorithm in DIGEST_ALGORITHMS:
        scratch = bytearray(b"a" * 1000)
        hasher = FileHasher(algorithm)
        hasher.update(scratch)
        scratch[:] = b"b" * 1000
        hasher.update(scratch)
        assert hasher.digest() == digest_of_bytes(algorithm, b"a" * 1000 + b"b" * 1000)


def test_asking_twice_gives_the_same_digest() -> None:
    for algorithm in DIGEST_ALGORITHMS:
        hasher = FileHasher(algorithm)
        hasher.update(DATA[:1000])
        assert hasher.digest() == hasher.digest()


@pytest.mark.parametrize("algorithm", DIGEST_ALGORITHMS)
def test_every_bit_and_the_length_count(algorithm: Any) -> None:
    data = bytearray(DATA[: BLOCK_BYTES + 100])
    whole = digest_of_bytes(algorithm, data)
    for at in (0, BLOCK_BYTES - 1, BLOCK_BYTES, len(data) - 1):
        data[at] ^= 1
        assert not digest_of_bytes(algorithm, data).matches(whole)
        data[at] ^= 1
    assert digest_of_bytes(algorithm, data).matches(whole)
    assert not digest_of_bytes(algorithm, data[:-1]).matches(whole)
    assert not digest_of_bytes(algorithm, data + b"\0").matches(whole)


def test_another_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError, match="'md5'"):
        FileHasher("md5")  # type: ignore[arg-type]


@given(st.sampled_from(DIGEST_ALGORITHMS), st.binary(min_size=32, max_size=32))
def test_the_written_form_is_read_back(algorithm: Any, value: bytes) -> None:
    digest = Digest(algorithm, value)
    assert Digest.parse(str(digest)) == digest
    assert str(digest) == f"{algorithm}:{value.hex()}"


@pytest.mark.parametrize(
    "written",
    (
        "",
        "0" * 64,
        "sha256:" + "0" * 63,
        "sha256:" + "0" * 65,
        "sha256:" + "A" * 64,
        "sha256:" + "0" * 63 + "g",
        "sha256:" + "٠" * 64,  # noqa: RUF001 - digits that int() takes, and this does not
        "SHA256:" + "0" * 64,
        "sha512:" + "0" * 64,
        "sha256:" + "0" * 64 + "\n",
        " sha256:" + "0" * 64,
        "sha256 :" + "0" * 64,
        "blake3" + "0" * 64,
    ),
    ids=ascii,
)
def test_any_other_written_form_is_refused(written: str) -> None:
    with pytest.raises(FormatError, match="is not a digest"):
        Digest.parse(written)


def test_equal_bytes_of_another_algorithm_do_not_match() -> None:
    value = bytes(32)
    assert Digest("sha256", value).matches(Digest("sha256", bytes(32)))
    assert not Digest("sha256", value).matches(Digest("blake3", value))
    assert not Digest("sha256", value).matches(Digest("sha256", value[:-1] + b"\1"))
    assert not Digest("sha256", value).matches(Digest("sha256", value[:-1]))
