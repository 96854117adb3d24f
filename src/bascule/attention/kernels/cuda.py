"""Kernels for blocks on CUDA devices: torch's own operators, and the flash-attn packages.

Shapes: as in `blocks`. The operators of torch give the LSE of scaled scores by the natural log, as
(B, H, Sq) from flash attention, padded to a multiple of 32 queries from the memory-efficient one,
and (B, H, Sq, 1) from cuDNN.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bascule.attention.kernels.protocol import (
    BlockForm,
    Grads,
    OutLse,
    Seen,
    finite,
    no_blocks,
    no_module,
    repeated_heads,
    summed_heads,
    without_empty_rows,
)

_HALVES = (torch.bfloat16, torch.float16)
_LSE_ALIGNMENT = 32
_BIAS_ALIGNMENT = 16
_aten: Any = torch.ops.aten


class AtenFlashKernel:
    """Torch's flash attention for CUDA devices: half precision, no bias."""

    def unfit(self, form: BlockForm) -> str | None:
        """As `BlockKernel`."""
        return _no_flash(form, capability=8)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> OutLse:
        """As `BlockKernel`."""
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, seen.causal, False, scale=scale
        )
        return out, lse

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
        """As `BlockKernel`."""
        state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout, not read
        return _aten._scaled_dot_product_flash_attention_backward(
            grad,
            *(q, k, v, out, lse.contiguous()),
            *(None, None, q.shape[2], k.shape[2]),
            *(0.0, seen.causal, state, state[0]),
            scale=scale,
        )


class AtenEfficientKernel:
    """Torch's memory-efficient attention: half and single precision, with bias."""

    def unfit(self, form: BlockForm) -> str | None:
        """As `BlockKernel`."""
        if form.device_type != "cuda":
            return f"runs on CUDA devices, not on {form.device_type}"
        if form.dtype not in (*_HALVES, torch.float32):
            return f"takes bfloat16, float16 or float32, not {form.dtype}"
        alignment = 4 if form.dtype == torch.float32 else 8
        return no_blocks(form) or _no_head_dim(form, alignment, None)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> OutLse:
        """As `BlockKernel`."""
        k, v, bias = repeated_heads(k, q), repeated_heads(v, q), _aligned(seen.bias, q, k)
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, seen.causal, scale=scale
        )
        return without_empty_rows(out, lse[..., : q.shape[2]], bias)

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
        """As `BlockKernel`."""
        wide_k, wide_v = repeated_heads(k, q), repeated_heads(v, q)
        padded = functional.pad(finite(lse), (0, -q.shape[2] % _LSE_ALIGNMENT), value=math.inf)
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, not read
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            *(grad, q, wide_k, wide_v, _aligned(seen.bias, q, wide_k), out, padded),
            *(seed, seed, 0.0, [True, True, True, False], seen.causal),
            scale=scale,
        )
        return dq, summed_heads(dk, k), summed_heads(dv, v)


class AtenCudnnKernel:
    """CuDNN's attention through torch: half precision, no bias."""

    def unfit(self, form: BlockForm) -> str | None:
        """As `BlockKernel`."""
        return _no_flash(form, capability=8, largest=128)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> OutLse:
        """As `BlockKernel`."""
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            *(q, repeated_heads(k, q), repeated_heads(v, q), None, True, 0.0, seen.causal, False),
            scale=scale,
        )
        return out, lse.reshape(q.shape[:3])

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
        """As `BlockKernel`."""
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, not read
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            *(
                grad,
                q,
                repeated_heads(k, q),
                repeated_heads(v, q),
                out,
                lse[..., None].contiguous(),
            ),
            *(seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, seen.causal),
            scale=scale,
        )
        return dq, summed_heads(dk, k), summed_heads(dv, v)


class FlashAttn2Kernel:
    """The flash-attn package, version 2.7 or later: half precision, no bias.

    Source: `_wrapped_flash_attn_forward` and `_backward` of flash_attn/flash_attn_interface.py.
    """

    def unfit(self, form: BlockForm) -> str | None:
        """As `BlockKernel`."""
        return no_module("flash_attn") or _no_flash(form, capability=8)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> OutLse:
        """As `BlockKernel`."""
        from flash_attn import (  # pyright: ignore[reportMissingImports]
            flash_attn_interface as package,
        )

        out, lse, *_ = package._wrapped_flash_attn_forward(
            *_as_rows(q, k, v), 0.0, scale, seen.causal, -1, -1, 0.0, None, False
        )
        return out.transpose(1, 2), lse

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
        """As `BlockKernel`."""
        from flash_attn import (  # pyright: ignore[reportMissingImports]
            flash_attn_interface as package,
        )

        grads = [torch.empty_like(x) for x in _as_rows(q, k, v)]
        package._wrapped_flash_attn_backward(
            *_as_rows(grad, q, k, v, out),
            *(lse.contiguous(), *grads, 0.0, scale, seen.causal, -1, -1, 0.0, None, False),
        )
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv


class FlashAttn3Kernel:
    """Flash attention 3, the module `flash_attn_interface`: Hopper, half precision, no bias.

    Source: `_flash_attn_forward` and `_flash_attn_backward` of hopper/flash_attn_interface.py in
    the repository of flash-attn.
    """

    def unfit(self, form: BlockForm) -> str | None:
        """As `BlockKernel`."""
        return no_module("flash_attn_interface") or _no_flash(form, capability=9)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> OutLse:
        """As `BlockKernel`."""
        import flash_attn_interface as package  # pyright: ignore[reportMissingImports]

        out, lse, *_ = package._flash_attn_forward(
            *_as_rows(q, k, v), softmax_scale=scale, causal=seen.causal
        )
        return out.transpose(1, 2), lse

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
        """As `BlockKernel`."""
        import flash_attn_interface as package  # pyright: ignore[reportMissingImports]

        grads = [torch.empty_like(x) for x in _as_rows(q, k, v)]
        no_lengths = (None,) * 6
        package._flash_attn_backward(
            *_as_rows(grad, q, k, v, out), lse.contiguous(), *no_lengths, *grads, scale, seen.causal
        )
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv


def _no_flash(form: BlockForm, capability: int, largest: int = 256) -> str | None:
    """Why a kernel of the flash-attention family cannot compute that."""
    if form.device_type != "cuda":
        return f"runs on CUDA devices, not on {form.device_type}"
    if form.dtype not in _HALVES:
        return f"takes bfloat16 or float16, not {form.dtype}"
    if form.has_bias:
        return "takes no mask"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < capability:
        return f"needs a device of compute capability {capability}.0"
    return no_blocks(form) or _no_head_dim(form, 8, largest)


def _no_head_dim(form: BlockForm, alignment: int, largest: int | None) -> str | None:
    if form.head_dim is None or form.head_dim % alignment:
        return f"takes head widths that are multiples of {alignment}, not {form.head_dim}"
    if largest is not None and form.head_dim > largest:
        return f"takes head widths up to {largest}, not {form.head_dim}"
    return None


def _aligned(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """(B, H, Sq, Sk) the bias as q, its rows in memory at multiples of 16 elements."""
    if bias is None:
        return None
    whole = bias.to(q.dtype).expand(*bias.shape[:3], k.shape[2])
    padded = functional.pad(whole, (0, -k.shape[2] % _BIAS_ALIGNMENT))
    return padded[..., : k.shape[2]].expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _as_rows(*tensors: Tensor) -> list[Tensor]:
    """(B, S, H, D) each, contiguous."""
    return [x.transpose(1, 2).contiguous() for x in tensors]
