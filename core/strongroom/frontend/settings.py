"""What a user may set in every front end, checked once, before anything of a run exists. Pure.

A front end has arguments of its own, named as its framework names things, and these besides: where a run
lies, how it is resumed, secured, copied, stopped. They mean the same everywhere.
"""

from __future__ import annotations

import difflib
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypedDict

from strongroom.config import OnFailure, RaiseAtOnce, Tolerate, check_count, check_seconds, load_policy
from strongroom.errors import ConfigError
from strongroom.frontend.escapes import EscapePolicy, check_escapes
from strongroom.provenance.comparing import OnChange
from strongroom.resume.mode import ResumeMode, check_resume_mode
from strongroom.resume.preemption import SpotNotice, check_signals
from strongroom.resume.skipping import SkipMode, check_skip_mode
from strongroom.tiers import Tier

__all__ = ["DEFAULTS", "RunOptions", "RunSettings", "Unencodable", "check_flags", "check_interval"]

Unencodable = Literal["warn", "refuse"]
"""Of values that no checkpoint can hold: they are named and left out, or they are an error."""


class RunOptions(TypedDict, total=False):
    """The options that every front end takes by name, besides its own arguments.

    Attributes:
        resume: ``"auto"`` resumes where there is a checkpoint, ``"must"`` makes its absence an error,
            ``"never"`` begins anew and leaves what is there alone. Default ``"auto"``.
        skip: how a resume inside an epoch passes over the batches that were trained on: ``"read"`` (the
            default) reads them again, ``"sampler"`` advances the sampler alone, which costs nothing and is
            inexact where reading itself draws or remembers.
        keep: how many of the newest checkpoints stay; None (the default): all.
        security: a policy, or its file; None reads ``STRONGROOM_CONFIG``.
        config: a policy's file that says everything for a platform: sealing, signing, audit, and by
            ``[storage]`` the root below which the run lies and its tiers. Stands for ``security``.
        digest: ``"blake3"`` or ``"sha256"``; None takes the policy's, or BLAKE3.
        timeout_s: seconds within which a save must have committed. Default 1800.
        max_fallback: how many damaged checkpoints a resume may skip before it is an error. Default 3.
        accept_older: resume although more than ``max_fallback`` are damaged, or the root is an older one than
            the policy's floor remembers. For one start, once it is known why.
        provenance: where the run comes from, such as ``{"data": {"version": "2026-11"}}``, or a function
            that returns it.
        on_change: what a resume does where the program has other data, code or hyper-parameters than the
            checkpoint was saved with: ``OnChange(data="refuse", code="warn", ...)``.
        retention_class: a name that goes into each manifest, for rules of retention to go by.
        run_id: the run's id where the platform gives one; a root of another run is refused.
        launch: the number of this start where the platform gives one, for a job that may not look at the
            root.
        replicate_to: further tiers, the fastest first, as roots or `strongroom.Tier` values: what was
            committed is copied to each in the background.
        accept_missing_tiers: go on without a tier that is out of reach, where what is newest may be.
        reserve_bytes: what is to stay free on the root's file system.
        scatter: over how many folders a checkpoint's shards are spread, for a bucket; None: over none.
        unencodable: what becomes of states that no checkpoint can hold, such as functions: ``"warn"`` (the
            default) names them once and saves the rest, ``"refuse"`` is an error.
        preemption_signals: signals that tell a run to stop: all ranks save after the same step, wait for
            the commit, and end with 128 and the signal's number. Default ``("SIGTERM", "SIGUSR1")``; empty:
            signals are left alone.
        spot_notice: a function that says whether this host is about to be taken away, or why; it is asked
            on a thread of its own, on every rank. A notice stops the run as a signal does.
        spot_notice_every_s: seconds between its answer and the next question. Default 5.
        requeue: under Slurm, a run that was told to stop by a signal puts its job back into the queue once it
            is saved, and ends with 0. Default False.
        tolerate_failures: how many saves in a row may fail in the background, loudly, before that ends the
            run. Default 0.
        escapes: where the policy seals, what becomes of what else writes the run's state: ``"seal"`` (as
            None) seals that too, ``"refuse"`` is an error, ``"warn"`` lets it write in the clear.
        log_saves: whether the run's loggers are told what each save costs, as ``strongroom/...``. Default
            True.
    """

    resume: Literal["auto", "never", "must"]
    skip: Literal["read", "sampler"]
    keep: int | None
    security: Any
    config: str | os.PathLike[str] | None
    digest: Literal["blake3", "sha256"] | None
    timeout_s: float
    max_fallback: int
    accept_older: bool
    provenance: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None
    on_change: OnChange | None
    retention_class: str | None
    run_id: str | None
    launch: int | None
    replicate_to: Sequence[str | os.PathLike[str] | Tier]
    accept_missing_tiers: bool
    reserve_bytes: int
    scatter: int | None
    unencodable: Literal["warn", "refuse"]
    preemption_signals: Sequence[str]
    spot_notice: Callable[[], bool | str | None] | None
    spot_notice_every_s: float
    requeue: bool
    tolerate_failures: int
    escapes: Literal["seal", "refuse", "warn"] | None
    log_saves: bool


DEFAULTS: Final[Mapping[str, Any]] = {
    "resume": "auto",
    "skip": "read",
    "keep": None,
    "security": None,
    "config": None,
    "digest": None,
    "timeout_s": 1800.0,
    "max_fallback": 3,
    "accept_older": False,
    "provenance": None,
    "on_change": None,
    "retention_class": None,
    "run_id": None,
    "launch": None,
    "replicate_to": (),
    "accept_missing_tiers": False,
    "reserve_bytes": 0,
    "scatter": None,
    "unencodable": "warn",
    "preemption_signals": ("SIGTERM", "SIGUSR1"),
    "spot_notice": None,
    "spot_notice_every_s": 5.0,
    "requeue": False,
    "tolerate_failures": 0,
    "escapes": None,
    "log_saves": True,
}
"""What each of `RunOptions` is where nothing is said."""

_OWN_ROOT_ONLY: Final = frozenset(
    {"accept_missing_tiers", "launch", "replicate_to", "reserve_bytes", "run_id"}
)
"""What a Checkpointer is told of the run's own root alone: another run's has tiers, a name and a turn of its
own."""

_PASSED_ON: Final = (
    "digest",
    "timeout_s",
    "max_fallback",
    "on_change",
    "retention_class",
    "run_id",
    "launch",
    "accept_missing_tiers",
    "reserve_bytes",
    "scatter",
)
"""What is a `strongroom.Checkpointer`'s to check."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """`RunOptions` and the run's root, in the terms of the core.

    Attributes:
        root: where the run lies, as a path that is meant here and now, or a URI.
        resume: whether the run takes up what is there when it begins.
        skip: how a resume inside an epoch passes over the batches that were trained on.
        keep: how many of the newest stay; None: all.
        accept_older: going back further than usual is meant.
        unencodable: what becomes of values without an encoding.
        escapes: what becomes of what else writes the state of a sealed run.
        provenance: what the user says of the run.
        preemption_signals: those that tell a run to stop.
        spot_notice: the user's function that knows of a notice.
        spot_notice_every_s: how long after one answer it is asked again.
        requeue: Slurm is asked to begin the job again.
        timeout_s: within which a save must have committed.
        log_saves: the run's loggers are told what saves cost.
        options: what a `strongroom.Checkpointer` of the run's root is told.
    """

    root: str
    resume: ResumeMode
    skip: SkipMode
    keep: int | None
    accept_older: bool
    unencodable: Unencodable
    escapes: EscapePolicy
    provenance: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None
    preemption_signals: tuple[signal.Signals, ...]
    spot_notice: SpotNotice | None
    spot_notice_every_s: float
    requeue: bool
    timeout_s: float
    log_saves: bool
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        root: str | os.PathLike[str],
        given: Mapping[str, Any],
        *,
        root_name: str = "root",
        known: Sequence[str] = (),
    ) -> RunSettings:
        """Check what a front end was given.

        Args:
            root: the run's.
            given: of `RunOptions`; what is missing is as `DEFAULTS` have it.
            root_name: what the front end calls the root, for errors.
            known: names of the front end's own arguments, which an error may suggest.

        Raises:
            ConfigError: a value that cannot work, two that exclude each other, or an unknown option.
        """
        unknown = [name for name in given if name not in DEFAULTS]
        if unknown:
            raise ConfigError(_no_such_option(unknown[0], [*DEFAULTS, *known]))
        values = {**DEFAULTS, **given}
        check_flags(
            **{
                name: values[name]
                for name in ("accept_missing_tiers", "accept_older", "log_saves", "requeue")
            }
        )
        place = _expanded(root, root_name)
        security, replicate_to = values["security"], values["replicate_to"]
        if values["config"] is not None:
            if security is not None:
                raise ConfigError("config= names the policy's file too: give it or security=, not both")
            security = load_policy(values["config"])
            placement = getattr(security, "placement", None)
            if placement is not None:
                placed = placement.place(place)
                place, replicate_to = placed.root, replicate_to or placed.replicate_to
        if values["unencodable"] not in ("warn", "refuse"):
            raise ConfigError(f"unencodable must be one of 'warn', 'refuse', got {values['unencodable']!r}")
        return cls(
            root=_absolute(place),
            resume=check_resume_mode(values["resume"]),
            skip=check_skip_mode(values["skip"]),
            keep=_check_keep(values["keep"]),
            accept_older=values["accept_older"],
            unencodable=values["unencodable"],
            escapes=check_escapes(values["escapes"]),
            provenance=_check_provenance(values["provenance"]),
            preemption_signals=check_signals(values["preemption_signals"] or ()),
            spot_notice=_check_notice(values["spot_notice"]),
            spot_notice_every_s=check_seconds("spot_notice_every_s", values["spot_notice_every_s"]),
            requeue=values["requeue"],
            timeout_s=check_seconds("timeout_s", values["timeout_s"]),
            log_saves=values["log_saves"],
            options={
                **{name: values[name] for name in _PASSED_ON},
                "security": security,
                "replicate_to": replicate_to,
                "on_failure": _on_failure(values["tolerate_failures"]),
            },
        )

    def is_own(self, root: str) -> bool:
        """Whether ``root`` is the run's own, however it is written."""
        return root == self.root or os.path.realpath(root) == os.path.realpath(self.root)

    @property
    def options_elsewhere(self) -> dict[str, Any]:
        """What a Checkpointer of any other root is told."""
        return {key: value for key, value in self.options.items() if key not in _OWN_ROOT_ONLY}

    def options_for(self, root: str) -> dict[str, Any]:
        """What a `strongroom.Checkpointer` of ``root`` is told."""
        return dict(self.options) if self.is_own(root) else self.options_elsewhere


def check_flags(**flags: Any) -> None:
    """Refuse what is neither True nor False: a text such as ``"no"`` would count as yes.

    Raises:
        ConfigError: names the first one.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False; got {value!r}")


def check_interval(name: str, count: Any) -> int | None:
    """A number of steps or epochs; 0 switches it off, as None does where that is the default.

    Raises:
        ConfigError: it is none.
    """
    if count is not None and (not isinstance(count, int) or count is True or count is False or count < 0):
        raise ConfigError(f"{name} must be a whole number, 0 to switch it off, or None; got {count!r}")
    return count


def _no_such_option(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(sorted(known))}"
    return f"there is no option {name!r}{meant}"


def _expanded(root: str | os.PathLike[str], root_name: str) -> str:
    """A path with ``~`` as the user's home; a URI as it is."""
    given: Any = root
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(path, str):
        raise ConfigError(
            f"{root_name} must be the run's root, a path or a URI such as s3://bucket/runs/a; got {given!r}. "
            f"It has no default: what a run resumes from must be found again when it starts the next time"
        )
    return path if "://" in path else os.path.expanduser(path)


def _absolute(root: str) -> str:
    """A path as it is meant here and now, whatever working directory a program changes to; a URI as it is."""
    is_path = root != "" and not re.match("[A-Za-z][A-Za-z0-9+.-]*:/", root)
    return os.path.abspath(root) if is_path else root


def _check_keep(keep: Any) -> int | None:
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ConfigError(f"keep must be how many of the newest stay, at least 1, or None; got {keep!r}")
    return keep


def _check_provenance(given: Any) -> Any:
    if given is not None and not isinstance(given, Mapping) and not callable(given):
        raise ConfigError(
            f"provenance must be a mapping such as {{'data': {{'version': '2026-11'}}}}, or a function that "
            f"returns one; got {given!r}"
        )
    return given


def _check_notice(notice: Any) -> SpotNotice | None:
    if notice is not None and not callable(notice):
        raise ConfigError(
            f"spot_notice must be a function without arguments that returns whether this host is about to be "
            f"taken away (or why, as a string), or None; got {notice!r}"
        )
    checked: SpotNotice | None = notice
    return checked


def _on_failure(tolerated: int) -> OnFailure:
    count = check_count("tolerate_failures", tolerated)
    return Tolerate(consecutive=count) if count else RaiseAtOnce()
