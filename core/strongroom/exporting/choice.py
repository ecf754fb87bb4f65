"""Which of a checkpoint's tensors an export takes, and what each is called outside. Pure.

Outside, a tensor has the name that its module's ``state_dict()`` gives it: the state's own key, and
the spelling of stored names (`strongroom.paths`), stay behind. What is no tensor is not exported,
and named, so that nobody takes the copy for all there was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strongroom.canonical import Json
from strongroom.columns import TensorRecord
from strongroom.decoding import Decoder
from strongroom.errors import ConfigError, FormatError
from strongroom.forms import is_named_pair, mapping_pairs, payload_of
from strongroom.index import Index
from strongroom.selection import Selection

__all__ = ["Chosen", "choose"]

_USUAL_KEY: Final = "model"

_RESERVED: Final = "__metadata__"
"""What safetensors keeps for itself in a file's header."""

_KEYS_TOLD: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What an export takes.

    Attributes:
        key: the state's key that it is taken from.
        tensors: every stored tensor once, by its name outside, in the order of the state.
        tied: further names of these: name -> the name that stands in ``tensors``.
        left_out: names of what stands among them and cannot be exported: it is no tensor.
    """

    key: str
    tensors: Mapping[str, TensorRecord]
    tied: Mapping[str, str]
    left_out: tuple[str, ...]


def choose(
    document: Json,
    index: Index,
    *,
    key: str | None = None,
    only: Sequence[str] | None = None,
    strip_prefix: str = "",
) -> Chosen:
    """Choose the tensors of one value of a state.

    Args:
        document: the state's typed document.
        index: the checkpoint's tensors.
        key: the value's key; None: ``model``, or else the one value that is a module.
        only: patterns of names outside (`Selection.only`); None: all.
        strip_prefix: take what lies below this prefix, without it.

    Raises:
        ConfigError: there is no such value, it holds no tensor, a pattern fits nothing, or two
            tensors would have one name.
        FormatError: the document is not what a save writes.
    """
    values = _top(document)
    if key is None:
        key = _usual(values)
    found = _value_at(values, key)
    prefix = f"{strip_prefix.rstrip('.')}." if strip_prefix else ""
    selection = Selection(only=tuple(only) if only else None)
    unused = set(selection.only or ())
    taken: dict[str, TensorRecord] = {}
    left_out: list[str] = []
    for name, stored in _leaves(found, ""):
        if not name.startswith(prefix):
            continue
        outside = name[len(prefix) :] or key
        if stored is None:
            left_out.append(outside)
            continue
        fitting = selection.fitting(outside)
        unused.difference_update(fitting)
        if selection.only is not None and not fitting:
            continue
        record = index.find(stored) if isinstance(stored, str) else None
        if record is None:
            raise FormatError(f"the state names the tensor {stored!r:.80}, which the index does not hold")
        if outside in taken or outside == _RESERVED:
            taken_by = "safetensors keeps for itself" if outside == _RESERVED else "another has, too"
            raise ConfigError(
                f"a tensor of {key!r} would be exported as {outside!r:.80}, a name that {taken_by}; choose "
                "among its tensors by only= (--only)"
            )
        taken[outside] = record
    if unused:
        raise ConfigError(f"nothing in {key!r} has a name that fits {', '.join(map(repr, sorted(unused)))}")
    if not taken:
        below = f" below {strip_prefix!r}" if prefix else ""
        raise ConfigError(f"the state's {key!r} holds no tensor{below}: there is nothing to export")
    tensors: dict[str, TensorRecord] = {}
    tied: dict[str, str] = {}
    kept: dict[str, str] = {}
    for outside, record in taken.items():
        name = kept.setdefault(record.name, outside)
        if name == outside:
            tensors[outside] = record
        else:
            tied[outside] = name
    return Chosen(key=key, tensors=tensors, tied=tied, left_out=tuple(left_out))


def _top(document: Json) -> dict[str, Json]:
    """The state's values by those of its keys that are texts."""
    pairs = mapping_pairs(document)
    if pairs is None:
        raise FormatError("the state's document is no dict")
    decoder = Decoder()
    decoded = ((decoder.decode(key_node), value) for key_node, value in pairs)
    return {key: value for key, value in decoded if isinstance(key, str)}


def _usual(values: Mapping[str, Json]) -> str:
    if _USUAL_KEY in values:
        return _USUAL_KEY
    modules = [key for key, value in values.items() if payload_of(value, "module") is not None]
    if not modules:
        # A state_dict() that was saved as a plain dict looks like any other dict of tensors.
        modules = [key for key, value in values.items() if _is_all_tensors(value)]
    if len(modules) != 1:
        what = "no module" if not modules else f"several that could be it ({_told(modules)})"
        raise ConfigError(
            f"the state has no {_USUAL_KEY!r} and {what} among its keys; name one by key= (--key): "
            f"{_told(values)}"
        )
    return modules[0]


def _is_all_tensors(value: Json) -> bool:
    if payload_of(value, "stateful") is None and mapping_pairs(value) is None:
        return False
    stored = [name for _, name in _leaves(value, "")]
    return bool(stored) and all(name is not None for name in stored)


def _value_at(values: Mapping[str, Json], key: str) -> Json:
    if key in values:
        found = values[key]
        if payload_of(found, "optimizer") is not None:
            raise ConfigError(f"the state's {key!r} is an optimizer; an export takes a model's tensors")
        if payload_of(found, "per_rank") is not None:
            raise ConfigError(f"the state's {key!r} is each rank's own; an export takes what all ranks share")
        return found
    # Plain DCP may have flattened the state: then its keys are whole names.
    below = [[name[len(key) + 1 :], value] for name, value in values.items() if name.startswith(f"{key}.")]
    if below:
        return {"$": "dict", "v": below}
    raise ConfigError(f"the state has no {key!r}; its keys are {_told(values)}")


def _told(keys: Mapping[str, Json] | Sequence[str]) -> str:
    names = [repr(key[:80]) for key in keys]
    more = f" and {len(names) - _KEYS_TOLD} more" if len(names) > _KEYS_TOLD else ""
    return ", ".join(names[:_KEYS_TOLD]) + more


def _leaves(node: Json, name: str) -> Iterator[tuple[str, Any]]:
    """The names below a node, each with the stored name of its tensor, or None where it is none."""
    stored = payload_of(node, "tensor")
    if stored is not None:
        yield name, stored
        return
    module = payload_of(node, "module")
    if module is not None:
        if type(module) is not list or not module or not all(map(is_named_pair, module[1:])):
            raise FormatError("a module that is no list of versions and named values")
        for own, value in module[1:]:
            # Extra state may be a tensor, as a state_dict() has it; what it holds within has no name there.
            yield _joined(name, own), payload_of(value, "tensor")
        return
    inner = payload_of(node, "stateful")
    if inner is not None:
        yield from _leaves(inner, name)
        return
    items = _items(node)
    if items is None:
        yield name, None
        return
    for own, value in items:
        yield from _leaves(value, _joined(name, own))


def _items(node: Json) -> list[tuple[str, Json]] | None:
    """What a container holds, by the words that name it; None: it is no container with names."""
    sequence = payload_of(node, "tuple") if type(node) is dict else node
    if type(sequence) is list:
        return [(str(number), item) for number, item in enumerate(sequence)]
    pairs = mapping_pairs(node)
    if pairs is None:
        return None
    decoder = Decoder()
    keys = [decoder.decode(key_node) for key_node, _ in pairs]
    if not all(type(key) in (str, int) for key in keys):
        return None
    return [(str(key), value) for key, (_, value) in zip(keys, pairs, strict=True)]


def _joined(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own
