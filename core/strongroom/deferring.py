"""Names that a package imports when they are first used: a framework of a front end may be missing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["deferred"]


def deferred(
    package: str, homes: Mapping[str, str], name: str, *, framework: tuple[str, ...], needs: str
) -> Any:
    """What a front end's package has under a name, for its ``__getattr__``.

    Args:
        package: the front end's own.
        homes: of each public name, the module of the package that has it.
        name: which is asked for.
        framework: what must be importable for it.
        needs: what to install where it is not, as a sentence goes on after "needs".

    Raises:
        AttributeError: there is no such name.
        ModuleNotFoundError: the framework is not installed; says what to install.
    """
    home = homes.get(name)
    if home is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"{package}.{home}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in framework:
            raise
        raise ModuleNotFoundError(f"{package} needs {needs}", name=error.name) from error
    setattr(sys.modules[package], name, value)
    return value
