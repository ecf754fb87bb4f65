"""What early warnings are set to, and the TOML file that sets them otherwise.

One section a rule, named as its alerts are; what a section does not say keeps its default. What the rules
make of it is theirs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields
from typing import Any, Final

from strongroom.errors import ConfigError
from strongroom_security.tomllines import line_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "SECTIONS",
    "BreakGlass",
    "DeniedBurst",
    "FailedSaves",
    "LogTrouble",
    "RemovedFast",
    "Rules",
    "SavesStopped",
    "UnusualReader",
    "ValidatorSilent",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedFast:
    """Checkpoints go faster than this run's usually do.

    Attributes:
        factor: times the median of the hours before in which any went, from which on it counts.
        at_least: removals in one hour below which it does not count, whatever the median.
        per_hour: removals in one hour that are always too many.
        superseded: checkpoints that one launch may leave behind by going on from an older one.
    """

    enabled: bool = True
    factor: float = 5.0
    at_least: int = 10
    per_hour: int = 100
    superseded: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatorSilent:
    """Checkpoints go on being saved, and nobody looks whether they are any good.

    A ``verify`` by anybody counts as looking, and a restore by one of those named here.

    Attributes:
        roles, actors: roles by name; identities (of a role: its sessions too), or users.
        commits: so many since it was last looked are too many.
        hours: so long is too long, if anything was saved since.
        required: a run at which nobody has ever looked counts as well.
    """

    enabled: bool = True
    roles: tuple[str, ...] = ("validator-reader", "break-glass-restore")
    actors: tuple[str, ...] = ()
    commits: int = 50
    hours: float = 24.0
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusualReader:
    """A checkpoint was read by somebody who has not read this run's before.

    Attributes:
        by: what is compared: ``role``, ``identity`` (of a role: whatever its session), ``user``, ``host``.
        baseline_days: how far back "before" goes.
        baseline_reads: with fewer reads before, nobody is unusual.
        roles, identities, users, hosts: who may; where a list is given, everybody else is unusual at once.
    """

    enabled: bool = True
    by: tuple[str, ...] = ("role", "identity")
    baseline_days: float = 30.0
    baseline_reads: int = 5
    roles: tuple[str, ...] = ()
    identities: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeniedBurst:
    """Somebody is refused again and again.

    Attributes:
        denials: of one actor, within ``minutes``, that are too many.
    """

    enabled: bool = True
    denials: int = 5
    minutes: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavesStopped:
    """A run that saved regularly has stopped, and has not said that it ended.

    Attributes:
        factor: times its median interval without a commit that are too long.
        commits: with fewer there is no interval to go by.
        at_least_minutes: shorter is never too long.
        forget_days: a run whose last commit is older has been told of long enough.
    """

    enabled: bool = True
    factor: float = 5.0
    commits: int = 4
    at_least_minutes: float = 10.0
    forget_days: float = 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakGlass:
    """A break-glass grant was used. There is no such use that nobody needs to know of."""

    enabled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTrouble:
    """Events were lost, or whoever writes them has fallen silent without an end.

    Attributes:
        silent_hours: after so long a writer without an end is taken for dead.
    """

    enabled: bool = True
    silent_hours: float = 24.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedSaves:
    """Saves fail one after another, or were found committed with no record of their own.

    Attributes:
        in_a_row: so many without one that was committed are too many.
        observed: whether commits that a later launch found are told of.
    """

    enabled: bool = True
    in_a_row: int = 3
    observed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """All rules' settings; a rule's name is its member's with ``-`` for ``_``."""

    removed_fast: RemovedFast = field(default_factory=RemovedFast)
    validator_silent: ValidatorSilent = field(default_factory=ValidatorSilent)
    unusual_reader: UnusualReader = field(default_factory=UnusualReader)
    denied_burst: DeniedBurst = field(default_factory=DeniedBurst)
    saves_stopped: SavesStopped = field(default_factory=SavesStopped)
    break_glass: BreakGlass = field(default_factory=BreakGlass)
    log_trouble: LogTrouble = field(default_factory=LogTrouble)
    failed_saves: FailedSaves = field(default_factory=FailedSaves)

    @classmethod
    def parse(cls, text: str, what: str) -> Rules:
        """The rules that a TOML document sets.

        Args:
            what: names it in errors.

        Raises:
            ConfigError: it is no TOML, or has a section or a member that no rule has, or of another kind.
        """
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{what} is not TOML: {error}") from None
        except RecursionError:
            raise ConfigError(f"{what} nests too deep") from None
        made: dict[str, Any] = {}
        for section, members in document.items():
            kind = SECTIONS.get(section)
            if kind is None:
                raise _wrong(text, what, [section], f"there is no rule {section!r:.60}; {_listed(SECTIONS)}")
            if not isinstance(members, dict):
                raise _wrong(text, what, [section], f"a rule is a section: write [{section}]")
            made[section.replace("-", "_")] = _section(text, what, section, kind, members)
        return cls(**made)


SECTIONS: Final[dict[str, Any]] = {
    "removed-fast": RemovedFast,
    "validator-silent": ValidatorSilent,
    "unusual-reader": UnusualReader,
    "denied-burst": DeniedBurst,
    "saves-stopped": SavesStopped,
    "break-glass": BreakGlass,
    "log-trouble": LogTrouble,
    "failed-saves": FailedSaves,
}
"""What each section of the file sets."""

_BY: Final = ("role", "identity", "user", "host")
_MOST: Final = 1_000_000_000


def _section(text: str, what: str, section: str, kind: Any, members: dict[str, Any]) -> Any:
    defaults = {each.name: each.default for each in fields(kind)}
    given = {}
    for name, value in members.items():
        if name not in defaults:
            raise _wrong(
                text, what, [section, name], f"[{section}] has no member {name!r:.60}; {_listed(defaults)}"
            )
        problem = _problem(name, value, defaults[name])
        if problem is not None:
            raise _wrong(text, what, [section, name], f"[{section}] {name}: {problem}, got {value!r:.60}")
        given[name] = tuple(value) if isinstance(value, list) else value
    return kind(**given)


def _problem(name: str, value: Any, default: Any) -> str | None:
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "expected true or false"
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
            return "expected a list of texts"
        if name == "by" and (not value or not set(value) <= set(_BY)):
            return f"expected some of {', '.join(_BY)}"
        return None
    if isinstance(default, int):
        return None if type(value) is int and 1 <= value <= _MOST else "expected a whole number from 1"
    is_number = type(value) in (int, float) and 0 < value <= _MOST
    return None if is_number else "expected a number above 0"


def _wrong(text: str, what: str, at: list[str], problem: str) -> ConfigError:
    line = line_of(text, at)
    return ConfigError(f"{what}{'' if line is None else f':{line}'}: {problem}")


def _listed(names: Any) -> str:
    return f"expected one of {', '.join(names)}"
