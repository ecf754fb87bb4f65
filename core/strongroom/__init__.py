"""Checkpoints for training runs that survive anything, and runs that resume by themselves.

The public names of the core. They are imported when first used, so that a program that only
looks at a root (the ``strongroom`` command) does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from strongroom import errors
from strongroom._version import __version__

if TYPE_CHECKING:
    from strongroom.catalog import Checkpoint
    from strongroom.checkpointer import Checkpointer
    from strongroom.config import RaiseAtOnce, Tolerate
    from strongroom.dcp import StrongroomReader, StrongroomWriter
    from strongroom.errors import (
        AccessDeniedError,
        AuditError,
        CheckpointNotFoundError,
        ClosedError,
        ConfigError,
        DeadlineExceededError,
        FencedError,
        FormatError,
        IntegrityError,
        KeyServiceError,
        NoKeyError,
        NoWholeCheckpointError,
        ObjectExistsError,
        ObjectNotFoundError,
        OutcomeUnknownError,
        ProvenanceMismatchError,
        ReplicationError,
        RollbackError,
        SaveError,
        StateEncodingError,
        StateError,
        StateMismatchError,
        StoreError,
        StoreFullError,
        StoreUnavailableError,
        StrongroomError,
        UnsealedError,
        UnsupportedFormatError,
        UntrustedError,
        WaitTimeoutError,
    )
    from strongroom.handle import SaveHandle
    from strongroom.provenance.comparing import Change, OnChange
    from strongroom.registry import register_codec, register_type
    from strongroom.restore import Restored
    from strongroom.retention import KeepAll, KeepLast
    from strongroom.tiers import Tier
    from strongroom.tree import PerRank

_HOMES = {
    "Checkpoint": "catalog",
    "Checkpointer": "checkpointer",
    "SaveHandle": "handle",
    "RaiseAtOnce": "config",
    "Tolerate": "config",
    "StrongroomReader": "dcp",
    "StrongroomWriter": "dcp",
    "Change": "provenance.comparing",
    "OnChange": "provenance.comparing",
    "register_codec": "registry",
    "register_type": "registry",
    "Restored": "restore",
    "KeepAll": "retention",
    "KeepLast": "retention",
    "Tier": "tiers",
    "PerRank": "tree",
    **dict.fromkeys(errors.__all__, "errors"),
}

__all__ = [
    "AccessDeniedError",
    "AuditError",
    "Change",
    "Checkpoint",
    "CheckpointNotFoundError",
    "Checkpointer",
    "ClosedError",
    "ConfigError",
    "DeadlineExceededError",
    "FencedError",
    "FormatError",
    "IntegrityError",
    "KeepAll",
    "KeepLast",
    "KeyServiceError",
    "NoKeyError",
    "NoWholeCheckpointError",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "OnChange",
    "OutcomeUnknownError",
    "PerRank",
    "ProvenanceMismatchError",
    "RaiseAtOnce",
    "ReplicationError",
    "Restored",
    "RollbackError",
    "SaveError",
    "SaveHandle",
    "StateEncodingError",
    "StateError",
    "StateMismatchError",
    "StoreError",
    "StoreFullError",
    "StoreUnavailableError",
    "StrongroomError",
    "StrongroomReader",
    "StrongroomWriter",
    "Tier",
    "Tolerate",
    "UnsealedError",
    "UnsupportedFormatError",
    "UntrustedError",
    "WaitTimeoutError",
    "__version__",
    "register_codec",
    "register_type",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'strongroom' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"strongroom.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
