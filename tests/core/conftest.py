"""What the core's tests share: a root, a clock that they move, a store that they can hold up or fail."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch

from strongroom import Checkpointer, StrongroomError
from strongroom.config import Clock
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore


class HookedStore:
    """Any store, of which every operation is logged and first shown to a hook, which may wait or raise.

    A writer's and a reader's calls count as operations of the store: ``write``, ``finish``,
    ``abort``, ``read_into``.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.log: list[tuple[str, str]] = []
        self.hook: Callable[[str, str], None] | None = None
        self._lock = threading.Lock()

    def _seen(self, operation: str, key: str) -> None:
        with self._lock:
            self.log.append((operation, key))
        if self.hook is not None:
            self.hook(operation, key)

    def keys(self, operation: str) -> list[str]:
        """What an operation was asked of, in order."""
        return [key for name, key in self.log if name == operation]

    def fail(
        self, error: Exception, *, on: str | tuple[str, ...], where: str = "", times: int | None = None
    ) -> None:
        """Let an operation fail on keys that contain ``where``: always, or so many times."""
        names = (on,) if isinstance(on, str) else on
        left = [times]

        def hook(operation: str, key: str) -> None:
            if operation in names and where in key and left[0] != 0:
                left[0] = None if left[0] is None else left[0] - 1
                raise error

        self.hook = hook

    def hold(self, *, on: str, where: str = "") -> Gate:
        """Let an operation wait, on keys that contain ``where``, until the gate is opened."""
        gate = Gate()

        def hook(operation: str, key: str) -> None:
            if operation == on and where in key:
                gate.pass_through()

        self.hook = hook
        return gate

    @property
    def uri(self) -> str:
        return self.inner.uri

    def open_writer(self, key: str, *, length_bytes: int) -> Any:
        self._seen("open_writer", key)
        return _HookedStream(self, key, self.inner.open_writer(key, length_bytes=length_bytes))

    def put(self, key: str, data: Any) -> None:
        self._seen("put", key)
        self.inner.put(key, data)

    def put_if_absent(self, key: str, data: Any) -> bool:
        self._seen("put_if_absent", key)
        return self.inner.put_if_absent(key, data)

    def make_durable(self, prefix: str) -> None:
        self._seen("make_durable", prefix)
        self.inner.make_durable(prefix)

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        self._seen("read", key)
        return self.inner.read(key, limit_bytes=limit_bytes)

    def open_reader(self, key: str) -> Any:
        self._seen("open_reader", key)
        return _HookedStream(self, key, self.inner.open_reader(key))

    def stat(self, key: str) -> Any:
        self._seen("stat", key)
        return self.inner.stat(key)

    def list_names(self, prefix: str) -> list[str]:
        self._seen("list_names", prefix)
        return self.inner.list_names(prefix)

    def delete(self, key: str) -> None:
        self._seen("delete", key)
        self.inner.delete(key)

    def delete_tree(self, prefix: str) -> None:
        self._seen("delete_tree", prefix)
        self.inner.delete_tree(prefix)


class _HookedStream:
    """A writer or a reader of a `HookedStore`."""

    def __init__(self, store: HookedStore, key: str, inner: Any) -> None:
        self._store = store
        self._key = key
        self._inner = inner

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def write(self, data: Any) -> None:
        self._store._seen("write", self._key)
        self._inner.write(data)

    def finish(self) -> None:
        self._store._seen("finish", self._key)
        self._inner.finish()

    def abort(self) -> None:
        self._store._seen("abort", self._key)
        self._inner.abort()

    def read_into(self, offset_bytes: int, buffer: memoryview) -> int:
        self._store._seen("read_into", self._key)
        return self._inner.read_into(offset_bytes, buffer)

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> _HookedStream:
        self._inner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inner.__exit__(kind, error, trace)


class Gate:
    """Where background threads wait until a test lets them go on; never longer than a minute."""

    def __init__(self) -> None:
        self._is_reached = threading.Event()
        self._is_open = threading.Event()

    def pass_through(self) -> None:
        self._is_reached.set()
        if not self._is_open.wait(60):
            raise TimeoutError("the test never opened its gate")

    def wait_reached(self) -> None:
        assert self._is_reached.wait(60), "nothing came to the gate"

    def open(self) -> None:
        self._is_open.set()


class MovedClock:
    """A clock that stands still until a test moves it: the wall clock may jump, the other only grows."""

    def __init__(self) -> None:
        self.wall_ns = 1_700_000_000 * 10**9
        self.monotonic_s = 1000.0

    @property
    def clock(self) -> Clock:
        return Clock(now_ns=lambda: self.wall_ns, monotonic=lambda: self.monotonic_s)

    def advance(self, seconds: float) -> None:
        self.wall_ns += int(seconds * 10**9)
        self.monotonic_s += seconds

    def jump(self, seconds: float) -> None:
        """As when somebody sets the time of day."""
        self.wall_ns += int(seconds * 10**9)


class Listener:
    """An event sink that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def emit(self, event: Any) -> None:
        self.heard.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.heard if type(event) is kind]

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.heard]


@pytest.fixture(autouse=True)
def _the_same_numbers_every_time() -> Iterator[None]:
    """Seeded, and given back, so that no test depends on which ran before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run's root; it does not exist, and neither does its parent."""
    return tmp_path / "runs" / "a"


@pytest.fixture
def store(root: Path) -> HookedStore:
    """A local store at ``root`` that can be held up or made to fail."""
    return HookedStore(LocalStore(root))


@pytest.fixture
def memory() -> HookedStore:
    """The same, in memory."""
    return HookedStore(MemoryStore())


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def begin() -> Iterator[Callable[..., Checkpointer]]:
    """Builds checkpointers, each as a new process would; what they have in flight ends with the test."""
    begun: list[Checkpointer] = []

    def build(root: Any, **options: Any) -> Checkpointer:
        checkpointer = Checkpointer(root, **options)
        begun.append(checkpointer)
        return checkpointer

    yield build
    for checkpointer in begun:
        # A failure that a test left undelivered was what it was about.
        with contextlib.suppress(StrongroomError):
            checkpointer.close(60)


@pytest.fixture
def there_and_back(root: Path) -> Callable[..., Any]:
    """Saves a state and restores it in a checkpointer of its own; returns what came back."""

    def go(state: dict[str, Any], template: dict[str, Any] | None = None, **options: Any) -> Any:
        with Checkpointer(root) as writer:
            writer.save(1, state).result()
        with Checkpointer(root) as reader:
            restored = reader.restore(template, **options)
        assert restored is not None
        assert restored.step == 1
        return restored.state

    return go


@pytest.fixture
def round_trip() -> Callable[..., Any]:
    """The same in memory, for tests that do it often."""

    def go(state: dict[str, Any], template: dict[str, Any] | None = None, **options: Any) -> Any:
        memory = MemoryStore()
        with Checkpointer(memory) as writer:
            writer.save(1, state).result()
        with Checkpointer(memory) as reader:
            restored = reader.restore(template, **options)
        assert restored is not None
        return restored.state

    return go


@pytest.fixture
def bits_of() -> Callable[[torch.Tensor], bytes]:
    """A tensor's elements, bit for bit, whatever its strides and dtype."""

    def bits(tensor: torch.Tensor) -> bytes:
        packed = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return packed.reshape(-1).view(torch.uint8).numpy().tobytes()

    return bits
