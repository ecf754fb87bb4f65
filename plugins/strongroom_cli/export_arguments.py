"""The arguments of ``strongroom export``, apart from its work."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final

__all__ = ["add_export"]

_FORMATS: Final = ("safetensors",)
_LATER: Final = ("dcp", "torch")


def add_export(
    commands: Any,
    command: Callable[[Any, str, str], argparse.ArgumentParser],
    natural: Callable[[str], int],
) -> None:
    """Add the command.

    Args:
        commands: what `argparse` adds commands to.
        command: adds one that takes a run, as all commands do it.
        natural: the type of a number.
    """
    export = command(commands, "export", "write a checkpoint's model to a folder that needs no Strongroom")
    export.add_argument("step", metavar="STEP", nargs="?", type=natural, help="default: the newest")
    export.add_argument("--to", metavar="DIR", required=True, help="the new folder; it must not exist")
    export.add_argument(
        "--format",
        metavar="FORMAT",
        type=_format,
        default=_FORMATS[0],
        help=f"{_FORMATS[0]}, which is the default: the layout of the Hugging Face hub",
    )
    which = export.add_argument_group("what is exported")
    which.add_argument(
        "--key", metavar="NAME", help="the state's value (default: model, or else the only module)"
    )
    which.add_argument(
        "--only",
        metavar="PATTERN",
        action="append",
        help="only tensors whose names fit, as in 'encoder.*'; may be repeated",
    )
    which.add_argument(
        "--strip-prefix",
        metavar="PREFIX",
        default="",
        help="only tensors below this name, which is left off, as in 'model' of 'model.embed.weight'",
    )
    which.add_argument(
        "--config",
        metavar="FILE",
        help="becomes config.json (default: the checkpoint's provenance, where it has a model_config)",
    )
    which.add_argument(
        "--add",
        metavar="FILE",
        action="append",
        default=[],
        help="a file to put beside, and to sign with the rest: a tokenizer, a licence; may be repeated",
    )
    which.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default="5GB",
        help="of one file's tensors, as in 5GB (5 x 10^9 bytes, the default) or 512MiB",
    )
    signed = export.add_argument_group("who signs it")
    signed.add_argument(
        "--sign",
        metavar="KEY",
        help="as key in the policy's [sign]: file:PATH, aws-kms:..., pkcs11:... (default: the policy's)",
    )
    signed.add_argument(
        "--certificate", metavar="FILE", help="of --sign: its certificate in PEM, and those up to its root"
    )
    signed.add_argument(
        "--passphrase",
        metavar="WHERE",
        help="of --sign: where its key's passphrase is: env:NAME or file:PATH",
    )


def _format(text: str) -> str:
    if text in _FORMATS:
        return text
    if text in _LATER:
        raise argparse.ArgumentTypeError(
            f"{text} is for a later release; this one writes {', '.join(_FORMATS)}"
        )
    raise argparse.ArgumentTypeError(f"{text!r:.40} is no format; this release writes {', '.join(_FORMATS)}")
