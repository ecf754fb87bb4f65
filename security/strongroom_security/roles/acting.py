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
from typing import TYPE_CHECKING, Any, Final

from strongroom.auditing import NO_AUDIT, Act, Action, Auditor, Outcome, Phase, new_operation, reason_of
from strongroom.errors import AccessDeniedError, ConfigError
from strongroom.layout import RUN, CheckpointName
from strongroom.roles import Duty, Operation
from strongroom.stores.base import Store
from strongroom.stores.limited import LimitedStore, limited, unlimited
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom.stores.open import open_store
from strongroom_security.roles.binding import RunBinding
from strongroom_security.roles.credentials import Credentials, Ends, Held
from strongroom_security.roles.definitions import Definition, Rights, who_may
from strongroom_security.roles.documents import compact, session_policy
from strongroom_security.roles.site import Site

if TYPE_CHECKING:
    from strongroom.stores.s3 import S3Options

__all__ = ["ActingRole"]

_S3: Final = "s3://"
_DOES: Final = {
    Operation.CREATE: "create",
    Operation.READ: "read",
    Operation.LIST: "list",
    Operation.DELETE: "delete",
}
_TOLD_AS: Final = {
    Operation.CREATE: Action.SAVE,
    Operation.READ: Action.READ,
    Operation.LIST: Action.LIST,
    Operation.DELETE: Action.REMOVE,
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
        ends: when the role must not be used any more, as a grant says; None: it has no end.

    Attributes:
        auditor: is told of what the role refuses: each kind of thing once.
    """

    def __init__(
        self,
        definition: Definition,
        *,
        run: str | None = None,
        launch: int | None = None,
        save: Credentials | None = None,
        restore: Credentials | None = None,
        ends: Ends | None = None,
    ) -> None:
        self.definition: Final = definition
        self.run_id: Final = run
        self.launch: Final = launch
        own = save or Credentials()
        self.credentials: Final = {Duty.SAVE: own, Duty.RESTORE: restore or own}
        self._restores_apart: Final = restore is not None
        self._ends = ends
        self._lock = threading.Lock()
        self._held: dict[tuple[Duty | None, str], Held] = {}
        self._own: weakref.WeakSet[LimitedStore] = weakref.WeakSet()
        self._opened: weakref.WeakSet[LimitedStore] = weakref.WeakSet()
        self._told: list[Callable[[], None]] = []
        self._is_dropped = False
        self.auditor: Auditor = NO_AUDIT
        self._refused: set[tuple[str, Duty, Operation, str]] = set()

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
            ConfigError: the root is none, its folder in a bucket is not the role's run's, there are no such
                credentials, or the root is a store that cannot be made to go by them.
            FormatError: what says which run the root is is malformed.
            AccessDeniedError: the root is another run's, no grant allows it, or the credentials were let go
                of, or refused.
            StoreUnavailableError: who gives credentials was out of reach.
        """
        self._check_time()
        store = self._store(root, duty)
        binding = RunBinding(
            unlimited(store),
            self.run_id,
            whom=f"the role {self.name}",
            has_grant=self.definition.needs_grant,
        )
        try:
            binding.check()
        except AccessDeniedError as error:
            self._tell_refused(store.uri, Operation.READ, RUN, duty, error)
            raise

        def rule(operation: Operation, key: str) -> None:
            self._check_time()
            try:
                self._rule(store.uri, operation, key, duty)
                if operation is Operation.READ:
                    binding.check_reading(key)
            except AccessDeniedError as error:
                self._tell_refused(store.uri, operation, key, duty, error)
                raise

        opened = limited(store, rule)
        self._own.add(opened)
        if duty is Duty.RESTORE:
            with self._lock:
                if self._is_dropped:
                    raise AccessDeniedError(f"{store.uri}: {_DROPPED}")
                self._opened.add(opened)
        return opened

    def _check_time(self) -> None:
        if self._ends is not None:
            self._ends.check()

    def _store(self, root: str | os.PathLike[str] | Store, duty: Duty) -> Store:
        """The store at a root, by the credentials of a duty, whatever a root that is a store goes by."""
        if isinstance(root, str) and root[: len(_S3)].lower() == _S3:
            return self._open_s3(root, duty)
        store = open_store(root)
        if isinstance(store, (LocalStore, MemoryStore)):
            return store  # no credentials of AWS open these
        if isinstance(store, LimitedStore) and store in self._own:
            return store  # it has its duty's
        if store.uri[: len(_S3)].lower() == _S3:
            self._check_folder(store.uri)
        if not self._names_credentials:
            return store
        from strongroom.stores.s3 import S3Store

        if type(store) is not S3Store:
            raise ConfigError(
                f"{store.uri}: [role] names credentials, and a root that is a {type(store).__name__} goes by "
                f"its own; give the root's URI, or an S3Store"
            )
        return self._open_s3(store.uri, duty, store.options)

    def _check_folder(self, uri: str) -> None:
        """In a bucket a run is where its name says: what stands there is not always to be read."""
        bucket, _, path = uri[len(_S3) :].partition("/")
        folder = path.rstrip("/").rpartition("/")[2]
        if self.run_id is not None and folder != self.run_id:
            raise ConfigError(
                f"{uri}: the role {self.name} is for the run {self.run_id}, and a root in a bucket is the "
                f"folder of that name; make the root {_S3}{bucket}/runs/{self.run_id}"
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

    def _tell_refused(
        self, uri: str, operation: Operation, key: str, duty: Duty, error: AccessDeniedError
    ) -> None:
        """Record a refusal: once of each kind, since a writer that may not look finds so at every save."""
        first, _, rest = key.partition("/")
        name = CheckpointName.parse(first)
        about = (uri, duty, operation, first if name is None else "step-*")
        with self._lock:
            if about in self._refused:
                return
            self._refused.add(about)
        self.auditor.record(
            Act(
                action=_TOLD_AS[operation],
                phase=Phase.FINISHED,
                outcome=Outcome.DENIED,
                operation=new_operation(),
                root=uri,
                run=self.run_id,
                checkpoint=name,
                path=rest or None if name is not None else None,
                reason=reason_of(error),
                details={
                    "duty": duty.value,
                    "key": key,
                    "operation": operation.value,
                    "role": self.name,
                },
            )
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
        self._check_time()
        if not self._names_credentials and self._ends is None:
            return None
        return self._hold(duty, _ANY, whom=f"the role {self.name}")

    @property
    def _names_credentials(self) -> bool:
        return any(each != Credentials() for each in self.credentials.values())

    def _open_s3(self, uri: str, duty: Duty, options: S3Options | None = None) -> Store:
        self._check_folder(uri)
        session = self._hold(duty, self._site(uri) if self._narrows(duty) else _ANY, whom=uri)
        from strongroom.stores.s3 import S3Store

        store: Store = S3Store(uri, options=options, session=session)
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
                    run=self.run_id,
                    ends=self._ends,
                    policy=self._narrowed(site, part) if self._narrows(duty) else None,
                    whom=whom,
                )
        held.check()
        return held.session

    def _narrows(self, duty: Duty) -> bool:
        return self.credentials[duty].takes_up_a_role and self.run_id is not None

    def _narrowed(self, site: Site, duty: Duty | None) -> str:
        ends_at = None if self._ends is None else self._ends.when
        return compact(session_policy(self.definition, replace(site, run=self.run_id), duty, ends_at=ends_at))

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
