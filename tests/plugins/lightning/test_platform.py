"""What a platform sets up around the callback: one configuration file, YAML, the environment, loggers."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import lightning
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import Logger
from pytorch_lightning.cli import LightningCLI as OtherCLI
from torch.utils.data import DataLoader, TensorDataset

from strongroom import Checkpointer
from strongroom.errors import ConfigError
from strongroom.placement import Placement
from strongroom_lightning import StrongroomCheckpoint, factory
from strongroom_lightning.figures import Figures
from strongroom_lightning.pytorch_lightning import StrongroomCheckpoint as OtherCheckpoint
from strongroom_security import SecurityPolicy
from strongroom_security.recipients.file import create_key_file
from strongroom_security.signers.generating import generate_key


def steps(root: Any, **options: Any) -> list[int]:
    return [one.step for one in reversed(Checkpointer(root, **options).checkpoints())]


class Small(lightning.LightningModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(2, width)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)


class OtherSmall(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(2, 3)

    training_step = Small.training_step
    configure_optimizers = Small.configure_optimizers
    train_dataloader = Small.train_dataloader


QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


# ------------------------------------------------------------------------------------------ one file


@pytest.fixture
def config(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    platform = tmp_path / "platform"
    platform.mkdir()
    create_key_file(platform / "kek.key")
    generate_key(platform / "signer.pem")
    path = platform / "strongroom.toml"
    path.write_text(
        """
        [seal]
        recipients = ["file:kek.key"]
        [sign]
        key = "file:signer.pem"
        [audit]
        sink = "dir:audit"
        [storage]
        root = "runs"
        replicate_to = ["copies"]
        """
    )
    return path


def test_one_file_seals_signs_audits_and_says_where(fit: Any, config: Path) -> None:
    platform = config.parent
    fit("a", until=9, checkpoint={"every_n_train_steps": 4, "config": str(config)})
    (checkpoint,) = (platform / "runs" / "a").glob("step-000000000008-*")
    assert (checkpoint / "signature.json").is_file()
    assert list(checkpoint.rglob("*.safetensors.floe"))
    assert not list(checkpoint.rglob("*.safetensors"))
    assert list((platform / "audit").rglob("*"))
    resumed = fit("a", seed=1, checkpoint={"every_n_train_steps": 4, "config": str(config)})
    assert len(resumed.losses) == 22
    assert steps(platform / "copies" / "a", security=str(config))[-1] == 30
    assert resumed.checkpoint.dirpath == str(platform / "runs" / "a")
    assert not Path("a").exists()


def test_a_file_and_a_policy_are_one_too_many(config: Path) -> None:
    with pytest.raises(ConfigError, match="not both"):
        StrongroomCheckpoint("a", config=config, security=SecurityPolicy(digest="sha256"))
    with pytest.raises(ConfigError, match="as a relative path"):
        StrongroomCheckpoint(config.parent / "x", config=config)  # it has no name on the second tier
    own = StrongroomCheckpoint("a", config=config, replicate_to=["b"])
    assert own._arguments.options["replicate_to"] == ["b"]


def test_what_is_wrong_with_storage_is_told_with_its_line(config: Path) -> None:
    for text, problem in (
        ("[storage]\nroot = 3\n", r"line 1: \[storage\]: root must be a path or a URI, got 3"),
        ("[storage]\n", r"it says nothing; name where runs lie"),
        ('[storage]\nreplicate_to = "x"\n', "must be a list"),
        ('[storage]\nbucket = "x"\n', r"line 2: the unknown member 'bucket' in \[storage\]"),
    ):
        config.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            SecurityPolicy.load(config)


def test_places_are_made_of_names() -> None:
    bucket = Placement(root="/fast", replicate_to=("s3://bucket/runs/", "far"), base="/etc/platform")
    placed = bucket.place("team/a")
    assert placed.root == "/fast/team/a"
    assert placed.replicate_to == ("s3://bucket/runs/team/a", "/etc/platform/far/team/a")
    assert Placement(root="s3://bucket").place("a").root == "s3://bucket/a"
    for whole in ("/abs/a", "s3://other/a", "file:///abs/a"):
        assert Placement(root="/fast").place(whole).root == whole
        with pytest.raises(ConfigError, match="has no name"):
            bucket.place(whole)
    for nameless in (".", "..", "../a", "x/../.."):
        with pytest.raises(ConfigError, match="has no name"):
            bucket.place(nameless)
    assert Placement(replicate_to=["s3://b"]).place("runs/a").root == "runs/a"


# ---------------------------------------------------------------------------------------------- YAML

YAML = """
seed_everything: 7
trainer:
  max_epochs: 1
  accelerator: cpu
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: {callback}
      init_args:
        dirpath: {root}
        every_n_train_steps: 2
        train_time_interval: 0:10:00
        keep: 3
        monitor: null
        replicate_to: [{root}-copy]
        preemption_signals: [SIGTERM]
        provenance: {{data: {{version: "2026-11"}}}}
        on_change:
          class_path: strongroom.OnChange
          init_args: {{data: refuse, code: allow}}
        resume: auto
model:
  width: 4
"""


@pytest.mark.parametrize(
    ("callback", "cli", "module"),
    (
        ("strongroom_lightning.StrongroomCheckpoint", LightningCLI, Small),
        (
            "strongroom_lightning.pytorch_lightning.StrongroomCheckpoint",
            OtherCLI,
            OtherSmall,
        ),
    ),
    ids=("lightning", "pytorch_lightning"),
)
def test_yaml_configures_it_by_plain_values(
    root: Path, monkeypatch: pytest.MonkeyPatch, callback: str, cli: Any, module: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of what Lightning itself calls
    text = YAML.format(callback=callback, root=root)
    if module is OtherSmall:
        text = text.split("model:")[0]
    Path("config.yaml").write_text(text)
    arguments = ["fit", "--config", "config.yaml"]
    done = cli(module, save_config_callback=None, args=arguments)
    assert done.trainer.global_step == 4
    assert steps(root) == [2, 4]
    assert steps(f"{root}-copy") == [2, 4]
    again = cli(module, save_config_callback=None, args=[*arguments, "--trainer.max_epochs=2"])
    assert again.trainer.global_step == 8
    assert steps(root)[-1] == 8


# -------------------------------------------------------------------------------- the other package


def other_trainer(root: Path, **settings: Any) -> Any:
    callbacks = [OtherCheckpoint(root, every_n_train_steps=1)]
    return pytorch_lightning.Trainer(**QUIET, callbacks=callbacks, max_epochs=3, **settings)


def test_pytorch_lightning_resumes_exactly(root: Path) -> None:
    def train(root: Path, stop: int, seed: int) -> Any:
        pytorch_lightning.seed_everything(seed, verbose=False)
        module = OtherSmall()
        trainer = other_trainer(root)
        trainer.fit_loop.epoch_loop.max_steps = stop
        trainer.fit(module)
        return module.net.weight.detach().clone(), trainer.global_step

    whole, done = train(root.parent / "whole", 12, 7)
    train(root, 6, 7)
    resumed, again = train(root, 12, 1)
    assert done == again == 12
    assert torch.equal(whole, resumed)
    loaded = OtherSmall.load_from_checkpoint(f"strongroom://{root}#step=12")
    assert torch.equal(loaded.net.weight, whole)


def test_each_package_refuses_the_others_trainer(root: Path) -> None:
    # An old Lightning looks at the kinds of callbacks by itself, and refuses those that it does not know.
    refusals, own = (ConfigError, ValueError), "Expected a parent"
    with pytest.raises(refusals, match=f"belongs to pytorch_lightning, and this Trainer to lightning|{own}"):
        lightning.Trainer(**QUIET, callbacks=[OtherCheckpoint(root)], max_epochs=1).fit(Small())
    with pytest.raises(refusals, match=rf"belongs to lightning\.pytorch, and this Trainer to pytorch_|{own}"):
        trainer = pytorch_lightning.Trainer(**QUIET, callbacks=[StrongroomCheckpoint(root)], max_epochs=1)
        trainer.fit(OtherSmall())
    assert not root.exists()


# ------------------------------------------------------------------------------------ the environment


def test_the_environment_adds_the_callback_and_an_installation_does_not(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry_points(group: str) -> list[EntryPoint]:
        name = "for_lightning" if group.startswith("lightning") else "for_pytorch_lightning"
        return [EntryPoint("strongroom", f"strongroom_lightning.factory:{name}", group)]

    monkeypatch.setattr("lightning.fabric.utilities.registry.entry_points", entry_points)
    monkeypatch.setattr("lightning_fabric.utilities.registry.entry_points", entry_points)
    monkeypatch.delenv(factory.ROOT, raising=False)

    def ours(trainer: Any) -> list[Any]:
        return [one for one in trainer.callbacks if isinstance(one, StrongroomCheckpoint | OtherCheckpoint)]

    assert ours(lightning.Trainer(**QUIET)) == []
    monkeypatch.setenv(factory.ROOT, str(root))
    monkeypatch.setenv(factory.OPTIONS, '{"every_n_train_steps": 2}')
    trainer = lightning.Trainer(**QUIET, max_epochs=1, enable_checkpointing=False)
    trainer.fit(Small())
    assert steps(root) == [2, 4]
    assert isinstance(ours(pytorch_lightning.Trainer(**QUIET))[0], OtherCheckpoint)
    for wrong in ("[1", "[1]", '{"every": 2}'):
        monkeypatch.setenv(factory.OPTIONS, wrong)
        with pytest.raises(ConfigError, match=factory.OPTIONS):
            factory.for_lightning()


# ---------------------------------------------------------------------------------------------- loggers


class Remembering(Logger):
    """A logger that keeps what it is told."""

    name = "remembering"
    version = 0

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.told: list[tuple[int, dict[str, float]]] = []
        self.fails = fails

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        found = {name: value for name, value in metrics.items() if name.startswith("strongroom/")}
        if found and self.fails:
            raise OSError("the server is away")
        if found:
            self.told.append((step or 0, found))


def logged(root: Path, logger: Logger | bool, **options: Any) -> lightning.Trainer:
    trainer = lightning.Trainer(
        **{**QUIET, "logger": logger},
        callbacks=[StrongroomCheckpoint(root, every_n_train_steps=2, **options)],
        max_epochs=2,
        log_every_n_steps=1,
    )
    trainer.fit(Small())
    return trainer


def test_loggers_are_told_what_each_save_costs(root: Path) -> None:
    logger = Remembering()
    logged(root, logger, replicate_to=[root.parent / "copy"])
    by_name: dict[str, dict[int, float]] = {}
    for _, found in logger.told:
        for name, value in found.items():
            by_name.setdefault(name, {})[int(found["strongroom/step"])] = value
    names = {f"strongroom/{name}" for name in ("step", "stall_s", "background_s", "bytes", "lag_s")}
    assert by_name.keys() == names
    for name, values in by_name.items():
        if name != "strongroom/lag_s":
            assert list(values) == [2, 4, 6, 8]  # the last one too
    assert 8 in by_name["strongroom/lag_s"]
    assert all(value > 0 for values in by_name.values() for value in values.values())
    under = [step for step, _ in logger.told]
    assert under == sorted(under)


def test_loggers_may_be_left_alone_or_fail(root: Path) -> None:
    silent = Remembering()
    logged(root, silent, log_saves=False)
    assert silent.told == []
    logged(root.parent / "none", False)
    with pytest.warns(UserWarning, match="Remembering took no figures of saves, and is given no more"):
        trainer = logged(root.parent / "failing", Remembering(fails=True))
    assert trainer.global_step == 8


def test_figures_that_nobody_takes_are_bounded(root: Path) -> None:
    from strongroom.events import SaveFailed

    figures = Figures()
    for step in range(3000):
        figures.emit(SaveFailed(run="r", step=step, launch=1, attempt="", reason="", error="", failures=1))
    assert len(figures._found) == 1000


def test_nothing_is_said_of_a_save(root: Path, caplog: pytest.LogCaptureFixture, capsys: Any) -> None:
    with caplog.at_level(logging.INFO):
        logged(root, False)
    said = [one.name for one in caplog.records if "Strongroom" in one.message and "light" in one.name]
    assert len(said) == 1  # that the run begins
    assert capsys.readouterr().out == ""
