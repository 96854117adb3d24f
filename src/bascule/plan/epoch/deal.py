"""One optimiser step, dealt to ranks and microbatches.

The samples of the step are given; which rank computes them, and in which microbatch, is free. Every
cell, one rank in one microbatch, gets a sample at least.
"""

from dataclasses import dataclass

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.errors import PlanError
from bascule.plan.epoch.cells import DealRules, StepTable
from bascule.plan.epoch.order import StepShape
from bascule.plan.epoch.ways import candidates


@dataclass(frozen=True, slots=True, eq=False)
class Deal:
    """The samples of a step in their cells, with a certificate. Arrays are read-only.

    Attributes:
        samples: (n,) which samples, in the order of the epoch.
        rank_of: (n,) rank of each.
        microbatch_of: (n,) microbatch of each.
        loads: (accumulate, num_ranks) cost of each cell.
        makespan: What the step takes: the sum over microbatches of the largest load, or, where
            ranks meet once a step, the largest sum of a rank.
        lower_bound: No deal of these samples takes less.
    """

    samples: Ints
    rank_of: Ints
    microbatch_of: Ints
    loads: Floats
    makespan: float
    lower_bound: float

    @property
    def gap(self) -> float:
        """Certified distance to the best: makespan / lower_bound - 1; 0 where nothing costs."""
        return self.makespan / self.lower_bound - 1.0 if self.lower_bound > 0.0 else 0.0

    def batch(self, rank: int, microbatch: int) -> Ints:
        """Samples of one cell."""
        return self.samples[(self.rank_of == rank) & (self.microbatch_of == microbatch)]


def deal_in_turn(num_samples: int, shape: StepShape) -> Ints:
    """(n,) cell of each sample if they were dealt like cards: what a plain sampler does."""
    return np.arange(num_samples) % shape.num_cells


def deal_step(costs: Floats, tokens: Ints, rules: DealRules, home: Ints | None = None) -> Deal:
    """Deal the samples of one step so that it ends as early as possible. Deterministic.

    Args:
        costs: (n,) cost of each sample; n is at least the number of cells.
        tokens: (n,) tokens of each sample, for limits.
        rules: Cells, limits, and what is minimised.
        home: (n,) rank that a sample should be on where that costs nothing; None for no matter.

    Returns:
        The deal of samples 0 to n - 1.

    Raises:
        PlanError: The limits cannot be kept; says what misses by how much.
    """
    table = StepTable(costs, tokens, rules, home)
    bound = table.lower_bound()
    best, least = None, np.inf
    failed: PlanError | None = None
    for candidate in candidates(table):
        if isinstance(candidate, PlanError):
            failed = candidate
            continue
        cells, own_bound = candidate
        bound, makespan = max(bound, own_bound), table.makespan(cells)
        if makespan < least:
            best, least = cells, makespan
        if least <= bound * (1.0 + rules.tolerance):
            break
    if best is None:
        raise failed or PlanError("no deal was found")
    plain = deal_in_turn(costs.size, rules.shape)
    if table.keeps_limits(plain) and table.makespan(plain) < least:
        best = plain
    return _frozen(table, best, bound)


def _frozen(table: StepTable, cells: Ints, bound: float) -> Deal:
    """The frozen answer."""
    microbatch_of, rank_of = np.divmod(cells, table.rules.shape.num_ranks)
    loads, makespan = table.loads(cells), table.makespan(cells)
    samples = np.arange(cells.size)
    for array in (samples, rank_of, microbatch_of, loads):
        array.flags.writeable = False
    return Deal(samples, rank_of, microbatch_of, loads, makespan, min(bound, makespan))
