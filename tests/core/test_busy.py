"""A save that comes while the one before is still being written; and buffers made before the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import ConfigError


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((1000,), value), "extra": {"epoch": 1}}


def test_a_save_may_be_skipped_while_the_last_is_being_written(
    begin: Any, memory: Any, listener: Any
) -> None:
    checkpointer = begin(memory, when_busy="skip", events=(listener,))
    gate = memory.hold(on="put_if_absent", where="COMMIT")
    first = checkpointer.save(1, state())
    gate.wait_reached()
    second = checkpointer.save(2, state())
    assert "still being written" in second.skipped
    assert second.step == 2
    gate.open()
    assert second.result().step == first.result().step == 1
    checkpointer.wait()
    third = checkpointer.save(3, state())
    assert third.skipped is None
    assert third.result().step == 3
    assert [one.step for one in checkpointer.checkpoints()] == [3, 1]
    skipped = [event for event in listener.heard if type(event).__name__ == "SaveSkipped"]
    assert [(event.step, event.reason) for event in skipped] == [(2, second.skipped)]


def test_what_to_do_when_busy_is_one_of_two_words(root: Path, begin: Any) -> None:
    with pytest.raises(ConfigError, match="'wait' or 'skip'"):
        begin(root, when_busy="queue")


def test_preparing_writes_nothing_and_the_first_save_uses_its_buffers(root: Path, begin: Any) -> None:
    checkpointer = begin(root)
    size = checkpointer.prepare(state())
    assert size >= 4000
    assert not root.exists()
    buffers = [shard.image for shard in checkpointer._stager._stage._shards]
    checkpointer.save(1, state(7.0)).result()
    after = [shard.image for shard in checkpointer._stager._stage._shards]
    assert [id(image.obj) for image in buffers] == [id(image.obj) for image in after]
    assert torch.equal(checkpointer.restore(state()).state["w"], torch.full((1000,), 7.0))


def test_preparing_before_somebody_else_names_the_run_is_right_all_the_same(root: Path, begin: Any) -> None:
    prepared = begin(root)
    prepared.prepare(state())
    with begin(root, run_id="run-" + "x" * 100) as other:
        other.save(1, state()).result()
    prepared.restore(state())
    prepared.save(2, state(5.0)).result()
    assert torch.equal(prepared.restore(state()).state["w"], torch.full((1000,), 5.0))


def test_a_state_that_cannot_be_saved_cannot_be_prepared_for(root: Path, begin: Any) -> None:
    from strongroom import StateEncodingError

    with pytest.raises(StateEncodingError):
        begin(root).prepare({"fn": print})


def test_writing_can_be_held_to_a_pace(root: Path, begin: Any) -> None:
    """A quarter of a second's worth, of which a tenth may come at once."""
    import time

    checkpointer = begin(root, max_bytes_per_second=4_000_000)
    began = time.monotonic()
    checkpointer.save(1, {"w": torch.ones(250_000)}).result()
    assert time.monotonic() - began >= 0.1
    assert torch.equal(begin(root).restore().state["w"], torch.ones(250_000))


def test_a_pace_that_is_none_is_refused(root: Path, begin: Any) -> None:
    with pytest.raises(ConfigError, match="positive number"):
        begin(root, max_bytes_per_second=0)
