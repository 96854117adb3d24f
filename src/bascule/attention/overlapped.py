"""Ulysses attention that computes while rows travel.

A rank needs nothing from others to attend with its own tokens' queries to its own tokens' keys, and
nobody else waits for what its own queries give. So it attends to its own tokens while queries, keys
and values come; then with the queries of others, whose results it sends off; and while they travel
with its own queries to the keys of others. A rank that is late by less than the work at hand makes
nobody wait.

The exchanges are those of `ulysses`, the exact merge that of `ring`; the backward is that of the
operators of `ops`, on the same tensors. `FastUSP` overlaps a ring in this way, and leaves Ulysses
exposed.

Shapes: as in `ops`.
"""

from typing import Any

import torch
from torch import Tensor

from bascule.attention.forms import agree_on
from bascule.attention.kernels.protocol import Seen, wide_dtype
from bascule.attention.op_parts import (
    empty,
    exchange_of,
    going_back,
    naming,
    numbers_of,
    own_kv_heads,
    places,
    ring_plan,
)
from bascule.attention.ops import heads_to_tokens, ring_attention_backward, tokens_to_heads
from bascule.attention.ring import Merged, RingPlan


@torch.library.custom_op("bascule::overlapped_attention", mutates_args=())
def overlapped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    kernel: str,
    num_kv_heads: int,
    segments: list[int],
    stripe: int,
    mesh: str,
    form: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attention of (B, H, T, D) over Ulysses ranks, not causal. Two all-to-alls.

    Returns:
        Out (B, H, T, D), and what the backward needs: queries, keys, values, output and LSE of this
        rank's heads and all tokens. Only the first is differentiable.
    """
    ranks, layout = places(segments, False, stripe, mesh)
    agree_on(ranks, layout, tuple(q.shape[:3]), num_kv_heads, form)
    exchange = exchange_of(ranks, layout, num_kv_heads)
    own_q, own_k, own_v = (exchange.own_heads(x) for x in (q, k, v))
    plan = ring_plan(ranks, layout, own_q, own_k, mask, False, scale, kernel, None, form)
    own, everyone = exchange.own_tokens, slice(None)
    others = slice(0, own.start), slice(own.stop, layout.seq_len)
    with naming("overlapped_attention", (q, k, v)):
        arrive = exchange.start_to_heads((q, k, v), form)
        mine = Merged(own_q)
        try:
            _attend(mine, plan, own_q, own_k, own_v, own, own)
        finally:  # also after an error: memory that is written to must not be left
            wq, wk, wv = arrive()
        out, lse = empty(wq, wq.shape[1], wq.shape[2]), _empty_lse(wq)
        for rows in others:
            theirs = Merged(wq[:, :, rows])
            _attend(theirs, plan, wq[:, :, rows], wk, wv, rows, everyone)
            out[:, :, rows], lse[:, :, rows] = theirs.result()
        leave = exchange.start_to_tokens([out], form)
        try:
            for columns in others:
                _attend(mine, plan, own_q, wk[:, :, columns], wv[:, :, columns], own, columns)
            out[:, :, own], lse[:, :, own] = mine.result()
        finally:
            (own_out,) = leave()
    return own_out, wq, wk, wv, out, lse


@overlapped_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    kernel: str,
    num_kv_heads: int,
    segments: list[int],
    stripe: int,
    mesh: str,
    form: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    ranks, layout = places(segments, False, stripe, mesh)
    tokens, own = layout.ring_len(ranks.place[0]), own_kv_heads(ranks, num_kv_heads)
    wq, wk, wv = (empty(x, x.shape[1] // num_kv_heads * own, tokens) for x in (q, k, v))
    return empty(q, *q.shape[1:3]), wq, wk, wv, torch.empty_like(wq), _empty_lse(wq)


def _attend(
    merged: Merged, plan: RingPlan, q: Tensor, k: Tensor, v: Tensor, rows: slice, columns: slice
) -> None:
    """Add what queries, which are `rows` of all, see of keys, which are `columns` of all."""
    if not q.numel() or not k.numel():
        return
    (tile,) = plan.tiles[0]
    bias = tile.seen.bias
    if bias is not None:
        bias = bias[:, :, rows] if bias.shape[2] > 1 else bias
        bias = bias[:, :, :, columns] if bias.shape[3] > 1 else bias
    merged.add(slice(None), *plan.kernel.forward(q, k, v, Seen(bias=bias), plan.scale))


def _empty_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=wide_dtype(q))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, mask, *ctx.settings = inputs
    ctx.save_for_backward(*output[1:], mask)
    ctx.mark_non_differentiable(*output[1:])
    ctx.numbers = numbers_of(inputs[9])


def _gradients(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    scale, kernel, num_kv_heads, segments, stripe, mesh, form = ctx.settings
    geometry = segments, False, stripe, mesh, form
    *tensors, mask = ctx.saved_tensors
    going_back(mesh, ctx.numbers, grad)
    (grad,) = tokens_to_heads([grad], num_kv_heads, *geometry)
    grads = ring_attention_backward(grad, *tensors, mask, False, scale, kernel, *geometry)
    return *heads_to_tokens([*grads], num_kv_heads, *geometry), *(None,) * 8


overlapped_attention.register_autograd(_gradients, setup_context=_keep)
