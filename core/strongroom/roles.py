"""The seam of roles: what a process may do to a run's root, and by whose credentials.

The core asks a `Role` for the store of each duty: looking and restoring is one, saving another. They may have
different credentials, and those for restoring are let go of before the first save. What a role may not do its
store refuses by itself, before the server does, so that a mistake is told in words and at once.

Policies fill the seam (`strongroom_security.role`, ``[role]``).
"""

from __future__ import annotations

import enum
import os
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from strongroom.auditing import check_apart_from_sink
from strongroom.stores.limited import Operation
from strongroom.stores.open import open_store

if TYPE_CHECKING:
    from strongroom.config import Policy
    from strongroom.stores.base import Store

__all__ = ["Duty", "Operation", "Role", "check_root", "open_root"]


class Duty(enum.Enum):
    """What a root is opened for."""

    RESTORE = "restore"
    """Looking, reading, verifying: everything before the first save, and all that only reads."""
    SAVE = "save"
    """Claiming a launch, saving, and what follows a commit."""


@runtime_checkable
class Role(Protocol):
    """What a policy's ``[role]`` comes to."""

    @property
    def name(self) -> str:
        """What it is called, such as ``trainer-writer``."""

    @property
    def run_id(self) -> str | None:
        """The run that the platform has given this process; None: it gave none."""

    @property
    def launch(self) -> int | None:
        """The number of this writer's turn that the platform has given; None: it gave none."""

    def may(self, operation: Operation, duty: Duty) -> bool:
        """Whether the role allows it by the credentials of a duty, as far as the policy tells."""

    def open(self, root: str | os.PathLike[str] | Store, duty: Duty) -> Store:
        """The store at a root, by the credentials of a duty; it refuses what the role may not do.

        Raises:
            ConfigError: the root is none, or the credentials cannot be had.
        """

    def drop(self, duty: Duty) -> None:
        """Let go of the credentials of a duty: every store that was opened for it refuses all from now on.

        Without effect where both duties go by the same credentials.
        """


def open_root(root: str | os.PathLike[str] | Store, policy: Policy | None, duty: Duty) -> Store:
    """The store at a root, as the policy's role opens it; without a role, as whoever runs this.

    Raises:
        ConfigError: as `open_store`, or as `Role.open`; or the policy's audit log lies in the root.
    """
    check_root(root, policy)
    if policy is None or policy.role is None:
        return open_store(root)
    return policy.role.open(root, duty)


def check_root(root: str | os.PathLike[str] | Store, policy: Policy | None) -> None:
    """Raise ConfigError where the policy's audit log lies in a root; before anything is recorded there."""
    if policy is not None:
        where = os.fspath(root) if isinstance(root, str | os.PathLike) else getattr(root, "uri", None)
        if where and isinstance(where, str):  # of anything else, who opens it says what is wrong
            check_apart_from_sink(policy.auditor, [where])
