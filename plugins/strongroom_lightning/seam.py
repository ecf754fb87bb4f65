"""All that this front end knows of Lightning's insides: which names it needs, and how it hooks into them.

Lightning has hooks for almost everything, but none at the three places that an exact resume needs: where a
fit chooses what to restore, where an epoch's iterator is made, and where a batch or an epoch is over with
everything that belongs to it (the module's own hooks, validation, schedulers). There, methods of the
Trainer's parts are replaced on the instances, for the time of one fit. `check_supported` proves at the
start that every name exists; nothing is looked up for the first time while a checkpoint is being saved.
"""

from __future__ import annotations

import functools
import importlib
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from torch.utils.data import DataLoader

from strongroom.errors import ConfigError
from strongroom.resume import Generator, generators_of
from strongroom.resume.skipping import length_of
from strongroom_lightning.namespace import Namespace

__all__ = [
    "ask_for_named",
    "averages_at_end",
    "batches_taken",
    "check_supported",
    "counting_no_batch",
    "disown_signals",
    "epochs_done",
    "fetches_itself",
    "finders",
    "hands_weights_back_by_file",
    "has_persistent_workers",
    "has_save_hooks",
    "has_stopped_early",
    "has_validated",
    "in_epoch",
    "is_dealt_out",
    "is_epoch_complete",
    "is_only_tuning",
    "is_run_over",
    "is_step_boundary",
    "load_states_between_epochs",
    "loader_generators",
    "loader_lengths",
    "loaders_have_workers",
    "loaders_keep_state",
    "makes_loaders_anew",
    "move_inside_epoch",
    "note_sigterm",
    "progress",
    "remember_reload",
    "repeat_epoch_settings",
    "requeue_signal",
    "saves_after_validation",
    "settle",
    "sigterm_exception",
    "writers_of_state",
]

_OLDEST: Final = (2, 5)
"""The oldest Lightning against which the tests of this front end pass."""

_COMPROMISED: Final = frozenset({"2.6.2", "2.6.3"})
"""Releases with foreign code in them."""

_NEEDED: Final = {
    "_checkpoint_connector": ("_parse_ckpt_path", "dump_checkpoint", "resume_start"),
    "_logger_connector": ("callback_metrics",),
    "_signal_connector": ("_original_handlers", "received_sigterm", "register_signal_handlers"),
    "strategy": (
        "save_checkpoint",
        "load_checkpoint",
        "load_model_state_dict",
        "load_optimizer_state_dict",
        "optimizers",
    ),
    "fit_loop": (
        "_can_stop_early",
        "_combined_loader",
        "_data_fetcher",
        "_last_train_dl_reload_epoch",
        "_load_combined_loader_states",
        "_loaded_from_state_dict",
        "_restarting",
        "_should_accumulate",
        "epoch_progress",
        "on_advance_end",
        "on_run_end",
        "on_run_start",
        "reset_restart_stage",
        "restarting",
        "setup_data",
    ),
    "fit_loop.epoch_loop": (
        "_batches_that_stepped",
        "_loaded_from_state_dict",
        "_num_ready_batches_reached",
        "_restarting",
        "batch_progress",
        "on_advance_end",
        "on_run_start",
        "reset",
        "reset_restart_stage",
        "restarting",
    ),
    "fit_loop.epoch_loop.val_loop": (
        "_has_run",
        "_loaded_from_state_dict",
        "_restarting",
        "reset_restart_stage",
        "run",
    ),
}


def check_supported(trainer: Any, namespace: Namespace) -> None:
    """Refuse, at the start, a Trainer with which saving or resuming could not work.

    Raises:
        ConfigError: another package's Trainer, an or an unsupported version.
    """
    if not isinstance(trainer, namespace.root.Trainer):
        raise ConfigError(
            f"this StrongroomCheckpoint belongs to {namespace.package}, and this Trainer to "
            f"{type(trainer).__module__.partition('.')[0]}; take both from one package: "
            f"strongroom_lightning has lightning's, strongroom_lightning.pytorch_lightning the other's"
        )
    version = namespace.version
    if _release(version) < _OLDEST:
        raise ConfigError(
            f"Lightning {version} is too old for StrongroomCheckpoint; "
            f"use {'.'.join(map(str, _OLDEST))} or newer"
        )
    if version in _COMPROMISED:
        raise ConfigError(
            f"Lightning {version} was published by an intruder and runs code of theirs (Lightning #21691); "
            f"install another release, and change whatever secrets this machine knows"
        )
    missing = [
        f"{path}.{name}" for path, names in _NEEDED.items() for name in names if not _has(trainer, path, name)
    ]
    if missing:
        raise ConfigError(
            f"Lightning {version} is not supported by this release of Strongroom: the Trainer has no "
            f"{', '.join(missing)}; use an older Lightning or a newer Strongroom"
        )


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _has(trainer: object, path: str, name: str) -> bool:
    owner: object = trainer
    for part in path.split("."):
        owner = getattr(owner, part, None)
    # A property may be on the class and not yet have a value: it exists all the same.
    return name in getattr(owner, "__dict__", {}) or hasattr(type(owner), name)


def settle(fit_loop: Any) -> None:
    """Tell the loops that they go on as if nothing had been restored.

    After its own restore Lightning replays or leaves out what its checkpoints, taken in the middle of a
    batch's hooks, hold only by half: validation, scheduler steps, the epoch's end. Ours are taken where
    all of it is done.
    """
    epoch_loop = fit_loop.epoch_loop
    epoch_loop.restarting = False  # the loops inside follow
    for loop in (fit_loop, epoch_loop, epoch_loop.val_loop):
        loop._restarting = False
        loop._loaded_from_state_dict = False
        if hasattr(loop, "_resuming_from_checkpoint"):  # since Lightning 2.5.3
            loop._resuming_from_checkpoint = False
        loop.reset_restart_stage()


def move_inside_epoch(fit_loop: Any, batches: int) -> None:
    """Let the epoch that Lightning is about to take up have so many batches behind it."""
    current = fit_loop.epoch_loop.batch_progress.current
    current.ready = current.started = current.processed = current.completed = batches


def is_only_tuning(trainer: object) -> bool:
    """Whether ``Tuner`` began this fit to look for a batch size or learning rate, and breaks it off."""
    return any(getattr(callback, "_early_exit", False) for callback in getattr(trainer, "callbacks", ()))


def finders(trainer: Any, namespace: Namespace) -> list[str]:
    """The Trainer's callbacks that search for a batch size or learning rate when a fit begins."""
    kinds = (namespace.callbacks.BatchSizeFinder, namespace.callbacks.LearningRateFinder)
    return [type(one).__name__ for one in trainer.callbacks if isinstance(one, kinds)]


def writers_of_state(trainer: Any, namespace: Namespace, others: Sequence[Any]) -> list[str]:
    """What in the Trainer writes checkpoints besides ours, in words, and what uploads these.

    Args:
        others: the Trainer's checkpoint callbacks that are none of ours.
    """
    kinds = namespace.callbacks
    default = trainer.default_root_dir
    found = [f"{type(one).__name__} (to {getattr(one, 'dirpath', None) or default})" for one in others]
    found += [
        f"{type(one).__name__} (to {default}, for its trials)"
        for one in trainer.callbacks
        if isinstance(one, kinds.BatchSizeFinder | kinds.LearningRateFinder)
    ]
    if others:
        # They are handed what a ModelCheckpoint wrote, and only where they were told to.
        found += [
            f"{type(one).__name__} (uploads what {type(others[0]).__name__} writes)"
            for one in trainer.loggers
            if any(getattr(one, name, False) for name in ("_log_model", "_log_model_checkpoints"))
        ]
    return found


def hands_weights_back_by_file(trainer: Any) -> bool:
    """Whether the fit runs in processes of its own, whose weights come back through a temporary file."""
    launcher = getattr(trainer.strategy, "launcher", None)
    return any(kind.__name__ == "_MultiProcessingLauncher" for kind in type(launcher).__mro__)


def has_stopped_early(trainer: Any, namespace: Namespace) -> bool:
    """Whether an early stopping that has just been restored had run out of patience, and still has."""
    kind = namespace.callbacks.EarlyStopping
    return any(
        isinstance(one, kind) and one.stopped_epoch > 0 and one.wait_count >= one.patience
        for one in trainer.callbacks
    )


def has_save_hooks(trainer: Any, namespace: Namespace) -> bool:
    """Whether the module, or a callback that is none of those that save, may change what is saved."""
    name = "on_save_checkpoint"
    kinds = (namespace.root.LightningModule, namespace.root.Callback)
    savers = namespace.callbacks.Checkpoint
    others = (one for one in trainer.callbacks if not isinstance(one, savers))
    return any(
        name in vars(one) or all(getattr(type(one), name) is not getattr(kind, name) for kind in kinds)
        for one in (trainer.lightning_module, *others)
    )


def is_epoch_complete(fit_loop: Any) -> bool:
    """Whether the batch that was just trained on was its epoch's last."""
    return bool(fit_loop.epoch_loop._num_ready_batches_reached())


def is_step_boundary(fit_loop: Any) -> bool:
    """Whether no gradient is being accumulated."""
    return not fit_loop._should_accumulate()


def is_run_over(trainer: Any) -> bool:
    """Whether training goes no further; Lightning's own ``done`` would announce it once more."""
    fit_loop = trainer.fit_loop
    return bool(
        (trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps)
        or (trainer.max_epochs not in {None, -1} and epochs_done(fit_loop) >= trainer.max_epochs)
        or (trainer.should_stop and fit_loop._can_stop_early)
    )


def batches_taken(fit_loop: Any) -> int:
    """The number of the epoch's batches that training has seen, as Lightning counts it."""
    return int(fit_loop.epoch_loop.batch_progress.current.ready)


def epochs_done(fit_loop: Any) -> int:
    """Whole epochs trained."""
    return int(fit_loop.epoch_progress.current.processed)


def fetches_itself(fit_loop: Any) -> bool:
    """Whether ``training_step`` takes batches from the iterator by itself, uncounted."""
    return hasattr(fit_loop._data_fetcher, "iterator_wrapper")


def repeat_epoch_settings(trainer: Any, namespace: Namespace) -> None:
    """Set what an epoch's first hook had set: Lightning leaves it out on a resume inside an epoch."""
    kinds = namespace.callbacks
    for callback in trainer.callbacks:
        if isinstance(callback, kinds.GradientAccumulationScheduler):
            callback.on_train_epoch_start(trainer)
        elif (
            isinstance(callback, kinds.StochasticWeightAveraging)
            and callback.swa_start <= trainer.current_epoch <= callback.swa_end
        ):
            # Its scheduler, which it puts in place of the run's; it knows in which epoch it averaged last.
            callback.on_train_epoch_start(trainer, trainer.lightning_module)


def progress(fit_loop: Any) -> tuple[int, int]:
    """Counters of which one moves as soon as a batch was read, or an epoch begins."""
    return fit_loop.epoch_loop.batch_progress.total.ready, fit_loop.epoch_progress.current.ready


def loaders_have_workers(fit_loop: Any) -> bool:
    """Whether every training loader reads in processes of its own."""
    combined = fit_loop._combined_loader
    loaders = combined.flattened if combined is not None else ()
    return bool(loaders) and all(getattr(loader, "num_workers", 0) > 0 for loader in loaders)


def loaders_keep_state(fit_loop: Any) -> bool:
    """Whether a training loader, or what it reads from, knows by itself where it stands."""
    combined = fit_loop._combined_loader
    return any(
        hasattr(part, "state_dict")
        for loader in (combined.flattened if combined is not None else ())
        for part in (
            loader,
            *(getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler")),
        )
    )


def requeue_signal(trainer: Any) -> signal.Signals | None:
    """The signal by which Slurm says that this job should go back into its queue; None where it does not."""
    environment = trainer._accelerator_connector.cluster_environment
    # Slurm's alone has these, and its class is of one of two packages.
    if not getattr(environment, "auto_requeue", False):
        return None
    number = getattr(environment, "requeue_signal", None)
    return None if number is None else signal.Signals(number)


def disown_signals(trainer: Any, signals: Sequence[signal.Signals]) -> None:
    """Let Lightning not put back the handlers of these when its run ends."""
    for number in signals:
        trainer._signal_connector._original_handlers.pop(number, None)


def note_sigterm(trainer: Any) -> None:
    """Let ``trainer.received_sigterm`` say that the run was told to stop, as callbacks may ask."""
    trainer._signal_connector.received_sigterm = True


def sigterm_exception(namespace: Namespace, status: int) -> SystemExit:
    """Lightning's exception for a run that was told to stop: a ``SystemExit``, here with its status."""
    module = importlib.import_module(f"{namespace.package}.utilities.exceptions")
    made: SystemExit = module.SIGTERMException(status)
    return made


def loader_generators(fit_loop: Any) -> dict[str, Generator]:
    """The generators that the training loaders carry, named by the loader's number."""
    combined = fit_loop._combined_loader
    return {
        f"loader{index}.{name}": generator
        for index, loader in enumerate(combined.flattened if combined is not None else ())
        for name, generator in generators_of(loader).items()
    }


def saves_after_validation(trainer: Any, save_on_train_epoch_end: bool | None) -> bool:
    """Whether what is due every so many epochs follows each validation, and not the epoch's end.

    As `ModelCheckpoint` has it: where validation runs otherwise than once at the end of each epoch, it is
    what a save waits for. Without any validation there is nothing to wait for, though.
    """
    if save_on_train_epoch_end is not None:
        return not save_on_train_epoch_end
    if not trainer.enable_validation:
        return False
    if getattr(trainer, "_val_check_time_interval", None) is not None:  # since Lightning 2.6
        return True
    return bool(trainer.check_val_every_n_epoch != 1 or trainer.val_check_interval != 1.0)


def has_validated(trainer: Any) -> bool:
    """Whether validation has run in this fit, sanity checks aside."""
    return bool(trainer.fit_loop.epoch_loop.val_loop._has_run)


def ask_for_named(namespace: Namespace, choose: Callable[[Any, Any, str], str | None]) -> None:
    """Let ``choose`` say what ``ckpt_path="best"`` and ``"last"`` stand for, before Lightning does.

    Lightning resolves these before it calls any hook, by file names and times, and ``"last"`` with its own
    callback only. So it is the class that is changed, once; a Trainer for which ``choose`` returns None goes
    Lightning's way.

    Args:
        choose: takes the Trainer, its function (``fit``, say) and the name.
    """
    module = importlib.import_module(f"{namespace.package}.trainer.connectors.checkpoint_connector")
    connector = module._CheckpointConnector
    original = connector._parse_ckpt_path
    if getattr(original, "asks_strongroom", False):
        return

    @functools.wraps(original)
    def parse(self: Any, state_fn: Any, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        named = choose(self.trainer, state_fn.value, ckpt_path) if ckpt_path in {"best", "last"} else None
        return original(self, state_fn, ckpt_path, *args, **kwargs) if named is None else named

    parse.asks_strongroom = True  # type: ignore[attr-defined]
    connector._parse_ckpt_path = parse


def loader_lengths(fit_loop: Any) -> tuple[int | None, ...]:
    """How many batches each training loader has; None for one that does not know."""
    return tuple(length_of(loader) for loader in fit_loop._combined_loader.flattened)


def has_persistent_workers(fit_loop: Any) -> bool:
    """Whether a training loader keeps its worker processes from one epoch to the next."""
    return any(getattr(loader, "persistent_workers", False) for loader in fit_loop._combined_loader.flattened)


def load_states_between_epochs(fit_loop: Any, states: tuple[Any, ...]) -> None:
    """Give loaders that keep state of their own, such as a count of epochs, what they had between two.

    Not those that are torch's `DataLoader`: what such a one has been given it takes as a place inside an
    epoch, and the next epoch would end before its first batch.
    """
    stateful = [one for one in fit_loop._combined_loader.flattened if hasattr(one, "load_state_dict")]
    for loader, state in zip(stateful, states, strict=False):
        if not isinstance(loader, DataLoader):
            loader.load_state_dict(state)


@contextmanager
def counting_no_batch(fit_loop: Any) -> Iterator[None]:
    """Let the step under which loggers file metrics be the same afterwards.

    Lightning adds one where its counters tell it that a batch was not finished, as they also do for ever once
    ``on_train_batch_start`` has left one out.
    """
    epoch_loop = fit_loop.epoch_loop
    stepped = epoch_loop._batches_that_stepped
    yield
    epoch_loop._batches_that_stepped = stepped


def makes_loaders_anew(fit_loop: Any) -> bool:
    """Whether the training loaders are made anew every few epochs."""
    return bool(fit_loop.trainer.reload_dataloaders_every_n_epochs)


@contextmanager
def in_epoch(fit_loop: Any, epoch: int) -> Iterator[None]:
    """Let ``trainer.current_epoch`` be this one meanwhile."""
    current = fit_loop.epoch_progress.current
    own, current.completed = current.completed, epoch
    try:
        yield
    finally:
        current.completed = own


def remember_reload(fit_loop: Any, epoch: int, *, is_inside: bool) -> None:
    """Let training loaders that are made anew every few epochs be so at the epochs at which they would be.

    Lightning counts from the epoch in which the fit was set up.
    """
    every = fit_loop.trainer.reload_dataloaders_every_n_epochs
    if every:
        since = epoch % every if is_inside else (epoch - 1) % every + 1
        fit_loop._last_train_dl_reload_epoch = epoch - since


def averages_at_end(trainer: Any, namespace: Namespace) -> bool:
    """Whether the weights become averages of themselves when training has ended, in a hook."""
    return any(isinstance(one, namespace.callbacks.StochasticWeightAveraging) for one in trainer.callbacks)


def is_dealt_out(loader: Any) -> bool:
    """Whether Lightning deals out to the ranks what a sampler of the loader's shuffles."""
    owners = (loader, getattr(loader, "batch_sampler", None))
    samplers = [getattr(owner, "sampler", None) for owner in owners]
    return any(hasattr(getattr(sampler, "dataset", None), "_sampler") for sampler in samplers)
