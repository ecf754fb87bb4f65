"""What has changed between two documents of provenance, and what a policy says of each kind."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom import ConfigError
from strongroom.provenance.comparing import KINDS, Change, OnChange, compare, flattened
from strongroom.values import Encoder

CODE = {"commit": "a" * 40, "is_dirty": False, "entry": {"name": "train.py", "digest": "sha256:1"}}
ENVIRONMENT = {"python": "3.11", "torch": "2.6", "frameworks": {"numpy": "2.0"}, "packages": "sha256:9"}


def side(
    given: Any = None, code: Any = None, environment: Any = None, world_size: int = 1, **collected: Any
) -> dict[str, Any]:
    known = {"code": code or CODE, "environment": environment or ENVIRONMENT, **collected}
    return {
        "given": Encoder().encode(given or {}),
        "collected": Encoder().encode(known),
        "world_size": world_size,
    }


def told(was: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, str, str | None, str | None]]:
    return [(change.kind, change.name, change.was, change.now) for change in compare(was, now)]


@pytest.mark.parametrize(
    ("was", "now", "expected"),
    (
        pytest.param(
            side({"data": {"version": "v1", "cursor": 7}}),
            side({"data": {"version": "v2", "cursor": 9}}),
            [("data", "version", '"v1"', '"v2"')],
            id="the data's version, and not its cursor",
        ),
        pytest.param(
            side({"data": "v1"}), side({"data": "v2"}), [("data", "data", '"v1"', '"v2"')], id="data"
        ),
        pytest.param(
            side({"data": {"manifest_digest": "sha256:a", "shards": [1, 2]}}),
            side({"data": {"manifest_digest": "sha256:b", "shards": [1, 3]}}),
            [("data", "manifest_digest", '"sha256:a"', '"sha256:b"'), ("data", "shards.1", "2", "3")],
            id="the data's manifest and shards",
        ),
        pytest.param(
            side({"hyper_parameters": {"lr": 0.1, "optimizer": {"beta": 0.9}, "gone": 1}}),
            side({"hyper_parameters": {"lr": 0.2, "optimizer": {"beta": 0.9}, "new": [1]}}),
            [
                ("hyper_parameters", "gone", "1", None),
                ("hyper_parameters", "lr", "0.1", "0.2"),
                ("hyper_parameters", "new.0", None, "1"),
            ],
            id="hyper-parameters: each that differs",
        ),
        pytest.param(
            side({"hyper_parameters": argparse.Namespace(lr=1, betas=(0.9, 0.99))}),
            side({"hyper_parameters": {"lr": 1.0, "betas": [0.9, 0.99]}}),
            [],
            id="hyper-parameters that only are spelled otherwise",
        ),
        pytest.param(
            side({"model": {"layers": 12}}),
            side({"model": {"layers": 24}}),
            [("model", "layers", "12", "24")],
            id="model",
        ),
        pytest.param(
            side(code={**CODE, "commit": "a"}),
            side(code={**CODE, "commit": "b", "entry": {"name": "moved.py", "digest": "sha256:2"}}),
            [("code", "commit", '"a"', '"b"'), ("code", "entry.digest", '"sha256:1"', '"sha256:2"')],
            id="the commit and the script",
        ),
        pytest.param(
            side(),
            side(code={**CODE, "is_dirty": True, "changes": "sha256:5"}),
            [("code", "changes", '"none"', '"sha256:5"')],
            id="code that is not committed",
        ),
        pytest.param(
            side(environment={**ENVIRONMENT, "cuda": "12.4"}),
            side(environment={**ENVIRONMENT, "torch": "2.7", "packages": "sha256:8"}),
            [
                ("environment", "cuda", '"12.4"', None),
                ("environment", "packages", '"sha256:9"', '"sha256:8"'),
                ("environment", "torch", '"2.6"', '"2.7"'),
            ],
            id="versions",
        ),
        pytest.param(
            side(container_digest="sha256:a"),
            side({"container_digest": "sha256:b"}),
            [("environment", "container_digest", '"sha256:a"', '"sha256:b"')],
            id="the container, whoever says it",
        ),
        pytest.param(
            side(world_size=4), side(world_size=8), [("world_size", "world_size", "4", "8")], id="ranks"
        ),
    ),
)
def test_each_kind_of_change_is_told(was: Any, now: Any, expected: Any) -> None:
    assert told(was, now) == expected


@pytest.mark.parametrize(
    ("was", "now"),
    (
        pytest.param(
            side(), side({"data": {"version": "v2"}, "hyper_parameters": {"lr": 1}}), id="now alone"
        ),
        pytest.param(
            side({"data": {"version": "v2"}, "hyper_parameters": {"lr": 1}}), side(), id="then alone"
        ),
        pytest.param({"given": None, "collected": None}, side({"data": "v"}), id="nothing was recorded"),
        pytest.param(side({"data": {"version": "v1"}}), side({"data": {"uri": "x"}}), id="other members"),
        pytest.param(
            side(code={"commit": "unknown", "changes": "unknown", "is_dirty": "unknown"}),
            side(),
            id="unknown then",
        ),
        pytest.param(side(), side(code={**CODE, "is_dirty": True, "changes": "unknown"}), id="unknown now"),
        pytest.param(
            {**side(), "collected": Encoder().encode({"code": "unknown"})}, side(), id="none gathered"
        ),
    ),
)
def test_what_one_side_does_not_say_is_not_compared(was: Any, now: Any) -> None:
    assert compare(was, now) == ()


@given(
    st.recursive(
        st.integers() | st.text(max_size=5) | st.none(),
        lambda inner: (
            st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3)
            | st.lists(inner, max_size=3)
        ),
        max_leaves=12,
    )
)
def test_a_document_does_not_differ_from_itself(value: Any) -> None:
    both = side({"hyper_parameters": {"all": value}, "data": {"all": value}})
    assert compare(both, both) == ()


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(), min_size=1, max_size=5), st.data()
)
def test_each_changed_hyper_parameter_is_named_and_no_other(
    values: dict[str, int], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(values)))
    changed = {**values, name: values[name] + 1}
    found = compare(side({"hyper_parameters": values}), side({"hyper_parameters": changed}))
    assert [change.name for change in found] == [name]


def test_a_hostile_document_is_compared_all_the_same() -> None:
    odd = {"$": "dict", "v": [["data", {"$": "dict", "v": "no pairs"}], "no pair", [1, 2], ["code", 3]]}
    for node in (odd, [], 3, "text", {"$": 1}, {"$": "object", "v": []}, {"$": "deque", "v": []}):
        flattened(node)
        assert (
            compare({"given": node, "collected": node, "world_size": node}, side({"data": "v"})) is not None
        )


def test_what_is_told_is_bounded() -> None:
    many = {"hyper_parameters": {f"n{number}": number for number in range(5_000)}}
    other = {"hyper_parameters": {f"n{number}": number + 1 for number in range(5_000)}}
    assert len(compare(side(many), side(other))) == 1_000
    (long,) = compare(side({"data": "x" * 10_000}), side({"data": "y"}))
    assert len(long.was or "") < 300


def test_a_policy_reacts_to_each_kind() -> None:
    policy = OnChange()
    assert [policy.reaction(kind) for kind in KINDS] == ["refuse", "warn", "warn", "warn", "warn", "allow"]
    assert OnChange(code="refuse").reaction("code") == "refuse"
    with pytest.raises(
        ConfigError, match=r"OnChange\.code must be 'refuse', 'warn' or 'allow', got 'ignore'"
    ):
        OnChange(code="ignore")  # type: ignore[arg-type]


def test_a_change_reads_as_a_sentence_and_travels() -> None:
    change = Change(kind="data", name="version", was='"v1"', now=None)
    assert str(change) == 'data: version was "v1" and is absent'
    assert Change.from_json(change.to_json()) == change
