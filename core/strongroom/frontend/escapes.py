"""What becomes of what else writes a sealed run's state. How a framework is guarded, its front end knows."""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

from strongroom.config import load_policy
from strongroom.errors import ConfigError

__all__ = ["EscapePolicy", "check_escapes", "policy_seals"]

EscapePolicy = Literal["seal", "refuse", "warn"]
"""Of what would write a sealed run's state in the clear: it is sealed too, it is an error, or it is told."""

_CHOICES: Final[tuple[str, ...]] = get_args(EscapePolicy)


def check_escapes(given: str | None) -> EscapePolicy:
    """The policy for what else writes state; without one, it is sealed.

    Raises:
        ConfigError: there is no such policy.
    """
    if given is None:
        return "seal"
    if given not in _CHOICES:
        raise ConfigError(f"escapes must be one of {', '.join(map(repr, _CHOICES))} or None, got {given!r}")
    return given  # type: ignore[return-value]  # mypy does not narrow by membership


def policy_seals(security: Any) -> bool:
    """Whether checkpoints of a run with this policy, or ``STRONGROOM_CONFIG``'s, are sealed."""
    policy = load_policy(security)
    return policy is not None and policy.sealing is not None
