"""Adapters are stored, and the base is named by its digest: a resume is exact, and onto this base alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model

sys.path.insert(0, str(Path(__file__).parent))

from small_lm import STEPS, llama, lora, lora_llama, losses_of, trainable, trainer
from torch import nn

from strongroom import Checkpointer
from strongroom.errors import ConfigError, StateMismatchError
from strongroom_transformers import StrongroomCallback
from strongroom_transformers.peft import ModelWeights, has_adapters

# PEFT asks a transformers model by the name that transformers 5.24 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing. is deprecated:FutureWarning")


def attach(root: Path, **options: Any) -> Any:
    return lambda made: StrongroomCallback(root, **options).attach(made)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def stored(root: Path, step: int | None = None) -> dict[str, Any]:
    restored = Checkpointer(root).restore(step=step)
    assert restored is not None
    state: dict[str, Any] = restored.state
    return state


def stop_at(model: Any, tmp_path: Path, step: int, *, at: Any = None, **changes: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        trainer(
            model, tmp_path / "out", attach=at or attach(tmp_path / "root"), stops_at=step, **changes
        ).train()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    one = trainer(lora_llama(), tmp_path_factory.mktemp("whole"), save_strategy="no")
    one.train()
    return one


@pytest.mark.parametrize("step", (4, 6))
def test_a_lora_run_goes_on_exactly(tmp_path: Path, uninterrupted: Any, step: int) -> None:
    stop_at(lora_llama(), tmp_path, step)
    model = lora_llama()
    with torch.no_grad():  # whatever the adapters were made as, the checkpoint's count
        for one in trainable(model):
            model.get_parameter(one).zero_()
    resumed = trainer(model, tmp_path / "out", attach=attach(tmp_path / "root"), draw_from=99)
    resumed.train()
    assert losses_of(resumed) == losses_of(uninterrupted)
    assert same(trainable(model), trainable(uninterrupted.model))


def test_a_checkpoint_holds_no_weight_of_the_base(tmp_path: Path) -> None:
    model = lora_llama()
    before = {name: one.clone() for name, one in model.named_parameters() if not one.requires_grad}
    stop_at(model, tmp_path, 2)
    state = stored(tmp_path / "root")
    assert set(state["model"]) == set(trainable(model))
    assert all("lora_" in name for name in state["model"])
    assert state["base"]["tensors"] == len(before)
    assert state["base"]["bytes"] == sum(one.nbytes for one in before.values())
    assert state["base"]["digest"].startswith("blake3:")


def test_another_base_is_refused_with_both_digests(tmp_path: Path) -> None:
    stop_at(lora_llama(), tmp_path, 2)
    resumed = trainer(lora_llama(seed=1), tmp_path / "out", attach=attach(tmp_path / "root"))
    with pytest.raises(StateMismatchError, match=r"another base: expected blake3:\w+ .* found blake3:\w+"):
        resumed.train()
    assert resumed.state.global_step == 0
    anew = trainer(lora_llama(seed=1), tmp_path / "out", attach=attach(tmp_path / "root"), max_steps=1)
    anew.train(resume_from_checkpoint=False)
    assert anew.state.global_step == 1


def test_other_adapters_are_refused_too(tmp_path: Path) -> None:
    stop_at(lora_llama(), tmp_path, 2)
    for changes in ({"r": 3}, {"target_modules": ["q_proj"]}):
        resumed = trainer(lora_llama(**changes), tmp_path / "out", attach=attach(tmp_path / "root"))
        with pytest.raises(StateMismatchError, match="lora_"):
            resumed.train()


def test_base_store_stores_it_all_and_takes_up_on_any_base(tmp_path: Path, uninterrupted: Any) -> None:
    at = attach(tmp_path / "root", base="store")
    stop_at(lora_llama(), tmp_path, 3, at=at)
    assert "base" not in stored(tmp_path / "root")
    model = lora_llama(seed=1)
    resumed = trainer(model, tmp_path / "out", attach=at, draw_from=99)
    resumed.train()
    assert losses_of(resumed) == losses_of(uninterrupted)
    assert same(dict(model.named_parameters()), dict(uninterrupted.model.named_parameters()))


def test_base_says_digest_or_store() -> None:
    with pytest.raises(ConfigError, match="base must be one of 'digest', 'store', got 'skip'"):
        StrongroomCallback("runs/a", base="skip")  # type: ignore[arg-type]


def test_sha256_where_the_run_asks_for_it(tmp_path: Path) -> None:
    at = attach(tmp_path / "root", digest="sha256")
    stop_at(lora_llama(), tmp_path, 2, at=at)
    assert stored(tmp_path / "root")["base"]["digest"].startswith("sha256:")
    # The checkpoint says which; another default here is no other base.
    trainer(lora_llama(), tmp_path / "out", attach=attach(tmp_path / "root"), max_steps=3).train()


def test_sha256_where_the_policy_asks_for_it(tmp_path: Path) -> None:
    policy = tmp_path / "strongroom.toml"
    policy.write_text('digest = "sha256"\n')
    stop_at(lora_llama(), tmp_path, 2, at=attach(tmp_path / "root", config=policy))
    assert stored(tmp_path / "root")["base"]["digest"].startswith("sha256:")


# ---------------------------------------------------------------------------------------- kinds of adapters


@pytest.mark.parametrize(
    "changes",
    (
        {"modules_to_save": ["lm_head"]},
        {"bias": "lora_only", "use_dora": True},
        {"trainable_token_indices": [1, 2]},
    ),
    ids=("modules_to_save", "dora", "tokens"),
)
def test_whatever_trains_is_stored_and_comes_back(tmp_path: Path, changes: dict[str, Any]) -> None:
    whole = trainer(lora_llama(**changes), tmp_path / "whole", save_strategy="no")
    whole.train()
    stop_at(lora_llama(**changes), tmp_path, 5)
    model = lora_llama(**changes)
    assert set(trainable(model)) <= set(stored(tmp_path / "root")["model"])
    resumed = trainer(model, tmp_path / "out", attach=attach(tmp_path / "root"), draw_from=99)
    resumed.train()
    assert losses_of(resumed) == losses_of(whole)
    assert same(trainable(model), trainable(whole.model))


def test_several_adapters_are_all_stored_and_the_resting_one_too(tmp_path: Path) -> None:
    def two() -> Any:
        model = lora_llama()
        torch.manual_seed(6)
        model.add_adapter("resting", lora())
        model.set_adapter("default")
        return model

    first = two()
    with torch.no_grad():
        first.get_parameter(next(name for name, _ in first.named_parameters() if "resting" in name)).fill_(3)
    stop_at(first, tmp_path, 2)
    names = set(stored(tmp_path / "root")["model"])
    assert {name for name in names if ".resting." in name}
    resumed = trainer(two(), tmp_path / "out", attach=attach(tmp_path / "root"), max_steps=3)
    resumed.train()
    for name, one in first.named_parameters():
        if ".resting." in name:
            assert torch.equal(resumed.model.get_parameter(name), one), name


def test_adapters_in_a_model_that_is_no_peft_model_are_adapters_too(tmp_path: Path) -> None:
    def own() -> Any:
        model = llama()
        torch.manual_seed(5)
        return inject_adapter_in_model(lora(), model)

    whole = trainer(own(), tmp_path / "whole", save_strategy="no")
    whole.train()
    stop_at(own(), tmp_path, 3)
    state = stored(tmp_path / "root")
    assert state["base"]["tensors"]
    assert all("lora_" in name for name in state["model"])
    resumed = trainer(own(), tmp_path / "out", attach=attach(tmp_path / "root"), draw_from=99)
    resumed.train()
    assert losses_of(resumed) == losses_of(whole)


def test_the_best_adapters_come_back_at_the_end(tmp_path: Path) -> None:
    from small_lm import texts

    model = lora_llama()
    one = trainer(
        model,
        tmp_path / "out",
        attach=attach(tmp_path / "root"),
        eval_dataset=texts(4),
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        learning_rate=5.0,  # so that it gets worse
        save_total_limit=1,
    )
    one.train()
    best = one.state.best_global_step
    assert best < STEPS
    found = stored(tmp_path / "root", step=best)["model"]
    assert same(found, trainable(model))


# ------------------------------------------------------------------------------------------------- the base


def test_a_model_without_adapters_is_stored_whole_frozen_parts_too(tmp_path: Path) -> None:
    def frozen() -> Any:
        model = llama()
        model.model.embed_tokens.requires_grad_(False)
        return model

    stop_at(frozen(), tmp_path, 2)
    state = stored(tmp_path / "root")
    assert "base" not in state
    assert "model.embed_tokens.weight" in state["model"]


def test_merged_and_unloaded_it_is_a_model_like_any_other(tmp_path: Path) -> None:
    merged = lora_llama().merge_and_unload()
    assert not has_adapters(merged)
    assert ModelWeights().parts(merged) == {"model": merged}


def test_a_base_that_changes_while_it_trains_is_an_error_at_the_next_save(tmp_path: Path) -> None:
    model = lora_llama()
    weights = ModelWeights()
    first = weights.parts(model)["base"]
    assert weights.parts(model)["base"] == first
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(one.clone())  # as DDP does when it begins; the same bytes
    assert weights.parts(model)["base"] == first
    with torch.no_grad():
        model.get_base_model().lm_head.weight.add_(1)
    with pytest.raises(StateMismatchError, match="Do not merge adapters"):
        weights.parts(model)


def test_the_digest_tells_names_shapes_types_and_bytes_apart() -> None:
    def digest(change: Any) -> str:
        model = lora_llama()
        change(model.get_base_model())
        found: str = ModelWeights().parts(model)["base"]["digest"]
        return found

    def reshaped(base: Any) -> None:
        weight = base.lm_head.weight
        base.lm_head.weight = nn.Parameter(weight.detach().view(16, 32), requires_grad=False)

    def renamed(base: Any) -> None:
        base.head = base.lm_head
        del base.lm_head

    def flipped(base: Any) -> None:
        with torch.no_grad():
            base.lm_head.weight.view(torch.uint8)[0, 0] ^= 1

    def halved(base: Any) -> None:
        base.lm_head.weight = nn.Parameter(base.lm_head.weight.detach().half(), requires_grad=False)

    found = [digest(change) for change in (lambda base: None, reshaped, renamed, flipped, halved)]
    assert len(set(found)) == 5
    assert digest(lambda base: None) == found[0]


def test_buffers_are_stored_since_a_base_that_does_not_train_may_count() -> None:
    class WithNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.adapted = nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("transient", torch.zeros(2), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.norm(self.adapted(x))
            return found

    model = get_peft_model(WithNorm(), LoraConfig(r=1, target_modules=["adapted"]))
    shown = ModelWeights().parts(model)["model"].state_dict()
    assert "base_model.model.norm.running_mean" in shown
    assert "base_model.model.transient" not in shown
    assert "base_model.model.norm.weight" not in shown
    assert (
        shown["base_model.model.norm.running_mean"].data_ptr()
        == model.get_buffer("base_model.model.norm.running_mean").data_ptr()
    )
