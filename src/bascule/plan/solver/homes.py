"""The bins that items prefer, and a renaming of equal bins that keeps most items there."""

from dataclasses import dataclass

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.plan.solver.problem import Problem

_MAX_EXACT = 256  # most equal bins that are relabelled optimally; the assignment problem is cubic


@dataclass(frozen=True, slots=True)
class Regions:
    """Sets of bins (nodes) that items prefer."""

    weights: Floats  # (items,) cost of being wholly outside the item's region
    of_items: Ints  # (items,) that region
    shares: Floats  # (bins, regions) share of each bin in each region


@dataclass(frozen=True, slots=True)
class Homes:
    """The bins that items prefer, and the cost of being elsewhere."""

    bins: Ints  # (items,) preferred bin; -1 for none
    weights: Floats  # (items,) cost of being in another bin; 0 where none is preferred
    ceiling: float  # completion time that no bin may pass, in units of work per unit of speed
    home_share: Floats | None = None  # (bins,) of an item that stays in the preferred bin; else 1
    regions: Regions | None = None  # what else is preferred

    def away(self, items: Ints, bins: Ints) -> Floats:
        """Return the weight away from home of each item in its bin of `bins`; they broadcast."""
        at_home = self.bins[items] == bins
        saved = at_home if self.home_share is None else at_home * self.home_share[bins]
        away = self.weights[items] * (1.0 - saved)
        if self.regions is not None:
            share = self.regions.shares[bins, self.regions.of_items[items]]
            away += self.regions.weights[items] * (1.0 - share)
        return away

    @property
    def most_away(self) -> float:
        """The largest weight that could be away from home; positive."""
        far = 0.0 if self.regions is None else float(self.regions.weights.sum())
        return max(float(self.weights.sum()) + far, 1e-300)

    def total_away(self, bin_of: Ints) -> float:
        """Return the weight away from home under an assignment."""
        return float(self.away(np.arange(bin_of.size), bin_of).sum())


def relabel(problem: Problem, bin_of: Ints, homes: Homes) -> Ints:
    """Permute bins of equal kind, speed, room and carried work so that most weight is at home.

    Optimal for k <= 256 equal bins, O(k^3); beyond, best pairs first, and regions do not count.
    """
    from scipy.optimize import linear_sum_assignment

    alike = np.stack([problem.kind_of, problem.speeds, problem.carried_work, *problem.room], axis=1)
    if (alike == alike[0]).all():
        groups = [np.arange(problem.num_bins)]
    else:
        group_of = np.unique(alike, axis=0, return_inverse=True)[1].ravel()
        groups = [np.flatnonzero(group_of == group) for group in range(int(group_of.max()) + 1)]
    label = np.arange(problem.num_bins)
    for bins in groups:
        if 1 < bins.size <= _MAX_EXACT:
            rows, columns = linear_sum_assignment(_gains(bin_of, bins, homes), maximize=True)
            label[bins[rows]] = bins[columns]
        elif bins.size > 1:
            label[bins] = _match(bin_of, bins, homes, problem.num_bins)
    return label[bin_of]


def _gains(bin_of: Ints, bins: Ints, homes: Homes) -> Floats:
    """Return the (k, k) weight that comes home if the bin of a row takes the place of a column."""
    num = bins.size
    row_of = np.full(max(int(bins.max()), int(bin_of.max()), int(homes.bins.max())) + 2, -1)
    row_of[bins] = np.arange(num)
    row, column = row_of[bin_of], row_of[homes.bins]
    there = (row >= 0) & (column >= 0)
    weights = homes.weights
    if homes.home_share is not None:
        weights = weights * homes.home_share[homes.bins]
    gains = np.bincount(row[there] * num + column[there], weights[there], num * num)
    gains = gains.reshape(num, num).astype(np.float64)
    regions = homes.regions
    if regions is None:
        return gains
    here, shares = row >= 0, regions.shares[bins]
    cell = row[here] * shares.shape[1] + regions.of_items[here]
    from_region = np.bincount(cell, regions.weights[here], shares.size).reshape(shares.shape)
    return from_region @ shares.T + gains


def _match(bin_of: Ints, bins: Ints, homes: Homes, num_bins: int) -> Ints:
    """Label many equal bins: in rounds, pairs that are each other's best choice."""
    member = np.zeros(num_bins + 1, dtype=bool)
    member[bins] = True
    useful = member[bin_of] & member[homes.bins]
    cell = bin_of[useful] * num_bins + homes.bins[useful]
    pairs, place = np.unique(cell, return_inverse=True)
    gain = np.bincount(place.ravel(), homes.weights[useful], pairs.size)
    order = np.argsort(-gain, kind="stable")
    rows, columns = pairs[order] // num_bins, pairs[order] % num_bins
    label = np.full(num_bins, -1)
    taken = np.zeros(num_bins, dtype=bool)
    while rows.size:
        first_row, first_column = np.zeros((2, rows.size), dtype=bool)
        first_row[np.unique(rows, return_index=True)[1]] = True
        first_column[np.unique(columns, return_index=True)[1]] = True
        best = first_row & first_column
        label[rows[best]] = columns[best]
        taken[columns[best]] = True
        free = (label[rows] < 0) & ~taken[columns]
        rows, columns = rows[free], columns[free]
    label[bins[label[bins] < 0]] = bins[~taken[bins]]
    return label[bins]
