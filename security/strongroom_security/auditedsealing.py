"""A sealing that puts on record that keys are unwrapped, before they are: whoever asks.

A restore, an export or a command says what it reads, and is on record, before it comes here. What comes
without that says so here, and goes on only once it is accepted: no way round the record opens a checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strongroom.auditing import Action, Activity, Auditor, accepted_operation
from strongroom.layout import CheckpointName
from strongroom_security.keyrequests import Requests, collecting

if TYPE_CHECKING:
    from strongroom.manifest import Commit, Manifest
    from strongroom.sealing import OneOff, SaveSeal, Sealing, Unlocked
    from strongroom.stores.base import Store

__all__ = ["AuditedSealing"]


class AuditedSealing:
    """Fills `strongroom.sealing.Sealing` by another one.

    Args:
        sealing: what does the work.
        auditor: has to have accepted an unwrapping before it is asked for.
    """

    def __init__(self, sealing: Sealing, auditor: Auditor) -> None:
        # Never twice: each would put the same on record.
        self._sealing: Sealing = sealing._sealing if isinstance(sealing, AuditedSealing) else sealing
        self._auditor = auditor

    @property
    def fingerprint(self) -> str:
        return self._sealing.fingerprint

    def one_off(self) -> OneOff:
        return self._sealing.one_off()

    def seal_save(self, run: str, name: CheckpointName, one_off: OneOff | None) -> SaveSeal:
        return self._sealing.seal_save(run, name, one_off)

    def unlock(
        self, store: Store, commit: Commit, manifest: Manifest, *, within_s: float | None = None
    ) -> Unlocked:
        """As `Sealing.unlock`.

        Raises:
            AuditError: it could not be put on record first, and no keeper of keys was asked.
        """
        operation = accepted_operation(self._auditor, manifest.run, manifest.name)
        requests = Requests()
        with Activity(
            self._auditor,
            Action.UNWRAP,
            root=store.uri,
            run=manifest.run,
            checkpoint=manifest.name,
            operation=operation,
        ) as activity:
            if operation is None:
                activity.intend(manifest.run, manifest.name)
            try:
                with collecting(requests):
                    unlocked = self._sealing.unlock(store, commit, manifest, within_s=within_s)
            finally:
                activity.note(**requests.details)
            activity.note(keyring=unlocked.keyring)
        return unlocked

    def locked(self, manifest: Manifest) -> Unlocked:
        return self._sealing.locked(manifest)

    def accepts_unsealed(self, name: CheckpointName) -> bool:
        return self._sealing.accepts_unsealed(name)

    def __repr__(self) -> str:
        return f"AuditedSealing({self._sealing!r})"
