"""What a user gives the callback, checked once: pure, and before any Trainer exists."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from strongroom import OnChange, RaiseAtOnce, Tier, Tolerate
from strongroom.config import OnFailure, check_count, check_seconds, load_policy
from strongroom.errors import ConfigError
from strongroom.resume import ResumeMode, SaveIntervals, SpotNotice, check_signals
from strongroom.resume.mode import check_resume_mode
from strongroom.resume.skipping import SkipMode, check_skip_mode
from strongroom_lightning.encoding import Unencodable, check_unencodable
from strongroom_lightning.escapes import EscapePolicy, check_escapes
from strongroom_lightning.label import Label
from strongroom_lightning.ranking import RankingRule

__all__ = ["Arguments"]

_OWN_ROOT_ONLY: Final = frozenset(
    {"accept_missing_tiers", "launch", "replicate_to", "reserve_bytes", "run_id"}
)
"""What a Checkpointer is told of the run's own root alone: another run's has tiers, a name and a turn of its
own."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The callback's arguments, in the terms of the core.

    Attributes:
        dirpath: the run's root.
        intervals: when to save.
        save_on_train_epoch_end: whether ``every_n_epochs`` means the epoch's end or each validation; None: as
            validation is set up.
        ranking: what is ranked, and how many stay.
        label: what each checkpoint is called; None: nothing besides its step.
        save_weights_only: checkpoints hold the model alone.
        save_on_exception: whether a run that ends by an exception is saved.
        save_last: as it was given.
        verbose: whether it is said what each ranked save came to.
        resume: whether the first fit takes up what is there.
        skip: how a resume inside an epoch passes over the batches that were trained on.
        running_metrics: means that are being formed, and the metrics' states, are part of a checkpoint.
        log_saves: the Trainer's loggers are told what saves cost.
        accept_older: going back further than usual is meant.
        unencodable: what becomes of values without an encoding.
        escapes: what becomes of what else writes the state of a sealed run.
        provenance: what the user says of the run.
        preemption_signals: those that tell a fit to stop.
        spot_notice: the user's function that knows of a notice.
        spot_notice_every_s: how long after one answer it is asked again.
        timeout_s: within which a save must have committed.
        options: what a `strongroom.Checkpointer` of the run's root is told.
    """

    dirpath: str
    intervals: SaveIntervals
    save_on_train_epoch_end: bool | None
    ranking: RankingRule
    label: Label | None
    save_weights_only: bool
    save_on_exception: bool
    save_last: bool | str | None
    verbose: bool
    resume: ResumeMode
    skip: SkipMode
    running_metrics: bool
    log_saves: bool
    accept_older: bool
    unencodable: Unencodable
    escapes: EscapePolicy
    provenance: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None
    preemption_signals: tuple[signal.Signals, ...]
    spot_notice: SpotNotice | None
    spot_notice_every_s: float
    timeout_s: float
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        dirpath: str | os.PathLike[str],
        *,
        filename: str | None,
        monitor: str | None,
        mode: str,
        save_top_k: int | None,
        save_last: bool | str | None,
        auto_insert_metric_name: bool,
        save_on_train_epoch_end: bool | None,
        save_weights_only: bool,
        save_on_exception: bool,
        verbose: bool,
        every_n_train_steps: int | None,
        every_n_epochs: int | None,
        train_time_interval: timedelta | None,
        resume: str,
        skip: str,
        running_metrics: bool,
        keep: int | None,
        security: Any,
        digest: str | None,
        timeout_s: float,
        max_fallback: int,
        provenance: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None,
        on_change: OnChange | None,
        retention_class: str | None,
        run_id: str | None,
        launch: int | None,
        replicate_to: Sequence[str | os.PathLike[str] | Tier],
        accept_missing_tiers: bool,
        reserve_bytes: int,
        scatter: int | None,
        accept_older: bool,
        unencodable: str,
        preemption_signals: Sequence[str],
        spot_notice: SpotNotice | None,
        spot_notice_every_s: float,
        tolerate_failures: int,
        escapes: str | None,
        config: str | os.PathLike[str] | None,
        log_saves: bool,
    ) -> Arguments:
        """Check what the callback was given.

        Raises:
            ConfigError: a value that cannot work, or two that exclude each other.
        """
        _check_flags(
            auto_insert_metric_name=auto_insert_metric_name,
            save_weights_only=save_weights_only,
            save_on_exception=save_on_exception,
            verbose=verbose,
            running_metrics=running_metrics,
            accept_missing_tiers=accept_missing_tiers,
            accept_older=accept_older,
            log_saves=log_saves,
        )
        if save_on_train_epoch_end is not None:
            _check_flags(save_on_train_epoch_end=save_on_train_epoch_end)
        every_n_train_steps = _check_interval("every_n_train_steps", every_n_train_steps)
        every_n_epochs = _check_interval("every_n_epochs", every_n_epochs)
        if every_n_train_steps is None and every_n_epochs is None and train_time_interval is None:
            every_n_epochs = 1
        if not (save_last is None or save_last == "link" or isinstance(save_last, bool)):
            raise ConfigError(f"save_last must be True, False, 'link' or None; got {save_last!r}")
        root = _expanded(dirpath)
        if config is not None:
            if security is not None:
                raise ConfigError("config= names the policy's file too: give it or security=, not both")
            security = load_policy(config)
            placement = getattr(security, "placement", None)
            if placement is not None:
                placed = placement.place(root)
                root, replicate_to = placed.root, replicate_to or placed.replicate_to
        return cls(
            dirpath=_absolute(root),
            # 0 is how Lightning's users switch an interval off.
            intervals=SaveIntervals(
                every_n_steps=None if every_n_train_steps == 0 else every_n_train_steps,
                every_n_epochs=None if every_n_epochs == 0 else every_n_epochs,
                every=train_time_interval,
            ),
            save_on_train_epoch_end=save_on_train_epoch_end,
            ranking=RankingRule.of(monitor=monitor, mode=mode, save_top_k=save_top_k, keep=keep),
            label=None if filename is None else Label.of(filename, inserts_names=auto_insert_metric_name),
            save_weights_only=save_weights_only,
            save_on_exception=save_on_exception,
            save_last=save_last,
            verbose=verbose,
            resume=check_resume_mode(resume),
            skip=check_skip_mode(skip),
            running_metrics=running_metrics,
            log_saves=log_saves,
            accept_older=accept_older,
            unencodable=check_unencodable(unencodable),
            escapes=check_escapes(escapes),
            provenance=_check_provenance(provenance),
            preemption_signals=check_signals(preemption_signals or ()),
            spot_notice=_check_notice(spot_notice),
            spot_notice_every_s=check_seconds("spot_notice_every_s", spot_notice_every_s),
            timeout_s=check_seconds("timeout_s", timeout_s),
            options={
                "security": security,
                "digest": digest,
                "timeout_s": timeout_s,
                "max_fallback": max_fallback,
                "on_change": on_change,
                "retention_class": retention_class,
                "run_id": run_id,
                "launch": launch,
                "replicate_to": replicate_to,
                "accept_missing_tiers": accept_missing_tiers,
                "reserve_bytes": reserve_bytes,
                "scatter": scatter,
                "on_failure": _on_failure(tolerate_failures),
            },
        )

    def is_own(self, root: str) -> bool:
        """Whether ``root`` is the run's own, however it is written."""
        return root == self.dirpath or os.path.realpath(root) == os.path.realpath(self.dirpath)

    @property
    def options_elsewhere(self) -> dict[str, Any]:
        """What a Checkpointer of any other root is told."""
        return {key: value for key, value in self.options.items() if key not in _OWN_ROOT_ONLY}

    def options_for(self, root: str) -> dict[str, Any]:
        """What a `strongroom.Checkpointer` of ``root`` is told."""
        own = self.is_own(root)
        return {key: value for key, value in self.options.items() if own or key not in _OWN_ROOT_ONLY}


def _expanded(dirpath: str | os.PathLike[str]) -> str:
    """A path with ``~`` as the user's home; a URI as it is."""
    given: Any = dirpath
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(path, str):
        raise ConfigError(
            f"dirpath must be the run's root, a path or a URI such as s3://bucket/runs/a; got {given!r}. "
            f"It has no default: what a run resumes from must be found again when it starts the next time"
        )
    return path if "://" in path else os.path.expanduser(path)


def _absolute(root: str) -> str:
    """A path as it is meant here and now, whatever working directory a program changes to; a URI as it is."""
    is_path = root != "" and not re.match("[A-Za-z][A-Za-z0-9+.-]*:/", root)
    return os.path.abspath(root) if is_path else root


def _check_flags(**flags: Any) -> None:
    """A text such as ``"no"`` would count as yes."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False; got {value!r}")


def _check_interval(name: str, count: Any) -> int | None:
    if count is not None and (not isinstance(count, int) or count is True or count < 0):
        raise ConfigError(f"{name} must be a whole number, 0 to switch it off, or None; got {count!r}")
    return count


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
