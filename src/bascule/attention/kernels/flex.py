"""Torch's flex attention as a kernel for blocks. Shapes: as in `registry`."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bascule.arrays import Ints, cumulative, ranges
from bascule.attention.kernels.protocol import (
    Attended,
    Grads,
    KernelQuery,
    OutLse,
    misfit,
    repeated_heads,
    without_empty_rows,
)
from bascule.attention.mask import AttentionMask, BlockRows

SPARSE_BLOCK = 128
"""Flex attention's own block size, for which it has configurations on every device."""

Attend = Callable[[Tensor, Tensor, Tensor], OutLse]  # of q, k and v; differentiable


class FlexKernel:
    """Flex attention, compiled: half and single precision, with bias."""

    def unfit(self, form: KernelQuery) -> str | None:
        if form.head_dim is None or form.head_dim < 16 or form.head_dim & (form.head_dim - 1):
            return f"takes head widths that are powers of two from 16 on, not {form.head_dim}"
        if form.block is not None and not SPARSE_BLOCK // 2 < form.block <= SPARSE_BLOCK:
            return (
                f"pads blocks to {SPARSE_BLOCK} tokens, and takes those of more than half of it, "
                f"not {form.block}"
            )
        dtypes, has_blocks = (torch.bfloat16, torch.float16, torch.float32), form.block is not None
        return misfit(form, device="cuda", dtypes=dtypes, needs_blocks=has_blocks)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> OutLse:
        out, lse = flex(_compiled(), q, k, v, mask, scale)
        return without_empty_rows(out, lse, mask.bias)

    def backward(self, grad: Tensor, done: Attended) -> Grads:
        q, k, v, out, lse, mask, scale = done
        attend = partial(flex, _compiled(), mask=mask, scale=scale)
        return gradients_by_recomputation(attend, grad, q, k, v, out, lse)


def flex(
    flex_attention: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    scale: float,
) -> OutLse:
    """Return out and LSE of flex attention, with bias and causal mask as a change of the scores."""
    from torch.nn.attention.flex_attention import AuxRequest

    options = {"scale": scale, "return_aux": AuxRequest(lse=True)}
    if (rows := mask.blocks) is not None:
        seen, of_q, of_k = rows.keep(("flex", q.device), lambda: _flex_tables(rows, q.device))
        q, k, v = (
            _padded(q, of_q, rows.q_bounds),
            *(_padded(x, of_k, rows.k_bounds) for x in (k, v)),
        )
        out, aux = flex_attention(q, k, v, block_mask=seen, **options)
        return out[:, :, of_q], aux.lse[:, :, of_q]
    bias, causal = mask.bias, mask.causal
    whole = None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])

    def change(score: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        if whole is not None:
            score = score + whole[b, h, row, column]
        return torch.where(row >= column, score, -float("inf")) if causal else score

    options["score_mod"] = change if causal or bias is not None else None
    out, aux = flex_attention(q, repeated_heads(k, q), repeated_heads(v, q), **options)
    return out, aux.lse


def _flex_tables(rows: BlockRows, device: torch.device) -> tuple[Any, Tensor, Tensor]:
    """Return flex attention's own mask, and where queries and keys are when blocks are padded."""
    from torch.nn.attention.flex_attention import BlockMask

    q_lens, k_lens = np.diff(rows.q_bounds), np.diff(rows.k_bounds)
    by_key, is_short = rows.transposed, k_lens < SPARSE_BLOCK
    short, short_by_key = is_short[rows.columns], np.repeat(is_short, by_key.counts)
    tables = (
        *(*_ordered(rows, short), *_ordered(rows, ~short)),
        *(*_ordered(by_key, short_by_key), *_ordered(by_key, ~short_by_key)),
    )
    lens = torch.from_numpy(k_lens).to(device)

    def inside(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key % SPARSE_BLOCK < lens[key // SPARSE_BLOCK]

    size = (SPARSE_BLOCK, SPARSE_BLOCK)
    lengths = (q_lens.size * SPARSE_BLOCK, k_lens.size * SPARSE_BLOCK)
    on_device = (torch.from_numpy(table).to(device)[None, None] for table in tables)
    mask = BlockMask(lengths, *on_device, BLOCK_SIZE=size, mask_mod=inside)
    return mask, _places(q_lens).to(device), _places(k_lens).to(device)


def _ordered(rows: BlockRows, kept: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int32], ...]:
    """Return how many columns of each row are kept, (Q,), and which, (Q, most) filled up with 0."""
    num_rows = rows.counts.size
    row_of = np.repeat(np.arange(num_rows), rows.counts)[kept]
    counts = np.bincount(row_of, minlength=num_rows)
    columns = np.zeros((num_rows, max(1, counts.max())), dtype=np.int32)
    columns[row_of, np.arange(row_of.size) - cumulative(counts)[row_of]] = rows.columns[kept]
    return counts.astype(np.int32), columns


def _places(lens: Ints) -> Tensor:
    return torch.from_numpy(ranges(np.arange(lens.size) * SPARSE_BLOCK, lens))


def _padded(x: Tensor, places: Tensor, bounds: Ints) -> Tensor:
    padded = x.new_zeros(1, 1, (bounds.size - 1) * SPARSE_BLOCK, x.shape[3])
    return padded.index_copy(2, places, x)


def gradients_by_recomputation(
    attend: Attend, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Grads:
    """Return gradients of a block, from autograd through its own output and LSE, computed again.

    With w = exp(lse_i - lse), the merged output moves by w with the block's output out_i, and by
    w (out_i - out) with its LSE: the derivatives of the sum that `merge` forms.
    """
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    # Autograd is off below an operator, even where gradients are enabled.
    below = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with torch.enable_grad(), below:
        part, part_lse = attend(q, k, v)
    is_empty = torch.isneginf(part_lse.detach())
    weight = (part_lse.detach() - lse).exp().masked_fill(is_empty, 0.0)[..., None]
    wide = grad.to(weight.dtype)
    lse_grad = (weight * wide * (part.detach() - out)).sum(-1).masked_fill(is_empty, 0.0)
    pairs = [(part, (weight * wide).to(part.dtype)), (part_lse, lse_grad)]
    outputs, grads = zip(*[pair for pair in pairs if pair[0].requires_grad], strict=True)
    dq, dk, dv = torch.autograd.grad(outputs, (q, k, v), grads)
    return dq, dk, dv


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)
