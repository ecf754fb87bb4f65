"""What ranks run in the tests of sealed checkpoints; importable by name, since ranks are other processes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from fault_jobs import Told, told
from layout_jobs import ROWS, TIMEOUT_S, Layout, checkpointer, same, truth

from strongroom import PerRank, channel
from strongroom.config import POLICY_VARIABLE
from strongroom.errors import KeyServiceError, NoKeyError
from strongroom.stores.local import LocalStore

# The keeper of keys and the store that watches are those of the tests of sealing.
sys.path.append(str(Path(__file__).parent.parent / "security"))

from checkpoints import Keeper
from sealed_saves import Watched

from strongroom_security import Seal, SecurityPolicy
from strongroom_security import sealing as sealing_module
from strongroom_security.envelope import HandOverKey
from strongroom_security.secret import Secret

__all__ = ["under"]


def under(policy: Path, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Run another job under a policy, as a platform gives it to one that knows nothing of it."""
    os.environ[POLICY_VARIABLE] = str(policy)
    try:
        return function(*arguments, **options)
    finally:
        del os.environ[POLICY_VARIABLE]


def rank() -> int:
    return dist.get_rank()


def sharded_state(number: int) -> dict[str, Any]:
    """A part for each rank, of equal lengths; a replica; values of each rank's own, and common ones."""
    return {
        "rows": ROWS.lay(truth((8, 20), seed=number)),
        "grid": Layout((2, 2), "01").lay(truth((6, 4), seed=number)),
        "all": truth((5,), seed=number),
        "own": PerRank({"rank": rank(), "number": number, "t": torch.full((3,), float(rank()))}),
        "common": {"number": number},
    }


def empty_state() -> dict[str, Any]:
    return {
        "rows": ROWS.lay(torch.zeros(8, 20)),
        "grid": Layout((2, 2), "01").lay(torch.zeros(6, 4)),
        "all": torch.zeros(5),
        "own": PerRank({"rank": -1, "number": -1, "t": torch.zeros(3)}),
        "common": {},
    }


def unlike(found: Mapping[str, Any], number: int) -> list[str]:
    expected = sharded_state(number)
    expected["own"] = expected["own"].value
    return [name for name, value in expected.items() if not same(found[name], value)]


def save_sharded(root: Path, steps: list[int]) -> None:
    with checkpointer(root) as opened:
        for step in steps:
            opened.save(step, sharded_state(step)).result(timeout_s=TIMEOUT_S)


def load_sharded(root: Path) -> tuple[int, list[tuple[int, str]], list[str]]:
    """The step that is restored, what was passed over for it, and what is not as it was saved."""
    with checkpointer(root) as opened:
        restored = opened.restore(empty_state())
    return restored.step, list(restored.skipped), unlike(restored.state, restored.step)


# ---------------------------------------------------------------------------------------- key services


class LoggingKeeper(Keeper):
    """Writes down each call, and by which rank, before it answers."""

    def __init__(self, name: str, log: Path) -> None:
        super().__init__(name)
        self._log = log

    def _note(self, what: str, context: Any) -> None:
        line = f"{what} {self.uri} step {context.step} by rank {rank()}\n"
        with open(self._log, "a", encoding="utf-8") as file:
            file.write(line)

    def wrap(self, key: Secret, context: Any, *, within_s: float) -> bytes:
        self._note("wrap", context)
        return super().wrap(key, context, within_s=within_s)

    def unwrap(self, wrapped: bytes, context: Any, *, within_s: float) -> Secret:
        self._note("unwrap", context)
        return super().unwrap(wrapped, context, within_s=within_s)


def calls_to_keepers(root: Path, log: Path) -> list[str]:
    """Two saves and two restores, with two recipients."""
    keepers = [LoggingKeeper("one", log), LoggingKeeper("two", log)]
    security = SecurityPolicy(seal=Seal(recipients=keepers))
    with checkpointer(root, security=security) as opened:
        opened.prepare(sharded_state(1))
        for step in (1, 2):
            opened.save(step, sharded_state(step)).result(timeout_s=TIMEOUT_S)
        wrong = unlike(opened.restore(empty_state()).state, 2)
        return wrong + unlike(opened.restore(empty_state(), step=1).state, 1)


def keepers_that_fail(root: Path, kind: str, log: Path) -> list[Told]:
    """A save and a restore while the keeper fails, and each again when it is back."""

    def fail() -> None:
        raise {"down": KeyServiceError, "denied": NoKeyError}[kind](f"keeper:one is {kind}")

    keeper = LoggingKeeper("one", log)
    calls = []
    with checkpointer(root, security=SecurityPolicy(seal=Seal(recipients=[keeper]))) as opened:

        def save(step: int) -> int:
            return opened.save(step, sharded_state(step)).result(timeout_s=TIMEOUT_S).step

        def restore() -> int:
            restored = opened.restore(empty_state())
            assert restored is not None
            assert not restored.skipped
            return restored.step if not unlike(restored.state, restored.step) else -1

        calls += [told(lambda: save(1)), told(lambda: save(2))]
        keeper.does = fail
        calls += [told(lambda: save(3)), told(restore)]
        keeper.does = lambda: None
        calls += [told(restore), told(lambda: save(4))]
    return calls


def keeper_that_hangs(root: Path, log: Path) -> list[Told]:
    """A save that ends by its deadline and a restore that ends by the policy's, and each again afterwards."""
    keeper = LoggingKeeper("one", log)
    security = SecurityPolicy(seal=Seal(recipients=[keeper], timeout_s=0.5))
    calls = []
    with checkpointer(root, security=security) as opened:
        opened.save(1, sharded_state(1)).result(timeout_s=TIMEOUT_S)
    gate = keeper.hang()
    with checkpointer(root, security=security, timeout_s=3.0) as opened:
        calls.append(told(lambda: opened.restore(empty_state())))
        calls.append(told(lambda: opened.save(2, sharded_state(2)).result(timeout_s=TIMEOUT_S)))
        gate.set()
        keeper.does = lambda: None
        dist.barrier()
        calls.append(told(lambda: opened.restore(empty_state()).step))
        calls.append(told(lambda: opened.save(3, sharded_state(3)).result(timeout_s=TIMEOUT_S).step))
    return calls


# -------------------------------------------------------------------------------- a rank without a policy


def with_another_policy(root: Path, policy: Path, odd: int, other: Path | None) -> list[Told]:
    """One rank has another one, or none: a save of all, and restores of what was sealed."""
    security = other if rank() == odd else policy
    with checkpointer(root, security=security) as opened:
        return [
            told(lambda: opened.save(9, sharded_state(9)).result(timeout_s=TIMEOUT_S).step),
            told(lambda: opened.restore(empty_state()).step),
            told(lambda: opened.restore(empty_state(), step=1).step),
        ]


# --------------------------------------------------------------------------------------- who has which key


@contextlib.contextmanager
def watched_keys() -> Iterator[dict[str, Any]]:
    """The keys that this rank comes to hold, and what was handed over to whom."""
    unlocked = sealing_module._Unlocked
    take_over, hand_over = unlocked.take_over, unlocked.hand_over
    seen: dict[str, Any] = {"held": set(), "handed": []}

    def taking(self: Any, *arguments: Any) -> None:
        take_over(self, *arguments)
        seen["held"] |= self._keys.keys()

    def handing(self: Any, public: bytes, paths: Any) -> bytes:
        listed = list(paths)
        seen["handed"].append(sorted(listed))
        return hand_over(self, public, listed)

    unlocked.take_over, unlocked.hand_over = taking, handing  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        unlocked.take_over, unlocked.hand_over = take_over, hand_over  # type: ignore[method-assign]


def keys_and_reads(
    root: Path, policy: Path, only: str | None
) -> tuple[list[str], list[str], list[list[str]]]:
    """Restore; the sealed files whose keys this rank was handed, what it read, and what it handed on."""
    store = Watched(LocalStore(root))
    target = ROWS_OF[dist.get_world_size()].lay(torch.zeros(8, 20))
    with watched_keys() as seen, checkpointer(store, security=policy) as opened:
        opened.restore({"rows": target}, strict=False, only=only)
    read = {key.rpartition("/")[2] for key in store.read_bytes if key.endswith(".floe")}
    return sorted(seen["held"]), sorted(read), seen["handed"]


ROWS_OF = {4: ROWS, 2: Layout((2,), "0")}


# ------------------------------------------------------------------------------------ what the network sees


class RecordingStore(channel.TCPStore):
    """Keeps every value that this process sends to the ranks' store."""

    sent: ClassVar[list[bytes]] = []

    def set(self, key: str, value: Any) -> None:
        RecordingStore.sent.append(value.encode() if isinstance(value, str) else bytes(value))
        super().set(key, value)


@contextlib.contextmanager
def recorded() -> Iterator[tuple[list[bytes], set[bytes], list[bytes]]]:
    """What is sent, every secret that this process comes to know, and what was sealed to be handed over."""
    secrets: set[bytes] = set()
    handed: list[bytes] = []
    RecordingStore.sent = []
    real_store, init, draw = channel.TCPStore, Secret.__init__, HandOverKey.__init__
    hand_over = sealing_module.hand_over

    def noting(self: Secret, data: Any) -> None:
        init(self, data)
        secrets.add(self.reveal())

    def drawing(self: HandOverKey, private: Any) -> None:
        draw(self, private)
        secrets.add(private.private_numbers().private_value.to_bytes(32, "big"))

    def handing(*arguments: Any) -> bytes:
        handed.append(hand_over(*arguments))
        return handed[-1]

    channel.TCPStore = RecordingStore  # type: ignore[misc]
    Secret.__init__ = noting  # type: ignore[method-assign]
    HandOverKey.__init__ = drawing  # type: ignore[method-assign]
    sealing_module.hand_over = handing
    try:
        yield RecordingStore.sent, secrets, handed
    finally:
        channel.TCPStore = real_store  # type: ignore[misc]
        Secret.__init__, HandOverKey.__init__ = init, draw  # type: ignore[method-assign]
        sealing_module.hand_over = hand_over


def what_is_said(root: Path, policy: Path) -> tuple[list[bytes], set[bytes], list[bytes]]:
    """A save and a restore of every rank, and all that was said between them."""
    with recorded() as (sent, secrets, handed), checkpointer(root, security=policy) as opened:
        opened.save(1, sharded_state(1)).result(timeout_s=TIMEOUT_S)
        assert not unlike(opened.restore(empty_state()).state, 1)
    return sent, secrets, handed


# ------------------------------------------------------------------------------------------- partial reads

ROW_COUNT, COLUMNS = 4096, 1024


def save_large(root: Path) -> None:
    """16 MiB in one tensor."""
    with checkpointer(root) as opened:
        opened.save(1, {"w": truth((ROW_COUNT, COLUMNS))}).result(timeout_s=TIMEOUT_S)


def load_rows(root: Path, bounds: list[int]) -> tuple[int, bool]:
    """Restore rows, divided among the ranks as ``bounds`` says; how many bytes of shards were read."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ShardMetadata

    start, end = bounds[rank()], bounds[rank() + 1]
    shards = []
    if end > start:
        metadata = ShardMetadata([start, 0], [end - start, COLUMNS], f"rank:{rank()}/cpu")
        shards = [sharded_tensor.Shard(torch.zeros(end - start, COLUMNS), metadata)]
    target = sharded_tensor.init_from_local_shards(shards, ROW_COUNT, COLUMNS)
    store = Watched(LocalStore(root))
    with checkpointer(store) as opened:
        opened.restore({"w": target})
    found = torch.cat([shard.tensor for shard in target.local_shards()] or [torch.empty(0, COLUMNS)])
    is_right = torch.equal(found, truth((ROW_COUNT, COLUMNS))[start:end])
    return store.shard_bytes_read, is_right


# ------------------------------------------------------------------------------------------------ replicas


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(6, 40)
        self.second = torch.nn.Linear(40, 6)


def move_replicas(root: Path) -> list[str]:
    """A module that every rank has alike, under DDP: stored once, and spread over the ranks."""
    model = torch.nn.parallel.DistributedDataParallel(Two())
    with checkpointer(root) as opened:
        opened.save(1, {"model": model}).result(timeout_s=TIMEOUT_S)
        other = torch.nn.parallel.DistributedDataParallel(Two())
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        opened.restore({"model": other})
    expected = dict(model.named_parameters())
    return [name for name, value in other.named_parameters() if not torch.equal(value, expected[name])]
