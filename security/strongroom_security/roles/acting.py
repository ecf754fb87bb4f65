"""Fills the core's seam for roles: which stores a process gets, under which rule, by whose credentials.

What a role may do is `strongroom_security.roles.definitions`' to say, and how credentials are had
`strongroom_security.roles.credentials`'.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from strongroom import layout
from strongroom.errors import AccessDeniedError, ConfigError, ObjectNotFoundError
from strongroom.manifest import RUN_BOUNDS, Run
from strongroom.roles import Duty, Operation
from strongroom.stores.base import Store
from strongroom.stores.limited import LimitedStore, limited
from strongroom.stores.open import open_store
from strongroom_security.roles.credentials import Credentials, Held
from strongroom_security.roles.definitions import Definition, Rights, who_may
from strongroom_security.roles.documents import compact, session_policy
from strongroom_security.roles.site import Site

__all__ = ["ActingRole"]

_S3: Final = "s3://"
_DOES: Final = {
    Operation.CREATE: "create",
    Operation.READ: "read",
    Operation.LIST: "list",
    Operation.DELETE: "delete",
}
_ANY: Final = Site(bucket="no-bucket")
"""For sessions that are narrowed to no bucket, and for those that ask a key service alone."""
_DROPPED: Final = "the credentials for restoring were let go of before the first save"


class ActingRole:
    """One role, as this process has it. It may be used from several threads at once.

    Args:
        definition: which.
        run: the one run that it is for; None: nothing says.
        launch: the number of this writer's turn; None: nothing says.
        save: by whose credentials it saves, and whatever else follows from that.
        restore: by whose it restores; None: by the same.
        check: called before a store is opened; raises where the role must not be used now. None: nothing is
            asked.
    """

    def __init__(
        self,
        definition: Definition,
        *,
        run: str | None = None,
        launch: int | None = None,
        save: Credentials | None = None,
        restore: Credentials | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.definition: Final = definition
        self.run_id: Final = run
        self.launch: Final = launch
        own = save or Credentials()
        self.credentials: Final = {Duty.SAVE: own, Duty.RESTORE: restore or own}
        self._restores_apart: Final = restore is not None
        self._check = check
        self._lock = threading.Lock()
        self._held: dict[tuple[Duty | None, str], Held] = {}
        self._opened: weakref.WeakSet[LimitedStore] = weakref.WeakSet()
        self._told: list[Callable[[], None]] = []
        self._is_dropped = False

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def has_two(self) -> bool:
        """Whether restoring goes by other credentials than saving."""
        return self.credentials[Duty.SAVE] != self.credentials[Duty.RESTORE]

    def may(self, operation: Operation, duty: Duty) -> bool:
        """See `strongroom.roles.Role.may`."""
        return self._rights(duty).may(operation)

    def _rights(self, duty: Duty) -> Rights:
        is_without = duty is Duty.RESTORE and not self._restores_apart
        return Rights() if is_without and not self.definition.restores_as_itself else self.definition.of(duty)

    def open(self, root: str | os.PathLike[str] | Store, duty: Duty) -> Store:
        """See `strongroom.roles.Role.open`.

        Raises:
            ConfigError: the root is none, its folder is not its run's, or there are no such credentials.
            FormatError: a grant is needed, and the root does not say which run it is.
            AccessDeniedError: the credentials were let go of, or refused, or no grant allows it.
            StoreUnavailableError: who gives credentials was out of reach.
        """
        if self._check is not None:
            self._check()
        is_s3 = isinstance(root, str) and root[: len(_S3)].lower() == _S3
        store = self._open_s3(str(root), duty) if is_s3 else open_store(root)
        if self.definition.needs_grant:
            self._check_run(store)
        opened = limited(store, lambda operation, key: self._rule(store.uri, operation, key, duty))
        if duty is Duty.RESTORE:
            with self._lock:
                if self._is_dropped:
                    raise AccessDeniedError(f"{store.uri}: {_DROPPED}")
                self._opened.add(opened)
        return opened

    def _check_run(self, store: Store) -> None:
        """A grant is for one run, and whoever uses it may be let into more by the storage."""
        try:
            data = store.read(layout.RUN, limit_bytes=RUN_BOUNDS.length_bytes)
        except ObjectNotFoundError:
            return  # an empty root has nothing to read
        run = Run.decode(data, layout.RUN).run
        if run != self.run_id:
            raise AccessDeniedError(
                f"{store.uri} is of run {run}, and the grant of {self.name} is for run {self.run_id}; have "
                f"another one approved"
            )

    def _rule(self, uri: str, operation: Operation, key: str, duty: Duty) -> None:
        if self._rights(duty).may(operation, key):
            return
        able = [name for name in who_may(operation, duty, key) if name != self.name]
        hint = "do it as"
        if not self.definition.restores_as_itself and operation in (Operation.READ, Operation.LIST):
            if not self._restores_apart:
                hint = "name the credentials for restoring in [role] restore, or do it as"
            elif duty is Duty.SAVE:
                hint = "do it before the first save, or as"
        then = f"; {hint} {' or '.join(able)}" if able else ""
        raise AccessDeniedError(
            f"{uri}: the role {self.name} may not {_DOES[operation]} {key or 'the root'} "
            f"({'restoring' if duty is Duty.RESTORE else 'saving'}); nothing was asked of the storage{then}"
        )

    def drop(self, duty: Duty) -> None:
        """See `strongroom.roles.Role.drop`."""
        if duty is not Duty.RESTORE or not self.has_two:
            return
        with self._lock:
            self._is_dropped = True
            stores = list(self._opened)
            self._opened.clear()
            held = [self._held.pop(key) for key in list(self._held) if key[0] is Duty.RESTORE]
            told = list(self._told)
        for store in stores:
            store.close(_DROPPED)
        for each in held:
            each.drop(_DROPPED)
        for then in told:
            then()

    def when_dropped(self, then: Callable[[], None]) -> None:
        """Have something called once the credentials for restoring are let go of."""
        self._told.append(then)

    # ---------------------------------------------------------------------------------------------- sessions

    def session(self, duty: Duty) -> Any:
        """boto3's session for a key service; None: this process's own will do.

        Raises:
            AccessDeniedError, ConfigError, StoreUnavailableError: as `open`.
        """
        if not self.has_two and self.credentials[duty] == Credentials():
            return None
        return self._hold(duty, _ANY, whom=f"the role {self.name}")

    def _open_s3(self, uri: str, duty: Duty) -> Store:
        session = self._hold(duty, self._site(uri) if self._narrows(duty) else _ANY, whom=uri)
        from strongroom.stores.s3 import S3Store

        store: Store = S3Store(uri, session=session)
        return store

    def _hold(self, duty: Duty, site: Site, *, whom: str) -> Any:
        # One set of credentials has one session for both duties, with the rights of both.
        part = duty if self.has_two else None
        key = (part, f"{site.bucket}/{site.prefix}")
        with self._lock:
            if duty is Duty.RESTORE and self._is_dropped:
                raise AccessDeniedError(f"{whom}: {_DROPPED}")
            held = self._held.get(key)
            if held is None:
                held = self._held[key] = Held(
                    self.credentials[duty],
                    name=f"strongroom-{self.name}",
                    policy=self._narrowed(site, part) if self._narrows(duty) else None,
                    whom=whom,
                )
        held.check()
        return held.session

    def _narrows(self, duty: Duty) -> bool:
        return self.credentials[duty].takes_up_a_role and self.run_id is not None

    def _narrowed(self, site: Site, duty: Duty | None) -> str:
        return compact(session_policy(self.definition, replace(site, run=self.run_id), duty))

    def _site(self, uri: str) -> Site:
        """What a root's URI says; a session is narrowed to a folder that is named by the run's id."""
        bucket, _, path = uri[len(_S3) :].partition("/")
        prefix, _, folder = path.rstrip("/").rpartition("/")
        if folder != self.run_id or not prefix:
            raise ConfigError(
                f"{uri}: the role {self.name} is for the run {self.run_id}, and its session is narrowed to "
                f"the folder of that name; make the root {_S3}{bucket}/runs/{self.run_id}"
            )
        return Site(bucket=bucket, prefix=f"{prefix}/")

    def __repr__(self) -> str:
        return f"<ActingRole {self.name}>"
