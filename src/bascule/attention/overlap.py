"""Ulysses attention that computes while rows travel, alone or around a ring.

A rank needs nothing from others to attend with its own tokens' queries to its own tokens' keys, and
nobody else waits for what its own queries give. So it attends to its own tokens while queries, keys
and values come. All queries then see the keys of each ring rank in turn; in the last round those of
others come first, whose results it sends off, and its own attend while they travel. A rank that is
late by less than the work at hand makes nobody wait.

The exchanges are those of `ulysses`, the rounds and the exact merge those of `ring`; the backward
is that of the operators of `ops`, on the same tensors. `FastUSP` overlaps a ring in this way, and
leaves Ulysses exposed.

Shapes: as in `ops`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bascule.attention.call_marks import agree_on_call
from bascule.attention.call_spec import CallSpec, naming, spec_of
from bascule.attention.kernels.protocol import wide_dtype
from bascule.attention.layout import SequenceLayout, num_tokens
from bascule.attention.mask import EVERYTHING, AttentionMask
from bascule.attention.ops import ring_attention_backward, ring_plan
from bascule.attention.ring import Merged, RingPlan, rotate
from bascule.attention.ulysses import (
    TO_HEADS,
    TO_TOKENS,
    exchange_of,
    heads_to_tokens,
    own_run,
    packed,
    tokens_to_heads,
    unpacked,
)
from bascule.comm.heads import HeadExchange
from bascule.comm.mesh import place_in
from bascule.comm.wire import Format, Wire


@torch.library.custom_op("bascule::overlapped_attention", mutates_args=())
def overlapped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    k_centre: Tensor | None,
    v_centre: Tensor | None,
    segments: list[int],
    spec: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of (B, H, T, D) over Ulysses ranks and, if there is one, a ring; not zigzag.

    Two all-to-alls, and R - 1 exchanges around the ring. Centres are those of all heads.

    Returns:
        Out (B, H, T, D), and what the backward needs: queries, keys and values side by side, (B, S,
        this rank's heads of all three, D), output (B, S, heads, D) and LSE of this rank's heads and
        all S tokens of the ring rank. Only the first is differentiable.
    """
    call = spec_of(spec)
    layout = call.layout(segments)
    agree_on_call(call, layout, q.shape[0], q.shape[2], mask)
    exchange = exchange_of(call, _lens(layout, call))
    form = _RowForm.of(call, k_centre, v_centre, q.dtype)
    xs = form.packed([x.transpose(1, 2) for x in (q, k, v)])
    heads = [exchange.own_heads(x).shape[2] for x in xs]
    qkv = form.unpacked(exchange.own_heads(x) for x in xs)
    plan = ring_plan(call.ranks, layout, qkv[0], qkv[1], mask, form.own_centres, call)
    own = exchange.own_tokens
    with naming("overlapped_attention", (q, k, v)):
        arrive = exchange.start_to_heads(xs, TO_HEADS)
        mine = Merged(qkv[0])
        try:
            _attend(mine, plan, 0, qkv, own, own)
        finally:  # also after an error: memory that is written to must not be left
            rows = arrive()
        whole = form.unpacked(rows.split(heads, dim=2))
        if form.wire is not None:
            rows = torch.cat([x.transpose(1, 2) for x in whole], dim=2)
        out, lse, own_out = _rounds(mine, qkv[0], whole, plan, exchange, form)
    return own_out.transpose(1, 2), rows, out, lse


@dataclass(frozen=True, slots=True, eq=False)
class _RowForm:
    """As what rows of (B, tokens, heads, D) travel, and are attended: (B, heads, tokens, D).

    Attributes:
        wire: With centres of all heads; None: rows travel as they are.
        mine: With those of this rank's heads.
        dtype: Of the rows.
    """

    wire: Wire | None
    mine: Wire | None
    dtype: torch.dtype

    @classmethod
    def of(
        cls, call: CallSpec, k_centre: Tensor | None, v_centre: Tensor | None, dtype: torch.dtype
    ) -> "_RowForm":
        if not call.wire:
            return cls(None, None, dtype)
        wire_format: Format = call.wire  # pyright: ignore[reportAssignmentType]
        wire = Wire(wire_format, k_centre, v_centre)
        return cls(wire, wire.of_heads(*own_run(call.num_kv_heads, place_in(call.ranks))), dtype)

    @property
    def own_centres(self) -> tuple[Tensor | None, Tensor | None]:
        """Of this rank's keys and values."""
        return (None, None) if self.mine is None else (self.mine.k_centre, self.mine.v_centre)

    def packed(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Queries, keys and values of all heads."""
        if self.wire is None:
            return list(xs)
        centres = None, self.wire.k_centre, self.wire.v_centre
        return [packed(self.wire, x, centre) for x, centre in zip(xs, centres, strict=True)]

    def unpacked(self, xs: Iterable[Tensor]) -> list[Tensor]:
        """Those of this rank's heads."""
        mine = self.mine
        if mine is not None:
            centres = None, mine.k_centre, mine.v_centre
            xs = [unpacked(mine, x, self.dtype, c) for x, c in zip(xs, centres, strict=True)]
        return [x.transpose(1, 2) for x in xs]

    def packed_out(self, out: Tensor) -> Tensor:
        """The output of this rank's heads."""
        return out if self.mine is None else packed(self.mine, out, self._centre(self.mine, out))

    def unpacked_out(self, out: Tensor, wire: Wire | None) -> Tensor:
        """That of the heads of `wire`."""
        return out if wire is None else unpacked(wire, out, self.dtype, self._centre(wire, out))

    def _centre(self, wire: Wire, out: Tensor) -> Tensor | None:
        return wire.out_centre(out.shape[2])


def _rounds(
    mine: Merged,
    own_q: Tensor,
    whole: list[Tensor],
    plan: RingPlan,
    exchange: HeadExchange,
    form: _RowForm,
) -> tuple[Tensor, Tensor, Tensor]:
    """Out and LSE of this rank's heads, and (B, T, H, D) of its tokens, after all rounds."""
    q, keys, values = whole
    own, everyone = exchange.own_tokens, slice(0, q.shape[2])
    others = slice(0, own.start), slice(own.stop, everyone.stop)
    theirs = [Merged(q[:, :, part]) for part in others]
    out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[:3], dtype=wide_dtype(q))
    leaving: list[Any] = []

    def attend(turn: int, keys: Tensor, values: Tensor) -> None:
        for merged, part in zip(theirs, others, strict=True):
            every = slice(0, keys.shape[2])
            _attend(merged, plan, turn, (q[:, :, part], keys, values), part, every)
        if turn == plan.size - 1:
            for merged, part in zip(theirs, others, strict=True):
                found, lse[:, :, part] = merged.result()
                out[:, part] = found.transpose(1, 2)
            leaving.append(exchange.start_to_tokens(form.packed_out(out), [q.shape[1]], TO_TOKENS))
        for columns in others if turn == 0 else [slice(0, keys.shape[2])]:
            seen = keys[:, :, columns], values[:, :, columns]
            _attend(mine, plan, turn, (own_q, *seen), own, columns)

    try:
        rotate(plan, keys, values, attend)
    finally:
        arrived = [one() for one in leaving]
    ((own_out,),) = arrived
    found, lse[:, :, own] = mine.result()
    out[:, own] = found.transpose(1, 2)
    own_out = form.unpacked_out(own_out, form.wire)
    as_sent = form.unpacked_out(form.packed_out(out[:, own]), form.mine)
    exchange.own_heads(own_out).copy_(as_sent)
    return out, lse, own_out


@overlapped_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    k_centre: Tensor | None,
    v_centre: Tensor | None,
    segments: list[int],
    spec: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = spec_of(spec)
    tokens = call.layout(segments).ring_len(call.ranks.place[0])
    queries = q.shape[1] // call.num_kv_heads * call.own_kv_heads
    heads = queries + 2 * call.own_kv_heads
    batch, _, own, width = q.shape
    out = q.new_empty(batch, own, q.shape[1], width).transpose(1, 2)
    rows = q.new_empty(batch, tokens, heads, width)
    whole = q.new_empty(batch, tokens, queries, width)
    return out, rows, whole, q.new_empty(batch, queries, tokens, dtype=wide_dtype(q))


def _lens(layout: SequenceLayout, call: CallSpec) -> list[int]:
    """Tokens that each Ulysses rank brings."""
    ring = call.ranks.place[0]
    return [num_tokens(layout.own_runs(ring, rank)) for rank in range(layout.ulysses_degree)]


def _attend(
    merged: Merged, plan: RingPlan, turn: int, qkv: Sequence[Tensor], rows: slice, columns: slice
) -> None:
    """Add what some queries see of some keys of a round.

    Args:
        merged: What these queries saw before.
        plan: Of the ring.
        turn: The round.
        qkv: These queries, and these keys and values.
        rows: Which of the queries of this ring rank they are.
        columns: Which of the keys of the round.
    """
    q, k, v = qkv
    for tile in plan.tiles[plan.owner(turn)]:
        for seen, mask in _parts(tile.mask, rows, columns):
            at = slice(seen.start - columns.start, seen.stop - columns.start)
            if q.numel() and k[:, :, at].numel():
                found = plan.kernel.forward(q, k[:, :, at], v[:, :, at], mask, plan.scale)
                merged.add(slice(None), *found)


def _parts(mask: AttentionMask, rows: slice, columns: slice) -> list[tuple[slice, AttentionMask]]:
    """Which of some columns some rows of a mask see, and how.

    The columns hold those of the rows' own numbers, all or none.
    """
    if mask.causal:
        parts = [(slice(columns.start, min(columns.stop, rows.start)), EVERYTHING)]
        if columns.start <= rows.start and rows.stop <= columns.stop:
            parts.append((rows, mask))
        return [part for part in parts if part[0].start < part[0].stop]
    bias = mask.bias
    if bias is not None:
        bias = bias[:, :, rows] if bias.shape[2] > 1 else bias
        bias = bias[:, :, :, columns] if bias.shape[3] > 1 else bias
    return [(columns, AttentionMask(bias=bias))]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *_, mask, k_centre, v_centre, ctx.segments, ctx.spec = inputs
    ctx.save_for_backward(*output[1:], mask, k_centre, v_centre)
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    rows, out, lse, mask, k_centre, v_centre = ctx.saved_tensors
    call = spec_of(ctx.spec)
    lens = _lens(call.layout(ctx.segments), call)
    grad = tokens_to_heads([grad.transpose(1, 2)], None, lens, [], ctx.spec).transpose(1, 2)
    heads = [out.shape[2], call.own_kv_heads, call.own_kv_heads]
    saved = [x.transpose(1, 2) for x in (*rows.split(heads, dim=2), out)]
    k_centre, v_centre = _RowForm.of(call, k_centre, v_centre, grad.dtype).own_centres
    settings = mask, k_centre, v_centre, ctx.segments, ctx.spec
    grads = ring_attention_backward(grad, [*saved, lse], *settings)
    back = heads_to_tokens([x.transpose(1, 2) for x in grads], None, lens, ctx.spec)
    return *(x.transpose(1, 2) for x in back), *(None,) * 5


overlapped_attention.register_autograd(_gradients, setup_context=_keep)
