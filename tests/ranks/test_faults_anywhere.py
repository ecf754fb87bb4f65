"""Random ranks that fail at random places, several at once: never a torn checkpoint."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from crews import Crews
from fault_jobs import Fault, go_on, save_steps, saving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launching import Launcher

RANKS = 4
TIMEOUT_S = 1.5
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"

FAULTS = st.builds(
    Fault,
    # More killed than raised: these are the ones that cannot clean up.
    kind=st.sampled_from(("killed", "killed", "raises")),
    place=st.sampled_from(
        (
            "call",
            "capture",
            "staging",
            "put_if_absent launches/.*",
            "read launches/.*",
            r"open_writer step-.*\.safetensors",
            r"open_writer step-.*\.safetensors, after",
            r"open_writer step-.*/state-.*",
            r"make_durable step-.*",
            r"make_durable step-.*, after",
            r"open_writer step-.*/index.*",
            r"put step-.*/MANIFEST\.json",
            r"put step-.*/MANIFEST\.json, after",
            r"put_if_absent step-.*/COMMIT",
            r"put_if_absent step-.*/COMMIT, after",
        )
    ),
    rank=st.integers(0, RANKS - 1),
)


@pytest.fixture(scope="module")
def first(crews: Crews, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("first") / "run"
    crews.run(save_steps, root, [1], ranks=RANKS)
    return root


@pytest.mark.timeout(1800)
@settings(
    max_examples=100 if DEEP else 6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(faults=st.lists(FAULTS, min_size=1, max_size=4))
def test_whatever_is_committed_is_whole(
    launcher: Launcher, crews: Crews, first: Path, faults: list[Fault]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(shutil.copytree(first, Path(folder) / "run"))
        job = launcher.start(saving, root, faults, TIMEOUT_S, True, ranks=RANKS)
        outcomes = job.outcomes()
        told = [outcome.value[0] for outcome in outcomes if outcome.value is not None]
        assert not [outcome.error for outcome in outcomes if outcome.error is not None]
        afterwards = crews.run(go_on, root, ranks=RANKS)
        assert len({str(after) for after in afterwards}) == 1
        listed, restored, is_whole, saved = afterwards[0]
        assert is_whole
        assert (listed, restored) in (([1], 1), ([2, 1], 2))
        assert saved == 9
        # Who was told that it was saved finds it; and where it was not, nobody was told so.
        assert {one.step for one in told} <= ({2, None} if restored == 2 else {None})
        assert all(
            "StrongroomError" in one.bases or "AskedForError" in one.bases for one in told if one.error
        )
