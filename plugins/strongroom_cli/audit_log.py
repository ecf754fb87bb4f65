"""What the verbs of ``strongroom audit`` that read the log go by: the sink, the index, whose word counts."""

from __future__ import annotations

import argparse
import hashlib
import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from strongroom.config import Policy
from strongroom.errors import ConfigError, StoreError
from strongroom.stores.open import open_store
from strongroom_cli.console import Bar
from strongroom_cli.words import count, printable
from strongroom_security.auditlog.asking.index import Index, is_damage
from strongroom_security.auditlog.asking.indexing import Refreshed, refresh
from strongroom_security.auditlog.listing import absent_folder
from strongroom_security.auditlog.sequencing.logkeys import parse_verifier
from strongroom_security.auditlog.verifying.trusting import Vouchers
from strongroom_security.publickeys import PublicKey
from strongroom_security.signers.opening import open_public_key
from strongroom_security.tlog.witnesses import LogKeys

if TYPE_CHECKING:
    from strongroom.stores.base import Store

__all__ = ["asked", "explained", "log_of", "nothing_there", "open_index", "sink_of", "tell", "vouchers_of"]

_CACHE: Final = "XDG_CACHE_HOME"
_NAME_DIGITS: Final = 16
_TOLD: Final = 5

_T = TypeVar("_T")


def sink_of(options: argparse.Namespace, policy: Policy | None) -> Store:
    """The sink that ``--sink`` names, or else the policy.

    Raises:
        ConfigError: neither does.
    """
    if options.sink is not None:
        named: str = options.sink
        return open_store(named.removeprefix("dir:"))
    audit = getattr(policy, "audit", None)
    if audit is None:
        raise ConfigError(
            "no audit log is named; name it by --sink, as dir:audit or s3://bucket/audit, or by the section "
            "[audit] of the policy that --security or STRONGROOM_CONFIG names"
        )
    store: Store = audit.open_sink()
    return store


def vouchers_of(options: argparse.Namespace, policy: Policy | None) -> Vouchers:
    """Whose word on writers counts: ``--signer``, or else the policy's keys.

    Raises:
        ConfigError, NoKeyError, KeyServiceError: a key cannot be had.
    """
    if options.signer:
        return Vouchers(
            open_public_key(text if ":" in text else f"file:{text}", base=Path()) for text in options.signer
        )
    keys: list[PublicKey] = []
    for section in ("audit", "sign"):
        signer = getattr(getattr(policy, section, None), "signer", None)
        if signer is not None:
            keys.append(signer.public_key)
    keys += getattr(getattr(policy, "audit", None), "former_keys", ())
    requirement = getattr(getattr(policy, "verify", None), "requirement", None)
    keys += [key for key in getattr(requirement, "keys", ()) if isinstance(key, PublicKey)]
    return Vouchers(keys)


def open_index(options: argparse.Namespace, sink: Store) -> Index:
    """The index of a sink, by ``--index`` or in this user's cache.

    Raises:
        ConfigError: the file cannot be had, or is something else.
    """
    if options.index is not None:
        return explained(lambda: Index(Path(options.index), sink=sink.uri))
    home = os.environ.get(_CACHE, "")
    try:
        folder = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    except RuntimeError:
        raise ConfigError("this user has no home for the index; name a file for it with --index") from None
    name = f"audit-{hashlib.sha256(sink.uri.encode()).hexdigest()[:_NAME_DIGITS]}.sqlite"
    return explained(lambda: Index(folder / "strongroom" / name, sink=sink.uri, is_ours=True))


def asked(
    options: argparse.Namespace, index: Index, sink: Store, question: Callable[[], _T]
) -> tuple[_T, Refreshed | None]:
    """What an index says, brought up to date first; where it is damaged, built again and asked once more.

    Raises:
        StoreError: the sink could not be read, or the index not be written.
    """

    def work() -> tuple[_T, Refreshed | None]:
        refreshed = None if options.no_refresh else _refreshed(index, sink, log_of(options))
        return question(), refreshed

    def again() -> tuple[_T, Refreshed | None]:
        try:
            return work()
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            index.start_anew(str(error))
            return work()

    found = explained(again)
    if index.rebuilt is not None:
        tell(f"the index {index.path} could not be used ({index.rebuilt}), and was built anew")
    return found


def log_of(options: argparse.Namespace) -> LogKeys | None:
    """Who must have signed the log's tree, by ``--log-key``; None: nobody was named.

    Raises:
        ConfigError: ``--origin`` without it.
    """
    if not options.log_key:
        if options.origin:
            raise ConfigError("--origin is about the log that --log-key names, and it names none")
        return None
    keys = tuple(parse_verifier(text) for text in options.log_key)
    return LogKeys(origin=options.origin or keys[0].name, keys=keys)


def nothing_there(options: argparse.Namespace, sink: Store) -> str | None:
    """In words, that a sink that is to be read is a folder that is not there; None: it is."""
    return None if options.no_refresh else absent_folder(sink)


def tell(message: str) -> None:
    """Say something beside the answer."""
    sys.stderr.write(f"strongroom: {printable(message)}\n")


def explained(work: Callable[[], _T]) -> _T:
    """What work comes to; an index that fails is told as such.

    Raises:
        StoreError: the index could not be read or written.
    """
    try:
        return work()
    except sqlite3.Error as error:
        raise StoreError(
            f"the index could not be read or written: {error}; name another file with --index"
        ) from error


def _refreshed(index: Index, sink: Store, log: LogKeys | None) -> Refreshed:
    with Bar("indexing", counts=True) as bar:
        found = refresh(index, sink, log=log, progress=bar.show)
    _tell_some("was changed since it was read, and is told as it is now", found.changed)
    _tell_some("is no more; its events are still told", found.removed)
    _tell_some("is damaged", found.damaged.values())
    _tell_some("could not be read", (f"{key} ({why})" for key, why in found.unreadable.items()))
    return found


def _tell_some(what: str, which: Any) -> None:
    several = list(which)
    for each in several[:_TOLD]:
        tell(f"{each}: {what}")
    if len(several) > _TOLD:
        tell(f"and {count(len(several) - _TOLD, 'more segment')}; see 'strongroom audit verify'")
