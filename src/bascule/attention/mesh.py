"""Attention over a mesh of ranks, Ulysses by ring, exact for any shape.

Tokens are shared over the ranks; Ulysses gives the ranks of a row whole runs of tokens with some of
the heads, and the rows pass keys and values around a ring.

Shapes: B batch, H query heads, K key-value heads, S tokens of the whole sequence, T tokens of this
rank, D head width; R ring ranks, U Ulysses ranks.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bascule.attention.blocks import select_block_kernel
from bascule.attention.ring import RingPlan, Tile, ring_attention
from bascule.attention.ulysses import BagLayout, HeadShares, heads_to_ranks, ranks_to_heads
from bascule.comm.groups import RankGroup, all_gather_single, member_of, reporting
from bascule.errors import ConfigError
from bascule.plan.layout import Ints

RING_AXIS, ULYSSES_AXIS = "ring", "ulysses"


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMesh:
    """This rank's place in a mesh of R x U ranks.

    Attributes:
        ring: The ranks that pass keys and values to each other; None if R is 1.
        ulysses: The ranks that share heads; None if U is 1.
        whole: All ranks, by ring rank, then by Ulysses rank; None for one rank.
    """

    ring: RankGroup | None
    ulysses: RankGroup | None
    whole: RankGroup | None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "AttentionMesh":
        """From a DeviceMesh whose axes are called "ring" and "ulysses"; one may be missing.

        Raises:
            ConfigError: It has other axes, or they are in the other order.
        """
        names = mesh.mesh_dim_names or ()
        allowed = (RING_AXIS, ULYSSES_AXIS)
        if not names or tuple(name for name in allowed if name in names) != tuple(names):
            raise ConfigError(
                f"a mesh with the axes {names}: attention takes ('ring', 'ulysses'), in this "
                "order, or one of them; choose them with mesh['ring', 'ulysses']"
            )
        parts: dict[str, RankGroup | None] = dict.fromkeys(allowed)
        for name in names:
            if mesh[name].size() > 1:
                parts[name] = member_of(mesh.get_group(name), name)
        several = [part for part in parts.values() if part is not None]
        if len(several) < 2:
            return cls(parts[RING_AXIS], parts[ULYSSES_AXIS], several[0] if several else None)
        whole = member_of(mesh._flatten().get_group(), "attention")
        return cls(parts[RING_AXIS], parts[ULYSSES_AXIS], whole)

    @property
    def degrees(self) -> tuple[int, int]:
        """(R, U)."""
        return (self.ring.size if self.ring else 1, self.ulysses.size if self.ulysses else 1)

    @property
    def place(self) -> tuple[int, int]:
        """(ring rank, Ulysses rank) of this rank."""
        return (self.ring.rank if self.ring else 0, self.ulysses.rank if self.ulysses else 0)


@dataclass(frozen=True)
class SequenceLayout:
    """Which tokens of a sequence each rank of a mesh has; follows from lengths alone.

    Every segment (text, image) is cut into R pieces, as even as possible, and each piece is shared
    over U ranks. With `zigzag` it is cut into 2 R pieces, of which ring rank r has pieces r and
    2 R - 1 - r: under a causal mask all ring ranks then have the same work.

    Attributes:
        segments: Tokens of each part of the sequence.
        ring_degree: R.
        ulysses_degree: U.
        zigzag: Whether early and late pieces are paired.
    """

    segments: tuple[int, ...]
    ring_degree: int = 1
    ulysses_degree: int = 1
    zigzag: bool = False

    @property
    def seq_len(self) -> int:
        """S."""
        return sum(self.segments)

    def pieces(self, ring: int) -> list[tuple[int, int]]:
        """(start, stop) in the sequence of the runs of tokens of a ring rank."""
        found: list[tuple[int, int]] = []
        first, num = 0, 2 * self.ring_degree if self.zigzag else self.ring_degree
        for length in self.segments:
            mine = (ring, num - 1 - ring) if self.zigzag else (ring,)
            found += [
                (first + _cut(length, num, p), first + _cut(length, num, p + 1)) for p in mine
            ]
            first += length
        return found

    def shares(self, ring: int, ulysses: int) -> list[tuple[int, int]]:
        """(start, stop) in the sequence of the runs of tokens of a rank."""
        num = self.ulysses_degree
        return [
            (start + _cut(stop - start, num, ulysses), start + _cut(stop - start, num, ulysses + 1))
            for start, stop in self.pieces(ring)
        ]

    def num_tokens(self, ring: int, ulysses: int) -> int:
        """T of a rank."""
        return sum(stop - start for start, stop in self.shares(ring, ulysses))

    @cached_property
    def ring_lens(self) -> list[int]:
        """(R,) tokens of each ring rank."""
        return [sum(b - a for a, b in self.pieces(ring)) for ring in range(self.ring_degree)]

    def positions(self, ring: int) -> Ints:
        """Place in the sequence of each token of a ring rank."""
        return np.concatenate([np.arange(start, stop) for start, stop in self.pieces(ring)])


def _cut(length: int, num: int, place: int) -> int:
    """Where part `place` of `num` near-even parts begins; the first ones are longer."""
    return length // num * place + min(place, length % num)


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
    parts = [x.narrow(dim, start, stop - start) for start, stop in layout.shares(*mesh.place)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def gather(x: Tensor, mesh: AttentionMesh, layout: SequenceLayout, dim: int) -> Tensor:
    """The tokens of all ranks in the order of the sequence, on every rank. One all-gather.

    The gradient of a rank's tokens is that of this rank's copy.
    """
    if mesh.whole is None:
        return x
    return _Gather.apply(x, mesh, layout, dim % x.dim())


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: Tensor,
        mesh: AttentionMesh,
        layout: SequenceLayout,
        dim: int,
    ) -> Tensor:
        ctx.args = mesh, layout, dim  # pyright: ignore[reportAttributeAccessIssue]
        assert mesh.whole is not None
        (num_ring, num_ulysses), rows = mesh.degrees, x.transpose(0, dim).contiguous()
        ranks = [(ring, one) for ring in range(num_ring) for one in range(num_ulysses)]
        counts = [layout.num_tokens(*place) for place in ranks]
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: rows.shape[0]] = rows
        gathered = rows.new_empty(len(ranks) * max(counts), *rows.shape[1:])
        with reporting(mesh.whole, "all_gather (tokens)", 0):
            all_gather_single(gathered, padded, group=mesh.whole.process_group)
        whole = rows.new_empty(layout.seq_len, *rows.shape[1:])
        for number, place in enumerate(ranks):
            first = number * max(counts)
            for start, stop in layout.shares(*place):
                whole[start:stop] = gathered[first : first + stop - start]
                first += stop - start
        return whole.transpose(0, dim)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        mesh, layout, dim = ctx.args  # pyright: ignore[reportAttributeAccessIssue]
        return split(grads[0], mesh, layout, dim), None, None, None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: "AttentionMesh | DeviceMesh",
    *,
    layout: SequenceLayout | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Exact attention of tokens that are shared over a mesh; (B, H, T, D) as q.

    Two all-to-alls over the Ulysses ranks and R - 1 exchanges around the ring, and twice that
    backward. No sizes are gathered: they follow from the layout.

    Args:
        q: (B, H, T, D) queries of this rank's tokens, in the order of `layout.shares`.
        k: (B, K, T, D) keys; H is a multiple of K.
        v: (B, K, T, D) values.
        mesh: The ranks.
        layout: Which tokens each rank has. Default: one segment, the same number on every rank.
        attn_mask: Of the whole sequence and all heads, the same on every rank: bool (True is seen)
            or added to the scores; broadcasts to (B, H, S, S), as (B, 1, 1, S) for key padding.
        is_causal: Whether a token sees only itself and those before it in the sequence.
        scale: Factor of the scores. Default: D^-0.5.
        kernel: Name of the block kernel. Default: the fastest for the device.

    Raises:
        ConfigError: The shapes do not fit each other, the layout or the mesh.
    """
    place = _mesh_of(mesh) if isinstance(mesh, DeviceMesh) else mesh
    if layout is None:
        num_ranks = math.prod(place.degrees)
        layout = SequenceLayout((q.shape[2] * num_ranks,), *place.degrees)
    _check(q, k, v, place, layout, attn_mask)
    mask = _as_bias(attn_mask, q)
    k, v = (_enough_heads(x, q.shape[1], place.degrees[1]) for x in (k, v))
    bag = _bag(place, layout, q.shape[0], q.device)
    shares = HeadShares.split(q.shape[1], k.shape[1], place.degrees[1])
    heads = _heads_of(shares, q.shape[1] // k.shape[1], place.place[1])
    plan = RingPlan(
        group=place.ring,
        kv_lens=layout.ring_lens,
        tiles=_tiles(layout, place.place[0], mask, heads, is_causal, q),
        kernel=select_block_kernel(kernel, q.device.type),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
    )
    if bag is None:
        return ring_attention(q, k, v, plan)[0]
    num_kv = k.shape[1]
    shape, whole = (q.shape[0], q.shape[2]), (q.shape[0], layout.ring_lens[place.place[0]])
    rows = heads_to_ranks(
        bag, shares, num_kv, *(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    )
    q, k, v = (x.unflatten(0, whole).transpose(1, 2) for x in rows)
    out = ring_attention(q, k, v, plan)[0]
    back = ranks_to_heads(bag, shares, num_kv, out.transpose(1, 2).flatten(0, 1))
    return back.unflatten(0, shape).transpose(1, 2)


_mesh_of = lru_cache(maxsize=16)(AttentionMesh.of)


@lru_cache(maxsize=64)
def _bag(
    mesh: AttentionMesh, layout: SequenceLayout, num_seqs: int, device: torch.device
) -> BagLayout | None:
    """What Ulysses needs to know: each piece of each sequence of the batch is one of its own."""
    if mesh.ulysses is None:
        return None
    ring, num = mesh.place[0], mesh.ulysses.size
    lens = [[stop - start for start, stop in layout.shares(ring, one)] for one in range(num)]
    return BagLayout(np.tile(np.array(lens, dtype=np.int64), num_seqs), device, mesh.ulysses, 0)


def _heads_of(shares: HeadShares, queries: int, rank: int) -> slice:
    """Query heads of a Ulysses rank, of which each key-value head has `queries`."""
    first = shares.base * rank + min(rank, shares.num_more)
    return slice(first * queries, (first + shares.of(rank)) * queries)


def _enough_heads(x: Tensor, num_heads: int, num_ranks: int) -> Tensor:
    """Key-value heads repeated as often as it takes for each Ulysses rank to have one."""
    repeat = num_heads // x.shape[1]
    for times in range(1, repeat + 1):
        if repeat % times == 0 and x.shape[1] * times >= num_ranks:
            return x if times == 1 else x.repeat_interleave(times, dim=1)
    return x


def _as_bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """(B or 1, H or 1, S or 1, S) what is added to the scores, in the dtype of the queries."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.dtype == torch.bool:
        seen = torch.zeros((), dtype=q.dtype, device=q.device)
        return torch.where(mask, seen, -math.inf)
    return mask.to(q.dtype)


def _tiles(
    layout: SequenceLayout,
    ring: int,
    mask: Tensor | None,
    heads: slice,
    causal: bool,
    q: Tensor,
) -> list[list[Tile]]:
    """By ring rank, what the queries of a ring rank see of its keys."""
    everything = slice(None)
    tiles: list[list[Tile]] = []
    for other in range(layout.ring_degree):
        if mask is not None or (causal and len(layout.segments) > 1):
            bias = _bias(layout, ring, other, mask, heads, causal, q)
            tiles.append([Tile(everything, everything, False, bias)])
        elif not causal:
            tiles.append([Tile(everything, everything, False, None)])
        elif other == ring:
            tiles.append([Tile(everything, everything, True, None)])
        elif not layout.zigzag:
            tiles.append([Tile(everything, everything, False, None)] if other < ring else [])
        elif other < ring:  # of its two pieces only the early one is before both of this rank's
            tiles.append([Tile(everything, slice(0, _first_len(layout, other)), False, None)])
        else:  # only the late piece of this rank is after both of the other's
            tiles.append([Tile(slice(_first_len(layout, ring), None), everything, False, None)])
    return tiles


def _first_len(layout: SequenceLayout, ring: int) -> int:
    start, stop = layout.pieces(ring)[0]
    return stop - start


def _bias(
    layout: SequenceLayout,
    ring: int,
    other: int,
    mask: Tensor | None,
    heads: slice,
    causal: bool,
    q: Tensor,
) -> Tensor:
    """The part of the mask for the queries of one ring rank and the keys of another."""
    rows, columns = (torch.from_numpy(layout.positions(r)).to(q.device) for r in (ring, other))
    bias = torch.zeros((1, 1, 1, columns.numel()), dtype=q.dtype, device=q.device)
    if mask is not None:
        bias = mask if mask.shape[1] == 1 else mask[:, heads]
        bias = bias if bias.shape[2] == 1 else bias.index_select(2, rows)
        bias = bias.expand(*bias.shape[:3], layout.seq_len).index_select(3, columns)
    if causal:
        bias = bias.masked_fill(rows[:, None] < columns[None, :], -math.inf)
    return bias


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: AttentionMesh,
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
    tokens = layout.num_tokens(*mesh.place)
    if q.shape[2] != tokens:
        raise ConfigError(
            f"attention: q has {q.shape[2]} tokens, and the layout gives this rank {tokens} of "
            f"{layout.seq_len}"
        )
    if mask is not None:
        wanted = (q.shape[0], q.shape[1], layout.seq_len, layout.seq_len)
        given = (1,) * (4 - mask.dim()) + tuple(mask.shape)
        if len(given) != 4 or any(a not in (1, b) for a, b in zip(given, wanted, strict=True)):
            raise ConfigError(
                f"attention: a mask of shape {tuple(mask.shape)} does not broadcast to (batch, "
                f"heads, tokens, tokens) of the whole sequence, {wanted}"
            )
