"""Values of a checkpoint rebuilt from its document, tensors in memory of their own.

For whatever has no place in the caller's state: plain values, extra state, everything of a
restore without a template. Memory is planned first (`Rebuilder.allocate`), filled by someone
else, and only then may `Rebuilder.decode` look into it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from strongroom import paths
from strongroom.arrays import array_in_shard, array_of
from strongroom.decoding import Decoder
from strongroom.dtypes import torch_dtype
from strongroom.errors import FormatError, StateMismatchError
from strongroom.forms import is_named_pair, mapping_pairs, optimizer_parts, payload_of
from strongroom.index import Index, TensorRecord
from strongroom.keypath import Path, key_path
from strongroom.optim import OptimizerState
from strongroom.values import Node

__all__ = ["Rebuilder", "set_generator"]


class Rebuilder:
    """Reads one checkpoint's document.

    Args:
        index: the checkpoint's tensors.
        rank_values: this rank's own values, by name.
        plan: told of each new piece of memory: a name for it, the memory, what fills it.
        lacks: asked what stands for a value of which this rank has none of its own, by the
            value's name and place; told of each before anything is decoded, too.

    Attributes:
        own: the memory of each stored tensor that has been given some, by its stored name.
    """

    def __init__(
        self,
        index: Index,
        rank_values: Mapping[str, Node],
        plan: Callable[[str, torch.Tensor, TensorRecord], None],
        lacks: Callable[[str, Path], Any],
    ) -> None:
        self.own: dict[str, torch.Tensor] = {}
        self._index = index
        self._rank_values = rank_values
        self._plan = plan
        self._lacks = lacks
        self._arrays: dict[tuple[str, str], Any] = {}
        # For what is needed before tensors are filled: keys and versions, which hold none.
        self._plain = Decoder()
        self._decoder = Decoder(
            {
                "tensor": self._decode_tensor,
                "ndarray": self._decode_array,
                "generator": self._decode_generator,
                "module": self._decode_module,
                "optimizer": self._decode_optimizer,
                "stateful": self.decode,
                "per_rank": self._decode_per_rank,
            }
        )

    def decode(self, node: Node, path: Path) -> Any:
        """A node's value; every tensor that it refers to must be filled.

        Raises:
            FormatError: the node is not what a save writes.
            StateMismatchError: this program or machine cannot build the value.
        """
        return self._decoder.decode(node, path)

    def record(self, stored: Any, path: Path) -> TensorRecord:
        """What the index holds under a stored name or alias."""
        record = self._index.find(stored) if isinstance(stored, str) else None
        if record is None:
            raise FormatError(f"{key_path(path)}: the index does not hold the tensor {stored!r:.80}")
        return record

    def allocate(self, node: Node, path: Path) -> None:
        """Plan to fill new memory for every tensor that a node refers to."""
        for stored in self._references(node, path):
            record = self.record(stored, path)
            if record.name not in self.own:
                self.own[record.name] = _new_memory(record, path)
                # "=" starts no name of the caller's: it is escaped there.
                self._plan(f"={record.name}", self.own[record.name], record)

    def _references(self, node: Node, path: Path) -> list[Any]:
        found = []
        stack = [node]
        seen: set[str] = set()
        while stack:
            item = stack.pop()
            if type(item) is list:
                stack.extend(item)
            elif type(item) is dict:
                tag, payload = item.get("$"), item.get("v")
                if tag == "tensor":
                    found.append(payload)
                elif tag in ("ndarray", "generator") and type(payload) is list and len(payload) == 2:
                    found.append(payload[0] if tag == "ndarray" else payload[1])
                elif tag == "per_rank":
                    # Each once: a hostile document could let two of them refer to each other.
                    if isinstance(payload, str) and payload not in seen:
                        seen.add(payload)
                        if payload in self._rank_values:
                            stack.append(self._rank_values[payload])
                        else:
                            self._lacks(payload, path)
                else:
                    stack.append(payload)
        return found

    def _decode_tensor(self, payload: Node, path: Path) -> torch.Tensor:
        name = self.record(payload, path).name
        if name not in self.own:
            raise FormatError(f"{key_path(path)}: the tensor {name!r:.80} where no tensor can be")
        return self.own[name]

    def _decode_array(self, payload: Node, path: Path) -> Any:
        name, dtype = array_in_shard(payload)
        key = self.record(name, path).name, dtype
        # One array for one stored tensor: where its bytes must be swapped, a document that refers
        # to it a million times would else make a million copies.
        if key not in self._arrays:
            self._arrays[key] = array_of(self._decode_tensor(name, path), dtype)
        return self._arrays[key]

    def _decode_generator(self, payload: Node, path: Path) -> torch.Generator:
        state = self.generator_state(payload, path)
        device = payload[0]
        try:
            generator = torch.Generator(device)
        except RuntimeError as error:
            raise StateMismatchError(
                f"{key_path(path)}: a torch.Generator of {device!r:.40}, which this machine cannot make: "
                f"{error}"
            ) from None
        set_generator(generator, state)
        return generator

    def generator_state(self, payload: Node, path: Path) -> torch.Tensor:
        """The state that a stored `torch.Generator` had."""
        if type(payload) is not list or len(payload) != 2 or type(payload[0]) is not str:
            raise FormatError(f"{key_path(path)}: a generator without its two parts")
        return self._decode_tensor(payload[1], path)

    def _decode_module(self, payload: Node, path: Path) -> dict[str, Any]:
        stored, _ = self.module_nodes({"$": "module", "v": payload}, path)
        return {
            name: self.decode(node, (*path, *paths.from_dotted(name)))
            for name, node in (stored or {}).items()
        }

    def _decode_optimizer(self, payload: Node, path: Path) -> dict[str, Any]:
        groups_node, state_pairs, other_node, extra_node = optimizer_parts(payload, path)
        decode = self.decode
        state = OptimizerState(
            groups=self.named_groups(groups_node, path),
            state={pair[0]: decode(pair[1], (*path, "state", pair[0])) for pair in state_pairs},
            other_state=decode(other_node, path),
            extra=decode(extra_node, path),
        )
        try:
            return state.numbered()
        except (KeyError, TypeError) as error:
            raise FormatError(f"{key_path(path)}: state of a parameter that no group has ({error})") from None

    def _decode_per_rank(self, payload: Node, path: Path) -> Any:
        if type(payload) is not str:
            raise FormatError(f"{key_path(path)}: a value of one rank without a name")
        if payload not in self._rank_values:
            return self._lacks(payload, path)
        return self.decode(self._rank_values[payload], path)

    def groups(self, node: Node, path: Path) -> list[dict[str, Any]]:
        """An optimizer's parameter groups."""
        self.allocate(node, path)
        groups = self.decode(node, (*path, "param_groups"))
        is_sound = isinstance(groups, list) and all(
            isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
        )
        if not is_sound:
            raise FormatError(f"{key_path(path)}: parameter groups that are no list of dicts with 'params'")
        return list(groups)

    def named_groups(self, node: Node, path: Path) -> list[dict[str, Any]]:
        """As `groups`, where parameters go by name, which a save writes."""
        groups = self.groups(node, path)
        if not all(type(name) is str for group in groups for name in group["params"]):
            raise FormatError(f"{key_path(path)}: parameter groups whose parameters are not named")
        return groups

    def mapping_nodes(self, found: Node, path: Path) -> dict[Any, Node] | None:
        """A stored dict's nodes by key; None: it is none."""
        if payload_of(found, "module") is not None:
            # A module's tensors may go to a dict of them, as its state_dict() is one.
            return dict(self.module_nodes(found, path)[0] or {})
        pairs = mapping_pairs(found)
        if pairs is None:
            return None
        nodes: dict[Any, Node] = {}
        for key_node, value in pairs:
            key = self._plain.decode(key_node, path)
            try:
                nodes[key] = value
            except TypeError as error:
                raise FormatError(f"{key_path(path)}: a key that cannot be one: {error}") from None
        if len(nodes) != len(pairs):
            raise FormatError(f"{key_path(path)}: a dict with one key twice")
        return nodes

    def module_nodes(
        self, found: Node, path: Path
    ) -> tuple[dict[str, Node] | None, Mapping[str, Any] | None]:
        """A module's values by name, and its parts' versions; None for what is not there."""
        payload = payload_of(found, "module")
        if payload is None:
            # A state_dict() that was saved as plain values serves as well.
            nodes = self.mapping_nodes(found, path)
            if nodes is None or not all(isinstance(key, str) for key in nodes):
                return None, None
            return nodes, self._plain_versions(found, path)
        if type(payload) is not list or not payload or not all(map(is_named_pair, payload[1:])):
            raise FormatError(f"{key_path(path)}: a module that is no list of versions and named values")
        versions = self._plain.decode(payload[0], path)
        if not isinstance(versions, dict):
            raise FormatError(f"{key_path(path)}: a module whose versions are no dict")
        values = dict(payload[1:])
        if len(values) != len(payload) - 1:
            raise FormatError(f"{key_path(path)}: a module with one name twice")
        return values, versions

    def _plain_versions(self, found: Node, path: Path) -> Mapping[str, Any] | None:
        """The versions that torch's ``state_dict()`` carries in an attribute, where they were kept."""
        payload = payload_of(found, "ordered_dict")
        attributes = payload[0] if type(payload) is list and payload else None
        for pair in attributes if type(attributes) is list else ():
            if is_named_pair(pair) and pair[0] == "_metadata":
                versions = self._plain.decode(pair[1], path)
                return versions if isinstance(versions, Mapping) else None
        return None


def _new_memory(record: TensorRecord, path: Path) -> torch.Tensor:
    """Host memory for a stored tensor, whatever the program's default device is."""
    try:
        return torch.empty(record.shape, dtype=torch_dtype(record.dtype), device="cpu")
    except RuntimeError as error:
        raise StateMismatchError(
            f"{key_path(path)}: the checkpoint holds {record.size_bytes} bytes here, for which this "
            f"machine has no memory ({error!s:.120})"
        ) from None


def set_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    """Give a generator a stored state; FormatError where it is none."""
    try:
        generator.set_state(state)
    except (RuntimeError, TypeError) as error:
        raise FormatError(f"the state of a torch.Generator is not one: {error}") from None
