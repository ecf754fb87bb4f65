"""The files of an export, before one is written: which tensor lies where, under which name. Pure.

Names, index and the unit of sizes are those of the Hugging Face hub (``model.safetensors.index.json``,
5GB = 5 x 10^9 bytes), so that its loaders take the folder as one of theirs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strongroom import tensorfile
from strongroom.columns import TensorRecord
from strongroom.dtypes import DTYPE_BYTES
from strongroom.errors import ConfigError, FormatError

__all__ = ["DEFAULT_SHARD_BYTES", "INDEX_NAME", "PlannedFile", "index_document", "parse_size", "plan_files"]

DEFAULT_SHARD_BYTES: Final = 5 * 10**9

INDEX_NAME: Final = "model.safetensors.index.json"

_UNITS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE: Final = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,6}))? ?([A-Za-z]{0,3})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """One safetensors file.

    Attributes:
        name: of the file.
        tensors: names and tensors in the order of their bytes.
        header: the file's bytes before the first tensor's.
    """

    name: str
    tensors: tuple[tuple[str, TensorRecord], ...]
    header: bytes

    @property
    def data_bytes(self) -> int:
        """What its tensors take."""
        return sum(record.size_bytes for _, record in self.tensors)


def parse_size(text: str) -> int:
    """Bytes in a size such as ``5GB`` (5 x 10^9), ``512MiB`` (512 x 2^20) or ``1000000``.

    Raises:
        ConfigError: it is none, or it is 0.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[3].upper()) if found is not None else None
    if found is None or unit is None:
        raise ConfigError(f"{text!r:.40} is no size: write a number and a unit, as in 5GB, 512MiB or 1000000")
    fraction = found[2] or ""
    size = int(found[1] + fraction) * unit // int(10 ** len(fraction))
    if size < 1:
        raise ConfigError(f"{text!r:.40} is no size that a file can have")
    return size


def plan_files(
    tensors: Mapping[str, TensorRecord], tied: Mapping[str, str], max_bytes: int
) -> tuple[PlannedFile, ...]:
    """Divide tensors over files of at most ``max_bytes`` of tensors, in their order.

    A tensor that is larger has a file of its own.

    Args:
        tensors: by name.
        tied: further names of these, told in the header of the file that the tensor lies in, as
            ``safetensors.torch.save_model`` does it.

    Raises:
        ConfigError: a header would be longer than readers accept.
    """
    groups = list(_divided(tensors, max_bytes))
    if len(groups) == 1:
        return (_planned("model.safetensors", groups[0], tensors, tied),)
    count = len(groups)
    return tuple(
        _planned(f"model-{number:05d}-of-{count:05d}.safetensors", group, tensors, tied)
        for number, group in enumerate(groups, 1)
    )


def _divided(tensors: Mapping[str, TensorRecord], max_bytes: int) -> Iterator[list[str]]:
    group: list[str] = []
    group_bytes = 0
    for name, record in tensors.items():
        size = record.size_bytes
        if size > max_bytes:
            yield [name]
            continue
        if group and group_bytes + size > max_bytes:
            yield group
            group, group_bytes = [], 0
        group.append(name)
        group_bytes += size
    if group:
        yield group


def _planned(
    name: str, group: Sequence[str], tensors: Mapping[str, TensorRecord], tied: Mapping[str, str]
) -> PlannedFile:
    members = set(group)
    # The format's own member comes last: what a model calls a tensor must not replace it.
    metadata = {alias: kept for alias, kept in tied.items() if kept in members} | {"format": "pt"}
    # Wider elements first: none is misaligned then.
    ordered = sorted(group, key=lambda tensor: -DTYPE_BYTES[tensors[tensor].dtype])
    described = [(tensor, tensors[tensor].dtype, tensors[tensor].shape) for tensor in ordered]
    try:
        header, _ = tensorfile.build_header(described, metadata)
    except FormatError as error:
        raise ConfigError(f"{name} cannot be written: {error}; choose a smaller size for one file") from None
    return PlannedFile(
        name=name, tensors=tuple((tensor, tensors[tensor]) for tensor in ordered), header=header
    )


def index_document(files: Sequence[PlannedFile]) -> bytes:
    """``model.safetensors.index.json``: which file each tensor lies in."""
    document = {
        "metadata": {"total_size": sum(file.data_bytes for file in files)},
        "weight_map": {name: file.name for file in files for name, _ in file.tensors},
    }
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=True) + "\n").encode("ascii")
