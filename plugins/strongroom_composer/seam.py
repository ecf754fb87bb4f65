"""Composer's inner places, in one module: what may change with a release of Composer stands here.

Composer's events are public, and most of its ``State``. Besides, a run is broken off where only the Trainer
sees it, the loop begins at a place that no event marks, and the place in the data is the loop's to find.
`check_supported` proves at the start that every name exists.
"""

from __future__ import annotations

import inspect
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, Final

import torch
from composer import Trainer
from composer.core import Event, State, Time, Timestamp, TimeUnit, engine
from composer.utils import checkpoint, dist, file_helpers, misc
from torch.utils.data import DataLoader

from strongroom.errors import ConfigError
from strongroom.resume import Generator, JobShape, generators_of

__all__ = [
    "SERIALIZED",
    "bare_model",
    "begin_at_training",
    "check_supported",
    "checkpoint",
    "dataset_of",
    "duration_of",
    "eval_generators",
    "expect_no_batches",
    "fill",
    "forget_native_resume",
    "hyper_parameters",
    "interval",
    "is_over",
    "job_shape",
    "keeps_own_place",
    "limit_of",
    "pass_over_nothing",
    "set_handlers_aside",
    "timestamp_from",
    "trainer_of",
]

_OLDEST: Final = (0, 32, 1)
"""The oldest Composer against which the tests of this front end pass."""

SERIALIZED: Final = (
    "model",
    "optimizers",
    "schedulers",
    "algorithms",
    "callbacks",
    "scaler",
    "timestamp",
    "rank_zero_seed",
    "train_metrics",
    "eval_metrics",
    "run_name",
    "dataset_state",
)
"""Composer's ``State.serialized_attributes``, which are taken up here one by one; whatever else is added to
them by a program is saved as it is."""

_NEEDED: Final[tuple[tuple[Any, str, tuple[str, ...]], ...]] = (
    (
        State,
        "State",
        (
            "_dataset_of",
            "dataloader_len",
            "fsdp_config",
            "fsdp_config_version",
            "fsdp_enabled",
            "is_model_ddp",
            "schedulers",
            "train_dataloader",
        ),
    ),
    (
        Trainer,
        "Trainer",
        ("_parse_parallelism_config", "_spin_dataloaders_to_cur_epoch", "_train_loop", "fit"),
    ),
    (Timestamp, "Timestamp", ("copy", "load_state_dict", "state_dict")),
    (Event, "Event", ("BATCH_CHECKPOINT", "EPOCH_CHECKPOINT", "ITERATION_CHECKPOINT")),
    (engine, "core.engine", ("sigterm_handler",)),
    (checkpoint, "utils.checkpoint", ("_save_checkpoint", "load_checkpoint")),
    (file_helpers, "utils.file_helpers", ("format_name_with_dist",)),
    (misc, "utils.misc", ("create_interval_scheduler",)),
)

_OF_THE_STATE: Final = ("dataset_resumption", "dataset_state", "load_path", "serialized_attributes")

_NO_BATCHES: Final = "No batches were trained for global rank"


def check_supported(state: Any) -> None:
    """Refuse, at the start, a Composer with which saving or resuming could not work.

    Raises:
        ConfigError: names the version and what it lacks.
    """
    version = metadata.version("mosaicml")
    release = tuple(map(int, re.findall(r"\d+", version)[:3]))
    missing = [
        f"{said}.{name}" for owner, said, names in _NEEDED for name in names if not hasattr(owner, name)
    ]
    missing += [f"State().{name}" for name in _OF_THE_STATE if not hasattr(state, name)]
    missing += [
        f"State().serialized_attributes[{name!r}]"
        for name in SERIALIZED
        if name not in getattr(state, "serialized_attributes", SERIALIZED)
    ]
    if release < _OLDEST or missing:
        lacks = f" (it lacks {', '.join(missing)})" if missing else ""
        raise ConfigError(
            f"unsupported version of Composer: expected mosaicml {'.'.join(map(str, _OLDEST))} or a later "
            f"one like it, found {version}{lacks}; install mosaicml==0.32.1, or a Strongroom for this one"
        )


def trainer_of(state: Any) -> Any:
    """The Trainer that is being built around a state: it stands above us on the stack, and nowhere else.

    Raises:
        ConfigError: there is none.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and getattr(owner, "state", None) is state:
            return owner
        if frame.f_back is None:
            break
        frame = frame.f_back
    raise ConfigError(
        "StrongroomCheckpoint is a callback of composer.Trainer: give it to one as callbacks=[...]"
    )


# ------------------------------------------------------------------------------------------------ a whole run


def fill(text: str, run_name: str) -> str:
    """A place with ``{run_name}`` and its like filled in, the same on every rank.

    Raises:
        ConfigError: it has a name in it that nobody knows.
    """
    if "{" not in text:
        return text
    filled: str = file_helpers.format_name_with_dist(text, run_name)
    left = re.search(r"\{(\w*)[^}]*\}", filled)
    if left is not None:
        raise ConfigError(
            f"nobody knows what {left[0]} in {text} is; there are {{run_name}}, {{world_size}} and "
            f"{{local_world_size}}"
        )
    return filled


def interval(given: Any) -> Callable[[Any, Any], bool]:
    """What decides when to save, as Composer's own CheckpointSaver would have it.

    Raises:
        ConfigError: it is no interval.
    """
    if callable(given):
        return given  # type: ignore[no-any-return]
    try:
        if isinstance(given, bool) or Time.from_input(given, TimeUnit.EPOCH).value < 0:
            raise ValueError("it is no amount of training")
        made: Callable[[Any, Any], bool] = misc.create_interval_scheduler(given)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"save_interval must be a time string such as '100ba' or '1ep', a number of epochs, a Time, or a "
            f"function of state and event that returns whether to save; got {given!r} ({error})"
        ) from error
    return made


def bare_model(state: Any) -> torch.nn.Module:
    """The model, without what makes a replica of it."""
    model: torch.nn.Module = state.model.module if state.is_model_ddp else state.model
    return model


def job_shape(state: Any) -> JobShape:
    """How this job divides its data."""
    world_size = int(dist.get_world_size())
    shared_by = int(getattr(state.tp_config, "tensor_parallel_degree", 1) or 1) if state.tp_config else 1
    batch_size = getattr(state.train_dataloader, "batch_size", None)
    return JobShape(
        world_size=world_size,
        replicas=max(world_size // shared_by, 1),
        batch_size=batch_size if isinstance(batch_size, int) else None,
    )


def set_handlers_aside(signals: Sequence[signal.Signals]) -> Callable[[], None]:
    """Take Composer's own handlers away, which end the process in the middle of whatever it does.

    Returns:
        what puts them back.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    theirs = [number for number in signals if signal.getsignal(number) is engine.sigterm_handler]
    for number in theirs:
        # A second Ctrl-C is not waited with; nor is anything else, by who has not put handlers of ours there.
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)

    def undo() -> None:
        if threading.current_thread() is threading.main_thread():
            for number in theirs:
                signal.signal(number, engine.sigterm_handler)

    return undo


def timestamp_from(saved: Mapping[str, Any]) -> Any:
    """Where training stands, in Composer's form."""
    found = Timestamp()
    found.load_state_dict(dict(saved))
    return found


def duration_of(given: Any) -> Any:
    """What ``fit(duration=...)`` means; a number is one of epochs."""
    return Time.from_input(given, TimeUnit.EPOCH)


def is_over(state: Any) -> bool:
    """Whether training has come to its end, where it is known where that is."""
    return state.max_duration is not None and bool(state.timestamp >= state.max_duration)


def forget_native_resume(trainer: Any) -> None:
    """What ``load_path`` brought along to resume from is of another run than the one that is taken up."""
    trainer._rng_state = None
    trainer.state.dataset_state = None
    trainer.state.dataset_resumption.pop("train", None)


def hyper_parameters(trainer: Any) -> Mapping[str, Any]:
    """What Composer says of how the Trainer was built; nothing with ``auto_log_hparams=False``."""
    return getattr(trainer, "local_hparams", None) or {}


# --------------------------------------------------------------------------------------------------- its data


def dataset_of(state: Any) -> Any:
    """The data set that is trained on; None where the loader is none of torch's."""
    return state._dataset_of(state.train_dataloader)


def keeps_own_place(dataset: Any) -> bool:
    """Whether a data set is told how far it was read, and goes on from there, as streaming ones are."""
    if not callable(getattr(dataset, "load_state_dict", None)):
        return False
    try:
        inspect.signature(dataset.state_dict).bind(0, True)
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def limit_of(state: Any) -> int | None:
    """How many batches an epoch of training has; for as long as the training data are the active ones."""
    return None if state.dataloader_len is None else int(state.dataloader_len)


def eval_generators(state: Any) -> dict[str, Generator]:
    """The generators that loaders of the evaluation draw from; more than one evaluator may share a loader."""
    found: dict[str, Generator] = {}
    for number, evaluator in enumerate(state.evaluators):
        loader = evaluator.dataloader.dataloader
        for name, one in (generators_of(loader) if isinstance(loader, DataLoader) else {}).items():
            if not any(one is known for known in found.values()):
                found[f"eval{number}.{name}"] = one
    return found


def pass_over_nothing(state: Any) -> Callable[[], None]:
    """Let Composer pass over no batches by itself, neither of epochs before nor of this one.

    Returns:
        what lets it do so again, as it did.
    """
    before = state.dataset_resumption.get("train")
    state.dataset_resumption["train"] = True

    def undo() -> None:
        if before is None:
            state.dataset_resumption.pop("train", None)

    return undo


def expect_no_batches() -> Callable[[], None]:
    """An epoch of which nothing is left goes through the loop once more; Composer would warn of that.

    Returns:
        what lets it warn again.
    """
    warnings.filterwarnings("ignore", message=_NO_BATCHES)
    ours = warnings.filters[0]

    def undo() -> None:
        if ours in warnings.filters:
            warnings.filters.remove(ours)  # type: ignore[attr-defined]  # a list, whatever the stub says

    return undo


def begin_at_training(state: Any, begin: Callable[[], None]) -> Callable[[], None]:
    """Have ``begin`` called once, when the loop is about to ask for its first batch.

    It stands where ``fit`` has read loaders ahead and drawn from the random streams for the last time: right
    behind ``state.model.train()``.

    Returns:
        what takes it back, if it has not been called.
    """
    model = state.model

    def restore() -> None:
        if vars(model).get("train") is train:
            del model.train

    def train(mode: bool = True) -> Any:
        restore()
        found = model.train(mode)
        begin()
        return found

    model.train = train
    return restore
