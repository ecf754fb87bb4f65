"""Promise 4: no code runs from a checkpoint, whatever is in it, and no unpickler is even asked."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from strongroom import Checkpointer, StrongroomError
from strongroom.stores import LocalStore
from strongroom.verify import verify
from strongroom_cli.main import main

if TYPE_CHECKING:
    Run = Any
    Forger = Any


class Hostile:
    """Leaves a file behind wherever it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "code-ran"


@pytest.fixture
def hostile(mark: Path, tmp_path: Path) -> list[bytes]:
    """Pickles as every protocol and torch.save write them."""
    texts = [pickle.dumps({"w": Hostile(mark)}, protocol) for protocol in range(6)]
    torch.save({"w": Hostile(mark)}, tmp_path / "saved.pt")
    texts.append((tmp_path / "saved.pt").read_bytes())
    return texts


@pytest.fixture
def no_unpickler(monkeypatch: pytest.MonkeyPatch) -> None:
    import _pickle

    def banned(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("an unpickler was reached")

    # torch imports parts of itself when they are first used, and some of these extend Unpickler.
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).zero_grad()

    for module, names in (
        (pickle, ("load", "loads", "Unpickler", "_load", "_loads", "_Unpickler")),
        (_pickle, ("load", "loads", "Unpickler")),
        (torch, ("load",)),
        (torch.serialization, ("load", "_load", "_legacy_load")),
    ):
        for name in names:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, banned)


def look_at(run: Run) -> None:
    """Whatever reads a checkpoint; each may find it damaged, and nothing else may come of it."""
    verify(LocalStore(run.root), everything=True)
    template = {"w": torch.zeros(3), "x": {"epoch": 0, "b": torch.tensor([0])}, "mine": 0}
    for state in (None, template):
        with contextlib.suppress(StrongroomError):
            Checkpointer(run.root).restore(state)
    main(["ls", str(run.root)])
    main(["show", str(run.root)])
    main(["verify", str(run.root), "--json"])


def test_the_hostile_pickles_of_these_tests_do_run_code_elsewhere(hostile: list[bytes], mark: Path) -> None:
    for text in hostile[:-1]:
        pickle.loads(text)
        mark.unlink()


def test_a_pickle_in_place_of_any_file_never_runs(
    run: Run, hostile: list[bytes], mark: Path, no_unpickler: None
) -> None:
    for path in sorted(run.root.rglob("*")):
        if not path.is_file() or "-0001-" in str(path):
            continue
        whole = path.read_bytes()
        for text in (hostile[0], hostile[-1]):
            path.write_bytes(text)
            look_at(run)
            assert not mark.exists(), path
        path.write_bytes(whole)


def test_a_pickle_that_every_digest_vouches_for_never_runs(
    forger: Forger, run: Run, hostile: list[bytes], mark: Path, no_unpickler: None
) -> None:
    for path in ("index.safetensors", "state.json", "provenance.json", "state-00000.json"):
        whole = forger.read(path)
        for text in (hostile[0], hostile[-1]):
            forger.put(path, text)
            look_at(run)
            assert not mark.exists(), path
        forger.put(path, whole)


def test_a_pickle_inside_a_value_stays_bytes(
    forger: Forger, run: Run, hostile: list[bytes], mark: Path, no_unpickler: None
) -> None:
    from base64 import b64encode

    whole = forger.read("state.json")
    payload = b64encode(hostile[-2]).decode()
    for tag in ("bytes", "str", "numpy.array", "object", "pickle"):
        node = f'{{"$":"{tag}","v":"{payload}"}}'.encode()
        forged = whole.replace(b'["epoch",3]', b'["epoch",' + node + b"]")
        assert forged != whole
        forger.put("state.json", forged)
        look_at(run)
        assert not mark.exists(), tag


def test_saving_restoring_and_verifying_reach_no_unpickler(tmp_path: Path, no_unpickler: None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "generator": torch.Generator(),
        "extra": {"rng": torch.get_rng_state(), "at": (1, 2.5, {"a", "b"})},
    }
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).result()
        assert checkpointer.restore(state) is not None
        assert checkpointer.restore() is not None
    assert verify(LocalStore(tmp_path)).verdict == "whole"
    assert main(["show", str(tmp_path)]) == 0


def test_no_file_of_a_checkpoint_is_or_holds_a_pickle(run: Run) -> None:
    for path in run.root.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not content.startswith((b"\x80", b"PK", b"(")), path
            assert b"PROTO" not in content
            with pytest.raises(Exception, match=r".+"):
                pickle.loads(content)
