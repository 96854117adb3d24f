"""The protocol of attention kernels, and what they share. Shapes: as in `registry`."""

import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bascule.attention.mask import AttentionMask, BlockRows

Grads = tuple[Tensor, Tensor, Tensor]
"""Gradients of q, k and v, in their dtype or a wider one."""
OutLse = tuple[Tensor, Tensor]
"""Output (B, H, Sq, D) and LSE (B, H, Sq)."""


@dataclass(frozen=True, slots=True)
class KernelQuery:
    """The properties of an attention call that its kernel must support."""

    device_type: str  # where the tensors are
    dtype: torch.dtype | None = None  # of q, k and v; None where the caller does not say
    head_dim: int | None = None  # D; None where the caller does not say
    has_bias: bool = False  # whether something is added to the scores
    # tokens of the longest block where queries see only some blocks of keys, else None
    block: int | None = None
    is_packed: bool = False  # whether queries and keys are sequences packed one after another
    cap: float = 0.0  # soft cap of the scores, 0 for none


class Attended(NamedTuple):
    """Arguments of a forward pass, and its results."""

    q: Tensor  # (B, H, Sq, D) queries
    k: Tensor  # (B, K, Sk, D) keys
    v: Tensor  # (B, K, Sk, D) values
    out: Tensor  # (B, H, Sq, D) the output over all keys, also those of other blocks
    lse: Tensor  # (B, H, Sq) the LSE over all keys
    mask: AttentionMask  # what these queries see of these keys
    scale: float  # factor of the scores


class AttentionKernel(Protocol):
    """Exact attention of one block and its gradients, neither of them recorded by autograd."""

    def unfit(self, query: KernelQuery) -> str | None:
        """Return why the kernel cannot compute a call, as a sentence's end; None if it can."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> OutLse:
        """Return out (B, H, Sq, D) and LSE."""
        ...

    def backward(self, grad: Tensor, done: Attended) -> Grads:
        """Return the gradients of q, k and v from the gradient of the output."""
        ...


def misfit(
    query: KernelQuery,
    *,
    device: str | None = None,
    dtypes: Sequence[torch.dtype] = (),
    takes_bias: bool = True,
    takes_packed: bool = False,
    takes_cap: bool = False,
    needs_blocks: bool = False,
) -> str | None:
    """Return why a kernel for one device and some dtypes (none: all) cannot compute a query."""
    if query.cap and not takes_cap:
        return "has no soft cap of scores"
    if device is not None and query.device_type != device:
        devices = {"cpu": "CPUs", "cuda": "CUDA devices"}[device]
        return f"runs on {devices}, not on {query.device_type}"
    if dtypes and query.dtype not in dtypes:
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        return f"takes {', '.join(names[:-1])} or {names[-1]}, not {query.dtype}"
    if query.has_bias and not takes_bias:
        return "takes no mask"
    if needs_blocks:
        return "computes the scores of given blocks, not all" if query.block is None else None
    if query.block is not None:
        return "computes all scores, not only those of some blocks"
    return "takes no packed sequences" if query.is_packed and not takes_packed else None


def forward_each(
    attend: Callable[..., OutLse],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    scale: float,
) -> OutLse:
    """Return out and LSE of packed sequences, by calling `attend` for each sequence."""
    out = torch.zeros_like(q)  # with its strides
    lse = torch.full(q.shape[:3], -math.inf, dtype=wide_dtype(q), device=q.device)
    alone = AttentionMask(causal=mask.causal)
    for q_, out_, lse_, k_, v_ in _by_sequence(mask, [q, out, lse], [k, v]):
        if q_.shape[2] and k_.shape[2]:
            part, part_lse = attend(q_, k_, v_, alone, scale)
            out_.copy_(part)
            lse_.copy_(part_lse)
    return out, lse


def backward_each(
    gradients: Callable[[Tensor, Attended], Grads], grad: Tensor, done: Attended
) -> Grads:
    """Return the gradients of `forward_each`, by calling `gradients` for each sequence."""
    q, k, v, out, lse, mask, scale = done
    wide = wide_dtype(q)
    dq, dk, dv = [torch.zeros_like(x, dtype=wide) for x in (q, k, v)]
    alone = AttentionMask(causal=mask.causal)
    of_queries, of_keys = [dq, grad, q, out, lse], [dk, dv, k, v]
    for dq_, grad_, q_, out_, lse_, dk_, dv_, k_, v_ in _by_sequence(mask, of_queries, of_keys):
        if q_.shape[2] and k_.shape[2]:
            parts = gradients(grad_, Attended(q_, k_, v_, out_, lse_, alone, scale))
            for total, part in zip((dq_, dk_, dv_), parts, strict=True):
                total.copy_(part)
    return dq, dk, dv


def _by_sequence(
    mask: AttentionMask, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]
) -> Iterable[tuple[Tensor, ...]]:
    """Return, by sequence, its parts of (1, H, S, ...) tensors: parts of queries, then of keys."""
    assert mask.packed is not None
    q_lens, k_lens = mask.packed.seq_lens, mask.packed.kv_lens
    queries, keys = [x.split(q_lens, 2) for x in of_queries], [x.split(k_lens, 2) for x in of_keys]
    return zip(*queries, *keys, strict=True)


def no_module(name: str) -> str | None:
    """Return why a kernel cannot run if its module is not installed; None if it is."""
    if importlib.util.find_spec(name) is None:
        return f"needs the module {name}, which is not installed"
    return None


def blocks_of(mask: AttentionMask) -> BlockRows:
    """Return the blocks of a mask, which a block-sparse kernel needs."""
    assert mask.blocks is not None
    return mask.blocks


def nothing_seen(q: Tensor) -> OutLse:
    """Return out 0 and LSE -inf for every query."""
    lse = torch.full(q.shape[:3], -math.inf, dtype=wide_dtype(q), device=q.device)
    return torch.zeros_like(q, memory_format=torch.contiguous_format), lse


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of partial results: float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the results over two sets of keys into the result over both; LSE is -inf without keys.

    Source: FastUSP, the online softmax of ring attention, written so that it adds no large numbers.
    """
    apart = part_lse - lse  # nan if neither has a key
    left = torch.sigmoid(-apart).nan_to_num_(nan=0.0)[..., None]
    added = torch.sigmoid(apart).nan_to_num_(nan=0.0)[..., None]
    # A sum of products, as in one process: a difference would make nan of an inf in a value.
    return (out * left).addcmul_(part.to(out.dtype), added), torch.logaddexp(lse, part_lse)


def with_adjacent_values(x: Tensor) -> Tensor:
    """Put the values of a head next to each other, as torch's CPU operator assumes (2.13)."""
    return x if x.stride(-1) == 1 else x.contiguous()


def without_empty_rows(out: Tensor, lse: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Set out to 0 and LSE to -inf for queries whose keys a bias hides: operators differ."""
    if bias is None:
        return out, lse
    is_empty = torch.isneginf(bias).all(dim=-1).expand(lse.shape)
    return out.masked_fill(is_empty[..., None], 0.0), lse.masked_fill(is_empty, -math.inf)


def finite(lse: Tensor) -> Tensor:
    """Replace -inf by 0, so that a query without keys has weights of 0, not nan."""
    return lse.masked_fill(torch.isneginf(lse), 0.0)


def repeated_heads(kv: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values for their query heads, to (B, H, Sk, D)."""
    repeat = q.shape[1] // kv.shape[1]
    return kv if repeat == 1 else kv.repeat_interleave(repeat, dim=1)


def summed_heads(grad: Tensor, kv: Tensor) -> Tensor:
    """Sum over the query heads of each key head, to (B, K, Sk, D): adjoint of `repeated_heads`."""
    repeat = grad.shape[1] // kv.shape[1]
    return grad if repeat == 1 else grad.unflatten(1, (kv.shape[1], repeat)).sum(dim=2)
