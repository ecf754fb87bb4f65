"""What was asked for and is not on is told; what is not supported is refused in words."""

from __future__ import annotations

from typing import Any

import composer_jobs as jobs
import pytest
from composer.utils.parallelism import FSDPConfig

from strongroom import ConfigError
from strongroom_composer import parallelism


def test_a_key_that_composer_does_not_read_is_told(launcher: Any, tmp_path: Any) -> None:
    (first, second) = launcher.run(jobs.asked_for_fsdp2_by_a_key, tmp_path / "run", ranks=2)
    assert not first["is_sharded"]
    assert "parallelism_config={'fsdp2': ...} is not heeded by Composer" in first["said"]
    assert second["said"] == ""


@pytest.mark.parametrize("config", ({"fsdp": {}}, {"fsdp": FSDPConfig()}), ids=("a dictionary", "a config"))
def test_fsdp1_is_refused_before_anything_is_sharded(fit: Any, config: Any) -> None:
    with pytest.raises(ConfigError, match=r"is FSDP1, whose flat parameters .* FSDP2Config"):
        fit(parallelism_config=config)


class Unsharded:
    """A state for which FSDP was asked, and whose model no FSDP has."""

    fsdp_config, fsdp_enabled = object(), False


def test_fsdp_that_sharded_nothing_is_told(said: Any) -> None:
    parallelism.check_wrapped(Unsharded())
    assert "FSDP was asked for, but no part of the model is sharded" in said.text
