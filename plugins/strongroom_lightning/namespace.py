"""Lightning stands in two packages, ``lightning.pytorch`` and ``pytorch_lightning``, whose classes differ.

A class of one is none of the other's, though both read alike. Nothing else in this front end imports
either package: whatever is needed of Lightning is asked of the `Namespace` that a callback belongs to.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

__all__ = ["LIGHTNING", "PYTORCH_LIGHTNING", "Namespace"]


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """One of the two packages.

    Attributes:
        package: where its public classes are imported from.
        fabric: the package of what it shares with Lightning Fabric.
        distribution: what one installs, and the extra of Strongroom that brings it.
    """

    package: str
    fabric: str
    distribution: str

    @cached_property
    def root(self) -> Any:
        """The package itself, which has ``Trainer`` and ``LightningModule``."""
        return importlib.import_module(self.package)

    @cached_property
    def callbacks(self) -> Any:
        """Its callbacks."""
        return importlib.import_module(f"{self.package}.callbacks")

    @cached_property
    def strategies(self) -> Any:
        """Its strategies."""
        return importlib.import_module(f"{self.package}.strategies")

    @cached_property
    def attribute_dicts(self) -> tuple[Any, ...]:
        """Its classes of what ``self.hparams`` is."""
        modules = (f"{self.fabric}.utilities.data", f"{self.package}.utilities.parsing")
        return tuple(importlib.import_module(module).AttributeDict for module in modules)

    def __getstate__(self) -> dict[str, str]:
        # Modules that were looked up cannot be sent to another process, which has its own.
        return {"package": self.package, "fabric": self.fabric, "distribution": self.distribution}

    @property
    def version(self) -> str:
        return str(self.root.__version__)

    def owns(self, value: object) -> bool:
        """Whether the value's class, or one that it inherits from, is this package's."""
        return any(
            kind.__module__ == self.package or kind.__module__.startswith(f"{self.package}.")
            for kind in type(value).__mro__
        )

    def made(self, kind: type, name: str) -> bool:
        """Whether an attribute of a class comes from a class of this package, or from none at all."""
        owner = next((base for base in kind.__mro__ if name in vars(base)), None)
        return owner is None or owner.__module__.startswith(f"{self.package}.")


LIGHTNING: Final = Namespace(package="lightning.pytorch", fabric="lightning.fabric", distribution="lightning")
PYTORCH_LIGHTNING: Final = Namespace(
    package="pytorch_lightning", fabric="lightning_fabric", distribution="pytorch-lightning"
)
