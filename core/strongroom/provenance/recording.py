"""The provenance of one `Checkpointer`: what its user gives and what is gathered, recorded and compared.

It owns how what is given comes together, what a document holds besides, that no secret goes into it,
and what a restore does about a change. What is gathered, and how, is `strongroom.provenance.collecting`'s.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from strongroom.canonical import Json
from strongroom.errors import ConfigError, ProvenanceMismatchError, StateEncodingError
from strongroom.provenance.architecture import Architecture
from strongroom.provenance.collecting import COLLECT_S, collection_of_this_process
from strongroom.provenance.comparing import Change, OnChange, compare
from strongroom.scrubbing import Scrubber, secret_values
from strongroom.values import Encoder, Node

if TYPE_CHECKING:
    from strongroom.opened import OpenedCheckpoint

__all__ = ["Given", "Recorder", "encode_given", "places_of_secrets"]

_LOG: Final = logging.getLogger("strongroom")

Given = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

_SHARE: Final = 0.25
"""Of the time that a save or a restore has, what waiting for facts may take."""
_MARGIN_S: Final = 5.0
_TOLD: Final = 20
"""Differences, or places of secrets, that a message lists."""


def places_of_secrets(values: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Where something looks like a secret, for what is stored as it is; nothing where it has no encoding."""
    scrubber = Scrubber(secret_values(os.environ))
    try:
        scrubber.node(encode_given(values, where), where)
    except StateEncodingError:
        return ()
    return tuple(scrubber.found)


class Recorder:
    """What is recorded with each checkpoint, and held against one that is restored.

    Building one begins to gather, where that is wanted.

    Args:
        given: what the user says of the whole run; or what returns it, asked at each save and restore.
        collects: whether anything is gathered.
        on_change: what a restore does about changes.

    Attributes:
        architecture: of the model that is saved.

    Raises:
        ConfigError: an argument is of another type.
    """

    def __init__(
        self, given: Given | None = None, *, collects: bool = True, on_change: OnChange | None = None
    ) -> None:
        if given is not None and not isinstance(given, Mapping) and not callable(given):
            raise ConfigError(
                f"provenance must be a dict, or a function that returns one, got a {type(given).__name__}"
            )
        if on_change is not None and not isinstance(on_change, OnChange):
            raise ConfigError(f"on_change must be OnChange(...), got {on_change!r:.80}")
        self._given = given
        self._collection = collection_of_this_process() if collects else None
        self._on_change = on_change or OnChange()
        self._told: set[str] = set()
        self.architecture: Final = Architecture()

    def given(self, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What the user says of the run, and ``more``; of two dicts under one name the members of both.

        Raises:
            ConfigError: it is no dict.
        """
        said = self._given() if callable(self._given) else self._given
        for where, value in (("provenance of the Checkpointer", said), ("provenance", more)):
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(f"{where} must be a dict, got a {type(value).__name__}")
        return _merged(dict(said or {}), dict(more or {}))

    def members(
        self,
        *,
        provenance: Node,
        metrics: Node,
        tags: Iterable[str],
        producer: Mapping[str, Json],
        facts: Callable[[], Mapping[str, Any]],
        within_s: float,
    ) -> dict[str, Json]:
        """What ``provenance.json`` holds, without secrets.

        Args:
            provenance, metrics: as they were given, as nodes.
            facts: what is known of this checkpoint; only asked where facts are gathered.
            within_s: seconds that the save has left.
        """
        scrubber = Scrubber(secret_values(os.environ))
        found: dict[str, Json] = {
            "metrics": scrubber.node(metrics, "metrics"),
            "producer": dict(producer),
            "provenance": scrubber.node(provenance, "provenance"),
            "tags": [scrubber.text(tag, f"tags[{number}]") for number, tag in enumerate(tags)],
        }
        if self._collection is not None:
            known = {**self._collected(within_s), **facts()}
            found["collected"] = scrubber.node(Encoder().encode(known), "collected")
        self._tell(scrubber.found)
        return found

    def changes(
        self, opened: OpenedCheckpoint, *, world_size: int, accepts: bool, within_s: float
    ) -> tuple[Change, ...]:
        """Hold a checkpoint against this process; changes that are not refused are told in one warning.

        Args:
            world_size: ranks that restore it.
            accepts: whether the user goes on whatever has changed.
            within_s: seconds that ranks wait for each other.

        Raises:
            ProvenanceMismatchError: a change is refused; lists each.
            IntegrityError: its provenance is damaged.
        """
        document = opened.provenance
        was = {
            "given": document["provenance"],
            "collected": document.get("collected"),
            "world_size": opened.manifest.world_size,
        }
        scrubber = Scrubber(secret_values(os.environ))
        now: dict[str, Node] = {
            # Scrubbed alike, or a secret would look like a change.
            "given": scrubber.node(encode_given(self.given(), "provenance"), "provenance"),
            "world_size": world_size,
        }
        if self._collection is not None and was["collected"] is not None:
            now["collected"] = scrubber.node(Encoder().encode(self._collected(within_s)), "collected")
        found = compare(was, now)
        reactions = {change: self._on_change.reaction(change.kind) for change in found}
        refused = [change for change in found if reactions[change] == "refuse"]
        if refused and not accepts:
            kinds = sorted({change.kind for change in refused})
            accepting = ", ".join(f"{kind}='warn'" for kind in kinds)
            raise ProvenanceMismatchError(
                f"{opened.name} was saved with other {_listed(kinds)} than this program has: "
                f"{_few(refused)}. If that is meant, pass accept_changes=True to restore, or build the "
                f"Checkpointer with on_change=OnChange({accepting})",
                different=[str(change) for change in refused],
            )
        told = [change for change in found if reactions[change] != "allow"]
        if told:
            _LOG.warning("%s was saved by a program that differs from this one: %s", opened.name, _few(told))
        return found

    def _collected(self, within_s: float) -> dict[str, Any]:
        if self._collection is None:
            return {}
        return self._collection.facts(min(COLLECT_S + _MARGIN_S, _SHARE * within_s))

    def _tell(self, places: Iterable[str]) -> None:
        news = [place for place in dict.fromkeys(places) if place not in self._told]
        if news:
            self._told.update(news)
            _LOG.warning(
                "what looks like a secret was left out of provenance.json, at %s; record no credentials",
                _few(news),
            )


def encode_given(values: Mapping[str, Any], name: str) -> Node:
    """What a user gives, as a node.

    Raises:
        StateEncodingError: a value has no safe encoding.
    """
    return Encoder(_scalar_tensor).encode(dict(values), (name,))


def _scalar_tensor(value: Any, path: tuple[Any, ...]) -> Node | None:
    """A metric is often a tensor of one element: it stands as the number it is."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return Encoder(lambda *_: None).encode(value.detach().item(), path)
    return None


def _merged(first: dict[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(first)
    for name, value in second.items():
        before = found.get(name)
        found[name] = _merged(before, value) if type(before) is type(value) is dict else value
    return found


def _few(items: Iterable[object]) -> str:
    listed = list(items)
    more = f"; and {len(listed) - _TOLD} more" if len(listed) > _TOLD else ""
    return f"{'; '.join(map(str, listed[:_TOLD]))}{more}"


def _listed(kinds: Iterable[str]) -> str:
    return " and ".join(kind.replace("_", " ") for kind in kinds)
