"""Attention inside a bag, on packed sequences: ranks that share heads, and a ring of such groups.

Ulysses brings G chunks with some of the heads to every rank of a group.

Shapes: T tokens of a call on one rank, C tokens on a rank of a bag, H heads, K key-value heads, D
head width, n sequences of the bag; R ring ranks, G Ulysses ranks.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bascule.arrays import Ints, cumulative, ranges, sums_by
from bascule.attention.kernels.protocol import AttentionKernel
from bascule.attention.kernels.registry import Kernel, select_kernel
from bascule.attention.mask import PLAIN, AttentionMask, PackedSequences, Scores
from bascule.attention.ring import AttentionCall, Tile
from bascule.attention.tiles import Pieces
from bascule.attention.usp import (
    attend,
    check_settings,
    check_sink,
    check_tensors,
    with_positive_scale,
)
from bascule.comm.collectives import table_on
from bascule.comm.groups import RankGroup
from bascule.comm.heads import HeadExchange
from bascule.comm.mesh import RING_AXIS, ULYSSES_AXIS, AttentionMesh
from bascule.errors import ConfigError
from bascule.plan.masks import Masks
from bascule.plan.plan import Plan
from bascule.plan.topology import Topology
from bascule.traffic import HeadShares, Traffic


@dataclass(frozen=True)
class Bag:
    """The bag of a rank: its ranks, and the sequences that they attend within."""

    mesh: AttentionMesh  # the ranks that share heads, and the ranks of its ring
    chunk_lens: Ints  # (G, n) tokens of each chunk on each rank that it shares heads with
    pieces: Pieces  # the tokens of each Ulysses group of its ring
    masks: Masks | None  # what tokens see of their sequence; None: everything
    context_lens: Ints  # tokens of the context of each sequence, which each rank has whole
    context_of: Ints  # (n,) index into `context_lens` of each sequence, or document
    _tiles: dict[Any, list[list[Tile]]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, plan: Plan, group: RankGroup, device: torch.device) -> "Bag":
        """Return the bag of this rank in a plan; the bag's groups are parts of `group`."""
        rank = group.rank
        topology, lens = plan.topology, plan.bag_lens(rank)
        bag, ring_rank, _, degree = topology.place_of(rank)
        ring_degree = int(topology.ring_degrees[bag])
        by_group = lens.reshape(ring_degree, degree, lens.shape[1])
        first = int(topology.first_ranks[bag]) + ring_rank * degree
        sharing = group.part(range(first, first + degree), ULYSSES_AXIS) if degree > 1 else None
        around = group.part(topology.ring(rank), RING_AXIS) if ring_degree > 1 else None
        mesh, seqs = AttentionMesh(around, sharing, None), np.flatnonzero(plan.bag_of == bag)
        parts, masks = np.flatnonzero(plan.chunks.bag_of == bag), None
        if plan.masks is not None:
            chosen = plan.masks.apart.masks if plan.chunks.begins.any() else plan.masks
            masks = chosen.of(parts)
        context_of = np.searchsorted(seqs, plan.chunks.seqs[parts])
        contexts = np.zeros_like(seqs) if plan.context_lens is None else plan.context_lens[seqs]
        num_runs = plan.chunks.num_on_a_rank(bag)
        pieces = Pieces(by_group.sum(axis=1), num_runs, around, device)
        return cls(mesh, by_group[ring_rank], pieces, masks, contexts, context_of)

    @property
    def degree(self) -> int:
        """G."""
        return self.chunk_lens.shape[0]

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.pieces.device

    def tiles(self, causal: bool, scores: Scores) -> list[list[Tile]]:
        """Return, by ring rank, the tiles of local queries and the keys there that they see."""
        key = causal, scores.window, scores.chunk
        if key not in self._tiles:
            masks = Masks.alike(self.pieces.seq_lens, causal=True) if causal else self.masks
            self._tiles[key] = self.pieces.tiles(masks, scores)
        return self._tiles[key]

    @cached_property
    def tokens(self) -> list[int]:
        """Tokens of each rank, (G,)."""
        return self.chunk_lens.sum(axis=1).tolist()

    @cached_property
    def order(self) -> tuple[Tensor | None, Tensor | None]:
        """Indices from rank order to sequence order, and back; None: the orders are equal."""
        if self.degree == 1 or (self.chunk_lens.sum(axis=0) > 0).sum() <= 1:
            return None, None
        whole, back = _rows_of(self.chunk_lens.T), _rows_of(self.chunk_lens)
        return table_on(whole, self.device), table_on(back, self.device)

    @cached_property
    def context_tiles(self) -> list[Tile]:
        """Pair this rank's tokens with all cross-attention tokens of their sequence."""
        local, contexts = self.chunk_lens[self.mesh.place[1]], self.context_lens.tolist()
        tiles, first = list[Tile](), 0
        for run in np.split(local, self.pieces.num_runs):
            lens = sums_by(self.context_of, run, len(contexts))
            packed = PackedSequences.build(lens.tolist(), self.device, contexts)
            end = first + int(lens.sum())
            rows = slice(None) if self.pieces.num_runs == 1 else slice(first, end)
            tiles.append(Tile(rows, slice(None), AttentionMask(packed=packed)))
            first = end
        return tiles

    def call(
        self,
        kind: str,
        kernel: Kernel | None,
        q: Tensor,
        k: Tensor,
        scale: float,
        scores: Scores = PLAIN,
        **names: Any,
    ) -> AttentionCall:
        """Return the attention of this rank's tokens: kind "all", "causal" or "contexts"."""
        chosen, group = packed_kernel(kernel, q, scores.cap), self.mesh.ulysses
        if kind == "contexts":
            tiles = [self.context_tiles]
            return AttentionCall(chosen, scale, tiles, [k.shape[0]], **names)
        heads = None
        if group is not None:
            shares = HeadShares.split(k.shape[1], self.degree)
            heads = HeadExchange(group, shares, self.tokens, *self.order, is_packed=True)
        return AttentionCall(
            kernel=chosen,
            scale=scale,
            tiles=self.tiles(kind == "causal", scores),
            kv_lens=self.pieces.kv_lens,
            ring=self.pieces.group,
            heads=heads,
            **names,
        )


def _rows_of(wanted_lens: Ints) -> Ints:
    """Return the row of each token: chunks are wanted in this order, stored in transposed order."""
    stored_lens = wanted_lens.T
    first = cumulative(stored_lens.ravel())[:-1].reshape(stored_lens.shape)
    return ranges(first.T.ravel(), wanted_lens.ravel())


def attend_packed(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    seqs: PackedSequences,
    *,
    kernel: Kernel | None = None,
    causal: bool = False,
    scale: float | None = None,
    scores: Scores = PLAIN,
    sink: Tensor | None = None,
) -> Tensor:
    """Attend within each packed sequence on one rank; (T, H, D) as q. Differentiable.

    H is a multiple of K. Without a name, the first kernel that runs here is used. The scale is
    D^-0.5 if None; `scores` and `sink` as in `Step.attend`.
    """
    check_settings("attend_packed", causal, scale)
    check_tensors("attend_packed", q_THD, k_TKD, v_TKD)
    check_sink("attend_packed", sink, q_THD)
    q_THD, factor = with_positive_scale(q_THD, scale)
    tiles = [[Tile(slice(None), slice(None), AttentionMask(causal=causal, packed=seqs))]]
    if scores.is_near:
        if not causal:
            raise ConfigError(f"attend_packed: {scores} needs causal=True")
        lens = np.array(seqs.seq_lens)
        pieces = Pieces(lens[None], 1, None, seqs.device)
        tiles = pieces.tiles(Masks.alike(lens, causal=True), scores)
    chosen = packed_kernel(kernel, q_THD, scores.cap)
    call = AttentionCall(chosen, factor, tiles, [sum(seqs.kv_lens)])
    return attend(q_THD, k_TKD, v_TKD, call, sink=sink)


def packed_kernel(name: Kernel | None, q: Tensor, cap: float = 0.0) -> AttentionKernel:
    """Return the kernel of that name for packed sequences; without a name, the first that runs."""
    device, width = q.device.type, q.shape[-1]
    return select_kernel(name, device, dtype=q.dtype, head_dim=width, is_packed=True, cap=cap)


def check(
    topology: Topology,
    bag: Bag,
    kernel: Kernel | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cap: float = 0.0,
) -> None:
    """Refuse what `attend` cannot compute in this bag, or in bags that this rank waits for."""
    packed_kernel(kernel, q, cap)
    check_shapes(bag, q, k, v)
    degree, num_kv_heads = int(topology.ulysses_groups.bag_sizes.max()), k.shape[1]
    if num_kv_heads < degree:
        raise ConfigError(
            f"{degree} ranks of a bag cannot share {num_kv_heads} key-value heads, each needs 1: "
            f"use at most {num_kv_heads} ranks, or rings, as {topology.for_heads(num_kv_heads)}"
        )


def check_shapes(bag: Bag, q: Tensor, k: Tensor, v: Tensor, *, num_keys: int | None = None) -> None:
    """Refuse shapes that do not fit; `num_keys` is None except in cross-attention."""
    tokens = bag.tokens[bag.mesh.place[1]]
    what = "attend" if num_keys is None else "attend_contexts"
    for x in (q, k, v):
        if x.device.type != bag.device.type:
            raise ConfigError(f"{what}: q, k or v is on {x.device}: give tensors on {bag.device}")
    if q.dim() != 3 or k.shape != v.shape or k.dim() != 3 or q.shape[2] != k.shape[2]:
        wrong = f"{what}: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ConfigError(f"{wrong}: give (tokens, heads, head_dim) each, k and v alike")
    if q.shape[0] != tokens or k.shape[0] != (tokens if num_keys is None else num_keys):
        keys = "" if num_keys is None else f", and {num_keys} of cross-attention"
        raise ConfigError(
            f"{what}: q has {q.shape[0]} tokens, k {k.shape[0]}; the plan has {tokens} here{keys}: "
            "give routed (tokens, heads, head_dim)"
        )
    if k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise ConfigError(
            f"{q.shape[1]} query heads for {k.shape[1]} key-value heads: must be a multiple"
        )


def traffic(bag: Bag, q_CHD: Tensor, k_CKD: Tensor) -> Traffic:
    """Return the bytes that this rank sends to others in the forward pass of one `attend`."""
    num_kv_heads, head_dim = k_CKD.shape[1:]
    return Traffic.of_attention(
        HeadShares.split(num_kv_heads, bag.degree),
        bag.mesh.place[1],
        bag.tokens,
        bag.pieces.num_sent,
        queries=q_CHD.shape[1] // num_kv_heads,
        row_bytes=head_dim * q_CHD.element_size(),
    )
