"""Clusters of similar tokens as the blocks of attention, on any mesh: Sparse VideoGen 2.

A plan moves blocks of the sequence, not clusters. Ranks that share a head sum their parts of each
cluster's mean, so clusters are the same as in one process. Then each rank sorts its tokens by
cluster.

Shapes: B batch, h heads that ranks share, X rows (head, block) of this rank with T tokens, D head
width; M clusters of a head's queries, N of its keys. Text is one more cluster, which sees all
tokens and which all tokens see.
"""

from dataclasses import dataclass, field
from itertools import pairwise, starmap

import numpy as np
import torch
from torch import Tensor

from bascule.arrays import Bools, Ints, cumulative, ranges, sums_by
from bascule.attention.mask import BlockRows
from bascule.attention.sparse.rules import keep_mass
from bascule.checks import fields, number, whole
from bascule.comm.collectives import all_gather, all_reduce
from bascule.comm.groups import RankGroup
from bascule.comm.mesh import AttentionMesh
from bascule.plan.sparse import BlockLayout, PackedRows, SparsePlan, block_lens


@dataclass(frozen=True, slots=True, eq=False)
class Clusters:
    """Let each query cluster see the key clusters that hold the share `mass` of its softmax.

    Source: Sparse VideoGen 2 (arXiv:2505.18875), 4. Queries and keys of a head are clustered by
    k-means. A key cluster counts as its mean, once for each token. At each call clusters start as
    runs of the sequence; empty clusters stay empty. Clusters differ in each step, so `save_masks`
    refuses them.

    Attributes:
        num_q: Clusters of a head's queries, besides text.
        num_kv: Clusters of a head's keys, besides text.
        mass: Share of the softmax to keep.
        rounds: Rounds of k-means. Ranks that share a head exchange (h, M, D + 1) and (h, N, D + 1)
            in each.
    """

    num_q: int
    num_kv: int
    mass: float
    rounds: int = 2
    # By block of the sequence; None: no text. Set by the model.
    q_is_text: Bools | None = field(default=None, repr=False)
    kv_is_text: Bools | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        counts = dict.fromkeys(("num_q", "num_kv"), (whole, 1))
        fields(self, **counts, mass=(number, 0.0, 1.0), rounds=(whole, 0))

    @property
    def name(self) -> str:
        """The settings as text, which ranks compare."""
        return repr(self)


@dataclass(frozen=True, slots=True, eq=False)
class Clustered:
    """The rows of a rank, by cluster."""

    q_order: Tensor  # (B T,) rows of queries, ordered by cluster
    kv_order: Tensor  # rows of keys that may be seen, ordered by cluster
    seen: list[BlockRows]  # by ring rank, the keys there that clusters of queries see
    counts: Ints  # (X, ranks) mean keys seen per query, by home rank; of batch item 0


def cluster(
    rule: Clusters,
    plan: SparsePlan,
    ranks: AttentionMesh,
    qk: list[Tensor],
    scale: float,
    keys: Bools | None,
) -> Clustered:
    """Cluster the rows (B, T, D) of q and k of this rank; `keys` as for `sparse_attention`."""
    ring = ranks.place[1]
    is_own = plan.ring_of == ring
    local_heads = np.flatnonzero(is_own.any(axis=1))
    is_cut = bool((plan.ring_of != plan.ring_of[:, :1]).any())
    heads = np.arange(len(plan.ring_of)) if is_cut else local_heads
    kv_heads = np.flatnonzero((plan.kv_rank_of[ring] >= 0).any(axis=1))
    group = ranks.whole if is_cut else ranks.ring
    q_rows, kv_rows = plan.q_rows(ranks.rank), plan.kv_rows(ranks.rank)
    of_q = _Side(qk[0], plan.q, q_rows, heads, rule.num_q, rule.q_is_text, keys, group)
    of_k = _Side(qk[1], plan.kv, kv_rows, kv_heads, rule.num_kv, rule.kv_is_text, keys, ranks.ring)
    (q_labels, q_sums), (k_labels, k_sums) = (x.clustered(rule.rounds) for x in (of_q, of_k))
    place = np.searchsorted(heads, local_heads)
    kv_of = local_heads // (len(plan.ring_of) // plan.num_kv_heads)
    kv_place = np.searchsorted(kv_heads, kv_of)
    q_means, (k_means, k_sizes) = _means(q_sums)[0][:, place], _means(k_sums)
    scores = q_means @ k_means[:, kv_place].mT * scale + k_sizes[:, kv_place, None].log()
    chosen = keep_mass(scores, rule.mass, np.ones(rule.num_kv))
    chosen = torch.nn.functional.pad(chosen, (0, 1, 0, 1), value=True).cpu().numpy()
    q_order, q_lens = of_q.by_cluster(q_labels, torch.ones_like(of_q.is_counted))
    kv_order, own_lens = of_k.by_cluster(k_labels, of_k.is_visible)
    kv_lens = own_lens[None]
    if ranks.ring is not None:
        kv_lens = all_gather(ranks.ring, "all_gather (sizes of clusters)", own_lens)
    q_lens = q_lens[:, place].cpu().numpy()
    sizes = int(plan.q.lens.max(initial=1)), int(plan.kv.lens.max(initial=1))
    seen = [_seen(q_lens, row, kv_place, chosen, sizes) for row in kv_lens.cpu().numpy()]
    homes = of_k.by_home(k_labels[0], plan.num_ranks)
    if ranks.ring is not None:
        homes = all_reduce(ranks.ring, "all_reduce (homes of clusters)", homes)
    of_cluster = chosen[0].astype(np.float64) @ homes[kv_place].cpu().numpy()
    of_tokens = np.searchsorted(local_heads, np.repeat(q_rows.heads, q_rows.lens))
    seen_keys = of_cluster[of_tokens, q_labels[0].cpu().numpy()]
    totals = np.add.reduceat(seen_keys, cumulative(q_rows.lens)[:-1], axis=0)
    counts = np.rint(totals / q_rows.lens[:, None]).astype(np.int64)
    return Clustered(q_order, kv_order, seen, counts)


def _means(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return means (B, h, M, D) and sizes (B, h, M) from the sums of clusters."""
    sizes = sums[..., -1]
    return sums[..., :-1] / sizes.clamp(min=1)[..., None], sizes


def _seen(
    q_lens: Ints, kv_lens: Ints, kv_place: Ints, chosen: Bools, sizes: tuple[int, int]
) -> BlockRows:
    """Return which of a ring rank's clusters of keys each cluster of queries sees.

    `q_lens` (B, h, M + 1) and `kv_lens` (B, kv h, N + 1) are sizes of clusters, which are cut in
    blocks of at most `sizes` queries and keys, for kernels work by the longest. `kv_place` (h,)
    finds the keys of a head; `chosen` (B, h, M + 1, N + 1) is of all ranks.
    """
    num_q, num_kv, width = -(-q_lens // sizes[0]), -(-kv_lens // sizes[1]), chosen.shape[3]
    row, column = np.nonzero(chosen.reshape(-1, width))
    first, num = (
        x.reshape(kv_lens.shape)[:, kv_place].reshape(-1, width)[row // chosen.shape[2], column]
        for x in (cumulative(num_kv.ravel())[:-1], num_kv)
    )
    bounds = cumulative(sums_by(row, num, num_q.size))
    rows = np.repeat(np.arange(num_q.size), num_q.ravel())
    counts = np.diff(bounds)[rows]
    return BlockRows(
        q_bounds=cumulative(block_lens(q_lens.ravel(), sizes[0])),
        k_bounds=cumulative(block_lens(kv_lens.ravel(), sizes[1])),
        row_bounds=cumulative(counts),
        columns=ranges(first, num)[ranges(bounds[rows], counts)],
    )


class _Side:
    """The queries or keys of a rank, to be clustered with those of the ranks of a group."""

    def __init__(
        self,
        x: Tensor,
        layout: BlockLayout,
        rows: PackedRows,
        heads: Ints,
        num_clusters: int,
        is_text: Bools | None,
        keys: Bools | None,
        group: RankGroup | None,
    ) -> None:
        self.num_clusters, self.num_heads, self.group = num_clusters, heads.size, group
        is_text = np.zeros(layout.lens.size, np.bool_) if is_text is None else is_text
        tokens, of_text = rows.tokens(layout), np.repeat(is_text, layout.lens)
        counted = np.ones((len(x), tokens.size), np.bool_) if keys is None else keys[:, tokens]
        self.is_visible, self.is_text, self.head_of, self.home = (
            torch.from_numpy(np.ascontiguousarray(array)).to(x.device)
            for array in (
                counted,
                np.repeat(is_text[rows.blocks], rows.lens),
                np.searchsorted(heads, np.repeat(rows.heads, rows.lens)),
                np.repeat(layout.home[rows.blocks], rows.lens),
            )
        )
        self.is_counted = self.is_visible & ~self.is_text
        dtype = torch.promote_types(x.dtype, torch.float32)
        self.x = x.to(dtype).masked_fill(~self.is_counted[..., None], 0.0)
        present, first = np.unique(rows.heads, return_index=True)
        bounds = pairwise(cumulative(rows.lens)[[*first, -1]].tolist())
        # Place of each head that is here among those shared, and its tokens.
        places = np.searchsorted(heads, present).tolist()
        self._spans = [*zip(places, starmap(slice, bounds), strict=True)]
        place = np.cumsum(~of_text) - 1
        runs = place[tokens] * num_clusters // max(int((~of_text).sum()), 1)
        self._runs = torch.from_numpy(runs).to(x.device)

    def clustered(self, rounds: int) -> tuple[Tensor, Tensor]:
        """Return labels (B, T), and sums and numbers of tokens (B, h, M, D + 1) on all ranks."""
        labels = self._runs.expand(self.x.shape[:2]).clone()
        sums = self._sums(labels)
        for _ in range(rounds):
            means, sizes = _means(sums)
            far = means.square().sum(dim=-1).masked_fill(sizes == 0, torch.inf)
            for head, span in self._spans:
                near = self.x[:, span] @ means[:, head].mT
                labels[:, span] = (far[:, head, None] - 2 * near).argmin(dim=-1)
            sums = self._sums(labels)
        return labels.masked_fill(self.is_text, self.num_clusters), sums

    def _sums(self, labels: Tensor) -> Tensor:
        shape = len(labels), self.num_heads, self.num_clusters, self.x.shape[-1] + 1
        sums = self.x.new_zeros(shape)
        numbers = torch.arange(self.num_clusters, device=labels.device)
        for head, span in self._spans:
            # A product: on a GPU, sums by index have another order in each run.
            is_in = (labels[:, span, None] == numbers) & self.is_counted[:, span, None]
            is_in = is_in.to(self.x.dtype)
            parts = is_in.mT @ self.x[:, span], is_in.sum(dim=1)[..., None]
            sums[:, head] = torch.cat(parts, dim=-1)
        return sums if self.group is None else all_reduce(self.group, "all_reduce (clusters)", sums)

    def by_cluster(self, labels: Tensor, is_used: Tensor) -> tuple[Tensor, Tensor]:
        """Return the order of used rows by batch item, head and cluster; sizes (B, h, M + 1)."""
        shape = len(labels), self.num_heads, self.num_clusters + 1
        item = torch.arange(len(labels), device=labels.device)[:, None]
        cell = ((item * shape[1] + self.head_of) * shape[2] + labels)[is_used]
        order = is_used.flatten().nonzero()[:, 0][cell.argsort(stable=True)]
        return order, torch.bincount(cell, minlength=shape[0] * shape[1] * shape[2]).view(shape)

    def by_home(self, labels: Tensor, num_ranks: int) -> Tensor:
        """Return (h, M + 1, ranks) visible tokens of the first item, by where they are at home."""
        shape = self.num_heads, self.num_clusters + 1, num_ranks
        cell = (self.head_of * shape[1] + labels) * num_ranks + self.home
        size = shape[0] * shape[1] * num_ranks
        return torch.bincount(cell[self.is_visible[0]], minlength=size).view(shape)
