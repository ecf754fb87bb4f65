"""A limited store: its rule is asked before the store beneath, offers stay what they are, and it can end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from strongroom.errors import AccessDeniedError
from strongroom.roles import Operation
from strongroom.stores.base import ObjectInfo, Store
from strongroom.stores.limited import limited, unlimited
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom.stores.offers import (
    Bounded,
    Outlining,
    Replacing,
    Resuming,
    Space,
    Spacious,
    Tuning,
    Unfinished,
    tuning_of,
)
from strongroom.testing.conformance import StoreConformance


def allow_all(operation: Operation, key: str) -> None:
    """A rule that refuses nothing."""


def refuse(*refused: Operation) -> Callable[[Operation, str], None]:
    def rule(operation: Operation, key: str) -> None:
        if operation in refused:
            raise AccessDeniedError(f"no {operation.value} of {key}")

    return rule


class TestThroughARuleThatAllowsAll(StoreConformance):
    """A store under a rule is a store."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return limited(LocalStore(tmp_path / "root"), allow_all)

    def raw(self, store: Store, key: str) -> bytes | None:
        path = _root(store) / key
        return path.read_bytes() if path.is_file() else None

    def plant(self, store: Store, key: str, data: bytes) -> None:
        path = _root(store) / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def reopen(self, store: Store) -> Store:
        return limited(LocalStore(_root(store)), allow_all)


def _root(store: Store) -> Path:
    inner = unlimited(store)
    assert isinstance(inner, LocalStore)
    return Path(inner.root)


class Everything(MemoryStore):
    """A store that makes every offer; what it was asked for is noted."""

    tuning = Tuning(looks=7)

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []


def outline(self: Any, fold: str) -> Mapping[str, ObjectInfo | None]:
    self.asked.append("outline")
    return {}


def begin_upload(self: Any, key: str, *, length_bytes: int) -> None:
    self.asked.append("begin_upload")


def resume_upload(self: Any, key: str, *, length_bytes: int, token: str) -> None:
    self.asked.append("resume_upload")


def unfinished_uploads(self: Any) -> list[Unfinished]:
    self.asked.append("unfinished_uploads")
    return []


def abort_upload(self: Any, upload: Unfinished) -> None:
    self.asked.append("abort_upload")


def space(self: Any) -> Space:
    self.asked.append("space")
    return Space(total_bytes=2, free_bytes=1)


def put_if_absent_within(self: Any, key: str, data: bytes, within_s: float) -> bool:
    self.asked.append("put_if_absent_within")
    return True


OFFERS: dict[Any, tuple[Any, ...]] = {
    Bounded: (put_if_absent_within,),
    Outlining: (outline,),
    Resuming: (begin_upload, resume_upload, unfinished_uploads, abort_upload),
    Spacious: (space,),
}


def offering(*offers: Any) -> Any:
    members = {each.__name__: each for offer in offers for each in OFFERS[offer]}
    return type("Offering", (Everything,), members)()


@pytest.mark.parametrize(
    "offers",
    [each for count in range(len(OFFERS) + 1) for each in itertools.combinations(OFFERS, count)],
    ids=str,
)
def test_what_the_store_beneath_offers_is_offered_and_nothing_else(offers: tuple[Any, ...]) -> None:
    store = limited(offering(*offers), allow_all)
    assert isinstance(store, Store)
    assert {offer for offer in (*OFFERS, Replacing) if isinstance(store, offer)} == {*offers, Replacing}
    assert tuning_of(store) == Tuning(looks=7)


ASKS: dict[str, tuple[Operation, Callable[[Any], Any]]] = {
    "open_writer": (Operation.CREATE, lambda store: store.open_writer("a", length_bytes=1)),
    "put": (Operation.CREATE, lambda store: store.put("a", b"x")),
    "put_if_absent": (Operation.CREATE, lambda store: store.put_if_absent("a", b"x")),
    "put_if_absent_within": (Operation.CREATE, lambda store: store.put_if_absent_within("a", b"x", 1.0)),
    "begin_upload": (Operation.CREATE, lambda store: store.begin_upload("a", length_bytes=1)),
    "resume_upload": (Operation.CREATE, lambda store: store.resume_upload("a", length_bytes=1, token="t")),  # noqa: S106
    "read": (Operation.READ, lambda store: store.read("b", limit_bytes=9)),
    "open_reader": (Operation.READ, lambda store: store.open_reader("b")),
    "stat": (Operation.READ, lambda store: store.stat("b")),
    "list_names": (Operation.LIST, lambda store: store.list_names("")),
    "outline": (Operation.LIST, lambda store: store.outline("data")),
    "unfinished_uploads": (Operation.LIST, lambda store: store.unfinished_uploads()),
    "delete": (Operation.DELETE, lambda store: store.delete("b")),
    "delete_tree": (Operation.DELETE, lambda store: store.delete_tree("b")),
}


@pytest.mark.parametrize("name", ASKS)
def test_what_is_refused_is_never_asked_for_beneath(name: str) -> None:
    operation, ask = ASKS[name]
    inner = offering(*OFFERS)
    inner.put("b", b"x")
    with pytest.raises(AccessDeniedError, match=f"no {operation.value}"):
        ask(limited(inner, refuse(operation)))
    assert inner.asked == []
    assert inner.list_names("") == ["b"]
    ask(limited(inner, refuse(*(set(Operation) - {operation}))))


def test_replacing_takes_the_right_to_create_and_the_right_to_delete() -> None:
    inner = MemoryStore()
    inner.put("b", b"x")
    version = inner.stat("b").version
    for refused in (Operation.CREATE, Operation.DELETE):
        store = limited(inner, refuse(refused))
        assert isinstance(store, Replacing)
        with pytest.raises(AccessDeniedError, match=f"no {refused.value}"):
            store.replace("b", b"y", version=version)
    assert inner.read("b", limit_bytes=9) == b"x"
    store = limited(inner, refuse(Operation.READ, Operation.LIST))
    assert isinstance(store, Replacing)
    assert store.replace("b", b"y", version=version)


def test_an_upload_is_given_up_by_who_may_create_and_by_who_may_delete() -> None:
    left = Unfinished(key="a", token="t", began_ns=0)  # noqa: S106
    for refused in ((), (Operation.CREATE,), (Operation.DELETE,)):
        inner = offering(Resuming)
        limited(inner, refuse(*refused)).abort_upload(left)  # type: ignore[attr-defined]
        assert inner.asked == ["abort_upload"]
    with pytest.raises(AccessDeniedError):
        limited(offering(Resuming), refuse(Operation.CREATE, Operation.DELETE)).abort_upload(left)  # type: ignore[attr-defined]


def test_once_closed_everything_is_refused_and_the_store_beneath_is_let_go_of() -> None:
    inner = offering(*OFFERS)
    inner.put("b", b"x")
    store: Any = limited(inner, allow_all)
    reader = store.open_reader("b")
    assert unlimited(store) is inner
    assert store.space().used_fraction == 0.5
    store.close("it is over")
    for ask in (*(ask for _, ask in ASKS.values()), unlimited, lambda store: store.space()):
        with pytest.raises(AccessDeniedError, match="it is over"):
            ask(store)
    for done in (lambda: reader.read_into(0, memoryview(bytearray(1))), lambda: store.make_durable("b")):
        with pytest.raises(AccessDeniedError, match="it is over"):
            done()
    reader.close()
    assert store.uri == inner.uri
    assert inner not in vars(store).values()
