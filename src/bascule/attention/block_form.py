"""What every kernel for blocks has in common: its protocol, what it is asked for, merging.

Shapes: as in `blocks`.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockForm:
    """What a call asks of a kernel.

    Attributes:
        device_type: Where the tensors are.
        dtype: Of q, k and v; None where the caller does not say.
        head_dim: D; None where the caller does not say.
        has_bias: Whether something is added to the scores.
    """

    device_type: str
    dtype: torch.dtype | None = None
    head_dim: int | None = None
    has_bias: bool = False


class BlockKernel(Protocol):
    """Exact attention of one block and its gradients. Nothing of it is recorded by autograd."""

    def unfit(self, form: BlockForm) -> str | None:
        """Why it cannot compute that, as the end of a sentence; None if it can."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Out (B, H, Sq, D) and LSE; `bias` is added to the scaled scores and broadcasts.

        `causal` needs Sq = Sk.
        """
        ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        bias: Tensor | None,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, where `out` and `lse` are those over all keys."""
        ...


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """What partial results are kept in: float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to the keys of both, from attention to each. -inf is no key, not a number.

    Source: FastUSP, the online softmax of ring attention, in the form that adds no large numbers.
    """
    total = torch.logaddexp(lse, more_lse)
    weights = [
        torch.where(torch.isneginf(total), 0.0, (part - total).exp())[..., None]
        for part in (lse, more_lse)
    ]
    return out * weights[0] + more * weights[1], total


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
