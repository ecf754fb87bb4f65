"""The front end for MosaicML Composer: not in this release.

The package holds the name, so that the distribution's layout is settled; it offers nothing. To ask it for
anything is an error that says so, at run time and to a type checker, and is not an ``ImportError``:
code that treats a front end as optional must not train on without checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from strongroom.errors import ConfigError

__all__: list[str] = []

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        if name.startswith("__"):  # Python itself asks for these (__path__, __wrapped__)
            raise AttributeError(name)
        raise ConfigError(
            f"strongroom_composer.{name}: this release has no front end for MosaicML Composer; "
            f"use strongroom.Checkpointer in a loop of your own, or strongroom_lightning with Lightning"
        )
