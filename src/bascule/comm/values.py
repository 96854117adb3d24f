"""Values as short texts by which ranks compare them: weights, tensors, pictures, any arguments.

A digest sums the bits of a tensor, each word times a number for its place, in integers that wrap
around: so it is exact in any order, and ranks with unlike devices get the same one.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PART = 2**22  # words that are summed at once
_ODD = 0x5851F42D4C957F2D  # of a well-mixing multiplication
_SHOWN = 200  # characters of an object
_PLAIN = Tensor, nn.Parameter, nn.Buffer
_TENSORS_OF = 3  # steps from a tensor to those in its attributes, as scales of quantised weights


def names_digest(module: nn.Module) -> str:
    """Digest the names, dtypes and shapes of the parameters."""
    parts = [(name, str(p.dtype), *p.shape) for name, p in module.named_parameters()]
    return _digest(repr(parts).encode())


def values_digest(module: nn.Module) -> str:
    """Digest the values of parameters and buffers that are in memory; one wait for a device."""
    return _values(list(in_memory(module).values()))


def in_memory(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, without those whose values are elsewhere.

    Left out are FSDP's shards, which are unlike on all ranks, the meta device, and what diffusers'
    group offloading keeps on a disk: memory that nobody wrote stands for it.
    """
    hooks = (getattr(one, "_diffusers_hook", None) for one in module.modules())
    offloading = (getattr(hook, "hooks", {}).get("group_offloading") for hook in hooks)
    groups = (getattr(one, "group", None) for one in offloading)
    on_disk = {id(x) for group in groups for x in getattr(group, "tensor_to_key", ())}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: x for name, x in tensors.items() if id(x) not in on_disk}


def contents_of(tensors: Sequence[Tensor]) -> str:
    """Describe tensors by shapes and a digest of values: the same for the same on all ranks."""
    shapes = [tuple(x.shape) for x in tensors]
    return f"shapes {shapes[:8]} of {len(shapes)} tensors with values {_values(tensors)}"


def described(value: Any, around: tuple[int, ...] = ()) -> str:
    """Describe a value by its contents, whatever it is: tensors, arrays, pictures, nests, objects.

    Objects are read as for a pickle. What has none, as a function or an open file, is described by
    its name or class; a generator of torch by its device, as its state is shared.
    """
    if isinstance(value, np.generic):
        value = value.tolist()
    if isinstance(value, int | float | complex | str | None):
        return repr(value)
    if isinstance(value, Tensor):
        return contents_of([value])
    if isinstance(value, torch.Generator | torch.device):
        device = value.device if isinstance(value, torch.Generator) else value
        return f"a {type(value).__name__.lower()} on {device.type}"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value)} bytes {_digest(bytes(value))}"
    if id(value) in around:
        return "one around it"
    around = (*around, id(value))
    if isinstance(value, Mapping):
        return str(sorted((str(key), described(one, around)) for key, one in value.items()))
    if isinstance(value, list | tuple | AbstractSet):
        parts = [described(one, around) for one in value]
        return str(sorted(parts) if isinstance(value, AbstractSet) else parts)
    if hasattr(value, "__array_interface__"):  # of numpy, and pictures of PIL
        return _described_array(value, around)
    name = type(value).__name__
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # whatever it is, there is no more to read
        reduced = getattr(value, "__qualname__", "")
    text = reduced if isinstance(reduced, str) else _of_reduced(reduced, around)
    text = text if len(text) <= _SHOWN else _digest(text.encode(errors="replace"))
    return f"{name} {text}".rstrip()


def _of_reduced(reduced: Iterable[Any], around: tuple[int, ...]) -> str:
    """Describe what makes an object: a function, arguments, a state, entries."""
    _, *parts = reduced
    return ", ".join(
        described(list(one) if hasattr(one, "__next__") else one, around)
        for one in parts
        if one is not None
    )


def _described_array(value: Any, around: tuple[int, ...]) -> str:
    array = np.asarray(value)
    if array.dtype.hasobject:
        contents = described(array.tolist(), around)
    else:
        contents = _digest(np.ascontiguousarray(array).tobytes())
    # Numbers of a picture mean colours by its mode, and indices those of its palette.
    palette = value.getpalette() if hasattr(value, "getpalette") else None
    colours = "" if palette is None else f", colours {described(bytes(palette))}"
    mode = getattr(value, "mode", "array")
    return f"{mode} {array.dtype} {array.shape} with values {contents}{colours}"


def _values(tensors: Sequence[Tensor]) -> str:
    """Digest dtypes and bits of tensors of any class; one wait for each device."""
    # Quantised weights wrap what is computed of them, as a sum, into their own class.
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        parts = [part for x in tensors for part in _plain(x)]
        most = min(_PART, 8 + max((x.nbytes for x in parts), default=0) // 8)
        places = {device: _places(most, device) for device in {x.device for x in parts}}
        sums = [_sum(x, places[x.device]) for x in parts]
        on_device = {
            device: iter(torch.stack([one for one in sums if one.device == device]).tolist())
            for device in places
        }
        numbers = [(str(x.dtype), next(on_device[x.device])) for x in parts]
    return _digest(repr(numbers).encode())


def _places(number: int, device: torch.device) -> Tensor:
    """Return a number for each place, far from any pattern of values."""
    places = torch.arange(1, number + 1, device=device) * _ODD
    return (places ^ (places >> 29)) * _ODD | 1


def _sum(x: Tensor, places: Tensor) -> Tensor:
    """Sum the bits of a tensor by their places, eight bytes at once; no device is waited for."""
    data = x.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    data = data.clone() if data.storage_offset() % 8 else data
    end = data.numel() // 8 * 8
    parts = [*data[:end].view(torch.int64).split(_PART), data[end:].long()]
    # A sign, the highest bit of a word, also changes lower ones: else two of them would cancel.
    sums = [((part ^ (part >> 29)) * places[: part.numel()]).sum() for part in parts]
    return (torch.stack(sums) * places[: len(sums)]).sum()


def _plain(x: Tensor) -> list[Tensor]:
    """Return the plain tensors in a tensor: of quantised weights their codes and scales."""
    if isinstance(x, DTensor) or x.is_meta:
        return []
    if is_traceable_wrapper_subclass(x):
        names, _ = x.__tensor_flatten__()
        within = [getattr(x, name) for name in names]
    else:
        within = [] if type(x) in _PLAIN else _tensors_of(vars(x), _TENSORS_OF)
    parts = [part for one in within if isinstance(one, Tensor) for part in _plain(one)]
    kind, plain = cast(Any, type(x)), cast(Any, Tensor)
    if kind.__torch_dispatch__ is not plain.__torch_dispatch__:  # it has no bits of its own
        return parts
    if x.layout != torch.strided or x.is_quantized:
        x = x.dequantize() if x.is_quantized else x.to_dense()
    return [x.detach(), *parts]


def _tensors_of(attributes: Mapping[str, Any], depth: int) -> list[Tensor]:
    """Return the tensors among attributes, and those of objects among them."""
    tensors = list[Tensor]()
    for value in attributes.values():
        if isinstance(value, Tensor):
            tensors.append(value)
        elif depth and not isinstance(value, nn.Module | type):
            tensors += _tensors_of(getattr(value, "__dict__", {}), depth - 1)
    return tensors


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
