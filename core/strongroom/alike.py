"""What the ranks of a job must have been given alike, and what only the coordinator needs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from strongroom.auditing import record_of
from strongroom.digest import DigestAlgorithm
from strongroom.errors import ConfigError
from strongroom.messages import Message
from strongroom.ranks import name_ranks

if TYPE_CHECKING:
    from strongroom.config import Policy

__all__ = ["check_alike", "check_same_demands", "check_same_record", "given"]

_ADVICE = "give every rank the same digest= and the same policy"


def given(algorithm: DigestAlgorithm, policy: Policy | None) -> dict[str, Any]:
    """What this rank was given, for `check_alike`."""
    sealing = policy.sealing if policy is not None else None
    signing = policy.signing if policy is not None else None
    return {
        "digest": algorithm,
        "record": record_of(policy.auditor) if policy is not None else "",
        "sealing": sealing.fingerprint if sealing is not None else "",
        "signing": signing.fingerprint if signing is not None else "",
    }


def check_alike(said: Sequence[Message]) -> None:
    """On the coordinator: hold what the ranks were given against each other.

    Raises:
        ConfigError: some compute another digest, seal for somebody else, have what they do put on record
            elsewhere, or would sign by another key than rank 0, which alone signs. A rank that is given no
            key to sign by is fine.
    """
    for member, words in (
        ("digest", _digest_words),
        ("sealing", _sealing_words),
        ("signing", _signing_words),
        ("record", _record_words),
    ):
        found = [message.members[member] for message in said]
        odd = [
            rank for rank, value in enumerate(found) if value != found[0] and (value or member != "signing")
        ]
        if odd:
            raise ConfigError(
                f"rank 0 {words(found[0])} and {name_ranks(odd)} {words(found[odd[0]])}; {_ADVICE}"
            )


def check_same_demands(demands: Sequence[str]) -> None:
    """On the coordinator, which alone judges: hold the demands for signatures against each other.

    Raises:
        ConfigError: a rank demands others than rank 0, and would take rank 0's word for it.
    """
    odd = [rank for rank, demand in enumerate(demands) if demand and demand != demands[0]]
    if odd:
        own = f"the signatures {demands[0]}" if demands[0] else "none"
        raise ConfigError(
            f"{name_ranks(odd)} demand the signatures {demands[odd[0]]} of what is restored, and rank 0, "
            f"which judges for all, demands {own}; give every rank the same policy"
        )


def check_same_record(records: Sequence[str]) -> None:
    """On the coordinator, which hands out keys: hold where ranks have what they read put on record.

    Raises:
        ConfigError: a rank would read what is on record nowhere, or elsewhere than what rank 0 reads.
    """
    odd = [rank for rank, record in enumerate(records) if record != records[0]]
    if odd:
        raise ConfigError(
            f"rank 0 {_record_words(records[0])} and {name_ranks(odd)} {_record_words(records[odd[0]])}: "
            "what each rank reads has to be on record; give every rank the same policy"
        )


def _digest_words(digest: str) -> str:
    return f"computes {digest} digests"


def _sealing_words(fingerprint: str) -> str:
    return f"seals for the recipients {fingerprint}" if fingerprint else "does not seal"


def _signing_words(fingerprint: str) -> str:
    return f"signs by the key {fingerprint}" if fingerprint else "does not sign"


def _record_words(record: str) -> str:
    return f"puts what it does on record in {record}" if record else "puts nothing on record"
