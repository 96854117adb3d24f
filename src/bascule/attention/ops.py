"""The ring, and the collectives of tokens, as operators of torch, so that compilers see them.

An operator is one node of a traced graph and runs eagerly: point-to-point transfers keep their
order in compiled programs, no graph breaks at them, and the shapes of their results are expressions
in the lengths, so that a new length needs no new graph. What is fixed of a call goes in one string
(`CallSpec`), the mesh by the name of its process groups, as in torch's functional collectives.

Shapes: as in `api`; T here without a rank's copies of what other ranks answer for. Results of
attention lie in memory as (B, T, H, D).
"""

from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bascule.attention.call_marks import agree_on_call
from bascule.attention.call_spec import CallSpec, naming, spec_of
from bascule.attention.kernels.registry import select_kernel
from bascule.attention.layout import Run, SequenceLayout, num_tokens, take_runs
from bascule.attention.ring import RingPlan, ring_backward, ring_forward
from bascule.attention.tiles import kept_of, tiles_of
from bascule.comm import wire as wires
from bascule.comm.collectives import all_gather, reduce_scatter
from bascule.comm.mesh import AttentionMesh
from bascule.comm.wire import Wire
from bascule.plan.traffic import HeadShares


@torch.library.custom_op("bascule::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    k_centre: Tensor | None,
    v_centre: Tensor | None,
    segments: list[int],
    spec: str,
) -> tuple[Tensor, Tensor]:
    """Attention of a ring rank's queries to the keys of the ring, and its LSE, without gradient.

    R - 1 exchanges with the neighbours, and 2 R - 1 backward. Centres are those of this rank's
    heads, for the format in which keys and values travel.
    """
    call = spec_of(spec)
    ranks, layout = call.ranks, call.layout(segments)
    if ranks.ulysses is None or mask is not None:  # else said before the all-to-all
        own = num_tokens(layout.own_runs(*ranks.place))
        tokens = q.shape[2] if ranks.ulysses is None else own
        agree_on_call(call, layout, q.shape[0], tokens, mask)
    plan = ring_plan(ranks, layout, q, k, mask, (k_centre, v_centre), call)
    with naming("ring_attention", (q, k, v)):
        out, lse = ring_forward(q, k, v, plan)
    return laid_out(out), lse.contiguous()


@ring_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    k_centre: Tensor | None,
    v_centre: Tensor | None,
    segments: list[int],
    spec: str,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return _empty(q), q.new_empty(q.shape[:3], dtype=wide)


@torch.library.custom_op("bascule::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad: Tensor,
    saved: list[Tensor],
    mask: Tensor | None,
    k_centre: Tensor | None,
    v_centre: Tensor | None,
    segments: list[int],
    spec: str,
) -> list[Tensor]:
    """Gradients of q, k and v of `ring_attention`; `saved` are those, the output and the LSE."""
    call, (q, k, v, out, lse) = spec_of(spec), saved
    plan = ring_plan(call.ranks, call.layout(segments), q, k, mask, (k_centre, v_centre), call)
    with naming("ring_attention_backward", (q, k, v)):
        return [laid_out(x) for x in ring_backward(grad, q, k, v, out, lse, plan)]


@ring_attention_backward.register_fake
def _(grad: Tensor, saved: list[Tensor], *_: Any) -> list[Tensor]:
    return [_empty(x) for x in saved[:3]]


@torch.library.custom_op("bascule::take_centres", mutates_args=())
def take_centres(k: Tensor, v: Tensor, segments: list[int], spec: str) -> Tensor:
    """`wires.take_centres` over all ranks of the mesh. One all-reduce."""
    call = spec_of(spec)
    agree_on_call(call, call.layout(segments), k.shape[0], k.shape[2], None)
    with naming("take_centres", (k, v)):
        return own_memory(wires.take_centres(k, v, call.ranks.whole))


@take_centres.register_fake
def _(k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return k.new_empty(2, *k.shape[:2], 1, k.shape[3], dtype=torch.float32)


@torch.library.custom_op("bascule::gather_tokens", mutates_args=())
def gather_tokens(x: Tensor, segments: list[int], spec: str, sums_gradients: bool) -> Tensor:
    """From (T, ...) tokens of a rank to (S, ...) those of all, in the order of the sequence.

    One all-gather. The gradient of a rank's tokens is that of its copy, or, with `sums_gradients`,
    the sum over the copies of all ranks, by one reduce-scatter.
    """
    group, layout = spec_of(spec).ranks.whole, spec_of(spec).layout(segments)
    assert group is not None
    runs, padded = _gathered_runs(layout)
    rows = x.new_zeros(padded, *x.shape[1:])
    rows[: x.shape[0]] = x
    with naming("gather_tokens", [x]):
        gathered = all_gather(group, "all_gather (tokens)", rows).flatten(0, 1)
    return torch.cat([gathered[:0], *(gathered[row : row + length] for row, _, length in runs)])


@gather_tokens.register_fake
def _(x: Tensor, segments: list[int], spec: str, sums_gradients: bool) -> Tensor:
    return x.new_empty(sum(segments), *x.shape[1:])


@torch.library.custom_op("bascule::reduce_tokens", mutates_args=())
def reduce_tokens(x: Tensor, segments: list[int], spec: str) -> Tensor:
    """From (S, ...) on all ranks to (T, ...): a rank's tokens, summed over the ranks.

    One reduce-scatter, in float32 at least. The adjoint of `gather_tokens`.
    """
    group, layout = spec_of(spec).ranks.whole, spec_of(spec).layout(segments)
    assert group is not None
    runs, padded = _gathered_runs(layout)
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.new_zeros(group.size * padded, *x.shape[1:], dtype=wide)
    for row, start, length in runs:
        rows[row : row + length] = x[start : start + length]
    with naming("reduce_tokens", [x]):
        parts = rows.unflatten(0, (group.size, padded))
        own = reduce_scatter(group, "reduce_scatter (tokens)", parts)
    return own[: num_tokens(_own_runs(layout, spec))].to(x.dtype).clone()


@reduce_tokens.register_fake
def _(x: Tensor, segments: list[int], spec: str) -> Tensor:
    own = _own_runs(spec_of(spec).layout(segments), spec)
    return x.new_empty(num_tokens(own), *x.shape[1:])


def ring_plan(
    ranks: AttentionMesh,
    layout: SequenceLayout,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    centres: tuple[Tensor | None, Tensor | None],
    spec: CallSpec,
) -> RingPlan:
    """Return what this rank does in each round of a call."""
    tiles = kept_of(
        mask,
        ("tiles", layout, spec.mesh, spec.causal, q.shape[1], k.shape[1], q.dtype, q.device),
        lambda: tiles_of(layout, ranks.place[0], _of_own_heads(mask, q, k, ranks), spec.causal, q),
    )
    return RingPlan(
        group=ranks.ring,
        kv_lens=layout.ring_lens,
        tiles=tiles,
        kernel=select_kernel(
            spec.kernel or None,
            q.device.type,
            dtype=q.dtype,
            head_dim=q.shape[-1],
            has_bias=any(tile.mask.bias is not None for row in tiles for tile in row),
        ),
        scale=spec.scale,
        wire=Wire(spec.wire, *centres) if spec.wire else None,  # pyright: ignore[reportArgumentType]
        is_blocking=spec.is_blocking,
    )


def _of_own_heads(mask: Tensor | None, q: Tensor, k: Tensor, ranks: AttentionMesh) -> Tensor | None:
    """(B or 1, heads of `q` or 1, S or 1, S or 1) of a mask of all heads.

    `k` has the key-value heads of this rank, and every one of them as many query heads.
    """
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.shape[1] == 1:
        return mask
    queries = q.shape[1] // k.shape[1]
    shares = HeadShares.split(mask.shape[1] // queries, ranks.degrees[1])
    return mask.narrow(1, shares.first(ranks.place[1]) * queries, q.shape[1])


def laid_out(x: Tensor) -> Tensor:
    """(B, H, T, D), in memory as (B, T, H, D)."""
    return own_memory(x.transpose(1, 2)).transpose(1, 2)


def own_memory(x: Tensor) -> Tensor:
    """A contiguous tensor with storage of its own: an operator must not return part of another."""
    is_part = x.untyped_storage().nbytes() != x.numel() * x.element_size() or not x.numel()
    return x.clone(memory_format=torch.contiguous_format) if is_part else x.contiguous()


def _empty(x: Tensor) -> Tensor:
    """As `laid_out` gives it, without values."""
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(
        1, 2
    )


def _own_runs(layout: SequenceLayout, spec: str) -> list[Run]:
    return layout.own_runs(*spec_of(spec).ranks.place)


@lru_cache(maxsize=256)
def _gathered_runs(layout: SequenceLayout) -> tuple[list[tuple[int, int, int]], int]:
    """(row, start in the sequence, tokens) of each run, in the order of the sequence.

    Rows are those of all ranks' tokens, padded to the same number a rank, which is the second.
    """
    places = product(range(layout.ring_degree), range(layout.ulysses_degree))
    owned = [layout.own_runs(*place) for place in places]
    padded = max(1, *map(num_tokens, owned))
    found: list[tuple[int, int, int]] = []
    for number, runs in enumerate(owned):
        row = number * padded
        for start, stop in runs:
            found.append((row, start, stop - start))
            row += stop - start
    return sorted(found, key=lambda run: run[1]), padded


def _keep_ring(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.segments, ctx.spec = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _ring_gradients(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, mask, k_centre, v_centre, out, lse = ctx.saved_tensors
    settings = mask, k_centre, v_centre, ctx.segments, ctx.spec
    return *ring_attention_backward(grad, [q, k, v, out, lse], *settings), *(None,) * 5


def _keep_tokens(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.settings = inputs[1:]


def _token_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    segments, spec, sums_gradients = ctx.settings
    if sums_gradients:
        return reduce_tokens(grad, segments, spec), None, None, None
    own = _own_runs(spec_of(spec).layout(segments), spec)
    return take_runs(grad, own, 0), None, None, None


ring_attention.register_autograd(_ring_gradients, setup_context=_keep_ring)
gather_tokens.register_autograd(_token_gradients, setup_context=_keep_tokens)
