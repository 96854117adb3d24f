"""Kernels for blocks on CUDA devices: torch's own operators, and the flash-attn packages.

Shapes: as in `registry`. The operators of torch give the LSE of scaled scores by the natural log,
(B, H, Sq) from flash attention, padded to a multiple of 32 queries from the memory-efficient one,
and (B, H, Sq, 1) from cuDNN.
"""

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bascule.attention.kernels.protocol import (
    Attended,
    Grads,
    KernelQuery,
    OutLse,
    finite,
    misfit,
    no_module,
    repeated_heads,
    summed_heads,
    without_empty_rows,
)
from bascule.attention.mask import AttentionMask, PackedSequences

_HALVES = (torch.bfloat16, torch.float16)
_LSE_ALIGNMENT = 32
_BIAS_ALIGNMENT = 16
_aten: Any = torch.ops.aten


class AtenFlashKernel:
    """Torch's flash attention for CUDA devices: half precision, no bias."""

    def unfit(self, query: KernelQuery) -> str | None:
        return _no_flash(query, capability=8, takes_packed=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> OutLse:
        if mask.packed is not None:
            seqs = mask.packed
            out, lse, *_ = _aten._flash_attention_forward(
                *_tokens(q, k, v), *_bounds(seqs), 0.0, mask.causal, False, scale=scale
            )
            return _without_keys(out.transpose(0, 1)[None], lse[None], seqs)
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, mask.causal, False, scale=scale
        )
        return out, lse

    def backward(self, grad: Tensor, done: Attended) -> Grads:
        q, k, v, out, lse, mask, scale = done
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, not read
        if mask.packed is not None:
            grads = _aten._flash_attention_backward(
                *_tokens(grad, q, k, v, out),
                lse[0].contiguous(),
                *_bounds(mask.packed),
                *(0.0, mask.causal, state, state.new_empty(0)),
                scale=scale,
            )
            return _gradients_of(grads, mask.packed)
        return _aten._scaled_dot_product_flash_attention_backward(
            grad,
            *(q, k, v, out, lse.contiguous()),
            *(None, None, q.shape[2], k.shape[2]),
            *(0.0, mask.causal, state, state[0]),
            scale=scale,
        )


class AtenEfficientKernel:
    """Torch's memory-efficient attention: half and single precision, with bias."""

    def unfit(self, query: KernelQuery) -> str | None:
        refused = misfit(query, device="cuda", dtypes=(*_HALVES, torch.float32))
        return refused or _no_head_dim(query, 4 if query.dtype == torch.float32 else 8)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> OutLse:
        k, v, bias = repeated_heads(k, q), repeated_heads(v, q), _aligned(mask.bias, q, k)
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, mask.causal, scale=scale
        )
        return without_empty_rows(out, lse[..., : q.shape[2]], bias)

    def backward(self, grad: Tensor, done: Attended) -> Grads:
        q, k, v, out, lse, mask, scale = done
        wide_k, wide_v = repeated_heads(k, q), repeated_heads(v, q)
        padded = functional.pad(finite(lse), (0, -q.shape[2] % _LSE_ALIGNMENT), value=math.inf)
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, not read
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            *(grad, q, wide_k, wide_v, _aligned(mask.bias, q, wide_k), out, padded),
            *(seed, seed, 0.0, [True, True, True, False], mask.causal),
            scale=scale,
        )
        return dq, summed_heads(dk, k), summed_heads(dv, v)


class FlashAttn2Kernel:
    """The flash-attn package, version 2.7 or later: half precision, no bias.

    Source: `_wrapped_flash_attn_forward` and `_backward` of flash_attn/flash_attn_interface.py.
    """

    def unfit(self, query: KernelQuery) -> str | None:
        return no_module("flash_attn") or _no_flash(query, capability=8, takes_packed=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> OutLse:
        package = import_module("flash_attn.flash_attn_interface")
        if mask.packed is not None:
            out, lse, *_ = package._wrapped_flash_attn_varlen_forward(
                *_tokens(q, k, v), *_bounds(mask.packed), 0.0, scale, mask.causal
            )
            return _without_keys(out.transpose(0, 1)[None], lse[None], mask.packed)
        out, lse, *_ = package._wrapped_flash_attn_forward(
            *_as_rows(q, k, v), 0.0, scale, mask.causal, -1, -1, 0.0, None, False
        )
        return out.transpose(1, 2), lse

    def backward(self, grad: Tensor, done: Attended) -> Grads:
        q, k, v, out, lse, mask, scale = done
        package = import_module("flash_attn.flash_attn_interface")
        no_window = -1, -1, 0.0, None, False
        if mask.packed is not None:
            grads = [torch.empty_like(x) for x in _tokens(q, k, v)]
            package._wrapped_flash_attn_varlen_backward(
                *_tokens(grad, q, k, v, out),
                *(lse[0].contiguous(), *grads, *_bounds(mask.packed)),
                *(0.0, scale, mask.causal, *no_window),
            )
            return _gradients_of(grads, mask.packed)
        rows = _as_rows(grad, q, k, v, out)
        grads = [torch.empty_like(x) for x in rows[1:4]]
        settings = 0.0, scale, mask.causal, *no_window
        package._wrapped_flash_attn_backward(*rows, lse.contiguous(), *grads, *settings)
        return _by_head(grads)


class FlashAttn3Kernel:
    """Flash attention 3, the module `flash_attn_interface`: Hopper, half precision, no bias.

    Source: `_flash_attn_forward` and `_backward` of hopper/flash_attn_interface.py of flash-attn.
    """

    def unfit(self, query: KernelQuery) -> str | None:
        return no_module("flash_attn_interface") or _no_flash(query, capability=9)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> OutLse:
        package = import_module("flash_attn_interface")
        out, lse, *_ = package._flash_attn_forward(
            *_as_rows(q, k, v), softmax_scale=scale, causal=mask.causal
        )
        return out.transpose(1, 2), lse

    def backward(self, grad: Tensor, done: Attended) -> Grads:
        q, k, v, out, lse, mask, scale = done
        package = import_module("flash_attn_interface")
        rows, lengths = _as_rows(grad, q, k, v, out), (None,) * 6
        grads = [torch.empty_like(x) for x in rows[1:4]]
        package._flash_attn_backward(*rows, lse.contiguous(), *lengths, *grads, scale, mask.causal)
        return _by_head(grads)


def _no_flash(query: KernelQuery, capability: int, *, takes_packed: bool = False) -> str | None:
    """Return why a kernel of the flash-attention family cannot compute a call."""
    bounds = {"device": "cuda", "dtypes": _HALVES, "takes_bias": False}
    refused = misfit(query, takes_packed=takes_packed, **bounds)
    if refused is not None:
        return refused
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < capability:
        return f"needs a device of compute capability {capability}.0"
    return _no_head_dim(query, 8, 256)


def _no_head_dim(query: KernelQuery, alignment: int, largest: int | None = None) -> str | None:
    if query.head_dim is None or query.head_dim % alignment:
        return f"takes head widths that are multiples of {alignment}, not {query.head_dim}"
    if largest is not None and query.head_dim > largest:
        return f"takes head widths up to {largest}, not {query.head_dim}"
    return None


def _aligned(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Expand a bias to (B, H, Sq, Sk) as q; rows start at multiples of 16 elements in memory."""
    if bias is None:
        return None
    whole = bias.to(q.dtype).expand(*bias.shape[:3], k.shape[2])
    padded = functional.pad(whole, (0, -k.shape[2] % _BIAS_ALIGNMENT))
    return padded[..., : k.shape[2]].expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _as_rows(*tensors: Tensor) -> list[Tensor]:
    """Transpose each to (B, S, H, D), contiguous."""
    return [x.transpose(1, 2).contiguous() for x in tensors]


def _by_head(rows: Sequence[Tensor]) -> Grads:
    """Transpose three of `_as_rows` back to (B, H, S, D)."""
    dq, dk, dv = (x.transpose(1, 2) for x in rows)
    return dq, dk, dv


def _tokens(*tensors: Tensor) -> list[Tensor]:
    """Transpose each from (1, H, S, D) to (S, H, D)."""
    return [x[0].transpose(0, 1) for x in tensors]


def _bounds(seqs: PackedSequences) -> tuple[Tensor, Tensor, int, int]:
    """Return packed sequences as flash attention takes them."""
    longest = max(seqs.seq_lens, default=0), max(seqs.kv_lens, default=0)
    return seqs.cu_seqlens, seqs.cu_kv_lens, *longest


def _without_keys(out: Tensor, lse: Tensor, seqs: PackedSequences) -> OutLse:
    """Set out to 0 and LSE to -inf in sequences without keys here; flash attention gives inf."""
    is_empty = seqs.without_keys
    if is_empty is None:
        return out, lse
    return out.masked_fill(is_empty[:, None], 0.0), lse.masked_fill(is_empty, -math.inf)


def _gradients_of(grads: Sequence[Tensor], seqs: PackedSequences) -> Grads:
    """Transpose from (S, H, D) to (1, H, S, D); 0 for queries without keys, which nothing wrote."""
    dq, dk, dv = (x.transpose(0, 1)[None] for x in grads)
    is_empty = seqs.without_keys
    return (dq if is_empty is None else dq.masked_fill(is_empty[:, None], 0.0)), dk, dv
