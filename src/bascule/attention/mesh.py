"""Attention over a mesh of ranks, Ulysses by ring, exact for any shape.

Tokens are shared over the ranks; Ulysses gives the ranks of a row whole runs of tokens with some of
the heads, and the rows pass keys and values around a ring.

Shapes: B batch, H query heads, K key-value heads, S tokens of the whole sequence, T tokens of this
rank, D head width; R ring ranks, U Ulysses ranks.
"""

import math

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bascule.attention import ops
from bascule.attention.layout import (
    Run,
    SequenceLayout,
    num_tokens,
    own_tokens,
    take_runs,
    with_replicated,
)
from bascule.attention.ranks import AttentionMesh as AttentionMesh
from bascule.attention.ranks import Place, place_in
from bascule.attention.ulysses import HeadShares
from bascule.errors import ConfigError


def split(x: Tensor, mesh: AttentionMesh, layout: SequenceLayout, dim: int) -> Tensor:
    """This rank's tokens of a tensor that every rank has. Differentiable, no communication.

    Raises:
        ConfigError: The tensor has another number of tokens than the layout.
    """
    if x.shape[dim] != layout.seq_len:
        raise ConfigError(
            f"split: dim {dim} of {tuple(x.shape)} has {x.shape[dim]} tokens, and the layout has "
            f"{layout.seq_len}"
        )
    return take_runs(x, layout.shares(*mesh.place), dim)


def gather(x: Tensor, mesh: AttentionMesh, layout: SequenceLayout, dim: int) -> Tensor:
    """The tokens of all ranks in the order of the sequence, on every rank. One all-gather.

    The gradient of a rank's tokens is that of this rank's copy, of replicated tokens for the
    rank's share of them: what follows is taken to be the same on every rank.
    """
    if mesh.whole is None:
        return x
    rows = own_tokens(x, layout, mesh.place, dim).movedim(dim, 0)
    whole = ops.gather_tokens(rows, list(layout.segments), layout.zigzag, mesh.name, False)
    return whole.movedim(0, dim)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: AttentionMesh | DeviceMesh | Place,
    *,
    layout: SequenceLayout | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Exact attention of tokens that are shared over a mesh; (B, H, T, D) as q.

    Two all-to-alls over the Ulysses ranks and R - 1 exchanges around the ring, and twice that
    backward; for replicated tokens one all-gather more, and one reduce-scatter backward. No sizes
    are gathered: they follow from the layout. The first call of a form makes sure, by one
    all-gather, that all ranks mean the same.

    Args:
        q: (B, H, T, D) queries of this rank's tokens, in the order of `layout.shares`.
        k: (B, K, T, D) keys; H is a multiple of K.
        v: (B, K, T, D) values.
        mesh: The ranks, or this rank's place among them.
        layout: Which tokens each rank has. Default: one segment, the same number on every rank.
        attn_mask: Of the whole sequence and all heads, the same on every rank: bool (True is seen)
            or added to the scores; broadcasts to (B, H, S, S), as (B, 1, 1, S) for key padding. A
            token that sees nothing gives 0.
        is_causal: Whether a token sees only itself and those before it in the sequence, of what
            the mask lets it see.
        scale: Factor of the scores. Default: D^-0.5.
        kernel: Name of the block kernel. Default: the fastest for the device.

    Raises:
        ConfigError: The shapes do not fit each other, the layout or the mesh.
        CommError: The ranks disagree, or a rank did not come in time.
    """
    ranks = place_in(mesh)
    if layout is None:
        layout = SequenceLayout((q.shape[2] * math.prod(ranks.degrees),), *ranks.degrees)
    _check(q, k, v, ranks, layout, attn_mask)
    geometry = (list(layout.segments), layout.zigzag, ranks.name)
    k, v = (_enough_heads(x, q.shape[1], ranks.degrees[1]) for x in (k, v))
    q, k, v = (own_tokens(x, layout, ranks.place, 2) for x in (q, k, v))
    num_kv_heads, mask = k.shape[1], None
    if attn_mask is not None:
        mask = _own_heads(attn_mask, q.shape[1], num_kv_heads, ranks)
    if ranks.degrees[1] > 1:
        q, k, v = ops.tokens_to_heads([q, k, v], num_kv_heads, *geometry)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, _ = ops.ring_attention(q, k, v, mask, is_causal, scale, kernel or "", *geometry)
    if ranks.degrees[1] > 1:
        (out,) = ops.heads_to_tokens([out], num_kv_heads, *geometry)
    return _replicated(out, ranks, layout) if layout.replicated else out


def _replicated(own: Tensor, ranks: Place, layout: SequenceLayout) -> Tensor:
    """Every rank's tokens, of replicated segments all of them, from those it answers for."""
    if ranks.degrees == (1, 1):
        return own
    runs: list[Run] = []
    at = 0
    for segment, spans in enumerate(layout.own(*ranks.place)):
        length = num_tokens(spans)
        if segment in layout.replicated:
            runs.append((at, at + length))
        at += length
    segments = [layout.segments[segment] for segment in sorted(layout.replicated)]
    rows = take_runs(own, runs, 2).movedim(2, 0)
    whole = ops.gather_tokens(rows, segments, layout.zigzag, ranks.name, True)
    return with_replicated(own, whole.movedim(0, 2), layout, ranks.place, 2)


def _own_heads(mask: Tensor, num_heads: int, num_kv_heads: int, ranks: Place) -> Tensor:
    """(B or 1, heads of this rank or 1, S or 1, S or 1) the mask of the heads of this rank."""
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.shape[1] == 1 or ranks.degrees[1] == 1:
        return mask
    shares = HeadShares.split(num_heads, num_kv_heads, ranks.degrees[1])
    rank, queries = ranks.place[1], num_heads // num_kv_heads
    first = shares.base * rank + min(rank, shares.num_more)
    return mask.narrow(1, first * queries, shares.of(rank) * queries)


def _enough_heads(x: Tensor, num_heads: int, num_ranks: int) -> Tensor:
    """Key-value heads repeated as often as it takes for each Ulysses rank to have one."""
    repeat = num_heads // x.shape[1]
    for times in range(1, repeat + 1):
        if repeat % times == 0 and x.shape[1] * times >= num_ranks:
            return x if times == 1 else x.repeat_interleave(times, dim=1)
    return x


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: Place,
    layout: SequenceLayout,
    mask: Tensor | None,
) -> None:
    """Refuse what cannot be attended.

    Raises:
        ConfigError: Names the shapes.
    """
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    alike = q.dim() == k.dim() == 4 and k.shape == v.shape
    if not alike or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        raise ConfigError(
            f"attention: {shapes}: give (batch, heads, tokens, head_dim) each, k and v alike, and "
            "as many keys as queries"
        )
    if q.shape[1] % k.shape[1] or q.shape[1] < mesh.degrees[1]:
        raise ConfigError(
            f"attention: {shapes} on {mesh.degrees[1]} Ulysses ranks: query heads must be a "
            "multiple of key-value heads, and at least one a rank; use a larger ring degree"
        )
    if (layout.ring_degree, layout.ulysses_degree) != mesh.degrees:
        raise ConfigError(
            f"attention: a layout for {layout.ring_degree} x {layout.ulysses_degree} ranks on a "
            f"mesh of {mesh.degrees[0]} x {mesh.degrees[1]}"
        )
    if mask is not None:
        if mask.requires_grad:
            raise ConfigError(
                "attention: attn_mask requires a gradient, and mesh attention gives it none: "
                "pass attn_mask.detach()"
            )
        wanted = (q.shape[0], q.shape[1], layout.seq_len, layout.seq_len)
        given = (1,) * (4 - mask.dim()) + tuple(mask.shape)
        if len(given) != 4 or any(a not in (1, b) for a, b in zip(given, wanted, strict=True)):
            raise ConfigError(
                f"attention: a mask of shape {tuple(mask.shape)} does not broadcast to (batch, "
                f"heads, tokens, tokens) of the whole sequence, {wanted}"
            )
