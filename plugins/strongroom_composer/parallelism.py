"""How ranks share a model: what is supported, and what was asked for and is not on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from composer import Trainer

from strongroom.errors import ConfigError
from strongroom.frontend import replace_for_good
from strongroom_composer.voice import VOICE

__all__ = ["check", "check_wrapped", "watch"]

_KNOWN: Final = ("fsdp", "tp")
"""The keys of a ``parallelism_config`` that Composer reads; it passes over any other."""

_MARK: Final = "strongroom_watches"


def watch() -> None:
    """Say so where a Trainer is given a ``parallelism_config`` that Composer does not heed."""
    if getattr(Trainer._parse_parallelism_config, _MARK, False):
        return

    def make(original: Any) -> Any:
        def parse(self: Any, parallelism_config: Any) -> Any:
            if isinstance(parallelism_config, Mapping):
                unread = [name for name, value in parallelism_config.items() if name not in _KNOWN and value]
                for name in unread:
                    VOICE.warn(
                        f"parallelism_config={{{name!r}: ...}} is not heeded by Composer: the run is not "
                        f"sharded by it. For FSDP2 give {{'fsdp': FSDP2Config(...)}}, or a dictionary of its "
                        f"settings as 'fsdp' with FSDP_VERSION=2 in the environment"
                    )
            return original(self, parallelism_config)

        setattr(parse, _MARK, True)
        return parse

    replace_for_good(Trainer, "_parse_parallelism_config", make)


def check(state: Any) -> None:
    """Refuse what cannot be saved as it is sharded; while the Trainer is built, before it shards.

    Raises:
        ConfigError: FSDP1.
    """
    if state.fsdp_config_version == 1:
        raise ConfigError(
            "parallelism_config={'fsdp': {...}} is FSDP1, whose flat parameters Strongroom does not save. "
            "Use FSDP2: {'fsdp': FSDP2Config(state_dict_type='sharded')}, or the same dictionary with "
            "FSDP_VERSION=2 in the environment"
        )


def check_wrapped(state: Any) -> None:
    """Say so where FSDP was asked for, and no part of the model is sharded."""
    if state.fsdp_config is not None and not state.fsdp_enabled:
        VOICE.warn(
            "FSDP was asked for, but no part of the model is sharded by it (state.fsdp_enabled is False): "
            "every rank trains and holds the whole model"
        )
