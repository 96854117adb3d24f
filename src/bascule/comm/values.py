"""Short texts by which ranks compare values: weights, tensors, pictures, any arguments.

A digest sums the bits of a tensor, each word times a factor for its index, in integers that wrap
around. It is exact in any order, and the same on all devices.
"""

import hashlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PART = 2**22  # words that are summed at once
_ODD = 0x5851F42D4C957F2D  # a factor that mixes bits well
_SHOWN = 200  # characters shown of an object


def values_digest(module: nn.Module) -> str:
    """Digest names and values of parameters and buffers in memory; wait once per device."""
    tensors = in_memory(module)
    return _digest(f"{list(tensors)} {contents_of([*tensors.values()])}".encode())


def in_memory(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, without tensors that diffusers offloads to a disk.

    The module has uninitialised memory in their place.
    """
    hooks = (getattr(part, "_diffusers_hook", None) for part in module.modules())
    groups = (getattr(hook, "hooks", {}).get("group_offloading") for hook in hooks)
    on_disk = (getattr(getattr(hook, "group", None), "tensor_to_key", ()) for hook in groups)
    absent = {id(x) for tensors in on_disk for x in tensors}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: x for name, x in tensors.items() if id(x) not in absent}


def contents_of(tensors: Sequence[Tensor]) -> str:
    """Describe tensors by shapes and a digest of values; equal tensors give equal texts.

    The digest leaves out FSDP's shards, which differ between ranks, and meta tensors.
    """
    shapes = [tuple(x.shape) for x in tensors]
    # A sum of quantised weights would be quantised, too.
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        parts = [part for x in tensors for part in _plain(x)]
        most = min(_PART, 8 + max((x.nbytes for x in parts), default=0) // 8)
        numbers = {device: _places(most, device) for device in {x.device for x in parts}}
        sums = [_sum(x, numbers[x.device]) for x in parts]
        of_device = {
            device: iter(torch.stack([total for total in sums if total.device == device]).tolist())
            for device in numbers
        }
        values = [(str(x.dtype), next(of_device[x.device])) for x in parts]
    digest = _digest(repr((shapes, values)).encode())
    return f"shapes {shapes[:8]} of {len(shapes)} tensors with values {digest}"


def described(value: Any, around: tuple[int, ...] = ()) -> str:
    """Describe any value by its contents: tensors, arrays, pictures, nested containers, objects.

    Objects are read as pickle reads them. A value that has no pickle, such as a function or an open
    file, is described by its name or class, and a generator of torch by its device.
    """
    if isinstance(value, np.generic):
        value = value.tolist()
    if isinstance(value, int | float | complex | str | None):
        return repr(value)
    if isinstance(value, Tensor):
        return contents_of([value])
    if isinstance(value, torch.Generator):
        return f"a generator on {value.device.type}"
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value)} bytes {_digest(bytes(value))}"
    if id(value) in around:
        return "one around it"
    around = (*around, id(value))
    if isinstance(value, Mapping):
        return str(sorted((str(key), described(item, around)) for key, item in value.items()))
    if isinstance(value, list | tuple | AbstractSet):
        parts = [described(part, around) for part in value]
        return str(sorted(parts) if isinstance(value, AbstractSet) else parts)
    if hasattr(value, "__array_interface__"):  # arrays of numpy; pictures of PIL, by colours
        array, palette = np.asarray(value), getattr(value, "getpalette", lambda: None)()
        data = array.tolist() if array.dtype.hasobject else array.tobytes()
        kind = f"{getattr(value, 'mode', 'array')} {array.dtype} {array.shape}"
        return f"{kind} with values {described((data, palette and bytes(palette)), around)}"
    try:
        parts = value.__reduce_ex__(4)
    except Exception:  # whatever it raises, no more can be read
        parts = getattr(value, "__qualname__", "")
    if not isinstance(parts, str):
        parts = [list(part) if hasattr(part, "__next__") else part for part in parts[1:]]
        parts = described(parts, around)
    parts = parts if len(parts) <= _SHOWN else _digest(parts.encode(errors="replace"))
    return f"{type(value).__name__} {parts}".rstrip()


def _places(number: int, device: torch.device) -> Tensor:
    """Return a factor for each index, unlike any pattern of values."""
    places = torch.arange(1, number + 1, device=device) * _ODD
    return (places ^ (places >> 29)) * _ODD | 1


def _sum(x: Tensor, places: Tensor) -> Tensor:
    """Sum a tensor's words of eight bytes times their factors, without waiting for its device."""
    data = x.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    data = data.clone() if data.storage_offset() % 8 else data
    end = data.numel() // 8 * 8
    parts = [*data[:end].view(torch.int64).split(_PART), data[end:].long()]
    # The highest bit of a word, a sign, also changes lower ones: else two signs would cancel.
    sums = [((part ^ (part >> 29)) * places[: part.numel()]).sum() for part in parts]
    return (torch.stack(sums) * places[: len(sums)]).sum()


def _plain(x: Tensor) -> list[Tensor]:
    """Return the plain tensors within a tensor, such as quantised weights' codes and scales."""
    if isinstance(x, DTensor) or x.is_meta:
        return []
    # Attributes count for a class such as GGUF's; on plain parameters they are users'.
    attributes = () if type(x) in (Tensor, nn.Parameter, nn.Buffer) else vars(x)
    names = x.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(x) else attributes
    within = [getattr(x, name) for name in names]
    parts = [part for inner in within if isinstance(inner, Tensor) for part in _plain(inner)]
    kind, plain = cast(Any, type(x)), cast(Any, Tensor)
    if kind.__torch_dispatch__ is not plain.__torch_dispatch__:  # it has no bits of its own
        return parts
    if x.layout != torch.strided or x.is_quantized:
        x = x.dequantize() if x.is_quantized else x.to_dense()
    return [x.detach(), *parts]


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
