"""Fewest size units away from home, at a makespan within a tolerance of the best found."""

import numpy as np
from scipy.optimize import linear_sum_assignment

from bascule.plan.solver.constrain import Homes, constrain, total_excess
from bascule.plan.solver.problem import Floats, Ints, Problem

_MAX_RELABELLED = 1024
"""Largest set of equal bins that is relabelled: the assignment problem is cubic."""


def bring_home(problem: Problem, bin_of: Ints, homes: Homes) -> Ints:
    """Move items home without passing the ceiling or a limit.

    Everything at home, repaired by the exchanges that move least, is the best where it succeeds.
    Otherwise the given answer is, or the same with equal bins relabelled to where their items come
    from. What fits is then pulled home. O(n log n) without the repair.

    Args:
        problem: Items, bins and limits.
        bin_of: An assignment within the limits and the ceiling.
        homes: Preferred bins, the weights, and the ceiling.
    """
    start = np.where(homes.bins >= 0, homes.bins, bin_of)
    relabelled = _relabel(problem, bin_of, homes)
    repaired = _pull(problem, constrain(problem, start, homes.ceiling, homes), homes)
    candidates = [bin_of, relabelled, repaired]
    if not _within(problem, repaired, homes):
        candidates = [_pull(problem, candidate, homes) for candidate in candidates[:2]]
    return min(candidates, key=homes.away)


def _within(problem: Problem, bin_of: Ints, homes: Homes) -> bool:
    return problem.makespan(bin_of) <= homes.ceiling and not total_excess(problem, bin_of)


def _relabel(problem: Problem, bin_of: Ints, homes: Homes) -> Ints:
    """Permute bins of equal speed, limit and carried work so that most weight is at home."""
    limits = np.zeros(problem.num_bins) if problem.capacity is None else problem.capacity
    kinds = np.stack([problem.speeds, problem.carried_work, limits], axis=1)
    kind_of = np.unique(kinds, axis=0, return_inverse=True)[1].ravel()
    label = np.arange(problem.num_bins)
    for kind in range(int(kind_of.max()) + 1):
        bins = np.flatnonzero(kind_of == kind)
        if not 1 < bins.size <= _MAX_RELABELLED:
            continue
        position = np.full(problem.num_bins + 1, -1)
        position[bins] = np.arange(bins.size)
        source, wanted = position[bin_of], position[homes.bins]
        counted = (source >= 0) & (wanted >= 0)
        gain = np.zeros((bins.size, bins.size))
        np.add.at(gain, (source[counted], wanted[counted]), homes.weights[counted])
        rows, columns = linear_sum_assignment(gain, maximize=True)
        label[bins[rows]] = bins[columns]
    return label[bin_of]


def _pull(problem: Problem, bin_of: Ints, homes: Homes) -> Ints:
    """Move items home, heaviest first, where they fit or can swap with an item that gains too.

    An item swaps with one that is away in its home bin, best with one that comes home, too.
    """
    bin_of = bin_of.copy()
    room = _Room(problem, bin_of, homes.ceiling)
    away = np.flatnonzero((homes.bins >= 0) & (homes.bins != bin_of))
    guests: list[list[int]] = [[] for _ in range(problem.num_bins)]
    for item in np.flatnonzero(homes.bins != bin_of).tolist():
        guests[int(bin_of[item])].append(item)
    for item in away[np.argsort(-homes.weights[away], kind="stable")].tolist():
        source, home = int(bin_of[item]), int(homes.bins[item])
        if source == home:
            continue
        partner = -1
        if not room.fits(item, source, home, -1):
            swaps = [g for g in guests[home] if room.fits(item, source, home, g)]
            if not swaps:
                continue
            partner = max(swaps, key=lambda g: float(homes.weights[g]) * (homes.bins[g] == source))
            guests[home].remove(partner)
            if homes.bins[partner] != source:  # one that came home stays
                guests[source].append(partner)
            bin_of[partner] = source
        room.move(item, source, home, partner)
        guests[source].remove(item)
        bin_of[item] = home
    return bin_of


class _Room:
    """What each bin holds, and whether an exchange keeps two bins within what they can hold."""

    def __init__(self, problem: Problem, bin_of: Ints, ceiling: float) -> None:
        num_bins, num_items = problem.num_bins, problem.num_items
        unlimited = np.full(num_bins, np.inf)
        sizes: Floats = np.zeros(num_items) if problem.sizes is None else problem.sizes
        capacity = unlimited if problem.capacity is None else problem.capacity
        counts = np.ones(num_items)
        most = unlimited if problem.max_items is None else np.full(num_bins, problem.max_items)
        # Per resource: use per item, used per bin, limit per bin.
        limits = (problem.speeds * ceiling, capacity, most)
        self._use = np.stack([problem.work, sizes, counts]).T.tolist()
        self._limit = np.stack(limits).T.tolist()
        used = [
            problem.bin_work(bin_of),
            np.bincount(bin_of, weights=sizes, minlength=num_bins),
            np.bincount(bin_of, minlength=num_bins),
        ]
        self._used = np.stack(used).T.tolist()

    def fits(self, item: int, source: int, home: int, partner: int) -> bool:
        """Whether ``item`` may move from ``source`` home, and ``partner`` back (-1: none)."""
        back = (0.0, 0.0, 0.0) if partner < 0 else self._use[partner]
        for kind in range(3):
            change = self._use[item][kind] - back[kind]
            if change > 0.0 and self._used[home][kind] + change > self._limit[home][kind]:
                return False
            if change < 0.0 and self._used[source][kind] - change > self._limit[source][kind]:
                return False
        return True

    def move(self, item: int, source: int, home: int, partner: int) -> None:
        """Account for the exchange."""
        back = (0.0, 0.0, 0.0) if partner < 0 else self._use[partner]
        for kind in range(3):
            change = self._use[item][kind] - back[kind]
            self._used[home][kind] += change
            self._used[source][kind] -= change
