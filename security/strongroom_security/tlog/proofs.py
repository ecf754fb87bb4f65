"""Proofs for whoever has no log at hand, by C2SP tlog-proof: an entry is in a signed tree. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from strongroom.errors import FormatError
from strongroom_security.tlog.checkpoints import parse_decimal
from strongroom_security.tlog.merkle import HASH_BYTES, MAX_PROOF_HASHES, check_inclusion, leaf_hash
from strongroom_security.tlog.notes import MAX_NOTE_BYTES, decode_base64, encode_base64
from strongroom_security.tlog.witnesses import LogKeys, SignedCheckpoint, open_checkpoint

__all__ = ["MAX_PROOF_BYTES", "TlogProof"]

MAX_PROOF_BYTES: Final = 2 * MAX_NOTE_BYTES

_HEADER: Final = "c2sp.org/tlog-proof@v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlogProof:
    """That an entry is in a log.

    Attributes:
        index: the entry's.
        path: hashes from the leaf's sibling up.
        note: the signed tree head, as it was published.
        extra: what the application adds, which nothing vouches for by itself; None: nothing.
    """

    index: int
    path: tuple[bytes, ...]
    note: bytes
    extra: bytes | None = None

    def __post_init__(self) -> None:
        if len(self.path) > MAX_PROOF_HASHES or any(len(each) != HASH_BYTES for each in self.path):
            raise FormatError(f"a proof has at most {MAX_PROOF_HASHES} hashes of {HASH_BYTES} bytes each")

    def to_bytes(self) -> bytes:
        lines = [_HEADER]
        if self.extra is not None:
            lines.append(f"extra {encode_base64(self.extra)}")
        lines += [f"index {self.index}", *(encode_base64(each) for each in self.path), "", ""]
        return "\n".join(lines).encode("ascii") + self.note

    @classmethod
    def parse(cls, data: bytes, what: str) -> TlogProof:
        """
        Args:
            what: names it in errors.

        Raises:
            FormatError: it is none, or too long.
        """
        if len(data) > MAX_PROOF_BYTES:
            raise FormatError(f"{what} holds {len(data)} bytes; a proof has at most {MAX_PROOF_BYTES}")
        head, empty, note = data.partition(b"\n\n")
        try:
            lines = head.decode("ascii").split("\n")
        except UnicodeDecodeError:
            raise FormatError(f"{what} is no proof: its head is not ASCII") from None
        if not empty or lines[0] != _HEADER:
            raise FormatError(f"{what} is no proof of this form: it begins with {lines[0][:60]!r}")
        rest = lines[1:]
        extra: bytes | None = None
        if rest and rest[0].startswith("extra "):
            extra = decode_base64(rest.pop(0).removeprefix("extra "), f"the extra data of {what}")
        if not rest or not rest[0].startswith("index "):
            raise FormatError(f"{what} does not say an index")
        index = parse_decimal(rest.pop(0).removeprefix("index "), f"the index of {what}")
        if len(rest) > MAX_PROOF_HASHES:
            raise FormatError(f"{what} has {len(rest)} hashes, at most {MAX_PROOF_HASHES} are read")
        path = tuple(decode_base64(line, f"a hash of {what}") for line in rest)
        return cls(index=index, path=path, note=note, extra=extra)

    def check(self, entry: bytes, log: LogKeys, what: str) -> SignedCheckpoint:
        """Check that an entry is in the log that is believed; its signed tree head.

        Raises:
            IntegrityError: the proof does not show it.
            UntrustedError: the head is not signed or cosigned by whom is asked for.
        """
        opened = open_checkpoint(self.note, log, f"the tree head of {what}")
        check_inclusion(
            leaf=leaf_hash(entry),
            index=self.index,
            size=opened.head.size,
            proof=self.path,
            root=opened.head.root,
        )
        return opened
