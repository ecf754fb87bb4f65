"""Key bytes in memory: the one type that holds them, and that keeps them out of everything else.

A key leaks less by attack than by accident: a log line, a traceback, a worker process that is
handed its parent's objects. `Secret` turns each of these into an error or into a placeholder.
What it cannot do: Python and the libraries below make copies of what `Secret.reveal` returns,
and nothing can overwrite those. `Secret.wipe` clears the one copy that lives long.
"""

from __future__ import annotations

import hmac
import os
from typing import ClassVar, Final, NoReturn, final

from strongroom.errors import ClosedError, ConfigError

__all__ = ["KEY_BYTES", "Secret"]

Buffer = bytes | bytearray | memoryview

KEY_BYTES: Final = 32
"""Every symmetric key here is one of AES-256."""


@final
class Secret:
    """Bytes that do not print, format, serialise, copy or hash, and compare in constant time.

    Its representation names its length alone. Asking for more, as by ``str`` or ``pickle``, is a
    mistake in the program, and raises `TypeError`.

    Args:
        data: copied; whoever holds the original clears it.

    Raises:
        ConfigError: there are no bytes.
    """

    __slots__ = ("_data", "_is_wiped")

    # Equal secrets would need equal hashes, and a hash tells of what it was made.
    __hash__: ClassVar[None]  # type: ignore[assignment]

    def __init__(self, data: Buffer) -> None:
        # By way of a view: ``bytearray(32)`` would be a key of 32 zeros.
        self._data = bytearray(memoryview(data))
        self._is_wiped = False
        if not self._data:
            raise ConfigError("a secret has at least one byte, got none")

    @classmethod
    def draw(cls, length_bytes: int = KEY_BYTES) -> Secret:
        """A new one, from the operating system's generator."""
        return cls(os.urandom(length_bytes))

    @property
    def size_bytes(self) -> int:
        """How long it is; known even once it is wiped."""
        return len(self._data)

    def reveal(self) -> bytes:
        """A copy of the bytes: hand it straight to a primitive, and keep it nowhere.

        Raises:
            ClosedError: they were wiped.
        """
        data = bytes(self._data)
        # Looked at after the copy: a wipe on another thread may have zeroed the bytes meanwhile, and
        # no key is worse than one that everybody knows.
        if self._is_wiped:
            raise ClosedError("this secret was wiped and cannot be used any more; unwrap or draw it again")
        return data

    def wipe(self) -> None:
        """Overwrite the bytes; fine when repeated."""
        self._is_wiped = True
        self._data[:] = bytes(len(self._data))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self.reveal(), other.reveal())

    def __repr__(self) -> str:
        return f"<Secret of {len(self._data)} bytes>"

    # Formatting comes here too.
    def __str__(self) -> NoReturn:
        raise TypeError("a secret does not print; log what it is for instead")

    # Pickling and copying ask for this, whatever the protocol.
    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a secret is not pickled or copied; hand it over sealed, or pass the object itself on"
        )
