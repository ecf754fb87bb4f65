"""Which checkpoints to keep, and why. Pure; `strongroom.sweep` carries a plan out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from strongroom.errors import ConfigError
from strongroom.layout import CheckpointName

__all__ = ["Decision", "KeepAll", "KeepLast", "RetentionPolicy", "plan"]


class RetentionPolicy(Protocol):
    """Says which checkpoints to keep; what it must never lose is added by `plan`."""

    def keep(self, ranked: Sequence[CheckpointName]) -> Collection[CheckpointName]:
        """Choose from all committed checkpoints.

        Args:
            ranked: the current line newest first, then what it superseded, newest first.

        Returns:
            those that stay; a mapping also says why each does.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepLast:
    """Keep the newest ``count`` committed checkpoints.

    Those on the current line count as newer than superseded ones, so a rewound or restarted
    run replaces what it left behind one by one and never deletes it at a stroke.
    """

    count: int

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise ConfigError(f"KeepLast.count must be a whole number of at least 1, got {self.count!r}")

    def keep(self, ranked: Sequence[CheckpointName]) -> Collection[CheckpointName]:
        return ranked[: self.count]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAll:
    """Keep every committed checkpoint."""

    def keep(self, ranked: Sequence[CheckpointName]) -> Collection[CheckpointName]:
        return ranked


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What happens to one checkpoint, and the reason in words."""

    name: CheckpointName
    is_kept: bool
    reason: str


_NOTHING_HELD: Final[Mapping[CheckpointName, str]] = MappingProxyType({})


def plan(
    ranked: Sequence[CheckpointName],
    policy: RetentionPolicy,
    *,
    verified: Collection[CheckpointName] = (),
    just_committed: CheckpointName | None = None,
    held: Mapping[CheckpointName, str] = _NOTHING_HELD,
) -> list[Decision]:
    """Decide for every checkpoint.

    Whatever the policy says, the newest checkpoint stays, and so does the newest one that
    was once verified by reading: if all later ones turn out damaged, the run still resumes. So
    does what was committed just now, whatever is newer.

    Args:
        ranked: as `RetentionPolicy.keep` takes them.
        policy: chooses what else stays.
        verified: checkpoints that were restored, and so read and found whole, at some time.
        just_committed: the one after whose commit this is decided.
        held: what must not go yet, with the reason: it may be nowhere else, for one.
    """
    kept = policy.keep(ranked)
    reasons = dict(kept) if isinstance(kept, Mapping) else dict.fromkeys(kept, f"kept by {policy}")
    newest = ranked[0] if ranked else None
    newest_verified = next((name for name in ranked if name in verified), None)
    decisions = []
    for name in ranked:
        if name == newest:
            decisions.append(Decision(name=name, is_kept=True, reason="the newest checkpoint"))
        elif name == just_committed:
            decisions.append(Decision(name=name, is_kept=True, reason="committed just now"))
        elif name in reasons:
            decisions.append(Decision(name=name, is_kept=True, reason=reasons[name]))
        elif name == newest_verified:
            reason = "the newest checkpoint that was verified by reading"
            decisions.append(Decision(name=name, is_kept=True, reason=reason))
        elif name in held:
            decisions.append(Decision(name=name, is_kept=True, reason=held[name]))
        else:
            decisions.append(Decision(name=name, is_kept=False, reason=f"not kept by {policy}"))
    return decisions
