"""Which run a root is, held against the one run that a role is for.

In a bucket the name of the folder says it, since not every role may read there; elsewhere the root's own
record does. A grant is held to both.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from strongroom import layout
from strongroom.errors import AccessDeniedError, ObjectNotFoundError
from strongroom.manifest import RUN_BOUNDS, Run

if TYPE_CHECKING:
    from strongroom.stores.base import Store

__all__ = ["RunBinding"]


class RunBinding:
    """One root that was opened for one run. It may be used from several threads at once.

    Args:
        store: the root's, under no rule.
        run: the run; None: nothing is held against anything.
        whom: whose run it is, for errors.
        has_grant: what does not say which run it is is not read.
    """

    def __init__(self, store: Store, run: str | None, *, whom: str, has_grant: bool) -> None:
        self._store: Final = store
        self._run: Final = run
        self._whom: Final = whom
        self._has_grant: Final = has_grant
        self._lock = threading.Lock()
        self._is_known = run is None

    def check(self) -> None:
        """Refuse another run's root.

        Raises:
            AccessDeniedError: it is another run's.
            FormatError: its record is malformed.
            StoreError: its record could not be read.
        """
        is_bucket = self._store.uri[:5].lower() == "s3://"
        with self._lock:
            if self._is_known or (is_bucket and not self._has_grant):
                return
            try:
                data = self._store.read(layout.RUN, limit_bytes=RUN_BOUNDS.length_bytes)
            except ObjectNotFoundError:
                return  # an empty root becomes its run's with the first save
            run = Run.decode(data, layout.RUN).run
            if run != self._run:
                raise AccessDeniedError(
                    f"{self._store.uri} is of run {run}, and {self._whom} is for run {self._run}; "
                    + (
                        "have another grant approved"
                        if self._has_grant
                        else "give that run's root, or its role"
                    )
                )
            self._is_known = True

    def check_reading(self, key: str) -> None:
        """Refuse to read by a grant what does not say which run it is.

        Raises:
            AccessDeniedError, FormatError, StoreError: as `check`, or the root has no record of its run.
        """
        if self._is_known or not self._has_grant or key == layout.RUN:
            return
        self.check()
        if not self._is_known:
            raise AccessDeniedError(
                f"{self._store.uri} has no {layout.RUN}, so that nothing says which run it is, and the grant "
                f"of {self._whom} is for run {self._run}; see who removed it"
            )
