"""NumPy in a checkpoint: scalars and small or unusual arrays in typed JSON, numeric arrays as the
tensors that a shard stores. `docs/format.md`, clause 8.

An array comes back C-ordered, with the same dtype (byte order included), shape and bits.
Arrays of objects are refused: their bytes are addresses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from strongroom.atoms import (
    Atom,
    MalformedError,
    Node,
    RefusedError,
    UnavailableError,
    bytes_text,
    integers,
    node,
    text_bytes,
    text_node,
    text_of,
)

if TYPE_CHECKING:
    import torch

__all__ = ["ARRAY_TAGS", "array_atom", "array_in_shard", "array_node", "array_of"]

Array = npt.NDArray[Any]

_DTYPE: Final = re.compile(
    r"[|<>](?:[biufc][0-9]{1,2}|[SUV][0-9]{1,10}|[mM]8(?:\[(?:[1-9][0-9]{0,9})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
)
_MAX_DIMENSIONS: Final = 64
"""NumPy's own bound (32 before NumPy 2)."""

_IN_SHARDS: Final = re.compile(r"\|[biu]1|[<>](?:[iu][248]|f[248]|c8|c16)")

_LONG_DOUBLE: Final = np.dtype(np.longdouble).str
_LONG_COMPLEX: Final = np.dtype(np.clongdouble).str
_HAS_X87: Final = np.finfo(np.longdouble).nmant == 63
"""x86's long double: 80 bits in 16 bytes. Elsewhere the same dtype string means another format."""
_X87_BYTES: Final = 10


def array_node(array: Array, store: Callable[[torch.Tensor], str]) -> Node | None:
    """The node of an array whose items a shard stores as a tensor.

    The tensor is C-ordered, of native byte order and of a dtype that shards carry; a complex
    array gains a last dimension of 2. It shares the array's memory wherever it can.

    Args:
        array: any array, or object of a subclass.
        store: takes the tensor, and returns the name that it is stored under.

    Returns:
        None where the array belongs in typed JSON (dates, strings, structures, long doubles)
        or cannot be stored at all, which encoding it there says.
    """
    dtype = array.dtype.str
    # A subclass may hold more than its items, a mask for one.
    if type(array) is not np.ndarray or not _IN_SHARDS.fullmatch(dtype):
        return None
    import torch

    packed = np.asarray(array, order="C")
    # A long long is an int64 that torch does not know by that name.
    packed = packed.astype(np.dtype(dtype).newbyteorder("="), copy=False)
    if packed.dtype.kind == "c":
        packed = packed.reshape(*packed.shape, 1).view(packed.real.dtype)
    if not packed.flags.writeable or min(packed.strides, default=0) < 0:
        # torch warns of the former, and refuses the latter (one item reversed is still C-ordered).
        packed = packed.copy()
    return node("ndarray", [text_node(store(torch.from_numpy(packed))), dtype])


def array_in_shard(payload: Node) -> tuple[str, str]:
    """The tensor's name and the dtype from the payload of `array_node`.

    Raises:
        MalformedError: it is not such a payload.
    """
    try:
        name, dtype = payload
        name = text_of(name)
        if type(dtype) is not str or not _IN_SHARDS.fullmatch(dtype):
            raise ValueError(f"{dtype!r:.40} is not the dtype of an array in a shard")
    except (ValueError, TypeError) as error:
        raise MalformedError(f"not an ndarray: {payload!r:.80} ({error})") from None
    return name, dtype


def array_of(tensor: torch.Tensor, dtype: str) -> Array:
    """The array whose tensor and dtype these are; shares the tensor's memory wherever it can.

    Raises:
        MalformedError: the tensor does not hold an array of this dtype.
    """
    packed: Array = tensor.numpy()
    native = np.dtype(dtype).newbyteorder("=")
    is_complex = native.kind == "c"
    item = np.dtype(f"f{native.itemsize // 2}") if is_complex else native
    if packed.dtype != item or (is_complex and packed.shape[-1:] != (2,)):
        raise MalformedError(f"a tensor of {packed.dtype} and shape {packed.shape} does not hold {dtype}")
    if is_complex:
        packed = np.asarray(packed, order="C").view(native).reshape(packed.shape[:-1])
    return packed.astype(dtype, copy=False)


def array_atom(cls: type) -> Atom | None:
    """The atom of NumPy's array or scalar types."""
    if cls is np.ndarray:
        return _ARRAY
    if cls is np.str_:
        return _STR
    if cls is np.bytes_:
        return _BYTES
    return _SCALAR if issubclass(cls, np.generic) else None


def _write_dtype(dtype: np.dtype[Any]) -> Node:
    """A dtype's string, or the list of a structure's ``[name, dtype, shape]``."""
    if dtype.hasobject:
        raise RefusedError("a NumPy array of Python objects; store .tolist() of it, or an array of numbers")
    if dtype.itemsize == 0:
        raise RefusedError(f"a NumPy value of {dtype}, whose items have no bytes")
    if _HAS_X87 and dtype.str in {_LONG_DOUBLE, _LONG_COMPLEX}:
        return f"x87:{dtype.str}"
    written: Node = dtype.str
    if dtype.names is not None:
        fields: Mapping[str, Any] = dtype.fields or {}
        written = [
            [text_node(name), _write_dtype(fields[name][0].base), list(fields[name][0].shape)]
            for name in dtype.names
        ]
    try:
        rebuilt = _read_dtype(written, inside=True)
    except (ValueError, TypeError, MalformedError, UnavailableError):
        rebuilt = None
    # A record array, a foreign dtype (bfloat16) or padding between fields does not come out again.
    if rebuilt != dtype or (dtype.kind == "V" and rebuilt.type is not dtype.type):
        raise RefusedError(
            f"a NumPy value of dtype {dtype!r:.120}, which has no safe encoding; convert it first"
        )
    return written


def _read_dtype(written: Node, *, inside: bool = False) -> np.dtype[Any]:
    if type(written) is list:
        fields = [
            (text_of(name), _read_dtype(field, inside=True), tuple(integers(shape)))
            for name, field, shape in written
        ]
        return np.dtype(fields)
    text = text_of(written)
    has_x87 = text.startswith("x87:")
    text = text.removeprefix("x87:")
    if not _DTYPE.fullmatch(text) or (has_x87 and inside):
        raise ValueError("not a dtype that is stored")
    try:
        dtype = np.dtype(text)
    except TypeError:
        raise UnavailableError(f"NumPy has no dtype {text!r} on this machine") from None
    if has_x87 != (_HAS_X87 and dtype.str in {_LONG_DOUBLE, _LONG_COMPLEX}):
        raise UnavailableError(f"{written!r} is a long double of another kind of machine")
    return dtype


def _write_items(array: Array) -> str:
    data = array.tobytes()
    if _HAS_X87 and array.dtype.str in {_LONG_DOUBLE, _LONG_COMPLEX}:
        # The six bytes that pad each item hold whatever the memory held.
        items = np.frombuffer(bytearray(data), np.uint8).reshape(-1, 16)
        items[:, _X87_BYTES:] = 0
        data = items.tobytes()
    return bytes_text(data)


def _read_items(dtype: np.dtype[Any], shape: list[int], text: Node) -> Array:
    data = text_bytes(text)
    if dtype.itemsize == 0 or len(shape) > _MAX_DIMENSIONS or any(length < 0 for length in shape):
        raise ValueError("not the dtype or the shape of an array that is stored")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes do not fill {dtype} of shape {shape}")
    # Copied, so that the array owns its memory.
    return np.ndarray(shape, dtype, buffer=bytearray(data)).copy()


def _write_array(array: Array) -> Node:
    return [_write_dtype(array.dtype), list(array.shape), _write_items(array)]


def _read_array(payload: Node) -> Array:
    dtype, shape, items = payload
    return _read_items(_read_dtype(dtype), integers(shape), items)


def _write_scalar(scalar: Any) -> Node:
    if scalar.dtype.type is not type(scalar):
        raise RefusedError(f"a {type(scalar).__qualname__}, a subclass of a NumPy scalar; convert it first")
    return [_write_dtype(scalar.dtype), _write_items(np.asarray(scalar))]


def _read_scalar(payload: Node) -> Any:
    written, items = payload
    dtype = _read_dtype(written)
    if dtype.kind in "SU":
        raise ValueError("strings have tags of their own")
    return _read_items(dtype, [1], items)[0]


_ARRAY: Final = Atom("numpy.array", _write_array, _read_array)
_SCALAR: Final = Atom("numpy.scalar", _write_scalar, _read_scalar)
# As an array item a string would lose the NULs at its end, and so it would in str() of a str_.
_STR: Final = Atom(
    "numpy.str", lambda value: text_node(str.__str__(value)), lambda payload: np.str_(text_of(payload))
)
_BYTES: Final = Atom(
    "numpy.bytes", lambda value: bytes_text(bytes(value)), lambda payload: np.bytes_(text_bytes(payload))
)

ARRAY_TAGS: Final = {atom.tag: atom for atom in (_ARRAY, _SCALAR, _STR, _BYTES)}
