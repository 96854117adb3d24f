"""Samples as bytes: a typed header, then the tensors as they lie in memory. No pickle.

A sample is a dict, tuple or list of tensors, numpy arrays and plain values (strings, numbers,
booleans, None), nested at will. Its header is JSON: the shape of the nest, the plain values, and
type and shape of each array. So what arrives can be read without running any code of the sender.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bascule.errors import ConfigError

ALIGNMENT = 16
"""Bytes to whose multiples samples and arrays are padded: the widest element, complex128."""

_LENGTH = struct.Struct("<I")
_PLAIN = (str, int, float, bool, type(None))
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """A sample ready to be written.

    Attributes:
        parts: Header and arrays as flat bytes, in the order in which they travel.
        num_bytes: Their size with padding; a multiple of `ALIGNMENT`.
    """

    parts: tuple[Tensor, ...]
    num_bytes: int

    def write(self, buffer: Tensor) -> None:
        """Write into a uint8 tensor of `num_bytes`; what pads the parts stays as it is."""
        end = 0
        for part in self.parts:
            buffer[end : end + part.numel()] = part
            end += _padded(part.numel())


def parcel(sample: object) -> Parcel:
    """What a sample looks like on the wire. Copies nothing but arrays that are not contiguous.

    Raises:
        ConfigError: A value has no form on the wire; names its place in the sample.
    """
    arrays: list[Tensor] = []
    text = json.dumps(_describe(sample, "sample", arrays), separators=(",", ":")).encode()
    header = torch.frombuffer(bytearray(_LENGTH.pack(len(text)) + text), dtype=torch.uint8)
    parts = (header, *arrays)
    return Parcel(parts, sum(_padded(part.numel()) for part in parts))


def read(buffer: Tensor) -> Any:
    """The sample that `Parcel.write` wrote. Its tensors are views of the buffer.

    Args:
        buffer: uint8, at a multiple of `ALIGNMENT` of its storage.
    """
    (length,) = _LENGTH.unpack(buffer[: _LENGTH.size].numpy().tobytes())
    text = buffer[_LENGTH.size : _LENGTH.size + length].numpy().tobytes()
    reader = _Reader(buffer, _padded(_LENGTH.size + length))
    return reader.build(json.loads(text))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _describe(value: object, place: str, arrays: list[Tensor]) -> list[Any]:
    """One letter that says what a value is, and what is needed to build it again."""
    if isinstance(value, Tensor):
        arrays.append(_tensor_bytes(value, place))
        return ["t", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if isinstance(value, np.ndarray | np.generic):
        if isinstance(value, np.ma.MaskedArray):
            raise ConfigError(f"{place}: a masked array cannot travel; give data and mask apart")
        if value.dtype.hasobject or value.dtype.names is not None:
            raise ConfigError(f"{place}: an array of {value.dtype} cannot travel; use numbers")
        flat = np.frombuffer(bytearray(np.ascontiguousarray(value).tobytes()), dtype=np.uint8)
        arrays.append(torch.from_numpy(flat))
        kind = "a" if isinstance(value, np.ndarray) else "g"
        return [kind, value.dtype.str, list(value.shape)]
    if isinstance(value, bytes):
        arrays.append(torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else _NONE)
        return ["b", len(value)]
    if type(value) in _PLAIN:
        return ["v", value]
    if isinstance(value, Mapping):
        return ["d", _describe_items(value, place, arrays)]
    if type(value) in (list, tuple):
        assert isinstance(value, list | tuple)
        numbers = _as_numbers(value)
        if numbers is not None:
            arrays.append(torch.from_numpy(numbers.view(np.uint8)))
            return ["n", numbers.dtype.str, len(value), isinstance(value, list)]
        parts = [_describe(part, f"{place}[{i}]", arrays) for i, part in enumerate(value)]
        return ["l" if isinstance(value, list) else "u", parts]
    raise ConfigError(
        f"{place} is a {type(value).__name__}, which cannot travel: give tensors, arrays, strings, "
        "numbers, booleans or None, in dicts, lists or tuples"
    )


def _as_numbers(values: Sequence[object]) -> np.ndarray | None:
    """Many numbers of one type as an array, which is a thousand times faster than text."""
    types = set(map(type, values))
    if types != {int} and types != {float}:
        return None
    try:
        return np.array(values, dtype=np.int64 if types == {int} else np.float64)
    except OverflowError:  # integers beyond 64 bits are text
        return None


def _describe_items(
    value: Mapping[Any, object], place: str, arrays: list[Tensor]
) -> dict[str, Any]:
    for key in value:
        if type(key) is not str:
            raise ConfigError(f"{place} has the key {key!r}: keys of samples are strings")
    return {key: _describe(part, f"{place}[{key!r}]", arrays) for key, part in value.items()}


def _tensor_bytes(tensor: Tensor, place: str) -> Tensor:
    """(n,) uint8, the tensor's memory."""
    is_dense = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    if tensor.device.type != "cpu" or not is_dense:
        form = "nested" if tensor.is_nested else str(tensor.layout)
        raise ConfigError(
            f"{place} is a {form} tensor on {tensor.device}: samples hold dense tensors on the "
            "CPU; move them to a device after the loader"
        )
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.view(-1).view(torch.uint8) if dense.numel() else _NONE


_NONE = torch.empty(0, dtype=torch.uint8)


class _Reader:
    """Takes arrays off a buffer, one after the other, while it builds what the header says."""

    def __init__(self, buffer: Tensor, start: int) -> None:
        self._buffer = buffer
        self._next = start

    def build(self, described: Sequence[Any]) -> Any:
        kind = described[0]
        if kind == "v":
            return described[1]
        if kind == "d":
            return {key: self.build(part) for key, part in described[1].items()}
        if kind in "lu":
            parts = [self.build(part) for part in described[1]]
            return parts if kind == "l" else tuple(parts)
        if kind == "t":
            dtype, shape = _DTYPES[described[1]], described[2]
            count = torch.Size(shape).numel()
            return self._take(count * dtype.itemsize).view(dtype).view(shape)
        if kind == "b":
            return self._take(described[1]).numpy().tobytes()
        if kind == "n":
            numbers = self._take(8 * described[2]).numpy().view(described[1]).tolist()
            return numbers if described[3] else tuple(numbers)
        dtype, shape = np.dtype(described[1]), described[2]
        taken = self._take(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        array = taken.numpy().view(dtype).reshape(shape)
        return array if kind == "a" else array[()]

    def _take(self, num_bytes: int) -> Tensor:
        taken = self._buffer[self._next : self._next + num_bytes]
        self._next += _padded(num_bytes)
        return taken
