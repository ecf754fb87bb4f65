"""One request that storage or a key service has served or refused, in the terms of joining. Pure."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

__all__ = [
    "KEY_KINDS",
    "OBJECT_KINDS",
    "Access",
    "AccessKind",
    "Damage",
    "Served",
    "Subject",
    "is_access_point",
    "unquoted",
]

_ROUNDS: Final = 32
_ACCESS_POINT: Final = re.compile(r"arn:[a-z-]+:s3[a-z-]*:[^:]*:[^:]*:.*accesspoint.*|.+-s3alias", re.DOTALL)


def unquoted(text: str) -> str:
    """A key as S3 has it, however often a client and a log have encoded it on the way."""
    for _ in range(_ROUNDS):
        once = unquote(text)
        if once == text:
            break
        text = once
    return text


def is_access_point(bucket: str) -> bool:
    """Whether what stands in a bucket's place names an access point, of which bucket it does not say."""
    return _ACCESS_POINT.fullmatch(bucket) is not None


class AccessKind(enum.Enum):
    """What a request was for."""

    READ = "read"
    """An object's bytes went out, or were copied, searched or brought back from an archive."""
    WRITE = "write"
    """An object, or what is known of it, was created or changed."""
    DELETE = "delete"
    LOOK = "look"
    """A listing, or a question that no object's bytes answer: ``HEAD``, tags, access rights."""
    UNWRAP = "unwrap"
    """A key was decrypted."""
    WRAP = "wrap"
    """A key was made or encrypted."""
    REWRAP = "rewrap"
    """A key was encrypted anew, under another key."""
    SIGN = "sign"


OBJECT_KINDS: Final = frozenset({AccessKind.READ, AccessKind.WRITE, AccessKind.DELETE, AccessKind.LOOK})
KEY_KINDS: Final = frozenset({AccessKind.UNWRAP, AccessKind.WRAP, AccessKind.REWRAP, AccessKind.SIGN})


class Served(enum.Enum):
    """What came of a request."""

    DONE = "done"
    REFUSED = "refused"
    """Whoever asked has no right to it."""
    FAILED = "failed"
    """Nothing was done for another reason: no such object, a condition that did not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Which checkpoint a key call was about, by its encryption context (`strongroom_security.fields`).

    Attributes:
        run: its id; whether it is one is not checked.
        folder: the checkpoint's; None: the context names none in full.
    """

    run: str
    folder: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """A request.

    Attributes:
        source: the file and the place in it that tells of it.
        time: in ms since the epoch; both logs tell whole seconds.
        operation: as its log calls it: ``REST.GET.OBJECT``, ``Decrypt``.
        identity: who asked: an ARN, an account, a service; None: nobody who said so.
        address: from where, an IP address or a service's name; None: not told.
        agent: the program by its own word.
        request: the request's id.
        bucket, key: the object; of a listing, what the names that were asked for begin with. Where the log
            names an access point and no bucket, that.
        kms_key: the key that was used, an ARN or id.
        subject: what a key call was about; None: not one of ours, or it cannot say.
        sent_bytes: of the answer; None: not told.
    """

    source: str
    time: int
    operation: str
    kind: AccessKind
    served: Served
    identity: str | None
    address: str | None
    agent: str | None = None
    request: str | None = None
    bucket: str | None = None
    key: str | None = None
    kms_key: str | None = None
    subject: Subject | None = None
    sent_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A place in a log that could not be read: what stood there nobody knows.

    Attributes:
        source: the file and the place in it.
        reason: why. Nothing of the content is in it, but for short names.
    """

    source: str
    reason: str
