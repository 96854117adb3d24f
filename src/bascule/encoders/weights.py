"""An encoder and its weights in a few bytes, so that ranks can compare them."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bascule.encoders.encoder_tables import EncoderOptions, EncoderTable
from bascule.errors import ConfigError
from bascule.plan.checks import number, shown

SETTINGS = ("module", "weights", "home_tolerance", "features_for", "settings")
"""Names of what `settings_of` gives."""

GETTING = {"owner": 0, "all": None, "first": 1}
"""By `features_for`: ranks that get what all of them gave; None: all."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def settings_of(module: nn.Module, table: EncoderTable, options: EncoderOptions) -> dict[str, str]:
    """What must be the same on all ranks when an encoder is made.

    Raises:
        ConfigError: An option is wrong.
    """
    number("home_tolerance", options.home_tolerance)
    if options.features_for not in GETTING:
        raise ConfigError(
            f"features_for={shown(options.features_for)}: choose one of {list(GETTING)}"
        )
    shapes = f"{type(module).__name__} with parameters of shapes {names_digest(module)}"
    settings = "" if table.settings is None else table.settings(module)
    own = shapes, values_digest(module), str(options.home_tolerance), options.features_for, settings
    return dict(zip(SETTINGS, own, strict=True))


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
    return _values([x for x in given if not isinstance(x, DTensor) and not x.is_meta])


def contents_of(tensors: Sequence[Tensor]) -> str:
    """Shapes and a digest of values: the same for the same tensors on all ranks."""
    shapes = [tuple(x.shape) for x in tensors]
    return f"shapes {shapes[:8]} of {len(shapes)} tensors with values {_values(tensors)}"


def _values(tensors: Sequence[Tensor]) -> str:
    parts = [part for x in tensors for part in _plain(x.detach()) if part.numel()]
    sums = [_bits(part).sum(dtype=torch.int64).cpu() for part in parts]
    return _digest(repr([int(one) for one in sums]))


def _plain(x: Tensor) -> list[Tensor]:
    """What a tensor is made of: of quantised weights their codes and scales."""
    if not is_traceable_wrapper_subclass(x):
        return [x]
    names, _ = x.__tensor_flatten__()
    return [part for name in names for part in _plain(getattr(x, name))]


def _bits(x: Tensor) -> Tensor:
    real = torch.view_as_real(x) if x.is_complex() else x
    return real.view(_INTEGERS[real.dtype.itemsize])


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
