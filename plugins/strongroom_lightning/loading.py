"""Checkpoints read without a run: ``load_from_checkpoint``, and ``ckpt_path=`` without the callback.

Lightning reads a checkpoint by one function, which two of its modules have imported. There it is replaced by
one that knows ours by their names, and hands everything else on. What ours hold comes back as it was
verified: no file is made of it, nothing is pickled, and no code is run.

Where nothing of this package was imported, Lightning comes to `strongroom_lightning.filesystem`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import fsspec  # type: ignore[import-untyped]
import torch
from torch.utils._pytree import tree_map_only

from strongroom.errors import CheckpointNotFoundError, ConfigError, StateMismatchError
from strongroom.loading import load
from strongroom.restore import Restored
from strongroom_lightning import contents
from strongroom_lightning.encoding import in_programs_values
from strongroom_lightning.namespace import Namespace
from strongroom_lightning.ranking import steps_ranked_in
from strongroom_lightning.uri import CheckpointUri

__all__ = ["read", "teach"]

_MODEL_ALONE: Final = ("model", "lightning")
"""What a module is built and filled from; the optimizers are most of a checkpoint, and not asked for."""


_INSTANTIATORS: Final = frozenset(
    {"lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module"}
)
"""What LightningCLI writes there."""


def teach(namespace: Namespace) -> None:
    """Let a package of Lightning read our checkpoints where it reads its own; harmless when repeated."""
    for module, keys in (
        (f"{namespace.package}.core.saving", _MODEL_ALONE),
        (f"{namespace.fabric}.plugins.io.torch_io", None),
    ):
        reader: Any = importlib.import_module(module)
        original = getattr(reader, "pl_load", None)
        # Where a later Lightning has it no more, there is still the file system.
        if original is not None and not hasattr(original, "__wrapped__"):
            reader.pl_load = _or_ours(original, keys, namespace)
    # As this distribution's entry point says, for where its metadata are not installed.
    fsspec.register_implementation(
        "strongroom", "strongroom_lightning.filesystem.StrongroomFileSystem", clobber=True
    )


def _or_ours(
    original: Callable[..., Any], keys: tuple[str, ...] | None, namespace: Namespace
) -> Callable[..., Any]:
    @functools.wraps(original)
    def pl_load(path_or_url: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        uri = CheckpointUri.of(path_or_url)
        if uri is None:
            return original(path_or_url, map_location, *args, **kwargs)
        checkpoint = in_programs_values(read(uri, keys), namespace)
        _check_names_no_code(checkpoint)
        return _moved(checkpoint, map_location)

    return pl_load


def read(uri: CheckpointUri, keys: tuple[str, ...] | None = None) -> dict[str, Any]:
    """A checkpoint in Lightning's form, on the CPU; whole and verified, and opened by ``STRONGROOM_CONFIG``.

    Args:
        keys: of what a checkpoint holds; None: all.

    Raises:
        ConfigError: the name leaves the root to a callback.
        StateMismatchError: it was not written by `StrongroomCheckpoint`.
        CheckpointNotFoundError, IntegrityError, NoKeyError, ...: as `strongroom.loading.load`.
    """
    if uri.root is None:
        raise ConfigError(
            f"{str(uri)!r} names no root, and there is no StrongroomCheckpoint whose root it could be; "
            f"write strongroom://ROOT or strongroom://ROOT#step=N"
        )
    try:
        restored = _load_best(uri.root, keys) if uri.is_best else load(uri.root, step=uri.step, only=keys)
    except StateMismatchError as error:
        raise contents.not_ours(uri.root) from error
    uri.check(restored.checkpoint)
    if "model" not in restored.state or "lightning" not in restored.state:
        raise contents.not_ours(uri.root, restored.step, restored.state)
    return contents.in_lightnings_form(restored.state)


def _check_names_no_code(checkpoint: dict[str, Any]) -> None:
    """Lightning builds a module by a function that its hyper-parameters name; before 2.6.6, by any."""
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        given = checkpoint.get(key)
        named = given.get("_instantiator") if isinstance(given, Mapping) else None
        if named is not None and named not in _INSTANTIATORS:
            raise StateMismatchError(
                f"the checkpoint's {key} name a function to be called, {named!r:.200}; no code is run that a "
                f"checkpoint names: build the module yourself, and let fit or test load its weights"
            )


def _load_best(root: str, keys: tuple[str, ...] | None) -> Restored:
    newest = load(root, only=("lightning",))
    for step in steps_ranked_in(newest.state["lightning"]):
        try:
            return load(root, step=step, only=keys)
        except CheckpointNotFoundError:
            continue  # removed since
    raise CheckpointNotFoundError(
        f"strongroom://{root}#best: {root} holds no checkpoint that was ranked; name it by #step=N"
    )


def _moved(checkpoint: dict[str, Any], map_location: Any) -> dict[str, Any]:
    """The checkpoint with its tensors, which are on the CPU, where ``torch.load`` would have put them."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if callable(map_location):
            storage = map_location(tensor.untyped_storage(), "cpu")
            return tensor if storage is None else tensor.to(storage.device)
        where = map_location.get("cpu", "cpu") if isinstance(map_location, dict) else map_location
        return tensor.to(where)

    if map_location is None:
        return checkpoint
    found: dict[str, Any] = tree_map_only(torch.Tensor, moved, checkpoint)
    return found
