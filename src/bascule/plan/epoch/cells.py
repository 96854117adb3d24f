"""One optimiser step as a table: what each cell costs and holds, and what no deal can beat."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.plan.epoch.order import StepShape
from bascule.plan.limits import Limits
from bascule.plan.step import Sync

_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class DealRules:
    """What a deal must keep, and what it minimises.

    Attributes:
        shape: Ranks and microbatches.
        sync: As for `plan_step`: when ranks wait for each other.
        limits: Tokens, and samples, of a cell; hard.
        even_counts: Whether cells get as many samples each as can be; else at least one.
        padded: Whether a cell costs its samples times the dearest of them, and has as many tokens
            as if all were as long as the longest; else both are sums.
        tolerance: Gap to the bound at which the search stops.
    """

    shape: StepShape
    sync: Sync = "microbatch"
    limits: Limits | None = None
    even_counts: bool = True
    padded: bool = False
    tolerance: float = 0.01

    def limits_of(self, num_samples: int) -> Limits | None:
        """Limits of a cell in a step of so many samples."""
        given = self.limits or Limits()
        if not self.even_counts:
            return self.limits
        even = -(-num_samples // self.shape.num_cells)
        return replace(given, items=even if given.items is None else min(given.items, even))


@dataclass(frozen=True, slots=True)
class StepTable:
    """The samples of a step. A cell is numbered microbatch * num_ranks + rank.

    Attributes:
        costs: (n,) cost of each sample.
        tokens: (n,) tokens of each sample.
        rules: What is asked for.
        home: (n,) rank at which each sample is at home; None for no matter.
    """

    costs: Floats
    tokens: Ints
    rules: DealRules
    home: Ints | None

    def loads(self, cells: Ints) -> Floats:
        """(accumulate, num_ranks) what each cell costs."""
        shape = self.rules.shape
        loads = np.bincount(cells, self.costs, shape.num_cells)
        if self.rules.padded:
            counts = np.bincount(cells, minlength=shape.num_cells)
            loads = counts * largest_of(cells, self.costs, shape.num_cells)
        return np.asarray(loads, dtype=np.float64).reshape(shape.accumulate, shape.num_ranks)

    def makespan(self, cells: Ints) -> float:
        """What a step takes."""
        loads = self.loads(cells)
        if self.rules.sync == "step":
            return float(loads.sum(axis=0).max())
        return float(loads.max(axis=1).sum())

    def keeps_limits(self, cells: Ints) -> bool:
        """Whether no cell has more tokens or samples than it may."""
        limits, num = self.rules.limits, self.rules.shape.num_cells
        if limits is None:
            return True
        counts, held = np.bincount(cells, minlength=num), np.bincount(cells, self.tokens, num)
        if self.rules.padded:
            held = counts * largest_of(cells, self.tokens, num)
        tokens, items = limits.tokens or np.inf, limits.items or np.inf
        return bool(counts.max() <= items and held.max() <= tokens)

    def lower_bound(self) -> float:
        """What no deal beats, whatever found it; see `_company_bound`."""
        shape = self.rules.shape
        bound = max(float(self.costs.sum()) / shape.num_ranks, float(self.costs.max()))
        if self.rules.padded:
            if self.rules.even_counts:
                bound = max(bound, self._padding_bound())
        elif self.rules.even_counts and self.rules.sync == "microbatch":
            bound = max(bound, self._company_bound())
        return bound * (1.0 - _ROUNDING)

    def _company_bound(self) -> float:
        """Where counts are even, giants cannot all be in one microbatch, nor alone in their cells.

        Of microbatches by descending longest sample, the first k hold no more than the n_k longest
        samples, n_k = k * num_ranks * most. So the next has the next longest or a longer one, with
        the shortest of all in its cell at least; and what the first k cannot hold, the others must.
        """
        shape, ranked = self.rules.shape, -np.sort(-self.costs)
        num = ranked.size
        most = -(-num // shape.num_cells)
        least = max(num - most * (shape.num_cells - 1), 1)
        company = float(ranked[num - least + 1 :].sum())
        longest = np.append(0.0, ranked[:: shape.num_ranks * most] + company)
        held = np.append(0.0, np.cumsum(ranked))
        ends = np.minimum(np.arange(longest.size) * shape.num_ranks * most, num)
        rest = (held[-1] - held[ends]) / shape.num_ranks
        return float((np.cumsum(longest) + rest).max())

    def _padding_bound(self) -> float:
        """Where counts are even and batches padded: what pieces of the ranked samples cost."""
        shape, ranked = self.rules.shape, -np.sort(-self.costs)
        most = -(-ranked.size // shape.num_cells)
        least = max(ranked.size - most * (shape.num_cells - 1), 1)
        if self.rules.sync == "microbatch":
            return float(ranked[:: shape.num_ranks * most].sum()) * least
        return float(ranked[::most].sum()) * least / shape.num_ranks


def largest_of(cells: Ints, values: npt.NDArray[Any], num_cells: int) -> Floats:
    """(num_cells,) largest value of each cell."""
    largest = np.zeros(num_cells)
    np.maximum.at(largest, cells, values)
    return largest
