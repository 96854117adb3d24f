"""Attention of some queries to some keys, with what is needed to merge it with the rest.

Shapes: B batch, H query heads, K key-value heads (H is a multiple of K), Sq and Sk tokens, D head
width. LSE is the natural-log sum-exp of the scaled scores, (B, H, Sq), in float64 for float64
inputs and in float32 otherwise; -inf where a query has no key.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from bascule.errors import ConfigError


class BlockKernel(Protocol):
    """Exact attention of one block and its gradients. Nothing of it is recorded by autograd."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Out (B, H, Sq, D) and LSE; `bias` is added to the scaled scores and broadcasts."""
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


class PlainKernel:
    """Matmul and softmax: any device and dtype, O(Sq Sk) memory."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """As `BlockKernel`."""
        scores = _scores(q, k, bias, causal, scale)
        lse = torch.logsumexp(scores, dim=-1)
        weights = _weights(scores, lse)
        return (weights @ _repeated(v, q).to(weights.dtype)).to(q.dtype), lse

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
        """As `BlockKernel`."""
        wide = wide_dtype(q)
        grad, out = grad.to(wide), out.to(wide)
        weights = _weights(_scores(q, k, bias, causal, scale), lse)
        delta = (grad * out).sum(dim=-1, keepdim=True)
        dscores = weights * (grad @ _repeated(v, q).to(wide).mT - delta) * scale
        dq = dscores @ _repeated(k, q).to(wide)
        dk, dv = dscores.mT @ q.to(wide), weights.mT @ grad
        groups = k.shape[1], q.shape[1] // k.shape[1]
        dk, dv = (x.unflatten(1, groups).sum(dim=2) for x in (dk, dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class CpuFlashKernel:
    """Torch's flash attention for CPUs."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """As `BlockKernel`."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )
        if bias is None:
            return out, lse
        # For a query without keys the operator gives an LSE of 0.
        is_empty = torch.isneginf(bias).all(dim=-1).expand(lse.shape)
        return out.masked_fill(is_empty[..., None], 0.0), lse.masked_fill(is_empty, -math.inf)

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
        """As `BlockKernel`."""
        if bias is not None:
            # exp(-inf - -inf) is nan: a query without any key has weights of 0 under any other LSE.
            lse = lse.masked_fill(torch.isneginf(lse), 0.0)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )


KERNELS: dict[str, BlockKernel] = {"plain": PlainKernel(), "cpu_flash": CpuFlashKernel()}


def select_block_kernel(name: str | None, device_type: str) -> BlockKernel:
    """The kernel of that name, or (None) the fastest for the device.

    Raises:
        ConfigError: There is no such kernel, or it cannot run there.
    """
    if name is None:
        return KERNELS["cpu_flash" if device_type == "cpu" else "plain"]
    if name not in KERNELS:
        raise ConfigError(f"kernel {name!r}: choose one of {', '.join(KERNELS)}")
    if name == "cpu_flash" and device_type != "cpu":
        raise ConfigError(f"kernel 'cpu_flash' runs on CPUs, not on {device_type}: use 'plain'")
    return KERNELS[name]


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


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = (q @ _repeated(k, q).mT).to(wide_dtype(q)) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Softmax by an LSE; 0 for a query without keys."""
    return (scores - lse.masked_fill(torch.isneginf(lse), 0.0)[..., None]).exp()


def _repeated(kv: Tensor, q: Tensor) -> Tensor:
    """(B, H, Sk, D) keys or values, each repeated for its query heads."""
    repeat = q.shape[1] // kv.shape[1]
    return kv if repeat == 1 else kv.repeat_interleave(repeat, dim=1)
