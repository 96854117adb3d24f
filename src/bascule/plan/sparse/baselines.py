"""What plans are compared with: none at all, and the method of db-SP (section 4.2).

The paper places the heaviest item first, on the least loaded rank, and counts the rank where it is
as less loaded. It has no rule for ties; here the first item and the first rank win.

Legend: H heads, Q query blocks, K key blocks, U rings (Ulysses ranks), R ranks of a ring.
"""

import math

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.errors import ConfigError
from bascule.plan.checks import amounts, listed, number, shown, whole
from bascule.plan.sparse.counts import check_ranks, check_ring, tile_work
from bascule.plan.sparse.layout import BlockLayout
from bascule.plan.sparse.partition import BlockPlan, check_matrix
from bascule.plan.sparse.plan import SparsePlan

REWARD = 2.0
"""How much less loaded a block's home rank counts, in blocks like it: the best in the paper."""


def greedy(
    weights: Floats,
    num_ranks: int,
    *,
    home: Ints | None = None,
    reward: float = 0.0,
    capacity: float = math.inf,
) -> Ints:
    """(n,) rank per item. O(n (log n + ranks)).

    Args:
        weights: (n,) dense blocks of each item: a head, a query block or a key block.
        num_ranks: Ranks.
        home: (n,) rank where each item is. Needed with a reward.
        reward: While an item is placed, its home rank counts as this many times its own weight
            less loaded.
        capacity: Most items on a rank. The paper's text has none; its public code needs equal
            numbers.
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


def paper_heads(block_counts: npt.ArrayLike, num_ranks: int) -> Ints:
    """(H,) rank of each head, none of which is cut (section 4.2.1).

    Args:
        block_counts: (H,) work of each head.
        num_ranks: Ranks.

    Raises:
        ConfigError: An argument is wrong.
    """
    return greedy(amounts("block_counts", block_counts, (1,)), whole("num_ranks", num_ranks, 1))


def paper_blocks(
    block_matrix: npt.ArrayLike,
    ring_degree: int,
    *,
    q_home: npt.ArrayLike | None = None,
    kv_home: npt.ArrayLike | None = None,
    reward: float = REWARD,
    capacity: tuple[int, int] | None = None,
) -> BlockPlan:
    """Place query blocks by the sums of the rows, key blocks by those of the columns (4.2.2).

    Args:
        block_matrix: (Q, K) work of each query block on each key block.
        ring_degree: R.
        q_home: (Q,) ring rank where each query block is. Default: runs, as the paper assumes.
        kv_home: (K,) the same of key blocks.
        reward: How much less loaded a block's home rank counts, in blocks like it.
        capacity: Most query blocks and most key blocks on a rank. Default: an R-th of them, rounded
            up, as in the public code.

    Raises:
        ConfigError: An argument is wrong.
    """
    matrix, ring_degree = check_matrix(block_matrix), check_ring(ring_degree)
    reward = number("reward", reward)
    if capacity is None:
        capacity = -(-matrix.shape[0] // ring_degree), -(-matrix.shape[1] // ring_degree)
    if len(listed("capacity", capacity)) != 2:
        raise ConfigError(f"capacity is {shown(capacity)}: give (query blocks, key blocks)")
    found: list[tuple[Ints, Ints]] = []
    given = ("q_home", q_home), ("kv_home", kv_home)
    for (name, home), most, size, axis in zip(given, capacity, matrix.shape, (1, 0), strict=True):
        if whole("capacity", most) * ring_degree < size:
            raise ConfigError(
                f"{size} blocks on {ring_degree} ranks of at most {most} blocks: raise capacity"
            )
        runs = np.arange(size, dtype=np.int64) * ring_degree // max(size, 1)
        at = runs if home is None else check_ranks(name, home, ring_degree, size)
        sums = matrix.sum(axis=axis)
        found.append((at, greedy(sums, ring_degree, home=at, reward=reward, capacity=most)))
    (q_at, q_of), (kv_at, kv_of) = found
    return BlockPlan(q_of, kv_of, q_at, kv_at, tile_work(matrix, q_of, kv_of, ring_degree))


def in_order(
    num_heads: int,
    q: BlockLayout,
    kv: BlockLayout,
    ulysses_degree: int,
    ring_degree: int,
    *,
    num_kv_heads: int | None = None,
) -> SparsePlan:
    """Heads in their order, and blocks where they are: as without a plan. Its tiles are empty."""
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
