"""Items between ranks: nested values as bytes, in one all-to-all, and their gradients back.

An item is a dict, tuple or list of tensors, numpy arrays and plain values, nested at will. As a
parcel it is a header in JSON (nest, plain values, type and shape of each array) and then its arrays
as they lie in memory: no pickle, so reading runs no code of the sender.

An item that moves must equal one that stays: in types, order of keys, dtypes, shapes, bits, and
strides as `clone()` keeps them. All else is refused on every rank, also where nothing moves. Not
preserved: sharing, pinning, read-only flags, padding between values, attributes of a tensor.
"""

import dataclasses
import itertools
import json
import struct
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bascule.arrays import Ints, Ranks
from bascule.comm.collectives import all_gather, start_all_to_all
from bascule.comm.groups import RankGroup
from bascule.comm.route import has_gradient
from bascule.comm.transforms import refuse_transforms
from bascule.errors import ConfigError


def mapped(
    nest: Any,
    change: Callable[[Any], Any],
    is_leaf: Callable[[Any], bool] = lambda nest: isinstance(nest, Tensor),
) -> Any:
    """Return a copy of a nest with `change` applied to its leaves, by default its tensors.

    Nests are dicts, lists, (named) tuples, dataclasses, and distributions of diffusers; the latter
    are made from their `parameters`.
    """
    if is_leaf(nest):
        return change(nest)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        fields = [field.name for field in dataclasses.fields(nest) if field.init]
        changed = {name: mapped(getattr(nest, name), change, is_leaf) for name in fields}
        return dataclasses.replace(nest, **changed)
    make: Any = type(nest)
    if isinstance(nest, Mapping):
        changed = {key: mapped(value, change, is_leaf) for key, value in nest.items()}
        is_filling = isinstance(nest, defaultdict)
        return make(nest.default_factory, changed) if is_filling else make(changed)
    if isinstance(nest, tuple | list):
        parts = [mapped(value, change, is_leaf) for value in nest]
        return make(*parts) if hasattr(nest, "_fields") else make(parts)
    parameters: Any = getattr(nest, "parameters", None)
    if isinstance(parameters, Tensor) and hasattr(nest, "deterministic"):
        return make(change(parameters), deterministic=nest.deterministic)  # pyright: ignore
    return nest


def leaves_of(nest: Any) -> list[Tensor]:
    """Return the tensors of a nest, in the order of `mapped`."""
    leaves: list[Tensor] = []
    mapped(nest, lambda leaf: leaves.append(leaf) or leaf)
    return leaves


def rebuilt(nest: Any, leaves: Iterator[Tensor]) -> Any:
    """Return the nest with its tensors replaced by `leaves`, in order."""
    return mapped(nest, lambda _: next(leaves))


def joined(nests: Sequence[Any]) -> Any:
    """Return one nest, each of whose tensors joins the tensors of all nests along dim 0."""
    columns = zip(*map(leaves_of, nests), strict=True)
    return rebuilt(nests[0], iter([torch.cat(column) for column in columns]))


ALIGNMENT = 16
"""Samples and arrays are padded to multiples of these bytes: those of complex128, the widest."""

MAX_DEPTH = 64
"""Most levels of nesting: more could overflow the interpreter's stack on the rank that reads."""

_LENGTH = struct.Struct("<I")
HOST = torch.device("cpu")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_NESTS = {"d": dict, "o": OrderedDict, "l": list, "u": tuple}
_LETTERS = {nest: letter for letter, nest in _NESTS.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """An item ready to be written."""

    parts: Sequence[Tensor]  # header and arrays as flat bytes
    starts: Sequence[int]  # of the parts, in the bytes of the parcel
    num_bytes: int  # with padding, a multiple of `ALIGNMENT`

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> "Parcel":
        """Lay the parts out one after the other, each at a multiple of `ALIGNMENT`."""
        sizes = [part.numel() + -part.numel() % ALIGNMENT for part in parts]
        *starts, end = itertools.accumulate(sizes, initial=0)
        return cls(parts, starts, end)

    def write(self, buffer: Tensor) -> None:
        """Write into a uint8 tensor of `num_bytes`, all but the padding."""
        for start, part in zip(self.starts, self.parts, strict=True):
            buffer[start : start + part.numel()] = part


def parcel(sample: object, device: torch.device = HOST) -> Parcel:
    """Return a sample as a parcel; only arrays that are not contiguous are copied."""
    writer = _Writer(device)
    described = writer.describe(sample, "sample", 0)
    # Not ASCII: its escapes of two lone surrogates would arrive as one character.
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False)
    header = bytearray(text.encode(errors="surrogatepass"))
    header[:0] = _LENGTH.pack(len(header))
    return Parcel.of([torch.frombuffer(header, dtype=torch.uint8), *writer.arrays])


def read(buffer: Tensor) -> Any:
    """Return the sample that `Parcel.write` wrote. Its tensors are views of the uint8 buffer.

    The buffer begins at a multiple of `ALIGNMENT`. Values but for tensors are copied to the host.
    """
    reader = _Reader(buffer)
    (length,) = _LENGTH.unpack(reader.bytes(_LENGTH.size, pads=False))
    text = reader.bytes(length)
    return reader.build(json.loads(text.decode(errors="surrogatepass")))


class _Writer:
    """A writer of headers: each value becomes a letter for its type and parts; arrays are bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.arrays: list[Tensor] = []

    def describe(self, value: Any, path: str, depth: int) -> list[Any]:
        kind = type(value)
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if kind is np.ndarray:
            return self._array(value, path)
        if isinstance(value, np.generic):
            return self._scalar(value, path)
        if kind is bytes:
            return self._bytes(value)
        if kind in (str, int, float, bool, type(None)):
            return ["v", value]
        if kind not in _LETTERS:
            raise _refusal(value, path)
        if depth == MAX_DEPTH:
            raise ConfigError(f"{path} is nested deeper than {MAX_DEPTH} levels: flatten it")
        if isinstance(value, dict):
            for key in value:
                if type(key) is not str:
                    raise ConfigError(f"{path} has the key {key!r}: give keys that are strings")
            items = value.items()
            parts = {k: self.describe(v, f"{path}[{k!r}]", depth + 1) for k, v in items}
            return [_LETTERS[kind], parts]
        numbers = _as_numbers(value)
        if numbers is not None:
            return ["n", _LETTERS[kind], self._array(numbers, path)]
        parts = [self.describe(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
        return [_LETTERS[kind], parts]

    def _tensor(self, tensor: Tensor, path: str) -> list[Any]:
        is_near = tensor.device.type in ("cpu", self.device.type)
        is_odd = tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized
        if is_odd or not is_near:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            is_host = self.device.type == "cpu"
            fix = "; move them to a device after the loader" if is_host else f" or on {self.device}"
            wrong = f"{path} is a {kind} tensor on {tensor.device}"
            raise ConfigError(f"{wrong}: samples hold dense tensors on the CPU{fix}")
        if tensor.requires_grad:
            wrong = f"{path} requires a gradient, and samples carry none between ranks"
            raise ConfigError(f"{wrong}: give token ids, compute it within the model, or detach it")
        if type(tensor) is not Tensor:
            raise _refusal(tensor, path)
        dense = tensor.resolve_conj().resolve_neg()
        dense = dense if dense.is_contiguous() else dense.clone()
        strides = None if dense.is_contiguous() else list(dense.stride())
        if dense.numel():
            self.arrays.append(dense.as_strided((dense.numel(),), (1,)).view(torch.uint8))
        return ["t", str(tensor.dtype).removeprefix("torch."), list(tensor.shape), strides]

    def _array(self, array: np.ndarray, path: str) -> list[Any]:
        """Refuse dtypes that a name does not define: objects, fields, dtypes of other packages."""
        dtype = array.dtype
        try:
            named = np.dtype(dtype.str)
        except TypeError:
            named = np.dtype(object)
        if dtype.hasobject or dtype.names or named != dtype or named.char != dtype.char:
            raise ConfigError(
                f"{path}: an array of {dtype} cannot be sent to other ranks: use numbers"
            )
        dense = array if array.flags.c_contiguous else array.copy(order="K")
        strides = None if dense.flags.c_contiguous else list(dense.strides)
        if array.nbytes:
            flat = dense.ravel(order="K").view(np.uint8)
            self.arrays.append(torch.from_numpy(flat if flat.flags.writeable else flat.copy()))
        return ["a", dtype.str, list(array.shape), strides]

    def _scalar(self, value: np.generic, path: str) -> list[Any]:
        # Arrays of strings do not keep the zeros at their ends, nor does numpy's own str().
        if type(value) is np.str_:
            return ["s", str.__str__(value)]
        if type(value) is np.bytes_:
            return ["z", self._bytes(bytes(value))]
        if type(value) is not value.dtype.type:
            raise _refusal(value, path)
        return ["g", self._array(np.asarray(value), path)]

    def _bytes(self, value: bytes) -> list[Any]:
        if value:
            self.arrays.append(torch.frombuffer(bytearray(value), dtype=torch.uint8))
        return ["b", len(value)]


def _as_numbers(values: Sequence[object]) -> np.ndarray | None:
    """Return many numbers of one type as an array, which is a thousand times faster than text."""
    types = set(map(type, values))
    if types != {int} and types != {float}:
        return None
    try:
        return np.array(values, dtype=np.int64 if types == {int} else np.float64)
    except OverflowError:  # integers beyond 64 bits are text
        return None


_ADVICE = (
    (torch.nn.Parameter, "give detach() of it"),
    (Tensor, "give as_subclass(torch.Tensor) of it"),
    (np.ma.MaskedArray, "give data and mask apart"),
    (np.ndarray, "give numpy.asarray of it"),
    (np.generic, "give item() of it"),
    (Mapping, "give dict(..) of it"),
    (Enum, "give its name or value"),
    (tuple, "give tuple(..) of it, or a dict"),
    *((kind, f"give {kind.__name__}(..) of it") for kind in (int, float, str, bytes, list)),
    (object, "give tensors, arrays, strings, numbers, booleans or None, in dicts, lists or tuples"),
)


def _refusal(value: object, path: str) -> ConfigError:
    """Return the error of a value that cannot travel, with what to give instead."""
    advice = next(text for kind, text in _ADVICE if isinstance(value, kind))
    return ConfigError(f"{path} is a {type(value).__name__}, and would not arrive as one: {advice}")


class _Reader:
    """A reader of parcels: builds the nest of a header from a buffer's arrays in turn."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer, self._next = buffer, 0

    def build(self, described: Sequence[Any]) -> Any:
        kind, *rest = described
        if kind in ("v", "s"):
            return rest[0] if kind == "v" else np.str_(rest[0])
        if kind in ("d", "o"):
            return _NESTS[kind]((key, self.build(part)) for key, part in rest[0].items())
        if kind in ("l", "u"):
            return _NESTS[kind](map(self.build, rest[0]))
        if kind == "t":
            return self._tensor(_DTYPES[rest[0]], *rest[1:])
        if kind == "a":
            return self._array(np.dtype(rest[0]), *rest[1:])
        if kind == "b":
            return self.bytes(rest[0])
        part = self.build(rest[-1])
        if kind == "n":
            return _NESTS[rest[0]](part.tolist())
        return part[()] if kind == "g" else np.bytes_(part)

    def bytes(self, num_bytes: int, *, pads: bool = True) -> bytes:
        """Take bytes to the host."""
        return self._take(num_bytes, pads).numpy(force=True).tobytes()

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

    def _take(self, num_bytes: int, pads: bool = True) -> Tensor:
        start, end = self._next, self._next + num_bytes
        self._next = end + -end % ALIGNMENT if pads else end
        return self._buffer[start:end]


@dataclass(frozen=True, slots=True, eq=False)
class ItemMove:
    """A list of n moved items, the same on all ranks, with an entry per rank that gets an item."""

    source: Ranks  # (n,) the rank that has each item
    dest: Ranks  # (n,) the rank that gets each item
    group: RankGroup
    device: torch.device
    step: int  # for errors, as the name
    name: str


def move_parcels(move: ItemMove, parcels: Sequence[Parcel], num_bytes: Ints) -> list[Tensor]:
    """Return the bytes of the items that arrive, in the order of the move; one all-to-all.

    `parcels` are sent by this rank; (n,) `num_bytes` must be right for items it sends or gets.
    """
    rank, size, device = move.group.rank, move.group.size, move.device
    sends, gets = move.source == rank, move.dest == rank
    starts, send_splits = _lay_out(move.dest[sends], num_bytes[sends], size)
    sent = torch.empty(sum(send_splits), dtype=torch.uint8, device=device)
    for packed, start in zip(parcels, starts, strict=True):
        packed.write(sent[start : start + packed.num_bytes])
    sizes = num_bytes[gets]
    starts, recv_splits = _lay_out(move.source[gets], sizes, size)
    received = torch.empty(sum(recv_splits), dtype=torch.uint8, device=device)
    call = f"step {move.step}: all_to_all ({move.name})"
    start_all_to_all(move.group, call, received, sent, recv_splits, send_splits)()
    pairs = zip(starts, sizes.tolist(), strict=True)
    return [received[start : start + size] for start, size in pairs]


def _lay_out(ranks: Ranks, num_bytes: Ints, num_ranks: int) -> tuple[list[int], list[int]]:
    """Return the first byte of each item, ordered by rank; and the bytes of each rank."""
    order = np.argsort(ranks, kind="stable")
    ends = np.empty_like(num_bytes)
    ends[order] = np.cumsum(num_bytes[order])
    splits = np.bincount(ranks, num_bytes, num_ranks).astype(np.int64)
    return (ends - num_bytes).tolist(), splits.tolist()


def move_items(move: ItemMove, parcels: Sequence[Parcel], num_bytes: Ints) -> list[Any]:
    """Return the items that arrive, without gradients; see `move_parcels`."""
    return [read(part) for part in move_parcels(move, parcels, num_bytes)]


def move_items_with_gradients(
    move: ItemMove, items: Sequence[Any], parcels: Sequence[Parcel], num_bytes: Ints, token: Tensor
) -> tuple[list[Any], Tensor]:
    """Move items; their gradients return to the items that were sent, in one all-to-all.

    `items` and `parcels` are what this rank sends. A rank takes part in the backward pass if its
    returned token or an item there gets a gradient. `token`, a scalar that requires a gradient,
    orders the backward pass: first users of the returned token, then this move, then the graph of
    `token`.
    """
    leaves = [leaf for item in items for leaf in leaves_of(item)]
    refuse_transforms(move.name, token, *leaves)
    counts = [len(leaves_of(item)) for item in items]
    arrived: list[Any] = []
    token, *received = _Moved.apply(move, parcels, num_bytes, counts, arrived, token, *leaves)
    flat = iter(received)
    return [rebuilt(item, flat) for item in arrived], token


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        move: ItemMove,
        parcels: Sequence[Parcel],
        num_bytes: Ints,
        counts: list[int],
        arrived: list[Any],
        token: Tensor,
        *leaves: Tensor,
    ) -> tuple[Tensor, ...]:
        # Copies, not views of the buffer: users may write into them.
        arrived += [mapped(item, torch.clone) for item in move_items(move, parcels, num_bytes)]
        flat = [leaves_of(item) for item in arrived]
        ctx.move, ctx.sent = move, list(map(_gradients_like, _runs(leaves, counts)))
        ctx.received = list(map(_gradients_like, flat))
        received = list(itertools.chain.from_iterable(flat))
        ctx.mark_non_differentiable(*(x for x in received if not has_gradient(x)))
        ctx.save_for_backward(token)
        return token.new_zeros(()), *received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        (token,) = ctx.saved_tensors
        there: ItemMove = ctx.move
        move = replace(there, source=there.dest, dest=there.source, name=f"{there.name} back")
        runs = _runs(grads[1:], list(map(len, ctx.received)))
        parcels = list(map(_of_gradients, runs, ctx.received))
        # All other sizes belong to items that neither leave this rank nor reach it.
        num_bytes = np.zeros(move.source.shape, np.int64)
        num_bytes[move.source == move.group.rank] = [packed.num_bytes for packed in parcels]
        num_bytes[move.dest == move.group.rank] = [_of_gradients(x, x).num_bytes for x in ctx.sent]
        parts = move_parcels(move, parcels, num_bytes)
        back = itertools.chain.from_iterable(map(_gradients, parts, ctx.sent))
        return None, None, None, None, None, torch.zeros_like(token), *back


def _gradients_like(leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Return meta tensors like the gradients of tensors; None for a tensor that has none."""
    return [torch.empty_like(x, device="meta") if has_gradient(x) else None for x in leaves]


def _of_gradients(grads: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> Parcel:
    """Return the wanted gradients of an item as a parcel; both sides know their sizes."""
    pairs = zip(grads, wanted, strict=True)
    sent = [x for x, like in pairs if x is not None and like is not None]
    return Parcel.of([x.contiguous().view(-1).view(torch.uint8) for x in sent])


def _gradients(buffer: Tensor, wanted: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradient of each tensor of an item, from bytes that `_of_gradients` wrote."""
    gradients, start = list[Tensor | None](), 0
    for like in wanted:
        num_bytes = 0 if like is None else like.nbytes
        part = buffer[start : start + num_bytes]
        gradients.append(None if like is None else part.view(like.dtype).view(like.shape))
        start += num_bytes + -num_bytes % ALIGNMENT
    return gradients


def _runs(values: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    """Split the values into runs of these lengths."""
    rest = iter(values)
    return [list(itertools.islice(rest, count)) for count in counts]


def tied(token: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Return the token; its backward pass also reaches these tensors, with zero gradients."""
    for x in tensors:
        token = token + x.reshape(-1)[:0].sum().to(token.dtype)
    return token


def attached(tensor: Tensor, token: Tensor) -> Tensor:
    """Return the tensor; its backward also runs the graph that made the token."""
    return _Attached.apply(tensor, token)


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, token: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        (token,) = ctx.saved_tensors
        return grads[0], torch.zeros_like(token)


_PROBE_BYTES = 1 << 20
_NUM_PROBES = 4


class ExchangeSpeed(NamedTuple):
    """Seconds that an all-to-all takes for a few bytes, and for each further byte of a rank."""

    launch_s: float
    byte_s: float


def measure_exchange(group: RankGroup) -> ExchangeSpeed:
    """Time all-to-alls of a byte and of a mebibyte per rank; rounded, so that runs agree."""
    share = -(-_PROBE_BYTES // group.size)
    few, many = (_slowest(group, num_bytes) for num_bytes in (1, share))
    return ExchangeSpeed(_power_of_two(few), _power_of_two(many / (share * group.size)))


def _slowest(group: RankGroup, num_bytes: int) -> float:
    """Return the seconds of the slowest rank for so many bytes to each rank; best of a few."""
    sent = torch.zeros(group.size * num_bytes, dtype=torch.uint8)
    best = torch.full((1,), np.inf, dtype=torch.float64)
    for _ in range(_NUM_PROBES):
        float(all_gather(group, "all_gather (measuring)", best).max())  # to begin together
        start = time.perf_counter()
        received, splits = torch.empty_like(sent), [num_bytes] * group.size
        start_all_to_all(group, "all_to_all (measuring)", received, sent, splits, splits)()
        best[0] = min(float(best), time.perf_counter() - start)
    return float(all_gather(group, "all_gather (measured)", best).max())


def _power_of_two(value: float) -> float:
    return float(2.0 ** np.ceil(np.log2(value)))
