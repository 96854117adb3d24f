"""Attention of tokens that are shared over ranks, as one differentiable function.

Ulysses brings all tokens of some heads to a rank, the ring passes keys and values on, and Ulysses
takes the output back. It is one function of autograd, not three: each costs the host as much as an
exchange does.

Source: USP (arXiv:2405.07719), here for packed sequences and for blocks of a sparse mask.

Shapes: T tokens of this rank, S of its Ulysses ranks, H heads, K key-value heads, D head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bascule.attention.ring import RingPlan, ring_backward, ring_forward
from bascule.attention.ulysses import TokenOrder
from bascule.comm.heads import HeadExchange
from bascule.comm.transforms import refuse_second


@dataclass(frozen=True, slots=True, eq=False)
class SharedHeads:
    """How Ulysses ranks bring all tokens of some heads together, and take them back.

    Attributes:
        exchange: Who has which tokens and heads; without B.
        order: How the tokens lie where they are together.
        num_heads: This rank's queries' and keys'.
        to_heads: The call that brings tokens together.
        to_tokens: The call that takes them back.
    """

    exchange: HeadExchange
    order: TokenOrder
    num_heads: tuple[int, int]
    to_heads: str
    to_tokens: str

    def bring(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(1, S, this rank's heads of all three, D) of (T, heads, D) each. One all-to-all."""
        return self.exchange.start_to_heads((q, k, v), self.to_heads, self.order.whole)()

    def parts(self, whole: Tensor) -> tuple[Tensor, ...]:
        """(1, share of the heads, S, D) each, of what was brought together."""
        num_q, num_kv = self.num_heads
        return whole.transpose(1, 2).split_with_sizes((num_q, num_kv, num_kv), 1)

    def bring_one(self, x: Tensor) -> Tensor:
        """(1, share of the heads, S, D) of what has the heads of queries. One all-to-all."""
        whole = self.exchange.start_to_heads((x,), self.to_heads, self.order.whole)()
        return whole.transpose(1, 2)

    def take_back(self, *xs: Tensor) -> list[Tensor]:
        """From (1, share of the heads, S, D) each to (T, heads, D) each. One all-to-all."""
        rows = (xs[0] if len(xs) == 1 else torch.cat(xs, 1)).transpose(1, 2)
        heads = [x.shape[1] for x in xs]
        return self.exchange.start_to_tokens(rows, heads, self.to_tokens, self.order.back)()


def usp_attention(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, plan: RingPlan, heads: SharedHeads | None = None
) -> Tensor:
    """Exact attention of this rank's tokens, (T, H, D) as q. Differentiable.

    Two all-to-alls where heads are shared, and R - 1 exchanges with the neighbours of the ring;
    backward two and 2 R - 1.

    Args:
        q_THD: Queries.
        k_TKD: Keys; H is a multiple of K.
        v_TKD: Values.
        plan: What this rank does in each round of the ring.
        heads: How Ulysses ranks share heads; None: this rank's tokens are all of its ring place.
    """
    return _Attention.apply(q_THD, k_TKD, v_TKD, plan, heads)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, heads: SharedHeads | None
    ) -> Tensor:
        done = usp_forward(q, k, v, plan, heads)
        ctx.plan, ctx.heads = plan, heads
        ctx.save_for_backward(*done.rows, done.out, done.lse)
        return done.own

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second(grads[0])
        saved = ctx.saved_tensors  # first: checkpointing may compute them, with calls of its own
        return *usp_backward(grads[0], saved, ctx.plan, ctx.heads), None, None


class Forward(NamedTuple):
    """What the forward computed.

    Attributes:
        own: (T, H, D) the output of this rank's tokens.
        whole: (1, S, heads of all three, D) what was brought together; None without shared heads.
        rows: (1, heads, S, D) each, what was attended: q, k and v.
        out: (1, heads, S, D) the output.
        lse: (1, heads, S) its LSE.
    """

    own: Tensor
    whole: Tensor | None
    rows: tuple[Tensor, ...]
    out: Tensor
    lse: Tensor


def usp_forward(
    q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, heads: SharedHeads | None
) -> Forward:
    """The forward of `usp_attention`, which autograd does not record."""
    whole = None
    if heads is None:
        q, k, v = rows = by_head(q), by_head(k), by_head(v)
    else:
        whole = heads.bring(q, k, v)
        q, k, v = rows = heads.parts(whole)
    out, lse = ring_forward(q, k, v, plan)
    if heads is None:
        kept = out.detach()
        own = out.transpose_(1, 2).squeeze_(0)  # in place: a view could not be written to
        return Forward(own, None, rows, kept, lse)
    (own,) = heads.take_back(out)
    return Forward(own, whole, rows, out, lse)


def usp_backward(
    grad: Tensor,
    saved: Sequence[Tensor],
    plan: RingPlan,
    heads: SharedHeads | None,
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v at home; `saved` are the rows, the output and the LSE."""
    grad = by_head(grad) if heads is None else heads.bring_one(grad)
    q, k, v, out, lse = saved
    found = ring_backward(grad, q, k, v, out, lse, plan)
    if heads is None:
        return tuple(x.transpose(1, 2)[0] for x in found)
    return tuple(heads.take_back(*found))


def by_head(x: Tensor) -> Tensor:
    """(1, heads, T, D) of (T, heads, D)."""
    return x.transpose(0, 1)[None]
