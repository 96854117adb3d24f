"""Weights of a module in a few bytes, so that ranks can compare them."""

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def names_digest(module: nn.Module) -> str:
    """Of the names, dtypes and shapes of the parameters."""
    parts = [(name, str(p.dtype), *p.shape) for name, p in module.named_parameters()]
    return _digest(repr(parts))


def values_digest(module: nn.Module) -> str:
    """Of the values of parameters and buffers; FSDP's shards, unlike on all ranks, are left out.

    From the sums of their bits as integers, which no order of adding changes: one pass over the
    weights on their device, and one number of each to the host.
    """
    given = [*module.parameters(), *module.buffers()]
    held = [x.detach() for x in given if not isinstance(x, DTensor) and not x.is_meta]
    sums = [_bits(x).sum(dtype=torch.int64).cpu() for x in held if x.numel()]
    return _digest(repr([int(one) for one in sums]))


def _bits(x: Tensor) -> Tensor:
    real = torch.view_as_real(x) if x.is_complex() else x
    return real.view(_INTEGERS[real.dtype.itemsize])


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
