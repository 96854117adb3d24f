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

from bascule.attention.call_marks import agree_on_call, going_back, numbers_of
from bascule.attention.call_spec import naming, spec_of
from bascule.attention.kernels.protocol import wide_dtype
from bascule.attention.mask import AttentionMask
from bascule.attention.ops import ring_attention_backward, ring_plan
from bascule.attention.ring import Merged, RingPlan
from bascule.attention.shards import SequenceLayout, num_tokens
from bascule.attention.ulysses import exchange_of, heads_to_tokens, tokens_to_heads


@torch.library.custom_op("bascule::overlapped_attention", mutates_args=())
def overlapped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, segments: list[int], spec: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of (B, H, T, D) over Ulysses ranks, not causal. Two all-to-alls.

    Returns:
        Out (B, H, T, D), and what the backward needs: queries, keys and values side by side, (B, S,
        this rank's heads of all three, D), output (B, S, heads, D) and LSE of this rank's heads and
        all tokens. Only the first is differentiable.
    """
    call = spec_of(spec)
    ranks, layout = call.ranks, call.layout(segments)
    agree_on_call(call, layout, q.shape[0], q.shape[2])
    exchange = exchange_of(call, _lens(layout))
    xs = [x.transpose(1, 2) for x in (q, k, v)]
    heads = [exchange.own_heads(x).shape[2] for x in xs]
    own_q, own_k, own_v = (exchange.own_heads(x).transpose(1, 2) for x in xs)
    plan = ring_plan(ranks, layout, own_q, own_k, mask, (None, None), call)
    own, everyone = exchange.own_tokens, slice(None)
    others = slice(0, own.start), slice(own.stop, layout.seq_len)
    with naming("overlapped_attention", (q, k, v)):
        arrive = exchange.start_to_heads(xs, call.call("all_to_all (tokens to heads)"))
        mine = Merged(own_q)
        try:
            _attend(mine, plan, own_q, own_k, own_v, own, own)
        finally:  # also after an error: memory that is written to must not be left
            rows = arrive()
        wq, wk, wv = (x.transpose(1, 2) for x in rows.split(heads, dim=2))
        out, lse = rows.new_empty(*rows.shape[:2], heads[0], rows.shape[3]), _empty_lse(wq)
        for part in others:
            theirs = Merged(wq[:, :, part])
            _attend(theirs, plan, wq[:, :, part], wk, wv, part, everyone)
            found, lse[:, :, part] = theirs.result()
            out[:, part] = found.transpose(1, 2)
        leave = exchange.start_to_tokens(out, heads[:1], call.call("all_to_all (heads to tokens)"))
        try:
            for columns in others:
                _attend(mine, plan, own_q, wk[:, :, columns], wv[:, :, columns], own, columns)
        finally:
            (own_out,) = leave()
        found, lse[:, :, own] = mine.result()
        out[:, own] = found.transpose(1, 2)
        exchange.own_heads(own_out).copy_(found.transpose(1, 2))
    return own_out.transpose(1, 2), rows, out, lse


@overlapped_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, segments: list[int], spec: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = spec_of(spec)
    tokens = call.layout(segments).ring_len(0)
    queries = q.shape[1] // call.num_kv_heads * call.own_kv_heads
    heads = queries + 2 * call.own_kv_heads
    batch, _, own, width = q.shape
    out = q.new_empty(batch, own, q.shape[1], width).transpose(1, 2)
    rows = q.new_empty(batch, tokens, heads, width)
    whole = q.new_empty(batch, tokens, queries, width)
    return out, rows, whole, q.new_empty(batch, queries, tokens, dtype=wide_dtype(q))


def _lens(layout: SequenceLayout) -> list[int]:
    """Tokens that each Ulysses rank brings."""
    return [num_tokens(layout.own_runs(0, rank)) for rank in range(layout.ulysses_degree)]


def _attend(
    merged: Merged, plan: RingPlan, q: Tensor, k: Tensor, v: Tensor, rows: slice, columns: slice
) -> None:
    """Add what queries, which are `rows` of all, see of keys, which are `columns` of all."""
    if not q.numel() or not k.numel():
        return
    (tile,) = plan.tiles[0]
    bias = tile.mask.bias
    if bias is not None:
        bias = bias[:, :, rows] if bias.shape[2] > 1 else bias
        bias = bias[:, :, :, columns] if bias.shape[3] > 1 else bias
    merged.add(slice(None), *plan.kernel.forward(q, k, v, AttentionMask(bias=bias), plan.scale))


def _empty_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=wide_dtype(q))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *_, mask, ctx.segments, ctx.spec = inputs
    ctx.save_for_backward(*output[1:], mask)
    ctx.mark_non_differentiable(*output[1:])
    ctx.numbers = numbers_of(ctx.spec)


def _gradients(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    rows, out, lse, mask = ctx.saved_tensors
    call = spec_of(ctx.spec)
    lens = _lens(call.layout(ctx.segments))
    going_back(ctx.spec, ctx.numbers, grad)
    grad = tokens_to_heads([grad.transpose(1, 2)], None, lens, [], ctx.spec).transpose(1, 2)
    heads = [out.shape[2], call.own_kv_heads, call.own_kv_heads]
    saved = [x.transpose(1, 2) for x in (*rows.split(heads, dim=2), out)]
    grads = ring_attention_backward(grad, [*saved, lse], mask, None, None, ctx.segments, ctx.spec)
    back = heads_to_tokens([x.transpose(1, 2) for x in grads], None, lens, ctx.spec)
    return *(x.transpose(1, 2) for x in back), None, None, None


overlapped_attention.register_autograd(_gradients, setup_context=_keep)
