"""A root with room for one rank's part and not for all: no rank writes, and each is told the same."""

from __future__ import annotations

from pathlib import Path

import space_jobs
from crews import Crews


def test_what_does_not_fit_together_is_begun_by_no_rank(crews: Crews, tmp_path: Path) -> None:
    said = crews.run(space_jobs.save_with_little_room, tmp_path / "run", ranks=2)
    assert said[0] == said[1]
    failed, folders, then = said[0]
    assert failed.startswith("StoreFullError: the save of step 2 failed")
    assert "19999 bytes free of 1000000000; this save takes 20000" in failed
    assert "step 1 is untouched" in failed
    assert folders == "step-000000000001"
    assert then == "step 2"
