"""The exchanges and the ring as operators of torch, so that compilers see them as they are.

An operator is one node of a traced graph and runs eagerly: point-to-point transfers and uneven
splits keep their order in compiled programs, no graph breaks at them, and the shapes of their
results are expressions in the lengths, so that a new length needs no new graph. A mesh goes by the
name of its process groups, as in torch's functional collectives.

Shapes: as in `mesh`; T here without a rank's copies of what other ranks answer for. All results lie
in memory as (B, T, H, D).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bascule.attention.forms import agree_on
from bascule.attention.op_parts import (
    empty,
    exchange_of,
    gathered_runs,
    going_back,
    laid_out,
    naming,
    numbers_of,
    own_kv_heads,
    own_memory,
    places,
    ring_plan,
    wire_of,
)
from bascule.attention.ring import ring_backward, ring_forward
from bascule.attention.shards import num_tokens, take_runs
from bascule.comm import quantize
from bascule.comm.guard.calls import Call
from bascule.comm.transfers import all_gather, reduce_scatter


@torch.library.custom_op("bascule::tokens_to_heads", mutates_args=())
def tokens_to_heads(
    xs: list[Tensor],
    num_kv_heads: int,
    segments: list[int],
    zigzag: bool,
    stripe: int,
    mesh: str,
    form: str,
) -> list[Tensor]:
    """From (B, heads, T, D) each to (B, share of the heads, tokens of the ring rank, D) each.

    One all-to-all over the Ulysses ranks. The gradient is `heads_to_tokens`. `form` is what
    `forms.form_of` says of the call.
    """
    ranks, layout = places(segments, zigzag, stripe, mesh)
    agree_on(ranks, layout, tuple(xs[0].shape[:3]), num_kv_heads, form)
    with naming("tokens_to_heads", xs):
        return exchange_of(ranks, layout, num_kv_heads).start_to_heads(xs, form)()


@tokens_to_heads.register_fake
def _(
    xs: list[Tensor],
    num_kv_heads: int,
    segments: list[int],
    zigzag: bool,
    stripe: int,
    mesh: str,
    form: str,
) -> list[Tensor]:
    ranks, layout = places(segments, zigzag, stripe, mesh)
    tokens, own = layout.ring_len(ranks.place[0]), own_kv_heads(ranks, num_kv_heads)
    return [empty(x, x.shape[1] // num_kv_heads * own, tokens) for x in xs]


@torch.library.custom_op("bascule::heads_to_tokens", mutates_args=())
def heads_to_tokens(
    xs: list[Tensor],
    num_kv_heads: int,
    segments: list[int],
    zigzag: bool,
    stripe: int,
    mesh: str,
    form: str,
) -> list[Tensor]:
    """The inverse of `tokens_to_heads`, and its gradient. One all-to-all over the Ulysses ranks."""
    ranks, layout = places(segments, zigzag, stripe, mesh)
    with naming("heads_to_tokens", xs):
        return exchange_of(ranks, layout, num_kv_heads).start_to_tokens(xs, form)()


@heads_to_tokens.register_fake
def _(
    xs: list[Tensor],
    num_kv_heads: int,
    segments: list[int],
    zigzag: bool,
    stripe: int,
    mesh: str,
    form: str,
) -> list[Tensor]:
    ranks, layout = places(segments, zigzag, stripe, mesh)
    own = own_kv_heads(ranks, num_kv_heads)
    tokens = num_tokens(layout.own_runs(*ranks.place))
    return [empty(x, x.shape[1] // own * num_kv_heads, tokens) for x in xs]


@torch.library.custom_op("bascule::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kernel: str,
    segments: list[int],
    zigzag: bool,
    stripe: int,
    mesh: str,
    form: str,
    wire: str = "",
    k_centre: Tensor | None = None,
    v_centre: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a ring rank's queries to the keys of the ring, and its LSE, without gradient.

    R - 1 exchanges with the neighbours, and 2 R - 1 backward. Keys and values travel as `wire`
    says, a format or "" for as they are, with centres of their heads.
    """
    ranks, layout = places(segments, zigzag, stripe, mesh)
    if ranks.ulysses is None:  # else said before the all-to-all
        agree_on(ranks, layout, tuple(q.shape[:3]), k.shape[1], form)
    travel = wire_of(wire, k_centre, v_centre)
    plan = ring_plan(ranks, layout, q, k, mask, causal, scale, kernel, travel, form)
    with naming("ring_attention", (q, k, v)):
        out, lse = ring_forward(q, k, v, plan)
    return laid_out(out), lse.contiguous()


@ring_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kernel: str,
    segments: list[int],
    zigzag: bool,
    stripe: int,
    mesh: str,
    form: str,
    wire: str = "",
    k_centre: Tensor | None = None,
    v_centre: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return empty(q, q.shape[1], q.shape[2]), q.new_empty(q.shape[:3], dtype=wide)


@torch.library.custom_op("bascule::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kernel: str,
    segments: list[int],
    zigzag: bool,
    stripe: int,
    mesh: str,
    form: str,
    wire: str = "",
    k_centre: Tensor | None = None,
    v_centre: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of `ring_attention`."""
    ranks, layout = places(segments, zigzag, stripe, mesh)
    travel = wire_of(wire, k_centre, v_centre)
    plan = ring_plan(ranks, layout, q, k, mask, causal, scale, kernel, travel, form)
    with naming("ring_attention_backward", (q, k, v)):
        dq, dk, dv = ring_backward(grad, q, k, v, out, lse, plan)
    return laid_out(dq), laid_out(dk), laid_out(dv)


@ring_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (empty(x, x.shape[1], x.shape[2]) for x in (q, k, v))
    return dq, dk, dv


@torch.library.custom_op("bascule::take_centres", mutates_args=())
def take_centres(
    k: Tensor,
    v: Tensor,
    num_heads: int,
    num_kv_heads: int,
    segments: list[int],
    zigzag: bool,
    stripe: int,
    mesh: str,
    form: str,
) -> Tensor:
    """`quantize.take_centres` over all ranks of the mesh. One all-reduce.

    Of as many heads as `k` has, for a call with `num_heads` for `num_kv_heads`.
    """
    ranks, layout = places(segments, zigzag, stripe, mesh)
    agree_on(ranks, layout, (k.shape[0], num_heads, k.shape[2]), num_kv_heads, form)
    with naming("take_centres", (k, v)):
        return own_memory(quantize.take_centres(k, v, ranks.whole))


@take_centres.register_fake
def _(k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return k.new_empty(2, *k.shape[:2], 1, k.shape[3], dtype=torch.float32)


@torch.library.custom_op("bascule::gather_tokens", mutates_args=())
def gather_tokens(
    x: Tensor, segments: list[int], zigzag: bool, stripe: int, mesh: str, sums_gradients: bool
) -> Tensor:
    """From (T, ...) tokens of a rank to (S, ...) those of all, in the order of the sequence.

    One all-gather. The gradient of a rank's tokens is that of its copy, or, with `sums_gradients`,
    the sum over the copies of all ranks, by one reduce-scatter.
    """
    ranks, layout = places(segments, zigzag, stripe, mesh)
    assert ranks.whole is not None
    runs, padded = gathered_runs(layout)
    rows = x.new_zeros(padded, *x.shape[1:])
    rows[: x.shape[0]] = x
    call = Call("all_gather (tokens)", form=f"{rows.shape} {x.dtype} {layout}")
    with naming("gather_tokens", [x]):
        gathered = all_gather(ranks.whole, call, rows).flatten(0, 1)
    return torch.cat([gathered[:0], *(gathered[row : row + length] for row, _, length in runs)])


@gather_tokens.register_fake
def _(
    x: Tensor, segments: list[int], zigzag: bool, stripe: int, mesh: str, sums_gradients: bool
) -> Tensor:
    return x.new_empty(sum(segments), *x.shape[1:])


@torch.library.custom_op("bascule::reduce_tokens", mutates_args=())
def reduce_tokens(x: Tensor, segments: list[int], zigzag: bool, stripe: int, mesh: str) -> Tensor:
    """From (S, ...) on all ranks to (T, ...): a rank's tokens, summed over the ranks.

    One reduce-scatter, in float32 at least. The adjoint of `gather_tokens`.
    """
    ranks, layout = places(segments, zigzag, stripe, mesh)
    assert ranks.whole is not None
    runs, padded = gathered_runs(layout)
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.new_zeros(ranks.whole.size * padded, *x.shape[1:], dtype=wide)
    for row, start, length in runs:
        rows[row : row + length] = x[start : start + length]
    call = Call("reduce_scatter (tokens)", form=f"{rows.shape} {x.dtype} {layout}")
    with naming("reduce_tokens", [x]):
        own = reduce_scatter(ranks.whole, call, rows.unflatten(0, (ranks.whole.size, padded)))
    return own[: num_tokens(layout.own_runs(*ranks.place))].to(x.dtype).clone()


@reduce_tokens.register_fake
def _(x: Tensor, segments: list[int], zigzag: bool, stripe: int, mesh: str) -> Tensor:
    ranks, layout = places(segments, zigzag, stripe, mesh)
    return x.new_empty(num_tokens(layout.own_runs(*ranks.place)), *x.shape[1:])


def _keep_geometry(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.geometry = inputs[1:]


def _keep_exchange(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.geometry, ctx.numbers = inputs[1:], numbers_of(inputs[5])


def _exchange_back(
    exchange: Callable[..., list[Tensor]], ctx: Any, grads: list[Tensor]
) -> tuple[Any, ...]:
    going_back(ctx.geometry[4], ctx.numbers, grads[0])
    return exchange(grads, *ctx.geometry), *(None,) * 6


def _keep_ring(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, *ctx.settings, k_centre, v_centre = inputs
    ctx.save_for_backward(q, k, v, *output, mask, k_centre, v_centre)
    ctx.mark_non_differentiable(output[1])
    ctx.numbers = numbers_of(inputs[10])


def _ring_gradients(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, k_centre, v_centre = ctx.saved_tensors
    going_back(ctx.settings[6], ctx.numbers, grad)
    grads = ring_attention_backward(grad, *tensors, *ctx.settings, k_centre, v_centre)
    return *grads, *(None,) * (3 + len(ctx.settings))


def _token_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    segments, zigzag, stripe, mesh, sums_gradients = ctx.geometry
    if sums_gradients:
        return reduce_tokens(grad, segments, zigzag, stripe, mesh), *(None,) * 5
    ranks, layout = places(segments, zigzag, stripe, mesh)
    return take_runs(grad, layout.own_runs(*ranks.place), 0), *(None,) * 5


tokens_to_heads.register_autograd(
    partial(_exchange_back, heads_to_tokens), setup_context=_keep_exchange
)
heads_to_tokens.register_autograd(
    partial(_exchange_back, tokens_to_heads), setup_context=_keep_exchange
)
ring_attention.register_autograd(_ring_gradients, setup_context=_keep_ring)
gather_tokens.register_autograd(_token_gradients, setup_context=_keep_geometry)
