"""Baselines of plans: no plan at all, and the method of db-SP (section 4.2).

The paper has no rule for ties; here the first item and the first rank win. Legend: see `sparse`.
"""

import math

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.plan.sparse.layout import BlockLayout, tile_work
from bascule.plan.sparse.partition import BlockPlan, Placement
from bascule.plan.sparse.plan import SparsePlan

REWARD = 2.0
"""How much less loaded a block's home rank counts, in blocks like it: the best in the paper."""


def greedy(
    weights: Floats | Ints,
    num_ranks: int,
    *,
    home: Ints | None = None,
    reward: float = 0.0,
    capacity: float = math.inf,
) -> Ints:
    """Return (n,) rank of each item, heaviest first, on the least loaded. O(n (log n + ranks)).

    An item's home rank (n,) counts as `reward` times its weight less loaded. The paper's text has
    no capacity of a rank; its public code needs equal numbers of items.
    """
    loads, room = [0.0] * num_ranks, [capacity] * num_ranks
    values: list[float] = weights.tolist()
    homes: list[int] = [-1] * len(values) if home is None else home.tolist()
    rank_of = np.empty(len(values), np.int64)
    order: list[int] = np.argsort(-weights, kind="stable").tolist()
    for item in order:
        weight, at_home = values[item], homes[item]
        least, chosen = math.inf, -1
        for rank, load in enumerate(loads):
            biased = load - reward * weight if rank == at_home else load
            if biased < least and room[rank]:
                least, chosen = biased, rank
        rank_of[item] = chosen
        loads[chosen] += weight
        room[chosen] -= 1
    return rank_of


def paper_blocks(
    block_matrix: npt.ArrayLike,
    ring_degree: int,
    homes: Placement | None = None,
    *,
    reward: float = REWARD,
    capacity: tuple[float, float] | None = None,
) -> BlockPlan:
    """Place query blocks by the sums of the rows, key blocks by those of the columns (4.2.2).

    Without `homes` blocks are in runs, as the paper assumes. `capacity` is the most query blocks
    and key blocks of a rank; default: an R-th of them, rounded up, as in the public code.
    """
    matrix = np.asarray(block_matrix, np.float64)
    q_home, kv_home = homes or (
        np.arange(size, dtype=np.int64) * ring_degree // max(size, 1) for size in matrix.shape
    )
    q_most, kv_most = capacity or (-(-size // ring_degree) for size in matrix.shape)
    q_of, kv_of = (
        greedy(matrix.sum(axis=axis), ring_degree, home=home, reward=reward, capacity=most)
        for axis, home, most in ((1, q_home, q_most), (0, kv_home, kv_most))
    )
    return BlockPlan(q_of, kv_of, tile_work(matrix, q_of, kv_of, ring_degree))


def in_order(
    num_heads: int,
    q: BlockLayout,
    kv: BlockLayout,
    ulysses_degree: int,
    ring_degree: int,
    num_kv_heads: int | None = None,
) -> SparsePlan:
    """Return heads in their order, and blocks where they are; its tiles are 0."""
    ring_of = np.arange(num_heads) * ulysses_degree // max(num_heads, 1)
    q_of, kv_of = (np.tile(x.home // ulysses_degree, (ulysses_degree, 1)) for x in (q, kv))
    return SparsePlan(
        ulysses_degree,
        ring_degree,
        num_heads if num_kv_heads is None else num_kv_heads,
        q,
        kv,
        np.tile(ring_of, (q.lens.size, 1)).T,
        q_of,
        kv_of,
        np.zeros((ulysses_degree, ring_degree, ring_degree)),
    )
