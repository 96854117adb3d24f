"""What all kernels for blocks have in common: their protocol, what they are asked for, merging.

Shapes: as in `blocks`.
"""

import importlib.util
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from bascule.comm.staging import table_on
from bascule.errors import ConfigError
from bascule.plan.routes import Ints

Grads = tuple[Tensor, Tensor, Tensor]
"""Of q, k and v, in their dtype or a wider one."""
OutLse = tuple[Tensor, Tensor]
"""Output (B, H, Sq, D) and LSE (B, H, Sq)."""
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class BlockTables:
    """The arrays of `BlockRows` on a device, as int32."""

    q_bounds: Tensor
    k_bounds: Tensor
    row_bounds: Tensor
    columns: Tensor


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Which key blocks each query block sees: a block-sparse mask, by rows.

    Queries (1, 1, Sq, D) and keys (1, 1, Sk, D) are the blocks of all samples and heads, one after
    the other: which of them belong together is only in `columns`. Blocks have one token or more.

    Attributes:
        q_bounds: (Q + 1,) bounds of the query blocks among the queries.
        k_bounds: (K + 1,) bounds of the key blocks among the keys.
        row_bounds: (Q + 1,) bounds of the rows of query blocks in `columns`.
        columns: (N,) key blocks that a query block sees, ascending in each row.

    Raises:
        ConfigError: The arrays do not fit together.
    """

    q_bounds: Ints
    k_bounds: Ints
    row_bounds: Ints
    columns: Ints
    _kept: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name, bounds in (("query", self.q_bounds), ("key", self.k_bounds)):
            if bounds[0] or (np.diff(bounds) < 1).any():
                raise ConfigError(
                    f"bounds {bounds.tolist()} of {name} blocks: give 0, then the end of each "
                    "block, which has one token or more"
                )
        num_q, num_k = self.q_bounds.size - 1, self.k_bounds.size - 1
        rows, columns = self.row_bounds, self.columns
        if rows.size != num_q + 1 or rows[0] or rows[-1] != columns.size or (self.counts < 0).any():
            raise ConfigError(
                f"{rows.size} row bounds up to {rows[-1]} for {num_q} query blocks that see "
                f"{columns.size} key blocks: give {num_q + 1}, from 0 up to {columns.size}"
            )
        is_first = np.zeros(columns.size + 1, dtype=np.bool_)
        is_first[rows] = True
        if columns.size and (columns.min() < 0 or columns.max() >= num_k):
            raise ConfigError(
                f"key blocks {columns.min()} to {columns.max()} are seen, and there are {num_k}: "
                f"give numbers from 0 to {num_k - 1}"
            )
        if ((np.diff(columns) < 1) & ~is_first[1:-1]).any():
            raise ConfigError("a query block's key blocks must be ascending, each of them once")

    @property
    def block(self) -> int:
        """Tokens of the longest block; 0 without blocks."""
        return int(
            max(np.diff(self.q_bounds).max(initial=0), np.diff(self.k_bounds).max(initial=0))
        )

    @property
    def counts(self) -> Ints:
        """(Q,) key blocks that each query block sees."""
        return np.diff(self.row_bounds)

    @cached_property
    def transposed(self) -> "BlockRows":
        """Which query blocks each key block is seen by."""
        shape = (self.q_bounds.size - 1, self.k_bounds.size - 1)
        ones = np.ones(self.columns.size, dtype=np.int8)
        by_key = sparse.csr_array((ones, self.columns, self.row_bounds), shape).tocsc()
        bounds, columns = (x.astype(np.int64) for x in (by_key.indptr, by_key.indices))
        return BlockRows(self.k_bounds, self.q_bounds, bounds, columns)

    @cached_property
    def runs(self) -> list[tuple[slice, Ints]]:
        """The queries of neighbouring blocks that see the same key blocks, and those key blocks."""
        rows = np.split(self.columns, self.row_bounds[1:-1])
        starts = [i for i in range(len(rows)) if not i or not np.array_equal(rows[i], rows[i - 1])]
        bounds = self.q_bounds[[*starts, -1]].tolist()
        return [(slice(*bounds[n : n + 2]), rows[start]) for n, start in enumerate(starts)]

    def on(self, device: torch.device) -> BlockTables:
        """The arrays on a device."""
        arrays = (self.q_bounds, self.k_bounds, self.row_bounds, self.columns)
        return self.keep(
            device,
            lambda: BlockTables(*(table_on(x.astype(np.int32), device) for x in arrays)),
        )

    def keep(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` gives; it is called once a key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What queries see of keys; by default everything.

    Attributes:
        causal: Whether query i sees only keys 0 to i. Needs as many queries as keys.
        bias: Added to the scaled scores; broadcasts to (B, H, Sq, Sk); of the dtype of the queries
            or, for queries of 16 bits, float32. None adds nothing.
        blocks: Which blocks of keys are seen, by blocks of queries; with neither of the others.

    Raises:
        ConfigError: There are blocks and one of the others.
    """

    causal: bool = False
    bias: Tensor | None = None
    blocks: BlockRows | None = None

    def __post_init__(self) -> None:
        if self.blocks is not None and (self.causal or self.bias is not None):
            raise ConfigError(
                "blocks of keys that are seen, and a causal mask or a bias: give the blocks alone"
            )


EVERYTHING = Seen()


@dataclass(frozen=True, slots=True)
class BlockForm:
    """What a call asks of a kernel.

    Attributes:
        device_type: Where the tensors are.
        dtype: Of q, k and v; None where the caller does not say.
        head_dim: D; None where the caller does not say.
        has_bias: Whether something is added to the scores.
        block: Tokens of the longest block where queries see only some blocks of keys, else None.
    """

    device_type: str
    dtype: torch.dtype | None = None
    head_dim: int | None = None
    has_bias: bool = False
    block: int | None = None


class BlockKernel(Protocol):
    """Exact attention of one block and its gradients. Nothing of it is recorded by autograd."""

    def unfit(self, form: BlockForm) -> str | None:
        """Why it cannot compute that, as the end of a sentence; None if it can."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> OutLse:
        """Out (B, H, Sq, D) and LSE."""
        ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        seen: Seen,
        scale: float,
    ) -> Grads:
        """Gradients of q, k and v, where `out` and `lse` are those over all keys."""
        ...


def no_blocks(form: BlockForm) -> str | None:
    """Why a kernel that computes all scores cannot compute that."""
    return None if form.block is None else "computes all scores, not only those of some blocks"


def only_blocks(form: BlockForm) -> str | None:
    """Why a kernel for block-sparse attention cannot compute that."""
    return "computes the scores of given blocks, not all" if form.block is None else None


def no_module(name: str) -> str | None:
    """Why a kernel of a module that is not installed cannot compute anything."""
    if importlib.util.find_spec(name) is None:
        return f"needs the module {name}, which is not installed"
    return None


def blocks_of(seen: Seen, q: Tensor, k: Tensor) -> BlockRows:
    """The blocks that are seen, where they fit the queries and keys.

    Raises:
        ConfigError: There are none, or they do not.
    """
    rows = seen.blocks
    if rows is None:
        raise ConfigError("a kernel for block-sparse attention needs blocks: give Seen(blocks=...)")
    num_q, num_k = int(rows.q_bounds[-1]), int(rows.k_bounds[-1])
    if q.shape[:3] != (1, 1, num_q) or k.shape[:3] != (1, 1, num_k):
        raise ConfigError(
            f"queries {tuple(q.shape)} and keys {tuple(k.shape)} for blocks of {num_q} queries and "
            f"{num_k} keys: give (1, 1, {num_q}, D) and (1, 1, {num_k}, D)"
        )
    return rows


def nothing_seen(q: Tensor) -> OutLse:
    """Out 0 and LSE -inf for every query."""
    lse = torch.full(q.shape[:3], -math.inf, dtype=wide_dtype(q), device=q.device)
    return torch.zeros_like(q, memory_format=torch.contiguous_format), lse


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """What partial results are kept in: float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to the keys of both, from attention to each. -inf is no key, not a number.

    Source: FastUSP, the online softmax of ring attention, in the form that adds no large numbers.
    """
    apart = more_lse - lse  # nan if neither has a key
    left, added = (torch.sigmoid(x).nan_to_num_(nan=0.0)[..., None] for x in (-apart, apart))
    # A sum of products, as one process forms it: a difference would make nan of an inf in a value.
    return (out * left).addcmul_(more.to(out.dtype), added), torch.logaddexp(lse, more_lse)


def with_adjacent_values(x: Tensor) -> Tensor:
    """The same tensor, with the values of a head next to each other.

    Torch's operator for CPUs takes them to be (2.13), and reads what is not theirs if they are not.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def without_empty_rows(out: Tensor, lse: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Out 0 and LSE -inf for queries that a bias hides all keys from: operators differ there."""
    if bias is None:
        return out, lse
    is_empty = torch.isneginf(bias).all(dim=-1).expand(lse.shape)
    return out.masked_fill(is_empty[..., None], 0.0), lse.masked_fill(is_empty, -math.inf)


def finite(lse: Tensor) -> Tensor:
    """0 for -inf: under any number a query without keys has weights of 0, under -inf nan."""
    return lse.masked_fill(torch.isneginf(lse), 0.0)


def repeated_heads(kv: Tensor, q: Tensor) -> Tensor:
    """(B, H, Sk, D) keys or values, each repeated for its query heads."""
    repeat = q.shape[1] // kv.shape[1]
    return kv if repeat == 1 else kv.repeat_interleave(repeat, dim=1)


def summed_heads(grad: Tensor, kv: Tensor) -> Tensor:
    """(B, K, Sk, D) the adjoint of `repeated_heads`."""
    repeat = grad.shape[1] // kv.shape[1]
    return grad if repeat == 1 else grad.unflatten(1, (kv.shape[1], repeat)).sum(dim=2)
