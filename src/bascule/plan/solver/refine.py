"""Bounded moves and swaps between late and early bins, many pairs of bins at a time.

One round pairs the late bins (completing after the target) with the early ones, latest with
earliest, and finds for every late bin the exchange that leaves the pair of bins with the smallest
maximum: an item moved, or two swapped. All pairs are searched together: for an item of the late
bin the ideal return is known, and a binary search among the early bin's items finds its
neighbours. Where single items no longer help, groups of one or two items are exchanged.
"""

from dataclasses import dataclass

import numpy as np

from bascule.plan.solver.problem import Floats, Ints, Problem

MAX_ROUNDS = 64
"""Step budget of a refinement, in rounds."""

_MAX_LOOKUPS_PER_ITEM = 12
"""Step budget of a refinement, in binary searches per item (see ``_FREE_LOOKUPS``)."""

_FREE_LOOKUPS = 1 << 16
"""Binary searches that a refinement of any size may spend."""

_MAX_GROUPS = 1 << 13
"""Most groups of two items in one round."""

_MAX_SAMPLED = 32
"""Most items of a bin that form groups of two."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """Late bins and the early bins that each is compared with.

    Attributes:
        late: (K,) late bins, latest first.
        early: (M, K) early bins; column k is compared with late bin k; no bin occurs twice.
    """

    late: Ints
    early: Ints


@dataclass(frozen=True, slots=True)
class Groups:
    """One or two items of a bin that leave it together, sorted by slot, then by work.

    Attributes:
        slot: Position of the bin among the bins compared.
        work: Work of the items together.
        first: The item.
        second: The second item; -1 if there is none.
    """

    slot: Ints
    work: Floats
    first: Ints
    second: Ints

    def take(self, index: Ints | slice) -> "Groups":
        """The groups at ``index``."""
        return Groups(self.slot[index], self.work[index], self.first[index], self.second[index])


@dataclass(frozen=True, slots=True)
class Offers:
    """The best exchange found for each group that a late bin could give.

    Attributes:
        score: What the exchange leaves behind; lower is better.
        row: Row of the early bin in ``Pairing.early``.
        taken: The group that comes back, an index; -1 if none does.
    """

    score: Floats
    row: Ints
    taken: Ints


@dataclass(slots=True)
class State:
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

    def move(self, items: Ints, bins: Ints) -> None:
        """Move each item to a bin; entries of -1 are skipped."""
        real = items >= 0
        self.bin_of[items[real]] = bins[real]
        moved = np.bincount(self.bin_of, self.work, self.loads.size)
        self.loads = self.problem.carried_work + moved


def refine(problem: Problem, bin_of: Ints, target: float) -> Ints:
    """Improve an assignment until it completes by ``target`` or the step budget ends.

    Never worse than its start: an exchange only ever lowers the later of two bins.
    O((n + m) log n) per round, at most ``MAX_ROUNDS`` rounds.

    Args:
        problem: Items and bins; its limits are ignored.
        bin_of: The start.
        target: Completion time, in units of work per unit of speed, that is good enough.
    """
    ascending = problem.order[::-1]
    state = State(problem, problem.work[ascending], bin_of[ascending], problem.bin_work(bin_of))
    budget = _FREE_LOOKUPS + _MAX_LOOKUPS_PER_ITEM * problem.num_items
    depth = 0
    for _ in range(MAX_ROUNDS):
        pairing = _pair_bins(state, target, alone=depth > 0)
        if pairing is None or budget < 0:
            break
        groups = bin_groups(state, pairing, in_twos=depth > 0)
        lookups = _exchange(state, pairing, groups)
        if lookups == 0:
            if depth:
                break
            depth = 1
        else:
            depth = 0
        budget -= abs(lookups)
    refined = np.empty_like(bin_of)
    refined[ascending] = state.bin_of
    return refined


def _pair_bins(state: State, target: float, *, alone: bool) -> Pairing | None:
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


def match_bins(late: Ints, early: Ints) -> Pairing | None:
    """Compare the k-th late bin with the k-th early one, and with every K-th after it."""
    if late.size == 0 or early.size == 0:
        return None
    late = late[: early.size]
    num_each = early.size // late.size
    return Pairing(late, early[: num_each * late.size].reshape(num_each, late.size))


def bin_groups(state: State, pairing: Pairing, *, in_twos: bool) -> Groups:
    """Items of the paired bins: slots 0..K-1 are the late bins, then the early ones."""
    num_items = state.work.size
    bins = np.concatenate((pairing.late, pairing.early.ravel()))
    slot_of = np.full(state.problem.num_bins, -1)
    slot_of[bins] = np.arange(bins.size)
    keys = slot_of[state.bin_of] * num_items + np.arange(num_items)
    keys = np.sort(keys[keys >= 0])
    slot, item = np.divmod(keys, num_items)
    singles = Groups(slot, state.work[item], item, np.full(item.size, -1))
    return _in_twos(singles) if in_twos else singles


def _in_twos(singles: Groups) -> Groups:
    """Add groups of two items of a bin, for as many bins as the budget allows.

    From a bin with many items, an even sample by work is taken.
    """
    sampled = singles.take(sample(singles.slot, _MAX_SAMPLED))
    counts = np.bincount(sampled.slot)
    allowed = np.cumsum(counts * (counts - 1) // 2) <= _MAX_GROUPS
    inside = sampled.take(np.flatnonzero(allowed[sampled.slot]))
    ends = np.cumsum(counts)[inside.slot]
    index = np.arange(inside.slot.size)
    partners = ends - index - 1
    one = np.repeat(index, partners)
    offset = np.arange(one.size) - np.repeat(np.cumsum(partners) - partners, partners)
    other = one + 1 + offset
    slot = np.concatenate((singles.slot, inside.slot[one]))
    work = np.concatenate((singles.work, inside.work[one] + inside.work[other]))
    first = np.concatenate((singles.first, inside.first[one]))
    second = np.concatenate((singles.second, inside.first[other]))
    order = np.lexsort((work, slot))
    return Groups(slot, work, first, second).take(order)


def sample(slot: Ints, most: int) -> Ints:
    """Indices of at most ``most`` evenly spaced entries of each slot; slots ascend."""
    counts = np.bincount(slot)
    within = np.arange(slot.size) - (np.cumsum(counts) - counts)[slot]
    span = np.maximum(counts, most)[slot]
    return np.flatnonzero(within * most // span != (within - 1) * most // span)


def _exchange(state: State, pairing: Pairing, groups: Groups) -> int:
    """Make the best exchange of every late bin that has one; returns the lookups, 0 if none."""
    given, offered = split_groups(groups, pairing.late.size)
    offers = _search(state, pairing, given, offered)
    before = state.loads[pairing.late] / state.problem.speeds[pairing.late]
    improved = make_exchanges(state, pairing, given, offered, offers, before)
    return given.slot.size * pairing.early.shape[0] if improved else 0


def split_groups(groups: Groups, num_late: int) -> tuple[Groups, Groups]:
    """The groups of the late bins, and those of the early ones with slots from 0."""
    split = int(np.searchsorted(groups.slot, num_late))
    late, early = groups.take(slice(split)), groups.take(slice(split, None))
    return late, Groups(early.slot - num_late, early.work, early.first, early.second)


def make_exchanges(
    state: State,
    pairing: Pairing,
    given: Groups,
    offered: Groups,
    offers: Offers,
    before: Floats,
) -> bool:
    """Per late bin, make the offer with the lowest score, ties to the first, if below ``before``.

    Every late bin must have a group. Returns whether any exchange was made.
    """
    lanes = np.arange(pairing.late.size)
    best = np.minimum.reduceat(offers.score, np.searchsorted(given.slot, lanes))
    improved = np.flatnonzero(best < before)
    if improved.size == 0:
        return False
    hits = np.flatnonzero(offers.score == best[given.slot])[::-1]
    chosen = np.empty_like(lanes)
    chosen[given.slot[hits]] = hits  # of several hits in a slot the last written, first one stays
    chosen = chosen[improved]
    taken = offers.taken[chosen]
    some = taken >= 0
    early = pairing.early[offers.row[chosen], improved]
    late, taken = pairing.late[improved][some], taken[some]
    parts = (given.first[chosen], given.second[chosen], offered.first[taken], offered.second[taken])
    state.move(np.concatenate(parts), np.concatenate((early, early, late, late)))
    return True


def _search(state: State, pairing: Pairing, given: Groups, offered: Groups) -> Offers:
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
