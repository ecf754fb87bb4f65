"""Whose signatures are needed: every requirement against counting by hand, and what it says is missing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.errors import ConfigError
from strongroom_security.requirements import (
    AllOf,
    AnyOf,
    Requirement,
    RequireSigner,
    Threshold,
    UnsafeAllowUnsigned,
)


@dataclass(frozen=True)
class Named:
    """A key, as far as requirements go: an id."""

    id: str


KEYS: Any = [Named(f"{number:064x}") for number in range(6)]
A, B, C = KEYS[:3]

Model = Callable[[frozenset[str]], bool]


def signer(keys: Sequence[Any]) -> tuple[Requirement, Model]:
    ids = {key.id for key in keys}
    return RequireSigner(keys), lambda signers: bool(ids & signers)


def threshold(n: int, keys: Sequence[Any]) -> tuple[Requirement, Model]:
    ids = {key.id for key in keys}
    n = min(n, len(ids))
    return Threshold(n, keys), lambda signers: sum(one in signers for one in ids) >= n


def any_of(parts: Sequence[tuple[Requirement, Model]]) -> tuple[Requirement, Model]:
    return AnyOf(*[part for part, _ in parts]), lambda signers: any(model(signers) for _, model in parts)


def all_of(parts: Sequence[tuple[Requirement, Model]]) -> tuple[Requirement, Model]:
    return AllOf(*[part for part, _ in parts]), lambda signers: all(model(signers) for _, model in parts)


keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6)
leaves = st.one_of(keys.map(signer), st.builds(threshold, st.integers(1, 6), keys))
requirements = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(any_of),
        st.lists(inner, min_size=1, max_size=3).map(all_of),
    ),
    max_leaves=6,
)
signers = st.frozensets(st.sampled_from([*(key.id for key in KEYS), "f" * 64]))


@given(requirements, signers)
def test_a_requirement_is_met_when_counting_by_hand_says_so(
    pair: tuple[Requirement, Model], signed: frozenset[str]
) -> None:
    requirement, model = pair
    assert (requirement.problem(signed) is None) == model(signed)


@given(requirements, signers)
def test_a_problem_names_a_key_that_has_not_signed_and_could(
    pair: tuple[Requirement, Model], signed: frozenset[str]
) -> None:
    requirement, _ = pair
    problem = requirement.problem(signed)
    if problem is not None:
        assert any(key.id in problem for key in requirement.keys if key.id not in signed)


@given(requirements, signers)
def test_a_signature_more_never_makes_it_worse(
    pair: tuple[Requirement, Model], signed: frozenset[str]
) -> None:
    requirement, _ = pair
    if requirement.problem(signed) is None:
        for key in KEYS:
            assert requirement.problem(signed | {key.id}) is None


@given(requirements)
def test_all_its_keys_together_meet_any_requirement_and_nobody_meets_none(
    pair: tuple[Requirement, Model],
) -> None:
    requirement, _ = pair
    ids = [key.id for key in requirement.keys]
    assert len(set(ids)) == len(ids)
    assert requirement.problem(ids) is None
    assert requirement.problem(()) is not None


@given(requirements)
def test_a_requirement_is_written_briefly(pair: tuple[Requirement, Model]) -> None:
    requirement, _ = pair
    assert type(requirement).__name__ in repr(requirement)
    assert KEYS[0].id not in repr(requirement)


def test_one_key_counts_once_however_often_it_is_named() -> None:
    requirement = Threshold(2, [A, B, Named(A.id)])
    assert len(requirement.keys) == 2
    assert requirement.problem([A.id, A.id]) is not None
    assert requirement.problem([A.id, B.id]) is None


def test_what_is_missing_is_said_in_words() -> None:
    assert RequireSigner([A]).problem([]) == f"a signature by {A.id} is needed"
    assert RequireSigner([A, B]).problem([C.id]) == f"a signature by one of {A.id}, {B.id} is needed"
    assert Threshold(2, [A, B, C]).problem([B.id]) == (
        f"signatures by 2 of 3 keys are needed, and 1 found; missing: {A.id}, {C.id}"
    )
    assert AllOf(RequireSigner([A]), RequireSigner([B])).problem([A.id]) == (
        f"a signature by {B.id} is needed"
    )
    assert AnyOf(RequireSigner([A]), RequireSigner([B])).problem([]) == (
        f"(a signature by {A.id} is needed) or (a signature by {B.id} is needed)"
    )


def test_a_long_list_of_keys_is_cut() -> None:
    many: Any = [Named(f"{number:064x}") for number in range(40)]
    problem = RequireSigner(many).problem([])
    assert problem is not None
    assert "and 32 more" in problem
    assert "37 more" in repr(RequireSigner(many))


@pytest.mark.parametrize("n", (0, 3, -1, True, 1.0, "2"))
def test_a_threshold_that_cannot_be_met_or_says_nothing_is_refused(n: Any) -> None:
    with pytest.raises(ConfigError, match="from 1 to the number of its different keys, 2"):
        Threshold(n, [A, B, A])


@pytest.mark.parametrize("keys", ([], "ab", None, b"cd"))
def test_no_keys_are_refused(keys: Any) -> None:
    with pytest.raises(ConfigError, match="at least one key"):
        RequireSigner(keys)


def test_what_is_no_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="public keys and certificate authorities"):
        RequireSigner(cast("Any", ["signer.pub"]))


@pytest.mark.parametrize("kind", (AnyOf, AllOf))
def test_no_requirements_are_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match="at least one requirement"):
        kind()
    with pytest.raises(ConfigError, match="takes requirements"):
        kind(A)


def test_too_many_keys_are_refused() -> None:
    many: Any = [Named(f"{number:064x}") for number in range(1001)]
    with pytest.raises(ConfigError, match="1001 keys"):
        RequireSigner(many)
    with pytest.raises(ConfigError, match="1001 keys"):
        AllOf(RequireSigner(many[:600]), RequireSigner(many[600:]))


def test_allowing_unsigned_checkpoints_is_loud_when_built(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="strongroom"):
        requirement = UnsafeAllowUnsigned(RequireSigner([A]))
    assert "UNSAFE: checkpoints that nobody has signed are accepted" in caplog.text
    assert requirement.keys == (A,)
    assert requirement.problem([]) is not None
    assert requirement.problem([A.id]) is None


@pytest.mark.parametrize("kind", (AnyOf, AllOf, UnsafeAllowUnsigned))
def test_allowing_unsigned_checkpoints_cannot_be_hidden_inside(kind: Any) -> None:
    with pytest.raises(ConfigError, match="outermost"):
        kind(UnsafeAllowUnsigned(RequireSigner([A])))


def test_requirements_are_values() -> None:
    assert RequireSigner([A, B]) == RequireSigner([A, B])
    assert Threshold(1, [A, B]) != Threshold(2, [A, B])
    assert hash(AnyOf(RequireSigner([A]))) == hash(AnyOf(RequireSigner([A])))
