"""Bounded moves and swaps between late and early bins, many pairs of bins at a time.

One round pairs the late bins (completing after the target) with the early ones, latest with
earliest, and finds for every late bin the exchange that leaves the pair of bins with the smallest
maximum: an item moved, or two swapped. All pairs are searched together: for an item of the late
bin the ideal return is known, and a binary search among the early bin's items finds its
neighbours. Where single items no longer help, groups of one or two items are exchanged.
"""

from dataclasses import dataclass

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.plan.solver.problem import Problem
from bascule.plan.solver.search import (
    Groups,
    Moves,
    Offers,
    Pairing,
    best_exchanges,
    bin_groups,
    match_bins,
    split_groups,
)

MAX_ROUNDS = 64
"""Step budget of a refinement, in rounds."""

_MAX_LOOKUPS_PER_ITEM = 12
"""Step budget of a refinement, in binary searches per item (see ``_FREE_LOOKUPS``)."""

_FREE_LOOKUPS = 1 << 16
"""Binary searches that a refinement of any size may spend."""


@dataclass(slots=True)
class _State:
    """The assignment being refined; items are numbered by ascending work.

    Attributes:
        problem: Items and bins.
        work: Work per item, ascending.
        bin_of: Bin per item.
        loads: Work per bin.
    """

    problem: Problem
    work: Floats
    bin_of: Ints
    loads: Floats

    def make(self, moves: Moves) -> None:
        """Move items to bins."""
        self.bin_of[moves[0]] = moves[1]
        moved = np.bincount(self.bin_of, self.work, self.loads.size)
        self.loads = self.problem.carried_work + moved


def refine(problem: Problem, bin_of: Ints, target: float) -> Ints:
    """Improve an assignment until it completes by ``target`` or the step budget ends.

    Never worse than its start: an exchange only ever lowers the later of two bins.
    O((n + m) log n) per round, at most ``MAX_ROUNDS`` rounds.

    Args:
        problem: Items and bins of one kind; its limits are ignored.
        bin_of: The start.
        target: Completion time, in units of work per unit of speed, that is good enough.
    """
    ascending = problem.order[::-1]
    state = _State(problem, problem.work[ascending], bin_of[ascending], problem.bin_work(bin_of))
    budget = _FREE_LOOKUPS + _MAX_LOOKUPS_PER_ITEM * problem.num_items
    depth = 0
    for _ in range(MAX_ROUNDS):
        pairing = _pair_bins(state, target, alone=depth > 0)
        if pairing is None or budget < 0:
            break
        slots = pairing.slot_of_bin(problem.num_bins)[state.bin_of]
        groups = bin_groups(state.work, slots, in_twos=depth > 0)
        lookups = _exchange(state, pairing, groups)
        if lookups == 0:
            if depth:
                break
            depth = 1
        else:
            depth = 0
        budget -= lookups
    refined = np.empty_like(bin_of)
    refined[ascending] = state.bin_of
    return refined


def _pair_bins(state: _State, target: float, *, alone: bool) -> Pairing | None:
    """Pair the late bins with the early ones; ``alone``: the latest with all. None: all is done."""
    times = state.loads / state.problem.speeds
    late = np.flatnonzero((times > target) & (state.loads > state.problem.carried_work))
    if late.size == 0:
        return None
    late = late[np.argsort(-times[late], kind="stable")]
    if alone:
        late, target = late[:1], float(times[late[0]])
    early = np.flatnonzero(times < target)
    return match_bins(late, early[np.argsort(times[early], kind="stable")])


def _exchange(state: _State, pairing: Pairing, groups: Groups) -> int:
    """Make the best exchange of every late bin that has one; returns the lookups, 0 if none."""
    given, offered = split_groups(groups, pairing.late.size)
    offers = _search(state, pairing, given, offered)
    before = state.loads[pairing.late] / state.problem.speeds[pairing.late]
    moves = best_exchanges(pairing, given, offered, offers, before)
    if moves is None:
        return 0
    state.make(moves)
    return given.slot.size * pairing.early.shape[0]


def _search(state: _State, pairing: Pairing, given: Groups, offered: Groups) -> Offers:
    """For every given group, the early bin and the return with the earliest later bin.

    With an exchange that lowers the late bin by d, both complete together at the ideal
    d = (t_late - t_early) / (1 / s_late + 1 / s_early). A return that leaves d above the ideal
    makes the early bin the later of the two, and one that leaves d below it the late bin.
    """
    speeds, loads, shape = state.problem.speeds, state.loads, pairing.early.shape
    late_speed, early_speed = speeds[pairing.late], speeds[pairing.early]
    late_load, early_load = loads[pairing.late], loads[pairing.early]
    ideal = (late_load / late_speed - early_load / early_speed) / (
        1.0 / late_speed + 1.0 / early_speed
    )
    shelf = _shelve(offered, pairing.early.size, 2.0 * float(state.work[-1]))
    lane = given.slot
    wanted = (shelf.keys[shelf.opens].reshape(shape) - ideal)[:, lane] + given.work
    found = np.searchsorted(shelf.keys, wanted.ravel()).reshape(wanted.shape)
    found = np.maximum(found, shelf.opens.reshape(shape)[:, lane])
    early_after = (early_load[:, lane] + given.work - shelf.below[found - 1]) / early_speed[:, lane]
    late_after = (late_load[lane] - given.work + shelf.above[found]) / late_speed[lane]
    scores = np.minimum(early_after, late_after)
    row, column = scores.argmin(axis=0), np.arange(lane.size)
    place = found[row, column]
    place -= early_after[row, column] <= late_after[row, column]
    return Offers(scores[row, column], row, shelf.index[place])


@dataclass(frozen=True, slots=True)
class _Shelf:
    """The early bins' groups in one sorted array.

    Per bin it holds nothing (work 0), the groups by work, and a stop.

    Attributes:
        keys: Ascending: ``bin * stride + work``.
        opens: Per bin, the position of its nothing.
        below: Work of a return at a position, seen from above it; -inf at a stop.
        above: Work of a return at a position, seen from below it; inf at a stop.
        index: The group at a position; -1 if none.
    """

    keys: Floats
    opens: Ints
    below: Floats
    above: Floats
    index: Ints


def _shelve(offered: Groups, num_bins: int, most_work: float) -> _Shelf:
    """Sort groups of at most ``most_work`` by bin and work; no lookup passes a bin's stop."""
    bins = np.arange(num_bins + 1)
    ends = np.searchsorted(offered.slot, bins) + 2 * bins
    opens, stops = ends[:-1], ends[1:] - 1
    places = np.arange(offered.slot.size) + 2 * offered.slot + 1
    size = offered.slot.size + 2 * num_bins
    below, index = np.zeros(size), np.full(size, -1)
    below[places], index[places] = offered.work, np.arange(offered.slot.size)
    below[stops] = 1.5 * most_work
    keys = below + np.repeat(2.0 * most_work * bins[:-1], stops - opens + 1)
    below[stops] = -np.inf
    return _Shelf(keys, opens, below, np.abs(below), index)
