"""``[role]`` of a policy: what this process may do to a root, and by whose credentials."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from strongroom.auditing import Auditor
from strongroom.errors import ConfigError, FormatError
from strongroom.layout import MAX_LAUNCH
from strongroom.manifest import check_run_id
from strongroom.roles import Duty, Operation
from strongroom_security.members import WrongMemberError, texts

if TYPE_CHECKING:
    from strongroom.stores.base import Store
    from strongroom_security.roles.acting import ActingRole
    from strongroom_security.roles.credentials import Credentials
    from strongroom_security.roles.definitions import Definition
    from strongroom_security.roles.grants import GrantUse, HeldGrant

__all__ = ["ActAs"]

_SECTION: Final = "role"
_VARIABLE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]{0,127})")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class ActAs:
    """The process does what one role may do, and nothing else; it is told so before a server is asked.

    Args:
        name: of the role, as ``"trainer-writer"``.
        run: the run's id, or ``"env:NAME"``: the variable that holds it. None: nothing says.
        launch: the number of this writer's turn, or ``"env:NAME"``. None: nothing says.
        save: by whose credentials it saves: ``"env"`` (this process's own), ``"profile:NAME"``,
            ``"role:ARN"`` or ``"web-identity:ARN"``.
        restore: by whose it restores, likewise; they are let go of before the first save. None: by the same.
        grant: of ``break-glass``: the file of its grant.
        approvers: of ``break-glass``: public keys of those who may approve, two of whom have to have.
        base: the folder that relative paths are relative to; None: the current one.
        environment: in which variables are looked up.

    Raises:
        ConfigError: a value cannot work, a variable is not set, or the grant does not hold.
    """

    definition: Definition
    run_id: str | None
    launch: int | None
    save: Credentials
    restore: Credentials | None
    _grant: HeldGrant | None
    _acting: ActingRole

    def __init__(
        self,
        *,
        name: str,
        run: str | None = None,
        launch: int | str | None = None,
        save: str = "env",
        restore: str | None = None,
        grant: str | None = None,
        approvers: Sequence[str] = (),
        base: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        from strongroom_security.roles.acting import ActingRole
        from strongroom_security.roles.definitions import definition

        folder = Path(os.curdir if base is None else base)
        put = object.__setattr__
        if not isinstance(name, str):
            raise WrongMemberError(_SECTION, "name", f"expected text, got {name!r:.60}")
        try:
            put(self, "definition", definition(name))
        except ConfigError as error:
            raise WrongMemberError(_SECTION, "name", str(error)) from None
        run_id = _run(run, environment)
        put(self, "launch", _launch(launch, environment))
        put(self, "save", _credentials("save", save, folder))
        put(self, "restore", None if restore is None else _credentials("restore", restore, folder))
        if restore is not None and not self.definition.save.create:
            raise WrongMemberError(
                _SECTION, "restore", f"the role {name} saves nothing; name its credentials by save alone"
            )
        if self.restore is not None and not self.definition.restores_as_itself:
            _check_apart(self.definition, self.save, self.restore)
        held = _held_grant(self.definition, run_id, grant, approvers, folder)
        put(self, "_grant", held)
        put(self, "run_id", run_id if held is None else held.grant.run)
        acting = ActingRole(
            self.definition,
            run=self.run_id,
            launch=self.launch,
            save=self.save,
            restore=self.restore,
            ends=held,
        )
        put(self, "_acting", acting)

    @property
    def name(self) -> str:
        """See `strongroom.roles.Role.name`."""
        return self.definition.name

    def may(self, operation: Operation, duty: Duty) -> bool:
        """See `strongroom.roles.Role.may`."""
        return self._acting.may(operation, duty)

    def open(self, root: str | os.PathLike[str] | Store, duty: Duty) -> Store:
        """See `ActingRole.open`."""
        return self._acting.open(root, duty)

    def drop(self, duty: Duty) -> None:
        """See `strongroom.roles.Role.drop`."""
        self._acting.drop(duty)

    def session(self, duty: Duty) -> Any:
        """See `ActingRole.session`."""
        return self._acting.session(duty)

    def when_dropped(self, then: Callable[[], None]) -> None:
        """See `ActingRole.when_dropped`."""
        self._acting.when_dropped(then)

    def put_on_record(self, auditor: Auditor) -> None:
        """Have what is refused, and that a grant is used, put on record from now on."""
        self._acting.auditor = auditor
        if self._grant is not None:
            self._grant.auditor = auditor

    @property
    def grant_use(self) -> GrantUse | None:
        """That its grant was used; None: it has none, or nothing was opened yet."""
        return None if self._grant is None else self._grant.use

    def __repr__(self) -> str:
        return f"ActAs(name={getattr(getattr(self, 'definition', None), 'name', None)!r})"


def _variable(member: str, text: str, environment: Mapping[str, str]) -> str:
    """A text, or what the variable holds that it names."""
    if not text.startswith("env:"):
        return text
    match = _VARIABLE.fullmatch(text)
    if match is None:
        raise WrongMemberError(_SECTION, member, f"{text[:60]!r} names no variable; expected env:NAME")
    value = environment.get(match[1], "")
    if not value:
        raise WrongMemberError(
            _SECTION, member, f"the variable {match[1]} is not set; the platform sets it for each job"
        )
    return value


def _run(run: object, environment: Mapping[str, str]) -> str | None:
    if run is None:
        return None
    if not isinstance(run, str):
        raise WrongMemberError(_SECTION, "run", f"expected a run's id or env:NAME, got {run!r:.60}")
    try:
        return check_run_id(_variable("run", run, environment))
    except FormatError as error:
        raise WrongMemberError(_SECTION, "run", str(error)) from None


def _launch(launch: object, environment: Mapping[str, str]) -> int | None:
    if launch is None:
        return None
    number = launch
    if isinstance(launch, str):
        text = _variable("launch", launch, environment)
        if text == launch or not (text.isascii() and text.isdigit() and len(text) < 12):
            raise WrongMemberError(_SECTION, "launch", f"expected a number or env:NAME, got {text!r:.60}")
        number = int(text)
    if type(number) is not int or not 1 <= number <= MAX_LAUNCH:
        raise WrongMemberError(_SECTION, "launch", f"expected 1 to {MAX_LAUNCH}, got {number!r:.60}")
    return number


def _credentials(member: str, text: object, base: Path) -> Credentials:
    from strongroom_security.roles.credentials import Credentials

    try:
        return Credentials.of(text, base=base)
    except ConfigError as error:
        raise WrongMemberError(_SECTION, member, str(error)) from None


def _check_apart(role: Definition, save: Credentials, restore: Credentials) -> None:
    """Where saving must not read, credentials that do both could not be let go of."""
    is_one_role = save.takes_up_a_role and restore.takes_up_a_role and save.name == restore.name
    if save == restore or is_one_role:
        raise WrongMemberError(
            _SECTION,
            "restore",
            f"{restore} saves as well, and what {role.name} restores by is let go of before the first save; "
            f"name other credentials, or have the role recovery-reader-writer",
        )


def _held_grant(
    role: Definition, run: str | None, grant: object, approvers: object, base: Path
) -> HeldGrant | None:
    keys = texts(_SECTION, "approvers", approvers)
    if not role.needs_grant:
        if grant is not None or keys:
            member = "grant" if grant is not None else "approvers"
            raise WrongMemberError(_SECTION, member, f"the role {role.name} needs no grant; leave it out")
        return None
    if not isinstance(grant, str):
        raise WrongMemberError(
            _SECTION, "grant", f"the role {role.name} needs one: 'strongroom roles grant' makes its file"
        )
    from strongroom_security.roles.grants import HeldGrant
    from strongroom_security.signers.opening import open_public_key

    public = []
    for text in keys:
        if not isinstance(text, str):
            raise WrongMemberError(_SECTION, "approvers", f"expected texts, got {text!r:.60}")
        try:
            public.append(open_public_key(text, base=base))
        except ConfigError as error:
            raise WrongMemberError(_SECTION, "approvers", str(error), element=text) from None
    try:
        return HeldGrant(base / grant, public, role=role.name, run=run)
    except ConfigError as error:
        raise WrongMemberError(_SECTION, "grant", str(error)) from None
