"""Ulysses attention: ranks with some tokens and all heads become ranks with all tokens, some heads.

One all-to-all brings queries, keys and values there, one takes the output back; each is the
gradient of the other. Both are operators of torch: an operator is one node of a traced graph and
runs eagerly, so uneven splits need no graph break, and the shapes of results are expressions in the
lengths, so that a new length needs no new graph. Bags make the same exchanges in `usp`.

With a wire, rows are packed before an exchange and unpacked after it, in code that compilers see
and fuse. What a rank sends to itself is rounded, too, so that a row is the same wherever it is
used. The backward treats the transport as the identity, and gradients travel as they are. Source:
the straight-through estimator (arXiv:1308.3432).

Shapes: B batch, T tokens of this rank, S of all U Ulysses ranks, D head width. Tensors are (B,
tokens, heads, D).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bascule.attention.call_marks import agree_on_call
from bascule.attention.call_spec import CallSpec, naming, spec_of
from bascule.attention.layout import SequenceLayout
from bascule.comm.groups import RankGroup
from bascule.comm.heads import HeadExchange
from bascule.comm.mesh import Place
from bascule.comm.transforms import only_first
from bascule.comm.wire import Format, Wire
from bascule.plan.traffic import HeadShares

HeadRun = tuple[int, int]
"""(first, number) key-value heads of a rank."""

_Order = tuple[list[int], Tensor | None, Tensor | None, list[int]]
"""The attributes of `TokenOrder`: compilers take tuples, not objects, with tensors in them."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenOrder:
    """The tokens of Ulysses ranks, and how they lie where all of them are together.

    Attributes:
        lens: (U,) tokens of each rank.
        whole: (S,) which of the tokens of all ranks, one rank after the other, is at each place;
            None if they lie so.
        back: (S,) the inverse of `whole`.
        segments: On a mesh, those of the layout, on which ranks agree at its first exchange.
    """

    lens: list[int]
    whole: Tensor | None = None
    back: Tensor | None = None
    segments: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, layout: SequenceLayout, ring: int, device: torch.device) -> "TokenOrder":
        """Of the Ulysses ranks of a ring rank.

        Made anew, on the device: what is kept would belong to the graph that a device records.
        """
        lens, segments = layout.exchanged_lens(ring), list(layout.segments)
        tokens = [sum(parts) for parts in lens]
        if len(lens[0]) <= 1:
            return cls(tokens, segments=segments)
        by_rank = _firsts(lens)
        by_part = _firsts(list(zip(*lens, strict=True)))
        parts = range(len(lens[0]))
        whole = [
            torch.arange(by_rank[u][p], by_rank[u][p] + lens[u][p], device=device)
            for p in parts
            for u in range(len(lens))
        ]
        back = [
            torch.arange(by_part[p][u], by_part[p][u] + lens[u][p], device=device)
            for u in range(len(lens))
            for p in parts
        ]
        return cls(tokens, torch.cat(whole), torch.cat(back), segments)

    @property
    def given(self) -> _Order:
        """What compilers take."""
        return self.lens, self.whole, self.back, self.segments


# Defined by their schemas: `custom_op` costs 25 microseconds more a call.
torch.library.define(
    "bascule::tokens_to_heads",
    "(Tensor[] xs, Tensor? order, SymInt[] lens, SymInt[] segments, str spec) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "bascule::heads_to_tokens",
    "(Tensor[] xs, Tensor? order, SymInt[] lens, str spec) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)
tokens_to_heads = torch.ops.bascule.tokens_to_heads.default
heads_to_tokens = torch.ops.bascule.heads_to_tokens.default
TO_HEADS, TO_TOKENS = "all_to_all (tokens to heads)", "all_to_all (heads to tokens)"


@torch.library.impl("bascule::tokens_to_heads", "CompositeExplicitAutograd")
def _tokens_to_heads(
    xs: list[Tensor], order: Tensor | None, lens: list[int], segments: list[int], spec: str
) -> Tensor:
    """From (B, T, heads, D) each to (B, S, this rank's heads of all of them, D).

    One all-to-all over the Ulysses ranks, which bring `lens` tokens; `order` is as
    `TokenOrder.whole`. On a mesh, ranks agree on a layout of these segments before the first one.
    """
    call = spec_of(spec)
    if segments:
        batch, tokens = xs[0].shape[:2]
        agree_on_call(call, call.layout(segments), batch, tokens, None)
    with naming("tokens_to_heads", xs):
        return exchange_of(call, lens).start_to_heads(xs, TO_HEADS, order)()


@torch.library.register_fake("bascule::tokens_to_heads")
def _(
    xs: list[Tensor], order: Tensor | None, lens: list[int], segments: list[int], spec: str
) -> Tensor:
    call = spec_of(spec)
    heads = sum(x.shape[2] for x in xs) // call.num_kv_heads * call.own_kv_heads
    return xs[0].new_empty(xs[0].shape[0], sum(lens), heads, xs[0].shape[3])


@torch.library.impl("bascule::heads_to_tokens", "CompositeExplicitAutograd")
def _heads_to_tokens(
    xs: list[Tensor], order: Tensor | None, lens: list[int], spec: str
) -> list[Tensor]:
    """The inverse: from (B, S, this rank's heads, D) each to (B, T, heads, D) each.

    One all-to-all over the Ulysses ranks; `order` is as `TokenOrder.back`.
    """
    call = spec_of(spec)
    rows = xs[0] if len(xs) == 1 else torch.cat(xs, 2)
    heads = [x.shape[2] for x in xs]
    with naming("heads_to_tokens", xs):
        return exchange_of(call, lens).start_to_tokens(rows, heads, TO_TOKENS, order)()


@torch.library.register_fake("bascule::heads_to_tokens")
def _(xs: list[Tensor], order: Tensor | None, lens: list[int], spec: str) -> list[Tensor]:
    call = spec_of(spec)
    factors = [x.shape[2] // call.own_kv_heads * call.num_kv_heads for x in xs]
    own = lens[call.ranks.place[1]]
    return [
        x.new_empty(x.shape[0], own, heads, x.shape[3])
        for x, heads in zip(xs, factors, strict=True)
    ]


def exchange_of(spec: CallSpec, lens: Sequence[int]) -> HeadExchange:
    """Who of the Ulysses ranks has which tokens and heads."""
    group = spec.ranks.ulysses
    assert group is not None
    return _exchange(group, spec.num_kv_heads, tuple(lens))


@lru_cache(maxsize=256)
def _exchange(group: RankGroup, num_kv_heads: int, lens: tuple[int, ...]) -> HeadExchange:
    return HeadExchange(group, HeadShares.split(num_kv_heads, group.size), lens)


def own_run(num_kv_heads: int, ranks: Place) -> HeadRun:
    """This rank's key-value heads."""
    shares, rank = HeadShares.split(num_kv_heads, ranks.degrees[1]), ranks.place[1]
    return shares.first(rank), shares.of(rank)


def to_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: TokenOrder,
    spec: CallSpec,
    wire: Wire | None = None,
    own: HeadRun = (0, 0),
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all tokens with this rank's heads, (B, S, heads, D) each.

    Differentiable; one all-to-all a direction. `own` is used by a wire alone.
    """
    return _ToHeads.apply(_settings(wire, own), order.given, spec.text, q, k, v)


def to_tokens(
    out: Tensor,
    order: TokenOrder,
    spec: CallSpec,
    wire: Wire | None = None,
    own: HeadRun = (0, 0),
) -> Tensor:
    """The output of attention, (B, S, this rank's heads, D), as (B, T, heads, D).

    Differentiable; one all-to-all a direction. `own` is used by a wire alone.
    """
    return _ToTokens.apply(_settings(wire, own), order.given, spec.text, out)


_Settings = tuple[Format, HeadRun, Tensor | None, Tensor | None]
"""A wire and this rank's heads: compilers take tuples, not objects, with tensors in them."""


def _settings(wire: Wire | None, own: HeadRun) -> _Settings | None:
    return None if wire is None else (wire.format, own, wire.k_centre, wire.v_centre)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        settings: _Settings | None,
        order: _Order,
        spec: str,
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        lens, whole, back, segments = order
        ctx.save_for_backward(back)
        ctx.lens, ctx.spec = lens, spec
        sent = list(xs)
        if settings is not None:
            fmt, _, *centres = settings
            pairs = zip(xs, (None, *centres), strict=True)
            sent = [packed(Wire(fmt), x, centre) for x, centre in pairs]
        rows = tokens_to_heads(sent, whole, lens, segments, spec)
        all_heads = sum(x.shape[2] for x in xs)
        found = rows.split([x.shape[2] * rows.shape[2] // all_heads for x in xs], dim=2)
        if settings is None:
            return found
        fmt, own, *centres = settings
        mine = Wire(fmt, centres[0], centres[1]).of_heads(*own)
        pairs = zip(found, (None, mine.k_centre, mine.v_centre), strict=True)
        return tuple(unpacked(mine, x, xs[0].dtype, centre) for x, centre in pairs)

    @staticmethod
    @only_first
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return None, None, None, *heads_to_tokens(list(grads), back, ctx.lens, ctx.spec)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        settings: _Settings | None,
        order: _Order,
        spec: str,
        out: Tensor,
    ) -> Tensor:
        lens, whole, back, _ = order
        ctx.save_for_backward(whole)
        ctx.lens, ctx.spec = lens, spec
        if settings is None:
            (rows,) = heads_to_tokens([out], back, lens, spec)
        else:
            fmt, own, _, v_centre = settings
            wire = Wire(fmt, v_centre=v_centre)
            sent = packed(wire, out, wire.of_heads(*own).out_centre(out.shape[2]))
            (rows,) = heads_to_tokens([sent], back, lens, spec)
            rows = unpacked(wire, rows, out.dtype, wire.out_centre(rows.shape[2]))
        return rows

    @staticmethod
    @only_first
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (whole,) = ctx.saved_tensors
        return None, None, None, tokens_to_heads(list(grads), whole, ctx.lens, [], ctx.spec)


def packed(wire: Wire, x: Tensor, centre: Tensor | None) -> Tensor:
    """Rows (B, tokens, heads, D) as they travel; wires and centres are of (B, heads, tokens, D)."""
    return wire.pack(x.transpose(1, 2), centre).transpose(1, 2)


def unpacked(wire: Wire, x: Tensor, dtype: torch.dtype, centre: Tensor | None) -> Tensor:
    """The inverse of `packed`."""
    return wire.unpack(x.transpose(1, 2), dtype, centre).transpose(1, 2)


def _firsts(lens: Sequence[Sequence[int]]) -> list[list[int]]:
    """Where each part begins, if they lie one after the other."""
    found: list[list[int]] = []
    first = 0
    for parts in lens:
        found.append([])
        for length in parts:
            found[-1].append(first)
            first += length
    return found
