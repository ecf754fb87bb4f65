"""Which checkpoint and file a key or ciphertext belongs to, as the bytes that cryptography binds to.

None of these bytes is stored. Whoever opens something computes them anew from the manifest that was
verified, so that what was sealed for one place opens at no other. The encodings are part of the
format; nothing else in this package puts such bytes together.
"""

from __future__ import annotations

from dataclasses import dataclass

from strongroom.errors import ConfigError
from strongroom.layout import CheckpointName, check_relative_path
from strongroom.manifest import check_run_id

__all__ = ["Context", "encode_fields", "file_aad", "handover_info", "recipient_info", "wrap_info"]


def encode_fields(*texts: str) -> bytes:
    """Each text in UTF-8 behind its length as four bytes, big-endian.

    No two lists of texts encode alike. By convention the first text says what the bytes are for.

    Raises:
        ConfigError: a text has no UTF-8: it holds half of a surrogate pair.
    """
    parts: list[bytes] = []
    for text in texts:
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(f"{text!r} has no UTF-8 ({error.reason}); it cannot name anything") from None
        parts += [len(data).to_bytes(4, "big"), data]
    return b"".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One attempt of a run; or, with a path, one of its files.

    Attributes:
        run: the run's id.
        launch: the writer's turn, from 1.
        step: the training step.
        attempt: 16 lower-case hex digits.
        path: a file under ``data/``, as stored.
    """

    run: str
    launch: int
    step: int
    attempt: str
    path: str | None = None

    def __post_init__(self) -> None:
        check_run_id(self.run)
        # It holds the rules for the other parts.
        CheckpointName(launch=self.launch, step=self.step, attempt=self.attempt)
        if self.path is not None:
            check_relative_path(self.path)

    @classmethod
    def of(cls, run: str, name: CheckpointName, path: str | None = None) -> Context:
        """The context of an attempt, or of one of its files, by its name in the store."""
        return cls(run=run, launch=name.launch, step=name.step, attempt=name.attempt, path=path)

    def pairs(self) -> dict[str, str]:
        """As an encryption context, which a key service logs in clear and checks on every call."""
        pairs = {
            "strongroom": "v1",
            "run": self.run,
            "launch": str(self.launch),
            "step": str(self.step),
            "attempt": self.attempt,
        }
        return pairs if self.path is None else {**pairs, "path": self.path}

    def _attempt_fields(self) -> tuple[str, str, str, str]:
        return (self.run, str(self.launch), str(self.step), self.attempt)


def file_aad(context: Context) -> bytes:
    """What a sealed file is bound to.

    Raises:
        ConfigError: the context names no file.
    """
    if context.path is None:
        raise ConfigError(
            f"step {context.step} of run {context.run} was given where one of its files is meant; "
            f"name the file's path"
        )
    return encode_fields("strongroom.v1", *context._attempt_fields(), context.path)


def wrap_info(context: Context) -> bytes:
    """What the key that wraps an attempt's file keys is derived for; the path, if any, does not count."""
    return encode_fields("strongroom.v1 wrap", *context._attempt_fields())


def recipient_info(context: Context) -> bytes:
    """What a recipient's wrap is bound to: an attempt, or one file where each file's key is wrapped."""
    path = () if context.path is None else (context.path,)
    return encode_fields("strongroom.v1 recipient", *context._attempt_fields(), *path)


def handover_info(context: Context) -> bytes:
    """What keys that travel between ranks are bound to; the path, if any, does not count."""
    return encode_fields("strongroom.v1 handover", *context._attempt_fields())
