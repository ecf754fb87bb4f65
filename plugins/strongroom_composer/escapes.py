"""Under a policy that seals, nothing else of the run writes its state in the clear.

Composer's ``CheckpointSaver`` (what ``save_folder`` makes) and ``Trainer.save_checkpoint`` write through one
function of Composer's; what comes there from a sealed run's state is sealed, or refused. In place of each
file stands one of the same name: an archive of a Strongroom root, so that what counts, links and uploads
Composer's files goes on working. What cannot be sealed, such as an export for inference, is refused. What a
program writes by itself (``torch.save``) does not come here.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from composer.utils import dist

from strongroom import Checkpointer
from strongroom.errors import ConfigError
from strongroom.frontend import Encoding, policy_seals, replace_for_good
from strongroom.resume import RngState
from strongroom_composer import contents, seam
from strongroom_composer.arguments import Arguments
from strongroom_composer.voice import VOICE

__all__ = ["guard", "sealed_start"]

_SEAT: Final = "_strongroom_sealing"

_UNSEALABLE: Final = re.compile("ExportForInferenceCallback|HuggingFaceCheckpointer|.*Export.*")
"""Callbacks, by their class, that write weights by themselves: Composer's own and llm-foundry's."""

_SAVERS: Final = "CheckpointSaver"


def guard(trainer: Any, ours: Any, arguments: Arguments) -> None:
    """Tell what else in the Trainer writes state, and see to it.

    Args:
        trainer: Composer's, which is being built.
        ours: our callback.
        arguments: the callback's.

    Raises:
        ConfigError: something writes state, and is refused; or writes where nothing can be sealed.
    """
    state, policy = trainer.state, arguments.escapes
    savers, others = _writers(state, ours)
    if not policy_seals(arguments.options["security"]):
        if savers:
            VOICE.warn(
                f"{', '.join(savers)} saves this run too (save_folder=...), in Composer's own way: training "
                f"waits for it, and nothing is resumed from it while {arguments.root} holds a checkpoint"
            )
        return
    if (savers or others) and policy == "refuse":
        raise ConfigError(
            f"this run's checkpoints are sealed, and these write its state too: "
            f"{'; '.join((*savers, *others))}. Take them out of the Trainer, or let what can be sealed "
            f"be sealed by escapes='seal'"
        )
    if policy == "warn":
        if savers or others:
            VOICE.warn(
                f"this run's checkpoints are sealed, but these write its state in the clear, as "
                f"escapes='warn' lets them: {'; '.join((*savers, *others))}"
            )
        return
    if others:
        raise ConfigError(
            f"this run's checkpoints are sealed, and these write its weights in the clear, in a form that "
            f"cannot be sealed: {'; '.join(others)}. Take them out; there is `strongroom export`"
        )
    if savers:
        VOICE.info(
            f"what else writes this run's state is sealed as well: {'; '.join(savers)}. Each file is an "
            f"archive of a Strongroom root: unpack it by tar, and read it by `strongroom export`"
        )
    vars(state)[_SEAT] = _Sealing(state, ours, arguments, seals=policy == "seal")
    _replace_once("_save_checkpoint", _saves)
    _replace_once("load_checkpoint", _loads)
    trainer.export_for_inference = _refuse_export


def sealed_start(state: Any) -> str | None:
    """The sealed file that this Trainer was told to load, and that could not be loaded by Composer."""
    sealing: _Sealing | None = vars(state).get(_SEAT)
    return None if sealing is None else sealing.passed_over


def _writers(state: Any, ours: Any) -> tuple[list[str], list[str]]:
    """What can be sealed, and what cannot, by name."""
    savers, others = [], []
    for one in state.callbacks:
        kinds = [kind.__name__ for kind in type(one).__mro__]
        name = type(one).__name__
        if one is ours:
            continue
        if _SAVERS in kinds:
            savers.append(f"{name} ({getattr(one, 'folder', '')})")
        elif any(_UNSEALABLE.fullmatch(kind) for kind in kinds):
            others.append(name)
    return savers, others


class _Sealing:
    """What comes from one state, sealed in place of the file that it was to be.

    Args:
        state: Composer's.
        ours: our callback.
        arguments: the callback's.
        seals: whether it is sealed; else it is refused.
    """

    def __init__(self, state: Any, ours: Any, arguments: Arguments, *, seals: bool) -> None:
        self._state = state
        self._ours = ours
        self._options = arguments.options_elsewhere
        self._encoding = Encoding("warn", VOICE)
        self._seals = seals
        self.passed_over: str | None = None

    def save(self, filename: str, *, weights_only: bool) -> str | None:
        """Save in place of ``filename``; for all ranks.

        Returns:
            the file, on the rank that wrote it.
        """
        if not self._seals:
            raise ConfigError(
                f"{filename} was about to be written in the clear, in a run whose checkpoints are sealed; "
                f"write no checkpoint besides StrongroomCheckpoint's, or use escapes='seal'"
            )
        named = [filename, secrets.token_hex(4)]
        dist.broadcast_object_list(named)
        place, unique = Path(named[0]), named[1]
        beside = place.with_name(f".{place.name}.{unique}.sealing")
        place.parent.mkdir(parents=True, exist_ok=True)
        rng = RngState.capture()
        try:
            with Checkpointer(str(beside), **self._options) as checkpointer:
                state = contents.gather_by_hand(
                    self._state,
                    self._ours,
                    self._encoding,
                    checkpointer.confer,
                    weights_only=weights_only,
                )
                rng.restore()
                checkpointer.save(int(self._state.timestamp.batch), state).result()
        finally:
            rng.restore()
        is_first = int(dist.get_global_rank()) == 0
        if is_first:
            _pack(beside, place)
        dist.barrier()
        return filename if is_first else None

    def load(self, path: str) -> bool:
        """Whether a file is one of ours, which Composer could not read."""
        if not is_sealed(path):
            return False
        self.passed_over = path
        return True


def is_sealed(path: str) -> bool:
    """Whether a file is what `_Sealing.save` writes."""
    try:
        with tarfile.open(path, "r:") as archive:
            first = archive.next()
            return first is not None and first.name == "run.json"
    except (OSError, tarfile.TarError):
        return False


def _pack(folder: Path, place: Path) -> None:
    """One file of a folder, put in place once it is whole."""
    packed = place.with_name(f"{folder.name}.tar")
    with tarfile.open(packed, "w:") as archive:
        # First: it says what the archive is.
        archive.add(folder / "run.json", "run.json")
        for found in sorted(folder.rglob("*")):
            name = str(found.relative_to(folder))
            if name != "run.json":
                archive.add(found, name, recursive=False)
    with packed.open("rb") as written:
        os.fsync(written.fileno())
    packed.replace(place)
    shutil.rmtree(folder)


def _saves(original: Callable[..., Any]) -> Callable[..., Any]:
    def save(state: Any, save_filename: str, **options: Any) -> Any:
        sealing: _Sealing | None = vars(state).get(_SEAT)
        if sealing is None:
            return original(state, save_filename, **options)
        return sealing.save(save_filename, weights_only=bool(options.get("weights_only")))

    return save


def _loads(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(path: str, state: Any, *args: Any, **options: Any) -> Any:
        sealing: _Sealing | None = vars(state).get(_SEAT)
        if sealing is not None and sealing.load(path):
            return None
        return original(path, state, *args, **options)

    return load


def _refuse_export(*args: Any, **options: Any) -> None:
    raise ConfigError(
        "export_for_inference would write the weights in the clear, in a run whose checkpoints are sealed; "
        "use `strongroom export` where that is meant, or escapes='warn'"
    )


def _replace_once(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of Composer's for good; states without a seat go through it as before."""
    if not hasattr(getattr(seam.checkpoint, name), _SEAT):
        replace_for_good(seam.checkpoint, name, make)
        setattr(getattr(seam.checkpoint, name), _SEAT, True)
