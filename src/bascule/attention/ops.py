"""The exchanges and the ring as operators of torch, so that compilers see them as they are.

An operator is one node of a traced graph and runs eagerly: point-to-point transfers and uneven
splits keep their order in compiled programs, no graph breaks at them, and the shapes of their
results are expressions in the lengths, so that a new length needs no new graph. A mesh goes by the
name of its process groups, as in torch's functional collectives.

Shapes: as in `mesh`; T here without a rank's copies of what other ranks answer for. All results lie
in memory as (B, T, H, D).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bascule.attention.blocks import select_block_kernel
from bascule.attention.forms import agree_on
from bascule.attention.layout import Run, SequenceLayout, num_tokens, take_runs
from bascule.attention.masks import tiles_of
from bascule.attention.ranks import AttentionMesh, mesh_named
from bascule.attention.ring import RingPlan, ring_backward, ring_forward
from bascule.attention.ulysses import BagLayout, HeadShares, heads_to_ranks, ranks_to_heads
from bascule.comm import quantize
from bascule.comm.groups import all_gather_single, reduce_scatter_single, reporting
from bascule.comm.quantize import Wire
from bascule.errors import CommError


@torch.library.custom_op("bascule::tokens_to_heads", mutates_args=())
def tokens_to_heads(
    xs: list[Tensor], num_kv_heads: int, segments: list[int], zigzag: bool, mesh: str, form: str
) -> list[Tensor]:
    """From (B, heads, T, D) each to (B, share of the heads, tokens of the ring rank, D) each.

    One all-to-all over the Ulysses ranks. The gradient is `heads_to_tokens`. `form` is what
    `forms.form_of` says of the call.
    """
    ranks, layout = _places(segments, zigzag, mesh)
    agree_on(ranks, layout, tuple(xs[0].shape[:3]), num_kv_heads, form)
    bag = _bag(ranks, layout, xs[0].shape[0], xs[0].device)
    shares = HeadShares.split(num_kv_heads, num_kv_heads, ranks.degrees[1])
    with _naming("tokens_to_heads", xs):
        rows = heads_to_ranks(bag, shares, num_kv_heads, *(_rows(x) for x in xs))
    return [_batched(x, xs[0].shape[0]) for x in rows]


@tokens_to_heads.register_fake
def _(
    xs: list[Tensor], num_kv_heads: int, segments: list[int], zigzag: bool, mesh: str, form: str
) -> list[Tensor]:
    ranks, layout = _places(segments, zigzag, mesh)
    tokens, own = layout.ring_len(ranks.place[0]), _own_kv_heads(ranks, num_kv_heads)
    return [_empty(x, x.shape[1] // num_kv_heads * own, tokens) for x in xs]


@torch.library.custom_op("bascule::heads_to_tokens", mutates_args=())
def heads_to_tokens(
    xs: list[Tensor], num_kv_heads: int, segments: list[int], zigzag: bool, mesh: str, form: str
) -> list[Tensor]:
    """The inverse of `tokens_to_heads`, and its gradient. One all-to-all over the Ulysses ranks."""
    ranks, layout = _places(segments, zigzag, mesh)
    batch, own = xs[0].shape[0], _own_kv_heads(ranks, num_kv_heads)
    bag = _bag(ranks, layout, batch, xs[0].device)
    shares = HeadShares.split(num_kv_heads, num_kv_heads, ranks.degrees[1])
    # Key-value heads travel each with its queries, so that all tensors are one.
    grouped = [_rows(x).unflatten(1, (own, -1)) for x in xs]
    packed = grouped[0] if len(xs) == 1 else torch.cat(grouped, dim=2)
    with _naming("heads_to_tokens", xs):
        rows = ranks_to_heads(bag, shares, num_kv_heads, packed.flatten(1, 2))
    parts = rows.unflatten(1, (num_kv_heads, -1)).split([x.shape[2] for x in grouped], dim=2)
    return [_batched(x.flatten(1, 2), batch) for x in parts]


@heads_to_tokens.register_fake
def _(
    xs: list[Tensor], num_kv_heads: int, segments: list[int], zigzag: bool, mesh: str, form: str
) -> list[Tensor]:
    ranks, layout = _places(segments, zigzag, mesh)
    own = _own_kv_heads(ranks, num_kv_heads)
    tokens = num_tokens(_own_runs(ranks, layout))
    return [_empty(x, x.shape[1] // own * num_kv_heads, tokens) for x in xs]


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
    ranks, layout = _places(segments, zigzag, mesh)
    if ranks.ulysses is None:  # else said before the all-to-all
        agree_on(ranks, layout, tuple(q.shape[:3]), k.shape[1], form)
    travel = _wire_of(wire, k_centre, v_centre)
    plan = _plan(ranks, layout, q, mask, causal, scale, kernel, travel)
    with _naming("ring_attention", (q, k, v)):
        out, lse = ring_forward(q, k, v, plan)
    return _laid_out(out), lse.contiguous()


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
    mesh: str,
    form: str,
    wire: str = "",
    k_centre: Tensor | None = None,
    v_centre: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return _empty(q, q.shape[1], q.shape[2]), q.new_empty(q.shape[:3], dtype=wide)


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
    mesh: str,
    form: str,
    wire: str = "",
    k_centre: Tensor | None = None,
    v_centre: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of `ring_attention`."""
    ranks, layout = _places(segments, zigzag, mesh)
    travel = _wire_of(wire, k_centre, v_centre)
    plan = _plan(ranks, layout, q, mask, causal, scale, kernel, travel)
    with _naming("ring_attention_backward", (q, k, v)):
        dq, dk, dv = ring_backward(grad, q, k, v, out, lse, plan)
    return _laid_out(dq), _laid_out(dk), _laid_out(dv)


@ring_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (_empty(x, x.shape[1], x.shape[2]) for x in (q, k, v))
    return dq, dk, dv


@torch.library.custom_op("bascule::take_centres", mutates_args=())
def take_centres(
    k: Tensor,
    v: Tensor,
    num_heads: int,
    num_kv_heads: int,
    segments: list[int],
    zigzag: bool,
    mesh: str,
    form: str,
) -> Tensor:
    """`quantize.take_centres` over all ranks of the mesh. One all-reduce.

    Of as many heads as `k` has, for a call with `num_heads` for `num_kv_heads`.
    """
    ranks, layout = _places(segments, zigzag, mesh)
    agree_on(ranks, layout, (k.shape[0], num_heads, k.shape[2]), num_kv_heads, form)
    with _naming("take_centres", (k, v)):
        return _own_memory(quantize.take_centres(k, v, ranks.whole))


@take_centres.register_fake
def _(k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return k.new_empty(2, *k.shape[:2], 1, k.shape[3], dtype=torch.float32)


@torch.library.custom_op("bascule::gather_tokens", mutates_args=())
def gather_tokens(
    x: Tensor, segments: list[int], zigzag: bool, mesh: str, sums_gradients: bool
) -> Tensor:
    """From (T, ...) tokens of a rank to (S, ...) those of all, in the order of the sequence.

    One all-gather. The gradient of a rank's tokens is that of its copy, or, with `sums_gradients`,
    the sum over the copies of all ranks, by one reduce-scatter.
    """
    ranks, layout = _places(segments, zigzag, mesh)
    assert ranks.whole is not None
    index, padded = _gather_index(layout, x.device)
    rows = x.new_zeros(padded, *x.shape[1:])
    rows[: x.shape[0]] = x
    gathered = x.new_empty(ranks.whole.size * padded, *x.shape[1:])
    with _naming("gather_tokens", [x]), reporting(ranks.whole, "all_gather (tokens)", 0):
        all_gather_single(_bytes(gathered), _bytes(rows), group=ranks.whole.process_group)
    return gathered.index_select(0, index)


@gather_tokens.register_fake
def _(x: Tensor, segments: list[int], zigzag: bool, mesh: str, sums_gradients: bool) -> Tensor:
    return x.new_empty(sum(segments), *x.shape[1:])


@torch.library.custom_op("bascule::reduce_tokens", mutates_args=())
def reduce_tokens(x: Tensor, segments: list[int], zigzag: bool, mesh: str) -> Tensor:
    """From (S, ...) on all ranks to (T, ...): a rank's tokens, summed over the ranks.

    One reduce-scatter, in float32 at least. The adjoint of `gather_tokens`.
    """
    ranks, layout = _places(segments, zigzag, mesh)
    assert ranks.whole is not None
    index, padded = _gather_index(layout, x.device)
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.new_zeros(ranks.whole.size * padded, *x.shape[1:], dtype=wide)
    rows.index_copy_(0, index, x.to(wide))
    own = rows.new_empty(padded, *x.shape[1:])
    with _naming("reduce_tokens", [x]), reporting(ranks.whole, "reduce_scatter (tokens)", 0):
        reduce_scatter_single(own, rows, group=ranks.whole.process_group)
    return own[: num_tokens(_own_runs(ranks, layout))].to(x.dtype).clone()


@reduce_tokens.register_fake
def _(x: Tensor, segments: list[int], zigzag: bool, mesh: str) -> Tensor:
    ranks, layout = _places(segments, zigzag, mesh)
    return x.new_empty(num_tokens(_own_runs(ranks, layout)), *x.shape[1:])


def _keep_geometry(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.geometry = inputs[1:]


def _keep_ring(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, *ctx.settings, k_centre, v_centre = inputs
    ctx.save_for_backward(q, k, v, *output, mask, k_centre, v_centre)
    ctx.mark_non_differentiable(output[1])


def _ring_gradients(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, k_centre, v_centre = ctx.saved_tensors
    grads = ring_attention_backward(grad, *tensors, *ctx.settings, k_centre, v_centre)
    return *grads, *(None,) * (3 + len(ctx.settings))


def _token_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    segments, zigzag, mesh, sums_gradients = ctx.geometry
    if sums_gradients:
        return reduce_tokens(grad, segments, zigzag, mesh), None, None, None, None
    ranks, layout = _places(segments, zigzag, mesh)
    return take_runs(grad, _own_runs(ranks, layout), 0), None, None, None, None


tokens_to_heads.register_autograd(
    lambda ctx, grads: (heads_to_tokens(grads, *ctx.geometry), *(None,) * 5),
    setup_context=_keep_geometry,
)
heads_to_tokens.register_autograd(
    lambda ctx, grads: (tokens_to_heads(grads, *ctx.geometry), *(None,) * 5),
    setup_context=_keep_geometry,
)
ring_attention.register_autograd(_ring_gradients, setup_context=_keep_ring)
gather_tokens.register_autograd(_token_gradients, setup_context=_keep_geometry)


def _places(
    segments: Sequence[int], zigzag: bool, mesh: str
) -> tuple[AttentionMesh, SequenceLayout]:
    ranks = mesh_named(mesh)
    return ranks, SequenceLayout(tuple(segments), *ranks.degrees, zigzag)


def _wire_of(format: str, k_centre: Tensor | None, v_centre: Tensor | None) -> Wire | None:
    """From what operators can take; "" stands for none."""
    return Wire(format, k_centre, v_centre) if format else None  # pyright: ignore[reportArgumentType]


def _own_runs(ranks: AttentionMesh, layout: SequenceLayout) -> list[Run]:
    return [run for runs in layout.own(*ranks.place) for run in runs]


def _plan(
    ranks: AttentionMesh,
    layout: SequenceLayout,
    q: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kernel: str,
    wire: Wire | None,
) -> RingPlan:
    tiles = tiles_of(layout, ranks.place[0], mask, causal, q)
    return RingPlan(
        group=ranks.ring,
        kv_lens=layout.ring_lens,
        tiles=tiles,
        kernel=select_block_kernel(
            kernel or None,
            q.device.type,
            dtype=q.dtype,
            head_dim=q.shape[-1],
            has_bias=any(tile.bias is not None for row in tiles for tile in row),
        ),
        scale=scale,
        wire=wire,
    )


@lru_cache(maxsize=256)
def _bag(
    ranks: AttentionMesh, layout: SequenceLayout, num_seqs: int, device: torch.device
) -> BagLayout:
    """What Ulysses needs to know: each run of each sequence of the batch is one of its own."""
    assert ranks.ulysses is not None
    shares = [layout.own(ranks.place[0], rank) for rank in range(ranks.ulysses.size)]
    lens = [[stop - start for runs in share for start, stop in runs] for share in shares]
    chunk_lens = np.tile(np.array(lens, dtype=np.int64), num_seqs)
    return BagLayout(chunk_lens, device, ranks.ulysses, 0)


@lru_cache(maxsize=256)
def _gather_index(layout: SequenceLayout, device: torch.device) -> tuple[Tensor, int]:
    """(S,) row of each token where all ranks' tokens are padded to the same number; that number."""
    num_ring, num_ulysses = layout.ring_degree, layout.ulysses_degree
    places = [(ring, one) for ring in range(num_ring) for one in range(num_ulysses)]
    owned = [
        np.concatenate([np.arange(*run) for runs in layout.own(*place) for run in runs])
        for place in places
    ]
    padded = max(1, *(tokens.size for tokens in owned))
    index = np.empty(layout.seq_len, dtype=np.int64)
    for number, tokens in enumerate(owned):
        index[tokens] = number * padded + np.arange(tokens.size)
    return torch.from_numpy(index).to(device), padded


@contextmanager
def _naming(what: str, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Add to a failed collective's error which operator it belongs to, and the shapes."""
    try:
        yield
    except CommError as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise CommError(f"{error} [{what} of {shapes}, {tensors[0].dtype}]") from error


def _own_kv_heads(ranks: AttentionMesh, num_kv_heads: int) -> int:
    num_ulysses, place = ranks.degrees[1], ranks.place[1]
    return HeadShares.split(num_kv_heads, num_kv_heads, num_ulysses).of(place)


def _rows(x: Tensor) -> Tensor:
    """(B T, heads, D) from (B, heads, T, D)."""
    return x.transpose(1, 2).flatten(0, 1)


def _batched(rows: Tensor, batch: int) -> Tensor:
    """The inverse of `_rows`, in memory of its own."""
    return _own_memory(rows).unflatten(0, (batch, -1)).transpose(1, 2)


def _laid_out(x: Tensor) -> Tensor:
    """(B, H, T, D), in memory as (B, T, H, D)."""
    return _own_memory(x.transpose(1, 2)).transpose(1, 2)


def _own_memory(x: Tensor) -> Tensor:
    """Contiguous; a copy if it is a part of something, as results of operators must not be."""
    is_part = x.untyped_storage().nbytes() != x.numel() * x.element_size() or not x.numel()
    return x.clone(memory_format=torch.contiguous_format) if is_part else x.contiguous()


def _empty(x: Tensor, num_heads: int, tokens: int) -> Tensor:
    """What `_laid_out` and `_batched` give, without values."""
    return x.new_empty(x.shape[0], tokens, num_heads, x.shape[3]).transpose(1, 2)


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
