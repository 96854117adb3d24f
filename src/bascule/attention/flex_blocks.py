"""Torch's flex attention as a kernel for blocks.

Shapes: as in `blocks`.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bascule.attention.block_form import BlockForm, repeated_heads, without_empty_rows

Attend = Callable[
    [Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor]
]  # q, k, v, bias, causal, scale -> out, LSE, both differentiable


class FlexKernel:
    """Flex attention, compiled: half and single precision, with bias.

    Its backward is that of the block's own output and LSE; see `gradients_by_recomputation`.
    """

    def unfit(self, form: BlockForm) -> str | None:
        """As `BlockKernel`."""
        if form.device_type != "cuda":
            return f"runs on CUDA devices, not on {form.device_type}: it has no backward there"
        if form.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"takes bfloat16, float16 or float32, not {form.dtype}"
        if form.head_dim is None or form.head_dim < 16 or form.head_dim & (form.head_dim - 1):
            return f"takes head widths that are powers of two from 16 on, not {form.head_dim}"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """As `BlockKernel`."""
        out, lse = flex(_compiled(), q, k, v, bias, causal, scale)
        return without_empty_rows(out, lse, bias)

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

        def attend(
            q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
        ) -> tuple[Tensor, Tensor]:
            return flex(_compiled(), q, k, v, bias, causal, scale)

        return gradients_by_recomputation(attend, grad, q, k, v, out, lse, bias, causal, scale)


def flex(
    flex_attention: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Out and LSE of flex attention, with a bias and a causal mask as a change of the scores."""
    from torch.nn.attention.flex_attention import AuxRequest

    whole = None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])

    def change(score: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        if whole is not None:
            score = score + whole[b, h, row, column]
        return torch.where(row >= column, score, -float("inf")) if causal else score

    out, aux = flex_attention(
        q,
        repeated_heads(k, q),
        repeated_heads(v, q),
        score_mod=change if causal or bias is not None else None,
        scale=scale,
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse


def gradients_by_recomputation(
    attend: Attend,
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
    """Gradients of a block, from autograd through its own output and LSE, computed again.

    With w = exp(lse_i - lse), the merged output moves by w with the block's output out_i, and by
    w (out_i - out) with its LSE: the derivatives of the sum that `merge` forms.
    """
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        part, part_lse = attend(q, k, v, bias, causal, scale)
    is_empty = torch.isneginf(part_lse.detach())
    weight = (part_lse.detach() - lse).exp().masked_fill(is_empty, 0.0)[..., None]
    wide = grad.to(weight.dtype)
    lse_grad = (weight * wide * (part.detach() - out)).sum(-1).masked_fill(is_empty, 0.0)
    dq, dk, dv = torch.autograd.grad(
        (part, part_lse), (q, k, v), ((weight * wide).to(part.dtype), lse_grad)
    )
    return dq, dk, dv


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)
