"""Attention of tokens that are shared over ranks, as one differentiable function.

Ulysses brings all tokens of some heads to a rank, the ring passes keys and values on, and Ulysses
takes the output back. It is one function of autograd, not three: each costs the host as much as an
exchange does.

Source: USP (arXiv:2405.07719), here for packed sequences and for blocks of a sparse mask.

Shapes: T tokens of this rank, S of its Ulysses ranks, H heads, K key-value heads, D head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bascule.attention.ring import RingPlan, ring_backward, ring_forward
from bascule.attention.ulysses import TokenOrder
from bascule.comm.guard.calls import Call
from bascule.comm.guard.derivatives import only_first
from bascule.comm.head_exchange import HeadExchange


@dataclass(frozen=True, slots=True, eq=False)
class SharedHeads:
    """How Ulysses ranks bring all tokens of some heads together, and take them back.

    Attributes:
        exchange: Who has which tokens and heads.
        order: How the tokens lie where they are together.
        form: What all ranks must mean alike, as text.
        step: Step number in errors; 0 where there are none.
    """

    exchange: HeadExchange
    order: TokenOrder
    form: str
    step: int = 0

    def bring(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """From (1, T, heads, D) each to (1, share of the heads, S, D) each. One all-to-all."""
        call = Call("all_to_all (tokens to heads)", self.step, self.form)
        rows = self.exchange.start_to_heads(xs, call)()
        if self.order.whole is not None:
            rows = rows.index_select(1, self.order.whole)
        shares = self.exchange.heads_of_each(xs)
        return [x.transpose(1, 2) for x in rows.split_with_sizes(shares, 2)]

    def take_back(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of `bring`. One all-to-all."""
        xs = [x.transpose(1, 2) for x in xs]
        if self.order.back is not None:
            xs = [x.index_select(1, self.order.back) for x in xs]
        call = Call("all_to_all (heads to tokens)", self.step, self.form)
        return self.exchange.start_to_tokens(xs, call)()

    def go_back(self, number: int) -> None:
        """Mark what follows as the backward of the call before which the group made so many."""
        self.exchange.group.calls.mean(f"gradients of {number}")


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
        q, k, v = _by_head((q, k, v), heads)
        out, lse = ring_forward(q, k, v, plan)
        ctx.save_for_backward(q, k, v, out.detach(), lse)
        ctx.plan, ctx.heads = plan, heads
        ctx.rings = 0 if plan.group is None else plan.group.calls.number
        if heads is not None:
            (out,) = heads.take_back([out])
            ctx.number = heads.exchange.group.calls.number
            return out.squeeze_(0)  # in place: a view could not be written to
        return out.transpose_(1, 2).squeeze_(0)

    @staticmethod
    @only_first
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        heads: SharedHeads | None = ctx.heads
        if heads is not None:
            heads.go_back(ctx.number)
        (grad,) = _by_head(grads, heads)
        plan = replace(ctx.plan, form=f"{ctx.plan.form}, gradients of {ctx.rings}")
        found = ring_backward(grad, q, k, v, out, lse, plan)
        if heads is None:
            return *(x.transpose(1, 2)[0] for x in found), None, None
        return *(x[0] for x in heads.take_back(found)), None, None


def _by_head(xs: Sequence[Tensor], heads: SharedHeads | None) -> list[Tensor]:
    """(1, heads of this rank, all tokens, D) of (T, heads, D)."""
    xs = [x[None] for x in xs]
    return [x.transpose(1, 2) for x in xs] if heads is None else heads.bring(xs)
