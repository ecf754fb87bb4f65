"""What goes up to the Hub: weights, configuration and words, and from a sealed run by permission alone.

There is no Hub here: the two calls that would reach it are replaced, and take down what they were given.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))

from small_lm import llama, lora_llama, trainable, trainer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from strongroom import Checkpointer
from strongroom.auditing import Action, Outcome, Phase
from strongroom.errors import AuditError, ConfigError
from strongroom.testing.auditing import RecordingAuditor
from strongroom_security import SecurityPolicy
from strongroom_security.recipients.file import create_key_file
from strongroom_transformers import StrongroomCallback
from strongroom_transformers.hub import Releases

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing. is deprecated:FutureWarning")

WEIGHTS = {"config.json", "generation_config.json", "model.safetensors"}


@dataclass
class Hub:
    """What was sent to it."""

    uploads: list[dict[str, Any]] = field(default_factory=list)
    fails: Exception | None = None
    may_go_on: threading.Event = field(default_factory=threading.Event)

    def files(self, number: int = -1) -> set[str]:
        return set(self.uploads[number]["files"])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """The network's edge; nothing of the Trainer's or of ours."""
    found = Hub()
    found.may_go_on.set()

    def create_repo(_: Any, repo_id: str, **options: Any) -> Any:
        return huggingface_hub.RepoUrl(f"https://huggingface.co/someone/{Path(repo_id).name}")

    def upload_folder(_: Any, *, folder_path: str, run_as_future: bool = False, **options: Any) -> Any:
        assert found.may_go_on.wait(60)
        if found.fails is not None:
            raise found.fails
        folder = Path(folder_path)
        files = {
            one.relative_to(folder).as_posix(): one.read_bytes() for one in folder.rglob("*") if one.is_file()
        }
        found.uploads.append(
            {"files": files, "mode": folder.stat().st_mode & 0o777, "from": folder, **options}
        )
        if not run_as_future:
            return "pushed"
        done: Future[str] = Future()
        done.set_result("pushed")
        return done

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    staging = tmp_path / "staging"
    staging.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(staging))
    return found


def pushing(model: Any, tmp_path: Path, *, release: Any = None, **changes: Any) -> Any:
    options = changes.pop("options", {})
    given = {"push_to_hub": True, "hub_model_id": "someone/small", "hub_token": "hf_secret", "save_steps": 4}
    return trainer(
        model,
        tmp_path / "out",
        attach=lambda made: StrongroomCallback(tmp_path / "root", release=release, **options).attach(made),
        **{**given, **changes},
    )


def weights(hub: Hub, tmp_path: Path, number: int = -1, name: str = "model.safetensors") -> dict[str, Any]:
    (tmp_path / name).write_bytes(hub.uploads[number]["files"][name])
    return load_file(tmp_path / name)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    create_key_file(tmp_path / "kek.key")
    path = tmp_path / "policy.toml"
    path.write_text('[seal]\nrecipients = ["file:kek.key"]\n')
    return path


# --------------------------------------------------------------------------------------- while it trains


def test_every_save_releases_what_was_committed_and_nothing_else(hub: Hub, tmp_path: Path) -> None:
    one = pushing(llama(), tmp_path, hub_strategy="every_save", hub_always_push=True)
    one.train()
    assert [upload["commit_message"] for upload in hub.uploads] == [
        "Training in progress, step 4",
        "Training in progress, step 8",
    ]
    for number, step in enumerate((4, 8)):
        assert hub.files(number) == WEIGHTS
        found = weights(hub, tmp_path, number)
        restored = Checkpointer(tmp_path / "root").restore(step=step)
        assert restored is not None
        assert found.keys() == restored.state["model"].keys()
        assert all(torch.equal(found[name], restored.state["model"][name]) for name in found)
    upload = hub.uploads[-1]
    assert (upload["repo_id"], upload["token"]) == ("someone/small", "hf_secret")
    assert upload["mode"] == 0o700
    assert list((tmp_path / "staging").iterdir()) == []
    assert [path.name for path in (tmp_path / "out").iterdir()] == []  # nothing in the clear on the way


def test_what_was_released_is_what_from_pretrained_takes(hub: Hub, tmp_path: Path) -> None:
    one = pushing(llama(), tmp_path, hub_strategy="every_save", hub_always_push=True, max_steps=4)
    one.train()
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name, data in hub.uploads[-1]["files"].items():
        (folder / name).write_bytes(data)
    loaded = LlamaForCausalLM.from_pretrained(folder)
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(loaded.parameters(), one.model.parameters(), strict=True)
    )


def test_of_adapters_only_these_go_up(hub: Hub, tmp_path: Path) -> None:
    one = pushing(lora_llama(), tmp_path, hub_strategy="every_save", hub_always_push=True)
    one.train()
    assert hub.files() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    found = weights(hub, tmp_path, name="adapter_model.safetensors")
    kept = trainable(one.model)
    assert {name.replace(".default", "") for name in kept} == found.keys()
    assert all(torch.equal(found[name.replace(".default", "")], value) for name, value in kept.items())


def test_an_upload_that_is_under_way_is_not_waited_for(hub: Hub, tmp_path: Path) -> None:
    class Lets(TrainerCallback):  # type: ignore[misc]  # of a package without types here
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 8:
                hub.may_go_on.set()

    hub.may_go_on.clear()
    pushing(llama(), tmp_path, hub_strategy="every_save", save_steps=2, callbacks=[Lets()]).train()
    said = [upload["commit_message"] for upload in hub.uploads]
    assert said[0] == "Training in progress, step 2"
    assert len(said) < 4


def test_an_upload_that_fails_is_told_and_ends_nothing(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transformers.logging.enable_propagation()
    hub.fails = ConnectionError("the Hub is away")
    transformers.logging.set_verbosity_warning()
    try:
        one = pushing(llama(), tmp_path, hub_strategy="every_save", hub_always_push=True)
        one.train()
    finally:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_propagation()
    assert one.state.global_step == 8
    said = [record.getMessage() for record in caplog.records]
    told = sorted({text for text in said if "not uploaded to the Hub" in text})
    assert len(told) == 2
    assert "the Hub is away" in told[0]
    assert list((tmp_path / "staging").iterdir()) == []


def test_by_default_nothing_goes_up_until_it_is_asked_to(hub: Hub, tmp_path: Path) -> None:
    one = pushing(llama(), tmp_path, hub_strategy="end")
    one.train()
    assert hub.uploads == []
    assert one.push_to_hub() == "pushed"
    assert len(hub.uploads) == 1


# ------------------------------------------------------------------------------------------ when asked to


def test_pushed_by_hand_it_is_the_model_as_it_is_with_its_page_and_its_words(
    hub: Hub, tmp_path: Path
) -> None:
    model = llama()
    one = pushing(model, tmp_path, hub_strategy="end", max_steps=1)
    unknown = {"unk_token": "[UNK]"}
    tokenizer = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, **unknown))
    one.processing_class = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **unknown)
    one.train()
    future = one.push_to_hub("done", blocking=False, revision="v1", token="hf_other")  # noqa: S106 - of no Hub
    assert future.result() == "pushed"
    assert hub.files() == {*WEIGHTS, "README.md", "tokenizer.json", "tokenizer_config.json"}
    upload = hub.uploads[-1]
    assert (upload["commit_message"], upload["revision"], upload["token"]) == ("done", "v1", "hf_other")
    assert b"small" in upload["files"]["README.md"]
    found = weights(hub, tmp_path)
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items() if name in found)
    assert list((tmp_path / "staging").iterdir()) == []


def test_no_pickle_and_no_token_is_in_anything_that_goes_up(hub: Hub, tmp_path: Path) -> None:
    one = pushing(llama(), tmp_path, hub_strategy="every_save", hub_always_push=True)
    one.train()
    torch.save(one.args, tmp_path / "out" / "training_args.bin")  # as save_model() of other days left it
    one.push_to_hub()
    for upload in hub.uploads:
        for name, data in upload["files"].items():
            assert not name.endswith((".bin", ".pt", ".pth", ".pkl", ".py")), name
            assert b"hf_secret" not in data


def test_files_of_unknown_kinds_stay_here(hub: Hub, tmp_path: Path) -> None:
    class Words:
        def save_pretrained(self, folder: str) -> None:
            for name in ("vocab.txt", "merges.bin", "tokenization_own.py"):
                (Path(folder) / name).write_text("x")

    one = pushing(llama(), tmp_path, hub_strategy="end", max_steps=1)
    one.train()
    one.processing_class = Words()
    one.push_to_hub()
    assert hub.files() == {*WEIGHTS, "README.md", "vocab.txt"}


def test_a_model_of_ones_own_is_released_as_plain_safetensors(hub: Hub, tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(32, 4)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.table(input_ids).square().mean()}

    model = Own()
    pushing(model, tmp_path, hub_strategy="every_save", hub_always_push=True).train()
    assert hub.files() == {"model.safetensors"}
    assert torch.equal(weights(hub, tmp_path)["table.weight"], model.table.weight)


# ----------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("strategy", ("checkpoint", "all_checkpoints"))
@pytest.mark.parametrize("release", (None, "safetensors"))
def test_strategies_that_upload_optimizer_states_are_refused_at_the_start(
    hub: Hub, tmp_path: Path, strategy: str, release: Any
) -> None:
    with pytest.raises(ConfigError, match=f"hub_strategy='{strategy}' uploads optimizer and random states"):
        pushing(llama(), tmp_path, hub_strategy=strategy, release=release)
    assert hub.uploads == []


def test_a_sealed_run_publishes_nothing_without_permission(hub: Hub, tmp_path: Path, policy: Path) -> None:
    with pytest.raises(ConfigError, match="push_to_hub=True publishes weights, and this run's policy seals"):
        pushing(llama(), tmp_path, options={"security": policy})
    silent = pushing(llama(), tmp_path, options={"security": policy}, push_to_hub=False, max_steps=1)
    silent.train()
    with pytest.raises(ConfigError, match=r"push_to_hub\(\) publishes weights"):
        silent.push_to_hub()
    silent.args.push_to_hub = True
    with pytest.raises(ConfigError, match="push_to_hub=True publishes weights"):
        silent.train()
    assert hub.uploads == []


def test_with_permission_its_weights_are_released_and_nothing_stays_in_the_clear(
    hub: Hub, tmp_path: Path, policy: Path
) -> None:
    one = pushing(
        llama(),
        tmp_path,
        options={"security": policy},
        release="safetensors",
        hub_strategy="every_save",
        hub_always_push=True,
    )
    one.train()
    one.push_to_hub()
    assert [hub.files(number) for number in range(3)] == [WEIGHTS, WEIGHTS, {*WEIGHTS, "README.md"}]
    clear = [path for path in tmp_path.rglob("*") if path.is_file() and b"lm_head" in path.read_bytes()]
    assert clear == []


def test_each_release_is_on_record_before_it_leaves(hub: Hub, tmp_path: Path) -> None:
    auditor = RecordingAuditor()
    one = pushing(
        llama(),
        tmp_path,
        options={"security": SecurityPolicy(auditor=auditor), "run_id": "r"},
        hub_strategy="every_save",
        max_steps=4,
    )
    one.train()
    one.push_to_hub()
    began, ended = (auditor.of(Action.EXPORT, phase) for phase in (Phase.INTENDED, Phase.FINISHED))
    assert [dict(act.details)["to"] for act in began] == ["hub:someone/small"] * 2
    assert [act.outcome for act in ended] == [Outcome.SUCCESS] * 2
    assert {act.run for act in began} == {"r"}


def test_a_release_that_cannot_be_put_on_record_does_not_leave(hub: Hub, tmp_path: Path) -> None:
    auditor = RecordingAuditor()
    options = {"security": SecurityPolicy(auditor=auditor)}
    one = pushing(llama(), tmp_path, options=options, hub_strategy="end", max_steps=1)
    one.train()
    auditor.refuses = True
    with pytest.raises(AuditError, match="could not be put on record first"):
        one.push_to_hub()
    assert hub.uploads == []


def test_a_form_of_release_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="release must be 'safetensors' or None, got 'pickle'"):
        StrongroomCallback("runs/a", release="pickle")  # type: ignore[arg-type]


def test_only_the_first_rank_uploads(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = pushing(llama(), tmp_path, hub_strategy="every_save")
    one.train()
    before = len(hub.uploads)
    checkpoint = Checkpointer(tmp_path / "root").checkpoints()[0]
    monkeypatch.setattr(one, "is_world_process_zero", lambda: False)
    releases = Releases(one, one._strongroom_callback.settings, None)
    releases.is_committed(one, checkpoint)
    assert one.push_to_hub() is None
    assert len(hub.uploads) == before
