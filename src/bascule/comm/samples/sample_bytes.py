"""Samples as bytes: a typed header, then the arrays as they lie in memory. No pickle.

A sample is a dict, tuple or list of tensors, numpy arrays and plain values (strings, numbers,
booleans, None), nested at will. Its header is JSON: the shape of the nest, the plain values, and
type and shape of each array. So what arrives can be read without running any code of the sender.

A sample that moves must not differ from one that stays, or a batch would depend on who loaded what.
So each type either arrives as what it was, or is refused on every rank, also where nothing moves:
`parcel` is made of every sample that is loaded. Exactly these types travel; what is derived from
them is refused, with the plain value to give in its place. What arrives is equal in

* types, at every depth, the order of keys included;
* dtypes (byte order included), shapes, and every bit of the values;
* strides, as `clone()` and `copy(order="K")` keep them: images that are views with their channels
  first or last stay so. What has gaps or overlaps (a slice, an expanded tensor) is dense then.

Not part of a sample are: whether two of its tensors share memory, whether memory is pinned, shared
or read-only, attributes that somebody hung on a tensor, and whether complex numbers wait to be
conjugated. Tensors that require a gradient are refused: it would be that of a copy on another rank.
"""

import json
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bascule.errors import ConfigError

ALIGNMENT = 16
"""Bytes to whose multiples samples and arrays are padded: the widest element, complex128."""

MAX_DEPTH = 64
"""Of nested values; deeper ones could end the interpreter's stack on the rank that reads them."""

_LENGTH = struct.Struct("<I")
_HOST = torch.device("cpu")
_PLAIN = (str, int, float, bool, type(None))
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_MAPPINGS: dict[str, type[dict[str, Any]]] = {"d": dict, "o": OrderedDict}


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


def parcel(sample: object, device: torch.device = _HOST) -> Parcel:
    """What a sample looks like on the wire. Copies nothing but arrays that are not contiguous.

    Args:
        sample: What travels.
        device: Where its tensors may be besides the host.

    Raises:
        ConfigError: A value would not arrive as what it is; names its place in the sample.
    """
    arrays: list[Tensor] = []
    described = _describe(sample, "sample", arrays, device)
    # Not ASCII: its escapes of two lone surrogates would arrive as one character.
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False)
    header = bytearray(text.encode(errors="surrogatepass"))
    header[:0] = _LENGTH.pack(len(header))
    parts = (torch.frombuffer(header, dtype=torch.uint8), *arrays)
    return Parcel(parts, sum(_padded(part.numel()) for part in parts))


def read(buffer: Tensor) -> Any:
    """The sample that `Parcel.write` wrote. Its tensors are views of the buffer.

    Args:
        buffer: uint8, at a multiple of `ALIGNMENT` of its storage; what is no tensor of torch is
            copied from there to the host.
    """
    (length,) = _LENGTH.unpack(buffer[: _LENGTH.size].numpy(force=True).tobytes())
    text = buffer[_LENGTH.size : _LENGTH.size + length].numpy(force=True).tobytes()
    reader = _Reader(buffer, _padded(_LENGTH.size + length))
    return reader.build(json.loads(text.decode(errors="surrogatepass")))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _describe(
    value: object, place: str, arrays: list[Tensor], device: torch.device, depth: int = 0
) -> list[Any]:
    """One letter that says what a value is, and what is needed to build it again."""
    kind = type(value)
    if isinstance(value, Tensor):
        return _describe_tensor(value, place, arrays, device)
    if kind is np.ndarray:
        assert isinstance(value, np.ndarray)
        return _describe_array(value, place, arrays)
    if isinstance(value, np.generic):
        return _describe_scalar(value, place, arrays)
    if kind is bytes:
        assert isinstance(value, bytes)
        return ["b", _add_bytes(value, arrays)]
    if kind in _PLAIN:
        return ["v", value]
    if depth == MAX_DEPTH:
        raise ConfigError(f"{place} is nested deeper than {MAX_DEPTH} levels: give it flat")
    within = arrays, device, depth + 1
    if kind in (dict, OrderedDict):
        assert isinstance(value, dict)
        _check_keys(value, place)
        items = value.items()
        parts = {k: _describe(v, f"{place}[{k!r}]", *within) for k, v in items}
        return ["d" if kind is dict else "o", parts]
    if kind in (list, tuple):
        assert isinstance(value, list | tuple)
        numbers = _as_numbers(value)
        if numbers is not None:
            arrays.append(torch.from_numpy(numbers.view(np.uint8)))
            return ["n", numbers.dtype.str, len(value), kind is list]
        parts = [_describe(v, f"{place}[{i}]", *within) for i, v in enumerate(value)]
        return ["l" if kind is list else "u", parts]
    raise _refusal(value, place)


def _describe_tensor(
    tensor: Tensor, place: str, arrays: list[Tensor], device: torch.device
) -> list[Any]:
    is_dense = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    if tensor.device.type not in ("cpu", device.type) or not is_dense:
        form = "nested" if tensor.is_nested else str(tensor.layout)
        fix = "the CPU; move them to a device after the loader"
        raise ConfigError(
            f"{place} is a {form} tensor on {tensor.device}: samples hold dense tensors on "
            f"{fix if device.type == 'cpu' else f'the CPU or on {device}'}"
        )
    if type(tensor) is not Tensor:
        raise _refusal(tensor, place)
    if tensor.requires_grad:
        raise ConfigError(
            f"{place} requires a gradient, which would be that of a copy where the sample moves: "
            "give detach() of it"
        )
    dense = tensor.resolve_conj().resolve_neg()
    dense = dense if dense.is_contiguous() else dense.clone()
    strides = None if dense.is_contiguous() else list(dense.stride())
    if dense.numel():
        arrays.append(dense.as_strided((dense.numel(),), (1,)).view(torch.uint8))
    return ["t", str(tensor.dtype).removeprefix("torch."), list(tensor.shape), strides]


def _describe_array(array: np.ndarray, place: str, arrays: list[Tensor]) -> list[Any]:
    _check_dtype(array.dtype, place)
    dense = array if array.flags.c_contiguous else array.copy(order="K")
    strides = None if dense.flags.c_contiguous else list(dense.strides)
    if array.nbytes:
        flat = dense.ravel(order="K").view(np.uint8)
        arrays.append(torch.from_numpy(flat if flat.flags.writeable else flat.copy()))
    return ["a", array.dtype.str, list(array.shape), strides]


def _describe_scalar(value: np.generic, place: str, arrays: list[Tensor]) -> list[Any]:
    # Arrays of strings do not keep the zeros at their ends, nor does numpy's own str().
    if type(value) is np.str_:
        return ["s", str.__str__(value)]
    if type(value) is np.bytes_:
        return ["z", _add_bytes(bytes(value), arrays)]
    if type(value) is not value.dtype.type:
        raise _refusal(value, place)
    _check_dtype(value.dtype, place)
    _add_bytes(value.tobytes(), arrays)
    return ["g", value.dtype.str]


def _add_bytes(value: bytes, arrays: list[Tensor]) -> int:
    """Send these bytes; their number."""
    if value:
        arrays.append(torch.frombuffer(bytearray(value), dtype=torch.uint8))
    return len(value)


def _as_numbers(values: Sequence[object]) -> np.ndarray | None:
    """Many numbers of one type as an array, which is a thousand times faster than text."""
    types = set(map(type, values))
    if types != {int} and types != {float}:
        return None
    try:
        return np.array(values, dtype=np.int64 if types == {int} else np.float64)
    except OverflowError:  # integers beyond 64 bits are text
        return None


def _check_keys(value: Mapping[Any, object], place: str) -> None:
    for key in value:
        if type(key) is not str:
            raise ConfigError(f"{place} has the key {key!r}: keys of samples are strings")


def _check_dtype(dtype: np.dtype[Any], place: str) -> None:
    """Refuse dtypes that their name does not say: objects, fields, those of other packages."""
    try:
        named = np.dtype(dtype.str)
    except TypeError:
        named = None
    is_named = named == dtype and named is not None and named.char == dtype.char
    if dtype.hasobject or dtype.names is not None or not is_named:
        raise ConfigError(
            f"{place}: an array of {dtype} cannot travel; use a plain dtype of numbers"
        )


def _refusal(value: object, place: str) -> ConfigError:
    """Why a value cannot travel, and what to give in its place."""
    name = type(value).__name__
    return ConfigError(f"{place} is a {name}, which would not arrive as one: {_advice(value)}")


def _advice(value: object) -> str:
    plain = next((k for k in (bool, int, float, str, bytes, list) if isinstance(value, k)), None)
    if isinstance(value, torch.nn.Parameter):
        return "give detach() of it"
    if isinstance(value, Tensor):
        return "give as_subclass(torch.Tensor) of it"
    if isinstance(value, np.ma.MaskedArray):
        return "give data and mask apart"
    if isinstance(value, np.ndarray):
        return "give numpy.asarray of it"
    if isinstance(value, np.generic):
        return "give item() of it"
    if isinstance(value, Mapping):
        return "give dict(..) of it"
    if isinstance(value, Enum):
        return "give its name or value"
    if isinstance(value, tuple):
        return "give tuple(..) of it, or a dict"
    if plain is not None:
        return f"give {plain.__name__}(..) of it"
    return "give tensors, arrays, strings, numbers, booleans or None, in dicts, lists or tuples"


class _Reader:
    """Takes arrays off a buffer, one after the other, while it builds what the header says."""

    def __init__(self, buffer: Tensor, start: int) -> None:
        self._buffer = buffer
        self._next = start

    def build(self, described: Sequence[Any]) -> Any:
        kind = described[0]
        if kind == "v":
            return described[1]
        if kind in _MAPPINGS:
            parts = ((key, self.build(part)) for key, part in described[1].items())
            return _MAPPINGS[kind](parts)
        if kind in "lu":
            parts = [self.build(part) for part in described[1]]
            return parts if kind == "l" else tuple(parts)
        if kind == "t":
            return self._tensor(_DTYPES[described[1]], *described[2:])
        if kind == "a":
            return self._array(np.dtype(described[1]), *described[2:])
        if kind == "g":
            return self._array(np.dtype(described[1]), [], None)[()]
        if kind == "n":
            numbers = self._array(np.dtype(described[1]), [described[2]], None).tolist()
            return numbers if described[3] else tuple(numbers)
        if kind == "s":
            return np.str_(described[1])
        taken = self._take(described[1]).numpy(force=True).tobytes()
        return taken if kind == "b" else np.bytes_(taken)

    def _tensor(
        self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None
    ) -> Tensor:
        taken = self._take(torch.Size(shape).numel() * dtype.itemsize).view(dtype)
        return taken.view(shape) if strides is None else taken.as_strided(shape, strides)

    def _array(
        self, dtype: np.dtype[Any], shape: Sequence[int], strides: Sequence[int] | None
    ) -> np.ndarray:
        taken = self._take(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        return np.ndarray(shape, dtype, taken.numpy(force=True).data, strides=strides)

    def _take(self, num_bytes: int) -> Tensor:
        taken = self._buffer[self._next : self._next + num_bytes]
        self._next += _padded(num_bytes)
        return taken
