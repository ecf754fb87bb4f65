"""What a sequencer remembers on its own disk: the tree head that it signed last, and what is in that tree.

The head is in a file of its own, as the signed note that it is: a sink that shows another tree is not gone on
with. Beside it (``.segments``) what is known of each segment that is in the tree spares reading the tree
again. It is signed by the log's own key, over all of it, and believed only if that holds and the tree has the
root that it names; it may be removed: it is then made again from the tree.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Sequence_
from hashlib import sha256
from pathlib import Path
from typing import Final

from strongroom import canonical
from strongroom.canonical import Bounds, Json
from strongroom.errors import ConfigError, FormatError, IntegrityError, StoreError
from strongroom_security.auditlog.sequencing.ordering import Sequence
from strongroom_security.auditlog.sequencing.plans import Facts
from strongroom_security.tlog.notekeys import NoteSigner, VerifierKey
from strongroom_security.tlog.notes import MAX_NOTE_BYTES, NoteSignature

__all__ = ["LogState"]

_LINE_SEGMENTS: Final = 1_000
_BOUNDS: Final = Bounds(length_bytes=4 << 20, depth=4, items=20 * _LINE_SEGMENTS)
_SUFFIX: Final = ".segments"
_NOTHING: Final = bytes(32)


class LogState:
    """A sequencer's memory.

    Args:
        path: of the file with the head; its folder has to be there.

    Raises:
        ConfigError: its folder is not there, or the path is a folder.
    """

    def __init__(self, path: Path) -> None:
        if not path.parent.is_dir() or path.is_dir():
            raise ConfigError(f"a sequencer's state is a file in a folder that is there, got {path}")
        self.path: Final = path
        self._cache = path.with_name(path.name + _SUFFIX)
        self._digest = _NOTHING

    def read(self) -> bytes | None:
        """The signed tree head, not verified; None: none was signed yet.

        Raises:
            StoreError: it cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                return file.read(MAX_NOTE_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"the state {self.path} cannot be read: {error.strerror}") from error

    def write(self, note: bytes) -> None:
        """Remember a signed tree head, durably; the one before stands until then.

        Raises:
            StoreError: it cannot be written.
        """
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}.tmp")
        try:
            try:
                _write(temporary, note)
                temporary.replace(self.path)
            finally:
                temporary.unlink(missing_ok=True)
            _make_names_durable(self.path.parent)
        except OSError as error:
            raise StoreError(f"the state {self.path} cannot be written: {error.strerror}") from error

    def remembered(self, keys: Iterable[VerifierKey]) -> tuple[Sequence, bytes] | None:
        """What is known of a tree without reading it, and the root that it has to have; None: nothing.

        What is damaged, or signed by none of these keys, counts as nothing: all of it can be made again.
        """
        try:
            with self._cache.open("rb") as file:
                found = _replay(file, tuple(keys))
        except (OSError, FormatError, TypeError, ValueError):
            return None
        if found is None:
            return None
        sequence, root, self._digest = found
        return sequence, root

    def remember(self, found: Sequence_[Facts], size: int, root: bytes, signer: NoteSigner) -> None:
        """Add what went into a tree, its size with it, and the root that it then has, to what was remembered.

        Raises:
            StoreError: it cannot be written.
        """
        size -= sum(each.lines for each in found)
        lines: list[bytes] = []
        for begin in range(0, len(found), _LINE_SEGMENTS):
            some = found[begin : begin + _LINE_SEGMENTS]
            size += sum(each.lines for each in some)
            is_end = begin + len(some) == len(found)
            value = {
                "segments": [each.to_json() for each in some],
                "size": size,
                "root": root.hex() if is_end else "",
            }
            self._digest = _after(self._digest, value)
            signature = signer.sign(_signed_text(self._digest)).line() if is_end else ""
            lines.append(canonical.encode({**value, "signature": signature}))
        try:
            with self._cache.open("ab") as file:
                # A line feed first: what was torn before stays a line of its own.
                file.write(b"\n" + b"\n".join(lines) + b"\n")
        except OSError as error:
            raise StoreError(f"{self._cache} cannot be written: {error.strerror}") from error

    def forget(self) -> None:
        """Drop what is known of the tree: it will be read again."""
        self._digest = _NOTHING
        self._cache.unlink(missing_ok=True)


def _replay(lines: Iterable[bytes], keys: tuple[VerifierKey, ...]) -> tuple[Sequence, bytes, bytes] | None:
    sequence, root, digest, signature = Sequence(), "", _NOTHING, ""
    for line in lines:
        if line == b"\n":
            continue
        try:
            value = canonical.decode(line.removesuffix(b"\n"), "a remembered line", _BOUNDS)
        except FormatError:
            continue  # torn by a crash: what follows repeats it
        if not isinstance(value, dict) or value.keys() != {"segments", "size", "root", "signature"}:
            return None
        found = [Facts.from_json(each, "a remembered segment") for each in value["segments"]]
        begin = value["size"] - sum(each.lines for each in found)
        if begin > sequence.size:
            return None
        if begin < sequence.size:
            continue  # what another process with the same state has done as well
        for each in found:
            sequence.accept(each)
        root, signature = value["root"], value.pop("signature")
        digest = _after(digest, value)
    return (sequence, bytes.fromhex(root), digest) if root and _is_signed(signature, digest, keys) else None


def _after(digest: bytes, value: Mapping[str, Json]) -> bytes:
    """What is signed of all lines up to one."""
    return sha256(digest + canonical.encode(dict(value))).digest()


def _signed_text(digest: bytes) -> str:
    # No tree head: that has three lines.
    return f"strongroom.v1 audit sequencer's memory\n{digest.hex()}\n"


def _is_signed(signature: Json, digest: bytes, keys: tuple[VerifierKey, ...]) -> bool:
    if not isinstance(signature, str):
        return False
    parsed = NoteSignature.parse(signature.removesuffix("\n"), "a remembered line")
    for key in keys:
        if key.matches(parsed):
            try:
                key.check(_signed_text(digest), parsed.value)
            except IntegrityError:
                return False
            return True
    return False


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _make_names_durable(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
