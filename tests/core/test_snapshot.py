"""What is saved is the state at the moment of ``save``; training waits for one copy and no more."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from strongroom import WaitTimeoutError


def test_nothing_that_training_does_after_save_changes_what_is_saved(store: Any, begin: Any) -> None:
    gate = store.hold(on="open_writer")
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().sum().backward()
        optimizer.step()

    step()
    generator = torch.Generator().manual_seed(3)
    extra: dict[str, Any] = {
        "list": [1, {"deep": [2]}],
        "tensor": torch.ones(3),
        "array": np.ones(3),
        "dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
        "bytes": bytearray(b"abc"),
        "set": {1},
    }
    state = {"model": model, "optimizer": optimizer, "generator": generator, "extra": extra}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    moments = [value["exp_avg"].clone() for value in optimizer.state.values()]
    draws = torch.randn(3, generator=torch.Generator().manual_seed(3))

    checkpointer = begin(store)
    handle = checkpointer.save(1, state)
    gate.wait_reached()
    for _ in range(3):
        step()
    torch.randn(9, generator=generator)
    extra["list"].append(3)
    extra["list"][1]["deep"].clear()
    extra["tensor"].fill_(7)
    extra["array"].fill(7)
    extra["dates"][0] = "1999-01-01"
    extra["bytes"][0] = 0
    extra["set"].add(2)
    extra["more"] = torch.ones(1)
    optimizer.param_groups[0]["lr"] = 9.0
    gate.open()
    handle.result(60)

    restored = begin(store).restore().state
    for name, value in weights.items():
        assert torch.equal(restored["model"][name], value), name
    for number, moment in enumerate(moments):
        assert torch.equal(restored["optimizer"]["state"][number]["exp_avg"], moment)
    assert restored["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert torch.equal(torch.randn(3, generator=restored["generator"]), draws)
    found = restored["extra"]
    assert (found["list"], found["bytes"], found["set"]) == ([1, {"deep": [2]}], b"abc", {1})
    assert found["tensor"].tolist() == found["array"].tolist() == [1, 1, 1]
    assert str(found["dates"][0]) == "2020-01-01"
    assert "more" not in found


def test_save_returns_while_the_store_hangs_and_the_handle_says_so(store: Any, begin: Any) -> None:
    gate = store.hold(on="open_writer")
    handle = begin(store).save(1, {"t": torch.ones(2)})
    gate.wait_reached()
    handle.wait_staged(timeout_s=0)
    assert not handle.done()
    assert handle.skipped is None
    with pytest.raises(WaitTimeoutError, match="step 1 is still under way"):
        handle.result(timeout_s=0)
    gate.open()
    assert handle.result(60).step == 1
    assert handle.done()


def test_a_second_save_waits_until_the_first_has_left_the_buffers(store: Any, begin: Any) -> None:
    checkpointer = begin(store)
    tensor = torch.zeros(1000)
    for step in range(6):
        tensor.fill_(step)
        checkpointer.save(step, {"t": tensor})
    checkpointer.wait()
    assert [c.step for c in checkpointer.checkpoints()] == [5, 4, 3, 2, 1, 0]
    for step in range(6):
        assert begin(store).restore(step=step).state["t"].unique().tolist() == [step]


def test_states_that_change_their_shape_from_save_to_save_are_each_saved(store: Any, begin: Any) -> None:
    checkpointer = begin(store)
    states: list[dict[str, Any]] = [
        {"t": torch.ones(2, 3)},
        {"t": torch.ones(3, 2), "u": torch.zeros(1)},
        {"t": torch.ones(2, 3, dtype=torch.bfloat16)},
        {"t": torch.ones(2, 3), "only": "here"},
        {},
        {"t": torch.ones(2, 3)},
    ]
    for step, state in enumerate(states):
        checkpointer.save(step, state)
    checkpointer.close()
    for step, state in enumerate(states):
        found = begin(store).restore(step=step).state
        assert list(found) == list(state)
        for name, value in state.items():
            same = (
                torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
            )
            assert same, (step, name)


def test_a_tensor_is_tied_anew_in_each_save(store: Any, begin: Any) -> None:
    checkpointer = begin(store)
    tensor, other = torch.ones(3), torch.full((3,), 2.0)
    checkpointer.save(0, {"a": tensor, "b": tensor})
    checkpointer.save(1, {"a": tensor, "b": other})
    checkpointer.save(2, {"a": other, "b": tensor})
    checkpointer.close()
    found = [begin(store).restore(step=step).state for step in range(3)]
    assert found[0]["a"].data_ptr() == found[0]["b"].data_ptr()
    assert (found[1]["a"].tolist(), found[1]["b"].tolist()) == ([1, 1, 1], [2, 2, 2])
    assert (found[2]["a"].tolist(), found[2]["b"].tolist()) == ([2, 2, 2], [1, 1, 1])


def test_a_failed_save_leaves_the_buffers_fit_for_the_next(store: Any, begin: Any) -> None:
    from strongroom import SaveError, StoreUnavailableError

    checkpointer = begin(store)
    store.fail(StoreUnavailableError("no answer"), on="finish", times=1)
    with pytest.raises(SaveError):
        checkpointer.save(0, {"t": torch.zeros(9)}).result()
    checkpointer.save(1, {"t": torch.ones(9)}).result()
    assert begin(store).restore().state["t"].tolist() == [1] * 9


def test_what_a_state_dict_makes_for_the_save_is_let_go_once_it_is_copied(store: Any, begin: Any) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    class Gathering:
        def state_dict(self) -> Any:
            tensor = torch.ones(1000)
            made.append(weakref.ref(tensor))
            return {"t": tensor}

        def load_state_dict(self, state: Any) -> None: ...

    gate = store.hold(on="open_writer")
    handle = begin(store).save(1, {"gathered": Gathering()})
    gate.wait_reached()
    gc.collect()
    assert [ref() for ref in made] == [None]
    gate.open()
    handle.result(60)
