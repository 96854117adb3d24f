"""Rows to be sent at 8 bits."""

import torch
from torch import Tensor

from bascule.comm.quantized import Format, Quantized

FORMATS: list[Format] = ["int8", "e4m3"]
WIRES = [Quantized(fmt) for fmt in FORMATS]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def there_and_back(wire: Quantized, x: Tensor) -> Tensor:
    return wire.unpack(wire.pack(x), x.dtype)


def with_offsets(x: Tensor, seed: int) -> Tensor:
    """8 sigma in 4 channels, the same for every token; channels and signs differ by head."""
    generator = torch.Generator().manual_seed(seed)
    offset = torch.zeros(x.shape[1], 1, x.shape[-1])
    for head in offset:
        channels = torch.randperm(x.shape[-1], generator=generator)[:4]
        head[0, channels] = torch.tensor([8.0, -8.0, 8.0, -8.0])
    return x + offset
