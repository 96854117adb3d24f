"""Count FLOPs, kernels and attentions of a forward pass while it runs."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bascule.diffusers.sparse_layers import SparseLayer

# Functions that compute nothing, or only where data lies; others are a kernel each.
_FREE = frozenset(
    "__get__ __getitem__ __len__ chunk contiguous detach dim expand expand_as flatten is_complex "
    "is_floating_point narrow numel permute reshape size split split_with_sizes squeeze stride "
    "swapaxes tensor_split transpose type_as unbind unflatten unsqueeze view view_as".split()
)
_PRODUCTS = functional.linear, torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes that decide the bytes and FLOPs of an attention, apart from the mesh."""

    batch: int
    num_heads: int
    num_kv_heads: int
    row_bytes: int  # of one token and head as they travel
    head_dim: int
    segments: tuple[int, ...]  # tokens of each, as they follow each other in attention
    gathers: bool = False  # all keys and values to every rank; nothing else travels


@dataclass(slots=True)
class LayerWork:
    """The work of the layers of a kind in a forward pass."""

    num_layers: int = 0
    token_flops: float = 0.0  # of products with weights, for the whole sequence
    other_flops: float = 0.0  # of products that every rank computes
    num_kernels: int = 0
    num_products: int = 0  # kernels that are products of matrices or attentions
    shapes: Counter[AttentionShape] = field(default_factory=Counter[AttentionShape])


@dataclass(frozen=True, slots=True)
class Attended:
    """The attention of a forward pass over the mesh."""

    lengths: Mapping[str, int]  # tokens of each segment
    work: Mapping[str, LayerWork]  # by kind of layer
    sparse: tuple[SparseLayer, ...] = ()

    @property
    def shapes(self) -> Counter[AttentionShape]:
        """Number of dense attentions by shape."""
        return sum((one.shapes for one in self.work.values()), Counter())


class WorkCounter:
    """A counter of the work of a model's layers."""

    def __init__(self) -> None:
        self.kinds: dict[str, LayerWork] = {"": LayerWork(num_layers=1)}  # as "blocks.*"; "": rest
        self._kind = ""
        self.wholes: dict[int, int] = {}

    def begin_block(self, name: str) -> None:
        """Count for this block from here on."""
        self._kind = re.sub(r"\d+", "*", name)
        self.kinds.setdefault(self._kind, LayerWork()).num_layers += 1

    def end_block(self) -> None:
        """Count for no block from here on."""
        self._kind = ""

    def attend(self, shape: AttentionShape) -> None:
        """Count attention over the mesh."""
        self.kinds[self._kind].shapes[shape] += 1

    def attend_to_all(self, query: Tensor, num_keys: int) -> None:
        """Count attention of this rank's queries to keys that every rank has gathered."""
        whole = self.wholes.get(query.shape[2], query.shape[2])
        pairs = query.shape[0] * query.shape[1] * whole * num_keys
        self.kinds[self._kind].token_flops += 4.0 * pairs * query.shape[3]

    def see(self, func: Callable[..., Any], args: Sequence[Any]) -> None:
        """Count a call of one of torch's functions."""
        if getattr(func, "__name__", "") in _FREE:
            return
        work = self.kinds[self._kind]
        work.num_kernels += 1
        if func is functional.scaled_dot_product_attention:
            work.num_products += 1
        elif func in _PRODUCTS and len(args) > 1 and isinstance(args[1], Tensor):
            work.num_products += 1
            x, other = args[0], args[1]
            columns = other.shape[0] if func is functional.linear else other.shape[-1]
            self._multiply(work, x, columns)

    def _multiply(self, work: LayerWork, x: Tensor, columns: int) -> None:
        """Count 2 FLOPs for each value of `x` and column."""
        # A prompt that happens to be as long as a rank's share is taken for one.
        whole = self.wholes.get(x.shape[-2]) if x.dim() > 2 else None
        if whole is None:
            work.other_flops += 2.0 * x.numel() * columns
        else:
            rows = math.prod(x.shape[:-2]) * whole
            work.token_flops += 2.0 * rows * x.shape[-1] * columns
