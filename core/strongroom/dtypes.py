"""Element types of stored tensors, by safetensors' names; torch is imported only when asked for.

Source of the names: the safetensors format (``Dtype`` in its reference implementation, 0.8).
A type that stock safetensors cannot open as a torch tensor is not stored: it is refused at save.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPE_BYTES", "DTYPE_CODES", "bytes_of", "dtype_name", "torch_dtype"]

DTYPE_BYTES: Final[dict[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E4M3FNUZ": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes of one element."""

DTYPE_CODES: Final = tuple(DTYPE_BYTES)
"""The index stores a type as its position here (`docs/format.md`, clause 7)."""

_TORCH_NAMES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}


@lru_cache(maxsize=1)
def _tables() -> tuple[dict[str, torch.dtype], dict[torch.dtype, str]]:
    import torch

    by_name = {name: getattr(torch, attribute) for name, attribute in _TORCH_NAMES.items()}
    return by_name, {dtype: name for name, dtype in by_name.items()}


def torch_dtype(name: str) -> torch.dtype:
    """torch's type for a name of `DTYPE_BYTES`."""
    return _tables()[0][name]


def dtype_name(dtype: torch.dtype) -> str | None:
    """The stored name of a torch type, or None where it cannot be carried."""
    return _tables()[1].get(dtype)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU that is neither a pending conjugate nor negation."""
    import torch

    # Not reshape: a tensor of one element counts as contiguous whatever its strides, and keeps them.
    data: memoryview = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
    return data
