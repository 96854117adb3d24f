"""What a rank tells the others of its items, and of its module, before any of them travels."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from bascule.comm.samples.nests import mapped
from bascule.comm.samples.sample_bytes import Parcel, parcel
from bascule.comm.samples.sample_moves import num_rows
from bascule.encoders.encoder_tables import EncoderTable, Item, Length, form_of
from bascule.errors import ConfigError
from bascule.plan.checks import whole

_HASHED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class ItemMeasures:
    """Measures items.

    Attributes:
        module: What encodes them.
        table: What they are.
        length_fn: Their lengths. None: as the table says.
        device: Where their tensors may be besides the host.
        travel: Whether any may go to another rank.
    """

    module: nn.Module
    table: EncoderTable
    length_fn: Callable[[Item], Length] | None
    device: torch.device
    travel: bool

    def of(self, place: int, item: Item) -> tuple[Parcel, tuple[int, ...]]:
        """An item ready to travel, and what the others must know of it.

        Raises:
            ConfigError: Something is wrong with it; names its place.
        """
        try:
            length = self.length_fn(item) if self.length_fn else None
            if length is None:
                assert self.table.length is not None
                length = self.table.length(self.module, item)
            tokens, pairs = length if isinstance(length, tuple) else (length, -1.0)
            tokens = whole("length_fn", tokens, 1)
            bits = int(np.float64(pairs).view(np.int64))
            if len(self.table.cut(item)) != 1:
                raise ConfigError("it has rows of several items: give each by itself")
            sent = Parcel((), sum(x.nbytes for x in item.values() if isinstance(x, Tensor)))
            if self.travel:
                sent = parcel(mapped(dict(item), torch.Tensor.detach), self.device)
            form = form_of(item, self.device)
            return sent, (tokens, bits, form, num_rows(sent), sent.num_bytes)
        except Exception as error:
            text = str(error) if isinstance(error, ConfigError) else repr(error)
            raise ConfigError(f"item {place}: {text}") from error


def contents_of(tensors: Sequence[Tensor]) -> str:
    """Shapes and a digest of values: the same for the same tensors on all ranks."""
    shapes = [tuple(x.shape) for x in tensors]
    return f"shapes {shapes[:8]} of {len(shapes)} tensors with values {_digest(tensors)}"


def weights_of(module: nn.Module) -> str:
    """A digest of the parameters, without those of which every rank has another part."""
    own = [p.detach() for p in module.parameters() if type(p.data) is Tensor and not p.is_meta]
    return f"values {_digest([p for p in own if p.dtype in _HASHED])}"


def _digest(tensors: Sequence[Tensor]) -> str:
    """Of the values; one wait for the device."""
    hashes = [torch.hash_tensor(x.detach()).view(torch.int64) for x in tensors if x.numel()]
    values = torch.stack([one.cpu() for one in hashes]).tolist() if hashes else []
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()
