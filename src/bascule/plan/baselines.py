"""The greedy of db-SP (section 4.2): the heaviest item first, to the least loaded rank.

It is kept as the paper has it, to compare with. The paper has no rule for ties; here the first item
and the first rank win.
"""

import math

import numpy as np

from bascule.plan.routes import Ints
from bascule.plan.sparse.counts import Floats


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
